"""A user's function may raise whatever it wants: it is reported, and nothing else ends."""

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from waiting import until

from jobsync import CoordinatorPlugin, Database, Event, Plugin
from jobsync.events import Events, HandlerFailed
from jobsync.jobs.events import Callbacks, TokenChange

CHANGE = TokenChange(1, frozenset({1}), frozenset(), is_initial=False)


class Everything(BaseException):
    """An exception that is not an `Exception`."""


ERRORS: list[type[BaseException]] = [
    ValueError,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    Everything,
]

every_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)


@pytest.fixture
async def db() -> AsyncIterator[Database]:
    """A connected database with a resource."""
    async with Database("memory://") as db:
        await db.create_resource("things")
        yield db


@pytest.fixture
def failures(db: Database) -> list[HandlerFailed]:
    """The failures of the user's functions."""
    failures: list[HandlerFailed] = []
    db.on(HandlerFailed.name, failures.append)
    return failures


def raising(error: type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises."""

    def call(*_: object) -> None:
        raise error("no")

    return call


def raising_later(error: type[BaseException]) -> Callable[..., Awaitable[None]]:
    """Return a coroutine function that raises."""

    async def call(*_: object) -> None:
        await asyncio.sleep(0)
        raise error("no")

    return call


async def _check_work_goes_on(db: Database, error: type[BaseException], reports: list[Any]) -> None:
    await until(lambda: reports, "the failure is reported")
    # Within a coroutine Python turns these into an error of its own.
    assert error.__name__ in reports[0].error or "StopIteration" in reports[0].error
    await db.resources.things.insert({"id": "after"})
    assert await db.resources.things.get("after")
    assert db.unready() == []


@every_error
@pytest.mark.parametrize("build", [raising, raising_later])
async def test_a_listener_may_raise_anything(
    db: Database, failures: list[HandlerFailed], error: type[BaseException], build: Any
) -> None:
    """The emitter goes on, and so do the other listeners."""
    received: list[Event] = []
    db.on("resource:*", build(error))
    db.on("resource:*", received.append)
    await db.resources.things.insert({"id": "first"})
    assert len(received) == 1
    await _check_work_goes_on(db, error, failures)


@every_error
@pytest.mark.parametrize("build", [raising, raising_later])
async def test_an_after_hook_may_raise_anything(
    db: Database, failures: list[HandlerFailed], error: type[BaseException], build: Any
) -> None:
    """The verb has taken effect: its caller gets the result."""
    db.resources.things.after("insert", build(error))
    assert (await db.resources.things.insert({"id": "first"})).id == "first"
    await _check_work_goes_on(db, error, failures)


@every_error
@pytest.mark.parametrize("hook", ["on_become_coordinator", "coordinator_work"])
async def test_a_coordinators_hook_may_raise_anything(
    db: Database, failures: list[HandlerFailed], error: type[BaseException], hook: str
) -> None:
    """The term goes on, and the work is called again."""
    calls: list[int] = []

    async def work(_: object) -> None:
        calls.append(1)
        if hook == "coordinator_work":
            raise error("no")

    methods = {hook: raising_later(error), "coordinator_work": work}
    kind = type("Failing", (CoordinatorPlugin,), methods)
    plugin = await db.use_plugin(kind(coordinator_work_interval=0.01))
    await until(lambda: len(calls) > 3, "the work is called again")
    assert plugin.is_coordinator
    await _check_work_goes_on(db, error, failures)


@every_error
async def test_the_hook_at_the_end_of_a_term_may_raise_anything(
    db: Database, failures: list[HandlerFailed], error: type[BaseException]
) -> None:
    """The plugin stops, and can be started again."""
    worked = asyncio.Event()

    async def work(_: object) -> None:
        worked.set()

    methods = {"on_stop_being_coordinator": raising_later(error), "coordinator_work": work}
    plugin = await db.use_plugin(type("Failing", (CoordinatorPlugin,), methods)())
    await worked.wait()
    await plugin.stop()
    worked.clear()
    await plugin.start()
    await worked.wait()
    await _check_work_goes_on(db, error, failures)


@pytest.mark.parametrize("error", [*ERRORS, SystemExit, KeyboardInterrupt])
def test_a_jobs_callback_may_raise_anything(error: type[BaseException]) -> None:
    """The next callback is called; an exit on this thread would end the thread alone."""
    events = Events()
    failures: list[HandlerFailed] = []
    events.on(HandlerFailed.name, failures.append)
    calls: list[object] = []

    def added(tokens: object) -> None:
        calls.append(tokens)
        raise error("no")

    callbacks = Callbacks(events, None, added, None)
    callbacks.notify(CHANGE)
    callbacks.notify(CHANGE)
    callbacks.stop(60)
    assert len(calls) == len(failures) == 2


@every_error
@pytest.mark.parametrize("method", ["unready", "stuck"])
async def test_a_plugin_that_cannot_say_how_it_is_counts_as_unwell(
    db: Database, error: type[BaseException], method: str
) -> None:
    """Probes and the heartbeat file report what it raised."""
    kind = type("Broken", (Plugin,), {method: raising(error)})
    await db.use_plugin(kind(), "broken")
    (reason,) = getattr(db, method)()
    assert reason == f"broken: {method}() raised {error.__module__}.{error.__name__}: no".replace(
        "builtins.", ""
    ).replace("jobsync.", "")


@every_error
@pytest.mark.parametrize("place", ["handler", "filter"])
async def test_a_log_handler_may_raise_anything(
    db: Database, failures: list[HandlerFailed], error: type[BaseException], place: str
) -> None:
    """Listeners get the event, and the failure of the log."""
    received: list[Event] = []
    handler = logging.Handler()
    log = logging.getLogger("jobsync")
    if place == "handler":
        handler.emit = raising(error)  # type: ignore[method-assign]
    else:
        handler.addFilter(raising(error))
    level = log.level
    log.addHandler(handler)
    log.setLevel("DEBUG")
    try:
        for name in ("resource:*", "jobsync:handler-failed"):
            db.on(name, received.append)
        await db.resources.things.insert({"id": "first"})
        # What happened comes first.
        assert [event.name for event in received] == ["resource:inserted", "jobsync:handler-failed"]
        await _check_work_goes_on(db, error, failures)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert failures[0].callback == "logging"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_an_exit_of_the_program_passes_through(
    db: Database, failures: list[HandlerFailed], error: type[BaseException]
) -> None:
    """A listener on the main thread may end the program."""
    db.on("resource:*", raising(error))
    with pytest.raises(error):
        await db.resources.things.insert({"id": "first"})
    assert failures == []


async def test_a_cancellation_reaches_the_caller(
    db: Database, failures: list[HandlerFailed]
) -> None:
    """A verb that is cancelled while a hook runs ends as cancelled."""
    started = asyncio.Event()

    async def hang(_: object) -> None:
        started.set()
        await asyncio.Event().wait()

    db.resources.things.after("insert", hang)
    task = asyncio.create_task(db.resources.things.insert({"id": "first"}))
    await started.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert failures == []
