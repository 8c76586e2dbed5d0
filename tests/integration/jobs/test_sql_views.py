"""The SQL views of a fleet agree with what its nodes do, on both databases."""

import asyncio
import datetime as dt
import itertools
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import msgspec
import psycopg
import pytest
import servers
from teams import Team, start_team

from jobsync import Components, Invalid, Job, Misconfigured, open_store
from jobsync.core.trust import Timing
from jobsync.core.urls import SqliteUrl
from jobsync.jobs.events import ViewsMissing
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.sql_views import (
    POSTGRES_VIEWS,
    VIEWS_VERSION,
    SqlViews,
    _find_version,
    _Relation,
    find_time_zone,
    postgres_views_sql,
)
from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.opening import open_backend
from jobsync.stores.opening import read_url

_numbers = itertools.count()
DAY = 86_400.0
KEYS = JobKeys("sync_")
MARK = f"jobsync {VIEWS_VERSION}"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: servers.Locate) -> str:
    """A store that no other test uses."""
    return locate(request.param)


def ask(job: Job, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run a query on a job's connection."""
    rows = job.connection.execute(query, parameters or None).fetchall()
    return [tuple(row) for row in rows]


def enter(team: Team, *names: str, **options: Any) -> list[Job]:
    """Enter jobs, and wait until all tokens are owned."""
    jobs = [team.add(name, **options) for name in names]
    team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
    return jobs


def break_off(job: Job) -> None:
    """Leave from further up the stack, as a signal handler does."""
    job.__exit__(None, None, None)


def wait(team: Team, job: Job, query: str, expected: list[tuple[Any, ...]]) -> None:
    """Wait until a query has this result; events of the nodes make us query again."""
    team.until(lambda: ask(job, query) == expected)


def check_claims(job: Job) -> None:
    """Check that each column of the views of tasks says what the claims say."""
    claims = sorted(job._call(job._entered_node.list_claims()), key=lambda claim: claim.task)
    columns = "node, item, task_id, date, state, run, token_id, incarnation, created_on, NULL"
    found: list[tuple[Any, ...]] = [
        (c.node, c.task, c.task, c.date, c.state, c.run, c.token, c.owner, c.started, None)
        for c in claims
    ]
    check_rows(job, "sync_claim", columns, found)
    check_rows(job, "sync_unfinished", columns, [row for row in found if row[4] != "done"])
    columns = "node, item, task_id, date, 'done', run, NULL, NULL, started_on, created_on"
    audits = [
        (c.node, c.task, c.task, c.date, "done", c.run, None, None, c.started, c.ended)
        for c in claims
        if c.state == "done"
    ]
    check_rows(job, "sync_audit", columns, audits)


def check_rows(job: Job, view: str, columns: str, expected: Sequence[tuple[Any, ...]]) -> None:
    """Check the rows of a view; the fourth column is a date, the last two are instants."""
    rows = [
        (*row[:3], str(row[3]), *row[4:8], *map(read_seconds, row[8:]))
        for row in ask(job, f"SELECT {columns} FROM {view} ORDER BY item")
    ]
    assert [row[:8] for row in rows] == [row[:8] for row in expected], view
    times = [at for row in expected for at in row[8:]]
    assert [at for row in rows for at in row[8:]] == pytest.approx(times, abs=0.002), view


def read_seconds(value: Any) -> float | None:
    """Return an instant of a view in Unix seconds."""
    return None if value is None else read_instant(value).timestamp()


def check_leader_and_tokens(job: Job) -> None:
    """Check that each column about the leader and the tokens says what the records say."""
    membership = job._membership
    assert membership is not None
    role, query = None, "SELECT node, incarnation, epoch, since, until FROM sync_leader"
    row: tuple[Any, ...] = ()
    while (before := job._call(membership.store.get(f"role/{KEYS.segment}/jobs"))) != role:
        # The leader may renew it at any moment.
        role = before
        (row,) = ask(job, query)
    assert role is not None
    node, owner, epoch, since, until = row
    assert (node, owner, epoch) == ("a", role.value["owner"], role.value["epoch"])
    times = [role.value["since"], role.value["until"]]
    assert [read_seconds(since), read_seconds(until)] == pytest.approx(times, abs=0.002)
    assert ask(job, "SELECT DISTINCT version FROM sync_token") == [(job.token_version,)]
    lines = [entry.value for entry in job._call(membership.store.read(KEYS.rebalances))]
    fields = list(lines[0])
    rows = ask(job, f"SELECT {', '.join(fields)} FROM sync_rebalance ORDER BY id")
    assert [dict(zip(fields, row, strict=True)) for row in rows] == lines
    assert {"trigger_reason", "nodes_before", "nodes_after", "duration_ms"} <= {*fields}
    now = Components.system().clock.wall().seconds
    for (at,) in ask(job, "SELECT triggered_at FROM sync_rebalance"):
        assert read_seconds(at) == pytest.approx(now, abs=60)


def test_views_show_what_nodes_know(url: str) -> None:
    """Nodes, the leader, tokens, claims, audits and the history of rebalances."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        a, b = jobs
        nodes = ask(a, "SELECT name, status, stage, is_leader FROM sync_node ORDER BY created_on")
        assert nodes == [("a", "ACTIVE", "ready", True), ("b", "ACTIVE", "ready", False)]
        assert ask(b, "SELECT node FROM sync_leader") == [("a",)]
        tokens = ask(a, "SELECT node, token_id FROM sync_token")
        for job in jobs:
            assert {token for node, token in tokens if node == job.node_name} == job.my_tokens
        mine = [f"t{n}" for n in range(40) if a.can_claim_task(f"t{n}")]
        a.add_tasks(mine)
        assert len(ask(a, "SELECT item FROM sync_claim WHERE node = 'a'")) == len(mine)
        check_claims(a)
        check_leader_and_tokens(a)
        with a.task("one-more") if a.can_claim_task("one-more") else b.task("one-more"):
            pass
        assert ask(b, "SELECT item, task_id FROM sync_audit") == [("one-more", "one-more")]
        a.write_audit()
        assert ask(b, "SELECT item FROM sync_unfinished") == []
        done = {row[0] for row in ask(b, "SELECT item FROM sync_audit")}
        assert done == {*mine, "one-more"} == {row["item"] for row in b.get_audit()}
        moved = ask(a, "SELECT trigger_reason, leader_node, tokens_moved FROM sync_rebalance")
        assert ("initial_distribution", "a", 60) in moved
        assert ("membership_change", "a", 30) in moved
        # Some run again, some have failed, the others are done.
        with pytest.raises(ZeroDivisionError), a.task(mine[0]):
            raise ZeroDivisionError
        a.add_tasks(mine[1:3])
        check_claims(a)
        states = dict(ask(b, "SELECT state, count(*) FROM sync_claim GROUP BY state"))
        assert states == {"failed": 1, "running": 2, "done": len(mine) - 2}


def test_a_fleet_has_the_prefix_of_its_appname(url: str) -> None:
    """Two fleets on one store have their own views and do not see each other."""
    with start_team(url) as team:
        first = team.add("a", settings={"appname": "nightly_"})
        second = team.add("a", settings={"appname": "daily_"})
        first.add_task("t")
        assert first.tables["Node"].endswith("nightly_node")
        assert ask(second, "SELECT count(*) FROM nightly_claim") == [(1,)]
        assert ask(second, "SELECT count(*) FROM daily_claim") == [(0,)]
        assert ask(first, f"SELECT item FROM {first.tables['Claim']}") == [("t",)]


def test_messages_are_shown_in_every_state(url: str) -> None:
    """Waiting, claimed, done or dead; a payload that is not JSON hides none of them."""

    async def work() -> None:
        store = await open_store(url)
        port = open_backend(store, "default/emails", Components.system())
        letters = [NewMessage(id=name, value={"to": name}, max_attempts=3) for name in "abc"]
        await port.push([*letters, NewMessage(id="d", value={}, max_attempts=3, delay=60)])
        claimed = await port.claim(3, session="me", visibility=60)
        a, b, _ = [message.receipt for message in claimed.messages]
        bury = Settlement(receipt=b, move="bury", error="no such address")
        await port.settle([Settlement(receipt=a, move="complete"), bury])
        await store.close()

    with start_team(url) as team:
        (job,) = enter(team, "a")
        asyncio.run(work())
        states = "SELECT id, state, attempts, incarnation FROM sync_message ORDER BY id"
        assert ask(job, states) == [
            ("a", "completed", 1, "me"),
            ("b", "dead", 1, "me"),
            ("c", "claimed", 1, "me"),
            ("d", "waiting", 0, None),
        ]
        times = """
            SELECT id, due_on > enqueued_on, claimed_on >= enqueued_on, finished_on >= enqueued_on
            FROM sync_message ORDER BY id
        """
        assert ask(job, times) == [
            ("a", None, None, True),
            ("b", None, None, True),
            ("c", None, True, None),
            ("d", True, None, None),
        ]
        job.connection.execute("UPDATE jobsync_message SET payload = '{broken' WHERE id = 'd'")
        assert ask(job, "SELECT payload FROM sync_message WHERE id > 'b' ORDER BY id") == [
            ('{"to":"c"}',),
            ("{broken",),
        ]
        (errors,) = ask(job, "SELECT errors FROM sync_message WHERE state = 'dead'")
        assert "no such address" in errors[0]


def test_locks_show_the_pattern_in_force_and_the_owner(url: str) -> None:
    """A satisfied pin never counts as misplaced, whether its task follows its token or not."""
    misplaced = r"""
        SELECT l.task_id FROM sync_lock l JOIN sync_token t ON l.token_id = t.token_id
        WHERE NOT (t.node LIKE l.node_pattern ESCAPE '\')
    """
    with start_team(url) as team:
        jobs = enter(team, "a", "b-gpu", "C")
        a = jobs[0]
        token = a.task_to_token("t")
        same = [f"s{n}" for n in range(9000) if a.task_to_token(f"s{n}") == token][:3]
        a.register_lock("t", ["best-%", "%-gpu"], "why", expires_in_days=1)
        a.register_task_lock("nobody", "gone-%")
        a.register_task_lock("case", "c")
        a.register_task_lock("escaped", r"b\-gp_")
        a.register_task_locks_bulk([("either", "a"), ("either", "b%")])
        # Their pins conflict with that of another task of the token.
        a.register_task_locks_bulk([(task, "a") for task in same])
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
        team.until(lambda: a.can_claim_task(same[0]) and jobs[1].can_claim_task("t"))
        team.until(lambda: not any(job.can_claim_task("nobody") for job in jobs))
        rows = ask(
            a, "SELECT task_id, node_pattern, node, task_token FROM sync_lock ORDER BY task_id"
        )
        held = {task: (pattern, node) for task, pattern, node, _ in rows if task != "either"}
        assert held["t"] == ("%-gpu", "b-gpu")
        assert held["nobody"] == ("gone-%", None)
        assert held["case"] == ("c", None)
        assert held["escaped"] == (r"b\-gp_", "b-gpu")
        assert {held[task] for task in same} == {("a", "a")}
        assert {task for task, *_, found in rows if found == token} == {"t", *same}
        assert len(rows) == 9
        assert ask(a, misplaced) == []
        listed = {(lock["task_id"], lock["node_pattern"]) for lock in a.list_locks()}
        assert {(task, pattern) for task, pattern, *_ in rows} == listed
        ((reason, by, left),) = ask(
            a,
            "SELECT reason, created_by, expires_at > created_at FROM sync_lock WHERE task_id = 't'",
        )
        assert (reason, by, left) == ("why", "a", True)
        # Of a pin that several nodes have made, the last end counts; a different reason is another.
        shared = {"p1": (1, 3, 2), "p2": (3, None, 1), "p3": (2,)}
        for task, lifetimes in shared.items():
            for job, days in zip(jobs, lifetimes, strict=False):
                job.register_lock(task, "gone-%", "shared", expires_in_days=days)
        jobs[1].register_lock("p3", "gone-%", "another", expires_in_days=5)
        now = Components.system().clock.wall().seconds
        ends = ask(a, "SELECT task_id, reason, expires_at FROM sync_lock WHERE task_id LIKE 'p_'")
        days_left = sorted(
            (
                task,
                reason,
                None if end is None else round((read_instant(end).timestamp() - now) / DAY),
            )
            for task, reason, end in ends
        )
        assert days_left == [
            *[("p1", "shared", 3)] * 3,
            *[("p2", "shared", None)] * 3,
            *[("p3", "another", 5), ("p3", "shared", 2)],
        ]


def read_instant(value: Any) -> dt.datetime:
    """Return an instant of a view, which is text on SQLite."""
    if isinstance(value, dt.datetime):
        return value
    return dt.datetime.fromisoformat(str(value)).replace(tzinfo=dt.UTC)


def test_heartbeats_of_nodes_are_those_of_their_sessions(url: str) -> None:
    """Live or dead by their own timeout; a death was written after a silence of that time."""
    now = Components.system().clock.wall().seconds
    sessions = {"live": ("live", 1000.0), "dead": ("dead", 1000.0), "short": ("dead", 15.0)}

    async def seed() -> None:
        store = await open_store(url)
        for name in (*sessions, "gone"):
            facts = {"stage": "ready", "applied": 3, "is_observer": True, "host": "h", "pid": 7}
            record = {"name": name, "incarnation": f"{name}.1", "created": now - 50, **facts}
            await store.create(KEYS.node(name), record)
        for name, (state, timeout) in sessions.items():
            timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=timeout))
            record = {"worker": name, "state": state, "beat": 1, "timing": timing}
            await store.create(f"session/{name}.1", record)
        await store.close()

    with start_team(url) as team:
        (job,) = enter(team, "a")
        asyncio.run(seed())
        columns = "name, status, stage, is_leader, is_observer, host, pid, incarnation"
        query = f"SELECT {columns}, token_version, created_on, last_heartbeat FROM sync_node"
        rows = {row[0]: row[1:] for row in ask(job, query)}
    assert rows.keys() == {"a", *sessions, "gone"}
    silences = {"live": 0.0, "dead": 1000.0, "short": 15.0}
    for name, row in rows.items():
        if name == "a":
            continue
        status = "ACTIVE" if name == "live" else "DEAD"
        assert row[:8] == (status, "ready", False, True, "h", 7, f"{name}.1", 3)
        created, heard = (read_instant(value).timestamp() for value in row[8:])
        assert created == pytest.approx(now - 50, abs=1)
        if name in silences:
            assert heard == pytest.approx(now - silences[name], abs=10)


def test_no_heartbeat_is_later_than_the_query_that_shows_it(
    locate: servers.Locate,
) -> None:
    """Found: with one that came just after a query began, the time since then was negative.

    Here the query waits for a lock before it sees anything.
    """
    query = "SELECT min(NOW() - last_heartbeat), bool_and(status = 'ACTIVE') FROM sync_node"
    with start_team(locate("postgres")) as team:
        jobs = enter(team, "a", "b")
        found: list[tuple[Any, ...]] = []
        with jobs[0].connection.transaction():
            jobs[0].connection.execute("ALTER VIEW sync_node SET (security_barrier = false)")
            asking = threading.Thread(target=lambda: found.extend(ask(jobs[1], query)))
            asking.start()
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
            team.until(lambda: ask(jobs[0], waits, "sync_node") == [(1,)])
            before = count_heartbeats(jobs[0])
            team.until(lambda: count_heartbeats(jobs[0]) >= before + len(jobs))
        asking.join()
    assert found == [(dt.timedelta(0), True)]


def count_heartbeats(job: Job) -> int:
    """Return how many heartbeats the nodes have sent."""
    sessions = "SELECT sum(seq) FROM jobsync_record WHERE key LIKE 'session/%'"
    ((count,),) = ask(job, sessions)
    return int(count)


def test_a_pin_that_is_not_in_force_is_misplaced(url: str) -> None:
    """For example because the leader has switched pins off."""
    with start_team(url) as team:
        (job,) = enter(team, "a")
        job.register_task_lock("t", "gone-%")
        team.until(lambda: not job.can_claim_task("t"))
    with start_team(url) as team:
        (job,) = enter(team, "a", settings={"locks_enabled": False})
        team.until(lambda: job.can_claim_task("t"))
        assert ask(job, "SELECT node_pattern, node FROM sync_lock") == [("gone-%", "a")]
        ((token,),) = ask(job, "SELECT token_id FROM sync_lock")
        assert token == job.task_to_token("t")


def test_deleted_pins_are_gone_at_once(url: str) -> None:
    """Those that the statement selects, and no others; the nodes follow."""
    with start_team(url) as team:
        a, b = enter(team, "a", "b")
        a.register_task_locks_bulk([(f"t{n}", "gone-%") for n in range(300)])
        a.register_task_lock("t1", "b", "kept")
        b.register_task_lock("t1", "gone-%", expires_in_days=1)
        team.until(lambda: not a.can_claim_task("t7") and not b.can_claim_task("t7"))
        a.connection.execute("DELETE FROM sync_lock WHERE created_by = 'a' AND reason IS NULL")
        assert ask(a, "SELECT created_by, node_pattern FROM sync_lock ORDER BY 1") == [
            ("a", "b"),
            ("b", "gone-%"),
        ]
        team.until(lambda: a.can_claim_task("t7") or b.can_claim_task("t7"))
        assert len(b.list_locks()) == 2
        # The sheet works as if the library had written it.
        a.register_task_lock("t9", "gone-%")
        assert a.clear_locks_by_creator("a") == 2
        b.connection.execute("DELETE FROM sync_lock")
        assert a.list_locks() == []


def test_a_deleted_live_node_comes_back(url: str) -> None:
    """The leader, a follower and an observer; every token is owned again."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        watcher = team.add("watcher", observer=True)
        names = "SELECT name FROM sync_node ORDER BY name"
        everybody = [("a",), ("b",), ("watcher",)]
        for name, asker in (("b", jobs[0]), ("a", jobs[1]), ("watcher", jobs[0])):
            asker.connection.execute("DELETE FROM sync_node WHERE name = %s", [name])
            wait(team, asker, names, everybody)
        watcher.connection.execute("DELETE FROM sync_node")
        wait(team, watcher, names, everybody)
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60)
        wait(team, watcher, "SELECT count(*) FROM sync_token", [(60,)])
        assert sorted(node["name"] for node in watcher.nodes) == ["a", "b", "watcher"]


def test_deleted_tokens_are_owned_again(url: str) -> None:
    """The leader checks them; no node loses tokens that it should own."""
    with start_team(url) as team:
        jobs = enter(team, "a", "b")
        jobs[0].connection.execute("DELETE FROM sync_token WHERE node = 'b'")
        jobs[0].connection.execute("DELETE FROM sync_token")
        wait(team, jobs[0], "SELECT count(*) FROM sync_token", [(60,)])
        assert [len(job.my_tokens) for job in jobs] == [30, 30]


def test_history_can_be_deleted(url: str) -> None:
    """Row by row."""
    with start_team(url) as team:
        (job,) = enter(team, "a")
        wait(team, job, "SELECT count(*) FROM sync_rebalance", [(1,)])
        job.connection.execute("DELETE FROM sync_rebalance WHERE tokens_moved = 59")
        assert ask(job, "SELECT count(*) FROM sync_rebalance") == [(1,)]
        job.connection.execute("DELETE FROM sync_rebalance WHERE tokens_moved = 60")
        assert ask(job, "SELECT count(*) FROM sync_rebalance") == [(0,)]


@pytest.mark.parametrize("statement", ["DELETE FROM sync_claim", "UPDATE sync_node SET pid = 0"])
def test_other_changes_are_refused(url: str, statement: str) -> None:
    """Only nodes claim and mark tasks."""
    with start_team(url) as team:
        (job,) = enter(team, "a")
        with pytest.raises((psycopg.Error, sqlite3.Error), match=r"cannot|trigger|modify"):
            job.connection.execute(statement)


def test_a_node_that_left_is_gone_and_one_that_died_is_dead(url: str) -> None:
    """A dead one stays until it is removed; neither is shown as active."""
    program = f"""
        import os, signal
        from jobsync import CoordinationConfig, Job
        config = CoordinationConfig(
            total_tokens=60, heartbeat_interval_sec=0.5, heartbeat_timeout_sec=2
        )
        with Job("doomed", "test", coordination_config=config, url={url!r}) as job:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with start_team(url) as team:
        (job,) = enter(team, "a")
        with team.make("left"):
            pass
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
        nodes = "SELECT name, status FROM sync_node ORDER BY name"
        wait(team, job, nodes, [("a", "ACTIVE"), ("doomed", "DEAD")])
        team.until(lambda: len(job.my_tokens) == 60)
        # Silent for at least the timeout, whenever the death was recorded.
        ((last_heartbeat, joined),) = ask(
            job, "SELECT last_heartbeat, created_on FROM sync_node WHERE name = 'doomed'"
        )
        ((latest,),) = ask(job, "SELECT last_heartbeat FROM sync_node WHERE name = 'a'")
        assert str(last_heartbeat) < str(latest)
        assert last_heartbeat is not None
        assert joined is not None
        job.connection.execute("DELETE FROM sync_node WHERE status = 'DEAD'")
        assert ask(job, nodes) == [("a", "ACTIVE")]


def test_work_of_another_date_is_not_incomplete(url: str) -> None:
    """Neither yesterday's task finished today, nor a task that was done again later."""
    today = dt.datetime.now().astimezone().date()
    yesterday = today - dt.timedelta(days=1)
    with start_team(url) as team:
        with team.make("late", date=yesterday) as job:
            job.add_tasks(["finished", "forgotten", "redone"])
            job._call(job._entered_node.finish(["finished"]))
            job._call(job._entered_node.finish(["redone", "forgotten"], "failed"))
            job.add_task("broken-off")
            break_off(job)
        (job,) = enter(team, "a")
        with job.task("redone"):
            pass
        assert ask(job, "SELECT item FROM sync_audit WHERE date = %s", yesterday) == [("finished",)]
        unfinished = {row[0] for row in ask(job, f"SELECT item FROM {job.tables['Claim']}")}
        assert unfinished == {"forgotten", "broken-off"}
        claims = dict(ask(job, "SELECT item, state FROM sync_claim WHERE date = %s", yesterday))
        assert claims == {"forgotten": "failed", "redone": "failed", "broken-off": "running"}


def test_a_claim_is_unfinished_unless_its_task_was_done_later(url: str) -> None:
    """On whatever date: before, afterwards, or not at all."""
    now = Components.system().clock.wall().seconds
    today = dt.datetime.now().astimezone().date()
    dates = [today - dt.timedelta(days=days) for days in (1, 0)]
    cases = list(itertools.product(["running", "failed", "done", None], repeat=2))

    async def seed() -> None:
        store = await open_store(url)
        for number, states in enumerate(cases):
            for date, state, started in zip(dates, states, (now - DAY, now), strict=True):
                if state is None:
                    continue
                claim = Claim(
                    task=f"t{number:02}",
                    token=1,
                    date=date.isoformat(),
                    node="a",
                    owner="a.1",
                    number=1,
                    run=1,
                    state=cast("ClaimState", state),
                    started=started,
                    ended=None if state == "running" else started + 1,
                )
                await store.create(KEYS.claim(date, claim.task), msgspec.to_builtins(claim))
        await store.close()

    with start_team(url) as team:
        (job,) = enter(team, "a")
        asyncio.run(seed())
        rows = ask(job, "SELECT item, date FROM sync_unfinished ORDER BY item, date")
    expected = [
        (f"t{number:02}", str(date))
        for number, states in enumerate(cases)
        for date, state in zip(dates, states, strict=True)
        if state not in (None, "done") and not (date == dates[0] and states[1] == "done")
    ]
    assert [(item, str(date)) for item, date in rows] == expected


def test_a_foreign_relation_is_refused(url: str, tmp_path: Path) -> None:
    """The original's tables, or any relation of these names; they are not changed."""
    with start_team(url) as team:
        (job,) = enter(team, "a")
        job.connection.execute("CREATE TABLE other_node (name TEXT PRIMARY KEY)")
        job.connection.execute("CREATE TABLE mine_results (name TEXT PRIMARY KEY)")
        with pytest.raises(
            Misconfigured, match=r"appname is the prefix of other_node, which exists"
        ):
            team.make("b", settings={"appname": "other_"}).__enter__()
        assert ask(job, "SELECT count(*) FROM other_node") == [(0,)]
        with team.make("b", settings={"appname": "mine_"}) as second:
            assert ask(second, "SELECT name FROM mine_node") == [("b",)]


def test_newer_views_are_left_alone(url: str) -> None:
    """Older code works beside newer code and does not replace its views."""
    newer = f"jobsync {VIEWS_VERSION + 1}"
    with start_team(url) as team:
        (job,) = enter(team, "a")
        if url.startswith("sqlite"):
            job.connection.execute("DROP VIEW main.sync_audit")
            job.connection.execute(f"CREATE VIEW main.sync_audit AS -- {newer}\nSELECT 1 AS newer")
            team.add("b")
            assert ask(job, "SELECT * FROM sync_audit") == [(1,)]
        else:
            for view in POSTGRES_VIEWS:
                job.connection.execute(f"COMMENT ON VIEW sync_{view} IS '{newer}'")
            team.add("b")
            found = ask(job, "SELECT obj_description('sync_node'::regclass)")
            assert found == [(newer,)]


def test_many_jobs_install_the_views_at_once(url: str) -> None:
    """On an empty store."""
    with start_team(url) as team:
        jobs = [team.make(f"n{number}") for number in range(6)]
        threads = [threading.Thread(target=job.__enter__) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = ask(jobs[0], "SELECT name FROM sync_node ORDER BY name")
        assert found == [(f"n{number}",) for number in range(6)]
        for job in jobs:
            job.__exit__(None, None, None)


def test_without_the_right_to_create_views_a_job_continues(
    postgres: servers.PostgresServer,
) -> None:
    """An event has the fix."""
    name = f"humble_{os.getpid()}"
    database = postgres.create_database(name)
    with start_team(database) as team:
        team.add("first")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DROP VIEW sync_unfinished")
        humble = postgres.create_role(name, "secret", name)
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON jobsync_record TO {name}")
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON jobsync_entry TO {name}")
        connection.execute(f"GRANT SELECT ON jobsync_schema TO {name}")
    with start_team(humble) as team:
        enter(team, "a")
        (event,) = [event for event in team.events if isinstance(event, ViewsMissing)]
        assert "jobsync schema" in event.fix


def test_a_connection_works_as_in_the_guide(url: str) -> None:
    """Parameters are `%s`, transactions are blocks, each thread has its own connection."""
    with start_team(url) as team:
        (job,) = enter(team, "a")
        cn = job._cn
        assert cn is job.connection
        cn.execute("CREATE TABLE results (task_id TEXT PRIMARY KEY, done TEXT)")
        with cn.transaction():
            cn.execute("INSERT INTO results VALUES (%s, %s)", ["50%", dt.date(2026, 1, 2)])
        with suppress(RuntimeError), cn.transaction():
            cn.execute("INSERT INTO results VALUES (%s, '100%%')", ["t"])
            with suppress(ValueError), cn.transaction():
                cn.execute("DELETE FROM results")
                raise ValueError
            assert ask(job, "SELECT count(*) FROM results") == [(2,)]
            raise RuntimeError
        assert ask(job, "SELECT * FROM results WHERE task_id LIKE '50%'") == [("50%", "2026-01-02")]
        others: list[Any] = []
        thread = threading.Thread(target=lambda: others.append(job.connection))
        thread.start()
        thread.join()
        assert others[0] is not cn
    with pytest.raises(Invalid, match="not entered"):
        _ = job.connection
    with pytest.raises((psycopg.Error, sqlite3.Error)):
        cn.execute("SELECT 1")


def test_a_store_without_sql_has_no_connection() -> None:
    """The error has the fix; the names of the views are still known."""
    with start_team(f"memory://face-{next(_numbers)}") as team:
        (job,) = enter(team, "a")
        with pytest.raises(Misconfigured, match=r"has no SQL.*\. Use postgresql:// or sqlite"):
            _ = job.connection
        assert job._tables["Audit"] == "sync_audit"


def test_an_unknown_placeholder_is_refused(tmp_path: Path) -> None:
    """As psycopg does."""
    with start_team(f"sqlite:///{tmp_path / 'jobs.db'}") as team:
        (job,) = enter(team, "a")
        with pytest.raises(Invalid, match="Write %s for a parameter"):
            job.connection.execute("SELECT %d", [1])


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_times_are_in_the_process_s_zone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A time without a zone is local, and a day is a local day, in a zone far from UTC."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    today = "SELECT date('now', 'localtime')"
    if kind == "postgres":
        url = f"{request.getfixturevalue('postgres').url}?schema=zone_{next(_numbers)}"
        today = "SELECT CURRENT_DATE::text"
    program = f"""
        from datetime import datetime, timedelta
        from jobsync import Job
        with Job("a", "test", url={url!r}) as job:
            job.add_task("t")
            for minutes, expected in ((-5, 0), (5, 1)):
                when = datetime.now() + timedelta(minutes=minutes)
                sql = "SELECT count(*) FROM sync_claim WHERE created_on < %s"
                assert job._cn.execute(sql, [when]).fetchone()[0] == expected, minutes
            assert job._cn.execute({today!r}).fetchone()[0] == str(job.date)
    """
    for zone in ("Pacific/Kiritimati", "America/Adak", "<+0330>-3:30"):
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**os.environ, "TZ": zone},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr


def test_the_other_library_of_this_name_is_refused(tmp_path: Path) -> None:
    """Its files and ours overwrite each other; the error has the command to run."""
    info = tmp_path / "jobsync-1.3.14.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jobsync\nVersion: 1.3.14\n")
    program = "from jobsync import Job\nJob('a', 'test', url='memory://x').__enter__()"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "jobsync 1.3.14" in ran.stderr
    assert "pip uninstall -y jobsync && pip install --force-reinstall jobsync-fleet" in ran.stderr


@pytest.mark.parametrize("change", ["missing", "older", "foreign"])
def test_whichever_view_is_missing_or_older_all_are_made_again(url: str, change: str) -> None:
    """In both files of SQLite. One that another library made is refused and left as it is."""
    with start_team(url) as team:
        team.add("a")
    views = SqlViews(read_url(url), KEYS, Components.system())
    before = list_marks(views)
    assert {*before.values()} == {MARK}
    assert {*POSTGRES_VIEWS} <= {name.rpartition("sync_")[2] for name in before}
    for name in before:
        drop = f"DROP VIEW {name}{' CASCADE' if url.startswith('postgres') else ''}"
        mark = "jobsync 1" if change == "older" else "jobsync is mine"
        with closing(connect_plainly(views)) as cn:
            if change != "older" or url.startswith("sqlite"):
                cn.execute(drop)
            if change == "foreign" or (change == "older" and url.startswith("sqlite")):
                cn.execute(f"CREATE VIEW {name} AS -- {mark}\nSELECT 1 AS number")
            if change != "missing" and url.startswith("postgres"):
                cn.execute(f"COMMENT ON VIEW {name} IS '{mark}'")
            if change == "foreign":
                with pytest.raises(Misconfigured, match="appname is the prefix of"):
                    views.install("a")
                assert cn.execute(f"SELECT number FROM {name}").fetchone()[0] == 1
                cn.execute(drop)
        views.install("a")
        assert list_marks(views) == before


def connect_plainly(views: SqlViews) -> Any:
    """Open a connection without temporary views."""
    url = views._url
    return views._open_file(url.path) if isinstance(url, SqliteUrl) else views.connect()


def list_marks(views: SqlViews) -> dict[str, str]:
    """Return the marks of a fleet's views, by name."""
    query = """
        SELECT c.relname, obj_description(c.oid, 'pg_class') FROM pg_class AS c
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'v'
        """
    if isinstance(views._url, SqliteUrl):
        query = " UNION ALL ".join(
            f"SELECT '{file}.' || name, substr(sql, instr(sql, ' AS -- ') + 7, {len(MARK)})"
            f" FROM {file}.sqlite_master WHERE type = 'view'"
            for file in ("main", "sessions")
        )
    with closing(connect_plainly(views)) as cn:
        return dict(cn.execute(query).fetchall())


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/Adak"])
def test_a_zone_that_is_set_is_that_of_connections(url: str, zone: str) -> None:
    """Whatever the process's own is; each thread's too."""
    with start_team(url) as team:
        job = team.add("a", settings={"timezone": zone})
        there = dt.datetime(2026, 1, 5, 12, tzinfo=ZoneInfo(zone))
        local, utc = there.replace(tzinfo=None), there.astimezone(dt.UTC)
        query = "SELECT (%s::timestamptz AT TIME ZONE 'UTC')::text"
        if url.startswith("sqlite"):
            query = "SELECT %s"
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(ask(job, query, local)[0][0]))
        thread.start()
        thread.join()
        found.append(ask(job, query, local)[0][0])
        assert [text[:19] for text in found] == [f"{utc:%Y-%m-%d %H:%M:%S}"] * 2


def test_a_connection_that_was_closed_is_replaced(url: str) -> None:
    """By one that is kept; at the end those of all threads are closed."""
    with start_team(url) as team:
        (job,) = enter(team, "a")
        connections = [job.connection]
        assert job.connection is connections[0]
        connections[0].close()
        for _ in range(2):
            connections.append(job.connection)
            assert ask(job, "SELECT 1") == [(1,)]
        assert connections[0] is not connections[1]
        assert connections[1] is connections[2]
        thread = threading.Thread(target=lambda: connections.append(job.connection))
        thread.start()
        thread.join()
        assert job._views is not None
        views = job._views
        views.close()
        assert all(connection.closed for connection in connections)
        assert views._connections == {}
        assert ask(job, "SELECT 1") == [(1,)]


@pytest.mark.parametrize(
    ("url", "within"),
    [
        ("sqlite:////tmp/jobs.db", ""),
        ("postgresql://h/d", ""),
        ("postgresql://h/d?schema=jobs", '"jobs".'),
        ("postgresql://h/d?schema=My%20Jobs", '"My Jobs".'),
    ],
)
def test_the_names_of_views_can_be_used_in_sql(url: str, within: str) -> None:
    """Whatever the name of their schema."""
    views = SqlViews(read_url(url), JobKeys("app_"), Components.system())
    words = {
        "Node": "node",
        "Token": "token",
        "Lock": "lock",
        "Rebalance": "rebalance",
        "Leader": "leader",
        "Claim": "unfinished",
        "Audit": "audit",
    }
    assert views.tables == {word: f"{within}app_{view}" for word, view in words.items()}
    assert views.views == [*views.tables.values(), f"{within}app_claim"]


@pytest.mark.parametrize(
    ("environ", "zone"),
    [
        ({"TZ": "Europe/Berlin"}, "Europe/Berlin"),
        ({"TZ": ":Europe/Berlin"}, "Europe/Berlin"),
        ({"TZ": "/usr/share/zoneinfo/Europe/Berlin"}, "Europe/Berlin"),
        ({"TZ": ":/usr/share/zoneinfo/Europe/Berlin"}, "Europe/Berlin"),
        ({"TZ": "CET-1CEST,M3.5.0,M10.5.0/3"}, "CET-1CEST,M3.5.0,M10.5.0/3"),
        ({"TZ": ""}, "UTC"),
        ({"TZ": ":"}, "UTC"),
        ({}, "Asia/Tokyo"),
    ],
)
def test_the_process_s_zone_is_that_of_its_environment(
    tmp_path: Path, environ: dict[str, str], zone: str
) -> None:
    """Or else the machine's."""
    file = tmp_path / "zoneinfo" / "Asia" / "Tokyo"
    file.parent.mkdir(parents=True)
    file.touch()
    localtime = tmp_path / "localtime"
    localtime.symlink_to(file)
    assert find_time_zone(environ, localtime) == zone


@pytest.mark.parametrize(
    ("content", "zone"),
    [
        (None, "UTC"),
        (b"TZif2\0\n\nCET-1CEST,M3.5.0,M10.5.0/3\n", "CET-1CEST,M3.5.0,M10.5.0/3"),
        (b"TZif2\0\n\n<+0330>-3:30\n", "<+0330>-3:30"),
        (b"", "UTC"),
    ],
)
def test_a_machine_s_zone_may_be_a_copy_of_a_file(
    tmp_path: Path, content: bytes | None, zone: str
) -> None:
    """Which ends with the zone's rule; without a file it is UTC."""
    localtime = tmp_path / "localtime"
    if content is not None:
        localtime.write_bytes(content)
    assert find_time_zone({}, localtime) == zone


def test_an_administrator_grants_each_right_that_views_have() -> None:
    """All can be read, and rows be deleted where a delete has an effect."""
    text = postgres_views_sql("my", JobKeys("app_"), "worker")
    grants = {
        right: re.findall(r'"my"\.app_(\w+)', names)
        for right, names in re.findall(r"GRANT (SELECT|DELETE) ON (.*) TO worker;", text)
    }
    assert grants["SELECT"] == list(POSTGRES_VIEWS)
    assert sorted(grants["DELETE"]) == ["lock", "node", "rebalance", "token"]


@pytest.mark.parametrize(
    "name",
    [
        *("node", "token", "lock", "leader", "leader_lock", "rebalance", "rebalance_lock"),
        *("claim", "audit", "checkpoint", "inst", "session", "message", "unfinished"),
    ],
)
@pytest.mark.parametrize("mark", ["", "8", "jobsync", "jobsync ", "jobsync 8a", "jobsync -8"])
def test_each_name_of_this_library_and_the_original_is_reserved(name: str, mark: str) -> None:
    """For relations with our mark."""
    with pytest.raises(Misconfigured, match=f"appname is the prefix of sync_{name}, which"):
        _find_version([_Relation(f"sync_{name}", mark)], ["node", "audit"], KEYS)
    assert _find_version([_Relation("sync_results", mark)], ["node"], KEYS) == 0


def test_the_version_of_views_is_that_of_the_oldest() -> None:
    """One that is missing is the oldest of all; others of ours count too."""
    node, audit = _Relation("sync_node", "jobsync 8"), _Relation("sync_audit", "jobsync 10")
    views = ["node", "audit"]
    assert _find_version([node, audit], views, KEYS) == 8
    assert _find_version([audit, node], views, KEYS) == 8
    assert _find_version([audit], ["audit"], KEYS) == 10
    assert _find_version([node], views, KEYS) == 0
    assert _find_version([audit], views, KEYS) == 0
    assert _find_version([], views, KEYS) == 0
