"""Schedulers in this process, with a clock that a test sets forward, and what they report."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from waiting import until

from jobsync import (
    Components,
    Database,
    Event,
    Misconfigured,
    OutcomeUnknown,
    SchedulerPlugin,
    Unavailable,
)
from jobsync.core.clock import SystemClock, Wall
from jobsync.core.job_state import JobState
from jobsync.scheduler.job_store import JobStore

__all__ = [
    "EVERY_SECOND",
    "NEVER",
    "OUTAGES",
    "QUICK",
    "SettableClock",
    "Stage",
    "fail_once",
    "run_scheduler",
]

EVERY_SECOND = "* * * * * *"
NEVER = "0 0 29 2 *"
"""Not while a test runs, on most days."""
QUICK: dict[str, Any] = {"heartbeat_interval": 0.2, "worker_timeout": 1, "skip_cold_start": True}
OUTAGES: dict[str, Exception] = {
    "silent": Unavailable("the store", "it does not answer"),
    "forbidden": Misconfigured("url", "…", "does not allow this (403)", "allow it"),
    "stored, and the reply is lost": OutcomeUnknown("job", "lost"),
    "never stored, and the reply is lost": OutcomeUnknown("job", "lost"),
}
"""What may happen to a request."""


class SettableClock(SystemClock):
    """The machine's clocks, with a wall clock that can be set."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.ahead = ahead

    def wall(self) -> Wall:
        return super().wall() + self.ahead


class Stage:
    """A database with a scheduler, and the events of it."""

    def __init__(self, database: Database, scheduler: SchedulerPlugin) -> None:
        self.database = database
        self.scheduler = scheduler
        self.events: list[Event] = []
        scheduler.on("plg:scheduler:*", self.events.append)

    def heard(self, name: str, **fields: Any) -> list[Event]:
        """Return the events of a kind with these values."""
        return [
            event
            for event in self.events
            if event.name == f"plg:scheduler:{name}"
            and all(event[field] == value for field, value in fields.items())
        ]

    async def hears(self, name: str, **fields: Any) -> Event:
        """Wait for an event of a kind; return the first."""
        await until(lambda: self.heard(name, **fields), f"{name} {fields}", 20)
        return self.heard(name, **fields)[0]


def fail_once(monkeypatch: pytest.MonkeyPatch, outage: str) -> None:
    """Fail the next request that stores new jobs, in one of the ways of `OUTAGES`."""
    create = JobStore.create_many

    async def fail(jobs: JobStore, states: Mapping[str, JobState]) -> set[str]:
        if not states:
            return set()
        monkeypatch.setattr(JobStore, "create_many", create)
        if outage.startswith("stored"):
            await create(jobs, states)
        raise OUTAGES[outage]

    monkeypatch.setattr(JobStore, "create_many", fail)


@asynccontextmanager
async def run_scheduler(
    url: str,
    jobs: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    clock: SystemClock | None = None,
    prepare: Callable[[SchedulerPlugin], object] = lambda _: None,
    **options: Any,
) -> AsyncIterator[Stage]:
    """Run a scheduler in a database of its own."""
    components = Components.system()
    if clock is not None:
        components = msgspec.structs.replace(components, clock=clock)
    scheduler = SchedulerPlugin(jobs=jobs, **{**QUICK, **options})
    database = Database(url, components=components)
    stage = Stage(database, scheduler)
    prepare(scheduler)
    async with database:
        await database.use_plugin(scheduler)
        yield stage
