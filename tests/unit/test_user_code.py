"""Users' functions: whatever they do stays within their call.

A coroutine function in its own context behaves in all else as if it were awaited.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import pytest

from jobsync.errors import Invalid
from jobsync.user_code import (
    FunctionEnd,
    UserTasks,
    await_result,
    call_function,
    describe_error,
    note_coroutine,
    run_in_own_context,
)
from jobsync.user_functions import check_function, is_exit, is_for_task

_mark: ContextVar[str] = ContextVar("mark", default="")


class Functions:
    """Functions of a user's that run, and generators that would not."""

    def run(self) -> None:
        """Run."""

    async def run_later(self) -> None:
        """Run on the loop."""

    def generate(self) -> Iterator[None]:
        """Run nothing."""
        yield

    async def generate_later(self) -> AsyncIterator[None]:
        """Run nothing either."""
        yield

    def __call__(self) -> None:
        """Run, as an object does."""


@pytest.mark.parametrize("shape", [lambda function: function, partial])
@pytest.mark.parametrize("owner", [Functions, Functions()])
@pytest.mark.parametrize("name", ["run", "run_later", "generate", "generate_later"])
def test_a_generator_is_refused_in_any_shape(name: str, owner: Any, shape: Any) -> None:
    """As a function, as a method, and with some of its arguments."""
    function = shape(getattr(owner, name))
    if "generate" not in name:
        check_function("handler", function, "pass a function")
        return
    with pytest.raises(Invalid, match=r"handler is a generator, which nobody runs"):
        check_function("handler", function, "pass a function")


@pytest.mark.parametrize("value", [Functions(), Functions, print])
def test_anything_that_can_be_called_is_a_function(value: object) -> None:
    """Nothing else is, and the error says what to pass."""
    check_function("handler", value, "pass a function")
    with pytest.raises(Invalid, match=r"handler must be callable.*Pass a function"):
        check_function("handler", "print", "pass a function")


async def test_its_variables_are_visible_below_and_not_after() -> None:
    """Also after it has waited, and in the tasks that it creates."""

    async def look() -> str:
        return _mark.get()

    async def work() -> list[str]:
        seen = [_mark.get()]
        _mark.set("inner")
        await asyncio.sleep(0)
        return [*seen, _mark.get(), await asyncio.create_task(look())]

    _mark.set("outer")
    assert await run_in_own_context(work) == ["outer", "inner", "inner"]
    assert _mark.get() == "outer"


async def test_it_runs_in_the_callers_task() -> None:
    """Scopes that cancel their task cancel the right one."""

    async def work() -> asyncio.Task[None] | None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(3600)
        return asyncio.current_task()

    assert await run_in_own_context(work) is asyncio.current_task()


async def test_its_errors_are_raised() -> None:
    """At once, or after it has waited."""

    async def work(waits: object) -> None:
        if waits:
            await asyncio.sleep(0)
        raise LookupError("gone")

    for waits in (False, True):
        with pytest.raises(LookupError, match="gone"):
            await run_in_own_context(work, waits)


async def test_it_can_handle_a_cancellation() -> None:
    """It is raised where it waits, within its own context, and it may continue."""
    cancelled_in: list[str] = []

    async def work() -> str:
        _mark.set("inner")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled_in.append(_mark.get())
        await asyncio.sleep(0)
        return "done"

    async def run() -> str:
        return await run_in_own_context(work)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
    assert cancelled_in == ["inner"]
    assert task.result() == "done"


async def test_it_cleans_up_when_it_is_closed() -> None:
    """As any coroutine that is closed while it waits."""
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            closed.append("yes")

    async def run() -> None:
        await run_in_own_context(work)

    running = run()
    running.send(None)
    running.close()
    assert closed == ["yes"]


async def test_any_awaitable_works() -> None:
    """A function may return an awaitable that is not a coroutine."""

    def work() -> asyncio.Future[str]:
        _mark.set("inner")
        return asyncio.ensure_future(asyncio.sleep(0, _mark.get()))

    assert await run_in_own_context(work) == "inner"
    assert _mark.get() == ""


@pytest.mark.parametrize(
    "error", [LookupError, SystemExit, StopIteration, KeyboardInterrupt, asyncio.CancelledError]
)
def test_errors_of_plain_functions_are_values(error: type[BaseException]) -> None:
    """Futures and coroutines do not carry every one."""

    def fail(text: str) -> NoReturn:
        raise error(text)

    end = call_function(fail, "gone", kind="a test")
    assert end.result is None
    assert type(end.error) is error
    assert call_function(str, 5, kind="a test") == FunctionEnd("5", None)


async def test_results_are_awaited_until_there_is_nothing_to_await() -> None:
    """In a context of their own."""

    async def work(result: Any) -> Any:
        _mark.set("inner")
        return result

    future: Future[Any] = Future()
    future.set_result(work(work("done")))
    assert await await_result(future) == "done"
    assert await await_result(None) is None
    assert _mark.get() == ""


def test_an_error_is_described_without_its_callers() -> None:
    """The lines of this library explain nothing."""

    def fail() -> NoReturn:
        raise LookupError("gone")

    error = call_function(fail, kind="a test").error
    assert error is not None
    text = describe_error(error)
    assert text.startswith("LookupError: gone\n")
    assert text.count("File ") == 1
    assert "in fail" in text
    assert describe_error(error, {__file__}) == "LookupError: gone"


EXITS = (SystemExit, KeyboardInterrupt)
ERRORS = (*EXITS, asyncio.CancelledError, GeneratorExit, ValueError, BaseException)


@pytest.mark.parametrize("error", ERRORS)
def test_an_exit_ends_the_program_only_on_the_main_thread(error: type[BaseException]) -> None:
    """Elsewhere it would end that thread without a word; without a task, a task's end counts."""
    found: list[tuple[bool, bool]] = []

    def ask() -> None:
        found.append((is_exit(error()), is_for_task(error())))

    ask()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    is_end = error in (asyncio.CancelledError, GeneratorExit)
    assert found == [(error in EXITS, error in EXITS or is_end), (False, is_end)]


@pytest.mark.parametrize("error", ERRORS)
async def test_within_a_task_only_its_own_cancellation_is_for_it(
    error: type[BaseException],
) -> None:
    """A coroutine may raise the same error by itself."""

    async def ask() -> tuple[bool, bool]:
        before = is_for_task(error())
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return before, is_for_task(error())
        raise AssertionError

    is_cancelled = error is asyncio.CancelledError
    found = await asyncio.create_task(ask())
    assert found == (error in EXITS, error in EXITS or is_cancelled)


@pytest.mark.parametrize("ends", [*itertools.product("rec", repeat=3)], ids="".join)
async def test_the_first_error_of_tasks_is_raised_and_the_others_are_reported(
    ends: tuple[str, ...],
) -> None:
    """Tasks return, raise or are cancelled, one after the other; each end is noticed."""
    reported: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
    noticed: list[bool] = []
    tasks = UserTasks(lambda: noticed.append(True))
    watching = asyncio.create_task(tasks.watch())
    await asyncio.sleep(0)

    async def work(number: int, end: str) -> None:
        if end == "c":
            raise asyncio.CancelledError
        if end == "e":
            raise ValueError(str(number))

    for number, end in enumerate(ends):
        tasks.start(work(number, end))
        assert len(tasks) == 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert (len(tasks), len(noticed)) == (0, number + 1)
    errors = [str(number) for number, end in enumerate(ends) if end == "e"]
    assert reported == errors[1:]
    if not errors:
        watching.cancel()
    await asyncio.wait([watching])
    assert watching.cancelled() or str(watching.exception()) == errors[0]
    assert watching.cancelled() == (not errors)


@pytest.mark.parametrize("first_end", ["cancelled", "raised"])
async def test_a_worker_can_be_watched_again(first_end: str) -> None:
    """After the first watch was cancelled, or has raised the error of a task."""
    tasks = UserTasks(lambda: None)

    async def fail(text: str) -> None:
        raise ValueError(text)

    async def watch(text: str) -> str:
        watching = asyncio.create_task(tasks.watch())
        await asyncio.sleep(0)
        if text:
            tasks.start(fail(text))
        else:
            watching.cancel()
        await asyncio.wait([watching])
        return "" if watching.cancelled() else str(watching.exception())

    first = "first" if first_end == "raised" else ""
    assert [await watch(first), await watch("second")] == [first, "second"]


@pytest.mark.parametrize("when", ["before", "after", "before and after"])
@pytest.mark.parametrize("inner_forgets", [False, True])
def test_a_function_within_a_function_answers_for_its_own_coroutines(
    when: str, *, inner_forgets: bool
) -> None:
    """Whatever the inner one made, and whenever the outer one has made its own."""

    async def save() -> None:
        raise AssertionError("nobody awaits it")

    def inner() -> None:
        if inner_forgets:
            note_coroutine(save())

    ends: list[FunctionEnd] = []

    def outer() -> None:
        if "before" in when:
            note_coroutine(save())
        ends.append(call_function(inner, kind="a handler"))
        if "after" in when:
            note_coroutine(save())

    for _ in range(2):
        end = call_function(outer, kind="a handler")
        assert isinstance(end.error, Invalid)
        assert isinstance(ends[-1].error, Invalid) == inner_forgets
        # Outside of functions nothing is remembered.
        work = save()
        note_coroutine(work)
        work.close()


def test_a_coroutine_that_a_plain_function_forgot_is_its_error() -> None:
    """One of this library, that nobody has begun. One that it awaited or returned is not."""

    async def enqueue() -> int:
        return 1

    def make() -> Any:
        work = enqueue()
        note_coroutine(work)
        return work

    def run_some() -> list[int]:
        return [asyncio.run(make()) for _ in range(250)]

    def forget_some() -> None:
        for _ in range(250):
            make()

    def fail() -> None:
        make().close()
        raise KeyError("its own")

    assert call_function(run_some, kind="a handler") == FunctionEnd([1] * 250)
    assert asyncio.run(call_function(make, kind="a handler").result) == 1
    assert isinstance(call_function(fail, kind="a handler").error, KeyError)
    forgotten = call_function(forget_some, kind="a handler").error
    assert str(forgotten).endswith("Call enqueue_sync, or write the function as async def.")


async def test_the_end_of_a_generator_within_a_call_is_the_failure_of_the_function() -> None:
    """It does not look as if the task of the caller were closed."""

    def fail() -> NoReturn:
        raise GeneratorExit

    with pytest.raises(RuntimeError, match="GeneratorExit was raised"):
        await run_in_own_context(fail)
