"""Jobs that run at times, once in the whole fleet.

    scheduler = SchedulerPlugin(jobs={"cleanup": {"schedule": "0 3 * * *", "action": clean}})
    await db.use_plugin(scheduler)

Guarantees: each instant of a job is fired at most once, whatever processes and leaders do; one that
was not fired is in the history with the reason. An action runs at least once for each instant that
was fired: if its process dies, another one runs it again.

Without an election (`enable_coordinator=False`) every process fires; the store lets one of them.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Unpack

from jobsync.components import Components
from jobsync.coordination.heartbeats import OUTAGE_ERRORS
from jobsync.core.job_state import ActiveRun, JobState, find_schedule
from jobsync.database.coordinator_plugin import CoordinatorPlugin, split_options
from jobsync.errors import (
    Corrupt,
    Invalid,
    Misconfigured,
    NewerFormat,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.scheduler import events
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionExecutor
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.operations import JobStatus
from jobsync.scheduler.parts import SchedulerParts
from jobsync.scheduler.reporting import JobHooks, Reporter
from jobsync.scheduler.runs import KnownJob, find_calling_runs
from jobsync.scheduler.settings import (
    JobOptions,
    SchedulerOptions,
    SchedulerSettings,
    check_new_name,
    check_schedule_given,
    merge_options,
    parse_job,
)
from jobsync.settings import Sources, resolve
from jobsync.user_code import UserThreads

__all__ = ["SchedulerPlugin"]

_A = TypeVar("_A", bound=Callable[..., Any])

_STOP_TIME = 5.0
_RECORDING_TIME = 1.0
"""Seconds for which a stop waits for runs by hand that are being recorded."""

_ARGUMENTS = ("jobs", "namespace", "on_job_start", "on_job_complete", "on_job_error")
"""What an unknown option may have meant."""


class SchedulerPlugin(CoordinatorPlugin):
    """Runs jobs at times, once in the whole fleet.

    Args:
        jobs: options by name: `schedule` and `action` or `enqueue`, and if needed `timezone`,
            `description`, `enabled`, `retries`, `backoff`, `timeout`, `overlap`, `misfire`,
            `max_catch_up`, `run_on_start`, `jitter` and `context`.
        on_job_start: called when a run begins: `(name, context)`.
        on_job_complete: called when a run has succeeded: `(name, result, duration)`.
        on_job_error: called after each failed attempt: `(name, error, attempt)`.
        namespace: separates several schedulers.
        options: as in `SchedulerSettings` and `CoordinatorSettings`.

    Raises:
        Invalid, Misconfigured: an option or a job is wrong, with the fix.
    """

    slug: ClassVar[str] = "scheduler"
    runs_jobs: ClassVar[bool] = True

    def __init__(
        self,
        *,
        jobs: Mapping[str, Mapping[str, Any]] | None = None,
        on_job_start: Callable[..., object] | None = None,
        on_job_complete: Callable[..., object] | None = None,
        on_job_error: Callable[..., object] | None = None,
        namespace: str | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        passed, shared = split_options(SchedulerSettings, options, "a scheduler", _ARGUMENTS)
        super().__init__(namespace=namespace, **shared)
        sources = Sources.load(os.environ, Path.cwd())
        self.settings = resolve(SchedulerSettings, passed, sources, section="scheduler").value
        self._hooks = JobHooks(
            self.emit,
            {
                "on_job_start": on_job_start,
                "on_job_complete": on_job_complete,
                "on_job_error": on_job_error,
            },
        )
        self._reporter = Reporter(self.emit, self._hooks, self._fail)
        self._threads = UserThreads()
        self._jobs: dict[str, JobOptions] = {}
        """The jobs of this process's code."""
        self._adopted: set[str] = set()
        """Those that other plugins have offered."""
        self._known: dict[str, KnownJob] = {}
        self._left: dict[str, asyncio.Task[None]] = {}
        """Tasks that release cancelled runs, see `Runs`."""
        self._parts: SchedulerParts | None = None
        self._generation = 0
        """Of this process's code, see `JobCode`; kept while the plugin is stopped."""
        self._bugs: asyncio.Queue[BaseException] = asyncio.Queue()
        """Errors to fail with."""
        if jobs is not None and not isinstance(jobs, Mapping):
            raise Invalid("jobs", jobs, "must be a dict by name", 'write {"name": {...}}')
        for name, job in (jobs or {}).items():
            self._add(name, job)

    def job(self, schedule: str, *, name: str | None = None, **options: Any) -> Callable[[_A], _A]:
        """Run a function at times. A decorator: `@scheduler.job("0 3 * * *")`.

        Args:
            schedule: when to run it.
            name: the job's; the function's by default.
            options: further options of the job.
        """
        check_schedule_given(schedule)

        def decorate(function: _A) -> _A:
            given = getattr(function, "__name__", None) if name is None else name
            if given is None:
                raise Invalid("name", None, "is missing: the function has none", "pass name=")
            chosen = self._add(given, {"schedule": schedule, "action": function, **options})
            if self.is_running:
                self._learn(chosen)
                self.run_in_background(partial(self._register, chosen), f"adds {chosen}")
            return function

        return decorate

    async def add_job(
        self, name: str, options: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """Add a job to this process's, and store its definition.

        Raises:
            Invalid: an option is wrong, or there is a job of this name.
        """
        name = self._add(name, merge_options(options, more))
        if not self.is_running:
            return
        try:
            self._learn(name)
            await self._get_parts().register(name)
        except BaseException:
            # So that it can be added again. It may have been published that it is here.
            self._jobs.pop(name, None)
            self._known.pop(name, None)
            self._get_parts().code.change()
            raise

    async def adopt_jobs(self, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """Run jobs of another plugin, which offers them whenever it starts.

        Raises:
            Invalid: an option is wrong, or there is another job of this name.
        """
        for name, options in jobs.items():
            if name in self._adopted:
                continue
            # At once: it may be offered again meanwhile.
            self._adopted.add(name)
            try:
                await self.add_job(name, options)
            except BaseException:
                self._adopted.discard(name)
                raise

    async def remove_job(self, name: str) -> bool:
        """Remove a job from the whole fleet; return True. Its history stays.

        A process whose code has the job adds it again when it starts.

        Raises:
            NotFound: there is no such job, or it was removed before.
        """
        parts = self._get_parts()
        await parts.operations.remove(name)
        self._jobs.pop(name, None)
        self._known.pop(name, None)
        self._adopted.discard(name)
        parts.code.change()
        parts.loop.drop(name)
        try:
            # What was due and had to wait: nobody fires the job here any more.
            await parts.cache.read(name)
            await parts.cache.write_history(name, parts.clock.now())
        except OUTAGE_ERRORS:
            # It stays in the state, and a leader writes it.
            pass
        if not self.is_coordinator:
            parts.cache.forget(name)
        self.emit(events.JobRemoved(job_name=name))
        return True

    async def update_job(self, name: str, **changes: Any) -> bool:
        """Change a job in the whole fleet, until its code changes; False if nothing changes.

        Nothing of the past is fired.

        Raises:
            Invalid: a field is unknown, or its value wrong.
            NotFound: there is no such job.
        """
        is_changed = await self._get_parts().operations.edit(name, changes)
        if is_changed:
            self._get_parts().wake(name)
            self.emit(events.JobUpdated(job_name=name, changes=tuple(sorted(changes))))
        return is_changed

    async def enable_job(self, name: str) -> bool:
        """Fire a job again; False if it is fired. What was due meanwhile is skipped."""
        is_changed = await self._get_parts().operations.resume(name)
        if is_changed:
            self._get_parts().wake(name)
            self.emit(events.JobEnabled(job_name=name))
        return is_changed

    async def disable_job(self, name: str, reason: str = "") -> bool:
        """Stop firing a job in the whole fleet; False if it is stopped. Its run goes on."""
        is_changed = await self._get_parts().operations.pause(name, reason)
        if is_changed:
            self.emit(events.JobDisabled(job_name=name, reason=reason))
        return is_changed

    async def run_job(self, name: str, context: Mapping[str, Any] | None = None) -> Any:
        """Run a job now, in this process; return its action's result.

        With `overlap="queue"` it waits until a run of the job has ended. It always waits until
        a run whose process has died is given up. The limit of `max_concurrent_jobs` does not
        hold for it.

        Args:
            name: the job's.
            context: is merged into `context.data`.

        Raises:
            NotFound: this process does not have the job.
            JobRunning: a run has not ended, and `overlap="skip"`.
            Unavailable: the run was lost, because this process stops or has lost its session.
            Exception: what the last attempt raised; TimeoutError, if it took too long.
        """
        manual_runs = self._get_parts().manual_runs
        # Refuses if the plugin has stopped.
        self._get_membership()
        return (await manual_runs.run(name, context)).unwrap()

    async def list_jobs(self) -> list[JobStatus]:
        """Return all jobs of the fleet, by name."""
        return await self._get_parts().operations.list_jobs()

    async def job_status(self, name: str) -> JobStatus:
        """Return what is known of a job.

        Raises:
            NotFound: there is no such job.
        """
        return await self._get_parts().operations.status(name)

    async def job_history(
        self,
        job: str | None = None,
        *,
        status: str | Sequence[str] | None = None,
        since: float | None = None,
        limit: int = 50,
        after: str = "",
    ) -> list[HistoryEntry]:
        """Return runs and gaps, the newest first. See `JobOperations.history`."""
        return await self._get_parts().operations.history(
            job, status=status, since=since, limit=limit, after=after
        )

    async def on_start(self) -> None:
        """Store the definitions of this process's jobs, and begin to fire."""
        # It belongs to one event loop; the next start may be on another.
        self._bugs = asyncio.Queue()
        self._parts = parts = SchedulerParts(
            self.database,
            self._get_membership(),
            self.namespace,
            self.settings,
            self._known,
            self._reporter,
            self.emit,
            self._build_context,
            self._on_veto,
            self._left,
            self._generation,
        )
        await parts.clock.refresh()
        for plugin in self.list_started():
            await self.adopt_jobs(plugin.scheduled_jobs)
        self._known.clear()
        for name in self._jobs:
            self._learn(name)
        await parts.code.register_all()
        self._generation = parts.code.generation
        self.run_in_background(parts.loop.run, "fires")
        self.run_in_background(self._follow, "follows the coordinator")
        self.run_in_background(self._raise_bugs, "reports bugs")
        self.run_in_background(parts.retention.run, "removes old history")
        if not self.database.store.is_billed:
            self.run_in_background(parts.follow_edits, "follows edits")

    async def on_stop(self) -> None:
        """Wait for running actions, and leave those behind that do not finish in time."""
        parts = self._get_parts()
        parts.loop.drop_all()
        await parts.loop.finish_starts()
        await parts.manual_runs.stop(_RECORDING_TIME)
        await parts.runs.finish_all(self.settings.grace)
        await self._hooks.finish(_STOP_TIME / 2)
        self._get_membership().watch(f"schedule {parts.jobs.prefix}", ())

    async def on_become_coordinator(self) -> None:
        """Put all jobs of this process on duty, whether or not others can be told of them."""
        await self._try_to_publish()
        self._assign()

    async def on_stop_being_coordinator(self) -> None:
        """Take the jobs off duty; runs that have begun go on."""
        self.prepare_stop()

    def prepare_stop(self) -> None:
        """Fire nothing more."""
        if self._parts is not None:
            self._parts.loop.drop_all()

    @property
    def prefixes(self) -> Sequence[str]:
        """Where jobs and versions of the code are removed."""
        return () if self._parts is None else self._parts.jobs.prefixes

    @property
    def stop_time(self) -> float:
        """Seconds that `stop` may take."""
        return self.settings.grace + _STOP_TIME

    def list_running(self) -> list[str]:
        """Return descriptions of actions that run."""
        return [text for job in self._known.values() for text in job.executor.list_running()]

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is one of its actions."""
        calling = find_calling_runs()
        if calling is None or self._parts is None:
            return False
        return calling is self._parts.runs and len(calling) > 0

    def _add(self, given: object, options: object) -> str:
        """Add a job that is checked before anything is stored; return its name.

        Raises:
            Invalid: an option is wrong, or there is a job of this name.
        """
        name = check_new_name(given)
        if name in self._jobs:
            fix = "choose another name, or remove that one first"
            raise Invalid("name", name, "is the name of another job", fix)
        job = parse_job(name, options, self.settings)
        ActionExecutor(job.action, components=Components.system(), threads=self._threads)
        self._jobs[name] = job
        return name

    def _learn(self, name: str) -> None:
        """Make one of this process's jobs ready to run.

        Raises:
            Invalid: it enqueues messages, which is not possible here.
        """
        options = self._jobs[name]
        if options.enqueue is not None:
            options.enqueue.check(name, self.database)
        executor = ActionExecutor(
            options.action, components=self.database.components, threads=self._threads
        )
        self._known[name] = KnownJob(name, options, executor)

    async def _register(self, name: str) -> None:
        """Store the definition of a job that was added while this runs, unless it was removed.

        Raises:
            Unavailable: the store does not answer, refuses, or its reply is lost; this is called
                again.
        """
        if name not in self._known:
            return
        try:
            await self._get_parts().register(name)
        except (Misconfigured, OutcomeUnknown) as error:
            # Any other error than this one would make the database fail.
            raise Unavailable(self.database.store.name, str(error).rstrip(".")) from error

    async def _try_to_publish(self) -> None:
        """Publish which jobs this process has; `_follow` does it if that fails."""
        parts = self._get_parts()
        try:
            await parts.code.publish()
        except OUTAGE_ERRORS:
            pass
        except (Corrupt, NewerFormat) as error:
            parts.jobs.report_note(error)

    def _assign(self) -> None:
        """Put jobs on duty in this process, by whether it leads."""
        if self.term is not None:
            self._get_parts().loop.assign(self._known, self.term, self._get_parts().code.digest)

    async def _follow(self) -> None:
        """Notice lost sessions and dead runners; fire what the coordinator cannot."""
        membership, parts = self._get_membership(), self._get_parts()
        runs, loop, code = parts.runs, parts.loop, parts.code
        while True:
            await membership.change(membership.timing.heartbeat)
            runs.cancel_lost()
            loop.look_at_orphans()
            try:
                await code.publish()
                await code.forget_old()
                if self.is_coordinator:
                    await parts.removed.forget_some()
                lacking = frozenset() if self.is_coordinator else await self._find_lacking()
            except OUTAGE_ERRORS:
                continue
            except (Corrupt, NewerFormat) as error:
                self._get_parts().jobs.report_note(error)
                continue
            if not self.is_coordinator and lacking != loop.duty:
                loop.assign(lacking, None, code.digest)

    async def _find_lacking(self) -> frozenset[str]:
        """Return the jobs that the coordinator's code lacks and that this process fires."""
        coordinator, code = self._coordinator, self._get_parts().code
        role = None if coordinator is None else coordinator.election.role
        owner = None if role is None else role.owner
        leader = None if owner is None else self._get_membership().seen.get(owner)
        return frozenset() if leader is None else await code.find_lacking(leader, self.members)

    def _build_context(
        self, job: KnownJob, state: JobState, run: ActiveRun, data: Mapping[str, Any]
    ) -> JobContext:
        return JobContext(
            job_name=job.name,
            execution_id=run.id,
            scheduled_at=find_schedule(state).in_zone(run.instant),
            database=self.database,
            scheduler=self,
            is_manual=run.is_manual,
            data={**job.options.context, **data},
        )

    async def _raise_bugs(self) -> None:
        """Raise what a run could not handle, so that the database fails."""
        raise await self._bugs.get()

    def _on_veto(self, reason: str) -> None:
        """Hand the role over while this machine's clock cannot be right."""
        self._reporter.on_veto(reason)
        if self._coordinator is not None and reason:
            self._coordinator.withhold(reason)
        elif self._coordinator is not None:
            self._coordinator.stand()

    def _fail(self, error: BaseException) -> None:
        self._bugs.put_nowait(error)

    def _get_parts(self) -> SchedulerParts:
        """Return what it consists of while it runs.

        Raises:
            Invalid: it was never started.
        """
        if self._parts is None:
            raise Invalid("plugin", self.name, "is not running", "await plugin.start() first")
        return self._parts
