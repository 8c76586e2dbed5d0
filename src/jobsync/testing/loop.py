"""An event loop with virtual time and random order.

A seeded draw picks one of the callbacks that are ready, so that every interleaving which real
scheduling allows occurs with some seed; the same seed gives the same run. When nothing is ready,
time jumps to the next timer. A callback belongs to the host that created it and runs only while
that host runs, so that a pause or a kill may occur at any await of unmodified code.

There are no sockets. A function that code sends to a thread runs on a thread, but only while the
loop waits for it: the two take turns, and the seed decides when. Such a function waits with
`block`, which lets virtual time pass.
"""

import asyncio
import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

from jobsync.testing.stepped_thread import SteppedThread

__all__ = ["HOST", "CallbackGate", "ScheduledCall", "SimulatedLoop", "Stuck", "block"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MAX_STEPS = 1_000_000
"""Callbacks that may run while no time passes; more count as an endless loop."""

_MAX_AWAITS_IN_CLOSE = 100
"""How often a coroutine that is closed may await again."""


class Stuck(Exception):
    """The world cannot continue: nothing will ever happen again, or time does not pass."""


class Dice(Protocol):
    """A source of randomness, such as `random.Random`."""

    def random(self) -> float:
        """Return a number from 0 to 1, excluding 1."""
        ...


class ScheduledCall(asyncio.TimerHandle):
    """A scheduled callback; a handle for asyncio.

    One is created for every step of every world, so it has only what a step needs and does not
    check the debug mode of the loop.

    Attributes:
        callback: the function to call.
        args: its arguments.
        context: the context to call it in, which identifies its host.
        is_cancelled: whether it was cancelled.
    """

    __slots__ = ("args", "callback", "context", "is_cancelled")

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> None:
        self._when = when
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False

    def __repr__(self) -> str:
        return f"{self.callback!r} at {self._when:g} s"

    def cancel(self) -> None:
        """Cancel the callback."""
        self.is_cancelled = True
        # So that the arguments are not kept alive until its time.
        self.callback, self.args = _do_nothing, ()

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.is_cancelled

    def get_context(self) -> Context:
        """Return the context that it runs in: loops of Python 3.12 and later ask."""
        return self.context


def _do_nothing() -> None:
    """Replace a callback that was cancelled."""


class CallbackGate(Protocol):
    """Decides whether a callback may run now."""

    @property
    def is_running(self) -> bool:
        """Whether callbacks run when they are ready."""
        ...

    def admit(self, call: ScheduledCall) -> bool:
        """Return whether to run a callback now; if not, the host keeps or drops it."""
        ...


HOST: ContextVar[CallbackGate | None] = ContextVar("HOST", default=None)
"""The host that a callback belongs to; inherited by every task that is created within."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks one by one.

    Args:
        dice: picks one of the callbacks that are ready.

    Attributes:
        steps: the number of callbacks so far.
        now: the virtual time, in seconds since the start; clocks read it often.
    """

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.steps = 0
        self._dice = dice
        self.now = 0.0
        self._idle_turns = 0
        """How often a timer was due at once since time has passed."""
        self._ready: list[ScheduledCall] = []
        # Each timer has a number besides its time: comparing calls would cost more.
        self._timers: list[tuple[float, int, ScheduledCall]] = []
        self._timer_count = 0
        self._tasks: list[tuple[asyncio.Task[Any], CallbackGate | None]] = []
        self._threads: dict[SteppedThread, None] = {}
        self._cleanup_size = 1000
        self._numbers = itertools.count(1)

    def __del__(self) -> None:
        """Do nothing: unlike others, this loop has nothing to close."""

    def time(self) -> float:
        """Return the virtual time, in seconds since the start."""
        return self.now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> ScheduledCall:
        """Schedule a callback for now."""
        call = ScheduledCall(
            self.now, callback, args, copy_context() if context is None else context
        )
        self._ready.append(call)
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> ScheduledCall:
        """Schedule a callback after so many seconds."""
        # Half of all callbacks come this way, so this does not call `call_at`.
        when = self.now + delay
        call = ScheduledCall(when, callback, args, copy_context() if context is None else context)
        self._timer_count += 1
        heappush(self._timers, (when, self._timer_count, call))
        return call

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> ScheduledCall:
        """Schedule a callback at a time."""
        call = ScheduledCall(when, callback, args, copy_context() if context is None else context)
        self._timer_count += 1
        heappush(self._timers, (when, self._timer_count, call))
        return call

    def call_outside(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts
    ) -> ScheduledCall:
        """Schedule a callback that belongs to no host."""
        when = self.now + delay
        call = ScheduledCall(when, callback, args, Context())
        self._timer_count += 1
        heappush(self._timers, (when, self._timer_count, call))
        return call

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> ScheduledCall:
        """Schedule a callback for now. There is only one thread."""
        if self.is_closed():
            raise RuntimeError("this loop is closed")
        return self.call_soon(callback, *args, context=context)

    def put_back(self, call: ScheduledCall) -> None:
        """Schedule a callback again that its host had held back."""
        self._ready.append(call)

    def create_future(self) -> "asyncio.Future[Any]":
        """Create a future."""
        return _NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """Start a task, and keep a reference to it.

        If the tasks of a killed host were collected, their finally clauses would run.
        """
        task = _NumberedTask(coro, loop=self, **options)
        context: Context | None = options.get("context")
        self._tasks.append((task, HOST.get() if context is None else context.get(HOST)))
        if len(self._tasks) > self._cleanup_size:
            self._tasks = [each for each in self._tasks if not _can_forget(each[0])]
            self._cleanup_size = 2 * len(self._tasks) + 1000
        return task

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        """Run a function on a thread of its own, which takes turns with this loop."""
        del executor
        future: asyncio.Future[T] = self.create_future()

        def end(result: T | None, error: BaseException | None) -> None:
            self._threads.pop(thread, None)
            if error is None:
                future.set_result(cast("T", result))
            else:
                future.set_exception(error)

        thread = SteppedThread(self, lambda: func(*args), end)
        self._threads[thread] = None
        self.call_soon(thread.step)
        return future

    def next_number(self) -> int:
        """Return a number that was not returned before."""
        return next(self._numbers)

    def list_unretrieved(self) -> list[BaseException]:
        """Return the exceptions of tasks that nobody has retrieved, while their hosts run."""
        return [
            error
            for task, host in self._tasks
            if _is_unretrieved(task)
            and (host is None or host.is_running)
            and (error := task.exception()) is not None
        ]

    def abandon(self) -> None:
        """Close all tasks that have not ended, silently, and then the loop.

        Finally clauses run now, when the world has ended and records nothing.
        """
        for thread in list(self._threads):
            thread.abandon()
        while self._tasks:
            # A finally clause may start other tasks.
            tasks, self._tasks = self._tasks, []
            for task, _ in tasks:
                _silence(task)
                _close(task.get_coro())
        self.close()

    def _run_once(self) -> None:
        """Advance time if nothing is ready; then run callbacks until none is ready, or stopped."""
        ready, draw = self._ready, self._dice.random
        if not ready:
            self._advance()
        first = self.steps + 1
        for self.steps in range(first, first + _MAX_STEPS):
            if (count := len(ready)) > 1:
                chosen = int(draw() * count)
                ready[chosen], ready[-1] = ready[-1], ready[chosen]
            call = ready.pop()
            if not call.is_cancelled:
                host = call.context.get(HOST)
                if host is None or host.is_running or host.admit(call):
                    try:
                        call.context.run(call.callback, *call.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as every loop does
                        self._report(call, error)
            if not ready or self._stopping:  # type: ignore[attr-defined]
                return
        raise Stuck(f"endless loop: {_MAX_STEPS:,} steps at {self.now:g} s")

    def _advance(self) -> None:
        """Advance time to the next timer."""
        timers, ready = self._timers, self._ready
        try:
            while (due := heappop(timers))[2].is_cancelled:
                continue
        except IndexError:
            raise Stuck(f"deadlock: nothing is scheduled after {self.now:g} s") from None
        ready.append(due[2])
        if due[0] > self.now:
            self.now, self._idle_turns = due[0], 0
        else:
            self._idle_turns += 1
            if self._idle_turns > _MAX_STEPS:
                raise Stuck(f"endless loop: {_MAX_STEPS:,} timers at {self.now:g} s")
        while timers and timers[0][0] <= self.now:
            ready.append(heappop(timers)[2])

    def _report(self, call: ScheduledCall, error: BaseException) -> None:
        self.call_exception_handler(
            {"message": f"Exception in callback {call!r}", "exception": error, "handle": call}
        )

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are dropped when they are due."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing: there is no selector to wake."""


def block(seconds: float) -> None:
    """Block the calling thread for so many seconds of the world's time.

    Call it in a function that runs on a thread, where other code would call `time.sleep`.
    """
    SteppedThread.current().block(seconds)


# asyncio iterates over sets of futures and tasks, in the order of their hashes. By default, hashes
# are addresses, which no seed repeats.


class _NumberedFuture(asyncio.Future[Any]):
    _number = 0

    def __hash__(self) -> int:
        self._number = self._number or _number(self)
        return self._number


class _NumberedTask(asyncio.Task[Any]):
    _number = 0

    def __hash__(self) -> int:
        self._number = self._number or _number(self)
        return self._number


def _number(future: "asyncio.Future[Any]") -> int:
    loop = future.get_loop()
    return loop.next_number() if isinstance(loop, SimulatedLoop) else id(future)


def _is_unretrieved(task: "asyncio.Task[Any]") -> bool:
    """Whether a task failed and nobody has retrieved its exception."""
    return task.done() and bool(task._log_traceback)  # noqa: SLF001


def _can_forget(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not _is_unretrieved(task)


def _silence(task: "asyncio.Task[Any]") -> None:
    """Keep a task from logging that it failed or never ended."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
    if task.done():
        task._log_traceback = False  # noqa: SLF001


def _close(coroutine: Any) -> None:
    """Close a coroutine, even one that awaits something while it is closed."""
    for _ in range(_MAX_AWAITS_IN_CLOSE):
        if not inspect.iscoroutine(coroutine):
            return
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED:
            return
        # A task group that is closed after its tasks have ended raises the exception.
        with suppress(Exception, asyncio.CancelledError, BaseExceptionGroup):
            coroutine.close()
