"""What must happen to messages in the end, or within a bound, and what they leave behind."""

from typing import Any

import pytest
from message_histories import QueueHistory

from jobsync.testing import Occurrence, check_drained, check_orphans, check_redelivered
from jobsync.testing.outcome_invariants import check_effects, check_results


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        *((state, []) for state in ("completed", "cancelled", "dead", "gone")),
        *((state, ["QL3"]) for state in ("ready", "waiting", "claimed", "blocked", "both")),
    ],
)
def test_every_message_is_finished_in_the_end(state: str, expected: list[str]) -> None:
    """By its last row, whether it was acknowledged or not."""
    world = QueueHistory()
    world.row("x", "completed" if expected else "ready")
    world.row("x", state)
    assert [each.invariant for each in check_drained(world.history)] == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, ["Q1: y: acknowledged, but does not exist"]),
        ({"result": {"y": "x"}}, []),
        ({"result": {"y": "z"}}, ["Q1: z: acknowledged, but does not exist"]),
        ({"error": "OutcomeUnknown"}, []),
    ],
)
def test_what_was_acknowledged_exists(answer: dict[str, Any], expected: list[str]) -> None:
    """Or the message that holds its key does."""
    world = QueueHistory()
    request = world.request("push", messages=[["x", "p", 0.0, 3], ["y", "p", 0.0, 3, {"key": "k"}]])
    world.row("x", "completed", request)
    world.respond(request, **answer)
    world.respond(world.request("redrive"), 1)
    assert [str(each) for each in check_drained(world.history)] == expected


LIVE = {"state": "live"}
SESSION_WRITES: dict[str, dict[str, Any]] = {
    "delete a.1": {"key": "session/a.1", "value": LIVE, "deleted": True},
    "clear a.1": {"key": "session/a.1", "value": None, "deleted": False},
    "renew a.1": {"key": "session/a.1", "value": LIVE, "deleted": False},
    "other a.1": {"key": "a.1", "value": None, "deleted": True},
}


def run(*events: tuple[float, str]) -> list[Occurrence]:
    """Return the history of the message x, and of sessions: states and ends, with their times."""
    world = QueueHistory()
    world.at = 1.0
    world.row("x", "claimed", claim="C1", session="a.1")
    for at, event in events:
        world.at = at
        match event:
            case "claimed" | "extended":
                claim = "C1" if event == "extended" else f"C{at}"
                world.row("x", "claimed", claim=claim, session="a.1")
            case "retry":
                world.row("x", "waiting", trail=f"C1:retry {at}")
            case "end b.1" | "end a.1":
                world.end_session(event.removeprefix("end "))
            case "drop a.1":
                world.note("drop", keys=["other", "session/a.1"])
            case "delete a.1" | "clear a.1" | "renew a.1" | "other a.1":
                world.note("commit", **SESSION_WRITES[event])
            case "tick":
                world.note("tick")
            case state:
                world.row("x", state)
    return world.history


@pytest.mark.parametrize(
    ("events", "late"),
    [
        ([(10, "waiting"), (15, "claimed")], 0),
        ([(10, "waiting"), (15.1, "claimed")], 1),
        ([(10, "waiting"), (15, "dead")], 0),
        ([(10, "waiting"), (15, "tick")], 0),
        ([(10, "waiting"), (15.1, "tick")], 1),
        ([(2, "waiting"), (9, "claimed")], 0),
        ([(2, "waiting"), (9.1, "claimed")], 1),
        ([(2, "waiting"), (9.1, "tick")], 1),
        ([(10, "retry"), (90, "claimed")], 0),
        ([(10, "completed"), (90, "tick")], 0),
        ([(10, "waiting"), (11, "claimed"), (90, "waiting"), (91, "claimed")], 0),
        ([(10, "waiting"), (11, "claimed"), (20, "waiting"), (90, "claimed")], 1),
        ([(10, "waiting"), (20, "claimed"), (30, "waiting"), (40, "tick")], 2),
        ([(10, "waiting"), (11, "claimed"), (90, "tick")], 0),
    ],
)
def test_a_message_is_claimed_again_within_a_bound(
    events: list[tuple[float, str]], late: int
) -> None:
    """Counted from the end of its claim, each time, or from when the bound applies."""
    found = check_redelivered(run(*events), since=4, within=5)
    assert [each.invariant for each in found] == ["QL2"] * late


@pytest.mark.parametrize(
    ("events", "late"),
    [
        *(
            (events, late)
            for end in ("end a.1", "drop a.1", "delete a.1", "clear a.1")
            for events, late in (
                ([(10, end), (15, "waiting")], 0),
                ([(10, end), (15.1, "waiting")], 1),
            )
        ),
        ([(10, "end b.1"), (90, "waiting")], 0),
        ([(10, "renew a.1"), (90, "waiting")], 0),
        ([(10, "other a.1"), (90, "waiting")], 0),
        ([(10, "end a.1"), (15, "tick")], 0),
        ([(10, "end a.1"), (15.1, "tick")], 1),
        ([(2, "end a.1"), (9, "waiting")], 0),
        ([(2, "end a.1"), (9.1, "waiting")], 1),
        ([(10, "end a.1"), (14, "drop a.1"), (16, "waiting")], 1),
        ([(10, "end a.1"), (12, "waiting"), (20, "claimed"), (25, "waiting")], 0),
        ([(10, "end a.1"), (12, "waiting"), (20, "claimed"), (25.1, "waiting")], 1),
        ([(10, "end a.1"), (14, "extended"), (18, "waiting")], 0),
        ([(9, "completed"), (10, "end a.1"), (90, "tick")], 0),
    ],
)
def test_the_claims_of_a_session_that_has_ended_are_ended(
    events: list[tuple[float, str]], late: int
) -> None:
    """Counted from its first end, from its last claim, or from when the bound applies."""
    found = check_orphans(run(*events), since=4, within=5)
    assert [each.invariant for each in found] == ["QL4"] * late


def test_nothing_has_happened() -> None:
    """No check fails for want of a last moment."""
    assert check_drained([]) == check_orphans([], since=0, within=1) == []
    assert check_redelivered([], since=0, within=1) == []


@pytest.mark.parametrize(
    ("state", "epoch", "is_later", "is_again", "expected"),
    [
        ("completed", 2, False, False, 0),
        ("completed", 3, False, False, 1),
        ("claimed", 2, False, False, 1),
        ("completed", 2, True, False, 1),
        ("completed", 2, False, True, 1),
        ("", 2, False, False, 1),
    ],
)
def test_an_effect_is_committed_once_with_the_completion(
    state: str, epoch: int, *, is_later: bool, is_again: bool, expected: int
) -> None:
    """At the same moment, by the delivery that has completed the message."""
    world = QueueHistory()
    world.at = 5.0
    world.row("y", "completed", deliveries=7)
    world.note("effect", id="y", epoch=7)
    if state:
        world.row("x", state, deliveries=2)
    world.at += is_later
    for _ in range(1 + is_again):
        world.note("effect", id="x", epoch=epoch)
    assert [each.invariant for each in check_effects(world.history)] == ["Q29"] * expected


@pytest.mark.parametrize(
    ("epoch", "returned", "result", "expected"),
    [
        (2, "mine", "mine", 0),
        (2, "mine", "other", 1),
        (2, "mine", None, 1),
        (2, None, None, 0),
        (1, "mine", "mine", 1),
    ],
)
def test_a_result_is_what_the_completing_delivery_has_returned(
    epoch: int, returned: str | None, result: str | None, expected: int
) -> None:
    """Neither what another delivery has returned, nor that of another message."""
    world = QueueHistory()
    world.note("returned", id="y", epoch=2, value="other")
    world.note("returned", id="x", epoch=epoch, value=returned)
    world.row("x", "completed", deliveries=2)
    world.row("x", "waiting", deliveries=3)
    world.note("result", id="x", value=result)
    assert [each.invariant for each in check_results(world.history)] == ["Q30"] * expected
