"""Leader election, durable queues, cron and task ownership on the storage you already have."""

from jobsync.components import Components
from jobsync.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    JobsyncError,
    Misconfigured,
    MissingExtra,
    NewerFormat,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.events import Event, Events
from jobsync.stores.contract import (
    Applied,
    Conflicted,
    Delete,
    Entry,
    Head,
    Put,
    Record,
    Store,
    Unknown,
)
from jobsync.stores.opening import open_store

__all__ = [
    "Applied",
    "Components",
    "Conflict",
    "Conflicted",
    "Corrupt",
    "Delete",
    "Entry",
    "Event",
    "Events",
    "Fenced",
    "Head",
    "Invalid",
    "JobsyncError",
    "Misconfigured",
    "MissingExtra",
    "NewerFormat",
    "NotFound",
    "OutcomeUnknown",
    "Put",
    "Record",
    "Store",
    "Unavailable",
    "Unknown",
    "open_store",
]
