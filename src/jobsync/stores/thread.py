"""A thread that does blocking work for event loops, one call at a time.

A call costs half the CPU of an executor's: one queue, one wake-up each way. It is a
daemon, so that a program which forgets to close its store still ends.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["WorkThread"]

T = TypeVar("T")

_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class WorkThread:
    """Runs calls in the order in which they come."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call in the thread and give its result.

        A caller that is cancelled does not stop the call: it runs, or has run, unseen.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put((call, arguments, done, loop))
        return await done

    def end(self) -> None:
        """Let the thread end after the calls that it has."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, arguments, done, loop = job
            result, failure = None, None
            try:
                result = call(*arguments)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                failure = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, done, result, failure)
            # Nothing of the last call may live on while this waits for the next.
            del job, call, arguments, done, result, failure


def _settle(done: "asyncio.Future[Any]", result: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
