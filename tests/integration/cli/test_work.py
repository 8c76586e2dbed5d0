"""`jobsync work` and `jobsync health`, as a process manager uses them."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import servers
from proxy import Proxy
from terminal import JOBSYNC, jobsync, read_json
from waiting import until
from work_processes import WorkProcess

MODULE = """
import asyncio, os
from jobsync import CoordinatorPlugin, Database

class Report(CoordinatorPlugin):
    async def coordinator_work(self):
        print("worked", flush=True)
        if os.environ.get("FAIL"):
            self.run_in_background(self.fail)

    async def on_stop(self):
        print("stopping", flush=True)
        await asyncio.sleep(float(os.environ.get("SLOW", "0")))

    async def fail(self):
        raise ZeroDivisionError("a bug")

def make():
    report = Report(heartbeat_interval=1, worker_timeout=4, coordinator_work_interval=3600)
    return Database(os.environ["URL"], plugins=[report])

db = make()
other = 1
"""


class Worker:
    """A process that runs `jobsync work`."""

    def __init__(self, folder: Path, url: str, *words: str, **environ: str) -> None:
        (folder / "tasks.py").write_text(MODULE)
        target = words[0] if words else "tasks:db"
        self.process = subprocess.Popen(
            [*JOBSYNC, "work", target, *words[1:]],
            cwd=folder,
            env={**os.environ, "URL": url, "JOBSYNC_HTTP": "0", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []

    def read_until(self, text: str) -> str:
        """Read standard error up to a line that contains a text; return that line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not logged: {self.log}")

    def read_output_until(self, text: str) -> None:
        """Read standard output up to a line."""
        assert self.process.stdout is not None
        assert text in map(str.strip, self.process.stdout), f"{text} was not printed"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; return the exit code and the rest of the log."""
        self.process.send_signal(number)
        # Not `communicate`: it would miss the lines that were read ahead.
        assert self.process.stderr is not None
        log = self.process.stderr.read()
        return self.process.wait(60), log


@contextmanager
def running(folder: Path, url: str, *words: str, **environ: str) -> Iterator[Worker]:
    """Start a worker and wait until it works; kill it in the end."""
    worker = Worker(folder, url, *words, **environ)
    try:
        worker.read_until("worker running")
        worker.read_output_until("worked")
        yield worker
    finally:
        worker.process.kill()
        worker.process.communicate()


def probe(worker: Worker, path: str) -> tuple[int, dict[str, object]]:
    """Request a probe; return the status and the body."""
    (address,) = re.findall(r"http://\S+", "\n".join(worker.log))
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty store."""
    return f"sqlite:///{tmp_path / 'work.db'}"


@pytest.mark.parametrize("target", ["tasks:db", "tasks:make"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_stops_cleanly(
    tmp_path: Path, url: str, target: str, number: signal.Signals
) -> None:
    """It prints a banner and a line per event, gives up its role, and exits with 0."""
    with running(tmp_path, url, target) as worker:
        assert worker.log[0].startswith("jobsync ")
        assert worker.log[1:3] == [
            f"  store    {url} (from the code)",
            "  runs     report (Report)",
        ]
        status, log = worker.stop(number)
    assert status == 0, log
    lines = log.splitlines()
    assert f"{number.name}: stopping, within 30 s" in log
    assert sum("coordinator-demoted" in line and "reason=stopped" in line for line in lines) == 1
    assert lines[-1].endswith("stopped")


def test_probes_answer_live_and_ready(tmp_path: Path, url: str) -> None:
    """Both pass while it works, under both names; for other paths the known ones are listed."""
    with running(tmp_path, url) as worker:
        for path in ("/livez", "/health/live"):
            assert probe(worker, path) == (200, {"status": "alive"})
        for path in ("/readyz", "/health/ready"):
            assert probe(worker, path) == (200, {"status": "ready"})
        status, body = probe(worker, "/metricz")
        assert status == 404
        assert body["paths"] == ["/health/live", "/health/ready", "/livez", "/readyz"]


async def test_an_outage_of_the_store_fails_ready_and_not_live(
    tmp_path: Path, postgres: servers.PostgresServer
) -> None:
    """When the store is back, ready passes again without a restart."""
    url = f"{postgres.url}?schema=working"
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    with Proxy("127.0.0.1", port) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        with running(tmp_path, through) as worker:
            proxy.refuse()
            proxy.cut()
            await until(lambda: probe(worker, "/readyz")[0] == 503, "it is not ready")
            _, body = probe(worker, "/readyz")
            assert body["status"] == "not_ready"
            assert "session is not current" in str(body["reasons"])
            assert probe(worker, "/livez") == (200, {"status": "alive"})
            proxy.accept()
            await until(lambda: probe(worker, "/readyz")[0] == 200, "it is ready again")
            assert worker.process.poll() is None
            assert worker.stop()[0] == 0


async def test_a_queue_that_cannot_be_claimed_from_is_not_ready(tmp_path: Path, url: str) -> None:
    """Even while sessions, which use another connection, are current; it recovers by itself."""
    with WorkProcess(url, "emails", tmp_path / "log", concurrency=1, prefetch=0) as worker:
        await until(lambda: worker.is_at_work and worker.probe("/readyz") == 200, "it is ready")
        # More than it can handle before it is kept from claiming the next one.
        many = json.dumps([{"seconds": 0.1}] * 1000)
        read_json(url, "enqueue", "emails", many)
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as file:
            file.execute("BEGIN IMMEDIATE")
            await until(lambda: worker.probe("/readyz") == 503, "it is not ready")
            assert worker.probe("/livez") == 200
            file.execute("DELETE FROM jobsync_message WHERE state <> 'claimed'")
            file.commit()
        await until(lambda: worker.probe("/readyz") == 200, "it is ready again")
        assert worker.is_alive


async def test_a_second_signal_exits_immediately(tmp_path: Path, url: str) -> None:
    """Without waiting for anything that still runs; within half a second it repeats the first."""
    with running(tmp_path, url, SLOW="3600") as worker:
        worker.process.send_signal(signal.SIGTERM)
        worker.read_output_until("stopping")

        def ends() -> bool:
            worker.process.send_signal(signal.SIGTERM)
            return worker.process.poll() is not None

        await until(ends, "the second one is heard")
        status, log = worker.stop()
    assert status == 1
    assert "SIGTERM again: exiting immediately" in log


def test_grace_is_a_limit(tmp_path: Path, url: str) -> None:
    """Work that has not ended by then is cancelled, and the exit code is 1."""
    with running(tmp_path, url, "tasks:db", "--grace", "0.2", SLOW="3600") as worker:
        status, log = worker.stop()
    assert status == 1
    assert "work did not end by itself (grace: 0.2 s)" in log


async def test_a_function_that_cannot_be_stopped_does_not_block_the_exit(
    tmp_path: Path, url: str
) -> None:
    """The process exits at the end of the grace period, and the message goes to another worker."""
    with WorkProcess(url, "emails", tmp_path / "log", blocks=True, grace=0.1) as worker:
        await until(lambda: worker.is_at_work, "it works")
        (row,) = read_json(url, "enqueue", "emails", '{"seconds": 3600}')
        await until(lambda: read_json(url, "why", row["id"])[0]["code"] == "claimed", "it runs")
        worker.stop()
        await until(lambda: not worker.is_alive, "it ends")
        assert worker.process.returncode == 1, worker.log
        assert f"the handler of message {row['id']}" in worker.log
        assert "work did not end by itself (grace: 30 s)" in worker.log
    (seen,) = read_json(url, "queues", "list")
    assert (seen["claimed"], seen["workers"]) == (1, 0)


async def test_messages_that_outlast_the_grace_are_returned(tmp_path: Path, url: str) -> None:
    """Even if the queue gives its handlers an hour: no message and no attempt is lost."""
    with WorkProcess(url, "emails", tmp_path / "log", "--grace", "4", grace=3600) as worker:
        await until(lambda: worker.is_at_work, "it works")
        read_json(url, "enqueue", "emails", '[{"kind": "hold"}, {"kind": "hold"}]')
        await until(lambda: read_json(url, "queues", "list")[0]["claimed"] == 2, "both run")
        worker.stop()
        await until(lambda: not worker.is_alive, "it ends")
        assert worker.process.returncode == 0, worker.log
    returned = read_json(url, "queues", "browse", "emails", "--state", "waiting")
    assert [(row["attempts"], row["is_suspect"]) for row in returned] == [(0, False)] * 2


def test_failed_work_ends_the_process(tmp_path: Path, url: str) -> None:
    """With exit code 1 and the reason in the log, so that a process manager restarts it."""
    worker = Worker(tmp_path, url, FAIL="1")
    _, log = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 1
    assert "db:failed" in log
    assert "a bug" in log


def test_logs_can_be_json(tmp_path: Path, url: str) -> None:
    """Each line is an object with the fields of its event, and nothing else is printed."""
    words = ("tasks:db", "--log-format", "json")
    with running(tmp_path, url, *words) as worker:
        _, log = worker.stop()
        records = [json.loads(line) for line in (*worker.log, *log.splitlines())]
    (promoted,) = [
        record for record in records if record.get("event") == "coord:coordinator-promoted"
    ]
    assert (promoted["role"], promoted["epoch"], promoted["level"]) == ("default/report", 1, "info")
    assert records[-1]["message"] == "stopped"


async def test_health_reads_the_heartbeat_file(tmp_path: Path, url: str) -> None:
    """0 while the process works, 3 if the file is missing or old."""
    file = tmp_path / "heartbeat.json"

    def health(*words: str) -> tuple[int, dict[str, object]]:
        run = jobsync("health", "--json", "--heartbeat-file", str(file), *words)
        return run.returncode, json.loads(run.stdout)[0]

    assert health("--live")[0] == 3
    with running(tmp_path, url, "tasks:db", "--heartbeat-file", str(file)) as worker:
        await until(lambda: health("--ready")[0] == 0, "it is ready")
        status, report = health("--live")
        assert (status, report["status"], report["pid"]) == (0, "alive", worker.process.pid)
    await until(lambda: health("--live", "--max-age", "1")[0] == 3, "it is old")
    assert "no heartbeat for" in str(health("--ready", "--max-age", "1")[1]["reasons"])


def test_a_process_whose_heartbeats_cannot_be_written_does_not_start(
    tmp_path: Path, url: str
) -> None:
    """With exit code 1 and the fix: probes would call it dead."""
    file = tmp_path / "missing" / "heartbeat.json"
    worker = Worker(tmp_path, url, "tasks:db", "--heartbeat-file", str(file))
    _, log = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 1
    assert log.startswith("jobsync: --heartbeat-file cannot be written")


def test_heartbeats_that_fail_later_end_the_process(tmp_path: Path, url: str) -> None:
    """With exit code 1 and the reason in the log."""
    folder = tmp_path / "folder"
    folder.mkdir()
    words = ("tasks:db", "--heartbeat-file", str(folder / "heartbeat.json"))
    with running(tmp_path, url, *words) as worker:
        folder.rename(tmp_path / "elsewhere")
        assert "--heartbeat-file cannot be written" in worker.read_until("stopping, so that")
        assert worker.process.wait(60) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks:dbb"], "TARGET is not a Database (got 'tasks:dbb'). Did you mean tasks:db?"),
        (["tasks:other"], "is not a Database (got 'tasks:other'). Did you mean tasks:db?"),
        (["taskz:db"], "TARGET refers to a missing module, taskz (got 'taskz:db')"),
        (["tasks"], "Write tasks:db, if its Database is called db"),
        (["tasks:db", "--http", "here"], "--http is not an address (got 'here')"),
        (
            ["tasks:db", "--http", "65535", "--processes", "2"],
            "--http leaves no port for each of 2 processes (got '65535')",
        ),
        (["tasks:db", "--grace", "-1"], "'--grace'"),
        (["tasks:db", "--grace", "367d"], "--grace must be 0 to 366 days"),
        (["tasks:db", "--log-format", "xml"], "'--log-format'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_reported(tmp_path: Path, url: str, words: list[str], message: str) -> None:
    """With the option, the value and the fix, and exit code 2."""
    worker = Worker(tmp_path, url, *words)
    _, log = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 2
    assert message in log
    assert "Traceback" not in log
