"""What a message waits for, in words. Pure: decides from what was seen, and asks nobody."""

import msgspec

from jobsync.jobs.foreign_claims import Claim
from jobsync.queue.backend import MessageInfo
from jobsync.status.jobs import TaskStatus
from jobsync.status.queues import MessageStatus, QueueStatus

__all__ = ["UNKNOWN", "Reason", "explain_message", "explain_task"]


# Why something has not happened yet, for programs and for people.


class Reason(msgspec.Struct, frozen=True):
    """What stands between a piece of work and its being done. Times are Unix seconds."""

    code: str
    """For programs."""
    text: str
    """For people."""
    since: float | None = None
    """Since when it is so, where that is known."""
    until: float | None = None
    """When it is over, at the latest, where that is known."""


UNKNOWN = Reason(
    "unknown", "there is no such message: it was completed long ago, removed, or never pushed"
)


def explain_message(seen: MessageStatus) -> Reason:
    """Say what becomes of a message now, or what it waits for."""
    match seen.message.state:
        case "claimed":
            return _explain_message_claim(seen)
        case "waiting" | "ready":
            return _explain_message_rest(seen)
        case "dead":
            return _explain_death(seen.message)
        case "completed":
            return Reason("completed", "it was completed", since=seen.message.finished)
        case "cancelled":
            return Reason("cancelled", "its handler cancelled it", since=seen.message.finished)


def _explain_message_claim(seen: MessageStatus) -> Reason:
    message, holder = seen.message, seen.holder
    if holder is None:
        who = message.session.partition(".")[0]
        return _explain_orphan(seen, "owner-dead", f"{who} had it in hand and is dead")
    match holder.state:
        case "dead":
            what = f"{holder.worker_id} had it in hand and is dead"
            return _explain_orphan(seen, "owner-dead", what)
        case "silent":
            what = f"{holder.worker_id} has it in hand and is silent for too long"
            return _explain_orphan(seen, "owner-silent", what)
    if message.due is not None and message.due <= message.seen:
        text = f"{holder.worker_id} has not renewed its claim in time: who looks next takes it back"
        return Reason("lapsed", text, since=message.due)
    text = f"{holder.worker_id} has it in hand, as {_attempt(message)}"
    return Reason("claimed", text, since=message.claimed)


def _explain_orphan(seen: MessageStatus, code: str, what: str) -> Reason:
    """Explain a message whose holder is dead, or about to be called so."""
    message, holder, queue = seen.message, seen.holder, seen.queue
    # By the store's clock: when the holder last wrote, or was written to be dead.
    since = None if holder is None or holder.heard is None else message.seen - holder.heard
    if any(worker.works for worker in queue.workers):
        text = f"{what}: the other workers take it back at their next look"
        return Reason(code, text, since=since, until=message.due)
    return Reason(code, f"{what}, and nobody works on {queue.name} who could take it", since=since)


def _explain_message_rest(seen: MessageStatus) -> Reason:
    """Explain a message that nobody has in hand."""
    message, queue = seen.message, seen.queue
    if message.due is not None and message.due > message.seen:
        return _explain_pause(message)
    if queue.pause is not None:
        reason = f" ({queue.pause.reason})" if queue.pause.reason else ""
        return Reason("paused", f"{queue.name} is paused{reason}", since=queue.pause.since)
    if not message.is_readable:
        return Reason("unreadable", "it is not JSON: whoever claims it sets it aside")
    return _explain_wait(message, queue)


def _explain_pause(message: MessageInfo) -> Reason:
    if message.errors and message.attempts:
        last = message.errors[-1]
        text = f"{_attempt(message)} failed, and it is tried again: {_head(last.error)}"
        return Reason("retrying", text, since=last.at, until=message.due)
    return Reason("not-due", "it is not due yet", since=message.enqueued, until=message.due)


def _explain_wait(message: MessageInfo, queue: QueueStatus) -> Reason:
    """Explain a message whose time has come, by who could claim it."""
    since = message.enqueued if message.due is None else message.due
    live = [each for each in queue.workers if each.state == "live" and each.concurrency is not None]
    at_work = [worker for worker in live if worker.works]
    if not at_work:
        told = f"all {len(live)} workers are paused" if live else "nobody is at work"
        return Reason("no-worker", f"it is ready, and {told} on {queue.name}", since=since)
    waiting = sum(queue.counts.get(state, 0) for state in ("ready", "waiting"))
    if all(worker.is_busy for worker in at_work):
        hands = (
            "the one worker has its"
            if len(at_work) == 1
            else f"all {len(at_work)} workers have their"
        )
        text = f"it is one of {waiting} that wait, and {hands} hands full"
        return Reason("busy", text, since=since)
    if message.is_suspect:
        text = "its worker died with it in hand: it runs as soon as a worker has nothing else to do"
        return Reason("suspect", text, since=since)
    return Reason("next", "it is ready: a worker claims it at its next look", since=since)


def _explain_death(message: MessageInfo) -> Reason:
    error = _head(message.errors[-1].error) if message.errors else "nobody has told why"
    if not (message.is_readable and isinstance(message.value, dict)):
        return Reason("corrupt", f"it was set aside as corrupt: {error}", since=message.finished)
    text = f"it is a dead letter, after {_attempt(message)}: {error}"
    return Reason("dead", text, since=message.finished)


def _attempt(message: MessageInfo) -> str:
    return f"attempt {message.attempts} of {message.max_attempts}"


def _head(error: str) -> str:
    """Give the first line of an error; the place where it was raised comes below it."""
    return error.partition("\n")[0]


# What a task waits for, in words. Pure: decides from what was seen, and asks nobody.


def explain_task(task: TaskStatus) -> Reason:
    """Say what becomes of a task now, or what it waits for."""
    if task.claim is not None and task.claim.state == "running":
        return _explain_task_claim(task, task.claim)
    unmet = [pin for pin in task.pins if pin.in_force is None]
    if task.owner is None and unmet:
        patterns = " or ".join(pattern for pin in unmet for pattern in pin.patterns)
        reason = f" ({unmet[0].reason})" if unmet[0].reason else ""
        return Reason("unmatched-pin", f"pinned to {patterns}{reason}, which no live node matches")
    if task.moving_to is not None:
        return Reason(
            "moving", f"on its way to {task.moving_to}: its last owner has yet to let go, or to die"
        )
    if task.owner is None:
        return Reason("unowned", "no node owns it: none is ready, or the leader has not dealt yet")
    return _explain_task_rest(task, task.owner)


def _explain_task_claim(task: TaskStatus, claim: Claim) -> Reason:
    what = f"claimed by {claim.node} as run {claim.run}"
    match task.claimed_by:
        case "dead" | "left":
            again = f"{task.owner} may" if task.owner else "whoever will own it may"
            return Reason(
                "abandoned",
                f"{what}, and {claim.node} is gone: {again} start it again "
                f"{task.reclaim_after:g} s after that",
                since=task.last_heard,
                until=_add(task.last_heard, task.reclaim_after),
            )
        case "silent":
            return Reason(
                "owner-silent",
                f"{what}, and {claim.node} is silent for too long: it will be called dead, and "
                f"the task may start again {task.reclaim_after:g} s after that",
                since=task.last_heard,
                until=_add(task.last_heard, task.timeout + task.reclaim_after),
            )
    return Reason("running", f"{what}, which is at it", since=claim.started)


def _explain_task_rest(task: TaskStatus, owner: str) -> Reason:
    """Explain a task that nobody has in hand and that has an owner."""
    claim = task.claim
    if claim is None:
        return Reason(
            "waiting", f"{owner} owns it and has not claimed it: its loop has yet to come"
        )
    if claim.state == "done":
        return Reason("done", f"{claim.node} has done it, as run {claim.run}", since=claim.ended)
    return Reason(
        "failed",
        f"run {claim.run} failed on {claim.node}; {owner} owns it and may try again",
        since=claim.ended,
    )


def _add(moment: float | None, seconds: float) -> float | None:
    return None if moment is None else moment + seconds
