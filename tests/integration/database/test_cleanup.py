"""What was deleted is buried in time, by one of all, at a price that nobody notices."""

import asyncio
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, CoordinatorPlugin, Database, Event, Events, Put, Unavailable
from jobsync.database.cleanup import LAST_CLEANUPS, DatabaseTidied
from jobsync.errors import Misconfigured
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore
from jobsync.stores.objects.store import S3_TARIFF
from jobsync.testing.world import World

HOUR = 3600.0


class SweeperPlugin(CoordinatorPlugin):
    """Keeps something for a while, and has a session."""


class Bucket(MemoryStore):
    """As dear as a bucket."""

    is_billed = True


def tombstones(store: MemoryStore) -> list[str]:
    """Give the names of what was deleted and is not buried."""
    return [key for key, slot in store._data.records.items() if slot.text is None]


async def use(database: Database) -> None:
    """Write and delete a little of everything."""
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


def test_what_was_deleted_an_hour_ago_is_buried_by_one_of_all() -> None:
    """Three processes: together they look once an hour, and leave no tombstone for long."""
    world = World(1)
    store = MemoryStore(components=world.components)
    told: list[Event] = []

    async def live(database: Database) -> None:
        async with database:
            await database.use_plugin(SweeperPlugin())
            await asyncio.Event().wait()

    async def story() -> None:
        nodes = [world.node(f"node-{number}") for number in range(3)]
        databases = [Database(connection=store, components=node.components) for node in nodes]
        for node, database in zip(nodes, databases, strict=True):
            database.on("db:tidied", told.append)
            node.run(live(database))
        async with Database(connection=store, components=world.components) as database:
            await use(database)
            assert len(tombstones(store)) == 5
            await asyncio.sleep(2 * HOUR + 60)
            assert tombstones(store) == ["plugin/sweeper/default/short"]
            await asyncio.sleep(3 * HOUR)
            # Also what has been swept by now, and the note of the resource that was dropped.
            assert tombstones(store) == []
            assert await database.list_resources() == ["tasks"]
            assert await database.resources.tasks.list_ids() == ["0", "2", "4"]
            assert await database.open_storage("sweeper").list() == ["long"]
            assert await store.scan("dropped/") == []
        assert 4 <= len(told) <= 6
        assert sum(event["buried"] for event in told) == 7
        assert sum(event["swept"] for event in told) == 1

    world.run(story)


def test_on_objects_a_day_costs_a_handful_of_requests() -> None:
    """Counted as S3 counts, without the beats: what many processes spend in a week."""
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
        await use(databases[0])
        before = sum(meter.requests for meter in meters)
        chores = [
            world.nodes[f"node-{n}"].run(each._cleanup.run()) for n, each in enumerate(databases)
        ]
        days = 7
        await asyncio.sleep(days * 24 * HOUR)
        spent = sum(meter.requests for meter in meters) - before
        for chore in chores:
            chore.cancel()
        assert tombstones(store) == []
        # Each looks what there is, and one goes there: a listing of each place, two of a
        # plugin's; and what is buried is read and deleted once.
        looks, places = 3 * len(databases), 6
        assert spent <= days * (looks + places + 5) + 2 * 8
        for database in databases:
            await database.disconnect()

    world.run(story)


async def test_it_can_be_asked_for(clock: FakeClock) -> None:
    """Without a session too; what is younger than an hour stays."""
    components = Components(clock=clock, randomness=SeededRandomness(5), events=Events())
    store = MemoryStore(components=components)
    async with Database(connection=store, components=components) as database:
        await use(database)
        assert await database.tidy() == DatabaseTidied(buried=0, swept=0)
        await clock.sleep(HOUR + 1)
        assert await database.tidy() == DatabaseTidied(buried=5, swept=1)
        await clock.sleep(HOUR + 1)
        assert await database.tidy() == DatabaseTidied(buried=1, swept=0)
        assert await database.resources.tasks.list_ids() == ["0", "2", "4"]


class Guarded(MemoryStore):
    """Refuses to bury, or to answer."""

    trouble: Exception | None = None

    async def bury(self, prefix: str, **how: Any) -> int:
        if self.trouble is not None:
            raise self.trouble
        return await super().bury(prefix, **how)


@pytest.mark.parametrize(
    "trouble",
    [Misconfigured("s3", "…", "may not delete", "allow it"), Unavailable("s3", "away")],
)
def test_what_cannot_be_done_now_is_done_later(trouble: Exception) -> None:
    """It is told, and nothing else is the worse for it."""
    world = World(3)
    store = Guarded(components=world.components)
    told: list[Event] = []

    async def story() -> None:
        store.trouble = trouble
        async with Database(connection=store, components=world.components) as database:
            database.on("db:work-postponed", told.append)
            await database.use_plugin(SweeperPlugin())
            await use(database)
            await asyncio.sleep(3 * HOUR)
            assert told
            assert {event["work"] for event in told} == {"cleanup"}
            assert tombstones(store)
            store.trouble = None
            await asyncio.sleep(4 * HOUR)
            assert tombstones(store) == []

    world.run(story)


def test_a_turn_that_nobody_understands_is_taken() -> None:
    """Be it strange, or from a clock that is far ahead."""
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
            turn = await store.get(LAST_CLEANUPS)
            assert turn is not None
            await store.put(turn, dict.fromkeys(turn.value, 9e12))
            tidied.clear()
            await asyncio.sleep(2 * HOUR)
            assert tidied

    world.run(story)
