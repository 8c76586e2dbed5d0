"""Where the messages of one queue are kept: a handful of batch methods, each all it needs.

What every port promises:

- An acknowledged push is delivered at least once or found among the dead letters. A push
  is all or nothing; one whose outcome is unknown raises `OutcomeUnknown`.
- A message has at most one live claim.
- A stale receipt can neither complete, extend nor fail a message. A receipt is stale once
  the store says so: its claim was settled in another way, or has lapsed and was ended.
- To settle again in the same way changes nothing and is no error, so that a lost reply is
  followed up by the identical request.
- `deliveries` only grows. A message whose attempts are spent is found among the dead
  letters, with its payload and every error. Of those that a worker had in hand when it died
  none has spent an attempt, unless it ran alone: see `core.messages`.
- A delayed message is not claimed before its time, by the store's clock.
- What cannot be read is set aside among the dead letters, as it is, and reported.
- While a queue is paused nobody claims of it: no claim that begins after `pause` has returned
  brings anything, whoever makes it. What is in hand then goes on.

A claim ends when it is settled, when it was not extended for its visibility, by the
store's clock, or when its session is dead; the last two by `end_claims`, which anybody may
call. Until then it stands, even if it is late.

A port is one file that inherits `QueueBackend` and passes the conformance suite.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import msgspec

from jobsync.core.codec import Json
from jobsync.core.messages import FINISHED, MOVES, MessageState, Transition
from jobsync.errors import Invalid

__all__ = [
    "DEFAULT",
    "MAX_MESSAGE",
    "ClaimResult",
    "EndedClaim",
    "Failure",
    "Message",
    "MessageInfo",
    "NewMessage",
    "Pause",
    "QueueBackend",
    "Receipt",
    "Settlement",
    "WorkerStatus",
    "describe_worker_status",
    "name_queue",
    "read_worker_statuses",
]


# What a process that handles messages tells the others of it, with its session.
#
# Told when it begins, when it pauses and when it ends: whoever looks can tell a queue whose
# workers are busy from one that nobody works on. Costs a beat each time, and nothing else.


_PREFIX = "queue:"


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part in a queue."""

    concurrency: int
    """How many handlers it runs at once."""
    is_paused: bool = False
    """Whether that process alone claims nothing for now."""


def describe_worker_status(queue: str, duty: WorkerStatus | None) -> dict[str, Json]:
    """Give the fact to tell; None says that the process has done with the queue."""
    return {f"{_PREFIX}{queue}": None if duty is None else msgspec.to_builtins(duty)}


def read_worker_statuses(facts: Mapping[str, Json]) -> dict[str, WorkerStatus]:
    """Give the queues that a session tells of; nothing of what newer code may have told."""
    duties = {}
    for name, told in facts.items():
        if name.startswith(_PREFIX) and told is not None:
            try:
                duties[name.removeprefix(_PREFIX)] = msgspec.convert(told, WorkerStatus)
            except msgspec.ValidationError:
                continue
    return duties


MAX_MESSAGE = 256 * 1024
"""The largest encoded message, in bytes."""

_ENDINGS: tuple[Transition, ...] = ("complete", "cancel", "retry", "bury", "release", "snooze")


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to push."""

    id: str
    """Nobody else's: `Ids.records` makes such names."""
    value: Json
    max_attempts: int
    delay: float = 0.0
    """Seconds before which it is not claimed."""
    timeout: float | None = None
    """Seconds that its handler may take; None leaves it to the queue."""


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Proof of a claim: names the message, and the very delivery."""

    id: str
    deliveries: int
    claim: str


class Failure(msgspec.Struct, frozen=True, gc=False):
    """How an attempt ended that was not completed."""

    attempt: int
    error: str
    at: float = 0.0
    """Unix seconds, by the store's clock."""
    session: str = ""
    """Who had claimed it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message that this caller has claimed."""

    receipt: Receipt
    value: Json
    attempt: int
    """Which attempt this is, counted from 1."""
    max_attempts: int
    timeout: float | None
    is_suspect: bool
    """Whether its last claim lapsed: it may have killed its worker, and is to run alone."""
    enqueued: float
    """Unix seconds, by the store's clock."""

    @property
    def id(self) -> str:
        """Name the message."""
        return self.receipt.id


class ClaimResult(msgspec.Struct, frozen=True):
    """What a claim brought."""

    messages: list[Message]
    suspects: bool
    """Whether there are suspects to claim now."""
    due: float | None
    """Seconds until a delay is over; None if none is."""
    lapse: float | None
    """Seconds until a claim lapses, of anybody's; None if nobody has claimed anything."""
    more: bool
    """Whether there may be more: as many were found as were asked for, readable or not."""

    @property
    def next(self) -> float | None:
        """Seconds until something happens by itself, as far as is known; None if nothing does."""
        return min((each for each in (self.due, self.lapse) if each is not None), default=None)


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a claim is to end.

    Raises:
        Invalid: the move does not end a claim.
    """

    receipt: Receipt
    move: Transition
    delay: float = 0.0
    """Seconds to wait before the next delivery, where there is one."""
    error: str = ""
    """What went wrong, if anything; kept with the message."""

    def __post_init__(self) -> None:
        if self.move not in _ENDINGS:
            raise Invalid("move", self.move, "settles nothing", f"use one of {', '.join(_ENDINGS)}")

    @property
    def target(self) -> MessageState:
        """The state that it leads to."""
        return MOVES[self.move].target


class EndedClaim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A claim that was ended because nobody had settled it."""

    id: str
    state: MessageState
    """Waiting for somebody else, or dead because its attempts are spent."""
    attempt: int
    session: str
    """Who had claimed it."""


class MessageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it stands, for whoever looks."""

    queue: str
    id: str
    state: MessageState
    value: Json
    """None where it is not kept: of what was completed."""
    attempts: int
    deliveries: int
    max_attempts: int
    errors: tuple[Failure, ...]
    session: str
    """Who has claimed it, or had when it was finished."""
    is_suspect: bool
    """Whether its last claim lapsed: it may have killed its worker, and is to run alone."""
    enqueued: float
    """Unix seconds, by the store's clock, as all times here."""
    due: float | None
    """When its pause is over, or when its claim lapses unless renewed."""
    claimed: float | None
    """Since when it is claimed; unknown where older code has claimed it."""
    finished: float | None
    seen: float
    """When this was so."""
    is_readable: bool = True
    """Whether its payload is JSON; if not, `value` is its text."""
    cursor: str
    """Pass it as `after` to look on from here."""


class Pause(msgspec.Struct, frozen=True):
    """That nobody claims of a queue."""

    since: float
    """Unix seconds, by the store's clock."""
    reason: str
    """For people; may be empty."""


class QueueBackend(ABC):
    """The messages of one queue.

    Attributes:
        queue: its name.
    """

    queue: str

    @abstractmethod
    async def push(self, letters: Sequence[NewMessage]) -> None:
        """Add messages, all or none, in order.

        Raises:
            Invalid: one is not JSON or too large; nothing was added.
            OutcomeUnknown: nobody can say.
            Unavailable: nothing was added.
        """

    @abstractmethod
    async def push_within(self, connection: object, letters: Sequence[NewMessage]) -> None:
        """Add messages in a transaction of the caller's: they are there once it commits.

        Args:
            connection: to the very database where the messages are kept.
            letters: what to add.

        Raises:
            Invalid: it is no such connection, or a message cannot be kept.
        """

    @abstractmethod
    async def claim(
        self, limit: int, *, session: str, visibility: float, suspects: bool = False
    ) -> ClaimResult:
        """Claim messages whose time has come: those that waited first, then in order.

        Args:
            limit: at most so many.
            session: on whose behalf; its death ends the claims.
            visibility: seconds for which they hold unless extended.
            suspects: claim suspects, and nothing else; they are not claimed otherwise.

        Raises:
            Unavailable: nothing is in hand. What may have been claimed lapses by itself.
        """

    @abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """End claims, each as told; False says that the receipt is stale and nothing was done.

        Raises:
            OutcomeUnknown: nobody can say; to send the same again is safe.
            Unavailable: nothing was done by this call.
        """

    @abstractmethod
    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Let claims hold for so many seconds from now; False says that the receipt is stale.

        Raises:
            Unavailable: no answer; to send the same again is safe.
        """

    @abstractmethod
    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that have lapsed, and those of sessions that are dead, by a write.

        Those of the messages to keep, which the caller has in hand, are not ended.

        Each message becomes a suspect and has spent nothing. One that was a suspect before
        has spent an attempt, and is a dead letter if that was the last.

        Raises:
            Unavailable: no answer; to call again is safe.
        """

    @abstractmethod
    async def holders(self) -> list[str]:
        """Give the sessions that have claimed anything."""

    @abstractmethod
    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Look at messages in a state, the oldest first; fewer than `limit` means the end."""

    @abstractmethod
    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state."""

    @abstractmethod
    async def redrive(self, ids: Collection[str] | None = None, *, limit: int = 1000) -> int:
        """Give dead letters, those named or all, a new life with all attempts; count them.

        What was cancelled comes back only by name.

        Raises:
            OutcomeUnknown: nobody can say; to call again is safe.
        """

    @abstractmethod
    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove the messages in these states for good; count them.

        Raises:
            OutcomeUnknown: nobody can say; to call again is safe.
        """

    @abstractmethod
    async def forget(self, state: MessageState, *, older_than: float, limit: int = 10_000) -> int:
        """Remove messages that were finished so many seconds ago; count them.

        Raises:
            Invalid: it is no state of what is finished.
            OutcomeUnknown: nobody can say; to call again is safe.
        """

    @abstractmethod
    async def pause(self, reason: str = "") -> bool:
        """Let nobody claim from now on; False says that it was paused before, and is as it was.

        Raises:
            Unavailable: no answer; to call again is safe.
        """

    @abstractmethod
    async def resume(self) -> bool:
        """Let everybody claim again; False says that it was not paused.

        Raises:
            Unavailable: no answer; to call again is safe.
        """

    @abstractmethod
    async def wait(self, timeout: float) -> None:
        """Return early if there is something new to claim. A hint: asking is the truth."""


def check_finished(state: MessageState) -> None:
    """Refuse to forget what is still to be handled.

    Raises:
        Invalid: names the states that can be.
    """
    if state not in FINISHED:
        raise Invalid("state", state, "is not finished", f"use one of {', '.join(FINISHED)}")


# How a queue is called: its namespace, and the resource whose schema its messages obey.


DEFAULT = "default"
"""The namespace of plugins that have none of their own."""


def name_queue(namespace: str, resource: str) -> str:
    """Give the name by which the store knows a queue."""
    return f"{namespace}/{resource}"
