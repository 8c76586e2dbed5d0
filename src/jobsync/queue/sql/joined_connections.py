"""Connections of users, whose transactions a push joins.

On its own because both databases need it, and `common` is large.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jobsync.errors import Invalid

__all__ = [
    "SQLITE_FIX",
    "build_connection_error",
    "check_file",
    "run_joined",
    "unwrap_connection",
]

T = TypeVar("T")

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


def run_joined(connection: sqlite3.Connection, work: Callable[[], T]) -> T:
    """Run work in the transaction of a connection; in one of its own if there is none."""
    if not _needs_transaction(connection):
        return work()
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work()
        connection.execute("COMMIT")
    except BaseException:
        # The caller does not know of it, and would block every other writer.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


def _needs_transaction(connection: sqlite3.Connection) -> bool:
    """Whether each statement would be a transaction of its own.

    Otherwise there is one, or `sqlite3` begins one by itself.
    """
    # From Python 3.12 on, this attribute decides if it is True, and `isolation_level` does nothing.
    is_automatic = getattr(connection, "autocommit", None) is True
    is_automatic = is_automatic or connection.isolation_level is None
    return is_automatic and not connection.in_transaction


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
