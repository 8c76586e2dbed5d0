"""The time that a worker has to end: who limits it, and which limit counts."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from chance import FakeClock

from jobsync.queue import shutdown
from jobsync.queue.settings import QueueSettings
from jobsync.queue.shutdown import CALLBACK_TIME, LAST_MOMENTS, Shutdown

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


NEVER = 1e9


class Stage:
    """Handlers and callbacks of a worker that end at times of the test, and what was done when.

    Args:
        handler: when it ends, if nobody interrupts it.
        cleanup: the seconds that it takes after it was interrupted.
        callback: when it ends.
    """

    def __init__(self, handler: float, cleanup: float = 0.0, callback: float = 0.0) -> None:
        self.clock = FakeClock()
        self.steps: list[tuple[str, float]] = []
        self.lost: list[str] = []
        self.task = Mock()
        self.meanwhile: Callable[[], None] | None = None
        self._start = self.clock.mono()
        self._handler, self._cleanup, self._callback = handler, cleanup, callback
        self._delivery = SimpleNamespace(task=self.task)
        stage: Any = self
        self.shutdown = Shutdown(
            QueueSettings(grace=GRACE), self.clock, stage, stage, stage, stage, asyncio.Event()
        )

    @property
    def now(self) -> float:
        return self.clock.mono() - self._start

    def note(self, step: str) -> None:
        self.steps.append((step, round(self.now, 3)))

    def return_ready(self) -> None:
        self.note("return")

    def cancel_overrun(self) -> None:
        self.note("cancel overrun")

    def interrupt(self) -> None:
        self.note("interrupt")
        self._handler = min(self._handler, self.now + self._cleanup)

    def list_useful(self) -> list[Any]:
        return [self._delivery] if self.now < self._handler else []

    def __len__(self) -> int:
        return self.now < self._callback

    def __iter__(self) -> Iterator[Any]:
        return iter([self._delivery])

    def lose(self, _: Any, reason: str) -> None:
        self.lost.append(reason)

    async def flush(self) -> None:
        self.note("flush")

    async def cancel(self, seconds: float) -> None:
        assert seconds == CALLBACK_TIME
        self.note("cancel callbacks")

    async def wait(self, _: asyncio.Event, seconds: float) -> None:
        """Advance the time to what happens next."""
        assert self.now < 1_000
        ends = [end - self.now for end in (self._handler, self._callback) if end > self.now]
        self.clock.mono_seconds += min(seconds, *ends)
        if self.meanwhile is not None:
            self.meanwhile()


def list_steps(interrupt: float, flush: float, callbacks: float) -> list[tuple[str, float]]:
    """Return the steps of an end, each with its time."""
    return [
        ("return", 0.0),
        ("cancel overrun", 0.0),
        ("interrupt", interrupt),
        ("flush", flush),
        ("cancel callbacks", callbacks),
    ]


@pytest.mark.parametrize(
    ("times", "within", "steps", "is_lost"),
    [
        ((0.0,), 20.0, list_steps(0.0, 0.0, 0.0), False),
        ((5.0,), 20.0, list_steps(5.0, 5.0, 5.0), False),
        ((NEVER, 2.0), 20.0, list_steps(15.0, 17.0, 17.0), False),
        ((NEVER, NEVER), 20.0, list_steps(15.0, 17.95, 17.95), True),
        ((NEVER, 0.4), None, list_steps(30.0, 30.4, 30.4), False),
        ((NEVER, NEVER), None, list_steps(30.0, 30.45, 30.45), True),
        ((5.0, 0.0, 12.0), 20.0, list_steps(5.0, 5.0, 12.0), False),
        ((5.0, 0.0, NEVER), 20.0, list_steps(5.0, 5.0, 15.0), False),
    ],
)
async def test_each_part_of_an_end_has_its_time(
    monkeypatch: pytest.MonkeyPatch,
    times: tuple[float, ...],
    within: float | None,
    steps: list[tuple[str, float]],
    is_lost: bool,
) -> None:
    """What has not started is returned first. Handlers that do not end leave half of the rest."""
    stage = Stage(*times)
    monkeypatch.setattr(shutdown, "wait_for_change", stage.wait)
    stage.shutdown.limit(within)
    await stage.shutdown.run()
    assert stage.steps == steps
    assert stage.lost == ["its handler did not end in time"] * is_lost
    assert stage.task.cancel.call_count == is_lost


async def test_a_limit_counts_that_is_set_while_handlers_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it they may take as long as they like."""
    stage = Stage(NEVER)
    monkeypatch.setattr(shutdown, "wait_for_change", stage.wait)

    def limit() -> None:
        if stage.now >= 200.0:
            stage.meanwhile = None
            stage.shutdown.limit(8.0)

    stage.meanwhile = limit
    await stage.shutdown.run()
    assert stage.steps == list_steps(206.0, 206.0, 206.0)


async def test_what_cannot_be_returned_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not answer, and the worker ends all the same."""
    stage = Stage(0.0)
    monkeypatch.setattr(shutdown, "LAST_MOMENTS", 0.0)
    monkeypatch.setattr(stage, "flush", asyncio.Event().wait)
    stage.shutdown.limit(0.0)
    await asyncio.wait_for(stage.shutdown.run(), 60)
    assert stage.lost == ["it could not be returned in time"]
    assert stage.steps[-1] == ("cancel callbacks", 0.0)
