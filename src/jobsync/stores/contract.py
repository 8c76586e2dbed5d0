"""The one contract that everything stands on: versioned records and append-only history.

What every store promises:

- A write names the record that it replaces, or that the name was never used. Of several
  writes based on one record at most one is applied.
- Each change of a batch has its own outcome: applied, conflicted, or unknown. An unknown
  one may have happened, may yet happen, or may never; nobody may read it as either.
- Versions never repeat, not even for equal content, nor after delete and re-create.
- A deleted record leaves a tombstone, which readers skip and `Put` without a base does
  not match. It is buried only when no late copy of an earlier request can still arrive.
- `epoch` and `format` never go back. A writer of a lower one is refused before anything
  is sent, which suffices because a write applies only to the very record that it read.
- Listing is in byte order of the keys, one level at a time.
- What cannot be read is reported, skipped by `scan`, raised by `get`, and never changed.

A store is one file that inherits `Store` and passes the conformance suite.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import msgspec

from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.core.ids import NONCE_LENGTH
from jobsync.errors import Conflict, OutcomeUnknown
from jobsync.stores.sql_access import SqlAccess

__all__ = [
    "BURIAL_AGE",
    "TRAIL_LENGTH",
    "Applied",
    "Change",
    "Conflicted",
    "Delete",
    "Entry",
    "Head",
    "Outcome",
    "Put",
    "Record",
    "Store",
    "StoreDecorator",
    "Unknown",
    "Where",
    "unwrap",
]


TRAIL_LENGTH = 16
"""How many nonces a record keeps: a lost reply can be settled across that many writes."""

BURIAL_AGE = 3600.0
"""Seconds before a tombstone may go: far beyond the settling deadline and the latest landing."""

Where: TypeAlias = Mapping[str, Json] | None


class Record(msgspec.Struct, frozen=True, gc=False):
    """One version of one record, as it was read or written.

    It is also the proof that a later write is based on it: `record.replace(value)`.
    """

    key: str
    value: Json
    """The decoded document; None on a tombstone."""
    version: str
    """Opaque; differs between any two writes ever made."""
    seq: int
    """Counts the writes to this name, tombstones included."""
    epoch: int
    """The highest term that wrote it; see fencing."""
    format: int
    """The format of the value; a writer of a lower format must leave it alone."""
    trail: str
    """The nonces of the latest writes, newest first, separated by spaces."""
    deleted: bool = False
    """Whether this is a tombstone."""

    @property
    def nonce(self) -> str:
        """Mark of the write that made this version."""
        return self.trail[:NONCE_LENGTH]

    def remembers(self, nonce: str) -> bool:
        """Say whether a write is among the latest ones."""
        return nonce in self.trail.split(" ")

    def replace(self, value: Json, *, epoch: int | None = None, format: int = 1) -> "Put":
        """Make the change that puts a new value in this record's place."""
        return Put(self.key, value, self, epoch=epoch, format=format)

    def delete(self, *, epoch: int | None = None, format: int = 1) -> "Delete":
        """Make the change that puts a tombstone in this record's place."""
        return Delete(self, epoch=epoch, format=format)


class Head(msgspec.Struct, frozen=True, gc=False):
    """A record's name and version, without its value."""

    key: str
    version: str


class Put(msgspec.Struct, frozen=True, gc=False):
    """Write a value in place of `base`, or under a name that was never used."""

    key: str
    value: Json
    base: Record | None = None
    epoch: int | None = None
    """The writer's term; None keeps the record's."""
    format: int = 1
    nonce: str = ""
    """Marks this write; drawn by the store if empty, and kept when it is sent again."""


class Delete(msgspec.Struct, frozen=True, gc=False):
    """Write a tombstone in place of `base`."""

    base: Record
    epoch: int | None = None
    format: int = 1
    nonce: str = ""

    @property
    def key(self) -> str:
        """Name the record."""
        return self.base.key


Change: TypeAlias = Put | Delete


class Applied(msgspec.Struct, frozen=True, gc=False):
    """It happened; `record` is the new base."""

    record: Record


class Conflicted(msgspec.Struct, frozen=True, gc=False):
    """It did not and will not happen: the base was no longer, or not yet, there."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """It may have happened, may yet happen, or may never."""

    reason: str


Outcome: TypeAlias = Applied | Conflicted | Unknown


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One line of history."""

    stream: str
    id: str
    """Sorts by the writer's wall clock; pass it as `after` to read on."""
    at: Wall
    value: Json


class Store(ABC):
    """Versioned records with conditional writes, and append-only history.

    Attributes:
        name: how errors and events call this store; holds no secret.
        traits: what was learned about the server behind it, kept with the probe's verdict.
        is_billed: whether each request costs money and tens of milliseconds.
    """

    name: str
    traits: Mapping[str, Json] = MappingProxyType({})
    is_billed: bool = False

    @abstractmethod
    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name, in the order of the names.

        Raises:
            Corrupt: at least one of them cannot be read.
            Unavailable: the store cannot answer now.
        """

    @abstractmethod
    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes to different records; each is judged by itself.

        Raises:
            Invalid, Fenced, NewerFormat: one cannot be sent; nothing was written.
            Unavailable: nothing was written.
        """

    @abstractmethod
    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List names and versions in byte order; fewer than `limit` means the end."""

    @abstractmethod
    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records in byte order of their names; fewer than `limit` means the end.

        What cannot be read is reported as `store:record-set-aside` and left out.
        """

    @abstractmethod
    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history, all or none.

        A batch that has a name already can be sent again: it is added once.
        """

    @abstractmethod
    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history by the writers' clocks; fewer than `limit` means the end for now.

        Lines of different writers may appear late and out of order: it is a history, and
        no protocol may rest on a cursor into it.
        """

    @abstractmethod
    async def discard(self, stream: str, *, older_than: float) -> int:
        """Forget the lines of a history that are older than so many seconds; count them."""

    @abstractmethod
    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove tombstones that are older than so many seconds; count them."""

    @abstractmethod
    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good, without a tombstone and without looking.

        Only for names that are never used again: a late copy of a create would bring its
        record back.
        """

    @abstractmethod
    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed under a prefix or in a history.

        A hint: it may return for nothing and may miss a change. Polling is the truth.
        """

    @property
    def sql(self) -> SqlAccess | None:
        """The way into its database, for rows beside the records; None where there is none."""
        return None

    async def now(self) -> Wall | None:
        """Tell the store's own time of day, where it has a clock of its own."""
        return None

    async def age(self, record: Record) -> float | None:
        """Tell for how many seconds a version has stood, by the store's own clock.

        None where the store has no such clock, where its clock went back meanwhile, or
        where the version no longer stands.
        """
        del record
        return None

    @abstractmethod
    async def close(self) -> None:
        """Let go of files and connections. Safe to repeat."""

    async def get(self, key: str, *, tombstones: bool = False) -> Record | None:
        """Read one record. The one-key form of `get_many`."""
        (record,) = await self.get_many([key], tombstones=tombstones)
        return record

    async def create(self, key: str, value: Json, *, epoch: int = 0, format: int = 1) -> Record:
        """Write under a name that was never used.

        Raises:
            Conflict: the name is, or was, in use.
            OutcomeUnknown: nobody can say.
        """
        return await self._one(Put(key, value, epoch=epoch, format=format))

    async def put(
        self,
        base: Record,
        value: Json,
        *,
        epoch: int | None = None,
        format: int = 1,
    ) -> Record:
        """Write in place of a record that was read.

        Raises:
            Conflict: it has changed since.
            OutcomeUnknown: nobody can say.
        """
        return await self._one(base.replace(value, epoch=epoch, format=format))

    async def delete(self, base: Record, *, epoch: int | None = None, format: int = 1) -> Record:
        """Write a tombstone in place of a record that was read, and give it.

        Raises:
            Conflict: it has changed since.
            OutcomeUnknown: nobody can say.
        """
        return await self._one(base.delete(epoch=epoch, format=format))

    async def _one(self, change: Change) -> Record:
        (outcome,) = await self.write([change])
        return unwrap(outcome, change.key)


def unwrap(outcome: Outcome, key: str) -> Record:
    """Give the record that a change left, or raise what kept it from happening."""
    match outcome:
        case Applied(record):
            return record
        case Conflicted():
            raise Conflict(key)
        case Unknown(reason):
            raise OutcomeUnknown(key, reason)


# A store around a store. A decorator says in one place what happens around every call.


T = TypeVar("T")


class StoreDecorator(Store):
    """Passes every call on; inherit it and override `around`, or a call of its own."""

    def __init__(self, inner: Store) -> None:
        self.name = inner.name
        self.traits = inner.traits
        self.is_billed = inner.is_billed
        self.inner = inner

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Surround a call.

        Args:
            call: get, write, heads, scan, append, read, discard, bury, drop or age.
            sent: how many keys, changes or lines it sends.
            work: makes the call.
        """
        del call, sent
        return await work()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name."""
        return await self.around(
            "get", len(keys), lambda: self.inner.get_many(keys, tombstones=tombstones)
        )

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes."""
        return await self.around("write", len(changes), lambda: self.inner.write(changes))

    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List names and versions."""
        return await self.around(
            "heads", 0, lambda: self.inner.heads(prefix, after=after, limit=limit)
        )

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        return await self.around(
            "scan", 0, lambda: self.inner.scan(prefix, after=after, limit=limit, where=where)
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history."""
        await self.around(
            "append", len(entries), lambda: self.inner.append(stream, entries, batch=batch)
        )

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history."""
        return await self.around(
            "read", 0, lambda: self.inner.read(stream, after=after, limit=limit, where=where)
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Forget old lines of a history."""
        return await self.around(
            "discard", 0, lambda: self.inner.discard(stream, older_than=older_than)
        )

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""
        return await self.around(
            "bury", 0, lambda: self.inner.bury(prefix, older_than=older_than, limit=limit)
        )

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good."""
        await self.around("drop", len(keys), lambda: self.inner.drop(keys))

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed. Waiting is not surrounded: it is only a hint."""
        await self.inner.wait(topic, timeout)

    @property
    def sql(self) -> SqlAccess | None:
        """The inner store's. What goes this way is not surrounded."""
        return self.inner.sql

    async def now(self) -> Wall | None:
        """Tell the store's own time of day."""
        return await self.inner.now()

    async def age(self, record: Record) -> float | None:
        """Tell for how long a version has stood."""
        return await self.around("age", 1, lambda: self.inner.age(record))

    async def close(self) -> None:
        """Let go of the inner store."""
        await self.inner.close()
