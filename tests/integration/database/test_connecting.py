"""Databases are located, connected, used and disconnected."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from jobsync import (
    CachePlugin,
    Components,
    CoordinatorPlugin,
    Database,
    Delete,
    Event,
    Invalid,
    Misconfigured,
    Plugin,
    Put,
    QueuePlugin,
    SchedulerPlugin,
    TTLPlugin,
    Unavailable,
)
from jobsync.database.connection import DatabaseConnected, DatabaseDisconnected
from jobsync.database.plugin import PluginStarted, PluginStopped
from jobsync.database.supervisor import DatabaseFailed
from jobsync.stores.memory import MemoryStore


@pytest.fixture
def emitted() -> list[Event]:
    """The events of the database."""
    return []


@pytest.fixture
def components(emitted: list[Event]) -> Components:
    """The machine's components; their database events are collected."""
    components = Components.system()
    components.events.on("db:*", emitted.append)
    return components


async def test_without_a_url_it_is_a_file_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default needs no server, and survives a restart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    async with Database() as database:
        await (await database.create_resource("a")).insert({"id": "x"})
    assert (tmp_path / "jobsync.db").exists()
    async with Database() as database:
        assert await database.resources.a.exists("x")


async def test_the_environment_can_name_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`JOBSYNC_URL` is used if the code names no store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOBSYNC_URL", "sqlite:///named.db")
    async with Database():
        assert (tmp_path / "named.db").exists()
    monkeypatch.setenv("JOBSYNC_URL", "nonsense://x")
    with pytest.raises(Misconfigured, match="JOBSYNC_URL"):
        await Database().connect()


@pytest.mark.parametrize("argument", ["url", "connection_string", "connection"])
async def test_the_url_has_three_argument_names(argument: str) -> None:
    """The specification uses all of them."""
    arguments: dict[str, Any] = {argument: "memory://three"}
    async with Database(**arguments) as database:
        assert repr(database) == "Database('memory://three')"


async def test_only_one_store_can_be_named() -> None:
    """Two arguments for the store are refused."""
    with pytest.raises(Invalid, match="Pass one of url"):
        Database("memory://", connection="memory://")


def test_no_secret_is_shown() -> None:
    """Printing a database shows its URL without credentials."""
    shown = repr(Database("s3://KEY:SECRET@bucket/prefix"))
    assert "bucket" in shown
    assert "SECRET" not in shown


async def test_calls_on_a_disconnected_database_are_refused() -> None:
    """The error names the fix; after a disconnect too."""
    database = Database("memory://")
    with pytest.raises(Invalid, match=r"is not connected.*wait database\.connect\(\) first"):
        await database.create_resource("a")
    await database.connect()
    resource = await database.create_resource("a")
    await database.disconnect()
    for call in (resource.insert({}), resource.list(), database.list_resources()):
        with pytest.raises(Invalid, match="is not connected"):
            await call
    with pytest.raises(Invalid, match="is not connected"):
        database.resource("a")
    with pytest.raises(Invalid, match=r"not known before the database is connected.*async with db"):
        database.resources["a"]
    with pytest.raises(AttributeError, match=r"'a' is not known before .*: use it within `async w"):
        _ = database.resources.a


async def test_connecting_and_disconnecting_may_be_repeated(
    components: Components, emitted: list[Event]
) -> None:
    """Each takes effect once for concurrent callers; a database can be connected again."""
    database = Database("memory://again", components=components)
    keeper = MemoryStore("again")
    for _ in range(2):
        await asyncio.gather(*(database.connect() for _ in range(3)))
        assert database.is_connected
        await asyncio.gather(*(database.disconnect() for _ in range(3)))
        assert not database.is_connected
    assert [event.name for event in emitted] == ["db:connected", "db:disconnected"] * 2
    await keeper.close()


async def test_a_store_that_was_passed_in_stays_open() -> None:
    """The caller opened it and closes it."""

    class ObservedStore(MemoryStore):
        closed = False

        async def close(self) -> None:
            self.closed = True

    store = ObservedStore()
    async with Database(connection=store):
        pass
    assert store.closed is False


async def test_a_connect_that_fails_leaves_nothing_behind(
    components: Components, emitted: list[Event]
) -> None:
    """It can be retried, and no disconnect is reported without a connect."""

    class SilentStore(MemoryStore):
        answers = False

        async def scan(self, *arguments: Any, **options: Any) -> Any:
            if not self.answers:
                raise Unavailable(self.name, "not now")
            return await super().scan(*arguments, **options)

    store = SilentStore()
    database = Database(connection=store, components=components)
    before = asyncio.all_tasks()
    with pytest.raises(Unavailable):
        await database.connect()
    assert asyncio.all_tasks() == before
    assert emitted == []
    store.answers = True
    async with database:
        assert await database.list_resources() == []


@pytest.mark.parametrize("failing", ["the store", "a plugin"])
async def test_after_a_connect_that_fails_any_loop_may_connect(
    tmp_path: Path, failing: str
) -> None:
    """The database lives on the loop that has connected it, not on one that has tried."""
    folder = tmp_path / "folder"

    class Failing(Plugin):
        async def on_start(self) -> None:
            if not folder.exists():
                raise Unavailable("server", "not now")

    path = tmp_path if failing == "a plugin" else folder
    plugins = [Failing()] if failing == "a plugin" else []
    database = Database(f"sqlite:///{path}/jobs.db", plugins=plugins)
    for _ in range(2):
        with pytest.raises((Misconfigured, Unavailable)):
            await database.connect()
    folder.mkdir()

    async def use() -> None:
        async with database:
            assert database.home_loop.is_here
            assert await database.list_resources() == []

    # This loop still runs meanwhile.
    await asyncio.to_thread(asyncio.run, use())
    async with database:
        assert database.home_loop.is_here


async def test_a_connect_that_is_cancelled_leaves_nothing_behind(
    components: Components, emitted: list[Event]
) -> None:
    """Wherever it was, it can be retried."""
    waits, closed = asyncio.Event(), list[str]()

    class StuckStore(MemoryStore):
        async def scan(self, *arguments: Any, **options: Any) -> Any:
            if not waits.is_set():
                waits.set()
                await asyncio.Event().wait()
            return await super().scan(*arguments, **options)

        async def close(self) -> None:
            closed.append("store")
            await super().close()

    class SlowPlugin(Plugin):
        async def on_stop(self) -> None:
            closed.append("plugin")

    store = StuckStore()
    database = Database(connection=store, components=components, plugins=[SlowPlugin()])
    before = asyncio.all_tasks()
    connecting = asyncio.create_task(database.connect())
    await waits.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == before
    assert (database.is_connected, emitted, closed) == (False, [], [])
    async with database:
        assert await database.list_resources() == []
    assert closed == ["plugin"]


async def test_a_database_is_connected_when_its_plugins_have_started() -> None:
    """And until they have stopped: so says the event, with the name of the store."""
    heard: list[Event | str] = []

    class WatchingPlugin(Plugin):
        async def on_start(self) -> None:
            heard.append("on_start")

        async def on_stop(self) -> None:
            heard.append("on_stop")

    database = Database("memory://told", plugins=[WatchingPlugin()])
    database.on("db:*", heard.append)
    async with database:
        pass
    expected = [
        "on_start",
        PluginStarted(plugin="watching"),
        DatabaseConnected(store="memory://told"),
        "on_stop",
        PluginStopped(plugin="watching"),
        DatabaseDisconnected(store="memory://told"),
    ]
    assert heard == expected


async def test_events_reach_coroutines(components: Components) -> None:
    """An async listener runs while the database is connected, and to its end at disconnect."""
    database = Database("memory://", components=components)
    done: list[str] = []

    async def listen(event: Event) -> None:
        await asyncio.sleep(0.01)
        done.append(event.name)

    database.on("db:*", listen)
    async with database:
        await database.create_resource("a")
    assert sorted(done) == ["db:connected", "db:disconnected", "db:resource-created"]
    assert database.off("db:*", listen) is True


async def test_coroutines_of_events_between_two_connections_wait_for_the_second(
    components: Components,
) -> None:
    """Before the first one, and after each."""
    database = Database("memory://", components=components)
    heard: list[str] = []

    async def hear(event: Event) -> None:
        heard.append(event["error"])

    database.on("db:failed", hear)
    for use in range(1, 4):
        database.events.emit(DatabaseFailed(error=f"failure {use}"))
        await asyncio.sleep(0)
        assert len(heard) == use - 1
        async with database:
            await until(lambda use=use: len(heard) == use, "it is heard")  # type: ignore[misc]
    assert heard == ["failure 1", "failure 2", "failure 3"]


async def test_a_view_is_readable_until_the_end_of_the_connection() -> None:
    """It is not a resource of the store, so the next connection does not know it."""
    records = MemoryStore()
    await records.create("data/view/a", {"id": "a"})
    database = Database("memory://")
    for _ in range(2):
        async with database:
            assert [*database.resources] == []
            database.add_view("view", records)
            assert [*database.resources] == ["view"]
            assert await database.resources.view.list_ids() == ["a"]
            assert await database.list_resources() == []
        assert [*database.resources] == []
    await records.close()


async def test_a_listener_may_disconnect(components: Components) -> None:
    """A listener that stops its own database is not cancelled."""
    database = Database("memory://", components=components)
    done = asyncio.Event()

    async def leave(_: Event) -> None:
        await database.disconnect()
        done.set()

    database.once("db:resource-created", leave)
    await database.connect()
    await database.create_resource("a")
    await asyncio.wait_for(done.wait(), 10)
    assert not database.is_connected


class _WorkPlugin(CoordinatorPlugin):
    """Has work for its coordinator."""

    async def coordinator_work(self) -> None:
        await self.storage.increment("rounds")


def test_a_database_can_be_connected_in_several_loops_in_turn() -> None:
    """A program may call `asyncio.run` repeatedly with the same database, and its plugins."""
    queue, scheduler = QueuePlugin("messages"), SchedulerPlugin()
    plugins = [queue, scheduler, TTLPlugin(default_ttl=60), CachePlugin(), _WorkPlugin()]
    database = Database("memory://loops", plugins=plugins)

    @queue.task
    async def double(number: int) -> int:
        return 2 * number

    @scheduler.job("@yearly", enabled=False)
    async def answer() -> int:
        return await (await double.enqueue(21)).result(timeout=30)

    async def use() -> None:
        async with database:
            assert await scheduler.run_job("answer") == 42
        await asyncio.gather(*(database.connect() for _ in range(3)))
        await asyncio.gather(*(database.create_resource(f"r{n}") for n in range(3)))
        await asyncio.gather(*(database.disconnect() for _ in range(3)))

    for _ in range(3):
        asyncio.run(use())
    assert not database.is_connected


class BusyStore(MemoryStore):
    """Inserts a record before each delete, as a concurrent writer does."""

    async def write(self, changes: Any) -> Any:
        if any(isinstance(change, Delete) for change in changes):
            (name,) = Components.system().ids.records(1)
            await super().write([Put(f"data/tasks/{name}", {"id": name})])
        return await super().write(changes)


async def test_dropping_ends_while_others_keep_writing() -> None:
    """The records that existed are gone; records written meanwhile may remain."""
    async with asyncio.timeout(30), Database(connection=BusyStore()) as database:
        tasks = await database.create_resource("tasks")
        await tasks.insert_many([{"n": n} for n in range(10)])
        await database.drop_resource("tasks")
        assert await database.list_resources() == []
