"""What can become of a message, and who decides it. Pure.

A message is in one state at a time, and moves only as this table says:

    push       ──▶ ready, or waiting where it has a delay
    claim      ready, waiting ──▶ claimed
    complete   claimed ──▶ completed
    cancel     claimed ──▶ cancelled
    retry      claimed ──▶ waiting      after a failure, with a pause
    bury       claimed ──▶ dead         after the last failure
    release    claimed ──▶ waiting      given back untouched: spends no attempt
    snooze     claimed ──▶ waiting      later, at its own wish: spends no attempt
    lapse      claimed ──▶ waiting      its claimant died or fell silent while it ran alone
    spare      claimed ──▶ waiting      likewise, in company: spends no attempt
    redrive    dead, cancelled ──▶ waiting

`deliveries` counts the claims, `returned` those that spend nothing; the difference are the
attempts. A message whose claim nobody settled may have killed its worker, or may have been
there when another one did. Nobody can tell, so it is spared, becomes a suspect, and runs alone
until somebody settles it. Who dies of a suspect dies of nothing else: that is an attempt, and
the last one makes a dead letter.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from jobsync.core.codec import Json
from jobsync.core.retry import backoff_limit
from jobsync.errors import Invalid

__all__ = [
    "FINISHED",
    "LIVE",
    "MOVES",
    "Backoff",
    "Cancel",
    "Completed",
    "Failed",
    "HandlerVerdict",
    "MessageState",
    "Retries",
    "Returned",
    "Snooze",
    "Step",
    "Transition",
    "decide",
    "decide_lapse",
    "default_backoff",
    "has_spent",
]

MessageState: TypeAlias = Literal["ready", "waiting", "claimed", "completed", "cancelled", "dead"]

LIVE: tuple[MessageState, ...] = ("ready", "waiting", "claimed")
"""States of messages that are still to be handled."""

FINISHED: tuple[MessageState, ...] = ("completed", "cancelled", "dead")
"""States of messages that are not handled any more, unless somebody asks for it."""

Transition: TypeAlias = Literal[
    "claim", "complete", "cancel", "retry", "bury", "release", "snooze", "lapse", "spare", "redrive"
]


class Step(msgspec.Struct, frozen=True):
    """From which states a move leads where, and whether the claim that it ends is uncounted."""

    sources: tuple[MessageState, ...]
    target: MessageState
    returns: bool = False


MOVES: Mapping[Transition, Step] = {
    "claim": Step(("ready", "waiting"), "claimed"),
    "complete": Step(("claimed",), "completed"),
    "cancel": Step(("claimed",), "cancelled"),
    "retry": Step(("claimed",), "waiting"),
    "bury": Step(("claimed",), "dead"),
    "release": Step(("claimed",), "waiting", returns=True),
    "snooze": Step(("claimed",), "waiting", returns=True),
    "lapse": Step(("claimed",), "waiting"),
    "spare": Step(("claimed",), "waiting", returns=True),
    "redrive": Step(("dead", "cancelled"), "waiting"),
}

Backoff: TypeAlias = Callable[[int], float]
"""Given how often a message has failed, gives the seconds to wait before the next attempt."""

LONGEST_PAUSE = 32.0
"""Seconds: the sixth failure and all later ones wait so long."""

_JITTER = 0.1
_LONGEST_DELAY = 366 * 86_400.0


def default_backoff(failures: int) -> float:
    """Wait 1, 2, 4, 8, 16, 32, 32 … seconds."""
    return backoff_limit(failures, first=1.0, most=LONGEST_PAUSE)


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often a message is tried, and how long it rests in between.

    Attributes:
        max_attempts: 4: three retries after the first attempt.
        backoff: the rest after each failure; up to a tenth is added, so that messages
            that failed together do not come back together.

    Raises:
        Invalid: a message would never be tried.
    """

    max_attempts: int = 4
    backoff: Backoff = default_backoff

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise Invalid("max_attempts", self.max_attempts, "is less than 1", "give 1 or more")

    def pause(self, failures: int, draw: float) -> float:
        """Give the rest after a failure; `draw` is between 0 and 1.

        Raises:
            Invalid: the user's own function gives no duration.
        """
        pause: Any = self.backoff(failures)
        if not (isinstance(pause, int | float) and 0 <= pause <= _LONGEST_DELAY):
            raise Invalid("backoff", pause, "is no duration", "give seconds, 0 or more")
        return float(pause) * (1 + _JITTER * draw)


class Completed(msgspec.Struct, frozen=True):
    """The handler has returned."""

    result: Json = None


class Failed(msgspec.Struct, frozen=True):
    """The handler has raised, was too slow, or said so."""

    error: str
    cause: Exception | None = None
    """What it has raised."""


class Returned(msgspec.Struct, frozen=True):
    """The handler did not run, or was told to stop: as if it had never been claimed."""


class Snooze(msgspec.Struct, frozen=True):
    """Returned by a handler: try this message again in so many seconds; spends no attempt.

    Raises:
        Invalid: that is no duration.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= _LONGEST_DELAY:
            raise Invalid("seconds", self.seconds, "is no duration", "give 0 to 366 days")


class Cancel(msgspec.Struct, frozen=True):
    """Returned by a handler: this message need not be handled, neither now nor later."""

    reason: str = ""


HandlerVerdict: TypeAlias = Completed | Failed | Returned | Snooze | Cancel


def has_spent(attempts: int, max_attempts: int) -> bool:
    """Say whether a message that fails now was tried for the last time."""
    return attempts >= max_attempts


def decide_lapse(*, is_suspect: bool, attempts: int, max_attempts: int) -> Transition:
    """Give the move of a message whose claimant died or fell silent."""
    if not is_suspect:
        return "spare"
    return "bury" if has_spent(attempts, max_attempts) else "lapse"


def decide(
    outcome: HandlerVerdict, *, attempt: int, max_attempts: int, retries: Retries, draw: float
) -> tuple[Transition, float]:
    """Give the move that an outcome leads to, and the seconds to wait before the next attempt.

    Args:
        outcome: how the attempt ended.
        attempt: which one it was, counted from 1.
        max_attempts: how many this message has.
        retries: how long it rests.
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
