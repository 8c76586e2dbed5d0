"""The stored records of one resource: read in order, and written with their index entries.

Reads return records in the order of their ids. Filters are pushed down to the store: SQL drops what
cannot match, and every record that is returned has passed the reference matcher. Where a partition
has all records that can match, only those are read.

Writes go by a definition that is at most `DEFINITION_AGE` old, because another process may have
added an index.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.filters import All, AnyOf, Compare, Equals, Exists, Filter, Not
from jobsync.core.partitions import Partition, choose_partition
from jobsync.database.archive import ArchiveMoves, OpenRecords
from jobsync.database.definition import KNOWN_FORMAT, Definition, IndexState
from jobsync.database.document import CREATED, UPDATED, VERSION
from jobsync.database.index import Index, IndexedWriter
from jobsync.database.keyspace import Keyspace
from jobsync.database.read_cache import CachedReads, ReadGuard
from jobsync.database.validation import Validator
from jobsync.errors import Invalid, InvalidRecord, NewerFormat, closest_name, plain_text
from jobsync.events import Event, Events
from jobsync.stores.contract import Change, Outcome, Record, Store, Where
from jobsync.stores.paging import head_pages, scan_pages

__all__ = [
    "DATA",
    "DEFINITION_AGE",
    "PartitionValues",
    "RecordsDeleted",
    "RecordsInserted",
    "RecordsUpdated",
    "ResourceRecords",
    "Selection",
]

DATA = "data/"
"""The prefix of all records; each resource has a level below it."""

DEFINITION_AGE = 30.0
"""Seconds for which a process writes by a definition before it reads it again."""

_HEAD_PAGE = 10_000

T = TypeVar("T")

PartitionValues: TypeAlias = Mapping[str, Json] | None


class _RecordsChanged(Event, frozen=True, kw_only=True):
    resource: str
    ids: tuple[str, ...]


class RecordsInserted(_RecordsChanged, frozen=True, kw_only=True):
    """Records were inserted; one event per call."""

    name = "resource:inserted"


class RecordsUpdated(_RecordsChanged, frozen=True, kw_only=True):
    """Records were updated or replaced; one event per call."""

    name = "resource:updated"


class RecordsDeleted(_RecordsChanged, frozen=True, kw_only=True):
    """Records were deleted; one event per call."""

    name = "resource:deleted"


class Selection(msgspec.Struct, frozen=True):
    """Which records to read."""

    where: Where
    partition: str | None = None
    partition_values: PartitionValues = None


class Lookup(msgspec.Struct, frozen=True):
    """Where in an index the selected records are."""

    state: IndexState
    index: Index | None
    """None while it is being built."""
    rank: str

    def has(self, record: Record) -> bool:
        """Whether a record belongs there."""
        return self.state.rank(record.value) == self.rank


class _IndexRetired(Exception):
    """The index in use was replaced meanwhile, so that some records may be missing."""


class _IndexesChanged(Exception):
    """The definition has other indexes than those that were to be kept."""


class ResourceRecords:
    """The stored records of one resource.

    Args:
        definition: its name, what its records look like, and its indexes.
        read_at: when the definition was read.
        get_store: returns the store, or raises why it cannot be used.
        components: time, randomness, and the events that receive this resource's events.
        reload: reads the definition again; returns whether it has changed.
        open_records: returns those of another resource, which these are archived to.
        guard: what knows the database's cache; without it nothing is cached.

    Attributes:
        name: of the resource.
        definition: the newest that this process knows.
        validator: builds documents by its schema.
        keyspace: where the records are.
        reads: answers reads from the cache, if it can.
        moves: of these records to archives.
        events: of this resource.
    """

    def __init__(
        self,
        definition: Definition,
        read_at: Mono,
        get_store: Callable[[], Store],
        components: Components,
        reload: Callable[[str], Awaitable[bool]],
        open_records: OpenRecords,
        guard: ReadGuard | None = None,
    ) -> None:
        self.name = definition.name
        self.moves = ArchiveMoves(self, open_records, components)
        self.keyspace = Keyspace(
            get_store,
            f"{DATA}{self.name}/",
            components,
            self.name,
            self._write,
            self.moves.finish,
        )
        self.reads = CachedReads(self.keyspace, guard or ReadGuard(components.clock))
        self._components = components
        self._clock = components.clock
        self._reload = reload
        self.definition = definition
        self.begin()
        self.set_definition(definition, read_at)

    def begin(self) -> None:
        """Begin anew for a new object of the resource, without listeners and cached answers.

        Another process may have dropped a resource of this name, and created this one. The
        connection may be a new one, in another loop.
        """
        self.events = Events()
        self.events.join(self._components.events)
        self._rereading = asyncio.Lock()
        self.reads.clear()

    def distrust_definition(self) -> None:
        """Read the definition again before the next write, or read through an index."""
        self._read_at = Mono(float("-inf"))

    def set_definition(self, definition: Definition, read_at: Mono) -> None:
        """Use a newer definition from now on, which was read at this time or later."""
        if definition != self.definition:
            self.reads.clear()
        self.definition = definition
        self._read_at = read_at
        self.validator = Validator(definition.name, definition.schema)

    @property
    def partitions(self) -> dict[str, tuple[str, ...]]:
        """The fields of each partition, by its name."""
        return {
            rule.name: tuple(field.name for field in rule.fields)
            for index in self.definition.indexes
            if isinstance(rule := index.rule, Partition)
        }

    async def stream(
        self, selection: Selection, *, after: str | None = None, limit: int | None = None
    ) -> AsyncIterator[list[Record]]:
        """Yield pages of the selected records in the order of their ids.

        Raises:
            _IndexRetired: some may be missing.
        """
        _check_filter(selection.where)
        lookup = await self._choose_index(selection)
        if lookup is None:
            pages = self._scan_all(selection.where, after, limit)
        else:
            pages = self._follow(lookup, selection.where, after, limit)
        left = limit
        async for records in pages:
            yield records if left is None else records[:left]
            left = None if left is None else left - len(records)
            if left is not None and left <= 0:
                break
        if lookup is not None:
            await self._check_index(lookup)

    def _scan_all(
        self, where: Where, after: str | None, limit: int | None
    ) -> AsyncIterator[list[Record]]:
        start = "" if after is None else self.keyspace.key(after)
        store, prefix = self.keyspace.store, self.keyspace.prefix
        return scan_pages(store, prefix, after=start, where=where, limit=limit)

    async def _follow(
        self, lookup: Lookup, where: Where, after: str | None, limit: int | None
    ) -> AsyncIterator[list[Record]]:
        if lookup.index is None:
            async for records in self._scan_all(where, after, None):
                yield [record for record in records if lookup.has(record)]
            return
        parsed = filters.parse(where)
        async for records in lookup.index.iterate(lookup.rank, after=after, limit=limit):
            yield [record for record in records if filters.matches(parsed, record.value)]

    async def read(
        self, selection: Selection, *, after: str | None = None, limit: int | None = None
    ) -> list[Record]:
        """Return the selected records in the order of their ids."""
        while True:
            try:
                return [
                    record
                    async for records in self.stream(selection, after=after, limit=limit)
                    for record in records
                ]
            except _IndexRetired:
                continue

    async def count(self, selection: Selection) -> int:
        """Count the selected records; all of them by their keys alone."""
        if not selection.where and selection == Selection(selection.where):
            return len(await self.find_keys(None))
        while True:
            try:
                return sum([len(records) async for records in self.stream(selection)])
            except _IndexRetired:
                continue

    async def find_keys(self, end: int | None) -> list[str]:
        """Return keys in order, up to so many."""
        store, prefix = self.keyspace.store, self.keyspace.prefix
        pages = head_pages(store, prefix, size=_HEAD_PAGE, limit=end)
        return [head.key async for heads in pages for head in heads]

    async def prepare(self, record: Mapping[str, Json], id: str) -> dict[str, Json]:
        """Return a new record as it is to be stored; store nothing.

        Raises:
            InvalidRecord: it breaks the newest schema; lists every invalid field.
        """
        return await self.build(lambda validator: validator.build_new(record, id, self.now()))

    def stamp(self, document: Mapping[str, Json]) -> dict[str, Json]:
        """Return a document with the times of a new record."""
        now = self.now()
        return {**document, CREATED: now, UPDATED: now}

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes to stored records, with their index entries.

        Neither hooks nor the schema are applied, and no events are emitted.
        """
        return await self._write(changes) if changes else []

    def report_inserted(self, *ids: str) -> None:
        """Emit that records were inserted."""
        self._report(RecordsInserted, *ids)

    def report_updated(self, *ids: str) -> None:
        """Emit that records were updated."""
        self._report(RecordsUpdated, *ids)

    def report_deleted(self, *ids: str) -> None:
        """Emit that records were deleted."""
        self._report(RecordsDeleted, *ids)

    async def _write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write records with their index entries, by a definition that is not outdated."""
        while True:
            await self._reread_definition()
            self.check_format()
            indexes = self.definition.kept_indexes
            writer = IndexedWriter(
                self.name, indexes, self._components, partial(self._confirm, indexes)
            )
            try:
                return await writer.write(self.keyspace.store, changes)
            except _IndexesChanged:
                continue

    def check_format(self) -> None:
        """Check that this code understands the definition.

        Raises:
            NewerFormat: newer code has written it.
        """
        found = self.definition.format
        if found > KNOWN_FORMAT:
            raise NewerFormat(f"the definition of {self.name}", found, KNOWN_FORMAT)

    async def _confirm(self, indexes: Sequence[IndexState]) -> None:
        """Check that these are still the indexes to keep.

        Raises:
            _IndexesChanged: they are not.
        """
        await self._reread_definition()
        if self.definition.kept_indexes != indexes or self.definition.format > KNOWN_FORMAT:
            raise _IndexesChanged

    @property
    def is_definition_current(self) -> bool:
        """Whether the definition was there a moment ago, when it was last read."""
        return self._clock.mono() - self._read_at <= DEFINITION_AGE

    async def refresh_definition(self, older_than: float) -> None:
        """Read the definition again if it was last read more than so many seconds ago."""
        await self._reread_definition(older_than)

    async def _reread_definition(self, older_than: float = DEFINITION_AGE) -> None:
        """Read the definition again if it is old: another process may have added an index."""
        if self._clock.mono() - self._read_at <= older_than:
            return
        async with self._rereading:
            if self._clock.mono() - self._read_at > older_than:
                # Sets a newer time; without a definition it stays old, and is read each time.
                await self._reload(self.name)

    async def _choose_index(self, selection: Selection) -> Lookup | None:
        await self._reread_definition()
        indexes = {
            index.rule: index
            for index in self.definition.indexes
            if isinstance(index.rule, Partition)
        }
        if selection.partition is None:
            if selection.partition_values is not None:
                fix = "pass partition= too, or a filter"
                problem = "must come with the name of a partition"
                raise Invalid("partition_values", selection.partition_values, problem, fix)
            ready = [rule for rule, index in indexes.items() if index.is_ready]
            chosen = choose_partition(filters.parse(selection.where), ready)
            return None if chosen is None else self._make_lookup(indexes[chosen[0]], chosen[1])
        name = plain_text(selection.partition)
        for rule, index in indexes.items():
            if rule.name == name:
                return self._make_lookup(index, rule.rank_of(selection.partition_values or {}))
        hint = closest_name(name, self.partitions)
        known = ", ".join(self.partitions) or "none"
        fix = f"did you mean {hint}?" if hint else f"it has {known}"
        raise Invalid("partition", selection.partition, f"is not one of {self.name}", fix)

    async def _check_index(self, lookup: Lookup) -> None:
        await self._reread_definition()
        if not any(index.key == lookup.state.key for index in self.definition.indexes):
            raise _IndexRetired

    def _make_lookup(self, state: IndexState, rank: str) -> Lookup:
        return Lookup(state, self.open_index(state) if state.is_ready else None, rank)

    def open_index(self, state: IndexState) -> Index:
        """Return one of this resource's indexes."""
        keyspace = self.keyspace
        return Index(keyspace.store, self.name, keyspace.prefix, state, self._components)

    async def build(self, build: Callable[[Validator], T]) -> T:
        """Build documents; if the definition refuses them, retry with a newer one."""
        try:
            return build(self.validator)
        except InvalidRecord:
            if not await self._reload(self.name):
                raise
            return build(self.validator)

    async def reload(self) -> bool:
        """Read the definition again; return whether it has changed."""
        return await self._reload(self.name)

    def _report(self, kind: type[_RecordsChanged], *ids: str) -> None:
        if ids:
            self.events.emit(kind(resource=self.name, ids=ids))

    def now(self) -> float:
        """Return the time for the library's fields."""
        # Milliseconds: readable, and exact in every JSON reader.
        return round(self._clock.wall().seconds, 3)


def _check_filter(where: Where) -> None:
    """Refuse filters by version, which the store keeps outside the document."""
    if where and _mentions(filters.parse(where), VERSION):
        fix = "get the record and compare"
        raise Invalid("filter", VERSION, "cannot use this field", fix)


def _mentions(where: Filter, name: str) -> bool:
    match where:
        case All(parts) | AnyOf(parts):
            return any(_mentions(part, name) for part in parts)
        case Not(part):
            return _mentions(part, name)
        case Equals(path) | Compare(path) | Exists(path):
            return path[0] == name
