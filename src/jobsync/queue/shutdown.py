"""How a worker ends: what it has claimed is finished or returned, within a limited time.

Messages that have not started are returned at once. Handlers may finish until `grace` is over. Then
coroutines are cancelled, plain functions see `context.lost`, and what does not end even then is
left behind. Some time is reserved for the last settlements.
"""

import asyncio
from collections.abc import Callable, Sized

from jobsync.core.clock import Clock, Mono, Seconds
from jobsync.queue.completer import Completer
from jobsync.queue.handler_slots import HandlerSlots
from jobsync.queue.in_flight import InFlight
from jobsync.queue.settings import QueueSettings
from jobsync.user_code import UserTasks

__all__ = ["CALLBACK_TIME", "LAST_MOMENTS", "Shutdown", "wait_for_change"]

CALLBACK_TIME = 0.2
"""Seconds in which a cancelled callback must end."""
LAST_MOMENTS = 0.9
"""Seconds after a shutdown's own time for user code and the store to react."""
_RETURN_TIME = 5.0
"""Seconds of a limited shutdown for the last settlements and the end of the session."""
_SHORTEST_WAIT = 0.02


class Shutdown:
    """The end of one worker.

    Args:
        settings: how many seconds handlers have to finish, and how often to look.
        clock: this machine's clock.
        slots: the handlers.
        in_flight: the claims.
        completer: sends the last settlements.
        callbacks: the user's callbacks of finished messages.
        changed: set whenever something has ended.
    """

    def __init__(
        self,
        settings: QueueSettings,
        clock: Clock,
        slots: HandlerSlots,
        in_flight: InFlight,
        completer: Completer,
        callbacks: UserTasks,
        changed: asyncio.Event,
    ) -> None:
        self._grace = settings.grace
        self._interval = settings.poll_interval
        self._clock = clock
        self._slots = slots
        self._in_flight = in_flight
        self._completer = completer
        self._callbacks = callbacks
        self._changed = changed
        self._finish_by: Mono | None = None
        """Until when handlers may finish; for ever, unless the worker is told to stop."""
        self._end_by: Mono | None = None
        """When everything must have ended."""

    def limit(self, within: Seconds | None) -> None:
        """End in time; a later call may shorten that.

        Args:
            within: seconds that the caller can wait. Handlers have most of them to finish, but
                not more than `grace`.
        """
        grace, reserve = self._grace, 0.0
        if within is not None:
            reserve = min(max(0.0, within) / 4, _RETURN_TIME)
            grace = min(grace, max(0.0, within - reserve))
        finish_by = self._clock.mono() + grace
        if self._finish_by is None or finish_by < self._finish_by:
            self._finish_by = finish_by
            self._end_by = finish_by + reserve + LAST_MOMENTS

    async def run(self) -> None:
        """Return messages that have not started; let the others finish for a while."""
        self._slots.return_ready()
        await self._finish_handlers()
        end_by = self._end_by or self._clock.mono() + self._grace
        try:
            async with asyncio.timeout(end_by - self._clock.mono()):
                await self._completer.flush()
        except TimeoutError:
            for delivery in list(self._in_flight):
                self._in_flight.lose(delivery, "it could not be returned in time")
        await self._wait_while(lambda: self._callbacks, lambda: self._finish_by)
        await self._callbacks.cancel(CALLBACK_TIME)

    async def _finish_handlers(self) -> None:
        slots = self._slots
        slots.cancel_overrun()
        await self._wait_while(slots.list_useful, lambda: self._finish_by)
        slots.interrupt()
        now = self._clock.mono()
        half = now + ((self._end_by or now) - now) / 2
        await self._wait_while(slots.list_useful, lambda: half)
        for delivery in slots.list_useful():
            self._in_flight.lose(delivery, "its handler did not end in time")
            if delivery.task is not None:
                delivery.task.cancel()

    async def _wait_while(
        self, list_busy: Callable[[], Sized], until: Callable[[], Mono | None]
    ) -> None:
        """Wait until nothing is busy, or until a moment, which `limit` may set meanwhile."""
        while list_busy():
            self._changed.clear()
            end = until()
            left = self._interval if end is None else end - self._clock.mono()
            if left <= 0:
                return
            await wait_for_change(self._changed, left)


async def wait_for_change(changed: asyncio.Event, seconds: Seconds) -> None:
    """Wait until something has changed, for a limited time."""
    try:
        async with asyncio.timeout(max(seconds, _SHORTEST_WAIT)):
            await changed.wait()
    except TimeoutError:
        pass
