"""When a removed job is forgotten."""

from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, Gap, JobDefinition, JobState, Statistics
from jobsync.errors import Corrupt, JobsyncError, OutcomeUnknown, Unavailable
from jobsync.scheduler.edits import JobEdits
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.removed_jobs import RemovedJobs
from jobsync.stores.memory import MemoryStore

NOW, MAX_AGE = 1_800_000_000, 1000.0
RUN = ActiveRun(id="run", instant=1, owner="living", started_at=1.0)


class Stage:
    """A leader that has seen removed jobs."""

    def __init__(self) -> None:
        self.machine = FakeClock()
        self.components = msgspec.structs.replace(Components.system(), clock=self.machine)
        self.store = MemoryStore(components=self.components)
        self.jobs = JobStore(lambda: self.store, "default", self.components)
        self.cache = JobCache(self.jobs, lambda *_: None)
        self.used: set[str] = set()
        self.forgotten: list[str] = []
        self.clock = SimpleNamespace(now=lambda: float(NOW), veto="")
        owners = SimpleNamespace(
            find_gone=self._find_gone, is_orphan=lambda run, gone: run.owner in gone
        )
        code = SimpleNamespace(list_used=self._list_used)
        retention = SimpleNamespace(forget=self.forgotten.append)
        parts: Any = (self.cache, code, owners, retention, self.clock, self.components)
        self.removed = RemovedJobs(*cast("Any", parts), max_age=MAX_AGE)

    async def _list_used(self) -> set[str]:
        return self.used

    async def _find_gone(self, state: JobState) -> set[str]:
        return {run.owner for run in state.running} - {"living"}

    async def add(self, name: str, **fields: Any) -> None:
        """Store a job that was removed long ago and has run, unless the fields say otherwise."""
        defaults: dict[str, Any] = {
            "definition": JobDefinition(schedule="@daily"),
            "defined_by": "",
            "last": int(NOW - MAX_AGE) - 1,
            "is_removed": True,
            "statistics": Statistics(runs=1),
        }
        await self.jobs.create_many({name: JobState(**{**defaults, **fields})})
        await self.cache.read(name)

    async def list_names(self) -> set[str]:
        """Return the jobs that are stored."""
        return {*await self.jobs.list_names()}


@pytest.mark.parametrize(
    ("fields", "is_forgotten"),
    [
        ({}, True),
        ({"is_removed": False}, False),
        ({"last": int(NOW - MAX_AGE)}, False),
        ({"last": NOW}, False),
        # It was never due and never ran.
        ({"last": NOW, "statistics": Statistics()}, True),
        ({"last": NOW, "statistics": Statistics(skipped=1)}, False),
        ({"running": (RUN,)}, False),
        # Its process has died; what is left of it goes into the history first.
        ({"running": (msgspec.structs.replace(RUN, owner="dead"),)}, True),
        ({"lost": (RUN,)}, True),
        ({"gaps": (Gap(first=1, last=1, count=1, reason="late"),)}, True),
        ({"queued": (1,)}, False),
    ],
)
@pytest.mark.parametrize("is_used", [False, True])
async def test_a_job_is_forgotten_when_nothing_is_left_to_know(
    fields: dict[str, Any], is_forgotten: bool, is_used: bool
) -> None:
    """After its history's time, unless it goes on or a process has its code."""
    stage = Stage()
    await stage.add("job", **fields)
    stage.used = {"job"} if is_used else set()
    await stage.removed.forget_some()
    is_gone = is_forgotten and not is_used
    assert await stage.list_names() == (set() if is_gone else {"job"})
    assert stage.forgotten == (["job"] if is_gone else [])
    assert ("job" in stage.cache.known) is not is_gone
    edits = await stage.jobs.edits.read()
    assert edits is not None
    assert edits.list_since(0) == (["job"] if is_gone else [])
    assert bool(await stage.store.heads("schedule/default/run/")) is (
        not is_gone and not is_used and bool(fields.get("running")) and is_forgotten
    )


@pytest.mark.parametrize(
    "before",
    [
        {},
        {"running": (msgspec.structs.replace(RUN, owner="dead"),)},
        {"last": NOW, "statistics": Statistics()},
    ],
)
async def test_a_job_that_came_back_meanwhile_is_left_alone(before: dict[str, Any]) -> None:
    """A process has defined it again since the leader has seen it: it goes on as it is stored."""
    stage = Stage()
    await stage.add("job", **before)
    await stage.jobs.change(
        "job", lambda state: state and msgspec.structs.replace(state, is_removed=False)
    )
    stored = await stage.jobs.read("job")
    assert stored is not None
    await stage.removed.forget_some()
    after = await stage.jobs.read("job")
    assert after is not None
    assert after.state == stored.state
    assert stage.forgotten == []
    assert not await stage.store.heads("schedule/default/run/")
    edits = await stage.jobs.edits.read()
    assert edits is not None
    assert edits.list_since(0) == []


async def test_a_look_forgets_a_hundred_and_the_next_comes_ten_minutes_later() -> None:
    """None by a clock that may be wrong."""
    stage = Stage()
    for number in range(205):
        await stage.add(f"job{number:03}")
    stage.clock.veto = "it is ahead"
    await stage.removed.forget_some()
    stage.clock.veto = ""
    assert len(await stage.list_names()) == 205
    for left, seconds in ((105, 599.0), (105, 1.0), (5, 600.0), (0, 600.0), (0, 600.0)):
        await stage.removed.forget_some()
        assert len(await stage.list_names()) == left
        stage.machine.mono_seconds += seconds


@pytest.mark.parametrize("error", [Unavailable("store", "down"), OutcomeUnknown("key")])
async def test_leaders_are_told_later_if_the_note_fails(
    monkeypatch: pytest.MonkeyPatch, error: JobsyncError
) -> None:
    """Nothing else says that a job is forgotten: its name would stay in the note for good."""
    stage = Stage()
    await stage.jobs.edits.note({"job": True})
    await stage.add("job")

    async def refuse(*_: Any) -> NoReturn:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(JobEdits, "note", refuse)
        with pytest.raises(type(error)):
            await stage.removed.forget_some()
    assert await stage.list_names() == set()
    for _ in range(2):
        stage.machine.mono_seconds += 600.0
        await stage.removed.forget_some()
        edits = await stage.jobs.edits.read()
        assert edits is not None
        assert (edits.special, edits.revision) == ((), 2)


async def test_jobs_that_code_has_keep_no_others_from_being_forgotten() -> None:
    """However many they are."""
    stage = Stage()
    for number in range(105):
        await stage.add(f"job{number:03}")
    stage.used = {f"job{number:03}" for number in range(104)}
    await stage.removed.forget_some()
    assert await stage.list_names() == stage.used


async def test_a_job_that_cannot_be_read_keeps_no_others_from_being_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is reported."""
    stage, read, reported = Stage(), JobStore.read, list[str]()
    for name in ("broken", "good"):
        await stage.add(name)

    async def refuse(jobs: JobStore, name: str) -> Any:
        if name == "broken":
            raise Corrupt("key", "damaged")
        return await read(jobs, name)

    with monkeypatch.context() as patch:
        patch.setattr(JobStore, "read", refuse)
        patch.setattr(JobStore, "report", lambda _, name, __: reported.append(name))
        await stage.removed.forget_some()
    assert (await stage.list_names(), reported) == ({"broken"}, ["broken"])
