"""Explains why a message or a task is waiting, or what has become of it.

`find_status` reads from the store. The explanations are pure: they decide from the status alone.
"""

import datetime as dt
import re

import msgspec

from jobsync.components import Components
from jobsync.errors import NotFound
from jobsync.jobs.foreign_claims import Claim
from jobsync.queue.backend import MESSAGE_FORMAT, MessageInfo
from jobsync.status.jobs import TaskStatus, read_fleet_status
from jobsync.status.queues import MessageStatus, QueueStatus, read_queues_status
from jobsync.stores.contract import Store

__all__ = ["Reason", "explain", "find_status"]

_is_message_id = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


class Reason(msgspec.Struct, frozen=True):
    """Why a message or a task is not done yet, or how it ended. Times are Unix seconds."""

    code: str
    """For programs."""
    text: str
    """For people."""
    since: float | None = None
    """Since when it applies, if known."""
    until: float | None = None
    """When it ends at the latest, if known."""


async def find_status(
    store: Store, components: Components, name: str, app: str, day: dt.date
) -> MessageStatus | TaskStatus | None:
    """Read the status of the message with this id, or of a fleet's task on a date."""
    message = None
    if store.sql is not None:
        message = await (await read_queues_status(store, components)).message(name)
    return message or await _find_task(store, components, app, name, day)


async def _find_task(
    store: Store, components: Components, app: str, name: str, day: dt.date
) -> TaskStatus | None:
    """Read the status of a task.

    Any name may be a task's. One in the form of a message id is, only if it is claimed or pinned.
    """
    try:
        fleet = await read_fleet_status(store, components, app)
    except NotFound:
        return None
    task = await fleet.task(name, day)
    is_message = _is_message_id(name) and task.claim is None and not task.pins
    return None if is_message else task


def explain(status: MessageStatus | TaskStatus | None) -> Reason:
    """Return why a message or a task is waiting, or how it ended."""
    match status:
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
        case "dead":
            return _explain_dead_letter(message)
        case "completed":
            return Reason("completed", "it was completed", since=message.finished)
        case "cancelled":
            return Reason("cancelled", "its handler cancelled it", since=message.finished)


def _explain_claimed_message(status: MessageStatus) -> Reason:
    message, holder = status.message, status.holder
    if holder is None:
        worker_id = message.session.partition(".")[0]
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
    return Reason("claimed", text, since=message.claimed)


def _explain_orphan(status: MessageStatus, code: str, text: str) -> Reason:
    """Explain a message whose holder is dead or about to be declared dead."""
    message, holder, queue = status.message, status.holder, status.queue
    # By the store's clock: when the holder last sent a heartbeat, or was marked as dead.
    since = None if holder is None or holder.heard is None else message.seen - holder.heard
    if any(worker.works for worker in queue.workers):
        text = f"{text}: the other workers take it back at their next poll"
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
    waiting = sum(queue.counts.get(state, 0) for state in ("ready", "waiting"))
    if all(worker.is_busy for worker in active):
        who = "the only worker is" if len(active) == 1 else f"all {len(active)} workers are"
        text = f"it is 1 of {waiting} waiting messages, and {who} at capacity"
        return Reason("busy", text, since=since)
    if message.is_suspect:
        text = "its worker died while it was claimed: it runs once a worker has nothing else to do"
        return Reason("suspect", text, since=since)
    return Reason("next", "it is ready: a worker claims it at its next poll", since=since)


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
    if task.claim is not None and task.claim.state == "running":
        return _explain_running_task(task, task.claim)
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
    if claim.state == "done":
        return Reason("done", f"{claim.node} completed it, as run {claim.run}", since=claim.ended)
    text = f"run {claim.run} failed on {claim.node}; {owner} owns it and may try again"
    return Reason("failed", text, since=claim.ended)


def _add(at: float | None, seconds: float) -> float | None:
    return None if at is None else at + seconds
