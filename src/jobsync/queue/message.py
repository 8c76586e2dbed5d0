"""A message, as it is pushed, claimed and shown."""

from collections.abc import Iterable

import msgspec

from jobsync.core.codec import Json
from jobsync.core.messages import MessageState

__all__ = [
    "MESSAGE_FORMAT",
    "PLAIN_FORMAT",
    "Failure",
    "Message",
    "MessageInfo",
    "NewMessage",
    "Receipt",
    "are_plain",
]

PLAIN_FORMAT = 1
"""The format of messages that stand where they were pushed."""

_PLACED_FORMAT = 2
"""The format of messages with a priority or a group."""

MESSAGE_FORMAT = 3
"""The format of messages of tasks, and the highest that this code understands."""


class NewMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message to push."""

    id: str
    """Unique: `Ids.records` makes such ids."""
    value: Json
    max_attempts: int
    delay: float = 0.0
    """Seconds before which it is not claimed."""
    at: float | None = None
    """The time of day before which it is not claimed, by the store's clock, in place of a delay."""
    timeout: float | None = None
    """Seconds that its handler may take; None for the queue's default."""
    task: str = ""
    """The name of the task that handles it; empty for the queue's handler of messages."""
    priority: int = 0
    """Higher ones are claimed first, in a queue whose order is by priority."""
    group: str | None = None
    """Messages of one group are handled one at a time, in order."""
    key: str | None = None
    """It is not added while another message holds this key."""
    key_ttl: float | None = None
    """Seconds for which it holds its key; None for as long as it is pending."""
    replace: bool = False
    """Whether it replaces the message that holds its key, if nobody has claimed that."""

    @property
    def format(self) -> int:
        """The format that it is stored in: older code leaves alone what it does not understand."""
        if self.task:
            return MESSAGE_FORMAT
        return PLAIN_FORMAT if self.priority == 0 and self.group is None else _PLACED_FORMAT

    @property
    def lane(self) -> str:
        """The start of its state in a database, where messages of tasks are apart."""
        return "task_" if self.task else ""

    def find_delay(self, now: float) -> float:
        """Return the seconds before which it is not claimed, at that time of day."""
        return self.delay if self.at is None else max(0.0, self.at - now)


def are_plain(new_messages: Iterable[NewMessage]) -> bool:
    """Whether all of them just go to the end of the queue."""
    return all(
        each.key is None and each.group is None and each.priority == 0 for each in new_messages
    )


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Proof of a claim: the message and its exact delivery."""

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
    """The session that had claimed it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message that this caller has claimed."""

    receipt: Receipt
    value: Json
    attempt: int
    """The number of this attempt, counted from 1."""
    max_attempts: int
    timeout: float | None
    is_suspect: bool
    """Whether its last claim lapsed: it may have killed its worker, and must run alone."""
    enqueued: float
    """Unix seconds, by the store's clock."""
    task: str = ""
    """The name of the task that handles it; empty for the queue's handler of messages."""

    @property
    def id(self) -> str:
        """The message's id."""
        return self.receipt.id


class MessageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message, for display."""

    queue: str
    id: str
    state: MessageState
    value: Json
    """None if it is no longer stored: completed messages."""
    attempts: int
    deliveries: int
    max_attempts: int
    errors: tuple[Failure, ...]
    session: str
    """The session that has claimed it, or had when it was finished."""
    is_suspect: bool
    """Whether its last claim lapsed: it may have killed its worker, and must run alone."""
    enqueued: float
    """Unix seconds by the store's clock, as are all times here."""
    due: float | None
    """When its delay ends, or when its claim lapses unless renewed."""
    claimed: float | None
    """When it was claimed; unknown if older code claimed it."""
    finished: float | None
    seen: float
    """When this was read."""
    is_readable: bool = True
    """Whether its payload is JSON; if not, `value` is its text."""
    format: int = MESSAGE_FORMAT
    """A higher one than `MESSAGE_FORMAT` is of newer code: this code leaves the message alone."""
    priority: int = 0
    group: str | None = None
    """Its group, whose messages are handled one at a time and in order."""
    task: str = ""
    """The name of the task that handles it; empty for the queue's handler of messages."""
    progress: float | None = None
    """How far its handler is, as it has reported. Only `get` reads this, and what follows."""
    progress_note: str = ""
    progress_at: float | None = None
    result: Json = None
    """What its handler returned, if it is completed; `result_problem` is why it was not kept."""
    result_problem: str = ""
    cursor: str
    """Pass it as `after` to continue from here."""
