"""Histories of the messages of a queue, built by hand: the rows that commits leave, and calls.

A table of `cases` has a legal transition and others that differ from it in one thing. Each row says
what is found: the ids of the promises, and parts of the problems.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from jobsync.testing import Occurrence, check_messages

QUEUE = "mails"
UPTIME = 5000.0
"""The time since boot of the database when the world begins; unlike its wall time."""
WALL = 1_000_000_000.0

ROW: Mapping[str, Any] = {
    "queue": QUEUE,
    "payload": "payload",
    "deliveries": 2,
    "returned": 1,
    "max_attempts": 3,
    "suspect": 0,
    "claim": "",
    "session": "",
    "due": WALL,
    "boot": 1,
    "wakes": None,
    "errors": 1,
    "trail": "",
}
"""A message that was delivered before, so that no counter is zero."""


class QueueHistory:
    """What a queue and its callers do, in order.

    Attributes:
        history: so far.
        at: the world's time of what comes next.
        boot: the boot of the database.
    """

    def __init__(self) -> None:
        self.history: list[Occurrence] = []
        self.at = 0.0
        self.boot = 1

    def note(self, what: str, node: str = "a", **details: Any) -> int:
        """Append an occurrence; return its position."""
        self.history.append(Occurrence(self.at, node, what, details))
        return len(self.history) - 1

    def request(self, call: str, **details: Any) -> int:
        """Call the backend; return the position of the request."""
        return self.note("request", call=call, queue=QUEUE, **details)

    def respond(self, request: int, result: Any = None, error: str = "") -> int:
        """Answer a request."""
        answer = {"error": error} if error else {"result": result}
        return self.note("response", request=request, **answer)

    def row(
        self, name: str, state: str, request: int | None = None, *, node: str = "a", **row: Any
    ) -> int:
        """Commit a message; a message that is gone, or wrongly in two tables, has no fields."""
        fields = row if state in ("gone", "both") else {**ROW, **row}
        now = {"wall": WALL + self.at, "mono": UPTIME + self.at, "boot": self.boot}
        details = {"request": request, "id": name, "now": now, **fields, "state": state}
        return self.note("row", node, **details)

    def end_session(self, name: str) -> int:
        """Declare a session dead."""
        value = {"state": "dead"}
        return self.note("commit", key=f"session/{name}", value=value, deleted=False)


NOW = 20.0
"""When the transition happens."""
Fields = Mapping[str, Any]


class Step(msgspec.Struct, frozen=True):
    """A transition of the message m: before, after, and the request that made it."""

    before: Fields | None
    after: Fields
    request: Fields | None
    place: Fields = {}
    dead: str = "nobody.1"
    """The session that is dead by then."""
    boot: int = 1
    """The boot of the database at the transition; 1 before."""
    tamperer: str = "a"
    """The node that has written the message before; empty for a person."""
    node: str = "a"


class Case(msgspec.Struct, frozen=True):
    """What is different, and what is found."""

    found: str
    """The ids and parts of the problems, separated by "; "; empty if nothing is."""
    before: Fields = {}
    after: Fields = {}
    request: Fields | None = {}
    more: Fields = {}
    """Other fields of the step."""

    def apply(self, step: Step) -> Step:
        """Return a step with these differences."""
        request = None if self.request is None else {**(step.request or {}), **self.request}
        before = None if step.before is None else {**step.before, **self.before}
        changed = msgspec.structs.replace(
            step, before=before, after={**step.after, **self.after}, request=request
        )
        return msgspec.structs.replace(changed, **self.more)


def find(step: Step) -> list[str]:
    """Return what is found in the transition, without where and when."""
    world = QueueHistory()
    world.end_session(step.dead)
    if step.place:
        world.request("push", messages=[["m", "payload", 0.0, 3, step.place]])
    if step.before is not None:
        world.at = 10.0
        world.row("m", **step.before, node=step.tamperer)
    known = check_messages(world.history)
    world.at, world.boot = NOW, step.boot
    request = None if step.request is None else world.request(**step.request)
    world.row("m", request=request, node=step.node, **step.after)
    return [str(each) for each in check_messages(world.history) if each not in known]


def check(step: Step, expected: str) -> None:
    """Check that exactly this is found."""
    found = find(step)
    wanted = expected.split("; ") if expected else []
    assert len(found) == len(wanted), found
    for problem in wanted:
        invariant, _, text = problem.partition(" ")
        assert any(each.startswith(f"{invariant}: ") and text in each for each in found), found


def name(case: Case) -> str:
    """Return a readable id of a case."""
    changes = {"before": case.before, "after": case.after, "by": case.request, "": case.more}
    shown = [f"{what} {fields}" for what, fields in changes.items() if fields != {}]
    return ", ".join(shown) or "legal"


def cases(step: Step, *found: Case) -> pytest.MarkDecorator:
    """Parametrize a test with a legal step and what differs from it."""
    return pytest.mark.parametrize(
        ("step", "expected"),
        [pytest.param(each.apply(step), each.found, id=name(each)) for each in (Case(""), *found)],
    )
