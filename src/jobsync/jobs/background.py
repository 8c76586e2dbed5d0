"""An event loop on a thread of its own, for callers that block.

Calls may come from any thread, also from a signal handler that interrupted another call:
nothing here holds a lock while it waits.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from jobsync.errors import Unavailable

__all__ = ["Background"]

T = TypeVar("T")

_LOOK_UP = 1.0
"""Seconds after which a caller that waits looks whether there is anybody to wait for."""


class Background:
    """A loop that runs until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        # The loop itself holds on to none of them.
        self._under_way: dict[_Errand[Any], asyncio.Task[None]] = {}
        # A daemon: a program that forgets to leave must still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something there, and wait for it.

        Raises:
            Unavailable: the loop was stopped, by another thread or a signal handler.
        """
        errand = _Errand(work)
        # Should it end at this very moment, that is noticed below.
        if self._thread.is_alive():
            self.post(self._begin, errand)
        else:
            # Stopped; or this is a forked child, which has no such thread.
            errand.end()
        while True:
            with suppress(queue.Empty):
                return errand.result(_LOOK_UP)
            if not self._thread.is_alive():
                errand.end()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something there soon, if the loop still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self) -> None:
        """End the loop, with whatever still runs there. Safe to repeat, from any other thread."""
        self.post(self._is_stopping.set)
        self._thread.join()

    def _begin(self, errand: "_Errand[Any]") -> None:
        self._under_way[errand] = self._loop.create_task(self._run_errand(errand))

    async def _run_errand(self, errand: "_Errand[Any]") -> None:
        try:
            await errand.run()
        finally:
            del self._under_way[errand]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._is_stopping.wait())
        finally:
            self._cancel_all()
            self._loop.close()

    def _cancel_all(self) -> None:
        # Calls may come, and begin, until the very end.
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))


class _Errand(Generic[T]):
    """Something that is run on the loop, and whoever waits for it.

    It wakes its caller by itself: to have a future do so takes the loop two rounds more.

    Args:
        work: what to run.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._outcomes: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()

    async def run(self) -> None:
        """Run it, on the loop."""
        try:
            self._outcomes.put((await self._work,))
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            self._outcomes.put(error)

    def end(self) -> None:
        """Take it for over, also if it was never begun."""
        self._outcomes.put(None)

    def result(self, seconds: float) -> T:
        """Give what it came to, as soon as it has.

        Raises:
            queue.Empty: it goes on after so many seconds.
            Unavailable: it was not begun, or ended together with the loop.
        """
        match self._outcomes.get(timeout=seconds):
            case None | asyncio.CancelledError():
                self._work.close()
                raise _left()
            case BaseException() as error:
                raise error
            case (value,):
                return value


def _left() -> Unavailable:
    return Unavailable("the job", "was left meanwhile", "enter again")
