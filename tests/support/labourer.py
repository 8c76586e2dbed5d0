"""A worker that shares tasks, as a process of its own: it does them and tells of it.

Each fact is a line in a file that all workers append to, dated by the clock that all
processes of a machine share; what was told before a SIGKILL is there after it. The tasks
that nobody has told the end of are those that are pending.

Run by `workshop`, which says on standard input when to begin; SIGTERM lets it stop taking
tasks, and so end its loop normally.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Literal

import msgspec

from jobsync import ClaimLost, Components, CoordinationConfig, Event, Job, Task

__all__ = ["Labourer", "Loop", "Orders"]

Loop = Literal["printed", "tasks", "idle"]

logger = logging.getLogger("labourer")


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told at its start."""

    url: str
    node: str
    ledger: str
    """The file that all workers append their facts to."""
    loop: Loop
    tasks: int
    seconds: float
    """What a task takes."""
    settings: dict[str, Any]
    """Of its `CoordinationConfig`."""


class Noted(Job):
    """A job that tells of a claim before it makes it."""

    labourer: "Labourer"

    def add_task(self, task: Task | object) -> None:
        assert isinstance(task, Task)
        self.labourer.say("claims", task=task.id)
        super().add_task(task)


class Labourer:
    """One life of the process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._ledger = os.open(orders.ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._all = [f"task-{number:05d}" for number in range(orders.tasks)]
        self._job: Job | None = None
        self._is_stopping = False

    def say(self, what: str, **facts: object) -> None:
        """Tell a fact, at once and for good."""
        line = {"at": time.monotonic(), "who": self._orders.node, "what": what, **facts}
        os.write(self._ledger, json.dumps(line).encode() + b"\n")

    def live(self) -> None:
        """Work until nothing is left to do, or told to stop."""
        signal.signal(signal.SIGTERM, self._stop)
        self.say("waits", pid=os.getpid())
        sys.stdin.readline()
        loops: dict[Loop, Callable[[], None]] = {
            "printed": self._work_as_printed,
            "tasks": self._work_by_tasks,
            "idle": self._idle,
        }
        loops[self._orders.loop]()
        self.say("ends")

    def _stop(self, *_: object) -> None:
        self.say("told to stop")
        self._is_stopping = True
        if self._job is not None:
            self._job.stop()

    def _enter(self) -> Noted:
        components = Components.system()
        components.events.on("jobs:*", self._hear)
        self.say("enters")
        job = Noted(
            self._orders.node,
            "tests",
            coordination_config=CoordinationConfig(**self._orders.settings),
            url=self._orders.url,
            date=date(2026, 1, 5),
            components=components,
        )
        job.labourer = self
        self._job = job
        return job

    def _hear(self, event: Event) -> None:
        self.say(event.name, **msgspec.to_builtins(event))

    def _work_as_printed(self) -> None:
        """Run the guide's loop; start again, as whatever runs it would, when it lost a claim."""
        while True:
            try:
                return self._process_continuously()
            except ClaimLost as lost:
                self.say("lost", task=lost.task_id, reason=lost.reason)

    def _process_continuously(self) -> None:
        """Do what the guide prints under "Continuous Processing Loop", line by line."""
        get_pending_tasks, process_task = self._get_pending_tasks, self._process_task
        with self._enter() as job:
            self.say("ready", tokens=len(job.my_tokens))
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

    def _work_by_tasks(self) -> None:
        with self._enter() as job:
            self.say("ready", tokens=len(job.my_tokens))
            for task in job.tasks(self._all):
                self._process_task(task.id)

    def _idle(self) -> None:
        """Own tokens, and do nothing with them until told to stop."""
        with self._enter() as job:
            self.say("ready", tokens=len(job.my_tokens))
            while not self._is_stopping:
                asked = time.monotonic()
                mine = [task for task in self._all if job.can_claim_task(task)]
                self.say("may claim", asked=asked, tasks=mine)
                time.sleep(0.05)

    def _get_pending_tasks(self, day: date) -> list[str]:
        """Read which tasks nobody has ended."""
        del day
        lines = map(json.loads, Path(self._orders.ledger).read_bytes().splitlines())
        ended = {line["task"] for line in lines if line["what"] == "ended"}
        self.say("reads", pending=len(self._all) - len(ended))
        return [task for task in self._all if task not in ended]

    def _process_task(self, task: str) -> None:
        self.say("begun", task=task)
        time.sleep(self._orders.seconds)
        self.say("ended", task=task)


if __name__ == "__main__":
    # Events are told as facts; what else is logged is a complaint, and belongs on stderr.
    logging.getLogger("jobsync").addHandler(logging.NullHandler())
    Labourer(msgspec.json.decode(sys.argv[1], type=Orders)).live()
