"""`Job` on every store: ownership, claims, audits and status."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from jobsync import (
    ClaimLost,
    CoordinationConfig,
    Invalid,
    Job,
    OutcomeUnknown,
    Task,
    Unavailable,
)
from jobsync.coordination.membership import describe_process
from jobsync.core.assignment import token_maker
from jobsync.core.trust import Timing
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.job_inspection import _describe_claim
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.node_loop import JobNodeSettings

DAY = date(2026, 1, 5)
QUICK = CoordinationConfig(
    total_tokens=100, heartbeat_interval_sec=0.5, heartbeat_timeout_sec=5, reclaim_after=1
)


def make(url: str, node: str = "worker-01", **options: Any) -> Job:
    """Create a node with a short heartbeat."""
    chosen: dict[str, Any] = {"date": DAY, "coordination_config": QUICK} | options
    return Job(node, "production", url=url, **chosen)


@contextmanager
def entered(url: str, *nodes: str, **options: Any) -> Iterator[list[Job]]:
    """Enter several nodes, one after the other."""
    with ExitStack() as stack:
        yield [stack.enter_context(make(url, node, **options)) for node in nodes]


def ids(lines: list[dict[str, Any]]) -> set[str]:
    """Return the ids of the described tasks."""
    return {line["task_id"] for line in lines}


# Work


def test_the_basic_loop_of_the_guide(url: str) -> None:
    """Check, add, do, audit: a single node owns everything, and audited tasks are marked."""
    done = []
    with make(url) as job:
        assert len(job.my_tokens) == 100
        assert job.token_version >= 1
        for number in range(5):
            task = Task(number)
            if job.can_claim_task(task):
                job.add_task(task)
                done.append(number)
        assert ids(job.incomplete_tasks()) == {"0", "1", "2", "3", "4"}
        assert job.get_audit() == []
        job.write_audit()
        assert done == list(range(5))
        assert ids(job.get_audit()) == {"0", "1", "2", "3", "4"}
        assert job.incomplete_tasks() == []


def test_audited_tasks_are_described(url: str) -> None:
    """Under the names of both releases, with date, node and time."""
    with make(url) as job:
        job.add_task("customer-X")
        job.write_audit()
        (line,) = job.get_audit()
    assert line["task_id"] == line["item"] == "customer-X"
    assert (line["node"], line["date"], line["state"], line["run"]) == (
        "worker-01",
        DAY,
        "done",
        1,
    )
    assert abs(line["created_on"] - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_batch_is_claimed_and_marked_at_once(url: str) -> None:
    """`add_tasks` returns those that were claimed."""
    with make(url) as job:
        job.add_task(1)
        added = job.add_tasks([1, 2, Task(3), "3"])
        assert [task.id for task in added] == [2, "3"]
        job.write_audit()
        assert ids(job.get_audit()) == {"1", "2", "3"}


def test_two_nodes_share_tokens_and_none_has_two_owners(url: str) -> None:
    """Half each; every task can be claimed by one of them; a node that leaves hands over."""
    with entered(url, "worker-01", "worker-02") as (first, second):
        assert first.my_tokens | second.my_tokens == set(range(100))
        assert not first.my_tokens & second.my_tokens
        assert len(first.my_tokens) == len(second.my_tokens) == 50
        assert first.am_i_leader()
        assert not second.am_i_leader()
        for number in range(50):
            claimers = [job for job in (first, second) if job.can_claim_task(number)]
            assert len(claimers) == 1
            assert (job_owns := first.task_to_token(number) in first.my_tokens) == (
                claimers == [first]
            ), job_owns
        theirs = next(n for n in range(50) if second.can_claim_task(n))
        with pytest.raises(ClaimLost, match=r"was not claimed: .*Do not do it here"):
            first.add_task(theirs)
        assert [node["name"] for node in first.get_active_nodes()] == ["worker-01", "worker-02"]
        second.__exit__(None, None, None)
        first._call(until(lambda: len(first.my_tokens) == 100))
        assert [node["name"] for node in first.nodes] == ["worker-01"]
        assert [node["name"] for node in first.get_dead_nodes()] == ["worker-02"]


def test_a_block_marks_its_task(url: str) -> None:
    """The end marks the task as done, an exception as failed, which can be done again."""
    with make(url) as job:
        with job.task("good") as task:
            assert task == Task("good")
            assert ids(job.incomplete_tasks()) == {"good"}
        with pytest.raises(ValueError, match="no luck"), job.task("bad"):
            raise ValueError("no luck")
        assert ids(job.get_audit()) == {"good"}
        (failed,) = job.incomplete_tasks()
        assert (failed["task_id"], failed["state"]) == ("bad", "failed")
        with job.task("bad"):
            pass
        assert {line["run"] for line in job.get_audit()} == {1, 2}


def test_an_audit_does_not_mark_the_current_task_of_a_block(url: str) -> None:
    """It is not done before the block, or the step of a loop, has ended."""
    with make(url) as job:
        job.add_task("added")
        steps = job.tasks(["step"])
        next(steps)
        with job.task("block"):
            job.write_audit()
            assert ids(job.get_audit()) == {"added"}
        assert list(steps) == []
        assert ids(job.get_audit()) == {"added", "block", "step"}


def test_tasks_yields_each_task_once(url: str) -> None:
    """Two nodes loop over a list until all is done; each task is done once."""
    done: list[tuple[str, Any]] = []

    def work(job: Job) -> None:
        done.extend((job.node_name, task.id) for task in job.tasks(range(40)))

    with entered(url, "worker-01", "worker-02") as jobs:
        threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(task for _, task in done) == list(range(40))
        assert len({node for node, _ in done}) == 2
        assert len(jobs[0].get_audit()) == 40


def test_tasks_calls_a_function_again_until_nothing_is_pending(url: str) -> None:
    """What is pending again, after it was done, is done again: the second time it is named.

    The first time it may have been named before it was done.
    """
    rounds = iter([["a", "b"], ["b"], ["b"], []])
    with make(url) as job:
        assert [task.id for task in job.tasks(lambda: next(rounds))] == ["a", "b", "b"]
        assert {line["task_id"]: line["run"] for line in job.get_audit()} == {"a": 1, "b": 2}


def test_a_loop_that_is_left_marks_its_task_as_failed(url: str) -> None:
    """The tasks before are done; the current one is not."""
    with make(url) as job:
        for task in job.tasks(["a", "b", "c"]):
            if task.id == "b":
                break
        assert ids(job.get_audit()) == {"a"}
        assert {line["task_id"]: line["state"] for line in job.incomplete_tasks()} == {
            "b": "failed"
        }


def test_the_same_task_again_on_one_date(url: str) -> None:
    """It is a new run, unless the job has `once_per_date`."""
    with make(url) as job:
        for _ in range(2):
            assert job.can_claim_task("x")
            job.add_task("x")
            job.write_audit()
        assert [line["run"] for line in job.get_audit()] == [2]
    with make(url, once_per_date=True) as job:
        assert not job.can_claim_task("x")
        with pytest.raises(ClaimLost):
            job.add_task("x")
    with make(url, once_per_date=True, date=DAY + timedelta(days=1)) as job:
        job.add_task("x")
        job.write_audit()
        assert not job.can_claim_task("x")


def test_an_observer_owns_nothing_and_sees_everything(url: str) -> None:
    """It takes no tokens, although it joined first."""
    observer = make(url, "watcher", observer=True)
    with observer, make(url) as job:
        assert observer.my_tokens == set()
        assert not observer.can_claim_task("x")
        assert len(job.my_tokens) == 100
        job.add_task("x")
        assert ids(observer.incomplete_tasks()) == {"x"}
        assert {node["name"] for node in observer.nodes} == {"watcher", "worker-01"}


def test_status_and_health(url: str) -> None:
    """The guide's response bodies, and the status of a node."""
    job = make(url)
    assert job.health_ready() == ({"status": "not_ready"}, 503)
    assert job.health_live() == ({"status": "alive"}, 200)
    with job:
        job.add_task("x")
        # A heartbeat that is late on a busy machine makes it unready for a moment.
        ready = ({"status": "ready", "node": "worker-01", "token_count": 100}, 200)
        asyncio.run(until(lambda: job.health_ready() == ready, "it is ready"))
        status = job.get_coordination_status()
        assert status | {"token_version": 0, "last_heartbeat": None} == {
            "node_name": "worker-01",
            "enabled": True,
            "coordination_enabled": True,
            "is_healthy": True,
            "is_leader": True,
            "token_count": 100,
            "my_tokens": 100,
            "token_version": 0,
            "total_tokens": 100,
            "last_heartbeat": None,
            "active_nodes": ["worker-01"],
            "running_tasks": ["x"],
        }
        assert abs(status["last_heartbeat"] - datetime.now(UTC)) < timedelta(minutes=1)
        (node,) = job.get_active_nodes()
        assert (node["name"], node["is_leader"], node["stage"]) == ("worker-01", True, "ready")
        assert (node.name, node.is_leader, node.stage) == ("worker-01", True, "ready")
        assert json.loads(json.dumps(node, default=str))["name"] == job.nodes[0].name
        with pytest.raises(AttributeError, match="a node has no 'nam'; it has name, created_on"):
            node.nam  # noqa: B018
    assert job.health_ready() == ({"status": "not_ready"}, 503)
    assert not job.am_i_healthy()


def test_the_guide_s_manual_health_check_runs(url: str) -> None:
    """Its private names are aliases of public ones."""
    with make(url) as job:
        found: dict[str, Any] = {
            "node_name": job.node_name,
            "is_healthy": job.am_i_healthy(),
            "is_leader": job.am_i_leader(),
            "token_count": len(job._my_tokens),
            "token_version": job._token_version,
            "last_heartbeat": job._last_heartbeat_sent,
            "active_nodes": len(job.get_active_nodes()),
            "coordination_enabled": job._coordination_enabled,
        }
        assert found["token_version"] == job.token_version
        # A heartbeat may come in between.
        assert abs(found["last_heartbeat"] - datetime.now(UTC)) < timedelta(minutes=1)
        assert (found["token_count"], found["active_nodes"]) == (100, 1)
        assert found["coordination_enabled"]
        assert job.date == DAY


def test_old_records_can_be_removed(url: str) -> None:
    """Claims of dates that no node works on, and nothing else."""
    old, older = date(2020, 1, 1), date(2019, 1, 1)
    for day in (old, older):
        with make(url, date=day) as job:
            job.add_tasks(range(5))
    with make(url) as job:
        job.add_task("today's")
        # A node has started to work on them a moment ago.
        assert job.forget(older_than_days=1)["claims"] == 0
        assert job._membership is not None
        store = job._membership.store
        for day in (old, older):
            record = job._call(store.get(f"date/sync__/{day}"))
            assert record is not None
            long_ago = {"used": record.value["used"] - 10 * 86_400}
            job._call(store.put(record, long_ago))
        removed = job.forget(older_than_days=5)
        assert (removed["dates"], removed["claims"]) == (2, 10)
        assert ids(job.incomplete_tasks()) == {"today's"}
        assert job.forget(older_than_days=5)["dates"] == 0
    with make(url, date=old) as job:
        assert job.incomplete_tasks() == []
        assert job.can_claim_task(1)


@pytest.mark.parametrize("state", ["running", "done", "failed"])
def test_a_claim_is_described_by_all_that_people_ask_for(state: ClaimState) -> None:
    """Its time is its start, in UTC, whatever became of it."""
    claim = Claim(
        task="t",
        token=3,
        date="2026-01-05",
        node="worker-01",
        owner="w.1",
        number=4,
        run=2,
        state=state,
        started=1_767_600_000.0,
        ended=None if state == "running" else 1_767_603_600.0,
    )
    line = _describe_claim(claim)
    assert line == {
        "task_id": "t",
        "item": "t",
        "node": "worker-01",
        "state": state,
        "run": 2,
        "created_on": datetime(2026, 1, 5, 8, tzinfo=UTC),
        "date": DAY,
    }
    assert line["created_on"].tzinfo is UTC


@pytest.mark.parametrize(
    "trouble",
    [
        None,
        Unavailable("store", "silent"),
        OutcomeUnknown("claim", "lost"),
        Invalid("job", "a", "is not entered", "enter it"),
    ],
    ids=lambda trouble: type(trouble).__name__,
)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_block_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException] | None,
    trouble: Exception | None,
) -> None:
    """If its end cannot be marked: after an error nobody asks for that. It may be tried again."""
    ends: list[tuple[list[str], str]] = []

    async def finish(tasks: list[str], state: str = "done") -> dict[str, str]:
        ends.append((tasks, state))
        if trouble is not None:
            raise trouble
        return {}

    with make("memory://", coordination_config=CoordinationConfig(enabled=False)) as job:
        node = job._entered_node
        for task in ("a", "b"):
            monkeypatch.setattr(node, "finish", finish)
            raised = (error,) if error else (type(trouble),) if trouble else ()
            with pytest.raises(raised) if raised else nullcontext(), job.task(task):
                if error is not None:
                    raise error
        monkeypatch.undo()
        assert ends == [([task], "done" if error is None else "failed") for task in ("a", "b")]
        assert job._in_blocks == {}
        assert node.running == ["a", "b"]
        job.write_audit()
        with job.task("a"), pytest.raises(ClaimLost), job.task("a"):
            pass


def test_of_two_threads_that_enter_a_block_for_one_task_one_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing else marks it, although the other thread was refused late."""
    with make("memory://", coordination_config=CoordinationConfig(enabled=False)) as job:
        entered, is_over = threading.Event(), threading.Event()

        def stay() -> None:
            with job.task("a"):
                entered.set()
                assert is_over.wait(30)

        first = threading.Thread(target=stay)
        list_in_blocks = job._list_in_blocks

        def list_before_the_first_enters() -> set[str]:
            monkeypatch.undo()
            found = list_in_blocks()
            first.start()
            assert entered.wait(30)
            return found

        monkeypatch.setattr(job, "_list_in_blocks", list_before_the_first_enters)
        with pytest.raises(ClaimLost), job.task("a"):
            pass
        job.write_audit()
        assert job.get_audit() == []
        is_over.set()
        first.join()
        assert len(job.get_audit()) == 1


def test_a_task_that_was_not_claimed_may_be_tried_in_a_block_again() -> None:
    """A block that was not entered leaves nothing behind."""
    with make("memory://", coordination_config=CoordinationConfig(enabled=False)) as job:
        job.add_task("a")
        for _ in range(2):
            with pytest.raises(ClaimLost, match="this node does it already"), job.task("a"):
                pass
        job.write_audit()
        with job.task("a") as task:
            assert task == Task("a")


@pytest.mark.parametrize(
    ("tasks", "claimed"),
    [
        ("ab", ["ab"]),
        (b"ab", ["b'ab'"]),
        (1, ["1"]),
        (Task("t"), ["t"]),
        (["a", "b", "a"], ["a", "b"]),
        (("a", 1), ["a", "1"]),
        (iter(["x"]), ["x"]),
        ([], []),
    ],
)
def test_one_task_or_several_can_be_claimed_in_one_request(
    tasks: object, claimed: list[str]
) -> None:
    """A text is one task, as are bytes."""
    with make("memory://", coordination_config=CoordinationConfig(enabled=False)) as job:
        job.set_claim(tasks)
        assert job._entered_node.running == claimed


def test_each_setting_of_a_job_reaches_its_node(memory: str) -> None:
    """All differ from their defaults, and from each other."""
    config = CoordinationConfig(
        total_tokens=11,
        hash_function="sha256",
        heartbeat_interval_sec=1,
        heartbeat_timeout_sec=21,
        reclaim_after=22,
        handover_memory=23,
        rebalance_check_interval_sec=24,
        dead_node_check_interval_sec=25,
        token_refresh_initial_interval_sec=26,
        token_refresh_steady_interval_sec=27,
        locks_enabled=False,
        appname="app_",
    )
    with make(memory, coordination_config=config, once_per_date=True, observer=True) as job:
        node, membership = job._node, job._membership
        assert isinstance(node, JobNode)
        assert membership is not None
        assert membership.timing == Timing(heartbeat=1, timeout=21)
        assert node.settings == JobNodeSettings(
            fleet="app_",
            node="worker-01",
            site="production",
            day=DAY,
            total_tokens=11,
            hash_function="sha256",
            is_observer=True,
            rebalance_interval=24,
            refresh_interval=27,
            locks_enabled=False,
            minimum_nodes=1,
            reclaim_after=22,
            reclaim_ended_after=22,
            handover_memory=23,
            once_per_date=True,
        )
        record = job._call(node.nodes())[0]
        assert (record.reclaim_after, record.reclaim_ended_after) == (22, 22)
        facts = describe_process(job.components)
        assert (record.host, record.pid) == (facts["host"], os.getpid())
        tasks = [str(number) for number in range(20)]
        found = [job.task_to_token(task) for task in tasks]
        assert found == list(map(node.token, tasks)) == list(map(token_maker(11, "sha256"), tasks))


def test_tasks_of_a_process_that_has_ended_need_no_delay_by_default(memory: str) -> None:
    """Those of one that is silent wait for four timeouts, and at least a minute."""
    for timeout, delay in ((15, 60), (21, 84)):
        config = CoordinationConfig(heartbeat_interval_sec=1, heartbeat_timeout_sec=timeout)
        with make(memory, f"worker-{timeout}", coordination_config=config) as job:
            node = job._node
            assert isinstance(node, JobNode)
            rules = node.settings
            assert (rules.reclaim_after, rules.reclaim_ended_after) == (delay, 0)
            own = [r for r in job._call(node.nodes()) if r.name == job.node_name]
            assert [(r.reclaim_after, r.reclaim_ended_after) for r in own] == [(delay, 0)]


@pytest.mark.parametrize(
    ("given", "url", "beat", "timeout"),
    [
        ({"heartbeat_interval_sec": 1}, "memory://", 1, 15),
        ({"heartbeat_interval_sec": 20}, "s3://bucket/jobs", 20, 90),
        ({"heartbeat_timeout_sec": 60}, "memory://", 5, 60),
        ({"heartbeat_timeout_sec": 60}, "sqlite:////tmp/jobs.db", 5, 60),
        ({"heartbeat_timeout_sec": 120}, "s3://bucket/jobs", 30, 120),
        ({"heartbeat_interval_sec": 5, "heartbeat_timeout_sec": 15}, "s3://bucket/jobs", 5, 15),
    ],
)
def test_what_is_not_given_of_the_timing_suits_the_store(
    given: dict[str, Any], url: str, beat: float, timeout: float
) -> None:
    """Either may be given alone, or both; without either the session's own defaults apply."""
    job = make(url, coordination_config=CoordinationConfig(**given))
    options = {"heartbeat_interval": beat, "worker_timeout": timeout}
    assert job._find_timing_options(url) == options
    assert make(url, coordination_config=CoordinationConfig())._find_timing_options(url) == {}


def test_leaving_waits_for_others_as_long_as_it_was_told(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a few seconds."""
    waits: list[float] = []
    for wait in (0, timedelta(seconds=7)):
        with make(memory, wait_on_exit=wait) as job:
            node = job._node
            assert node is not None
            stop = node.stop

            async def watch(seconds: float, stop: Any = stop) -> None:
                waits.append(seconds)
                await stop(seconds)

            monkeypatch.setattr(node, "stop", watch)
    assert waits[1] - waits[0] == 7


def test_each_name_for_pinning_passes_everything_on(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's names too."""
    with make(memory) as job:
        calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(job._pins, "register", lambda *given: calls.append(given))
        for one in (job.register_lock, job.register_task_lock):
            one("t", ["a", "b"], "why", 5)
            one("t", "a")
            assert calls == [([("t", ["a", "b"], "why")], 5), ([("t", "a", None)], None)]
            calls.clear()
        locks = [("t", "a", "why"), ("u", ["a"])]
        for several in (job.register_locks_bulk, job.register_task_locks_bulk):
            several(locks, 5)
            several(locks)
            assert calls == [(locks, 5), (locks, None)]
            calls.clear()


def test_a_job_that_is_not_entered_has_a_status(memory: str) -> None:
    """Before and after: of a node that owns nothing."""
    job = make(memory)
    expected = {
        "node_name": "worker-01",
        "enabled": True,
        "coordination_enabled": True,
        "is_healthy": False,
        "is_leader": False,
        "token_count": 0,
        "my_tokens": 0,
        "token_version": 0,
        "total_tokens": 100,
        "last_heartbeat": None,
        "active_nodes": [],
        "running_tasks": [],
    }
    assert job.get_coordination_status() == expected
    with job:
        job.add_task("x")
    assert job.get_coordination_status() == expected
    assert job._coordination_enabled
    off = make(memory, coordination_config=CoordinationConfig(enabled=False))
    assert (off.get_coordination_status()["enabled"], off._coordination_enabled) == (False, False)


@pytest.mark.parametrize("failing", ["finish", "_leave"])
def test_an_exit_with_a_failing_part_leaves_nothing_behind(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads end, its connections are closed, and it can be entered again."""
    calls: list[object] = []
    connections: list[Any] = []
    job = make(f"sqlite:///{tmp_path}/jobs.db", on_tokens_added=calls.append)
    before = {*threading.enumerate()}

    def enter() -> None:
        with job:
            connections.append(job.connection)
            holder = job._node if failing == "finish" else job
            work = getattr(holder, failing)

            async def fail(*arguments: object) -> None:
                await work(*arguments)
                raise ZeroDivisionError

            monkeypatch.setattr(holder, failing, fail)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            enter()
        monkeypatch.undo()
    assert [connection.closed for connection in connections] == [True, True]
    assert len(calls) == 2
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert not left & {"jobsync-worker-01", "jobsync-callbacks"}
