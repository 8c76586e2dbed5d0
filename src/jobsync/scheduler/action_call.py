"""One call of an action, on the event loop or on a thread, in a task of its own.

The task can be cancelled, and left behind, without the task that waits for it. The call has ended
when nothing of it runs any more: a plain function on a thread outlives the task if that is
cancelled from outside, and its event loop too.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from jobsync.coordination.session import count_forks
from jobsync.core.clock import Clock
from jobsync.scheduler.context import JobContext
from jobsync.user_code import (
    FunctionEnd,
    await_result,
    call_function,
    discard,
    end_forked_child,
    name_generator,
    run_in_own_context,
)

__all__ = ["ActionCall"]

_KIND = "an action"
_SHORTEST_WAIT = 0.01


class ActionCall:
    """One call of an action, in a task of its own.

    Args:
        work: the action with its arguments.
        context: of the attempt.
        clock: this machine's clock.
        threads: where a plain function runs; None for a coroutine function.
        on_end: called with this after the action has really ended.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        context: JobContext,
        clock: Clock,
        threads: concurrent.futures.Executor | None,
        on_end: Callable[["ActionCall"], None],
    ) -> None:
        self.context = context
        self._work = work
        self._clock = clock
        self._threads = threads
        self._on_end = on_end
        self._began = clock.mono()
        self._end: FunctionEnd | None = None
        self._function: asyncio.Future[FunctionEnd] | None = None
        """The plain function, once it was started."""
        self._returned: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the function has returned, which its event loop may be too closed to tell."""
        # Nobody who waits for it can cancel it.
        self._returned.set_running_or_notify_cancel()
        name = f"jobsync action {context.job_name}"
        self._task = asyncio.get_running_loop().create_task(self._perform(), name=name)
        self._task.add_done_callback(self._on_done)

    @property
    def is_on_thread(self) -> bool:
        """Whether a plain function runs, which nobody can cancel."""
        function = self._function
        if function is None or function.done():
            return False
        return not (function.get_loop().is_closed() and self._returned.done())

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._is_task_over and not self.is_on_thread

    @property
    def age(self) -> float:
        """Seconds since the call."""
        return self._clock.mono() - self._began

    async def wait(self, seconds: float | None) -> bool:
        """Wait until the action has ended, or for so many seconds; return whether it has."""
        deadline = None if seconds is None else self._clock.mono() + seconds
        while (pending := self._find_pending()) is not None:
            left = None if deadline is None else deadline - self._clock.mono()
            if left is not None and left <= 0:
                return False
            timeout = None if left is None else max(left, _SHORTEST_WAIT)
            await asyncio.wait([pending], timeout=timeout)
        return True

    def find_end(self) -> FunctionEnd:
        """Return how the action ended."""
        if self._end is not None:
            return self._end
        if self._task.cancelled():
            return FunctionEnd(error=asyncio.CancelledError())
        return FunctionEnd(error=self._task.exception())

    def interrupt(self, reason: str) -> None:
        """Mark the action as lost: nothing counts any more. Cancel it if that is possible."""
        self.context.mark_lost(reason)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the action, unless it is a plain function that runs."""
        if not self.is_on_thread:
            self._task.cancel()

    @property
    def _is_task_over(self) -> bool:
        return self._task.done() or self._task.get_loop().is_closed()

    def _find_pending(self) -> "asyncio.Future[Any] | None":
        if not self._is_task_over:
            return self._task
        if self._function is None or not self.is_on_thread:
            return None
        if self._function.get_loop().is_closed():
            return asyncio.wrap_future(self._returned)
        return self._function

    async def _perform(self) -> None:
        forks = count_forks()
        try:
            self._end = await self._call()
        except (GeneratorExit, KeyboardInterrupt):
            # This coroutine is closed, or the program shall end.
            raise
        except BaseException as error:  # noqa: BLE001 - an action may raise anything
            self._end = FunctionEnd(error=error)
        finally:
            end_forked_child(forks, _KIND)

    async def _call(self) -> FunctionEnd:
        if self._threads is None:
            result = await run_in_own_context(self._work)
        else:
            end = await self._call_function(self._threads)
            if end.error is not None:
                # Not raised: a coroutine cannot raise every error.
                return end
            result = end.result
        if self.context.lost:
            discard(result)
            return FunctionEnd()
        result = await await_result(result)
        if generator := name_generator(result):
            raise TypeError(f"the action returned {generator}, which nobody runs")
        return FunctionEnd(result)

    async def _call_function(self, threads: concurrent.futures.Executor) -> FunctionEnd:
        within = copy_context().run
        self._function = asyncio.get_running_loop().run_in_executor(threads, within, self._run)
        self._function.add_done_callback(self._on_done)
        await asyncio.wait([self._function])
        return self._function.result()

    def _run(self) -> FunctionEnd:
        """Call the function, on its thread."""
        try:
            return call_function(self._work, kind=_KIND)
        finally:
            self._returned.set_result(None)

    def _on_done(self, future: "asyncio.Future[Any]") -> None:
        """Note the end of the task or the function."""
        if not future.cancelled():
            # Retrieved, so that it is not logged. The event loop itself raises KeyboardInterrupt.
            future.exception()
        if not self.has_ended:
            return
        if self._function is not None:
            # The task may have been cancelled before it could take the result.
            discard(self._function.result().result)
        self._on_end(self)
