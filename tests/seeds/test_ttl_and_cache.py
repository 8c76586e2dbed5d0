"""The documents' examples with TTL and cache, line by line. Durations are seconds."""

import time
from typing import Any

import pytest
from waiting import until

from jobsync import CachePlugin, Database, Document, Event, S3QueuePlugin, TTLPlugin

FAST: dict[str, Any] = {"heartbeat_interval": 0.5, "worker_timeout": 20, "skip_cold_start": True}
"""So that somebody leads at once; the documents' values only take longer."""


async def create_sessions(url: str) -> None:
    """Store one session that has expired, and one that has not."""
    async with Database(connection_string=url) as db:
        await db.use_plugin(TTLPlugin(resources=["sessions"], enable_coordinator=False))
        sessions = await db.create_resource(
            name="sessions",
            attributes={"user_id": "string|required", "expires_at": "number|required"},
        )
        await sessions.insert({"id": "live", "user_id": "u2", "expires_at": time.time() + 3600})
    # Without the plugin: every process writes the entries.
    async with Database(connection_string=url) as db:
        await db.resources.sessions.insert(
            {"id": "old", "user_id": "u1", "expires_at": time.time() - 60}
        )


async def test_ttl_cleanup_with_coordinator(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One of two processes deletes the expired session, and that one alone reports it."""
    await create_sessions(url)
    async with Database(connection_string=url) as db, Database(connection_string=url) as other:
        ttl_plugin = TTLPlugin(
            resources=["sessions"],
            enable_coordinator=True,
            cleanup_interval=60,  # Coordinator runs cleanup every 60s
            **FAST,
        )

        # Only coordinator runs cleanup
        @ttl_plugin.on("plg:ttl:cleanup-completed")
        def report(event: Event) -> None:
            deleted, duration = event["deleted"], event["duration"]
            print(f"Coordinator deleted {deleted} expired records in {1000 * duration:.0f}ms")

        await db.use_plugin(ttl_plugin)
        await until(lambda: ttl_plugin.stats()["total_scans"] > 0)
        follower = TTLPlugin(
            resources=["sessions"], enable_coordinator=True, cleanup_interval=60, **FAST
        )
        await other.use_plugin(follower)
        assert await follower.ensure_coordinator() == ttl_plugin.worker_id
        assert follower.stats()["total_scans"] == 0

        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("Coordinator deleted 1 expired records in ")
        assert [session.id for session in await db.resources.sessions.list()] == ["live"]


async def test_the_queues_production_configuration_with_cache_and_ttl(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are added before `connect`, the queue on a resource that was never created.

    Where queues do not run, the other two do.
    """
    # Production-ready configuration
    db = Database(connection_string=url)

    # Add cache for deduplication
    cache = await db.use_plugin(CachePlugin(driver="memory", ttl=3600))

    # Add TTL for auto-cleanup (processed messages deleted after 7 days)
    await db.use_plugin(TTLPlugin(default_ttl=604800))

    async def on_message(task: Document) -> None:
        # Process task
        print("Processing:", task["type"])

    # Create queue
    queue = S3QueuePlugin(
        resource="tasks",
        workers=5,  # 5 concurrent workers
        visibility_timeout=300,  # 5 minutes per task
        max_retries=3,  # Retry 3 times before DLQ
        on_message=on_message,
    )

    has_queues = url.startswith(("sqlite", "postgres"))
    if has_queues:
        await db.use_plugin(queue)
    await db.connect()

    if has_queues:
        await db.resources.tasks.enqueue({"type": "report"})
        await until(lambda: queue.stats()["completed"] == 1)
        assert capsys.readouterr().out == "Processing: report\n"
        assert queue.completed_ttl == 604800
        assert await queue.count("completed") == 1
    users = await db.create_resource(name="users", attributes={"name": "string|required"})
    await users.insert({"id": "u1", "name": "eve"})
    for name in ("ann", "bob"):
        await users.update("u1", {"name": name})
        found = [await users.get("u1") for _ in range(3)]
        assert [user["name"] for user in found if user] == [name] * 3
    assert (cache.stats().hits, cache.stats().misses) == (4, 2)
    await db.disconnect()
