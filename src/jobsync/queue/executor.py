"""Runs handlers: coroutine functions on the loop, plain functions on threads.

What a handler does becomes an outcome, whatever it raises. A coroutine whose time is over is
cancelled by who watches the deadlines; a plain function cannot be, and keeps its thread until
it returns. Each has a context of its own: what one sets in context variables no other sees.
"""

import asyncio
import contextvars
import inspect
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

from jobsync.core.messages import Cancel, Completed, Failed, HandlerVerdict, Snooze
from jobsync.errors import Invalid
from jobsync.queue.apart import run_apart
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.hand import Held

__all__ = ["THREADS", "Executor", "Handler", "Ran", "describe"]

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


class Ran(NamedTuple):
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

    async def run(self, held: Held) -> Ran:
        """Handle a message; whatever the handler does is an outcome, except to be cancelled."""
        if not self.is_async:
            return await self._run_function(held)
        arguments = (held.document, held.context) if self.takes_context else (held.document,)
        try:
            result = await run_apart(self._handler, *arguments)
        except asyncio.CancelledError:
            if _was_cancelled_by_others(held):
                raise
            return Ran(_tell_late(held.timeout) if held.is_late else Failed(_CANCELLED))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            # No variable: an error refers to this frame, which must not refer to it.
            return Ran(_tell_late(held.timeout) if held.is_late else Failed(describe(error), error))
        return Ran(_tell_late(held.timeout) if held.is_late else self._judge(result, held.context))

    async def _run_function(self, held: Held) -> Ran:
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
            return Ran(_tell_late(held.timeout), running)
        error = running.exception()
        if isinstance(error, Exception):
            return Ran(Failed(describe(error), error))
        return Ran(self._judge(running.result(), held.context))

    def _judge(self, result: Any, context: Context | None) -> HandlerVerdict:
        if isinstance(result, _WISHES):
            return result
        is_settled = context is not None and context.is_settled
        if not (self._auto_acknowledge or is_settled):
            return Failed(_UNSETTLED)
        return Completed(result)


def _was_cancelled_by_others(held: Held) -> bool:
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
