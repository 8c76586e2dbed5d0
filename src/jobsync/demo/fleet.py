"""The worker processes of the demo: started, killed, frozen and stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["DemoFleet", "DemoWorker"]

_STOP_TIME = 20.0
"""Seconds in which processes must have stopped after SIGTERM."""

Condition: TypeAlias = Literal["running", "frozen", "killed", "stopped", "failed"]


class DemoWorker:
    """A worker process.

    Attributes:
        name: as the viewer sees it.
        pid: its process.
    """

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self.name = name
        self._was_ended: Condition | None = None
        self._is_frozen = False
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            # In a session of its own: Ctrl-C reaches the demo alone, which stops it.
            self._process = subprocess.Popen(  # noqa: S603 - its own module
                [sys.executable, "-m", "jobsync.demo.worker", name],
                env={**os.environ, "JOBSYNC_URL": url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def condition(self) -> Condition:
        """What became of it."""
        if self._process.poll() is None:
            return "frozen" if self._is_frozen else "running"
        return self._was_ended or "failed"

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kill it, without a warning."""
        self._was_ended = "killed"
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop its time: it neither works nor notices."""
        self._is_frozen = True
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Start its time again."""
        self._is_frozen = False
        self._process.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Stop it in good order; see `wait_or_kill`."""
        if self._process.poll() is None:
            self._was_ended = "stopped"
            self.thaw()
            self._process.terminate()

    def wait_or_kill(self) -> None:
        """Wait until it has ended; kill it if that takes too long."""
        try:
            self._process.wait(_STOP_TIME)
        except subprocess.TimeoutExpired:
            self.kill()
            self._was_ended = "failed"


class DemoFleet:
    """All worker processes.

    Attributes:
        workers: all that were ever started, in order.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.workers: list[DemoWorker] = []
        self._url = url
        self._folder = folder

    def start(self) -> DemoWorker:
        """Start another worker."""
        worker = DemoWorker(self._url, f"worker-{len(self.workers) + 1}", self._folder)
        self.workers.append(worker)
        return worker

    def find(self, pid: object) -> DemoWorker | None:
        """Return the worker of a process."""
        return next((worker for worker in self.workers if worker.pid == pid), None)

    @property
    def running(self) -> Sequence[DemoWorker]:
        """Those that run."""
        return [worker for worker in self.workers if worker.condition == "running"]

    @property
    def failed(self) -> Sequence[DemoWorker]:
        """Those that have ended and should not have."""
        return [worker for worker in self.workers if worker.condition == "failed"]

    @property
    def frozen(self) -> Sequence[DemoWorker]:
        """Those whose time stands still."""
        return [worker for worker in self.workers if worker.condition == "frozen"]

    def stop(self) -> None:
        """Stop all workers, in good order."""
        for worker in self.workers:
            worker.ask_to_stop()
        for worker in self.workers:
            worker.wait_or_kill()
