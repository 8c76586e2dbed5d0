"""The messages that a worker has claimed and not settled.

Guarantees: a claim counts as this worker's from the time its last renewal was first sent, for the
visibility timeout minus a margin, and only while its session is trusted. A claim that cannot be
renewed in time is lost here before it lapses in the store. Only claims in flight are renewed. A
claim that is being settled is neither renewed nor lost: the store's answer decides.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import Wakeup
from jobsync.core.arguments import check_seconds
from jobsync.core.clock import Clock, Mono
from jobsync.core.messages import HandlerVerdict
from jobsync.database.document import Document
from jobsync.database.record_types import RecordType
from jobsync.errors import Unavailable
from jobsync.queue.backend import EndedClaim, Message, QueueBackend
from jobsync.queue.context import Context
from jobsync.queue.settings import QueueSettings
from jobsync.stores.contract import Record

if TYPE_CHECKING:
    from jobsync.queue.transaction import TransactionBlock

__all__ = [
    "Delivery",
    "InFlight",
    "MessageReader",
    "Prefetch",
    "WorkerListener",
    "build_reader",
    "read_document",
]

MessageReader: TypeAlias = Callable[[Message], Any]
"""Returns a message as its handler reads it, or raises `Corrupt`."""

_SHORTEST_WAIT = 0.01
_SHORTEST_MARGIN = 0.05
_PREFETCH = 10
_MAX_PREFETCH = 50
"""Messages per handler to claim in advance, and at most if they are little work."""
_LITTLE_WORK = 0.02
"""Seconds of work that count as little."""
_LATEST_WEIGHT = 0.2
"""Weight of the latest handler in the average duration."""
_INSTANT = 0.002


def read_document(message: Message) -> Document:
    """Return a message as a document: `task.type` and `task["type"]`.

    Raises:
        Corrupt: it is not one.
    """
    receipt, value = message.receipt, message.value
    if message.task:
        # It has the arguments of a task, one of which may be called `id`.
        arguments = value if isinstance(value, dict) else {"arguments": value}
        value = {**arguments, "id": receipt.id}
    return Document(
        Record(
            key=f"message/{receipt.id}",
            value=value,
            version=receipt.claim,
            seq=receipt.deliveries,
            epoch=0,
            format=1,
            trail=receipt.claim,
        )
    )


def build_reader(payload: RecordType[Any] | None) -> MessageReader:
    """Return what reads messages: as documents, or as objects of a type."""
    if payload is None:
        return read_document

    def read(message: Message) -> Any:
        return payload.read(f"message/{message.id}", read_document(message))

    return read


class Delivery(msgspec.Struct, eq=False):
    """A claimed message in a worker."""

    id: str
    message: Message
    read_data: Any
    """The message as its handler reads it; None if it has the arguments of a task."""
    session: str
    sent: Mono
    """When its claim, or its last renewal, was first sent."""
    started: Mono | None = None
    """When its handler started."""
    timeout: float | None = None
    """Seconds that its handler may take; None for no limit."""
    duration: float = 0.0
    """Seconds that its handler took until it was settled."""
    context: Context | None = None
    """The handler's context, if the handler accepts one."""
    task: asyncio.Task[None] | None = None
    """The task of its handler while it runs. The task may run other handlers before and after."""
    is_on_loop: bool = False
    """Whether its handler runs on the event loop, where it can be cancelled."""
    is_late: bool = False
    """Whether its handler exceeded its timeout."""
    is_interrupted: bool = False
    """Whether its handler was told to end, because the worker stops."""
    is_lost: bool = False
    is_settling: bool = False
    """Whether its settlement was submitted."""
    verdict: HandlerVerdict | None = None
    """How its handler ended, until the settlement is answered."""
    delay: float = 0.0
    """Seconds before its next delivery."""
    answer: asyncio.Future[bool] | None = None
    """Resolves to whether the store accepted the settlement, if somebody waits for it."""

    transaction: "TransactionBlock | None" = None
    """The transaction that its handler has open."""
    deferred: HandlerVerdict | None = None
    """How its handler has ended while its transaction was being committed: counts if that fails."""

    @property
    def data(self) -> Any:
        """The message as its handler reads it; that of a task as a document."""
        return read_document(self.message) if self.message.task else self.read_data

    def mark_context_lost(self) -> None:
        """Set `lost` in its context: nothing that its handler does counts any more."""
        if self.context is not None:
            self.context.lost = True


class WorkerListener(Protocol):
    """The worker, as its parts call it."""

    @property
    def expects_more(self) -> bool:
        """Whether more settlements are expected in a moment."""
        ...

    def list_open_claims(self) -> set[str]:
        """Return the claims with messages whose settlements were not submitted."""
        ...

    def on_lost(self, delivery: Delivery, reason: str) -> None:
        """A claim is lost."""
        ...

    def on_answer(self, delivery: Delivery | None, *, is_accepted: bool) -> None:
        """The store has answered a settlement; without a delivery, it was never in flight."""
        ...

    def on_rolled_back(self, delivery: Delivery) -> None:
        """The transaction of a message could not be committed."""
        ...

    def on_ended(self, ended: list[EndedClaim]) -> None:
        """The claims of others were ended."""
        ...

    def on_failure(self, error: Exception) -> None:
        """The store does not answer."""
        ...


class InFlight:
    """The claims of one worker.

    Args:
        backend: where the messages are stored.
        membership: the session that holds the claims.
        clock: this machine's clock.
        visibility: seconds after which a claim lapses in the store unless it is renewed.
        listener: the worker.
        read: returns a message as its handler reads it, or raises `Corrupt`.
    """

    def __init__(
        self,
        backend: QueueBackend,
        membership: Membership,
        clock: Clock,
        visibility: float,
        listener: WorkerListener,
        read: MessageReader = read_document,
    ) -> None:
        self._read = read
        self._backend = backend
        self._membership = membership
        self._clock = clock
        self._visibility = visibility
        self._lease = visibility - max(visibility / 10, _SHORTEST_MARGIN)
        self._listener = listener
        self._deliveries: dict[str, Delivery] = {}
        """The latest delivery of each message."""
        self._former: list[Delivery] = []
        """Deliveries that are being settled while their messages were claimed again."""
        self._wakeup = Wakeup(clock, _SHORTEST_WAIT)
        self._watched_since: Mono | None = None
        """Claims that were sent before this need an earlier check than the next one."""

    def __len__(self) -> int:
        return len(self._deliveries) + len(self._former)

    def __iter__(self) -> Iterator[Delivery]:
        return itertools.chain(self._deliveries.values(), self._former)

    def find(self, message: Message) -> Delivery | None:
        """Return the delivery of a message, unless it is lost, being settled, or a newer one."""
        delivery = self._deliveries.get(message.receipt.id)
        if delivery is None or delivery.message is not message:
            return None
        return None if delivery.is_lost or delivery.is_settling else delivery

    def add(self, message: Message, session: str, sent: Mono) -> Delivery:
        """Add a message that was claimed by a request sent at that time.

        Raises:
            Corrupt: no handler can read it.
        """
        name = message.receipt.id
        data = None if message.task else self._read(message)
        delivery = Delivery(name, message, data, session, sent)
        former = self._deliveries.get(name)
        if former is not None and former.is_settling:
            # The store has settled it, and its answer was lost or is late.
            self._former.append(former)
        elif former is not None:
            # Somebody has ended its claim, and no renewal has shown it yet.
            self.lose(former, "its message was claimed again")
        self._deliveries[name] = delivery
        if self._watched_since is None or sent < self._watched_since:
            self._wakeup.set()
        return delivery

    def remove(self, delivery: Delivery) -> None:
        """Remove a delivery, if it is here."""
        if self._deliveries.get(delivery.id) is delivery:
            del self._deliveries[delivery.id]
        elif self._former:
            self._former = [each for each in self._former if each is not delivery]

    def check(self, delivery: Delivery, now: Mono) -> bool:
        """Return whether a claim is certainly this worker's now; if it is not, lose it."""
        if not (delivery.is_lost or delivery.is_settling):
            session = self._membership.session
            if not session.is_trusted_at(now) or session.incarnation != delivery.session:
                self.lose(delivery, "the session of this worker is in doubt")
            elif now - delivery.sent >= self._lease:
                self.lose(delivery, "its claim could not be renewed in time")
        return not delivery.is_lost

    def lose(self, delivery: Delivery, reason: str) -> None:
        """Treat a claim as ended: nothing that its handler does counts from now on."""
        if delivery.is_lost:
            return
        delivery.is_lost = True
        delivery.mark_context_lost()
        if delivery.answer is not None and not delivery.answer.done():
            # Its handler waits for the store, which may not answer any more.
            delivery.answer.set_result(False)
        self.remove(delivery)
        self._listener.on_lost(delivery, reason)

    async def extend(self, message: Message, seconds: float) -> bool:
        """Extend a claim; return whether it stands.

        Raises:
            Invalid: the duration is not one.
        """
        check_seconds("seconds", seconds)
        delivery = self.find(message)
        if delivery is None:
            return False
        await self._extend([delivery], seconds)
        return not delivery.is_lost

    async def confirm(self, name: str) -> None:
        """Ask the store whether the claim of a message stands; lose it if it does not.

        Raises:
            Unavailable: the store does not answer.
        """
        delivery = self._deliveries.get(name)
        if delivery is not None and not (delivery.is_lost or delivery.is_settling):
            await self._extend([delivery], self._visibility)

    async def watch(self) -> None:
        """Lose claims that were not renewed in time, also while an answer is awaited."""
        while True:
            check_at = self._find_next_check()
            self._watched_since = None if check_at is None else check_at + -self._lease
            await self._wakeup.wait(check_at or self._clock.mono() + self._visibility)
            self._check_all()

    async def renew(self) -> None:
        """Renew the claims until cancelled."""
        while True:
            await self._clock.sleep(max(_SHORTEST_WAIT, self._visibility / 6))
            await self._renew_due()

    async def _renew_due(self) -> None:
        certain = self._check_all()
        now, age = self._clock.mono(), self._visibility / 3
        due = [item for item in certain if now - item.sent >= age and not item.is_settling]
        if due:
            try:
                await self._extend(due, self._visibility)
            except Unavailable as error:
                self._listener.on_failure(error)

    def _check_all(self) -> list[Delivery]:
        """Lose the claims that are not certainly this worker's; return the others."""
        now = self._clock.mono()
        return [delivery for delivery in list(self) if self.check(delivery, now)]

    async def _extend(self, due: Sequence[Delivery], seconds: float) -> None:
        # A shorter extension than the visibility timeout counts as sent earlier. A longer one
        # is trusted no longer than the visibility timeout.
        sent = self._clock.mono() + min(0.0, seconds - self._visibility)
        receipts = [delivery.message.receipt for delivery in due]
        answers = await self._backend.extend(receipts, seconds)
        for delivery, is_extended in zip(due, answers, strict=True):
            if is_extended:
                delivery.sent = max(delivery.sent, sent)
            elif not delivery.is_settling and self._deliveries.get(delivery.id) is delivery:
                self.lose(delivery, "its claim has ended")

    def _find_next_check(self) -> Mono | None:
        """Return when the next claim may be lost; None if there is none to lose."""
        now = self._clock.mono()
        ends = [item.sent + self._lease - now for item in self if not item.is_settling]
        if not ends:
            return None
        return now + max(_SHORTEST_WAIT, min(self._membership.trust_left, *ends))


class Prefetch:
    """How many messages to claim in advance, by the measured durations of handlers.

    At most a second of work, and half the visibility timeout.

    Args:
        settings: the concurrency, the visibility timeout and the configured limit.
        has_limits: returns whether a task has limits of its own now.
    """

    def __init__(
        self, settings: QueueSettings, has_limits: Callable[[], bool] = lambda: False
    ) -> None:
        self._settings = settings
        self._has_limits = has_limits
        self._is_limited = settings.limits.is_limited
        self._average = 0.0

    @property
    def is_instant(self) -> bool:
        """Whether handlers take no time."""
        return self._average < _INSTANT

    @property
    def limit(self) -> int:
        """How many messages to claim in advance now."""
        most, concurrency = self._settings.prefetch, self._settings.concurrency
        if self._is_limited or self._has_limits():
            # What is claimed in advance would use up what others may handle now.
            return 0
        if not self._average:
            return concurrency if most is None else min(most, concurrency)
        rate = concurrency / self._average
        if most is None:
            # For instant handlers the batch is the cost, and less per message if it is larger.
            little = min(_MAX_PREFETCH * concurrency, int(rate * _LITTLE_WORK))
            most = max(_PREFETCH * concurrency, little)
        return min(most, int(rate * min(1.0, self._settings.visibility_timeout / 2)))

    def find_most(self, most: int) -> int:
        """Return how many messages of a page to claim at most: half the visibility timeout."""
        if not self._average:
            return 0
        rate = self._settings.concurrency / self._average
        return min(most, int(rate * self._settings.visibility_timeout / 2))

    def measure(self, seconds: float) -> None:
        """Record how long a handler took."""
        known = self._average
        self._average = seconds if known == 0.0 else known + _LATEST_WEIGHT * (seconds - known)
