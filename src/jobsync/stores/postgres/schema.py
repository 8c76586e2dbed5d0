"""Creates and upgrades jobsync's tables in one PostgreSQL schema.

The first process to connect creates them, under a lock, so that any number may connect at
once. A process that finds them needs no right to create tables. A newer version has only added
tables and columns, and is left alone, unless it says that this code cannot use it. `schema_sql`
prints the SQL for an administrator.
"""

from contextlib import suppress

import psycopg
from psycopg import errors, sql

from jobsync.core.urls import PostgresUrl
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.postgres.connection import SCHEMA_FIX, PostgresConnection, connect_user
from jobsync.stores.sql import fill_in, load_schema_steps, load_sql, quote_name

__all__ = [
    "DEFAULT_SCHEMA",
    "POSTGRES_STEPS",
    "find_fix",
    "find_schema",
    "read_tables_version",
    "schema_sql",
    "upgrade",
]

DEFAULT_SCHEMA = "public"
"""That of `schema_sql`, if the URL names none; the user of the URL may have another default."""

POSTGRES_STEPS = load_schema_steps(__file__, "schema.sql")
"""Step n brings a schema from version n to n + 1. Safe to repeat."""

_SQL = load_sql(__file__, "schema.sql")

_LOCK = 0x6A6F6273796E63
"""The key of the advisory lock for upgrades: "jobsync" in ASCII."""

_ROLE = "jobsync_writer"
_OLDEST_SERVER = 130_000
_ATTEMPTS = 5


async def find_schema(connection: PostgresConnection, url: PostgresUrl) -> str:
    """Check the server; return the name of the schema to use.

    Raises:
        Misconfigured: this server or database cannot be used as a store.
        Unavailable: it is read-only now.
    """
    cursor = await connection.execute(_SQL["read_server_facts"].encode())
    ((schema, encoding, version, is_standby),) = await cursor.fetchall()
    name = str(url)
    if version < _OLDEST_SERVER:
        oldest = _OLDEST_SERVER // 10_000
        raise Misconfigured(
            "url", name, f"is PostgreSQL {version // 10_000}", f"use {oldest} or later"
        )
    if encoding != "UTF8":
        raise Misconfigured(
            "url", name, f"is a database in {encoding}", "create one with ENCODING 'UTF8'"
        )
    if is_standby:
        raise Unavailable(name, "the server is a standby", "point the url to the primary")
    return _choose_schema(url, schema)


def _choose_schema(url: PostgresUrl, default: str | None) -> str:
    """Return the schema that the URL names, or else the connection's default."""
    if not (url.schema or default):
        raise Misconfigured("url", str(url), "has no default schema", "add one: ?schema=jobsync")
    return url.schema or str(default)


async def upgrade(connection: PostgresConnection, url: PostgresUrl, schema: str) -> None:
    """Bring the tables up to date, if they are not.

    Raises:
        Misconfigured: they do not exist, and this role may not create them; or they are of newer
            code, and this code cannot use them.
    """
    if await _read_version(connection, url, schema) >= len(POSTGRES_STEPS):
        return
    for _ in range(_ATTEMPTS):
        # Other jobsync processes wait at the lock; these are for others who create such names.
        with suppress(
            errors.UniqueViolation,
            errors.DuplicateSchema,
            errors.DuplicateTable,
            errors.SerializationFailure,
            errors.DeadlockDetected,
        ):
            await _upgrade(connection, url, schema)
            return
    raise Unavailable(str(url), "others change the schema at the same time")


async def _read_version(connection: PostgresConnection, url: PostgresUrl, schema: str) -> int:
    try:
        cursor = await connection.execute(_in_schema(schema, _SQL["read_version"]))
        row = await cursor.fetchone()
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName):
        return 0
    except errors.InsufficientPrivilege as error:
        raise _not_permitted(url, schema, error) from error
    if row is None:
        return 0
    version, oldest_code = row
    if oldest_code > len(POSTGRES_STEPS):
        problem = f"has tables of version {version}, and this code knows {len(POSTGRES_STEPS)}"
        raise Misconfigured("url", str(url), problem, "upgrade jobsync in this process")
    return int(version)


def read_tables_version(url: PostgresUrl) -> tuple[str, int]:
    """Return the schema in which workers look for tables, and their version; 0 if it has none.

    Raises:
        Misconfigured: the server refuses the connection, or the role may not read the tables.
        Unavailable: it cannot be reached.
    """
    with connect_user(url, "UTC") as connection:
        ((default,),) = connection.execute("SELECT current_schema()").fetchall()
        schema = _choose_schema(url, default)
        try:
            row = connection.execute(_in_schema(schema, _SQL["read_version"])).fetchone()
        except (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName):
            return schema, 0
        except errors.InsufficientPrivilege as error:
            raise _not_permitted(url, schema, error) from error
    return schema, 0 if row is None else int(row[0])


async def _upgrade(connection: PostgresConnection, url: PostgresUrl, schema: str) -> None:
    try:
        async with connection.transaction():
            # Else the changes of others, made while this waited at the lock, would be invisible.
            await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            # IF NOT EXISTS alone would need the right to create even if the schema exists.
            cursor = await connection.execute(_SQL["find_schema"].encode(), [schema])
            if await cursor.fetchone() is None:
                await connection.execute(_in_schema(schema, _SQL["create_schema"]))
            # In one request: a database may be far away.
            missing = await _find_missing(connection, url, schema)
            if missing:
                await connection.execute(_in_schema(schema, ";\n".join(missing)))
    except errors.InsufficientPrivilege as error:
        raise _not_permitted(url, schema, error) from error


async def _find_missing(connection: PostgresConnection, url: PostgresUrl, schema: str) -> list[str]:
    """Return the statements of the upgrade, now that the lock is held."""
    table = f"{quote_name(schema)}.jobsync_schema"
    cursor = await connection.execute(_SQL["has_version"].encode(), [table])
    exists = await cursor.fetchone() is not None
    return _statements_from(await _read_version(connection, url, schema) if exists else 0)


def _statements_from(version: int) -> list[str]:
    steps = [statement for step in POSTGRES_STEPS[version:] for statement in step]
    if not steps:
        return []
    raise_version = fill_in(_SQL["raise_version"], {"version": str(len(POSTGRES_STEPS))})
    names = ("create_version_table", "upgrade_version_table", "insert_version")
    return [*(_SQL[name] for name in names), *steps, raise_version]


def schema_sql(url: PostgresUrl) -> str:
    """Return the SQL for an administrator: the tables, and a role that may use only them.

    Safe to run again.
    """
    schema = url.schema or DEFAULT_SCHEMA
    statements = [_SQL["create_schema"], *_statements_from(0), _SQL["create_role"]]
    if url.user:
        statements.append(f"GRANT {{role}} TO {quote_name(url.user)}")
    script = "".join(f"{statement};\n" for statement in ("BEGIN", *statements, "COMMIT"))
    return fill_in(script, {"role": _ROLE, "schema": quote_name(schema)})


def _in_schema(schema: str, statement: str) -> sql.SQL:
    # Built from this library's own constants and a quoted name.
    return sql.SQL(fill_in(statement, {"schema": quote_name(schema)}))


def find_fix(url: PostgresUrl, schema: str) -> str:
    """Return what creates the tables in the schema where they are missing."""
    if schema in (url.schema, DEFAULT_SCHEMA):
        return SCHEMA_FIX
    return SCHEMA_FIX.replace("URL`", f"URL` with ?schema={schema} in the URL")


def _not_permitted(url: PostgresUrl, schema: str, error: psycopg.Error) -> Misconfigured:
    problem = (
        f"has no tables of jobsync, and its role may not create them ({error.diag.message_primary})"
    )
    return Misconfigured("url", str(url), problem, find_fix(url, schema))
