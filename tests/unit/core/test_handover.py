"""The leader's plan: even, with the fewest moves, and never two users of one token."""

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest
from handovers import Fleet, covering, heal, start, steps
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from jobsync.core.assignment import (
    NOBODY,
    NodeRef,
    Plan,
    count_moved,
    has_incoming,
    has_nothing,
    holders_of,
    must_acknowledge,
    owned_by,
    promised_to,
    token_of,
)
from jobsync.core.handover import assign
from jobsync.core.pins import Pin, like

A, B, C = (NodeRef(f"{name}-1", name) for name in "abc")


def acks(plan: Plan) -> dict[str, int]:
    """Return the acknowledgements of a plan by all its nodes."""
    return {node.incarnation: plan.assignment.number for node in plan.assignment.nodes}


def rest(plan: Plan, members: list[NodeRef], pins: tuple[Pin, ...] = ()) -> Plan:
    """Decide until nothing changes; all nodes acknowledge at once."""
    for _ in range(1000):
        after = assign(plan, members, acks=acks(plan), pins=pins)
        if after is plan:
            return plan
        plan = after
    raise AssertionError("something still changes after 1,000 rounds")


def counts(plan: Plan, nodes: list[NodeRef]) -> list[int]:
    """Return how many tokens each node owns."""
    return [len(owned_by(plan.assignment, node.incarnation)) for node in nodes]


def make_nodes(count: int) -> list[NodeRef]:
    """Return nodes named n0, n1 and so on."""
    return [NodeRef(f"n{i}-1", f"n{i}") for i in range(count)]


def pin(task: str, total: int, *patterns: str) -> Pin:
    """Return a pin of a task."""
    return Pin(task=task, token=token_of(task, total), patterns=patterns)


# Step by step


def test_free_tokens_are_given_at_once() -> None:
    """The first plan needs no acknowledgement."""
    plan = assign(Plan.empty(10), [A, B, C])
    assert plan.assignment.number == 1
    assert sorted(counts(plan, [A, B, C])) == [3, 3, 4]
    assert not plan.assignment.moves


def test_a_node_that_joins_waits_for_the_tokens_of_others() -> None:
    """A token is revoked at one number, and given once its owner has acknowledged that number."""
    before = assign(Plan.empty(10), [A])
    revoked = assign(before, [A, B])
    assert counts(revoked, [A, B]) == [5, 0]
    assert len(promised_to(revoked.assignment, B.incarnation)) == 5
    stale = {A.incarnation: before.assignment.number, B.incarnation: revoked.assignment.number}
    assert assign(revoked, [A, B], acks=stale) is revoked
    given_on = assign(revoked, [A, B], acks=acks(revoked))
    assert counts(given_on, [A, B]) == [5, 5]
    numbers = [plan.assignment.number for plan in (before, revoked, given_on)]
    assert numbers == [1, 2, 3]


def test_a_node_that_leaves_gives_up_everything_first() -> None:
    """It is neither a member nor dead, so the plan waits for it."""
    before = assign(Plan.empty(10), [A, B])
    leaving = assign(before, [B])
    assert counts(leaving, [A, B]) == [0, 5]
    assert not has_nothing(leaving, A.incarnation)
    left = assign(leaving, [B], acks=acks(leaving))
    assert counts(left, [A, B]) == [0, 10]
    assert has_nothing(left, A.incarnation)
    assert left.assignment.nodes == (B,)


def test_a_plan_does_not_wait_for_dead_nodes() -> None:
    """Their tokens move in one step, even those that were moving."""
    joined = assign(assign(Plan.empty(10), [A]), [A, B])
    died = assign(joined, [A, B], dead={A.incarnation})
    assert counts(died, [A, B]) == [0, 10]
    assert not died.assignment.moves


def test_a_move_whose_target_dies_is_taken_back() -> None:
    """The old owner may have it at once: no other node ever had it."""
    before = assign(Plan.empty(10), [A])
    joined = assign(before, [A, B])
    back = assign(joined, [A], dead={B.incarnation})
    assert counts(back, [A]) == [10]
    assert not back.assignment.moves
    assert back.assignment.number == joined.assignment.number + 1


def test_a_move_whose_target_dies_may_get_another_without_overlap() -> None:
    """It still waits for the number that revoked it, not for a new one."""
    before = assign(Plan.empty(10), [A])
    joined = assign(before, [A, B])
    other = assign(joined, [A, C], dead={B.incarnation})
    assert counts(other, [A, C]) == [5, 0]
    assert {move.revoked for move in other.assignment.moves} == {joined.assignment.number}
    done = assign(other, [A, C], acks={A.incarnation: joined.assignment.number})
    assert counts(done, [A, C]) == [5, 5]


def test_a_token_that_went_back_must_be_revoked_again() -> None:
    """An acknowledgement of the first revocation does not cover the second."""
    joined = assign(assign(Plan.empty(10), [A]), [A, B])
    first = joined.assignment.number
    back = assign(joined, [A], dead={B.incarnation})
    again = assign(back, [A, C])
    assert assign(again, [A, C], acks={A.incarnation: first}) is again


def test_a_node_gives_up_first_what_it_does_not_have_yet() -> None:
    """A third node gets what was moving to the second; no node gives up more."""
    joined = assign(assign(Plan.empty(12), [A]), [A, B])
    crowded = assign(joined, [A, B, C])
    assert counts(crowded, [A, B, C]) == [4, 0, 0]
    assert len(promised_to(crowded.assignment, B.incarnation)) == 4
    assert len(promised_to(crowded.assignment, C.incarnation)) == 4


def test_without_members_tokens_have_no_owner() -> None:
    """At once if their owners are dead, and after an acknowledgement if they leave."""
    plan = assign(Plan.empty(4), [A, B])
    nobody = assign(plan, [], dead={A.incarnation})
    assert owned_by(nobody.assignment, B.incarnation) == frozenset()
    assert not has_nothing(nobody, B.incarnation)
    over = assign(nobody, [], acks=acks(nobody))
    assert over.assignment.holders == (0,)
    assert over.assignment.nodes == ()
    assert counts(assign(over, [C]), [C]) == [4]


def test_a_member_without_tokens_is_in_the_plan() -> None:
    """With more nodes than tokens, each node sees that it was counted."""
    plan = assign(Plan.empty(2), [A, B, C])
    assert plan.assignment.nodes == (A, B, C)
    assert sorted(counts(plan, [A, B, C])) == [0, 1, 1]


def test_members_may_be_given_twice_and_in_any_order() -> None:
    """Dead nodes among them do not count."""
    plain = assign(Plan.empty(10), [A, B])
    assert assign(Plan.empty(10), [B, A, C, B], dead={C.incarnation}) == plain


# Fairness


@example(4, [{1, 2}, {0, 1, 2}])
@given(st.integers(1, 200), st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=12))
def test_counts_are_within_one_and_moves_the_fewest(total: int, fleets: list[set[int]]) -> None:
    """After each change of the fleet the counts are even, and nothing moved without need.

    Whichever nodes come and go: those that come may be before the others in order.
    """
    nodes = make_nodes(8)
    plan = Plan.empty(total)
    for fleet in fleets:
        members = [nodes[number] for number in sorted(fleet)]
        before = plan.assignment
        after = assign(plan, members, acks=acks(plan))
        assert count_moved(before, after.assignment) == fewest(plan, members)
        plan = rest(after, members)
        loads = counts(plan, members)
        assert sum(loads) == (total if members else 0)
        assert not loads or max(loads) - min(loads) <= 1


def fewest(plan: Plan, members: list[NodeRef]) -> int:
    """Return the least number of moves that evens out a plan at rest, computed independently."""
    total, had = plan.assignment.total, counts(plan, members)
    if not members:
        return total if any(plan.assignment.holders) else 0
    low, extra = divmod(total, len(members))
    stay = sum(min(have, low) for have in had) + min(extra, sum(have > low for have in had))
    return total - stay


@pytest.mark.parametrize("nodes", [1, 2, 5, 50])
def test_one_node_more_or_less_moves_its_share(nodes: int) -> None:
    """T5: a node that joins or leaves moves one share, rounded up, and nothing else."""
    fleet = make_nodes(nodes + 1)
    few = rest(Plan.empty(10_000), fleet[:-1])
    many = rest(few, fleet)
    share = 10_000 // (nodes + 1)
    assert share <= count_moved(few.assignment, many.assignment) <= share + 1
    gone = assign(many, fleet[:-1], dead={fleet[-1].incarnation})
    assert share <= count_moved(many.assignment, gone.assignment) <= share + 1


# Whatever happens

PINS = (
    pin("t1", 6, "a"),
    pin("t2", 6, "nobody", "%"),
    pin("t3", 6, "nobody"),
    pin("t4", 6, "_"),
    pin("t5", 6, "c", "b"),
    pin("t5", 6, "a"),
    pin("t6", 6, "b"),
    pin("t7", 6, "c"),
    pin("t8", 6, "d", "a"),
)
TASKS = [(f"t{i}", token_of(f"t{i}", 6)) for i in range(12)]

choices = st.lists(st.integers(0, 10_000), min_size=30, max_size=90)


@settings(max_examples=150, deadline=None)
@given(choices)
def test_nothing_ever_has_two_users(picks: list[int]) -> None:
    """T1 and T3, for tokens and for pinned tasks, after every step of any history."""
    fleet = start(("a", "b", "c", "d"), 6)
    for choice in picks:
        possible = list(steps(fleet, ((), PINS[:4], PINS)))
        step = possible[choice % len(possible)]
        if step.what == "the leader decides and writes":
            check_decision(fleet, step.after.plan)
        fleet = step.after
        for task, token in TASKS:
            assert len(covering(fleet, task, token)) <= 1
        owned = [owned_by(fleet.plan.assignment, peer.node.incarnation) for peer in fleet.peers]
        assert all(not left & right for left, right in combinations(owned, 2))
        check_questions(fleet)
    check_rest(heal(fleet))


def check_questions(fleet: Fleet) -> None:
    """What a node reads from a plan agrees with what it has, may use, and will get."""
    plan = fleet.plan
    names = [
        ["", *(n.incarnation for n in part.nodes)] for part in (plan.assignment, plan.exceptions)
    ]
    takers = {names[0][move.taker] for move in plan.assignment.moves}
    takers |= {names[1][row.taker] for row in plan.exceptions.tasks}
    for peer in fleet.peers:
        node = peer.node.incarnation
        held, view = held_by(plan, node), plan.seen_by(node)
        assert has_nothing(plan, node) == (not held)
        assert must_acknowledge(plan, node) == bool(held - view.tokens - view.own)
        assert has_incoming(plan, node) == (node in takers)


def held_by(plan: Plan, incarnation: str) -> set[int | str]:
    """Return the tokens and tasks that a node has, or has yet to give up."""
    holders = holders_of(plan.assignment)
    place = plan.assignment.find(incarnation)
    tokens = {token for token, holder in enumerate(holders) if place and holder == place}
    names = [node.incarnation for node in plan.exceptions.nodes]
    place = names.index(incarnation) + 1 if incarnation in names else 0
    tasks = {row.task for row in plan.exceptions.tasks if place and row.holder == place}
    return {*tokens, *tasks}


def check_decision(fleet: Fleet, after: Plan) -> None:
    """A node that leaves, is silent or dead gets nothing, neither now nor later."""
    before = fleet.plan
    for peer in fleet.peers:
        node = peer.node.incarnation
        if peer.status == "member":
            continue
        assert not promised_to(after.assignment, node)
        assert not has_incoming(after, node)
        gained = held_by(after, node) - held_by(before, node)
        # A task that leaves its token stays with the token's holder for now.
        assert {token_of(unit, 6) if isinstance(unit, str) else unit for unit in gained} <= {
            *held_by(before, node)
        }
        if peer.status == "dead":
            assert not held_by(after, node)
            assert has_nothing(after, node)


def check_rest(fleet: Fleet) -> None:
    """At the end every token is owned, every pin is satisfied, and nothing else waits."""
    plan = fleet.plan
    members = [peer.node.name for peer in fleet.peers if peer.status == "member"]
    assert not plan.assignment.moves
    assert not any(task.revoked for task in plan.exceptions.tasks)
    for task, token in TASKS:
        assert len(covering(fleet, task, token)) == bool(allowed(fleet, task, members))
        assert set(covering(fleet, task, token)) <= allowed(fleet, task, members)
    if members and not fleet.pins:
        loads = Counter(holders_of(plan.assignment))
        assert max(loads.values()) - min(loads[i + 1] for i in range(len(members))) <= 1
        assert not plan.exceptions.tasks


def allowed(fleet: Fleet, task: str, members: list[str]) -> set[str]:
    """Return the nodes that may do a task, computed independently."""
    pins = [pin for pin in fleet.pins if pin.task == task]
    if not pins:
        return set(members)
    allowed: set[str] = set()
    for one in pins:
        matching = ([m for m in members if like(p)(m)] for p in one.patterns)
        allowed.update(next((names for names in matching if names), []))
    return allowed


@settings(max_examples=50, deadline=None)
@given(choices)
def test_a_decision_repeated_changes_nothing(picks: list[int]) -> None:
    """T4: the plan depends on the arguments alone. A new leader changes nothing."""
    fleet = start(("a", "b", "c"), 5, members=2)
    for choice in picks:
        possible = list(steps(fleet, ((), PINS_OF_FIVE)))
        step = possible[choice % len(possible)]
        if step.what == "the leader decides and writes":
            members = [p.node for p in fleet.peers if p.status == "member"]
            known = {p.node.incarnation: p.acked for p in fleet.peers}
            dead = {p.node.incarnation for p in fleet.peers if p.status == "dead"}
            again = assign(
                step.after.plan, members[::-1], acks=known, dead=dead, pins=fleet.pins[::-1]
            )
            assert again is step.after.plan
        fleet = step.after


PINS_OF_FIVE = tuple(replace(one, token=token_of(one.task, 5)) for one in PINS)

SCRIPT = """
from jobsync.core.assignment import NodeRef, Plan
from jobsync.core.handover import assign
from jobsync.core.pins import Pin
nodes = [NodeRef(f"w{i}", f"n{i}") for i in range(7)]
pins = [Pin(task=f"t{i}", token=i % 40, patterns=(f"n{i % 9}", "n_")) for i in range(90)]
plan = assign(Plan.empty(100), nodes, pins=pins)
plan = assign(plan, set(nodes[2:]), dead={"w0"}, acks={"w3": 1}, pins=set(pins))
print(plan)
"""


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    """T4: two processes decide exactly the same."""
    texts = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


# Pins


def test_a_pinned_task_draws_its_token() -> None:
    """If possible: then there is no exception, and the balance counts the token."""
    nodes = make_nodes(2)
    pins = tuple(pin(f"t{i}", 1000, "n0") for i in range(400))
    plan = rest(rest(Plan.empty(1000), nodes), nodes, pins)
    mine = owned_by(plan.assignment, nodes[0].incarnation)
    assert {one.token for one in pins} <= mine
    assert counts(plan, nodes) == [500, 500]
    assert not plan.exceptions.tasks


def test_more_pins_than_a_share_leave_the_rest_to_others() -> None:
    """Loads are as even as the pins allow."""
    nodes = make_nodes(3)
    pins = tuple(Pin(task=f"t{i}", token=i, patterns=("n0",)) for i in range(60))
    plan = rest(Plan.empty(100), nodes, pins)
    assert counts(plan, nodes) == [60, 20, 20]


def test_pins_of_a_group_are_spread_over_it() -> None:
    """Evenly; the other nodes get the unpinned tokens."""
    nodes = [
        NodeRef("1", "gpu-1"),
        NodeRef("2", "gpu-2"),
        NodeRef("3", "cpu-1"),
        NodeRef("4", "cpu-2"),
    ]
    pins = tuple(Pin(task=f"t{i}", token=i, patterns=("gpu-%",)) for i in range(60))
    plan = rest(Plan.empty(100), nodes, pins)
    assert counts(plan, nodes) == [30, 30, 20, 20]


def test_pins_that_disagree_are_both_satisfied() -> None:
    """One task follows the token, the other has an owner of its own; other tasks do not move."""
    pins = (
        Pin(task="x", token=3, patterns=("a",)),
        Pin(task="y", token=3, patterns=("b",)),
        Pin(task="z", token=3, patterns=("b",)),
    )
    plan = rest(rest(Plan.empty(10), [A, B]), [A, B], pins)
    a, b = plan.seen_by(A.incarnation), plan.seen_by(B.incarnation)
    assert [a.covers(task, 3) for task in "xyzo"] == [True, False, False, False]
    assert [b.covers(task, 3) for task in "xyzo"] == [False, True, True, True]
    assert [task.task for task in plan.exceptions.tasks] == ["x"]


def test_a_pin_without_a_match_makes_only_its_task_wait() -> None:
    """It waits until a matching node joins."""
    pins = (Pin(task="x", token=3, patterns=("c",)),)
    plan = rest(rest(Plan.empty(10), [A, B]), [A, B], pins)
    views = [plan.seen_by(node.incarnation) for node in (A, B)]
    assert not any(view.covers("x", 3) for view in views)
    assert sum(view.covers("other", 3) for view in views) == 1
    assert counts(plan, [A, B]) == [5, 5]
    came = rest(plan, [A, B, C], pins)
    assert came.seen_by(C.incarnation).covers("x", 3)
    assert not came.exceptions.tasks


def test_a_pin_is_a_handover() -> None:
    """The task's owner loses it first, with its token; the pinned node gets it afterwards."""
    plan = rest(Plan.empty(2), [A, B])
    held = owned_by(plan.assignment, A.incarnation)
    pins = tuple(Pin(task=f"x{token}", token=token, patterns=("b",)) for token in held)
    revoked = assign(plan, [A, B], acks=acks(plan), pins=pins)
    (token,) = held
    assert revoked.assignment.number == plan.assignment.number + 1
    for node in (A, B):
        assert not revoked.seen_by(node.incarnation).covers(f"x{token}", token)
    done = assign(revoked, [A, B], acks=acks(revoked), pins=pins)
    assert done.seen_by(B.incarnation).covers(f"x{token}", token)


def test_a_task_that_leaves_a_moving_token_waits_for_the_same_number() -> None:
    """The node that gives up the token gives up the task with it, and is not asked again."""
    plan = rest(Plan.empty(10), [A])
    moving = assign(plan, [A, B], acks=acks(plan))
    token = next(iter(promised_to(moving.assignment, B.incarnation)))
    pins = (Pin(task="x", token=token, patterns=("nobody",)),)
    left = assign(moving, [A, B], acks=acks(plan), pins=pins)
    assert [(each.task, each.revoked) for each in left.exceptions.tasks] == [
        ("x", moving.assignment.number)
    ]
    for applied in (moving, left):
        done = assign(left, [A, B], acks=acks(applied), pins=pins)
        rows = [(each.task, each.holder, each.revoked) for each in done.exceptions.tasks]
        assert rows == [("x", NOBODY, 0)]
        assert not done.assignment.moves


def test_a_task_whose_pin_was_cleared_is_given_up_by_its_own_number() -> None:
    """Its token was revoked earlier: who has applied that number may still use the task."""
    total = 1
    pins = (pin("u", total, "b"), pin("v", total, "b"))
    plan = rest(Plan.empty(total), [A], (pin("t", total, "a"),))
    assert owned_by(plan.assignment, A.incarnation) == {0}
    both = assign(plan, [A, B], pins=(pin("t", total, "a"), *pins), acks=acks(plan))
    revoked = both.assignment.number
    assert both.seen_by(A.incarnation).covers("t", 0)
    cleared = assign(both, [A, B], pins=pins)
    assert cleared.assignment.number == revoked + 1
    users = {}
    for number in (revoked - 1, revoked, revoked + 1):
        after = assign(cleared, [A, B], pins=pins, acks={A.incarnation: number})
        users[number - revoked] = [
            [each.name for each in (A, B) if after.seen_by(each.incarnation).covers(task, 0)]
            for task in ("t", "u", "other")
        ]
    assert users == {
        -1: [[], [], []],
        0: [[], ["b"], ["b"]],
        1: [["b"], ["b"], ["b"]],
    }


def test_a_cleared_pin_returns_its_task_to_its_token() -> None:
    """No exception is left behind, and an empty document has no name."""
    pins = (Pin(task="x", token=3, patterns=("c",)),)
    plan = rest(Plan.empty(10), [A, B], pins)
    assert plan.assignment.exceptions.startswith(f"{plan.assignment.number}-")
    home = rest(plan, [A, B])
    assert not home.exceptions.tasks
    assert home.assignment.exceptions == ""
    assert sum(home.seen_by(node.incarnation).covers("x", 3) for node in (A, B)) == 1


def test_exceptions_keep_their_name_while_tokens_move() -> None:
    """So they are written once, and not with every change of the fleet."""
    pins = (Pin(task="x", token=3, patterns=("nobody",)),)
    plan = rest(Plan.empty(10), [A, B], pins)
    moved = rest(plan, [A, B, C], pins)
    assert moved.assignment.number > plan.assignment.number
    assert moved.assignment.exceptions == plan.assignment.exceptions
