"""Simulated processes with a clock and threads of their own.

A node runs unmodified coroutines. It can be paused (its clock continues), suspended (its clock
stops too, as under a hypervisor), stopped cleanly, killed at any await, and started again, on the
same boot of its machine or on the next one. Its threads are hosts: one can be blocked while the
others continue.

Each machine has a clock, which may be fast or slow, off, or stopped. Its monotonic time never goes
back, whatever is done to the clock; its wall time may jump. Nodes that are put on one machine see
which of them have ended.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from jobsync.components import Components
from jobsync.core.clock import Mono, Wall
from jobsync.processes import NO_PROCESS, ProcessIdentity
from jobsync.testing.loop import HOST, ScheduledCall, SimulatedLoop

if TYPE_CHECKING:
    from jobsync.testing.network import Link
    from jobsync.testing.world import World

__all__ = ["WORLD_START", "Machine", "Node", "NodeClock", "NodeHost", "NodeProcesses", "Program"]

T = TypeVar("T")

Program: TypeAlias = Callable[["Node"], Coroutine[Any, Any, object]]
"""What a node runs after each start."""

GRACE = 30.0
"""Seconds that a node has to stop cleanly before it is killed."""

WORLD_START = 1_700_000_000.0
"""When every world begins, in Unix seconds."""

_UPTIME = 1000.0
"""Seconds that machines have been running by then."""

_ROUNDING = 1e-9


class NodeClock:
    """The clock of a machine.

    Args:
        loop: provides the world's time.
        rate: its speed; 1.05 gains three seconds per minute.
        skew: the error of its wall time in seconds; may be changed at any time.
        boot: the id of the boot.
        uptime: the seconds since the boot; None for a machine that is older than the world.

    Attributes:
        is_kept: whether a time server keeps its wall time, whatever its rate: `skew` is all its
            error.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        rate: float = 1.0,
        skew: float = 0.0,
        boot: int = 1,
        uptime: float | None = None,
    ) -> None:
        self.skew = skew
        self.is_kept = False
        self._loop = loop
        self._rate = rate
        self._boot = boot
        self._is_stopped = False
        # When its rate last changed, in the world's time and in its own.
        self._since = loop.time()
        self._shown = loop.time()
        self._booted = -_UPTIME if uptime is None else loop.time() - uptime
        self._read_at = loop.time()
        self._mono = Mono(self._shown - self._booted)
        self._sleepers: dict[asyncio.Future[None], asyncio.TimerHandle] = {}

    @property
    def rate(self) -> float:
        """Its speed. A change applies to callers that sleep already."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rebase()
        self._rate = rate
        for sleeper in self._sleepers:
            _wake(sleeper)

    def wall(self) -> Wall:
        """Return the wall time of this machine."""
        elapsed = self._loop.time() if self.is_kept else self._elapsed()
        return Wall(WORLD_START + elapsed + self.skew)

    def mono(self) -> Mono:
        """Return the time since boot."""
        # Called more often than anything else, and several times at each moment. Whatever is done
        # to a clock, it shows the same time again at the same moment.
        if self._read_at != self._loop.now:
            self._read_at, self._mono = self._loop.now, Mono(self._elapsed() - self._booted)
        return self._mono

    def boot(self) -> int:
        """Return the id of the boot."""
        return self._boot

    async def sleep(self, seconds: float) -> None:
        """Wait by this clock: longer in the world's time if it is slow or stopped."""
        left = max(0.0, seconds)
        until = self._elapsed() + left
        while True:
            # In the world's time, or until the rate changes.
            sleeper: asyncio.Future[None] = asyncio.Future(loop=self._loop)
            self._sleepers[sleeper] = self._loop.call_later(left / self._rate, _wake, sleeper)
            try:
                await sleeper
            finally:
                self._sleepers.pop(sleeper).cancel()
            left = until - self._elapsed()
            if left <= _ROUNDING:
                return

    def step_wall(self, seconds: float) -> None:
        """Move the wall time, forward or back. Sleeping callers do not notice."""
        self.skew += seconds

    def stop(self) -> None:
        """Stop the clock."""
        self._rebase()
        self._is_stopped = True

    def resume(self) -> None:
        """Continue from where it stopped."""
        self._rebase()
        self._is_stopped = False

    def reboot(self) -> "NodeClock":
        """Return the clock of this machine after a reboot."""
        clock = NodeClock(self._loop, self._rate, self.skew, self._boot + 1, uptime=0.0)
        clock.is_kept = self.is_kept
        if not self.is_kept:
            clock.skew += self._elapsed() - clock._elapsed()
        return clock

    def _elapsed(self) -> float:
        if self._is_stopped:
            return self._shown
        return self._shown + (self._loop.now - self._since) * self._rate

    def _rebase(self) -> None:
        """Measure from now on, so that a change does not affect the time so far."""
        self._shown, self._since = self._elapsed(), self._loop.time()


def _wake(sleeper: "asyncio.Future[None]") -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class Machine:
    """A machine, or a container on it, whose processes see each other.

    A process gets the lowest number that is free, so that a successor has the number of its
    predecessor, as it often happens in containers.

    Args:
        host: the name of the machine.
        boot: the id of its boot.
        namespaces: where the numbers of its processes are valid.
    """

    def __init__(self, host: str, boot: str = "boot-1", namespaces: str = "pid:[1]") -> None:
        self.host = host
        self.boot = boot
        self.namespaces = namespaces
        self._processes: dict[int, tuple[Node, int]] = {}
        self._rebooted: Machine | None = None

    def add(self, node: "Node") -> ProcessIdentity:
        """Add a node; return the identity of its process."""
        pid = next(pid for pid in count(1) if self.find_start(pid) == NO_PROCESS)
        started = next(node.world.starts)
        self._processes[pid] = (node, started)
        return ProcessIdentity(
            host=self.host, boot=self.boot, namespaces=self.namespaces, pid=pid, started=started
        )

    def find_start(self, pid: int) -> int:
        """Return when the process with a number was started; `NO_PROCESS` if there is none."""
        node, started = self._processes.get(pid, (None, NO_PROCESS))
        return started if node is not None and node.is_alive else NO_PROCESS

    def reboot(self) -> "Machine":
        """Return this machine after a reboot; the same for all its processes."""
        if self._rebooted is None:
            self._rebooted = Machine(self.host, f"{self.boot}+", self.namespaces)
        return self._rebooted


class NodeProcesses:
    """The processes of a machine, as a node on it sees them; without one it sees none."""

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self.own: ProcessIdentity | None = None

    def identify(self) -> ProcessIdentity | None:
        """Return the identity of the node's process."""
        return self.own

    def find_start(self, pid: int) -> int | None:
        """Return when the process with a number was started."""
        return None if self._machine is None else self._machine.find_start(pid)


class Node:
    """A process. Created by `World.node`.

    Attributes:
        world: the world.
        name: its name; a successor may have the same.
        clock: the clock of its machine.
        machine: its machine; None if it is alone on one.
        components: its time, randomness and events.
        links: its links to stores.
        is_alive: whether it has neither stopped nor been killed.
        is_paused: whether it is paused or suspended.
    """

    def __init__(
        self,
        world: "World",
        name: str,
        clock: NodeClock,
        components: Components,
        machine: Machine | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.machine = machine
        self.components = components
        self.links: list[Link] = []
        self.is_alive = True
        self.is_paused = False
        self._hosts: dict[str, NodeHost] = {}
        self._program: Program | None = None
        self._main: asyncio.Task[Any] | None = None

    def host(self, name: str = "main") -> "NodeHost":
        """Return a thread of this node; create it on first use."""
        if name not in self._hosts:
            self._hosts[name] = NodeHost(self, name)
        return self._hosts[name]

    def run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a coroutine on the main thread."""
        return self.host().run(work)

    @property
    def has_program(self) -> bool:
        """Whether a restart runs a program."""
        return self._program is not None

    def start(self, program: Program) -> None:
        """Run a program, now and after every restart."""
        self._program = program
        self._main = self.run(program(self))

    def pause(self) -> None:
        """Stop running, as by SIGSTOP. The clock continues."""
        self._record_fault("pause")
        self.is_paused = True
        self._update_hosts()

    def suspend(self) -> None:
        """Stop running, and stop the clock of the machine."""
        self._record_fault("suspend")
        self.is_paused = True
        self.clock.stop()
        self._update_hosts()

    def resume(self) -> None:
        """Continue where it stopped."""
        if not self.is_alive:
            return
        self.world.note(self.name, "resume")
        self.is_paused = False
        self.clock.resume()
        self._update_hosts()

    def block(self) -> None:
        """Block the main thread, as code does that never awaits. Other threads continue."""
        self.host().block()

    def unblock(self) -> None:
        """Unblock the main thread."""
        self.host().unblock()

    def kill(self) -> None:
        """End at once, at any await. No finally clause runs."""
        if self.is_alive:
            self._record_fault("kill")
            self._end()

    async def stop(self) -> None:
        """Stop cleanly: cancel the program, as SIGTERM does; kill it if it takes too long."""
        self._record_fault("stop")
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main], timeout=GRACE)
        self._end()

    def restart(self) -> "Node":
        """Start the program again: another process with this name on the same boot."""
        return self._succeed(self.clock, self.machine)

    def reboot(self) -> "Node":
        """Start the program again after a reboot of the machine, whose clock starts again."""
        machine = None if self.machine is None else self.machine.reboot()
        return self._succeed(self.clock.reboot(), machine)

    def _succeed(self, clock: NodeClock, machine: Machine | None) -> "Node":
        self.kill()
        successor = self.world.node(self.name, clock=clock, machine=machine)
        if self._program is not None:
            successor.start(self._program)
        return successor

    def _record_fault(self, what: str) -> None:
        self.world.note(self.name, what)
        self.world.faults += 1

    def _end(self) -> None:
        self.is_alive = False
        self.clock.resume()
        self._update_hosts()

    def _update_hosts(self) -> None:
        for host in self._hosts.values():
            host.update()


class NodeHost:
    """A thread of a node. Created by `Node.host`.

    Attributes:
        name: its name on the node.
        is_blocked: whether it is blocked.
        is_running: whether callbacks run when they are ready.
    """

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self.is_blocked = False
        self.is_running = True
        self._node = node
        self._held: list[ScheduledCall] = []
        self.update()

    def run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a coroutine on this thread."""
        return self._node.world.loop.create_task(work, context=self._context())

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a function soon on this thread."""
        self._node.world.loop.call_soon(call, *arguments, context=self._context())

    def block(self) -> None:
        """Block the thread. Other threads of the node continue."""
        self._node.world.faults += 1
        self._set_blocked(is_blocked=True)

    def unblock(self) -> None:
        """Unblock the thread."""
        self._set_blocked(is_blocked=False)

    def admit(self, call: ScheduledCall) -> bool:
        """Return whether to run a callback now; if not, keep it until the thread runs."""
        if self.is_running:
            return True
        self._held.append(call)
        return False

    def update(self) -> None:
        """Update whether it runs, after a change of the node or the thread."""
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

    def _set_blocked(self, *, is_blocked: bool) -> None:
        self._node.world.note(self._node.name, "block" if is_blocked else "unblock", host=self.name)
        self.is_blocked = is_blocked
        self.update()
