"""One worker's part in the election for one role. A namespace has one coordinator per role.

Guarantees: epochs of a role only grow, and each has one owner. While sessions keep their
guarantee, at most one worker at a time holds the role. A holder that cannot renew its session
stops before anyone may take its place, and the epoch that its successor has written refuses its
late writes.

A role costs nothing to hold beyond the session. It is taken only from an owner whose death is
written, or that has released it; never from one that lives.

    free ── take: epoch + 1 ──▶ held ── release sent, trust lapsed, or session lost ──▶ over
      ▲                                                                                  │
      └───────────── owner dead, or released: any eligible worker takes it ◀─────────────┘

A follower reads one record per heartbeat: the session of the worker that leads, which lists the
roles that it holds. It reads the role itself only when that session no longer lists it.
"""

from collections.abc import Iterable, Mapping

import msgspec

from jobsync.components import Components
from jobsync.coordination.events import CoordinatorElected, EpochRenewed, OwnElection
from jobsync.coordination.observer import Candidates, Observer
from jobsync.coordination.role import ROLES, ColdStart, HeldTerm, Role, read_role, worker_of
from jobsync.coordination.session import Session, SessionRecord
from jobsync.coordination.settings import ElectionSettings
from jobsync.coordination.succession import REQUESTS, HandoverRequester, Mandate, Precedence
from jobsync.core.clock import Mono
from jobsync.core.codec import MAX_INTEGER
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, NewerFormat
from jobsync.stores.contract import Applied, Put, Record, Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["Election"]


class Election:
    """One worker's part in the election for one role. The owner calls `step` once a heartbeat.

    Args:
        store: where roles and sessions are; its writes are settled.
        components: the clock, and events.
        timing: the session's.
        observer: what is known of the other sessions.
        session: the session that holds the role; see `replace_session`.
        name: the role's.
        settings: the durations of mandates and of the cold start.
        governs: keys of the singletons that only the holder writes; their epochs count too.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        timing: Timing,
        observer: Observer,
        session: Session,
        name: str,
        settings: ElectionSettings,
        governs: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.can_take = True
        """Whether this worker may take the role; false while its last term is being wound up."""
        self.withheld = ""
        """Why this worker stands back for now: it releases the role and does not take it."""
        self.session = session
        self.end_reason = (0, "")
        """The epoch of the latest term that was ended explicitly, and the reason."""
        self.halt_reason = ""
        """The reported reason why the role cannot be used."""
        self.cold_start = ColdStart(components, settings, name)
        self._store = store
        self._clock = components.clock
        self._events = components.events
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._timing = timing
        self._observer = observer
        self._settings = settings
        self._governs = tuple(governs)
        self._held_term: HeldTerm | None = None
        self._record: Record | None = None
        self._role: Role | None = None
        self._is_confirmed = False
        """Whether the role is known to be as last read, without reading it again."""
        self._is_stale = False
        """Whether the role may have changed after the latest read of it was sent."""
        self._next_read = components.clock.mono()
        self._mandate = Mandate(components.clock, timing, settings, self._corruption_log.report)
        self._precedence = Precedence(components.clock, timing)
        self._requester = HandoverRequester(store, name, self._corruption_log.report)
        self._highest_epoch = 0
        self._epoch_floor = 0
        self._announced_leader: str | None = None
        self._former_incarnations: set[str] = set()
        self._is_closed = False
        self._unresolved: tuple[str | None] | None = None
        """The base version of a write of ours that may still land, or was replaced unseen."""

    @property
    def held_term(self) -> HeldTerm | None:
        """The term that lasts now. Checks the session, and so the clock, each time."""
        term, session = self._held_term, self.session
        if term is None:
            return None
        is_same = session.incarnation == term.incarnation and session.lapses == term.lapses
        return term if is_same and session.trusted else None

    @property
    def role(self) -> Role | None:
        """The role as it was last seen."""
        return self._role

    @property
    def owner(self) -> str | None:
        """The other incarnation whose session shows whether the role is still held."""
        role = self._role
        return None if role is None or self.held_term is not None else role.owner

    @property
    def leading_term(self) -> HeldTerm | None:
        """The term that lasts now, once the cold start is over."""
        return self.held_term if self.cold_start.is_ready else None

    def next_change(self, since: Mono) -> Mono | None:
        """Return the first moment after `since` when a wait, or a cold-start phase, is over."""
        moments = self._precedence.list_ends(self._role)
        if self.cold_start.next_change is not None:
            moments.append(self.cold_start.next_change)
        return min((moment for moment in moments if moment > since), default=None)

    def replace_session(self, session: Session) -> None:
        """Go on with another session; what the earlier one held is void."""
        self._former_incarnations.add(self.session.incarnation)
        self.session = session

    def close(self) -> None:
        """Stop being a candidate for good. Call `step` until `is_clear`."""
        self._is_closed = True

    @property
    def is_clear(self) -> bool:
        """Whether nothing stored, and no write under way, gives our session the role."""
        owner = None if self._role is None else self._role.owner
        return self._unresolved is None and owner != self.session.incarnation

    @property
    def _release_reason(self) -> str:
        """Why the role must not be held now; empty if it may."""
        return "stopped" if self._is_closed else self.withheld

    def keys_to_read(self) -> list[str]:
        """Return the keys that the next step needs."""
        self._is_confirmed = self._is_confirmed and not self._is_stale
        self._is_stale = False
        if self._held_term is None:
            return [] if self._is_confirmed else [f"{ROLES}{self.name}"]
        # Nobody takes a held role, so only requests, and damage, can be found there.
        if self._is_confirmed and self._clock.mono() < self._next_read:
            return []
        return [f"{ROLES}{self.name}", f"{REQUESTS}{self.name}"]

    def keys_to_read_unless_led(self, living: Mapping[str, SessionRecord]) -> list[str]:
        """Return the key that the next step also needs if no live session leads."""
        is_known = not self._is_confirmed or self.held_term is not None or self._is_led(living)
        return [] if is_known else [f"{ROLES}{self.name}"]

    def owner_in(self, found: Mapping[str, Record | None]) -> str | None:
        """Return the owner that the role has by what was just read, if it was read."""
        try:
            role = read_role(found.get(f"{ROLES}{self.name}"))
        except (Corrupt, NewerFormat):
            # The next step reports it.
            return None
        return None if role is None else role.owner

    def mark_stale(self) -> None:
        """Read the role again at the next step: it may have changed."""
        # Not at the current step: what that has read may be older than the change.
        self._is_stale = True

    async def step(
        self,
        found: Mapping[str, Record | None],
        living: Mapping[str, SessionRecord],
        candidates: Candidates,
    ) -> None:
        """Act on what was read: the keys to read, and the sessions that live.

        Raises:
            Unavailable: the store does not answer; a term lasts as long as trust does.
            Corrupt: the role cannot be decoded, or its epoch is lower than before.
        """
        self._held_term = self.held_term
        key = f"{ROLES}{self.name}"
        self._mandate.request = found.get(f"{REQUESTS}{self.name}", self._mandate.request)
        if key in found:
            self._update(found[key])
            self._is_confirmed = self._held_term is not None
            self._next_read = self._clock.mono() + 2 * self._timing.timeout
        elif not self._is_confirmed:
            # It cannot be read, so nothing is known of it.
            return
        reason = self._release_reason
        if self._held_term is not None and reason:
            await self.release(reason)
        elif self._held_term is not None:
            await self._check_mandate(self._held_term, candidates)
        elif not self._is_led(living) and key in found:
            await self._try_to_take(candidates)
        is_candidate = not (self._is_closed or self.withheld)
        if self._is_confirmed and is_candidate and self._role is not None:
            await self._requester.request(self._role, self.session)

    async def release(self, why: str, successor: str | None = None) -> None:
        """Release the role and keep its epoch. The term is over as soon as this is called."""
        term, self._held_term = self._held_term, None
        record, role = self._record, self._role
        if term is None or record is None or role is None or role.epoch != term.epoch:
            return
        self.end_reason = (term.epoch, why)
        self._is_confirmed = False
        await self._write(record, role.without_owner(why, self._clock.wall().seconds, successor))

    async def step_down(self, epoch: int, current: int) -> None:
        """Release a term whose writes are refused, because another epoch has sealed a record.

        That happens if the role's record was lost, and its epoch with it.
        """
        self._epoch_floor = max(self._epoch_floor, current)
        if self._held_term is not None and self._held_term.epoch == epoch:
            await self.release("fenced")

    def _update(self, record: Record | None) -> None:
        """Update our state from the role as it was just read."""
        role = read_role(record)
        if role is not None and role.epoch < self._highest_epoch:
            self._held_term = None
            raise Corrupt(
                f"{ROLES}{self.name}",
                f"its epoch {role.epoch} is lower than {self._highest_epoch}, seen before: "
                "the store was restored from an older copy",
            )
        is_new_term = self._precedence.first_seen is not None and _epoch(role) > _epoch(self._role)
        if role is not None and is_new_term and self._is_foreign(role):
            # Even if that term is over again, the cold start has ended.
            self.cold_start.on_leader_seen()
        self._precedence.update(_version(record), _epoch(role))
        if self._unresolved != (_version(record),):
            self._unresolved = None
        self._record, self._role = record, role
        self._is_confirmed = False
        if role is not None:
            self._highest_epoch = role.epoch
            if role.owner is not None:
                self._observer.expect(role.owner, role.timeout)
        self._announce_leader(role)
        term = self._held_term
        if term is not None and (
            role is None or (role.epoch, role.owner) != (term.epoch, term.incarnation)
        ):
            self.end_reason = (term.epoch, "replaced")
            self._held_term = None

    def _announce_leader(self, role: Role | None) -> None:
        """Emit an event when another worker than before leads."""
        if role is None or role.owner is None or worker_of(role.owner) == self._announced_leader:
            return
        self._announced_leader = worker_of(role.owner)
        is_own = role.owner == self.session.incarnation
        kind = OwnElection if is_own else CoordinatorElected
        self._events.emit(
            kind(
                role=self.name,
                worker_id=self._announced_leader,
                epoch=role.epoch,
                until=role.until,
                active_workers=role.active,
            )
        )

    def _is_foreign(self, role: Role) -> bool:
        """Whether another incarnation holds the role, or held it last."""
        return (role.owner or role.former) not in {None, self.session.incarnation}

    def _is_led(self, living: Mapping[str, SessionRecord]) -> bool:
        """Whether the owner's session lists the role, with the epoch that we know."""
        role = self._role
        if role is None or role.owner is None:
            return False
        record = living.get(role.owner)
        self._is_confirmed = record is not None and record.holds.get(self.name) == role.epoch
        if self._is_confirmed:
            self.cold_start.on_leader_seen()
        return self._is_confirmed

    async def _try_to_take(self, candidates: Candidates) -> None:
        """Take the role if it is free, and no better candidate is there to take it."""
        session, role = self.session, self._role
        if not session.trusted:
            return
        if self._is_closed or self.withheld or not self.can_take:
            await self._give_up_own(session)
            return
        if not self._is_free(role, session):
            self.cold_start.on_leader_seen()
            return
        may_elect, precedence = self.cold_start.may_elect(), self._precedence
        if not may_elect or precedence.is_reserved(role, session.incarnation):
            return
        eligible = await candidates.list_for(self.name)
        is_ours = role is not None and session.incarnation in {role.owner, role.successor}
        if not is_ours and precedence.should_defer(role, self.session.incarnation, eligible):
            await self._remove_dead_owner(role)
            return
        await self._take(session, [worker_of(each) for each in (*eligible, session.incarnation)])

    async def _give_up_own(self, session: Session) -> None:
        """Clear a role that names us, or that a late write may give us, while we cannot take it.

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
            why = self.withheld or "stopped"
            role = role.without_owner(why, self._clock.wall().seconds)
        # Even if it is unchanged: every write based on the current version then conflicts.
        await self._replace_role(role)

    def _is_free(self, role: Role | None, session: Session) -> bool:
        if role is None or role.owner is None:
            return True
        # Our own: a take whose reply was lost, or a term that lapsed. Both are taken again.
        is_own = role.owner in {session.incarnation, *self._former_incarnations}
        return is_own or self._observer.is_dead(role.owner)

    async def _remove_dead_owner(self, role: Role | None) -> None:
        """Remove a dead owner from the role, where that notifies the candidates we defer to."""
        if role is not None and role.owner is not None and not self._store.is_billed:
            await self._replace_role(role.without_owner("died", self._clock.wall().seconds))

    async def _replace_role(self, role: Role) -> None:
        """Write a role without an owner in place of the one that was read."""
        written = await self._write(self._record, role)
        if written is not None:
            self._update(written)

    async def _take(self, session: Session, active: Iterable[str]) -> None:
        """Replace the role that was read by a term of ours, with an epoch that was never used."""
        base, now = self._record, self._clock.wall().seconds
        incarnation, lapses = session.incarnation, session.lapses
        before = self._role
        why = "" if before is None else before.why_free_to(incarnation)
        role = Role(
            epoch=await self._next_epoch(base),
            owner=incarnation,
            since=now,
            until=now + self._settings.max_epoch_duration,
            timeout=self._timing.timeout,
            active=tuple(sorted(set(active))),
            past=() if before is None else before.past_after(why, now),
        )
        record = await self._write(base, role)
        # `held_term` checks the clock: the write may have taken longer than trust lasts.
        if record is not None:
            self._held_term = HeldTerm(role.epoch, incarnation, lapses, self._clock.mono())
            self._mandate.renewed_at = self._held_term.since
            self._update(record)
            was_led = before is not None and before.was_released_lately(now, self._timing.timeout)
            self.cold_start.on_leader_seen(must_prepare=not was_led)
            if self._release_reason:
                await self.release(self._release_reason)

    async def _next_epoch(self, base: Record | None) -> int:
        """Return an epoch above every one that this role is known to have had."""
        # A tombstone keeps its epoch, and singletons keep the epochs of a removed role.
        governed = await self._store.get_many(self._governs, tombstones=True)
        known = [record.epoch for record in (base, *governed) if record is not None]
        epoch = max(self._highest_epoch, self._epoch_floor, *known, 0) + 1
        if epoch >= MAX_INTEGER:
            raise Corrupt(f"{ROLES}{self.name}", f"there is no epoch above {epoch - 1}")
        return epoch

    async def _check_mandate(self, term: HeldTerm, candidates: Candidates) -> None:
        """Renew the mandate when it is over, or hand over when that was requested."""
        self.cold_start.on_leader_seen(must_prepare=True)
        match await self._mandate.decide(self.name, term, candidates):
            case "keep":
                return
            case "renew":
                await self._renew(term)
            case (_, successor):
                await self.release("handed over", successor)

    async def _renew(self, term: HeldTerm) -> None:
        record, role = self._record, self._role
        if role is None:
            return
        until = self._clock.wall().seconds + self._settings.max_epoch_duration
        renewed = await self._write(record, msgspec.structs.replace(role, until=until))
        if renewed is not None:
            self._mandate.renewed_at = self._clock.mono()
            self._update(renewed)
            self._events.emit(
                EpochRenewed(
                    role=self.name,
                    worker_id=worker_of(term.incarnation),
                    epoch=term.epoch,
                    until=until,
                    new_epoch=until,
                )
            )

    async def _write(self, base: Record | None, role: Role) -> Record | None:
        """Write a role in place of the one that was read; None unless it was surely applied."""
        # Fields that newer code has written survive.
        stored = base.value if base is not None and not base.deleted else {}
        value = {**stored, **msgspec.json.decode(msgspec.json.encode(role))}
        change = Put(f"{ROLES}{self.name}", value, base, epoch=role.epoch)
        self._unresolved = (_version(base),)
        (outcome,) = await self._store.write([change])
        if not isinstance(outcome, Applied):
            return None
        self._unresolved = None
        return outcome.record


def _epoch(role: Role | None) -> int:
    return 0 if role is None else role.epoch


def _version(record: Record | None) -> str | None:
    return None if record is None else record.version
