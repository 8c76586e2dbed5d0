"""Counts a store's calls, their duration and their cost.

`Meter.dollars` prices requests by the tariff of the store. Nothing is sampled; a call that
raises is counted too, as an error.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from jobsync.core.clock import Clock
from jobsync.stores.contract import Change, Conflicted, Outcome, Store, Unknown
from jobsync.stores.decorator import StoreDecorator

__all__ = ["FREE", "S3_TARIFF", "CallStats", "Meter", "MeteredStore", "Tariff"]

T = TypeVar("T")


class CallStats(msgspec.Struct):
    """Totals of one kind of call."""

    calls: int = 0
    items: int = 0
    """Keys, changes, entries or records that were sent, received or removed."""
    requests: int = 0
    dollars: float = 0.0
    seconds: float = 0.0
    errors: int = 0
    conflicts: int = 0
    unknowns: int = 0


class Tariff(msgspec.Struct, frozen=True):
    """How a store turns calls into requests, and what a request costs."""

    requests: dict[str, tuple[int, int]] = {}
    """For a kind of call: requests for each call, and for each of its items.

    One for each call by default. On objects a write is (0, 1), a scan (1, 1).
    """
    dollars: dict[str, tuple[float, float]] = {}
    """For a kind of call: the price of each call, and of each of its items."""

    def count(self, call: str, items: int) -> int:
        """Return the number of requests of a call with this many items."""
        per_call, per_item = self.requests.get(call, (1, 0))
        return per_call + per_item * items

    def price(self, call: str, items: int) -> float:
        """Return the price of a call with this many items."""
        per_call, per_item = self.dollars.get(call, (0.0, 0.0))
        return per_call + per_item * items


FREE = Tariff()
"""One request for each call, at no price: for SQL and memory."""

_WRITE = 5e-6
_READ = 0.4e-6

S3_TARIFF = Tariff(
    requests={"get": (0, 1), "write": (0, 1), "scan": (1, 1), "read": (1, 1), "bury": (1, 2)},
    dollars={
        "get": (0, _READ),
        "write": (0, _WRITE),
        "heads": (_WRITE, 0),
        "scan": (_WRITE, _READ),
        "append": (_WRITE, 0),
        "read": (_WRITE, _READ),
        "discard": (_WRITE, 0),
        "bury": (_WRITE, _READ),
    },
)
"""Amazon's prices in its cheapest regions, where a listing costs the same as a write.

Deletes are free. The listing of a scan is priced as one more read.
"""


class Meter:
    """Totals by kind of call: get, write, heads, scan, append, read, discard, bury, drop."""

    def __init__(self, tariff: Tariff = FREE) -> None:
        self.tariff = tariff
        self.stats: dict[str, CallStats] = {}

    def __getitem__(self, call: str) -> CallStats:
        return self.stats.setdefault(call, CallStats())

    @property
    def requests(self) -> int:
        """The total number of requests."""
        return sum(stats.requests for stats in self.stats.values())

    @property
    def dollars(self) -> float:
        """The total cost."""
        return sum(stats.dollars for stats in self.stats.values())


class MeteredStore(StoreDecorator):
    """A store whose calls are counted.

    Args:
        inner: the store that does the work.
        meter: collects the counts.
        clock: measures the duration of calls.
    """

    def __init__(self, inner: Store, meter: Meter, clock: Clock) -> None:
        super().__init__(inner)
        self._meter = meter
        self._clock = clock

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Run and count a call."""
        stats = self._meter[call]
        started = self._clock.mono()
        items = sent
        try:
            result = await work()
            if isinstance(result, list):
                items = len(result)
            elif isinstance(result, int):
                items = result
        except BaseException:
            stats.errors += 1
            raise
        finally:
            stats.calls += 1
            stats.items += items
            stats.requests += self._meter.tariff.count(call, items)
            stats.dollars += self._meter.tariff.price(call, items)
            stats.seconds += self._clock.mono() - started
        return result

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, and count their outcomes."""
        outcomes = await super().write(changes)
        stats = self._meter["write"]
        stats.conflicts += sum(isinstance(outcome, Conflicted) for outcome in outcomes)
        stats.unknowns += sum(isinstance(outcome, Unknown) for outcome in outcomes)
        return outcomes
