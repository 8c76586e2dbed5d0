"""Everything that happens in one simulated world, from one seed.

A world holds the loop, the dice, the nodes and the history. The same seed gives the same
history, so that whatever went wrong once can be looked at again.
"""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any, TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.events import Events
from jobsync.testing.loop import SimulatedLoop
from jobsync.testing.nodes import Node, NodeClock
from jobsync.testing.violations import Violation, as_violation, describe_failure

__all__ = ["Check", "Node", "Occurrence", "Watcher", "World"]

T = TypeVar("T")


class Occurrence(msgspec.Struct, frozen=True, gc=False):
    """Something that happened, in the order in which it did."""

    at: float
    """The world's time, in seconds since it began."""
    node: str
    what: str
    details: dict[str, Any] = {}


Check: TypeAlias = Callable[[list[Occurrence]], Iterable[Violation | str]]
"""Returns the violations that it finds in a history; plain text is one of the user's own."""

Watcher: TypeAlias = Callable[[Occurrence], Iterable[Violation | str]]
"""Returns the violations that it sees in an occurrence; likewise."""


class World:
    """One world.

    Args:
        seed: decides every draw.

    Attributes:
        seed: what it was made from.
        dice: where all chance comes from.
        loop: whose time passes.
        components: the world's own time and chance, for a store that all nodes share.
        nodes: the nodes by name; of several that had one name, the latest.
        history: what happened, in the order in which it did.
        faults: how many were injected.
        violations: what was found that must not be, as it happened.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)  # noqa: S311 - chance, not secrecy
        self.loop = SimulatedLoop(self.dice)
        self.loop.set_exception_handler(self._hear)
        self.components = self._equip(NodeClock(self.loop))
        self.nodes: dict[str, Node] = {}
        self.history: list[Occurrence] = []
        self.faults = 0
        self.violations: list[Violation] = []
        self._checks: list[Check] = []
        self._watchers: list[Watcher] = []
        self._is_over = False

    def node(
        self, name: str, *, rate: float = 1.0, skew: float = 0.0, clock: NodeClock | None = None
    ) -> Node:
        """Make a node.

        Args:
            name: one that was used before goes over to the new node.
            rate: how fast its clock goes.
            skew: by how much its wall clock is off.
            clock: the clock of a machine that is there already, instead of a new one.
        """
        clock = clock or NodeClock(self.loop, rate, skew)
        self.nodes[name] = Node(self, name, clock, self._equip(clock))
        return self.nodes[name]

    def note(self, node: str, what: str, **details: Any) -> None:
        """Write something into the history."""
        if self._is_over:
            return
        occurrence = Occurrence(self.loop.time(), node, what, details)
        self.history.append(occurrence)
        for watch in self._watchers:
            self.violations += map(as_violation, watch(occurrence))

    def watch(self, watcher: Watcher) -> None:
        """Show every occurrence at its moment to somebody, who gives the violations that he sees.

        For what cannot be told from the history: what everybody believes at a commit.
        """
        self._watchers.append(watcher)

    def expect(self, *checks: Check) -> None:
        """Name checks that the whole history must pass when the story has ended."""
        self._checks += checks

    def run(self, story: Callable[[], Awaitable[T]]) -> T:
        """Let a story happen, and everything that it starts, until the story ends.

        What still runs then is thrown away: a finally clause in it finds no world any more.
        """

        async def tell() -> T:
            return await story()

        try:
            return self.loop.run_until_complete(tell())
        finally:
            self._is_over = True
            self.violations += [
                describe_failure(error, f"a task died and nobody heard of it: {error!r}")
                for error in self.loop.failed_unheard()
            ]
            self.loop.abandon()

    def judge(self) -> list[Violation]:
        """Give all violations: those that were seen, and those that checks find in the history."""
        found = (each for check in self._checks for each in check(self.history))
        return [*self.violations, *map(as_violation, found)]

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let something happen that belongs to no node."""
        if self._is_over:
            work.close()
        else:
            self.loop.create_task(work, context=Context())

    @property
    def fingerprint(self) -> str:
        """Give a digest of the whole history: equal for equal seeds, under any hash seed."""
        return hashlib.sha256(msgspec.json.encode(self.history, order="sorted")).hexdigest()

    def _equip(self, clock: NodeClock) -> Components:
        return Components(clock=clock, randomness=_Draws(self.dice), events=Events())

    def _hear(self, _: asyncio.AbstractEventLoop, trouble: dict[str, Any]) -> None:
        """Take down what no code caught."""
        error = trouble.get("exception")
        self.violations.append(describe_failure(error, f"{trouble['message']}: {error!r}"))


class _Draws:
    """A node's randomness, from the world's dice."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def bytes(self, count: int) -> bytes:
        """Draw bytes."""
        return self._dice.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """Draw a number."""
        return self._dice.uniform(low, high)
