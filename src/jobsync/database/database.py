"""A store with resources and plugins.

A database is usable between `connect` and `disconnect`. Resources are defined in the store, so
every process that connects sees them. Plugins added before `connect` start with it, later ones
at once. `disconnect` stops everything that still runs in this process.

If background work raises an unexpected error, the database has failed: every later call raises
the same error until it is disconnected.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

from jobsync.components import Components
from jobsync.core.urls import StoreUrl
from jobsync.database.backfill import Backfill
from jobsync.database.cleanup import Cleanup, DatabaseTidied
from jobsync.database.connection import (
    Connection,
    DatabaseConnected,
    DatabaseDisconnected,
    StoreTarget,
)
from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.database.plugin import Plugin
from jobsync.database.plugin_set import PluginSet
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.read_cache import ReadGuard, WatchedStore
from jobsync.database.registry import Registry, ResourceRegistry
from jobsync.database.resource_calls import ResourceCalls
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import LifecycleLock, Supervisor, Work
from jobsync.errors import Invalid, Misconfigured
from jobsync.events import EventEmitter
from jobsync.safe_text import format_error
from jobsync.setting_fields import refuse_unknown
from jobsync.stores.contract import Store

__all__ = ["Database"]

PluginT = TypeVar("PluginT", bound=Plugin)

_BLOCKING_FIX = "in blocking code write `from jobsync.sync import Database`, then `with db:`"

_Function = TypeVar("_Function", bound=Callable[..., Any])

_left_to_parent: list[Connection] = []
"""Connections of a parent process. They are kept, because their ends would disturb it."""


def _refuse_positional(meant: str) -> Callable[[_Function], _Function]:
    """Make a constructor name the argument that was meant by a second one without a name."""

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(self: object, *args: Any, **kwargs: Any) -> Any:
            if len(args) > 1:
                # Any other value may be a URL with a password.
                shown = args[1] if isinstance(args[1], list | tuple | Plugin) else "…"
                fix = f"write {meant}=[…]"
                raise Invalid("argument", shown, "must be passed by its name", fix)
            return function(self, *args, **kwargs)

        return cast("_Function", call)

    return decorate


@on_home_loop
class Database(EventEmitter, ResourceCalls):
    """A store with resources and plugins.

    It lives on the event loop that connects it; calls from other loops run there.

    Args:
        url: of the store; by default `JOBSYNC_URL`, then the url in `jobsync.toml` or
            `[tool.jobsync]`, then a SQLite file in the working directory.
        connection_string: another name for `url`.
        connection: another name for `url`; or an open store, which `disconnect` leaves open.
        plugins: added as by `use_plugin`.
        components: time, randomness and events; this machine's by default.
        work: whether plugins work here, or are only declared. `jobsync work` runs them anyway.

    Attributes:
        resources: by name, as `db.resources.sessions` and `db.resources["sessions"]`.
        plugins: by name.
        events: all events of this database, its resources and plugins.
        components: time, randomness and those events.
        read_guard: what a cache of its records is attached to; see `CachePlugin`.
        works: whether the plugins work in this process.
        idle_plugins: those that are only declared even so; set it before `connect`.
        home_loop: the event loop that it lives on, while it is connected.
    """

    @_refuse_positional("plugins")
    @refuse_unknown("Database")
    def __init__(
        self,
        url: str | None = None,
        *,
        connection_string: str | None = None,
        connection: str | Store | None = None,
        plugins: Sequence[Plugin] = (),
        components: Components | None = None,
        work: bool = True,
    ) -> None:
        self.store_target = StoreTarget(
            url=url, connection_string=connection_string, connection=connection
        )
        self.works = work
        self.idle_plugins: Collection[Plugin] = ()
        self.home_loop = HomeLoop(lambda: self.store_name)
        self.components = components or Components.system()
        self._lifecycle = LifecycleLock("database")
        self._connection: Connection | None = None
        self.read_guard = ReadGuard(self.components.clock)
        self._plugins = PluginSet(self)
        self._registry = ResourceRegistry(
            lambda: self.store,
            self.components,
            self.read_guard,
            self.home_loop,
            self._plugins.choose_rules,
        )
        self._later: asyncio.Task[None] | None = None
        """A disconnect that waits for the handler that called it."""
        self._backfill = Backfill(
            lambda: self.store,
            self._registry,
            self.components,
            lambda: self._get_connection().supervisor,
        )
        self._cleanup = Cleanup(
            lambda: self.store,
            self.components,
            self._registry,
            self._plugins.list_storages,
            self._plugins.list_prefixes,
        )
        self.events = self.components.events
        self.resources = Registry("resource", self._registry.readable, lambda: self.is_connected)
        self.plugins = Registry("plugin", self._plugins.by_name)
        given: object = plugins
        if isinstance(given, Plugin | str) or not isinstance(given, Iterable):
            raise Invalid("plugins", given, "must be a list", "write plugins=[QueuePlugin(…)]")
        for plugin in plugins:
            self._plugins.add(plugin)

    def __repr__(self) -> str:
        return f"Database({self.store_name!r})"

    if not TYPE_CHECKING:
        # Type checkers refuse `with db:` by themselves, because they do not see these.

        def __enter__(self) -> NoReturn:
            fix = f"write `async with db:` in a coroutine; {_BLOCKING_FIX}"
            raise Invalid("database", self.store_name, "cannot be used in a plain `with`", fix)

        def __exit__(self, *_: object) -> None:
            """Do nothing: Python looks for it before `__enter__` is called."""

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        connection = self._connection
        await self.disconnect()
        if error is None and connection is not None:
            connection.supervisor.check()

    async def connect(self) -> Self:
        """Open the store, read the definitions, start the plugins. Safe to repeat.

        Raises:
            Invalid, Misconfigured: the url is invalid, or the store cannot be used.
            Unavailable: the store does not answer.
            Misconfigured: this is a forked child, and the database works in its parent.
        """
        if self._connection is not None and self.home_loop.is_forked:
            self._leave_to_parent(self._connection)
        if self._connection is None and not self.home_loop.enter():
            return await self.home_loop.run(self.connect())
        if not self._is_reentrant("connect"):
            async with self._lifecycle.hold("connect"):
                if self._connection is None:
                    await self._open()
                self._get_connection()
        return self

    async def disconnect(self, *, within: float | None = None) -> None:
        """Stop the plugins and all background work, then close the store. Safe to repeat.

        Ends within the given time and 2 seconds, whatever user code and the store do. What still
        runs then is left behind and listed in the event `db:disconnect-incomplete`. Called by a
        handler of a queue, it returns at once and disconnects after that handler.

        Args:
            within: seconds that the caller can wait: plugins cut short work that would take
                longer, so that there is time to hand it back. By default the longest time that
                a plugin takes to stop, such as the `grace` of a queue.
        """
        if self._is_reentrant("disconnect"):
            return
        connection = self._connection
        if connection is None or not self._plugins.runs_caller:
            await self._disconnect(within)
        elif self._later is None or self._later.done():
            # Not in the handler's context, in which plugins would take it for the handler.
            context = connection.context.copy()
            loop = asyncio.get_running_loop()
            self._later = loop.create_task(self._disconnect(within), context=context)

    async def _disconnect(self, within: float | None) -> None:
        if self._connection is not None and within is not None:
            self._connection.hurry(within)
        async with self._lifecycle.hold("disconnect"):
            if self._connection is not None:
                event = DatabaseDisconnected(store=self.store_name)
                await self._connection.close(self._clear, within, event)

    @property
    def time_left(self) -> float | None:
        """Seconds left of `disconnect(within=…)`; None without one."""
        return None if self._connection is None else self._connection.time_left

    @property
    def is_connected(self) -> bool:
        """Whether it is connected, and not being disconnected."""
        return self._connection is not None and self._lifecycle.action != "disconnect"

    @property
    def store(self) -> Store:
        """The store of this database.

        Raises:
            Invalid: the database is not connected.
            the error that made background work fail.
        """
        return self._get_connection().store

    @property
    def store_name(self) -> str:
        """The URL or the name of the store, without secrets."""
        return self.store_target.name if self._connection is None else self._connection.store.name

    @property
    def shared_session(self) -> SharedSession:
        """The session that plugins share.

        Raises:
            Invalid: the database is not connected, or does not work.
            the error that made background work fail.
        """
        session = self._get_connection().session
        self.check_works("hold locks or coordinate")
        return session

    def check_works(self, action: str) -> None:
        """Check that plugins work in this process.

        Raises:
            Invalid: they do not, so that an action is not possible.
        """
        if not self.works:
            problem = f"cannot {action} with work=False: it has no session"
            raise Invalid("database", self.store_name, problem, "connect one without work=False")

    async def use_plugin(self, plugin: PluginT, alias: str | None = None) -> PluginT:
        """Add a plugin. It starts with `connect`, or at once if already connected.

        Args:
            plugin: to add.
            alias: its name, and its namespace if it has none of its own.

        Raises:
            Invalid: it is not a plugin, belongs to another database, or its name is taken.
        """
        self._plugins.add(plugin, alias)
        if self.is_connected:
            await self._plugins.start_one(plugin)
        return plugin

    def unready(self) -> list[str]:
        """Return why this database or its plugins cannot work now; empty if all is well.

        Makes no request, and may be called from any thread.
        """
        connection = self._connection
        if connection is None or not self.is_connected:
            return ["the database is not connected"]
        try:
            connection.supervisor.check()
        except BaseException as cause:  # noqa: BLE001 - reported, whatever it is
            return [f"the database has failed: {format_error(cause)}"]
        return self._plugins.list_problems("unready")

    def stuck(self) -> list[str]:
        """Return which plugins only a new process can help, and why; empty if all is well.

        Makes no request, and may be called from any thread.
        """
        return self._plugins.list_problems("stuck")

    def add_view(self, name: str, records: Store) -> None:
        """Make records that a plugin stores elsewhere readable as a resource, while connected.

        Args:
            name: of the resource.
            records: a store that reads them, and refuses writes.
        """
        self._registry.add_view(name, records)

    def open_storage(self, slug: str, namespace: str = "default") -> PluginStorage:
        """Return the storage of a kind of plugin in a namespace."""
        return self._plugins.open_storage(slug, namespace)

    async def tidy(self) -> DatabaseTidied:
        """Remove what was deleted an hour ago or earlier for good, and what has expired.

        Covers all resources, and the storage of this process's plugins. Processes with a
        coordinator plugin do it by themselves: one of them, hourly on SQL, daily on object
        stores.

        Raises:
            Unavailable: the store does not answer; what was removed stays removed.
        """
        return await self._cleanup.clean_all()

    def run_in_background(self, work: Work, name: str) -> asyncio.Task[None]:
        """Run work until it returns or the database is disconnected.

        `Unavailable` restarts it after a pause; any other error makes the database fail.
        """
        return self._get_connection().supervisor.run(work, name)

    def _get_connection(self) -> Connection:
        """Return the connection, or raise why it cannot be used."""
        if self._connection is None:
            fix = (
                "use it within `async with database:`, or await database.connect() first; "
                f"{_BLOCKING_FIX}"
            )
            raise Invalid("database", self.store_name, "is not connected", fix)
        self._connection.supervisor.check()
        return self._connection

    def _is_reentrant(self, action: str) -> bool:
        is_stopping = self._lifecycle.action == "disconnect"
        is_hook = is_stopping and self._plugins.is_calling
        return self._lifecycle.is_reentrant(action, self.store_name, is_hook=is_hook)

    async def _open(self) -> None:
        self.home_loop.enter()
        try:
            store, url = await self.store_target.open(self.components)
        except BaseException:
            self.home_loop.leave()
            raise
        supervisor = Supervisor(self.components, self.home_loop.leave)
        session = self._make_session(store, url, supervisor)
        watched = WatchedStore(store, self.read_guard)
        connection = Connection(
            watched, supervisor, session, self._plugins, self.components, owns_store=url is not None
        )
        try:
            await supervisor.start()
            self._connection = connection
            await self.list_resources()
            await self._plugins.start()
        except BaseException:
            await connection.close(self._clear)
            raise
        self.events.emit(DatabaseConnected(store=self.store_name))

    def _make_session(
        self, store: Store, url: StoreUrl | None, supervisor: Supervisor
    ) -> SharedSession:
        return SharedSession(store, url, self.components, supervisor.run, self._cleanup.run)

    def _leave_to_parent(self, connection: Connection) -> None:
        """Forget the connection of the process that this one was forked from."""
        if self.works:
            problem = "was connected before a fork, and works in the parent"
            raise Misconfigured("database", self.store_name, problem, "create another one here")
        _left_to_parent.append(connection)
        self._clear()

    def _clear(self) -> None:
        self._connection = None
        self.home_loop.leave()
        self._registry.clear()
        self.read_guard.clear()
