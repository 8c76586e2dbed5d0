"""A database is found, connected, used and let go of."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jobsync import (
    Components,
    Database,
    Delete,
    Event,
    Invalid,
    Misconfigured,
    Put,
    Unavailable,
)
from jobsync.stores.memory import MemoryStore


@pytest.fixture
def told() -> list[Event]:
    """What happened."""
    return []


@pytest.fixture
def components(told: list[Event]) -> Components:
    """This machine's, with ears."""
    components = Components.system()
    components.events.on("db:*", told.append)
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


async def test_the_environment_names_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`JOBSYNC_URL` counts where the code says nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOBSYNC_URL", "sqlite:///named.db")
    async with Database():
        assert (tmp_path / "named.db").exists()
    monkeypatch.setenv("JOBSYNC_URL", "nonsense://x")
    with pytest.raises(Misconfigured, match="JOBSYNC_URL"):
        await Database().connect()


@pytest.mark.parametrize("argument", ["url", "connection_string", "connection"])
async def test_the_url_goes_by_three_names(argument: str) -> None:
    """The documents call it so."""
    named: dict[str, Any] = {argument: "memory://three"}
    async with Database(**named) as database:
        assert repr(database) == "Database('memory://three')"


async def test_one_store_is_named() -> None:
    """Two at once are refused."""
    with pytest.raises(Invalid, match="Pass one of url"):
        Database("memory://", connection="memory://")


def test_no_secret_is_shown() -> None:
    """A database may be printed."""
    shown = repr(Database("s3://KEY:SECRET@bucket/prefix"))
    assert "bucket" in shown
    assert "SECRET" not in shown


async def test_what_is_not_connected_says_so() -> None:
    """Every call names the fix; after a disconnect too."""
    database = Database("memory://")
    with pytest.raises(Invalid, match=r"is not connected.*\. Await database.connect\(\) first"):
        await database.create_resource("a")
    await database.connect()
    resource = await database.create_resource("a")
    await database.disconnect()
    for call in (resource.insert({}), resource.list(), database.list_resources()):
        with pytest.raises(Invalid, match="is not connected"):
            await call
    with pytest.raises(Invalid, match="is not connected"):
        database.resource("a")


async def test_connecting_and_disconnecting_may_be_repeated(
    components: Components, told: list[Event]
) -> None:
    """Each takes effect once, whoever calls at one time; a database can be connected again."""
    database = Database("memory://again", components=components)
    keeper = MemoryStore("again")
    for _ in range(2):
        await asyncio.gather(*(database.connect() for _ in range(3)))
        assert database.is_connected
        await asyncio.gather(*(database.disconnect() for _ in range(3)))
        assert not database.is_connected
    assert [event.name for event in told] == ["db:connected", "db:disconnected"] * 2
    await keeper.close()


async def test_a_store_that_was_handed_in_stays_open() -> None:
    """Who opened it closes it."""

    class Watched(MemoryStore):
        closed = False

        async def close(self) -> None:
            self.closed = True

    store = Watched()
    async with Database(connection=store):
        pass
    assert store.closed is False


async def test_a_connect_that_fails_leaves_nothing_behind(
    components: Components, told: list[Event]
) -> None:
    """It can be tried again, and nobody is told of an end without a beginning."""

    class Shy(MemoryStore):
        answers = False

        async def scan(self, *arguments: Any, **named: Any) -> Any:
            if not self.answers:
                raise Unavailable(self.name, "not now")
            return await super().scan(*arguments, **named)

    store = Shy()
    database = Database(connection=store, components=components)
    before = asyncio.all_tasks()
    with pytest.raises(Unavailable):
        await database.connect()
    assert asyncio.all_tasks() == before
    assert told == []
    store.answers = True
    async with database:
        assert await database.list_resources() == []


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


async def test_a_listener_may_disconnect(components: Components) -> None:
    """Who stops everything from within goes on to its own end."""
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


def test_a_database_may_be_connected_in_one_loop_after_the_other() -> None:
    """A program may call `asyncio.run` as often as it likes, with one database for all."""
    database = Database("memory://loops")

    async def use() -> None:
        await asyncio.gather(*(database.connect() for _ in range(3)))
        await asyncio.gather(*(database.create_resource(f"r{n}") for n in range(3)))
        await asyncio.gather(*(database.disconnect() for _ in range(3)))

    for _ in range(3):
        asyncio.run(use())
    assert not database.is_connected


class Busy(MemoryStore):
    """Has a user who writes whenever somebody else does."""

    async def write(self, changes: Any) -> Any:
        if any(isinstance(change, Delete) for change in changes):
            (name,) = Components.system().ids.records(1)
            await super().write([Put(f"data/tasks/{name}", {"id": name})])
        return await super().write(changes)


async def test_dropping_ends_though_others_go_on_writing() -> None:
    """What was there is gone; what they write afterwards is theirs to answer for."""
    async with asyncio.timeout(30), Database(connection=Busy()) as database:
        tasks = await database.create_resource("tasks")
        await tasks.insert_many([{"n": n} for n in range(10)])
        await database.drop_resource("tasks")
        assert await database.list_resources() == []
