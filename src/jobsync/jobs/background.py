"""An event loop on a thread of its own, for callers that block.

A caller gets what came of its call, or learns that the loop was stopped; none waits for what
never comes. Calls may come from any thread, also from a signal handler that interrupted
another call: nothing here holds a lock while it waits, and each has a bell of its own.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import finalize

from jobsync.errors import Unavailable

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """A loop that runs until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._bell = _Bell()
        self._loop.add_reader(self._bell.ear, self._take_over)
        self._handed_over: deque[_Errand[Any]] = deque()
        # The loop itself holds on to none of them.
        self._under_way: dict[_Errand[Any], asyncio.Task[None]] = {}
        self._bells: list[_Bell] = []
        """Of callers that have come back, for those who come next."""
        self._is_over = False
        # A daemon: a program that forgets to leave must still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something there, and wait for it.

        Raises:
            Unavailable: the loop was stopped, by another thread or a signal handler.
        """
        # Stopped; or this is a forked child, which has no such thread.
        if not self._thread.is_alive():
            work.close()
            raise _left()
        errand = _Errand(work, self._take_bell())
        self._handed_over.append(errand)
        self._bell.ring()
        if self._is_over:
            # Just now, and nobody looks any more.
            self._hand_back()
        errand.bell.wait()
        self._bells.append(errand.bell)
        return errand.result()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something there soon, if the loop still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self) -> None:
        """End the loop, with whatever still runs there. Safe to repeat, from any other thread."""
        self.post(self._is_stopping.set)
        self._thread.join()

    def _take_bell(self) -> "_Bell":
        try:
            return self._bells.pop()
        except IndexError:
            return _Bell()

    def _take_over(self) -> None:
        # First this, then the errands: one that comes in between rings again.
        self._bell.wait()
        while self._handed_over:
            self._begin(self._handed_over.popleft())

    def _begin(self, errand: "_Errand[Any]") -> None:
        self._under_way[errand] = self._loop.create_task(self._run_errand(errand))

    async def _run_errand(self, errand: "_Errand[Any]") -> None:
        try:
            errand.end(await errand.work)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            errand.fail(error)
        finally:
            del self._under_way[errand]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._is_stopping.wait())
        finally:
            try:
                self._cancel_all()
                self._loop.close()
            finally:
                # A task that is cancelled before its first step takes none.
                self._handed_over.extend(self._under_way)
                self._is_over = True
                self._hand_back()

    def _hand_back(self) -> None:
        """End what came too late to be begun."""
        while self._handed_over:
            # Perhaps another does the same.
            with suppress(IndexError):
                self._handed_over.popleft().fail(asyncio.CancelledError())

    def _cancel_all(self) -> None:
        # Calls may come, and begin, until the very end.
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))


class _Bell:
    """Wakes one thread, or one loop.

    Ringing lets go of the interpreter, so that whoever is woken can go on at once. Woken by
    a lock he would find that the other still has the interpreter, and sleep again; a loop
    woken by `call_soon_threadsafe` would make a handle and a context, and read twice.
    """

    def __init__(self) -> None:
        self.ear, self._button = os.pipe()
        # Closed with the last who might ring: a caller may have been interrupted.
        finalize(self, _close, self.ear, self._button).atexit = False

    def ring(self) -> None:
        """Wake him, from any thread; before he waits, if need be."""
        os.write(self._button, b"\0")

    def wait(self) -> None:
        """Wait for a ring, and forget it, with all that came before it."""
        os.read(self.ear, 64)


class _Errand(Generic[T]):
    """Something that is run on the loop for somebody who waits.

    Args:
        work: what to run.
        bell: wakes who waits.
    """

    def __init__(self, work: Coroutine[Any, Any, T], bell: _Bell) -> None:
        self.work = work
        self.bell = bell
        self._outcome: tuple[T] | BaseException | None = None

    def end(self, value: T) -> None:
        """Let it be known what it came to."""
        self._outcome = (value,)
        self.bell.ring()

    def fail(self, error: BaseException) -> None:
        """Let it be known what was raised."""
        self._outcome = error
        self.bell.ring()

    def result(self) -> T:
        """Give what it came to.

        Raises:
            Unavailable: it was not begun, or ended together with the loop.
        """
        match self._outcome:
            case None | asyncio.CancelledError():
                self.work.close()
                raise _left()
            case BaseException() as error:
                raise error
            case (value,):
                return value


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _left() -> Unavailable:
    return Unavailable("the job", "was left meanwhile", "enter again")
