"""Counts what a store is asked to do, how long it takes, and what that costs.

Requests are money: `Meter.dollars` prices them by the tariff of the store. Nothing is
sampled; a call that raises is counted too, as an error.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from jobsync.core.clock import Clock
from jobsync.stores.contract import Change, Conflicted, Outcome, Store, StoreDecorator, Unknown

__all__ = ["FREE", "CallStats", "Meter", "MeteredStore", "Tariff"]

T = TypeVar("T")


class CallStats(msgspec.Struct):
    """What one kind of call came to."""

    calls: int = 0
    items: int = 0
    """Keys, changes, lines or records that went over the wire."""
    requests: int = 0
    dollars: float = 0.0
    seconds: float = 0.0
    errors: int = 0
    conflicts: int = 0
    unknowns: int = 0


class Tariff(msgspec.Struct, frozen=True):
    """How a store turns calls into requests, and what a request costs."""

    requests: dict[str, tuple[int, int]] = {}
    """For a kind of call: requests for each call, and for each item of it.

    One for each call where nothing is said. On objects a write is (0, 1), a scan (1, 1).
    """
    dollars: dict[str, tuple[float, float]] = {}
    """For a kind of call: the price of each call, and of each item of it."""

    def count(self, call: str, items: int) -> int:
        """Give the number of requests that a call with that many items makes."""
        each_call, each_item = self.requests.get(call, (1, 0))
        return each_call + each_item * items

    def price(self, call: str, items: int) -> float:
        """Give what a call with that many items costs."""
        each_call, each_item = self.dollars.get(call, (0.0, 0.0))
        return each_call + each_item * items


FREE = Tariff()
"""One request a call, at no price: what SQL and memory cost."""


class Meter:
    """The counts, by kind of call: get, write, heads, scan, append, read, discard, bury, drop."""

    def __init__(self, tariff: Tariff = FREE) -> None:
        self.tariff = tariff
        self.tallies: dict[str, CallStats] = {}

    def __getitem__(self, call: str) -> CallStats:
        return self.tallies.setdefault(call, CallStats())

    @property
    def requests(self) -> int:
        """All requests together."""
        return sum(tally.requests for tally in self.tallies.values())

    @property
    def dollars(self) -> float:
        """What they cost."""
        return sum(tally.dollars for tally in self.tallies.values())


class MeteredStore(StoreDecorator):
    """A store that is watched.

    Args:
        inner: the store that does the work.
        meter: where the counts go.
        clock: measures how long calls take.
    """

    def __init__(self, inner: Store, meter: Meter, clock: Clock) -> None:
        super().__init__(inner)
        self._meter = meter
        self._clock = clock

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Count a call."""
        tally = self._meter[call]
        begun = self._clock.mono()
        items = sent
        try:
            result = await work()
            if isinstance(result, list):
                items = len(result)
        except BaseException:
            tally.errors += 1
            raise
        finally:
            tally.calls += 1
            tally.items += items
            tally.requests += self._meter.tariff.count(call, items)
            tally.dollars += self._meter.tariff.price(call, items)
            tally.seconds += self._clock.mono() - begun
        return result

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, and count how they went."""
        outcomes = await super().write(changes)
        tally = self._meter["write"]
        tally.conflicts += sum(isinstance(outcome, Conflicted) for outcome in outcomes)
        tally.unknowns += sum(isinstance(outcome, Unknown) for outcome in outcomes)
        return outcomes
