"""Claims that exceed a limit of their queue are found, and those that do not are not."""

from typing import Any

import pytest
from message_histories import QUEUE, QueueHistory

from jobsync.testing import check_limits

UNLIMITED: dict[str, Any] = {
    "max_concurrency": None,
    "group_concurrency": 100,
    "rate": None,
    "burst": 1,
}
PLACES = {"a": "g", "b": "g", "c": "h", "d": "h", "e": "", "f": ""}
"""The group of each message."""


def find(limits: dict[str, Any], events: list[tuple[float, str, str]], **row: Any) -> list[str]:
    """Return what is found; each event has a time, messages that one commit changes, a state."""
    world = QueueHistory()
    places = {name: [{"group": group}] if group else [] for name, group in PLACES.items()}
    world.request("push", messages=[[name, "p", 0.0, 3, *place] for name, place in places.items()])
    for name in PLACES:
        world.row(name, "ready", **row)
    claim = world.request("claim", limit=9, suspects=False, limits={**UNLIMITED, **limits})
    for at, names, state in events:
        world.at = at
        world.note("between")
        for name in names:
            world.row(name, state, claim, **row)
    return [str(each) for each in check_limits(world.history)]


@pytest.mark.parametrize(
    ("limits", "events", "found"),
    [
        ({"max_concurrency": 2}, [(1, "ac", "claimed")], 0),
        ({"max_concurrency": 2}, [(1, "ac", "claimed"), (2, "e", "claimed")], 1),
        ({"max_concurrency": 2}, [(1, "ace", "claimed")], 1),
        *(
            (
                {"max_concurrency": 2},
                [(1, "ac", "claimed"), (2, "a", state), (3, "e", "claimed")],
                0,
            )
            for state in ("completed", "waiting", "dead", "gone")
        ),
        ({"max_concurrency": 1}, [(1, "a", "claimed"), (2, "a", "claimed")], 0),
        ({"max_concurrency": 1}, [(1, "ac", "claimed"), (2, "a", "claimed")], 1),
        ({}, [(1, "abcdef", "claimed")], 0),
        ({"group_concurrency": 1}, [(1, "acef", "claimed")], 0),
        ({"group_concurrency": 1}, [(1, "ab", "claimed")], 1),
        ({"group_concurrency": 1}, [(1, "abcd", "claimed")], 2),
        ({"group_concurrency": 1}, [(1, "a", "claimed"), (2, "b", "claimed")], 1),
        (
            {"group_concurrency": 1},
            [(1, "a", "claimed"), (2, "a", "completed"), (3, "b", "claimed")],
            0,
        ),
        ({"group_concurrency": 1}, [(1, "ab", "claimed"), (2, "c", "claimed")], 1),
        ({"group_concurrency": 2, "max_concurrency": 3}, [(1, "abcd", "claimed")], 1),
        ({"rate": 1.0, "burst": 2}, [(1, "ac", "claimed")], 0),
        ({"rate": 1.0, "burst": 2}, [(1, "ace", "claimed")], 1),
        ({"rate": 1.0, "burst": 2}, [(1, "ac", "claimed"), (1.95, "e", "claimed")], 0),
        ({"rate": 1.0, "burst": 2}, [(1, "ac", "claimed"), (1.9, "e", "claimed")], 1),
        ({"rate": 0.5, "burst": 2}, [(1, "ac", "claimed"), (2.95, "e", "claimed")], 0),
        ({"rate": 0.5, "burst": 2}, [(1, "ac", "claimed"), (1.95, "e", "claimed")], 1),
        ({"rate": 1.0, "burst": 1}, [(1, "a", "claimed"), (90, "ce", "claimed")], 1),
        (
            {"rate": 1.0, "burst": 1},
            [(1, "a", "claimed"), (2, "c", "claimed"), (3, "e", "claimed")],
            0,
        ),
        ({"rate": 1.0, "burst": 1}, [(1, "a", "claimed"), (1.1, "a", "claimed")], 0),
        (
            {"rate": 1.0, "burst": 1},
            [(1, "a", "claimed"), (1.1, "a", "waiting"), (1.2, "a", "claimed")],
            1,
        ),
        (
            {"rate": 1.0, "burst": 1},
            [(1, "acef", "claimed"), (2, "b", "claimed"), (3, "d", "claimed")],
            1,
        ),
    ],
)
def test_the_limits_of_a_queue(
    limits: dict[str, Any], events: list[tuple[float, str, str]], found: int
) -> None:
    """At a time, of a group, and in a time: a claim that exceeds one is found once for each."""
    problems = find(limits, events)
    assert len(problems) == found, problems
    assert all(each.startswith("Q28: ") for each in problems)


def test_each_queue_has_limits_of_its_own() -> None:
    """A queue without any is not checked, and does not count for another."""
    events = [(1.0, "ab", "claimed")]
    assert len(find({"max_concurrency": 1}, events, queue=QUEUE)) == 1
    assert find({"max_concurrency": 1}, events, queue="letters") == []
    world = QueueHistory()
    for number in range(5):
        world.row(f"m{number}", "claimed")
    assert check_limits(world.history) == []
