"""What a process of `jobsync work` says while it works and stops."""

import asyncio
import logging
import signal
import threading

import msgspec
import pytest
from waiting import until

from jobsync import Components, Database, QueuePlugin
from jobsync.cli import worker_process
from jobsync.cli.health import HealthState
from jobsync.cli.process_supervisor import ProcessSupervisor
from jobsync.cli.worker_process import WorkerProcess
from jobsync.coordination.events import StoreSilent, WorkerHeartbeat
from jobsync.core.clock import Mono, SystemClock


class SteppedClock(SystemClock):
    """The machine's clocks, with monotonic time that a test sets."""

    now = Mono(100.0)

    def mono(self) -> Mono:
        return self.now


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


def test_an_outage_counts_from_its_first_sign(caplog: pytest.LogCaptureFixture) -> None:
    """However often the store is silent meanwhile; each outage counts by itself."""
    caplog.set_level(logging.INFO, logger="jobsync.work")
    clock = SteppedClock()
    components = msgspec.structs.replace(Components.system(), clock=clock)
    database = Database("memory://", components=components)
    process = WorkerProcess(database, HealthState(clock, list), grace=30)
    silent = StoreSilent(worker_id="w", reason="refused")
    heartbeat = WorkerHeartbeat(worker_id="w", timestamp=1.0)
    # Pauses before each sign of an outage, and before the heartbeat that ends it.
    for pauses, told in (([0, 5, 7, 3], 15), ([90, 2], 2), ([9, 1, 1], 2), ([4], None)):
        *signs, last = pauses
        caplog.clear()
        for pause in signs:
            clock.now += pause
            process._on_outage(silent)
        clock.now += last
        process._on_heartbeat(heartbeat)
        process._on_heartbeat(heartbeat)
        assert [record.getMessage() for record in caplog.records] == (
            [] if told is None else [f"the store answers again, after {told:.1f} s"]
        )
    process._watchdog._received.close()
    process._watchdog._sent.close()


@pytest.mark.parametrize("first", ["SIGTERM", "the supervisor has ended"])
def test_signals_within_half_a_second_are_one_request(first: str) -> None:
    """Of any kind: `timeout` signals a process and its group. A later one ends the process."""
    clock = SteppedClock()
    components = msgspec.structs.replace(Components.system(), clock=clock)
    database = Database("memory://", components=components)
    ended: list[int] = []
    process = WorkerProcess(database, HealthState(clock, list), grace=30, exit_now=ended.append)
    if first == "SIGTERM":
        process._on_signal(first)
    else:
        process._on_supervisor_ended()
    process._on_signal("SIGTERM")
    clock.now += 0.49
    process._on_signal("SIGINT")
    assert not ended
    clock.now += 0.01
    process._on_signal("SIGTERM")
    assert ended == [1]
    process._watchdog._received.close()
    process._watchdog._sent.close()


def test_a_supervisor_passes_signals_within_half_a_second_on_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later one is passed on too, so that its processes end at once."""
    clock = SteppedClock()
    components = msgspec.structs.replace(Components.system(), clock=clock)
    supervisor = ProcessSupervisor(lambda *_: [], 1, 30.0, components)
    (child,) = supervisor._children
    sent: list[int] = []
    monkeypatch.setattr(child, "send", sent.append)
    supervisor._stop(signal.SIGTERM)
    clock.now += 0.49
    supervisor._stop(signal.SIGINT)
    assert sent == [signal.SIGTERM]
    clock.now += 0.01
    supervisor._stop(signal.SIGINT)
    assert sent == [signal.SIGTERM] * 2


def test_the_last_line_is_written_although_the_log_is_blocked(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it was lost if the log took more than a moment. A process that goes on logs later."""
    may_log = threading.Event()

    class BlockedLog:
        def log(self, *_: object) -> None:
            may_log.wait()

    monkeypatch.setattr(worker_process, "_log", BlockedLog())
    monkeypatch.setattr(worker_process, "_LOG_TIME", 0.001)
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        worker_process._log_briefly(level, f"at {level}")
    may_log.set()
    assert capfd.readouterr().err == "jobsync: at 30\njobsync: at 40\n"
