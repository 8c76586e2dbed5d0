"""Nodes that share the tasks of a job, each a real process, and the check of what they did."""

import itertools
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import job_worker
import msgspec
from processes import ProcessGroup, WorkerProcess
from waiting import until
from worker_protocol import Fact

from jobsync import CoordinationConfig, Job

__all__ = ["JobProcesses", "TaskReport", "check_tasks"]

DAY = date(2026, 1, 5)


class JobProcesses(ProcessGroup[WorkerProcess]):
    """Nodes on one store.

    Args:
        url: the store.
        folder: where their facts and logs are kept.
        loop: how they go through the tasks.
        tasks: how many there are.
        seconds: how long each takes.
        settings: of all of them.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        loop: job_worker.Loop,
        *,
        tasks: int = 0,
        seconds: float = 0.005,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, WorkerProcess)
        self.tasks = job_worker.name_tasks(tasks)
        self._url = url
        self._settings = dict(settings or {})
        self._options = {
            "url": url,
            "loop": loop,
            "tasks": tasks,
            "seconds": seconds,
            "settings": self._settings,
        }

    def freeze(self, worker: WorkerProcess) -> float:
        """Freeze a node; return when.

        Not in the midst of a write to a file: nobody else could write then.
        """
        while True:
            frozen_at = worker.freeze()
            if _can_be_written(self._url):
                return frozen_at
            worker.thaw()

    async def prepare(self, count: int, **options: Any) -> list[WorkerProcess]:
        """Start processes that enter the job when they are told to go."""
        options = {**self._options, **options}
        workers = [self.launch(job_worker.__file__, "node", **options) for _ in range(count)]
        await self.reported("started", workers)
        return workers

    async def start(self, count: int, **options: Any) -> list[WorkerProcess]:
        """Start processes that enter the job all at once; options may replace those of all."""
        return await self.release(await self.prepare(count, **options))

    def facts(self, *what: str) -> list[Fact]:
        """Return what was reported, of some kinds or all, in the order of the file.

        Raises:
            AssertionError: a process failed, or died although nobody killed it.
        """
        self.check_exits()
        return super().facts(*what)

    async def shared(self, workers: Sequence[WorkerProcess], since: float = 0.0) -> None:
        """Wait until exactly one worker may claim each task, as they all report."""

        def is_shared() -> bool:
            facts = [worker.last("may claim") for worker in workers]
            claimable = [task for fact in facts for task in fact["tasks"]]
            is_late = all(fact["asked_at"] >= since for fact in facts)
            return is_late and sorted(claimable) == self.tasks and all(f["tasks"] for f in facts)

        await self.reported("may claim", workers)
        await until(is_shared, f"{workers} share all tasks")

    def read_audit(self) -> tuple[dict[str, str], dict[str, str]]:
        """Read the states of the tasks audited as done, and of the other claimed ones."""
        with Job(
            "auditor",
            "tests",
            coordination_config=CoordinationConfig(**self._settings),
            url=self._url,
            date=DAY,
            observer=True,
            wait_on_enter=0,
        ) as job:
            done = {line["task_id"]: line["state"] for line in job.get_audit()}
            return done, {line["task_id"]: line["state"] for line in job.incomplete_tasks()}

    def find_failures(self) -> list[str]:
        """Return what workers wrote to stderr, and the failures of their nodes."""
        found = [f"{each}: {each.log}" for each in self.workers if each.log]
        return found + [f"node failed: {fact}" for fact in self.facts("jobs:node-failed")]


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the tasks.

    A task that an interrupted worker had in flight may be done again, and nothing else.
    """

    twice: list[str]
    """Done twice, although not in flight at an interruption."""
    never: list[str]
    again: list[str]
    """Done again, after an interruption."""
    overlapping: list[str]
    """Done by two workers at the same time, although not in flight at an interruption."""


def check_tasks(
    tasks: Sequence[str],
    facts: Sequence[Fact],
    interruptions: Mapping[str, float],
    loop: job_worker.Loop,
) -> TaskReport:
    """Return which tasks were done twice or never, by the workers' own records.

    Args:
        tasks: all of them.
        facts: what the workers reported.
        interruptions: when workers were killed or frozen, by name.
        loop: how they went through the tasks.
    """
    in_flight = {
        task for who, at in interruptions.items() for task in _in_flight(facts, who, at, loop)
    }
    begun = Counter(fact["task"] for fact in facts if fact.what == "begun")
    ended = {fact["task"] for fact in facts if fact.what == "ended"}
    repeated = {task for task, count in begun.items() if count > 1}
    return TaskReport(
        twice=sorted(repeated - in_flight),
        never=sorted(set(tasks) - ended),
        again=sorted(repeated & in_flight),
        overlapping=sorted(_overlapping(facts) - in_flight),
    )


def _in_flight(facts: Sequence[Fact], who: str, at: float, loop: job_worker.Loop) -> set[str]:
    """Return the task that a worker had in flight at a moment, or two if it may be either.

    A task that was claimed and not yet begun shows as the first that the worker begins later. With
    `job.tasks` a task is in flight until it is marked as done, when the next one is asked for.
    """
    own = [fact for fact in facts if fact.who == who]
    before = [fact for fact in own if fact.at < at]
    last = next((f for f in reversed(before) if f.what in {"claims", "begun", "ended"}), None)
    if last is not None and last.what != "ended":
        return {last["task"]}
    later = (f for f in own if f.at >= at and f.what in {"claims", "begun"})
    unmarked = [last] if last is not None and loop == "tasks" else []
    return {fact["task"] for fact in (*unmarked, *itertools.islice(later, 1))}


def _overlapping(facts: Sequence[Fact]) -> set[str]:
    """Return the tasks that a worker began while another was doing them."""
    active: dict[str, set[str]] = {}
    found = set()
    for fact in facts:
        if fact.what == "begun":
            active.setdefault(fact["task"], set()).add(fact.who)
            if len(active[fact["task"]]) > 1:
                found.add(fact["task"])
        elif fact.what == "ended":
            active.get(fact["task"], set()).discard(fact.who)
    return found


def _can_be_written(url: str) -> bool:
    """Whether nobody has locked a store; only SQLite's files can be."""
    path = url.removeprefix("sqlite:///")
    for name in (path, f"{path}-sessions") if path != url else ():
        with closing(sqlite3.connect(name, timeout=1, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            connection.rollback()
    return True
