"""What the commands of schedules do and tell, by what a store has."""

import asyncio
import getpass
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobsync.cli import schedules as module
from jobsync.cli.requested_run import RequestedRun
from jobsync.cli.schedules import schedules
from jobsync.components import Components
from jobsync.core.job_state import Gap, JobDefinition, JobState
from jobsync.errors import Invalid
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.job_store import JobStore
from jobsync.stores.memory import MemoryStore

NOW = 1_800_000_000
HOURLY = JobDefinition(schedule="@hourly")


class Place:
    """A store with jobs in two namespaces, and commands on it."""

    def __init__(self) -> None:
        self.components = Components.system()
        self.store = MemoryStore()

    def run(self, *words: str) -> Result:
        """Run a command."""
        return CliRunner().invoke(schedules, words)

    def read(self, *words: str) -> Any:
        """Run a command with --json; return what it prints."""
        done = self.run(*words, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    async def add_job(self, namespace: str, name: str, *gaps: int) -> None:
        """Store a job, and instants that nobody has fired."""
        jobs = JobStore(lambda: self.store, namespace, self.components)
        state = JobState(definition=HOURLY, defined_by="", last=NOW)
        await jobs.create_many({name: state})
        await jobs.code.write("code", [name], 0.0)
        for instant in gaps:
            gap = Gap(first=instant, last=instant, count=1, reason=f"{namespace}/{name}")
            await jobs.history.write_gap(name, gap)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Two namespaces whose histories overlap."""
    place = Place()

    def run(_: str | None, work: Callable[..., Awaitable[Any]]) -> Any:
        async def call() -> Any:
            return await work(place.store, place.components)

        return asyncio.run(call())

    monkeypatch.setattr(module, "run_on_store", run)

    async def fill() -> None:
        await place.add_job("billing", "a", NOW - 40, NOW - 20)
        await place.add_job("billing", "both", NOW - 35)
        await place.add_job("default", "b", NOW - 30, NOW - 10)
        await place.add_job("default", "both", NOW - 15)

    asyncio.run(fill())
    return place


@pytest.mark.parametrize(
    ("words", "ages"),
    [
        ([], [10, 15, 20, 30, 35, 40]),
        (["--limit", "2"], [10, 15]),
        (["--namespace", "billing"], [20, 35, 40]),
        (["a"], [20, 40]),
        (["b", "--namespace", "default"], [10, 30]),
        (["both", "--namespace", "billing"], [35]),
        (["--status", "success"], []),
        (["--status", "missed", "--status", "success", "--limit", "1"], [10]),
    ],
)
def test_the_history_is_newest_first_over_all_namespaces(
    place: Place, words: list[str], ages: list[int]
) -> None:
    """Of one job, only what its own namespace has."""
    rows = place.read("history", *words)
    assert [NOW - row["scheduled_time"] for row in rows] == ages
    assert all(row["reason"] == f"{row['namespace']}/{row['job_name']}" for row in rows)


def test_a_change_is_told_and_so_is_none(place: Place) -> None:
    """The second time nothing changes; each of the two options is enough."""
    for words, what in [
        (["pause", "a"], "paused"),
        (["pause", "a"], "already paused"),
        (["resume", "a"], "resumed"),
        (["resume", "a"], "not paused"),
        (["update", "a", "--timezone", "Europe/Berlin"], "updated"),
        (["update", "a", "--timezone", "Europe/Berlin"], "unchanged"),
        (["update", "a", "--schedule", "@daily"], "updated"),
    ]:
        row = {"namespace": "billing", "job": "a", "what": what}
        assert place.read(*words) == [row]
    (job,) = [each for each in place.read("list") if each["job"] == "a"]
    assert (job["schedule"], job["timezone"]) == ("@daily", "Europe/Berlin")
    done = place.run("update", "a")
    assert isinstance(done.exception, Invalid)
    assert "is missing, and so is --timezone" in str(done.exception)


@pytest.mark.parametrize("status", module.STATUSES)
def test_the_code_of_a_run_tells_whether_it_succeeded(
    place: Place, monkeypatch: pytest.MonkeyPatch, status: Any
) -> None:
    """Any other end is a failure, and is shown likewise."""
    entry = HistoryEntry(status=status, id="r", job_name="a", scheduled_time=NOW, is_manual=True)

    async def follow(requested: RequestedRun, *_: object) -> HistoryEntry:
        requested.namespace = "billing"
        return entry

    monkeypatch.setattr(RequestedRun, "follow", follow)
    done = place.run("run", "a", "--json")
    assert done.exit_code == (0 if status == "success" else 1)
    (row,) = json.loads(done.stdout)
    assert (row["namespace"], row["job_name"], row["status"]) == ("billing", "a", status)


@pytest.mark.parametrize("end", ["timeout", "interrupt"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_who_stops_waiting_is_told_what_becomes_of_the_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, has_begun: bool, end: str
) -> None:
    """It goes on, or begins as soon as it can."""

    async def follow(requested: RequestedRun, *arguments: Any) -> None:
        assert arguments[-1] == 90.0
        requested._request = arguments[2]
        requested._has_begun = has_begun
        if end == "interrupt":
            raise KeyboardInterrupt

    monkeypatch.setattr(RequestedRun, "follow", follow)
    done = place.run("run", "a", "--timeout", "1.5m")
    rest = "goes on" if has_begun else "stays requested, and begins as soon as it can"
    what = {"timeout": "no end after 90 s", "interrupt": "stopped waiting"}[end]
    assert done.stderr == f"jobsync: {what}. The run {rest}: see `jobsync schedules history a`.\n"
    assert done.exit_code == {"timeout": 1, "interrupt": 130}[end]


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_user_without_a_name_has_a_number(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """As in a container whose image has no entry for the user."""

    def refuse() -> str:
        raise error

    monkeypatch.setattr("platform.node", lambda: "pod-1")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    assert module._find_user() == "ann@pod-1"
    monkeypatch.setattr(getpass, "getuser", refuse)
    monkeypatch.setattr("os.getuid", lambda: 1234)
    assert module._find_user() == "1234@pod-1"
