"""The time that a worker has to end: who limits it, and which limit counts."""

import asyncio
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync.queue.settings import QueueSettings
from jobsync.queue.shutdown import LAST_MOMENTS, Shutdown

GRACE = 30.0


def build_shutdown(clock: FakeClock) -> Shutdown:
    """Return the end of a worker that has nothing to do."""
    nothing: Any = None
    return Shutdown(
        QueueSettings(grace=GRACE), clock, nothing, nothing, nothing, nothing, asyncio.Event()
    )


@pytest.mark.parametrize(
    ("within", "finish", "end"),
    [
        (None, GRACE, GRACE),
        (1000.0, GRACE, GRACE + 5.0),
        (32.0, 27.0, 32.0),
        (20.0, 15.0, 20.0),
        (8.0, 6.0, 8.0),
        (0.0, 0.0, 0.0),
        (-3.0, 0.0, 0.0),
    ],
)
def test_handlers_have_what_is_left_after_the_time_for_the_last_settlements(
    within: float | None, finish: float, end: float
) -> None:
    """A quarter of what the caller can wait, five seconds at most; and never more than `grace`."""
    clock = FakeClock()
    shutdown = build_shutdown(clock)
    start = clock.mono()
    shutdown.limit(within)
    assert cast("Any", shutdown._finish_by) - start == pytest.approx(finish)
    assert cast("Any", shutdown._end_by) - start == pytest.approx(end + LAST_MOMENTS)


@pytest.mark.parametrize(
    ("first", "second", "later", "expected"),
    [
        (None, 8.0, 0.0, 8.0),
        (8.0, None, 0.0, 8.0),
        (8.0, 20.0, 0.0, 8.0),
        (20.0, 8.0, 0.0, 8.0),
        (8.0, 8.0, 3.0, 8.0),
        (20.0, 8.0, 3.0, 11.0),
        (None, None, 3.0, GRACE),
    ],
)
def test_a_second_limit_only_shortens_the_first(
    first: float | None, second: float | None, later: float, expected: float
) -> None:
    """Whichever comes first: who asked for less may be about to kill the process."""
    clock = FakeClock()
    shutdown = build_shutdown(clock)
    start = clock.mono()
    shutdown.limit(first)
    clock.mono_seconds += later
    shutdown.limit(second)
    assert cast("Any", shutdown._end_by) - start == pytest.approx(expected + LAST_MOMENTS)
