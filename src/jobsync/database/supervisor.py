"""The task that holds a database's background work.

Work that the store cannot serve now (`Unavailable`) is begun again after a pause. Anything
else that work raises ends all of it: the database has failed, and says so at every call.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from jobsync.components import Components
from jobsync.core.retry import backoff_limit
from jobsync.errors import Invalid, Unavailable
from jobsync.events import Event

__all__ = ["DatabaseFailed", "LifecycleLock", "Supervisor", "Work", "WorkPostponed"]


_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_GRACE = 5.0
"""Seconds that listeners have to finish when all ends."""

Work: TypeAlias = Callable[[], Awaitable[None]]


class WorkPostponed(Event, frozen=True, kw_only=True):
    """The store could not serve background work, which begins again after a pause."""

    name = "db:work-postponed"
    level = logging.WARNING

    work: str
    error: str
    pause: float


class DatabaseFailed(Event, frozen=True, kw_only=True):
    """Background work raised what nobody foresaw; every later call raises it again."""

    name = "db:failed"
    level = logging.ERROR

    error: str


class Supervisor:
    """Holds the task group of one connection.

    Args:
        components: the clock that pauses, the randomness that spreads, and the events,
            whose coroutines run here.
    """

    def __init__(self, components: Components) -> None:
        self._clock = components.clock
        self._randomness = components.randomness
        self._events = components.events
        self._group = asyncio.TaskGroup()
        self._ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()
        self._listeners: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._cause: BaseException | None = None

    def check(self) -> None:
        """Raise what made background work fail, if anything did."""
        if self._cause is not None:
            # Without the frames that earlier calls added to it.
            raise self._cause.with_traceback(None)

    async def start(self) -> None:
        """Begin to hold work."""
        self._task = asyncio.create_task(self._hold(), name="jobsync supervisor")
        await self._ready.wait()

    async def stop(self) -> None:
        """Cancel work, let listeners finish for a while, and wait for the end of all.

        Whoever calls this from within goes on to its own end.
        """
        self._ending.set()
        # Listeners that were told just now begin at the next turn of the loop.
        await asyncio.sleep(0)
        _cancel(self._work)
        await _await_all(self._listeners, _GRACE)
        _cancel(self._listeners)
        await _await_all(self._work | self._listeners)
        if self._task is not None and asyncio.current_task() not in self._work | self._listeners:
            await self._task

    def run(self, work: Work, name: str) -> asyncio.Task[None]:
        """Run work in the background, until it returns or is cancelled.

        Raises:
            whatever made the database fail.
        """
        self.check()
        task = self._group.create_task(self._persist(work, name), name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _persist(self, work: Work, name: str) -> None:
        attempt = 0
        while True:
            begun = self._clock.mono()
            try:
                await work()
            except Unavailable as error:
                lasted = self._clock.mono() - begun
                attempt = 1 if lasted > _LONGEST_PAUSE else attempt + 1
                longest = backoff_limit(attempt, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
                pause = self._randomness.uniform(0, longest)
                self._events.emit(WorkPostponed(work=name, error=str(error), pause=pause))
                await self._clock.sleep(pause)
            else:
                return

    async def _hold(self) -> None:
        loop = asyncio.get_running_loop()
        # Events may be emitted on other threads; their coroutines all run here.
        self._events.host(lambda told: loop.call_soon_threadsafe(self._listen, told))
        try:
            async with self._group:
                self._ready.set()
                await self._ending.wait()
        except BaseExceptionGroup as failures:
            self._cause = _first(failures)
            self._events.emit(DatabaseFailed(error=f"{type(self._cause).__name__}: {self._cause}"))
        finally:
            self._events.host(None)

    def _listen(self, told: Coroutine[Any, Any, None]) -> None:
        """Run a listener's coroutine, unless everything is ending."""
        try:
            task = self._group.create_task(told, name="jobsync listener")
        except RuntimeError:
            told.close()
        else:
            self._listeners.add(task)
            task.add_done_callback(self._listeners.discard)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def _others(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    return {task for task in tasks if task is not asyncio.current_task()}


def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in _others(tasks):
        task.cancel()


async def _await_all(tasks: set[asyncio.Task[None]], timeout: float | None = None) -> None:
    if others := _others(tasks):
        await asyncio.wait(others, timeout=timeout)


# One change of state at a time, and no hook that waits for itself.
#
# Hooks are called under a turn. One that asks for what is under way already is told so; one
# that asks for the opposite is refused. Neither waits for a turn that ends only after it.


class LifecycleLock:
    """A lock that knows who has it, and what for.

    Args:
        kind: whose turns these are, for errors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder: asyncio.Task[Any] | None = None
        self.doing = ""
        """What is under way."""

    @asynccontextmanager
    async def take(self, what: str) -> AsyncIterator[None]:
        """Do something when it is our turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Whoever had it in a loop that is over has it no more.
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            self._holder, self.doing = asyncio.current_task(), what
            try:
                yield
            finally:
                self._holder, self.doing = None, ""

    def is_part_of(self, what: str, name: str, *, is_hook: bool = False) -> bool:
        """Say whether the task that asks does that already, or is waited for by who does.

        Args:
            what: what it asks for.
            name: of whom.
            is_hook: whether whoever has the turn waits for this task.

        Raises:
            Invalid: it is part of something else.
        """
        is_own = self._holder is not None and self._holder is asyncio.current_task()
        if not (is_own or is_hook):
            return False
        if self.doing != what:
            fix = f"{what} it from elsewhere"
            raise Invalid(self._kind, name, f"{what} was asked for by a hook of {self.doing}", fix)
        return True
