"""A store that misbehaves on purpose, to test what stands on it.

Faults are drawn from the randomness that is handed in, so that a seed repeats them. They
are those of a network: a request that never arrives, a reply that is lost, a request that
arrives long after its sender gave up.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from jobsync.components import Components
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.stores.contract import Change, Outcome, Store, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.drafts import stamp

__all__ = ["Faults", "FaultyStore"]

T = TypeVar("T")

_CHANGES_SOMETHING = {"append", "discard", "bury", "drop"}


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How often each fault happens, between 0 (never) and 1 (always)."""

    refused: float = 0.0
    """The request does not arrive, and the caller knows: `Unavailable`."""
    lost: float = 0.0
    """It is carried out and the reply lost: unknown, or `Unavailable` for a reader."""
    late: float = 0.0
    """A write's reply is lost first, and it arrives before some later call."""
    slow: float = 0.0
    """It takes up to `delay` seconds."""
    delay: float = 1.0


class FaultyStore(StoreDecorator):
    """A store behind a bad network.

    Args:
        inner: the store that does the work.
        components: the clock that delays, and the randomness that decides.
        faults: how often what happens; may be changed while running.
    """

    def __init__(self, inner: Store, components: Components, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults
        self.injected = 0
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._under_way: list[Sequence[Change]] = []

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Let a call through, more or less."""
        del sent
        if self._draw(0.5 if self._under_way else 0.0):
            await self.land()
        if self._strikes(self.faults.slow):
            await self._clock.sleep(self._randomness.uniform(0, self.faults.delay))
        if self._strikes(self.faults.refused):
            raise Unavailable(self.name, "the request was refused on purpose")
        result = await work()
        if call != "write" and self._strikes(self.faults.lost):
            if call in _CHANGES_SOMETHING:
                raise OutcomeUnknown(self.name, "the reply was lost on purpose")
            raise Unavailable(self.name, "the reply was lost on purpose")
        return result

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, now, later or in secret."""
        changes = stamp(changes, self._ids)
        unknown: list[Outcome] = [Unknown("the reply was lost on purpose") for _ in changes]
        if self._strikes(self.faults.late):
            self._under_way.append(changes)
            return unknown
        outcomes = await super().write(changes)
        return unknown if self._strikes(self.faults.lost) else outcomes

    async def land(self) -> None:
        """Let everything that is still under way arrive."""
        landing, self._under_way = self._under_way, []
        for changes in landing:
            await self.inner.write(changes)

    def _strikes(self, chance: float) -> bool:
        struck = self._draw(chance)
        self.injected += struck
        return struck

    def _draw(self, chance: float) -> bool:
        return chance > 0 and self._randomness.uniform(0, 1) < chance
