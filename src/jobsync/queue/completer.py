"""Sends settlements to the store, in batches of those that collected meanwhile.

A settlement is sent until the store answers. Only the store knows whether the claim still stood;
giving up earlier would be a guess.
"""

import asyncio
from typing import TypeAlias

from jobsync.components import Components
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import QueueBackend, Settlement
from jobsync.queue.in_flight import Delivery, WorkerListener

__all__ = ["Completer"]

_BACKOFF = ExponentialBackoff(first=0.1, longest=2.0)
_COLLECT = 0.001
"""Seconds to wait for more settlements."""
_MAX_WAITS = 4
"""How often to wait for more settlements: a commit takes longer than all these waits."""

_Pending: TypeAlias = tuple[Settlement, Delivery | None]
"""A settlement and its delivery, if the message was ever in flight."""


class Completer:
    """Sends settlements, one batch at a time.

    Args:
        backend: where they are sent.
        components: the clock and the randomness of pauses.
        listener: the worker.
    """

    def __init__(
        self, backend: QueueBackend, components: Components, listener: WorkerListener
    ) -> None:
        self._backend = backend
        self._clock = components.clock
        self._randomness = components.randomness
        self._listener = listener
        self._pending: list[_Pending] = []
        self._has_pending = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def submit(self, settlement: Settlement, delivery: Delivery | None) -> None:
        """Send a settlement with the next batch."""
        if not self._pending:
            self._is_empty.clear()
            self._has_pending.set()
        self._pending.append((settlement, delivery))

    async def run(self) -> None:
        """Send settlements until cancelled."""
        while True:
            await self._has_pending.wait()
            await self._collect()
            self._has_pending.clear()
            await self._send_batch()
            if self._pending:
                self._has_pending.set()
            else:
                self._is_empty.set()

    async def flush(self) -> None:
        """Wait until every settlement is answered."""
        await self._is_empty.wait()

    async def _send_batch(self) -> None:
        batch = self._take_batch()
        answers = await self._settle([settlement for settlement, _ in batch])
        for (_, delivery), is_accepted in zip(batch, answers, strict=True):
            self._listener.on_answer(delivery, is_accepted=is_accepted)

    def _take_batch(self) -> list[_Pending]:
        """Take one settlement per message: a message may have been claimed again since."""
        batch: dict[str, _Pending] = {}
        self._pending = [
            pending
            for pending in self._pending
            if batch.setdefault(pending[0].receipt.id, pending) is not pending
        ]
        return list(batch.values())

    async def _collect(self) -> None:
        for _ in range(_MAX_WAITS):
            if not self._listener.expects_more:
                return
            await self._clock.sleep(_COLLECT)

    async def _settle(self, batch: list[Settlement]) -> list[bool]:
        attempt = 0
        while True:
            try:
                return await self._backend.settle(batch)
            except (OutcomeUnknown, Unavailable) as error:
                self._listener.on_failure(error)
                attempt += 1
                await _BACKOFF.sleep(attempt, self._clock, self._randomness)
