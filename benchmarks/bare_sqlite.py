"""The work as sqlite3 alone does it, on the caller's own thread."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.work import BATCH, VALUE

from jobsync import Components
from jobsync.stores.sqlite import _CREATE, _GET, _REPLACE

__all__ = ["BareSqlite"]


class BareSqlite:
    """The same statements in the same transactions, and the outcome of each row looked at."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=FULL")
        self._ids = Components.system().ids
        self._number = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _keys(self, count: int) -> list[str]:
        self._number += 1
        return [f"bare/{self._number:06d}/{i:06d}" for i in range(count)]

    def _transact(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        cursor = self._connection.cursor()
        for row in rows:
            cursor.execute(statement, row)
            assert cursor.rowcount == 1
        self._connection.execute("COMMIT")

    def _rows(self, keys: list[str], seq: int, trails: dict[str, str]) -> list[tuple[Any, ...]]:
        """Make rows of fresh writes; those of a later seq name the trail that they replace."""
        rows: list[tuple[Any, ...]] = []
        for key, nonce in zip(keys, self._ids.nonces(len(keys)), strict=True):
            text = msgspec.json.encode(VALUE).decode()
            before = trails.get(key, "")
            trail = trails[key] = f"{nonce} {before}"[:207] if before else nonce
            row = (text, seq, 0, 1, trail, 1, 1.0, key)
            rows.append((*row, seq - 1, before) if before else row)
        return rows

    async def put(self, count: int) -> None:
        """Insert a row, then update it again and again."""
        self._write(self._keys(1), count)

    async def get(self, count: int) -> None:
        """Read one row again and again."""
        for _ in range(count):
            rows = self._connection.execute(_GET, ['["bare/000001/000000"]']).fetchall()
            ((_, text, *_rest),) = rows
            msgspec.json.decode(text)

    async def create(self, count: int) -> None:
        """Insert rows, a batch a transaction."""
        for _ in range(count):
            self._write(self._keys(BATCH), 1)

    async def replace(self, count: int) -> None:
        """Insert rows, then update them again and again, a batch a transaction."""
        self._write(self._keys(BATCH), count)

    def _write(self, keys: list[str], times: int) -> None:
        trails: dict[str, str] = {}
        self._transact(_CREATE, self._rows(keys, 1, trails))
        for seq in range(2, times + 1):
            self._transact(_REPLACE, self._rows(keys, seq, trails))
