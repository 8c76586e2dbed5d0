"""A node of a job as a process of its own: it does tasks and reports them.

The tasks that no node has reported as ended are the pending ones.

Run by `job_processes`. SIGTERM makes it take no more tasks, and so end its loop normally.
"""

import logging
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Literal

import msgspec
from worker_protocol import FactLog, FactWriter, WorkerOptions, read_options

from jobsync import ClaimLost, Components, CoordinationConfig, Event, Job, Task

__all__ = ["JobOptions", "Loop", "name_tasks"]

Loop = Literal["printed", "tasks", "idle"]

logger = logging.getLogger("job_worker")


class JobOptions(WorkerOptions, frozen=True, kw_only=True):
    """The options of a node."""

    loop: Loop
    tasks: int
    seconds: float
    """How long a task takes."""
    settings: dict[str, Any]
    """Of its `CoordinationConfig`."""
    node: str = ""
    """Its name in the fleet, if that is not the one that it reports under."""


class ReportingJob(Job):
    """A job that reports each claim before it makes it."""

    report: Callable[..., None]

    def add_task(self, task: Task | object) -> None:
        assert isinstance(task, Task)
        self.report("claims", task=task.id)
        super().add_task(task)


class JobWorker:
    """The node of this process."""

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._report = FactWriter(options.facts, options.name).report
        self._facts = FactLog(Path(options.facts))
        self._tasks = name_tasks(options.tasks)
        self._job: Job | None = None
        self._is_stopping = False

    def run(self) -> None:
        """Work until nothing is left to do, or told to stop."""
        signal.signal(signal.SIGTERM, self._stop)
        self._report("started")
        sys.stdin.readline()
        loops: dict[Loop, Callable[[], None]] = {
            "printed": self._run_printed_loop,
            "tasks": self._run_tasks_loop,
            "idle": self._idle,
        }
        loops[self._options.loop]()
        self._report("left")

    def _stop(self, *_: object) -> None:
        self._report("told to stop")
        self._is_stopping = True
        if self._job is not None:
            self._job.stop()

    def _enter(self) -> Job:
        components = Components.system()
        components.events.on("jobs:*", self._report_event)
        self._report("enters")
        job = ReportingJob(
            self._options.node or self._options.name,
            "tests",
            coordination_config=CoordinationConfig(**self._options.settings),
            url=self._options.url,
            date=date(2026, 1, 5),
            components=components,
        )
        job.report = self._report
        self._job = job
        return job

    def _report_event(self, event: Event) -> None:
        self._report(event.name, **msgspec.to_builtins(event))

    def _run_printed_loop(self) -> None:
        """Run the guide's loop; start it again when it lost a claim, as a process manager would."""
        while True:
            try:
                return self._process_continuously()
            except ClaimLost as lost:
                self._report("lost", task=lost.task_id, reason=lost.reason)

    def _process_continuously(self) -> None:
        """Do what the guide prints under "Continuous Processing Loop", line by line."""
        get_pending_tasks, process_task = self._get_pending_tasks, self._process_task
        with self._enter() as job:
            self._report("ready", tokens=len(job.my_tokens))
            iteration = 0

            while True:
                iteration += 1
                logger.info(f"Starting iteration {iteration}")  # noqa: G004 - as printed

                # Get pending tasks
                tasks = get_pending_tasks(job.date)

                processed_count = 0
                for task_id in tasks:
                    task = Task(task_id)

                    if job.can_claim_task(task):
                        job.add_task(task)
                        process_task(task_id)
                        processed_count += 1

                # Write audit after each iteration
                if processed_count > 0:
                    job.write_audit()
                    logger.info(f"Processed {processed_count} tasks")  # noqa: G004 - as printed

                # Exit if no tasks found
                if processed_count == 0:
                    logger.info("No more tasks to process")
                    break

                # Brief delay before next iteration
                time.sleep(5)

    def _run_tasks_loop(self) -> None:
        with self._enter() as job:
            self._report("ready", tokens=len(job.my_tokens))
            for task in job.tasks(self._tasks):
                self._process_task(task.id)

    def _idle(self) -> None:
        """Own tokens, and do nothing with them until told to stop."""
        with self._enter() as job:
            self._report("ready", tokens=len(job.my_tokens))
            while not self._is_stopping:
                asked_at = time.monotonic()
                claimable = [task for task in self._tasks if job.can_claim_task(task)]
                self._report("may claim", asked_at=asked_at, tasks=claimable)
                time.sleep(0.05)

    def _get_pending_tasks(self, day: date) -> list[str]:
        """Read which tasks nobody has ended."""
        del day
        ended = {fact["task"] for fact in self._facts.read("ended")}
        self._report("reads", pending=len(self._tasks) - len(ended))
        return [task for task in self._tasks if task not in ended]

    def _process_task(self, task: str) -> None:
        self._report("begun", task=task)
        time.sleep(self._options.seconds)
        self._report("ended", task=task)


def name_tasks(count: int) -> list[str]:
    """Return the names of all tasks."""
    return [f"task-{number:05d}" for number in range(count)]


if __name__ == "__main__":
    # Events are reported as facts; what else is logged is unexpected, and goes to stderr.
    logging.getLogger("jobsync").addHandler(logging.NullHandler())
    JobWorker(read_options(JobOptions)).run()
