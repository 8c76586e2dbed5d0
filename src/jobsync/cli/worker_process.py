"""The process of `jobsync work`: runs a database until a signal.

The first signal lets running work finish, within the grace period. Signals in the half second after
it are the same request. A later one ends the process at once, which has the effect of a crash:
others take over after a timeout. If only a new process can continue the work, the process stops by
itself.

Signals are received by a thread, so that a blocked event loop cannot delay them. The same thread
ends the process if it still runs 1.8 seconds after the grace period, whatever keeps it.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from jobsync.cli.health import PERIOD, HealthState, write_heartbeat
from jobsync.cli.options import FAILED
from jobsync.cli.process_supervisor import SAME_REQUEST, SupervisorLink
from jobsync.core.clock import Clock, Mono
from jobsync.database.database import Database
from jobsync.events import Event
from jobsync.safe_text import format_error

__all__ = ["WorkerProcess"]

_log = logging.getLogger("jobsync.work")
_EXTRA_TIME = 1.8
"""Seconds after the grace period until the process is ended."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PATIENCE = 1.0
"""Seconds after which it is said what a stop waits for; again after twice as long, and so on."""
_LOG_TIME = 0.1
"""Seconds for the last line of the log, which something else may block."""
_STDERR = 2


class WorkerProcess:
    """Runs a database with its plugins until a signal arrives or it fails.

    Args:
        database: the database to connect.
        health: updated while the event loop runs.
        grace: seconds within which everything must finish after a signal.
        heartbeat_file: the file to write once per second, if any.
        link: with the supervisor of this process, if it has one.
        exit_now: ends the process immediately.
    """

    def __init__(
        self,
        database: Database,
        health: HealthState,
        *,
        grace: float,
        heartbeat_file: Path | None = None,
        link: SupervisorLink | None = None,
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        self._link = link
        self._database = database
        self._clock = database.components.clock
        self._health = health
        self._grace = grace
        self._heartbeat_file = heartbeat_file
        self._exit_now = exit_now
        self._stopping = asyncio.Event()
        self._watchdog = Watchdog(self._clock, self._on_signal, self._on_time_over)
        self._stop_since: Mono | None = None
        """When the first signal came, or the supervisor ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._silent_since: Mono | None = None
        """Since when the store does not answer, if it does not."""
        self._is_late = False
        """Whether work did not end within the grace period."""
        self._is_left_behind = False
        """Whether work still runs."""

    async def run(self) -> int:
        """Run until the process has to stop; return the exit code."""
        self._loop = asyncio.get_running_loop()
        self._database.on("db:failed", self._on_failure)
        self._database.on("coord:store-silent", self._on_outage)
        self._database.on("coord:worker-heartbeat", self._on_heartbeat)
        self._database.on("db:disconnected", lambda _: self._stop())
        self._database.on("db:disconnect-incomplete", self._on_incomplete)
        heartbeats = asyncio.create_task(self._send_heartbeats())
        heartbeats.add_done_callback(self._on_heartbeats_ended)
        try:
            await self._connect()
            await self._stopping.wait()
            return await self._disconnect()
        except Exception as error:
            if self._is_left_behind:
                # The process ends below, before anybody else can report it.
                _log.error("%s", format_error(error))
            raise
        finally:
            heartbeats.cancel()
            if self._is_left_behind:
                # The end of the event loop would wait for what runs on.
                self._end(FAILED)

    @contextmanager
    def watch_signals(self) -> Iterator[None]:
        """Receive signals during the block. Must be called on the main thread."""
        with self._watchdog.watch():
            if self._link is not None:
                self._link.watch(self._on_supervisor_ended)
            yield

    def _end(self, status: int) -> None:
        logging.shutdown()
        sys.stdout.flush()
        self._exit_now(status)

    async def _connect(self) -> None:
        """Connect, unless a signal arrives first."""
        connecting = asyncio.create_task(self._database.connect())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not connecting.done():
            connecting.cancel()
            await asyncio.wait({connecting})
        elif connecting.exception() is None:
            _log.info("worker running")
            if self._link is not None:
                self._link.report_running()
        else:
            connecting.result()

    async def _disconnect(self) -> int:
        """Disconnect, and wait for running work within the grace period; return the exit code."""
        waiting = asyncio.create_task(self._log_wait())
        # The loop may have been blocked since the signal.
        since = self._stop_since
        passed = 0.0 if since is None else self._clock.mono() - since
        try:
            await self._database.disconnect(within=max(0.0, self._grace - passed))
        finally:
            waiting.cancel()
        if self._is_late:
            _log.error("work did not end by itself (grace: %g s)", self._grace)
        if self._is_late or self._health.failure:
            return FAILED
        _log.info("stopped")
        return 0

    async def _log_wait(self) -> None:
        """Log what a stop waits for, as long as it does."""
        pause = _PATIENCE
        while True:
            await self._clock.sleep(pause)
            plugins = [self._database.plugins[name] for name in self._database.plugins]
            if running := [text for plugin in plugins for text in plugin.list_running()]:
                _log.info("still waiting for %s", "; ".join(running))
            pause *= 2

    def _on_outage(self, _: Event) -> None:
        self._silent_since = self._silent_since or self._clock.mono()

    def _on_heartbeat(self, _: Event) -> None:
        """Log that the store answers again after an outage. Called at every heartbeat."""
        since, self._silent_since = self._silent_since, None
        if since is not None:
            _log.info("the store answers again, after %.1f s", self._clock.mono() - since)

    def _on_signal(self, name: str) -> None:
        """Stop, or end the process at the second signal. Called by the watchdog's thread."""
        since = self._stop_since
        if since is not None:
            if self._clock.mono() - since < SAME_REQUEST:
                return
            _log_briefly(logging.WARNING, f"{name} again: exiting immediately")
            self._exit_now(FAILED)
            return
        self._stop_in_time(name)

    def _on_supervisor_ended(self) -> None:
        """Stop, unless that has begun. Called on the thread of the link."""
        if self._stop_since is None:
            self._stop_in_time("the supervisor has ended")

    def _stop_in_time(self, reason: str) -> None:
        self._stop_since = self._clock.mono()
        _log_briefly(logging.INFO, f"{reason}: stopping, within {self._grace:g} s")
        self._watchdog.start_countdown(self._grace + _EXTRA_TIME)
        # Before the loop runs and after it has ended there is nothing to stop.
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._stopping.set)

    def _on_time_over(self) -> None:
        """End the process, whatever keeps it. Called by the watchdog's thread."""
        text = f"the process was still running after {self._grace:g} s of grace: exiting"
        _log_briefly(logging.ERROR, text)
        self._exit_now(FAILED)

    def _on_failure(self, event: object) -> None:
        self._health.failure = str(getattr(event, "error", event))
        self._stop()

    def _on_heartbeats_ended(self, heartbeats: asyncio.Task[None]) -> None:
        """Stop if the heartbeats have failed: nobody would know whether this process works."""
        if not heartbeats.cancelled() and (error := heartbeats.exception()) is not None:
            self._give_up([format_error(error)])

    def _on_incomplete(self, event: Event) -> None:
        self._is_late = True
        self._is_left_behind = bool(event["running"])

    def _give_up(self, reasons: list[str]) -> None:
        """Stop, because only a new process can continue the work."""
        self._health.failure = "; ".join(reasons)
        _log.error("%s: stopping, so that a new process can take over", self._health.failure)
        self._stop()

    def _stop(self) -> None:
        self._watchdog.start_countdown(self._grace + _EXTRA_TIME)
        self._stopping.set()

    async def _send_heartbeats(self) -> None:
        while True:
            self._health.mark_alive()
            stuck = self._database.stuck()
            if stuck and not self._stopping.is_set():
                self._give_up(stuck)
            if self._heartbeat_file is not None:
                report = self._health.ready()
                write_heartbeat(self._heartbeat_file, report, self._clock.wall())
            await self._clock.sleep(PERIOD)


class Watchdog:
    """A thread that receives SIGTERM and SIGINT, and knows when the time to stop is over.

    Python calls signal handlers on the main thread, between two instructions: too late if that
    thread is inside a blocking call. The wake-up descriptor is written to by the signal itself.

    Args:
        clock: this machine's clock.
        on_signal: called with the name of each signal, on the thread.
        on_time_over: called when the countdown has ended, on the thread.
    """

    def __init__(
        self, clock: Clock, on_signal: Callable[[str], object], on_time_over: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._on_signal = on_signal
        self._on_time_over = on_time_over
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        self._former_descriptor = -1
        self._end: Mono | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Receive signals during the block; the thread itself runs until the process ends."""
        threading.Thread(target=self._run, name="jobsync-watchdog", daemon=True).start()
        former = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        descriptor = self._sent.fileno()
        self._former_descriptor = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(self._former_descriptor)
            for number, handler in former.items():
                signal.signal(number, handler)

    def start_countdown(self, seconds: float) -> None:
        """Call `on_time_over` after this many seconds. The first call counts."""
        if self._end is None:
            self._end = self._clock.mono() + seconds
            # Wakes the thread.
            self._sent.send(b"\0")

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on if an event loop has replaced the wake-up descriptor."""
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        if current != self._sent.fileno():
            self._sent.send(bytes([number]))

    def _run(self) -> None:
        while True:
            end = self._end
            self._received.settimeout(None if end is None else max(0.001, end - self._clock.mono()))
            try:
                received = self._received.recv(64)
            except TimeoutError:
                self._on_time_over()
                return
            for number in received:
                if number in _SIGNALS:
                    self._on_signal(signal.Signals(number).name)
                elif number and self._former_descriptor >= 0:
                    # An event loop's: it serves the signals that the user's code handles.
                    os.write(self._former_descriptor, bytes([number]))


def _log_briefly(level: int, text: str) -> None:
    """Log, but do not wait long: the main thread may be blocked while it holds the log's lock.

    Then what is said before an exit is written without the log.
    """
    thread = threading.Thread(target=_log.log, args=(level, text), daemon=True)
    thread.start()
    thread.join(_LOG_TIME)
    if thread.is_alive() and level > logging.INFO:
        with suppress(OSError):
            os.write(_STDERR, f"jobsync: {text}\n".encode())
