"""After an outage of the database, workers continue by themselves."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import pytest
from servers import PostgresServer

from jobsync import Database, Document, OutcomeUnknown, QueuePlugin, Unavailable

WORKERS = 2
NEW = 3
"""More than a worker can have in flight."""
PROMISED = 10.0
"""Seconds within which all workers continue; asserted at full scale only."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that this file may restart."""
    with PostgresServer() as server:
        if not server.is_ours:
            pytest.skip("the server is somebody else's")
        yield server


class Crew:
    """Workers in one process, each with its own database, and what they handled."""

    def __init__(self) -> None:
        self.handled: list[set[int]] = [set() for _ in range(WORKERS)]
        self.producer: QueuePlugin
        self._numbers = iter(range(10**9))

    def handler(self, worker: int) -> Any:
        """Return the handler of a worker."""

        async def handle(task: Document) -> None:
            self.handled[worker].add(task.n)
            # The other workers get messages too.
            await asyncio.sleep(0.05)

        return handle

    async def consume(self) -> float:
        """Push until every worker has handled a message; return the seconds."""
        clock = asyncio.get_running_loop()
        begun, before = clock.time(), [len(each) for each in self.handled]
        async with asyncio.timeout(60):
            while any(
                len(now) < then + NEW for now, then in zip(self.handled, before, strict=True)
            ):
                try:
                    await self.producer.enqueue({"n": next(self._numbers)})
                except (OutcomeUnknown, Unavailable):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.01)
        return clock.time() - begun


@pytest.fixture
async def crew(server: PostgresServer) -> AsyncIterator[Crew]:
    """Running workers."""
    crew = Crew()
    async with AsyncExitStack() as stack:
        for worker in range(WORKERS):
            db = await stack.enter_async_context(Database(server.url))
            queue = QueuePlugin(
                resource="tasks",
                on_message=crew.handler(worker),
                concurrency=1,
                prefetch=0,
                heartbeat_interval=1,
                worker_timeout=4,
            )
            crew.producer = await db.use_plugin(queue)
        await crew.consume()
        yield crew


@pytest.mark.parametrize("how", ["immediate", "fast"])
async def test_after_a_restart_every_worker_continues(
    crew: Crew, server: PostgresServer, full_scale: bool, proof: Any, how: Any
) -> None:
    """Whether the server crashed or was stopped cleanly."""
    if how == "fast" and not full_scale:
        pytest.skip("at full scale")
    # On the thread that started it: the server would end with another thread.
    server.restart(how)
    took = await crew.consume()
    assert not full_scale or took <= PROMISED
    proof.record("queue, server restarted", how=how, seconds=round(took, 1))


async def test_a_worker_continues_after_losing_its_listening_connection(
    crew: Crew, server: PostgresServer, full_scale: bool, proof: Any
) -> None:
    """It listens again, and finds what was pushed meanwhile."""
    async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as admin:
        cursor = await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        # One for all workers of this process.
        assert len(await cursor.fetchall()) == 1
    took = await crew.consume()
    assert not full_scale or took <= PROMISED
    proof.record("queue, listening cut", seconds=round(took, 1))
