"""The one way to run worker processes in tests: start, freeze, stop, kill and collect them.

`ProcessGroup` runs scripts that speak the `worker_protocol`. No process outlives its group.
"""

import functools
import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec
from waiting import now, until
from worker_protocol import Fact, FactLog

__all__ = ["OTHER_NAMESPACE", "ProcessGroup", "WorkerProcess", "can_unshare"]

OTHER_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a process in a namespace of its own: others do not see its death, as on another machine."""


@functools.cache
def can_unshare() -> bool:
    """Whether this user may create namespaces of processes."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*OTHER_NAMESPACE, "true"], check=False).returncode == 0


class WorkerProcess:
    """A worker process, seen from outside. It is killed on exit if it still runs.

    Args:
        name: what its facts and messages are reported under.
        command: what it runs.
        log: the file that its standard error goes to.
        read_facts: reads the facts of some kinds, of all workers.
        popen: further arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        read_facts: Callable[..., list[Fact]] = lambda *_: [],
        **popen: Any,
    ) -> None:
        self.name = name
        self.is_frozen = False
        self.is_ending = False
        """Whether the test has stopped or killed it."""
        self.kill_began_at: float | None = None
        self.killed_at: float | None = None
        self._log = log
        self._read_facts = read_facts
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, **popen)

    def __repr__(self) -> str:
        return self.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it if it still runs, and free what it holds here."""
        if self.is_alive:
            self.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; it may be frozen."""
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text()

    def order(self, *words: object) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self.process.stdin.flush()

    def freeze(self) -> float:
        """Send SIGSTOP; return when."""
        self.is_frozen = True
        return self._send(signal.SIGSTOP)

    def thaw(self) -> float:
        """Send SIGCONT; return when."""
        self.is_frozen = False
        return self._send(signal.SIGCONT)

    def stop(self) -> float:
        """Send SIGTERM; return when."""
        self.is_ending = True
        return self._send(signal.SIGTERM)

    def kill(self) -> float:
        """Send SIGKILL; return when."""
        self.is_ending = True
        self.kill_began_at = now()
        self.killed_at = self._send(signal.SIGKILL)
        return self.killed_at

    def _send(self, signal_: signal.Signals) -> float:
        self.process.send_signal(signal_)
        return now()

    async def ended(self) -> int:
        """Wait until it has ended; return its exit status."""
        await until(lambda: not self.is_alive, f"{self} ends")
        return self.process.returncode

    def facts(self, *what: str, since: float = 0.0) -> list[Fact]:
        """Return the facts that it reported, of some kinds or all."""
        facts = self._read_facts(*what)
        return [fact for fact in facts if fact.who == self.name and fact.at >= since]

    def last(self, what: str) -> Fact:
        """Return its latest fact of a kind."""
        return self.facts(what)[-1]

    def has_reported(self, what: str, since: float = 0.0) -> bool:
        """Whether it has reported such a fact."""
        return bool(self.facts(what, since=since))

    def check_exit(self) -> None:
        """Check that it runs, has ended well, or was killed by the test."""
        status = self.process.poll()
        killed = status == -signal.SIGKILL and self.killed_at is not None
        assert not status or killed, f"{self} ended with {status}: {self.log}"


W = TypeVar("W", bound=WorkerProcess)


class ProcessGroup(Generic[W]):
    """Worker processes that report to one file.

    Args:
        folder: where that file and their logs are kept.
        kind: what each of them is.
    """

    def __init__(self, folder: Path, kind: type[W]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.workers: list[W] = []
        """All that were ever started."""
        self.folder = folder
        self.fact_log = FactLog(folder / "facts.jsonl")
        self._kind = kind
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    @property
    def alive(self) -> list[W]:
        """The workers that exist; some may be frozen."""
        return [worker for worker in self.workers if worker.is_alive]

    @property
    def running(self) -> list[W]:
        """The workers that exist and are not frozen."""
        return [worker for worker in self.alive if not worker.is_frozen]

    def launch(self, script: str, prefix: str, *, within: Sequence[str] = (), **options: Any) -> W:
        """Start a worker that runs a script with options, without waiting for it.

        Args:
            script: the file.
            prefix: its name begins with this.
            within: a command that runs the rest of its line, such as `nice`.
            options: of the script.
        """
        name = f"{prefix}-{next(self._numbers)}"
        options |= {"name": name, "facts": str(self.fact_log.path)}
        command = [*within, sys.executable, script, msgspec.json.encode(options).decode()]
        worker = self._kind(name, command, self.folder / f"{name}.log", self.facts)
        self.workers.append(worker)
        return worker

    async def release(self, workers: list[W]) -> list[W]:
        """Wait until workers have started, then tell them all at once to go on."""
        await self.reported("started", workers)
        for worker in workers:
            worker.order("go")
        return workers

    def facts(self, *what: str) -> list[Fact]:
        """Return what was reported, of some kinds or all, in the order of the file."""
        return self.fact_log.read(*what)

    async def reported(self, what: str, workers: Iterable[W]) -> None:
        """Wait until workers have reported a fact."""
        names = {worker.name for worker in workers}
        await until(
            lambda: names <= {fact.who for fact in self.facts(what)}, f"{names} report {what!r}"
        )

    def check_exits(self) -> None:
        """Check that no worker has failed or died on its own."""
        for worker in self.workers:
            worker.check_exit()
