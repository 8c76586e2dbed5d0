"""`jobsync enqueue` and `jobsync queues`, with worker processes on the same store."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import servers
from terminal import on_terminal, read_json, read_tsv, run, run_on_terminal
from waiting import until
from work_processes import WorkProcess

QUEUE, OTHER = "default/emails", "default/reports"
STATES = ("ready", "waiting", "claimed", "completed", "cancelled", "dead")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with two queues and a worker process for each."""
    folder = tmp_path_factory.mktemp("queues")
    if request.param == "sqlite":
        place = f"sqlite:///{folder / 'fleet.db'}"
    else:
        server: servers.PostgresServer = request.getfixturevalue("postgres")
        place = f"{server.url}?schema={folder.name}"
    with ExitStack() as stack:
        for queue in ("emails", "reports"):
            log = folder / f"{queue}.log"
            worker = stack.enter_context(WorkProcess(place, queue, log, concurrency=2, prefetch=0))
            asyncio.run(until(lambda: worker.is_at_work, "it works"))  # noqa: B023 - at once
        # Workers report their queues with their next heartbeat.
        asyncio.run(until(lambda: len(read_json(place, "queues", "list")) == 2, "both are listed"))
        yield place


def read_queue(url: str, queue: str = QUEUE) -> dict[str, Any]:
    """Return the row of a queue in the list."""
    (row,) = [each for each in read_json(url, "queues", "list") if each["queue"] == queue]
    return dict(row)


def push(url: str, *messages: dict[str, Any], words: tuple[str, ...] = ()) -> list[str]:
    """Push messages to the first queue; return their ids."""
    lines = "\n".join(json.dumps(message) for message in messages)
    done = run(url, "enqueue", "emails", *words, stdin=lines)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


async def test_messages_come_by_argument_and_by_lines(url: str) -> None:
    """One, a list, or one per line; a worker in another process handles them."""
    before = read_queue(url)["completed"]
    (one,) = read_json(url, "enqueue", "emails", '{"to": "a"}')
    done = run(url, "enqueue", "default/emails", '[{"to": "b"}, {"to": "c"}]')
    two = done.stdout.split()
    three = push(url, {"to": "d"}, {"to": "e"}, {"to": "f"})
    ids = [one["id"], *two, *three]
    assert len(set(ids)) == 6
    await until(lambda: read_queue(url)["completed"] == before + 6, "all are handled")


def test_many_are_pushed_at_once_and_people_see_some_ids(url: str) -> None:
    """All or none, in one call; a terminal shows the first 20 ids."""
    run(url, "queues", "pause", "emails")
    many = json.dumps([{"to": str(n)} for n in range(100)])
    lines = on_terminal(url, 80, "enqueue", "emails", many)
    assert (len(set(lines)), lines[-1]) == (21, "… and 80 more")
    assert read_queue(url)["ready"] == 100
    bad = json.dumps([{"to": "x"}] * 50) + "\n[1]"
    done = run(url, "enqueue", "emails", stdin=bad)
    assert (done.returncode, done.stdout) == (2, "")
    assert "line 2 is not a message" in done.stderr
    assert read_queue(url)["ready"] == 100
    run(url, "queues", "purge", "emails", "--yes")
    run(url, "queues", "resume", "emails")


def test_options_apply_to_the_messages(url: str) -> None:
    """Delay, timeout and attempts."""
    words = ("--delay", "3600", "--max-attempts", "7", "--timeout", "9")
    (name,) = push(url, {"to": "late"}, words=words)
    (message,) = read_json(url, "queues", "browse", "emails", "--state", "waiting")
    assert (message["id"], message["max_attempts"], message["value"]["to"]) == (name, 7, "late")
    assert message["due"] - message["enqueued"] == pytest.approx(3600, abs=60)
    (purged,) = read_json(url, "queues", "purge", "emails", "--state", "waiting", "--yes")
    assert purged == {"queue": QUEUE, "what": "purged", "removed": 1}


def test_queues_are_listed_for_people_and_for_programs(url: str) -> None:
    """With the number of messages in each state, and of workers."""
    found = {row["queue"]: row for row in read_json(url, "queues", "list")}
    assert found.keys() == {QUEUE, OTHER}
    assert all(row["workers"] == 1 for row in found.values())
    rows = read_tsv(run(url, "queues", "list").stdout)
    assert [row["queue"] for row in rows] == [QUEUE, OTHER]
    assert all(row[state].isdecimal() for row in rows for state in STATES)
    for columns in (80, 160):
        lines = on_terminal(url, columns, "queues", "list")
        assert max(map(len, lines)) <= columns
        assert [line.split()[0] for line in lines[1:]] == [QUEUE, OTHER]


def test_one_queue_shows_its_workers(url: str) -> None:
    """With their concurrency and their number of claims."""
    found = read_json(url, "queues", "stats", "reports")
    (worker,) = found["workers"]
    assert (worker["state"], worker["concurrency"], worker["claims"]) == ("live", 2, 0)
    _, workers = run(url, "queues", "stats", "reports").stdout.split("\n\n")
    (row,) = read_tsv(workers)
    assert row["worker_id"] == worker["worker_id"]
    for columns in (80, 160):
        lines = on_terminal(url, columns, "queues", "stats", "reports")
        assert max(map(len, lines)) <= columns
        # Not cut: it is what people search for in logs.
        assert any(line.startswith(worker["worker_id"]) for line in lines)


async def test_messages_are_browsed_by_state(url: str) -> None:
    """Ids are never cut, dead letters have their errors, and a cursor leads to the next page."""
    push(url, {"kind": "hold"}, {"kind": "cancel"}, {"to": "z"})
    failing = [{"kind": "fail", "to": f"{n} " + "far" * 40} for n in range(3)]
    dead = push(url, *failing, words=("--max-attempts", "1"))
    await until(
        lambda: read_queue(url)["dead"] == 3 and read_queue(url)["claimed"] == 1,
        "all have been handled",
    )
    push(url, {"kind": "plain"}, {"kind": "plain"}, words=("--delay", "3600"))
    for state in STATES:
        words = ("queues", "browse", "emails", "--state", state)
        found = read_json(url, *words)
        rows = read_tsv(run(url, *words).stdout)
        assert [row["id"] for row in rows] == [row["id"] for row in found]
        assert {row["state"] for row in found} <= {state}
        for columns in (80, 160) if state == "dead" else (80,):
            lines = on_terminal(url, columns, *words)
            # Only a URL on a line of its own is not cut.
            assert max(len(line) for line in lines if line.strip() != url) <= columns
            if found:
                assert [line.split()[0] for line in lines[1:]] == [row["id"] for row in found]
            else:
                assert " ".join(lines).startswith("none in ")
    # Of all live states together: one is claimed, and two wait.
    assert len(read_json(url, "queues", "browse", "emails", "--limit", "2")) == 2
    limited = ("queues", "browse", "emails", "--state", "dead", "--limit", "2")
    first = read_json(url, *limited)
    rest = read_json(url, *limited, "--after", first[-1]["cursor"])
    # Those that fail together are dead letters in any order.
    assert sorted(row["id"] for row in first + rest) == sorted(dead)
    assert first[0]["errors"][0]["error"].startswith("ValueError: no such mailbox: 0 far")


async def test_dead_letters_are_redriven(url: str) -> None:
    """One by its id, then all; with all their attempts, which they use up again."""
    dead = [row["id"] for row in read_json(url, "queues", "browse", "emails", "--state", "dead")]
    assert len(dead) == 3
    (row,) = read_tsv(run(url, "queues", "redrive", "emails", dead[0]).stdout)
    assert row == {"queue": QUEUE, "what": "redriven", "messages": "1"}
    (rest,) = read_json(url, "queues", "redrive", "emails")
    # The first may have died again by now.
    assert rest["messages"] >= 2

    def errors() -> list[int]:
        found = read_json(url, "queues", "browse", "emails", "--state", "dead")
        return [len(row["errors"]) for row in found]

    await until(lambda: len(errors()) == 3 and min(errors()) == 2, "they have died again")


async def test_a_paused_queue_is_paused_for_every_worker(url: str) -> None:
    """Until it is resumed; pausing it again changes nothing."""
    assert read_json(url, "queues", "pause", "emails", "--reason", "new mail server") == [
        {"queue": QUEUE, "what": "paused"}
    ]
    (again,) = read_tsv(run(url, "queues", "pause", "emails").stdout)
    assert again["what"] == "already paused"
    (name,) = push(url, {"to": "p"})
    row = read_queue(url)
    assert (row["ready"], row["reason"]) == (1, "new mail server")
    wide = on_terminal(url, 160, "queues", "list")
    assert any("new mail server" in line for line in wide)
    assert read_json(url, "why", name)[0]["code"] == "paused"
    assert on_terminal(url, 80, "queues", "resume", "emails")[1].split() == [QUEUE, "resumed"]
    assert read_json(url, "queues", "resume", "emails")[0]["what"] == "not paused"
    await until(lambda: read_queue(url)["ready"] == 0, "it is handled")


def test_a_purge_asks_for_confirmation(url: str) -> None:
    """On a terminal; otherwise it requires --yes."""
    words = ("queues", "purge", "reports")
    run(url, "queues", "pause", "reports")
    run(url, "enqueue", "reports", '[{"n": 1}, {"n": 2}]')
    status, lines = run_on_terminal(url, 80, *words, typed="n\n")
    assert status == 1
    # The terminal echoes what is typed.
    assert (
        "Remove 2 messages of default/reports (ready, waiting, blocked) permanently? [y/N]"
        in lines[1]
    )
    assert read_queue(url, OTHER)["ready"] == 2
    refused = run(url, *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Pass --yes to remove the messages" in refused.stderr
    status, lines = run_on_terminal(url, 80, *words, typed="y\n")
    assert (status, lines[-1].split()) == (0, [OTHER, "purged", "2"])
    assert read_json(url, *words, "--yes")[0]["removed"] == 0
    run(url, "queues", "resume", "reports")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["queues", "stats", "emailz"], 1, "no queue 'emailz'. Did you mean default/emails?"),
        (["queues", "pause", "a/b/c"], 1, "no queue 'a/b/c'. Known: default/emails"),
        (["queues", "browse", "emails", "--state", "lost"], 2, "'--state'"),
        (["queues", "browse", "emails", "--limit", "0"], 2, "'--limit'"),
        (["queues", "purge", "emails", "--state", "claimed"], 2, "'--state'"),
        (["enqueue", "emailz", "{}"], 1, "no resource 'emailz'. Did you mean emails?"),
        (["enqueue", "a/b/c", "{}"], 2, "queue must be [NAMESPACE/]RESOURCE (got 'a/b/c')"),
        (["enqueue", "emails", "[1]"], 2, "DATA is not a message"),
        (["enqueue", "emails", "{}", "--delay", "-1"], 2, "'--delay'"),
        (["enqueue", "emails", "{}", "--delay", "999d"], 2, "delay must be 0 to 366 days"),
        (["enqueue", "emails", "{}", "--max-attempts", "0"], 2, "'--max-attempts'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_reported(url: str, words: list[str], status: int, message: str) -> None:
    """With the option, the value and the fix, in one line on standard error."""
    done = run(url, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_store_is_reported(tmp_path: Path) -> None:
    """An empty one has no queues; reading creates no file."""
    done = run("memory://", "queues", "list")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    missing = run(f"sqlite:///{tmp_path / 'none.db'}", "queues", "list")
    assert "refers to a missing file" in missing.stderr


def test_one_message_is_hurried_cancelled_and_deleted(url: str) -> None:
    """By its id; the exit code says whether something was done."""
    (name,) = push(url, {"to": "later"}, words=("--delay", "3600"))
    done = run(url, "messages", "cancel", name)
    assert (done.returncode, read_tsv(done.stdout)[0]["what"]) == (0, "cancelled")
    assert run(url, "messages", "run-now", name).returncode == 1
    (reason,) = read_json(url, "why", name)
    assert (reason["code"], reason["reason"]) == ("cancelled", "it was cancelled from outside")
    unasked = run(url, "messages", "delete", name)
    assert "--yes" in unasked.stderr
    (row,) = read_json(url, "messages", "delete", name, "--yes")
    assert row == {"queue": QUEUE, "id": name, "what": "deleted"}
    again = run(url, "messages", "delete", name, "--yes")
    assert again.returncode == 1
    assert "There is no message" in again.stderr
