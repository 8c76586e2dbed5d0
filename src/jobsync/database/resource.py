"""Records of one kind, checked by a schema. The same answers on every store.

Promises: what a verb returned is in the store. Of several who write with `if_version` and
one version, at most one does; who writes without it loses nobody's fields but those that it
gives. An id that was deleted can be used again. `insert` and `get` are one request each.

What a schema refuses is refused by the newest definition there is, so that whoever has heard
of an older one alone keeps up with those who have widened it.

A verb that raises `OutcomeUnknown` may have written; any other error means that it has not,
but for batches, where `Incomplete` tells what was.
"""

from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, TypeAlias, TypeVar, overload

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.schema import Schema
from jobsync.database import keyspace as batch
from jobsync.database.definition import Definition
from jobsync.database.document import LIBRARYS, Document, value_of
from jobsync.database.hooks import Hook, ResourceHooks, Verb
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.database.listing import Listing, Page
from jobsync.database.message_sink import MessageSink
from jobsync.database.validation import Validator
from jobsync.errors import Conflict, Incomplete, Invalid, InvalidRecord, NotFound
from jobsync.events import Event, EventEmitter, Events
from jobsync.stores.contract import Record, Store, Where

__all__ = ["DATA", "RecordsDeleted", "RecordsInserted", "RecordsUpdated", "Resource"]

DATA = "data/"
"""Where records are, a level for each resource."""

_PAGE = 1000

Documents: TypeAlias = list[Document]
Names: TypeAlias = list[str]
"""In the class, `list` is a verb."""

T = TypeVar("T")
_H = TypeVar("_H", bound=Hook)


class _Written(Event, frozen=True, kw_only=True):
    resource: str
    ids: tuple[str, ...]


class RecordsInserted(_Written, frozen=True, kw_only=True):
    """Records are new: one event a call."""

    name = "resource:inserted"


class RecordsUpdated(_Written, frozen=True, kw_only=True):
    """Records were changed or replaced: one event a call."""

    name = "resource:updated"


class RecordsDeleted(_Written, frozen=True, kw_only=True):
    """Records are gone: one event a call."""

    name = "resource:deleted"


class Resource(EventEmitter):
    """Records of one kind. Make it with `Database.create_resource`.

    Args:
        definition: its name and what its records look like.
        source: gives the store, or raises what keeps it from being used.
        components: time, randomness, and the events that this resource's are part of.
        renew: looks whether there is a newer definition, and goes on with it; says so.
    """

    def __init__(
        self,
        definition: Definition,
        source: Callable[[], Store],
        components: Components,
        renew: Callable[[str], Awaitable[bool]],
    ) -> None:
        self.name = definition.name
        self.events = Events()
        self.events.join(components.events)
        self._shelf = Keyspace(source, f"{DATA}{self.name}/", components, self.name)
        self._hooks = ResourceHooks(self.events)
        self._clock = components.clock
        self._ids = components.ids
        self._listing = Listing(self._shelf, components.events)
        self._renew = renew
        self._intake: MessageSink | None = None
        self.define(definition)

    def __repr__(self) -> str:
        return f"Resource({self.name!r})"

    @property
    def schema(self) -> Schema:
        """What its records look like, as far as this process has heard."""
        return self.definition.schema

    def define(self, definition: Definition) -> None:
        """Go on with a newer definition."""
        self.definition = definition
        self._drafting = Validator(definition.name, definition.schema)

    @overload
    def before(self, verb: Verb) -> Callable[[_H], _H]: ...
    @overload
    def before(self, verb: Verb, hook: _H) -> _H: ...
    def before(self, verb: Verb, hook: Any = None) -> Any:
        """Call a function before a verb; it may change what the verb is given, or refuse it.

        Without a function, decorates one.

        Raises:
            Invalid: there is no such verb.
        """
        return self._hooks.place(f"before_{verb}", hook)

    @overload
    def after(self, verb: Verb) -> Callable[[_H], _H]: ...
    @overload
    def after(self, verb: Verb, hook: _H) -> _H: ...
    def after(self, verb: Verb, hook: Any = None) -> Any:
        """Call a function after a verb, with its outcome. Without a function, decorates one.

        Raises:
            Invalid: there is no such verb.
        """
        return self._hooks.place(f"after_{verb}", hook)

    def add_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Add hooks by names such as `before_insert`: a function each, or a list of them."""
        for name, given in hooks.items():
            for hook in given if isinstance(given, list | tuple) else [given]:
                self._hooks.add(name, hook)

    async def insert(self, record: Mapping[str, Json]) -> Document:
        """Add a record; one without an id is given one that sorts by time.

        Raises:
            InvalidRecord: it breaks the schema; lists every field that does.
            Conflict: there is a record with this id.
        """
        return await self._around("insert", record, self._insert)

    async def get(self, id: str) -> Document | None:
        """Read a record, or None."""
        return await self._around("get", id, self._get)

    async def exists(self, id: str) -> bool:
        """Say whether there is such a record."""
        return await self._around("exists", id, self._exists)

    async def update(
        self, id: str, changes: Mapping[str, Json], *, if_version: str | None = None
    ) -> Document:
        """Merge changes into a record: objects into objects, all else in place of what was.

        Args:
            id: which one.
            changes: fields to set. To take a field away, use `replace`.
            if_version: the `_version` that it must still have. Without it the changes go
                into whatever is there, and nobody's other fields are lost.

        Raises:
            NotFound: there is no such record.
            Conflict: it has another version.
            InvalidRecord: it would break the schema.
        """

        async def work(changes: Any) -> Document:
            return await self._rewrite(id, if_version, Validator.updated, changes)

        return await self._around("update", _with_id(id, changes), work)

    async def replace(
        self, id: str, record: Mapping[str, Json], *, if_version: str | None = None
    ) -> Document:
        """Put a whole new record in the place of one that is there.

        Raises:
            NotFound: there is no such record.
            Conflict: it has another version than `if_version`.
            InvalidRecord: the new one breaks the schema.
        """

        async def work(record: Any) -> Document:
            return await self._rewrite(id, if_version, Validator.replaced, record)

        return await self._around("replace", _with_id(id, record), work)

    async def upsert(self, record: Mapping[str, Json]) -> Document:
        """Merge a record into the one with its id, or add it if there is none.

        The hooks of `update` or `insert` run too, whichever it turns out to be.

        Raises:
            InvalidRecord: it breaks the schema.
        """
        return await self._around("upsert", record, self._upsert)

    async def delete(self, id: str, *, if_version: str | None = None) -> bool:
        """Remove a record; say whether there was one.

        Raises:
            Conflict: it has another version than `if_version`.
        """

        async def work(id: str) -> bool:
            return await self._delete(id, if_version)

        return await self._around("delete", id, work)

    async def insert_many(self, records: Iterable[Mapping[str, Json]]) -> list[Document]:
        """Add records, in as few requests as the store allows.

        No transaction: where the store refuses some, the others are written all the same.

        Raises:
            InvalidRecord: some break the schema; lists every field. Nothing was written.
            Invalid: two have one id. Nothing was written.
            Incomplete: not all were written; tells which.
        """
        given = await self._hooks.before_all("insert", _gather("records", records))
        fresh = self._ids.records(len(given))
        drafted = await self._draft(lambda draft: draft.fresh_all(given, fresh, self._now()))
        values = {document["id"]: document for document in drafted}
        _refuse_twins(values, drafted)
        tally = await batch.create_many(self._shelf, values)
        self._tell(RecordsInserted, *tally.written)
        made = {name: Document(record) for name, record in tally.written.items()}
        await self._hooks.after_all("insert", made.values())
        self._check_complete(tally, conflicts=tally.kept)
        return [made[name] for name in values]

    async def get_many(self, ids: Iterable[str]) -> list[Document | None]:
        """Read records in the order of their ids; None where there is none."""
        given = await self._hooks.before_all("get", _gather("ids", ids))
        asked = list(map(_check_id, given))
        records = await self._shelf.get_many(asked)
        found = [None if record is None else Document(record) for record in records]
        await self._hooks.after_all("get", found)
        return found

    async def delete_many(self, ids: Iterable[str]) -> int:
        """Remove records; count those that were there.

        Raises:
            Incomplete: not all were removed; tells which.
        """
        given = await self._hooks.before_all("delete", _gather("ids", ids))
        asked = list(map(_check_id, given))
        tally = await batch.remove_many(self._shelf, asked)
        self._tell(RecordsDeleted, *tally.written)
        await self._hooks.after_all("delete", [one in tally.written for one in asked])
        self._check_complete(tally)
        return len(tally.written)

    async def delete_all(self) -> int:
        """Remove all records that are there now, without hooks; count them.

        Raises:
            Incomplete: not all were removed; tells which.
        """
        removed = 0
        # Listed once: whoever goes on writing does not keep this from coming to its end.
        ids = await self._listing.find_ids()
        for start in range(0, len(ids), _PAGE):
            tally = await batch.remove_many(self._shelf, ids[start : start + _PAGE])
            self._tell(RecordsDeleted, *tally.written)
            self._check_complete(tally)
            removed += len(tally.written)
        return removed

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> str:
        """Push a message that looks as this resource's records do; give the message's id.

        Args:
            data: the message; without an id of its own it is given the message's.
            delay: seconds before which nobody handles it.
            timeout: seconds that its handler may take; the queue's by default.
            max_attempts: how often it is tried; the queue's by default.
            connection: yours to the same database, psycopg's or sqlite3's or SQLAlchemy's:
                the message is there once your transaction commits, and only then.

        Raises:
            InvalidRecord: it breaks the schema; lists every field that does.
            Invalid: this resource has no queue here, or an option is wrong.
            OutcomeUnknown: nobody can say whether it will be handled.
        """
        return await self._queue().enqueue(
            data,
            delay=delay,
            timeout=timeout,
            max_attempts=max_attempts,
            connection=connection,
        )

    async def enqueue_many(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> Names:
        """Push messages, all or none, in order; give their ids. See `enqueue`."""
        return await self._queue().enqueue_many(
            data,
            delay=delay,
            timeout=timeout,
            max_attempts=max_attempts,
            connection=connection,
        )

    def hand_to(self, intake: MessageSink | None) -> None:
        """Hand messages to a queue from now on, or to none."""
        self._intake = intake

    def draft(self, records: Sequence[Any], ids: Sequence[str]) -> list[dict[str, Json]]:
        """Check what is given by the schema, fill in defaults and ids, and store nothing.

        Raises:
            InvalidRecord: some break the schema; lists every field.
        """
        drafted = self._drafting.fresh_all(records, ids, self._now())
        return [
            {name: value for name, value in document.items() if name not in LIBRARYS}
            for document in drafted
        ]

    def _queue(self) -> MessageSink:
        if self._intake is None:
            fix = f"await database.use_plugin(QueuePlugin(resource={self.name!r})) first"
            raise Invalid("resource", self.name, "has no queue in this process", fix)
        return self._intake

    async def list(self, *, limit: int | None = None, offset: int = 0) -> Documents:
        """Give records in the order of their ids; all of them, unless told otherwise."""

        async def work(where: Where) -> Documents:
            return await self._listing.find(where, limit=limit, offset=offset)

        return await self._around("list", None, work)

    async def list_ids(self, *, limit: int | None = None, offset: int = 0) -> Names:
        """Give ids in order, without reading the records."""

        async def work(_: None) -> Names:
            return await self._listing.find_ids(limit=limit, offset=offset)

        return await self._around("list_ids", None, work)

    async def count(self, filter: Where = None) -> int:
        """Count the records that match; without a filter, all."""
        return await self._around("count", filter, self._listing.count)

    async def page(
        self, filter: Where = None, *, size: int = 100, after: str | None = None
    ) -> Page:
        """Give a page of records in the order of their ids, and where to go on.

        Costs the same however far in; records that come and go meanwhile move no page.
        """

        async def work(where: Where) -> Page:
            return await self._listing.page(where, size=size, after=after)

        return await self._around("page", filter, work)

    async def query(
        self,
        filter: Where = None,
        *,
        sort: str | Sequence[str] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Documents:
        """Give the records that match a filter.

        Args:
            filter: as in `{"expires_at": {"$lt": now}, "active": True}`; SQL stores let
                the database drop what cannot match.
            sort: a field, `-field` for the other way, or a list; by id without. With it all
                matches are read, whatever the limit.
            limit: give at most so many.
            offset: leave out so many first.
        """

        async def work(where: Where) -> Documents:
            return await self._listing.find(where, sort=sort, limit=limit, offset=offset)

        return await self._around("query", filter, work)

    async def __aiter__(self) -> AsyncIterator[Document]:
        """Go through all records in the order of their ids, a page at a time."""
        async for document in self._listing.walk():
            yield document

    async def _around(self, verb: Verb, given: Any, work: Callable[[Any], Awaitable[T]]) -> T:
        outcome = await work(await self._hooks.before(verb, given))
        await self._hooks.after(verb, outcome)
        return outcome

    async def _insert(self, given: Any) -> Document:
        (fresh,) = self._ids.records(1)
        value = await self._draft(lambda draft: draft.fresh(given, fresh, self._now()))
        made = Document(await self._shelf.create(value["id"], value))
        self._tell(RecordsInserted, value["id"])
        return made

    async def _get(self, id: str) -> Document | None:
        record = await self._shelf.get(_check_id(id))
        return None if record is None else Document(record)

    async def _exists(self, id: str) -> bool:
        return await self._shelf.get(_check_id(id)) is not None

    async def _rewrite(
        self,
        id: str,
        if_version: str | None,
        draft: Callable[[Validator, Json, Any, float], Json],
        given: Any,
    ) -> Document:
        def decide(current: Record | None) -> Json:
            if current is None:
                raise NotFound(f"record of {self.name}", id)
            self._check_version(current, if_version, id)
            return draft(self._drafting, value_of(current), given, self._now())

        try:
            record = await self._shelf.put(_check_id(id), decide)
        except InvalidRecord:
            if not await self._renew(self.name):
                raise
            record = await self._shelf.put(_check_id(id), decide)
        self._tell(RecordsUpdated, id)
        return Document(record)

    async def _draft(self, make: Callable[[Validator], T]) -> T:
        """Make documents; by a newer definition, if the one at hand refuses them."""
        try:
            return make(self._drafting)
        except InvalidRecord:
            if not await self._renew(self.name):
                raise
            return make(self._drafting)

    async def _upsert(self, given: Any) -> Document:
        name = given.get("id") if isinstance(given, Mapping) else None
        if name is None:
            return await self.insert(given)
        while True:
            there = await self._exists(name)
            try:
                return await (self.update(name, given) if there else self.insert(given))
            except (NotFound, Conflict):
                # Somebody was faster, unless it is still as it was: then a hook refused it.
                if await self._exists(name) is there:
                    raise

    async def _delete(self, id: str, if_version: str | None) -> bool:
        def decide(current: Record | None) -> Disposition:
            if current is None:
                return Disposition.KEEP
            self._check_version(current, if_version, id)
            return Disposition.REMOVE

        left = await self._shelf.change(_check_id(id), decide)
        if left is None or not left.deleted:
            return False
        self._tell(RecordsDeleted, id)
        return True

    def _check_version(self, current: Record, if_version: str | None, id: str) -> None:
        if if_version is not None and current.version != if_version:
            raise Conflict(self._shelf.title(id), f"it no longer has version {if_version}")

    def _check_complete(self, tally: batch.BatchResult, conflicts: Sequence[str] = ()) -> None:
        if conflicts or tally.unknown or tally.unsent:
            raise Incomplete(
                self.name,
                written=list(tally.written),
                conflicts=conflicts,
                unknown=tally.unknown,
                unsent=tally.unsent,
            ) from tally.cause

    def _tell(self, kind: type[_Written], *ids: str) -> None:
        if ids:
            self.events.emit(kind(resource=self.name, ids=ids))

    def _now(self) -> float:
        # Milliseconds: what people read, and what every JSON reader holds.
        return round(self._clock.wall().seconds, 3)


def _with_id(id: str, given: Any) -> Any:
    return {"id": id, **given} if isinstance(given, Mapping) else given


def _check_id(id: Any) -> str:
    if not isinstance(id, str):
        raise Invalid("id", id, f"{type(id).__name__} is not text", "use str(id)")
    return id


def _gather(name: str, given: Iterable[T]) -> Sequence[T]:
    """Give several things as a list, however they come; a text or a record is one thing."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise Invalid(name, given, "is not a list", "write [...]")
    return given if isinstance(given, list) else list(given)


def _refuse_twins(values: Mapping[str, Json], drafted: Sequence[Json]) -> None:
    if len(values) < len(drafted):
        names = Counter(document["id"] for document in drafted)
        ((twin, _),) = names.most_common(1)
        raise Invalid("id", twin, "is given twice", "give each record an id of its own")
