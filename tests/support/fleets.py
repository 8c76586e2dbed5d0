"""Simulated fleets of workers that elect a coordinator, and the checks of their invariants."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from jobsync import Unavailable
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import LoopHost, Main, SameLoop
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.term import Term
from jobsync.core.trust import Timing
from jobsync.errors import Fenced, JobsyncError, Misconfigured, OutcomeUnknown
from jobsync.events import Event
from jobsync.stores.contract import (
    Applied,
    Change,
    Outcome,
    Put,
    Record,
    Store,
    Unknown,
)
from jobsync.stores.memory import MemoryStore
from jobsync.stores.record_codec import assign_nonces
from jobsync.stores.settling import SettlingStore
from jobsync.testing.billed import BilledStore
from jobsync.testing.invariants import (
    Violation,
    check_commits,
    check_replies,
    check_roles,
    check_takes,
    describe_failure,
)
from jobsync.testing.network import Link
from jobsync.testing.nodes import Machine
from jobsync.testing.recording import RecordingStore
from jobsync.testing.strikes import widen
from jobsync.testing.weather import CALM, Weather
from jobsync.testing.world import Node, World

__all__ = [
    "HOUR",
    "SETTINGS",
    "SINGLETON",
    "TIMING",
    "BilledStore",
    "Fleet",
    "HookFactory",
    "SeparateNode",
    "Worker",
    "record_hooks",
    "run_storm",
    "run_suspends",
    "storm",
    "write_singleton",
]

T = TypeVar("T")

TIMING = Timing(heartbeat=5, timeout=15)
SETTINGS = CoordinatorSettings(heartbeat_interval=5, worker_timeout=15)
HOUR = 3600.0
SINGLETON = "single/ledger"

HookFactory: TypeAlias = Callable[["Worker", str], Hooks]
"""Builds the hooks of a worker for a kind of work."""


class SeparateNode(SameLoop):
    """Runs a member on a node of its own, like a thread: it goes on while its home is blocked."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def start(self, main: Main) -> None:
        """Start the member."""
        self._loop = asyncio.get_running_loop()
        self._task = self._node.run(main())


class Worker:
    """One process: a membership on a node, joined again whenever that fails."""

    def __init__(
        self, fleet: "Fleet", node: Node, link: "WatchedLink", works: Sequence[str]
    ) -> None:
        self.fleet = fleet
        self.node = node
        self.link = link
        self.works = works
        self.membership: Membership | None = None
        self.coordinators: dict[str, Coordinator] = {}
        self.hooks: list[tuple[str, str, int]] = []
        self.events: list[Event] = []
        self.settings = fleet.settings
        self.think_time = (0.0, 3.0)
        """The range of seconds between its reads and its writes while it leads."""
        self.task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def run_process(self) -> None:
        """Join, be a candidate for all works, and lead, until stopped."""
        while not self._stop.is_set():
            membership = self.build_membership()
            try:
                await membership.start()
                self.membership = membership
                for work in self.works:
                    await self.coordinate(work)
            except (Unavailable, Misconfigured):
                await self.node.clock.sleep(TIMING.heartbeat)
                continue
            await self._stop.wait()
            await membership.leave()

    def build_membership(self) -> Membership:
        """Return a membership that is not started yet."""
        components = self.node.components
        settled: Store = SettlingStore(self.link, components)
        if self.fleet.is_untampered:
            settled = RecordingStore(self.node, settled)
        host = self.fleet.host(self)
        return Membership(settled, components, self.settings, open_own=self._open, host=host)

    async def coordinate(self, work: str) -> Coordinator:
        """Become a candidate for a kind of work."""
        assert self.membership is not None
        governs = [f"{SINGLETON}-{work}"] if self.fleet.governs else []
        coordinator = await self.membership.coordinate(
            work, self.fleet.hooks(self, work), governs=governs
        )
        self.coordinators[work] = coordinator
        return coordinator

    def run(self, work: Awaitable[T]) -> "asyncio.Task[T]":
        """Run something on this node."""

        async def do() -> T:
            return await work

        return self.node.run(do())

    def events_named(self, name: str) -> list[Any]:
        """Return the recorded events of a name, in order."""
        return [event for event in self.events if event.name == name]

    async def _open(self) -> "WatchedLink":
        return self.link

    def stop(self) -> None:
        """Make the process leave and end."""
        self._stop.set()

    @property
    def has_stopped(self) -> bool:
        """Whether it was stopped, or ended by itself."""
        return self._stop.is_set() or (self.task is not None and self.task.done())

    @property
    def is_trusted(self) -> bool:
        """Whether it has a session that trusts itself now."""
        membership = self.membership
        return self.node.is_alive and membership is not None and membership.is_trusted

    @property
    def held_epochs(self) -> dict[str, int]:
        """The epochs that this worker believes to hold now, by work."""
        if not self.node.is_alive:
            return {}
        return {
            work: term.epoch
            for work, each in self.coordinators.items()
            if (term := each.election.held_term) is not None
        }

    def record_hook(self, work: str, what: str, term: Term) -> None:
        """Record that a hook was called."""
        self.hooks.append((work, what, term.epoch))
        self.fleet.world.note(self.node.name, what, work=work, epoch=term.epoch)


_EXPECTED_ERRORS = (Fenced, Unavailable, OutcomeUnknown, Misconfigured)


def write_singleton(worker: Worker, work: str) -> Hooks:
    """Return hooks that count in a singleton: read, wait, write; they also write after the end."""
    key, fleet = f"{SINGLETON}-{work}", worker.fleet

    async def become(term: Term) -> None:
        worker.record_hook(work, "gained", term)

    async def work_once(term: Term) -> None:
        with contextlib.suppress(*_EXPECTED_ERRORS):
            before = await term.get(key) or {"epoch": 0, "count": 0}
            fleet.record_touch(key, term.epoch)
            await worker.node.clock.sleep(fleet.world.dice.uniform(*worker.think_time))
            await term.put(key, {"epoch": term.epoch, "count": before["count"] + 1})

    async def stop(term: Term) -> None:
        worker.record_hook(work, "lost", term)
        # A former leader may still try; the store must refuse it.
        with contextlib.suppress(*_EXPECTED_ERRORS):
            await term.put(key, {"epoch": term.epoch, "count": 0})

    return Hooks(on_become=become, work=work_once, on_stop=stop)


def record_hooks(worker: Worker, work: str) -> Hooks:
    """Return hooks that only record that they were called."""

    async def become(term: Term) -> None:
        worker.record_hook(work, "gained", term)

    async def stop(term: Term) -> None:
        worker.record_hook(work, "lost", term)

    return Hooks(on_become=become, on_stop=stop)


class Fleet:
    """Workers in one world, each with its own link to the store.

    Args:
        seed: decides everything.
        size: the number of workers at first.
        works: what each of them is a candidate for by default.
        settings: the settings of their elections.
        hooks: builds the hooks that they run while they lead.
        governs: whether the leader governs a singleton.
        rate: the largest deviation of a clock's rate.
        store: the shared store; by default one with a clock and notifications.
        records_events: whether events are kept in `Worker.events`.
        trusts_clocks: whether clocks stay within the assumption. Otherwise two workers may believe
            to lead, and only what the store accepts is checked.
        is_untampered: whether no operator changes records. Only then can replies, and takes of
            roles, be checked against the workers' own writes.
        machines: by the names of workers; the others have machines of their own.
    """

    def __init__(
        self,
        seed: int,
        *,
        size: int = 4,
        works: Sequence[str] = ("work",),
        settings: CoordinatorSettings = SETTINGS,
        hooks: HookFactory = write_singleton,
        governs: bool = True,
        rate: float = 0.049,
        store: type[MemoryStore] = MemoryStore,
        records_events: bool = False,
        trusts_clocks: bool = True,
        is_untampered: bool = False,
        machines: Mapping[str, Machine] | None = None,
    ) -> None:
        self.world = World(seed)
        self.settings = settings
        self.hooks = hooks
        self.governs = governs
        self.is_untampered = is_untampered
        self.violations: list[Violation] = []
        self.deaths = 0
        self.works = works
        self.store = store(components=self.world.node("store").components)
        self.workers: list[Worker] = []
        self.host: Callable[[Worker], LoopHost] = lambda _: SameLoop()
        self._rate = rate
        self._machines = machines or {}
        self._listens = records_events
        self._trusts_clocks = trusts_clocks
        self._ended_workers: list[Worker] = []
        self._highest: dict[str, int] = {}
        self._declared_dead: set[str] = set()
        node = self.world.node("operator")
        self.operator = WatchedLink(self.world, node, self.store)
        """The link of a person, who may change records as no worker does."""
        self.operator.fleet = self
        for number in range(size):
            self.add(f"node-{number}")

    def add(self, name: str, works: Sequence[str] | None = None, *, skew: float = 0.0) -> Worker:
        """Add a process, with a clock of its own."""
        rate = self.world.dice.uniform(1 - self._rate, 1 + self._rate)
        machine = self._machines.get(name)
        node = self.world.node(name, rate=rate, skew=skew, machine=machine)
        link = WatchedLink(self.world, node, self.store)
        worker = Worker(self, node, link, self.works if works is None else works)
        link.fleet = self
        events = node.components.events
        if self._listens:
            events.on("*", worker.events.append)
        events.on("coord:worker-died", lambda event: self._declared_dead.add(event.incarnation))
        events.on("coord:member-failed", self._report_failure)
        self.workers.append(worker)
        return worker

    async def overwrite(
        self, key: str, value: Any, *, epoch: int | None = None, **how: Any
    ) -> None:
        """Replace a record, as a person might."""
        base = await self.store.get(key, tombstones=True)
        (outcome,) = await self.operator.write([Put(key, value, base, epoch=epoch, **how)])
        assert isinstance(outcome, Applied)

    def corrupt(self, key: str) -> None:
        """Corrupt a record so that the store itself cannot read it."""
        slots = self.store._data.records
        slots[key] = msgspec.structs.replace(slots[key], text="{")

    def run(self, story: Callable[[], Awaitable[T]]) -> T:
        """Run a story, and check that no invariant was violated."""
        result = self.world.run(story)
        assert self.all_violations == []
        return result

    def start(self, worker: Worker) -> None:
        """Start a process."""
        worker.task = worker.node.run(worker.run_process())

    def start_all(self) -> None:
        """Start every process."""
        for worker in self.workers:
            self.start(worker)

    def replace(self, worker: Worker) -> Worker:
        """Kill a process and start another one in its place."""
        worker.node.kill()
        return self.restart(worker)

    def restart(self, worker: Worker) -> Worker:
        """Start a process in place of one that has ended."""
        self.workers.remove(worker)
        self._ended_workers.append(worker)
        successor = self.add(worker.node.name, worker.works)
        successor.link.weather = worker.link.weather
        self.start(successor)
        return successor

    @property
    def links(self) -> list["WatchedLink"]:
        """The workers' links to the store."""
        return [worker.link for worker in self.workers]

    @property
    def faults(self) -> int:
        """The number of injected faults."""
        return sum(worker.link.faults for worker in (*self.workers, *self._ended_workers))

    def leaders(self, work: str = "work") -> list[Worker]:
        """Return the workers that believe to lead now."""
        return [worker for worker in self.workers if work in worker.held_epochs]

    def check_commit(self, change: Change) -> None:
        """Check the invariants at the moment of a commit."""
        if self._trusts_clocks:
            self._check_beliefs()
        if not isinstance(change, Put) or not isinstance(change.value, dict):
            return
        if change.key.startswith(SINGLETON):
            self._check_singleton(change)
        elif _is_death(change):
            self._check_death(change.key)

    def record_touch(self, key: str, epoch: int) -> None:
        """Record that a term has read a singleton: no earlier term may write it from now on."""
        self._highest[key] = max(epoch, self._highest.get(key, 0))

    def _check_beliefs(self) -> None:
        """Check that at most one worker leads each work, and that no dead session trusts itself."""
        # Runs for all workers at every commit, so it must be fast.
        leaders: dict[str, str] = {}
        for worker in self.workers:
            membership, name = worker.membership, worker.node.name
            if membership is None or not worker.node.is_alive:
                continue
            session = membership.session
            if session.incarnation in self._declared_dead and session.trusted:
                self._add_violation("E5", f"{session.incarnation} trusts itself after its death")
            for work, each in worker.coordinators.items():
                if each.election.held_term and leaders.setdefault(work, name) != name:
                    self._add_violation("E4", f"several lead {work}: {leaders[work]}, {name}")

    def _check_death(self, key: str) -> None:
        """Check that a session that is declared dead does not trust itself."""
        self.deaths += 1
        for worker in self.workers:
            membership = worker.membership
            is_same = membership is not None and key == f"session/{membership.incarnation}"
            if is_same and worker.is_trusted and self._trusts_clocks:
                self._add_violation("E5", f"{key} trusts itself and was declared dead")

    def _check_singleton(self, change: Put) -> None:
        """Check that no earlier term writes after a later one; a seal rewrites the same value."""
        key, epoch = change.key, change.value["epoch"]
        is_seal = change.base is not None and change.base.value == change.value
        if not is_seal and epoch < self._highest.get(key, 0):
            self._add_violation("E3", f"{key}: epoch {epoch} was accepted late")
        self.record_touch(key, epoch)

    async def check_recovery(self) -> None:
        """Check recovery within two timeouts and a heartbeat interval of the slowest clock."""
        loop = self.world.loop
        end = loop.time() + (1 + 2 * self._rate) * (2 * TIMING.timeout + TIMING.heartbeat)
        # Nothing signals recovery, so it is polled.
        while (problems := self._find_problems()) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(TIMING.heartbeat / 10)
        for problem in problems:
            self._add_violation("EL1", f"two timeouts after the last fault {problem}")

    def check_steady(self, invariant: str = "EL1") -> None:
        """Check the steady state: one worker leads each work, and all have a session."""
        for problem in self._find_problems():
            self._add_violation(invariant, f"in the steady state {problem}")

    def _find_problems(self) -> list[str]:
        problems = []
        for work in sorted({work for worker in self._list_candidates() for work in worker.works}):
            leaders = self.leaders(work)
            names = [worker.node.name for worker in leaders]
            if len(leaders) != 1:
                problems.append(f"{names} lead {work}")
            elif leaders[0].coordinators[work].term is None:
                problems.append(f"{names} holds {work} and does nothing")
        unjoined = [each.node.name for each in self._list_candidates() if not each.is_trusted]
        return problems + [f"{name} has no session" for name in unjoined]

    def _list_candidates(self) -> list[Worker]:
        return [each for each in self.workers if each.node.is_alive and not each.has_stopped]

    @property
    def all_violations(self) -> list[Violation]:
        """All violations: of the checks at commits, and of the history."""
        history = self.world.history
        # An operator may write anything.
        by_workers = [each for each in history if each.node != "operator"]
        return [
            *self.violations,
            *self.world.violations,
            *check_commits(history),
            *check_roles(by_workers),
            *(check_takes(history) + check_replies(history) if self.is_untampered else []),
            *self._check_hooks(),
            *self._check_tasks(),
        ]

    def _report_failure(self, event: Event) -> None:
        self._add_violation("A1", repr(event))

    def _add_violation(self, invariant: str, detail: str) -> None:
        self.violations.append(Violation(invariant, detail))

    def _check_tasks(self) -> list[Violation]:
        """Check that no background task failed unnoticed."""
        tasks = [
            (worker.node.name, task)
            for worker in (*self.workers, *self._ended_workers)
            for task in (worker.task, *(each._task for each in worker.coordinators.values()))
            if task is not None and task.done() and not task.cancelled()
        ]
        return [
            describe_failure(task.exception(), f"{name}: a task died: {task.exception()!r}")
            for name, task in tasks
            if task.exception()
        ]

    def _check_hooks(self) -> list[Violation]:
        """Check that each worker's hooks came once per term: gained, then lost, then the next."""
        violations = []
        for worker in (*self.workers, *self._ended_workers):
            for work in self.works:
                calls = [(what, epoch) for w, what, epoch in worker.hooks if w == work]
                gained = [epoch for what, epoch in calls if what == "gained"]
                paired = [fact for epoch in gained for fact in (("gained", epoch), ("lost", epoch))]
                if calls != paired[: len(calls)] or gained != sorted(set(gained)):
                    found = f"{worker.node.name}: hooks out of order: {calls}"
                    violations.append(Violation("E6", found))
        return violations


def _is_death(change: Change) -> bool:
    """Whether a change ends a session."""
    if not isinstance(change, Put) or not isinstance(change.value, dict):
        return False
    return change.key.startswith("session/") and change.value.get("state") == "dead"


class WatchedLink(Link):
    """A link whose commits are checked as they happen, and whose requests are counted.

    Attributes:
        requests: the number of requests sent.
        refusal: the error that requests raise, if any.
        refused_prefix: if given, only writes to keys with this prefix raise it.
        delayed_writes: a key prefix and seconds; such writes get no reply, and land that late.
        fails_waits: whether waiting for changes fails.
        slow_reads: seconds that a read takes to arrive, in spite of any timeout.
        slow_replies: seconds that the reply to a read takes, likewise.
        slow_deaths: seconds that the write of another session's death takes to arrive, likewise.
    """

    fleet: Fleet
    requests = 0
    refusal: Exception | None = None
    refused_prefix = ""
    delayed_writes: tuple[str, float] | None = None
    fails_waits = False
    slow_reads = 0.0
    slow_replies = 0.0
    slow_deaths = 0.0

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records, slowly if so configured."""
        if self.slow_reads:
            await asyncio.sleep(self.slow_reads)
        records = await super().get_many(keys, tombstones=tombstones)
        if self.slow_replies:
            await asyncio.sleep(self.slow_replies)
        return records

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Count a request, and send it."""
        self.requests += 1
        if self.refusal is not None and not self.refused_prefix:
            await asyncio.sleep(self._draw(self.weather.latency))
            raise self.refusal
        return await super().around(call, sent, work)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Count a request, and send it."""
        self.requests += 1
        if self.refusal is not None and changes[0].key.startswith(self.refused_prefix):
            await asyncio.sleep(self._draw(self.weather.latency))
            raise self.refusal
        if self.delayed_writes is not None and changes[0].key.startswith(self.delayed_writes[0]):
            stamped = assign_nonces(changes, self._node.components.ids)
            start = self._world.start
            self._schedule(self.delayed_writes[1], lambda: start(self._commit(stamped)))
            await asyncio.sleep(self.weather.latency)
            return [Unknown("no answer") for _ in changes]
        if self.slow_deaths and _is_death(changes[0]):
            await asyncio.sleep(self.slow_deaths)
        return await super().write(changes)

    async def wait(self, topic: str, timeout: float) -> None:
        """Wait for a change, or fail if so configured."""
        if self.fails_waits:
            raise Unavailable(self.name, "the connection was lost")
        await super().wait(topic, timeout)

    def _record_commit(self, change: Change, outcome: Applied) -> None:
        super()._record_commit(change, outcome)
        self.fleet.check_commit(change)


STORMY = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=120
)
_TWO_WORKS: Sequence[Sequence[str]] = [("sweep",), ("dispatch",), ("dispatch", "sweep")]


async def storm(fleet: Fleet, *, suspends: bool = False) -> None:
    """Change the weather, strike processes and request handovers, for an hour."""
    world = fleet.world
    end = world.loop.time() + HOUR
    while world.loop.time() < end and not fleet.violations:
        worker = world.dice.choice(fleet.workers)
        worker.link.weather = _draw_weather(world)
        strike = world.dice.choice(_STRIKES)
        if suspends and world.dice.random() < 0.2:
            worker.node.suspend()
        elif strike is not None:
            strike(fleet, worker)
        await asyncio.sleep(world.dice.uniform(0, 60))
        worker.node.resume()
        link = worker.link
        link.requests_pass = link.replies_pass = True
        link.forbidden = link.throttled = False


def _pause(_: Fleet, worker: Worker) -> None:
    worker.node.pause()


def _cut(_: Fleet, worker: Worker) -> None:
    worker.link.requests_pass = False


def _mute(_: Fleet, worker: Worker) -> None:
    worker.link.replies_pass = False


def _forbid(_: Fleet, worker: Worker) -> None:
    worker.link.forbidden = True


def _throttle(_: Fleet, worker: Worker) -> None:
    worker.link.throttled = True


def _step_clock(fleet: Fleet, worker: Worker) -> None:
    worker.node.clock.skew += fleet.world.dice.uniform(-HOUR, HOUR)


def _replace(fleet: Fleet, worker: Worker) -> None:
    if fleet.world.dice.random() < 0.3:
        fleet.replace(worker)


def _leave(fleet: Fleet, worker: Worker) -> None:
    if fleet.world.dice.random() < 0.3:
        worker.run(_leave_and_return(fleet, worker))


def _withdraw(fleet: Fleet, worker: Worker) -> None:
    worker.run(_withdraw_and_return(fleet, worker))


def _request_handover(fleet: Fleet, worker: Worker) -> None:
    worker.run(_force_handover(fleet, worker))


Strike: TypeAlias = Callable[[Fleet, Worker], None]
_STRIKES: list[Strike | None] = [
    _pause,
    _cut,
    _mute,
    _forbid,
    _throttle,
    _step_clock,
    _replace,
    _leave,
    _withdraw,
    _request_handover,
    _request_handover,
    None,
    None,
]


def _draw_weather(world: World) -> Weather:
    """Return random weather: which faults occur, and how often."""
    most = world.dice.choice([0.0, 0.1, 0.4])
    share = world.dice.choice([0.2, 1.0])
    kinds = ("slow", "refused", "undecided", "lost", "unanswered", "late", "doubled")
    chances: dict[str, Any] = {kind: most if world.dice.random() < share else 0.0 for kind in kinds}
    weather = Weather(**chances, corrupt=most / 10 if world.dice.random() < share else 0.0)
    return widen(world, weather)


async def _leave_and_return(fleet: Fleet, worker: Worker) -> None:
    """Stop a process cleanly and start another."""
    if worker.has_stopped:
        return
    worker.stop()
    assert worker.task is not None
    await asyncio.wait([worker.task])
    if worker in fleet.workers:
        fleet.restart(worker)


async def _withdraw_and_return(fleet: Fleet, worker: Worker) -> None:
    """Withdraw from one kind of work for a while."""
    work = fleet.world.dice.choice(worker.works)
    coordinator = worker.coordinators.get(work)
    if coordinator is None or worker.has_stopped:
        return
    await coordinator.stop()
    await worker.node.clock.sleep(fleet.world.dice.uniform(0, 30))
    # Another strike may have done the same meanwhile.
    if worker.coordinators[work] is coordinator and not worker.has_stopped:
        with contextlib.suppress(JobsyncError):
            await worker.coordinate(work)


async def _force_handover(fleet: Fleet, worker: Worker) -> None:
    """Ask the leader to hand over, sometimes to a certain worker."""
    if not worker.coordinators:
        return
    coordinator = worker.coordinators[fleet.world.dice.choice(sorted(worker.coordinators))]
    other = fleet.world.dice.choice([None, *fleet.workers])
    desired = None if other is None or other.membership is None else other.membership.worker_id
    with contextlib.suppress(JobsyncError):
        await coordinator.ensure_coordinator(force=True, desired_coordinator=desired)


def run_storm(seed: int) -> Fleet:
    """Run a fleet through a stormy hour and its recovery."""
    return _run(_stormy_fleet(seed), suspends=False)


def run_suspends(seed: int) -> Fleet:
    """Run a fleet through an hour with suspends, in which clocks stand still."""
    return _run(_stormy_fleet(seed, trusts_clocks=False), suspends=True)


def build_machines() -> dict[str, Machine]:
    """Return machines for six workers: three share one, each of the others almost the same."""
    shared = Machine("web-1", "boot-1", "pid:[1]")
    return {
        "node-0": shared,
        "node-1": shared,
        "node-2": shared,
        "node-3": Machine("web-1", "boot-1", "pid:[2]"),
        "node-4": Machine("web-1", "boot-2", "pid:[1]"),
        "node-5": Machine("web-2", "boot-1", "pid:[1]"),
    }


def run_neighbours(seed: int) -> Fleet:
    """Run workers on shared and on similar machines through a stormy hour and its recovery."""
    fleet = Fleet(
        seed,
        size=6,
        settings=STORMY,
        store=BilledStore if seed % 2 else MemoryStore,
        is_untampered=True,
        machines=build_machines(),
    )
    return _run(fleet, suspends=False)


def _stormy_fleet(seed: int, *, trusts_clocks: bool = True) -> Fleet:
    """Build a fleet of equal or different workers, on either kind of store."""
    store = BilledStore if seed % 2 else MemoryStore
    is_mixed = seed % 3 == 0
    fleet = Fleet(
        seed,
        size=0 if is_mixed else 4,
        settings=STORMY,
        store=store,
        trusts_clocks=trusts_clocks,
        is_untampered=True,
    )
    if is_mixed:
        fleet.works = ("dispatch", "sweep")
        for number in range(5):
            fleet.add(f"node-{number}", _TWO_WORKS[number % 3])
    return fleet


def _run(fleet: Fleet, *, suspends: bool) -> Fleet:
    async def story() -> None:
        fleet.start_all()
        await storm(fleet, suspends=suspends)
        _calm(fleet.links)
        await fleet.check_recovery()
        await asyncio.sleep(20 * TIMING.timeout)
        fleet.check_steady()

    fleet.world.run(story)
    return fleet


def _calm(links: Iterable[WatchedLink]) -> None:
    for link in links:
        link.weather = CALM
