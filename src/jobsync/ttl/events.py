"""The events of a TTL plugin: what has expired, and what was done about it."""

import logging
from typing import ClassVar

from jobsync.core.expiry import OnExpire
from jobsync.events import Event

__all__ = [
    "CleanupCompleted",
    "CleanupFailed",
    "CleanupStarted",
    "CleanupVetoed",
    "RecordExpired",
    "ResourceAwaited",
]


class CleanupStarted(Event, frozen=True, kw_only=True):
    """A sweep begins."""

    name: ClassVar[str] = "plg:ttl:cleanup-started"

    resources: tuple[str, ...]


class CleanupCompleted(Event, frozen=True, kw_only=True):
    """A sweep has ended. It counts records."""

    name: ClassVar[str] = "plg:ttl:cleanup-completed"
    aliases: ClassVar[tuple[str, ...]] = ("plg:ttl:scan-completed",)

    resources: tuple[str, ...]
    expired: int
    """How many had expired and were handled."""
    deleted: int
    """Of those: deleted, at once or because a callback said so."""
    soft_deleted: int
    archived: int
    kept: int
    """Of those: kept by a callback."""
    errors: int
    """How many could not be handled; the next sweep tries again."""
    duration: float
    """Seconds."""


class RecordExpired(Event, frozen=True, kw_only=True):
    """A record had expired, and was deleted, marked, archived, or kept by a callback."""

    name: ClassVar[str] = "plg:ttl:record-expired"

    resource: str
    record_id: str
    on_expire: OnExpire
    expired_at: float
    """When it expired, in seconds since 1970."""
    is_kept: bool = False
    """Whether a callback has kept it."""


class CleanupFailed(Event, frozen=True, kw_only=True):
    """An expired record, or all of a resource, could not be handled; the next sweep tries again."""

    name: ClassVar[str] = "plg:ttl:cleanup-error"
    level: ClassVar[int] = logging.WARNING

    resource: str
    error: str
    record_id: str | None = None
    """None if it concerns more than one record."""


class CleanupVetoed(Event, frozen=True, kw_only=True):
    """This process removes nothing: its clock cannot be right."""

    name: ClassVar[str] = "plg:ttl:clock-vetoed"
    level: ClassVar[int] = logging.ERROR

    reason: str


class ResourceAwaited(Event, frozen=True, kw_only=True):
    """A resource does not exist, or is not described: nothing of it expires until it is."""

    name: ClassVar[str] = "plg:ttl:resource-missing"
    level: ClassVar[int] = logging.WARNING

    resource: str
