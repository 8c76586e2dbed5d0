"""All 53 blocks of the JobSync guide, one after the other on one database.

What a block leaves behind (settings, pins, claims, nodes that have left) is there for the next
one. The tasks of a block have ids of their own, because pins of earlier blocks stay.
"""

import signal
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import pytest
from guide import PYTHON, SQL, SQLITE_SQL, World, read_all_blocks
from servers import Locate

from jobsync import Job, Task

TABLES = (
    "tasks (task_id INTEGER, date DATE, status TEXT, required_node TEXT, requires_gpu BOOLEAN)",
    "task_metadata (task_id INTEGER, date DATE, required_resource TEXT)",
    "results (task_id TEXT UNIQUE, result TEXT, completed_at TIMESTAMP)",
)
DAY = date(2026, 3, 9)
ALL = {1: "process_daily_tasks", 3: "process_with_custom_config", 9: "process_with_lock"}
ALL |= {4: "process_without_coordination", 13: "process_with_static_locks"}
ALL |= {10: "process_with_bulk_locks", 14: "manage_locks_manually", 15: "production_lock_pattern"}
ALL |= {16: "process_gpu_tasks", 18: "process_with_recovery", 21: "continuous_processing"}
ALL |= {22: "main", 23: "process_with_health_logging"}
"""Blocks with a function that does all tasks."""


class Reader:
    """A reader who tries each block on one database.

    Args:
        is_postgres: whether the database understands the guide's SQL as it is printed.
    """

    def __init__(self, *, is_postgres: bool) -> None:
        self.is_postgres = is_postgres
        self.done: set[str] = set()
        """The tasks that must be in the audit in the end."""

    def prepare(self) -> None:
        """Create the reader's own tables."""
        today = datetime.now().astimezone().date()
        with Job("reader", "production") as job:
            for table in TABLES:
                job.connection.execute(f"CREATE TABLE {table}")
            for task, day in ((901, DAY), (902, today)):
                row = [task, day, "pending", "worker-07,worker-08", True]
                job.connection.execute("INSERT INTO tasks VALUES (%s, %s, %s, %s, %s)", row)
            row = [903, today, "gpu"]
            job.connection.execute("INSERT INTO task_metadata VALUES (%s, %s, %s)", row)

    def try_python(self, block: int) -> None:
        """Run a block and what it defines; check that it has done its tasks."""
        world = World([f"b{block}-{number}" for number in range(5)])
        names: dict[str, Any] = {
            "get_todays_heavy_queries": lambda: [911],
            "get_current_heavy_tasks": lambda: [912],
            "get_special_tasks": lambda: [913],
            "query_gpu_requirements": lambda _: [914],
            "need_complete_reset": True,
            "print": world.log.printed,
            "node": "worker-07",
            "reason": "special",
            "region": "eu",
            "instance_id": "i-1",
            "start_health_server": lambda _: None,
        }
        world.run(block, **names)
        self._use(block, world)

    def _use(self, block: int, world: World) -> None:
        if block in ALL:
            world.call(ALL[block])
            assert world.processed == world.tasks
        elif use := USES.get(block):
            use(self, world)
        if "write_audit" in PYTHON[block] and block not in _OF_OTHER_DATES:
            self.done |= {str(task) for task in world.processed}

    def try_sql(self, block: int) -> None:
        """Run a query on a live fleet: as it is printed, or as the reference has it for SQLite."""
        with Job("worker-01", "production") as job:
            job.connection.execute(SQL[block] if self.is_postgres else SQLITE_SQL[block])

    def enter(self, world: World, **options: Any) -> Job:
        """Create a job that a block needs."""
        return world.make_job("worker-01", "production", **options)


_OF_OTHER_DATES = {2}
"""Blocks whose tasks are not in today's audit."""


def _tune(_: Reader, world: World) -> None:
    settings = world.names["coord_config"]
    with Job("worker-01", "production", coordination_config=settings) as job:
        assert len(job.my_tokens) == settings.total_tokens


def _use_history(reader: Reader, world: World) -> None:
    # SQLite compares text, so a date must be passed as a date.
    given = datetime(2026, 3, 9) if reader.is_postgres else DAY  # noqa: DTZ001 - as readers write
    world.call("process_historical_date", given)
    assert world.saved == {901: "result of 901"}


def _call_with_job(name: str) -> Callable[[Reader, World], None]:
    def use(reader: Reader, world: World) -> None:
        with reader.enter(world) as job:
            world.call(name, job)

    return use


def _do_all(name: str) -> Callable[[Reader, World], None]:
    def use(_: Reader, world: World) -> None:
        world.call(name)
        assert set(world.processed) == set(world.tasks)

    return use


def _use_results(name: str) -> Callable[[Reader, World], None]:
    def use(_: Reader, world: World) -> None:
        world.call(name)
        assert len(world.saved or world.batches or world.tasks) > 0

    return use


def _use_safely(reader: Reader, world: World) -> None:
    with reader.enter(world) as job:
        world.call("process_task_safely", 7, job._cn)
    assert world.saved == {7: "result of 7"}


def _use_bulk(reader: Reader, world: World) -> None:
    for register in world.defined["register_locks"]:
        with reader.enter(world) as job:
            register(job)
            assert "913" in {lock["task_id"] for lock in job.list_locks()}


def _use_frequency(reader: Reader, world: World) -> None:
    if reader.is_postgres:
        with reader.enter(world) as job:
            world.call("check_rebalance_frequency", job._cn)
        assert "High rebalance frequency" in str(world.log.lines)


def _use_names(_: Reader, world: World) -> None:
    for name in world.defined["node_name"]:
        with Job(name, "production") as job:
            assert job.my_tokens


def _use_reasons(reader: Reader, world: World) -> None:
    with reader.enter(world, lock_provider=world.names["register_locks"]) as job:
        assert "requires_64gb_ram" in {lock["reason"] for lock in job.list_locks()}


def _use_lifecycle(_: Reader, world: World) -> None:
    world.call("manage_lock_lifecycle")
    assert world.processed == world.tasks
    world.call("cleanup_orphaned_locks")


def _use_health(_: Reader, world: World) -> None:
    rounds: list[Job] = []

    def process(job: Job) -> None:
        rounds.append(job)
        # As after a partition: the session's trust has expired.
        job._node.membership.session._trusted_until = None  # type: ignore[union-attr]

    world.names["process_tasks"] = process
    world.call("main")
    assert len(rounds) == 1


def _use_staging(_: Reader, world: World) -> None:
    world.call("test_coordination", world.names["config"])
    assert world.job.site == "staging"
    assert world.processed == world.tasks


USES: dict[int, Callable[[Reader, World], None]] = {
    2: _use_history,
    **dict.fromkeys((5, 6, 7), _tune),
    11: _call_with_job("register_pattern_locks"),
    12: _do_all("process_with_dynamic_locks"),
    17: _use_results("simple_task_processing"),
    19: _use_results("process_idempotent_tasks"),
    20: _use_results("process_in_batches"),
    26: _use_safely,
    27: _use_bulk,
    28: _use_frequency,
    29: _use_names,
    30: _use_reasons,
    31: _use_lifecycle,
    32: _use_health,
    33: _call_with_job("process_tasks_with_logging"),
    34: _do_all("process_with_dynamic_locks"),
    35: _use_staging,
}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_all_blocks_run_in_order_on_one_database(
    kind: str, locate: Locate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each works after all before it, although they use other settings, sites and pins."""
    monkeypatch.setenv("SYNC_SQL_URL", locate(kind))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    reader = Reader(is_postgres=kind == "postgres")
    reader.prepare()
    blocks = read_all_blocks()
    assert len(blocks) == len(PYTHON) + len(SQL) == 53
    counts = {"python": 0, "sql": 0}
    try:
        for number, language in enumerate(blocks):
            try:
                (reader.try_python if language == "python" else reader.try_sql)(counts[language])
            except Exception as error:
                error.add_note(f"in block {number} of the guide: {language} {counts[language]}")
                raise
            counts[language] += 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    with Job("reader", "production", observer=True) as job:
        audited = {row["task_id"] for row in job.get_audit()}
        assert job.settings.total_tokens == 10_000
        assert job.can_claim_task(Task("new")) is False
    assert len(reader.done) == 20
    assert reader.done <= audited
