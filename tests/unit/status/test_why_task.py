"""What a task is said to wait for."""

from typing import Any

import pytest

from jobsync.jobs.foreign_claims import Claim
from jobsync.status.jobs import PinStatus, TaskStatus
from jobsync.status.why import explain_task


def pin(in_force: str | None) -> PinStatus:
    """Make a pin."""
    return PinStatus(
        task_id="t",
        token=1,
        patterns=("gpu-%",),
        in_force=in_force,
        reason=None,
        created_by="admin",
        expires=None,
    )


def claim(state: Any) -> Claim:
    """Make a claim by a node."""
    return Claim(
        task="t",
        token=1,
        date="2026-01-01",
        node="a",
        owner="w.1",
        number=1,
        run=2,
        state=state,
        started=0.0,
    )


def seen(**facts: Any) -> TaskStatus:
    """Make what was seen of a task that `b` owns, but for some facts."""
    usual: dict[str, Any] = {
        "owner": "b",
        "moving_to": None,
        "pins": [],
        "claim": None,
        "claimed_by": None,
        "last_heard": 1000.0,
        "timeout": 15.0,
        "reclaim_after": 60.0,
    }
    return TaskStatus(task_id="t", token=1, **{**usual, **facts})


@pytest.mark.parametrize(
    ("task", "code", "told"),
    [
        (seen(), "waiting", "b owns it and has not claimed it"),
        (seen(owner=None), "unowned", "no node owns it"),
        (seen(owner=None, moving_to="c"), "moving", "on its way to c"),
        (
            seen(owner=None, pins=[pin(None)]),
            "unmatched-pin",
            "pinned to gpu-%, which no live node",
        ),
        (seen(pins=[pin("gpu-%")]), "waiting", "b owns it"),
        (seen(claim=claim("running"), claimed_by="ready"), "running", "claimed by a as run 2"),
        (seen(claim=claim("running"), claimed_by="leaving"), "running", "which is at it"),
        (seen(claim=claim("running"), claimed_by="silent"), "owner-silent", "a is silent"),
        (seen(claim=claim("running"), claimed_by="dead"), "abandoned", "a is gone"),
        (seen(claim=claim("running"), claimed_by="left"), "abandoned", "b may start it again 60 s"),
        (seen(claim=claim("failed"), claimed_by="ready"), "failed", "run 2 failed on a; b owns it"),
        (seen(claim=claim("done"), claimed_by="dead"), "done", "a has done it, as run 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_reason_is_the_one_that_holds_a_task_up(task: TaskStatus, code: str, told: str) -> None:
    """What runs is told first, then what keeps it from an owner, then what the owner has done."""
    reason = explain_task(task)
    assert reason.code == code
    assert told in reason.text


@pytest.mark.parametrize(
    ("task", "since", "until"),
    [
        (seen(claim=claim("running"), claimed_by="dead"), 1000.0, 1060.0),
        (seen(claim=claim("running"), claimed_by="silent"), 1000.0, 1075.0),
        (seen(claim=claim("running"), claimed_by="dead", last_heard=None), None, None),
        (seen(claim=claim("running"), claimed_by="ready"), 0.0, None),
    ],
    ids=["dead", "silent", "long gone", "at it"],
)
def test_times_are_told(task: TaskStatus, since: float | None, until: float | None) -> None:
    """Since when a node is gone or silent, and when that ends; only where the store can tell."""
    reason = explain_task(task)
    assert (reason.since, reason.until) == (since, until)
