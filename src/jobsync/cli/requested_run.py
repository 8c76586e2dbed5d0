"""A run of a scheduled job that a command asks the fleet for, and whose end it waits for.

The run is the fleet's: it goes on, whatever becomes of the command.
"""

import math

import click
import msgspec

from jobsync.components import Components
from jobsync.coordination.role import worker_of
from jobsync.core.job_state import JobState, RunRequest
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Unavailable
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.job_store import SCHEDULES
from jobsync.scheduler.operations import JobOperations
from jobsync.status.schedules import ScheduledJobStatus, read_schedules_status
from jobsync.status.why import explain
from jobsync.stores.contract import Store

__all__ = ["RequestedRun"]

_POLLS = ExponentialBackoff(first=0.1, longest=2.0)
_PATIENCE = 1.0
"""Seconds after which it matters why a run has not begun."""
_FIX = "start a process whose code has the job"


class RequestedRun:
    """A run that a command has asked for, or is about to. Prints progress to standard error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.namespace = ""
        self._request: RunRequest | None = None
        self._has_begun = False
        self._progress = self._shown = ""

    async def follow(
        self,
        store: Store,
        components: Components,
        status: ScheduledJobStatus,
        jobs: JobOperations,
        timeout: float | None,
    ) -> HistoryEntry | None:
        """Ask for the run, and wait for its end; return None after the timeout.

        Raises:
            Unavailable: no live process has the job.
        """
        _check_possible(status)
        self.namespace = status.namespace
        clock = components.clock
        start, polls = clock.mono(), 0
        self._request = await jobs.request_run(self.name)
        # Before the first look: the run may have begun by then.
        self._progress = "waiting for a process to start it"
        self._show()
        while (entry := await self._look(jobs, self._request)) is None:
            waited = clock.mono() - start
            left = math.inf if timeout is None else timeout - waited
            if waited >= _PATIENCE or left <= 0:
                await self._examine_fleet(store, components)
            self._show()
            if left <= 0:
                return None
            polls += 1
            await store.wait(f"{SCHEDULES}{self.namespace}/", min(_POLLS.limit(polls), left))
        return entry

    async def _look(self, jobs: JobOperations, request: RunRequest) -> HistoryEntry | None:
        """Return how the run ended; None if it has not.

        Raises:
            Unavailable: it has ended, and nobody knows how.
        """
        state = await jobs.read_state(self.name)
        if state is not None and request in state.requests:
            return None
        run = None if state is None else state.find_run(request.id)
        if run is not None:
            self._has_begun = True
            self._progress = f"running on {worker_of(run.owner)}"
            return None
        # The end of a run is in its record before it is in the state, so this is final.
        entry = await jobs.find_requested(self.name, request)
        if entry is None:
            entry = self._find_pruned(state, request)
        elif entry.status == "running":
            entry = _build_lost(request, "its process has ended")
        return msgspec.structs.replace(entry, job_name=self.name)

    def _find_pruned(self, state: JobState | None, request: RunRequest) -> HistoryEntry:
        """Return how a run ended that has no record: old history may have been removed since."""
        last = None if state is None else state.statistics.last_run
        if last is not None and last.id == request.id:
            return HistoryEntry(
                status=last.status,
                id=last.id,
                scheduled_time=request.at,
                is_manual=True,
                started_at=last.started_at,
                ended_at=last.ended_at,
                duration=last.ended_at - last.started_at,
                error=last.error,
            )
        if not self._has_begun and (state is None or state.is_removed):
            return _build_lost(request, "the job was removed")
        problem = "its end is unknown: its record was removed as old history"
        raise Unavailable(
            f"the run of {self.name}", problem, "raise history_limit or history_retention"
        )

    async def _examine_fleet(self, store: Store, components: Components) -> None:
        """Find out why the run does not begin, and whether anybody is left to end it.

        Raises:
            Unavailable: no live process has the job any more.
        """
        schedules = await read_schedules_status(store, components)
        status = _without_pause(await schedules.job(self.name, self.namespace))
        reason = explain(status)
        if not (status.workers or status.is_removed):
            rest = ", and run it again" if self._has_begun else ": the run stays requested"
            raise Unavailable(self.name, reason.text, f"{_FIX}{rest}")
        if not self._has_begun:
            self._progress = f"waiting: {reason.text}"

    def _show(self) -> None:
        if self._progress != self._shown:
            click.echo(f"{self.name}: {self._progress}", err=True)
            self._shown = self._progress

    def describe_rest(self) -> str:
        """Return what becomes of the run without the command."""
        if self._request is None:
            return "The run may have been requested, or not: see `jobsync schedules list`."
        rest = "goes on" if self._has_begun else "stays requested, and begins as soon as it can"
        return f"The run {rest}: see `jobsync schedules history {self.name}`."


def _build_lost(request: RunRequest, reason: str) -> HistoryEntry:
    return HistoryEntry(
        status="lost", id=request.id, scheduled_time=request.at, error=reason, is_manual=True
    )


def _check_possible(status: ScheduledJobStatus) -> None:
    """Check that a process can run a job.

    Raises:
        Unavailable: no live process has its code.
    """
    if status.is_removed or not status.workers:
        raise Unavailable(status.name, explain(_without_pause(status)).text, _FIX)


def _without_pause(status: ScheduledJobStatus) -> ScheduledJobStatus:
    """Return the status as it concerns runs that are asked for, which no pause stops."""
    job = msgspec.structs.replace(status.job, pause=None, enabled=True)
    return msgspec.structs.replace(status, job=job)
