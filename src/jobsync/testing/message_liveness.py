"""What must happen to the messages of a queue in the end, and how soon, whatever the weather."""

from collections.abc import Sequence

from jobsync.testing.invariants import Violation
from jobsync.testing.message_transitions import list_ended_sessions, list_transitions
from jobsync.testing.world import Occurrence

__all__ = ["check_drained", "check_orphans", "check_redelivered"]

_FINISHED = ("completed", "cancelled", "dead")


def check_drained(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that every message that was acknowledged has been handled or is a dead letter.

    For the end of a story, after everything has been handled. A message that has arrived without
    being acknowledged must be finished too.
    """
    last = {each.details["id"]: each for each in history if each.what == "row"}
    acknowledged = [
        (response.details.get("result") or {}).get(message[0], message[0])
        for response in history
        if response.what == "response" and "error" not in response.details
        for message in history[response.details["request"]].details.get("messages", ())
    ]
    lost = [
        Violation("Q1", f"{name}: acknowledged, but does not exist")
        for name in acknowledged
        if name not in last
    ]
    unfinished = [
        Violation("QL3", f"{name}: {row.details['state']} since {row.at:.0f} s")
        for name, row in last.items()
        if row.details["state"] not in (*_FINISHED, "gone")
    ]
    return lost + unfinished


def check_redelivered(
    history: Sequence[Occurrence], *, since: float, within: float
) -> list[Violation]:
    """Check that a message whose claim was ended is claimed again, or dead, within a bound.

    Args:
        history: what happened.
        since: the world's time from which the bound applies.
        within: seconds from the end of a claim to the next one.
    """
    ended: dict[str, float] = {}
    late = []
    for transition in list_transitions(history):
        row = history[transition.at]
        name = row.details["id"]
        if transition.before is None or transition.before["state"] != "claimed":
            end = ended.pop(name, None)
            if end is not None and row.at - max(end, since) > within:
                detail = f"{name}: ended at {end:.1f} s, claimed again at {row.at:.1f} s"
                late.append(Violation("QL2", detail))
        elif row.details["state"] == "waiting" and not transition.settlement:
            ended[name] = row.at
    now = history[-1].at if history else 0.0
    return late + [
        Violation("QL2", f"{name}: ended at {end:.1f} s, not claimed since")
        for name, end in ended.items()
        if now - max(end, since) > within
    ]


def check_orphans(history: Sequence[Occurrence], *, since: float, within: float) -> list[Violation]:
    """Check that the claims of a session that has ended are ended within a bound.

    Args:
        history: what happened.
        since: the world's time from which the bound applies.
        within: seconds from the end of the session, or from its last claim, which may come later.
    """
    ends: dict[str, float] = {}
    claimed: dict[str, tuple[str, float]] = {}
    late = []

    def check(name: str, now: float) -> None:
        session, at = claimed.pop(name, ("", now))
        if session in ends and now - max(ends[session], at, since) > within:
            detail = f"{name}: the session of its claim ended at {ends[session]:.1f} s"
            late.append(Violation("QL4", f"{detail}, and its claim had not at {now:.1f} s"))

    for done in history:
        for session in list_ended_sessions(done):
            ends.setdefault(session, done.at)
        if done.what == "row":
            name = done.details["id"]
            check(name, done.at)
            if done.details["state"] == "claimed":
                claimed[name] = (done.details["session"], done.at)
    for name in list(claimed):
        check(name, history[-1].at)
    return late
