"""Many records at once: one statement a batch where the store can, and each its own outcome.

A batch is no transaction: part of it may be written and part not. It is told which, and to
send the same batch again does no harm. An error is raised only if nothing was written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias, cast

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json, encode_all
from jobsync.core.keys import escape, unescape
from jobsync.core.retry import backoff_limit
from jobsync.errors import Conflict, JobsyncError
from jobsync.stores.contract import Applied, Change, Conflicted, Put, Record, Store, Unknown, unwrap

__all__ = ["BatchResult", "Decide", "Disposition", "Keyspace", "create_many", "remove_many"]


# Records of one level of a store, under names that users choose and may use again.
#
# Every write names what it replaces: the record that was read, a tombstone, or nothing. Who
# loses a race reads again and decides again; of those who race, one always gets on.


_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 1.0


class Disposition(Enum):
    """What is to become of a record, other than a new value."""

    KEEP = "leave it as it is"
    REMOVE = "leave a tombstone"


Decide: TypeAlias = Callable[[Record | None], "Json | Disposition"]
"""Given the record that is there, or None, says what should be; raises to leave all as it is."""


class Keyspace:
    """Records under one prefix.

    Args:
        source: gives the store, or raises what keeps it from being used.
        prefix: where they are.
        components: the clock and the randomness that spread those who race.
        label: how errors call a record, before its name.
    """

    def __init__(
        self, source: Callable[[], Store], prefix: str, components: Components, label: str
    ) -> None:
        self.prefix = prefix
        self._source = source
        self._label = label
        self._clock = components.clock
        self._randomness = components.randomness

    @property
    def store(self) -> Store:
        """The store, if it can be used."""
        return self._source()

    def key(self, name: str) -> str:
        """Give the key of a record."""
        return self.prefix + escape(name)

    def name(self, key: str) -> str:
        """Give the name of a record."""
        return unescape(key[len(self.prefix) :])

    def title(self, name: str) -> str:
        """Say which record, in an error."""
        return f"{self._label}/{name}"

    async def get(self, name: str) -> Record | None:
        """Read one."""
        return await self.store.get(self.key(name))

    async def get_many(self, names: Sequence[str]) -> list[Record | None]:
        """Read several, in the order of their names; a name may be asked for twice."""
        keys = list(map(self.key, names))
        unlike = list(dict.fromkeys(keys))
        found = dict(zip(unlike, await self.store.get_many(unlike), strict=True)) if keys else {}
        return [found[key] for key in keys]

    async def create(self, name: str, value: Json) -> Record:
        """Write under a name that no record has now: one request, if none ever had it.

        Raises:
            Conflict: there is one.
            OutcomeUnknown: nobody can say.
        """
        (outcome,) = await self.store.write([Put(self.key(name), value)])
        if not isinstance(outcome, Conflicted):
            return unwrap(outcome, self.title(name))

        def decide(current: Record | None) -> Json:
            if current is not None:
                raise Conflict(self.title(name), "there is one already")
            return value

        return await self.put(name, decide)

    async def put(self, name: str, decide: Callable[[Record | None], Json]) -> Record:
        """Change one, by a decision that always comes to a value."""
        return cast("Record", await self.change(name, decide))

    async def change(self, name: str, decide: Decide) -> Record | None:
        """Read one, decide, and write in place of what was read, until nobody is faster.

        Returns:
            What is there then: the new record or tombstone; what was there, if it is kept.

        Raises:
            OutcomeUnknown: nobody can say.
        """
        key = self.key(name)
        attempt = 0
        while True:
            base = await self.store.get(key, tombstones=True)
            current = None if base is None or base.deleted else base
            change = _follow(key, base, decide(current))
            if change is None:
                return current
            (outcome,) = await self.store.write([change])
            if not isinstance(outcome, Conflicted):
                return unwrap(outcome, self.title(name))
            attempt += 1
            await self._rest(attempt)

    async def _rest(self, attempt: int) -> None:
        pause = backoff_limit(attempt, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
        await self._clock.sleep(self._randomness.uniform(0, pause))


def _follow(key: str, base: Record | None, decided: Json | Disposition) -> Change | None:
    """Give the change that a decision asks for."""
    if decided is Disposition.KEEP:
        return None
    if decided is not Disposition.REMOVE:
        return Put(key, decided, base)
    return None if base is None or base.deleted else base.delete()


_MOST_RECORDS = 10_000
_MOST_BYTES = 16 * 1024 * 1024

Follow: TypeAlias = Callable[[str, Record | None], Change | None]
"""Given a name and what is there, be it a tombstone, gives the change to make, if any."""


class BatchResult(msgspec.Struct):
    """What became of a batch, by name."""

    written: dict[str, Record] = {}
    kept: list[str] = []
    """Nothing was to be changed: what is there was left."""
    unknown: list[str] = []
    unsent: list[str] = []
    cause: JobsyncError | None = None
    """Why some were not sent."""


async def create_many(shelf: Keyspace, values: Mapping[str, Json]) -> BatchResult:
    """Write under names that no records have now: `kept` has those that are taken.

    Raises:
        Invalid: one of them cannot be written; nothing was.
        Unavailable: nothing was written.
    """
    keys = {name: shelf.key(name) for name in values}
    batch = _BatchWrite(shelf)
    taken: list[str] = []
    for names in _split(_measure(values)):
        taken += await batch.send({name: Put(keys[name], values[name]) for name in names})

    def follow(name: str, base: Record | None) -> Change | None:
        return Put(keys[name], values[name], base) if base is None or base.deleted else None

    for names in _split((name, 0) for name in taken):
        await batch.change(names, follow)
    return batch.tally


async def remove_many(shelf: Keyspace, names: Sequence[str]) -> BatchResult:
    """Leave tombstones: `written` has those that were there.

    Raises:
        Unavailable: nothing was written.
    """
    batch = _BatchWrite(shelf)

    def follow(_: str, base: Record | None) -> Change | None:
        return None if base is None or base.deleted else base.delete()

    for part in _split((name, 0) for name in dict.fromkeys(names)):
        await batch.change(part, follow)
    return batch.tally


def _measure(values: Mapping[str, Json]) -> Iterator[tuple[str, int]]:
    """Give the size of each, or 0 of all where they fit into one write."""
    documents = list(values.values())
    if len(documents) > _MOST_RECORDS or not _is_small(documents):
        # Each is looked at before any is sent, so that a bad one in a later part keeps back all.
        yield from zip(values, map(len, encode_all(documents)), strict=True)
    else:
        yield from ((name, 0) for name in values)


def _is_small(documents: list[Json]) -> bool:
    """Say whether they surely fit into one write."""
    try:
        return len(msgspec.json.encode(documents)) <= _MOST_BYTES
    except (TypeError, ValueError):
        return False


def _split(sized: Iterator[tuple[str, int]]) -> Iterator[list[str]]:
    """Give parts that are small enough for one write."""
    part: list[str] = []
    total = 0
    for name, size in sized:
        if part and (len(part) == _MOST_RECORDS or total + size > _MOST_BYTES):
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


class _BatchWrite:
    """A batch under way."""

    def __init__(self, shelf: Keyspace) -> None:
        self.tally = BatchResult()
        self._shelf = shelf

    async def change(self, names: list[str], follow: Follow) -> None:
        """Read, follow and write, until nobody is faster."""
        while names:
            keys = list(map(self._shelf.key, names))
            try:
                found = await self._shelf.store.get_many(keys, tombstones=True)
            except JobsyncError as error:
                self._give_up(names, error)
                return
            changes = dict(zip(names, map(follow, names, found), strict=True))
            self.tally.kept += [name for name, change in changes.items() if change is None]
            names = await self.send(
                {name: change for name, change in changes.items() if change is not None}
            )

    async def send(self, changes: Mapping[str, Change]) -> list[str]:
        """Write; give those that somebody else was faster with."""
        try:
            outcomes = await self._shelf.store.write(list(changes.values()))
        except JobsyncError as error:
            self._give_up(list(changes), error)
            return []
        conflicted = []
        for name, outcome in zip(changes, outcomes, strict=True):
            match outcome:
                case Applied(record):
                    self.tally.written[name] = record
                case Conflicted():
                    conflicted.append(name)
                case Unknown():
                    self.tally.unknown.append(name)
        return conflicted

    def _give_up(self, names: list[str], error: JobsyncError) -> None:
        """Note what was not sent; if nothing was, the error says it all."""
        if not (self.tally.written or self.tally.unknown):
            raise error
        self.tally.unsent += names
        self.tally.cause = error
