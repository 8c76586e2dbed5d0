"""Files of older versions of SQLite's tables are upgraded in place, with the messages in them."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from upgraded_messages import (
    TASK_STATES,
    browse,
    check_messages_are_handled,
    check_messages_are_there,
    check_tasks_are_claimed,
)

from jobsync import Components, Misconfigured, Store, open_store
from jobsync.queue.backend import QueueBackend
from jobsync.queue.opening import open_backend
from jobsync.stores import sqlite
from jobsync.stores.sql import fill_in, load_sql
from jobsync.stores.sqlite.file import SQLITE_STEPS

OLD_VERSION = 6
"""The last version in which a claimed message was a row of `jobsync_message`."""

OLD_VERSION_TABLE = f"""
CREATE TABLE jobsync_schema (version INTEGER NOT NULL) STRICT;
INSERT INTO jobsync_schema VALUES ({OLD_VERSION});
"""
OLD_CONNECT = "UPDATE jobsync_schema SET version = version"
"""What code of that version does when it connects."""

OLD_VIEW = """
CREATE VIEW sync_message AS
SELECT queue, id, state, CASE state WHEN 'claimed' THEN session END AS incarnation,
  CASE state WHEN 'claimed' THEN claimed END AS claimed_on
FROM jobsync_message;
"""
OLD_MESSAGES = """
INSERT INTO jobsync_message (
  id, queue, state, due, boot, payload, deliveries, returned, max_attempts, timeout, suspect, claim,
  session, trail, errors, enqueued, claimed, format, wakes, task
) VALUES
  ('ready', 'q', 'ready', 0, 0, '1', 0, 0, 4, NULL, 0, '', '', '', '', 5, NULL, 1, NULL, ''),
  ('delayed', 'q', 'waiting', 9e9, 0, '2', 0, 0, 4, 7.5, 0, '', '', '', '', 9e9, NULL, 1, NULL,
   ''),
  ('suspect', 'q', 'waiting', 5, 0, '3', 2, 1, 4, NULL, 1, '', '', '', '', 5, NULL, 1, NULL, ''),
  ('retried', 'q', 'waiting', 5, 0, '4', 1, 0, 4, NULL, 0, '', '', 'x:retry',
   '{"attempt": 1, "error": "boom"}' || char(10), 5, NULL, 1, NULL, 'mail'),
  ('claimed-1', 'q', 'claimed', 9e9, 7, '{"n":"é"}', 3, 1, 9, 7.5, 0, 'c1', 'live', '',
   '{"attempt": 1, "error": "boom"}' || char(10), 5.25, 6, 1, NULL, 'mail'),
  ('claimed-2', 'q', 'claimed', 9e9, 7, '6', 1, 0, 4, NULL, 0, 'c1', 'live', '', '', 5, 6, 1,
   NULL, ''),
  ('lapsed', 'q', 'claimed', 1, 7, '7', 4, 0, 4, NULL, 1, 'c2', 'gone', '', '', 5, NULL, 1, NULL,
   ''),
  ('newer', 'q', 'claimed', 1, 7, '8', 1, 0, 4, NULL, 0, 'c3', 'gone', '', '', 5, 6, 99, NULL, ''),
  ('unreadable', 'q', 'claimed', 1, 7, CAST(x'7bff' AS TEXT), 1, 0, 4, NULL, 0, 'c4', 'gone', '',
   '', 5, 6, 1, NULL, '');
INSERT INTO jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, session, trail, errors, enqueued,
  finished, format
) VALUES
  ('completed', 'q', 'completed', NULL, 1, 0, 4, 'live', 'x:complete', '', 5, 6, 1),
  ('cancelled', 'q', 'cancelled', '9', 1, 0, 4, 'live', 'x:cancel', '', 5, 6, 1),
  ('dead', 'q', 'dead', '10', 4, 0, 4, 'live', 'x:bury', '', 5, 6, 1);
"""
TASKS_VERSION = 8
"""The last version in which a message of a task was stored in the states of all others."""

TASKS_VERSION_TABLE = f"""
CREATE TABLE jobsync_schema (version INTEGER NOT NULL, oldest_code INTEGER NOT NULL) STRICT;
INSERT INTO jobsync_schema VALUES ({TASKS_VERSION}, 7);
"""
TASK_MESSAGES = """
INSERT INTO jobsync_message (
  id, queue, state, due, payload, max_attempts, enqueued, format, task, priority, group_name
) VALUES
  ('ready', 'q', 'ready', 0, '1', 4, 5, 1, 'send', 0, NULL),
  ('ranked', 'q', 'ranked', 0, '2', 4, 5, 2, 'send', 5, NULL),
  ('waiting', 'q', 'waiting', 5, '3', 4, 5, 1, 'send', 0, NULL),
  ('head', 'q', 'ready', 0, '4', 4, 5, 2, 'send', 0, 'g'),
  ('blocked', 'q', 'blocked', 0, '5', 4, 5, 2, 'send', 0, 'g'),
  ('newer', 'q', 'ready', 0, '6', 4, 5, 99, 'send', 0, NULL),
  ('plain', 'q', 'ready', 0, '7', 4, 5, 1, '', 0, NULL),
  ('plain-ranked', 'q', 'ranked', 0, '8', 4, 5, 2, '', 5, NULL),
  ('plain-waiting', 'q', 'waiting', 5, '9', 4, 5, 1, '', 0, NULL);
INSERT INTO jobsync_group VALUES ('q', 'g', 1, 2);
"""


def create_file(path: Path, version: int, *scripts: str) -> None:
    """Create a file with the tables of an old version."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in (statement for step in SQLITE_STEPS[:version] for statement in step):
            connection.execute(statement)
        connection.executescript("".join(scripts))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the old version with messages in every state."""
    path = tmp_path / "old.db"
    create_file(path, OLD_VERSION, OLD_VERSION_TABLE, OLD_VIEW, OLD_MESSAGES)
    return path


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    """The store, which was upgraded when it was opened."""
    store = await open_store(f"sqlite:///{path}")
    yield store
    await store.close()


@pytest.fixture
def backend(store: Store) -> QueueBackend:
    """The queue with the messages."""
    return open_backend(store, "q", Components.system())


async def test_every_message_is_still_there(backend: QueueBackend) -> None:
    """In its state, with its counters, errors, times and session."""
    claimed = await check_messages_are_there(backend)
    assert (claimed.value, claimed.enqueued, claimed.claimed) == ({"n": "é"}, 5.25, 6.0)


async def test_every_message_is_handled_as_before(backend: QueueBackend) -> None:
    """Claims of dead workers end, messages are claimed and settled, and records are forgotten."""
    await check_messages_are_handled(backend, tasks=["", "mail"])


async def test_it_is_upgraded_once(path: Path) -> None:
    """By any number of processes at once; nothing is lost."""
    stores = await asyncio.gather(*(open_store(f"sqlite:///{path}") for _ in range(4)))
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT count(*), sum(open) FROM jobsync_claim").fetchall()
        assert rows == [(5, 5)]
        version = connection.execute("SELECT version FROM jobsync_schema").fetchall()
        assert version == [(len(SQLITE_STEPS),)]
    for store in stores:
        await store.close()


async def test_a_view_of_the_old_tables_can_be_replaced(path: Path, backend: QueueBackend) -> None:
    """It does not stop the upgrade, and its successor shows all messages."""
    view = load_sql(sqlite.__file__, "views.sql")["message"]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP VIEW sync_message")
        connection.execute(fill_in(view, {"app": "sync_", "mark": "jobsync"}))
        rows = connection.execute("SELECT id, state, incarnation FROM sync_message").fetchall()
    found = {name: (state, session or "") for name, state, session in rows}
    infos = await browse(backend)
    assert found == {name: (info.state, info.session) for name, info in infos.items()}


@pytest.mark.usefixtures("store")
def test_older_code_refuses_the_new_tables(path: Path) -> None:
    """When it connects, with what to do; and a worker that is connected claims nothing."""
    with closing(sqlite3.connect(path)) as old:
        with pytest.raises(sqlite3.IntegrityError, match="upgrade jobsync in this process"):
            old.execute(OLD_CONNECT)
        with pytest.raises(sqlite3.OperationalError, match="no such column: claim"):
            old.execute("UPDATE jobsync_message SET state = 'claimed', claim = 'x'")


@pytest.mark.usefixtures("store")
async def test_this_code_refuses_tables_that_it_cannot_use(path: Path) -> None:
    """Newer code says which version it takes; the error names both versions and the fix."""
    with closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("UPDATE jobsync_schema SET version = 99, oldest_code = 98")
    with pytest.raises(Misconfigured, match=r"tables of version 99, .*Upgrade jobsync"):
        await open_store(f"sqlite:///{path}")


async def test_messages_of_tasks_get_their_own_states(tmp_path: Path) -> None:
    """From each state that older code stored them in; then they are claimed, by their tasks."""
    path = tmp_path / "tasks.db"
    create_file(path, TASKS_VERSION, TASKS_VERSION_TABLE, TASK_MESSAGES)
    store = await open_store(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT id, state, format FROM jobsync_message").fetchall()
    assert {name: (state, format_) for name, state, format_ in rows} == TASK_STATES
    await check_tasks_are_claimed(store)
    await store.close()
