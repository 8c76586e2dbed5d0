"""Three processes have the same jobs; the leader is killed. No second is fired twice, none is lost.

Run it with `python examples/schedule.py`.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jobsync import Database, HistoryEntry, JobContext, SchedulerPlugin

PROCESSES = 3
BEFORE, AFTER = 2, 5
"""Runs of the clock job before the leader is killed, and in all."""
TIMING: dict[str, Any] = {"heartbeat_interval": 1, "worker_timeout": 4}


def build_scheduler() -> SchedulerPlugin:
    """Return the jobs that every process has."""
    scheduler = SchedulerPlugin(timezone="Europe/Berlin", **TIMING)

    # Every second. What nobody could fire is made up for, one run after the other.
    @scheduler.job("* * * * * *", overlap="queue", misfire="all")
    def clock(_: Database, context: JobContext) -> None:
        print(f"  process {os.getpid()}: {context.scheduled_at:%H:%M:%S}", flush=True)

    # Only when it is asked to.
    @scheduler.job("@yearly", enabled=False, retries=2)
    async def measure(_: Database, context: JobContext) -> int:
        return int(context["size"]) ** 2

    # Every three seconds: runs another job, and uses its result.
    @scheduler.job("@every 3s", timeout=30)
    async def report(_: Database, context: JobContext) -> str:
        return f"the area is {await context.scheduler.run_job('measure', {'size': 12})}"

    return scheduler


async def work(url: str) -> None:
    """Run jobs until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with Database(url, plugins=[build_scheduler()]):
        await stopping.wait()


def run_child(url: str) -> None:
    """Run one process."""
    asyncio.run(work(url))


async def find_leader(scheduler: SchedulerPlugin) -> int:
    """Wait until a process leads; return its number."""
    while True:
        for member in await scheduler.members():
            if member.holds:
                return int(member.facts["pid"])
        await asyncio.sleep(0.05)


async def wait_for_runs(scheduler: SchedulerPlugin, count: int) -> None:
    """Wait until the clock job has ended so often."""
    done = 0
    while done < count:
        await asyncio.sleep(0.05)
        jobs = {job.name: job for job in await scheduler.list_jobs()}
        done = jobs["clock"].successes if "clock" in jobs else 0


async def watch(url: str, workers: Sequence[BaseProcess]) -> bool:
    """Kill the leader, read the history; return whether each second was fired once."""
    for worker in workers:
        worker.start()
    # This process only watches: it has no jobs, and is not a candidate.
    observer = SchedulerPlugin(enable_coordinator=False, **TIMING)
    async with Database(url, plugins=[observer]):
        await wait_for_runs(observer, BEFORE)
        leader = await find_leader(observer)
        os.kill(leader, signal.SIGKILL)
        print(f"killed the leader, process {leader}")
        await wait_for_runs(observer, AFTER)
        await observer.disable_job("clock", "the demo is over")
        history = await observer.job_history("clock")
        reports = await observer.job_history("report", status="success")
    return check(history) and bool(reports)


def check(history: Sequence[HistoryEntry]) -> bool:
    """Print what was fired; return whether no second is missing or was fired twice."""
    instants = [int(entry.scheduled_time) for entry in reversed(history)]
    seconds = range(instants[0], instants[-1] + 1)
    again = sum(entry.resumed > 0 for entry in history)
    print(f"the history has {len(instants)} runs in {len(seconds)} seconds")
    print(f"{again} were run again, because their process died")
    is_complete = instants == list(seconds) and all(entry.count == 1 for entry in history)
    print("each second was fired once" if is_complete else f"NOT ONCE EACH: {instants}")
    return is_complete


def main() -> int:
    """Run the processes; return 0 if each second was fired once."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'demo.db'}"
        print(f"{PROCESSES} processes have the same jobs in one SQLite file")
        workers = [spawn.Process(target=run_child, args=(url,)) for _ in range(PROCESSES)]
        try:
            is_complete = asyncio.run(watch(url, workers))
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
                worker.join()
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
