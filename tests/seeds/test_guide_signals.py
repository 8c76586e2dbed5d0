"""The guide's SIGTERM handler, as it is printed, interrupts any call of a job.

It leaves the job from inside that call. Tasks that were added and not yet marked as done stay
unmarked, are in `incomplete_tasks`, and are done again by another node.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from guide import PYTHON
from psycopg import sql
from servers import Locate
from teams import start_team

from jobsync import Job

_numbers = itertools.count()
ROOT = Path(__file__).parents[1]

# What the reader's program does when the signal arrives; it reports each step.
_PROCESS = {
    "add_task": """
        for number in itertools.count():
            if job.can_claim_task(Task(number)):
                report("adding", number)
                job.add_task(Task(number))
                report("added", number)
    """,
    "write_audit": """
        for number in itertools.count():
            wanted = range(number * 20, number * 20 + 20)
            for task in wanted:
                report("adding", task)
            batch = [task.id for task in job.add_tasks(wanted)]
            for task in batch:
                report("added", task)
            job.write_audit()
            for task in batch:
                report("marked", task)
    """,
    "a wait": """
        for number in range(20):
            if job.can_claim_task(Task(number)):
                job.add_task(Task(number))
                report("added", number)
        report("adding", None)
        threading.Event().wait()
    """,
    "a wait for others": """
        job.add_task(Task(0))
        report("added", 0)
        # Another node runs a task of the list and does not finish it.
        for task in job.tasks(["in-hand"]):
            raise AssertionError(task)
    """,
}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A store that no other test uses."""
    return locate(request.param)


@pytest.fixture
def patience(full_scale: bool) -> float:
    """Seconds within which the program ends; more on a busy machine."""
    return 5 if full_scale else 15


class Program:
    """The guide's block about signals, in its own process."""

    def __init__(self, url: str, process: str) -> None:
        program = f"""
            import itertools, json, sys, threading
            from guide import World
            from jobsync import Task

            def report(what, task):
                print(json.dumps([what, task]), flush=True)

            def process_tasks(job):
                {textwrap.indent(textwrap.dedent(process), " " * 16).strip()}

            World(site="test").run(24, process_tasks=process_tasks)
        """
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "support"),
                "SYNC_SQL_URL": url,
                "SYNC_TOTAL_TOKENS": "60",
                "SYNC_HEARTBEAT_INTERVAL": "1",
                "SYNC_HEARTBEAT_TIMEOUT": "4",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.steps: list[tuple[str, object]] = []

    def read(self, count: int) -> None:
        """Wait until it has reported `count` steps."""
        assert self.process.stdout is not None
        for _ in range(count):
            if not (line := self.process.stdout.readline()):
                assert self.process.stderr is not None
                raise AssertionError(self.process.stderr.read())
            self.steps.append(tuple(json.loads(line)))

    def interrupt(self, patience: float, *signals: signal.Signals) -> None:
        """Send one or more signals, and wait for the end."""
        for each in signals or (signal.SIGTERM,):
            self.process.send_signal(each)
        code = self.process.wait(patience)
        # Not with `communicate`, which loses what was read ahead.
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        assert code == 0, self.process.stderr.read()
        self.steps += [tuple(json.loads(line)) for line in self.process.stdout]

    def about(self, what: str) -> set[str]:
        """Return the tasks for which it has reported a step."""
        return {str(task) for step, task in self.steps if step == what}


@contextmanager
def running(url: str, process: str) -> Iterator[Program]:
    """Run the program; it ends with the test."""
    program = Program(url, process)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


def do_again(job: Job, tasks: set[str]) -> set[str]:
    """Do the remaining tasks on another node; return those that were done."""
    return {str(task.id) for task in job.tasks(sorted(tasks))}


@pytest.mark.parametrize("call", ["add_task", "write_audit", "a wait"])
def test_the_handler_ends_the_program_and_loses_nothing(
    url: str, call: str, patience: float
) -> None:
    """Whatever it interrupts; tasks that are not marked are done again elsewhere."""
    with start_team(url) as team:
        with running(url, _PROCESS[call]) as program:
            program.read(21 if call == "a wait" else 200)
            program.interrupt(patience)
        added, marked = program.about("added"), program.about("marked")
        # The outcome of a call in flight is unknown: its task is done or it is not.
        under_way = program.about("adding")
        job = team.add("b", settings={"reclaim_after": 0.1})
        audited = {row["task_id"] for row in job.get_audit()}
        incomplete = {row["task_id"] for row in job.incomplete_tasks()}
        assert marked <= audited <= marked | under_way
        assert len(audited - marked) <= (20 if call == "write_audit" else 0)
        assert added - audited <= incomplete <= (added | under_way) - audited
        assert do_again(job, added) == added - audited
        assert {row["task_id"] for row in job.get_audit()} >= added


def test_waiting_for_other_nodes_is_interrupted_too(url: str, patience: float) -> None:
    """For example in `tasks`, which waits until all tasks are done."""
    with start_team(url) as team:
        other = team.add("other")
        other.add_task("in-hand")
        other.register_task_lock("0", "worker-01")
        with running(url, _PROCESS["a wait for others"]) as program:
            program.read(1)
            program.interrupt(patience)
        assert {row["task_id"] for row in other.incomplete_tasks()} == {"0", "in-hand"}


def test_a_frozen_store_does_not_block_the_program(
    request: pytest.FixtureRequest, patience: float
) -> None:
    """The program still ends; its claims are there when the store continues."""
    server = request.getfixturevalue("postgres")
    schema = f"signals_{os.getpid()}_{next(_numbers)}"
    url = f"{server.url}?schema={schema}"
    with running(url, _PROCESS["add_task"]) as program:
        program.read(50)
        with psycopg.connect(server.url) as blocker:
            table = sql.Identifier(schema, "jobsync_record")
            blocker.execute(sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(table))
            program.interrupt(patience)
    with start_team(url) as team:
        job = team.add("b")
        incomplete = {row["task_id"] for row in job.incomplete_tasks()}
        added = program.about("added")
        assert added <= incomplete <= added | program.about("adding")


def test_two_signals_work_like_one(url: str, patience: float) -> None:
    """The second comes while the handler is leaving."""
    with running(url, _PROCESS["add_task"]) as program:
        program.read(50)
        program.interrupt(patience, signal.SIGTERM, signal.SIGINT)


def test_the_block_is_the_guides() -> None:
    """The one with the handler."""
    assert "def signal_handler(signum, frame):" in PYTHON[24]
