"""The context of a handler: the same for coroutines and for plain functions on their threads."""

import asyncio
import gc
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync import MessageClaimLost
from jobsync.core.messages import Completed, Failed, HandlerVerdict
from jobsync.queue.backend import Message, Receipt
from jobsync.queue.context import BlockingContext, ClaimOwner, Context

MESSAGE = Message(
    receipt=Receipt("id-1", 7, "claim-1"),
    value={},
    attempt=2,
    max_attempts=4,
    timeout=None,
    is_suspect=False,
    enqueued=0.0,
)
BOTH = pytest.mark.parametrize("is_blocking", [False, True])


class Owner:
    """A worker that records what contexts ask of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer = True

    async def settle(self, message: Message, verdict: HandlerVerdict) -> bool:
        assert message is MESSAGE
        self.calls.append(verdict)
        return self.answer

    async def extend(self, message: Message, seconds: float) -> bool:
        assert message is MESSAGE
        self.calls.append(("extend", seconds))
        return self.answer

    def report_progress(self, message: Message, progress: float, note: str) -> None:
        assert message is MESSAGE
        self.calls.append(("progress", progress, note))


async def call(owner: Owner, work: Callable[[Any], Any], *, is_blocking: bool) -> Any:
    """Use a context as a coroutine does, or on a thread as a plain function does."""
    context = Context(MESSAGE, "worker-1", FakeClock(), 30.0, cast("ClaimOwner", owner))
    if is_blocking:
        blocking = BlockingContext(context, asyncio.get_running_loop())
        result = await asyncio.to_thread(work, blocking)
    else:
        result = work(context)
        result = await result if inspect.isawaitable(result) else result
    # What a thread has passed to the loop without waiting for it.
    await asyncio.sleep(0)
    return result


@BOTH
async def test_a_context_says_what_its_message_is(*, is_blocking: bool) -> None:
    """The epoch counts deliveries, and not attempts: those that were returned count too."""

    def read(context: Any) -> tuple[Any, ...]:
        return (
            *(context.id, context.attempt, context.max_attempts, context.epoch),
            *(context.worker_id, context.lost, context.deadline),
        )

    found = await call(Owner(), read, is_blocking=is_blocking)
    assert found == ("id-1", 2, 4, 7, "worker-1", False, FakeClock().wall() + 30.0)


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize(
    ("work", "asked"),
    [
        (lambda context: context.ack(), Completed()),
        (lambda context: context.ack({"n": 1}), Completed({"n": 1})),
        (lambda context: context.nack(), Failed("not acknowledged")),
        (lambda context: context.nack("no"), Failed("no")),
        (lambda context: context.nack(ValueError("no")), Failed("no")),
        (lambda context: context.extend(5.0), ("extend", 5.0)),
    ],
)
@BOTH
async def test_a_claim_is_settled_and_extended_as_asked(
    work: Callable[[Any], Any], asked: Any, *, is_blocking: bool, answer: bool
) -> None:
    """With the result or the error; the answer of the store is returned."""
    owner = Owner()
    owner.answer = answer
    assert await call(owner, work, is_blocking=is_blocking) is answer
    assert owner.calls == [asked]


@pytest.mark.parametrize(
    ("work", "note"),
    [
        (lambda context: context.progress(0.5), ""),
        (lambda context: context.progress(0.5, "half"), "half"),
    ],
)
@BOTH
async def test_progress_is_reported_with_its_note(
    work: Callable[[Any], Any], note: str, *, is_blocking: bool
) -> None:
    """Nobody waits for it."""
    owner = Owner()
    assert await call(owner, work, is_blocking=is_blocking) is None
    assert owner.calls == [("progress", 0.5, note)]


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_plain_function_has_seen_a_loss_only_if_it_has_looked(*, is_read: bool) -> None:
    """What it returns after that does not count; it does not find its claim again."""
    context = Context(MESSAGE, "worker-1", FakeClock(), None, cast("ClaimOwner", Owner()))
    blocking = BlockingContext(context, asyncio.get_running_loop())
    assert blocking.deadline is None
    assert not blocking.lost
    context.lost = True
    if is_read:
        assert blocking.lost
    context.lost = False
    assert blocking.has_shown_loss == blocking.lost == is_read


class LeftBlock:
    """A transaction whose end fails."""

    def __init__(self, end: BaseException | None) -> None:
        self.is_cut = False
        self._end = end

    async def __aenter__(self) -> str:
        return "connection"

    async def leave(self, error: BaseException | None) -> None:
        del error
        if self._end is not None:
            raise self._end

    def cut(self) -> None:
        self.is_cut = True


@pytest.mark.parametrize("is_failed", [False, True])
@pytest.mark.parametrize(
    ("end", "is_cut"),
    [
        (None, False),
        (RuntimeError("Event loop is closed"), True),
        # Found: the function got an error of the standard library.
        (asyncio.CancelledError(), True),
    ],
    ids=repr,
)
async def test_a_transaction_whose_worker_has_ended_is_cut(
    end: BaseException | None, *, is_cut: bool, is_failed: bool
) -> None:
    """Its function hears that the claim is lost, whether or not it had failed by then."""
    block = LeftBlock(end)
    context = Context(MESSAGE, "worker-1", FakeClock(), 30.0, cast("ClaimOwner", Owner()))
    setattr(context, "open_blocking_transaction", lambda _: block)  # noqa: B010 - a method
    blocking = BlockingContext(context, asyncio.get_running_loop())

    def work() -> None:
        with blocking.transaction() as connection:
            assert connection == "connection"
            if is_failed:
                raise ValueError("no")

    expected = MessageClaimLost if is_cut else ValueError
    with pytest.raises(expected) if is_cut or is_failed else nullcontext():
        await asyncio.to_thread(work)
    assert block.is_cut == is_cut


async def test_a_transaction_that_is_never_left_is_cut_when_it_is_collected() -> None:
    """Its function has kept nothing of it: otherwise it would hold up others until its limit."""
    block = LeftBlock(None)
    context = Context(MESSAGE, "worker-1", FakeClock(), 30.0, cast("ClaimOwner", Owner()))
    setattr(context, "open_blocking_transaction", lambda _: block)  # noqa: B010 - a method
    blocking = BlockingContext(context, asyncio.get_running_loop())

    def work() -> bool:
        blocking.transaction().__enter__()
        gc.collect()
        return block.is_cut

    assert await asyncio.to_thread(work)
