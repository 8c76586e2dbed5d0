"""A file by which a process tells, once a second, how it is; an old one tells of a death."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from jobsync.errors import Misconfigured

if TYPE_CHECKING:
    from pathlib import Path

    from jobsync.cli.pulse import Report
    from jobsync.core.clock import Wall

__all__ = ["Heartbeat", "read_heartbeat", "write_heartbeat"]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    pid: int
    at: float
    """When it was written, by this machine's wall clock."""
    reasons: list[str] = []
    """What keeps the process from working; nothing, if it is ready."""


def write_heartbeat(path: Path, report: Report, now: Wall) -> None:
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
