"""The SQL view of messages shows what the library shows of them, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from queue_locations import PostgresQueues, SqliteQueues, list_in_view
from servers import PostgresServer

from jobsync.core.messages import MessageState, Transition
from jobsync.queue.backend import NewMessage, QueueBackend, Settlement
from jobsync.queue.message import MessageInfo

ME, OTHER = "worker-1.a", "worker-2.b"
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
    location: SqliteQueues | PostgresQueues
    if request.param == "sqlite":
        location = SqliteQueues(tmp_path / "queues.db")
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        location = PostgresQueues(server.url)
    yield location
    await location.close()


def new(name: str, size: int, task: str, delay: float = 0.0) -> NewMessage:
    """Return a message of a size."""
    value = {"name": name, "text": "é" * size}
    return NewMessage(id=name, value=value, max_attempts=4, task=task, delay=delay)


async def claim(backend: QueueBackend, session: str, limit: int, task: str) -> list[Settlement]:
    """Claim messages; return how each is completed."""
    claimed = await backend.claim(limit, session=session, visibility=60, tasks=(task,))
    return [Settlement(receipt=each.receipt, move="complete") for each in claimed.messages]


async def list_all(backend: QueueBackend) -> dict[str, MessageInfo]:
    """Return what the library shows of the messages of a queue."""
    states: tuple[MessageState, ...] = get_args(MessageState)
    return {info.id: info for state in states for info in await backend.browse(state)}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("task", ["", "send"])
async def test_the_view_shows_what_the_library_shows(
    location: SqliteQueues | PostgresQueues, size: int, task: str
) -> None:
    """Of messages in every state, alone in their claim or beside others, of two queues."""
    for queue in ("emails", "sms"):
        backend = await location.open(queue)
        names = [f"{queue}-{name}" for name in (*ENDS, "open", "alone", "ready")]
        await backend.push([new(name, size, task) for name in names])
        await backend.push([new(f"{queue}-later", size, task, delay=3_600)])
        together = await claim(backend, ME, 5, task)
        await claim(backend, OTHER, 1, task)
        moves = zip(together[:4], ENDS.values(), strict=True)
        await backend.settle(
            [msgspec.structs.replace(each, move=move, error="no") for each, move in moves]
        )
        found = {name: row for name, row in list_in_view(location).items() if row[0] == queue}
        shown = await list_all(backend)
        assert len(shown) == 8
        assert {
            name: (*row[2:6], row[-2] and msgspec.json.decode(row[-2]), row[-1])
            for name, row in found.items()
        } == {
            name: (
                info.state,
                info.attempts,
                info.max_attempts,
                info.session or None,
                info.value,
                info.task,
            )
            for name, info in shown.items()
        }
        assert {name for name, row in found.items() if '"no"' in row[-3]} == {
            name for name, info in shown.items() if any(each.error == "no" for each in info.errors)
        }
