"""Places on which suites run: where records are, apart from any store that is open on them."""

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Protocol

import msgspec

from jobsync import Components, Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.sqlite.store import SqliteStore

__all__ = ["MemoryPlace", "Place", "SqlitePlace"]

_numbers = itertools.count()


class Place(Protocol):
    """Where records are."""

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

    def __init__(self) -> None:
        self._name = f"place-{next(_numbers)}"
        self._keeper = MemoryStore(self._name)

    async def open(self, components: Components | None = None) -> Store:
        """Open one more store on the same records."""
        return MemoryStore(self._name, components)

    def damage(self, key: str, text: str) -> None:
        """Overwrite a record's value behind the library's back."""
        slots = self._keeper._data.records
        slots[key] = msgspec.structs.replace(slots[key], text=text)

    def stored(self, key: str) -> str | None:
        """Read a record's value behind the library's back."""
        slot = self._keeper._data.records.get(key)
        return None if slot is None else slot.text


class SqlitePlace:
    """A file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self, components: Components | None = None) -> Store:
        """Open one more store on the same records."""
        return await SqliteStore.connect(self._path, components)

    def damage(self, key: str, text: str) -> None:
        """Overwrite a record's value behind the library's back."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE jobsync_record SET value = ? WHERE key = ?", (text, key))

    def stored(self, key: str) -> str | None:
        """Read a record's value behind the library's back."""
        with closing(sqlite3.connect(self._path)) as connection:
            query = "SELECT value FROM jobsync_record WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
        return None if row is None else row[0]
