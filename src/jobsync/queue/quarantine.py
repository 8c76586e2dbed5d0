"""When a worker takes a suspect, and what else it does meanwhile.

A message whose worker died is a suspect: it may have killed it. A worker has one suspect at a
time, takes it when nothing else is in hand, and claims nothing else while it runs, so that a
death is nobody's fault but its own.

Neither lasts for ever, or one long handler would hold up all the others: after `patience`
seconds a suspect is taken in company, and others are claimed beside it. If the worker dies
then, the suspect is charged all the same and the others are spared. Pure, but for the clock.
"""

from jobsync.core.clock import Clock, Mono
from jobsync.queue.hand import Held

__all__ = ["Quarantine"]


class Quarantine:
    """One worker's dealings with suspects.

    Args:
        clock: this machine's.
        patience: seconds to wait for a suspect's turn, and to leave it alone then.
    """

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._held: Held | None = None
        self._until: Mono | None = None
        """Until when others wait: for the suspect's turn, or for its end."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is a suspect to take, as soon as it may be."""
        return self._held is None and self._until is not None

    def notice(self) -> None:
        """Take note that there are suspects."""
        if self._held is None and self._until is None:
            self._until = self._clock.mono() + self._patience

    def take(self, held: Held | None) -> None:
        """Take note that a suspect was claimed, or that there was none left."""
        self._held = held
        self._until = None if held is None else self._clock.mono() + self._patience

    def release(self, held: Held) -> None:
        """Take note that a message is done with."""
        if self._held is held:
            self.take(None)

    def wait(self, *, is_free: bool) -> float:
        """Give the seconds for which nothing may be claimed, unless something changes.

        Args:
            is_free: whether the worker has nothing in hand.
        """
        if self._until is None or is_free:
            return 0.0
        left = self._until - self._clock.mono()
        if left <= 0 and self._held is not None:
            # It has killed nobody so far: the next suspect may have its turn.
            self.take(None)
        return max(0.0, left)
