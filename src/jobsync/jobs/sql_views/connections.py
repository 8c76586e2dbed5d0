"""A fleet's SQL face, as one process uses it: views, their names, and connections.

Promises: the views are there, and no older than this library, once a job is entered; where
this user may make none, an event says so and the job goes on. Each thread has a connection
of its own, in which every statement is a transaction.
"""

import os
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from jobsync.components import Components
from jobsync.core.urls import PostgresUrl, SqliteUrl, StoreUrl
from jobsync.errors import Misconfigured, Unavailable
from jobsync.jobs.events import ViewsMissing
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.sql_views import sqlite as sqliteviews
from jobsync.stores.opening import require
from jobsync.stores.postgres.queries import quote_name
from jobsync.stores.sqlite.user_connection import SqliteConnection

__all__ = ["SqlViews", "find_zone"]


# The time zone of this process, by a name that a database understands.


_LOCALTIME = Path("/etc/localtime")
_FOLDER = "zoneinfo/"


def find_zone(environ: Mapping[str, str] | None = None, localtime: Path = _LOCALTIME) -> str:
    """Name the zone: `TZ`, or what the machine is set to; UTC, if nobody says.

    A name such as Europe/Berlin, or a rule such as CET-1CEST,M3.5.0,M10.5.0/3.
    """
    given = (os.environ if environ is None else environ).get("TZ")
    if given is not None:
        # Empty means UTC, as for the C library; a leading colon means nothing.
        return given.removeprefix(":").partition(_FOLDER)[2] or given.removeprefix(":") or "UTC"
    if not localtime.exists():
        return "UTC"
    if name := str(localtime.resolve()).partition(_FOLDER)[2]:
        return name
    # A copy of a zone's file ends with its rule, in a line of its own.
    return localtime.read_bytes().rstrip(b"\n").rpartition(b"\n")[2].decode() or "UTC"


_TABLES = {
    "Node": "node",
    "Token": "token",
    "Lock": "lock",
    "Rebalance": "rebalance",
    "Leader": "leader",
    # The guide looks here for what was begun and not finished.
    "Claim": "unfinished",
    "Audit": "audit",
}

_IN_MAIN = "SELECT 1 FROM main.sqlite_master WHERE name = %s"
_IN_SESSIONS = "SELECT 1 FROM sessions.sqlite_master WHERE name = %s"


class SqlViews:
    """What SQL there is to a fleet.

    Args:
        url: the store.
        places: the fleet's keys.
        components: the clock, and a place to tell facts.
        zone: in which connections speak; the process's own, if None.
    """

    def __init__(
        self, url: StoreUrl, places: JobKeys, components: Components, zone: str | None = None
    ) -> None:
        self._url = url
        self._places = places
        self._clock = components.clock
        self._events = components.events
        self._zone = zone
        self._connections: dict[int, Any] = {}

    def install(self, node: str) -> None:
        """Make the views, or bring them up to date; on stores without SQL there are none.

        Raises:
            Misconfigured: somebody else has a relation of one of their names.
            Unavailable: the store does not answer.
        """
        if isinstance(self._url, PostgresUrl):
            self._install_on_postgres(self._url, node)
        elif isinstance(self._url, SqliteUrl):
            self._install_on_sqlite(self._url)

    @property
    def tables(self) -> dict[str, str]:
        """The names of the views, by the guide's words for them; `Claim` has what is unfinished."""
        schema = self._url.schema if isinstance(self._url, PostgresUrl) else ""
        within = f"{quote_name(schema)}." if schema else ""
        return {word: f"{within}{self._places.name}{view}" for word, view in _TABLES.items()}

    @property
    def views(self) -> list[str]:
        """The names of all views."""
        return [*self.tables.values(), self.tables["Audit"].removesuffix("audit") + "claim"]

    @property
    def connection(self) -> Any:
        """The calling thread's connection.

        Raises:
            Misconfigured: the store has no SQL.
            Unavailable: it does not answer.
        """
        known = self._connections.get(threading.get_ident())
        if known is None or known.closed:
            known = self._connections[threading.get_ident()] = self.connect()
        return known

    def connect(self) -> Any:
        """Open one more connection, which the caller closes."""
        match self._url:
            case PostgresUrl() as url:
                require("postgresql", "psycopg", "postgres")
                from jobsync.stores.postgres.user_connection import (  # noqa: PLC0415 - an extra
                    connect_postgres,
                )

                return connect_postgres(url, self._zone or find_zone())
            case SqliteUrl(path):
                connection = self._open_file(path)
                if _has(connection, _IN_SESSIONS, f"{self._places.name}session"):
                    sqliteviews.join_files(connection, self._places)
                return connection
            case _:
                raise Misconfigured(
                    "url", str(self._url), "has no SQL", "use postgresql:// or sqlite:///"
                )

    def close(self) -> None:
        """Close the connections of all threads."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _install_on_postgres(self, url: PostgresUrl, node: str) -> None:
        import psycopg  # noqa: PLC0415 - an extra

        from jobsync.jobs.sql_views.postgres import install  # noqa: PLC0415 - likewise
        from jobsync.stores.postgres.errors import explain  # noqa: PLC0415 - likewise

        with self.connect() as connection:
            try:
                install(connection, self._places)
            except psycopg.errors.InsufficientPrivilege as error:
                name, fix = self._places.name, "run what `jobsync schema` prints"
                self._events.emit(ViewsMissing(node=node, appname=name, reason=str(error), fix=fix))
            except psycopg.Error as error:
                raise explain(url, error) from error

    def _install_on_sqlite(self, url: SqliteUrl) -> None:
        connection = self._open_file(url.path)
        try:
            if not _has(connection, _IN_MAIN, "jobsync_record"):
                raise Misconfigured(
                    "url", str(url), "has no tables of jobsync", "enter a job there"
                )
            sqliteviews.install(connection, self._places)
        except sqlite3.OperationalError as error:
            raise Unavailable(str(url), str(error), "free the file, or enter again") from error
        finally:
            connection.close()

    def _open_file(self, path: str) -> SqliteConnection:
        zone = None if self._zone is None else ZoneInfo(self._zone)
        return SqliteConnection(Path(path), self._clock, zone)


def _has(connection: SqliteConnection, query: str, name: str) -> bool:
    return connection.execute(query, [name]).fetchone() is not None
