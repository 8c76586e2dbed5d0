"""Tickets in a real bucket: a small storm."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from waiting import until

from jobsync import Database, Event, QueuePlugin

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.5,
    "worker_timeout": 20.0,
    "skip_cold_start": True,
    "dispatch_interval": 0.1,
}


async def test_a_storm_with_tickets(
    bucket_url: str, monkeypatch: pytest.MonkeyPatch, full_scale: bool
) -> None:
    """The coordinator stops in the middle of it, twice; nothing is lost, nor handled twice."""
    monkeypatch.setattr("jobsync.queue.pages.bell.READ_INTERVAL", 0.2)
    monkeypatch.setattr("jobsync.queue.pages.bell.RING_INTERVAL", 0.1)
    monkeypatch.setattr("jobsync.queue.pages.listing_plan.FOLLOW_UP", 0.15)
    total = 2_000 if full_scale else 200
    handled: Counter[int] = Counter()
    published: list[Event] = []

    async def handle(task: Any) -> None:
        await asyncio.sleep(0.001)
        handled[task.n] += 1

    async with AsyncExitStack() as stack:
        databases: dict[Database, QueuePlugin] = {}
        for _ in range(6):
            database = await stack.enter_async_context(Database(bucket_url))
            database.on("plg:queue:tickets-published", published.append)
            queue = QueuePlugin(resource="tasks", on_message=handle, **QUICK)
            databases[database] = queue
            await database.use_plugin(queue)
        producer = next(iter(databases.values()))
        await until(lambda: any(queue.is_coordinator for queue in databases.values()))
        parts = [range(first, first + 5) for first in range(0, total, 5)]
        for place, part in enumerate(parts):
            await producer.enqueue_many([{"n": n} for n in part])
            if place in {len(parts) // 3, 2 * len(parts) // 3}:
                await until(lambda: bool(published))
                leaders = [each for each, queue in databases.items() if queue.is_coordinator]
                published.clear()
                for leader in leaders:
                    if databases[leader] is not producer:
                        await leader.disconnect()
                        del databases[leader]
                await until(lambda: any(queue.is_coordinator for queue in databases.values()))
        await until(lambda: len(handled) == total, "all messages are handled")
        await until(lambda: bool(published), "the next coordinator publishes tickets")
    assert set(handled.values()) == {1}
