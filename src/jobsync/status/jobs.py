"""The status of a fleet that shares tasks, read from the store without joining or writing.

It shows the records of a moment ago: nodes, their tokens, pins, claims, and what a task is
waiting for.
"""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.role import worker_of
from jobsync.core.assignment import (
    HASH_FUNCTIONS,
    NOBODY,
    NodeRef,
    Ownership,
    Plan,
    promised_to,
    token_maker,
    tokens_of,
)
from jobsync.core.pins import Pin, pattern_in_force
from jobsync.errors import Corrupt, NotFound
from jobsync.jobs.coordination_config import default_reclaim_delay
from jobsync.jobs.fleet_settings import read_shared_settings
from jobsync.jobs.foreign_claims import Claim, read_claim, scan_claims
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.pins import PinStore
from jobsync.jobs.rebalancer import fetch_plan
from jobsync.jobs.registration import NodeRecord, Stage, read_node_record
from jobsync.status.sessions import (
    ClusterStatus,
    SessionStatus,
    read_cluster_status,
)
from jobsync.stores.contract import Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.paging import scan_all

__all__ = [
    "FleetStatus",
    "NodeCondition",
    "NodeStatus",
    "PinStatus",
    "ShareStatus",
    "TaskStatus",
    "read_fleet_status",
]

_WORK = "jobs"
_NOTHING = Ownership(0)

NodeCondition: TypeAlias = Literal["ready", "joining", "leaving", "left", "silent", "dead"]


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: str
    state: NodeCondition
    leads: bool
    tokens: int
    heard: float | None
    """Seconds since its session last wrote, if the store has a clock."""
    host: str
    pid: int
    joined: float
    incarnation: str


class ShareStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node's share of the tokens."""

    node: str
    tokens: int
    incoming: int
    """Tokens that move here, from nodes that have not acknowledged yet."""
    outgoing: int
    pinned: int
    """Tasks that it owns although another node owns their token."""


class PinStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pin."""

    task_id: str
    token: int
    patterns: tuple[str, ...]
    in_force: str | None
    """The first pattern that matches any node; None: the task waits."""
    reason: str | None
    created_by: str
    expires: float | None


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What decides where one task runs."""

    task_id: str
    token: int
    owner: str | None
    """The node that owns it now."""
    moving_to: str | None
    pins: list[PinStatus]
    claim: Claim | None
    claimed_by: NodeCondition | None
    """The condition of the node that claimed it."""
    last_heard: float | None
    """When that node last wrote or was declared dead; Unix seconds, by the store's clock."""
    timeout: float
    """Seconds of silence after which that node is declared dead."""
    reclaim_after: float
    """Seconds after a node's death before the owner starts that node's tasks again."""


class FleetStatus:
    """The status of one fleet. Created by `read_fleet_status`."""

    def __init__(
        self,
        store: Store,
        components: Components,
        fleet: str,
        nodes: Sequence[NodeRecord],
        cluster: ClusterStatus,
        plan: Plan,
        token_of: Callable[[str], int],
    ) -> None:
        self.number = plan.assignment.number
        """The number of the current assignment; grows with each change."""
        self._store = store
        self._clock = components.clock
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._keys = JobKeys(fleet)
        self._nodes = sorted(nodes, key=lambda node: node.incarnation)
        self._sessions = {session.incarnation: session for session in cluster.sessions}
        self._leader = _find_leader(cluster, fleet)
        self._plan = plan
        self._token_of = token_of
        self._pin_store = PinStore(store, components, self._keys, token_of)
        self._owned = {
            node.incarnation: plan.seen_by(node.incarnation) for node in plan.assignment.nodes
        }

    def nodes(self) -> list[NodeStatus]:
        """Return all nodes, the oldest first, including those that are gone."""
        return [self._describe_node(node) for node in self._nodes]

    def shares(self) -> list[ShareStatus]:
        """Return each node's share of the tokens, and the tokens that are moving."""
        assignment = self._plan.assignment
        return [
            ShareStatus(
                node=node.name,
                tokens=len(self._owned[node.incarnation].tokens),
                incoming=len(promised_to(assignment, node.incarnation)),
                outgoing=sum(sum(m.counts) for m in assignment.moves if m.giver == place),
                pinned=len(self._owned[node.incarnation].own),
            )
            for place, node in enumerate(assignment.nodes, 1)
        ]

    async def pins(self) -> list[PinStatus]:
        """Return the pins in force, sorted by token and task."""
        names = [node.name for node in self._plan.assignment.nodes]
        found = sorted(await self._pin_store.list_active(), key=lambda pin: (pin.token, pin.task))
        return [_describe_pin(pin, names) for pin in found]

    async def claims(self, day: date) -> list[Claim]:
        """Return the claims of a date, sorted by task."""
        return await scan_claims(self._store, self._keys, day, self._corruption_log)

    async def task(self, task_id: str, day: date) -> TaskStatus:
        """Return what decides where one task runs on a date."""
        token = self._token_of(task_id)
        record = await self._store.get(self._keys.claim(day, task_id))
        claim = None if record is None else self._corruption_log.read(read_claim, record)
        session = None if claim is None else self._sessions.get(claim.owner)
        owner = self._find_owner(task_id, token)
        timeout = 0.0 if session is None else session.timeout
        return TaskStatus(
            task_id=task_id,
            token=token,
            owner=owner,
            moving_to=self._find_receiver(task_id, token),
            pins=[pin for pin in await self.pins() if pin.task_id == task_id],
            claim=claim,
            claimed_by=None if claim is None else self._find_condition(claim.owner),
            last_heard=await self._find_last_write(session),
            timeout=timeout,
            reclaim_after=self._find_reclaim_delay(owner, session),
        )

    async def _find_last_write(self, session: SessionStatus | None) -> float | None:
        """Return when a session last wrote or was declared dead."""
        if session is None or session.heard is None:
            return None
        now = await self._store.now() or self._clock.wall()
        return now.seconds - session.heard

    def _find_reclaim_delay(self, owner: str | None, session: SessionStatus | None) -> float:
        """Return how long the owner of a task waits after the death of a session with the task."""
        node = next((node for node in self._nodes if node.name == owner), None)
        if session is not None and session.has_ended:
            return 0.0 if node is None else node.reclaim_ended_after
        if node is None or node.reclaim_after is None:
            return default_reclaim_delay(0.0 if session is None else session.timeout)
        return node.reclaim_after

    def _describe_node(self, node: NodeRecord) -> NodeStatus:
        session = self._sessions.get(node.incarnation)
        return NodeStatus(
            node=node.name,
            state=self._find_condition(node.incarnation),
            leads=worker_of(node.incarnation) == self._leader,
            tokens=len(self._owned.get(node.incarnation, _NOTHING).tokens),
            heard=None if session is None else session.heard,
            host=node.host,
            pid=node.pid,
            joined=node.created,
            incarnation=node.incarnation,
        )

    def _find_owner(self, task_id: str, token: int) -> str | None:
        """Return the node that owns a task now; None while the task moves or waits."""
        for node in self._plan.assignment.nodes:
            if self._owned[node.incarnation].covers(task_id, token):
                return node.name
        return None

    def _find_receiver(self, task_id: str, token: int) -> str | None:
        """Return the node that a task is moving to."""
        for task in self._plan.exceptions.tasks:
            if task.task == task_id:
                return _name(self._plan.exceptions.nodes, task.taker)
        for move in self._plan.assignment.moves:
            if token in tokens_of(move):
                return _name(self._plan.assignment.nodes, move.taker)
        return None

    def _find_condition(self, incarnation: str) -> NodeCondition:
        """Return a node's condition, from its record and its session."""
        session = self._sessions.get(incarnation)
        stages = (node.stage for node in self._nodes if node.incarnation == incarnation)
        # Another process may have the name by now: then only the session tells.
        stage: Stage = next(stages, "ready")
        if stage == "left" or (session is not None and session.state == "live"):
            return stage
        return "dead" if session is None or session.state == "dead" else "silent"


async def read_fleet_status(store: Store, components: Components, fleet: str) -> FleetStatus:
    """Read the status of a fleet.

    Raises:
        Corrupt: its settings or its assignment cannot be read.
        NotFound: there has never been a fleet with this name.
        Unavailable: the store does not answer.
    """
    keys, corruption_log = JobKeys(fleet), CorruptionLog(store.name, components.events)
    record = await store.get(keys.settings)
    if record is None:
        raise NotFound("fleet that shares tasks as", fleet)
    settings = read_shared_settings(record)
    if settings.hash_function not in HASH_FUNCTIONS:
        raise Corrupt(record.key, f"this code has no hash function {settings.hash_function!r}")
    total = settings.total_tokens
    token_of = token_maker(total, settings.hash_function)
    cluster = await read_cluster_status(store, components)
    nodes = corruption_log.read_all(read_node_record, await scan_all(store, keys.nodes))
    plan = await _read_plan(store, keys) or Plan.empty(total)
    return FleetStatus(store, components, fleet, nodes, cluster, plan, token_of)


async def _read_plan(store: Store, keys: JobKeys) -> Plan | None:
    """Return the current plan; reads again if it is replaced between its two parts.

    Raises:
        Corrupt: it, or what belongs to it, cannot be read or is missing.
    """
    version = ""
    while (record := await store.get(keys.assignment)) is not None:
        if record.value is None:
            # Fenced by a leader that has not assigned tokens yet.
            return None
        plan = await fetch_plan(store, keys, record)
        if plan is not None:
            return plan
        if record.version == version:
            raise Corrupt(record.key, "a record that belongs to it is missing")
        version = record.version
    return None


def _find_leader(cluster: ClusterStatus, fleet: str) -> str | None:
    for role in cluster.roles:
        if (role.namespace, role.work) == (fleet, _WORK):
            return role.leader
    return None


def _name(nodes: Sequence[NodeRef], place: int) -> str | None:
    return None if place == NOBODY else nodes[place - 1].name


def _describe_pin(pin: Pin, names: Sequence[str]) -> PinStatus:
    return PinStatus(
        task_id=pin.task,
        token=pin.token,
        patterns=pin.patterns,
        in_force=pattern_in_force(pin.patterns, names),
        reason=pin.reason,
        created_by=pin.created_by,
        expires=pin.expires_at,
    )
