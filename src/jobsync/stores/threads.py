"""Threads that do blocking work for event loops, many calls at a time.

A call costs half the CPU of an executor's: one queue on the way there, one pipe on the
way back. Threads are started as they are needed, up to a number. A program that
forgets to close its store still ends: at exit, calls that wait are dropped, those that have
begun are waited for, and the threads end. A thread that came back from foreign code into an
interpreter that is gone might take the process down with it.
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

__all__ = ["WorkThreads", "together"]

T = TypeVar("T")

_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]", "_Mailbox"]
_Queue = SimpleQueue[_Job | None]


async def together(calls: "Sequence[asyncio.Future[T]]") -> list[T]:
    """Give the results of calls that are under way, in order."""
    # Gathering one costs a fifth of a hop.
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)


class _Mailbox:
    """Where threads leave what they owe to the callers in one event loop.

    The loop watches a pipe. With `call_soon_threadsafe`, which makes a handle for each reply
    and reads its socket until that is empty, a call would cost a third more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._replies: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._bell, self._button = os.pipe()
        os.set_blocking(self._button, False)
        # Closed with the last thread that might ring, not with the loop.
        finalize(self, _close, self._bell, self._button).atexit = False
        loop.add_reader(self._bell, self._empty)

    def leave(self, done: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        """Leave a reply, from any thread. Where the loop is gone, nobody will look."""
        self._replies.append((done, result, error))
        try:  # noqa: SIM105 - `suppress` costs as much as the rest of this
            os.write(self._button, b"\0")
        except BlockingIOError:
            # A pipe that is full rings already.
            pass

    def _empty(self) -> None:
        # First this, then the replies: one that comes in between rings again.
        os.read(self._bell, 4096)
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


_mailboxes: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox]" = WeakKeyDictionary()


def _mailbox_of(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = _Mailbox(loop)
    return mailbox


class WorkThreads:
    """Runs calls, in the order in which they come and as many at once as there are threads.

    Args:
        name: what the threads are called.
        count: the most that are started.
        hurry: called at the end of the program, before it waits for calls that have begun.
    """

    def __init__(self, name: str, count: int, hurry: Callable[[], object] = lambda: None) -> None:
        self.hurry = hurry
        self._name = name
        self._count = count
        self._jobs: _Queue = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # A set, because adding and discarding need no lock; a count would.
        self._under_way: set[asyncio.Future[Any]] = set()
        finalize(self, _end, self._jobs, self._threads).atexit = False
        _all.add(self)

    def run(self, call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        """Run a call in a thread; await the result.

        A caller that is cancelled stops a call that has not begun. One that has begun
        runs, or has run, unseen.
        """
        loop = asyncio.get_running_loop()
        mailbox = _mailbox_of(loop)
        done: asyncio.Future[T] = loop.create_future()
        self._under_way.add(done)
        if len(self._under_way) > len(self._threads) < self._count:
            try:
                self._start()
            except BaseException:
                self._under_way.discard(done)
                raise
        self._jobs.put((call, arguments, done, mailbox))
        return done

    def end(self) -> None:
        """Let the threads end after the calls that they have. Safe to repeat."""
        with self._lock:
            _end(self._jobs, self._threads)

    def drop(self) -> None:
        """Forget the calls that have not begun. Nobody is told: for the end of the program."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if len(self._threads) < self._count:
                # Not a method: a thread must not keep alive what forgot to end it.
                arguments = (self._jobs, self._under_way)
                thread = threading.Thread(
                    target=_work, args=arguments, name=self._name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    # The system has no more threads; those that there are must do.
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)


def _work(jobs: _Queue, under_way: "set[asyncio.Future[Any]]") -> None:
    while (job := jobs.get()) is not None:
        call, arguments, done, mailbox = job
        result: Any = None
        error: BaseException | None = None
        try:
            if not done.cancelled():
                result = call(*arguments)
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        # Nothing of this call may live on while the thread waits for the next. The reply is
        # left last: the loop's thread wakes up at once, and finds the interpreter free.
        del job, call, arguments
        under_way.discard(done)
        mailbox.leave(done, result, error)
        del done, mailbox, result, error


def _end(jobs: _Queue, threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)


_all: "WeakSet[WorkThreads]" = WeakSet()


@atexit.register
def _end_all() -> None:
    pools = list(_all)
    for pool in pools:
        pool.hurry()
        pool.drop()
        pool.end()
    for pool in pools:
        pool.join()
