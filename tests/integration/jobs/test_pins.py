"""Pins of tasks to nodes, on running fleets."""

import itertools
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from servers import Locate
from teams import Team, start_team

from jobsync import Invalid, Job, Misconfigured
from jobsync.jobs.events import PinsExpired, PinsIgnored, Rebalanced
from jobsync.jobs.job_node import JobNode

_numbers = itertools.count()


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A store that no other test uses."""
    return locate(request.param)


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """A fast store, for behaviour that is the same on all stores."""
    return f"sqlite:///{tmp_path / 'jobs.db'}"


def members(team_jobs: list[Job], task: object) -> list[str]:
    """Return the nodes that may do a task now."""
    return [job.node_name for job in team_jobs if job.can_claim_task(task)]


def enter(team: Team, *names: str) -> list[Job]:
    """Enter jobs, and wait until all tokens are owned."""
    jobs = [team.add(name) for name in names]
    team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
    return jobs


PINNED_AND_FREE = 3
"""The assignments that a pin without a node takes: it revokes the task, and then nobody has it. The
end of the pin is the third: a task without an owner is assigned at once."""


def version(jobs: list[Job]) -> int:
    """Return the highest assignment number that any job has applied."""
    return max(job.token_version for job in jobs)


def elsewhere(jobs: list[Job], node: str) -> str:
    """Return a task that the node does not own without a pin."""
    return next(f"t{n}" for n in itertools.count() if members(jobs, f"t{n}") not in ([node], []))


def test_a_pin_is_in_force_at_once_with_one_rebalance(url: str) -> None:
    """All tokens and tasks that must move do so in one rebalance, which has the reason."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b-gpu")
        task = elsewhere(jobs, "b-gpu")
        before = team.count(Rebalanced)
        jobs[0].register_task_lock(task, "%-gpu", "needs a GPU")
        team.until(lambda: members(jobs, task) == ["b-gpu"])
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
        rebalances = [event for event in team.events if isinstance(event, Rebalanced)][before:]
        assert [event.reason for event in rebalances] == ["locks_changed"]
        assert abs(len(jobs[0].my_tokens) - len(jobs[1].my_tokens)) <= 2


def test_a_task_whose_pin_matches_no_node_waits_alone(url: str) -> None:
    """Other tasks of its token continue; after the pin is cleared it continues at once."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        token = jobs[0].task_to_token("t")
        others = [f"o{n}" for n in range(600) if jobs[0].task_to_token(f"o{n}") == token]
        before = version(jobs)
        jobs[1].register_task_lock("t", "gone-%")
        team.until(lambda: members(jobs, "t") == [])
        team.until(lambda: all(len(members(jobs, other)) == 1 for other in others))
        assert jobs[0].clear_locks_by_creator("b") == 1
        team.until(lambda: len(members(jobs, "t")) == 1)
        assert version(jobs) - before <= PINNED_AND_FREE
        assert others
        assert jobs[0].list_locks() == []


def test_a_pin_expires_by_itself(url: str) -> None:
    """Without a request at that moment; an expired pin is removed and reported."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        before = version(jobs)
        jobs[0].register_task_lock("t", "gone-%", expires_in_days=1)
        (lock,) = jobs[1].list_locks()
        assert (lock["expires_at"] - lock["created_at"]).total_seconds() == pytest.approx(86_400)
        team.until(lambda: members(jobs, "t") == [])
        # To register it again renews it.
        jobs[0].register_task_lock("t", "gone-%", expires_in_days=0.5 / 86_400)
        team.until(lambda: len(members(jobs, "t")) == 1)
        assert version(jobs) - before <= PINNED_AND_FREE
        assert team.count(PinsExpired) == 1
        assert jobs[1].list_locks() == []


def test_ordered_fallbacks_follow_the_live_nodes(url: str) -> None:
    """The first pattern that matches any node counts; it changes with the fleet."""
    with start_team(url) as team:
        jobs = enter(team, "a", "spare-1")
        jobs[0].register_lock("t", ["best-%", "spare-%"], "prefers the best")
        team.until(lambda: members(jobs, "t") == ["spare-1"])
        assert jobs[0].list_locks()[0]["node_pattern"] == "spare-%"
        jobs.append(team.add("best-1"))
        team.until(lambda: members(jobs, "t") == ["best-1"])
        (lock,) = jobs[0].list_locks()
        assert lock["node_pattern"] == "best-%"
        assert lock["node_patterns"] == ["best-%", "spare-%"]
        assert (lock["task_id"], lock["token_id"]) == ("t", jobs[0].task_to_token("t"))
        assert (lock["reason"], lock["created_by"]) == ("prefers the best", "a")


def test_several_nodes_for_one_task_are_alternatives(url: str) -> None:
    """As the guide registers them, one row each; the third node never owns the task."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b", "c")
        tasks = [f"t{n}" for n in range(30)]
        jobs[2].register_task_locks_bulk(
            [(task, node, "resource") for task in tasks for node in ("a", "b")]
        )
        team.until(lambda: all(members(jobs, task) in (["a"], ["b"]) for task in tasks))
        assert len(jobs[0].list_locks()) == 60


def test_ten_thousand_pins_are_all_in_force(url: str) -> None:
    """If they match no node, their tasks wait and no other task does."""
    tasks = [f"p{n}" for n in range(10_000)]
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        locks = [(task, ["gone-1", f"gone-{n % 50}"], "none") for n, task in enumerate(tasks)]
        jobs[0].register_locks_bulk(locks)
        assert len(jobs[1].list_locks()) == 10_000
        team.until(lambda: not any(members(jobs, task) for task in tasks[::97]))
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
        assert not any(members(jobs, task) for task in tasks)
        assert all(len(members(jobs, f"o{n}")) == 1 for n in range(1000))
        jobs[0].register_locks_bulk([(task, ["gone-1", "b"]) for task in tasks])
        team.until(lambda: all(members(jobs, task) == ["b"] for task in tasks[::97]))
        assert all(members(jobs, task) == ["b"] for task in tasks)
        assert jobs[1].clear_all_locks() == 20_000


@pytest.mark.parametrize("length", [10, 190])
def test_more_waiting_tasks_than_one_document_holds(
    url: str, length: int, full_scale: bool
) -> None:
    """Whatever the length of their ids: any number of tasks may wait alone."""
    if length == 10 and not url.startswith("memory") and not full_scale:
        pytest.skip("at full scale; longer ids fill more documents on this store")
    tasks = [f"{n:0{length}d}" for n in range(22_000)]
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        for number, creator in enumerate(jobs):
            creator.register_locks_bulk([(task, "gone-%") for task in tasks[number::2]])
        team.until(lambda: not any(members(jobs, task) for task in tasks[::997]))
        assert not any(members(jobs, task) for task in tasks)
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
        if not url.startswith(("memory", "s3")):
            query = "SELECT count(*), count(node) FROM sync_lock"
            assert tuple(jobs[0].connection.execute(query).fetchone()) == (22_000, 0)
        # The next leader reads all of them.
        leader = next(job for job in jobs if job.am_i_leader())
        (other,) = [job for job in jobs if job is not leader]
        leader.__exit__(RuntimeError, None, None)
        team.until(lambda: len(other.my_tokens) == 60)
        assert not any(map(other.can_claim_task, tasks))
        assert other.clear_all_locks() == 22_000
        team.until(lambda: all(map(other.can_claim_task, tasks)))


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
def test_a_pin_of_another_process_is_in_force(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Within `rebalance_check_interval_sec` if the store reports no changes."""
    match kind:
        case "sqlite":
            url = f"sqlite:///{tmp_path / 'jobs.db'}"
        case "postgres":
            url = f"{request.getfixturevalue('postgres').url}?schema=heed_{os.getpid()}"
        case _:
            url = str(request.getfixturevalue("bucket_url"))
    program = f"""
        from jobsync import CoordinationConfig, Job
        config = CoordinationConfig(
            total_tokens=60, heartbeat_interval_sec=1, heartbeat_timeout_sec=4
        )
        with Job("admin", "test", coordination_config=config, url={url!r}, observer=True) as job:
            job.register_task_lock("t", "gone-%")
    """
    with start_team(url) as team:
        job = team.add("a", settings={"rebalance_check_interval_sec": 0.5})
        assert job.can_claim_task("t")
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
        team.until(lambda: not job.can_claim_task("t"))


def test_pins_outlive_their_process(quick: str) -> None:
    """Killed, not stopped."""
    program = f"""
        import os, signal
        from jobsync import CoordinationConfig, Job
        config = CoordinationConfig(
            total_tokens=60, heartbeat_interval_sec=1, heartbeat_timeout_sec=4
        )
        with Job("doomed", "test", coordination_config=config, url={quick!r}) as job:
            job.register_task_lock("t", "b", "stays")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert ran.returncode == -signal.SIGKILL
    with start_team(quick) as team:
        jobs = [team.add("a"), team.add("b")]
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
        team.until(lambda: members(jobs, "t") == ["b"])
        assert [lock["created_by"] for lock in jobs[0].list_locks()] == ["doomed"]


def test_a_task_that_comes_back_to_its_token_is_not_done_again(quick: str) -> None:
    """A task that its own node has just finished is refused, as after any handover."""
    with start_team(quick) as team:
        jobs = enter(team, "a", "b")
        token = jobs[0].task_to_token("t")
        other = next(f"o{n}" for n in range(600) if jobs[0].task_to_token(f"o{n}") == token)
        first, second = [f"o{n}" for n in range(6000) if jobs[0].task_to_token(f"o{n}") == token][
            1:3
        ]
        # Two of the token's tasks need `a` and one needs `b`: that one does not follow the token.
        jobs[0].register_task_locks_bulk([(first, "a"), (second, "a")])
        jobs[1].register_task_lock(other, "b")
        team.until(lambda: members(jobs, other) == ["b"] and members(jobs, first) == ["a"])
        jobs[1].add_task(other)
        jobs[1].write_audit()
        assert jobs[0].clear_locks_by_creator("b") == 1
        node = jobs[0]._entered_node
        assert isinstance(node, JobNode)
        owned = node.owned_tokens
        team.until(lambda: owned.owns(other, token))
        assert members(jobs, other) == []
        assert "b" in str(jobs[0].incomplete_tasks() or jobs[0].get_audit())


def test_a_provider_registers_before_the_node_owns_anything(url: str) -> None:
    """Its first tokens follow the pins."""
    owned: list[set[int]] = []

    def provide(job: Job) -> None:
        job.register_task_lock("t", "b")
        job.register_task_locks_bulk([("u", "b", "why")])
        owned.append(job.my_tokens)

    with start_team(url) as team:
        first = team.add("b", lock_provider=provide)
        assert owned == [set()]
        jobs = [first, team.add("a")]
        team.until(lambda: all(job.my_tokens for job in jobs))
        assert members(jobs, "t") == members(jobs, "u") == ["b"]


def test_own_pins_are_replaced_in_one_write(quick: str) -> None:
    """Pins of other nodes stay; a provider that fails leaves its node's earlier ones."""
    with start_team(quick) as team:
        other = team.add("other")
        other.register_task_lock("o", "other")
        with team.make("a", lock_provider=lambda job: job.register_task_lock("old", "a")) as job:
            assert {lock["task_id"] for lock in job.list_locks()} == {"o", "old"}

        def fail(job: Job) -> None:
            job.register_task_lock("half", "a")
            raise RuntimeError("the provider's own")

        failing = team.make("a", lock_provider=fail, clear_existing_locks=True)
        with pytest.raises(RuntimeError, match="the provider's own"):
            failing.__enter__()
        assert {lock["task_id"] for lock in other.list_locks()} == {"o", "old"}

        seen: list[set[str]] = []

        def provide(job: Job) -> None:
            job.register_task_lock("new", "a")
            seen.append({lock["task_id"] for lock in other.list_locks()})

        team.add("a", lock_provider=provide, clear_existing_locks=True)
        assert seen == [{"o", "old"}]
        assert {lock["task_id"] for lock in other.list_locks()} == {"o", "new"}


def test_registering_the_same_pin_again_renews_it(quick: str) -> None:
    """A job that registers its permanent pins at each start does not accumulate them."""
    with start_team(quick) as team:
        job = team.add("a")
        job.register_task_lock("t", "a", "first", expires_in_days=1)
        job.register_task_lock("t", "a", "second")
        (lock,) = job.list_locks()
        assert (lock["reason"], lock["expires_at"]) == ("second", None)


def test_a_pin_lasts_at_most_a_million_days(quick: str) -> None:
    """Found: one of 1e14 days was stored, and could be shown by no database."""
    with start_team(quick) as team:
        job = team.add("a")
        for wrong in (0, -1, math.nan, math.inf, 1e14, True, "5"):
            with pytest.raises(Invalid, match="expires_in_days must be more than 0 to 1,000,000"):
                job.register_task_lock("t", "a", expires_in_days=cast("Any", wrong))
        assert job.list_locks() == []
        before = datetime.now(UTC)
        job.register_task_lock("t", "a", expires_in_days=1_000_000)
        (lock,) = job.list_locks()
        assert lock["expires_at"] >= before + timedelta(days=1_000_000)


def is_at(jobs: list[Job], task: str, node: str) -> bool:
    """Whether one node, and no other, may do a task now."""
    return members(jobs, task) == [node]


def test_what_is_stored_does_not_grow_with_changes(quick: str, tmp_path: Path) -> None:
    """Pins come and go; only what is in force is kept."""

    def count() -> dict[str, int]:
        query = "SELECT key FROM jobsync_record WHERE value IS NOT NULL"
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
            keys = [key.split("/")[0] for (key,) in connection.execute(query)]
        return dict(Counter(keys))

    with start_team(quick) as team:
        jobs = enter(team, "a", "b-gpu")
        counts = []
        for number in range(6):
            tasks = [f"t{number}", "never"]
            for task in tasks:
                jobs[0].register_task_lock(task, "b-gpu" if task != "never" else "nobody", "test")
            team.until(partial(is_at, jobs, tasks[0], "b-gpu"))
            team.until(lambda: members(jobs, "never") == [])
            jobs[0].clear_all_locks()
            # What was in force before is removed a moment after it is in force no longer.
            team.until(lambda: members(jobs, "never") != [] and "exceptions" not in count())
            counts.append(count())
    assert counts[-1] == counts[1]


def test_pins_can_be_switched_off(quick: str) -> None:
    """Then new pins are refused, and existing ones have no effect and are reported."""
    with start_team(quick) as team:
        with team.make("a") as job:
            job.register_task_lock("t", "gone-%")
            team.until(lambda: not job.can_claim_task("t"))
        job = team.add("a", settings={"locks_enabled": False})
        team.until(lambda: job.can_claim_task("t"))
        assert team.count(PinsIgnored) == 1
        with pytest.raises(Misconfigured, match="locks_enabled"):
            job.register_task_lock("t", "a")


def test_live_nodes_agree_on_locks_enabled(url: str) -> None:
    """A node with another value may not join until the others have left or died."""
    with start_team(url) as team:
        with team.make("a") as job:
            job.register_task_lock("t", "gone-%")
            other = team.make("b", settings={"locks_enabled": False}, wait_on_enter=0.2)
            with pytest.raises(Misconfigured, match="must be True as on the live node a"):
                other.__enter__()
        with team.make("b", settings={"locks_enabled": False}, wait_on_enter=20) as job:
            team.until(lambda: job.can_claim_task("t"))
            with pytest.raises(Misconfigured, match="must be False as on the live node b"):
                team.make("a", wait_on_enter=0.2).__enter__()


def test_without_a_fleet_there_is_nothing_to_pin(quick: str) -> None:
    """The node owns everything; registrations are checked and have no effect."""
    with start_team(quick) as team:
        job = team.add("a", settings={"enabled": False})
        job.register_task_lock("t", "gone-%")
        assert job.can_claim_task("t")
        assert job.list_locks() == []
        assert job.clear_locks_by_creator("a") == job.clear_all_locks() == 0
        with pytest.raises(Invalid, match="node_pattern"):
            job.register_task_lock("t", "")


@pytest.mark.parametrize(
    ("locks", "days", "field"),
    [
        ([("t", "a", "r", "x")], None, r"locks\[0\]"),
        ([("t", "a"), "ta"], None, r"locks\[1\]"),
        ([("t", [])], None, "node_patterns"),
        ([("t", "a\\")], None, "node_pattern"),
        ([("t", 5)], None, "node_pattern"),
        ([("t", "a\0")], None, "node_pattern"),
        ([("t", "a", "\0")], None, "reason"),
        ([("", "a")], None, "id"),
        ([("t", "a")], 0, "expires_in_days"),
        ([("t", "a")], float("inf"), "expires_in_days"),
        ([("t", "a")], 1e305, "expires_in_days"),
    ],
)
def test_invalid_pins_are_refused(
    quick: str, locks: list[tuple[object, ...]], days: float | None, field: str
) -> None:
    """The error names the field, and nothing is registered."""
    with start_team(quick) as team:
        job = team.add("a", settings={"enabled": False})
        with pytest.raises(Invalid, match=field):
            job.register_locks_bulk([("good", "a"), *locks][-len(locks) :], days)


def test_a_job_that_is_not_entered_cannot_pin(quick: str) -> None:
    """Nor can one that was left."""
    with start_team(quick) as team:
        job = team.make("a")
        with pytest.raises(Invalid, match="not entered"):
            job.list_locks()
