"""The life of a message: its states, the transitions between them, and who decides. Pure.

A message is in one state at a time, and changes only by these transitions:

    push       ──▶ ready, or waiting if it has a delay, or blocked if its group has a head
    claim      ready, waiting ──▶ claimed
    complete   claimed ──▶ completed
    cancel     claimed ──▶ cancelled
    revoke     ready, waiting, claimed ──▶ cancelled      somebody else does not want it any more
    retry      claimed ──▶ waiting      after a failure, with a pause
    bury       claimed ──▶ dead         after the last failure
    release    claimed ──▶ waiting      returned without being handled: no attempt is counted
    snooze     claimed ──▶ waiting      the handler asked for later: no attempt is counted
    lapse      claimed ──▶ waiting      its worker died or fell silent while it ran alone
    spare      claimed ──▶ waiting      the same, but it ran beside others: no attempt is counted
    redrive    dead, cancelled ──▶ waiting, or blocked if its group has a head
    unblock    blocked ──▶ waiting      the message before it in its group is finished

The head of a group is its only message that is ready, waiting or claimed. The others are blocked,
in the order in which they were pushed.

`deliveries` counts the claims, `returned` the claims that count as no attempt; the attempts
are the difference. A message whose claim was never settled may have killed its worker, or may
only have been there when another message did. Both look the same, so it is spared,
becomes a suspect, and runs alone until it is settled. If its worker dies then, the death
counts as an attempt of the suspect, and the last attempt makes a dead letter.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from jobsync.core.arguments import LONGEST_DELAY
from jobsync.core.clock import Seconds
from jobsync.core.codec import Json
from jobsync.core.retry import Retries
from jobsync.errors import Invalid

__all__ = [
    "CANCELLED",
    "FINISHED",
    "LAPSED",
    "LIVE",
    "LONGEST_ERROR",
    "REVOKED",
    "SPARED",
    "TRANSITIONS",
    "Cancel",
    "Completed",
    "Failed",
    "HandlerVerdict",
    "MessageState",
    "Returned",
    "Snooze",
    "Transition",
    "TransitionRule",
    "decide",
    "decide_lapse",
    "explain_cancel",
    "has_spent",
    "shorten_error",
]

MessageState: TypeAlias = Literal[
    "ready", "waiting", "blocked", "claimed", "completed", "cancelled", "dead"
]

LIVE: tuple[MessageState, ...] = ("ready", "waiting", "blocked", "claimed")
"""States of messages that are yet to be handled."""

FINISHED: tuple[MessageState, ...] = ("completed", "cancelled", "dead")
"""States of messages that are no longer handled, unless they are redriven."""

LAPSED = "nobody settled it: its worker died, or did not renew its claim in time"
"""The error stored for a claim that was ended."""

SPARED = f"{LAPSED}; it need not be the cause, so no attempt is spent"
"""The error stored for a claim that was ended while other messages may have been in flight."""

REVOKED = "it was cancelled from outside"
"""The error stored for a message that was not cancelled by its handler."""

CANCELLED = "its handler cancelled it"
"""What the stored reason of a `Cancel` begins with."""

LONGEST_ERROR = 2000
"""The most characters of a stored error."""

Transition: TypeAlias = Literal[
    "claim",
    "complete",
    "cancel",
    "revoke",
    "retry",
    "bury",
    "release",
    "snooze",
    "lapse",
    "spare",
    "redrive",
    "unblock",
]


class TransitionRule(msgspec.Struct, frozen=True):
    """The states before and after a transition.

    `returns` is whether the claim that it ends counts as no attempt.
    """

    sources: tuple[MessageState, ...]
    target: MessageState
    returns: bool = False


TRANSITIONS: Mapping[Transition, TransitionRule] = {
    "claim": TransitionRule(("ready", "waiting"), "claimed"),
    "complete": TransitionRule(("claimed",), "completed"),
    "cancel": TransitionRule(("claimed",), "cancelled"),
    "revoke": TransitionRule(("ready", "waiting", "claimed"), "cancelled"),
    "retry": TransitionRule(("claimed",), "waiting"),
    "bury": TransitionRule(("claimed",), "dead"),
    "release": TransitionRule(("claimed",), "waiting", returns=True),
    "snooze": TransitionRule(("claimed",), "waiting", returns=True),
    "lapse": TransitionRule(("claimed",), "waiting"),
    "spare": TransitionRule(("claimed",), "waiting", returns=True),
    "redrive": TransitionRule(("dead", "cancelled"), "waiting"),
    "unblock": TransitionRule(("blocked",), "waiting"),
}


class Completed(msgspec.Struct, frozen=True):
    """The handler returned."""

    result: Json = None


class Failed(msgspec.Struct, frozen=True):
    """The handler raised, was too slow, or reported a failure."""

    error: str
    cause: BaseException | None = None
    """The exception that it raised."""


class Returned(msgspec.Struct, frozen=True):
    """The handler did not run, or was stopped: as if the message had never been claimed."""


class Snooze(msgspec.Struct, frozen=True):
    """Returned by a handler: try this message again in `seconds`. No attempt is counted.

    Raises:
        Invalid: `seconds` is not a number, or is out of range.
    """

    seconds: float

    def __post_init__(self) -> None:
        seconds: Any = self.seconds
        if not (isinstance(seconds, int | float) and 0 <= seconds <= LONGEST_DELAY):
            raise Invalid("seconds", seconds, "must be 0 seconds to 366 days", "pass a number")
        # Plain: a database may read a derived type in its own way.
        msgspec.structs.force_setattr(self, "seconds", float(seconds))


class Cancel(msgspec.Struct, frozen=True):
    """Returned by a handler: this message is not to be handled, now or later."""

    reason: str = ""
    """Stored with the message, for people."""


HandlerVerdict: TypeAlias = Completed | Failed | Returned | Snooze | Cancel


def has_spent(attempts: int, max_attempts: int) -> bool:
    """Whether a message that fails now has no attempt left."""
    return attempts >= max_attempts


def shorten_error(text: str) -> str:
    """Return an error as it is stored: shortened, and text that every store can hold."""
    return text[:LONGEST_ERROR].replace("\0", "\\0").encode(errors="replace").decode()


def explain_cancel(last_error: str) -> str:
    """Return why a message was cancelled, from the last of its stored errors.

    Without a reason, that one is of an earlier attempt.
    """
    has_reason = last_error == REVOKED or last_error.startswith(CANCELLED)
    return last_error.partition("\n")[0] if has_reason else CANCELLED


def decide_lapse(*, is_suspect: bool, attempts: int, max_attempts: int) -> Transition:
    """Return the transition of a message whose worker died or fell silent."""
    if not is_suspect:
        return "spare"
    return "bury" if has_spent(attempts, max_attempts) else "lapse"


def decide(
    outcome: HandlerVerdict, *, attempt: int, max_attempts: int, retries: Retries, draw: float
) -> tuple[Transition, Seconds]:
    """Return the transition after an outcome, and the pause before the next attempt.

    Args:
        outcome: how the attempt ended.
        attempt: its number, counted from 1.
        max_attempts: the limit for this message.
        retries: the pauses between attempts.
        draw: a random number between 0 and 1.
    """
    match outcome:
        case Completed():
            return "complete", 0.0
        case Cancel():
            return "cancel", 0.0
        case Returned():
            return "release", 0.0
        case Snooze(seconds):
            return "snooze", seconds
        case Failed() if has_spent(attempt, max_attempts):
            return "bury", 0.0
        case Failed():
            return "retry", retries.pause(attempt, draw)
