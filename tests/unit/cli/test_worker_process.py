"""What a process of `jobsync work` says while it works and stops."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from waiting import until

from jobsync import Components, CoordinatorPlugin, Database, QueuePlugin
from jobsync.cli import worker_process
from jobsync.cli.health import HealthState
from jobsync.cli.process_supervisor import ProcessSupervisor, SupervisorLink, _watch_signals
from jobsync.cli.worker_process import Watchdog, WorkerProcess
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


def supervise(
    monkeypatch: pytest.MonkeyPatch, clock: SteppedClock, sent: list[int]
) -> ProcessSupervisor:
    """Return a supervisor of one process, to which it sends signals."""
    components = msgspec.structs.replace(Components.system(), clock=clock)
    supervisor = ProcessSupervisor(lambda *_: [], 1, 30.0, components)
    monkeypatch.setattr(supervisor._children[0], "send", sent.append)
    return supervisor


def test_a_supervisor_passes_signals_within_half_a_second_on_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later one is passed on too, so that its processes end at once."""
    clock, sent = SteppedClock(), list[int]()
    supervisor = supervise(monkeypatch, clock, sent)
    supervisor._stop(signal.SIGTERM)
    clock.now += 0.49
    supervisor._stop(signal.SIGINT)
    assert sent == [signal.SIGTERM]
    clock.now += 0.01
    supervisor._stop(signal.SIGINT)
    assert sent == [signal.SIGTERM] * 2


def test_a_supervisor_kills_only_after_its_processes_had_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end by themselves 1.8 seconds after the grace period, whatever keeps them."""
    clock, sent = SteppedClock(), list[int]()
    supervisor = supervise(monkeypatch, clock, sent)
    (child,) = supervisor._children
    clock.now += 1000
    supervisor._check(child)
    supervisor._stop(signal.SIGTERM)
    clock.now += 30 + worker_process._EXTRA_TIME + 1
    supervisor._check(child)
    assert sent == [signal.SIGTERM]
    clock.now += 2
    supervisor._check(child)
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_a_supervisor_that_fails_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of them: they would work on without it."""
    supervisor = ProcessSupervisor(lambda *_: [], 3, 30.0, Components.system())
    killed: list[tuple[int, int]] = []
    for child in supervisor._children:
        monkeypatch.setattr(child, "start", lambda *_: None)
        monkeypatch.setattr(
            child, "send", lambda signal, number=child.number: killed.append((number, signal))
        )

    def fail() -> bool:
        raise MemoryError

    monkeypatch.setattr(supervisor, "_is_busy", fail)
    with pytest.raises(MemoryError):
        supervisor.run()
    assert killed == [(number, signal.SIGKILL) for number in range(3)]


def test_programs_that_a_handler_starts_do_not_get_the_link() -> None:
    """They would keep it open; the supervisor hears of the process itself."""
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    link = SupervisorLink(theirs.detach())
    assert not link._socket.get_inheritable()
    link.report_running()
    assert ours.recv(8) == b"r"
    has_ended = threading.Event()
    link.watch(has_ended.set)
    ours.close()
    has_ended.wait()
    # Nobody listens any more, which is no error.
    link.report_running()
    link._socket.close()


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A process that does not run, with a grace period of 30 seconds."""
    components = msgspec.structs.replace(Components.system(), clock=SteppedClock())
    database = Database("memory://", components=components)
    process = WorkerProcess(database, HealthState(components.clock, list), grace=30)
    yield process
    process._watchdog._received.close()
    process._watchdog._sent.close()


@pytest.mark.parametrize(
    ("passed", "within"), [(None, 30.0), (0.0, 30.0), (12.0, 18.0), (30.0, 0.0), (45.0, 0.0)]
)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("failure", ["", "a bug"])
async def test_the_grace_period_begins_with_the_signal(
    process: WorkerProcess,
    monkeypatch: pytest.MonkeyPatch,
    passed: float | None,
    within: float,
    is_late: bool,
    failure: str,
) -> None:
    """What has passed since is not given again; late or failed work is a failure."""
    periods: list[float] = []

    async def disconnect(*, within: float) -> None:
        periods.append(within)

    monkeypatch.setattr(process._database, "disconnect", disconnect)
    if passed is not None:
        process._stop_since = Mono(process._clock.mono().seconds - passed)
    process._is_late, process._health.failure = is_late, failure
    assert await process._disconnect() == (1 if is_late or failure else 0)
    assert periods == [within]


@pytest.mark.parametrize("end", ["cancelled", "failed", "done"])
async def test_heartbeats_that_fail_stop_the_process(process: WorkerProcess, end: str) -> None:
    """Those that are cancelled or done have not failed."""

    async def send() -> None:
        if end == "cancelled":
            await asyncio.Event().wait()
        if end == "failed":
            raise OSError("disk full")

    heartbeats = asyncio.create_task(send())
    await asyncio.sleep(0)
    if end == "cancelled":
        heartbeats.cancel()
    await asyncio.wait({heartbeats})
    process._on_heartbeats_ended(heartbeats)
    assert process._stopping.is_set() is (end == "failed")
    assert process._health.failure == ("OSError: disk full" if end == "failed" else "")


async def test_a_process_that_is_stuck_gives_up_once(
    process: WorkerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is stuck while it stops is told by the stop, not by more failures."""
    stuck = iter([[], ["a handler"], ["a handler", "another"], []])
    beats: list[float] = []

    async def sleep(seconds: float) -> None:
        beats.append(seconds)
        if len(beats) == 4:
            raise TimeoutError

    monkeypatch.setattr(process._clock, "sleep", sleep)
    monkeypatch.setattr(process._database, "stuck", lambda: next(stuck))
    with pytest.raises(TimeoutError):
        await process._send_heartbeats()
    assert beats == [1.0] * 4
    assert process._health.failure == "a handler"
    assert [record.getMessage() for record in caplog.records] == [
        "a handler: stopping, so that a new process can take over"
    ]


async def test_what_a_stop_waits_for_is_said_again_and_again(
    process: WorkerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After 1, 2, 4 and 8 more seconds, and nothing if nothing runs."""
    caplog.set_level(logging.INFO, logger="jobsync.work")
    pauses: list[float] = []
    plugin = CoordinatorPlugin()
    running = [["a"], [], ["a", "b"]]

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > len(running):
            raise TimeoutError

    monkeypatch.setattr(process._clock, "sleep", sleep)
    monkeypatch.setattr(plugin, "list_running", lambda: running[len(pauses) - 1])
    monkeypatch.setattr(process, "_database", SimpleNamespace(plugins={"one": plugin}))
    with pytest.raises(TimeoutError):
        await process._log_wait()
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert [record.getMessage() for record in caplog.records] == [
        "still waiting for a",
        "still waiting for a; b",
    ]


def test_the_first_end_of_a_countdown_counts(process: WorkerProcess) -> None:
    """A process that stops by itself and is then told to has no more time than before."""
    clock = process._clock
    assert isinstance(clock, SteppedClock)
    process._stop()
    end = process._watchdog._end
    assert end == clock.mono() + 31.8
    clock.now += 10
    process._on_supervisor_ended()
    process._stop()
    assert process._watchdog._end == end


def test_signals_are_handled_as_before_after_the_watch() -> None:
    """Of each kind, and with the descriptor that they wake."""
    is_over = threading.Event()
    watchdog = Watchdog(SystemClock(), str, is_over.set)
    numbers = (signal.SIGTERM, signal.SIGINT)
    own = {number: signal.getsignal(number) for number in numbers}
    received, sent = socket.socketpair()
    sent.setblocking(False)
    former = signal.set_wakeup_fd(sent.fileno())
    try:
        with watchdog.watch():
            assert all(signal.getsignal(number) != own[number] for number in numbers)
            assert signal.set_wakeup_fd(-1) == watchdog._sent.fileno()
        assert {number: signal.getsignal(number) for number in numbers} == own
        assert signal.set_wakeup_fd(-1) == sent.fileno()
    finally:
        signal.set_wakeup_fd(former)
        watchdog.start_countdown(0)
        is_over.wait()
        for each in (received, sent, watchdog._received, watchdog._sent):
            each.close()


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


_MANY_SIGNALS = 2000
"""A socket keeps some hundred."""


def test_a_supervisor_drops_more_signals_than_are_kept_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As of processes that all end at once, while it starts others; one is enough."""
    with _watch_signals() as received:
        for _ in range(_MANY_SIGNALS):
            signal.raise_signal(signal.SIGCHLD)
        assert received.recv(1) == bytes([signal.SIGCHLD])
    assert capfd.readouterr().err == ""


def test_a_worker_drops_more_signals_than_are_kept_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As while the thread that reads them waits for a log that is blocked; one is enough."""
    is_read, may_go_on, is_over = threading.Event(), threading.Event(), threading.Event()

    def block(_: str) -> None:
        is_read.set()
        may_go_on.wait()

    watchdog = Watchdog(SystemClock(), block, is_over.set)
    with watchdog.watch():
        signal.raise_signal(signal.SIGTERM)
        is_read.wait()
        for _ in range(_MANY_SIGNALS):
            signal.raise_signal(signal.SIGTERM)
        # The thread ends before its sockets are closed.
        watchdog._end = watchdog._clock.mono()
        may_go_on.set()
        is_over.wait()
    for each in (watchdog._received, watchdog._sent):
        each.close()
    assert capfd.readouterr().err == ""
