"""A store around another store: base class of those that count, settle, cache or record calls."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.stores.contract import (
    BURIAL_AGE,
    Change,
    Entry,
    Head,
    Outcome,
    Record,
    Store,
    Where,
)
from jobsync.stores.sql import SqlAccess

__all__ = ["StoreDecorator"]

T = TypeVar("T")


class StoreDecorator(Store):
    """Base class for stores that wrap another store.

    It passes every call on. Override `around` to surround all calls, or override one call.
    """

    def __init__(self, inner: Store) -> None:
        self.name = inner.name
        self.traits = inner.traits
        self.is_billed = inner.is_billed
        self.is_atomic = inner.is_atomic
        self.inner = inner

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Run one call of the inner store.

        Args:
            call: get, write, heads, scan, append, read, discard, bury, drop or age.
            sent: how many keys, changes or entries it sends.
            work: runs the call.
        """
        del call, sent
        return await work()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key."""
        return await self.around(
            "get", len(keys), lambda: self.inner.get_many(keys, tombstones=tombstones)
        )

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes."""
        return await self.around("write", len(changes), lambda: self.inner.write(changes))

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys and versions."""
        return await self.around(
            "heads", 0, lambda: self.inner.heads(prefix, after=after, until=until, limit=limit)
        )

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        return await self.around(
            "scan", 0, lambda: self.inner.scan(prefix, after=after, limit=limit, where=where)
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Append entries to a history."""
        await self.around(
            "append", len(entries), lambda: self.inner.append(stream, entries, batch=batch)
        )

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read entries of a history."""
        return await self.around(
            "read", 0, lambda: self.inner.read(stream, after=after, limit=limit, where=where)
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Delete old entries of a history."""
        return await self.around(
            "discard", 0, lambda: self.inner.discard(stream, older_than=older_than)
        )

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""
        return await self.around(
            "bury", 0, lambda: self.inner.bury(prefix, older_than=older_than, limit=limit)
        )

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally."""
        await self.around("drop", len(keys), lambda: self.inner.drop(keys))

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed. Does not go through `around`: it is only a hint."""
        await self.inner.wait(topic, timeout)

    @property
    def sql(self) -> SqlAccess | None:
        """The inner store's access; calls through it bypass `around`."""
        return self.inner.sql

    async def now(self) -> Wall | None:
        """Return the store's time of day."""
        return await self.inner.now()

    async def age(self, record: Record) -> float | None:
        """Return for how long a version has been current."""
        return await self.around("age", 1, lambda: self.inner.age(record))

    async def close(self) -> None:
        """Close the inner store."""
        await self.inner.close()
