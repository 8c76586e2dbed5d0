"""How the `with` block of a job ends, and which tasks are marked then."""

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import date
from typing import Any

import pytest
from proxy import Proxy
from servers import PostgresServer

from jobsync import CoordinationConfig, Invalid, Job, Unavailable, open_store
from jobsync.coordination import membership
from jobsync.jobs import job_lifecycle
from jobsync.jobs.sql_views import SqlViews

DAY = date(2026, 1, 5)
QUICK = CoordinationConfig(
    total_tokens=10, heartbeat_interval_sec=0.5, heartbeat_timeout_sec=5, reclaim_after=1
)


def make(url: str, **options: Any) -> Job:
    """Create a node."""
    chosen: dict[str, Any] = {"date": DAY, "coordination_config": QUICK} | options
    return Job("worker-01", "production", url=url, **chosen)


@pytest.fixture
def states(memory: str) -> Callable[[], dict[str, str]]:
    """Returns the stored state of each task."""

    def read() -> dict[str, str]:
        with Job(
            "auditor",
            "production",
            url=memory,
            date=DAY,
            observer=True,
            config=None,
            coordination_config=QUICK,
        ) as job:
            lines = job.get_audit() + job.incomplete_tasks()
        return {line["task_id"]: line["state"] for line in lines}

    return read


Read = Callable[[], dict[str, str]]


def test_a_normal_end_marks_added_tasks(memory: str, states: Read) -> None:
    """Without `write_audit`."""
    with make(memory) as job:
        job.add_task("x")
    assert states() == {"x": "done"}


def test_an_exception_marks_nothing(memory: str, states: Read) -> None:
    """Added tasks may not be done."""

    def fail() -> None:
        with make(memory) as job:
            job.add_task("x")
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        fail()
    assert states() == {"x": "running"}


def test_leaving_from_another_thread_marks_nothing(memory: str, states: Read) -> None:
    """Added tasks may not be done."""
    with make(memory) as job:
        job.add_task("x")
        thread = threading.Thread(target=job.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    assert states() == {"x": "running"}


def test_leaving_in_a_function_that_the_block_calls_marks_nothing(
    memory: str, states: Read
) -> None:
    """As a signal handler does."""

    def handle(job: Job) -> None:
        job.__exit__(None, None, None)

    with make(memory) as job:
        job.add_task("x")
        handle(job)
        assert not job.can_claim_task("y")
    assert states() == {"x": "running"}


def test_an_exit_stack_leaves_at_its_end(memory: str, states: Read) -> None:
    """A job that a stack has entered is left by the stack, and that is its end."""
    with ExitStack() as stack:
        job = stack.enter_context(make(memory))
        job.add_task("x")
    assert states() == {"x": "done"}


def test_a_function_that_enters_and_one_that_leaves(memory: str, states: Read) -> None:
    """As in the setup and teardown of a test."""
    jobs = []

    def set_up() -> None:
        jobs.append(make(memory).__enter__())

    def tear_down() -> None:
        jobs[0].__exit__(None, None, None)

    set_up()
    jobs[0].add_task("x")
    tear_down()
    assert states() == {"x": "done"}


def test_a_normal_end_does_not_mark_the_current_task_of_a_loop(memory: str, states: Read) -> None:
    """It may not be done."""
    with make(memory) as job:
        job.add_task("added")
        steps = job.tasks(["step"])
        next(steps)
    steps.close()
    assert states() == {"added": "done", "step": "running"}


def test_a_job_is_entered_once_at_a_time(memory: str) -> None:
    """Entering a second time is refused, and the first continues."""
    with make(memory) as job:
        with pytest.raises(Invalid, match="is entered already"):
            job.__enter__()
        job.add_task("x")


def test_leaving_is_safe_to_repeat(memory: str) -> None:
    """The second time does nothing."""
    with make(memory) as job:
        pass
    job.__exit__(None, None, None)
    job.__exit__(None, None, None)


def leave_early(job: Job) -> None:
    """Leave from further up the stack, as a signal handler does."""
    job.__exit__(None, None, None)


def stop_and_leave(job: Job) -> None:
    """Do both."""
    job.stop()
    leave_early(job)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_job_can_be_entered_again(memory: str, states: Read, is_enabled: bool) -> None:
    """However it was used before: it joins again, has its tokens and does tasks."""
    config = CoordinationConfig(total_tokens=10, enabled=is_enabled)
    job = make(memory, coordination_config=config)
    ends: list[Callable[[], object]] = [
        lambda: None,
        job.stop,
        lambda: leave_early(job),
        lambda: stop_and_leave(job),
        lambda: 1 // 0,
    ]
    expected: dict[str, str] = {}
    for number, end in enumerate([*ends, *ends]):
        with suppress(ZeroDivisionError), job:
            assert len(job.my_tokens) == 10
            assert job.can_claim_task(f"a{number}")
            job.add_task(f"a{number}")
            job.write_audit()
            assert [task.text for task in job.tasks([f"b{number}"])] == [f"b{number}"]
            with job.task(f"c{number}"):
                pass
            expected |= {f"{name}{number}": "done" for name in "abc"}
            end()
            assert job.can_claim_task("z") is (end is ends[0])
    assert {task: state for task, state in states().items() if task in expected} == expected


@pytest.mark.parametrize("clears", [False, True])
def test_pins_of_earlier_uses_stay_or_are_replaced(memory: str, clears: bool) -> None:
    """With `clear_existing_locks` also if there are no new ones, with and without a provider."""
    expected: set[str] = set()
    for tasks in (["x", "y"], ["z"], [], ["u"], None, ["v"]):

        def provide(job: Job, tasks: list[str] | None = tasks) -> None:
            for task in tasks or []:
                job.register_lock(task, "gone-%")

        provider = None if tasks is None else provide
        job = make(memory, lock_provider=provider, clear_existing_locks=clears)
        with job:
            expected = {*(tasks or [])} | (set() if clears else expected)
            assert {lock["task_id"] for lock in job.list_locks()} == expected


def test_a_job_that_is_not_entered_refuses_to_work(memory: str) -> None:
    """The error has the fix; methods that need no store still work."""
    job = make(memory)

    def check() -> None:
        for call in (
            lambda: job.add_task("x"),
            lambda: job.add_tasks(["x"]),
            lambda: list(job.tasks(["x"])),
            lambda: job.task("x").__enter__(),
            job.write_audit,
            job.get_audit,
            job.incomplete_tasks,
            lambda: job.forget(older_than_days=1),
        ):
            with pytest.raises(Invalid, match=r"is not entered.*\. Use it in a with statement"):
                call()
        assert not job.can_claim_task("x")
        assert not job.am_i_healthy()
        assert not job.am_i_leader()
        assert job.my_tokens == set()
        assert job.get_active_nodes() == job.get_dead_nodes() == []
        assert job.task_to_token("x") in range(10)
        job.stop()

    check()
    with job:
        pass
    check()


def test_a_loop_that_outlives_its_job_is_quiet(memory: str, states: Read) -> None:
    """A loop over tasks that is closed after the job was left raises nothing."""
    with make(memory) as job:
        steps = job.tasks(["x", "y"])
        next(steps)
        job.__exit__(None, None, None)
    steps.close()
    del steps
    gc.collect()
    assert states() == {"x": "running"}


def test_stopping_ends_loops_normally(memory: str, states: Read) -> None:
    """The current task is finished and marked; nothing more is claimed."""
    done = []
    with make(memory) as job:
        for task in job.tasks(["x", "y", "z"]):
            done.append(task.id)
            job.stop()
        assert not job.can_claim_task("z")
    assert done == ["x"]
    assert states() == {"x": "done"}


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("moment", ["before", "meanwhile", "while it is left", "before it fails"])
def test_stopping_before_entering_takes_nothing(
    memory: str, monkeypatch: pytest.MonkeyPatch, moment: str, is_enabled: bool
) -> None:
    """A signal may come before or while a job is being entered. The block after that works."""
    job = make(memory, coordination_config=CoordinationConfig(enabled=is_enabled, total_tokens=10))

    async def interrupt(*arguments: Any) -> Any:
        job.stop()
        return await open_store(*arguments)

    async def fail(*_: Any) -> Any:
        raise Unavailable("store", "down")

    def stop_late(views: SqlViews) -> None:
        job.stop()
        close(views)

    close = SqlViews.close

    if moment == "before":
        job.stop()
    elif moment == "meanwhile":
        monkeypatch.setattr(membership if is_enabled else job_lifecycle, "open_store", interrupt)
    elif moment == "before it fails":
        job.stop()
        with monkeypatch.context() as patch:
            patch.setattr(membership if is_enabled else job_lifecycle, "open_store", fail)
            with pytest.raises(Unavailable):
                job.__enter__()
    else:
        with job, monkeypatch.context() as patch:
            patch.setattr(SqlViews, "close", stop_late)
            job.__exit__(None, None, None)
    with job:
        assert not job.can_claim_task("x")
        assert list(job.tasks(["x"])) == []
        assert not is_enabled or job.my_tokens == set()
    monkeypatch.undo()
    with job:
        assert [task.id for task in job.tasks(["x"])] == ["x"]


def test_a_call_that_waits_while_the_job_is_left_ends(memory: str) -> None:
    """With an error."""
    with make(memory) as job:
        waiting = threading.Event()
        raised: list[BaseException] = []

        async def sleep() -> None:
            waiting.set()
            await job.components.clock.sleep(3600)

        def wait() -> None:
            try:
                job._call(sleep())
            except Unavailable as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        job.__exit__(None, None, None)
        thread.join(30)
    assert "was left meanwhile" in str(raised[0])


_GUIDE = """
import signal, sys, time
from jobsync import CoordinationConfig, Job

job_instance = None

def signal_handler(signum, frame):
    if job_instance:
        job_instance.__exit__(None, None, None)
    sys.exit(0)

signal.signal(signal.SIGTERM, signal_handler)

with Job("worker-02", "production", url=sys.argv[1], date=__import__("datetime").date(2026, 1, 5),
         coordination_config=CoordinationConfig(total_tokens=10, reclaim_after=1,
         heartbeat_interval_sec=0.5, heartbeat_timeout_sec=5)) as job:
    job_instance = job
    number = 0
    print("ready", flush=True)
    while True:
        number += 1
        job.add_task(f"task-{number}")
        if number == 3:
            job.write_audit()
            print("busy", flush=True)
"""


def test_the_guide_s_signal_handler(tmp_path: Any) -> None:
    """It may interrupt any call: the process ends at once and marks nothing more."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    process = subprocess.Popen(
        [sys.executable, "-c", _GUIDE, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"ready\n", b"busy\n"]
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (0, b"")
    with make(url, observer=True) as job:
        assert {line["task_id"] for line in job.get_audit()} == {"task-1", "task-2", "task-3"}
        assert {line["state"] for line in job.incomplete_tasks()} <= {"running", "failed"}
        assert [node["name"] for node in job.get_dead_nodes()] == ["worker-02"]


def test_leaving_is_bounded_when_the_store_is_gone(postgres: PostgresServer) -> None:
    """The block ends with an error, and nothing runs on for long."""
    url = f"{postgres.url}?schema=jobs_leaving"
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    before = set(threading.enumerate())
    with Proxy("127.0.0.1", port) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        job = make(through)

        def lose_store() -> None:
            with job:
                job.add_task("x")
                proxy.refuse()
                proxy.cut()

        with pytest.raises(Unavailable):
            lose_store()
    ours = [t for t in set(threading.enumerate()) - before if t.name.startswith("jobsync")]
    for thread in ours:
        # The session's own thread makes a last attempt to resign.
        thread.join(60)
    assert [thread.name for thread in ours if thread.is_alive()] == []


def test_an_error_while_entering_leaves_nothing_behind(memory: str) -> None:
    """The name is free again, and no thread is left."""

    def fail(job: Job) -> None:
        raise LookupError(job.node_name)

    with pytest.raises(LookupError, match="worker-01"), make(memory, lock_provider=fail):
        pass
    with suppress(KeyError), make(memory, wait_on_enter=1) as job:
        assert len(job.my_tokens) == 10
    assert not [t for t in threading.enumerate() if t.name == "jobsync-worker-01"]
