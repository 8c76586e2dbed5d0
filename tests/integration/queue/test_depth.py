"""The cost of a claim does not grow with waiting or handled messages, nor with unknown tasks."""

import contextlib
import itertools
import sqlite3
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest
from queue_processes import QueueProcesses
from waiting import until

from jobsync import Components, open_store
from jobsync.queue.backend import QueueBackend, Settlement
from jobsync.queue.opening import open_backend
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.sqlite_places import SQL as SQLITE
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.sql import Parameters, PostgresAccess, Steps

T = TypeVar("T")

BATCH = 100
EMPTY = (None, (0,), (0, 0, None, None, None, None, 0))
"""What statements return if there is nothing to claim."""
_numbers = itertools.count()

FILL = """
INSERT INTO jobsync_message (queue, id, state, due, payload, max_attempts)
SELECT 'default/tasks', 'm' || n, 'ready', clock_timestamp(),
  json_build_object('id', 'm' || n, 'n', n, 'by', 'test', 'kind', 'plain')::text, 4
FROM generate_series(1, %s) AS n
"""

PLACED = """
INSERT INTO jobsync_message
  (queue, id, state, due, payload, max_attempts, format, priority, group_name)
SELECT 'default/tasks', 'm' || n, {state}, clock_timestamp(),
  json_build_object('id', 'm' || n, 'n', n, 'by', 'test', 'kind', 'plain')::text, 4, 2,
  {priority}, {group}
FROM generate_series(1, %s) AS n
"""
ADD_GROUPS = """
INSERT INTO jobsync_group (queue, name, heads, added)
SELECT DISTINCT queue, group_name, 1, 0 FROM jobsync_message WHERE group_name IS NOT NULL
"""
TASKED = """
INSERT INTO jobsync_message (queue, id, state, due, payload, max_attempts, format, task, priority)
SELECT 'default/tasks', 'm' || n,
  CASE WHEN n %% 20 = 0 THEN 'ready' WHEN n %% 10 < 4 THEN 'task_ready'
    WHEN n %% 10 < 7 THEN 'task_waiting' ELSE 'task_ranked' END, clock_timestamp(),
  json_build_object('id', 'm' || n, 'n', n, 'by', 'test', 'kind', 'plain')::text, 4, 3,
  CASE WHEN n %% 20 = 0 THEN '' WHEN n %% 10 = 0 THEN 'known' ELSE 'unknown' END,
  CASE WHEN n %% 10 < 7 THEN 0 ELSE 5 END
FROM generate_series(1, %s) AS n
"""
"""Most messages are of a task that is not claimed."""

KNOWN = {"", "known"}

FILLS: dict[str, tuple[QueueOrder, str]] = {
    "unknown tasks": ("fifo", TASKED),
    "lifo": ("lifo", FILL),
    "priority": (
        "priority",
        PLACED.format(state="'ranked'", priority="n %% 100 + 1", group="NULL"),
    ),
    "groups": (
        "fifo",
        PLACED.format(
            state="CASE WHEN n %% 10 = 1 THEN 'ready' ELSE 'blocked' END",
            priority="0",
            group="'group-' || n / 10",
        ),
    ),
    "one group first": (
        "fifo",
        PLACED.format(
            state="CASE WHEN n %% 10 = 0 THEN 'ready' ELSE 'blocked' END",
            priority="0",
            group="CASE WHEN n %% 10 <> 0 THEN 'one' END",
        ),
    ),
}
"""Orders of queues, and how they are filled. If there are groups or tasks, a tenth can be
claimed."""


class Counting(PostgresAccess):
    """Counts the buffers of claims: explains each first, and rolls that back."""

    def __init__(self, inner: PostgresAccess, admin: psycopg.Connection[Any]) -> None:
        self.schema = inner.schema
        self.channel = inner.channel
        self.buffers: list[int] = []
        self.is_counting = False
        self._inner = inner
        self._admin = admin

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        if self.is_counting and "SKIP LOCKED" in statement and "late AS" in statement:
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}".encode()
            row = self._admin.execute(explain, parameters).fetchone()
            self._admin.rollback()
            assert row is not None
            plan = row[0][0]["Plan"]
            self.buffers.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return await self._inner.run(statement, parameters, place)

    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        return await self._inner.run_steps(build, place)

    async def run_and_notify(
        self, quietly: str, loudly: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        return await self._inner.run_and_notify(quietly, loudly, parameters, topic)

    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        await self._inner.copy_and_notify(statement, rows, topic)

    def wake(self, topic: str) -> None:
        self._inner.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        await self._inner.wait(topic, timeout)


class Seen(StoreDecorator):
    """A store whose SQL access counts buffers."""

    access: Counting

    @property
    def sql(self) -> Counting:
        return self.access


async def handle(port: QueueBackend, batches: int, tasks: Collection[str] | None) -> None:
    """Claim and complete."""
    for _ in range(batches):
        claimed = await port.claim(BATCH, session="me", visibility=600, tasks=tasks)
        assert len(claimed.messages) == BATCH
        ends = [Settlement(receipt=each.receipt, move="complete") for each in claimed.messages]
        assert all(await port.settle(ends))


@contextlib.contextmanager
def keep_snapshot(url: str, *, is_kept: bool) -> Iterator[None]:
    """Keep a transaction open, so that the server keeps all deleted rows."""
    if not is_kept:
        yield
        return
    with psycopg.connect(url) as stranger:
        stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        stranger.execute("SELECT count(*) FROM jobsync_schema")
        yield


async def measure(
    url: str,
    depth: int,
    batches: int,
    *,
    old_snapshot: bool = False,
    fill: str = FILL,
    order: QueueOrder = "fifo",
    tasks: Collection[str] | None = None,
) -> float:
    """Handle some of many messages; return the buffers of a claim at the end."""
    components = Components.system()
    inner = await open_store(url)
    with psycopg.connect(url) as admin:
        admin.execute(fill.encode(), [depth])
        admin.execute(ADD_GROUPS)
        admin.commit()
        # A vacuum between the fill and the count changes how many buffers are read.
        for table in ("message", "claim", "group"):
            admin.execute(f"ALTER TABLE jobsync_{table} SET (autovacuum_enabled = off)")
        admin.execute("ANALYZE jobsync_message")
        admin.commit()
        store = Seen(inner)
        assert isinstance(inner.sql, PostgresAccess)
        store.access = Counting(inner.sql, admin)
        port = open_backend(store, "default/tasks", components, order=order)
        with keep_snapshot(url, is_kept=old_snapshot):
            await handle(port, batches, tasks)
            store.access.is_counting = True
            await handle(port, 5, tasks)
    await inner.close()
    return statistics.median(store.access.buffers)


async def test_a_claim_reads_no_more_in_a_deep_queue(
    postgres: Any, full_scale: bool, proof: Any
) -> None:
    """At most 1.2 times the buffers at 100 times the depth; 1.5 times with an old snapshot."""
    few, many, batches = (10_000, 1_000_000, 50) if full_scale else (2_000, 20_000, 14)
    urls = [postgres.create_database(f"depth_{next(_numbers)}") for _ in range(3)]
    shallow = await measure(urls[0], few, batches)
    deep = await measure(urls[1], many, batches)
    old = await measure(urls[2], many, batches, old_snapshot=True)
    proof.record("buffers of a claim", few=few, many=many, found=[shallow, deep, old])
    assert deep <= 1.2 * shallow
    assert old <= 1.5 * shallow


@pytest.mark.parametrize("name", FILLS)
async def test_a_claim_reads_no_more_whatever_the_order_and_the_groups(
    name: str, postgres: Any, full_scale: bool, proof: Any
) -> None:
    """At most 1.3 times the buffers at 10 times the depth, or 100 times at full scale."""
    order, fill = FILLS[name]
    few, many, batches = (20_000, 1_000_000, 8) if full_scale else (15_000, 60_000, 4)
    urls = [postgres.create_database(f"depth_{next(_numbers)}") for _ in range(2)]
    tasks = KNOWN if fill == TASKED else None
    shallow = await measure(urls[0], few, batches, fill=fill, order=order, tasks=tasks)
    deep = await measure(urls[1], many, batches, fill=fill, order=order, tasks=tasks)
    proof.record("buffers of a claim", order=name, few=few, many=many, found=[shallow, deep])
    assert deep <= 1.3 * shallow


def count_steps(path: Path, depth: int) -> dict[str, int]:
    """Return the steps of each statement of a claim beside messages of an unknown task."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        now = "0, 'x', 'default/tasks', '{}', 4, 0.0, 0.0, 3"
        for state, column in (("task_ready", 0), ("task_waiting", 0), ("task_ranked", 5)):
            connection.execute(
                "INSERT INTO jobsync_message (boot, session, queue, payload, max_attempts, due,"
                " enqueued, format, wakes, state, priority, task, id)"
                f" WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n LIMIT {depth})"
                f" SELECT {now}, 0.0, '{state}', {column}, 'unknown', '{state}' || n FROM n"
            )
        parameters = {"queue": "default/tasks", "tasks": '["a","b"]', "plain": True, "limit": 100}
        parameters |= {"suspects": False, "boot": 0, "mono": 10.0, "now": 10.0}
        steps = {}
        for name in SQLITE:
            if name.startswith(("select_", "promote", "has_waiting", "outlook", "task_outlook")):
                ticks: list[str] = []
                connection.set_progress_handler(partial(ticks.append, name), 1)
                assert connection.execute(SQLITE[name], parameters).fetchone() in EMPTY
                steps[name] = len(ticks)
                connection.set_progress_handler(None, 0)
    return steps


async def test_messages_of_unknown_tasks_cost_a_claim_on_sqlite_nothing(tmp_path: Path) -> None:
    """Each statement takes as many steps beside 30,000 of them as beside none."""
    found = []
    for depth in (1, 10_000):
        path = tmp_path / f"{depth}.db"
        await (await open_store(f"sqlite:///{path}")).close()
        found.append(count_steps(path, depth))
    assert len(found[0]) >= 14
    assert found[0] == found[1]


async def test_a_worker_of_a_deep_queue_is_small(
    postgres: Any, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Under 200 MB, however many messages wait."""
    depth = 1_000_000 if full_scale else 20_000
    url = postgres.create_database(f"depth_{next(_numbers)}")
    await (await open_store(url)).close()
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(FILL, [depth])
    async with QueueProcesses(url, tmp_path / "facts", concurrency=10) as processes:
        (worker,) = await processes.start(1)
        await until(lambda: len(processes.facts("ended")) >= 1000, "some are handled")
        status = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="ascii")
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    proof.record("memory of a worker", depth=depth, megabytes=round(peak / 1024))
    assert peak < 200 * 1024
