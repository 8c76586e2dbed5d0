"""The checks of what real candidates report must be able to fail."""

from typing import Any

from election_processes import check_beliefs, check_writes
from worker_protocol import Fact

ROLE = "schedule"


def write(what: str, count: int, epoch: int, by: str = "") -> Fact:
    """Return the fact of a write."""
    details = {"role": ROLE, "count": count, "epoch": epoch, "by": by or f"w{epoch}"}
    return Fact(float(count), "", what, details)


def accepted(*writes: tuple[int, int]) -> list[Fact]:
    """Return the facts of accepted writes, by count and epoch."""
    return [write(what, *each) for each in writes for what in ("writes", "wrote")]


def stored(count: int, epoch: int) -> dict[str, Any]:
    """Return the stored value after a write."""
    return {"count": count, "epoch": epoch, "by": f"w{epoch}"}


def test_a_chain_of_writes_passes() -> None:
    """Counts and terms that follow each other are all there should be."""
    assert check_writes(accepted((1, 1), (2, 1), (3, 4)), ROLE, stored(3, 4)) == []


def test_a_write_without_an_outcome_may_fill_a_gap() -> None:
    """A process that is killed after it sent a write cannot report whether it was accepted."""
    facts = [*accepted((1, 1), (3, 2)), write("writes", 2, 1), write("writes", 4, 2)]
    assert check_writes(facts, ROLE, stored(3, 2)) == []
    assert check_writes(facts, ROLE, stored(4, 2)) == []


def test_a_late_write_over_a_newer_one_is_noticed() -> None:
    """Two accepted writes replaced the same one: the second came from a stale reader."""
    assert check_writes(accepted((1, 1), (2, 2), (2, 1)), ROLE, stored(2, 1))


def test_an_epoch_that_goes_back_is_noticed() -> None:
    """An earlier term read what a later one had written, and wrote."""
    assert check_writes(accepted((1, 2), (2, 1)), ROLE, stored(2, 1))


def test_a_write_that_was_lost_is_noticed() -> None:
    """The last accepted write is stored, or one that came after it."""
    assert check_writes(accepted((1, 1), (2, 1)), ROLE, stored(1, 1))
    assert check_writes(accepted((1, 1)), ROLE, None)


def test_a_write_that_nobody_made_is_noticed() -> None:
    """A worker made every write, also the stored one."""
    assert check_writes(accepted((1, 1), (3, 1)), ROLE, stored(3, 1))
    assert check_writes(accepted((1, 1)), ROLE, stored(1, 7))


def test_two_owners_of_an_epoch_are_noticed() -> None:
    """A term belongs to one worker."""
    facts = [*accepted((1, 1)), write("writes", 2, 1, "other"), write("wrote", 2, 1, "other")]
    assert check_writes(facts, ROLE, {"count": 2, "epoch": 1, "by": "other"})


def belief(asked_at: float, at: float, epoch: int | None) -> Fact:
    """Return the fact that a candidate checked whether it leads."""
    return Fact(at, "", "believes", {"asked_at": asked_at, "epochs": {ROLE: epoch}})


def test_beliefs_that_follow_each_other_pass() -> None:
    """A check that began before the next term may also have been answered before it."""
    assert check_beliefs([belief(1, 2, 1), belief(3, 9, 1), belief(4, 5, 2)], ROLE) == []


def test_a_belief_that_outlives_its_term_is_noticed() -> None:
    """A candidate checked after a later term was believed in, and still believed in its own."""
    assert check_beliefs([belief(1, 2, 1), belief(3, 4, 2), belief(5, 6, 1)], ROLE)
