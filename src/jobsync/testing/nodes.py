"""Processes of a simulated world, and what may happen to them.

A node runs unmodified coroutines. It can be paused (its clock goes on), suspended (its
clock stops too, as under a hypervisor), stopped in good order, killed at any await, and
started again, on the same machine or after that was switched off and on. Its threads are
hosts: one can be blocked while the others go on.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from jobsync.components import Components
from jobsync.core.clock import Mono, Wall
from jobsync.testing.loop import HOST, ScheduledCall, SimulatedLoop

if TYPE_CHECKING:
    from jobsync.testing.network import Link
    from jobsync.testing.world import World

__all__ = ["Node", "NodeClock", "NodeHost", "Program"]


# A clock for each machine of a simulated world: fast or slow, off, or stopped.
#
# Monotonic time never goes back, whatever is done to the clock. Wall time goes wherever it
# is told to.


_BEGIN = 1_700_000_000.0
"""When every world begins, in Unix seconds."""

_UPTIME = 1000.0
"""For how many seconds machines have been running then."""

_LOST_IN_FLOATS = 1e-9


class NodeClock:
    """One machine's idea of time.

    Args:
        loop: whose time passes.
        rate: how fast it goes; 1.05 gains three seconds a minute.
        skew: by how much its wall clock is off, in seconds; may be changed at any time.
        boot: which boot of the machine this is.
    """

    def __init__(
        self, loop: SimulatedLoop, rate: float = 1.0, skew: float = 0.0, boot: int = 1
    ) -> None:
        self.skew = skew
        self._loop = loop
        self._rate = rate
        self._boot = boot
        self._is_stopped = False
        # On the world's time line, and on this clock's: when it was last set going.
        self._since = loop.time()
        self._shown = loop.time()
        self._booted = -_UPTIME if boot == 1 else loop.time()
        self._looked = loop.time()
        self._mono = Mono(self._shown - self._booted)
        self._sleepers: dict[asyncio.Future[None], asyncio.TimerHandle] = {}

    @property
    def rate(self) -> float:
        """How fast it goes. Whoever sleeps by it when this changes wakes by the new rate."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._pin()
        self._rate = rate
        for sleeper in self._sleepers:
            _wake(sleeper)

    def wall(self) -> Wall:
        """Tell the time of day, as this machine believes."""
        return Wall(_BEGIN + self._read() + self.skew)

    def mono(self) -> Mono:
        """Tell the time since boot."""
        # Of all questions the one that is asked most, and several times at each moment. Whatever
        # is done to a clock, it shows the same again at the same moment.
        if self._looked != self._loop.now:
            self._looked, self._mono = self._loop.now, Mono(self._read() - self._booted)
        return self._mono

    def boot(self) -> int:
        """Identify the boot."""
        return self._boot

    async def sleep(self, seconds: float) -> None:
        """Wait by this clock: longer in the world's time where it is slow or stands still."""
        left = max(0.0, seconds)
        until = self._read() + left
        while True:
            # In the world's time, or until the rate changes.
            sleeper: asyncio.Future[None] = asyncio.Future(loop=self._loop)
            self._sleepers[sleeper] = self._loop.call_later(left / self._rate, _wake, sleeper)
            try:
                await sleeper
            finally:
                self._sleepers.pop(sleeper).cancel()
            left = until - self._read()
            if left <= _LOST_IN_FLOATS:
                return

    def step_wall(self, seconds: float) -> None:
        """Move the time of day, forward or back. Nobody who sleeps notices."""
        self.skew += seconds

    def stop(self) -> None:
        """Stand still."""
        self._pin()
        self._is_stopped = True

    def go_on(self) -> None:
        """Go on from where it stood."""
        self._pin()
        self._is_stopped = False

    def reboot(self) -> "NodeClock":
        """Give the clock of this machine after it was switched off and on."""
        clock = NodeClock(self._loop, self._rate, self.skew, self._boot + 1)
        clock.skew += self._read() - clock._read()
        return clock

    def _read(self) -> float:
        if self._is_stopped:
            return self._shown
        return self._shown + (self._loop.now - self._since) * self._rate

    def _pin(self) -> None:
        """Count from here on, so that what comes next does not change what has been."""
        self._shown, self._since = self._read(), self._loop.time()


def _wake(sleeper: "asyncio.Future[None]") -> None:
    if not sleeper.done():
        sleeper.set_result(None)


T = TypeVar("T")

Program: TypeAlias = Callable[["Node"], Coroutine[Any, Any, object]]
"""What a node runs from its start on."""

GRACE = 30.0
"""Seconds that a node has to stop in good order before it is killed."""


class Node:
    """One process. Made by `World.node`.

    Attributes:
        world: where it is.
        name: what it is called; a successor may go by the same name.
        clock: its machine's clock.
        components: its time, randomness and events.
        links: its ways to stores.
        is_alive: whether it has neither stopped nor been killed.
        is_paused: whether it stands still.
    """

    def __init__(self, world: "World", name: str, clock: NodeClock, components: Components) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.components = components
        self.links: list[Link] = []
        self.is_alive = True
        self.is_paused = False
        self._hosts: dict[str, NodeHost] = {}
        self._program: Program | None = None
        self._main: asyncio.Task[Any] | None = None

    def host(self, name: str = "main") -> "NodeHost":
        """Give a thread of this node, made when it is first asked for."""
        if name not in self._hosts:
            self._hosts[name] = NodeHost(self, name)
        return self._hosts[name]

    def run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start something on this node's main thread."""
        return self.host().run(work)

    @property
    def has_program(self) -> bool:
        """Whether a restart starts something."""
        return self._program is not None

    def start(self, program: Program) -> None:
        """Run a program, now and after every restart."""
        self._program = program
        self._main = self.run(program(self))

    def pause(self) -> None:
        """Stop running, as by SIGSTOP. The clock goes on."""
        self._strike("pause")
        self.is_paused = True
        self._admit_or_hold()

    def suspend(self) -> None:
        """Stop running, and the machine's clock with it."""
        self._strike("suspend")
        self.is_paused = True
        self.clock.stop()
        self._admit_or_hold()

    def resume(self) -> None:
        """Go on where it stopped."""
        if not self.is_alive:
            return
        self.world.note(self.name, "resume")
        self.is_paused = False
        self.clock.go_on()
        self._admit_or_hold()

    def block(self) -> None:
        """Hold the main thread, as code does that never awaits. Other threads go on."""
        self.host().block()

    def unblock(self) -> None:
        """Let the main thread go on."""
        self.host().unblock()

    def kill(self) -> None:
        """End at once, at whatever await it stands. No finally clause runs."""
        if self.is_alive:
            self._strike("kill")
            self._end()

    async def stop(self) -> None:
        """End in good order: cancel the program, as SIGTERM does; kill it if it takes too long."""
        self._strike("stop")
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main], timeout=GRACE)
        self._end()

    def restart(self) -> "Node":
        """Start the program anew: another process of the same name on the same machine."""
        return self._succeed(self.clock)

    def reboot(self) -> "Node":
        """Start the program anew, on the machine switched off and on: its clock begins again."""
        return self._succeed(self.clock.reboot())

    def _succeed(self, clock: NodeClock) -> "Node":
        self.kill()
        successor = self.world.node(self.name, clock=clock)
        if self._program is not None:
            successor.start(self._program)
        return successor

    def _strike(self, what: str) -> None:
        self.world.note(self.name, what)
        self.world.faults += 1

    def _end(self) -> None:
        self.is_alive = False
        self.clock.go_on()
        self._admit_or_hold()

    def _admit_or_hold(self) -> None:
        for host in self._hosts.values():
            host.admit_or_hold()


class NodeHost:
    """A thread of a node. Made by `Node.host`.

    Attributes:
        name: what it is called on its node.
        is_blocked: whether something holds it.
        is_running: whether it runs callbacks as they come.
    """

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self.is_blocked = False
        self.is_running = True
        self._node = node
        self._held: list[ScheduledCall] = []
        self.admit_or_hold()

    def run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start something on this thread."""
        return self._node.world.loop.create_task(work, context=self._context())

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something on this thread, in its turn."""
        self._node.world.loop.call_soon(call, *arguments, context=self._context())

    def block(self) -> None:
        """Hold it. Its node's other threads go on."""
        self._node.world.faults += 1
        self._turn(is_blocked=True)

    def unblock(self) -> None:
        """Let it go on."""
        self._turn(is_blocked=False)

    def admit(self, call: ScheduledCall) -> bool:
        """Run a callback now, keep it for later, or never run it."""
        if self.is_running:
            return True
        self._held.append(call)
        return False

    def admit_or_hold(self) -> None:
        """Act on what has become of the node, and of this thread."""
        node = self._node
        self.is_running = node.is_alive and not node.is_paused and not self.is_blocked
        if self.is_running:
            held, self._held = self._held, []
            for call in held:
                node.world.loop.put_back(call)

    def _context(self) -> Context:
        context = copy_context()
        context.run(HOST.set, self)
        return context

    def _turn(self, *, is_blocked: bool) -> None:
        self._node.world.note(self._node.name, "block" if is_blocked else "unblock", host=self.name)
        self.is_blocked = is_blocked
        self.admit_or_hold()
