"""How `jobsync schedules` shows jobs, their next instants and their history."""

import sys
from collections.abc import Iterable, Sequence

import click
import msgspec

from jobsync.cli.options import now
from jobsync.cli.render import Column, format_ages, show_facts, show_rows
from jobsync.core.cron import Schedule
from jobsync.scheduler.history import HistoryEntry
from jobsync.status.schedules import ScheduledJobStatus, describe_gap, format_instant, read_gap

__all__ = ["show_end", "show_history", "show_instants", "show_jobs"]


def show_jobs(jobs: Sequence[ScheduledJobStatus], *, as_json: bool) -> None:
    """Show when jobs fire, how the last run ended, and what is special."""
    has_several = len({job.namespace for job in jobs}) > 1
    columns: list[Column | str] = [
        *(["namespace"] if has_several else []),
        "job",
        Column("fires", long=True),
        "next_fire",
        "last",
        "marks",
        Column("last_run", format_ages(now()), spare=True),
        Column("timezone", spare=True),
        Column("last_duration", _format_seconds, spare=True),
        Column("description", spare=True, long=True),
        # Most jobs have none: it is the first that a narrow terminal leaves out.
        Column("queue", spare=True),
    ]
    rows = [_summarise(job) for job in jobs]
    if sys.stdout.isatty() and not as_json:
        for row, job in zip(rows, jobs, strict=True):
            row["next_fire"] = _format_next(job)
    show_rows(columns, rows, as_json=as_json)


def _format_next(status: ScheduledJobStatus) -> str:
    """Return when a job fires next, in its own zone, in which its schedule is in words."""
    if status.next_fire is None:
        return ""
    job = status.job
    moment = Schedule.parse(job.schedule, job.timezone).in_zone(int(status.next_fire))
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z" if moment.second else "%Y-%m-%d %H:%M %Z")


def _summarise(status: ScheduledJobStatus) -> dict[str, object]:
    job: dict[str, object] = msgspec.to_builtins(status.job)
    return {
        "namespace": status.namespace,
        "job": status.name,
        "fires": job.pop("in_words"),
        "next_fire": None if status.next_fire is None else float(status.next_fire),
        "last": status.job.last_status,
        "last_duration": status.last_duration,
        "marks": list(status.marks),
        "workers": list(status.workers),
        **{
            field: value
            for field, value in job.items()
            if field not in {"name", "next_run", "last_status"}
        },
    }


def show_instants(status: ScheduledJobStatus, count: int, *, as_json: bool) -> None:
    """Show the next instants of a job, in its time zone and in that of this machine."""
    job = status.job
    schedule = Schedule.parse(job.schedule, job.timezone)
    instants = schedule.between(int(status.seen), sys.maxsize, count)
    rows = [{"at": at, "in_its_zone": schedule.in_zone(at).isoformat(" ")} for at in instants]
    if as_json or not sys.stdout.isatty():
        show_rows(("at", "in_its_zone"), rows, as_json=as_json)
    else:
        click.echo(f"{status.name}: {job.in_words} ({job.schedule}), {job.timezone}")
        here = [{**row, "in_yours": float(at)} for row, at in zip(rows, instants, strict=True)]
        show_rows(("in_its_zone", Column("in_yours", _format_instant)), here, as_json=False)
    if not job.enabled:
        what = ", ".join(status.marks)
        click.echo(f"jobsync: {status.name} does not fire now: {what}", err=True)


def show_history(found: Iterable[tuple[str, HistoryEntry]], *, as_json: bool) -> None:
    """Show entries of histories, each after its namespace."""
    columns = (
        Column("scheduled_time", _format_instant),
        "job_name",
        "status",
        Column("duration", _format_seconds),
        Column("detail", long=True),
        Column("attempts", spare=True),
        Column("worker_id", spare=True),
    )
    rows = [_describe_entry(namespace, entry) for namespace, entry in found]
    show_rows(columns, rows, as_json=as_json)


def _describe_entry(namespace: str, entry: HistoryEntry) -> dict[str, object]:
    gap = read_gap(entry)
    if gap is not None:
        # Of a single instant, its time is in a column of its own.
        detail = gap.reason if gap.first == gap.last else describe_gap(gap)
    elif entry.error:
        detail = entry.error.partition("\n")[0]
    else:
        detail = "" if entry.result is None else msgspec.json.encode(entry.result).decode()
    return {"namespace": namespace, **msgspec.structs.asdict(entry), "detail": detail}


def show_end(namespace: str, entry: HistoryEntry, *, as_json: bool) -> None:
    """Show how a run has ended."""
    row = _describe_entry(namespace, entry)
    if as_json or not sys.stdout.isatty():
        columns = ("job_name", "status", "duration", "attempts", "worker_id", "detail", "id")
        show_rows(columns, [row], as_json=as_json)
        return
    facts = [
        ("duration", _format_seconds(entry.duration)),
        ("attempts", str(entry.attempts)),
        ("worker", entry.worker_id or "none"),
    ]
    if entry.error:
        facts.append(("error", entry.error))
    elif entry.result is not None:
        facts.append(("result", str(row["detail"])))
    show_facts(f"{entry.job_name}: {entry.status}", facts)


def _format_instant(value: object) -> str:
    return format_instant(value) if isinstance(value, int | float) else "-"


def _format_seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
