"""The status of scheduled jobs, from what sessions and roles say."""

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.job_state import (
    ActiveRun,
    Gap,
    JobDefinition,
    JobPause,
    JobState,
    LastRun,
    Statistics,
)
from jobsync.core.trust import Timing
from jobsync.errors import Invalid, NotFound
from jobsync.scheduler.job_store import JobStore
from jobsync.status.schedules import ScheduledJobStatus, SchedulesStatus, read_schedules_status
from jobsync.status.why import explain
from jobsync.stores.contract import Record
from jobsync.stores.memory import MemoryStore

ROLE = "default/scheduler"
HOURLY = JobDefinition(schedule="@hourly")


class Place:
    """A store with jobs and sessions that nobody keeps alive."""

    def __init__(self) -> None:
        self.components = Components.system()
        self.store = MemoryStore()
        self.now = self.components.clock.wall().seconds

    def open(self, namespace: str = "default") -> JobStore:
        """Return the jobs of a namespace."""
        return JobStore(lambda: self.store, namespace, self.components)

    async def add_job(self, name: str, namespace: str = "default", **fields: Any) -> None:
        """Store a job that is up to date."""
        defaults = {"definition": HOURLY, "defined_by": "", "last": int(self.now)}
        state = JobState(**{**defaults, **fields})
        await self.open(namespace).create_many({name: state})

    async def add_worker(
        self, name: str, jobs: list[str], facts: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        """Store a live session whose process has some jobs."""
        digest = f"code-of-{name}"
        await self.open().code.write(digest, jobs, 0.0)
        session = {
            "worker": name,
            "state": "live",
            "beat": 1,
            "timing": msgspec.to_builtins(Timing(heartbeat=5.0, timeout=15.0)),
            "works": [ROLE],
            "facts": {"schedule default": digest, **(facts or {})},
            **fields,
        }
        await self.store.create(f"session/{name}.1", session)

    async def set_leader(self, owner: str | None, *past: dict[str, Any]) -> None:
        """Store who leads."""
        times = {"since": 50.0, "until": 100.0, "timeout": 15.0}
        role = {"epoch": 1, "owner": owner, **times, "past": past}
        await self.store.create(f"role/{ROLE}", role)

    async def read(self) -> SchedulesStatus:
        """Read the status."""
        return await read_schedules_status(self.store, self.components)

    async def read_job(self, name: str) -> ScheduledJobStatus:
        """Read the status of one job."""
        return await (await self.read()).job(name)


async def test_workers_are_those_whose_code_has_the_job() -> None:
    """Of several processes, and of two versions of the code."""
    place = Place()
    for name in ("a", "b", "c"):
        await place.add_job(name)
    await place.add_worker("w1", ["a"])
    await place.add_worker("w2", ["a", "b"])
    await place.add_worker("dead", ["c"], state="dead")
    await place.set_leader("w1.1")
    jobs = {job.name: job for job in await (await place.read()).jobs()}
    assert {name: job.workers for name, job in jobs.items()} == {
        "a": ("w1", "w2"),
        "b": ("w2",),
        "c": (),
    }
    assert explain(await place.read_job("b")).code == "scheduled"
    assert explain(await place.read_job("c")).code == "no-code"
    scheduler = jobs["a"].scheduler
    assert (scheduler.workers, scheduler.leader, scheduler.independent) == (("w1", "w2"), "w1", ())


async def test_a_worker_that_stands_back_is_the_reason() -> None:
    """Since the end of its term, as long as nobody else leads."""
    place = Place()
    await place.add_job("a")
    why = "this machine's clock is 90 s behind"
    await place.add_worker("w1", ["a"], {"withheld": {ROLE: why}}, works=[])
    await place.set_leader(
        None, {"epoch": 1, "worker": "w1", "since": 1.0, "ended": 50.0, "why": why}
    )
    # It stands back no longer: it is dead.
    await place.add_worker("w0", ["a"], {"withheld": {ROLE: "none"}}, works=[], state="dead")
    status = await place.read_job("a")
    assert status.scheduler.withheld == {"w1": why}
    reason = explain(status)
    assert (reason.code, reason.since) == ("vetoed", 50.0)
    assert reason.text.endswith(f"w1 stands back: {why}")


@pytest.mark.parametrize("ended", [2.0, 50.0])
async def test_nobody_leads_after_the_leader_has_died(ended: float) -> None:
    """When it died is not known, also if it had taken the role from a dead one."""
    place = Place()
    await place.add_job("a")
    await place.add_worker("w1", ["a"])
    await place.add_worker("w2", ["a"], state="dead", works=[])
    past = {"epoch": 0, "worker": "w0", "since": 1.0, "ended": ended, "why": "stopped"}
    await place.set_leader("w2.1", past)
    reason = explain(await place.read_job("a"))
    assert (reason.code, reason.since) == ("no-coordinator", None)


async def test_a_process_without_an_election_fires() -> None:
    """It is a candidate for nothing, and no role exists."""
    place = Place()
    await place.add_job("a")
    await place.add_worker("w1", ["a"], works=[])
    status = await place.read_job("a")
    assert status.scheduler.independent == ("w1",)
    assert explain(status).code == "scheduled"


async def test_a_late_job_counts_what_runs_in_its_process() -> None:
    """Only where it would be fired."""
    place = Place()
    await place.add_worker("w1", ["a", "b", "c"])
    await place.add_worker("w2", ["a", "b", "c"])
    await place.set_leader("w1.1")
    await place.add_job("a", last=int(place.now) - 7200)
    for name, owner in (("b", "w1.1"), ("c", "w2.1")):
        run = ActiveRun(id=name, instant=1, owner=owner, started_at=1.0)
        await place.add_job(name, running=(run,))
    status = await place.read_job("a")
    assert (status.busy, explain(status).code) == (1, "waiting")


async def test_each_owner_of_a_run_is_told_with_its_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that sends no heartbeats is not dead; one whose session is gone is left out."""
    place = Place()
    names = ("live", "silent", "dead", "gone")
    for name in names[:3]:
        await place.add_worker(name, ["a"], state="dead" if name == "dead" else "live")
    runs = [ActiveRun(id=name, instant=1, owner=f"{name}.1", started_at=1.0) for name in names]
    await place.add_job("a", running=tuple(runs))

    async def read_age(record: Record) -> float:
        return 16.0 if "silent" in record.key else 1.0

    monkeypatch.setattr(place.store, "age", read_age)
    owners = (await place.read_job("a")).owners
    assert owners == {f"{name}.1": name for name in names[:3]}


@pytest.mark.parametrize(("seconds", "shown"), [(2.5, 2.5), (0.0, 0.0), (-3.0, 0.0)])
async def test_a_run_takes_no_less_than_no_time(seconds: float, shown: float) -> None:
    """Also if the clock of its machine was set back meanwhile."""
    place = Place()
    run = LastRun(id="r", instant=1, status="success", started_at=10.0, ended_at=10.0 + seconds)
    await place.add_job("a", statistics=Statistics(runs=1, last_run=run))
    await place.add_job("b")
    await place.add_worker("w1", ["a", "b"])
    assert (await place.read_job("a")).last_duration == shown
    assert (await place.read_job("b")).last_duration is None


async def test_the_newest_gap_is_found_in_the_state_and_in_the_history() -> None:
    """The state's are not in the history yet."""
    place = Place()
    old = Gap(first=100, last=200, count=2, reason="old", is_counted=False)
    new = Gap(first=300, last=400, count=2, reason="new", kind="skipped")
    await place.add_job("a")
    await place.open().history.write_gap("a", old)
    await place.add_job("b", gaps=(new,))
    await place.open().history.write_gap("b", old)
    await place.add_worker("w1", ["a", "b"])
    await place.add_job("c", gaps=(old, new))
    assert (await place.read_job("a")).gap == old
    assert (await place.read_job("b")).gap == new
    assert (await place.read_job("c")).gap == new


@pytest.mark.parametrize("kinds", list(itertools.product(["missed", "skipped"], repeat=2)))
async def test_the_newest_gap_of_the_history_is_missed_or_skipped(
    kinds: tuple[Literal["missed", "skipped"], ...],
) -> None:
    """Whatever those before were, and however many runs have followed."""
    place = Place()
    await place.add_worker("w1", ["a"])
    await place.add_job("a")
    gaps = [
        Gap(first=100 * at, last=100 * at, count=1, reason="why", kind=kind)
        for at, kind in enumerate(kinds, start=1)
    ]
    for gap in gaps:
        await place.open().history.write_gap("a", gap)
    for at in (250, 350):
        run = ActiveRun(id=f"r{at}", instant=at, owner="w", started_at=1.0)
        await place.open().history.create("a", run, "w")
    assert (await place.read_job("a")).gap == gaps[-1]


async def test_a_name_is_looked_up_in_all_namespaces() -> None:
    """If several have it, one must be chosen; one that was removed does not count."""
    place = Place()
    await place.add_job("a")
    await place.add_job("b")
    for namespace in ("billing", "default"):
        await place.open(namespace).code.write("code", [], 0.0)
    await place.add_job("a", "billing")
    await place.add_job("b", "billing", is_removed=True)
    status = await place.read()
    assert status.namespaces == ("billing", "default")
    assert (await status.job("b")).namespace == "default"
    assert (await status.job("b", "billing")).marks == ("removed", "no process")
    assert (await status.job("a", "billing")).namespace == "billing"
    with pytest.raises(Invalid, match="billing and default have a job 'a'"):
        await status.job("a")
    with pytest.raises(NotFound, match="Known: a, b"):
        await status.job("zzz")
    with pytest.raises(NotFound, match="Did you mean billing"):
        await status.jobs("biling")


async def test_a_listing_computes_only_as_many_runs_as_it_shows() -> None:
    """Found: five were computed for each of 10,000 jobs, and one is shown."""
    place = Place()
    await place.add_job("on-time")
    await place.add_job("late", last=int(place.now) - 7200)
    await place.add_job("paused", pause=JobPause(at=place.now))
    status = await place.read()
    few, all_of_them = await status.jobs(upcoming=1), await status.jobs()
    for short, full in zip(few, all_of_them, strict=True):
        assert short.job.next_runs == full.job.next_runs[:1]
        assert (short.due, short.next_fire) == (full.due, full.next_fire)
        assert len(full.job.next_runs) == (0 if full.name == "paused" else 5)
