"""Where a member lives: on a thread and an event loop of its own, or on its caller's.

A thread of its own beats on while the caller's loop is blocked. The caller's loop is for
simulated worlds, which have one loop for everything.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypeVar

from jobsync.errors import Misconfigured, Unavailable

__all__ = ["LoopHost", "OwnThread", "SameLoop"]

T = TypeVar("T")

_LAST_WORDS = 5.0
"""Seconds that a thread has, once its loop has ended, to say why."""

Main: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class LoopHost(Protocol):
    """Runs a member, and carries calls to it and from it."""

    def start(self, main: Main) -> None:
        """Begin to run it. Called on the loop that is home to the user's callbacks."""
        ...

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon where the member lives."""
        ...

    def tell(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon at home."""
        ...

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something where the member lives; wait for it at home.

        Raises:
            Unavailable: the member has ended; its cause is what ended it.
        """
        ...

    async def finish(self) -> None:
        """Wait, at home, until the member has ended; raise what ended it."""
        ...

    def cancel(self) -> None:
        """Let the member end at once, at whatever await it stands."""
        ...


class SameLoop:
    """Runs a member as a task of the caller's loop."""

    def start(self, main: Main) -> None:
        """Begin to run it."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(main())

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon."""
        self._loop.call_soon(call, *arguments)

    def tell(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon."""
        self._loop.call_soon(call, *arguments)

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something while the member lives."""
        return await _while_alive(self._task, self._loop.create_task(work()))

    async def finish(self) -> None:
        """Wait until it has ended."""
        await asyncio.shield(self._task)

    def cancel(self) -> None:
        """Let it end at once."""
        self._task.cancel()


class OwnThread:
    """Runs a member on a thread of its own."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._begun = threading.Event()

    def start(self, main: Main) -> None:
        """Begin to run it, and wait until its loop runs."""
        self._home = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._home.create_future()
        # A daemon: a program that forgets to leave must still end.
        threading.Thread(
            target=self._run, args=(main,), name="jobsync-session", daemon=True
        ).start()
        self._begun.wait()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon on the thread's loop, if it still runs.

        Raises:
            Misconfigured: this is a forked child, which has no such thread.
        """
        self._check_process()
        # A loop that was closed has nobody left who could be called.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def tell(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon on the loop that started it.

        Once that is closed nobody is left who could do what this member is elected to.
        """
        try:
            self._home.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            self._main.cancel()

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something on the thread's loop."""
        self._check_process()
        _check_alive(self._done)
        under_way = asyncio.run_coroutine_threadsafe(work(), self._loop)
        return await _while_alive(self._done, asyncio.wrap_future(under_way))

    async def finish(self) -> None:
        """Wait until the thread has ended."""
        self._check_process()
        await asyncio.shield(self._done)

    def cancel(self) -> None:
        """Let it end at once."""
        self.post(self._main.cancel)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Misconfigured(
                "membership", "…", "was joined before a fork", "join again in the child"
            )

    def _run(self, main: Main) -> None:
        async def begin() -> None:
            self._loop = asyncio.get_running_loop()
            self._main = asyncio.ensure_future(main())
            self._begun.set()
            await self._main

        error: BaseException | None = None
        try:
            asyncio.run(begin())
        except BaseException as raised:  # noqa: BLE001 - whoever waits gets it
            error = raised
        self.tell(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
            # Asked for here: perhaps nobody waits, and the member has told of it already.
            self._done.exception()


def _check_alive(member: "asyncio.Future[None]") -> None:
    """Refuse to go on without the member."""
    if member.done():
        cause = None if member.cancelled() else member.exception()
        raise Unavailable("the session", "has ended", "join again") from cause


async def _while_alive(member: "asyncio.Future[None]", work: "asyncio.Future[T]") -> T:
    """Wait for something that ends with the member at the latest."""
    both: list[asyncio.Future[Any]] = [member, work]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        _check_alive(member)
    if work.cancelled():
        # The loop that it ran on has ended, and the member is about to tell why.
        await asyncio.wait([member], timeout=_LAST_WORDS)
        _check_alive(member)
    return await work
