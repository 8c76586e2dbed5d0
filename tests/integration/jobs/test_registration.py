"""A node's name: one live process has it, and records there what it has applied."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest
from chance import FakeClock, SeededRandomness
from waiting import until

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
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore

KEY = "node/sync_/a"


class FakeMembership:
    """A membership with a set of dead membership."""

    def __init__(self, store: Store, components: Components, worker: str, incarnation: str) -> None:
        self.store = store
        self.components = components
        self.worker_id = worker
        self.incarnation = incarnation
        self.watching: frozenset[str] = frozenset()
        self.missed: set[str] = set()

    def watch(self, _: str, incarnations: Iterable[str]) -> None:
        self.watching = frozenset(incarnations)

    def is_dead(self, incarnation: str) -> bool:
        return incarnation in self.missed


class Processes:
    """Processes that compete for one name."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.store = MemoryStore(components=self.components)

    def process(
        self, worker: str, session: int = 1
    ) -> tuple[Registration, NodeRecord, FakeMembership]:
        """Return a process's registration, its node record and its membership."""
        incarnation = f"{worker}.{session}"
        membership = FakeMembership(self.store, self.components, worker, incarnation)
        name = Registration(membership, KEY, {})  # type: ignore[arg-type]
        node = NodeRecord(
            name="a",
            incarnation=membership.incarnation,
            stage="ready",
            applied=0,
            is_observer=False,
            created=0.0,
            host=f"host-of-{worker}",
            pid=17,
        )
        return name, node, membership

    async def live(self, incarnation: str, state: str = "live") -> None:
        """Write a session record."""
        session = SessionRecord(
            worker="w",
            state=state,  # type: ignore[arg-type]
            beat=1,
            timing=Timing(heartbeat=5, timeout=15),
            works=(),
            holds={},
            facts={},
        )
        base = await self.store.get(f"{SESSIONS}{incarnation}")
        value = msgspec.to_builtins(session)
        if base is None:
            await self.store.create(f"{SESSIONS}{incarnation}", value)
        else:
            await self.store.put(base, value)

    async def holder(self) -> NodeRecord:
        """Return the current holder of the name."""
        record = await self.store.get(KEY)
        assert record is not None
        return read_node_record(record)


@pytest.fixture
def processes() -> Processes:
    """No processes yet."""
    return Processes()


async def test_a_live_process_keeps_its_name(processes: Processes) -> None:
    """Another process is refused after its wait; the error names the holder."""
    first, node, _ = processes.process("one")
    await first.take(node, until=processes.clock.mono())
    await processes.live("one.1")
    second, other, _ = processes.process("two")
    with pytest.raises(NameTaken, match="process 17 on host-of-one"):
        await second.take(other, until=processes.clock.mono())
    assert (await processes.holder()).incarnation == "one.1"


async def test_a_wait_for_a_name_is_reported(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with the process that has it, however often it looks; then the name is taken."""
    waits: list[Event] = []
    looks: list[str] = []
    wait_for_change = processes.store.wait

    async def look_again(prefix: str, timeout: float) -> None:
        looks.append(prefix)
        await wait_for_change(prefix, timeout)

    monkeypatch.setattr(processes.store, "wait", look_again)
    processes.components.events.on("jobs:name-awaited", waits.append)
    first, node, _ = processes.process("one")
    await first.take(node, until=processes.clock.mono())
    await processes.live("one.1")
    second, other, _ = processes.process("two")
    taking = asyncio.create_task(second.take(other, until=processes.clock.mono() + 5.0))
    await until(lambda: waits, "it waits")
    for number in (2, 3):
        await processes.live("one.1")
        await until(lambda number=number: len(looks) >= number, "it has looked again")  # type: ignore[misc]
    await processes.live("one.1", "dead")
    await taking
    (wait,) = waits
    assert (wait["node"], wait["host"], wait["pid"], wait["wait"]) == ("a", "host-of-one", 17, 5.0)
    assert (await processes.holder()).incarnation == "two.1"


@pytest.mark.parametrize("gone", ["left", "dead", "missed"])
async def test_a_name_is_free_when_its_process_is_gone(processes: Processes, gone: str) -> None:
    """It has left, its death is recorded, or its session was missing for one timeout."""
    first, node, _ = processes.process("one")
    await first.take(node, until=processes.clock.mono())
    second, other, membership = processes.process("two")
    match gone:
        case "left":
            await processes.live("one.1")
            await first.update(stage="left")
        case "dead":
            await processes.live("one.1", "dead")
        case _:
            membership.missed.add("one.1")
    await second.take(other, until=processes.clock.mono())
    assert (await processes.holder()).incarnation == "two.1"
    assert membership.watching == frozenset()


async def test_a_process_takes_the_name_from_its_own_earlier_session(processes: Processes) -> None:
    """It lost that session, although no node has recorded this yet."""
    first, node, _ = processes.process("one")
    await first.take(node, until=processes.clock.mono())
    await processes.live("one.1")
    again, renamed, _ = processes.process("one", 2)
    await again.take(renamed, until=processes.clock.mono())
    assert (await processes.holder()).incarnation == "one.2"


async def test_an_update_replaces_fields(processes: Processes) -> None:
    """Nothing is written if nothing changes; fields of newer code survive."""
    name, node, _ = processes.process("one")
    await name.take(node, until=processes.clock.mono())
    record = await processes.store.get(KEY)
    assert record is not None
    await processes.store.put(record, {**record.value, "newer": True})
    await name.update(applied=3)
    await name.update(applied=3)
    record = await processes.store.get(KEY)
    assert record is not None
    assert (record.value["applied"], record.value["newer"], record.seq) == (3, True, 3)


async def test_whose_name_is_anothers_is_told(processes: Processes) -> None:
    """It must not acknowledge in the other's stead."""
    first, node, _ = processes.process("one")
    await first.take(node, until=processes.clock.mono())
    second, other, membership = processes.process("two")
    membership.missed.add("one.1")
    await second.take(other, until=processes.clock.mono())
    with pytest.raises(Conflict):
        await first.update(applied=3)
    assert (await processes.holder()).applied == 0


@pytest.mark.parametrize("how", ["deleted", "buried"])
async def test_a_deleted_record_is_written_again(processes: Processes, how: str) -> None:
    """By the next update or by `restore`; an event reports it."""
    events: list[Event] = []
    processes.components.events.on("jobs:node-restored", events.append)
    name, node, _ = processes.process("first")
    await name.take(node, until=processes.clock.mono())
    for change in (lambda: name.update(applied=3), name.restore):
        record = await processes.store.get(KEY)
        assert record is not None
        await processes.store.delete(record)
        if how == "buried":
            await processes.store.drop([KEY])
        await change()
        assert (await name.update()).applied == 3
        again = await processes.store.get(KEY)
        assert again is not None
        assert read_node_record(again).applied == 3
    await name.restore()
    assert len(events) == 2


async def test_a_deleted_name_that_another_process_took_stays_taken(processes: Processes) -> None:
    """`restore` does not change it."""
    name, node, _ = processes.process("first")
    await name.take(node, until=processes.clock.mono())
    record = await processes.store.get(KEY)
    assert record is not None
    await processes.store.delete(record)
    second, other, _ = processes.process("second")
    await second.take(other, until=processes.clock.mono())
    await name.restore()
    assert (await second.update(applied=1)).incarnation == other.incarnation
    with pytest.raises(Conflict):
        await name.update(applied=1)


async def test_an_invalid_record_is_not_a_node(processes: Processes) -> None:
    """A damaged record is refused."""
    record = await processes.store.create(KEY, {"name": 7})
    with pytest.raises(Corrupt, match="node/sync_/a"):
        read_node_record(record)
