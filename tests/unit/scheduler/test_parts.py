"""What the parts of a scheduler that runs do for each other, over a store in memory."""

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
from waiting import until

from jobsync import Corrupt, Database, Misconfigured, OutcomeUnknown, SchedulerPlugin, Unavailable
from jobsync.core.job_state import Gap, JobDefinition, JobState
from jobsync.errors import NewerFormat

NEVER = "0 0 29 2 *"
GAP = Gap(first=60, last=180, count=3, reason="nobody led")


@pytest.fixture
def told() -> list[tuple[Any, ...]]:
    """What the parts were asked for, in order."""
    return []


class _Stop(Exception):
    pass


def idle() -> None:
    """Do nothing."""


async def test_a_gap_is_told_and_counts_for_the_history(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run does, with the number of runs so far; a job that is not known counts nothing."""
    scheduler = SchedulerPlugin(jobs={"job": {"schedule": NEVER, "action": idle}})
    async with Database("memory://", plugins=[scheduler]):
        parts = scheduler._get_parts()
        monkeypatch.setattr(parts.retention, "note_gap", lambda *of: told.append(("gap", *of)))
        monkeypatch.setattr(parts.retention, "note_run", lambda *of: told.append(("run", *of)))
        monkeypatch.setattr(parts.loop, "on_run_end", lambda *of: told.append(("end", *of)))
        missed: list[Any] = []
        scheduler.on("plg:scheduler:job-missed", missed.append)
        parts._on_gap("job", GAP)
        assert [(each.job_name, each.first, each.last) for each in missed] == [("job", 60, 180)]
        assert told == [("gap", "job")]
        told.clear()
        await parts.cache.read("job")
        for name in ("job", "other"):
            parts._on_run_end(name)
        assert told == [("end", "job"), ("run", "job", 0), ("end", "other")]


async def test_a_job_that_was_changed_here_is_read_again(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is looked at; the others are not."""
    jobs = {name: {"schedule": NEVER, "action": idle} for name in ("job", "other")}
    scheduler = SchedulerPlugin(jobs=jobs)
    async with Database("memory://", plugins=[scheduler]):
        parts = scheduler._get_parts()
        for name in jobs:
            await parts.cache.read(name)

        def look_at(name: str) -> None:
            told.append((name, *parts.cache.known))

        monkeypatch.setattr(parts.loop, "look_at", look_at)
        for _ in range(2):
            parts.wake("job")
        assert told == [("job", "other")] * 2


async def test_a_job_that_is_changed_through_its_scheduler_is_looked_at_at_once(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If anything has changed."""
    scheduler = SchedulerPlugin(jobs={"job": {"schedule": NEVER, "action": idle}})
    async with Database("memory://", plugins=[scheduler]):
        monkeypatch.setattr(scheduler._get_parts(), "wake", lambda *of: told.append(of))
        for retries, is_changed in ((2, True), (2, False), (0, True)):
            assert await scheduler.update_job("job", retries=retries) is is_changed
            assert told == [("job",)] * is_changed
            told.clear()
        for is_changed in (True, False):
            assert await scheduler.disable_job("job") is is_changed
        told.clear()
        for is_changed in (True, False):
            assert await scheduler.enable_job("job") is is_changed
            assert told == [("job",)] * is_changed
            told.clear()


async def test_a_new_job_is_published_defined_and_then_put_on_duty(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: who fires it finds its state, and others know that this process has it."""
    scheduler = SchedulerPlugin()
    async with Database("memory://", plugins=[scheduler]):
        parts = scheduler._get_parts()

        async def define(names: list[str]) -> None:
            told.append(("define", *names))

        monkeypatch.setattr(parts.code, "change", lambda: told.append(("change",)))
        monkeypatch.setattr(parts.code, "define", define)
        monkeypatch.setattr(parts.loop, "add", lambda name: told.append(("add", name)))
        await parts.register("job")
        assert told == [("change",), ("define", "job"), ("add", "job")]


async def test_parts_have_the_options_of_their_scheduler() -> None:
    """Each its own: how long, how many, and who."""
    scheduler = SchedulerPlugin(
        namespace="eu", history_limit=7, history_retention=3600, max_concurrent_jobs=3
    )
    async with Database("memory://", plugins=[scheduler]):
        parts, membership = scheduler._get_parts(), scheduler._get_membership()
        assert parts.jobs.prefix == "schedule/eu/"
        assert parts.runs.room == 3
        assert (parts.retention._keep, parts.retention._max_age) == (7, 3600)
        assert parts.removed._max_age == 3600
        assert parts.operations._by == membership.worker_id


async def test_changes_by_operators_are_looked_for_once_a_heartbeat_or_when_they_are_told(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are written, and nowhere else."""
    scheduler = SchedulerPlugin(namespace="eu", heartbeat_interval=2, worker_timeout=20)
    async with Database("memory://", plugins=[scheduler]):
        parts = scheduler._get_parts()

        async def wait(*of: Any) -> None:
            told.append(of)
            if len(told) > 2:
                raise _Stop

        with monkeypatch.context() as patch:
            patch.setattr(parts.jobs.store, "wait", wait)
            patch.setattr(parts.loop, "check_edits", lambda: told.append(("check",)))
            with pytest.raises(_Stop):
                await parts.follow_edits()
    assert told == [("schedule/eu/edits/", 2.0), ("check",), ("schedule/eu/edits/", 2.0)]


async def test_a_stop_ends_what_starts_runs_then_the_runs_then_what_they_have_called(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its time: together they take no longer than a stop may."""
    scheduler = SchedulerPlugin(grace=7)
    async with Database("memory://", plugins=[scheduler]):
        parts = scheduler._get_parts()

        def record(part: Any, name: str) -> None:
            async def call(*of: Any) -> None:
                told.append((name, *of))

            monkeypatch.setattr(part, name, call)

        monkeypatch.setattr(parts.loop, "drop_all", lambda: told.append(("drop_all",)))
        record(parts.loop, "finish_starts")
        record(parts.manual_runs, "stop")
        record(parts.runs, "finish_all")
        record(scheduler._hooks, "finish")
        await scheduler.on_stop()
        assert told == [
            ("drop_all",),
            ("finish_starts",),
            ("stop", 1.0),
            ("finish_all", 7.0),
            ("finish", 2.5),
        ]
        assert sum(seconds for _, *times in told for seconds in times) <= scheduler.stop_time
        assert scheduler.stop_time == 12.0


DAMAGES = [Corrupt("key", "why"), NewerFormat("key", 9, 1)]
OUTAGES = [
    Unavailable("the store", "it is silent"),
    OutcomeUnknown("key"),
    Misconfigured("url", "memory://", "is forbidden", "allow it"),
]


@pytest.mark.parametrize("error", [None, *OUTAGES, *DAMAGES])
async def test_a_leader_fires_its_jobs_even_if_it_cannot_publish_them(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Found: one request without an answer, and it led without firing anything."""
    scheduler = SchedulerPlugin(jobs={"job": {"schedule": NEVER, "action": idle}})
    async with Database("memory://", plugins=[scheduler]):
        await until(lambda: scheduler.term is not None, "it leads")
        parts = scheduler._get_parts()

        async def publish() -> None:
            told.append(("publish",))
            if error is not None:
                raise error

        monkeypatch.setattr(parts.code, "publish", publish)
        monkeypatch.setattr(parts.loop, "assign", lambda names, *_: told.append(tuple(names)))
        await scheduler.on_become_coordinator()
        assert told == [("publish",), ("job",)]
        monkeypatch.undo()


@pytest.mark.parametrize("error", OUTAGES)
async def test_a_job_that_is_removed_before_it_could_be_stored_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The next try finds that this process has it no more."""
    scheduler = SchedulerPlugin()
    # Another process has stored it.
    stored = JobState(definition=JobDefinition(schedule=NEVER), defined_by="other", last=0)
    async with Database("memory://", plugins=[scheduler]) as database:
        await scheduler._get_parts().jobs.create_many({"job": stored})
        postponed: list[Any] = []
        database.on("db:work-postponed", postponed.append)

        async def refuse(*_: Any) -> NoReturn:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(scheduler._get_parts().code, "define", refuse)
            scheduler.job(NEVER, name="job")(idle)
            await until(lambda: postponed, "it could not be stored")
            await scheduler.remove_job("job")

        def has_ended() -> bool:
            return not any(work.get_name().endswith("adds job") for work in scheduler._tasks)

        await until(has_ended, "nothing tries to store it")
        assert await scheduler.list_jobs() == []


async def test_a_job_that_could_not_be_added_is_published_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: the leader seemed to have it, so that nobody fired it, not even who did before."""
    scheduler = SchedulerPlugin(jobs={"job": {"schedule": NEVER, "action": idle}})
    async with Database("memory://", plugins=[scheduler]):
        code = scheduler._get_parts().code
        before = code.digest

        async def define(names: Sequence[str]) -> NoReturn:
            # The heartbeat publishes it before its definition is stored.
            await code.publish()
            assert code.digest != before
            raise Unavailable("the store", f"it does not store {names}")

        with monkeypatch.context() as patch:
            patch.setattr(code, "define", define)
            with pytest.raises(Unavailable):
                await scheduler.add_job("new", schedule=NEVER, action=idle)
        await code.publish()
        assert code.digest == before
        await scheduler.add_job("new", schedule=NEVER, action=idle)
