"""Records of one kind, checked by a schema, with the same results on every store.

Guarantees:
- When a verb has returned, its effect is in the store.
- Of several writers that pass the same `if_version`, at most one succeeds. A write without
  `if_version` overwrites only the fields that it sets.
- An id can be used again after its record was deleted.
- `insert` and `get` are one request each.
- A record is refused only by the newest definition: before a process refuses one, it checks
  whether another process has widened the schema.
- A verb that raises `OutcomeUnknown` may have written. Any other error means that it has not,
  except for batches, where `Incomplete` lists what was written.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.filters import parse as parse_filter
from jobsync.core.partitions import Partition, choose_partition
from jobsync.core.schema import Schema
from jobsync.database.archive import ArchiveMoves, OpenResource
from jobsync.database.definition import KNOWN_FORMAT, Definition, IndexState
from jobsync.database.document import (
    CREATED,
    LIBRARY_FIELDS,
    UPDATED,
    Document,
    IndexRetired,
    Lookup,
    ReadableResource,
    Selection,
    as_list,
    check_id,
    read_value,
)
from jobsync.database.index import Index, IndexedWriter
from jobsync.database.keyspace import (
    BatchResult,
    Disposition,
    Keyspace,
    create_many,
    remove_many,
)
from jobsync.database.read_cache import ReadGuard
from jobsync.database.validation import Validator
from jobsync.errors import (
    Conflict,
    Incomplete,
    Invalid,
    InvalidRecord,
    NewerFormat,
    NotFound,
    closest_name,
)
from jobsync.events import Event
from jobsync.stores.contract import Change, Outcome, Record, Store

__all__ = [
    "DATA",
    "MessageSink",
    "RecordsDeleted",
    "RecordsInserted",
    "RecordsUpdated",
    "Resource",
]

DATA = "data/"
"""The prefix of all records; each resource has a level below it."""

DEFINITION_AGE = 30.0
"""Seconds for which a process writes by a definition before it reads it again."""

_PAGE = 1000

T = TypeVar("T")


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


class MessageSink(Protocol):
    """What a resource enqueues its messages to: a queue, in practice."""

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> str:
        """Enqueue one message; return its id."""
        ...

    async def enqueue_many(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> list[str]:
        """Enqueue messages, all or none; return their ids."""
        ...


class _IndexesChanged(Exception):
    """The definition has other indexes than those that were to be kept."""


class Resource(ReadableResource):
    """Records of one kind. Create it with `Database.create_resource`.

    Args:
        definition: its name, what its records look like, and its indexes.
        read_at: when the definition was read.
        get_store: returns the store, or raises why it cannot be used.
        components: time, randomness, and the events that receive this resource's events.
        reload: reads the definition again; returns whether it has changed.
        open_resource: returns another resource, which its records are archived to.
        guard: what knows the database's cache; without it nothing is cached.
    """

    def __init__(
        self,
        definition: Definition,
        read_at: Mono,
        get_store: Callable[[], Store],
        components: Components,
        reload: Callable[[str], Awaitable[bool]],
        open_resource: OpenResource,
        guard: ReadGuard | None = None,
    ) -> None:
        self.name = definition.name
        self.moves = ArchiveMoves(self, open_resource, components)
        prefix = f"{DATA}{self.name}/"
        keyspace = Keyspace(
            get_store, prefix, components, self.name, self._write, self.moves.finish
        )
        super().__init__(keyspace, components, guard)
        self._components = components
        self._clock = components.clock
        self._ids = components.ids
        self._reload = reload
        self._queue: MessageSink | None = None
        self._rereading = asyncio.Lock()
        # Another process may have dropped a resource of this name, and created this one.
        self._reads.clear()
        self.definition = definition
        self.set_definition(definition, read_at)

    def __repr__(self) -> str:
        return f"Resource({self.name!r})"

    @property
    def schema(self) -> Schema:
        """What its records look like, as far as this process knows."""
        return self.definition.schema

    @property
    def partitions(self) -> dict[str, tuple[str, ...]]:
        """The fields of each partition, by its name, as far as this process knows."""
        return {
            rule.name: tuple(field.name for field in rule.fields)
            for index in self.definition.indexes
            if isinstance(rule := index.rule, Partition)
        }

    def set_definition(self, definition: Definition, read_at: Mono) -> None:
        """Use a newer definition from now on, which was read at this time or later."""
        if definition != self.definition:
            self._reads.clear()
        self.definition = definition
        self._read_at = read_at
        self._validator = Validator(definition.name, definition.schema)

    async def insert(self, record: Mapping[str, Json]) -> Document:
        """Add a record; one without an id gets an id that sorts by time.

        Raises:
            InvalidRecord: it breaks the schema; lists every invalid field.
            Conflict: there is a record with this id.
        """
        return await self._run_verb("insert", record, self._insert)

    async def update(
        self, id: str, changes: Mapping[str, Json], *, if_version: str | None = None
    ) -> Document:
        """Merge changes into a record: objects recursively, all else replaced.

        Args:
            id: of the record.
            changes: fields to set. To remove a field, use `replace`.
            if_version: the `_version` that the record must still have. Without it the changes
                are merged into the current version, and no other fields are lost.

        Raises:
            NotFound: there is no such record.
            Conflict: it has another version.
            InvalidRecord: it would break the schema.
        """

        async def work(changes: Any) -> Document:
            with self._reads.changing([check_id(id)]):
                return await self._rewrite(id, if_version, Validator.build_update, changes)

        return await self._run_verb("update", _with_id(id, changes), work)

    async def replace(
        self, id: str, record: Mapping[str, Json], *, if_version: str | None = None
    ) -> Document:
        """Replace an existing record by a new one.

        Raises:
            NotFound: there is no such record.
            Conflict: it has another version than `if_version`.
            InvalidRecord: the new one breaks the schema.
        """

        async def work(record: Any) -> Document:
            with self._reads.changing([check_id(id)]):
                return await self._rewrite(id, if_version, Validator.build_replacement, record)

        return await self._run_verb("replace", _with_id(id, record), work)

    async def upsert(self, record: Mapping[str, Json]) -> Document:
        """Merge a record into the one with its id, or insert it if there is none.

        The hooks of `update` or `insert` run too, whichever applies.

        Raises:
            InvalidRecord: it breaks the schema.
        """
        return await self._run_verb("upsert", record, self._upsert)

    async def delete(self, id: str, *, if_version: str | None = None) -> bool:
        """Delete a record; return whether there was one.

        Raises:
            Conflict: it has another version than `if_version`.
        """

        async def work(id: str) -> bool:
            with self._reads.changing([check_id(id)]):
                return await self._delete(id, if_version)

        return await self._run_verb("delete", id, work)

    async def insert_many(self, records: Iterable[Mapping[str, Json]]) -> list[Document]:
        """Add records, in as few requests as the store allows.

        Not a transaction: if the store refuses some, the others are written all the same.

        Raises:
            InvalidRecord: some break the schema; lists every invalid field. Nothing was written.
            Invalid: two have the same id. Nothing was written.
            Incomplete: not all were written; lists which.
        """
        inputs = await self._hooks.before_all("insert", as_list("records", records))
        new_ids = self._ids.records(len(inputs))
        documents = await self._build(
            lambda validator: validator.build_many(inputs, new_ids, self._now())
        )
        values = {document["id"]: document for document in documents}
        _refuse_duplicates(values, documents)
        result = await create_many(self._keyspace, values)
        self._report(RecordsInserted, *result.written)
        inserted = {name: Document(record) for name, record in result.written.items()}
        await self._hooks.after_all("insert", inserted.values())
        self._check_complete(result, conflicts=result.unchanged)
        return [inserted[name] for name in values]

    async def delete_many(self, ids: Iterable[str]) -> int:
        """Delete records; return how many there were.

        Raises:
            Incomplete: not all were deleted; lists which.
        """
        inputs = await self._hooks.before_all("delete", as_list("ids", ids))
        checked = list(map(check_id, inputs))
        with self._reads.changing(checked):
            result = await remove_many(self._keyspace, checked)
        self._report(RecordsDeleted, *result.written)
        await self._hooks.after_all("delete", [name in result.written for name in checked])
        self._check_complete(result)
        return len(result.written)

    async def delete_all(self) -> int:
        """Delete all current records, without hooks; return how many there were.

        Raises:
            Incomplete: not all were deleted; lists which.
        """
        count = 0
        # Listed once, so that it ends even while others keep inserting.
        ids = await self._find_ids()
        try:
            for start in range(0, len(ids), _PAGE):
                result = await remove_many(self._keyspace, ids[start : start + _PAGE])
                self._report(RecordsDeleted, *result.written)
                self._check_complete(result)
                count += len(result.written)
        finally:
            # Also of records that others have deleted.
            self._reads.clear()
        return count

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> str:
        """Enqueue a message that fits this resource's schema; return the message's id.

        Args:
            data: the message; without an id it gets the message's id.
            delay: seconds before it can be handled.
            timeout: seconds that its handler may take; the queue's by default.
            max_attempts: how often it is tried; the queue's by default.
            connection: your psycopg, sqlite3 or SQLAlchemy connection to the same database:
                the message exists once your transaction commits, and only then.

        Raises:
            InvalidRecord: it breaks the schema; lists every invalid field.
            Invalid: this resource has no queue here, or an option is invalid.
            OutcomeUnknown: it may or may not have been enqueued.
        """
        return await self._get_queue().enqueue(
            data, delay=delay, timeout=timeout, max_attempts=max_attempts, connection=connection
        )

    async def enqueue_many(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> list[str]:
        """Enqueue messages in order, all or none; return their ids. See `enqueue`."""
        return await self._get_queue().enqueue_many(
            data, delay=delay, timeout=timeout, max_attempts=max_attempts, connection=connection
        )

    def set_queue(self, queue: MessageSink | None) -> None:
        """Enqueue messages to this queue from now on; None for no queue."""
        self._queue = queue

    def _get_queue(self) -> MessageSink:
        if self._queue is None:
            fix = f"await database.use_plugin(QueuePlugin(resource={self.name!r})) first"
            raise Invalid("resource", self.name, "has no queue in this process", fix)
        return self._queue

    def validate(self, records: Sequence[Any], ids: Sequence[str]) -> list[dict[str, Json]]:
        """Check records by the schema and fill in defaults and ids; store nothing.

        Raises:
            InvalidRecord: some break the schema; lists every invalid field.
        """
        documents = self._validator.build_many(records, ids, self._now())
        return [
            {name: value for name, value in document.items() if name not in LIBRARY_FIELDS}
            for document in documents
        ]

    @property
    def store(self) -> Store:
        """The store, if it can be used."""
        return self._keyspace.store

    def key(self, id: str) -> str:
        """Return the key of a record in the store."""
        return self._keyspace.key(id)

    async def prepare(self, record: Mapping[str, Json], id: str) -> dict[str, Json]:
        """Return a new record as it is to be stored; store nothing.

        Raises:
            InvalidRecord: it breaks the newest schema; lists every invalid field.
        """
        return await self._build(lambda validator: validator.build_new(record, id, self._now()))

    def stamp(self, document: Mapping[str, Json]) -> dict[str, Json]:
        """Return a document with the times of a new record."""
        now = self._now()
        return {**document, CREATED: now, UPDATED: now}

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes to stored records, with their index entries; for plugins.

        Neither hooks nor the schema are applied, and no events are emitted.
        """
        return await self._write(changes) if changes else []

    def report_inserted(self, *ids: str) -> None:
        """Emit that records were inserted; for plugins."""
        self._report(RecordsInserted, *ids)

    def report_updated(self, *ids: str) -> None:
        """Emit that records were updated; for plugins."""
        self._report(RecordsUpdated, *ids)

    def report_deleted(self, *ids: str) -> None:
        """Emit that records were deleted; for plugins."""
        self._report(RecordsDeleted, *ids)

    async def _write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write records with their index entries, by a definition that is not outdated."""
        while True:
            await self._reread_definition()
            found = self.definition.format
            if found > KNOWN_FORMAT:
                raise NewerFormat(f"the definition of {self.name}", found, KNOWN_FORMAT)
            indexes = self.definition.kept_indexes
            writer = IndexedWriter(
                self.name, indexes, self._components, partial(self._confirm, indexes)
            )
            try:
                return await writer.write(self._keyspace.store, changes)
            except _IndexesChanged:
                continue

    async def _confirm(self, indexes: Sequence[IndexState]) -> None:
        """Check that these are still the indexes to keep.

        Raises:
            _IndexesChanged: they are not.
        """
        await self._reread_definition()
        if self.definition.kept_indexes != indexes or self.definition.format > KNOWN_FORMAT:
            raise _IndexesChanged

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
            chosen = choose_partition(parse_filter(selection.where), ready)
            return None if chosen is None else self._make_lookup(indexes[chosen[0]], chosen[1])
        for rule, index in indexes.items():
            if rule.name == selection.partition:
                return self._make_lookup(index, rule.rank_of(selection.partition_values or {}))
        hint = closest_name(str(selection.partition), self.partitions)
        known = ", ".join(self.partitions) or "none"
        fix = f"did you mean {hint}?" if hint else f"it has {known}"
        raise Invalid("partition", selection.partition, f"is not one of {self.name}", fix)

    async def _check_index(self, lookup: Lookup) -> None:
        await self._reread_definition()
        if not any(index.key == lookup.state.key for index in self.definition.indexes):
            raise IndexRetired

    def _make_lookup(self, state: IndexState, rank: str) -> Lookup:
        return Lookup(state, self.open_index(state) if state.is_ready else None, rank)

    def open_index(self, state: IndexState) -> Index:
        """Return one of this resource's indexes."""
        keyspace = self._keyspace
        return Index(keyspace.store, self.name, keyspace.prefix, state, self._components)

    async def _insert(self, record: Any) -> Document:
        (new_id,) = self._ids.records(1)
        value = await self._build(
            lambda validator: validator.build_new(record, new_id, self._now())
        )
        inserted = Document(await self._keyspace.create(value["id"], value))
        self._report(RecordsInserted, value["id"])
        return inserted

    async def _rewrite(
        self,
        id: str,
        if_version: str | None,
        build: Callable[[Validator, Json, Any, float], Json],
        changes: Any,
    ) -> Document:
        def decide(current: Record | None) -> Json:
            if current is None:
                raise NotFound(f"record of {self.name}", id)
            self._check_version(current, if_version, id)
            return build(self._validator, read_value(current), changes, self._now())

        try:
            record = await self._keyspace.put(check_id(id), decide)
        except InvalidRecord:
            if not await self._reload(self.name):
                raise
            record = await self._keyspace.put(check_id(id), decide)
        self._report(RecordsUpdated, id)
        return Document(record)

    async def _build(self, build: Callable[[Validator], T]) -> T:
        """Build documents; if the definition refuses them, retry with a newer one."""
        try:
            return build(self._validator)
        except InvalidRecord:
            if not await self._reload(self.name):
                raise
            return build(self._validator)

    async def _upsert(self, record: Any) -> Document:
        name = record.get("id") if isinstance(record, Mapping) else None
        if name is None:
            return await self.insert(record)
        while True:
            exists = await self._exists(name)
            try:
                return await (self.update(name, record) if exists else self.insert(record))
            except (NotFound, Conflict):
                # Another writer was faster. If nothing has changed, a hook has refused it.
                if await self._exists(name) is exists:
                    raise

    async def _delete(self, id: str, if_version: str | None) -> bool:
        def decide(current: Record | None) -> Disposition:
            if current is None:
                return Disposition.KEEP
            self._check_version(current, if_version, id)
            return Disposition.REMOVE

        record = await self._keyspace.change(check_id(id), decide)
        if record is None or not record.deleted:
            return False
        self._report(RecordsDeleted, id)
        return True

    def _check_version(self, current: Record, if_version: str | None, id: str) -> None:
        if if_version is not None and current.version != if_version:
            raise Conflict(self._keyspace.title(id), f"it no longer has version {if_version}")

    def _check_complete(self, result: BatchResult, conflicts: Sequence[str] = ()) -> None:
        if conflicts or result.unknown or result.unsent:
            raise Incomplete(
                self.name,
                written=list(result.written),
                conflicts=conflicts,
                unknown=result.unknown,
                unsent=result.unsent,
            ) from result.cause

    def _report(self, kind: type[_RecordsChanged], *ids: str) -> None:
        if ids:
            self.events.emit(kind(resource=self.name, ids=ids))

    def _now(self) -> float:
        # Milliseconds: readable, and exact in every JSON reader.
        return round(self._clock.wall().seconds, 3)


def _with_id(id: str, record: Any) -> Any:
    return {"id": id, **record} if isinstance(record, Mapping) else record


def _refuse_duplicates(values: Mapping[str, Json], documents: Sequence[Json]) -> None:
    if len(values) < len(documents):
        names = Counter(document["id"] for document in documents)
        ((duplicate, _),) = names.most_common(1)
        raise Invalid("id", duplicate, "is given twice", "use a different id for each record")
