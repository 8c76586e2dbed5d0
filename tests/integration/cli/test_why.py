"""`jobsync why`, asked in situations that processes have made by real means."""

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

import exhibit
import psycopg
import pytest
import servers
from terminal import on_terminal, read_json, read_tsv, run, see
from waiting import until
from work_processes import WorkProcess

from jobsync import Components, Database
from jobsync.status.queues import read_queues_status
from jobsync.status.why import Reason, explain_message
from jobsync.stores.opening import open_store

STEADY, CROWDED, DOOMED, IDLE = "steady", "crowded", "doomed", "idle"


def push(url: str, queue: str, message: dict[str, Any], *words: str) -> str:
    """Push a message by the command line; give its id."""
    (row,) = read_json(url, "enqueue", queue, json.dumps(message), *words)
    return str(row["id"])


async def explain(url: str, name: str) -> Reason | None:
    """Give the reason of a message, as `why` would, without a process of its own."""
    components = Components.system()
    store = await open_store(url, components)
    try:
        seen = await (await read_queues_status(store, components)).message(name)
        return None if seen is None else explain_message(seen)
    finally:
        await store.close()


async def await_code(url: str, name: str, code: str) -> None:
    """Wait until a message is in a situation."""

    async def is_so() -> bool:
        reason = await explain(url, name)
        return reason is not None and reason.code == code

    await until(is_so, f"{name} is {code}")


class Situations:
    """A fleet in which every situation has come about, and what is in each."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url = url
        self.names: dict[str, str] = {}
        self._folder = folder
        self._stack = stack

    async def come_about(self) -> None:
        """Make them."""
        workers = [self._open(queue) for queue in (STEADY, CROWDED, DOOMED)]
        nodes = [self._join(name) for name in ("worker-01", "gpu-02")]
        await until(lambda: all(worker.is_at_work for worker in workers), "all are at work")
        await self._have_messages()
        await self._damage_one()
        await self._lose_worker(workers[-1])
        await self._lose_node(nodes)

    def _open(self, queue: str) -> WorkProcess:
        log = self._folder / f"{queue}.log"
        hands = 1 if queue == CROWDED else 2
        return self._stack.enter_context(
            WorkProcess(self.url, queue, log, concurrency=hands, prefetch=0)
        )

    def _join(self, node: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, exhibit.__file__, self.url, node],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    async def _have_messages(self) -> None:
        names = self.names
        names["not-due"] = push(self.url, STEADY, {"to": "a"}, "--delay", "3600")
        names["completed"] = push(self.url, STEADY, {"to": "b"})
        names["cancelled"] = push(self.url, STEADY, {"kind": "cancel"})
        names["retrying"] = push(self.url, STEADY, {"kind": "fail", "to": "c"})
        fail = {"kind": "fail", "to": "d"}
        names["dead"] = push(self.url, STEADY, fail, "--max-attempts", "1")
        names["claimed"] = push(self.url, STEADY, {"kind": "hold"})
        names["owner-dead"] = push(self.url, DOOMED, {"kind": "hold"})
        held = push(self.url, CROWDED, {"kind": "hold"})
        for name in (held, names["owner-dead"], names["claimed"]):
            await await_code(self.url, name, "claimed")
        names["busy"] = push(self.url, CROWDED, {"to": "e"})
        async with Database(self.url) as database:
            await database.create_resource(IDLE)
        names["no-worker"] = push(self.url, IDLE, {"to": "f"})
        for code in ("completed", "cancelled", "retrying", "dead"):
            await await_code(self.url, names[code], code)

    async def _damage_one(self) -> None:
        """Let a message be overwritten behind the library's back, while it cannot be claimed."""
        run(self.url, "queues", "pause", STEADY, "--reason", "a deployment")
        name = self.names["corrupt"] = push(self.url, STEADY, {"to": "g"})
        await await_code(self.url, name, "paused")
        statement = "UPDATE jobsync_message SET payload = '{broken' WHERE id = '{id}'"
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file, file:
                file.execute(statement.replace("{id}", name))
        else:
            with psycopg.connect(self.url.partition("?")[0], autocommit=True) as server:
                server.execute("SET search_path TO asked_why")
                server.execute(statement.replace("{id}", name).encode())
        run(self.url, "queues", "resume", STEADY)
        await await_code(self.url, name, "corrupt")
        run(self.url, "queues", "pause", STEADY, "--reason", "a deployment")
        self.names["paused"] = push(self.url, STEADY, {"to": "h"})

    async def _lose_worker(self, doomed: WorkProcess) -> None:
        """Let the only worker of a queue die with a message in hand."""
        doomed.process.send_signal(signal.SIGKILL)
        await await_code(self.url, self.names["owner-dead"], "owner-dead")

    async def _lose_node(self, nodes: list[subprocess.Popen[str]]) -> None:
        """Let a node die with tasks in hand."""
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline().startswith("ready")
        begun, done = (read_json(self.url, "jobs", which) for which in ("incomplete", "audits"))
        task = begun[0]["task_id"]
        self.names |= {"abandoned": task, "done": done[0]["task_id"], "unmatched-pin": "train"}
        nodes[1].kill()

        def has_owner() -> bool:
            (row,) = read_json(self.url, "why", task)
            return (row["code"], row["owner"]) == ("abandoned", "worker-01")

        await until(has_owner, "another node owns the task")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Situations]:
    """Every situation at once."""
    folder = tmp_path_factory.mktemp("why")
    if request.param == "sqlite":
        url = f"sqlite:///{folder / 'fleet.db'}"
    else:
        server: servers.PostgresServer = request.getfixturevalue("postgres")
        url = f"{server.url}?schema=asked_why"
    with ExitStack() as stack:
        situations = Situations(url, folder, stack)
        asyncio.run(situations.come_about())
        yield situations


TOLD = {
    "not-due": "it is not due yet",
    "completed": "it was completed",
    "cancelled": "its handler cancelled it",
    "retrying": "attempt 1 of 4 failed, and it is tried again: ValueError: no such mailbox: c",
    "dead": "it is a dead letter, after attempt 1 of 1: ValueError: no such mailbox: d",
    "claimed": "has it in hand, as attempt 1 of 4",
    "owner-dead": "had it in hand and is dead, and nobody works on default/doomed who could take",
    "busy": "it is one of 1 that wait, and the one worker has its hands full",
    "no-worker": "it is ready, and nobody is at work on default/idle",
    "corrupt": "it was set aside as corrupt",
    "paused": "default/steady is paused (a deployment)",
    "abandoned": "and gpu-02 is gone: worker-01 may start it again 60 s after that",
    "done": "worker-01 has done it, as run 1",
    "unmatched-pin": "pinned to tpu-% or big-% (needs a TPU), which no live node matches",
}
"""Of each situation, what is said."""

ENDS = {"not-due": 3600.0, "retrying": 3600.0, "abandoned": 60.0}
"""Of those that end by themselves, the seconds that they take, about."""


@pytest.mark.parametrize("code", TOLD)
def test_the_true_reason_is_given(fleet: Situations, code: str) -> None:
    """To programs as code, to people in words, with the times that matter."""
    name = fleet.names[code]
    (row,) = read_json(fleet.url, "why", name)
    assert row["code"] == code
    assert TOLD[code] in row["reason"]
    if code in ENDS:
        assert row["until"] - row["since"] == pytest.approx(ENDS[code], rel=0.2)
    elif code != "unmatched-pin":
        assert row["since"] < Components.system().clock.wall().seconds
    lines = on_terminal(fleet.url, 80, "why", name)
    assert max(map(len, lines)) <= 80 or code in {"dead", "retrying", "corrupt"}
    text = " ".join(map(str.strip, lines))
    assert f"{name}: {row['reason']}" in text
    assert ("until" in text) is (code in ENDS)


def test_a_pipe_gets_one_row(fleet: Situations) -> None:
    """With the reason for people too, and times as numbers."""
    name = fleet.names["retrying"]
    (row,) = read_tsv(run(fleet.url, "why", name).stdout)
    assert (row["name"], row["code"]) == (name, "retrying")
    assert TOLD["retrying"] in row["reason"]
    assert float(row["until"]) > float(row["since"])


def test_a_dead_letter_shows_every_error_and_where_it_was_raised(fleet: Situations) -> None:
    """With the place in the handler, below the reason."""
    text = "\n".join(on_terminal(fleet.url, 160, "why", fleet.names["dead"]))
    assert "attempt 1: ValueError: no such mailbox: d" in text
    assert "work_app.py" in text


def test_who_holds_a_message_is_named(fleet: Situations) -> None:
    """With its host and process, for whoever wants to look there."""
    (row,) = read_json(fleet.url, "why", fleet.names["claimed"])
    holder = row["holder"]
    assert row["reason"].startswith(holder["worker_id"])
    text = " ".join(on_terminal(fleet.url, 160, "why", fleet.names["claimed"]))
    assert f"{holder['worker_id']} on {holder['host']}, process {holder['pid']}" in text


def test_what_is_not_there_is_unknown(fleet: Situations) -> None:
    """What has the form of a message's id is no task that waits; the exit code tells."""
    name = "01a1e041-9cb6-77bb-a19f-64aeb3358fce"
    status, lines = see(fleet.url, 160, "why", name)
    assert status == 1
    assert "there is no such message" in lines[0]
    done = run(fleet.url, "why", name, "--json")
    assert (done.returncode, json.loads(done.stdout)[0]["code"]) == (1, "unknown")
