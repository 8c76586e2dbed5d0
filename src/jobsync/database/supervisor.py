"""Background work of a database, and the order of its lifecycle.

Work that raises `Unavailable` is restarted after a pause. Any other error ends all work: the
database has failed, and every later call raises that error.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from jobsync.components import Components
from jobsync.coordination.runner import find_caller
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Invalid, Unavailable
from jobsync.events import Event
from jobsync.safe_text import format_error, safe_str

__all__ = ["DatabaseFailed", "LifecycleLock", "Supervisor", "Work", "WorkPostponed"]

_BACKOFF = ExponentialBackoff(first=0.5, longest=30.0)
_GRACE = 5.0
"""Seconds that listeners have to finish at the end."""

Work: TypeAlias = Callable[[], Awaitable[None]]


class WorkPostponed(Event, frozen=True, kw_only=True):
    """The store could not serve background work, which restarts after a pause."""

    name = "db:work-postponed"
    level = logging.WARNING

    work: str
    error: str
    pause: float


class DatabaseFailed(Event, frozen=True, kw_only=True):
    """Background work raised an unexpected error; every later call raises it again."""

    name = "db:failed"
    level = logging.ERROR

    error: str


class Supervisor:
    """Runs the background tasks of one connection.

    Args:
        components: the clock and the randomness of pauses, and the events, whose coroutines
            run here.
        on_end: called when no more work runs, also if the event loop ends.
    """

    def __init__(self, components: Components, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end
        self._clock = components.clock
        self._randomness = components.randomness
        self._events = components.events
        self._group = asyncio.TaskGroup()
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()
        self._listeners: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._cause: BaseException | None = None
        self._has_stopped = False

    def check(self) -> None:
        """Raise the error that made background work fail, if any."""
        if self._cause is not None:
            # Without the frames that earlier calls have added.
            raise self._cause.with_traceback(None)

    async def start(self) -> None:
        """Start to accept work, and to run the coroutines of listeners."""
        loop = asyncio.get_running_loop()
        # Events may be emitted on other threads; their coroutines all run here.
        self._events.host(lambda work: loop.call_soon_threadsafe(self._run_listener, work))
        self._task = asyncio.create_task(self._host_tasks(), name="jobsync supervisor")
        await self._ready.wait()

    async def stop(self) -> None:
        """Cancel work, give listeners time to finish, and wait until all has ended.

        A caller that is itself background work is neither cancelled nor waited for. If this call
        is cancelled, listeners are cancelled too.
        """
        self._stopping.set()
        # Listeners that were called just now begin at the next turn of the loop.
        await asyncio.sleep(0)
        _cancel(self._work)
        try:
            await _await_all(self._listeners, _GRACE)
        finally:
            _cancel(self._listeners)
        await _await_all(self._work | self._listeners)
        self._events.host(None)
        self._has_stopped = True
        if self._task is None or find_caller() in self._work | self._listeners:
            return
        # One of an event loop that was closed has ended with it.
        if self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])

    def list_running(self) -> list[str]:
        """Return the names of the work and listeners that run, without the caller."""
        tasks = _others(self._work | self._listeners)
        return sorted(task.get_name() for task in tasks if not task.done())

    def run(self, work: Work, name: str) -> asyncio.Task[None]:
        """Run work in the background, until it returns or is cancelled.

        Raises:
            the error that made the database fail.
        """
        self.check()
        task = self._group.create_task(self._retry(work, name), name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def run_once(self, work: Work, name: str) -> None:
        """Run work in the background, unless work with this name runs already."""
        if name not in self.list_running():
            self.run(work, name)

    async def cancel(self, name: str) -> None:
        """Cancel work with this name, and wait until it has ended."""
        tasks = {task for task in _others(self._work) if task.get_name() == name}
        _cancel(tasks)
        await _await_all(tasks)

    async def _retry(self, work: Work, name: str) -> None:
        attempt = 0
        while True:
            started = self._clock.mono()
            try:
                await work()
            except Unavailable as error:
                lasted = self._clock.mono() - started
                attempt = 1 if lasted > _BACKOFF.longest else attempt + 1
                pause = _BACKOFF.draw(attempt, self._randomness)
                self._events.emit(WorkPostponed(work=name, error=safe_str(error), pause=pause))
                await self._clock.sleep(pause)
            else:
                return

    async def _host_tasks(self) -> None:
        try:
            async with self._group:
                self._ready.set()
                await self._stopping.wait()
        except BaseExceptionGroup as failures:
            self._cause = _first_error(failures)
            self._events.emit(DatabaseFailed(error=format_error(self._cause)))
        finally:
            self._on_end()

    def _run_listener(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a listener's coroutine, unless all has ended."""
        if self._has_stopped:
            work.close()
            return
        # Not in the group: when work fails, its listeners have yet to learn of it.
        task = asyncio.get_running_loop().create_task(work, name="jobsync listener")
        self._listeners.add(task)
        task.add_done_callback(self._listeners.discard)


def _first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def _others(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    return tasks - {find_caller()}


def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in _others(tasks):
        task.cancel()


async def _await_all(tasks: set[asyncio.Task[None]], timeout: float | None = None) -> None:
    if others := _others(tasks):
        await asyncio.wait(others, timeout=timeout)


class LifecycleLock:
    """Allows one lifecycle action, such as start or stop, at a time.

    Hooks run while an action holds the lock. A hook that calls the same action returns at once;
    one that calls another action is refused. Neither waits for a lock that is released only
    after it.

    Args:
        kind: of the locked object, for errors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder: asyncio.Task[Any] | None = None
        self.action = ""
        """The action that holds the lock."""

    @asynccontextmanager
    async def hold(self, action: str) -> AsyncIterator[None]:
        """Hold the lock for an action."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # A holder in a loop that has ended holds it no longer.
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            self._holder, self.action = find_caller(), action
            try:
                yield
            finally:
                self._holder, self.action = None, ""

    def is_reentrant(self, action: str, name: str, *, is_hook: bool = False) -> bool:
        """Whether the current task is part of this action already.

        Args:
            action: that is called.
            name: of the locked object.
            is_hook: whether the holder waits for the current task.

        Raises:
            Invalid: it is part of another action.
        """
        is_own = self._holder is not None and self._holder is find_caller()
        if not (is_own or is_hook):
            return False
        if self.action != action:
            problem = f"cannot {action} in a hook of {self.action}"
            raise Invalid(self._kind, name, problem, f"call {action} outside the hook")
        return True
