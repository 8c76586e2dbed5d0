"""Members and databases on simulated nodes: unmodified plugins over simulated links.

As in production, a session has a thread and a link of its own, so that code which blocks the main
thread does not lose the session.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, ClassVar, TypeVar

from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import SameLoop
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.urls import StoreUrl
from jobsync.database.database import Database
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import Supervisor, Work
from jobsync.queue.plugin import QueuePlugin
from jobsync.stores.contract import Store
from jobsync.testing.network import Link, connect
from jobsync.testing.nodes import Node, NodeHost
from jobsync.testing.recording import RecordingBackend
from jobsync.testing.weather import CALM, Weather

__all__ = ["NodeDatabase", "RecordingQueue", "SimulatedThread", "join"]

T = TypeVar("T")


class SimulatedThread(SameLoop):
    """Runs a member on a thread of a node: heartbeats continue while the main thread is blocked.

    Args:
        host: the thread, such as `node.host("heartbeat")`.
    """

    def __init__(self, host: NodeHost) -> None:
        self._host = host

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start to run the member."""
        self._loop = asyncio.get_running_loop()
        self._home = copy_context()
        self._task = self._host.run(main())

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a function soon on the thread."""
        self._host.call_soon(call, *arguments)

    def post_home(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a function soon on the thread that started the member."""
        self._loop.call_soon(call, *arguments, context=self._home)

    async def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function on the thread while the member runs."""

        async def wait() -> T:
            return await self._host.run(work())

        return await super().call(wait)


async def join(
    node: Node,
    store: Store,
    settings: CoordinatorSettings | None = None,
    weather: Weather = CALM,
) -> Membership:
    """Join the fleet that shares a store, as `Membership.join` does for a process.

    Args:
        node: the node that joins; its session gets a thread and a link of its own.
        store: the store that all nodes share.
        settings: the settings of its coordinators.
        weather: the faults of its links.

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


class NodeDatabase(Database):
    """The database of a node.

    Args:
        node: the node.
        shared: the store that all nodes share; a `RowStore` if there are queues.
        weather: the faults of its links.
        options: passed to `Database`.

    Attributes:
        node: the node.
    """

    def __init__(self, node: Node, shared: Store, weather: Weather = CALM, **options: Any) -> None:
        store = connect(node, shared, weather)
        super().__init__(connection=store, components=node.components, **options)
        self.node = node
        self._shared = shared
        self._weather = weather

    async def open_own(self) -> Store:
        """Return a link for the session."""
        return Link(self.node.world, self.node, self._shared, self._weather)

    def _make_session(
        self, store: Store, url: StoreUrl | None, supervisor: Supervisor
    ) -> SharedSession:
        del url
        return _NodeSharedSession(self, store, supervisor, self._cleanup.run)


class _NodeSharedSession(SharedSession):
    """The session of a database, on a thread of its node."""

    def __init__(
        self, database: NodeDatabase, store: Store, supervisor: Supervisor, cleanup: Work
    ) -> None:
        super().__init__(store, None, database.components, supervisor.run, cleanup)
        self._database = database

    def _make_membership(self, settings: CoordinatorSettings) -> Membership:
        database = self._database
        return Membership(
            self._store,
            database.components,
            settings,
            open_own=database.open_own,
            host=SimulatedThread(database.node.host("session")),
        )


class RecordingQueue(QueuePlugin):
    """A `QueuePlugin` that records the requests and responses of its backend in the history."""

    slug: ClassVar[str] = QueuePlugin.slug

    async def on_start(self) -> None:
        """Find the resource and start to record."""
        await super().on_start()
        database = self.database
        if self._backend is not None and isinstance(database, NodeDatabase):
            self._backend = RecordingBackend(database.node, self._backend)
