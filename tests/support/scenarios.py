"""Short scenarios that violate an invariant if one rule of the protocol is broken.

Each returns the violations. A scenario that fails only for some seeds runs several times.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from fleets import (
    SINGLETON,
    TIMING,
    BilledStore,
    Fleet,
    Worker,
    build_machines,
    record_hooks,
)

from jobsync.coordination.session import SESSIONS
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.database.coordinator_plugin import CoordinatorPlugin
from jobsync.errors import Unavailable
from jobsync.stores.contract import Put
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.databases import NodeDatabase
from jobsync.testing.invariants import Violation, check_replies
from jobsync.testing.network import Link
from jobsync.testing.nodes import Machine
from jobsync.testing.recording import RecordingStore
from jobsync.testing.weather import CALM, Weather
from jobsync.testing.world import Node, World

__all__ = [
    "Scenario",
    "a_clean_stop",
    "a_dead_oldest_worker",
    "a_death_after_the_election",
    "a_death_declared_by_others",
    "a_death_with_the_next",
    "a_death_written_first_by_a_stranger",
    "a_duplicated_heartbeat",
    "a_failed_database",
    "a_fast_observer",
    "a_forced_handover",
    "a_handover_seen_late",
    "a_heartbeat_at_the_last_moment",
    "a_kill",
    "a_kill_beside_neighbours",
    "a_late_take",
    "a_late_write",
    "a_long_suspend",
    "a_lost_reply",
    "a_pause_beside_strangers",
    "a_removed_role",
    "a_removed_session",
    "a_return_from_silence",
    "a_slow_clock_cut_off",
    "different_timeouts",
    "lost_heartbeats_and_a_stepped_clock",
    "short_outages",
    "slow_checks",
    "slow_listings",
]

Scenario: TypeAlias = Callable[[], list[Violation]]
ROLE = "role/default/work"
_SEEDS = range(6)


def with_seeds(story: Callable[[int], list[Violation]], seeds: Iterable[int] = _SEEDS) -> Scenario:
    """Return a scenario that runs a story with several seeds."""

    @functools.wraps(story)
    def run() -> list[Violation]:
        return [each for seed in seeds for each in story(seed)]

    return run


def _run(fleet: Fleet, story: Callable[[], Awaitable[None]]) -> list[Violation]:
    fleet.world.run(story)
    return fleet.all_violations


async def _warm_up(fleet: Fleet) -> Worker:
    """Start all workers, each at another moment of an interval; return the leader."""
    for worker in fleet.workers:
        fleet.start(worker)
        await asyncio.sleep(fleet.world.dice.uniform(0, TIMING.heartbeat))
    await asyncio.sleep(62)
    (leader,) = fleet.leaders()
    return leader


@with_seeds
def a_slow_clock_cut_off(seed: int) -> list[Violation]:
    """The leader's clock is slow, all others are fast; then the leader is cut off."""
    fleet = Fleet(seed, rate=0.0, size=8, store=BilledStore)
    for worker in fleet.workers:
        worker.node.clock.rate = 1.049

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.clock.rate = 0.951
        await asyncio.sleep(30)
        leader.link.requests_pass = False
        await asyncio.sleep(2 * TIMING.timeout)

    return _run(fleet, story)


@with_seeds
def lost_heartbeats_and_a_stepped_clock(seed: int) -> list[Violation]:
    """Two heartbeats of a follower are lost, and meanwhile the leader's wall clock is stepped."""
    fleet = Fleet(seed, rate=0.0, store=BilledStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        follower = next(worker for worker in fleet.workers if worker is not leader)
        follower.link.requests_pass = False
        for _ in range(4):
            await asyncio.sleep(2.5)
            leader.node.clock.skew += 2
        follower.link.requests_pass = True
        await asyncio.sleep(2 * TIMING.timeout)

    return _run(fleet, story)


@with_seeds
def short_outages(seed: int) -> list[Violation]:
    """All lose two heartbeats in a row: every term lapses briefly, and none comes back."""
    fleet = Fleet(seed, rate=0.0, hooks=record_hooks, governs=False)

    async def story() -> None:
        await _warm_up(fleet)
        for _ in range(5):
            # A check that is out of step with the heartbeats may run before a lapse and after it.
            await asyncio.sleep(fleet.world.dice.uniform(0, TIMING.heartbeat))
            fleet.store._data.notifier.wake(["role/default/"])
            await asyncio.sleep(2 * TIMING.heartbeat)
            for link in fleet.links:
                link.weather = Weather(refused=1.0)
            await asyncio.sleep(2.2 * TIMING.heartbeat)
            for link in fleet.links:
                link.weather = CALM
            await asyncio.sleep(2 * TIMING.timeout)
            fleet.check_steady()

    return _run(fleet, story)


@with_seeds
def a_heartbeat_at_the_last_moment(seed: int) -> list[Violation]:
    """A follower is refused until it is about to be declared dead; then its heartbeats arrive."""
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

    return _run(fleet, story)


@with_seeds
def slow_checks(seed: int) -> list[Violation]:
    """Reads of followers take four seconds to arrive; then the leader is cut off."""
    fleet = Fleet(seed, rate=0.0, size=8, store=BilledStore)

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

    return _run(fleet, story)


@with_seeds
def slow_listings(seed: int) -> list[Violation]:
    """Listings of the leader take up to five seconds to arrive; then followers are cut off."""
    fleet = Fleet(seed, rate=0.0, size=8, store=BilledStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.link.weather = Weather(slow=1.0, slow_by=4.9, calls=frozenset(["heads", "scan"]))
        await asyncio.sleep(60)
        for worker in fleet.workers:
            if worker is not leader:
                worker.link.requests_pass = False
                await asyncio.sleep(fleet.world.dice.uniform(0, TIMING.heartbeat))
        await asyncio.sleep(3 * TIMING.timeout)

    return _run(fleet, story)


@with_seeds
def a_fast_observer(seed: int) -> list[Violation]:
    """The leader's clock is faster than any may be, and the store's is right; others are silent."""
    fleet = Fleet(seed, rate=0.0, size=6)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.clock.rate = 1.5
        await asyncio.sleep(30)
        for worker in fleet.workers:
            if worker is not leader:
                worker.link.requests_pass = False
        # Silent for less than the timeout, and for more than that by the leader's clock.
        await asyncio.sleep(TIMING.timeout - 3)
        for worker in fleet.workers:
            worker.link.requests_pass = True
        await asyncio.sleep(2 * TIMING.timeout)

    return _run(fleet, story)


@with_seeds
def a_duplicated_heartbeat(seed: int) -> list[Violation]:
    """A heartbeat lands, its sender does not see that yet, and resends it seconds later."""
    fleet = Fleet(seed, rate=0.0, size=8, store=BilledStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        assert leader.membership is not None
        key = f"session/{leader.membership.incarnation}"
        leader.link.delayed_writes, leader.link.slow_replies = (key, 0.08), 4.6
        await asyncio.sleep(TIMING.heartbeat + 0.1)
        # No later heartbeat arrives.
        leader.link.delayed_writes = (key, 1000.0)
        await asyncio.sleep(3 * TIMING.timeout)

    return _run(fleet, story)


def a_return_from_silence() -> list[Violation]:
    """A follower is cut off until it is declared dead, and comes back."""
    fleet = Fleet(5)

    async def story() -> None:
        leader = await _warm_up(fleet)
        follower = next(worker for worker in fleet.workers if worker is not leader)
        follower.link.requests_pass = False
        await asyncio.sleep(2 * TIMING.timeout)
        follower.link.requests_pass = True
        await asyncio.sleep(2 * TIMING.timeout)
        fleet.check_steady()

    return _run(fleet, story)


def a_kill() -> list[Violation]:
    """The leader is killed; another worker leads two timeouts later."""
    fleet = Fleet(6, hooks=record_hooks, governs=False)

    async def story() -> None:
        (await _warm_up(fleet)).node.kill()
        await asyncio.sleep(2.2 * TIMING.timeout)
        fleet.check_steady()

    return _run(fleet, story)


def a_death_declared_by_others() -> list[Violation]:
    """The leader is killed, and a worker with other work declares it dead."""
    fleet = Fleet(6, hooks=record_hooks, governs=False)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.kill()
        assert leader.membership is not None
        record = await fleet.store.get(f"{SESSIONS}{leader.membership.incarnation}")
        assert record is not None
        await fleet.store.write([record.replace({**record.value, "state": "dead"})])
        await asyncio.sleep(2.2 * TIMING.timeout)
        fleet.check_steady()

    return _run(fleet, story)


async def _kill_after_a_heartbeat(leader: Worker) -> None:
    """Kill a leader at the worst moment: right after a heartbeat."""
    assert leader.membership is not None
    session = leader.membership.session
    sent = session.heartbeats
    while session.heartbeats == sent:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.1)
    leader.node.kill()


async def _check_replacement(fleet: Fleet) -> None:
    """Check that a worker leads in time after the leader's death, which is now."""
    clock = fleet.world.loop.time
    # Beyond one interval: what checks leave of one, and requests.
    died, longest = clock(), TIMING.timeout + 1.2 * TIMING.heartbeat
    while not fleet.leaders() and clock() < died + longest:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.1)
    if not fleet.leaders():
        found = f"nobody leads {longest:g} s after the death of the leader"
        fleet.violations.append(Violation("EL6", found))


# In few worlds the last worker checks so late that another check would be too late.
@functools.partial(with_seeds, seeds=range(30))
def a_death_after_the_election(seed: int) -> list[Violation]:
    """The leader dies, and its successor too, before the others have seen it lead."""
    fleet = Fleet(seed, rate=0.0, size=3, store=BilledStore)

    async def story() -> None:
        await _kill_after_a_heartbeat(await _warm_up(fleet))
        await _check_replacement(fleet)
        for leader in fleet.leaders():
            leader.node.kill()
        await _check_replacement(fleet)

    return _run(fleet, story)


@with_seeds
def a_death_with_the_next(seed: int) -> list[Violation]:
    """The leader dies, and with it the worker that should lead next."""
    fleet = Fleet(seed, rate=0.0, size=3, store=BilledStore if seed % 2 else MemoryStore)

    async def story() -> None:
        leader = await _warm_up(fleet)
        # The first that was started is the oldest.
        following = next(worker for worker in fleet.workers if worker is not leader)
        await _kill_after_a_heartbeat(leader)
        following.node.kill()
        await _check_replacement(fleet)

    return _run(fleet, story)


@with_seeds
def a_kill_beside_neighbours(seed: int) -> list[Violation]:
    """The leader is killed, and in some worlds started again, with its old process number."""
    machine = Machine("web-1")
    machines = {f"node-{number}": machine for number in range(4)}
    fleet = Fleet(
        seed,
        hooks=record_hooks,
        governs=False,
        machines=machines,
        store=BilledStore if seed % 2 else MemoryStore,
    )

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.kill()
        if seed % 3:
            fleet.restart(leader)
        # Long before the timeout. A worker that sees the death late gives way to an older one.
        await asyncio.sleep(1.2 * TIMING.heartbeat if fleet.store.is_billed else 3)
        fleet.check_steady("EL8")

    return _run(fleet, story)


@with_seeds
def a_death_written_first_by_a_stranger(seed: int) -> list[Violation]:
    """A leader is killed; one of other work writes its death just before the follower does."""
    machine = Machine("web-1")
    machines = {f"node-{number}": machine for number in range(3)}
    fleet = Fleet(seed, size=2, hooks=record_hooks, governs=False, machines=machines)
    fleet.add("node-2", works=("other",))

    async def story() -> None:
        leader = await _warm_up(fleet)
        for worker in fleet.workers[:2]:
            # Longer than it takes the stranger to notice the death.
            worker.link.slow_deaths = 1.0
        leader.node.kill()
        await asyncio.sleep(3)
        fleet.check_steady("EL8")

    return _run(fleet, story)


@with_seeds
def a_pause_beside_strangers(seed: int) -> list[Violation]:
    """On machines that are almost the same, a process number says nothing about a worker."""
    fleet = Fleet(seed, size=6, hooks=record_hooks, governs=False, machines=build_machines())

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(TIMING.timeout)
        fleet.workers[seed].node.pause()
        await asyncio.sleep(TIMING.heartbeat / 2)
        fleet.workers[seed].node.resume()
        await asyncio.sleep(TIMING.timeout)
        if not fleet.violations:
            fleet.check_steady()
        if fleet.deaths:
            fleet.violations.append(Violation("E5", "a worker that lives was declared dead"))

    return _run(fleet, story)


def a_clean_stop() -> list[Violation]:
    """The leader stops cleanly; another worker leads soon."""
    fleet = Fleet(7, hooks=record_hooks, governs=False)

    async def story() -> None:
        (await _warm_up(fleet)).stop()
        await asyncio.sleep(2 * TIMING.heartbeat)
        fleet.check_steady("EL2")

    return _run(fleet, story)


def a_removed_role() -> list[Violation]:
    """The role is removed and its leader is gone; its epochs continue."""
    fleet = Fleet(8)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.node.kill()
        await fleet.store.drop([ROLE])
        await asyncio.sleep(2 * TIMING.timeout)

    # The dropped record starts a new chain; everything else must hold.
    return [
        each for each in _run(fleet, story) if not each.detail.startswith(f"{ROLE}: a write is")
    ]


def a_removed_session() -> list[Violation]:
    """The leader's session is removed: it may trust itself until it reads that."""
    fleet = Fleet(9)

    async def story() -> None:
        leader = await _warm_up(fleet)
        assert leader.membership is not None
        await fleet.store.drop([f"session/{leader.membership.incarnation}"])
        leader.link.requests_pass = False
        await asyncio.sleep(2 * TIMING.timeout)

    return _run(fleet, story)


def a_dead_oldest_worker() -> list[Violation]:
    """The oldest worker dies before the first election; the others still elect."""
    fleet = Fleet(10, store=BilledStore)

    async def story() -> None:
        oldest, *others = fleet.workers
        fleet.start(oldest)
        await asyncio.sleep(1)
        oldest.node.kill()
        for worker in others:
            fleet.start(worker)
        await asyncio.sleep(TIMING.timeout + 2 * TIMING.heartbeat)
        fleet.check_steady()

    return _run(fleet, story)


@with_seeds
def a_forced_handover(seed: int) -> list[Violation]:
    """A certain worker is requested as the next leader, and leads."""
    fleet = Fleet(seed)

    async def story() -> None:
        leader = await _warm_up(fleet)
        desired = max(
            (worker for worker in fleet.workers if worker is not leader),
            key=lambda worker: worker.membership.worker_id if worker.membership else "",
        )
        assert desired.membership is not None
        request = desired.coordinators["work"].ensure_coordinator(
            force=True, desired_coordinator=desired.membership.worker_id
        )
        await desired.run(request)
        await asyncio.sleep(2 * TIMING.heartbeat)
        if fleet.leaders() != [desired]:
            found = "another worker leads than the requested one"
            fleet.violations.append(Violation("EL5", found))

    return _run(fleet, story)


@with_seeds
def a_handover_seen_late(seed: int) -> list[Violation]:
    """The leader hands over, and is slow to see the result."""
    fleet = Fleet(seed)

    async def story() -> None:
        leader = await _warm_up(fleet)
        await leader.run(leader.coordinators["work"].ensure_coordinator(force=True))
        leader.link.slow_reads = 3.0
        await asyncio.sleep(3 * TIMING.timeout)

    return _run(fleet, story)


def a_long_suspend() -> list[Violation]:
    """The leader is suspended, still trusts itself, and writes after its successor has."""
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
        # Retrieved, because nothing else handles the refusal.
        put.exception()
        await asyncio.sleep(TIMING.timeout)

    return _run(fleet, story)


@with_seeds
def a_late_write(seed: int) -> list[Violation]:
    """A leader's write is delayed, and lands after its successor has read the record."""
    fleet = Fleet(seed)

    async def story() -> None:
        leader = await _warm_up(fleet)
        leader.link.delayed_writes = (SINGLETON, 40.0)
        await asyncio.sleep(1.05 * TIMING.heartbeat + 3)
        leader.node.kill()
        for worker in fleet.workers:
            # So that it has read, and not written, when the late write lands.
            worker.think_time = (50.0, 50.0)
        await asyncio.sleep(4 * TIMING.timeout)

    return _run(fleet, story)


def different_timeouts() -> list[Violation]:
    """A worker with long heartbeat intervals leads others with short ones."""
    fleet = Fleet(14, size=0, store=BilledStore)
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

    return _run(fleet, story)


def a_late_take() -> list[Violation]:
    """A take gets no reply, its worker withdraws and lives on, and then the take lands."""
    fleet = Fleet(15, size=0)
    late, other = fleet.add("late", ("work", "other")), fleet.add("other", ("work",))

    async def story() -> None:
        late.link.delayed_writes = (ROLE, 40.0)
        fleet.start(late)
        await asyncio.sleep(12)
        await late.run(late.coordinators.pop("work").stop())
        late.works = ("other",)
        await asyncio.sleep(60)
        late.link.delayed_writes = None
        fleet.start(other)
        await asyncio.sleep(3 * TIMING.timeout)
        fleet.check_steady()

    return _run(fleet, story)


def a_lost_reply() -> list[Violation]:
    """Writes are applied and their replies lost: the writers learn the true outcome."""
    world = World(16)

    async def story() -> None:
        store = MemoryStore(components=world.node("store").components)
        for name in ("a", "b"):
            node = world.node(name)
            link = Link(world, node, store, Weather(lost=0.5))
            recording = RecordingStore(node, SettlingStore(link, node.components))

            async def write(recording: RecordingStore = recording) -> None:
                for _ in range(20):
                    with contextlib.suppress(Unavailable):
                        base = await recording.get("n/counter", tombstones=True)
                        count = 0 if base is None else base.value
                        await recording.write([Put("n/counter", count + 1, base)])

            node.run(write())
        await asyncio.sleep(600)

    world.run(story)
    return check_replies(world.history)


class _Central(CoordinatorPlugin):
    """Central work of a database."""

    async def coordinator_work(self) -> None:
        """Do nothing."""


def a_failed_database() -> list[Violation]:
    """Background work of the leader's database raises, and its process lives on."""
    world = World(17)
    shared = MemoryStore(components=world.node("store").components)
    plugins: list[_Central] = []

    async def connect(node: Node) -> None:
        plugins.append(_Central())
        await NodeDatabase(node, shared, plugins=plugins[-1:]).connect()

    async def fail() -> None:
        raise RuntimeError("a bug")

    async def story() -> None:
        for name in ("one", "two"):
            node = world.node(name)
            await node.run(connect(node))
            await asyncio.sleep(TIMING.heartbeat)
        assert plugins[0].is_coordinator
        plugins[0].run_in_background(fail)
        await asyncio.sleep(TIMING.heartbeat)
        leads = [plugin.is_coordinator for plugin in plugins]
        if leads != [False, True]:
            found = f"the failed one leads: {leads[0]}; the other one: {leads[1]}"
            world.violations.append(Violation("EL7", found))

    world.run(story)
    return world.violations
