"""The runs of this process: from a state that says "running" to a result in the history.

A run is ours while the stored state says so and our session is the one that it names. Its record in
the history is created once for each instant; it proves that the instant was fired. A run whose
process died is taken over: if its record has a result already, only the state is corrected.

A run that is no longer ours is cancelled, and its result counts for nothing. A run that is ours and
that this process does not perform any more leaves the state, or is released to another process.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.heartbeats import OUTAGE_ERRORS
from jobsync.coordination.membership import Membership
from jobsync.core.firing import drop_run, explain_loss, find_newest_due, finish
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.core.retry import ExponentialBackoff, default_backoff
from jobsync.errors import Corrupt, Invalid, NewerFormat, OutcomeUnknown
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionExecutor, ActionListener, ActionOutcome
from jobsync.scheduler.history import HistoryEntry, describe_end
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import StoredJob
from jobsync.scheduler.settings import JobOptions
from jobsync.stores.contract import Record

__all__ = ["KnownJob", "RunListener", "Runs", "find_calling_runs"]

_BACKOFF = ExponentialBackoff(first=0.1, longest=5.0, jitter=0.5)
_MAX_DAMAGED = 8
"""A record that so many replies show damaged is damaged where it is stored."""
_RELEASE_TIME = 1.0
"""Seconds for which a cancelled run waits for its release."""

T = TypeVar("T")

_calling: ContextVar["Runs | None"] = ContextVar("jobsync_scheduler_runs", default=None)


def find_calling_runs() -> "Runs | None":
    """Return the runs of which the caller is one; None outside of an action."""
    return _calling.get()


class KnownJob(NamedTuple):
    """A job whose code this process has."""

    name: str
    options: JobOptions
    executor: ActionExecutor


class RunListener(ActionListener, Protocol):
    """Receives what happens to runs."""

    def on_start(self, run: ActiveRun, context: JobContext) -> None:
        """Note that a run begins."""

    def on_end(self, run: ActiveRun, context: JobContext, outcome: ActionOutcome) -> None:
        """Note that a run has ended, and that this is stored."""

    def on_lost(self, name: str, run: ActiveRun, reason: str) -> None:
        """Note that a run no longer counts."""

    def on_bug(self, error: BaseException) -> None:
        """Note that this library has failed."""


class _RunLost(Exception):
    """A run is no longer this process's."""


class _Active(NamedTuple):
    """A run of this process."""

    name: str
    run: ActiveRun
    task: asyncio.Task[Any]


class Runs:
    """Runs actions, and records what becomes of them.

    Args:
        cache: the states of jobs.
        membership: this process's session.
        clock: the time by which instants are due.
        components: the clock and randomness of pauses.
        listener: receives what happens.
        build_context: returns the context of a run.
        limit: how many scheduled runs there are at once.
        left: tasks that release cancelled runs after their actions have ended, by run. They outlive
            a stop of the scheduler.
    """

    def __init__(
        self,
        cache: JobCache,
        membership: Membership,
        clock: FleetClock,
        components: Components,
        listener: RunListener,
        build_context: Callable[[KnownJob, JobState, ActiveRun, Mapping[str, Any]], JobContext],
        limit: int,
        left: dict[str, "asyncio.Task[None]"],
    ) -> None:
        self.waiting: set[str] = set()
        """The ids of runs by hand that wait for others to end."""
        self._cache = cache
        self._membership = membership
        self._clock = clock
        self._components = components
        self._listener = listener
        self._build_context = build_context
        self._limit = limit
        self._left = left
        self._active: dict[str, _Active] = {}
        self._unbegun: set[object] = set()
        """The tasks of runs that have not made a step yet."""
        self._on_end: Callable[[str], object] = lambda _: None

    def __len__(self) -> int:
        return len(self._active)

    @property
    def room(self) -> int:
        """How many more scheduled runs may start."""
        manual = sum(active.run.is_manual for active in self._active.values())
        return self._limit - (len(self._active) - manual)

    @property
    def names(self) -> list[str]:
        """The jobs that run here."""
        return [active.name for active in self._active.values()]

    def has(self, run_id: str) -> bool:
        """Whether a run is one of this process's: it waits, or has not ended."""
        return run_id in self._active or run_id in self._left or run_id in self.waiting

    def notify(self, on_end: Callable[[str], object]) -> None:
        """Call a function with the name of each job whose run has ended."""
        self._on_end = on_end

    def start(
        self,
        job: KnownJob,
        stored: StoredJob,
        run: ActiveRun,
        data: Mapping[str, Any] = MappingProxyType({}),
    ) -> "asyncio.Task[ActionOutcome | None]":
        """Start a run that the stored state names. The task returns None if it was lost."""
        if (earlier := self._active.get(run.id)) is not None:
            # Of a former session of this process, which has not noticed its end.
            earlier.task.cancel()
        task = asyncio.get_running_loop().create_task(
            self._run(job, stored.state, run, data), name=f"jobsync job {job.name}"
        )
        self._active[run.id] = _Active(job.name, run, task)
        self._unbegun.add(task)
        task.add_done_callback(lambda ended: self._forget(job, run, ended))
        return task

    def cancel_lost(self) -> None:
        """Cancel the runs of sessions that are no longer this process's."""
        for active in list(self._active.values()):
            if not self._is_ours(active.run):
                active.task.cancel()

    async def finish_all(self, grace: float) -> None:
        """Wait until all runs have ended; cancel those that take longer."""
        own = asyncio.current_task()
        tasks = [active.task for active in self._active.values() if active.task is not own]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=grace)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1.0)

    def report_loss(self, name: str, run: ActiveRun) -> None:
        """Report a run of a dead process that was given up."""
        self._listener.on_lost(name, run, explain_loss(run))

    def release(self, job: KnownJob, run: ActiveRun) -> "asyncio.Task[None]":
        """Release a run that is not performed here, so that another process resumes it.

        That happens after its action has ended, and when the store answers. No caller's
        cancellation ends it.
        """
        task = asyncio.get_running_loop().create_task(self._release(job, run))
        self._left[run.id] = task
        task.add_done_callback(lambda ended: self._forget_left(job.name, run, ended))
        return task

    def _hand_over(self, job: KnownJob, run: ActiveRun) -> "asyncio.Task[None]":
        """Release a run that a stop has cancelled, which does not count as a death."""
        resumed = max(run.resumed - 1, 0)
        return self.release(job, msgspec.structs.replace(run, resumed=resumed))

    def _forget_left(self, name: str, run: ActiveRun, task: object) -> None:
        if self._left.get(run.id) is task:
            # Otherwise this process has released it again, in its next session.
            del self._left[run.id]
        self._on_end(name)

    def _forget(self, job: KnownJob, run: ActiveRun, task: asyncio.Task[Any]) -> None:
        """Note that a run's task has ended, however it did."""
        active = self._active.get(run.id)
        if active is not None and active.task is task:
            # Otherwise this process has resumed it in its next session.
            del self._active[run.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.on_bug(error)
        if task in self._unbegun:
            # It was cancelled before it could notice.
            self._unbegun.discard(task)
            self._hand_over(job, run)
        self._on_end(job.name)

    async def _run(
        self, job: KnownJob, state: JobState, run: ActiveRun, data: Mapping[str, Any]
    ) -> ActionOutcome | None:
        """Run a job, and report it if the run is lost; then return None."""
        self._unbegun.discard(asyncio.current_task())
        _calling.set(self)
        try:
            return await self._perform(job, state, run, data)
        except asyncio.CancelledError:
            self._listener.on_lost(job.name, run, "it was cancelled")
            if self._is_ours(run):
                released = self._hand_over(job, run)
                if not job.executor.is_running(run.id):
                    await asyncio.wait([released], timeout=_RELEASE_TIME)
            raise
        except _RunLost as error:
            self._listener.on_lost(job.name, run, str(error))
            return None
        except (Corrupt, NewerFormat) as error:
            # Nobody can write its result. Without it the job goes on, unless its state is damaged.
            self._cache.jobs.report(job.name, error)
            self._listener.on_lost(job.name, run, str(error))
            with contextlib.suppress(Corrupt, NewerFormat):
                await self._until_answered(run, lambda: self._drop(job.name, run))
            return None
        except Invalid as error:
            # Its job's state is too large. Other jobs do not suffer.
            self._cache.jobs.report(job.name, error)
            self._listener.on_lost(job.name, run, str(error))
            self.release(job, run)
            return None

    async def _perform(
        self, job: KnownJob, state: JobState, run: ActiveRun, data: Mapping[str, Any]
    ) -> ActionOutcome | None:
        """Claim the run's record, run the action, write its result, take the run from the state."""
        name = job.name
        record = await self._until_answered(run, lambda: self._claim_record(name, run))
        if record is None:
            return None
        if not isinstance(record, Record):
            # The process before has stored the result, and died before it could say so.
            await self._finish(name, run, record)
            return None
        # It may still run here for a former session of this process, which was believed dead.
        await job.executor.wait(run.id)
        await self._check_trust(run)
        definition, context = state.effective, self._build_context(job, state, run, data)
        self._listener.on_start(run, context)
        outcome = await job.executor.run(
            context,
            timeout=definition.timeout,
            retries=definition.retries,
            backoff=job.options.backoff or default_backoff,
            listener=self._listener,
            prepare=lambda: self._check_trust(run),
        )
        # By the clock of the fleet, as all times of a job: this machine's may be wrong.
        entry = describe_end(run, self._membership.worker_id, outcome, self._clock.estimate())
        is_ours = await self._until_answered(
            run, lambda: self._write_result(name, run, record, entry)
        )
        if not is_ours:
            self._listener.on_lost(name, run, "another process has taken it over")
            return None
        await self._finish(name, run, entry)
        self._listener.on_end(run, context, outcome)
        return outcome

    async def _write_result(
        self, name: str, run: ActiveRun, base: Record, entry: HistoryEntry
    ) -> bool:
        """Write a result into the history; return False if the run is another process's by now."""
        history = self._cache.jobs.history
        while await history.write(base, entry) is None:
            found = await history.read(name, run)
            if found is None:
                # Somebody has removed it. The state tells whose run it is.
                stored = await self._cache.read(name)
                current = None if stored is None else stored.state.find_run(run.id)
                if current is None or current.owner != run.owner:
                    return False
                if await history.create_entry(name, run, entry) is not None:
                    return True
                continue
            if (found[1].id, found[1].owner) != (run.id, run.owner):
                return False
            if found[1].status != "running":
                # An earlier write of this result, whose reply was lost.
                return True
            base = found[0]
        return True

    async def _claim_record(self, name: str, run: ActiveRun) -> Record | HistoryEntry | None:
        """Create the record of a run, or take it over from the process that ran it before.

        Returns:
            The record, if the run may begin; the entry, if it has a result already; None if it
            may not begin at all. Then it is no longer in the state either.
        """
        history = self._cache.jobs.history
        record = await history.create(name, run, self._membership.worker_id)
        if record is not None:
            return record
        found = await history.read(name, run)
        if found is None:
            reason = "its record was removed"
        elif found[1].id != run.id:
            reason = "its instant was fired before"
        elif found[1].status != "running":
            return found[1]
        elif found[1].resumed > run.resumed:
            # This process stood still, and was believed dead.
            self._listener.on_lost(name, run, "another process has taken it over")
            return None
        else:
            entry = msgspec.structs.replace(
                found[1],
                owner=run.owner,
                worker_id=self._membership.worker_id,
                resumed=run.resumed,
            )
            if (record := await history.write(found[0], entry)) is not None:
                return record
            raise OutcomeUnknown(found[0].key, "another process has written it")
        await self._drop(name, run)
        self._listener.on_lost(name, run, reason)
        return None

    async def _drop(self, name: str, run: ActiveRun) -> None:
        """Take a run from the state that cannot be performed."""
        await self._cache.update(name, lambda state: drop_run(state, run))

    async def _finish(self, name: str, run: ActiveRun, entry: HistoryEntry) -> None:
        """Take a run that has a result from the job's state, and record what was due meanwhile."""
        now = await self._find_end_time(name)

        async def write() -> bool:
            await self._cache.update(
                name,
                lambda state: finish(
                    name, state, run, entry.status, now, entry.error, ended_at=entry.ended_at
                ),
            )
            await self._cache.write_history(name, now)
            return True

        await self._until_answered(run, write)

    async def _find_end_time(self, name: str) -> float:
        """Return the time by which instants were due while a job ran.

        The clocks are compared first, if only that can tell which instants these are: a process
        that fires nothing has not compared them for long.
        """
        now, stored = self._clock.now(), self._cache.known.get(name)
        if stored is None or not stored.state.is_active:
            return now
        latest = find_newest_due(name, stored.state, self._clock.latest)
        if find_newest_due(name, stored.state, now) != latest:
            await self._clock.refresh()
        return self._clock.now()

    async def _release(self, job: KnownJob, run: ActiveRun) -> None:
        """Release a run once its action has ended: until then nobody may start it again."""
        name = job.name
        free = msgspec.structs.replace(run, owner="")

        def decide(state: JobState) -> JobState | None:
            current = state.find_run(run.id)
            if current is None or current.owner != run.owner:
                return None
            running = tuple(free if other.id == run.id else other for other in state.running)
            return msgspec.structs.replace(state, running=running)

        async def write() -> None:
            await self._cache.update(name, decide)
            # If the session goes on, nothing else tells that the run is free.
            await self._cache.jobs.edits.note({name: None})

        await job.executor.wait(run.id)
        # Its session may have ended meanwhile, and tells the same.
        with contextlib.suppress(Corrupt, Invalid, NewerFormat):
            await self._until_answered(run, write)

    def _is_ours(self, run: ActiveRun) -> bool:
        """Whether the session that a run belongs to is this process's, as far as it knows."""
        return run.owner == self._membership.incarnation and not self._membership.has_ended

    async def _check_trust(self, run: ActiveRun) -> None:
        """Wait until others surely believe this process alive.

        A process that stood still may have been declared dead: another one has the run by now.

        Raises:
            _RunLost: the run is no longer ours.
        """
        while self._is_ours(run):
            if self._membership.is_trusted:
                return
            await self._membership.change(self._membership.timing.heartbeat)
        raise _RunLost("this process has lost its session")

    async def _until_answered(self, run: ActiveRun, work: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a request until the store answers; None if the run is no longer ours.

        Raises:
            Corrupt: a record cannot be read, and that is not because a reply was damaged.
        """
        attempt = damaged = 0
        while self._is_ours(run):
            try:
                return await work()
            except OUTAGE_ERRORS:
                attempt += 1
            except Corrupt:
                damaged += 1
                if damaged == _MAX_DAMAGED:
                    raise
                attempt = damaged
            await _BACKOFF.sleep(attempt, self._components.clock, self._components.randomness)
        return None
