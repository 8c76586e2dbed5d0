"""Schedulers of several processes on one store: who fires, whose definition holds, who resumes."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from scheduler_stage import EVERY_SECOND, NEVER, SettableClock, run_scheduler
from servers import Locate
from waiting import until

from jobsync import Components, Database, JobContext, open_store
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.operations import JobOperations

YEAR = 365 * 86_400


@pytest.fixture
def url(locate: Locate) -> str:
    """A fresh file."""
    return locate("sqlite")


class Notes:
    """The runs of a job's action, whichever process has run it."""

    def __init__(self) -> None:
        self.contexts: list[JobContext] = []

    def act(self, _: Database, context: JobContext) -> None:
        """Note a run."""
        self.contexts.append(context)

    @property
    def instants(self) -> list[float]:
        """When they were due."""
        return [context.scheduled_time for context in self.contexts]


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_without_an_election_each_instant_fires_once(kind: str, locate: Locate) -> None:
    """Both processes fire; the store lets one of them."""
    notes, url = Notes(), locate(kind)
    jobs = {"tick": {"schedule": EVERY_SECOND, "action": notes.act}}
    async with (
        run_scheduler(url, jobs, enable_coordinator=False) as one,
        run_scheduler(url, jobs, enable_coordinator=False) as two,
    ):
        assert one.scheduler.is_coordinator
        assert two.scheduler.is_coordinator
        await until(lambda: len(notes.contexts) >= 4, "it has run")
    assert len(notes.instants) == len({*notes.instants})


async def test_a_pause_outlives_restarts_until_the_code_changes(url: str) -> None:
    """An operator's edits and pause hold until the job's own definition is another."""
    notes = Notes()
    jobs: dict[str, dict[str, Any]] = {"tick": {"schedule": EVERY_SECOND, "action": notes.act}}
    async with run_scheduler(url, jobs) as stage:
        await stage.scheduler.update_job("tick", retries=3)
        await stage.scheduler.disable_job("tick", "too loud")
    count = len(notes.contexts)
    async with run_scheduler(url, jobs) as stage:
        await stage.scheduler.ensure_coordinator()
        status = await stage.scheduler.job_status("tick")
        assert not status.enabled
        assert status.pause is not None
        assert status.pause.reason == "too loud"
        assert status.edits == {"retries": 3}
        begun = int(time.time())
        await until(lambda: time.time() > begun + 1.2, "an instant has passed")
        assert len(notes.contexts) == count
    jobs["tick"]["timeout"] = 30.0
    async with run_scheduler(url, jobs) as stage:
        status = await stage.scheduler.job_status("tick")
        assert (status.enabled, status.pause, status.edits) == (True, None, {})
        await until(lambda: len(notes.contexts) > count, "it fires again")
        (event,) = stage.heard("job-definition-replaced")
        assert event["fields"] == ("timeout",)
        assert event["by"] == stage.scheduler.worker_id
        gaps = await stage.scheduler.job_history("tick", status="skipped")
        assert any("too loud" in gap.reason for gap in gaps)


async def test_the_newest_process_defines_a_job(url: str) -> None:
    """The older leader fires it as the newer process says; an older process changes nothing."""
    notes = Notes()
    old: dict[str, Any] = {"job": {"schedule": NEVER, "action": notes.act}}
    new: dict[str, Any] = {"job": {"schedule": EVERY_SECOND, "action": notes.act}}
    async with run_scheduler(url, old) as older:
        await older.scheduler.ensure_coordinator()
        async with run_scheduler(url, new) as newer:
            (event,) = newer.heard("job-definition-replaced")
            assert (event["fields"], event["by"]) == (("schedule",), newer.scheduler.worker_id)
            await until(lambda: notes.contexts, "it fires")
            assert notes.contexts[0].scheduler is older.scheduler
            # It stops and starts, as the same worker of before.
            await older.scheduler.stop()
            await newer.scheduler.ensure_coordinator()
            await older.scheduler.start()
            assert (await newer.scheduler.job_status("job")).schedule == EVERY_SECOND
    async with run_scheduler(url, old) as newest:
        assert (await newest.scheduler.job_status("job")).schedule == NEVER


async def test_a_leader_leaves_a_job_that_it_lacks_to_a_member(url: str) -> None:
    """The oldest member that has it fires it, until the leader has it too."""
    common, special = Notes(), Notes()
    jobs: dict[str, Any] = {"common": {"schedule": EVERY_SECOND, "action": common.act}}
    more = {**jobs, "special": {"schedule": EVERY_SECOND, "action": special.act}}
    async with (
        run_scheduler(url, jobs) as leader,
        run_scheduler(url, more) as member,
        run_scheduler(url, more),
    ):
        await until(lambda: len(special.contexts) >= 2, "a member fires it")
        assert {context.scheduler for context in special.contexts} == {member.scheduler}
        assert {context.scheduler for context in common.contexts} == {leader.scheduler}
        await leader.scheduler.add_job("special", more["special"])
        await until(
            lambda: special.contexts[-1].scheduler is leader.scheduler, "the leader fires it"
        )
    for notes in (common, special):
        assert len(notes.instants) == len({*notes.instants})


async def test_run_on_start_runs_once_for_each_start_of_the_fleet(url: str) -> None:
    """Not when a process joins or the leader is replaced; again when all were gone."""
    notes = Notes()
    jobs = {"job": {"schedule": NEVER, "action": notes.act, "run_on_start": True}}
    async with run_scheduler(url, jobs) as one:
        await one.hears("job-executed")
        async with run_scheduler(url, jobs) as two:
            await noted(one.scheduler, two.scheduler.worker_id)
            await one.scheduler.stop()
            await until(lambda: two.scheduler.is_coordinator, "the other leads")
            await noted(two.scheduler, two.scheduler.worker_id)
            assert len(notes.contexts) == 1
    async with run_scheduler(url, jobs) as later:
        await later.hears("job-executed")
    assert len(notes.contexts) == 2
    assert all(context.is_manual for context in notes.contexts)


async def test_run_on_start_runs_once_without_an_election(url: str) -> None:
    """The oldest process asks for it."""
    notes = Notes()
    jobs = {"job": {"schedule": NEVER, "action": notes.act, "run_on_start": True}}
    own = {"tick": {"schedule": EVERY_SECOND, "action": lambda: None}}
    async with run_scheduler(url, jobs, enable_coordinator=False) as one:
        await one.hears("job-executed", job_name="job")
        async with run_scheduler(url, {**jobs, **own}, enable_coordinator=False) as two:
            # Only this process has the action of that job. A run on start would be before these.
            await until(lambda: len(two.heard("job-executed", job_name="tick")) > 1, "it fires")
            assert len(notes.contexts) == 1


async def noted(scheduler: Any, worker: str) -> None:
    """Wait until a leader has noted who is alive."""
    duty = scheduler._get_parts().loop._duty
    await until(lambda: worker in duty._progress.fleet, "the leader has noted the fleet", 20)


async def test_an_action_gets_its_grace_and_is_then_resumed_elsewhere(url: str) -> None:
    """When its database disconnects: for the same instant, by another process, at once."""
    cancelled: list[JobContext] = []
    resumed: list[JobContext] = []

    async def hang(_: Database, context: JobContext) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(context)
            raise

    def act(_: Database, context: JobContext) -> str:
        resumed.append(context)
        return "resumed"

    def build(action: Any) -> dict[str, dict[str, Any]]:
        return {"job": {"schedule": EVERY_SECOND, "action": action}}

    async with AsyncExitStack() as stack:
        first = run_scheduler(url, build(hang), grace=0.3, worker_timeout=60)
        leader = await first.__aenter__()
        other = await stack.enter_async_context(run_scheduler(url, build(act), worker_timeout=60))
        started = await leader.hears("job-started")
        await first.__aexit__(None, None, None)
        event = await other.hears("job-executed")
    assert [context.scheduled_time for context in cancelled] == [started["scheduled_time"]]
    assert resumed[0].scheduled_time == event["scheduled_time"] == started["scheduled_time"]
    assert other.heard("job-resumed")[0]["execution_id"] == started["execution_id"]
    assert event["result"] == "resumed"


async def test_a_grace_lets_an_action_end(url: str) -> None:
    """It ends well within its grace, and nobody runs it again."""
    notes = Notes()

    async def slow(_: Database, context: JobContext) -> str:
        notes.act(_, context)
        await asyncio.sleep(0.3)
        return "ended"

    jobs = {"job": {"schedule": EVERY_SECOND, "action": slow}}
    async with run_scheduler(url, jobs) as stage:
        await until(lambda: notes.contexts, "it runs")
    (instant,) = notes.instants
    async with run_scheduler(url, {}) as stage:
        entries = await stage.scheduler.job_history("job")
    assert [(e.scheduled_time, e.status, e.result) for e in entries] == [
        (instant, "success", "ended")
    ]


@pytest.mark.parametrize(("misfire", "caught_up"), [("skip", 0), ("last", 1), ("all", 5)])
async def test_a_long_downtime_is_one_gap(url: str, misfire: str, caught_up: int) -> None:
    """After three years as many instants are caught up as wanted; the rest is one record."""
    notes, clock = Notes(), SettableClock(-3.0 * YEAR)
    # Half an hour from now: neither is one just late, nor does one come meanwhile.
    minute = (int(time.time()) // 60 + 30) % 60
    jobs = {
        "hourly": {
            "schedule": f"{minute} * * * *",
            "action": notes.act,
            "misfire": misfire,
            "max_catch_up": 5,
        }
    }
    async with run_scheduler(url, jobs, clock=clock) as stage:
        await stage.scheduler.ensure_coordinator()
        assert notes.contexts == []
    async with run_scheduler(url, jobs) as stage:
        gap = await stage.hears("job-missed")
        await until(lambda: len(notes.contexts) >= caught_up, "it catches up")
        (entry,) = await stage.scheduler.job_history("hourly", status="missed")
        assert entry.reason == gap["reason"]
        assert "no process" in entry.reason
        assert entry.first is not None
        assert entry.scheduled_time - entry.first > 2.99 * YEAR
        assert (entry.count, entry.is_counted) == (1000, False)
        status = await stage.scheduler.job_status("hourly")
        await until(lambda: len(stage.heard("job-executed")) == caught_up, "all have ended")
    instants = notes.instants
    assert len(instants) == caught_up
    assert instants == sorted(instants)
    assert all(entry.scheduled_time < instant for instant in instants)
    if misfire != "skip":
        assert instants[-1] + 3600 > time.time()
        assert status.next_run == instants[-1] + 3600


async def test_a_step_of_the_clock_is_followed(url: str) -> None:
    """Where the clock that decides is set forward, a job that became due fires soon."""
    notes, clock = Notes(), SettableClock()
    # A quarter of an hour from now at the earliest.
    minute = (time.gmtime().tm_min + 30) % 60
    jobs = {"job": {"schedule": f"{minute} * * * *", "action": notes.act}}
    async with run_scheduler(url, jobs, clock=clock) as stage:
        await stage.scheduler.ensure_coordinator()
        clock.ahead = 1850.0
        await until(lambda: notes.contexts, "it fires", 10)


async def test_a_request_waits_for_a_run_of_another_process(url: str) -> None:
    """Its end is noticed, although the job is not due for years."""
    began, release = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    async def act(_: Database, context: JobContext) -> None:
        ran.append(context.scheduler.worker_id)
        if context.get("blocks"):
            began.set()
            await release.wait()

    jobs = {
        overlap: {"schedule": NEVER, "action": act, "overlap": overlap}
        for overlap in ("queue", "skip")
    }
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await leader.scheduler.ensure_coordinator()
        for overlap in jobs:
            for event in (began, release):
                event.clear()
            ran.clear()
            running = asyncio.create_task(other.scheduler.run_job(overlap, {"blocks": True}))
            await began.wait()
            await other.scheduler._get_parts().operations.request_run(overlap)
            await leader_sees_request(leader.scheduler, overlap)
            release.set()
            await running
            await until(lambda: len(ran) == 2, "the leader runs it", 10)
            assert ran == [other.scheduler.worker_id, leader.scheduler.worker_id]


async def leader_sees_request(scheduler: Any, name: str) -> None:
    """Wait until the leader knows that a run is asked for."""
    known = scheduler._get_parts().cache.known
    await until(lambda: name in known and known[name].state.requests, "the leader knows", 10)


async def test_versions_that_start_at_once_agree_on_the_newest(url: str) -> None:
    """On an empty store, whichever of them writes first."""
    schedules = ["0 1 * * *", "0 2 * * *", "0 3 * * *"]
    async with AsyncExitStack() as stack:
        stages = await asyncio.gather(
            *(
                stack.enter_async_context(
                    run_scheduler(url, {"job": {"schedule": schedule, "action": lambda: None}})
                )
                for schedule in schedules
            )
        )
        newest = max(range(3), key=lambda n: stages[n].scheduler._get_parts().code.generation)
        status = await stages[0].scheduler.job_status("job")
        assert status.schedule == schedules[newest]
        assert status.defined_by == stages[newest].scheduler.worker_id


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_a_process_with_a_fast_clock_does_not_freeze_later_deploys(
    kind: str, locate: Locate
) -> None:
    """Found: ids of workers, which contain their machines' time, decided who had started last."""
    url = locate(kind)

    def build_jobs(schedule: str) -> dict[str, Any]:
        return {"job": {"schedule": schedule, "action": lambda: None}}

    async with run_scheduler(url, build_jobs("0 1 * * *"), clock=SettableClock(3600)) as fast:
        assert (await fast.scheduler.job_status("job")).schedule == "0 1 * * *"
        async with run_scheduler(url, build_jobs("0 2 * * *")) as newer:
            assert newer.scheduler.worker_id < fast.scheduler.worker_id
            assert (await newer.scheduler.job_status("job")).schedule == "0 2 * * *"
    async with run_scheduler(url, build_jobs("0 3 * * *")) as newest:
        status = await newest.scheduler.job_status("job")
        assert (status.schedule, status.defined_by) == ("0 3 * * *", newest.scheduler.worker_id)


async def test_an_older_process_adds_a_removed_job_again(url: str) -> None:
    """Found: `add_job` did nothing where a newer process had defined the removed job."""
    notes = Notes()
    old: dict[str, Any] = {"job": {"schedule": NEVER, "action": notes.act}}
    new: dict[str, Any] = {"job": {"schedule": "0 2 * * *", "action": notes.act}}
    async with run_scheduler(url, old) as older, run_scheduler(url, new):
        assert await older.scheduler.remove_job("job")
        await older.scheduler.add_job("job", schedule=EVERY_SECOND, action=notes.act)
        assert (await older.scheduler.job_status("job")).schedule == EVERY_SECOND
        await until(lambda: notes.contexts, "it fires")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_an_operators_clock_decides_nothing_where_the_store_has_one(
    kind: str, locate: Locate
) -> None:
    """Found on S3: an edit from a machine whose clock is a year ahead skipped a year's instants."""
    url = locate(kind)
    jobs = {"tick": {"schedule": NEVER, "action": lambda: None}}
    async with run_scheduler(url, jobs) as stage:
        clock = SettableClock(0.0 if kind == "sqlite" else YEAR)
        components = msgspec.structs.replace(Components.system(), clock=clock)
        store = await open_store(url, components)
        operator = JobOperations(JobStore(lambda: store, "default", components), components, "me")
        assert await operator.edit("tick", {"schedule": "@daily"})
        assert (await operator.request_run("tick")).at == pytest.approx(time.time(), abs=30)
        await store.close()
        status = await stage.scheduler.job_status("tick")
        assert status.next_run is not None
        assert status.next_run <= time.time() + 86_400


async def test_nothing_stays_of_a_job_that_a_process_adds_runs_and_removes(url: str) -> None:
    """Neither the announcement of its runs, though no leader has it, nor its tombstone."""
    jobs = {"other": {"schedule": NEVER, "action": lambda: None}}
    async with run_scheduler(url, jobs) as leader:
        await leader.scheduler.ensure_coordinator()
        edits = leader.scheduler._get_parts().jobs.edits
        for _ in range(2):
            async with run_scheduler(url, jobs) as stage:
                for n in range(3):
                    job = {"schedule": NEVER, "action": lambda: None}
                    await stage.scheduler.add_job(f"job{n}", job)
                    await stage.scheduler.run_job(f"job{n}")
                    await stage.scheduler.remove_job(f"job{n}")
                announced = await edits.read()
                assert announced is not None
                assert any("job2" in names for names in announced.by_hand.values())

        async def is_forgotten() -> bool:
            return (found := await edits.read()) is not None and not found.by_hand

        await until(is_forgotten, "nothing is announced")
        scope = await leader.database._cleanup._find_scope()
        assert {"schedule/default/job/", "schedule/default/code/"} <= {*scope.prefixes}


async def test_all_runs_that_a_process_leaves_in_order_are_resumed_at_once(url: str) -> None:
    """Though the job is paused, so that no instant makes anybody look."""
    running: set[str] = set()
    go_on = asyncio.Event()

    async def act(_: Database, context: JobContext) -> None:
        running.add(context.execution_id)
        try:
            await go_on.wait()
        finally:
            running.discard(context.execution_id)

    jobs = {"job": {"schedule": EVERY_SECOND, "action": act, "overlap": "allow"}}
    async with run_scheduler(url, jobs, grace=0.1) as stage:
        await until(lambda: len(running) >= 3, "three run")
        await stage.scheduler.disable_job("job")
        left = {*running}
    assert not running
    async with run_scheduler(url, jobs, max_concurrent_jobs=len(left)):
        await until(lambda: running == left, "all are resumed")
        go_on.set()
