"""Thread pool for blocking calls from event loops.

A call costs half the CPU of an executor's: one queue to the thread, one pipe back. Threads
are started as needed, up to a limit. A program that forgets to close its store still exits:
at exit, queued calls are dropped, running calls are waited for, and the threads end. A thread
that returned from foreign code into a finalized interpreter could crash the process.
"""

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

__all__ = ["ThreadPool", "gather_results"]

T = TypeVar("T")

_Call = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]", "_ReplyPipe"]
_CallQueue = SimpleQueue[_Call | None]


async def gather_results(calls: "Sequence[asyncio.Future[T]]") -> list[T]:
    """Return the results of running calls, in order."""
    # `gather` of one costs a fifth of a call.
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)


class _ReplyPipe:
    """Delivers results from threads to one event loop.

    The loop watches a pipe. With `call_soon_threadsafe`, which makes a handle for each reply
    and reads its socket until it is empty, a call would cost a third more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._replies: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        # Closed with the last thread that might write, not with the loop.
        finalize(self, _close, self._read_end, self._write_end).atexit = False
        loop.add_reader(self._read_end, self._deliver)

    def send(self, done: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        """Send a result, from any thread. If the loop is closed, nobody reads it."""
        self._replies.append((done, result, error))
        try:  # noqa: SIM105 - `suppress` costs as much as the rest of this
            os.write(self._write_end, b"\0")
        except BlockingIOError:
            # A full pipe wakes the loop already.
            pass

    def _deliver(self) -> None:
        # Read before the replies are taken: one that comes in between wakes the loop again. The
        # pipe is empty if a KeyboardInterrupt has ended the loop between two of its callbacks.
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        while self._replies:
            done, result, error = self._replies.popleft()
            if not done.done():
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_reply_pipes: "WeakKeyDictionary[asyncio.AbstractEventLoop, _ReplyPipe]" = WeakKeyDictionary()


def _reply_pipe_of(loop: asyncio.AbstractEventLoop) -> _ReplyPipe:
    pipe = _reply_pipes.get(loop)
    if pipe is None:
        pipe = _reply_pipes[loop] = _ReplyPipe(loop)
    return pipe


class ThreadPool:
    """Runs calls in the order of their submission, one in each thread.

    Args:
        name: the name of the threads.
        max_threads: how many are started at most.
        on_exit: called when the program exits, before it waits for running calls.
    """

    def __init__(
        self, name: str, max_threads: int, on_exit: Callable[[], object] = lambda: None
    ) -> None:
        self.on_exit = on_exit
        self._name = name
        self._max_threads = max_threads
        self._calls: _CallQueue = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # A set, because adding and discarding need no lock; a counter would.
        self._pending: set[asyncio.Future[Any]] = set()
        finalize(self, _shutdown, self._calls, self._threads).atexit = False
        _pools.add(self)

    def run(self, call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        """Run a call in a thread; await the result.

        Cancelling the future stops a call that has not started. One that has started runs to its
        end, and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        pipe = _reply_pipe_of(loop)
        done: asyncio.Future[T] = loop.create_future()
        self._pending.add(done)
        if len(self._pending) > len(self._threads) < self._max_threads:
            try:
                self._start_thread()
            except BaseException:
                self._pending.discard(done)
                raise
        self._calls.put((call, arguments, done, pipe))
        return done

    def shutdown(self) -> None:
        """End the threads after the calls already queued. Safe to repeat."""
        with self._lock:
            _shutdown(self._calls, self._threads)

    def drop_queued(self) -> None:
        """Drop the calls that have not started. Their futures stay pending: for program exit."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        with self._lock:
            if len(self._threads) < self._max_threads:
                # Not a method: a thread must not keep a forgotten pool alive.
                arguments = (self._calls, self._pending)
                thread = threading.Thread(
                    target=_run_calls, args=arguments, name=self._name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    # The system has no more threads; use the existing ones.
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)


def _run_calls(calls: _CallQueue, pending: "set[asyncio.Future[Any]]") -> None:
    while (item := calls.get()) is not None:
        call, arguments, done, pipe = item
        result: Any = None
        error: BaseException | None = None
        try:
            if not done.cancelled():
                result = call(*arguments)
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        # Keep nothing of this call alive while the thread waits for the next. The reply is sent
        # last: the loop's thread wakes up at once, and finds the interpreter free.
        del item, call, arguments
        pending.discard(done)
        pipe.send(done, result, error)
        del done, pipe, result, error


def _shutdown(calls: _CallQueue, threads: list[threading.Thread]) -> None:
    for _ in threads:
        calls.put(None)


_pools: "WeakSet[ThreadPool]" = WeakSet()


@atexit.register
def _shutdown_all() -> None:
    pools = list(_pools)
    for pool in pools:
        pool.on_exit()
        pool.drop_queued()
        pool.shutdown()
    for pool in pools:
        pool.join()
