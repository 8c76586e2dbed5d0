"""On a database the row of a claim answers settlements for some minutes, and is then removed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from queue_calls import claim, new_messages, settle
from queue_locations import PostgresQueues, SqliteQueues, find_empty_location

from jobsync.queue.backend import QueueBackend

SIZES = {"small": 10, "large": 5_000}
"""Bytes of a payload; SQLite stores the payloads of a large claim apart."""


@pytest.fixture(params=["sqlite", "postgres"])
async def location(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[SqliteQueues | PostgresQueues]:
    """An empty database."""
    location = find_empty_location(request, tmp_path)
    assert isinstance(location, SqliteQueues | PostgresQueues)
    yield location
    await location.close()


@pytest.fixture
async def backend(location: SqliteQueues | PostgresQueues) -> QueueBackend:
    """The backend of an empty queue."""
    return await location.open("emails")


@pytest.mark.parametrize("older_than", [1.0, 400.0])
async def test_claims_answer_settlements_for_some_minutes(
    location: SqliteQueues | PostgresQueues, backend: QueueBackend, older_than: float
) -> None:
    """Even if completed messages are forgotten at once; then their rows are removed."""
    await backend.push(new_messages("a", "b"))
    await backend.push(new_messages("c"))
    messages = await claim(backend, 2)
    (retried,) = await claim(backend)
    await settle(backend, messages, "complete")
    await settle(backend, [retried], "retry")
    location.advance(290)
    forgotten = await backend.forget("completed", older_than=older_than)
    assert forgotten == (2 if older_than < 290 else 0)
    assert await settle(backend, messages, "complete") == [True, True]
    assert await settle(backend, [retried], "retry") == [True]
    assert await settle(backend, messages, "release") == [False, False]
    location.advance(150)
    assert await backend.forget("completed", older_than=older_than) == 2 - forgotten
    assert location.execute("SELECT count(*) FROM {}.jobsync_claim") == [(0,)]
    assert await settle(backend, [retried], "retry") == [False]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("end", ["release", "purge"])
async def test_rows_of_claims_do_not_pile_up(
    location: SqliteQueues | PostgresQueues, backend: QueueBackend, end: str, size: int
) -> None:
    """Not even if nothing is ever completed; one call removes more than its limit."""
    await backend.push(new_messages("a", "b", "c", value="x" * size))
    for _ in range(7):
        messages = await claim(backend)
        if end == "release":
            await settle(backend, messages, "release")
        else:
            assert await backend.purge(["claimed"]) == 3
            await backend.push(new_messages("a", "b", "c", value="x" * size))
    if isinstance(location, SqliteQueues):
        assert location.execute("SELECT count(*) FROM jobsync_claim_payload") == [(0,)]
    location.advance(1000)
    assert await backend.forget("completed", older_than=500, limit=2) == 0
    assert location.execute("SELECT count(*) FROM {}.jobsync_claim") == [(0,)]
