"""Deadlines: each delivery is reported once, as soon as its time is over."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest
from chance import FakeClock

from jobsync import Components
from jobsync.queue.executor import Deadlines
from jobsync.queue.in_flight import Delivery

FIRST, SECOND, THIRD = (cast("Delivery", object()) for _ in range(3))


class Watched:
    """Watched deadlines, and the deliveries that were reported."""

    def __init__(self) -> None:
        self.clock = Components.system().clock
        self.late: asyncio.Queue[Delivery] = asyncio.Queue()
        self.deadlines = Deadlines(self.clock, self.late.put_nowait)

    def add(self, delivery: Delivery, seconds: float) -> None:
        """Add a delivery with this many seconds from now."""
        self.deadlines.add(delivery, self.clock.mono() + seconds)

    async def wait_for_late(self) -> Delivery:
        """Wait until a delivery is late."""
        async with asyncio.timeout(30):
            return await self.late.get()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    """Deadlines with a running watcher."""
    watched = Watched()
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(watched.deadlines.watch())
        # The watcher waits, and there are no deliveries yet.
        await asyncio.sleep(0)
        yield watched
        watch.cancel()


async def test_the_first_deadline_is_reported_first(watched: Watched) -> None:
    """In any order of adding: an earlier deadline wakes the watcher."""
    watched.add(FIRST, 3600)
    watched.add(SECOND, 0.05)
    watched.add(THIRD, 0.02)
    assert await watched.wait_for_late() is THIRD
    assert await watched.wait_for_late() is SECOND
    assert watched.late.empty()


async def test_a_removed_delivery_is_not_reported(watched: Watched) -> None:
    """And does not delay others, although the watcher was to wake for it."""
    watched.add(FIRST, 0.01)
    watched.deadlines.remove(FIRST)
    watched.add(SECOND, 0.03)
    assert await watched.wait_for_late() is SECOND
    assert watched.late.empty()


async def test_a_later_deadline_does_not_wake_the_watcher(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliveries that come and go before the next check cost nothing."""
    watched.add(FIRST, 60)
    woken: list[Delivery] = []
    monkeypatch.setattr(watched.deadlines._wakeup, "set", lambda: woken.append(SECOND))
    watched.deadlines.remove(FIRST)
    for _ in range(3):
        watched.add(SECOND, 60)
        watched.deadlines.remove(SECOND)
    assert not woken


async def test_those_that_are_late_together_are_reported_in_the_order_of_their_deadlines() -> None:
    """Not of their additions; one whose time has just come is late, too."""
    clock = FakeClock()
    late: list[Delivery] = []
    deadlines = Deadlines(clock, late.append)
    fourth = cast("Delivery", object())
    for delivery, seconds in ((FIRST, 3), (SECOND, 1), (THIRD, 2), (fourth, 4)):
        deadlines.add(delivery, clock.mono() + seconds)
    clock.mono_seconds += 3
    deadlines._report_late(clock.mono())
    assert late == [SECOND, THIRD, FIRST]
    assert deadlines._next_check == clock.mono() + 1
    deadlines._report_late(clock.mono())
    assert late == [SECOND, THIRD, FIRST]
