"""Mutants: protocols broken on purpose. The simulated world must detect each of them.

A mutant that survives means that a check is missing, not that the protocol is safe. `KILLERS`
lists the cheapest scenario, or stormy hour, that kills each.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
import pytest
import scenarios
from fleets import run_storm
from mutants import catches

from jobsync import Applied
from jobsync.components import Components
from jobsync.coordination.election import Election
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.membership import Membership
from jobsync.coordination.observer import Observer
from jobsync.coordination.role import Role
from jobsync.coordination.session import Session, SessionRecord
from jobsync.coordination.succession import Precedence
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch
from jobsync.processes import NO_PROCESS, Processes, ProcessIdentity
from jobsync.stores import settling
from jobsync.stores.contract import Change, Head, Outcome, Put, Record, Store, unwrap
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing import Violation

Patch = Callable[[pytest.MonkeyPatch], None]


# Trust.


def no_margin(patch: pytest.MonkeyPatch) -> None:
    """Trust lasts for the whole timeout."""
    patch.setattr(Timing, "trusted_until", lambda self, sent: sent + self.timeout)


def trust_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """Trust counts from the reply to a heartbeat, not from its send."""
    adopt = Session._adopt

    def late(self: Session, record: Record) -> None:
        self._sent_at[record.nonce] = self._clock.mono()
        adopt(self, record)

    patch.setattr(Session, "_adopt", late)


def trust_from_a_resend(patch: pytest.MonkeyPatch) -> None:
    """Trust counts from the last send of a heartbeat."""
    resent: dict[str, Mono] = {}
    resend, adopt = SettlingStore._resend, Session._adopt

    async def note_resend(
        self: SettlingStore, pending: dict[str, Change], settled: dict[str, Outcome]
    ) -> dict[str, Change]:
        resent.update({change.nonce: self._clock.mono() for change in pending.values()})
        return await resend(self, pending, settled)

    def late(self: Session, record: Record) -> None:
        self._sent_at[record.nonce] = resent.get(record.nonce, self._sent_at[record.nonce])
        adopt(self, record)

    patch.setattr(SettlingStore, "_resend", note_resend)
    patch.setattr(Session, "_adopt", late)


def trust_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A session trusts itself until it reads that it is lost."""
    patch.setattr(Session, "trusted", property(lambda self: self.state == "live"))
    patch.setattr(Session, "trust_left", property(lambda self: 60.0 if self.trusted else 0.0))


def cached_leadership(patch: pytest.MonkeyPatch) -> None:
    """A leader relies on what it once knew, and does not read the clock."""
    patch.setattr(Election, "held_term", property(lambda self: self._held_term))


def terms_that_come_back(patch: pytest.MonkeyPatch) -> None:
    """A term that lapsed goes on when trust comes back."""
    patch.setattr(Session, "lapses", property(lambda _: 0, lambda _, __: None), raising=False)


# Death.


def death_of_any_version(patch: pytest.MonkeyPatch) -> None:
    """An observer declares dead the version that it finds, not the one that it watched."""

    async def declare(self: Observer, incarnation: str) -> bool:
        record = (await self.read([incarnation])).get(incarnation)
        if record is None or record.deleted or record.value["state"] == "dead":
            return False
        (outcome,) = await self._store.write([record.replace({**record.value, "state": "dead"})])
        return isinstance(outcome, Applied)

    patch.setattr(Observer, "_declare_dead", declare)


def death_without_a_write(patch: pytest.MonkeyPatch) -> None:
    """An observer relies on its own count, and writes nothing."""

    async def declare(self: Observer, incarnation: str) -> bool:
        self._mark_dead(incarnation, self._clock.mono(), ended=False)
        return True

    patch.setattr(Observer, "_declare_dead", declare)


def impatience(patch: pytest.MonkeyPatch) -> None:
    """An observer waits for a third of the timeout."""
    patch.setattr(Watch, "expires_at", lambda self, timeout: self.since + timeout / 3)
    patch.setattr(MemoryStore, "age", Store.age)


def expiry_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """An observer measures with the wall clock, which may step."""
    init = Observer.__init__

    class WallAsMono:
        def __init__(self, components: Components) -> None:
            self._clock = components.clock

        def mono(self) -> Mono:
            return Mono(self._clock.wall().seconds)

    def use_wall(self: Observer, store: Store, components: Components, timing: Timing) -> None:
        init(self, store, components, timing)
        self._clock = WallAsMono(components)  # type: ignore[assignment]

    patch.setattr(Observer, "__init__", use_wall)


def count_from_the_start_of_a_read(patch: pytest.MonkeyPatch) -> None:
    """An observer counts from the send of a read, not from its return."""
    check, update = MemberLoop._check, Observer.update
    sent: dict[Observer, Mono] = {}

    async def note_send(self: MemberLoop) -> None:
        sent[self._observer] = self._clock.mono()
        await check(self)

    def too_early(self: Observer, found: Mapping[str, Record | None]) -> dict[str, SessionRecord]:
        before = dict(self._watches)
        living = update(self, found)
        for each, watch in self._watches.items():
            if each in found and before.get(each) is not watch and watch.since == watch.last_read:
                self._watches[each] = Watch(watch.version, sent[self], watch.last_read)
        return living

    patch.setattr(MemberLoop, "_check", note_send)
    patch.setattr(Observer, "update", too_early)


def count_from_the_start_of_a_listing(patch: pytest.MonkeyPatch) -> None:
    """A leader counts from the send of a listing of all sessions, not from its return."""
    check_all, watch = Observer.check_all, Observer._watch
    sent: dict[Observer, Mono] = {}

    async def note_send(self: Observer, expected: Collection[str] = ()) -> list[Head]:
        sent[self] = self._clock.mono()
        try:
            return await check_all(self, expected)
        finally:
            del sent[self]

    def too_early(self: Observer, incarnation: str, version: str | None, now: Mono) -> None:
        watch(self, incarnation, version, sent.get(self, now))

    patch.setattr(Observer, "check_all", note_send)
    patch.setattr(Observer, "_watch", too_early)


def death_by_one_clock_alone(patch: pytest.MonkeyPatch) -> None:
    """A session is declared dead although the store's clock does not agree."""

    async def has_lasted(_: Observer, record: Record, watch: Watch) -> bool:
        return record.version == watch.version

    patch.setattr(Observer, "_has_lasted", has_lasted)


def the_observers_own_timeout(patch: pytest.MonkeyPatch) -> None:
    """An observer uses its own timeout, not the session's."""
    patch.setattr(Observer, "_timeout", lambda self, _: self._timing.timeout)


def absent_is_dead_at_once(patch: pytest.MonkeyPatch) -> None:
    """A session without a record is dead at once, while it may still trust itself."""

    def is_dead(self: Observer, incarnation: str) -> bool:
        watch = self._watches.get(incarnation)
        return incarnation in self._dead or (watch is not None and watch.version is None)

    patch.setattr(Observer, "is_dead", is_dead)


# Processes.


def shares(*fields: str) -> Patch:
    """Return a mutant: machines are the same if these fields are."""

    def patch_identity(patch: pytest.MonkeyPatch) -> None:
        def shares_machine(self: ProcessIdentity, other: ProcessIdentity) -> bool:
            return all(getattr(self, field) == getattr(other, field) for field in fields)

        patch.setattr(ProcessIdentity, "shares_machine", shares_machine)

    patch_identity.__name__ = f"machines_that_share_{'_and_'.join(fields)}"
    return patch_identity


def reused_number(patch: pytest.MonkeyPatch) -> None:
    """A process lives as long as any process has its number."""

    def has_ended(process: ProcessIdentity, processes: Processes) -> bool:
        own = processes.identify()
        is_near = own is not None and own.shares_machine(process)
        return is_near and processes.find_start(process.pid) == NO_PROCESS

    patch.setattr("jobsync.coordination.observer.has_ended", has_ended)


def timeout_alone(patch: pytest.MonkeyPatch) -> None:
    """The end of a process is found only when it matters anyway."""
    patch.setattr(MemberLoop, "_watch_processes", lambda self: self._clock.sleep(1e9))
    patch.setattr(Observer, "_is_process_gone", lambda _, __: False)


def refused_death_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A death that another worker has written first is found by the next regular check."""
    declare_dead = Observer._declare_dead

    async def declare_once(self: Observer, incarnation: str) -> bool:
        answers = iter([await self.read([incarnation])])

        async def read(_: Iterable[str]) -> dict[str, Record | None]:
            return next(answers, {})

        with patch.context() as during:
            during.setattr(self, "read", read)
            return await declare_dead(self, incarnation)

    patch.setattr(Observer, "_declare_dead", declare_once)


# Roles.


def take_over_of_a_live_role(patch: pytest.MonkeyPatch) -> None:
    """A role is taken from an owner that lives."""
    patch.setattr(Observer, "is_dead", lambda _, __: True)


def belief_in_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A follower believes that a session it has seen still holds its roles."""
    is_led = Election._is_led
    seen: dict[str, SessionRecord] = {}

    def believe(self: Election, living: Mapping[str, SessionRecord]) -> bool:
        seen.update(living)
        return is_led(self, seen)

    patch.setattr(Election, "_is_led", believe)


def release_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """A leader that released its role goes on leading."""
    release = Election.release

    async def keep(self: Election, why: str, successor: str | None = None) -> None:
        term = self._held_term
        await release(self, why, successor)
        self._held_term = term

    patch.setattr(Election, "release", keep)


def late_role_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A worker that withdrew does not give up a role that names it."""

    async def leave(_: Election, __: Session) -> None:
        return None

    patch.setattr(Election, "_give_up_own", leave)


def epochs_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    """A role is taken with the epoch that it had."""

    async def stay(_: Election, base: Record | None) -> int:
        return 1 if base is None else base.epoch

    patch.setattr(Election, "_next_epoch", stay)


def epochs_that_restart_on_release(patch: pytest.MonkeyPatch) -> None:
    """A released role restarts at epoch 1. The store refuses that, which must be detected."""
    next_epoch = Election._next_epoch

    async def restart(self: Election, base: Record | None) -> int:
        is_released = self._role is not None and self._role.owner is None
        return 1 if is_released else await next_epoch(self, base)

    patch.setattr(Election, "_next_epoch", restart)


def epochs_that_restart_on_removal(patch: pytest.MonkeyPatch) -> None:
    """A role without a record restarts at epoch 1, whatever is remembered."""
    next_epoch = Election._next_epoch

    async def restart(self: Election, base: Record | None) -> int:
        return 1 if base is None else await next_epoch(self, base)

    def forget(self: Election, record: Record | None) -> None:
        if record is None:
            self._highest_epoch = 0
        update(self, record)

    update = Election._update
    patch.setattr(Election, "_next_epoch", restart)
    patch.setattr(Election, "_update", forget)


def endless_deferring(patch: pytest.MonkeyPatch) -> None:
    """A candidate waits while an older one is listed."""

    def wait(_: Precedence, __: Role | None, incarnation: str, eligible: Iterable[str]) -> bool:
        return any(each < incarnation for each in eligible)

    patch.setattr(Precedence, "should_defer", wait)


def ignored_successor(patch: pytest.MonkeyPatch) -> None:
    """The first candidate takes a role that was handed over to another.

    No safety invariant breaks, because of two takes one is refused. But another worker leads than
    the requested one.
    """
    patch.setattr(Precedence, "is_reserved", lambda *_: False)


# Writes.


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    """A coordinator replaces whatever it finds, and keeps the stored epoch."""

    async def put(self: Term, key: str, value: object) -> None:
        base = await self._store.get(key)
        if base is not None:
            await self._store.write([base.replace(value)])

    patch.setattr(Term, "put", put)


def no_seal(patch: pytest.MonkeyPatch) -> None:
    """A coordinator reads a singleton and keeps the stored epoch."""

    async def seal(self: Term, key: str) -> Record:
        found = await self._store.get(key, tombstones=True)
        if found is None:
            (outcome,) = await self._store.write([Put(key, None)])
            return unwrap(outcome, key)
        return found

    async def put(self: Term, key: str, value: object) -> None:
        base = self._sealed.get(key) or await seal(self, key)
        await self._store.write([base.replace(value, epoch=max(base.epoch, self.epoch))])

    patch.setattr(Term, "_seal", seal)
    patch.setattr(Term, "put", put)


def hasty_settling(patch: pytest.MonkeyPatch) -> None:
    """A pending write is taken for an applied one."""
    judge = settling.judge_write

    def hasty(base: Record | None, nonce: str, current: Record | None) -> settling.WriteFate:
        all_violations = judge(base, nonce, current)
        return "applied" if all_violations == "pending" else all_violations

    patch.setattr(settling, "judge_write", hasty)


def no_nonce(patch: pytest.MonkeyPatch) -> None:
    """A writer does not recognise its own write: a changed record is always a conflict.

    Elections survive this, because a session or a worker adopts its own late write. But the
    store's guarantee breaks that writers learn the true outcome.
    """
    patch.setattr(Record, "remembers", lambda _, __: False)


def blind_retry(patch: pytest.MonkeyPatch) -> None:
    """A write with an unknown outcome is repeated on top of whatever is there by now."""

    async def again(
        self: SettlingStore, pending: dict[str, Change], give_up: Mono
    ) -> dict[str, Outcome]:
        del give_up
        found = await self.inner.get_many(list(pending), tombstones=True)
        fresh = self._ids.nonces(len(pending))
        changes = [
            msgspec.structs.replace(change, base=base, nonce=nonce)
            for change, base, nonce in zip(pending.values(), found, fresh, strict=True)
        ]
        outcomes = await self.inner.write(changes)
        return dict(zip(pending, outcomes, strict=True))

    patch.setattr(SettlingStore, "_settle", again)


def late_first_look(patch: pytest.MonkeyPatch) -> None:
    """The session of a new leader is read only at the next check."""
    patch.setattr(Election, "owner_in", lambda _, __: None)


def deferring_to_the_dead(patch: pytest.MonkeyPatch) -> None:
    """After a death, a candidate waits for an older one as long as after a release."""
    patch.setattr(Role, "deference", lambda _, __, beat: beat)


def failed_database_stays(patch: pytest.MonkeyPatch) -> None:
    """A database that has failed keeps its session and its roles."""
    patch.setattr(Membership, "start_leaving", lambda _: None)


def an_hour(seed: int) -> scenarios.Scenario:
    """Return a scenario: one stormy hour."""

    def run() -> list[Violation]:
        return run_storm(seed).all_violations

    run.__name__ = f"an_hour_{seed}"
    return run


KILLERS: dict[Patch, tuple[scenarios.Scenario, str]] = {
    no_margin: (scenarios.a_slow_clock_cut_off, "E5"),
    trust_from_the_reply: (scenarios.a_duplicated_heartbeat, "E5"),
    trust_from_a_resend: (scenarios.a_duplicated_heartbeat, "E5"),
    trust_for_ever: (scenarios.a_slow_clock_cut_off, "E5"),
    cached_leadership: (scenarios.a_slow_clock_cut_off, "E4"),
    terms_that_come_back: (scenarios.short_outages, "E6"),
    death_of_any_version: (scenarios.a_heartbeat_at_the_last_moment, "E5"),
    death_without_a_write: (scenarios.a_return_from_silence, "E5"),
    impatience: (scenarios.lost_heartbeats_and_a_stepped_clock, "E5"),
    expiry_by_the_wall_clock: (scenarios.lost_heartbeats_and_a_stepped_clock, "E5"),
    count_from_the_start_of_a_read: (scenarios.slow_checks, "E5"),
    count_from_the_start_of_a_listing: (scenarios.slow_listings, "E5"),
    death_by_one_clock_alone: (scenarios.a_fast_observer, "E5"),
    the_observers_own_timeout: (scenarios.different_timeouts, "E5"),
    absent_is_dead_at_once: (scenarios.a_removed_session, "E4"),
    take_over_of_a_live_role: (an_hour(1), "EL4"),
    belief_in_the_dead: (scenarios.a_death_declared_by_others, "EL1"),
    release_without_an_end: (scenarios.a_handover_seen_late, "E4"),
    late_role_is_kept: (scenarios.a_late_take, "EL1"),
    epochs_that_stand_still: (scenarios.a_kill, "E2"),
    epochs_that_restart_on_release: (scenarios.a_clean_stop, "E2"),
    epochs_that_restart_on_removal: (scenarios.a_removed_role, "E2"),
    endless_deferring: (scenarios.a_dead_oldest_worker, "EL1"),
    late_first_look: (scenarios.a_death_after_the_election, "EL6"),
    deferring_to_the_dead: (scenarios.a_death_with_the_next, "EL6"),
    ignored_successor: (scenarios.a_forced_handover, "EL5"),
    shares("boot", "namespaces"): (scenarios.a_pause_beside_strangers, "E5"),
    shares("host", "namespaces"): (scenarios.a_pause_beside_strangers, "E5"),
    shares("host", "boot"): (scenarios.a_pause_beside_strangers, "E5"),
    reused_number: (scenarios.a_kill_beside_neighbours, "EL8"),
    timeout_alone: (scenarios.a_kill_beside_neighbours, "EL8"),
    refused_death_is_forgotten: (scenarios.a_death_written_first_by_a_stranger, "EL8"),
    failed_database_stays: (scenarios.a_failed_database, "EL7"),
    no_fencing: (scenarios.a_long_suspend, "E3"),
    no_seal: (scenarios.a_late_write, "E3"),
    hasty_settling: (an_hour(7), "C4"),
    no_nonce: (scenarios.a_lost_reply, "C4"),
    blind_retry: (scenarios.a_lost_reply, "C4"),
}
"""What kills each mutant, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLERS, ids=lambda mutant: mutant.__name__)
def test_the_world_detects_the_mutant(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded scenario finds the recorded invariant violated."""
    killer, invariant = KILLERS[mutant]
    mutant(monkeypatch)
    assert catches(killer(), invariant)


@pytest.mark.parametrize(
    "killer",
    dict.fromkeys(killer for killer, _ in KILLERS.values()),
    ids=lambda killer: killer.__name__,
)
def test_the_real_protocol_survives_all_killers(killer: scenarios.Scenario) -> None:
    """Without the mutation no invariant is violated."""
    assert killer() == []
