"""Handovers in every state that a small fleet can reach, with changes of the leader.

Two or three nodes, a few tokens, a pin that comes and goes. A node may join, leave, fall silent and
be declared dead at any moment, or apply a plan late. A leader may write what it decided before
another one took over.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

import handovers
import pytest
from handovers import Fleet, Peer, Rule, covering, heal, is_newer, start, steps
from msgspec.structs import replace

from jobsync.core.assignment import Plan
from jobsync.core.handover import Transfers, _Draft, assign
from jobsync.core.pins import Pin

TASKS = ("any", "pinned", "otherwise")
PINS = (
    Pin(task="pinned", token=0, patterns=("b",)),
    Pin(task="otherwise", token=0, patterns=("a",)),
)

Rank = Callable[[int], int]
Check = Callable[[Fleet], str | None]
IsDone = Callable[[int, int], bool]
Breakage = Callable[[pytest.MonkeyPatch], None]
Origins = dict[Fleet, tuple[Fleet | None, str]]


def explore(
    fleet: Fleet,
    pins: tuple[tuple[Pin, ...], ...] = (),
    *,
    late: Collection[str] = (),
    applies: Rule = is_newer,
) -> Iterator[tuple[Fleet, Origins]]:
    """Yield every reachable state, nearest first, with the origins of all states."""
    origins: Origins = {fleet: (None, "")}
    frontier = [fleet]
    while frontier:
        found = []
        for state in frontier:
            yield state, origins
            for step in steps(state, pins, late=late, applies=applies):
                after = canonical(step.after)
                if after not in origins:
                    origins[after] = (state, step.what)
                    found.append(after)
        frontier = found


def trace(origins: Origins, state: Fleet | None) -> list[str]:
    """Return a shortest trace to a state."""
    names: list[str] = []
    while state is not None:
        state, what = origins[state]
        names.append(what)
    return names[-2::-1]


def canonical(fleet: Fleet) -> Fleet:
    """Return the same fleet with the smallest equivalent numbers.

    Numbers are only compared: with revocations, with the plan's own number, and by a node with what
    it read. States that differ in nothing else behave alike.
    """
    number = fleet.plan.assignment.number
    numbers = {0, 1, number, number + 1, *_revoked(fleet.plan)}
    for peer in fleet.peers:
        if peer.read is not None:
            numbers |= {peer.applied.number, peer.read.number}
    ordered = sorted(numbers)

    def rank(number: int) -> int:
        return bisect_right(ordered, number) - 1

    return replace(
        fleet,
        plan=_renumber(fleet.plan, rank),
        draft=_renumber(fleet.draft, rank) if fleet.draft else None,
        peers=tuple(_renumber_peer(peer, rank) for peer in fleet.peers),
    )


def _revoked(plan: Plan) -> Iterable[int]:
    yield from (move.revoked for move in plan.assignment.moves)
    yield from (task.revoked for task in plan.exceptions.tasks)


def _renumber(plan: Plan, rank: Rank) -> Plan:
    before, exceptions = plan.assignment, plan.exceptions
    moves = tuple(replace(move, revoked=rank(move.revoked)) for move in before.moves)
    tasks = tuple(replace(task, revoked=rank(task.revoked)) for task in exceptions.tasks)
    assignment = replace(before, number=rank(before.number), moves=moves, exceptions="")
    return Plan(assignment, replace(exceptions, tasks=tasks))


def _renumber_peer(peer: Peer, rank: Rank) -> Peer:
    read = peer.read
    return replace(
        peer,
        applied=replace(peer.applied, number=rank(peer.applied.number)),
        read=replace(read, number=rank(read.number)) if read else None,
        acked=rank(peer.acked),
    )


def find_overlap(fleet: Fleet) -> str | None:
    """Return a task that two nodes would do at the same time."""
    for token in range(fleet.plan.assignment.total):
        for task in TASKS:
            if len(nodes := covering(fleet, task, token)) > 1:
                return f"task {task!r} of token {token}: {nodes}"
    return None


def find_gap(fleet: Fleet) -> str | None:
    """Return a task that no node, or a wrong node, would do in the steady state."""
    steady = heal(fleet)
    members = [peer.node.name for peer in steady.peers if peer.status == "member"]
    pinned = {pin.task: pin.patterns for pin in steady.pins}
    for token in range(steady.plan.assignment.total):
        for task in TASKS:
            allowed = [name for name in members if name in pinned.get(task, members)]
            nodes = covering(steady, task, token)
            if bool(nodes) != bool(allowed) or not set(nodes) <= set(allowed):
                return f"task {task!r} of token {token}: {nodes}, allowed {allowed}"
    return None


def find_first(found: Iterable[tuple[Fleet, Origins]], *checks: Check) -> str | None:
    """Return the first violation, with a shortest trace."""
    for state, origins in found:
        for check in checks:
            if violation := check(state):
                return "\n  ".join((violation, *trace(origins, state)))
    return None


def test_tokens_of_two_nodes_never_overlap_and_all_are_used() -> None:
    """A token has at most one user in every state; in the steady state all are used."""
    found = explore(start(("a", "b"), 2, members=1))
    assert find_first(found, find_overlap, find_gap) is None


def test_plans_applied_late_do_not_overlap(full_scale: bool) -> None:
    """A node may apply a plan long after it has read it: one node, or both at full scale."""
    late = ("a", "b") if full_scale else ("a",)
    found = explore(start(("a", "b"), 1, members=1), late=late)
    assert find_first(found, find_overlap) is None


def test_pins_that_come_and_go_never_overlap_and_are_obeyed(full_scale: bool) -> None:
    """A pinned task has at most one user too; in the steady state its pin is obeyed.

    The pins disagree, so one of the tasks must leave its token. At full scale all states; otherwise
    the nearest ones.
    """
    found = explore(start(("a", "b"), 1, members=2), ((), PINS))
    nearest = found if full_scale else islice(found, 10_000)
    assert find_first(nearest, find_overlap, find_gap) is None


# Mutations that the model must detect.


def complete_at_once(patch: pytest.MonkeyPatch) -> None:
    """Complete a move at once."""
    settle = Transfers.settle

    def wrong(self: Transfers[int], _: object, dead: set[int], members: list[int]) -> None:
        settle(self, lambda _place, _number: True, dead, members)

    patch.setattr(Transfers, "settle", wrong)


def accept_any_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Accept an acknowledgement of any number."""
    settle = Transfers.settle

    def wrong(self: Transfers[int], is_done: IsDone, dead: set[int], members: list[int]) -> None:
        settle(self, lambda place, _: is_done(place, 1), dead, members)

    patch.setattr(Transfers, "settle", wrong)


def redirect_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Forget the node that must still release a token when its move gets another target."""
    steer = Transfers.steer

    def wrong(self: Transfers[int], targets: dict[int, int], number: int) -> None:
        for unit, (taker, _) in list(self.moving.items()):
            if taker != targets[unit]:
                del self.moving[unit]
                self.holders[unit] = targets[unit]
        steer(self, targets, number)

    patch.setattr(Transfers, "steer", wrong)


def treat_leaving_as_dead(patch: pytest.MonkeyPatch) -> None:
    """Do not wait for a node that is about to leave."""

    def wrong(fleet: Fleet) -> Plan:
        gone = [peer for peer in fleet.peers if peer.status in ("leaving", "silent", "dead")]
        members = [peer.node for peer in fleet.peers if peer.status == "member"]
        dead = {peer.node.incarnation for peer in gone}
        return assign(fleet.plan, members, dead=dead, pins=fleet.pins)

    patch.setattr(handovers, "decide", wrong)


def pin_without_revoking(patch: pytest.MonkeyPatch) -> None:
    """Treat a task that leaves its token as unowned."""

    def wrong(self: _Draft, task: str, token: int) -> None:
        self._token_of[task] = token
        self._tasks.holders.setdefault(task, 0)

    patch.setattr(_Draft, "_add_exception", wrong)


def unpin_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Return a task to its token while another node still has it."""

    def wrong(self: _Draft, exempt: dict[str, int]) -> None:
        for task in [each for each in self._tasks.holders if each not in exempt]:
            del self._tasks.holders[task]
            self._tasks.moving.pop(task, None)

    patch.setattr(_Draft, "_remove_exceptions", wrong)


@pytest.mark.parametrize(
    ("breakage", "names"),
    [
        (complete_at_once, "ab"),
        (accept_any_acknowledgement, "ab"),
        (redirect_without_waiting, "abc"),
        (treat_leaving_as_dead, "ab"),
    ],
)
def test_a_broken_handover_of_tokens_is_detected(
    breakage: Breakage, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model can fail: each missing rule shows as an overlap."""
    breakage(monkeypatch)
    found = explore(start(tuple(names), 1, members=1))
    assert find_first(found, find_overlap) is not None


@pytest.mark.parametrize("breakage", [pin_without_revoking, unpin_without_waiting])
def test_a_broken_handover_of_tasks_is_detected(
    breakage: Breakage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for tasks that leave their token and come back."""
    breakage(monkeypatch)
    found = explore(start(("a", "b"), 1, members=2), ((), PINS))
    assert find_first(found, find_overlap) is not None


def test_an_old_plan_that_is_applied_late_is_detected() -> None:
    """Without the rule that numbers only grow, two nodes use one token."""
    found = explore(start(("a", "b"), 1, members=1), late=("a", "b"), applies=lambda *_: True)
    assert find_first(found, find_overlap) is not None
