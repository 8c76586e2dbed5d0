"""A node's name: one live process has it, and says there what it has carried out."""

from collections.abc import Iterable

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Conflict, Corrupt
from jobsync.coordination.session import SESSIONS, SessionRecord
from jobsync.core.trust import Timing
from jobsync.events import Event, Events
from jobsync.jobs.registration import (
    NameTaken,
    NodeRecord,
    Registration,
    read_node_record,
)
from jobsync.stores.memory import MemoryStore

KEY = "node/sync_/a"


class Sessions:
    """Stands in for a membership."""

    def __init__(self, worker: str, incarnation: str) -> None:
        self.worker_id = worker
        self.incarnation = incarnation
        self.watching: frozenset[str] = frozenset()
        self.missed: set[str] = set()

    def watch(self, _: str, incarnations: Iterable[str]) -> None:
        self.watching = frozenset(incarnations)

    def is_dead(self, incarnation: str) -> bool:
        return incarnation in self.missed


class Street:
    """Processes that want one name."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.store = MemoryStore(components=self.components)

    def process(self, worker: str, session: int = 1) -> tuple[Registration, NodeRecord, Sessions]:
        """Give a process's hold on the name, and what it would write there."""
        sessions = Sessions(worker, f"{worker}.{session}")
        name = Registration(self.store, self.components, sessions, KEY, {})  # type: ignore[arg-type]
        named = NodeRecord(
            name="a",
            incarnation=sessions.incarnation,
            stage="ready",
            applied=0,
            is_observer=False,
            created=0.0,
            host=f"host-of-{worker}",
            pid=17,
        )
        return name, named, sessions

    async def live(self, incarnation: str, state: str = "live") -> None:
        """Record a session."""
        life = SessionRecord(
            worker="w",
            state=state,  # type: ignore[arg-type]
            beat=1,
            timing=Timing(heartbeat=5, timeout=15),
            works=(),
            holds={},
            facts={},
        )
        base = await self.store.get(f"{SESSIONS}{incarnation}")
        value = msgspec.to_builtins(life)
        if base is None:
            await self.store.create(f"{SESSIONS}{incarnation}", value)
        else:
            await self.store.put(base, value)

    async def holder(self) -> NodeRecord:
        """Give who has the name."""
        record = await self.store.get(KEY)
        assert record is not None
        return read_node_record(record)


@pytest.fixture
def street() -> Street:
    """Nobody yet."""
    return Street()


async def test_a_living_process_keeps_its_name(street: Street) -> None:
    """Another is refused at the end of its patience, and told who has it."""
    first, named, _ = street.process("one")
    await first.take(named, until=street.clock.mono())
    await street.live("one.1")
    second, other, _ = street.process("two")
    with pytest.raises(NameTaken, match="process 17 on host-of-one"):
        await second.take(other, until=street.clock.mono())
    assert (await street.holder()).incarnation == "one.1"


@pytest.mark.parametrize("gone", ["left", "dead", "missed"])
async def test_a_name_is_free_when_its_process_is_gone(street: Street, gone: str) -> None:
    """It has left, its death is written, or its session was missed for a whole timeout."""
    first, named, _ = street.process("one")
    await first.take(named, until=street.clock.mono())
    second, other, sessions = street.process("two")
    match gone:
        case "left":
            await street.live("one.1")
            await first.update(stage="left")
        case "dead":
            await street.live("one.1", "dead")
        case _:
            sessions.missed.add("one.1")
    await second.take(other, until=street.clock.mono())
    assert (await street.holder()).incarnation == "two.1"
    assert sessions.watching == frozenset()


async def test_a_process_takes_the_name_from_an_earlier_session_of_its_own(street: Street) -> None:
    """It lost that session, though nobody has written so yet."""
    first, named, _ = street.process("one")
    await first.take(named, until=street.clock.mono())
    await street.live("one.1")
    again, renamed, _ = street.process("one", 2)
    await again.take(renamed, until=street.clock.mono())
    assert (await street.holder()).incarnation == "one.2"


async def test_what_is_told_replaces_what_was_told(street: Street) -> None:
    """Nothing is written where nothing changes; facts of newer code survive."""
    name, named, _ = street.process("one")
    await name.take(named, until=street.clock.mono())
    record = await street.store.get(KEY)
    assert record is not None
    await street.store.put(record, {**record.value, "newer": True})
    await name.update(applied=3)
    await name.update(applied=3)
    record = await street.store.get(KEY)
    assert record is not None
    assert (record.value["applied"], record.value["newer"], record.seq) == (3, True, 3)


async def test_whose_name_is_anothers_is_told(street: Street) -> None:
    """It must not acknowledge in the other's stead."""
    first, named, _ = street.process("one")
    await first.take(named, until=street.clock.mono())
    second, other, sessions = street.process("two")
    sessions.missed.add("one.1")
    await second.take(other, until=street.clock.mono())
    with pytest.raises(Conflict):
        await first.update(applied=3)
    assert (await street.holder()).applied == 0


@pytest.mark.parametrize("how", ["deleted", "buried"])
async def test_a_record_that_somebody_deletes_is_written_again(street: Street, how: str) -> None:
    """By the next thing that there is to tell, or when somebody looks; and it is a fact."""
    told: list[Event] = []
    street.components.events.on("jobs:node-restored", told.append)
    name, named, _ = street.process("first")
    await name.take(named, until=street.clock.mono())
    for tell in (lambda: name.update(applied=3), name.restore):
        record = await street.store.get(KEY)
        assert record is not None
        await street.store.delete(record)
        if how == "buried":
            await street.store.drop([KEY])
        await tell()
        assert (await name.update()).applied == 3
        again = await street.store.get(KEY)
        assert again is not None
        assert read_node_record(again).applied == 3
    await name.restore()
    assert len(told) == 2


async def test_a_deleted_name_that_another_took_is_anothers(street: Street) -> None:
    """Restoring leaves it alone."""
    name, named, _ = street.process("first")
    await name.take(named, until=street.clock.mono())
    record = await street.store.get(KEY)
    assert record is not None
    await street.store.delete(record)
    second, other, _ = street.process("second")
    await second.take(other, until=street.clock.mono())
    await name.restore()
    assert (await second.update(applied=1)).incarnation == other.incarnation
    with pytest.raises(Conflict):
        await name.update(applied=1)


async def test_what_nobody_wrote_is_no_node(street: Street) -> None:
    """A damaged record is not believed."""
    record = await street.store.create(KEY, {"name": 7})
    with pytest.raises(Corrupt, match="node/sync_/a"):
        read_node_record(record)
