"""The time of day of a store, as a node extrapolates it."""

import pytest
from chance import FakeClock

from jobsync.components import Components
from jobsync.core.clock import Wall
from jobsync.errors import Unavailable
from jobsync.jobs.store_clock import StoreClock
from jobsync.stores.memory import MemoryStore

SERVER = 5_000.0


class ServedStore(MemoryStore):
    """A store whose clock a test sets; it counts how often that is read."""

    seconds: float | None = SERVER
    reads = 0
    is_down = False

    async def now(self) -> Wall | None:
        if self.is_down:
            raise Unavailable("the store", "it does not answer", "wait")
        self.reads += 1
        return None if self.seconds is None else Wall(self.seconds)


@pytest.fixture
def machine() -> FakeClock:
    """This machine's clock."""
    return FakeClock()


@pytest.fixture
def store() -> ServedStore:
    """A store in memory."""
    return ServedStore(components=Components.system())


async def test_the_time_goes_on_from_the_last_reading(
    machine: FakeClock, store: ServedStore
) -> None:
    """Each time that it is read; steps of this machine's wall clock have no effect."""
    clock = StoreClock(store, machine)
    for reading in (SERVER, SERVER + 1000.0, SERVER - 50.0):
        store.seconds = reading
        machine.mono_seconds += 7.0
        assert await clock.read() == clock.now == reading
        assert clock.is_shared
        start = machine.mono_seconds
        for elapsed in (0.0, 2.5, 3600.0):
            machine.mono_seconds = start + elapsed
            machine.wall_seconds -= 86_400.0
            assert clock.now == reading + elapsed


async def test_it_is_read_again_if_that_was_more_than_a_minute_ago(
    machine: FakeClock, store: ServedStore
) -> None:
    """Counted from the last reading; if the store does not answer, the last one counts on."""
    clock = StoreClock(store, machine)
    await clock.read()
    for reads in (1, 2, 3):
        assert store.reads == reads
        machine.mono_seconds += 60.0
        await clock.refresh()
        assert store.reads == reads
        machine.mono_seconds += 0.5
        before = clock.now
        store.is_down = True
        with pytest.raises(Unavailable):
            await clock.refresh()
        assert clock.now == before
        store.is_down = False
        await clock.refresh()
        assert clock.now == SERVER


async def test_without_a_clock_of_the_store_this_machines_counts(
    machine: FakeClock, store: ServedStore
) -> None:
    """Before the first reading, and where the store has none."""
    clock = StoreClock(store, machine)
    assert (clock.now, clock.is_shared) == (machine.wall_seconds, False)
    store.seconds = None
    assert await clock.read() == machine.wall_seconds
    machine.wall_seconds += 500.0
    assert (clock.now, clock.is_shared) == (machine.wall_seconds, False)
