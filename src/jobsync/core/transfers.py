"""Who has what, and what is on its way: the one rule by which anything changes hands.

Promises: nothing is given to a node while another may still use it.

    held by A ── revoked ──▶ on its way from A ── A is done with it ──▶ held by B, or nobody
        ▲                       │        ▲ │
        └──── A has it back ────┘        └─┘ another target

A is done with what a number revoked when it has applied that number or a higher one, or is
dead. What nobody has is given at once. What is on its way may be given another target, or
be had back by A: neither lets anybody use what A may still be using.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeAlias, TypeVar

from jobsync.core.assignment import NOBODY

__all__ = ["Pending", "Transfers"]

U = TypeVar("U", int, str)


Pending: TypeAlias = tuple[int, int]
"""Where something on its way is going, and the number that revoked it."""


class Transfers(Generic[U]):
    """The holders of units, by place; `NOBODY` holds what is free.

    Args:
        holders: who has each unit, or has yet to give it up.
        moving: what is on its way.
    """

    def __init__(self, holders: dict[U, int], moving: dict[U, Pending]) -> None:
        self.holders: dict[U, int] = holders
        self.moving: dict[U, Pending] = moving

    def settle(
        self, is_done: Callable[[int, int], bool], dead: Collection[int], members: Collection[int]
    ) -> None:
        """Complete the moves that may be completed, and free what the dead had.

        Args:
            is_done: whether a node has applied a number, or is dead.
            dead: the dead among the nodes.
            members: who may be given anything.
        """
        for unit, (taker, revoked) in list(self.moving.items()):
            if is_done(self.holders[unit], revoked):
                self.holders[unit] = taker if taker in members else NOBODY
                del self.moving[unit]
        if dead:
            free = [unit for unit, holder in self.holders.items() if holder in dead]
            self.holders.update(dict.fromkeys(free, NOBODY))

    def places(self, members: Collection[int]) -> dict[U, int]:
        """Give where each unit is meant to be: with its taker, or where it still is."""
        bound = {unit: to for unit, (to, _) in self.moving.items() if to in members}
        return {**self.holders, **bound}

    def steer(self, targets: Mapping[U, int], number: int) -> None:
        """Take everything one step towards its target; what is revoked bears the number."""
        holders, moving = self.holders, self.moving
        for unit in [unit for unit in moving if targets[unit] == holders[unit]]:
            del moving[unit]
        revoked_now: dict[int, Pending] = {}
        # Most are where they should be, and there are many.
        for unit in [unit for unit, holder in holders.items() if targets[unit] != holder]:
            target = targets[unit]
            if unit in moving:
                _, revoked = moving[unit]
                moving[unit] = (target, revoked)
            elif holders[unit] == NOBODY:
                holders[unit] = target
            else:
                moving[unit] = revoked_now.setdefault(target, (target, number))
