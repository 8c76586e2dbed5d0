"""What one look at the store tells of the demo, and the figures of its verdict."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from jobsync.demo import observer as module
from jobsync.demo import worker
from jobsync.demo.observer import DemoObserver, DemoSnapshot
from jobsync.demo.verdict import DemoVerdict
from jobsync.demo.worker import TOKENS
from jobsync.errors import NotFound

GOOD: dict[str, Any] = {
    "enqueued": 101,
    "handled": 102,
    "again": 103,
    "instants": 104,
    "firings": 105,
    "records": 106,
    "tokens": TOKENS,
    "vacancy": 1.25,
    **dict.fromkeys(("lost", "doubled", "missed", "fired_twice", "left", "failures"), 0),
}
LINES = {
    "mails": "101 enqueued, 102 handled, {lost} lost, {doubled} doubled",
    "started again": "103, because their worker died or froze",
    "schedule": "105 firings for 104 instants, {missed} missed, {fired_twice} fired twice",
    "records": "106 added, {left} left to expire",
    "tokens": f"{{tokens}} of {TOKENS} have an owner",
    "without a leader": "1.2 s at most",
    "failed workers": "{failures}",
}


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({}, []),
        ({"lost": 7}, ["mails"]),
        ({"doubled": 7}, ["mails"]),
        ({"missed": 7}, ["schedule"]),
        ({"fired_twice": 7}, ["schedule"]),
        ({"left": 7}, ["records"]),
        ({"tokens": 7}, ["tokens"]),
        ({"tokens": TOKENS + 1}, ["tokens"]),
        ({"failures": 7}, ["failed workers"]),
        ({"lost": 8, "missed": 9, "failures": 7}, ["mails", "schedule", "failed workers"]),
    ],
)
def test_each_figure_is_in_its_line(change: dict[str, int], bad: list[str]) -> None:
    """A line is bad if one of its promises is broken, and so is the whole then."""
    facts = GOOD | change
    verdict = DemoVerdict(**facts)
    assert verdict.is_good is not bool(bad)
    assert verdict.describe() == [
        (what, text.format(**facts), what not in bad)
        for what, text in LINES.items()
        if what != "failed workers" or what in bad
    ]


def observe(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> DemoObserver:
    """Return an observer of a store that says so."""

    def session(pid: int, state: str, *works: str) -> Any:
        return SimpleNamespace(worker_id=f"w{pid}", facts={"pid": pid}, state=state, works=works)

    facts: dict[str, Any] = {
        "sessions": [
            session(1, "live", "demo/scheduler", "demo/queue"),
            session(2, "silent", "demo/scheduler"),
            session(3, "dead", "demo/scheduler"),
            # It has another session for the tasks of its fleet.
            session(4, "live", "demo/fleet"),
            # It is none of the demo's.
            session(99, "live", "demo/scheduler"),
        ],
        "roles": [("queue", "w1", 5, "led"), ("scheduler", "w2", 7, "led")],
        "counts": {"waiting": 1, "ready": 2, "claimed": 4, "completed": 8, "dead": 16},
        "jobs": [("other", 3), (worker.CLOCK_JOB, 9)],
        "shares": [("worker-1", 50), ("worker-2", 70)],
        "resources": {worker.SESSIONS: 11},
        **changes,
    }

    async def answer(value: Any) -> Any:
        return value

    def read_fleet(*of: object) -> Any:
        assert of[2] == worker.FLEET
        if facts["shares"] is None:
            raise NotFound("fleet", worker.FLEET)
        shares = [SimpleNamespace(node=node, tokens=count) for node, count in facts["shares"]]
        return answer(SimpleNamespace(shares=lambda: shares))

    roles = [
        SimpleNamespace(work=work, leader=leader, epoch=epoch, state=state)
        for work, leader, epoch, state in facts["roles"]
    ]
    cluster = SimpleNamespace(sessions=facts["sessions"], roles=roles)
    monkeypatch.setattr(module, "read_cluster_status", lambda *_: answer(cluster))
    monkeypatch.setattr(module, "read_fleet_status", read_fleet)
    names = {pid: SimpleNamespace(name=f"worker-{pid}") for pid in (1, 2, 3, 4)}
    found = DemoObserver("memory://", cast("Any", SimpleNamespace(find=names.get)))
    resources = {
        name: SimpleNamespace(count=lambda count=count: answer(count))
        for name, count in facts["resources"].items()
    }
    jobs = [SimpleNamespace(name=name, successes=count) for name, count in facts["jobs"]]
    parts: dict[str, Any] = {
        "_backend": SimpleNamespace(count=lambda: answer(facts["counts"])),
        "_scheduler": SimpleNamespace(list_jobs=lambda: answer(jobs)),
        "_database": SimpleNamespace(
            store=None, components=None, resources=resources, list_resources=lambda: answer([])
        ),
    }
    for name, part in parts.items():
        setattr(found, name, part)
    return found


SEEN = DemoSnapshot(
    leader="worker-2",
    epoch=7,
    states={"worker-1": "live", "worker-2": "silent", "worker-3": "dead"},
    tokens={"worker-1": 50, "worker-2": 70},
    waiting=7,
    done=8,
    firings=9,
    records=11,
)


@pytest.mark.parametrize(
    ("store", "seen"),
    [
        ({}, {}),
        ({"roles": []}, {"leader": None, "epoch": 0}),
        ({"roles": [("queue", "w1", 5, "led")]}, {"leader": None, "epoch": 0}),
        ({"roles": [("scheduler", "w2", 7, "silent")]}, {"leader": None}),
        ({"roles": [("scheduler", None, 7, "vacant")]}, {"leader": None}),
        ({"roles": [("scheduler", "w99", 7, "led")]}, {"leader": None}),
        ({"counts": {}}, {"waiting": 0, "done": 0}),
        ({"jobs": [("other", 3)]}, {"firings": 0}),
        ({"shares": None}, {"tokens": {}}),
        ({"resources": {}}, {"records": 0}),
        ({"sessions": []}, {"leader": None, "states": {}}),
    ],
)
async def test_a_look_at_the_store_tells_all_of_the_demo(
    monkeypatch: pytest.MonkeyPatch, store: dict[str, Any], seen: dict[str, Any]
) -> None:
    """By the names of its workers; what is not there yet counts as nothing."""
    found = await observe(monkeypatch, **store).read()
    assert found == msgspec.structs.replace(SEEN, **seen)
