"""A role as it is stored, its mandate and requests to hand over, and its cold start.

Epochs of a role only grow, and each has one owner. A role is never taken from an owner that
lives: it must never have been taken, have been released, or its owner's death must be written.
"""

from collections.abc import Callable, Collection
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.coordination.events import ColdStartPhaseChanged, Phase
from jobsync.coordination.observer import Candidates
from jobsync.coordination.settings import ElectionSettings
from jobsync.core.clock import Clock, Mono
from jobsync.core.codec import MAX_INTEGER
from jobsync.core.keys import check_key, escape
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, Invalid, NewerFormat
from jobsync.stores.contract import Applied, Put, Record, Store

__all__ = [
    "CHECK_FRACTION",
    "REQUESTS",
    "ROLES",
    "ColdStart",
    "HandoverRequest",
    "HeldTerm",
    "Mandate",
    "MandateDecision",
    "PastTerm",
    "Role",
    "decide_mandate",
    "name_role",
    "read_request",
    "read_role",
    "request_handover",
    "worker_of",
]

T = TypeVar("T")

ROLES = "role/"
"""Key prefix of roles."""

REQUESTS = "request/"
"""Key prefix of requests to hand over."""

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
    role = _convert(record, Role)
    if role.epoch < record.epoch:
        raise Corrupt(record.key, f"epoch {role.epoch} in a record of epoch {record.epoch}")
    for incarnation in (role.owner, role.successor, role.former):
        _check_incarnation(record, incarnation)
    return role


def _check_incarnation(record: Record, incarnation: str | None) -> None:
    if incarnation is None:
        return
    try:
        check_key(f"session/{incarnation}")
    except Invalid as error:
        raise Corrupt(record.key, f"{incarnation!r} is not the name of a session") from error


def _convert(record: Record, kind: type[T]) -> T:
    try:
        return msgspec.convert(record.value, kind)
    except msgspec.ValidationError as error:
        raise Corrupt(record.key, str(error)) from error


class HandoverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's request that the holder of an epoch hand over."""

    epoch: Epoch
    """The term that it is about; void once that is over."""
    by: str
    """The worker that asks."""
    desired: str | None = None
    """The worker that should lead next; None for anyone but the holder."""
    forced: bool = False
    """Whether to hand over before the mandate ends."""


def read_request(record: Record | None, epoch: int) -> HandoverRequest | None:
    """Return a request, decoded; None if there is none about this epoch.

    Raises:
        Corrupt: no version of this library wrote it.
    """
    if record is None or record.deleted:
        return None
    if record.format > 1:
        raise Corrupt(record.key, f"its format {record.format} is newer than this library")
    request = _convert(record, HandoverRequest)
    return request if request.epoch == epoch else None


async def request_handover(store: Store, role: str, request: HandoverRequest) -> bool:
    """Ask the holder of a role to hand over; return whether an equal request is stored."""
    key = f"{REQUESTS}{role}"
    base = await store.get(key, tombstones=True)
    try:
        stored = read_request(base, request.epoch)
    except Corrupt:
        # An unreadable request must not block a valid one.
        stored = None
    if stored is not None and (
        not request.forced or (stored.forced, stored.desired) == (request.forced, request.desired)
    ):
        return True
    (outcome,) = await store.write([Put(key, msgspec.to_builtins(request), base)])
    return isinstance(outcome, Applied)


MandateDecision: TypeAlias = Literal["keep", "renew"] | tuple[Literal["hand over to"], str]
"""What the holder does now; a handover names the next incarnation."""


def decide_mandate(
    request: HandoverRequest | None,
    *,
    holder: str,
    eligible: Collection[str],
    may_end: bool,
    is_over: bool,
) -> MandateDecision:
    """Return what a holder does about its mandate.

    Args:
        request: the request that it has received.
        holder: its incarnation.
        eligible: the live incarnations that are candidates for the role.
        may_end: whether it has lasted for the minimum duration.
        is_over: whether it has lasted for the maximum duration.
    """
    others = sorted(incarnation for incarnation in eligible if incarnation != holder)
    if request is not None and may_end:
        successor = _choose_successor(request, holder, others, is_over=is_over)
        if successor is not None:
            return ("hand over to", successor)
    return "renew" if is_over else "keep"


def _choose_successor(
    request: HandoverRequest, holder: str, others: list[str], *, is_over: bool
) -> str | None:
    if request.forced:
        desired = (other for other in others if request.desired in {None, worker_of(other)})
        return next(desired, None)
    # Once the mandate is over, the first that sorts before the holder leads next.
    return next((other for other in others if other < holder), None) if is_over else None


class HeldTerm(msgspec.Struct, frozen=True, eq=False):
    """A term of this worker. `Election.held_term` returns it only while it lasts."""

    epoch: int
    incarnation: str
    lapses: int
    """The session's count when the term began: a term that lapsed never comes back."""
    since: Mono


class Mandate:
    """A holder's mandate, and the request to hand over that it has read.

    Args:
        clock: the clock that measures it.
        timing: the session's.
        settings: the minimum and maximum duration.
        report: called with a request that cannot be decoded.
    """

    def __init__(
        self,
        clock: Clock,
        timing: Timing,
        settings: ElectionSettings,
        report: Callable[[Corrupt], object],
    ) -> None:
        self.request: Record | None = None
        self.renewed_at = clock.mono()
        self._clock = clock
        self._timing = timing
        self._settings = settings
        self._report = report
        self._considered: tuple[str | None, Mono] | None = None
        """The version of the request that was considered last, and when."""

    async def decide(self, role: str, term: HeldTerm, candidates: Candidates) -> MandateDecision:
        """Return what the holder does now: keep the mandate, renew it, or hand over."""
        now = self._clock.mono()
        request = self._read_request(term.epoch)
        is_over = now - self.renewed_at >= self._settings.max_epoch_duration
        may_end = now - term.since >= self._settings.min_epoch_duration
        is_forced = request is not None and request.forced and may_end
        if not is_over and not (is_forced and self._should_consider(now)):
            return "keep"
        self._considered = (self._version, now)
        eligible: list[str] = []
        if request is not None and may_end:
            eligible = await candidates.list_for(role)
        return decide_mandate(
            request, holder=term.incarnation, eligible=eligible, may_end=may_end, is_over=is_over
        )

    @property
    def _version(self) -> str | None:
        return None if self.request is None else self.request.version

    def _should_consider(self, now: Mono) -> bool:
        """Whether to list the candidates for a request, which costs a request to the store."""
        # One without a candidate may find one later, but is not considered at every heartbeat.
        considered, when = self._considered or (None, now)
        return considered != self._version or now - when >= self._timing.timeout

    def _read_request(self, epoch: int) -> HandoverRequest | None:
        try:
            return read_request(self.request, epoch)
        except Corrupt as corrupt:
            self._report(corrupt)
            return None


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
