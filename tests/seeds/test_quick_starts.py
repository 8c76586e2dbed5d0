"""The database parts of the documents' quick starts, line by line, on every kind of store.

Stand-ins replace the library's plugins: an action is called explicitly, a message handler never.
"""

from typing import Any

import pytest

from jobsync import Components, Database, Invalid, Plugin


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


class SchedulerPlugin(StandIn):
    """Stands for a scheduler."""

    async def run_job(self, name: str) -> Any:
        return await self.options["jobs"][name]["action"](self.database)


def now() -> float:
    """Return the time of `Date.now()`, in seconds."""
    return Components.system().clock.wall().seconds


async def test_the_schedulers_quick_start(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Expired sessions are found and marked, all are counted."""
    # Step 1: Create database
    db = Database(connection_string=url)
    await db.connect()

    # Step 2: Create a resource to track (example: sessions)
    sessions = await db.create_resource(
        name="sessions",
        attributes={
            "user_id": "string|required",
            "expires_at": "number|required",
            "active": "boolean",
        },
    )
    then = now()
    for number in range(5):
        # Two have expired, one of them is not active; the others have an hour to go.
        record = {"user_id": f"u{number}", "expires_at": then + 3600 * (number - 2) - 1}
        await sessions.insert({**record, "active": number != 1})

    # Step 3: Configure scheduler
    # Clean up expired sessions every hour
    async def cleanup_sessions(db: Database) -> dict[str, int]:
        moment = now()
        sessions = db.resources.sessions

        # Find expired sessions
        expired = await sessions.query({"expires_at": {"$lt": moment}, "active": True})

        print(f"Found {len(expired)} expired sessions to clean up")

        # Mark as inactive
        for session in expired:
            await sessions.update(session.id, {"active": False})

        return {"cleaned": len(expired)}

    # Daily report at 8am
    async def daily_report(db: Database) -> dict[str, int]:
        sessions = db.resources.sessions
        count = await sessions.count()

        print(f"Daily Report: {count} total sessions")

        return {"total_sessions": count}

    scheduler_plugin = SchedulerPlugin(
        jobs={
            "cleanup_sessions": {
                "schedule": "0 * * * *",
                "action": cleanup_sessions,
                "retries": 3,
                "timeout": 30,
            },
            "daily_report": {
                "schedule": "0 8 * * *",
                "timezone": "America/New_York",
                "action": daily_report,
            },
        }
    )

    await db.use_plugin(scheduler_plugin)

    # Step 4: Start the scheduler
    await scheduler_plugin.start()

    # Step 6: Manually trigger a job (optional)
    assert await scheduler_plugin.run_job("cleanup_sessions") == {"cleaned": 2}
    assert await scheduler_plugin.run_job("cleanup_sessions") == {"cleaned": 0}
    assert await scheduler_plugin.run_job("daily_report") == {"total_sessions": 5}
    assert capsys.readouterr().out.splitlines() == [
        "Found 2 expired sessions to clean up",
        "Found 0 expired sessions to clean up",
        "Daily Report: 5 total sessions",
    ]
    assert await sessions.count({"active": True}) == 2
    assert await sessions.query({"expires_at": {"$lt": now()}, "active": True}) == []

    # Step 7: Stop scheduler when done (optional)
    await scheduler_plugin.stop()
    await db.disconnect()


async def test_the_schedulers_installation(url: str) -> None:
    """A plugin can be added before or after connect."""
    db = Database(connection_string=url)
    done: list[Database] = []

    async def daily_cleanup(db: Database) -> None:
        done.append(db)

    plugin = await db.use_plugin(
        SchedulerPlugin(jobs={"daily_cleanup": {"schedule": "0 3 * * *", "action": daily_cleanup}})
    )
    await db.connect()
    await plugin.run_job("daily_cleanup")
    assert done == [db]
    assert db.plugins.scheduler is plugin
    await db.disconnect()


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
