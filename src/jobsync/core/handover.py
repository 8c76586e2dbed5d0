"""The leader's whole decision: who is to have what, and what changes hands now.

Promises: a function of its arguments alone. A leader that takes over calls it with the
plan that it finds in the store, and goes on where the other stopped. Called again when
nothing has happened, it changes nothing. What it gives to a node nobody else may still use
(see `ledger`); loads are as even as the pins allow, and nothing moves without need (see
`balance`).

A pinned task follows its token, which goes to a node that satisfies the pin where it can.
Where pins of one token disagree, or nobody matches, the task becomes an exception with an
owner of its own, or waits without one; its token's other tasks are not affected. It becomes
one, and ceases to be one, by the same rule as everything else that changes hands.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import TypeVar

from msgspec.structs import replace

from jobsync.core.assignment import (
    NOBODY,
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Plan,
    holders_of,
    name_exceptions,
    pack_holders,
    pack_move,
    tokens_of,
)
from jobsync.core.pins import Pin, Wishes, resolve
from jobsync.core.transfers import Pending, Transfers

__all__ = ["assign", "share"]


# Who should have what: loads as even as they can be, and nothing moves without need.
#
# Pure and the same for every leader: nothing here depends on the order of a set or a dict.
#
# Units (tokens, or tasks that left their token) come in groups, each with the nodes that may
# have them. A group's quotas even out the loads of those nodes; a node keeps what it has up
# to its quota, the rest goes where quotas are left. Without pins there is one group, counts
# end within one of each other, and the number of moves is the least there can be.


V = TypeVar("V", int, str)


def share(
    units: Sequence[V],
    places: Mapping[V, int],
    moving: Collection[V],
    holders: Mapping[V, int],
    nodes: Sequence[int],
    loads: list[int],
) -> Iterable[tuple[V, int]]:
    """Give the units that should go elsewhere, each with the node that should have it.

    Args:
        units: one group, in order.
        places: where each is meant to be now.
        moving: those that are on their way; a node parts with these first, since they cost
            it nothing.
        holders: who has them, or has yet to give them up; who can take one back at once.
        nodes: who may have them, in order.
        loads: what each node has already; grows by what it gets.
    """
    if not nodes:
        return zip(units, repeat(NOBODY), strict=False)
    counts = Counter(map(places.__getitem__, units))
    quotas = _quotas(len(units), counts, nodes, loads)
    for node in nodes:
        loads[node] += quotas[node]
    left = [quota - counts[node] for node, quota in enumerate(quotas)]
    if min(left) >= 0:
        # Nobody has more than it should: nothing moves, as nearly always.
        return ()
    pool, left = _exceeding(_settled_first(units, moving), places, quotas)
    return _fill(pool, holders, nodes, left)


def _quotas(
    count: int, counts: Mapping[int, int], nodes: Sequence[int], loads: Sequence[int]
) -> list[int]:
    """Give how many of the units each node should have.

    Args:
        count: how many there are.
        counts: how many are meant to be with each node now.
        nodes: who may have them, in order.
        loads: what each node has already.
    """
    quotas = [0] * len(loads)
    level, low = _find_level(count, nodes, loads)
    for node in low:
        quotas[node] = level - loads[node]
    if left := count - sum(quotas):
        # One more for some, and first for those that would have to part with one otherwise.
        low.sort(key=lambda node: (counts[node] <= quotas[node], node))
        for node in low[:left]:
            quotas[node] += 1
    return quotas


def _find_level(count: int, nodes: Sequence[int], loads: Sequence[int]) -> tuple[int, list[int]]:
    """Give the load that so many units lift the least loaded nodes to, and those nodes."""
    low = sorted(nodes, key=loads.__getitem__)
    total = count + sum(map(loads.__getitem__, low))
    while loads[low[-1]] > (level := total // len(low)):
        total -= loads[low.pop()]
    return level, low


def _settled_first(units: Sequence[V], moving: Collection[V]) -> Iterable[V]:
    if not moving:
        return units
    settled = [unit for unit in units if unit not in moving]
    return settled + [unit for unit in units if unit in moving]


def _exceeding(
    units: Iterable[V], places: Mapping[V, int], quotas: Sequence[int]
) -> tuple[list[V], list[int]]:
    """Give what is beyond the quotas, and what is left of them."""
    left = list(quotas)
    pool = []
    for unit in units:
        place = places[unit]
        if left[place]:
            left[place] -= 1
        else:
            pool.append(unit)
    return pool, left


def _fill(
    pool: Sequence[V], holders: Mapping[V, int], nodes: Sequence[int], left: list[int]
) -> Iterable[tuple[V, int]]:
    """Give each unit of the pool a node: the one that still has it, if it may keep it."""
    back: list[V] = []
    homeless: list[V] = []
    for unit in pool:
        holder = holders[unit]
        if left[holder]:
            left[holder] -= 1
            back.append(unit)
        else:
            homeless.append(unit)
    takers = [node for node in nodes for _ in range(left[node])]
    # In order, so that neighbours stay together and the record stays short.
    return chain(
        zip(back, map(holders.__getitem__, back), strict=True),
        zip(sorted(homeless), takers, strict=True),
    )


U = TypeVar("U", int, str)

_AT_REST: Pending = (NOBODY, 0)


def assign(
    previous: Plan,
    members: Iterable[NodeRef],
    *,
    acks: Mapping[str, int] | None = None,
    dead: Collection[str] = (),
    pins: Sequence[Pin] = (),
) -> Plan:
    """Give the next plan, or the previous one itself if nothing changes.

    A node that is neither a member nor dead gives up what it has, and is waited for.

    Args:
        previous: what the store holds.
        members: who may own tokens: alive, ready, and not about to leave.
        acks: the highest number that each incarnation has applied.
        dead: the incarnations whose death is written.
        pins: those in force, in any order.
    """
    draft = _Draft(previous, [node for node in members if node.incarnation not in dead])
    draft.settle(acks or {}, dead)
    draft.decide(pins)
    return draft.finish()


class _Draft:
    """A plan in the making. Nodes are places in one table of everybody concerned."""

    def __init__(self, previous: Plan, members: Sequence[NodeRef]) -> None:
        before, exceptions = previous.assignment, previous.exceptions
        nodes = {n.incarnation: n for n in (*before.nodes, *exceptions.nodes, *members)}
        self._previous = previous
        self._number = before.number + 1
        self._nodes = [nodes[incarnation] for incarnation in sorted(nodes)]
        self._places = {node.incarnation: place for place, node in enumerate(self._nodes, 1)}
        self._members = sorted({self._places[node.incarnation] for node in members})
        self._token_of = {each.task: each.token for each in exceptions.tasks}
        self._tokens = _open_tokens(before, self._translate(before.nodes))
        self._tasks = _open_tasks(exceptions, self._translate(exceptions.nodes))

    def _translate(self, nodes: Iterable[NodeRef]) -> list[int]:
        return [NOBODY, *(self._places[node.incarnation] for node in nodes)]

    def settle(self, acks: Mapping[str, int], dead: Collection[str]) -> None:
        """Let happen what acknowledgements and deaths allow."""
        gone = {place for incarnation, place in self._places.items() if incarnation in dead}
        applied = [0, *(acks.get(node.incarnation, 0) for node in self._nodes)]

        def is_done(place: int, number: int) -> bool:
            return place in gone or applied[place] >= number

        self._tokens.settle(is_done, gone, self._members)
        self._tasks.settle(is_done, gone, self._members)

    def decide(self, pins: Collection[Pin]) -> None:
        """Find out where everything should be, and take the next step towards it."""
        names = {place: self._nodes[place - 1].name for place in self._members}
        wishes = resolve(pins, names)
        homes = self._find_homes(wishes.tokens)
        exempt = _find_exempt(wishes, homes)
        for task in exempt:
            self._part(task, wishes.token_of[task])
        targets = self._even_out(self._tasks, _group(exempt))
        for task in targets.keys() - exempt.keys():
            targets[task] = homes[self._token_of[task]]
        self._tasks.steer(targets, self._number)
        self._tokens.steer(homes, self._number)
        self._reunite(exempt)

    def _find_homes(self, wishes: Mapping[int, int]) -> dict[int, int]:
        """Give where each token should be: first those with few who may have them."""
        free = [token for token in self._tokens.holders if token not in wishes]
        return self._even_out(self._tokens, [*_group(wishes), (self._members, free)])

    def _even_out(
        self, ledger: Transfers[U], groups: Iterable[tuple[Sequence[int], Sequence[U]]]
    ) -> dict[U, int]:
        """Give where each unit should be; the later groups make up for the earlier."""
        places = ledger.places(self._members)
        loads = [0] * (len(self._nodes) + 1)
        for nodes, units in groups:
            places.update(share(units, places, ledger.moving, ledger.holders, nodes, loads))
        return places

    def _part(self, task: str, token: int) -> None:
        """Let a task go ways of its own, from the state that its token is in."""
        if task not in self._tasks.holders:
            self._token_of[task] = token
            self._tasks.holders[task] = self._tokens.holders[token]
            if pending := self._tokens.moving.get(token):
                self._tasks.moving[task] = pending

    def _reunite(self, exempt: Collection[str]) -> None:
        """Let tasks follow their tokens again, once one node has both for good."""
        tokens, tasks = self._tokens, self._tasks
        for task in [each for each in tasks.holders if each not in exempt]:
            token = self._token_of[task]
            resting = task not in tasks.moving and token not in tokens.moving
            if resting and tasks.holders[task] == tokens.holders[token]:
                del tasks.holders[task]

    def finish(self) -> Plan:
        """Give the plan, under a new number if it is a new one."""
        before, after = self._previous.assignment, self._close_tokens()
        exceptions, name = self._previous.exceptions, before.exceptions
        found = self._close_tasks()
        if found != exceptions:
            exceptions, name = found, name_exceptions(self._number, found)
        elif after == replace(before, number=self._number, exceptions=""):
            return self._previous
        return Plan(replace(after, exceptions=name), exceptions)

    def _close_tokens(self) -> Assignment:
        holders, moving = self._tokens.holders, self._tokens.moving
        used = {*self._members, *holders.values(), *(to for to, _ in moving.values())}
        nodes, places = self._narrow(used)
        moves: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for token in sorted(moving):
            taker, revoked = moving[token]
            moves[places[holders[token]], places[taker], revoked].append(token)
        starts, held = pack_holders(list(map(places.__getitem__, holders.values())))
        return Assignment(
            self._number,
            self._previous.assignment.total,
            nodes,
            starts,
            held,
            tuple(pack_move(*key, moves[key]) for key in sorted(moves)),
        )

    def _close_tasks(self) -> Exceptions:
        holders, moving = self._tasks.holders, self._tasks.moving
        nodes, places = self._narrow({*holders.values(), *(to for to, _ in moving.values())})
        rows = []
        for task in sorted(holders):
            taker, revoked = moving.get(task, _AT_REST)
            rows.append(
                Exempt(task, self._token_of[task], places[holders[task]], places[taker], revoked)
            )
        return Exceptions(nodes, tuple(rows))

    def _narrow(self, used: Collection[int]) -> tuple[tuple[NodeRef, ...], dict[int, int]]:
        """Give the nodes of a document, and their places in it for those in the table."""
        kept = sorted(place for place in used if place != NOBODY)
        places = {NOBODY: NOBODY, **{place: i for i, place in enumerate(kept, 1)}}
        return tuple(self._nodes[place - 1] for place in kept), places


def _open_tokens(assignment: Assignment, places: Sequence[int]) -> Transfers[int]:
    moving: dict[int, Pending] = {}
    for move in assignment.moves:
        moving.update(dict.fromkeys(tokens_of(move), (places[move.taker], move.revoked)))
    holders = map(places.__getitem__, holders_of(assignment))
    return Transfers(dict(enumerate(holders)), moving)


def _open_tasks(exceptions: Exceptions, places: Sequence[int]) -> Transfers[str]:
    rows = exceptions.tasks
    moving = {row.task: (places[row.taker], row.revoked) for row in rows if row.revoked}
    return Transfers({row.task: places[row.holder] for row in rows}, moving)


def _find_exempt(wishes: Wishes, homes: Mapping[int, int]) -> dict[str, int]:
    """Give the pinned tasks that their token's home may not do, each with who may."""
    bits = [1 << place for place in range(max(homes.values(), default=NOBODY) + 1)]
    if len(bits) == 1:
        # Without members nothing needs an owner of its own.
        return {}
    tasks, tokens = wishes.tasks.items(), wishes.token_of.values()
    return {
        task: nodes
        for (task, nodes), token in zip(tasks, tokens, strict=True)
        if not nodes & bits[homes[token]]
    }


def _group(wishes: Mapping[U, int]) -> list[tuple[list[int], list[U]]]:
    """Group units by who may have them, the fewest first: these have the least choice."""
    groups: defaultdict[int, list[U]] = defaultdict(list)
    for unit, nodes in wishes.items():
        groups[nodes].append(unit)
    ordered = sorted(groups, key=lambda mask: (mask.bit_count(), mask))
    return [(_places(mask), sorted(groups[mask])) for mask in ordered]


def _places(nodes: int) -> list[int]:
    return [place for place in range(nodes.bit_length()) if nodes >> place & 1]
