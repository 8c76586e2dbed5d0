"""Many records at once: one statement a batch where the store can, and each its own outcome.

A batch is no transaction: part of it may be written and part not. It is told which, and to
send the same batch again does no harm. An error is raised only if nothing was written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from jobsync.core.codec import Json, encode_all
from jobsync.database.shelf import Shelf
from jobsync.errors import JobsyncError
from jobsync.stores.contract import Applied, Change, Conflicted, Put, Record, Unknown

__all__ = ["Tally", "create_many", "remove_many"]

_MOST_RECORDS = 10_000
_MOST_BYTES = 16 * 1024 * 1024

Follow: TypeAlias = Callable[[str, Record | None], Change | None]
"""Given a name and what is there, be it a tombstone, gives the change to make, if any."""


class Tally(msgspec.Struct):
    """What became of a batch, by name."""

    written: dict[str, Record] = {}
    kept: list[str] = []
    """Nothing was to be changed: what is there was left."""
    unknown: list[str] = []
    unsent: list[str] = []
    cause: JobsyncError | None = None
    """Why some were not sent."""


async def create_many(shelf: Shelf, values: Mapping[str, Json]) -> Tally:
    """Write under names that no records have now: `kept` has those that are taken.

    Raises:
        Invalid: one of them cannot be written; nothing was.
        Unavailable: nothing was written.
    """
    keys = {name: shelf.key(name) for name in values}
    batch = _Batch(shelf)
    taken: list[str] = []
    for names in _split(_measure(values)):
        taken += await batch.send({name: Put(keys[name], values[name]) for name in names})

    def follow(name: str, base: Record | None) -> Change | None:
        return Put(keys[name], values[name], base) if base is None or base.deleted else None

    for names in _split((name, 0) for name in taken):
        await batch.change(names, follow)
    return batch.tally


async def remove_many(shelf: Shelf, names: Sequence[str]) -> Tally:
    """Leave tombstones: `written` has those that were there.

    Raises:
        Unavailable: nothing was written.
    """
    batch = _Batch(shelf)

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


class _Batch:
    """A batch under way."""

    def __init__(self, shelf: Shelf) -> None:
        self.tally = Tally()
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
