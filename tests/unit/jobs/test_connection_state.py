"""Whether a node takes its store for answering, by its heartbeats and its latest error."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync.core.clock import Mono
from jobsync.core.trust import Timing
from jobsync.jobs.job_node import JobNode

NOW = 1000.0
is_connected: Any = cast("Any", JobNode.is_connected).fget


def read(heartbeat: float, age: float, failed_ago: float | None) -> bool:
    """Return what a node says whose last heartbeat was sent so long ago."""
    timing = Timing(heartbeat=heartbeat, timeout=10 * heartbeat)
    left = timing.timeout - timing.margin - age
    node = SimpleNamespace(
        membership=SimpleNamespace(timing=timing, trust_left=left),
        _clock=SimpleNamespace(mono=lambda: Mono(NOW)),
        _failed_at=None if failed_ago is None else Mono(NOW - failed_ago),
    )
    return bool(is_connected(node))


@pytest.mark.parametrize(
    ("heartbeat", "late"),
    [(1.0, 0.5), (5.0, 0.5), (30.0, 3.0)],
    ids=["quick", "usual", "billed"],
)
def test_a_store_answers_while_no_heartbeat_is_overdue(heartbeat: float, late: float) -> None:
    """One may be late by half a second, or a tenth of the interval if that is more."""
    for age in (0.0, heartbeat, heartbeat + late - 0.01):
        assert read(heartbeat, age, None)
    for age in (heartbeat + late + 0.01, 3 * heartbeat, 9 * heartbeat):
        assert not read(heartbeat, age, None)
        assert not read(heartbeat, age, 2 * age)


@pytest.mark.parametrize("age", [0.5, 3.0])
def test_after_an_error_the_next_heartbeat_shows_that_it_is_over(age: float) -> None:
    """If it was sent since then."""
    assert read(5.0, age, age + 0.1)
    assert not read(5.0, age, age - 0.1)
    assert not read(5.0, age, 0.0)
