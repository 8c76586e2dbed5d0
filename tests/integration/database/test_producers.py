"""Databases that only enqueue, read and write: they have no session, and cost nothing when idle."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import servers
from chance import FakeClock, SeededRandomness

import jobsync
from jobsync import (
    CachePlugin,
    Components,
    CoordinatorPlugin,
    Database,
    Event,
    Events,
    Invalid,
    Misconfigured,
    QueuePlugin,
    SchedulerPlugin,
    TTLPlugin,
)
from jobsync.coordination.session import SESSIONS


async def handle(_: Any) -> None:
    """Handle a message."""


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres", "s3"])
async def test_a_producer_enqueues_what_workers_handle(locate: servers.Locate, kind: str) -> None:
    """With the settings of its plugin; it has no session, and its handler is never called."""
    url = locate(kind)
    handled: list[int] = []

    async def fail(_: Any) -> None:
        pytest.fail("a producer has handled a message")

    queue = QueuePlugin(resource="tasks", on_message=fail, max_retries=6)
    async with Database(url) as worker, jobsync.producer(url, plugins=[queue]) as database:
        name = await database.resources.tasks.enqueue({"n": 1})
        found = await queue.get(name)
        assert found is not None
        assert (found.state, found.max_attempts) == ("ready", 7)
        assert await worker.store.heads(SESSIONS) == []
        own = QueuePlugin(resource="tasks", on_message=lambda task: handled.append(task.n))
        await worker.use_plugin(own)
        assert await queue.result(name, timeout=60) is None
        assert handled == [1]
        assert not queue.is_running
        assert database.unready() == []


async def test_a_producer_has_what_it_was_given(clock: FakeClock) -> None:
    """The url, the plugins, and the time and events of its components."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    told: list[Event] = []
    components.events.on("db:connected", told.append)
    queue = QueuePlugin(resource="tasks")
    database = jobsync.producer("memory://given", plugins=[queue], components=components)
    assert (database.components, database.works) == (components, False)
    assert {name: database.plugins[name] for name in database.plugins} == {queue.name: queue}
    async with database:
        notes = await database.create_resource("notes")
        assert (await notes.insert({}))["_created_at"] == round(clock.wall_seconds, 3)
    assert [event["store"] for event in told] == ["memory://given"]


async def test_an_idle_producer_does_nothing(tmp_path: Path) -> None:
    """Nothing runs in the background that could send a statement, not even after a wait."""
    queue = QueuePlugin(resource="tasks", on_message=handle)
    url = f"sqlite:///{tmp_path / 'app.db'}"
    # Those of earlier tests may still end.
    before = set(threading.enumerate())
    database = jobsync.producer(url, plugins=[queue, SchedulerPlugin()])
    async with database:
        name = await database.resources.tasks.enqueue({})
        with pytest.raises(TimeoutError):
            await queue.result(name, timeout=0)
        # The task of the test, and the one that waits for the end of the database.
        assert len(asyncio.all_tasks()) == 2
        new = set(threading.enumerate()) - before
        assert "jobsync-session" not in {thread.name for thread in new}


async def test_what_needs_a_session_is_refused() -> None:
    """With the reason and the fix."""

    class Cleaner(CoordinatorPlugin):
        async def coordinator_work(self) -> None:
            """Do nothing."""

    queue, cleaner = QueuePlugin(resource="tasks"), Cleaner()
    async with Database("memory://", plugins=[queue, cleaner], work=False) as database:
        storage = database.open_storage("locks")
        calls: list[Callable[[], Awaitable[object]]] = [
            queue.claim,
            queue.drain,
            queue.start,
            cleaner.start,
            storage.lock("a").__aenter__,
        ]
        for call in calls:
            with pytest.raises(Invalid, match=r"work=False: it has no session.*without work=False"):
                await call()
        await storage.set("a", 1)
        assert not cleaner.is_coordinator


async def test_plugins_of_a_producer_are_declared() -> None:
    """Their rules are stored, caches answer, and one that is added later is declared too."""
    cache, ttl = CachePlugin(), TTLPlugin(resources={"sessions": {"ttl": 60}})
    async with Database("memory://", plugins=[cache, ttl], work=False) as database:
        sessions = await database.create_resource("sessions", {"user": "string"})
        assert [index.rule.kind for index in sessions.definition.indexes] == ["expiry"]
        record = await sessions.insert({"user": "ann"})
        await sessions.get(record.id)
        await sessions.get(record.id)
        assert cache.stats().hits == 1
        await database.use_plugin(QueuePlugin(resource="sessions"))
        await sessions.enqueue({"user": "bob"})


def test_a_forked_child_connects_a_producer_again(tmp_path: Path) -> None:
    """The parent's connection is left alone. A database that works cannot go on in a child."""
    url = f"sqlite:///{tmp_path / 'app.db'}"

    async def enqueue(database: Database) -> None:
        await database.connect()
        await database.resources.tasks.enqueue({})

    async def run() -> list[int]:
        queue = QueuePlugin(resource="tasks")
        producer = jobsync.producer(url, plugins=[queue])
        async with producer, Database(url) as worker:
            statuses = [in_child(producer, enqueue), in_child(worker, refuse)]
            await producer.resources.tasks.enqueue({})
            assert await queue.count() == 2
        return statuses

    async def refuse(database: Database) -> None:
        with pytest.raises(Misconfigured, match="before a fork"):
            await database.connect()

    assert asyncio.run(run()) == [0, 0]


def in_child(database: Database, use: Callable[[Database], Awaitable[None]]) -> int:
    """Use a database in a forked child; return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            # A thread, because a loop runs in this one.
            thread = threading.Thread(target=lambda: asyncio.run(_use(database, use)))
            thread.start()
            thread.join()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _use(database: Database, use: Callable[[Database], Awaitable[None]]) -> None:
    await use(database)
    os._exit(0)
