"""Runs that this process starts by hand, at once and beside the schedule.

A manual run is recorded in the job's state like a scheduled one, so that `overlap` holds for both
in the whole fleet. It is never resumed: if its process dies, it is given up.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership
from jobsync.core.firing import start_manually
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.errors import Invalid, JobRunning, NotFound, Unavailable
from jobsync.scheduler.executor import ActionOutcome
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import StoredJob
from jobsync.scheduler.loop import FiringLoop
from jobsync.scheduler.runs import KnownJob, Runs

__all__ = ["ManualRuns"]

_FIRST_POLL = 0.05
_LONGEST_POLL = 1.0


class ManualRuns:
    """Starts runs by hand.

    Args:
        cache: the states of jobs.
        runs: those of this process.
        known: the jobs whose code this process has, by name.
        loop: fires jobs; looks at those whose runs have lost their process.
        membership: this process's session.
        clock: the time by which a run has begun.
        components: ids of runs, and the clock of pauses.
    """

    def __init__(
        self,
        cache: JobCache,
        runs: Runs,
        known: Mapping[str, KnownJob],
        loop: FiringLoop,
        membership: Membership,
        clock: FleetClock,
        components: Components,
    ) -> None:
        self._cache = cache
        self._runs = runs
        self._known = known
        self._loop = loop
        self._membership = membership
        self._clock = clock
        self._components = components

    async def run(self, name: str, data: Mapping[str, Any] | None) -> ActionOutcome:
        """Run a job now; wait first for a run that must end before it. Return how it ended.

        Args:
            name: the job's.
            data: is merged into `context.data`.

        Raises:
            NotFound: this process does not have the job, or it was removed.
            Invalid: the data is not a dict.
            JobRunning: a run has not ended, and `overlap="skip"`.
            Unavailable: the run was lost, because this process stops or has lost its session.
        """
        job = self._known.get(name)
        if job is None:
            raise NotFound("job in this process", name, list(self._known))
        if data is not None and not isinstance(data, Mapping):
            raise Invalid("context", data, "must be a dict", "write {...}")
        run, stored = await self._wait_for_start(name)
        task = self._runs.start(job, stored, run, data)
        # If the caller is cancelled, the run goes on.
        await asyncio.wait([task])
        outcome = None if task.cancelled() else task.result()
        if outcome is None:
            problem = "it was lost: this process has stopped, or has lost its session"
            raise Unavailable("the run", problem, "run it again")
        return outcome

    async def _wait_for_start(self, name: str) -> tuple[ActiveRun, StoredJob]:
        """Record a run as soon as it may start; return it with the state that names it."""
        (run_id,) = self._components.ids.records(1)
        poll = _FIRST_POLL
        while True:
            run = ActiveRun(
                id=run_id,
                instant=int(self._clock.now()),
                owner=self._membership.incarnation,
                started_at=self._clock.now(),
                is_manual=True,
            )
            stored = await self._record(name, run)
            if stored is not None:
                return run, stored
            await self._components.clock.sleep(poll)
            poll = min(2 * poll, _LONGEST_POLL)

    async def _record(self, name: str, run: ActiveRun) -> StoredJob | None:
        """Record that a run starts; None if it has to wait.

        Raises:
            JobRunning: a run has not ended, and runs do not wait.
        """
        is_started = False

        def decide(state: JobState) -> JobState | None:
            nonlocal is_started
            is_started = state.find_run(run.id) is not None
            if is_started:
                return None
            if state.is_removed:
                raise NotFound("job", name, list(self._known))
            changed = start_manually(state, run)
            is_started = changed is not None
            return changed

        # What is remembered may be old where another process fires the job.
        if await self._cache.read(name) is None:
            raise NotFound("job", name, list(self._known))
        stored = await self._cache.update(name, decide)
        if stored is None or is_started:
            return stored
        state = stored.state
        if state.effective.overlap == "skip" and not await self._loop.has_orphans(state):
            raise JobRunning(name)
        # A dead process's run is given up or resumed by the process that fires the job.
        self._loop.look_at(name)
        return None
