"""The database parts of the documents' quick starts, line by line, on every kind of store."""

from pathlib import Path

import pytest

from jobsync import Components, Database


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the documents say `s3://key:secret@bucket`."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path / 'jobs.db'}"
        case "postgres":
            return f"{request.getfixturevalue('postgres').url}?schema={request.node.originalname}"
        case _:
            return str(request.getfixturevalue("bucket_url"))


async def test_the_schedulers_quick_start(url: str) -> None:
    """Sessions: those that have expired are found and marked, all are counted."""
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
    now = Components.system().clock.wall().seconds
    for number in range(5):
        await sessions.insert(
            {"user_id": f"u{number}", "expires_at": now - 2.5 + number, "active": number != 1}
        )

    # The action of `cleanup_sessions`
    sessions = db.resources.sessions

    # Find expired sessions
    expired = await sessions.query({"expires_at": {"$lt": now}, "active": True})
    assert [session.user_id for session in expired] == ["u0", "u2"]

    # Mark as inactive
    for session in expired:
        await sessions.update(session.id, {"active": False})
    assert await sessions.query({"expires_at": {"$lt": now}, "active": True}) == []

    # The action of `daily_report`
    assert await sessions.count() == 5
    assert await sessions.count({"active": True}) == 2
    await db.disconnect()


async def test_the_queues_quick_start(url: str) -> None:
    """Tasks: an id is required and made where it is missing; data is any JSON."""
    # 1. Connect to S3
    db = Database(connection=url)
    await db.connect()

    # 2. Create resource
    tasks = await db.create_resource(
        name="tasks",
        attributes={"id": "string|required", "type": "string|required", "data": "json"},
    )
    task = await tasks.insert({"type": "send-email", "data": {"to": "user@example.com"}})
    assert task.type == task["type"] == "send-email"
    found = await tasks.get(task.id)
    assert found is not None
    assert found.data == {"to": "user@example.com"}
    await db.disconnect()
