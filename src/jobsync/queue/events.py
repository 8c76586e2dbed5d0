"""The events of a queue: what happens to its messages and workers."""

import logging
from typing import ClassVar

from jobsync.events import Event

__all__ = [
    "AttemptError",
    "DelaysVetoed",
    "HandlerOverran",
    "MessageBuried",
    "MessageCancelled",
    "MessageCompleted",
    "MessageDead",
    "MessageLost",
    "MessageProgressed",
    "MessageRecovered",
    "MessageRetried",
    "MessageReturned",
    "MessagesEnqueued",
    "NewerMessages",
    "QueueError",
    "QueueStats",
    "ResultDropped",
    "TaskUnknown",
    "TicketsPublished",
    "WorkersStarted",
    "WorkersStopped",
]


class _QueueEvent(Event, frozen=True, kw_only=True):
    queue: str


class _MessageEvent(_QueueEvent, frozen=True, kw_only=True):
    message_id: str
    attempt: int


class MessagesEnqueued(_QueueEvent, frozen=True, kw_only=True):
    """Messages were stored: one event per call."""

    name: ClassVar[str] = "plg:queue:message-enqueued"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-enqueued",)

    ids: tuple[str, ...]


class MessageCompleted(_MessageEvent, frozen=True, kw_only=True):
    """A message was handled, and the store has recorded it."""

    name: ClassVar[str] = "plg:queue:message-completed"
    aliases: ClassVar[tuple[str, ...]] = (
        "plg:s3-queue:message-completed",
        "plg:queue:message:complete",
    )

    duration: float
    """Seconds."""


class MessageRetried(_MessageEvent, frozen=True, kw_only=True):
    """An attempt failed; there will be another one."""

    name: ClassVar[str] = "plg:queue:message-retry"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-retry",)
    level: ClassVar[int] = logging.WARNING

    error: str
    delay: float
    """Seconds until the next attempt."""


class MessageDead(_MessageEvent, frozen=True, kw_only=True):
    """The last attempt failed; the message is among the dead letters."""

    name: ClassVar[str] = "plg:queue:message-dead"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-dead",)
    level: ClassVar[int] = logging.ERROR

    error: str


class MessageCancelled(_MessageEvent, frozen=True, kw_only=True):
    """Its handler returned `Cancel`, or this process cancelled it: nobody handles it any more."""

    name: ClassVar[str] = "plg:queue:message-cancelled"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-cancelled",)

    reason: str


class MessageReturned(_MessageEvent, frozen=True, kw_only=True):
    """A message was returned or snoozed: no attempt was spent."""

    name: ClassVar[str] = "plg:queue:message-returned"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-returned",)

    delay: float


class MessageLost(_MessageEvent, frozen=True, kw_only=True):
    """This worker's claim has ended, or may have: nothing that its handler does counts now."""

    name: ClassVar[str] = "plg:queue:message-lost"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-lost",)
    level: ClassVar[int] = logging.WARNING

    reason: str


class MessageRecovered(_MessageEvent, frozen=True, kw_only=True):
    """Another worker's claim was ended, because that worker died or did not renew it."""

    name: ClassVar[str] = "plg:queue:message-recovered"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-recovered",)
    level: ClassVar[int] = logging.INFO

    state: str
    """Waiting, or dead."""


class MessageBuried(MessageRecovered, frozen=True, kw_only=True):
    """Another worker's claim was ended, and the message has become a dead letter by that."""

    level: ClassVar[int] = logging.ERROR


class MessageProgressed(_MessageEvent, frozen=True, kw_only=True):
    """A handler has reported how far it is."""

    name: ClassVar[str] = "plg:queue:message-progress"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:message-progress",)

    progress: float
    note: str = ""


class ResultDropped(_MessageEvent, frozen=True, kw_only=True):
    """A message was completed, and what its handler returned is not kept: see `reason`."""

    name: ClassVar[str] = "plg:queue:result-dropped"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:result-dropped",)
    level: ClassVar[int] = logging.WARNING

    reason: str


class HandlerOverran(_MessageEvent, frozen=True, kw_only=True):
    """A handler continues after its timeout: its slot is occupied until it returns."""

    name: ClassVar[str] = "plg:queue:handler-overran"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:handler-overran",)
    level: ClassVar[int] = logging.WARNING

    timeout: float


class NewerMessages(_QueueEvent, frozen=True, kw_only=True):
    """Newer code has stored messages that this process leaves alone; once for each format.

    Upgrade this process, or start one with the newer code: nobody else handles them.
    """

    name: ClassVar[str] = "plg:queue:newer-messages"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:newer-messages",)
    level: ClassVar[int] = logging.WARNING

    count: int
    format: int


class WorkersStarted(_QueueEvent, frozen=True, kw_only=True):
    """This process has started to handle messages."""

    name: ClassVar[str] = "plg:queue:workers-started"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:workers-started",)

    worker_id: str
    concurrency: int


class WorkersStopped(_QueueEvent, frozen=True, kw_only=True):
    """This process no longer handles messages."""

    name: ClassVar[str] = "plg:queue:workers-stopped"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:workers-stopped",)

    worker_id: str


class QueueStats(_QueueEvent, frozen=True, kw_only=True):
    """What this process has done since it started, once a minute, from counters."""

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


class CronUnscheduled(_QueueEvent, frozen=True, kw_only=True):
    """A task has a cron, and its database has no scheduler that would enqueue it."""

    name: ClassVar[str] = "plg:queue:cron-unscheduled"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:cron-unscheduled",)
    level: ClassVar[int] = logging.WARNING

    task: str
    cron: str
    fix: str


class TaskUnknown(_QueueEvent, frozen=True, kw_only=True):
    """A message of a task that this process does not have was enqueued; its queue has others.

    Once per name. The message waits for a process that has the task.
    """

    name: ClassVar[str] = "plg:queue:task-unknown"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:task-unknown",)
    level: ClassVar[int] = logging.WARNING

    task: str
    fix: str


class DelaysVetoed(_QueueEvent, frozen=True, kw_only=True):
    """This machine's clock disagrees with the server's: it claims no delayed messages.

    Only on objects, where the clocks of machines count delays. Other processes claim them.
    """

    name: ClassVar[str] = "plg:queue:clock-vetoed"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:clock-vetoed",)
    level: ClassVar[int] = logging.ERROR

    reason: str


class TicketsPublished(_QueueEvent, frozen=True, kw_only=True):
    """The coordinator has published a ticket. Not on a database, where workers claim rows."""

    name: ClassVar[str] = "plg:queue:tickets-published"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:tickets-published",)

    count: int
    """The pages that the ticket names."""
    coordinator_id: str


class QueueError(_QueueEvent, frozen=True, kw_only=True):
    """Something failed: a handler raised an error, or the store does not answer."""

    name: ClassVar[str] = "plg:queue:error"
    aliases: ClassVar[tuple[str, ...]] = ("plg:s3-queue:error",)
    level: ClassVar[int] = logging.WARNING

    error: str
    message_id: str | None = None


class AttemptError(QueueError, frozen=True, kw_only=True):
    """An attempt failed. `MessageRetried` or `MessageDead` has logged that already."""

    level: ClassVar[int] = logging.DEBUG
