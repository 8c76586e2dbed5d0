"""Time as an argument.

Wall time says when something happened, for people and for cron; it may jump.
Monotonic time says how long ago something happened on this machine; it counts
through a suspend. They are different types: subtracting or comparing one with the
other is an error for the type checker and at run time.
"""

from typing import Protocol, Self

import msgspec

__all__ = ["Clock", "Mono", "Wall"]


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
