"""Messages as records of a resource, on every database."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waiting import until

from jobsync import Database, Document, Invalid, QueuePlugin
from jobsync.core.keys import escape
from jobsync.queue.message_records import MessageRecords


@pytest.fixture(params=["sqlite", "postgres"])
async def db(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A fresh, connected database."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        name = f"r{abs(hash(request.node.nodeid)) % 10**12}"
        url = f"{server.url}{'&' if '?' in server.url else '?'}schema={name}"
    async with Database(url) as db:
        yield db


async def refuse(task: Document) -> None:
    """Handle nothing."""
    raise ValueError(task.n)


async def test_unfinished_messages_are_records(db: Database) -> None:
    """By id, paged, filtered, sorted and counted; without those of other queues."""
    await db.use_plugin(QueuePlugin(resource="tasks", namespace="emails"))
    await db.use_plugin(QueuePlugin(resource="others", namespace="texts"), alias="others")
    await db.resources.others.enqueue({"n": 99})
    ids = await db.resources.tasks.enqueue_many([{"n": n} for n in range(25)], delay=60)
    face = db.resources["plg_emails_tasks_queue"]

    record = await face.get(ids[3])
    assert record is not None
    assert (record.id, record.status, record.data["n"], record.attempts) == (
        ids[3],
        "waiting",
        3,
        0,
    )
    assert record.visible_at > record.queued_at
    assert await face.list_ids() == sorted(ids)
    assert await face.count() == 25
    assert [each.data["n"] for each in await face.query({"data.n": {"$gte": 22}})] == [22, 23, 24]
    first = await face.page(size=10)
    assert [each.id for each in first.items] == sorted(ids)[:10]
    second = await face.page(size=20, after=first.next)
    assert [each.id for each in second.items] == sorted(ids)[10:]
    assert await db.resource("plg_texts_others_queue").count() == 1
    assert await db.resource("plg_emails_tasks_dead").count() == 0


async def test_a_finished_message_is_no_record_of_the_queue(db: Database) -> None:
    """Found: one that was completed or cancelled was found by its id, and in no list."""

    async def handle(task: Document) -> None:
        if task.n == "dead":
            raise ValueError(task.n)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", max_attempts=1))
    ids = {n: await queue.enqueue({"n": n}) for n in ("completed", "cancelled", "dead")}
    waiting = await queue.enqueue({"n": "waiting"}, delay=3600)
    await queue.cancel(ids["cancelled"])
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == queue.stats()["dead"] == 1)
    live, dead = db.resource("plg_default_tasks_queue"), db.resource("plg_default_tasks_dead")
    wanted = [*ids.values(), waiting]
    for face, expected in ((live, [waiting]), (dead, [ids["dead"]])):
        assert await face.list_ids() == expected
        assert [name for name in wanted if await face.get(name) is not None] == expected


async def test_a_range_of_messages_is_listed(db: Database) -> None:
    """Keys and versions up to an id, page by page."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    ids = sorted(await queue.enqueue_many([{"n": n} for n in range(10)], delay=60))
    records = MessageRecords(db.store, db.components, queue.queue, "queue")
    keys = [f"data/tasks/{escape(name)}" for name in ids]

    async def found(after: str, limit: int) -> list[str]:
        heads = await records.heads("data/tasks/", after=after, until=keys[7], limit=limit)
        return [head.key for head in heads]

    assert await found("", 1000) == keys[:7]
    assert await found("", 5) == keys[:5]
    assert await found(keys[4], 5) == keys[5:7]
    assert await found(keys[7], 5) == []


async def test_dead_letters_are_separate_records(db: Database) -> None:
    """With every error; they are not among the unfinished messages."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    died = asyncio.Event()
    queue.on("plg:queue:message-dead", lambda _: died.set())
    queue.handler(refuse)
    name = await queue.enqueue({"n": 7}, max_attempts=1)
    async with asyncio.timeout(30):
        await died.wait()
    dead = db.resources["plg_default_tasks_dead"]
    (record,) = await dead.list()
    assert (record.id, record.status, record.data["n"]) == (name, "dead", 7)
    assert record.error.startswith("ValueError: 7")
    assert [each["attempt"] for each in record.errors] == [1]
    assert await db.resources["plg_default_tasks_queue"].get(name) is None


async def test_messages_cannot_be_written_as_records(db: Database) -> None:
    """The error says what to use, and nothing changes."""
    await db.use_plugin(QueuePlugin(resource="tasks"))
    name = await db.resources.tasks.enqueue({"n": 1}, delay=60)
    face = db.resources["plg_default_tasks_queue"]
    with pytest.raises(Invalid, match="Use enqueue, redrive or purge"):
        await face.insert({"id": "x"})
    with pytest.raises(Invalid, match="Use enqueue, redrive or purge"):
        await face.delete(name)
    assert await face.list_ids() == [name]
    assert "plg_default_tasks_queue" not in await db.list_resources()
