"""`jobsync work --processes`: several worker processes under one, which starts them again.

A process that fails is started again after a pause, unless none has ever worked: then the target or
the store is wrong, and all stop. One that ends without an error is not started again. SIGTERM and
SIGINT are passed on; the supervisor ends after the last process, with the exit code of the worst.

If the supervisor is killed, its processes notice it at once, and stop as after SIGTERM: each has
one end of a socket pair, whose other end closes with the supervisor.
"""

import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.retry import ExponentialBackoff
from jobsync.safe_text import format_error

__all__ = ["SAME_REQUEST", "ProcessSupervisor", "SupervisorLink"]

_log = logging.getLogger("jobsync.work")

_BACKOFF = ExponentialBackoff(first=0.5, longest=30.0, jitter=0.5)
_STABLE: Seconds = 60.0
"""A process that has run for so long begins again with the shortest pause."""
_EXTRA_TIME: Seconds = 4.0
"""Seconds beyond the grace period until processes that still run are killed."""
SAME_REQUEST: Seconds = 0.5
"""Signals within so long after the first are the same request to stop.

`timeout` signals a process and then its group; systemd signals the supervisor and its processes.
"""
_RUNNING = b"r"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNAL_EXIT = 128
"""Shells add it to the number of the signal that has ended a process."""

BuildCommand: TypeAlias = Callable[[int, int], Sequence[str]]
"""Takes the number of a process, from 0, and the descriptor of its link with the supervisor."""


class SupervisorLink:
    """The end of a worker process of the connection with its supervisor.

    Args:
        descriptor: of the socket that it was started with.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        # Programs that a handler starts must not inherit it.
        self._socket.set_inheritable(False)

    def report_running(self) -> None:
        """Report to the supervisor that this process works."""
        with suppress(OSError):
            self._socket.send(_RUNNING)

    def watch(self, on_end: Callable[[], object]) -> None:
        """Call a function, on a thread, when the supervisor has ended."""

        def wait() -> None:
            with suppress(OSError):
                self._socket.recv(1)
            on_end()

        threading.Thread(target=wait, name="jobsync-supervisor-link", daemon=True).start()


class _Child:
    """One of the processes, and its successors.

    Args:
        number: of the process, from 0.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.failures = 0
        """How often it has failed in a row."""
        self.start_at: Mono | None = None
        """When it is started, if it does not run."""
        self.started_at = Mono(0.0)
        self.process: subprocess.Popen[bytes] | None = None
        self.link: socket.socket | None = None

    def start(self, build_command: BuildCommand, now: Mono) -> None:
        """Start the process."""
        self.start_at, self.started_at = None, now
        ours, theirs = socket.socketpair()
        with ExitStack() as failed, theirs:
            failed.enter_context(ours)
            self.process = subprocess.Popen(  # noqa: S603 - this very command
                build_command(self.number, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Not ours: Ctrl-C on a terminal would reach it twice.
                process_group=0,
            )
            failed.pop_all()
        self.link = ours

    def take_end(self) -> tuple[int, bool] | None:
        """Return the exit code, and whether it has worked; None if it runs or was taken."""
        if self.process is None or self.link is None or self.process.poll() is None:
            return None
        code, self.process = self.process.returncode, None
        with self.link:
            return code, self.has_worked()

    def has_worked(self) -> bool:
        """Whether the process has reported that it works."""
        with suppress(OSError):
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return self.link is not None and self.link.recv(1, flags) == _RUNNING
        return False

    def send(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.process is not None:
            self.process.send_signal(number)


class ProcessSupervisor:
    """Starts worker processes, and starts them again when they fail.

    Args:
        build_command: returns the command of a process.
        count: how many processes.
        grace: seconds within which a process stops after a signal.
        components: the clock, and the randomness of pauses.
    """

    def __init__(
        self,
        build_command: BuildCommand,
        count: int,
        grace: Seconds,
        components: Components,
    ) -> None:
        self._build_command = build_command
        self._children = [_Child(number) for number in range(count)]
        self._grace = grace
        self._clock = components.clock
        self._randomness = components.randomness
        self._has_worked = False
        self._stop_since: Mono | None = None
        """When the first signal came; None if the processes are not to stop."""
        self._worst = 0

    def run(self) -> int:
        """Run until all processes have ended; return the exit code of the worst."""
        with _watch_signals() as wakeups:
            for child in self._children:
                self._start(child)
            try:
                while self._is_busy():
                    self._wait(wakeups)
                    for child in self._children:
                        self._check(child)
            finally:
                for child in self._children:
                    child.send(signal.SIGKILL)
        return self._worst

    @property
    def _kill_at(self) -> Mono | None:
        """When processes that still run are killed."""
        since = self._stop_since
        return None if since is None else since + self._grace + _EXTRA_TIME

    def _is_busy(self) -> bool:
        return any(child.process or child.start_at for child in self._children)

    def _wait(self, wakeups: socket.socket) -> None:
        """Wait for a signal, the end of a process, or the next moment to do something."""
        moments = [child.start_at for child in self._children if child.start_at is not None]
        moments += [] if self._kill_at is None else [self._kill_at]
        now = self._clock.mono()
        wakeups.settimeout(max(0.001, min(moments) - now) if moments else None)
        try:
            received = wakeups.recv(64)
        except TimeoutError:
            received = b""
        for number in received:
            if number in _SIGNALS:
                self._stop(number)

    def _stop(self, number: int) -> None:
        """Pass a signal on, unless it repeats the first, and start nothing any more."""
        now = self._clock.mono()
        if self._stop_since is None:
            self._stop_since = now
        elif now - self._stop_since < SAME_REQUEST:
            return
        _log.info("%s: stopping all processes", signal.Signals(number).name)
        for child in self._children:
            child.start_at = None
            # A second SIGTERM means the same as a second SIGINT.
            child.send(signal.SIGTERM)

    def _start(self, child: _Child) -> None:
        try:
            child.start(self._build_command, self._clock.mono())
        except OSError as error:
            if not self._has_worked:
                raise
            # The machine has no memory or no processes left for now: the others work on.
            self._start_later(child, f"cannot be started, {format_error(error)}")

    def _check(self, child: _Child) -> None:
        """Start a process that is due, kill one that does not stop, judge one that has ended."""
        now = self._clock.mono()
        kill_at = self._kill_at
        if kill_at is not None and now >= kill_at:
            child.send(signal.SIGKILL)
        if child.start_at is not None and now >= child.start_at:
            self._start(child)
        end = child.take_end()
        if end is not None:
            self._on_end(child, *end)

    def _on_end(self, child: _Child, code: int, has_worked: bool) -> None:  # noqa: FBT001 - a fact
        others = (each.has_worked() for each in self._children)
        self._has_worked = self._has_worked or has_worked or any(others)
        if self._stop_since is not None:
            # One that had not begun to listen to signals is ended by them.
            self._note(0 if -code in _SIGNALS else code)
        elif code == 0:
            _log.info("process %d has ended", child.number)
        elif not self._has_worked:
            _log.error("process %d %s before any has worked", child.number, _describe(code))
            self._note(code)
            self._stop(signal.SIGTERM)
        else:
            self._start_later(child, _describe(code))

    def _start_later(self, child: _Child, reason: str) -> None:
        now = self._clock.mono()
        child.failures = 1 if now - child.started_at >= _STABLE else child.failures + 1
        pause = _BACKOFF.draw(child.failures, self._randomness)
        child.start_at = now + pause
        _log.error("process %d %s: starting it again in %.1f s", child.number, reason, pause)

    def _note(self, code: int) -> None:
        self._worst = max(self._worst, code if code >= 0 else _SIGNAL_EXIT - code)


def _describe(code: int) -> str:
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            # Most real-time signals have no name.
            return f"was ended by signal {-code}"
    return f"has failed with exit code {code}"


@contextmanager
def _watch_signals() -> Iterator[socket.socket]:
    """Receive the numbers of signals, and wakeups when a process has ended."""
    received, sent = socket.socketpair()
    sent.setblocking(False)
    numbers = (*_SIGNALS, signal.SIGCHLD)
    with received, sent:
        # Without handlers the signals would have their usual effects.
        former = {number: signal.signal(number, lambda *_: None) for number in numbers}
        former_descriptor = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
        try:
            yield received
        finally:
            signal.set_wakeup_fd(former_descriptor)
            for number, handler in former.items():
                signal.signal(number, handler)
