"""What callers of a queue are told is compared with what happened; each lie is found."""

from typing import Any

import pytest
from message_histories import QueueHistory

from jobsync.testing import check_answers

PLACE = {"key": "k", "replace": True}


def find(world: QueueHistory) -> list[str]:
    """Return what is found: the id of the promise, and the problem."""
    return [str(each).partition(": Occurrence(")[0] for each in check_answers(world.history)]


def claimed(world: QueueHistory, name: str, claim: str = "C1", request: int | None = None) -> int:
    """Commit a claim of a message."""
    return world.row(name, "claimed", request, claim=claim)


def settled(
    world: QueueHistory, name: str, move: str = "complete", request: int | None = None
) -> int:
    """Commit the settlement of a claim."""
    return world.row(name, "completed", request, trail=f"C1:{move}")


@pytest.mark.parametrize(
    ("early", "late", "answer", "expected"),
    [
        ("xy", "", {}, ""),
        ("x", "", {}, "Q15: acknowledged, but was not there"),
        ("x", "y", {}, "Q15: acknowledged, but was not there"),
        ("x", "", {"result": {"y": "holder"}}, ""),
        ("xy", "", {"result": {"y": "holder"}}, "Q15: another message holds its key, but it was"),
        ("x", "y", {"result": {"y": "holder"}}, "Q15: another message holds its key, but it was"),
        ("", "", {"result": {"y": "holder"}}, "Q15: acknowledged, but was not there"),
        ("", "", {"error": "Unavailable"}, ""),
        ("y", "", {"error": "Unavailable"}, "Q15: refused, but was there"),
        ("", "y", {"error": "Unavailable"}, "Q15: refused, but was there"),
        ("x", "y", {"error": "OutcomeUnknown"}, ""),
    ],
)
def test_a_push(early: str, late: str, answer: dict[str, Any], expected: str) -> None:
    """What is acknowledged is there, what is refused never, and what a key keeps out neither."""
    world = QueueHistory()
    messages = [["x", "p", 0.0, 3], ["y", "p", 0.0, 3, {"key": "k"}]]
    request = world.request("push", messages=messages)
    for name in early:
        world.row(name, "ready", request)
    world.respond(request, **answer)
    for name in late:
        world.row(name, "ready", request)
    assert [each[: len(expected)] for each in find(world)] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("place", "payload", "is_by_other", "expected"),
    [
        (PLACE, "new", False, 0),
        (PLACE, "old", False, 1),
        (PLACE, "new", True, 1),
        ({"key": "k"}, "old", False, 0),
    ],
)
def test_a_push_that_replaces(
    place: dict[str, Any], payload: str, *, is_by_other: bool, expected: int
) -> None:
    """The message that holds the key has got the new payload, by this very request."""
    world = QueueHistory()
    first = world.request("push", messages=[["holder", "p", 0.0, 3, {"key": "k"}]])
    world.row("holder", "ready", first)
    message = ["x", "new", 0.0, 3, place]
    other = world.request("push", messages=[["y", "new", 0.0, 3, PLACE]])
    request = world.request("push", messages=[message])
    world.row("holder", "waiting", other if is_by_other else request, payload=payload)
    world.respond(request, {"x": "holder"})
    assert len(find(world)) == expected


@pytest.mark.parametrize("when", ["before", "during", "after", "never"])
def test_a_claim(when: str) -> None:
    """A message that is returned was claimed between the request and the response."""
    world = QueueHistory()
    for name in "xy":
        world.row(name, "ready")
    request = -1
    for moment in ("before", "during", "after"):
        if moment == "during":
            request = world.request("claim", limit=2, suspects=False)
            claimed(world, "y", "C2", request)
        if moment == when:
            claimed(world, "x")
        if moment == "during":
            world.respond(request, [["x", "C1", 3], ["y", "C2", 3]])
    wrong = "Q15: x: reported as claimed, but was not"
    assert find(world) == ([] if when == "during" else [wrong])


def test_a_claim_of_too_many() -> None:
    """There are no more messages than requested, and each has the claim that is named."""
    world = QueueHistory()
    request = world.request("claim", limit=1, suspects=False)
    for name in "xy":
        claimed(world, name, f"C-{name}", request)
    world.respond(request, [["x", "C-x", 3], ["y", "C-x", 3]])
    assert find(world) == [
        "Q10: claimed 2 messages, and not 1 at most",
        "Q15: y: reported as claimed, but was not",
    ]


ACCEPTED, STALE = "Q15: x: reported as settled, but was not", "Q15: x: reported as stale, but was"


@pytest.mark.parametrize(
    ("events", "is_accepted", "expected"),
    [
        (["complete", "reply"], True, ""),
        (["reply"], True, ACCEPTED),
        (["reply", "complete"], True, ACCEPTED),
        (["retry", "reply"], True, ACCEPTED),
        (["end", "reply"], True, ACCEPTED),
        (["complete", "gone", "reply"], True, ""),
        (["reply"], False, f"{STALE} not"),
        (["reply", "end"], False, f"{STALE} not"),
        (["end", "reply"], False, ""),
        (["retry", "reply"], False, ""),
        (["complete", "reply"], False, f"{STALE} settled in this way"),
        (["complete", "gone", "reply"], False, ""),
        (["complete", "reply", "gone"], False, f"{STALE} settled in this way"),
    ],
)
def test_a_settlement(events: list[str], *, is_accepted: bool, expected: str) -> None:
    """It is accepted if the claim was ended in this very way, and stale only if it was not."""
    world = QueueHistory()
    for name in "xy":
        claimed(world, name)
    receipts = [["y", "C1", 2, "retry", 0.0], ["x", "C1", 2, "complete", 0.0]]
    request = world.request("settle", receipts=receipts)
    settled(world, "y", "retry", request)
    for event in events:
        match event:
            case "reply":
                world.respond(request, [True, is_accepted])
            case "gone":
                world.row("x", "gone")
            case "end":
                world.row("x", "waiting")
            case move:
                settled(world, "x", move)
    assert find(world) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("error", "is_own", "expected"),
    [("Unavailable", True, 1), ("Unavailable", False, 0), ("OutcomeUnknown", True, 0)],
)
def test_a_settlement_that_is_refused(error: str, *, is_own: bool, expected: int) -> None:
    """It has not happened, unless by another request."""
    world = QueueHistory()
    claimed(world, "x")
    receipts = [["y", "C1", 2, "complete", 0.0], ["x", "C1", 2, "complete", 0.0]]
    requests = [world.request("settle", receipts=receipts) for _ in range(2)]
    settled(world, "x", request=requests[is_own])
    world.respond(requests[1], error=error)
    assert len(find(world)) == expected


@pytest.mark.parametrize(
    ("events", "is_extended", "is_true"),
    [
        (["request", "extend", "reply"], True, True),
        (["extend", "request", "reply"], True, False),
        (["request", "reply", "extend"], True, False),
        (["extend", "request", "extend", "reply"], True, True),
        (["request", "settle", "reply"], True, True),
        (["request", "end", "reply"], True, False),
        (["request", "end", "reply"], False, True),
        (["end", "request", "reply"], False, True),
        (["request", "settle", "reply"], False, True),
        (["request", "reply", "end"], False, False),
        (["request", "extend", "reply"], False, False),
    ],
)
def test_an_extension(events: list[str], *, is_extended: bool, is_true: bool) -> None:
    """The claim was written between the request and the response, or had ended before it."""
    world = QueueHistory()
    for name in "xy":
        claimed(world, name)
    request = -1
    for event in events:
        match event:
            case "request":
                receipts = [["y", "C1", 2], ["x", "C1", 2]]
                request = world.request("extend", receipts=receipts)
                claimed(world, "y", request=request)
            case "reply":
                world.respond(request, [True, is_extended])
            case "extend":
                claimed(world, "x")
            case "settle":
                settled(world, "x")
            case "end":
                world.row("x", "waiting")
    said = "extended" if is_extended else "stale"
    assert find(world) == ([] if is_true else [f"Q15: x: reported as {said}, but was not"])


def test_other_calls_are_answered_freely() -> None:
    """What they return is not about claims."""
    world = QueueHistory()
    world.respond(world.request("redrive"), 3)
    world.respond(world.request("end_claims", dead=[], keep=[]), [["x", "waiting", 1]])
    assert find(world) == []
