"""`jobsync why`: explains why a message, a task or a scheduled job is waiting."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import (
    FAILED,
    appname_option,
    date_option,
    json_option,
    now,
    run_on_store,
    url_option,
)
from jobsync.cli.render import ago, format_time, named_store, report_empty, show_facts, show_rows

if TYPE_CHECKING:
    import datetime as dt

    from jobsync.components import Components
    from jobsync.status.jobs import TaskStatus
    from jobsync.status.queues import MessageStatus
    from jobsync.status.schedules import ScheduledJobStatus
    from jobsync.status.why import Explained, Reason
    from jobsync.stores.contract import Store

__all__ = ["find_queue_of_task", "show_reason", "why"]


@click.command()
@click.argument("name", metavar="MESSAGE|TASK|JOB")
@url_option
@appname_option
@date_option
@json_option
def why(name: str, url: str | None, appname: str, day: dt.date, *, as_json: bool) -> None:
    """Explain why a message, by its id, a task or a scheduled job waits, or how it ended."""
    from jobsync.status.why import find_status

    async def find(store: Store, components: Components) -> tuple[Explained | None, str | None]:
        found = await find_status(store, components, name, appname, day)
        is_known = found is not None
        return found, None if is_known else await find_queue_of_task(store, components, name)

    status, queue = run_on_store(url, find)
    show_reason(name, status, queue=queue, as_json=as_json)
    raise SystemExit(FAILED if status is None else 0)


async def find_queue_of_task(store: Store, components: Components, name: str) -> str | None:
    """Return a queue whose live workers handle a task of this name; None if there is none."""
    from jobsync.status.queues import read_queues_status

    queues = (await read_queues_status(store, components)).queues()
    workers = ((queue.name, each) for queue in queues for each in queue.workers)
    known = (
        queue
        for queue, worker in workers
        if worker.state == "live" and name in (worker.tasks or ())
    )
    return next(known, None)


def show_reason(
    name: str, status: Explained | None, *, queue: str | None = None, as_json: bool
) -> None:
    """Print why something waits.

    Args:
        name: the id or the name that was asked for.
        status: what was found.
        queue: the queue that has a task of this name, if nothing else was found.
        as_json: whether to print JSON.
    """
    from jobsync.status.next_steps import suggest_next
    from jobsync.status.why import explain

    reason = explain(status)
    step = suggest_next(name, status, reason.code)
    if status is None and queue is not None:
        text = f"it is a task of the queue {queue}, not a message; each message has an id"
        reason = msgspec.structs.replace(reason, text=text)
        step = f"run: jobsync queues browse {queue}; then jobsync why ID"
    elif status is None and "." in name:
        step += "; the messages of a task are listed by: jobsync queues browse QUEUE"
    row = {"name": name, "code": reason.code, "reason": reason.text, **_times(reason), "next": step}
    if as_json or not sys.stdout.isatty():
        details: dict[str, object] = {} if status is None else msgspec.to_builtins(status)
        show_rows(list(row), [{**row, **details} if as_json else row], as_json=as_json)
        if status is None and queue is None and not as_json:
            report_empty()
    else:
        facts = [("code", reason.code), *_format_times(reason), *_describe(status)]
        show_facts(f"{name}: {reason.text}", [*facts, ("next", step)])


def _times(reason: Reason) -> dict[str, float | None]:
    return {"since": reason.since, "until": reason.until}


def _format_times(reason: Reason) -> list[tuple[str, str]]:
    times = {name: at for name, at in _times(reason).items() if at is not None}
    return [(name, f"{format_time(at)} ({ago(now() - at)})") for name, at in times.items()]


def _describe(status: Explained | None) -> list[tuple[str, str]]:
    """Return the facts that are worth knowing besides the reason, by name."""
    from jobsync.status.queues import MessageStatus
    from jobsync.status.schedules import ScheduledJobStatus

    match status:
        case None:
            return [("store", named_store())] if named_store() else []
        case MessageStatus():
            return _describe_message(status)
        case ScheduledJobStatus():
            return _describe_job(status)
    return _describe_task(status)


def _describe_message(status: MessageStatus) -> list[tuple[str, str]]:
    message = status.message
    attempts = f"{message.attempts} of {message.max_attempts}"
    if message.deliveries != message.attempts:
        attempts += f", in {message.deliveries} deliveries"
    facts = [
        ("queue", status.queue.name),
        *([("task", message.task)] if message.task else []),
        ("state", message.state),
        ("pushed", format_time(message.enqueued)),
        ("attempts", attempts),
        *(
            ("error", f"{format_time(failure.at)} attempt {failure.attempt}: {failure.error}")
            for failure in message.errors
        ),
    ]
    if message.progress is not None and message.progress_at is not None:
        from jobsync.status.why import describe_progress

        text = describe_progress(message.progress, message.progress_note)
        facts.append(("progress", f"{format_time(message.progress_at)} {text}"))
    if message.result_problem:
        facts.append(("result", f"not kept: {message.result_problem}"))
    if status.holder is not None:
        holder = status.holder
        facts.append(("holder", f"{holder.worker_id} on {holder.host}, process {holder.pid}"))
    return facts


def _describe_task(status: TaskStatus) -> list[tuple[str, str]]:
    facts = [("token", str(status.token)), ("owner", status.owner or "none")]
    if status.claim is not None:
        claim = status.claim
        facts.append(("claim", f"{claim.state} on {claim.node} since {format_time(claim.started)}"))
    for pin in status.pins:
        match = f"{pin.in_force} is in force" if pin.in_force else "no node matches"
        facts.append(("pin", f"{', '.join(pin.patterns)} by {pin.created_by}: {match}"))
    return facts


def _describe_job(status: ScheduledJobStatus) -> list[tuple[str, str]]:
    from jobsync.status.schedules import describe_gap, format_instant

    job, scheduler = status.job, status.scheduler
    facts = [("schedule", f"{job.in_words} ({job.schedule}), {job.timezone}")]
    if job.queue:
        facts.append(("enqueues", f"a message to the queue {job.queue}"))
    if job.edits:
        changes = ", ".join(f"{field}={value}" for field, value in job.edits.items())
        facts.append(("edited", f"{changes}, until its code changes"))
    if job.last_run is not None:
        error = f": {job.last_error}" if job.last_error else ""
        facts.append(("last run", f"{format_instant(job.last_run)} {job.last_status}{error}"))
    if status.gap is not None:
        facts.append(("last gap", describe_gap(status.gap)))
    if status.next_fire is not None:
        facts.append(("next", format_instant(status.next_fire)))
    facts.append(("leader", scheduler.leader or "none"))
    facts.append(("its code", f"on {', '.join(status.workers)}" if status.workers else "nowhere"))
    facts += [("withheld", f"{worker}: {why}") for worker, why in scheduler.withheld.items()]
    return facts
