"""The life of a message: one table of transitions, and the decision after each attempt."""

from decimal import Decimal
from typing import Any, get_args

import pytest

from jobsync import Invalid
from jobsync.core.messages import (
    CANCELLED,
    FINISHED,
    LIVE,
    LONGEST_ERROR,
    REVOKED,
    TRANSITIONS,
    Cancel,
    Completed,
    Failed,
    HandlerVerdict,
    MessageState,
    Returned,
    Snooze,
    Transition,
    decide,
    decide_lapse,
    explain_cancel,
    has_spent,
    shorten_error,
)
from jobsync.core.retry import Retries


def test_every_transition_is_in_the_table() -> None:
    """Each once, and no other."""
    assert tuple(TRANSITIONS) == get_args(Transition)


def test_every_state_is_live_or_finished() -> None:
    """No state is both."""
    assert sorted((*LIVE, *FINISHED)) == sorted(get_args(MessageState))


def test_finished_messages_come_back_only_by_redrive() -> None:
    """No other transition leaves a finished state, and nothing leaves `completed`."""
    revived = [name for name, rule in TRANSITIONS.items() if set(rule.sources) & set(FINISHED)]
    assert revived == ["redrive"]
    assert not any("completed" in rule.sources for rule in TRANSITIONS.values())


def test_only_a_claimed_message_is_settled_and_only_free_ones_are_claimed() -> None:
    """A message has at most one live claim: nothing leads from claimed to claimed."""
    for name, rule in TRANSITIONS.items():
        if rule.target == "claimed":
            assert (name, rule.sources) == ("claim", ("ready", "waiting"))
        elif name not in {"redrive", "revoke", "unblock"}:
            assert rule.sources == ("claimed",)


def test_only_clean_returns_count_as_no_attempt() -> None:
    """So does a death beside others. A failure, a death alone and a success all count."""
    returns = {name for name, rule in TRANSITIONS.items() if rule.returns}
    assert returns == {"release", "snooze", "spare"}


def test_only_a_suspect_is_blamed_for_a_death() -> None:
    """A message that ran beside others is spared; a suspect, which ran alone, spends an attempt."""
    assert decide_lapse(is_suspect=False, attempts=9, max_attempts=1) == "spare"
    assert decide_lapse(is_suspect=True, attempts=1, max_attempts=2) == "lapse"
    assert decide_lapse(is_suspect=True, attempts=2, max_attempts=2) == "bury"


@pytest.mark.parametrize(
    ("outcome", "attempt", "transition", "pause"),
    [
        (Completed({"done": True}), 4, "complete", 0),
        (Cancel("not needed"), 1, "cancel", 0),
        (Returned(), 4, "release", 0),
        (Snooze(60), 4, "snooze", 60),
        (Failed("boom"), 1, "retry", 1),
        (Failed("boom"), 3, "retry", 4),
        (Failed("boom"), 4, "bury", 0),
        (Failed("boom"), 9, "bury", 0),
    ],
)
def test_an_outcome_leads_to_a_transition(
    outcome: HandlerVerdict, attempt: int, transition: str, pause: float
) -> None:
    """The fourth failure of four attempts is the last; release and snooze never end a message."""
    result = decide(outcome, attempt=attempt, max_attempts=4, retries=Retries(), draw=0.0)
    assert result == (transition, pause)


def test_a_message_with_one_attempt_has_no_second() -> None:
    """`max_retries=0`."""
    assert has_spent(1, 1)
    assert not has_spent(0, 1)


@pytest.mark.parametrize("seconds", [-1, float("nan"), 366 * 86_400 + 1, Decimal(5), "5", None])
def test_a_snooze_is_a_duration(seconds: Any) -> None:
    """A message cannot be snoozed for ever by mistake, nor for what a database cannot read."""
    with pytest.raises(Invalid, match=r"seconds must be 0 seconds to 366 days \(got "):
        Snooze(seconds)


@pytest.mark.parametrize("seconds", [0, 5, 5.0, True, 366 * 86_400, type("D", (float,), {})(5)])
def test_a_snooze_is_a_plain_number(seconds: float) -> None:
    """Whatever the type that the handler used."""
    assert type(Snooze(seconds).seconds) is float
    assert Snooze(seconds).seconds == seconds


@pytest.mark.parametrize(
    ("error", "stored"),
    [
        ("ValueError: no", "ValueError: no"),
        ("x" * LONGEST_ERROR, "x" * LONGEST_ERROR),
        ("x" * (LONGEST_ERROR + 1), "x" * LONGEST_ERROR),
        # PostgreSQL holds no NUL, and no store half of a character.
        ("a\0b\0", "a\\0b\\0"),
        ("a\ud800b", "a?b"),
        ("\U0001f600\udc00", "\U0001f600?"),
    ],
)
def test_an_error_is_stored_as_text_that_every_store_can_hold(error: str, stored: str) -> None:
    """Whatever a handler raises."""
    assert shorten_error(error) == stored
    assert shorten_error(error).encode().decode() == stored


@pytest.mark.parametrize(
    ("last_error", "reason"),
    [
        ("", CANCELLED),
        # Of an earlier attempt.
        ("ValueError: no\n  File x", CANCELLED),
        (REVOKED, REVOKED),
        (f"{REVOKED}, said ValueError", CANCELLED),
        (f"{CANCELLED}: out of stock", f"{CANCELLED}: out of stock"),
        (f"{CANCELLED}: out of stock\nuntil May", f"{CANCELLED}: out of stock"),
    ],
)
def test_a_message_was_cancelled_for_its_reason_alone(last_error: str, reason: str) -> None:
    """Without one, its last error tells nothing of it."""
    assert explain_cancel(last_error) == reason
