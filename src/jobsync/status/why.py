"""Explains why a message, a task or a scheduled job is waiting, or what has become of it.

`find_status` reads from the store. The explanations are pure: they decide from the status alone.
"""

import datetime as dt
import re
from typing import TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.role import worker_of
from jobsync.core.messages import explain_cancel
from jobsync.errors import Invalid, NotFound
from jobsync.jobs.foreign_claims import Claim
from jobsync.queue.backend import MESSAGE_FORMAT, MessageInfo
from jobsync.status.jobs import TaskStatus, read_fleet_status
from jobsync.status.queues import MessageStatus, QueueStatus, QueueWorkerStatus, read_queues_status
from jobsync.status.schedules import (
    ScheduledJobStatus,
    SchedulerStatus,
    describe_gap,
    format_instant,
    read_schedules_status,
)
from jobsync.stores.contract import Store

__all__ = ["Explained", "Reason", "describe_progress", "explain", "find_status"]

_is_message_id = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


class Reason(msgspec.Struct, frozen=True):
    """Why something is not done yet, or how it ended. Times are Unix seconds."""

    code: str
    """For programs."""
    text: str
    """For people."""
    since: float | None = None
    """Since when it applies, if known."""
    until: float | None = None
    """When it ends at the latest, if known."""


Explained: TypeAlias = MessageStatus | TaskStatus | ScheduledJobStatus
"""What can be explained."""


async def find_status(
    store: Store, components: Components, name: str, app: str, day: dt.date
) -> Explained | None:
    """Read the status of the message with this id, of a fleet's task on a date, or of a job.

    Any name may be a task's. One in the form of a message id, or of a scheduled job, is one only if
    it is claimed or pinned.

    Raises:
        Corrupt: nothing has this name, and the page that may have the message cannot be read.
    """
    queues = None
    # Without SQL, looking for a message reads pages.
    if store.sql is not None or _is_message_id(name):
        queues = await read_queues_status(store, components)
        message = await queues.message(name)
        if message is not None:
            return message
    task = await _find_task(store, components, app, name, day)
    if task is not None and (task.claim is not None or task.pins):
        return task
    job = await _find_job(store, components, name)
    found = job or (None if _is_message_id(name) else task)
    if found is None and queues is not None:
        queues.check_none_set_aside(name)
    return found


async def _find_task(
    store: Store, components: Components, app: str, name: str, day: dt.date
) -> TaskStatus | None:
    """Read the status of a task; None if no fleet shares tasks."""
    try:
        fleet = await read_fleet_status(store, components, app)
    except NotFound:
        return None
    return await fleet.task(name, day)


async def _find_job(store: Store, components: Components, name: str) -> ScheduledJobStatus | None:
    try:
        return await (await read_schedules_status(store, components)).job(name)
    except NotFound:
        return None
    except Invalid as error:
        fix = f"run: jobsync schedules why {name} --namespace …"
        raise Invalid(error.field, error.value, error.problem, fix) from None


def explain(status: Explained | None) -> Reason:
    """Return why something is waiting, or how it ended."""
    match status:
        case ScheduledJobStatus():
            return _explain_job(status)
        case MessageStatus():
            return _explain_message(status)
        case TaskStatus():
            return _explain_task(status)
        case None:
            text = "there is no such message: it was completed long ago, removed, or never pushed"
            return Reason("unknown", text)


def _explain_message(status: MessageStatus) -> Reason:
    message = status.message
    match message.state:
        case "claimed":
            return _explain_claimed_message(status)
        case "waiting" | "ready":
            return _explain_pending_message(status)
        case "blocked":
            return _explain_blocked_message(status)
        case "dead":
            return _explain_dead_letter(message)
        case "completed":
            return Reason("completed", "it was completed", since=message.finished)
        case "cancelled":
            return _explain_cancelled(message)


def _explain_cancelled(message: MessageInfo) -> Reason:
    text = explain_cancel(message.errors[-1].error if message.errors else "")
    return Reason("cancelled", text, since=message.finished)


def _explain_claimed_message(status: MessageStatus) -> Reason:
    message, holder = status.message, status.holder
    if holder is None:
        worker_id = worker_of(message.session)
        return _explain_orphan(status, "owner-dead", f"{worker_id} had claimed it and is dead")
    match holder.state:
        case "dead":
            text = f"{holder.worker_id} had claimed it and is dead"
            return _explain_orphan(status, "owner-dead", text)
        case "silent":
            text = f"{holder.worker_id} has claimed it and sends no heartbeats"
            return _explain_orphan(status, "owner-silent", text)
    if message.due is not None and message.due <= message.seen:
        text = f"{holder.worker_id} has not renewed its claim: the next worker to poll takes it"
        return Reason("lapsed", text, since=message.due)
    text = f"{holder.worker_id} has claimed it, as {_describe_attempt(message)}"
    if message.is_suspect:
        text = f"{text}, alone, because a worker has died with it"
    if message.progress is not None:
        text = f"{text}: {describe_progress(message.progress, message.progress_note)}"
    return Reason("claimed", text, since=message.claimed)


def describe_progress(progress: float, note: str) -> str:
    """Return how far a handler is, for people."""
    share = f"{progress:.0%} done" if 0 <= progress <= 1 else f"progress {progress:g}"
    return f"{share}, {note}" if note else share


def _explain_orphan(status: MessageStatus, code: str, text: str) -> Reason:
    """Explain a message whose holder is dead or about to be declared dead."""
    message, holder, queue = status.message, status.holder, status.queue
    # By the store's clock: when the holder last sent a heartbeat, or was marked as dead.
    since = None if holder is None or holder.heard is None else message.seen - holder.heard
    if any(worker.works for worker in queue.workers):
        if code == "owner-dead":
            text = f"{text}: the other workers take it back at their next poll"
            return Reason(code, text, since=since)
        text = f"{text}: the other workers take it back once it is dead or its claim lapses"
        return Reason(code, text, since=since, until=message.due)
    return Reason(code, f"{text}, and {queue.name} has no worker to take it back", since=since)


def _explain_pending_message(status: MessageStatus) -> Reason:
    """Explain a message that is not claimed."""
    message, queue = status.message, status.queue
    if message.format > MESSAGE_FORMAT:
        text = f"newer code has stored it (format {message.format}): only its workers handle it"
        return Reason("newer", text, since=message.enqueued)
    if message.due is not None and message.due > message.seen:
        return _explain_delay(message)
    if queue.pause is not None:
        reason = f" ({queue.pause.reason})" if queue.pause.reason else ""
        return Reason("paused", f"{queue.name} is paused{reason}", since=queue.pause.since)
    if not message.is_readable:
        text = "it is not JSON: the worker that claims it makes it a dead letter"
        return Reason("unreadable", text)
    return _explain_due_message(message, queue)


def _explain_blocked_message(status: MessageStatus) -> Reason:
    """Explain a message that waits for those before it in its group."""
    message, head = status.message, status.head
    if head is None:
        text = f"it waits for the messages before it in group {message.group}"
        return Reason("blocked", text, since=message.enqueued)
    state = "is being handled" if head.state == "claimed" else f"is {head.state}"
    text = f"it is blocked by {head.id}, the head of group {message.group}, which {state}"
    until = head.due if head.state == "waiting" else None
    return Reason("blocked", text, since=message.enqueued, until=until)


def _explain_delay(message: MessageInfo) -> Reason:
    if message.errors and message.attempts:
        last = message.errors[-1]
        error = _first_line(last.error)
        text = f"{_describe_attempt(message)} failed and will be retried: {error}"
        return Reason("retrying", text, since=last.at, until=message.due)
    return Reason("not-due", "it is not due yet", since=message.enqueued, until=message.due)


def _explain_due_message(message: MessageInfo, queue: QueueStatus) -> Reason:
    """Explain a message that could be claimed, by the state of the queue's workers."""
    since = message.enqueued if message.due is None else message.due
    live = [each for each in queue.workers if each.state == "live" and each.concurrency is not None]
    active = [worker for worker in live if worker.works]
    if not active:
        state = f"all {len(live)} workers are paused" if live else "no worker is active"
        return Reason("no-worker", f"it is ready, but {state} on {queue.name}", since=since)
    able = [worker for worker in active if worker.knows(message.task)]
    if not able:
        return _explain_unknown_task(message.task, live, since)
    active = able
    waiting = sum(queue.counts.get(state, 0) for state in ("ready", "waiting"))
    if all(worker.is_busy for worker in active):
        who = "the only worker is" if len(active) == 1 else f"all {len(active)} workers are"
        text = f"it is 1 of {waiting} waiting messages, and {who} at capacity"
        return Reason("busy", text, since=since)
    if limits := queue.find_limits(message.task):
        text = f"it is ready, and may wait for {' and '.join(limits)}, counted in all processes"
        return Reason("limited", text, since=since)
    if message.is_suspect:
        text = "its worker died while it was claimed: it runs once a worker has nothing else to do"
        return Reason("suspect", text, since=since)
    text = "it is ready: a worker claims it at its next poll"
    if any(worker.claims for worker in active):
        text = f"{text}, or after a message that it handles alone because a worker has died with it"
    return Reason("next", text, since=since)


def _explain_unknown_task(task: str, live: list[QueueWorkerStatus], since: float) -> Reason:
    """Explain a message that none of the workers that claim can handle."""
    if any(worker.knows(task) for worker in live):
        text = f"every live worker that knows {_name_task(task)} is paused"
    elif task:
        text = f"no live worker knows task {task}: deploy the code that has it"
    else:
        text = "no live worker has a handler for messages without a task"
    return Reason("unknown-task", text, since=since)


def _name_task(task: str) -> str:
    return f"task {task}" if task else "messages without a task"


def _explain_dead_letter(message: MessageInfo) -> Reason:
    error = _first_line(message.errors[-1].error) if message.errors else "no error was recorded"
    if not (message.is_readable and isinstance(message.value, dict)):
        return Reason("corrupt", f"it is corrupt: {error}", since=message.finished)
    text = f"it is a dead letter, after {_describe_attempt(message)}: {error}"
    return Reason("dead", text, since=message.finished)


def _describe_attempt(message: MessageInfo) -> str:
    return f"attempt {message.attempts} of {message.max_attempts}"


def _first_line(error: str) -> str:
    """Return an error without the lines that show where it was raised."""
    return error.partition("\n")[0]


def _explain_task(task: TaskStatus) -> Reason:
    claim = task.claim
    if claim is not None and claim.state == "running":
        return _explain_running_task(task, claim)
    # It is done whoever owns it now, and whether a node is left.
    if claim is not None and claim.state == "done":
        return Reason("done", f"{claim.node} completed it, as run {claim.run}", since=claim.ended)
    unmatched = [pin for pin in task.pins if pin.in_force is None]
    if task.owner is None and unmatched:
        patterns = " or ".join(pattern for pin in unmatched for pattern in pin.patterns)
        reason = f" ({unmatched[0].reason})" if unmatched[0].reason else ""
        return Reason("unmatched-pin", f"pinned to {patterns}{reason}, which no live node matches")
    if task.moving_to is not None:
        text = f"moving to {task.moving_to}: its previous owner has to release it or die first"
        return Reason("moving", text)
    if task.owner is None:
        text = "no node owns it: none is ready, or the leader has not assigned it yet"
        return Reason("unowned", text)
    return _explain_owned_task(task, task.owner)


def _explain_running_task(task: TaskStatus, claim: Claim) -> Reason:
    """Explain a task by its claim, and by the state of the node that has made it."""
    text = f"claimed by {claim.node} as run {claim.run}"
    match task.claimed_by:
        case "dead" | "left":
            delay = f"{task.reclaim_after:g} s after that" if task.reclaim_after else "at once"
            return Reason(
                "abandoned",
                f"{text}, and {claim.node} is gone: {task.owner or 'its next owner'} may start it "
                f"again {delay}",
                since=task.last_heard,
                until=_add(task.last_heard, task.reclaim_after) if task.reclaim_after else None,
            )
        case "silent":
            return Reason(
                "owner-silent",
                f"{text}, and {claim.node} sends no heartbeats: the task may start again "
                f"{task.reclaim_after:g} s after the node is declared dead",
                since=task.last_heard,
                until=_add(task.last_heard, task.timeout + task.reclaim_after),
            )
    return Reason("running", f"{text}, and running", since=claim.started)


def _explain_owned_task(task: TaskStatus, owner: str) -> Reason:
    """Explain a task that has an owner and is not running."""
    claim = task.claim
    if claim is None:
        return Reason("waiting", f"{owner} owns it and has not claimed it yet")
    text = f"run {claim.run} failed on {claim.node}; {owner} owns it and may try again"
    return Reason("failed", text, since=claim.ended)


def _add(at: float | None, seconds: float) -> float | None:
    return None if at is None else at + seconds


def _explain_job(status: ScheduledJobStatus) -> Reason:
    """Explain why a job does not fire; if nothing keeps it from that, when it does."""
    job = status.job
    if status.is_removed:
        text = "it was removed: a process whose code has it adds it again when it starts"
        return Reason("removed", text)
    if job.pause is not None:
        by = f" by {job.pause.by}" if job.pause.by else ""
        reason = f": {job.pause.reason}" if job.pause.reason else ""
        return Reason("paused", f"it was paused{by}{reason}", since=job.pause.at)
    if not job.enabled:
        who = "in its code" if status.is_disabled_by_code else "by an operator"
        return Reason("disabled", f"it is disabled {who}")
    return (
        _explain_unable(status)
        or _explain_running_job(status)
        or _explain_due_job(status)
        or _explain_idle_job(status)
    )


def _explain_unable(status: ScheduledJobStatus) -> Reason | None:
    """Explain a job that no process can fire."""
    scheduler = status.scheduler
    since = _find_due_since(status)
    if not scheduler.workers:
        text = f"no live process runs the scheduler {scheduler.namespace}"
        return Reason("no-process", text, since=since)
    if not status.workers:
        count = len(scheduler.workers)
        have = "the only process lacks" if count == 1 else f"all {count} processes lack"
        return Reason("no-code", f"{have} its code", since=since)
    if scheduler.is_led:
        return None
    if scheduler.withheld:
        return Reason("vetoed", _describe_withheld(scheduler), since=scheduler.vacant_since)
    text = "no process is the coordinator: one is elected within its worker_timeout"
    return Reason("no-coordinator", text, since=scheduler.vacant_since)


def _find_due_since(status: ScheduledJobStatus) -> float | None:
    """Return since when something waits to be started; None if nothing does."""
    instants = [*status.job.queued, *(request.at for request in status.requests)]
    if status.is_late and status.due is not None:
        instants.append(status.due)
    return min(instants, default=None)


def _describe_withheld(scheduler: SchedulerStatus) -> str:
    reasons = [f"{worker} stands back: {why}" for worker, why in scheduler.withheld.items()]
    return f"no process is the coordinator: {'; '.join(reasons)}"


def _explain_running_job(status: ScheduledJobStatus) -> Reason | None:
    """Explain a job by the run that has not ended."""
    job = status.job
    if not job.running:
        return None
    run = job.running[0]
    worker, since = worker_of(run.owner) or "nobody", run.started_at
    condition = status.owners.get(run.owner, "dead")
    if condition != "live":
        what = "is dead" if condition == "dead" else "sends no heartbeats"
        rest = "gives the run up" if run.is_manual else "resumes the run"
        text = f"{worker} ran it and {what}: another process {rest}"
        return Reason(f"owner-{condition}", text, since=since)
    began = f"the run that began at {format_instant(since)} on {worker} has not ended"
    if status.overlap == "allow" and status.is_due:
        return None
    if status.overlap == "skip" and status.is_late:
        text = f"{began}, so what is due meanwhile is skipped"
        return Reason("overlapping", text, since=since)
    if status.is_due:
        return Reason("overlapping", f"{began}, and what is due waits for it", since=since)
    return Reason(
        "running", f"{began}; {_describe_next(status)}", since=since, until=status.next_fire
    )


def _explain_due_job(status: ScheduledJobStatus) -> Reason | None:
    """Explain a job that could be started, by what its process does."""
    if not status.is_due:
        return None
    scheduler = status.scheduler
    firing = scheduler.leader if scheduler.leader in status.workers else status.workers[0]
    since = _find_due_since(status)
    if scheduler.failing is not None:
        error = _first_line(scheduler.failing.error)
        text = f"{firing} cannot lead: {scheduler.failing.callback} raises {error}"
        return Reason("failing", text, since=since)
    if status.busy:
        jobs = "1 other job runs" if status.busy == 1 else f"{status.busy} other jobs run"
        text = f"it is due, and waits for room if max_concurrent_jobs is reached: {jobs}"
        return Reason("waiting", f"{text} on {firing}", since=since)
    return Reason("due", f"it is due: {firing} starts it", since=since)


def _explain_idle_job(status: ScheduledJobStatus) -> Reason:
    """Explain a job that nothing keeps from firing, by its newest gap."""
    job, gap = status.job, status.gap
    if status.next_fire is None:
        return Reason("never", "its schedule is never due again")
    if gap is not None and (job.last_run is None or job.last_run < gap.last):
        text = f"{describe_gap(gap)}; {_describe_next(status)}"
        return Reason(gap.kind, text, since=float(gap.first), until=status.next_fire)
    return Reason("scheduled", _describe_next(status), until=status.next_fire)


def _describe_next(status: ScheduledJobStatus) -> str:
    at = status.next_fire
    return "it never fires again" if at is None else f"it fires next at {format_instant(at)}"
