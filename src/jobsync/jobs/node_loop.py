"""The loop of a node: it takes the node's name, and applies each assignment of the leader.

If its session is lost it continues in a new one, which owns nothing at first. If it fails, the
node owns nothing any more, and others take over.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import date

import msgspec

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import WaitForChange, listening
from jobsync.core.assignment import Plan, token_maker
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.pins import Pin, resolve
from jobsync.core.plan_documents import read_heading
from jobsync.errors import Conflict, Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.jobs.claims import Claims
from jobsync.jobs.events import (
    NodeFailed,
    NodeJoined,
    PinsExpired,
    PinsIgnored,
    TokenChange,
    TokensChanged,
)
from jobsync.jobs.fleet_settings import FleetSettings, SettingsDiffer
from jobsync.jobs.foreign_claims import ClaimRules
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.owned_tokens import OwnedTokens
from jobsync.jobs.pins import PinStore
from jobsync.jobs.rebalancer import Rebalancer, fetch_plan
from jobsync.jobs.registration import NameTaken, NodeRecord, Registration, Stage
from jobsync.jobs.retention import WorkDate
from jobsync.safe_text import format_error
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = ["TRANSIENT", "JobNodeSettings", "NodeLoop"]

TRANSIENT = (Unavailable, OutcomeUnknown, Conflict, Corrupt, Misconfigured)
"""Errors that may go away: an outage, a burst of refusals, a record that is repaired."""

_WAIT_TIMEOUT = 3600.0


class JobNodeSettings(ClaimRules, frozen=True, kw_only=True):
    """The settings of a node."""

    fleet: str
    """The prefix of the SQL views. Fleets in one store are independent of each other."""
    node: str
    site: str
    day: date
    total_tokens: int
    hash_function: str
    is_observer: bool
    rebalance_interval: float
    """Seconds between rounds of the leader if no change is reported."""
    refresh_interval: float
    """Seconds between reads of the assignment if no change is reported."""
    locks_enabled: bool = True
    """Whether pins are in force while this node is the leader."""
    minimum_nodes: int = 1
    """This node takes no tokens before so many nodes have joined."""


class NodeLoop:
    """The part of a node that runs in the background; `JobNode` adds what its users call.

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
        self._registration = Registration(membership, key, self._facts)
        day, node = settings.day, settings.node
        self.claims = Claims(membership, self._keys, day, node, self.token, settings)
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._work_date = WorkDate(store, self._keys, day, self._corruption_log)
        self.owned_tokens = OwnedTokens(self._registration, self.claims, self._report_change)
        self.pins = PinStore(store, components, self._keys, self.token)
        self._rebalancer = self._build_rebalancer()
        self.fleet_settings = self._build_fleet_settings()
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

    def _build_rebalancer(self) -> Rebalancer:
        settings = self.settings
        return Rebalancer(
            self.membership,
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

    def _build_fleet_settings(self) -> FleetSettings:
        settings = self.settings
        shared: dict[str, Json] = {
            "site": settings.site,
            "total_tokens": settings.total_tokens,
            "hash_function": settings.hash_function,
            "locks_enabled": settings.locks_enabled,
        }
        return FleetSettings(self.membership, self._keys, settings.node, shared, self.nodes)

    @property
    def names(self) -> list[str]:
        """The names of the nodes in the assignment."""
        return [] if self._plan is None else [node.name for node in self._plan.assignment.nodes]

    async def nodes(self) -> list[NodeRecord]:
        """Return all nodes of the fleet, including those that have left."""
        return await self._rebalancer.list_nodes()

    @property
    def is_leader(self) -> bool:
        """Whether this node is the leader, which assigns the tokens."""
        return self._coordinator is not None and self._coordinator.is_coordinator

    @property
    def leader(self) -> str | None:
        """The worker id of the leader, if known."""
        return None if self._coordinator is None else self._coordinator.coordinator_id

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
            except TRANSIENT as error:
                if isinstance(error, Unavailable | OutcomeUnknown):
                    self._failed_at = self._clock.mono()
                elif isinstance(error, Corrupt):
                    self._corruption_log.report(error)
                await self._clock.sleep(self.membership.timing.heartbeat / 2)

    async def _run_once(self, wait_for_change: WaitForChange) -> None:
        """Apply the latest assignment once, then wait for a change."""
        if self.membership.incarnation != self._incarnation:
            await self._join(self.membership.timing.timeout)
        await self._update_stage()
        await self._apply_assignment()
        await self._update_stage()
        await self.claims.foreign.refresh()
        await self._work_date.record(self.claims.store_clock.now)
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
            created=self.claims.store_clock.now,
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

    async def _apply_assignment(self) -> None:
        if self._rebalancer.number == self.owned_tokens.current.number and self.is_leader:
            # This node has just written it, and no other node can.
            return
        record = await self._read_assignment()
        if record is None or record.value is None:
            return
        if read_heading(record.value, record.key).number > self.owned_tokens.current.number:
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
        sessions = self.membership.seen.values()
        told = [session.facts.get(self._keys.assignment) for session in sessions]
        return max((number for number in told if isinstance(number, int)), default=0)

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
            if count:
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
