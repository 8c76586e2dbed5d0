"""The messages that a worker has claimed, and whether each is still its own.

Promises: a claim counts as this worker's from the first send of its last renewal, for the
visibility less a margin, and only while the session that it hangs on trusts itself. What
cannot be renewed in time is lost here before it lapses in the store. Only what is in hand is
renewed. What is being settled is neither renewed nor lost: the store's answer decides.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec

from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import Wakeup
from jobsync.core.clock import Clock, Mono
from jobsync.core.messages import HandlerVerdict
from jobsync.database.document import Document
from jobsync.errors import Unavailable
from jobsync.queue.backend import Message, QueueBackend
from jobsync.queue.context import Context
from jobsync.stores.contract import Record

__all__ = ["Delivery", "InFlight", "Quarantine"]


_SHORTEST_REST = 0.01
_SHORTEST_MARGIN = 0.05


class Delivery(msgspec.Struct, eq=False):
    """A message in hand."""

    id: str
    message: Message
    document: Document
    """The message as its handler reads it: `task.type` and `task["type"]`."""
    session: str
    sent: Mono
    """When its claim, or its last renewal, was first sent."""
    begun: Mono | None = None
    """When its handler began, if it has."""
    timeout: float | None = None
    """Seconds that its handler has; None if there is no end."""
    took: float = 0.0
    """Seconds that its handler took, until it was settled."""
    context: Context | None = None
    """What its handler was given, if it wants it."""
    task: asyncio.Task[None] | None = None
    """Where its handler runs, while it does. It may run others before and after."""
    is_late: bool = False
    """Whether its handler has had its time."""
    is_lost: bool = False
    is_settling: bool = False
    """Whether its settlement is on its way."""
    outcome: HandlerVerdict | None = None
    """How its handler ended, while its settlement is on its way."""
    delay: float = 0.0
    """Seconds before its next delivery, then."""
    answered: asyncio.Future[bool] | None = None
    """Who waits for the store's answer."""


class InFlight:
    """Claims of one worker.

    Args:
        port: where the messages are.
        membership: the session that claims hang on.
        clock: this machine's.
        visibility: seconds for which a claim holds in the store unless it is renewed.
        lost: told of a claim that is lost, and why.
        failed: told that the store did not answer.
    """

    def __init__(
        self,
        port: QueueBackend,
        membership: Membership,
        clock: Clock,
        visibility: float,
        lost: Callable[[Delivery, str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._port = port
        self._membership = membership
        self._clock = clock
        self._visibility = visibility
        self._lease = visibility - max(visibility / 10, _SHORTEST_MARGIN)
        self._lost = lost
        self._failed = failed
        self._held: dict[str, Delivery] = {}
        self._alarm = Wakeup(clock, _SHORTEST_REST)
        self._watches_at: Mono | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._held.values())

    def find(self, message: Message) -> Delivery | None:
        """Give a claim, unless it is lost, being settled, or another's."""
        held = self._held.get(message.receipt.id)
        if held is None or held.message is not message or held.is_lost or held.is_settling:
            return None
        return held

    def take(self, message: Message, session: str, sent: Mono) -> Delivery:
        """Hold a message that was claimed by a request that was sent then.

        Raises:
            Corrupt: it is no document.
        """
        name = message.receipt.id
        held = self._held[name] = Delivery(name, message, _document_of(message), session, sent)
        if self._watches_at is None or sent + self._lease < self._watches_at:
            self._alarm.set()
        return held

    def drop(self, held: Delivery) -> None:
        """Hold a message no more."""
        if self._held.get(held.id) is held:
            del self._held[held.id]

    def check(self, held: Delivery) -> bool:
        """Say whether a claim is surely this worker's; if not, it is lost."""
        if not (held.is_lost or held.is_settling):
            session = self._membership.session
            if not session.trusted or session.incarnation != held.session:
                self.lose(held, "the session of this worker is in doubt")
            elif self._clock.mono() - held.sent >= self._lease:
                self.lose(held, "its claim could not be renewed in time")
        return not held.is_lost

    def lose(self, held: Delivery, reason: str) -> None:
        """Take it that a claim has ended: nothing that its handler does counts any more."""
        if held.is_lost:
            return
        held.is_lost = True
        if held.context is not None:
            held.context.lost = True
        self.drop(held)
        self._lost(held, reason)

    async def extend(self, message: Message, seconds: float) -> bool:
        """Let a claim hold on; say whether it does."""
        held = self.find(message)
        if held is None:
            return False
        await self._extend([held], seconds)
        return not held.is_lost

    async def watch_for_ever(self) -> None:
        """Lose what was not renewed in time, also while an answer is awaited."""
        while True:
            self._watches_at = self._find_end()
            await self._alarm.wait(self._watches_at or self._clock.mono() + self._visibility)
            self._check_all()

    async def renew_for_ever(self) -> None:
        """Renew what is in hand."""
        while True:
            await self._clock.sleep(max(_SHORTEST_REST, self._visibility / 6))
            await self._renew()

    async def _renew(self) -> None:
        mine = self._check_all()
        now, age = self._clock.mono(), self._visibility / 3
        due = [held for held in mine if now - held.sent >= age and not held.is_settling]
        if due:
            try:
                await self._extend(due, self._visibility)
            except Unavailable as error:
                self._failed(error)

    def _check_all(self) -> list[Delivery]:
        """Lose what is not surely this worker's; give the rest."""
        return [held for held in list(self) if self.check(held)]

    async def _extend(self, due: Sequence[Delivery], seconds: float) -> None:
        # Who asks for less than the visibility has as much less; for more, no more is believed.
        sent = self._clock.mono() + min(0.0, seconds - self._visibility)
        answers = await self._port.extend([held.message.receipt for held in due], seconds)
        for held, extended in zip(due, answers, strict=True):
            if extended:
                held.sent = max(held.sent, sent)
            elif not held.is_settling and self._held.get(held.id) is held:
                self.lose(held, "its claim has ended")

    def _find_end(self) -> Mono | None:
        """Give the moment at which a claim may be lost; None if there is none to lose."""
        now = self._clock.mono()
        ends = [held.sent + self._lease - now for held in self if not held.is_settling]
        if not ends:
            return None
        return now + max(_SHORTEST_REST, min(self._membership.trust_left, *ends))


def _document_of(message: Message) -> Document:
    receipt = message.receipt
    return Document(
        Record(
            key=f"message/{receipt.id}",
            value=message.value,
            version=receipt.claim,
            seq=receipt.deliveries,
            epoch=0,
            format=1,
            trail=receipt.claim,
        )
    )


# When a worker takes a suspect, and what else it does meanwhile.
#
# A message whose worker died is a suspect: it may have killed it. A worker has one suspect at a
# time, takes it when nothing else is in hand, and claims nothing else while it runs, so that a
# death is nobody's fault but its own.
#
# Neither lasts for ever, or one long handler would hold up all the others: after `patience`
# seconds a suspect is taken in company, and others are claimed beside it. If the worker dies
# then, the suspect is charged all the same and the others are spared. Pure, but for the clock.


class Quarantine:
    """One worker's dealings with suspects.

    Args:
        clock: this machine's.
        patience: seconds to wait for a suspect's turn, and to leave it alone then.
    """

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._held: Delivery | None = None
        self._until: Mono | None = None
        """Until when others wait: for the suspect's turn, or for its end."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is a suspect to take, as soon as it may be."""
        return self._held is None and self._until is not None

    def notice(self) -> None:
        """Take note that there are suspects."""
        if self._held is None and self._until is None:
            self._until = self._clock.mono() + self._patience

    def take(self, held: Delivery | None) -> None:
        """Take note that a suspect was claimed, or that there was none left."""
        self._held = held
        self._until = None if held is None else self._clock.mono() + self._patience

    def release(self, held: Delivery) -> None:
        """Take note that a message is done with."""
        if self._held is held:
            self.take(None)

    def wait(self, *, is_free: bool) -> float:
        """Give the seconds for which nothing may be claimed, unless something changes.

        Args:
            is_free: whether the worker has nothing in hand.
        """
        if self._until is None or is_free:
            return 0.0
        left = self._until - self._clock.mono()
        if left <= 0 and self._held is not None:
            # It has killed nobody so far: the next suspect may have its turn.
            self.take(None)
        return max(0.0, left)
