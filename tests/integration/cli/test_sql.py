"""`jobsync sql`, run as a user runs it: in a pipe, with `-c`, and on a terminal."""

import itertools
import json
import os
import pty
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest
import servers
from teams import start_team
from terminal import jobsync
from waiting import TIMEOUT

from jobsync.jobs.events import ViewsMissing

_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: servers.Locate) -> str:
    """A store that no other test uses."""
    return locate(request.param)


def test_a_statement_shows_its_rows(url: str) -> None:
    """Separated by tabs, or as JSON; a statement without rows shows how many it has changed."""
    with start_team(url, "a") as team:
        (job,) = [team.add("b")]
        team.until(lambda: len(job.my_tokens) == 30)
        run = jobsync("sql", url, "-c", "SELECT name, status, NULL AS x FROM sync_node ORDER BY 1")
        assert run.returncode == 0, run.stderr
        assert run.stdout == "name\tstatus\tx\na\tACTIVE\t\nb\tACTIVE\t\n"
        columns = "token_id AS n, token_id AS n, 7 AS n_2, token_id AS n"
        query = f"SELECT {columns} FROM sync_token ORDER BY 1 LIMIT 1"
        beats = "SELECT last_heartbeat FROM sync_node"
        run = jobsync("sql", url, "--json", "-c", query, "-c", beats)
        first, second = run.stdout.splitlines()
        assert json.loads(first) == [{"n": 0, "n_2": 0, "n_2_2": 7, "n_3": 0}]
        assert len(json.loads(second)) == 2
        job.register_task_lock("t", "gone")
        run = jobsync("sql", url, "-c", "DELETE FROM sync_lock")
        assert run.returncode == 0, run.stderr
        assert job.list_locks() == []


def test_a_pipe_is_read_statement_by_statement(url: str) -> None:
    """Statements may span lines and contain semicolons in quotes."""
    with start_team(url, "a"):
        text = "SELECT 'a;b'\nAS x;\n\nSELECT count(*) AS n\n FROM sync_node; SELECT 2 AS z"
        run = jobsync("sql", url, stdin=text)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "x\na;b\nn\n1\nz\n2\n"


def test_a_rejected_statement_is_reported(url: str) -> None:
    """In one line, with exit code 2."""
    with start_team(url, "a"):
        run = jobsync("sql", url, "-c", "SELECT nonsense FROM sync_node")
    assert run.returncode == 2
    assert "nonsense" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory://x"], "has no SQL"),
        (["sqlite:////tmp/not-there-at-all.db"], "refers to a missing file"),
        (["sqlite:///{}"], "has no tables of jobsync"),
        (["sqlite:///{}", "--appname", "drop table;"], "cannot be a prefix of table names"),
    ],
)
def test_missing_sql_is_reported(words: Sequence[str], message: str, tmp_path: Path) -> None:
    """No file is created."""
    path = tmp_path / "jobs.db"
    path.touch()
    run = jobsync("sql", *(word.format(path) for word in words), "-c", "SELECT 1")
    assert run.returncode in {1, 2}
    assert message in run.stderr
    assert not Path("/tmp/not-there-at-all.db").exists()


def test_a_terminal_gets_a_prompt(url: str) -> None:
    r"""With tables; a mistake does not end the shell, `\q` does."""
    with start_team(url, "a"):
        output = run_shell(
            ["sql", url],
            "SELECT nonsense;",
            "SELECT name,",
            "  stage FROM sync_node;",
            "\\d",
            "\\q",
        )
    assert "jobsync=>" in output
    assert "nonsense" in output
    lines = [line.strip() for line in output.splitlines()]
    assert "name  stage" in lines
    assert "a     ready" in lines
    assert "(1 row)" in lines
    assert any(line.endswith("sync_unfinished") for line in lines)


def run_shell(words: Sequence[str], *lines: str) -> str:
    """Run the command line on a terminal, type lines; return the output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "dumb"
        os.execv(sys.executable, [sys.executable, "-m", "jobsync", *words])
    output = ""
    pending = [*lines]
    while True:
        assert select.select([terminal], [], [], TIMEOUT)[0], f"no more output: {output}"
        try:
            output += os.read(terminal, 4096).decode()
        except OSError:
            break
        if pending and output.count("jobsync=>") > len(lines) - len(pending):
            os.write(terminal, f"{pending.pop(0)}\n".encode())
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, output
    return output


def test_the_printed_schema_has_the_views(postgres: servers.PostgresServer) -> None:
    """An administrator creates them; a role without the right to create can use all of them."""
    name = f"shown_{os.getpid()}"
    as_admin = postgres.create_database(name)
    as_app = f"{postgres.create_role(name, 'hush-hush', name)}?schema=app"
    printed = jobsync("schema", as_app, "--appname", "nightly_")
    assert printed.returncode == 0, printed.stderr
    with psycopg.connect(as_admin, autocommit=True) as admin:
        admin.execute(printed.stdout.encode())
    with start_team(as_app) as team:
        job = team.add("a", settings={"appname": "nightly_"})
        assert team.count(ViewsMissing) == 0
        job.register_task_lock("t", "gone")
        for view in ("node", "token", "lock", "rebalance"):
            job.connection.execute(f"DELETE FROM nightly_{view}")
        for view in ("claim", "audit", "leader", "unfinished"):
            job.connection.execute(f"SELECT * FROM nightly_{view}")
        assert job.list_locks() == []
