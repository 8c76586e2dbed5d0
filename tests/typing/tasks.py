"""Types of tasks: right calls, and wrong ones with the errors by which each checker refuses them.

Nothing here runs. `make lint` checks it: an `ignore` that is not needed is an error, so each wrong
call is one that mypy and pyright refuse, with these codes.
"""

from datetime import timedelta
from typing import assert_type

from jobsync import BlockingContext, Context, MessageInfo, QueuePlugin, TaskHandle

emails = QueuePlugin("emails")


@emails.task(max_retries=5, timeout=30, backoff=lambda failures: 2.0 * failures)
async def send(to: str, subject: str = "Hello") -> str:
    """A coroutine function, with options."""
    return to + subject


@emails.task(max_concurrency=3, rate_limit="10/second", rate_burst=5)
def resize(context: BlockingContext, width: int, *, crop: bool = False) -> list[int]:
    """A plain function with a context, and limits."""
    return [context.attempt, width * crop]


@emails.task(name="track", cron="0 3 * * *", timezone="Europe/Berlin")
async def track(context: Context, days: int = 1) -> None:
    """A coroutine function with a context."""
    context.progress(days)


@emails.task
async def clean(context: Context) -> int:
    """A function without options, and without arguments."""
    return context.attempt


async def right(context: Context, blocking: BlockingContext) -> None:
    """What is accepted, and its types."""
    assert_type(await send.enqueue("a"), TaskHandle[str])
    assert_type(await (await send.enqueue(to="a", subject="b")).result(timeout=3), str)
    assert_type(await send.with_options(delay=timedelta(1), key="x").enqueue("a"), TaskHandle[str])
    assert_type(await send.enqueue_many([{"to": "a"}]), list[TaskHandle[str]])
    assert_type(await (await resize.enqueue(3, crop=True)).result(), list[int])
    assert_type(await (await track.enqueue(days=3)).get(), MessageInfo | None)
    assert_type(await (await clean.enqueue()).result(), int)
    assert_type(await send("a", "b"), str)
    assert_type(resize(blocking, 3), list[int])
    await track(context, 3)


async def wrong(context: Context) -> None:
    """What is refused."""
    await send.enqueue()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await send.enqueue(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await send.enqueue(too="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await send.with_options(dely=3)  # type: ignore[call-arg, misc]  # pyright: ignore[reportCallIssue]
    await send.with_options(delay="3").enqueue("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await resize.enqueue("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await track.enqueue(context, 3)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    await (await send.enqueue("a")).result(3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    send("a", 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    emails.task(max_retrys=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    emails.task(rate_limit=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    emails.task(timeout="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
