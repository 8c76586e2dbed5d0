"""Whoever has had his time is told of once, as soon as it is over."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from jobsync import Components
from jobsync.queue.executor import Deadlines
from jobsync.queue.in_flight import Delivery

FIRST, SECOND, THIRD = (cast("Delivery", object()) for _ in range(3))


class Watched:
    """Deadlines that somebody watches, and who was told of."""

    def __init__(self) -> None:
        self.clock = Components.system().clock
        self.over: asyncio.Queue[Delivery] = asyncio.Queue()
        self.deadlines = Deadlines(self.clock, self.over.put_nowait)

    def add(self, held: Delivery, seconds: float) -> None:
        """Give somebody so much time from now."""
        self.deadlines.add(held, self.clock.mono() + seconds)

    async def told(self) -> Delivery:
        """Wait until somebody's time is over."""
        async with asyncio.timeout(30):
            return await self.over.get()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    """Deadlines while they are watched."""
    watched = Watched()
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(watched.deadlines.watch())
        # It rests, and nobody is there yet.
        await asyncio.sleep(0)
        yield watched
        watch.cancel()


async def test_the_first_to_be_over_is_the_first_to_be_told_of(watched: Watched) -> None:
    """Whoever was added first: a shorter time wakes the watch."""
    watched.add(FIRST, 3600)
    watched.add(SECOND, 0.05)
    watched.add(THIRD, 0.02)
    assert await watched.told() is THIRD
    assert await watched.told() is SECOND
    assert watched.over.empty()


async def test_who_was_done_in_time_is_not_told_of(watched: Watched) -> None:
    """Nor keeps others from being so, though the watch was to look when he would be over."""
    watched.add(FIRST, 0.01)
    watched.deadlines.remove(FIRST)
    watched.add(SECOND, 0.03)
    assert await watched.told() is SECOND
    assert watched.over.empty()


async def test_the_watch_is_not_woken_for_who_ends_later(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes and goes while it waits for the first costs it nothing."""
    watched.add(FIRST, 60)
    rung: list[Delivery] = []
    monkeypatch.setattr(watched.deadlines._wakeup, "set", lambda: rung.append(SECOND))
    watched.deadlines.remove(FIRST)
    for _ in range(3):
        watched.add(SECOND, 60)
        watched.deadlines.remove(SECOND)
    assert not rung
