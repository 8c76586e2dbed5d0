"""Settlements on their way to the store, as many in a batch as have gathered meanwhile.

A settlement is sent until the store has answered. It alone knows whether the claim still
stood: to give up earlier would be to guess.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from jobsync.components import Components
from jobsync.core.clock import backoff_limit
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import QueueBackend, Settlement
from jobsync.queue.in_flight import Delivery

__all__ = ["Completer"]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_GATHER = 0.001
_PATIENCE = 4
"""How often to wait for more that is about to come: a commit takes longer than all of that."""


_Parcel: TypeAlias = tuple[Settlement, Delivery | None]
"""A settlement, and what it settles, if that was ever in hand."""


class Completer:
    """Sends settlements, one batch at a time.

    Args:
        port: where to.
        components: the clock that pauses and the randomness that spreads.
        answered: told of each settlement whether the store took it.
        failed: told of every failure to reach the store.
        expects_more: says whether more is about to come.
    """

    def __init__(
        self,
        port: QueueBackend,
        components: Components,
        answered: Callable[[Delivery | None, bool], None],
        failed: Callable[[Exception], None],
        expects_more: Callable[[], bool],
    ) -> None:
        self._port = port
        self._clock = components.clock
        self._randomness = components.randomness
        self._answered = answered
        self._failed = failed
        self._expects_more = expects_more
        self._parcels: list[_Parcel] = []
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, settlement: Settlement, held: Delivery | None) -> None:
        """Send a settlement."""
        if not self._parcels:
            self._empty.clear()
            self._filled.set()
        self._parcels.append((settlement, held))

    async def run(self) -> None:
        """Send whatever comes, until cancelled."""
        while True:
            await self._filled.wait()
            await self._gather()
            self._filled.clear()
            await self._send()
            if self._parcels:
                self._filled.set()
            else:
                self._empty.set()

    async def flush(self) -> None:
        """Wait until everything is answered."""
        await self._empty.wait()

    async def _send(self) -> None:
        batch = self._take()
        answers = await self._deliver([settlement for settlement, _ in batch])
        for (_, held), taken in zip(batch, answers, strict=True):
            self._answered(held, taken)

    def _take(self) -> list[_Parcel]:
        """Take what has gathered, but each message once: it may have been claimed again since."""
        batch: dict[str, _Parcel] = {}
        self._parcels = [
            parcel
            for parcel in self._parcels
            if batch.setdefault(parcel[0].receipt.id, parcel) is not parcel
        ]
        return list(batch.values())

    async def _gather(self) -> None:
        for _ in range(_PATIENCE):
            if not self._expects_more():
                return
            await self._clock.sleep(_GATHER)

    async def _deliver(self, batch: list[Settlement]) -> list[bool]:
        attempt = 0
        while True:
            try:
                return await self._port.settle(batch)
            except (OutcomeUnknown, Unavailable) as error:
                self._failed(error)
                attempt += 1
                longest = backoff_limit(attempt, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
                await self._clock.sleep(self._randomness.uniform(0, longest))
