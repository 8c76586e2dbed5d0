"""How a working process is, for probes: told by its own loop, asked by other threads.

Live means that the loop turns and nothing has failed for good; the store has no part in it.
Ready means that what runs here can do its work now: sessions are current and plugins say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from jobsync.core.clock import Clock, Mono
from jobsync.errors import Misconfigured

if TYPE_CHECKING:
    from pathlib import Path

    from jobsync.core.clock import Wall

__all__ = [
    "PERIOD",
    "HealthReport",
    "HealthState",
    "Heartbeat",
    "read_heartbeat",
    "write_heartbeat",
]


PERIOD = 1.0
"""Seconds between turns of the loop that are noted."""

_STUCK = 300.0
"""Seconds without a turn after which the process counts as stuck. Far longer than a session's
timeout: sessions beat on a thread of their own, so that a loop may be busy for a while."""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
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


class HealthState:
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

    def live(self) -> HealthReport:
        """Say whether restarting the process would help nobody."""
        reasons = [self.failure] if self.failure else []
        idle = self._clock.mono() - self._turned
        if idle > _STUCK:
            reasons.append(f"the event loop has not turned for {idle:.0f} s")
        return HealthReport(status="stuck" if reasons else "alive", reasons=reasons)

    def ready(self) -> HealthReport:
        """Say whether it can work now."""
        reasons = self.live().reasons or self._unready()
        return HealthReport(status="not_ready" if reasons else "ready", reasons=reasons)


# A file by which a process tells, once a second, how it is; an old one tells of a death.


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    pid: int
    at: float
    """When it was written, by this machine's wall clock."""
    reasons: list[str] = []
    """What keeps the process from working; nothing, if it is ready."""


def write_heartbeat(path: Path, report: HealthReport, now: Wall) -> None:
    """Leave word that the loop turns, in one piece.

    Raises:
        Misconfigured: the file cannot be written.
    """
    beat = Heartbeat(pid=os.getpid(), at=now.seconds, reasons=report.reasons)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.encode(beat))
        draft.replace(path)
    except OSError as error:
        fix = "name a file in a folder that can be written"
        raise Misconfigured("--heartbeat-file", str(path), str(error.strerror), fix) from None


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Give what the file says; None where there is none.

    Raises:
        Misconfigured: it is not such a file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Heartbeat)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        fix = "give the same file as to `jobsync work`"
        raise Misconfigured("--heartbeat-file", str(path), str(error), fix) from None
