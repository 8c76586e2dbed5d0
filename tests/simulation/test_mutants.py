"""Protocols broken on purpose: the simulated world must notice each.

A mutant that survives means that the world has gone blind, not that the protocol is safe.
"""

from collections.abc import Callable

import pytest
from fleets import run_storm

from jobsync import Applied
from jobsync.coordination.election import Election
from jobsync.coordination.fencing import Term
from jobsync.coordination.observer import Observer
from jobsync.coordination.session import Session
from jobsync.core.trust import Timing, Watch
from jobsync.stores import settling
from jobsync.stores.contract import Put, Record, Store, unwrap
from jobsync.stores.memory import MemoryStore

KILLING_SEEDS = (0, 1, 2)

Patch = Callable[[pytest.MonkeyPatch], None]


def no_margin(patch: pytest.MonkeyPatch) -> None:
    """Trust lasts as long as the timeout."""
    patch.setattr(Timing, "trusted_until", lambda self, sent: sent + self.timeout)


def trust_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """Trust counts from when a beat was answered, not from when it was sent."""
    take = Session._take

    def late(self: Session, record: Record) -> None:
        self._sent[record.nonce] = self._clock.mono()
        take(self, record)

    patch.setattr(Session, "_take", late)


def death_of_any_version(patch: pytest.MonkeyPatch) -> None:
    """An observer calls dead what it finds, not what it watched."""

    async def declare(self: Observer, incarnation: str) -> bool:
        record = (await self.read([incarnation])).get(incarnation)
        if record is None or record.deleted or record.value["state"] == "dead":
            return False
        (outcome,) = await self._store.write([record.replace({**record.value, "state": "dead"})])
        return isinstance(outcome, Applied)

    patch.setattr(Observer, "_declare_dead", declare)


def impatience(patch: pytest.MonkeyPatch) -> None:
    """An observer waits for a third of the timeout."""
    patch.setattr(Watch, "expires", lambda self, timeout: self.since + timeout / 3)
    patch.setattr(MemoryStore, "age", Store.age)


def take_over_of_a_live_role(patch: pytest.MonkeyPatch) -> None:
    """A role is taken from an owner that lives."""
    patch.setattr(Observer, "is_dead", lambda _, __: True)


def belief_that_is_cached(patch: pytest.MonkeyPatch) -> None:
    """A leader believes what it once knew, and does not ask the clock."""
    patch.setattr(Election, "held", property(lambda self: self._held))


def release_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """A leader that gave up its role goes on leading."""
    release = Election.release

    async def keep(self: Election, why: str, successor: str | None = None) -> None:
        held = self._held
        await release(self, why, successor)
        self._held = held

    patch.setattr(Election, "release", keep)


def epochs_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    """A role is taken under the epoch that it had."""

    async def stay(_: Election, base: Record | None) -> int:
        return 1 if base is None else base.epoch

    patch.setattr(Election, "_next_epoch", stay)


def trust_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A session trusts itself until it hears that it is lost."""
    patch.setattr(
        Session, "trust_left", property(lambda self: 60.0 if self.state == "live" else 0.0)
    )


def terms_that_come_back(patch: pytest.MonkeyPatch) -> None:
    """A term that lapsed goes on when trust does."""
    patch.setattr(Session, "lapses", property(lambda _: 0, lambda _, __: None), raising=False)


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
    judge = settling.judge

    def hasty(base: Record | None, nonce: str, current: Record | None) -> settling.Verdict:
        verdict = judge(base, nonce, current)
        return "applied" if verdict == "pending" else verdict

    patch.setattr(settling, "judge", hasty)


MUTANTS: list[Patch] = [
    no_margin,
    trust_from_the_reply,
    death_of_any_version,
    impatience,
    take_over_of_a_live_role,
    belief_that_is_cached,
    release_without_an_end,
    epochs_that_stand_still,
    trust_for_ever,
    terms_that_come_back,
    no_fencing,
    no_seal,
    hasty_settling,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one of the recorded seeds kills it; unbroken, all of them pass."""
    mutant(monkeypatch)
    assert any(run_storm(seed).verdict for seed in KILLING_SEEDS)


@pytest.mark.parametrize("seed", KILLING_SEEDS)
def test_the_killing_seeds_find_nothing_in_the_real_protocol(seed: int) -> None:
    """What kills a mutant is the mutation."""
    assert run_storm(seed).verdict == []
