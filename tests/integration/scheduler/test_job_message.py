"""Scheduled jobs that enqueue a message in place of an action."""

import asyncio
import functools
import inspect
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_stage import EVERY_SECOND, NEVER, QUICK
from servers import Locate
from terminal import on_terminal, read_json
from waiting import until

from jobsync import Database, Document, Invalid, JobContext, QueuePlugin, SchedulerPlugin
from jobsync.scheduler.job_message import build_key, parse_message
from jobsync.scheduler.settings import SchedulerSettings, parse_job


@pytest.fixture
def url(locate: Locate) -> str:
    """A fresh file."""
    return locate("sqlite")


def make_scheduler(enqueue: object, **options: Any) -> SchedulerPlugin:
    """Return a scheduler with one job that enqueues."""
    return SchedulerPlugin(
        jobs={"nightly": {"schedule": NEVER, "enqueue": enqueue, **options}}, **QUICK
    )


def make_queue(resource: str, **options: Any) -> QueuePlugin:
    """Return a queue that shares the session of the scheduler."""
    return QueuePlugin(resource=resource, **QUICK, **options)


async def read_messages(queue: QueuePlugin) -> list[Any]:
    """Return the messages of a queue, without their ids."""
    infos = [*await queue.browse("ready"), *await queue.browse("waiting")]
    return [{key: value for key, value in info.value.items() if key != "id"} for info in infos]


async def test_each_instant_is_one_message_that_a_worker_handles(url: str) -> None:
    """The function gets the instant in the job's zone; the history has the message's id."""
    handled: dict[str, Document] = {}

    async def handle(report: Document) -> None:
        handled[report["id"]] = report

    def describe(at: datetime) -> dict[str, str]:
        return {"at": at.isoformat()}

    queue = make_queue("reports", on_message=handle)
    scheduler = SchedulerPlugin(
        jobs={
            "tick": {
                "schedule": EVERY_SECOND,
                "timezone": "Europe/Berlin",
                "enqueue": {"resource": "reports", "data": describe},
            }
        },
        **QUICK,
    )
    async with Database(url, plugins=[queue, scheduler]):
        await until(lambda: len(handled) >= 2, "two messages are handled")
        await scheduler.disable_job("tick")
        await until(lambda: not scheduler.list_running(), "nothing runs")
        runs = await scheduler.job_history("tick", status="success")
        await until(lambda: len(handled) >= len(runs), "all are handled")
        assert sorted(handled) == sorted(str(run.result) for run in runs)
        by_id = {str(run.result): run.scheduled_time for run in runs}
        for message in handled.values():
            at = datetime.fromisoformat(message["at"])
            assert at.timestamp() == by_id[message["id"]]
            assert at.utcoffset() is not None


async def slowly(_: datetime) -> dict[str, int]:
    """Return data as a coroutine function does."""
    await asyncio.sleep(0)
    return {"number": 2}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"number": 1}, {"number": 1}),
        (slowly, {"number": 2}),
        (functools.partial(slowly), {"number": 2}),
    ],
    ids=["dict", "coroutine-function", "partial"],
)
async def test_data_is_a_dict_or_a_function(url: str, data: Any, found: Any) -> None:
    """Of any kind. The message has the options of the job."""
    queue = make_queue("reports")
    enqueue = {"resource": "reports", "data": data, "delay": 3600, "max_attempts": 7}
    scheduler = make_scheduler(enqueue)
    async with Database(url, plugins=[queue, scheduler]):
        name = await scheduler.run_job("nightly")
        (info,) = await queue.browse("waiting")
        assert (info.id, info.max_attempts) == (name, 7)
        assert await read_messages(queue) == [found]
        assert (await scheduler.job_status("nightly")).queue == "reports"


async def test_a_message_of_a_run_is_one_although_its_task_replaces_messages(url: str) -> None:
    """Found: a run that was resumed after its message had ended enqueued a second one."""
    queue = make_queue("reports")

    @queue.task(name="report", key="nightly", key_ttl=60, replace=True)
    async def report() -> None:
        raise NotImplementedError

    message = parse_message("nightly", {"resource": "reports", "task": "report", "data": {}})
    run = JobContext(job_name="nightly", execution_id="1", scheduled_at=datetime.now(UTC))
    async with Database(url, plugins=[queue], work=False) as database:
        first = await message._send(database, run, {})
        assert await queue.cancel(first)
        assert await message._send(database, run, {}) == first
        # A caller may do without the key of the task.
        free = report.with_options(key=None)
        assert len({(await free.enqueue()).id for _ in range(2)}) == 2


async def test_a_function_that_fails_is_retried(url: str) -> None:
    """Three times unless the job says otherwise; its line is in the error, none of the library."""
    calls: list[datetime] = []

    def fail(at: datetime) -> None:
        calls.append(at)
        raise LookupError("no such day")

    queue = make_queue("reports")
    scheduler = make_scheduler({"resource": "reports", "data": fail}, backoff=lambda _: 0)
    async with Database(url, plugins=[queue, scheduler]):
        with pytest.raises(LookupError):
            await scheduler.run_job("nightly")
        (entry,) = await scheduler.job_history("nightly")
        assert len(calls) == 4
        assert await queue.count("all") == 0
        assert "no such day" in entry.error
        assert "jobsync/scheduler" not in entry.error


async def test_one_of_several_queues_is_chosen(url: str) -> None:
    """By its namespace; without it the job is refused, and both are named."""
    fast = make_queue("reports", namespace="fast")
    slow = make_queue("reports", namespace="slow")
    scheduler = make_scheduler({"resource": "reports", "namespace": "slow", "data": {"number": 1}})
    async with Database(url, plugins=[fast, slow, scheduler]):
        await scheduler.run_job("nightly")
        assert [await fast.count(), await slow.count()] == [0, 1]
        enqueue = {"resource": "reports", "data": {}}
        with pytest.raises(Invalid, match="fast and slow"):
            await scheduler.add_job("other", schedule=NEVER, enqueue=enqueue)
        # It was not added.
        await scheduler.add_job("other", schedule=NEVER, action=lambda: None)
    queues = {job["job"]: job["queue"] for job in read_json(url, "schedules", "list")}
    assert queues == {"nightly": "slow/reports", "other": ""}
    shown = on_terminal(url, 100, "schedules", "why", "nightly")
    assert any("a message to the queue slow/reports" in line for line in shown)


@pytest.mark.parametrize(
    ("enqueue", "message"),
    [
        ({"resource": "bills", "data": {}}, r"QueuePlugin\(resource='bills'\)"),
        ({"resource": "plain", "data": {}}, r"plain.*before the scheduler"),
        ({"resource": "late", "data": {}}, "before the scheduler"),
        ({"resource": "reports", "data": {"number": "x"}}, "number"),
        ({"resource": "reports", "data": {"number": 1}, "delay": -1}, "delay"),
    ],
    ids=["no-resource", "no-queue", "queue-comes-later", "schema", "option"],
)
async def test_what_cannot_be_enqueued_is_refused_at_the_start(
    url: str, enqueue: Mapping[str, Any], message: str
) -> None:
    """With the job and the fix."""
    queue, late = make_queue("reports"), make_queue("late")
    database = Database(url)
    await database.connect()
    await database.create_resource("reports", {"number": "number"})
    await database.create_resource("plain")
    await database.disconnect()
    database = Database(url, plugins=[queue, make_scheduler(enqueue), late])
    with pytest.raises(Invalid, match=message) as caught:
        await database.connect()
    assert caught.value.field.startswith("jobs.nightly.enqueue.")
    await database.disconnect()


@pytest.mark.parametrize(
    ("enqueue", "message"),
    [
        ("reports", "must be a dict"),
        ({}, "resource"),
        ({"resource": 3, "data": {}}, "resource"),
        ({"resource": "reports"}, "data"),
        ({"resource": "reports", "data": [1]}, "data"),
        ({"resource": "reports", "data": lambda: None}, "the instant"),
        ({"resource": "reports", "data": {}, "namespace": 3}, "namespace"),
        ({"resource": "reports", "data": {}, "delai": 3}, "delay"),
        ({"resource": "reports", "data": {}, "connection": 3}, "connection"),
        ({"resource": "reports", "data": {}, "key": "x"}, "key"),
    ],
)
def test_a_wrong_message_is_refused_at_once(enqueue: object, message: str) -> None:
    """When the job is declared, with the field."""
    with pytest.raises(Invalid, match=message):
        make_scheduler(enqueue)


def test_a_job_has_an_action_or_a_message() -> None:
    """Not both, and not neither; and nobody edits the queue."""
    with pytest.raises(Invalid, match="one of them"):
        make_scheduler({"resource": "reports", "data": {}}, action=lambda: None)
    with pytest.raises(Invalid, match="enqueue="):
        make_scheduler(None)
    with pytest.raises(Invalid, match="queue"):
        make_scheduler({"resource": "reports", "data": {}}, queue="others")


def make_context(*, is_manual: bool = False, execution_id: str = "run-1") -> JobContext:
    """Return the context of a run of 1,000 s after 1970."""
    scheduler = SchedulerPlugin(namespace="eu")
    at = datetime.fromisoformat("1970-01-01T00:16:40+00:00")
    return JobContext(
        job_name="nightly",
        execution_id=execution_id,
        scheduled_at=at,
        scheduler=scheduler,
        is_manual=is_manual,
    )


def test_the_key_is_the_job_and_the_instant() -> None:
    """The same if another process resumes the run; each run by hand has its own."""
    assert build_key(make_context()) == "eu/nightly@1000"
    assert build_key(make_context(execution_id="run-2")) == "eu/nightly@1000"
    by_hand = {build_key(make_context(is_manual=True, execution_id=name)) for name in ("a", "b")}
    assert by_hand == {"eu/nightly@a", "eu/nightly@b"}


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_a_run_that_is_resumed_enqueues_nothing_again(locate: Locate, kind: str) -> None:
    """Also if the first message was removed in between; another instant has its own message."""
    async with Database("memory://" if kind == "memory" else locate(kind)) as db:
        queue = await db.use_plugin(QueuePlugin(resource="reports"))
        send = parse_message("nightly", {"resource": "reports", "data": {"n": 1}}).build_action()
        first = await send(db, make_context())
        assert await send(db, make_context(execution_id="run-2")) == first
        await queue.purge()
        assert await send(db, make_context(execution_id="run-3")) == first
        by_hand = await send(db, make_context(is_manual=True))
        assert by_hand != first
        assert await queue.count() == 1


@pytest.mark.parametrize("options", [{}, {"delay": 5, "priority": 1}, {"namespace": "slow"}])
async def test_a_message_has_the_options_of_its_job_and_the_key_of_its_run(
    options: dict[str, Any],
) -> None:
    """For a day, in which a run may be resumed; it replaces nothing."""
    calls: list[tuple[Any, Any]] = []

    class Reports:
        async def enqueue(self, data: Any, **given: Any) -> str:
            calls.append((data, given))
            return "message-1"

    database: Any = SimpleNamespace(resource={"reports": Reports()}.__getitem__)
    message = parse_message("nightly", {"resource": "reports", "data": {"n": 1}, **options})
    assert await message.build_action()(database, make_context()) == "message-1"
    own = {"key": "eu/nightly@1000", "key_ttl": 86_400.0, "replace": False}
    assert calls == [({"n": 1}, {"namespace": None, **options, **own})]


async def test_a_job_is_checked_with_the_queue_that_it_names() -> None:
    """Also while another queue of the resource would not take its message."""
    tasks, plain = make_queue("reports", namespace="tasks"), make_queue("reports", namespace="b")
    async with Database("memory://", plugins=[tasks, plain], work=False) as database:
        given: dict[str, Any] = {"resource": "reports", "data": {}}
        for namespace in ("tasks", "b"):
            parse_message("nightly", {**given, "namespace": namespace}).check("nightly", database)
        for wrong in ({}, {"namespace": "c"}):
            with pytest.raises(Invalid):
                parse_message("nightly", {**given, **wrong}).check("nightly", database)


def test_a_function_that_does_not_tell_what_it_takes_may_find_the_data() -> None:
    """As some of Python's own."""
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(max)
    assert parse_message("nightly", {"resource": "reports", "data": max}).data is max


@pytest.mark.parametrize(("default", "retries"), [(0, 3), (2, 3), (3, 3), (7, 7)])
def test_a_job_that_enqueues_is_retried_three_times_or_more(default: int, retries: int) -> None:
    """To repeat that is harmless; unless the job has retries of its own."""
    settings = SchedulerSettings(default_retries=default)
    job = {"schedule": NEVER, "enqueue": {"resource": "reports", "data": {}}}
    assert parse_job("nightly", job, settings).definition.retries == retries
    for own in (0, 1, 9):
        assert parse_job("nightly", {**job, "retries": own}, settings).definition.retries == own


def test_a_long_key_is_shortened() -> None:
    """It stays the same for the same run, and other for another."""
    keys = set()
    for job in ("a" * 300, "a" * 301):
        context = JobContext(
            job_name=job,
            execution_id="run",
            scheduled_at=datetime.fromisoformat("1970-01-01T00:16:40+00:00"),
            scheduler=SchedulerPlugin(namespace="eu"),
            is_manual=False,
        )
        assert len(build_key(context)) <= 200
        assert build_key(context) == build_key(context)
        keys.add(build_key(context))
    assert len(keys) == 2
