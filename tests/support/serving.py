"""One test server: a temporary folder, its processes, and nothing left of either.

A server that has started is ready: it answered a real request. `stop` ends only what
`start` began. When the test process dies without stopping, the kernel ends the servers
(with Linux's `setpriv`), and the next server to start, in whatever process, removes the
folder they leave.
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
_LITTER = "litter"
_POLL = 0.02
_PATIENCE = 60.0
_LAST_LINES = 30


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
        _sweep()
        self._temporary = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        atexit.register(self.stop)
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the processes and remove the folder. Safe to repeat."""
        # In reverse: a daemon that lost its master waits for it before it ends.
        for name in reversed(list(self._children)):
            self._end(name)
        if self._temporary is not None:
            _remove(self._temporary)
            self._temporary = None
        atexit.unregister(self.stop)

    @abstractmethod
    def _launch(self) -> None:
        """Spawn what is needed, and wait until it answers."""

    def _litters(self, patterns: Sequence[str]) -> None:
        """Note which files outside of its folder the server leaves; they go with the folder."""
        (self.folder / _LITTER).write_text("\n".join(patterns))

    def _spawn(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        user: str = "",
        env: Mapping[str, str] | None = None,
        ending: signal.Signals = signal.SIGKILL,
    ) -> None:
        """Run a command in the background until `_end`, which sends `ending`."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                # In this order: the kernel forgets the parting signal when the user changes.
                [*as_user(user), *_orphans_get(ending), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env={**os.environ, **(env or {})},
                # A terminal's ^C is for the tests; they stop their servers in order.
                start_new_session=True,
            )
        self._children[name] = _Child(process, log, ending)

    def _end(self, name: str, sign: signal.Signals | None = None) -> None:
        """End a process, gently if it can be."""
        child = self._children.pop(name)
        child.process.send_signal(sign or child.ending)
        try:
            child.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()

    def _wait_until(self, answers: Callable[[], object], trouble: type[Exception]) -> None:
        """Call until `trouble` is over, or a process has ended, or patience has."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            ended = [name for name, c in self._children.items() if c.process.poll() is not None]
            try:
                if not ended:
                    answers()
                    return
            except trouble as error:
                if time.monotonic() > deadline:
                    raise ServerFailed(self._describe("does not answer")) from error
            if ended:
                raise ServerFailed(self._describe(f"{', '.join(ended)} ended while starting"))
            time.sleep(_POLL)

    def _describe(self, problem: str) -> str:
        tails = [f"{c.log.name}:\n{read_tail(c.log)}" for c in self._children.values()]
        return "\n".join([f"{type(self).__name__}: {problem}", *tails])


class _Child:
    """A process in the background."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ending: signal.Signals) -> None:
        self.process = process
        self.log = log
        self.ending = ending


def free_ports(count: int) -> list[int]:
    """Give ports on which nobody listens, all different.

    Below the range from which the kernel serves outgoing connections: one of those could
    take the port before the server does.
    """
    taken: list[socket.socket] = []
    try:
        while len(taken) < count:
            candidate = socket.socket()
            try:
                candidate.bind((HOST, random.randrange(10_000, 32_768)))
            except OSError:
                candidate.close()
            else:
                taken.append(candidate)
        return [each.getsockname()[1] for each in taken]
    finally:
        for each in taken:
            each.close()


def find_program(name: str, folder: Path | None, fix: str) -> Path:
    """Find a program in a folder or on the path; `fix` tells how to install it."""
    found = shutil.which(name, path=folder) or shutil.which(name)
    # Debian keeps daemons where the path of a user who is not root does not look.
    found = found or shutil.which(name, path="/usr/sbin")
    if found is None:
        raise ServerFailed(f"{name} is missing: {fix}")
    return Path(found)


def run(command: Sequence[str | Path], *, user: str = "", input: str = "") -> str:
    """Run a command to its end and give what it printed.

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
        said = f"{done.stdout}{done.stderr}".strip()
        raise ServerFailed(f"{Path(command[0]).name} failed with {done.returncode}: {said}")
    return done.stdout


def as_user(user: str) -> list[str]:
    """Give the words before a command that make it run as a user, '' for the present one."""
    if not user:
        return []
    group = str(pwd.getpwnam(user).pw_gid)
    setpriv = find_program("setpriv", None, "apt-get install util-linux")
    return [str(setpriv), f"--reuid={user}", f"--regid={group}", "--clear-groups"]


def read_tail(log: Path) -> str:
    """Give a log's last lines, indented."""
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (empty)"


def _orphans_get(sign: signal.Signals) -> list[str]:
    """Give the words before a command that end it when the test process dies."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", sign.name.removeprefix("SIG")] if setpriv else []


def _remove(folder: Path) -> None:
    litter = folder / _LITTER
    for pattern in litter.read_text().splitlines() if litter.exists() else ():
        for left in Path("/").glob(pattern.lstrip("/")):
            left.unlink(missing_ok=True)
    shutil.rmtree(folder)


def _sweep() -> None:
    """Remove the folders of test processes that died without stopping their servers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and not _lives(int(pid)):
            # Another process may be sweeping, too, or it was another user's.
            with contextlib.suppress(OSError):
                _remove(folder)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
