"""Settlements on their way to the store, as many in a batch as have gathered meanwhile.

A settlement is sent until the store has answered, or until its claim is lost: then the
answer is False.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from jobsync.components import Components
from jobsync.core.backoff import longest_pause
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.port import QueuePort, Settlement

__all__ = ["Outbox"]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class _Parcel(NamedTuple):
    settlement: Settlement
    is_lost: Callable[[], bool]
    done: "asyncio.Future[bool]"


class Outbox:
    """Sends settlements, one batch at a time.

    Args:
        port: where to.
        components: the clock that pauses and the randomness that spreads.
        complain: told of every failure to reach the store.
    """

    def __init__(
        self, port: QueuePort, components: Components, complain: Callable[[Exception], None]
    ) -> None:
        self._port = port
        self._clock = components.clock
        self._randomness = components.randomness
        self._complain = complain
        self._parcels: list[_Parcel] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    async def send(self, settlement: Settlement, is_lost: Callable[[], bool]) -> bool:
        """Say whether the store took it."""
        if self._is_closed:
            return False
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._parcels.append(_Parcel(settlement, is_lost, done))
        self._filled.set()
        return await done

    async def run(self) -> None:
        """Send whatever comes, until cancelled; whoever still waits then hears False."""
        batch: list[_Parcel] = []
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                batch, self._parcels = self._parcels, []
                await self._deliver(batch)
        finally:
            self._is_closed = True
            for parcel in (*batch, *self._parcels):
                _answer(parcel, taken=False)

    async def _deliver(self, batch: list[_Parcel]) -> None:
        attempt = 0
        while batch:
            try:
                answers = await self._port.settle([each.settlement for each in batch])
            except (OutcomeUnknown, Unavailable) as error:
                self._complain(error)
                attempt += 1
                longest = longest_pause(attempt, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
                await self._clock.sleep(self._randomness.uniform(0, longest))
                batch = _keep(batch)
            else:
                for parcel, taken in zip(batch, answers, strict=True):
                    _answer(parcel, taken=taken)
                return


def _keep(batch: list[_Parcel]) -> list[_Parcel]:
    """Give up on what is lost, and on what nobody waits for any more."""
    kept = []
    for parcel in batch:
        if parcel.is_lost():
            _answer(parcel, taken=False)
        elif not parcel.done.done():
            kept.append(parcel)
    return kept


def _answer(parcel: _Parcel, *, taken: bool) -> None:
    if not parcel.done.done():
        parcel.done.set_result(taken)
