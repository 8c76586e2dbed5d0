"""A simulated world: the loop, the dice, the nodes and the history, all from one seed.

The same seed gives the same history, so that a failure can be reproduced.

The world of a negative seed is a variation of that with the positive one. Each machine has its own
wall time, uptime and boot, and its processes see each other. In storms, faults also come in pairs,
and strike single calls. These are drawn apart: in the world of the positive seed nothing changes.
"""

import asyncio
import hashlib
import random
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Any, TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.events import Events
from jobsync.testing.invariants import Violation, as_violation, describe_failure
from jobsync.testing.loop import SimulatedLoop
from jobsync.testing.nodes import Machine, Node, NodeClock, NodeProcesses

__all__ = ["Check", "Node", "Occurrence", "Watcher", "World"]

T = TypeVar("T")

_LARGEST_SKEW = 86_400.0
_SKEWS = (-1.0, -0.04, -0.0003, 0.0003, 0.04, 1.0)
"""Parts of the largest skew."""
_UPTIMES = (0.0, 30.0, 5000.0, 1e7)
"""Seconds that machines have been running when they are first seen."""
_NEW_MACHINE = 0.5
"""The probability that a node has a machine, or a container, of its own."""


class Occurrence(msgspec.Struct, frozen=True, gc=False):
    """An entry of the history."""

    at: float
    """The world's time, in seconds since the start."""
    node: str
    what: str
    details: dict[str, Any] = {}


Check: TypeAlias = Callable[[list[Occurrence]], Iterable[Violation | str]]
"""Returns the violations in a history; plain text gets the id "user"."""

Watcher: TypeAlias = Callable[[Occurrence], Iterable[Violation | str]]
"""Returns the violations in an occurrence, likewise."""


class World:
    """A simulated world.

    Args:
        seed: decides every draw.

    Attributes:
        seed: the seed.
        dice: the source of all randomness, but for `surprises`.
        surprises: what is drawn from it changes no other draw.
        is_varied: whether machines differ and storms have more faults; see above.
        largest_skew: seconds by which the wall times of machines differ at most, if they do.
        keeps_clocks: whether a time server keeps the wall times of nodes, whatever their rates.
        loop: the event loop, with virtual time.
        components: the world's own time and randomness, for a store that all nodes share.
        nodes: the nodes by name; if several had the same name, the latest.
        history: everything that happened, in order.
        faults: the number of faults so far.
        violations: the violations that were found while the world ran.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)  # noqa: S311 - chance, not secrecy
        self.surprises = random.Random(f"surprises {seed}")  # noqa: S311 - likewise
        self.is_varied = seed < 0
        self.largest_skew = _LARGEST_SKEW
        self.keeps_clocks = False
        self._machines: list[Machine] = []
        self.loop = SimulatedLoop(self.dice)
        self.loop.set_exception_handler(self._on_exception)
        clock = self._build_clock(1.0, 0.0) if self.is_varied else NodeClock(self.loop)
        self.components = self._build_components(clock, NodeProcesses(None))
        self.nodes: dict[str, Node] = {}
        self.starts = count(1)
        """Times of the start of processes: no two are equal."""
        self.history: list[Occurrence] = []
        self.faults = 0
        self.violations: list[Violation] = []
        self._checks: list[Check] = []
        self._watchers: list[Watcher] = []
        self._is_over = False

    def node(
        self,
        name: str,
        *,
        rate: float = 1.0,
        skew: float = 0.0,
        clock: NodeClock | None = None,
        machine: Machine | None = None,
    ) -> Node:
        """Create a node.

        Args:
            name: if a node has this name already, the new one replaces it.
            rate: the speed of its clock.
            skew: the error of its wall clock in seconds.
            clock: the clock of an existing machine, instead of a new one.
            machine: where it sees the processes of other nodes; alone by default.
        """
        if self.is_varied and clock is None:
            largest = 0.0 if skew else self.largest_skew
            skew += self.surprises.choice((0.0, *_SKEWS)) * largest
            clock = self._build_clock(rate, skew)
            machine = machine or self._draw_machine()
        clock = clock or NodeClock(self.loop, rate, skew)
        clock.is_kept = self.keeps_clocks
        processes = NodeProcesses(machine)
        components = self._build_components(clock, processes)
        self.nodes[name] = node = Node(self, name, clock, components, machine)
        if machine is not None:
            processes.own = machine.add(node)
        return node

    def note(self, node: str, what: str, **details: Any) -> None:
        """Append an occurrence to the history."""
        if self._is_over:
            return
        occurrence = Occurrence(self.loop.time(), node, what, details)
        self.history.append(occurrence)
        for watch in self._watchers:
            self.violations += map(as_violation, watch(occurrence))

    def watch(self, watcher: Watcher) -> None:
        """Call a function with every occurrence when it happens; it returns violations.

        For checks that the history does not allow, such as what every node believes at a commit.
        """
        self._watchers.append(watcher)

    def expect(self, *checks: Check) -> None:
        """Add checks for the complete history, after the story has ended."""
        self._checks += checks

    def run(self, story: Callable[[], Awaitable[T]]) -> T:
        """Run a story, and everything that it starts, until the story ends.

        What still runs then is discarded; its finally clauses run, but record nothing.
        """

        async def run() -> T:
            return await story()

        try:
            return self.loop.run_until_complete(run())
        finally:
            self._is_over = True
            self.violations += [
                describe_failure(error, f"a task died unnoticed: {error!r}")
                for error in self.loop.list_unretrieved()
            ]
            self.loop.abandon()

    def judge(self) -> list[Violation]:
        """Return all violations: those found so far, and those that checks find in the history."""
        found = (each for check in self._checks for each in check(self.history))
        return [*self.violations, *map(as_violation, found)]

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine that belongs to no node."""
        if self._is_over:
            work.close()
        else:
            self.loop.create_task(work, context=Context())

    def run_now(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run work that belongs to no node: at once, as far as it waits for nothing."""
        coroutine = work(*args)
        try:
            awaited = coroutine.send(None)
        except StopIteration:
            # Almost always it is done by now, and a task would cost more than a request.
            return
        self.start(_finish(coroutine, awaited))

    @property
    def fingerprint(self) -> str:
        """A digest of the history: equal for equal seeds, under any PYTHONHASHSEED."""
        return hashlib.sha256(msgspec.json.encode(self.history, order="sorted")).hexdigest()

    def _build_clock(self, rate: float, skew: float) -> NodeClock:
        """Build the clock of a machine that was booted at some time."""
        boot, uptime = self.surprises.randrange(1, 2**31), self.surprises.choice(_UPTIMES)
        return NodeClock(self.loop, rate, skew, boot, uptime)

    def _draw_machine(self) -> Machine:
        """Return a machine that is new, or almost the same as another one, or another one."""
        if not self._machines or self.surprises.random() < _NEW_MACHINE:
            machine = Machine(f"host-{len(self._machines)}")
        else:
            machine = self.surprises.choice(self._machines)
            if self.surprises.random() < _NEW_MACHINE:
                machine = Machine(machine.host, machine.boot, f"own:[{len(self._machines)}]")
        self._machines.append(machine)
        return machine

    def _build_components(self, clock: NodeClock, processes: NodeProcesses) -> Components:
        return Components(
            clock=clock,
            randomness=_NodeRandomness(self.dice),
            events=Events(),
            processes=processes,
        )

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.violations.append(describe_failure(error, f"{context['message']}: {error!r}"))


@types.coroutine
def _finish(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Run a coroutine to its end that has begun and waits for something."""
    with suppress(StopIteration):
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - the coroutine handles it
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(value)


class _NodeRandomness:
    """The randomness of a node, from the world's dice."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def bytes(self, count: int) -> bytes:
        """Return random bytes."""
        return self._dice.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """Return a random number."""
        return self._dice.uniform(low, high)
