"""`jobsync work` in production: rolling deployments, a store that goes away, stuck handlers.

The tests assert counts, exit codes and the answers of probes. Times are only recorded.
"""

import asyncio
import itertools
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import ProcessGroup
from servers import PostgresServer
from waiting import now, until
from work_processes import WorkProcess

from jobsync import Database, QueuePlugin

WORKERS = 4
QUEUE = "emails"
GRACE = "30"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Start a server that this file may stop."""
    with PostgresServer() as server:
        if not server.is_ours:
            pytest.skip("the server is not ours to stop")
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of database."""
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty store."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    server: PostgresServer = request.getfixturevalue("server")
    return server.create_database(f"operate_{next(_numbers)}_{int(time.time())}")


class WorkProcesses(ProcessGroup[WorkProcess]):
    """Processes that run `jobsync work` on one queue."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        super().__init__(folder, WorkProcess)
        self._url = url
        self._settings = settings

    async def start(self, count: int = 1) -> list[WorkProcess]:
        """Start processes; return when they are at work."""
        workers = [self._add() for _ in range(count)]
        await until(lambda: all(worker.is_at_work for worker in workers), "all are at work")
        return workers

    def _add(self) -> WorkProcess:
        log = self.folder / f"worker-{len(self.workers)}.log"
        options = {"facts": self.fact_log.path, **self._settings}
        worker = WorkProcess(self._url, QUEUE, log, "--grace", GRACE, **options)
        self.workers.append(worker)
        return worker

    async def stop(self, worker: WorkProcess) -> float:
        """Send SIGTERM; return the seconds until it had ended, in good order."""
        stopped = worker.stop()
        assert await worker.ended() == 0, worker.log
        return now() - stopped

    @property
    def handled(self) -> Counter[str]:
        """How often each message was handled."""
        return Counter(fact["id"] for fact in self.facts("handled"))

    def find_errors(self) -> list[str]:
        """Return the errors and warnings that any process has logged.

        That a heartbeat was late tells of the machine, which runs many tests at once.
        """
        return [
            line
            for worker in self.workers
            for line in worker.log.splitlines()
            if (" error: " in line or " warning: " in line or "Traceback" in line)
            and "coord:heartbeat-late" not in line
        ]


class Load:
    """Pushes messages while workers come and go."""

    def __init__(self, queue: QueuePlugin, seconds: float) -> None:
        self.pushed: list[str] = []
        self._queue = queue
        self._seconds = seconds

    async def push(self, count: int, pace: float) -> None:
        """Push messages, ten at a time."""
        for _ in range(0, count, 10):
            batch = [{"seconds": self._seconds} for _ in range(10)]
            self.pushed += await self._queue.enqueue_many(batch)
            await asyncio.sleep(pace)


@asynccontextmanager
async def producing(url: str) -> AsyncIterator[QueuePlugin]:
    """Open the queue in this process, without a handler."""
    async with Database(url) as database:
        queue = QueuePlugin(resource=QUEUE, heartbeat_interval=1, worker_timeout=4)
        yield await database.use_plugin(queue)


async def until_completed(queue: QueuePlugin, count: int) -> None:
    """Wait until so many messages are completed."""

    async def is_done() -> bool:
        return await queue.count("completed") >= count

    await until(is_done, f"{count} are completed")


async def test_a_rolling_restart_loses_nothing_and_repeats_nothing(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Four workers under load are replaced one by one, by SIGTERM; no log has an error."""
    rounds, messages = (5, 20_000) if full_scale else (1, 400)
    took = []
    begun = now()
    async with WorkProcesses(url, tmp_path, concurrency=5) as processes:
        workers = await processes.start(WORKERS)
        async with producing(url) as queue:
            load = Load(queue, seconds=0.02)
            pushing = asyncio.create_task(load.push(messages, pace=0.02 if full_scale else 0.1))
            for number in range(rounds):
                for index, old in enumerate(workers):
                    # The new one works before the old one stops, as in a deployment.
                    (workers[index],) = await processes.start()
                    took.append(await processes.stop(old))
                    proof.tell(f"round {number + 1}: worker {index + 1} replaced")
            await pushing
            await until(lambda: len(processes.handled) >= messages, "all are handled")
            took += [await processes.stop(worker) for worker in workers]
            handled = processes.handled
            assert set(handled) == set(load.pushed)
            assert handled.total() == messages
            assert await queue.count("all") == await queue.count("completed") == messages
        assert processes.find_errors() == []
    proof.record(
        "rolling restart",
        kind=kind,
        workers=WORKERS,
        restarts=rounds * WORKERS,
        messages=messages,
        again=handled.total() - len(handled),
        stop_median_s=round(sorted(took)[len(took) // 2], 2),
        stop_worst_s=round(max(took), 2),
        seconds=round(now() - begun),
    )


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Lock both files of an SQLite store against writes of others."""
    path = url.removeprefix("sqlite:///")
    with ExitStack() as stack:
        for name in (path, f"{path}-sessions"):
            connection = stack.enter_context(closing(sqlite3.connect(name, timeout=60)))
            connection.execute("BEGIN EXCLUSIVE")
            stack.callback(connection.rollback)
        yield


async def test_a_store_that_goes_away_restarts_nobody(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any, request: Any
) -> None:
    """A server is stopped, or files are locked: processes stay live, and are not ready.

    When the store comes back, the same processes are ready and go on with the work.
    """
    away = 30.0 if full_scale else 0.0
    gone = locked(url) if kind == "sqlite" else request.getfixturevalue("server").away()
    # One message at a time, so that no worker takes what the other could have.
    async with WorkProcesses(url, tmp_path, concurrency=1, prefetch=0) as processes:
        workers = await processes.start(2)
        await until(lambda: probe(workers, "/readyz") == {200}, "all are ready")
        lost = now()
        alive = set[int]()
        with gone:
            await until(lambda: probe(workers, "/readyz") == {503}, "none is ready")
            turned = now() - lost
            while now() - lost < away:
                alive |= probe(workers, "/livez") | probe(workers, "/health/live")
                assert probe(workers, "/health/ready") == {503}
                await asyncio.sleep(0.5)
            alive |= probe(workers, "/livez")
        back = now()
        assert alive == {200}
        await until(lambda: probe(workers, "/readyz") == {200}, "all are ready again")
        returned = now() - back
        assert probe(workers, "/livez") == {200}
        assert all(worker.is_alive for worker in workers)
        async with producing(url) as queue:
            load = Load(queue, seconds=0.2)

            async def all_work() -> bool:
                # On PostgreSQL one may listen again seconds before the other.
                await load.push(10, pace=0.0)
                await until(lambda: set(processes.handled) == set(load.pushed), "all are handled")
                handlers = {fact["worker"] for fact in processes.facts("handled")}
                return len(handlers) == len(workers)

            await until(all_work, "each of them handles messages")
        for worker in workers:
            await processes.stop(worker)
    proof.record(
        "store gone",
        kind=kind,
        seconds=round(back - lost),
        ready_turned_after_s=round(turned, 1),
        ready_came_back_after_s=round(returned, 1),
    )


def probe(workers: list[WorkProcess], path: str) -> set[int]:
    """Return the statuses of a health endpoint of processes that must all run."""
    assert all(worker.is_alive for worker in workers), [worker.log for worker in workers]
    return {worker.probe(path) for worker in workers}


async def test_a_worker_whose_slots_are_all_overrun_leaves(url: str, tmp_path: Path) -> None:
    """It exits with 1 though its functions go on; another worker takes its place."""
    settings = {"blocks": True, "concurrency": 2, "grace": 60, "max_attempts": 3}
    async with WorkProcesses(url, tmp_path, **settings) as processes:
        (stuck,) = await processes.start()
        async with producing(url) as queue:
            # One slot is left: nothing is wrong.
            await queue.enqueue({"seconds": 3600}, timeout=0.1)
            await until(lambda: "handler-overran" in stuck.log, "one overran")
            assert (stuck.probe("/readyz"), stuck.probe("/livez")) == (200, 200)
            await queue.enqueue({"seconds": 3600}, timeout=0.1)
            assert await stuck.ended() == 1, stuck.log
            assert "every slot is occupied by a handler" in stuck.log
            assert "db:disconnect-incomplete" in stuck.log
            await processes.start()
            await queue.enqueue({"seconds": 0})
            await until_completed(queue, 1)
            # Each failed once by its timeout, and waits for its next attempt.
            waiting = await queue.browse("waiting")
            assert [message.attempts for message in waiting] == [1, 1]
