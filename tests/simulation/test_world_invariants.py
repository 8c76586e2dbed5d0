"""The checks of stores and roles find violations, and nothing else."""

from typing import Any

from jobsync.testing import Occurrence, check_commits, check_replies, check_roles, check_takes


def occurrence(what: str, **details: Any) -> Occurrence:
    """Return an entry of the history."""
    return Occurrence(0.0, "a", what, details)


def commit(
    seq: int, nonce: str, base: str | None, *, epoch: int = 0, deleted: bool = False
) -> Occurrence:
    """Return a write that the store has applied."""
    return occurrence(
        "commit", key="n/1", seq=seq, nonce=nonce, base=base, epoch=epoch, deleted=deleted
    )


def reply(nonce: str, base: str | None, outcome: str, since: int = 0) -> Occurrence:
    """Return the reply to a writer."""
    return occurrence("reply", key="n/1", nonce=nonce, base=base, outcome=outcome, since=since)


def read(nonce: str | None, since: int = 0, *, tombstones: bool = False) -> Occurrence:
    """Return the reply to a reader."""
    return occurrence("read", keys=["n/1"], nonces=[nonce], since=since, tombstones=tombstones)


BURY = occurrence("bury", prefix="n/", count=1)
DROP = occurrence("drop", keys=["n/1"])
CHAIN = [commit(1, "A", None), commit(2, "B", "A")]


def test_a_chain_of_writes_passes() -> None:
    """Every write is based on the one before it."""
    assert check_commits([*CHAIN, commit(3, "C", "B", epoch=1), commit(4, "D", "C", epoch=1)]) == []


def test_a_write_on_an_old_version_is_found() -> None:
    """Of two writes with the same base, the second cannot be applied."""
    (found,) = check_commits([*CHAIN, commit(3, "C", "A")])
    assert (found.invariant, "not based" in found.detail) == ("C1", True)
    assert len(check_commits([*CHAIN, commit(4, "C", "B")])) == 1


def test_a_version_that_repeats_is_found() -> None:
    """A version is unique, on one key and on two."""
    assert len(check_commits([*CHAIN, commit(3, "A", "B")])) == 1
    elsewhere = occurrence("commit", key="n/2", seq=1, nonce="A", base=None, epoch=0, deleted=False)
    (found,) = check_commits([*CHAIN, elsewhere])
    assert (found.invariant, "twice" in found.detail) == ("C2", True)


def test_a_late_copy_may_bring_back_what_was_dropped() -> None:
    """A dropped record leaves no trace, so a late copy of its create is applied once more."""
    assert check_commits([commit(1, "A", None), DROP, commit(1, "A", None)]) == []
    assert check_replies([commit(1, "A", None), reply("A", None, "Applied"), DROP, CHAIN[0]]) == []
    changed = [*CHAIN, DROP, commit(3, "B", "A")]
    assert {each.invariant for each in check_commits(changed)} == {"C1", "C2"}


def test_a_second_winner_of_a_create_is_found() -> None:
    """One of several creates succeeds, unless the key was free again in between."""
    twice = [commit(1, "A", None), commit(1, "B", None)]
    assert [each.invariant for each in check_commits(twice)] == ["C3"]
    assert check_commits([twice[0], DROP, twice[1]]) == []
    gone = commit(2, "X", "A", deleted=True)
    assert len(check_commits([twice[0], gone, twice[1]])) == 1
    assert check_commits([twice[0], gone, BURY, twice[1]]) == []
    assert len(check_commits([twice[0], BURY, twice[1]])) == 1


def test_a_burial_may_leave_a_tombstone() -> None:
    """A tombstone that is not old enough is still a valid base."""
    gone = [commit(1, "A", None), commit(2, "X", "A", deleted=True), BURY]
    assert check_commits([*gone, commit(3, "C", "X")]) == []
    assert len(check_commits([*gone, commit(3, "C", "A")])) == 1


def test_a_first_version_that_is_not_the_first_is_found() -> None:
    """No other create has won, so it is no second winner."""
    assert [each.invariant for each in check_commits([commit(2, "A", None)])] == ["C1"]
    assert [each.invariant for each in check_commits([commit(1, "A", "B")])] == ["C1"]
    assert [each.invariant for each in check_commits([CHAIN[0], commit(3, "B", None)])] == ["C3"]


def test_an_epoch_that_decreases_is_found() -> None:
    """An earlier term must not overwrite a later one."""
    (found,) = check_commits([commit(1, "A", None, epoch=2), commit(2, "B", "A", epoch=1)])
    assert (found.invariant, "epoch" in found.detail) == ("E3", True)


def test_true_replies_pass() -> None:
    """Applied, conflicted, refused and unknown."""
    history = [
        *CHAIN,
        reply("A", None, "Applied"),
        reply("B", "A", "Applied", since=1),
        reply("C", "A", "Conflicted"),
        reply("D", None, "Conflicted", since=1),
        reply("E", "B", "Refused"),
        reply("B", "A", "Unknown"),
        reply("F", "A", "Unknown"),
    ]
    assert check_replies(history) == []


def test_a_false_reply_to_a_writer_is_found() -> None:
    """Each outcome that does not match the write."""
    for wrong in (
        reply("C", "A", "Applied"),
        reply("A", None, "Applied", since=1),
        reply("B", "A", "Conflicted"),
        reply("B", "A", "Refused"),
    ):
        assert [each.invariant for each in check_replies([*CHAIN, wrong])] == ["C4"], wrong
    early = [CHAIN[0], reply("B", "A", "Applied"), CHAIN[1]]
    assert len(check_replies(early)) == 1


def test_a_conflict_is_true_if_the_record_was_dropped_in_between() -> None:
    """Nothing is known of what was dropped: it may come back, or be gone for good."""
    dropped = occurrence("drop", keys=["n/1"])
    conflicted = reply("A", None, "Conflicted")
    again = commit(1, "B", None)
    late = [commit(1, "B", None), conflicted, dropped, commit(1, "A", None)]
    for history in ([commit(1, "A", None), dropped, again, conflicted], late):
        assert check_replies(history) == []
        assert len(check_replies([each for each in history if each is not dropped])) == 1
    refused = reply("A", None, "Refused")
    assert len(check_replies([commit(1, "A", None), dropped, again, refused])) == 1
    assert len(check_replies([dropped, commit(1, "A", None), again, conflicted])) == 1


def test_a_conflict_without_a_cause_is_found() -> None:
    """If the base was current all the time, there was no conflict."""
    assert len(check_replies([*CHAIN, reply("C", "B", "Conflicted", since=2)])) == 1
    assert check_replies([*CHAIN, reply("C", "B", "Conflicted", since=1)]) == []
    assert len(check_replies([reply("C", None, "Conflicted")])) == 1


def test_a_read_shows_some_moment_in_between() -> None:
    """Neither a version that was replaced before the request, nor one that never existed."""
    assert check_replies([*CHAIN, read("B", since=2)]) == []
    assert check_replies([*CHAIN, read("A", since=1)]) == []
    assert check_replies([*CHAIN, read(None, since=0)]) == []
    assert [each.invariant for each in check_replies([*CHAIN, read("A", since=2)])] == ["C1"]
    assert len(check_replies([*CHAIN, read(None, since=1)])) == 1
    assert len(check_replies([*CHAIN, read("C")])) == 1
    assert len(check_replies([CHAIN[0], read("B"), CHAIN[1]])) == 1


def test_a_tombstone_reads_as_nothing() -> None:
    """Unless tombstones are requested; after a burial it may exist or not."""
    gone = [commit(1, "A", None), commit(2, "X", "A", deleted=True)]
    assert check_replies([*gone, read(None, since=2)]) == []
    assert check_replies([*gone, read("X", since=2, tombstones=True)]) == []
    assert len(check_replies([*gone, read("X", since=2)])) == 1
    assert len(check_replies([*gone, read(None, since=2, tombstones=True)])) == 1
    for nonce in (None, "X"):
        assert check_replies([*gone, BURY, read(nonce, since=3, tombstones=True)]) == []
    assert len(check_replies([*gone, DROP, read("X", since=3, tombstones=True)])) == 1


def test_an_epoch_that_is_taken_twice_is_found() -> None:
    """Each owner of a role has an epoch of its own; a release keeps the epoch."""

    def take(epoch: int, owner: str | None) -> Occurrence:
        return occurrence("commit", key="role/f/w", value={"epoch": epoch, "owner": owner})

    assert check_roles([take(1, "a"), take(1, None), take(2, "b")]) == []
    assert [each.invariant for each in check_roles([take(1, "a"), take(1, "b")])] == ["E2"]
    assert [each.invariant for each in check_roles([take(2, "a"), take(1, "b")])] == ["E1"]


def test_a_role_taken_from_a_live_owner_is_found() -> None:
    """A role is free after a release, or if the session is dead or gone, and for its own worker."""

    def take(owner: str | None) -> Occurrence:
        return occurrence("commit", key="role/f/w", value={"owner": owner})

    def session(name: str, state: str) -> Occurrence:
        return occurrence("commit", key=f"session/{name}", value={"state": state})

    live = [session("a.1", "live"), take("a.1")]
    ends = [
        take(None),
        session("a.1", "dead"),
        occurrence("commit", key="session/a.1", value=None),
        occurrence("drop", keys=["session/a.1"]),
    ]
    assert [each.invariant for each in check_takes([*live, take("b.1")])] == ["EL4"]
    assert len(check_takes([*live, session("b.1", "dead"), take("b.1")])) == 1
    for end in ends:
        assert check_takes([*live, end, take("b.1")]) == []
    assert check_takes([*live, take("a.2"), take("a.2")]) == []


def test_roles_are_apart() -> None:
    """Each has epochs and owners of its own, and only roles have any."""

    def take(key: str, epoch: int, owner: str | None) -> Occurrence:
        return occurrence("commit", key=key, value={"epoch": epoch, "owner": owner})

    history = [take("role/f/w", 2, "a.1"), take("role/f/v", 1, "b.1"), take("role/f/v", 2, "b.1")]
    others = [
        occurrence("commit", key="n/1", value={"x": 1}),
        occurrence("read", key="role/f/w"),
        take("role/f/w", 3, None),
    ]
    assert check_roles([*history, *others]) == []
    again = [*history, *others, take("role/f/w", 2, "a.1"), take("role/f/w", 2, "a.1")]
    assert [each.invariant for each in check_roles(again)] == ["E1", "E1"]
    assert check_takes(history) == []


def test_a_role_that_was_overwritten_has_no_owner() -> None:
    """Nobody is robbed of it; a session with its name was never ended."""
    key = "role/f/w"
    live = occurrence("commit", key="session/a.1", value={"state": "live"})
    owned, taken = (occurrence("commit", key=key, value={"owner": f"{it}.1"}) for it in "ab")
    for value in ("text", None, {"owner": None}, {}):
        history = [live, owned, occurrence("commit", key=key, value=value), taken]
        assert check_takes(history) == []
    assert [each.invariant for each in check_takes([live, owned, taken])] == ["EL4"]
    assert check_takes([live, owned, occurrence("commit", key="role/g/w", value=None), live]) == []


def test_a_burial_is_no_drop() -> None:
    """It removes tombstones of its prefix; what was created before does not come back by itself."""
    gone = [commit(1, "A", None), commit(2, "X", "A", deleted=True)]
    elsewhere = occurrence("bury", prefix="m/", count=1)
    again = commit(1, "B", None)
    assert check_commits([*gone, BURY, again]) == []
    assert [each.invariant for each in check_commits([*gone, elsewhere, again])] == ["C3"]
    assert [each.invariant for each in check_commits([*gone, BURY, gone[0]])] == ["C2"]
    assert {each.invariant for each in check_commits([*CHAIN, CHAIN[0]])} == {"C2", "C3"}
    conflicted = reply("A", None, "Conflicted")
    assert len(check_replies([*gone, BURY, conflicted])) == 1
    assert check_replies([*gone, DROP, conflicted]) == []
