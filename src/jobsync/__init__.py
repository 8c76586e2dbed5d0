"""Leader election, durable queues, cron and task ownership on the storage you already have."""

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.fencing import Term
from jobsync.coordination.membership import Membership, Peer
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.database.coordinating import CoordinatorPlugin
from jobsync.database.database import Database
from jobsync.database.document import Document
from jobsync.database.listing import Page
from jobsync.database.locking import Lock
from jobsync.database.plugin import Plugin
from jobsync.database.resource import Resource
from jobsync.database.storage import PluginStorage
from jobsync.errors import (
    ClaimLost,
    Conflict,
    Corrupt,
    Fenced,
    Incomplete,
    Invalid,
    InvalidRecord,
    JobsyncError,
    Misconfigured,
    MissingExtra,
    NewerFormat,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.events import Event, Events
from jobsync.jobs.config import CoordinationConfig
from jobsync.jobs.job import Job
from jobsync.jobs.task import Task
from jobsync.jobs.telling import RebalanceEvent
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
    "ClaimLost",
    "Components",
    "Conflict",
    "Conflicted",
    "CoordinationConfig",
    "Coordinator",
    "CoordinatorPlugin",
    "CoordinatorSettings",
    "Corrupt",
    "Database",
    "Delete",
    "Document",
    "Entry",
    "Event",
    "Events",
    "Fenced",
    "Head",
    "Hooks",
    "Incomplete",
    "Invalid",
    "InvalidRecord",
    "Job",
    "JobsyncError",
    "Lock",
    "Membership",
    "Misconfigured",
    "MissingExtra",
    "NewerFormat",
    "NotFound",
    "OutcomeUnknown",
    "Page",
    "Peer",
    "Plugin",
    "PluginStorage",
    "Put",
    "RebalanceEvent",
    "Record",
    "Resource",
    "Store",
    "Task",
    "Term",
    "Unavailable",
    "Unknown",
    "open_store",
]
