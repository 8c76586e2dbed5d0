"""What the calls of a queue tell its workers, its listeners and its claims, in memory."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Database, Event, QueuePlugin
from jobsync.coordination.events import WorkerDied
from jobsync.database.coordinator_plugin import CoordinatorPlugin
from jobsync.errors import Unavailable
from jobsync.queue.backend import EndedClaim, QueueBackend
from jobsync.queue.events import QueueStats
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.worker_status import ReportedLimit, WorkerStatus, read_worker_statuses


def handle(_: Any) -> None:
    """Handle nothing: no worker runs."""


def handle_nothing() -> None:
    """Take no arguments."""


def build(**options: Any) -> QueuePlugin[Any]:
    """Return a queue with a handler."""
    return QueuePlugin("tasks", on_message=handle, **options)


class Calls:
    """Records the calls of something."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.made.append(name)


async def test_an_enqueue_is_reported_with_what_was_added() -> None:
    """Not with messages whose keys others hold; the caller gets the ids of those."""
    queue = build()
    async with Database("memory://", plugins=[queue], work=False) as database:
        reports: list[Event] = []
        database.on("plg:queue:message-enqueued", reports.append)
        first = await queue.enqueue({"n": 1}, key="k")
        assert await queue.enqueue({"n": 2}, key="k") == first
        other = await queue.enqueue({"n": 3})
        assert queue.stats()["enqueued"] == 2
    ids = [[*report["ids"]] for report in reports]
    assert [each for each in ids if each] == [[first], [other]]


@pytest.mark.parametrize("has_changed", [True, False])
async def test_the_end_of_a_delay_wakes_the_worker(*, has_changed: bool) -> None:
    """If there was one."""
    queue, calls = build(), Calls()
    async with Database("memory://", plugins=[queue], work=False):
        name = await queue.enqueue({"n": 1}, delay=3600 if has_changed else 0)
        workers, queue._workers = queue._workers, cast("Any", calls)
        assert await queue.run_now(name) is has_changed
        queue._workers = workers
    assert calls.made == (["wake"] if has_changed else [])


@pytest.mark.parametrize("call", ["enqueue", "enqueue_many", "with a key that is held"])
async def test_a_push_wakes_the_worker_of_its_process(call: str) -> None:
    """Whatever the store tells others: it polls at once."""
    queue, calls = build(), Calls()
    async with Database("memory://", plugins=[queue], work=False):
        await queue.enqueue({"n": 1}, key="k")
        workers, queue._workers = queue._workers, cast("Any", calls)
        if call == "enqueue_many":
            await queue.enqueue_many([{"n": 1}, {"n": 2}])
        else:
            await queue.enqueue({"n": 1}, key=None if call == "enqueue" else "k")
        queue._workers = workers
    assert calls.made == ["wake"]


async def test_a_program_claims_again_after_its_claims_have_failed() -> None:
    """The part that keeps them may fail; the next call starts another."""
    queue = QueuePlugin("tasks")
    async with Database("memory://", plugins=[queue]):
        await queue.enqueue_many([{"n": 1}, {"n": 2}])
        (first,) = await queue.claim(1)
        task = queue._pulled_task
        assert task is not None
        task.cancel()
        await asyncio.wait([task])
        assert first.lost
        (second,) = await queue.claim(1)
        assert await second.ack()
        assert queue._pulled_task is not task


async def test_a_message_that_a_program_fails_has_the_pauses_and_attempts_of_its_queue() -> None:
    """As one that a handler fails."""
    queue = QueuePlugin("tasks", max_attempts=2, backoff=lambda failures: 1000.0 * failures)
    delays: list[float] = []
    async with Database("memory://", plugins=[queue]):
        queue.on("plg:queue:message-retry", lambda event: delays.append(event.delay))
        name = await queue.enqueue({"n": 1})
        (message,) = await queue.claim(1)
        assert await message.nack("no")
        assert await queue.claim(1) == []
        assert await queue.run_now(name)
        (message,) = await queue.claim(1)
        assert await message.nack("no")
        assert [each.id for each in await queue.browse("dead")] == [name]
    # Up to a tenth is added.
    assert delays == [pytest.approx(1050, abs=50)]


async def test_nothing_is_claimed_by_a_program_once_its_database_stops() -> None:
    """Other plugins may take long to stop, and what it has is returned then."""
    queue = QueuePlugin("tasks")
    async with Database("memory://", plugins=[queue]):
        await queue.enqueue_many([{"n": 1}, {"n": 2}])
        (message,) = await queue.claim(1)
        queue.prepare_stop()
        assert await queue.claim(1) == []
        assert await queue.count() == 1
        assert await message.ack()


def count_deaths_heard(database: Database, queue: QueuePlugin[Any]) -> int:
    """Return how often a queue hears of the same death."""
    listeners = database.events._listeners.values()
    return sum(
        each.name == WorkerDied.name and getattr(each.callback, "__self__", None) is queue
        for each in listeners
    )


async def test_a_queue_that_has_stopped_hears_nothing_of_deaths() -> None:
    """Each start listens once: after two starts the claims of a dead worker are ended once."""
    queue = QueuePlugin("tasks")
    database = Database("memory://", plugins=[queue])
    counts = []
    for _ in range(2):
        await database.connect()
        counts.append(count_deaths_heard(database, queue))
        await database.disconnect()
        counts.append(count_deaths_heard(database, queue))
    assert counts == [1, 0, 1, 0]


async def test_a_death_ends_the_claims_and_is_looked_after_again() -> None:
    """A claim of the dead worker may be under way; what was ended is reported."""
    queue, calls, reports = build(), Calls(), []
    ended = EndedClaim(id="id-1", state="waiting", attempt=1, session="dead")

    async def end_claims(dead: Any) -> list[EndedClaim]:
        assert dead == {"dead"}
        return [ended]

    async with Database("memory://", plugins=[queue], work=False) as database:
        database.on("plg:queue:message-recovered", lambda event: reports.append(event.message_id))
        workers, queue._workers = queue._workers, cast("Any", calls)
        backend = cast("Any", queue._backend)
        queue._backend = cast(
            "QueueBackend", type("Fake", (), {"end_claims": staticmethod(end_claims)})
        )
        await queue._end_claims_of(cast("Any", type("Death", (), {"incarnation": "dead"})))
        queue._workers, queue._backend = workers, backend
    assert calls.made == ["look_for_late_claims"]
    assert reports == ["id-1"]


async def test_a_store_that_does_not_end_the_claims_of_a_death_is_reported() -> None:
    """Once for each death; the next one is tried again."""
    queue, reports = build(), list[Any]()

    async def end_claims(_: Any) -> list[EndedClaim]:
        raise Unavailable("the store", "it does not answer")

    async with Database("memory://", plugins=[queue], work=False) as database:
        database.on("plg:queue:error", reports.append)
        backend, queue._backend = (
            queue._backend,
            cast("Any", SimpleNamespace(end_claims=end_claims)),
        )
        for _ in range(2):
            await queue._end_claims_of(WorkerDied(worker_id="w", incarnation="dead"))
        queue._backend = backend
    assert [(each.queue, each.message_id) for each in reports] == [(queue.queue, None)] * 2
    assert all("it does not answer" in each.error for each in reports)


async def test_statistics_are_sent_once_a_minute() -> None:
    """All that are counted, each under its own name."""
    sleeps: list[float] = []
    sent: list[Event] = []
    queue = build()
    counted = {name: number for number, name in enumerate(queue.stats(), start=1)}

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) > 2:
            raise asyncio.CancelledError

    clock = SimpleNamespace(sleep=sleep)
    stub = SimpleNamespace(
        database=SimpleNamespace(components=SimpleNamespace(clock=clock)),
        emit=sent.append,
        queue="default/tasks",
        stats=lambda: counted,
    )
    with pytest.raises(asyncio.CancelledError):
        await QueuePlugin._emit_stats(cast("Any", stub))
    assert sleeps == [60.0, 60.0, 60.0]
    assert sent == [QueueStats(queue="default/tasks", **counted)] * 2


def test_statistics_are_those_of_the_counters() -> None:
    """Nothing is counted twice, and what was never counted is 0."""
    queue = build()
    names = ("enqueued", "completed", "retried", "cancelled", "returned", "dead", "lost")
    assert queue.stats() == dict.fromkeys((*names, "running"), 0)
    for number, name in enumerate(names, start=1):
        queue._reporter.counters[name] = number
    counted = {name: number for number, name in enumerate(names, start=1)}
    assert queue.stats() == {**counted, "running": 0}


async def test_a_process_reports_the_limits_of_its_queue_and_of_its_tasks() -> None:
    """Also of those that were added since it began; a process that stops reports none."""
    queue = build(max_concurrency=9)
    published: list[dict[str, Any]] = []
    stub = SimpleNamespace(publish=lambda **facts: published.append(facts))
    cast("Any", queue)._get_membership = lambda: stub
    queue.task(name="first", max_concurrency=2)(handle_nothing)
    limits = queue._find_limits()
    queue._publish(WorkerStatus(concurrency=3))
    queue.task(name="second", rate_limit="2/second")(handle_nothing)
    queue._publish(WorkerStatus(concurrency=3))
    queue._publish(None)
    # Of the backend, too, which has got them before.
    assert {*limits.tasks} == {"first", "second"}
    found = [read_worker_statuses(facts).get(queue.queue) for facts in published]
    first = {"": ReportedLimit(max_concurrency=9), "first": ReportedLimit(max_concurrency=2)}
    assert found == [
        WorkerStatus(concurrency=3, limits=first),
        WorkerStatus(concurrency=3, limits={**first, "second": ReportedLimit(rate=2.0)}),
        None,
    ]


async def test_a_stopped_queue_releases_its_threads_and_starts_new_ones() -> None:
    """They end by themselves, once they are idle."""
    used: list[threading.Thread] = []
    queue = QueuePlugin("tasks", on_message=lambda _: used.append(threading.current_thread()))
    async with Database("memory://", plugins=[queue]):
        for number in range(2):
            await queue.result(await queue.enqueue({"n": number}), timeout=30)
            await queue.stop()
            assert queue._executor._threads is None
            await asyncio.to_thread(used[-1].join, 30)
            assert not used[-1].is_alive()
            await queue.start()
    assert used[0] is not used[1]


@pytest.mark.parametrize("present", [(), ("a",), ("b",), ("a", "b"), ("b", "c"), ("a", "b", "c")])
def test_a_queue_says_why_it_cannot_work(
    present: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a new process helps against first, then its session, then what it waits for."""
    queue = build()
    reasons = {name: name if name in present else "" for name in "abc"}
    monkeypatch.setattr(queue, "stuck", lambda: reasons["a"])
    monkeypatch.setattr(CoordinatorPlugin, "unready", lambda _: reasons["b"])
    monkeypatch.setattr(queue, "_describe_wait", lambda: reasons["c"])
    assert queue.unready() == (present[0] if present else "")


@pytest.mark.parametrize("order", [("b", "a", "c"), ("c", "b", "a")])
def test_a_queue_whose_crons_nobody_enqueues_names_the_first_task(order: tuple[str, ...]) -> None:
    """By name, so that the reason stays the same; a scheduler that runs helps."""
    queue = build()
    for name in order:
        queue.task(name=name, cron="@daily")(handle_nothing)
    schedulers: list[Any] = [SimpleNamespace(runs_jobs=False)]
    cast("Any", queue).list_started = lambda: schedulers
    assert queue._describe_wait().startswith("task a has a cron, and no scheduler")
    schedulers.append(SimpleNamespace(runs_jobs=True))
    assert queue._describe_wait() == ""


def test_a_store_that_has_not_answered_for_a_timeout_is_a_reason() -> None:
    """Of the session, not less: a heartbeat without an answer is nothing special."""
    queue, asked = build(), list[float]()
    timing = SimpleNamespace(heartbeat=5.0, timeout=15.0)
    cast("Any", queue)._membership = SimpleNamespace(timing=timing)

    def describe_wait(seconds: float) -> str:
        asked.append(seconds)
        return "silent"

    queue._workers = cast("Any", SimpleNamespace(describe_wait=describe_wait))
    assert queue._describe_wait() == "silent"
    assert asked == [15.0]
    cast("Any", queue)._membership = None
    assert queue._describe_wait() == ""


def test_a_concurrency_that_is_set_counts_everywhere() -> None:
    """For the slots of handlers, and in what is reported."""
    queue = build(concurrency=3)
    queue.set_concurrency(7)
    assert queue.settings.concurrency == 7
    assert queue._workers.concurrency == 7


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 2}, {"rate_limit": "5/second"}])
async def test_messages_of_limited_tasks_are_not_claimed_in_advance(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], *, is_late: bool
) -> None:
    """They would use up what others may handle now, also if their task was added to a worker."""
    # A store without limits stands for one that has them.
    monkeypatch.setattr("jobsync.queue.plugin.check_limits", lambda *_: None)
    queue = build(prefetch=5)
    async with Database("memory://", plugins=[queue]):
        if not is_late:
            queue.task(name="send", **limits)(lambda: None)
        worker = queue._build_worker()
        if is_late:
            assert worker._slots._prefetch.limit == 3
            queue.task(name="send", **limits)(lambda: None)
        assert worker._slots._prefetch.limit == (0 if limits else 3)


async def test_a_backend_knows_its_fleet_until_the_queue_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session and the election are gone after that."""
    joined: list[bool] = []
    join = PagesBackend.join

    def record(backend: PagesBackend, fleet: Any) -> None:
        joined.append(fleet is not None)
        join(backend, fleet)

    monkeypatch.setattr(PagesBackend, "join", record)
    async with Database("memory://", plugins=[QueuePlugin("tasks")]):
        assert joined == [True]
    assert joined == [True, False]
