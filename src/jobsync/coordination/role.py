"""A role as it is stored, and its cold start.

Epochs of a role only grow, and each has one owner. A role is never taken from an owner that
lives: it must never have been taken, have been released, or its owner's death must be written.
"""

from typing import Annotated, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.events import ColdStartPhaseChanged, Phase
from jobsync.coordination.settings import ElectionSettings
from jobsync.core.clock import Mono
from jobsync.core.codec import MAX_INTEGER
from jobsync.core.keys import escape, is_segment
from jobsync.errors import Corrupt, NewerFormat
from jobsync.stores.contract import Record
from jobsync.stores.corruption_log import convert_record

__all__ = [
    "CHECK_FRACTION",
    "ROLES",
    "ColdStart",
    "Epoch",
    "HeldTerm",
    "PastTerm",
    "Role",
    "name_role",
    "read_role",
    "worker_of",
]


ROLES = "role/"
"""Key prefix of roles."""

CHECK_FRACTION = 0.85
"""Fraction of a heartbeat interval between checks, where no store notifies of a released role.

The rest of the interval is for reading and taking it.
"""


def name_role(namespace: str, work: str) -> str:
    """Return a role's name, as used in keys and in the sessions of its candidates."""
    return f"{escape(namespace, 'namespace')}/{escape(work, 'work')}"


def worker_of(incarnation: str) -> str:
    """Return the worker that an incarnation belongs to."""
    return incarnation.rpartition(".")[0]


Epoch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_INTEGER)]
"""The number of a term; there is always a next one."""


_MAX_PAST_TERMS = 8


class PastTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A term that is over, for people to read: who led, and why it ended."""

    epoch: int
    worker: str
    since: float
    ended: float
    """When its end was written, by the writer's wall clock."""
    why: str


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a role: who leads."""

    epoch: Epoch
    owner: str | None
    """The incarnation that holds it; None after a release."""
    since: float
    """When this was written, by the writer's wall clock. For people, and to shorten a wait."""
    until: float
    """When the mandate ends, by the same clock; for people."""
    timeout: Annotated[float, msgspec.Meta(gt=0)]
    """The owner's timeout in seconds: how long its record must be absent to count as dead."""
    successor: str | None = None
    """The incarnation that alone may take it for one heartbeat interval."""
    former: str | None = None
    """The incarnation that held it last; its session may still list it as a candidate."""
    active: tuple[str, ...] = ()
    """The workers that lived when it was taken."""
    past: tuple[PastTerm, ...] = ()
    """The latest terms that are over, in order."""

    def past_after(self, why: str, now: float) -> tuple[PastTerm, ...]:
        """Return the past terms once this one, if there is one, has ended."""
        if self.owner is None:
            return self.past
        term = PastTerm(
            epoch=self.epoch, worker=worker_of(self.owner), since=self.since, ended=now, why=why
        )
        return (*self.past, term)[-_MAX_PAST_TERMS:]

    def without_owner(self, why: str, now: float, successor: str | None = None) -> "Role":
        """Return the role as it is after its owner has left it."""
        return msgspec.structs.replace(
            self,
            owner=None,
            successor=successor,
            former=self.owner,
            since=now,
            past=self.past_after(why, now),
        )

    def why_free_to(self, incarnation: str) -> str:
        """Return why a role that names an owner may be taken by an incarnation."""
        if self.owner == incarnation:
            return "trust lapsed"
        is_same_worker = self.owner is not None and worker_of(self.owner) == worker_of(incarnation)
        return "session lost" if is_same_worker else "died"

    def was_released_lately(self, now: float, timeout: float) -> bool:
        """Whether its owner left it within a timeout, as far as two wall clocks can tell."""
        return self.former is not None and 0 <= now - self.since < timeout

    def deference(self, now: float, beat: float) -> float:
        """Return the seconds for which a candidate lets an older one go first.

        After a release: until one heartbeat interval has passed since, so that the older one has
        checked. That time is measured by two wall clocks, which may differ. So only a time that a
        check can have missed is trusted, and the older one keeps the time to take the role after
        a notification.

        After a death: only what checks leave of an interval. The rest may have passed between the
        last heartbeat and the first check that saw it, and a dead owner must be replaced one
        interval after its timeout. The older one may be late, or dead too.
        """
        if self.owner is not None:
            return (1 - CHECK_FRACTION) * beat
        elapsed = now - self.since
        return beat - (min(elapsed, CHECK_FRACTION * beat) if 0 < elapsed < beat else 0.0)


def read_role(record: Record | None) -> Role | None:
    """Return a role's record, decoded; None if there is no role.

    Raises:
        Corrupt: no version of this library wrote it.
        NewerFormat: a later version wrote it.
    """
    if record is None or record.deleted:
        return None
    if record.format > 1:
        raise NewerFormat(record.key, record.format, 1)
    role = convert_record(record, Role)
    if role.epoch < record.epoch:
        raise Corrupt(record.key, f"epoch {role.epoch} in a record of epoch {record.epoch}")
    for incarnation in (role.owner, role.successor, role.former):
        if incarnation is not None and not is_segment(incarnation):
            raise Corrupt(record.key, f"{incarnation!r} is not the name of a session")
    return role


class HeldTerm(msgspec.Struct, frozen=True, eq=False):
    """A term of this worker. `Election.held_term` returns it only while it lasts."""

    epoch: int
    incarnation: str
    lapses: int
    """The session's count when the term began: a term that lapsed never comes back."""
    since: Mono


class ColdStart:
    """The phases of an election where no worker leads yet, for one worker and one role.

    Workers that start together wait before they elect, so that they elect once, and the elected
    one prepares for a moment before it leads. This saves elections and guarantees nothing: the
    store decides. A worker that leads already, or has led until lately, ends it at once.

        observing ── window over, or leader seen ──▶ electing ── worker elected ──▶ preparing
                                   ready ◀── delay over, or another worker was elected ──┘

    Args:
        components: the clock, and events.
        settings: the durations of the phases.
        role: the role's name.
    """

    def __init__(self, components: Components, settings: ElectionSettings, role: str) -> None:
        self._clock = components.clock
        self._events = components.events
        self._role = role
        self._started = components.clock.mono()
        self._electing_from = self._started + settings.cold_start_observation_window
        self._delay = settings.cold_start_preparation_delay
        self._ready_from = self._started
        self.phase: Phase = "observing"
        self._enter("ready" if settings.skip_cold_start else "observing")

    @property
    def is_ready(self) -> bool:
        """Whether the elected worker may lead."""
        return self.phase == "ready"

    @property
    def next_change(self) -> Mono | None:
        """When the current phase ends by itself."""
        match self.phase:
            case "observing":
                return self._electing_from
            case "preparing":
                return self._ready_from
            case _:
                return None

    def may_elect(self) -> bool:
        """Enter the next phase if it is due, and return whether the role may be taken."""
        if self.phase == "observing" and self._clock.mono() >= self._electing_from:
            self._enter("electing")
        return self.phase != "observing"

    def on_leader_seen(self, *, must_prepare: bool = False) -> None:
        """Enter the phases that follow an election."""
        now = self._clock.mono()
        if self.phase == "observing":
            self._enter("electing")
        if self.phase == "electing":
            self._ready_from = now + (self._delay if must_prepare else 0.0)
            self._enter("preparing")
        if self.phase == "preparing" and now >= self._ready_from:
            self._enter("ready")

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        duration = self._clock.mono() - self._started
        self._events.emit(ColdStartPhaseChanged(role=self._role, phase=phase, duration=duration))
