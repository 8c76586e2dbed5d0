"""`jobsync work` in production: rolling deployments, a store that goes away, stuck handlers.

What is asserted is counts, exit codes and what probes say. Times are figures.
"""

import asyncio
import itertools
import json
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import PostgresServer
from shopping import Shop
from waiting import now, until

from jobsync import Database, QueuePlugin

WORKERS = 4
QUEUE = "emails"
GRACE = "30"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that this file may stop."""
    with PostgresServer() as server:
        if not server.is_ours:
            pytest.skip("the server is somebody else's")
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which database."""
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    server: PostgresServer = request.getfixturevalue("server")
    return server.create_database(f"operate_{next(_numbers)}_{int(time.time())}")


class Street:
    """Processes at work on one queue, and the ledger that they share."""

    def __init__(self, url: str, folder: Path, stack: ExitStack, **options: Any) -> None:
        self.ledger = folder / "ledger.jsonl"
        self.ledger.touch()
        self.shops: list[Shop] = []
        """All that ever were."""
        self._url = url
        self._folder = folder
        self._stack = stack
        self._options = options

    async def open(self, count: int = 1) -> list[Shop]:
        """Start processes; return when they are at work."""
        shops = [self._start() for _ in range(count)]
        await until(lambda: all(shop.is_at_work for shop in shops), "all are at work")
        return shops

    def _start(self) -> Shop:
        log = self._folder / f"worker-{len(self.shops)}.log"
        shop = Shop(self._url, QUEUE, log, "--grace", GRACE, ledger=self.ledger, **self._options)
        self.shops.append(self._stack.enter_context(shop))
        return shop

    async def close(self, shop: Shop) -> float:
        """Send SIGTERM; give the seconds until it had ended, in good order."""
        begun = now()
        shop.process.send_signal(signal.SIGTERM)
        await until(lambda: not shop.runs, "it ends")
        assert shop.process.returncode == 0, shop.told
        return now() - begun

    @property
    def handled(self) -> Counter[str]:
        """How often each message was handled."""
        return Counter(json.loads(line)["id"] for line in self.ledger.read_bytes().splitlines())

    def complaints(self) -> list[str]:
        """Give what anybody has logged that is no plain fact."""
        return [
            line
            for shop in self.shops
            for line in shop.told.splitlines()
            if " error: " in line or " warning: " in line or "Traceback" in line
        ]


class Load:
    """A process that pushes, meanwhile."""

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
    """Have a queue in this process, without a handler."""
    async with Database(url) as database:
        queue = QueuePlugin(resource=QUEUE, heartbeat_interval=1, worker_timeout=4)
        yield await database.use_plugin(queue)


async def until_completed(queue: QueuePlugin, count: int) -> None:
    """Wait until so many messages are done."""

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
    with ExitStack() as stack:
        street = Street(url, tmp_path, stack, concurrency=5)
        standing = await street.open(WORKERS)
        async with producing(url) as queue:
            load = Load(queue, seconds=0.02)
            pushing = asyncio.create_task(load.push(messages, pace=0.02 if full_scale else 0.1))
            for number in range(rounds):
                for place, old in enumerate(standing):
                    # The next one is there before the last one goes, as a deployment has it.
                    (standing[place],) = await street.open()
                    took.append(await street.close(old))
                    proof.tell(f"round {number + 1}: worker {place + 1} replaced")
            await pushing
            await until(lambda: len(street.handled) >= messages, "all are handled")
            took += [await street.close(shop) for shop in standing]
            handled = street.handled
            assert set(handled) == set(load.pushed)
            assert handled.total() == messages
            assert await queue.count("all") == await queue.count("completed") == messages
        assert street.complaints() == []
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
    """Keep everybody else from writing to both files of an SQLite store."""
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
    """A server is stopped, or files are locked by another process: live stays, ready turns.

    Both come back, and so does the work, by the same processes.
    """
    away = 30.0 if full_scale else 0.0
    gone = locked(url) if kind == "sqlite" else request.getfixturevalue("server").away()
    with ExitStack() as stack:
        # So that nobody takes what another could have.
        street = Street(url, tmp_path, stack, concurrency=1, prefetch=0)
        shops = await street.open(2)
        await until(lambda: _ask(shops, "/readyz") == {200}, "all are ready")
        lost = now()
        alive = set[int]()
        with gone:
            await until(lambda: _ask(shops, "/readyz") == {503}, "none is ready")
            turned = now() - lost
            while now() - lost < away:
                alive |= _ask(shops, "/livez") | _ask(shops, "/health/live")
                assert _ask(shops, "/health/ready") == {503}
                await asyncio.sleep(0.5)
            alive |= _ask(shops, "/livez")
        back = now()
        assert alive == {200}
        await until(lambda: _ask(shops, "/readyz") == {200}, "all are ready again")
        returned = now() - back
        assert _ask(shops, "/livez") == {200}
        assert all(shop.runs for shop in shops)
        async with producing(url) as queue:
            load = Load(queue, seconds=0.2)
            await load.push(20, pace=0.0)
            await until(lambda: set(street.handled) == set(load.pushed), "all are handled")
        workers = {json.loads(line)["worker"] for line in street.ledger.read_bytes().splitlines()}
        assert len(workers) == len(shops)
        for shop in shops:
            await street.close(shop)
    proof.record(
        "store gone",
        kind=kind,
        seconds=round(back - lost),
        ready_turned_after_s=round(turned, 1),
        ready_came_back_after_s=round(returned, 1),
    )


def _ask(shops: list[Shop], path: str) -> set[int]:
    """Give what the probes of processes that run say."""
    assert all(shop.runs for shop in shops), [shop.told for shop in shops]
    return {shop.ask(path) for shop in shops}


async def test_a_worker_whose_slots_are_all_overrun_leaves(url: str, tmp_path: Path) -> None:
    """It is not ready, and exits with 1 though its functions go on; another takes its place."""
    with ExitStack() as stack:
        street = Street(url, tmp_path, stack, blocks=True, concurrency=2, grace=60, max_attempts=3)
        (stuck,) = await street.open()
        async with producing(url) as queue:
            # One slot is left: nothing is wrong.
            await queue.enqueue({"seconds": 3600}, timeout=0.1)
            await until(lambda: "handler-overran" in stuck.told, "one overran")
            assert (stuck.ask("/readyz"), stuck.ask("/livez")) == (200, 200)
            await queue.enqueue({"seconds": 3600}, timeout=0.1)
            await until(lambda: not stuck.runs, "it leaves")
            assert stuck.process.returncode == 1, stuck.told
            assert "every slot is taken by a handler that goes on" in stuck.told
            assert "left behind, still running: jobsync-handler" in stuck.told
            await street.open()
            await queue.enqueue({"seconds": 0})
            await until_completed(queue, 1)
            # They failed by their timeout, once each, and wait for their next attempt.
            waiting = await queue.browse("waiting")
            assert [kept.attempts for kept in waiting] == [1, 1]
