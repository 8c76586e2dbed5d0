"""Claims for programs that own their loop: they ask for messages, and settle them one by one.

    for message in await queue.claim(10, wait=20):
        await message.ack(handle(message.data))

A claim is renewed in the background while its object is held, and is lost as a worker's is: when
the session of this process is in doubt, when it could not be renewed in time, or when somebody has
ended it. What is not settled when the plugin stops is returned, without an attempt. A message whose
object is dropped unsettled has failed an attempt: nobody else could settle it.
"""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Seconds
from jobsync.core.codec import Json
from jobsync.core.messages import Completed, Failed, Returned
from jobsync.core.retry import Retries
from jobsync.database.document import RecordT
from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.errors import Unavailable
from jobsync.queue.backend import EndedClaim, QueueBackend
from jobsync.queue.claim_holder import ClaimHolder
from jobsync.queue.in_flight import Delivery, MessageReader
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings
from jobsync.queue.shutdown import CALLBACK_TIME
from jobsync.safe_text import safe_str

__all__ = ["ClaimedMessage", "PulledClaims"]

_Claimed: TypeAlias = tuple[list[Delivery], Seconds]
"""What was claimed, and the seconds after which to try again."""

_DROPPED = "its claim was dropped: neither ack() nor nack() was called"
_SHORTEST_WAIT: Seconds = 0.02
_PAUSE_CHECK: Seconds = 0.25
"""Between two looks whether this process is still paused."""
_DISTRUST_WAIT: Seconds = 0.25
_RETURN_TIME: Seconds = 5.0
"""Seconds for the last settlements of a process that stops."""


@on_home_loop
class ClaimedMessage(Generic[RecordT]):
    """A message that this program has claimed with `QueuePlugin.claim`.

    Attributes:
        id: the message's id.
        data: the message, as a handler reads it: a document, or of the queue's `payload`.
        attempt: the number of this attempt, counted from 1.
        max_attempts: how many attempts there are.
        epoch: grows with every delivery of this message.
        home_loop: the event loop of its database.
    """

    def __init__(self, delivery: Delivery, owner: "PulledClaims") -> None:
        message = delivery.message
        self.id = message.id
        self.data: RecordT = delivery.data
        self.attempt = message.attempt
        self.max_attempts = message.max_attempts
        self.epoch = message.receipt.deliveries
        self.home_loop = owner.home_loop
        self._delivery = delivery
        self._owner = owner

    def __repr__(self) -> str:
        return f"ClaimedMessage(id={self.id!r}, attempt={self.attempt}, lost={self.lost})"

    @property
    def lost(self) -> bool:
        """Whether the claim has ended, or may have. Stop: nothing counts any more."""
        return self._delivery.is_lost

    async def ack(self, result: Json = None) -> bool:
        """Complete the message, and keep the result; False means that the claim had ended."""
        return await self._owner.settle(self._delivery.message, Completed(result))

    async def nack(self, error: object = "not acknowledged") -> bool:
        """Fail this attempt; False means that the claim had ended."""
        return await self._owner.settle(self._delivery.message, Failed(safe_str(error)))

    async def extend(self, seconds: float) -> bool:
        """Extend the claim to this many seconds from now; False means that it has ended.

        Not needed to keep it: claims are renewed in the background.
        """
        return await self._owner.extend(self._delivery.message, seconds)

    def progress(self, progress: float, note: str = "") -> None:
        """Report how far the work is, from 0 to 1, as `context.progress` does."""
        self._owner.report_progress(self._delivery.message, progress, note)


class PulledClaims(ClaimHolder):
    """The claims of this process that its program has asked for.

    Args:
        backend: where the messages are stored.
        membership: the session that holds the claims.
        settings: timeouts and intervals.
        retries: the delays of failed messages.
        components: time and randomness.
        reporter: is told what happens.
        home_loop: the event loop of the database.
        read: returns a message as a handler reads it.
        is_paused: returns whether this process claims nothing now.
    """

    expects_more = False
    is_stopping = False

    def __init__(
        self,
        backend: QueueBackend,
        membership: Membership,
        settings: QueueSettings,
        retries: Retries,
        components: Components,
        reporter: QueueReporter,
        home_loop: HomeLoop,
        read: MessageReader,
        *,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(backend, membership, settings, retries, components, reporter, read)
        self.home_loop = home_loop
        self._is_paused = is_paused
        self._stopping = asyncio.Event()
        self._claiming: set[asyncio.Future[_Claimed]] = set()
        """The requests that are under way, also those whose callers were cancelled."""
        self._has_returned = False
        """Whether nothing is settled any more."""
        self._return_time = min(settings.grace, _RETURN_TIME)

    async def claim(self, limit: int, wait: Seconds) -> list[ClaimedMessage[Any]]:
        """Claim messages; if there are none, wait for some.

        Raises:
            Unavailable: the store does not answer; nothing was claimed.
        """
        end = self._clock.mono() + wait
        while not self.is_stopping:
            if self._is_paused():
                left = max(0.0, end - self._clock.mono())
                await self._clock.sleep(min(left, _PAUSE_CHECK))
                if not left:
                    return []
                continue
            claiming = asyncio.ensure_future(self._try_to_claim(limit))
            self._claiming.add(claiming)
            claiming.add_done_callback(self._claiming.discard)
            try:
                deliveries, pause = await asyncio.shield(claiming)
            except asyncio.CancelledError:
                claiming.add_done_callback(self._return_unwanted)
                raise
            if self._stopping.is_set():
                # They are returned by the stop, unless that has taken too long.
                if self._has_returned:
                    self._lose_all()
                return []
            left = end - self._clock.mono()
            if deliveries or left <= 0:
                return [self._wrap(delivery) for delivery in deliveries]
            await self._wait(min(left, pause))
        # A program that asks again at once must not keep others from running.
        await asyncio.sleep(0)
        return []

    def _return_unwanted(self, claiming: "asyncio.Future[_Claimed]") -> None:
        """Return what was claimed for a caller that was cancelled meanwhile."""
        if claiming.cancelled() or isinstance(claiming.exception(), Unavailable):
            return
        if self._has_returned:
            self._lose_all()
            return
        for delivery in claiming.result()[0]:
            self.conclude(delivery, Returned())

    async def _try_to_claim(self, limit: int) -> _Claimed:
        """Return what was claimed, and the seconds after which to try again."""
        if not self._membership.is_trusted:
            return [], _DISTRUST_WAIT
        pause = self._quarantine.wait(is_free=not self._in_flight)
        if pause > 0:
            return [], pause
        if self._quarantine.is_wanted:
            alone = await self._claim(1, suspects=True)
            if alone.deliveries:
                return alone.deliveries, 0.0
        claimed = await self._claim(limit, suspects=False)
        if self._quarantine.is_wanted and not claimed.deliveries:
            return [], 0.0
        next_change = claimed.result.next
        interval = self._settings.poll_interval
        pause = interval if next_change is None else min(interval, max(next_change, 0.0))
        return claimed.deliveries, pause

    async def _wait(self, seconds: Seconds) -> None:
        """Wait for messages; return early if there may be some, or if this stops."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        news = asyncio.ensure_future(self.backend.wait(max(seconds, _SHORTEST_WAIT)))
        try:
            await asyncio.wait([stopping, news], return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                news.result()
        finally:
            stopping.cancel()
            news.cancel()

    def _wrap(self, delivery: Delivery) -> ClaimedMessage[Any]:
        message: ClaimedMessage[Any] = ClaimedMessage(delivery, self)
        loop = asyncio.get_running_loop()
        # Objects are dropped on any thread.
        weakref.finalize(message, _call_on_loop, loop, self, delivery).atexit = False
        return message

    def drop(self, delivery: Delivery) -> None:
        """Fail the attempt of a message whose object is gone, unless it is settled."""
        self.conclude(delivery, Failed(_DROPPED))

    async def _end_lapsed(self) -> list[EndedClaim]:
        """End the claims of others that have lapsed, if the store answers.

        Otherwise the next claim does. What was claimed before belongs to the caller: raised here,
        an error would leave it in flight without anybody who settles it.
        """
        try:
            return await super()._end_lapsed()
        except Unavailable as error:
            self.on_failure(error)
            return []

    def on_claimed(self, deliveries: list[Delivery]) -> None:
        """Do nothing: the caller gets them."""

    def on_lost(self, delivery: Delivery, reason: str) -> None:
        """Report a claim that is lost."""
        self._reporter.on_lost(delivery.message, reason)
        self._quarantine.release(delivery)
        self._changed.set()

    def on_answer(self, delivery: Delivery | None, *, is_accepted: bool) -> None:
        """Report a settlement that the store has answered."""
        super().on_answer(delivery, is_accepted=is_accepted)
        if delivery is not None:
            self._quarantine.release(delivery)

    async def run(self) -> None:
        """Keep the claims until `stop`; then return those that are not settled."""
        parts = (
            self._in_flight.renew,
            self._in_flight.watch,
            self._completer.run,
            self._reaper.run,
            self._callbacks.watch,
        )
        try:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(part()) for part in parts]
                await self._stopping.wait()
                await self._return_all()
                for loop in loops:
                    loop.cancel()
        finally:
            self.is_stopping = self._has_returned = True
            self._lose_all()
            self.ended.set()

    def stop(self, within: Seconds | None) -> None:
        """Claim no more, return what is not settled, and end.

        Args:
            within: seconds that the caller can wait.
        """
        if within is not None:
            self._return_time = min(self._return_time, max(0.0, within))
        self.is_stopping = True
        self._stopping.set()

    async def _return_all(self) -> None:
        returned: list[Delivery] = []
        try:
            async with asyncio.timeout(self._return_time):
                await self._return_now(returned)
                if self._claiming:
                    await asyncio.wait(self._claiming)
                await self._return_now(returned)
        except TimeoutError:
            for delivery in list(self._in_flight):
                self._in_flight.lose(delivery, "it could not be returned in time")
        self._has_returned = True
        for delivery in returned:
            # Its holder has it no more.
            delivery.is_lost = True
        await self._callbacks.cancel(CALLBACK_TIME)

    async def _return_now(self, returned: list[Delivery]) -> None:
        """Return what is in flight, add it to a list, and wait for the answer."""
        in_flight = list(self._in_flight)
        returned += in_flight
        for delivery in in_flight:
            self.conclude(delivery, Returned())
        await self._completer.flush()

    def _lose_all(self) -> None:
        """Lose what was claimed, and is not returned any more."""
        for delivery in list(self._in_flight):
            self._in_flight.lose(delivery, "its process has stopped")


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, claims: PulledClaims, delivery: Delivery
) -> None:
    try:
        loop.call_soon_threadsafe(claims.drop, delivery)
    except RuntimeError:
        # The loop is closed: its process ends, and the claim with its session.
        return
