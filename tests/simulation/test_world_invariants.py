"""The checkers see what they are there to see, and nothing else."""

from typing import Any

from jobsync.testing import Occurrence, check_commits, check_replies, check_roles, check_takes


def happened(what: str, **facts: Any) -> Occurrence:
    """Make a line of history."""
    return Occurrence(0.0, "a", what, facts)


def commit(
    seq: int, nonce: str, base: str | None, *, epoch: int = 0, deleted: bool = False
) -> Occurrence:
    """A write that the store made."""
    return happened(
        "commit", key="n/1", seq=seq, nonce=nonce, base=base, epoch=epoch, deleted=deleted
    )


def told(nonce: str, base: str | None, outcome: str, since: int = 0) -> Occurrence:
    """What a writer heard."""
    return happened("reply", key="n/1", nonce=nonce, base=base, outcome=outcome, since=since)


def read(nonce: str | None, since: int = 0, *, tombstones: bool = False) -> Occurrence:
    """What a reader heard."""
    return happened("read", keys=["n/1"], nonces=[nonce], since=since, tombstones=tombstones)


BURY = happened("bury", prefix="n/", count=1)
DROP = happened("drop", keys=["n/1"])
CHAIN = [commit(1, "A", None), commit(2, "B", "A")]


def test_a_chain_is_a_chain() -> None:
    """Writes that stand on each other are what the contract says."""
    assert check_commits([*CHAIN, commit(3, "C", "B", epoch=1), commit(4, "D", "C", epoch=1)]) == []


def test_a_write_on_an_old_version_is_found() -> None:
    """Linearizable: of two writes on one base the second cannot be applied."""
    (found,) = check_commits([*CHAIN, commit(3, "C", "A")])
    assert (found.invariant, "not based" in found.detail) == ("C1", True)
    assert len(check_commits([*CHAIN, commit(4, "C", "B")])) == 1


def test_a_version_that_repeats_is_found() -> None:
    """Versions never repeat, neither on one key nor on two."""
    assert len(check_commits([*CHAIN, commit(3, "A", "B")])) == 1
    elsewhere = happened("commit", key="n/2", seq=1, nonce="A", base=None, epoch=0, deleted=False)
    (found,) = check_commits([*CHAIN, elsewhere])
    assert (found.invariant, "twice" in found.detail) == ("C2", True)


def test_a_second_winner_of_a_create_is_found() -> None:
    """Of several creates one wins, unless the name was free again in between."""
    twice = [commit(1, "A", None), commit(1, "B", None)]
    assert [each.invariant for each in check_commits(twice)] == ["C3"]
    assert check_commits([twice[0], DROP, twice[1]]) == []
    gone = commit(2, "X", "A", deleted=True)
    assert len(check_commits([twice[0], gone, twice[1]])) == 1
    assert check_commits([twice[0], gone, BURY, twice[1]]) == []
    assert len(check_commits([twice[0], BURY, twice[1]])) == 1


def test_a_burial_may_leave_a_tombstone() -> None:
    """One that is not old enough is still a base."""
    gone = [commit(1, "A", None), commit(2, "X", "A", deleted=True), BURY]
    assert check_commits([*gone, commit(3, "C", "X")]) == []
    assert len(check_commits([*gone, commit(3, "C", "A")])) == 1


def test_an_epoch_that_goes_back_is_found() -> None:
    """A lower term does not write over a higher one."""
    (found,) = check_commits([commit(1, "A", None, epoch=2), commit(2, "B", "A", epoch=1)])
    assert (found.invariant, "epoch" in found.detail) == ("E3", True)


def test_the_truth_passes() -> None:
    """Applied, conflicted, refused and unknown, as it was."""
    history = [
        *CHAIN,
        told("A", None, "Applied"),
        told("B", "A", "Applied", since=1),
        told("C", "A", "Conflicted"),
        told("D", None, "Conflicted", since=1),
        told("E", "B", "Refused"),
        told("B", "A", "Unknown"),
        told("F", "A", "Unknown"),
    ]
    assert check_replies(history) == []


def test_a_lie_to_a_writer_is_found() -> None:
    """Each outcome that is not what became of the write."""
    for lie in (
        told("C", "A", "Applied"),
        told("A", None, "Applied", since=1),
        told("B", "A", "Conflicted"),
        told("B", "A", "Refused"),
    ):
        assert [each.invariant for each in check_replies([*CHAIN, lie])] == ["C4"], lie
    early = [CHAIN[0], told("B", "A", "Applied"), CHAIN[1]]
    assert len(check_replies(early)) == 1


def test_a_conflict_without_a_reason_is_found() -> None:
    """While the base stood all the time, there was nothing to conflict with."""
    assert len(check_replies([*CHAIN, told("C", "B", "Conflicted", since=2)])) == 1
    assert check_replies([*CHAIN, told("C", "B", "Conflicted", since=1)]) == []
    assert len(check_replies([told("C", None, "Conflicted")])) == 1


def test_a_read_shows_some_moment_in_between() -> None:
    """Neither what was replaced before the question, nor what was never there."""
    assert check_replies([*CHAIN, read("B", since=2)]) == []
    assert check_replies([*CHAIN, read("A", since=1)]) == []
    assert check_replies([*CHAIN, read(None, since=0)]) == []
    assert [each.invariant for each in check_replies([*CHAIN, read("A", since=2)])] == ["C1"]
    assert len(check_replies([*CHAIN, read(None, since=1)])) == 1
    assert len(check_replies([*CHAIN, read("C")])) == 1
    assert len(check_replies([CHAIN[0], read("B"), CHAIN[1]])) == 1


def test_a_tombstone_reads_as_nothing() -> None:
    """Unless tombstones are asked for; after a burial it may be there or not."""
    gone = [commit(1, "A", None), commit(2, "X", "A", deleted=True)]
    assert check_replies([*gone, read(None, since=2)]) == []
    assert check_replies([*gone, read("X", since=2, tombstones=True)]) == []
    assert len(check_replies([*gone, read("X", since=2)])) == 1
    assert len(check_replies([*gone, read(None, since=2, tombstones=True)])) == 1
    for nonce in (None, "X"):
        assert check_replies([*gone, BURY, read(nonce, since=3, tombstones=True)]) == []
    assert len(check_replies([*gone, DROP, read("X", since=3, tombstones=True)])) == 1


def test_an_epoch_that_is_taken_twice_is_found() -> None:
    """Each take of a role has an epoch of its own; a release keeps it."""

    def take(epoch: int, owner: str | None) -> Occurrence:
        return happened("commit", key="role/f/w", value={"epoch": epoch, "owner": owner})

    assert check_roles([take(1, "a"), take(1, None), take(2, "b")]) == []
    assert [each.invariant for each in check_roles([take(1, "a"), take(1, "b")])] == ["E2"]
    assert [each.invariant for each in check_roles([take(2, "a"), take(1, "b")])] == ["E1"]


def test_a_role_taken_from_the_living_is_found() -> None:
    """It is free after a release, a death, or a loss; and to another session of its owner."""

    def take(owner: str | None) -> Occurrence:
        return happened("commit", key="role/f/w", value={"owner": owner})

    def session(name: str, state: str) -> Occurrence:
        return happened("commit", key=f"session/{name}", value={"state": state})

    lives = [session("a.1", "live"), take("a.1")]
    ends = [
        take(None),
        session("a.1", "dead"),
        happened("commit", key="session/a.1", value=None),
        happened("drop", keys=["session/a.1"]),
    ]
    assert [each.invariant for each in check_takes([*lives, take("b.1")])] == ["EL4"]
    assert len(check_takes([*lives, session("b.1", "dead"), take("b.1")])) == 1
    for end in ends:
        assert check_takes([*lives, end, take("b.1")]) == []
    assert check_takes([*lives, take("a.2"), take("a.2")]) == []
