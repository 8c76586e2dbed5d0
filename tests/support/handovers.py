"""Model of a fleet that hands tokens over, as one value with a function for its next steps.

Nodes join, read the plan, apply it, acknowledge it, leave, fall silent and are declared dead. A
leader decides on an earlier read while another one takes over. Tests use it at random and
exhaustively.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from jobsync.core.assignment import NodeRef, Ownership, Plan
from jobsync.core.handover import assign
from jobsync.core.pins import Pin

__all__ = ["Fleet", "Peer", "Rule", "Step", "covering", "heal", "is_newer", "start", "steps"]

Status = Literal["out", "member", "leaving", "silent", "dead"]

NOTHING = Ownership(0)
_ROUNDS = 1000
"""Rounds after which a fleet without new events must be steady."""


class Peer(msgspec.Struct, frozen=True):
    """One node, and what it knows."""

    node: NodeRef
    status: Status = "out"
    applied: Ownership = NOTHING
    read: Ownership | None = None
    """What it has read and not applied yet."""
    acked: int = 0
    """The number that it has acknowledged in its session."""

    @property
    def uses(self) -> Ownership:
        """What it acts on; nothing if it is silent or not a member."""
        return self.applied if self.status in ("member", "leaving") else NOTHING

    def read_plan(self, plan: Plan) -> Ownership:
        """Read its part of a plan."""
        return plan.seen_by(self.node.incarnation)


class Fleet(msgspec.Struct, frozen=True):
    """The whole model."""

    plan: Plan
    peers: tuple[Peer, ...]
    draft: Plan | None = None
    """A plan that a leader decided and has not written; another may write meanwhile."""
    pins: tuple[Pin, ...] = ()


class Step(msgspec.Struct, frozen=True):
    """A possible next step."""

    what: str
    after: Fleet


Rule = Callable[[Ownership, Ownership], bool]


def is_newer(read: Ownership, applied: Ownership) -> bool:
    """Whether a plan may be applied: its number must be higher."""
    return read.number > applied.number


def start(names: tuple[str, ...], tokens: int, *, members: int = 0) -> Fleet:
    """Return a fleet before the first plan, with some members."""
    peers = (
        Peer(NodeRef(f"{i}-{name}", name), "member" if i < members else "out")
        for i, name in enumerate(names)
    )
    return Fleet(Plan.empty(tokens), tuple(peers))


def covering(fleet: Fleet, task: str, token: int) -> list[str]:
    """Return the nodes that would do a task now."""
    return [peer.node.name for peer in fleet.peers if peer.uses.covers(task, token)]


def steps(
    fleet: Fleet,
    pins: tuple[tuple[Pin, ...], ...] = (),
    *,
    late: Collection[str] | None = None,
    applies: Rule = is_newer,
) -> Iterator[Step]:
    """Yield all possible next steps.

    Args:
        fleet: the current state.
        pins: the sets of pins that may come into force.
        late: the nodes that may apply a plan later than they read it; None for all.
        applies: whether a node applies what it has read, given what it has applied.
    """
    for i, peer in enumerate(fleet.peers):
        for what, after in _steps_of(peer, fleet.plan, applies):
            if after != peer and (after.read is None or late is None or peer.node.name in late):
                peers = (*fleet.peers[:i], after, *fleet.peers[i + 1 :])
                yield Step(f"{peer.node.name} {what}", replace(fleet, peers=peers))
    yield from _steps_of_leaders(fleet)
    for some in pins:
        if some != fleet.pins:
            yield Step(f"{len(some)} pins are in force", replace(fleet, pins=some))


def _steps_of(peer: Peer, plan: Plan, applies: Rule) -> Iterator[tuple[str, Peer]]:
    acknowledged = replace(peer, acked=peer.applied.number)
    match peer.status:
        case "out":
            yield "joins", replace(peer, status="member")
        case "member" | "leaving":
            if peer.status == "member":
                yield "starts to leave", replace(peer, status="leaving")
            yield "falls silent", replace(peer, status="silent", read=None)
            yield "acknowledges", acknowledged
            seen = peer.read_plan(plan)
            if is_newer(seen, peer.applied):
                yield "reads", replace(peer, read=seen)
                yield "reads and applies at once", replace(peer, applied=seen)
            if peer.read is not None:
                fits = applies(peer.read, peer.applied)
                applied = peer.read if fits else peer.applied
                yield "applies what it read", replace(peer, applied=applied, read=None)
        case "silent":
            # A late heartbeat may still land before death is written.
            yield "acknowledges late", acknowledged
            yield "is declared dead", Peer(peer.node, "dead")
        case "dead":
            pass


def _steps_of_leaders(fleet: Fleet) -> Iterator[Step]:
    if fleet.draft is not None:
        yield Step("the old leader writes", write(fleet, fleet.draft))
    decided = decide(fleet)
    if decided is not fleet.plan:
        yield Step("the leader decides and writes", write(fleet, decided))
        if decided != fleet.draft:
            yield Step("the old leader decides", replace(fleet, draft=decided))


def write(fleet: Fleet, plan: Plan) -> Fleet:
    """Replace the plan. A draft based on the earlier one can no longer be written."""
    return replace(fleet, plan=plan, draft=None)


def decide(fleet: Fleet) -> Plan:
    """Return the plan that a leader decides on now."""
    return assign(
        fleet.plan,
        [peer.node for peer in fleet.peers if peer.status == "member"],
        acks={peer.node.incarnation: peer.acked for peer in fleet.peers},
        dead={peer.node.incarnation for peer in fleet.peers if peer.status == "dead"},
        pins=fleet.pins,
    )


def heal(fleet: Fleet) -> Fleet:
    """Return the steady state: all catch up, silent nodes are dead, the leader decides."""
    for _ in range(_ROUNDS):
        peers = tuple(_catch_up(peer, fleet.plan) for peer in fleet.peers)
        after = replace(fleet, peers=peers, draft=None)
        after = replace(after, plan=decide(after))
        if after == fleet:
            return fleet
        fleet = after
    raise AssertionError(f"the fleet still changes after {_ROUNDS} rounds")


def _catch_up(peer: Peer, plan: Plan) -> Peer:
    if peer.status in ("member", "leaving"):
        seen = peer.read_plan(plan)
        applied = seen if is_newer(seen, peer.applied) else peer.applied
        return replace(peer, applied=applied, read=None, acked=applied.number)
    return Peer(peer.node, "dead") if peer.status == "silent" else peer
