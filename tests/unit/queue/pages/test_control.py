"""The record of a queue in pages: what several processes write into it, and rely on."""

from collections.abc import Sequence

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Record, Store, Unavailable
from jobsync.events import Events
from jobsync.queue.pages import control
from jobsync.queue.pages.control import QueueControl, _ControlRecord
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

RELY = 5.0


class SlowStore(StoreDecorator):
    """A store that bills, and whose answers take time."""

    def __init__(self, inner: MemoryStore, clock: FakeClock) -> None:
        super().__init__(inner)
        self.is_billed = True
        self.clock = clock
        self.way_back = 0.0
        self.reads = 0

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.reads += 1
        found = await self.inner.get_many(keys, tombstones=tombstones)
        self.clock.mono_seconds += self.way_back
        return found


class Processes:
    """Processes that use one queue, with one clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self._memory = MemoryStore(components=self._components)

    def start(self) -> tuple[SlowStore, QueueControl]:
        """Return the store and the record of the queue, as another process sees them."""
        store = SlowStore(self._memory, self.clock)
        return store, QueueControl(store, "mails", self._components)


@pytest.fixture
def processes() -> Processes:
    """A queue that nobody has used."""
    return Processes()


@pytest.mark.parametrize("steps", ["", "p", "pr", "ppr", "prp", "prprp"])
@pytest.mark.parametrize("is_known", [False, True])
async def test_that_messages_have_keys_survives_pauses_by_processes_that_do_not_know_it(
    processes: Processes, steps: str, is_known: bool
) -> None:
    """And a pause survives the first push with a key: each write keeps what is not its own."""
    _, producer = processes.start()
    if is_known:
        await producer.register_keys()
    for number, step in enumerate(steps):
        _, operator = processes.start()
        before = steps[number - 1] if number else "r"
        changed = await (operator.pause("for a test") if step == "p" else operator.resume())
        assert changed is (before != step)
    if not is_known:
        await producer.register_keys()
    assert producer.has_keys
    _, worker = processes.start()
    assert not worker.has_keys
    assert await worker.is_paused() is steps.endswith("p")
    assert worker.has_keys


async def test_a_pause_returns_when_nobody_relies_on_a_reading_before_it(
    processes: Processes,
) -> None:
    """Also one of a queue that is paused already: whoever did that may not have waited."""
    (_, first), (_, second) = processes.start(), processes.start()
    for process, is_new in ((first, True), (second, False), (first, False)):
        begun = processes.clock.mono()
        assert await process.pause("") is is_new
        assert processes.clock.mono() - begun > RELY


@pytest.mark.parametrize("way_back", [0.0, 2.0])
async def test_a_reading_is_relied_on_from_its_request_on(
    processes: Processes, way_back: float
) -> None:
    """However late it was answered: a pause that was written meanwhile is not in it."""
    store, worker = processes.start()
    _, operator = processes.start()
    store.way_back = way_back
    assert not await worker.is_paused()
    await operator._write(_paused(processes))
    processes.clock.mono_seconds += RELY - way_back - 0.01
    assert not await worker.is_paused()
    assert store.reads == 1
    processes.clock.mono_seconds += 0.01
    assert await worker.is_paused()
    assert store.reads == 2


@pytest.mark.parametrize("is_own", [True, False])
async def test_who_pauses_or_resumes_a_queue_knows_it_at_once(
    processes: Processes, is_own: bool
) -> None:
    """Others within the time for which they rely on what they have read."""
    _, worker = processes.start()
    operator = worker if is_own else processes.start()[1]
    assert not await worker.is_paused()
    await operator._write(_paused(processes))
    assert await worker.is_paused() is is_own
    processes.clock.mono_seconds += RELY
    assert await worker.is_paused()
    await operator.resume()
    assert await worker.is_paused() is not is_own
    processes.clock.mono_seconds += RELY
    assert not await worker.is_paused()


@pytest.mark.parametrize("count", range(6))
async def test_the_records_of_all_queues_are_read(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """However many there are, page by page."""
    monkeypatch.setattr(control, "_LISTED", 2)
    store, _ = processes.start()
    components = Components.system()
    for number in range(count):
        await QueueControl(store, f"queue {number}", components).register()
    log = CorruptionLog("queues", components.events)
    assert [*await control.read_controls(store, log)] == [f"queue {n}" for n in range(count)]


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_damaged_record_is_written_as_if_messages_had_keys(
    processes: Processes, verb: str
) -> None:
    """Whoever pushes with keys has noted that already, and does not note it again."""
    store, operator = processes.start()
    await store.create("queue/mails", {"since": "x", "has_keys": 5})
    assert await (operator.pause("for a test") if verb == "pause" else operator.resume())
    _, other = processes.start()
    assert await other.is_paused() is (verb == "pause")
    assert other.has_keys


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_push_with_a_key_goes_on_although_the_record_of_its_queue_is_lost(
    processes: Processes, is_lost: bool
) -> None:
    """Somebody has removed or damaged it after the first push; a pause writes it anew."""
    store, producer = processes.start()
    await producer.register()
    (record,) = await store.scan("queue/")
    await (store.drop([record.key]) if is_lost else store.put(record, {"since": "x"}))
    for _ in range(2):
        await producer.register_keys()
    assert await producer.pause("for a test")
    _, other = processes.start()
    assert await other.is_paused()
    assert other.has_keys


class FailingStore(StoreDecorator):
    """Fails the first calls, one kind after the other."""

    def __init__(self, inner: Store, failing: Sequence[str]) -> None:
        super().__init__(inner)
        self.failing = list(failing)

    def _fail(self, call: str) -> None:
        if self.failing[:1] == [call]:
            self.failing.pop(0)
            raise Unavailable(self.name, "silent")

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self._fail("read")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self._fail("write")
        return await self.inner.write(changes)


@pytest.mark.parametrize("failing", [["read"], ["write"], ["read", "write"], ["write", "write"]])
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_queue_that_could_not_be_registered_is_registered_by_the_next_push(
    processes: Processes, failing: list[str], is_known: bool
) -> None:
    """With the note that messages have keys, whichever request failed, and however often."""
    store, other = processes.start()
    if is_known:
        await other.register()
    components = Components.system()
    unreliable = QueueControl(FailingStore(store, failing), "mails", components)
    for _ in failing:
        with pytest.raises(Unavailable):
            await unreliable.register_keys()
        assert not unreliable.has_keys
    await unreliable.register_keys()
    (record,) = await store.scan("queue/")
    assert record.value["has_keys"] is True


def _paused(processes: Processes) -> _ControlRecord:
    """Return a pause from now on, which nobody waits for."""
    return _ControlRecord(since=processes.clock.wall_seconds)
