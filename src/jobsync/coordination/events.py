"""What happens among workers, as facts to listen to."""

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
    "Phase",
    "SessionLost",
    "StoreSilent",
    "WorkerDied",
    "WorkerHeartbeat",
]

Phase = Literal["observing", "electing", "preparing", "ready"]


class WorkerHeartbeat(Event, frozen=True, kw_only=True):
    """This worker's session was renewed, or that of the worker that leads was seen to be."""

    name: ClassVar[str] = "coord:worker-heartbeat"

    worker_id: str
    timestamp: float
    """By this worker's wall clock."""


class HeartbeatLate(Event, frozen=True, kw_only=True):
    """A beat went out late: this process gets too little time, or does not let go of the GIL."""

    name: ClassVar[str] = "coord:heartbeat-late"
    level: ClassVar[int] = logging.WARNING

    worker_id: str
    lag: float
    """Seconds."""
    worker_timeout: float


class SessionLost(Event, frozen=True, kw_only=True):
    """Others have called this worker's session dead. Whatever it held is void."""

    name: ClassVar[str] = "coord:session-lost"
    level: ClassVar[int] = logging.WARNING

    worker_id: str
    incarnation: str


class WorkerDied(Event, frozen=True, kw_only=True):
    """This worker has written down the death of another that did not beat."""

    name: ClassVar[str] = "coord:worker-died"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    incarnation: str


class MemberFailed(Event, frozen=True, kw_only=True):
    """The session has ended by an error of this library or of the set-up. Nothing is held."""

    name: ClassVar[str] = "coord:member-failed"
    level: ClassVar[int] = logging.ERROR

    worker_id: str
    error: str


class StoreSilent(Event, frozen=True, kw_only=True):
    """The store does not answer. Told once for each outage."""

    name: ClassVar[str] = "coord:store-silent"
    level: ClassVar[int] = logging.WARNING

    worker_id: str
    reason: str


class _AboutRole(Event, frozen=True, kw_only=True):
    role: str
    """Namespace and kind of work."""


class CoordinatorElected(_AboutRole, frozen=True, kw_only=True):
    """Another worker than before leads; told on every worker, once."""

    name: ClassVar[str] = "coord:coordinator-elected"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    epoch: int
    until: float
    """When its mandate ends, in Unix seconds by its own clock."""
    active_workers: tuple[str, ...]


class CoordinatorPromoted(_AboutRole, frozen=True, kw_only=True):
    """This worker leads from now on."""

    name: ClassVar[str] = "coord:coordinator-promoted"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    epoch: int
    until: float
    timestamp: float


class CoordinatorDemoted(_AboutRole, frozen=True, kw_only=True):
    """This worker leads no more."""

    name: ClassVar[str] = "coord:coordinator-demoted"
    level: ClassVar[int] = logging.INFO

    worker_id: str
    epoch: int
    until: float
    reason: str


class EpochRenewed(_AboutRole, frozen=True, kw_only=True):
    """This worker goes on leading for another mandate, in the same term."""

    name: ClassVar[str] = "coord:coordinator-epoch-renewed"

    worker_id: str
    epoch: int
    until: float
    new_epoch: float
    """The same as `until`."""


class ColdStartPhaseChanged(_AboutRole, frozen=True, kw_only=True):
    """An election is getting under way."""

    name: ClassVar[str] = "coord:cold-start-phase-changed"

    phase: Phase
    duration: float
    """Seconds since this worker began to stand."""


class ElectionHalted(_AboutRole, frozen=True, kw_only=True):
    """The role's record cannot be used. It is left alone, and this worker does not lead."""

    name: ClassVar[str] = "coord:election-halted"
    level: ClassVar[int] = logging.ERROR

    reason: str
