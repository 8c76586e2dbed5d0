"""Handlers of every kind, and what becomes of their messages: the zoo.

Each `HandlerCase` is a handler and its outcome in each situation. `tests/integration/queue` runs
them, and `docs/reference/handlers.md` shows them: `render_table` writes its tables.
"""

import asyncio
import concurrent.futures
import functools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

from hostile import build_error

from jobsync import Cancel, Database, QueuePlugin, Snooze
from jobsync.queue.executor import Handler

__all__ = [
    "COROUTINES",
    "FUNCTIONS",
    "GENERATORS",
    "SHAPES",
    "SITUATIONS",
    "HandlerCase",
    "Scene",
    "Situation",
    "render_table",
]

Situation: TypeAlias = Literal["alone", "company", "stop", "timeout", "loss"]

SITUATIONS: Mapping[Situation, str] = {
    "alone": "left alone",
    "stop": "told to stop",
    "timeout": "after its timeout",
    "loss": "after its claim was lost",
}
"""The columns of the tables. In company each handler does as it does alone."""

_INTERVAL = 0.01
_CHILD_TIME = 10.0
_MOMENT = 0.2
"""Seconds for which some handlers clean up, or block the event loop."""


class Scene:
    """What a handler shares with its test.

    The first delivery of the message without a group is the one that counts: there the handler
    waits until the situation has come, and then does what it is there for. Each other delivery
    waits until its group is complete, if it has one, and returns.

    Args:
        situation: in which the handler is shown.
        queue: that the handler belongs to.
        database: of the queue.
    """

    def __init__(self, situation: Situation, queue: QueuePlugin, database: Database) -> None:
        self.situation = situation
        self.queue = queue
        self.database = database
        self.loop = asyncio.get_running_loop()
        self.is_over = False
        """Whether handlers that never end must end now."""
        self.has_begun = False
        self.has_ended = False
        self.facts: list[Any] = []
        """What the handler has found."""
        self._arrivals: dict[str, int] = {}
        self._lock = threading.Lock()

    def arrive(self, task: Any) -> bool:
        """Record a delivery; return whether it is the one that counts."""
        group = task.get("group", "")
        with self._lock:
            self._arrivals[group] = self._arrivals.get(group, 0) + 1
            return not group and self._arrivals[group] == 1

    def count(self, group: str) -> int:
        """Return how many handlers of a group have begun."""
        return self._arrivals.get(group, 0)

    def is_complete(self, task: Any) -> bool:
        """Whether the handlers of a group have all begun."""
        group = task.get("group", "")
        return not group or self.is_over or self.count(group) >= task["size"]

    async def act(self, body: "CoroutineBody", task: Any, context: Any, *, waits: bool) -> Any:
        """Do what a coroutine is there for."""
        if not self.arrive(task):
            # A cancellation that was meant for another handler would come here.
            await asyncio.sleep(0)
            while not self.is_complete(task):  # noqa: ASYNC110 - other threads may complete it
                await asyncio.sleep(_INTERVAL)
            return None
        self.has_begun = True
        try:
            if waits and self.situation not in {"alone", "company"}:
                with suppress(asyncio.CancelledError):
                    await _wait(self, context)
            return await body(self, context)
        finally:
            self.has_ended = True

    def act_blocking(self, body: "FunctionBody", task: Any, context: Any, *, waits: bool) -> Any:
        """Do what a plain function is there for."""
        if not self.arrive(task):
            while not self.is_complete(task):
                time.sleep(_INTERVAL)
            return None
        self.has_begun = True
        try:
            if waits and self.situation not in {"alone", "company"}:
                _loop_until_lost(self, context)
            return body(self, context)
        finally:
            self.has_ended = True


CoroutineBody: TypeAlias = Callable[[Scene, Any], Awaitable[Any]]
FunctionBody: TypeAlias = Callable[[Scene, Any], Any]


@dataclass(frozen=True)
class HandlerCase:
    """A handler, and what becomes of its message in each situation.

    Outcomes are `completed`, `failed` (an attempt is spent), `returned` (none is), `cancelled`,
    `lost` (nothing is settled), and `runs`. A handler that does not end adds `keeps its slot`, or
    `left behind` when its queue stops.
    """

    name: str
    """What the handler does, as in the documentation."""
    build: Callable[[Scene], Handler]
    alone: str = "completed"
    stop: str = "completed"
    timeout: str = "failed"
    loss: str = "lost"
    facts: Mapping[Situation, list[Any]] = field(default_factory=dict)
    """What the handler must have found."""
    has_own_database: bool = False
    """Whether it ends the work of other queues."""
    stops: bool = False
    """Whether it stops its queue."""

    def expect(self, situation: Situation) -> str:
        """Return its outcome in a situation."""
        return str(getattr(self, "alone" if situation == "company" else situation))


def _coroutine(
    name: str, body: CoroutineBody, alone: str = "completed", *, waits: bool = True, **more: Any
) -> HandlerCase:
    def build(scene: Scene) -> Handler:
        async def handle(task: Any, context: Any) -> Any:
            return await scene.act(body, task, context, waits=waits)

        return handle

    # A failure counts as caused by the stop.
    more.setdefault("stop", {"failed": "returned"}.get(alone, alone))
    return HandlerCase(name, build, alone, **more)


def _function(
    name: str, body: FunctionBody, alone: str = "completed", *, waits: bool = True, **more: Any
) -> HandlerCase:
    def build(scene: Scene) -> Handler:
        def handle(task: Any, context: Any) -> Any:
            return scene.act_blocking(body, task, context, waits=waits)

        return handle

    # It has ended because it saw that nothing counts any more.
    more.setdefault("stop", "returned")
    return HandlerCase(name, build, alone, **more)


# What handlers return.


def _build_generator() -> Iterator[int]:
    yield 1


async def _work(scene: Scene) -> str:
    await asyncio.sleep(0)
    scene.facts.append("worked")
    return "result"


_WORKED: dict[Situation, list[Any]] = {"alone": ["worked"], "company": ["worked"]}
_RESULTS: Mapping[str, tuple[Callable[[Scene], Any], str]] = {
    "nothing": (lambda _: None, "completed"),
    "an object that is not JSON": (lambda _: object(), "completed"),
    "`Snooze(0)`": (lambda _: Snooze(0), "returned"),
    '`Cancel("why")`': (lambda _: Cancel("why"), "cancelled"),
    "a generator": (lambda _: _build_generator(), "failed"),
    "an asynchronous generator": (lambda _: (each async for each in _iterate()), "failed"),
}


async def _iterate() -> Any:
    yield 1


def _return(make: Callable[[Scene], Any]) -> CoroutineBody:
    async def body(scene: Scene, _: Any) -> Any:
        return make(scene)

    return body


def _return_blocking(make: Callable[[Scene], Any]) -> FunctionBody:
    return lambda scene, _: make(scene)


def _make_task(scene: Scene) -> Any:
    async def make() -> Any:
        return asyncio.get_running_loop().create_task(_work(scene))

    return asyncio.run_coroutine_threadsafe(make(), scene.loop).result()


def _make_future(scene: Scene) -> Any:
    async def make() -> Any:
        future = asyncio.get_running_loop().create_future()
        scene.loop.call_later(_INTERVAL, future.set_result, None)
        future.add_done_callback(lambda _: scene.facts.append("worked"))
        return future

    return asyncio.run_coroutine_threadsafe(make(), scene.loop).result()


def _submit(scene: Scene) -> Any:
    return asyncio.run_coroutine_threadsafe(_work(scene), scene.loop)


async def _fail(_: Scene) -> None:
    await asyncio.sleep(0)
    raise ValueError


def _submit_failure(scene: Scene) -> Any:
    return asyncio.run_coroutine_threadsafe(_fail(scene), scene.loop)


# What handlers raise.


class _OwnError(BaseException):
    """An error that is not an `Exception`."""


def _raise_exit() -> NoReturn:
    sys.exit(3)


def _raise(build: Callable[[], BaseException]) -> Callable[[], NoReturn]:
    def call() -> NoReturn:
        raise build()

    return call


def _raise_next() -> Any:
    return next(iter(()))


_ERRORS: Mapping[str, Callable[[], Any]] = {
    "`ValueError`": _raise(ValueError),
    "an exception whose `__str__` raises": _raise(lambda: build_error("raises")),
    "`ExceptionGroup`": _raise(lambda: ExceptionGroup("two", [ValueError(), KeyError()])),
    "`StopIteration`, by `next()`": _raise_next,
    "`StopAsyncIteration`": _raise(StopAsyncIteration),
    "`GeneratorExit`": _raise(GeneratorExit),
    "`SystemExit`, by `sys.exit()`": _raise_exit,
    "its own `BaseException`": _raise(_OwnError),
    "`asyncio.CancelledError`": _raise(asyncio.CancelledError),
    "`concurrent.futures.CancelledError`": _raise(concurrent.futures.CancelledError),
}


def _raise_in_coroutine(call: Callable[[], Any]) -> CoroutineBody:
    async def body(_: Scene, __: Any) -> Any:
        await asyncio.sleep(0)
        return call()

    return body


def _raise_in_function(call: Callable[[], Any]) -> FunctionBody:
    return lambda _, __: call()


# What handlers do to themselves, to their queue and to their process.


def _cancel_self() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _cancel_and_wait(_: Scene, __: Any) -> None:
    _cancel_self()
    await asyncio.sleep(3600)


async def _cancel_and_return(_: Scene, __: Any) -> None:
    _cancel_self()


async def _cancel_and_ignore(_: Scene, __: Any) -> None:
    _cancel_self()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
    await asyncio.sleep(0)


async def _wait(scene: Scene, _: Any) -> None:
    while not scene.is_over:  # noqa: ASYNC110 - it is also set by other threads
        await asyncio.sleep(_INTERVAL)


async def _clean_up(scene: Scene, _: Any) -> None:
    await _ignore_cancellation(lambda: scene.is_over, scene.loop.time() + _MOMENT)


async def _never_end(scene: Scene, _: Any) -> None:
    await _ignore_cancellation(lambda: scene.is_over, float("inf"))


async def _ignore_cancellation(is_over: Callable[[], bool], end: float) -> None:
    while asyncio.get_running_loop().time() < end and not is_over():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(_INTERVAL)


async def _block(_: Scene, __: Any) -> None:
    time.sleep(_MOMENT)  # noqa: ASYNC251 - it blocks the event loop on purpose


def _loop_until_lost(scene: Scene, context: Any) -> None:
    while not (context.lost or scene.is_over):
        time.sleep(_INTERVAL)


def _never_return(scene: Scene, _: Any) -> None:
    while not scene.is_over:
        time.sleep(_INTERVAL)


async def _stop(scene: Scene, _: Any) -> None:
    await scene.queue.stop()


def _stop_blocking(scene: Scene, _: Any) -> None:
    asyncio.run_coroutine_threadsafe(scene.queue.stop(), scene.loop).result()


async def _disconnect(scene: Scene, _: Any) -> None:
    await scene.database.disconnect()


def _disconnect_blocking(scene: Scene, _: Any) -> None:
    asyncio.run_coroutine_threadsafe(scene.database.disconnect(), scene.loop).result()


def _fork(scene: Scene, *, is_returning: bool) -> None:
    """Fork, and note how the child has ended, which leaves by itself or returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        scene.facts.append(_wait_for_child(child))
    elif not is_returning:
        os._exit(0)


def _wait_for_child(child: int) -> int:
    """Return the exit code of a child. One that does not end is killed."""
    end = time.monotonic() + _CHILD_TIME
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(_INTERVAL)


async def _fork_and_return(scene: Scene, _: Any) -> None:
    _fork(scene, is_returning=True)


async def _fork_and_exit(scene: Scene, _: Any) -> None:
    _fork(scene, is_returning=False)


async def _acknowledge_twice(scene: Scene, context: Any) -> None:
    scene.facts += [await context.ack(), await context.ack()]


async def _refuse_twice(scene: Scene, context: Any) -> None:
    scene.facts += [await context.nack("no"), await context.nack("no")]


async def _acknowledge_and_raise(scene: Scene, context: Any) -> None:
    scene.facts.append(await context.ack())
    raise ValueError


async def _transact_and_raise(_: Scene, context: Any) -> None:
    async with context.transaction():
        pass
    raise ValueError


def _transact_blocking(_: Scene, context: Any) -> None:
    with context.transaction():
        pass


def _acknowledge_twice_blocking(scene: Scene, context: Any) -> None:
    scene.facts += [context.ack(), context.ack()]


def _refuse_twice_blocking(scene: Scene, context: Any) -> None:
    scene.facts += [context.nack("no"), context.nack("no")]


def _always(*facts: Any) -> dict[Situation, list[Any]]:
    return {each: list(facts) for each in ("alone", "company", "stop", "timeout", "loss")}


_ONCE = {**_always(True, False), "loss": [False, False]}
_ONCE_IN_TIME = {**_ONCE, "timeout": [False, False]}
_NEVER_ENDS: dict[str, Any] = {
    "alone": "runs",
    "stop": "left behind",
    "timeout": "failed, keeps its slot",
    "loss": "lost, keeps its slot",
}

COROUTINES: tuple[HandlerCase, ...] = (
    *(
        _coroutine(f"returns {name}", _return(make), alone)
        for name, (make, alone) in _RESULTS.items()
    ),
    _coroutine("returns a coroutine", _return(_work), facts=_always("worked")),
    *(
        _coroutine(f"raises {name}", _raise_in_coroutine(call), "failed")
        for name, call in _ERRORS.items()
    ),
    _coroutine("cancels its own task and waits", _cancel_and_wait, "failed"),
    _coroutine("cancels its own task and returns", _cancel_and_return),
    _coroutine("cancels its own task and ignores it", _cancel_and_ignore),
    _coroutine("waits for ever", _wait, "runs", waits=False, stop="returned"),
    _coroutine("blocks the event loop for a moment, and returns", _block),
    _coroutine("ignores its cancellation for a moment, and returns", _clean_up),
    _coroutine("ignores its cancellation for ever", _never_end, **_NEVER_ENDS),
    _coroutine("calls `context.ack()` twice", _acknowledge_twice, timeout="completed", facts=_ONCE),
    _coroutine(
        "calls `context.ack()`, then raises",
        _acknowledge_and_raise,
        timeout="completed",
        facts={**_always(True), "loss": [False]},
    ),
    _coroutine(
        "leaves `context.transaction()`, then raises", _transact_and_raise, timeout="completed"
    ),
    _coroutine("calls `context.nack()` twice", _refuse_twice, "failed", stop="failed", facts=_ONCE),
    _coroutine("stops its queue", _stop, stops=True),
    _coroutine("disconnects the database", _disconnect, stops=True, has_own_database=True),
    _coroutine("forks, and the child returns", _fork_and_return, facts=_always(1)),
    _coroutine("forks, and the child exits", _fork_and_exit, facts=_always(0)),
)
"""Coroutine functions, which run on the event loop."""

FUNCTIONS: tuple[HandlerCase, ...] = (
    *(
        _function(f"returns {name}", _return_blocking(make), alone)
        for name, (make, alone) in _RESULTS.items()
    ),
    _function("returns a coroutine", _return_blocking(_work), facts=_WORKED),
    _function("returns a task", _return_blocking(_make_task), facts=_WORKED),
    _function("returns a future", _return_blocking(_make_future), facts=_WORKED),
    _function("returns a `concurrent.futures.Future`", _return_blocking(_submit), facts=_WORKED),
    _function("returns a coroutine that fails", _return_blocking(_fail), "failed"),
    _function("returns a future that fails", _return_blocking(_submit_failure), "failed"),
    *(
        _function(f"raises {name}", _raise_in_function(call), "failed")
        for name, call in {
            **_ERRORS,
            "`KeyboardInterrupt`": _raise(KeyboardInterrupt),
        }.items()
    ),
    _function("loops until `context.lost`", _loop_until_lost, "runs", waits=False),
    _function("never returns", _never_return, **_NEVER_ENDS),
    _function(
        "calls `context.ack()` twice",
        _acknowledge_twice_blocking,
        stop="completed",
        facts=_ONCE_IN_TIME,
    ),
    _function("leaves `context.transaction()`", _transact_blocking, stop="completed"),
    _function(
        "calls `context.nack()` twice",
        _refuse_twice_blocking,
        "failed",
        stop="failed",
        facts=_ONCE_IN_TIME,
    ),
    _function("stops its queue", _stop_blocking, stops=True),
    _function("disconnects the database", _disconnect_blocking, stops=True, has_own_database=True),
    _function(
        "forks, and the child returns",
        lambda scene, _: _fork(scene, is_returning=True),
        facts=_always(1),
    ),
    _function(
        "forks, and the child exits",
        lambda scene, _: _fork(scene, is_returning=False),
        facts=_always(0),
    ),
)
"""Plain functions, which run on threads."""


# Everything that can be called with a message.


class _Object:
    """Handlers that are attributes of an object."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def handle(self, task: Any, context: Any) -> Any:
        return await self._scene.act(_return(_work), task, context, waits=True)

    def handle_blocking(self, task: Any, context: Any) -> Any:
        return self._scene.act_blocking(_note, task, context, waits=True)

    async def __call__(self, task: Any, context: Any) -> Any:
        return await self.handle(task, context)


class _BlockingObject(_Object):
    """An object that is called as a plain function."""

    def __call__(self, task: Any, context: Any) -> Any:
        return self.handle_blocking(task, context)


def _note(scene: Scene, _: Any) -> None:
    scene.facts.append("worked")


def _build_class(scene: Scene) -> Any:
    class Tasks:
        @classmethod
        async def handle(cls, task: Any, context: Any) -> Any:
            return await _Object(scene).handle(task, context)

        @staticmethod
        def handle_blocking(task: Any, context: Any) -> Any:
            return _Object(scene).handle_blocking(task, context)

    return Tasks


def _decorate(function: Handler) -> Handler:
    """Wrap a handler in a plain function, as most decorators do."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def _call(handler: Handler, task: Any, context: Any) -> Any:
    return handler(task, context)


async def _call_and_wait(handler: Handler, task: Any, context: Any) -> Any:
    return await handler(task, context)


def _shape(name: str, build: Callable[[Scene], Handler], *, is_async: bool) -> HandlerCase:
    facts = _always("worked")
    return HandlerCase(name, build, stop="completed" if is_async else "returned", facts=facts)


SHAPES: tuple[HandlerCase, ...] = (
    _shape("a method, `async def`", lambda scene: _Object(scene).handle, is_async=True),
    _shape("a method", lambda scene: _Object(scene).handle_blocking, is_async=False),
    _shape("an object with `async def __call__`", _Object, is_async=True),
    _shape("an object with `__call__`", _BlockingObject, is_async=False),
    _shape("a class method, `async def`", lambda scene: _build_class(scene).handle, is_async=True),
    _shape("a static method", lambda scene: _build_class(scene).handle_blocking, is_async=False),
    _shape(
        "a `partial` of a coroutine function",
        lambda scene: functools.partial(_call_and_wait, _Object(scene).handle),
        is_async=True,
    ),
    _shape(
        "a `partial` of a plain function",
        lambda scene: functools.partial(_call, _Object(scene).handle_blocking),
        is_async=False,
    ),
    _shape(
        "a lambda",
        lambda scene: lambda task, context: _Object(scene).handle_blocking(task, context),
        is_async=False,
    ),
    _shape(
        "a lambda that calls a coroutine function",
        lambda scene: lambda task, context: _Object(scene).handle(task, context),
        is_async=True,
    ),
    _shape(
        "a coroutine function, decorated by a plain one",
        lambda scene: _decorate(_Object(scene).handle),
        is_async=True,
    ),
    _shape(
        "a plain function, decorated",
        lambda scene: _decorate(_Object(scene).handle_blocking),
        is_async=False,
    ),
)
"""Handlers of every shape. They do their work and return."""


def _generate(task: Any) -> Iterator[Any]:
    yield task


async def _generate_async(task: Any) -> Any:
    yield task


class _Generators:
    def handle(self, task: Any) -> Iterator[Any]:
        yield task

    async def __call__(self, task: Any) -> Any:
        yield task


GENERATORS: Mapping[str, Handler] = {
    "function": _generate,
    "async": _generate_async,
    "lambda": lambda task: (yield task),
    "partial": functools.partial(_generate),
    "partial-async": functools.partial(_generate_async),
    "method": _Generators().handle,
    "object": _Generators(),
}
"""Handlers that nobody would run: refused when they are registered."""


def render_table(cases: tuple[HandlerCase, ...], first: str) -> str:
    """Return the outcomes of handlers as a table for the documentation."""
    rows = [[first, *SITUATIONS.values()], ["---"] * (1 + len(SITUATIONS))]
    rows += [[case.name, *(case.expect(each) for each in SITUATIONS)] for case in cases]
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join(lines).replace("| --- ", "|---").replace("|--- |", "|---|") + "\n"
