"""Runs that this process starts by hand, at once and beside the schedule.

A manual run is recorded in the job's state like a scheduled one, so that `overlap` holds for both
in the whole fleet. If it has to wait, that is recorded too: it gets its turn after those that other
processes have asked for before, and before instants that wait. It is never resumed: if its process
dies, it is given up. For that, the process announces the run before it records it: whoever fires
the job then knows where to look.

What is recorded as running here is started here, in a task that no caller's cancellation ends. A
run that still waits when its caller is cancelled is not started.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.heartbeats import OUTAGE_ERRORS
from jobsync.coordination.membership import Membership
from jobsync.core.firing import start_manually, withdraw
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import (
    Corrupt,
    Invalid,
    JobRunning,
    NewerFormat,
    NotFound,
    Unavailable,
    closest_name,
)
from jobsync.scheduler.executor import ActionOutcome
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.loop import FiringLoop
from jobsync.scheduler.run_owners import RunOwners
from jobsync.scheduler.runs import KnownJob, Runs
from jobsync.scheduler.settings import check_lookup_name, read_dict

__all__ = ["ManualRuns"]

_MAX_KNOWN = 20
"""How many jobs an error lists."""
_POLLS = ExponentialBackoff(first=0.05, longest=1.0)
_RETRY = 1.0
"""Seconds until a job is looked at again whose store did not answer."""

_Started: TypeAlias = asyncio.Task[ActionOutcome | None]


class ManualRuns:
    """Starts runs by hand.

    Args:
        cache: the states of jobs.
        runs: those of this process.
        known: the jobs whose code this process has, by name.
        loop: fires jobs; looks at those whose runs have lost their process.
        owners: the processes of runs.
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
        owners: RunOwners,
        membership: Membership,
        clock: FleetClock,
        components: Components,
    ) -> None:
        self._cache = cache
        self._runs = runs
        self._known = known
        self._loop = loop
        self._owners = owners
        self._membership = membership
        self._clock = clock
        self._components = components
        self._announced: tuple[str, frozenset[str]] = ("", frozenset())
        """A session, and the jobs that were announced for it."""
        self._starting: dict[str, asyncio.Task[Any]] = {}
        """Runs that are being recorded, by id."""
        self._withdrawing: set[asyncio.Task[None]] = set()
        """Removals of runs whose callers wait no longer."""
        self._has_stopped = False

    async def run(self, name: str, data: Mapping[str, Any] | None) -> ActionOutcome:
        """Run a job now; wait first for a run that must end before it. Return how it ended.

        Args:
            name: the job's.
            data: is merged into `context.data`.

        Raises:
            NotFound: this process does not have the job, or it was removed.
            Invalid: the data is not a dict, or cannot be read.
            JobRunning: a run has not ended, and `overlap="skip"`.
            Unavailable: the run was lost, because this process stops or has lost its session.
        """
        check_lookup_name(name)
        job = self._known.get(name)
        if job is None:
            raise self._build_not_found("job in this process", name)
        # Whatever the caller's object does, it does before anything is written.
        task = await self._start_soon(job, read_dict("context", data))
        # If the caller is cancelled, the run goes on.
        await asyncio.wait([task])
        outcome = None if task.cancelled() else task.result()
        if outcome is None:
            problem = "it was lost: this process has stopped, or has lost its session"
            raise Unavailable("the run", problem, "run it again")
        return outcome

    async def stop(self, seconds: float) -> None:
        """Start nothing more; wait for the runs that are being recorded, but only for so long."""
        self._has_stopped = True
        if pending := [*self._starting.values(), *self._withdrawing]:
            await asyncio.wait(pending, timeout=seconds)

    async def _start_soon(self, job: KnownJob, data: Mapping[str, Any]) -> _Started:
        """Start a run as soon as it may start; return its task."""
        (run_id,) = self._components.ids.records(1)
        polls = 0
        self._runs.waiting.add(run_id)
        try:
            while True:
                attempt = asyncio.get_running_loop().create_task(self._start(job, run_id, data))
                self._starting[run_id] = attempt
                attempt.add_done_callback(lambda ended: self._forget_attempt(run_id, ended))
                await asyncio.wait([attempt])
                if (task := attempt.result()) is not None:
                    return task
                polls += 1
                await self._components.clock.sleep(_POLLS.limit(polls))
        except BaseException:
            # It may be in line, and would hold up others until they notice.
            removal = asyncio.get_running_loop().create_task(self._withdraw(job.name, run_id))
            self._withdrawing.add(removal)
            removal.add_done_callback(self._withdrawing.discard)
            raise
        finally:
            self._runs.waiting.discard(run_id)

    async def _withdraw(self, name: str, run_id: str) -> None:
        """Take a run from the line whose caller waits no longer, once nobody puts it there."""
        if (attempt := self._starting.get(run_id)) is not None:
            await asyncio.wait([attempt])

        def decide(state: JobState) -> JobState | None:
            changed = withdraw(state, run_id)
            return None if changed == state else changed

        session = self._membership.incarnation
        while self._is_session(session):
            with suppress(Corrupt, Invalid, NewerFormat):
                try:
                    if await self._cache.read(name) is not None:
                        await self._cache.update(name, decide)
                except OUTAGE_ERRORS:
                    await self._components.clock.sleep(_RETRY)
                    continue
            return

    def _forget_attempt(self, run_id: str, attempt: asyncio.Task[Any]) -> None:
        self._starting.pop(run_id, None)
        if not attempt.cancelled():
            # Retrieved, so that it is not logged if the caller was cancelled.
            attempt.exception()

    async def _start(self, job: KnownJob, run_id: str, data: Mapping[str, Any]) -> _Started | None:
        """Record a run, and start it; None if it has to wait.

        Raises:
            JobRunning: a run has not ended, and runs do not wait.
            Unavailable: the store does not answer, and nothing is recorded.
        """
        await self._wait_for_trust()
        now = self._clock.estimate()
        run = ActiveRun(
            id=run_id,
            instant=int(now),
            owner=self._membership.incarnation,
            started_at=now,
            is_manual=True,
        )
        await self._announce(job.name, run.owner)
        while True:
            try:
                return await self._record(job, run, data)
            except OUTAGE_ERRORS:
                if not (self._cache.is_unsure(job.name) and self._is_session(run.owner)):
                    raise
                # What may be recorded as running here has to run here.
                await self._components.clock.sleep(_RETRY)

    async def _wait_for_trust(self) -> None:
        """Wait until others surely believe this process alive.

        Raises:
            Unavailable: this process stops, or its session has ended.
        """
        while True:
            if self._has_stopped or self._membership.has_ended:
                raise Unavailable("the scheduler", "it has stopped", "start it again")
            if self._membership.is_trusted:
                return
            await self._membership.change(self._membership.timing.heartbeat)

    def _is_session(self, incarnation: str) -> bool:
        """Whether a session is still this process's."""
        return self._membership.incarnation == incarnation and not self._membership.has_ended

    async def _announce(self, name: str, session: str) -> None:
        """Write that this process is about to run a job, unless that is written."""
        announced_for, names = self._announced
        if announced_for == session and name in names:
            return
        running = {*self._runs.names}
        announced = await self._cache.jobs.edits.announce_run(session, name, running)
        self._announced = (session, frozenset(announced))

    async def _record(
        self, job: KnownJob, run: ActiveRun, data: Mapping[str, Any]
    ) -> _Started | None:
        """Record that a run starts, and start it; None if it has to wait."""
        name = job.name
        is_started = is_late = False

        def decide(state: JobState) -> JobState | None:
            nonlocal is_started, is_late
            is_started = state.find_run(run.id) is not None
            if is_started:
                return None
            if state.is_removed:
                raise self._build_not_found("job", name)
            # Once it is believed dead, nobody would look for a run that it records. The state
            # was read before, so that a write which arrives after its death is refused.
            is_late = not (self._is_session(run.owner) and self._membership.is_trusted)
            if is_late:
                return None
            changed = start_manually(state, run, self._clock.estimate())
            is_started = changed is not None and changed.find_run(run.id) is not None
            return changed

        # What is remembered may be old where another process fires the job.
        if await self._cache.read(name) is None:
            raise self._build_not_found("job", name)
        stored = await self._cache.update(name, decide)
        if stored is None:
            raise self._build_not_found("job", name)
        if is_started:
            if self._has_stopped:
                self._runs.release(job, run)
                raise Unavailable("the scheduler", "it has stopped", "start it again")
            return self._runs.start(job, stored, run, data)
        if not is_late:
            await self._check_wait(name, stored.state)
        return None

    def _build_not_found(self, kind: str, name: str) -> NotFound:
        known = sorted({*self._known} - {name})
        # One whose code is here was removed, not misspelt.
        hint = None if name in self._known else closest_name(name, known)
        return NotFound(kind, name, known[:_MAX_KNOWN], hint)

    async def _check_wait(self, name: str, state: JobState) -> None:
        """Check that a run may wait for those that have not ended.

        Raises:
            JobRunning: runs do not wait, and none of these has lost its process.
        """
        if state.effective.overlap == "skip" and not await self._owners.has_orphans(state):
            raise JobRunning(name)
        # A dead process's run is given up or resumed by the process that fires the job.
        self._loop.look_at(name)
