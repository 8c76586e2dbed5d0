"""Retries: how often something is tried, and how long the pauses are.

The library's own requests are repeated with an `ExponentialBackoff`. Users' functions are
called again by their `Retries`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from jobsync.core.arguments import LONGEST_DELAY
from jobsync.core.clock import Clock, Randomness, Seconds
from jobsync.errors import Invalid

__all__ = [
    "MAX_ATTEMPTS",
    "Backoff",
    "ExponentialBackoff",
    "Retries",
    "check_max_attempts",
    "default_backoff",
]

MAX_ATTEMPTS = 1_000_000
"""The highest limit of the attempts of a message."""

_JITTER = 0.1


class ExponentialBackoff(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses that are twice as long after each failure, up to a limit.

    Attributes:
        first: the longest pause after the first failure.
        longest: the longest pause of all.
        jitter: the part of a pause that is random, so that callers that failed together do
            not retry together.
    """

    first: Seconds
    longest: Seconds
    jitter: float = 1.0

    def limit(self, failures: int) -> Seconds:
        """Return the longest pause after so many failures; 0 if there were none."""
        if failures <= 0:
            return 0.0
        # Beyond 60 doublings the bound has long been reached.
        return float(min(self.first * 2 ** min(failures - 1, 60), self.longest))

    def draw(self, failures: int, randomness: Randomness) -> Seconds:
        """Return a random pause after so many failures."""
        limit = self.limit(failures)
        return randomness.uniform((1.0 - self.jitter) * limit, limit)

    async def sleep(self, failures: int, clock: Clock, randomness: Randomness) -> None:
        """Sleep for a random pause after so many failures."""
        await clock.sleep(self.draw(failures, randomness))


Backoff: TypeAlias = Callable[[int], float]
"""Takes the number of failures so far; returns the seconds to wait before the next attempt."""

_DEFAULT_BACKOFF = ExponentialBackoff(first=1.0, longest=32.0)


def default_backoff(failures: int) -> Seconds:
    """Return 1, 2, 4, 8, 16, 32, 32 … seconds."""
    return _DEFAULT_BACKOFF.limit(failures)


def check_max_attempts(value: object) -> None:
    """Check how often a message may be tried.

    Raises:
        Invalid: it is not a whole number from 1 to 1,000,000.
    """
    if type(value) is not int or not 1 <= value <= MAX_ATTEMPTS:
        problem = f"must be a whole number from 1 to {MAX_ATTEMPTS:,}"
        raise Invalid("max_attempts", value, problem, "use 1 for no retry")


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often a message is tried, and the pauses in between.

    Attributes:
        max_attempts: 4: three retries after the first attempt.
        backoff: the pause after each failure; up to a tenth is added, so that messages
            that failed together do not come back together.

    Raises:
        Invalid: `max_attempts` is out of range, or `backoff` is not a function.
    """

    max_attempts: int = 4
    backoff: Backoff = default_backoff

    def __post_init__(self) -> None:
        check_max_attempts(self.max_attempts)
        backoff: object = self.backoff
        if not callable(backoff):
            fix = "write backoff=lambda failures: 10.0 * failures"
            raise Invalid("backoff", backoff, "must be a function", fix)

    def pause(self, failures: int, draw: float) -> Seconds:
        """Return the pause after a failure; `draw` is between 0 and 1.

        Raises:
            Invalid: the user's own function did not return a duration.
        """
        pause: Any = self.backoff(failures)
        if not (isinstance(pause, int | float) and 0 <= pause <= LONGEST_DELAY):
            raise Invalid("backoff", pause, "must return 0 seconds to 366 days", "return a number")
        return float(pause) * (1 + _JITTER * draw)
