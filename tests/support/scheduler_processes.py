"""Processes with the same scheduled jobs, and the check of what they did against the history."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import scheduler_worker
from processes import ProcessGroup, WorkerProcess
from worker_protocol import Fact

from jobsync import Components, HistoryEntry, open_store
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.operations import JobOperations

__all__ = ["SchedulerProcess", "SchedulerProcesses", "check_history", "check_runs"]

_PAGE = 500


class SchedulerProcess(WorkerProcess):
    """A process with a scheduler. It knows when it stood still."""

    skew: float = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._frozen: list[tuple[float, float]] = []

    def freeze(self) -> float:
        at = super().freeze()
        self._frozen.append((at, float("inf")))
        return at

    def thaw(self) -> float:
        at = super().thaw()
        self._frozen[-1] = (self._frozen[-1][0], at)
        return at

    def was_struck(self, begin: float, end: float) -> bool:
        """Whether it was killed, or stood still, at some moment between two."""
        if self.killed_at is not None and begin <= self.killed_at <= end:
            return True
        return any(since <= end and begin <= until for since, until in self._frozen)


class SchedulerProcesses(ProcessGroup[SchedulerProcess]):
    """Processes with the same jobs on one store."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        super().__init__(folder, SchedulerProcess)
        self.url = url
        self.settings = settings

    def add(self, skew: float = 0.0) -> SchedulerProcess:
        """Start a process without waiting for it."""
        worker = self.launch(
            scheduler_worker.__file__,
            "scheduler",
            url=self.url,
            settings=self.settings,
            skew=skew,
        )
        worker.skew = skew
        return worker

    async def start(self, skews: Sequence[float]) -> list[SchedulerProcess]:
        """Start processes; return when they have joined."""
        workers = [self.add(skew) for skew in skews]
        await self.reported("joined", workers)
        return workers

    def find(self, name: str) -> SchedulerProcess:
        """Return a process by name."""
        (worker,) = (each for each in self.workers if each.name == name)
        return worker

    async def read_history(self) -> dict[str, list[HistoryEntry]]:
        """Read the whole history, by job, the oldest first."""
        components = Components.system()
        store = await open_store(self.url, components)
        jobs = JobOperations(JobStore(lambda: store, "default", components), components, "test")
        found: dict[str, list[HistoryEntry]] = {}
        try:
            for name in scheduler_worker.JOBS:
                entries: list[HistoryEntry] = []
                after = ""
                while page := await jobs.history(name, limit=_PAGE, after=after):
                    entries += page
                    after = page[-1].cursor
                found[name] = entries[::-1]
        finally:
            await store.close()
        return found


class _Execution(NamedTuple):
    """One attempt, with the moments between which it ran."""

    worker: SchedulerProcess
    begun: Fact
    end: float


def check_history(history: Mapping[str, Sequence[HistoryEntry]]) -> Counter[str]:
    """Check that each second has one entry: a run that has ended, or a gap with its reason.

    Raises:
        AssertionError: an instant has no entry, or several; or a run has not ended.
    """
    counts: Counter[str] = Counter()
    for name, entries in history.items():
        decided: Counter[int] = Counter()
        for entry in entries:
            counts[entry.status] += entry.count
            assert entry.status != "running", f"{name}: {entry}"
            first = entry.scheduled_time if entry.first is None else entry.first
            instants = range(int(first), int(entry.scheduled_time) + 1)
            assert entry.is_counted, f"{name}: {entry}"
            assert len(instants) == entry.count, f"{name}: {entry}"
            assert entry.reason or entry.id, f"{name}: {entry}"
            decided.update(instants)
        twice = [instant for instant, times in decided.items() if times > 1]
        assert not twice, f"{name}: decided more than once: {twice}"
        missing = {*range(min(decided), max(decided) + 1)} - decided.keys()
        assert not missing, f"{name}: not in the history: {sorted(missing)}"
    return counts


def check_runs(
    processes: SchedulerProcesses, history: Mapping[str, Sequence[HistoryEntry]]
) -> Counter[str]:
    """Check what processes did against the history; return how often runs were resumed.

    Raises:
        AssertionError: an instant ran twice without a reason, is not in the history, or two runs
            of a job overlap that must not.
    """
    executions = _find_executions(processes)
    resumed = {(fact.who, fact["execution_id"]) for fact in processes.facts("job-resumed")}
    counts: Counter[str] = Counter()
    results = Counter(
        (f["job_name"], int(f["scheduled_time"])) for f in processes.facts("job-executed")
    )
    assert set(results.values()) <= {1}, f"stored twice: {results.most_common(3)}"
    for name, entries in history.items():
        fired = {int(entry.scheduled_time): entry for entry in entries if entry.id}
        own = [each for each in executions if each.begun["job"] == name]
        by_instant: dict[int, list[_Execution]] = defaultdict(list)
        for each in own:
            by_instant[each.begun["instant"]].append(each)
        unknown = by_instant.keys() - fired.keys()
        assert not unknown, f"{name}: ran, but is not in the history: {sorted(unknown)}"
        never = fired.keys() - by_instant.keys()
        assert not never, f"{name}: never ran: {[fired[instant] for instant in sorted(never)]}"
        for instant, runs in by_instant.items():
            assert {run.begun["id"] for run in runs} == {fired[instant].id}
            counts["resumed"] += _count_resumes(runs, resumed)
        if scheduler_worker.JOBS[name]["overlap"] != "allow":
            _check_overlap(own)
    return counts


def _find_executions(processes: SchedulerProcesses) -> list[_Execution]:
    ends = {(fact.who, fact["number"]): fact.at for fact in processes.facts("ended")}
    found = []
    for begun in processes.facts("begun"):
        worker = processes.find(begun.who)
        end = ends.get((begun.who, begun["number"]), worker.killed_at)
        assert end is not None, f"{begun} has no end, and nobody killed it"
        found.append(_Execution(worker, begun, end))
    return found


def _count_resumes(runs: Iterable[_Execution], resumed: Container[tuple[str, str]]) -> int:
    """Count how often a run was started again.

    Each time its process was struck before, and the next one has reported that it resumes it.
    """
    ordered = sorted(runs, key=lambda run: run.begun.at)
    resumes = 0
    for before, after in itertools.pairwise(ordered):
        is_retry = before.begun["attempt"] < after.begun["attempt"]
        if before.worker is after.worker:
            assert before.end <= after.begun.at, f"two attempts at once: {before} {after}"
            if is_retry:
                continue
        struck = before.worker.was_struck(before.begun.at, after.begun.at)
        assert struck, f"ran twice: {before} {after}"
        assert (after.begun.who, after.begun["id"]) in resumed, f"not resumed: {before} {after}"
        resumes += 1
    return resumes


def _check_overlap(executions: Iterable[_Execution]) -> None:
    """Check that runs follow each other, except beside one whose process stood still."""
    ordered = sorted(executions, key=lambda each: each.begun.at)
    last: _Execution | None = None
    for each in ordered:
        if last is not None and last.end > each.begun.at:
            struck = last.worker.was_struck(last.begun.at, each.begun.at)
            assert struck, f"overlapping: {last} {each}"
        if last is None or each.end > last.end:
            last = each
