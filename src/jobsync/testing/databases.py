"""Databases of a simulated world: unmodified plugins, on a node, over its links.

As in production the session has a thread and a way to the store of its own, so that code which
blocks the main thread costs no session.
"""

from typing import Any, ClassVar

from jobsync.coordination.membership import Membership
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.urls import StoreUrl
from jobsync.database.database import Database
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import Supervisor, Work
from jobsync.queue.plugin import QueuePlugin
from jobsync.stores.contract import Store
from jobsync.testing.joining import SimulatedThread
from jobsync.testing.network import CALM, Link, Weather, connect
from jobsync.testing.nodes import Node
from jobsync.testing.toldport import ToldPort

__all__ = ["NodeDatabase", "ToldQueue"]


class NodeDatabase(Database):
    """A database of a node.

    Args:
        node: whose it is.
        shared: what all nodes share; a `RowStore` where there are queues.
        weather: what happens on its links.
        options: as of `Database`.

    Attributes:
        node: whose it is.
    """

    def __init__(self, node: Node, shared: Store, weather: Weather = CALM, **options: Any) -> None:
        store = connect(node, shared, weather)
        super().__init__(connection=store, components=node.components, **options)
        self.node = node
        self._shared = shared
        self._weather = weather

    async def open_own(self) -> Store:
        """Give the session a way of its own."""
        return Link(self.node.world, self.node, self._shared, self._weather)

    def _attend(self, store: Store, url: StoreUrl | None, supervisor: Supervisor) -> SharedSession:
        del url
        return _NodeAttendance(self, store, supervisor, self._tidying.go_on)


class _NodeAttendance(SharedSession):
    """The session of a node's database, on a thread of the node."""

    def __init__(
        self, database: NodeDatabase, store: Store, supervisor: Supervisor, chore: Work
    ) -> None:
        super().__init__(store, None, database.components, supervisor.run, chore)
        self._database = database

    def _make(self, settings: CoordinatorSettings) -> Membership:
        database = self._database
        return Membership(
            self._store,
            database.components,
            settings,
            open_own=database.open_own,
            host=SimulatedThread(database.node.host("session")),
        )


class ToldQueue(QueuePlugin):
    """A queue of a node, otherwise as any: what it asks of the store, and is told, is noted."""

    slug: ClassVar[str] = QueuePlugin.slug

    async def on_start(self) -> None:
        """Find the resource, and take its messages."""
        await super().on_start()
        database = self.database
        if self._port is not None and isinstance(database, NodeDatabase):
            self._port = ToldPort(database.node, self._port)
