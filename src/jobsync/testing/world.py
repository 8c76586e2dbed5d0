"""Nodes in one simulated world, each with a clock of its own, and what may happen to them.

A node runs unmodified coroutines. It can be paused (its clock goes on), suspended (its
clock stops too, as under a hypervisor), killed at any await, and started again.
"""

import asyncio
import hashlib
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Wall
from jobsync.events import Events
from jobsync.testing.loop import HOST, SimulatedLoop

__all__ = ["Node", "NodeClock", "Occurrence", "World"]

T = TypeVar("T")

_BEGIN = 1_700_000_000.0
"""When every world begins, in Unix seconds."""


class Occurrence(msgspec.Struct, frozen=True):
    """Something that happened, in the order in which it did."""

    at: float
    node: str
    what: str
    details: dict[str, Any] = {}


class NodeClock:
    """One node's idea of time.

    Args:
        loop: whose time passes.
        rate: how fast it goes; 1.05 gains three seconds a minute.
        skew: by how much its wall clock is off, in seconds.
    """

    def __init__(self, loop: SimulatedLoop, rate: float = 1.0, skew: float = 0.0) -> None:
        self.rate = rate
        self.skew = skew
        self._loop = loop
        self._stood_still = 0.0
        self._stopped_at: float | None = None

    def wall(self) -> Wall:
        """Tell the time of day, as this node believes."""
        return Wall(_BEGIN + self._elapsed() + self.skew)

    def mono(self) -> Mono:
        """Tell the time since boot."""
        return Mono(1000.0 + self._elapsed())

    def boot(self) -> int:
        """Identify the boot: one machine carries all nodes."""
        return 1

    async def sleep(self, seconds: float) -> None:
        """Wait by this clock: longer in the world's time where it is slow or stands still."""
        until = self.mono() + max(0.0, seconds)
        while True:
            left = until - self.mono()
            await asyncio.sleep(max(0.0, left) / self.rate)
            if until - self.mono() <= 1e-9:  # noqa: PLR2004 - what a float loses on the way
                return

    def stop(self) -> None:
        """Stand still."""
        self._stopped_at = self._loop.time()

    def go_on(self) -> None:
        """Go on from where it stood."""
        if self._stopped_at is not None:
            self._stood_still += self._loop.time() - self._stopped_at
            self._stopped_at = None

    def _elapsed(self) -> float:
        now = self._loop.time() if self._stopped_at is None else self._stopped_at
        return (now - self._stood_still) * self.rate


class Node:
    """One process in the world."""

    def __init__(self, world: "World", name: str, clock: NodeClock) -> None:
        self.name = name
        self.clock = clock
        self.components = Components(clock=clock, randomness=_Draws(world.dice), events=Events())
        self._world = world
        self._held: list[asyncio.Handle] | None = None
        self._dead = False
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def is_alive(self) -> bool:
        """Whether it was not killed."""
        return not self._dead

    def admit(self, handle: asyncio.Handle) -> bool:
        """Run a callback now, keep it for later, or never run it."""
        if self._dead:
            return False
        if self._held is not None:
            self._held.append(handle)
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start something on this node."""
        context = copy_context()
        context.run(HOST.set, self)
        task = self._world.loop.create_task(work, context=context)
        self._tasks.append(task)
        return task

    def pause(self) -> None:
        """Stop running, as by SIGSTOP. The clock goes on."""
        self._world.note(self.name, "pause")
        if self._held is None:
            self._held = []

    def suspend(self) -> None:
        """Stop running, and the clock with it."""
        self.pause()
        self.clock.stop()

    def resume(self) -> None:
        """Go on where it stopped."""
        self._world.note(self.name, "resume")
        self.clock.go_on()
        held, self._held = self._held or [], None
        for handle in held:
            self._world.loop.put_back(handle)

    def kill(self) -> None:
        """End at once, at whatever await it stands. No finally clause runs."""
        self._world.note(self.name, "kill")
        self._dead = True
        self._held = None
        self._world.bury(self)


class World:
    """Everything there is, from one seed.

    Args:
        seed: decides every draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)  # noqa: S311 - chance, not secrecy
        self.loop = SimulatedLoop(self.dice)
        self.history: list[Occurrence] = []
        self._is_over = False
        self._graveyard: list[Node] = []
        self._journeys: set[asyncio.Task[Any]] = set()

    def node(self, name: str, *, rate: float = 1.0, skew: float = 0.0) -> Node:
        """Make a node."""
        return Node(self, name, NodeClock(self.loop, rate, skew))

    def note(self, node: str, what: str, **details: Any) -> None:
        """Write something into the history."""
        if not self._is_over:
            self.history.append(Occurrence(self.loop.time(), node, what, details))

    def run(self, story: Callable[[], Awaitable[T]]) -> T:
        """Let a story happen, and everything that it starts, until the story ends."""

        async def tell() -> T:
            return await story()

        try:
            return self.loop.run_until_complete(tell())
        finally:
            self._end()

    def start(self, work: Coroutine[Any, Any, Any], context: Context) -> None:
        """Let something happen that belongs to no node. What it raises ends the world."""
        journey = self.loop.create_task(work, context=context)
        self._journeys.add(journey)
        journey.add_done_callback(self._arrive)

    def _arrive(self, journey: "asyncio.Task[Any]") -> None:
        self._journeys.discard(journey)
        if not journey.cancelled() and (error := journey.exception()) is not None:
            raise error

    def bury(self, node: Node) -> None:
        """Keep a killed node's tasks: were they collected, their finally clauses would run."""
        self._graveyard.append(node)

    @property
    def fingerprint(self) -> str:
        """Give a digest of the whole history: equal for equal seeds, under any hash seed."""
        return hashlib.sha256(msgspec.json.encode(self.history, order="sorted")).hexdigest()

    def _end(self) -> None:
        """Close what is left over, unheard: were it collected later, somebody would hear."""
        self._is_over = True
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
            work = task.get_coro()
            # A finally clause that awaits has to be closed in its turn.
            while inspect.iscoroutine(work) and inspect.getcoroutinestate(work) != "CORO_CLOSED":
                with suppress(BaseException):
                    work.close()
        self.loop.close()


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
