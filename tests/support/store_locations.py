"""Locations of records that the suites run on, apart from the stores opened on them."""

import itertools
import os
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import obstore
import postgres_schemas
from obstore.store import S3Store
from psycopg import sql

from jobsync import Components, Store
from jobsync.core.urls import ObjectsUrl, PostgresUrl, parse_url
from jobsync.stores.memory import MemoryStore
from jobsync.stores.objects.layout import ObjectNames, decode_object, encode_object
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.postgres.store import PostgresStore
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sqlite.store import SqliteStore

__all__ = [
    "MemoryLocation",
    "ObjectsLocation",
    "PostgresLocation",
    "SqliteLocation",
    "StoreLocation",
]

_numbers = itertools.count()


class StoreLocation(Protocol):
    """Where records are stored."""

    async def open(self, components: Components | None = None) -> Store:
        """Open one more store on the same records."""
        ...

    def corrupt(self, key: str, text: str) -> None:
        """Overwrite a record's value without the library."""
        ...

    def read_value(self, key: str) -> str | None:
        """Read the text of a record's value without the library; None without one."""
        ...


class MemoryLocation:
    """A named store in this process."""

    def __init__(self) -> None:
        self._name = f"place-{next(_numbers)}"
        self._keeper = MemoryStore(self._name)

    async def open(self, components: Components | None = None) -> Store:
        return MemoryStore(self._name, components)

    def corrupt(self, key: str, text: str) -> None:
        records = self._keeper._data.records
        records[key] = msgspec.structs.replace(records[key], text=text)

    def read_value(self, key: str) -> str | None:
        stored = self._keeper._data.records.get(key)
        return None if stored is None else stored.text


class SqliteLocation:
    """A file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self, components: Components | None = None) -> Store:
        return await SqliteStore.connect(self._path, components)

    def corrupt(self, key: str, text: str) -> None:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE jobsync_record SET value = ? WHERE key = ?", (text, key))

    def read_value(self, key: str) -> str | None:
        with closing(sqlite3.connect(self._path)) as connection:
            query = "SELECT value FROM jobsync_record WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
        return None if row is None else row[0]


class PostgresLocation:
    """A schema of a real server that no other test uses.

    Args:
        url: the server, as its superuser.
        through: the address that stores connect to, if it is not the server's own.
    """

    def __init__(self, url: str, through: str = "") -> None:
        self.schema = postgres_schemas.take(url, f"place {os.getpid()} {next(_numbers)}")
        self._server = url
        self._through = through or url

    @property
    def url(self) -> PostgresUrl:
        """The URL that stores connect to."""
        name = self.schema.replace(" ", "%20")
        url = parse_url(f"{self._through}{'&' if '?' in self._through else '?'}schema={name}")
        assert isinstance(url, PostgresUrl)
        return url

    async def open(self, components: Components | None = None) -> Store:
        components = components or Components.system()
        return SettlingStore(await PostgresStore.connect(self.url, components), components)

    def corrupt(self, key: str, text: str) -> None:
        self.execute("UPDATE {}.jobsync_record SET value = %s WHERE key = %s", text, key)

    def read_value(self, key: str) -> str | None:
        rows = self.execute("SELECT value FROM {}.jobsync_record WHERE key = %s", key)
        return rows[0][0] if rows else None

    def remove(self) -> None:
        """Delete everything."""
        postgres_schemas.give_back(self._server, self.schema)

    def execute(self, statement: str, *parameters: Any, **named: Any) -> list[tuple[str | None]]:
        """Run a statement without the library; `{}` is the schema."""
        filled = sql.SQL(statement).format(sql.Identifier(self.schema))
        cursor = postgres_schemas.connect(self._server).execute(filled, named or parameters)
        return cursor.fetchall() if cursor.description else []


class ObjectsLocation:
    """A prefix that no other test uses, in an existing bucket.

    Args:
        url: the bucket and the prefix.
        bare_etags: whether the server compares ETags without their quotes.
        conditional_delete: whether it honours a condition on DELETE.
    """

    def __init__(
        self, url: ObjectsUrl, *, bare_etags: bool = False, conditional_delete: bool = True
    ) -> None:
        assert url.key is not None
        assert url.secret is not None
        self._url = url
        self._bare_etags = bare_etags
        self._conditional_delete = conditional_delete
        self._names = ObjectNames(url.prefix)
        self._bucket = S3Store(
            url.bucket,
            endpoint=url.endpoint,
            region=url.region,
            access_key_id=url.key.reveal(),
            secret_access_key=url.secret.reveal(),
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        )

    async def open(self, components: Components | None = None) -> Store:
        components = components or Components.system()
        store = await ObjectsStore.connect(
            self._url,
            components,
            bare_etags=self._bare_etags,
            conditional_delete=self._conditional_delete,
        )
        return SettlingStore(store, components)

    def corrupt(self, key: str, text: str) -> None:
        name = self._names.of_record(key)
        found = obstore.get(self._bucket, name).bytes().to_bytes()
        obstore.put(self._bucket, name, encode_object(decode_object(key, found, ""), text))

    def read_value(self, key: str) -> str | None:
        try:
            found = obstore.get(self._bucket, self._names.of_record(key)).bytes().to_bytes()
        except FileNotFoundError:
            return None
        # The padding is after the bracket; four commas are before the value.
        *head, text = found.rstrip(b" ").removesuffix(b"]").split(b",", 4)
        return text.decode() if len(head) == 4 else None
