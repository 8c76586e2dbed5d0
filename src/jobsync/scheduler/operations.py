"""What anybody can ask about scheduled jobs, and do with them, from any process.

Nothing here needs a job's code or a session: the command line uses it too. A change is written to
the job's state, and then noted in the `edits` record, which leaders follow.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from jobsync.components import Components
from jobsync.core.arguments import check_choice, check_count
from jobsync.core.firing import build_requested_run, next_instant
from jobsync.core.job_changes import add_request, edit, pause, remove, resume
from jobsync.core.job_state import (
    ActiveRun,
    JobPause,
    JobState,
    RunRequest,
    RunStatus,
    find_schedule,
)
from jobsync.errors import Invalid, NotFound, closest_name
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.settings import check_changes, check_lookup_name, check_plain_text
from jobsync.stores.paging import split_pages

__all__ = ["NEXT_RUNS", "JobOperations", "JobStatus", "build_status"]

NEXT_RUNS = 5
"""How many of its next runs the status of a job has."""
_CONCURRENT_READS = 16
_is_cursor = re.compile(r"[0-9]{11}(-.+)?").fullmatch
_MAX_KNOWN = 20
"""Names that an error lists."""
_STATUSES = get_args(RunStatus)
_LATEST_TIME = 1e12
"""Seconds since 1970, in the year 33658."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one job. Times are seconds since 1970, durations seconds."""

    name: str
    schedule: str
    timezone: str
    in_words: str
    description: str
    queue: str
    """The queue that gets a message at each instant; empty for a job with an action."""
    enabled: bool
    """Whether its instants are fired."""
    pause: JobPause | None
    edits: Mapping[str, Any]
    """Fields that an operator has changed."""
    running: tuple[ActiveRun, ...]
    queued: tuple[int, ...]
    last_run: float | None
    last_status: str
    """success, error, timeout or lost; empty before the first run."""
    last_error: str
    last_success: float | None
    last_failure: float | None
    next_run: float | None
    next_runs: tuple[float, ...]
    """The next five, as they are scheduled, without jitter."""
    runs: int
    successes: int
    failures: int
    missed: int
    """Instants that nobody could fire."""
    skipped: int
    """Instants that were not to be fired."""
    success_rate: float | None
    """From 0 to 1; None before the first run."""
    p50: float | None
    """Half of the latest 50 runs took at most so long."""
    p95: float | None
    defined_by: str

    @property
    def is_running(self) -> bool:
        """Whether a run has begun and not ended."""
        return bool(self.running)

    def __getitem__(self, field: str) -> Any:
        return getattr(self, field)


def build_status(
    name: str, state: JobState, now: float, following: int | None, upcoming: int = NEXT_RUNS
) -> JobStatus:
    """Return what is known of a job.

    Args:
        name: the job's.
        state: as it was read.
        now: the time.
        following: its first undecided instant, see `next_instant`.
        upcoming: how many of its next runs are computed. Each takes a while, for 10,000 jobs.
    """
    definition, schedule, numbers = state.effective, find_schedule(state), state.statistics
    next_runs: list[float] = []
    if following is not None and following <= now:
        following = schedule.next_after(int(now))
    while following is not None and len(next_runs) < upcoming:
        next_runs.append(following)
        following = schedule.next_after(following) if len(next_runs) < upcoming else None
    last = numbers.last_run
    return JobStatus(
        name=name,
        schedule=definition.schedule,
        timezone=definition.timezone,
        in_words=schedule.in_words(),
        description=definition.description,
        queue=definition.queue,
        enabled=state.is_active,
        pause=state.pause,
        edits=state.edits,
        running=state.running,
        queued=state.queued,
        last_run=None if last is None else last.started_at,
        last_status="" if last is None else last.status,
        last_error="" if last is None else last.error,
        last_success=numbers.last_success,
        last_failure=numbers.last_failure,
        next_run=next_runs[0] if next_runs else None,
        next_runs=tuple(next_runs),
        runs=numbers.runs,
        successes=numbers.successes,
        failures=numbers.failures,
        missed=numbers.missed,
        skipped=numbers.skipped,
        success_rate=numbers.successes / numbers.runs if numbers.runs else None,
        p50=_find_percentile(numbers.durations, 0.5),
        p95=_find_percentile(numbers.durations, 0.95),
        defined_by=state.defined_by,
    )


def _find_percentile(durations: Sequence[float], share: float) -> float | None:
    if not durations:
        return None
    return sorted(durations)[max(0, math.ceil(share * len(durations)) - 1)]


class JobOperations:
    """Questions and changes, by job name.

    Args:
        jobs: where they are stored.
        components: the clock and ids.
        by: who makes the changes, for the history.
    """

    def __init__(self, jobs: JobStore, components: Components, by: str) -> None:
        self._jobs = jobs
        self._components = components
        self._by = by

    async def now(self) -> float:
        """Return the store's time of day, or this machine's if the store has none.

        Good enough to show when a job is due. A change goes by `JobStore.measure_time`: an
        operator's wrong clock must neither skip instants nor fire those of the past.
        """
        stored = await self._jobs.store.now()
        return (self._components.clock.wall() if stored is None else stored).seconds

    async def list_jobs(self) -> list[JobStatus]:
        """Return all jobs that are not removed, by name."""
        now = await self.now()
        return [
            build_status(name, stored.state, now, next_instant(stored.state))
            for name, stored in sorted((await self._jobs.read_all()).items())
            if not stored.state.is_removed
        ]

    async def status(self, name: str) -> JobStatus:
        """Return what is known of a job.

        Raises:
            NotFound: there is no such job.
        """
        check_lookup_name(name)
        stored = await self._jobs.read(name)
        if stored is None or stored.state.is_removed:
            raise await self._build_not_found(name)
        return build_status(name, stored.state, await self.now(), next_instant(stored.state))

    async def read_state(self, name: str) -> JobState | None:
        """Return a job's state, even if it was removed; None if there is none."""
        stored = await self._jobs.read(name)
        return None if stored is None else stored.state

    async def pause(self, name: str, reason: str = "") -> bool:
        """Stop firing a job until `resume`; False if it was paused already.

        Raises:
            Invalid: the reason is not text.
        """
        reason = check_plain_text("reason", reason)
        now = await self._jobs.measure_time()
        stop = JobPause(at=now, by=self._by, reason=reason)
        return await self._change(name, lambda state: pause(state, stop))

    async def resume(self, name: str) -> bool:
        """Fire a job again; False if it is fired. What was due meanwhile is skipped."""
        now = await self._jobs.measure_time()
        return await self._change(name, lambda state: resume(state, now))

    async def edit(self, name: str, changes: Mapping[str, Any]) -> bool:
        """Change fields of a job until its code changes; False if that changes nothing.

        Raises:
            Invalid: a field is unknown, or a value wrong.
        """
        checked = check_changes(name, changes)
        now = await self._jobs.measure_time()
        return await self._change(name, lambda state: edit(state, checked, now))

    async def remove(self, name: str) -> None:
        """Remove a job. Code that has it adds it again when it starts.

        Raises:
            NotFound: there is no such job, or it was removed before.
        """
        now = await self._jobs.measure_time()
        await self._change(name, lambda state: remove(state, now))
        await self._jobs.code.clear_defined()

    async def request_run(self, name: str) -> RunRequest:
        """Ask the fleet to run a job now. See `find_requested`."""
        (run_id,) = self._components.ids.records(1)
        request = RunRequest(id=run_id, at=await self._jobs.measure_time(), by=self._by)
        await self._change(name, lambda state: add_request(state, request))
        return request

    async def find_requested(self, name: str, request: RunRequest) -> HistoryEntry | None:
        """Return what is known of a run that was asked for; None before it begins."""
        run = build_requested_run(request, owner="", now=request.at)
        found = await self._jobs.history.read(name, run)
        return None if found is None else found[1]

    async def history(
        self,
        job: str | None = None,
        *,
        status: str | Sequence[str] | None = None,
        since: float | None = None,
        limit: int = 50,
        after: str = "",
    ) -> list[HistoryEntry]:
        """Return runs and gaps, the newest first; continue after the last one's `cursor`.

        Args:
            job: of one job; of all jobs by default.
            status: only those with this status, or one of these.
            since: only those that were scheduled at this time or later, in seconds since 1970.
            limit: the most entries.
            after: the cursor of the entry to continue after.
        """
        check_count("limit", limit, least=1, most=10_000)
        statuses = _list_statuses(status)
        if since is not None and not _is_time(since):
            raise Invalid("since", since, "must be a time", "pass seconds since 1970")
        if not isinstance(after, str):
            raise Invalid("after", after, "must be text", "pass the cursor of an entry")
        if job is not None:
            check_lookup_name(job)
            if after and not _is_cursor(after):
                fix = "pass the cursor of the last entry that was returned"
                raise Invalid("after", after, "is not the cursor of an entry", fix)
            if await self._jobs.read(job) is None:
                raise await self._build_not_found(job)
            return await self._jobs.history.list_entries(
                job, statuses=statuses, since=since, limit=limit, after=after
            )
        if after:
            raise Invalid("after", after, "needs a job", "pass job=, or since=")
        return await self._read_all_history(statuses, since, limit)

    async def _read_all_history(
        self, statuses: Sequence[str], since: float | None, limit: int
    ) -> list[HistoryEntry]:
        """Return the newest entries of all jobs; a few jobs are read at once."""
        names = await self._jobs.list_names()
        newest: list[HistoryEntry] = []
        for part in split_pages(names, _CONCURRENT_READS):
            async with asyncio.TaskGroup() as group:
                pages = [
                    group.create_task(
                        self._jobs.history.list_entries(
                            name, statuses=statuses, since=since, limit=limit
                        )
                    )
                    for name in part
                ]
            newest += [entry for page in pages for entry in page.result()]
            # Only so many are kept, however many jobs there are.
            newest.sort(key=lambda entry: (-entry.scheduled_time, entry.job_name))
            del newest[limit:]
            if len(newest) == limit:
                since = newest[-1].scheduled_time
        return newest

    async def _change(self, name: str, decide: Callable[[JobState], JobState | None]) -> bool:
        """Change a job's state, and let leaders know; return whether it was changed."""
        check_lookup_name(name)
        is_changed = False

        def choose(state: JobState | None) -> JobState | None:
            nonlocal is_changed
            if state is None or state.is_removed:
                is_changed = False
                return None
            decided = decide(state)
            is_changed = decided is not None
            return decided

        stored = await self._jobs.change(name, choose)
        if stored is None or (stored.state.is_removed and not is_changed):
            raise await self._build_not_found(name)
        if is_changed:
            await self._jobs.edits.note({name: stored.state.is_special})
        return is_changed

    async def _build_not_found(self, name: str) -> NotFound:
        stored = await self._jobs.read_all()
        known = [known for known, job in stored.items() if not job.state.is_removed]
        return NotFound("job", name, known[:_MAX_KNOWN], closest_name(name, known))


def _list_statuses(status: Any) -> list[str]:
    """Return the statuses that a caller asks for, which may be one or several."""
    if status is None:
        return []
    found = [status] if isinstance(status, str) or not isinstance(status, Iterable) else [*status]
    if not found:
        raise Invalid("status", status, "names no status", "leave it out for all")
    problem = "is not the status of a run"
    return [check_choice("status", one, _STATUSES, problem) for one in found]


def _is_time(value: object) -> bool:
    # By comparison: a whole number may be too large for a float.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= _LATEST_TIME  # type: ignore[arg-type]
