"""The work that is measured, and how the library does it.

Each way writes the same value under its own keys, so that it can run at any time and any number of
times.
"""

from typing import Protocol

from jobsync import Applied, Put, Store

__all__ = ["BATCH", "VALUE", "Ours", "Work"]

BATCH = 100
VALUE = {"name": "ann", "n": 1, "ok": True, "score": 1.5, "tags": ["a", "b"], "more": {"k": None}}


class Work(Protocol):
    """One way to do the work."""

    async def put(self, count: int) -> None:
        """Create a record, then replace it again and again."""
        ...

    async def get(self, count: int) -> None:
        """Read one record again and again."""
        ...

    async def create(self, count: int) -> None:
        """Create batches of records."""
        ...

    async def replace(self, count: int) -> None:
        """Create a batch of records, then replace it again and again."""
        ...


class Ours:
    """The work as a user of the library does it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._number = 0

    def _keys(self, count: int) -> list[str]:
        self._number += 1
        return [f"ours/{self._number:06d}/{i:06d}" for i in range(count)]

    async def put(self, count: int) -> None:
        """Create a record, then replace it again and again."""
        (key,) = self._keys(1)
        record = await self._store.create(key, VALUE)
        for _ in range(1, count):
            record = await self._store.put(record, VALUE)

    async def get(self, count: int) -> None:
        """Read one record again and again."""
        for _ in range(count):
            assert await self._store.get("ours/000001/000000")

    async def create(self, count: int) -> None:
        """Create batches of records, each by one write."""
        for _ in range(count):
            await self._store.write([Put(key, VALUE) for key in self._keys(BATCH)])

    async def replace(self, count: int) -> None:
        """Create a batch of records, then replace it again and again."""
        outcomes = await self._store.write([Put(key, VALUE) for key in self._keys(BATCH)])
        for _ in range(1, count):
            records = [done.record for done in outcomes if isinstance(done, Applied)]
            assert len(records) == BATCH
            outcomes = await self._store.write([record.replace(VALUE) for record in records])
