"""What a task waits for, in words. Pure: decides from what was seen, and asks nobody."""

import msgspec

from jobsync.jobs.claims import Claim
from jobsync.jobs.survey import Condition, TaskSeen

__all__ = ["Reason", "explain_task"]


class Reason(msgspec.Struct, frozen=True):
    """What stands between a task and its being done."""

    code: str
    """For programs."""
    text: str
    """For people."""


def explain_task(task: TaskSeen) -> Reason:
    """Say what becomes of a task now, or what it waits for."""
    if task.claim is not None and task.claim.state == "running":
        return _explain_claim(task.claim, task.claimed_by)
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
    return _explain_rest(task, task.owner)


def _explain_claim(claim: Claim, holder: Condition | None) -> Reason:
    what = f"claimed by {claim.node} as run {claim.run}"
    match holder:
        case "dead" | "left":
            return Reason(
                "abandoned",
                f"{what}, and {claim.node} is gone: the task may be started again once its owner "
                "has known of that for reclaim_after seconds",
            )
        case "silent":
            return Reason(
                "owner-silent", f"{what}, and {claim.node} is silent: it will be called dead soon"
            )
    return Reason("running", f"{what}, which is at it")


def _explain_rest(task: TaskSeen, owner: str) -> Reason:
    """Explain a task that nobody has in hand and that has an owner."""
    claim = task.claim
    if claim is None:
        return Reason(
            "waiting", f"{owner} owns it and has not claimed it: its loop has yet to come"
        )
    if claim.state == "done":
        return Reason("done", f"{claim.node} has done it, as run {claim.run}")
    return Reason(
        "failed", f"run {claim.run} failed on {claim.node}; {owner} owns it and may try again"
    )
