"""Entries that are missing or left over, and lookups that are wrong, are found."""

from typing import Any

import pytest
from record_histories import BY_COLOR, EXPIRY, Records, by_color, expiring, time

from jobsync.core.expiry import rank_of_time
from jobsync.stores.contract import BURIAL_AGE
from jobsync.testing.record_invariants import find_leftovers

RED: str = by_color().rank({"color": "red"}) or ""
BLUE: str = by_color().rank({"color": "blue"}) or ""


@pytest.mark.parametrize(
    ("entries", "value", "wrong"),
    [
        ([("x", RED, "n1", BY_COLOR)], {"color": "red"}, 0),
        ([], {"color": "red"}, 1),
        ([("x", BLUE, "n1", BY_COLOR)], {"color": "red"}, 1),
        ([("x", RED, "n0", BY_COLOR)], {"color": "red"}, 1),
        ([("y", RED, "n1", BY_COLOR)], {"color": "red"}, 1),
        ([("x", RED, "n1", "other-1")], {"color": "red"}, 1),
        ([("x", RED, "n0", BY_COLOR)], {"color": "red", "_entries": {BY_COLOR: "n0"}}, 0),
        ([("x", RED, "n1", BY_COLOR)], {"color": "red", "_entries": {"other-1": "n0"}}, 0),
        ([("x", RED, "n1", BY_COLOR)], {"color": "red", "_entries": {BY_COLOR: "n0"}}, 1),
        ([], {"size": 1}, 0),
    ],
)
def test_a_record_has_its_entry(
    entries: list[tuple[str, str, str, str]], value: dict[str, Any], wrong: int
) -> None:
    """In the index, with its rank, and with the nonce that it names."""
    world = Records(by_color())
    for entry in entries:
        world.add(*entry)
    world.write("x", "n1", **value)
    found = world.find()
    assert [each[:4] for each in found] == ["X4: "] * wrong, found
    world.history[0].details["value"]["indexes"][0]["is_ready"] = False
    assert world.find() == []


def test_an_index_is_ready_when_it_has_all() -> None:
    """Each record without its entry is found at the moment at which the index becomes ready."""
    world = Records(by_color(is_ready=False))
    world.add("x", RED, "n1")
    for number, name in enumerate("xyz", 1):
        world.write(name, f"n{number}", color="red")
    world.note("deleting", resource="mails", id="z")
    world.remove("z")
    assert world.find() == []
    world.define(by_color())
    (found,) = world.find()
    assert found.startswith("X4: ")
    assert "y has no entry" in found


@pytest.mark.parametrize(("dropped", "wrong"), [("n1", 1), ("n0", 0)])
def test_an_entry_that_a_record_names_is_not_dropped(dropped: str, wrong: int) -> None:
    """Another one may be, and after the record its own too."""
    world = Records(by_color())
    world.add("x", RED, "n0")
    world.add("x", RED, "n1")
    world.write("x", "n1", color="red")
    world.drop("other", world.key("x", RED, dropped))
    assert [each[:4] for each in world.find()] == ["X4: "] * wrong
    world = Records(by_color())
    world.add("x", RED, "n1")
    world.write("x", "n1", color="red")
    world.note("deleting", resource="mails", id="x")
    world.remove("x")
    world.drop(world.key("x", RED, "n1"))
    assert world.find() == []


OLD = BURIAL_AGE + 10
"""Seconds after which an entry from the beginning is old; ten are the slack."""


@pytest.mark.parametrize(
    ("rank", "nonce", "at", "expected"),
    [
        (RED, "n1", OLD + 1, 0),
        (RED, "n0", OLD + 1, 1),
        (BLUE, "n1", OLD + 1, 1),
        (RED, "n0", OLD, 0),
        (BLUE, "n1", OLD, 0),
    ],
)
def test_an_entry_that_no_record_names_is_gone_soon(
    rank: str, nonce: str, at: float, expected: int
) -> None:
    """Once no late write can use it."""
    world = Records(by_color())
    world.add("x", RED, "n1")
    world.write("x", "n1", color="red")
    world.add("x", rank, nonce)
    world.at = at
    world.note("end")
    found = [str(each) for each in find_leftovers(world.history, slack=10.0)]
    assert [each[:20] for each in found] == [f"XL2: mails: {BY_COLOR}"[:20]] * expected, found


@pytest.mark.parametrize(("expires", "expected"), [(OLD - 10, 1), (OLD + 900, 0)])
def test_an_entry_of_the_expiry_is_gone_when_a_sweep_has_passed(
    expires: float, expected: int
) -> None:
    """One that no record names, and that lies in the future, was not read yet."""
    world = Records(expiring(is_ready=True))
    rank = rank_of_time(time(expires), is_rounded_up=True)
    world.add("x", rank, "n1", EXPIRY)
    world.at = OLD + 1
    world.note("end")
    found = [each.invariant for each in find_leftovers(world.history, slack=10.0)]
    assert found == ["XL2"] * expected


def test_entries_of_a_deleted_record_are_gone_soon() -> None:
    """As those of a record that names another."""
    world = Records(by_color())
    world.add("x", RED, "n1")
    world.write("x", "n1", color="red")
    world.remove("x")
    world.at = OLD + 1
    world.note("end")
    assert [each.invariant for each in find_leftovers(world.history, slack=10.0)] == ["XL2"]


@pytest.mark.parametrize(("is_dropped", "expected"), [(False, ["XL2"]), (True, [])])
def test_a_former_index_is_gone_in_the_end(expected: list[str], *, is_dropped: bool) -> None:
    """With all its entries."""
    world = Records(by_color("by_color-0"))
    world.add("x", RED, "n1", "by_color-0")
    world.define(by_color())
    if is_dropped:
        world.drop(world.key("x", RED, "n1", "by_color-0"))
    assert [each.invariant for each in find_leftovers(world.history, slack=10.0)] == expected


@pytest.mark.parametrize(("is_ready", "expected"), [(True, []), (False, ["XL3"])])
def test_an_index_is_ready_in_the_end(expected: list[str], *, is_ready: bool) -> None:
    """Whatever its rule is."""
    for index in (by_color(is_ready=is_ready), expiring(is_ready=is_ready)):
        world = Records(index)
        assert [each.invariant for each in find_leftovers(world.history, slack=9.0)] == expected


def test_what_has_expired_is_among_the_leftovers() -> None:
    """With everything else that should be gone."""
    world = Records(expiring(is_ready=False))
    world.write("x", "n1", expires_at=time(1))
    world.at = 12.0
    world.note("end")
    found = [each.invariant for each in find_leftovers(world.history, slack=10.0)]
    assert found == ["XL1", "XL3"]


LOOKUP: dict[str, Any] = {"color": "red", "size": 1}


@pytest.mark.parametrize(
    ("before", "during", "found", "problem"),
    [
        ([("n1", LOOKUP)], [], ["n1"], ""),
        ([("n1", LOOKUP)], [], [], "was not found"),
        ([("n1", LOOKUP)], [], ["n1", "n1"], "found twice"),
        ([("n1", LOOKUP)], [], ["n9"], "and was found"),
        ([("n1", {"color": "red"})], [], ["n1"], "and was found"),
        ([("n1", {"color": "red"})], [], [], ""),
        ([("n1", {"color": "blue", "size": 1})], [], ["n1"], "and was found"),
        ([("n1", {**LOOKUP, "more": 2})], [], [], "was not found"),
        ([("n1", LOOKUP), ("n2", LOOKUP)], [], ["n1"], "and was found"),
        ([("n1", LOOKUP)], [("n2", LOOKUP)], ["n1"], ""),
        ([("n1", LOOKUP)], [("n2", LOOKUP)], ["n2"], ""),
        ([("n1", LOOKUP)], [("n2", LOOKUP)], [], "was not found"),
        ([("n1", LOOKUP)], [("n2", {})], [], ""),
        ([("n1", LOOKUP)], [("n2", {})], ["n1"], ""),
        ([("n1", {})], [("n2", LOOKUP)], [], ""),
        ([("n1", {})], [("n2", LOOKUP)], ["n2"], ""),
        ([], [("n1", LOOKUP)], [], ""),
        ([], [("n1", LOOKUP)], ["n1"], ""),
        ([("n1", LOOKUP)], [("n2", None)], [], ""),
        ([("n1", LOOKUP), ("n2", None)], [], ["n1"], "and was found"),
        ([("n1", LOOKUP), ("n2", None)], [], [], ""),
    ],
)
def test_a_lookup_finds_what_belongs_there(
    before: list[tuple[str, dict[str, Any] | None]],
    during: list[tuple[str, dict[str, Any] | None]],
    found: list[str],
    problem: str,
) -> None:
    """What was there all the time, and nothing that was never there since the lookup began."""
    world = Records()
    world.note("deleting", resource="mails", id="x")
    world.write("other", "n1-other", title="notes", **LOOKUP)
    since = len(world.history)
    for moment in (before, during):
        for nonce, value in moment:
            if value is None:
                world.remove("x", nonce)
            else:
                world.write("x", nonce, **value)
        if moment is before:
            since = len(world.history)
            world.note("between")
    pairs = [["x", nonce] for nonce in found]
    world.note("lookup", resource="mails", fields=LOOKUP, since=since, found=pairs)
    # What comes later changes nothing.
    world.write("x", "n8", color="green")
    problems = world.find()
    assert len(problems) == bool(problem), problems
    assert all(each.startswith("X5: ") and problem in each for each in problems)
