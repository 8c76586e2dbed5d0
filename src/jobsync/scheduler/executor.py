"""Runs a scheduled job's action: attempts, timeout, retries. It knows no store.

However an action ends becomes an outcome: a value or an error never passes as an exception to the
scheduler. Two attempts of one call never overlap: a coroutine that exceeds its timeout is
cancelled, and a plain function, which cannot be cancelled, sees `context.lost`; the retry starts
only after it has ended. Whoever calls again for the same run waits first (`wait`). The run itself
ends after its last attempt has ended, so that an overlap policy which waits for the run waits for
the action. If the run is cancelled, a coroutine is cancelled and has a few seconds to end. What
runs on after that is left behind: user code cannot prolong a shutdown.
"""

import asyncio
import concurrent.futures
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from jobsync.components import Components
from jobsync.core.retry import Backoff, Retries, default_backoff
from jobsync.errors import Invalid
from jobsync.scheduler import action_call, job_message
from jobsync.scheduler.action_call import ActionCall
from jobsync.scheduler.context import JobContext
from jobsync.user_code import (
    FunctionEnd,
    check_no_generator,
    describe_error,
    is_coroutine_function,
)

__all__ = [
    "Action",
    "ActionExecutor",
    "ActionListener",
    "ActionOutcome",
    "AttemptFailure",
]

Action: TypeAlias = Callable[..., Any]
"""Takes nothing, or the database, its context and the scheduler, in this order."""

_CONTROL_ERRORS = (StopIteration, StopAsyncIteration)
"""Exceptions that mean something to the code that they pass."""
_OWN_FILES = {__file__, action_call.__file__, job_message.__file__}
_MAX_ARGUMENTS = 3
_VARIABLE_ARGUMENTS = 2
"""How many arguments `*arguments` gets: the database and the context."""
_GRACE = 5.0
"""Seconds in which a cancelled action must end before it is reported, and cancelled again."""


class AttemptFailure(NamedTuple):
    """Why an attempt failed."""

    status: Literal["error", "timeout"]
    error: str
    """The error, and where it was raised."""
    exception: BaseException
    """It may be anything that an action raises: also SystemExit or CancelledError."""


class ActionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended.

    Attributes:
        status: of the last attempt.
        result: what the action returned. It may be anything; see `results`.
        error: the last attempt's error, and where it was raised; empty after a success.
        exception: the last attempt's error. Not only an Exception.
        attempts: how many attempts there were, with those of an earlier runner.
        duration: seconds from the start of the first attempt to the end of the last.
        started_at: when it started, in seconds since 1970.
        ended_at: when it ended.
    """

    status: Literal["success", "error", "timeout"]
    result: Any = None
    error: str = ""
    exception: BaseException | None = None
    attempts: int
    duration: float
    started_at: float
    ended_at: float

    def unwrap(self) -> Any:
        """Return the result, or raise the error in the caller's task.

        Raises:
            Exception: what the last attempt raised. An error that would end the caller's task or
                process, such as SystemExit, is the cause of a RuntimeError.
        """
        error = self.exception
        if error is None:
            return self.result
        if issubclass(type(error), Exception) and not issubclass(type(error), _CONTROL_ERRORS):
            raise error
        raise RuntimeError(self.error) from error


class ActionListener(Protocol):
    """Learns how a run goes. Called on the event loop."""

    def on_attempt(self, context: JobContext) -> None:
        """Note that an attempt starts."""
        ...

    def on_attempt_failed(
        self, context: JobContext, failure: AttemptFailure, *, attempts: int, final: bool
    ) -> None:
        """Note that an attempt has failed: at its timeout, even if its action runs on.

        Args:
            context: of the attempt.
            failure: the reason.
            attempts: how many attempts there were.
            final: whether it is not retried.
        """
        ...

    def on_overrun(self, context: JobContext, seconds: float) -> None:
        """Note that an action runs on after its timeout or its stop; called once for an attempt.

        Args:
            context: of the attempt.
            seconds: for which it has run.
        """
        ...

    def on_backoff_failed(self, context: JobContext, error: BaseException) -> None:
        """Note that the user's backoff has failed. The default one replaces it."""
        ...


class ActionExecutor:
    """Runs one job's action, for several instants at once if asked to.

    Args:
        action: the user's function.
        components: time, and the randomness of pauses.
        threads: where plain functions run.
        grace: seconds in which a cancelled action must end before it is reported.

    Attributes:
        is_async: whether the action is a coroutine function.

    Raises:
        Invalid: the action cannot be called with what it gets, or is a generator.
    """

    def __init__(
        self,
        action: Action,
        *,
        components: Components,
        threads: concurrent.futures.Executor,
        grace: float = _GRACE,
    ) -> None:
        self._argument_count = _count_arguments(action)
        check_no_generator("action", action)
        self.is_async = is_coroutine_function(action)
        self._action = action
        self._clock = components.clock
        self._randomness = components.randomness
        self._threads = threads
        self._grace = grace
        self._calls: dict[ActionCall, bool] = {}
        """Those that run, and whether it was reported that they run on."""
        self._runs: dict[asyncio.Task[Any], str] = {}
        """The tasks of the runs, each with the reason why it was cancelled."""

    @property
    def running(self) -> list[JobContext]:
        """The contexts of actions that run, even if nobody waits for them any more."""
        return [call.context for call in self._calls if not call.has_ended]

    def list_running(self) -> list[str]:
        """Return descriptions of the actions that run."""
        return [f"the action of job {context.job_name!r}" for context in self.running]

    def is_running(self, execution_id: str) -> bool:
        """Whether the action of a run is running, even if its run was cancelled."""
        return any(context.execution_id == execution_id for context in self.running)

    async def wait(self, execution_id: str) -> None:
        """Wait until no action of a run is running, even if its run was cancelled."""
        for call in list(self._calls):
            if call.context.execution_id == execution_id:
                await call.wait(None)

    def cancel(self, reason: str) -> None:
        """Cancel all runs, each in the task that called `run`.

        Args:
            reason: becomes `lost_reason` of their contexts.
        """
        for task in self._runs:
            self._runs[task] = reason
            task.cancel(reason)

    async def run(
        self,
        context: JobContext,
        *,
        timeout: float | None,
        retries: int,
        backoff: Backoff = default_backoff,
        listener: ActionListener,
        prepare: Callable[[], Awaitable[object]] | None = None,
    ) -> ActionOutcome:
        """Run the action until it succeeds or its retries are used up; return how it went.

        A run that is resumed has at least one attempt.

        Args:
            context: of the first attempt.
            timeout: seconds for each attempt; None for no limit.
            retries: attempts after the first one.
            backoff: returns the pause after so many failures, in seconds.
            listener: learns how it goes.
            prepare: awaited before each attempt; what it raises ends the run.

        Raises:
            CancelledError: this task was cancelled. A coroutine has ended, or `running` has it.
        """
        task = _find_task()
        self._runs[task] = ""
        try:
            rules = Retries(max_attempts=retries + 1, backoff=backoff)
            return await self._run(context, timeout, rules, listener, prepare)
        finally:
            self._runs.pop(task, None)

    async def _run(
        self,
        context: JobContext,
        timeout: float | None,
        rules: Retries,
        listener: ActionListener,
        prepare: Callable[[], Awaitable[object]] | None,
    ) -> ActionOutcome:
        began, started_at = self._clock.mono(), self._clock.wall().seconds
        attempt = context.attempt
        while True:
            if prepare is not None:
                await prepare()
            current = context.for_attempt(attempt)
            is_last = attempt >= rules.max_attempts
            end = await self._attempt(current, timeout, listener, is_last=is_last)
            if not isinstance(end, AttemptFailure) or _is_final(end, is_last=is_last):
                break
            pause = self._find_pause(current, rules, listener)
            # Not kept while it waits: an error refers to the frames that it has passed.
            del end
            await self._clock.sleep(pause)
            attempt += 1
        failure, result = (end, None) if isinstance(end, AttemptFailure) else (None, end.result)
        duration = self._clock.mono() - began
        return ActionOutcome(
            status="success" if failure is None else failure.status,
            result=result,
            error="" if failure is None else failure.error,
            exception=None if failure is None else failure.exception,
            attempts=attempt,
            duration=duration,
            started_at=started_at,
            ended_at=started_at + duration,
        )

    async def _attempt(
        self,
        context: JobContext,
        timeout: float | None,
        listener: ActionListener,
        *,
        is_last: bool,
    ) -> FunctionEnd | AttemptFailure:
        """Call the action, and wait until it has really ended."""

        def fail(status: Literal["error", "timeout"], error: BaseException) -> AttemptFailure:
            failure = AttemptFailure(status, _describe(error), error)
            final = _is_final(failure, is_last=is_last)
            listener.on_attempt_failed(context, failure, attempts=context.attempt, final=final)
            return failure

        listener.on_attempt(context)
        call = self._call(context)
        try:
            if await call.wait(timeout):
                end = call.find_end()
                return end if end.error is None else fail("error", end.error)
            late = f"it took longer than {timeout:g} s"
            call.interrupt(late)
            failure = fail("timeout", TimeoutError(late))
            if call.is_on_thread:
                self._report_overrun(call, listener)
            while not await call.wait(self._grace):
                self._report_overrun(call, listener)
                call.cancel()
        except asyncio.CancelledError:
            await self._leave(call, listener)
            raise
        return failure

    def _call(self, context: JobContext) -> ActionCall:
        given = (context.database, context, context.scheduler)
        work = partial(self._action, *given[: self._argument_count])
        threads = None if self.is_async else self._threads
        for former in list(self._calls):
            if former.has_ended:
                # After its event loop, which could not tell.
                self._forget(former)
        call = ActionCall(work, context, self._clock, threads, self._forget)
        self._calls[call] = False
        return call

    def _forget(self, call: ActionCall) -> None:
        self._calls.pop(call, None)

    async def _leave(self, call: ActionCall, listener: ActionListener) -> None:
        """End an action whose run is cancelled, but only for so long."""
        call.interrupt(self._runs[_find_task()] or "its run was cancelled")
        if call.is_on_thread or not await call.wait(self._grace):
            self._report_overrun(call, listener)

    def _report_overrun(self, call: ActionCall, listener: ActionListener) -> None:
        """Report once that an action runs on."""
        if call in self._calls and not self._calls[call]:
            self._calls[call] = True
            listener.on_overrun(call.context, call.age)

    def _find_pause(self, context: JobContext, rules: Retries, listener: ActionListener) -> float:
        draw = self._randomness.uniform(0, 1)
        try:
            return rules.pause(context.attempt, draw)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's backoff may raise anything
            listener.on_backoff_failed(context, error)
            return Retries(max_attempts=rules.max_attempts).pause(context.attempt, draw)


def _find_task() -> asyncio.Task[Any]:
    return cast("asyncio.Task[Any]", asyncio.current_task())


def _is_final(failure: AttemptFailure, *, is_last: bool) -> bool:
    """Whether an attempt is not retried."""
    return is_last or issubclass(type(failure.exception), KeyboardInterrupt)


def _count_arguments(action: Any) -> int:
    """Return how many arguments an action gets.

    A parameter with a default keeps it, unless that is None: `lambda db, name=name: …` works.
    """
    fix = "write async def action(db) or async def action(db, context)"
    if not callable(action):
        if inspect.isawaitable(action):
            fix = "pass the function itself, without calling it"
        raise Invalid("action", action, "must be callable", fix)
    try:
        parameters = list(inspect.signature(action).parameters.values())
    except (TypeError, ValueError) as error:
        raise Invalid("action", action, "cannot be called", "pass a function") from error
    if parameters and _is_for_context(parameters[0]):
        problem = f"has {parameters[0].name!r} first, which would get the database"
        raise Invalid("action", action, problem, "write async def action(db, context)")
    count, is_filling = 0, True
    for parameter in parameters:
        is_required = parameter.default is parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY and is_required:
            problem = f"must not need the argument {parameter.name!r} by name"
            raise Invalid("action", action, problem, fix)
        if parameter.kind is parameter.VAR_POSITIONAL and is_filling:
            count = max(count, _VARIABLE_ARGUMENTS)
        elif parameter.kind <= parameter.POSITIONAL_OR_KEYWORD:
            is_free = parameter.default is None and count < _MAX_ARGUMENTS
            is_filling = is_filling and (is_required or is_free)
            count += is_filling
    if count > _MAX_ARGUMENTS:
        raise Invalid("action", action, "must take at most 3 arguments", fix)
    return count


def _is_for_context(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is meant for the context, by its name or its type."""
    # By identity: a default or an annotation may be any object.
    is_free = parameter.default is parameter.empty or parameter.default is None
    kind = parameter.annotation
    is_typed = kind is JobContext or (type(kind) is str and kind == "JobContext")
    return is_free and (is_typed or parameter.name in {"context", "ctx"})


def _describe(error: BaseException) -> str:
    """Return an action's error and where it was raised."""
    if type(error) is asyncio.CancelledError and not error.args:
        return "CancelledError: the action was cancelled from within"
    try:
        return describe_error(error, _OWN_FILES)
    except (KeyboardInterrupt, SystemExit):
        # Raised by its own text: a failing action never ends the process.
        return "an error that cannot be described"
