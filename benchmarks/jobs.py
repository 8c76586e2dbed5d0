"""The cost of sharing tasks, as ratios over bare PostgreSQL within one run.

Bare is hand-written code without exclusion: rows of the same columns into the same table, by a
blocking psycopg connection. Both ways take turns in many short rounds; a ratio is the median of the
rounds' ratios, so that other load on the machine affects both alike.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.table import Row, print_rows, show_progress
from proxy import Proxy
from servers import PostgresServer

from jobsync import Job, Task

ROUNDS = 15
QUESTIONS = 50_000
SINGLES = 200
BATCH = 10_000
MINUTE = 60.0
WARM_UP = 160.0
"""Seconds until statements that come twice a minute have come five times, and are prepared."""

LEAST_QUESTIONS = 400_000
LEAST_RATIO = 0.5
MOST_STATEMENTS = 30


class Bare:
    """Writes the rows of a job with hand-written statements."""

    _ONE = """
    INSERT INTO jobsync_record (key, value, seq, epoch, format, trail)
    VALUES (%s, %s, %s, %s, %s, %s)
    """
    _MANY = """
    INSERT INTO jobsync_record (key, value, seq, epoch, format, trail)
    SELECT * FROM unnest(
      %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::integer[], %s::text[]
    )
    """

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._number = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def rows(self, model: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
        """Return rows like a model, each with its own key."""
        self._number += 1
        key, *rest = model
        return [(f"{key}-{self._number:06d}-{i:06d}", *rest) for i in range(count)]

    def model(self) -> tuple[Any, ...]:
        """Return a row that the library wrote for a claim."""
        row = self._connection.execute(
            "SELECT key, value, seq, epoch, format, trail FROM jobsync_record "
            "WHERE key LIKE 'claim/%' LIMIT 1"
        ).fetchone()
        assert row is not None
        return row

    def insert_each(self, rows: list[tuple[Any, ...]]) -> None:
        """Insert rows, each in a transaction."""
        for row in rows:
            self._connection.execute(self._ONE, row)

    def insert_all(self, rows: list[tuple[Any, ...]]) -> None:
        """Insert rows in one statement."""
        self._connection.execute(self._MANY, [list(column) for column in zip(*rows, strict=True)])


def measure_questions(job: Job) -> Iterator[Row]:
    """Measure how many `can_claim_task` calls one second of CPU time answers."""
    tasks = [Task(f"customer-{number}") for number in range(QUESTIONS)]
    ask = job.can_claim_task
    rounds = []
    for number in range(ROUNDS):
        show_progress(f"can_claim_task: round {number} of {ROUNDS}")
        begun = time.thread_time()
        for task in tasks:
            ask(task)
        rounds.append(QUESTIONS / (time.thread_time() - begun))
    found = statistics.median(rounds)
    yield Row(
        label="can_claim_task",
        text=f"{found:,.0f} a second of CPU",
        budget=f"at least {LEAST_QUESTIONS:,}",
        is_within=found >= LEAST_QUESTIONS,
        value=found,
        better="higher",
    )


def measure_writes(job: Job, bare: Bare) -> Iterator[Row]:
    """Measure claims and audits against bare inserts."""
    job.add_task("model")
    job.write_audit()
    model = bare.model()
    numbers = iter(range(1_000_000))

    def tasks(count: int) -> list[Task]:
        run = next(numbers)
        return [Task(f"customer-{run}-{number}") for number in range(count)]

    def add_each(count: int) -> float:
        wanted = tasks(count)
        seconds = clock(lambda: deque(map(job.add_task, wanted), maxlen=0))
        job.write_audit()
        return seconds

    def add_all(count: int) -> float:
        wanted = tasks(count)
        seconds = clock(lambda: job.add_tasks(wanted))
        job.write_audit()
        return seconds

    def audit(count: int) -> float:
        job.add_tasks(tasks(count))
        return clock(job.write_audit)

    def insert_each(count: int) -> float:
        rows = bare.rows(model, count)
        return clock(lambda: bare.insert_each(rows))

    def insert_all(count: int) -> float:
        rows = bare.rows(model, count)
        return clock(lambda: bare.insert_all(rows))

    yield compare_ways("add_task", "INSERT and commit", SINGLES, add_each, insert_each)
    yield compare_ways(f"add_tasks({BATCH:,})", "unnest insert", BATCH, add_all, insert_all)
    yield compare_ways(f"write_audit, {BATCH:,}", "unnest insert", BATCH, audit, insert_all)


def compare_ways(
    label: str, other: str, count: int, ours: Callable[[int], float], bare: Callable[[int], float]
) -> Row:
    """Do the work both ways in turns; return how fast ours is over bare."""
    spent: tuple[list[float], list[float]] = ([], [])
    # One round more: the first warms up.
    for number in range(ROUNDS + 1):
        show_progress(f"{label}: round {number} of {ROUNDS}")
        for way in (0, 1) if number % 2 else (1, 0):
            spent[way].append((ours, bare)[way](count))
    return compare_spent(label, other, count, spent)


def compare_spent(
    label: str, other: str, count: int, spent: tuple[list[float], list[float]]
) -> Row:
    """Return how fast ours is over bare, by the seconds of each round but the first."""
    ratios = [theirs / ours for ours, theirs in zip(spent[0][1:], spent[1][1:], strict=True)]
    ratio = statistics.median(ratios)
    rates = [count / statistics.median(way[1:]) for way in spent]
    return Row(
        label=label,
        text=f"{rates[0]:,.0f} a second, {ratio:.2f}x of {other} ({rates[1]:,.0f})",
        budget=f"at least {LEAST_RATIO:.2f}x",
        is_within=ratio >= LEAST_RATIO,
        value=rates[0],
        bare=rates[1],
        better="higher",
    )


def clock(work: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure_idle(url: str, port: int) -> Iterator[Row]:
    """Count the statements of a leader and a follower in an idle minute."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy("127.0.0.1", port)) for _ in range(2)]
        jobs = []
        for number, proxy in enumerate(proxies):
            through = url.replace(f":{port}/", f":{proxy.port}/")
            jobs.append(stack.enter_context(Job(f"idle-{number}", "bench", url=through)))
        time.sleep(WARM_UP)
        before = [proxy.requests for proxy in proxies]
        for second in range(int(MINUTE)):
            show_progress(f"idle: second {second} of {MINUTE:.0f}")
            time.sleep(1)
        counts = [proxy.requests - was for proxy, was in zip(proxies, before, strict=True)]
        assert [job.am_i_leader() for job in jobs] == [True, False]
    for who, count in zip(("leader", "follower"), counts, strict=True):
        yield Row(
            label=f"idle {who}",
            text=f"{count} statements a minute",
            budget=f"at most {MOST_STATEMENTS}",
            is_within=count <= MOST_STATEMENTS,
            value=count,
            better="lower",
        )


def measure(only: str | None) -> Iterator[Row]:
    """Measure everything, or one part of it."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        url = server.create_database("bench")
        if only in {None, "work"}:
            with Job("worker-01", "bench", url=url) as job:
                bare = Bare(url)
                yield from measure_questions(job)
                yield from measure_writes(job, bare)
                bare.close()
        if only in {None, "idle"}:
            port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
            yield from measure_idle(server.create_database("idle"), port)


def main() -> int:
    """Measure, and compare with the budgets."""
    parser = argparse.ArgumentParser(description="the cost of sharing tasks on PostgreSQL")
    parser.add_argument("--only", choices=["work", "idle"], help="measure this part alone")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    options = parser.parse_args()
    return 0 if print_rows(measure(options.only), as_json=options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
