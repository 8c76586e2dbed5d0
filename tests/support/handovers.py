"""A fleet that hands tokens over, as one value: what can happen to it next is a function.

Nodes join, read the plan, apply it, acknowledge it, leave, fall silent and are called dead;
a leader decides on what it read some time ago, while another takes over. Used step by step
at random, and exhaustively.
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
"""After so many a fleet that is left alone has come to rest."""


class Peer(msgspec.Struct, frozen=True):
    """One node, and what it believes."""

    node: NodeRef
    status: Status = "out"
    applied: Ownership = NOTHING
    read: Ownership | None = None
    """What it has read and not yet applied."""
    acked: int = 0
    """What its session says that it has applied."""

    @property
    def uses(self) -> Ownership:
        """What it acts on: a node that is silent, or not there, uses nothing."""
        return self.applied if self.status in ("member", "leaving") else NOTHING

    def look(self, plan: Plan) -> Ownership:
        """Read its part of a plan."""
        return plan.seen_by(self.node.incarnation)


class Fleet(msgspec.Struct, frozen=True):
    """Everything that there is."""

    plan: Plan
    peers: tuple[Peer, ...]
    draft: Plan | None = None
    """What a leader decided and has not written; another may decide and write meanwhile."""
    pins: tuple[Pin, ...] = ()


class Step(msgspec.Struct, frozen=True):
    """One thing that may happen next."""

    what: str
    after: Fleet


Rule = Callable[[Ownership, Ownership], bool]


def is_newer(read: Ownership, applied: Ownership) -> bool:
    """A node never applies a lower number than it has."""
    return read.number > applied.number


def start(names: tuple[str, ...], tokens: int, *, members: int = 0) -> Fleet:
    """Give a fleet before the first plan, some of its nodes there already."""
    peers = (
        Peer(NodeRef(f"{i}-{name}", name), "member" if i < members else "out")
        for i, name in enumerate(names)
    )
    return Fleet(Plan.empty(tokens), tuple(peers))


def covering(fleet: Fleet, task: str, token: int) -> list[str]:
    """Give the nodes that would do a task now."""
    return [peer.node.name for peer in fleet.peers if peer.uses.covers(task, token)]


def steps(
    fleet: Fleet,
    pins: tuple[tuple[Pin, ...], ...] = (),
    *,
    late: Collection[str] | None = None,
    applies: Rule = is_newer,
) -> Iterator[Step]:
    """Give everything that may happen next.

    Args:
        fleet: what there is.
        pins: the sets of pins that may come into force.
        late: the nodes that may apply a plan some time after they have read it; None is all.
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
            seen = peer.look(plan)
            if is_newer(seen, peer.applied):
                yield "reads", replace(peer, read=seen)
                yield "reads and applies at once", replace(peer, applied=seen)
            if peer.read is not None:
                fits = applies(peer.read, peer.applied)
                applied = peer.read if fits else peer.applied
                yield "applies what it read", replace(peer, applied=applied, read=None)
        case "silent":
            # A late beat may still land before death is written.
            yield "acknowledges late", acknowledged
            yield "is called dead", Peer(peer.node, "dead")
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
    """Replace the plan. Whatever was decided on the one before can no longer be written."""
    return replace(fleet, plan=plan, draft=None)


def decide(fleet: Fleet) -> Plan:
    """Decide on what can be read of a fleet now."""
    return assign(
        fleet.plan,
        [peer.node for peer in fleet.peers if peer.status == "member"],
        acks={peer.node.incarnation: peer.acked for peer in fleet.peers},
        dead={peer.node.incarnation for peer in fleet.peers if peer.status == "dead"},
        pins=fleet.pins,
    )


def heal(fleet: Fleet) -> Fleet:
    """Let everybody catch up, the silent be called dead, and the leader decide, to the end."""
    for _ in range(_ROUNDS):
        peers = tuple(_catch_up(peer, fleet.plan) for peer in fleet.peers)
        after = replace(fleet, peers=peers, draft=None)
        after = replace(after, plan=decide(after))
        if after == fleet:
            return fleet
        fleet = after
    raise AssertionError(f"something still changes after {_ROUNDS} rounds")


def _catch_up(peer: Peer, plan: Plan) -> Peer:
    if peer.status in ("member", "leaving"):
        seen = peer.look(plan)
        applied = seen if is_newer(seen, peer.applied) else peer.applied
        return replace(peer, applied=applied, read=None, acked=applied.number)
    return Peer(peer.node, "dead") if peer.status == "silent" else peer
