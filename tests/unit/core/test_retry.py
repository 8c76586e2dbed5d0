"""Pauses between attempts."""

from jobsync.core.retry import backoff_limit


def test_pauses_double_up_to_a_bound() -> None:
    """However many attempts."""
    pauses = [backoff_limit(n, first=0.5, most=3) for n in (0, 1, 2, 3, 4, 5, 10**9)]
    assert pauses == [0, 0.5, 1, 2, 3, 3, 3]
