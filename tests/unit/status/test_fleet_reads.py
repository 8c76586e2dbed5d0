"""The status of a fleet as a command reads it: nodes whose workers have names of their own."""

from collections.abc import Callable
from datetime import date
from typing import Any

import msgspec
import pytest

from jobsync.components import Components
from jobsync.core.assignment import (
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Plan,
    token_maker,
)
from jobsync.core.plan_documents import to_document
from jobsync.errors import Corrupt, NotFound
from jobsync.jobs.foreign_claims import Claim
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord
from jobsync.status.jobs import (
    FleetStatus,
    NodeStatus,
    ShareStatus,
    TaskStatus,
    read_fleet_status,
)
from jobsync.status.sessions import ClusterStatus, RoleStatus, SessionStatus
from jobsync.stores.contract import Put, Record
from jobsync.stores.memory import MemoryStore

DAY = date(2026, 1, 5)
TOTAL = 6
KEYS = JobKeys("sync_")
token_of = token_maker(TOTAL)
WORKERS = {"a": "b", "b": "c", "c": "a"}
"""The worker of each node: another one has the name of the node."""

SPANS = [range(3), range(3, 5), range(5, 6)]
"""The tokens of the nodes a, b and c."""


def incarnation_of(name: str) -> str:
    """Return the session of a node."""
    return f"{WORKERS[name]}.1"


def task_of(token: int) -> str:
    """Return the first task of a token."""
    return next(f"t{n}" for n in range(999) if token_of(f"t{n}") == token)


def build_assignment(number: int = 5, exceptions: str = "") -> Assignment:
    """Return the tokens of the three nodes."""
    refs = tuple(NodeRef(incarnation_of(name), name) for name in "abc")
    return Assignment(number, TOTAL, refs, (0, 3, 5), (1, 2, 3), exceptions=exceptions)


NODES = [
    NodeRecord(
        name=name,
        incarnation=incarnation_of(name),
        stage="ready",
        applied=0,
        is_observer=False,
        host=f"h{name}",
        pid=place,
        created=float(place),
        reclaim_after=60.0 + place,
    )
    for place, name in enumerate("abc", 1)
]
SESSIONS = [
    SessionStatus(
        worker_id=WORKERS[name],
        incarnation=incarnation_of(name),
        state="silent" if name == "b" else "live",
        heard=float(place),
        timeout=10.0 * place,
        works=(),
        leads=(),
        facts={},
    )
    for place, name in enumerate("abc", 1)
]


def open_fleet() -> FleetStatus:
    """Return the status of the fleet, which the worker of c leads."""
    components = Components.system()
    role = RoleStatus(namespace="sync_", work="jobs", state="led", leader="a", candidates=3)
    cluster = ClusterStatus(sessions=SESSIONS, roles=[role])
    store = MemoryStore(components=components)
    return FleetStatus(
        store, components, "sync_", NODES, cluster, Plan(build_assignment()), token_of
    )


def test_nodes_have_names_and_sessions_of_their_own() -> None:
    """What a session tells is told of its node, and the oldest session comes first."""
    expected = [
        NodeStatus(
            node=name,
            state="silent" if name == "b" else "ready",
            leads=name == "c",
            tokens=len(SPANS[place - 1]),
            heard=float(place),
            host=f"h{name}",
            pid=place,
            joined=float(place),
            incarnation=incarnation_of(name),
        )
        for place, name in enumerate("abc", 1)
    ]
    fleet = open_fleet()
    assert fleet.nodes() == [expected[2], expected[0], expected[1]]
    assert fleet.shares() == [
        ShareStatus(node=name, tokens=len(span), incoming=0, outgoing=0, pinned=0)
        for name, span in zip("abc", SPANS, strict=True)
    ]


@pytest.mark.parametrize("claimed_by", [None, *"abc", "gone"])
@pytest.mark.parametrize("owner", "abc")
async def test_a_task_is_described_by_its_owner_and_by_the_node_that_has_claimed_it(
    monkeypatch: pytest.MonkeyPatch, owner: str, claimed_by: str | None
) -> None:
    """On that date alone: each fact is that of the node, or of the session, that it is about."""
    fleet = open_fleet()
    task = task_of(SPANS["abc".index(owner)][0])
    claim = None
    if claimed_by is not None:
        session = "x.1" if claimed_by == "gone" else incarnation_of(claimed_by)
        claim = Claim(
            task=task,
            token=token_of(task),
            date=DAY.isoformat(),
            node=claimed_by,
            owner=session,
            number=1,
            run=1,
            state="running",
            started=0.0,
        )
        await fleet._store.create(KEYS.claim(DAY, task), msgspec.to_builtins(claim))
    clock = Components.system().clock.wall()
    monkeypatch.setattr(fleet._store, "now", lambda: as_awaited(clock))
    known = claimed_by in set("abc")
    place = "abc".index(claimed_by) + 1 if claimed_by is not None and known else 0
    conditions = {"a": "ready", "b": "silent", "c": "ready", "gone": "dead", None: None}
    expected: dict[str, Any] = {
        "claim": claim,
        "claimed_by": conditions[claimed_by],
        "last_heard": clock.seconds - place if place else None,
        "timeout": 10.0 * place,
    }
    fixed: dict[str, Any] = {
        "task_id": task,
        "token": token_of(task),
        "owner": owner,
        "moving_to": None,
        "pins": [],
        "reclaim_after": 61.0 + "abc".index(owner),
    }
    assert await fleet.task(task, DAY) == TaskStatus(**fixed, **expected)
    other = await fleet.task(task, date(2026, 1, 6))
    nothing: dict[str, Any] = {
        "claim": None,
        "claimed_by": None,
        "last_heard": None,
        "timeout": 0.0,
    }
    assert other == TaskStatus(**fixed, **nothing)


async def as_awaited(value: Any) -> Any:
    """Return a value, later."""
    return value


class ChangingStore(MemoryStore):
    """Lets others do something just after the assignment was read."""

    then: Callable[[], Any] | None = None

    async def get(self, key: str, **options: Any) -> Record | None:
        record = await super().get(key, **options)
        if key == KEYS.assignment and self.then is not None:
            then, self.then = self.then, None
            await then()
        return record


async def open_store(hash_function: str = "md5") -> ChangingStore:
    """Return a store that has a fleet without an assignment."""
    store = ChangingStore()
    await store.create(KEYS.settings, {"total_tokens": TOTAL, "hash_function": hash_function})
    return store


async def read(store: MemoryStore, fleet: str = "sync_") -> FleetStatus:
    """Return the status as a command reads it."""
    return await read_fleet_status(store, Components.system(), fleet)


async def test_a_fleet_that_has_never_been_is_not_found() -> None:
    """Another one on the same store does not count."""
    store = await open_store()
    with pytest.raises(NotFound, match="other"):
        await read(store, "other")
    assert (await read(store)).number == 0


@pytest.mark.parametrize("hash_function", ["md5", "sha256", "double_sha256"])
async def test_a_task_has_the_token_that_its_fleet_gives_it(hash_function: str) -> None:
    """By the function that the fleet has settled on."""
    fleet = await read(await open_store(hash_function))
    for task in ("t", "t1", "t2"):
        assert (await fleet.task(task, DAY)).token == token_maker(TOTAL, hash_function)(task)


@pytest.mark.parametrize("epoch", [None, 3])
async def test_a_fleet_whose_leader_has_assigned_nothing_yet_has_no_shares(
    epoch: int | None,
) -> None:
    """With a record that only says who may write it, and without one."""
    store = await open_store()
    if epoch is not None:
        await store.write([Put(KEYS.assignment, None, epoch=epoch)])
    fleet = await read(store)
    assert (fleet.number, fleet.shares()) == (0, [])
    assert (await fleet.task("t", DAY)).owner is None


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_a_plan_is_read_again_as_often_as_it_is_replaced_meanwhile(times: int) -> None:
    """Only one whose second part is missing although nobody replaces it is damaged."""
    store = await open_store()
    record = await store.create(
        KEYS.assignment, to_document(build_assignment(1, exceptions="1-gone"))
    )
    number = 1

    async def replace() -> None:
        nonlocal number, record
        number += 1
        name = f"{number}-gone"
        record = await store.put(record, to_document(build_assignment(number, exceptions=name)))
        if number <= times:
            store.then = replace

    store.then = replace
    with pytest.raises(Corrupt, match="is missing"):
        await read(store)
    assert number == times + 1
    await store.create(KEYS.exceptions(f"{number}-gone"), to_document(Exceptions((), ())))
    assert (await read(store)).number == number


async def test_a_plan_that_is_replaced_while_it_is_read_is_read_again() -> None:
    """Its two parts belong together: never those of two plans, and never one without the other."""
    store = await open_store()
    task = task_of(0)
    after = Exceptions((NodeRef(incarnation_of("c"), "c"),), (Exempt(task, 0, 1),))
    first = await store.create(
        KEYS.assignment, to_document(build_assignment(5, exceptions="5-gone"))
    )

    async def replace() -> None:
        await store.create(KEYS.exceptions("6-new"), to_document(after))
        await store.put(first, to_document(build_assignment(6, exceptions="6-new")))

    store.then = replace
    fleet = await read(store)
    assert fleet.number == 6
    assert (await fleet.task(task, DAY)).owner == "c"
    assert [(share.node, share.pinned) for share in fleet.shares()] == [
        ("a", 0),
        ("b", 0),
        ("c", 1),
    ]
