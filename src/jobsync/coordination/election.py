"""One coordinator for each kind of work in a namespace.

Promises: epochs of a role only grow, and each has one owner. While sessions keep their
promise, at most one worker at a time holds the role. A holder that cannot renew its
session stops before anybody may take its place; what it writes late is refused by the
epoch that its successor has written.

A role costs nothing to hold beyond the session. It is taken only from an owner whose death
is written, or that has released it; nobody takes a live role.

    free ── take: epoch + 1 ──▶ held ── release sent, trust lapsed, or session lost ──▶ over
      ▲                                                                                  │
      └──────────── the owner is dead, or empty: whoever is eligible takes it ◀──────────┘

A follower reads one record a beat: the session of the worker that leads, which tells which
roles it holds. Only when that says something else is the role itself read.
"""

from collections.abc import Iterable, Mapping

import msgspec

from jobsync.components import Components
from jobsync.coordination.cold_start import ColdStart
from jobsync.coordination.events import CoordinatorElected, EpochRenewed
from jobsync.coordination.observer import Candidates, Observer
from jobsync.coordination.role import (
    REQUESTS,
    ROLES,
    Request,
    Role,
    judge_mandate,
    read_request,
    read_role,
    worker_of,
)
from jobsync.coordination.session import Session, SessionRecord
from jobsync.coordination.settings import WorkSettings
from jobsync.core.clock import Mono
from jobsync.core.codec import MAX_INTEGER
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, NewerFormat
from jobsync.stores.contract import Applied, Put, Record, Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["CHECK_FRACTION", "Election", "HeldTerm", "ask"]

CHECK_FRACTION = 0.85
"""Of a beat, between looks where nobody tells of a role that was given up.

The rest of the beat is for finding and taking it.
"""


async def ask(store: Store, role: str, request: Request) -> bool:
    """Ask the holder of a role to hand over; say whether a request like this one stands."""
    key = f"{REQUESTS}{role}"
    base = await store.get(key, tombstones=True)
    try:
        there = read_request(base, request.epoch)
    except Corrupt:
        # A wish that nobody understands must not stand in the way of one that can be met.
        there = None
    if there is not None and (not request.forced or _is_same_wish(there, request)):
        return True
    (outcome,) = await store.write([Put(key, msgspec.to_builtins(request), base)])
    return isinstance(outcome, Applied)


def _is_same_wish(one: Request, other: Request) -> bool:
    return (one.forced, one.desired) == (other.forced, other.desired)


class HeldTerm(msgspec.Struct, frozen=True, eq=False):
    """A time in office. Whether it still lasts is asked of the election."""

    epoch: int
    incarnation: str
    lapses: int
    """Of the session, when it began: a term that lapsed never comes back."""
    since: Mono


class Election:
    """One worker's part in the election for one role. The owner calls `step` once a beat.

    Args:
        store: where roles and sessions are; its writes are settled.
        components: the clock that counts terms, and a place to tell facts.
        timing: the session's.
        observer: what is known of the others' sessions.
        session: what holds the role; see `join`.
        name: the role's.
        settings: how long mandates last, and how the election begins.
        governs: singletons that only the holder writes; their epochs count too.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        timing: Timing,
        observer: Observer,
        session: Session,
        name: str,
        settings: WorkSettings,
        governs: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.is_open = True
        """Whether this worker stands; one that does not stand takes no role."""
        self.session = session
        self.why_over = (0, "")
        """The epoch of the latest term that did not end by silence, and what ended it."""
        self.halted_by = ""
        """Why the role cannot be used, where that was told."""
        self.cold_start = ColdStart(components, settings, name)
        self._store = store
        self._clock = components.clock
        self._events = components.events
        self._witness = CorruptionLog(store.name, components.events)
        self._timing = timing
        self._observer = observer
        self._settings = settings
        self._governs = tuple(governs)
        self._held: HeldTerm | None = None
        self._record: Record | None = None
        self._role: Role | None = None
        self._first_seen: Mono | None = None
        self._is_sure = False
        self._is_doubted = False
        """Whether the role may have changed after the latest read of it was sent."""
        self._next_check = components.clock.mono()
        self._gives_way_until: Mono | None = None
        self._renewed = components.clock.mono()
        self._highest = 0
        self._floor = 0
        self._announced: str | None = None
        self._asked = 0
        self._former: set[str] = set()
        self._is_closed = False
        self._wish: Record | None = None
        self._weighed: tuple[str | None, Mono] | None = None
        """Which request was weighed last, and when."""
        self._doubtful: tuple[str | None] | None = None
        """On which version of the role a write of ours rests that may yet land, or whose place
        something was put that we have not seen."""

    @property
    def held(self) -> HeldTerm | None:
        """The term that lasts now. Asks the session, and so the clock, each time."""
        held, session = self._held, self.session
        if held is None:
            return None
        is_same = session.incarnation == held.incarnation and session.lapses == held.lapses
        return held if is_same and session.trusted else None

    @property
    def role(self) -> Role | None:
        """The role as it was last seen."""
        return self._role

    @property
    def owner(self) -> str | None:
        """The incarnation whose session tells whether the role is still held."""
        role = self._role
        return None if role is None or self.held is not None else role.owner

    @property
    def leading(self) -> HeldTerm | None:
        """The term that lasts now, once the cold start is over."""
        return self.held if self.cold_start.is_ready else None

    def next_change(self, since: Mono) -> Mono | None:
        """Give the first moment, after some time, when we may go on by ourselves.

        That is when waiting for others, or a phase of the cold start, is over.
        """
        role, seen = self._role, self._first_seen
        moments = [self.cold_start.next_change, self._gives_way_until]
        if role is not None and role.successor is not None and seen is not None:
            moments.append(seen + self._timing.beat)
        known = (each for each in moments if each is not None)
        return min((each for each in known if each > since), default=None)

    def join(self, session: Session) -> None:
        """Stand with another session; what the earlier one held is void."""
        self._former.add(self.session.incarnation)
        self.session = session

    def close(self) -> None:
        """Stand no longer, for good. Step on until `is_clear`."""
        self._is_closed = True

    @property
    def is_clear(self) -> bool:
        """Whether nothing in the store, or on its way there, gives our session the role."""
        owner = None if self._role is None else self._role.owner
        return self._doubtful is None and owner != self.session.incarnation

    def wanted(self) -> list[str]:
        """Give the keys that the next step has to know."""
        self._is_sure = self._is_sure and not self._is_doubted
        self._is_doubted = False
        if self._held is None:
            return [] if self._is_sure else [f"{ROLES}{self.name}"]
        # Nobody takes what is held; only requests, and mishaps, are to be found there.
        if self._is_sure and self._clock.mono() < self._next_check:
            return []
        return [f"{ROLES}{self.name}", f"{REQUESTS}{self.name}"]

    def wanted_without(self, living: Mapping[str, SessionRecord]) -> list[str]:
        """Give the key that the next step has to know too, if none of those who live leads."""
        is_known = not self._is_sure or self.held is not None or self._is_led(living)
        return [] if is_known else [f"{ROLES}{self.name}"]

    def doubt(self) -> None:
        """Read the role itself at the next step: something has changed there."""
        # Not what a step that is under way has read already: that may be older.
        self._is_doubted = True

    async def step(
        self,
        found: Mapping[str, Record | None],
        living: Mapping[str, SessionRecord],
        roll: Candidates,
    ) -> None:
        """Go on from what was read: the wanted keys, and the sessions that live.

        Who else stands is asked of the roll where that matters.

        Raises:
            Unavailable: the store does not answer; a term lasts as long as trust does.
            Corrupt: the role cannot be understood, or went back in time.
        """
        self._held = self.held
        key = f"{ROLES}{self.name}"
        self._wish = found.get(f"{REQUESTS}{self.name}", self._wish)
        if key in found:
            self._see(found[key])
            self._is_sure = self._held is not None
            self._next_check = self._clock.mono() + 2 * self._timing.timeout
        elif not self._is_sure:
            # It cannot be read, so nothing is known of it.
            return
        if self._held is not None:
            await self._serve(self._held, roll)
        elif not self._is_led(living) and key in found:
            await self._stand(roll)
        await self._advise_holder()

    async def release(self, why: str, successor: str | None = None) -> None:
        """Give the role up, keeping its epoch. From the moment this is called the term is over."""
        held, self._held = self._held, None
        record, role = self._record, self._role
        if held is None or record is None or role is None or role.epoch != held.epoch:
            return
        self.why_over = (held.epoch, why)
        self._is_sure = False
        await self._write(record, role.vacated(why, self._clock.wall().seconds, successor))

    async def step_down(self, epoch: int, current: int) -> None:
        """Give up a term whose writes are refused: a record was sealed by another epoch.

        That happens where the role's record was lost, and with it the epoch that it had.
        """
        self._floor = max(self._floor, current)
        if self._held is not None and self._held.epoch == epoch:
            await self.release("fenced")

    def _see(self, record: Record | None) -> None:
        """Take in the role as it was just read."""
        role = read_role(record)
        if role is not None and role.epoch < self._highest:
            self._held = None
            raise Corrupt(
                f"{ROLES}{self.name}",
                f"epoch {role.epoch} stands where {self._highest} was seen: "
                "the store was restored from an older copy",
            )
        is_news = self._first_seen is not None and _epoch(role) > _epoch(self._role)
        if role is not None and is_news and self._is_anothers(role):
            # Be that term over again or not: this is no cold start any more.
            self.cold_start.see_leader()
        if self._first_seen is None or _version(record) != _version(self._record):
            self._first_seen = self._clock.mono()
        if _epoch(role) != _epoch(self._role):
            self._gives_way_until = None
        if self._doubtful != (_version(record),):
            self._doubtful = None
        self._record, self._role = record, role
        self._is_sure = False
        if role is not None:
            self._highest = role.epoch
            if role.owner is not None:
                self._observer.expect(role.owner, role.timeout)
        self._announce(role)
        if self._held is not None and (
            role is None or (role.epoch, role.owner) != (self._held.epoch, self._held.incarnation)
        ):
            self.why_over = (self._held.epoch, "replaced")
            self._held = None

    def _announce(self, role: Role | None) -> None:
        """Tell of another worker that leads, once."""
        if role is None or role.owner is None or worker_of(role.owner) == self._announced:
            return
        self._announced = worker_of(role.owner)
        self._events.emit(
            CoordinatorElected(
                role=self.name,
                worker_id=self._announced,
                epoch=role.epoch,
                until=role.until,
                active_workers=role.active,
            )
        )

    def _is_anothers(self, role: Role) -> bool:
        """Say whether the latest term of a role is, or was, somebody else's."""
        return (role.owner or role.former) not in {None, self.session.incarnation}

    def _is_led(self, living: Mapping[str, SessionRecord]) -> bool:
        """Say whether somebody else's session tells that it holds the role, as we know it."""
        role = self._role
        if role is None or role.owner is None:
            return False
        life = living.get(role.owner)
        self._is_sure = life is not None and life.holds.get(self.name) == role.epoch
        if self._is_sure:
            self.cold_start.see_leader()
        return self._is_sure

    async def _stand(self, roll: Candidates) -> None:
        """Take the role, if it is to be had and nobody better is there to have it."""
        session, role = self.session, self._role
        if not session.trusted:
            return
        if self._is_closed or not self.is_open:
            await self._disown(session)
            return
        if not self._is_free(role, session):
            self.cold_start.see_leader()
            return
        if not self.cold_start.may_elect() or self._must_wait(role, session):
            return
        eligible = await roll.standing_for(self.name)
        if not self._is_meant_for(role, session) and self._gives_way(role, eligible):
            await self._vacate(role)
            return
        await self._take(session, [worker_of(each) for each in (*eligible, session.incarnation)])

    async def _disown(self, session: Session) -> None:
        """Give up what names us, or may yet come to, while we do not stand.

        Otherwise nobody could have it: we live, so it is not taken from us.
        """
        role, base = self._role, self._record
        if self.is_clear:
            return
        if role is None:
            now = self._clock.wall().seconds
            epoch, timeout = await self._next_epoch(base), self._timing.timeout
            role = Role(epoch=epoch, owner=None, since=now, until=now, timeout=timeout)
        elif role.owner == session.incarnation:
            role = role.vacated("stopped", self._clock.wall().seconds)
        # Even the same again: whatever rests on what is there now then comes too late.
        await self._amend(role)

    @staticmethod
    def _is_meant_for(role: Role | None, session: Session) -> bool:
        return role is not None and session.incarnation in {role.owner, role.successor}

    def _is_free(self, role: Role | None, session: Session) -> bool:
        if role is None or role.owner is None:
            return True
        # One's own: a take whose reply was lost, or a term that lapsed. Both are taken anew.
        return role.owner in {session.incarnation, *self._former} or self._observer.is_dead(
            role.owner
        )

    @staticmethod
    def _why_free(role: Role, session: Session) -> str:
        """Say why a role that names an owner may be taken."""
        if role.owner == session.incarnation:
            return "trust lapsed"
        is_ours = role.owner is not None and worker_of(role.owner) == worker_of(session.incarnation)
        return "session lost" if is_ours else "died"

    def _must_wait(self, role: Role | None, session: Session) -> bool:
        """Say whether the role is another's alone to take, for now."""
        if role is None or role.owner is not None or self._first_seen is None:
            return False
        named = role.successor not in {None, session.incarnation}
        return named and self._clock.mono() - self._first_seen < self._timing.beat

    def _gives_way(self, role: Role | None, eligible: Iterable[str]) -> bool:
        """Wait once, until a beat after the release, if somebody who sorts before us is there."""
        if self._gives_way_until is None:
            # Whoever has just given it up is about to say that it stands no longer.
            former = None if role is None else role.former
            better = any(each < self.session.incarnation and each != former for each in eligible)
            wait = self._timing.beat - self._free_for(role) if better else 0.0
            self._gives_way_until = self._clock.mono() + wait
        return self._clock.mono() < self._gives_way_until

    def _free_for(self, role: Role | None) -> float:
        """Give the seconds since a role was given up, if that is to be believed; else none."""
        if role is None or role.owner is not None:
            return 0.0
        # By two wall clocks, which may differ: only what a look can have missed is believed, and
        # whoever comes before us is left time to take what it was told of.
        ago, beat = self._clock.wall().seconds - role.since, self._timing.beat
        return min(ago, CHECK_FRACTION * beat) if 0 < ago < beat else 0.0

    async def _vacate(self, role: Role | None) -> None:
        """Take a dead owner's name off the role, so that those to whom we give way look now."""
        if role is not None and role.owner is not None:
            await self._amend(role.vacated("died", self._clock.wall().seconds))

    async def _amend(self, role: Role) -> None:
        """Put a role that nobody holds in place of the one that was read."""
        written = await self._write(self._record, role)
        if written is not None:
            self._see(written)

    async def _take(self, session: Session, active: Iterable[str]) -> None:
        """Replace the role that was read by a term of our own, of an epoch never used."""
        base, now = self._record, self._clock.wall().seconds
        incarnation, lapses = session.incarnation, session.lapses
        before = self._role
        role = Role(
            epoch=await self._next_epoch(base),
            owner=incarnation,
            since=now,
            until=now + self._settings.max_epoch_duration,
            timeout=self._timing.timeout,
            active=tuple(sorted(set(active))),
            past=() if before is None else before.ended(self._why_free(before, session), now),
        )
        record = await self._write(base, role)
        # Whether it lasts is asked of the clock: the write may have taken longer than trust.
        if record is not None:
            self._held = HeldTerm(role.epoch, incarnation, lapses, self._clock.mono())
            self._renewed = self._held.since
            self._see(record)
            self.cold_start.see_leader(is_self=True)
            if self._is_closed:
                await self.release("stopped")

    async def _next_epoch(self, base: Record | None) -> int:
        """Give a number above every one that this role ever had, as far as anybody can know."""
        # Even a tombstone keeps its epoch; singletons remember what a removed role forgot.
        governed = await self._store.get_many(self._governs, tombstones=True)
        known = [record.epoch for record in (base, *governed) if record is not None]
        epoch = max(self._highest, self._floor, *known, 0) + 1
        if epoch >= MAX_INTEGER:
            raise Corrupt(f"{ROLES}{self.name}", f"no epoch is left above {epoch - 1}")
        return epoch

    async def _serve(self, held: HeldTerm, roll: Candidates) -> None:
        """Look after the mandate: renew it, or hand over when that was asked for."""
        self.cold_start.see_leader(is_self=True)
        now = self._clock.mono()
        request = self._read_wish(held)
        is_over = now - self._renewed >= self._settings.max_epoch_duration
        may_end = now - held.since >= self._settings.min_epoch_duration
        is_forced = request is not None and request.forced and may_end and self._may_weigh(now)
        if not is_over and not is_forced:
            return
        self._weighed = (_version(self._wish), now)
        eligible: list[str] = []
        if request is not None and may_end:
            eligible = await roll.standing_for(self.name)
        verdict = judge_mandate(
            request, holder=held.incarnation, eligible=eligible, may_end=may_end, is_over=is_over
        )
        match verdict:
            case "keep":
                return
            case "renew":
                await self._renew(held)
            case (_, successor):
                await self.release("handed over", successor)

    def _may_weigh(self, now: Mono) -> bool:
        """Say whether to look who could follow, which costs a listing, for a request."""
        # One that could not be met may be met later; but not every beat is spent on it.
        weighed, when = self._weighed or (None, now)
        return weighed != _version(self._wish) or now - when >= self._timing.timeout

    def _read_wish(self, held: HeldTerm) -> Request | None:
        try:
            return read_request(self._wish, held.epoch)
        except Corrupt as corrupt:
            self._witness.report(corrupt)
            return None

    async def _renew(self, held: HeldTerm) -> None:
        record, role = self._record, self._role
        if role is None:
            return
        until = self._clock.wall().seconds + self._settings.max_epoch_duration
        renewed = await self._write(record, msgspec.structs.replace(role, until=until))
        if renewed is not None:
            self._renewed = self._clock.mono()
            self._see(renewed)
            self._events.emit(
                EpochRenewed(
                    role=self.name,
                    worker_id=worker_of(held.incarnation),
                    epoch=held.epoch,
                    until=until,
                    new_epoch=until,
                )
            )

    async def _advise_holder(self) -> None:
        """Ask once, if we sort before the worker that leads; it decides at its mandate's end."""
        session, role = self.session, self._role
        if not self._is_sure or self._is_closed or role is None or role.owner is None:
            return
        if self._asked == role.epoch or not session.incarnation < role.owner:
            return
        request = Request(epoch=role.epoch, by=session.worker)
        try:
            if await ask(self._store, self.name, request):
                self._asked = role.epoch
        except Corrupt as corrupt:
            # It was only a wish: the mandate is renewed, and the next term may hear it.
            self._witness.report(corrupt)
            self._asked = role.epoch
        except NewerFormat:
            self._asked = role.epoch

    async def _write(self, base: Record | None, role: Role) -> Record | None:
        """Put a role in place of the one that was read; None unless that surely happened."""
        # Facts of newer code in the record survive.
        known = base.value if base is not None and not base.deleted else {}
        value = {**known, **msgspec.json.decode(msgspec.json.encode(role))}
        change = Put(f"{ROLES}{self.name}", value, base, epoch=role.epoch)
        self._doubtful = (_version(base),)
        (outcome,) = await self._store.write([change])
        if not isinstance(outcome, Applied):
            return None
        self._doubtful = None
        return outcome.record


def _epoch(role: Role | None) -> int:
    return 0 if role is None else role.epoch


def _version(record: Record | None) -> str | None:
    return None if record is None else record.version
