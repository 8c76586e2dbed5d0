"""`jobsync work` and `jobsync health`, as a process manager meets them."""

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
        self.told: list[str] = []

    def read_until(self, text: str) -> str:
        """Read standard error up to a line that holds something, and give that line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.told.append(line.rstrip("\n"))
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not told: {self.told}")

    def hear(self, text: str) -> None:
        """Read standard output up to a line."""
        assert self.process.stdout is not None
        assert text in map(str.strip, self.process.stdout), f"{text} was not said"

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; give the exit code and the rest of what was told."""
        self.process.send_signal(number)
        _, told = self.process.communicate(timeout=60)
        return self.process.returncode, told


@contextmanager
def at_work(folder: Path, url: str, *words: str, **environ: str) -> Iterator[Worker]:
    """Run one until it works; kill it in the end, if it still runs."""
    worker = Worker(folder, url, *words, **environ)
    try:
        worker.read_until("at work")
        worker.hear("worked")
        yield worker
    finally:
        worker.process.kill()
        worker.process.communicate()


def ask(worker: Worker, path: str) -> tuple[int, dict[str, object]]:
    """Ask a probe."""
    (address,) = re.findall(r"http://\S+", "\n".join(worker.told))
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
def test_it_works_and_stops_in_good_order(
    tmp_path: Path, url: str, target: str, number: signal.Signals
) -> None:
    """A banner, a line a fact, and 0 in the end; the role is given up on the way."""
    with at_work(tmp_path, url, target) as worker:
        assert worker.told[0].startswith("jobsync ")
        assert worker.told[1:3] == [f"  store    {url}", "  plugins  report"]
        status, told = worker.end(number)
    assert status == 0, told
    lines = told.splitlines()
    assert f"{number.name}: stopping, within 30 s" in told
    assert sum("coordinator-demoted" in line and "reason=stopped" in line for line in lines) == 1
    assert lines[-1].endswith("stopped")


def test_probes_tell_live_from_ready(tmp_path: Path, url: str) -> None:
    """Both pass while it works, under both names; other paths are named."""
    with at_work(tmp_path, url) as worker:
        for path in ("/livez", "/health/live"):
            assert ask(worker, path) == (200, {"status": "alive"})
        for path in ("/readyz", "/health/ready"):
            assert ask(worker, path) == (200, {"status": "ready"})
        status, body = ask(worker, "/metricz")
        assert status == 404
        assert body["paths"] == ["/health/live", "/health/ready", "/livez", "/readyz"]


async def test_a_store_that_is_gone_turns_ready_and_not_live(
    tmp_path: Path, postgres: servers.PostgresServer
) -> None:
    """Ready comes back by itself when the store does; nobody needs to restart anything."""
    url = f"{postgres.url}?schema=at_work"
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    with Proxy("127.0.0.1", port) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        with at_work(tmp_path, through) as worker:
            proxy.refuse()
            proxy.cut()
            await until(lambda: ask(worker, "/readyz")[0] == 503, "it is not ready")
            _, body = ask(worker, "/readyz")
            assert body["status"] == "not_ready"
            assert "session is not current" in str(body["reasons"])
            assert ask(worker, "/livez") == (200, {"status": "alive"})
            proxy.accept()
            await until(lambda: ask(worker, "/readyz")[0] == 200, "it is ready again")
            assert worker.process.poll() is None
            assert worker.end()[0] == 0


async def test_a_queue_that_cannot_be_claimed_from_is_not_ready(tmp_path: Path, url: str) -> None:
    """Though sessions, which have a file of their own, are current; it comes back by itself."""
    with WorkProcess(url, "emails", tmp_path / "log", concurrency=1, prefetch=0) as worker:
        await until(lambda: worker.is_at_work and worker.probe("/readyz") == 200, "it is ready")
        # More than it can handle until it is kept from claiming the next one.
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


def test_a_second_signal_stops_at_once(tmp_path: Path, url: str) -> None:
    """Whatever still runs then is left where it stands."""
    with at_work(tmp_path, url, SLOW="3600") as worker:
        worker.process.send_signal(signal.SIGTERM)
        worker.hear("stopping")
        status, told = worker.end()
    assert status == 1
    assert "SIGTERM again: stopping at once" in told


def test_grace_is_a_bound(tmp_path: Path, url: str) -> None:
    """What has not ended by then is cancelled, and the exit code tells."""
    with at_work(tmp_path, url, "tasks:db", "--grace", "0.2", SLOW="3600") as worker:
        status, told = worker.end()
    assert status == 1
    assert "not everything had ended after 0.2 s of grace" in told


async def test_a_function_that_cannot_be_stopped_keeps_no_process(tmp_path: Path, url: str) -> None:
    """It is left behind at the end of the grace, and its message comes to another."""
    with WorkProcess(url, "emails", tmp_path / "log", blocks=True, grace=0.1) as worker:
        await until(lambda: worker.is_at_work, "it is at work")
        (row,) = read_json(url, "enqueue", "emails", '{"seconds": 3600}')
        await until(lambda: read_json(url, "why", row["id"])[0]["code"] == "claimed", "it runs")
        worker.stop()
        await until(lambda: not worker.is_alive, "it ends")
        assert worker.process.returncode == 0, worker.log
        assert "left behind, still running: jobsync-handler_0" in worker.log
    (seen,) = read_json(url, "queues", "list")
    assert (seen["claimed"], seen["workers"]) == (1, 0)


async def test_what_grace_is_too_short_for_is_given_back(tmp_path: Path, url: str) -> None:
    """Though the queue would give its handlers an hour: nothing is lost and nothing spent."""
    with WorkProcess(url, "emails", tmp_path / "log", "--grace", "4", grace=3600) as worker:
        await until(lambda: worker.is_at_work, "it is at work")
        read_json(url, "enqueue", "emails", '[{"kind": "hold"}, {"kind": "hold"}]')
        await until(lambda: read_json(url, "queues", "list")[0]["claimed"] == 2, "both run")
        worker.stop()
        await until(lambda: not worker.is_alive, "it ends")
        assert worker.process.returncode == 0, worker.log
    given_back = read_json(url, "queues", "browse", "emails", "--state", "waiting")
    assert [(kept["attempts"], kept["is_suspect"]) for kept in given_back] == [(0, False)] * 2


def test_work_that_fails_ends_the_process(tmp_path: Path, url: str) -> None:
    """With 1, and the reason in the log, so that whoever watches it begins anew."""
    worker = Worker(tmp_path, url, FAIL="1")
    _, told = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 1
    assert "db:failed" in told
    assert "a bug" in told


def test_logs_can_be_json(tmp_path: Path, url: str) -> None:
    """Each line is an object with the fields of the fact, and nothing else is printed."""
    words = ("tasks:db", "--log-format", "json")
    with at_work(tmp_path, url, *words) as worker:
        _, told = worker.end()
        facts = [json.loads(line) for line in (*worker.told, *told.splitlines())]
    (promoted,) = [fact for fact in facts if fact.get("event") == "coord:coordinator-promoted"]
    assert (promoted["role"], promoted["epoch"], promoted["level"]) == ("default/report", 1, "info")
    assert facts[-1]["message"] == "stopped"


async def test_health_reads_the_heartbeat_file(tmp_path: Path, url: str) -> None:
    """0 while it works, 3 when there is none or it has grown old."""
    beat = tmp_path / "beat.json"

    def health(*words: str) -> tuple[int, dict[str, object]]:
        run = jobsync("health", "--json", "--heartbeat-file", str(beat), *words)
        return run.returncode, json.loads(run.stdout)[0]

    assert health("--live")[0] == 3
    with at_work(tmp_path, url, "tasks:db", "--heartbeat-file", str(beat)) as worker:
        await until(lambda: health("--ready")[0] == 0, "it is ready")
        status, told = health("--live")
        assert (status, told["status"], told["pid"]) == (0, "alive", worker.process.pid)
    await until(lambda: health("--live", "--max-age", "1")[0] == 3, "it is old")
    assert "not heard of for" in str(health("--ready", "--max-age", "1")[1]["reasons"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tasks:dbb"], "TARGET is no Database (got 'tasks:dbb'). Did you mean tasks:db?"),
        (["tasks:other"], "is no Database (got 'tasks:other'). Did you mean tasks:db?"),
        (["taskz:db"], "there is no module taskz"),
        (["tasks"], "Name it as in tasks:db"),
        (["tasks:db", "--http", "here"], "--http is no address (got 'here')"),
        (["tasks:db", "--grace", "-1"], "'--grace'"),
        (["tasks:db", "--log-format", "xml"], "'--log-format'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_named(tmp_path: Path, url: str, words: list[str], told: str) -> None:
    """The option, the value and the fix, and 2."""
    worker = Worker(tmp_path, url, *words)
    _, complaints = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 2
    assert told in complaints
    assert "Traceback" not in complaints
