"""Partitions of resources: complete whenever they are added, changed or removed, by whomever."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import pytest
from chance import SeededRandomness, StandingClock
from store_locations import StoreLocation
from waiting import until

from jobsync import (
    Components,
    Database,
    Events,
    Invalid,
    NewerFormat,
    NotFound,
    Resource,
    Store,
    Unavailable,
)
from jobsync.core.expiry import ExpiryRule
from jobsync.database import backfill as backfill_module
from jobsync.database.backfill import BUILD_DELAY, LATE_BUILD_DELAY
from jobsync.database.index_notes import NOTES, progress_key, since_key
from jobsync.database.registry import ResourceRegistry
from jobsync.database.resource_records import DEFINITION_AGE
from jobsync.stores.contract import BURIAL_AGE, LATEST_ARRIVAL, Change, Outcome, Unknown
from jobsync.stores.decorator import StoreDecorator

T = TypeVar("T")

EU = {"region": "eu"}
BY_REGION = {"by_region": ["region"]}


class CountingStore(StoreDecorator):
    """Counts calls by name; runs a hook before each."""

    busy = 0
    """Calls of all stores that are under way."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.before: Callable[[str], Awaitable[None]] | None = None

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Count, then call."""
        del sent
        self.calls[call] += 1
        if self.before is not None:
            await self.before(call)
        CountingStore.busy += 1
        try:
            return await work()
        finally:
            CountingStore.busy -= 1


class Fleet:
    """Processes with a database each, on one location and by one clock."""

    def __init__(self, location: StoreLocation, clock: StandingClock) -> None:
        self.clock = clock
        self._location = location
        self._open: list[Database] = []
        self._stores: list[CountingStore] = []

    async def start(self, decorate: Callable[[Store], CountingStore] = CountingStore) -> Database:
        """Start one more process."""
        randomness = SeededRandomness(len(self._open))
        components = Components(clock=self.clock, randomness=randomness, events=Events())
        store = decorate(await self._location.open())
        database = await Database(connection=store, components=components).connect()
        self._open.append(database)
        self._stores.append(store)
        return database

    def store_of(self, database: Database) -> CountingStore:
        """Return the store of a process."""
        return self._stores[self._open.index(database)]

    async def pass_time(self, seconds: float) -> None:
        """Advance the time, when nobody waits for a store: requests take no time."""
        await until(lambda: not CountingStore.busy, "the stores have answered", interval=0)
        self.clock.move(seconds)
        await asyncio.sleep(0)

    async def pass_until(self, holds: Callable[[], object]) -> None:
        """Advance the time until something holds."""

        async def look() -> bool:
            if not holds():
                await self.pass_time(1)
            return bool(holds())

        await until(look, "enough time has passed", interval=0)

    async def finish(self, database: Database, name: str = "r") -> None:
        """Run a backfill to its end, however long it takes."""
        await self.finish_all(asyncio.create_task(database.backfill(name)))

    async def finish_all(self, *work: "asyncio.Task[None]") -> None:
        """Run several to their end."""
        await self.pass_until(lambda: all(task.done() for task in work))
        for task in work:
            await task

    async def stop(self) -> None:
        """Stop all processes."""
        for database, store in zip(self._open, self._stores, strict=True):
            if database.is_connected:
                await database.disconnect()
            await store.close()


@pytest.fixture
async def fleet(location: StoreLocation) -> Any:
    """A fleet without processes."""
    fleet = Fleet(location, StandingClock())
    yield fleet
    await fleet.stop()


async def list_keys(database: Database, prefix: str) -> list[str]:
    """Return the keys of one level."""
    return [head.key for head in await database.store.heads(prefix)]


async def list_notes(database: Database) -> list[str]:
    """Return the keys of all notes on backfills."""
    return await list_keys(database, NOTES)


async def count_entries(database: Database, name: str = "r") -> int:
    """Count the entries of all indexes that a resource has or has had, as far as it knows."""
    keys = database.resource(name).definition.index_keys
    found = [await list_keys(database, f"index/{name}/{key}/") for key in keys]
    return sum(map(len, found))


def ids(documents: Sequence[Any]) -> list[str]:
    """Return the ids of documents."""
    return [document.id for document in documents]


async def read_pages(resource: Resource, where: Any, *, size: int = 2, **chosen: Any) -> list[str]:
    """Return the ids of all pages, of which only the last may have fewer records."""
    found: list[str] = []
    after = None
    while True:
        page = await resource.page(where, size=size, after=after, **chosen)
        found += ids(page.items)
        if (after := page.next) is None:
            assert len(page.items) < size
            return found
        assert len(page.items) == size


async def check_region(resource: Resource, expected: Sequence[str], region: str = "eu") -> None:
    """Check every way to read a partition."""
    values = {"region": region}
    assert ids(await resource.query(values)) == list(expected)
    assert await resource.count(values) == len(expected)
    assert await read_pages(resource, values) == list(expected)
    if "by_region" in resource.partitions:
        chosen: dict[str, Any] = {"partition": "by_region", "partition_values": values}
        assert ids(await resource.list(**chosen)) == list(expected)
        assert await resource.count(**chosen) == len(expected)
        assert await read_pages(resource, None, **chosen) == list(expected)
        for limit in (0, 1):
            assert ids(await resource.list(limit=limit, **chosen)) == list(expected)[:limit]
        assert ids(await resource.query({"n": {"$exists": False}}, **chosen)) == list(expected)


async def test_definitions_have_a_higher_format_only_with_indexes(fleet: Fleet) -> None:
    """Code that does not know partitions can go on with all other resources."""
    database = await fleet.start()
    await database.create_resource("plain", {"x": "string"})
    await database.create_resource("r", partitions=BY_REGION)
    store = database.store
    plain, indexed = await store.get_many(["resource/plain", "resource/r"])
    assert plain is not None
    assert indexed is not None
    assert (plain.format, indexed.format) == (1, 2)
    assert not {"indexes", "retired", "abandoned"} & plain.value.keys()
    record = await database.resource("plain").insert({"id": "a"})
    assert dict(record).keys() == {"id", "_created_at", "_updated_at", "_version"}
    stored = await store.get_many(["data/plain/a", "data/r/a"])
    assert stored[0] is not None
    assert stored[0].format == 1
    await database.resource("r").insert({"id": "a"})
    stored = await store.get_many(["data/r/a"])
    assert stored[0] is not None
    assert stored[0].format == 2


async def test_a_definition_of_a_newer_format_is_readable_and_read_only(fleet: Fleet) -> None:
    """Records are read; every write is refused, and nothing is stored."""
    old = await fleet.start()
    resource = await old.create_resource("r", {"region": "string"}, partitions=BY_REGION)
    await resource.insert({"id": "a", **EU})
    store = old.store
    definition = await store.get("resource/r")
    assert definition is not None
    await store.put(definition, {**definition.value, "indexes": {"new": "shape"}}, format=3)
    for _ in range(2):
        before = await snapshot(old)
        # Known before, and known from the start.
        database, fleet.clock.mono_seconds = old, fleet.clock.mono_seconds + DEFINITION_AGE + 1
        resource = database.resource("r")
        assert ids(await resource.query(EU)) == ["a"]
        assert ids(await resource.list()) == ["a"]
        for write in (
            resource.insert({"id": "b", **EU}),
            resource.insert_many([{"id": "b"}]),
            resource.update("a", {"region": "us"}),
            resource.replace("a", {"region": "us"}),
            resource.upsert({"id": "a"}),
            resource.delete("a"),
            resource.delete_many(["a"]),
            resource.delete_all(),
            database.drop_partition("r", "by_region"),
            database.create_resource("r", {"region": "string", "more": "string"}),
            database.create_resource("r", partitions={"other": "region"}),
            database.drop_resource("r"),
        ):
            with pytest.raises(NewerFormat):
                await write
        assert await snapshot(old) == before
        database = await fleet.start()


async def snapshot(database: Database) -> list[tuple[str, str]]:
    """Return the keys and versions of records and definitions."""
    heads = [
        *await database.store.heads("resource/"),
        *await database.store.heads("data/r/"),
        *await database.store.heads("dropped/"),
    ]
    return [(head.key, head.version) for head in heads]


async def test_a_process_learns_of_a_new_partition_within_half_a_minute(fleet: Fleet) -> None:
    """And keeps it from then on; until then it writes by what it knows."""
    one, other = await fleet.start(), await fleet.start()
    await one.create_resource("r")
    await other.list_resources()
    await one.create_resource("r", partitions=BY_REGION)
    await other.resource("r").insert({"id": "a", **EU})
    assert await count_entries(one) == 0
    fleet.clock.move(DEFINITION_AGE + 0.1)
    await other.resource("r").insert({"id": "b", **EU})
    assert await count_entries(one) == 1
    assert other.resource("r").partitions == {"by_region": ("region",)}
    await check_region(other.resource("r"), ["a", "b"])
    await check_region(one.resource("r"), ["a", "b"])


async def test_queries_are_right_before_during_and_after_a_backfill(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While processes with the old and the new definition insert, move and delete."""
    monkeypatch.setattr(backfill_module, "_PAGE", 2)
    # No request arrives late here, and each second is a step.
    monkeypatch.setattr(backfill_module, "LATE_BUILD_DELAY", BUILD_DELAY)
    old, new = await fleet.start(), await fleet.start()
    await old.create_resource("r")
    await old.resource("r").insert_many([{"id": f"{i:02d}", **EU} for i in range(10)])
    await new.create_resource("r", partitions=BY_REGION)
    present = {f"{i:02d}" for i in range(10)}
    progress: list[int] = []
    ready: list[str] = []
    new.on("resource:index-progress", lambda event: progress.append(event.done))
    new.on("resource:index-ready", lambda event: ready.append(event.index))
    turn = 0
    while not ready:
        await fleet.pass_time(7)
        for process in (old, new):
            resource, turn = process.resource("r"), turn + 1
            name = f"{turn * 7 % 20:02d}"
            if name in present and turn % 3:
                await resource.update(name, {"region": "us"})
                present.discard(name)
            elif name in present:
                await resource.delete(name)
                present.discard(name)
            else:
                await resource.upsert({"id": name, **EU})
                present.add(name)
            await check_region(resource, sorted(present))
    assert ready == ["by_region"]
    assert progress == sorted(progress)
    assert len(progress) > 2
    for process in (old, new):
        fleet.clock.move(DEFINITION_AGE + 1)
        await check_region(process.resource("r"), sorted(present))
        (index,) = process.resource("r").definition.indexes
        assert index.is_ready
    assert await list_notes(new) == []


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "not built yet"])
async def test_a_page_has_as_many_records_as_it_should_however_the_matches_are_spread(
    fleet: Fleet, *, is_built: bool
) -> None:
    """Few among the first ones of a partition and many among the later ones, or the reverse."""
    one = await fleet.start()
    resource = await one.create_resource("r", partitions=BY_REGION if is_built else None)
    spread = "a..." + "a..a" + "aaaaaaaa" + "........" + "aaa.aaab"
    records = [
        {"id": f"{number:02}", "region": "eu" if number % 5 else "us", "kind": kind}
        for number, kind in enumerate(spread)
    ]
    await resource.insert_many(records)
    if not is_built:
        resource = await one.create_resource("r", partitions=BY_REGION)
    expected = [each["id"] for each in records if (each["region"], each["kind"]) == ("eu", "a")]
    chosen: dict[str, Any] = {"partition": "by_region", "partition_values": EU}
    for size in range(1, len(expected) + 2):
        where = {"kind": "a"}
        assert await read_pages(resource, where, size=size, **chosen) == expected
        assert await read_pages(resource, {**where, **EU}, size=size) == expected
        assert ids(await resource.query(where, limit=size, **chosen)) == expected[:size]


async def test_a_replaced_partition_is_found_by_processes_that_know_only_the_old_one(
    fleet: Fleet,
) -> None:
    """Writers keep it until nobody can read it; then its entries go."""
    reader, writer = await fleet.start(), await fleet.start()
    attributes = {"region": "string", "city": "string"}
    await writer.create_resource("r", attributes, partitions=BY_REGION)
    await writer.resource("r").insert({"id": "a", **EU})
    await reader.list_resources()
    before = {index.key for index in writer.resource("r").definition.indexes}
    changed = await writer.create_resource("r", partitions={"by_region": ["region", "city"]})
    assert changed.partitions == {"by_region": ("region", "city")}
    await changed.insert({"id": "b", "city": "x", **EU})
    await changed.update("a", {"city": "x"})
    for pause in (0.0, DEFINITION_AGE - 1, 1.5, 60.0):
        fleet.clock.move(pause)
        for process in (reader, writer):
            assert ids(await process.resource("r").query(EU)) == ["a", "b"]
            assert ids(await process.resource("r").query({"city": "x", **EU})) == ["a", "b"]
    await fleet.finish(writer)
    assert writer.resource("r").definition.is_settled
    for key in before:
        assert await list_keys(writer, f"index/r/{key}/") == []
    assert await count_entries(writer) == 2
    values = {"city": "x", **EU}
    listed = await changed.list(partition="by_region", partition_values=values)
    assert ids(listed) == ["a", "b"]


async def test_processes_that_disagree_share_two_indexes(fleet: Fleet) -> None:
    """Each keeps storing its own rule; the index of the other one has all records all the time."""
    one, other = await fleet.start(), await fleet.start()
    reports: list[Any] = []
    for process in (one, other):
        process.on("resource:processes-disagree", reports.append)
    by_city = {"by_region": ["region", "city"]}
    resource = await one.create_resource("r", partitions=BY_REGION)
    key = resource.definition.indexes[0].key
    for name in "abcd":
        await other.create_resource("r", partitions=by_city)
        await other.resource("r").insert({"id": name, "city": "x", **EU})
        await one.create_resource("r", partitions=BY_REGION)
        (index,) = resource.definition.indexes
        assert index.key == key
        assert index.is_ready
        assert len(resource.definition.retired) == 1
    await check_region(resource, list("abcd"))
    assert reports[0].level == logging.WARNING
    assert (reports[0].resource, reports[0].index, reports[0].is_used) == ("r", "by_region", True)
    assert "city" in reports[0].other
    assert "city" not in reports[0].rule
    await fleet.finish(one)
    assert resource.definition.is_settled
    assert await count_entries(one) == 4
    reports.clear()
    await one.create_resource("r", partitions=BY_REGION)
    assert reports == []


async def test_an_index_that_came_back_and_went_again_is_kept_for_its_new_readers(
    fleet: Fleet,
) -> None:
    """A backfill that saw it retired before cannot know who reads it now."""
    one, reader = await fleet.start(), await fleet.start()
    delay = BUILD_DELAY if one.store.is_atomic else LATE_BUILD_DELAY
    sleeps = fleet.clock.sleeps
    by_city = {"by_region": ["city"]}
    resource = await one.create_resource("r", partitions=BY_REGION)
    await one.create_resource("r", partitions=by_city)
    (retired,) = resource.definition.retired
    await until(lambda: sleeps[delay] == 1, "a backfill waits")
    await fleet.pass_time(delay - 2)
    await one.create_resource("r", partitions=BY_REGION)
    await reader.list_resources()
    await one.create_resource("r", partitions=by_city)
    await fleet.pass_time(2)
    await until(lambda: sleeps[delay] == 2, "it waits again")
    await resource.insert({"id": "a", "city": "x", **EU})
    fleet.store_of(reader).calls.clear()
    assert ids(await reader.resource("r").query(EU)) == ["a"]
    assert fleet.store_of(reader).calls["scan"] == 0
    assert retired.key in [index.key for index in resource.definition.retired]
    await fleet.finish(one)
    assert resource.definition.is_settled


async def test_of_several_processes_that_build_an_index_one_tells_that_it_is_ready(
    fleet: Fleet,
) -> None:
    """All of them work on it, and whoever comes last finds it ready."""
    processes = [await fleet.start() for _ in range(3)]
    ready: list[tuple[str, str]] = []
    resource = await processes[0].create_resource("r")
    await resource.insert_many([{"id": name, **EU} for name in "abc"])
    for process in processes:
        process.on("resource:index-ready", lambda each: ready.append((each.resource, each.index)))
        await process.create_resource("r", partitions=BY_REGION)
    assert not resource.definition.is_settled
    await fleet.finish_all(*(asyncio.create_task(each.backfill("r")) for each in processes))
    assert ready == [("r", "by_region")]
    await check_region(resource, [*"abc"])


async def test_what_a_late_writer_adds_to_a_former_index_is_removed(fleet: Fleet) -> None:
    """It keeps the index by the definition that it has read just before that was abandoned."""
    one, writer = await fleet.start(), await fleet.start()
    resource = await one.create_resource("r", partitions=BY_REGION)
    (index,) = resource.definition.indexes
    entries = f"index/r/{index.key}/"
    await one.drop_partition("r", "by_region")
    delay = BUILD_DELAY if one.store.is_atomic else LATE_BUILD_DELAY
    working = asyncio.create_task(one.backfill("r"))
    await until(lambda: fleet.clock.sleeps[delay] >= 1, "a backfill waits")
    await fleet.pass_time(delay - 2)
    await writer.list_resources()
    await fleet.pass_until(lambda: index.key not in [i.key for i in resource.definition.retired])
    await writer.resource("r").insert({"id": "a", **EU})
    assert index.key in [i.key for i in writer.resource("r").definition.retired]
    assert len(await list_keys(one, entries)) == 1
    await fleet.finish_all(working)
    assert resource.definition.is_settled
    assert await list_keys(one, entries) == []


async def test_a_rule_that_changes_too_often_stays(fleet: Fleet) -> None:
    """Each former one costs every writer, until nobody can read it."""
    database = await fleet.start()
    reports: list[Any] = []
    database.on("resource:processes-disagree", reports.append)
    resource = await database.create_resource("r", partitions={"by": ["a"]})
    for field in "bcd":
        await database.create_resource("r", partitions={"by": [field]})
    assert reports == []
    for field in "efg":
        await database.create_resource("r", partitions={"by": [field]})
        assert resource.partitions == {"by": ("d",)}
    assert len(resource.definition.retired) == 3
    assert [(report.is_used, report.resource) for report in reports] == [(False, "r")] * 3
    assert "'g'" in reports[-1].rule
    assert "'d'" in reports[-1].other
    # Others can change, and so can this one later.
    await database.create_resource("r", partitions={"by": ["a"], "other": ["e"]})
    assert resource.partitions == {"by": ("a",), "other": ("e",)}
    await fleet.finish(database)
    await database.create_resource("r", partitions={"by": ["g"]})
    assert resource.partitions == {"by": ("g",), "other": ("e",)}


async def test_a_resource_has_twenty_partitions_however_they_were_added(fleet: Fleet) -> None:
    """One by one is no way around the limit; replacing one is possible."""
    database = await fleet.start()
    await database.create_resource("r", partitions={f"p{i}": ["x"] for i in range(15)})
    with pytest.raises(Invalid, match=r"partitions of r must be at most 20 in all.*got 21"):
        await database.create_resource("r", partitions={f"q{i}": ["x"] for i in range(6)})
    assert len(database.resource("r").partitions) == 15
    await database.create_resource("r", partitions={f"q{i}": ["x"] for i in range(5)})
    await database.create_resource("r", partitions={"q0": ["y"]})
    assert len(database.resource("r").partitions) == 20


async def test_an_object_that_was_kept_goes_by_what_is_stored(fleet: Fleet) -> None:
    """Over a drop and a new resource of the name, made here or elsewhere, and a new connection."""
    one, other = await fleet.start(), await fleet.start()
    kept = await one.create_resource("r", partitions=BY_REGION)
    heard: list[Any] = []
    kept.on("resource:inserted", heard.append)
    await one.drop_resource("r")
    new = await one.create_resource("r", partitions=BY_REGION)
    await kept.insert({"id": "a", **EU})
    await new.insert({"id": "b", **EU})
    await fleet.finish(one)
    for resource in (kept, new):
        await check_region(resource, ["a", "b"])
    assert not heard, "its listeners belong to the resource that was dropped"
    await other.list_resources()
    await other.drop_resource("r")
    await one.list_resources()
    await other.create_resource("r", partitions=BY_REGION)
    await kept.insert({"id": "c", **EU})
    await fleet.finish(other)
    await check_region(kept, ["c"])
    await check_region(other.resource("r"), ["c"])
    await one.disconnect()
    await other.create_resource("r", partitions={"by_city": "city"})
    await one.connect()
    await kept.insert({"id": "d", "city": "x", **EU})
    await fleet.finish(other)
    assert ids(await other.resource("r").query({"city": "x"})) == ["d"]
    assert kept.partitions == other.resource("r").partitions


async def test_a_record_of_code_without_partitions_is_found_once_it_is_updated(
    fleet: Fleet,
) -> None:
    """That code can still add records; it knows no entries."""
    database = await fleet.start()
    resource = await database.create_resource("r", partitions=BY_REGION)
    await database.store.create("data/r/a", {"id": "a", **EU})
    assert ids(await resource.query(EU)) == []
    await resource.update("a", {"m": 1})
    await check_region(resource, ["a"])


class Degrees(float):
    """A number of a derived type, as numpy has them."""


@pytest.mark.parametrize("value", [Decimal("1.5"), Degrees(1.5)], ids=["decimal", "derived"])
async def test_a_number_of_another_type_is_in_the_partition_of_the_stored_one(
    fleet: Fleet, value: Any
) -> None:
    """Whichever verb writes it; users see what is stored from the start."""
    database = await fleet.start()
    resource = await database.create_resource("r", partitions={"by_n": ["n"]})
    inserted = await resource.insert({"id": "a", "n": value})
    assert type(inserted.n) is float
    await resource.insert_many([{"id": "b", "n": value}, {"id": "c"}, {"id": "d"}])
    await resource.update("c", {"n": value})
    await resource.replace("d", {"n": value})
    for name in "abcd":
        assert ids(await resource.query({"n": 1.5})) == list("abcd")
        await resource.update(name, {"more": name})
    values = {"n": value}
    assert ids(await resource.list(partition="by_n", partition_values=values)) == list("abcd")
    assert await count_entries(database) == 4


async def test_records_stay_when_their_expiry_is_dropped(fleet: Fleet) -> None:
    """And the index is removed; a partition of the same name is another one."""
    one, other = await fleet.start(), await fleet.start()
    rule = ExpiryRule(field="at")
    resource = await one.define_resource("r", rules=[rule])
    await one.create_resource("r", partitions={"expiry": "region"})
    await resource.insert({"id": "a", "at": 1, **EU})
    await other.list_resources()
    await one.drop_expiry("r")
    assert one.resource("r").definition.expiry is None
    with pytest.raises(NotFound, match="expiry of r"):
        await one.drop_expiry("r")
    await fleet.finish(one)
    assert await count_entries(one) == 1
    fleet.clock.move(DEFINITION_AGE + 1)
    await other.resource("r").insert({"id": "b", "at": 1, **EU})
    assert await count_entries(one) == 2
    assert ids(await other.resource("r").query(EU)) == ["a", "b"]


async def test_a_dropped_partition_leaves_no_entries(fleet: Fleet) -> None:
    """Others stay; a process that has used it finds all records all the time."""
    one, other = await fleet.start(), await fleet.start()
    partitions = {**BY_REGION, "by_city": "city"}
    resource = await one.create_resource("r", partitions=partitions)
    await resource.insert_many([{"id": name, "city": "x", **EU} for name in "abc"])
    await other.list_resources()
    dropped = one.resource("r").definition.find_index("partition", "by_region")
    assert dropped is not None
    await one.drop_partition("r", "by_region")
    await resource.insert({"id": "d", "city": "x", **EU})
    assert ids(await other.resource("r").query(EU)) == list("abcd")
    with pytest.raises(Invalid, match="partition is not one of r"):
        await resource.list(partition="by_region", partition_values=EU)
    with pytest.raises(NotFound):
        await one.drop_partition("r", "by_region")
    await fleet.finish(one)
    assert await list_keys(one, f"index/r/{dropped.key}/") == []
    assert await count_entries(one) == 4
    fleet.clock.move(DEFINITION_AGE + 1)
    for process in (one, other):
        assert process.resource("r").name == "r"
        assert ids(await process.resource("r").query(EU)) == list("abcd")
        assert ids(await process.resource("r").query({"city": "x"})) == list("abcd")
    # It can be added again.
    await one.create_resource("r", partitions=BY_REGION)
    await fleet.finish(one)
    await check_region(one.resource("r"), list("abcd"))


async def test_a_reader_that_stood_still_while_its_index_was_retired_finds_all(
    fleet: Fleet,
) -> None:
    """It stands between the definition and the entries, until these are gone."""
    reader, writer = await fleet.start(), await fleet.start()
    await writer.create_resource("r", partitions=BY_REGION)
    await writer.resource("r").insert_many([{"id": name, **EU} for name in "abc"])
    await reader.list_resources()
    store = fleet.store_of(reader)
    stands = asyncio.Event()

    async def stand(call: str) -> None:
        if call == "heads":
            store.before = None
            stands.set()
            await go_on.wait()

    go_on = asyncio.Event()
    store.before = stand
    reading = asyncio.create_task(reader.resource("r").query(EU))
    await stands.wait()
    await writer.drop_partition("r", "by_region")
    await fleet.finish(writer)
    await writer.resource("r").insert({"id": "d", **EU})
    go_on.set()
    assert ids(await reading) == list("abcd")


async def test_a_writer_that_stood_still_while_a_partition_was_added_keeps_it(
    fleet: Fleet,
) -> None:
    """Where entries are requests of their own, it looks again before it writes the record."""
    old, new = await fleet.start(SeparateStore), await fleet.start()
    await new.create_resource("r", partitions=BY_REGION)
    await old.list_resources()
    store = fleet.store_of(old)
    stands, go_on = asyncio.Event(), asyncio.Event()

    async def stand(call: str) -> None:
        if call == "write":
            store.before = None
            stands.set()
            await go_on.wait()

    store.before = stand
    writing = asyncio.create_task(old.resource("r").insert({"id": "a", "city": "x", **EU}))
    await stands.wait()
    await new.create_resource("r", partitions={"by_city": "city"})
    await fleet.finish(new)
    go_on.set()
    await writing
    assert ids(await new.resource("r").query({"city": "x"})) == ["a"]
    assert ids(await new.resource("r").query(EU)) == ["a"]


class SeparateStore(CountingStore):
    """A store whose batches are not atomic."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_atomic = False


async def test_a_resource_that_was_dropped_and_created_again_has_all_records(
    fleet: Fleet,
) -> None:
    """Also those of a process that still knows the old definition, without partitions."""
    old, new = await fleet.start(), await fleet.start()
    await old.create_resource("r")
    await new.list_resources()
    await new.drop_resource("r")
    await new.create_resource("r", partitions=BY_REGION)
    await old.resource("r").insert({"id": "a", **EU})
    await new.resource("r").insert({"id": "b", **EU})
    await check_region(new.resource("r"), ["a", "b"])
    await fleet.finish(new)
    await check_region(new.resource("r"), ["a", "b"])
    fleet.clock.move(DEFINITION_AGE + 1)
    await check_region(old.resource("r"), ["a", "b"])


async def test_records_that_are_there_before_the_definition_are_found(fleet: Fleet) -> None:
    """A process that did not notice the drop may have written them long ago."""
    old, new = await fleet.start(), await fleet.start()
    await old.create_resource("r")
    await new.list_resources()
    await new.drop_resource("r")
    await old.resource("r").insert({"id": "a", **EU})
    await new.store.drop(["resource/r"])
    created = await new.create_resource("r", partitions=BY_REGION)
    await check_region(created, ["a"])
    await fleet.finish(new)
    await check_region(created, ["a"])


async def test_a_dropped_resource_leaves_no_entries(fleet: Fleet) -> None:
    """Neither of its indexes nor of former ones, nor notes of an unfinished backfill."""
    database = await fleet.start()
    resource = await database.create_resource("r", partitions={**BY_REGION, "by_city": "city"})
    await resource.insert_many([{"id": name, "city": "x", **EU} for name in "abc"])
    await database.drop_partition("r", "by_region")
    await database.create_resource("r", partitions={"by_n": "n"})
    keys = resource.definition.index_keys
    assert len(keys) == 3
    assert await count_entries(database) == 6
    await database.drop_resource("r")
    for key in keys:
        assert await list_keys(database, f"index/r/{key}/") == []
    assert await list_notes(database) == []
    assert await list_keys(database, "data/r/") == []


async def test_a_drop_that_fails_leaves_its_backfill_running(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its new partition would never be ready."""

    async def refuse(*_: object) -> None:
        raise Unavailable("store", "away")

    database = await fleet.start()
    await (await database.create_resource("r")).insert({"id": "a", **EU})
    ready: list[str] = []
    database.on("resource:index-ready", lambda event: ready.append(event.index))
    await database.create_resource("r", partitions=BY_REGION)
    with monkeypatch.context() as patch:
        patch.setattr(ResourceRegistry, "drop", refuse)
        with pytest.raises(Unavailable):
            await database.drop_resource("r")
    await fleet.pass_until(lambda: ready)
    await check_region(database.resource("r"), ["a"])


async def test_entries_of_late_writers_into_a_dropped_resource_are_removed_by_the_cleanup(
    fleet: Fleet,
) -> None:
    """Two hours later, when nobody can write by the old definition."""
    database = await fleet.start()
    keys: list[str] = []
    # It is dropped several times, each time under the eyes of another late writer.
    for name in "ab":
        late = await fleet.start()
        await database.create_resource("r", partitions=BY_REGION)
        await late.list_resources()
        keys.append(late.resource("r").definition.indexes[0].key)
        await database.drop_resource("r")
        await late.resource("r").insert({"id": name, **EU})

    async def count_left() -> list[int]:
        return [len(await list_keys(database, f"index/r/{key}/")) for key in keys]

    assert await count_left() == [1, 1]
    fleet.clock.move(BURIAL_AGE)
    await database.tidy()
    assert await count_left() == [1, 1]
    fleet.clock.move(BURIAL_AGE + 1)
    await database.tidy()
    assert await count_left() == [0, 0]
    assert await list_keys(database, "dropped/") == []


async def test_a_backfill_goes_on_where_another_process_has_stopped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash it neither waits again nor reads again what was done."""
    monkeypatch.setattr(backfill_module, "_PAGE", 3)
    one = await fleet.start()
    await one.create_resource("r")
    await one.resource("r").insert_many([{"id": f"{i:02d}", **EU} for i in range(20)])
    await one.create_resource("r", partitions=BY_REGION)
    store = fleet.store_of(one)
    died = asyncio.Event()

    async def die(call: str) -> None:
        if call == "scan" and store.calls["scan"] > 3:
            died.set()
            await asyncio.Event().wait()

    store.calls.clear()
    store.before = die
    await fleet.pass_until(died.is_set)
    await one.disconnect()
    two = await fleet.start()
    done: list[int] = []
    two.on("resource:index-progress", lambda event: done.append(event.done))
    store = fleet.store_of(two)
    store.calls.clear()
    # The clock stands still: who waited would never end.
    await asyncio.wait_for(two.backfill("r"), 60)
    assert done == [12, 15, 18, 20]
    assert store.calls["scan"] == 4
    await check_region(two.resource("r"), [f"{i:02d}" for i in range(20)])


async def test_a_process_that_comes_later_waits_only_for_the_rest(fleet: Fleet) -> None:
    """By the store's clock, whatever its own says. So processes may live for seconds only."""
    one = await fleet.start()
    delay = BUILD_DELAY if one.store.is_atomic else LATE_BUILD_DELAY
    await (await one.create_resource("r")).insert({"id": "a", **EU})
    began = time.monotonic()
    await one.create_resource("r", partitions=BY_REGION)
    sleeps = fleet.clock.sleeps
    await until(lambda: sleeps[delay], "the first process waits")
    waited = time.monotonic()
    await one.disconnect()
    # Servers have clocks of their own, which nobody moves.
    await until(lambda: time.monotonic() - waited > 3.2, "three seconds have passed")
    sleeps.clear()
    two = await fleet.start()
    work = asyncio.create_task(two.backfill("r"))
    await until(lambda: sleeps, "the second process waits")
    (rest,) = sleeps
    assert delay - (time.monotonic() - began) - 0.1 <= rest <= delay - 2
    await fleet.finish_all(work)
    await check_region(two.resource("r"), ["a"])
    assert await list_notes(two) == []


async def test_an_index_that_is_retired_later_is_waited_for_from_then_on(fleet: Fleet) -> None:
    """The time since it was added does not count for those who read it."""
    one = await fleet.start()
    delay = BUILD_DELAY if one.store.is_atomic else LATE_BUILD_DELAY
    await (await one.create_resource("r")).insert({"id": "a", **EU})
    await one.create_resource("r", partitions=BY_REGION)
    sleeps = fleet.clock.sleeps
    await until(lambda: sleeps[delay], "it waits")
    (note,) = await one.store.scan(NOTES)
    assert note.value == {"state": "new"}
    await one.drop_partition("r", "by_region")
    work = asyncio.create_task(one.backfill("r"))
    await until(lambda: sleeps[delay] == 2, "it waits for as long again")
    (note,) = await one.store.scan(NOTES)
    assert note.value == {"state": "retired 1"}
    await fleet.finish_all(work)
    assert await list_notes(one) == []


async def test_two_processes_may_backfill_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the work, and the result is complete."""
    monkeypatch.setattr(backfill_module, "_PAGE", 3)
    one, two = await fleet.start(), await fleet.start()
    await one.create_resource("r")
    await one.resource("r").insert_many([{"id": f"{i:02d}", **EU} for i in range(20)])
    await one.create_resource("r", partitions=BY_REGION)
    await fleet.finish_all(
        asyncio.create_task(one.backfill("r")), asyncio.create_task(two.backfill("r"))
    )
    assert await count_entries(one) == 20
    for process in (one, two):
        await check_region(process.resource("r"), [f"{i:02d}" for i in range(20)])

    async def has_no_notes() -> bool:
        return await list_notes(one) == []

    # The work that began with the resource goes on in the background, and ends likewise.
    await until(has_no_notes, "the last one has removed its note")


async def test_notes_on_a_backfill_may_be_written_again_after_it_has_ended(fleet: Fleet) -> None:
    """So they are deleted, not dropped, and cleanups bury them."""
    buried: list[str] = []

    class BuryingStore(CountingStore):
        async def bury(
            self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000
        ) -> int:
            buried.append(prefix)
            return await super().bury(prefix, older_than=older_than, limit=limit)

    database = await fleet.start(BuryingStore)
    await (await database.create_resource("r")).insert({"id": "a", **EU})
    await database.create_resource("r", partitions=BY_REGION)
    await fleet.finish(database)
    (index,) = database.resource("r").definition.indexes
    keys = [progress_key(index.key), since_key(index.key)]
    assert await list_notes(database) == []
    first, since = await database.store.get_many(keys, tombstones=True)
    assert (first and first.deleted, since and since.deleted) == (True, True)
    await database.backfill("r", again=True)
    assert await list_notes(database) == []
    again = await database.store.get(keys[0], tombstones=True)
    assert first
    assert again
    assert again.deleted
    assert again.seq > first.seq
    await database.tidy()
    assert NOTES in buried


async def test_a_backfill_stops_when_its_partition_is_replaced(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would write entries that nobody removes."""
    monkeypatch.setattr(backfill_module, "_PAGE", 1)
    one, two = await fleet.start(), await fleet.start()
    await one.create_resource("r")
    await one.resource("r").insert_many([{"id": f"{i:02d}", **EU} for i in range(9)])
    await one.create_resource("r", partitions=BY_REGION)
    (index,) = one.resource("r").definition.indexes
    store = fleet.store_of(one)
    stands, go_on = asyncio.Event(), asyncio.Event()

    async def stand(call: str) -> None:
        if call == "scan" and len(await list_keys(two, f"index/r/{index.key}/")) == 3:
            store.before = None
            stands.set()
            await go_on.wait()

    store.before = stand
    work = asyncio.create_task(one.backfill("r"))
    await fleet.pass_until(stands.is_set)
    await two.create_resource("r", partitions={"by_region": {"fields": {"region": "date"}}})
    go_on.set()
    await fleet.finish_all(work)
    await fleet.finish(two)
    assert await list_keys(two, f"index/r/{index.key}/") == []
    assert await list_notes(two) == []
    assert await count_entries(two) == 9
    await check_region(two.resource("r"), [f"{i:02d}" for i in range(9)])


async def test_a_store_that_fails_during_a_backfill_does_not_fail_the_database(
    fleet: Fleet,
) -> None:
    """It is tried again, whether the store was away or an outcome is unknown."""
    troubles = iter(["away", "unknown", "unknown"])

    class BadStore(CountingStore):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if changes[0].key.startswith(("backfill/", "index/")):
                match next(troubles, ""):
                    case "away":
                        raise Unavailable(self.name, "away")
                    case "unknown":
                        return [Unknown("lost") for _ in changes]
            return await super().write(changes)

    database = await fleet.start(BadStore)
    await database.create_resource("r")
    await database.resource("r").insert({"id": "a", **EU})
    ready: list[str] = []
    database.on("resource:index-ready", lambda event: ready.append(event.index))
    await database.create_resource("r", partitions=BY_REGION)
    began = fleet.clock.mono_seconds
    await fleet.pass_until(lambda: ready)
    assert list(troubles) == []
    # Each time after a pause of seconds; a note whose outcome is unknown begins the wait anew.
    delay = BUILD_DELAY if database.store.is_atomic else LATE_BUILD_DELAY
    assert fleet.clock.mono_seconds - began < 2 * delay + 60
    await check_region(database.resource("r"), ["a"])


async def test_records_of_a_process_that_stood_still_are_added_again_on_request(
    fleet: Fleet,
) -> None:
    """What is not covered by itself: a record without its entry in a partition that is ready."""
    database = await fleet.start()
    resource = await database.create_resource("r", partitions=BY_REGION)
    await resource.insert({"id": "a", **EU})
    await database.store.create("data/r/b", {"id": "b", **EU})
    assert ids(await resource.query(EU)) == ["a"]
    await database.backfill("r", again=True)
    await check_region(resource, ["a", "b"])
    assert await list_notes(database) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "by_regoin"}, "partition is not one of r (got 'by_regoin'). Did you mean"),
        ({"partition": 5}, "partition is not one of r (got 5). It has by_region."),
        ({"partition": ["by_region"]}, "partition is not one of r"),
        ({"partition": "by_region"}, "partition_values must have region"),
        (
            {"partition": "by_region", "partition_values": {"city": "x"}},
            "partition_values must have region (got {'city': 'x'}). Pass {'region': …}.",
        ),
        ({"partition": "by_region", "partition_values": 5}, "partition_values must have region"),
        (
            {"partition": "by_region", "partition_values": {"region": None}},
            "partition_values must be text, numbers, True or False",
        ),
        ({"partition_values": EU}, "partition_values must come with the name of a partition"),
    ],
)
async def test_questions_about_no_partition_are_refused(
    store: Store, options: dict[str, Any], message: str
) -> None:
    """By every verb, with field, value and fix."""
    async with Database(connection=store) as database:
        resource = await database.create_resource("r", partitions=BY_REGION)
        for verb in (resource.list, resource.count, resource.page, resource.query):
            with pytest.raises(Invalid) as caught:
                await verb(**options)
            assert message in str(caught.value)


async def test_bad_partitions_write_nothing(store: Store) -> None:
    """Neither a definition nor entries; also if the records were described before."""
    async with Database(connection=store) as database:
        bad: list[Any] = [5, {"a b": "x"}, {"a": []}, {"a": "unknown"}, {"a": {"x": "string"}}]
        with pytest.raises(Invalid, match=r"partitions\.a must not contain a lone surrogate"):
            await database.create_resource("r", partitions={"a": ["x\ud800"]})
        for partitions in bad:
            with pytest.raises(Invalid, match="partitions"):
                await database.create_resource("r", {"x": "string"}, partitions=partitions)
        assert await list_keys(database, "resource/") == []
        await database.create_resource("r", {"x": "string"})
        with pytest.raises(Invalid, match=r"partitions\.a is not a field of the records \(got 'y'"):
            await database.create_resource("r", partitions={"a": "y"})
        assert database.resource("r").partitions == {}
        await database.create_resource("r", partitions={"a": "x"})
        with pytest.raises(Invalid, match="finite"):
            await database.resource("r").insert({"id": "a", "x": "y", "n": float("nan")})
        assert await count_entries(database) == 0


async def test_names_that_are_not_text_are_refused(store: Store) -> None:
    """By every call that takes the name of a resource."""
    wrong: Any = 5
    async with Database(connection=store) as database:
        for call in (
            database.backfill(wrong),
            database.drop_partition(wrong, "by_region"),
            database.drop_expiry(wrong),
            database.drop_resource(wrong),
        ):
            with pytest.raises(Invalid, match=r"name must be text \(got 5\)"):
                await call
        await database.create_resource("r", partitions=BY_REGION)
        with pytest.raises(NotFound, match="by_region"):
            await database.drop_partition("r", wrong)


def test_a_backfill_waits_longer_than_a_definition_is_used() -> None:
    """And longer than a write takes: two settled requests after each other."""
    assert BUILD_DELAY > DEFINITION_AGE + 2 * 30
    assert LATE_BUILD_DELAY >= BUILD_DELAY + LATEST_ARRIVAL


async def test_a_backfill_waits_for_requests_that_arrive_late(fleet: Fleet) -> None:
    """On a store whose requests do; in the others each happens at one moment."""
    database = await fleet.start()
    await (await database.create_resource("r")).insert({"id": "a", **EU})
    await database.create_resource("r", partitions=BY_REGION)
    delay = BUILD_DELAY if database.store.is_atomic else LATE_BUILD_DELAY
    work = asyncio.create_task(database.backfill("r"))
    for _ in range(10):
        await fleet.pass_time(delay / 10 - 0.1)
    assert await count_entries(database) == 0
    await fleet.finish_all(work)
    assert await count_entries(database) == 1
