"""When the old history of a job is removed, without a store."""

import asyncio
import random
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync.components import Components
from jobsync.errors import Corrupt, OutcomeUnknown, Unavailable
from jobsync.events import Events
from jobsync.scheduler.retention import HistoryRetention

DAY = 86_400.0


class Jobs:
    """Counts the removals of each job, and fails if it is told to."""

    def __init__(self) -> None:
        self.pruned: list[tuple[str, int, float]] = []
        self.failures: list[Exception] = []
        self.reported: list[str] = []

    async def prune(self, name: str, *, keep: int, oldest: float) -> int:
        """Note a removal."""
        if self.failures:
            raise self.failures.pop()
        self.pruned.append((name, keep, oldest))
        return 0

    def report(self, name: str, _: Exception) -> None:
        """Note a job that cannot be read."""
        self.reported.append(name)


class Clock:
    """A clock that a test sets."""

    seconds = 100 * DAY
    veto = ""
    vetoes = 0
    """How many comparisons keep the veto that it has."""

    def now(self) -> float:
        """Return the time."""
        return self.seconds

    async def refresh(self) -> None:
        """Compare the clocks: after so many comparisons they agree."""
        self.vetoes -= 1
        if self.vetoes < 0:
            self.veto = ""


class Stage:
    """A retention that runs, for one job."""

    def __init__(self, keep: int = 1000) -> None:
        self.jobs, self.clock, self.runs = Jobs(), Clock(), 0
        self.pauses = FakeClock()
        components = Components(clock=self.pauses, randomness=SeededRandomness(0), events=Events())
        parts: Any = (self.jobs, self.clock, components)
        self.retention = HistoryRetention(*cast("Any", parts), keep=keep, max_age=30 * DAY)

    async def run(self, runs: int = 0, gaps: int = 0) -> int:
        """Note runs and gaps; return how many removals follow."""
        before = len(self.jobs.pruned)
        for _ in range(runs):
            self.runs += 1
            self.retention.note_run("job", self.runs)
        for _ in range(gaps):
            self.retention.note_gap("job")
        task = asyncio.create_task(self.retention.run())
        for _ in range(10 + runs + gaps):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        return len(self.jobs.pruned) - before


@pytest.mark.parametrize(("keep", "every"), [(1, 10), (10, 10), (100, 10), (300, 30), (9000, 50)])
async def test_it_follows_a_tenth_of_the_limit(keep: int, every: int) -> None:
    """At least 10 runs and at most 50. Found: it was 50 for each limit, so ten became sixty."""
    stage = Stage(keep)
    assert await stage.run(runs=every - 1) == 0
    assert await stage.run(runs=1) == 1
    assert await stage.run(runs=3 * every) == 3
    assert await stage.run(gaps=every - 1) == 0
    assert await stage.run(gaps=1) == 1
    assert await stage.run(gaps=3 * every) == 3
    assert {(name, count) for name, count, _ in stage.jobs.pruned} == {("job", keep)}


async def test_it_follows_a_day_of_a_job_that_runs_rarely() -> None:
    """Found: a weekly job kept a year's runs, although 30 days are configured."""
    stage = Stage()
    assert await stage.run(runs=1) == 0
    stage.clock.seconds += DAY - 1
    assert await stage.run(runs=1) == 0
    stage.clock.seconds += 1
    assert await stage.run(runs=2) == 1
    assert stage.jobs.pruned == [("job", 1000, 71 * DAY)]


async def test_a_name_that_is_used_again_begins_anew() -> None:
    """What the job before had is not counted against the new one."""
    stage = Stage(10)
    assert await stage.run(runs=45, gaps=15) == 5
    stage.retention.forget("job")
    stage.runs = 0
    assert await stage.run(runs=9, gaps=9) == 0
    assert await stage.run(runs=1, gaps=1) == 2


@pytest.mark.parametrize("events", [{"runs": 10}, {"gaps": 10}])
async def test_nothing_is_old_by_a_wrong_clock(events: dict[str, int]) -> None:
    """A process whose clock is ahead also runs jobs by hand."""
    stage = Stage(10)
    stage.clock.veto, stage.clock.vetoes = "its clock is 90 s ahead", 10**6
    assert await stage.run(**events) == 0
    stage.clock.vetoes = 0
    assert await stage.run() == 1


async def test_a_removal_under_a_veto_is_tried_again() -> None:
    """After pauses, without further runs. Found: it was left to the next ten runs."""
    stage = Stage(10)
    stage.clock.veto, stage.clock.vetoes = "the time is not known yet", 2
    began = stage.pauses.mono_seconds
    assert await stage.run(runs=10) == 1
    assert 0 < stage.pauses.mono_seconds - began <= 0.5 + 1.0
    assert stage.jobs.pruned == [("job", 10, 70 * DAY)]
    assert await stage.run(runs=9) == 0


async def test_a_removal_without_an_answer_is_tried_again() -> None:
    """After pauses, without further runs. Found: it was left to the next ten runs."""
    stage = Stage(10)
    down = [Unavailable("store", "it is down", "wait"), OutcomeUnknown("key")]
    stage.jobs.failures = [*down]
    began = stage.pauses.mono_seconds
    assert await stage.run(runs=10) == 1
    assert stage.jobs.failures == []
    assert 0 < stage.pauses.mono_seconds - began <= 0.5 + 1.0
    assert await stage.run(runs=9) == 0


async def test_each_outage_begins_with_a_short_pause() -> None:
    """Pauses grow while the store does not answer, up to half a minute, and not beyond that."""
    stage = Stage(10)
    down = Unavailable("store", "it is down", "wait")
    task = asyncio.create_task(stage.retention.run())
    for failures, most in ((1, 0.5), (12, 300.0), (1, 0.5), (2, 1.5), (1, 0.5)):
        began, pruned = stage.pauses.mono_seconds, len(stage.jobs.pruned)
        stage.jobs.failures = [down] * failures
        for _ in range(10):
            stage.runs += 1
            stage.retention.note_run("job", stage.runs)
        for _ in range(10 * failures + 10):
            await asyncio.sleep(0)
        assert len(stage.jobs.pruned) == pruned + 1
        assert 0 < stage.pauses.mono_seconds - began <= most
    task.cancel()
    await asyncio.wait([task])


async def test_a_job_that_cannot_be_read_is_reported() -> None:
    """Trying again would not help; its next runs do."""
    stage = Stage(10)
    stage.jobs.failures = [Corrupt("key", "damaged")]
    assert await stage.run(runs=10) == 0
    assert stage.jobs.reported == ["job"]
    assert await stage.run(runs=10) == 1


@pytest.mark.parametrize("runs", [1, 2, 5, 9])
async def test_what_is_old_is_removed_however_short_processes_live(runs: int) -> None:
    """Found: nothing was, if each of them saw fewer than ten runs, and less than a day."""
    total = 0
    for process in range(3):
        stage = Stage()
        stage.runs = total
        # Before the first run ever there is nothing that could be old.
        assert await stage.run(runs=runs) == min(process, 1)
        total += runs


@pytest.mark.parametrize("keep", [1, 10, 1000])
@pytest.mark.parametrize("deaths", [0.02, 0.3])
async def test_several_processes_exceed_the_limit_by_no_more_than_one(
    keep: int, deaths: float
) -> None:
    """Whichever of them runs the job next, and whoever is killed before it has removed anything."""
    dice = random.Random(keep)
    most = min(50, max(10, keep // 10))
    stages = [Stage(keep) for _ in range(3)]
    stored = total = 0
    for _ in range(20 * most):
        total, stored = total + 1, stored + 1
        stage = dice.choice(stages)
        before = len(stage.jobs.pruned)
        stage.runs = total - 1
        if await stage.run(runs=1):
            stored = min(stored, keep)
        assert len(stage.jobs.pruned) - before <= 1
        assert stored <= keep + most
        if dice.random() < deaths:
            # Its successor prunes at its first run, if there may be anything.
            stages[stages.index(stage)] = Stage(keep)
