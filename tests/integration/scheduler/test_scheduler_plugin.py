"""The scheduler plugin: adding, firing, changing and running jobs in one process."""

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import pytest
from scheduler_stage import (
    EVERY_SECOND,
    NEVER,
    OUTAGES,
    QUICK,
    SettableClock,
    Stage,
    fail_once,
    run_scheduler,
)
from servers import Locate
from waiting import until

from jobsync import (
    Components,
    Database,
    Event,
    Invalid,
    JobContext,
    JobRunning,
    NotFound,
    OutcomeUnknown,
    Plugin,
    SchedulerPlugin,
    Unavailable,
)
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.scheduler.job_store import JobStore
from jobsync.status.schedules import read_schedules_status


@pytest.fixture
def url(locate: Locate) -> str:
    """A fresh file."""
    return locate("sqlite")


def idle() -> None:
    """Do nothing."""


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_a_job_runs_at_each_instant(kind: str, locate: Locate) -> None:
    """Every second, with its context; the history has each run, and the status counts them."""
    seen: list[tuple[Database, JobContext]] = []

    async def act(database: Database, context: JobContext) -> dict[str, int]:
        seen.append((database, context))
        return {"count": len(seen)}

    jobs = {"tick": {"schedule": EVERY_SECOND, "action": act, "context": {"depth": 3}}}
    async with run_scheduler(locate(kind), jobs) as stage:
        await until(lambda: len(stage.heard("job-executed")) >= 2, "two runs")
        contexts = [context for _, context in seen[:2]]
        assert seen[0][0] is stage.database
        # An instant at which the first run has not ended is skipped, and recorded.
        first, second = (context.scheduled_time for context in contexts)
        gaps = await stage.scheduler.job_history("tick", status="skipped")
        skipped = {
            at
            for gap in gaps
            for at in range(int(gap.first or gap.scheduled_time), int(gap.scheduled_time) + 1)
        }
        assert {*range(int(first) + 1, int(second))} <= skipped
        assert [(each.job_name, each.attempt, each["depth"]) for each in contexts] == [
            ("tick", 1, 3),
            ("tick", 1, 3),
        ]
        newest, *_, oldest = await stage.scheduler.job_history("tick", status="success")
        assert oldest.scheduled_time == contexts[0].scheduled_time
        assert newest.scheduled_time > oldest.scheduled_time
        assert (oldest.id, oldest.result) == (contexts[0].execution_id, {"count": 1})
        status = await stage.scheduler.job_status("tick")
        assert status.successes >= 2
        assert status.success_rate == 1.0
        first, *rest = status.next_runs
        assert status.next_run == first > oldest.scheduled_time
        assert rest == [first + 1, first + 2, first + 3, first + 4]
        assert status.in_words
        assert status.p50 is not None
        assert status.p95 is not None
        assert status.p50 <= status.p95
        assert [each.name for each in await stage.scheduler.list_jobs()] == ["tick"]


async def test_a_decorated_function_is_a_job(url: str) -> None:
    """Before and after the start; it can be called as before."""
    calls: list[str] = []

    def decorate(scheduler: SchedulerPlugin) -> None:
        @scheduler.job(EVERY_SECOND, timezone="Europe/Berlin")
        def early() -> None:
            calls.append("early")

        early()

    async with run_scheduler(url, prepare=decorate) as stage:
        assert calls == ["early"]

        @stage.scheduler.job(EVERY_SECOND, name="other", description="later")
        async def late() -> None:
            calls.append("late")

        await until(lambda: {*calls[1:]} == {"early", "late"}, "both have run")
        assert (await stage.scheduler.job_status("early")).timezone == "Europe/Berlin"
        assert (await stage.scheduler.job_status("other")).description == "later"


@pytest.mark.parametrize("outage", OUTAGES)
async def test_a_decorated_function_is_stored_after_an_outage(
    monkeypatch: pytest.MonkeyPatch, outage: str
) -> None:
    """Found: the database failed if the store forbade the request, or the reply was lost."""
    reports: list[Event] = []
    calls: list[float] = []
    async with run_scheduler("memory://") as stage:
        for name in ("db:work-postponed", "db:failed"):
            stage.database.on(name, reports.append)
        fail_once(monkeypatch, outage)
        stage.scheduler.job(EVERY_SECOND, name="late")(lambda: calls.append(time.time()))
        await until(lambda: calls, "it has run", 20)
        assert [job.name for job in await stage.scheduler.list_jobs()] == ["late"]
        (report,) = reports
        assert report.name == "db:work-postponed"
        assert str(OUTAGES[outage]).rstrip(".") in report["error"]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_removed_job_that_comes_back_is_fired_whatever_becomes_of_the_reply(
    url: str, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    """Found: the leader was not told of a job that was stored by a request without a reply."""
    calls: list[float] = []
    tick = {"schedule": EVERY_SECOND, "action": lambda: calls.append(time.time())}
    async with run_scheduler(url, {"tick": tick}) as leader, run_scheduler(url) as other:
        await until(lambda: calls, "it has run")
        await other.scheduler.remove_job("tick")
        await leader_knows(leader, "tick", is_active=False)
        calls.clear()
        change = JobStore.change

        async def lose_reply(jobs: JobStore, *of: Any) -> NoReturn:
            await change(jobs, *of)
            monkeypatch.undo()
            raise OutcomeUnknown("job", "lost")

        if is_lost:
            monkeypatch.setattr(JobStore, "change", lose_reply)
        other.scheduler.job(EVERY_SECOND, name="tick")(idle)
        await until(lambda: calls, "the leader fires it again", 20)


async def has_code(stage: Stage, name: str, expected: bool) -> bool:
    """Whether others know that this process has the code of a job, or that it has not."""
    database = stage.database
    status = await read_schedules_status(database.store, database.components)
    return bool((await status.job(name)).workers) is expected


async def test_a_job_is_added_and_removed_while_it_runs(url: str) -> None:
    """A removed job never fires again; its history stays; it can be added again."""
    calls: list[str] = []
    async with run_scheduler(url) as stage:
        scheduler = stage.scheduler
        await scheduler.add_job("tick", schedule=EVERY_SECOND, action=lambda: calls.append("one"))
        await until(lambda: calls, "it has run")
        with pytest.raises(Invalid, match="another job"):
            await scheduler.add_job("tick", schedule=EVERY_SECOND, action=idle)
        assert await scheduler.remove_job("tick") is True
        removed = time.time()
        with pytest.raises(NotFound):
            await scheduler.job_status("tick")
        with pytest.raises(NotFound):
            await scheduler.run_job("tick")
        assert await scheduler.list_jobs() == []
        assert await scheduler.job_history("tick")
        await until(lambda: has_code(stage, "tick", False), "it says that it has no such code")
        await scheduler.add_job("tick", schedule=EVERY_SECOND, action=lambda: calls.append("two"))
        await until(lambda: has_code(stage, "tick", True), "it says that it has the code")
        await until(lambda: "two" in calls, "it runs again")

        def list_ended() -> list[float]:
            times = [event["scheduled_time"] for event in stage.heard("job-executed")]
            return [at for at in times if at > removed]

        await until(list_ended, "its run has ended")
        runs = await scheduler.job_history("tick", since=removed + 1)
        ended = [entry.status for entry in runs if entry.scheduled_time <= list_ended()[0]]
        assert set(ended) <= {"success"}
        assert [event.name for event in stage.heard("job-added")] == ["plg:scheduler:job-added"]
        assert stage.heard("job-removed")[0]["job_id"] == "tick"


async def test_each_change_is_told_once(url: str) -> None:
    """With its fields; what changes nothing returns False and tells nothing."""
    async with run_scheduler(url) as stage:
        scheduler = stage.scheduler

        async def add() -> bool:
            await scheduler.add_job("job", schedule=NEVER, action=idle)
            return True

        changes: list[tuple[Callable[[], Awaitable[bool]], str, dict[str, Any]]] = [
            (add, "job-added", {}),
            (
                lambda: scheduler.disable_job("job", "too loud"),
                "job-disabled",
                {"reason": "too loud"},
            ),
            (lambda: scheduler.enable_job("job"), "job-enabled", {}),
            (lambda: scheduler.disable_job("job"), "job-disabled", {"reason": ""}),
            (lambda: scheduler.enable_job("job"), "job-enabled", {}),
            (
                lambda: scheduler.update_job("job", retries=3, jitter=5),
                "job-updated",
                {"changes": ("jitter", "retries")},
            ),
            (
                lambda: scheduler.update_job("job", retries=4),
                "job-updated",
                {"changes": ("retries",)},
            ),
            (lambda: scheduler.remove_job("job"), "job-removed", {}),
        ]
        for change, name, fields in changes:
            for is_first in (True, False):
                stage.events.clear()
                if is_first or change is not add:
                    try:
                        assert await change() is is_first
                    except NotFound:
                        assert (name, is_first) == ("job-removed", False)
                told = [
                    {"name": event.name, **msgspec.structs.asdict(event)}
                    for event in stage.events
                    if event.name.startswith("plg:scheduler:job-")
                ]
                expected = {"name": f"plg:scheduler:{name}", "job_name": "job", **fields}
                assert told == ([expected] if is_first else [])


async def test_a_leader_without_jobs_fires_those_that_are_added_later(url: str) -> None:
    """It was elected, and had nothing to take over, before the first job came."""
    calls: list[str] = []
    has_taken_over = asyncio.Event()

    class Watched(SchedulerPlugin):
        """Tells when it has taken over."""

        slug = "scheduler"

        async def on_become_coordinator(self) -> None:
            await super().on_become_coordinator()
            has_taken_over.set()

    scheduler = Watched(**QUICK)
    async with Database(url, plugins=[scheduler]):
        await has_taken_over.wait()
        await scheduler.add_job("tick", schedule=EVERY_SECOND, action=lambda: calls.append("tick"))
        await until(lambda: calls, "it has run", 30)


async def test_an_instant_that_comes_while_a_leader_takes_over_is_fired(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was not read, because nothing of it was due when the leader began to read others."""
    tick = {"schedule": EVERY_SECOND, "action": idle}
    async with run_scheduler(url, {"tick": tick, "rare": {**tick, "schedule": NEVER}}) as stage:
        await until(lambda: len(stage.heard("job-executed")) >= 2, "its progress is stored")
    due = int(time.time()) + 3
    moment = time.gmtime(due)
    schedule = f"{moment.tm_sec} {moment.tm_min} {moment.tm_hour} * * *"
    calls: list[float] = []
    rare = {"schedule": schedule, "action": lambda: calls.append(time.time())}
    decode, read = JobStore.decode_progress, JobStore.read_many
    is_taking_over = False

    def note_progress(jobs: JobStore, value: Any) -> Any:
        nonlocal is_taking_over
        is_taking_over = True
        return decode(jobs, value)

    async def read_slowly(jobs: JobStore, names: Sequence[str]) -> Any:
        if is_taking_over:
            assert "rare" not in names
            await until(lambda: time.time() > due + 1, "the instant has passed")
        return await read(jobs, names)

    monkeypatch.setattr(JobStore, "decode_progress", note_progress)
    monkeypatch.setattr(JobStore, "read_many", read_slowly)
    async with run_scheduler(url, {"tick": tick, "rare": rare}) as stage:
        started = await stage.hears("job-started", job_name="rare")
        assert started["scheduled_time"] == due
        assert is_taking_over


async def test_a_run_by_hand_waits_until_a_dead_processs_run_is_given_up(url: str) -> None:
    """As when a job that runs another is resumed after its process died."""
    jobs = {"measure": {"schedule": NEVER, "action": lambda: 144}}
    async with run_scheduler(url, jobs) as stage:
        orphan = ActiveRun(
            id="of-the-dead", instant=1, owner="worker-gone", started_at=1.0, is_manual=True
        )
        jobs_of_all = JobStore(lambda: stage.database.store, "default", Components.system())

        def begin(state: JobState | None) -> JobState:
            assert state is not None
            return msgspec.structs.replace(state, running=(orphan,))

        await jobs_of_all.change("measure", begin)
        assert await stage.scheduler.run_job("measure") == 144
        assert (await stage.hears("job-lost"))["execution_id"] == "of-the-dead"


class Broken(Mapping[str, Any]):
    """A dict that cannot be read, such as a shelf that is closed or rows that are not loaded."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _fail(self, place: str) -> None:
        if self.place == place:
            raise ConnectionError("cannot load rows")

    def __len__(self) -> int:
        self._fail("__len__")
        return 1

    def __bool__(self) -> bool:
        self._fail("__bool__")
        return True

    def __iter__(self) -> Iterator[str]:
        self._fail("__iter__")
        return iter(["rows"])

    def __getitem__(self, key: str) -> int:
        self._fail("__getitem__")
        return 1


@pytest.mark.parametrize("place", ["__len__", "__bool__", "__iter__", "__getitem__"])
async def test_what_a_caller_passes_is_read_before_anything_is_written(
    url: str, place: str
) -> None:
    """Found: the run was recorded, and never started; or the whole database failed."""
    jobs = {"job": {"schedule": NEVER, "action": lambda: "done"}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await leader.scheduler.ensure_coordinator()
        for stage in (leader, other):
            if place in ("__iter__", "__getitem__"):
                with pytest.raises(Invalid, match="context cannot be read: ConnectionError"):
                    await stage.scheduler.run_job("job", Broken(place))
            else:
                # Nobody asks for them.
                assert await stage.scheduler.run_job("job", Broken(place)) == "done"
            assert not (await stage.scheduler.job_status("job")).running
            assert await stage.scheduler.run_job("job") == "done"


@pytest.mark.parametrize("is_leading", [True, False])
async def test_a_run_by_hand_goes_on_if_its_caller_is_cancelled(
    url: str, is_leading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: between the write of the state and the start, it blocked the job for ever."""
    calls: list[str] = []
    written = asyncio.Event()
    replace = JobStore.replace

    async def replace_slowly(self: JobStore, *arguments: Any) -> Any:
        stored = await replace(self, *arguments)
        written.set()
        await asyncio.sleep(0.05)
        return stored

    jobs = {"job": {"schedule": NEVER, "action": lambda: calls.append("job")}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await leader.scheduler.ensure_coordinator()
        scheduler = (leader if is_leading else other).scheduler
        monkeypatch.setattr(JobStore, "replace", replace_slowly)
        task = asyncio.create_task(scheduler.run_job("job"))
        await written.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def has_ended() -> bool:
            return not (await scheduler.job_status("job")).running

        await until(has_ended, "its run ends")
        assert calls == ["job"]


async def test_a_run_by_hand_while_the_scheduler_stops_is_not_left_behind(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded when the scheduler has stopped, and its session goes on."""
    written, release = asyncio.Event(), asyncio.Event()
    replace = JobStore.replace

    async def replace_slowly(self: JobStore, *arguments: Any) -> Any:
        stored = await replace(self, *arguments)
        if not written.is_set():
            written.set()
            await release.wait()
        return stored

    jobs = {"job": {"schedule": NEVER, "action": lambda: "done"}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs, grace=0) as other:
        await leader.scheduler.ensure_coordinator()
        await other.database.use_plugin(SchedulerPlugin(namespace="another", **QUICK))
        monkeypatch.setattr(JobStore, "replace", replace_slowly)
        task = asyncio.create_task(other.scheduler.run_job("job"))
        await written.wait()
        await other.scheduler.stop()
        release.set()
        with pytest.raises(Unavailable):
            await task

        async def is_over() -> bool:
            return not (await leader.scheduler.job_status("job")).running

        await until(is_over, "the run is given up")
        assert await leader.scheduler.run_job("job") == "done"
        statuses = [entry.status for entry in await leader.scheduler.job_history("job")]
        assert sorted(statuses) == ["lost", "success"]


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_run_that_outlasts_a_stop_is_released_when_its_action_ends(
    url: str, is_plain: bool
) -> None:
    """Found: the job was blocked in the whole fleet while the process lived, if it was not due."""
    began, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ran: list[str] = []

    def block(_: Database, context: JobContext) -> None:
        ran.append(context.scheduler.worker_id)
        if len(ran) == 1:
            loop.call_soon_threadsafe(began.set)
            release.wait(20)

    async def hang(_: Database, context: JobContext) -> None:
        ran.append(context.scheduler.worker_id)
        if len(ran) == 1:
            began.set()
            await asyncio.sleep(20)

    action = block if is_plain else hang
    clock = SettableClock()
    later = time.gmtime(time.time() + 1800)
    schedule = f"{later.tm_sec} {later.tm_min} {later.tm_hour} * * *"
    jobs = {"job": {"schedule": schedule, "action": action, "timeout": None}}
    async with (
        run_scheduler(url, jobs, grace=0, clock=clock) as one,
        run_scheduler(url, jobs, clock=clock) as two,
    ):
        # It keeps the session.
        await one.database.use_plugin(SchedulerPlugin(namespace="another", **QUICK))
        clock.ahead = 1800.0
        await began.wait()
        assert one.scheduler.is_coordinator
        await one.scheduler.stop()
        await two.scheduler.ensure_coordinator()
        if is_plain:
            # Nobody else starts it while it goes on.
            (run,) = (await two.scheduler.job_status("job")).running
            assert run.owner
            assert len(ran) == 1
        release.set()
        await two.hears("job-resumed")
        await two.hears("job-executed")
        assert ran[-1] == two.scheduler.worker_id
        assert len(ran) == 2


async def test_a_result_is_stored_although_somebody_has_removed_the_record(url: str) -> None:
    """Found: it counted as taken over, and the action ran again in the same process."""
    calls: list[str] = []

    async def act(database: Database, context: JobContext) -> str:
        calls.append(context.execution_id)
        heads = await database.store.heads("schedule/default/run/job/")
        await database.store.drop([head.key for head in heads])
        return "done"

    async with run_scheduler(url, {"job": {"schedule": EVERY_SECOND, "action": act}}) as stage:
        await until(lambda: len(stage.heard("job-executed")) >= 2, "two runs")
        await stage.scheduler.disable_job("job")
        assert stage.heard("job-lost") == stage.heard("job-resumed") == []
    assert len(calls) == len({*calls})


async def test_instants_that_wait_for_room_are_in_the_history_of_a_removed_job(url: str) -> None:
    """Found: they were neither fired nor recorded, if the coordinator removed the job."""
    began, release = asyncio.Event(), asyncio.Event()

    async def block() -> None:
        began.set()
        await release.wait()

    jobs = {
        "blocks": {"schedule": EVERY_SECOND, "action": block, "timeout": None},
        "waits": {"schedule": EVERY_SECOND, "action": idle},
    }
    async with run_scheduler(url, jobs, max_concurrent_jobs=1) as stage:
        await began.wait()
        waits = stage.scheduler._get_parts().loop._waiting
        await until(lambda: "waits" in waits, "it waits")
        await stage.scheduler.remove_job("waits")
        release.set()
        state = await stage.scheduler._get_parts().operations.read_state("waits")
        assert state is not None
        assert state.gaps == ()
        gaps = await stage.scheduler.job_history("waits", status="skipped")
        assert gaps[0].reason == "the job was removed"
        assert stage.heard("job-skipped", job_name="waits")


async def test_removed_jobs_are_forgotten(url: str) -> None:
    """Found: each left a record, a name for leaders and a state in memory, for ever."""
    async with run_scheduler(url, {"stays": {"schedule": NEVER, "action": idle}}) as stage:
        scheduler = stage.scheduler
        await scheduler.ensure_coordinator()
        parts = scheduler._get_parts()
        for number in range(3):
            await scheduler.add_job(f"once{number}", schedule=NEVER, action=idle)
            await scheduler.remove_job(f"once{number}")
        await scheduler.add_job("ran", schedule=NEVER, action=idle)
        await scheduler.run_job("ran")
        await scheduler.remove_job("ran")
        await leader_knows(stage, "ran", is_active=False)
        parts.removed._next = None
        await parts.removed.forget_some()
        edits = await parts.jobs.edits.read()
        assert edits is not None
        # One that has a history is kept as long as that.
        assert edits.special == ("ran",)
        assert {*await parts.jobs.list_names()} == {"ran", "stays"}
        assert not [name for name in parts.cache.known if name.startswith("once")]
        assert await scheduler.job_history("ran")
        parts.removed._max_age, parts.removed._next = -60.0, None
        await parts.removed.forget_some()
        assert await parts.jobs.list_names() == ["stays"]
        assert await parts.jobs.store.heads("schedule/default/run/") == []
        with pytest.raises(NotFound):
            await scheduler.job_history("ran")
        assert {*parts.cache.known, *parts.retention._pruned, *parts.retention._gaps} <= {"stays"}
        await scheduler.add_job("ran", schedule=NEVER, action=lambda: "again")
        assert await scheduler.run_job("ran") == "again"


async def test_a_removed_job_is_not_forgotten_while_a_process_has_it(url: str) -> None:
    """It would store the job again."""
    jobs = {"job": {"schedule": NEVER, "action": idle}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs):
        await leader.scheduler.ensure_coordinator()
        await leader.scheduler.remove_job("job")
        await leader_knows(leader, "job", is_active=False)
        parts = leader.scheduler._get_parts()
        parts.removed._next = None
        await parts.removed.forget_some()
        assert await parts.jobs.list_names() == ["job"]


async def test_runs_by_hand_leave_nothing_in_the_plan(url: str) -> None:
    """Found: each left an entry until the job's next instant, which may be years away."""
    async with run_scheduler(url, {"job": {"schedule": NEVER, "action": idle}}) as stage:
        await stage.scheduler.ensure_coordinator()
        loop = stage.scheduler._get_parts().loop
        for number in range(300):
            loop._plan("job", 1e11 + number % 2)
        assert len(loop._heap) <= 2 * len(loop._planned) + 100
        assert await stage.scheduler.run_job("job") is None


async def test_a_job_that_another_process_removed_can_be_added_again(url: str) -> None:
    """The leader still has its code, and learns that it is back."""
    calls: list[float] = []
    tick = {"schedule": EVERY_SECOND, "action": lambda: calls.append(time.time())}
    jobs = {"tick": tick}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await until(lambda: calls, "it has run")
        assert leader.scheduler.is_coordinator
        await other.scheduler.remove_job("tick")
        await leader_knows(leader, "tick", is_active=False)
        await other.scheduler.add_job("tick", tick)
        count = len(calls)
        await until(lambda: len(calls) > count, "it runs again", 10)


class Offering(Plugin):
    """Offers a job to the scheduler of its database, whenever it starts."""

    slug = "offering"

    @property
    def scheduled_jobs(self) -> Mapping[str, Mapping[str, Any]]:
        return {"offered": {"schedule": NEVER, "action": idle}}

    async def on_start(self) -> None:
        for plugin in self.list_started():
            await plugin.adopt_jobs(self.scheduled_jobs)


@pytest.mark.parametrize("restarted", ["scheduler", "offering"])
async def test_an_offered_job_that_was_removed_is_added_again_by_the_next_start(
    restarted: str,
) -> None:
    """Of the scheduler, or of the plugin that offers it; without a removal nothing changes."""
    scheduler, offering = SchedulerPlugin(**QUICK), Offering()
    async with Database("memory://", plugins=[scheduler, offering]):
        plugin: Plugin = scheduler if restarted == "scheduler" else offering
        for is_removed in (False, True, False, True):
            assert [job.name for job in await scheduler.list_jobs()] == ["offered"]
            assert await scheduler.run_job("offered") is None
            if is_removed:
                await scheduler.remove_job("offered")
                assert await scheduler.list_jobs() == []
            await plugin.stop()
            await plugin.start()
        assert [job.name for job in await scheduler.list_jobs()] == ["offered"]


async def test_an_offered_job_that_was_refused_is_adopted_once_it_is_right() -> None:
    """It is offered whenever its plugin starts."""
    scheduler = SchedulerPlugin(**QUICK)
    for _ in range(2):
        with pytest.raises(Invalid):
            await scheduler.adopt_jobs({"offered": {"schedule": "sometimes", "action": idle}})
    for _ in range(2):
        await scheduler.adopt_jobs({"offered": {"schedule": NEVER, "action": idle}})
    async with Database("memory://", plugins=[scheduler]):
        assert [job.name for job in await scheduler.list_jobs()] == ["offered"]


async def test_a_stopped_scheduler_watches_no_process() -> None:
    """Other plugins go on with the session."""
    scheduler = SchedulerPlugin(**QUICK)
    async with Database("memory://", plugins=[scheduler]):
        membership, purpose = scheduler._get_membership(), "schedule schedule/default/"
        membership.watch(purpose, ["other.1"])
        await scheduler.stop()
        assert membership.watched(purpose) == frozenset()


@pytest.mark.parametrize(
    "error", [Unavailable("the store", "it does not answer", "wait"), asyncio.CancelledError()]
)
async def test_a_job_that_could_not_be_added_is_not_there_and_can_be_added_again(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Its definition is stored first: a process never has a job that nobody else can see.

    Also if its caller was cancelled.
    """
    scheduler = SchedulerPlugin(**QUICK)
    async with Database("memory://", plugins=[scheduler]):

        async def refuse(*_: Any) -> NoReturn:
            raise error

        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(JobStore, "create_many", refuse)
                with pytest.raises(type(error)):
                    await scheduler.add_job("job", schedule=NEVER, action=idle)
            with pytest.raises(NotFound, match="There is no job in this process 'job'"):
                await scheduler.run_job("job")
            assert await scheduler.list_jobs() == []
        await scheduler.add_job("job", schedule=NEVER, action=idle)
        assert await scheduler.run_job("job") is None


async def test_the_only_job_may_be_added_to_a_leader_later(url: str) -> None:
    """Also if the stored definitions are those of its code."""
    calls: list[float] = []
    tick = {"schedule": EVERY_SECOND, "action": lambda: calls.append(time.time())}
    async with run_scheduler(url, {"tick": tick}):
        await until(lambda: calls, "it has run")
    calls.clear()
    async with run_scheduler(url) as stage:
        await stage.scheduler.ensure_coordinator()
        await stage.scheduler.add_job("tick", tick)
        await until(lambda: calls, "it runs again", 10)


async def leader_knows(stage: Stage, name: str, *, is_active: bool) -> None:
    """Wait until a leader has noticed a change."""

    def has_noticed() -> bool:
        stored = stage.scheduler._get_parts().cache.known.get(name)
        return stored is not None and stored.state.is_active is is_active

    await until(has_noticed, "the leader has noticed", 10)


async def test_an_update_holds_in_the_whole_fleet(url: str) -> None:
    """The leader follows what another process changes; nothing of the past is fired."""
    calls: list[JobContext] = []

    def act(_: Database, context: JobContext) -> None:
        calls.append(context)

    jobs = {"rare": {"schedule": NEVER, "action": act}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await leader.scheduler.ensure_coordinator()
        changed = time.time()
        assert await other.scheduler.update_job("rare", schedule=EVERY_SECOND, retries=2) is True
        assert await other.scheduler.update_job("rare", retries=2) is False
        await until(lambda: calls, "the leader fires it")
        assert calls[0].scheduler is leader.scheduler
        assert calls[0].scheduled_time > int(changed)
        status = await leader.scheduler.job_status("rare")
        assert status.edits == {"schedule": EVERY_SECOND, "retries": 2}
        assert other.heard("job-updated")[0]["changes"] == ("retries", "schedule")
        for field, value in (("schedul", NEVER), ("retries", -1), ("schedule", "61 * * * *")):
            with pytest.raises(Invalid):
                await other.scheduler.update_job("rare", **{field: value})
        with pytest.raises(NotFound, match="rare"):
            await other.scheduler.update_job("rar", retries=2)


async def test_a_scheduler_that_is_started_again_does_not_take_its_older_definition_back(
    url: str,
) -> None:
    """The definition of the process that started last holds, however often others go on."""

    def build(description: str) -> dict[str, Any]:
        return {"job": {"schedule": NEVER, "action": idle, "description": description}}

    async with run_scheduler(url, build("old")) as old:
        generation = old.scheduler._generation
        assert generation > 0
        async with run_scheduler(url, build("new")) as new:
            assert new.scheduler._generation > generation
            for _ in range(2):
                await old.scheduler.stop()
                await old.scheduler.start()
                assert old.scheduler._generation == generation
                assert (await old.scheduler.job_status("job")).description == "new"


async def test_a_disabled_job_does_not_fire(url: str) -> None:
    """Until it is enabled; what was due meanwhile is one gap with the reason."""
    calls: list[float] = []

    def act(_: Database, context: JobContext) -> None:
        calls.append(context.scheduled_time)

    jobs = {"tick": {"schedule": EVERY_SECOND, "action": act}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await until(lambda: calls, "it has run")
        assert await other.scheduler.disable_job("tick", "maintenance") is True
        assert await other.scheduler.disable_job("tick") is False
        status = await leader.scheduler.job_status("tick")
        assert not status.enabled
        assert status.next_runs == ()
        await leader_knows(leader, "tick", is_active=False)
        paused_at = int(time.time())
        await until(lambda: time.time() > paused_at + 1.2, "an instant has passed")
        count, resumed_at = len(calls), time.time()
        assert await other.scheduler.enable_job("tick") is True
        assert await other.scheduler.enable_job("tick") is False
        await until(lambda: len(calls) > count, "it fires again")
        assert calls[count] > int(resumed_at)
        gap = await leader.hears("job-skipped")
        assert "maintenance" in gap["reason"]
        skipped = await leader.scheduler.job_history("tick", status="skipped")
        (entry,) = [entry for entry in skipped if "maintenance" in str(entry.reason)]
        assert entry.first is not None
        assert calls[count - 1] < entry.first <= entry.scheduled_time < calls[count]
        names = [event.name.rpartition(":")[2] for event in other.events]
        assert [name for name in names if name in {"job-disabled", "job-enabled"}] == [
            "job-disabled",
            "job-enabled",
        ]


async def test_run_job_returns_the_result_and_raises_the_error(url: str) -> None:
    """On any instance, with data for this run alone."""

    async def add(_: Database, context: JobContext) -> int:
        assert context.is_manual
        return int(context["a"] + context["b"])

    def fail() -> None:
        raise KeyError("gone")

    jobs = {
        "add": {"schedule": NEVER, "action": add, "context": {"a": 1, "b": 1}},
        "fail": {"schedule": NEVER, "action": fail},
        "slow": {"schedule": NEVER, "action": lambda: asyncio.sleep(60), "timeout": 0.05},
    }
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        for stage in (leader, other):
            assert await stage.scheduler.run_job("add", {"b": 41}) == 42
            assert await stage.scheduler.run_job("add") == 2
            with pytest.raises(KeyError, match="gone"):
                await stage.scheduler.run_job("fail")
            with pytest.raises(TimeoutError):
                await stage.scheduler.run_job("slow")
        with pytest.raises(NotFound, match="add"):
            await leader.scheduler.run_job("ad")
        with pytest.raises(Invalid, match="context"):
            await leader.scheduler.run_job("add", 41)  # type: ignore[arg-type]
        entries = await leader.scheduler.job_history(status=["error", "timeout"])
        assert sorted(entry.status for entry in entries) == ["error", "error", "timeout", "timeout"]
        assert all(entry.is_manual for entry in entries)


async def test_run_job_follows_the_overlap(url: str) -> None:
    """While it runs elsewhere: refused, waits, or runs beside it; afterwards it runs."""
    began, release = asyncio.Event(), asyncio.Event()

    async def wait(_: Database, context: JobContext) -> str:
        began.set()
        if context.get("blocks"):
            await release.wait()
        return "done"

    jobs = {
        overlap: {"schedule": NEVER, "action": wait, "overlap": overlap}
        for overlap in ("skip", "queue", "allow")
    }
    async with run_scheduler(url, jobs) as one, run_scheduler(url, jobs) as two:
        for overlap in jobs:
            began.clear()
            release.clear()
            running = asyncio.create_task(one.scheduler.run_job(overlap, {"blocks": True}))
            await began.wait()
            if overlap == "skip":
                for _ in range(2):
                    with pytest.raises(JobRunning, match="is running"):
                        await two.scheduler.run_job(overlap)
            elif overlap == "allow":
                assert await two.scheduler.run_job(overlap) == "done"
            waiting = (
                asyncio.create_task(two.scheduler.run_job(overlap)) if overlap == "queue" else None
            )
            if waiting is not None:
                done, _ = await asyncio.wait([waiting], timeout=0.3)
                assert not done
            release.set()
            assert await running == "done"
            if waiting is not None:
                assert await asyncio.wait_for(waiting, 10) == "done"
            assert await two.scheduler.run_job(overlap) == "done"


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_job_runs_another(kind: str, url: str) -> None:
    """Also where one job at a time may run."""

    async def outer(_: Database, context: JobContext) -> int:
        return 1 + int(await context.scheduler.run_job("inner", {"n": 4}))

    def plain_outer(_: Database, context: JobContext) -> int:
        return 1 + int(context.run(context.scheduler.run_job("inner", {"n": 4})))

    def inner(_: Database, context: JobContext) -> int:
        return int(context["n"]) * 10

    action: Any = outer if kind == "async" else plain_outer
    jobs = {
        "outer": {"schedule": EVERY_SECOND, "action": action},
        "inner": {"schedule": NEVER, "action": inner},
    }
    async with run_scheduler(url, jobs, max_concurrent_jobs=1) as stage:
        event = await stage.hears("job-completed", job_name="outer")
        assert event["result"] == 41
        (entry, *_) = await stage.scheduler.job_history("inner")
        assert (entry.is_manual, entry.result) == (True, 40)


async def test_as_many_jobs_run_at_once_as_allowed(url: str) -> None:
    """The others wait, and then run."""
    running: set[str] = set()
    most: list[int] = []

    async def act(_: Database, context: JobContext) -> None:
        running.add(context.execution_id)
        most.append(len(running))
        await asyncio.sleep(0.05)
        running.discard(context.execution_id)

    jobs = {f"job-{n}": {"schedule": EVERY_SECOND, "action": act} for n in range(6)}
    async with run_scheduler(url, jobs, max_concurrent_jobs=2) as stage:
        await until(
            lambda: {event["job_name"] for event in stage.heard("job-executed")} == {*jobs},
            "all have run",
        )
    assert max(most) == 2


def describe(event: Event) -> dict[str, Any]:
    """Return the fields of an event."""
    return {field: event[field] for field in event.__struct_fields__}


async def test_a_failing_job_never_ends_the_process(url: str) -> None:
    """Whatever it raises: retries are as configured, and the job fires again."""
    raised: list[tuple[str, int]] = []
    jobs = {
        error.__name__: {
            "schedule": EVERY_SECOND,
            "action": _raising(error, raised),
            "retries": retries,
            "backoff": lambda _: 0.01,
        }
        for error, retries in ((ValueError, 0), (SystemExit, 2), (asyncio.CancelledError, 0))
    }
    async with run_scheduler(url, jobs) as stage:
        for name in jobs:
            await until(
                lambda name=name: len(stage.heard("job-executed", job_name=name)) >= 2,  # type: ignore[misc]
                f"{name} goes on",
            )
        statuses = {event["status"] for event in stage.heard("job-executed")}
        assert statuses == {"error"}
        assert {attempt for name, attempt in raised if name == "ValueError"} == {1}
        assert {attempt for name, attempt in raised if name == "SystemExit"} == {1, 2, 3}
        failed = stage.heard("job-failed", job_name="SystemExit")[:3]
        assert [(event["attempts"], event["final"]) for event in failed] == [
            (1, False),
            (2, False),
            (3, True),
        ]
        status = await stage.scheduler.job_status("ValueError")
        assert status.failures >= 2
        assert status.success_rate == 0.0
        assert status.last_error.startswith("ValueError: boom")


def _raising(error: type[BaseException], raised: list[tuple[str, int]]) -> Any:
    async def fail(_: Database, context: JobContext) -> None:
        raised.append((error.__name__, context.attempt))
        raise error("boom")

    return fail


async def test_hooks_and_events_carry_what_happened(url: str) -> None:
    """Under their own names and the documents' names; `job_id` is the name of the job."""
    calls: list[tuple[Any, ...]] = []
    heard: list[tuple[str, Event]] = []
    names = ("jobStarted", "jobCompleted", "jobFailed", "plg:scheduler:job-executed")

    def listen(scheduler: SchedulerPlugin) -> None:
        for name in names:
            scheduler.on(name, lambda event, name=name: heard.append((name, event)))

    def fail_once(_: Database, context: JobContext) -> tuple[int, int]:
        if context.attempt == 1:
            raise ValueError("boom")
        return (1, 2)

    async def on_start(name: str, context: JobContext) -> None:
        calls.append(("start", name, context.is_manual))

    def on_error(name: str, error: BaseException, attempt: int) -> None:
        calls.append(("error", name, str(error), attempt))
        raise RuntimeError("a hook's own error")

    jobs = {
        "job": {
            "schedule": NEVER,
            "action": fail_once,
            "retries": 1,
            "backoff": lambda _: 0.0,
        }
    }
    async with run_scheduler(
        url,
        jobs,
        prepare=listen,
        on_job_start=on_start,
        on_job_error=on_error,
        on_job_complete=lambda *details: calls.append(("complete", *details[:2])),
    ) as stage:
        failures: list[Event] = []
        stage.database.events.on("jobsync:handler-failed", failures.append)
        # The caller and the hook get the result itself; a list is stored.
        assert await stage.scheduler.run_job("job") == (1, 2)
        await until(lambda: len(calls) == 3, "all hooks were called")
        assert calls == [
            ("start", "job", True),
            ("error", "job", "boom", 1),
            ("complete", "job", (1, 2)),
        ]
        await until(lambda: failures, "the hook's error is reported")
        assert failures[0]["callback"] == "on_job_error"
        assert [name for name, _ in heard] == [names[0], names[2], names[1], names[3]]
        started, failed, completed, executed = (describe(event) for _, event in heard)
        common = {key: started[key] for key in ("job_name", "execution_id", "scheduled_time")}
        assert common["job_name"] == "job"
        for payload in (failed, completed, executed):
            assert payload | common == payload
        assert failed["error"].startswith("ValueError: boom")
        assert (failed["attempts"], failed["final"]) == (1, False)
        for payload in (completed, executed):
            assert (payload["result"], payload["attempts"]) == ([1, 2], 2)
            assert payload["duration"] >= 0
        assert executed["status"] == "success"
        assert {event["job_id"] for _, event in heard} == {"job"}


async def test_timeouts_end_attempts(url: str) -> None:
    """An `async` action is cancelled before its retry; a plain one delays it, with an event."""
    running: list[str] = []
    most: list[int] = []

    async def hang(_: Database, context: JobContext) -> None:
        running.append("async")
        most.append(len(running))
        try:
            await asyncio.sleep(60)
        finally:
            running.remove("async")

    def block(_: Database, context: JobContext) -> None:
        running.append("plain")
        most.append(len(running))
        time.sleep(0.3)
        running.remove("plain")

    jobs = {
        name: {
            "schedule": NEVER,
            "action": action,
            "timeout": 0.1,
            "retries": 1,
            "backoff": lambda _: 0.0,
        }
        for name, action in (("hang", hang), ("block", block))
    }
    async with run_scheduler(url, jobs) as stage:
        for name in jobs:
            with pytest.raises(TimeoutError):
                await stage.scheduler.run_job(name)
        assert max(most) == 1
        assert len(most) == 4
        assert {event["job_name"] for event in stage.heard("job-overran")} == {"block"}
        assert [e.status for e in await stage.scheduler.job_history()] == ["timeout", "timeout"]
        assert [e.attempts for e in await stage.scheduler.job_history()] == [2, 2]


async def test_stopping_inside_an_action_works(url: str) -> None:
    """The action ends, then the scheduler stops; it can be started again."""
    ended: list[str] = []

    async def stop(_: Database, context: JobContext) -> str:
        await context.scheduler.stop()
        ended.append("action")
        return "stopped"

    async with run_scheduler(url, {"stop": {"schedule": NEVER, "action": stop}}) as stage:
        assert await stage.scheduler.run_job("stop") == "stopped"
        await until(lambda: not stage.scheduler.is_running, "it has stopped")
        assert ended == ["action"]
        await stage.scheduler.start()
        (entry,) = await stage.scheduler.job_history("stop")
        assert (entry.status, entry.result) == ("success", "stopped")


async def test_disconnecting_inside_an_action_works(url: str) -> None:
    """The action's result is stored before the database is closed."""

    async def leave(database: Database) -> str:
        await database.disconnect()
        return "left"

    scheduler = SchedulerPlugin(jobs={"leave": {"schedule": NEVER, "action": leave}}, **QUICK)
    database = Database(url)
    await database.connect()
    await database.use_plugin(scheduler)
    assert await scheduler.run_job("leave") == "left"
    await until(lambda: not database.is_connected, "it is closed")
    async with run_scheduler(url) as stage:
        (entry,) = await stage.scheduler.job_history("leave")
        assert (entry.status, entry.result) == ("success", "left")


async def test_a_job_has_a_name_and_options(url: str) -> None:
    """Found: TypeError and AttributeError, which name neither argument nor fix."""

    class Name(str):
        __slots__ = ()

    async with run_scheduler(url) as stage:
        scheduler = stage.scheduler
        wrong: Any
        for wrong in (5, [("schedule", "@daily")]):
            with pytest.raises(Invalid, match="must be a dict of options"):
                await scheduler.add_job("job", wrong)
        with pytest.raises(Invalid, match=r"schedule is a function.*Write @scheduler\.job\("):
            scheduler.job(idle)  # type: ignore[arg-type]
        for wrong in (["job"], 5, None):
            with pytest.raises(Invalid, match="name must be printable text"):
                await scheduler.add_job(wrong, schedule=NEVER, action=idle)
            with pytest.raises(Invalid, match="name must be text"):
                await scheduler.run_job(wrong)
        with pytest.raises(Invalid, match="name is missing"):
            scheduler.job(NEVER)(functools.partial(idle))
        scheduler.job(NEVER, name="partial")(functools.partial(idle))
        await scheduler.add_job(Name("job"), schedule=NEVER, action=idle)
        assert await scheduler.run_job("job") is None
