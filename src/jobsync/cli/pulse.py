"""How a working process is, for probes: told by its own loop, asked by other threads.

Live means that the loop turns and nothing has failed for good; the store has no part in it.
Ready means that what runs here can do its work now: sessions are current and plugins say so.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from jobsync.core.clock import Clock, Mono

__all__ = ["PERIOD", "Pulse", "Report"]

PERIOD = 1.0
"""Seconds between turns of the loop that are noted."""

_STUCK = 300.0
"""Seconds without a turn after which the process counts as stuck. Far longer than a session's
timeout: sessions beat on a thread of their own, so that a loop may be busy for a while."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a probe."""

    status: str
    reasons: list[str] = []

    @property
    def is_well(self) -> bool:
        """Whether the probe passes."""
        return not self.reasons

    def body(self) -> dict[str, Any]:
        """Give what a probe reads."""
        return {"status": self.status} | ({"reasons": self.reasons} if self.reasons else {})


class Pulse:
    """Knows how one process is.

    Args:
        clock: dates the turns of the loop.
        unready: gives what keeps it from working, if anything does.
    """

    def __init__(self, clock: Clock, unready: Callable[[], list[str]]) -> None:
        self._clock = clock
        self._unready = unready
        self._turned: Mono = clock.mono()
        self.failure = ""
        """What has made the work fail for good."""

    def turn(self) -> None:
        """Note that the loop turns."""
        self._turned = self._clock.mono()

    def live(self) -> Report:
        """Say whether restarting the process would help nobody."""
        reasons = [self.failure] if self.failure else []
        idle = self._clock.mono() - self._turned
        if idle > _STUCK:
            reasons.append(f"the event loop has not turned for {idle:.0f} s")
        return Report(status="stuck" if reasons else "alive", reasons=reasons)

    def ready(self) -> Report:
        """Say whether it can work now."""
        reasons = self.live().reasons or self._unready()
        return Report(status="not_ready" if reasons else "ready", reasons=reasons)
