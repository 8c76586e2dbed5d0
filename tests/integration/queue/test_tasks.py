"""Tasks, as users write them: many functions on one queue."""

import asyncio
import enum
import functools
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from scheduler_stage import EVERY_SECOND, OUTAGES, fail_once
from servers import Locate
from waiting import until

from jobsync import (
    BlockingContext,
    Cancel,
    Context,
    Database,
    Document,
    Event,
    Invalid,
    NoResult,
    QueuePlugin,
    SchedulerPlugin,
    sync,
)
from jobsync.safe_text import safe_name
from jobsync.status.queues import read_queues_status


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store of each kind."""
    return locate(request.param)


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(url) as db:
        yield db


async def test_each_message_goes_to_the_function_of_its_task(db: Database) -> None:
    """Coroutines and plain functions, with or without a context; others go to the handler."""
    queue = QueuePlugin("tasks")
    plain: list[str] = []

    @queue.task
    async def double(n: int) -> int:
        return 2 * n

    @queue.task(name="stable")
    def name_thread(context: BlockingContext, text: str = "none") -> list[Any]:
        return [text, context.attempt, threading.current_thread().name.partition("_")[0]]

    @queue.task
    async def find_id(context: Context) -> str:
        return context.id

    @queue.handler
    async def handle(message: Document) -> None:
        plain.append(message.text)

    await db.use_plugin(queue)
    handles = await double.enqueue_many([{"n": n} for n in range(60)])
    assert [await each.result(timeout=30) for each in handles] == [2 * n for n in range(60)]
    ran = await name_thread.enqueue(text="a")
    assert await ran.result(timeout=30) == ["a", 1, "jobsync-handler"]
    found = await find_id.enqueue()
    assert await found.result(timeout=30) == found.id
    await queue.enqueue({"text": "b"})
    await until(lambda: plain == ["b"])
    assert (double.name, name_thread.name) == (safe_name(double.function), "stable")
    info = await ran.get()
    assert info is not None
    assert (info.state, info.task) == ("completed", "stable")
    assert await double(4) == 8


class Name(str, enum.Enum):  # noqa: UP042 - members of a StrEnum are formatted by their values
    """Members are formatted by their own names, not by what they are."""

    QUEUE = "mails"
    TEAM = "blue"
    SEND = "send.mail"
    KEY = "once"


class Limit(float, enum.Enum):
    """Likewise."""

    LONG = 300.0


@pytest.mark.parametrize("count", [1, 60])
async def test_names_and_numbers_may_be_members_of_an_enum(db: Database, count: int) -> None:
    """Stored is what they are, however many messages are stored at a time.

    Found: with 50 or more, PostgreSQL had the name of the member, and no worker its task.
    """
    queue = QueuePlugin(Name.QUEUE, namespace=Name.TEAM)

    @queue.task(name=Name.SEND, timeout=Limit.LONG)
    async def double(n: int) -> int:
        return 2 * n

    await db.use_plugin(queue)
    assert (queue.queue, double.name) == ("blue/mails", "send.mail")
    calls = await double.enqueue_many([{"n": n} for n in range(count)])
    assert [await each.result(timeout=30) for each in calls] == [2 * n for n in range(count)]
    data = [{"n": n} for n in range(count)]
    for delay in (0, 3600):
        ids = await queue.enqueue_many(data, task=Name.SEND, timeout=Limit.LONG, delay=delay)
        info = await queue.get(ids[0])
        assert info is not None
        assert info.task == "send.mail"
    first = await queue.enqueue({"n": 1}, task="send.mail", key="once", delay=3600)
    assert await queue.enqueue({"n": 1}, task=Name.SEND, key=Name.KEY) == first


async def test_a_parameter_may_have_any_name() -> None:
    """Also those that the library uses, for callers that await and for those that block."""
    queue = QueuePlugin("tasks")

    @queue.task
    async def run(self: int, name: str, connection: str, id: str, task: str) -> list[Any]:
        return [self, name, connection, id, task]

    given: Any = {"self": 1, "name": "a", "connection": "b", "id": "c", "task": "d"}
    async with Database("memory://names", plugins=[queue]):
        handles = [await run.enqueue(**given), *await run.enqueue_many([given])]
        handles.append(await asyncio.to_thread(run.enqueue_sync, **given))
        blocking: Any = sync.QueueTask.__new__(sync.QueueTask)
        object.__setattr__(blocking, "wrapped", run)
        handles.append((await asyncio.to_thread(blocking.enqueue, **given)).wrapped)
        for each in handles:
            assert await each.result(timeout=30) == [1, "a", "b", "c", "d"]
        assert await run(**given) == await blocking(**given) == [1, "a", "b", "c", "d"]


async def test_a_worker_claims_only_messages_of_tasks_that_it_knows(db: Database) -> None:
    """The others wait, without an attempt, until their task is known here."""
    queue = await db.use_plugin(QueuePlugin("tasks"))
    done: list[int] = []
    ids = [
        await db.resources.tasks.enqueue({"n": n}, task="new" if n % 2 else "old") for n in range(6)
    ]

    @queue.task(name="old")
    async def run_old(n: int) -> None:
        done.append(n)

    await until(lambda: done == [0, 2, 4])
    assert await queue.count("ready") == 3
    found = await queue.get(ids[1])
    assert found is not None
    assert (found.task, found.deliveries) == ("new", 0)

    async def is_known() -> bool:
        workers = (await read_queues_status(db.store, db.components)).queue("tasks").workers
        return [worker.tasks for worker in workers] == [("old",)]

    # It is told with a heartbeat.
    await until(is_known)

    @queue.task(name="new")
    async def run_new(n: int) -> None:
        done.append(n)

    await until(lambda: done == [0, 2, 4, 1, 3, 5])


async def test_options_are_those_of_the_call_the_task_or_the_queue(db: Database) -> None:
    """In this order; the pauses are the task's, and are decided by a worker."""
    queue = QueuePlugin("tasks", max_retries=7, backoff=lambda _: 3600.0)

    @queue.task(max_retries=1, timeout=11, backoff=lambda _: 0.0)
    async def fail(context: Context) -> None:
        raise ValueError(f"attempt {context.attempt}")

    @queue.task
    async def wait(_: Context) -> None: ...

    await db.use_plugin(queue)
    failed = await fail.enqueue()
    with pytest.raises(NoResult, match="attempt 2"):
        await failed.result(timeout=30)
    found = await fail.with_options(max_retries=4, delay=3600).enqueue()
    info = await found.get()
    assert info is not None
    assert (info.state, info.max_attempts) == ("waiting", 5)
    assert await found.cancel()
    default = await (await wait.with_options(delay=3600).enqueue()).get()
    assert default is not None
    assert default.max_attempts == 8


async def test_a_timeout_is_that_of_the_task(db: Database) -> None:
    """However long others of the queue may take."""
    queue = QueuePlugin("tasks", max_retries=0)

    @queue.task(timeout=0.05)
    async def hang() -> None:
        await asyncio.Event().wait()

    await db.use_plugin(queue)
    with pytest.raises(NoResult, match=r"longer than 0.05 s"):
        await (await hang.enqueue()).result(timeout=30)


async def test_a_task_decides_about_its_message(db: Database) -> None:
    """It may cancel it, fail because of its arguments, or return what cannot be kept."""
    queue = QueuePlugin("tasks", max_retries=0)

    @queue.task
    async def stop(why: str) -> str | Cancel:
        return Cancel(why)

    @queue.task
    async def give() -> Any:
        return object()

    await db.use_plugin(queue)
    with pytest.raises(NoResult, match="cancelled"):
        await (await stop.enqueue("so")).result(timeout=30)
    with pytest.raises(NoResult, match="its result was not kept"):
        await (await give.enqueue()).result(timeout=30)
    with pytest.raises(Invalid, match=r"^why must be `str`"):
        await stop.enqueue(5)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"^why must be `str`"):
        await db.resources.tasks.enqueue({"why": 5}, task=stop.name)
    assert await queue.count("all") == 2


async def test_a_key_is_held_by_messages_of_any_task(db: Database) -> None:
    """A message that replaces another becomes one of its own task."""
    queue = QueuePlugin("tasks")
    done: list[Any] = []

    @queue.task(key="one", replace=True)
    async def first(n: int) -> None:
        done.append(("first", n))

    @queue.task
    async def second(text: str) -> None:
        done.append(("second", text))

    await db.use_plugin(queue)
    held = await first.with_options(delay=3600).enqueue(1)
    same = await second.with_options(key="one", delay=3600).enqueue("a")
    assert same.id == held.id
    await second.with_options(key="one", replace=True).enqueue("b")
    await until(lambda: done == [("second", "b")])


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_task_with_a_cron_is_enqueued_by_the_scheduler(
    locate: Locate, is_first: bool
) -> None:
    """Whichever of the two plugins was added first; without a scheduler the queue is not ready."""
    ran = asyncio.Event()
    queue, scheduler = QueuePlugin("tasks"), SchedulerPlugin()

    @queue.task(name="nightly", cron="0 3 * * *", timezone="Europe/Berlin")
    async def run(times: int = 1) -> None:
        assert times == 1
        ran.set()

    async with Database(locate("sqlite")) as db:
        if is_first:
            warnings: list[Any] = []
            db.on("plg:queue:cron-unscheduled", warnings.append)
            await db.use_plugin(queue)
            assert "nightly has a cron, and no scheduler" in queue.unready()
            await until(lambda: warnings, "it is reported")
            (warning,) = warnings
            assert (warning.task, warning.cron) == ("nightly", "0 3 * * *")
            assert "SchedulerPlugin()" in warning.fix
        await db.use_plugin(scheduler)
        await db.use_plugin(queue)
        assert queue.unready() == ""
        (job,) = await scheduler.list_jobs()
        assert (job.name, job.schedule, job.timezone) == ("nightly", "0 3 * * *", "Europe/Berlin")
        await scheduler.run_job("nightly")
        await asyncio.wait_for(ran.wait(), 30)
        await queue.stop()
        await queue.start()


@pytest.mark.parametrize("scheduler_is", ["before", "after", "missing", "full"])
async def test_a_task_with_a_cron_may_be_added_to_a_queue_that_runs(
    locate: Locate, scheduler_is: str
) -> None:
    """The scheduler enqueues it, whenever it starts; that it is missing or refuses is reported."""
    queue, scheduler = QueuePlugin("tasks"), SchedulerPlugin()
    reports: list[Any] = []
    queue.on("plg:queue:cron-unscheduled", reports.append)
    queue.on("plg:queue:error", reports.append)
    async with Database(locate("sqlite"), plugins=[queue]) as db:
        if scheduler_is == "full":
            scheduler.job("0 4 * * *", name="late")(lambda: None)
        if scheduler_is in ("before", "full"):
            await db.use_plugin(scheduler)
        for name in ("late", "later"):
            queue.task(name=name, cron="0 3 * * *")(lambda: None)
        if scheduler_is == "after":
            await db.use_plugin(scheduler)
        if scheduler_is == "missing":
            await until(lambda: len(reports) == 2, "they are reported")
            assert [each.task for each in reports] == ["late", "later"]
            return
        if scheduler_is == "full":
            await until(lambda: reports, "it is reported")
            assert "late" in reports[0].error

        async def is_scheduled() -> bool:
            jobs = await scheduler.list_jobs()
            return [each.name for each in jobs] == ["late", "later"]

        await until(is_scheduled, "both are scheduled")
        await scheduler.run_job("later")
        await until(lambda: queue.stats()["completed"] == 1, "it is handled")
        assert len(reports) == (scheduler_is == "full")


@pytest.mark.parametrize("outage", OUTAGES)
async def test_a_task_with_a_cron_that_is_added_during_an_outage_is_enqueued_after_it(
    monkeypatch: pytest.MonkeyPatch, outage: str
) -> None:
    """Found: it never was if the store forbade the request, or the reply was lost."""
    queue, scheduler = QueuePlugin("tasks"), SchedulerPlugin()
    reports: list[Event] = []
    async with Database("memory://", plugins=[queue, scheduler]) as db:
        for name in ("plg:queue:error", "db:work-postponed", "db:failed"):
            db.on(name, reports.append)
        fail_once(monkeypatch, outage)
        queue.task(name="late", cron=EVERY_SECOND)(lambda: None)
        await until(lambda: queue.stats()["completed"], "it has run", 20)
        assert [job.name for job in await scheduler.list_jobs()] == ["late"]
        (report,) = reports
        assert report.name == "db:work-postponed"
        assert str(OUTAGES[outage]).rstrip(".") in report["error"]


async def test_a_task_with_a_cron_that_the_scheduler_refuses_is_offered_once() -> None:
    """Another try would be refused, too."""
    queue, scheduler = QueuePlugin("tasks"), SchedulerPlugin()
    reports: list[Event] = []
    async with Database("memory://", plugins=[queue, scheduler]) as db:
        for name in ("plg:queue:error", "db:work-postponed", "db:failed"):
            db.on(name, reports.append)
        scheduler.job("0 4 * * *", name="late")(lambda: None)
        queue.task(name="late", cron="0 3 * * *")(lambda: None)

        def is_offered() -> bool:
            return not any(work.get_name().endswith("offers a job") for work in queue._tasks)

        await until(is_offered, "it was offered", 20)
        (report,) = reports
        assert report.name == "plg:queue:error"
        assert "is the name of another job" in report["error"]


def test_what_cannot_be_a_task_is_refused_when_it_is_defined() -> None:
    """A name that is taken, an unknown option, a cron of a function that needs arguments."""
    queue = QueuePlugin("tasks")

    async def run(n: int) -> None: ...

    queue.task(run)
    problems: list[tuple[Any, str]] = [
        ({}, "is that of another task of this queue"),
        ({"name": ""}, "name must be a text of printable characters"),
        ({"name": "x" * 201}, "name must be 200 bytes or less"),
        ({"max_retrys": 3}, "max_retrys is not an option of a task .* Did you mean max_retries"),
        ({"name": "a", "max_retries": -1}, "max_retries must be"),
        ({"name": "a", "timeout": 0}, "timeout must be"),
        ({"name": "b", "cron": "@daily"}, "without arguments, and this one needs 'n'"),
        ({"name": "c", "timezone": "UTC"}, "timezone has no effect without a cron"),
        ({"name": "d", "priority": 7}, "priority has no effect in a queue whose order is 'fifo'"),
        ({"name": "d", "backoff": 5}, "backoff must be a function .got 5."),
    ]
    for options, problem in problems:
        with pytest.raises(Invalid, match=problem):
            queue.task(**options)(run)
    crons: list[tuple[Any, str]] = [
        ({"cron": "daily"}, "^cron has 1 field instead of 5 or 6"),
        ({"cron": 5}, "^cron must be text .got 5."),
        ({"cron": "@daily", "timezone": "Mars"}, "^timezone is not a known time zone"),
        ({"cron": "@daily", "rate_limit": "many"}, "^rate_limit must be"),
    ]
    for options, problem in crons:
        with pytest.raises(Invalid, match=problem):
            queue.task(name="e", **options)(lambda: None)
    assert queue._build_jobs("tasks", "default") == {}
    for function in (functools.partial(run, n=1), int):
        with pytest.raises(Invalid, match=r"function has no parameters that can be read: .*Write"):
            queue.task(name="f")(function)
    with pytest.raises(Invalid, match="function must be callable"):
        queue.task(5)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_task_has_limits_of_its_own(locate: Locate, kind: str) -> None:
    """For all processes together. What is freed in one is handled in any, without a poll."""
    url, running, most = locate(kind), 0, 0
    counts: list[int] = []

    def build() -> QueuePlugin[Document]:
        queue = QueuePlugin("tasks", concurrency=4, poll_interval=3600.0)

        @queue.task(name="narrow", max_concurrency=2)
        async def narrow(n: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            running -= 1
            return n

        @queue.task(name="slow", rate_limit="1/hour", rate_burst=3)
        async def slow() -> None:
            counts.append(1)

        @queue.task(name="free")
        async def free(n: int) -> int:
            return n

        return queue

    first, second = build(), build()
    async with Database(url, plugins=[first]) as one, Database(url, plugins=[second]):
        tasks = one.resources.tasks
        for name in ("slow", "narrow", "free"):
            data = [{} if name == "slow" else {"n": n} for n in range(12)]
            await tasks.enqueue_many(data, task=name)

        async def is_done() -> bool:
            # Twelve of two tasks, and three of the slow one.
            return await first.count("completed") == 27

        await until(is_done)
    assert most == 2
    assert len(counts) == 3


async def test_stores_without_limits_refuse_those_of_a_task() -> None:
    """With the reason: when the queue starts, or when the task is added later."""
    queue, late = QueuePlugin("tasks"), QueuePlugin("others")

    @queue.task(max_concurrency=2)
    async def narrow() -> None: ...

    async with Database("memory://") as db:
        with pytest.raises(Invalid, match="only possible on a database") as refused:
            await db.use_plugin(queue)
        assert refused.value.field == "limits"
        await db.use_plugin(late)
        with pytest.raises(Invalid, match="only possible on a database"):
            late.task(name="slow", rate_limit="5/day")(narrow.function)
        late.task(name="slow")(narrow.function)
    wrong: Any
    for wrong in ({"max_concurrency": 0}, {"rate_limit": "5/week"}, {"rate_burst": 3}):
        with pytest.raises(Invalid, match=r"rate|max_concurrency"):
            QueuePlugin("tasks").task(**wrong)(narrow.function)
