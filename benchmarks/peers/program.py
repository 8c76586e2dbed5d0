"""Runs the programs of peers, which speak `programs/protocol.py`."""

import json
import os
import queue
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.peers.environments import Environment

__all__ = ["Program", "ProgramFailed"]

FOLDER = Path(__file__).resolve().parent / "programs"
_TIMEOUT = 180.0
_LAST_MOMENTS = 10.0
_WARM_UP = 5
_IDLE = (0.15, 0.35)
"""Seconds between two pushes, at random so that no poll interval fits them."""


class ProgramFailed(Exception):
    """A peer's program ended with an error, or does not answer."""


class Program(msgspec.Struct, frozen=True):
    """A peer's program on one database."""

    environment: Environment
    file: str
    url: str
    variant: str = ""

    def run(self, role: str, count: int = 0) -> dict[str, float]:
        """Run a role to its end; return what it answered."""
        with self._started(role, count) as process:
            try:
                output, _ = process.communicate(timeout=_TIMEOUT)
            except subprocess.TimeoutExpired:
                raise ProgramFailed(f"{self.file} {role} takes over {_TIMEOUT:g} s") from None
        if process.returncode:
            raise ProgramFailed(f"{self.file} {role} failed")
        answer: dict[str, float] = json.loads(output.splitlines()[-1])
        return answer

    def measure_starts(self, count: int) -> list[float]:
        """Return the milliseconds from each push to the start of its handler in another process."""
        with ExitStack() as stack:
            worker, pusher = (stack.enter_context(self._talking(role)) for role in ("work", "push"))
            pusher.read()
            time.sleep(1)
            took = []
            for _ in range(_WARM_UP + count):
                time.sleep(random.uniform(*_IDLE))
                pusher.write()
                began = pusher.read()["at"]
                took.append(1000 * (worker.read()["at"] - began))
            return took[_WARM_UP:]

    @contextmanager
    def _started(self, role: str, count: int) -> Iterator["subprocess.Popen[str]"]:
        process = subprocess.Popen(
            [
                self.environment.interpreter,
                FOLDER / self.file,
                role,
                self.url,
                str(count),
                self.variant,
            ],
            env={**os.environ, **self.environment.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    @contextmanager
    def _talking(self, role: str) -> Iterator["_Conversation"]:
        with self._started(role, 0) as process:
            yield _Conversation(process)
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_MOMENTS)


class _Conversation:
    """Lines to and from a program that goes on running."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()

    def write(self) -> None:
        """Ask for the next push."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Return the next answer."""
        try:
            line = self._lines.get(timeout=_TIMEOUT)
        except queue.Empty:
            line = ""
        if not line:
            raise ProgramFailed(f"{self._process.args!r} does not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")
