"""Jobsync's tables in one PostgreSQL schema: looked for, made, or printed for others to make.

Whoever connects first makes them, under a lock, so that any number may come at once. Who
finds them there needs no right to make any. A newer version has only added to what this
one knows, and is left alone.
"""

from contextlib import suppress

import psycopg
from psycopg import errors, sql

from jobsync.core.urls import PostgresUrl
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.postgres.connection import PostgresConnection
from jobsync.stores.postgres.errors import SCHEMA_FIX
from jobsync.stores.postgres.queries import quote_name
from jobsync.stores.tables import POSTGRES_STEPS

__all__ = ["find_schema", "schema_sql", "upgrade"]

_LOCK = 0x6A6F6273796E63
"""The advisory lock of all upgrades, "jobsync" in ASCII."""

_ROLE = "jobsync_writer"
_OLDEST_SERVER = 130_000
_UPGRADES = 5

_FACTS = """
SELECT current_schema(), current_setting('server_encoding'),
  current_setting('server_version_num')::integer, pg_is_in_recovery()
"""
_VERSION = "SELECT version FROM {schema}.jobsync_schema"
_HAS_SCHEMA = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
_MAKE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {schema}"
_MAKE_VERSION = (
    "CREATE TABLE IF NOT EXISTS {schema}.jobsync_schema (version integer NOT NULL)",
    """
INSERT INTO {schema}.jobsync_schema
SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM {schema}.jobsync_schema)
""",
)
_RAISE_VERSION = "UPDATE {schema}.jobsync_schema SET version = greatest(version, {version})"
_GRANTS = """
DO $$ BEGIN CREATE ROLE {role} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT ON {schema}.jobsync_schema TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.jobsync_record, {schema}.jobsync_entry,
  {schema}.jobsync_message, {schema}.jobsync_finished, {schema}.jobsync_pause TO {role};
"""


async def find_schema(connection: PostgresConnection, url: PostgresUrl) -> str:
    """Give the name of the schema to use, after a look at the server.

    Raises:
        Misconfigured: this server or database cannot serve as a store.
        Unavailable: it takes no writes now.
    """
    cursor = await connection.execute(_FACTS)
    ((schema, encoding, version, standby),) = await cursor.fetchall()
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
    if standby:
        raise Unavailable(name, "the server is a standby", "point the url to the primary")
    if not (url.schema or schema):
        raise Misconfigured("url", name, "has no default schema", "name one: ?schema=jobsync")
    return url.schema or str(schema)


async def upgrade(connection: PostgresConnection, url: PostgresUrl, schema: str) -> None:
    """Bring the tables up to date, if they are not.

    Raises:
        Misconfigured: they are not there, and we may not make them.
    """
    if await _version(connection, url, schema) >= len(POSTGRES_STEPS):
        return
    for _ in range(_UPGRADES):
        # Our own kind waits at the lock; these are for strangers who make the same names.
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


async def _version(connection: PostgresConnection, url: PostgresUrl, schema: str) -> int:
    try:
        cursor = await connection.execute(_within(schema, _VERSION))
        row = await cursor.fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        return 0
    except errors.InsufficientPrivilege as error:
        raise _not_permitted(url, error) from error
    return 0 if row is None else int(row[0])


async def _upgrade(connection: PostgresConnection, url: PostgresUrl, schema: str) -> None:
    try:
        async with connection.transaction():
            # Or what others did while we waited at the lock would stay out of sight.
            await connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            # Not left to IF NOT EXISTS, which wants the right to create all the same.
            cursor = await connection.execute(_HAS_SCHEMA, [schema])
            if await cursor.fetchone() is None:
                await connection.execute(_within(schema, _MAKE_SCHEMA))
            # In one request: a database may be far away.
            missing = await _missing(connection, url, schema)
            if missing:
                await connection.execute(_within(schema, ";\n".join(missing)))
    except errors.InsufficientPrivilege as error:
        raise _not_permitted(url, error) from error


async def _missing(connection: PostgresConnection, url: PostgresUrl, schema: str) -> list[str]:
    """Give what an upgrade has to do, now that nobody else does it."""
    cursor = await connection.execute(
        "SELECT to_regclass(%s)", [f"{quote_name(schema)}.jobsync_schema"]
    )
    row = await cursor.fetchone()
    there = row is not None and row[0] is not None
    return _steps(await _version(connection, url, schema) if there else 0)


def _steps(version: int) -> list[str]:
    later = [statement for step in POSTGRES_STEPS[version:] for statement in step]
    raised = _RAISE_VERSION.replace("{version}", str(len(POSTGRES_STEPS)))
    return [*_MAKE_VERSION, *later, raised] if later else []


def schema_sql(url: PostgresUrl) -> str:
    """Give the SQL for an administrator: the tables, and a role that may use no more than them.

    Safe to run again. Without `?schema=` it is for `public`.
    """
    schema = url.schema or "public"
    statements = [_MAKE_SCHEMA, *_steps(0)]
    grants = _GRANTS
    if url.user:
        grants += f"GRANT {{role}} TO {quote_name(url.user)};\n"
    text = "".join(f"{statement.strip()};\n" for statement in statements)
    script = f"BEGIN;\n{text}{grants.strip()}\nCOMMIT;\n"
    return script.replace("{role}", _ROLE).replace("{schema}", quote_name(schema))


def _within(schema: str, statement: str) -> sql.SQL:
    # Built from this library's own constants and a quoted name.
    return sql.SQL(statement.replace("{schema}", quote_name(schema)))


def _not_permitted(url: PostgresUrl, error: psycopg.Error) -> Misconfigured:
    problem = (
        f"has no tables of jobsync, and its role may not make them ({error.diag.message_primary})"
    )
    return Misconfigured("url", str(url), problem, SCHEMA_FIX)
