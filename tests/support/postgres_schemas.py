"""Schemas of a PostgreSQL server that tests use one after the other.

To create the tables takes longer than most tests. A schema is used again if nobody is connected to
the server any more, and if its tables are as jobsync makes them.
"""

import os
from typing import Any

import psycopg
from psycopg import sql

from jobsync.stores.postgres import schema as tables

__all__ = ["connect", "give_back", "take"]

_FINGERPRINT = """
SELECT md5(string_agg(concat_ws(',', relname, relkind, relacl, relhastriggers, relrowsecurity,
  reloptions, (
    SELECT string_agg(concat_ws(':', attname, atttypid, attnotnull, atthasdef, attacl), ';'
      ORDER BY attnum)
    FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
  )), '|' ORDER BY relname)),
  (SELECT count(*) FROM pg_proc AS p WHERE p.pronamespace = c.relnamespace),
  (SELECT nspacl::text FROM pg_namespace AS n WHERE n.oid = c.relnamespace)
FROM pg_class AS c WHERE relnamespace = to_regnamespace(%s) GROUP BY relnamespace
"""
_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = to_regnamespace(%s) AND relkind = 'r' AND relname <> 'jobsync_schema'
"""
_OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
_spare: dict[tuple[str, bool], list[str]] = {}
"""By server, and whether their names need no quotes."""
_untouched: dict[str, object] = {}
_connections: dict[str, psycopg.Connection[Any]] = {}


def connect(url: str) -> psycopg.Connection[Any]:
    """Return the connection to a server that this process has until it gives its schema back."""
    connection = _connections.get(url)
    if connection is None or connection.closed:
        connection = _connections[url] = psycopg.connect(url, autocommit=True)
    return connection


def take(url: str, name: str) -> str:
    """Return a schema without records that was given back, else this name of a new one.

    With a name that must be quoted, its name must be quoted too.
    """
    spare = _spare.get((url, name.isidentifier()))
    return spare.pop() if spare else name


def give_back(url: str, name: str) -> None:
    """Delete what is in a schema; leave it as it is while others are connected to the server."""
    # A test may have restarted the server.
    _close(url)
    try:
        _clear(connect(url), url, name)
    finally:
        _close(url)


def _close(url: str) -> None:
    if connection := _connections.pop(url, None):
        connection.close()


def _clear(connection: psycopg.Connection[Any], url: str, name: str) -> None:
    (others,) = connection.execute(_OTHERS).fetchone() or (0,)
    if others:
        return
    if _read_fingerprint(url, name) != _find_untouched(url):
        statement = sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE")
        connection.execute(statement.format(sql.Identifier(name)))
        return
    for (table,) in connection.execute(_TABLES, [f'"{name}"']).fetchall():
        connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(name, table)))
    _spare.setdefault((url, name.isidentifier()), []).append(name)


def _find_untouched(url: str) -> object:
    """Return the fingerprint of tables as jobsync makes them."""
    if url not in _untouched:
        name = f"untouched {os.getpid()}"
        statements = [tables._SQL["create_schema"], *tables._statements_from(0)]
        connect(url).execute(tables._in_schema(name, ";\n".join(statements)))
        _untouched[url] = _read_fingerprint(url, name)
    return _untouched[url]


def _read_fingerprint(url: str, name: str) -> object:
    return connect(url).execute(_FINGERPRINT, [f'"{name}"']).fetchone()
