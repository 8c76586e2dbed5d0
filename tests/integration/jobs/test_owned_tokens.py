"""The tokens of a node, and how it gives them up."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
from claim_nodes import MEMORY, TOKEN, ClaimNodes, claim

from jobsync.coordination.session import Session
from jobsync.core.assignment import Assignment, Exceptions, Exempt, NodeRef, Plan, TokenMove
from jobsync.core.handover import assign
from jobsync.jobs import owned_tokens as owned_tokens_module
from jobsync.jobs.claims import Claims
from jobsync.jobs.events import TokenChange
from jobsync.jobs.owned_tokens import OwnedTokens
from jobsync.jobs.registration import Registration

TOTAL = 20
FIRST, SECOND = NodeRef("a.1", "a"), NodeRef("b.1", "b")


class FakeSession:
    """A trusted session."""

    trusted = True

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation


class FakeRegistration:
    """Records acknowledgements."""

    def __init__(self) -> None:
        self.applied: list[int] = []

    async def update(self, *, applied: int) -> None:
        self.applied.append(applied)


class Owner:
    """A node that owns tokens, with fakes around it."""

    def __init__(self, claims: Claims) -> None:
        self.registration = FakeRegistration()
        self.claims = claims
        self.changes: list[TokenChange] = []
        self.owned_tokens = OwnedTokens(
            cast("Registration", self.registration), claims, self.changes.append
        )
        self.join(FIRST.incarnation)

    def join(self, incarnation: str) -> None:
        self.owned_tokens.reset(cast("Session", FakeSession(incarnation)))


@pytest.fixture
def nodes() -> ClaimNodes:
    """A store and a clock."""
    return ClaimNodes()


@pytest.fixture
def owner(nodes: ClaimNodes) -> Owner:
    """A node that owns nothing yet."""
    return Owner(nodes.node(FIRST.incarnation))


def alone() -> Plan:
    """Return a plan in which the first node owns everything."""
    return assign(Plan.empty(TOTAL), [FIRST])


def exchanged() -> tuple[Plan, Plan]:
    """Return two plans: between them the first node loses, gains and keeps tokens and tasks.

    Token 0 is kept, 1 is lost, 2 is gained, and 3 belongs to the second node.
    """
    nodes = (FIRST, SECOND)
    away, own = Exempt("away", 0, 2), Exempt("own", 3, 1)
    before = Plan(
        Assignment(1, 4, nodes, (0, 2), (1, 2)),
        Exceptions(nodes, (away, Exempt("away-until-now", 0, 2), own, Exempt("own-lost", 3, 1))),
    )
    after = Plan(
        Assignment(2, 4, nodes, (0, 3), (1, 2), (TokenMove(1, 2, 2, (1,), (1,)),)),
        Exceptions(
            nodes,
            (
                away,
                Exempt("away-from-now", 0, 1, 2, 2),
                own,
                Exempt("own-gained", 3, 1),
                Exempt("own-lost", 3, 1, 2, 2),
            ),
        ),
    )
    return before, after


TASKS = {
    "of-0": 0,
    "of-1": 1,
    "of-2": 2,
    "of-3": 3,
    "away": 0,
    "away-from-now": 0,
    "away-until-now": 0,
    "own": 3,
    "own-gained": 3,
    "own-lost": 3,
}


def list_owned(owner: Owner) -> set[str]:
    """Return which of these tasks a node owns now."""
    return {task for task, token in TASKS.items() if owner.owned_tokens.owns(task, token)}


def shared() -> tuple[Plan, int]:
    """Return the plan that moves half to a second node, and one of the moved tokens."""
    plan = assign(alone(), [FIRST, SECOND])
    moved = alone().seen_by(FIRST.incarnation).tokens - plan.seen_by(FIRST.incarnation).tokens
    return plan, min(moved)


async def test_a_revocation_is_acknowledged(owner: Owner) -> None:
    """Revoked tokens are no longer owned, and the node acknowledges it."""
    await owner.owned_tokens.apply(alone())
    plan, token = shared()
    await owner.owned_tokens.apply(plan)
    assert not owner.owned_tokens.owns("x", token)
    assert owner.registration.applied == [plan.assignment.number]
    assert [len(change.removed) for change in owner.changes] == [0, TOTAL // 2]


async def test_only_the_first_tokens_of_a_node_are_its_initial_ones(owner: Owner) -> None:
    """Not those that it gains later, nor those of a new session; nor an assignment without any."""
    before, after = exchanged()
    # It has joined, and has no share yet.
    assignment = msgspec.structs.replace(before.assignment, starts=(0,), holders=(2,))
    no_share = Plan(assignment, before.exceptions)
    first, second = (
        Plan(msgspec.structs.replace(plan.assignment, number=number), plan.exceptions)
        for number, plan in enumerate((before, after), 2)
    )
    for plan in (no_share, first, second):
        await owner.owned_tokens.apply(plan)
    owner.join(FIRST.incarnation)
    await owner.owned_tokens.apply(second)
    told = [(len(change.added), len(change.removed), change.is_initial) for change in owner.changes]
    assert told == [(0, 0, False), (2, 0, True), (1, 1, False), (2, 0, False)]


async def test_a_node_that_loses_and_gains_at_once_has_only_what_it_keeps_meanwhile(
    nodes: ClaimNodes, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and single tasks: what it gains is used after the claims of others were read."""
    before, after = exchanged()
    await owner.owned_tokens.apply(before)
    had = {"of-0", "of-1", "away-from-now", "own", "own-lost"}
    assert list_owned(owner) == had
    nodes.store.gate = asyncio.Event()
    in_flight = asyncio.create_task(owner.claims.add({"of-1": 1}, 1, lambda *_: True))
    await asyncio.sleep(0)
    read: list[set[int]] = []
    load = owner.claims.foreign.load

    async def spy(tokens: Any, recent: Any) -> None:
        read.append(set(tokens))
        assert list_owned(owner) == kept
        await load(tokens, recent)

    monkeypatch.setattr(owner.claims.foreign, "load", spy)
    applying = asyncio.create_task(owner.owned_tokens.apply(after))
    for _ in range(5):
        await asyncio.sleep(0)
    kept = {"of-0", "own"}
    assert list_owned(owner) == kept
    assert owner.registration.applied == []
    nodes.store.gate.set()
    await asyncio.gather(in_flight, applying)
    assert owner.registration.applied == [2]
    assert list_owned(owner) == {"of-0", "of-2", "away-until-now", "own", "own-gained"}
    # Of the token that it gains, of the task that it gains, and of the one that it has back.
    assert read == [{2, 3, 0}]


async def test_a_positive_answer_holds_until_the_claim(owner: Owner) -> None:
    """A revocation between the answer and the claim is acknowledged after the claim."""
    await owner.owned_tokens.apply(alone())
    plan, token = shared()
    assert owner.owned_tokens.may_claim("x", token)
    revoking = asyncio.create_task(owner.owned_tokens.apply(plan))
    for _ in range(5):
        await asyncio.sleep(0)
    assert owner.registration.applied == []
    assert owner.owned_tokens.owns("x", token)
    assert not owner.owned_tokens.owns("y", token)
    assert await owner.claims.add({"x": token}, 1, lambda *_: True) == {}
    await revoking
    assert owner.registration.applied == [plan.assignment.number]
    assert not owner.owned_tokens.owns("x", token)
    assert owner.claims.running == ["x"]


async def test_an_unused_answer_delays_a_revocation_only_briefly(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that asks and does not claim still loses the task."""
    monkeypatch.setattr(owned_tokens_module, "_GRACE", 0.01)
    await owner.owned_tokens.apply(alone())
    plan, token = shared()
    assert owner.owned_tokens.may_claim("x", token)
    await owner.owned_tokens.apply(plan)
    assert owner.registration.applied == [plan.assignment.number]
    assert not owner.owned_tokens.owns("x", token)


def never(*_: Any) -> None:
    """Fail: nobody waits for a claim."""
    pytest.fail("waited for a claim")


async def test_a_task_that_is_claimed_already_delays_nothing(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was followed by a claim is used up."""
    await owner.owned_tokens.apply(alone())
    plan, token = shared()
    assert owner.owned_tokens.may_claim("x", token)
    await owner.claims.add({"x": token}, 1, lambda *_: True)
    monkeypatch.setattr(owner.claims, "wait_until_claiming", never)
    await owner.owned_tokens.apply(plan)
    assert owner.registration.applied == [plan.assignment.number]


async def test_a_session_that_is_no_longer_trusted_owns_nothing(owner: Owner) -> None:
    """A paused node refuses by itself."""
    await owner.owned_tokens.apply(alone())
    assert owner.owned_tokens.owns("x", 3)
    cast("Any", owner.owned_tokens._session).trusted = False
    assert not owner.owned_tokens.owns("x", 3)


async def test_a_list_from_before_a_lost_session_is_not_done_again(
    nodes: ClaimNodes, owner: Owner
) -> None:
    """A node that comes back refuses tasks that others have done since it first joined."""
    other = nodes.node(SECOND.incarnation)
    await owner.owned_tokens.apply(alone())
    nodes.pass_time(1)
    await claim(other, "x")
    await other.finish(["x"], "done")
    nodes.pass_time(MEMORY / 2)
    owner.join("a.2")
    plan = assign(alone(), [NodeRef("a.2", "a")], dead={FIRST.incarnation})
    await owner.owned_tokens.apply(plan)
    assert owner.claims.is_refused("x")


async def test_without_a_shared_clock_numbers_show_what_was_just_done(
    nodes: ClaimNodes, owner: Owner
) -> None:
    """Tasks claimed since the first assignment of this node count, whatever wall clocks say."""
    nodes.store.has_no_clock = True
    other = nodes.node(SECOND.incarnation)
    await other.add({"old": TOKEN}, 0, lambda *_: True)
    await other.finish(["old"], "done")
    await owner.owned_tokens.apply(alone())
    assert not owner.claims.is_refused("old")
    # It does not know yet that this node has joined.
    await other.add({"late": TOKEN}, 0, lambda *_: True)
    await other.finish(["late"], "done")
    await claim(other, "x")
    await other.finish(["x"], "done")
    nodes.clock.wall_seconds += 300
    owner.join("a.2")
    await owner.owned_tokens.apply(assign(alone(), [NodeRef("a.2", "a")], dead={FIRST.incarnation}))
    assert owner.claims.is_refused("x")
    assert owner.claims.is_refused("late")
    nodes.pass_time(MEMORY)
    assert not owner.claims.is_refused("x")


async def test_withheld_tasks_return_with_the_assignment_that_knows_their_pins(
    owner: Owner,
) -> None:
    """An assignment that was under way when the pins were written does not return them."""
    owned = owner.owned_tokens
    await owned.apply(alone())
    plan, moved = shared()
    token = min(plan.seen_by(FIRST.incarnation).tokens)
    owned.withhold({"x": token, "y": moved}, plan.assignment.number + 1)
    assert not owned.owns("x", token)
    assert owned.owns("z", token)
    assert owned.withheld == {"x": token, "y": moved}
    await owned.apply(plan)
    assert not owned.owns("x", token)
    assert owned.withheld == {"x": token}
    acks = {FIRST.incarnation: plan.assignment.number}
    await owned.apply(assign(plan, [FIRST, SECOND], acks=acks))
    assert owned.owns("x", token)
    assert owned.withheld == {}


async def test_withheld_tasks_stay_withheld_in_a_new_session(owner: Owner) -> None:
    """It is no news of the pins: an assignment that was under way then does not know them."""
    owned, again = owner.owned_tokens, NodeRef("a.2", "a")
    await owned.apply(alone())
    owned.withhold({"x": 3}, known_from=3)
    owner.join(again.incarnation)
    second = assign(alone(), [again], dead={FIRST.incarnation})
    await owned.apply(second)
    assert second.assignment.number == 2
    assert (owned.owns("x", 3), owned.owns("y", 3)) == (False, True)
    third = Plan(msgspec.structs.replace(second.assignment, number=3))
    await owned.apply(third)
    assert owned.owns("x", 3)


async def test_claims_are_read_under_all_that_is_gained(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, single tasks, and tasks that follow a token of this node again."""
    read: list[set[int]] = []

    async def load(tokens: frozenset[int], _: object) -> None:
        read.append({*tokens})

    monkeypatch.setattr(owner.claims.foreign, "load", load)
    before, after = exchanged()
    for plan in (before, after):
        await owner.owned_tokens.apply(plan)
    gained = {"of-2", "own-gained", "away-until-now"}
    assert read == [{0, 1, 3}, {TASKS[task] for task in gained}]


async def test_a_withheld_task_is_not_kept_for_an_answer(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revocation does not wait for a claim that would be refused."""
    monkeypatch.setattr(owner.claims, "wait_until_claiming", never)
    owned = owner.owned_tokens
    await owned.apply(alone())
    plan, token = shared()
    assert owned.may_claim("x", token)
    owned.withhold({"x": token}, plan.assignment.number + 1)
    await owned.apply(plan)
    assert not owned.owns("x", token)
    owned.release(["x"])
    assert not owned.owns("x", token)
