"""The bell of a store: each ring is a number of its own, and one that failed is made up for."""

from collections.abc import Sequence

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Record, Unavailable
from jobsync.events import Events
from jobsync.queue.pages.bell import READ_INTERVAL, RING_INTERVAL, Bell
from jobsync.stores.contract import Change, Conflicted, Outcome, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

KEY = "bell/queues"


class FailingStore(StoreDecorator):
    """A store whose next requests fail, in order."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.failures: list[str] = []
        self.reads = 0

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.reads += 1
        if self.failures[:1] == ["read"]:
            self.failures.pop()
            raise Unavailable(self.name, "a test says so")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        failure = "" if self.failures in ([], ["read"]) else self.failures.pop()
        if failure == "refused":
            raise Unavailable(self.name, "a test says so")
        if failure == "conflicted":
            return [Conflicted()] * len(changes)
        if failure == "lost":
            return [Unknown("a test says so")] * len(changes)
        outcomes = await self.inner.write(changes)
        return [Unknown("a test says so")] * len(changes) if failure == "landed" else outcomes


class Town:
    """Processes on one store, each with a bell."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=Events())
        self._memory = MemoryStore(components=components)

    def process(self) -> tuple[FailingStore, Bell]:
        """Return the store and the bell of another process."""
        store = FailingStore(self._memory)
        return store, Bell(store, self.clock)

    async def read(self) -> dict[str, int]:
        """Return the numbers as they are stored."""
        record = await self._memory.get(KEY)
        return {} if record is None else record.value


@pytest.fixture
def town() -> Town:
    """A store on which nobody has rung."""
    return Town()


async def test_a_process_rings_for_each_queue_once_in_an_interval(town: Town) -> None:
    """Those who listen look again for what was pushed silently; the next one rings."""
    _, bell = town.process()
    assert [await bell.ring("a"), await bell.ring("a"), await bell.ring("b")] == [1, None, 1]
    town.clock.mono_seconds += RING_INTERVAL - 0.01
    assert await bell.ring("a") is None
    town.clock.mono_seconds += 0.01
    assert await bell.ring("a") == 2
    assert await town.read() == {"a": 2, "b": 1}


async def test_each_ring_has_the_next_number_whoever_has_rung_before(town: Town) -> None:
    """A process that does not know of the rings of others finds out, and keeps those it has."""
    (_, first), (_, second) = town.process(), town.process()
    assert await first.ring("a") == 1
    assert await second.ring("a") == 2
    assert await second.ring("b") == 1
    town.clock.mono_seconds += RING_INTERVAL
    assert await first.ring("a") == 3
    assert await first.ring("b") == 2
    assert await town.read() == {"a": 3, "b": 2}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("failure", "arrived"),
    [("read", 0), ("refused", 0), ("lost", 0), ("landed", 1), ("conflicted", 0)],
)
async def test_after_a_ring_that_failed_the_next_push_rings(
    town: Town, failure: str, arrived: int, is_first: bool
) -> None:
    """At once, with a number that nobody has seen, be it the first of the process or a later one.

    Nobody knows whether the one that failed was heard.
    """
    store, bell = town.process()
    if not is_first:
        assert await bell.ring("a") == 1
        town.clock.mono_seconds += RING_INTERVAL
    before = await town.read()
    store.failures = [failure] * (3 if failure == "conflicted" else 1)
    rung = await bell.ring("a")
    if rung is None:
        assert await town.read() == before | ({"a": before.get("a", 0) + 1} if arrived else {})
        rung = await bell.ring("a")
    assert rung == before.get("a", 0) + arrived + 1
    assert await town.read() == before | {"a": rung}


async def test_queues_of_a_process_share_a_reading(town: Town) -> None:
    """Which is as old as one interval at most; a ring of its own is known without one."""
    store, bell = town.process()
    _, other = town.process()
    await other.ring("a")
    assert [await bell.listen("a"), await bell.listen("b"), await bell.listen("a")] == [1, 0, 1]
    assert store.reads == 1
    await other.ring("b")
    town.clock.mono_seconds += READ_INTERVAL * 0.9 - 0.01
    assert (await bell.listen("b"), store.reads) == (0, 1)
    town.clock.mono_seconds += 0.02
    assert (await bell.listen("b"), store.reads) == (1, 2)
    assert await bell.ring("b") == 2
    assert (await bell.listen("b"), store.reads) == (2, 2)
