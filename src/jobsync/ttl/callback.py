"""Asks a user's callback about expired records: True deletes a record, False keeps it.

Whatever the callback does, the sweep goes on. It may raise, return something else, or take too
long: then the record stays, and the reason is reported. A call that goes on after its time takes no
slot from others, and nobody is asked about its record again until it ends. Only if very many go on,
nobody is asked at all: each has a thread.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

from jobsync.coordination.session import count_forks
from jobsync.core.clock import Seconds
from jobsync.database.document import Document
from jobsync.database.resource import Resource
from jobsync.safe_text import safe_repr
from jobsync.user_code import (
    FunctionEnd,
    UserThreads,
    await_result,
    call_function,
    describe_error,
    end_forked_child,
    is_coroutine_function,
    run_in_own_context,
)

__all__ = ["CALLBACK_TIMEOUT", "MAX_ENDLESS", "ExpiryCallback", "find_calling_callback"]

CALLBACK_TIMEOUT: Seconds = 60.0
"""Seconds that a callback has for one record."""

_SLOTS = 10
"""How many records a callback is asked about at once."""

MAX_ENDLESS = 100
"""How many calls of one callback may go on after their time before nobody is asked any more."""

_GRACE: Seconds = 1.0
"""Seconds that a cancelled coroutine has to end before it counts as one that goes on."""

_KIND = "a callback"

_calling: ContextVar["ExpiryCallback | None"] = ContextVar("jobsync_ttl_callback", default=None)


def find_calling_callback() -> "ExpiryCallback | None":
    """Return the callback that the caller runs in, if any."""
    return _calling.get()


class ExpiryCallback:
    """A user's callback for the expired records of one resource.

    Args:
        function: `callback(record, resource)`, a coroutine function or a plain function, which
            runs on a thread.
        timeout: seconds that it has for one record.
    """

    def __init__(
        self, function: Callable[..., Any], *, timeout: Seconds = CALLBACK_TIMEOUT
    ) -> None:
        self._function = function
        self._is_async = is_coroutine_function(function)
        self.timeout = timeout
        self._threads = UserThreads("jobsync-ttl")
        self._tasks: dict[asyncio.Task[FunctionEnd], str] = {}
        """Calls that have not ended, and the ids of their records."""
        self._calls: dict[object, str] = {}
        """Those of a plain function: they end on their threads, also after their event loop."""

    @property
    def is_running(self) -> bool:
        """Whether any call has not ended."""
        return bool(self._find_asked())

    @property
    def has_room(self) -> bool:
        """Whether anybody can be asked."""
        # Those that are asked now count too, and end in time or not.
        return len(self._find_asked()) < MAX_ENDLESS + _SLOTS

    def _find_asked(self) -> set[str]:
        """Return the ids of the records whose calls have not ended."""
        for task in list(self._tasks):
            if task.get_loop().is_closed():
                # It never ends, and nothing of it runs any more.
                del self._tasks[task]
        # A copy, because threads change it.
        return {*self._tasks.values(), *self._calls.copy().values()}

    async def ask(self, records: Sequence[Document], resource: Resource) -> list[bool | str]:
        """Ask about records, several at once.

        Returns:
            For each record True to delete it, False to keep it, or what went wrong.
        """
        verdicts: list[bool | str] = [""] * len(records)
        waiting = iter(range(len(records)))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_SLOTS, len(records))):
                group.create_task(self._ask_in_turn(records, resource, waiting, verdicts))
        return verdicts

    async def _ask_in_turn(
        self,
        records: Sequence[Document],
        resource: Resource,
        waiting: Iterator[int],
        verdicts: list[bool | str],
    ) -> None:
        """Ask about one record after another."""
        for i in waiting:
            if records[i]["id"] in self._find_asked():
                verdicts[i] = f"a call that exceeded {self.timeout:g} s has not returned yet"
            elif not self.has_room:
                problem = f"more than {MAX_ENDLESS} calls that exceeded {self.timeout:g} s go on"
                verdicts[i] = problem
            else:
                verdicts[i] = await self._ask_one(records[i], resource)

    async def _ask_one(self, record: Document, resource: Resource) -> bool | str:
        loop = asyncio.get_running_loop()
        start = loop.time()
        task = loop.create_task(self._perform(record, resource))
        self._tasks[task] = record["id"]
        task.add_done_callback(self._on_end)
        try:
            done, _ = await asyncio.wait([task], timeout=self.timeout)
        finally:
            # Also if the sweep is cancelled. A function on a thread goes on.
            task.cancel()
        late = f"the callback has not returned after {self.timeout:g} s"
        if not done:
            await asyncio.wait([task], timeout=_GRACE)
            return late
        if loop.time() - start > self.timeout:
            # It has blocked the loop, and nobody could interrupt it.
            return late
        end = FunctionEnd(error=asyncio.CancelledError()) if task.cancelled() else task.result()
        if end.error is not None:
            return f"the callback raised {describe_error(end.error, {__file__})}"
        if type(end.result) is not bool:
            shown = safe_repr(end.result)
            return f"the callback must return True to delete or False to keep (got {shown})"
        return bool(end.result)

    async def _perform(self, record: Document, resource: Resource) -> FunctionEnd:
        _calling.set(self)
        forks = count_forks()
        try:
            if self._is_async:
                result = await run_in_own_context(self._function, record, resource)
            else:
                end = await self._call_on_thread(record, resource)
                if end.error is not None:
                    # Not raised: a coroutine cannot raise every error.
                    return end
                result = end.result
            return FunctionEnd(await await_result(result))
        except (GeneratorExit, KeyboardInterrupt, asyncio.CancelledError):
            # This coroutine is closed, the program shall end, or the time is over.
            raise
        except BaseException as error:  # noqa: BLE001 - a callback may raise anything
            return FunctionEnd(error=error)
        finally:
            end_forked_child(forks, _KIND)

    async def _call_on_thread(self, record: Document, resource: Resource) -> FunctionEnd:
        call = object()

        def work() -> FunctionEnd:
            try:
                return call_function(self._function, record, resource, kind=_KIND)
            finally:
                # On the thread: the event loop may be closed by now.
                del self._calls[call]

        self._calls[call] = record["id"]
        try:
            end = asyncio.get_running_loop().run_in_executor(
                self._threads, copy_context().run, work
            )
        except BaseException:
            # No thread could be started.
            del self._calls[call]
            raise
        await asyncio.wait([end])
        return end.result()

    def _on_end(self, task: asyncio.Task[FunctionEnd]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            # Retrieved, so that it is not logged. The event loop itself raises KeyboardInterrupt.
            task.exception()
