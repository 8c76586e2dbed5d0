"""Commands that inspect a live fleet of processes, on a terminal and in a pipe."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sample_fleet
import servers
from terminal import on_terminal, read_json, read_tsv, run, run_on_terminal

NODE = Path(sample_fleet.__file__)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store in which two processes share tasks."""
    folder = tmp_path_factory.mktemp("cluster")
    if request.param == "sqlite":
        place = f"sqlite:///{folder / 'fleet.db'}"
    else:
        server: servers.PostgresServer = request.getfixturevalue("postgres")
        place = f"{server.url}?schema={folder.name}"
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
        [sys.executable, str(NODE), place, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_cluster_shows_live_workers_and_the_leader(url: str) -> None:
    """Both workers are live, and one of them leads the role, in some epoch."""
    found = read_json(url, "cluster")
    assert [member["state"] for member in found["members"]] == ["live", "live"]
    (role,) = found["roles"]
    assert (role["namespace"], role["work"], role["state"]) == ("sync_", "jobs", "led")
    assert role["epoch"] >= 1
    assert role["candidates"] == 2
    leads = [m["worker_id"] for m in found["members"] if m["leads"] == ["sync_/jobs"]]
    assert leads == [role["leader"]]


def test_a_pipe_gets_tables_with_tabs(url: str) -> None:
    """Titles begin with #, and values are raw."""
    text = run(url, "cluster").stdout
    members, roles, failing, withheld, terms = text.split("\n\n")
    assert members.startswith("# members\nworker_id\tstate\theard")
    assert [row["state"] for row in read_tsv(members)] == ["live", "live"]
    (role,) = read_tsv(roles)
    assert float(role["until"]) > float(role["since"])
    assert failing == "# failing\nwork\tcallback\ttimes\tat\tleader\terror"
    assert withheld == "# withheld\nwork\tworker\treason"
    assert terms == "# terms\nwork\tepoch\tworker\twhy\tended\tsince\n"


def test_a_narrow_terminal_leaves_spare_columns_out(url: str) -> None:
    """80 columns hold every line without cutting names; 160 columns hold more."""
    narrow, wide = (on_terminal(url, width, "cluster") for width in (80, 160))
    assert max(map(len, narrow)) <= 80
    assert max(map(len, wide)) <= 160
    leader = read_json(url, "cluster")["roles"][0]["leader"]
    assert sum(leader in line for line in narrow) == 2
    assert not any("until" in line for line in narrow)
    assert any("until" in line for line in wide)


def test_tokens_are_counted_by_node(url: str) -> None:
    """Each node has a state, and the shares add up."""
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
    """A pattern without a matching node is reported."""
    rows = {row["task_id"]: row for row in read_tsv(run(url, "pins").stdout)}
    assert rows["render"]["in_force"] == "gpu-%"
    assert rows["train"]["patterns"] == "tpu-%, big-%"
    assert rows["train"]["in_force"] == ""
    assert any("no match" in line for line in on_terminal(url, 160, "pins"))


def test_jobs_show_done_and_incomplete_tasks(url: str) -> None:
    """One node has marked its tasks as done, the other has not; together they have all."""
    done, incomplete = read_json(url, "jobs", "audits"), read_json(url, "jobs", "incomplete")
    assert {row["node"] for row in done} == {"worker-01"}
    assert {(row["node"], row["state"]) for row in incomplete} == {("gpu-02", "running")}
    assert sorted(int(row["task_id"]) for row in done + incomplete) == list(sample_fleet.TASKS)
    assert read_json(url, "jobs", "audits", "--date", "2001-01-01") == []


def test_resources_are_listed_and_read(url: str) -> None:
    """Their fields, one record, and the records that match a filter."""
    (users,) = read_json(url, "resources", "list")
    assert users["attributes"] == {"name": "string|required", "age": "number"}
    (one,) = read_json(url, "resources", "get", "users", "u1")
    assert one["name"] == "ann-1"
    rows = read_tsv(
        run(url, "resources", "query", "users", "--where", '{"age": {"$gt": 30}}').stdout
    )
    assert [row["id"] for row in rows] == ["u1", "u2"]
    assert len(read_json(url, "resources", "query", "users", "--limit", "1")) == 1


def test_why_explains_tasks(url: str) -> None:
    """Tasks that run, are done, match no node, or are not claimed yet."""
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
    lines = on_terminal(url, 160, "why", "train")
    assert lines[0] == "train: pinned to tpu-% or big-% (needs a TPU), which no live node matches"
    (row,) = read_tsv(run(url, "why", "train").stdout)
    assert (row["name"], row["code"]) == ("train", "unmatched-pin")
    assert f"train: {row['reason']}" == lines[0]


COMMANDS = [
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


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_prints_for_people_and_for_programs(url: str, words: list[str]) -> None:
    """Lines fit 80 and 160 columns; TSV and JSON have the same number of rows."""
    for columns in (80, 160):
        lines = on_terminal(url, columns, *words)
        assert lines
        if words != ["doctor"]:
            # Findings are sentences, which are not cut.
            assert max(map(len, lines)) <= columns
    found = read_json(url, *words)
    tables = run(url, *words).stdout.split("\n\n")
    rows = [row for table in tables for row in read_tsv(table)]
    if words[:2] == ["resources", "get"]:
        # TSV has a row for each field.
        assert {row["field"] for row in rows} == found[0].keys()
    else:
        expected = (
            [row for table in found.values() for row in table] if isinstance(found, dict) else found
        )
        assert len(rows) == len(expected) > 0


def test_the_schema_is_printed_as_text_and_as_json(url: str) -> None:
    """The same script either way; nothing is changed."""
    text = run(url, "schema").stdout
    assert "CREATE TABLE" in text
    assert "jobsync_pause" in text
    (row,) = read_json(url, "schema")
    assert row["schema"].strip() == text.strip()


def test_an_unknown_id_is_reported(url: str) -> None:
    """A name in the form of a message id that does not exist is unknown, with exit code 1."""
    name = "01a1e041-9cb6-77bb-a19f-64aeb3358fce"
    status, lines = run_on_terminal(url, 160, "why", name)
    assert status == 1
    assert "there is no such message" in lines[0]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["tokens", "--appname", "other"], 1, "no fleet that shares tasks as 'other'"),
        (["resources", "query", "users", "--where", "{"], 2, "--where is not a filter"),
        (["resources", "query", "userz"], 1, "userz"),
        (["resources", "get", "users", "nobody"], 1, "no record of users 'nobody'"),
        (["jobs", "audits", "--date", "yesterday"], 2, "'--date'"),
        (["clustr"], 2, "No such command 'clustr'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_reported(url: str, words: list[str], status: int, message: str) -> None:
    """With the option, the value and the fix, in one line on standard error."""
    done = run(url, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_reading_creates_no_file(tmp_path: Path) -> None:
    """A missing file is an error, and it is not created."""
    path = tmp_path / "none.db"
    done = run(f"sqlite:///{path}", "cluster")
    assert done.returncode == 1
    assert "Pass the URL of the file that the fleet uses" in done.stderr
    assert list(tmp_path.iterdir()) == []
