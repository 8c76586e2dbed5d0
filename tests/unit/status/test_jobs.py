"""What is said of the tasks of a fleet, by its assignment, its nodes and its sessions."""

import itertools
from datetime import date
from typing import Any

import msgspec
import pytest
from chance import FakeClock

from jobsync.components import Components
from jobsync.core.assignment import (
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Plan,
    pack_move,
    token_maker,
)
from jobsync.core.clock import Wall
from jobsync.core.handover import assign
from jobsync.core.pins import Pin
from jobsync.jobs.foreign_claims import Claim
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord
from jobsync.status.jobs import FleetStatus, NodeStatus, PinStatus, ShareStatus, TaskStatus
from jobsync.status.sessions import ClusterStatus, RoleStatus, SessionStatus
from jobsync.status.why import explain
from jobsync.stores.memory import MemoryStore

DAY = date(2026, 1, 5)
TOTAL = 6
KEYS = JobKeys("sync_")
token_of = token_maker(TOTAL)
NODES = {name: NodeRef(f"{name}.1", name) for name in "abc"}


def session(name: str, **changes: Any) -> SessionStatus:
    """Return the session of a node, with some fields changed."""
    defaults: dict[str, Any] = {
        "state": "live",
        "heard": 4.0,
        "timeout": 15.0,
        "works": (),
        "leads": (),
        "facts": {},
    }
    return SessionStatus(worker_id=name, incarnation=f"{name}.1", **{**defaults, **changes})


def node(name: str, **changes: Any) -> NodeRecord:
    """Return the record of a node, with some fields changed."""
    defaults: dict[str, Any] = {"stage": "ready", "applied": 0, "is_observer": False, "pid": 1}
    more = {"created": 0.0, "host": "", **defaults, **changes}
    return NodeRecord(name=name, incarnation=f"{name}.1", **more)


def open_fleet(
    plan: Plan,
    nodes: list[NodeRecord],
    sessions: list[SessionStatus] | None = None,
    roles: list[RoleStatus] | None = None,
) -> FleetStatus:
    """Return the status of a fleet on an empty store."""
    components = Components.system()
    store = MemoryStore(components=components)
    cluster = ClusterStatus(sessions=sessions or [], roles=roles or [])
    return FleetStatus(store, components, "sync_", nodes, cluster, plan, token_of)


async def read_task(
    task: str,
    plan: Plan,
    nodes: list[NodeRecord],
    sessions: list[SessionStatus],
    claimed_by: str = "",
) -> TaskStatus:
    """Return the status of a task, which a node may have claimed."""
    fleet = open_fleet(plan, nodes, sessions)
    if claimed_by:
        claim = Claim(
            task=task,
            token=token_of(task),
            date=DAY.isoformat(),
            node=claimed_by,
            owner=f"{claimed_by}.1",
            number=1,
            run=1,
            state="running",
            started=0.0,
        )
        await fleet._store.create(KEYS.claim(DAY, task), msgspec.to_builtins(claim))
    return await fleet.task(task, DAY)


def plan_of(*names: str, before: Plan | None = None, pins: tuple[Pin, ...] = ()) -> Plan:
    """Return the next plan, for these nodes."""
    return assign(before or Plan.empty(TOTAL), [NODES[name] for name in names], pins=pins)


def test_all_of_a_node_is_shown() -> None:
    """The oldest first, with what it owns, also of those that are gone."""
    plan = plan_of("a", "b")
    nodes = [
        node("c", stage="left", created=3.0, host="h3", pid=33),
        node("a", created=1.0, host="h1", pid=11),
        node("b", created=2.0, host="h2", pid=22, stage="leaving"),
    ]
    leads = RoleStatus(namespace="sync_", work="jobs", state="led", leader="b", candidates=2)
    fleet = open_fleet(plan, nodes, [session("a", heard=7.0), session("b")], [leads])
    changes: dict[str, dict[str, Any]] = {
        "a": {"state": "ready", "heard": 7.0},
        "b": {"state": "leaving", "heard": 4.0, "leads": True},
        "c": {"state": "left", "heard": None, "tokens": 0},
    }
    expected: list[NodeStatus] = []
    for number, (name, facts) in enumerate(changes.items(), 1):
        fields: dict[str, Any] = {"tokens": 3, "leads": False, **facts}
        fields |= {"host": f"h{number}", "pid": 11 * number, "joined": float(number)}
        expected.append(NodeStatus(node=name, incarnation=f"{name}.1", **fields))
    assert fleet.nodes() == expected


async def test_all_of_a_pin_is_shown() -> None:
    """By token, then by task; what is in force is the first pattern that a node matches."""
    names = sorted((f"t{number}" for number in range(9)), key=lambda name: (token_of(name), name))
    assert names != sorted(names)
    fleet = open_fleet(plan_of("a", "b"), [node("a"), node("b")])
    expires = fleet._clock.wall().seconds + 60
    for creator, chosen in (("b", names[:4]), ("a", names[4:])):
        pins = [
            Pin(
                task=name,
                token=token_of(name),
                patterns=("x", creator),
                reason=f"for {name}",
                created_by=creator,
                expires_at=expires,
            )
            for name in reversed(chosen)
        ]
        await fleet._pin_store.add(creator, pins)
    assert await fleet.pins() == [
        PinStatus(
            task_id=name,
            token=token_of(name),
            patterns=("x", creator),
            in_force=creator,
            reason=f"for {name}",
            created_by=creator,
            expires=expires,
        )
        for name in names
        for creator in ("b" if name in names[:4] else "a")
    ]


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
async def test_a_task_moves_as_its_token_does_unless_it_has_left_it(names: str) -> None:
    """Owners and targets of all tasks agree with what the nodes themselves see."""
    tasks = [f"t{number}" for number in range(40)]
    first = plan_of("a", "b")
    pinned = next(task for task in tasks if token_of(task) in first.seen_by("a.1").tokens)
    token = token_of(pinned)
    # Two tasks of one token whose pins disagree: one of them leaves it.
    other = next(f"u{n}" for n in range(999) if token_of(f"u{n}") == token)
    pins = (
        Pin(task=pinned, token=token, patterns=("b",)),
        Pin(task=other, token=token, patterns=("a",)),
    )
    acks = {ref.incarnation: 99 for ref in NODES.values()}
    plan = first
    for _ in range(4):
        plan = assign(plan, [NODES["a"], NODES["b"]], pins=pins, acks=acks)
    assert plan.exceptions.tasks
    plan = plan_of(*names, before=plan, pins=pins)
    moving = {
        token: plan.assignment.nodes[move.taker - 1].name if move.taker else None
        for move in plan.assignment.moves
        for start, count in zip(move.starts, move.counts, strict=True)
        for token in range(start, start + count)
    }
    shares = {share.node: share for share in open_fleet(plan, []).shares()}
    for name, share in shares.items():
        assert share.tokens == len(plan.seen_by(f"{name}.1").tokens)
        assert share.pinned == len(plan.seen_by(f"{name}.1").own)
        assert share.incoming == sum(target == name for target in moving.values())
        assert share.outgoing == sum(
            sum(move.counts)
            for move in plan.assignment.moves
            if move.giver and plan.assignment.nodes[move.giver - 1].name == name
        )
    assert sum(share.outgoing for share in shares.values()) == len(moving)
    apart = {exempt.task: exempt for exempt in plan.exceptions.tasks}
    nodes = [node(name) for name in "abc"]
    for task in [*tasks, other]:
        status = await read_task(task, plan, nodes, [])
        owners: list[str | None] = [
            name
            for name, ref in NODES.items()
            if plan.seen_by(ref.incarnation).covers(task, token_of(task))
        ]
        assert [status.owner] == (owners or [None])
        if task in apart:
            taker = apart[task].taker
            target = plan.exceptions.nodes[taker - 1].name if taker else None
        else:
            target = moving.get(token_of(task))
        assert status.moving_to == target
        assert not (status.owner and status.moving_to)


def name_tasks() -> dict[int, list[str]]:
    """Return three tasks of each token."""
    names = [f"t{number}" for number in range(200)]
    return {
        token: [name for name in names if token_of(name) == token][:3] for token in range(TOTAL)
    }


@pytest.mark.parametrize("listed", ["ab", "bc", "cb", "ac", "cab", "bca", "abc"])
@pytest.mark.parametrize(("giver", "taker"), [*itertools.permutations("abc", 2)])
async def test_each_list_of_nodes_has_its_own_numbers(listed: str, giver: str, taker: str) -> None:
    """A task that has left its token moves between the nodes that its own document lists.

    The assignment lists a, b and c. Two of c's four tokens move to a, and tasks of b's two tokens
    rest at one node or move to another, which stand in the other document in another order.
    """
    if not {giver, taker} <= {*listed}:
        listed = taker + giver
    tasks = name_tasks()
    (moved, rests, follows), (lost, *_) = tasks[0], tasks[1]
    own = {name: place for place, name in enumerate(listed, 1)}
    exempt = [
        Exempt(moved, 0, own[giver], own[taker], 7),
        Exempt(rests, 0, own[taker]),
        Exempt(lost, 1, own[giver], 0, 7),
    ]
    assignment = Assignment(
        9,
        TOTAL,
        nodes=tuple(NODES.values()),
        starts=(0, 2),
        holders=(2, 3),
        moves=(pack_move(3, 1, 8, [2, 5]),),
        exceptions="9-x",
    )
    listed_nodes = tuple(NODES[name] for name in listed)
    plan = Plan(assignment, Exceptions(listed_nodes, tuple(sorted(exempt, key=lambda e: e.task))))
    nodes = [node(name) for name in "abc"]
    shown: dict[str, tuple[str | None, str | None]] = {}
    for name in (moved, rests, follows, lost, tasks[2][0], tasks[3][0]):
        status = await read_task(name, plan, nodes, [])
        assert (status.task_id, status.token) == (name, token_of(name))
        shown[name] = (status.owner, status.moving_to)
    assert shown == {
        moved: (None, taker),
        rests: (taker, None),
        follows: ("b", None),
        lost: (None, None),
        tasks[2][0]: (None, "a"),
        tasks[3][0]: ("c", None),
    }
    fleet = open_fleet(plan, nodes)
    assert fleet.number == 9
    assert fleet.shares() == [
        ShareStatus(
            node=name,
            tokens={"a": 0, "b": 2, "c": 2}[name],
            incoming=2 if name == "a" else 0,
            outgoing=2 if name == "c" else 0,
            pinned=int(name == taker),
        )
        for name in "abc"
    ]
    assert [each.tokens for each in fleet.nodes()] == [0, 2, 2]


@pytest.mark.parametrize("members", ["a", "b", "ab"])
async def test_a_pin_is_in_force_by_the_nodes_of_the_assignment(members: str) -> None:
    """Those that have left, or are about to join, satisfy no pattern; the next one counts."""
    fleet = open_fleet(plan_of(*members), [node(name) for name in "abc"])
    for creator, patterns in (("a", ("c", "b", "a")), ("b", ("c%", "%"))):
        token = token_of("t")
        pins = [Pin(task="t", token=token, patterns=patterns, created_by=creator)]
        await fleet._pin_store.add(creator, pins)
    found = {pin.created_by: pin.in_force for pin in await fleet.pins()}
    assert found == {"a": "b" if "b" in members else "a", "b": "%"}
    assert len((await fleet.task("t", DAY)).pins) == 2
    # Of the same token.
    other = name_tasks()[token_of("t")][0]
    assert (await fleet.task(other, DAY)).pins == []


@pytest.mark.parametrize(
    ("owner", "holder", "code", "delay"),
    [
        ({}, {}, "running", 60.0),
        ({}, {"timeout": 90.0}, "running", 360.0),
        ({"reclaim_after": 7.0}, {}, "running", 7.0),
        ({}, {"state": "dead"}, "abandoned", 60.0),
        ({"reclaim_after": 7.0}, {"state": "dead"}, "abandoned", 7.0),
        ({}, {"state": "dead", "has_ended": True}, "abandoned", 0.0),
        (
            {"reclaim_after": 7.0, "reclaim_ended_after": 7.0},
            {"state": "dead", "has_ended": True},
            "abandoned",
            7.0,
        ),
        ({}, {"state": "silent", "heard": 20.0}, "owner-silent", 60.0),
        ({"reclaim_after": 7.0}, {"state": "silent", "heard": 20.0}, "owner-silent", 7.0),
        ({"reclaim_after": 7.0}, None, "abandoned", 7.0),
        ({}, None, "abandoned", 60.0),
    ],
)
async def test_when_a_task_of_another_node_may_be_started(
    owner: dict[str, Any], holder: dict[str, Any] | None, code: str, delay: float
) -> None:
    """By the settings of the node that owns it now, and by what is known of the other's end."""
    sessions = [session("a"), *([] if holder is None else [session("b", **holder)])]
    status = await read_task("t", plan_of("a"), [node("a", **owner), node("b")], sessions, "b")
    reason = explain(status)
    assert (status.owner, status.reclaim_after, reason.code) == ("a", delay, code)
    heard = None if holder is None else holder.get("heard", 4.0)
    assert (status.last_heard is None) is (heard is None)
    if status.last_heard is not None and heard is not None:
        now = Components.system().clock.wall().seconds
        assert status.last_heard == pytest.approx(now - heard, abs=30)
        wait = {"abandoned": delay, "owner-silent": 15.0 + delay}.get(code)
        assert reason.until == (status.last_heard + wait if wait else None)


@pytest.mark.parametrize(
    ("leaders", "found"),
    [
        ({}, None),
        ({"sync_/jobs": "a"}, "a"),
        ({"sync_/jobs": None}, None),
        # Those of another fleet, and of other work in this one.
        ({"other/jobs": "b"}, None),
        ({"sync_/queue-emails": "b"}, None),
        ({"other/jobs": "b", "sync_/jobs": "a"}, "a"),
        ({"sync_/cleanup": "b", "sync_/jobs": "a"}, "a"),
        ({"other/cleanup": "b", "sync_/scheduler": "b", "other/jobs": "b"}, None),
    ],
)
def test_the_leader_is_that_of_the_tasks_of_this_fleet(
    leaders: dict[str, str | None], found: str | None
) -> None:
    """One store has many roles: of other fleets, and of other work."""
    roles = []
    for name, leader in leaders.items():
        namespace, work = name.split("/")
        state: Any = "vacant" if leader is None else "led"
        role = RoleStatus(namespace=namespace, work=work, state=state, leader=leader, candidates=2)
        roles.append(role)
    nodes = [node(name) for name in "ab"]
    for order in (roles, roles[::-1]):
        fleet = open_fleet(plan_of("a", "b"), nodes, [session("a"), session("b")], order)
        assert [each.node for each in fleet.nodes() if each.leads] == [*filter(None, [found])]


@pytest.mark.parametrize("stage", ["joining", "ready", "leaving", "left"])
@pytest.mark.parametrize("state", [None, "live", "silent", "dead"])
def test_the_condition_of_a_node_is_told_by_its_record_and_its_session(
    state: str | None, stage: str
) -> None:
    """One that has left in order is not dead, whatever has become of its session."""
    sessions = [] if state is None else [session("a", state=state)]
    (shown,) = open_fleet(plan_of("a"), [node("a", stage=stage)], sessions).nodes()
    if stage == "left":
        expected = "left"
    elif state == "live":
        expected = stage
    else:
        expected = "silent" if state == "silent" else "dead"
    assert shown.state == expected


@pytest.mark.parametrize("heard", [None, 4.0])
@pytest.mark.parametrize("now", [None, 500.0])
async def test_when_a_node_was_last_heard_is_told_by_the_clock_of_the_store(
    monkeypatch: pytest.MonkeyPatch, now: float | None, heard: float | None
) -> None:
    """By this machine's, where the store has none; not at all, if nobody knows."""
    clock = FakeClock()
    clock.wall_seconds = 900.0
    fleet = open_fleet(plan_of("a"), [node("a")], [session("a", heard=heard, state="dead")])

    async def read_now() -> Wall | None:
        return None if now is None else Wall(now)

    monkeypatch.setattr(fleet._store, "now", read_now)
    monkeypatch.setattr(fleet, "_clock", clock)
    (found,) = fleet._sessions.values()
    expected = None if heard is None else (900.0 if now is None else now) - heard
    assert await fleet._find_last_write(found) == expected
    assert await fleet._find_last_write(None) is None


def test_all_tokens_that_move_away_are_counted() -> None:
    """To whichever nodes they move."""
    plan = plan_of("a", "b", "c", before=plan_of("a"))
    shares = {
        share.node: share for share in open_fleet(plan, [node(name) for name in "abc"]).shares()
    }
    assert {name: share.outgoing for name, share in shares.items()} == {"a": 4, "b": 0, "c": 0}
    assert {name: share.incoming for name, share in shares.items()} == {"a": 0, "b": 2, "c": 2}


def test_all_pins_that_no_node_matches_are_named() -> None:
    """Several pins of a task are alternatives."""
    pins = [
        PinStatus(
            task_id="x",
            token=1,
            patterns=patterns,
            in_force=None,
            reason=None,
            created_by="a",
            expires=None,
        )
        for patterns in (("p%", "q%"), ("r%",))
    ]
    status = TaskStatus(
        task_id="x",
        token=1,
        owner=None,
        moving_to=None,
        pins=pins,
        claim=None,
        claimed_by=None,
        last_heard=None,
        timeout=0.0,
        reclaim_after=0.0,
    )
    reason = explain(status)
    assert (reason.code, reason.text) == (
        "unmatched-pin",
        "pinned to p% or q% or r%, which no live node matches",
    )
