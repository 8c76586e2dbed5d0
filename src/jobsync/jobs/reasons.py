"""What a task waits for, in words. Pure: decides from what was seen, and asks nobody."""

from jobsync.core.reason import Reason
from jobsync.jobs.claims import Claim
from jobsync.jobs.survey import TaskStatus

__all__ = ["explain_task"]


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
