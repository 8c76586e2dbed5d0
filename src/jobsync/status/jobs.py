"""A look at nodes that share tasks, from outside. Joins nothing, writes nothing.

What is shown stood in the store a moment ago: who is there, who owns how much, what is
pinned, what was done, and what a task waits for.
"""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.role import worker_of
from jobsync.core.assignment import (
    NOBODY,
    NodeRef,
    Ownership,
    Plan,
    promised_to,
    token_maker,
    tokens_of,
)
from jobsync.core.pins import Pin, pattern_in_force
from jobsync.errors import NotFound
from jobsync.jobs.claims import Claim, read_claim
from jobsync.jobs.config import usual_reclaim_delay
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.pin_store import PinStore
from jobsync.jobs.rebalancer import fetch_plan
from jobsync.jobs.registration import NodeRecord, Stage, read_node_record
from jobsync.status.sessions import (
    ClusterStatus,
    SessionStatus,
    read_cluster_status,
)
from jobsync.stores.contract import Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = [
    "FleetStatus",
    "NodeCondition",
    "NodeStatus",
    "PinStatus",
    "ShareStatus",
    "TaskStatus",
    "read_fleet_status",
]

_PAGE = 5000
_MOST = 10_000
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
    """Seconds since its session last wrote, where the store has a clock to tell by."""
    host: str
    pid: int
    joined: float
    incarnation: str


class ShareStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has of the tokens."""

    node: str
    tokens: int
    incoming: int
    """On their way here, from nodes that have not acknowledged yet."""
    outgoing: int
    pinned: int
    """Tasks that are its own though their token is another's."""


class PinStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pin."""

    task_id: str
    token: int
    patterns: tuple[str, ...]
    in_force: str | None
    """The first pattern that any node matches; None: the task waits."""
    reason: str | None
    created_by: str
    expires: float | None


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides about one task."""

    task_id: str
    token: int
    owner: str | None
    """The node that it belongs to now."""
    moving_to: str | None
    pins: list[PinStatus]
    claim: Claim | None
    claimed_by: NodeCondition | None
    """What became of the node that claimed it."""
    last_heard: float | None
    """When that node last wrote, or was written to be dead; Unix seconds, by the store's clock."""
    timeout: float
    """Seconds of silence after which it is called dead."""
    reclaim_after: float
    """Seconds after a node's death before which the owner does not start its tasks again."""


class FleetStatus:
    """What there is to see of one fleet. Made by `read_fleet_status`."""

    def __init__(
        self,
        store: Store,
        components: Components,
        fleet: str,
        nodes: Sequence[NodeRecord],
        seen: ClusterStatus,
        plan: Plan,
        token_of: Callable[[str], int],
    ) -> None:
        self.number = plan.assignment.number
        """Which assignment stands; grows with each change."""
        self._store = store
        self._clock = components.clock
        self._witness = CorruptionLog(store.name, components.events)
        self._places = JobKeys(fleet)
        self._nodes = sorted(nodes, key=lambda node: node.incarnation)
        self._sessions = {session.incarnation: session for session in seen.sessions}
        self._leader = _find_leader(seen, fleet)
        self._plan = plan
        self._token_of = token_of
        self._pinboard = PinStore(store, components, self._places, token_of)
        self._owned = {
            node.incarnation: plan.seen_by(node.incarnation) for node in plan.assignment.nodes
        }

    def nodes(self) -> list[NodeStatus]:
        """Give all nodes, the oldest first, those that are gone too."""
        return [self._see_node(node) for node in self._nodes]

    def shares(self) -> list[ShareStatus]:
        """Give what each node of the assignment has, and what is on its way."""
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
        """Give the pins that stand, in order of their tokens and tasks."""
        names = [node.name for node in self._plan.assignment.nodes]
        found = sorted(await self._pinboard.pins(), key=lambda pin: (pin.token, pin.task))
        return [_see_pin(pin, names) for pin in found]

    async def claims(self, day: date) -> list[Claim]:
        """Give the claims of a date, in order of their tokens."""
        prefix, after = self._places.claims(day), ""
        found: list[Claim] = []
        while True:
            page = await self._store.scan(prefix, after=after, limit=_PAGE)
            found += self._witness.read_all(read_claim, page)
            if len(page) < _PAGE:
                return found
            after = page[-1].key

    async def task(self, task_id: str, day: date) -> TaskStatus:
        """Give all that decides about one task on a date."""
        token = self._token_of(task_id)
        record = await self._store.get(self._places.claim(day, token, task_id))
        claim = None if record is None else self._witness.read(read_claim, record)
        session = None if claim is None else self._sessions.get(claim.owner)
        owner = self._find_owner(task_id, token)
        timeout = 0.0 if session is None else session.timeout
        return TaskStatus(
            task_id=task_id,
            token=token,
            owner=owner,
            moving_to=self._find_taker(task_id, token),
            pins=[pin for pin in await self.pins() if pin.task_id == task_id],
            claim=claim,
            claimed_by=None if claim is None else self._judge(claim.owner),
            last_heard=await self._date(session),
            timeout=timeout,
            reclaim_after=self._find_delay(owner) or usual_reclaim_delay(timeout),
        )

    async def _date(self, session: SessionStatus | None) -> float | None:
        """Say when a session last wrote, or was written to be dead."""
        if session is None or session.heard is None:
            return None
        now = await self._store.now() or self._clock.wall()
        return now.seconds - session.heard

    def _find_delay(self, owner: str | None) -> float | None:
        """Give what a task's owner goes by, where it tells."""
        delays = [node.reclaim_after for node in self._nodes if node.name == owner]
        return delays[0] if delays else None

    def _see_node(self, node: NodeRecord) -> NodeStatus:
        session = self._sessions.get(node.incarnation)
        return NodeStatus(
            node=node.name,
            state=self._judge(node.incarnation),
            leads=worker_of(node.incarnation) == self._leader,
            tokens=len(self._owned.get(node.incarnation, _NOTHING).tokens),
            heard=None if session is None else session.heard,
            host=node.host,
            pid=node.pid,
            joined=node.created,
            incarnation=node.incarnation,
        )

    def _find_owner(self, task_id: str, token: int) -> str | None:
        """Give the node that a task belongs to now; None while it is on its way, or waits."""
        for node in self._plan.assignment.nodes:
            if self._owned[node.incarnation].covers(task_id, token):
                return node.name
        return None

    def _find_taker(self, task_id: str, token: int) -> str | None:
        """Give the node that a task is on its way to."""
        for task in self._plan.exceptions.tasks:
            if task.task == task_id:
                return _name(self._plan.exceptions.nodes, task.taker)
        for move in self._plan.assignment.moves:
            if token in tokens_of(move):
                return _name(self._plan.assignment.nodes, move.taker)
        return None

    def _judge(self, incarnation: str) -> NodeCondition:
        """Say how a node is, by its own word and its session's."""
        session = self._sessions.get(incarnation)
        stages = (node.stage for node in self._nodes if node.incarnation == incarnation)
        # The name may be another's by now: then the session alone tells.
        stage: Stage = next(stages, "ready")
        if stage == "left" or (session is not None and session.state == "live"):
            return stage
        return "dead" if session is None or session.state == "dead" else "silent"


async def read_fleet_status(store: Store, components: Components, fleet: str) -> FleetStatus:
    """Look at the nodes that share tasks under a name.

    Raises:
        NotFound: nobody has ever shared tasks under it.
        Unavailable: the store does not answer.
    """
    places, witness = JobKeys(fleet), CorruptionLog(store.name, components.events)
    settings = await store.get(places.settings)
    if settings is None:
        raise NotFound("fleet that shares tasks as", fleet)
    total = settings.value["total_tokens"]
    token_of = token_maker(total, settings.value["hash_function"])
    seen = await read_cluster_status(store, components)
    nodes = witness.read_all(read_node_record, await store.scan(places.nodes, limit=_MOST))
    plan = await _read_plan(store, places) or Plan.empty(total)
    return FleetStatus(store, components, fleet, nodes, seen, plan, token_of)


async def _read_plan(store: Store, places: JobKeys) -> Plan | None:
    """Give the plan that stands; it may be replaced between its two parts."""
    while (record := await store.get(places.assignment)) is not None:
        if record.value is None:
            # Sealed by a leader that has not dealt yet.
            return None
        plan = await fetch_plan(store, places, record)
        if plan is not None:
            return plan
    return None


def _find_leader(seen: ClusterStatus, fleet: str) -> str | None:
    for role in seen.roles:
        if (role.namespace, role.work) == (fleet, _WORK):
            return role.leader
    return None


def _name(nodes: Sequence[NodeRef], place: int) -> str | None:
    return None if place == NOBODY else nodes[place - 1].name


def _see_pin(pin: Pin, names: Sequence[str]) -> PinStatus:
    return PinStatus(
        task_id=pin.task,
        token=pin.token,
        patterns=pin.patterns,
        in_force=pattern_in_force(pin.patterns, names),
        reason=pin.reason,
        created_by=pin.created_by,
        expires=pin.expires_at,
    )
