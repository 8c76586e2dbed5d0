"""What every part of jobsync takes from outside: time, randomness, and a place to tell facts.

Handing them in is what lets the same code run under a virtual clock.
"""

from typing import Self

import msgspec

from jobsync.core.clock import Clock, SystemClock, SystemRandomness
from jobsync.core.ids import Ids, Randomness
from jobsync.events import Events

__all__ = ["Components"]


class Components(msgspec.Struct, frozen=True, kw_only=True):
    """One set for a store and everything above it."""

    clock: Clock
    randomness: Randomness
    events: Events

    @classmethod
    def system(cls) -> Self:
        """Give this machine's own."""
        return cls(clock=SystemClock(), randomness=SystemRandomness(), events=Events())

    @property
    def ids(self) -> Ids:
        """Give a maker of names that uses this clock and this randomness."""
        return Ids(self.clock, self.randomness)
