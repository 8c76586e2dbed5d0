"""The records under one prefix of a store, under names that users choose and may use again.

Every write states what it replaces: the record that was read, a tombstone, or nothing. A writer
that loses a race reads and decides again; of several that race, one always succeeds.

A batch is one statement where the store can do that, and each record has its own outcome. A batch
is not a transaction: part of it may be written. The result lists which, and it is safe to send
the same batch again. An error is raised only if nothing was written.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias, cast

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json, encode_all
from jobsync.core.keys import escape, unescape
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Conflict, JobsyncError
from jobsync.stores.contract import (
    Applied,
    Change,
    Conflicted,
    Outcome,
    Put,
    Record,
    Store,
    Unknown,
    unwrap,
)

__all__ = [
    "BatchResult",
    "Decide",
    "Disposition",
    "FinishChanges",
    "Keyspace",
    "WriteChanges",
    "create_many",
    "remove_many",
]

_BACKOFF = ExponentialBackoff(first=0.01, longest=1.0)
_MAX_RECORDS = 10_000
_MAX_REQUESTS = 1_000
"""Records of one write where each is a request of its own, so that a write takes seconds."""
_MAX_BYTES = 16 * 1024 * 1024


class Disposition(Enum):
    """What to do with a record other than to write a new value."""

    KEEP = "leave it as it is"
    REMOVE = "leave a tombstone"


Decide: TypeAlias = Callable[[Record | None], "Json | Disposition"]
"""Given the current record, or None, returns what to write; raises to change nothing."""

WriteChanges: TypeAlias = Callable[[Sequence[Change]], Awaitable[list[Outcome]]]

FinishChanges: TypeAlias = Callable[[Sequence[Record | None]], Awaitable[bool]]

PlanChange: TypeAlias = Callable[[str, Record | None], Change | None]
"""Given a name and its record or tombstone, returns the change to make, if any."""


class Keyspace:
    """The records under one prefix.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        prefix: of their keys.
        components: the clock and the randomness that spread writers that race.
        label: what errors put before a record's name.
        write: applies changes in place of the store, and keeps what belongs to the records.
        finish: ends what others have begun with records, before they are changed; returns
            whether there was anything, so that they have to be read again.
    """

    def __init__(
        self,
        get_store: Callable[[], Store],
        prefix: str,
        components: Components,
        label: str,
        write: WriteChanges | None = None,
        finish: FinishChanges | None = None,
    ) -> None:
        self.prefix = prefix
        self._write = write
        self._finish = finish
        self._get_store = get_store
        self._label = label
        self._clock = components.clock
        self._randomness = components.randomness

    @property
    def store(self) -> Store:
        """The store, if it can be used."""
        return self._get_store()

    def key(self, name: str) -> str:
        """Return the key of a record."""
        return self.prefix + escape(name)

    def name(self, key: str) -> str:
        """Return the name of a record."""
        return unescape(key[len(self.prefix) :])

    def title(self, name: str) -> str:
        """Return how errors call a record."""
        return f"{self._label}/{name}"

    async def get(self, name: str) -> Record | None:
        """Read one record."""
        return await self.store.get(self.key(name))

    async def get_many(self, names: Sequence[str]) -> list[Record | None]:
        """Read records in the order of their names; a name may occur twice."""
        keys = list(map(self.key, names))
        unique = list(dict.fromkeys(keys))
        found = dict(zip(unique, await self.store.get_many(unique), strict=True)) if keys else {}
        return [found[key] for key in keys]

    async def read_bases(self, names: Sequence[str]) -> list[Record | None]:
        """Read records or tombstones that are to be replaced."""
        keys = list(map(self.key, names))
        while True:
            found = await self.store.get_many(keys, tombstones=True)
            if self._finish is None or not await self._finish(found):
                return found

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes to records of this prefix; each has its own outcome."""
        return await (self.store.write if self._write is None else self._write)(changes)

    async def create(self, name: str, value: Json) -> Record:
        """Write a record under a free name: one request, if the name was never used.

        Raises:
            Conflict: there is a record with this name.
            OutcomeUnknown: it may or may not have been written.
        """
        (outcome,) = await self.write([Put(self.key(name), value)])
        if not isinstance(outcome, Conflicted):
            return unwrap(outcome, self.title(name))

        def decide(current: Record | None) -> Json:
            if current is not None:
                raise Conflict(self.title(name), "it already exists")
            return value

        return await self.put(name, decide)

    async def put(self, name: str, decide: Callable[[Record | None], Json]) -> Record:
        """Write the value that `decide` returns for the current record."""
        return cast("Record", await self.change(name, decide))

    async def change(self, name: str, decide: Decide, *, tombstones: bool = False) -> Record | None:
        """Read a record, decide, and write in place of what was read; retry after a conflict.

        Args:
            name: of the record.
            decide: what to write.
            tombstones: whether `decide` gets the tombstone of a deleted record, not None.

        Returns:
            The new record or tombstone; the current record, if nothing was to be changed.

        Raises:
            OutcomeUnknown: it may or may not have been written.
        """
        key = self.key(name)
        attempt = 0
        while True:
            (base,) = await self.read_bases([name])
            current = None if base is None or base.deleted else base
            change = _build_change(key, base, decide(base if tombstones else current))
            if change is None:
                return current
            (outcome,) = await self.write([change])
            if not isinstance(outcome, Conflicted):
                return unwrap(outcome, self.title(name))
            attempt += 1
            await _BACKOFF.sleep(attempt, self._clock, self._randomness)


def _build_change(key: str, base: Record | None, decision: Json | Disposition) -> Change | None:
    if decision is Disposition.KEEP:
        return None
    if decision is not Disposition.REMOVE:
        return Put(key, decision, base)
    return None if base is None or base.deleted else base.delete()


class BatchResult(msgspec.Struct):
    """The outcome of a batch, by name."""

    written: dict[str, Record] = {}
    unchanged: list[str] = []
    """Names where nothing was to be changed."""
    unknown: list[str] = []
    unsent: list[str] = []
    cause: JobsyncError | None = None
    """Why some were not sent."""


async def create_many(keyspace: Keyspace, values: Mapping[str, Json]) -> BatchResult:
    """Write records under free names; `unchanged` has the names that are taken.

    Raises:
        Invalid: one of them cannot be written; nothing was.
        Unavailable: nothing was written.
    """
    keys = {name: keyspace.key(name) for name in values}
    batch = _BatchWrite(keyspace)
    conflicted: list[str] = []
    for names in _split(_measure(values, keyspace.store), keyspace.store):
        conflicted += await batch.send({name: Put(keys[name], values[name]) for name in names})

    def plan(name: str, base: Record | None) -> Change | None:
        return Put(keys[name], values[name], base) if base is None or base.deleted else None

    for names in _split(((name, 0) for name in conflicted), keyspace.store):
        await batch.change(names, plan)
    return batch.result


async def remove_many(keyspace: Keyspace, names: Sequence[str]) -> BatchResult:
    """Replace records by tombstones; `written` has the names that existed.

    Raises:
        Unavailable: nothing was written.
    """
    batch = _BatchWrite(keyspace)

    def plan(_: str, base: Record | None) -> Change | None:
        return None if base is None or base.deleted else base.delete()

    for part in _split(((name, 0) for name in dict.fromkeys(names)), keyspace.store):
        await batch.change(part, plan)
    return batch.result


def _measure(values: Mapping[str, Json], store: Store) -> Iterator[tuple[str, int]]:
    """Yield each name with its size, or with 0 if all fit into one write."""
    documents = list(values.values())
    if len(documents) > _find_limit(store) or not _fits_one_write(documents):
        # All are encoded before any is sent, so that an invalid one in a later part stops all.
        yield from zip(values, map(len, encode_all(documents)), strict=True)
    else:
        yield from ((name, 0) for name in values)


def _find_limit(store: Store) -> int:
    """Return how many records one write may have."""
    return _MAX_RECORDS if store.is_atomic else min(_MAX_RECORDS, _MAX_REQUESTS)


def _fits_one_write(documents: list[Json]) -> bool:
    try:
        return len(msgspec.json.encode(documents)) <= _MAX_BYTES
    except (TypeError, ValueError):
        return False


def _split(sized: Iterator[tuple[str, int]], store: Store) -> Iterator[list[str]]:
    """Yield parts that are small enough for one write."""
    most = _find_limit(store)
    part: list[str] = []
    total = 0
    for name, size in sized:
        if part and (len(part) == most or total + size > _MAX_BYTES):
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


class _BatchWrite:
    """A batch that is being written."""

    def __init__(self, keyspace: Keyspace) -> None:
        self.result = BatchResult()
        self._keyspace = keyspace

    async def change(self, names: list[str], plan: PlanChange) -> None:
        """Read, plan and write; retry those that conflict."""
        while names:
            try:
                found = await self._keyspace.read_bases(names)
            except JobsyncError as error:
                self._give_up(names, error)
                return
            changes = dict(zip(names, map(plan, names, found), strict=True))
            self.result.unchanged += [name for name, change in changes.items() if change is None]
            names = await self.send(
                {name: change for name, change in changes.items() if change is not None}
            )

    async def send(self, changes: Mapping[str, Change]) -> list[str]:
        """Write; return the names that conflicted."""
        try:
            outcomes = await self._keyspace.write(list(changes.values()))
        except JobsyncError as error:
            self._give_up(list(changes), error)
            return []
        conflicted = []
        for name, outcome in zip(changes, outcomes, strict=True):
            match outcome:
                case Applied(record):
                    self.result.written[name] = record
                case Conflicted():
                    conflicted.append(name)
                case Unknown():
                    self.result.unknown.append(name)
        return conflicted

    def _give_up(self, names: list[str], error: JobsyncError) -> None:
        """Record what was not sent; raise the error if nothing was written before."""
        if not (self.result.written or self.result.unknown):
            raise error
        self.result.unsent += names
        self.result.cause = error
