"""Events of sessions and elections."""

import logging
from typing import ClassVar, Literal

from jobsync.events import Event

__all__ = [
    "ColdStartPhaseChanged",
    "CoordinatorDemoted",
    "CoordinatorElected",
    "CoordinatorPromoted",
    "ElectionHalted",
    "EpochRenewed",
    "HeartbeatLate",
    "MemberFailed",
    "OwnElection",
    "Phase",
    "SessionLost",
    "StoreSilent",
    "WorkerDied",
    "WorkerHeartbeat",
]

Phase = Literal["observing", "electing", "preparing", "ready"]


class WorkerHeartbeat(Event, frozen=True, kw_only=True):
    """This worker's session was renewed, or the leader's renewal was seen."""

    name: ClassVar[str] = "coord:worker-heartbeat"

    worker_id: str
    timestamp: float
    """By this worker's wall clock."""


class HeartbeatLate(Event, frozen=True, kw_only=True):
    """A heartbeat went out late: the process gets too little CPU time, or code holds the GIL."""

    name: ClassVar[str] = "coord:heartbeat-late"
    level: ClassVar[int] = logging.WARNING

    worker_id: str
    lag: float
    """Seconds."""
    worker_timeout: float


class SessionLost(Event, frozen=True, kw_only=True):
    """This worker's session was declared dead. Everything it held is void."""

    name: ClassVar[str] = "coord:session-lost"
    level: ClassVar[int] = logging.WARNING

    worker_id: str
    incarnation: str


class WorkerDied(Event, frozen=True, kw_only=True):
    """This worker has declared another one dead, which sent no heartbeat for its timeout."""

    name: ClassVar[str] = "coord:worker-died"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    incarnation: str


class MemberFailed(Event, frozen=True, kw_only=True):
    """An error of this library or of the setup has ended the session. It holds nothing."""

    name: ClassVar[str] = "coord:member-failed"
    level: ClassVar[int] = logging.ERROR

    worker_id: str
    error: str


class StoreSilent(Event, frozen=True, kw_only=True):
    """The store does not answer. Emitted once per outage."""

    name: ClassVar[str] = "coord:store-silent"
    level: ClassVar[int] = logging.WARNING

    worker_id: str
    reason: str


class _AboutRole(Event, frozen=True, kw_only=True):
    role: str
    """Namespace and kind of work."""


class CoordinatorElected(_AboutRole, frozen=True, kw_only=True):
    """A different worker leads. Emitted once on every worker."""

    name: ClassVar[str] = "coord:coordinator-elected"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    epoch: int
    until: float
    """When its mandate ends, in Unix seconds by its own clock."""
    active_workers: tuple[str, ...]


class OwnElection(CoordinatorElected, frozen=True, kw_only=True):
    """This worker leads. `CoordinatorPromoted` logs that."""

    level: ClassVar[int] = logging.DEBUG


class CoordinatorPromoted(_AboutRole, frozen=True, kw_only=True):
    """This worker leads from now on."""

    name: ClassVar[str] = "coord:coordinator-promoted"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    epoch: int
    until: float
    timestamp: float


class CoordinatorDemoted(_AboutRole, frozen=True, kw_only=True):
    """This worker no longer leads."""

    name: ClassVar[str] = "coord:coordinator-demoted"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    epoch: int
    until: float
    reason: str


class EpochRenewed(_AboutRole, frozen=True, kw_only=True):
    """This worker has renewed its mandate, in the same term."""

    name: ClassVar[str] = "coord:coordinator-epoch-renewed"

    worker_id: str
    epoch: int
    until: float
    new_epoch: float
    """The same as `until`."""


class ColdStartPhaseChanged(_AboutRole, frozen=True, kw_only=True):
    """The cold start of an election has entered another phase."""

    name: ClassVar[str] = "coord:cold-start-phase-changed"

    phase: Phase
    duration: float
    """Seconds since this worker became a candidate."""


class ElectionHalted(_AboutRole, frozen=True, kw_only=True):
    """The role's record cannot be used. It is left as it is, and this worker does not lead."""

    name: ClassVar[str] = "coord:election-halted"
    level: ClassVar[int] = logging.ERROR

    reason: str
