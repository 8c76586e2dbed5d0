"""Decides one job: reads its state, writes what `core.firing.advance` says, and starts the runs."""

from collections.abc import Awaitable, Callable, Container
from datetime import UTC, datetime

import msgspec

from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership
from jobsync.core.firing import Advance, advance, next_due
from jobsync.core.job_state import JobState
from jobsync.errors import Unavailable
from jobsync.scheduler.duty import Duty
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import StoredJob
from jobsync.scheduler.run_owners import RunOwners
from jobsync.scheduler.runs import KnownJob, Runs

__all__ = ["JobDecider"]

_NEXT_IN_LINE = 1.0
"""Seconds until a job is looked at again whose next run is started by another process."""


class JobDecider:
    """Decides what is due for a job.

    Args:
        cache: the states of jobs.
        runs: starts them.
        membership: this process's session.
        clock: the time by which instants are due.
        duty: the jobs that this process fires.
        owners: the processes of runs.
        restore: stores the definition of a job again whose state is gone.
    """

    def __init__(
        self,
        cache: JobCache,
        runs: Runs,
        membership: Membership,
        clock: FleetClock,
        duty: Duty,
        owners: RunOwners,
        restore: Callable[[str], Awaitable[object]],
    ) -> None:
        self._cache = cache
        self._runs = runs
        self._membership = membership
        self._clock = clock
        self._duty = duty
        self._owners = owners
        self._restore = restore

    async def decide(self, job: KnownJob, owner: str, new_id: str, delayed: Container[str]) -> bool:
        """Write what `advance` decides about a job, and start what that says.

        Args:
            job: which one.
            owner: the session that starts it.
            new_id: of the run that would start. A repeated call recognises what an earlier one has
                written, if the reply was lost.
            delayed: the jobs that had to wait because too many were running.

        Returns:
            Whether the job has a state.

        Raises:
            Unavailable, OutcomeUnknown: the store does not answer, or the session is not current.
        """
        name, now = job.name, self._clock.now()
        decided: list[Advance] = []
        gone: set[str] = set()

        def decide(state: JobState) -> JobState | None:
            mine = state.find_run(new_id)
            if mine is not None or name not in self._duty.names:
                decided[:] = [Advance(state, () if mine is None else (mine,))]
                return None
            result = advance(
                name,
                state,
                now,
                owner=owner,
                new_id=lambda: new_id,
                is_orphan=lambda run: self._owners.is_orphan(run, gone),
                late_reason=self._explain_lateness(state, is_delayed=name in delayed),
                was_on_duty=state.last >= self._duty.since,
            )
            decided[:] = [result]
            return result.state

        cached = await self._read_current(name, owner)
        if cached is None:
            return False
        gone |= await self._owners.find_gone(cached.state)
        if not self._membership.is_trusted:
            # Others may believe this process dead: they would resume at once what it starts.
            raise Unavailable("the session", "it is not current", "wait for the store")
        stored = await self._cache.update(name, decide)
        if stored is None:
            return False
        (result,) = decided
        self._duty.is_dirty = True
        for run in result.starts:
            self._runs.start(job, stored, run)
        for run in result.lost:
            self._runs.report_loss(name, run)
        await self._cache.write_history(name, now)
        return True

    async def _read_current(self, name: str, owner: str) -> StoredJob | None:
        """Return a job's state; from memory, if only this process can have changed it."""
        cached = self._cache.known.get(name)
        if cached is None or any(run.owner != owner for run in cached.state.running):
            # Its process may have ended a run without our knowing.
            cached = await self._cache.read(name)
        if cached is None and name in self._duty.names:
            # Somebody has removed the record by hand.
            await self._restore(name)
            cached = await self._cache.read(name)
        return cached

    def next_look(self, name: str) -> float | None:
        """Return when a job that was decided is to be looked at again; None for never."""
        stored = self._cache.known.get(name)
        if stored is None:
            # Another task has found it outdated.
            return 0.0
        state, now = stored.state, self._clock.now()
        is_elsewhere = any(run.owner != self._membership.incarnation for run in state.running)
        if state.running and state.effective.overlap == "skip":
            if not is_elsewhere:
                # Its end makes us look.
                return None
            state = msgspec.structs.replace(state, last=max(state.last, int(now)))
        due = next_due(name, state)
        if any(self._owners.is_orphan(run, ()) for run in state.running):
            # One was resumed, and another one is left.
            return 0.0
        if not (state.requests or (state.queued and state.is_active)):
            return due
        if not state.running or state.effective.overlap == "allow":
            # If the next in line waits in its own process, that is about to start it.
            return now + _NEXT_IN_LINE if state.requests and state.requests[0].owner else 0.0
        if not is_elsewhere:
            return due
        # Nobody tells us of the end that they wait for.
        later = now + self._membership.timing.heartbeat
        return later if due is None else min(due, later)

    def _explain_lateness(self, state: JobState, *, is_delayed: bool) -> str:
        """Return why instants after the last decided one were not fired in time."""
        if state.last < self._duty.since:
            return f"no process fired it until {_format(self._duty.since)}"
        if is_delayed:
            return "as many jobs as max_concurrent_jobs allows were running"
        return "this process or the store was too slow"


def _format(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
