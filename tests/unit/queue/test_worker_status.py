"""What sessions report about the work on queues, and what is read of it."""

from typing import Any

import msgspec
import pytest

from jobsync.queue import worker_status
from jobsync.queue.limits import QueueLimits
from jobsync.queue.worker_status import (
    ReportedLimit,
    WorkerStatus,
    build_worker_facts,
    limit_tasks,
    read_worker_statuses,
    report_limits,
)

BUSY = WorkerStatus(concurrency=3)
PAUSED = WorkerStatus(
    concurrency=1,
    is_paused=True,
    tasks=("a", "b"),
    has_more_tasks=True,
    limits={"": ReportedLimit(max_concurrency=2), "a": ReportedLimit(rate=0.5)},
)


@pytest.mark.parametrize("status", [BUSY, PAUSED])
def test_a_status_is_read_as_it_was_reported(status: WorkerStatus) -> None:
    """All of it, and only of its queue."""
    facts = build_worker_facts("default/tasks", status)
    assert read_worker_statuses(facts) == {"default/tasks": status}


@pytest.mark.parametrize("odd", [None, 7, "text", {}, {"concurrency": "many"}])
def test_what_cannot_be_read_hides_nothing_else(odd: Any) -> None:
    """Neither before nor after it: newer code may have written it, or the worker has stopped."""
    facts = {
        **build_worker_facts("first", BUSY),
        "queue:odd": odd,
        "scheduler:first": {"concurrency": 3},
        **build_worker_facts("last", PAUSED),
    }
    assert read_worker_statuses(facts) == {"first": BUSY, "last": PAUSED}


@pytest.mark.parametrize(
    ("tasks", "listed", "has_more"),
    [
        ([], (), False),
        ([""], None, False),
        (["", "a"], ("", "a"), False),
        (["b", "a"], ("a", "b"), False),
        (["a" * 17, "b" * 17], ("a" * 17, "b" * 17), False),
        (["a" * 17, "b" * 18], ("a" * 17,), True),
        (["ä" * 9, "b" * 17], ("b" * 17,), True),
        (["a" * 38, "b"], (), True),
    ],
)
def test_as_many_tasks_are_reported_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
    tasks: list[str],
    listed: tuple[str, ...] | None,
    *,
    has_more: bool,
) -> None:
    """In order, counted in bytes with their quotes; readers learn that there are more."""
    monkeypatch.setattr(worker_status, "_MAX_TASKS_SIZE", 40)
    assert limit_tasks(tasks) == (listed, has_more)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (QueueLimits(), {}),
        (QueueLimits(burst=5, group_concurrency=2), {}),
        (QueueLimits(max_concurrency=2), {"": ReportedLimit(max_concurrency=2)}),
        (
            QueueLimits(rate=0.5, tasks={"a": QueueLimits(max_concurrency=1)}),
            {"": ReportedLimit(rate=0.5), "a": ReportedLimit(max_concurrency=1)},
        ),
        (QueueLimits(tasks={"a": QueueLimits(rate=2.0)}), {"a": ReportedLimit(rate=2.0)}),
    ],
)
def test_limits_are_reported_by_task(
    limits: QueueLimits, expected: dict[str, ReportedLimit]
) -> None:
    """That of the queue under the empty name, if it has one."""
    assert report_limits(limits) == expected


def test_of_many_limits_the_first_are_reported_with_that_of_the_queue() -> None:
    """A session is written often."""
    tasks = {f"task-{number:03}": QueueLimits(max_concurrency=1) for number in range(60)}
    for known in (tasks, dict(reversed(tasks.items()))):
        found = report_limits(QueueLimits(rate=1.0, tasks=known))
        assert [*found] == ["", *sorted(tasks)[:49]]


@pytest.mark.parametrize(
    ("status", "fact"),
    [
        (None, None),
        (BUSY, {"concurrency": 3, "is_paused": False}),
        (
            WorkerStatus(concurrency=3, is_paused=True, limits={"a": ReportedLimit(rate=0.5)}),
            {"concurrency": 3, "is_paused": True, "limits": {"a": {"rate": 0.5}}},
        ),
        (
            WorkerStatus(concurrency=3, tasks=()),
            {"concurrency": 3, "is_paused": False, "tasks": (), "has_more_tasks": False},
        ),
        (
            PAUSED,
            {
                "concurrency": 1,
                "is_paused": True,
                "tasks": ("a", "b"),
                "has_more_tasks": True,
                "limits": {"": {"max_concurrency": 2}, "a": {"rate": 0.5}},
            },
        ),
    ],
)
def test_a_session_has_only_facts_that_say_something(
    status: WorkerStatus | None, fact: Any
) -> None:
    """A plain queue has no more than older code knows: each session is written often."""
    found = build_worker_facts("default/tasks", status)
    assert msgspec.to_builtins(found) == msgspec.to_builtins({"queue:default/tasks": fact})
