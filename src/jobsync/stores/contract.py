"""The contract of every store: versioned records and append-only history.

What a store guarantees:

- A write names the record that it replaces, or states that the key was never used. Of
  several writes based on one record at most one is applied.
- Each change of a batch has its own outcome: applied, conflicted, or unknown. An unknown
  change may have happened, may still happen, or may never happen; callers must assume none
  of the three.
- Versions never repeat: not for equal content, and not after delete and re-create.
- A deleted record leaves a tombstone, which readers skip and which a `Put` without a base
  conflicts with. It is removed only when no late copy of an earlier request can still arrive.
- `epoch` and `format` never decrease. A writer with a lower one is refused before anything
  is sent; that is enough, because a write applies only to the record that it read.
- Listings are in byte order of the keys, one level at a time.
- A record that cannot be decoded is reported, skipped by `scan`, raised by `get`, and never
  changed.

To add a store, inherit `Store` in one module and pass the conformance suite.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from jobsync.components import NONCE_LENGTH
from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.errors import Conflict, OutcomeUnknown
from jobsync.stores.sql import SqlAccess

__all__ = [
    "BURIAL_AGE",
    "LATEST_ARRIVAL",
    "MAX_MARK",
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
    "Unknown",
    "Where",
    "unwrap",
]


TRAIL_LENGTH = 16
"""Nonces that a record keeps: a lost reply can be settled across this many later writes."""

BURIAL_AGE = 3600.0
"""Seconds before a tombstone may be removed: far longer than the settling deadline and than any
request can be delayed."""

LATEST_ARRIVAL = 900.0
"""Seconds after which no copy of a request arrives any more; docs/guarantees.md states it."""

MAX_MARK = 15
"""The highest mark of a record."""


Where: TypeAlias = Mapping[str, Json] | None


class Record(msgspec.Struct, frozen=True, gc=False):
    """One version of one record, as read or written.

    A later write names it as its base: `record.replace(value)`.
    """

    key: str
    value: Json
    """The decoded document; None on a tombstone."""
    version: str
    """Opaque; differs between any two writes ever made."""
    seq: int
    """Counts the writes to this name, tombstones included."""
    epoch: int
    """The highest fencing token (term) of its writers."""
    format: int
    """The format of the value; code that writes a lower format must not change the record."""
    trail: str
    """The nonces of the latest writes, newest first, separated by spaces."""
    deleted: bool = False
    """Whether this is a tombstone."""

    @property
    def nonce(self) -> str:
        """The nonce of the write that made this version."""
        return self.trail[:NONCE_LENGTH]

    def remembers(self, nonce: str) -> bool:
        """Whether the write with this nonce is among the latest ones."""
        return nonce in self.trail.split(" ")

    def replace(self, value: Json, *, epoch: int | None = None, format: int = 1) -> "Put":
        """Return the change that replaces this record's value."""
        return Put(self.key, value, self, epoch=epoch, format=format)

    def delete(self, *, epoch: int | None = None, format: int = 1) -> "Delete":
        """Return the change that replaces this record with a tombstone."""
        return Delete(self, epoch=epoch, format=format)


class Head(msgspec.Struct, frozen=True, gc=False):
    """A record's key and version, without its value."""

    key: str
    version: str
    written_at: float | None = None
    """When this version was written, in Unix seconds of the server's clock, perhaps without the
    fraction; None where a listing does not tell."""
    mark: int | None = None
    """The mark of the write that made this version; None where a listing does not tell. It means
    something only under prefixes whose writers all set one."""


class Put(msgspec.Struct, frozen=True, gc=False):
    """A write that replaces `base`, or creates a key that was never used."""

    key: str
    value: Json
    base: Record | None = None
    epoch: int | None = None
    """The writer's term; None keeps the base's."""
    format: int = 1
    nonce: str = ""
    """Identifies this write; the store generates one if empty, and a resend keeps it."""
    mark: int = 0
    """A number up to `MAX_MARK` that listings show where reading a record costs a request."""


class Delete(msgspec.Struct, frozen=True, gc=False):
    """A write that replaces `base` with a tombstone."""

    base: Record
    epoch: int | None = None
    format: int = 1
    nonce: str = ""

    @property
    def key(self) -> str:
        """The key of the record."""
        return self.base.key


Change: TypeAlias = Put | Delete


class Applied(msgspec.Struct, frozen=True, gc=False):
    """The change happened; `record` is the new base."""

    record: Record


class Conflicted(msgspec.Struct, frozen=True, gc=False):
    """The change did not and will not happen: the record is not, or no longer, the base."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """The change may have happened, may still happen, or may never happen."""

    reason: str


Outcome: TypeAlias = Applied | Conflicted | Unknown


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a history."""

    stream: str
    id: str
    """Sorts by the writer's wall clock; pass it as `after` to read the next page."""
    at: Wall
    value: Json


class Store(ABC):
    """Versioned records with conditional writes, and append-only history.

    Attributes:
        name: the store's name in errors and events; contains no secret.
        traits: what was found out about the server, stored with the probe's verdict.
        is_billed: whether each request costs money and tens of milliseconds.
        is_atomic: whether a batch of writes happens at one moment, whoever dies meanwhile.
    """

    name: str
    traits: Mapping[str, Json] = MappingProxyType({})
    is_billed: bool = False
    is_atomic: bool = False

    @abstractmethod
    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key, in the order of the keys.

        Raises:
            Corrupt: at least one of them cannot be decoded.
            Unavailable: the store cannot answer now.
        """

    @abstractmethod
    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes to different records; each has its own outcome.

        Raises:
            Invalid, Fenced, NewerFormat: a change cannot be sent; nothing was written.
            Unavailable: nothing was written.
        """

    @abstractmethod
    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys and versions in byte order; fewer than `limit` means the end.

        Only keys greater than `after` and less than `until` are listed; without `until`, all
        keys of the level after `after`.
        """

    @abstractmethod
    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records in byte order of their keys; fewer than `limit` means the end.

        Records that cannot be decoded are reported as `store:record-set-aside` and left out.
        """

    @abstractmethod
    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Append entries to a history, all or none.

        A batch with a name can be sent again: it is appended once.
        """

    @abstractmethod
    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read entries in the order of their writers' clocks; fewer than `limit` means the end.

        Entries of other writers may appear late and before ones already read, so no protocol may
        depend on a cursor into a history.
        """

    @abstractmethod
    async def discard(self, stream: str, *, older_than: float) -> int:
        """Delete the entries of a history older than this many seconds; return how many."""

    @abstractmethod
    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove tombstones older than this many seconds; return how many."""

    @abstractmethod
    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally, without leaving tombstones.

        Only for keys that are never used again, or whose writers all write the same: a late copy of
        a create would bring its record back, and a create that was applied before the record was
        dropped and created again is reported as conflicted if its own reply was lost.
        """

    @abstractmethod
    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed under a prefix or in a history.

        Only a hint: it may return without a change and may miss one. Callers must poll too.
        """

    @property
    def sql(self) -> SqlAccess | None:
        """Access to the SQL database, for tables besides the records; None without one."""
        return None

    async def now(self) -> Wall | None:
        """Return the store's time of day; None if it has no clock."""
        return None

    async def age(self, record: Record) -> float | None:
        """Return for how many seconds this version has been current, by the store's clock.

        None if the store has no clock, its clock went back, or the version is not current.
        """
        del record
        return None

    @abstractmethod
    async def close(self) -> None:
        """Close files and connections. Safe to repeat."""

    async def get(self, key: str, *, tombstones: bool = False) -> Record | None:
        """Read one record. The one-key form of `get_many`."""
        (record,) = await self.get_many([key], tombstones=tombstones)
        return record

    async def create(self, key: str, value: Json, *, epoch: int = 0, format: int = 1) -> Record:
        """Create a record under a key that was never used.

        Raises:
            Conflict: the key is, or was, in use.
            OutcomeUnknown: it may have happened or not.
        """
        return await self._write_one(Put(key, value, epoch=epoch, format=format))

    async def put(
        self,
        base: Record,
        value: Json,
        *,
        epoch: int | None = None,
        format: int = 1,
    ) -> Record:
        """Replace a record that was read.

        Raises:
            Conflict: it has changed since.
            OutcomeUnknown: it may have happened or not.
        """
        return await self._write_one(base.replace(value, epoch=epoch, format=format))

    async def delete(self, base: Record, *, epoch: int | None = None, format: int = 1) -> Record:
        """Replace a record that was read with a tombstone; return the tombstone.

        Raises:
            Conflict: it has changed since.
            OutcomeUnknown: it may have happened or not.
        """
        return await self._write_one(base.delete(epoch=epoch, format=format))

    async def _write_one(self, change: Change) -> Record:
        (outcome,) = await self.write([change])
        return unwrap(outcome, change.key)


def unwrap(outcome: Outcome, key: str) -> Record:
    """Return the record of an applied change.

    Raises:
        Conflict: the change conflicted.
        OutcomeUnknown: its outcome is unknown.
    """
    match outcome:
        case Applied(record):
            return record
        case Conflicted():
            raise Conflict(key)
        case Unknown(reason):
            raise OutcomeUnknown(key, reason)


def find_applied(outcome: Outcome, key: str) -> Record | None:
    """Return the record of an applied change; None if the change conflicted.

    Raises:
        OutcomeUnknown: its outcome is unknown.
    """
    return None if isinstance(outcome, Conflicted) else unwrap(outcome, key)
