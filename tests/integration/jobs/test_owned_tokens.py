"""What a node owns, and how it gives it up."""

import asyncio
from typing import Any, cast

import pytest
from yards import MEMORY, TOKEN, Yard, claim

from jobsync.coordination.session import Session
from jobsync.core.assignment import NodeRef, Plan
from jobsync.core.handover import assign
from jobsync.jobs import owned_tokens as holding_module
from jobsync.jobs.claims import Claims
from jobsync.jobs.owned_tokens import OwnedTokens, TokenChange
from jobsync.jobs.registration import Registration

TOTAL = 20
FIRST, SECOND = NodeRef("a.1", "a"), NodeRef("b.1", "b")


class Trusting:
    """Stands in for a session."""

    trusted = True

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation


class Told:
    """Stands in for a node's name: keeps what is acknowledged."""

    def __init__(self) -> None:
        self.applied: list[int] = []

    async def tell(self, *, applied: int) -> None:
        self.applied.append(applied)


class Seat:
    """A node that holds something, and everything around it."""

    def __init__(self, claims: Claims) -> None:
        self.name = Told()
        self.claims = claims
        self.changes: list[TokenChange] = []
        self.holding = OwnedTokens(cast("Registration", self.name), claims, self.changes.append)
        self.join(FIRST.incarnation)

    def join(self, incarnation: str) -> None:
        self.holding.join(cast("Session", Trusting(incarnation)))


@pytest.fixture
def yard() -> Yard:
    """A store, and time."""
    return Yard()


@pytest.fixture
def seat(yard: Yard) -> Seat:
    """A node that owns nothing yet."""
    return Seat(yard.node(FIRST.incarnation))


def alone() -> Plan:
    """Give a plan in which the first node has everything."""
    return assign(Plan.empty(TOTAL), [FIRST])


def shared() -> tuple[Plan, int]:
    """Give the plan that takes half of it away for a second node, and a token taken."""
    plan = assign(alone(), [FIRST, SECOND])
    taken = alone().seen_by(FIRST.incarnation).tokens - plan.seen_by(FIRST.incarnation).tokens
    return plan, min(taken)


async def test_a_revocation_is_acknowledged(seat: Seat) -> None:
    """What is taken away is not owned from then on, and the leader hears of it."""
    await seat.holding.apply(alone())
    plan, token = shared()
    await seat.holding.apply(plan)
    assert not seat.holding.owns("x", token)
    assert seat.name.applied == [plan.assignment.number]
    assert [len(change.removed) for change in seat.changes] == [0, TOTAL // 2]


async def test_a_yes_is_kept_until_the_claim_is_made(seat: Seat) -> None:
    """A revocation between the answer and the claim is acknowledged after the claim."""
    await seat.holding.apply(alone())
    plan, token = shared()
    assert seat.holding.may_claim("x", token)
    revoking = asyncio.create_task(seat.holding.apply(plan))
    for _ in range(5):
        await asyncio.sleep(0)
    assert seat.name.applied == []
    assert seat.holding.owns("x", token)
    assert not seat.holding.owns("y", token)
    assert await seat.claims.add({"x": token}, 1, lambda *_: True) == {}
    await revoking
    assert seat.name.applied == [plan.assignment.number]
    assert not seat.holding.owns("x", token)
    assert seat.claims.running == ["x"]


async def test_a_yes_that_nobody_acts_on_delays_for_a_moment_only(
    seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks and does not claim loses the task all the same."""
    monkeypatch.setattr(holding_module, "_GRACE", 0.01)
    await seat.holding.apply(alone())
    plan, token = shared()
    assert seat.holding.may_claim("x", token)
    await seat.holding.apply(plan)
    assert seat.name.applied == [plan.assignment.number]
    assert not seat.holding.owns("x", token)


async def test_what_is_claimed_already_delays_nothing(
    seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A yes that was acted on is kept."""

    def never(*_: Any) -> None:
        pytest.fail("waited for a claim that was made")

    await seat.holding.apply(alone())
    plan, token = shared()
    assert seat.holding.may_claim("x", token)
    await seat.claims.add({"x": token}, 1, lambda *_: True)
    monkeypatch.setattr(seat.claims, "begun", never)
    await seat.holding.apply(plan)
    assert seat.name.applied == [plan.assignment.number]


async def test_a_session_that_trusts_itself_no_more_owns_nothing(seat: Seat) -> None:
    """A paused node says no by itself."""
    await seat.holding.apply(alone())
    assert seat.holding.owns("x", 3)
    cast("Any", seat.holding._session).trusted = False
    assert not seat.holding.owns("x", 3)


async def test_a_list_from_before_a_lost_session_is_not_done_again(yard: Yard, seat: Seat) -> None:
    """Who comes back refuses what others have done since it first joined."""
    other = yard.node(SECOND.incarnation)
    await seat.holding.apply(alone())
    yard.pass_time(1)
    await claim(other, "x")
    await other.finish(["x"], "done")
    yard.pass_time(MEMORY / 2)
    seat.join("a.2")
    plan = assign(alone(), [NodeRef("a.2", "a")], dead={FIRST.incarnation})
    await seat.holding.apply(plan)
    assert seat.claims.refuses("x")


async def test_where_nodes_share_no_clock_the_numbers_tell_what_was_just_done(
    yard: Yard, seat: Seat
) -> None:
    """What was claimed since this node was first named, whatever anybody's wall clock says."""
    yard.store.timeless = True
    other = yard.node(SECOND.incarnation)
    await other.add({"old": TOKEN}, 0, lambda *_: True)
    await other.finish(["old"], "done")
    await seat.holding.apply(alone())
    assert not seat.claims.refuses("old")
    await claim(other, "x")
    await other.finish(["x"], "done")
    yard.clock.wall_seconds += 300
    seat.join("a.2")
    await seat.holding.apply(assign(alone(), [NodeRef("a.2", "a")], dead={FIRST.incarnation}))
    assert seat.claims.refuses("x")
    yard.pass_time(MEMORY)
    assert not seat.claims.refuses("x")
