"""A process that runs scheduled jobs, and reports each attempt of them.

Its wall clock may be wrong. Run by `scheduler_processes`. SIGTERM makes it stop in good order.
"""

import asyncio
import itertools
import signal
import time
from typing import Any

import msgspec
from worker_protocol import FactWriter, WorkerOptions, read_options

from jobsync import Components, Database, Event, JobContext, SchedulerPlugin
from jobsync.core.clock import SystemClock, Wall

__all__ = ["JOBS", "SchedulerOptions", "SkewedClock"]

EVENTS = ("job-resumed", "job-lost", "job-executed", "clock-vetoed")

JOBS: dict[str, dict[str, Any]] = {
    "skipping": {"overlap": "skip"},
    "queueing": {"overlap": "queue", "misfire": "all", "max_catch_up": 5},
    "allowing": {"overlap": "allow"},
    "failing": {"overlap": "skip", "retries": 1, "backoff": lambda _: 0.05},
}
"""The options of the jobs; all are due every second."""


class SchedulerOptions(WorkerOptions, frozen=True, kw_only=True):
    """The options of a process."""

    settings: dict[str, Any]
    """Of the scheduler."""
    skew: float = 0.0
    """Seconds that its wall clock is ahead."""


class SkewedClock(SystemClock):
    """The machine's clocks, with a wall clock that is wrong."""

    def __init__(self, skew: float) -> None:
        self._skew = skew

    def wall(self) -> Wall:
        return super().wall() + self._skew


class SchedulerWorker:
    """The scheduler of this process."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._report = FactWriter(options.facts, options.name).report
        self._stopping = asyncio.Event()
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Fire jobs until told to stop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stopping.set)
        scheduler = SchedulerPlugin(
            jobs={
                name: {"schedule": "* * * * * *", "action": self._act, **job}
                for name, job in JOBS.items()
            },
            **self._options.settings,
        )
        for name in EVENTS:
            scheduler.on(f"plg:scheduler:{name}", self._report_event)
        components = msgspec.structs.replace(
            Components.system(), clock=SkewedClock(self._options.skew)
        )
        async with Database(self._options.url, components=components, plugins=[scheduler]):
            self._report("joined", worker=scheduler.worker_id)
            await self._stopping.wait()
        self._report("left")

    def _report_event(self, event: Event) -> None:
        self._report(event.name.rpartition(":")[2], **msgspec.to_builtins(event))

    async def _act(self, _: Database, context: JobContext) -> int:
        instant = int(context.scheduled_time)
        about = {
            "number": next(self._numbers),
            "job": context.job_name,
            "instant": instant,
            "id": context.execution_id,
            "attempt": context.attempt,
        }
        self._report("begun", **about, real_time=time.time())
        try:
            # Every fifth run takes longer than the time between two instants.
            await asyncio.sleep(1.5 if instant % 5 == 0 else 0.02)
            if context.job_name == "failing" and (instant % 4 == 0 or context.attempt == 1):
                raise ValueError("boom")
        finally:
            self._report("ended", **about)
        return instant


if __name__ == "__main__":
    asyncio.run(SchedulerWorker(read_options(SchedulerOptions)).run())
