"""The durable work of a queue with bare drivers: the same tables, one connection, no checks.

A drain claims a hundred rows by `UPDATE … RETURNING`, and deletes them. It renews no claims, counts
no attempts, keeps no errors and no completed messages, and runs no handler.
"""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psycopg
from psycopg import sql

from jobsync import Components
from jobsync.stores.sql import as_array

__all__ = ["BATCH", "Bare", "BarePostgres", "BareSqlite"]

BATCH = 100
QUEUE = "default/tasks"

_PG_CLAIM = sql.SQL("""
UPDATE jobsync_message SET state = 'claimed', deliveries = deliveries + 1,
  due = clock_timestamp() + interval '30 s'
WHERE id = ANY (ARRAY (
  SELECT id FROM jobsync_message WHERE queue = 'default/tasks' AND state = 'ready'
  ORDER BY position LIMIT 100 FOR UPDATE SKIP LOCKED
)) RETURNING id, payload
""")
_PG_DELETE = "DELETE FROM jobsync_message WHERE id = ANY (%s::text[])"
_PG_INSERT = """
INSERT INTO jobsync_message (queue, id, state, due, payload, max_attempts)
VALUES ('default/tasks', %s, 'ready', clock_timestamp(), %s, 4)
"""
_PG_COPY = """
COPY jobsync_message (queue, id, state, due, payload, max_attempts) FROM STDIN
"""
_LITE_CLAIM = """
UPDATE jobsync_message SET state = 'claimed', deliveries = deliveries + 1, due = 0
WHERE position IN (
  SELECT position FROM jobsync_message WHERE queue = 'default/tasks' AND state = 'ready'
  ORDER BY position LIMIT 100
) RETURNING position, payload
"""
_LITE_DELETE = "DELETE FROM jobsync_message WHERE position BETWEEN ? AND ?"
_LITE_INSERT = """
INSERT INTO jobsync_message (queue, id, state, due, payload, max_attempts, enqueued)
VALUES ('default/tasks', ?, 'ready', 0, ?, 4, 0)
"""


class Bare(Protocol):
    """One connection to a queue's tables."""

    def drain(self) -> int:
        """Claim and delete, a hundred at a time, until nothing is left; return the count."""
        ...

    def push(self, payload: str) -> None:
        """Insert a row, and commit."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class BarePostgres:
    """psycopg alone."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._ids = Components.system().ids

    def drain(self) -> int:
        """Claim and delete, a hundred at a time, until nothing is left; return the count."""
        count = 0
        while rows := self._connection.execute(_PG_CLAIM).fetchall():
            self._connection.execute(_PG_DELETE, [as_array([row[0] for row in rows])])
            count += len(rows)
        return count

    def push(self, payload: str) -> None:
        """Insert a row, and commit."""
        self._connection.execute(_PG_INSERT, [*self._ids.records(1), payload])

    def copy(self, payloads: Sequence[str]) -> None:
        """Insert many rows by COPY, and commit."""
        ids = self._ids.records(len(payloads))
        with self._connection.cursor().copy(_PG_COPY) as copy:
            for name, payload in zip(ids, payloads, strict=True):
                copy.write_row((QUEUE, name, "ready", "now", payload, 4))

    def execute(self, statement: str) -> None:
        """Run another statement."""
        self._connection.execute(statement.encode())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class BareSqlite:
    """sqlite3 alone, equally durable: WAL, and synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._ids = Components.system().ids

    def drain(self) -> int:
        """Claim and delete, a hundred at a time, until nothing is left; return the count."""
        count = 0
        while rows := self._connection.execute(_LITE_CLAIM).fetchall():
            positions = [row[0] for row in rows]
            self._connection.execute(_LITE_DELETE, [min(positions), max(positions)])
            count += len(rows)
        return count

    def push(self, payload: str) -> None:
        """Insert a row, and commit."""
        self._connection.execute(_LITE_INSERT, [*self._ids.records(1), payload])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def rate(count: int, begun: float) -> float:
    """Return the rate per second since a moment of the performance counter."""
    return count / (time.perf_counter() - begun)
