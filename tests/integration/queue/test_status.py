"""The status of queues, and messages from processes without the queue."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Locate

from jobsync import (
    Database,
    Document,
    Incomplete,
    Invalid,
    InvalidRecord,
    NotFound,
    OutcomeUnknown,
    QueuePlugin,
    Unavailable,
)
from jobsync.queue.backend import QueueBackend
from jobsync.queue.enqueue import enqueue_messages
from jobsync.queue.opening import open_backend
from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.status.queues import QueuesStatus, QueueStatus, read_queues_status


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(f"sqlite:///{tmp_path / 'jobs.db'}") as db:
        yield db


async def look(db: Database) -> QueuesStatus:
    """Return the status of all queues."""
    return await read_queues_status(db.store, db.components)


async def see(db: Database, name: str, holds: Callable[[QueueStatus], bool]) -> QueueStatus:
    """Read a queue's status until it is as expected: facts arrive with a heartbeat."""
    async with asyncio.timeout(30):
        while True:
            for seen in (await look(db)).queues():
                if seen.name == name and holds(seen):
                    return seen
            await asyncio.sleep(0.02)


async def handle(_: Document) -> None:
    """Do nothing."""


async def test_a_resource_names_its_queue_if_it_is_unique(db: Database) -> None:
    """In the default namespace first, else in the only other one."""
    for namespace, resource in [
        ("default", "emails"),
        ("bulk", "emails"),
        ("bulk", "reports"),
        ("a", "twice"),
        ("b", "twice"),
    ]:
        await db.create_resource(resource)
        await enqueue_messages(db, f"{namespace}/{resource}", [{"n": 1}])
    seen = await look(db)
    assert seen.queue("emails").name == "default/emails"
    assert seen.queue("bulk/emails").name == "bulk/emails"
    assert seen.queue("reports").name == "bulk/reports"
    for name in ("twice", "report", "bulk/twice"):
        with pytest.raises(NotFound, match="Known: a/twice, b/twice, bulk/emails"):
            seen.queue(name)


async def test_workers_report_their_status(db: Database) -> None:
    """From start to stop, and when paused; a process that only pushes does not."""
    await db.use_plugin(QueuePlugin(resource="pushed"))
    queue = await db.use_plugin(
        QueuePlugin(resource="emails", on_message=handle, concurrency=7), "mail"
    )
    seen = await see(db, "mail/emails", lambda seen: bool(seen.workers))
    (worker,) = seen.workers
    assert (worker.worker_id, worker.concurrency, worker.works) == (queue.worker_id, 7, True)
    assert [each.name for each in (await look(db)).queues()] == ["mail/emails"]
    queue.pause()
    seen = await see(db, "mail/emails", lambda seen: seen.workers[0].is_paused)
    assert not seen.workers[0].works
    queue.resume()
    await see(db, "mail/emails", lambda seen: seen.workers[0].works)
    await queue.enqueue({"n": 1})
    await queue.stop()
    await see(db, "mail/emails", lambda seen: not seen.workers)


async def test_messages_are_checked_before_the_push(db: Database) -> None:
    """Schema, options and name; nothing is pushed if anything is wrong."""
    await db.create_resource("emails", {"to": "string|required"})
    with pytest.raises(InvalidRecord, match=r"\[1\].to"):
        await enqueue_messages(db, "emails", [{"to": "a"}, {}])
    with pytest.raises(Invalid, match="max_attempts"):
        await enqueue_messages(db, "emails", [{"to": "a"}], max_attempts=0)
    with pytest.raises(Invalid, match="namespace"):
        await enqueue_messages(db, "no name/emails", [{"to": "a"}])
    with pytest.raises(NotFound, match="Did you mean emails"):
        await enqueue_messages(db, "email", [{"to": "a"}])
    assert (await look(db)).queues() == []


@pytest.mark.parametrize(
    ("store", "writes"),
    [
        ("sqlite", ["_access.write"]),
        ("postgres", ["_access.run"]),
        ("memory", ["_control._store.put", "_control._store.create"]),
    ],
)
async def test_a_pause_whose_reply_is_lost_is_in_doubt(
    locate: Locate, monkeypatch: pytest.MonkeyPatch, store: str, writes: list[str]
) -> None:
    """So is its end: `Unavailable` would mean that nothing has changed. Calling again is safe."""

    def lose_the_reply(write: Callable[..., Any]) -> Callable[..., Any]:
        async def lose(*arguments: Any) -> None:
            await write(*arguments)
            raise OutcomeUnknown("queue", "the reply was lost")

        return lose

    async with Database(locate(store)) as db:
        await db.create_resource("emails")
        backend = open_backend(db.store, "default/emails", db.components)
        await enqueue_messages(db, "emails", [{}])
        for call in (backend.pause, backend.resume):
            with monkeypatch.context() as patch:
                for path in writes:
                    *owners, name = path.split(".")
                    owner: Any = backend
                    for each in owners:
                        owner = getattr(owner, each)
                    patch.setattr(owner, name, lose_the_reply(getattr(owner, name)))
                with pytest.raises(OutcomeUnknown):
                    await call()
            is_paused = call == backend.pause
            assert ((await look(db)).queue("emails").pause is not None) is is_paused
            assert await call() is False


@pytest.mark.parametrize("task", ["", "send"])
@pytest.mark.parametrize("wrong", ["x" * 300_000, float("nan")])
@pytest.mark.parametrize("store", ["sqlite", "memory"])
async def test_all_messages_are_checked_before_the_first_part_is_pushed(
    locate: Locate, store: str, wrong: object, task: str
) -> None:
    """Nothing is pushed if the last one is wrong; without it, each part is as large as allowed."""
    large = "x" * 250_000
    async with Database(locate(store)) as db:
        await db.create_resource("emails")
        backend = open_backend(db.store, "default/emails", db.components)
        data: list[Any] = [{"text": "short"}] * backend.max_push + [{"text": large}] * 13
        with pytest.raises(Invalid):
            await enqueue_messages(db, "emails", [*data, {"text": wrong}], task=task)
        assert await backend.count() == {}
        ids = await enqueue_messages(db, "emails", data, task=task)
        assert len(set(ids)) == len(data)
        assert await backend.count() == {"ready": len(data)}
        assert await enqueue_messages(db, "emails", []) == []


async def test_more_than_a_batch_is_pushed_in_parts(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order; if the store fails in between, the error lists what was pushed."""
    await db.create_resource("emails")
    monkeypatch.setattr(QueueBackend, "max_push", 2)
    ids = await enqueue_messages(db, "emails", [{"n": n} for n in range(5)])
    assert (await look(db)).queue("emails").counts == {"ready": 5}
    push, calls = SqliteBackend.push, list[int]()

    async def fail_at_second(self: SqliteBackend, messages: Any) -> Any:
        calls.append(len(messages))
        if len(calls) == 2:
            raise Unavailable("queue", "gone")
        return await push(self, messages)

    monkeypatch.setattr(SqliteBackend, "push", fail_at_second)
    with pytest.raises(Incomplete) as raised:
        await enqueue_messages(db, "emails", [{"n": n} for n in range(5)])
    assert (len(raised.value.written), len(raised.value.unsent)) == (2, 3)
    assert (await look(db)).queue("emails").counts == {"ready": 7}
    assert len(ids) == len(set(ids)) == 5
