"""`jobsync work` ends when it is told to, whatever user code and the store do.

Everything that keeps a process here lasts an hour, so a test that passes in time shows the limit;
how far beyond the grace period it ends is measured by `make prove-operate`.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import WorkerProcess
from proxy import Proxy
from servers import Locate
from terminal import JOBSYNC, read_json
from waiting import now, until

GRACE = "1"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store on each database."""
    return locate(request.param)


class StubbornProcess(WorkerProcess):
    """A `jobsync work` with a handler that may keep it from ending."""

    def __init__(self, url: str, handler: str, folder: Path, grace: str = GRACE) -> None:
        self._started = folder / "started"
        super().__init__(
            handler,
            [*JOBSYNC, "work", "stubborn_app:open_database", "--grace", grace],
            folder / f"{handler}.log",
            cwd=Path(__file__).parents[2] / "support",
            env={
                **os.environ,
                "JOBSYNC_URL": url,
                "APP_HANDLER": handler,
                "APP_STARTED": str(self._started),
            },
            stdout=subprocess.DEVNULL,
        )
        self._url = url

    async def handle_one(self) -> None:
        """Enqueue a message, and wait until its handler runs."""
        await until(lambda: "worker running" in self.log, "it works")
        read_json(self._url, "enqueue", "tasks", "{}")
        await until(self._started.exists, "the handler runs")


@pytest.mark.parametrize(
    ("handler", "status", "reason"),
    [
        ("waits", 0, "stopped"),
        ("ends_at_once", 0, "stopped"),
        ("ignores_cancellation", 1, "queue: the handler of message"),
        ("never_returns", 1, "queue: the handler of message"),
        ("blocks_the_loop", 1, "the process was still running after 1 s of grace"),
        ("computes", 1, "the process was still running after 1 s of grace"),
        ("leaves_a_task", 1, "the process was still running after 1 s of grace"),
    ],
)
async def test_a_process_ends_whatever_its_handler_does(
    url: str, tmp_path: Path, proof: Any, handler: str, status: int, reason: str
) -> None:
    """With exit code 1 and the reason in the log, if something had to be left behind."""
    with StubbornProcess(url, handler, tmp_path) as worker:
        await worker.handle_one()
        stopped = worker.stop()
        assert await worker.ended() == status, worker.log
        assert reason in worker.log
        took = round(now() - stopped, 2)
    kind = url.partition(":")[0]
    proof.record("shutdown", kind=kind, handler=handler, grace_s=float(GRACE), took_s=took)


@pytest.mark.parametrize("handler", ["blocks_the_loop", "computes", "ignores_cancellation"])
async def test_a_second_signal_is_heard_at_once(url: str, tmp_path: Path, handler: str) -> None:
    """Even while the event loop is blocked: the first one allows an hour.

    It is sent until it counts: what comes within half a second repeats the first.
    """
    with StubbornProcess(url, handler, tmp_path, grace="3600") as worker:
        await worker.handle_one()
        worker.stop()
        await until(lambda: "SIGTERM: stopping, within 3600 s" in worker.log, "the first is heard")

        def ends() -> bool:
            worker.process.send_signal(signal.SIGINT)
            return not worker.is_alive

        await until(ends, "the second is heard")
        assert await worker.ended() == 1, worker.log
        assert "SIGINT again: exiting immediately" in worker.log


async def test_a_process_ends_although_the_store_is_silent(
    tmp_path: Path, locate: Locate, proof: Any
) -> None:
    """Requests are neither answered nor refused."""
    url = locate("postgres")
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    with Proxy("127.0.0.1", port) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        with StubbornProcess(through, "waits", tmp_path) as worker:
            await worker.handle_one()
            proxy.drop_request(count=1_000_000)
            stopped = worker.stop()
            assert await worker.ended() == 1, worker.log
            # The second one, if the machine stops for a moment.
            reasons = ("work did not end by itself", "the process was still running")
            assert any(reason in worker.log for reason in reasons), worker.log
            took = round(now() - stopped, 2)
    proof.record("shutdown", kind="silent postgres", grace_s=float(GRACE), took_s=took)


async def test_a_process_ends_when_its_database_is_disconnected(url: str, tmp_path: Path) -> None:
    """There is nothing left to do. The handler that disconnected it counts as completed."""
    with StubbornProcess(url, "disconnects", tmp_path) as worker:
        await worker.handle_one()
        assert await worker.ended() == 0, worker.log
    (queue,) = read_json(url, "queues", "list")
    assert (queue["claimed"], queue["completed"]) == (0, 1)


async def test_a_process_that_stops_by_itself_ends_in_time(url: str, tmp_path: Path) -> None:
    """Its time is limited although nobody has sent a signal."""
    with StubbornProcess(url, "fails_and_blocks", tmp_path) as worker:
        await worker.handle_one()
        assert await worker.ended() == 1, worker.log
        assert "the process was still running after 1 s of grace" in worker.log
