"""Time and randomness, passed in as arguments.

Wall time is the time of day, for people and for cron; it may jump. Monotonic time measures
how long ago something happened on this machine; it counts through a suspend. They are
different types: subtracting or comparing one with the other is an error for the type checker
and at run time.

`SystemClock` and `SystemRandomness` are the only code that reads the machine's own.
"""

import os
import random
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Protocol, Self, TypeAlias

import msgspec

__all__ = [
    "Clock",
    "Mono",
    "Randomness",
    "Seconds",
    "SystemClock",
    "SystemRandomness",
    "Wall",
    "to_datetime",
]

Seconds: TypeAlias = float
"""A duration. Every duration in jobsync is in seconds, unless its name ends in another unit."""

_FIRST = datetime(1, 1, 2, tzinfo=UTC)
_LAST = datetime(9999, 12, 31, tzinfo=UTC)
"""The days before and after these do not exist in every zone."""


def to_datetime(seconds: Seconds) -> datetime:
    """Return a time in seconds since 1970; the first or the last day if no calendar has it."""
    if not _FIRST.timestamp() <= seconds <= _LAST.timestamp():
        return _FIRST if seconds < 0 else _LAST
    return datetime.fromtimestamp(seconds, UTC)


class _Instant(msgspec.Struct, frozen=True, order=True):
    """A point in time on one time line, in seconds."""

    seconds: float

    def __sub__(self, earlier: Self) -> Seconds:
        if type(self) is not type(earlier):
            return NotImplemented
        return self.seconds - earlier.seconds

    def __add__(self, seconds: Seconds) -> Self:
        return type(self)(self.seconds + seconds)


class Wall(_Instant, frozen=True, order=True):
    """Seconds since 1970 in UTC, according to this machine."""


class Mono(_Instant, frozen=True, order=True):
    """Seconds since this machine was started. Comparable within one boot only."""


class Clock(Protocol):
    """Source of time."""

    def wall(self) -> Wall:
        """Return the time of day."""
        ...

    def mono(self) -> Mono:
        """Return the time since boot, including time spent suspended."""
        ...

    def boot(self) -> int:
        """Return an id of this boot: `Mono` values of two boots do not compare."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Randomness(Protocol):
    """Source of randomness."""

    def bytes(self, count: int) -> bytes:
        """Return bytes that cannot be guessed or repeated."""
        ...

    def uniform(self, low: float, high: float) -> float:
        """Return a number between two bounds."""
        ...


# Linux stops CLOCK_MONOTONIC while suspended; a lease must not stand still meanwhile.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SystemClock:
    """This machine's clocks."""

    def wall(self) -> Wall:
        """Return the time of day."""
        return Wall(time.time())

    def mono(self) -> Mono:
        """Return the time since boot, including time spent suspended."""
        return Mono(time.clock_gettime(_SINCE_BOOT))

    def boot(self) -> int:
        """Return an id of this boot, or 0 if the system has none."""
        return _read_boot_id()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running loop."""
        import asyncio  # noqa: PLC0415 - so that help of the command line does not load it

        await asyncio.sleep(seconds)


@cache
def _read_boot_id() -> int:
    if not _BOOT_ID.exists():
        return 0
    # 60 bits fit every SQL integer.
    return int(_BOOT_ID.read_text(encoding="ascii").replace("-", "")[:15], 16)


class SystemRandomness:
    """The operating system's randomness, safe across forks."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def bytes(self, count: int) -> bytes:
        """Return bytes that cannot be guessed or repeated."""
        return os.urandom(count)

    def uniform(self, low: float, high: float) -> float:
        """Return a number between two bounds."""
        return self._random.uniform(low, high)
