"""What becomes of messages: one table of moves, and the decision after each attempt."""

from typing import get_args

import pytest

from jobsync import Invalid
from jobsync.core.messages import (
    FINISHED,
    LIVE,
    MOVES,
    Cancel,
    Completed,
    Failed,
    HandlerVerdict,
    MessageState,
    Retries,
    Returned,
    Snooze,
    Transition,
    decide,
    decide_lapse,
    default_backoff,
    has_spent,
)


def test_every_move_is_in_the_table() -> None:
    """Once, and no other."""
    assert tuple(MOVES) == get_args(Transition)


def test_every_state_is_live_or_finished() -> None:
    """And none is both."""
    assert sorted((*LIVE, *FINISHED)) == sorted(get_args(MessageState))


def test_what_is_finished_comes_back_only_when_somebody_asks() -> None:
    """No move but `redrive` leads out of a finished state, and completed is for ever."""
    assert [move for move, step in MOVES.items() if set(step.sources) & set(FINISHED)] == [
        "redrive"
    ]
    assert not any("completed" in step.sources for step in MOVES.values())


def test_only_a_claimed_message_is_settled_and_only_free_ones_are_claimed() -> None:
    """A message has at most one live claim: no move leads from claimed to claimed."""
    for move, step in MOVES.items():
        if step.target == "claimed":
            assert (move, step.sources) == ("claim", ("ready", "waiting"))
        elif move != "redrive":
            assert step.sources == ("claimed",)


def test_only_clean_returns_spend_no_attempt() -> None:
    """And a death in company. A failure, a death alone and a success all count."""
    assert {move for move, step in MOVES.items() if step.returns} == {"release", "snooze", "spare"}


def test_only_a_suspect_has_itself_to_blame() -> None:
    """Whoever was there when its worker died is spared; who dies alone has spent an attempt."""
    assert decide_lapse(is_suspect=False, attempts=9, max_attempts=1) == "spare"
    assert decide_lapse(is_suspect=True, attempts=1, max_attempts=2) == "lapse"
    assert decide_lapse(is_suspect=True, attempts=2, max_attempts=2) == "bury"


def test_pauses_double_up_to_32_seconds() -> None:
    """After failure n: 2^(n-1) seconds at most 32."""
    assert [default_backoff(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert default_backoff(10_000) == 32


def test_jitter_only_adds_and_only_a_little() -> None:
    """Messages that failed together come back apart, and none too early."""
    retries = Retries()
    assert retries.pause(3, 0.0) == 4
    assert retries.pause(3, 1.0) == pytest.approx(4.4)


def test_a_pause_of_the_users_own() -> None:
    """Any function of the count; what is no duration is refused with the fix."""
    assert Retries(backoff=lambda n: 100 * n).pause(2, 0.0) == 200
    for wrong in (-1.0, float("nan"), float("inf"), "soon"):
        with pytest.raises(Invalid, match=r"backoff .*is no duration.*got "):
            Retries(backoff=lambda _, wrong=wrong: wrong).pause(1, 0.0)  # type: ignore[misc]


def test_a_message_is_tried_at_least_once() -> None:
    """No attempts at all would be a message that nobody handles."""
    with pytest.raises(Invalid, match=r"max_attempts is less than 1 \(got 0\)"):
        Retries(max_attempts=0)


@pytest.mark.parametrize(
    ("outcome", "attempt", "move", "pause"),
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
def test_what_an_outcome_leads_to(
    outcome: HandlerVerdict, attempt: int, move: str, pause: float
) -> None:
    """Four attempts: the fourth failure is the last; giving back and snoozing never end it."""
    found = decide(outcome, attempt=attempt, max_attempts=4, retries=Retries(), draw=0.0)
    assert found == (move, pause)


def test_a_message_with_one_attempt_dies_of_its_first_failure() -> None:
    """`max_retries=0`."""
    assert has_spent(1, 1)
    assert not has_spent(0, 1)


@pytest.mark.parametrize("seconds", [-1, float("nan"), 10**9])
def test_a_snooze_is_a_duration(seconds: float) -> None:
    """Nobody sleeps for ever by mistake."""
    with pytest.raises(Invalid, match=r"seconds .*got "):
        Snooze(seconds)
