"""Every SQL block of the JobSync guide, run as it is printed, with correct results.

The process's date differs from UTC's: in one of the two time zones it always does.
"""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import servers
from guide import SQL
from teams import Team, start_team

from jobsync.jobs.events import Rebalanced

_numbers = itertools.count()
ZONES = ["Pacific/Kiritimati", "America/Adak"]
TOTAL = 60
MICROSECOND = timedelta(microseconds=1)


@contextmanager
def in_time_zone(zone: str) -> Iterator[None]:
    """Set the time zone of this process."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = zone
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


class Fleet:
    """Live nodes, one that was killed, one that has left, and all kinds of tasks."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.jobs = [team.add(name) for name in ("a", "b-gpu", "c")]
        team.until(self.is_owned)
        with team.make("left") as job:
            job.register_task_lock("by-left", "%", "stays")
        kill_one(team.url)
        team.until(self.is_owned)
        # The view shows its last heartbeat.
        self.run(
            "UPDATE jobsync_record SET written = written - interval '2 hours' WHERE value"
            " LIKE '%\"state\":\"dead\"%' AND key LIKE 'session/%'"
        )
        a, b, c = self.jobs
        a.register_task_lock("gpu", "%-gpu", "needs one", expires_in_days=2)
        b.register_task_locks_bulk([(f"any-{n}", node) for n in range(20) for node in ("a", "c")])
        c.register_lock("waits", ["gone-%", "lost-%"])
        team.until(lambda: not any(job.can_claim_task("waits") for job in self.jobs))
        team.until(lambda: b.can_claim_task("gpu"))
        team.until(self.is_owned)

    def read_history(self) -> set[str]:
        """Return the lines of the history of rebalances."""
        return {row["id"] for row in self.run("SELECT id FROM sync_rebalance")}

    def is_owned(self) -> bool:
        """Whether all tokens are owned."""
        return sum(len(job.my_tokens) for job in self.jobs) == TOTAL

    def run(self, statement: str) -> list[dict[str, Any]]:
        """Run a statement on a job's connection; return its rows, if any."""
        cursor = self.jobs[0].connection.execute(statement)
        if cursor.description is None:
            return []
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def ask(self, block: int) -> list[dict[str, Any]]:
        """Run a block."""
        return self.run(SQL[block])


def kill_one(url: str) -> None:
    """Start a node that pins and claims tasks, and kill it."""
    program = f"""
        import os, signal
        from jobsync import CoordinationConfig, Job
        config = CoordinationConfig(total_tokens={TOTAL})
        with Job("doomed", "test", coordination_config=config, url={url!r}) as job:
            job.register_task_lock("by-doomed", "a", "stays too")
            job.add_task(next(n for n in range(1000) if job.can_claim_task(f"{{n}}")))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL


@contextmanager
def start_fleet(server: servers.PostgresServer, zone: str) -> Iterator[Fleet]:
    """Start a fleet in a time zone."""
    url = f"{server.url}?schema=guide_sql_{os.getpid()}_{next(_numbers)}"
    with in_time_zone(zone), start_team(url) as team:
        yield Fleet(team)


@pytest.fixture(scope="module", params=ZONES)
def fleet(request: pytest.FixtureRequest, postgres: servers.PostgresServer) -> Iterator[Fleet]:
    """A fleet that has done some tasks, for queries."""
    with start_fleet(postgres, request.param) as fleet:
        work(fleet)
        yield fleet


def work(fleet: Fleet) -> None:
    """Do tasks of today and of yesterday, and leave some of both undone."""
    yesterday = fleet.jobs[0].date - timedelta(days=1)
    with fleet.team.make("late", date=yesterday) as job:
        fleet.team.until(lambda: bool(job.my_tokens))
        mine = [f"y{n}" for n in range(200) if job.can_claim_task(f"y{n}")]
        job.add_tasks(mine[:4])
        job._call(job._entered_node.finish(mine[:3]))
        job._call(job._entered_node.finish(mine[3:4], "failed"))
        fleet.failed_yesterday = mine[3]  # type: ignore[attr-defined]
    fleet.team.until(fleet.is_owned)
    for job in fleet.jobs:
        mine = [f"t{n}" for n in range(200) if job.can_claim_task(f"t{n}")]
        job.add_tasks(mine[:10])
        job._call(job._entered_node.finish(mine[:7]))


def test_the_zones_have_different_dates() -> None:
    """In one of the zones it is another day than in UTC, whenever this runs."""
    days = set()
    for zone in ZONES:
        with in_time_zone(zone):
            days.add(time.strftime("%F") == time.strftime("%F", time.gmtime()))
    assert False in days


def test_active_nodes(fleet: Fleet) -> None:
    """Live nodes are active, the killed one is dead, the one that left is gone."""
    rows = fleet.ask(0)
    assert {row["name"]: row["status"] for row in rows} == {
        "a": "ACTIVE",
        "b-gpu": "ACTIVE",
        "c": "ACTIVE",
        "doomed": "DEAD",
    }
    known = {node["name"]: node for node in fleet.jobs[1].get_active_nodes()}
    for row in rows:
        if row["name"] in known and not known[row["name"]]["is_leader"]:
            # The last digit of a float may be rounded differently.
            assert abs(row["created_on"] - known[row["name"]]["created_on"]) <= MICROSECOND
        assert row["time_since_heartbeat"] >= timedelta(0)


def test_token_distribution(fleet: Fleet) -> None:
    """Each node has the tokens that it reports."""
    rows = {row["node"]: row for row in fleet.ask(1)}
    assert rows.keys() == {"a", "b-gpu", "c"}
    for job in fleet.jobs:
        row, mine = rows[job.node_name], job.my_tokens
        assert (row["token_count"], row["min_token"], row["max_token"]) == (
            len(mine),
            min(mine),
            max(mine),
        )
        assert float(row["pct"]) == pytest.approx(100 * len(mine) / TOTAL, abs=0.06)


def test_token_balance(fleet: Fleet) -> None:
    """Equal to the counts of the nodes."""
    counts = [len(job.my_tokens) for job in fleet.jobs]
    (row,) = fleet.ask(2)
    assert row["max_imbalance"] == max(counts) - min(counts)
    assert float(row["avg_tokens"]) == pytest.approx(TOTAL / 3)
    assert row["stddev_tokens"] is not None


def test_current_leader(fleet: Fleet) -> None:
    """The node that assigns the tokens."""
    (row,) = fleet.ask(3)
    assert [job.node_name for job in fleet.jobs if job.am_i_leader()] == [row["leader_node"]]
    assert fleet.run("SELECT node FROM sync_leader") == [{"node": row["leader_node"]}]


def test_all_locks(fleet: Fleet) -> None:
    """Every pin is counted, with the pattern in force."""
    locks = fleet.jobs[0].list_locks()
    assert len(locks) == 44
    expected = Counter((lock["node_pattern"], lock["reason"], lock["expires_at"]) for lock in locks)
    rows = fleet.ask(4)
    found = {
        (row["node_pattern"], row["reason"], row["expires_at"]): row["locked_token_count"]
        for row in rows
    }
    assert found == dict(expected)
    assert {row["node_pattern"]: row["status"] for row in rows}["%-gpu"] == "active"
    assert {row["registered_by"] for row in rows} == {"a", "b-gpu", "c", "left", "doomed"}


def test_orphaned_locks(fleet: Fleet) -> None:
    """Pins of the node that left and of the one that died; they are still in force."""
    rows = fleet.ask(5)
    assert {row["created_by"] for row in rows} == {"left", "doomed"}
    assert all(timedelta(0) <= row["orphaned_duration"] < timedelta(hours=1) for row in rows)
    assert fleet.jobs[0].can_claim_task("by-doomed")


def test_incorrectly_assigned_locks(fleet: Fleet) -> None:
    """None: each pinned task is on a node that may do it, or waits."""
    assert fleet.ask(6) == []
    assert [job.node_name for job in fleet.jobs if job.can_claim_task("gpu")] == ["b-gpu"]
    owners = {
        job.node_name for n in range(20) for job in fleet.jobs if job.can_claim_task(f"any-{n}")
    }
    assert owners <= {"a", "c"}


def test_a_lock_that_is_not_in_force_is_found(postgres: servers.PostgresServer) -> None:
    """The query can find something: pins that a leader has switched off."""
    url = f"{postgres.url}?schema=guide_sql_{os.getpid()}_{next(_numbers)}"
    with start_team(url) as team:
        with team.make("a") as job:
            job.register_task_lock("t", "gone-%", "why")
        job = team.add("b", settings={"locks_enabled": False})
        team.until(lambda: len(job.my_tokens) == TOTAL)
        ((token, pattern, node, *_),) = job.connection.execute(SQL[6]).fetchall()
        assert (token, pattern, node) == (job.task_to_token("t"), "gone-%", "b")
        assert job.can_claim_task("t")


def test_recent_rebalances(fleet: Fleet) -> None:
    """The rebalances that the leaders have reported, the latest first."""
    rebalances = [event for event in fleet.team.events if isinstance(event, Rebalanced)]
    rows = fleet.ask(7)
    assert [
        (row["trigger_reason"], row["leader_node"], row["nodes_before"], row["nodes_after"])
        for row in rows
    ] == [(e.reason, e.node, e.nodes_before, e.nodes_after) for e in reversed(rebalances)][:10]
    assert [row["tokens_moved"] for row in rows] == [e.tokens_moved for e in reversed(rebalances)][
        :10
    ]
    assert all(row["duration_ms"] > 0 for row in rows)


def test_rebalance_frequency(fleet: Fleet) -> None:
    """All are of the last hour or two."""
    rows = fleet.ask(8)
    assert sum(row["rebalance_count"] for row in rows) == fleet.team.count(Rebalanced)
    assert 1 <= len(rows) <= 2
    assert all(
        row["hour"].utcoffset() in {timedelta(hours=14), timedelta(hours=-10)} for row in rows
    )


def test_tasks_by_node(fleet: Fleet) -> None:
    """The tasks that each node has claimed today, including the dead one."""
    rows = {row["node"]: row["task_count"] for row in fleet.ask(9)}
    assert rows == {"a": 10, "b-gpu": 10, "c": 10, "doomed": 1, "late": 1}


def test_incomplete_tasks(fleet: Fleet) -> None:
    """Tasks of any date that were started today and are not done."""
    rows = {row["item"] for row in fleet.ask(10)}
    today = {row["task_id"] for row in fleet.jobs[0].incomplete_tasks()}
    assert len(today) == 10
    assert rows == today | {fleet.failed_yesterday}  # type: ignore[attr-defined]


def test_completion_rate(fleet: Fleet) -> None:
    """Today's claims, and how many are done."""
    (row,) = fleet.ask(11)
    assert (row["claimed_count"], row["audited_count"], row["incomplete_count"]) == (32, 21, 11)
    assert float(row["completion_pct"]) == 65.6


@pytest.fixture
def live(postgres: servers.PostgresServer) -> Iterator[Fleet]:
    """A fleet for maintenance."""
    with start_fleet(postgres, ZONES[0]) as fleet:
        yield fleet


def test_maintenance_on_a_live_fleet(live: Fleet) -> None:
    """Every DELETE of the guide, one after the other; all tokens are owned afterwards."""
    locks = {lock["task_id"] for lock in live.jobs[0].list_locks()}
    # Stale nodes: the one that was killed.
    live.ask(12)
    assert [row["name"] for row in live.run("SELECT name FROM sync_node ORDER BY name")] == [
        "a",
        "b-gpu",
        "c",
    ]
    # The record of a live node is deleted: it comes back.
    live.run("DELETE FROM sync_node WHERE name = 'c'")
    # Orphaned tokens: of nodes that do not exist.
    live.ask(13)
    live.team.until(lambda: len(live.run("SELECT name FROM sync_node")) == 3)
    live.team.until(live.is_owned)
    live.team.until(lambda: len(live.run("SELECT token_id FROM sync_token")) == TOTAL)
    # Old history: there is none yet; then there is.
    before = live.read_history()
    live.ask(14)
    # A running fleet may add to it at any time.
    assert live.read_history() >= before
    live.run(
        "UPDATE jobsync_entry SET id = '1700000000000' || substr(id, 14) WHERE id = "
        "(SELECT min(id) FROM jobsync_entry)"
    )
    live.ask(14)
    left = live.read_history()
    assert left & before == before - {min(before)}
    assert not [line for line in left if line.startswith("1700000000000")]
    # Orphaned locks: of nodes that no longer exist.
    live.ask(15)
    pinned = {lock["task_id"] for lock in live.jobs[0].list_locks()}
    assert pinned == locks - {"by-left", "by-doomed"}
    # Expired locks: removed by the leader or by this statement.
    live.jobs[0].register_task_lock("brief", "gone", expires_in_days=1e-7)
    live.ask(16)
    live.team.until(lambda: not live.run("SELECT 1 FROM sync_lock WHERE task_id = 'brief'"))
    assert {lock["task_id"] for lock in live.jobs[0].list_locks()} == pinned
    # Everything at once.
    for view in ("node", "token", "rebalance", "lock"):
        live.run(f"DELETE FROM sync_{view}")
    live.team.until(lambda: len(live.run("SELECT name FROM sync_node")) == 3)
    live.team.until(live.is_owned)
    assert live.jobs[0].list_locks() == []
    assert sum(job.can_claim_task("anything") for job in live.jobs) == 1


def test_there_are_seventeen() -> None:
    """Each is in one of these tests."""
    assert len(SQL) == 17
