"""Short stories that go wrong if one rule of the protocol is broken. Each gives what went wrong.

Where it takes some luck to go wrong, a story is told several times.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fleets import SINGLETON, TIMING, DearStore, Fleet, Worker, take_note

from jobsync.coordination.session import SESSIONS
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.errors import Unavailable
from jobsync.stores.contract import Put
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.invariants import Violation, check_replies
from jobsync.testing.network import CALM, Link, Weather
from jobsync.testing.recording import RecordingStore
from jobsync.testing.world import World

__all__ = [
    "Ordeal",
    "a_beat_at_the_last_moment",
    "a_beat_in_two_copies",
    "a_clean_stop",
    "a_dead_elder",
    "a_death_told_by_others",
    "a_forced_hand_over",
    "a_hand_over_seen_late",
    "a_kill",
    "a_late_take",
    "a_late_write",
    "a_long_sleep",
    "a_lost_beat_and_a_stepped_clock",
    "a_lost_reply",
    "a_removed_role",
    "a_removed_session",
    "a_return_from_silence",
    "a_slow_clock_cut_off",
    "short_outages",
    "slow_looks",
    "unlike_timeouts",
]

Ordeal: TypeAlias = Callable[[], list[Violation]]
ROLE = "role/default/work"
_TIMES = 6


def several_times(story: Callable[[int], list[Violation]]) -> Ordeal:
    """Run a story with a few seeds."""

    @functools.wraps(story)
    def tell() -> list[Violation]:
        return [each for seed in range(_TIMES) for each in story(seed)]

    return tell


def _tell(fleet: Fleet, story: Callable[[], Awaitable[None]]) -> list[Violation]:
    fleet.world.run(story)
    return fleet.verdict


async def _warm_up(fleet: Fleet) -> Worker:
    """Start everybody, each at its own moment of a beat; give the one that leads."""
    for worker in fleet.workers:
        fleet.start(worker)
        await asyncio.sleep(fleet.world.dice.uniform(0, TIMING.heartbeat))
    await asyncio.sleep(62)
    (leader,) = fleet.leaders()
    return leader


@several_times
def a_slow_clock_cut_off(seed: int) -> list[Violation]:
    """The leader's clock is slow and everybody else's is fast; then nothing of it gets through."""
    fleet = Fleet(seed, rate=0.0, size=8, store=DearStore)
    for worker in fleet.workers:
        worker.node.clock.rate = 1.049

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.clock.rate = 0.951
        await asyncio.sleep(30)
        leader.link.requests_pass = False
        await asyncio.sleep(2 * TIMING.timeout)

    return _tell(fleet, story)


@several_times
def a_lost_beat_and_a_stepped_clock(seed: int) -> list[Violation]:
    """Two beats of a follower are lost, and meanwhile the leader's wall clock is put right."""
    fleet = Fleet(seed, rate=0.0, store=DearStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        follower = next(worker for worker in fleet.workers if worker is not leader)
        follower.link.requests_pass = False
        for _ in range(4):
            await asyncio.sleep(2.5)
            leader.node.clock.skew += 2
        follower.link.requests_pass = True
        await asyncio.sleep(2 * TIMING.timeout)

    return _tell(fleet, story)


@several_times
def short_outages(seed: int) -> list[Violation]:
    """Two beats in a row are lost, for all: every term lapses for a moment, and none comes back."""
    fleet = Fleet(seed, rate=0.0, hooks=take_note, governs=False)

    async def story() -> None:
        await _warm_up(fleet)
        for _ in range(5):
            # Whoever looks out of step with its beats may look before a lapse and after it.
            await asyncio.sleep(fleet.world.dice.uniform(0, TIMING.heartbeat))
            fleet.store._data.notifier.wake(["role/default/"])
            await asyncio.sleep(2 * TIMING.heartbeat)
            for link in fleet.links:
                link.weather = Weather(refused=1.0)
            await asyncio.sleep(2.2 * TIMING.heartbeat)
            for link in fleet.links:
                link.weather = CALM
            await asyncio.sleep(2 * TIMING.timeout)
            fleet.judge_rest()

    return _tell(fleet, story)


@several_times
def a_beat_at_the_last_moment(seed: int) -> list[Violation]:
    """A follower is refused until it is about to be called dead; then its beats get through."""
    fleet = Fleet(seed, size=8)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.link.slow_reads = 4.9
        for worker in fleet.workers:
            if worker is not leader:
                worker.link.weather = Weather(refused=1.0)
        await asyncio.sleep(TIMING.timeout + 1)
        for worker in fleet.workers:
            worker.link.weather = CALM
        await asyncio.sleep(2 * TIMING.timeout)

    return _tell(fleet, story)


@several_times
def slow_looks(seed: int) -> list[Violation]:
    """Whatever followers read takes four seconds to get there; then the leader is cut off."""
    fleet = Fleet(seed, rate=0.0, size=8, store=DearStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        for worker in fleet.workers:
            if worker is not leader:
                worker.link.slow_reads = 4.0
        await asyncio.sleep(60)
        leader.link.requests_pass = False
        await asyncio.sleep(TIMING.heartbeat)
        for worker in fleet.workers:
            worker.link.slow_reads = 0.0
        await asyncio.sleep(3 * TIMING.timeout)

    return _tell(fleet, story)


@several_times
def a_beat_in_two_copies(seed: int) -> list[Violation]:
    """A beat lands, its sender sees nothing of it yet, and sends it again seconds later."""
    fleet = Fleet(seed, rate=0.0, size=8, store=DearStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        assert leader.membership is not None
        key = f"session/{leader.membership.incarnation}"
        leader.link.delays, leader.link.slow_replies = (key, 0.08), 4.6
        await asyncio.sleep(TIMING.heartbeat + 0.1)
        # No later beat arrives.
        leader.link.delays = (key, 1000.0)
        await asyncio.sleep(3 * TIMING.timeout)

    return _tell(fleet, story)


def a_return_from_silence() -> list[Violation]:
    """A follower is cut off until it is called dead, and comes back."""
    fleet = Fleet(5)

    async def story() -> None:
        leader = await _warm_up(fleet)
        follower = next(worker for worker in fleet.workers if worker is not leader)
        follower.link.requests_pass = False
        await asyncio.sleep(2 * TIMING.timeout)
        follower.link.requests_pass = True
        await asyncio.sleep(2 * TIMING.timeout)
        fleet.judge_rest()

    return _tell(fleet, story)


def a_kill() -> list[Violation]:
    """The leader is killed; somebody else leads two timeouts later."""
    fleet = Fleet(6, hooks=take_note, governs=False)

    async def story() -> None:
        (await _warm_up(fleet)).node.kill()
        await asyncio.sleep(2.2 * TIMING.timeout)
        fleet.judge_rest()

    return _tell(fleet, story)


def a_death_told_by_others() -> list[Violation]:
    """The leader is killed, and a worker that does other work writes down its death."""
    fleet = Fleet(6, hooks=take_note, governs=False)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.kill()
        assert leader.membership is not None
        record = await fleet.store.get(f"{SESSIONS}{leader.membership.incarnation}")
        assert record is not None
        await fleet.store.write([record.replace({**record.value, "state": "dead"})])
        await asyncio.sleep(2.2 * TIMING.timeout)
        fleet.judge_rest()

    return _tell(fleet, story)


def a_clean_stop() -> list[Violation]:
    """The leader stops in good order; somebody else leads soon."""
    fleet = Fleet(7, hooks=take_note, governs=False)

    async def story() -> None:
        (await _warm_up(fleet)).stop()
        await asyncio.sleep(2 * TIMING.heartbeat)
        fleet.judge_rest("EL2")

    return _tell(fleet, story)


def a_removed_role() -> list[Violation]:
    """Somebody removes the role, and its leader is gone; its epochs go on."""
    fleet = Fleet(8)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.kill()
        await fleet.store.drop([ROLE])
        await asyncio.sleep(2 * TIMING.timeout)

    # What was dropped begins a new chain; all else must hold.
    return [
        each for each in _tell(fleet, story) if not each.detail.startswith(f"{ROLE}: a write is")
    ]


def a_removed_session() -> list[Violation]:
    """Somebody removes the leader's session: it may trust itself until it looks."""
    fleet = Fleet(9)

    async def story() -> None:
        leader = await _warm_up(fleet)
        assert leader.membership is not None
        await fleet.store.drop([f"session/{leader.membership.incarnation}"])
        leader.link.requests_pass = False
        await asyncio.sleep(2 * TIMING.timeout)

    return _tell(fleet, story)


def a_dead_elder() -> list[Violation]:
    """The oldest worker dies before anybody was elected; the others elect all the same."""
    fleet = Fleet(10, store=DearStore)

    async def story() -> None:
        elder, *others = fleet.workers
        fleet.start(elder)
        await asyncio.sleep(1)
        elder.node.kill()
        for worker in others:
            fleet.start(worker)
        await asyncio.sleep(TIMING.timeout + 2 * TIMING.heartbeat)
        fleet.judge_rest()

    return _tell(fleet, story)


@several_times
def a_forced_hand_over(seed: int) -> list[Violation]:
    """Somebody asks for a certain worker to lead, and that one does."""
    fleet = Fleet(seed)

    async def story() -> None:
        leader = await _warm_up(fleet)
        desired = max(
            (worker for worker in fleet.workers if worker is not leader),
            key=lambda worker: worker.membership.worker_id if worker.membership else "",
        )
        assert desired.membership is not None
        asking = desired.coordinators["work"].ensure_coordinator(
            force=True, desired_coordinator=desired.membership.worker_id
        )
        await desired.run(asking)
        await asyncio.sleep(2 * TIMING.heartbeat)
        if fleet.leaders() != [desired]:
            found = "another worker leads than was asked for"
            fleet.violations.append(Violation("EL5", found))

    return _tell(fleet, story)


@several_times
def a_hand_over_seen_late(seed: int) -> list[Violation]:
    """The leader hands over, and is slow to see what came of it."""
    fleet = Fleet(seed)

    async def story() -> None:
        leader = await _warm_up(fleet)
        await leader.run(leader.coordinators["work"].ensure_coordinator(force=True))
        leader.link.slow_reads = 3.0
        await asyncio.sleep(3 * TIMING.timeout)

    return _tell(fleet, story)


def a_long_sleep() -> list[Violation]:
    """The leader is suspended, believes on, and writes after its successor was there."""
    fleet = Fleet(12, rate=0.0, trusts_clocks=False)

    async def story() -> None:
        leader = await _warm_up(fleet)
        term = leader.coordinators["work"].term
        assert term is not None
        leader.node.suspend()
        await asyncio.sleep(4 * TIMING.timeout)
        leader.node.resume()
        late = {"epoch": term.epoch, "count": -1}
        put = leader.run(term.put(f"{SINGLETON}-work", late))
        await asyncio.wait([put])
        # Asked for: nobody else hears that it was refused.
        put.exception()
        await asyncio.sleep(TIMING.timeout)

    return _tell(fleet, story)


@several_times
def a_late_write(seed: int) -> list[Violation]:
    """A leader's write is under way for long; its successor reads what is there, and it lands."""
    fleet = Fleet(seed)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.link.delays = (SINGLETON, 40.0)
        await asyncio.sleep(1.05 * TIMING.heartbeat + 3)
        leader.node.kill()
        for worker in fleet.workers:
            # So that it has read, and not written, when that one lands.
            worker.thinks_for = (50.0, 50.0)
        await asyncio.sleep(4 * TIMING.timeout)

    return _tell(fleet, story)


def unlike_timeouts() -> list[Violation]:
    """A worker that beats seldom leads others that beat often."""
    fleet = Fleet(14, size=0, store=DearStore)
    slow = fleet.add("slow")
    slow.settings = CoordinatorSettings(heartbeat_interval=25, worker_timeout=80)
    for number in range(3):
        fleet.add(f"quick-{number}")

    async def story() -> None:
        fleet.start(slow)
        await asyncio.sleep(60)
        fleet.start_all()
        await asyncio.sleep(200)
        slow.link.requests_pass = False
        await asyncio.sleep(3 * 80)
        slow.link.requests_pass = True
        await asyncio.sleep(100)

    return _tell(fleet, story)


def a_late_take() -> list[Violation]:
    """A worker takes a role, hears nothing, stands no longer, lives on, and then it lands."""
    fleet = Fleet(15, size=0)
    late, other = fleet.add("late", ("work", "other")), fleet.add("other", ("work",))

    async def story() -> None:
        late.link.delays = (ROLE, 40.0)
        fleet.start(late)
        await asyncio.sleep(12)
        await late.run(late.coordinators.pop("work").stop())
        late.works = ("other",)
        await asyncio.sleep(60)
        late.link.delays = None
        fleet.start(other)
        await asyncio.sleep(3 * TIMING.timeout)
        fleet.judge_rest()

    return _tell(fleet, story)


def a_lost_reply() -> list[Violation]:
    """Writes are carried out and their replies lost: the writers are told the truth."""
    world = World(16)

    async def story() -> None:
        store = MemoryStore(components=world.node("store").components)
        for name in ("a", "b"):
            node = world.node(name)
            link = Link(world, node, store, Weather(lost=0.5))
            told = RecordingStore(node, SettlingStore(link, node.components))

            async def write(told: RecordingStore = told) -> None:
                for _ in range(20):
                    with contextlib.suppress(Unavailable):
                        base = await told.get("n/counter", tombstones=True)
                        count = 0 if base is None else base.value
                        await told.write([Put("n/counter", count + 1, base)])

            node.run(write())
        await asyncio.sleep(600)

    world.run(story)
    return check_replies(world.history)
