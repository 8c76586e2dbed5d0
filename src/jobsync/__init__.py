"""Leader election, durable queues, cron and task ownership on the storage you already have."""

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.fencing import Term
from jobsync.coordination.membership import Membership, Peer
from jobsync.coordination.settings import CoordinatorSettings
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
    "Coordinator",
    "CoordinatorSettings",
    "Corrupt",
    "Delete",
    "Entry",
    "Event",
    "Events",
    "Fenced",
    "Head",
    "Hooks",
    "Invalid",
    "JobsyncError",
    "Membership",
    "Misconfigured",
    "MissingExtra",
    "NewerFormat",
    "NotFound",
    "OutcomeUnknown",
    "Peer",
    "Put",
    "Record",
    "Store",
    "Term",
    "Unavailable",
    "Unknown",
    "open_store",
]
