"""Base class of test servers: processes in a temporary folder, and nothing is left of either.

A server that has started is ready: it answered a real request. `stop` ends only what `start` began.
When the test process dies without stopping, the kernel ends the servers (with Linux's `setpriv`),
and the next server to start, in any process, removes the folder they leave.
"""

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

__all__ = ["Server", "ServerFailed", "find_program", "free_ports", "run"]

HOST = "127.0.0.1"

_FOLDER = "jobsync-server-"
_LEFTOVERS = "leftovers"
_POLL = 0.02
_TIMEOUT = 60.0
_LAST_LINES = 30


_reservations: list[socket.socket] = []
"""Of the ports that servers of this process use, or have used."""


class ServerFailed(Exception):
    """A server cannot be started or used like this; the message says what to do, or its log."""


class Server(ABC):
    """A server that runs between `start` and `stop`, and may be started again.

    The kernel ends it with the *thread* that started it, so start it from one that lives
    as long as the tests do.
    """

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._temporary: Path | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        """Everything that this server writes."""
        if self._temporary is None:
            raise ServerFailed(f"{type(self).__name__} is not running: start it first")
        return self._temporary

    def start(self) -> Self:
        """Start, and return when it answers.

        Raises:
            ServerFailed: it does not; with the end of its log.
        """
        if self._temporary is not None:
            raise ServerFailed(f"{type(self).__name__} is running: stop it first")
        _remove_leftovers()
        self._temporary = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        atexit.register(self.stop)
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the processes and remove the folder. May be called again."""
        # In reverse: a daemon that lost its master waits for it before it ends.
        for name in reversed(list(self._children)):
            self._end(name)
        if self._temporary is not None:
            _remove(self._temporary)
            self._temporary = None
        atexit.unregister(self.stop)

    @abstractmethod
    def _launch(self) -> None:
        """Start the processes, and wait until they answer."""

    def _record_leftovers(self, patterns: Sequence[str]) -> None:
        """Record files that the server leaves outside its folder; they are removed with it."""
        (self.folder / _LEFTOVERS).write_text("\n".join(patterns))

    def _spawn(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        user: str = "",
        env: Mapping[str, str] | None = None,
        end_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Run a command in the background until `_end`, which sends `end_signal`."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                # In this order: the kernel forgets the parent-death signal when the user changes.
                [*as_user(user), *_end_with_parent(end_signal), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env={**os.environ, **(env or {})},
                # ^C in a terminal is for the tests; they stop their servers in order.
                start_new_session=True,
            )
        self._children[name] = _Child(process, log, end_signal)

    def _end(self, name: str, sign: signal.Signals | None = None) -> None:
        """End a process, by SIGKILL if its own signal does not."""
        child = self._children.pop(name)
        child.process.send_signal(sign or child.end_signal)
        try:
            child.process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()

    def _wait_until(self, call: Callable[[], object], expected: type[Exception]) -> None:
        """Call until it no longer raises `expected`, a process has ended, or time is up."""
        deadline = time.monotonic() + _TIMEOUT
        while True:
            ended = [name for name, c in self._children.items() if c.process.poll() is not None]
            try:
                if not ended:
                    call()
                    return
            except expected as error:
                if time.monotonic() > deadline:
                    raise ServerFailed(self._describe("does not answer")) from error
            if ended:
                raise ServerFailed(self._describe(f"{', '.join(ended)} ended while starting"))
            time.sleep(_POLL)

    def _describe(self, problem: str) -> str:
        tails = [f"{c.log.name}:\n{read_tail(c.log)}" for c in self._children.values()]
        return "\n".join([f"{type(self).__name__}: {problem}", *tails])


class _Child:
    """A process in the background, and how to end it."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, end_signal: signal.Signals
    ) -> None:
        self.process = process
        self.log = log
        self.end_signal = end_signal


def free_ports(count: int) -> list[int]:
    """Return different ports on which nobody listens, and which no other test process gets.

    Below the range that the kernel uses for outgoing connections: one of those could take the
    port before the server does.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 32_768)
        reservation = socket.socket(socket.AF_UNIX)
        try:
            # Found: two test processes chose one port before either server listened on it. A name
            # without a file: it is free again when this process has ended.
            reservation.bind(f"\0jobsync-test-port-{port}")
            with socket.socket() as candidate:
                candidate.bind((HOST, port))
        except OSError:
            reservation.close()
        else:
            _reservations.append(reservation)
            ports.append(port)
    return ports


def find_program(name: str, folder: Path | None, fix: str) -> Path:
    """Find a program in a folder or on the path; `fix` says how to install it."""
    found = shutil.which(name, path=folder) or shutil.which(name)
    # Debian keeps daemons where the path of a user who is not root does not look.
    found = found or shutil.which(name, path="/usr/sbin")
    if found is None:
        raise ServerFailed(f"{name} is missing: {fix}")
    return Path(found)


def run(command: Sequence[str | Path], *, user: str = "", input: str = "") -> str:
    """Run a command to its end; return what it printed.

    Raises:
        ServerFailed: it failed; with what it printed.
    """
    done = subprocess.run(
        [*as_user(user), *command],
        input=input,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    if done.returncode:
        output = f"{done.stdout}{done.stderr}".strip()
        raise ServerFailed(f"{Path(command[0]).name} failed with {done.returncode}: {output}")
    return done.stdout


def as_user(user: str) -> list[str]:
    """Return a command prefix that runs a command as a user, '' for the current one."""
    if not user:
        return []
    group = str(pwd.getpwnam(user).pw_gid)
    setpriv = find_program("setpriv", None, "apt-get install util-linux")
    return [str(setpriv), f"--reuid={user}", f"--regid={group}", "--clear-groups"]


def read_tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (empty)"


def _end_with_parent(sign: signal.Signals) -> list[str]:
    """Return a command prefix that ends the command when the test process dies."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", sign.name.removeprefix("SIG")] if setpriv else []


def _remove(folder: Path) -> None:
    leftovers = folder / _LEFTOVERS
    for pattern in leftovers.read_text().splitlines() if leftovers.exists() else ():
        for left in Path("/").glob(pattern.lstrip("/")):
            left.unlink(missing_ok=True)
    shutil.rmtree(folder)


def _remove_leftovers() -> None:
    """Remove the folders of test processes that died without stopping their servers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            # Another process may be removing it, too, or it belongs to another user.
            with contextlib.suppress(OSError):
                _remove(folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
