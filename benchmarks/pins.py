"""The cost of pins and rebalances on PostgreSQL, in one run.

Registering is compared with a bare `unnest` insert of as many rows: a hand-written table of pins,
and a blocking psycopg connection. Both ways take turns in many rounds; a ratio is the median of the
rounds' ratios. Rebalances are measured from the event that causes one until every token is owned
again, in wall time, with a generous budget.
"""

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.jobs import clock, compare_spent
from benchmarks.table import Row, print_rows, show_progress
from servers import PostgresServer

from jobsync import Components, CoordinationConfig, Event, Job

ROUNDS = 9
PINS = 10_000
TOKENS = 50_000
MOST_SECONDS = 5.0


class Bare:
    """Pins in a hand-written table."""

    _TABLE = """
    CREATE TABLE bare_lock (
      task_id text PRIMARY KEY, token_id integer, node_pattern text NOT NULL, reason text,
      created_at timestamptz NOT NULL DEFAULT now(), created_by text, expires_at timestamptz
    )
    """
    _MANY = """
    INSERT INTO bare_lock (task_id, token_id, node_pattern, reason, created_by)
    SELECT * FROM unnest(%s::text[], %s::integer[], %s::text[], %s::text[], %s::text[])
    """

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(self._TABLE)

    def clear(self) -> None:
        """Remove all pins."""
        self._connection.execute("TRUNCATE bare_lock")

    def insert(self, locks: list[tuple[str, str, str]], token_of: Callable[[str], int]) -> None:
        """Insert pins in one statement."""
        rows = [(task, token_of(task), node, why, "worker-01") for task, node, why in locks]
        self._connection.execute(self._MANY, [list(column) for column in zip(*rows, strict=True)])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Fleet:
    """Nodes in this process, and a wait until they have settled."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url = url
        self._stack = stack
        self._changed = threading.Condition()
        self.jobs: list[Job] = []

    def add(self, name: str) -> Job:
        """Enter one more node."""
        components = Components.system()
        components.events.on("jobs:*", self._on_event)
        config = CoordinationConfig(total_tokens=TOKENS)
        job = Job(name, "bench", coordination_config=config, url=self._url, components=components)
        self.jobs.append(self._stack.enter_context(job))
        return job

    def remove(self, job: Job) -> None:
        """Remove a node."""
        self.jobs.remove(job)
        job.__exit__(None, None, None)

    def wait(self, predicate: Callable[[], bool] = lambda: True) -> None:
        """Wait until all tokens are owned and a predicate holds."""

        def is_settled() -> bool:
            return sum(len(job.my_tokens) for job in self.jobs) == TOKENS and predicate()

        with self._changed:
            assert self._changed.wait_for(is_settled, 60)

    def _on_event(self, _: Event) -> None:
        with self._changed:
            self._changed.notify_all()


def measure_registration(job: Job, bare: Bare) -> Iterator[Row]:
    """Measure how fast pins are registered."""
    numbers = iter(range(1_000_000))

    def make() -> list[tuple[str, str, str]]:
        run = next(numbers)
        return [(f"task-{run}-{n}", f"high-mem-{n % 40}", "heavy") for n in range(PINS)]

    spent: tuple[list[float], list[float]] = ([], [])
    # One round more: the first warms up.
    for number in range(ROUNDS + 1):
        show_progress(f"registering: round {number} of {ROUNDS}")
        pins = make()
        bare.clear()
        ways: list[Callable[[], Any]] = [
            lambda: job.register_task_locks_bulk(pins),  # noqa: B023 - called in this round
            lambda: bare.insert(pins, job.task_to_token),  # noqa: B023 - likewise
        ]
        for way in (0, 1) if number % 2 else (1, 0):
            spent[way].append(clock(ways[way]))
        job.clear_all_locks()
    yield compare_spent(f"register {PINS:,} pins", "unnest insert", PINS, spent)


def measure_rebalances(fleet: Fleet) -> Iterator[Row]:
    """Measure the time until every token is owned again."""
    first, second = fleet.jobs

    def pin() -> None:
        first.register_task_locks_bulk([(f"p{n}", "node-2") for n in range(PINS)])
        fleet.wait(lambda: all(second.can_claim_task(f"p{n}") for n in range(0, PINS, 97)))

    def clear() -> None:
        second.clear_all_locks()
        fleet.wait(lambda: abs(len(first.my_tokens) - len(second.my_tokens)) <= 1)

    def join() -> None:
        fleet.add("node-3")
        fleet.wait(lambda: min(len(job.my_tokens) for job in fleet.jobs) >= TOKENS // 3)

    def leave() -> None:
        fleet.remove(fleet.jobs[-1])
        fleet.wait()

    kinds = {"pins appear": pin, "pins go": clear, "a node joins": join, "a node leaves": leave}
    for label, change in kinds.items():
        show_progress(label)
        seconds = clock(change)
        yield Row(
            label=f"rebalance: {label}",
            text=f"{seconds:.2f} s until all of {TOKENS:,} tokens are owned",
            budget=f"at most {MOST_SECONDS:.0f} s",
            is_within=seconds <= MOST_SECONDS,
            value=seconds,
            better="lower",
        )


def measure() -> Iterator[Row]:
    """Measure everything."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        url = server.create_database("pins")
        fleet = Fleet(url, stack)
        job = fleet.add("node-1")
        fleet.wait()
        bare = Bare(url)
        yield from measure_registration(job, bare)
        bare.close()
        fleet.add("node-2")
        fleet.wait(lambda: min(len(job.my_tokens) for job in fleet.jobs) == TOKENS // 2)
        yield from measure_rebalances(fleet)


def main() -> int:
    """Measure, and compare with the budgets."""
    parser = argparse.ArgumentParser(description="pins and rebalances on PostgreSQL")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    return 0 if print_rows(measure(), as_json=parser.parse_args().json) else 1


if __name__ == "__main__":
    sys.exit(main())
