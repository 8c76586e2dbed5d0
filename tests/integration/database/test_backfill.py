"""Backfills of several processes: each index waits for itself, and no note is left for long."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest
from chance import SeededRandomness, StandingClock
from waiting import until

from jobsync import Components, Database, Events, JobsyncError, Put, Store, Unavailable
from jobsync.database.backfill import BUILD_DELAY
from jobsync.database.definition import KNOWN_FORMAT, IndexState
from jobsync.database.index_notes import NOTES, progress_key, since_key
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.paging import drop_all

T = TypeVar("T")

HOUR = 3600.0


class SlowStore(StoreDecorator):
    """Lets its process stand still before a request, and remembers what it writes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.written: list[str] = []
        self.is_standing = False
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Stand still, then call."""
        del call, sent
        self.is_standing = not self.go_on.is_set()
        await self.go_on.wait()
        return await work()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Remember what is written."""
        outcomes = await super().write(changes)
        self.written += [change.key for change in changes]
        return outcomes


class Machine:
    """Starts processes, on one store and by one clock."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.store = MemoryStore(components=self._make_components(0))
        self._open: list[Database] = []

    def _make_components(self, seed: int) -> Components:
        return Components(clock=self.clock, randomness=SeededRandomness(seed), events=Events())

    async def start(self, store: Store | None = None) -> Database:
        """Start a process."""
        components = self._make_components(len(self._open) + 1)
        database = Database(connection=store or self.store, components=components)
        self._open.append(await database.connect())
        return database

    async def stop(self) -> None:
        """Stop all processes."""
        for database in self._open:
            if database.is_connected:
                await database.disconnect()

    def has_wait(self, seconds: float) -> bool:
        """Whether anybody waits, or has waited, for so long."""
        return any(abs(sleep - seconds) < 0.01 for sleep in self.clock.sleeps)

    async def list_notes(self) -> list[str]:
        """Return the keys of all notes."""
        return [head.key for head in await self.store.heads(NOTES)]


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    """A machine with a resource that has records."""
    machine = Machine()
    database = await machine.start()
    resource = await database.create_resource("r")
    await resource.insert_many([{"id": name, "a": 1, "b": 2, "c": 3} for name in "xyz"])
    await database.disconnect()
    yield machine
    await machine.stop()


async def find_index(database: Database, name: str) -> IndexState:
    """Return an index of the resource, as it is stored."""
    await database.list_resources()
    index = database.resource("r").definition.find_index("partition", name)
    assert index
    return index


async def test_a_partition_that_changes_in_every_process_delays_no_other(
    machine: Machine,
) -> None:
    """Found: no process lived long enough, because all changes had one wait."""
    step = BUILD_DELAY * 0.4
    for life, field in enumerate("bcb"):
        database = await machine.start()
        await database.create_resource("r", partitions={"main": ["a"], "flips": [field]})
        await until(partial(machine.has_wait, BUILD_DELAY - life * step), "it waits")
        assert not (await find_index(database, "main")).is_ready
        await database.disconnect()
        machine.clock.move(step)
    database = await machine.start()
    ready: list[str] = []
    database.on("resource:index-ready", lambda event: ready.append(event.index))
    await database.create_resource("r", partitions={"main": ["a"], "flips": ["c"]})
    await until(lambda: ready, "one is ready")
    assert ready == ["main"]
    assert (await find_index(database, "main")).is_ready
    assert not (await find_index(database, "flips")).is_ready


async def test_a_process_works_on_a_resource_once_at_a_time(machine: Machine) -> None:
    """However often it defines the resource, and again after that work was ended."""
    database = await machine.start()
    supervisor = database._get_connection().supervisor
    for field in "abc":
        for _ in range(2):
            await database.create_resource("r", partitions={"main": [field]})
            await asyncio.sleep(0)
            assert supervisor.list_running() == ["backfill of r"]
        await database._backfill.stop("r")
        assert supervisor.list_running() == []


async def test_an_index_that_another_process_has_completed_gets_no_notes(
    machine: Machine,
) -> None:
    """Found: a slower process noted its progress again, and died."""
    store = SlowStore(machine.store)
    fast, slow = await machine.start(), await machine.start(store)
    await fast.create_resource("r", partitions={"main": ["a"]})
    work = asyncio.create_task(slow.backfill("r"))
    await until(lambda: machine.clock.sleeps.total() == 2, "both wait")
    store.go_on.clear()
    machine.clock.move(BUILD_DELAY)
    await until(lambda: store.is_standing, "the slower one stands")
    await fast.backfill("r")
    store.written.clear()
    store.go_on.set()
    await work
    assert (await find_index(slow, "main")).is_ready
    assert store.written == []
    assert await machine.list_notes() == []


async def test_records_are_added_again_from_the_first_on(machine: Machine) -> None:
    """Whatever an earlier repair has noted that did not end."""
    database = await machine.start()
    resource = await database.create_resource("r", partitions={"main": ["a"]})
    await until(lambda: machine.clock.sleeps.total() == 1, "it waits")
    machine.clock.move(BUILD_DELAY)
    await database.backfill("r")
    index = await find_index(database, "main")
    await drop_all(machine.store, f"index/r/{index.key}/")
    await machine.store.create(progress_key(f"{index.key}0"), {})
    (note,) = await machine.store.get_many([progress_key(index.key)], tombstones=True)
    await machine.store.write([Put(progress_key(index.key), {"after": "data/r/y"}, note)])
    await database.backfill("r", again=True)
    found = await resource.list(partition="main", partition_values={"a": 1})
    assert [each["id"] for each in found] == ["x", "y", "z"]
    assert await machine.list_notes() == [progress_key(f"{index.key}0")]


async def leave_notes(machine: Machine, *indexes: str) -> list[str]:
    """Note that indexes are built, as a process does that dies then; return the keys."""
    keys = [key for index in indexes for key in (progress_key(index), since_key(index))]
    found = await machine.store.get_many(keys, tombstones=True)
    await machine.store.write(
        [Put(key, {"done": 1}, base) for key, base in zip(keys, found, strict=True)]
    )
    return sorted(keys)


async def test_notes_that_were_left_on_settled_indexes_are_removed_after_an_hour(
    machine: Machine,
) -> None:
    """And those on indexes that are gone; not those on indexes that somebody works on."""
    database = await machine.start()
    await database.create_resource("r", partitions={"ready": ["a"], "former": ["b"]})
    await until(machine.clock.sleeps.total, "it waits")
    machine.clock.move(BUILD_DELAY)
    await database.backfill("r")
    ready, former = [await find_index(database, name) for name in ("ready", "former")]
    await database.drop_partition("r", "former")
    await database.create_resource("r", partitions={"new": ["c"]})
    await database.disconnect()
    cleaner = await machine.start()
    new = await find_index(cleaner, "new")
    left = await leave_notes(machine, ready.key, "gone.1.x")
    used = await leave_notes(machine, former.key, new.key)
    machine.clock.move(HOUR)
    await cleaner.tidy()
    assert await machine.list_notes() == sorted([*left, *used])
    machine.clock.move(1)
    await cleaner.tidy()
    assert await machine.list_notes() == used


async def test_notes_stay_while_newer_code_has_changed_a_definition(machine: Machine) -> None:
    """Which indexes it works on is not known."""
    database = await machine.start()
    definition = await machine.store.get("resource/r")
    assert definition
    await machine.store.put(definition, definition.value, format=KNOWN_FORMAT + 1)
    left = await leave_notes(machine, "main.1.x")
    machine.clock.move(HOUR + 1)
    await database.tidy()
    assert await machine.list_notes() == left


class RefusingStore(StoreDecorator):
    """Writes nothing while it is told so."""

    is_silent = False

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, or say that the store does not answer."""
        if self.is_silent:
            raise Unavailable(self.name, "silent")
        return await super().write(changes)

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove, or say that the store does not answer."""
        if self.is_silent:
            raise Unavailable(self.name, "silent")
        await super().drop(keys)


async def test_what_a_dropped_partition_has_left_is_removed_by_itself(machine: Machine) -> None:
    """Nobody has to call anything, and nothing else is removed."""
    database = await machine.start()
    await database.create_resource("r", partitions={"kept": ["a"], "former": ["b"]})
    await until(machine.clock.sleeps.total, "it waits")
    machine.clock.move(BUILD_DELAY)
    await database.backfill("r")
    kept, former = [await find_index(database, name) for name in ("kept", "former")]

    async def count(index: IndexState) -> int:
        machine.clock.move(1)
        return len(await machine.store.heads(f"index/r/{index.key}/"))

    assert [await count(kept), await count(former)] == [3, 3]
    await database.drop_partition("r", "former")

    async def is_empty() -> bool:
        machine.clock.move(BUILD_DELAY)
        return await count(former) == 0

    await until(is_empty, "its entries are removed", timeout=20)
    assert await count(kept) == 3


async def test_a_resource_that_could_not_be_dropped_completes_its_partitions(
    machine: Machine,
) -> None:
    """As if nobody had tried to drop it: in the background."""
    store = RefusingStore(machine.store)
    database = await machine.start(store)
    await database.create_resource("r", partitions={"main": ["a"]})
    await until(machine.clock.sleeps.total, "it waits")
    store.is_silent = True
    with pytest.raises(JobsyncError):
        await database.drop_resource("r")
    store.is_silent = False

    async def is_ready() -> bool:
        machine.clock.move(BUILD_DELAY)
        return (await find_index(database, "main")).is_ready

    await until(is_ready, "it is ready", timeout=20)
    assert await database.resource("r").count() == 3
