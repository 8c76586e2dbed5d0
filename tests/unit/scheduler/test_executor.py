"""Actions of every kind: their attempts, timeouts and retries, and how their runs end."""

import asyncio
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import msgspec
import pytest
from action_stage import ActionNotes, ActionStage, build_context, play
from chance import FakeClock
from hostile import HOSTILE, build_error, contain
from waiting import until

from jobsync import Components
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionExecutor, ActionOutcome
from jobsync.testing.loop import block
from jobsync.user_code import UserThreads


@pytest.fixture
def stage() -> ActionStage:
    """A stage with real time."""
    return ActionStage(Components.system())


def test_a_success_is_one_attempt() -> None:
    """Its outcome has the result as it is, and its times."""

    async def act(db: Any) -> object:
        await asyncio.sleep(3)
        return result

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, timeout=5, retries=3)
        assert (outcome.status, outcome.attempts, outcome.error) == ("success", 1, "")
        assert outcome.result is outcome.unwrap() is result
        assert outcome.exception is None
        assert outcome.duration == pytest.approx(3)
        assert outcome.ended_at - outcome.started_at == pytest.approx(3)
        assert stage.listener.told == [("attempt", 1)]
        assert stage.executor.running == []

    result = object()
    play(story)


async def test_a_clock_that_is_set_during_a_run_does_not_change_how_long_it_took() -> None:
    """It ends after it has started."""
    clock = FakeClock()
    stage = ActionStage(msgspec.structs.replace(Components.system(), clock=clock))

    async def act() -> None:
        clock.mono_seconds += 3
        clock.wall_seconds -= 3600

    begun = clock.wall_seconds
    outcome = await stage.run(act)
    assert (outcome.started_at, outcome.ended_at, outcome.duration) == (begun, begun + 3, 3)


def test_each_attempt_is_prepared() -> None:
    """What the preparation raises ends the run; the action is not called again."""
    steps: list[str] = []

    async def act() -> NoReturn:
        steps.append("act")
        raise LookupError("gone")

    async def prepare() -> None:
        steps.append("prepare")
        if len(steps) > 4:
            raise ValueError("not now")

    async def story(stage: ActionStage) -> None:
        steps.clear()
        with pytest.raises(ValueError, match="not now"):
            await stage.run(act, retries=5, prepare=prepare)
        assert steps == ["prepare", "act"] * 2 + ["prepare"]
        assert stage.executor.running == []

    play(story)


@pytest.mark.parametrize("retries", [0, 3])
def test_failures_are_retried_as_often_as_told(retries: int) -> None:
    """`retries=0` means one attempt. The pauses double, with up to a tenth more."""

    async def act() -> NoReturn:
        raise LookupError("gone")

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, retries=retries)
        assert (outcome.status, outcome.attempts) == ("error", retries + 1)
        assert outcome.error.startswith("LookupError: gone\n")
        assert "test_executor.py" in outcome.error
        assert "in act" in outcome.error
        assert "user_code.py" not in outcome.error
        assert "action_call.py" not in outcome.error
        assert isinstance(outcome.exception, LookupError)
        told, times = stage.listener.told, stage.listener.times
        assert told == [
            part
            for attempt in range(1, retries + 2)
            for part in (
                ("attempt", attempt),
                ("final" if attempt > retries else "failed", attempt, "error"),
            )
        ]
        pauses = [late - early for early, late in zip(times[1::2], times[2::2], strict=False)]
        assert len(pauses) == retries
        for pause, least in zip(pauses, (1, 2, 4), strict=False):
            assert least <= pause <= 1.1 * least

    play(story)


def test_a_retry_may_succeed() -> None:
    """The outcome is that of the last attempt; each attempt has a context of its own."""
    contexts: list[JobContext] = []

    def act(db: Any, context: JobContext) -> str:
        contexts.append(context)
        context.data["seen"] = context.attempt
        if context.attempt < 3:
            raise ValueError(context.attempt)
        return "done"

    async def story(stage: ActionStage) -> None:
        contexts.clear()
        outcome = await stage.run(act, retries=5, backoff=lambda failures: 10.0 * failures)
        assert (outcome.status, outcome.result, outcome.attempts) == ("success", "done", 3)
        assert (outcome.error, outcome.exception) == ("", None)
        assert [context.attempt for context in contexts] == [1, 2, 3]
        assert [context["seen"] for context in contexts] == [1, 2, 3]
        assert {context.execution_id for context in contexts} == {"e1"}
        assert 30 <= outcome.duration <= 33

    play(story)


@pytest.mark.parametrize(("attempt", "attempts"), [(2, [2, 3]), (3, [3]), (7, [7])])
def test_a_resumed_run_continues_its_attempts(attempt: int, attempts: list[int]) -> None:
    """There is at least one, although the runner that died may have used up all."""

    async def act() -> NoReturn:
        raise LookupError

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, retries=2, attempt=attempt)
        assert outcome.attempts == attempts[-1]
        assert [part[1] for part in stage.listener.told if part[0] == "attempt"] == attempts

    play(story)


def _raise_exit(failures: int) -> NoReturn:
    raise SystemExit(failures)


@pytest.mark.parametrize(
    ("backoff", "error"), [(lambda _: "soon", "Invalid"), (_raise_exit, "SystemExit")]
)
def test_a_broken_backoff_is_reported_and_replaced(
    backoff: Callable[[int], float], error: str
) -> None:
    """By the default one."""

    async def act() -> NoReturn:
        raise LookupError

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, retries=3, backoff=backoff)
        assert outcome.attempts == 4
        failed = [told for told in stage.listener.told if told[0] == "backoff"]
        assert failed == [("backoff", number, error) for number in (1, 2, 3)]
        # The pauses double, with up to a tenth more.
        assert 1 + 2 + 4 <= outcome.duration <= 1.1 * (1 + 2 + 4)

    play(story)


def test_a_late_coroutine_is_cancelled_before_its_retry() -> None:
    """Its cleanup has ended by then."""
    log: list[tuple[str, int]] = []

    async def act(db: Any, context: JobContext) -> None:
        log.append(("begins", context.attempt))
        try:
            await asyncio.sleep(3600)
        finally:
            assert context.lost
            assert context.lost_reason == "it took longer than 10 s"
            await asyncio.sleep(2)
            log.append(("ended", context.attempt))

    async def story(stage: ActionStage) -> None:
        log.clear()
        outcome = await stage.run(act, timeout=10, retries=1)
        assert (outcome.status, outcome.attempts) == ("timeout", 2)
        assert outcome.error == "TimeoutError: it took longer than 10 s"
        assert isinstance(outcome.exception, TimeoutError)
        assert log == [("begins", 1), ("ended", 1), ("begins", 2), ("ended", 2)]
        assert stage.listener.told == [
            ("attempt", 1),
            ("failed", 1, "timeout"),
            ("attempt", 2),
            ("final", 2, "timeout"),
        ]

    play(story)


def test_a_coroutine_that_swallows_its_cancellation_delays_its_retry() -> None:
    """It is reported once, and cancelled again: that ends it."""
    log: list[tuple[str, int]] = []

    async def act(db: Any, context: JobContext) -> str:
        log.append(("begins", context.attempt))
        for _ in range(3 if context.attempt == 1 else 0):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                log.append(("swallows", context.attempt))
        log.append(("ends", context.attempt))
        return "result"

    async def story(stage: ActionStage) -> None:
        log.clear()
        outcome = await stage.run(act, timeout=10, retries=1)
        assert (outcome.status, outcome.result, outcome.attempts) == ("success", "result", 2)
        assert log == [
            ("begins", 1),
            *[("swallows", 1)] * 3,
            ("ends", 1),
            ("begins", 2),
            ("ends", 2),
        ]
        assert stage.listener.told == [
            ("attempt", 1),
            ("failed", 1, "timeout"),
            ("overrun", 1, 15),
            ("attempt", 2),
        ]
        assert stage.listener.times[1] == pytest.approx(10)

    play(story)


def test_what_a_late_action_returns_does_not_count() -> None:
    """It has failed, even if it finishes its work after its cancellation."""

    async def act() -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "result"
        return "never"

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, timeout=1)
        assert (outcome.status, outcome.result) == ("timeout", None)

    play(story)


def test_a_late_function_delays_its_retry_until_it_has_returned() -> None:
    """It reads that it is late, and its overrun is reported at once."""
    log: list[tuple[str, int, bool]] = []

    def act(db: Any, context: JobContext) -> str:
        log.append(("begins", context.attempt, context.lost))
        block(60 if context.attempt == 1 else 1)
        log.append(("ends", context.attempt, context.lost))
        return "result"

    async def story(stage: ActionStage) -> None:
        log.clear()
        outcome = await stage.run(act, timeout=10, retries=1)
        assert (outcome.status, outcome.result, outcome.attempts) == ("success", "result", 2)
        assert log == [
            ("begins", 1, False),
            ("ends", 1, True),
            ("begins", 2, False),
            ("ends", 2, False),
        ]
        assert stage.listener.told == [
            ("attempt", 1),
            ("failed", 1, "timeout"),
            ("overrun", 1, 10),
            ("attempt", 2),
        ]
        assert 61 <= stage.listener.times[-1] <= 61.1

    play(story)


def test_a_run_ends_after_its_function_has_returned() -> None:
    """Also without a retry: what waits for the run does not overlap the action."""

    def act() -> None:
        block(60)

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, timeout=10)
        assert outcome.status == "timeout"
        assert outcome.duration == pytest.approx(60)
        assert stage.listener.told[-1] == ("overrun", 1, 10)
        assert stage.executor.running == []

    play(story)


def test_the_rest_of_a_function_is_limited_too() -> None:
    """A plain function may return a coroutine, which is cancelled at the timeout."""

    async def rest() -> None:
        await asyncio.sleep(3600)

    def act() -> Any:
        block(6)
        return rest()

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, timeout=10)
        assert outcome.status == "timeout"
        assert outcome.duration == pytest.approx(10)

    play(story)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_coroutine_of_a_late_function_never_runs(is_async: bool) -> None:
    """And nothing warns that it was not awaited, whoever has returned it."""
    ran: list[str] = []
    made: list[Coroutine[Any, Any, None]] = []

    async def rest() -> None:
        ran.append("rest")

    def build_rest() -> Any:
        made.append(rest())
        return made[-1]

    def act() -> Any:
        block(60)
        return build_rest()

    async def act_later() -> Any:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return build_rest()

    async def story(stage: ActionStage) -> None:
        made.clear()
        outcome = await stage.run(act_later if is_async else act, timeout=10)
        assert outcome.status == "timeout"
        await asyncio.sleep(1)
        assert ran == []
        assert [inspect.getcoroutinestate(each) for each in made] == [inspect.CORO_CLOSED]

    play(story)


class Odd(BaseException):
    """Derives from neither Exception nor anything that asyncio knows."""


ERRORS = {
    "Exception": Exception,
    "SystemExit": SystemExit,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "TimeoutError": TimeoutError,
    "Odd": Odd,
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("kind", ["coroutine", "function", "returned"])
def test_any_error_is_an_outcome(error: type[BaseException], kind: str) -> None:
    """On the loop, on a thread, and in a coroutine that a plain function returns."""

    async def act() -> NoReturn:
        await asyncio.sleep(0)
        raise error("argument")

    def function() -> NoReturn:
        raise error("argument")

    def give_coroutine() -> Any:
        return act()

    actions = {"coroutine": act, "function": function, "returned": give_coroutine}

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(actions[kind], retries=1)
        assert (outcome.status, outcome.attempts) == ("error", 2)
        # Python replaces those that a coroutine cannot raise.
        is_replaced = kind != "function" and error in {StopIteration, GeneratorExit}
        assert type(outcome.exception) is (RuntimeError if is_replaced else error)
        assert outcome.error.splitlines()[0]
        # The caller of a job gets errors that end neither its task nor its process.
        raised = type(outcome.exception)
        is_harmless = raised in {Exception, TimeoutError, RuntimeError}
        with contain(), pytest.raises(raised if is_harmless else RuntimeError) as caught:
            outcome.unwrap()
        assert outcome.exception in {caught.value, caught.value.__cause__}

    play(story)


def test_an_action_that_cancels_itself_has_failed() -> None:
    """It is retried, and its run is not cancelled."""

    async def act() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(3600)

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, retries=1)
        assert (outcome.status, outcome.attempts) == ("error", 2)
        assert outcome.error == "CancelledError: the action was cancelled from within"

    play(story)


async def test_an_action_that_is_cancelled_before_it_begins_has_failed(stage: ActionStage) -> None:
    """By something that cancels all tasks, say: it has done nothing."""

    async def act() -> NoReturn:
        raise AssertionError

    def cancel() -> None:
        (action,) = (each for each in asyncio.all_tasks() if "jobsync action" in each.get_name())
        action.cancel()

    class Canceller(ActionNotes):
        def on_attempt(self, context: JobContext) -> None:
            super().on_attempt(context)
            # Runs before the task of the action, which does not exist yet.
            asyncio.get_running_loop().call_soon(cancel)

    stage.listener = Canceller()
    outcome = await stage.run(act)
    assert outcome.error == "CancelledError: the action was cancelled from within"


def test_a_cancellation_that_comes_too_late_changes_nothing() -> None:
    """An action that cancels its task and returns has succeeded."""

    async def act() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act)
        assert (outcome.status, outcome.result) == ("success", "done")

    play(story)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("base", [Exception, BaseException])
def test_errors_that_cannot_be_printed_are_outcomes(name: str, base: type[BaseException]) -> None:
    """Whatever their own methods do."""

    async def act() -> NoReturn:
        raise build_error(name, base=base)

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act)
        assert outcome.status == "error"
        assert type(outcome.error) is str

    with contain():
        play(story)


class Exits(Exception):
    """An error whose text exits."""

    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_error_whose_text_exits_does_not_end_the_process() -> None:
    """There is just no description."""

    async def act() -> NoReturn:
        raise Exits

    async def story(stage: ActionStage) -> None:
        assert (await stage.run(act)).error == "an error that cannot be described"

    play(story)


async def test_an_interrupt_on_the_loop_passes(stage: ActionStage) -> None:
    """It ends the program, as anywhere else, and is not retried."""

    async def act() -> NoReturn:
        raise KeyboardInterrupt

    async def run() -> None:
        await stage.run(act, retries=3)

    with pytest.raises(KeyboardInterrupt):
        await asyncio.to_thread(asyncio.run, run())
    assert [part[0] for part in stage.listener.told] in (["attempt"], ["attempt", "final"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_text_of_an_error_does_not_end_the_process(error: type[BaseException]) -> None:
    """Found: the event loop described the error of a plain function, and was interrupted."""

    class HostileError(Exception):
        def __str__(self) -> str:
            raise error

    def act() -> NoReturn:
        raise HostileError

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act)
        assert (outcome.status, outcome.attempts) == ("error", 1)
        assert outcome.error == "an error that cannot be described"

    play(story)


def test_an_interrupt_on_a_thread_is_an_error() -> None:
    """It does not reach the loop. Whoever raises it wants no retry."""

    def act() -> NoReturn:
        raise KeyboardInterrupt

    async def story(stage: ActionStage) -> None:
        outcome = await stage.run(act, retries=3)
        assert (outcome.status, outcome.attempts) == ("error", 1)
        assert outcome.error.startswith("KeyboardInterrupt")
        assert stage.listener.told[-1] == ("final", 1, "error")

    play(story)


def test_what_an_action_returns_is_awaited() -> None:
    """Coroutines, futures of asyncio and of threads, and what these return."""

    async def rest(result: Any) -> Any:
        await asyncio.sleep(1)
        return result

    def build_future() -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(rest("future"))
        return future

    async def give_coroutine() -> Any:
        return rest(rest("coroutine"))

    def give_lambda() -> Any:
        return rest("lambda")

    async def give_task() -> Any:
        return asyncio.get_running_loop().create_task(rest("task"))

    async def story(stage: ActionStage) -> None:
        for action, result in (
            (give_coroutine, "coroutine"),
            (give_lambda, "lambda"),
            (give_task, "task"),
            (build_future, "future"),
        ):
            assert (await stage.run(action, timeout=10)).result == result

    play(story)


def test_a_returned_generator_is_an_error() -> None:
    """Nobody would run it."""

    async def endless() -> AsyncIterator[int]:
        while True:
            yield 1

    async def story(stage: ActionStage) -> None:
        for action in (lambda: (i for i in "ab"), lambda: (i async for i in endless())):
            outcome = await stage.run(action)
            assert outcome.status == "error"
            assert "generator, which nobody runs" in outcome.error

    play(story)


_mark: ContextVar[str] = ContextVar("mark", default="")


def test_an_action_has_a_context_of_its_own() -> None:
    """It sees the caller's variables and changes none."""

    def look() -> str:
        seen = _mark.get()
        _mark.set("inner")
        return seen

    async def act(db: Any, context: JobContext) -> str:
        return look()

    def function(db: Any, context: JobContext) -> str:
        return look()

    async def story(stage: ActionStage) -> None:
        _mark.set("outer")
        for action in (act, function):
            assert (await stage.run(action)).result == "outer"
        assert _mark.get() == "outer"

    play(story)


async def _start(stage: ActionStage, action: Any, **options: Any) -> asyncio.Task[ActionOutcome]:
    task = asyncio.get_running_loop().create_task(stage.run(action, **options))
    await until(lambda: stage.listener.told, "it has begun")
    await asyncio.sleep(1)
    return task


@pytest.mark.parametrize("reason", ["the scheduler stops", ""])
def test_a_cancelled_run_waits_for_its_coroutine(reason: str) -> None:
    """It reads why; no attempt follows."""
    log: list[str] = []

    async def act(db: Any, context: JobContext) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            log.append(context.lost_reason)
            await asyncio.sleep(2)
            log.append("ended")

    async def story(stage: ActionStage) -> None:
        log.clear()
        task = await _start(stage, act, retries=3)
        if reason:
            stage.executor.cancel(reason)
        else:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert log == [reason or "its run was cancelled", "ended"]
        assert stage.listener.told == [("attempt", 1)]
        assert stage.executor.running == []

    play(story)


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_run_that_has_ended_is_not_cancelled(is_failing: bool) -> None:
    """Its task may go on: it records how the run went."""

    async def act() -> None:
        if is_failing:
            raise LookupError

    async def story(stage: ActionStage) -> None:
        async def run_and_record() -> str:
            outcome = await stage.run(act)
            stage.executor.cancel("the scheduler stops")
            await asyncio.sleep(1)
            return outcome.status

        task = asyncio.get_running_loop().create_task(run_and_record())
        await asyncio.wait([task])
        assert not task.cancelled()
        assert task.result() == ("error" if is_failing else "success")

    play(story)


def test_who_waits_for_a_run_that_was_left_behind_waits_for_no_other() -> None:
    """Neither for one of the same job, nor after all calls of its own have ended."""

    def act(db: Any, context: JobContext) -> None:
        block(context["seconds"])

    async def story(stage: ActionStage) -> None:
        executor = ActionExecutor(act, components=stage.components, threads=UserThreads())
        loop, tasks = asyncio.get_running_loop(), []
        for name, seconds in (("slow", 60), ("quick", 20), ("quick", 40)):
            context = build_context(execution_id=name, data={"seconds": seconds})
            run = executor.run(context, timeout=None, retries=0, listener=stage.listener)
            tasks.append(loop.create_task(run))
        await until(lambda: len(executor.running) == 3, "all have begun")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for name in ("none", "quick", "slow", "slow"):
            await executor.wait(name)
            left = sorted(context.execution_id for context in executor.running)
            all_left = ["quick", "quick", "slow"]
            assert left == {"none": all_left, "quick": ["slow"], "slow": []}[name]

    play(story)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_action_that_outlives_its_event_loop_is_waited_for_in_the_next(
    is_async: bool,
) -> None:
    """A plain function until it has returned; a coroutine has ended with its loop."""
    release = threading.Event()
    executor: ActionExecutor

    def act() -> None:
        release.wait(60)

    async def refuse() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def leave() -> list[str]:
        run = executor.run(build_context(), timeout=None, retries=0, listener=ActionNotes())
        task = asyncio.create_task(run)
        await until(lambda: executor.running, "it has begun")
        task.cancel()
        await asyncio.wait([task])
        # Otherwise it is logged that nobody will end it.
        for each in asyncio.all_tasks():
            cast("Any", each)._log_destroy_pending = False
        return executor.list_running()

    async def wait() -> None:
        waiting = asyncio.create_task(executor.wait("e1"))
        await asyncio.sleep(0)
        assert executor.is_running("e1") is not is_async
        assert waiting.done() is is_async
        release.set()
        async with asyncio.timeout(60):
            await waiting

    executor = ActionExecutor(
        refuse if is_async else act,
        components=Components.system(),
        threads=UserThreads(),
        grace=0.01,
    )
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(leave())
    loop.close()
    asyncio.run(wait())
    assert executor.list_running() == []
    if not is_async:
        outcome = asyncio.run(
            executor.run(build_context(), timeout=None, retries=0, listener=ActionNotes())
        )
        assert outcome.status == "success"
        assert executor._calls == {}


def test_a_coroutine_that_never_ends_is_left_behind() -> None:
    """After a while, with a report. It is listed as long as it runs."""

    async def act() -> None:
        while not is_over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)

    async def story(stage: ActionStage) -> None:
        is_over.clear()
        task = await _start(stage, act)
        begun = asyncio.get_running_loop().time()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert asyncio.get_running_loop().time() - begun == pytest.approx(5)
        assert stage.listener.told[1][0] == "overrun"
        assert stage.executor.list_running() == ["the action of job 'report'"]
        is_over.append(True)
        await until(lambda: not stage.executor.running, "it has ended")

    is_over: list[bool] = []
    play(story)


def test_a_function_of_a_cancelled_run_is_left_behind() -> None:
    """At once. It reads that it is lost, and is listed until it returns."""
    log: list[bool] = []

    def act(db: Any, context: JobContext) -> None:
        block(60)
        log.append(context.lost)

    async def story(stage: ActionStage) -> None:
        log.clear()
        task = await _start(stage, act, retries=3)
        begun = asyncio.get_running_loop().time()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert asyncio.get_running_loop().time() == begun
        assert [part[0] for part in stage.listener.told] == ["attempt", "overrun"]
        assert [context.lost for context in stage.executor.running] == [True]
        assert stage.executor.is_running("e1")
        assert not stage.executor.is_running("e2")
        await until(lambda: log, "it has returned")
        assert log == [True]
        await until(lambda: not stage.executor.running, "it is forgotten")
        assert not stage.executor.is_running("e1")

    play(story)


def test_a_run_that_is_cancelled_while_it_waits_for_its_retry_starts_none() -> None:
    """Nothing runs then."""

    async def act() -> NoReturn:
        raise LookupError

    async def story(stage: ActionStage) -> None:
        task = await _start(stage, act, retries=3, backoff=lambda _: 100.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(1000)
        assert stage.listener.told == [("attempt", 1), ("failed", 1, "error")]

    play(story)


def test_runs_of_one_job_are_independent() -> None:
    """Each has its own attempts, timeout and context."""

    async def act(db: Any, context: JobContext) -> str:
        await asyncio.sleep(context["seconds"])
        return context.execution_id

    async def story(stage: ActionStage) -> None:
        executor = ActionExecutor(act, components=stage.components, threads=UserThreads())

        async def run(number: int) -> ActionOutcome:
            context = build_context(execution_id=f"e{number}", data={"seconds": 4 * number})
            return await executor.run(context, timeout=10, retries=0, listener=stage.listener)

        outcomes = await asyncio.gather(*map(run, (1, 2, 3)))
        assert [outcome.result for outcome in outcomes] == ["e1", "e2", None]
        assert [outcome.status for outcome in outcomes] == ["success", "success", "timeout"]

    play(story)


async def test_functions_run_on_threads_of_their_own(stage: ActionStage) -> None:
    """Many that never return leave room for another, and do not keep the process from ending."""
    go_on = threading.Event()

    def wait() -> bool:
        assert threading.current_thread().daemon
        return go_on.wait()

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(stage.run(wait)) for _ in range(50)]
        assert (await stage.run(lambda: "done")).result == "done"
        go_on.set()
    assert all(task.result().result for task in waiting)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_forked_child_that_returns_ends(
    stage: ActionStage, is_async: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is a copy of the scheduler otherwise."""

    def fork() -> int:
        return os.fork()

    async def act() -> int:
        return fork()

    outcome = await stage.run(act if is_async else fork)
    _, status = await asyncio.to_thread(os.waitpid, outcome.result, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert "an action has returned in a forked child" in capfd.readouterr().err


async def test_an_action_that_blocks_the_loop_past_its_timeout_may_succeed(
    stage: ActionStage,
) -> None:
    """Nobody could cancel it, and it has done its work."""

    async def act() -> str:
        time.sleep(0.1)  # noqa: ASYNC251 - the point of the test
        return "done"

    outcome = await stage.run(act, timeout=0.02)
    assert (outcome.status, outcome.result) == ("success", "done")


def test_a_function_whose_task_is_cancelled_from_outside_is_still_waited_for() -> None:
    """By something that cancels all tasks, say. Two attempts do not overlap even then."""
    running: list[int] = []

    async def rest() -> NoReturn:
        raise AssertionError

    def act(db: Any, context: JobContext) -> Any:
        running.append(1)
        block(60)
        running.pop()
        return rest() if context.attempt == 1 else len(running)

    async def story(stage: ActionStage) -> None:
        running.clear()
        task = await _start(stage, act, retries=1)
        for each in asyncio.all_tasks():
            if each.get_name() == "jobsync action report":
                each.cancel()
        outcome = await task
        assert (outcome.result, outcome.attempts) == (0, 2)
        assert 121 <= outcome.duration <= 121.1

    play(story)
