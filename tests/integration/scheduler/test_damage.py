"""Records of a scheduler that are damaged or gone: only what they describe may suffer."""

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from scheduler_stage import EVERY_SECOND, NEVER, Stage, run_scheduler
from servers import Locate
from waiting import check_all, until

from jobsync import Corrupt, Database, Event, Invalid, Unavailable
from jobsync.core.codec import MAX_VALUE, Json, encode
from jobsync.scheduler.decider import JobDecider
from jobsync.scheduler.edits import Edits, JobEdits
from jobsync.scheduler.history import JobHistory
from jobsync.stores.contract import Applied, Put

PREFIX = "schedule/default/"
NOT_JSON = "{not JSON"
DAMAGED: tuple[Json, ...] = (NOT_JSON, ["a list"], None, {"names": 7, "code": [], "revision": "x"})


@pytest.fixture
def url(locate: Locate) -> str:
    """A fresh file."""
    return locate("sqlite")


async def replace(url: str, key: str, value: Json) -> None:
    """Write a value over a record, as somebody with other tools would."""
    if value is NOT_JSON:
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(
                "UPDATE jobsync_record SET value = ? WHERE key = ?", (NOT_JSON, f"{PREFIX}{key}")
            )
        return
    async with Database(url) as database:
        record = await database.store.get(f"{PREFIX}{key}")
        await database.store.write([Put(f"{PREFIX}{key}", value, record)])


async def find_key(url: str, prefix: str) -> str:
    """Return the key of the only record under a prefix."""
    async with Database(url) as database:
        (head,) = await database.store.heads(f"{PREFIX}{prefix}")
        return head.key.removeprefix(PREFIX)


async def drop(url: str, key: str) -> None:
    """Remove a record without a trace."""
    async with Database(url) as database:
        await database.store.drop([f"{PREFIX}{key}"])


def two_jobs(calls: list[str]) -> dict[str, dict[str, Any]]:
    """Return a job that is damaged later, and another one."""
    return {
        "victim": {"schedule": EVERY_SECOND, "action": lambda: calls.append("victim")},
        "other": {"schedule": EVERY_SECOND, "action": lambda: calls.append("other")},
    }


@pytest.mark.parametrize("record", ["progress", "edits/latest", "defined", "code/"])
async def test_a_note_that_cannot_be_read_stops_no_job(locate: Locate, record: str) -> None:
    """It saves work only. A process starts, fires, and takes changes of operators."""
    await check_all(lambda value: _check_note(locate("sqlite"), record, value), DAMAGED)


async def _check_note(url: str, record: str, value: Json) -> None:
    calls: list[str] = []
    async with run_scheduler(url, two_jobs(calls)) as stage:
        await stage.scheduler.update_job("victim", description="so that there are edits")
        await until(lambda: "other" in calls, "it fires")
    key = await find_key(url, record) if record == "code/" else record
    await replace(url, key, value)
    calls.clear()
    async with run_scheduler(url, two_jobs(calls)) as stage:
        await until(lambda: {*calls} == {"victim", "other"}, "both fire")
        assert await stage.scheduler.disable_job("victim")
        assert await stage.scheduler.enable_job("victim")
        calls.clear()
        await until(lambda: {*calls} == {"victim", "other"}, "both fire")


async def test_a_job_that_is_not_understood_stops_no_other(locate: Locate) -> None:
    """Newer zone data or newer code may have written it. It is reported, and left as it is."""
    damages: tuple[Json, ...] = (
        {"edits": {"timezone": "Mars/Olympus"}},
        {"edits": {"schedule": "whenever"}},
        {"edits": {"nonsense": 1}},
        {"edits": {"timeout": -1}},
        {"definition": {"schedule": "30 2 30 2 *"}},
        {"queued": [10**15]},
    )
    await check_all(lambda damage: _check_damaged_job(locate("sqlite"), damage), damages)


async def _check_damaged_job(url: str, damage: Json) -> None:
    calls: list[str] = []
    async with run_scheduler(url, two_jobs(calls)):
        await until(lambda: {*calls} == {"victim", "other"}, "both fire")
    async with Database(url) as database:
        record = await database.store.get(f"{PREFIX}job/victim")
        assert record is not None
        await database.store.put(record, {**record.value, **damage})
    calls.clear()
    async with run_scheduler(url, two_jobs(calls)) as stage:
        await until(lambda: calls.count("other") >= 2, "the other fires")
        assert "victim" not in calls
        with pytest.raises(Corrupt, match="victim"):
            await stage.scheduler.job_status("victim")
        assert [job.name for job in await stage.scheduler.list_jobs()] == ["other"]


@pytest.mark.parametrize("value", [{"pause": {"at": 1.0, "reason": None}}, NOT_JSON], ids=str)
async def test_a_damaged_job_stops_no_deploy(url: str, value: Any) -> None:
    """Found: a process with changed code did not connect."""
    calls: list[str] = []
    async with run_scheduler(url, two_jobs(calls)) as stage:
        stored = await stage.database.store.get(f"{PREFIX}job/victim")
        assert stored is not None
    await replace(url, "job/victim", value if value == NOT_JSON else {**stored.value, **value})
    calls.clear()
    jobs = two_jobs(calls)
    for job in jobs.values():
        job["description"] = "changed"
    async with run_scheduler(url, jobs) as stage:
        await until(lambda: calls.count("other") >= 2, "the other fires")
        assert (await stage.scheduler.job_status("other")).description == "changed"
        assert "victim" not in calls
    await drop(url, "job/victim")
    async with run_scheduler(url, jobs) as stage:
        await until(lambda: "victim" in calls, "it fires again")


async def test_a_run_whose_record_is_damaged_leaves_the_state(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would block its job in a process that does not lead."""
    calls: list[str] = []

    async def refuse(*_: Any) -> None:
        raise Corrupt("key", "it is damaged")

    jobs = {"job": {"schedule": NEVER, "action": lambda: calls.append("job")}}
    async with run_scheduler(url, jobs) as leader, run_scheduler(url, jobs) as other:
        await leader.scheduler.ensure_coordinator()
        with monkeypatch.context() as patch:
            patch.setattr(JobHistory, "create", refuse)
            with pytest.raises(Unavailable):
                await other.scheduler.run_job("job")
        assert not (await leader.scheduler.job_status("job")).running
        await leader.scheduler.run_job("job")
    assert calls == ["job"]


async def test_a_reply_that_arrives_damaged_loses_no_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is read again before it is given up."""
    calls: list[str] = []
    create, damages = JobHistory.create, iter(range(3))

    async def damage(history: JobHistory, *arguments: Any) -> Any:
        record = await create(history, *arguments)
        if next(damages, None) is not None:
            raise Corrupt("key", "it arrived damaged")
        return record

    monkeypatch.setattr(JobHistory, "create", damage)
    jobs = {"job": {"schedule": NEVER, "action": lambda: calls.append("job")}}
    async with run_scheduler(url, jobs) as stage:
        await stage.scheduler.run_job("job")
        (entry,) = await stage.scheduler.job_history("job")
    assert (calls, entry.status) == (["job"], "success")
    assert next(damages, None) is None


async def test_a_job_whose_record_was_removed_is_stored_again(url: str) -> None:
    """As the message about a damaged one advises."""
    calls: list[str] = []
    async with run_scheduler(url, two_jobs(calls)):
        await until(lambda: {*calls} == {"victim", "other"}, "both fire")
    await drop(url, "job/victim")
    calls.clear()
    async with run_scheduler(url, two_jobs(calls)):
        await until(lambda: {*calls} == {"victim", "other"}, "both fire")


async def test_a_cursor_that_was_never_returned_is_refused(url: str) -> None:
    """It would look like the end of the history."""
    jobs = {"job": {"schedule": NEVER, "action": lambda: None}}
    async with run_scheduler(url, jobs) as stage:
        with pytest.raises(Invalid, match="after is not the cursor"):
            await stage.scheduler.job_history("job", after="banana")


async def test_a_look_at_a_job_that_is_being_decided_is_not_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a job that was changed at its instant was never fired again, and nothing told so."""
    calls: list[str] = []
    find = JobDecider.next_look
    looks: list[float | None] = [0.0, 0.0]

    def look_at_once(self: JobDecider, name: str) -> float | None:
        return looks.pop() if looks else find(self, name)

    monkeypatch.setattr(JobDecider, "next_look", look_at_once)
    jobs = {"job": {"schedule": EVERY_SECOND, "action": lambda: calls.append("job")}}
    async with run_scheduler(url, jobs):
        await until(lambda: len(calls) >= 3, "it goes on to fire")
    assert not looks


async def test_a_job_may_be_removed_while_jobs_are_taken_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the leader looked for the job's code, and the database failed."""
    calls: list[str] = []
    read = JobEdits.read
    stages: list[Stage] = []

    async def remove_first(self: JobEdits) -> Edits | None:
        if stages:
            await stages.pop().scheduler.remove_job("gone")
        return await read(self)

    jobs = {
        "gone": {"schedule": NEVER, "action": lambda: None, "run_on_start": True},
        "stays": {"schedule": EVERY_SECOND, "action": lambda: calls.append("stays")},
    }
    async with run_scheduler(url, jobs) as stage:
        await until(lambda: calls, "it fires")
        stages.append(stage)
        monkeypatch.setattr(JobEdits, "read", remove_first)
        stage.scheduler._assign()
        calls.clear()
        await until(lambda: len(calls) > 1, "it goes on to fire")
        assert not stages
        assert [job.name for job in await stage.scheduler.list_jobs()] == ["stays"]


async def fill_up(database: Database, job: str) -> None:
    """Make a job's state as large as a record can be."""
    while True:
        record = await database.store.get(f"{PREFIX}job/{job}")
        assert record is not None
        value = {**record.value, "edits": {"description": ""}}
        room = MAX_VALUE - len(encode(value))
        value["edits"] = {"description": "x" * room}
        (outcome,) = await database.store.write([record.replace(value)])
        if isinstance(outcome, Applied):
            return


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_job_whose_state_is_full_stops_no_other(url: str, is_running: bool) -> None:
    """Found: the database failed, whether a run was to start or had ended."""
    calls: list[str] = []
    began, release = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        began.set()
        await release.wait()

    jobs = two_jobs(calls)
    if is_running:
        jobs["victim"] |= {"action": wait}
    async with run_scheduler(url, jobs) as stage:
        reports: list[Event] = []
        stage.database.on("store:record-set-aside", reports.append)
        if is_running:
            await began.wait()
            await fill_up(stage.database, "victim")
            release.set()
            await stage.hears("job-lost", job_name="victim")
        else:
            await fill_up(stage.database, "victim")
            await until(lambda: reports, "it is reported")
        calls.clear()
        await until(lambda: calls.count("other") > 1, "the other fires")
    (report,) = reports
    assert report["key"] == f"{PREFIX}job/victim"
    assert report["reason"].startswith("its state cannot be written: value must be at most")
