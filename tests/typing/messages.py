"""Types of queues and their messages: right uses, and wrong ones with the errors of each checker.

Nothing here runs; see `tasks.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import msgspec

from jobsync import BlockingContext, ClaimedMessage, Context, Document, MessageInfo, QueuePlugin


class Mail(msgspec.Struct):
    """A message."""

    to: str
    subject: str = "Hello"


@dataclass
class Order:
    """A message."""

    number: int


class Visit(TypedDict):
    """A message."""

    page: str


async def handle_mail(mail: Mail) -> None:
    """A handler."""
    assert_type(mail.to, str)


def print_mail(mail: Mail, context: BlockingContext) -> str:
    """A plain handler with a context."""
    return f"{mail.to}, attempt {context.attempt}"


async def handle_any(task: Document, context: Context) -> None:
    """A handler of messages without a type."""
    context.progress(task.done)


async def take_nothing() -> None:
    """Not a handler."""


async def take_three(mail: Mail, context: Context, more: int) -> None:
    """Not a handler."""


def on_complete(task: object, result: object) -> None:
    """A callback."""


emails = QueuePlugin("emails", payload=Mail, on_message=handle_mail)
orders = QueuePlugin("orders", payload=Order)
visits = QueuePlugin("visits", payload=Visit)
plain = QueuePlugin("plain", on_message=handle_any, workers=3, max_retries=2, order="priority")
limited = QueuePlugin(
    "limited", max_concurrency=3, rate_limit="10/second", heartbeat_interval=1.0, backoff=float
)
assert_type(emails, QueuePlugin[Mail])
assert_type(orders, QueuePlugin[Order])
assert_type(visits, QueuePlugin[Visit])
assert_type(plain, QueuePlugin[Document])
without_parameters: QueuePlugin = plain


@orders.handler
async def handle_order(order: Order, context: Context) -> int:
    """A handler, added by the decorator."""
    return order.number + context.attempt


@visits.handler
def handle_visit(visit: Visit) -> None:
    """Likewise."""
    assert_type(visit["page"], str)


@plain.handler
async def handle_mapping(task: Mapping[str, Any]) -> None:
    """A document is a mapping."""
    assert task["done"]


async def right() -> None:
    """What is accepted, and its types."""
    QueuePlugin("emails", payload=Mail, on_message=print_mail, on_complete=on_complete)
    assert_type(await emails.enqueue(Mail("a")), str)
    assert_type(await emails.enqueue({"to": "a"}, delay=3, key="x"), str)
    assert_type(await emails.enqueue_many([Mail("a"), {"to": "b"}], priority=3), list[str])
    assert_type(emails.enqueue_sync(Mail("a"), group="x"), str)
    assert_type(await emails.claim(3), list[ClaimedMessage[Mail]])
    assert_type((await emails.claim())[0].data, Mail)
    assert_type((await plain.claim())[0].data, Document)
    assert_type(await visits.enqueue({"page": "/"}), str)
    assert_type(await emails.get("x"), MessageInfo | None)


async def wrong() -> None:
    """What is refused."""
    QueuePlugin("emails", payload=Mail, on_message=handle_any)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    QueuePlugin("emails", on_message=handle_mail)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    QueuePlugin("emails", on_message=take_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    QueuePlugin("emails", payload=Mail, on_message=take_three)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    QueuePlugin("emails", on_complete=take_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    QueuePlugin("emails", visibility_timout=3.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    QueuePlugin("emails", concurrency="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    QueuePlugin("emails", order="newest")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    QueuePlugin("emails", payload=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    orders.handler(handle_mail)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    plain.handler(take_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await emails.enqueue(Order(3))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await emails.enqueue("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await emails.enqueue(Mail("a"), dely=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await emails.enqueue(Mail("a"), priority="high")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await emails.enqueue_many([Order(3)])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    await plain.enqueue(Mail("a"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await plain.enqueue_many([{}], max_attempt=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
