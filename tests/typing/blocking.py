"""Types of `jobsync.sync`: right uses, and wrong ones with the errors of each checker.

Nothing here runs; see `tasks.py`.
"""

from typing import assert_type

import msgspec

from jobsync import Context, Document, MessageInfo
from jobsync.sync import ClaimedMessage, Database, QueuePlugin, TaskHandle


class Mail(msgspec.Struct):
    """A message."""

    to: str


emails = QueuePlugin("emails", payload=Mail, workers=3)
plain = QueuePlugin("plain")
assert_type(emails, QueuePlugin[Mail])
assert_type(plain, QueuePlugin[Document])


@emails.handler
def handle(mail: Mail) -> None:
    """A handler."""
    assert_type(mail.to, str)


@emails.task
def send(to: str, subject: str = "Hello") -> str:
    """A task without options."""
    return to + subject


@emails.task(max_retries=5)
async def track(context: Context, days: int = 1) -> None:
    """A task with options."""
    context.progress(days)


def right(db: Database) -> None:
    """What is accepted, and its types."""
    db.use_plugin(emails)
    assert_type(emails.enqueue(Mail("a")), str)
    assert_type(emails.enqueue({"to": "a"}, delay=3), str)
    assert_type(emails.claim(), list[ClaimedMessage[Mail]])
    assert_type(emails.claim()[0].data, Mail)
    assert_type(send.enqueue("a", subject="b"), TaskHandle[str])
    assert_type(send.enqueue("a").result(timeout=3), str)
    assert_type(send.with_options(delay=3).enqueue("a").cancel(), bool)
    assert_type(send.enqueue_many([{"to": "a"}]), list[TaskHandle[str]])
    assert_type(track.enqueue(days=3).get(), MessageInfo | None)
    assert_type(send("a"), str)


def wrong() -> None:
    """What is refused."""
    QueuePlugin("emails", visibility_timout=3.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    plain.handler(handle)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    emails.enqueue(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    emails.enqueue(Mail("a"), dely=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    send.enqueue(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    send.enqueue()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    send.with_options(dely=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    emails.task(max_retrys=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
