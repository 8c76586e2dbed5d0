"""Commands that look at a live fleet of processes, read as people and as programs read them."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import exhibit
import pytest
import servers

Run = Callable[..., subprocess.CompletedProcess[str]]
EXHIBIT = Path(exhibit.__file__)
JOBSYNC = [sys.executable, "-W", "error", "-m", "jobsync"]


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store in which two processes share tasks."""
    if request.param == "sqlite":
        place = f"sqlite:///{tmp_path_factory.mktemp('look') / 'fleet.db'}"
    else:
        server: servers.PostgresServer = request.getfixturevalue("postgres")
        place = f"{server.url}?schema=looked_at"
    with ExitStack() as stack:
        nodes = [stack.enter_context(_start(place, name)) for name in ("worker-01", "gpu-02")]
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline().startswith("ready")
        yield place
        for node in nodes:
            assert node.stdin is not None
            node.stdin.close()
            assert node.wait(60) == 0


def _start(place: str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXHIBIT), place, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a pipe, with the store named by the environment."""
    environ = os.environ | {"JOBSYNC_URL": url}
    return subprocess.run(
        [*JOBSYNC, *words], capture_output=True, text=True, timeout=120, check=False, env=environ
    )


def read_json(url: str, *words: str) -> Any:
    """Give what --json prints."""
    done = run(url, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_tsv(text: str) -> list[dict[str, str]]:
    """Give the rows that a pipe got."""
    head, *lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def on_terminal(url: str, columns: int, *words: str) -> list[str]:
    """Run the command line on a terminal of a width; give the lines, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = os.environ | {"JOBSYNC_URL": url, "TERM": "xterm"}
    environ.pop("COLUMNS", None)
    process = subprocess.Popen([*JOBSYNC, *words], stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    text = b""
    # A terminal whose other side is closed gives an error instead of an end.
    while chunk := _read(ours):
        text += chunk
    os.close(ours)
    assert process.wait(60) == 0, text
    plain = text.decode()
    for code in ("\x1b[0m", "\x1b[1m", "\x1b[2m"):
        plain = plain.replace(code, "")
    return plain.splitlines()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_the_cluster_shows_who_is_there_and_who_leads(url: str) -> None:
    """Both workers live, one leads, and its epoch is told."""
    found = read_json(url, "cluster")
    assert [member["state"] for member in found["members"]] == ["live", "live"]
    (role,) = found["roles"]
    assert (role["namespace"], role["work"], role["state"]) == ("sync_", "jobs", "led")
    assert role["epoch"] >= 1
    assert role["candidates"] == 2
    leads = [m["worker_id"] for m in found["members"] if m["leads"] == ["sync_/jobs"]]
    assert leads == [role["leader"]]


def test_a_pipe_gets_tables_with_tabs(url: str) -> None:
    """The title of each stands behind a #, and values are as programs want them."""
    text = run(url, "cluster").stdout
    members, roles, terms = text.split("\n\n")
    assert members.startswith("# members\nworker_id\tstate\theard")
    assert [row["state"] for row in read_tsv(members)] == ["live", "live"]
    (role,) = read_tsv(roles)
    assert float(role["until"]) > float(role["since"])
    assert terms == "# terms\nwork\tepoch\tworker\twhy\tended\tsince\n"


def test_a_narrow_terminal_gets_what_matters(url: str) -> None:
    """80 columns hold every line, names uncut; 160 columns hold more."""
    narrow, wide = (on_terminal(url, width, "cluster") for width in (80, 160))
    assert max(map(len, narrow)) <= 80
    assert max(map(len, wide)) <= 160
    leader = read_json(url, "cluster")["roles"][0]["leader"]
    assert sum(leader in line for line in narrow) == 2
    assert not any("until" in line for line in narrow)
    assert any("until" in line for line in wide)


def test_tokens_are_counted_by_node(url: str) -> None:
    """Nodes with their state, and shares that add up."""
    found = read_json(url, "tokens")
    assert {node["node"]: node["state"] for node in found["nodes"]} == {
        "worker-01": "ready",
        "gpu-02": "ready",
    }
    assert sum(share["tokens"] for share in found["shares"]) == 100
    assert {share["incoming"] for share in found["shares"]} == {0}
    lines = on_terminal(url, 80, "tokens")
    assert lines[0] == "nodes"
    assert any(line.startswith("gpu-02") for line in lines)


def test_pins_are_shown_with_what_is_in_force(url: str) -> None:
    """A pattern that nobody matches is told as such."""
    rows = {row["task_id"]: row for row in read_tsv(run(url, "pins").stdout)}
    assert rows["render"]["in_force"] == "gpu-%"
    assert rows["train"]["patterns"] == "tpu-%, big-%"
    assert rows["train"]["in_force"] == ""
    assert any("nobody matches" in line for line in on_terminal(url, 160, "pins"))


def test_jobs_tell_what_is_done_and_what_is_not(url: str) -> None:
    """One node has audited its tasks, the other has not; together they have all."""
    done, begun = read_json(url, "jobs", "audits"), read_json(url, "jobs", "incomplete")
    assert {row["node"] for row in done} == {"worker-01"}
    assert {(row["node"], row["state"]) for row in begun} == {("gpu-02", "running")}
    assert sorted(int(row["task_id"]) for row in done + begun) == list(exhibit.TASKS)
    assert read_json(url, "jobs", "audits", "--date", "2001-01-01") == []


def test_resources_are_listed_and_read(url: str) -> None:
    """Their fields, one record, and those that a filter finds."""
    (users,) = read_json(url, "resources", "list")
    assert users["attributes"] == {"name": "string|required", "age": "number"}
    (one,) = read_json(url, "resources", "get", "users", "u1")
    assert one["name"] == "ann-1"
    rows = read_tsv(
        run(url, "resources", "query", "users", "--where", '{"age": {"$gt": 30}}').stdout
    )
    assert [row["id"] for row in rows] == ["u1", "u2"]
    assert len(read_json(url, "resources", "query", "users", "--limit", "1")) == 1


def test_why_tells_what_a_task_waits_for(url: str) -> None:
    """Running, done, pinned to nobody, pinned to somebody who has not begun."""
    running = read_json(url, "jobs", "incomplete")[0]["task_id"]
    done = read_json(url, "jobs", "audits")[0]["task_id"]
    codes = {
        task: read_json(url, "why", task)[0]["code"] for task in (running, done, "train", "render")
    }
    assert codes == {
        running: "running",
        done: "done",
        "train": "unmatched-pin",
        "render": "waiting",
    }
    told = run(url, "why", "train").stdout
    assert told.startswith(
        "train: pinned to tpu-% or big-% (needs a TPU), which no live node matches"
    )


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["tokens", "--app", "other"], 1, "no fleet that shares tasks as 'other'"),
        (["resources", "query", "users", "--where", "{"], 2, "--where='{': is no filter"),
        (["resources", "query", "userz"], 1, "userz"),
        (["resources", "get", "users", "nobody"], 1, "no record of users 'nobody'"),
        (["jobs", "audits", "--date", "yesterday"], 2, "'--date'"),
        (["clustr"], 2, "No such command 'clustr'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_named(url: str, words: list[str], status: int, told: str) -> None:
    """The option, the value and what to do, in one line; nothing on standard output."""
    done = run(url, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_to_look_makes_no_file(tmp_path: Path) -> None:
    """A file that is not there is an error, and is not there afterwards either."""
    path = tmp_path / "none.db"
    done = run(f"sqlite:///{path}", "cluster")
    assert done.returncode == 1
    assert "there is no such file; name the file that the fleet uses" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_that_it_need_not() -> None:
    """Neither a store nor a database: help must be there at once."""
    code = (
        "import sys, jobsync.cli.main as m\n"
        "try: m.cli(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(n for n in sys.modules if n.startswith(('jobsync.', 'asyncio', 'msgspec'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert loaded == "['jobsync.cli', 'jobsync.cli.main', 'jobsync.errors']"
