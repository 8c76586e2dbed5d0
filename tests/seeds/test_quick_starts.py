"""The database parts of the documents' quick starts, line by line, on every kind of store.

Stand-ins replace the library's plugins: a message handler is never called.
"""

from typing import Any

import pytest

from jobsync import Database, Invalid, Plugin


class StandIn(Plugin):
    """Accepts any options and does nothing."""

    def __init__(self, *, namespace: str | None = None, **options: Any) -> None:
        super().__init__(namespace=namespace)
        self.options = options

    async def on_install(self) -> None:
        await self.database.create_resource(f"plg_{self.namespace}_{self.slug.replace('-', '_')}")


class S3QueuePlugin(StandIn):
    """Stands for a queue."""


class CachePlugin(StandIn):
    """Stands for a cache."""


class TTLPlugin(StandIn):
    """Stands for expiry."""


async def test_the_queues_thirty_second_setup(url: str) -> None:
    """A required id is generated if it is missing; data is any JSON."""
    # 1. Connect to S3
    db = Database(connection=url)
    await db.connect()

    # 2. Create resource
    tasks = await db.create_resource(
        name="tasks",
        attributes={"id": "string|required", "type": "string|required", "data": "json"},
    )

    # 3. Setup queue
    async def on_message(task: Any) -> dict[str, bool]:
        print("Processing:", task.type)
        return {"done": True}

    queue = S3QueuePlugin(resource="tasks", on_message=on_message)

    await db.use_plugin(queue)
    assert queue.is_running

    # 4. Enqueue tasks: here, store one
    task = await tasks.insert({"type": "send-email", "data": {"to": "user@example.com"}})
    assert task.type == task["type"] == "send-email"
    found = await tasks.get(task.id)
    assert found is not None
    assert found.data == {"to": "user@example.com"}
    with pytest.raises(Invalid, match=r"type is missing \(got None"):
        await tasks.insert({"data": {}})
    assert await tasks.count() == 1
    await db.disconnect()


async def test_the_queues_production_ready_configuration(url: str) -> None:
    """Plugins added before connect start with it, in the order in which they were added."""
    started: list[str] = []
    db = Database(connection_string=url)
    db.on("db:plugin-started", lambda event: started.append(event.plugin))

    # Add cache for deduplication
    await db.use_plugin(CachePlugin(driver="memory", ttl=3600))

    # Add TTL for auto-cleanup (processed messages deleted after 7 days)
    await db.use_plugin(TTLPlugin(default_ttl=604_800))

    # Create queue
    queue = S3QueuePlugin(resource="tasks", workers=5, visibility_timeout=300, max_retries=3)

    await db.use_plugin(queue)
    assert started == []
    await db.connect()
    assert started == ["cache", "ttl", "s3-queue"]
    assert sorted(db.resources) == ["plg_default_cache", "plg_default_s3_queue", "plg_default_ttl"]
    await db.disconnect()


async def test_the_queues_namespaces(url: str) -> None:
    """Several plugins of one kind: `namespace` or an alias names their data."""
    async with Database(connection_string=url) as db:
        emails = await db.use_plugin(S3QueuePlugin(resource="tasks", namespace="emails"))
        sms = await db.use_plugin(S3QueuePlugin(resource="tasks"), "sms")
        assert await db.list_resources() == ["plg_emails_s3_queue", "plg_sms_s3_queue"]
        await emails.storage.set("tickets", 1)
        assert await sms.storage.get("tickets") is None
