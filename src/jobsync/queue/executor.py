"""Runs handlers: coroutine functions on the event loop, plain functions on threads.

Whatever a handler does or raises becomes a verdict. A coroutine that exceeds its timeout is
cancelled by the watcher of the deadlines. A plain function cannot be cancelled and keeps its
thread until it returns. Each handler has its own context: context variables that
it sets are invisible to other handlers.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import CoroutineType, coroutine
from typing import Any, NamedTuple, TypeAlias, TypeVar

from jobsync.coordination.runner import Wakeup
from jobsync.core.clock import Clock, Mono
from jobsync.core.messages import Cancel, Completed, Failed, HandlerVerdict, Snooze
from jobsync.errors import Invalid, format_error, format_places
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.in_flight import Delivery

__all__ = [
    "THREAD_PREFIX",
    "Deadlines",
    "Executor",
    "Handler",
    "HandlerOutcome",
    "describe_error",
    "run_in_own_context",
]

T = TypeVar("T")

Handler: TypeAlias = Callable[..., Any]
"""Takes a message, and its context if it has a second parameter."""

THREAD_PREFIX = "jobsync-handler"
"""The start of the names of threads that run plain functions."""

_UNSETTLED = "the handler has called neither context.ack() nor context.nack()"
_CANCELLED = "CancelledError: the handler was cancelled from within"
_WITH_CONTEXT = 2
_OWN_FILES = {__file__}
_MAX_FRAMES = 3
"""How many frames of a traceback are stored, without those of this module."""
_SHORTEST_WAIT = 0.01
_LONGEST_WAIT = 3600.0


class HandlerOutcome(NamedTuple):
    """How a handler ended."""

    verdict: HandlerVerdict
    overrun: "asyncio.Future[Any] | None" = None
    """A plain function that continues after its timeout."""


class Executor:
    """Runs one handler, for many messages at once.

    Args:
        handler: the user's function.
        threads: how many calls of a plain function run at once.
        auto_acknowledge: whether returning acknowledges the message.

    Attributes:
        is_async: whether the handler is a coroutine function.
        takes_context: whether the handler has a parameter for its context.

    Raises:
        Invalid: the handler cannot be called with a message.
    """

    def __init__(self, handler: Handler, threads: int, *, auto_acknowledge: bool) -> None:
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object may be a handler
        )
        self._handler = handler
        self.takes_context = _takes_context(handler)
        self._auto_acknowledge = auto_acknowledge
        self._thread_count = threads
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Release idle threads; the next message starts new ones."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def run(self, delivery: Delivery) -> HandlerOutcome:
        """Handle a message. Everything becomes an outcome, except a cancellation from outside."""
        if not self.is_async:
            return await self._run_function(delivery)
        document, context = delivery.document, delivery.context
        arguments = (document, context) if self.takes_context else (document,)
        try:
            result = await run_in_own_context(self._handler, *arguments)
        except asyncio.CancelledError:
            if _was_cancelled_from_outside(delivery):
                raise
            return HandlerOutcome(_find_lateness(delivery) or Failed(_CANCELLED))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            # Not in a variable: the error refers to this frame, which must not refer to it.
            return HandlerOutcome(_find_lateness(delivery) or Failed(describe_error(error), error))
        return HandlerOutcome(_find_lateness(delivery) or self._judge(result, delivery.context))

    async def _run_function(self, delivery: Delivery) -> HandlerOutcome:
        loop = asyncio.get_running_loop()
        arguments: tuple[Any, ...] = (delivery.document,)
        if delivery.context is not None:
            arguments = (delivery.document, BlockingContext(delivery.context, loop))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._thread_count, THREAD_PREFIX)
        # The functions that it calls can find out that a handler calls them.
        within = copy_context().run
        running = loop.run_in_executor(self._threads, within, self._handler, *arguments)
        done, _ = await asyncio.wait([running], timeout=delivery.timeout)
        if not done:
            return HandlerOutcome(_build_late_verdict(delivery.timeout), running)
        error = running.exception()
        if isinstance(error, Exception):
            return HandlerOutcome(Failed(describe_error(error), error))
        return HandlerOutcome(self._judge(running.result(), delivery.context))

    def _judge(self, result: Any, context: Context | None) -> HandlerVerdict:
        if isinstance(result, (Snooze, Cancel)):
            return result
        is_settled = context is not None and context.is_settled
        if not (self._auto_acknowledge or is_settled):
            return Failed(_UNSETTLED)
        return Completed(result)


@coroutine
def run_in_own_context(
    function: Callable[..., Awaitable[T]], *arguments: Any
) -> Generator[Any, Any, T]:
    """Call a coroutine function in a copy of this context, within the caller's task.

    What it sets in context variables is visible to everything that it calls, and to nothing
    after it, as in a task of its own, which would cost several times as much.
    """
    run = copy_context().run
    called = run(function, *arguments)
    running = called if isinstance(called, CoroutineType) else _wait_for(called)
    try:
        awaited = run(running.send, None)
        while True:
            try:
                answer = yield awaited
            except BaseException as error:  # noqa: BLE001 - the function handles a cancellation
                awaited = run(running.throw, error)
            else:
                awaited = run(running.send, answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def _wait_for(called: Awaitable[T]) -> T:
    return await called


def _was_cancelled_from_outside(delivery: Delivery) -> bool:
    """Whether a handler was cancelled for another reason than its timeout."""
    task = asyncio.current_task()
    if task is None:
        return True
    return bool(task.uncancel() if delivery.is_late else task.cancelling())


def _find_lateness(delivery: Delivery) -> Failed | None:
    return _build_late_verdict(delivery.timeout) if delivery.is_late else None


def _build_late_verdict(timeout: float | None) -> Failed:
    late = TimeoutError(f"it took longer than {timeout:g} s")
    return Failed(describe_error(late), late)


def _takes_context(handler: Handler) -> bool:
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError) as error:
        raise Invalid("on_message", handler, "cannot be called", "pass a function") from error
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    positional = [item for item in parameters if item.kind <= item.POSITIONAL_OR_KEYWORD]
    required = [item for item in positional if item.default is item.empty]
    if not positional or len(required) > _WITH_CONTEXT:
        fix = "write async def handle(task) or async def handle(task, context)"
        raise Invalid("on_message", handler, "does not take a message", fix)
    return len(positional) >= _WITH_CONTEXT


def describe_error(error: BaseException) -> str:
    """Return an error and where it was raised, for readers of dead letters."""
    description = format_error(error)
    places = format_places(error, _MAX_FRAMES, _OWN_FILES)
    return f"{description}\n{places}" if places else description


class Deadlines:
    """When running handlers must be done. One watcher serves all handlers.

    A timer per handler would cost more than most handlers do. The watcher wakes at the first
    deadline. A handler that started later usually ends later, and then wakes nobody.

    Args:
        clock: this machine's clock.
        on_late: called once for each delivery that exceeds its deadline.
    """

    def __init__(self, clock: Clock, on_late: Callable[[Delivery], None]) -> None:
        self._clock = clock
        self._on_late = on_late
        self._ends: dict[Delivery, Mono] = {}
        self._wakeup = Wakeup(clock, _SHORTEST_WAIT)
        self._next_check = clock.mono() + _LONGEST_WAIT

    def add(self, delivery: Delivery, end: Mono) -> None:
        """Watch a delivery until it is removed."""
        self._ends[delivery] = end
        if end < self._next_check:
            self._next_check = end
            self._wakeup.set()

    def remove(self, delivery: Delivery) -> None:
        """Stop watching a delivery, if it is watched."""
        self._ends.pop(delivery, None)

    async def watch(self) -> None:
        """Report each delivery that exceeds its deadline, until cancelled."""
        while True:
            await self._wakeup.wait(self._next_check)
            now = self._clock.mono()
            if now >= self._next_check:
                self._report_late(now)

    def _report_late(self, now: Mono) -> None:
        for delivery in [delivery for delivery, end in self._ends.items() if end <= now]:
            self.remove(delivery)
            self._on_late(delivery)
        self._next_check = min(self._ends.values(), default=now + _LONGEST_WAIT)
