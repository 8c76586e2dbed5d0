"""One node of a fleet that shares tasks, on an event loop. `Job` is the blocking interface to it.

It registers under a name, owns what the leader assigns to it, claims and finishes tasks, and
hands over before it leaves. If its session is lost it continues in a new one, which owns nothing
at first.
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
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.assignment import Plan, has_incoming, has_nothing, token_maker
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.pins import Pin, resolve
from jobsync.errors import (
    Conflict,
    Corrupt,
    Misconfigured,
    OutcomeUnknown,
    Unavailable,
    format_error,
)
from jobsync.jobs.claims import Claims
from jobsync.jobs.events import (
    AuditRefused,
    NodeFailed,
    NodeJoined,
    PinsExpired,
    PinsIgnored,
    TokenChange,
    TokensChanged,
)
from jobsync.jobs.fleet_settings import FleetSettings, SettingsDiffer
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.owned_tokens import OwnedTokens
from jobsync.jobs.pins import PinStore
from jobsync.jobs.rebalancer import Rebalancer, fetch_plan
from jobsync.jobs.registration import (
    NameTaken,
    NodeRecord,
    Registration,
    Stage,
    find_candidates,
)
from jobsync.jobs.retention import Forgotten, forget, record_date
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import read_each

__all__ = ["JobNode", "JobNodeSettings"]

_TRANSIENT = (Unavailable, OutcomeUnknown, Conflict, Corrupt, Misconfigured)
"""Errors that may go away: an outage, a burst of refusals, a record that is repaired."""

_SHORT_WAIT = 0.05
_HEARTBEAT_DELAY = 0.5
"""Seconds that a heartbeat may be late, by a slow store or a busy machine, before it is overdue."""
_WAIT_TIMEOUT = 3600.0
_WORK = "jobs"


class JobNodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a node."""

    fleet: str
    """The prefix of the SQL views. Fleets in one store are independent of each other."""
    node: str
    site: str
    day: date
    total_tokens: int
    hash_function: str
    reclaim_after: float
    reclaim_ended_after: float = 0.0
    handover_memory: float
    once_per_date: bool
    is_observer: bool
    rebalance_interval: float
    """Seconds between rounds of the leader if no change is reported."""
    refresh_interval: float
    """Seconds between reads of the assignment if no change is reported."""
    locks_enabled: bool = True
    """Whether pins are in force while this node is the leader."""
    minimum_nodes: int = 1
    """This node takes no tokens before so many nodes have joined."""


class JobNode:
    """A node. Call `start`, use it, call `stop`.

    Args:
        membership: an open session, which the caller ends.
        settings: name, fleet and tokens.
        on_change: called with every change of the owned tokens, after it was applied.
        facts: host and process, for people.
    """

    def __init__(
        self,
        membership: Membership,
        settings: JobNodeSettings,
        *,
        on_change: Callable[[TokenChange], object] = lambda _: None,
        facts: Mapping[str, Json] | None = None,
    ) -> None:
        store, components = membership.store, membership.components
        self.membership = membership
        self.settings = settings
        self.token = token_maker(settings.total_tokens, settings.hash_function)
        """Returns a task's token."""
        self._store: Store = store
        self._components: Components = components
        self._clock = components.clock
        self._events = components.events
        self._keys = JobKeys(settings.fleet)
        self._on_change = on_change
        self._plan_changed = asyncio.Event()
        self._wakeup = asyncio.Event()
        self._reviewing_pins = asyncio.Lock()
        self._facts = dict(facts or {})
        key = self._keys.node(settings.node)
        self._registration = Registration(store, components, membership, key, self._facts)
        self.claims = Claims(
            store,
            components,
            membership,
            self._keys,
            settings.day,
            settings.node,
            self.token,
            reclaim_after=settings.reclaim_after,
            reclaim_ended_after=settings.reclaim_ended_after,
            handover_memory=settings.handover_memory,
            once_per_date=settings.once_per_date,
        )
        self.owned_tokens = OwnedTokens(self._registration, self.claims, self._report_change)
        self.pins = PinStore(store, components, self._keys, self.token)
        self._rebalancer = Rebalancer(
            store,
            components,
            membership,
            self._keys,
            total=settings.total_tokens,
            token_of=self.token,
            node=settings.node,
            interval=settings.rebalance_interval,
            read_pins=self._read_pins,
            pins_valid_for=lambda: self.pins.valid_for,
            on_published=self._wakeup.set,
            restore=self._registration.restore,
        )
        self.fleet_settings = FleetSettings(
            membership,
            self._keys,
            settings.node,
            {
                "site": settings.site,
                "total_tokens": settings.total_tokens,
                "hash_function": settings.hash_function,
                "locks_enabled": settings.locks_enabled,
            },
            self.nodes,
        )
        """The settings that all nodes share."""
        self._coordinator: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None
        self._plan: Plan | None = None
        self._incarnation = ""
        self._stage: Stage = "joining"
        self._minimum = 0
        """The nodes that it waits for before it owns tokens; 0 if it does not wait for them."""
        self._ignored_pins = 0
        self.is_retiring = False
        """Whether it claims nothing more and hands over its tokens."""
        self._failed_at: Mono | None = None
        """When a request of this node last had no answer."""
        self.failure: BaseException | None = None
        """The error that ended this node, if any."""

    async def enter(self, wait: float) -> None:
        """Check the fleet's settings and take the name; own nothing before `start`.

        Args:
            wait: seconds to wait for an earlier process with this name to end.

        Raises:
            Misconfigured: other nodes have other settings, or the name is taken.
        """
        await self.claims.read_clock()
        await self._join(wait)
        await record_date(self._store, self._keys, self.settings.day, self.claims.now)

    async def start(self, wait: float) -> None:
        """Start to own tokens, once `minimum_nodes` have joined; `enter` first if necessary.

        Args:
            wait: seconds to wait for an earlier process with this name to end.

        Raises:
            Misconfigured: other nodes have other settings, or the name is taken.
        """
        if self.settings.minimum_nodes == 1 or self.settings.is_observer:
            self._stage = "ready"
        else:
            self._minimum = self.settings.minimum_nodes
        if not self._incarnation:
            await self.enter(wait)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_task_done)
        self._coordinator = await self.membership.coordinate(
            _WORK,
            Hooks(work=self._rebalancer.run),
            namespace=self.settings.fleet,
            governs=[self._keys.assignment],
        )

    async def wait_until_ready(self, wait: float) -> bool:
        """Wait until enough nodes have joined and this one has its tokens; False at the timeout.

        Args:
            wait: the most seconds to wait for other nodes. What this node does alone, to be
                elected and to assign all tokens to itself, may take a heartbeat longer.
        """
        heartbeat = self.membership.timing.heartbeat
        started = self._clock.mono()
        until = started + wait
        while not self._is_ready:
            left = until - self._clock.mono()
            if left > 0:
                await self._wait_for_change(min(left, heartbeat))
            elif self._waits_for_nobody and self._clock.mono() < started + heartbeat:
                await self._wait_for_change(_SHORT_WAIT)
            else:
                return False
        return True

    async def stop(self, wait: float) -> None:
        """Hand over, then leave. `wait` is how many seconds the handover may take."""
        if self._task is None:
            return
        self.is_retiring = True
        with suppress(*_TRANSIENT):
            await self._registration.update(stage="leaving")
            await self._wait_for_handover(wait)
        self._task.cancel()
        await asyncio.wait([self._task])
        self.owned_tokens.reset(None)
        with suppress(*_TRANSIENT):
            await self.claims.settle(lambda _, __: False)
            await self._registration.update(stage="left")
        if self._coordinator is not None:
            await self._coordinator.stop()
        self._task = None

    async def withhold_pinned(self, tasks: Mapping[str, int]) -> None:
        """Claim none of these tasks that pins keep from this node, even before the leader acts.

        Args:
            tasks: the tasks that were just pinned, each with its token.
        """
        if self._task is None:
            # It owns nothing before it has started, and the leader reads the pins after that.
            return
        async with self._reviewing_pins:
            record = await self._store.get(self._keys.assignment)
            number = 0 if record is None else record.value["number"]
            # A decision may be under way that does not know the pins. The one after it does.
            self.owned_tokens.withhold(await self._find_pinned_away(tasks), number + 2)
        self._wakeup.set()

    def review_soon(self) -> None:
        """Check soon which pins still keep tasks from this node, after some were removed."""
        self._wakeup.set()

    async def _review_withheld(self) -> bool:
        """Stop withholding tasks that pins no longer keep from this node; whether any are left."""
        if not self.owned_tokens.withheld:
            return False
        async with self._reviewing_pins:
            tasks = self.owned_tokens.withheld
            self.owned_tokens.release(tasks.keys() - await self._find_pinned_away(tasks))
            return bool(self.owned_tokens.withheld)

    async def _find_pinned_away(self, tasks: Mapping[str, int]) -> dict[str, int]:
        """Return the tasks that pins in force keep from this node, each with its token."""
        pins = [pin for pin in await self.pins.list_active() if pin.task in tasks]
        names = dict(enumerate(self.names))
        ours = sum(1 << index for index, name in names.items() if name == self.settings.node)
        allowed = resolve(pins, names).tasks
        return {task: tasks[task] for task, nodes in allowed.items() if not nodes & ours}

    def retire(self) -> None:
        """Claim nothing more, and hand over. Running tasks continue and are finished.

        Call it on the node's event loop.
        """
        self.is_retiring = True
        self._wakeup.set()
        self._plan_changed.set()

    def can_claim(self, task: str) -> bool:
        """Whether this node may do a task now. Does not use the store."""
        if self.is_retiring:
            return False
        return self.owned_tokens.may_claim(task, self.token(task)) and not self.claims.is_refused(
            task
        )

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Claim tasks; return those that were not claimed, each with the reason.

        Args:
            tasks: their ids.
            known: only these completions of tasks may be done again; all if None.
        """
        tokens = {task: self.token(task) for task in tasks}
        foreign = {
            task: "it does not belong to this node now"
            for task, token in tokens.items()
            if not self.owned_tokens.owns(task, token)
        }
        ours = {task: token for task, token in tokens.items() if task not in foreign}
        number, may_run = self.owned_tokens.current.number, self._may_run(self._incarnation)
        lost = await self.claims.add(ours, number, may_run, known)
        return foreign | lost

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """End tasks; return those whose end was refused, each with the reason."""
        refused = await self.claims.finish(tasks, state)
        for task, reason in refused.items():
            self._events.emit(AuditRefused(node=self.settings.node, task_id=task, reason=reason))
        return refused

    async def list_claims(self) -> list[Claim]:
        """Return all claims of the date."""
        return await self.claims.list_all()

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with the version of its completion."""
        return await self.claims.find_done(tasks)

    async def read_time(self) -> float:
        """Return the time of day, by the store's clock where it has one."""
        await self.claims.read_clock()
        return self.claims.now

    @property
    def poll_interval(self) -> float:
        """The most seconds between polls while waiting for other nodes. Polls may be billed."""
        return self.membership.timing.heartbeat / 2

    @property
    def names(self) -> list[str]:
        """The names of the nodes in the assignment."""
        return [] if self._plan is None else [node.name for node in self._plan.assignment.nodes]

    @property
    def running(self) -> list[str]:
        """The tasks that this node has claimed and not finished."""
        return self.claims.running

    @property
    def tokens(self) -> frozenset[int]:
        """The tokens that this node owns, even if it may not use them now."""
        return self.owned_tokens.current.tokens

    async def count_joined(self) -> int:
        """Return how many live nodes own tokens or wait for others; this one is among them."""
        found = find_candidates(await self.nodes(), ())
        sessions = await self._store.get_many([f"{SESSIONS}{node.incarnation}" for node in found])
        records = [read_session_record(session) for session in sessions if session is not None]
        return max(1, sum(record.state == "live" for record in records))

    @property
    def owns_nothing(self) -> bool:
        """Whether it owns neither a token nor a pinned task."""
        return not self.owned_tokens.current.tokens and not self.owned_tokens.current.own

    @property
    def number(self) -> int:
        """The number of the assignment that it has applied."""
        return self.owned_tokens.current.number

    @property
    def is_trusted(self) -> bool:
        """Whether it may act now. Reads the clock."""
        return self.failure is None and self.membership.is_trusted

    @property
    def is_connected(self) -> bool:
        """Whether the store answers: no heartbeat is overdue, and one has followed the last error.

        Known long before trust runs out, which lasts for several heartbeats. Reads the clock.
        """
        timing = self.membership.timing
        age = timing.timeout - timing.margin - self.membership.trust_left
        if age > timing.heartbeat + max(_HEARTBEAT_DELAY, timing.heartbeat / 10):
            return False
        # After an error, the next heartbeat that is sent and answered shows that it is over.
        return self._failed_at is None or self._clock.mono() - self._failed_at > age

    async def nodes(self) -> list[NodeRecord]:
        """Return all nodes of the fleet, including those that have left."""
        return await self._rebalancer.list_nodes()

    async def forget(self, days: float) -> Forgotten:
        """Remove records older than `days` days: claims, nodes that are gone, history.

        Raises:
            Invalid: `days` is less than one.
        """
        return await forget(
            self._store,
            self._keys,
            self._rebalancer.read_node,
            now=await self.read_time(),
            days=days,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this node is the leader, which assigns the tokens."""
        return self._coordinator is not None and self._coordinator.is_coordinator

    @property
    def leader(self) -> str | None:
        """The worker id of the leader, if known."""
        return None if self._coordinator is None else self._coordinator.coordinator_id

    async def _join(self, wait: float) -> None:
        """Take the name with the current session, in a fleet with this node's settings."""
        session = self.membership.session
        incarnation = session.incarnation
        self.claims.reset()
        self.owned_tokens.reset(session)
        record = NodeRecord(
            name=self.settings.node,
            incarnation=incarnation,
            stage=self._target_stage,
            minimum_nodes=self._minimum,
            applied=0,
            is_observer=self.settings.is_observer,
            created=self.claims.now,
            host=str(self._facts.get("host", "")),
            pid=int(self._facts.get("pid", 0)),
            fleet=self.fleet_settings.values,
            reclaim_after=self.settings.reclaim_after,
            reclaim_ended_after=self.settings.reclaim_ended_after,
        )
        until = self._clock.mono() + wait
        while True:
            await self.fleet_settings.wait(until)
            await self._registration.take(record, until=until)
            if await self.fleet_settings.settle():
                break
            # A node with other settings has joined meanwhile.
            await self._registration.update(stage="left")
        self._incarnation = incarnation
        self._events.emit(NodeJoined(node=self.settings.node, incarnation=incarnation))

    async def _run(self) -> None:
        """Apply each assignment; register again when the session was replaced."""
        topic = self._keys.assignments
        while True:
            self._wakeup.clear()
            try:
                async with listening(
                    self._store.wait(topic, _WAIT_TIMEOUT),
                    self._wait_for_hint(),
                    self._wakeup.wait(),
                ) as wait_for_change:
                    await self._run_once(wait_for_change)
            except (NameTaken, SettingsDiffer):
                raise
            except _TRANSIENT as error:
                if isinstance(error, Unavailable | OutcomeUnknown):
                    self._failed_at = self._clock.mono()
                await self._clock.sleep(self.membership.timing.heartbeat / 2)

    async def _run_once(self, wait_for_change: WaitForChange) -> None:
        """Apply the latest assignment once, then wait for a change."""
        if self.membership.incarnation != self._incarnation:
            await self._join(self.membership.timing.timeout)
        await self._update_stage()
        await self._apply_assignment()
        await self._update_stage()
        await self.claims.foreign.refresh()
        interval = self.settings.refresh_interval
        if await self._review_withheld():
            # The pins may be removed before the leader sees them; then no assignment comes.
            interval = min(interval, self.membership.timing.heartbeat)
        await wait_for_change(interval)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Own nothing once the loop that applies assignments has failed; others take over."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self.owned_tokens.reset(None)
            self.membership.start_leaving()
            self._events.emit(NodeFailed(node=self.settings.node, error=format_error(error)))

    async def _apply_assignment(self) -> None:
        if self._rebalancer.number == self.owned_tokens.current.number and self.is_leader:
            # This node has just written it, and no other node can.
            return
        record = await self._read_assignment()
        if record is None or record.value is None:
            return
        if record.value["number"] > self.owned_tokens.current.number:
            plan = await fetch_plan(self._store, self._keys, record)
            if plan is not None:
                await self.owned_tokens.apply(plan)
                self._plan = plan
                self._plan_changed.set()

    async def _read_assignment(self) -> Record | None:
        """Read the assignment; check in the same request that this node's own record exists.

        Raises:
            Corrupt: the assignment cannot be read.
        """
        assignment, own = self._keys.assignment, self._keys.node(self.settings.node)
        if self._store.is_billed or self.is_leader:
            # Only SQL users can delete the record; the rebalancer checks the leader's own.
            return await self._store.get(assignment)
        damaged: list[Corrupt] = []
        found = await read_each(self._store, [assignment, own], damaged.append)
        if assignment not in found:
            raise damaged[0]
        if own in found and ((record := found[own]) is None or record.deleted):
            await self._registration.restore()
        return found[assignment]

    async def _wait_for_hint(self) -> None:
        """Return when there is a newer assignment than ours, or another session."""
        while (
            self.membership.incarnation == self._incarnation
            and self._find_announced_number() <= self.owned_tokens.current.number
        ):
            await self.membership.change()
            self.claims.foreign.record_deaths()

    def _find_announced_number(self) -> int:
        """Return the highest assignment that a leader has announced in its heartbeats."""
        numbers = (
            session.facts.get(self._keys.assignment, 0) for session in self.membership.seen.values()
        )
        return max(numbers, default=0)

    @property
    def _target_stage(self) -> Stage:
        return "leaving" if self.is_retiring else self._stage

    async def _update_stage(self) -> None:
        """Write the stage of this node, if it has changed."""
        plan = self._plan
        if self._minimum and plan is not None and plan.assignment.find(self._incarnation):
            # The others are there. From now on this node works, also if they leave.
            self._stage, self._minimum = "ready", 0
        await self._registration.update(stage=self._target_stage, minimum_nodes=self._minimum)

    @property
    def _is_ready(self) -> bool:
        """Whether this node has its tokens. One that takes none has nothing to wait for."""
        if self.is_retiring or self.settings.is_observer:
            return True
        plan = self._plan
        if plan is None or has_incoming(plan, self._incarnation):
            return False
        return bool(plan.assignment.find(self._incarnation))

    @property
    def _waits_for_nobody(self) -> bool:
        """Whether its own next steps give it tokens: no other node leads or gives any up."""
        if self._minimum:
            return False
        if self.leader is None:
            return True
        plan = self._plan
        return self.is_leader and (plan is None or not has_incoming(plan, self._incarnation))

    async def _wait_for_handover(self, wait: float) -> None:
        """Wait until the leader has assigned all tokens of this node to others, or the timeout."""
        until = self._clock.mono() + wait
        while self._clock.mono() < until:
            plan = self._plan
            if plan is None or has_nothing(plan, self._incarnation):
                return
            await self._wait_for_change(_SHORT_WAIT)

    async def _wait_for_change(self, seconds: float) -> None:
        """Wait until another assignment was applied, up to `seconds`."""
        self._plan_changed.clear()
        with suppress(TimeoutError):
            # Never 0: a clock that is slower than the loop's must not make it spin.
            async with asyncio.timeout(max(seconds, _SHORT_WAIT)):
                await self._plan_changed.wait()

    def _may_run(self, incarnation: str) -> Callable[[str, int], bool]:
        """Return a check whether a claim made in a session may be acted on now.

        It may not in the next session, which owns other things.
        """
        membership = self.membership

        def check(_task: str, _token: int) -> bool:
            return membership.is_trusted and membership.incarnation == incarnation

        return check

    async def _read_pins(self) -> Sequence[Pin]:
        """Return the pins in force, and remove expired ones."""
        pins = await self.pins.list_active()
        if not self.settings.locks_enabled:
            self._report_ignored_pins(len(pins))
            return ()
        if expired := await self.pins.remove_expired():
            self._events.emit(PinsExpired(node=self.settings.node, count=expired))
        return pins

    def _report_ignored_pins(self, count: int) -> None:
        if count != self._ignored_pins:
            self._ignored_pins = count
            self._events.emit(PinsIgnored(node=self.settings.node, count=count))

    def _report_change(self, change: TokenChange) -> None:
        self._events.emit(
            TokensChanged(
                node=self.settings.node,
                number=change.number,
                tokens=len(self.owned_tokens.current.tokens),
                added=len(change.added),
                removed=len(change.removed),
            )
        )
        self._on_change(msgspec.structs.replace(change, is_leaving=self.is_retiring))
