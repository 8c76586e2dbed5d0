"""Connections of users, whose transactions a push joins.

On its own because both databases need it, and `common` is large.
"""

import sqlite3
from pathlib import Path
from typing import Any

from jobsync.errors import Invalid

__all__ = ["SQLITE_FIX", "build_connection_error", "check_file", "unwrap_connection"]

SQLITE_FIX = "pass a sqlite3 connection to the file that the queue is in"


def check_file(connection: sqlite3.Connection, path: Path | None) -> None:
    """Check that a connection is to the file of a queue.

    Raises:
        Invalid: it is to another one.
    """
    cursor = connection.cursor()
    cursor.row_factory = None
    (_, _, name) = cursor.execute("PRAGMA database_list").fetchone()
    if path is None or not (name and path.samefile(name)):
        raise build_connection_error(connection, f"is to {name or 'memory'}", SQLITE_FIX)


def unwrap_connection(connection: object) -> object:
    """Return the database driver's connection, so that a push joins its transaction.

    SQLAlchemy's connections provide it as `driver_connection`; SQLAlchemy need not be installed.
    """
    found: Any = connection
    # An asynchronous SQLAlchemy connection wraps a synchronous one.
    found = getattr(found, "sync_connection", None) or found
    if not hasattr(found, "driver_connection"):
        inner = getattr(found, "connection", None)
        found = inner if hasattr(inner, "driver_connection") else found
    return getattr(found, "driver_connection", found)


def build_connection_error(connection: object, problem: str, fix: str) -> Invalid:
    """Return the error for a connection whose transaction cannot be joined."""
    kind = type(connection)
    return Invalid("connection", f"{kind.__module__}.{kind.__qualname__}", problem, fix)
