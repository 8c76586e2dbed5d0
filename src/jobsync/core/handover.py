"""The leader's decision: which node should own what, and what moves now. Pure.

Promises: the result depends on the arguments alone, and not on the order of a set or a dict. A
leader that takes over calls it with the plan that it finds in the store, and continues where
the last one stopped. Called again when nothing has happened, it changes nothing. Nothing is
given to a node while another may still use it (`Transfers`). Loads are as even as the pins
allow, and nothing moves without need (`share`).

A pinned task follows its token, which goes to a node that satisfies the pin if possible.
Where pins of one token disagree, or no node matches, the task becomes an exception with an
owner of its own, or waits without one; the other tasks of its token are not affected. It becomes
an exception, and stops being one, by the same handover rule as everything else.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Generic, TypeAlias, TypeVar

from msgspec.structs import replace

from jobsync.core.assignment import (
    NOBODY,
    Assignment,
    Exceptions,
    Exempt,
    NodeRef,
    Plan,
    holders_of,
    pack_holders,
    pack_move,
    tokens_of,
)
from jobsync.core.pins import Pin, PinnedNodes, resolve, unpack_nodes
from jobsync.core.plan_documents import name_exceptions

__all__ = ["Pending", "Transfers", "assign", "share"]

U = TypeVar("U", int, str)

Pending: TypeAlias = tuple[int, int]
"""The target of a unit that is moving, and the number that revoked it."""

_AT_REST: Pending = (NOBODY, 0)


class Transfers(Generic[U]):
    """The holders of units (tokens, or tasks that left their token), and the units that move.

    Nothing is given to a node while another may still use it:

        held by A ── revoked ──▶ moving away from A ── A is done with it ──▶ held by B, or nobody
            ▲                       │        ▲ │
            └──── A has it back ────┘        └─┘ another target

    A has given up the units revoked by number N once it has applied N or a higher number, or is
    dead. A unit that nobody holds is given at once. A moving unit may get another
    target, or go back to A: neither lets anybody use what A may still be using.

    Nodes are indexes; `NOBODY` holds what is free.

    Args:
        holders: the node that has each unit, or has yet to give it up.
        moving: the units that are moving.
    """

    def __init__(self, holders: dict[U, int], moving: dict[U, Pending]) -> None:
        self.holders: dict[U, int] = holders
        self.moving: dict[U, Pending] = moving

    def settle(
        self, is_done: Callable[[int, int], bool], dead: Collection[int], members: Collection[int]
    ) -> None:
        """Complete the moves that may be completed, and free the units of dead nodes.

        Args:
            is_done: whether a node has applied a number, or is dead.
            dead: the dead nodes.
            members: the nodes that may receive units.
        """
        for unit, (taker, revoked) in list(self.moving.items()):
            if is_done(self.holders[unit], revoked):
                self.holders[unit] = taker if taker in members else NOBODY
                del self.moving[unit]
        if dead:
            free = [unit for unit, holder in self.holders.items() if holder in dead]
            self.holders.update(dict.fromkeys(free, NOBODY))

    def destinations(self, members: Collection[int]) -> dict[U, int]:
        """Return the node that should have each unit: its taker, or its holder."""
        bound = {unit: to for unit, (to, _) in self.moving.items() if to in members}
        return {**self.holders, **bound}

    def steer(self, targets: Mapping[U, int], number: int) -> None:
        """Move every unit one step towards its target; `number` revokes what must move."""
        holders, moving = self.holders, self.moving
        for unit in [unit for unit in moving if targets[unit] == holders[unit]]:
            del moving[unit]
        revoked_now: dict[int, Pending] = {}
        # There are many units, and most are where they should be.
        for unit in [unit for unit, holder in holders.items() if targets[unit] != holder]:
            target = targets[unit]
            if unit in moving:
                _, revoked = moving[unit]
                moving[unit] = (target, revoked)
            elif holders[unit] == NOBODY:
                holders[unit] = target
            else:
                moving[unit] = revoked_now.setdefault(target, (target, number))


def share(
    units: Sequence[U],
    destinations: Mapping[U, int],
    moving: Collection[U],
    holders: Mapping[U, int],
    nodes: Sequence[int],
    loads: list[int],
) -> Iterable[tuple[U, int]]:
    """Return the units of one group that should go elsewhere, each with its new node.

    A group is the units that the same nodes may have. Its quotas even out the loads of those
    nodes; a node keeps what it has up to its quota, the rest goes where quotas are left. Without
    pins there is one group, counts end within one of each other, and the number of moves is
    minimal.

    Args:
        units: one group, in order.
        destinations: the node that should have each unit so far.
        moving: the units that are moving; a node gives these up first, since they cost
            it nothing.
        holders: the node that has each unit, or has yet to give it up, and can take it back at
            once.
        nodes: the nodes that may have the units, in order.
        loads: what each node has already; grows by what it gets.
    """
    if not nodes:
        return zip(units, repeat(NOBODY), strict=False)
    counts = Counter(map(destinations.__getitem__, units))
    quotas = _compute_quotas(len(units), counts, nodes, loads)
    for node in nodes:
        loads[node] += quotas[node]
    left = [quota - counts[node] for node, quota in enumerate(quotas)]
    if min(left) >= 0:
        # The usual case: no node exceeds its quota, so nothing moves.
        return ()
    pool, left = _collect_excess(_sort_moving_last(units, moving), destinations, quotas)
    return _assign_pool(pool, holders, nodes, left)


def _compute_quotas(
    count: int, counts: Mapping[int, int], nodes: Sequence[int], loads: Sequence[int]
) -> list[int]:
    """Return how many of the units each node should have.

    Args:
        count: the number of units.
        counts: how many of them each node should have so far.
        nodes: the nodes that may have them, in order.
        loads: what each node has already.
    """
    quotas = [0] * len(loads)
    level, low = _find_level(count, nodes, loads)
    for node in low:
        quotas[node] = level - loads[node]
    if left := count - sum(quotas):
        # One more for some, and first for those that would otherwise have to give one up.
        low.sort(key=lambda node: (counts[node] <= quotas[node], node))
        for node in low[:left]:
            quotas[node] += 1
    return quotas


def _find_level(count: int, nodes: Sequence[int], loads: Sequence[int]) -> tuple[int, list[int]]:
    """Return the load to which the units lift the least loaded nodes, and those nodes."""
    low = sorted(nodes, key=loads.__getitem__)
    total = count + sum(map(loads.__getitem__, low))
    while loads[low[-1]] > (level := total // len(low)):
        total -= loads[low.pop()]
    return level, low


def _sort_moving_last(units: Sequence[U], moving: Collection[U]) -> Iterable[U]:
    if not moving:
        return units
    settled = [unit for unit in units if unit not in moving]
    return settled + [unit for unit in units if unit in moving]


def _collect_excess(
    units: Iterable[U], destinations: Mapping[U, int], quotas: Sequence[int]
) -> tuple[list[U], list[int]]:
    """Return the units beyond the quotas, and what is left of the quotas."""
    left = list(quotas)
    pool = []
    for unit in units:
        node = destinations[unit]
        if left[node]:
            left[node] -= 1
        else:
            pool.append(unit)
    return pool, left


def _assign_pool(
    pool: Sequence[U], holders: Mapping[U, int], nodes: Sequence[int], left: list[int]
) -> Iterable[tuple[U, int]]:
    """Assign each unit of the pool to a node: to its holder, if that may keep it."""
    back: list[U] = []
    homeless: list[U] = []
    for unit in pool:
        holder = holders[unit]
        if left[holder]:
            left[holder] -= 1
            back.append(unit)
        else:
            homeless.append(unit)
    takers = [node for node in nodes for _ in range(left[node])]
    # In order, so that neighbours stay together and the document stays short.
    return chain(
        zip(back, map(holders.__getitem__, back), strict=True),
        zip(sorted(homeless), takers, strict=True),
    )


def assign(
    previous: Plan,
    members: Iterable[NodeRef],
    *,
    acks: Mapping[str, int] | None = None,
    dead: Collection[str] = (),
    pins: Sequence[Pin] = (),
) -> Plan:
    """Return the next plan, or the previous one itself if nothing changes.

    A node that is neither a member nor dead has to give up what it has; the plan waits for it.

    Args:
        previous: the plan in the store.
        members: nodes that may own tokens: alive, ready, and not about to leave.
        acks: the highest number that each incarnation has applied.
        dead: the incarnations whose death is recorded.
        pins: the pins in force, in any order.
    """
    draft = _Draft(previous, [node for node in members if node.incarnation not in dead])
    draft.settle(acks or {}, dead)
    draft.decide(pins)
    return draft.finish()


class _Draft:
    """A plan under construction. Nodes are indexes, from 1, into one table of all nodes."""

    def __init__(self, previous: Plan, members: Sequence[NodeRef]) -> None:
        before, exceptions = previous.assignment, previous.exceptions
        nodes = {n.incarnation: n for n in (*before.nodes, *exceptions.nodes, *members)}
        self._previous = previous
        self._number = before.number + 1
        self._nodes = [nodes[incarnation] for incarnation in sorted(nodes)]
        self._index_of = {node.incarnation: index for index, node in enumerate(self._nodes, 1)}
        self._members = sorted({self._index_of[node.incarnation] for node in members})
        self._token_of = {exempt.task: exempt.token for exempt in exceptions.tasks}
        self._tokens = _load_tokens(before, self._translate(before.nodes))
        self._tasks = _load_tasks(exceptions, self._translate(exceptions.nodes))

    def _translate(self, nodes: Iterable[NodeRef]) -> list[int]:
        return [NOBODY, *(self._index_of[node.incarnation] for node in nodes)]

    def settle(self, acks: Mapping[str, int], dead: Collection[str]) -> None:
        """Complete the moves that acknowledgements and deaths allow."""
        gone = {index for incarnation, index in self._index_of.items() if incarnation in dead}
        applied = [0, *(acks.get(node.incarnation, 0) for node in self._nodes)]

        def is_done(node: int, number: int) -> bool:
            return node in gone or applied[node] >= number

        self._tokens.settle(is_done, gone, self._members)
        self._tasks.settle(is_done, gone, self._members)

    def decide(self, pins: Collection[Pin]) -> None:
        """Decide where everything should be, and take the next step towards it."""
        names = {index: self._nodes[index - 1].name for index in self._members}
        pinned = resolve(pins, names)
        homes = self._find_homes(pinned.tokens)
        exempt = _find_exempt(pinned, homes)
        for task in exempt:
            self._add_exception(task, pinned.token_of[task])
        targets = self._even_out(self._tasks, _group(exempt))
        for task in targets.keys() - exempt.keys():
            targets[task] = homes[self._token_of[task]]
        self._tasks.steer(targets, self._number)
        self._tokens.steer(homes, self._number)
        self._remove_exceptions(exempt)

    def _find_homes(self, pinned: Mapping[int, int]) -> dict[int, int]:
        """Return the node that should have each token; tokens with few allowed nodes go first."""
        free = [token for token in self._tokens.holders if token not in pinned]
        return self._even_out(self._tokens, [*_group(pinned), (self._members, free)])

    def _even_out(
        self, transfers: Transfers[U], groups: Iterable[tuple[Sequence[int], Sequence[U]]]
    ) -> dict[U, int]:
        """Return the node that should have each unit; later groups make up for earlier ones."""
        result = transfers.destinations(self._members)
        loads = [0] * (len(self._nodes) + 1)
        for nodes, units in groups:
            result.update(share(units, result, transfers.moving, transfers.holders, nodes, loads))
        return result

    def _add_exception(self, task: str, token: int) -> None:
        """Separate a task from its token, starting from the state that the token is in."""
        if task not in self._tasks.holders:
            self._token_of[task] = token
            self._tasks.holders[task] = self._tokens.holders[token]
            if pending := self._tokens.moving.get(token):
                self._tasks.moving[task] = pending

    def _remove_exceptions(self, exempt: Collection[str]) -> None:
        """Make tasks follow their tokens again, once one node has both and neither moves."""
        tokens, tasks = self._tokens, self._tasks
        for task in [task for task in tasks.holders if task not in exempt]:
            token = self._token_of[task]
            at_rest = task not in tasks.moving and token not in tokens.moving
            if at_rest and tasks.holders[task] == tokens.holders[token]:
                del tasks.holders[task]

    def finish(self) -> Plan:
        """Return the plan, under a new number if it differs from the previous one."""
        before, after = self._previous.assignment, self._build_assignment()
        exceptions, name = self._previous.exceptions, before.exceptions
        new = self._build_exceptions()
        if new != exceptions:
            exceptions, name = new, name_exceptions(self._number, new)
        elif after == replace(before, number=self._number, exceptions=""):
            return self._previous
        return Plan(replace(after, exceptions=name), exceptions)

    def _build_assignment(self) -> Assignment:
        holders, moving = self._tokens.holders, self._tokens.moving
        used = {*self._members, *holders.values(), *(to for to, _ in moving.values())}
        nodes, index_of = self._select_nodes(used)
        moves: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        for token in sorted(moving):
            taker, revoked = moving[token]
            moves[index_of[holders[token]], index_of[taker], revoked].append(token)
        starts, packed = pack_holders(list(map(index_of.__getitem__, holders.values())))
        return Assignment(
            self._number,
            self._previous.assignment.total,
            nodes,
            starts,
            packed,
            tuple(pack_move(*key, moves[key]) for key in sorted(moves)),
        )

    def _build_exceptions(self) -> Exceptions:
        holders, moving = self._tasks.holders, self._tasks.moving
        used = {*holders.values(), *(to for to, _ in moving.values())}
        nodes, index_of = self._select_nodes(used)
        rows = []
        for task in sorted(holders):
            taker, revoked = moving.get(task, _AT_REST)
            holder = index_of[holders[task]]
            rows.append(Exempt(task, self._token_of[task], holder, index_of[taker], revoked))
        return Exceptions(nodes, tuple(rows))

    def _select_nodes(self, used: Collection[int]) -> tuple[tuple[NodeRef, ...], dict[int, int]]:
        """Return the nodes of a document, and their indexes in it by those in the table."""
        selected = sorted(index for index in used if index != NOBODY)
        index_of = {NOBODY: NOBODY, **{index: i for i, index in enumerate(selected, 1)}}
        return tuple(self._nodes[index - 1] for index in selected), index_of


def _load_tokens(assignment: Assignment, index_of: Sequence[int]) -> Transfers[int]:
    moving: dict[int, Pending] = {}
    for move in assignment.moves:
        moving.update(dict.fromkeys(tokens_of(move), (index_of[move.taker], move.revoked)))
    holders = map(index_of.__getitem__, holders_of(assignment))
    return Transfers(dict(enumerate(holders)), moving)


def _load_tasks(exceptions: Exceptions, index_of: Sequence[int]) -> Transfers[str]:
    rows = exceptions.tasks
    moving = {row.task: (index_of[row.taker], row.revoked) for row in rows if row.revoked}
    return Transfers({row.task: index_of[row.holder] for row in rows}, moving)


def _find_exempt(pinned: PinnedNodes, homes: Mapping[int, int]) -> dict[str, int]:
    """Return the pinned tasks that their token's home may not do, each with the allowed nodes."""
    bits = [1 << index for index in range(max(homes.values(), default=NOBODY) + 1)]
    if len(bits) == 1:
        # Without members nothing needs an owner of its own.
        return {}
    tasks, tokens = pinned.tasks.items(), pinned.token_of.values()
    return {
        task: nodes
        for (task, nodes), token in zip(tasks, tokens, strict=True)
        if not nodes & bits[homes[token]]
    }


def _group(allowed: Mapping[U, int]) -> list[tuple[list[int], list[U]]]:
    """Group units by the nodes that may have them, fewest nodes first: they have least choice."""
    groups: defaultdict[int, list[U]] = defaultdict(list)
    for unit, nodes in allowed.items():
        groups[nodes].append(unit)
    ordered = sorted(groups, key=lambda nodes: (nodes.bit_count(), nodes))
    return [(unpack_nodes(nodes), sorted(groups[nodes])) for nodes in ordered]
