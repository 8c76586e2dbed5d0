"""Tells of handlers whose time is over, each as soon as it is: one watch for all that run.

A timer for each would cost more than most handlers do. The watch looks when the first of them
may be over; who began since has to end later, as a rule, and then it is not woken for that.
"""

from collections.abc import Callable

from jobsync.coordination.aio import Wakeup
from jobsync.core.clock import Clock, Mono
from jobsync.queue.hand import Held

__all__ = ["Deadlines"]

_SHORTEST_REST = 0.01
_LONGEST_REST = 3600.0


class Deadlines:
    """When handlers have to be done.

    Args:
        clock: this machine's.
        over: told whose time is over, once.
    """

    def __init__(self, clock: Clock, over: Callable[[Held], None]) -> None:
        self._clock = clock
        self._over = over
        self._ends: dict[Held, Mono] = {}
        self._alarm = Wakeup(clock, _SHORTEST_REST)
        self._looks_at = clock.mono() + _LONGEST_REST

    def add(self, held: Held, end: Mono) -> None:
        """Watch a handler, until it is removed."""
        self._ends[held] = end
        if end < self._looks_at:
            self._looks_at = end
            self._alarm.ring()

    def remove(self, held: Held) -> None:
        """Watch it no more, if it is watched."""
        self._ends.pop(held, None)

    async def watch_for_ever(self) -> None:
        """Tell of each whose time is over, until cancelled."""
        while True:
            await self._alarm.rest(self._looks_at)
            now = self._clock.mono()
            if now >= self._looks_at:
                self._look(now)

    def _look(self, now: Mono) -> None:
        for held in [held for held, end in self._ends.items() if end <= now]:
            self.remove(held)
            self._over(held)
        self._looks_at = min(self._ends.values(), default=now + _LONGEST_REST)
