"""Time as an argument.

Wall time says when something happened, for people and for cron; it may jump.
Monotonic time says how long ago something happened on this machine; it counts
through a suspend. They are different types: subtracting or comparing one with the
other is an error for the type checker and at run time.
"""

import asyncio
import os
import random
import time
from functools import cache
from pathlib import Path
from typing import Protocol, Self

import msgspec

__all__ = ["Clock", "Mono", "SystemClock", "SystemRandomness", "Wall"]


class _Point(msgspec.Struct, frozen=True, order=True):
    """A point in time on one time line, in seconds."""

    seconds: float

    def __sub__(self, earlier: Self) -> float:
        if type(self) is not type(earlier):
            return NotImplemented
        return self.seconds - earlier.seconds

    def __add__(self, seconds: float) -> Self:
        return type(self)(self.seconds + seconds)


class Wall(_Point, frozen=True, order=True):
    """Seconds since 1970 in UTC, as this machine believes."""


class Mono(_Point, frozen=True, order=True):
    """Seconds since this machine was started. Comparable within one boot only."""


class Clock(Protocol):
    """Where time comes from."""

    def wall(self) -> Wall:
        """Tell the time of day."""
        ...

    def mono(self) -> Mono:
        """Tell the time since boot, including time spent suspended."""
        ...

    def boot(self) -> int:
        """Identify this boot of the machine: `Mono` values of two boots do not compare."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


# The real clock and the real randomness: the one file that asks the machine.


# Linux stops CLOCK_MONOTONIC while suspended; a lease must not stand still meanwhile.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SystemClock:
    """This machine's clocks."""

    def wall(self) -> Wall:
        """Tell the time of day."""
        return Wall(time.time())

    def mono(self) -> Mono:
        """Tell the time since boot, including time spent suspended."""
        return Mono(time.clock_gettime(_SINCE_BOOT))

    def boot(self) -> int:
        """Identify this boot, or give 0 where the system does not say."""
        return _read_boot_id()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(seconds)


@cache
def _read_boot_id() -> int:
    if not _BOOT_ID.exists():
        return 0
    # 60 bits: what every SQL integer holds.
    return int(_BOOT_ID.read_text(encoding="ascii").replace("-", "")[:15], 16)


class SystemRandomness:
    """The operating system's randomness, safe across forks."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def bytes(self, count: int) -> bytes:
        """Draw bytes that nobody can guess or repeat."""
        return os.urandom(count)

    def uniform(self, low: float, high: float) -> float:
        """Draw a number between two bounds."""
        return self._random.uniform(low, high)
