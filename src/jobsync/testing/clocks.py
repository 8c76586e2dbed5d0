"""A clock for each machine of a simulated world: fast or slow, off, or stopped.

Monotonic time never goes back, whatever is done to the clock. Wall time goes wherever it
is told to.
"""

import asyncio

from jobsync.core.clock import Mono, Wall
from jobsync.testing.loop import SimulatedLoop

__all__ = ["NodeClock"]

_BEGIN = 1_700_000_000.0
"""When every world begins, in Unix seconds."""

_UPTIME = 1000.0
"""For how many seconds machines have been running then."""

_LOST_IN_FLOATS = 1e-9


class NodeClock:
    """One machine's idea of time.

    Args:
        loop: whose time passes.
        rate: how fast it goes; 1.05 gains three seconds a minute.
        skew: by how much its wall clock is off, in seconds; may be changed at any time.
        boot: which boot of the machine this is.
    """

    def __init__(
        self, loop: SimulatedLoop, rate: float = 1.0, skew: float = 0.0, boot: int = 1
    ) -> None:
        self.skew = skew
        self._loop = loop
        self._rate = rate
        self._boot = boot
        self._is_stopped = False
        # On the world's time line, and on this clock's: when it was last set going.
        self._since = loop.time()
        self._shown = loop.time()
        self._booted = -_UPTIME if boot == 1 else loop.time()
        self._looked = loop.time()
        self._mono = Mono(self._shown - self._booted)
        self._sleepers: dict[asyncio.Future[None], asyncio.TimerHandle] = {}

    @property
    def rate(self) -> float:
        """How fast it goes. Whoever sleeps by it when this changes wakes by the new rate."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._pin()
        self._rate = rate
        for sleeper in self._sleepers:
            _wake(sleeper)

    def wall(self) -> Wall:
        """Tell the time of day, as this machine believes."""
        return Wall(_BEGIN + self._read() + self.skew)

    def mono(self) -> Mono:
        """Tell the time since boot."""
        # Of all questions the one that is asked most, and several times at each moment. Whatever
        # is done to a clock, it shows the same again at the same moment.
        if self._looked != self._loop.now:
            self._looked, self._mono = self._loop.now, Mono(self._read() - self._booted)
        return self._mono

    def boot(self) -> int:
        """Identify the boot."""
        return self._boot

    async def sleep(self, seconds: float) -> None:
        """Wait by this clock: longer in the world's time where it is slow or stands still."""
        left = max(0.0, seconds)
        until = self._read() + left
        while True:
            # In the world's time, or until the rate changes.
            sleeper: asyncio.Future[None] = asyncio.Future(loop=self._loop)
            self._sleepers[sleeper] = self._loop.call_later(left / self._rate, _wake, sleeper)
            try:
                await sleeper
            finally:
                self._sleepers.pop(sleeper).cancel()
            left = until - self._read()
            if left <= _LOST_IN_FLOATS:
                return

    def step_wall(self, seconds: float) -> None:
        """Move the time of day, forward or back. Nobody who sleeps notices."""
        self.skew += seconds

    def stop(self) -> None:
        """Stand still."""
        self._pin()
        self._is_stopped = True

    def go_on(self) -> None:
        """Go on from where it stood."""
        self._pin()
        self._is_stopped = False

    def reboot(self) -> "NodeClock":
        """Give the clock of this machine after it was switched off and on."""
        clock = NodeClock(self._loop, self._rate, self.skew, self._boot + 1)
        clock.skew += self._read() - clock._read()
        return clock

    def _read(self) -> float:
        if self._is_stopped:
            return self._shown
        return self._shown + (self._loop.now - self._since) * self._rate

    def _pin(self) -> None:
        """Count from here on, so that what comes next does not change what has been."""
        self._shown, self._since = self._read(), self._loop.time()


def _wake(sleeper: "asyncio.Future[None]") -> None:
    if not sleeper.done():
        sleeper.set_result(None)
