"""How long to wait before trying again. The caller draws a random part of it."""

__all__ = ["backoff_limit"]


def backoff_limit(attempt: int, *, first: float, most: float) -> float:
    """Give the longest pause before an attempt: it doubles, up to a bound; none before the first.

    Drawing between zero and this (full jitter) spreads those who failed together.
    """
    if attempt <= 0:
        return 0.0
    # Beyond 60 doublings the bound has long been reached.
    return float(min(first * 2 ** min(attempt - 1, 60), most))
