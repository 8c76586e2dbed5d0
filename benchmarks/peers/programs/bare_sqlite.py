"""sqlite3 alone: one plain table, a claim of a hundred rows by UPDATE, then their DELETE.

The limit for a queue on SQLite that claims before it handles, as durable: WAL, synchronous=FULL.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from protocol import Message, OnStart, PeerProgram

_TABLE = """
CREATE TABLE bare (
  id INTEGER PRIMARY KEY, claimed INTEGER NOT NULL DEFAULT 0, payload TEXT NOT NULL
);
CREATE INDEX bare_ready ON bare (id) WHERE NOT claimed
"""
_CLAIM = """
UPDATE bare SET claimed = 1 WHERE id IN (
  SELECT id FROM bare WHERE NOT claimed ORDER BY id LIMIT 100
) RETURNING id, payload
"""
_DELETE = "DELETE FROM bare WHERE id BETWEEN ? AND ?"
_PUSH = "INSERT INTO bare (payload) VALUES (?)"


class BareSqlite(PeerProgram):
    """One connection, on the caller's thread. It only drains: bare SQLite notifies nobody."""

    async def prepare(self) -> None:
        """Create the table."""
        async with self.opened():
            self._connection.executescript(_TABLE)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the file."""
        self._is_empty = False
        self._connection = sqlite3.connect(urlsplit(self.url).path[1:], isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        yield
        self._connection.close()

    async def enqueue_many(self, messages: list[Message]) -> None:
        """Insert a batch in one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(_PUSH, [[json.dumps(message)] for message in messages])
        self._connection.execute("COMMIT")

    async def enqueue(self, message: Message) -> None:
        """Insert a row."""
        self._connection.execute(_PUSH, [json.dumps(message)])

    async def work(self, on_start: OnStart) -> None:
        """Claim and delete until nothing is left."""
        while rows := self._connection.execute(_CLAIM).fetchall():
            for _, payload in rows:
                json.loads(payload)
                on_start()
            positions = [row[0] for row in rows]
            self._connection.execute(_DELETE, [min(positions), max(positions)])
        self._is_empty = True
        await asyncio.Event().wait()

    async def is_drained(self, count: int) -> bool:  # noqa: ARG002 - it knows
        """Whether nothing is left."""
        return self._is_empty


if __name__ == "__main__":
    BareSqlite.main()
