"""Protocols broken on purpose: the simulated world must notice each.

A mutant that survives means that the world has gone blind, not that the protocol is safe.
"""

from collections.abc import Callable

import pytest
from fleets import Fleet, run_storm

from jobsync import Applied
from jobsync.coordination.election import Election, Term
from jobsync.coordination.observer import Observer
from jobsync.coordination.session import Session
from jobsync.core.trust import Timing, Watch
from jobsync.stores import settling
from jobsync.stores.contract import Record
from jobsync.testing.invariants import check_commits, check_roles

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

    async def declare(self: Observer, key: str) -> bool:
        record = await self._store.get(key)
        if record is None or record.value["state"] == "dead":
            return False
        (outcome,) = await self._store.write([record.replace({**record.value, "state": "dead"})])
        return isinstance(outcome, Applied)

    patch.setattr(Observer, "_declare_dead", declare)


def impatience(patch: pytest.MonkeyPatch) -> None:
    """An observer waits for a third of the timeout."""

    def expired(self: Watch, timing: Timing) -> bool:
        return self.looked - self.since >= timing.timeout / 3

    patch.setattr(Watch, "expired", expired)


def take_over_of_a_live_role(patch: pytest.MonkeyPatch) -> None:
    """A role is taken from an owner that lives."""

    async def dead(_: Election, __: str) -> bool:
        return True

    patch.setattr(Election, "_is_dead", dead)


def belief_that_is_cached(patch: pytest.MonkeyPatch) -> None:
    """A leader believes what it once knew, and does not ask the clock."""
    patch.setattr(Election, "_holds", lambda self, _: self._session.state == "live")


def release_without_an_end(patch: pytest.MonkeyPatch) -> None:
    """A leader that gave up its role goes on leading."""
    release = Election.release

    async def keep(self: Election) -> None:
        term = self._term
        await release(self)
        self._term = term

    patch.setattr(Election, "release", keep)


def epochs_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    """A role is taken under the epoch that it had."""

    async def take(self: Election, base: Record | None) -> None:
        epoch = 1 if base is None else base.epoch
        incarnation = self._session.incarnation
        (outcome,) = await self._store.write([self._change(base, epoch, incarnation)])
        if isinstance(outcome, Applied):
            self._term = Term(epoch, incarnation)

    patch.setattr(Election, "_take", take)


def trust_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A session trusts itself until it hears that it is lost."""
    patch.setattr(Session, "trusted", property(lambda self: self.state == "live"))


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
    hasty_settling,
]


def faults_of(fleet: Fleet) -> list[str]:
    """Give everything that must not be found."""
    history = fleet.world.history
    return fleet.violations + check_commits(history) + check_roles(history)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one of the recorded seeds kills it; unbroken, all of them pass."""
    mutant(monkeypatch)
    assert any(faults_of(run_storm(seed)) for seed in KILLING_SEEDS)


@pytest.mark.parametrize("seed", KILLING_SEEDS)
def test_the_killing_seeds_find_nothing_in_the_real_protocol(seed: int) -> None:
    """What kills a mutant is the mutation."""
    assert faults_of(run_storm(seed)) == []
