"""The SQL view of messages shows what the library shows of them, on both databases."""

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from queue_locations import PostgresQueues, SqliteQueues, find_empty_location, list_in_view

from jobsync.core.messages import MessageState, Transition
from jobsync.queue.backend import NewMessage, QueueBackend, Settlement
from jobsync.queue.message import Failure, MessageInfo

ME, OTHER = "worker-1.a", "worker-2.b"
COLUMNS = (
    *("queue", "id", "state", "attempts", "max_attempts", "incarnation"),
    *("enqueued_on", "due_on", "claimed_on", "finished_on", "errors", "payload", "task"),
)
SIZES = {"small": 1, "large": 10_000}
ENDS: dict[str, Transition] = {
    "completed": "complete",
    "dead": "bury",
    "cancelled": "cancel",
    "retried": "retry",
}


@pytest.fixture(params=["sqlite", "postgres"])
async def location(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[SqliteQueues | PostgresQueues]:
    """An empty database."""
    location = find_empty_location(request, tmp_path)
    assert isinstance(location, SqliteQueues | PostgresQueues)
    yield location
    await location.close()


def new(name: str, size: int, task: str, **options: Any) -> NewMessage:
    """Return a message of a size."""
    value = {"name": name, "text": "é" * size}
    return NewMessage(id=name, value=value, max_attempts=4, task=task, **options)


async def claim(backend: QueueBackend, session: str, limit: int, task: str) -> list[Settlement]:
    """Claim messages; return how each is completed."""
    claimed = await backend.claim(limit, session=session, visibility=60, tasks=(task,))
    return [Settlement(receipt=each.receipt, move="complete") for each in claimed.messages]


async def list_all(backend: QueueBackend) -> dict[str, MessageInfo]:
    """Return what the library shows of the messages of a queue."""
    states: tuple[MessageState, ...] = get_args(MessageState)
    return {info.id: info for state in states for info in await backend.browse(state)}


def read_time(shown: datetime | str | None) -> object:
    """Return a time of a row in Unix seconds; SQLite has texts in UTC, of milliseconds."""
    if shown is None:
        return None
    if isinstance(shown, str):
        shown = datetime.fromisoformat(f"{shown}+00:00")
    return pytest.approx(shown.timestamp(), abs=0.002)


def read_row(row: tuple[Any, ...]) -> dict[str, object]:
    """Return a row of the view by its columns."""
    texts = dict(zip(COLUMNS, row, strict=True))
    times = {name: read_time(texts[name]) for name in COLUMNS if name.endswith("_on")}
    lines = texts["errors"].splitlines()
    errors = [msgspec.json.decode(line, type=Failure) for line in lines]
    payload = texts["payload"] and msgspec.json.decode(texts["payload"])
    return {**texts, **times, "errors": errors, "payload": payload}


def expect_row(info: MessageInfo) -> dict[str, object]:
    """Return what the view should show of a message."""
    return {
        "queue": info.queue,
        "id": info.id,
        "state": info.state,
        "attempts": info.attempts,
        "max_attempts": info.max_attempts,
        "incarnation": info.session or None,
        "enqueued_on": info.enqueued,
        "due_on": info.due if info.state == "waiting" else None,
        "claimed_on": info.claimed if info.state == "claimed" else None,
        "finished_on": info.finished,
        "errors": list(info.errors),
        "payload": info.value,
        "task": info.task,
    }


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("task", ["", "send"])
async def test_the_view_shows_what_the_library_shows(
    location: SqliteQueues | PostgresQueues, size: int, task: str
) -> None:
    """Of messages in every state, alone in their claim or beside others, of two queues."""
    backends = {queue: await location.open(queue) for queue in ("emails", "sms")}
    for queue, backend in backends.items():
        names = [f"{queue}-{name}" for name in (*ENDS, "last", "open", "alone", "ready")]
        await backend.push([new(name, size, task) for name in names])
        await backend.push([new(f"{queue}-later", size, task, delay=3_600)])
        together = await claim(backend, ME, 6, task)
        await claim(backend, OTHER, 1, task)
        # Times differ: of messages, of their claims, and of those that a claim has completed.
        location.advance(10)
        moves = zip(together[:4], ENDS.values(), strict=True)
        await backend.settle(
            [msgspec.structs.replace(each, move=move, error="no") for each, move in moves]
        )
        location.advance(10)
        await backend.settle([together[4]])
        await backend.push([new(f"{queue}-ranked", size, task, priority=3)])
        await backend.push([new(f"{queue}-{n}", size, task, group="g") for n in ("head", "next")])
    found = {name: read_row(row) for name, row in list_in_view(location).items()}
    shown: dict[str, MessageInfo] = {}
    for backend in backends.values():
        infos = await list_all(backend)
        assert {info.state for info in infos.values()} == set(get_args(MessageState))
        assert len(infos) == len(ENDS) + 8
        shown |= infos
    assert found == {name: expect_row(info) for name, info in shown.items()}
