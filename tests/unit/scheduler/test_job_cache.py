"""States of jobs that several processes change, over a store that loses replies."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, JobDefinition, JobState, RunStatus
from jobsync.errors import Unavailable
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
