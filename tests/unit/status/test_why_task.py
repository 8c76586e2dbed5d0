"""Why a task is waiting."""

from typing import Any

import msgspec
import pytest

from jobsync.cli.render import format_time
from jobsync.cli.why import _describe
from jobsync.jobs.foreign_claims import Claim
from jobsync.status.jobs import PinStatus, TaskStatus
from jobsync.status.why import explain


def pin(in_force: str | None) -> PinStatus:
    """Return a pin."""
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
    """Return a claim of node `a`."""
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


def status(**changes: Any) -> TaskStatus:
    """Return the status of a task that `b` owns, with some fields changed."""
    defaults: dict[str, Any] = {
        "owner": "b",
        "moving_to": None,
        "pins": [],
        "claim": None,
        "claimed_by": None,
        "last_heard": 1000.0,
        "timeout": 15.0,
        "reclaim_after": 60.0,
    }
    return TaskStatus(task_id="t", token=1, **{**defaults, **changes})


@pytest.mark.parametrize(
    ("task", "code", "text"),
    [
        (status(), "waiting", "b owns it and has not claimed it"),
        (status(owner=None), "unowned", "no node owns it"),
        (status(owner=None, moving_to="c"), "moving", "moving to c"),
        (
            status(owner=None, pins=[pin(None)]),
            "unmatched-pin",
            "pinned to gpu-%, which no live node",
        ),
        (status(pins=[pin("gpu-%")]), "waiting", "b owns it"),
        (status(claim=claim("running"), claimed_by="ready"), "running", "claimed by a as run 2"),
        (status(claim=claim("running"), claimed_by="leaving"), "running", "and running"),
        (
            status(claim=claim("running"), claimed_by="silent"),
            "owner-silent",
            "a sends no heartbeats",
        ),
        (status(claim=claim("running"), claimed_by="dead"), "abandoned", "a is gone"),
        (
            status(claim=claim("running"), claimed_by="left"),
            "abandoned",
            "b may start it again 60 s",
        ),
        (
            status(claim=claim("running"), claimed_by="dead", reclaim_after=0.0),
            "abandoned",
            "b may start it again at once",
        ),
        (
            status(claim=claim("failed"), claimed_by="ready"),
            "failed",
            "run 2 failed on a; b owns it",
        ),
        (status(claim=claim("done"), claimed_by="dead"), "done", "a completed it, as run 2"),
        (status(claim=claim("done"), owner=None, pins=[pin(None)]), "done", "a completed it"),
        (status(claim=claim("done"), owner=None, moving_to="c"), "done", "a completed it"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_first_obstacle_is_the_reason(task: TaskStatus, code: str, text: str) -> None:
    """A claim that runs or is done comes first, then a missing owner, then a failed claim."""
    reason = explain(task)
    assert reason.code == code
    assert text in reason.text


@pytest.mark.parametrize(
    ("task", "facts"),
    [
        (status(), {"token": "1", "owner": "b", "claim": None, "pin": None}),
        (status(owner=None), {"owner": "none"}),
        (
            status(claim=claim("failed")),
            {"claim": f"failed on a since {format_time(0.0)}"},
        ),
        (status(pins=[pin(None)]), {"pin": "gpu-% by admin: no node matches"}),
        (
            status(pins=[msgspec.structs.replace(pin("b"), patterns=("gpu-%", "b"))]),
            {"pin": "gpu-%, b by admin: b is in force"},
        ),
    ],
)
def test_people_see_what_is_worth_knowing(task: TaskStatus, facts: dict[str, str | None]) -> None:
    """Besides the reason; what does not apply is left out."""
    shown = dict(_describe(task))
    assert {name: shown.get(name) for name in facts} == facts


@pytest.mark.parametrize(
    ("task", "since", "until"),
    [
        (status(claim=claim("running"), claimed_by="dead"), 1000.0, 1060.0),
        (status(claim=claim("running"), claimed_by="silent"), 1000.0, 1075.0),
        (status(claim=claim("running"), claimed_by="dead", reclaim_after=0.0), 1000.0, None),
        (status(claim=claim("running"), claimed_by="dead", last_heard=None), None, None),
        (status(claim=claim("running"), claimed_by="ready"), 0.0, None),
    ],
    ids=["dead", "silent", "ended", "long gone", "running"],
)
def test_times_are_known_where_the_store_has_them(
    task: TaskStatus, since: float | None, until: float | None
) -> None:
    """Since when a node is gone or silent, and until when the task has to wait."""
    reason = explain(task)
    assert (reason.since, reason.until) == (since, until)
