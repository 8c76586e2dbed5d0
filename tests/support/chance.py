"""Time and randomness that tests hold in their hands."""

import asyncio
import random

from jobsync.core.clock import Mono, Wall

__all__ = ["FakeClock", "SeededRandomness"]


class FakeClock:
    """A clock that stands still until it is told, or until somebody sleeps."""

    def __init__(self) -> None:
        self.wall_seconds = 1_700_000_000.0
        self.mono_seconds = 1_000.0
        self.boot_id = 1

    def wall(self) -> Wall:
        """Tell what `wall_seconds` says."""
        return Wall(self.wall_seconds)

    def mono(self) -> Mono:
        """Tell what `mono_seconds` says."""
        return Mono(self.mono_seconds)

    def boot(self) -> int:
        """Tell what `boot_id` says."""
        return self.boot_id

    async def sleep(self, seconds: float) -> None:
        """Move both lines on, without waiting, and let others run."""
        await asyncio.sleep(0)
        self.wall_seconds += seconds
        self.mono_seconds += seconds


class SeededRandomness:
    """The same draws in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        """Draw the next bytes."""
        return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """Draw the next number."""
        return self._random.uniform(low, high)
