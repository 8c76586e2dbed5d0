"""The migration page, followed step by step on old tables with rows, there and back."""

import datetime as dt
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from servers import PostgresServer

from jobsync import Job, Misconfigured, Task
from jobsync.jobs.sql_views import find_time_zone

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-from-the-original.md"
_pieces = re.compile(
    r"^#+ (?P<title>[^\n]*)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_names = (f"migration_{number}" for number in itertools.count())

MOVE = "4. Move the old tables out of the way"
CARRY_OVER = "5. Carry over finished tasks and locks"

_TABLES = """
CREATE TABLE sync_node (
  name varchar PRIMARY KEY, created_on {time} NOT NULL, last_heartbeat {time});
CREATE INDEX idx_sync_node_heartbeat ON sync_node (last_heartbeat);
CREATE TABLE sync_checkpoint (node varchar, created_on {time}, PRIMARY KEY (node, created_on));
CREATE TABLE sync_audit (
  created_on {time} NOT NULL, node varchar NOT NULL, {task} varchar NOT NULL, date date NOT NULL);
CREATE INDEX idx_sync_audit_date_{task} ON sync_audit (date, {task});
CREATE TABLE sync_claim (
  node varchar, {task} varchar, created_on {time} NOT NULL, PRIMARY KEY (node, {task}));
CREATE TABLE sync_token (token_id integer PRIMARY KEY, node varchar NOT NULL,
  assigned_at {time} NOT NULL, version integer NOT NULL DEFAULT 1);
CREATE TABLE sync_lock ({lock}, reason varchar, created_at {time} NOT NULL,
  created_by varchar NOT NULL, expires_at {time});
CREATE TABLE sync_leader_lock (singleton integer PRIMARY KEY DEFAULT 1 CHECK (singleton = 1),
  node varchar NOT NULL, acquired_at {time} NOT NULL, operation varchar NOT NULL);
CREATE TABLE sync_rebalance_lock (singleton integer PRIMARY KEY DEFAULT 1 CHECK (singleton = 1),
  in_progress boolean NOT NULL DEFAULT false, started_at {time}, started_by varchar);
CREATE TABLE sync_rebalance (id serial PRIMARY KEY, triggered_at {time} NOT NULL,
  trigger_reason varchar NOT NULL, leader_node varchar NOT NULL, nodes_before integer NOT NULL,
  nodes_after integer NOT NULL, tokens_moved integer NOT NULL, duration_ms integer);
INSERT INTO sync_rebalance_lock DEFAULT VALUES;
INSERT INTO sync_node VALUES ('killed', now() - interval '1 hour', now() - interval '1 hour');
INSERT INTO sync_token SELECT number, 'killed', now() FROM generate_series(0, 9999) AS number;
INSERT INTO sync_claim VALUES
  ('killed', 'half', now()), ('killed', 'ann', now() - interval '1 hour');
INSERT INTO sync_audit VALUES
  (now(), 'worker-01', 'ann', current_date), (now(), 'worker-01', 'ann', current_date),
  (now(), 'worker-02', 'render-7', current_date), (now(), 'worker-02', 'old', current_date - 1);
INSERT INTO sync_rebalance VALUES (DEFAULT, now(), 'distribution', 'killed', 1, 1, 0, 5);
CREATE VIEW finished AS SELECT {task} FROM sync_audit;
"""
"""The tables of the original and some rows: two tasks were finished today, one was begun."""

_LOCK_VALUES = "'needs a GPU', now(), 'worker-01'"
RELEASES = {
    "1.1": {
        "time": "timestamp",
        "task": "item",
        "lock": "token_id integer PRIMARY KEY, node_pattern varchar NOT NULL",
        # The token of render-7, and one that no task has.
        "rows": f"(6643, '%-gpu', {_LOCK_VALUES}, now() + interval '7 days'), "
        f"(1, 'west-%', {_LOCK_VALUES}, NULL), (2, 'x', {_LOCK_VALUES}, now() - interval '1 day')",
    },
    "1.3": {
        "time": "timestamptz",
        "task": "task_id",
        "lock": "task_id varchar PRIMARY KEY, node_patterns jsonb NOT NULL",
        "rows": f"""('render-7', '["%-gpu"]', {_LOCK_VALUES}, now() + interval '7 days'), """
        f"""('late', '["x"]', {_LOCK_VALUES}, now() - interval '1 day')""",
    },
}


def sections() -> Iterator[tuple[str, str, str]]:
    """Yield each block of the page: the title above it, its language and its text."""
    title = ""
    for piece in _pieces.finditer(PAGE.read_text(encoding="utf-8")):
        title = piece["title"] or title
        if piece["language"]:
            yield title, piece["language"], piece["text"]


BLOCKS = list(sections())


def run_sql(url: str, title: str, task: str = "task_id") -> list[list[tuple[Any, ...]]]:
    """Run the SQL of a section as it is printed; return the rows of each query.

    Args:
        url: the database.
        title: the section.
        task: the column of tasks in the old tables; the page tells readers to replace it.
    """
    found = []
    with psycopg.connect(url, autocommit=True) as connection:
        for text in [text for name, kind, text in BLOCKS if (name, kind) == (title, "sql")]:
            for statement in text.split(";\n"):
                if statement.strip():
                    cursor = connection.execute(statement.replace(".task_id", f".{task}").encode())
                    found.append(cursor.fetchall() if cursor.description else [])
    return found


def ask(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement; return its rows, if it has any."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def carry_over(url: str, folder: Path) -> str:
    """Run the page's script with a list of tasks; return what it prints."""
    [text] = [text for title, kind, text in BLOCKS if (title, kind) == (CARRY_OVER, "python")]
    ready = text.replace("TASKS = []", 'TASKS = ["ann", "render-7"]')
    assert ready != text
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", ready],
        cwd=folder,
        env={**os.environ, "SYNC_SQL_URL": url, "SYNC_MINIMUM_NODES": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> dict[str, str]:
    """How the tables of a release of the original look."""
    return RELEASES[request.param]


@pytest.fixture
def url(postgres: PostgresServer, release: dict[str, str]) -> Iterator[str]:
    """The URL of a database with the tables of a release, and rows."""
    name = next(_names)
    url = postgres.create_database(name)
    with psycopg.connect(url, autocommit=True) as connection:
        # The original stores local times; release 1.1 does so without their zone.
        connection.execute(f"SET TIME ZONE '{find_time_zone()}'".encode())
        connection.execute(_TABLES.format(**release).encode())
        connection.execute(f"INSERT INTO sync_lock VALUES {release['rows']}".encode())
    yield url
    postgres.drop_database(name)


def test_the_page_leads_there(url: str, release: dict[str, str], tmp_path: Path) -> None:
    """Finished tasks are not done again, locks hold, and old nodes stay out."""
    with pytest.raises(Misconfigured, match="migrate-from-the-original"):
        Job("worker-01", "production", url=url).__enter__()
    assert [row[0] for row in run_sql(url, "2. Stop every node of the original")[0]] == ["killed"]
    title = "3. Look at tasks that were started and not finished"
    assert [row[0] for row in run_sql(url, title, release["task"])[0]] == ["half"]

    run_sql(url, MOVE)
    printed = carry_over(url, tmp_path)
    assert f"{dt.date.today()} 2 finished tasks" in printed  # noqa: DTZ011 - as the page has it
    assert "worker-01 1 pins" in printed
    assert ("token 1 has no task in TASKS" in printed) == (release["task"] == "item")
    assert "0 finished tasks" in carry_over(url, tmp_path)
    audits, pins = run_sql(url, CARRY_OVER)
    assert [count for _, count in audits] == [2]
    [(task, patterns, reason, creator, expires)] = pins
    assert (task, patterns, reason, creator) == ("render-7", ["%-gpu"], "needs a GPU", "worker-01")
    left = expires - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=6.9) < left <= dt.timedelta(days=7)

    with Job("worker-01", "production", url=url, once_per_date=True) as job:
        assert not job.can_claim_task("ann")
        assert job.add_tasks(["ann", "half", "render-8"]) == [Task("half"), Task("render-8")]
        nodes, tokens = run_sql(url, "6. Start the new nodes")
        assert (nodes, tokens) == ([("worker-01", "ready", True)], [("worker-01", 10_000)])
        refuse_old_nodes(url, release)
    with Job("worker-gpu", "production", url=url, date=dt.date(2000, 1, 1)) as job:
        assert job.can_claim_task("render-7")
    with Job("worker-02", "production", url=url, date=dt.date(2000, 1, 1)) as job:
        assert not job.can_claim_task("render-7")
        assert job.clear_locks_by_creator("worker-01") == 1
    both, _ = run_sql(url, "7. Later")
    assert sorted(row[2] for row in both) == ["ann", "ann", "half", "old", "render-7", "render-8"]
    assert ask(url, "SELECT to_regnamespace('original')::text") == [(None,)]


def refuse_old_nodes(url: str, release: dict[str, str]) -> None:
    """Check that the statements fail with which a node of the original starts and lives."""
    values = "VALUES (now(), 'old', 'ann', current_date)"
    for statement in (
        "CREATE INDEX IF NOT EXISTS idx_sync_node_heartbeat ON sync_node (last_heartbeat)",
        "INSERT INTO sync_node (name, created_on) VALUES ('old', now())",
        "UPDATE sync_node SET last_heartbeat = now() WHERE name = 'killed'",
        f"INSERT INTO sync_audit (created_on, node, {release['task']}, date) {values}",
    ):
        with pytest.raises(psycopg.Error):
            ask(url, statement)


def test_the_page_leads_back(url: str, release: dict[str, str], tmp_path: Path) -> None:
    """The old tables return with all rows and what was done since; going forward works again."""
    task = release["task"]
    names = (
        "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"
    )
    names += " AND relname LIKE 'sync%' ORDER BY 1"
    before = ask(url, names)
    run_sql(url, MOVE)
    carry_over(url, tmp_path)
    with Job("worker-03", "production", url=url, once_per_date=True) as job:
        for done in job.tasks(["ann", "half"]):
            assert done == Task("half")
    run_sql(url, "The way back")
    assert ask(url, names) == before
    audits = ask(url, f"SELECT node, {task} FROM sync_audit ORDER BY date, {task}")
    assert audits == [
        *(("worker-02", "old"), ("worker-01", "ann"), ("worker-01", "ann")),
        *(("worker-03", "half"), ("worker-02", "render-7")),
    ]
    assert ask(url, "SELECT count(*) FROM sync_token") == [(10_000,)]
    # An old node works on them.
    with psycopg.connect(url) as old:
        old.execute("UPDATE sync_node SET last_heartbeat = now()")
        old.execute(
            "INSERT INTO sync_audit SELECT now(), 'killed', 'bob', max(date) FROM sync_audit"
        )
    run_sql(url, MOVE)
    assert " 1 finished tasks" in carry_over(url, tmp_path)
    with Job("worker-03", "production", url=url, once_per_date=True) as job:
        assert not job.add_tasks(["ann", "bob", "half"])


def test_views_of_your_own_show_the_old_tables(url: str) -> None:
    """Moving a table does not change what is defined on it."""
    run_sql(url, MOVE)
    with Job("worker-01", "production", url=url):
        assert len(ask(url, "SELECT * FROM finished")) == 4


def test_old_tables_that_are_created_again_are_refused(url: str) -> None:
    """An old program that starts between the steps is noticed."""
    run_sql(url, MOVE)
    ask(url, "CREATE TABLE sync_node (name varchar)")
    with pytest.raises(Misconfigured, match="sync_node"):
        Job("worker-01", "production", url=url).__enter__()


def test_names_exist() -> None:
    """Each attribute of a job that the page names for this library exists."""
    text = PAGE.read_text(encoding="utf-8").partition("## Names")[2].partition("## What")[0]
    here = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")]
    names = {name for cell in here for name in re.findall(r"`job\.(\w+)", cell)}
    assert names >= {"connection", "tables", "tasks", "_cn"}
    job = Job("worker-01", "production", url="memory://")
    assert [name for name in names if not hasattr(type(job), name) and name not in vars(job)] == []
