"""Event loops: where a member loop runs, and how coroutines wait for each other.

A member loop runs on a thread and an event loop of its own, so that it goes on sending heartbeats
while the caller's loop is blocked. In a simulated world it shares the caller's loop, because such
a world has one loop for everything.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from jobsync.core.clock import Clock, Mono
from jobsync.errors import Misconfigured, Unavailable
from jobsync.events import Event, Events

__all__ = [
    "HomeEvents",
    "LoopHost",
    "OwnThread",
    "SameLoop",
    "WaitForChange",
    "Wakeup",
    "find_caller",
    "first_of",
    "listening",
    "run_for",
]

T = TypeVar("T")

_ERROR_TIMEOUT = 5.0
"""Seconds in which a thread must report its error after its loop has ended."""

_CANCEL_INTERVAL = 0.05
"""Seconds between two cancellations of a step that cleans up in several steps of its own."""

Main: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class LoopHost(Protocol):
    """Runs a member loop, and carries calls between it and the home loop."""

    def start(self, main: Main) -> None:
        """Start the member. Called on the home loop, which runs the user's callbacks."""
        ...

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the member's loop."""
        ...

    def post_home(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the home loop."""
        ...

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the member's loop, and wait for its result on the home loop.

        Raises:
            Unavailable: the member has ended; the cause is the error that ended it.
        """
        ...

    async def finish(self) -> None:
        """Wait on the home loop until the member has ended, and raise the error that ended it."""
        ...

    def cancel(self) -> None:
        """Cancel the member at its current await."""
        ...


class SameLoop:
    """Runs a member as a task of the caller's loop."""

    def start(self, main: Main) -> None:
        """Start the task."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(main())

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call."""
        self._loop.call_soon(call, *arguments)

    def post_home(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call."""
        self._loop.call_soon(call, *arguments)

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine while the member is alive."""
        return await _while_alive(self._task, self._loop.create_task(work()))

    async def finish(self) -> None:
        """Wait until the task has ended."""
        await asyncio.shield(self._task)

    def cancel(self) -> None:
        """Cancel the task."""
        self._task.cancel()


class OwnThread:
    """Runs a member on a thread of its own."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._started = threading.Event()

    def start(self, main: Main) -> None:
        """Start the thread, and wait until its loop runs."""
        self._home = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._home.create_future()
        # A daemon: a program that forgets to leave must still be able to exit.
        threading.Thread(
            target=self._run, args=(main,), name="jobsync-session", daemon=True
        ).start()
        self._started.wait()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the thread's loop, if that still runs.

        Raises:
            Misconfigured: this is a forked child, which has no such thread.
        """
        self._check_process()
        # A closed loop has nothing left to call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def post_home(self, call: Callable[..., object], *arguments: object) -> None:
        """Schedule a call on the home loop.

        Cancels the member if the home loop is closed: nothing is left to do the work that this
        member could be elected for.
        """
        try:
            self._home.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            self._main.cancel()

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the thread's loop."""
        self._check_process()
        _check_alive(self._done)
        coroutine = work()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            # The loop is closed, and the member is about to report why.
            future = Future[T]()
            future.cancel()
        try:
            return await _while_alive(self._done, asyncio.wrap_future(future))
        finally:
            if self._loop.is_closed():
                # Perhaps nobody has begun it, and nobody can any more.
                coroutine.close()

    async def finish(self) -> None:
        """Wait until the thread has ended."""
        self._check_process()
        await asyncio.shield(self._done)

    def cancel(self) -> None:
        """Cancel the member at its current await."""
        self.post(self._main.cancel)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Misconfigured(
                "membership", "…", "was joined before a fork", "join again in the child"
            )

    def _run(self, main: Main) -> None:
        async def run_main() -> None:
            self._loop = asyncio.get_running_loop()
            self._main = asyncio.ensure_future(main())
            self._started.set()
            await self._main

        error: BaseException | None = None
        try:
            asyncio.run(run_main())
        except BaseException as raised:  # noqa: BLE001 - passed on to `finish`
            error = raised
        self.post_home(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
            # Retrieved here: perhaps nobody waits, and the member has already reported it.
            self._done.exception()


class HomeEvents(Events):
    """Emits events on the home loop, whichever thread they come from."""

    def __init__(self, host: LoopHost, home: Events) -> None:
        super().__init__()
        self._host = host
        self._home = home
        self._queue: deque[Event] = deque()

    def emit(self, event: Event) -> None:
        """Schedule an event, after all earlier ones."""
        self._queue.append(event)
        self._host.post_home(self._emit_next)

    def _emit_next(self) -> None:
        self._home.emit(self._queue.popleft())


def _check_alive(member: "asyncio.Future[None]") -> None:
    if member.done():
        cause = None if member.cancelled() else member.exception()
        raise Unavailable("the session", "it has ended", "join again") from cause


async def _while_alive(member: "asyncio.Future[None]", work: "asyncio.Future[T]") -> T:
    """Wait for work, but no longer than the member is alive."""
    both: list[asyncio.Future[Any]] = [member, work]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not work.done():
            # Whoever waited for it is cancelled or gone: nobody else asks for its error.
            work.add_done_callback(_retrieve_error)
    if not work.done():
        work.cancel()
        _check_alive(member)
    if work.cancelled():
        # The loop that it was to run on has ended, and the member is about to report why.
        await asyncio.wait([member], timeout=_ERROR_TIMEOUT)
        _check_alive(member)
    return await work


def _retrieve_error(work: "asyncio.Future[Any]") -> None:
    if not work.cancelled():
        work.exception()


class _Step:
    """A step that one task runs for another."""

    def __init__(self, caller: "asyncio.Task[Any] | None") -> None:
        self.caller = caller
        """None after the step, whose context tasks that it has started keep."""


_step: ContextVar[_Step | None] = ContextVar("jobsync_step", default=None)


def find_caller() -> "asyncio.Task[Any] | None":
    """Return the current task, or the one for which it runs a step."""
    step = _step.get()
    return asyncio.current_task() if step is None or step.caller is None else step.caller


async def run_for(
    wait: Callable[["asyncio.Task[None]"], Awaitable[None]],
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    cancelled_for: float,
) -> Literal["ended", "cancelled", "running"]:
    """Run a step in its own task; return how it went.

    A step that takes longer is cancelled. One that runs on all the same is left behind.

    Args:
        wait: waits until the task of the step has ended, or its time is over.
        work: the step.
        cancelled_for: seconds that it may take after it is cancelled.

    Raises:
        Exception: the step's own error.
    """
    context, step = copy_context(), _Step(find_caller())
    context.run(_step.set, step)
    task = asyncio.get_running_loop().create_task(work(), context=context)
    task.add_done_callback(lambda _: setattr(step, "caller", None))
    try:
        await wait(task)
    except asyncio.CancelledError:
        await _cancel(task, cancelled_for)
        raise
    was_slow = not task.done()
    await _cancel(task, cancelled_for)
    if not task.done():
        return "running"
    if not task.cancelled():
        task.result()
    return "cancelled" if was_slow else "ended"


async def _cancel(task: "asyncio.Task[None]", seconds: float) -> None:
    """Cancel a task until it ends, but only for so long."""
    end = asyncio.get_running_loop().time() + seconds
    while not task.done() and (left := end - asyncio.get_running_loop().time()) > 0:
        task.cancel()
        await asyncio.wait([task], timeout=min(left, _CANCEL_INTERVAL))


class Wakeup:
    """A timer that can be cut short. A `set` before `wait` counts for the next `wait`.

    Args:
        clock: the clock that measures the wait.
        grain: seconds by which a wait may last too long. Without it, a clock that is slower
            than the loop's would make the loop spin.
    """

    def __init__(self, clock: Clock, grain: float) -> None:
        self._clock = clock
        self._grain = grain
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """End the current wait, or else the next one."""
        self._is_set = True
        self._wake()

    async def wait(self, until: Mono) -> None:
        """Wait until a moment, or until it is set."""
        loop = asyncio.get_running_loop()
        while not self._is_set and (left := until - self._clock.mono()) > 0:
            self._waiter = loop.create_future()
            timer = loop.call_later(max(left, self._grain), self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        self._is_set = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


WaitForChange: TypeAlias = Callable[[float], Awaitable[bool]]
"""Waits for at most this many seconds. Returns whether there was a change."""


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of several coroutines and cancel the others. Errors propagate."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # In this order: a group's own would differ from run to run.
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def listening(*waits: Coroutine[Any, Any, object]) -> AsyncIterator[WaitForChange]:
    """Start to wait for the first of several coroutines before the block reads.

    A change while the block runs counts, so nothing is missed between the read and the wait. The
    block calls the yielded function to wait; errors of the coroutines are raised there.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    is_closed = False

    async def wait_for_change(timeout: float) -> bool:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return bool(done)

    try:
        # Each runs up to its first await.
        await asyncio.sleep(0)
        yield wait_for_change
    except GeneratorExit:
        # The generator was closed without being resumed: there is nothing left to await.
        is_closed = True
        raise
    finally:
        for task in tasks:
            task.cancel()
        if not is_closed:
            await _wait_for_end(tasks)


async def _wait_for_end(tasks: Sequence[asyncio.Future[object]]) -> None:
    """Wait until tasks that were cancelled have ended, also if the caller is cancelled too.

    This is not `gather`, whose steps differ between versions of Python, as would the histories
    of simulated worlds.
    """
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        await _wait_for_end(tasks)
        raise
    for task in tasks:
        # Retrieved, so that it is not logged: nobody waits for it any more.
        if not task.cancelled():
            task.exception()
