"""A queue survives users' objects that cannot be shown: handlers, verdicts and callbacks."""

from collections.abc import Callable
from typing import Any

import pytest
from hostile import HOSTILE, build_error, build_object, contain
from servers import Locate
from waiting import until

from jobsync import Cancel, Database, Document, Event, QueuePlugin

Place = tuple[dict[str, Any], str]
"""Arguments of a queue, and the state that its message ends in."""


def _fail(kind: str) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise build_error(kind)

    return call


async def _pass(_: Document) -> None:
    pass


def _raise_in_coroutine(kind: str) -> Place:
    async def handle(_: Document) -> None:
        raise build_error(kind)

    return {"on_message": handle}, "dead"


def _raise_in_function(kind: str) -> Place:
    return {"on_message": lambda _: _fail(kind)()}, "dead"


def _cancel(kind: str) -> Place:
    async def handle(_: Document) -> Cancel:
        return Cancel(build_object(kind))

    return {"on_message": handle}, "cancelled"


def _nack(kind: str) -> Place:
    async def handle(_: Document, context: Any) -> None:
        await context.nack(build_error(kind))

    return {"on_message": handle}, "dead"


def _nack_in_function(kind: str) -> Place:
    def handle(_: Document, context: Any) -> None:
        context.nack(build_object(kind))

    return {"on_message": handle}, "dead"


def _progress(kind: str) -> Place:
    async def handle(_: Document, context: Any) -> None:
        context.progress(build_object(kind))
        context.progress(0.5, build_object(kind))

    return {"on_message": handle}, "completed"


def _acknowledge(kind: str) -> Place:
    async def handle(_: Document, context: Any) -> None:
        await context.ack(build_object(kind))

    return {"on_message": handle}, "completed"


def _complete(kind: str) -> Place:
    callback = build_object(kind, __call__=_fail(kind))
    return {"on_message": _pass, "on_complete": callback}, "completed"


def _complete_later(kind: str) -> Place:
    async def callback(*_: object) -> None:
        raise build_error(kind)

    return {"on_message": _pass, "on_complete": callback}, "completed"


def _report_error(kind: str) -> Place:
    arguments, state = _raise_in_coroutine(kind)
    return {**arguments, "on_error": _fail(kind)}, state


def _back_off(kind: str) -> Place:
    arguments, state = _raise_in_coroutine(kind)
    return {**arguments, "max_retries": 1, "backoff": _fail(kind)}, state


PLACES: dict[str, Callable[[str], Place]] = {
    "handler": _raise_in_coroutine,
    "function": _raise_in_function,
    "cancel": _cancel,
    "nack": _nack,
    "nack-in-function": _nack_in_function,
    "progress": _progress,
    "result": _acknowledge,
    "on-complete": _complete,
    "on-complete-later": _complete_later,
    "on-error": _report_error,
    "backoff": _back_off,
}


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
@pytest.mark.parametrize("place", PLACES)
async def test_an_object_that_cannot_be_shown_ends_its_message_alone(
    database: str, place: str, locate: Locate, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message ends as it would with any other object, and the next one is handled."""
    # Everything is logged, so that each event is formatted.
    caplog.set_level("DEBUG", logger="jobsync")
    with contain():
        async with Database(locate(database)) as db:
            emitted: list[Event] = []
            db.on("*", emitted.append)
            queues = []
            for number, kind in enumerate(HOSTILE):
                arguments, state = PLACES[place](kind)
                queue = QueuePlugin(resource=f"r{number}", **{"max_retries": 0, **arguments})
                queues.append((await db.use_plugin(queue), state))
                await queue.enqueue_many([{"n": 1}, {"n": 2}])
            for queue, state in queues:
                await _until_ended(queue, state, emitted)
            assert db.unready() == []
            assert not [event for event in emitted if event.name == "db:failed"]
            for event in emitted:
                if "error" in event:
                    assert len(event["error"]) <= 5000
                    event["error"].encode()


async def _until_ended(queue: QueuePlugin, state: Any, emitted: list[Event]) -> None:
    async def has_ended() -> bool:
        assert not [event for event in emitted if event.name == "db:failed"]
        return await queue.count(state) == 2

    await until(has_ended, f"both messages of {queue.resource} are {state}")
