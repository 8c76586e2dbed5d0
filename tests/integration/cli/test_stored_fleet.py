"""What commands print of nodes, tasks, pins and roles in each state, from records alone."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from terminal import on_terminal, read_json, read_tsv, run
from waiting import until

from jobsync import Components, Store
from jobsync.core.assignment import NodeRef, Plan, token_maker
from jobsync.core.handover import assign
from jobsync.core.pins import Pin, write_sheet
from jobsync.core.plan_documents import to_document
from jobsync.core.trust import Timing
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord, Stage
from jobsync.stores.opening import open_store

KEYS = JobKeys("sync_")
DAY, OTHER_DAY = "2026-01-05", "2026-01-06"
STAGES: tuple[Stage, ...] = ("joining", "ready", "leaving", "left")
STATES: tuple[ClaimState, ...] = ("running", "done", "failed")
CONDITIONS = ("live", "silent", "dead", "missing")
TIMINGS = {"silent": Timing(heartbeat=0.02, timeout=0.3)}
token_of = token_maker(20)
NOW = Components.system().clock.wall().seconds
FAR = 86_400.0
"""Seconds that no run of all tests takes."""


async def add_session(store: Store, name: str, state: str, **fields: Any) -> None:
    """Store a session; a silent one is live, and its timeout is short."""
    timing = TIMINGS.get(state, Timing(heartbeat=100.0, timeout=1000.0))
    session = {
        "worker": name,
        "state": "dead" if state == "dead" else "live",
        "beat": 1,
        "timing": msgspec.to_builtins(timing),
        "facts": {"host": f"host-of-{name}", "pid": 7, "version": "1"},
        **fields,
    }
    await store.create(f"session/{name}.1", session)


async def add_fleet(store: Store) -> None:
    """Store nodes at each stage with a session in each condition, claims and pins."""
    await store.create(KEYS.settings, {"total_tokens": 20, "hash_function": "md5"})
    for stage, condition in itertools.product(STAGES, CONDITIONS):
        name = f"{stage}-{condition}"
        node = NodeRecord(
            name=name,
            incarnation=f"{name}.1",
            stage=stage,
            applied=0,
            is_observer=False,
            created=NOW,
            host=f"host-of-{name}",
            pid=7,
        )
        await store.create(KEYS.node(name), msgspec.to_builtins(node))
        if condition != "missing":
            await add_session(store, name, condition)
    refs = [NodeRef(f"ready-{state}.1", f"ready-{state}") for state in CONDITIONS[:2]]
    plan = assign(assign(Plan.empty(20), refs[:1]), refs)
    await store.create(KEYS.assignment, msgspec.to_builtins(to_document(plan.assignment)))
    for day, state, number in itertools.product((DAY, OTHER_DAY), STATES, (1, 2)):
        task = f"{state}-{number}"
        claim = Claim(
            task=task,
            token=token_of(task),
            date=day,
            node="ready-live",
            owner="ready-live.1",
            number=1,
            run=number,
            state=state,
            started=100.0,
            ended=None if state == "running" else 200.0,
        )
        await store.create(f"claim/{KEYS.segment}/{day}/{task}", msgspec.to_builtins(claim))
    for creator, patterns, expires in (
        ("a", ("gone-%", "ready-_ive"), None),
        ("b", ("gone-%",), NOW + FAR),
        ("c", ("ready-live",), NOW - FAR),
    ):
        pin = Pin(
            task=f"by-{creator}",
            token=0,
            patterns=patterns,
            reason=f"for {creator}",
            expires_at=expires,
        )
        await store.create(KEYS.pins_of(creator), write_sheet(creator, [pin]))


async def add_roles(store: Store) -> None:
    """Store roles that are led, vacant, withheld and cannot be read."""
    failing = {"x/led": {"callback": "on_become", "error": "KeyError: 1", "at": 5.0, "times": 2}}
    works = ["x/led", "x/vacant", "x/dead", "x/damaged", "x/never"]
    facts = {"host": "h", "pid": 1, "version": "1", "failing": failing}
    await add_session(store, "w1", "live", works=works, holds={"x/led": 3}, facts=facts)
    back = {"withheld": {"x/vacant": "its clock is wrong", "x/new": "it rests"}}
    await add_session(store, "w2", "live", works=["x/led"], facts=back)
    await add_session(store, "w3", "dead", works=works, facts=back)
    past = {"epoch": 1, "worker": "w0", "since": 1.0, "ended": 2.0, "why": "stopped"}
    for name, owner in (("led", "w1.1"), ("vacant", None), ("dead", "w3.1")):
        role = {"epoch": 3, "owner": owner, "since": 50.0, "until": 90.0, "timeout": 15.0}
        await store.create(f"role/x/{name}", {**role, "past": [past] if owner is None else []})
    await store.create("role/x/damaged", {"epoch": "three"})


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A store that no process uses; one session each is silent."""
    place = f"sqlite:///{tmp_path / 'fleet.db'}"
    store = await open_store(place)
    try:
        await add_fleet(store)
        await add_roles(store)
        record = await store.get("session/ready-silent.1")
        assert record is not None

        async def is_silent() -> bool:
            return (await store.age(record) or 0.0) > 0.3

        await until(is_silent, "its timeout has passed")
    finally:
        await store.close()
    return place


async def test_commands_tell_the_state_of_everything_that_is_stored(url: str) -> None:
    """Nodes by stage and session, tasks by date and state, pins by what is in force."""
    found = read_json(url, "tokens")
    states = {node["node"]: node["state"] for node in found["nodes"]}
    for stage, condition in itertools.product(STAGES, CONDITIONS):
        gone = "silent" if condition == "silent" else "dead"
        expected = stage if stage == "left" or condition == "live" else gone
        assert states[f"{stage}-{condition}"] == expected, (stage, condition)
    tokens = {node["node"]: node["tokens"] for node in found["nodes"] if node["tokens"]}
    assert tokens == {"ready-live": 10}
    fields = ("node", "tokens", "incoming", "outgoing", "pinned")
    shares = [tuple(share[field] for field in fields) for share in found["shares"]]
    assert shares == [("ready-live", 10, 0, 10, 0), ("ready-silent", 0, 10, 0, 0)]
    for command, chosen in {"audits": {"done"}, "incomplete": {"running", "failed"}}.items():
        rows = read_json(url, "jobs", command, "--date", DAY)
        assert rows == [
            {
                "task_id": f"{state}-{number}",
                "token": token_of(f"{state}-{number}"),
                "node": "ready-live",
                "state": state,
                "run": number,
                "started": 100.0,
                "ended": None if state == "running" else 200.0,
            }
            for state in sorted(chosen)
            for number in (1, 2)
        ]
        printed = read_tsv(run(url, "jobs", command, "--date", OTHER_DAY).stdout)
        assert [row["task_id"] for row in printed] == [row["task_id"] for row in rows]
    pins = {pin["task_id"]: pin for pin in read_json(url, "pins")}
    # That of the third has expired.
    assert {task: pin["in_force"] for task, pin in pins.items()} == {
        "by-a": "ready-_ive",
        "by-b": None,
    }
    assert pins["by-b"]["expires"] == pytest.approx(NOW + FAR)
    assert [(pin["created_by"], pin["reason"]) for pin in pins.values()] == [
        ("a", "for a"),
        ("b", "for b"),
    ]


async def test_the_cluster_tells_the_state_of_each_role(url: str) -> None:
    """Who leads, who stands back and why, what raises, and past terms; dead workers count not."""
    found = read_json(url, "cluster")
    members = {member["worker_id"]: member for member in found["members"]}
    assert {name: members[name]["state"] for name in ("w1", "w2", "w3")} == {
        "w1": "live",
        "w2": "live",
        "w3": "dead",
    }
    assert (members["w1"]["leads"], members["w1"]["host"]) == (["x/led"], "h")
    assert members["ready-silent"]["state"] == "silent"
    roles = {
        role["work"]: (role["state"], role["epoch"], role["leader"], role["candidates"])
        for role in found["roles"]
    }
    assert roles == {
        "led": ("led", 3, "w1", 2),
        "vacant": ("vacant", 3, None, 1),
        "dead": ("vacant", 3, None, 1),
        "damaged": ("unreadable", 0, None, 1),
        "new": ("vacant", 0, None, 0),
    }
    assert found["failing"] == [
        {
            "work": "x/led",
            "leader": "w1",
            "callback": "on_become",
            "error": "KeyError: 1",
            "at": 5.0,
            "times": 2,
        }
    ]
    assert found["withheld"] == [
        {"work": "x/new", "worker": "w2", "reason": "it rests"},
        {"work": "x/vacant", "worker": "w2", "reason": "its clock is wrong"},
    ]
    (term,) = found["terms"]
    assert (term["work"], term["epoch"], term["worker"], term["why"]) == (
        *("x/vacant", 1, "w0", "stopped"),
    )
    lines = on_terminal(url, 160, "cluster")
    assert any("its clock is wrong" in line for line in lines)
