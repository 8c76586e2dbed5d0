"""An event loop in which time is virtual and order is chance.

Of all callbacks that are ready a seeded draw picks one, so that every interleaving which
real scheduling allows has its turn in some seed; the same seed gives the same run. When
nothing is ready, time jumps to the next timer. A callback belongs to the host that made
it, and runs only while that host runs: a pause or a kill therefore strikes at any await of
unmodified code.

There are no threads and no sockets. What code sends to a thread runs here, in its turn.
"""

import asyncio
import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, Protocol, TypeVar, TypeVarTuple

__all__ = ["HOST", "CallbackGate", "ScheduledCall", "SimulatedLoop", "Stuck"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MOST_STEPS = 1_000_000
"""How many callbacks may run without any time passing, before it is called spinning."""

_MOST_WAITS_AT_THE_END = 100
"""How often code may wait again although it was told to end."""


class Stuck(Exception):
    """The world cannot go on: nothing will ever happen again, or time does not pass."""


class Dice(Protocol):
    """Where chance comes from; `random.Random` will do."""

    def random(self) -> float:
        """Draw a number from 0 up to, and without, 1."""
        ...


class ScheduledCall(asyncio.TimerHandle):
    """A callback that waits for its turn. To asyncio, a handle.

    It is made for every step of every world, so it has no more than a step takes, and does
    not ask the loop first whether somebody debugs it.

    Attributes:
        callback: what to call.
        args: with what.
        context: in which context, which tells whose it is.
        is_cancelled: whether not to call it after all.
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
        """See to it that it is not called."""
        self.is_cancelled = True
        # What it would have been called with need not be kept until its time comes.
        self.callback, self.args = _do_nothing, ()

    def cancelled(self) -> bool:
        """Say whether it was cancelled."""
        return self.is_cancelled


def _do_nothing() -> None:
    """Stand in for what was cancelled."""


class CallbackGate(Protocol):
    """Decides whether a callback may run now."""

    @property
    def is_running(self) -> bool:
        """Whether callbacks are run as they come."""
        ...

    def admit(self, call: ScheduledCall) -> bool:
        """Say whether to run it; one that is not admitted is the host's to keep or to drop."""
        ...


HOST: ContextVar[CallbackGate | None] = ContextVar("HOST", default=None)
"""To whom a callback belongs: inherited by every task that is made within."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks one by one.

    Args:
        dice: picks among those that are ready.

    Attributes:
        steps: how many were run.
        now: the virtual time, in seconds since it began; read by clocks at every turn.
    """

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.steps = 0
        self._dice = dice
        self.now = 0.0
        self._ready: list[ScheduledCall] = []
        # Beside its time each timer has a number: comparing calls would cost more.
        self._timers: list[tuple[float, int, ScheduledCall]] = []
        self._timers_made = 0
        self._tasks: list[tuple[asyncio.Task[Any], CallbackGate | None]] = []
        self._tidy_at = 1000
        self._numbers = itertools.count(1)

    def __del__(self) -> None:
        """Unlike others this loop holds nothing that must be closed."""

    def time(self) -> float:
        """Tell the virtual time, in seconds since the loop began."""
        return self.now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> ScheduledCall:
        """Make a callback ready."""
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
        """Make a callback ready after so many seconds."""
        # Half of all callbacks come this way, so it goes no further.
        when = self.now + delay
        call = ScheduledCall(when, callback, args, copy_context() if context is None else context)
        self._timers_made += 1
        heappush(self._timers, (when, self._timers_made, call))
        return call

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> ScheduledCall:
        """Make a callback ready at some time."""
        call = ScheduledCall(when, callback, args, copy_context() if context is None else context)
        self._timers_made += 1
        heappush(self._timers, (when, self._timers_made, call))
        return call

    def call_outside(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts
    ) -> ScheduledCall:
        """Make a callback ready after so many seconds that belongs to no host."""
        when = self.now + delay
        call = ScheduledCall(when, callback, args, Context())
        self._timers_made += 1
        heappush(self._timers, (when, self._timers_made, call))
        return call

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> ScheduledCall:
        """Make a callback ready. There is but one thread."""
        if self.is_closed():
            raise RuntimeError("this loop is closed")
        return self.call_soon(callback, *args, context=context)

    def put_back(self, call: ScheduledCall) -> None:
        """Make a callback ready again that was not admitted before."""
        self._ready.append(call)

    def create_future(self) -> "asyncio.Future[Any]":
        """Make a future."""
        return _NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """Start a task, and hold on to it.

        Were the tasks of a killed host collected, their finally clauses would run.
        """
        task = _NumberedTask(coro, loop=self, **options)
        context: Context | None = options.get("context")
        self._tasks.append((task, HOST.get() if context is None else context.get(HOST)))
        if len(self._tasks) > self._tidy_at:
            self._tasks = [each for each in self._tasks if not _is_over(each[0])]
            self._tidy_at = 2 * len(self._tasks) + 1000
        return task

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        """Run it here, in its turn: threads bring an order that no seed repeats."""
        del executor
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(error)

        self.call_soon(run)
        return future

    def number(self) -> int:
        """Give a number that it has not given before."""
        return next(self._numbers)

    def failed_unheard(self) -> list[BaseException]:
        """Give what tasks died of without anybody asking, though their hosts run on."""
        return [
            error
            for task, host in self._tasks
            if _is_unheard(task)
            and (host is None or host.is_running)
            and (error := task.exception()) is not None
        ]

    def abandon(self) -> None:
        """Close everything that has not ended, here and quietly, and then the loop.

        What a finally clause does now, it does to a world that is no more.
        """
        while self._tasks:
            # Closing may start others, in a finally clause.
            left, self._tasks = self._tasks, []
            for task, _ in left:
                _silence(task)
                _close(task.get_coro())
        self.close()

    def _run_once(self) -> None:
        """Let time pass if nothing is ready; then take steps until nothing is, or told to stop."""
        ready, draw = self._ready, self._dice.random
        if not ready:
            self._jump()
        first = self.steps + 1
        for self.steps in range(first, first + _MOST_STEPS):
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
        raise Stuck(f"something spins: {_MOST_STEPS:,} steps at {self.now:g} s")

    def _jump(self) -> None:
        """Let time pass until a timer is due."""
        timers, ready = self._timers, self._ready
        try:
            while (due := heappop(timers))[2].is_cancelled:
                continue
        except IndexError:
            raise Stuck(f"nothing can happen any more, after {self.now:g} s") from None
        ready.append(due[2])
        self.now = max(self.now, due[0])
        while timers and timers[0][0] <= self.now:
            ready.append(heappop(timers)[2])

    def _report(self, call: ScheduledCall, error: BaseException) -> None:
        """Tell whoever listens what no code caught."""
        self.call_exception_handler(
            {"message": f"Exception in callback {call!r}", "exception": error, "handle": call}
        )

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to count: cancelled timers are dropped when their time comes."""

    def _process_events(self, event_list: object) -> None:
        """There are no sockets here."""

    def _write_to_self(self) -> None:
        """There is nobody to wake."""


# Sets of futures and tasks, of which asyncio itself makes use, are gone through in the order
# of hashes. By default these are addresses, which no seed repeats.


class _NumberedFuture(asyncio.Future[Any]):
    _number = 0

    def __hash__(self) -> int:
        self._number = self._number or _number_of(self)
        return self._number


class _NumberedTask(asyncio.Task[Any]):
    _number = 0

    def __hash__(self) -> int:
        self._number = self._number or _number_of(self)
        return self._number


def _number_of(thing: "asyncio.Future[Any]") -> int:
    loop = thing.get_loop()
    return loop.number() if isinstance(loop, SimulatedLoop) else id(thing)


def _is_unheard(task: "asyncio.Task[Any]") -> bool:
    """Say whether a task failed and nobody has asked it how it went."""
    return task.done() and bool(task._log_traceback)  # noqa: SLF001


def _is_over(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not _is_unheard(task)


def _silence(task: "asyncio.Task[Any]") -> None:
    """Let a task go without a word in the log: neither that it failed nor that it never ended."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
    if task.done():
        task._log_traceback = False  # noqa: SLF001


def _close(work: Any) -> None:
    """Close a coroutine, even one that waits for something more before it ends."""
    for _ in range(_MOST_WAITS_AT_THE_END):
        if not inspect.iscoroutine(work) or inspect.getcoroutinestate(work) == inspect.CORO_CLOSED:
            return
        # A task group that is closed after its tasks have ended raises what closed it.
        with suppress(Exception, asyncio.CancelledError, BaseExceptionGroup):
            work.close()
