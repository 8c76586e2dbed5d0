"""The leader's work: assign tokens to the nodes that are alive and ready.

The assignment is a singleton that only the leader writes, fenced by its term. Each round reads
the nodes and decides again from the current assignment; so a new leader continues where the
old one stopped, and a round that changes nothing writes nothing.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import listening
from jobsync.coordination.term import Term
from jobsync.core.assignment import NodeRef, Plan, count_moved, served_by
from jobsync.core.codec import Json
from jobsync.core.handover import assign
from jobsync.core.pins import Pin
from jobsync.core.plan_documents import (
    count_parts,
    join_exceptions,
    name_parts,
    read_heading,
    read_plan,
    split_exceptions,
    to_document,
)
from jobsync.errors import Conflict, Fenced, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.jobs.events import Rebalanced
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord, find_candidates, read_node_record
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.paging import scan_all

__all__ = ["Rebalancer", "fetch_plan"]

_PlanInputs: TypeAlias = tuple[list[NodeRef], dict[str, int], frozenset[str], Sequence[Pin]]
"""The inputs of a decision, besides the current plan: members, acks, dead, pins."""
_WAIT_TIMEOUT = 3600.0


async def fetch_plan(store: Store, keys: JobKeys, document: Record) -> Plan | None:
    """Read the plan that belongs to an assignment; None if it was replaced meanwhile.

    Raises:
        Corrupt: it, or what belongs to it, cannot be read.
    """
    name = read_heading(document.value, document.key).exceptions
    if not name:
        return read_plan(document.value, None, document.key)
    exceptions = await _fetch_exceptions(store, keys, name)
    return None if exceptions is None else read_plan(document.value, exceptions, document.key)


async def _fetch_exceptions(store: Store, keys: JobKeys, name: str) -> Json | None:
    """Read the exceptions of a plan; None if they, or a part of them, were replaced meanwhile."""
    first = await store.get(keys.exceptions(name))
    if first is None or (parts := count_parts(first.value, first.key)) == 1:
        return None if first is None else first.value
    names = [keys.exceptions(f"{name}.{part}") for part in range(1, parts)]
    others = [record.value for record in await store.get_many(names) if record is not None]
    return join_exceptions(first.value, others, first.key) if len(others) == len(names) else None


def _find_members(plan: Plan, candidates: Sequence[NodeRecord]) -> list[NodeRef]:
    """Return the nodes that own tokens.

    A node that waits for a minimum of nodes owns nothing before they are there, because it does
    nothing before. All that wait for each other become members at once, and remain members.
    """
    known = {node.incarnation for node in plan.assignment.nodes}
    return [
        NodeRef(node.incarnation, node.name)
        for node in candidates
        if node.stage == "ready"
        or node.incarnation in known
        or len(candidates) >= node.minimum_nodes
    ]


class Rebalancer:
    """Assigns tokens while its node is the leader.

    Args:
        membership: knows which sessions are dead; its store holds the nodes and the assignment.
        keys: the fleet's keys.
        total: the number of tokens.
        token_of: returns a task's token.
        node: this node's name, for the history.
        interval: seconds between rounds if no change is reported.
        read_pins: returns the pins in force.
        pins_valid_for: returns for how many seconds the pins that were read last stay in force.
        on_published: called after each assignment that was written.
        restore: called when this node's own record is missing, to write it again.
    """

    def __init__(
        self,
        membership: Membership,
        keys: JobKeys,
        *,
        total: int,
        token_of: Callable[[str], int],
        node: str,
        interval: float,
        read_pins: Callable[[], Awaitable[Sequence[Pin]]],
        pins_valid_for: Callable[[], float],
        on_published: Callable[[], object],
        restore: Callable[[], Awaitable[object]],
    ) -> None:
        self._store = membership.store
        self._clock = membership.components.clock
        self._events = membership.components.events
        self._corruption_log = CorruptionLog(self._store.name, self._events)
        self._membership = membership
        self._keys = keys
        self._total = total
        self._token_of = token_of
        self._node = node
        self._interval = interval
        self._read_pins = read_pins
        self._pins_valid_for = pins_valid_for
        self._on_published = on_published
        self._restore = restore
        self._dead: frozenset[str] = frozenset()
        self._decided_on: _PlanInputs | None = None
        self._pins: Sequence[Pin] | None = None
        self._obsolete: list[str] = []
        """Exceptions of a plan that was made with other settings."""
        self.number: int | None = None
        """The current assignment, while this node is the leader; None if it must be read."""

    async def run(self, term: Term) -> None:
        """Rebalance now and after every change, until cancelled at the end of the term."""
        plan: Plan | None = None
        is_notified = True
        try:
            while True:
                try:
                    async with listening(
                        self._store.wait(self._keys.nodes, _WAIT_TIMEOUT),
                        self._store.wait(self._keys.pins, _WAIT_TIMEOUT),
                        self._wait_for_death(),
                    ) as wait_for_change:
                        plan = await self._rebalance(term, plan, is_notified=is_notified)
                        self.number = plan.assignment.number
                        is_notified = await wait_for_change(self._find_pause(plan))
                except (Unavailable, Misconfigured, OutcomeUnknown):
                    # The assignment is read again: a write may have happened.
                    plan = self.number = self._decided_on = None
                    is_notified = True
                    await self._clock.sleep(self._membership.timing.heartbeat / 2)
        except Fenced:
            return
        finally:
            self.number = self._decided_on = self._pins = None
            self._membership.watch("rebalancer", ())

    async def _rebalance(self, term: Term, plan: Plan | None, *, is_notified: bool) -> Plan:
        """Decide once; return the plan that is now current."""
        nodes = await self.list_nodes()
        if all(node.name != self._node for node in nodes):
            await self._restore()
            nodes = await self.list_nodes()
        if plan is None:
            plan = await self._read_plan(term)
        known = {node.incarnation for node in plan.assignment.nodes}
        known |= {node.incarnation for node in nodes if node.stage != "left"}
        self._membership.watch("rebalancer", known)
        self._dead = self._find_dead()
        dead = self._dead | {node.incarnation for node in nodes if node.stage == "left"}
        members = _find_members(plan, find_candidates(nodes, dead))
        acks = {node.incarnation: node.applied for node in nodes}
        decided_on = self._decided_on
        is_same = decided_on is not None and decided_on[:3] == (members, acks, dead)
        pins = await self._get_pins(must_read=is_notified or not is_same)
        inputs = (members, acks, dead, pins)
        if inputs == self._decided_on:
            # Most hints are about something else, and a decision iterates over every token.
            return plan
        new = assign(plan, members, acks=acks, dead=dead, pins=pins)
        if new is not plan:
            await self._publish(term, plan, new)
        self._decided_on = inputs if new is plan else None
        return new

    async def _get_pins(self, *, must_read: bool) -> Sequence[Pin]:
        """Return the pins in force.

        If the store reports changes and has reported none, the pins are read in every other
        round only: each read is a statement that an idle fleet sends for nothing. A new decision
        is made only with pins that were read for it.
        """
        is_quiet = not must_read and not self._store.is_billed and self._pins_valid_for() > 0
        if self._pins is None or not is_quiet:
            self._pins = await self._read_pins()
            return self._pins
        # Forgotten, so that the next round reads them.
        pins, self._pins = self._pins, None
        return pins

    async def _read_plan(self, term: Term) -> Plan:
        value = await term.get(self._keys.assignment)
        if value is None:
            return Plan.empty(self._total)
        name = read_heading(value, self._keys.assignment).exceptions
        exceptions = await _fetch_exceptions(self._store, self._keys, name) if name else None
        plan = read_plan(value, exceptions, self._keys.assignment)
        if plan.fits(self._total, self._token_of):
            return plan
        # The settings change only while no node is alive: nobody has anything of it.
        self._obsolete = name_parts(name, plan.exceptions) if name else []
        return plan.empty(self._total, plan.assignment.number)

    async def _publish(self, term: Term, old: Plan, new: Plan) -> None:
        """Write a plan, after the exceptions that it refers to."""
        started = self._clock.mono()
        self.number = None
        before, after = old.assignment.exceptions, new.assignment.exceptions
        if after and after != before:
            for name, document in split_exceptions(after, new.exceptions).items():
                # The name is a hash of the content: an existing record is the same.
                with suppress(Conflict):
                    await self._store.create(self._keys.exceptions(name), document)
        await term.put(self._keys.assignment, to_document(new.assignment))
        self._on_published()
        self._membership.publish(**{self._keys.assignment: new.assignment.number})
        if moved := count_moved(old.assignment, new.assignment):
            await self._record(old, new, moved, self._clock.mono() - started)
        gone, self._obsolete = self._obsolete, []
        if before and after != before:
            gone += name_parts(before, old.exceptions)
        if gone:
            await self._store.drop(list(map(self._keys.exceptions, gone)))

    async def _record(self, old: Plan, new: Plan, moved: int, seconds: float) -> None:
        """Write to the history that tokens moved, and why."""
        was, will = served_by(old.assignment), served_by(new.assignment)
        if not was:
            reason = "initial_distribution"
        elif was & self._dead:
            reason = "dead_nodes"
        elif was != will:
            reason = "membership_change"
        else:
            # The same nodes share the tokens, so only pins can have changed.
            reason = "locks_changed"
        facts: dict[str, Json] = {"nodes_before": len(was), "nodes_after": len(will)}
        facts |= {"tokens_moved": moved}
        line = {"trigger_reason": reason, "leader_node": self._node, **facts}
        line |= {"duration_ms": round(seconds * 1000, 3)}
        await self._store.append(self._keys.rebalances, [line])
        number = new.assignment.number
        self._events.emit(Rebalanced(node=self._node, number=number, reason=reason, **facts))

    async def list_nodes(self) -> list[NodeRecord]:
        """Return all nodes of the fleet, including those that have left."""
        records = await scan_all(self._store, self._keys.nodes)
        return self._corruption_log.read_all(read_node_record, records)

    def _find_pause(self, plan: Plan) -> float:
        """Return the seconds until the next round if no change is reported."""
        is_moving = bool(plan.assignment.moves) or any(e.revoked for e in plan.exceptions.tasks)
        interval = self._membership.timing.heartbeat if is_moving else self._interval
        return min(interval, self._pins_valid_for())

    async def _wait_for_death(self) -> None:
        while self._find_dead() == self._dead:
            await self._membership.change()

    def _find_dead(self) -> frozenset[str]:
        watched = self._membership.watched("rebalancer")
        return frozenset(filter(self._membership.is_dead, watched))
