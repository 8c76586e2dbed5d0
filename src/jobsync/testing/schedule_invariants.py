"""What must hold for scheduled jobs in every history, whatever the weather.

The checks go by the records, in the order in which the store committed them, and by what actions
have noted. They restate the rules apart from the code that follows them, which is what makes them
a check. Each function returns the violations that it finds.

A job's state may change only so:

    last             grows; each instant that it passes is fired, queued, or in a new gap
    queued ──▶       running, or a gap
    running ──▶      ended, if its record has a result; lost, if its owner is dead
    running ──▶      another owner's, if its owner is dead or has released it
    gap, lost ──▶    forgotten, if the history says so

A story notes what the records do not tell:

    asked, answered  a process has begun and ended to change schedules: `time` by its clock
    begin            an action has started: `job`, `run`, `attempt`, `session`
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jobsync.core.cron import Schedule
from jobsync.core.firing import MAX_RESUMES, due_time
from jobsync.core.job_state import ActiveRun, Gap, JobState, find_schedule
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.job_store import SCHEDULES
from jobsync.testing.invariants import Violation
from jobsync.testing.nodes import WORLD_START
from jobsync.testing.world import Occurrence

__all__ = ["check_decided", "check_firing", "check_resumption"]

_ON_TIME = 60
"""Seconds by which an instant may be late where late ones are skipped."""
_ROUNDING = 1.0
"""Seconds that a whole-second instant may add."""
_ASKED_LATELY = 900.0
"""Seconds for which a request of a process that was killed may still arrive."""
_MAX_COUNTED = 1000


def check_firing(history: Sequence[Occurrence], *, early: float = 0.5) -> list[Violation]:
    """Check every commit of a job's state and history, and every start of an action.

    Args:
        history: of the world.
        early: seconds by which the clock of a process that fires may be ahead of the server's.
    """
    checker = _FiringChecker(early)
    return [violation for done in history for violation in checker.check(done)]


def check_decided(history: Sequence[Occurrence], *, slack: float) -> list[Violation]:
    """Check the end of a calm phase: everything is decided, and all runs have ended.

    Args:
        history: of the world.
        slack: seconds before the end for which things may still be under way.
    """
    checker = _FiringChecker(early=0.0)
    for done in history:
        list(checker.check(done))
    return list(checker.find_unfinished(history[-1].at, slack))


def check_resumption(
    history: Sequence[Occurrence], job: str, *, since: float, within: float
) -> list[Violation]:
    """Check that a job that is due all the time is fired soon after an outage (KL1)."""
    for done in history:
        is_firing = done.what == "commit" and f"/run/{job}/" in done.details["key"]
        if is_firing and done.at >= since and done.details["value"].get("status") == "running":
            if done.at - since <= within:
                return []
            break
    return [Violation("KL1", f"{job}: not fired within {within:g} s after {since:g} s")]


class _JobRecords:
    """What a job's records have said so far."""

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.changed_at = 0.0
        self.started: dict[int, str] = {}
        """The run of each instant that was started."""
        self.instants: list[int] = []
        """These instants, in order."""
        self.entries: dict[str, HistoryEntry] = {}
        """The firing records, by key; also those that were removed since."""
        self.results: dict[str, str] = {}
        """How the firing record of each run says that it went, by run."""
        self.owners: dict[str, set[str]] = defaultdict(set)
        """The sessions that have claimed each run in its firing record."""
        self.owned_at: dict[tuple[str, str], float] = {}
        """When each run became a session's, by run and session."""
        self.deaths: Counter[str] = Counter()
        """How often each run was taken over from a process that had not released it."""
        self.gaps: set[tuple[int, int]] = set()
        """The first and last instants of the gaps in the history."""


class _StateChange(msgspec.Struct, frozen=True):
    """A commit of a job's state."""

    job: str
    records: _JobRecords
    before: JobState
    after: JobState
    node: str
    at: float

    @property
    def schedule(self) -> Schedule:
        """The schedule that held before."""
        return find_schedule(self.before)

    @property
    def new_runs(self) -> list[ActiveRun]:
        """Runs that were not there before."""
        return [run for run in self.after.running if self.before.find_run(run.id) is None]

    @property
    def new_gaps(self) -> list[Gap]:
        """Gaps that were not there before."""
        return [gap for gap in self.after.gaps if gap not in self.before.gaps]

    @property
    def is_running_on(self) -> bool:
        """Whether a run has gone on, in the process that had it."""
        return any(run in self.after.running for run in self.before.running)

    @property
    def fired(self) -> list[int]:
        """Instants that were undecided before, and are to be run now."""
        waiting = {*self.before.queued}
        runs = [run.instant for run in self.new_runs if not run.is_manual]
        return sorted({*runs, *self.after.queued} - waiting)


class _FiringChecker:
    def __init__(self, early: float) -> None:
        self._early = early
        self._jobs: dict[str, _JobRecords] = defaultdict(_JobRecords)
        self._dead: set[str] = set()
        self._asked: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """By node, when it asked for changes that may still arrive: world's time, its time."""
        self._begun: set[tuple[Any, ...]] = set()
        self._executed: set[str] = set()

    def check(self, done: Occurrence) -> Iterator[Violation]:
        """Check one occurrence."""
        match done.what:
            case "commit":
                yield from self._check_commit(done)
            case "drop":
                sessions = [key for key in done.details["keys"] if key.startswith("session/")]
                self._dead.update(key.removeprefix("session/") for key in sessions)
                yield from self._check_drop(done.details["keys"])
            case "asked":
                self._asked[done.node].append((done.at, done.details["time"]))
            case "answered":
                self._asked[done.node].clear()
            case "begin" if "run" in done.details:
                yield from self._check_begin(done)

    def find_unfinished(self, now: float, slack: float) -> Iterator[Violation]:
        """Find what is undecided or not executed although there was time."""
        for job, records in self._jobs.items():
            state = records.state
            if state is None or state.is_removed:
                continue
            is_old = records.changed_at < now - slack
            newest = find_schedule(state).latest_until(int(WORLD_START + now - slack))
            waits = bool(state.running) and state.effective.overlap == "skip"
            if state.is_active and newest is not None and newest > state.last and not waits:
                yield Violation("K2", f"{job}: {newest} is undecided, the last is {state.last}")
            if is_old and state.gaps:
                yield Violation("K2", f"{job}: these are not in the history: {state.gaps}")
            if is_old and state.queued and state.is_active and not state.running:
                yield Violation("K2", f"{job}: queued and never started: {state.queued}")
            if is_old and state.requests and not state.running:
                yield Violation("KL2", f"{job}: asked for and never started: {state.requests}")
            yield from self._find_unexecuted(job, records, state, now - slack)
            yield from _find_outdated(job, records, state, is_old=is_old)

    def _find_unexecuted(
        self, job: str, records: _JobRecords, state: JobState, before: float
    ) -> Iterator[Violation]:
        """Find runs that have not ended, or have never begun, although there was time since."""
        running = {run.id for run in state.running}
        for run_id in {*records.started.values()} - running - self._executed:
            yield Violation("KL2", f"{job}: run {run_id} was started, and its action never")
        for run in state.running:
            is_executed = run.id in self._executed and not self._has_ended(run.owner)
            if records.owned_at[run.id, run.owner] < before and not is_executed:
                yield Violation("KL2", f"{job}: nobody executes {run}")

    def _check_commit(self, done: Occurrence) -> Iterator[Violation]:
        key, value = done.details["key"], done.details["value"]
        if key.startswith("session/"):
            if done.details["deleted"] or value["state"] != "live":
                self._dead.add(key.removeprefix("session/"))
            return
        kind, job = _split_key(key)
        if kind not in ("job", "run"):
            return
        records = self._jobs[job]
        if kind == "run":
            yield from self._check_entry(job, records, key, value)
        else:
            before, after = records.state, msgspec.convert(value, JobState)
            records.state, records.changed_at = after, done.at
            if before is not None:
                change = _StateChange(job, records, before, after, done.node, done.at)
                yield from self._check_state(change)
            for run in after.running:
                records.owned_at.setdefault((run.id, run.owner), done.at)
                if not run.is_manual and run.instant not in records.started:
                    records.started[run.instant] = run.id
                    insort(records.instants, run.instant)

    def _check_state(self, change: _StateChange) -> Iterator[Violation]:
        for invariant, problem in (
            *_check_once(change),
            *_check_accounts(change),
            *self._check_removed(change),
            *_check_losses(change),
            *self._check_time(change),
            *self._check_overlap(change),
            *self._check_catch_up(change),
            *self._check_edit(change),
        ):
            detail = f"{change.job}: {problem} ({change.node}, {change.at:.3f} s)"
            yield Violation(invariant, detail)

    def _check_removed(self, change: _StateChange) -> Iterator[tuple[str, str]]:
        """K2: what leaves a state has become something else."""
        before, after, records = change.before, change.after, change.records
        for gap in before.gaps:
            if gap not in after.gaps and (gap.first, gap.last) not in records.gaps:
                yield "K2", f"forgotten, and not in the history: {gap}"
        started = {run.instant for run in after.running}
        for instant in {*before.queued} - {*after.queued} - started:
            if not _is_covered(instant, change.new_gaps):
                yield "K2", f"{instant} was queued, and is gone"
        for run in before.running:
            now = after.find_run(run.id)
            if now is not None:
                records.deaths[run.id] += bool(run.owner and now.owner not in (run.owner, ""))
                continue
            # A stop of its first process may count, other stops do not.
            has_died_often = records.deaths[run.id] + 1 >= MAX_RESUMES
            is_given_up = run.is_manual or has_died_often or after.is_removed
            if records.results.get(run.id, "running") != "running":
                continue
            if not (is_given_up and self._has_ended(run.owner)):
                yield "K2", f"a run is gone without a result: {run}"

    def _check_time(self, change: _StateChange) -> Iterator[tuple[str, str]]:
        """K3: nothing is fired before its time."""
        now = WORLD_START + change.at + self._early
        for instant in change.fired:
            due = due_time(change.job, change.before.effective, change.schedule, instant)
            if due > now:
                yield "K3", f"{instant} was fired {due - now + self._early:.3f} s too early"

    def _check_overlap(self, change: _StateChange) -> Iterator[tuple[str, str]]:
        """K4: by the record, runs overlap only if they may, and change hands after a death."""
        may_overlap = change.before.effective.overlap == "allow"
        if change.new_runs and len(change.after.running) > 1 and not may_overlap:
            yield "K4", f"these overlap: {change.after.running}"
        for run in change.before.running:
            now = change.after.find_run(run.id)
            if now is None or now.owner in (run.owner, ""):
                continue
            if not self._has_ended(run.owner):
                yield "K4", f"taken from {run.owner}, which is live: {now}"

    def _check_catch_up(self, change: _StateChange) -> Iterator[tuple[str, str]]:
        """K6: of several instants that are late, only some are fired."""
        definition, fired = change.before.effective, change.fired
        if definition.overlap == "queue" and change.is_running_on:
            # They wait behind it.
            return
        most = definition.max_catch_up if definition.misfire == "all" else 1
        if len(fired) > most:
            yield "K6", f"{len(fired)} late instants are fired, and {most} may be: {fired}"
        on_time = WORLD_START + change.at - self._early - _ON_TIME - _ROUNDING
        if definition.misfire == "skip" and any(each < on_time for each in fired):
            yield "K6", f"fired although they are late: {fired}"

    def _check_edit(self, change: _StateChange) -> Iterator[tuple[str, str]]:
        """K7: a changed schedule begins after the change."""
        if change.schedule == find_schedule(change.after):
            return
        asked = [time for at, time in self._asked[change.node] if change.at - at <= _ASKED_LATELY]
        if change.fired:
            yield "K7", f"a change of the schedule has fired {change.fired}"
        if asked and change.after.last < int(min(asked)):
            yield "K7", f"changed at {min(asked)}, and instants after {change.after.last} are due"

    def _check_entry(
        self, job: str, records: _JobRecords, key: str, value: Mapping[str, Any]
    ) -> Iterator[Violation]:
        entry = msgspec.convert(value, HistoryEntry)
        if entry.first is not None:
            records.gaps.add((int(entry.first), int(entry.scheduled_time)))
            return
        before = records.entries.get(key)
        records.entries[key] = entry
        state = records.state
        run = None if state is None else state.find_run(entry.id)
        if before is not None and before.id != entry.id:
            yield Violation("K1", f"{job}: {key} was fired as {before.id} and as {entry.id}")
        if before is not None and before.status != "running":
            yield Violation("K8", f"{job}: the result of {before.id} was overwritten by {entry}")
        if entry.status == "running":
            if before is None and run is None:
                yield Violation("K1", f"{job}: fired without a decision: {entry}")
            if run is not None and run.owner not in (entry.owner, ""):
                # A claim that was on its way when its process released the run changes nothing.
                yield Violation("K4", f"{job}: claimed by {entry.owner}, and is {run.owner}'s")
            records.owners[entry.id].add(entry.owner)
        records.results[entry.id] = entry.status

    def _check_drop(self, keys: Sequence[str]) -> Iterator[Violation]:
        """K8: the record of a run that goes on is not removed as old history."""
        for key in keys:
            kind, job = _split_key(key)
            records = self._jobs[job] if kind == "run" else None
            entry = None if records is None else records.entries.get(key)
            if records is None or records.state is None or entry is None:
                continue
            if entry.status == "running" and records.state.find_run(entry.id) is not None:
                yield Violation("K8", f"{job}: removed while it runs: {entry}")

    def _check_begin(self, done: Occurrence) -> Iterator[Violation]:
        """K8: an action starts once, after its session has claimed the firing record."""
        facts = done.details
        key = (facts["run"], facts["attempt"], facts["session"])
        if key in self._begun:
            yield Violation("K8", f"{facts['job']}: started twice in one process: {done}")
        if facts["session"] not in self._jobs[facts["job"]].owners[facts["run"]]:
            yield Violation("K8", f"{facts['job']}: started without a firing record: {done}")
        self._begun.add(key)
        self._executed.add(facts["run"])

    def _has_ended(self, session: str) -> bool:
        return not session or session in self._dead


def _split_key(key: str) -> tuple[str, str]:
    """Return the kind of a scheduler's record, and its job; empty for others."""
    if not key.startswith(SCHEDULES):
        return "", ""
    kind, _, rest = key.removeprefix(SCHEDULES).partition("/")[2].partition("/")
    return kind, rest.partition("/")[0]


def _find_outdated(
    job: str, records: _JobRecords, state: JobState, *, is_old: bool
) -> Iterator[Violation]:
    """KL3: find records of runs that say "running" although the runs are no longer in the state."""
    running = {run.id for run in state.running}
    for run_id, status in records.results.items():
        if is_old and status == "running" and run_id not in running:
            yield Violation("KL3", f"{job}: run {run_id} is over, and the history has no result")


def _check_losses(change: _StateChange) -> Iterator[tuple[str, str]]:
    """K2: a lost run is forgotten once its record says so."""
    for run in change.before.lost:
        is_running = change.records.results.get(run.id, "running") == "running"
        if run not in change.after.lost and is_running:
            yield "K2", f"forgotten, and its record has no end: {run}"


def _check_once(change: _StateChange) -> Iterator[tuple[str, str]]:
    """K1: an instant is decided once."""
    before, after, started = change.before, change.after, change.records.started
    if after.last < before.last:
        yield "K1", f"the last decided instant went back: {before.last}, {after.last}"
    for run in change.new_runs:
        if not run.is_manual and started.get(run.instant, run.id) != run.id:
            yield "K1", f"{run.instant} is run {run.id}, and was {started[run.instant]}"
    for instant in change.fired:
        if instant <= before.last:
            yield "K1", f"{instant} is fired, and was decided: the last was {before.last}"
    instants = change.records.instants
    for gap in change.new_gaps:
        if bisect_left(instants, gap.first) < bisect_right(instants, gap.last):
            yield "K1", f"an instant was fired, and is in {gap}"


def _check_accounts(change: _StateChange) -> Iterator[tuple[str, str]]:
    """K2: each instant that is decided is fired, or in a gap with a reason."""
    if change.before.is_removed:
        return
    schedule, fired, gaps = change.schedule, {*change.fired}, change.new_gaps
    for gap in gaps:
        if not gap.reason:
            yield "K2", f"a gap has no reason: {gap}"
        if gap.is_counted:
            count = len(schedule.between(gap.first - 1, gap.last, _MAX_COUNTED + 1))
            if count != gap.count and not _is_queue_gap(gap, change):
                yield "K2", f"{count} instants are in {gap}"
    cursor = change.before.last
    while (instant := schedule.next_after(cursor)) is not None and instant <= change.after.last:
        cursor = instant
        if instant in fired:
            continue
        covering = [gap.last for gap in gaps if gap.first <= instant <= gap.last]
        if not covering:
            yield "K2", f"{instant} was neither fired nor recorded"
            return
        cursor = max(covering)


def _is_queue_gap(gap: Gap, change: _StateChange) -> bool:
    """Whether a gap is of instants that had been queued, whatever lies between them."""
    return gap.first in change.before.queued and gap.last in change.before.queued


def _is_covered(instant: int, gaps: Sequence[Gap]) -> bool:
    return any(gap.first <= instant <= gap.last for gap in gaps)
