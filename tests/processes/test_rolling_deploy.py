"""Processes with the code of an earlier commit work beside those of this one."""

import asyncio
import io
import itertools
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from queue_processes import QueueProcesses, check_messages
from waiting import until

from jobsync import Database, QueuePlugin

EARLIER = "9f89b985fa9366fd75b7e823f307c89b4a8e7b07"
"""The last commit whose queues have neither priorities nor groups."""
ROOT = Path(__file__).parents[2]
OLD_WORKER = """
import asyncio, sys
from jobsync import Database, QueuePlugin

async def handle(message):
    print(message["n"], flush=True)

async def main():
    async with Database(sys.argv[1]) as db:
        await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    name = f"deploy_{next(_numbers)}_{int(time.time())}"
    return str(request.getfixturevalue("postgres").create_database(name))


def start_old_worker(url: str, folder: Path) -> "subprocess.Popen[str]":
    """Start a worker with the code of the earlier commit."""
    archive = subprocess.run(
        ["git", "archive", EARLIER, "src"], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return subprocess.Popen(
        [sys.executable, "-c", OLD_WORKER, url],
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_a_message_of_a_new_task_waits_for_a_worker_that_knows_it(
    url: str, tmp_path: Path, full_scale: bool
) -> None:
    """Older workers run all the time, and spend no attempt on it; everything is done once."""
    if not (full_scale or url.startswith("sqlite:")):
        pytest.skip("at this scale one kind of database suffices")
    count = 5_000 if full_scale else 120
    async with QueueProcesses(url, tmp_path / "facts") as processes:
        old = await processes.start(2, tasks=["send"])
        producer = processes.add("push", messages=count, tasks=["send", "resize"])
        await processes.reported("left", [producer])
        waiting = await processes.read_messages("ready")
        assert {each.task for each in waiting.values()} >= {"resize"}
        await processes.start(1, tasks=["send", "resize"])
        await processes.drained()
        finished = await processes.read_messages("completed")
        assert check_messages(processes, finished)["again"] == 0
        resized = {name for name, each in finished.items() if each.task == "resize"}
        begun = processes.facts("begun")
        names = {worker.name for worker in old}
        assert not [each for each in begun if each["id"] in resized and each.who in names]
        assert {each["attempt"] for each in begun} == {1}
        assert (len(finished), len(begun)) == (count, count)


async def test_older_workers_leave_alone_what_they_do_not_understand(
    url: str, tmp_path: Path, full_scale: bool
) -> None:
    """They handle plain messages and those with keys; a newer worker handles the others."""
    if not full_scale:
        pytest.skip("needs the history of the repository")
    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", order="priority"))
        old = start_old_worker(url, tmp_path / "old")
        assert old.stdout is not None
        lines = old.stdout
        try:
            assert (await asyncio.to_thread(lines.readline)).strip() == "ready"
            for n in range(20):
                kinds: list[Any] = [{}, {"priority": 5}, {"group": "a"}, {"key": f"key-{n}"}]
                await queue.enqueue({"n": n}, **kinds[n % 4])
                await queue.enqueue({"n": n}, task="new")
            by_old = [int(await asyncio.to_thread(lines.readline)) for _ in range(10)]
            assert sorted(by_old) == [n for n in range(20) if n % 4 in {0, 3}]
            assert await queue.count("blocked") == 4
            seen: list[int] = []

            @queue.handler
            async def handle(message: Any) -> None:
                seen.append(message["n"])

            await until(lambda: len(seen) == 10, "the rest is handled")
            done: list[int] = []

            @queue.task(name="new")
            async def run(n: int) -> None:
                done.append(n)

            await until(lambda: len(done) == 20, "the messages of a task are handled")
        finally:
            old.kill()
            old.wait()
            lines.close()
        assert [n for n in seen if n % 4 == 2] == [2, 6, 10, 14, 18]
        assert sorted(n for n in seen if n % 4 == 1) == [1, 5, 9, 13, 17]
