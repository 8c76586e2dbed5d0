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
from jobsync.testing.clocks import NodeClock
from jobsync.testing.loop import HOST, Call

if TYPE_CHECKING:
    from jobsync.testing.network import Link
    from jobsync.testing.world import World

__all__ = ["Node", "NodeHost", "Program"]

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
        self._held: list[Call] = []
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

    def admit(self, call: Call) -> bool:
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
