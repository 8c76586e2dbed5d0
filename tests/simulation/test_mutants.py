"""Protocols broken on purpose: the simulated world must notice each.

A mutant that survives means that the world has gone blind, not that the protocol is safe.
Beside each stands the cheapest story, or stormy hour, that was seen to kill it.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
import ordeals
import pytest
from fleets import run_storm
from mutants import catches

from jobsync import Applied
from jobsync.components import Components
from jobsync.coordination.election import Election
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.observer import Observer
from jobsync.coordination.role import Role
from jobsync.coordination.session import Session, SessionRecord, read_session_record
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch
from jobsync.stores import settling
from jobsync.stores.contract import Change, Outcome, Put, Record, Store, unwrap
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing import Violation

Patch = Callable[[pytest.MonkeyPatch], None]


# Trust.


def no_margin(patch: pytest.MonkeyPatch) -> None:
    """Trust lasts as long as the timeout."""
    patch.setattr(Timing, "trusted_until", lambda self, sent: sent + self.timeout)


def trust_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """Trust counts from when a beat was answered, not from when it was sent."""
    adopt = Session._adopt

    def late(self: Session, record: Record) -> None:
        self._sent_at[record.nonce] = self._clock.mono()
        adopt(self, record)

    patch.setattr(Session, "_adopt", late)


def trust_from_a_resend(patch: pytest.MonkeyPatch) -> None:
    """Trust counts from when a beat was sent last."""
    resent: dict[str, Mono] = {}
    resend, adopt = SettlingStore._resend, Session._adopt

    async def note(
        self: SettlingStore, pending: dict[str, Change], settled: dict[str, Outcome]
    ) -> dict[str, Change]:
        resent.update({change.nonce: self._clock.mono() for change in pending.values()})
        return await resend(self, pending, settled)

    def late(self: Session, record: Record) -> None:
        self._sent_at[record.nonce] = resent.get(record.nonce, self._sent_at[record.nonce])
        adopt(self, record)

    patch.setattr(SettlingStore, "_resend", note)
    patch.setattr(Session, "_adopt", late)


def trust_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A session trusts itself until it hears that it is lost."""
    patch.setattr(Session, "trusted", property(lambda self: self.state == "live"))
    patch.setattr(Session, "trust_left", property(lambda self: 60.0 if self.trusted else 0.0))


def belief_that_is_cached(patch: pytest.MonkeyPatch) -> None:
    """A leader believes what it once knew, and does not ask the clock."""
    patch.setattr(Election, "held_term", property(lambda self: self._held_term))


def terms_that_come_back(patch: pytest.MonkeyPatch) -> None:
    """A term that lapsed goes on when trust does."""
    patch.setattr(Session, "lapses", property(lambda _: 0, lambda _, __: None), raising=False)


# Death.


def death_of_any_version(patch: pytest.MonkeyPatch) -> None:
    """An observer calls dead what it finds, not what it watched."""

    async def declare(self: Observer, incarnation: str) -> bool:
        record = (await self.read([incarnation])).get(incarnation)
        if record is None or record.deleted or record.value["state"] == "dead":
            return False
        (outcome,) = await self._store.write([record.replace({**record.value, "state": "dead"})])
        return isinstance(outcome, Applied)

    patch.setattr(Observer, "_declare_dead", declare)


def death_without_a_write(patch: pytest.MonkeyPatch) -> None:
    """An observer believes its own count, and writes nothing down."""

    async def declare(self: Observer, incarnation: str) -> bool:
        self._mark_dead(incarnation, self._clock.mono())
        return True

    patch.setattr(Observer, "_declare_dead", declare)


def impatience(patch: pytest.MonkeyPatch) -> None:
    """An observer waits for a third of the timeout."""
    patch.setattr(Watch, "expires", lambda self, timeout: self.since + timeout / 3)
    patch.setattr(MemoryStore, "age", Store.age)


def expiry_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """An observer counts by the time of day, which may be put right."""
    begin = Observer.__init__

    class ByTheWall:
        def __init__(self, components: Components) -> None:
            self._clock = components.clock

        def mono(self) -> Mono:
            return Mono(self._clock.wall().seconds)

    def by_the_wall(self: Observer, store: Store, components: Components, timing: Timing) -> None:
        begin(self, store, components, timing)
        self._clock = ByTheWall(components)  # type: ignore[assignment]

    patch.setattr(Observer, "__init__", by_the_wall)


def count_from_the_start_of_a_read(patch: pytest.MonkeyPatch) -> None:
    """An observer counts from when it asked, not from when it was answered."""
    check, update = MemberLoop._check, Observer.update
    asked: dict[Observer, Mono] = {}

    async def ask(self: MemberLoop) -> None:
        asked[self._observer] = self._clock.mono()
        await check(self)

    def too_early(self: Observer, found: Mapping[str, Record | None]) -> dict[str, SessionRecord]:
        before = dict(self._watches)
        living = update(self, found)
        for each, watch in self._watches.items():
            if each in found and before.get(each) is not watch and watch.since == watch.last_read:
                self._watches[each] = Watch(watch.version, asked[self], watch.last_read)
        return living

    patch.setattr(MemberLoop, "_check", ask)
    patch.setattr(Observer, "update", too_early)


def the_observers_own_timeout(patch: pytest.MonkeyPatch) -> None:
    """An observer waits for as long as it would be waited for."""
    patch.setattr(Observer, "_timeout", lambda self, _: self._timing.timeout)


def absent_is_dead_at_once(patch: pytest.MonkeyPatch) -> None:
    """A session that is not there is dead, without waiting for its trust to run out."""

    def is_dead(self: Observer, incarnation: str) -> bool:
        watch = self._watches.get(incarnation)
        return incarnation in self._dead or (watch is not None and watch.version is None)

    patch.setattr(Observer, "is_dead", is_dead)


# Roles.


def take_over_of_a_live_role(patch: pytest.MonkeyPatch) -> None:
    """A role is taken from an owner that lives."""
    patch.setattr(Observer, "is_dead", lambda _, __: True)


def belief_in_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A follower believes what a dead session told that it held."""
    update = Observer.update

    def believe(self: Observer, found: Mapping[str, Record | None]) -> dict[str, SessionRecord]:
        living = update(self, found)
        told = {
            each: read_session_record(record)
            for each, record in found.items()
            if record is not None
        }
        return told | living

    patch.setattr(Observer, "update", believe)


def release_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """A leader that gave up its role goes on leading."""
    release = Election.release

    async def keep(self: Election, why: str, successor: str | None = None) -> None:
        term = self._held_term
        await release(self, why, successor)
        self._held_term = term

    patch.setattr(Election, "release", keep)


def kept_what_came_late(patch: pytest.MonkeyPatch) -> None:
    """A worker that stands no longer leaves a role that names it as it is."""

    async def leave(_: Election, __: Session) -> None:
        return None

    patch.setattr(Election, "_give_up_own", leave)


def epochs_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    """A role is taken under the epoch that it had."""

    async def stay(_: Election, base: Record | None) -> int:
        return 1 if base is None else base.epoch

    patch.setattr(Election, "_next_epoch", stay)


def epochs_that_restart_on_release(patch: pytest.MonkeyPatch) -> None:
    """A role that was released begins anew. The store refuses that, and somebody must notice."""
    next_epoch = Election._next_epoch

    async def restart(self: Election, base: Record | None) -> int:
        is_released = self._role is not None and self._role.owner is None
        return 1 if is_released else await next_epoch(self, base)

    patch.setattr(Election, "_next_epoch", restart)


def epochs_that_restart_on_removal(patch: pytest.MonkeyPatch) -> None:
    """A role that is not there begins anew, whatever anybody remembers."""
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


def giving_way_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A candidate waits for as long as an older one seems to be there."""

    def wait(self: Election, _: Role | None, eligible: Iterable[str]) -> bool:
        return any(each < self.session.incarnation for each in eligible)

    patch.setattr(Election, "_should_defer", wait)


def a_successor_that_nobody_minds(patch: pytest.MonkeyPatch) -> None:
    """Whoever is first takes what was handed over to another.

    No promise is broken, for of two that take it one is refused: what is lost is that the
    worker that was asked for leads next.
    """

    def mind_nobody(_: Election, __: Role | None, ___: Session) -> bool:
        return False

    patch.setattr(Election, "_is_reserved", mind_nobody)


# Writes.


def no_fencing(patch: pytest.MonkeyPatch) -> None:
    """A coordinator writes in place of whatever it finds, under whatever epoch stands there."""

    async def put(self: Term, key: str, value: object) -> None:
        base = await self._store.get(key)
        if base is not None:
            await self._store.write([base.replace(value)])

    patch.setattr(Term, "put", put)


def no_seal(patch: pytest.MonkeyPatch) -> None:
    """A coordinator reads a singleton and leaves the epoch that it finds there."""

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
    """A pending write is taken for one that was applied."""
    judge = settling.judge_write

    def hasty(base: Record | None, nonce: str, current: Record | None) -> settling.WriteFate:
        verdict = judge(base, nonce, current)
        return "applied" if verdict == "pending" else verdict

    patch.setattr(settling, "judge_write", hasty)


def no_nonce(patch: pytest.MonkeyPatch) -> None:
    """Nobody can tell his own write from another's: what has moved on is a conflict.

    Elections survive this: a beat or a take of one's own that is met again is adopted. But
    the store's promise is broken, that writers are told the truth.
    """
    patch.setattr(Record, "remembers", lambda _, __: False)


def blind_retry(patch: pytest.MonkeyPatch) -> None:
    """A write whose outcome is unknown is made once more, in place of whatever is there by now."""

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


def an_hour(seed: int) -> ordeals.Ordeal:
    """Give a stormy hour."""

    def tell() -> list[Violation]:
        return run_storm(seed).verdict

    tell.__name__ = f"an_hour_{seed}"
    return tell


KILLERS: dict[Patch, tuple[ordeals.Ordeal, str]] = {
    no_margin: (ordeals.a_slow_clock_cut_off, "E5"),
    trust_from_the_reply: (ordeals.a_beat_in_two_copies, "E5"),
    trust_from_a_resend: (ordeals.a_beat_in_two_copies, "E5"),
    trust_for_ever: (ordeals.a_slow_clock_cut_off, "E5"),
    belief_that_is_cached: (ordeals.a_slow_clock_cut_off, "E4"),
    terms_that_come_back: (ordeals.short_outages, "E6"),
    death_of_any_version: (ordeals.a_beat_at_the_last_moment, "E5"),
    death_without_a_write: (ordeals.a_return_from_silence, "E5"),
    impatience: (ordeals.a_lost_beat_and_a_stepped_clock, "E5"),
    expiry_by_the_wall_clock: (ordeals.a_lost_beat_and_a_stepped_clock, "E5"),
    count_from_the_start_of_a_read: (ordeals.slow_looks, "E5"),
    the_observers_own_timeout: (ordeals.unlike_timeouts, "E5"),
    absent_is_dead_at_once: (ordeals.a_removed_session, "E4"),
    take_over_of_a_live_role: (an_hour(1), "EL4"),
    belief_in_the_dead: (ordeals.a_death_told_by_others, "EL1"),
    release_without_an_end: (ordeals.a_hand_over_seen_late, "E4"),
    kept_what_came_late: (ordeals.a_late_take, "EL1"),
    epochs_that_stand_still: (ordeals.a_kill, "E2"),
    epochs_that_restart_on_release: (ordeals.a_clean_stop, "E2"),
    epochs_that_restart_on_removal: (ordeals.a_removed_role, "E2"),
    giving_way_for_ever: (ordeals.a_dead_elder, "EL1"),
    a_successor_that_nobody_minds: (ordeals.a_forced_hand_over, "EL5"),
    no_fencing: (ordeals.a_long_sleep, "E3"),
    no_seal: (ordeals.a_late_write, "E3"),
    hasty_settling: (an_hour(4), "C4"),
    no_nonce: (ordeals.a_lost_reply, "C4"),
    blind_retry: (ordeals.a_lost_reply, "C4"),
}
"""What kills each mutant, and the promise that it finds broken."""


@pytest.mark.parametrize("mutant", KILLERS, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded beside it finds the promise broken that is recorded too."""
    killer, invariant = KILLERS[mutant]
    mutant(monkeypatch)
    assert catches(killer(), invariant)


@pytest.mark.parametrize(
    "killer",
    dict.fromkeys(killer for killer, _ in KILLERS.values()),
    ids=lambda killer: killer.__name__,
)
def test_the_killers_find_nothing_in_the_real_protocol(killer: ordeals.Ordeal) -> None:
    """What kills a mutant is the mutation."""
    assert killer() == []
