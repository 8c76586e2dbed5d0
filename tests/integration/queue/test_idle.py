"""The statements of an idle worker."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy
from waiting import TIMEOUT

from jobsync import Database, Document, QueuePlugin
from jobsync.coordination.events import WorkerHeartbeat

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.25,
    "worker_timeout": 10.0,
    "skip_cold_start": True,
}
"""A short heartbeat, and a timeout that a busy machine does not reach."""
BEATS = 20
BUDGET = 3.0
"""Statements per heartbeat. By default there are 12 heartbeats a minute, so 45 statements."""


@contextmanager
def on_postgres(url: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """Return a URL of a server, and a count of the statements sent to it."""
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    with Proxy("127.0.0.1", port) as proxy:
        yield url.replace(f":{port}/", f":{proxy.port}/"), lambda: proxy.requests


@contextmanager
def on_sqlite(path: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """Return a file, and a count of the statements that this process sent to SQLite."""
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(statements.append)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", traced)
        yield f"sqlite:///{path}", lambda: len(statements)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_an_idle_worker_sends_only_heartbeats_and_liveness_checks(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Notifications of messages and elections cost nothing while there are none."""

    async def handle(_: Document) -> None:
        raise AssertionError("nothing was pushed")

    if kind == "sqlite":
        place = on_sqlite(tmp_path / "jobs.db")
    else:
        place = on_postgres(f"{request.getfixturevalue('postgres').url}?schema=idle")
    with place as (url, count):
        async with Database(url) as database:
            beaten = asyncio.Semaphore(0)
            queue = QueuePlugin(resource="tasks", on_message=handle, **QUICK)
            await database.use_plugin(queue)
            database.events.on(WorkerHeartbeat.name, lambda _: beaten.release())
            async with asyncio.timeout(TIMEOUT):
                while not queue.is_coordinator:
                    await beaten.acquire()
            # The work after an election is done by then.
            for _ in range(BEATS):
                await beaten.acquire()
            before = count()
            for _ in range(BEATS):
                await beaten.acquire()
            assert BEATS <= count() - before <= BUDGET * BEATS
