"""What every part of jobsync gets from outside: a clock, randomness, ids, events and processes.

They are passed in, so that the same code runs under a virtual clock.
"""

import base64
from typing import Self

import msgspec

from jobsync.core.clock import Clock, Randomness, SystemClock, SystemRandomness
from jobsync.events import Events
from jobsync.processes import Processes, SystemProcesses

__all__ = ["NONCE_LENGTH", "Components", "Ids"]

NONCE_LENGTH = 12
_NONCE_BYTES = NONCE_LENGTH * 3 // 4
_UUID_BYTES = 10
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


class Ids:
    """Generates unique ids from a clock and randomness.

    A nonce marks one write: 72 random bits, drawn anew each time, so that a forked child can
    never repeat its parent's. Ids of workers and records sort by the time of their creation,
    so that "first in lexicographic order" and "oldest" are the same rule.

    Args:
        clock: dates the ids that sort by time.
        randomness: makes them unique.
    """

    def __init__(self, clock: Clock, randomness: Randomness) -> None:
        self._clock = clock
        self._randomness = randomness

    def nonces(self, count: int) -> list[str]:
        """Return new nonces, one for each write."""
        if not count:
            return []
        text = base64.urlsafe_b64encode(self._randomness.bytes(_NONCE_BYTES * count)).decode()
        return [text[i : i + NONCE_LENGTH] for i in range(0, NONCE_LENGTH * count, NONCE_LENGTH)]

    def worker(self) -> str:
        """Return the id of a new worker. Sorts by start time."""
        return f"worker-{self._millis()}-{self._hex(6)}"

    def incarnation(self, worker: str) -> str:
        """Return the id of one run of a worker. Sorts as the worker's id does."""
        return f"{worker}.{self._hex(4)}"

    def batch(self) -> str:
        """Return the id of a batch of history entries. Sorts by its writer's time."""
        return f"{self._millis()}-{self._hex(6)}"

    def records(self, count: int) -> list[str]:
        """Return sorted ids for new records: UUIDs (version 7), which sort by time.

        Random bits are drawn once: the ids of a call are in succession.
        """
        stamp = int(self._clock.wall().seconds * 1000).to_bytes(6, "big").hex()
        drawn = self._hex(_UUID_BYTES)
        # "7" is the version; of the digit after the next dash only two bits are random.
        start = f"{stamp[:8]}-{stamp[8:]}-7{drawn[:3]}-{_VARIANT[drawn[3]]}{drawn[4:7]}-"
        first = min(int(drawn[7:19], 16), 16**12 - count)
        return [f"{start}{number:012x}" for number in range(first, first + count)]

    def _millis(self) -> str:
        # 13 digits hold every instant from 2001 to 2286 at one width.
        return f"{int(self._clock.wall().seconds * 1000):013d}"

    def _hex(self, count: int) -> str:
        return self._randomness.bytes(count).hex()


class Components(msgspec.Struct, frozen=True, kw_only=True):
    """One set of components, shared by a store and everything above it."""

    clock: Clock
    randomness: Randomness
    events: Events
    processes: Processes = msgspec.field(default_factory=SystemProcesses)

    @classmethod
    def system(cls) -> Self:
        """Return this machine's clock and randomness, with new events."""
        return cls(clock=SystemClock(), randomness=SystemRandomness(), events=Events())

    @property
    def ids(self) -> Ids:
        """Return a generator of ids that uses this clock and this randomness."""
        return Ids(self.clock, self.randomness)
