"""What a process reports in its session about its work on queues.

On its own because workers write it and status readers read it, and neither knows the other.
"""

from collections.abc import Mapping

import msgspec

from jobsync.core.codec import Json

__all__ = ["WorkerStatus", "build_worker_facts", "read_worker_statuses"]

_FACT_PREFIX = "queue:"


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process's work on a queue, as its session reports it.

    Reported when the process starts, pauses and stops, so that readers can distinguish a
    queue with busy workers from one without workers. Each report costs one heartbeat.
    """

    concurrency: int
    """How many handlers it runs at once."""
    is_paused: bool = False
    """Whether this process alone claims nothing for now."""


def build_worker_facts(queue: str, status: WorkerStatus | None) -> dict[str, Json]:
    """Return the session facts to report; without a status, the process no longer works."""
    return {f"{_FACT_PREFIX}{queue}": None if status is None else msgspec.to_builtins(status)}


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
