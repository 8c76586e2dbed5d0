"""A TTL plugin without resources says how long queues remember completed messages."""

import sqlite3
from contextlib import closing
from typing import Any

import psycopg
import pytest
from servers import Locate
from waiting import until

from jobsync import Database, QueuePlugin, TTLPlugin
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.queue.settings import LONGEST_RETENTION

WEEK = 604_800.0
ADD_FINISHED = """
INSERT INTO jobsync_finished (
  id, queue, state, deliveries, returned, max_attempts, session, trail, errors, enqueued, finished,
  format
) VALUES ('{name}', 'default/tasks', '{state}', 1, 0, 4, '', '', '', {then}, {then}, 1)
"""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store on each database."""
    return locate(request.param)


def add_finished(url: str, name: str, state: str, age: float) -> None:
    """Add a message that was finished so long ago."""
    found = parse_url(url)
    if isinstance(found, PostgresUrl):
        then = f"clock_timestamp() - {age} * interval '1 second'"
        statement = ADD_FINISHED.format(name=name, state=state, then=then)
        with psycopg.connect(url.partition("?")[0]) as connection:
            connection.execute(f"SET search_path = {found.schema}".encode())
            connection.execute(statement.encode())
    else:
        then = f"unixepoch() - {age}"
        statement = ADD_FINISHED.format(name=name, state=state, then=then)
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            file.execute(statement)


async def prepare(url: str) -> None:
    """Store messages of different ages."""
    async with Database(url) as database:
        await database.use_plugin(QueuePlugin(resource="tasks", completed_ttl=10 * WEEK))
    for name, state, age in (
        ("new", "completed", 400),
        ("old", "completed", WEEK + 60),
        ("dead", "dead", 2 * WEEK),
        ("cancelled", "cancelled", 2 * WEEK),
    ):
        add_finished(url, name, state, age)


async def list_finished(queue: QueuePlugin) -> list[str]:
    """Return all finished messages."""
    states: Any = ("completed", "dead", "cancelled")
    return [message.id for state in states for message in await queue.browse(state)]


async def wait_for_removal(queue: QueuePlugin, name: str) -> list[str]:
    """Wait until a message is gone; return the others."""

    async def is_removed() -> bool:
        return name not in await list_finished(queue)

    await until(is_removed, f"{name} is gone")
    return await list_finished(queue)


@pytest.mark.parametrize("is_connected", [False, True], ids=["before", "connected"])
@pytest.mark.parametrize("is_ttl_first", [False, True], ids=["queue-first", "ttl-first"])
async def test_the_default_ttl_replaces_the_queues_default(
    url: str, *, is_ttl_first: bool, is_connected: bool
) -> None:
    """In either order, before or after the connection. Dead letters are never touched."""
    await prepare(url)
    queue, ttl = QueuePlugin(resource="tasks"), TTLPlugin(default_ttl=WEEK)
    database = Database(url)
    if is_connected:
        await database.connect()
    for plugin in (ttl, queue) if is_ttl_first else (queue, ttl):
        await database.use_plugin(plugin)
    await database.connect()
    assert queue.completed_ttl == WEEK
    assert await wait_for_removal(queue, "old") == ["new", "dead", "cancelled"]
    await database.disconnect()


@pytest.mark.parametrize("source", ["code", "environment"])
async def test_a_time_that_was_given_to_the_queue_wins(
    url: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the default's, and wherever it was given."""
    await prepare(url)
    options: dict[str, Any] = {}
    if source == "code":
        options["completed_ttl"] = 300
    else:
        monkeypatch.setenv("JOBSYNC_QUEUE_COMPLETED_TTL", "300")
    queue = QueuePlugin(resource="tasks", **options)
    async with Database(url, plugins=[TTLPlugin(default_ttl=WEEK), queue]):
        assert queue.completed_ttl == 300
        assert await wait_for_removal(queue, "new") == ["dead", "cancelled"]


async def test_a_plugin_with_resources_leaves_messages_alone(url: str) -> None:
    """Its `default_ttl` is for records."""
    await prepare(url)
    queue = QueuePlugin(resource="tasks")
    ttl = TTLPlugin(resources=["sessions"], default_ttl=WEEK)
    async with Database(url, plugins=[ttl, queue]):
        assert queue.completed_ttl == 300
        assert await wait_for_removal(queue, "new") == ["dead", "cancelled"]


async def test_only_dead_ttl_removes_dead_letters(url: str) -> None:
    """With a TTL plugin as without one."""
    await prepare(url)
    queue = QueuePlugin(resource="tasks", dead_ttl=WEEK)
    async with Database(url, plugins=[TTLPlugin(default_ttl=2 * WEEK), queue]):
        assert await wait_for_removal(queue, "cancelled") == ["old", "new"]


async def test_a_plugin_without_resources_neither_sweeps_nor_leads(url: str) -> None:
    """It costs nothing."""
    ttl = TTLPlugin(default_ttl=WEEK)
    async with Database(url, plugins=[ttl]) as database:
        assert ttl.is_running
        assert not ttl.is_coordinator
        assert await database.store.heads("session/") == []
        assert await database.list_resources() == []
        assert (await ttl.run_cleanup()).deleted == 0
    assert ttl.completed_message_ttl == WEEK


def test_a_time_in_milliseconds_is_bounded() -> None:
    """Thirty days in milliseconds are 82 years; a queue remembers for 27 at most."""
    queue = QueuePlugin(resource="tasks")
    Database("memory://", plugins=[queue, TTLPlugin(default_ttl=30 * 86_400_000)])
    assert queue.completed_ttl == LONGEST_RETENTION
