"""`jobsync work --processes`: nothing is lost when the supervisor or a process is killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import now, until
from work_processes import WorkProcess
from worker_protocol import FactLog

import jobsync
from jobsync import QueuePlugin

QUEUE = "emails"
MESSAGES = 200
PROCESSES = 2


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty store."""
    return f"sqlite:///{tmp_path / 'jobs.db'}"


@pytest.fixture
async def queue(url: str) -> AsyncIterator[QueuePlugin]:
    """The queue, in a process that only enqueues."""
    queue = QueuePlugin(resource=QUEUE)
    async with jobsync.producer(url, plugins=[queue]):
        yield queue


def start(url: str, folder: Path, name: str, *options: str) -> WorkProcess:
    """Start a supervisor with its processes."""
    words = ("--processes", str(PROCESSES), "--grace", "20", *options)
    return WorkProcess(url, QUEUE, folder / f"{name}.log", *words, facts=folder / "facts")


def list_children(process: WorkProcess) -> list[int]:
    """Return the numbers of the processes that a process has started."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == process.process.pid and fields[0] != "Z":
                children.append(int(path.parent.name))
    return children


def is_alive(number: int) -> bool:
    """Whether a process exists, and is not only a number that nobody has asked for."""
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False


async def until_at_work(process: WorkProcess, starts: int = PROCESSES) -> None:
    """Wait until so many processes have begun to work."""
    await until(lambda: process.log.count("worker running") >= starts, "all are at work")


async def until_handled(folder: Path, names: list[str]) -> None:
    """Wait until every message was handled."""
    facts = FactLog(folder / "facts")
    await until(
        lambda: {fact["id"] for fact in facts.read("handled")} >= set(names), "all are handled"
    )


async def push(queue: QueuePlugin, seconds: float) -> list[str]:
    """Enqueue messages that take so long."""
    return await queue.enqueue_many([{"seconds": seconds}] * MESSAGES)


async def test_a_killed_process_is_started_again_and_nothing_is_lost(
    url: str, tmp_path: Path, queue: QueuePlugin
) -> None:
    """One banner; SIGTERM reaches all processes, and the supervisor ends after them, with 0."""
    with start(url, tmp_path, "supervisor", "--concurrency", "5", "--queues", QUEUE) as supervisor:
        await until_at_work(supervisor)
        names = await push(queue, 0.02)
        children = list_children(supervisor)
        assert len(children) == PROCESSES
        os.kill(children[0], signal.SIGKILL)
        await until_at_work(supervisor, PROCESSES + 1)
        await until_handled(tmp_path, names)
        children = list_children(supervisor)
        supervisor.stop()
        assert await supervisor.ended() == 0, supervisor.log
        assert not any(map(is_alive, children))
        assert "was ended by SIGKILL: starting it again" in supervisor.log
        assert supervisor.log.count("jobsync 0") == 1


async def test_the_processes_of_a_killed_supervisor_stop_by_themselves(
    url: str, tmp_path: Path, queue: QueuePlugin
) -> None:
    """In good order: what they have claimed is returned, and others handle it."""
    with start(url, tmp_path, "first") as supervisor:
        await until_at_work(supervisor)
        names = await push(queue, 0.05)
        children = list_children(supervisor)
        supervisor.kill()
        await until(lambda: not any(map(is_alive, children)), "they have stopped")
        assert supervisor.log.count("the supervisor has ended: stopping") == PROCESSES
        assert await queue.count("processing") == 0
    with start(url, tmp_path, "second") as supervisor:
        await until_handled(tmp_path, names)
        supervisor.stop()
        assert await supervisor.ended() == 0, supervisor.log


async def test_a_supervisor_gives_up_if_nothing_ever_worked(url: str, tmp_path: Path) -> None:
    """The exit code is that of its processes. It does not start them again and again."""
    with start(url, tmp_path, "wrong", "--queues", "email") as supervisor:
        assert await asyncio.wait_for(supervisor.ended(), 60) == 2, supervisor.log
        assert f"did you mean {QUEUE}?" in supervisor.log.lower()
        assert "before any has worked" in supervisor.log
        assert "starting it again" not in supervisor.log


async def test_two_processes_compute_faster_than_one(
    url: str, tmp_path: Path, queue: QueuePlugin, proof: Any
) -> None:
    """Handlers of 5 ms of pure Python, on at least two cores that are free. At full scale only."""
    messages, seconds = 4000, list[float]()
    for count in (1, 2):
        log, words = tmp_path / f"{count}.log", ("--processes", str(count), "--concurrency", "10")
        with WorkProcess(url, QUEUE, log, *words) as supervisor:
            await until_at_work(supervisor, count)
            begun, target = now(), count * messages
            await queue.enqueue_many([{"kind": "compute", "seconds": 0.005}] * messages)

            async def is_done(target: int = target) -> bool:
                return await queue.count("completed") >= target

            await until(is_done, "all are completed")
            seconds.append(now() - begun)
            supervisor.stop()
            assert await supervisor.ended() == 0, supervisor.log
    one, two = seconds
    proof.record("operate: processes", messages=messages, one=one, two=two, ratio=one / two)
    assert one / two >= 1.6
