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

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.schema import Schema
from jobsync.database.definition import Definition
from jobsync.database.document import (
    VERSION,
    Document,
    RecordT,
    as_list,
    check_id,
    read_value,
)
from jobsync.database.enqueue_calls import EnqueueCalls
from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.database.keyspace import BatchResult, Disposition, create_many, remove_many
from jobsync.database.readable_resource import ReadableResource
from jobsync.database.resource_records import ResourceRecords
from jobsync.database.validation import Validator
from jobsync.errors import Conflict, Incomplete, Invalid, InvalidRecord, NotFound
from jobsync.stores.contract import Record
from jobsync.stores.paging import split_pages

__all__ = ["Resource"]


@on_home_loop
class Resource(ReadableResource[RecordT], EnqueueCalls[RecordT]):
    """Records of one kind. Create it with `Database.create_resource`.

    Verbs take and return documents, or objects of the type that it was asked for with. Nothing is
    written that is not of that type.

    Args:
        records: as they are stored.
        components: time and randomness.
        home_loop: the event loop of the database.
    """

    def __init__(
        self, records: ResourceRecords, components: Components, home_loop: HomeLoop
    ) -> None:
        super().__init__(records, components, home_loop)
        self.name = records.name
        self._ids = components.ids
        self._queues = {}

    def __repr__(self) -> str:
        return f"Resource({self.name!r})"

    @property
    def schema(self) -> Schema:
        """What its records look like, as far as this process knows."""
        return self.definition.schema

    @property
    def definition(self) -> Definition:
        """What its records look like and its indexes, as far as this process knows."""
        return self.records.definition

    @property
    def partitions(self) -> dict[str, tuple[str, ...]]:
        """The fields of each partition, by its name, as far as this process knows."""
        return self.records.partitions

    async def insert(self, record: RecordT | Mapping[str, Json]) -> RecordT:
        """Add a record; one without an id gets an id that sorts by time.

        Raises:
            InvalidRecord: it breaks the schema; lists every invalid field.
            Conflict: there is a record with this id.
        """
        return self._read(await self._insert_as_verb(self._encode(record)))

    async def update(
        self, id: str, changes: RecordT | Mapping[str, Json], *, if_version: str | None = None
    ) -> RecordT:
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
        return self._read(await self._update_as_verb(id, self._encode(changes), if_version))

    async def replace(
        self, id: str, record: RecordT | Mapping[str, Json], *, if_version: str | None = None
    ) -> RecordT:
        """Replace an existing record by a new one.

        Raises:
            NotFound: there is no such record.
            Conflict: it has another version than `if_version`.
            InvalidRecord: the new one breaks the schema.
        """

        async def work(record: Any) -> Document:
            with self.records.reads.changing([check_id(id)]):
                return await self._rewrite(id, if_version, Validator.build_replacement, record)

        given = _with_id(id, self._encode(record))
        return self._read(await self._run_verb("replace", given, work))

    async def upsert(self, record: RecordT | Mapping[str, Json]) -> RecordT:
        """Merge a record into the one with its id, or insert it if there is none.

        The hooks of `update` or `insert` run too, whichever applies.

        Raises:
            InvalidRecord: it breaks the schema.
        """
        return self._read(await self._run_verb("upsert", self._encode(record), self._upsert))

    async def delete(self, id: str, *, if_version: str | None = None) -> bool:
        """Delete a record; return whether there was one.

        Raises:
            Conflict: it has another version than `if_version`.
        """

        async def work(id: str) -> bool:
            with self.records.reads.changing([check_id(id)]):
                return await self._delete(id, if_version)

        return await self._run_verb("delete", id, work)

    async def insert_many(self, records: Iterable[RecordT | Mapping[str, Json]]) -> list[RecordT]:
        """Add records, in as few requests as the store allows.

        Not a transaction: if the store refuses some, the others are written all the same.

        Raises:
            InvalidRecord: some break the schema; lists every invalid field. Nothing was written.
            Invalid: two have the same id. Nothing was written.
            Incomplete: not all were written; lists which.
        """
        given = list(map(self._encode, as_list("records", records)))
        inputs = await self._hooks.before_all("insert", given)
        new_ids = self._ids.records(len(inputs))
        documents = await self.records.build(
            lambda validator: validator.build_many(inputs, new_ids, self.records.now())
        )
        self._check_types(documents)
        values = {document["id"]: document for document in documents}
        _refuse_duplicates(values, documents)
        result = await create_many(self.records.keyspace, values)
        self.records.report_inserted(*result.written)
        inserted = {name: Document(record) for name, record in result.written.items()}
        await self._hooks.after_all("insert", inserted.values())
        self._check_complete(result, conflicts=result.unchanged)
        return [self._read(inserted[name]) for name in values]

    async def delete_many(self, ids: Iterable[str]) -> int:
        """Delete records; return how many there were.

        Raises:
            Incomplete: not all were deleted; lists which.
        """
        inputs = await self._hooks.before_all("delete", as_list("ids", ids))
        checked = list(map(check_id, inputs))
        with self.records.reads.changing(checked):
            result = await remove_many(self.records.keyspace, checked)
        self.records.report_deleted(*result.written)
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
            for part in split_pages(ids):
                result = await remove_many(self.records.keyspace, part)
                self.records.report_deleted(*result.written)
                self._check_complete(result)
                count += len(result.written)
        finally:
            # Also of records that others have deleted.
            self.records.reads.clear()
        return count

    def validate(self, records: Sequence[Any], ids: Sequence[str]) -> list[dict[str, Json]]:
        """Check records by the schema and fill in defaults and ids; store nothing.

        Raises:
            InvalidRecord: some break the schema; lists every invalid field.
        """
        return self.records.validator.check_many(records, ids)

    def _encode(self, record: Any) -> Any:
        return record if self.record_type is None else self.record_type.encode(record)

    def _encode_message(self, data: Any) -> Any:
        # Its queue checks a dict, which may have the arguments of a task.
        return data if isinstance(data, Mapping) else self._encode(data)

    def _check_types(self, documents: Sequence[Json]) -> None:
        """Check what is to be written, if records have a type.

        Raises:
            Invalid: it is not of that type; names the field.
        """
        if self.record_type is not None:
            for document in documents:
                # It has a version once it is written.
                self.record_type.decode({VERSION: "", **document})

    async def _insert(self, record: Any) -> Document:
        (new_id,) = self._ids.records(1)
        value = await self.records.build(
            lambda validator: validator.build_new(record, new_id, self.records.now())
        )
        self._check_types([value])
        inserted = Document(await self.records.keyspace.create(value["id"], value))
        self.records.report_inserted(value["id"])
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
            value = build(self.records.validator, read_value(current), changes, self.records.now())
            self._check_types([value])
            return value

        try:
            record = await self.records.keyspace.put(check_id(id), decide)
        except InvalidRecord:
            if not await self.records.reload():
                raise
            record = await self.records.keyspace.put(check_id(id), decide)
        self.records.report_updated(id)
        return Document(record)

    async def _insert_as_verb(self, record: Any) -> Document:
        return await self._run_verb("insert", record, self._insert)

    async def _update_as_verb(self, id: str, changes: Any, if_version: str | None) -> Document:
        async def work(changes: Any) -> Document:
            with self.records.reads.changing([check_id(id)]):
                return await self._rewrite(id, if_version, Validator.build_update, changes)

        return await self._run_verb("update", _with_id(id, changes), work)

    async def _upsert(self, record: Any) -> Document:
        name = record.get("id") if isinstance(record, Mapping) else None
        if name is None:
            return await self._insert_as_verb(record)
        while True:
            exists = await self._exists(name)
            try:
                if exists:
                    return await self._update_as_verb(name, record, None)
                return await self._insert_as_verb(record)
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

        record = await self.records.keyspace.change(check_id(id), decide)
        if record is None or not record.deleted:
            return False
        self.records.report_deleted(id)
        return True

    def _check_version(self, current: Record, if_version: str | None, id: str) -> None:
        if if_version is not None and current.version != if_version:
            raise Conflict(
                self.records.keyspace.title(id), f"it no longer has version {if_version}"
            )

    def _check_complete(self, result: BatchResult, conflicts: Sequence[str] = ()) -> None:
        if conflicts or result.unknown or result.unsent:
            raise Incomplete(
                self.name,
                written=list(result.written),
                conflicts=conflicts,
                unknown=result.unknown,
                unsent=result.unsent,
            ) from result.cause


def _with_id(id: str, record: Any) -> Any:
    return {"id": id, **record} if isinstance(record, Mapping) else record


def _refuse_duplicates(values: Mapping[str, Json], documents: Sequence[Json]) -> None:
    if len(values) < len(documents):
        names = Counter(document["id"] for document in documents)
        ((duplicate, _),) = names.most_common(1)
        raise Invalid("id", duplicate, "is given twice", "use a different id for each record")
