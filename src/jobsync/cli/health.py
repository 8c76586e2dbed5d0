"""Health of a worker process: its state, the heartbeat file and `jobsync health`.

Live means that the event loop runs and nothing has failed permanently; the store does not matter.
Ready means that the process can work now: its sessions are current and its plugins are ready.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobsync.cli.options import UNHEALTHY, DurationType, json_option, now, option
from jobsync.cli.render import show_rows
from jobsync.errors import Invalid, Misconfigured

if TYPE_CHECKING:
    from jobsync.core.clock import Clock, Mono, Wall

__all__ = [
    "PERIOD",
    "HealthReport",
    "HealthState",
    "Heartbeat",
    "health",
    "parse_address",
    "write_heartbeat",
]

PERIOD = 1.0
"""Seconds between two signs of life of the event loop."""

_STUCK_AFTER = 300.0
"""Seconds without a sign of life after which the process counts as stuck. Much longer than the
timeout of a session: sessions send heartbeats on a thread of their own, so the loop may be busy."""

_MAX_PORT = 65_535


@click.command()
@option(
    "--live/--ready",
    "is_live",
    default=False,
    envvar="JOBSYNC_LIVE",
    help="Check that it runs, or, by default, that it can work now.",
)
@option(
    "--heartbeat-file",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    envvar="JOBSYNC_HEARTBEAT_FILE",
    help="The file that `jobsync work` writes.",
)
@option(
    "--max-age",
    type=DurationType(1.0),
    default=15.0,
    envvar="JOBSYNC_MAX_AGE",
    show_default=True,
    help="Seconds after which the file counts as left behind by a dead process.",
)
@json_option
def health(heartbeat_file: Path, max_age: float, *, is_live: bool, as_json: bool) -> None:
    """Check a `jobsync work` process on this machine. Exits with 3 if it is unhealthy."""
    heartbeat = _read_heartbeat(heartbeat_file)
    if heartbeat is None:
        reasons = [f"{heartbeat_file} does not exist: no process has started to work"]
    else:
        age = now() - heartbeat.at
        late = [f"no heartbeat for {age:.0f} s"] if age > max_age else []
        reasons = late or ([] if is_live else heartbeat.reasons)
    status = ("alive" if is_live else "ready") if not reasons else "unhealthy"
    pid = None if heartbeat is None else heartbeat.pid
    row = {"status": status, "pid": pid, "reasons": reasons}
    show_rows(["status", "pid", "reasons"], [row], as_json=as_json)
    raise SystemExit(UNHEALTHY if reasons else 0)


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe."""

    status: str
    reasons: list[str] = []

    @property
    def is_healthy(self) -> bool:
        """Whether the probe passes."""
        return not self.reasons

    def body(self) -> dict[str, Any]:
        """Return the body of the HTTP response."""
        return {"status": self.status} | ({"reasons": self.reasons} if self.reasons else {})


class HealthState:
    """The health of this process. The event loop updates it, and other threads read it.

    Args:
        clock: measures the time between two signs of life of the event loop.
        unready: returns the reasons for which the process cannot work now, if any.
    """

    def __init__(self, clock: Clock, unready: Callable[[], list[str]]) -> None:
        self._clock = clock
        self._unready = unready
        self._last_alive: Mono = clock.mono()
        self.failure = ""
        """Why the work has failed permanently; empty if it has not."""

    def mark_alive(self) -> None:
        """Record that the event loop runs."""
        self._last_alive = self._clock.mono()

    def live(self) -> HealthReport:
        """Return whether the process runs; if not, it should be restarted."""
        reasons = [self.failure] if self.failure else []
        idle = self._clock.mono() - self._last_alive
        if idle > _STUCK_AFTER:
            reasons.append(f"the event loop has been blocked for {idle:.0f} s")
        return HealthReport(status="stuck" if reasons else "alive", reasons=reasons)

    def ready(self) -> HealthReport:
        """Return whether the process can work now."""
        reasons = self.live().reasons or self._unready()
        return HealthReport(status="not_ready" if reasons else "ready", reasons=reasons)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a heartbeat file, written once per second. An old one means a dead process."""

    pid: int
    at: float
    """When it was written, by the wall clock of this machine."""
    reasons: list[str] = []
    """Why the process cannot work now; empty if it is ready."""


def write_heartbeat(path: Path, report: HealthReport, now: Wall) -> None:
    """Write the heartbeat file, atomically.

    Raises:
        Misconfigured: the file cannot be written.
    """
    heartbeat = Heartbeat(pid=os.getpid(), at=now.seconds, reasons=report.reasons)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(heartbeat))
        temporary.replace(path)
    except OSError as error:
        fix = "choose a file in a writable folder"
        problem = f"cannot be written: {error.strerror}"
        raise Misconfigured("--heartbeat-file", str(path), problem, fix) from None


def _read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a heartbeat file; return None if it does not exist.

    Raises:
        Misconfigured: it is not a heartbeat file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Heartbeat)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        fix = "pass the file that was passed to `jobsync work`"
        problem = f"cannot be read: {error}"
        raise Misconfigured("--heartbeat-file", str(path), problem, fix) from None


def parse_address(text: str) -> tuple[str, int]:
    """Parse [HOST:]PORT. Without a host, the server is reachable from this machine only.

    Raises:
        Invalid: the text is not an address.
    """
    host, _, port = text.rpartition(":")
    if port.isdecimal() and 0 <= int(port) <= _MAX_PORT:
        return host.strip("[]") or "127.0.0.1", int(port)
    fix = "pass a port such as 8080, or 0.0.0.0:8080 to listen on all interfaces"
    raise Invalid("--http", text, "is not an address", fix)
