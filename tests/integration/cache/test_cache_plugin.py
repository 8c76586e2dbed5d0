"""A cache in a database: its life, its hooks, and what it has no part in."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    CachePlugin,
    CacheStats,
    Components,
    Database,
    Events,
    Invalid,
    Misconfigured,
    Resource,
)
from jobsync.database import read_cache
from jobsync.stores.contract import Change, Outcome, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

T = TypeVar("T")


class GatedStore(StoreDecorator):
    """Counts requests, and holds them while the gate is closed."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = 0
        self.reply_gate = asyncio.Event()
        self.reply_gate.set()
        self.waiting = asyncio.Event()

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        del call, sent
        self.requests += 1
        result = await work()
        if not self.reply_gate.is_set():
            self.waiting.set()
            await self.reply_gate.wait()
        return result

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        return await self.around("write", len(changes), lambda: self.inner.write(changes))


async def test_a_forked_child_gets_no_answers_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, as without a cache."""
    async with Database(f"sqlite:///{tmp_path / 'jobs.db'}", plugins=[CachePlugin()]) as database:
        tasks = await database.create_resource("tasks")
        await tasks.insert({"id": "a"})
        assert await tasks.get("a") is not None
        assert len(await tasks.list()) == 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            patch.setattr(read_cache, "count_forks", lambda: -1)
            for read in (tasks.get("a"), tasks.get_many(["a"]), tasks.list()):
                with pytest.raises(Misconfigured, match="opened before a fork"):
                    await read


@pytest.fixture
async def store() -> GatedStore:
    """A store of its own."""
    return GatedStore(MemoryStore())


@pytest.fixture
async def cache() -> CachePlugin:
    """A cache that is not attached yet."""
    return CachePlugin(max_size=10)


@pytest.fixture
async def database(store: GatedStore, cache: CachePlugin) -> AsyncIterator[Database]:
    """A database with a cache."""
    async with Database(connection=store, plugins=[cache]) as database:
        yield database


@pytest.fixture
async def tasks(database: Database) -> Resource:
    """A resource with a record."""
    tasks = await database.create_resource("tasks", {"n": "number"})
    await tasks.insert({"id": "a", "n": 1, "tags": ["x"]})
    return tasks


async def test_hooks_run_with_answers_from_the_cache(tasks: Resource, cache: CachePlugin) -> None:
    """The cache answers in place of the store, not of the verb."""
    calls: list[Any] = []

    @tasks.before("get")
    def translate(id: str) -> str:
        calls.append(id)
        return id.lower()

    tasks.after("get", lambda found: calls.append(found.n))
    tasks.before("list", lambda _: {"n": {"$gt": 5}})
    for _ in range(2):
        assert (await tasks.get("A")) is not None
        await tasks.get_many(["A"])
        assert await tasks.list() == []
    assert calls == ["A", 1] * 4
    assert cache.stats() == CacheStats(hits=4, misses=2, size=2, evictions=0)


async def test_what_a_reader_does_to_its_record_nobody_else_sees(tasks: Resource) -> None:
    """As without a cache: values may be lists and dictionaries."""
    for _ in range(3):
        record, (listed,), page = await tasks.get("a"), await tasks.list(), await tasks.page()
        assert record is not None
        for each in (record, listed, *page.items):
            assert each.tags == ["x"]
            each.tags.append("y")


async def test_different_questions_have_different_answers(tasks: Resource) -> None:
    """Also if they have the same parts; whatever was asked before."""
    values = [{"a": 1}, ["a", 1], [["a", 1]], {"a": [1]}, 1, True, "1", None, "None", [], {}, ""]
    await tasks.insert_many([{"id": f"x{n:02}", "x": value} for n, value in enumerate(values)])
    for _ in range(2):
        for number, value in enumerate(values):
            found = await tasks.query({"x": value})
            assert [each["id"] for each in found] == [f"x{number:02}"]


async def test_a_wrong_argument_is_refused_whatever_is_cached(tasks: Resource) -> None:
    """True equals 1, and is not a number of records."""
    wrong: Any = True
    await tasks.list(limit=1)
    with pytest.raises(Invalid):
        await tasks.list(limit=wrong)
    assert await tasks.count({"n": 1}) == 1
    assert await tasks.count({"n": True}) == 0
    deep: Any = {"n": 1}
    for _ in range(2000):
        deep = {"$not": deep}
    with pytest.raises(Invalid):
        await tasks.count(deep)


async def test_a_write_below_the_resource_is_seen(database: Database, tasks: Resource) -> None:
    """Such as that of a sweep: the store of the database reports it."""
    await tasks.get("a")
    await tasks.list()
    record = await database.store.get("data/tasks/a")
    assert record is not None
    await database.store.write([record.delete()])
    assert await tasks.get("a") is None
    assert await tasks.list() == []


async def test_a_write_leaves_other_records_and_resources_alone(
    database: Database, store: GatedStore, tasks: Resource
) -> None:
    """Only what it touched, and the listings of its resource, are read again."""
    users = await database.create_resource("users", {})
    await users.insert({"id": "ann"})
    await tasks.insert({"id": "b", "n": 2})
    for read in (tasks.get("b"), users.get("ann"), users.list()):
        await read
    await tasks.update("a", {"n": 2})
    before = store.requests
    for read in (tasks.get("b"), users.get("ann"), users.list()):
        await read
    assert store.requests == before


async def test_a_clear_concerns_what_is_being_read(
    store: GatedStore, cache: CachePlugin, tasks: Resource
) -> None:
    """The caller may know that another process has just written."""
    store.reply_gate.clear()
    reading = asyncio.ensure_future(tasks.get("a"))
    await store.waiting.wait()
    cache.clear("tasks")
    store.reply_gate.set()
    await reading
    assert cache.stats().size == 0
    await tasks.get("a")
    cache.clear("users")
    assert cache.stats().size == 1
    cache.clear()
    assert cache.stats().size == 0


async def test_the_age_of_an_answer_counts_from_its_request(clock: FakeClock) -> None:
    """The reply took 8 of the 10 seconds: what it says may be as old as that."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store, cache = GatedStore(MemoryStore()), CachePlugin(ttl=10)
    async with Database(connection=store, plugins=[cache], components=components) as database:
        tasks = await database.create_resource("tasks", {})
        await tasks.insert({"id": "a"})
        store.reply_gate.clear()
        reading = asyncio.ensure_future(tasks.get("a"))
        await store.waiting.wait()
        clock.mono_seconds += 8
        store.reply_gate.set()
        await reading
        clock.mono_seconds += 1.9
        await tasks.get("a")
        assert cache.stats().hits == 1
        clock.mono_seconds += 0.1
        await tasks.get("a")
        assert cache.stats().hits == 1


async def test_a_cache_that_is_added_during_a_write_keeps_nothing_until_its_end() -> None:
    """It does not know what that write changes."""
    store = GatedStore(MemoryStore())
    async with Database(connection=store) as database:
        tasks = await database.create_resource("tasks", {})
        await tasks.insert({"id": "a"})
        store.reply_gate.clear()
        writing = asyncio.ensure_future(database.store.drop(["data/tasks/a"]))
        await store.waiting.wait()
        cache = await database.use_plugin(CachePlugin())
        reading = asyncio.ensure_future(tasks.list())
        await asyncio.sleep(0)
        store.reply_gate.set()
        await asyncio.gather(writing, reading)
        assert cache.stats().size == 0
        await tasks.list()
        assert cache.stats().size == 1


@pytest.mark.parametrize(
    ("resources", "cached"),
    [
        (None, 2),
        (["tasks"], 1),
        (("tasks", "users"), 2),
        ({"users"}, 1),
        ((name for name in ["users", "users"]), 1),
        (["task"], 0),
        # None of them, and not all as without the option.
        ([], 0),
        ((), 0),
    ],
)
async def test_only_the_named_resources_are_cached(
    resources: Iterable[str] | None, cached: int
) -> None:
    """The others are read each time, and not counted."""
    cache = CachePlugin(resources=resources)
    async with Database(connection=MemoryStore(), plugins=[cache]) as database:
        for name in ("tasks", "users"):
            resource = await database.create_resource(name, {})
            await resource.insert({"id": "a"})
            for _ in range(3):
                await resource.get("a")
                await resource.count()
    assert cache.stats() == CacheStats(hits=4 * cached, misses=2 * cached, size=0, evictions=0)


async def test_a_deletion_of_all_leaves_no_answer() -> None:
    """Also none about a record that another process has deleted before."""
    store, plugins = MemoryStore(), [CachePlugin()]
    async with (
        Database(connection=store, plugins=plugins) as one,
        Database(connection=store) as two,
    ):
        tasks = await one.create_resource("tasks")
        await tasks.insert_many([{"id": "a"}, {"id": "b"}])
        assert await tasks.get("a") is not None
        assert await tasks.get("b") is not None
        await two.list_resources()
        assert await two.resources.tasks.delete("a")
        assert await tasks.delete_all() == 1
        assert await tasks.get_many(["a", "b"]) == [None, None]
        assert [await tasks.count(), await tasks.list_ids(), await tasks.list()] == [0, [], []]


async def test_storage_and_views_are_never_cached(database: Database, store: GatedStore) -> None:
    """They decide, or show what other processes do."""
    storage = database.open_storage("sample")
    await storage.set("key", 1)
    await store.inner.create("data/view/a", {"id": "a"})
    database.add_view("view", store.inner)
    for read in (lambda: storage.get("key"), storage.list):
        await read()
        before = store.requests
        await read()
        assert store.requests > before
    record = await store.inner.get("data/view/a")
    view = database.resources["view"]
    assert await view.exists("a")
    assert record is not None
    await store.inner.delete(record)
    assert not await view.exists("a")


async def test_a_changed_definition_drops_what_was_read(
    database: Database, cache: CachePlugin, tasks: Resource
) -> None:
    """Looking at the definitions again does not."""
    await tasks.get("a")
    await database.list_resources()
    assert cache.stats().size == 1
    await database.create_resource("tasks", {"n": "number", "done": "boolean"})
    assert cache.stats().size == 0


async def test_nothing_outlives_a_disconnect(store: GatedStore, cache: CachePlugin) -> None:
    """Neither do answers in resources that the caller still has."""
    database = Database(connection=store, plugins=[cache])
    async with database:
        tasks = await database.create_resource("tasks", {})
        await tasks.insert({"id": "a"})
        await tasks.get("a")
    assert cache.stats().size == 0
    with pytest.raises(Invalid, match="not connected"):
        await tasks.get("a")
    async with database:
        assert await tasks.exists("a")
        assert cache.stats().misses == 2


async def test_a_stopped_cache_answers_nothing(
    store: GatedStore, cache: CachePlugin, tasks: Resource
) -> None:
    """Every read is a request, until it is started again."""
    await tasks.get("a")
    await cache.stop()
    before = store.requests
    await tasks.get("a")
    await tasks.get("a")
    assert store.requests == before + 2
    await cache.start()
    await tasks.get("a")
    await tasks.get("a")
    assert store.requests == before + 3


async def test_a_failed_database_answers_nothing(store: GatedStore, cache: CachePlugin) -> None:
    """Its error is raised, as without a cache."""
    database = await Database(connection=store, plugins=[cache]).connect()
    tasks = await database.create_resource("tasks", {})
    await tasks.insert({"id": "a"})
    await tasks.get("a")

    async def fail() -> None:
        raise RuntimeError("a bug")

    await asyncio.wait([cache.run_in_background(fail)])
    for read in (tasks.get, tasks.exists):
        with pytest.raises(RuntimeError, match="a bug"):
            await read("a")
    await database.disconnect()


async def test_a_second_cache_is_refused(database: Database) -> None:
    """One database has one cache."""
    with pytest.raises(Invalid, match="second cache"):
        await database.use_plugin(CachePlugin(), "another")
