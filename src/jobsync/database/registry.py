"""Which resources there are: defined in the store, and so the same for every process.

Of several who define one at a time, each goes on from what the others have made. Within a
process there is one `Resource` for each name, whatever its definition becomes; it never goes
back to an earlier one.
"""

import asyncio
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.schema import Fields
from jobsync.database.definition import DEFINITIONS, Definition
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.database.resource import DATA, Resource
from jobsync.errors import Conflict, Invalid, NotFound, closest_name
from jobsync.events import Event
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = [
    "DROPPED",
    "Registry",
    "ResourceCreated",
    "ResourceDropped",
    "ResourceEvolved",
    "ResourceRegistry",
]


# Things by name, readable as `things.name` and as `things["name"]`.


T = TypeVar("T")


class Registry(Generic[T]):
    """A view of things by name; it shows what is there at the time.

    Args:
        kind: what they are, for errors.
        things: where they are kept.
    """

    def __init__(self, kind: str, things: Mapping[str, T]) -> None:
        self._kind = kind
        self._things = things

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            raise self.lack(name)
        return self._things[name]

    def __getattr__(self, name: str) -> T:
        # Asked only for what is no attribute: also by `copy`, `hasattr` and the like.
        if name.startswith("__") or name not in self._things:
            hint = closest_name(name, self._things)
            raise AttributeError(
                f"no {self._kind} {name!r}" + (f"; did you mean {hint}?" if hint else "")
            )
        return self._things[name]

    def lack(self, name: str) -> NotFound:
        """Give the error that says that there is no such thing, and what was probably meant."""
        hint = closest_name(str(name), self._things)
        return NotFound(self._kind, name, sorted(self._things), hint)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._things))

    def __len__(self) -> int:
        return len(self._things)

    def __repr__(self) -> str:
        return f"{self._kind}s: {', '.join(self) or 'none'}"


DROPPED = "dropped/"
"""Where it is noted which resources were removed, so that nothing of them stays for ever."""

_PAGE = 1000
_is_name = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}").fullmatch


class _AboutResource(Event, frozen=True, kw_only=True):
    resource: str


class ResourceCreated(_AboutResource, frozen=True, kw_only=True):
    """A resource was defined that was not there."""

    name = "db:resource-created"


class ResourceEvolved(_AboutResource, frozen=True, kw_only=True):
    """A resource's definition was changed in a compatible way."""

    name = "db:resource-evolved"


class ResourceDropped(_AboutResource, frozen=True, kw_only=True):
    """A resource was removed, with its records."""

    name = "db:resource-dropped"


class ResourceRegistry:
    """The resources of one database.

    Args:
        source: gives the store, or raises what keeps it from being used.
        components: time, randomness and events.

    Attributes:
        resources: those that this process knows.
        known: those, and what plugins show as such.
    """

    def __init__(self, source: Callable[[], Store], components: Components) -> None:
        self.resources: dict[str, Resource] = {}
        self._shown: dict[str, Resource] = {}
        self.known = ChainMap(self.resources, self._shown)
        self._source = source
        self._components = components
        self._events = components.events
        self._witness = CorruptionLog("resources", components.events)
        self._clock = components.clock
        self._shelf = Keyspace(source, DEFINITIONS, components, "resource")
        self._dropped = Keyspace(source, DROPPED, components, "dropped resource")
        # Whoever reads must not remember what somebody else here has changed meanwhile.
        self._turn = asyncio.Lock()

    async def define(self, name: str, fields: Fields | None, *, strict: bool | None) -> Resource:
        """Define one, or change the definition that is there; None keeps what it says.

        Raises:
            Invalid: it is no name, or records that are there would no longer pass.
        """
        _check_name(name)
        if not (strict is None or isinstance(strict, bool)):
            raise Invalid("strict", strict, "is neither True nor False", "write strict=True")
        blank = Definition(name, is_declared=False)
        before: Definition | None = None
        after = blank
        has_records = True

        def decide(current: Record | None) -> Json | Disposition:
            nonlocal before, after
            before = None if current is None else Definition.read(current)
            known = before is not None and has_records
            after = (before or blank).evolve(fields, strict=strict, has_records=known)
            return Disposition.KEEP if after == before else after.write(current)

        async with self._turn:
            try:
                await self._shelf.change(name, decide)
            except Invalid:
                has_records = await self._has_records(name)
                if has_records:
                    raise
                await self._shelf.change(name, decide)
            resource = self._remember(after)
        if before is None:
            self._events.emit(ResourceCreated(resource=name))
        elif before != after:
            self._events.emit(ResourceEvolved(resource=name))
        return resource

    async def _has_records(self, name: str) -> bool:
        return bool(await self._source().heads(f"{DATA}{name}/", limit=1))

    async def look(self) -> list[str]:
        """Read all definitions; give their names."""
        async with self._turn:
            return await self._look()

    async def _look(self) -> list[str]:
        names: list[str] = []
        after = ""
        while True:
            records = await self._source().scan(DEFINITIONS, after=after, limit=_PAGE)
            found = self._witness.read_all(Definition.read, records)
            names += [self._remember(definition).name for definition in found]
            if len(records) < _PAGE:
                break
            after = records[-1].key
        for gone in self.resources.keys() - set(names):
            del self.resources[gone]
        return names

    async def drop(self, name: str) -> None:
        """Remove the records of one, then its definition.

        Raises:
            NotFound: there is none.
            Conflict: its definition was changed meanwhile.
            Incomplete: some records could not be removed.
        """
        async with self._turn:
            await self._drop(name)
        self._events.emit(ResourceDropped(resource=name))

    async def _drop(self, name: str) -> None:
        there = await self._shelf.get(name)
        if there is None:
            raise Registry("resource", self.resources).lack(name)
        note = {"at": self._clock.wall().seconds}
        await self._dropped.put(name, lambda _: note)
        await self._remember(Definition.read(there)).delete_all()

        def decide(current: Record | None) -> Disposition:
            if current is not None and current.version != there.version:
                raise Conflict(self._shelf.title(name), "its definition was changed")
            return Disposition.REMOVE

        await self._shelf.change(name, decide)
        self.resources.pop(name, None)

    async def find_dropped(self) -> dict[str, Record]:
        """Give the notes of resources that were removed, by name."""
        notes = await self._source().scan(DROPPED, limit=_PAGE)
        return {self._dropped.name(note.key): note for note in notes}

    def show(self, name: str, records: Store) -> None:
        """Let records that are kept elsewhere be read as a resource's."""

        async def is_renewed(_: str) -> bool:
            return False

        definition = Definition(name)
        self._shown[name] = Resource(definition, lambda: records, self._components, is_renewed)

    def forget(self) -> None:
        """Know nothing any more, as before the first look."""
        self.resources.clear()
        self._shown.clear()
        # The next connection may be made in another loop.
        self._turn = asyncio.Lock()

    async def _renew(self, name: str) -> bool:
        """Read one's definition again; say whether it has changed."""
        async with self._turn:
            record = await self._shelf.get(name)
            known = self.resources.get(name)
            if record is None or known is None:
                return False
            before = known.definition
            return self._remember(Definition.read(record)).definition != before

    def _remember(self, definition: Definition) -> Resource:
        """Give the one resource of a name, with its newest definition."""
        resource = self.resources.get(definition.name)
        if resource is None:
            resource = Resource(definition, self._source, self._components, self._renew)
            self.resources[definition.name] = resource
        resource.define(definition)
        return resource


def _check_name(name: Any) -> None:
    if not (isinstance(name, str) and _is_name(name)):
        fix = "use a letter, then up to 99 letters, digits, _ and -"
        raise Invalid("name", name, "is no name for a resource", fix)
