"""An event loop in which time is virtual and order is chance.

Of all callbacks that are ready a seeded draw picks one, so that every interleaving which
real scheduling allows has its turn in some seed; the same seed gives the same run. When
nothing is ready, time jumps to the next timer. A callback belongs to the node that made
it, and runs only while that node runs: a pause or a kill therefore strikes at any await of
unmodified code.
"""

import asyncio
import heapq
from contextvars import Context, ContextVar
from typing import Protocol

__all__ = ["HOST", "Host", "SimulatedLoop", "Stuck"]


class Stuck(Exception):
    """Nothing is ready and nothing ever will be: somebody waits for what cannot come."""


class Dice(Protocol):
    """Where chance comes from; `random.Random` will do."""

    def randrange(self, stop: int, /) -> int:
        """Draw a number below another."""
        ...


class Host(Protocol):
    """Decides whether a callback may run now."""

    def admit(self, handle: asyncio.Handle) -> bool:
        """Say whether to run it; one that is not admitted is the host's to keep or to drop."""
        ...


HOST: ContextVar[Host | None] = ContextVar("HOST", default=None)
"""To whom a callback belongs: inherited by every task that is made within."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks one by one.

    Args:
        dice: picks among those that are ready.
    """

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self._dice = dice
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._scheduled: list[asyncio.TimerHandle] = []
        self.steps = 0

    def time(self) -> float:
        """Tell the virtual time, in seconds since the loop began."""
        return self._now

    def put_back(self, handle: asyncio.Handle) -> None:
        """Make a callback ready again that was not admitted before."""
        self._ready.append(handle)

    def _run_once(self) -> None:
        if not self._ready:
            self._jump()
        chosen = self._dice.randrange(len(self._ready))
        handle = self._ready[chosen]
        self._ready[chosen] = self._ready[-1]
        self._ready.pop()
        self.steps += 1
        if handle.cancelled():
            return
        host = _context_of(handle).get(HOST)
        if host is None or host.admit(handle):
            handle._run()  # noqa: SLF001 - what a loop does with a handle

    def _jump(self) -> None:
        """Let time pass until a timer is due."""
        while self._scheduled and self._scheduled[0].cancelled():
            self._unschedule()
        if not self._scheduled:
            raise Stuck(f"after {self._now:g} s")
        self._now = max(self._now, self._scheduled[0].when())
        while self._scheduled and self._scheduled[0].when() <= self._now:
            self._ready.append(self._unschedule())

    def _unschedule(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001 - a loop's own mark
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to count: cancelled timers are dropped when their time comes."""

    def _process_events(self, event_list: object) -> None:
        """There are no sockets here."""

    def _write_to_self(self) -> None:
        """There is nobody to wake."""


def _context_of(handle: asyncio.Handle) -> Context:
    return handle._context  # type: ignore[attr-defined,no-any-return]  # noqa: SLF001
