"""What happens to messages and workers, as facts to listen to."""

import logging
from typing import ClassVar

from jobsync.events import Event

__all__ = [
    "HandlerOverran",
    "MessageCancelled",
    "MessageCompleted",
    "MessageDead",
    "MessageLost",
    "MessageProgressed",
    "MessageRecovered",
    "MessageRetried",
    "MessageReturned",
    "MessagesEnqueued",
    "QueueError",
    "QueueStats",
    "TicketsPublished",
    "WorkersStarted",
    "WorkersStopped",
]


class _AboutQueue(Event, frozen=True, kw_only=True):
    queue: str


class _AboutMessage(_AboutQueue, frozen=True, kw_only=True):
    message_id: str
    attempt: int


class MessagesEnqueued(_AboutQueue, frozen=True, kw_only=True):
    """Messages are in the store: one event a call."""

    name: ClassVar[str] = "plg:queue:message-enqueued"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-enqueued",)

    ids: tuple[str, ...]


class MessageCompleted(_AboutMessage, frozen=True, kw_only=True):
    """A message was handled, and the store knows."""

    name: ClassVar[str] = "plg:queue:message-completed"
    aliases: ClassVar[tuple[str, ...]] = (
        "plg:s3-queue:message-completed",
        "plg:queue:message:complete",
    )

    duration: float
    """Seconds."""


class MessageRetried(_AboutMessage, frozen=True, kw_only=True):
    """An attempt failed; there will be another."""

    name: ClassVar[str] = "plg:queue:message-retry"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-retry",)
    level: ClassVar[int] = logging.INFO

    error: str
    delay: float
    """Seconds until the next attempt."""


class MessageDead(_AboutMessage, frozen=True, kw_only=True):
    """The last attempt failed; the message is among the dead letters."""

    name: ClassVar[str] = "plg:queue:message-dead"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-dead",)
    level: ClassVar[int] = logging.WARNING

    error: str


class MessageCancelled(_AboutMessage, frozen=True, kw_only=True):
    """Its handler said that it need not be handled."""

    name: ClassVar[str] = "plg:queue:message-cancelled"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-cancelled",)

    reason: str


class MessageReturned(_AboutMessage, frozen=True, kw_only=True):
    """It was given back, or snoozed: no attempt was spent."""

    name: ClassVar[str] = "plg:queue:message-returned"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-returned",)

    delay: float


class MessageLost(_AboutMessage, frozen=True, kw_only=True):
    """This worker's claim has ended, or may have: whatever its handler does counts no more."""

    name: ClassVar[str] = "plg:queue:message-lost"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-lost",)
    level: ClassVar[int] = logging.WARNING

    reason: str


class MessageRecovered(_AboutMessage, frozen=True, kw_only=True):
    """Another worker's claim was ended, because that one died or fell silent."""

    name: ClassVar[str] = "plg:queue:message-recovered"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-recovered",)
    level: ClassVar[int] = logging.INFO

    state: str
    """Waiting, or dead."""


class MessageProgressed(_AboutMessage, frozen=True, kw_only=True):
    """Its handler tells how far it is."""

    name: ClassVar[str] = "plg:queue:message-progress"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-progress",)

    progress: float


class HandlerOverran(_AboutMessage, frozen=True, kw_only=True):
    """A plain function goes on after its time is over: its slot is taken until it returns."""

    name: ClassVar[str] = "plg:queue:handler-overran"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:handler-overran",)
    level: ClassVar[int] = logging.WARNING

    timeout: float


class WorkersStarted(_AboutQueue, frozen=True, kw_only=True):
    """This process begins to handle messages."""

    name: ClassVar[str] = "plg:queue:workers-started"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:workers-started",)

    worker_id: str
    concurrency: int


class WorkersStopped(_AboutQueue, frozen=True, kw_only=True):
    """This process handles no more messages."""

    name: ClassVar[str] = "plg:queue:workers-stopped"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:workers-stopped",)

    worker_id: str


class QueueStats(_AboutQueue, frozen=True, kw_only=True):
    """What this process has done since it began, once a minute, from counters."""

    name: ClassVar[str] = "plg:queue:stats"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:stats",)

    enqueued: int
    completed: int
    retried: int
    cancelled: int
    returned: int
    dead: int
    lost: int
    running: int


class TicketsPublished(_AboutQueue, frozen=True, kw_only=True):
    """The coordinator has told what is ready. Not where messages are rows: there claims do."""

    name: ClassVar[str] = "plg:queue:tickets-published"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:tickets-published",)

    count: int
    coordinator_id: str


class QueueError(_AboutQueue, frozen=True, kw_only=True):
    """Something went wrong: a handler raised, or the store does not answer."""

    name: ClassVar[str] = "plg:queue:error"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:error",)
    level: ClassVar[int] = logging.WARNING

    error: str
    message_id: str | None = None
