"""The time of day by the store's clock, where it has one; otherwise by this machine's.

It is extrapolated from the last reading, so a step of this machine's wall clock has no effect.
"""

from jobsync.core.clock import Clock
from jobsync.stores.contract import Store

__all__ = ["StoreClock"]

_MAX_AGE = 60.0
"""Seconds after which the store's time is read again before something is dated by it."""


class StoreClock:
    """The time of day that nodes share.

    Args:
        store: whose clock is read.
        clock: this machine's.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._time: float | None = None
        """The store's time of day when it was last read."""
        self._read_at = clock.mono()

    async def read(self) -> float:
        """Read the store's time of day, if it has a clock; return the time.

        Raises:
            Unavailable: the store does not answer; `now` continues from the last reading.
        """
        now = await self._store.now()
        self._read_at = self._clock.mono()
        self._time = None if now is None else now.seconds
        return self.now

    async def refresh(self) -> None:
        """Read the store's time if that was long ago.

        Raises:
            Unavailable: the store does not answer; `now` continues from the last reading.
        """
        if self._clock.mono() - self._read_at > _MAX_AGE:
            await self.read()

    @property
    def now(self) -> float:
        """The time of day."""
        if self._time is None:
            return self._clock.wall().seconds
        return self._time + (self._clock.mono() - self._read_at)

    @property
    def is_shared(self) -> bool:
        """Whether `now` is the store's time, which is the same for all nodes."""
        return self._time is not None
