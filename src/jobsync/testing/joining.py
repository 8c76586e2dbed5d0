"""Members of a fleet in a simulated world: each on a thread of its own, as in production."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar

from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import SameLoop
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.stores.contract import Store
from jobsync.testing.network import CALM, Link, Weather, connect
from jobsync.testing.nodes import Node, NodeHost

__all__ = ["SimulatedThread", "join"]

T = TypeVar("T")


class SimulatedThread(SameLoop):
    """Runs a member on a thread of a node: it beats on while the main thread is blocked.

    Args:
        host: the thread: `node.host("heartbeat")`.
    """

    def __init__(self, host: NodeHost) -> None:
        self._host = host

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to run it."""
        self._loop = asyncio.get_running_loop()
        self._home = copy_context()
        self._task = self._host.run(main())

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon on the thread."""
        self._host.call_soon(call, *arguments)

    def tell(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something soon where it was started."""
        self._loop.call_soon(call, *arguments, context=self._home)

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something on the thread while the member lives."""

        async def wait() -> T:
            return await self._host.run(work())

        return await super().call(wait)


async def join(
    node: Node,
    store: Store,
    settings: CoordinatorSettings | None = None,
    weather: Weather = CALM,
) -> Membership:
    """Let a node join the fleet that shares a store, as `Membership.join` does for a process.

    Args:
        node: who joins; its session gets a thread and a link of its own.
        store: what all nodes share.
        settings: the options of its coordinators.
        weather: what happens on its links.

    Raises:
        Unavailable, Misconfigured: the store cannot be used now.
    """

    async def open_own() -> Store:
        return Link(node.world, node, store, weather)

    membership = Membership(
        connect(node, store, weather),
        node.components,
        settings or CoordinatorSettings(),
        open_own=open_own,
        host=SimulatedThread(node.host("session")),
    )
    await membership.start()
    return membership
