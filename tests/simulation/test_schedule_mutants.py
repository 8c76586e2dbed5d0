"""Mutants of the scheduler: the simulated world must catch each.

A mutant that survives means that the world checks too little, not that the scheduler is safe. A
firing record that is written over another one is not a mutant: a state already lets only one
process fire an instant, and the record is there for states that were lost.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import schedule_stories
from msgspec.structs import replace
from mutants import is_caught

from jobsync.coordination import fleet_clock
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.term import Term
from jobsync.core import firing, job_changes
from jobsync.core.cron import Schedule
from jobsync.core.firing import MAX_RESUMES, Advance
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.scheduler import decider
from jobsync.scheduler.history import JobHistory
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore, StoredJob
from jobsync.scheduler.loop import FiringLoop
from jobsync.scheduler.manual_runs import ManualRuns
from jobsync.scheduler.plugin import SchedulerPlugin
from jobsync.scheduler.run_owners import RunOwners
from jobsync.scheduler.runs import KnownJob, Runs
from jobsync.stores.contract import Record
from jobsync.testing import check_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]


def writes_over_others(patch: pytest.MonkeyPatch) -> None:
    """A state replaces whichever is stored, not only the one that it was decided on."""

    async def write(self: JobStore, name: str, base: Record, state: JobState) -> StoredJob | None:
        current = await self.read(name)
        return await was(self, name, base if current is None else current.record, state)

    was = JobStore.replace
    patch.setattr(JobStore, "replace", write)


def forgets_what_it_fired(patch: pytest.MonkeyPatch) -> None:
    """An instant that is fired is not the last decided one."""

    def advance(name: str, state: JobState, now: float, **options: Any) -> Advance:
        result = firing.advance(name, state, now, **options)
        last = state.last if result.starts else result.state.last
        return Advance(replace(result.state, last=last), result.starts, result.lost)

    patch.setattr(decider, "advance", advance)


def records_no_gaps(patch: pytest.MonkeyPatch) -> None:
    """Instants that are not fired are passed over."""

    def add(state: JobState, until: int, *_: object) -> JobState:
        return replace(state, last=max(state.last, until))

    patch.setattr(firing, "add_gap", add)
    patch.setattr(job_changes, "add_gap", add)


def forgets_gaps(patch: pytest.MonkeyPatch) -> None:
    """Gaps are removed from a state and not added to the history."""

    async def write(self: JobCache, name: str, _: float) -> None:
        await self.update(name, lambda state: firing.drop_noted(state, state.gaps, ()))

    patch.setattr(JobCache, "write_history", write)


def notes_too_much_progress(patch: pytest.MonkeyPatch) -> None:
    """A leader notes that all runs have ended, while some have not."""

    async def put(self: Term, key: str, value: Any) -> None:
        await was(self, key, {**value, "open": []} if key.endswith("/progress") else value)

    was = Term.put
    patch.setattr(Term, "put", put)


def ends_starts_with_their_callers(patch: pytest.MonkeyPatch) -> None:
    """A run by hand that is being recorded is not started if its caller is cancelled."""

    async def start(self: ManualRuns, job: KnownJob, data: Any) -> Any:
        (run_id,) = self._components.ids.records(1)
        while (task := await self._start(job, run_id, data)) is None:
            await self._components.clock.sleep(0.1)
        return task

    patch.setattr(ManualRuns, "_start_soon", start)


def announces_no_run(patch: pytest.MonkeyPatch) -> None:
    """Nobody knows which jobs a process runs by hand."""

    async def announce(_: ManualRuns, *__: str) -> None:
        return

    patch.setattr(ManualRuns, "_announce", announce)


def prunes_by_an_older_state(patch: pytest.MonkeyPatch) -> None:
    """Retention reads which runs go on before it lists their records."""

    async def prune(self: JobHistory, name: str, list_running: Any, **options: Any) -> int:
        running = await list_running()

        async def repeat() -> Any:
            return running

        return await was(self, name, repeat, **options)

    was = JobHistory.prune
    patch.setattr(JobHistory, "prune", prune)


def writes_no_losses(patch: pytest.MonkeyPatch) -> None:
    """The record of a run that was given up is left as it is."""

    async def write(*_: Any) -> None:
        return

    patch.setattr(JobHistory, "write_loss", write)


def forgets_losses(patch: pytest.MonkeyPatch) -> None:
    """A run that is given up leaves the state before its record says so."""

    def advance(name: str, state: JobState, now: float, **options: Any) -> Advance:
        result = firing.advance(name, state, now, **options)
        return Advance(replace(result.state, lost=()), result.starts, result.lost)

    patch.setattr(decider, "advance", advance)


def resumes_runs_of_the_living(patch: pytest.MonkeyPatch) -> None:
    """A run of another process is taken over, whether that process is dead or not."""

    def is_orphan(self: RunOwners, run: ActiveRun, _: Collection[str]) -> bool:
        return run.owner != self._membership.incarnation or not self._runs.has(run.id)

    patch.setattr(RunOwners, "is_orphan", is_orphan)


def believes_its_list_of_the_living(patch: pytest.MonkeyPatch) -> None:
    """A process that is not in this process's list is dead, although the list is incomplete."""

    async def find(self: RunOwners, state: JobState) -> set[str]:
        owners = {run.owner for run in state.running}
        return owners - {self._membership.incarnation, *self._membership.living}

    patch.setattr(RunOwners, "find_gone", find)


def resumes_no_run(patch: pytest.MonkeyPatch) -> None:
    """A run whose process died is left alone."""
    patch.setattr(RunOwners, "is_orphan", lambda *_: False)


def takes_back_what_others_resumed(patch: pytest.MonkeyPatch) -> None:
    """A process that stood still claims a firing record that another one has claimed since."""

    async def claim(self: Runs, name: str, run: ActiveRun) -> Any:
        return await was(self, name, replace(run, resumed=MAX_RESUMES + 1))

    was = Runs._claim_record
    patch.setattr(Runs, "_claim_record", claim)


def starts_its_own_runs_again(patch: pytest.MonkeyPatch) -> None:
    """A run of this process is started again whenever the job is looked at."""

    def is_orphan(self: RunOwners, run: ActiveRun, gone: Collection[str]) -> bool:
        return run.owner == self._membership.incarnation or was(self, run, gone)

    was = RunOwners.is_orphan
    patch.setattr(RunOwners, "is_orphan", is_orphan)


def ignores_overlaps(patch: pytest.MonkeyPatch) -> None:
    """An instant is started although the run before has not ended."""

    def choose(state: JobState, *arguments: Any) -> ActiveRun | None:
        return was(replace(state, running=()), *arguments)

    was = firing._choose_next
    patch.setattr(firing, "_choose_next", choose)


def catches_up_on_everything(patch: pytest.MonkeyPatch) -> None:
    """All late instants are fired."""

    def find(self: Schedule, after: int, until: int, limit: int) -> list[int]:
        return was(self, after, until, 100 * limit)

    was = Schedule.newest_between
    patch.setattr(Schedule, "newest_between", find)


def fires_what_is_long_past(patch: pytest.MonkeyPatch) -> None:
    """A late instant is fired although the job says that late ones are skipped."""
    patch.setattr(firing, "MAX_LATENESS", 10**9)


def fires_the_past_of_a_new_schedule(patch: pytest.MonkeyPatch) -> None:
    """A changed schedule is due from the last decided instant on."""
    patch.setattr(job_changes, "_skip_past", lambda state, *_: state)


def fires_too_early(patch: pytest.MonkeyPatch) -> None:
    """Instants are due some seconds before their time."""
    was = FleetClock.now
    patch.setattr(FleetClock, "now", lambda self: was(self) + 1.6)


def ignores_its_jitter(patch: pytest.MonkeyPatch) -> None:
    """An instant is fired without its jitter."""
    patch.setattr(firing, "due_time", lambda _name, _definition, _schedule, instant: instant)


def trusts_a_wrong_clock(patch: pytest.MonkeyPatch) -> None:
    """A process fires by its clock, however far that is off."""
    patch.setattr(FleetClock, "veto", "")


def leads_idly_after_an_outage(patch: pytest.MonkeyPatch) -> None:
    """A process fires only in its first term."""

    def assign(self: SchedulerPlugin) -> None:
        if self not in assigned:
            assigned.append(self)
            was(self)

    assigned: list[SchedulerPlugin] = []
    was = SchedulerPlugin._assign
    patch.setattr(SchedulerPlugin, "_assign", assign)


class _ByName(dict[str, None]):
    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def serves_jobs_by_name(patch: pytest.MonkeyPatch) -> None:
    """Of the jobs that wait for room, the first by name gets it."""

    def build(self: FiringLoop, *arguments: Any) -> None:
        was(self, *arguments)
        self._waiting = _ByName()

    was = FiringLoop.__init__
    patch.setattr(FiringLoop, "__init__", build)


def believes_its_own_clock(patch: pytest.MonkeyPatch) -> None:
    """Between two comparisons a process takes its clock for as exact as the store's."""
    patch.setattr(fleet_clock, "_DRIFT", 0.0)


KILLED: dict[Patch, tuple[Story, int, str]] = {
    writes_over_others: (schedule_stories.standalone, 0, "K1"),
    forgets_what_it_fired: (schedule_stories.rare, 0, "K1"),
    records_no_gaps: (schedule_stories.outage, 0, "K2"),
    forgets_gaps: (schedule_stories.outage, 0, "K2"),
    notes_too_much_progress: (schedule_stories.rare, 0, "KL2"),
    ends_starts_with_their_callers: (schedule_stories.runs_by_hand, 0, "KL2"),
    announces_no_run: (schedule_stories.dies_by_hand, 1, "KL2"),
    prunes_by_an_older_state: (schedule_stories.forgets_history, 0, "K8"),
    writes_no_losses: (schedule_stories.runs_by_hand, 0, "K2"),
    forgets_losses: (schedule_stories.runs_by_hand, 0, "KL3"),
    resumes_runs_of_the_living: (schedule_stories.standalone, 0, "K4"),
    believes_its_list_of_the_living: (schedule_stories.standalone, 0, "K4"),
    resumes_no_run: (schedule_stories.rare, 0, "KL2"),
    takes_back_what_others_resumed: (schedule_stories.wakes_late, 0, "K4"),
    starts_its_own_runs_again: (schedule_stories.begins, 0, "K8"),
    ignores_overlaps: (schedule_stories.begins, 0, "K4"),
    catches_up_on_everything: (schedule_stories.outage, 0, "K6"),
    fires_what_is_long_past: (schedule_stories.downtime, 0, "K6"),
    fires_the_past_of_a_new_schedule: (schedule_stories.edits, 0, "K7"),
    fires_too_early: (schedule_stories.edits, 0, "K3"),
    ignores_its_jitter: (schedule_stories.begins, 0, "K3"),
    trusts_a_wrong_clock: (schedule_stories.skewed_buckets, 0, "K3"),
    leads_idly_after_an_outage: (schedule_stories.outage, 2, "KL1"),
    serves_jobs_by_name: (schedule_stories.crowded, 0, "K2"),
    believes_its_own_clock: (schedule_stories.fast_clocks, 0, "K3"),
}
"""For each mutant a story and a seed that catch it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, seed, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant, first=seed)


@pytest.mark.parametrize(
    ("story", "seed"),
    dict.fromkeys((story, seed) for story, seed, _ in KILLED.values() if seed),
    ids=lambda each: each.__name__ if callable(each) else str(each),
)
def test_the_killers_find_nothing_in_the_real_scheduler(story: Story, seed: int) -> None:
    """Without a mutation these stories report nothing; `test_schedule` runs all with seed 0."""
    check_story(story, [seed])
