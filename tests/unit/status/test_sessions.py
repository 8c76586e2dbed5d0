"""Which workers have stopped by themselves, and which have died."""

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from jobsync import Components, Database, QueuePlugin
from jobsync.cli import cluster as module
from jobsync.coordination.role import ROLES, PastTerm
from jobsync.coordination.session import SESSIONS, HookFailure
from jobsync.core.keys import escape
from jobsync.processes import SystemProcesses
from jobsync.status.sessions import (
    ClusterStatus,
    RoleStatus,
    SessionStatus,
    read_cluster_status,
)
from jobsync.stores.contract import Record
from jobsync.stores.memory import MemoryStore

ROLE = "default/queue-emails"


async def _read_ends() -> ClusterStatus:
    """Return the status of a worker that has stopped, and of others that ended in other ways."""
    store = MemoryStore()
    database = Database(connection=store, plugins=[QueuePlugin("emails", on_message=print)])
    async with database:
        (record,) = await store.scan(SESSIONS)
    idle = {**record.value, "state": "dead", "works": [], "holds": {}, "facts": {"host": "h"}}
    process = SystemProcesses().identify()
    assert process is not None
    # As if the number of this process had been another's before.
    gone = msgspec.to_builtins(msgspec.structs.replace(process, started=process.started - 1))
    live = {"state": "live", "works": [ROLE], "holds": {ROLE: 1}}
    ends: dict[str, dict[str, Any]] = {
        "killed": live | {"process": gone},
        "led": {"holds": {ROLE: 1}},
        "lost": {},
        "vanished": {"ended": True},
    }
    for name, changes in ends.items():
        await store.create(f"{SESSIONS}{name}.1", {**idle, "worker": name, **changes})
    return await read_cluster_status(store, Components.system())


async def test_a_worker_that_stops_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop in order is stored; one that was killed is dead, also if nobody has recorded it."""
    status = await _read_ends()
    left = {session.worker_id: session.has_left for session in status.sessions}
    stopped = [worker for worker, has_left in left.items() if has_left]
    assert [worker for worker in left if worker not in stopped] == [
        *("killed", "led", "lost", "vanished")
    ]
    assert len(stopped) == 1
    monkeypatch.setattr(module, "run_on_store", lambda _, __: status)
    shown = json.loads(CliRunner().invoke(module.cluster, ["--json"]).stdout)["members"]
    assert {row["worker_id"]: (row["state"], row["leads"]) for row in shown} == {
        worker: ("ended" if worker in stopped else "dead", []) for worker in left
    }


@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("state", ["live", "silent", "dead"])
def test_all_that_is_known_of_a_worker_and_its_roles_is_shown(
    monkeypatch: pytest.MonkeyPatch, state: Any, has_left: bool
) -> None:
    """What a dead one led, and what one that has ended worked at, is no longer its own."""
    session = SessionStatus(
        worker_id="w",
        incarnation="w.1",
        state=state,
        heard=3.0,
        timeout=15.0,
        works=(ROLE,),
        leads=(ROLE,),
        facts={"host": "here", "pid": 42, "version": "1.2"},
        has_left=has_left,
    )
    past = PastTerm(epoch=1, worker="v", since=1.0, ended=2.0, why="stopped")
    failing = HookFailure(callback="work", error="KeyError: 1", at=5.0, times=2)
    role = RoleStatus(
        namespace="default",
        work="queue-emails",
        state="led",
        epoch=2,
        leader="w",
        candidates=1,
        since=2.0,
        until=9.0,
        failing=failing,
        withheld={"x": "it rests"},
        past=(past,),
    )
    plain = RoleStatus(namespace="default", work="ttl", state="vacant", candidates=0)
    status = ClusterStatus(sessions=[session], roles=[role, plain])
    monkeypatch.setattr(module, "run_on_store", lambda _, __: status)
    found = json.loads(CliRunner().invoke(module.cluster, ["--json"]).stdout)
    times = {"since": None, "until": None}
    assert found == {
        "members": [
            {
                "worker_id": "w",
                "state": "ended" if has_left else state,
                "heard": 3.0,
                "host": "here",
                "pid": 42,
                "version": "1.2",
                "leads": [] if state == "dead" else [ROLE],
                "works": [] if has_left else [ROLE],
            }
        ],
        "roles": [
            {"namespace": "default", "work": "queue-emails", "state": "led", "epoch": 2}
            | {"leader": "w", "candidates": 1, "since": 2.0, "until": 9.0},
            {"namespace": "default", "work": "ttl", "state": "vacant", "epoch": 0}
            | {"leader": None, "candidates": 0, **times},
        ],
        "failing": [{"work": ROLE, "leader": "w", **msgspec.structs.asdict(failing)}],
        "withheld": [{"work": ROLE, "worker": "x", "reason": "it rests"}],
        "terms": [{"work": ROLE, **msgspec.to_builtins(past)}],
    }


@pytest.mark.parametrize(
    ("changes", "age", "state", "expected", "candidates"),
    [
        ({}, 14.0, "live", "led", 1),
        ({}, 15.0, "live", "led", 1),
        ({}, 16.0, "silent", "silent", 0),
        # A store without a clock does not tell.
        ({}, None, "live", "led", 1),
        ({"state": "dead"}, 1.0, "dead", "vacant", 0),
        # It is no candidate any more, and holds the role.
        ({"works": []}, 14.0, "live", "led", 0),
    ],
)
async def test_a_role_is_led_while_its_leader_sends_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    age: float | None,
    state: str,
    expected: str,
    candidates: int,
) -> None:
    """If they are missing, it is silent; a dead one leaves it vacant, without an end."""
    store = MemoryStore()
    session = {
        "worker": "w",
        "state": "live",
        "beat": 1,
        "timing": {"beat": 5.0, "timeout": 15.0},
        "works": [ROLE],
        "holds": {ROLE: 1},
    }
    role = {"epoch": 1, "owner": "w.1", "since": 1.0, "until": 2.0, "timeout": 15.0}
    await store.create(f"{SESSIONS}w.1", session | changes)
    await store.create(f"{ROLES}{ROLE}", role)

    async def read_age(_: Record) -> float | None:
        return age

    monkeypatch.setattr(store, "age", read_age)
    status = await read_cluster_status(store, Components.system())
    assert status.sessions[0].state == state
    (shown,) = status.roles
    assert (shown.state, shown.candidates) == (expected, candidates)
    is_vacant = expected == "vacant"
    assert (shown.until is None, shown.leader is None) == (is_vacant, is_vacant)


def describe(name: str, *roles: str, **changes: Any) -> dict[str, Any]:
    """Return the session of a live candidate for some roles."""
    timing = {"beat": 5.0, "timeout": 15.0}
    return {"worker": name, "state": "live", "beat": 1, "timing": timing, "works": roles, **changes}


@pytest.mark.parametrize("leader", ["a", "b", None])
async def test_what_is_failing_is_what_the_leader_raises(leader: str | None) -> None:
    """In this role, and not what another worker has raised when it led."""
    store = MemoryStore()
    failures: dict[str, dict[str, Any]] = {
        name: {
            role: {"callback": "work", "error": f"{name} {role}", "at": 1.0, "times": 2}
            for role in (ROLE, "default/other")
        }
        for name in ("a", "c")
    }
    for name in ("a", "b", "c"):
        facts = {"failing": failures[name]} if name in failures else {}
        await store.create(f"{SESSIONS}{name}.1", describe(name, ROLE, facts=facts))
    owner = None if leader is None else f"{leader}.1"
    role = {"epoch": 1, "owner": owner, "since": 1.0, "until": 2.0, "timeout": 15.0}
    await store.create(f"{ROLES}{ROLE}", role)
    (shown,) = (await read_cluster_status(store, Components.system())).roles
    expected = HookFailure(callback="work", error=f"a {ROLE}", at=1.0, times=2)
    assert shown.failing == (expected if leader == "a" else None)


@pytest.mark.parametrize("case", ["newer", "damaged"])
async def test_a_role_that_cannot_be_read_hides_no_other(case: str) -> None:
    """It is shown with its candidates, and so are the roles that can be read."""
    store = MemoryStore()
    names = [f"default/{name}" for name in ("a", "b")]
    await store.create(f"{SESSIONS}w.1", describe("w", *names))
    role = {"epoch": 1, "owner": "w.1", "since": 1.0, "until": 2.0, "timeout": 15.0}
    await store.create(f"{ROLES}{names[1]}", role)
    if case == "newer":
        await store.create(f"{ROLES}{names[0]}", {"other": "words"}, format=2)
    else:
        await store.create(f"{ROLES}{names[0]}", {"epoch": "one"})
    roles = (await read_cluster_status(store, Components.system())).roles
    assert [(each.work, each.state, each.candidates, each.leader) for each in roles] == [
        ("a", "unreadable", 1, None),
        ("b", "led", 1, "w"),
    ]


async def test_roles_are_shown_as_people_name_them() -> None:
    """Without the escapes of keys: those that a worker works at, and those that it leads."""
    store = MemoryStore()
    namespace, works = "Größe 1", ["queue-a/b", "ttl"]
    names = [f"{escape(namespace)}/{escape(work)}" for work in works]
    holds = dict.fromkeys(reversed(names), 1)
    await store.create(f"{SESSIONS}w.1", describe("w", *names, holds=holds))
    for name in names:
        role = {"epoch": 1, "owner": "w.1", "since": 1.0, "until": 2.0, "timeout": 15.0}
        await store.create(f"{ROLES}{name}", role)
    status = await read_cluster_status(store, Components.system())
    expected = tuple(f"{namespace}/{work}" for work in works)
    assert (status.sessions[0].works, status.sessions[0].leads) == (expected, expected)
    assert [(each.namespace, each.work) for each in status.roles] == [
        (namespace, work) for work in works
    ]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("ended", [None, False, True])
@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_process_that_was_seen_to_have_ended_is_told_from_one_that_fell_silent(
    is_gone: bool, ended: bool | None, is_recorded: bool
) -> None:
    """By what the one has stored who recorded the death; before that, by a look at the process.

    Its tasks are started at once then, and not after a delay.
    """
    store = MemoryStore()
    process = SystemProcesses().identify()
    assert process is not None
    if is_gone:
        process = msgspec.structs.replace(process, started=process.started - 1)
    session = {
        "worker": "w",
        "state": "dead" if is_recorded else "live",
        "beat": 1,
        "timing": {"beat": 5.0, "timeout": 15.0},
        "process": msgspec.to_builtins(process),
        **({} if ended is None else {"ended": ended}),
    }
    await store.create(f"{SESSIONS}w.1", session)
    (shown,) = (await read_cluster_status(store, Components.system())).sessions
    # A death that was recorded for another reason is not explained anew.
    assert shown.has_ended is (ended is True or (is_gone and not is_recorded))
    assert shown.state == ("dead" if is_recorded or shown.has_ended else "live")
    assert not shown.has_left
