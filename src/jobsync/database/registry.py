"""The resources of a database. They are defined in the store, so every process sees the same.

Processes that define a resource at the same time build on each other's definitions. A process has
one `Resource` object per name, whatever its definition becomes; it never returns to an older
definition. An object that was kept while its resource was dropped and created again, or over a new
connection, works on the same records by the same definition.
"""

import asyncio
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from jobsync.components import Components
from jobsync.core.arguments import check_resource_name
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.schema import Fields
from jobsync.database.definition import KNOWN_FORMAT, Definition, Rule
from jobsync.database.document import CREATED, UPDATED
from jobsync.database.home_loop import HomeLoop
from jobsync.database.index_entries import remove_index
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.database.read_cache import ReadGuard
from jobsync.database.resource import Resource
from jobsync.database.resource_records import DATA, DEFINITION_AGE, ResourceRecords
from jobsync.errors import Conflict, Invalid, NewerFormat, NotFound, closest_name, plain_text
from jobsync.events import Event
from jobsync.stores.contract import Change, Outcome, Put, Record, Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.paging import PAGE_SIZE, scan_pages

__all__ = [
    "DEFINITIONS",
    "DROPPED",
    "Registry",
    "ResourceCreated",
    "ResourceDropped",
    "ResourceEvolved",
    "ResourceRegistry",
    "check_text_name",
    "list_dropped_indexes",
]

DEFINITIONS = "resource/"
"""The prefix of definitions."""

DROPPED = "dropped/"
"""The prefix of notes about dropped resources, so that their tombstones can be buried."""

_UNKNOWN_YET = "is not known before the database is connected"
_OPEN_FIX = "use it within `async with db:`, or after `await db.connect()`"

V = TypeVar("V")


class Registry(Generic[V]):
    """A live view of values by name, readable as `view.name` and as `view["name"]`.

    Args:
        kind: what the values are, for errors.
        values: by name.
        has_opened: whether there can be values: they are known once the database is connected.
    """

    def __init__(
        self, kind: str, values: Mapping[str, V], has_opened: Callable[[], bool] = lambda: True
    ) -> None:
        self._kind = kind
        self._values = values
        self._has_opened = has_opened

    def __getitem__(self, name: str) -> V:
        text = plain_text(name)
        if text is None or text not in self._values:
            if not self._has_opened():
                raise Invalid(self._kind, name, _UNKNOWN_YET, _OPEN_FIX)
            raise self.not_found(name)
        return self._values[text]

    def __getattr__(self, name: str) -> V:
        # Called only for missing attributes, by `copy`, `hasattr` and the like too.
        if name.startswith("_"):
            # Also those of a half-made object. Nothing that is registered has such a name.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in self._values:
            raise AttributeError(self._describe_missing(name))
        return self._values[name]

    def _describe_missing(self, name: str) -> str:
        if not self._has_opened():
            return f"the {self._kind} {name!r} {_UNKNOWN_YET}: {_OPEN_FIX}"
        hint = closest_name(name, self._values)
        known = f"; known: {', '.join(self)}" if self._values else "; there is none yet"
        return f"no {self._kind} {name!r}" + (f"; did you mean {hint}?" if hint else known)

    def not_found(self, name: str) -> NotFound:
        """Return the error for an unknown name, with the closest known one."""
        hint = closest_name(name, self._values)
        return NotFound(self._kind, name, sorted(self._values), hint)

    def __contains__(self, name: object) -> bool:
        return plain_text(name) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{self._kind}s: {', '.join(self) or 'none'}"


class _ResourceEvent(Event, frozen=True, kw_only=True):
    resource: str


class ResourceCreated(_ResourceEvent, frozen=True, kw_only=True):
    """A new resource was defined."""

    name = "db:resource-created"


class ResourceEvolved(_ResourceEvent, frozen=True, kw_only=True):
    """A resource's definition was changed in a compatible way."""

    name = "db:resource-evolved"


class ResourceDropped(_ResourceEvent, frozen=True, kw_only=True):
    """A resource was removed, with its records."""

    name = "db:resource-dropped"


class ResourceRegistry:
    """The resources of one database.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        components: time, randomness and events.
        guard: what knows the database's cache.
        home_loop: the event loop of the database.
        derive_rules: returns the rules of indexes that plugins want for a definition.

    Attributes:
        resources: the resources that this process knows.
        readable: these, and the views that plugins have added.
    """

    def __init__(
        self,
        get_store: Callable[[], Store],
        components: Components,
        guard: ReadGuard,
        home_loop: HomeLoop,
        derive_rules: Callable[[Definition], Sequence[Rule]] = lambda _: (),
    ) -> None:
        self._derive_rules = derive_rules
        self.resources: dict[str, Resource] = {}
        self._records: dict[str, ResourceRecords] = {}
        """Those of all resources that this process has ever known: users may hold on to an
        object of a resource that was dropped, or of an earlier connection."""
        self._views: dict[str, Resource] = {}
        self.readable = ChainMap(self.resources, self._views)
        self._get_store = get_store
        self._components = components
        self._guard = guard
        self._home_loop = home_loop
        self._events = components.events
        self._corruption_log = CorruptionLog("resources", components.events)
        self._clock = components.clock
        self._definitions = Keyspace(
            get_store, DEFINITIONS, components, "resource", self._write_definitions
        )
        self._dropped = Keyspace(get_store, DROPPED, components, "dropped resource")
        # A reader must not put back what another task of this process has changed meanwhile.
        self._lock = asyncio.Lock()

    def list_fields(self, name: str, fields: Fields | None) -> list[str] | None:
        """Return the fields of a resource's records; None if nobody has described them."""
        if fields is None and (known := self.resources.get(name)):
            fields = known.definition.schema.fields
        return [*fields, "id", CREATED, UPDATED] if fields else None

    async def define(
        self,
        name: str,
        fields: Fields | None,
        *,
        strict: bool | None,
        rules: Sequence[Rule] = (),
    ) -> Resource:
        """Define a resource, or change its definition; None keeps what it says.

        Args:
            name: of the resource.
            fields: what its records look like.
            strict: whether other fields are refused.
            rules: of indexes to add, or to replace.

        Raises:
            Invalid: the name is not valid, or existing records would no longer pass.
            NewerFormat: newer code has changed the definition.
        """
        name = check_resource_name("name", name)
        if not (strict is None or isinstance(strict, bool)):
            raise Invalid("strict", strict, "must be True or False", "write strict=True")
        blank = Definition(name, is_declared=False)
        before: Definition | None = None
        after = blank
        has_records = True
        # Only new indexes of new resources are ready at once.
        new = blank.evolve(fields, strict=strict, has_records=False)
        is_unused = name not in self.resources and bool(rules or self._derive_rules(new))
        is_unused = is_unused and not await self._has_records(name)

        def decide(current: Record | None) -> Json | Disposition:
            nonlocal before, after
            existing = None if current is None or current.deleted else current
            before = None if existing is None else Definition.read(existing)
            may_have_records = before is not None and has_records
            after = (before or blank).evolve(fields, strict=strict, has_records=may_have_records)
            wanted = [*rules, *self._derive_rules(after)]
            # Some process may still write by a definition that was dropped a moment ago.
            after = after.add_indexes(
                wanted, self._make_token, is_new=current is None and is_unused
            )
            return Disposition.KEEP if after == before else after.write(existing)

        async with self._lock:
            read_at = self._clock.mono()
            try:
                await self._definitions.change(name, decide, tombstones=True)
            except Invalid:
                has_records = await self._has_records(name)
                if has_records:
                    raise
                await self._definitions.change(name, decide, tombstones=True)
            resource = self._remember(after, read_at)
        if before is None:
            self._events.emit(ResourceCreated(resource=name))
        elif before != after:
            self._events.emit(ResourceEvolved(resource=name))
        return resource

    def _make_token(self) -> str:
        (token,) = self._components.ids.nonces(1)
        return token

    async def change(self, name: str, change: Callable[[Definition], Definition]) -> Resource:
        """Change the definition of a resource that exists.

        Raises:
            Invalid: the name is not text.
            NotFound: there is no such resource.
            NewerFormat: newer code has changed the definition.
        """
        check_text_name(name)
        changed: Definition | None = None

        def decide(current: Record | None) -> Json | Disposition:
            nonlocal changed
            if current is None:
                raise Registry("resource", self.resources).not_found(name)
            before = Definition.read(current)
            if before.format > KNOWN_FORMAT:
                raise NewerFormat(current.key, before.format, KNOWN_FORMAT)
            changed = change(before)
            return Disposition.KEEP if changed == before else changed.write(current)

        async with self._lock:
            read_at = self._clock.mono()
            await self._definitions.change(name, decide)
            return self._remember(cast("Definition", changed), read_at)

    async def _has_records(self, name: str) -> bool:
        return bool(await self._get_store().heads(f"{DATA}{name}/", limit=1))

    async def refresh(self) -> list[str]:
        """Read all definitions; return their names."""
        async with self._lock:
            return await self._refresh()

    async def _refresh(self) -> list[str]:
        names: list[str] = []
        read_at = self._clock.mono()
        async for records in scan_pages(self._get_store(), DEFINITIONS):
            found = self._corruption_log.read_all(Definition.read, records)
            names += [self._remember(definition, read_at).name for definition in found]
        for gone in self.resources.keys() - set(names):
            self._forget(gone)
        return names

    async def drop(self, name: str) -> None:
        """Remove the records of a resource with their index entries, then its definition.

        Raises:
            NotFound: there is no such resource.
            NewerFormat: newer code has changed the definition.
            Conflict: its definition was changed meanwhile.
            Incomplete: some records could not be removed.
        """
        check_text_name(name)
        read_at = self._clock.mono()
        record = await self._definitions.get(name)
        if record is None:
            raise Registry("resource", self.resources).not_found(name)
        definition = Definition.read(record)
        if definition.format > KNOWN_FORMAT:
            raise NewerFormat(record.key, definition.format, KNOWN_FORMAT)
        await self._dropped.put(name, lambda note: self._note_drop(note, definition))
        async with self._lock:
            resource = self._remember(definition, read_at)
        await resource.delete_all()
        for key in definition.index_keys:
            await remove_index(self._get_store(), name, key)

        def decide(current: Record | None) -> Disposition:
            if current is not None and current.version != record.version:
                raise Conflict(self._definitions.title(name), "its definition was changed")
            return Disposition.REMOVE

        async with self._lock:
            await self._definitions.change(name, decide)
            self._forget(name)
        self._events.emit(ResourceDropped(resource=name))

    def _note_drop(self, note: Record | None, definition: Definition) -> Json:
        """Return the note about a dropped resource, and about the indexes that it has had."""
        keys = {*list_dropped_indexes(note), *definition.index_keys}
        return {"at": self._clock.wall().seconds, "indexes": sorted(keys)}

    async def read_dropped(self) -> dict[str, Record]:
        """Return the notes about dropped resources, by name."""
        notes = await self._get_store().scan(DROPPED, limit=PAGE_SIZE)
        return {self._dropped.name(note.key): note for note in notes}

    def add_view(self, name: str, records: Store) -> None:
        """Make records that are stored elsewhere readable as a resource."""

        async def never_changes(_: str) -> bool:
            return False

        stored = ResourceRecords(
            Definition(name),
            self._clock.mono(),
            lambda: records,
            self._components,
            never_changes,
            self._open_records,
        )
        self._views[name] = Resource(stored, self._components, self._home_loop)

    def clear(self) -> None:
        """Forget all resources, as before the first `refresh`."""
        for name in list(self.resources):
            self._forget(name)
        self._views.clear()
        # The next connection may be made in another loop.
        self._lock = asyncio.Lock()

    async def _open_records(self, name: str) -> ResourceRecords:
        """Return the records of a resource; define it if there is none, or no longer."""
        if known := self.resources.get(name):
            await known.records.refresh_definition(DEFINITION_AGE)
            if known.records.is_definition_current:
                return known.records
        return (await self.define(name, None, strict=None)).records

    async def _reload(self, name: str) -> bool:
        """Read a definition again; return whether it has changed."""
        async with self._lock:
            read_at = self._clock.mono()
            record = await self._definitions.get(name)
            known = self._records[name]
            if record is None:
                return False
            before = known.definition
            known.set_definition(Definition.read(record), read_at)
            return known.definition != before

    def _remember(self, definition: Definition, read_at: Mono) -> Resource:
        """Return the resource of this name, with this definition."""
        name = definition.name
        records = self._records.get(name)
        if records is None:
            records = self._records[name] = ResourceRecords(
                definition,
                read_at,
                self._get_store,
                self._components,
                self._reload,
                self._open_records,
                self._guard,
            )
        elif name not in self.resources:
            records.begin()
        records.set_definition(definition, read_at)
        if name not in self.resources:
            self.resources[name] = Resource(records, self._components, self._home_loop)
        return self.resources[name]

    def _forget(self, name: str) -> None:
        """Know a resource no longer. Who still holds it goes by what is stored."""
        if self.resources.pop(name, None) is not None:
            self._records[name].distrust_definition()

    async def _write_definitions(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write definitions, in a format that code without indexes does not overwrite."""
        return await self._get_store().write(
            [msgspec.structs.replace(change, format=_choose_format(change)) for change in changes]
        )


def list_dropped_indexes(note: Record | None) -> list[str]:
    """Return the keys of the indexes that a dropped resource has had."""
    value: Json = None if note is None else note.value
    keys = value.get("indexes") if isinstance(value, dict) else None
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


def _choose_format(change: Change) -> int:
    if isinstance(change, Put) and "indexes" in change.value:
        return KNOWN_FORMAT
    return 1 if change.base is None else min(change.base.format, KNOWN_FORMAT)


def check_text_name(name: Any) -> str:
    """Return the name of a resource as plain text.

    Raises:
        Invalid: it is not text.
    """
    if (text := plain_text(name)) is None:
        raise Invalid("name", name, "must be text", "pass the name of a resource")
    return text
