"""Transactions of handlers: when one is committed, and what becomes of its message."""

import asyncio
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from chance import FakeClock, SeededRandomness
from waiting import until

from jobsync import Components, Invalid, MessageClaimLost, OutcomeUnknown, Unavailable
from jobsync.coordination.membership import Membership
from jobsync.core.messages import Completed
from jobsync.events import Events
from jobsync.queue import transaction_backend
from jobsync.queue.backend import Message, QueueBackend, Receipt
from jobsync.queue.in_flight import Delivery, InFlight, WorkerListener
from jobsync.queue.transaction import TransactionBlock, TransactionOpener
from jobsync.queue.transaction_backend import OpenTransaction

VISIBILITY = 10.0
DOWN, UNKNOWN = Unavailable("queue", "down"), OutcomeUnknown("queue", "reply lost")


class Opened(OpenTransaction):
    """A transaction that records what is done with it."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(object(), 5.0)
        self._steps = steps
        self.error: Exception | None = None

    def start_timer(self) -> None:
        return

    def cut(self) -> None:
        self._steps.append("cut")

    async def check(self) -> None:
        return

    async def commit(self) -> None:
        self._steps.append("commit")
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self._steps.append("close")


class Surroundings:
    """A database, and a worker with one claim."""

    queue = "mails"
    default_limit, longest = 5.0, 60.0

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.steps: list[str] = []
        self.opened = Opened(self.steps)
        self.begin_errors: list[BaseException] = []
        self.is_ours = True
        self.outcomes: list[Any] = []
        self.answers: list[bool] = []
        self.rolled_back = 0
        session = SimpleNamespace(is_trusted_at=lambda _: True, incarnation="me")
        self.in_flight = InFlight(
            cast("QueueBackend", None),
            cast("Membership", SimpleNamespace(session=session, trust_left=100.0)),
            self.clock,
            VISIBILITY,
            cast("WorkerListener", self),
        )
        self.message = Message(
            receipt=Receipt("id-1", 1, "claim-1"),
            value={"id": "id-1"},
            attempt=1,
            max_attempts=4,
            timeout=None,
            is_suspect=False,
            enqueued=0.0,
        )
        self.delivery = self.in_flight.add(self.message, "me", self.clock.mono())

    @property
    def transactions(self) -> Any:
        return self

    async def begin(self, _: float, *, is_blocking: bool) -> Opened:
        del is_blocking
        if self.begin_errors:
            raise self.begin_errors.pop(0)
        return self.opened

    async def complete_within(self, connection: object, receipt: Receipt) -> bool:
        assert (connection, receipt) == (self.opened.connection, self.message.receipt)
        self.steps.append("complete")
        return self.is_ours

    async def read_outcome(self, _: Receipt) -> Any:
        self.steps.append("read")
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def on_answer(self, delivery: Delivery, *, is_accepted: bool) -> None:
        assert delivery.verdict == Completed()
        self.answers.append(is_accepted)

    def on_rolled_back(self, delivery: Delivery) -> None:
        assert not delivery.is_settling
        self.rolled_back += 1

    def on_lost(self, *_: Any) -> None:
        return

    def on_failure(self, _: Exception) -> None:
        return

    def open(self, limit: float | None = None) -> TransactionBlock:
        """Return a block."""
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=Events())
        backend, listener = cast("QueueBackend", self), cast("WorkerListener", self)
        opener = TransactionOpener(backend, self.in_flight, components, listener)
        return opener.open(self.message, limit, is_blocking=False)


@pytest.mark.parametrize("error", [DOWN, Invalid("a", "b", "c", "d"), asyncio.CancelledError()])
async def test_a_transaction_that_could_not_begin_can_be_tried_again(error: BaseException) -> None:
    """Whatever the reason; a second one beside an open one is refused."""
    around = Surroundings()
    around.begin_errors = [error]
    with pytest.raises(type(error)):
        async with around.open():
            pass
    async with around.open() as connection:
        assert connection is around.opened.connection
        with pytest.raises(Invalid, match="is open already"):
            async with around.open():
                pass
    assert around.answers == [True]
    assert around.delivery.transaction is None


@pytest.mark.parametrize(("seconds", "is_committed"), [(8.9, True), (9.0, False)])
async def test_a_transaction_is_committed_only_while_its_claim_is_certain(
    seconds: float, *, is_committed: bool
) -> None:
    """Even if nobody has noticed yet that it is not: other workers may have the message soon."""
    around = Surroundings()
    block = around.open()
    await block.__aenter__()
    around.clock.mono_seconds += seconds
    if is_committed:
        await block.__aexit__(None, None, None)
        assert around.steps == ["complete", "commit", "close"]
    else:
        with pytest.raises(MessageClaimLost):
            await block.__aexit__(None, None, None)
        assert around.steps == ["close"]
        assert around.delivery.is_lost


@pytest.mark.parametrize(
    ("is_ours", "error", "outcomes", "steps", "raised", "answers"),
    [
        (True, None, [], ["complete", "commit", "close"], None, [True]),
        (False, None, [], ["complete", "close"], MessageClaimLost, [False]),
        (True, DOWN, [], ["complete", "commit", "close"], Unavailable, []),
        (True, UNKNOWN, ["completed"], ["complete", "commit", "close", "read"], None, [True]),
        (
            *(True, UNKNOWN, [DOWN, UNKNOWN, "completed"]),
            *(["complete", "commit", "close", "read", "read", "read"], None, [True]),
        ),
        (
            *(True, UNKNOWN, ["ended"]),
            *(["complete", "commit", "close", "read"], MessageClaimLost, [False]),
        ),
        (True, UNKNOWN, ["open"], ["complete", "commit", "close", "read"], Unavailable, []),
    ],
)
async def test_the_store_says_what_became_of_a_commit(
    is_ours: bool,
    error: Exception | None,
    outcomes: list[Any],
    steps: list[str],
    raised: type[Exception] | None,
    answers: list[bool],
) -> None:
    """The connection is closed first, and the claim is read until there is an answer."""
    around = Surroundings()
    around.is_ours, around.opened.error, around.outcomes = is_ours, error, outcomes
    block = around.open()
    await block.__aenter__()
    if raised is None:
        await block.__aexit__(None, None, None)
    else:
        with pytest.raises(raised):
            await block.__aexit__(None, None, None)
    assert (around.steps, around.answers) == (steps, answers)
    assert around.rolled_back == (not answers)
    assert around.delivery.transaction is None


@pytest.mark.parametrize(
    ("is_ours", "error", "verdict"),
    [(True, None, Completed()), (False, None, Completed()), (True, DOWN, None)],
)
async def test_a_message_has_the_verdict_of_what_was_committed(
    is_ours: bool, error: Exception | None, verdict: Any
) -> None:
    """With its duration; after a rollback its handler has failed, and may settle it otherwise."""
    around = Surroundings()
    around.is_ours, around.opened.error = is_ours, error
    delivery, context = around.delivery, SimpleNamespace(is_settled=False)
    delivery.started, delivery.context = around.clock.mono(), cast("Any", context)
    block = around.open()
    await block.__aenter__()
    around.clock.mono_seconds += 3
    with suppress(MessageClaimLost, Unavailable):
        await block.__aexit__(None, None, None)
    assert (delivery.verdict, delivery.is_settling) == (verdict, verdict is not None)
    assert delivery.duration == 3.0
    assert context.is_settled is (is_ours and error is None)


@pytest.mark.parametrize("reason", ["error", "lost", "closed"])
async def test_after_a_block_that_has_failed_another_one_may_begin(reason: str) -> None:
    """Whatever the reason: the first one is over."""
    around = Surroundings()
    around.is_ours = reason != "lost"
    block = around.open()
    await block.__aenter__()
    error = {"error": ValueError("mine"), "lost": None, "closed": GeneratorExit()}[reason]
    with suppress(MessageClaimLost):
        await block.leave(error)
    assert around.steps[-1] == ("cut" if reason == "closed" else "close")
    assert around.delivery.transaction is None


async def test_a_block_that_its_handler_has_left_open_is_rolled_back() -> None:
    """Whoever leaves it later is told, unless there is an error already; nothing is committed."""
    around = Surroundings()
    stop = Mock()
    around.opened.stop_timer = stop  # type: ignore[method-assign]
    block = around.open()
    await block.__aenter__()
    await block.abandon()
    assert around.steps == ["cut", "close"]
    stop.assert_called_once_with()
    await block.leave(ValueError("mine"))
    with pytest.raises(MessageClaimLost, match="its handler had returned before"):
        await block.leave(None)
    block.cut()
    await block.abandon()
    assert (around.steps, around.answers) == (["cut", "close"], [])


async def test_a_commit_ends_though_its_handler_is_cancelled() -> None:
    """Each time; the cancellation passes when the outcome is known."""
    around = Surroundings()
    started, gate = asyncio.Event(), asyncio.Event()

    async def commit() -> None:
        started.set()
        await gate.wait()
        around.steps.append("commit")

    around.opened.commit = commit  # type: ignore[method-assign]
    block = around.open()
    await block.__aenter__()
    ending = asyncio.ensure_future(block.leave(None))
    await started.wait()
    for _ in range(2):
        ending.cancel()
        await asyncio.sleep(0)
        assert not ending.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert (around.steps, around.answers) == (["complete", "commit", "close"], [True])
    assert around.delivery.transaction is None


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, TimeoutError),
        (ValueError("mine"), TimeoutError),
        (asyncio.CancelledError(), None),
        (KeyboardInterrupt(), None),
    ],
)
async def test_what_took_too_long_is_rolled_back(
    error: BaseException | None, raised: type[BaseException] | None
) -> None:
    """That is the error of the block, unless its handler is to end anyway."""
    around = Surroundings()
    block = around.open()
    await block.__aenter__()
    around.opened.is_expired = True
    if raised is None:
        await block.leave(error)
    else:
        with pytest.raises(raised, match=r"took longer than 5 s and was rolled back") as late:
            await block.leave(error)
        assert late.value.__cause__ is error
    assert (around.steps, around.answers) == (["close"], [])


@pytest.mark.parametrize(("given", "limit"), [(None, 5.0), (1, 1.0), (60, 60.0), (0.001, 0.001)])
async def test_a_transaction_has_the_limit_that_was_given(given: Any, limit: float) -> None:
    """Without one that of the database; the longest is accepted."""
    block = Surroundings().open(given)
    assert (block._limit, type(block._limit)) == (limit, float)


@pytest.mark.parametrize("given", [0, -1, 60.5, float("nan"), True, "5"])
async def test_other_limits_are_refused(given: Any) -> None:
    """Zero is not the default."""
    with pytest.raises(Invalid, match=r"^timeout must be more than 0 to"):
        Surroundings().open(given)


async def test_an_error_rolls_back_and_settles_nothing() -> None:
    """The end of the handler does that."""
    around = Surroundings()
    with pytest.raises(ValueError, match="mine"):
        async with around.open():
            raise ValueError("mine")
    assert (around.steps, around.answers, around.rolled_back) == (["close"], [], 0)
    assert around.in_flight.find(around.message) is around.delivery


def test_a_shorter_time_limit_is_not_kept_waiting_by_a_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the thread sleeps until the longer one; that one does not end with it."""
    monkeypatch.setattr(transaction_backend, "_IDLE", 0.0)
    limits = transaction_backend._TimeLimits()
    before, long = set(threading.enumerate()), Mock()
    limits.add(long, 3600.0)
    for _ in range(2):
        expired = threading.Event()
        limits.add(Mock(expire=expired.set), 0.0)
        assert expired.wait(30)
    assert not long.expire.called
    limits.remove(long)
    limits.add(Mock(), 0.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


async def test_a_transaction_that_begins_while_the_thread_is_idle_is_limited_too() -> None:
    """The thread stays for a while after the last one, and is told of the next."""
    limits = transaction_backend._TimeLimits()
    for _ in range(3):
        expired = threading.Event()
        limits.add(Mock(expire=expired.set), 0.0)
        await until(expired.is_set, "it is rolled back", timeout=30.0)
        # Otherwise it would find the next one without being told.
        await until(limits._changed._waiters.__len__, "the thread is idle")  # type: ignore[attr-defined]


def test_each_process_has_time_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child has no such thread; transactions of one process share it."""
    monkeypatch.setattr(transaction_backend, "_limits", {})
    found = []
    for process in (1, 1, 2):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        found.append(Opened([])._limits)
    assert found[0] is found[1]
    assert found[0] is not found[2]
