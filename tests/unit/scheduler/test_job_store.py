"""Records of the scheduler that are not a job's state, over a store in memory."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, Gap, JobDefinition, JobState
from jobsync.errors import Corrupt, Invalid, JobsyncError, NewerFormat
from jobsync.scheduler.job_store import JobStore, Progress
from jobsync.stores.contract import Head, Put
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.paging import head_pages
from jobsync.stores.paging import split_pages as split

RUN = ActiveRun(id="run", instant=60, owner="me", started_at=60.0)
MOST_HEADS = 100_000
"""What a store lists with one request."""


class LimitedStore(StoreDecorator):
    """Refuses what stores refuse, and calls a function before a listing."""

    async def heads(self, prefix: str, *, limit: int = 1000, **options: Any) -> list[Head]:
        assert 1 <= limit <= MOST_HEADS
        return await super().heads(prefix, limit=limit, **options)


def open_jobs() -> JobStore:
    """Return an empty store of jobs."""
    components = Components.system()
    store = LimitedStore(MemoryStore(components=components))
    return JobStore(lambda: store, "default", components)


async def test_a_long_history_is_counted_in_pages() -> None:
    """Found: a limit above 100,000 was accepted, and ended the database at the first removal."""
    jobs = open_jobs()
    for instant in range(1, 6):
        gap = Gap(first=instant, last=instant, count=1, reason="late")
        await jobs.history.write_gap("job", gap)
    assert await jobs.prune("job", keep=1_000_000, oldest=0) == 0
    assert await jobs.prune("job", keep=4, oldest=0) == 1
    assert await jobs.prune("job", keep=4, oldest=0) == 0
    assert await jobs.prune("job", keep=1_000_000, oldest=2.0) == 1
    assert [entry.scheduled_time for entry in await jobs.history.list_entries("job")] == [5, 4, 3]


async def test_a_position_is_found_over_several_pages(monkeypatch: Any) -> None:
    """Whether a page ends there or not."""
    monkeypatch.setattr("jobsync.scheduler.history._COUNTED_PAGE", 2)
    jobs = open_jobs()
    for instant in range(1, 8):
        gap = Gap(first=instant, last=instant, count=1, reason="late")
        await jobs.history.write_gap("job", gap)
    for keep in (8, 7, 6, 5, 3, 2, 1):
        await jobs.prune("job", keep=keep, oldest=0)
        assert len(await jobs.history.list_entries("job")) == min(keep, 7)


async def test_announcements_are_few(monkeypatch: Any) -> None:
    """A process that runs many jobs by hand keeps the latest ones, and those that run."""
    monkeypatch.setattr("jobsync.scheduler.edits._MAX_ANNOUNCED", 3)
    jobs = open_jobs()
    for name in "abcde":
        await jobs.edits.announce_run("w1", name, running={"a"})
    await jobs.edits.announce_run("w2", "a", running=())
    await jobs.edits.note({"x": True, "y": None})
    edits = await jobs.edits.read()
    assert edits is not None
    assert edits.by_hand == {"w1": ("a", "c", "d", "e"), "w2": ("a",)}
    assert edits.special == ("x",)
    await jobs.edits.forget_announced({"w1": {"a", "d"}, "w2": {"a"}})
    edits = await jobs.edits.read()
    assert edits is not None
    assert edits.by_hand == {"w1": ("c", "e")}


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({}, False),
        ({"running": (RUN,)}, True),
        # Its record does not say so yet.
        ({"lost": (RUN,)}, True),
        ({"running": (msgspec.structs.replace(RUN, instant=61),)}, False),
        ({"queued": (60,)}, False),
    ],
)
async def test_a_removal_leaves_the_records_that_are_needed(
    fields: dict[str, Any], is_kept: bool
) -> None:
    """Those of runs that go on, or that were given up and not written down."""
    jobs = open_jobs()
    definition = JobDefinition(schedule="@daily")
    await jobs.create_many(
        {"job": JobState(definition=definition, defined_by="", last=0, **fields)}
    )
    await jobs.history.create("job", RUN, "w1")
    assert await jobs.prune("job", keep=0, oldest=1e9) == (0 if is_kept else 1)


async def test_a_run_that_goes_on_keeps_its_record_when_all_else_is_removed() -> None:
    """Its result has to be stored."""
    jobs = open_jobs()
    await jobs.history.create("job", RUN, "w1")

    async def list_running() -> list[ActiveRun]:
        return [RUN]

    assert await jobs.history.prune("job", list_running, keep=0, oldest=1e9) == 0
    assert await jobs.prune("job", keep=0, oldest=1e9) == 1


async def test_a_run_that_begins_during_a_removal_keeps_its_record(monkeypatch: Any) -> None:
    """An old instant may be caught up after the first page was read."""
    jobs = open_jobs()
    pages = head_pages

    def read_small_pages(store: Any, prefix: str, **options: Any) -> Any:
        return pages(store, prefix, **{**options, "size": 2})

    monkeypatch.setattr("jobsync.scheduler.history.head_pages", read_small_pages)
    for instant in (50, 70, 80, 90):
        gap = Gap(first=instant, last=instant, count=1, reason="late")
        await jobs.history.write_gap("job", gap)
    running: list[ActiveRun] = []

    async def list_running() -> list[ActiveRun]:
        found = [*running]
        if not running:
            running.append(RUN)
            await jobs.history.create("job", RUN, "w1")
        return found

    assert await jobs.history.prune("job", list_running, keep=0, oldest=1e9) == 4
    assert [entry.id for entry in await jobs.history.list_entries("job")] == [RUN.id]


STATE = JobState(definition=JobDefinition(schedule="@daily"), defined_by="", last=0)


@pytest.fixture
def reports() -> list[Any]:
    """What is reported of records that cannot be used."""
    return []


@pytest.fixture
def watched(reports: list[Any]) -> JobStore:
    """An empty store of jobs, whose reports are seen."""
    components = Components.system()
    components.events.on("store:record-set-aside", reports.append)
    store = MemoryStore(components=components)
    return JobStore(lambda: store, "default", components)


@pytest.mark.parametrize(
    "edits",
    [
        {"schedule": "every day"},
        {"timezone": "Europe/Berlim"},
        {"timeout": "soon"},
        {"timeout": 0},
        {"retries": -1},
        {"overlap": "wait"},
        {"enabled": 1},
    ],
)
async def test_a_change_that_is_not_understood_here_sets_its_job_aside(
    watched: JobStore, reports: list[Any], edits: dict[str, Any]
) -> None:
    """Newer code may have made it; the other jobs are read, and it is reported once."""
    for name in ("a", "b", "c"):
        state = msgspec.to_builtins(STATE)
        record = Put(
            f"schedule/default/job/{name}", {**state, "edits": edits if name == "b" else {}}
        )
        await watched.store.write([record])
    with pytest.raises(Corrupt):
        await watched.read("b")
    for _ in range(2):
        assert {*await watched.read_all()} == {"a", "c"}
        assert {*await watched.read_many(["c", "b", "a", "none"])} == {"a", "c"}
    assert [(report.key, report.store) for report in reports] == [
        ("schedule/default/job/b", watched.store.name)
    ]
    assert "not understood here" in reports[0].reason
    assert await watched.list_names() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "progress", "reported"),
    [
        (None, Progress(), 0),
        ({}, Progress(), 0),
        ({"until": 60, "open": ["a"], "code": "c"}, Progress(until=60, open=("a",), code="c"), 0),
        ({"until": "now"}, Progress(), 1),
        ([], Progress(), 1),
    ],
)
def test_progress_that_cannot_be_read_is_none_and_reported_once(
    watched: JobStore, reports: list[Any], value: Any, progress: Progress, reported: int
) -> None:
    """Then every job is looked at."""
    assert watched.decode_progress(value) == watched.decode_progress(value) == progress
    assert [report.key for report in reports] == ["schedule/default/progress"] * reported


def test_a_job_that_cannot_be_used_is_reported_once_for_each_reason(
    watched: JobStore, reports: list[Any]
) -> None:
    """However much is too much each time."""
    errors: list[JobsyncError] = [
        Invalid("value", 70_000, "is too large", "shorten it"),
        Invalid("value", 80_000, "is too large", "shorten it a lot"),
        Invalid("name", 3, "is too large", "shorten it"),
        Corrupt("key", "no state"),
    ]
    for name in ("a", "b"):
        for error in (*errors, *errors):
            watched.report(name, error)
    reasons = [(report.key, report.reason.partition(":")[0]) for report in reports]
    state = "its state cannot be written"
    assert reasons == [
        (f"schedule/default/job/{name}", reason)
        for name in ("a", "b")
        for reason in (state, state, str(errors[-1]).partition(":")[0])
    ]


def test_a_note_that_cannot_be_used_is_reported_once(watched: JobStore, reports: list[Any]) -> None:
    """By its key, or by that of the scheduler if newer code has written it."""
    for _ in range(2):
        watched.report_note(Corrupt("schedule/default/defined", "no number"))
        watched.report_note(NewerFormat("schedule/default/defined", 9, 1))
    assert [report.key for report in reports] == ["schedule/default/defined", "schedule/default/"]


def test_tombstones_are_removed_where_records_are(watched: JobStore) -> None:
    """Jobs, and versions of the code."""
    assert watched.prefixes == ["schedule/default/job/", "schedule/default/code/"]


OTHER = msgspec.structs.replace(STATE, last=60)


async def test_only_jobs_that_have_no_state_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that somebody else has created meanwhile stay as they are; over several pages, too."""
    monkeypatch.setattr("jobsync.scheduler.job_store.split_pages", lambda names: split(names, 2))
    jobs = open_jobs()
    assert await jobs.create_many({}) == set()
    assert await jobs.create_many({"b": OTHER, "e": OTHER}) == {"b", "e"}
    assert await jobs.create_many(dict.fromkeys("abcde", STATE)) == {"a", "c", "d"}
    assert await jobs.create_many(dict.fromkeys("abcde", STATE)) == set()
    found = {name: stored.state for name, stored in (await jobs.read_all()).items()}
    assert found == {"a": STATE, "b": OTHER, "c": STATE, "d": STATE, "e": OTHER}
    assert found == {name: stored.state for name, stored in (await jobs.read_many("edcba")).items()}


async def test_a_state_that_was_changed_since_it_was_read_is_neither_replaced_nor_removed() -> None:
    """Who has read it has to decide anew; a removal counts once."""
    jobs = open_jobs()
    await jobs.create_many({"job": STATE})
    old = await jobs.read("job")
    assert old is not None
    new = await jobs.replace("job", old.record, OTHER)
    assert new is not None
    assert (new.state, await jobs.read("job")) == (OTHER, new)
    assert await jobs.replace("job", old.record, STATE) is None
    assert await jobs.forget(old.record) is False
    assert await jobs.read("job") == new
    assert await jobs.forget(new.record) is True
    assert await jobs.read("job") is None
    assert await jobs.forget(new.record) is False


async def test_a_change_is_decided_by_what_is_stored() -> None:
    """None leaves it; what is stored then is returned."""
    jobs = open_jobs()
    seen: list[JobState | None] = []

    def decide(answer: JobState | None) -> Callable[[JobState | None], JobState | None]:
        def note(state: JobState | None) -> JobState | None:
            seen.append(state)
            return answer

        return note

    assert await jobs.change("job", decide(None)) is None
    created = await jobs.change("job", decide(STATE))
    assert created is not None
    kept = await jobs.change("job", decide(None))
    assert kept == created == await jobs.read("job")
    changed = await jobs.change("job", decide(OTHER))
    assert changed is not None
    assert changed.state == OTHER
    assert seen == [None, None, STATE, STATE]
