"""Checks of what callers pass to a queue, made before anything is sent.

A driver's error neither names the argument nor says what to do instead, and some wrong arguments
cause none: SQLite takes a negative limit for no limit. Each function here raises `Invalid`, which
names the argument, its value and the fix.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

from jobsync.core.arguments import check_choice
from jobsync.core.codec import check_text
from jobsync.core.messages import FINISHED, LIVE, MessageState
from jobsync.errors import Invalid

__all__ = [
    "check_cursor",
    "check_finished",
    "check_ids",
    "check_reason",
    "check_settled_once",
    "check_state",
    "check_states",
]

_STATES = (*LIVE, *FINISHED)
_MAX_POSITION = 2**63 - 1
_MAX_TIME = 1e12
"""Unix seconds in the year 33658: a database has room for more."""

_is_live_cursor = re.compile(r"[0-9]{1,19}").fullmatch
_is_finished_cursor = re.compile(r"[0-9]{1,13}(\.[0-9]{1,20})? .*").fullmatch


def check_state(state: object, known: Iterable[str] = _STATES) -> None:
    """Check the name of a state, or of a group of states."""
    check_choice("state", state, known, "is not a message state")


def check_states(states: Collection[MessageState]) -> list[MessageState]:
    """Return the names of states as a list."""
    listed = _as_list("states", states)
    for state in listed:
        check_state(state)
    return listed


def check_ids(ids: Collection[str]) -> list[str]:
    """Return ids without repetitions."""
    listed = _as_list("ids", ids)
    for name in listed:
        if not isinstance(name, str) or not name.isprintable():
            problem = "must be ids of messages, which are printable text"
            raise Invalid("ids", name, problem, "pass ids as enqueue or browse has returned them")
    return list(dict.fromkeys(listed))


def check_settled_once(ids: Collection[str]) -> None:
    """Check that no two settlements of a batch are about one message."""
    if len({*ids}) < len(ids):
        problem = "contain a message twice"
        raise Invalid("settlements", len(ids), problem, "settle each message once")


def check_cursor(state: MessageState, after: object) -> None:
    """Check that a position is empty or the cursor of a message in this state."""
    if after == "":
        return
    if isinstance(after, str) and after.isprintable():
        if state in LIVE:
            if _is_live_cursor(after) and int(after) <= _MAX_POSITION:
                return
        elif _is_finished_cursor(after) and float(after.partition(" ")[0]) <= _MAX_TIME:
            return
    problem = f"must be the cursor of a message that is {state}"
    raise Invalid("after", after, problem, "pass the cursor of the last message that was returned")


def check_reason(reason: object) -> None:
    """Check a reason, which people read."""
    if not isinstance(reason, str):
        raise Invalid("reason", reason, "must be text", "use str(reason)")
    check_text(reason, "reason")


def _as_list(field: str, items: Iterable[Any]) -> list[Any]:
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise Invalid(field, items, "must be a list", "write [...]")
    return list(items)


def check_finished(state: MessageState) -> None:
    """Check that messages in a state are finished.

    Raises:
        Invalid: they are not; the error lists the states that are.
    """
    if state not in FINISHED:
        raise Invalid("state", state, "is not finished", f"use one of {', '.join(FINISHED)}")
