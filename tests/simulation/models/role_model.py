"""Model of an election between two candidates: never two leaders, never a role nobody may take.

Sessions behave as `session_model` shows: a session that reads dead does not trust itself. Trust may
lapse and come back. A session may be declared dead only while it has lapsed; its worker then
returns as another incarnation. Takes and releases of the role, and writes to the singleton that
it governs, may land late or never, and may be applied without a reply.

- Every take has an epoch higher than any before it, so every epoch has one owner.
- At most one candidate believes that it leads.
- After a handover only the named successor takes the role within one heartbeat interval.
- The singleton accepts no write of an epoch lower than one that it has accepted, or that has begun
  to act on it, and with one epoch only its owner's.
- From every state, candidates without further faults get to a leader, without the help of those
  whose sessions are dead.

If the role's record itself is lost, by an operator or in a restore, there may be two leaders, and
an epoch may be taken twice; the singleton is still protected.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec
from explorer import Model, Step

__all__ = ["MUTATIONS", "WORLDS", "RoleModel", "Scene"]

Trust: TypeAlias = Literal["trusted", "lapsed", "dead"]
"""A session's own view while it lives; `dead` once its record reads dead."""
Phase: TypeAlias = Literal["sent", "applied", "conflicted"]

NOBODY = ""

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """The limits of a model, and what may happen in it."""

    epochs: int
    """The number of terms; a state with that many is a goal."""
    strays: int = 1
    """The number of abandoned requests that may be under way at a time."""
    returns: int = 1
    """How often a worker whose session is dead comes back."""
    acts: bool = False
    """Whether leaders act on a singleton that the role governs."""
    losses: int = 0
    """How often the role's record is lost."""
    releases: bool = True
    """Whether leaders release the role by themselves."""


class Role(msgspec.Struct, frozen=True, gc=False):
    """The record of the role."""

    epoch: int = 0
    owner: str = NOBODY
    successor: str = NOBODY
    """The only candidate that may take it, for one heartbeat interval."""

    @property
    def reserved(self) -> bool:
        return self.successor != NOBODY


class Request(msgspec.Struct, frozen=True, gc=False):
    """A write that replaces the role that its sender read."""

    role: Role
    fresh: bool = True
    """Whether its base is still there. Once replaced, a base never comes back."""
    phase: Phase = "sent"


class Act(msgspec.Struct, frozen=True, gc=False):
    """A leader's work on the singleton; it may pause at any point."""

    epoch: int
    who: str
    sends: Literal["", "seal", "write"] = ""
    """The write that is under way, in place of the record that was read."""


class Node(msgspec.Struct, frozen=True, gc=False):
    """A candidate."""

    name: str
    incarnation: int = 0
    trust: Trust = "trusted"
    term: int = 0
    """The epoch in which it leads while it trusts itself; 0 for none."""
    over: bool = False
    """Whether its term of the current epoch is over: that does not come back."""
    request: Request | None = None
    act: Act | None = None

    @property
    def id(self) -> str:
        return f"{self.name}{self.incarnation}"


class State(msgspec.Struct, frozen=True, gc=False):
    """Two candidates, the role, its singleton, and the requests under way."""

    nodes: tuple[Node, Node]
    role: Role = Role()
    highest: int = 0
    """The highest epoch with which the role was taken."""
    strays: frozenset[Request] = frozenset()
    """Abandoned requests that may still replace the current role."""
    removed: frozenset[str] = frozenset()
    """The named sessions whose record was removed."""
    sealed: int = 0
    """The epoch of the singleton."""
    sealer: str = NOBODY
    """The owner of that epoch."""
    acted: int = 0
    """The highest epoch whose leader has acted on what it read in the singleton."""
    losses: int = 0
    broken: str = ""


class RoleModel(Model[State]):
    """Two candidates for one role."""

    reservations_end = True
    """Whether any candidate may take the role one interval after a handover."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        yield State((Node("A"), Node("B")))

    def steps(self, state: State) -> Iterator[Step[State]]:
        for number, node in enumerate(state.nodes):
            yield from self._step_session(state, number, node)
            if node.trust != "dead":
                yield from self._step_candidate(state, number, node)
            if self._scene.acts:
                yield from self._act(state, number, node)
        for stray in state.strays:
            yield Step(f"late: {_describe(stray.role)}", self._commit(state, stray.role))
        if state.role.reserved and self.reservations_end:
            yield Step("an interval passes", replace(state, role=Role(state.role.epoch)))
        if state.losses < self._scene.losses:
            after = self._commit(replace(state, losses=state.losses + 1), Role())
            yield Step("the role's record is lost", after, is_fault=True)
        owner = state.role.owner
        for name in sorted({owner, *(stray.role.owner for stray in state.strays)} - state.removed):
            if self._dead(state, name) and self.may_remove(state, name):
                yield Step(f"{name} is removed", replace(state, removed=state.removed | {name}))

    def find_violation(self, state: State) -> str | None:
        if not state.losses and all(self.believes(node) for node in state.nodes):
            return "both believe that they lead"
        return state.broken or None

    def is_goal(self, state: State) -> bool:
        nobody = all(node.trust == "dead" for node in state.nodes)
        far = state.highest == self._scene.epochs
        return nobody or far or any(self._leads(state, node) for node in state.nodes)

    # Overridden by mutations.

    def believes(self, node: Node) -> bool:
        return node.term > 0 and node.trust == "trusted"

    def free(self, state: State, node: Node) -> bool:
        """Whether a candidate may take the role by what it reads."""
        role = state.role
        if role.owner == NOBODY:
            return not role.reserved or role.successor == node.id
        return self.gone(state, role.owner) or role.owner == node.id

    def gone(self, state: State, owner: str) -> bool:
        """Whether an owner's session reads dead, or was absent for a whole timeout."""
        return self._dead(state, owner)

    def adopts(self, state: State, node: Node) -> bool:
        """Whether the role's epoch is the candidate's own, by a take whose reply was lost."""
        return state.role.owner == node.id and not node.over

    def may_remove(self, state: State, name: str) -> bool:
        return state.role.owner != name

    def begin_take(self, node: Node, taken: Role) -> Node:
        return replace(node, request=Request(taken))

    def begin_release(self, node: Node, request: Request) -> Node:
        """End a term when its release is sent."""
        return replace(node, term=0, over=True, request=request)

    def epoch_after_release(self, epoch: int) -> int:
        return epoch

    def on_reply(self, node: Node, request: Request) -> Node:
        """Process the reply to a request."""
        node = replace(node, request=None)
        if request.phase == "applied" and request.role.owner == node.id:
            return replace(node, term=request.role.epoch)
        return node

    def outdated(self, request: Request) -> Request:
        """Mark a request whose base was replaced."""
        return replace(request, fresh=False)

    def lapse(self, node: Node) -> Node:
        """End the trust; the term is over, and does not come back with trust."""
        return replace(node, trust="lapsed", term=0, over=node.over or node.term > 0)

    def die(self, node: Node) -> Node:
        """Declare a session dead, which it learns later. Its requests are not its own any more."""
        return replace(node, trust="dead", term=0, over=False, request=None)

    def rebirth(self, node: Node) -> Node:
        """Return as a new incarnation, which may continue what the old one started."""
        return Node(node.name, node.incarnation + 1, act=node.act)

    def prepare(self, state: State, act: Act) -> Act | None:
        """Decide by the singleton how to continue: seal it, write to it, or stop."""
        if state.sealed < act.epoch:
            return replace(act, sends="seal")
        mine = (state.sealed, state.sealer) == (act.epoch, act.who)
        return replace(act, sends="write") if mine else None

    def fenced(self, node: Node, act: Act) -> Node:
        """Step down when the singleton refuses the epoch."""
        mine = (node.term, node.id) == (act.epoch, act.who)
        return replace(node, term=0, over=True) if mine else node

    # Steps.

    def _leads(self, state: State, node: Node) -> bool:
        """Whether a candidate leads, and the singleton accepts its writes."""
        accepted = node.term > state.sealed or (node.term, node.id) == (state.sealed, state.sealer)
        return self.believes(node) and accepted

    def _step_session(self, state: State, number: int, node: Node) -> Iterator[Step[State]]:
        """Yield the steps of a session."""
        if node.trust == "trusted":
            after = _with(state, number, self.lapse(node))
            yield Step(f"{node.id} lapses", after, is_fault=True)
        elif node.trust == "lapsed":
            after = _with(self._abandon(state, node), number, self.die(node))
            yield Step(f"{node.id} is declared dead", after, is_fault=True)
            after = _with(state, number, replace(node, trust="trusted"))
            yield Step(f"{node.id} sends a heartbeat, and trusts itself again", after)
        elif sum(each.incarnation for each in state.nodes) < self._scene.returns:
            after = _with(state, number, self.rebirth(node))
            yield Step(f"{node.id} reads that it is dead, and returns", after, is_fault=True)

    def _step_candidate(self, state: State, number: int, node: Node) -> Iterator[Step[State]]:
        """Yield the steps of a candidate: take the role, adopt it, or release it."""
        request = node.request
        if request is not None:
            if request.phase == "sent":
                yield self._arrive(state, number, node, request)
            else:
                after = _with(state, number, self.on_reply(node, request))
                yield Step(f"{node.id} gets the reply: {request.phase}", after)
            unanswered = replace(request, phase="conflicted")
            after = _with(self._abandon(state, node), number, self.on_reply(node, unanswered))
            yield Step(f"{node.id} abandons its request", after)
        elif node.term:
            if self._scene.releases:
                yield self._release(state, number, node, NOBODY)
                yield self._release(state, number, node, state.nodes[1 - number].id)
        elif node.trust == "trusted":
            if self.adopts(state, node):
                adopted = replace(node, term=state.role.epoch)
                what = f"{node.id} finds itself the owner of epoch {state.role.epoch}"
                yield Step(what, _with(state, number, adopted))
            # The singleton's epoch counts too: the role may have been lost.
            epoch = max(state.role.epoch, state.sealed) + 1
            if epoch <= self._scene.epochs and self.free(state, node):
                taken = Role(epoch, node.id)
                after = _with(state, number, self.begin_take(node, taken))
                yield Step(f"{node.id} sends: {_describe(taken)}", after)
            if self.gone(state, state.role.owner):
                vacated = Role(state.role.epoch)
                after = _with(state, number, replace(node, request=Request(vacated)))
                yield Step(f"{node.id} sends, for the dead: {_describe(vacated)}", after)

    def _release(self, state: State, number: int, node: Node, successor: str) -> Step[State]:
        epoch = self.epoch_after_release(node.term)
        released = Role(epoch, successor=successor)
        fresh = (state.role.epoch, state.role.owner) == (node.term, node.id)
        after = _with(state, number, self.begin_release(node, Request(released, fresh)))
        return Step(f"{node.id} sends: {_describe(released)}", after, is_fault=True)

    def _arrive(self, state: State, number: int, node: Node, request: Request) -> Step[State]:
        """Deliver the request that a candidate waits for."""
        phase: Phase = "applied" if request.fresh else "conflicted"
        if request.fresh:
            state = self._commit(state, request.role)
        answered = replace(state.nodes[number], request=replace(request, phase=phase))
        after = _with(state, number, answered)
        return Step(f"{node.id}'s request arrives: {phase}", after)

    def _abandon(self, state: State, node: Node) -> State:
        """Keep an abandoned request under way, if it can still land."""
        request = node.request
        if request is None or request.phase != "sent" or not request.fresh:
            return state
        if len(state.strays - {request}) == self._scene.strays:
            return state
        return replace(state, strays=state.strays | {request})

    def _commit(self, state: State, role: Role) -> State:
        """Replace the role."""
        broken = state.broken
        if role.owner != NOBODY and role.epoch <= state.highest and not state.losses:
            broken = f"epoch {role.epoch} was taken after epoch {state.highest}"
        if role.owner not in {NOBODY, state.role.successor} and state.role.reserved:
            broken = f"{role.owner} took what is reserved for {state.role.successor}"
        first, second = state.nodes
        return replace(
            state,
            nodes=(self._outdate(first), self._outdate(second)),
            role=role,
            highest=max(state.highest, role.epoch),
            strays=frozenset(stray for stray in state.strays if self.outdated(stray).fresh),
            removed=state.removed & {role.owner},
            broken=broken,
        )

    def _outdate(self, node: Node) -> Node:
        request = node.request
        if request is not None and request.phase == "sent":
            request = self.outdated(request)
        return replace(node, over=False, request=request)

    def _dead(self, state: State, name: str) -> bool:
        """Whether a session's record reads dead, or did before it was removed."""
        return any(
            node.name == name[:1] and (node.trust == "dead" or int(name[1:]) < node.incarnation)
            for node in state.nodes
        )

    def _act(self, state: State, number: int, node: Node) -> Iterator[Step[State]]:
        """Yield the steps of a current or former leader that acts on the singleton."""
        act = node.act
        if act is None:
            if self.believes(node):
                started = replace(node, act=Act(node.term, node.id))
                yield Step(
                    f"{node.id} starts to act in epoch {node.term}", _with(state, number, started)
                )
            return
        who = f"{act.who}, of epoch {act.epoch},"
        if not act.sends:
            next_act = self.prepare(state, act)
            acted = state.acted
            if next_act is None:
                node = self.fenced(node, act)
            elif next_act.sends == "write":
                acted = max(acted, act.epoch)
            after = replace(_with(state, number, replace(node, act=next_act)), acted=acted)
            yield Step(f"{who} reads the singleton", after)
        else:
            accepted = self._accept(state, act)
            left = Act(act.epoch, act.who) if act.sends == "seal" else None
            after = _with(accepted, number, replace(node, act=left))
            yield Step(f"the {act.sends} of {who} lands", after)

    def _accept(self, state: State, act: Act) -> State:
        """Replace the singleton by a leader's write."""
        broken, latest = state.broken, max(state.sealed, state.acted)
        if act.epoch < latest:
            broken = f"a write of epoch {act.epoch} was accepted after epoch {latest}"
        if act.epoch == state.sealed and act.who != state.sealer:
            broken = f"both {state.sealer} and {act.who} write with epoch {act.epoch}"
        first, second = (
            replace(node, act=None) if node.act is not None and node.act.sends else node
            for node in state.nodes
        )
        # Writes based on the earlier record now conflict.
        return replace(
            state, nodes=(first, second), sealed=act.epoch, sealer=act.who, broken=broken
        )


def _describe(role: Role) -> str:
    if role.owner != NOBODY:
        return f"{role.owner} takes epoch {role.epoch}"
    return f"epoch {role.epoch} is released" + (f" for {role.successor}" if role.successor else "")


def _with(state: State, number: int, node: Node) -> State:
    first, second = state.nodes
    return replace(state, nodes=(first, node) if number else (node, second))


class TakesALiveRole(RoleModel):
    """A role is taken from an owner that lives."""

    def gone(self, state: State, owner: str) -> bool:
        return True


class NobodyAdopts(RoleModel):
    """The owner of a take without a reply waits, like all others, for its own death."""

    def adopts(self, state: State, node: Node) -> bool:
        return False

    def free(self, state: State, node: Node) -> bool:
        return state.role.owner != node.id and super().free(state, node)


class AdoptsAReleasedTerm(RoleModel):
    """A candidate adopts an epoch whose release it has sent; the release lands later."""

    def adopts(self, state: State, node: Node) -> bool:
        return state.role.owner == node.id


class EpochRestarts(RoleModel):
    """A release forgets the epoch."""

    def epoch_after_release(self, epoch: int) -> int:
        return 0


class LeadsUntilReleaseIsAnswered(RoleModel):
    """A leader that releases its role leads until the reply."""

    def begin_release(self, node: Node, request: Request) -> Node:
        return replace(node, request=request)

    def on_reply(self, node: Node, request: Request) -> Node:
        released = request.role.owner == NOBODY
        node = super().on_reply(node, request)
        return replace(node, term=0, over=True) if released else node


class ReleaseOfAnyTerm(RoleModel):
    """A release replaces any version; a late one ends a newer term."""

    def outdated(self, request: Request) -> Request:
        return request if request.role.owner == NOBODY else super().outdated(request)


class LeadsWhenTakeIsSent(RoleModel):
    """A candidate leads from the send of its take; another's was applied."""

    def begin_take(self, node: Node, taken: Role) -> Node:
        return replace(super().begin_take(node, taken), term=taken.epoch)


class TermOutlivesItsSession(RoleModel):
    """A new incarnation continues the term of the dead one."""

    def lapse(self, node: Node) -> Node:
        return replace(node, trust="lapsed")

    def die(self, node: Node) -> Node:
        return replace(super().die(node), term=node.term)

    def rebirth(self, node: Node) -> Node:
        return replace(super().rebirth(node), term=node.term)


class BeliefIsCached(RoleModel):
    """A leader does not check whether its session still trusts itself."""

    def lapse(self, node: Node) -> Node:
        return replace(node, trust="lapsed")

    def die(self, node: Node) -> Node:
        return replace(super().die(node), term=node.term)

    def believes(self, node: Node) -> bool:
        return node.term > 0


class EndlessReservation(RoleModel):
    """Only the successor may ever take the role; it is dead."""

    reservations_end = False


class NothingReserved(RoleModel):
    """Any candidate takes the role at once after a handover."""

    def free(self, state: State, node: Node) -> bool:
        return state.role.owner == NOBODY or super().free(state, node)


class OwnerRemoved(RoleModel):
    """A dead owner's record is removed while the role names it, and absence is not death."""

    def gone(self, state: State, owner: str) -> bool:
        return owner not in state.removed and super().gone(state, owner)

    def may_remove(self, state: State, name: str) -> bool:
        return True


class AbsenceIsNotDeath(RoleModel):
    """A named session is not removed; but a late take names one that was removed before."""

    def gone(self, state: State, owner: str) -> bool:
        return owner not in state.removed and super().gone(state, owner)


class NoFencing(RoleModel):
    """A leader seals, but does not check whether a later one has."""

    def prepare(self, state: State, act: Act) -> Act | None:
        return replace(act, sends="seal" if state.sealed < act.epoch else "write")


class NoSeal(RoleModel):
    """A new leader acts on what it reads before it has written its epoch."""

    def prepare(self, state: State, act: Act) -> Act | None:
        return None if state.sealed > act.epoch else replace(act, sends="write")


class SealWithoutAName(RoleModel):
    """A seal has an epoch without an owner; a lost role made two leaders of one epoch."""

    def prepare(self, state: State, act: Act) -> Act | None:
        return super().prepare(replace(state, sealer=act.who), act)


class FencedButStillLeading(RoleModel):
    """A leader that the singleton refuses does not step down; nobody can act any more."""

    def fenced(self, node: Node, act: Act) -> Node:
        return node


WORLDS = {
    "a long election": Scene(epochs=4),
    "two strays": Scene(epochs=3, strays=2),
    "a short election": Scene(epochs=2),
    "leaders that act": Scene(epochs=2, strays=0, returns=0, acts=True),
    "actors that return": Scene(epochs=3, strays=0, acts=True, releases=False),
    "a role that is lost": Scene(
        epochs=2, strays=0, returns=0, acts=True, losses=1, releases=False
    ),
}

MUTATIONS: dict[type[RoleModel], str] = {
    TakesALiveRole: "two strays",
    NobodyAdopts: "a short election",
    AdoptsAReleasedTerm: "two strays",
    EpochRestarts: "two strays",
    LeadsUntilReleaseIsAnswered: "two strays",
    ReleaseOfAnyTerm: "two strays",
    LeadsWhenTakeIsSent: "two strays",
    TermOutlivesItsSession: "two strays",
    BeliefIsCached: "two strays",
    EndlessReservation: "a short election",
    NothingReserved: "two strays",
    OwnerRemoved: "a short election",
    AbsenceIsNotDeath: "a short election",
    NoFencing: "leaders that act",
    NoSeal: "leaders that act",
    SealWithoutAName: "a role that is lost",
    FencedButStillLeading: "a role that is lost",
}
