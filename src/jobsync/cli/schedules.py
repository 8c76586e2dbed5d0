"""`jobsync schedules`: inspect scheduled jobs, run them now, pause, resume and change them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from jobsync.cli.options import (
    FAILED,
    INTERRUPTED,
    DurationType,
    SuggestingGroup,
    WholeNumberType,
    after_option,
    json_option,
    limit_option,
    now,
    option,
    parse_seconds,
    reason_option,
    run_on_store,
    url_option,
)
from jobsync.cli.render import show_rows
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.scheduler.history import HistoryEntry
    from jobsync.scheduler.operations import JobOperations
    from jobsync.status.schedules import ScheduledJobStatus, SchedulesStatus
    from jobsync.stores.contract import Store

__all__ = ["schedules"]

T = TypeVar("T")

STATUSES = ("running", "success", "error", "timeout", "lost", "missed", "skipped")
"""Those of `RunStatus`, which takes too long to load for a help text."""

namespace_option = option(
    "--namespace",
    envvar="JOBSYNC_NAMESPACE",
    help="Namespace of the scheduler; needed only if several have a job of this name.",
)
job_argument = click.argument("name", envvar="JOBSYNC_JOB")


@click.group(cls=SuggestingGroup)
def schedules() -> None:
    """Show scheduled jobs; run, pause, resume and change them.

    NAME is the name of a job. Times are shown in the time zone of this machine (TZ).
    """


@schedules.command("list")
@namespace_option
@url_option
@json_option
def list_(url: str | None, namespace: str | None, *, as_json: bool) -> None:
    """Show the jobs: when they fire, how the last run ended, and what is special.

    Jobs that no live process has the code of are marked with "no process".
    """
    from jobsync.cli.schedule_tables import show_jobs

    async def read(status: SchedulesStatus) -> list[ScheduledJobStatus]:
        # Only --json shows more than the next instant, and each takes a while.
        return await (status.jobs(namespace) if as_json else status.jobs(namespace, upcoming=1))

    show_jobs(_run_on_schedules(url, read), as_json=as_json)


@schedules.command("next")
@job_argument
@option(
    "-n",
    "--count",
    default=5,
    type=WholeNumberType(1, 10_000),
    envvar="JOBSYNC_COUNT",
    show_default=True,
    help="How many instants.",
)
@namespace_option
@url_option
@json_option
def next_(name: str, count: int, url: str | None, namespace: str | None, *, as_json: bool) -> None:
    """Show the next instants of a job, in its time zone and in yours."""
    from jobsync.cli.schedule_tables import show_instants

    status = _run_on_schedules(url, lambda found: found.job(name, namespace))
    show_instants(status, count, as_json=as_json)


@schedules.command()
@click.argument("name", required=False, envvar="JOBSYNC_JOB")
@option(
    "--status",
    "statuses",
    type=click.Choice(STATUSES),
    multiple=True,
    envvar="JOBSYNC_STATUS",
    help="Only runs with this status; repeat it for several.",
)
@option(
    "--since",
    envvar="JOBSYNC_SINCE",
    callback=lambda _, __, text: None if text is None else _read_since(text),
    help="Only runs that were due since then: 90m, 2d, 2026-01-31 or 2026-01-31T18:00.",
)
@limit_option
@after_option("Continue after the run with this cursor, as shown by --json; needs NAME.")
@namespace_option
@url_option
@json_option
def history(
    name: str | None,
    statuses: tuple[str, ...],
    since: float | None,
    limit: int,
    after: str,
    url: str | None,
    namespace: str | None,
    *,
    as_json: bool,
) -> None:
    """Show runs, and what was not run and why, newest first; of all jobs without NAME."""
    from jobsync.cli.schedule_tables import show_history

    async def read(store: Store, components: Components) -> list[tuple[str, HistoryEntry]]:
        status = await _read_schedules(store, components)
        spaces = status.choose(namespace)
        if name is not None:
            spaces = ((await status.job(name, namespace)).namespace,)
        return [
            (space, entry)
            for space in spaces
            for entry in await _open(store, components, space).history(
                name, status=statuses or None, since=since, limit=limit, after=after
            )
        ]

    found = run_on_store(url, read)
    found.sort(key=lambda each: -each[1].scheduled_time)
    show_history(found[:limit], as_json=as_json)


@schedules.command()
@job_argument
@namespace_option
@url_option
@json_option
def why(name: str, url: str | None, namespace: str | None, *, as_json: bool) -> None:
    """Explain why a job does not fire, or when it does."""
    from jobsync.cli.why import show_reason

    status = _run_on_schedules(url, lambda found: found.job(name, namespace))
    show_reason(status.name, status, as_json=as_json)


@schedules.command()
@job_argument
@reason_option
@namespace_option
@url_option
@json_option
def pause(name: str, reason: str, url: str | None, namespace: str | None, *, as_json: bool) -> None:
    """Stop firing a job in the whole fleet until it is resumed.

    Its run continues. A new definition in its code ends the pause, too.
    """
    where, is_new = _change(url, name, namespace, lambda jobs: jobs.pause(name, reason))
    _show_change(where, name, "paused" if is_new else "already paused", as_json=as_json)


@schedules.command()
@job_argument
@namespace_option
@url_option
@json_option
def resume(name: str, url: str | None, namespace: str | None, *, as_json: bool) -> None:
    """Fire a job again that was paused or disabled. What was due meanwhile is skipped."""
    where, was_idle = _change(url, name, namespace, lambda jobs: jobs.resume(name))
    _show_change(where, name, "resumed" if was_idle else "not paused", as_json=as_json)


@schedules.command()
@job_argument
@option(
    "--schedule",
    envvar="JOBSYNC_NEW_SCHEDULE",
    help='When it fires: "0 3 * * *", @daily or "@every 90s".',
)
@option(
    "--timezone",
    envvar="JOBSYNC_NEW_TIMEZONE",
    help="Time zone of its schedule, such as Europe/Berlin.",
)
@namespace_option
@url_option
@json_option
def update(
    name: str,
    schedule: str | None,
    timezone: str | None,
    url: str | None,
    namespace: str | None,
    *,
    as_json: bool,
) -> None:
    """Change when a job fires, in the whole fleet, until its code changes.

    Nothing of the past is fired.
    """
    fields = {"schedule": schedule, "timezone": timezone}
    changes = {field: value for field, value in fields.items() if value is not None}
    if not changes:
        fix = 'pass --schedule "0 3 * * *", --timezone Europe/Berlin, or both'
        raise Invalid("--schedule", None, "is missing, and so is --timezone", fix)
    where, is_new = _change(url, name, namespace, lambda jobs: jobs.edit(name, changes))
    _show_change(where, name, "updated" if is_new else "unchanged", as_json=as_json)


@schedules.command()
@job_argument
@option(
    "--timeout",
    type=DurationType(is_least_allowed=False),
    envvar="JOBSYNC_TIMEOUT",
    help="How long to wait for the end of the run, such as 90 or 5m; by default until it ends.",
)
@namespace_option
@url_option
@json_option
def run(
    name: str, timeout: float | None, url: str | None, namespace: str | None, *, as_json: bool
) -> None:
    """Run a job now, on a process of the fleet, and wait until it ends.

    Works for paused jobs too. If the job is running, the run begins when that one has ended,
    unless they may overlap. Exits with 1 if the run fails. Ctrl-C ends this command only.
    """
    from jobsync.cli.requested_run import RequestedRun
    from jobsync.cli.schedule_tables import show_end

    requested = RequestedRun(name)

    async def follow(store: Store, components: Components) -> HistoryEntry | None:
        status = await (await _read_schedules(store, components)).job(name, namespace)
        jobs = _open(store, components, status.namespace)
        return await requested.follow(store, components, status, jobs, timeout)

    try:
        entry = run_on_store(url, follow)
    except KeyboardInterrupt:
        click.echo(f"jobsync: stopped waiting. {requested.describe_rest()}", err=True)
        raise SystemExit(INTERRUPTED) from None
    if entry is None:
        click.echo(f"jobsync: no end after {timeout:g} s. {requested.describe_rest()}", err=True)
        raise SystemExit(FAILED)
    show_end(requested.namespace, entry, as_json=as_json)
    raise SystemExit(0 if entry.status == "success" else FAILED)


async def _read_schedules(store: Store, components: Components) -> SchedulesStatus:
    from jobsync.status.schedules import read_schedules_status

    return await read_schedules_status(store, components)


def _run_on_schedules(url: str | None, work: Callable[[SchedulesStatus], Awaitable[T]]) -> T:
    """Run a coroutine function on the schedulers of a store."""

    async def run(store: Store, components: Components) -> T:
        return await work(await _read_schedules(store, components))

    return run_on_store(url, run)


def _open(store: Store, components: Components, namespace: str) -> JobOperations:
    from jobsync.scheduler.job_store import JobStore
    from jobsync.scheduler.operations import JobOperations

    return JobOperations(JobStore(lambda: store, namespace, components), components, _find_user())


def _find_user() -> str:
    """Return who runs this command, for the history."""
    import getpass
    import os
    import platform

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container whose user has no name.
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def _change(
    url: str | None,
    name: str,
    namespace: str | None,
    work: Callable[[JobOperations], Awaitable[bool]],
) -> tuple[str, bool]:
    """Change an existing job; return its namespace, and whether that changed anything."""

    async def run(store: Store, components: Components) -> tuple[str, bool]:
        status = await (await _read_schedules(store, components)).job(name, namespace)
        return status.namespace, await work(_open(store, components, status.namespace))

    return run_on_store(url, run)


def _show_change(namespace: str, name: str, what: str, *, as_json: bool) -> None:
    row = {"namespace": namespace, "job": name, "what": what}
    show_rows(["job", "what"], [row], as_json=as_json)


def _read_since(text: str) -> float:
    """Return a Unix time: so long ago, or a local date or time.

    Raises:
        Invalid: it cannot be read.
    """
    from datetime import datetime

    # A bare number could be a date too.
    if text[-1:].isalpha() and (seconds := parse_seconds(text)) is not None:
        return now() - seconds
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        fix = "write 90m, 2d, 2026-01-31 or 2026-01-31T18:00"
        raise Invalid("--since", text, "is neither a duration nor a time", fix) from None
