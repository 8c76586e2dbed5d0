"""The CPU time of a PostgreSQL server with all its processes, ended ones included."""

import contextlib
import os
from pathlib import Path

from servers import PostgresServer

__all__ = ["read_cpu"]

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def read_cpu(server: PostgresServer) -> float:
    """Return the seconds so far; 0 for a server that others may use."""
    if not server.is_ours:
        return 0.0
    main = (server.folder / "db" / "postmaster.pid").read_text().split()[0]
    # Of its children that have ended too: fields 16 and 17 of proc(5).
    seconds = _read_ticks(main, 4)
    for child in Path(f"/proc/{main}/task/{main}/children").read_text().split():
        with contextlib.suppress(OSError):
            seconds += _read_ticks(child, 2)
    return seconds * _TICK


def _read_ticks(process: str, fields: int) -> int:
    _, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    return sum(int(ticks) for ticks in rest.split()[11 : 11 + fields])
