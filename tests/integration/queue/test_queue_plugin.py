"""The queue plugin: handlers, verdicts, retries, dead letters, stopping."""

import asyncio
import gc
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from servers import Locate
from waiting import until

from jobsync import (
    Cancel,
    Context,
    Database,
    Document,
    Event,
    Invalid,
    InvalidRecord,
    QueuePlugin,
    S3QueuePlugin,
    Snooze,
    Unavailable,
)
from jobsync.events import known_events
from jobsync.queue import shutdown
from jobsync.queue import worker as worker_module
from jobsync.queue.backend import ClaimResult, NewMessage
from jobsync.queue.executor import THREAD_PREFIX
from jobsync.queue.in_flight import Delivery, Prefetch
from jobsync.queue.opening import open_backend
from jobsync.queue.shutdown import wait_for_change
from jobsync.queue.sql.common import SqlBackend

SQL_ONLY = {
    "test_a_slow_settlement_is_not_lost",
    "test_a_queue_that_is_paused_in_an_outage_is_ready_after_it",
    "test_unreadable_messages_block_no_others",
    "test_more_is_claimed_when_few_are_left",
    "test_more_is_prefetched_for_instant_handlers",
    "test_a_message_starts_before_more_are_requested",
    "test_an_acknowledgement_does_not_outlive_its_claim",
}
"""Tests that replace parts of `SqlBackend`, or reach into the database. What they show of the
worker holds for every backend."""


@pytest.fixture(params=["sqlite", "postgres", "memory", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store of each kind."""
    if request.param in {"memory", "s3"} and request.function.__name__ in SQL_ONLY:
        pytest.skip("it is about a database")
    return locate(request.param)


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(url) as db:
        yield db


def now(_: int) -> float:
    """Retry immediately."""
    return 0.0


async def test_a_handler_gets_each_message_and_its_context(db: Database) -> None:
    """Once, with its context; the completion is reported and counted."""
    seen: list[tuple[Document, Context]] = []

    async def handle(task: Document, context: Context) -> str:
        seen.append((task, context))
        return "done"

    received: list[Event] = []
    completed: list[Any] = []
    queue = QueuePlugin(
        resource="tasks",
        on_message=handle,
        on_complete=lambda task, result: completed.append((task.n, result)),
    )
    queue.on("plg:queue:message-completed", received.append)
    await db.use_plugin(queue)
    ids = await db.resources.tasks.enqueue_many([{"n": n} for n in range(20)])
    await until(lambda: len(received) == len(completed) == 20)
    assert [task.n for task, _ in seen] == list(range(20))
    task, context = seen[0]
    assert task["n"] == 0
    assert (context.id, context.attempt, context.max_attempts, context.epoch) == (ids[0], 1, 4, 1)
    assert context.worker_id == queue.worker_id
    assert not context.lost
    assert {event["message_id"] for event in received} == set(ids)
    assert sorted(completed) == [(n, "done") for n in range(20)]
    assert queue.stats()["completed"] == 20
    assert (await queue.count("completed"), await queue.count("all")) == (20, 20)


async def test_wrong_arguments_never_reach_the_database(db: Database) -> None:
    """Every method refuses them with the argument's name; the queue goes on."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=lambda _: None))
    wrong: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("delay", lambda: queue.enqueue({}, delay=1e300)),
        ("delay", lambda: queue.enqueue({}, delay="5")),  # type: ignore[arg-type]
        ("delay", lambda: queue.enqueue({}, delay=float("nan"))),
        ("timeout", lambda: queue.enqueue({}, timeout=0)),
        ("timeout", lambda: queue.enqueue({}, timeout=float("inf"))),
        ("max_attempts", lambda: queue.enqueue({}, max_attempts=2**31)),
        ("max_attempts", lambda: queue.enqueue({}, max_attempts=1.5)),  # type: ignore[arg-type]
        ("data", lambda: queue.enqueue_many(5)),  # type: ignore[arg-type]
        ("data", lambda: queue.enqueue_many("abc")),  # type: ignore[arg-type]
        ("n", lambda: queue.enqueue({"n": "a\0b"})),
        ("state", lambda: queue.count("pendig")),
        ("state", lambda: queue.count(["pending"])),  # type: ignore[arg-type]
        ("after", lambda: queue.browse("ready", after="abc")),
        ("limit", lambda: queue.browse("ready", limit=-1)),
        ("after", lambda: queue.dead_letters(after="abc")),
        ("limit", lambda: queue.dead_letters(limit=0)),
        ("ids", lambda: queue.redrive(["a\0b"])),
        ("limit", lambda: queue.redrive(limit=-1)),
        ("reason", lambda: queue.pause_everywhere("a\0b")),
        ("max_messages", lambda: queue.drain(max_messages=-1)),
        ("deadline", lambda: queue.drain(deadline=float("nan"))),
    ]
    for number, (field, call) in enumerate(wrong):
        with pytest.raises(Invalid) as refused:
            await call()
        assert (number, refused.value.field.rpartition(".")[2]) == (number, field)
    await queue.enqueue({"n": 1})
    await until(lambda: queue.stats()["completed"] == 1)


async def test_a_plain_function_runs_on_a_thread(db: Database) -> None:
    """Its context has blocking methods."""
    seen: list[Any] = []

    def handle(task: Document, context: Any) -> None:
        seen.append((task.n, threading.current_thread() is threading.main_thread()))
        assert context.extend(60)
        context.progress(0.5)
        assert context.ack()

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
    await queue.enqueue({"n": 1})
    await until(lambda: queue.stats()["completed"] == 1)
    assert seen == [(1, False)]


async def test_a_plain_function_that_overruns_keeps_its_slot(db: Database) -> None:
    """It cannot be stopped: its message fails, and a worker without a free slot reports it."""
    go_on = threading.Event()
    overran: list[Event] = []

    def handle(_: Document) -> None:
        assert go_on.wait(30)

    queue = QueuePlugin(resource="tasks", on_message=handle, concurrency=1, max_attempts=1)
    queue.on("plg:queue:handler-overran", overran.append)
    await db.use_plugin(queue)
    await queue.enqueue({"n": 1}, timeout=0.05)
    await until(lambda: bool(overran))
    assert "handler that exceeded its timeout" in queue.unready()
    await until(lambda: queue.stats()["dead"] == 1)
    assert queue.stats()["running"] == 1
    go_on.set()
    await until(lambda: queue.unready() == "" and queue.stats()["running"] == 0)


async def test_a_worker_without_a_free_slot_returns_what_it_has_prefetched(db: Database) -> None:
    """Other workers handle it meanwhile."""
    go_on, begun = threading.Event(), threading.Event()

    def handle(_: Document) -> None:
        begun.set()
        assert go_on.wait(60)

    async def has_returned_all() -> bool:
        return await queue.count("processing") == 0

    queue = QueuePlugin(
        resource="tasks", on_message=handle, concurrency=2, max_attempts=1, timeout=0.3
    )
    await db.use_plugin(queue)
    await queue.enqueue_many([{"n": n} for n in range(9)])
    await until(begun.is_set)
    await until(lambda: queue.stats()["dead"] == 2)
    # Two occupy the slots; the others were claimed together with them.
    await until(has_returned_all)
    assert await queue.count("pending") == 7
    go_on.set()


async def test_a_failing_message_is_retried_and_then_dead(db: Database) -> None:
    """Four attempts by default; others continue; the dead letter has every error."""
    attempts: list[int] = []
    failures: list[tuple[str, str]] = []

    async def handle(task: Document, context: Context) -> None:
        if task.kind == "poison":
            attempts.append(context.attempt)
            raise ValueError(f"boom {context.attempt}")

    queue = QueuePlugin(
        resource="tasks",
        on_message=handle,
        backoff=now,
        on_error=lambda error, task: failures.append((str(error), task.kind)),
    )
    await db.use_plugin(queue)
    await queue.enqueue({"kind": "poison"})
    await queue.enqueue_many([{"kind": "good"}] * 5)
    await until(lambda: queue.stats()["dead"] == 1 and queue.stats()["completed"] == 5)
    await until(lambda: len(failures) == 4, "its callbacks have run")
    assert attempts == [1, 2, 3, 4]
    assert failures == [(f"boom {n}", "poison") for n in attempts]
    (dead,) = await queue.dead_letters()
    assert dead.value["kind"] == "poison"
    assert [each.attempt for each in dead.errors] == attempts
    assert all("ValueError: boom" in each.error for each in dead.errors)
    assert await queue.redrive() == 1
    await until(lambda: queue.stats()["dead"] == 2)
    assert attempts == [1, 2, 3, 4, 1, 2, 3, 4]


async def test_an_error_shows_only_frames_of_the_handler(db: Database) -> None:
    """The library's own frames are left out."""

    async def handle(_: Document) -> None:
        raise ValueError

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle, max_retries=0))
    await queue.enqueue({"n": 1})
    await until(lambda: queue.stats()["dead"] == 1)
    (dead,) = await queue.dead_letters()
    error, place, *line = dead.errors[0].error.splitlines()
    assert error == "ValueError"
    assert __file__ in place
    assert [each.strip() for each in line] == ["raise ValueError"]


async def test_a_handler_can_snooze_or_cancel(db: Database) -> None:
    """`Snooze` spends no attempt, `Cancel` ends the message."""
    seen: list[tuple[str, int]] = []

    async def handle(task: Document, context: Context) -> Any:
        seen.append((task.kind, context.attempt))
        if task.kind == "never":
            return Cancel("not needed")
        return Snooze(0) if context.epoch < 3 else None

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
    await queue.enqueue({"kind": "never"})
    await queue.enqueue({"kind": "later"})
    await until(lambda: queue.stats()["completed"] == 1)
    assert sorted(seen) == [("later", 1)] * 3 + [("never", 1)]
    assert await queue.count("cancelled") == 1


async def test_a_handler_that_hangs_fails_at_its_timeout(db: Database) -> None:
    """A coroutine is cancelled; the message's own timeout has priority."""
    cancelled: list[int] = []

    async def handle(task: Document) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(task.n)
            raise

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle, max_retries=0))
    await queue.enqueue({"n": 1}, timeout=0.05)
    await until(lambda: queue.stats()["dead"] == 1)
    assert cancelled == [1]
    (dead,) = await queue.dead_letters()
    assert "took longer than 0.05 s" in dead.errors[0].error


async def test_a_handler_that_ignores_its_cancellation_has_failed(db: Database) -> None:
    """Whatever it returns or raises then; later messages are handled as usual."""
    seen: list[int] = []

    async def handle(task: Document) -> None:
        seen.append(task.n)
        if task.n < 2:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            if task.n:
                raise ValueError
        await asyncio.sleep(0)

    queue = await db.use_plugin(
        QueuePlugin(resource="tasks", max_retries=0, concurrency=1, timeout=0.05)
    )
    await queue.enqueue_many([{"n": n} for n in range(4)])
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 2)
    assert seen == [0, 1, 2, 3]
    dead = await queue.dead_letters()
    assert ["took longer than 0.05 s" in each.errors[0].error for each in dead] == [True, True]


async def test_a_handler_that_cancels_itself_frees_its_slot(db: Database) -> None:
    """It spends an attempt. The next message is not cancelled, whether it has waited or not."""
    seen: list[int] = []

    async def handle(task: Document, context: Context) -> None:
        if task.n < 2 and context.epoch == 1:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            if task.n:
                await asyncio.sleep(3600)
        await asyncio.sleep(0)
        seen.append(task.n)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=1, backoff=lambda _: 0.0))
    await queue.enqueue_many([{"n": n} for n in range(4)])
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 4)
    assert sorted(seen) == [0, 1, 2, 3]
    assert queue.stats()["retried"] == 2
    assert queue.stats()["returned"] == 0


async def test_context_variables_of_a_handler_are_its_own(db: Database) -> None:
    """Although one task may handle many messages."""
    mark: ContextVar[int] = ContextVar("mark", default=-1)
    seen: list[int] = []

    async def handle(task: Document) -> None:
        seen.append(mark.get())
        mark.set(task.n)
        await asyncio.sleep(0)
        assert mark.get() == task.n

    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=2))
    await queue.enqueue_many([{"n": n} for n in range(20)])
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 20)
    assert seen == [-1] * 20


async def test_without_automatic_acknowledgement_the_handler_acknowledges(db: Database) -> None:
    """A handler that does not has failed."""

    async def handle(task: Document, context: Context) -> None:
        if task.kind == "ack":
            assert await context.ack()
            assert not await context.nack("too late")
        elif task.kind == "nack":
            assert await context.nack("no")

    queue = QueuePlugin(resource="tasks", on_message=handle, auto_acknowledge=False, max_attempts=1)
    await db.use_plugin(queue)
    await queue.enqueue_many([{"kind": kind} for kind in ("ack", "nack", "forgets")])
    await until(lambda: queue.stats()["dead"] == 2 and queue.stats()["completed"] == 1)
    errors = [each.errors[0].error for each in await queue.dead_letters()]
    assert min(errors) == "no"
    assert "neither context.ack() nor context.nack()" in sorted(errors)[1]


async def test_a_handler_longer_than_the_visibility_timeout_runs_once(db: Database) -> None:
    """Its claim is renewed until it has finished, unless the machine stops for too long."""
    runs: list[str] = []

    async def handle(task: Document) -> None:
        runs.append(task.id)
        await asyncio.sleep(4 * 0.75)

    queue = QueuePlugin(resource="tasks", on_message=handle, visibility_timeout=0.75)
    await db.use_plugin(queue)
    await queue.enqueue({"n": 1})
    # Without renewals none would be completed.
    await until(lambda: queue.stats()["completed"] == 1)
    assert len(runs) == 1 + queue.stats()["lost"]


async def test_a_slow_settlement_is_not_lost(url: str) -> None:
    """Slower than the visibility timeout: the store decides, and nobody ended the claim."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handle(_: Document) -> None:
        begun.set()
        await go_on.wait()

    async with Database(url) as db:
        queue = QueuePlugin(resource="tasks", on_message=handle, visibility_timeout=0.4)
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await begun.wait()
        with locked(url):
            go_on.set()
            await asyncio.sleep(1)
            assert queue.stats()["completed"] == 0
        await until(lambda: queue.stats()["completed"] == 1)
        assert queue.stats()["lost"] == 0


async def test_a_queue_that_is_paused_in_an_outage_is_ready_after_it(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for nothing while it is paused, so it waits for no answer either."""
    claim, is_away = SqlBackend.claim, False

    async def claim_or_fail(*arguments: Any, **options: Any) -> ClaimResult:
        if is_away:
            raise Unavailable("queue", "the request was refused")
        return await claim(*arguments, **options)

    monkeypatch.setattr(SqlBackend, "claim", claim_or_fail)
    queue = QueuePlugin(
        resource="tasks", on_message=lambda _: None, heartbeat_interval=0.2, worker_timeout=0.8
    )
    await db.use_plugin(queue)
    for n in (1, 2):
        is_away = True
        await queue.enqueue({"n": n})
        await until(lambda: "not answered its claims" in queue.unready(), "it is silent")
        queue.pause()
        is_away = False
        await until(lambda: queue.unready() == "", "it is ready")
        queue.resume()
        await until(lambda: queue.stats()["completed"] == n, "it works")  # noqa: B023 - awaited


async def test_a_plain_handler_learns_that_its_worker_has_failed(url: str) -> None:
    """Its message is delivered again soon: the function reads `context.lost`."""
    begun, ended, told = threading.Event(), threading.Event(), threading.Event()

    def handle(_: Document, context: Context) -> None:
        begun.set()
        while not (context.lost or ended.wait(0.01)):
            pass
        if context.lost:
            told.set()

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    db = await Database(url).connect()
    try:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await queue.enqueue({"n": 1})
        await until(begun.is_set)
        db.run_in_background(fail, "failing")
        await until(told.is_set, "the handler is told", 10)
    finally:
        ended.set()
        with suppress(ZeroDivisionError):
            await db.disconnect()


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Lock the tables of messages against writes."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
        connection.close()
    else:
        place, _, schema = url.partition("?schema=")
        with psycopg.connect(place) as holder:
            tables = f"{schema}.jobsync_message, {schema}.jobsync_claim"
            holder.execute(f"LOCK TABLE {tables} IN EXCLUSIVE MODE".encode())
            yield


def damage(url: str) -> None:
    """Make every message unreadable, behind the library's back."""
    place, _, schema = url.partition("?schema=")
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            file.execute("UPDATE jobsync_message SET payload = '{'")
    else:
        with psycopg.connect(place) as server:
            server.execute(f"UPDATE {schema}.jobsync_message SET payload = '{{'".encode())


async def test_unreadable_messages_block_no_others(db: Database, url: str) -> None:
    """However many of them come first."""
    handled: list[int] = []

    async def handle(task: Document) -> None:
        handled.append(task.n)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", poll_interval=600.0))
    await queue.enqueue_many([{"n": n} for n in range(30)])
    damage(url)
    await queue.enqueue({"n": 30})
    queue.handler(handle)
    await until(lambda: handled == [30])
    assert await queue.count("dead") == 30


def find_deliveries() -> list[Delivery]:
    """Return all deliveries in this process, also those that other tests have left behind."""
    # Not isinstance, which asks each object for its class: those of other tests may raise.
    return [each for each in gc.get_objects() if type(each) is Delivery]


async def test_handled_messages_leave_no_garbage(db: Database) -> None:
    """The garbage collector has nothing to do, which would be most of a worker's time."""

    async def handle(task: Document) -> None:
        if task.n % 2:
            raise ValueError

    queue = await db.use_plugin(QueuePlugin(resource="tasks", max_retries=0))
    await queue.enqueue_many([{"n": n} for n in range(40)])
    gc.collect()
    gc.disable()
    try:
        of_others = {id(each) for each in find_deliveries()}
        queue.handler(handle)
        await until(lambda: queue.stats()["completed"] + queue.stats()["dead"] == 40)
        assert not [each for each in find_deliveries() if id(each) not in of_others]
    finally:
        gc.enable()


@pytest.fixture
def long_last_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last settlement is stored, also on a busy machine."""
    for module in (shutdown, worker_module):
        monkeypatch.setattr(module, "LAST_MOMENTS", 60.0)


@pytest.fixture
def exact_durations(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Handlers take as long as they say, also on a busy machine."""
    measure = Prefetch.measure
    monkeypatch.setattr(Prefetch, "measure", lambda self, _: measure(self, seconds or 0.0001))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits of all claims."""
    limits: list[int] = []
    claim = SqlBackend.claim

    async def ask(self: SqlBackend, limit: int, **options: Any) -> ClaimResult:
        limits.append(limit)
        return await claim(self, limit, **options)

    monkeypatch.setattr(SqlBackend, "claim", ask)
    return limits


@pytest.mark.usefixtures("exact_durations")
@pytest.mark.parametrize(("seconds", "least"), [(0.0, 13), (0.01, 30)])
async def test_more_is_claimed_when_few_are_left(
    db: Database, limits: list[int], seconds: float, least: int
) -> None:
    """A batch costs as much as a message, so much of the prefetch comes at once.

    Instant handlers need the next batch earlier than others.
    """

    async def handle(_: Document) -> None:
        await asyncio.sleep(seconds)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=1, prefetch=40))
    await queue.enqueue_many([{"n": n} for n in range(200)])
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 200)
    # The duration of handlers is not known at first.
    assert min(limits[1:]) >= least


@pytest.mark.usefixtures("exact_durations")
@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 23, 102), (0.02, 1, 22)])
async def test_more_is_prefetched_for_instant_handlers(
    db: Database, limits: list[int], seconds: float, least: int, most: int
) -> None:
    """There the claims take most of a worker's time."""

    async def handle(_: Document) -> None:
        await asyncio.sleep(seconds)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=2))
    await queue.enqueue_many([{"n": n} for n in range(100)])
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 100)
    assert least <= max(limits) <= most


async def test_a_message_starts_before_more_are_requested(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the claim found fewer than its limit, and messages were pushed meanwhile."""
    order: list[str] = []
    claim = SqlBackend.claim

    async def ask(*arguments: Any, **options: Any) -> ClaimResult:
        order.append("asks")
        found = await claim(*arguments, **options)
        queue.resume()
        return found

    async def handle(_: Document) -> None:
        order.append("begins")

    monkeypatch.setattr(SqlBackend, "claim", ask)
    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    await queue.enqueue_many([{"n": n} for n in range(2)])
    queue.handler(handle)
    await until(lambda: order.count("begins") == 2)
    assert order[:3] == ["asks", "begins", "begins"]


async def test_a_worker_that_had_work_polls_again_soon(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that found fewer messages than its limit is not an empty poll."""
    rests: list[float] = []
    rest = wait_for_change

    async def note(changed: asyncio.Event, seconds: float) -> None:
        rests.append(seconds)
        await rest(changed, seconds)

    async def handle(_: Document) -> None:
        pass

    monkeypatch.setattr(worker_module, "wait_for_change", note)
    queue = await db.use_plugin(QueuePlugin(resource="tasks", poll_interval=7.0))
    await queue.enqueue({"n": 1})
    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 1 and len(rests) >= 2)
    assert rests[:2] == [7.0, 7.0]


async def test_a_suspect_runs_alone(db: Database) -> None:
    """One at a time; others are handled as usual; all are at their first attempt."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=4))
    port = open_backend(db.store, queue.queue, db.components)
    await queue.enqueue_many([{"n": n} for n in range(12)])
    await port.claim(3, session="ghost", visibility=60)
    assert len(await port.end_claims({"ghost"})) == 3
    running: set[int] = set()
    seen: dict[int, int] = {}

    async def handle(task: Document, context: Context) -> None:
        assert context.attempt == 1
        running.add(task.n)
        await asyncio.sleep(0.02)
        seen[task.n] = len(running)
        running.discard(task.n)

    queue.handler(handle)
    await until(lambda: queue.stats()["completed"] == 12)
    assert [seen[n] for n in range(3)] == [1, 1, 1]
    assert max(seen.values()) > 1


async def test_a_message_that_is_not_a_document_is_buried(db: Database) -> None:
    """It is moved to the dead letters; the others are handled."""
    seen: list[int] = []
    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    port = open_backend(db.store, queue.queue, db.components)
    await port.push([NewMessage(id="odd", value=[1, 2], max_attempts=4)])
    await queue.enqueue({"n": 1})
    queue.handler(lambda task: seen.append(task.n))
    await until(lambda: queue.stats()["completed"] == 1)
    (dead,) = await queue.dead_letters()
    assert (dead.id, dead.value, seen) == ("odd", [1, 2], [1])


async def test_a_stop_returns_unfinished_messages(url: str) -> None:
    """No attempt is spent: the next process gets all messages at their first attempt."""
    begun = asyncio.Event()

    async def hang(_: Document) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async with Database(url) as db:
        queue = QueuePlugin(resource="tasks", on_message=hang, concurrency=2, grace=0.1)
        await db.use_plugin(queue)
        await queue.enqueue_many([{"n": n} for n in range(10)])
        await begun.wait()
    attempts: list[int] = []

    async def handle(_: Document, context: Context) -> None:
        attempts.append(context.attempt)

    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await until(lambda: queue.stats()["completed"] == 10)
    assert attempts == [1] * 10


async def test_a_stop_waits_for_handlers_within_the_grace_period(url: str) -> None:
    """Handlers that finish in time are completed."""
    begun = asyncio.Event()

    async def handle(_: Document) -> None:
        begun.set()
        await asyncio.sleep(0.2)

    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await queue.enqueue({"n": 1})
        await begun.wait()
        await queue.stop()
        await queue.stop()
        assert await queue.count("completed") == 1
        await queue.start()
        await queue.enqueue({"n": 2})
        await until(lambda: queue.stats()["completed"] == 2)


async def stop_here(queue: QueuePlugin) -> None:
    """Stop a queue from the task of a handler."""
    await queue.stop()
    await queue.stop()


async def stop_below(queue: QueuePlugin) -> None:
    """Stop a queue from a task that the handler waits for."""
    await asyncio.gather(queue.stop(), asyncio.wait_for(queue.stop(), 60))


@pytest.mark.parametrize("way", [stop_here, stop_below])
async def test_a_handler_can_stop_its_queue(
    url: str, way: Callable[[QueuePlugin], Awaitable[None]]
) -> None:
    """It runs to its end and its message is completed; then the queue stops."""
    ended: list[int] = []
    others = asyncio.Event()

    async def handle(task: Document) -> None:
        if task.n:
            await others.wait()
        else:
            await way(queue)
            others.set()
        ended.append(task.n)

    queue = QueuePlugin(resource="tasks", on_message=handle, concurrency=3, grace=3600)
    async with asyncio.timeout(60), Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue_many([{"n": 1}, {"n": 2}, {"n": 0}])
        await until(lambda: not queue.is_running)
        await queue.stop()
        assert sorted(ended) == [0, 1, 2]
        assert await queue.count("completed") == 3
        await queue.start()
        assert queue.is_running


async def test_a_handler_can_restart_its_queue(url: str) -> None:
    """It is stopped when the handler has ended, and started after that."""
    events: list[str] = []

    async def handle(task: Document) -> None:
        if not task.n:
            await queue.stop()
            await queue.start()

    queue = QueuePlugin(resource="tasks", on_message=handle, grace=3600)
    async with asyncio.timeout(60), Database(url) as db:
        await db.use_plugin(queue)
        for name in ("plg:queue:workers-stopped", "plg:queue:workers-started"):
            db.on(name, lambda event: events.append(event.name))
        await queue.enqueue({"n": 0})
        await until(lambda: len(events) == 2, "it is restarted")
        await queue.enqueue({"n": 1})
        await until(lambda: queue.stats()["completed"] == 2, "it works")
        assert events == ["plg:queue:workers-stopped", "plg:queue:workers-started"]


async def test_a_plain_function_may_stop_its_queue_too(url: str) -> None:
    """From its thread, through the event loop."""
    loop = asyncio.get_running_loop()

    def handle(_: Document) -> None:
        asyncio.run_coroutine_threadsafe(queue.stop(), loop).result(60)

    queue = QueuePlugin(resource="tasks", on_message=handle, grace=3600)
    async with asyncio.timeout(60), Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await until(lambda: not queue.is_running)
        await queue.stop()
        assert await queue.count("completed") == 1


async def test_threads_end_with_the_queue(url: str) -> None:
    """Only functions that cannot be stopped keep theirs."""

    def handle(_: Document) -> None:
        return

    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await queue.enqueue({"n": 1})
        await until(lambda: queue.stats()["completed"] == 1)
    await until(
        lambda: not any(each.name.startswith(THREAD_PREFIX) for each in threading.enumerate())
    )


async def test_a_stop_does_not_wait_for_functions_that_overran(url: str) -> None:
    """Their messages have already failed; nobody knows when they return."""
    go_on = threading.Event()
    overran: list[Event] = []

    def handle(_: Document) -> None:
        assert go_on.wait(60)

    queue = QueuePlugin(resource="tasks", on_message=handle, max_attempts=1, grace=3600)
    queue.on("plg:queue:handler-overran", overran.append)
    async with asyncio.timeout(60), Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1}, timeout=0.05)
        await until(lambda: bool(overran))
        await queue.stop()
        assert await queue.count("dead") == 1
    go_on.set()


async def test_a_paused_queue_claims_nothing(db: Database) -> None:
    """Until it is resumed."""

    async def handle(_: Document) -> None:
        return

    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    queue.pause()
    queue.handler(handle)
    await queue.enqueue({"n": 1})
    assert await queue.count() == 1
    queue.resume()
    await until(lambda: queue.stats()["completed"] == 1)
    with pytest.raises(Invalid, match="there is a handler already"):
        queue.handler(handle)


@pytest.mark.parametrize("end", ["pause", "stop"])
async def test_who_ends_while_suspects_are_claimed_claims_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The other messages are left to others, though there was room for them."""
    asked: list[bool] = []
    is_over = asyncio.Event()

    async def ask(*_: object, suspects: bool = False, **__: object) -> ClaimResult:
        asked.append(suspects)
        if suspects:
            await is_over.wait()
        return ClaimResult([], suspects=True, due=None, lapse=None, more=True)

    def finish(worker: worker_module.Worker) -> None:
        was(worker)
        is_over.set()

    was = worker_module.Worker.finish
    monkeypatch.setattr(worker_module.Worker, "finish", finish)
    monkeypatch.setattr(SqlBackend, "claim", ask)
    async with Database(f"sqlite:///{tmp_path / 'jobs.db'}") as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=lambda _: None))
        await until(lambda: asked[-1:] == [True], "suspects are claimed")
        before = len(asked)
        if end == "pause":
            queue.pause()
            is_over.set()
            for _ in range(20):
                # Nothing waits for anything else than its turn.
                await asyncio.sleep(0)
    assert len(asked) == before


async def test_a_queue_can_be_paused_for_all_processes(db: Database, url: str) -> None:
    """By a process without a handler, also for later processes, until it is resumed."""

    async def handle(_: Document) -> None:
        return

    async with Database(url) as other:
        here = await db.use_plugin(QueuePlugin(resource="tasks"))
        assert await here.pause_everywhere("a deployment") is True
        there = await other.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await here.enqueue({"n": 1})
        assert await there.drain() == 0
        assert await here.count("ready") == 1
        assert await here.resume_everywhere() is True
        await until(lambda: there.stats()["completed"] == 1)


async def test_draining_handles_all_messages_and_returns(url: str) -> None:
    """All, or up to a maximum."""
    seen: list[int] = []

    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        with pytest.raises(Invalid, match="has no handler"):
            await queue.drain()
        await queue.enqueue_many([{"n": n} for n in range(30)])
        await queue.enqueue({"n": 99}, delay=1000)
    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        queue.pause()
        queue.handler(lambda task: seen.append(task.n))
        assert await queue.drain(max_messages=7) == 7
        assert len(seen) == 7
        assert await queue.drain() == 23
        assert sorted(seen) == list(range(30))
        assert await queue.count() == 1
        assert await queue.purge() == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("of", ["the queue", "its task", "one of its tasks"])
@pytest.mark.parametrize(
    ("rate", "burst", "count", "deadline", "drained"),
    [
        ("20/second", 1, 6, None, 6),
        ("20/second", 4, 6, None, 6),
        # The rate allows no more, and there is none: nothing to wait for.
        ("1/hour", 3, 3, None, 3),
        ("1/hour", 1, 2, 0.2, 1),
    ],
)
async def test_draining_waits_for_what_a_rate_holds_back(
    locate: Locate,
    kind: str,
    of: str,
    rate: str,
    burst: int,
    count: int,
    deadline: float | None,
    drained: int,
) -> None:
    """Until its own time is over, and no longer than there is something."""
    limits: dict[str, Any] = {"rate_limit": rate, "rate_burst": burst}
    is_whole = of == "the queue"
    queue = QueuePlugin(resource="tasks", **limits if is_whole else {})
    limited = queue.task(name="limited", **{} if is_whole else limits)(lambda: None)
    free = queue.task(name="free")(lambda: None)
    async with Database(locate(kind), plugins=[queue]):
        await queue.stop()
        others = 3 if of == "one of its tasks" else 0
        await limited.enqueue_many([{}] * count)
        await free.enqueue_many([{}] * others)
        queue.pause()
        await queue.start()
        assert await queue.drain(deadline=deadline) == drained + others
        assert await queue.count() == count - drained


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_draining_waits_for_retries_that_a_rate_holds_back(locate: Locate, kind: str) -> None:
    """They wait for a rate as new messages do."""
    queue = QueuePlugin(
        resource="tasks", max_attempts=2, backoff=lambda _: 0, rate_limit="20/second"
    )

    @queue.task(name="fail")
    async def fail() -> None:
        raise ValueError("no")

    async with Database(locate(kind), plugins=[queue]):
        queue.pause()
        await fail.enqueue_many([{}] * 2)
        assert await queue.drain() == 4
        assert await queue.count("dead") == 2


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize(("most", "group"), [(1, None), (None, "a")])
async def test_draining_goes_on_when_what_held_others_back_has_ended(
    locate: Locate, monkeypatch: pytest.MonkeyPatch, kind: str, most: int | None, group: str | None
) -> None:
    """Although a claim that saw it in work is answered only after its end."""
    has_asked, ended = asyncio.Event(), asyncio.Event()

    async def handle(_: Document) -> None:
        await has_asked.wait()

    async def note_end(*_: Any) -> None:
        ended.set()

    queue = QueuePlugin(
        resource="tasks", on_message=handle, on_complete=note_end, max_concurrency=most
    )
    claim = SqlBackend.claim

    async def claim_late(*arguments: Any, **options: Any) -> ClaimResult:
        ended.clear()
        claimed = await claim(*arguments, **options)
        if not claimed.messages and not has_asked.is_set():
            has_asked.set()
            await ended.wait()
        return claimed

    async with Database(locate(kind), plugins=[queue]):
        await queue.stop()
        await queue.enqueue_many([{}] * 3, group=group)
        queue.pause()
        monkeypatch.setattr(SqlBackend, "claim", claim_late)
        await queue.start()
        assert await queue.drain() == 3


async def test_draining_waits_for_messages_in_flight(db: Database) -> None:
    """They are done and counted when it returns; then the background worker continues."""
    begun, seen = asyncio.Event(), list[int]()

    async def handle(task: Document) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        seen.append(task.n)

    queue = QueuePlugin(resource="tasks", on_message=handle, concurrency=2)
    await db.use_plugin(queue)
    await queue.enqueue_many([{"n": n} for n in range(10)])
    await begun.wait()
    assert await queue.drain() == 10
    assert sorted(seen) == list(range(10))
    assert await queue.count("all") == await queue.count("completed") == 10
    await queue.enqueue({"n": 10})
    await until(lambda: 10 in seen)


@pytest.mark.parametrize("most", [2, 3, 7])
async def test_draining_counts_messages_in_flight_towards_its_limit(
    db: Database, most: int
) -> None:
    """Two handlers run when it is called."""
    begun, may_end, seen = list[int](), asyncio.Event(), list[int]()

    async def handle(task: Document) -> None:
        begun.append(task.n)
        await may_end.wait()
        seen.append(task.n)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle, concurrency=2))
    await queue.enqueue_many([{"n": n} for n in range(10)])
    await until(lambda: len(begun) == 2)
    draining = asyncio.create_task(queue.drain(max_messages=most))
    await asyncio.sleep(0)
    queue.pause()
    may_end.set()
    assert await draining == most
    assert len(seen) == most


async def test_cancelled_draining_leaves_the_queue_working(db: Database) -> None:
    """Although it is cancelled while it waits for messages in flight."""
    begun, may_end, seen = asyncio.Event(), asyncio.Event(), list[int]()

    async def handle(task: Document) -> None:
        begun.set()
        await may_end.wait()
        seen.append(task.n)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle, concurrency=1))
    await queue.enqueue({"n": 0})
    await begun.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.drain(), 0.05)
    may_end.set()
    await queue.enqueue({"n": 1})
    await until(lambda: sorted(seen) == [0, 1])


@pytest.mark.usefixtures("long_last_moments")
async def test_a_disconnect_is_shortened_by_one_that_cannot_wait(url: str) -> None:
    """Both end. The message of the handler that both have waited for is returned."""
    begun, hours = asyncio.Event(), 3600.0

    async def handle(_: Document) -> None:
        begun.set()
        await asyncio.sleep(hours)

    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle, grace=hours))
        await queue.enqueue({"n": 1})
        await begun.wait()
        patient = asyncio.create_task(db.disconnect())
        await until(lambda: not db.is_connected, "the first one is under way")
        await db.disconnect(within=0.1)
        await patient
        assert queue.stats()["returned"] == 1


async def test_draining_ends_with_the_queue(db: Database) -> None:
    """A stop ends a drain under way; one that comes later is refused, and claims nothing."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(_: Document) -> None:
        begun.set()
        await ended.wait()

    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=1))
    await queue.enqueue_many([{"n": n} for n in range(3)])
    queue.handler(handle)
    await begun.wait()
    draining = asyncio.create_task(queue.drain())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(queue.stop())
    await asyncio.sleep(0)
    ended.set()
    await stopping
    with pytest.raises(Invalid, match="is not running"):
        await draining
    assert await queue.count("processing") == 0
    with pytest.raises(Invalid, match="is not running"):
        await queue.drain()
    await queue.start()
    await until(lambda: queue.stats()["completed"] == 3, "all are handled")


@pytest.mark.parametrize("seconds", ["abc", None, 10**400, -1, float("nan")])
async def test_a_handler_cannot_extend_its_claim_by_nonsense(db: Database, seconds: Any) -> None:
    """It gets an error that names the argument; its claim stands."""
    errors: list[Invalid] = []

    async def handle(_: Document, context: Context) -> None:
        try:
            await context.extend(seconds)
        except Invalid as error:
            errors.append(error)

    queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
    await queue.enqueue({"n": 1})
    await until(lambda: queue.stats()["completed"] == 1, "it is completed")
    assert [error.field for error in errors] == ["seconds"]


@pytest.mark.usefixtures("long_last_moments")
@pytest.mark.parametrize("end", ["stop", "disconnect"])
@pytest.mark.parametrize("is_done", [True, False])
async def test_a_stop_ends_a_drain(db: Database, end: str, *, is_done: bool) -> None:
    """Its handlers finish or are cancelled first, and it claims nothing more."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), list[int]()

    async def handle(task: Document) -> None:
        begun.set()
        try:
            await may_end.wait()
        finally:
            ended.append(task.n)

    queue = QueuePlugin(resource="tasks", concurrency=1, grace=60 if is_done else 0)
    await db.use_plugin(queue)
    queue.pause()
    queue.handler(handle)
    await queue.enqueue_many([{"n": n} for n in range(3)])
    draining = asyncio.create_task(queue.drain())
    async with asyncio.timeout(60):
        await begun.wait()
        ending = asyncio.create_task(queue.stop() if end == "stop" else db.disconnect())
        await until(lambda: not queue.is_running, "it stops")
        if is_done:
            may_end.set()
        await ending
    assert ended == [0]
    assert await draining == is_done
    await db.connect()
    assert await queue.count("processing") == 0
    assert await queue.count("completed") == is_done
    may_end.set()
    queue.resume()
    await queue.start()
    await until(lambda: queue.stats()["completed"] == 3, "all are handled")


async def test_an_acknowledgement_does_not_outlive_its_claim(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that waits for a store that does not answer is told that the claim is lost."""
    answers: list[bool] = []
    asked = asyncio.Event()

    async def never(*_: object) -> list[bool]:
        asked.set()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def handle(_: Document, context: Context) -> None:
        answers.append(context.ack())  # type: ignore[arg-type]

    queue = QueuePlugin(resource="tasks", on_message=handle, grace=0.1)
    await db.use_plugin(queue)
    monkeypatch.setattr(SqlBackend, "settle", never)
    await queue.enqueue({"n": 1})
    await asked.wait()
    await queue.stop()
    await until(lambda: answers == [False], "the function has returned")


async def test_a_handler_may_drain(db: Database) -> None:
    """It does not wait for itself."""
    seen = list[int]()

    async def handle(task: Document) -> None:
        if task.n == 0:
            seen.append(await queue.drain(max_messages=1))
        seen.append(task.n)

    queue = QueuePlugin(resource="tasks", on_message=handle, concurrency=1, prefetch=0)
    await db.use_plugin(queue)
    await queue.enqueue_many([{"n": n} for n in range(2)])
    await until(lambda: sorted(seen) == [0, 1, 1])


async def test_draining_until_a_deadline_counts_what_was_handled(db: Database) -> None:
    """Returned messages are not counted."""
    seen: list[int] = []
    queue = await db.use_plugin(QueuePlugin(resource="tasks", concurrency=1, grace=5))
    queue.pause()

    @queue.handler
    async def handle(task: Document) -> None:
        seen.append(task.n)
        await asyncio.sleep(0.05)

    await queue.enqueue_many([{"n": n} for n in range(200)])
    handled = await queue.drain(deadline=0.2)
    assert handled == len(seen) < 200
    assert await queue.count() == 200 - handled
    assert {each.attempts for each in await queue.browse("waiting", limit=200)} <= {0}


async def test_a_message_must_match_its_resources_schema(db: Database) -> None:
    """The error lists every field, and nothing is pushed; a message is not a record."""
    tasks = await db.create_resource("tasks", {"type": "string|required", "n": "number|default:5"})
    with pytest.raises(Invalid, match="has no queue in this process"):
        await tasks.enqueue({"type": "a"})
    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    with pytest.raises(InvalidRecord, match=r"\[1\].type"):
        await tasks.enqueue_many([{"type": "a"}, {"n": 1}])
    assert await queue.count("all") == 0
    name = await tasks.enqueue({"type": "a"})
    assert await tasks.get(name) is None
    assert await tasks.count() == 0
    assert await queue.count() == 1


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"delay": -1}, "delay .*got -1"),
        ({"delay": float("nan")}, "delay .*got nan"),
        ({"timeout": 0}, "timeout .*got 0"),
        ({"timeout": float("inf")}, "timeout .*got inf"),
        ({"max_attempts": 0}, "max_attempts .*got 0"),
        ({"max_attempts": 2**40}, "max_attempts .*got "),
        ({"at": datetime(2026, 1, 1)}, "must be a datetime with a time zone"),  # noqa: DTZ001
        ({"at": 1_800_000_000}, "must be a datetime with a time zone"),
        ({"at": datetime(2099, 1, 1, tzinfo=UTC)}, "must be within 366 days"),
        ({"at": datetime(2026, 1, 1, tzinfo=UTC), "delay": 1}, "cannot be combined with delay"),
        ({"delay": timedelta(seconds=-1)}, "must be 0 to 366 days"),
        ({"dealy": 5}, "dealy is not an option.*Did you mean delay"),
    ],
)
async def test_wrong_options_of_a_message_are_refused(
    tmp_path: Path, option: dict[str, Any], problem: str
) -> None:
    """With the field, the value and the fix."""
    async with Database(f"sqlite:///{tmp_path / 'jobs.db'}") as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        with pytest.raises(Invalid, match=problem):
            await queue.enqueue({"n": 1}, **option)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"visibility_timeout": 300_000}, r"must be in seconds.*\. Did you mean 300\?"),
        ({"max_retries": 3, "max_attempts": 4}, "cannot be passed with max_attempts"),
        ({"workers": 3, "concurrency": 4}, "cannot be passed with concurrency"),
        ({"concurency": 3}, r"Did you mean concurrency\?"),
        ({"heartbeat_intervall": 3}, r"Did you mean heartbeat_interval\?"),
        ({"concurrency": 0}, "must be 1 or more"),
        ({"on_message": lambda: None}, "takes 0 arguments: it gets a message"),
    ],
)
def test_wrong_options_of_a_queue_are_refused(options: dict[str, Any], problem: str) -> None:
    """The error suggests a fix."""
    with pytest.raises(Invalid, match=problem):
        QueuePlugin(resource="tasks", **options)


def test_the_documents_names_of_options() -> None:
    """`workers`, `max_retries` and `ticket_interval`; the plugin has two names."""
    queue = S3QueuePlugin(
        resource="tasks", workers=5, max_retries=3, visibility_timeout=300, ticket_interval=1
    )
    assert queue.settings.concurrency == 5
    assert queue.settings.max_attempts == 4
    assert queue.settings.dispatch_interval == 1
    assert queue.slug == "queue"


def test_the_documents_names_of_events() -> None:
    """Each event of a queue and of its coordinator has the documents' name as an alias."""
    queue = S3QueuePlugin(resource="tasks")
    names = [name for name in known_events() if name.startswith("plg:queue:")]
    assert {f"plg:queue:coordinator-{fact}" for fact in ("elected", "promoted")} <= {*names}
    for name in names:
        alias = name.replace("plg:queue:", "plg:s3-queue:")
        assert alias in known_events()[name].aliases
        queue.on(alias, print)


async def test_listeners_under_the_documents_names(url: str) -> None:
    """A listener receives an event under its alias, also a coordinator's."""
    received: list[Event] = []
    queue = S3QueuePlugin(resource="tasks")
    queue.on("plg:s3-queue:coordinator-promoted", received.append)
    async with Database(url, plugins=[queue]):
        await until(lambda: bool(received))
    assert [event.name for event in received] == ["plg:queue:coordinator-promoted"]


async def test_a_process_works_on_several_queues(url: str) -> None:
    """Each has its own coordinator, messages and counts; a resource has one queue."""
    handled: list[tuple[str, int]] = []

    def make(resource: str) -> QueuePlugin:
        async def handle(task: Document) -> None:
            handled.append((resource, task.n))

        return QueuePlugin(resource=resource, on_message=handle)

    emails, images = make("emails"), make("images")
    async with Database(url, plugins=[emails, images]) as db:
        assert sorted(db.plugins) == ["queue", "queue-images"]
        await db.resources.images.enqueue({"n": 2})
        await db.resources.emails.enqueue({"n": 1})
        await until(lambda: emails.is_coordinator and images.is_coordinator)
        await until(lambda: sorted(handled) == [("emails", 1), ("images", 2)])
        await until(lambda: emails.stats()["completed"] == images.stats()["completed"] == 1)
        for again in (make("emails"), make("images")):
            taken = rf"has the name of another .*got {re.escape(repr(again))}.*namespace="
            with pytest.raises(Invalid, match=taken):
                await db.use_plugin(again)


async def test_of_two_queues_of_a_resource_one_must_be_chosen(db: Database) -> None:
    """The error names both; the plugins themselves need no choice."""
    first = await db.use_plugin(QueuePlugin(resource="tasks"))
    assert await db.resources.tasks.enqueue({"n": 1})
    second = await db.use_plugin(QueuePlugin(resource="tasks", namespace="slow"))
    for wrong in (None, "fast"):
        with pytest.raises(Invalid, match=r"has default and slow.*[Pp]ass namespace='default'"):
            await db.resources.tasks.enqueue({"n": 2}, namespace=wrong)
    await db.resources.tasks.enqueue({"n": 3}, namespace="slow")
    await db.resources.tasks.enqueue_many([{"n": 4}, {"n": 5}], namespace="default")
    await second.enqueue({"n": 6})
    assert (await first.count(), await second.count()) == (3, 2)


async def test_a_message_can_wait_for_a_duration_or_a_time(db: Database) -> None:
    """In seconds, as a `timedelta`, or as a `datetime`; the dues are shown."""
    queue = await db.use_plugin(QueuePlugin(resource="tasks"))
    soon = datetime.now(UTC) + timedelta(hours=1)
    await queue.enqueue({"n": 1}, delay=3600)
    await queue.enqueue({"n": 2}, delay=timedelta(hours=1))
    await db.resources.tasks.enqueue({"n": 3}, at=soon.astimezone(ZoneInfo("Asia/Tokyo")))
    await queue.enqueue({"n": 4}, at=soon - timedelta(hours=2))
    waiting = await queue.browse("waiting")
    assert [each.due for each in waiting] == pytest.approx([soon.timestamp()] * 3, rel=0, abs=60)
    assert len(await queue.browse("ready")) == 1
