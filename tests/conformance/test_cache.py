"""A cache in front of every store: what it spares, and what it never hides."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness
from store_locations import StoreLocation

from jobsync import (
    CachePlugin,
    Components,
    Conflict,
    Database,
    Document,
    Events,
    NotFound,
    Resource,
)
from jobsync.stores.metered import Meter, MeteredStore

TTL = 60.0

READS: dict[str, Callable[[Resource], Awaitable[Any]]] = {
    "get": lambda tasks: tasks.get("a"),
    "exists": lambda tasks: tasks.exists("a"),
    "get_many": lambda tasks: tasks.get_many(["b", "a"]),
    "list": lambda tasks: tasks.list(limit=1, offset=1),
    "list_ids": lambda tasks: tasks.list_ids(),
    "count": lambda tasks: tasks.count({"n": {"$lt": 2}}),
    "query": lambda tasks: tasks.query({"tags": ["x"]}, sort=["-n", "id"]),
    "page": lambda tasks: tasks.page({"n": {"$in": [0, 1]}}, size=1),
    "partition": lambda tasks: tasks.list(partition="by_n", partition_values={"n": 0}),
    "partition that is counted": lambda tasks: tasks.count(
        partition="by_n", partition_values={"n": 1}
    ),
}


class Stage:
    """Two databases on one store: one with a cache, and one that stands for another process."""

    def __init__(self, cached: Database, other: Database, clock: FakeClock, meter: Meter) -> None:
        self.cached = cached
        self.other = other
        self.clock = clock
        self.meter = meter

    @property
    def tasks(self) -> Resource:
        """The resource with the cache."""
        return self.cached.resources["tasks"]

    @property
    def others(self) -> Resource:
        """The same resource, as the other process sees it."""
        return self.other.resources["tasks"]

    async def count_requests(self, work: Awaitable[Any]) -> tuple[int, Any]:
        """Return how many requests of the cached database some work takes, and its result."""
        before = self.meter.requests
        result = await work
        return self.meter.requests - before, result


@pytest.fixture
async def stage(location: StoreLocation) -> AsyncIterator[Stage]:
    """Two records, a cache, and a second database."""
    clock, meter = FakeClock(), Meter()
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    mine, theirs = await location.open(), await location.open()
    metered = MeteredStore(mine, meter, clock)
    cache = CachePlugin(ttl=TTL)
    async with (
        Database(connection=metered, plugins=[cache], components=components) as cached,
        Database(connection=theirs) as other,
    ):
        tasks = await cached.create_resource(
            "tasks", {"n": "number|required"}, partitions={"by_n": ["n"]}
        )
        await tasks.insert_many(
            [{"id": name, "n": n, "tags": ["x"]} for n, name in enumerate("ab")]
        )
        await other.list_resources()
        yield Stage(cached, other, clock, meter)
    await mine.close()
    await theirs.close()


@pytest.mark.parametrize("verb", READS)
async def test_the_second_read_costs_no_request(stage: Stage, verb: str) -> None:
    """The answer is the same, and not the same object."""
    cost, first = await stage.count_requests(READS[verb](stage.tasks))
    assert cost > 0
    cost, second = await stage.count_requests(READS[verb](stage.tasks))
    assert cost == 0
    assert second == first
    assert second is not first or isinstance(first, bool | int)


@pytest.mark.parametrize("verb", READS)
async def test_a_write_of_this_process_is_seen_at_once(stage: Stage, verb: str) -> None:
    """Whatever was read before."""
    for change in (
        lambda: stage.tasks.update("a", {"n": 1, "tags": ["x", "y"]}),
        lambda: stage.tasks.insert({"id": "aa", "n": 1, "tags": ["x"]}),
        lambda: stage.tasks.delete("a"),
    ):
        await READS[verb](stage.tasks)
        await change()
        assert _show(await READS[verb](stage.tasks)) == _show(await READS[verb](stage.others))


@pytest.mark.parametrize("verb", READS)
async def test_a_write_of_another_process_is_seen_after_the_ttl(stage: Stage, verb: str) -> None:
    """Not before: that is the price."""
    before = _show(await READS[verb](stage.tasks))
    await stage.others.delete("a")
    await stage.others.update("b", {"n": 2, "tags": []})
    stage.clock.mono_seconds += TTL - 0.001
    assert _show(await READS[verb](stage.tasks)) == before
    stage.clock.mono_seconds += 0.001
    after = _show(await READS[verb](stage.tasks))
    assert after == _show(await READS[verb](stage.others))
    assert after != before


async def test_a_conflict_is_followed_by_a_fresh_read(stage: Stage) -> None:
    """Otherwise a loop of get and update would spin until the ttl is over."""
    for _ in range(3):
        stale = await stage.tasks.get("a")
        assert stale is not None
        await stage.others.update("a", {"n": stale.n + 10})
        with pytest.raises(Conflict):
            await stage.tasks.update("a", {"n": 5}, if_version=stale._version)
        fresh = await stage.tasks.get("a")
        assert fresh is not None
        assert fresh.n == stale.n + 10


async def test_a_verb_that_finds_nothing_to_write_forgets_what_it_found_out(stage: Stage) -> None:
    """Another process has deleted the record."""
    for end in ("update", "replace", "delete", "delete_many", "delete_all"):
        await stage.others.upsert({"id": "a", "n": 1})
        stage.clock.mono_seconds += TTL
        assert await stage.tasks.exists("a")
        assert "a" in await stage.tasks.list_ids()
        await stage.others.delete("a")
        match end:
            case "update" | "replace":
                with pytest.raises(NotFound):
                    await getattr(stage.tasks, end)("a", {"n": 2})
            case "delete":
                assert not await stage.tasks.delete("a")
            case "delete_many":
                assert await stage.tasks.delete_many(["a"]) == 0
            case "delete_all":
                await stage.tasks.delete_all()
        assert await stage.tasks.get("a") is None, end
        assert "a" not in await stage.tasks.list_ids()


async def test_an_upsert_decides_without_the_cache(stage: Stage) -> None:
    """The cached record was deleted by another process: it is inserted."""
    await stage.tasks.get("a")
    await stage.others.delete("a")
    assert (await stage.tasks.upsert({"id": "a", "n": 7})).n == 7
    found = await stage.others.get("a")
    assert found is not None
    assert "tags" not in found


async def test_dropping_a_resource_leaves_nothing_behind(stage: Stage) -> None:
    """The next resource of this name is empty."""
    await READS["list"](stage.tasks)
    await READS["get"](stage.tasks)
    await stage.cached.drop_resource("tasks")
    tasks = await stage.cached.create_resource("tasks", {"n": "number|required"})
    assert await tasks.list() == []
    assert await tasks.get("a") is None


def _show(answer: Any) -> Any:
    """Return an answer as plain values."""
    match answer:
        case Document():
            return dict(answer)
        case list():
            return [_show(each) for each in answer]
        case _ if hasattr(answer, "next"):
            return (_show(answer.items), answer.next)
        case _:
            return answer
