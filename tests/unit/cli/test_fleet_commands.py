"""What the commands of a fleet that shares tasks show."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from jobsync.cli import cluster as module
from jobsync.coordination.role import PastTerm
from jobsync.coordination.session import HookFailure
from jobsync.jobs.foreign_claims import Claim
from jobsync.status.jobs import NodeStatus, PinStatus, ShareStatus
from jobsync.status.sessions import ClusterStatus, RoleStatus, SessionStatus

DAY = date(2026, 1, 5)
NODE = NodeStatus(
    node="a",
    state="ready",
    leads=True,
    tokens=7,
    heard=2.0,
    host="here",
    pid=42,
    joined=5.0,
    incarnation="a.1",
)
SHARE = ShareStatus(node="a", tokens=7, incoming=1, outgoing=2, pinned=3)
PIN = PinStatus(
    task_id="t",
    token=3,
    patterns=("x", "a"),
    in_force="a",
    reason="data is there",
    created_by="a",
    expires=9.0,
)


def claim(state: Any) -> Claim:
    """Return a claim on a task that is named by its state."""
    return Claim(
        task=state,
        token=3,
        date=DAY.isoformat(),
        node="a",
        owner="a.1",
        number=1,
        run=2,
        state=state,
        started=100.0,
        ended=None if state == "running" else 200.0,
    )


class Fleet:
    """The status of a fleet."""

    number = 17

    def nodes(self) -> list[NodeStatus]:
        """Return one node."""
        return [NODE]

    def shares(self) -> list[ShareStatus]:
        """Return its share."""
        return [SHARE]

    async def pins(self) -> list[PinStatus]:
        """Return one pin."""
        return [PIN]

    async def claims(self, day: date) -> list[Claim]:
        """Return a claim in each state, of one day."""
        return [claim(state) for state in ("done", "failed", "running")] if day == DAY else []


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command with --json; return what it prints."""
    asked: list[str] = []

    def use(_: str | None, appname: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            return await work(Fleet())

        asked.append(appname)
        return asyncio.run(call())

    monkeypatch.setattr(module, "_read_fleet", use)

    def run(command: Any, *words: str) -> Any:
        done = CliRunner().invoke(command, [*words, "--appname", "shop_", "--json"])
        assert done.exit_code == 0, done.exception
        assert asked.pop() == "shop_"
        return json.loads(done.stdout)

    return run


def test_nodes_are_shown_with_their_shares(read: Callable[..., Any]) -> None:
    """And the number of the assignment that they are of."""
    assert read(module.tokens) == {
        "nodes": [msgspec.structs.asdict(NODE)],
        "shares": [{"assignment": 17, **msgspec.structs.asdict(SHARE)}],
    }


def test_pins_are_shown_as_a_whole(read: Callable[..., Any]) -> None:
    """Also which pattern is in force."""
    assert read(module.pins) == [{**msgspec.structs.asdict(PIN), "patterns": ["x", "a"]}]


@pytest.mark.parametrize(
    ("command", "states"), [("audits", ["done"]), ("incomplete", ["failed", "running"])]
)
def test_tasks_of_a_date_are_shown_by_their_state(
    read: Callable[..., Any], command: str, states: list[str]
) -> None:
    """Each is done or not done, and has its times; another date has others."""
    rows = read(module.jobs, command, "--date", DAY.isoformat())
    assert rows == [
        {
            "task_id": state,
            "token": 3,
            "node": "a",
            "state": state,
            "run": 2,
            "started": 100.0,
            "ended": None if state == "running" else 200.0,
        }
        for state in states
    ]
    assert read(module.jobs, command, "--date", "2026-01-06") == []


def session(worker: str, state: Any, **more: Any) -> SessionStatus:
    """Return a session that leads and works."""
    fields: dict[str, Any] = {
        "worker_id": worker,
        "incarnation": f"{worker}.1",
        "state": state,
        "heard": 2.0,
        "timeout": 15.0,
        "works": ("a/x", "a/y"),
        "leads": ("a/x",),
        "facts": {"host": f"host of {worker}", "pid": 42, "version": "1.2", "other": 1},
    }
    return SessionStatus(**{**fields, **more})


TERMS = tuple(
    PastTerm(epoch=epoch, worker=f"w{epoch}", since=epoch + 0.1, ended=epoch + 0.2, why="died")
    for epoch in (1, 2)
)
FAILURE = HookFailure(callback="on_start", error="no", at=3.0, times=4)
ROLE: dict[str, Any] = {"state": "led", "epoch": 3, "candidates": 2, "since": 5.0, "until": 6.0}


def test_the_cluster_is_shown_with_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended leads and works nowhere; what a role raises names the role and who raises."""
    sessions = [
        session("live", "live"),
        session("silent", "silent"),
        session("dead", "dead"),
        session("left", "dead", has_left=True),
        session("ended", "dead", has_ended=True),
        session("bare", "live", heard=None, facts={}),
    ]
    roles = [
        RoleStatus(namespace="a", work="x", leader="w3", past=TERMS, **ROLE),
        RoleStatus(
            namespace="b",
            work="x",
            leader="w4",
            failing=FAILURE,
            withheld={"w5": "an old clock", "w6": "no code"},
            **ROLE,
        ),
    ]
    status = ClusterStatus(sessions=sessions, roles=roles)
    monkeypatch.setattr(module, "run_on_store", lambda _, __: status)
    shown = json.loads(CliRunner().invoke(module.cluster, ["--json"]).stdout)
    states = {
        "live": ("live", True, True),
        "silent": ("silent", True, True),
        "dead": ("dead", False, True),
        "left": ("ended", False, False),
        "ended": ("dead", False, True),
        "bare": ("live", True, True),
    }
    assert shown.pop("members") == [
        {
            "worker_id": name,
            "state": state,
            "heard": None if name == "bare" else 2.0,
            "host": None if name == "bare" else f"host of {name}",
            "pid": None if name == "bare" else 42,
            "version": None if name == "bare" else "1.2",
            "leads": ["a/x"] if leads else [],
            "works": ["a/x", "a/y"] if works else [],
        }
        for name, (state, leads, works) in states.items()
    ]
    assert shown.pop("roles") == [
        {"namespace": namespace, "work": "x", "leader": leader, **ROLE}
        for namespace, leader in (("a", "w3"), ("b", "w4"))
    ]
    assert shown.pop("terms") == [{"work": "a/x", **msgspec.structs.asdict(term)} for term in TERMS]
    assert shown.pop("failing") == [
        {"work": "b/x", "leader": "w4", **msgspec.structs.asdict(FAILURE)}
    ]
    assert shown.pop("withheld") == [
        {"work": "b/x", "worker": "w5", "reason": "an old clock"},
        {"work": "b/x", "worker": "w6", "reason": "no code"},
    ]
    assert shown == {}


def test_the_fleet_of_a_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store that was named; what is read from it is the answer."""

    async def read_status(*of: Any) -> tuple[Any, ...]:
        return of

    async def read(fleet: Any) -> Any:
        return ("read", *fleet)

    def run(url: str | None, work: Any) -> Any:
        return asyncio.run(work(f"store of {url}", "components"))

    monkeypatch.setattr("jobsync.status.jobs.read_fleet_status", read_status)
    monkeypatch.setattr(module, "run_on_store", run)
    found: Any = module._read_fleet("memory://x", "shop_", read)
    assert found == ("read", "store of memory://x", "components", "shop_")
