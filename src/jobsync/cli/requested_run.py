"""A run of a scheduled job that a command asks the fleet for, and whose end it waits for.

The run is the fleet's: it goes on, whatever becomes of the command.
"""

import click
import msgspec

from jobsync.components import Components
from jobsync.coordination.role import worker_of
from jobsync.core.firing import RunRequest
from jobsync.errors import Unavailable
from jobsync.scheduler.job_store import HistoryEntry
from jobsync.scheduler.operations import JobOperations
from jobsync.status.schedules import ScheduledJobStatus, read_schedules_status
from jobsync.status.why import explain
from jobsync.stores.contract import Store

__all__ = ["RequestedRun"]

_FIRST_POLL = 0.1
_LONGEST_POLL = 2.0
_PATIENCE = 3.0
"""Seconds after which a run that has not begun is explained."""


class RequestedRun:
    """A run that a command has asked for, or is about to. Prints progress to standard error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.namespace = ""
        self._request: RunRequest | None = None
        self._has_begun = False
        self._shown = ""

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
        start, poll = clock.mono(), _FIRST_POLL
        self._request = await jobs.request_run(self.name)
        while (entry := await self._look(jobs, self._request)) is None:
            waited = clock.mono() - start
            if timeout is not None and waited >= timeout:
                return None
            if waited >= _PATIENCE and not self._has_begun:
                await self._explain_wait(store, components)
            left = poll if timeout is None else min(poll, timeout - waited)
            await store.wait(f"schedule/{self.namespace}/", left)
            poll = min(2 * poll, _LONGEST_POLL)
        return entry

    async def _look(self, jobs: JobOperations, request: RunRequest) -> HistoryEntry | None:
        """Return how the run ended; None if it has not."""
        state = await jobs.read_state(self.name)
        if state is not None and request in state.requests:
            self._show("waiting for a process to start it")
            return None
        run = None if state is None else state.find_run(request.id)
        if run is not None:
            self._has_begun = True
            self._show(f"running on {worker_of(run.owner)}")
            return None
        # The end of a run is in its record before it is in the state, so this is final.
        return _read_end(await jobs.find_requested(self.name, request), self.name, request)

    async def _explain_wait(self, store: Store, components: Components) -> None:
        """Print why the run does not begin."""
        schedules = await read_schedules_status(store, components)
        status = await schedules.job(self.name, self.namespace)
        self._show(f"waiting: {explain(_without_pause(status)).text}")

    def _show(self, progress: str) -> None:
        if progress != self._shown:
            click.echo(f"{self.name}: {progress}", err=True)
            self._shown = progress

    def describe_rest(self) -> str:
        """Return what becomes of the run without the command."""
        if self._request is None:
            return f"The run may be requested: see `jobsync schedules list`, {self.name}."
        rest = "goes on" if self._has_begun else "stays requested, and begins as soon as it can"
        return f"The run {rest}: see `jobsync schedules history {self.name}`."


def _check_possible(status: ScheduledJobStatus) -> None:
    """Check that a process can run a job.

    Raises:
        Unavailable: no live process has its code.
    """
    fix = "start a process whose code has the job"
    if status.is_removed:
        raise Unavailable(status.name, "it was removed", fix)
    if not status.workers:
        raise Unavailable(status.name, explain(_without_pause(status)).text, fix)


def _without_pause(status: ScheduledJobStatus) -> ScheduledJobStatus:
    """Return the status as it concerns runs that are asked for, which no pause stops."""
    job = msgspec.structs.replace(status.job, pause=None, enabled=True)
    return msgspec.structs.replace(status, job=job)


def _read_end(entry: HistoryEntry | None, name: str, request: RunRequest) -> HistoryEntry:
    """Return the end of a run that the job's state no longer has."""
    if entry is None:
        entry = HistoryEntry(
            status="lost",
            id=request.id,
            scheduled_time=request.at,
            error="the job was removed before the run began",
        )
    if entry.status == "running":
        entry = msgspec.structs.replace(entry, status="lost", error="its process has ended")
    return msgspec.structs.replace(entry, job_name=name)
