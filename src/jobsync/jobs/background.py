"""An event loop on its own thread, for callers that block.

A caller gets the result of its call, or an error if the loop was stopped; it never waits
forever. Calls may come from any thread, also from a signal handler that interrupted another
call: nothing here holds a lock while it waits, and each call has its own wakeup pipe.
"""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar
from weakref import finalize

from jobsync.errors import Unavailable

__all__ = ["Background", "BlockingCall", "ExitGuard"]

T = TypeVar("T")


class BlockingCall(Protocol):
    """Runs a coroutine on another thread's loop and waits for it."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any:
        """Return the coroutine's result."""
        ...


class Background:
    """A loop that runs until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._pipe = _WakeupPipe()
        self._loop.add_reader(self._pipe.reader, self._start_calls)
        self._queued: deque[_PendingCall[Any]] = deque()
        # The loop keeps only weak references to tasks.
        self._running: dict[_PendingCall[Any], asyncio.Task[None]] = {}
        self._idle_pipes: list[_WakeupPipe] = []
        """Pipes of calls that have returned, for reuse."""
        self._is_stopped = False
        # A daemon: a program that forgets to leave the job must still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            Unavailable: the loop was stopped, by another thread or a signal handler.
        """
        # Stopped, or this is a forked child, which does not have the thread.
        if not self._thread.is_alive():
            work.close()
            raise _job_left()
        call = _PendingCall(work, self._get_pipe())
        self._queued.append(call)
        self._pipe.wake()
        if self._is_stopped:
            # It stopped just now, and no longer reads the queue.
            self._cancel_queued()
        call.pipe.wait()
        self._idle_pipes.append(call.pipe)
        return call.result()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the loop, if it still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self) -> None:
        """Stop the loop and cancel what runs there. Safe to repeat, from any other thread."""
        self.post(self._is_stopping.set)
        self._thread.join()

    def _get_pipe(self) -> "_WakeupPipe":
        try:
            return self._idle_pipes.pop()
        except IndexError:
            return _WakeupPipe()

    def _start_calls(self) -> None:
        # The pipe first, then the queue: a call that comes in between wakes the loop again.
        self._pipe.wait()
        while self._queued:
            self._start(self._queued.popleft())

    def _start(self, call: "_PendingCall[Any]") -> None:
        self._running[call] = self._loop.create_task(self._run_call(call))

    async def _run_call(self, call: "_PendingCall[Any]") -> None:
        try:
            call.finish(await call.work)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            call.fail(error)
        finally:
            del self._running[call]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._is_stopping.wait())
        finally:
            try:
                self._cancel_running()
                self._loop.close()
            finally:
                # A task that is cancelled before its first step never runs.
                self._queued.extend(self._running)
                self._is_stopped = True
                self._cancel_queued()

    def _cancel_queued(self) -> None:
        """Fail the calls that came too late to be started."""
        while self._queued:
            # Another thread may do the same.
            with suppress(IndexError):
                self._queued.popleft().fail(asyncio.CancelledError())

    def _cancel_running(self) -> None:
        # Calls may come and start until the very end.
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))


class _WakeupPipe:
    """Wakes one thread or one loop.

    Writing to a pipe releases the interpreter lock, so the woken thread continues at once. Woken
    by a `threading` lock it would find the interpreter still busy, and sleep again; a loop woken
    by `call_soon_threadsafe` would create a handle and a context, and read twice.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        # Closed with the last reference: a caller may have been interrupted.
        finalize(self, _close, self.reader, self._writer).atexit = False

    def wake(self) -> None:
        """Wake the waiter, from any thread, even before it waits."""
        os.write(self._writer, b"\0")

    def wait(self) -> None:
        """Wait for a wakeup; consumes it and all earlier ones."""
        os.read(self.reader, 64)


class _PendingCall(Generic[T]):
    """A coroutine that runs on the loop while its caller waits.

    Args:
        work: the coroutine.
        pipe: wakes the caller.
    """

    def __init__(self, work: Coroutine[Any, Any, T], pipe: _WakeupPipe) -> None:
        self.work = work
        self.pipe = pipe
        self._outcome: tuple[T] | BaseException | None = None

    def finish(self, value: T) -> None:
        """Set the result and wake the caller."""
        self._outcome = (value,)
        self.pipe.wake()

    def fail(self, error: BaseException) -> None:
        """Set the error and wake the caller."""
        self._outcome = error
        self.pipe.wake()

    def result(self) -> T:
        """Return the result, or raise the error.

        Raises:
            Unavailable: it was not started, or was cancelled with the loop.
        """
        match self._outcome:
            case None | asyncio.CancelledError():
                self.work.close()
                raise _job_left()
            case BaseException() as error:
                raise error
            case (value,):
                return value


class ExitGuard:
    """Detects an `__exit__` that is called before its `with` block has ended.

    A signal handler that calls `__exit__` by hand passes the same arguments as the end of the
    block, but the block's work is not done. The stack shows the difference: at the end of a
    block the block itself is the caller; a call from within comes from further up the stack or
    from another thread.

    Args:
        depth: how many calls up the stack the block is.
    """

    def __init__(self, depth: int) -> None:
        self._block: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - the only way to know
        self._thread = threading.get_ident()

    def is_left_early(self, depth: int) -> bool:
        """Whether the caller, `depth` calls up, leaves a block that has not ended."""
        if threading.get_ident() != self._thread:
            return True
        caller: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - likewise
        if caller is self._block:
            return False
        while caller is not None and caller is not self._block:
            caller = caller.f_back
        # A block that is not on the stack was entered by an ExitStack, which leaves at its end.
        return caller is not None

    def release(self) -> None:
        """Drop the reference to the block and its variables."""
        self._block = None


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _job_left() -> Unavailable:
    return Unavailable("the job", "was left meanwhile", "enter again")
