"""Claims that a program has asked for: when it gets them, waits for them, and loses them."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness, StandingClock

from jobsync import Components
from jobsync.coordination.membership import Membership
from jobsync.core.messages import Completed
from jobsync.core.retry import Retries
from jobsync.database.home_loop import HomeLoop
from jobsync.events import Events
from jobsync.queue.backend import ClaimResult, Message, QueueBackend, Receipt, Settlement
from jobsync.queue.in_flight import Delivery, read_document
from jobsync.queue.pull import PulledClaims
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings


def build_claims() -> PulledClaims:
    """Return the claims of a program, without a queue behind them."""
    components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
    return PulledClaims(
        cast("QueueBackend", SimpleNamespace(is_billed=False, queue="mails")),
        cast("Membership", SimpleNamespace()),
        QueueSettings(),
        Retries(),
        components,
        cast(
            "QueueReporter",
            SimpleNamespace(on_lost=lambda *_: None, on_settled=lambda *_: None),
        ),
        cast("HomeLoop", None),
        read_document,
    )


def add(claims: PulledClaims, name: str) -> Delivery:
    """Put a message in flight."""
    message = Message(
        receipt=Receipt(name, 1, f"claim of {name}"),
        value={"id": name},
        attempt=1,
        max_attempts=4,
        timeout=None,
        is_suspect=True,
        enqueued=0.0,
    )
    return claims._in_flight.add(message, "me", FakeClock().mono())


def end(claims: PulledClaims, delivery: Delivery, how: str) -> None:
    """End the claim of a message."""
    if how == "lost":
        claims._in_flight.lose(delivery, "its claim has ended")
    else:
        delivery.verdict, delivery.is_settling = Completed(), True
        claims.on_answer(delivery, is_accepted=how == "settled")


@pytest.mark.parametrize("how", ["settled", "refused", "lost"])
async def test_a_suspect_keeps_others_waiting_until_its_claim_has_ended(how: Any) -> None:
    """In whatever way, and not longer; the end of another message changes nothing."""
    claims = build_claims()
    suspect, other = add(claims, "suspect"), add(claims, "other")
    claims._quarantine.start(suspect)
    end(claims, other, how)
    assert claims._quarantine.wait(is_free=False) > 0
    end(claims, suspect, how)
    assert claims._quarantine.wait(is_free=False) == 0
    assert len(claims._in_flight) == 0
    # A settlement of a message that was never in flight is nobody's.
    claims._quarantine.start(suspect)
    claims.on_answer(None, is_accepted=True)
    assert claims._quarantine.wait(is_free=False) > 0


class Store:
    """Answers claims as a test says, on a clock that stands still."""

    is_billed, queue, transactions = False, "mails", None
    max_result, max_depth = 1000, 10
    incarnation, is_trusted = "me", True

    def __init__(self) -> None:
        self.is_paused: Callable[[], bool] = lambda: False
        self.clock = StandingClock()
        self.answers: list[ClaimResult] = []
        self.asked: list[tuple[int, bool]] = []
        self.lost: list[str] = []
        self.waits: list[float] = []
        self.waiting: set[asyncio.Task[Any]] = set()
        self.is_settling = True
        """Whether settlements are answered."""
        self.may_answer = asyncio.Event()
        """Set unless claims are under way until the test says otherwise."""
        self.may_answer.set()
        self.returned: list[str] = []
        self.is_news = True
        """Whether who waits is told at once."""

    async def claim(self, limit: int, *, suspects: bool, **_: Any) -> ClaimResult:
        self.asked.append((limit, suspects))
        await self.may_answer.wait()
        return self.answers.pop(0) if self.answers else build_result()

    async def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(task)
        try:
            await (asyncio.sleep(0) if self.is_news else asyncio.Event().wait())
        finally:
            self.waiting.discard(task)
        self.clock.mono_seconds += seconds

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        if not self.is_settling:
            await asyncio.Event().wait()
        self.returned += [each.receipt.id for each in settlements if each.move == "release"]
        return [True] * len(settlements)

    async def list_holders(self) -> list[str]:
        return []

    async def change(self, _: float) -> None:
        await asyncio.Event().wait()

    def watch(self, *_: Any) -> None:
        return

    def is_dead(self, _: str) -> bool:
        return False

    timing = SimpleNamespace(heartbeat=5.0)
    trust_left = 100.0
    session = SimpleNamespace(is_trusted_at=lambda _: True, incarnation="me")

    def build(self, **options: Any) -> PulledClaims:
        """Return the claims of a program on this store."""
        nothing = SimpleNamespace(
            on_lost=lambda message, _: self.lost.append(message.id),
            on_settled=lambda *_: None,
            on_failure=lambda *_: None,
        )
        return PulledClaims(
            cast("QueueBackend", self),
            cast("Membership", self),
            QueueSettings(**options),
            Retries(),
            Components(clock=self.clock, randomness=SeededRandomness(1), events=Events()),
            cast("QueueReporter", nothing),
            cast("HomeLoop", None),
            read_document,
            is_paused=self.is_paused,
        )


def build_result(*names: str, **facts: Any) -> ClaimResult:
    """Return what a claim found."""
    messages = [
        Message(
            receipt=Receipt(name, 1, "claim-1"),
            value={"id": name},
            attempt=1,
            max_attempts=4,
            timeout=None,
            is_suspect=False,
            enqueued=0.0,
        )
        for name in names
    ]
    known: dict[str, Any] = {"suspects": False, "due": None, "lapse": None, "more": False}
    return ClaimResult(messages, **(known | facts))


@pytest.mark.parametrize(
    ("facts", "wait"),
    [
        ({}, 10.0),
        ({"due": 3.0}, 3.0),
        ({"due": 99.0}, 10.0),
        ({"lapse": 4.0}, 4.0),
        ({"due": 3.0, "lapse": 99.0}, 3.0),
        ({"due": -1.0}, 0.02),
    ],
)
async def test_a_program_asks_again_at_the_next_change_and_in_each_interval(
    facts: dict[str, Any], wait: float
) -> None:
    """Whichever is first; and not after its own time is over."""
    store = Store()
    store.answers = [build_result(**facts), build_result("id-1")]
    claims = store.build(poll_interval=10.0)
    (message,) = await claims.claim(5, 60.0)
    assert message.id == "id-1"
    assert store.waits == [pytest.approx(wait)]
    store.answers = []
    start = store.clock.mono_seconds
    assert await claims.claim(5, 25.0) == []
    assert store.waits[1:] == [10.0, 10.0, 5.0]
    assert store.clock.mono_seconds - start == pytest.approx(25.0)


async def test_a_suspect_is_asked_for_at_once_if_there_is_nothing_else() -> None:
    """Without a pause, and alone; other messages come first if there are any."""
    store = Store()
    store.answers = [build_result(suspects=True), build_result("suspect")]
    claims = store.build()
    (message,) = await claims.claim(5, 60.0)
    assert message.id == "suspect"
    assert store.asked == [(5, False), (1, True)]
    assert store.waits == [0.02]


@pytest.mark.parametrize("how", ["stops", "is cancelled", "hears news"])
async def test_nothing_goes_on_waiting_after_a_claim(how: str) -> None:
    """However the claim ends."""
    store = Store()
    store.is_news = False
    claims = store.build()
    claiming = asyncio.ensure_future(claims.claim(5, 60.0))
    while not store.waiting:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    (waiting,) = store.waiting
    if how == "stops":
        claims.stop(None)
        assert await claiming == []
    elif how == "is cancelled":
        claiming.cancel()
    else:
        waiting.cancel()
    await asyncio.wait([claiming])
    for _ in range(10):
        await asyncio.sleep(0)
    assert waiting.done()
    assert not store.waiting


@pytest.mark.parametrize("is_settling", [True, False])
async def test_what_was_not_settled_at_a_stop_is_lost_to_the_program(*, is_settling: bool) -> None:
    """Whether the store has taken it back or not: it must not do more with it.

    Who waits for the answer of a store that does not come is told that there is none.
    """
    store = Store()
    store.is_settling = is_settling
    store.answers = [build_result("id-1", "id-2")]
    claims = store.build()
    running = asyncio.ensure_future(claims.run())
    messages = await claims.claim(5, 0.0)
    assert [message.lost for message in messages] == [False, False]
    settling = asyncio.ensure_future(messages[0].ack())
    await asyncio.sleep(0)
    claims.stop(None if is_settling else 0.0)
    await running
    assert [message.lost for message in messages] == [not is_settling, True]
    assert len(claims._in_flight) == 0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert settling.done()
    assert settling.result() is is_settling
    assert store.lost == ([] if is_settling else ["id-1", "id-2"])
    assert await claims.claim(5, 60.0) == []
    assert len(store.asked) == 1


@pytest.mark.parametrize("begin", [0.0, 3.0, 10.0])
@pytest.mark.parametrize("end", [4.0, 20.0, 99.0])
async def test_nothing_is_claimed_in_a_pause_also_by_a_call_that_waits_already(
    begin: float, end: float
) -> None:
    """It claims again after the pause, if its time is not over."""
    store = Store()
    store.clock = cast("Any", FakeClock())
    start, asked = store.clock.mono_seconds, list[float]()

    def is_paused() -> bool:
        return begin <= store.clock.mono_seconds - start < end

    def claim(*given: Any, **options: Any) -> Any:
        asked.append(store.clock.mono_seconds - start)
        return claim_from(*given, **options)

    store.is_paused, claim_from, store.claim = is_paused, store.claim, claim  # type: ignore[method-assign]
    claims = store.build(poll_interval=2.0)
    assert await claims.claim(5, 60.0) == []
    assert bool(asked) == (begin > 0 or end < 60.0)
    assert not any(begin <= time < end for time in asked)
    assert any(time < begin for time in asked) == (begin > 0)
    assert any(time >= end for time in asked) == (end < 60.0)
    assert store.clock.mono_seconds - start == pytest.approx(60.0)


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("answer", ["in time", "late"])
async def test_what_a_request_claims_during_a_stop_is_returned_or_lost(
    answer: str, *, is_cancelled: bool, has_other: bool
) -> None:
    """Nobody gets a message that nothing settles: the stop waits for the request for a while.

    Args:
        answer: when the store answers the claim.
        is_cancelled: whether the program waits for it no longer.
        has_other: whether it holds another message, which is returned at once.
    """
    store = Store()
    claims = store.build()
    running = asyncio.ensure_future(claims.run())
    store.answers = [build_result("id-0")] * has_other + [build_result("id-1", "id-2")]
    held = await claims.claim(1, 0.0) if has_other else []
    store.may_answer.clear()
    claiming = asyncio.ensure_future(claims.claim(5, 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if is_cancelled:
        claiming.cancel()
    claims.stop(60.0 if answer == "in time" else 0.0)
    if answer == "in time":
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        store.may_answer.set()
    await running
    store.may_answer.set()
    await asyncio.wait([claiming])
    for _ in range(10):
        await asyncio.sleep(0)
    assert claiming.cancelled() if is_cancelled else claiming.result() == []
    ids = ["id-1", "id-2"]
    if answer == "in time":
        assert store.returned == ["id-0"] * has_other + ids
        assert store.lost == []
    else:
        assert store.lost[-2:] == ids
    assert [message.lost for message in held] == [True] * has_other
    assert len(claims._in_flight) == 0


@pytest.mark.parametrize(
    ("grace", "withins", "seconds"),
    [
        (30.0, [None], 5.0),
        (2.0, [None], 2.0),
        (30.0, [3.0], 3.0),
        (30.0, [60.0], 5.0),
        (2.0, [60.0], 2.0),
        (30.0, [3.0, 4.0], 3.0),
        (30.0, [4.0, 3.0], 3.0),
        (30.0, [-1.0], 0.0),
    ],
)
async def test_the_time_to_return_messages_is_the_shortest_of_all(
    grace: float, withins: list[float | None], seconds: float
) -> None:
    """Five seconds, the grace of the queue, and what each caller can wait."""
    claims = Store().build(grace=grace)
    for within in withins:
        claims.stop(within)
    assert claims._return_time == seconds
