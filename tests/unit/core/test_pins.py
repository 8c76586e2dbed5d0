"""Patterns match like SQL's LIKE, and pins select nodes of a fleet."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Invalid
from jobsync.core.clock import Wall
from jobsync.core.pins import (
    Pin,
    check_pattern,
    in_force,
    like,
    merge,
    pattern_in_force,
    read_sheet,
    resolve,
    write_sheet,
)

NAMES = {1: "prod-01", 2: "prod-02-gpu", 3: "test-01"}


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("prod-01", ["prod-01"], ["prod-012", "Prod-01", "xprod-01"]),
        ("prod-%", ["prod-", "prod-1", "prod-a\nb"], ["prod", "a-prod-1"]),
        ("%-gpu", ["-gpu", "a-gpu"], ["a-gpu-1", "a-GPU"]),
        ("%special%", ["special", "a special one"], ["specia"]),
        ("node-_", ["node-1", "node-ä", "node-\n"], ["node-", "node-10"]),
        (r"node\_1", ["node_1"], ["node-1", r"node\_1"]),
        (r"100\%", ["100%"], ["1000", "100"]),
        (r"a\\b", [r"a\b"], ["ab", r"a\\b"]),
        (r"\a", ["a"], [r"\a"]),
        ("a.c", ["a.c"], ["abc"]),
        ("[ab]%", ["[ab]1"], ["a1"]),
        ("%", ["", "anything"], []),
        ("_%_", ["ab", "abc"], ["a", ""]),
    ],
)
def test_patterns_match_as_in_postgresql(
    pattern: str, matching: list[str], other: list[str]
) -> None:
    """Only wildcards and escapes are special."""
    assert all(like(pattern)(name) for name in matching)
    assert not any(like(pattern)(name) for name in other)


@given(st.text(), st.text())
def test_an_escaped_name_matches_itself_alone(name: str, other: str) -> None:
    """Every name has a pattern that matches only itself."""
    escaped = name.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
    assert like(escaped)(name)
    assert like(escaped)(other) == (name == other)


@pytest.mark.parametrize(("pattern", "fix"), [("", "Use a name"), ("a%\\", r"Write \\\\")])
def test_malformed_patterns_are_refused(pattern: str, fix: str) -> None:
    """PostgreSQL refuses a backslash at the end, too."""
    with pytest.raises(Invalid, match=f"node_pattern.*{fix}"):
        check_pattern(pattern)


def test_an_expired_pin_is_not_in_force() -> None:
    """It expires exactly at its moment."""
    for_ever, until = pin("a", "%"), pin("b", "%", expires_at=100.0)
    assert in_force([for_ever, until], Wall(99.9)) == [for_ever, until]
    assert in_force([for_ever, until], Wall(100.0)) == [for_ever]


def pin(task: str, *patterns: str, token: int = 5, expires_at: float | None = None) -> Pin:
    """Return a pin of a task."""
    return Pin(task=task, token=token, patterns=patterns, expires_at=expires_at)


def nodes(pins: list[Pin], task: str) -> set[int]:
    """Return the nodes that may do a task."""
    return places(resolve(pins, NAMES).tasks[task])


def places(bits: int) -> set[int]:
    """Return the indexes in a bit set."""
    return {place for place in range(10) if bits >> place & 1}


def test_the_first_pattern_that_anybody_matches_is_in_force() -> None:
    """The others are fallbacks, and are not added to it."""
    assert nodes([pin("t", "old-%", "prod-%", "%")], "t") == {1, 2}
    assert nodes([pin("t", "test-01", "prod-%")], "t") == {3}
    assert pattern_in_force(["old-%", "prod-%", "%"], NAMES.values()) == "prod-%"


def test_a_pin_without_a_match_selects_no_node() -> None:
    """It does not affect its token."""
    wishes = resolve([pin("t", "old-%")], NAMES)
    assert places(wishes.tasks["t"]) == set()
    assert wishes.tokens == {}
    assert pattern_in_force(["old-%"], NAMES.values()) is None


def test_several_pins_of_a_task_are_alternatives() -> None:
    """A list of nodes may be registered one by one."""
    assert nodes([pin("t", "prod-01"), pin("t", "test-01"), pin("t", "gone")], "t") == {1, 3}


def test_two_runs_of_one_name_both_match() -> None:
    """A pattern matches every node with the name."""
    wishes = resolve([pin("t", "twin")], {1: "twin", 2: "twin", 3: "other"})
    assert places(wishes.tasks["t"]) == {1, 2}


def test_a_token_goes_to_nodes_that_satisfy_all_its_tasks() -> None:
    """The nodes that all tasks of the token allow."""
    wishes = resolve([pin("t", "prod-%"), pin("u", "%-gpu"), pin("v", "gone")], NAMES)
    assert {token: places(bits) for token, bits in wishes.tokens.items()} == {5: {2}}


def test_where_pins_disagree_the_majority_counts() -> None:
    """A token goes to a node that satisfies the most."""
    pins = [pin("t", "prod-01"), pin("u", "test-01"), pin("v", "test-01"), pin("w", "prod-%")]
    assert places(resolve(pins, NAMES).tokens[5]) <= {1, 3}
    assert places(resolve([*pins, pin("x", "prod-%")], NAMES).tokens[5]) == {1}


def test_tokens_whose_pins_are_tied_are_spread_over_the_nodes() -> None:
    """All of them alike, and each always goes to the same one."""
    for count in (2, 3):
        names = [*NAMES.values()][:count]
        pins = [pin(f"t{token}-{name}", name, token=token) for token in range(12) for name in names]
        found = resolve(pins, NAMES).tokens
        assert found == resolve(pins[::-1], NAMES).tokens
        chosen = Counter(place for bits in found.values() for place in places(bits))
        assert chosen == dict.fromkeys(range(1, count + 1), 12 // count)


VARIANTS: dict[str, list[Any]] = {
    "task": ["t", "u"],
    "patterns": [("%",), ("a", "b"), ("b", "a")],
    "reason": [None, "", "why"],
    "created_at": [1.0, 1.5, 2.0],
    "expires_at": [None, 10.0, 10.5, 11.0],
}


def test_a_sheet_has_every_pin_as_it_was_registered() -> None:
    """Also pins that differ in one respect alone, in any order, however often it is written."""
    pins = [
        Pin(token=ord(values["task"]), created_by="n1", **values)
        for combination in itertools.product(*VARIANTS.values())
        for values in [dict(zip(VARIANTS, combination, strict=True))]
    ]
    for order in (pins, pins[::-1]):
        sheet = order
        for _ in range(2):
            sheet = read_sheet(write_sheet("n1", sheet), "sheet", ord)
            assert Counter(map(repr, sheet)) == Counter(map(repr, pins))


def test_a_pin_replaces_only_one_with_the_same_task_and_patterns() -> None:
    """Others of the task are alternatives, and stay; of equal ones the newest counts."""
    first = pin("t", "a", "b", expires_at=1.0)
    for second, stays in [
        (pin("t", "a", "b", expires_at=2.0), False),
        (pin("t", "b", "a"), True),
        (pin("t", "a"), True),
        (pin("u", "a", "b"), True),
    ]:
        assert merge([first], [second]) == ([first, second] if stays else [second])
        assert merge([], [first, second]) == ([first, second] if stays else [second])
