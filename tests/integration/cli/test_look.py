"""Commands that look at a live fleet of processes, read as people and as programs read them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import exhibit
import pytest
import servers
from terminal import on_terminal, read_json, read_tsv, run, see

EXHIBIT = Path(exhibit.__file__)


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
    told = on_terminal(url, 160, "why", "train")
    assert told[0] == "train: pinned to tpu-% or big-% (needs a TPU), which no live node matches"
    (row,) = read_tsv(run(url, "why", "train").stdout)
    assert (row["name"], row["code"]) == ("train", "unmatched-pin")
    assert f"train: {row['reason']}" == told[0]


LOOKS = [
    ["cluster"],
    ["tokens"],
    ["pins"],
    ["jobs", "audits"],
    ["jobs", "incomplete"],
    ["resources", "list"],
    ["resources", "get", "users", "u1"],
    ["resources", "query", "users"],
    ["why", "train"],
    ["doctor"],
    ["sql", "-c", "SELECT name, status FROM sync_node"],
]


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_every_look_is_for_people_and_for_programs(url: str, words: list[str]) -> None:
    """Lines that fit 80 and 160 columns; rows with tabs in a pipe; JSON with as many rows."""
    for columns in (80, 160):
        lines = on_terminal(url, columns, *words)
        assert lines
        if words != ["doctor"]:
            # Whose findings are sentences.
            assert max(map(len, lines)) <= columns
    found = read_json(url, *words)
    tables = run(url, *words).stdout.split("\n\n")
    rows = [row for table in tables for row in read_tsv(table)]
    if words[:2] == ["resources", "get"]:
        # A row for each field.
        assert {row["field"] for row in rows} == found[0].keys()
    else:
        told = (
            [row for table in found.values() for row in table] if isinstance(found, dict) else found
        )
        assert len(rows) == len(told) > 0


def test_the_schema_is_printed_as_text_and_as_json(url: str) -> None:
    """What an administrator runs, in one piece either way; nothing is changed."""
    text = run(url, "schema").stdout
    assert "CREATE TABLE" in text
    assert "jobsync_pause" in text
    (row,) = read_json(url, "schema")
    assert row["schema"].strip() == text.strip()


def test_nobody_knows_what_is_not_there(url: str) -> None:
    """What looks as a message's id and is not there is told as unknown, with 1."""
    name = "01a1e041-9cb6-77bb-a19f-64aeb3358fce"
    status, lines = see(url, 160, "why", name)
    assert status == 1
    assert "there is no such message" in lines[0]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["tokens", "--app", "other"], 1, "no fleet that shares tasks as 'other'"),
        (["resources", "query", "users", "--where", "{"], 2, "--where is no filter"),
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
    assert "Name the file that the fleet uses" in done.stderr
    assert list(tmp_path.iterdir()) == []
