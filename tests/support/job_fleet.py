"""A simulated fleet of nodes that share tasks, and the judge of what must hold there.

The processes of a fleet work through one list, as a user's would: with `job.tasks` (`TaskLoop`)
or with the loop that the guide prints. The judge checks every commit in the order in which the
store makes it: which nodes believe that they own a token (T1), which claims were accepted (T2,
and one at a time), when tokens moved (T3), and whether a task was done twice. A task may be done
twice only if its process died while it was doing it; such tasks are listed and counted.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import date
from typing import Any, Literal, TypeAlias

from jobsync import CoordinatorSettings, Membership, Unavailable
from jobsync.core.assignment import Plan, holders_of, owned_by, tokens_of
from jobsync.core.codec import Json
from jobsync.core.plan_documents import read_plan
from jobsync.errors import JobsyncError
from jobsync.jobs.events import TokenChange
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.node_loop import JobNodeSettings
from jobsync.jobs.task import Task
from jobsync.jobs.task_loop import TaskLoop
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.databases import SimulatedThread
from jobsync.testing.invariants import Violation, is_defect
from jobsync.testing.network import Link
from jobsync.testing.world import Node, Occurrence, World

__all__ = [
    "BEAT",
    "DAY",
    "RECLAIM_AFTER",
    "TIMEOUT",
    "TOKENS",
    "JobFleet",
    "SimulatedProcess",
    "Style",
]

Style: TypeAlias = Literal["task_loop", "guide_loop", "idle"]
"""How a process works: with `job.tasks`, with the guide's printed loop, or not at all."""

DAY = date(2026, 1, 5)
BEAT, TIMEOUT = 5.0, 15.0
RECLAIM_AFTER = 30.0
TOKENS = 60

_SETTINGS = CoordinatorSettings(
    heartbeat_interval=BEAT, worker_timeout=TIMEOUT, skip_cold_start=True
)


class SimulatedProcess:
    """One process that works through the list.

    Attributes:
        machine: the machine that it runs on.
        node: its node, once it has created one.
        current_task: the task that it is doing.
        is_stopping: set when it must end its loop and leave.
        error: the error that kept it from joining, or ended it.
        changes: the changes of its tokens that were reported.
        meter: counts its requests to the store.
    """

    def __init__(
        self, fleet: "JobFleet", machine: Node, style: Style, options: dict[str, Any]
    ) -> None:
        self.fleet = fleet
        self.machine = machine
        self.style = style
        self.membership: Membership | None = None
        self.node: JobNode | None = None
        self.current_task: str | None = None
        self.has_joined = False
        self.has_left = False
        self.is_stopping = asyncio.Event()
        self.error: BaseException | None = None
        self.changes: list[TokenChange] = []
        self.meter = Meter()
        self._options = options

    async def run(self) -> None:
        """Join, work, and leave when stopped, or when cancelled as by SIGTERM."""
        try:
            await self._join()
            assert self.node is not None
            if self.style == "task_loop":
                await self._run_task_loop(self.node)
            elif self.style == "guide_loop":
                await self._run_guide_loop(self.node)
            await self._wait_until_stopped(self.node)
        except JobsyncError as error:
            self.error = error
            self.fleet.world.note(self.machine.name, "gave up", error=str(error))
        finally:
            self.current_task = None
            await self._leave()

    def stop(self) -> None:
        """Make it end its loop and leave, as a handler of SIGTERM does."""
        self.is_stopping.set()
        if self.node is not None:
            self.node.retire()

    @property
    def at_risk(self) -> set[str]:
        """The tasks that it claims, does or ends now: if it dies, others may do them again."""
        current_task = {self.current_task} if self.current_task else set()
        if self.node is None:
            return current_task
        claims = self.node.claims
        return current_task | set(claims._in_flight) | claims._ending

    @property
    def is_working(self) -> bool:
        """Whether it has joined, is not leaving, and may own tokens."""
        node = self.node
        if node is None or not self.has_joined or self.is_stopping.is_set():
            return False
        return self.machine.is_alive and not node.settings.is_observer

    @property
    def owned(self) -> frozenset[int]:
        """The tokens that it would use at this moment."""
        node = self.node
        if node is None or not self.machine.is_alive or node.failure is not None:
            return frozenset()
        return frozenset(token for token in node.tokens if node.owned_tokens.owns("", token))

    async def _join(self) -> None:
        machine = self.machine
        settled = SettlingStore(await self._open(), machine.components)
        self.membership = Membership(
            settled,
            machine.components,
            _SETTINGS,
            open_own=self._open,
            host=SimulatedThread(machine.host("session")),
        )
        await self.membership.start()
        settings = self.fleet.settings(machine.name, **self._options)
        facts: dict[str, Json] = {"host": f"host-of-{machine.name}", "pid": 4242}
        self.node = JobNode(self.membership, settings, on_change=self.record_change, facts=facts)
        await self.node.start(self.fleet.wait_on_enter)
        self.has_joined = True
        await self.node.wait_until_ready(self.fleet.wait_on_enter)

    async def _open(self) -> Store:
        link = Link(self.fleet.world, self.machine, self.fleet.store)
        return MeteredStore(link, self.meter, self.machine.clock)

    def record_change(self, change: TokenChange) -> None:
        """Record a change of the node's tokens."""
        self.changes.append(change)
        self.fleet.world.note(
            self.machine.name,
            "tokens",
            number=change.number,
            added=sorted(change.added),
            removed=sorted(change.removed),
        )

    async def _leave(self) -> None:
        if self.node is not None:
            await self.node.stop(10)
        if self.membership is not None:
            with contextlib.suppress(Unavailable):
                await self.membership.leave()
        self.has_left = True

    async def _run_task_loop(self, node: JobNode) -> None:
        """Work like `for task in job.tasks(source)`."""
        fleet = self.fleet
        source = fleet.pending if fleet.reads_source_again else list(fleet.tasks)
        loop = TaskLoop(node, self.machine.clock, source)
        while await loop.start_round(loop.read()):
            while (task := await loop.next()) is not None:
                try:
                    await self._do(task)
                except BaseException:
                    with contextlib.suppress(JobsyncError):
                        await loop.fail()
                    raise

    async def _run_guide_loop(self, node: JobNode) -> None:
        """Work like the guide's continuous loop, as it is printed."""
        clock = self.machine.clock
        while not self.is_stopping.is_set():
            processed = 0
            for task_id in self.fleet.pending():
                task = str(task_id)
                if node.can_claim(task):
                    if await node.claim([task]):
                        self.fleet.lost_claims += 1
                        continue
                    await self._do(Task(task))
                    processed += 1
                if self.is_stopping.is_set():
                    break
            if processed:
                await node.finish(node.running)
            elif not self.fleet.pending():
                # The guide's loop ends here once this node has nothing to do.
                break
            await clock.sleep(1)

    async def _wait_until_stopped(self, node: JobNode) -> None:
        """Wait until the process is stopped, or the node has failed."""
        while not self.is_stopping.is_set() and node.failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT):
                    await self.is_stopping.wait()

    async def _do(self, task: Task) -> None:
        """Do one task, which takes a while."""
        self.current_task = task.text
        self.fleet.world.note(self.machine.name, "begin", task=task.text)
        try:
            await self.machine.clock.sleep(
                self.fleet.world.dice.uniform(0, self.fleet.longest_task)
            )
        except BaseException:
            self.fleet.world.note(self.machine.name, "break", task=task.text)
            raise
        self.fleet.end(self, task.text)
        self.current_task = None


class JobFleet:
    """A list of tasks, the processes that do them, and a judge.

    Args:
        world: the simulated world.
        tasks: the number of tasks.
        longest_task: the most seconds that a task takes.
        reads_source_again: whether task loops read the pending tasks again for each round, or
            get the list once.
        store: the store that the nodes share.
        trusts_clocks: whether clocks keep their promise. If machines are suspended, two nodes
            may believe that they own a token, and only what the store accepts counts.
        options: settings of the nodes that differ from the defaults here.
    """

    def __init__(
        self,
        world: World,
        *,
        tasks: int = 120,
        longest_task: float = 0.2,
        reads_source_again: bool = False,
        store: type[MemoryStore] = MemoryStore,
        trusts_clocks: bool = True,
        **options: Any,
    ) -> None:
        self.world = world
        self.store = store(components=world.components)
        self.tasks = [f"task-{n}" for n in range(tasks)]
        self.reads_source_again = reads_source_again
        self.longest_task = longest_task
        self.wait_on_enter = 60.0
        self.lists_done_tasks = False
        """Whether the list of pending tasks includes those that are done."""
        self.processes: list[SimulatedProcess] = []
        self.ended: Counter[str] = Counter()
        self.lost_claims = 0
        self._has_ended = asyncio.Event()
        self._options = options
        self.judge = Judge(self, trusts_clocks=trusts_clocks)
        world.watch(self.judge.check)
        world.expect(self._find_defects)

    def settings(self, name: str, **options: Any) -> JobNodeSettings:
        """Return the settings of a node."""
        defaults: dict[str, Any] = {
            "node": name,
            "fleet": "sync_",
            "site": "test",
            "day": DAY,
            "total_tokens": TOKENS,
            "hash_function": "md5",
            "reclaim_after": RECLAIM_AFTER,
            "handover_memory": 60.0,
            "once_per_date": False,
            "is_observer": False,
            "rebalance_interval": 30.0,
            "refresh_interval": 30.0,
        }
        return JobNodeSettings(**{**defaults, **self._options, **options})

    def add(
        self, name: str, style: Style = "task_loop", *, skew: float = 0.0, **options: Any
    ) -> Node:
        """Start another process with its own clock; a restart starts it again."""
        rate = self.world.dice.uniform(0.951, 1.049)
        machine = self.world.node(name, rate=rate, skew=skew)

        async def run(machine: Node) -> None:
            """Run the process, and start it again when it ends, as a supervisor does."""
            while True:
                process = SimulatedProcess(self, machine, style, options)
                self.processes.append(process)
                await process.run()
                if process.is_stopping.is_set():
                    return
                await machine.clock.sleep(BEAT)

        machine.start(run)
        return machine

    def process(self, name: str) -> SimulatedProcess:
        """Return the latest process with a name."""
        return next(process for process in reversed(self.processes) if process.machine.name == name)

    @property
    def leader(self) -> SimulatedProcess:
        """The process whose node is the leader."""
        return next(
            process for process in self.live if process.node is not None and process.node.is_leader
        )

    @property
    def owners(self) -> dict[int, str]:
        """The tokens that are owned now, with the names of their machines."""
        return {token: process.machine.name for process in self.live for token in process.owned}

    def pending(self) -> list[str]:
        """Return the tasks that no process has done, as a user's own records show."""
        return [task for task in self.tasks if self.lists_done_tasks or not self.ended[task]]

    def end(self, process: SimulatedProcess, task: str) -> None:
        """Record that a task is done."""
        self.ended[task] += 1
        self._has_ended.set()
        self.world.note(process.machine.name, "end", task=task)

    @property
    def live(self) -> list[SimulatedProcess]:
        """The running processes that have joined."""
        return [
            process for process in self.processes if process.machine.is_alive and process.has_joined
        ]

    @property
    def done_twice(self) -> set[str]:
        """The tasks that were done more than once."""
        return {task for task, times in self.ended.items() if times > 1}

    async def wait_until_done(self, seconds: float = 600.0) -> None:
        """Wait until all tasks are done; a violation if it takes longer than `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.pending():
                    self._has_ended.clear()
                    await self._has_ended.wait()
        if undone := self.pending():
            found = f"never done: {undone[:5]}, {len(undone)} in all"
            self.world.violations.append(Violation("TL3", found))

    def expect_done_once(self, but: Collection[str] = ()) -> None:
        """Report a violation for tasks that were done twice, except those at risk."""
        if done_twice := self.done_twice - set(but):
            self.world.violations.append(Violation("T7", f"done twice: {sorted(done_twice)}"))

    async def wait_until_balanced(self, seconds: float) -> float:
        """Wait until all tokens are owned, evenly (TL1, TL2); return the seconds it took."""
        started = self.world.loop.time()
        while imbalance := self._find_imbalance():
            if self.world.loop.time() - started > seconds:
                invariant, what = imbalance
                self.world.violations.append(Violation(invariant, f"after {seconds:g} s {what}"))
                break
            await asyncio.sleep(0.1)
        return self.world.loop.time() - started

    def _find_defects(self, _: object) -> list[Violation]:
        """Return the programming errors that ended processes."""
        errors = [
            process.error or (process.node and process.node.failure) for process in self.processes
        ]
        return [Violation("crash", repr(error)) for error in errors if is_defect(error)]

    @property
    def _total_tokens(self) -> int:
        """The number of tokens, in the settings of the nodes that own some."""
        nodes = [process.node for process in self.processes if process.owned]
        return max((node.settings.total_tokens for node in nodes if node), default=TOKENS)

    def _find_imbalance(self) -> tuple[str, str] | None:
        counts = {
            process.machine.name: len(process.owned)
            for process in self.processes
            if process.is_working
        }
        if sum(counts.values()) != self._total_tokens:
            return "TL1", f"not all tokens are owned: {counts}"
        if max(counts.values()) - min(counts.values()) > 1:
            return "TL2", f"counts are uneven: {counts}"
        return None


class Judge:
    """Checks every commit and every step of a node as it happens."""

    def __init__(self, fleet: JobFleet, *, trusts_clocks: bool) -> None:
        self._fleet = fleet
        self._trusts_clocks = trusts_clocks
        self._plans: dict[int, Plan] = {}
        self._plan = Plan.empty(TOKENS)
        self._dead: dict[str, float] = {}
        self._ended: set[str] = set()
        """The dead sessions whose processes had ended."""
        self._nodes: dict[str, Json] = {}
        """The nodes' records, by incarnation."""
        self._claims: dict[str, Json] = {}
        self._completed: Counter[tuple[str, int]] = Counter()
        self._running: defaultdict[str, list[SimulatedProcess]] = defaultdict(list)
        self.reclaimed: set[str] = set()
        """Tasks that were claimed again because their owner was dead."""

    def check(self, what: Occurrence) -> Iterable[Violation]:
        """Check one occurrence."""
        if what.what == "commit":
            yield from self._check_commit(what)
        elif what.what in ("begin", "break", "end"):
            yield from self._check_work(what)
        if what.what in ("commit", "tokens", "begin"):
            yield from self._check_owners()

    def _check_commit(self, what: Occurrence) -> Iterator[Violation]:
        key, value = what.details["key"], what.details["value"]
        kind = key.partition("/")[0]
        if kind == "session" and (value is None or value["state"] == "dead"):
            self._dead.setdefault(key.removeprefix("session/"), what.at)
            if value is not None and value.get("ended"):
                yield from self._check_ended(key.removeprefix("session/"))
        elif kind == "node":
            self._nodes[value["incarnation"]] = value
        elif kind == "assignment" and value is not None:
            yield from self._check_plan(read_plan(value, None, key))
        elif kind == "claim":
            yield from self._check_claim(key, value, what.at)

    def _check_owners(self) -> Iterator[Violation]:
        """T1: no two nodes would use a token now; each uses only what its assignment gives it."""
        if not self._trusts_clocks:
            return
        owners: dict[int, str] = {}
        settings: dict[str, Json] = {}
        for process in self._fleet.processes:
            tokens = process.owned
            if not tokens or process.node is None:
                continue
            values = process.node.fleet_settings.values
            if values != (settings := settings or values):
                yield Violation("T10", f"{process.machine.name} has {values}, others {settings}")
            number, incarnation = process.node.number, process.node.membership.incarnation
            if not tokens <= owned_by(self._plans[number].assignment, incarnation):
                yield Violation(
                    "T1", f"{process.machine.name} uses what number {number} does not give it"
                )
            for token in tokens:
                other = owners.setdefault(token, process.machine.name)
                if other != process.machine.name:
                    yield Violation(
                        "T1", f"token {token} is used by {other} and {process.machine.name}"
                    )

    def _check_plan(self, plan: Plan) -> Iterator[Violation]:
        """T3: a token moves after its owner gave it up or died; numbers only grow."""
        before, after = self._plan.assignment, plan.assignment
        if after == before:
            return
        if after.number <= before.number:
            yield Violation("T1", f"assignment {after.number} follows {before.number}")
        was = _incarnations(self._plan)
        will = _incarnations(plan)
        revoked = {t: move.revoked for move in before.moves for t in tokens_of(move)}
        if after.total != before.total:
            # A token is another one, so all nodes must be gone.
            will = [""] * before.total
        for token, (old, new) in enumerate(zip(was, will, strict=True)):
            if old not in ("", new) and not self._has_given_up(old, revoked.get(token)):
                yield Violation(
                    "T3", f"token {token} went from {old} to {new or 'nobody'} at {after.number}"
                )
        self._plan = self._plans[after.number] = plan

    def _has_given_up(self, incarnation: str, revoked: int | None) -> bool:
        node = self._nodes.get(incarnation, {"applied": 0, "stage": "ready"})
        is_gone = incarnation in self._dead or node["stage"] == "left"
        return is_gone or (revoked is not None and node["applied"] >= revoked)

    def _check_claim(self, key: str, claim: Json, at: float) -> Iterator[Violation]:
        """One at a time: a claim replaces one that has ended or whose owner is dead."""
        before = self._claims.get(key, {"state": "failed", "run": 0, "owner": "", "number": 0})
        is_same = (before["owner"], before["run"]) == (claim["owner"], claim["run"])
        if claim["state"] == "running":
            if claim["run"] != before["run"] + 1:
                yield Violation("T6", f"{key}: run {claim['run']} follows {before['run']}")
            if before["state"] == "running":
                yield from self._check_reclaim(key, before, claim, at)
            if claim["number"] < before["number"] and not is_same:
                yield Violation(
                    "T2", f"{key} was claimed by {claim['node']} under an earlier assignment"
                )
        elif before["state"] == "running" and not is_same:
            yield Violation("T2", f"{key} was ended by {claim['node']}, who did not have it")
        elif before["state"] != "running" and claim["state"] == "done":
            yield Violation("T2", f"{key} was ended and was not running")
        if claim["state"] == "done":
            self._completed[key, claim["run"]] += 1
            if self._completed[key, claim["run"]] > 1:
                yield Violation("T7", f"{key}: run {claim['run']} was completed twice")
        self._claims[key] = claim

    def _check_ended(self, incarnation: str) -> Iterator[Violation]:
        """A process that is said to have ended does not run: its tasks are claimed at once."""
        self._ended.add(incarnation)
        for process in self._fleet.processes:
            membership = process.membership
            is_same = membership is not None and membership.incarnation == incarnation
            if is_same and process.machine.is_alive and not process.has_left:
                yield Violation("T6", f"{process.machine.name} runs and is said to have ended")

    def _check_reclaim(self, key: str, before: Json, claim: Json, at: float) -> Iterator[Violation]:
        died = self._dead.get(before["owner"])
        if died is None:
            yield Violation(
                "T6",
                f"{key}: claimed by {claim['node']} while {before['node']} has it and is alive",
            )
        elif at - died < 0.9 * RECLAIM_AFTER and before["owner"] not in self._ended:
            yield Violation("T6", f"{key}: claimed again {at - died:g} s after its owner's death")
        self.reclaimed.add(claim["task"])

    def _check_work(self, what: Occurrence) -> Iterator[Violation]:
        """No task is started that another process does or did, unless that process has died."""
        task, process = what.details["task"], self._fleet.process(what.node)
        if what.what != "begin":
            self._running[task].remove(process)
            return
        others = [
            other
            for other in self._running[task]
            if other.machine.is_alive and other is not process
        ]
        is_done = self._fleet.ended[task] and not self._fleet.lists_done_tasks
        if (others or is_done) and task not in self.reclaimed:
            yield Violation(
                "T7", f"{task} is started by {what.node} and was started by live processes"
            )
        assert process.node is not None
        token, incarnation = process.node.token(task), process.node.membership.incarnation
        owner = dict(enumerate(_incarnations(self._plan))).get(token)
        if self._trusts_clocks and owner != incarnation:
            yield Violation("T2", f"{task} is started by {what.node}, which no longer owns it")
        self._running[task].append(process)


def _incarnations(plan: Plan) -> list[str]:
    """Return the owner of each token, or the node that has not given it up yet."""
    names = ["", *(node.incarnation for node in plan.assignment.nodes)]
    return [names[holder] for holder in holders_of(plan.assignment)]
