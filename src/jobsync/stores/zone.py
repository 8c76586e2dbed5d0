"""The time zone of this process, by a name that a database understands."""

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_zone"]

_LOCALTIME = Path("/etc/localtime")
_FOLDER = "zoneinfo/"


def find_zone(environ: Mapping[str, str] | None = None, localtime: Path = _LOCALTIME) -> str:
    """Name the zone: `TZ`, or what the machine is set to; UTC, if nobody says.

    A name such as Europe/Berlin, or a rule such as CET-1CEST,M3.5.0,M10.5.0/3.
    """
    given = (os.environ if environ is None else environ).get("TZ")
    if given is not None:
        # Empty means UTC, as for the C library; a leading colon means nothing.
        return given.removeprefix(":").partition(_FOLDER)[2] or given.removeprefix(":") or "UTC"
    if not localtime.exists():
        return "UTC"
    if name := str(localtime.resolve()).partition(_FOLDER)[2]:
        return name
    # A copy of a zone's file ends with its rule, in a line of its own.
    return localtime.read_bytes().rstrip(b"\n").rpartition(b"\n")[2].decode() or "UTC"
