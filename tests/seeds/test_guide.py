"""Every Python block of the JobSync guide, executed as it is printed, on PostgreSQL and SQLite."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from typing import Any

import pytest
from guide import PYTHON, World
from servers import Locate

from jobsync import CoordinationConfig, Invalid, Job, Task

_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate, monkeypatch: pytest.MonkeyPatch) -> str:
    """An own store for each block, set in the environment because the guide names none."""
    url = locate(request.param)
    monkeypatch.setenv("SYNC_SQL_URL", url)
    return url


@pytest.fixture
def world(url: str) -> World:
    """A reader's program."""
    return World()


@contextlib.contextmanager
def observe(**options: Any) -> Iterator[Job]:
    """Enter the fleet as an observer."""
    with Job("looker", "production", observer=True, **options) as job:
        yield job


def audited(day: date | None = None, **options: Any) -> set[str]:
    """Return the tasks that are marked as done."""
    with observe(date=day, **options) as job:
        return {row["task_id"] for row in job.get_audit()}


def is_postgres() -> bool:
    """Whether the store is PostgreSQL."""
    return os.environ["SYNC_SQL_URL"].startswith("postgresql")


def texts(tasks: Any) -> set[str]:
    """Return the texts of ids."""
    return {str(task) for task in tasks}


def make_table(rows: list[tuple[Any, ...]], name: str, columns: str) -> None:
    """Create a table of the reader, in the database of the jobs."""
    with observe() as job:
        job.connection.execute(f"CREATE TABLE {name} ({columns})")
        for row in rows:
            marks = ", ".join(["%s"] * len(row))
            job.connection.execute(f"INSERT INTO {name} VALUES ({marks})", row)


def owners(task: object, *names: str) -> list[str]:
    """Return which of these nodes would do a task in a fleet of only them."""
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(Job(name, "production", config=None, wait_on_enter=30))
            for name in names
        ]
        return [job.node_name for job in jobs if job.can_claim_task(Task(task))]


PLAYS: dict[int, Callable[[World], None]] = {}


def plays(block: int) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Register a function as the test of a block."""

    def register(play: Callable[[World], None]) -> Callable[[World], None]:
        assert block not in PLAYS
        PLAYS[block] = play
        return play

    return register


@plays(0)
def _imports(world: World) -> None:
    world.run(0)
    assert world.names["Job"] is Job
    assert world.names["Task"](1) == world.names["Task"]("1")


@plays(1)
def _simple_job(world: World) -> None:
    world.run(1)
    world.call("process_daily_tasks")
    assert world.processed == world.tasks
    assert audited() == texts(world.tasks)


@plays(2)
def _historical_date(world: World) -> None:
    day = date(2026, 3, 9)
    # SQLite compares text, so a date must be passed as a date.
    given = datetime(2026, 3, 9) if is_postgres() else day  # noqa: DTZ001 - as readers write it
    rows = [(1, "2026-03-09", "pending"), (2, "2026-03-09", "done"), (3, "2026-03-10", "pending")]
    make_table([(n, date.fromisoformat(d), s) for n, d, s in rows], "tasks", _TASKS)
    world.run(2)
    world.call("process_historical_date", given)
    assert world.saved == {1: "result of 1"}
    assert audited(day) == {"1"}
    assert audited() == set()


_TASKS = "task_id INTEGER, date DATE, status TEXT"


@plays(3)
def _custom_config(world: World) -> None:
    world.run(3)
    world.call("process_with_custom_config")
    settings = world.job.settings
    assert (settings.total_tokens, settings.heartbeat_timeout_sec) == (5000, 30)
    assert audited(coordination_config=CoordinationConfig(total_tokens=5000)) == texts(world.tasks)


@plays(4)
def _without_coordination(world: World) -> None:
    world.run(4)
    world.during = lambda job: world.saved.update(tokens=len(job.my_tokens))
    world.call("process_without_coordination")
    assert world.processed == world.tasks
    assert world.saved == {"tokens": 10_000}
    assert audited() == set()


def tune(world: World, block: int, heartbeat: float, total: int) -> None:
    """Run a block that creates settings, and a node with them."""
    world.run(block)
    settings = world.names["coord_config"]
    assert settings.heartbeat_interval_sec == heartbeat
    with Job("a", "tuned", coordination_config=settings) as job:
        assert len(job.my_tokens) == total


@plays(5)
def _large_cluster(world: World) -> None:
    tune(world, 5, 3, 50_000)


@plays(6)
def _stable_cluster(world: World) -> None:
    tune(world, 6, 10, 10_000)


@plays(7)
def _high_churn(world: World) -> None:
    tune(world, 7, 3, 10_000)


@plays(8)
def _config_module(world: World) -> None:
    world.run(8)
    assert world.job.settings.total_tokens == 5000
    assert world.job.settings.heartbeat_interval_sec == 10
    assert world.processed == world.tasks


@plays(9)
def _single_lock(world: World) -> None:
    world.tasks = [12345, 1]
    world.run(9)
    world.call("process_with_lock")
    assert world.processed == world.tasks
    with observe() as job:
        (lock,) = job.list_locks()
    assert (lock["task_id"], lock["node_pattern"]) == ("12345", "worker-01")
    assert lock["expires_at"] - lock["created_at"] == timedelta(days=7)
    assert owners(12345, "worker-00", "worker-01", "worker-02") == ["worker-01"]


@plays(10)
def _bulk_locks(world: World) -> None:
    today = datetime.now().astimezone().date()
    rows = [(1, "worker-01,worker-02"), (2, None), (3, "worker-02"), (4, "worker-03, worker-04")]
    table = [(task, today, node) for task, node in rows]
    make_table(table, "tasks", "task_id INTEGER, date DATE, required_node TEXT")
    world.tasks = [1, 2, 3, 4]
    world.run(10)
    world.call("process_with_bulk_locks")
    assert world.processed == [1, 2]
    with observe() as job:
        assert len(job.list_locks()) == 5
    assert owners(3, "worker-01", "worker-02") == ["worker-02"]
    assert owners(4, "worker-01", "worker-04") == ["worker-04"]
    assert owners(1, "worker-03", "worker-04") == []


@plays(11)
def _pattern_locks(world: World) -> None:
    world.run(11)
    with world.make_job("a", "production") as job:
        world.call("register_pattern_locks", job)
    nodes = ["prod-node-01", "prod-x", "x-gpu", "my-special-one"]
    assert owners(100, *nodes) == ["prod-node-01"]
    assert owners(200, *nodes)[0] in {"prod-node-01", "prod-x"}
    assert owners(300, *nodes) == ["x-gpu"]
    assert owners(400, *nodes) == ["my-special-one"]


@plays(12)
def _dynamic_locks(world: World) -> None:
    heavy = [[1, 2, 3], [2, 5]]
    world.run(12, get_todays_heavy_queries=lambda: heavy.pop(0))
    for expected in ({"1", "2", "3"}, {"2", "5"}):
        world.processed.clear()
        world.call("process_with_dynamic_locks")
        assert texts(world.processed) == texts(world.tasks) - expected
        with observe() as job:
            assert {lock["task_id"] for lock in job.list_locks()} == expected


@plays(13)
def _static_locks(world: World) -> None:
    world.tasks = ["customer-X", "customer-Y", "customer-Z"]
    world.run(13)
    for _ in range(2):
        world.call("process_with_static_locks")
        with observe() as job:
            assert len(job.list_locks()) == 2
    assert set(world.processed) == {"customer-Z"}
    assert owners("customer-X", "node-east-7", "node-west-7") == ["node-east-7"]


@plays(14)
def _manual_management(world: World) -> None:
    for name in ("old-worker-01", "other"):
        with world.make_job(name, "production") as job:
            job.register_task_locks_bulk([(1, "gone"), (2, "gone", "why")])
    for reset, left in ((False, 2), (True, 0)):
        world.run(14, need_complete_reset=reset, print=world.log.printed)
        world.call("manage_locks_manually")
        with observe() as job:
            assert len(job.list_locks()) == left
    printed = [text for level, text in world.log.lines if level == "printed"]
    assert len(printed) == 6
    assert all("gone (created by o" in text for text in printed)
    assert ("info", "Removed 2 locks from old-worker-01") in world.log.lines
    assert ("warning", "Cleared ALL 2 locks from system") in world.log.lines


@plays(15)
def _production_pattern(world: World) -> None:
    today = datetime.now().astimezone().date()
    rows = [(1, today, "gpu"), (2, today, "high_memory"), (3, today, None), (4, today, "none")]
    make_table(rows, "task_metadata", "task_id INTEGER, date DATE, required_resource TEXT")
    world.run(15)
    world.call("production_lock_pattern")
    assert set(world.processed) == {*world.tasks} - {1, 2}
    assert ("info", f"Registered 2 locks for {today}") in world.log.lines
    assert ("debug", "Active locks: 2") in world.log.lines


@plays(16)
def _gpu_tasks(world: World) -> None:
    today = datetime.now().astimezone().date()
    rows = [(1, today, True), (2, today, False), (3, today, True)]
    make_table(rows, "tasks", "task_id INTEGER, date DATE, requires_gpu BOOLEAN")
    world.tasks = [1, 2, 3]
    world.run(16)
    world.call("process_gpu_tasks")
    # A pin restricts a task, not a node: this node does the other tasks too.
    assert world.processed == [1, 2, 3]
    assert owners(1, "worker-01", "worker-gpu-02") == ["worker-gpu-02"]


@plays(17)
def _basic_loop(world: World) -> None:
    world.run(17)
    world.call("simple_task_processing")
    assert world.saved == {task: f"result of {task}" for task in world.tasks}
    assert audited() == texts(world.tasks)


@plays(18)
def _recovery(world: World) -> None:
    day = timedelta(days=1)
    today = datetime.now().astimezone().date()
    for when in (today - day, today):
        with Job("dead", "production", date=when) as job:
            job.add_tasks(["failed", "recent", "done"])
            job._call(job._entered_node.finish(["done"]))
            job._call(job._entered_node.finish(["failed", "recent"], "failed"))
    move_back("done", "failed")
    world.tasks = ["new"]
    world.run(18)
    world.call("process_with_recovery")
    assert world.processed == ["failed", "new"]
    assert ("warning", "Found 1 incomplete tasks, reprocessing") in world.log.lines
    with observe() as job:
        assert world.call("get_incomplete_tasks", job) == []
    assert audited() == {"failed", "new", "done"}


def move_back(*tasks: str) -> None:
    """Move claims ten minutes back, and those of other dates a day more."""
    with observe() as job:
        set_value = (
            "jsonb_set(value::jsonb, '{started}', to_jsonb((value::jsonb ->> 'started')::float8"
            " - 600))::text"
        )
        if not is_postgres():
            set_value = "json_set(value, '$.started', (value ->> 'started') - 600)"
        for task in tasks:
            job.connection.execute(
                f"UPDATE jobsync_record SET value = {set_value} WHERE key LIKE %s",
                [f"claim/%/{task}"],
            )


@plays(19)
def _idempotent(world: World) -> None:
    make_table(
        [(1, "there", None)],
        "results",
        "task_id INTEGER UNIQUE, result TEXT, completed_at TIMESTAMP",
    )
    world.tasks = [1, 2, 3]
    world.run(19)
    for _ in range(2):
        world.call("process_idempotent_tasks")
    with observe() as job:
        rows = job.connection.execute("SELECT task_id, result FROM results ORDER BY 1").fetchall()
    assert [tuple(row) for row in rows] == [(1, "there"), (2, "result of 2"), (3, "result of 3")]


@plays(20)
def _batches(world: World) -> None:
    world.tasks = list(range(250))
    world.run(20)
    world.call("process_in_batches")
    assert [len(batch) for batch in world.batches] == [100, 100, 50]
    assert audited() == texts(world.tasks)


@plays(21)
def _continuous(world: World) -> None:
    world.run(21)
    world.call("continuous_processing")
    assert world.processed == world.tasks
    assert ("info", "Processed 12 tasks") in world.log.lines
    assert ("info", "No more tasks to process") in world.log.lines
    assert audited() == texts(world.tasks)


@plays(22)
def _health_checks(world: World) -> None:
    world.run(22)
    app = world.names["app"]
    ready, live = app.routes["/health/ready"], app.routes["/health/live"]
    assert ready() == ({"status": "not_ready"}, 503)
    seen: list[Any] = []
    world.during = lambda _: seen.append(ready())
    world.call("main")
    assert seen[0] == ({"status": "ready", "node": "worker-01", "token_count": 10_000}, 200)
    assert ready() == ({"status": "not_ready"}, 503)
    assert live() == ({"status": "alive"}, 200)


@plays(23)
def _manual_health(world: World) -> None:
    world.run(23)
    world.call("process_with_health_logging")
    first, last = [text for _, text in world.log.lines]
    for part in ("'is_healthy': True", "'is_leader': True", "'token_count': 10000"):
        assert part in first
        assert part in last
    assert "'active_nodes': 1, 'coordination_enabled': True" in first
    assert "'last_heartbeat': datetime.datetime(" in first


@plays(25)
def _wait_times(world: World) -> None:
    world.run(25)
    assert [job._wait_on_enter for job in world.jobs] == [120, 60, 180]
    with pytest.raises(Invalid):
        Job(..., wait_on_enter=120)  # type: ignore[arg-type]


@plays(26)
def _safely(world: World) -> None:
    world.run(26)
    with observe() as job:
        for _ in range(2):
            world.call("process_task_safely", 7, job._cn)
    assert world.saved == {7: "result of 7"}


@plays(27)
def _bulk_registration(world: World) -> None:
    world.run(27, get_special_tasks=lambda: [1, 2, 3], node="worker-07", reason="special")
    good, bad = world.defined["register_locks"]
    for register in (good, bad):
        with Job("admin", "production") as job:
            register(job)
            locks = job.list_locks()
            assert {lock["task_id"] for lock in locks} == {"1", "2", "3"}
            assert {(lock["node_pattern"], lock["reason"]) for lock in locks} == {
                ("worker-07", "special")
            }
            assert job.clear_all_locks() == 3


@plays(28)
def _rebalance_frequency(world: World) -> None:
    if not is_postgres():
        pytest.skip("NOW() and INTERVAL are PostgreSQL's; the SQL reference has SQLite's form")
    world.run(28)
    with Job("worker-01", "production") as job:
        world.call("check_rebalance_frequency", job._cn)
        assert world.log.lines == []
        for number in range(3):
            with Job(f"guest-{number}", "production"):
                pass
        world.call("check_rebalance_frequency", job._cn)
    ((level, text),) = world.log.lines
    assert level == "warning"
    assert text == "High rebalance frequency: 7 in last hour"


@plays(29)
def _node_names(world: World) -> None:
    world.run(29, region="eu", instance_id="i-1")
    good, bad = world.defined["node_name"]
    for name in (good, bad):
        with Job(name, "production") as job:
            assert [node["name"] for node in job.nodes] == [name]


@plays(30)
def _reasons(world: World) -> None:
    world.run(30)
    with Job("admin", "production", lock_provider=world.names["register_locks"]) as job:
        reasons = {lock["task_id"]: lock["reason"] for lock in job.list_locks()}
    assert reasons == {
        "100": "requires_nvidia_v100",
        "200": "requires_64gb_ram",
        "300": "data_in_us_east_s3",
    }


@plays(31)
def _lock_lifecycle(world: World) -> None:
    with Job("old-worker", "production") as job:
        job.register_task_locks_bulk([(1, "old-worker"), (2, "old-worker")])
    world.run(31, get_current_heavy_tasks=lambda: [3])
    world.call("manage_lock_lifecycle")
    assert set(world.processed) == {*world.tasks} - {1, 2, 3}
    world.call("cleanup_orphaned_locks")
    with observe() as job:
        assert [lock["created_by"] for lock in job.list_locks()] == ["worker-01"]


@plays(32)
def _health_loop(world: World) -> None:
    started: list[Job] = []
    rounds = iter(range(10))

    def process(job: Job) -> None:
        if next(rounds) == 2:
            # As after a partition: the session's trust has expired.
            job._node.membership.session._trusted_until = None  # type: ignore[union-attr]

    world.run(32, start_health_server=started.append, process_tasks=process)
    world.call("main")
    assert started == [world.job]
    assert world.log.lines == [("error", "Node unhealthy, exiting")]
    assert next(rounds) == 3


@plays(33)
def _logging(world: World) -> None:
    world.run(33)
    with world.make_job("worker-01", "production") as job:
        world.call("process_tasks_with_logging", job)
        assert world.log.lines == [
            ("info", "Starting processing: 10000 tokens assigned"),
            ("info", "Completed 12 tasks"),
            ("debug", f"Token version: {job.token_version}"),
        ]


@plays(34)
def _clear_existing(world: World) -> None:
    days: list[date] = []
    gpu = [[1, 2], [2]]

    def query(day: date) -> list[int]:
        days.append(day)
        return gpu.pop(0)

    world.run(34, query_gpu_requirements=query)
    for expected in ({"1", "2"}, {"2"}):
        world.call("process_with_dynamic_locks")
        with observe() as job:
            assert {lock["task_id"] for lock in job.list_locks()} == expected
    assert days == [datetime.now().astimezone().date()] * 2


@plays(35)
def _staging(world: World) -> None:
    world.run(35)
    world.call("test_coordination", world.names["config"])
    assert world.job.site == "staging"
    assert world.processed == world.tasks


_IN_A_PROCESS = {24: "test_guide_signals.py"}


@pytest.mark.parametrize("block", sorted(PLAYS))
def test_a_block_runs_as_printed(block: int, world: World) -> None:
    """It does what the guide says."""
    PLAYS[block](world)


def test_every_block_is_tested() -> None:
    """The block about signals runs in its own process, in another test."""
    assert len(PYTHON) == 36
    assert PLAYS.keys() | _IN_A_PROCESS.keys() == set(range(36))
