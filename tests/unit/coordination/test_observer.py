"""When an observer must check again, and what it makes of a death that another one writes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import pytest
from chance import FakeClock, SeededRandomness, StandingClock

from jobsync import Components
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.observer import DEAD_SESSION_TTL, Observer
from jobsync.coordination.session import SESSIONS, Session, SessionOwner
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing
from jobsync.events import Events
from jobsync.processes import NO_PROCESS, ProcessIdentity
from jobsync.stores.contract import Change, Outcome, Record
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

TIMING = Timing(heartbeat=5, timeout=15)

T = TypeVar("T")


async def test_what_falls_due_during_a_look_is_due_after_it() -> None:
    """A read that returned just before an expiry misses it; the next check does not wait."""
    clock = FakeClock()
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    observer = Observer(MemoryStore(components=components), components, TIMING)
    started = clock.mono()
    observer.update({"worker.1": None})
    expires = started + TIMING.timeout
    clock.mono_seconds += TIMING.timeout - 0.01
    checked = clock.mono()
    clock.mono_seconds += 0.02
    assert observer.next_expiry(checked) == expires
    assert observer.next_expiry(clock.mono()) is None


class OneMachine:
    """Processes of one machine that tests end."""

    def __init__(self, pid: int, running: set[int]) -> None:
        self.running = running
        self._identity = ProcessIdentity(
            host="web-1", boot="boot-1", namespaces="pid:[1]", pid=pid, started=pid
        )
        running.add(pid)

    def identify(self) -> ProcessIdentity:
        """Return the identity of this process."""
        return self._identity

    def find_start(self, pid: int) -> int:
        """Return when a process was started; here that is its number."""
        return pid if pid in self.running else NO_PROCESS


class OvertakenStore(StoreDecorator):
    """Does something else just before a write."""

    before_write: Callable[[], Awaitable[object]] | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        before, self.before_write = self.before_write, None
        if before is not None:
            await before()
        return await self.inner.write(changes)


class Trio:
    """A session whose process is killed, and two observers that see it."""

    def __init__(self, timing: Timing = TIMING) -> None:
        clock, running = FakeClock(), set[int]()
        self.components = [
            Components(
                clock=clock,
                randomness=SeededRandomness(pid),
                events=Events(),
                processes=OneMachine(pid, running),
            )
            for pid in (1, 2, 3)
        ]
        self.clock = clock
        self.running = running
        self.store_clock = FakeClock()
        self.store = MemoryStore(
            components=msgspec.structs.replace(self.components[0], clock=self.store_clock)
        )
        self.overtaken = OvertakenStore(self.store)
        self.session = Session(SessionOwner(self.store, self.components[0], timing, "worker-1"))
        self.heir = Observer(self.overtaken, self.components[1], TIMING)
        self.stranger = Observer(self.store, self.components[2], TIMING)

    async def watch(self, seconds: float) -> None:
        """Move all clocks, while both observers look each second."""
        for _ in range(round(seconds)):
            for clock in (self.clock, self.store_clock):
                await clock.sleep(1)
            await self.heir.check_all()
            await self.stranger.check_all()

    async def meet(self) -> str:
        """Show the session to both observers; return its name."""
        await self.session.open()
        for observer in (self.heir, self.stranger):
            await observer.check_all()
            assert observer.living == {self.session.incarnation}
        return self.session.incarnation


async def test_a_death_that_another_observer_writes_first_is_known_at_once() -> None:
    """Its write is refused; nothing else would tell that the session is dead."""
    trio = Trio()
    victim = await trio.meet()
    trio.running.remove(1)
    trio.overtaken.before_write = trio.stranger.declare_dead
    assert await trio.heir.declare_dead() == []
    assert trio.stranger.is_dead(victim)
    assert trio.heir.is_dead(victim)
    assert trio.heir.has_process_ended(victim)
    assert trio.heir.living == frozenset()


async def test_who_watches_only_some_sessions_knows_of_no_others_that_they_live() -> None:
    """Found: a process that had led took sessions of that time for alive, however long ago."""
    trio = Trio()
    victim = await trio.meet()
    trio.heir.watch_only(set())
    assert trio.heir.living == frozenset()
    await trio.heir.check_all()
    assert trio.heir.living == {victim}


class ReadsStore(StoreDecorator):
    """Notes what is read by key."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.asked += keys
        return await self.inner.get_many(keys, tombstones=tombstones)


@pytest.mark.parametrize("is_expected", [False, True])
async def test_who_lists_all_sessions_asks_nothing_more_of_one_that_was_removed(
    *, is_expected: bool
) -> None:
    """It is not declared dead, and nothing falls due for it, unless somebody misses it."""
    trio = Trio()
    incarnation = await trio.meet()
    store = ReadsStore(trio.store)
    observer = Observer(store, trio.components[1], TIMING)
    expected = [incarnation] if is_expected else []
    await observer.check_all(expected)
    await trio.store.drop([f"{SESSIONS}{incarnation}"])
    store.asked.clear()
    for _ in range(round(3 * TIMING.timeout)):
        await trio.clock.sleep(1)
        await observer.check_all(expected)
        assert await observer.declare_dead() == []
    assert observer.living == frozenset()
    assert store.asked == []
    assert observer.is_dead(incarnation) is is_expected
    assert (observer.next_expiry(Mono(0.0)) is not None) is is_expected


async def test_a_death_by_timeout_that_another_observer_writes_first_is_known_at_once() -> None:
    """The same if nobody can see the process: otherwise its silence would be counted anew."""
    trio = Trio()
    victim = await trio.meet()
    await trio.watch(TIMING.timeout)
    trio.overtaken.before_write = trio.stranger.declare_dead
    assert await trio.heir.declare_dead() == []
    assert trio.heir.is_dead(victim)
    assert not trio.heir.has_process_ended(victim)


async def test_the_last_heartbeat_of_a_killed_process_delays_its_death_by_no_check() -> None:
    """It was under way, and lands between the read and the write of an observer."""
    trio = Trio()
    victim = await trio.meet()
    trio.running.remove(1)
    trio.overtaken.before_write = trio.session.heartbeat
    assert await trio.heir.declare_dead() == [victim]
    record = await trio.store.get(f"{SESSIONS}{victim}")
    assert record is not None
    assert (record.value["state"], record.value["beat"]) == ("dead", 1)


@pytest.mark.parametrize("factor", [0.5, 1, 3])
async def test_a_session_is_dead_only_if_the_stores_clock_agrees(factor: float) -> None:
    """An observer whose clock runs fast has waited for less than the timeout.

    That of the session counts, whatever the observer's own is.
    """
    timing = Timing(heartbeat=1, timeout=round(factor * TIMING.timeout))
    trio = Trio(timing)
    victim = await trio.meet()
    trio.store_clock.mono_seconds -= 1
    await trio.watch(timing.timeout)
    assert await trio.heir.declare_dead() == []
    assert not trio.heir.is_dead(victim)
    await trio.watch(1)
    assert await trio.heir.declare_dead() == [victim]


async def test_a_heartbeat_at_the_last_moment_saves_a_session_that_runs() -> None:
    """A write that the store refuses is sent again only for a process that has ended."""
    trio = Trio()
    victim = await trio.meet()
    await trio.watch(TIMING.timeout)
    trio.overtaken.before_write = trio.session.heartbeat
    assert await trio.heir.declare_dead() == []
    assert not trio.heir.is_dead(victim)
    record = await trio.store.get(f"{SESSIONS}{victim}")
    assert record is not None
    assert record.value["state"] == "live"


async def test_a_dead_session_that_is_needed_keeps_no_other_one() -> None:
    """Each is removed after its time, unless something needs it."""
    trio = Trio()
    needed = await trio.meet()
    trio.running.remove(1)
    await trio.stranger.declare_dead()
    later = Session(SessionOwner(trio.store, trio.components[0], TIMING, "worker-2"))
    await later.open()
    await trio.stranger.check_all()
    assert await trio.stranger.declare_dead() == [later.incarnation]
    trio.clock.mono_seconds += 2 * DEAD_SESSION_TTL
    await trio.stranger.remove_long_dead([needed])
    left = await trio.store.heads(SESSIONS, limit=10)
    assert [head.key for head in left] == [f"{SESSIONS}{needed}"]
    await trio.stranger.remove_long_dead([])
    assert await trio.store.heads(SESSIONS, limit=10) == []


class CountingStore(StoreDecorator):
    """Counts the records that are read."""

    reads = 0

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        self.reads += sent if call == "get" else 0
        return await super().around(call, sent, work)


@pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])
async def test_an_unreadable_session_counts_for_nothing_until_it_is_repaired(
    *, knows: bool
) -> None:
    """It neither lives nor falls due, costs no reads, and lives again each time it is repaired."""
    trio = Trio()
    victim = await trio.meet()
    store = CountingStore(trio.store)
    for _ in range(2):
        if not knows or not store.reads:
            trio.heir = Observer(store, trio.components[1], TIMING)
        if knows:
            await trio.heir.check_all()
        intact = await trio.store.get(f"{SESSIONS}{victim}")
        assert intact is not None
        broken = await trio.store.put(intact, {**intact.value, "worker": 3})
        await trio.watch(TIMING.timeout + 1)
        # One that was known is read again before its death would be written.
        assert await trio.heir.declare_dead() == []
        await trio.heir.check_all()
        before = store.reads
        await trio.heir.check_all()
        assert (store.reads, trio.heir.living) == (before, frozenset())
        assert trio.heir.next_expiry(Mono(0)) is None
        await trio.store.put(broken, intact.value)
        await trio.heir.check_all()
        assert trio.heir.living == {victim}
    await trio.watch(TIMING.timeout)
    assert await trio.heir.declare_dead() == [victim]


@pytest.mark.parametrize("is_billed", [False, True], ids=["free", "billed"])
@pytest.mark.parametrize("end", ["declared dead", "its process has ended", "left"])
async def test_a_leader_learns_of_an_end_that_another_one_writes(end: str, is_billed: bool) -> None:
    """At its next check, where requests cost money at the one after that; no timeout later."""
    trio = Trio()
    victim = await trio.meet()
    store = CountingStore(trio.store)
    store.is_billed = is_billed
    leader = Observer(store, trio.components[1], TIMING)
    await leader.check_all({victim})
    for _ in range(5):
        await trio.session.heartbeat()
        await trio.clock.sleep(TIMING.heartbeat)
        await leader.check_all({victim})
    match end:
        case "declared dead":
            trio.heir = leader
            await trio.watch(TIMING.timeout + 1)
            assert await trio.stranger.declare_dead() == [victim]
        case "its process has ended":
            trio.running.remove(1)
            await trio.stranger.declare_dead()
        case _:
            await trio.session.end()
    for check in range(2 if is_billed else 1):
        assert not leader.is_dead(victim), check
        await trio.clock.sleep(TIMING.heartbeat)
        await leader.check_all({victim})
    assert leader.is_dead(victim)
    assert leader.living == frozenset()


@pytest.mark.parametrize("is_billed", [False, True], ids=["free", "billed"])
@pytest.mark.parametrize("is_expected", [False, True], ids=["listed", "expected"])
async def test_what_a_leader_reads_of_a_session_that_lives(
    is_expected: bool, is_billed: bool
) -> None:
    """Nothing, unless somebody waits for its end: then each change, where that is free."""
    trio = Trio()
    victim = await trio.meet()
    store = CountingStore(trio.store)
    store.is_billed = is_billed
    leader = Observer(store, trio.components[1], TIMING)
    await leader.check_all()
    before = store.reads
    for _ in range(20):
        await trio.session.heartbeat()
        for _ in range(2):
            await trio.clock.sleep(TIMING.heartbeat / 2)
            await leader.check_all({victim} if is_expected else ())
    assert store.reads - before == (20 if is_expected and not is_billed else 0)
    assert leader.living == {victim}


async def test_each_process_that_ends_is_looked_after_at_once_and_once() -> None:
    """Also while the deaths of earlier ones cannot be written; later checks try these again."""
    clock, running = StandingClock(), set[int]()
    components = [
        Components(
            clock=clock,
            randomness=SeededRandomness(pid),
            events=Events(),
            processes=OneMachine(pid, running),
        )
        for pid in range(5)
    ]
    store = MemoryStore(components=components[0])
    for pid in range(1, 5):
        await Session(SessionOwner(store, components[pid], TIMING, f"worker-{pid}")).open()
    member = MemberLoop(SessionOwner(store, components[0], TIMING, "worker-0"), lambda: None)
    await member._observer.check_all()
    watching = asyncio.create_task(member._watch_processes())

    async def must_check() -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        clock.move(0.5)
        for _ in range(5):
            await asyncio.sleep(0)
        must, member._check_now._is_set = member._check_now._is_set, False
        return must

    assert not await must_check()
    for ended in ([1], [2], [3, 4]):
        running.difference_update(ended)
        assert await must_check()
        assert not await must_check()
    watching.cancel()
    await asyncio.wait([watching])
