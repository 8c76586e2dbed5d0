"""What a process of `jobsync work` says while it works and stops."""

import asyncio
import logging

import pytest
from waiting import until

from jobsync import Database, QueuePlugin
from jobsync.cli import worker_process
from jobsync.cli.health import HealthState
from jobsync.cli.worker_process import WorkerProcess
from jobsync.coordination.events import StoreSilent, WorkerHeartbeat


async def test_an_outage_that_ends_and_a_stop_that_waits_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each outage, and with the handlers that the stop waits for."""
    monkeypatch.setattr(worker_process, "_PATIENCE", 0.001)
    caplog.set_level(logging.INFO, logger="jobsync.work")
    started, finish = asyncio.Event(), asyncio.Event()

    async def handle(_: object) -> None:
        started.set()
        await finish.wait()

    queue = QueuePlugin("emails", on_message=handle)
    database = Database("memory://", plugins=[queue])
    process = WorkerProcess(database, HealthState(database.components.clock, list), grace=30)

    def count(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    running = asyncio.create_task(process.run())
    await until(lambda: count("worker running"), "it works")
    heartbeat = WorkerHeartbeat(worker_id="w", timestamp=1.0)
    database.events.emit(heartbeat)
    assert not count("the store answers again")
    for _ in range(2):
        database.events.emit(StoreSilent(worker_id="w", reason="refused"))
    database.events.emit(heartbeat)
    database.events.emit(heartbeat)
    assert count("the store answers again, after 0.") == 1
    name = await queue.enqueue({})
    await started.wait()
    database.events.emit(
        StoreSilent(worker_id="w", reason="a later outage, which the stop does not wait for")
    )
    process._stop()
    await until(lambda: count(f"still waiting for the handler of message {name}"), "it says so")
    finish.set()
    assert await running == 0
    # Otherwise the process ends with them.
    process._watchdog._received.close()
    process._watchdog._sent.close()
