"""Tables of older versions on PostgreSQL are upgraded in place, with the messages in them."""

import asyncio
import itertools
from typing import Any

import psycopg
import pytest
from servers import PostgresServer
from upgraded_messages import (
    TASK_STATES,
    browse,
    check_messages_are_handled,
    check_messages_are_there,
    check_tasks_are_claimed,
)

from jobsync import Components, Misconfigured, Store, open_store
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.queue.backend import QueueBackend
from jobsync.queue.opening import open_backend
from jobsync.stores import postgres
from jobsync.stores.postgres.schema import POSTGRES_STEPS, schema_sql
from jobsync.stores.sql import fill_in, load_sql

OLD_VERSION = 4
"""The last version in which a claimed message was a row of `jobsync_message`."""

OLD_VERSION_TABLE = f"""
CREATE TABLE jobsync_schema (version integer NOT NULL);
INSERT INTO jobsync_schema VALUES ({OLD_VERSION})
"""
OLD_VIEW = """
CREATE VIEW sync_message AS
SELECT queue, id, state, deliveries - returned AS attempts, max_attempts,
  CASE WHEN state = 'claimed' THEN session END AS incarnation, enqueued AS enqueued_on,
  CASE WHEN state = 'waiting' THEN due END AS due_on,
  CASE WHEN state = 'claimed' THEN claimed END AS claimed_on,
  NULL::timestamptz AS finished_on, errors, payload
FROM jobsync_message
UNION ALL
SELECT queue, id, state, deliveries - returned, max_attempts, session, enqueued, NULL, NULL,
  finished, errors, payload
FROM jobsync_finished
"""
OLD_MESSAGES = """
INSERT INTO jobsync_message (
  id, queue, state, due, payload, deliveries, returned, max_attempts, timeout, suspect, claim,
  session, trail, errors, claimed, format
) VALUES
  ('ready', 'q', 'ready', now(), '1', 0, 0, 4, NULL, false, '', '', '', '', NULL, 1),
  ('delayed', 'q', 'waiting', now() + interval '1 hour', '2', 0, 0, 4, 7.5, false, '', '', '',
   '', NULL, 1),
  ('suspect', 'q', 'waiting', now(), '3', 2, 1, 4, NULL, true, '', '', '', '', NULL, 1),
  ('retried', 'q', 'waiting', now(), '4', 1, 0, 4, NULL, false, '', '', 'x:retry',
   '{"attempt": 1, "error": "boom"}' || E'\\n', NULL, 1),
  ('claimed-1', 'q', 'claimed', now() + interval '1 hour', '5', 3, 1, 9, 7.5, false, 'c1', 'live',
   '', '{"attempt": 1, "error": "boom"}' || E'\\n', now(), 1),
  ('claimed-2', 'q', 'claimed', now() + interval '1 hour', '6', 1, 0, 4, NULL, false, 'c1',
   'live', '', '', now(), 1),
  ('lapsed', 'q', 'claimed', now(), '7', 4, 0, 4, NULL, true, 'c2', 'gone', '', '', NULL, 1),
  ('newer', 'q', 'claimed', now(), '8', 1, 0, 4, NULL, false, 'c3', 'gone', '', '', now(), 99),
  ('unreadable', 'q', 'claimed', now(), '{', 1, 0, 4, NULL, false, 'c4', 'gone', '', '', now(), 1);
INSERT INTO jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, session, trail, errors, enqueued,
  finished, format
) VALUES
  ('completed', 'q', 'completed', NULL, 1, 0, 4, 'live', 'x:complete', '', now(), now(), 1),
  ('cancelled', 'q', 'cancelled', '9', 1, 0, 4, 'live', 'x:cancel', '', now(), now(), 1),
  ('dead', 'q', 'dead', '10', 4, 0, 4, 'live', 'x:bury', '', now(), now(), 1)
"""
TASKS_VERSION = 7
"""The last version in which a message of a task was stored in the states of all others."""

TASKS_VERSION_TABLE = f"""
CREATE TABLE jobsync_schema (tables_version integer NOT NULL, oldest_code integer NOT NULL);
INSERT INTO jobsync_schema VALUES ({TASKS_VERSION}, 5)
"""
TASK_MESSAGES = """
INSERT INTO jobsync_message (
  id, queue, state, due, payload, max_attempts, format, task, priority, group_name
) VALUES
  ('ready', 'q', 'ready', now(), '1', 4, 1, 'send', 0, NULL),
  ('ranked', 'q', 'ranked', now(), '2', 4, 2, 'send', 5, NULL),
  ('waiting', 'q', 'waiting', now(), '3', 4, 1, 'send', 0, NULL),
  ('head', 'q', 'ready', now(), '4', 4, 2, 'send', 0, 'g'),
  ('blocked', 'q', 'blocked', now(), '5', 4, 2, 'send', 0, 'g'),
  ('newer', 'q', 'ready', now(), '6', 4, 99, 'send', 0, NULL),
  ('plain', 'q', 'ready', now(), '7', 4, 1, '', 0, NULL),
  ('plain-ranked', 'q', 'ranked', now(), '8', 4, 2, '', 5, NULL),
  ('plain-waiting', 'q', 'waiting', now(), '9', 4, 1, '', 0, NULL);
INSERT INTO jobsync_group VALUES ('q', 'g', 1, 2)
"""
_numbers = itertools.count()


def create_database(server: PostgresServer, version: int, *statements: str) -> str:
    """Create a database with the tables of an old version; return its URL."""
    url = server.create_database(f"upgrade_{next(_numbers)}")
    steps = [statement for step in POSTGRES_STEPS[:version] for statement in step]
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(fill_in(";".join(steps), {"schema": "public"}).encode())
        for statement in statements:
            admin.execute(statement.encode())
    return url


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A database of the old version with messages in every state."""
    return create_database(postgres, OLD_VERSION, OLD_VERSION_TABLE, OLD_VIEW, OLD_MESSAGES)


@pytest.fixture
async def store(url: str) -> Any:
    """The store, which was upgraded when it was opened."""
    store = await open_store(url)
    yield store
    await store.close()


@pytest.fixture
def backend(store: Store) -> QueueBackend:
    """The queue of the messages."""
    return open_backend(store, "q", Components.system())


async def test_every_message_is_still_there(backend: QueueBackend) -> None:
    """In its state, with its counters, errors, times and session."""
    claimed = await check_messages_are_there(backend)
    assert (claimed.value, claimed.claimed is not None) == (5, True)


async def test_every_message_is_handled_as_before(backend: QueueBackend) -> None:
    """Claims of dead workers end, messages are claimed and settled, and records are forgotten."""
    await check_messages_are_handled(backend, tasks=[""])


async def test_it_is_upgraded_once(url: str, store: Store) -> None:
    """By any number of processes, and by an administrator, who may repeat it; nothing is lost."""
    target = parse_url(url)
    assert isinstance(target, PostgresUrl)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(schema_sql(target).encode())
        others = await asyncio.gather(*(open_store(url) for _ in range(4)))
        row = admin.execute("SELECT count(*), sum(open) FROM jobsync_claim").fetchone()
        assert row == (5, 5)
        version = admin.execute("SELECT tables_version FROM jobsync_schema").fetchall()
        assert version == [(len(POSTGRES_STEPS),)]
    for other in others:
        await other.close()


async def test_a_view_of_the_old_tables_can_be_replaced(url: str, backend: QueueBackend) -> None:
    """It does not stop the upgrade, it keeps its grants, and its successor shows all messages."""
    views = load_sql(postgres.__file__, "views.sql")
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("GRANT SELECT ON sync_message TO PUBLIC")
        admin.execute(fill_in(views["message"], {"schema": "public", "app": "sync_"}).encode())
        rows = admin.execute("SELECT id, state, incarnation FROM sync_message").fetchall()
        found = {name: (state, session or "") for name, state, session in rows}
        grants = "SELECT has_table_privilege('public', 'sync_message', 'SELECT')"
        assert admin.execute(grants).fetchone() == (True,)
    infos = await browse(backend)
    assert found == {name: (info.state, info.session) for name, info in infos.items()}


async def test_older_code_refuses_the_new_tables(url: str, store: Store) -> None:
    """When it connects; and a worker of older code that is connected claims nothing."""
    with psycopg.connect(url, autocommit=True) as old:
        with pytest.raises(psycopg.errors.UndefinedColumn):
            old.execute("SELECT version FROM jobsync_schema")
        with pytest.raises(psycopg.errors.UndefinedColumn):
            old.execute("UPDATE jobsync_message SET state = 'claimed', claim = 'x'")


async def test_this_code_refuses_tables_that_it_cannot_use(url: str, store: Store) -> None:
    """Newer code says which version it takes; the error names both versions and the fix."""
    with psycopg.connect(url, autocommit=True) as newer:
        newer.execute("UPDATE jobsync_schema SET tables_version = 99, oldest_code = 98")
    with pytest.raises(Misconfigured, match=r"tables of version 99, .*Upgrade jobsync"):
        await open_store(url)


async def test_an_older_script_changes_no_newer_tables(url: str, store: Store) -> None:
    """An administrator may apply it again, late: what newer code has said stays in force."""
    target = parse_url(url)
    assert isinstance(target, PostgresUrl)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("UPDATE jobsync_schema SET tables_version = 99, oldest_code = 98")
        admin.execute(schema_sql(target).encode())
        rows = admin.execute("SELECT tables_version, oldest_code FROM jobsync_schema").fetchall()
    assert rows == [(99, 98)]


async def test_messages_of_tasks_get_their_own_states(postgres: PostgresServer) -> None:
    """From each state that older code stored them in; then they are claimed, by their tasks."""
    url = create_database(postgres, TASKS_VERSION, TASKS_VERSION_TABLE, TASK_MESSAGES)
    store = await open_store(url)
    with psycopg.connect(url, autocommit=True) as admin:
        rows = admin.execute("SELECT id, state, format FROM jobsync_message").fetchall()
    assert {name: (state, format_) for name, state, format_ in rows} == TASK_STATES
    await check_tasks_are_claimed(store)
    await store.close()
