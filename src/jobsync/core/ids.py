"""Names that nobody else makes, from time and randomness that come in as arguments.

A nonce marks one write: 72 random bits, drawn anew each time, so that a forked child
can never repeat its parent's. A worker id sorts by start time, so that "first in
lexicographic order" and "oldest" are one rule. So does a record's id.
"""

import base64
from typing import Protocol

from jobsync.core.clock import Clock

__all__ = ["NONCE_LENGTH", "Ids", "Randomness"]

NONCE_LENGTH = 12
_NONCE_BYTES = NONCE_LENGTH * 3 // 4
_UUID_BYTES = 10
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


class Randomness(Protocol):
    """Where randomness comes from."""

    def bytes(self, count: int) -> bytes:
        """Draw bytes that nobody can guess or repeat."""
        ...

    def uniform(self, low: float, high: float) -> float:
        """Draw a number between two bounds."""
        ...


class Ids:
    """Makes names.

    Args:
        clock: dates the names that sort by time.
        randomness: makes them unique.
    """

    def __init__(self, clock: Clock, randomness: Randomness) -> None:
        self._clock = clock
        self._randomness = randomness

    def nonces(self, count: int) -> list[str]:
        """Mark that many writes."""
        if not count:
            return []
        drawn = base64.urlsafe_b64encode(self._randomness.bytes(_NONCE_BYTES * count)).decode()
        return [drawn[i : i + NONCE_LENGTH] for i in range(0, NONCE_LENGTH * count, NONCE_LENGTH)]

    def worker(self) -> str:
        """Name a worker: sorts by start time."""
        return f"worker-{self._millis()}-{self._hex(6)}"

    def incarnation(self, worker: str) -> str:
        """Name one life of a worker: sorts as the worker does."""
        return f"{worker}.{self._hex(4)}"

    def batch(self) -> str:
        """Name a batch of history entries: sorts by the time of its writer."""
        return f"{self._millis()}-{self._hex(6)}"

    def records(self, count: int) -> list[str]:
        """Name that many records: UUIDs (version 7) that sort by time, and as they are given."""
        stamp = int(self._clock.wall().seconds * 1000).to_bytes(6, "big").hex()
        drawn = self._randomness.bytes(_UUID_BYTES * count).hex()
        return sorted(
            # "7" is the version; of the digit after the next dash only two bits are random.
            f"{stamp[:8]}-{stamp[8:]}-7{drawn[i : i + 3]}-{_VARIANT[drawn[i + 3]]}"
            f"{drawn[i + 4 : i + 7]}-{drawn[i + 7 : i + 19]}"
            for i in range(0, 2 * _UUID_BYTES * count, 2 * _UUID_BYTES)
        )

    def _millis(self) -> str:
        # 13 digits hold every instant from 2001 to 2286 at one width.
        return f"{int(self._clock.wall().seconds * 1000):013d}"

    def _hex(self, count: int) -> str:
        return self._randomness.bytes(count).hex()
