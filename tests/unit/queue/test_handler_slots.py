"""How the end of a handler is judged: by itself, by its time, and by the end of its worker."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

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


class Surroundings:
    """A worker with one slot, whose handler ends as a test says."""

    def __init__(self, *, is_async: bool) -> None:
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
            cast("InFlight", SimpleNamespace(check=lambda *_: True)),
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
        return HandlerOutcome(self.end)

    def conclude(self, _: Delivery, verdict: HandlerVerdict, ended: Any = None) -> None:
        del ended
        self.settled.append(verdict)

    def on_released(self, delivery: Delivery) -> None:
        self.released.append(delivery)


def build_delivery(*, is_suspect: bool) -> Delivery:
    """Return a message whose handler may take seven seconds."""
    message = Message(
        receipt=Receipt("id-1", 1, "claim-1"),
        value={},
        attempt=1,
        max_attempts=4,
        timeout=7.0,
        is_suspect=is_suspect,
        enqueued=0.0,
    )
    return Delivery("id-1", message, {}, "me", FakeClock().mono())


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
