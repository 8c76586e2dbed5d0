"""Calls users' functions: coroutine functions on the event loop, plain functions on threads.

A user's function may raise anything, return anything, fork, or never return. Whatever it does
stays within the call: an error is a value, what it sets in context variables is invisible
to others, and a forked child that returns from the function ends there. Handlers of messages,
actions of schedules and callbacks of expired records are called this way.
"""

import asyncio
import concurrent.futures
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator
from contextvars import copy_context
from types import CoroutineType, coroutine
from typing import Any, NamedTuple, TypeAlias, TypeVar

from jobsync.coordination.session import count_forks
from jobsync.errors import Invalid
from jobsync.safe_text import format_error, format_places

__all__ = [
    "SIGNAL_ERRORS",
    "FunctionEnd",
    "UserTasks",
    "UserThreads",
    "await_result",
    "call_function",
    "check_no_generator",
    "describe_error",
    "discard",
    "end_forked_child",
    "is_coroutine_function",
    "name_generator",
    "note_coroutine",
    "run_in_own_context",
]

T = TypeVar("T")

_CLOSED = "GeneratorExit was raised"

SIGNAL_ERRORS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)
"""Errors on the event loop that come from outside a user's function, or may: they pass through."""

_Made: TypeAlias = list["CoroutineType[Any, Any, Any]"]


class _ThreadState(threading.local):
    """What is known of each thread."""

    made: _Made | None = None
    """The coroutines of this library that the plain function on this thread has made."""


_thread = _ThreadState()
_MANY = 100

_OWN_FILES = {__file__}
_MAX_FRAMES = 3
"""How many frames of a traceback are stored, without those of the callers."""


class FunctionEnd(NamedTuple):
    """How a function ended."""

    result: Any = None
    error: BaseException | None = None


def call_function(function: Callable[..., Any], *arguments: Any, kind: str) -> FunctionEnd:
    """Call a plain function on a thread. Its error is returned: futures do not carry every one.

    Args:
        function: the user's function.
        arguments: its arguments.
        kind: of the function, for a message: "a handler", say.
    """
    forks = count_forks()
    made: _Made = []
    former, _thread.made = _thread.made, made
    try:
        result = function(*arguments)
        forgotten = _find_forgotten(made, result)
        return FunctionEnd(result) if forgotten is None else FunctionEnd(error=forgotten)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return FunctionEnd(error=error)
    finally:
        _thread.made = former
        end_forked_child(forks, kind)


def note_coroutine(work: Coroutine[Any, Any, Any]) -> None:
    """Remember a coroutine of this library until the plain function ends that has made it."""
    made = _thread.made
    if made is None or not isinstance(work, CoroutineType):
        return
    if len(made) >= _MANY:
        made[:] = filter(_is_forgotten, made)
    made.append(work)


def _is_forgotten(work: "CoroutineType[Any, Any, Any]") -> bool:
    return inspect.getcoroutinestate(work) == inspect.CORO_CREATED


def _find_forgotten(made: _Made, result: object) -> Invalid | None:
    """Return the error of a plain function that has made a coroutine which nobody awaits."""
    if isinstance(result, concurrent.futures.Future) or inspect.isawaitable(result):
        # It is awaited later, and may await the others.
        return None
    forgotten = [work for work in made if _is_forgotten(work)]
    for work in forgotten:
        work.close()
    if not forgotten:
        return None
    name = forgotten[0].__qualname__
    problem = "was called in a plain function and never awaited, so it did nothing"
    method = name.rpartition(".")[2]
    blocking = f"call {method}_sync" if method.startswith("enqueue") else "use jobsync.sync there"
    return Invalid("call", name, problem, f"{blocking}, or write the function as async def")


def end_forked_child(forks: int, kind: str) -> None:
    """End a copy of this process that a user's function has made and returned in.

    Args:
        forks: how often the process had forked when the function was called.
        kind: of the function, for a message.
    """
    if count_forks() != forks:
        text = f"jobsync: {kind} has returned in a forked child; the child ends here\n"
        os.write(2, text.encode())
        os._exit(1)


async def await_result(result: Any) -> Any:
    """Await what a function has returned, as long as that is awaitable; return the rest."""
    while result is not None and (awaitable := _find_awaitable(result)) is not None:
        result = await run_in_own_context(_wait_for, awaitable)
    return result


def _find_awaitable(result: Any) -> Awaitable[Any] | None:
    """Return what to await for the rest of a function's work; None if there is nothing."""
    if isinstance(result, concurrent.futures.Future):
        return asyncio.wrap_future(result)
    return result if inspect.isawaitable(result) else None


def discard(result: object) -> None:
    """Close a coroutine that nobody will run."""
    if inspect.iscoroutine(result):
        result.close()


@coroutine
def run_in_own_context(
    function: Callable[..., Awaitable[T]], *arguments: Any
) -> Generator[Any, Any, T]:
    """Call a coroutine function in a copy of this context, within the caller's task.

    What it sets in context variables is visible to everything that it calls, and to nothing
    after it, as in a task of its own, which would cost several times as much.

    Raises:
        GeneratorExit: this coroutine is being closed. One that the function raises by itself
            becomes a RuntimeError.
    """
    run = copy_context().run
    try:
        called = run(function, *arguments)
    except GeneratorExit as error:
        raise RuntimeError(_CLOSED) from error
    running = called if isinstance(called, CoroutineType) else _wait_for(called)
    is_closing = False
    try:
        awaited = run(running.send, None)
        while True:
            try:
                answer = yield awaited
            except BaseException as error:  # noqa: BLE001 - the function handles a cancellation
                is_closing = isinstance(error, GeneratorExit)
                awaited = run(running.throw, error)
            else:
                awaited = run(running.send, answer)
    except StopIteration as end:
        result: T = end.value
        return result
    except GeneratorExit as error:
        if is_closing:
            raise
        raise RuntimeError(_CLOSED) from error


async def _wait_for(called: Awaitable[T]) -> T:
    return await called


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object that is called, returns a coroutine."""
    return _is_kind(inspect.iscoroutinefunction, function)


def check_no_generator(field: str, function: Callable[..., Any]) -> None:
    """Check that a function runs when it is called.

    Raises:
        Invalid: it is a generator.
    """
    for check in (inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if _is_kind(check, function):
            fix = "write a function without yield"
            raise Invalid(field, function, "is a generator, which nobody runs", fix)


def _is_kind(check: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Whether a check applies to a function, or to an object that is called."""
    called = getattr(function, "__call__", None)  # noqa: B004 - an object may be called
    return check(function) or check(called)


def name_generator(result: object) -> str:
    """Return what kind of generator a function has returned; "" if it is none."""
    if inspect.isgenerator(result):
        return "a generator"
    return "an asynchronous generator" if inspect.isasyncgen(result) else ""


def describe_error(error: BaseException, hidden: Collection[str] = ()) -> str:
    """Return an error and where it was raised.

    Args:
        error: what a user's function raised.
        hidden: the files of its callers, whose lines explain nothing.
    """
    description = format_error(error)
    places = format_places(error, _MAX_FRAMES, {*_OWN_FILES, *hidden})
    return f"{description}\n{places}" if places else description


class UserThreads(concurrent.futures.Executor):
    """Starts a thread for each call of a plain function.

    A function that never returns takes no thread from others, and does not keep the process from
    ending.

    Args:
        prefix: the threads' name.
    """

    def __init__(self, prefix: str = "jobsync-action") -> None:
        self._prefix = prefix

    def submit(
        self, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> "concurrent.futures.Future[T]":
        """Call a function on a new thread."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)

        threading.Thread(target=run, name=self._prefix, daemon=True).start()
        return future


class UserTasks:
    """Tasks that run user code. They can be left behind, unlike the tasks of a task group.

    An error that is not user code's own is raised by `watch`.

    Args:
        on_end: called after the end of each task.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._error: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)

    async def watch(self) -> None:
        """Wait for the first error, and raise it."""
        self._error = asyncio.get_running_loop().create_future()
        await self._error

    async def cancel(self, seconds: float) -> None:
        """Cancel all tasks and wait for them, but only for so long."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._on_end()
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, Exception):
            # The event loop itself raises KeyboardInterrupt, and must not do so twice.
            return
        if self._error is not None and not self._error.done():
            self._error.set_exception(error)
        else:
            text = "a task of a worker has failed after its end"
            task.get_loop().call_exception_handler({"message": text, "exception": error})
