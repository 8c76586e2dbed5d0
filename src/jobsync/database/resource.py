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
from datetime import datetime, timedelta
from typing import Any, Protocol, TypedDict, Unpack

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.schema import Schema
from jobsync.database.definition import Definition
from jobsync.database.document import (
    Document,
    as_list,
    check_id,
    read_value,
)
from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.database.keyspace import BatchResult, Disposition, create_many, remove_many
from jobsync.database.readable_resource import ReadableResource
from jobsync.database.resource_records import ResourceRecords
from jobsync.database.validation import Validator
from jobsync.errors import Conflict, Incomplete, Invalid, InvalidRecord, NotFound
from jobsync.stores.contract import Record
from jobsync.stores.paging import split_pages

__all__ = ["EnqueueOptions", "MessageSink", "Resource"]


class EnqueueOptions(TypedDict, total=False):
    """How messages are enqueued; see `Resource.enqueue`."""

    delay: float | timedelta
    at: datetime
    timeout: float | None
    max_attempts: int | None
    priority: int
    group: str | Callable[[Mapping[str, Json]], str] | None
    key: str | Callable[[Mapping[str, Json]], str] | None
    key_ttl: float | timedelta | None
    replace: bool
    task: str
    connection: object


class MessageSink(Protocol):
    """What a resource enqueues its messages to: a queue, in practice."""

    namespace: str
    """What distinguishes it from other queues of the resource."""

    async def enqueue_many(
        self, data: Sequence[Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Enqueue messages, all or none; return their ids."""
        ...

    def check_messages(
        self, data: Sequence[Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> None:
        """Check messages and options as `enqueue_many` does; enqueue nothing."""
        ...


@on_home_loop
class Resource(ReadableResource):
    """Records of one kind. Create it with `Database.create_resource`.

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
        self._queues: dict[str, MessageSink] = {}
        """By namespace."""

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
            with self.records.reads.changing([check_id(id)]):
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
            with self.records.reads.changing([check_id(id)]):
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
            with self.records.reads.changing([check_id(id)]):
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
        documents = await self.records.build(
            lambda validator: validator.build_many(inputs, new_ids, self.records.now())
        )
        values = {document["id"]: document for document in documents}
        _refuse_duplicates(values, documents)
        result = await create_many(self.records.keyspace, values)
        self.records.report_inserted(*result.written)
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

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> str:
        """Enqueue a message that fits this resource's schema; return the message's id.

        Args:
            data: the message; without an id it gets the message's id.
            namespace: that of the queue, if this resource has several queues here.
            delay: seconds, or a `timedelta`, before it can be handled.
            at: when it can be handled at the earliest: a `datetime` with a time zone, judged by
                the store's clock if it has one.
            timeout: seconds that its handler may take; the queue's by default.
            max_attempts: how often it is tried; the queue's by default.
            priority: from -100 to 100, higher ones first; 0 by default. For queues with
                `order="priority"`.
            group: a name, or a function of the message that returns one. Messages of one group are
                handled one at a time and in order: one that fails or waits blocks those after it
                until it is completed, cancelled or dead.
            key: a text, or a function of the message. While another message holds the key, nothing
                is enqueued, and the id of that message is returned.
            key_ttl: seconds, or a `timedelta`, for which the message holds its key from now on,
                whatever becomes of it; by default it does as long as it is pending.
            replace: whether it replaces the message that holds the key, with a new delay. One that
                a worker has claimed stays, and the new message holds the key from now on.
            task: the name of the task that handles it; `data` has the arguments by name, as JSON,
                and the schema does not count. Other options are the task's by default, if this
                process knows it.
            connection: your psycopg, sqlite3 or SQLAlchemy connection to the same database:
                the message exists once your transaction commits, and only then.

        Raises:
            InvalidRecord: it breaks the schema; lists every invalid field.
            Invalid: this resource has no queue here, or several and none was chosen, or an option
                is unknown or wrong.
            OutcomeUnknown: it may or may not have been enqueued.
        """
        (name,) = await self.enqueue_many([data], namespace=namespace, **options)
        return name

    async def enqueue_many(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> list[str]:
        """Enqueue messages in order, all or none; return their ids. See `enqueue`."""
        return await self._choose_queue(namespace).enqueue_many(data, **options)

    def enqueue_sync(
        self,
        data: Mapping[str, Json],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> str:
        """Enqueue a message from a plain function, on any thread; block until it is stored.

        See `enqueue`. The database must be connected, on an event loop that runs.

        Raises:
            Invalid: an event loop runs in this thread, and would be blocked.
        """
        (name,) = self.enqueue_many_sync([data], namespace=namespace, **options)
        return name

    def enqueue_many_sync(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> list[str]:
        """Enqueue messages in order, all or none, as `enqueue_sync` does; return their ids."""
        work = self.enqueue_many(data, namespace=namespace, **options)
        home = self.home_loop
        return home.call(work) if options.get("connection") is None else home.call_here(work)

    def check_messages(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> None:
        """Check messages and options as `enqueue_many` does; enqueue nothing.

        Raises:
            Invalid: they would be refused, or this resource has no queue here, or several.
        """
        self._choose_queue(namespace).check_messages(data, **options)

    def add_queue(self, queue: MessageSink) -> None:
        """Enqueue messages to this queue too; it replaces one of the same namespace."""
        self._queues[queue.namespace] = queue

    def _choose_queue(self, namespace: str | None) -> MessageSink:
        queues = self._queues
        if not queues:
            fix = f"await database.use_plugin(QueuePlugin(resource={self.name!r})) first"
            raise Invalid("resource", self.name, "has no queue in this process", fix)
        if namespace is None and len(queues) == 1:
            return next(iter(queues.values()))
        if namespace is None or namespace not in queues:
            known = " and ".join(sorted(queues))
            problem = f"must be that of a queue of {self.name}, which has {known} in this process"
            raise Invalid("namespace", namespace, problem, f"pass namespace={min(queues)!r}")
        return queues[namespace]

    def validate(self, records: Sequence[Any], ids: Sequence[str]) -> list[dict[str, Json]]:
        """Check records by the schema and fill in defaults and ids; store nothing.

        Raises:
            InvalidRecord: some break the schema; lists every invalid field.
        """
        return self.records.validator.check_many(records, ids)

    async def _insert(self, record: Any) -> Document:
        (new_id,) = self._ids.records(1)
        value = await self.records.build(
            lambda validator: validator.build_new(record, new_id, self.records.now())
        )
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
            return build(self.records.validator, read_value(current), changes, self.records.now())

        try:
            record = await self.records.keyspace.put(check_id(id), decide)
        except InvalidRecord:
            if not await self.records.reload():
                raise
            record = await self.records.keyspace.put(check_id(id), decide)
        self.records.report_updated(id)
        return Document(record)

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
