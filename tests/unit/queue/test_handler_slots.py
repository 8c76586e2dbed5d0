"""How the end of a handler is judged: by itself, by its time, and by the end of its worker."""

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from chance import FakeClock

from jobsync.core.messages import Completed, Failed, HandlerVerdict, Returned, Snooze
from jobsync.queue.backend import Message, Receipt
from jobsync.queue.executor import Executor, HandlerOutcome
from jobsync.queue.handler_slots import HandlerSlots, SlotsOwner
from jobsync.queue.in_flight import Delivery, InFlight
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings

CANCELLED = asyncio.CancelledError()
FAILED = Failed("ValueError: the handler's own")
ENDS: list[HandlerVerdict | asyncio.CancelledError] = [
    Completed(),
    Snooze(5),
    FAILED,
    Returned(),
    CANCELLED,
]


class Claims:
    """Claims that are certain, of which a test says how many there are."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def check(self, *_: Any) -> bool:
        return True


class Surroundings:
    """A worker with one slot, whose handler ends as a test says."""

    has_limits = False

    def __init__(self, *, is_async: bool) -> None:
        self.claims = Claims()
        self.overruns: list[float] = []
        self.overrun: asyncio.Future[Any] | None = None
        self.during: Callable[[Delivery], Any] | None = None
        """What a handler awaits."""
        self.clock = FakeClock()
        self.end: HandlerVerdict | asyncio.CancelledError = Completed()
        self.flags: dict[str, bool] = {}
        self.settled: list[HandlerVerdict] = []
        self.released: list[Delivery] = []
        self._is_async = is_async
        self.slots = HandlerSlots(
            cast("Executor", self),
            QueueSettings(concurrency=1),
            None,
            "worker",
            cast("InFlight", self.claims),
            self.clock,
            cast("SlotsOwner", self),
            cast("QueueReporter", self),
            asyncio.Event(),
        )

    def find(self, _: str) -> Any:
        return SimpleNamespace(is_async=self._is_async, takes_context=False)

    async def run(self, delivery: Delivery) -> HandlerOutcome:
        for name, value in self.flags.items():
            setattr(delivery, name, value)
        if isinstance(self.end, asyncio.CancelledError):
            raise self.end
        if self.during is not None:
            await self.during(delivery)
        return HandlerOutcome(self.end, self.overrun)

    def conclude(self, _: Delivery, verdict: HandlerVerdict, ended: Any = None) -> None:
        del ended
        self.settled.append(verdict)

    def on_released(self, delivery: Delivery) -> None:
        self.released.append(delivery)

    def on_overrun(self, _: Message, timeout: float) -> None:
        self.overruns.append(timeout)


def build_delivery(*, is_suspect: bool = False, name: str = "id-1") -> Delivery:
    """Return a message whose handler may take seven seconds."""
    message = Message(
        receipt=Receipt(name, 1, "claim-1"),
        value={},
        attempt=1,
        max_attempts=4,
        timeout=7.0,
        is_suspect=is_suspect,
        enqueued=0.0,
    )
    return Delivery(name, message, {}, "me", FakeClock().mono())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_how_a_handler_ends_decides_about_its_attempt(
    end: Any, is_interrupted: bool, is_late: bool, is_async: bool
) -> None:
    """A stop spends no attempt, unless the time of the handler was over before.

    A plain function cannot be cancelled: it goes on, and its message stays claimed until it lapses.
    """
    around = Surroundings(is_async=is_async)
    around.end = end
    around.flags = {"is_interrupted": is_interrupted, "is_late": is_late}
    delivery = build_delivery(is_suspect=False)
    await around.slots._handle(delivery, around.clock.mono())
    assert around.slots.running == {}
    expected: HandlerVerdict | None = end
    if end is CANCELLED and is_late:
        (found,) = around.settled
        assert isinstance(found, Failed)
        assert "longer than 7 s" in found.error
        return
    if end is CANCELLED and not is_async:
        expected = None
    elif end is CANCELLED:
        expected = Failed("CancelledError: the handler was cancelled from within")
    if is_interrupted and not is_late and isinstance(expected, Failed):
        expected = Returned()
    assert around.settled == ([] if expected is None else [expected])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_suspect", [False, True])
async def test_a_suspect_is_alone_until_its_handler_has_ended(end: Any, is_suspect: bool) -> None:
    """However it ends; the end of another message changes nothing."""
    around = Surroundings(is_async=True)
    around.end = end
    delivery = build_delivery(is_suspect=is_suspect)
    await around.slots._handle(delivery, around.clock.mono())
    assert around.released == ([delivery] if is_suspect else [])
    assert delivery.task is None


async def settle_down() -> None:
    """Run everything that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_settling", [False, True])
@pytest.mark.parametrize("is_on_loop", [False, True])
async def test_a_handler_whose_claim_is_lost_is_cancelled_unless_it_has_settled(
    *, is_settling: bool, is_on_loop: bool
) -> None:
    """What it does after its own `ack` is its own affair; a plain function cannot be cancelled."""
    around = Surroundings(is_async=is_on_loop)
    delivery = build_delivery()
    delivery.task = cast("Any", Mock())
    delivery.is_on_loop, delivery.is_settling = is_on_loop, is_settling
    around.slots.running[delivery] = None
    around.slots.drop(delivery)
    assert cast("Any", delivery.task).cancel.called == (is_on_loop and not is_settling)
    assert around.released == []


async def test_after_a_handler_that_was_cancelled_the_next_one_runs_on_another_task() -> None:
    """Whoever cancelled it: the next one must not be cancelled with it, nor wait for ever."""
    around = Surroundings(is_async=True)
    tasks: list[Any] = []
    blocked = asyncio.Event()

    async def wait(delivery: Delivery) -> None:
        tasks.append(delivery.task)
        if delivery.id != "id-3":
            await blocked.wait()

    around.during = wait
    around.slots.add([build_delivery(name=f"id-{number}") for number in range(1, 4)])
    for number in (1, 2):
        await settle_down()
        assert len(tasks) == number
        tasks[-1].cancel()
    await settle_down()
    assert len({*tasks}) == len(tasks) == 3
    cancelled = Failed("CancelledError: the handler was cancelled from within")
    assert around.settled == [cancelled, cancelled, Completed()]
    assert around.slots.running == {}


async def test_a_cancellation_that_a_handler_swallows_ends_its_task_too() -> None:
    """The next message has a task that nobody has cancelled."""
    around = Surroundings(is_async=True)
    tasks: list[Any] = []

    async def swallow(delivery: Delivery) -> None:
        tasks.append(delivery.task)
        if len(tasks) == 1:
            tasks[0].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    around.during = swallow
    around.slots.add([build_delivery(name="id-1"), build_delivery(name="id-2")])
    await settle_down()
    assert len({*tasks}) == 2
    assert around.settled == [Completed(), Completed()]


async def test_a_plain_function_that_runs_on_counts_with_all_of_its_time() -> None:
    """Its slot is occupied until it returns, so fewer messages are claimed in advance."""
    around = Surroundings(is_async=False)
    around.overrun = asyncio.get_running_loop().create_future()
    start = around.clock.mono()
    handling = asyncio.create_task(around.slots._handle(build_delivery(), start))
    await settle_down()
    assert around.overruns == [7.0]
    assert around.slots.is_stuck
    around.clock.mono_seconds += 40
    around.overrun.set_result(None)
    assert await handling == start + 40
    assert around.slots._prefetch._average == 40
    assert not around.slots.is_stuck


@pytest.mark.parametrize(
    ("flags", "is_over"),
    [
        ({}, False),
        ({"is_late": True}, True),
        ({"is_lost": True}, True),
        ({"is_late": True, "is_lost": True}, True),
    ],
)
async def test_a_handler_that_runs_on_after_its_cancellation_is_reported(
    flags: dict[str, bool], *, is_over: bool
) -> None:
    """Whether its time was over, or its claim was lost; before, it is cancelled."""
    around = Surroundings(is_async=True)
    delivery = build_delivery()
    around.slots._prepare(delivery, around.clock.mono())
    delivery.task = cast("Any", Mock())
    for name, value in flags.items():
        setattr(delivery, name, value)
    around.slots._on_deadline(delivery)
    assert around.overruns == ([7.0] if is_over else [])
    assert len(around.settled) == is_over
    assert cast("Any", delivery.task).cancel.called != is_over
    assert delivery.is_late or flags == {"is_lost": True}
    # Once is enough.
    around.slots._report_overrun(delivery)
    assert len(around.overruns) == 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_handlers_that_run_on_are_cancelled_when_their_worker_stops(*, is_lost: bool) -> None:
    """Nobody knows when they return; those that have time left go on."""
    around = Surroundings(is_async=True)
    late, useful = build_delivery(name="id-1"), build_delivery(name="id-2")
    for delivery in (late, useful):
        delivery.task, delivery.is_lost = cast("Any", Mock()), is_lost
        around.slots.running[delivery] = None
    around.slots._report_overrun(late)
    around.slots.cancel_overrun()
    assert cast("Any", late.task).cancel.called
    assert not cast("Any", useful.task).cancel.called
    assert around.slots.list_useful() == [useful]


@pytest.mark.parametrize(
    ("largest", "flying", "room"),
    [(0, 2, 1), (0, 3, 0), (15, 3, 1), (15, 30, 1), (15, 31, 0)],
)
async def test_as_much_may_be_in_flight_as_two_claims_bring(
    largest: int, flying: int, room: int
) -> None:
    """Of whatever size they may be; more is not claimed while the store accepts no settlements."""
    around = Surroundings(is_async=True)
    around.slots._prefetch.measure(1.0)
    around.slots._prefetch._settings = QueueSettings(concurrency=1, prefetch=0)
    assert around.slots.find_most(largest) == largest
    around.claims.count = flying
    assert around.slots.find_room() == room
