"""States of jobs that several processes change, over a store that loses replies."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, Gap, JobDefinition, JobState, RunStatus
from jobsync.errors import Corrupt, JobsyncError, NewerFormat, Unavailable
from jobsync.scheduler.history import JobHistory, build_entry
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore
from jobsync.stores.contract import Change, Outcome, Record, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

RUN = ActiveRun(id="run", instant=60, owner="me", started_at=60.0)


class SlowStore(StoreDecorator):
    """Delays one write until it is told to send it; its caller gets no answer."""

    delayed: Sequence[Change] | None = None
    is_losing = False
    is_down = False

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if not self.is_losing:
            return await super().write(changes)
        self.is_losing, self.is_down, self.delayed = False, True, changes
        return [Unknown("no answer")]

    async def get_many(self, keys: Sequence[str], **options: Any) -> list[Record | None]:
        if self.is_down:
            raise Unavailable("the store", "it does not answer", "wait")
        return await super().get_many(keys, **options)

    async def deliver(self) -> Outcome:
        assert self.delayed is not None
        (outcome,) = await super().write(self.delayed)
        return outcome


def start(state: JobState) -> JobState | None:
    """Record a run, unless it is recorded."""
    if state.find_run(RUN.id) is not None:
        return None
    return msgspec.structs.replace(state, running=(RUN,))


@pytest.mark.parametrize("is_applied", [False, True])
async def test_a_write_without_an_answer_is_closed_before_anything_else(is_applied: bool) -> None:
    """Otherwise a start could still be recorded that nobody runs."""
    components = Components.system()
    store = SlowStore(MemoryStore(components=components))
    jobs = JobStore(lambda: store, "default", components)
    state = JobState(definition=JobDefinition(schedule="@daily"), defined_by="", last=0)
    await jobs.create_many({"job": state})
    cache = JobCache(jobs, lambda *_: None)
    store.is_losing = True
    with pytest.raises(Unavailable):
        await cache.update("job", start)
    assert cache.is_unsure("job")
    store.is_down = False
    if is_applied:
        await store.deliver()
    # By now the process does not want to start anything.
    seen: list[bool] = []
    stored = await cache.update("job", lambda state: seen.append(bool(state.running)))
    assert stored is not None
    assert seen == [is_applied] == [bool(stored.state.running)]
    assert not cache.is_unsure("job")
    await store.deliver()
    read = await jobs.read("job")
    assert read is not None
    assert bool(read.state.running) == is_applied


async def test_a_lost_run_stays_in_the_state_until_its_record_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: one refused request left the history at "running" for ever."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    definition = JobDefinition(schedule="@daily")
    await jobs.create_many({"job": JobState(definition=definition, defined_by="", last=0)})
    await jobs.history.create("job", RUN, "w1")
    cache = JobCache(jobs, lambda *_: None)
    await cache.update("job", lambda state: msgspec.structs.replace(state, lost=(RUN,)))

    async def refuse(*_: Any) -> None:
        raise Unavailable("the store", "one request was refused", "wait")

    with monkeypatch.context() as patch:
        patch.setattr(JobHistory, "write", refuse)
        with pytest.raises(Unavailable):
            await cache.write_history("job", 90.0)
    assert [run.id for run in cache.known["job"].state.lost] == ["run"]
    await cache.write_history("job", 90.0)
    assert not cache.known["job"].state.lost
    (entry,) = await jobs.history.list_entries("job")
    assert (entry.status, entry.error, entry.ended_at) == ("lost", "its process has ended", 90.0)


async def test_a_lost_run_that_had_not_begun_gets_a_record() -> None:
    """A late start of its process finds the record, and does not begin."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    await jobs.history.write_loss("job", RUN, "its process has ended", 90.0)
    (entry,) = await jobs.history.list_entries("job")
    assert (entry.id, entry.status) == ("run", "lost")
    assert await jobs.history.create("job", RUN, "w1") is None


@pytest.mark.parametrize(
    ("found", "after"),
    [
        (("run", "running"), ("run", "lost")),
        (("run", "success"), ("run", "success")),
        (("run", "lost"), ("run", "lost")),
        # Another run had fired the instant before.
        (("another", "running"), ("another", "running")),
        (("another", "error"), ("another", "error")),
    ],
)
async def test_a_loss_is_written_into_the_record_of_its_run_alone(
    found: tuple[str, RunStatus], after: tuple[str, str]
) -> None:
    """A result, and what another run is about to write, stay."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    other = msgspec.structs.replace(RUN, id=found[0])
    await jobs.history.create_entry("job", other, build_entry(other, found[1]))
    await jobs.history.write_loss("job", RUN, "its process has ended", 90.0)
    (entry,) = await jobs.history.list_entries("job")
    assert (entry.id, entry.status) == after
    assert (entry.error == "its process has ended") is (found == ("run", "running"))


async def test_jobs_that_are_not_being_changed_have_no_lock() -> None:
    """Found: each job that was ever changed had one, also if it was removed."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    state = JobState(definition=JobDefinition(schedule="@daily"), defined_by="", last=0)
    await jobs.create_many({"job": state})
    cache = JobCache(jobs, lambda *_: None)
    await cache.update("job", start)
    assert len(cache._locks) == 0


@pytest.mark.parametrize("meanwhile", [("running", "lost"), ("success", "success")])
@pytest.mark.parametrize("is_created", [False, True])
async def test_a_loss_that_meets_another_write_is_judged_again(
    monkeypatch: pytest.MonkeyPatch, meanwhile: tuple[RunStatus, str], is_created: bool
) -> None:
    """The process of the run has begun or ended it since the record was read."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    if not is_created:
        await jobs.history.create("job", RUN, "w1")
    reads, read = [0], JobHistory.read

    async def write_meanwhile(history: JobHistory, name: str, run: ActiveRun) -> Any:
        reads[0] += 1
        found = await read(history, name, run)
        if reads[0] == 1:
            entry = build_entry(run, meanwhile[0], worker_id="w2")
            if found is None:
                assert await history.create_entry(name, run, entry)
            else:
                assert await history.write(found[0], entry)
        return found

    monkeypatch.setattr(JobHistory, "read", write_meanwhile)
    await jobs.history.write_loss("job", RUN, "its process has ended", 90.0)
    (entry,) = await jobs.history.list_entries("job")
    assert (entry.status, entry.worker_id) == (meanwhile[1], "w2")


async def test_what_comes_while_the_history_is_written_stays_in_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not in the history yet: the next time writes it."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    gaps = [Gap(first=at, last=at, count=1, reason="late") for at in (120, 180)]
    runs = [RUN, msgspec.structs.replace(RUN, id="later", instant=240)]
    state = JobState(definition=JobDefinition(schedule="@daily"), defined_by="", last=0)
    state = msgspec.structs.replace(state, gaps=(gaps[0],), lost=(runs[0],))
    await jobs.create_many({"job": state})
    cache = JobCache(jobs, lambda *_: None)
    await cache.read("job")
    write_gap = JobHistory.write_gap

    async def add_meanwhile(history: JobHistory, name: str, gap: Gap) -> bool:
        await cache.update(
            name, lambda state: msgspec.structs.replace(state, gaps=(*gaps,), lost=(*runs,))
        )
        return await write_gap(history, name, gap)

    with monkeypatch.context() as patch:
        patch.setattr(JobHistory, "write_gap", add_meanwhile)
        await cache.write_history("job", 300.0)
    left = cache.known["job"].state
    assert (left.gaps, left.lost) == ((gaps[1],), (runs[1],))
    await cache.write_history("job", 300.0)
    assert not cache.known["job"].state.is_open
    found = [entry.scheduled_time for entry in await jobs.history.list_entries("job")]
    assert found == [240, 180, 120, 60]


@pytest.mark.parametrize("error", [Corrupt("key", "damaged"), NewerFormat("key", 9, 1)])
async def test_a_record_that_cannot_be_read_keeps_no_other_loss_from_being_noted(
    monkeypatch: pytest.MonkeyPatch, error: JobsyncError
) -> None:
    """Nobody can say so in that record. The job goes on."""
    components = Components.system()
    store = MemoryStore(components=components)
    jobs = JobStore(lambda: store, "default", components)
    later = msgspec.structs.replace(RUN, id="later", instant=240)
    state = JobState(definition=JobDefinition(schedule="@daily"), defined_by="", last=0)
    await jobs.create_many({"job": msgspec.structs.replace(state, lost=(RUN, later))})
    cache, read = JobCache(jobs, lambda *_: None), JobHistory.read
    await cache.read("job")

    async def refuse(history: JobHistory, name: str, run: ActiveRun) -> Any:
        if run == RUN:
            raise error
        return await read(history, name, run)

    monkeypatch.setattr(JobHistory, "read", refuse)
    await cache.write_history("job", 300.0)
    assert not cache.known["job"].state.lost
    assert [entry.id for entry in await jobs.history.list_entries("job")] == ["later"]
