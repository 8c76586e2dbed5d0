"""The checks that are made of what real processes say must be able to fail."""

from typing import Any

from electorate import check_beliefs, check_writes
from ledger import Fact

WORK = "schedule"


def tell(what: str, count: int, epoch: int, by: str = "") -> Fact:
    """Make the word of a write."""
    facts = {"work": WORK, "count": count, "epoch": epoch, "by": by or f"w{epoch}"}
    return Fact(float(count), "", what, facts)


def make(*writes: tuple[int, int]) -> list[Fact]:
    """Make the words of writes that were accepted, by count and epoch."""
    return [tell(what, *write) for write in writes for what in ("writes", "wrote")]


def stand(count: int, epoch: int) -> dict[str, Any]:
    """Make what stands in the store."""
    return {"count": count, "epoch": epoch, "by": f"w{epoch}"}


def test_a_chain_of_writes_is_well() -> None:
    """Counts that follow each other, in terms that follow each other, are all there should be."""
    assert check_writes(make((1, 1), (2, 1), (3, 4)), WORK, stand(3, 4)) == []


def test_a_write_that_nobody_heard_of_may_fill_a_gap() -> None:
    """Who is killed after it sent a write cannot say whether it was accepted."""
    words = [*make((1, 1), (3, 2)), tell("writes", 2, 1), tell("writes", 4, 2)]
    assert check_writes(words, WORK, stand(3, 2)) == []
    assert check_writes(words, WORK, stand(4, 2)) == []


def test_a_late_write_over_a_newer_one_is_noticed() -> None:
    """Two accepted writes replaced the same one: the second of them came from a stale reader."""
    assert check_writes(make((1, 1), (2, 2), (2, 1)), WORK, stand(2, 1))


def test_an_epoch_that_goes_back_is_noticed() -> None:
    """An earlier term read what a later one had written, and wrote."""
    assert check_writes(make((1, 2), (2, 1)), WORK, stand(2, 1))


def test_a_write_that_was_lost_is_noticed() -> None:
    """What was accepted last stands, or something that came after it."""
    assert check_writes(make((1, 1), (2, 1)), WORK, stand(1, 1))
    assert check_writes(make((1, 1)), WORK, None)


def test_a_write_of_nobody_is_noticed() -> None:
    """Every count was somebody's, and so is what stands."""
    assert check_writes(make((1, 1), (3, 1)), WORK, stand(3, 1))
    assert check_writes(make((1, 1)), WORK, stand(1, 7))


def test_two_owners_of_an_epoch_are_noticed() -> None:
    """A term is one worker's."""
    words = [*make((1, 1)), tell("writes", 2, 1, "other"), tell("wrote", 2, 1, "other")]
    assert check_writes(words, WORK, {"count": 2, "epoch": 1, "by": "other"})


def believe(begun: float, at: float, epoch: int | None) -> Fact:
    """Make the word of somebody who looked whether it leads."""
    return Fact(at, "", "believes", {"begun": begun, "epochs": {WORK: epoch}})


def test_beliefs_that_follow_each_other_are_well() -> None:
    """A look that began before the next term did may have been answered before it, too."""
    assert check_beliefs([believe(1, 2, 1), believe(3, 9, 1), believe(4, 5, 2)], WORK) == []


def test_a_belief_that_outlives_its_term_is_noticed() -> None:
    """Somebody looked after a later term was believed in, and still believed."""
    assert check_beliefs([believe(1, 2, 1), believe(3, 4, 2), believe(5, 6, 1)], WORK)
