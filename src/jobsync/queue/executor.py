"""Runs handlers: coroutine functions on the loop, plain functions on threads.

What a handler does becomes an outcome, whatever it raises. A coroutine whose time is over is
cancelled by who watches the deadlines; a plain function cannot be, and keeps its thread until
it returns. Each has a context of its own: what one sets in context variables no other sees.
"""

import asyncio
import contextvars
import inspect
import traceback
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import CoroutineType, coroutine
from typing import Any, NamedTuple, TypeAlias, TypeVar

from jobsync.coordination.runner import Wakeup
from jobsync.core.clock import Clock, Mono
from jobsync.core.messages import Cancel, Completed, Failed, HandlerVerdict, Snooze
from jobsync.errors import Invalid
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.in_flight import Delivery

__all__ = [
    "THREADS",
    "Deadlines",
    "Executor",
    "Handler",
    "HandlerOutcome",
    "describe",
    "run_in_own_context",
]


# A coroutine function in a context of its own, within the task of whoever awaits it.
#
# What it sets in context variables is seen by all that runs below it, and by nobody after it: as
# if it were a task, at a fraction of what one costs.


T = TypeVar("T")


@coroutine
def run_in_own_context(
    function: Callable[..., Awaitable[T]], *arguments: Any
) -> Generator[Any, Any, T]:
    """Call a function in a copy of this context, and give what it gives once awaited."""
    run = copy_context().run
    called = run(function, *arguments)
    running = called if isinstance(called, CoroutineType) else _wait_for(called)
    try:
        awaited = run(running.send, None)
        while True:
            try:
                answer = yield awaited
            except BaseException as error:  # noqa: BLE001 - a cancellation is its own to handle
                awaited = run(running.throw, error)
            else:
                awaited = run(running.send, answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def _wait_for(called: Awaitable[T]) -> T:
    return await called


Handler: TypeAlias = Callable[..., Any]
"""Takes a message, and its context if it has a second parameter."""

THREADS = "jobsync-handler"
"""How the names of threads begin that run plain functions."""

_UNSETTLED = "the handler has called neither context.ack() nor context.nack()"
_CANCELLED = "CancelledError: the handler was cancelled from within"
_WITH_CONTEXT = 2
_OURS = {__file__}
_PLACES = 3
"""So many of the places that an error has passed are told, without those in here."""
_WISHES = (Snooze, Cancel)
"""What a handler may return for something else to become of its message."""


class HandlerOutcome(NamedTuple):
    """How a handler ended."""

    outcome: HandlerVerdict
    overrun: "asyncio.Future[Any] | None" = None
    """A plain function that goes on though its time is over."""


class Executor:
    """Runs one handler, for many messages at once.

    Args:
        handler: the user's function.
        threads: how many of a plain function run at once.
        auto_acknowledge: whether to return is to acknowledge.

    Attributes:
        is_async: whether it is a coroutine function.
        takes_context: whether it wants to be told about its message.

    Raises:
        Invalid: it cannot be called with a message.
    """

    def __init__(self, handler: Handler, threads: int, *, auto_acknowledge: bool) -> None:
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object may be a handler
        )
        self._handler = handler
        self.takes_context = _takes_context(handler)
        self._auto_acknowledge = auto_acknowledge
        self._count = threads
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Let threads go that have nothing to do; the next message brings new ones."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def run(self, held: Delivery) -> HandlerOutcome:
        """Handle a message; whatever the handler does is an outcome, except to be cancelled."""
        if not self.is_async:
            return await self._run_function(held)
        arguments = (held.document, held.context) if self.takes_context else (held.document,)
        try:
            result = await run_in_own_context(self._handler, *arguments)
        except asyncio.CancelledError:
            if _was_cancelled_by_others(held):
                raise
            return HandlerOutcome(_tell_late(held.timeout) if held.is_late else Failed(_CANCELLED))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            # No variable: an error refers to this frame, which must not refer to it.
            return HandlerOutcome(
                _tell_late(held.timeout) if held.is_late else Failed(describe(error), error)
            )
        return HandlerOutcome(
            _tell_late(held.timeout) if held.is_late else self._judge(result, held.context)
        )

    async def _run_function(self, held: Delivery) -> HandlerOutcome:
        loop = asyncio.get_running_loop()
        arguments: tuple[Any, ...] = (held.document,)
        if held.context is not None:
            arguments = (held.document, BlockingContext(held.context, loop))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, THREADS)
        # Whoever it calls can tell that it is a handler's call.
        within = contextvars.copy_context().run
        running = loop.run_in_executor(self._threads, within, self._handler, *arguments)
        done, _ = await asyncio.wait([running], timeout=held.timeout)
        if not done:
            return HandlerOutcome(_tell_late(held.timeout), running)
        error = running.exception()
        if isinstance(error, Exception):
            return HandlerOutcome(Failed(describe(error), error))
        return HandlerOutcome(self._judge(running.result(), held.context))

    def _judge(self, result: Any, context: Context | None) -> HandlerVerdict:
        if isinstance(result, _WISHES):
            return result
        is_settled = context is not None and context.is_settled
        if not (self._auto_acknowledge or is_settled):
            return Failed(_UNSETTLED)
        return Completed(result)


def _was_cancelled_by_others(held: Delivery) -> bool:
    """Say whether somebody wants a handler to end, other than because it is late."""
    task = asyncio.current_task()
    if task is None:
        return True
    return bool(task.uncancel() if held.is_late else task.cancelling())


def _tell_late(timeout: float | None) -> Failed:
    late = TimeoutError(f"it took longer than {timeout:g} s")
    return Failed(describe(late), late)


def _takes_context(handler: Handler) -> bool:
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError) as error:
        raise Invalid("on_message", handler, "cannot be called", "pass a function") from error
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return True
    places = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
    needed = [each for each in places if each.default is each.empty]
    if not places or len(needed) > _WITH_CONTEXT:
        fix = "write async def handle(task) or async def handle(task, context)"
        raise Invalid("on_message", handler, "does not take a message", fix)
    return len(places) >= _WITH_CONTEXT


def describe(error: BaseException) -> str:
    """Give an error, then the place where it was raised, for who looks at dead letters."""
    told = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename not in _OURS]
    places = "".join(traceback.format_list(theirs[-_PLACES:])).rstrip()
    return f"{told}\n{places}" if places else told


# Tells of handlers whose time is over, each as soon as it is: one watch for all that run.
#
# A timer for each would cost more than most handlers do. The watch looks when the first of them
# may be over; who began since has to end later, as a rule, and then it is not woken for that.


_SHORTEST_REST = 0.01
_LONGEST_REST = 3600.0


class Deadlines:
    """When handlers have to be done.

    Args:
        clock: this machine's.
        over: told whose time is over, once.
    """

    def __init__(self, clock: Clock, over: Callable[[Delivery], None]) -> None:
        self._clock = clock
        self._over = over
        self._ends: dict[Delivery, Mono] = {}
        self._alarm = Wakeup(clock, _SHORTEST_REST)
        self._looks_at = clock.mono() + _LONGEST_REST

    def add(self, held: Delivery, end: Mono) -> None:
        """Watch a handler, until it is removed."""
        self._ends[held] = end
        if end < self._looks_at:
            self._looks_at = end
            self._alarm.set()

    def remove(self, held: Delivery) -> None:
        """Watch it no more, if it is watched."""
        self._ends.pop(held, None)

    async def watch_for_ever(self) -> None:
        """Tell of each whose time is over, until cancelled."""
        while True:
            await self._alarm.wait(self._looks_at)
            now = self._clock.mono()
            if now >= self._looks_at:
                self._look(now)

    def _look(self, now: Mono) -> None:
        for held in [held for held, end in self._ends.items() if end <= now]:
            self.remove(held)
            self._over(held)
        self._looks_at = min(self._ends.values(), default=now + _LONGEST_REST)
