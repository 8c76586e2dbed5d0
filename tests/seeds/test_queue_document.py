"""The queue document's quick start and production example, line by line, on every store."""

import asyncio
from typing import Any

import pytest
from servers import Locate

from jobsync import CachePlugin, Database, Document, S3QueuePlugin, TTLPlugin


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """Where queues are kept."""
    return locate(request.param)


async def test_the_queues_thirty_second_setup(url: str) -> None:
    """Line by line: the worker prints what was enqueued, and is done with it."""
    processed: list[str] = []

    # 1. Connect to S3
    db = Database(connection=url)
    await db.connect()

    # 2. Create resource
    tasks = await db.create_resource(
        name="tasks",
        attributes={"id": "string|required", "type": "string|required", "data": "json"},
    )

    # 3. Setup queue
    async def on_message(task: Document) -> dict[str, bool]:
        processed.append(f"Processing: {task.type} {task.data['to']}")
        # Your logic here
        return {"done": True}

    queue = S3QueuePlugin(resource="tasks", on_message=on_message)
    completed = asyncio.Event()
    queue.on("plg:s3-queue:message-completed", lambda _: completed.set())

    await db.use_plugin(queue)

    # 4. Enqueue tasks
    await tasks.enqueue({"type": "send-email", "data": {"to": "user@example.com"}})

    # That's it! Workers are already processing
    async with asyncio.timeout(30):
        await completed.wait()
    assert processed == ["Processing: send-email user@example.com"]
    assert await queue.count("completed") == 1
    assert await queue.count("pending") == 0
    await db.disconnect()


async def test_the_production_ready_configuration(url: str) -> None:
    """Line by line, with plugins that are added before the database connects."""
    processed: list[str] = []

    db = Database(connection_string=url)

    # Add cache for deduplication
    await db.use_plugin(CachePlugin(driver="memory", ttl=3600))

    # Add TTL for auto-cleanup (processed messages deleted after 7 days)
    await db.use_plugin(TTLPlugin(default_ttl=604_800))

    async def on_message(task: Document) -> None:
        # Process task
        processed.append(task.type)

    # Create queue
    queue = S3QueuePlugin(
        resource="tasks",
        workers=5,  # 5 concurrent workers
        visibility_timeout=300,  # 5 minutes per task
        max_retries=3,  # Retry 3 times before DLQ
        on_message=on_message,
    )

    await db.use_plugin(queue)
    await db.connect()
    done: list[str] = []
    is_done = asyncio.Event()

    def note(event: Any) -> None:
        done.append(event.message_id)
        if len(done) == 20:
            is_done.set()

    queue.on("plg:queue:message-completed", note)
    tasks = db.resources.tasks
    ids = [await tasks.enqueue({"type": f"type {number}"}) for number in range(10)]
    ids += await tasks.enqueue_many([{"type": f"type {number}"} for number in range(10, 20)])
    async with asyncio.timeout(60):
        await is_done.wait()
    assert sorted(processed) == sorted(f"type {number}" for number in range(20))
    assert sorted(done) == sorted(ids)
    assert await queue.count("completed") == 20
    await db.disconnect()
