"""What holds claims of a queue: claims messages, keeps the claims, and settles them.

A `Worker` handles what it claims; `pull.PulledClaims` passes it to the program that asked for it.
Both renew and lose their claims as `in_flight` says, and settle by a `completer`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.messages import (
    CANCELLED,
    Cancel,
    Completed,
    Failed,
    HandlerVerdict,
    Returned,
    Transition,
    decide,
)
from jobsync.core.retry import Retries
from jobsync.errors import Corrupt, Unavailable
from jobsync.queue.backend import ClaimResult, EndedClaim, Message, QueueBackend, Settlement
from jobsync.queue.completer import Completer
from jobsync.queue.handler_slots import running_delivery
from jobsync.queue.in_flight import Delivery, InFlight, MessageReader, read_document
from jobsync.queue.reaper import Quarantine, Reaper
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.results import build_result
from jobsync.queue.settings import QueueSettings
from jobsync.queue.transaction import TransactionOpener, check_no_transaction
from jobsync.safe_text import safe_str
from jobsync.user_code import UserTasks

__all__ = ["ClaimHolder", "ClaimedBatch"]

_GATHER = 2.0
"""Seconds for which settlements are gathered at most where requests are billed."""
_LAPSED_WAIT = 1.0
"""Seconds until the next look at lapsed claims, if nothing could be ended."""
_DEFAULT_RETRIES = Retries()


class ClaimedBatch(NamedTuple):
    """What a claim returned, and the messages that are in flight since."""

    result: ClaimResult
    deliveries: list[Delivery]


class ClaimHolder(ABC):
    """Holds claims of a queue.

    Args:
        backend: where the messages are stored.
        membership: the session that holds the claims.
        settings: timeouts and intervals.
        retries: the delays of failed messages.
        components: time and randomness.
        reporter: is told what happens.
        read: returns a message as its handler reads it.
    """

    def __init__(
        self,
        backend: QueueBackend,
        membership: Membership,
        settings: QueueSettings,
        retries: Retries,
        components: Components,
        reporter: QueueReporter,
        read: MessageReader = read_document,
    ) -> None:
        self.handled = 0
        """How many messages were handled, successfully or not."""
        self.ended = asyncio.Event()
        self.backend = backend
        self._membership = membership
        self._settings = settings
        self._retries = retries
        self._clock = components.clock
        self._randomness = components.randomness
        self._reporter = reporter
        self._visibility = settings.visibility_timeout
        self._changed = asyncio.Event()
        self._in_flight = InFlight(backend, membership, self._clock, self._visibility, self, read)
        self.open_transaction = TransactionOpener(backend, self._in_flight, components, self).open
        gather = min(_GATHER, self._visibility / 6) if backend.is_billed else 0.0
        self._completer = Completer(backend, components, self, gather=gather)
        self._reaper = Reaper(backend, membership, self._clock, self)
        self._quarantine = Quarantine(self._clock, self._visibility / 3)
        self._callbacks = UserTasks(self._changed.set)
        self._called_back: dict[Delivery, None] = {}
        """Messages whose callbacks run."""
        self._unanswered_since: Mono | None = None
        """When the first claim was sent that is unanswered."""

    @property
    @abstractmethod
    def expects_more(self) -> bool:
        """Whether more settlements are expected in a moment."""

    @abstractmethod
    def on_claimed(self, deliveries: list[Delivery]) -> None:
        """Messages are in flight."""

    @abstractmethod
    def on_lost(self, delivery: Delivery, reason: str) -> None:
        """A claim is lost."""

    def on_released(self, delivery: Delivery) -> None:
        """End its time alone, if it ran alone: others may run beside the next one."""
        self._quarantine.release(delivery)

    def look_for_late_claims(self) -> None:
        """Check the claims of dead workers again in an interval."""
        self._reaper.look_again()

    async def confirm(self, name: str) -> None:
        """Find out whether the claim of a message still stands; lose it if it does not."""
        try:
            await self._in_flight.confirm(name)
        except Unavailable:
            # The next renewal asks again.
            return

    async def settle(self, message: Message, verdict: HandlerVerdict) -> bool:
        """End a claim; return whether the store accepted it."""
        delivery = self._in_flight.find(message)
        if delivery is None:
            return False
        check_no_transaction(delivery)
        delivery.answer = asyncio.get_running_loop().create_future()
        self._submit(delivery, verdict)
        return await asyncio.shield(delivery.answer)

    async def extend(self, message: Message, seconds: float) -> bool:
        """Extend a claim; return whether it stands."""
        return await self._in_flight.extend(message, seconds)

    def report_progress(self, message: Message, progress: float, note: str) -> None:
        """Report how far a handler is."""
        self._reporter.on_progress(message, progress, note)

    async def _claim(
        self, limit: int, *, suspects: bool, at_most: int | None = None
    ) -> ClaimedBatch:
        """Claim messages; end claims of others that have lapsed."""
        sent, session = self._clock.mono(), self._membership.incarnation
        self._unanswered_since = self._unanswered_since or sent
        claimed = await self.backend.claim(
            limit,
            session=session,
            visibility=self._visibility,
            suspects=suspects,
            tasks=self._find_tasks(),
            at_most=at_most,
        )
        self._unanswered_since = None
        deliveries = self._accept(claimed.messages, session, sent)
        if suspects:
            self._quarantine.start(deliveries[0] if deliveries else None)
        elif claimed.suspects:
            self._quarantine.notice()
        self.on_claimed(deliveries)
        self._reaper.is_quiet = claimed.lapse is None and not claimed.messages
        if claimed.lapse is not None and claimed.lapse <= 0:
            if ended := await self._end_lapsed():
                self.on_ended(ended)
                claimed = self._note_ended(claimed)
            else:
                # Others have ended them, or somebody has written a row whose claims have no end.
                claimed = msgspec.structs.replace(claimed, lapse=_LAPSED_WAIT)
        return ClaimedBatch(claimed, deliveries)

    def _find_tasks(self) -> frozenset[str] | None:
        """Return the tasks whose messages are claimed; None for messages without one."""
        return None

    def _find_retries(self, message: Message) -> Retries:
        """Return the pauses after failures of a message."""
        del message
        return self._retries

    async def _end_lapsed(self) -> list[EndedClaim]:
        """End the claims of others that have lapsed.

        Raises:
            Unavailable: the store does not answer.
        """
        keep = [delivery.id for delivery in self._in_flight]
        return await self.backend.end_claims(keep=keep)

    def _note_ended(self, claimed: ClaimResult) -> ClaimResult:
        """Return the result of a claim after which lapsed claims were ended."""
        return claimed

    def _accept(self, messages: Iterable[Message], session: str, sent: Mono) -> list[Delivery]:
        """Add messages to those in flight; bury those that no handler can read."""
        deliveries = []
        for message in messages:
            try:
                deliveries.append(self._in_flight.add(message, session, sent))
            except Corrupt as corrupt:
                self._reporter.on_failure(corrupt, message.id)
                bury = Settlement(receipt=message.receipt, move="bury", error=str(corrupt))
                self._completer.submit(bury, None)
        return deliveries

    def conclude(
        self, delivery: Delivery, verdict: HandlerVerdict, ended: Mono | None = None
    ) -> None:
        """Settle a message, unless its handler has done so or it is lost."""
        if self._in_flight.find(delivery.message) is delivery:
            self._submit(delivery, verdict, ended)
        elif delivery.transaction is not None:
            delivery.deferred = verdict

    def _submit(
        self, delivery: Delivery, verdict: HandlerVerdict, ended: Mono | None = None
    ) -> None:
        delivery.verdict, delivery.is_settling = verdict, True
        started, receipt = delivery.started, delivery.message.receipt
        if started is not None:
            delivery.duration = (ended or self._clock.mono()) - started
        if isinstance(verdict, Completed):
            settlement = Settlement(receipt=receipt, move="complete")
            if verdict.result is not None:
                settlement = self._add_result(settlement, delivery.message, verdict.result)
        else:
            move, delivery.delay = self._decide(delivery.message, verdict)
            error = _describe_end(verdict)
            settlement = Settlement(receipt=receipt, move=move, delay=delivery.delay, error=error)
        self._completer.submit(settlement, delivery)

    def _add_result(self, settlement: Settlement, message: Message, value: Json) -> Settlement:
        """Return a settlement with what the handler returned, or why that is not kept."""
        result = build_result(value, self.backend.max_result, self.backend.max_depth)
        if result.problem:
            self._reporter.on_result_dropped(message, result.problem)
        return msgspec.structs.replace(settlement, result=result)

    def _decide(self, message: Message, verdict: HandlerVerdict) -> tuple[Transition, float]:
        if not isinstance(verdict, Failed):
            return _decide(message, verdict, _DEFAULT_RETRIES, 0.0)
        draw = self._randomness.uniform(0, 1)
        try:
            return _decide(message, verdict, self._find_retries(message), draw)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's backoff may raise anything
            self._reporter.on_failure(error, message.id)
            return _decide(message, verdict, _DEFAULT_RETRIES, draw)

    @property
    def queue(self) -> str:
        """The stored name of the queue."""
        return self._reporter.queue

    def list_open_claims(self) -> set[str]:
        """Return the claims with messages whose settlements were not submitted."""
        return {
            delivery.message.receipt.claim
            for delivery in self._in_flight
            if not delivery.is_settling
        }

    def on_answer(self, delivery: Delivery | None, *, is_accepted: bool) -> None:
        """Report a settlement that the store has answered; start the user's callback."""
        if delivery is not None and delivery.verdict is not None:
            # Not kept: an error refers to the frames that it has passed, and those to this.
            verdict, delivery.verdict = delivery.verdict, None
            if is_accepted:
                self._in_flight.remove(delivery)
                self.handled += not isinstance(verdict, Returned)
                callback = self._reporter.on_settled(delivery, verdict, delivery.delay)
                if callback is not None:
                    self._callbacks.start(self._call_back(delivery, callback))
            else:
                self._in_flight.lose(delivery, "its claim had ended before it was settled")
            if delivery.answer is not None and not delivery.answer.done():
                delivery.answer.set_result(is_accepted)
        self._changed.set()

    async def _call_back(self, delivery: Delivery, callback: Coroutine[Any, Any, None]) -> None:
        """Run a callback of a message, which may stop this worker as a handler may."""
        running_delivery.set((self, delivery))
        self._called_back[delivery] = None
        try:
            await callback
        finally:
            del self._called_back[delivery]

    def on_rolled_back(self, delivery: Delivery) -> None:
        """Settle a message whose handler has ended meanwhile; otherwise its end does."""
        if delivery.deferred is not None:
            self.conclude(delivery, delivery.deferred)

    def on_failure(self, error: Exception) -> None:
        """Report that the store does not answer."""
        self._reporter.on_failure(error)

    def on_ended(self, ended: list[EndedClaim]) -> None:
        """Report claims of others that were ended: their messages can be claimed."""
        self._reporter.on_ended(ended)
        self._changed.set()


def _decide(
    message: Message, verdict: HandlerVerdict, retries: Retries, draw: float
) -> tuple[Transition, float]:
    return decide(
        verdict,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        retries=retries,
        draw=draw,
    )


def _describe_end(verdict: HandlerVerdict) -> str:
    """Return what is stored of a verdict for people: an error, or why a message was cancelled."""
    match verdict:
        case Failed(error):
            return error
        case Cancel(reason) if text := safe_str(reason):
            return f"{CANCELLED}: {text}"
    return ""
