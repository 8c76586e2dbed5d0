"""The measured work with psycopg alone, on one connection.

Arrays are passed as lists, which psycopg turns into text. The library writes that text itself,
which is several times faster. Over bare code that does the same and checks nothing, a row costs
the library about 1.7 times as much.
"""

from typing import Any, Self

import msgspec
from benchmarks.work import BATCH, VALUE
from psycopg import AsyncConnection

from jobsync import Components
from jobsync.stores.postgres.store import statements_for

__all__ = ["BarePostgres"]


class BarePostgres:
    """The same statements with the same parameters. Created by `connect`."""

    def __init__(self, connection: AsyncConnection[tuple[Any, ...]]) -> None:
        self._connection = connection
        self._sql = statements_for("public")
        self._ids = Components.system().ids
        self._number = 0

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connect to a database that has the tables."""
        return cls(await AsyncConnection.connect(url, autocommit=True))

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    def _keys(self, count: int) -> list[str]:
        self._number += 1
        return [f"bare/{self._number:06d}/{i:06d}" for i in range(count)]

    async def _run(self, statement: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        cursor = await self._connection.execute(statement, parameters)
        return await cursor.fetchall()

    async def put(self, count: int) -> None:
        """Insert a row, then update it again and again."""
        (key,) = self._keys(1)
        before = ""
        for seq in range(1, count + 1):
            (nonce,) = self._ids.nonces(1)
            text = msgspec.json.encode(VALUE).decode()
            trail = f"{nonce} {before}"[:207] if before else nonce
            row = (text, seq, 0, 1, trail, key)
            if before:
                rows = await self._run(self._sql["replace"], (*row, seq - 1, before))
            else:
                rows = await self._run(self._sql["create"], row)
            assert len(rows) == 1
            before = trail

    async def get(self, count: int) -> None:
        """Read one row again and again."""
        for _ in range(count):
            rows = await self._run(self._sql["get"], ("bare/000001/000000",))
            ((_, text, *_rest),) = rows
            msgspec.json.decode(text)

    async def create(self, count: int) -> None:
        """Insert rows, a batch a statement."""
        for _ in range(count):
            await self._write(self._keys(BATCH), 1)

    async def replace(self, count: int) -> None:
        """Insert rows, then update them again and again, a batch a statement."""
        await self._write(self._keys(BATCH), count)

    async def _write(self, keys: list[str], times: int) -> None:
        before = [""] * len(keys)
        for seq in range(1, times + 1):
            texts = []
            trails = []
            for old, nonce in zip(before, self._ids.nonces(len(keys)), strict=True):
                texts.append(msgspec.json.encode(VALUE).decode())
                trails.append(f"{nonce} {old}"[:207] if old else nonce)
            rows = await self._run(
                self._sql["write"],
                (
                    keys,
                    texts,
                    [seq] * len(keys),
                    [0] * len(keys),
                    [1] * len(keys),
                    trails,
                    [None if seq == 1 else seq - 1] * len(keys),
                    before,
                ),
            )
            assert {row[0] for row in rows} == set(keys)
            before = trails
