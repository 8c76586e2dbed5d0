"""A process that dies at any write leaves every record in its partitions, and nowhere else."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import pytest
from chance import FakeClock, SeededRandomness
from store_locations import ObjectsLocation, PostgresLocation, StoreLocation

from jobsync import Components, Conflict, Events, Incomplete, NotFound, Resource, Store
from jobsync.core.partitions import parse_partitions
from jobsync.database import backfill as backfill_module
from jobsync.database.backfill import Backfill
from jobsync.database.home_loop import HomeLoop
from jobsync.database.read_cache import ReadGuard
from jobsync.database.registry import ResourceRegistry
from jobsync.database.supervisor import Supervisor
from jobsync.stores.contract import BURIAL_AGE, Change, Outcome, Record, Where
from jobsync.stores.decorator import StoreDecorator

T = TypeVar("T")
Step: TypeAlias = Callable[[Resource], Awaitable[Any]]

PARTITIONS = {"by_region": "region", "by_both": ["region", "n"]}
RULES = parse_partitions(PARTITIONS, None)
REGIONS = ["eu", "us"]
NUMBERS = [1, 2, 3]


class Died(BaseException):
    """The process has died."""


class DyingStore(StoreDecorator):
    """Does a number of writes, then dies: before the next one, or before its reply.

    Args:
        inner: the store that does the work.
        writes: how many.
        replies: whether it dies before the next, not before its reply.
        is_atomic: whether a batch is one write; otherwise it ends half-way.
    """

    def __init__(self, inner: Store, writes: int, *, replies: bool, is_atomic: bool) -> None:
        super().__init__(inner)
        self.is_atomic = is_atomic
        self._left = writes
        self._replies = replies

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, up to the crash."""
        return await self._do(changes, self.inner.write)

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove, up to the crash."""
        await self._do(keys, self.inner.drop)

    async def _do(self, items: Sequence[Any], work: Callable[[Any], Awaitable[T]]) -> T:
        size = 1 if self.is_atomic else len(items)
        if self._left >= size:
            self._left -= size
            return await work(items)
        part = max(self._left, 0) + (not self._replies)
        if part and self.is_atomic:
            await work(items)
        elif part:
            await work(items[:part])
        self._left = 0
        raise Died


def row(name: str, region: str | None, n: int) -> dict[str, Any]:
    """Return a record."""
    return {"id": name, "region": region, "n": n}


STORY: list[Step] = [
    lambda r: r.insert(row("a", "eu", 1)),
    lambda r: r.insert_many([row("b", "eu", 1), row("c", "us", 2), row("d", None, 1)]),
    lambda r: r.update("a", {"n": 2}),
    lambda r: r.update("a", {"more": True}),
    lambda r: r.update("b", {"region": "us"}),
    lambda r: r.upsert(row("d", "eu", 3)),
    lambda r: r.upsert(row("e", "us", 3)),
    lambda r: r.replace("c", {"n": 2}),
    lambda r: r.update("b", {"region": "eu"}),
    lambda r: r.delete("a"),
    lambda r: r.insert(row("a", "eu", 1)),
    lambda r: r.delete_many(["b", "e"]),
    lambda r: r.insert_many([row("b", "us", 1), row("f", "us", 1)]),
]
END = {"a": "eu", "b": "us", "c": None, "d": "eu", "f": "us"}


@pytest.fixture(params=["together", "separate"])
async def is_atomic(request: pytest.FixtureRequest, location: StoreLocation) -> bool:
    """Whether a batch is written as one."""
    store = await location.open()
    is_atomic = store.is_atomic
    await store.close()
    if request.param == "together" and not is_atomic:
        pytest.skip("each record is a request")
    return bool(request.param == "together")


@pytest.fixture(params=["before", "after"])
def replies(request: pytest.FixtureRequest) -> bool:
    """Whether a process dies before a write, not before its reply."""
    return bool(request.param == "before")


class Process:
    """A process with a registry of its own."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        randomness = SeededRandomness(next(_seeds))
        self.components = Components(clock=clock, randomness=randomness, events=Events())
        self.store = store
        self.registry = ResourceRegistry(
            lambda: store, self.components, ReadGuard(clock), HomeLoop(lambda: store.name)
        )

    async def define(self, name: str) -> Resource:
        """Define a resource with its partitions."""
        return await self.registry.define(name, None, strict=None, rules=RULES)

    async def backfill(self, name: str) -> None:
        """Complete the partitions."""
        supervisor = Supervisor(self.components)
        backfill = Backfill(lambda: self.store, self.registry, self.components, lambda: supervisor)
        await backfill.run(name)


_seeds = itertools.count()


async def check(process: Process, resource: Resource) -> dict[str, str | None]:
    """Check that each record is found where it belongs; return the region of each."""
    stored = await process.store.scan(f"data/{resource.name}/")
    records = [record.value for record in stored]
    for region in REGIONS:
        expected = [each["id"] for each in records if each.get("region") == region]
        values: dict[str, Any] = {"region": region}
        found = await resource.list(partition="by_region", partition_values=values)
        assert [document.id for document in found] == expected
        for n in NUMBERS:
            both = {**values, "n": n}
            found = await resource.list(partition="by_both", partition_values=both)
            expected = [
                each["id"] for each in records if each.get("region") == region and each["n"] == n
            ]
            assert [document.id for document in found] == expected
    return {each["id"]: each.get("region") for each in records}


async def count_entries(process: Process, resource: Resource) -> int:
    """Count all entries, including dangling ones."""
    keys = resource.definition.index_keys
    heads = [await process.store.heads(f"index/{resource.name}/{key}/") for key in keys]
    return sum(map(len, heads))


@pytest.fixture
def stride(location: StoreLocation, full_scale: bool) -> int:
    """Die at each write; on servers, unless at full scale, at every fifth."""
    is_server = isinstance(location, PostgresLocation | ObjectsLocation)
    return 5 if is_server and not full_scale else 1


async def test_a_crash_at_any_write_leaves_each_record_in_its_partitions(
    location: StoreLocation, clock: FakeClock, is_atomic: bool, replies: bool, stride: int
) -> None:
    """The interrupted step can be repeated; an hour later no dangling entry is left."""
    store = await location.open()
    for writes in itertools.count(step=stride):
        dying = DyingStore(store, writes, replies=replies, is_atomic=is_atomic)
        process, name, done = Process(dying, clock), f"r{writes}", 0
        try:
            resource = await process.define(name)
            for step in STORY:
                await step(resource)
                done += 1
        except Died:
            pass
        process = Process(store, clock)
        resource = await process.define(name)
        await check(process, resource)
        for step in STORY[done:]:
            try:
                await step(resource)
            except (Conflict, Incomplete, NotFound):
                # All or part of it was done before the crash.
                assert step is STORY[done]
        assert await check(process, resource) == END
        await clock.sleep(BURIAL_AGE + 1)
        await check(process, resource)
        found = await store.scan(f"data/{name}/")
        in_partitions = sum(record.value.get("region") is not None for record in found)
        assert await count_entries(process, resource) == 2 * in_partitions
        if done == len(STORY):
            break
    assert writes > (20 if is_atomic else 40)
    await store.close()


class BusyStore(StoreDecorator):
    """A store on which another process writes whenever a page of records was read."""

    def __init__(self, inner: Store, work: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._work = work

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """Read, then let the other process write."""
        records = await super().scan(prefix, after=after, limit=limit, where=where)
        if prefix.startswith("data/"):
            await self._work()
        return records


async def test_a_backfill_that_dies_at_any_write_is_completed_by_another_process(
    location: StoreLocation,
    clock: FakeClock,
    is_atomic: bool,
    replies: bool,
    stride: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While another process inserts, moves and deletes between its reads and its writes."""
    monkeypatch.setattr(backfill_module, "_PAGE", 2)
    store = await location.open()
    for writes in itertools.count(step=stride):
        name = f"r{writes}"
        writer = Process(store, clock)
        resource = await writer.registry.define(name, None, strict=None)
        await resource.insert_many([row(x, REGIONS[i % 2], 1) for i, x in enumerate("acegik")])
        steps = iter(make_steps())

        async def write(resource: Resource = resource, steps: Any = steps) -> None:
            for step in itertools.islice(steps, 2):
                await step(resource)

        dying = DyingStore(BusyStore(store, write), writes, replies=replies, is_atomic=is_atomic)
        died = False
        try:
            process = Process(dying, clock)
            await process.define(name)
            await process.backfill(name)
        except Died:
            died = True
        await write()
        process = Process(store, clock)
        assert await check(process, await process.define(name))
        await Process(BusyStore(store, write), clock).backfill(name)
        defined = await process.define(name)
        assert defined.definition.is_settled
        await check(process, defined)
        for step in steps:
            await step(resource)
        assert await check(process, defined) == BUSY_END
        if not died:
            break
    assert writes > 5
    await store.close()


def make_steps() -> list[Step]:
    """Return what a writer does during a backfill: every record is changed in some way."""
    return [
        lambda r: r.insert(row("b", "eu", 2)),
        lambda r: r.update("k", {"region": "eu"}),
        lambda r: r.delete("a"),
        lambda r: r.update("c", {"more": 1}),
        lambda r: r.insert(row("a", "us", 1)),
        lambda r: r.update("e", {"region": "us"}),
        lambda r: r.update("g", {"n": 2}),
        lambda r: r.update("e", {"region": "eu"}),
        lambda r: r.delete_many(["i", "b"]),
        lambda r: r.insert_many([row("i", "eu", 3), row("z", "us", 3)]),
        lambda r: r.update("k", {"region": "us"}),
        lambda r: r.delete("z"),
        lambda r: r.insert(row("y", "eu", 1)),
        lambda r: r.update("y", {"region": "us"}),
    ]


BUSY_END = {"a": "us", "c": "us", "e": "eu", "g": "us", "i": "eu", "k": "us", "y": "us"}
