"""Which nodes of a fleet own tokens, when the leader looks, reads the pins, decides and writes."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness
from waiting import until

from jobsync import Components, Fenced, Membership, OutcomeUnknown, Term, Unavailable
from jobsync.core import plan_documents
from jobsync.core.assignment import (
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Plan,
    TokenMove,
    served_by,
)
from jobsync.core.handover import assign
from jobsync.core.plan_documents import (
    name_exceptions,
    read_plan,
    split_exceptions,
    to_document,
)
from jobsync.events import Events
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.job_lifecycle import _EXIT_GRACE, JobLifecycle
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.node_loop import NodeLoop
from jobsync.jobs.pins import Pins
from jobsync.jobs.rebalancer import Rebalancer, _find_members, fetch_plan
from jobsync.jobs.registration import NodeRecord, find_candidates
from jobsync.stores.contract import Record
from jobsync.stores.memory import MemoryStore


def node(name: str, **changes: Any) -> NodeRecord:
    """Return a node that is ready, unless the changes say otherwise."""
    fields = {"stage": "ready", "is_observer": False, "minimum_nodes": 0, **changes}
    return NodeRecord(
        name=name, incarnation=f"{name}.1", applied=0, created=0.0, host="", pid=1, **fields
    )


@pytest.mark.parametrize("stage", ["joining", "ready", "leaving", "left"])
@pytest.mark.parametrize("minimum", [0, 2])
@pytest.mark.parametrize("is_observer", [False, True])
@pytest.mark.parametrize("is_dead", [False, True])
def test_candidates_are_ready_or_wait_for_others(
    stage: Any, minimum: int, is_observer: bool, is_dead: bool
) -> None:
    """One that joins counts once it is prepared to own tokens; the others never do."""
    one = node("a", stage=stage, minimum_nodes=minimum, is_observer=is_observer)
    found = find_candidates([one, node("b")], {"a.1"} if is_dead else set())
    takes_part = stage == "ready" or (stage == "joining" and minimum > 0)
    is_candidate = takes_part and not is_observer and not is_dead
    assert [each.name for each in found] == (["a", "b"] if is_candidate else ["b"])


@pytest.mark.parametrize("known", ["", "a", "ab"])
def test_a_node_owns_tokens_once_enough_have_joined(known: str) -> None:
    """As soon as there are as many as it waits for, and from then on; 0 waits for nobody."""
    before = assign(Plan.empty(12), [NodeRef(f"{name}.1", name) for name in known])
    for minimums in itertools.product([0, 1, 2, 3, 4], repeat=3):
        waits = dict(zip("abc", minimums, strict=True))
        nodes = [
            node(name, stage="joining" if minimum else "ready", minimum_nodes=minimum)
            for name, minimum in waits.items()
        ]
        found = {ref.name for ref in _find_members(before, find_candidates(nodes, ()))}
        enough = {name for name, minimum in waits.items() if minimum <= len(nodes)}
        assert found == enough | {*known}, minimums


@pytest.mark.parametrize(
    ("is_billed", "valid_for", "must_read", "reads"),
    [
        # Changes are reported: in a quiet fleet every other round reads.
        (False, 60.0, False, [True, False, True, False, True]),
        (False, 60.0, True, [True] * 5),
        # One has expired by now.
        (False, 0.0, False, [True] * 5),
        # Nobody reports changes.
        (True, 60.0, False, [True] * 5),
    ],
)
async def test_pins_are_read_in_each_round_unless_changes_are_reported(
    is_billed: bool, valid_for: float, must_read: bool, reads: list[bool]
) -> None:
    """And in each round that is to decide anew."""
    count = 0

    async def read_pins() -> list[int]:
        nonlocal count
        count += 1
        return [count]

    leader: Any = SimpleNamespace(
        _store=SimpleNamespace(is_billed=is_billed),
        _pins_valid_for=lambda: valid_for,
        _pins=None,
        _read_pins=read_pins,
    )
    found = []
    for _ in reads:
        before = count
        pins: Any = await Rebalancer._get_pins(leader, must_read=must_read)
        assert pins == [count]
        found.append(count > before)
    assert found == reads


@pytest.mark.parametrize("valid_for", [1.0, 20.0, float("inf")])
@pytest.mark.parametrize(
    ("moves", "revoked", "longest"), [(0, 0, 60.0), (1, 0, 5.0), (0, 1, 5.0), (1, 1, 5.0)]
)
def test_while_anything_moves_the_leader_looks_in_each_heartbeat(
    moves: int, revoked: int, longest: float, valid_for: float
) -> None:
    """Tokens, or single tasks alone; and when the next pin expires, if that is earlier."""
    nodes = (NodeRef("a.1", "a"), NodeRef("b.1", "b"))
    moving = (TokenMove(1, 2, 3, (0,), (1,)),) * moves
    # One waits for a node, and one stays where it is: neither of them moves.
    tasks = (Exempt("waits", 0, 0), Exempt("stays", 1, 2), Exempt("moves", 0, 1, 2, 3))
    plan = Plan(
        Assignment(3, 4, nodes, (0,), (1,), moving), Exceptions(nodes, tasks[: 2 + revoked])
    )
    leader: Any = SimpleNamespace(
        _membership=SimpleNamespace(timing=SimpleNamespace(heartbeat=5.0)),
        _interval=60.0,
        _pins_valid_for=lambda: valid_for,
    )
    assert Rebalancer._find_pause(leader, plan) == min(longest, valid_for)


class LeadingMembership:
    """A session in which nobody dies, and nothing changes."""

    timing = SimpleNamespace(heartbeat=0.001)

    def __init__(self) -> None:
        self.components = Components(
            clock=FakeClock(), randomness=SeededRandomness(1), events=Events()
        )
        self.store = MemoryStore(components=self.components)
        self._watched: frozenset[str] = frozenset()

    def watch(self, _: str, incarnations: Collection[str]) -> None:
        self._watched = frozenset(incarnations)

    def watched(self, _: str) -> frozenset[str]:
        return self._watched

    def is_dead(self, _: str) -> bool:
        return False

    async def change(self) -> None:
        await asyncio.Event().wait()

    def publish(self, **_: int) -> None:
        return


def make_leader(membership: LeadingMembership, keys: JobKeys) -> Rebalancer:
    """Return a leader of a fleet without pins."""

    async def read_nothing() -> list[Any]:
        return []

    return Rebalancer(
        cast("Membership", membership),
        keys,
        total=12,
        token_of=lambda _: 0,
        node="a",
        interval=0.001,
        read_pins=read_nothing,
        pins_valid_for=lambda: float("inf"),
        on_published=lambda: None,
        restore=read_nothing,
    )


async def test_a_node_that_leads_again_continues_where_another_one_stopped() -> None:
    """Nothing has changed since it decided in its first term, except what was decided since."""
    membership, keys = LeadingMembership(), JobKeys("sync_")
    store = membership.store
    leader = make_leader(membership, keys)
    for name in "ab":
        await store.create(keys.node(name), msgspec.to_builtins(node(name)))

    async def read_served() -> set[str]:
        record = await store.get(keys.assignment)
        if record is None or record.value is None:
            return set()
        return set(served_by(read_plan(record.value, None, record.key).assignment))

    async def is_shared() -> bool:
        # Decided, and looked at once more: there is nothing to do.
        return await read_served() == {"a.1", "b.1"} and leader._decided_on is not None

    async def lead(epoch: int) -> None:
        term = Term(store, epoch, lambda: True, membership.components.ids)
        leading = asyncio.create_task(leader.run(term))
        try:
            await until(is_shared, "both nodes have tokens", timeout=5.0, interval=0.001)
        finally:
            leading.cancel()
            with suppress(asyncio.CancelledError):
                await leading
        assert membership.watched("") == frozenset()
        assert leader.number is None

    await lead(1)
    other = Term(store, 2, lambda: True, membership.components.ids)
    current = read_plan(await other.get(keys.assignment), None, "")
    alone = assign(current, [NodeRef("b.1", "b")], dead={"a.1"})
    await other.put(keys.assignment, to_document(alone.assignment))
    assert await read_served() == {"b.1"}
    await lead(3)


class LossyTerm(Term):
    """A term in which a node joins with each write; one write is carried out and not answered."""

    def __init__(self, *parts: Any, join: Callable[[str], Awaitable[object]], lost: int) -> None:
        super().__init__(*parts)
        self._join = join
        self._lost = lost
        self.numbers: list[int] = []

    async def put(self, key: str, value: Any) -> None:
        await super().put(key, value)
        self.numbers.append(value["number"])
        for name in "abc"[len(self.numbers) :][:1]:
            await self._join(name)
        if len(self.numbers) == self._lost:
            raise OutcomeUnknown(key)


@pytest.mark.parametrize("lost", [1, 2])
async def test_after_an_unknown_outcome_the_leader_continues_from_what_is_stored(lost: int) -> None:
    """Two assignments never have the same number."""
    membership, keys = LeadingMembership(), JobKeys("sync_")
    store = membership.store

    async def join(name: str) -> None:
        await store.create(keys.node(name), msgspec.to_builtins(node(name)))

    await join("a")
    leader = make_leader(membership, keys)
    term = LossyTerm(store, 1, lambda: True, membership.components.ids, join=join, lost=lost)
    leading = asyncio.create_task(leader.run(term))
    try:
        await until(lambda: len(term.numbers) >= 3, "it has decided", interval=0.001)
    finally:
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
    assert term.numbers[:3] == [1, 2, 3]


def plan_with_exceptions(number: int, tasks: int) -> Plan:
    """Return a plan of one node, with tasks that wait for another one."""
    exceptions = Exceptions((), tuple(Exempt(f"t{i}", 0, 0) for i in range(tasks)))
    name = name_exceptions(number, exceptions)
    return Plan(Assignment(number, 12, (NodeRef("a.1", "a"),), (0,), (1,), (), name), exceptions)


@pytest.mark.parametrize("existing", [*itertools.product([False, True], repeat=3)])
async def test_a_plan_can_be_read_whatever_a_former_leader_has_left_of_it(
    existing: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died after it wrote any of the parts. Those of the plan before are removed."""
    monkeypatch.setattr(plan_documents, "_MAX_TASKS", 2)
    membership, keys = LeadingMembership(), JobKeys("sync_")
    store, leader = membership.store, make_leader(membership, keys)
    term = Term(store, 1, lambda: True, membership.components.ids)
    before, after = plan_with_exceptions(1, 4), plan_with_exceptions(2, 5)
    await leader._publish(term, Plan.empty(12), before)
    parts = split_exceptions(after.assignment.exceptions, after.exceptions)
    for (name, part), is_there in zip(parts.items(), existing, strict=True):
        if is_there:
            await store.create(keys.exceptions(name), part)
    await leader._publish(term, before, after)
    record = await store.get(keys.assignment)
    assert record is not None
    assert await fetch_plan(store, keys, record) == after
    heads = await store.heads(keys.exceptions(""))
    assert {head.key for head in heads} == {*map(keys.exceptions, parts)}


async def test_a_plan_can_be_read_until_the_next_one_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if that is never written."""
    monkeypatch.setattr(plan_documents, "_MAX_TASKS", 2)
    membership, keys = LeadingMembership(), JobKeys("sync_")
    store, leader = membership.store, make_leader(membership, keys)
    term = Term(store, 1, lambda: True, membership.components.ids)
    before = plan_with_exceptions(1, 4)
    await leader._publish(term, Plan.empty(12), before)
    over = Term(store, 1, lambda: False, membership.components.ids)
    with pytest.raises(Fenced):
        await leader._publish(over, before, plan_with_exceptions(2, 5))
    record = await store.get(keys.assignment)
    assert record is not None
    assert await fetch_plan(store, keys, record) == before


async def test_a_session_that_is_replaced_while_its_node_joins_joins_again() -> None:
    """The node has the name for the session in which it began to take it."""
    membership = SimpleNamespace(
        session=SimpleNamespace(incarnation="a.1"),
        incarnation="a.1",
        worker_id="a",
        components=SimpleNamespace(events=Events()),
    )

    async def take(_: NodeRecord, **__: Any) -> None:
        membership.incarnation = "a.2"

    async def agree(*_: Any) -> bool:
        return True

    joined: list[str] = []
    events = Events()
    events.on("jobs:node-joined", lambda event: joined.append(event.incarnation))
    loop: Any = SimpleNamespace(
        membership=membership,
        claims=SimpleNamespace(reset=lambda: None, store_clock=SimpleNamespace(now=0.0)),
        owned_tokens=SimpleNamespace(reset=lambda _: None),
        settings=SimpleNamespace(
            node="a", is_observer=False, reclaim_after=1.0, reclaim_ended_after=0.0
        ),
        fleet_settings=SimpleNamespace(wait=agree, settle=agree, values={}),
        _target_stage="ready",
        _minimum=0,
        _facts={},
        _clock=FakeClock(),
        _registration=SimpleNamespace(take=take),
        _events=events,
        _incarnation="",
    )
    await NodeLoop._join(loop, 1.0)
    assert (loop._incarnation, joined) == ("a.1", ["a.1"])


async def test_an_assignment_counts_once_it_is_applied() -> None:
    """Who waits for its tokens, or until all are handed over, sees it only then."""
    keys, store = JobKeys("sync_"), LeadingMembership().store
    before, after = plan_with_exceptions(1, 0), plan_with_exceptions(2, 0)
    record = await store.create(keys.assignment, to_document(after.assignment))
    is_unavailable = True
    seen: list[Plan] = []

    async def apply(_: Plan) -> None:
        seen.append(loop._plan)
        if is_unavailable:
            raise Unavailable("store", "silent")

    async def read() -> Record:
        return record

    loop: Any = SimpleNamespace(
        _rebalancer=SimpleNamespace(number=None),
        owned_tokens=SimpleNamespace(current=SimpleNamespace(number=1), apply=apply),
        is_leader=False,
        _read_assignment=read,
        _store=store,
        _keys=keys,
        _plan=before,
        _plan_changed=asyncio.Event(),
    )
    with pytest.raises(Unavailable):
        await NodeLoop._apply_assignment(loop)
    assert (loop._plan, loop._plan_changed.is_set()) == (before, False)
    is_unavailable = False
    await NodeLoop._apply_assignment(loop)
    assert (loop._plan, loop._plan_changed.is_set()) == (after, True)
    assert seen == [before, before]


async def test_a_node_looks_soon_at_what_new_pins_withhold() -> None:
    """They may be removed before the leader sees them; then no assignment comes."""
    keys, store = JobKeys("sync_"), LeadingMembership().store
    withheld: list[tuple[dict[str, int], int]] = []

    async def find(tasks: dict[str, int]) -> dict[str, int]:
        return tasks

    running: Any = SimpleNamespace(
        _task=object(),
        _reviewing_pins=asyncio.Lock(),
        _store=store,
        _keys=keys,
        _find_pinned_away=find,
        owned_tokens=SimpleNamespace(withhold=lambda *each: withheld.append(each)),
        _wakeup=asyncio.Event(),
    )
    await JobNode.withhold_pinned(running, {"t": 1})
    assert withheld == [({"t": 1}, 2)]
    assert running._wakeup.is_set()


@pytest.mark.parametrize(
    "remove", [lambda pins: pins.remove_by("a"), lambda pins: pins.remove_all()]
)
def test_a_node_looks_soon_at_what_removed_pins_withheld(remove: Callable[[Pins], int]) -> None:
    """After they were removed."""
    steps: list[str] = []

    async def remove_pins(*_: str) -> int:
        steps.append("removed")
        return 3

    running: Any = SimpleNamespace(
        pins=SimpleNamespace(remove_by=remove_pins, remove_all=remove_pins),
        review_soon=lambda: steps.append("reviewed"),
    )
    assert remove(Pins(running, asyncio.run, lambda _: 0)) == 3
    assert steps == ["removed", "reviewed"]


@pytest.mark.parametrize("wait_on_exit", [0.0, 30.0])
async def test_leaving_keeps_time_to_end_the_session(wait_on_exit: float) -> None:
    """A handover that nobody completes does not use it up."""
    waits: list[float] = []

    async def stop(wait: float) -> None:
        waits.append(wait)

    async def leave() -> None:
        waits.append(0.0)

    job: Any = SimpleNamespace(_wait_on_exit=wait_on_exit)
    node, membership = SimpleNamespace(stop=stop), SimpleNamespace(leave=leave)
    await JobLifecycle._leave(job, cast("Any", node), cast("Any", membership))
    assert waits == [_EXIT_GRACE / 2 + wait_on_exit, 0.0]
