"""What sweeps, archives and verbs break is found, and what nearly does is not."""

from typing import Any

import pytest
from record_histories import Records, expiring, time

from jobsync.database.definition import IndexState
from jobsync.testing.record_invariants import find_overdue

NOW = 20.0
SOFT = expiring("soft-delete", delete_field="deleted_at")
ARCHIVE = expiring("archive", archive_resource="old")
HARD, CALLBACK = expiring(), expiring("callback")
MOVE: dict[str, Any] = {"resource": "old", "id": "x2", "at": time(10), "token": "t"}
EXPIRED: dict[str, Any] = {"mark": "m", "text": "hello", "expires_at": time(NOW)}
LEFT = "X1 removed, and does not expire"


def check(found: list[str], expected: str) -> None:
    """Check that exactly this is found; several are separated by "; "."""
    wanted = expected.split("; ") if expected else []
    assert len(found) == len(wanted), found
    for each in wanted:
        invariant, _, text = each.partition(" ")
        assert any(one.startswith(f"{invariant}: ") and text in one for one in found), found


@pytest.mark.parametrize(
    ("index", "old", "new", "expected"),
    [
        (HARD, {}, None, ""),
        (HARD, {"expires_at": time(NOW + 0.05)}, None, ""),
        (HARD, {"expires_at": time(NOW + 0.1)}, None, "X1 0.100 s before its expiry"),
        (HARD, {"expires_at": "never"}, None, None),
        (None, {}, None, LEFT),
        (expiring(ttl=5.0), {"_created_at": time(NOW - 5)}, None, ""),
        (expiring(ttl=5.0), {"_created_at": time(NOW - 4)}, None, "X1 1.000 s before"),
        (expiring(ttl=5.0), {}, None, LEFT),
        (expiring(field="until"), {}, None, LEFT),
        (expiring(field="until"), {"until": time(NOW)}, None, ""),
        (ARCHIVE, {}, None, "X2 removed, and not archived"),
        (SOFT, {}, None, "X3 removed, and not marked"),
        (SOFT, {"deleted_at": time(1)}, None, f"{LEFT}; X3 removed, and not marked"),
        (CALLBACK, {}, None, "X3 the callback did not say so"),
        (SOFT, {}, {"deleted_at": time(1)}, ""),
        (SOFT, {}, {"deleted_at": time(1), "_updated_at": 2, "_entries": {}}, ""),
        (SOFT, {}, {"deleted_at": time(1), "text": "bye"}, "X3 another field was changed"),
        (SOFT, {}, {"text": "bye"}, "X3 changed, but not as"),
        (SOFT, {}, {"_archiving": MOVE}, "X3 changed, but not as"),
        (SOFT, {"expires_at": time(21)}, {"deleted_at": time(1)}, "X1 changed 1.000 s before"),
        (ARCHIVE, {}, {"_archiving": MOVE}, ""),
        (ARCHIVE, {}, {"deleted_at": time(1)}, "X3 changed, but not as"),
        (ARCHIVE, {}, {"_archiving": MOVE, "text": "bye"}, "X3 another field was changed"),
        (HARD, {}, {"text": "bye"}, "X3 changed, but not as"),
        (HARD, {}, {"mark": "n", "text": "bye"}, ""),
        (ARCHIVE, {"_archiving": MOVE}, {"_entries": {}}, ""),
        (ARCHIVE, {"_archiving": MOVE}, {"mark": "n"}, "X3 while it is being archived"),
        (ARCHIVE, {"_archiving": MOVE}, {"text": "bye"}, "X3 while it is being archived"),
        (ARCHIVE, {"_archiving": MOVE}, None, "X2 removed, and not archived"),
    ],
)
def test_what_happens_to_a_record_by_itself(
    index: IndexState | None, old: dict[str, Any], new: dict[str, Any] | None, expected: str | None
) -> None:
    """Only after its expiry, as its rule says, and nothing else in it is changed."""
    if expected is None:
        old = {"expires_at": time(900)}
        expected = "X1 880.000 s before"
    world = Records(*([index] if index else []))
    value = {**EXPIRED, **old}
    world.write("x", "n1", **value)
    world.at = NOW
    if new is None:
        world.remove("x")
    else:
        world.write("x", "n2", **{**value, **new})
    check(world.find(), expected)


@pytest.mark.parametrize(
    ("node", "title", "name", "expected"),
    [
        ("a", "mails", "x", ""),
        ("b", "mails", "x", LEFT),
        ("a", "old", "x", LEFT),
        ("a", "mails", "y", LEFT),
    ],
)
def test_a_user_deletes_a_record(node: str, title: str, name: str, expected: str) -> None:
    """This one, from this process, whether it has expired or not."""
    world = Records()
    world.write("x", "m")
    world.note("deleting", node, resource=title, id=name)
    world.remove("x")
    check(world.find(), expected)


def test_a_record_that_is_dropped_leaves_no_trace() -> None:
    """Only entries are dropped."""
    world = Records()
    world.write("x", "m")
    world.drop("other", "data/mails/x")
    check(world.find(), "X1 without a trace")


@pytest.mark.parametrize(
    ("name", "mark", "verdict", "expires", "expected"),
    [
        ("x", "m", True, NOW, ""),
        ("x", "m", False, NOW, "X3 did not say so"),
        ("x", "old", True, NOW, "X3 did not say so"),
        ("x", "m", True, NOW + 1, "X1 a callback was asked 1.000 s before; X1 removed 1.000 s"),
    ],
)
def test_a_callback_decides(
    name: str, mark: str, expires: float, expected: str, *, verdict: bool
) -> None:
    """About the record as it was asked about it, once it has expired."""
    world = Records(CALLBACK)
    world.write(name, "old", expires_at=time(1))
    world.write(name, "m", expires_at=time(expires))
    world.at = NOW
    world.note("expiring", resource="mails", id=name, mark=mark, verdict=verdict)
    world.remove(name)
    check(world.find(), expected)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["m", "n"], ""),
        (["m", "n", "m"], "X3 an earlier version"),
        (["m", None, "m"], "X3 an earlier"),
    ],
)
def test_an_earlier_version_does_not_come_back(marks: list[str | None], expected: str) -> None:
    """Not over another one, and not after a deletion."""
    world = Records()
    world.note("deleting", resource="mails", id="x")
    for number, mark in enumerate(marks):
        if mark is None:
            world.remove("x")
        else:
            world.write("x", f"n{number}", mark=mark)
    check(world.find(), expected)


COPY = {"archived_from": "mails", "original_id": "x", "mark": "m", "text": "hello"}


@pytest.mark.parametrize(
    ("moving", "name", "copy", "expected"),
    [
        ({"_archiving": MOVE}, "x2", {}, ""),
        ({"_archiving": MOVE}, "x2", {"_created_at": 9, "id": "x2", "note": "more"}, ""),
        ({"_archiving": MOVE}, "x2", {"text": "bye"}, "X3 the copy differs"),
        ({"_archiving": MOVE}, "x3", {}, "X2 not being moved"),
        ({}, "x2", {}, "X2 not being moved"),
        ({"_archiving": MOVE}, "x2", {"original_id": "y"}, "X2 not being moved"),
        ({"_archiving": MOVE, "_created_at": 3, "id": "x"}, "x2", {}, ""),
        ({"_archiving": MOVE, "more": 1}, "x2", {}, "X3 the copy differs"),
    ],
)
def test_a_copy_in_an_archive(
    moving: dict[str, Any], name: str, copy: dict[str, Any], expected: str
) -> None:
    """It is of a record that is being moved to it, and has what that has."""
    world = Records(ARCHIVE)
    world.write("x", "m", text="hello", **moving)
    world.write(name, "c1", title="old", **{**COPY, **copy})
    check(world.find(), expected)


def test_a_record_is_removed_when_its_copy_is_there() -> None:
    """The copy is the only one, and may be changed by then."""
    world = Records(ARCHIVE)
    world.write("x", "m", text="hello", expires_at=time(1), _archiving=MOVE)
    world.write("x2", "c1", title="old", **COPY, expires_at=time(1))
    world.write("x2", "c2", title="old", **{**COPY, "text": "changed", "mark": "new"})
    world.remove("x")
    check(world.find(), "")
    world.write("x3", "c3", title="old", **COPY)
    check(world.find(), "X2 has another copy; X2 not being moved")


@pytest.mark.parametrize(
    ("expires", "verdict", "is_copied", "slack", "expected"),
    [
        (10.0, None, False, 9.0, "XL1 expired 10 s ago"),
        (10.0, None, False, 10.0, ""),
        (10.0, False, False, 9.0, ""),
        (10.0, True, False, 9.0, "XL1 expired 10 s ago"),
        (None, None, False, 0.0, ""),
        (10.0, None, True, 9.0, "XL1 expired 10 s ago; X2 archived, and still there"),
        (10.0, None, True, 10.0, ""),
    ],
)
def test_what_has_expired_is_gone_soon(
    expires: float | None, slack: float, expected: str, *, verdict: bool | None, is_copied: bool
) -> None:
    """Unless a callback has kept it; a record that is archived is not there as well."""
    world = Records(CALLBACK)
    value: dict[str, Any] = {} if expires is None else {"expires_at": time(expires)}
    world.write("x", "m", **value)
    world.write("y", "n", expires_at=time(1))
    world.at = NOW
    if verdict is not None:
        world.note("expiring", resource="mails", id="x", mark="m", verdict=verdict)
    if is_copied:
        world.write("x2", "c1", title="old", **{**COPY, "mark": "m"})
    world.note("expiring", resource="mails", id="y", mark="n", verdict=True)
    world.remove("y")
    check([str(each) for each in find_overdue(world.history, slack=slack)], expected)


@pytest.mark.parametrize(
    ("outcome", "is_written", "is_confirmed", "wrong"),
    [
        ("written", True, False, 0),
        ("written", False, False, 1),
        ("unwritten", True, False, 1),
        ("unwritten", False, False, 0),
        ("unknown", True, False, 0),
        ("unknown", False, False, 0),
        ("unknown", True, True, 1),
    ],
)
def test_a_verb_says_whether_it_has_written(
    outcome: str, wrong: int, *, is_written: bool, is_confirmed: bool
) -> None:
    """Of each of its records; it knows what was confirmed, and what comes later counts."""
    world = Records()
    world.write("w", "w")
    world.note("verb", marks=["w", "x"], outcomes=["written", outcome])
    world.note("reply", nonce="other", outcome="Applied")
    world.note("reply", nonce="n1", outcome="Unknown")
    if is_written:
        world.write("x", "n1", mark="x")
    if is_confirmed:
        world.note("reply", nonce="n1", outcome="Applied")
    found = world.find()
    assert [each[:16] for each in found] == ["X6: x is said to"] * wrong
