"""The guide's queries for SQLite, as the SQL reference prints them, with correct results."""

import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from guide import SQLITE_SQL
from teams import Team, start_team

from jobsync.jobs.events import Rebalanced

TOTAL = 60


class Fleet:
    """Nodes on one file, and queries."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.jobs = [team.add(name) for name in ("a", "b-gpu", "c")]
        team.until(self.is_owned)
        with team.make("left") as job:
            job.register_task_lock("by-left", "%", "stays")
        kill_one(team.url)
        team.until(self.is_owned)
        a, b, c = self.jobs
        a.register_task_lock("gpu", "%-gpu", "needs one", expires_in_days=2)
        b.register_task_locks_bulk([(f"any-{n}", node) for n in range(20) for node in ("a", "c")])
        c.register_task_lock("waits", "gone-%")
        team.until(lambda: not any(job.can_claim_task("waits") for job in self.jobs))
        team.until(lambda: b.can_claim_task("gpu") and self.is_owned())

    def is_owned(self) -> bool:
        """Whether all tokens are owned."""
        return sum(len(job.my_tokens) for job in self.jobs) == TOTAL

    def run(self, statement: str) -> list[dict[str, Any]]:
        """Run a statement on a job's connection; return its rows."""
        cursor = self.jobs[0].connection.execute(statement)
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def ask(self, query: int) -> list[dict[str, Any]]:
        """Run a query of the reference."""
        return self.run(SQLITE_SQL[query])

    def read_history(self) -> set[str]:
        """Return the lines of the history of rebalances."""
        return {row["id"] for row in self.run("SELECT id FROM sync_rebalance")}

    def age_killed_node(self) -> None:
        """Make the killed node silent for two hours."""
        with sqlite3.connect(f"{self.team.url.removeprefix('sqlite:///')}-sessions") as connection:
            connection.execute(
                "UPDATE jobsync_record SET written = written - 7200"
                " WHERE key LIKE 'session/%' AND value ->> 'state' = 'dead'"
            )
        connection.close()


def kill_one(url: str) -> None:
    """Start a node that pins a task, and kill it."""
    program = f"""
        import os, signal
        from jobsync import CoordinationConfig, Job
        config = CoordinationConfig(total_tokens={TOTAL})
        with Job("doomed", "test", coordination_config=config, url={url!r}) as job:
            job.register_task_lock("by-doomed", "a", "stays too")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL


@contextmanager
def start_fleet(path: Path) -> Iterator[Fleet]:
    """Start a fleet on a file."""
    with start_team(f"sqlite:///{path}") as team:
        yield Fleet(team)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that has done some tasks, for queries."""
    with start_fleet(tmp_path_factory.mktemp("fleet") / "jobs.db") as fleet:
        yesterday = fleet.jobs[0].date - timedelta(days=1)
        with fleet.team.make("late", date=yesterday) as job:
            fleet.team.until(lambda: bool(job.my_tokens))
            mine = [f"y{n}" for n in range(200) if job.can_claim_task(f"y{n}")]
            job.add_tasks(mine[:3])
        fleet.team.until(fleet.is_owned)
        for job in fleet.jobs:
            mine = [f"t{n}" for n in range(200) if job.can_claim_task(f"t{n}")]
            job.add_tasks(mine[:10])
            job._call(job._entered_node.finish(mine[:7]))
        fleet.age_killed_node()
        yield fleet


def test_nodes_and_their_leader(fleet: Fleet) -> None:
    """Equal to what the nodes report."""
    found = {row["name"]: (row["status"], row["seconds_since_heartbeat"]) for row in fleet.ask(0)}
    assert {name: status for name, (status, _) in found.items()} == {
        "a": "ACTIVE",
        "b-gpu": "ACTIVE",
        "c": "ACTIVE",
        "doomed": "DEAD",
    }
    assert found["doomed"][1] > 7200
    assert all(-1 < seconds < 4 for status, seconds in found.values() if status == "ACTIVE")
    leading = [job.node_name for job in fleet.jobs if job.am_i_leader()]
    assert [row["leader_node"] for row in fleet.ask(3)] == leading


def test_tokens(fleet: Fleet) -> None:
    """Each node has the tokens that it reports."""
    rows = {row["node"]: row for row in fleet.ask(1)}
    for job in fleet.jobs:
        mine, row = job.my_tokens, rows[job.node_name]
        assert (row["token_count"], row["min_token"]) == (len(mine), min(mine))
    counts = [len(job.my_tokens) for job in fleet.jobs]
    (row,) = fleet.ask(2)
    assert (row["max_imbalance"], row["avg_tokens"]) == (max(counts) - min(counts), TOTAL / 3)
    assert row["stddev_tokens"] >= 0


def test_locks(fleet: Fleet) -> None:
    """All are counted; orphans are found; none is misplaced."""
    rows = fleet.ask(4)
    assert sum(row["locked_token_count"] for row in rows) == len(fleet.jobs[0].list_locks()) == 44
    assert {row["node_pattern"]: row["status"] for row in rows}["%-gpu"] == "active"
    assert {row["created_by"] for row in fleet.ask(5)} == {"left", "doomed"}
    assert fleet.ask(6) == []


def test_rebalances(fleet: Fleet) -> None:
    """The rebalances that the leaders have reported."""
    rebalances = [event for event in fleet.team.events if isinstance(event, Rebalanced)]
    rows = fleet.ask(7)
    assert sorted((row["trigger_reason"], row["tokens_moved"]) for row in rows) == sorted(
        (event.reason, event.tokens_moved) for event in rebalances[-10:]
    )
    assert sum(row["rebalance_count"] for row in fleet.ask(8)) == len(rebalances)


def test_work(fleet: Fleet) -> None:
    """Today's tasks; yesterday's task, which was finished today, is not incomplete."""
    assert {row["node"]: row["task_count"] for row in fleet.ask(9)} == {
        "a": 10,
        "b-gpu": 10,
        "c": 10,
    }
    incomplete = {row["task_id"] for row in fleet.jobs[0].incomplete_tasks()}
    assert {row["item"] for row in fleet.ask(10)} == incomplete
    (row,) = fleet.ask(11)
    assert (row["claimed_count"], row["audited_count"], row["completion_pct"]) == (30, 21, 70.0)


def test_maintenance(tmp_path: Path) -> None:
    """After every DELETE on a running fleet all tokens are owned."""
    with start_fleet(tmp_path / "jobs.db") as fleet:
        fleet.age_killed_node()
        fleet.ask(12)
        names = [row["name"] for row in fleet.run("SELECT name FROM sync_node ORDER BY 1")]
        assert names == ["a", "b-gpu", "c"]
        fleet.ask(13)
        before = fleet.read_history()
        fleet.ask(14)
        assert fleet.read_history() >= before
        fleet.ask(15)
        locks = {lock["task_id"] for lock in fleet.jobs[0].list_locks()}
        assert not locks & {"by-left", "by-doomed"}
        assert len(locks) == 22
        fleet.ask(16)
        assert len(fleet.jobs[0].list_locks()) == 42
        for view in ("node", "token", "rebalance", "lock"):
            fleet.run(f"DELETE FROM sync_{view}")
        fleet.team.until(lambda: len(fleet.run("SELECT name FROM sync_node")) == 3)
        fleet.team.until(fleet.is_owned)
        assert fleet.jobs[0].list_locks() == []
        assert sum(job.can_claim_task("anything") for job in fleet.jobs) == 1


def test_there_is_a_query_for_each() -> None:
    """Seventeen, as in the guide."""
    assert len(SQLITE_SQL) == 17
