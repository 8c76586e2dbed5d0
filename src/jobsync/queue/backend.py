"""Where the messages of one queue are stored: a few batch methods that a store implements.

Guarantees of every backend:

- An acknowledged push is delivered at least once or is among the dead letters. A push is all
  or nothing; one with an unknown outcome raises `OutcomeUnknown`.
- A message has at most one live claim.
- A stale receipt cannot complete, extend or fail a message. A receipt is stale once the store
  says so: its claim was settled in another way, or it lapsed and was ended.
- Settling again in the same way changes nothing and is not an error, so a caller that lost a
  reply repeats the identical request.
- `deliveries` only grows. A message without attempts left is among the dead letters, with its
  payload and every error; of very many, the latest. When a worker dies, its messages in flight
  spend no attempt, except one that ran alone: see `core.messages`.
- A delayed message is not claimed before its time, by the store's clock.
- An unreadable message is moved to the dead letters unchanged, and reported. So is one whose
  counters or timeout are impossible. No row fails the claim of another.
- A message of newer code, by its format, is counted and shown, and otherwise left alone.
- While a queue is paused, no claim that starts after `pause` has returned gets a message.
  Messages in flight continue.

A claim ends when it is settled, when it was not extended within its visibility timeout (by the
store's clock), or when its session is dead. `end_claims` ends the last two kinds, and anyone may
call it. Until then the claim stands, even if it is late.

A backend inherits `QueueBackend` and passes the conformance suite. See also `single_message`.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from jobsync.core.messages import TRANSITIONS, MessageState, Transition
from jobsync.errors import Invalid
from jobsync.queue.message import (
    MESSAGE_FORMAT,
    PLAIN_FORMAT,
    Failure,
    Message,
    MessageInfo,
    NewMessage,
    Receipt,
)
from jobsync.queue.single_message import MessageOperations, StoredResult

if TYPE_CHECKING:
    from jobsync.queue.fleet import QueueFleet
    from jobsync.queue.transaction_backend import TransactionBackend

__all__ = [
    "DEFAULT_NAMESPACE",
    "MAX_MESSAGE",
    "MESSAGE_FORMAT",
    "PLAIN_FORMAT",
    "ClaimResult",
    "EndedClaim",
    "Failure",
    "Message",
    "MessageInfo",
    "NewMessage",
    "QueueBackend",
    "QueuePart",
    "Receipt",
    "SeenKeys",
    "Settlement",
    "name_queue",
    "show_queue",
]

DEFAULT_NAMESPACE = "default"
"""The namespace of plugins that have none of their own."""

MAX_MESSAGE = 256 * 1024
"""The largest encoded message, in bytes."""

_ENDINGS: tuple[Transition, ...] = ("complete", "cancel", "retry", "bury", "release", "snooze")

QueuePart: TypeAlias = Literal["queue", "dead"]
"""The messages of a queue that are not finished, or its dead letters."""


def name_queue(namespace: str, resource: str) -> str:
    """Return the stored name of a queue: its namespace and the resource with its schema."""
    return f"{namespace}/{resource}"


def show_queue(kind: type, namespace: str, resource: str) -> str:
    """Return a queue's plugin as users write it."""
    is_plain = namespace in {"", DEFAULT_NAMESPACE}
    shown = repr(resource) if is_plain else f"{resource!r}, namespace={namespace!r}"
    return f"{kind.__name__}({shown})"


class ClaimResult(msgspec.Struct, frozen=True):
    """The messages of a claim, and when there may be more."""

    messages: list[Message]
    suspects: bool
    """Whether there are suspects to claim now."""
    due: float | None
    """Seconds until a delay ends; None if none does."""
    lapse: float | None
    """Seconds until any worker's claim lapses; None if there are no claims."""
    more: bool
    """Whether there may be more: as many were found as requested, readable or not."""
    rate: float | None = None
    """Seconds until a rate allows one more, if there are any; None if no rate holds one back."""

    @property
    def next(self) -> float | None:
        """Seconds until the next known change that nobody causes; None if there is none."""
        return min((time for time in (self.due, self.lapse) if time is not None), default=None)


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a claim ends.

    Raises:
        Invalid: the move does not end a claim.
    """

    receipt: Receipt
    move: Transition
    delay: float = 0.0
    """Seconds before the next delivery, if there is one."""
    error: str = ""
    """The error, if there was one; stored with the message."""
    result: StoredResult | None = None
    """What the handler of a completed message returned; None for nothing."""

    def __post_init__(self) -> None:
        if self.move not in _ENDINGS:
            fix = f"use one of {', '.join(_ENDINGS)}"
            raise Invalid("move", self.move, "does not settle a claim", fix)

    @property
    def target(self) -> MessageState:
        """The state that the message moves to."""
        return TRANSITIONS[self.move].target

    @property
    def is_returned(self) -> bool:
        """Whether the delivery does not count as an attempt."""
        return TRANSITIONS[self.move].returns


class EndedClaim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claim that was ended because nobody had settled it."""

    id: str
    state: MessageState
    """Waiting for another worker, or dead because no attempts are left."""
    attempt: int
    session: str
    """The session that had claimed it."""


class SeenKeys(NamedTuple):
    """Some keys that were looked at, in their order."""

    last: str = ""
    """The last of them; empty if there are no more."""
    removed: int = 0

    @property
    def is_end(self) -> bool:
        """Whether there are no more."""
        return not self.last


class QueueBackend(MessageOperations):
    """The messages of one queue.

    Attributes:
        queue: its name.
        max_push: the most messages in one push.
        is_billed: whether each request costs money.
        transactions: opens transactions for handlers; None if the store has none.
    """

    queue: str
    max_push: int = 10_000
    is_billed: bool = False
    transactions: "TransactionBackend | None" = None

    @abstractmethod
    def split(self, new_messages: Sequence[NewMessage]) -> list[Sequence[NewMessage]]:
        """Return messages in parts that can be pushed one after the other, as few as possible.

        Raises:
            Invalid: a message can be in none: it is not JSON or too large, or its place is wrong.
        """

    @abstractmethod
    async def push(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str]:
        """Add messages in order, all or none, except those whose keys others hold.

        Returns:
            The ids of the messages that hold the keys, by the ids of those that were not added.

        Raises:
            Invalid: a message is not JSON or too large; nothing was added.
            OutcomeUnknown: they may or may not have been added.
            Unavailable: nothing was added.
        """

    @abstractmethod
    async def push_within(
        self, connection: object, new_messages: Sequence[NewMessage]
    ) -> Mapping[str, str]:
        """Add messages in the caller's transaction: they exist once it commits. See `push`.

        Args:
            connection: to the same database that stores the queue.
            new_messages: the messages to add.

        Raises:
            Invalid: the connection is another one, or a message cannot be stored.
        """

    @abstractmethod
    async def claim(
        self,
        limit: int,
        *,
        session: str,
        visibility: float,
        suspects: bool = False,
        tasks: Collection[str] | None = None,
        at_most: int | None = None,
    ) -> ClaimResult:
        """Claim due messages: first those that waited, then the others in order.

        A claim of large messages may have fewer of them than there are.

        Args:
            limit: how many messages are wanted, and the most that are claimed.
            session: the session to claim for; its death ends the claims.
            visibility: seconds until the claims lapse unless extended.
            suspects: claim only suspects; otherwise only messages that are not suspects.
            tasks: claim only messages of these tasks; `""` stands for messages without a task.
                None for these alone.
            at_most: the most that are claimed where more than `limit` cost nothing.

        Raises:
            Unavailable: nothing is in flight. A claim that happened anyway lapses by itself.
        """

    @abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """End claims; False means that the receipt is stale and nothing was done.

        Raises:
            OutcomeUnknown: they may or may not have ended; sending the same again is safe.
            Unavailable: this call did nothing.
        """

    @abstractmethod
    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Extend claims to this many seconds from now; False means that the receipt is stale.

        Raises:
            Invalid: the number of seconds is out of range.
            Unavailable: no answer; sending the same again is safe.
        """

    @abstractmethod
    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that have lapsed and those of dead sessions, by a write.

        Each message becomes a suspect and spends no attempt. A message that was a suspect
        before spends an attempt, and becomes a dead letter if it was the last.

        Args:
            dead: the sessions that are dead.
            keep: messages that the caller has in flight; their claims are not ended.

        Raises:
            Unavailable: no answer; calling again is safe.
        """

    @abstractmethod
    async def list_holders(self) -> list[str]:
        """Return the sessions that hold claims."""

    @abstractmethod
    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages in a state, the oldest first; fewer than `limit` means the end.

        Raises:
            Invalid, Unavailable: an argument is wrong, or the store does not answer.
        """

    @abstractmethod
    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state."""

    async def has_claimable(self, tasks: Collection[str] | None = None) -> bool:
        """Whether there are messages that could be claimed now if there were no limits.

        Only databases have limits, so others are never asked.

        Args:
            tasks: as in `claim`.

        Raises:
            Unavailable: the store does not answer.
        """
        del tasks
        return False

    @abstractmethod
    async def find_newer(self) -> Mapping[int, int]:
        """Count the unfinished messages of newer code, by their format."""

    @abstractmethod
    async def redrive(self, ids: Collection[str] | None = None, *, limit: int | None = None) -> int:
        """Queue dead letters again with all their attempts; return how many.

        In several transactions if there are many. A message that dies again meanwhile stays dead.

        Args:
            ids: the messages; without ids, all dead letters. Cancelled messages are queued again
                only by id.
            limit: the most messages to queue again, the oldest first; None for no limit.

        Raises:
            Invalid: an argument is wrong.
            OutcomeUnknown: all, some or none were queued again; calling again is safe.
            Unavailable: nothing was queued again.
        """

    @abstractmethod
    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove the messages in these states for good; return how many.

        Raises:
            Invalid: there is no such state.
            OutcomeUnknown: it may or may not have happened; calling again is safe.
        """

    @abstractmethod
    async def forget(self, state: MessageState, *, older_than: float, limit: int = 10_000) -> int:
        """Remove messages that were finished this many seconds ago; return how many.

        Raises:
            Invalid: messages in this state are not finished, or a number is out of range.
            OutcomeUnknown: it may or may not have happened; calling again is safe.
        """

    async def forget_keys(self, *, after: str, limit: int) -> SeenKeys:
        """Remove those of the next keys that nobody holds; without keys there are none.

        Raises:
            Unavailable: no answer; calling again is safe.
        """
        del after, limit
        return SeenKeys()

    @abstractmethod
    async def pause(self, reason: str = "") -> bool:
        """Stop all claims from now on; False means that it was paused, and nothing changed.

        Raises:
            Invalid: the reason is not text that a database can store.
            OutcomeUnknown: it may or may not have changed; calling again is safe.
            Unavailable: the store does not answer; nothing has changed.
        """

    @abstractmethod
    async def resume(self) -> bool:
        """Allow claims again; False means that it was not paused.

        Raises:
            OutcomeUnknown: it may or may not have changed; calling again is safe.
            Unavailable: the store does not answer; nothing has changed.
        """

    @abstractmethod
    async def wait(self, timeout: float) -> None:
        """Return early if there may be something new to claim. A hint: only a claim is certain."""

    def join(self, fleet: "QueueFleet | None") -> None:
        """Use what is known about the other processes of the queue; None from now on nothing.

        A database needs none of it.
        """
        del fleet

    async def coordinate(self) -> None:
        """Do the coordinator's part, where requests are billed; return if there is none."""
