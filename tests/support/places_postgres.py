"""PostgreSQL as a place for the conformance suite: a schema of its own in a real server."""

import itertools
import os

import psycopg
from psycopg import sql

from jobsync import Components, Store
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.stores.postgres.store import PostgresStore
from jobsync.stores.settling import SettlingStore

__all__ = ["PostgresPlace"]

_numbers = itertools.count()


class PostgresPlace:
    """A schema that no other test uses.

    Args:
        url: the server, as its superuser.
        through: the address that stores connect to, if it is not the server's own.
    """

    def __init__(self, url: str, through: str = "") -> None:
        self.schema = f"place {os.getpid()} {next(_numbers)}"
        self._server = url
        self._through = through or url

    @property
    def url(self) -> PostgresUrl:
        """What a store connects to."""
        name = self.schema.replace(" ", "%20")
        url = parse_url(f"{self._through}{'&' if '?' in self._through else '?'}schema={name}")
        assert isinstance(url, PostgresUrl)
        return url

    async def open(self, components: Components | None = None) -> Store:
        """Open one more store on the same records."""
        components = components or Components.system()
        return SettlingStore(await PostgresStore.connect(self.url, components), components)

    def damage(self, key: str, text: str) -> None:
        """Overwrite a record's value behind the library's back."""
        self.execute("UPDATE {}.jobsync_record SET value = %s WHERE key = %s", text, key)

    def stored(self, key: str) -> str | None:
        """Read a record's value behind the library's back."""
        rows = self.execute("SELECT value FROM {}.jobsync_record WHERE key = %s", key)
        return rows[0][0] if rows else None

    def remove(self) -> None:
        """Drop the schema and all that is in it."""
        self.execute("DROP SCHEMA IF EXISTS {} CASCADE")

    def execute(self, statement: str, *parameters: str) -> list[tuple[str | None]]:
        """Run a statement behind the library's back; `{}` is the schema."""
        # Written by tests, and by nobody else.
        filled = sql.SQL(statement).format(sql.Identifier(self.schema))
        with psycopg.connect(self._server, autocommit=True) as connection:
            cursor = connection.execute(filled, parameters)
            return cursor.fetchall() if cursor.description else []
