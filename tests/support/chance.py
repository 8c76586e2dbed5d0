"""Time and randomness under the control of tests."""

import asyncio
import random
from collections import Counter

from jobsync.core.clock import Mono, Wall

__all__ = ["FakeClock", "SeededRandomness", "StandingClock"]


class FakeClock:
    """A clock that stands still until it is set, or until a sleep."""

    def __init__(self) -> None:
        self.wall_seconds = 1_700_000_000.0
        self.mono_seconds = 1_000.0
        self.boot_id = 1

    def wall(self) -> Wall:
        """Return `wall_seconds`."""
        return Wall(self.wall_seconds)

    def mono(self) -> Mono:
        """Return `mono_seconds`."""
        return Mono(self.mono_seconds)

    def boot(self) -> int:
        """Return `boot_id`."""
        return self.boot_id

    async def sleep(self, seconds: float) -> None:
        """Advance both time lines without waiting, and let other tasks run."""
        await asyncio.sleep(0)
        self.wall_seconds += seconds
        self.mono_seconds += seconds


class StandingClock(FakeClock):
    """A clock that tests move; who sleeps waits until then."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = asyncio.Event()
        self.sleeps: Counter[float] = Counter()
        """How many sleeps have begun, by their seconds."""

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was moved so far."""
        self.sleeps[seconds] += 1
        end = self.mono_seconds + seconds
        await asyncio.sleep(0)
        while self.mono_seconds < end:
            await self._moved.wait()

    def move(self, seconds: float) -> None:
        """Advance the time."""
        self.mono_seconds += seconds
        self.wall_seconds += seconds
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


class SeededRandomness:
    """Randomness with the same values in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        """Return the next bytes."""
        return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """Return the next number."""
        return self._random.uniform(low, high)
