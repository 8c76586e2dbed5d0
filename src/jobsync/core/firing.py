"""When a scheduled job runs: what follows for its state (`core.job_state`) from the time. Pure.

Each instant is decided once: it is fired, it waits behind another run, or it becomes part of a gap
with a reason.

    advance     due instants ──▶ running, queued, or a gap; runs of dead processes ──▶ resumed
    finish      running ──▶ counted, and removed
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from jobsync.core.cron import Schedule
from jobsync.core.gaps import OVERLAPPED, add_gap, skip_queued
from jobsync.core.job_state import (
    ActiveRun,
    Gap,
    JobDefinition,
    JobState,
    LastRun,
    RunRequest,
    RunStatus,
    Statistics,
    find_schedule,
)

__all__ = [
    "MAX_RESUMES",
    "Advance",
    "advance",
    "build_requested_run",
    "drop_noted",
    "drop_run",
    "due_time",
    "explain_loss",
    "find_newest_due",
    "finish",
    "give_up",
    "next_due",
    "next_instant",
    "start_manually",
    "withdraw",
]

MAX_LATENESS = 60
"""Seconds by which an instant may be late and still counts as on time for `misfire="skip"`."""

MAX_RESUMES = 3
"""How often a run whose process died is started again; a job may be what kills processes."""

_TURN = 3.0
"""Seconds after a run in which only the next in line may start, if it waits in its own process."""

_MAX_QUEUED = 100
"""Instants that wait for a run to end; further ones become a gap."""

_MAX_DURATIONS = 50
"""Durations that a state remembers, for percentiles."""


class Advance(msgspec.Struct, frozen=True):
    """What follows for one job from the time and from who is alive."""

    state: JobState
    starts: tuple[ActiveRun, ...] = ()
    """The runs to start now, in this process."""
    lost: tuple[ActiveRun, ...] = ()
    """The runs that are given up, see `explain_loss`."""


class _Lateness(NamedTuple):
    """Why instants were not fired in time."""

    reason: str
    kind: Literal["missed", "skipped"]


def due_time(name: str, definition: JobDefinition, schedule: Schedule, instant: int) -> float:
    """Return when an instant is fired: later by a part of the jitter that every process agrees on.

    It is fired before the next instant, however large the jitter.
    """
    if not definition.jitter:
        return instant
    following = schedule.next_after(instant)
    window = definition.jitter
    if following is not None:
        window = min(window, following - instant)
    digest = hashlib.sha256(f"{name}\n{instant}".encode()).digest()
    return instant + window * int.from_bytes(digest[:6], "big") / 2**48


def next_instant(state: JobState) -> int | None:
    """Return the first undecided instant of a job; None if it never fires."""
    return find_schedule(state).next_after(state.last) if state.is_active else None


def next_due(name: str, state: JobState) -> float | None:
    """Return when the first undecided instant of a job is due; None if it never is."""
    instant = next_instant(state)
    if instant is None:
        return None
    return due_time(name, state.effective, find_schedule(state), instant)


def advance(
    name: str,
    state: JobState,
    now: float,
    *,
    owner: str,
    new_id: Callable[[], str],
    is_orphan: Callable[[ActiveRun], bool],
    late_reason: str,
    was_on_duty: bool = False,
    room: int = 1,
) -> Advance:
    """Decide what is to be started now, and what is not fired.

    First come the runs of dead processes, then runs that were asked for, then due instants. Nothing
    is written: the caller writes the new state, and starts the runs only if that succeeds.

    Args:
        name: the job's.
        state: as it was read.
        now: the time by which instants are due.
        owner: the session that would run it.
        new_id: returns an id for a new run.
        is_orphan: whether nobody runs a run any more.
        late_reason: why instants were not fired in time, for the history.
        was_on_duty: whether the caller could have fired all instants that are not decided.
        room: how many runs this process may start.
    """
    state = _drop_abandoned(state, is_orphan)
    state, starts, lost = _resume_orphans(state, now, owner, is_orphan, room)
    if state.is_active:
        state = _limit_queued(state)
        late = _Lateness(late_reason, "missed")
        if was_on_duty and (starts or lost) and state.effective.overlap == "skip":
            # They were left out for a run whose process had died, as is known only now.
            late = _Lateness(OVERLAPPED, "skipped")
        state = _decide_due(name, state, now, late, has_resumed=bool(starts))
    room -= len(starts)
    while room > 0 and (run := _choose_next(state, owner, new_id, now)) is not None:
        state = _record_start(state, run)
        starts.append(run)
        room -= 1
    return Advance(state, tuple(starts), tuple(lost))


def _drop_abandoned(state: JobState, is_orphan: Callable[[ActiveRun], bool]) -> JobState:
    """Drop the requests of processes that have died before they could start their runs."""
    requests = tuple(
        request
        for request in state.requests
        if not (request.owner and is_orphan(build_requested_run(request, request.owner, 0.0)))
    )
    return (
        state if requests == state.requests else msgspec.structs.replace(state, requests=requests)
    )


def _resume_orphans(
    state: JobState, now: float, owner: str, is_orphan: Callable[[ActiveRun], bool], room: int
) -> tuple[JobState, list[ActiveRun], list[ActiveRun]]:
    """Take over the runs of dead processes, as far as there is room.

    Returns:
        The state with them, the runs to start here, and those that are given up.
    """
    running: list[ActiveRun] = []
    resumed: list[ActiveRun] = []
    lost: list[ActiveRun] = []
    for run in state.running:
        if not is_orphan(run):
            running.append(run)
        elif run.is_manual or state.is_removed or run.resumed >= MAX_RESUMES:
            # Whoever started one by hand is gone, too.
            lost.append(run)
        elif len(resumed) < room:
            resumed.append(msgspec.structs.replace(run, owner=owner, resumed=run.resumed + 1))
            running.append(resumed[-1])
        else:
            running.append(run)
    if not (resumed or lost):
        return state, [], []
    statistics = state.statistics
    for run in lost:
        statistics = _count(statistics, run, "lost", now, explain_loss(run))
    state = msgspec.structs.replace(
        state, running=tuple(running), lost=(*state.lost, *lost), statistics=statistics
    )
    return state, resumed, lost


def explain_loss(run: ActiveRun) -> str:
    """Return why a run was given up."""
    if run.resumed >= MAX_RESUMES and not run.is_manual:
        return "its processes ended too often"
    return "its process has ended"


def give_up(state: JobState, now: float, is_orphan: Callable[[ActiveRun], bool]) -> JobState:
    """Abandon the runs of dead processes of a removed job."""
    return _resume_orphans(state, now, "", is_orphan, room=0)[0]


def _decide_due(
    name: str, state: JobState, now: float, late: _Lateness, *, has_resumed: bool
) -> JobState:
    """Decide all instants that are due: they wait for their run, or become a gap.

    Those that wait are started right after, as far as nothing runs that they must wait for. Behind
    a run that was going on when they were due, all wait. If that run's process had died, they are
    late like any others.
    """
    definition, schedule = state.effective, find_schedule(state)
    if state.running and definition.overlap == "skip" and not has_resumed:
        # They are decided when the run ends: until then nothing needs to be written.
        return state
    newest = find_newest_due(name, state, now)
    if newest is None:
        return state
    if state.running and definition.overlap == "skip":
        return add_gap(state, newest, *late)
    if state.running and definition.overlap == "queue" and not has_resumed:
        return _queue_behind(state, newest)
    if definition.misfire == "all":
        kept = schedule.newest_between(state.last, newest, definition.max_catch_up)
    elif definition.misfire == "skip" and now > MAX_LATENESS + due_time(
        name, definition, schedule, newest
    ):
        kept = []
    else:
        kept = [newest]
    state = add_gap(state, kept[0] - 1 if kept else newest, *late)
    state = msgspec.structs.replace(state, last=newest, queued=(*state.queued, *kept))
    return _limit_queued(state)


def find_newest_due(name: str, state: JobState, now: float) -> int | None:
    """Return the newest undecided instant that is due."""
    schedule = find_schedule(state)
    newest = schedule.latest_until(int(now))
    if newest is not None and due_time(name, state.effective, schedule, newest) > now:
        newest = schedule.latest_until(newest - 1)
    return newest if newest is not None and newest > state.last else None


def _queue_behind(state: JobState, newest: int) -> JobState:
    """Queue due instants behind the run that has not ended; only so many, the rest is a gap."""
    kept = find_schedule(state).between(state.last, newest, max(_MAX_QUEUED - len(state.queued), 0))
    last = kept[-1] if kept else state.last
    state = msgspec.structs.replace(state, last=last, queued=(*state.queued, *kept))
    return add_gap(state, newest, _explain_full(_MAX_QUEUED), "skipped")


def _limit_queued(state: JobState) -> JobState:
    """Make a gap of the newest instants that wait, if there are too many.

    What `misfire="all"` fires at once may wait, even if that is more than usual.
    """
    definition = state.effective
    most = max(_MAX_QUEUED, definition.max_catch_up if definition.misfire == "all" else 0)
    return skip_queued(state, _explain_full(most), keep=most)


def _explain_full(most: int) -> str:
    return f"{most:,} runs were waiting already"


def _choose_next(
    state: JobState, owner: str, new_id: Callable[[], str], now: float
) -> ActiveRun | None:
    """Return the next run that may start."""
    if state.running and state.effective.overlap != "allow":
        return None
    for place, request in enumerate(() if state.is_removed else state.requests, start=1):
        if not request.owner:
            return build_requested_run(request, owner, now)
        if now < _find_last_end(state) + place * _TURN:
            # Its process is about to start it.
            return None
    if state.queued and state.is_active:
        return ActiveRun(id=new_id(), instant=state.queued[0], owner=owner, started_at=now)
    return None


def build_requested_run(request: RunRequest, owner: str, now: float) -> ActiveRun:
    """Return the run that a request asks for."""
    return ActiveRun(
        id=request.id, instant=int(request.at), owner=owner, started_at=now, is_manual=True
    )


def _record_start(state: JobState, run: ActiveRun) -> JobState:
    """Take a chosen run from those that wait, and record it as running."""
    if run.is_manual:
        state = withdraw(state, run.id)
    else:
        state = msgspec.structs.replace(state, queued=state.queued[1:])
    return msgspec.structs.replace(state, running=(*state.running, run))


def start_manually(state: JobState, run: ActiveRun, now: float) -> JobState | None:
    """Record a run that is started by hand, or that it waits in line; None if nothing changes.

    It waits if another run must end first, or if others wait already. With `overlap="skip"` nobody
    waits, and with "allow" nobody has to.
    """
    ids = [request.id for request in state.requests]
    place = ids.index(run.id) if run.id in ids else len(ids)
    overlap = state.effective.overlap
    is_next = not place or now >= _find_last_end(state) + place * _TURN
    if overlap == "allow" or (not state.running and (is_next or overlap == "skip")):
        state = withdraw(state, run.id)
        return msgspec.structs.replace(state, running=(*state.running, run))
    if overlap == "skip" or run.id in ids:
        return None
    request = RunRequest(id=run.id, at=now, owner=run.owner)
    return msgspec.structs.replace(state, requests=(*state.requests, request))


def withdraw(state: JobState, run_id: str) -> JobState:
    """Take a run from those that wait in line, if it is there."""
    requests = tuple(request for request in state.requests if request.id != run_id)
    return msgspec.structs.replace(state, requests=requests)


def _find_last_end(state: JobState) -> float:
    """Return when the latest run has ended; 0 if there was none."""
    last = state.statistics.last_run
    return 0.0 if last is None else last.ended_at


def finish(
    name: str,
    state: JobState,
    run: ActiveRun,
    status: RunStatus,
    now: float,
    error: str = "",
    *,
    ended_at: float | None = None,
) -> JobState | None:
    """Record how a run ended; None if it is no longer this owner's run.

    With `overlap="skip"`, the instants that were due while it ran become a gap.

    Args:
        name: of the job.
        state: of the job.
        run: the one that has ended.
        status: how.
        now: the time by which instants are due.
        error: why it has failed.
        ended_at: when it has ended, if not now.
    """
    current = state.find_run(run.id)
    if current is None or current.owner != run.owner:
        return None
    rest = tuple(other for other in state.running if other.id != run.id)
    ended = now if ended_at is None else ended_at
    statistics = _count(state.statistics, run, status, ended, error)
    state = msgspec.structs.replace(state, running=rest, statistics=statistics)
    if rest or state.effective.overlap != "skip" or not state.is_active:
        return state
    newest = find_newest_due(name, state, now)
    if newest is None:
        return state
    return add_gap(state, newest, OVERLAPPED, "skipped")


def drop_run(state: JobState, run: ActiveRun) -> JobState | None:
    """Take a run from a state without a result; None if it is no longer this owner's run."""
    running = tuple(
        other for other in state.running if (other.id, other.owner) != (run.id, run.owner)
    )
    return None if running == state.running else msgspec.structs.replace(state, running=running)


def _count(
    statistics: Statistics, run: ActiveRun, status: RunStatus, ended_at: float, error: str
) -> Statistics:
    """Return the statistics with one more run."""
    is_success = status == "success"
    durations = statistics.durations
    if status != "lost":
        # Nobody knows when a lost one has ended.
        durations = (*durations, round(max(ended_at - run.started_at, 0.0), 3))
    return msgspec.structs.replace(
        statistics,
        runs=statistics.runs + 1,
        successes=statistics.successes + is_success,
        failures=statistics.failures + (not is_success),
        durations=durations[-_MAX_DURATIONS:],
        last_run=LastRun(
            id=run.id,
            instant=run.instant,
            status=status,
            started_at=run.started_at,
            ended_at=ended_at,
            error=error,
        ),
        last_success=ended_at if is_success else statistics.last_success,
        last_failure=statistics.last_failure if is_success else ended_at,
    )


def drop_noted(state: JobState, gaps: Sequence[Gap], lost: Sequence[ActiveRun]) -> JobState:
    """Forget gaps and lost runs that are in the history."""
    return msgspec.structs.replace(
        state,
        gaps=tuple(gap for gap in state.gaps if gap not in gaps),
        lost=tuple(run for run in state.lost if run not in lost),
    )
