"""Calls of coroutines on one event loop, from other threads and other event loops.

A caller gets the result of its call, or an error if the loop has ended; it never waits forever. A
caller that is interrupted, by Ctrl-C or by the cancellation of its task, cancels its call. Calls
may come from any thread, also from a signal handler that interrupted another call: nothing here
holds a lock while it waits, and each blocking call has its own wakeup pipe.
"""

import asyncio
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import finalize

__all__ = ["Background", "BlockingCall", "LoopCalls"]

T = TypeVar("T")

_SLICE = 1.0
"""Seconds after which a waiter looks whether the loop was closed, which tells nobody."""


class BlockingCall(Protocol):
    """Runs a coroutine on another thread's loop and waits for it."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any:
        """Return the coroutine's result."""
        ...


class LoopCalls:
    """Runs coroutines on one event loop for callers elsewhere.

    Args:
        loop: the event loop.
        build_end_error: returns the error of a call that the end of the loop has cut off.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, build_end_error: Callable[[], Exception]
    ) -> None:
        self._loop = loop
        self._build_end_error = build_end_error
        self._pipe = _WakeupPipe()
        os.set_blocking(self._pipe.reader, False)
        self._queued: deque[_PendingCall[Any]] = deque()
        # The loop keeps only weak references to tasks.
        self._running: dict[_PendingCall[Any], asyncio.Task[None]] = {}
        self._idle_pipes: list[_WakeupPipe] = []
        """Pipes of calls that have returned, for reuse."""
        self._has_ended = False

    def open(self) -> None:
        """Start the calls. Called on the loop's thread, or before the loop runs."""
        if not self._has_ended:
            self._loop.add_reader(self._pipe.reader, self._start_calls)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and block until it has ended; return its result."""
        pipe = self._get_pipe()
        call = _PendingCall(work, pipe.wake)
        try:
            self._submit(call)
            while not pipe.wait(_SLICE):
                if self._loop.is_closed():
                    call.abandon()
                    break
        except BaseException:
            # A signal handler has raised, such as Ctrl-C's. The pipe will be woken once more.
            self._cancel(call)
            raise
        self._idle_pipes.append(pipe)
        return self._get_result(call)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop for a task of another one; return its result."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            # A closed loop has nobody who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        call = _PendingCall(work, wake)
        self._submit(call)
        try:
            await self._wait(call, ended)
        except asyncio.CancelledError:
            self._cancel(call)
            # As on one loop, a task that is cancelled ends after what it awaits.
            await self._wait(call, ended)
            raise
        return self._get_result(call)

    async def _wait(self, call: "_PendingCall[Any]", ended: asyncio.Event) -> None:
        """Wait until a call has ended, or the loop is closed: then it never runs on."""
        while not ended.is_set():
            if self._loop.is_closed():
                call.abandon()
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_SLICE):
                    await ended.wait()

    def end(self) -> None:
        """Start no more calls. Called on the loop's thread, or after its end.

        Calls that run go on, or are cancelled with the other tasks of the loop.
        """
        self._has_ended = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pipe.reader)
        self._fail_queued()

    def fail_unstarted(self) -> None:
        """Fail the calls whose tasks were cancelled before their first step: those never run."""
        self._queued.extend(self._running)
        self._has_ended = True
        self._fail_queued()

    def _submit(self, call: "_PendingCall[Any]") -> None:
        self._queued.append(call)
        self._pipe.wake()
        if self._has_ended:
            # It ended just now, and no longer reads the queue.
            self._fail_queued()

    def _get_pipe(self) -> "_WakeupPipe":
        try:
            return self._idle_pipes.pop()
        except IndexError:
            return _WakeupPipe()

    def _start_calls(self) -> None:
        # The pipe first, then the queue: a call that comes in between wakes the loop again.
        # A loop that Ctrl-C or an exit has interrupted, and that runs on, may come here twice.
        with suppress(BlockingIOError):
            self._pipe.consume()
        while self._queued:
            self._start(self._queued.popleft())

    def _start(self, call: "_PendingCall[Any]") -> None:
        if call.is_cancelled:
            call.fail(asyncio.CancelledError())
            return
        task = self._loop.create_task(_run_call(call), context=call.context)
        self._running[call] = task
        task.add_done_callback(partial(self._forget, call))

    def _forget(self, call: "_PendingCall[Any]", _: asyncio.Task[None]) -> None:
        del self._running[call]
        # One that was cancelled before its first step has told nobody.
        call.fail(asyncio.CancelledError())

    def _cancel(self, call: "_PendingCall[Any]") -> None:
        """Cancel a call whose caller waits no longer."""
        call.is_cancelled = True
        # A closed loop has cancelled it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel_running, call)

    def _cancel_running(self, call: "_PendingCall[Any]") -> None:
        if (task := self._running.get(call)) is not None:
            task.cancel()
        else:
            # It has ended, or it is queued, or its caller was interrupted before that.
            call.fail(asyncio.CancelledError())

    def _fail_queued(self) -> None:
        """Fail the calls that came too late to be started."""
        while self._queued:
            # Another thread may do the same.
            with suppress(IndexError):
                self._queued.popleft().fail(asyncio.CancelledError())

    def _get_result(self, call: "_PendingCall[T]") -> T:
        match call.outcome:
            case None | asyncio.CancelledError():
                raise self._build_end_error()
            case BaseException() as error:
                raise error
            case (value,):
                return value


class Background:
    """An event loop on a thread of its own, for callers that block. It runs until it is stopped.

    Args:
        name: of the thread.
        build_end_error: returns the error of a call that the stop has cut off.
    """

    def __init__(self, name: str, build_end_error: Callable[[], Exception]) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._build_end_error = build_end_error
        self._calls = LoopCalls(self._loop, build_end_error)
        self._calls.open()
        # A daemon: a program that forgets to stop it must still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs: not after `stop`, nor in a forked child, which has no such thread."""
        return self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            Exception: that of `build_end_error`, if the loop was stopped meanwhile, by another
                thread or a signal handler.
        """
        if not self.is_alive:
            work.close()
            raise self._build_end_error()
        return self._calls.call(work)

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the loop, if it still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self) -> None:
        """Stop the loop and cancel what runs there. Safe to repeat, from any other thread."""
        self.post(self._is_stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._is_stopping.wait())
        finally:
            try:
                self._cancel_running()
                self._loop.close()
            finally:
                self._calls.fail_unstarted()

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
        # Unlike `select.select`, it takes any file descriptor.
        self._poll = select.poll()
        self._poll.register(self.reader, select.POLLIN)
        # Closed with the last reference: a caller may have been interrupted.
        finalize(self, _close, self.reader, self._writer).atexit = False

    def wake(self) -> None:
        """Wake the waiter, from any thread, even before it waits."""
        os.write(self._writer, b"\0")

    def wait(self, seconds: float) -> bool:
        """Wait for a wakeup for some seconds; return whether one came, and consume it."""
        if not self._poll.poll(1000 * seconds):
            return False
        self.consume()
        return True

    def consume(self) -> None:
        """Consume all wakeups so far."""
        os.read(self.reader, 64)


class _PendingCall(Generic[T]):
    """A coroutine that runs on the loop while its caller waits.

    Args:
        work: the coroutine.
        wake: wakes the caller.
    """

    def __init__(self, work: Coroutine[Any, Any, T], wake: Callable[[], object]) -> None:
        self.work = work
        self.context = copy_context()
        self.is_cancelled = False
        self.outcome: tuple[T] | BaseException | None = None
        self._wake = wake

    def finish(self, value: T) -> None:
        """Set the result and wake the caller."""
        self.outcome = (value,)
        self._wake()

    def abandon(self) -> None:
        """Abandon it: its loop was closed, and its caller waits no longer."""
        if self.outcome is None:
            self.outcome = asyncio.CancelledError()

    def fail(self, error: BaseException) -> None:
        """Set the error and wake the caller, unless it was woken before."""
        if self.outcome is not None:
            # A task of a loop that is gone ends when it is freed: the pipe is another caller's.
            return
        # Nothing happens to one that has ended; one that never began must not be left so. Whatever
        # it raises at its end, its caller waits, and others do after it.
        with suppress(Exception):
            self.work.close()
        self.outcome = error
        self._wake()


async def _run_call(call: _PendingCall[Any]) -> None:
    try:
        call.finish(await call.work)
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        call.fail(error)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
