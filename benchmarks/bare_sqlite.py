"""The measured work with sqlite3 alone, on the caller's thread."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.work import BATCH, VALUE

from jobsync.stores.sqlite.store import _CREATE, _GET, _REPLACE

__all__ = ["BareSqlite"]

_TEXT = msgspec.json.encode(VALUE).decode()
_TRAIL = "AAAAAAAAAAAA"


class BareSqlite:
    """The same statements in the same transactions, with prepared parameters."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=FULL")
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
        self._connection.execute("COMMIT")

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
        self._transact(_CREATE, [(_TEXT, 1, 0, 1, _TRAIL, 1, 1.0, key) for key in keys])
        for seq in range(2, times + 1):
            row = (_TEXT, seq, 0, 1, _TRAIL, 1, 1.0)
            self._transact(_REPLACE, [(*row, key, seq - 1, _TRAIL) for key in keys])
