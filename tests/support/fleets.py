"""Fleets of workers that elect a coordinator, in a simulated world, and what must hold there."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
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
from jobsync.stores.contract import Applied, Change, Outcome, Put, Record, Store, Unknown
from jobsync.stores.memory import MemoryStore
from jobsync.stores.record_codec import assign_nonces
from jobsync.stores.settling import SettlingStore
from jobsync.testing.invariants import (
    Violation,
    check_commits,
    check_replies,
    check_roles,
    check_takes,
    describe_failure,
)
from jobsync.testing.network import CALM, Link, Weather
from jobsync.testing.recording import RecordingStore
from jobsync.testing.world import Node, World

__all__ = [
    "HOUR",
    "SETTINGS",
    "SINGLETON",
    "TIMING",
    "Apart",
    "DearStore",
    "Fleet",
    "HookMaker",
    "Worker",
    "keep_books",
    "run_storm",
    "run_suspends",
    "storm",
    "take_note",
]

T = TypeVar("T")

TIMING = Timing(heartbeat=5, timeout=15)
SETTINGS = CoordinatorSettings(heartbeat_interval=5, worker_timeout=15)
HOUR = 3600.0
SINGLETON = "single/ledger"

HookMaker: TypeAlias = Callable[["Worker", str], Hooks]
"""Makes what a worker does while it leads a kind of work."""


class DearStore(MemoryStore):
    """A store that answers as a bucket does: it has no clock, and tells of no change."""

    is_billed = True

    async def age(self, record: Record) -> float | None:
        """Tell nothing."""
        return await Store.age(self, record)

    async def now(self) -> None:
        """Tell nothing."""


class Apart(SameLoop):
    """Runs a member on a node of its own, as on a thread: it beats on while its home is blocked."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def start(self, main: Main) -> None:
        """Begin to run it."""
        self._loop = asyncio.get_running_loop()
        self._task = self._node.run(main())


class Worker:
    """One process: a membership on a node, started again whenever it fails."""

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
        self.heard: list[Event] = []
        self.settings = fleet.settings
        self.thinks_for = (0.0, 3.0)
        """How many seconds pass between what it reads and what it writes while it leads."""
        self.life: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def live(self) -> None:
        """Join, stand for every work, and lead until told to stop."""
        while not self._stop.is_set():
            membership = self.make_membership()
            try:
                await membership.start()
                self.membership = membership
                for work in self.works:
                    await self.stand(work)
            except (Unavailable, Misconfigured):
                await self.node.clock.sleep(TIMING.heartbeat)
                continue
            await self._stop.wait()
            await membership.leave()

    def make_membership(self) -> Membership:
        """Give a place in the fleet that is not taken yet."""
        components = self.node.components
        settled: Store = SettlingStore(self.link, components)
        if self.fleet.is_untouched:
            settled = RecordingStore(self.node, settled)
        host = self.fleet.host(self)
        return Membership(settled, components, self.settings, open_own=self._open, host=host)

    async def stand(self, work: str) -> Coordinator:
        """Stand for a kind of work."""
        assert self.membership is not None
        governs = [f"{SINGLETON}-{work}"] if self.fleet.governs else []
        coordinator = await self.membership.coordinate(
            work, self.fleet.hooks(self, work), governs=governs
        )
        self.coordinators[work] = coordinator
        return coordinator

    def run(self, work: Awaitable[T]) -> "asyncio.Task[T]":
        """Do something on this node."""

        async def do() -> T:
            return await work

        return self.node.run(do())

    def told(self, name: str) -> list[Any]:
        """Give the events of a name that this worker heard, in order."""
        return [event for event in self.heard if event.name == name]

    async def _open(self) -> "WatchedLink":
        return self.link

    def stop(self) -> None:
        """Leave in good order."""
        self._stop.set()

    @property
    def has_stopped(self) -> bool:
        """Whether it was told to stop, or ended by itself."""
        return self._stop.is_set() or (self.life is not None and self.life.done())

    @property
    def is_trusted(self) -> bool:
        """Whether it has a session that trusts itself, at this moment."""
        membership = self.membership
        return self.node.is_alive and membership is not None and membership.is_trusted

    @property
    def held(self) -> dict[str, int]:
        """The epochs that this worker believes to hold, at this moment."""
        if not self.node.is_alive:
            return {}
        return {
            work: held.epoch
            for work, each in self.coordinators.items()
            if (held := each.election.held_term) is not None
        }

    def note(self, work: str, what: str, term: Term) -> None:
        """Write down that a hook was called."""
        self.hooks.append((work, what, term.epoch))
        self.fleet.world.note(self.node.name, what, work=work, epoch=term.epoch)


_REFUSED = (Fenced, Unavailable, OutcomeUnknown, Misconfigured)


def keep_books(worker: Worker, work: str) -> Hooks:
    """Count in a singleton, as coordinators do: read, wait a while, write; and at the end too."""
    key, fleet = f"{SINGLETON}-{work}", worker.fleet

    async def become(term: Term) -> None:
        worker.note(work, "gained", term)

    async def work_once(term: Term) -> None:
        with contextlib.suppress(*_REFUSED):
            before = await term.get(key) or {"epoch": 0, "count": 0}
            fleet.judge_touch(key, term.epoch)
            await worker.node.clock.sleep(fleet.world.dice.uniform(*worker.thinks_for))
            await term.put(key, {"epoch": term.epoch, "count": before["count"] + 1})

    async def stop(term: Term) -> None:
        worker.note(work, "lost", term)
        # Whoever leads no more may still try; the store must know better.
        with contextlib.suppress(*_REFUSED):
            await term.put(key, {"epoch": term.epoch, "count": 0})

    return Hooks(on_become=become, work=work_once, on_stop=stop)


def take_note(worker: Worker, work: str) -> Hooks:
    """Lead, and touch nothing."""

    async def become(term: Term) -> None:
        worker.note(work, "gained", term)

    async def stop(term: Term) -> None:
        worker.note(work, "lost", term)

    return Hooks(on_become=become, on_stop=stop)


class Fleet:
    """Workers in one world, each with its own way to the store.

    Args:
        seed: decides everything.
        size: how many workers there are at first.
        works: what each of them stands for, unless told otherwise.
        settings: what their elections go by.
        hooks: what they do while they lead.
        governs: whether a singleton is theirs to write while they do.
        rate: how far clocks are off, at most.
        store: what they share; a cheap one with a clock by default.
        listens: whether what they tell is kept, in `Worker.heard`.
        trusts_clocks: whether clocks keep the promise; without, two may believe to lead, and
            only what the store refuses counts.
        is_untouched: whether no person changes a record; only then can what workers are told,
            and from whom they take roles, be held against what they did themselves.
    """

    def __init__(
        self,
        seed: int,
        *,
        size: int = 4,
        works: Sequence[str] = ("work",),
        settings: CoordinatorSettings = SETTINGS,
        hooks: HookMaker = keep_books,
        governs: bool = True,
        rate: float = 0.049,
        store: type[MemoryStore] = MemoryStore,
        listens: bool = False,
        trusts_clocks: bool = True,
        is_untouched: bool = False,
    ) -> None:
        self.world = World(seed)
        self.settings = settings
        self.hooks = hooks
        self.governs = governs
        self.is_untouched = is_untouched
        self.violations: list[Violation] = []
        self.deaths = 0
        self.works = works
        self.store = store(components=self.world.node("store").components)
        self.workers: list[Worker] = []
        self.host: Callable[[Worker], LoopHost] = lambda _: SameLoop()
        self._rate = rate
        self._listens = listens
        self._trusts_clocks = trusts_clocks
        self._graves: list[Worker] = []
        self._highest: dict[str, int] = {}
        self._called_dead: set[str] = set()
        node = self.world.node("operator")
        self.operator = WatchedLink(self.world, node, self.store)
        """How a person gets at the records, who may do to them what no worker does."""
        self.operator.fleet = self
        for number in range(size):
            self.add(f"node-{number}")

    def add(self, name: str, works: Sequence[str] | None = None, *, skew: float = 0.0) -> Worker:
        """Add a process, with a clock of its own."""
        rate = self.world.dice.uniform(1 - self._rate, 1 + self._rate)
        node = self.world.node(name, rate=rate, skew=skew)
        link = WatchedLink(self.world, node, self.store)
        worker = Worker(self, node, link, self.works if works is None else works)
        link.fleet = self
        events = node.components.events
        if self._listens:
            events.on("*", worker.heard.append)
        events.on("coord:worker-died", lambda event: self._called_dead.add(event.incarnation))
        events.on("coord:member-failed", self._note_failure)
        self.workers.append(worker)
        return worker

    async def overwrite(
        self, key: str, value: Any, *, epoch: int | None = None, **how: Any
    ) -> None:
        """Put something else in a record's place, as a person might."""
        base = await self.store.get(key, tombstones=True)
        (outcome,) = await self.operator.write([Put(key, value, base, epoch=epoch, **how)])
        assert isinstance(outcome, Applied)

    def garble(self, key: str) -> None:
        """Break a record so that the store itself cannot read it."""
        slots = self.store._data.records
        slots[key] = msgspec.structs.replace(slots[key], text="{")

    def tell(self, story: Callable[[], Awaitable[T]]) -> T:
        """Let a story happen to this fleet, and find nothing wrong."""
        result = self.world.run(story)
        assert self.verdict == []
        return result

    def start(self, worker: Worker) -> None:
        """Let a process run."""
        worker.life = worker.node.run(worker.live())

    def start_all(self) -> None:
        """Let every process run."""
        for worker in self.workers:
            self.start(worker)

    def replace(self, worker: Worker) -> Worker:
        """Kill a process, and start another in its place."""
        worker.node.kill()
        return self.follow(worker)

    def follow(self, worker: Worker) -> Worker:
        """Start a process in the place of one that has ended."""
        self.workers.remove(worker)
        self._graves.append(worker)
        successor = self.add(worker.node.name, worker.works)
        successor.link.weather = worker.link.weather
        self.start(successor)
        return successor

    @property
    def links(self) -> list["WatchedLink"]:
        """Every worker's way to the store."""
        return [worker.link for worker in self.workers]

    @property
    def faults(self) -> int:
        """How many were injected."""
        return sum(worker.link.faults for worker in (*self.workers, *self._graves))

    def leaders(self, work: str = "work") -> list[Worker]:
        """Give the workers that believe to lead, at this moment."""
        return [worker for worker in self.workers if work in worker.held]

    def judge(self, change: Change) -> None:
        """Look, at the moment of a commit, at what everybody believes."""
        if self._trusts_clocks:
            self._judge_beliefs()
        if not isinstance(change, Put) or not isinstance(change.value, dict):
            return
        if change.key.startswith(SINGLETON):
            self._judge_singleton(change)
        elif change.key.startswith("session/") and change.value.get("state") == "dead":
            self._judge_death(change.key)

    def judge_touch(self, key: str, epoch: int) -> None:
        """Take note that a term has read a singleton: from now on no earlier one may write it."""
        self._highest[key] = max(epoch, self._highest.get(key, 0))

    def _judge_beliefs(self) -> None:
        """Check that at most one worker leads each kind of work, and nobody who was called dead."""
        # Asked of everybody at every commit, so it goes the shortest way.
        leaders: dict[str, str] = {}
        for worker in self.workers:
            membership, name = worker.membership, worker.node.name
            if membership is None or not worker.node.is_alive:
                continue
            session = membership.session
            if session.incarnation in self._called_dead and session.trusted:
                self._blame("E5", f"{session.incarnation} trusts itself after its death")
            for work, each in worker.coordinators.items():
                if each.election.held_term and leaders.setdefault(work, name) != name:
                    self._blame("E4", f"several lead {work}: {leaders[work]}, {name}")

    def _judge_death(self, key: str) -> None:
        """Check that nobody trusts himself who was called dead."""
        self.deaths += 1
        for worker in self.workers:
            membership = worker.membership
            named = membership is not None and key == f"session/{membership.incarnation}"
            if named and worker.is_trusted and self._trusts_clocks:
                self._blame("E5", f"{key} trusts itself and was called dead")

    def _judge_singleton(self, change: Put) -> None:
        """Check that no earlier term writes after a later one; a seal writes what was there."""
        key, epoch = change.key, change.value["epoch"]
        is_seal = change.base is not None and change.base.value == change.value
        if not is_seal and epoch < self._highest.get(key, 0):
            self._blame("E3", f"{key}: epoch {epoch} was accepted late")
        self.judge_touch(key, epoch)

    async def judge_recovery(self) -> None:
        """Check that all comes right, once, within two timeouts and a beat of the slowest clock."""
        loop = self.world.loop
        end = loop.time() + (1 + 2 * self._rate) * (2 * TIMING.timeout + TIMING.heartbeat)
        # Nobody tells that all is well: it is looked at from outside.
        while (wrong := self._find_wrong()) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(TIMING.heartbeat / 10)
        for each in wrong:
            self._blame("EL1", f"two timeouts after all went well {each}")

    def judge_rest(self, invariant: str = "EL1") -> None:
        """Check what must hold when all is quiet again: one leads, and everybody has a session."""
        for each in self._find_wrong():
            self._blame(invariant, f"when all is quiet {each}")

    def _find_wrong(self) -> list[str]:
        wrong = []
        for work in sorted({work for worker in self._standing() for work in worker.works}):
            leaders = self.leaders(work)
            names = [worker.node.name for worker in leaders]
            if len(leaders) != 1:
                wrong.append(f"{names} lead {work}")
            elif leaders[0].coordinators[work].term is None:
                wrong.append(f"{names} has {work} and does nothing")
        homeless = [each.node.name for each in self._standing() if not each.is_trusted]
        return wrong + [f"{name} has no session" for name in homeless]

    def _standing(self) -> list[Worker]:
        return [each for each in self.workers if each.node.is_alive and not each.has_stopped]

    @property
    def verdict(self) -> list[Violation]:
        """Everything that was wrong; nothing must be."""
        history = self.world.history
        # A person may write anything.
        by_workers = [each for each in history if each.node != "operator"]
        return [
            *self.violations,
            *self.world.violations,
            *check_commits(history),
            *check_roles(by_workers),
            *(check_takes(history) + check_replies(history) if self.is_untouched else []),
            *self._judge_hooks(),
            *self._judge_tasks(),
        ]

    def _note_failure(self, event: Event) -> None:
        self._blame("A1", repr(event))

    def _blame(self, invariant: str, detail: str) -> None:
        self.violations.append(Violation(invariant, detail))

    def _judge_tasks(self) -> list[Violation]:
        """Check that nothing in the background died in silence."""
        tasks = [
            (worker.node.name, task)
            for worker in (*self.workers, *self._graves)
            for task in (worker.life, *(each._task for each in worker.coordinators.values()))
            if task is not None and task.done() and not task.cancelled()
        ]
        return [
            describe_failure(task.exception(), f"{name}: a task died: {task.exception()!r}")
            for name, task in tasks
            if task.exception()
        ]

    def _judge_hooks(self) -> list[Violation]:
        """Check that every worker heard of each term once: gained, then lost, then the next."""
        violations = []
        for worker in (*self.workers, *self._graves):
            for work in self.works:
                told = [(what, epoch) for w, what, epoch in worker.hooks if w == work]
                gained = [epoch for what, epoch in told if what == "gained"]
                paired = [fact for epoch in gained for fact in (("gained", epoch), ("lost", epoch))]
                if told != paired[: len(told)] or gained != sorted(set(gained)):
                    found = f"{worker.node.name}: hooks out of order: {told}"
                    violations.append(Violation("E6", found))
        return violations


class WatchedLink(Link):
    """A link whose commits are judged as they happen, and whose requests are counted.

    Attributes:
        requests: how many were sent.
        refusal: what every request gets, where not None.
        refused: whose writes get it too; of all keys by default.
        delays: writes to keys that begin so get no answer, and land so many seconds later.
        is_deaf: whether waiting for changes fails.
        slow_reads: seconds that what is read takes to get there, beyond all patience.
        slow_replies: seconds that what was read takes to come back, likewise.
    """

    fleet: Fleet
    requests = 0
    refusal: Exception | None = None
    refused = ""
    delays: tuple[str, float] | None = None
    is_deaf = False
    slow_reads = 0.0
    slow_replies = 0.0

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records, slowly if told so."""
        if self.slow_reads:
            await asyncio.sleep(self.slow_reads)
        records = await super().get_many(keys, tombstones=tombstones)
        if self.slow_replies:
            await asyncio.sleep(self.slow_replies)
        return records

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Count a request, and send it."""
        self.requests += 1
        if self.refusal is not None and not self.refused:
            await asyncio.sleep(self._draw(self.weather.latency))
            raise self.refusal
        return await super().around(call, sent, work)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Count a request, and send it."""
        self.requests += 1
        if self.refusal is not None and changes[0].key.startswith(self.refused):
            await asyncio.sleep(self._draw(self.weather.latency))
            raise self.refusal
        if self.delays is not None and changes[0].key.startswith(self.delays[0]):
            marked = assign_nonces(changes, self._node.components.ids)
            start = self._world.start
            self._schedule(self.delays[1], lambda: start(self._commit(marked)))
            await asyncio.sleep(self.weather.latency)
            return [Unknown("no answer") for _ in changes]
        return await super().write(changes)

    async def wait(self, topic: str, timeout: float) -> None:
        """Wait for a change, if it can."""
        if self.is_deaf:
            raise Unavailable(self.name, "the connection was lost")
        await super().wait(topic, timeout)

    def _record_commit(self, change: Change, outcome: Applied) -> None:
        super()._record_commit(change, outcome)
        self.fleet.judge(change)


STORMY = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=120
)
_TWO_WORKS: Sequence[Sequence[str]] = [("sweep",), ("dispatch",), ("dispatch", "sweep")]


async def storm(fleet: Fleet, *, suspends: bool = False) -> None:
    """Change the weather, strike processes and ask for changes, for an hour."""
    world = fleet.world
    end = world.loop.time() + HOUR
    while world.loop.time() < end and not fleet.violations:
        worker = world.dice.choice(fleet.workers)
        worker.link.weather = _draw_weather(world)
        stroke = world.dice.choice(_STROKES)
        if suspends and world.dice.random() < 0.2:
            worker.node.suspend()
        elif stroke is not None:
            stroke(fleet, worker)
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


def _put_right(fleet: Fleet, worker: Worker) -> None:
    worker.node.clock.skew += fleet.world.dice.uniform(-HOUR, HOUR)


def _replace(fleet: Fleet, worker: Worker) -> None:
    if fleet.world.dice.random() < 0.3:
        fleet.replace(worker)


def _let_leave(fleet: Fleet, worker: Worker) -> None:
    if fleet.world.dice.random() < 0.3:
        worker.run(_leave_and_return(fleet, worker))


def _let_withdraw(fleet: Fleet, worker: Worker) -> None:
    worker.run(_withdraw_and_return(fleet, worker))


def _let_ask(fleet: Fleet, worker: Worker) -> None:
    worker.run(_ask_for_another(fleet, worker))


Stroke: TypeAlias = Callable[[Fleet, Worker], None]
_STROKES: list[Stroke | None] = [
    _pause,
    _cut,
    _mute,
    _forbid,
    _throttle,
    _put_right,
    _replace,
    _let_leave,
    _let_withdraw,
    _let_ask,
    _let_ask,
    None,
    None,
]


def _draw_weather(world: World) -> Weather:
    """Draw which faults there are, and how often: none, one or all of them."""
    most = world.dice.choice([0.0, 0.1, 0.4])
    share = world.dice.choice([0.2, 1.0])
    kinds = ("slow", "refused", "undecided", "lost", "unanswered", "late", "doubled")
    chances = {kind: most if world.dice.random() < share else 0.0 for kind in kinds}
    return Weather(**chances, corrupt=most / 10 if world.dice.random() < share else 0.0)


async def _leave_and_return(fleet: Fleet, worker: Worker) -> None:
    """Stop a process in good order, and start another."""
    if worker.has_stopped:
        return
    worker.stop()
    assert worker.life is not None
    await asyncio.wait([worker.life])
    if worker in fleet.workers:
        fleet.follow(worker)


async def _withdraw_and_return(fleet: Fleet, worker: Worker) -> None:
    """Stand no longer for one kind of work, for a while."""
    work = fleet.world.dice.choice(worker.works)
    coordinator = worker.coordinators.get(work)
    if coordinator is None or worker.has_stopped:
        return
    await coordinator.stop()
    await worker.node.clock.sleep(fleet.world.dice.uniform(0, 30))
    # Somebody else here may have been as quick.
    if worker.coordinators[work] is coordinator and not worker.has_stopped:
        with contextlib.suppress(JobsyncError):
            await worker.stand(work)


async def _ask_for_another(fleet: Fleet, worker: Worker) -> None:
    """Ask whoever leads to hand over, perhaps to somebody in particular."""
    if not worker.coordinators:
        return
    coordinator = worker.coordinators[fleet.world.dice.choice(sorted(worker.coordinators))]
    other = fleet.world.dice.choice([None, *fleet.workers])
    wanted = None if other is None or other.membership is None else other.membership.worker_id
    with contextlib.suppress(JobsyncError):
        await coordinator.ensure_coordinator(force=True, desired_coordinator=wanted)


def run_storm(seed: int) -> Fleet:
    """Run a fleet through a stormy hour, then let it rest."""
    return _run(_stormy_fleet(seed), suspends=False)


def run_suspends(seed: int) -> Fleet:
    """Run a fleet through an hour in which clocks stand still: only the store can tell then."""
    return _run(_stormy_fleet(seed, trusts_clocks=False), suspends=True)


def _stormy_fleet(seed: int, *, trusts_clocks: bool = True) -> Fleet:
    """Make a fleet: of like workers or of unlike ones, on a store of either price."""
    store = DearStore if seed % 2 else MemoryStore
    unlike = seed % 3 == 0
    fleet = Fleet(
        seed,
        size=0 if unlike else 4,
        settings=STORMY,
        store=store,
        trusts_clocks=trusts_clocks,
        is_untouched=True,
    )
    if unlike:
        fleet.works = ("dispatch", "sweep")
        for number in range(5):
            fleet.add(f"node-{number}", _TWO_WORKS[number % 3])
    return fleet


def _run(fleet: Fleet, *, suspends: bool) -> Fleet:
    async def story() -> None:
        fleet.start_all()
        await storm(fleet, suspends=suspends)
        _calm(fleet.links)
        await fleet.judge_recovery()
        await asyncio.sleep(20 * TIMING.timeout)
        fleet.judge_rest()

    fleet.world.run(story)
    return fleet


def _calm(links: Iterable[WatchedLink]) -> None:
    for link in links:
        link.weather = CALM
