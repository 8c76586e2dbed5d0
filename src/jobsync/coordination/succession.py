"""Who leads next: when a holder hands over, and which candidate takes a free role first.

A holder has a mandate, which it renews when it is over unless another worker has asked for the
role. A free role is for the successor that the former holder has named, then for the oldest
candidate. Nobody waits for either longer than a heartbeat interval.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

from jobsync.coordination.observer import Candidates
from jobsync.coordination.role import Epoch, HeldTerm, Role, worker_of
from jobsync.coordination.session import Session
from jobsync.coordination.settings import ElectionSettings
from jobsync.core.clock import Clock, Mono
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, NewerFormat, OutcomeUnknown
from jobsync.stores.contract import Put, Record, Store, find_applied
from jobsync.stores.corruption_log import convert_record

__all__ = [
    "REQUESTS",
    "HandoverRequest",
    "HandoverRequester",
    "Mandate",
    "MandateDecision",
    "Precedence",
    "decide_mandate",
    "read_request",
    "request_handover",
]

REQUESTS = "request/"
"""Key prefix of requests to hand over."""


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
    request = convert_record(record, HandoverRequest)
    return request if request.epoch == epoch else None


async def request_handover(store: Store, role: str, request: HandoverRequest) -> bool:
    """Ask the holder of a role to hand over; return whether an equal request is stored.

    It is not if somebody else has asked meanwhile.

    Raises:
        OutcomeUnknown: it may or may not be stored.
    """
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
    return find_applied(outcome, key) is not None


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


class HandoverRequester:
    """Asks a younger holder, once a term, to hand over to this worker when its mandate ends.

    Args:
        store: where the requests are.
        role: the role's name.
        report: called with a request that cannot be decoded.
    """

    def __init__(self, store: Store, role: str, report: Callable[[Corrupt], object]) -> None:
        self._store = store
        self._role = role
        self._report = report
        self._requested_epoch = 0
        """The epoch whose holder was asked."""

    async def request(self, role: Role, session: Session) -> None:
        """Ask the holder of a role, unless it was asked in this term or is older.

        Raises:
            Unavailable: the store does not answer.
        """
        if role.owner is None or self._requested_epoch == role.epoch:
            return
        if not session.incarnation < role.owner:
            return
        request = HandoverRequest(epoch=role.epoch, by=session.worker)
        try:
            # What may not be stored is asked for again at the next step.
            with suppress(OutcomeUnknown):
                if await request_handover(self._store, self._role, request):
                    self._requested_epoch = role.epoch
        except Corrupt as corrupt:
            # Only a request: the mandate is renewed, and the next term may read it.
            self._report(corrupt)
            self._requested_epoch = role.epoch
        except NewerFormat:
            self._requested_epoch = role.epoch


class Precedence:
    """Which candidate takes a free role first, as one worker sees it.

    Args:
        clock: measures waits, and dates a release.
        timing: the session's.
    """

    def __init__(self, clock: Clock, timing: Timing) -> None:
        self._clock = clock
        self._timing = timing
        self._version: str | None = None
        self._epoch = 0
        self._defer_until: Mono | None = None
        self.first_seen: Mono | None = None
        """When the version of the role that was last read was first seen."""

    def update(self, version: str | None, epoch: int) -> None:
        """Note the version and the epoch of the role, which was just read."""
        if self.first_seen is None or version != self._version:
            self._version, self.first_seen = version, self._clock.mono()
        if epoch != self._epoch:
            self._epoch, self._defer_until = epoch, None

    def list_ends(self, role: Role | None) -> list[Mono]:
        """Return when the waits for other candidates are over."""
        ends = [] if self._defer_until is None else [self._defer_until]
        if role is not None and role.successor is not None and self.first_seen is not None:
            ends.append(self.first_seen + self._timing.heartbeat)
        return ends

    def is_reserved(self, role: Role | None, incarnation: str) -> bool:
        """Whether, for now, only another incarnation may take the role."""
        if role is None or role.owner is not None or self.first_seen is None:
            return False
        has_successor = role.successor not in {None, incarnation}
        return has_successor and self._clock.mono() - self.first_seen < self._timing.heartbeat

    def should_defer(self, role: Role | None, incarnation: str, eligible: Iterable[str]) -> bool:
        """Whether to wait, once and for a limited time, for an older candidate."""
        if self._defer_until is None:
            # The former holder is about to withdraw its candidacy.
            former = None if role is None else role.former
            is_first = all(each >= incarnation or each == former for each in eligible)
            wait = 0.0 if is_first else self._deference(role)
            self._defer_until = self._clock.mono() + wait
        return self._clock.mono() < self._defer_until

    def _deference(self, role: Role | None) -> float:
        beat = self._timing.heartbeat
        return beat if role is None else role.deference(self._clock.wall().seconds, beat)
