"""What is reported of a run: events with their fields, in order, and calls of the user's hooks."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import pytest
from action_stage import build_context

from jobsync.core.job_state import ActiveRun, Gap
from jobsync.events import Event
from jobsync.scheduler.executor import ActionOutcome, AttemptFailure
from jobsync.scheduler.reporting import JobHooks, Reporter

CONTEXT = build_context()
RUN = ActiveRun(
    id=CONTEXT.execution_id, instant=int(CONTEXT.scheduled_time), owner="w.1", started_at=1.0
)
ABOUT = {
    "job_name": CONTEXT.job_name,
    "execution_id": CONTEXT.execution_id,
    "scheduled_time": CONTEXT.scheduled_time,
}
ERROR = ValueError("boom")
RESULT = object()
"""It is not JSON: events have a description of it, hooks get it as it is."""
TIMES: dict[str, Any] = {"duration": 2.5, "started_at": 1.0, "ended_at": 3.5}
SUCCESS = ActionOutcome(status="success", result=RESULT, attempts=3, **TIMES)
LATE = ActionOutcome(status="timeout", error="it took long", exception=ERROR, attempts=2, **TIMES)
GAP = Gap(first=60, last=180, count=3, reason="nobody led")
GAP_FIELDS = {"job_name": "job", "first": 60.0, "last": 180.0, "count": 3, "reason": "nobody led"}
ENDED: dict[str, Any] = {**ABOUT, "duration": 2.5}


class Notes:
    """A reporter, and what it has emitted and called."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[tuple[Any, ...]] = []
        self.bugs: list[BaseException] = []
        names = ("on_job_start", "on_job_complete", "on_job_error")
        self.hooks = JobHooks(self.events.append, {name: self._build(name) for name in names})
        self.reporter = Reporter(self.events.append, self.hooks, self.bugs.append)

    def _build(self, name: str) -> Callable[..., object]:
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.mark.parametrize(
    ("report", "events", "calls"),
    [
        (
            lambda to: to.on_start(RUN, CONTEXT),
            [("job-started", {**ABOUT, "is_manual": False})],
            [("on_job_start", CONTEXT.job_name, CONTEXT)],
        ),
        (
            lambda to: to.on_start(
                msgspec.structs.replace(RUN, resumed=2, is_manual=True), CONTEXT
            ),
            [
                ("job-resumed", {**ABOUT, "resumed": 2}),
                ("job-started", {**ABOUT, "is_manual": True}),
            ],
            [("on_job_start", CONTEXT.job_name, CONTEXT)],
        ),
        (lambda to: to.on_attempt(CONTEXT), [], []),
        (
            lambda to: to.on_attempt_failed(
                CONTEXT, AttemptFailure("error", "ValueError: boom", ERROR), attempts=2, final=True
            ),
            [("job-failed", {**ABOUT, "error": "ValueError: boom", "attempts": 2, "final": True})],
            [("on_job_error", CONTEXT.job_name, ERROR, 2)],
        ),
        (
            lambda to: to.on_overrun(CONTEXT, 7.5),
            [("job-overran", {**ABOUT, "duration": 7.5})],
            [],
        ),
        (
            lambda to: to.on_end(RUN, CONTEXT, SUCCESS),
            [
                ("job-completed", {**ENDED, "result": repr(RESULT), "attempts": 3}),
                (
                    "job-executed",
                    {
                        **ENDED,
                        "result": repr(RESULT),
                        "attempts": 3,
                        "status": "success",
                        "error": "",
                    },
                ),
            ],
            [("on_job_complete", CONTEXT.job_name, RESULT, 2.5)],
        ),
        (
            lambda to: to.on_end(RUN, CONTEXT, LATE),
            [
                (
                    "job-executed",
                    {
                        **ENDED,
                        "result": None,
                        "attempts": 2,
                        "status": "timeout",
                        "error": "it took long",
                    },
                )
            ],
            [],
        ),
        (
            lambda to: to.on_lost("job", RUN, "it was cancelled"),
            [("job-lost", {**ABOUT, "job_name": "job", "reason": "it was cancelled"})],
            [],
        ),
        (lambda to: to.on_gap("job", GAP), [("job-missed", GAP_FIELDS)], []),
        (
            lambda to: to.on_gap("job", msgspec.structs.replace(GAP, kind="skipped")),
            [("job-skipped", GAP_FIELDS)],
            [],
        ),
        (
            lambda to: to.on_veto("it is ahead"),
            [("clock-vetoed", {"reason": "it is ahead"})],
            [],
        ),
        (lambda to: to.on_veto(""), [], []),
    ],
    ids=[
        *("start", "resumed", "attempt", "failed", "overrun", "success", "timeout", "lost"),
        *("missed", "skipped", "veto", "no veto"),
    ],
)
async def test_what_happens_is_told_in_events_and_to_hooks(
    report: Callable[[Reporter], None],
    events: list[tuple[str, dict[str, Any]]],
    calls: list[tuple[Any, ...]],
) -> None:
    """With all their fields, in this order; hooks get what users know."""
    notes = Notes()
    report(notes.reporter)
    await notes.hooks.finish(60)
    found = [(each.name.rpartition(":")[2], msgspec.structs.asdict(each)) for each in notes.events]
    assert found == events
    assert notes.calls == calls
    assert notes.bugs == []


async def test_hooks_that_fail_are_reported_and_late_ones_are_cancelled() -> None:
    """Each by its name; a stop waits for the others, and leaves none behind."""
    seen: list[str] = []

    async def hang(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def end(*_: Any) -> None:
        await asyncio.sleep(0)
        seen.append("ended")

    def fail(*_: Any) -> NoReturn:
        raise ERROR

    events: list[Any] = []
    functions = {"on_job_start": hang, "on_job_complete": end, "on_job_error": fail, "none": None}
    hooks = JobHooks(events.append, functions)
    for name in [*functions, "unknown"]:
        hooks.call(name, "job")
    await hooks.finish(0.05)
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == ["ended", "cancelled"]
    (failed,) = events
    assert (failed.event, failed.callback, failed.error) == (
        *("scheduler", "on_job_error"),
        "ValueError: boom",
    )
    assert not hooks._tasks
