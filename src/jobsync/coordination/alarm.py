"""A rest that ends when it is over, or when somebody rings, be it before it began."""

import asyncio

from jobsync.core.clock import Clock, Mono

__all__ = ["Alarm"]


class Alarm:
    """Wakes one who rests.

    Args:
        clock: what a rest goes by.
        grain: seconds by which a rest may last too long, so that a clock which is slower than
            the loop's does not spin it.
    """

    def __init__(self, clock: Clock, grain: float) -> None:
        self._clock = clock
        self._grain = grain
        self._rung = False
        self._resting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the rest that is under way, or else the next one."""
        self._rung = True
        self._wake()

    async def rest(self, until: Mono) -> None:
        """Wait until a moment, or until it rings."""
        loop = asyncio.get_running_loop()
        while not self._rung and (left := until - self._clock.mono()) > 0:
            self._resting = loop.create_future()
            timer = loop.call_later(max(left, self._grain), self._wake)
            try:
                await self._resting
            finally:
                timer.cancel()
        self._rung = False

    def _wake(self) -> None:
        if self._resting is not None and not self._resting.done():
            self._resting.set_result(None)
