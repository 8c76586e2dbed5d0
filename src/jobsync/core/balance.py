"""Who should have what: loads as even as they can be, and nothing moves without need.

Pure and the same for every leader: nothing here depends on the order of a set or a dict.

Units (tokens, or tasks that left their token) come in groups, each with the nodes that may
have them. A group's quotas even out the loads of those nodes; a node keeps what it has up
to its quota, the rest goes where quotas are left. Without pins there is one group, counts
end within one of each other, and the number of moves is the least there can be.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import TypeVar

from jobsync.core.assignment import NOBODY

__all__ = ["share"]

U = TypeVar("U", int, str)


def share(
    units: Sequence[U],
    places: Mapping[U, int],
    moving: Collection[U],
    holders: Mapping[U, int],
    nodes: Sequence[int],
    loads: list[int],
) -> Iterable[tuple[U, int]]:
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


def _settled_first(units: Sequence[U], moving: Collection[U]) -> Iterable[U]:
    if not moving:
        return units
    settled = [unit for unit in units if unit not in moving]
    return settled + [unit for unit in units if unit in moving]


def _exceeding(
    units: Iterable[U], places: Mapping[U, int], quotas: Sequence[int]
) -> tuple[list[U], list[int]]:
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
    pool: Sequence[U], holders: Mapping[U, int], nodes: Sequence[int], left: list[int]
) -> Iterable[tuple[U, int]]:
    """Give each unit of the pool a node: the one that still has it, if it may keep it."""
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
    # In order, so that neighbours stay together and the record stays short.
    return chain(
        zip(back, map(holders.__getitem__, back), strict=True),
        zip(sorted(homeless), takers, strict=True),
    )
