"""How many connections to PostgreSQL a worker process needs."""

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
import servers
from waiting import until

from jobsync import Database, Document, Job, QueuePlugin, SchedulerPlugin, Task, TTLPlugin
from jobsync.stores.postgres import pool

PROMISED = 4
"""Connections of a worker process, as docs/how-to/prepare-a-store.md says."""

MESSAGES = 300

_numbers = itertools.count()


class Census:
    """Counts the connections to a database, as often as possible, on a thread."""

    def __init__(self, url: str) -> None:
        self.most = 0
        self.current = 0
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._is_over.wait(0.002):
                others = list_others(connection)
                self.current = len(others)
                # The server keeps that of a cancelled statement a little longer than its client.
                self.most = max(self.most, len(list_open_ports().intersection(others)))


def list_others(connection: psycopg.Connection[Any]) -> list[int]:
    """Return the ports of the other clients' connections to the same database."""
    rows = connection.execute(
        "SELECT client_port FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    ).fetchall()
    return [port for (port,) in rows]


def list_open_ports() -> set[int]:
    """Return the local ports of all connections that neither end has closed."""
    lines = Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    fields = map(str.split, lines)
    return {int(local.split(":")[1], 16) for _, local, _, state, *_ in fields if state == "01"}


@pytest.fixture
def url(postgres: servers.PostgresServer) -> Iterator[str]:
    """An empty database."""
    name = f"connections_{os.getpid()}_{next(_numbers)}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture(autouse=True)
def _no_statement_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any statement may take two seconds, and then others get a connection."""
    monkeypatch.setattr(pool, "_CHECK_INTERVAL", 600.0)


def list_threads() -> set[str]:
    """Return the names of jobsync's own threads."""
    return {each.name for each in threading.enumerate() if each.name.startswith("jobsync")}


@pytest.mark.parametrize("queues", [1, 2, 4])
async def test_a_worker_has_at_most_four(url: str, queues: int) -> None:
    """However many queues it has, from its first connect, under load; none is left at the end."""
    seen, threads = 0, list_threads()

    async def handle(_: Document) -> None:
        nonlocal seen
        await asyncio.sleep(0.001)
        seen += 1

    with Census(url) as census:
        async with Database(url) as database:
            plugins = [
                await database.use_plugin(QueuePlugin(resource=f"tasks-{n}", concurrency=10))
                for n in range(queues)
            ]
            for plugin in plugins:
                plugin.handler(handle)
            pushes = (
                plugin.enqueue_many([{"n": n} for _ in range(10)])
                for plugin in plugins
                for n in range(MESSAGES // 10)
            )
            await asyncio.gather(*pushes)
            await until(lambda: seen == queues * MESSAGES, "all are handled")
        await until(lambda: census.current == 0, "all connections are closed")
    assert census.most <= PROMISED
    assert list_threads() <= threads


async def test_schedules_and_expiry_need_no_more(url: str) -> None:
    """The coordinator's work shares the connections of the queue."""
    fired = asyncio.Event()

    async def fire() -> None:
        fired.set()

    with Census(url) as census:
        async with Database(url) as database:
            await database.create_resource(name="things", attributes={"name": "string"})
            await database.use_plugin(QueuePlugin(resource="tasks", on_message=lambda _: None))
            await database.use_plugin(TTLPlugin(resources={"things": {"ttl": 1}}))
            jobs = {"each-second": {"schedule": "* * * * * *", "action": fire}}
            await database.use_plugin(SchedulerPlugin(jobs=jobs))
            things = database.resources.things
            await asyncio.gather(*(things.insert({"name": f"{n}"}) for n in range(50)))
            async with asyncio.timeout(30):
                await fired.wait()
    assert census.most <= PROMISED


def test_a_job_has_at_most_four(url: str) -> None:
    """The connection of the user's own SQL comes on top of them."""
    with Census(url) as census, Job("node", url=url, wait_on_enter=10) as job:
        for number in range(20):
            job.add_task(Task(number))
        with psycopg.connect(url, autocommit=True) as admin:
            before = list_others(admin)
            job.connection.execute("SELECT 1")
            assert len(list_others(admin)) == len(before) + 1
    # Without the one that counts, and at most with the admin's and the user's.
    assert len(before) - 1 <= PROMISED
    assert census.most <= PROMISED + 2
