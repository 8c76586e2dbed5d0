"""Nodes that share tasks in a simulated world, and what must hold there.

A crew works through one list, each process as a user's would: by `job.tasks` (`TaskLoop`), or by
the loop that the guide prints. Everything is judged as it happens, in the order in which the
store commits: who believes to own what (T1), who was given what and when (T3), which claims
were accepted (T2, and one at a time), and whether anything was done twice. What was done twice
for a reason, which is the death of whoever had it in hand, is listed and counted.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import date
from typing import Any, Literal, TypeAlias

from jobsync import CoordinatorSettings, Membership, Unavailable
from jobsync.core.assignment import Plan, holders_of, owned_by, read_plan, tokens_of
from jobsync.core.codec import Json
from jobsync.errors import JobsyncError
from jobsync.jobs.events import TokenChange
from jobsync.jobs.job_node import JobNode, JobNodeSettings
from jobsync.jobs.task import Task
from jobsync.jobs.task_loop import TaskLoop
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.databases import SimulatedThread
from jobsync.testing.network import Link
from jobsync.testing.violations import Violation, is_defect
from jobsync.testing.world import Node, Occurrence, World

__all__ = ["BEAT", "DAY", "RECLAIM_AFTER", "TIMEOUT", "TOKENS", "Crews", "Hand", "Style"]

Style: TypeAlias = Literal["walk", "loop", "idle"]
"""How a process works: by `job.tasks`, by the guide's printed loop, or not at all."""

DAY = date(2026, 1, 5)
BEAT, TIMEOUT = 5.0, 15.0
RECLAIM_AFTER = 30.0
TOKENS = 60

_SETTINGS = CoordinatorSettings(
    heartbeat_interval=BEAT, worker_timeout=TIMEOUT, skip_cold_start=True
)


class Hand:
    """One process that works through the list.

    Attributes:
        node: where it runs.
        crew: its place among the others, once it has one.
        in_hand: the task that it is doing.
        told_to_stop: set when it is to end its loop and leave.
        error: what kept it from joining, or ended it.
        changes: what it was told of its tokens.
        meter: counts what it asks the store.
    """

    def __init__(self, crews: "Crews", node: Node, style: Style, options: dict[str, Any]) -> None:
        self.crews = crews
        self.node = node
        self.style = style
        self.membership: Membership | None = None
        self.crew: JobNode | None = None
        self.in_hand: str | None = None
        self.has_joined = False
        self.told_to_stop = asyncio.Event()
        self.error: BaseException | None = None
        self.changes: list[TokenChange] = []
        self.meter = Meter()
        self._options = options

    async def live(self) -> None:
        """Join, work, and leave when told to, or when cancelled as by SIGTERM."""
        try:
            await self._join()
            assert self.crew is not None
            if self.style == "walk":
                await self._walk(self.crew)
            elif self.style == "loop":
                await self._loop(self.crew)
            await self._rest(self.crew)
        except JobsyncError as error:
            self.error = error
            self.crews.world.note(self.node.name, "gave up", error=str(error))
        finally:
            self.in_hand = None
            await self._leave()

    def stop(self) -> None:
        """Let it end its loop and leave, as a handler of SIGTERM does."""
        self.told_to_stop.set()
        if self.crew is not None:
            self.crew.retire()

    @property
    def at_risk(self) -> set[str]:
        """What it claims, does or marks as done now: if it dies, others may do that again."""
        in_hand = {self.in_hand} if self.in_hand else set()
        if self.crew is None:
            return in_hand
        claims = self.crew.claims
        return in_hand | set(claims._in_flight) | claims._ending

    @property
    def is_working(self) -> bool:
        """Whether it takes part: it has a place, does not leave, and may own tokens."""
        crew = self.crew
        if crew is None or not self.has_joined or self.told_to_stop.is_set():
            return False
        return self.node.is_alive and not crew.settings.is_observer

    @property
    def believes(self) -> frozenset[int]:
        """The tokens that it would use at this moment."""
        crew = self.crew
        if crew is None or not self.node.is_alive or crew.failure is not None:
            return frozenset()
        return frozenset(each for each in crew.tokens if crew.owned_tokens.owns("", each))

    async def _join(self) -> None:
        node = self.node
        settled = SettlingStore(await self._open(), node.components)
        self.membership = Membership(
            settled,
            node.components,
            _SETTINGS,
            open_own=self._open,
            host=SimulatedThread(node.host("session")),
        )
        await self.membership.start()
        settings = self.crews.settings(node.name, **self._options)
        facts: dict[str, Json] = {"host": f"host-of-{node.name}", "pid": 4242}
        self.crew = crew = JobNode(self.membership, settings, on_change=self.hear, facts=facts)
        await crew.start(self.crews.wait_on_enter)
        self.has_joined = True
        await crew.wait_until_ready(self.crews.minimum_nodes, self.crews.wait_on_enter)

    async def _open(self) -> Store:
        link = Link(self.crews.world, self.node, self.crews.store)
        return MeteredStore(link, self.meter, self.node.clock)

    def hear(self, change: TokenChange) -> None:
        """Take note of a change of what this node owns."""
        self.changes.append(change)
        self.crews.world.note(
            self.node.name,
            "tokens",
            number=change.number,
            added=sorted(change.added),
            removed=sorted(change.removed),
        )

    async def _leave(self) -> None:
        if self.crew is not None:
            await self.crew.stop(10)
        if self.membership is not None:
            with contextlib.suppress(Unavailable):
                await self.membership.leave()

    async def _walk(self, crew: JobNode) -> None:
        """Work as `for task in job.tasks(source)` does."""
        crews = self.crews
        source = crews.pending if crews.asks_anew else list(crews.tasks)
        walk = TaskLoop(crew, self.node.clock, source)
        while await walk.start_round(walk.read()):
            while (task := await walk.next()) is not None:
                try:
                    await self._do(task)
                except BaseException:
                    with contextlib.suppress(JobsyncError):
                        await walk.fail()
                    raise

    async def _loop(self, crew: JobNode) -> None:
        """Work as the guide's continuous loop does, as it is printed."""
        clock = self.node.clock
        while not self.told_to_stop.is_set():
            processed = 0
            for task_id in self.crews.pending():
                task = str(task_id)
                if crew.can_claim(task):
                    if await crew.claim([task]):
                        self.crews.lost_claims += 1
                        continue
                    await self._do(Task(task))
                    processed += 1
                if self.told_to_stop.is_set():
                    break
            if processed:
                await crew.finish(crew.running)
            elif not self.crews.pending():
                # The guide's loop ends here as soon as nothing is this node's to do.
                break
            await clock.sleep(1)

    async def _rest(self, crew: JobNode) -> None:
        """Do nothing until told to stop, or until the node has failed."""
        while not self.told_to_stop.is_set() and crew.failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT):
                    await self.told_to_stop.wait()

    async def _do(self, task: Task) -> None:
        """Do one task: that takes a while."""
        self.in_hand = task.text
        self.crews.world.note(self.node.name, "begin", task=task.text)
        try:
            await self.node.clock.sleep(self.crews.world.dice.uniform(0, self.crews.longest_task))
        except BaseException:
            self.crews.world.note(self.node.name, "break", task=task.text)
            raise
        self.crews.end(self, task.text)
        self.in_hand = None


class Crews:
    """A list of tasks, the nodes that do them, and a judge.

    Args:
        world: where.
        tasks: how many there are.
        longest_task: seconds that one takes, at the most.
        asks_anew: whether walks ask for what is pending, or are given the list once.
        store: what the nodes share.
        trusts_clocks: whether clocks keep their promise; where machines are suspended, two
            may believe to own one token, and only what the store accepts counts.
        options: settings of the nodes that differ from the usual ones.
    """

    def __init__(
        self,
        world: World,
        *,
        tasks: int = 120,
        longest_task: float = 0.2,
        asks_anew: bool = False,
        store: type[MemoryStore] = MemoryStore,
        trusts_clocks: bool = True,
        **options: Any,
    ) -> None:
        self.world = world
        self.store = store(components=world.components)
        self.tasks = [f"task-{n}" for n in range(tasks)]
        self.asks_anew = asks_anew
        self.longest_task = longest_task
        self.wait_on_enter = 60.0
        self.minimum_nodes = 1
        self.forgets = False
        """Whether what was done is pending all the same."""
        self.hands: list[Hand] = []
        self.ended: Counter[str] = Counter()
        self.lost_claims = 0
        self._has_ended = asyncio.Event()
        self._options = options
        self.judge = Judge(self, trusts_clocks=trusts_clocks)
        world.watch(self.judge.see)
        world.expect(self._find_defects)

    def settings(self, name: str, **options: Any) -> JobNodeSettings:
        """Give what a node goes by."""
        usual: dict[str, Any] = {
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
        return JobNodeSettings(**{**usual, **self._options, **options})

    def add(self, name: str, style: Style = "walk", *, skew: float = 0.0, **options: Any) -> Node:
        """Let another process run, with a clock of its own; a restart begins it anew."""
        rate = self.world.dice.uniform(0.951, 1.049)
        node = self.world.node(name, rate=rate, skew=skew)

        async def live(node: Node) -> None:
            """Run, and be started again by whoever looks after processes."""
            while True:
                hand = Hand(self, node, style, options)
                self.hands.append(hand)
                await hand.live()
                if hand.told_to_stop.is_set():
                    return
                await node.clock.sleep(BEAT)

        node.start(live)
        return node

    def hand(self, name: str) -> Hand:
        """Give the latest process of a name."""
        return next(hand for hand in reversed(self.hands) if hand.node.name == name)

    @property
    def leader(self) -> Hand:
        """The process that deals the tokens."""
        return next(hand for hand in self.living if hand.crew is not None and hand.crew.is_leader)

    @property
    def owners(self) -> dict[int, str]:
        """The tokens that are owned now, with the names of their nodes."""
        return {token: hand.node.name for hand in self.living for token in hand.believes}

    def pending(self) -> list[str]:
        """Give what nobody has done, as a user's own records tell."""
        return [task for task in self.tasks if self.forgets or not self.ended[task]]

    def end(self, hand: Hand, task: str) -> None:
        """Take note that a task is done."""
        self.ended[task] += 1
        self._has_ended.set()
        self.world.note(hand.node.name, "end", task=task)

    @property
    def living(self) -> list[Hand]:
        """The processes that run, and have a place among the others."""
        return [hand for hand in self.hands if hand.node.is_alive and hand.has_joined]

    @property
    def twice(self) -> set[str]:
        """What was done more than once."""
        return {task for task, times in self.ended.items() if times > 1}

    async def until_done(self, seconds: float = 600.0) -> None:
        """Wait until everything is done; a violation, if it takes longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.pending():
                    self._has_ended.clear()
                    await self._has_ended.wait()
        if undone := self.pending():
            found = f"never done: {undone[:5]}, {len(undone)} in all"
            self.world.violations.append(Violation("TL3", found))

    def expect_done_once(self, but: Collection[str] = ()) -> None:
        """Find a violation in what was done twice, but for what was at risk."""
        if twice := self.twice - set(but):
            self.world.violations.append(Violation("T7", f"done twice: {sorted(twice)}"))

    async def until_settled(self, seconds: float) -> float:
        """Wait until all tokens are owned and counts are within one (TL1, TL2); say how long."""
        begun = self.world.loop.time()
        while trouble := self._unsettled():
            if self.world.loop.time() - begun > seconds:
                invariant, what = trouble
                self.world.violations.append(Violation(invariant, f"after {seconds:g} s {what}"))
                break
            await asyncio.sleep(0.1)
        return self.world.loop.time() - begun

    def _find_defects(self, _: object) -> list[Violation]:
        """Return what ended a process and is a programming error."""
        errors = [each.error or (each.crew and each.crew.failure) for each in self.hands]
        return [Violation("crash", repr(error)) for error in errors if is_defect(error)]

    def _unsettled(self) -> tuple[str, str] | None:
        counts = {hand.node.name: len(hand.believes) for hand in self.hands if hand.is_working}
        if sum(counts.values()) != TOKENS:
            return "TL1", f"not all tokens are owned: {counts}"
        if max(counts.values()) - min(counts.values()) > 1:
            return "TL2", f"counts are uneven: {counts}"
        return None


class Judge:
    """Looks at every commit, and every step of a node, as it happens."""

    def __init__(self, crews: Crews, *, trusts_clocks: bool) -> None:
        self._crews = crews
        self._trusts_clocks = trusts_clocks
        self._plans: dict[int, Plan] = {}
        self._plan = Plan.empty(TOKENS)
        self._dead: dict[str, float] = {}
        self._named: dict[str, Json] = {}
        """The nodes' records, by incarnation."""
        self._claims: dict[str, Json] = {}
        self._completed: Counter[tuple[str, int]] = Counter()
        self._doing: defaultdict[str, list[Hand]] = defaultdict(list)
        self.retaken: set[str] = set()
        """Tasks that were claimed anew because whoever had them was dead."""

    def see(self, what: Occurrence) -> Iterable[Violation]:
        """Judge one occurrence."""
        if what.what == "commit":
            yield from self._see_commit(what)
        elif what.what in ("begin", "break", "end"):
            yield from self._see_work(what)
        if what.what in ("commit", "tokens", "begin"):
            yield from self._see_beliefs()

    def _see_commit(self, what: Occurrence) -> Iterator[Violation]:
        key, value = what.details["key"], what.details["value"]
        kind = key.partition("/")[0]
        if kind == "session" and (value is None or value["state"] == "dead"):
            self._dead.setdefault(key.removeprefix("session/"), what.at)
        elif kind == "node":
            self._named[value["incarnation"]] = value
        elif kind == "assignment" and value is not None:
            yield from self._see_plan(read_plan(value, None, key))
        elif kind == "claim":
            yield from self._see_claim(key, value, what.at)

    def _see_beliefs(self) -> Iterator[Violation]:
        """T1: no token has two nodes that would use it now; each owns what its number gives it."""
        if not self._trusts_clocks:
            return
        owners: dict[int, str] = {}
        for hand in self._crews.hands:
            tokens = hand.believes
            if not tokens or hand.crew is None:
                continue
            number, incarnation = hand.crew.number, hand.crew.membership.incarnation
            if not tokens <= owned_by(self._plans[number].assignment, incarnation):
                yield Violation(
                    "T1", f"{hand.node.name} uses what number {number} does not give it"
                )
            for token in tokens:
                other = owners.setdefault(token, hand.node.name)
                if other != hand.node.name:
                    yield Violation("T1", f"token {token} is used by {other} and {hand.node.name}")

    def _see_plan(self, plan: Plan) -> Iterator[Violation]:
        """T3: what changes hands was given up, or its owner is dead; numbers only grow."""
        before, after = self._plan.assignment, plan.assignment
        if after == before:
            return
        if after.number <= before.number:
            yield Violation("T1", f"assignment {after.number} follows {before.number}")
        was = _incarnations(self._plan)
        will = _incarnations(plan)
        revoked = {t: move.revoked for move in before.moves for t in tokens_of(move)}
        for token, (old, new) in enumerate(zip(was, will, strict=True)):
            if old not in ("", new) and not self._has_given_up(old, revoked.get(token)):
                yield Violation(
                    "T3", f"token {token} went from {old} to {new or 'nobody'} at {after.number}"
                )
        self._plan = self._plans[after.number] = plan

    def _has_given_up(self, incarnation: str, revoked: int | None) -> bool:
        named = self._named.get(incarnation, {"applied": 0, "stage": "ready"})
        is_gone = incarnation in self._dead or named["stage"] == "left"
        return is_gone or (revoked is not None and named["applied"] >= revoked)

    def _see_claim(self, key: str, claim: Json, at: float) -> Iterator[Violation]:
        """One at a time: a claim replaces one that has ended, or whose owner is dead."""
        before = self._claims.get(key, {"state": "failed", "run": 0, "owner": "", "number": 0})
        is_same = (before["owner"], before["run"]) == (claim["owner"], claim["run"])
        if claim["state"] == "running":
            if claim["run"] != before["run"] + 1:
                yield Violation("T6", f"{key}: run {claim['run']} follows {before['run']}")
            if before["state"] == "running":
                yield from self._see_retaking(key, before, claim, at)
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

    def _see_retaking(self, key: str, before: Json, claim: Json, at: float) -> Iterator[Violation]:
        died = self._dead.get(before["owner"])
        if died is None:
            yield Violation(
                "T6", f"{key}: claimed by {claim['node']} while {before['node']} has it and lives"
            )
        elif at - died < 0.9 * RECLAIM_AFTER:
            yield Violation("T6", f"{key}: claimed anew {at - died:g} s after its owner's death")
        self.retaken.add(claim["task"])

    def _see_work(self, what: Occurrence) -> Iterator[Violation]:
        """Nothing is begun that another does or did, unless that one has died with it in hand."""
        task, hand = what.details["task"], self._crews.hand(what.node)
        if what.what != "begin":
            self._doing[task].remove(hand)
            return
        others = [each for each in self._doing[task] if each.node.is_alive and each is not hand]
        is_done = self._crews.ended[task] and not self._crews.forgets
        if (others or is_done) and task not in self.retaken:
            yield Violation(
                "T7", f"{task} is begun by {what.node} and was begun by others that live"
            )
        assert hand.crew is not None
        token, incarnation = hand.crew.token(task), hand.crew.membership.incarnation
        if self._trusts_clocks and _incarnations(self._plan)[token] != incarnation:
            yield Violation("T2", f"{task} is begun by {what.node}, whose it is no more")
        self._doing[task].append(hand)


def _incarnations(plan: Plan) -> list[str]:
    """Give each token's owner, or whoever has yet to give it up."""
    names = ["", *(node.incarnation for node in plan.assignment.nodes)]
    return [names[holder] for holder in holders_of(plan.assignment)]
