"""The event loop that a database lives on, and how calls from elsewhere reach it.

Everything that a database does happens on the loop that has connected it, so nothing in it needs
protection from other threads, and no connection is used on two loops. A call on another loop, or
on a thread without one, runs on the home loop while its caller waits. This is the same on every
store.

If the home loop has ended without a disconnect, calls run on the loop of their caller.
"""

import asyncio
import functools
import inspect
import os
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from jobsync.errors import Invalid, Unavailable
from jobsync.loop_calls import LoopCalls
from jobsync.user_code import note_coroutine

__all__ = ["HomeLoop", "check_blocking", "on_home_loop"]

T = TypeVar("T")
C = TypeVar("C", bound=type)

_END = object()


class HomeLoop:
    """The event loop of a database.

    Args:
        get_name: returns the name of the database's store, for errors.
    """

    def __init__(self, get_name: Callable[[], str]) -> None:
        self._get_name = get_name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: LoopCalls | None = None
        """Opened by the first call from elsewhere."""
        self._pid = os.getpid()

    def enter(self) -> bool:
        """Make the running loop the home loop, unless another one is; return whether it is."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop is None or self._is_gone(self._loop):
                self._loop, self._calls, self._pid = loop, None, os.getpid()
            return self._loop is loop

    def leave(self) -> None:
        """Have no home loop any more. Called on that loop, after its end, or in a forked child."""
        if self.is_forked:
            # What was here is the parent's, even the lock, which may be held for ever.
            self._lock, self._calls = threading.Lock(), None
        with self._lock:
            calls, self._calls, self._loop = self._calls, None, None
        if calls is not None:
            calls.end()

    @property
    def is_here(self) -> bool:
        """Whether calls run on the running loop: it is the home loop, or there is none."""
        loop = self._loop
        return loop is None or loop is asyncio.get_running_loop() or self._is_gone(loop)

    @property
    def is_elsewhere(self) -> bool:
        """Whether there is a home loop, and it is not the one that runs in this thread."""
        loop = self._loop
        return not (loop is None or loop is _find_running_loop() or self._is_gone(loop))

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process with the home loop."""
        return self._loop is not None and os.getpid() != self._pid

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the home loop, for a task of any loop.

        Raises:
            Unavailable: the home loop has ended meanwhile, or does not run.
        """
        calls = None if self.is_here else self._find_calls(work)
        return await (work if calls is None else calls.run(work))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the home loop, and block until it has ended.

        Raises:
            Invalid: an event loop runs in this thread, and would be blocked.
            Unavailable: the home loop has ended meanwhile, or does not run.
        """
        _check_no_loop(work)
        calls = self._find_calls(work)
        return asyncio.run(work) if calls is None else calls.call(work)

    def call_here(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this thread, and block until it has ended.

        For work on a connection of the caller, which other threads cannot use.

        Raises:
            Invalid: an event loop runs in this thread, and would be blocked.
        """
        _check_no_loop(work)
        return asyncio.run(work)

    def iterate(self, items: AsyncGenerator[T]) -> AsyncIterator[T]:
        """Return an iterator for the running loop over items that are read on the home loop."""
        return items if self.is_here else self._iterate_there(items)

    async def _iterate_there(self, items: AsyncGenerator[T]) -> AsyncIterator[T]:
        async def get_next() -> Any:
            return await anext(items, _END)

        try:
            while (item := await self.run(get_next())) is not _END:
                yield item
        finally:
            await self.run(_close(items))

    def _is_gone(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether a loop cannot run again here; a forked child has no thread that runs it."""
        return loop.is_closed() or os.getpid() != self._pid

    def _find_calls(self, work: Coroutine[Any, Any, Any]) -> LoopCalls | None:
        """Return what reaches the home loop; None if there is no such loop."""
        loop = self._loop
        if loop is None or self._is_gone(loop):
            return None
        if not loop.is_running():
            work.close()
            fix = "keep the loop running that has connected it, or use jobsync.sync"
            raise Unavailable(self._get_name(), "the event loop of the database does not run", fix)
        with self._lock:
            if self._loop is not loop:
                return None
            if self._calls is None:
                calls = LoopCalls(loop, self._build_end_error)
                try:
                    loop.call_soon_threadsafe(calls.open)
                except RuntimeError:
                    # It was closed just now.
                    return None
                self._calls = calls
            return self._calls

    def _build_end_error(self) -> Unavailable:
        reason = "the database was disconnected meanwhile"
        return Unavailable(self._get_name(), reason, "connect again")


async def _close(items: AsyncGenerator[Any]) -> None:
    await items.aclose()


def check_blocking(name: str, fix: str = "await the call of jobsync.Database instead") -> None:
    """Check that a call may block this thread.

    Args:
        name: of what was called, as its user has written it.
        fix: what to write in a coroutine.

    Raises:
        Invalid: an event loop runs in it.
    """
    if _find_running_loop() is not None:
        problem = "would block the event loop that runs in this thread"
        raise Invalid("call", name, problem, fix)


def _check_no_loop(work: Coroutine[Any, Any, Any]) -> None:
    try:
        check_blocking(getattr(work, "__qualname__", type(work).__name__))
    except Invalid:
        work.close()
        raise


def _find_running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Homed(Protocol):
    @property
    def home_loop(self) -> HomeLoop | None: ...


def on_home_loop(kind: C) -> C:
    """Run the public coroutine functions of a class on the home loop of its objects.

    They may then be awaited on any loop. A class decorator; the objects have a `home_loop`.
    """
    for name, member in list(vars(kind).items()):
        if not name.startswith("_") and inspect.iscoroutinefunction(member):
            setattr(kind, name, _run_at_home(member))
    return kind


def _run_at_home(
    method: Callable[..., Coroutine[Any, Any, T]],
) -> Callable[..., Coroutine[Any, Any, T]]:
    async def run(self: _Homed, arguments: tuple[Any, ...], options: dict[str, Any]) -> T:
        home = self.home_loop
        # A connection of the caller belongs to the caller's loop or thread.
        if home is None or home.is_here or options.get("connection") is not None:
            return await method(self, *arguments, **options)
        return await home.run(method(self, *arguments, **options))

    # Not a coroutine function: what it has made is known before anybody awaits it.
    @functools.wraps(method)
    def call(self: _Homed, /, *arguments: Any, **options: Any) -> Coroutine[Any, Any, T]:
        work = run(self, arguments, options)
        # Warnings of Python name it, by the class that users know.
        name = f"{type(self).__name__}.{method.__name__}"
        setattr(work, "__qualname__", name)  # noqa: B010 - mypy does not know it
        note_coroutine(work)
        return work

    return _mark_coroutine_function(call)


def _mark_coroutine_function(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function as one that returns a coroutine, as frameworks look for it."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    marker = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001
    function._is_coroutine = marker  # type: ignore[attr-defined]  # noqa: SLF001
    return function
