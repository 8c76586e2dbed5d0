"""Unit tests of handlers and tasks: contexts without a queue, and checks of what was enqueued.

async def test_send():
    ctx = context(attempt=2)
    assert await send(ctx, to="a") == "sent"
    assert ctx.reports == [(0.5, "half of it")]

async def test_checkout():
    async with Database("memory://test", plugins=[emails]):
        emails.pause()
        await checkout()
        await assert_enqueued(send, to="a")
"""

from typing import Any, NoReturn

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.messages import Completed, Failed, HandlerVerdict, MessageState
from jobsync.errors import Invalid
from jobsync.queue.backend import Message, MessageInfo, Receipt
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.tasks import TaskCall
from jobsync.safe_text import safe_repr, safe_str

__all__ = [
    "RecordedBlockingContext",
    "RecordedContext",
    "assert_enqueued",
    "blocking_context",
    "context",
]

_STATES: tuple[MessageState, ...] = ("ready", "waiting", "blocked", "claimed", "dead")
"""Those in which a message has its arguments."""
_PAGE = 1_000
_SHOWN = 5


class _ContextRecord:
    """What a handler has done with its context; stands for the worker."""

    def __init__(self) -> None:
        self.verdicts: list[HandlerVerdict] = []
        self.reports: list[tuple[float, str]] = []
        self.extensions: list[float] = []

    async def settle(self, message: Message, verdict: HandlerVerdict) -> bool:
        del message
        self.verdicts.append(verdict)
        return True

    async def extend(self, message: Message, seconds: float) -> bool:
        del message
        self.extensions.append(seconds)
        return True

    def report_progress(self, message: Message, progress: float, note: str) -> None:
        del message
        self.reports.append((progress, note))

    def open_transaction(
        self, message: Message, limit: float | None, *, is_blocking: bool
    ) -> NoReturn:
        del message, limit, is_blocking
        fix = "run the handler by a queue on sqlite:///: await queue.drain()"
        raise Invalid("transaction", "…", "is not possible without a queue", fix)


class RecordedContext(Context):
    """A context for a test of a coroutine function, without a queue.

    Attributes:
        verdicts: what `ack` and `nack` have settled.
        reports: what `progress` was called with.
        extensions: the seconds of `extend`.
    """

    def __init__(self, message: Message, worker_id: str, timeout: float | None) -> None:
        record = _ContextRecord()
        super().__init__(message, worker_id, Components.system().clock, timeout, record)
        self.verdicts = record.verdicts
        self.reports = record.reports
        self.extensions = record.extensions


class RecordedBlockingContext(BlockingContext):
    """Likewise, for a plain function."""

    def __init__(self, inner: RecordedContext) -> None:
        # No loop is used: nothing here waits for a worker.
        super().__init__(inner, None)  # type: ignore[arg-type]
        self.verdicts = inner.verdicts
        self.reports = inner.reports
        self.extensions = inner.extensions

    def extend(self, seconds: float) -> bool:
        """Record the seconds."""
        self.extensions.append(seconds)
        return True

    def ack(self, result: Json = None) -> bool:
        """Record that the message is completed."""
        self.verdicts.append(Completed(result))
        return True

    def nack(self, error: object = "not acknowledged") -> bool:
        """Record that the attempt has failed."""
        self.verdicts.append(Failed(safe_str(error)))
        return True

    def progress(self, progress: float, note: str = "") -> None:
        """Record how far the function is."""
        self.reports.append((progress, note))


def context(
    *,
    id: str = "message-1",
    attempt: int = 1,
    max_attempts: int = 4,
    worker_id: str = "test",
    timeout: float | None = None,
) -> RecordedContext:
    """Return a context for a test of a handler, which records what the handler does with it."""
    message = Message(
        receipt=Receipt(id, attempt, "test"),
        value={"id": id},
        attempt=attempt,
        max_attempts=max_attempts,
        timeout=timeout,
        is_suspect=False,
        enqueued=0.0,
    )
    return RecordedContext(message, worker_id, timeout)


def blocking_context(**facts: Any) -> RecordedBlockingContext:
    """Return a context for a test of a plain function; see `context`."""
    return RecordedBlockingContext(context(**facts))


async def assert_enqueued(task: TaskCall[..., Any], **arguments: Any) -> MessageInfo:
    """Check that a call of a task was enqueued; return its message.

    Pause the queue before, or use a process without workers: a completed message has no arguments.

    Args:
        task: the task.
        arguments: those that the call must have; others may have any value.

    Raises:
        AssertionError: there is none; lists the calls of the task that there are.
        Invalid: an argument is not one of the task's.
    """
    wanted = task.encode_some(**arguments)
    found: list[MessageInfo] = []
    for state in _STATES:
        after = ""
        while page := await task.queue.browse(state, after=after, limit=_PAGE):
            found += [each for each in page if each.task == task.name]
            after = page[-1].cursor
    for message in found:
        if wanted.items() <= message.value.items():
            return message
    calls = [safe_repr(message.value) for message in found[:_SHOWN]]
    listed = ", ".join(calls) if calls else "none"
    raise AssertionError(
        f"no call of {task.name} with {safe_repr(dict(wanted))} is enqueued; there are"
        f" {len(found)}: {listed}"
    )
