"""One node among those that share a job's tasks: the whole of it, on an event loop.

It joins under a name, owns what the leader deals to it, claims and finishes tasks, and
leaves by handing over first. A session that was lost is followed by another, which begins
with nothing. `Job` is the blocking face of this.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date

import msgspec

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import WaitForChange, listening
from jobsync.core.assignment import Plan, awaits, has_nothing, token_maker
from jobsync.core.codec import Json
from jobsync.core.pins import Pin
from jobsync.errors import Conflict, Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.jobs.claims import Claim, Claims, ClaimState
from jobsync.jobs.events import (
    AuditRefused,
    NodeFailed,
    NodeJoined,
    PinsExpired,
    PinsIgnored,
    TokensChanged,
)
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.owned_tokens import OwnedTokens, TokenChange
from jobsync.jobs.pin_store import PinStore
from jobsync.jobs.rebalancer import Rebalancer, fetch_plan
from jobsync.jobs.registration import NameTaken, NodeRecord, Registration, Stage, agree_on_locks
from jobsync.jobs.retention import Forgotten, forget, note_date
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import read_each

__all__ = ["JobNode", "JobNodeSettings"]

_PASSING = (Unavailable, OutcomeUnknown, Conflict, Corrupt, Misconfigured)
"""What may be over after a while: an outage, a burst of refusals, a record that is mended."""

_MOMENT = 0.05
_LONG = 3600.0
_WORK = "jobs"


class JobNodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node goes by."""

    fleet: str
    """The prefix of the SQL face; nodes of other fleets in one store never meet."""
    node: str
    site: str
    day: date
    total_tokens: int
    hash_function: str
    reclaim_after: float
    handover_memory: float
    once_per_date: bool
    is_observer: bool
    rebalance_interval: float
    """Seconds between looks of the leader when nothing is heard."""
    refresh_interval: float
    """Seconds between looks at the assignment when nothing is heard."""
    locks_enabled: bool = True
    """Whether pins hold, as far as this node leads."""


class JobNode:
    """A node. `start` it, use it, `stop` it.

    Args:
        membership: a session that is open; the caller ends it.
        settings: name, fleet and tokens.
        told: called with every change of what the node owns, after it was applied.
        facts: host and process, for people.
    """

    def __init__(
        self,
        membership: Membership,
        settings: JobNodeSettings,
        *,
        told: Callable[[TokenChange], object] = lambda _: None,
        facts: Mapping[str, Json] | None = None,
    ) -> None:
        store, components = membership.store, membership.components
        self.membership = membership
        self.settings = settings
        self.token = token_maker(settings.total_tokens, settings.hash_function)
        """Gives a task's token."""
        self._store: Store = store
        self._components: Components = components
        self._clock = components.clock
        self._events = components.events
        self._places = JobKeys(settings.fleet)
        self._told = told
        self._changed = asyncio.Event()
        self._roused = asyncio.Event()
        self._facts = dict(facts or {})
        key = self._places.node(settings.node)
        self._name = Registration(store, components, membership, key, self._facts)
        self.claims = Claims(
            store,
            components,
            membership,
            self._places,
            settings.day,
            settings.node,
            reclaim_after=settings.reclaim_after,
            handover_memory=settings.handover_memory,
            once_per_date=settings.once_per_date,
        )
        self.holding = OwnedTokens(self._name, self.claims, self._tell)
        self.pins = PinStore(store, components, self._places, self.token)
        self._dealer = Rebalancer(
            store,
            components,
            membership,
            self._places,
            total=settings.total_tokens,
            node=settings.node,
            patience=settings.rebalance_interval,
            read_pins=self._read_pins,
            pins_left=lambda: self.pins.left,
            published=self._roused.set,
            restore=self._name.restore,
        )
        self._coordinator: Coordinator | None = None
        self._following: asyncio.Task[None] | None = None
        self._plan: Plan | None = None
        self._incarnation = ""
        self._ignored = 0
        self.is_retiring = False
        """Whether it claims nothing more and hands over what it owns."""
        self.failure: BaseException | None = None
        """What has ended this node, if anything did."""

    async def enter(self, wait: float, stage: Stage = "joining") -> None:
        """Agree with the fleet and take the name; own nothing yet.

        Args:
            wait: seconds to wait for an earlier process of this name to end.
            stage: "ready" if `start` follows at once.

        Raises:
            Misconfigured: another node's settings differ, or its name is taken, with the fix.
        """
        await self._agree()
        await agree_on_locks(
            self.membership,
            self.nodes,
            self.settings.node,
            enabled=self.settings.locks_enabled,
            until=self._clock.mono() + wait,
        )
        await self.claims.set_clock()
        await note_date(self._store, self._places, self.settings.day, self.claims.now)
        await self._join(wait, stage)

    async def start(self, wait: float) -> None:
        """Begin to own; `enter` first, if that was not done.

        Args:
            wait: seconds to wait for an earlier process of this name to end.

        Raises:
            Misconfigured: another node's settings differ, or its name is taken, with the fix.
        """
        if not self._incarnation:
            await self.enter(wait, "ready")
        # A session that was lost meanwhile is followed by another, which is ready at once.
        with suppress(Conflict):
            await self._name.tell(stage="ready")
        self._following = asyncio.get_running_loop().create_task(self._follow_for_ever())
        self._following.add_done_callback(self._notice_end)
        self._coordinator = await self.membership.coordinate(
            _WORK,
            Hooks(work=self._dealer.deal_for_ever),
            namespace=self.settings.fleet,
            governs=[self._places.assignment],
        )

    async def ready(self, minimum_nodes: int, wait: float) -> bool:
        """Wait until enough nodes are there and this one has its share; say whether they are."""
        until = self._clock.mono() + wait
        while not await self._is_ready(minimum_nodes):
            left = until - self._clock.mono()
            if left <= 0:
                return False
            await self._wait_for_change(min(left, self.membership.timing.heartbeat))
        return True

    async def stop(self, wait: float) -> None:
        """Hand over, then leave; `wait` is how long others may take to let go of us."""
        if self._following is None:
            return
        self.is_retiring = True
        with suppress(*_PASSING):
            await self._name.tell(stage="leaving")
            await self._hand_over(wait)
        self._following.cancel()
        await asyncio.wait([self._following])
        self.holding.join(None)
        with suppress(*_PASSING):
            await self.claims.settle(lambda _, __: False)
            await self._name.tell(stage="left")
        if self._coordinator is not None:
            await self._coordinator.stop()
        self._following = None

    def retire(self) -> None:
        """Claim nothing more from now on, and hand over; what runs goes on and is finished.

        Called where the node lives.
        """
        self.is_retiring = True
        self._roused.set()

    def can_claim(self, task: str) -> bool:
        """Say whether a task is this node's to do now. Touches no store."""
        if self.is_retiring:
            return False
        return self.holding.may_claim(task, self.token(task)) and not self.claims.refuses(task)

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Claim tasks; give those that were not, with the reason.

        Args:
            tasks: their ids.
            known: of what is done, only these completions may be done again; all, if None.
        """
        tokens = {task: self.token(task) for task in tasks}
        foreign = {
            task: "it does not belong to this node now"
            for task, token in tokens.items()
            if not self.holding.owns(task, token)
        }
        ours = {task: token for task, token in tokens.items() if task not in foreign}
        number, may_run = self.holding.mine.number, self._may_run(self._incarnation)
        lost = await self.claims.add(ours, number, may_run, known)
        return foreign | lost

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """End tasks; give those whose end was refused, with the reason."""
        refused = await self.claims.finish(tasks, state)
        for task, reason in refused.items():
            self._events.emit(AuditRefused(node=self.settings.node, task_id=task, reason=reason))
        return refused

    async def claims_of_date(self) -> list[Claim]:
        """Give all claims of the date."""
        return await self.claims.scan()

    async def done(self, tasks: Collection[str]) -> dict[str, str]:
        """Give those tasks that are done, each with the mark of its completion."""
        return await self.claims.done({task: self.token(task) for task in tasks})

    async def store_time(self) -> float:
        """Give the time of day, by the store's clock where it has one."""
        await self.claims.set_clock()
        return self.claims.now

    @property
    def pace(self) -> float:
        """The most seconds between looks of one who waits for others: each look is paid for."""
        return self.membership.timing.heartbeat / 2

    @property
    def count(self) -> int:
        """How many nodes the assignment names."""
        return 0 if self._plan is None else len(self._plan.assignment.nodes)

    @property
    def names(self) -> list[str]:
        """The names of the nodes that the assignment names."""
        return [] if self._plan is None else [node.name for node in self._plan.assignment.nodes]

    @property
    def running(self) -> list[str]:
        """The tasks that this node has claimed and not finished."""
        return self.claims.running

    @property
    def tokens(self) -> frozenset[int]:
        """The tokens that this node owns, whether or not it may use them now."""
        return self.holding.mine.tokens

    @property
    def number(self) -> int:
        """The assignment that it goes by."""
        return self.holding.mine.number

    @property
    def is_trusted(self) -> bool:
        """Whether it may act now. Asks the clock."""
        return self.failure is None and self.membership.is_trusted

    async def nodes(self) -> list[NodeRecord]:
        """Give the nodes of the fleet, those that have left too."""
        return await self._dealer.list_nodes()

    async def forget(self, days: float) -> Forgotten:
        """Remove what is older than so many days: claims, nodes that are gone, history.

        Raises:
            Invalid: that is less than a day.
        """
        return await forget(
            self._store,
            self._places,
            self._dealer.read_node,
            now=await self.store_time(),
            days=days,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this node deals the tokens now."""
        return self._coordinator is not None and self._coordinator.is_coordinator

    @property
    def leader(self) -> str | None:
        """The worker that deals the tokens, as far as is known."""
        return None if self._coordinator is None else self._coordinator.coordinator_id

    async def _agree(self) -> None:
        """Record what all nodes must agree on, or compare with what is recorded."""
        ours = {
            "site": self.settings.site,
            "total_tokens": self.settings.total_tokens,
            "hash_function": self.settings.hash_function,
        }
        record = await self._store.get(self._places.settings)
        if record is None:
            with suppress(Conflict):
                record = await self._store.create(self._places.settings, ours)
        record = record or await self._store.get(self._places.settings)
        theirs = {} if record is None else record.value
        for field, value in ours.items():
            if theirs.get(field) != value:
                raise Misconfigured(
                    field,
                    value,
                    f"the other nodes of {self.settings.fleet!r} have {theirs.get(field)!r}",
                    "give the same, or use another appname",
                )

    async def _join(self, wait: float, stage: Stage = "ready") -> None:
        """Hold the name, with the session that there is now."""
        session = self.membership.session
        incarnation = session.incarnation
        self.claims.abandon()
        self.holding.join(session)
        named = NodeRecord(
            name=self.settings.node,
            incarnation=incarnation,
            stage="leaving" if self.is_retiring else stage,
            applied=0,
            is_observer=self.settings.is_observer,
            created=self.claims.now,
            host=str(self._facts.get("host", "")),
            pid=int(self._facts.get("pid", 0)),
            locks_enabled=self.settings.locks_enabled,
            reclaim_after=self.settings.reclaim_after,
        )
        await self._name.take(named, until=self._clock.mono() + wait)
        self._incarnation = incarnation
        self._events.emit(NodeJoined(node=self.settings.node, incarnation=incarnation))

    async def _follow_for_ever(self) -> None:
        """Apply each assignment; come back under a new session when the old one was lost."""
        topic = self._places.assignments
        while True:
            self._roused.clear()
            try:
                async with listening(
                    self._store.wait(topic, _LONG), self._hear(), self._roused.wait()
                ) as heard:
                    await self._follow(heard)
            except NameTaken:
                raise
            except _PASSING:
                await self._clock.sleep(self.membership.timing.heartbeat / 2)

    async def _follow(self, heard: WaitForChange) -> None:
        """Do once what is to be done, then wait until there may be more."""
        if self.membership.incarnation != self._incarnation:
            await self._join(self.membership.timing.timeout)
        if self.is_retiring:
            await self._name.tell(stage="leaving")
        await self._catch_up()
        await self.claims.refresh()
        await heard(self.settings.refresh_interval)

    def _notice_end(self, task: "asyncio.Task[None]") -> None:
        """Own nothing from the moment that nobody follows the assignment any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self.holding.join(None)
            self._events.emit(NodeFailed(node=self.settings.node, error=repr(error)))

    async def _catch_up(self) -> None:
        if self._dealer.number == self.holding.mine.number and self.is_leader:
            # It has just been written here, by nobody else.
            return
        record = await self._look()
        if record is None or record.value is None:
            return
        if record.value["number"] > self.holding.mine.number:
            plan = await fetch_plan(self._store, self._places, record)
            if plan is not None:
                await self.holding.apply(plan)
                self._plan = plan
                self._changed.set()

    async def _look(self) -> Record | None:
        """Read the assignment; see in the same request that this node's own record is there.

        Raises:
            Corrupt: the assignment cannot be understood.
        """
        assignment, own = self._places.assignment, self._places.node(self.settings.node)
        if self._store.is_billed or self.is_leader:
            # Where there is SQL somebody may delete it; of the leader's own the dealer knows.
            return await self._store.get(assignment)
        damaged: list[Corrupt] = []
        found = await read_each(self._store, [assignment, own], damaged.append)
        if assignment not in found:
            raise damaged[0]
        if own in found and ((record := found[own]) is None or record.deleted):
            await self._name.restore()
        return found[assignment]

    async def _hear(self) -> None:
        """Return when there is a later assignment than ours, or another session."""
        while (
            self.membership.incarnation == self._incarnation
            and self._told_number() <= self.holding.mine.number
        ):
            await self.membership.change()
            self.claims.note_deaths()

    def _told_number(self) -> int:
        """Give the highest assignment that a leader has told of with its beats."""
        numbers = (
            life.facts.get(self._places.assignment, 0) for life in self.membership.seen.values()
        )
        return max(numbers, default=0)

    async def _is_ready(self, minimum_nodes: int) -> bool:
        if self.is_retiring or self.settings.is_observer:
            # Who takes no tokens has no share to wait for.
            return True
        plan = self._plan
        if plan is None or awaits(plan, self._incarnation):
            return False
        is_member = plan.assignment.find(self._incarnation)
        return bool(is_member) and len(plan.assignment.nodes) >= minimum_nodes

    async def _hand_over(self, wait: float) -> None:
        """Wait until the leader has taken everything from this node, as long as there is one."""
        until = self._clock.mono() + wait
        while self._clock.mono() < until:
            plan = self._plan
            if plan is None or has_nothing(plan, self._incarnation):
                return
            await self._wait_for_change(_MOMENT)

    async def _wait_for_change(self, seconds: float) -> None:
        """Wait until another assignment was applied, or for so long."""
        self._changed.clear()
        with suppress(TimeoutError):
            # A moment at least: a clock that is slower than the loop's must not spin it.
            async with asyncio.timeout(max(seconds, _MOMENT)):
                await self._changed.wait()

    def _may_run(self, incarnation: str) -> Callable[[str, int], bool]:
        """Give the question whether a claim that a session made may be acted on now.

        Not in the session that followed it: what it owns is another matter.
        """
        membership = self.membership

        def ask(_task: str, _token: int) -> bool:
            return membership.is_trusted and membership.incarnation == incarnation

        return ask

    async def _read_pins(self) -> Sequence[Pin]:
        """Give the pins that are in force, and remove those that no longer are."""
        pins = await self.pins.pins()
        if not self.settings.locks_enabled:
            self._report_ignored(len(pins))
            return ()
        if expired := await self.pins.sweep():
            self._events.emit(PinsExpired(node=self.settings.node, count=expired))
        return pins

    def _report_ignored(self, count: int) -> None:
        if count != self._ignored:
            self._ignored = count
            self._events.emit(PinsIgnored(node=self.settings.node, count=count))

    def _tell(self, change: TokenChange) -> None:
        self._events.emit(
            TokensChanged(
                node=self.settings.node,
                number=change.number,
                tokens=len(self.holding.mine.tokens),
                added=len(change.added),
                removed=len(change.removed),
            )
        )
        self._told(change)
