"""The places on which the conformance suite runs. A new store is one more class here."""

import itertools
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from jobsync import Components, Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.sqlite import SqliteStore


class Place(Protocol):
    """Where records are, apart from any one store that is open on them."""

    async def open(self, components: Components | None = None) -> Store:
        """Open one more store on the same records."""
        ...

    def damage(self, key: str, text: str) -> None:
        """Overwrite a record's value behind the library's back."""
        ...

    def stored(self, key: str) -> str | None:
        """Read a record's value behind the library's back."""
        ...


class MemoryPlace:
    """A name in this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keeper = MemoryStore(name)

    async def open(self, components: Components | None = None) -> Store:
        return MemoryStore(self._name, components)

    def damage(self, key: str, text: str) -> None:
        slots = self._keeper._data.slots
        slots[key] = type(slots[key])(
            **{
                **{f: getattr(slots[key], f) for f in slots[key].__struct_fields__},
                "data": text.encode(),
            }
        )

    def stored(self, key: str) -> str | None:
        slot = self._keeper._data.slots.get(key)
        return None if slot is None or slot.data is None else slot.data.decode()


class SqlitePlace:
    """A file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self, components: Components | None = None) -> Store:
        return await SqliteStore.connect(self._path, components)

    def damage(self, key: str, text: str) -> None:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE jobsync_record SET value = ? WHERE key = ?", (text, key))

    def stored(self, key: str) -> str | None:
        with closing(sqlite3.connect(self._path)) as connection:
            query = "SELECT value FROM jobsync_record WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
        return None if row is None else row[0]


_names = (f"conformance-{i}" for i in itertools.count())


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A fresh place on each kind of store."""
    match request.param:
        case "memory":
            yield MemoryPlace(next(_names))
        case "sqlite":
            yield SqlitePlace(tmp_path / "jobs.db")


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Store]:
    """A store that is open on the place."""
    store = await place.open()
    yield store
    await store.close()
