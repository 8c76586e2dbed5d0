"""What a process reports in its session about its work on queues.

On its own because workers write it and status readers read it, and neither knows the other.
"""

from collections.abc import Collection, Mapping

import msgspec

from jobsync.core.codec import Json
from jobsync.queue.limits import QueueLimits

__all__ = [
    "ReportedLimit",
    "WorkerStatus",
    "build_worker_facts",
    "limit_tasks",
    "read_worker_statuses",
    "report_limits",
]

_FACT_PREFIX = "queue:"
_MAX_TASKS_SIZE = 4_000
"""The most bytes of the names of tasks that a session reports."""
_QUOTES = 3
"""The bytes of a name that are not its own."""
_MAX_LIMITS = 50
"""The most limits that a session reports."""


class ReportedLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of a queue or of a task, for people: `why` names it."""

    max_concurrency: int | None = None
    rate: float = 0.0
    """Messages a second; 0 for no limit."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process's work on a queue, as its session reports it.

    Reported when the process starts, pauses and stops, so that readers can distinguish a
    queue with busy workers from one without workers. Each report costs one heartbeat.
    """

    concurrency: int
    """How many handlers it runs at once."""
    is_paused: bool = False
    """Whether this process alone claims nothing for now."""
    tasks: tuple[str, ...] | None = None
    """The tasks whose messages it handles, the empty one for messages without; None for these
    alone. If there are very many, not all are here."""
    has_more_tasks: bool = False
    """Whether it handles messages of tasks that are not listed."""
    limits: dict[str, ReportedLimit] = {}
    """The limits of its tasks by name, and that of the queue under the empty one."""


def report_limits(limits: QueueLimits) -> dict[str, ReportedLimit]:
    """Return the limits to report; of very many, some."""
    found = {"": limits, **limits.tasks} if limits.is_limited else dict(limits.tasks)
    return {
        name: ReportedLimit(max_concurrency=each.max_concurrency, rate=each.rate)
        for name, each in sorted(found.items())[:_MAX_LIMITS]
    }


def limit_tasks(tasks: Collection[str]) -> tuple[tuple[str, ...] | None, bool]:
    """Return the tasks to report, and whether there are more: a session is written often."""
    if {*tasks} == {""}:
        return None, False
    listed: list[str] = []
    size = 0
    for name in sorted(tasks):
        size += len(name.encode()) + _QUOTES
        if size > _MAX_TASKS_SIZE:
            return tuple(listed), True
        listed.append(name)
    return tuple(listed), False


def build_worker_facts(queue: str, status: WorkerStatus | None) -> dict[str, Json]:
    """Return the session facts to report; without a status, the process no longer works."""
    fact = None if status is None else msgspec.to_builtins(status)
    if fact is not None and fact["tasks"] is None:
        del fact["tasks"], fact["has_more_tasks"]
    if fact is not None and not fact["limits"]:
        del fact["limits"]
    return {f"{_FACT_PREFIX}{queue}": fact}


def read_worker_statuses(facts: Mapping[str, Json]) -> dict[str, WorkerStatus]:
    """Return a session's statuses by queue, without those that newer code may have written."""
    statuses = {}
    for name, fact in facts.items():
        if name.startswith(_FACT_PREFIX) and fact is not None:
            try:
                statuses[name.removeprefix(_FACT_PREFIX)] = msgspec.convert(fact, WorkerStatus)
            except msgspec.ValidationError:
                continue
    return statuses
