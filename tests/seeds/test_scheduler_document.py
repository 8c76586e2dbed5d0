"""The scheduler document's examples, and the coordinator document's one, on every kind of store.

The schedules are the documents': hourly, daily. Where an instant must come, an operator changes the
schedule to every second.
"""

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from waiting import until

from jobsync import Components, Database, Event, SchedulerPlugin

TIMING: dict[str, Any] = {
    "heartbeat_interval": 0.5,
    "worker_timeout": 20,
    "skip_cold_start": True,
}
"""A fleet that has a leader at once; the documents wait for half a minute."""


def now() -> float:
    """Return the time of `Date.now()`, in seconds."""
    return Components.system().clock.wall().seconds


async def test_the_quick_start(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All seven steps: expired sessions are found and marked, and the listeners tell of it."""
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
        # Three have expired, one of them is not active; the others have an hour to go.
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
                "schedule": "0 * * * *",  # Every hour at minute 0
                "action": cleanup_sessions,
                "retries": 3,
                "timeout": 30,  # 30 seconds
            },
            "daily_report": {
                "schedule": "0 8 * * *",  # Every day at 8am
                "timezone": "America/New_York",
                "action": daily_report,
            },
        }
    )

    await db.use_plugin(scheduler_plugin)

    # Step 4: Start the scheduler
    await scheduler_plugin.start()
    print("Scheduler started! Jobs will run on schedule.")

    # Jobs run automatically based on schedule!
    cleanup, report = await scheduler_plugin.list_jobs()
    assert (cleanup.name, report.name) == ("cleanup_sessions", "daily_report")
    assert [moment % 3600 for moment in cleanup.next_runs] == [0] * 5
    new_york = ZoneInfo("America/New_York")
    assert [datetime.fromtimestamp(moment, new_york).hour for moment in report.next_runs] == [8] * 5

    # Step 5: Monitor job execution
    @scheduler_plugin.on("jobStarted")
    def on_started(event: Event) -> None:
        assert abs(event["scheduled_time"] - now()) < 60
        print(f"Job {event['job_name']} started")

    @scheduler_plugin.on("jobCompleted")
    def on_completed(event: Event) -> None:
        assert event["duration"] >= 0
        print(f"Job {event['job_name']} completed: {event['result']}")

    @scheduler_plugin.on("jobFailed")
    def on_failed(event: Event) -> None:
        print(f"Job {event['job_name']} failed (attempt {event['attempts']}): {event['error']}")

    # Step 6: Manually trigger a job (optional)
    assert await scheduler_plugin.run_job("cleanup_sessions") == {"cleaned": 2}
    print("Manual job execution completed")
    assert await scheduler_plugin.run_job("daily_report") == {"total_sessions": 5}

    assert capsys.readouterr().out.splitlines() == [
        "Scheduler started! Jobs will run on schedule.",
        "Job cleanup_sessions started",
        "Found 2 expired sessions to clean up",
        "Job cleanup_sessions completed: {'cleaned': 2}",
        "Manual job execution completed",
        "Job daily_report started",
        "Daily Report: 5 total sessions",
        "Job daily_report completed: {'total_sessions': 5}",
    ]
    assert await sessions.count({"active": True}) == 2

    # Job history tracked in database
    (entry,) = await scheduler_plugin.job_history("cleanup_sessions")
    assert (entry.status, entry.result, entry.attempts) == ("success", {"cleaned": 2}, 1)

    # Step 7: Stop scheduler when done (optional)
    await scheduler_plugin.stop()
    assert not scheduler_plugin.is_running
    await db.disconnect()


async def test_automatic_retry_on_failure(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`retries: 3` are three attempts after the first, each with its `jobFailed`."""
    calls = 0

    async def cleanup_sessions() -> int:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise ValueError("not yet")
        return calls

    scheduler_plugin = SchedulerPlugin(
        jobs={
            "cleanup_sessions": {
                "schedule": "0 * * * *",
                "action": cleanup_sessions,
                "retries": 3,
                "backoff": lambda _: 0,
            }
        }
    )

    @scheduler_plugin.on("jobFailed")
    def on_failed(event: Event) -> None:
        first, _, _ = str(event["error"]).partition("\n")
        print(f"Job {event['job_name']} failed (attempt {event['attempts']}): {first}")
        assert event["final"] is False

    async with Database(connection_string=url) as db:
        await db.use_plugin(scheduler_plugin)
        assert await scheduler_plugin.run_job("cleanup_sessions") == 4
        (entry,) = await scheduler_plugin.job_history("cleanup_sessions")
        assert (entry.status, entry.attempts) == ("success", 4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("): ")[0] for line in lines] == [
        f"Job cleanup_sessions failed (attempt {number}" for number in (1, 2, 3)
    ]
    assert all("not yet" in line for line in lines)


async def test_the_installation(url: str) -> None:
    """A plugin can be added before or after connect."""
    db = Database(connection_string=url)
    done: list[Database] = []

    async def daily_cleanup(db: Database) -> None:
        # Your job logic
        done.append(db)

    plugin = await db.use_plugin(
        SchedulerPlugin(jobs={"daily_cleanup": {"schedule": "0 3 * * *", "action": daily_cleanup}})
    )
    await db.connect()
    await plugin.run_job("daily_cleanup")
    assert done == [db]
    assert db.plugins.scheduler is plugin
    await db.disconnect()


async def test_only_one_of_two_instances_runs_the_jobs(url: str) -> None:
    """Two instances with the same config: the coordinator runs each instant, the other none."""
    ran: list[tuple[str, float]] = []
    lines: list[str] = []

    def build_scheduler(instance: str) -> SchedulerPlugin:
        async def daily_cleanup(_: Database, context: Any) -> None:
            ran.append((instance, context.scheduled_time))

        return SchedulerPlugin(
            jobs={"daily_cleanup": {"schedule": "0 3 * * *", "action": daily_cleanup}},
            enable_coordinator=True,  # Enabled by default
            **TIMING,
        )

    # Instance 1
    scheduler_a = build_scheduler("A")
    scheduler_a.on(
        "plg:scheduler:coordinator-elected",
        lambda event: lines.append(f"New coordinator: {event.worker_id}"),
    )
    scheduler_a.on(
        "plg:scheduler:coordinator-promoted",
        lambda _: lines.append("This worker is now coordinator"),
    )
    started: list[str] = []
    scheduler_a.on("plg:scheduler:job-started", lambda event: started.append(event.job_name))

    # Instance 2 (same config)
    scheduler_b = build_scheduler("B")
    scheduler_b.on("plg:scheduler:job-started", lambda _: started.append("B"))

    async with Database(connection_string=url) as one, Database(connection_string=url) as two:
        await one.use_plugin(scheduler_a)
        assert await scheduler_a.ensure_coordinator() == scheduler_a.worker_id
        await until(lambda: len(lines) == 2, "the listeners were called")
        assert sorted(lines) == [
            f"New coordinator: {scheduler_a.worker_id}",
            "This worker is now coordinator",
        ]
        await two.use_plugin(scheduler_b)

        # Nobody waits until 3 o'clock here.
        await scheduler_b.update_job("daily_cleanup", schedule="* * * * * *")
        await until(lambda: len(ran) >= 2, "two instants were fired")
        await scheduler_b.disable_job("daily_cleanup")

        # Result: Only ONE instance runs the jobs
        assert {instance for instance, _ in ran} == {"A"}
        instants = [instant for _, instant in ran]
        assert len(set(instants)) == len(instants)
        assert set(started) == {"daily_cleanup"}


async def test_the_scheduler_with_coordinator(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The coordinator document's example: the action takes no argument, the event has a job id."""
    reports = 0

    async def generate_daily_report() -> None:
        nonlocal reports
        reports += 1

    async def daily_report() -> None:
        await generate_daily_report()

    scheduler_plugin = SchedulerPlugin(
        jobs={
            "daily-report": {
                "schedule": "0 0 * * *",  # Midnight
                "action": daily_report,
            }
        },
        enable_coordinator=True,  # Only coordinator runs jobs
        **TIMING,
    )

    @scheduler_plugin.on("plg:scheduler:job-executed")
    def on_executed(event: Event) -> None:
        assert event["duration"] >= 0
        print(f"Coordinator executed job {event['job_id']}")

    async with Database(connection_string=url) as db:
        await db.use_plugin(scheduler_plugin)
        await scheduler_plugin.ensure_coordinator()

        # Nobody waits until midnight here.
        await scheduler_plugin.update_job("daily-report", schedule="* * * * * *")
        await until(lambda: reports, "an instant was fired")
    lines = capsys.readouterr().out.splitlines()
    assert set(lines) == {"Coordinator executed job daily-report"}
    assert len(lines) == reports
