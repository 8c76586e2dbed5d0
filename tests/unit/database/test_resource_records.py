"""The records of a resource: their times, and the definition by which they are written."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Database, Events, Invalid, NewerFormat
from jobsync.database.definition import KNOWN_FORMAT
from jobsync.database.resource_records import DEFINITION_AGE, _IndexesChanged
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

T = TypeVar("T")


class CountingStore(StoreDecorator):
    """Counts requests by name; each takes a turn of the loop."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: Counter[str] = Counter()

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        del sent
        self.calls[call] += 1
        await asyncio.sleep(0)
        return await work()


def make_components(clock: FakeClock) -> Components:
    """Return components with a clock that the test controls."""
    return Components(clock=clock, randomness=SeededRandomness(3), events=Events())


async def test_times_have_milliseconds(clock: FakeClock) -> None:
    """Of a new record, of a change, and of a batch; a change keeps when it was created."""
    clock.wall_seconds = 1_700_000_000.123456
    async with Database("memory://", components=make_components(clock)) as database:
        things = await database.create_resource("things")
        one = await things.insert({"id": "a"})
        (two,) = await things.insert_many([{"id": "b"}])
        first = 1_700_000_000.123
        assert [(each["_created_at"], each["_updated_at"]) for each in (one, two)] == [
            (first, first)
        ] * 2
        clock.wall_seconds = 1_700_000_001.0006
        changed = [await things.update("a", {}), await things.replace("b", {})]
        changed.append(await things.upsert({"id": "a"}))
        assert [(each["_created_at"], each["_updated_at"]) for each in changed] == [
            (first, 1_700_000_001.001)
        ] * 3


@pytest.mark.parametrize("age", [DEFINITION_AGE, DEFINITION_AGE + 0.1])
async def test_one_of_several_writers_reads_an_old_definition_again(
    clock: FakeClock, age: float
) -> None:
    """The others wait for it; one that is not old is not read."""
    store = CountingStore()
    async with Database(connection=store, components=make_components(clock)) as database:
        things = await database.create_resource("things")
        clock.mono_seconds += age
        store.calls.clear()
        await asyncio.gather(*(things.insert({"id": str(n)}) for n in range(5)))
        reads = int(age > DEFINITION_AGE)
        assert (store.calls["get"], store.calls["write"]) == (reads, 5)
        await things.insert({})
        assert store.calls["get"] == reads


@pytest.mark.parametrize(
    "where",
    [
        {"_version": "x"},
        {"_version": {"$gt": "x"}},
        {"_version": {"$exists": True}},
        {"_version.part": "x"},
        {"$not": {"_version": "x"}},
        {"$and": [{"a": 1}, {"_version": "x"}]},
        {"$or": [{"a": 1}, {"$not": {"$or": [{"b": 2}, {"_version": "x"}]}}]},
        {"a": 1, "_version": "x"},
    ],
)
async def test_no_question_can_be_about_the_version(where: dict[str, Any]) -> None:
    """However deep it is; the store keeps it elsewhere, so nothing would be found."""
    async with Database("memory://") as database:
        things = await database.create_resource("things")
        for verb in (things.query, things.count, things.page):
            with pytest.raises(Invalid, match="cannot use this field"):
                await verb(where)
        assert await things.query({"version": "x", "a._version": "x"}) == []


async def test_a_writer_stops_at_a_definition_of_a_newer_format() -> None:
    """Also if it has come between the look at the definition and the write."""
    async with Database("memory://") as database:
        things = await database.create_resource("things", partitions={"by": ["a"]})
        records, definition = things.records, things.definition
        await records._confirm(definition.kept_indexes)
        with pytest.raises(_IndexesChanged):
            await records._confirm(())
        newer = msgspec.structs.replace(definition, format=KNOWN_FORMAT + 1)
        records.set_definition(newer, database.components.clock.mono())
        with pytest.raises(_IndexesChanged):
            await records._confirm(definition.kept_indexes)
        with pytest.raises(NewerFormat):
            await things.insert({"a": 1})
