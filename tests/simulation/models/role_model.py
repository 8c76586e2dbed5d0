"""An election between two candidates: never two believers, and never a role that nobody may take.

Sessions are taken as `session_model` shows them: whoever reads dead does not trust itself.
Trust may lapse and come back; a session may be called dead only while it has lapsed, and
its worker then returns as another incarnation. Takes and releases of the role, and writes
to what the role governs, may land late or never, and be applied without an answer.

- Every take has an epoch higher than any before it, and so every epoch has one owner.
- At most one candidate believes that it leads.
- A role that was handed over is taken within a beat by nobody but the named successor.
- What the role governs accepts no write of an epoch lower than one that it has accepted,
  or that has begun to act on it, and under one epoch only its owner's.
- From wherever they get to, candidates that suffer no further misfortune get to a leader,
  without the help of those whose sessions are dead.

If the role's record itself is lost, by an operator's hand or in a restore, there may be two
believers, and an epoch may be taken twice; what the role governs is protected all the same.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec
from explorer import Model, Step

__all__ = ["MUTATIONS", "WORLDS", "RoleModel", "Scene"]

Life: TypeAlias = Literal["trusted", "lapsed", "dead"]
"""Of a session: its own view while it lives, its record's once that reads dead."""
Phase: TypeAlias = Literal["sent", "applied", "conflicted"]

NOBODY = ""

replace = msgspec.structs.replace


class Scene(msgspec.Struct, frozen=True):
    """How long it goes on, and what may happen in it."""

    epochs: int
    """How many terms there may be; a state that has seen so many has got far enough."""
    strays: int = 1
    """How many requests that were given up may be under way at a time."""
    returns: int = 1
    """How often a worker whose session is dead comes back."""
    acts: bool = False
    """Whether leaders act on a record that the role governs."""
    losses: int = 0
    """How often the role's record is lost."""
    releases: bool = True
    """Whether leaders give up the role of their own accord."""


class Role(msgspec.Struct, frozen=True, gc=False):
    """Who leads, as the store has it."""

    epoch: int = 0
    owner: str = NOBODY
    successor: str = NOBODY
    """Who alone may take it, until a beat has passed."""

    @property
    def reserved(self) -> bool:
        return self.successor != NOBODY


class Request(msgspec.Struct, frozen=True, gc=False):
    """A change of the role, in place of what its sender read."""

    role: Role
    fresh: bool = True
    """Whether what it is to replace is still there. Once it is not, it never will be again."""
    phase: Phase = "sent"


class Act(msgspec.Struct, frozen=True, gc=False):
    """What a leader is about with the governed record; it may stop for long at any point."""

    epoch: int
    who: str
    sends: Literal["", "seal", "write"] = ""
    """What is on its way, in place of the record that was read."""


class Node(msgspec.Struct, frozen=True, gc=False):
    """A candidate."""

    name: str
    incarnation: int = 0
    life: Life = "trusted"
    term: int = 0
    """The epoch that it leads under, while it trusts itself; 0 is none."""
    over: bool = False
    """Whether it led under the role's present epoch, or gave it up: that does not come back."""
    request: Request | None = None
    act: Act | None = None

    @property
    def id(self) -> str:
        return f"{self.name}{self.incarnation}"


class State(msgspec.Struct, frozen=True, gc=False):
    """Two candidates, the role, what it governs, and what is under way."""

    nodes: tuple[Node, Node]
    role: Role = Role()
    highest: int = 0
    """The highest epoch that ever took the role."""
    strays: frozenset[Request] = frozenset()
    """Requests that were given up, and may still land in place of the role as it is."""
    buried: frozenset[str] = frozenset()
    """The sessions whose record is gone, as far as anything names them."""
    sealed: int = 0
    """The epoch in the governed record."""
    sealer: str = NOBODY
    """Whose epoch that is."""
    acted: int = 0
    """The highest epoch whose leader decided by what it read in the governed record."""
    losses: int = 0
    broken: str = ""


class RoleModel(Model[State]):
    """Two candidates for one role."""

    reservations_end = True
    """Whether anybody may take what was handed over, once a beat has passed."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def starts(self) -> Iterator[State]:
        yield State((Node("A"), Node("B")))

    def steps(self, state: State) -> Iterator[Step[State]]:
        for number, node in enumerate(state.nodes):
            yield from self._live(state, number, node)
            if node.life != "dead":
                yield from self._stand(state, number, node)
            if self._scene.acts:
                yield from self._act(state, number, node)
        for stray in state.strays:
            yield Step(f"late: {_tell(stray.role)}", self._commit(state, stray.role))
        if state.role.reserved and self.reservations_end:
            yield Step("a beat passes", replace(state, role=Role(state.role.epoch)))
        if state.losses < self._scene.losses:
            after = self._commit(replace(state, losses=state.losses + 1), Role())
            yield Step("the role's record is lost", after, misfortune=True)
        owner = state.role.owner
        for name in sorted({owner, *(stray.role.owner for stray in state.strays)} - state.buried):
            if self._dead(state, name) and self.may_bury(state, name):
                yield Step(f"{name} is buried", replace(state, buried=state.buried | {name}))

    def wrong(self, state: State) -> str | None:
        if not state.losses and all(self.believes(node) for node in state.nodes):
            return "both believe that they lead"
        return state.broken or None

    def reached(self, state: State) -> bool:
        nobody = all(node.life == "dead" for node in state.nodes)
        far = state.highest == self._scene.epochs
        return nobody or far or any(self._leads(state, node) for node in state.nodes)

    # What the mutations change.

    def believes(self, node: Node) -> bool:
        return node.term > 0 and node.life == "trusted"

    def free(self, state: State, node: Node) -> bool:
        """Say whether a candidate may take the role by what it reads."""
        role = state.role
        if role.owner == NOBODY:
            return not role.reserved or role.successor == node.id
        return self.gone(state, role.owner) or role.owner == node.id

    def gone(self, state: State, owner: str) -> bool:
        """Say whether an owner's session reads dead, or was absent for a whole timeout."""
        return self._dead(state, owner)

    def adopts(self, state: State, node: Node) -> bool:
        """Say whether the role's epoch is the candidate's own, by a take that it never heard of."""
        return state.role.owner == node.id and not node.over

    def may_bury(self, state: State, name: str) -> bool:
        return state.role.owner != name

    def begin_take(self, node: Node, taken: Role) -> Node:
        return replace(node, request=Request(taken))

    def begin_release(self, node: Node, request: Request) -> Node:
        """Be over with a term when its release is sent."""
        return replace(node, term=0, over=True, request=request)

    def epoch_after_release(self, epoch: int) -> int:
        return epoch

    def heard(self, node: Node, request: Request) -> Node:
        """Hear what became of a request."""
        node = replace(node, request=None)
        if request.phase == "applied" and request.role.owner == node.id:
            return replace(node, term=request.role.epoch)
        return node

    def outdated(self, request: Request) -> Request:
        """See the role change under a request."""
        return replace(request, fresh=False)

    def lapse(self, node: Node) -> Node:
        """Stop trusting oneself; the term is over, and does not come back with trust."""
        return replace(node, life="lapsed", term=0, over=node.over or node.term > 0)

    def die(self, node: Node) -> Node:
        """Be called dead, which a session finds out later. What it asked for is not its own."""
        return replace(node, life="dead", term=0, over=False, request=None)

    def rebirth(self, node: Node) -> Node:
        """Come back. Who began to act before may still go on with that."""
        return Node(node.name, node.incarnation + 1, act=node.act)

    def prepare(self, state: State, act: Act) -> Act | None:
        """Decide by the governed record how to go on: seal it, write to it, or stop."""
        if state.sealed < act.epoch:
            return replace(act, sends="seal")
        mine = (state.sealed, state.sealer) == (act.epoch, act.who)
        return replace(act, sends="write") if mine else None

    def fenced(self, node: Node, act: Act) -> Node:
        """Step down when what the role governs refuses one's epoch."""
        mine = (node.term, node.id) == (act.epoch, act.who)
        return replace(node, term=0, over=True) if mine else node

    # Who does what.

    def _leads(self, state: State, node: Node) -> bool:
        """Say whether a candidate leads, and may act on what it governs."""
        accepted = node.term > state.sealed or (node.term, node.id) == (state.sealed, state.sealer)
        return self.believes(node) and accepted

    def _live(self, state: State, number: int, node: Node) -> Iterator[Step[State]]:
        """Let a session live and die."""
        if node.life == "trusted":
            after = _with(state, number, self.lapse(node))
            yield Step(f"{node.id} lapses", after, misfortune=True)
        elif node.life == "lapsed":
            after = _with(self._give_up(state, node), number, self.die(node))
            yield Step(f"{node.id} is written dead", after, misfortune=True)
            after = _with(state, number, replace(node, life="trusted"))
            yield Step(f"{node.id} beats, and trusts itself again", after)
        elif sum(each.incarnation for each in state.nodes) < self._scene.returns:
            after = _with(state, number, self.rebirth(node))
            yield Step(f"{node.id} finds itself dead, and returns", after, misfortune=True)

    def _stand(self, state: State, number: int, node: Node) -> Iterator[Step[State]]:
        """Let a candidate ask for the role, adopt it, or give it up."""
        request = node.request
        if request is not None:
            if request.phase == "sent":
                yield self._arrive(state, number, node, request)
            else:
                after = _with(state, number, self.heard(node, request))
                yield Step(f"{node.id} hears: {request.phase}", after)
            unheard = replace(request, phase="conflicted")
            after = _with(self._give_up(state, node), number, self.heard(node, unheard))
            yield Step(f"{node.id} gives up to hear of its request", after)
        elif node.term:
            if self._scene.releases:
                yield self._release(state, number, node, NOBODY)
                yield self._release(state, number, node, state.nodes[1 - number].id)
        elif node.life == "trusted":
            if self.adopts(state, node):
                adopted = replace(node, term=state.role.epoch)
                what = f"{node.id} finds itself the owner of epoch {state.role.epoch}"
                yield Step(what, _with(state, number, adopted))
            # Counted on from what the role governs, too: the role may have been lost.
            epoch = max(state.role.epoch, state.sealed) + 1
            if epoch <= self._scene.epochs and self.free(state, node):
                taken = Role(epoch, node.id)
                after = _with(state, number, self.begin_take(node, taken))
                yield Step(f"{node.id} sends: {_tell(taken)}", after)
            if self.gone(state, state.role.owner):
                vacated = Role(state.role.epoch)
                after = _with(state, number, replace(node, request=Request(vacated)))
                yield Step(f"{node.id} sends, for the dead: {_tell(vacated)}", after)

    def _release(self, state: State, number: int, node: Node, successor: str) -> Step[State]:
        epoch = self.epoch_after_release(node.term)
        given = Role(epoch, successor=successor)
        fresh = (state.role.epoch, state.role.owner) == (node.term, node.id)
        after = _with(state, number, self.begin_release(node, Request(given, fresh)))
        return Step(f"{node.id} sends: {_tell(given)}", after, misfortune=True)

    def _arrive(self, state: State, number: int, node: Node, request: Request) -> Step[State]:
        """Let the request that a candidate waits for reach the store."""
        phase: Phase = "applied" if request.fresh else "conflicted"
        if request.fresh:
            state = self._commit(state, request.role)
        answered = replace(state.nodes[number], request=replace(request, phase=phase))
        after = _with(state, number, answered)
        return Step(f"{node.id}'s request arrives: {phase}", after)

    def _give_up(self, state: State, node: Node) -> State:
        """Let a request of which nobody wants to hear stay under way, if it can still land."""
        request = node.request
        if request is None or request.phase != "sent" or not request.fresh:
            return state
        if len(state.strays - {request}) == self._scene.strays:
            return state
        return replace(state, strays=state.strays | {request})

    def _commit(self, state: State, role: Role) -> State:
        """Put another role in the place of the one that is there."""
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
            buried=state.buried & {role.owner},
            broken=broken,
        )

    def _outdate(self, node: Node) -> Node:
        request = node.request
        if request is not None and request.phase == "sent":
            request = self.outdated(request)
        return replace(node, over=False, request=request)

    def _dead(self, state: State, name: str) -> bool:
        """Say whether a session's record reads dead, or did before it was buried."""
        return any(
            node.name == name[:1] and (node.life == "dead" or int(name[1:]) < node.incarnation)
            for node in state.nodes
        )

    def _act(self, state: State, number: int, node: Node) -> Iterator[Step[State]]:
        """Let a leader, or one who was when it began, act on what the role governs."""
        act = node.act
        if act is None:
            if self.believes(node):
                begun = replace(node, act=Act(node.term, node.id))
                yield Step(
                    f"{node.id} begins to act in epoch {node.term}", _with(state, number, begun)
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
            yield Step(f"{who} reads the governed record", after)
        else:
            accepted = self._accept(state, act)
            left = Act(act.epoch, act.who) if act.sends == "seal" else None
            after = _with(accepted, number, replace(node, act=left))
            yield Step(f"the {act.sends} of {who} lands", after)

    def _accept(self, state: State, act: Act) -> State:
        """Put a leader's write in the place of the governed record that is there."""
        broken, latest = state.broken, max(state.sealed, state.acted)
        if act.epoch < latest:
            broken = f"a write of epoch {act.epoch} was accepted after epoch {latest}"
        if act.epoch == state.sealed and act.who != state.sealer:
            broken = f"both {state.sealer} and {act.who} write under epoch {act.epoch}"
        first, second = (
            replace(node, act=None) if node.act is not None and node.act.sends else node
            for node in state.nodes
        )
        # What was based on the record before finds it changed, and comes to nothing.
        return replace(
            state, nodes=(first, second), sealed=act.epoch, sealer=act.who, broken=broken
        )


def _tell(role: Role) -> str:
    if role.owner != NOBODY:
        return f"{role.owner} takes epoch {role.epoch}"
    return f"epoch {role.epoch} is given up" + (f" for {role.successor}" if role.successor else "")


def _with(state: State, number: int, node: Node) -> State:
    first, second = state.nodes
    return replace(state, nodes=(first, node) if number else (node, second))


class TakesALiveRole(RoleModel):
    """A role is taken from an owner that lives."""

    def gone(self, state: State, owner: str) -> bool:
        return True


class NobodyAdopts(RoleModel):
    """The owner of a take that it never heard of waits, like all others, for its own death."""

    def adopts(self, state: State, node: Node) -> bool:
        return False

    def free(self, state: State, node: Node) -> bool:
        return state.role.owner != node.id and super().free(state, node)


class AdoptsWhatItGaveUp(RoleModel):
    """A candidate adopts an epoch whose release it has sent; the release lands later."""

    def adopts(self, state: State, node: Node) -> bool:
        return state.role.owner == node.id


class EpochRestarts(RoleModel):
    """A release forgets the epoch."""

    def epoch_after_release(self, epoch: int) -> int:
        return 0


class ReleaseBelievedTooLong(RoleModel):
    """A leader that gives up its role leads until that is answered."""

    def begin_release(self, node: Node, request: Request) -> Node:
        return replace(node, request=request)

    def heard(self, node: Node, request: Request) -> Node:
        released = request.role.owner == NOBODY
        node = super().heard(node, request)
        return replace(node, term=0, over=True) if released else node


class ReleaseOfAnyTerm(RoleModel):
    """A release replaces whatever is there; a late one ends a newer term."""

    def outdated(self, request: Request) -> Request:
        return request if request.role.owner == NOBODY else super().outdated(request)


class TakeBelievedWhenSent(RoleModel):
    """A candidate leads from when it sends its take; another's was applied."""

    def begin_take(self, node: Node, taken: Role) -> Node:
        return replace(super().begin_take(node, taken), term=taken.epoch)


class TermOutlivesItsSession(RoleModel):
    """A new incarnation goes on with the term of the one that died."""

    def lapse(self, node: Node) -> Node:
        return replace(node, life="lapsed")

    def die(self, node: Node) -> Node:
        return replace(super().die(node), term=node.term)

    def rebirth(self, node: Node) -> Node:
        return replace(super().rebirth(node), term=node.term)


class BeliefIsCached(RoleModel):
    """A leader does not ask its session whether it still trusts itself."""

    def lapse(self, node: Node) -> Node:
        return replace(node, life="lapsed")

    def die(self, node: Node) -> Node:
        return replace(super().die(node), term=node.term)

    def believes(self, node: Node) -> bool:
        return node.term > 0


class SuccessorForEver(RoleModel):
    """Only the successor may ever take what was handed over; it is dead."""

    reservations_end = False


class NothingReserved(RoleModel):
    """Anybody takes at once what was handed over."""

    def free(self, state: State, node: Node) -> bool:
        return state.role.owner == NOBODY or super().free(state, node)


class OwnerBuried(RoleModel):
    """A dead owner's record goes while the role names it, and absence is not death."""

    def gone(self, state: State, owner: str) -> bool:
        return owner not in state.buried and super().gone(state, owner)

    def may_bury(self, state: State, name: str) -> bool:
        return True


class AbsenceIsNotDeath(RoleModel):
    """Who is named is not buried; but a late take names who was buried before."""

    def gone(self, state: State, owner: str) -> bool:
        return owner not in state.buried and super().gone(state, owner)


class NoFencing(RoleModel):
    """A leader seals, but does not look whether a later one has."""

    def prepare(self, state: State, act: Act) -> Act | None:
        return replace(act, sends="seal" if state.sealed < act.epoch else "write")


class NoSeal(RoleModel):
    """A new leader acts by what it reads, before it has written its epoch there."""

    def prepare(self, state: State, act: Act) -> Act | None:
        return None if state.sealed > act.epoch else replace(act, sends="write")


class SealWithoutAName(RoleModel):
    """A seal tells the epoch and not whose; a role that was lost made two leaders of one epoch."""

    def prepare(self, state: State, act: Act) -> Act | None:
        return super().prepare(replace(state, sealer=act.who), act)


class FencedAndStillInOffice(RoleModel):
    """A leader that what it governs refuses does not step down; nobody can act any more."""

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
    AdoptsWhatItGaveUp: "two strays",
    EpochRestarts: "two strays",
    ReleaseBelievedTooLong: "two strays",
    ReleaseOfAnyTerm: "two strays",
    TakeBelievedWhenSent: "two strays",
    TermOutlivesItsSession: "two strays",
    BeliefIsCached: "two strays",
    SuccessorForEver: "a short election",
    NothingReserved: "two strays",
    OwnerBuried: "a short election",
    AbsenceIsNotDeath: "a short election",
    NoFencing: "leaders that act",
    NoSeal: "leaders that act",
    SealWithoutAName: "a role that is lost",
    FencedAndStillInOffice: "a role that is lost",
}
