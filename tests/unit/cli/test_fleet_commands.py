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
from jobsync.jobs.foreign_claims import Claim
from jobsync.status.jobs import NodeStatus, PinStatus, ShareStatus

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
