"""The queue document's quick start, line by line, on SQL."""

import asyncio

import pytest
from servers import Locate

from jobsync import Database, Document, S3QueuePlugin


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """Where queues are kept."""
    return locate(request.param)


async def test_the_queues_thirty_second_setup(sql_url: str) -> None:
    """Line by line: the worker prints what was enqueued, and is done with it."""
    processed: list[str] = []

    # 1. Connect to S3
    db = Database(connection=sql_url)
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
