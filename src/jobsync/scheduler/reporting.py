"""Turns what happens to jobs into events and calls of the user's hooks."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jobsync.core.job_state import ActiveRun, Gap
from jobsync.events import Event, HandlerFailed
from jobsync.safe_text import format_error
from jobsync.scheduler import events
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionOutcome, AttemptFailure
from jobsync.scheduler.results import describe_result
from jobsync.user_functions import check_function, is_for_task

__all__ = ["JobHooks", "Reporter"]

JobHook = Callable[..., object]


class JobHooks:
    """The user's functions that are called about runs. Their errors become events.

    Args:
        emit: emits an event.
        functions: by name; None for those that the user has not passed.

    Raises:
        Invalid: one of them cannot be called.
    """

    def __init__(
        self, emit: Callable[[Event], object], functions: Mapping[str, JobHook | None]
    ) -> None:
        for name, function in functions.items():
            if function is not None:
                check_function(name, function, "pass a function")
        self._emit = emit
        self._functions = functions
        self._tasks: set[asyncio.Task[None]] = set()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function, if the user has passed it; a coroutine runs in the background."""
        function = self._functions.get(name)
        if function is None:
            return
        task = asyncio.get_running_loop().create_task(self._call(name, function, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, seconds: float) -> None:
        """Wait for the calls that have begun, but only for so long."""
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=seconds)
            for task in late:
                task.cancel()

    async def _call(self, name: str, function: JobHook, arguments: tuple[Any, ...]) -> None:
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            if is_for_task(error):
                raise
            self._emit(HandlerFailed(event="scheduler", callback=name, error=format_error(error)))


class Reporter:
    """Reports runs and gaps. Implements `RunListener`.

    Args:
        emit: emits an event.
        hooks: the user's functions.
        fail: called with an error of this library.
    """

    def __init__(
        self,
        emit: Callable[[Event], object],
        hooks: JobHooks,
        fail: Callable[[BaseException], object],
    ) -> None:
        self._emit = emit
        self._hooks = hooks
        self._fail = fail

    def on_start(self, run: ActiveRun, context: JobContext) -> None:
        """Report that a run begins, or is resumed."""
        if run.resumed:
            self._emit(events.JobResumed(**_describe(context), resumed=run.resumed))
        self._emit(events.JobStarted(**_describe(context), is_manual=run.is_manual))
        self._hooks.call("on_job_start", context.job_name, context)

    def on_attempt(self, context: JobContext) -> None:
        """Report nothing: the run's start and each failure are enough."""

    def on_attempt_failed(
        self, context: JobContext, failure: AttemptFailure, *, attempts: int, final: bool
    ) -> None:
        """Report a failed attempt."""
        self._emit(
            events.JobFailed(
                **_describe(context), error=failure.error, attempts=attempts, final=final
            )
        )
        self._hooks.call("on_job_error", context.job_name, failure.exception, attempts)

    def on_overrun(self, context: JobContext, seconds: float) -> None:
        """Report an action that goes on after its timeout or its stop."""
        self._emit(events.JobOverran(**_describe(context), duration=seconds))

    def on_backoff_failed(self, context: JobContext, error: BaseException) -> None:
        """Report the user's backoff."""
        text = format_error(error)
        self._emit(HandlerFailed(event=context.job_name, callback="backoff", error=text))

    def on_end(self, run: ActiveRun, context: JobContext, outcome: ActionOutcome) -> None:
        """Report a run's end, once it is stored."""
        del run
        result = describe_result(outcome.result)
        about = _describe(context)
        if outcome.status == "success":
            self._emit(
                events.JobCompleted(
                    **about,
                    result=result,
                    duration=outcome.duration,
                    attempts=outcome.attempts,
                )
            )
            self._hooks.call("on_job_complete", context.job_name, outcome.result, outcome.duration)
        self._emit(
            events.JobExecuted(
                **about,
                status=outcome.status,
                result=result,
                duration=outcome.duration,
                attempts=outcome.attempts,
                error=outcome.error,
            )
        )

    def on_lost(self, name: str, run: ActiveRun, reason: str) -> None:
        """Report a run that no longer counts."""
        self._emit(
            events.JobLost(
                job_name=name,
                execution_id=run.id,
                scheduled_time=float(run.instant),
                reason=reason,
            )
        )

    def on_gap(self, name: str, gap: Gap) -> None:
        """Report instants that were not fired."""
        kind = events.JobMissed if gap.kind == "missed" else events.JobSkipped
        self._emit(
            kind(
                job_name=name,
                first=float(gap.first),
                last=float(gap.last),
                count=gap.count,
                reason=gap.reason,
            )
        )

    def on_veto(self, reason: str) -> None:
        """Report that this process fires nothing."""
        if reason:
            self._emit(events.ClockVetoed(reason=reason))

    def on_bug(self, error: BaseException) -> None:
        """Pass on an error of this library."""
        self._fail(error)


def _describe(context: JobContext) -> dict[str, Any]:
    return {
        "job_name": context.job_name,
        "execution_id": context.execution_id,
        "scheduled_time": context.scheduled_time,
    }
