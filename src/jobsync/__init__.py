"""Leader election, durable queues, cron and task ownership on the storage you already have.

Every public name is here. Its module is loaded when the name is first used: a command line
that only prints its help does not load a database.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from jobsync.cache.memory import CacheStats
    from jobsync.cache.plugin import CachePlugin
    from jobsync.components import Components
    from jobsync.coordination.coordinator import Coordinator, Hooks
    from jobsync.coordination.membership import Membership, Peer
    from jobsync.coordination.settings import CoordinatorSettings
    from jobsync.coordination.term import Term
    from jobsync.core.clock import Wall
    from jobsync.core.messages import Cancel, Snooze
    from jobsync.core.schema import Schema
    from jobsync.database.cleanup import DatabaseTidied
    from jobsync.database.coordinator_plugin import CoordinatorPlugin
    from jobsync.database.database import Database
    from jobsync.database.document import Document
    from jobsync.database.locks import Lock
    from jobsync.database.plugin import Plugin
    from jobsync.database.plugin_storage import PluginStorage, StoredValue
    from jobsync.database.producer import producer
    from jobsync.database.readable_resource import Page
    from jobsync.database.resource import Resource
    from jobsync.errors import (
        ClaimLost,
        Conflict,
        Corrupt,
        Fenced,
        Incomplete,
        Invalid,
        InvalidRecord,
        JobRunning,
        JobsyncError,
        MessageClaimLost,
        Misconfigured,
        MissingExtra,
        NewerFormat,
        NoResult,
        NotFound,
        OutcomeUnknown,
        Unavailable,
    )
    from jobsync.events import Event, Events
    from jobsync.jobs.coordination_config import CoordinationConfig
    from jobsync.jobs.events import RebalanceEvent
    from jobsync.jobs.job import Job
    from jobsync.jobs.registration import NodeInfo
    from jobsync.jobs.task import Task
    from jobsync.queue.backend import MessageInfo
    from jobsync.queue.context import BlockingContext, Context
    from jobsync.queue.plugin import QueuePlugin, S3QueuePlugin
    from jobsync.queue.pull import ClaimedMessage
    from jobsync.queue.task_calls import TaskDecorator
    from jobsync.queue.tasks import QueueTask, TaskCall, TaskHandle
    from jobsync.queue.usage import RequestCounts, UsageEstimate
    from jobsync.scheduler.context import JobContext
    from jobsync.scheduler.history import HistoryEntry
    from jobsync.scheduler.operations import JobStatus
    from jobsync.scheduler.plugin import SchedulerPlugin
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
    from jobsync.ttl.events import CleanupCompleted
    from jobsync.ttl.plugin import TTLPlugin

__all__ = [
    "Applied",
    "BlockingContext",
    "CachePlugin",
    "CacheStats",
    "Cancel",
    "ClaimLost",
    "ClaimedMessage",
    "CleanupCompleted",
    "Components",
    "Conflict",
    "Conflicted",
    "Context",
    "CoordinationConfig",
    "Coordinator",
    "CoordinatorPlugin",
    "CoordinatorSettings",
    "Corrupt",
    "Database",
    "DatabaseTidied",
    "Delete",
    "Document",
    "Entry",
    "Event",
    "Events",
    "Fenced",
    "Head",
    "HistoryEntry",
    "Hooks",
    "Incomplete",
    "Invalid",
    "InvalidRecord",
    "Job",
    "JobContext",
    "JobRunning",
    "JobStatus",
    "JobsyncError",
    "Lock",
    "Membership",
    "MessageClaimLost",
    "MessageInfo",
    "Misconfigured",
    "MissingExtra",
    "NewerFormat",
    "NoResult",
    "NodeInfo",
    "NotFound",
    "OutcomeUnknown",
    "Page",
    "Peer",
    "Plugin",
    "PluginStorage",
    "Put",
    "QueuePlugin",
    "QueueTask",
    "RebalanceEvent",
    "Record",
    "RequestCounts",
    "Resource",
    "S3QueuePlugin",
    "SchedulerPlugin",
    "Schema",
    "Snooze",
    "Store",
    "StoredValue",
    "TTLPlugin",
    "Task",
    "TaskCall",
    "TaskDecorator",
    "TaskHandle",
    "Term",
    "Unavailable",
    "Unknown",
    "UsageEstimate",
    "Wall",
    "open_store",
    "producer",
]

_MODULES = {
    "cache.memory": ("CacheStats",),
    "cache.plugin": ("CachePlugin",),
    "components": ("Components",),
    "coordination.coordinator": (
        "Coordinator",
        "Hooks",
    ),
    "coordination.term": ("Term",),
    "coordination.membership": (
        "Membership",
        "Peer",
    ),
    "coordination.settings": ("CoordinatorSettings",),
    "core.messages": ("Cancel", "Snooze"),
    "database.coordinator_plugin": ("CoordinatorPlugin",),
    "database.database": ("Database",),
    "database.document": ("Document",),
    "database.readable_resource": ("Page",),
    "database.locks": ("Lock",),
    "database.plugin": ("Plugin",),
    "database.producer": ("producer",),
    "database.resource": ("Resource",),
    "database.plugin_storage": ("PluginStorage", "StoredValue"),
    "errors": (
        "ClaimLost",
        "Conflict",
        "Corrupt",
        "Fenced",
        "Incomplete",
        "Invalid",
        "InvalidRecord",
        "JobRunning",
        "JobsyncError",
        "MessageClaimLost",
        "Misconfigured",
        "MissingExtra",
        "NewerFormat",
        "NoResult",
        "NotFound",
        "OutcomeUnknown",
        "Unavailable",
    ),
    "events": (
        "Event",
        "Events",
    ),
    "jobs.coordination_config": ("CoordinationConfig",),
    "jobs.job": ("Job",),
    "jobs.task": ("Task",),
    "jobs.events": ("RebalanceEvent",),
    "queue.backend": ("MessageInfo",),
    "queue.context": ("BlockingContext", "Context"),
    "queue.plugin": ("QueuePlugin", "S3QueuePlugin"),
    "queue.pull": ("ClaimedMessage",),
    "queue.tasks": ("QueueTask", "TaskCall", "TaskHandle"),
    "queue.usage": ("RequestCounts", "UsageEstimate"),
    "scheduler.context": ("JobContext",),
    "scheduler.history": ("HistoryEntry",),
    "scheduler.operations": ("JobStatus",),
    "scheduler.plugin": ("SchedulerPlugin",),
    "ttl.events": ("CleanupCompleted",),
    "database.cleanup": ("DatabaseTidied",),
    "jobs.registration": ("NodeInfo",),
    "core.schema": ("Schema",),
    "core.clock": ("Wall",),
    "queue.task_calls": ("TaskDecorator",),
    "ttl.plugin": ("TTLPlugin",),
    "stores.contract": (
        "Applied",
        "Conflicted",
        "Delete",
        "Entry",
        "Head",
        "Put",
        "Record",
        "Store",
        "Unknown",
    ),
    "stores.opening": ("open_store",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> _typing.Any:
    if name in {"sync", "testing"}:
        return _importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        text = f"module {__name__!r} has no attribute {name!r}"
        # With the module, from which Python suggests a similar name.
        raise AttributeError(text, name=name, obj=_importlib.import_module(__name__))
    value = getattr(_importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
