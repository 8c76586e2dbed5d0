"""The parts of a scheduler that runs: how they are joined, and what one does for another."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership
from jobsync.core.job_state import ActiveRun, Gap, JobState
from jobsync.database.database import Database
from jobsync.events import Event
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_code import JobCode
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.loop import FiringLoop
from jobsync.scheduler.manual_runs import ManualRuns
from jobsync.scheduler.operations import JobOperations
from jobsync.scheduler.removed_jobs import RemovedJobs
from jobsync.scheduler.reporting import Reporter
from jobsync.scheduler.retention import HistoryRetention
from jobsync.scheduler.run_owners import RunOwners
from jobsync.scheduler.runs import KnownJob, Runs
from jobsync.scheduler.settings import SchedulerSettings

__all__ = ["SchedulerParts"]


class SchedulerParts:
    """What a scheduler consists of from its start to its stop.

    Args:
        database: the one that it belongs to.
        membership: this process's session.
        namespace: of the scheduler.
        settings: of the scheduler.
        known: the jobs whose code this process has, by name.
        reporter: reports runs, gaps and a wrong clock.
        emit: emits an event.
        build_context: returns what an action gets.
        on_veto: called with the reason when this machine's clock is wrong, and with "" when it is
            right again.
        left: tasks that release cancelled runs, see `Runs`.
        generation: of this process's code, see `JobCode`.
    """

    def __init__(
        self,
        database: Database,
        membership: Membership,
        namespace: str,
        settings: SchedulerSettings,
        known: Mapping[str, KnownJob],
        reporter: Reporter,
        emit: Callable[[Event], object],
        build_context: Callable[[KnownJob, JobState, ActiveRun, Mapping[str, Any]], JobContext],
        on_veto: Callable[[str], object],
        left: dict[str, asyncio.Task[None]],
        generation: int,
    ) -> None:
        components = database.components
        self._membership = membership
        self._reporter = reporter
        self.jobs = JobStore(lambda: database.store, namespace, components)
        self.cache = JobCache(self.jobs, self._on_gap)
        self.clock = FleetClock(membership, database.store, components)
        self.runs = Runs(
            self.cache,
            membership,
            self.clock,
            components,
            reporter,
            build_context,
            settings.max_concurrent_jobs,
            left,
        )
        self.runs.notify(self._on_run_end)
        owners = RunOwners(self.cache, self.runs, membership)
        fact = f"schedule {namespace}"
        self.code = JobCode(known, self.jobs, membership, self.clock, fact, emit, generation)
        self.loop = FiringLoop(
            self.cache,
            self.runs,
            known,
            membership,
            self.clock,
            components,
            owners,
            on_veto,
            lambda name: self.code.define([name]),
        )
        max_age = settings.history_retention
        self.retention = HistoryRetention(
            self.jobs, self.clock, components, keep=settings.history_limit, max_age=max_age
        )
        self.operations = JobOperations(self.jobs, components, membership.worker_id)
        self.manual_runs = ManualRuns(
            self.cache, self.runs, known, self.loop, owners, membership, self.clock, components
        )
        self.removed = RemovedJobs(
            self.cache,
            self.code,
            owners,
            self.retention,
            self.clock,
            components,
            max_age=max_age,
        )

    def wake(self, name: str) -> None:
        """Look at a job that was changed here."""
        self.cache.known.pop(name, None)
        self.loop.look_at(name)

    async def register(self, name: str) -> None:
        """Store the definition of a new job, and put it on duty if this process leads."""
        self.code.change()
        await self.code.define([name])
        self.loop.add(name)

    async def follow_edits(self) -> None:
        """Notice changes by operators at once, where the store sends notifications."""
        while True:
            await self.jobs.store.wait(self.jobs.edits.prefix, self._membership.timing.heartbeat)
            self.loop.check_edits()

    def _on_run_end(self, name: str) -> None:
        self.loop.on_run_end(name)
        if (stored := self.cache.known.get(name)) is not None:
            self.retention.note_run(name, stored.state.statistics.runs)

    def _on_gap(self, name: str, gap: Gap) -> None:
        self._reporter.on_gap(name, gap)
        self.retention.note_gap(name)
