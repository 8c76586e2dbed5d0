"""The SQL views of a fleet: how they are installed, and connections to query them.

Guarantees: once a job is entered, the views exist and are not older than this library; if this
user has no right to create them, an event reports it and the job continues. A view shows the
store's current records and stores nothing itself. A DELETE on a view has a defined effect: it
removes pins, history or a node's record (a node that is alive writes it again), or makes the
leader check the tokens again. The database refuses all other writes: only nodes claim tasks
and mark them. Each thread has its own connection, in which every statement is a transaction.

A later version of the views only adds columns at the end, so older code works beside newer
code. The original library has tables of the same names; they are never touched, and finding
one is an error.

On PostgreSQL instants are `timestamptz`, so dates are in the reader's time zone. On SQLite
instants are text in UTC and dates are text. There, records are in one file, sessions and roles
in another, and a view sees its own file only. So each file has views of its own tables, and a
connection of this library, which opens both, adds temporary views that join them: `node`, with
heartbeats, and `leader`. Heartbeats are counted from the start of the machine, which only such
a connection can convert.
"""

import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import msgspec

from jobsync.components import Components
from jobsync.core.assignment import MAX_TOKENS
from jobsync.core.urls import PostgresUrl, SqliteUrl, StoreUrl
from jobsync.errors import Misconfigured, Unavailable
from jobsync.jobs.events import ViewsMissing
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores import postgres, sqlite
from jobsync.stores.contract import TRAIL_LENGTH
from jobsync.stores.opening import require
from jobsync.stores.sql import fill_in, load_sql, quote_name
from jobsync.stores.sqlite.user_connection import SqliteConnection

if TYPE_CHECKING:
    import psycopg

__all__ = [
    "POSTGRES_VIEWS",
    "VIEWS_VERSION",
    "SqlViews",
    "find_time_zone",
    "postgres_views_sql",
    "sqlite_views_sql",
]

VIEWS_VERSION = 8
"""The version of the views. It grows when any of them changes."""

_MARK_PREFIX = "jobsync "
_MARK = f"{_MARK_PREFIX}{VIEWS_VERSION}"
"""Marks our views, so that they can be told from tables of the original library."""

_TRAIL = str(TRAIL_LENGTH * 13 - 1)

_RESERVED = (
    *("node", "token", "lock", "leader", "leader_lock", "rebalance", "rebalance_lock", "claim"),
    *("audit", "checkpoint", "inst", "session", "message", "unfinished"),
)
"""Names that this library or the original one gives to relations, after the prefix."""

_TABLES = {
    "Node": "node",
    "Token": "token",
    "Lock": "lock",
    "Rebalance": "rebalance",
    "Leader": "leader",
    # The guide looks here for tasks that were started and not finished.
    "Claim": "unfinished",
    "Audit": "audit",
}

_DELETABLE = ("node", "token", "rebalance", "lock")
"""The views that accept a DELETE."""

_POSTGRES = load_sql(__file__, "views_postgres.sql") | load_sql(postgres.__file__, "views.sql")
POSTGRES_VIEWS = (
    *("node", "leader", "token", "lock", "rebalance", "claim", "audit", "unfinished", "message"),
)
"""Each after the views that it reads."""
_ONCE_PER_STATEMENT = ("token", "lock")
"""Views whose DELETE is handled once for all rows of a statement."""
_ADVISORY_LOCK = 0x6A6F6273796E64
"""Held while views are installed."""

_SQLITE = load_sql(__file__, "views_sqlite.sql") | load_sql(sqlite.__file__, "views.sql")
_SQLITE_VIEWS = {
    "main": ("node", "token", "lock", "rebalance", "claim", "audit", "unfinished", "message"),
    "sessions": ("session", "leader"),
}
"""The views of each file, each after the views that it reads."""

_LOCALTIME = Path("/etc/localtime")
_ZONEINFO = "zoneinfo/"


def find_time_zone(environ: Mapping[str, str] | None = None, localtime: Path = _LOCALTIME) -> str:
    """Return the process's time zone: `TZ`, or the machine's setting, or UTC.

    The result is a name such as Europe/Berlin, or a rule such as CET-1CEST,M3.5.0,M10.5.0/3,
    which a database understands.
    """
    zone = (os.environ if environ is None else environ).get("TZ")
    if zone is not None:
        # Empty means UTC, as in the C library; a leading colon has no meaning.
        return zone.removeprefix(":").partition(_ZONEINFO)[2] or zone.removeprefix(":") or "UTC"
    if not localtime.exists():
        return "UTC"
    if name := str(localtime.resolve()).partition(_ZONEINFO)[2]:
        return name
    # A copy of a zone file ends with the zone's rule, on a line of its own.
    return localtime.read_bytes().rstrip(b"\n").rpartition(b"\n")[2].decode() or "UTC"


class SqlViews:
    """The views of one fleet, and one process's connections to them.

    Args:
        url: the store.
        keys: the fleet's keys.
        components: the clock and the event emitter.
        zone: the time zone of connections; the process's own if None.
    """

    def __init__(
        self, url: StoreUrl, keys: JobKeys, components: Components, zone: str | None = None
    ) -> None:
        self._url = url
        self._keys = keys
        self._clock = components.clock
        self._events = components.events
        self._zone = zone
        self._connections: dict[int, Any] = {}

    def install(self, node: str) -> None:
        """Create the views or bring them up to date. Stores without SQL have none.

        Raises:
            Misconfigured: another relation has the name of one of the views.
            Unavailable: the store does not answer.
        """
        if isinstance(self._url, PostgresUrl):
            self._install_on_postgres(self._url, node)
        elif isinstance(self._url, SqliteUrl):
            self._install_on_sqlite(self._url)

    @property
    def tables(self) -> dict[str, str]:
        """The names of the views, by the guide's words; `Claim` has the unfinished tasks."""
        schema = self._url.schema if isinstance(self._url, PostgresUrl) else ""
        within = f"{quote_name(schema)}." if schema else ""
        return {word: f"{within}{self._keys.name}{view}" for word, view in _TABLES.items()}

    @property
    def views(self) -> list[str]:
        """The names of all views."""
        return [*self.tables.values(), self.tables["Audit"].removesuffix("audit") + "claim"]

    @property
    def connection(self) -> Any:
        """The calling thread's connection.

        Raises:
            Misconfigured: the store has no SQL.
            Unavailable: the store does not answer.
        """
        known = self._connections.get(threading.get_ident())
        if known is None or known.closed:
            known = self._connections[threading.get_ident()] = self.connect()
        return known

    def connect(self) -> Any:
        """Open a new connection, which the caller closes."""
        match self._url:
            case PostgresUrl() as url:
                require("postgresql", "psycopg", "postgres")
                from jobsync.stores.postgres.connection import (  # noqa: PLC0415 - an extra
                    connect_user,
                )

                return connect_user(url, self._zone or find_time_zone())
            case SqliteUrl(path):
                connection = self._open_file(path)
                if _has_relation(connection, "sessions", f"{self._keys.name}session"):
                    _join_sqlite_files(connection, self._keys)
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

        from jobsync.stores.postgres.connection import statement_error  # noqa: PLC0415 - likewise

        with self.connect() as connection:
            try:
                _install_postgres_views(connection, self._keys)
            except psycopg.errors.InsufficientPrivilege as error:
                name, fix = self._keys.name, "run what `jobsync schema` prints"
                self._events.emit(ViewsMissing(node=node, appname=name, reason=str(error), fix=fix))
            except psycopg.Error as error:
                raise statement_error(url, error) from error

    def _install_on_sqlite(self, url: SqliteUrl) -> None:
        connection = self._open_file(url.path)
        try:
            if not _has_relation(connection, "main", "jobsync_record"):
                raise Misconfigured(
                    "url", str(url), "has no tables of jobsync", "enter a job there"
                )
            _install_sqlite_views(connection, self._keys)
        except sqlite3.OperationalError as error:
            raise Unavailable(str(url), str(error), "free the file, or enter again") from error
        finally:
            connection.close()

    def _open_file(self, path: str) -> SqliteConnection:
        zone = None if self._zone is None else ZoneInfo(self._zone)
        return SqliteConnection(Path(path), self._clock, zone)


class _Relation(msgspec.Struct, frozen=True):
    """A table or a view, and its mark."""

    name: str
    mark: str


def _find_version(found: Iterable[_Relation], views: Collection[str], keys: JobKeys) -> int:
    """Return the version of a fleet's views; 0 if any of them is missing.

    Args:
        found: the relations that have the fleet's prefix.
        views: the views that there should be.
        keys: the fleet's keys.

    Raises:
        Misconfigured: a relation of one of the names is not ours.
    """
    reserved = {f"{keys.name}{name}" for name in (*_RESERVED, *views)}
    versions = dict.fromkeys((f"{keys.name}{view}" for view in views), 0)
    for relation in found:
        number = relation.mark.removeprefix(_MARK_PREFIX)
        if relation.mark.startswith(_MARK_PREFIX) and number.isdecimal():
            versions[relation.name] = int(number)
        elif relation.name in reserved:
            raise Misconfigured(
                "appname",
                keys.name,
                f"is the prefix of {relation.name}, which exists and is not jobsync-fleet's",
                "if the original JobSync made it, stop its nodes and follow "
                "docs/how-to/migrate-from-the-original.md; else choose another "
                "config.sync.sql.appname, or another ?schema= in the url",
            )
    return min(versions.values())


def _install_postgres_views(connection: "psycopg.Connection[Any]", keys: JobKeys) -> None:
    """Create the views of a fleet, or bring them up to date, in the connection's schema."""
    from psycopg import sql  # noqa: PLC0415 - an extra

    row = connection.execute("SELECT current_schema()").fetchone()
    schema = "" if row is None else str(row[0])
    if _read_postgres_version(connection, schema, keys) >= VIEWS_VERSION:
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_ADVISORY_LOCK])
        if _read_postgres_version(connection, schema, keys) < VIEWS_VERSION:
            # Our own text but for quoted names. Without parameters % is an ordinary character.
            connection.execute(sql.SQL(";\n".join(_list_postgres_statements(schema, keys))))


def _read_postgres_version(
    connection: "psycopg.Connection[Any]", schema: str, keys: JobKeys
) -> int:
    prefix = f"{keys.name.replace('_', '~_')}%"
    rows = connection.execute(_POSTGRES["relations"], [schema, prefix])
    found = [_Relation(name, mark or "") for name, mark in rows]
    return _find_version(found, POSTGRES_VIEWS, keys)


def postgres_views_sql(schema: str, keys: JobKeys, role: str) -> str:
    """Return the SQL for an administrator: the views, and the rights of a role that uses them."""
    names = {view: f"{quote_name(schema)}.{keys.name}{view}" for view in POSTGRES_VIEWS}
    grant = fill_in(
        _POSTGRES["grant"],
        {
            "names": ", ".join(names.values()),
            "deletable": ", ".join(names[view] for view in _DELETABLE),
            "role": role,
            "schema": quote_name(schema),
        },
    )
    statements = [*_list_postgres_statements(schema, keys), grant]
    return "".join(f"{statement};\n" for statement in statements)


def _list_postgres_statements(schema: str, keys: JobKeys) -> list[str]:
    statements = [_POSTGRES[view] for view in POSTGRES_VIEWS]
    statements += [_POSTGRES["unpinned"], _POSTGRES["replace"]]
    statements += [_POSTGRES[f"delete_{view}"] for view in _DELETABLE]
    for view in _DELETABLE:
        for each, when in (("row", "INSTEAD OF"), ("statement", "AFTER")):
            if each == "row" or view in _ONCE_PER_STATEMENT:
                values = {"each": each, "when": when, "view": view}
                statements += [
                    fill_in(_POSTGRES[name], values) for name in ("drop_trigger", "trigger")
                ]
    statements += [
        fill_in(_POSTGRES["comment"], {"view": view, "mark": _MARK}) for view in POSTGRES_VIEWS
    ]
    # The notifier needs psycopg, which is an extra.
    from jobsync.stores.postgres.listener import channel_of  # noqa: PLC0415

    values = {
        "schema": quote_name(schema),
        "app": keys.name,
        "fleet": keys.segment,
        "channel": channel_of(schema),
        "trail": _TRAIL,
        "most": str(MAX_TOKENS),
    }
    return [fill_in(statement, values) for statement in statements]


def _install_sqlite_views(connection: SqliteConnection, keys: JobKeys) -> None:
    """Create the views of a fleet in both files, or bring them up to date."""
    if _read_sqlite_version(connection, keys) >= VIEWS_VERSION:
        return
    with connection.transaction():
        if _read_sqlite_version(connection, keys) < VIEWS_VERSION:
            for file, views in _SQLITE_VIEWS.items():
                for view in reversed(views):
                    connection.execute(f"DROP VIEW IF EXISTS {file}.{keys.name}{view}")
                for view in views:
                    text = _SQLITE[view].replace(" VIEW ", f" VIEW {file}.")
                    connection.execute(_fill_in_sqlite(text, keys))
            for view in _DELETABLE:
                connection.execute(_fill_in_sqlite(_SQLITE[f"delete_{view}"], keys))


def _read_sqlite_version(connection: SqliteConnection, keys: JobKeys) -> int:
    return min(
        _find_version(_list_sqlite_relations(connection, file, keys), views, keys)
        for file, views in _SQLITE_VIEWS.items()
    )


def _list_sqlite_relations(
    connection: SqliteConnection, file: str, keys: JobKeys
) -> list[_Relation]:
    rows = connection.execute(
        f"SELECT name, sql FROM {file}.sqlite_master WHERE type IN ('table', 'view')"
        " AND substr(name, 1, length(%s)) = %s",
        [keys.name, keys.name],
    )
    return [_Relation(name, _read_sqlite_mark(text or "")) for name, text in rows]


def _read_sqlite_mark(text: str) -> str:
    """Return the comment on the first line of a view."""
    return text.partition(" AS -- ")[2].partition("\n")[0]


def _join_sqlite_files(connection: SqliteConnection, keys: JobKeys) -> None:
    """Create the views that join both files, for one connection."""
    trigger = fill_in(_SQLITE["delete_node"], {"temporary": "TEMPORARY"})
    for text in (_SQLITE["joined_node"], _SQLITE["joined_leader"], trigger):
        connection.execute(_fill_in_sqlite(text, keys))


def sqlite_views_sql(keys: JobKeys) -> str:
    """Return the SQL of the main file's views."""
    names = (*_SQLITE_VIEWS["main"], *(f"delete_{view}" for view in _DELETABLE))
    return "".join(f"{_fill_in_sqlite(_SQLITE[name], keys)};\n" for name in names)


def _fill_in_sqlite(text: str, keys: JobKeys) -> str:
    values = {
        "mark": _MARK,
        "app": keys.name,
        "fleet": keys.segment,
        "trail": _TRAIL,
        "temporary": "",
    }
    return fill_in(text, values)


def _has_relation(connection: SqliteConnection, file: str, name: str) -> bool:
    query = f"SELECT 1 FROM {file}.sqlite_master WHERE name = %s"
    return connection.execute(query, [name]).fetchone() is not None
