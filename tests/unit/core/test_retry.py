"""Pauses grow up to a limit, and a message is tried so often."""

from typing import Any

import pytest

from jobsync import Invalid
from jobsync.core.clock import Clock
from jobsync.core.retry import MAX_ATTEMPTS, ExponentialBackoff, Retries, default_backoff


def test_pauses_double_up_to_a_bound() -> None:
    """The bound holds for any number of failures; before the first there is no pause."""
    backoff = ExponentialBackoff(first=0.5, longest=3)
    assert [backoff.limit(n) for n in (0, 1, 2, 3, 4, 5, 10**9)] == [0, 0.5, 1, 2, 3, 3, 3]
    assert backoff.limit(-1) == 0
    # From a millisecond to an hour.
    long = ExponentialBackoff(first=0.001, longest=3600)
    assert [long.limit(n) for n in (12, 22, 23, 99)] == [2.048, 2097.152, 3600, 3600]


@pytest.mark.parametrize(("jitter", "shortest"), [(1.0, 0.0), (0.5, 1.0), (0.0, 2.0)])
async def test_a_pause_is_drawn_within_its_jitter(
    jitter: float, shortest: float, clock: Clock
) -> None:
    """Callers that failed together do not retry together."""
    backoff = ExponentialBackoff(first=1, longest=9, jitter=jitter)
    drawn: list[tuple[float, float]] = []

    class Draws:
        def bytes(self, count: int) -> bytes:
            return bytes(count)

        def uniform(self, low: float, high: float) -> float:
            drawn.append((low, high))
            return high

    start = clock.mono()
    await backoff.sleep(2, clock, Draws())
    assert drawn == [(shortest, 2.0)]
    assert clock.mono() - start == 2.0


def test_pauses_double_up_to_32_seconds() -> None:
    """After failure n: 2^(n-1) seconds at most 32."""
    assert [default_backoff(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert default_backoff(10_000) == 32


def test_jitter_only_adds_and_only_a_little() -> None:
    """Messages that failed together come back apart, and none too early."""
    retries = Retries()
    assert retries.pause(3, 0.0) == 4
    assert retries.pause(3, 1.0) == pytest.approx(4.4)


def test_a_backoff_of_the_users_own() -> None:
    """Any function of the count; a result that is not a duration is refused with the fix."""
    assert Retries(backoff=lambda n: 100 * n).pause(2, 0.0) == 200
    longest = 366 * 86_400.0
    for right in (0, 0.0, longest):
        assert Retries(backoff=lambda _, right=right: right).pause(1, 0.0) == right  # type: ignore[misc]
    for wrong in (longest + 1, None, -1.0, float("nan"), float("inf"), "soon"):
        with pytest.raises(Invalid, match=r"backoff must return 0 seconds to 366 days \(got "):
            Retries(backoff=lambda _, wrong=wrong: wrong).pause(1, 0.0)  # type: ignore[misc]


def test_a_message_is_tried_at_least_once() -> None:
    """Without an attempt, a message would never be handled."""
    with pytest.raises(Invalid, match=r"max_attempts must be .* from 1 to 1,000,000 \(got 0\)"):
        Retries(max_attempts=0)
    wrong: Any
    for wrong in (-1, MAX_ATTEMPTS + 1, True, 1.0, "3", None):
        with pytest.raises(Invalid, match="max_attempts must be a whole number"):
            Retries(max_attempts=wrong)
    for right in (1, MAX_ATTEMPTS):
        assert Retries(max_attempts=right).max_attempts == right


def test_a_number_is_no_backoff() -> None:
    """The error has a function to write instead."""
    wrong: Any
    for wrong in (None, 5, 0.5, "5"):
        with pytest.raises(Invalid, match=r"backoff must be a function.*lambda failures"):
            Retries(backoff=wrong)
