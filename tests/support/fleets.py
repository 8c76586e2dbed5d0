"""Fleets of workers that elect a coordinator, in a simulated world, and what must hold there."""

import asyncio
import contextlib
from collections.abc import Sequence

from jobsync import Unavailable
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.fencing import Term
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import SameLoop
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.trust import Timing
from jobsync.errors import Fenced, Misconfigured, OutcomeUnknown
from jobsync.stores.contract import Applied, Change, Outcome
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.invariants import check_commits, check_roles
from jobsync.testing.network import CALM, Link, Weather
from jobsync.testing.world import Node, World

__all__ = ["HOUR", "SETTINGS", "TIMING", "Fleet", "Worker", "run_storm"]

TIMING = Timing(beat=5, timeout=15)
SETTINGS = CoordinatorSettings(heartbeat_interval=5, worker_timeout=15)
HOUR = 3600.0
SINGLETON = "single/ledger"


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
        self._stop = asyncio.Event()

    async def live(self) -> None:
        """Join, stand for every work, and lead until told to stop."""
        components = self.node.components
        while not self._stop.is_set():
            settled = SettlingStore(self.link, components)
            membership = Membership(
                settled, components, self.fleet.settings, open_own=self._open, host=SameLoop()
            )
            try:
                await membership.start()
                self.membership = membership
                for work in self.works:
                    self.coordinators[work] = await membership.coordinate(
                        work, self._hooks(work), governs=[f"{SINGLETON}-{work}"]
                    )
            except (Unavailable, Misconfigured):
                await self.node.clock.sleep(TIMING.beat)
                continue
            await self._stop.wait()
            await membership.leave()

    async def _open(self) -> "WatchedLink":
        return self.link

    def stop(self) -> None:
        """Leave in good order."""
        self._stop.set()

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
            if (held := each.election.held) is not None
        }

    def _hooks(self, work: str) -> Hooks:
        async def become(term: Term) -> None:
            self._note(work, "gained", term)

        async def work_once(term: Term) -> None:
            # Reads, waits a while, writes: as coordinators do, and as late as the weather likes.
            with contextlib.suppress(Fenced, Unavailable, OutcomeUnknown, Misconfigured):
                before = await term.get(f"{SINGLETON}-{work}") or {"epoch": 0, "count": 0}
                await self.node.clock.sleep(self.fleet.world.dice.uniform(0, 3))
                count = before["count"] + 1
                await term.put(f"{SINGLETON}-{work}", {"epoch": term.epoch, "count": count})

        async def stop(term: Term) -> None:
            self._note(work, "lost", term)

        return Hooks(on_become=become, work=work_once, on_stop=stop)

    def _note(self, work: str, what: str, term: Term) -> None:
        self.hooks.append((work, what, term.epoch))
        self.fleet.world.note(self.node.name, what, work=work, epoch=term.epoch)


class Fleet:
    """Workers in one world, each with its own way to the store."""

    def __init__(
        self,
        seed: int,
        *,
        size: int = 4,
        works: Sequence[str] = ("work",),
        settings: CoordinatorSettings = SETTINGS,
    ) -> None:
        self.world = World(seed)
        self.settings = settings
        self.violations: list[str] = []
        self.deaths = 0
        self.works = works
        self.store = MemoryStore(components=self.world.node("store").components)
        self.workers: list[Worker] = []
        self._graves: list[Worker] = []
        self._highest: dict[str, int] = {}
        for number in range(size):
            self.add(f"node-{number}")

    def add(self, name: str, works: Sequence[str] | None = None) -> Worker:
        """Add a process, with a clock of its own."""
        node = self.world.node(name, rate=self.world.dice.uniform(0.951, 1.049))
        link = WatchedLink(self.world, node, self.store)
        worker = Worker(self, node, link, self.works if works is None else works)
        link.fleet = self
        self.workers.append(worker)
        return worker

    def start(self, worker: Worker) -> None:
        """Let a process run."""
        worker.node.run(worker.live())

    def start_all(self) -> None:
        """Let every process run."""
        for worker in self.workers:
            self.start(worker)

    def replace(self, worker: Worker) -> Worker:
        """Kill a process, and start another in its place."""
        worker.node.kill()
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
        for work in self.works:
            if len(leaders := self.leaders(work)) > 1:
                names = [worker.node.name for worker in leaders]
                self.violations.append(f"several lead {work}: {names}")
        value = getattr(change, "value", None)
        if change.key.startswith(SINGLETON) and value is not None:
            self._judge_singleton(change.key, value["epoch"])
        if not change.key.startswith("session/") or not value or value.get("state") != "dead":
            return
        self.deaths += 1
        for worker in self.workers:
            membership = worker.membership
            named = membership is not None and change.key == f"session/{membership.incarnation}"
            if named and worker.is_trusted:
                self.violations.append(f"{change.key} trusts itself and was called dead")

    def _judge_singleton(self, key: str, epoch: int) -> None:
        """Check that no earlier term writes after a later one."""
        if epoch < self._highest.get(key, 0):
            self.violations.append(f"{key}: epoch {epoch} was accepted late")
        self._highest[key] = epoch

    def judge_rest(self) -> None:
        """Check what must hold when all is quiet again: one leads, and everybody has a session."""
        for work in self.works:
            leaders = [worker.node.name for worker in self.leaders(work)]
            if len(leaders) != 1:
                self.violations.append(f"when all is quiet {leaders} lead {work}")
        for worker in self.workers:
            if worker.node.is_alive and not worker.is_trusted:
                self.violations.append(f"when all is quiet {worker.node.name} has no session")

    @property
    def verdict(self) -> list[str]:
        """Everything that was wrong; nothing must be."""
        history = self.world.history
        return [
            *self.violations,
            *check_commits(history),
            *check_roles(history),
            *self._judge_hooks(),
        ]

    def _judge_hooks(self) -> list[str]:
        """Check that every worker heard of each term once: gained, then lost, then the next."""
        violations = []
        for worker in (*self.workers, *self._graves):
            for work in self.works:
                told = [(what, epoch) for w, what, epoch in worker.hooks if w == work]
                gained = [epoch for what, epoch in told if what == "gained"]
                paired = [fact for epoch in gained for fact in (("gained", epoch), ("lost", epoch))]
                if told != paired[: len(told)] or gained != sorted(set(gained)):
                    violations.append(f"{worker.node.name}: hooks out of order: {told}")
        return violations


class WatchedLink(Link):
    """A link whose commits are judged as they happen."""

    fleet: Fleet

    async def _commit(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await super()._commit(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Applied):
                self.fleet.judge(change)
        return outcomes


async def storm(fleet: Fleet) -> None:
    """Change the weather and strike processes, for an hour."""
    world = fleet.world
    end = world.loop.time() + HOUR
    while world.loop.time() < end:
        worker = fleet.workers[world.dice.randrange(len(fleet.workers))]
        node, link = worker.node, worker.link
        chance = world.dice.choice([0.0, 0.1, 0.4])
        link.weather = Weather(
            slow=chance, refused=chance, undecided=chance, lost=chance, late=chance, doubled=chance
        )
        match world.dice.randrange(7):
            case 0:
                node.pause()
            case 1:
                link.requests_pass = False
            case 2:
                link.replies_pass = False
            case 3 if world.dice.random() < 0.3:
                fleet.replace(worker)
            case _:
                pass
        await asyncio.sleep(world.dice.uniform(0, 60))
        node.resume()
        link.requests_pass = link.replies_pass = True


def run_storm(seed: int) -> Fleet:
    """Run a fleet through a stormy hour, then let it rest."""
    fleet = Fleet(seed)

    async def story() -> None:
        fleet.start_all()
        await storm(fleet)
        for link in fleet.links:
            link.weather = CALM
        await asyncio.sleep(20 * TIMING.timeout)
        fleet.judge_rest()

    fleet.world.run(story)
    return fleet
