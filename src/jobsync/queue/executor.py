"""Runs handlers: coroutine functions on the loop, plain functions on threads.

What a handler does becomes an outcome, whatever it raises. One that takes too long is
cancelled; a plain function cannot be, and keeps its thread until it returns.
"""

import asyncio
import inspect
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from jobsync.core.messages import Cancel, Completed, Failed, Outcome, Snooze
from jobsync.database.document import Document
from jobsync.errors import Invalid
from jobsync.queue.context import BlockingContext, Context

__all__ = ["Executor", "Handler", "describe"]

Handler: TypeAlias = Callable[..., Any]
"""Takes a message, and its context if it has a second parameter."""

_UNSETTLED = "the handler has called neither context.ack() nor context.nack()"
_WITH_CONTEXT = 2


class Executor:
    """Runs one handler, for many messages at once.

    Args:
        handler: the user's function.
        threads: how many of a plain function run at once.
        auto_acknowledge: whether to return is to acknowledge.

    Raises:
        Invalid: it cannot be called with a message.
    """

    def __init__(self, handler: Handler, threads: int, *, auto_acknowledge: bool) -> None:
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object may be a handler
        )
        self._handler = handler
        self._takes_context = _takes_context(handler)
        self._auto_acknowledge = auto_acknowledge
        self._threads = None if self.is_async else ThreadPoolExecutor(threads, "jobsync-handler")

    def start(self, document: Document, context: Context) -> "asyncio.Future[Any]":
        """Begin to handle a message."""
        loop = asyncio.get_running_loop()
        if self._threads is None:
            arguments = (document, context) if self._takes_context else (document,)
            return loop.create_task(self._handler(*arguments))
        blocking = BlockingContext(context, loop)
        given = (document, blocking) if self._takes_context else (document,)
        return loop.run_in_executor(self._threads, self._handler, *given)

    async def finish(
        self, running: "asyncio.Future[Any]", context: Context, timeout: float | None
    ) -> Outcome | None:
        """Wait for the outcome; None if the handler has settled its message itself."""
        try:
            done, _ = await asyncio.wait([running], timeout=timeout)
        except asyncio.CancelledError:
            await self._abort(running)
            raise
        if not done:
            await self._abort(running)
            late = TimeoutError(f"it took longer than {timeout:g} s")
            outcome: Outcome = Failed(describe(late), late)
        else:
            outcome = self._judge(running, context)
        return None if context.is_settled else outcome

    async def _abort(self, running: "asyncio.Future[Any]") -> None:
        """Cancel a coroutine, and wait until it has cleaned up."""
        if self.is_async and not running.done():
            running.cancel()
            await asyncio.wait([running])

    def _judge(self, running: "asyncio.Future[Any]", context: Context) -> Outcome:
        if running.cancelled():
            return Failed("CancelledError: the handler was cancelled from within")
        error = running.exception()
        if isinstance(error, Exception):
            return Failed(describe(error), error)
        if error is not None:
            raise error
        match running.result():
            case Snooze() | Cancel() as asked:
                return asked
            case result:
                if not (self._auto_acknowledge or context.is_settled):
                    return Failed(_UNSETTLED)
                return Completed(result)


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
    places = "".join(traceback.format_tb(error.__traceback__, limit=-3)).rstrip()
    return f"{told}\n{places}" if places else told
