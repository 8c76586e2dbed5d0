"""One message from outside, results, progress, and programs that own their loop, as users do it."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from servers import Locate
from waiting import until

from jobsync import (
    ClaimedMessage,
    Context,
    Database,
    Document,
    Event,
    Invalid,
    NoResult,
    QueuePlugin,
    Unavailable,
)
from jobsync.queue import progress


@pytest.fixture(params=["sqlite", "postgres", "memory", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store of each kind."""
    return locate(request.param)


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(url) as db:
        yield db


async def get_state(queue: QueuePlugin, name: str) -> str:
    """Return the state of a message; empty if it is unknown."""
    info = await queue.get(name)
    return "" if info is None else info.state


async def test_a_running_handler_hears_of_a_cancel(db: Database) -> None:
    """It is cancelled at once in its own process, and its message stays cancelled."""
    started, ends = asyncio.Event(), []

    async def handle(_: Document) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    events: list[Event] = []
    queue = QueuePlugin(resource="tasks", on_message=handle)
    queue.on("plg:queue:message-cancelled", events.append)
    await db.use_plugin(queue)
    name = await queue.enqueue({"n": 1})
    await started.wait()
    assert await queue.cancel(name)
    await until(lambda: ends == ["cancelled"])
    assert not await queue.cancel(name)
    assert await get_state(queue, name) == "cancelled"
    assert [event["message_id"] for event in events] == [name]
    assert (queue.stats()["cancelled"], queue.stats()["lost"]) == (1, 1)
    with pytest.raises(NoResult, match="it is cancelled: it was cancelled from outside"):
        await queue.result(name)
    await queue.pause_everywhere()
    assert await queue.redrive([name]) == 1
    assert await get_state(queue, name) == "waiting"


async def test_a_plain_function_sees_that_it_was_cancelled(db: Database) -> None:
    """What it returns then is refused, and not kept."""
    started, is_seen = threading.Event(), threading.Event()

    def handle(_: Document, context: Context) -> str:
        started.set()
        while not context.lost:
            is_seen.wait(0.01)
        is_seen.set()
        return "too late"

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
    name = await queue.enqueue({"n": 1})
    await asyncio.to_thread(started.wait)
    assert await queue.cancel(name)
    await until(is_seen.is_set)
    info = await queue.get(name)
    assert info is not None
    assert (info.state, info.result) == ("cancelled", None)


async def test_another_process_cancels_delays_and_deletes(url: str) -> None:
    """It has no handler. A claimed message is not deleted, and the error says what to do."""
    started = asyncio.Event()

    async def handle(_: Document) -> None:
        started.set()
        await asyncio.sleep(3600)

    options: dict[str, Any] = {"resource": "tasks", "visibility_timeout": 6.0}
    async with Database(url) as one, Database(url) as two:
        queue = await one.use_plugin(QueuePlugin(on_message=handle, **options))
        other = await two.use_plugin(QueuePlugin(**options))
        name = await other.enqueue({"n": 1}, delay=3600)
        assert await other.run_now(name)
        await started.wait()
        assert not await other.run_now(name)
        with pytest.raises(Invalid, match="cannot be deleted while it is claimed") as refused:
            await other.delete(name)
        assert "cancel" in refused.value.fix
        assert await other.cancel(name)
        # At the next renewal at the latest.
        await until(lambda: queue.stats()["lost"] == 1)
        assert await other.delete(name)
        assert not await other.delete(name)
        assert await other.get(name) is None


async def test_a_result_is_kept_and_awaited(db: Database) -> None:
    """From returning and from `ack`; None if nothing was returned."""

    async def handle(task: Document, context: Context) -> Any:
        if task.kind == "ack":
            await context.ack({"acknowledged": True})
        if task.kind == "fail":
            raise ValueError("no")
        return {"rows": 3} if task.kind == "return" else None

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
    kinds = ("return", "ack", "nothing", "fail")
    ids = {kind: await queue.enqueue({"kind": kind}, max_attempts=1) for kind in kinds}
    assert await queue.result(ids["return"], timeout=20) == {"rows": 3}
    assert await queue.result(ids["ack"], timeout=20) == {"acknowledged": True}
    assert await queue.result(ids["nothing"], timeout=20) is None
    with pytest.raises(NoResult, match="it is dead: ValueError: no") as dead:
        await queue.result(ids["fail"], timeout=20)
    assert (dead.value.id, dead.value.state) == (ids["fail"], "dead")
    with pytest.raises(NoResult, match="it is unknown"):
        await queue.result("no-such-message")
    waiting = await queue.enqueue({"kind": "return"}, delay=3600)
    with pytest.raises(TimeoutError, match=r"is waiting after 0\.1 s\. (Run|See): "):
        await queue.result(waiting, timeout=0.1)


async def test_a_result_that_cannot_be_kept_costs_no_message(db: Database, url: str) -> None:
    """The message is completed; an event, and whoever asks, learns why there is no result."""
    results: dict[str, Any] = {"object": object(), "large": "x" * 70_000, "medium": "x" * 3_000}

    async def handle(task: Document) -> Any:
        return results[task.kind]

    events: list[Event] = []
    queue = QueuePlugin(resource="tasks", on_message=handle)
    queue.on("plg:queue:result-dropped", events.append)
    await db.use_plugin(queue)
    ids = {kind: await queue.enqueue({"kind": kind}) for kind in results}
    for kind in ("object", "large"):
        with pytest.raises(NoResult, match="it is completed: its result was not kept"):
            await queue.result(ids[kind], timeout=20)
    if url.startswith("s3"):
        with pytest.raises(NoResult, match="must be at most 2,048 bytes"):
            await queue.result(ids["medium"], timeout=20)
    else:
        assert await queue.result(ids["medium"], timeout=20) == results["medium"]
    dropped = {event["message_id"] for event in events}
    assert dropped >= {ids["object"], ids["large"]}
    assert queue.stats()["completed"] == 3


async def test_progress_is_stored_and_shown(
    db: Database, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the handler runs; it is gone when the message is settled."""
    monkeypatch.setattr(progress, "_INTERVAL", 0.01)
    release = asyncio.Event()

    async def handle(_: Document, context: Context) -> None:
        context.progress(0.2)
        context.progress(0.4, "rows 400 of 1,000\n")
        context.progress("nonsense")  # type: ignore[arg-type]
        await release.wait()

    visibility = 6.0 if url.startswith("s3") else 30.0
    queue = QueuePlugin(resource="tasks", on_message=handle, visibility_timeout=visibility)
    await db.use_plugin(queue)
    name = await queue.enqueue({"n": 1})
    info = None
    for _ in range(400):
        info = await queue.get(name)
        if info is not None and info.progress is not None:
            break
        await asyncio.sleep(0.05)
    assert info is not None
    assert (info.progress, info.progress_note) == (0.4, "rows 400 of 1,000 ")
    release.set()
    assert await queue.result(name, timeout=20) is None
    info = await queue.get(name)
    assert info is not None
    assert info.progress is None


async def test_a_program_with_its_own_loop_claims_and_settles(db: Database) -> None:
    """It gets documents, and settles each; the results are kept."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks", backoff=lambda _: 0.0))
    assert await queue.claim(10) == []
    ids = await queue.enqueue_many([{"n": n} for n in range(3)])
    one, two, three = await queue.claim(10, wait=20)
    assert [(each.id, each.data.n, each.attempt) for each in (one, two, three)] == [
        (name, n, 1) for n, name in enumerate(ids)
    ]
    assert await one.extend(60)
    assert await one.ack({"n": 0})
    assert not await one.ack()
    assert await two.nack(ValueError("try again"))
    assert await queue.result(one.id) == {"n": 0}
    (again,) = await queue.claim(10, wait=20)
    assert (again.id, again.attempt) == (two.id, 2)
    assert await again.ack()
    assert await queue.cancel(three.id)
    assert three.lost
    assert not await three.ack("too late")
    assert queue.stats()["completed"] == 2


async def test_claims_are_returned_when_their_process_stops(url: str) -> None:
    """A clean stop costs no attempt, and the program learns that it has the message no more."""
    async with Database(url) as other_db:
        other = await other_db.use_plugin(QueuePlugin(resource="tasks"))
        name = await other.enqueue({"n": 1})
        async with Database(url) as db:
            queue = await db.use_plugin(QueuePlugin(resource="tasks"))
            (message,) = await queue.claim(1, wait=20)
            assert await other.claim(1) == []
            await queue.enqueue({"n": 2})
            (second,) = await queue.claim(1, wait=20)
            assert await second.ack()
        assert message.lost
        assert not await message.ack()
        (again,) = await other.claim(1, wait=20)
        assert (again.id, again.attempt, again.epoch) == (name, 1, 2)


async def test_a_claim_that_is_dropped_has_failed_an_attempt(db: Database) -> None:
    """Nobody else could settle it, and it must not wait until the process ends."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks", backoff=lambda _: 0.0))
    name = await queue.enqueue({"n": 1}, max_attempts=2)
    messages: list[ClaimedMessage] = await queue.claim(1, wait=20)
    messages.clear()
    gc.collect()
    (again,) = await queue.claim(1, wait=20)
    assert (again.id, again.attempt) == (name, 2)
    info = await queue.get(name)
    assert info is not None
    assert "neither ack() nor nack()" in info.errors[0].error


async def test_wrong_arguments_are_refused_and_a_pause_holds(db: Database) -> None:
    """With the argument's name; nothing is claimed while the queue is paused."""
    queue = QueuePlugin(resource="tasks")
    with pytest.raises(Invalid, match="was never started"):
        await queue.get("x")
    await db.use_plugin(queue)
    for call in (
        lambda: queue.get("a\0b"),
        lambda: queue.cancel("a\0b"),
        lambda: queue.delete("a\0"),
        lambda: queue.run_now("\n"),
        lambda: queue.claim(0),
        lambda: queue.claim(1, wait=-1),
        lambda: queue.result("x", timeout=-1),
    ):
        with pytest.raises(Invalid):
            await call()
    await queue.enqueue({"n": 1})
    queue.pause()
    assert await queue.claim(1) == []
    # Who asks again and again lets others run, and who waits claims when the pause is over.
    asyncio.get_running_loop().call_soon(queue.resume)
    assert any([await queue.claim(1) for _ in range(20)])
    await queue.enqueue({"n": 2})
    queue.pause()
    asyncio.get_running_loop().call_later(0.01, queue.resume)
    (second,) = await queue.claim(1, wait=20)
    assert await second.ack()
    await queue.enqueue({"n": 3})
    await queue.pause_everywhere()
    assert await queue.claim(1) == []
    await queue.resume_everywhere()
    (message,) = await queue.claim(1, wait=20)
    assert await message.ack()


async def test_what_is_claimed_for_a_caller_that_is_cancelled_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once and without an attempt: nobody else could settle it."""
    is_claimed, is_cancelled = asyncio.Event(), asyncio.Event()
    async with Database("memory://") as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        name = await queue.enqueue({"n": 1})
        backend = queue._get_backend()
        claim = backend.claim

        async def claim_slowly(*arguments: Any, **options: Any) -> Any:
            claimed = await claim(*arguments, **options)
            is_claimed.set()
            await is_cancelled.wait()
            return claimed

        monkeypatch.setattr(backend, "claim", claim_slowly)
        claiming = asyncio.ensure_future(queue.claim(1))
        await is_claimed.wait()
        claiming.cancel()
        await asyncio.wait([claiming])
        is_cancelled.set()
        (again,) = await queue.claim(1, wait=5)
        assert (again.id, again.attempt, again.epoch) == (name, 1, 2)
        assert await again.ack()


async def test_what_is_claimed_while_others_cannot_be_ended_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store answers the claim, and then not the request that ends lapsed claims."""
    async with Database("memory://") as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        await queue.enqueue({"n": 1})
        backend = queue._get_backend()
        claim = backend.claim

        async def claim_with_lapsed(*arguments: Any, **options: Any) -> Any:
            return msgspec.structs.replace(await claim(*arguments, **options), lapse=0.0)

        async def refuse(*_: Any, **__: Any) -> Any:
            raise Unavailable("the store", "it is away")

        monkeypatch.setattr(backend, "claim", claim_with_lapsed)
        monkeypatch.setattr(backend, "end_claims", refuse)
        (message,) = await queue.claim(1, wait=5)
        assert await message.ack()


async def test_a_program_has_a_suspect_alone(locate: Locate) -> None:
    """It gets one when it holds nothing else, and nothing else while it holds that."""
    url = locate("sqlite")
    async with Database(url) as db, Database(url) as other_db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        other = await other_db.use_plugin(QueuePlugin(resource="tasks"))
        names = [await queue.enqueue({"n": 1})]
        held = await other.claim(1)
        await queue._get_backend().end_claims({other._get_membership().incarnation})
        names += [await queue.enqueue({"n": n}) for n in (2, 3)]
        rest = await queue.claim(10)
        assert [each.id for each in rest] == names[1:]
        for message in rest:
            assert await queue.claim(10) == []
            assert await message.ack()
        (suspect,) = await queue.claim(10)
        assert suspect.id == names[0]
        later = await queue.enqueue({"n": 4})
        assert await queue.claim(10) == []
        assert await suspect.ack()
        (last,) = await queue.claim(10)
        assert last.id == later
        assert await last.ack()
        assert not await held[0].ack()
