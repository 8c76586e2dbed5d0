"""Callbacks of a queue may raise anything: it is reported, and every message is settled."""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from servers import Locate
from waiting import until

from jobsync import Database, Document, Event, QueuePlugin


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
    SystemExit,
]


def _raising(error: type[BaseException]) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise error("no")

    return call


def _raising_later(error: type[BaseException]) -> Callable[..., Awaitable[None]]:
    async def call(*_: object) -> None:
        await asyncio.sleep(0)
        raise error("no")

    return call


async def _pass(_: Document) -> None:
    pass


async def _fail(_: Document) -> None:
    raise ValueError("no")


def _build_arguments(place: str, callback: Callable[..., Any]) -> tuple[dict[str, Any], str]:
    """Return the arguments of a queue, and the state in which its messages end."""
    if place == "on_complete":
        return {"on_message": _pass, "on_complete": callback}, "completed"
    retries = {"max_retries": 1 if place == "backoff" else 0}
    return {"on_message": _fail, place: callback, **retries}, "dead"


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize(
    ("place", "build"),
    [
        ("on_complete", _raising),
        ("on_complete", _raising_later),
        ("on_error", _raising),
        ("on_error", _raising_later),
        ("backoff", _raising),
    ],
)
async def test_a_callback_may_raise_anything(
    database: str, place: str, build: Callable[..., Any], locate: Locate
) -> None:
    """Its messages end as they would without it, and the error is an event."""
    async with Database(locate(database)) as db:
        emitted: list[Event] = []
        db.on("*", emitted.append)
        queues = []
        for number, error in enumerate(ERRORS):
            arguments, state = _build_arguments(place, build(error))
            queue = QueuePlugin(resource=f"r{number}", **arguments)
            queues.append((await db.use_plugin(queue), state))
            await queue.enqueue_many([{"n": 1}, {"n": 2}])
        for queue, state in queues:

            async def has_ended(queue: QueuePlugin = queue, state: Any = state) -> bool:
                assert not [event for event in emitted if event.name == "db:failed"]
                return await queue.count(state) == 2

            await until(has_ended, f"both messages of {queue.resource} are {state}")
        name = "plg:queue:error" if place == "backoff" else "jobsync:handler-failed"
        for error in ERRORS:
            await until(
                lambda error=error: [  # type: ignore[misc]
                    event
                    for event in emitted
                    if event.name == name and error.__name__ in event["error"]
                ],
                f"{error.__name__} is reported",
            )
        assert db.unready() == []


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("action", ["stop", "disconnect"])
@pytest.mark.parametrize("callback", ["on_complete", "on_error"])
async def test_a_callback_may_stop_what_runs_it(
    locate: Locate, kind: str, action: str, callback: str
) -> None:
    """The call returns at once, and takes effect after the callback."""
    returned = asyncio.Event()

    async def handle(_: Document) -> None:
        if callback == "on_error":
            raise ValueError

    async def end(*_: object) -> None:
        await (queue.stop() if action == "stop" else db.disconnect())
        assert db.is_connected
        returned.set()

    callbacks: dict[str, Any] = {callback: end}
    queue = QueuePlugin(resource="tasks", on_message=handle, grace=3600, **callbacks)
    async with Database(locate(kind)) as db:
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await returned.wait()
        await until(lambda: not queue.is_running, "the queue has stopped")
        if action == "disconnect":
            await until(lambda: not db.is_connected, "the database is disconnected")
