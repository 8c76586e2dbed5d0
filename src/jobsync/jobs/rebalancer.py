"""What the leader does: deal tokens to the nodes that live and are ready.

The assignment is a singleton that only the leader writes, fenced by its term. Each round
looks at the nodes and decides anew, from the assignment that stands; so a leader that takes
over goes on where the other stopped, and a round that changes nothing writes nothing.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import listening
from jobsync.coordination.term import Term
from jobsync.core.assignment import (
    NodeRef,
    Plan,
    count_moved,
    join_exceptions,
    name_parts,
    read_plan,
    served_by,
    split_exceptions,
    to_document,
)
from jobsync.core.codec import Json
from jobsync.core.handover import assign
from jobsync.core.pins import Pin
from jobsync.errors import Conflict, Fenced, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.jobs.events import Rebalanced
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord, read_node_record
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["Rebalancer", "fetch_plan"]

_MOST = 10_000

_PlanInputs: TypeAlias = tuple[list[NodeRef], dict[str, int], frozenset[str], Sequence[Pin]]
"""What a decision rests on, besides the plan that stands."""
_LONG = 3600.0


async def fetch_plan(store: Store, places: JobKeys, document: Record) -> Plan | None:
    """Read the plan that an assignment is the main part of; None if it was replaced meanwhile."""
    name = document.value.get("exceptions")
    if not name:
        return read_plan(document.value, None, document.key)
    exceptions = await _fetch_exceptions(store, places, name)
    return None if exceptions is None else read_plan(document.value, exceptions, document.key)


async def _fetch_exceptions(store: Store, places: JobKeys, name: str) -> Json | None:
    """Read the exceptions of a name; None if they, or a part of them, were replaced meanwhile."""
    first = await store.get(places.exceptions(name))
    if first is None or (parts := first.value.get("parts", 1)) == 1:
        return None if first is None else first.value
    keys = [places.exceptions(f"{name}.{part}") for part in range(1, parts)]
    others = [record.value for record in await store.get_many(keys) if record is not None]
    return join_exceptions(first.value, others) if len(others) == len(keys) else None


class Rebalancer:
    """Deals tokens while its node leads.

    Args:
        store: where nodes and the assignment are.
        components: the clock and a place to tell facts.
        membership: who knows which sessions are dead.
        places: the fleet's keys.
        total: how many tokens there are.
        node: this node's name, for the history.
        patience: seconds between rounds when nothing is heard.
        read_pins: gives the pins that are in force.
        pins_left: for how many seconds those that were given last stay so.
        published: called after each assignment that was written.
        restore: called when this node's own record is missing, to write it again.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        membership: Membership,
        places: JobKeys,
        *,
        total: int,
        node: str,
        patience: float,
        read_pins: Callable[[], Awaitable[Sequence[Pin]]],
        pins_left: Callable[[], float],
        published: Callable[[], object],
        restore: Callable[[], Awaitable[object]],
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._events = components.events
        self._witness = CorruptionLog(store.name, components.events)
        self._membership = membership
        self._places = places
        self._total = total
        self._node = node
        self._patience = patience
        self._read_pins = read_pins
        self._pins_left = pins_left
        self._published = published
        self._restore = restore
        self._dead: frozenset[str] = frozenset()
        self._decided_on: _PlanInputs | None = None
        self._pins: Sequence[Pin] | None = None
        self.number: int | None = None
        """The assignment that stands, while this node deals; None if that must be looked up."""

    async def deal_for_ever(self, term: Term) -> None:
        """Deal, and again whenever something has changed, until cancelled with the term."""
        plan: Plan | None = None
        is_told = True
        try:
            while True:
                try:
                    async with listening(
                        self._store.wait(self._places.nodes, _LONG),
                        self._store.wait(self._places.pins, _LONG),
                        self._hear_of_death(),
                    ) as heard:
                        plan = await self._deal(term, plan, is_told=is_told)
                        self.number = plan.assignment.number
                        is_told = await heard(self._rest(plan))
                except (Unavailable, Misconfigured, OutcomeUnknown):
                    # What stands is read again: a write may have happened.
                    plan = self.number = self._decided_on = None
                    is_told = True
                    await self._clock.sleep(self._membership.timing.heartbeat / 2)
        except Fenced:
            return
        finally:
            self.number = self._decided_on = self._pins = None
            self._membership.watch("dealing", ())

    async def _deal(self, term: Term, plan: Plan | None, *, is_told: bool) -> Plan:
        """Decide once; give the plan that stands now."""
        nodes = await self.list_nodes()
        if all(node.name != self._node for node in nodes):
            await self._restore()
            nodes = await self.list_nodes()
        if plan is None:
            plan = await self._read(term)
        known = {node.incarnation for node in plan.assignment.nodes}
        known |= {node.incarnation for node in nodes if node.stage != "left"}
        self._membership.watch("dealing", known)
        self._dead = self._find_dead()
        dead = self._dead | {node.incarnation for node in nodes if node.stage == "left"}
        members = [
            NodeRef(node.incarnation, node.name)
            for node in nodes
            if node.stage == "ready" and not node.is_observer and node.incarnation not in dead
        ]
        acks = {node.incarnation: node.applied for node in nodes}
        pins = await self._find_pins(is_told=is_told)
        facts = (members, acks, dead, pins)
        if facts == self._decided_on:
            # Most hints are about something else, and a decision costs a look at every token.
            return plan
        new = assign(plan, members, acks=acks, dead=dead, pins=pins)
        if new is not plan:
            await self._publish(term, plan, new)
        self._decided_on = facts if new is plan else None
        return new

    async def _find_pins(self, *, is_told: bool) -> Sequence[Pin]:
        """Give the pins that are in force.

        Where the store tells of changes and told of none, every other look will do: each one
        is a statement that an idle fleet sends for nothing.
        """
        is_quiet = not is_told and not self._store.is_billed and self._pins_left() > 0
        if self._pins is None or not is_quiet:
            self._pins = await self._read_pins()
            return self._pins
        # Forgotten, so that the next look is one at the pins.
        pins, self._pins = self._pins, None
        return pins

    async def _read(self, term: Term) -> Plan:
        value = await term.get(self._places.assignment)
        if value is None:
            return Plan.empty(self._total)
        name = value.get("exceptions")
        exceptions = await _fetch_exceptions(self._store, self._places, name) if name else None
        return read_plan(value, exceptions, self._places.assignment)

    async def _publish(self, term: Term, old: Plan, new: Plan) -> None:
        """Write a plan: what it refers to first."""
        begun = self._clock.mono()
        self.number = None
        before, after = old.assignment.exceptions, new.assignment.exceptions
        if after and after != before:
            for name, document in split_exceptions(after, new.exceptions).items():
                # Its name tells its content: if it is there, it is this.
                with suppress(Conflict):
                    await self._store.create(self._places.exceptions(name), document)
        await term.put(self._places.assignment, to_document(new.assignment))
        self._published()
        self._membership.publish(**{self._places.assignment: new.assignment.number})
        if moved := count_moved(old.assignment, new.assignment):
            await self._record(old, new, moved, self._clock.mono() - begun)
        if before and after != before:
            gone = name_parts(before, old.exceptions)
            await self._store.drop(list(map(self._places.exceptions, gone)))

    async def _record(self, old: Plan, new: Plan, moved: int, seconds: float) -> None:
        """Keep in the history that tokens moved, and why."""
        was, will = served_by(old.assignment), served_by(new.assignment)
        if not was:
            reason = "initial_distribution"
        elif was & self._dead:
            reason = "dead_nodes"
        elif was != will:
            reason = "membership_change"
        else:
            # Those who share the tokens being the same, only pins can have changed.
            reason = "locks_changed"
        facts: dict[str, Json] = {"nodes_before": len(was), "nodes_after": len(will)}
        facts |= {"tokens_moved": moved}
        line = {"trigger_reason": reason, "leader_node": self._node, **facts}
        line |= {"duration_ms": round(seconds * 1000, 3)}
        await self._store.append(self._places.rebalances, [line])
        number = new.assignment.number
        self._events.emit(Rebalanced(node=self._node, number=number, reason=reason, **facts))

    async def list_nodes(self) -> list[NodeRecord]:
        """Give the nodes of the fleet, those that have left too."""
        records = await self._store.scan(self._places.nodes, limit=_MOST)
        return self._witness.read_all(read_node_record, records)

    def read_node(self, record: Record) -> NodeRecord | None:
        """Understand a node's record; one that cannot be is reported and left alone."""
        return self._witness.read(read_node_record, record)

    def _rest(self, plan: Plan) -> float:
        """Give the time until it is to be looked at anyway, whether or not a node says a word."""
        is_moving = bool(plan.assignment.moves) or any(e.revoked for e in plan.exceptions.tasks)
        patience = self._membership.timing.heartbeat if is_moving else self._patience
        return min(patience, self._pins_left())

    async def _hear_of_death(self) -> None:
        while self._find_dead() == self._dead:
            await self._membership.change()

    def _find_dead(self) -> frozenset[str]:
        watched = self._membership.watched("dealing")
        return frozenset(each for each in watched if self._membership.is_dead(each))
