"""`jobsync why`, for messages and tasks of real processes."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sample_fleet
import servers
from terminal import on_terminal, read_json, read_tsv, run, run_on_terminal
from waiting import until
from work_processes import WorkProcess

from jobsync import Components, Database
from jobsync.status.queues import read_queues_status
from jobsync.status.why import Reason, explain
from jobsync.stores.opening import open_store

STEADY, CROWDED, DOOMED, IDLE = "steady", "crowded", "doomed", "idle"


def push(url: str, queue: str, message: dict[str, Any], *words: str) -> str:
    """Push a message by the command line; return its id."""
    (row,) = read_json(url, "enqueue", queue, json.dumps(message), *words)
    return str(row["id"])


async def read_reason(url: str, name: str) -> Reason | None:
    """Return the reason of a message as `why` does, without starting a process."""
    components = Components.system()
    store = await open_store(url, components)
    try:
        status = await (await read_queues_status(store, components)).message(name)
        return None if status is None else explain(status)
    finally:
        await store.close()


async def await_code(url: str, name: str, code: str) -> None:
    """Wait until `why` gives this code for a message."""

    async def has_code() -> bool:
        reason = await read_reason(url, name)
        return reason is not None and reason.code == code

    await until(has_code, f"{name} is {code}")


class SampleFleet:
    """A fleet with a message or a task for each code, by code."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url = url
        self.names: dict[str, str] = {}
        self._folder = folder
        self._stack = stack

    async def create(self) -> None:
        """Create them."""
        workers = [self._open(queue) for queue in (STEADY, CROWDED, DOOMED)]
        nodes = [self._join(name) for name in ("worker-01", "gpu-02")]
        await until(lambda: all(worker.is_at_work for worker in workers), "all workers run")
        await self._push_messages()
        await self._corrupt_message()
        await self._kill_worker(workers[-1])
        await self._kill_node(nodes)

    def _open(self, queue: str) -> WorkProcess:
        log = self._folder / f"{queue}.log"
        concurrency = 1 if queue == CROWDED else 2
        return self._stack.enter_context(
            WorkProcess(self.url, queue, log, concurrency=concurrency, prefetch=0)
        )

    def _join(self, node: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, sample_fleet.__file__, self.url, node],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    async def _push_messages(self) -> None:
        names = self.names
        names["not-due"] = push(self.url, STEADY, {"to": "a"}, "--delay", "3600")
        names["completed"] = push(self.url, STEADY, {"to": "b"})
        names["cancelled"] = push(self.url, STEADY, {"kind": "cancel"})
        names["retrying"] = push(self.url, STEADY, {"kind": "fail", "to": "c"})
        fail = {"kind": "fail", "to": "d"}
        names["dead"] = push(self.url, STEADY, fail, "--max-attempts", "1")
        names["claimed"] = push(self.url, STEADY, {"kind": "hold"})
        names["owner-dead"] = push(self.url, DOOMED, {"kind": "hold"})
        blocking = push(self.url, CROWDED, {"kind": "hold"})
        for name in (blocking, names["owner-dead"], names["claimed"]):
            await await_code(self.url, name, "claimed")
        names["busy"] = push(self.url, CROWDED, {"to": "e"})
        async with Database(self.url) as database:
            await database.create_resource(IDLE)
        names["no-worker"] = push(self.url, IDLE, {"to": "f"})
        for code in ("completed", "cancelled", "retrying", "dead"):
            await await_code(self.url, names[code], code)

    async def _corrupt_message(self) -> None:
        """Overwrite a message by SQL while the queue is paused."""
        run(self.url, "queues", "pause", STEADY, "--reason", "a deployment")
        name = self.names["corrupt"] = push(self.url, STEADY, {"to": "g"})
        await await_code(self.url, name, "paused")
        statement = "UPDATE jobsync_message SET payload = '{broken' WHERE id = '{id}'"
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file, file:
                file.execute(statement.replace("{id}", name))
        else:
            place, _, schema = self.url.partition("?schema=")
            with psycopg.connect(place, autocommit=True) as server:
                server.execute(f"SET search_path TO {schema}".encode())
                server.execute(statement.replace("{id}", name).encode())
        run(self.url, "queues", "resume", STEADY)
        await await_code(self.url, name, "corrupt")
        run(self.url, "queues", "pause", STEADY, "--reason", "a deployment")
        self.names["paused"] = push(self.url, STEADY, {"to": "h"})

    async def _kill_worker(self, doomed: WorkProcess) -> None:
        """Kill the only worker of a queue while it has a claim."""
        doomed.process.send_signal(signal.SIGKILL)
        await await_code(self.url, self.names["owner-dead"], "owner-dead")

    async def _kill_node(self, nodes: list[subprocess.Popen[str]]) -> None:
        """Kill a node while it has claimed tasks."""
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline().startswith("ready")
        incomplete, done = (
            read_json(self.url, "jobs", which) for which in ("incomplete", "audits")
        )
        task = incomplete[0]["task_id"]
        self.names |= {"abandoned": task, "done": done[0]["task_id"], "unmatched-pin": "train"}
        nodes[1].kill()

        def has_owner() -> bool:
            (row,) = read_json(self.url, "why", task)
            return (row["code"], row["owner"]) == ("abandoned", "worker-01")

        await until(has_owner, "another node owns the task")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SampleFleet]:
    """One fleet for all codes."""
    folder = tmp_path_factory.mktemp("why")
    if request.param == "sqlite":
        url = f"sqlite:///{folder / 'fleet.db'}"
    else:
        server: servers.PostgresServer = request.getfixturevalue("postgres")
        url = f"{server.url}?schema={folder.name}"
    with ExitStack() as stack:
        fleet = SampleFleet(url, folder, stack)
        asyncio.run(fleet.create())
        yield fleet


TEXTS = {
    "not-due": "it is not due yet",
    "completed": "it was completed",
    "cancelled": "its handler cancelled it",
    "retrying": "attempt 1 of 4 failed and will be retried: ValueError: no such mailbox: c",
    "dead": "it is a dead letter, after attempt 1 of 1: ValueError: no such mailbox: d",
    "claimed": "has claimed it, as attempt 1 of 4",
    "owner-dead": "had claimed it and is dead, and default/doomed has no worker to take it back",
    "busy": "it is 1 of 1 waiting messages, and the only worker is at capacity",
    "no-worker": "it is ready, but no worker is active on default/idle",
    "corrupt": "it is corrupt",
    "paused": "default/steady is paused (a deployment)",
    "abandoned": "and gpu-02 is gone: worker-01 may start it again at once",
    "done": "worker-01 completed it, as run 1",
    "unmatched-pin": "pinned to tpu-% or big-% (needs a TPU), which no live node matches",
}
"""Part of the text of each reason."""

ENDS = {"not-due": 3600.0, "retrying": 3600.0}
"""About how many seconds it takes until a reason ends by itself."""


@pytest.mark.parametrize("code", TEXTS)
def test_the_reason_is_correct(fleet: SampleFleet, code: str) -> None:
    """A code for programs, a text for people, and the times."""
    name = fleet.names[code]
    (row,) = read_json(fleet.url, "why", name)
    assert row["code"] == code
    assert TEXTS[code] in row["reason"]
    if code in ENDS:
        assert row["until"] - row["since"] == pytest.approx(ENDS[code], rel=0.2)
    elif code != "unmatched-pin":
        assert row["since"] < Components.system().clock.wall().seconds
    lines = on_terminal(fleet.url, 80, "why", name)
    assert max(map(len, lines)) <= 80 or code in {"dead", "retrying", "corrupt"}
    text = " ".join(map(str.strip, lines))
    assert f"{name}: {row['reason']}" in text
    assert ("until" in text) is (code in ENDS)


def test_a_pipe_gets_one_row(fleet: SampleFleet) -> None:
    """With the text for people, and times as numbers."""
    name = fleet.names["retrying"]
    (row,) = read_tsv(run(fleet.url, "why", name).stdout)
    assert (row["name"], row["code"]) == (name, "retrying")
    assert TEXTS["retrying"] in row["reason"]
    assert float(row["until"]) > float(row["since"])


def test_a_dead_letter_shows_every_error_and_where_it_was_raised(fleet: SampleFleet) -> None:
    """The trace is shown below the reason."""
    text = "\n".join(on_terminal(fleet.url, 160, "why", fleet.names["dead"]))
    assert "attempt 1: ValueError: no such mailbox: d" in text
    assert "work_app.py" in text


def test_the_holder_of_a_message_is_shown(fleet: SampleFleet) -> None:
    """With its host and process."""
    (row,) = read_json(fleet.url, "why", fleet.names["claimed"])
    holder = row["holder"]
    assert row["reason"].startswith(holder["worker_id"])
    text = " ".join(on_terminal(fleet.url, 160, "why", fleet.names["claimed"]))
    assert f"{holder['worker_id']} on {holder['host']}, process {holder['pid']}" in text


def test_an_unknown_id_is_reported(fleet: SampleFleet) -> None:
    """A name in the form of a message id is not taken for a task; the exit code is 1."""
    name = "01a1e041-9cb6-77bb-a19f-64aeb3358fce"
    status, lines = run_on_terminal(fleet.url, 160, "why", name)
    assert status == 1
    assert "there is no such message" in lines[0]
    done = run(fleet.url, "why", name, "--json")
    assert (done.returncode, json.loads(done.stdout)[0]["code"]) == (1, "unknown")
