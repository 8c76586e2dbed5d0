"""Old tombstones are buried by one of all processes, in a few requests."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Components,
    CoordinatorPlugin,
    Database,
    Event,
    Events,
    Plugin,
    Put,
    Unavailable,
)
from jobsync.database import cleanup as cleanup_module
from jobsync.database.cleanup import LAST_CLEANUPS, DatabaseTidied
from jobsync.database.index_notes import NOTES, since_key
from jobsync.database.supervisor import WorkPostponed
from jobsync.errors import Misconfigured
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import S3_TARIFF, Meter, MeteredStore
from jobsync.testing.world import World

HOUR = 3600.0


class SweeperPlugin(CoordinatorPlugin):
    """Has storage and a session."""


class Bucket(MemoryStore):
    """A store whose requests are billed."""

    is_billed = True


def tombstones(store: MemoryStore) -> list[str]:
    """Return the keys of tombstones that are not buried."""
    return [key for key, record in store._data.records.items() if record.text is None]


async def fill(database: Database) -> None:
    """Write and delete records, a resource and plugin values."""
    tasks = await database.create_resource("tasks", {"n": "number"})
    await tasks.insert_many([{"id": str(n), "n": n} for n in range(5)])
    await tasks.delete_many(["1", "3"])
    old = await database.create_resource("old")
    await old.insert({"id": "x"})
    await database.drop_resource("old")
    storage = database.open_storage("sweeper")
    await storage.set("short", 1, ttl=60)
    await storage.set("long", 1)
    await storage.set("gone", 1)
    await storage.delete("gone")


def test_one_of_three_processes_buries_tombstones_every_hour() -> None:
    """Together they check once an hour, and no tombstone stays for long."""
    world = World(1)
    store = MemoryStore(components=world.components)
    emitted: list[Event] = []

    async def live(database: Database) -> None:
        async with database:
            await database.use_plugin(SweeperPlugin())
            await asyncio.Event().wait()

    async def story() -> None:
        nodes = [world.node(f"node-{number}") for number in range(3)]
        databases = [Database(connection=store, components=node.components) for node in nodes]
        for node, database in zip(nodes, databases, strict=True):
            database.on("db:tidied", emitted.append)
            node.run(live(database))
        async with Database(connection=store, components=world.components) as database:
            await fill(database)
            assert len(tombstones(store)) == 5
            await asyncio.sleep(2 * HOUR + 60)
            assert tombstones(store) == ["plugin/sweeper/default/short"]
            await asyncio.sleep(3 * HOUR)
            # Including values swept by now, and the note about the dropped resource.
            assert tombstones(store) == []
            assert await database.list_resources() == ["tasks"]
            assert await database.resources.tasks.list_ids() == ["0", "2", "4"]
            assert await database.open_storage("sweeper").list() == ["long"]
            assert await store.scan("dropped/") == []
        assert 4 <= len(emitted) <= 6
        assert sum(event["buried"] for event in emitted) == 7
        assert sum(event["swept"] for event in emitted) == 1

    world.run(story)


def test_cleanup_on_object_stores_costs_few_requests_a_day() -> None:
    """What four processes spend in a week, by S3's tariff and without heartbeats."""
    world = World(2)
    store = Bucket(components=world.components)
    meters = [Meter(S3_TARIFF) for _ in range(4)]

    async def story() -> None:
        databases = []
        for number, meter in enumerate(meters):
            node = world.node(f"node-{number}")
            metered = MeteredStore(store, meter, node.clock)
            database = Database(connection=metered, components=node.components)
            databases.append(database)
            await database.connect()
        await fill(databases[0])
        before = sum(meter.requests for meter in meters)
        tasks = [
            world.nodes[f"node-{n}"].run(database._cleanup.run())
            for n, database in enumerate(databases)
        ]
        days = 7
        await asyncio.sleep(days * 24 * HOUR)
        spent = sum(meter.requests for meter in meters) - before
        for task in tasks:
            task.cancel()
        assert tombstones(store) == []
        # Each process checks what is due, and one of them cleans: one listing per prefix, two
        # for a plugin's and for notes on indexes; each tombstone is read and deleted once.
        checks, prefixes, twice = 3 * len(databases), 6, 1
        assert spent <= days * (checks + prefixes + twice + 7) + 2 * 8
        for database in databases:
            await database.disconnect()

    world.run(story)


@pytest.mark.parametrize("page", [1, 2, 1000])
async def test_a_cleanup_can_be_run_on_demand(
    clock: FakeClock, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a session; tombstones younger than an hour stay. Pages make no difference."""
    monkeypatch.setattr(cleanup_module, "_PAGE", page)
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = MemoryStore(components=components)
    async with Database(connection=store, components=components) as database:
        await fill(database)
        assert await database.tidy() == DatabaseTidied(buried=0, swept=0)
        await clock.sleep(HOUR + 1)
        assert await database.tidy() == DatabaseTidied(buried=5, swept=1)
        await clock.sleep(HOUR + 1)
        assert await database.tidy() == DatabaseTidied(buried=1, swept=0)
        assert await database.resources.tasks.list_ids() == ["0", "2", "4"]


class KeepingStore(MemoryStore):
    """Cannot drop anything while it is away."""

    is_away = False

    async def drop(self, keys: Sequence[str]) -> None:
        if self.is_away:
            raise Unavailable(self.name, "away")
        await super().drop(keys)


async def test_a_dropped_resource_is_forgotten_only_when_nothing_of_it_is_left(
    clock: FakeClock,
) -> None:
    """Not as long as it may have tombstones, nor if entries of late writers cannot be removed."""
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = KeepingStore(components=components)
    note, entry = "dropped/old", "index/old/by_a.x.y/1!01a!00nonce"
    await store.create(note, {"at": clock.wall_seconds, "indexes": ["by_a.x.y"]})
    await store.create(entry, {})
    async with Database(connection=store, components=components) as database:
        for hours, is_away, is_left in ((1.5, False, True), (0.6, True, True), (0, False, False)):
            await clock.sleep(hours * HOUR)
            store.is_away = is_away
            if is_away:
                with pytest.raises(Unavailable):
                    await database.tidy()
            else:
                await database.tidy()
            found = [await store.get(key) is not None for key in (note, entry)]
            assert found == [is_left, is_left]


@pytest.mark.parametrize("note", [{"at": "yesterday"}, {"at": None}, {"at": [1]}, {}, [], "x", 1])
async def test_a_note_that_does_not_say_when_its_resource_was_dropped_is_removed(
    note: Any, clock: FakeClock
) -> None:
    """Like an old one; and all else is cleaned."""
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = MemoryStore(components=components)
    await store.create("dropped/odd", note)
    async with Database(connection=store, components=components) as database:
        await fill(database)
        await database.tidy()
        assert await store.get("dropped/odd") is None
        await clock.sleep(3 * HOUR)
        await database.tidy()
        left = tombstones(store)
        assert not [key for key in left if key.startswith("data/") or key == "dropped/odd"]


async def test_a_prefix_that_nobody_cleans_is_forgotten_after_ten_intervals(
    clock: FakeClock,
) -> None:
    """Those that were cleaned since are not: another process may know them."""
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = MemoryStore(components=components)
    now = clock.wall_seconds
    ages = {"data/new/": 0.5, "data/old/": 9.5, "data/gone/": 10.5, "resource/": 2.0}
    await store.create(LAST_CLEANUPS, {name: now - age * HOUR for name, age in ages.items()})
    async with Database(connection=store, components=components) as database:
        await database._cleanup._claim(HOUR)
    record = await store.get(LAST_CLEANUPS)
    assert record is not None
    left = {name: (now - at) / HOUR for name, at in record.value.items() if name in ages}
    assert left == {"data/new/": 0.5, "data/old/": 9.5, "resource/": 0.0}


class UnburiableStore(MemoryStore):
    """Raises an error instead of burying tombstones."""

    error: Exception | None = None

    async def bury(self, prefix: str, **options: Any) -> int:
        if self.error is not None:
            raise self.error
        return await super().bury(prefix, **options)


@pytest.mark.parametrize(
    "error",
    [Misconfigured("s3", "…", "may not delete", "allow it"), Unavailable("s3", "away")],
)
def test_a_cleanup_that_fails_is_retried_later(error: Exception) -> None:
    """An event reports it, and nothing else is affected."""
    world = World(3)
    store = UnburiableStore(components=world.components)
    emitted: list[Event] = []

    async def story() -> None:
        store.error = error
        async with Database(connection=store, components=world.components) as database:
            database.on("db:work-postponed", emitted.append)
            await database.use_plugin(SweeperPlugin())
            await fill(database)
            await asyncio.sleep(3 * HOUR)
            assert emitted
            assert {event["work"] for event in emitted} == {"cleanup"}
            if not isinstance(error, Unavailable):
                # That is not retried before the next cleanup is due.
                told = WorkPostponed(work="cleanup", error=str(error), pause=HOUR)
                assert emitted == [told] * len(emitted)
                assert len(emitted) <= 3
            assert tombstones(store)
            store.error = None
            await asyncio.sleep(4 * HOUR)
            assert tombstones(store) == []

    world.run(story)


def test_an_unreadable_or_future_cleanup_time_is_overwritten() -> None:
    """Whether it is not a time, or comes from a clock that is far ahead."""
    world = World(4)
    store = MemoryStore(components=world.components)

    async def story() -> None:
        async with Database(connection=store, components=world.components) as database:
            tidied: list[Event] = []
            database.on("db:tidied", tidied.append)
            await store.write([Put(LAST_CLEANUPS, "yesterday")])
            await database.use_plugin(SweeperPlugin())
            await asyncio.sleep(2 * HOUR)
            assert tidied
            for wrong in (9e12, "yesterday", None, [1.0], {"at": 1.0}):
                record = await store.get(LAST_CLEANUPS)
                assert record is not None
                await store.put(record, dict.fromkeys(record.value, wrong))
                tidied.clear()
                await asyncio.sleep(2 * HOUR)
                assert tidied

    world.run(story)


class RacingStore(MemoryStore):
    """Lets another process clean up first, if it is told to."""

    claimed_by_others: tuple[str, ...] | None = None
    """The prefixes that the other one claims, just before this one's write arrives."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        others = self.claimed_by_others
        if others is not None and changes[0].key == LAST_CLEANUPS:
            self.claimed_by_others = None
            base = await self.get(LAST_CLEANUPS, tombstones=True)
            await super().write([Put(LAST_CLEANUPS, dict.fromkeys(others, 0.0), base)])
        return await super().write(changes)


@pytest.mark.parametrize("others", [None, (), ("data/tasks/",)])
async def test_a_process_that_loses_the_race_cleans_nothing(
    others: tuple[str, ...] | None,
) -> None:
    """Whatever the other one has claimed: what is left is due for the next look."""
    store = RacingStore()
    async with Database(connection=store) as database:
        await fill(database)
        for is_raced in (others is not None, False):
            store.claimed_by_others = others if is_raced else None
            scope = await database._cleanup._claim(HOUR)
            assert bool(scope.prefixes) is not is_raced
            assert bool(scope.storages) is not is_raced
            assert bool(scope.dropped) is not is_raced
            if not is_raced:
                # Now it is its own, until an hour has passed.
                assert "data/tasks/" in scope.prefixes
                assert (await database._cleanup._claim(HOUR)).prefixes == []
                break


class EverywherePlugin(Plugin):
    """Stores records beside its storage."""

    slug = "everywhere"

    @property
    def prefixes(self) -> Sequence[str]:
        """Where they are."""
        return ["here/", "there/"]


async def test_a_cleanup_covers_all_that_is_created_and_deleted(clock: FakeClock) -> None:
    """Definitions, notes, records of resources that are there or dropped, and what plugins have."""
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = MemoryStore(components=components)
    plugins = [EverywherePlugin()]
    async with Database(connection=store, components=components, plugins=plugins) as database:
        await fill(database)
        expected = [
            *("resource/", "dropped/", NOTES, "data/old/", "data/tasks/"),
            *("plugin/sweeper/default/", "plugin/everywhere/default/", "here/", "there/"),
        ]
        scope = await database._cleanup._find_scope()
        assert scope.prefixes == expected
        assert [each.prefix for each in scope.storages] == expected[5:7]
        assert [*scope.dropped] == ["data/old/"]
        for prefix in scope.prefixes:
            record = await store.create(f"{prefix}a", {})
            await store.delete(record)
        await clock.sleep(HOUR + 1)
        await database.tidy()
        # That of the value that was swept just now.
        assert tombstones(store) == ["plugin/sweeper/default/short"]
        part = scope.limit_to(["here/", "data/old/", "plugin/everywhere/default/"])
        assert part.prefixes == ["data/old/", "plugin/everywhere/default/", "here/"]
        assert part.storages == scope.storages[1:]
        assert part.dropped == scope.dropped


@pytest.mark.parametrize(
    ("formats", "is_removed"),
    [([], True), ([1], True), ([1, 2], True), ([3], False), ([3, 1], False), ([1, 3], False)],
)
async def test_notes_on_indexes_stay_while_newer_code_may_work_on_them(
    clock: FakeClock, formats: Sequence[int], *, is_removed: bool
) -> None:
    """One resource of newer code is enough: it does not tell of which indexes it has notes."""
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = MemoryStore(components=components)
    for number, found in enumerate(formats):
        name = f"r{number}"
        await store.write([Put(f"resource/{name}", {"name": name}, format=found)])
    note = await store.create(since_key("by_a.x.y"), {})
    async with Database(connection=store, components=components) as database:
        for hours in (0.9, 0.2):
            await clock.sleep(hours * HOUR)
            assert await store.get(note.key) is not None
            await database.tidy()
    assert (await store.get(note.key) is None) is is_removed


@pytest.mark.parametrize(("kind", "interval"), [(MemoryStore, HOUR), (Bucket, 24 * HOUR)])
async def test_processes_that_start_together_clean_at_different_times(
    kind: type[MemoryStore], interval: float
) -> None:
    """The first time at any moment of an interval, then after each one."""
    pauses: list[float] = []

    class EndError(Exception):
        """There were enough pauses."""

    class NotingClock(FakeClock):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                raise EndError
            await super().sleep(seconds)

    class EarlyRandomness(SeededRandomness):
        def uniform(self, low: float, high: float) -> float:
            return low + 0.25 * (high - low)

    components = Components(clock=NotingClock(), randomness=EarlyRandomness(1), events=Events())
    store = kind(components=components)
    async with Database(connection=store, components=components) as database:
        with pytest.raises(EndError):
            await database._cleanup.run()
    assert pauses == [0.25 * interval, interval, interval]
