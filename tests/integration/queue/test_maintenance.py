"""The central work of a queue on real databases: what is kept of finished messages, and how long.

`make prove-retention` runs the second half of this file alone: 60,000 messages a minute for ten
minutes.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from servers import Locate
from waiting import until

from jobsync import Database, Document, Event, QueuePlugin
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.queue.enqueue import enqueue_messages
from jobsync.queue.sql.common import SqlBackend

FINISHED = 12_345
PER_SECOND, MINUTES, TTL = 1_000, 10, 300.0
SAMPLE_INTERVAL = 5.0
ADD_FINISHED = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
INSERT INTO jobsync_finished (
  id, queue, state, deliveries, returned, max_attempts, session, trail, errors, enqueued, finished,
  format
)
SELECT '{state}-' || i, 'default/tasks', '{state}', 1, 0, 4, '', '', '', {then}, {then}, 1 FROM n
"""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store on each database."""
    return locate(request.param)


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(url) as db:
        yield db


def execute(url: str, statement: str) -> None:
    """Run a statement behind the library's back."""
    found = parse_url(url)
    if isinstance(found, PostgresUrl):
        with psycopg.connect(url.partition("?")[0]) as connection:
            connection.execute(f"SET search_path = {found.schema}".encode())
            connection.execute(statement.encode())
    else:
        path = url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(statement)


def add_finished(url: str, state: str, count: int, age: int) -> None:
    """Add messages that were finished some seconds ago."""
    is_postgres = isinstance(parse_url(url), PostgresUrl)
    then = f"now() - interval '{age} s'" if is_postgres else f"unixepoch() - {age}"
    execute(url, ADD_FINISHED.format(count=count, state=state, then=then))


async def test_all_messages_finished_long_ago_are_removed_in_small_parts(
    db: Database, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, when a coordinator is elected; newer ones and dead letters stay."""
    sizes: list[int] = []
    forget = SqlBackend.forget

    async def watch(self: SqlBackend, state: Any, **options: Any) -> int:
        sizes.append(await forget(self, state, **options))
        return sizes[-1]

    monkeypatch.setattr(SqlBackend, "forget", watch)
    add_finished(url, "completed", FINISHED, age=301)
    add_finished(url, "dead", 5, age=10**6)
    add_finished(url, "cancelled", 5, age=10**6)
    queue = await db.use_plugin(QueuePlugin(resource="tasks", enable_coordinator=False))
    await until(lambda: sum(sizes) == FINISHED, "all are removed")
    assert max(sizes) <= 1_000
    assert await queue.count("all") == 10


async def test_dead_and_cancelled_messages_are_removed_after_dead_ttl(
    db: Database, url: str
) -> None:
    """Both keep their payload, and both can be redriven until then."""
    add_finished(url, "dead", 5, age=200)
    add_finished(url, "cancelled", 5, age=200)
    queue = QueuePlugin(resource="tasks", enable_coordinator=False, dead_ttl=100)
    await db.use_plugin(queue)
    counts = [1]
    while any(counts):
        counts = [await queue.count(state) for state in ("dead", "cancelled")]


async def test_messages_of_newer_code_are_reported_and_stop_nothing(db: Database, url: str) -> None:
    """One event; the others are handled."""
    await db.create_resource("tasks")
    ids = await enqueue_messages(db, "tasks", [{"n": n} for n in range(5)])
    execute(url, f"UPDATE jobsync_message SET format = 99 WHERE id IN ('{ids[0]}', '{ids[3]}')")
    reported: list[Event] = []
    handled: list[int] = []

    async def handle(task: Document) -> None:
        handled.append(task.n)

    queue = QueuePlugin(resource="tasks", on_message=handle, enable_coordinator=False)
    queue.on("plg:queue:newer-messages", reported.append)
    await db.use_plugin(queue)
    await until(
        lambda: queue.stats()["completed"] == 3 and bool(reported), "the others are handled"
    )
    assert sorted(handled) == [1, 2, 4]
    assert [(event["count"], event["format"]) for event in reported] == [(2, 99)]
    assert await queue.count("pending") == 2


async def produce(queue: QueuePlugin, seconds: int) -> None:
    """Enqueue at a steady rate."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    for second in range(seconds):
        await asyncio.sleep(start + second - loop.time())
        await queue.enqueue_many([{"n": n} for n in range(PER_SECOND)])


async def test_the_finished_messages_of_a_busy_queue_stay_few(
    db: Database, full_scale: bool, proof: Any
) -> None:
    """At 60,000 a minute no more are stored than were completed in `completed_ttl` and a minute."""
    if not full_scale:
        pytest.skip("at full scale")

    async def handle(_: Document) -> None:
        pass

    queue = QueuePlugin(resource="tasks", on_message=handle, concurrency=10, completed_ttl=TTL)
    await db.use_plugin(queue)
    loop = asyncio.get_running_loop()
    samples: list[tuple[float, int, int]] = [(loop.time(), 0, 0)]
    producer = asyncio.create_task(produce(queue, MINUTES * 60))
    while not producer.done():
        await asyncio.wait([producer], timeout=SAMPLE_INTERVAL)
        stored, completed = await queue.count("completed"), queue.stats()["completed"]
        samples.append((loop.time(), completed, stored))
        since = [total for at, total, _ in samples if at <= loop.time() - TTL - 60]
        proof.tell(f"{completed:,} completed, {stored:,} stored")
        assert stored <= completed - max(since, default=0)
    await producer
    await until(lambda: queue.stats()["completed"] == MINUTES * 60 * PER_SECOND, "all are handled")
    proof.record(
        "finished messages",
        backend=type(queue._backend).__name__,
        seconds=round(loop.time() - samples[0][0]),
        completed=queue.stats()["completed"],
        ttl=TTL,
        most=max(stored for _, _, stored in samples),
    )
