"""How a run ended that a command has asked for, by what is left in the store."""

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from chance import FakeClock

from jobsync.cli import requested_run as module
from jobsync.cli.requested_run import RequestedRun, _check_possible
from jobsync.components import Components
from jobsync.core.firing import build_requested_run, withdraw
from jobsync.core.job_changes import add_request
from jobsync.core.job_state import (
    JobDefinition,
    JobPause,
    JobState,
    LastRun,
    RunRequest,
    RunStatus,
    Statistics,
)
from jobsync.errors import Unavailable
from jobsync.scheduler.history import HistoryEntry, build_entry
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.operations import JobOperations
from jobsync.status.schedules import ScheduledJobStatus, read_schedules_status
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore

REQUEST = RunRequest(id="asked", at=100.0, by="ann")


def end(run_id: str) -> Statistics:
    """Return the statistics of a job whose latest run has succeeded."""
    last = LastRun(id=run_id, instant=100, status="success", started_at=101.0, ended_at=103.0)
    return Statistics(runs=1, successes=1, last_run=last)


async def open_job(statistics: Statistics, store: Store | None = None) -> JobOperations:
    """Return the operations of a store with one job, whose history is empty."""
    components = Components.system()
    store = store or MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    definition = JobDefinition(schedule="@daily")
    state = JobState(definition=definition, defined_by="", last=0, statistics=statistics)
    await jobs.create_many({"job": state})
    return JobOperations(jobs, components, "ann")


@pytest.mark.parametrize(
    ("status", "error"),
    [("success", ""), ("error", "KeyError: 1"), ("timeout", "it took 5 s"), ("lost", "it died")],
)
async def test_a_run_whose_record_is_pruned_ended_as_the_state_says(
    status: RunStatus, error: str
) -> None:
    """Found: a success was shown as lost, if retention was faster than the command."""
    statistics = end("asked")
    assert statistics.last_run is not None
    last = msgspec.structs.replace(statistics.last_run, status=status, error=error)
    statistics = msgspec.structs.replace(statistics, last_run=last)
    entry = await RequestedRun("job")._look(await open_job(statistics), REQUEST)
    assert entry == HistoryEntry(
        job_name="job",
        status=status,
        id="asked",
        scheduled_time=100.0,
        is_manual=True,
        started_at=101.0,
        ended_at=103.0,
        duration=2.0,
        error=error,
    )


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ("success", "success"),
        ("error", "error"),
        ("timeout", "timeout"),
        ("lost", "lost"),
        ("running", "lost"),
    ],
)
async def test_a_run_that_is_over_ended_as_its_record_says(status: RunStatus, shown: str) -> None:
    """One that is no longer in the state does not run, whatever its record says."""
    jobs = await open_job(Statistics())
    run = build_requested_run(REQUEST, "w.1", 101.0)
    await jobs._jobs.history.create_entry("job", run, build_entry(run, status))
    entry = await RequestedRun("job")._look(jobs, REQUEST)
    assert entry is not None
    assert (entry.job_name, entry.id, entry.status) == ("job", "asked", shown)


async def test_a_run_that_waits_or_goes_on_has_no_end() -> None:
    """Until it is neither requested nor running."""
    requested, jobs = RequestedRun("job"), await open_job(Statistics())
    run = build_requested_run(REQUEST, "w.1", 101.0)
    stored = await jobs._jobs.read("job")
    for changes, progress in (
        ({"requests": (REQUEST,)}, ""),
        ({"requests": (), "running": (run,)}, "running on w"),
    ):
        assert stored is not None
        state = msgspec.structs.replace(stored.state, **changes)
        stored = await jobs._jobs.replace("job", stored.record, state)
        assert await requested._look(jobs, REQUEST) is None
        assert requested._progress == progress
    assert requested.describe_rest().startswith("The run may have been requested, or not")


async def test_a_run_that_ends_before_the_first_look_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: the command printed nothing if a process was faster than its look."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = await open_job(Statistics(), store)

    async def end_at_once(name: str) -> RunRequest:
        run = build_requested_run(REQUEST, "w.1", 101.0)
        await jobs._jobs.history.create_entry(name, run, build_entry(run, "success"))
        return REQUEST

    await jobs._jobs.code.write("0" * 24, ["job"], 0.0)
    monkeypatch.setattr(jobs, "request_run", end_at_once)
    status = await (await read_schedules_status(store, components)).job("job", "default")
    status = msgspec.structs.replace(status, workers=("w.1",))
    entry = await RequestedRun("job").follow(store, components, status, jobs, None)
    assert entry is not None
    assert entry.status == "success"
    assert capsys.readouterr().err == "job: waiting for a process to start it\n"


@pytest.mark.parametrize("timeout", [0.05, 0.1, 0.25, 5.0])
@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_run_that_ends_at_the_last_moment_is_seen(
    monkeypatch: pytest.MonkeyPatch, timeout: float, has_ended: bool
) -> None:
    """The last look comes after the timeout, and the waits before it end with that.

    Who gives up, however soon, has looked for the reason.
    """
    clock, waits, examined = FakeClock(), list[float](), list[float]()
    components = msgspec.structs.replace(Components.system(), clock=clock)
    store = MemoryStore(components=components)
    jobs, began = await open_job(Statistics(), store), clock.mono_seconds
    await jobs._jobs.code.write("0" * 24, ["job"], 0.0)
    status = await (await read_schedules_status(store, components)).job("job", "default")
    status = msgspec.structs.replace(status, workers=("w.1",))
    run = build_requested_run(REQUEST, "w.1", 101.0)

    async def ask(name: str) -> RunRequest:
        await jobs._change(name, lambda state: add_request(state, REQUEST))
        return REQUEST

    async def wait(_: str, seconds: float) -> None:
        waits.append(seconds)
        # Time goes on, however short a wait is.
        clock.mono_seconds += max(seconds, 1e-6)
        if has_ended and clock.mono_seconds - began >= timeout - 1e-6:
            await jobs._jobs.history.create_entry("job", run, build_entry(run, "success"))
            await jobs._change("job", lambda state: withdraw(state, REQUEST.id))

    async def examine(*_: object) -> None:
        """Find nothing wrong with the fleet."""
        examined.append(clock.mono_seconds - began)

    requested = RequestedRun("job")
    monkeypatch.setattr(jobs, "request_run", ask)
    monkeypatch.setattr(store, "wait", wait)
    monkeypatch.setattr(requested, "_examine_fleet", examine)
    entry = await requested.follow(store, components, status, jobs, timeout)
    assert (None if entry is None else entry.status) == ("success" if has_ended else None)
    assert sum(waits) == pytest.approx(timeout)
    if not has_ended:
        assert examined[-1:] == [pytest.approx(timeout, abs=1e-4)]
    assert min(waits) > 0


async def test_an_end_that_nobody_knows_is_not_a_loss() -> None:
    """Another run has ended since."""
    jobs = await open_job(end("another"))
    with pytest.raises(Unavailable, match="its record was removed as old history"):
        await RequestedRun("job")._look(jobs, REQUEST)


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("name", ["removed", "forgotten"])
async def test_a_run_whose_job_was_removed_is_lost_unless_it_has_begun(
    name: str, has_begun: bool
) -> None:
    """Whether the job is only marked as removed, or forgotten; what has begun may have ended."""
    jobs = await open_job(Statistics())
    state = JobState(
        definition=JobDefinition(schedule="@daily"), defined_by="", last=0, is_removed=True
    )
    await jobs._jobs.create_many({"removed": state})
    requested = RequestedRun(name)
    requested._has_begun = has_begun
    if has_begun:
        with pytest.raises(Unavailable, match="its end is unknown"):
            await requested._look(jobs, REQUEST)
        return
    entry = await requested._look(jobs, REQUEST)
    assert entry == HistoryEntry(
        job_name=name,
        status="lost",
        id="asked",
        scheduled_time=100.0,
        error="the job was removed",
        is_manual=True,
    )


@pytest.mark.parametrize("pause", [None, JobPause(at=5.0)])
@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("has_worker", [False, True])
async def test_a_run_needs_a_process_with_the_job(
    pause: JobPause | None, is_removed: bool, has_worker: bool
) -> None:
    """It is refused before it is asked for; a pause is no reason."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = await open_job(Statistics(), store)
    await jobs._jobs.code.write("0" * 24, ["job"], 0.0)
    await jobs._change(
        "job", lambda state: msgspec.structs.replace(state, pause=pause, is_removed=is_removed)
    )
    status = await (await read_schedules_status(store, components)).job("job", "default")
    status = msgspec.structs.replace(status, workers=("w",) if has_worker else ())
    if has_worker and not is_removed:
        _check_possible(status)
        return
    reason = "it was removed" if is_removed else "no live process runs the scheduler default"
    with pytest.raises(Unavailable, match=reason):
        await RequestedRun("job").follow(store, components, status, jobs, None)
    stored = await jobs._jobs.read("job")
    assert stored is not None
    assert not stored.state.requests


@pytest.mark.parametrize("pause", [None, JobPause(at=5.0)])
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("has_worker", [False, True])
async def test_who_waits_for_a_run_hears_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pause: JobPause | None,
    has_begun: bool,
    has_worker: bool,
) -> None:
    """Once, and not of a pause, which stops no such run; nobody left to do it is an error."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = await open_job(Statistics(), store)
    await jobs._jobs.code.write("0" * 24, ["job"], 0.0)
    await jobs._change("job", lambda state: msgspec.structs.replace(state, pause=pause))
    schedules = await read_schedules_status(store, components)
    scheduler = msgspec.structs.replace(
        (await schedules.job("job")).scheduler, workers=("w",), leader=None
    )

    async def read_job(*_: object) -> ScheduledJobStatus:
        found = await schedules.job("job")
        workers = ("w",) if has_worker else ()
        return msgspec.structs.replace(found, workers=workers, scheduler=scheduler)

    async def read(*_: object) -> SimpleNamespace:
        return SimpleNamespace(job=read_job)

    monkeypatch.setattr(module, "read_schedules_status", read)
    requested = RequestedRun("job")
    requested.namespace, requested._has_begun = "default", has_begun
    if not has_worker:
        rest = "and run it again" if has_begun else "the run stays requested"
        with pytest.raises(Unavailable, match=f"lacks its code.*{rest}"):
            await requested._examine_fleet(store, components)
        return
    for _ in range(2):
        await requested._examine_fleet(store, components)
        requested._show()
    lines = capsys.readouterr().err.splitlines()
    waiting = (
        "job: waiting: no process is the coordinator: one is elected within its worker_timeout"
    )
    assert lines == ([] if has_begun else [waiting])


class EndingRun:
    """The operations of a job whose run ends right after a request."""

    def __init__(self, last: str) -> None:
        self._last = last
        self._run = build_requested_run(REQUEST, "w.1", 101.0)
        self._has_ended = False

    async def read_state(self, _: str) -> JobState:
        running = () if self._has_ended else (self._run,)
        self._has_ended |= self._last == "state"
        definition = JobDefinition(schedule="@daily")
        return JobState(definition=definition, defined_by="", last=0, running=running)

    async def find_requested(self, *_: object) -> HistoryEntry:
        entry = build_entry(self._run, "success" if self._has_ended else "running")
        self._has_ended |= self._last == "record"
        return entry


@pytest.mark.parametrize("last", ["state", "record"])
async def test_a_run_that_ends_while_a_command_looks_is_not_lost(last: str) -> None:
    """It is still running, or has ended as its record says: never something between."""
    jobs, requested = EndingRun(last), RequestedRun("job")
    looks = [await requested._look(cast("JobOperations", jobs), REQUEST) for _ in range(3)]
    assert {"success"} >= {look.status for look in looks if look is not None}
    assert (looks[-1] is None) == (last == "record")
