"""A store with resources and plugins.

A database is usable between `connect` and `disconnect`. Resources are defined in the store, so
every process that connects sees them. Plugins added before `connect` start with it, later ones
at once. `disconnect` stops everything that still runs in this process.

If background work raises an unexpected error, the database has failed: every later call raises
the same error until it is disconnected.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import Context, copy_context
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.coordination.runner import run_for
from jobsync.core.attributes import parse
from jobsync.core.clock import Clock, Mono
from jobsync.core.partitions import parse_partitions
from jobsync.core.schema import Fields
from jobsync.core.secrets import redact
from jobsync.core.urls import StoreUrl
from jobsync.database.backfill import Backfill
from jobsync.database.cleanup import Cleanup, CleanupScope, DatabaseTidied
from jobsync.database.definition import Definition, Rule
from jobsync.database.document import CREATED, UPDATED
from jobsync.database.index import NOTES
from jobsync.database.plugin import Plugin, check_plugin_name
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.read_cache import ReadGuard, WatchedStore
from jobsync.database.registry import DEFINITIONS, DROPPED, Registry, ResourceRegistry
from jobsync.database.resource import Resource
from jobsync.database.resource_records import DATA
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import LifecycleLock, Supervisor, Work
from jobsync.errors import (
    Invalid,
    NotFound,
    format_error,
    safe_str,
)
from jobsync.events import Event, EventEmitter, is_exit
from jobsync.stores.contract import Store
from jobsync.stores.opening import open_store, read_url

__all__ = [
    "Database",
    "DatabaseConnected",
    "DatabaseDisconnected",
    "DisconnectIncomplete",
    "ProcessesDisagree",
]

P = TypeVar("P", bound=Plugin)

_STOP_TIME = 5.0
"""Seconds that a disconnect may take without plugins."""
_CANCEL_TIME = 0.15
"""Seconds in which a step of a disconnect must end after it is cancelled."""


class _StoreEvent(Event, frozen=True, kw_only=True):
    store: str


class DatabaseConnected(_StoreEvent, frozen=True, kw_only=True):
    """The store answers, and the plugins added before have started."""

    name = "db:connected"


class DatabaseDisconnected(_StoreEvent, frozen=True, kw_only=True):
    """The plugins have stopped; the store is no longer used."""

    name = "db:disconnected"


class DisconnectIncomplete(_StoreEvent, frozen=True, kw_only=True):
    """Work did not end in time when the database was disconnected."""

    name = "db:disconnect-incomplete"
    level = logging.ERROR

    cancelled: tuple[str, ...]
    """What was cancelled, and has ended."""
    running: tuple[str, ...]
    """What runs on."""


class ProcessesDisagree(Event, frozen=True, kw_only=True):
    """Processes have stored different rules for one index within the last minutes.

    Every change costs all writers for minutes, and records may have to be read again. So the rule
    that counts stays if there were too many. Deploy one rule everywhere, then define it once more.
    """

    name = "resource:processes-disagree"
    level = logging.WARNING

    resource: str
    index: str
    rule: str
    """What this process wants."""
    other: str
    """What another process wants."""
    is_used: bool
    """Whether the rule of this process counts now; otherwise the other one does."""


class Database(EventEmitter):
    """A store with resources and plugins.

    Args:
        url: of the store; by default `JOBSYNC_URL`, then the url in `jobsync.toml` or
            `[tool.jobsync]`, then a SQLite file in the working directory.
        connection_string: another name for `url`.
        connection: another name for `url`; or an open store, which `disconnect` leaves open.
        plugins: added as by `use_plugin`.
        components: time, randomness and events; this machine's by default.

    Attributes:
        resources: by name, as `db.resources.sessions` and `db.resources["sessions"]`.
        plugins: by name.
        events: all events of this database, its resources and plugins.
        components: time, randomness and those events.
        read_guard: what a cache of its records is attached to; see `CachePlugin`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connection_string: str | None = None,
        connection: str | Store | None = None,
        plugins: Sequence[Plugin] = (),
        components: Components | None = None,
    ) -> None:
        targets = [target for target in (url, connection_string, connection) if target is not None]
        if len(targets) > 1:
            fix = "pass one of url, connection_string and connection"
            raise Invalid("url", len(targets), "must name one store", fix)
        self._target: str | Store | None = targets[0] if targets else None
        self.components = components or Components.system()
        self._lifecycle = LifecycleLock("database")
        self._connection: _Connection | None = None
        self.read_guard = ReadGuard(self.components.clock)
        self._registry = ResourceRegistry(
            lambda: self.store, self.components, self.read_guard, self._derive_rules
        )
        self._plugins: dict[str, Plugin] = {}
        self._storages: dict[tuple[str, str], PluginStorage] = {}
        self._disconnect_by: Mono | None = None
        self._shutdown: _Shutdown | None = None
        self._later: asyncio.Task[None] | None = None
        """A disconnect that waits for the handler that called it."""
        self._backfill = Backfill(lambda: self.store, self._registry, self.components)
        self._backfills: set[str] = set()
        """Resources that are completed in the background."""
        self._cleanup = Cleanup(lambda: self.store, self.components, self._find_cleanup_scope)
        self.events = self.components.events
        self.resources = Registry("resource", self._registry.readable)
        self.plugins = Registry("plugin", self._plugins)
        for plugin in plugins:
            self._add(plugin)

    def __repr__(self) -> str:
        return f"Database({self.store_name!r})"

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
        """
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
        if connection is None or not any(each.runs_caller for each in self._plugins.values()):
            await self._disconnect(within)
        elif self._later is None or self._later.done():
            # Not in the handler's context, in which plugins would take it for the handler.
            context = connection.context.copy()
            loop = asyncio.get_running_loop()
            self._later = loop.create_task(self._disconnect(within), context=context)

    async def _disconnect(self, within: float | None) -> None:
        if self._shutdown is not None and within is not None:
            self._hurry(self._shutdown, within)
        async with self._lifecycle.hold("disconnect"):
            if self._connection is not None:
                if within is not None:
                    self._disconnect_by = self.components.clock.mono() + within
                event = DatabaseDisconnected(store=self.store_name)
                await self._close(self._connection, event)

    def _hurry(self, shutdown: "_Shutdown", within: float) -> None:
        """Shorten a disconnect under way for a caller that cannot wait as long."""
        end = self.components.clock.mono() + within
        if self._disconnect_by is None or end < self._disconnect_by:
            self._disconnect_by = end
        shutdown.hurry(within)
        for plugin in self._plugins.values():
            plugin.prepare_stop()

    @property
    def time_left(self) -> float | None:
        """Seconds left of `disconnect(within=…)`; None without one."""
        if self._disconnect_by is None:
            return None
        return self._disconnect_by - self.components.clock.mono()

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
        match self._target if self._connection is None else self._connection.store:
            case None:
                return "default store"
            case str() as url:
                return redact(url)
            case store:
                return store.name

    @property
    def shared_session(self) -> SharedSession:
        """The session that plugins share.

        Raises:
            Invalid: the database is not connected.
            the error that made background work fail.
        """
        return self._get_connection().session

    async def create_resource(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        strict: bool | None = None,
        partitions: Mapping[str, Any] | None = None,
        hooks: Mapping[str, Any] | None = None,
    ) -> Resource:
        """Define a resource, or use the existing one.

        Args:
            name: a letter, then letters, digits, `_` and `-`.
            attributes: what its records look like, such as `{"name": "string|required"}`;
                without them the existing definition stays, or anything is allowed.
            strict: whether fields that are not described are refused; by default they are
                stored.
            partitions: fields by whose values records can be found without reading the
                others, such as `{"by_region": ["region"]}`. They are added to those that the
                resource has; records that exist already are added in the background.
            hooks: functions around its verbs, by names such as `before_insert`.

        Raises:
            Invalid: a name, type or rule is unknown, or existing records would no longer
                pass; gives the reason. Nothing was written.
        """
        fields = None if attributes is None else parse(attributes)
        rules: Sequence[Rule] = ()
        if partitions is not None:
            rules = parse_partitions(partitions, self._list_fields(name, fields))
        resource = await self.define_resource(name, fields, strict=strict, rules=rules)
        resource.add_hooks(hooks or {})
        return resource

    def _list_fields(self, name: str, fields: Fields | None) -> list[str] | None:
        """Return the fields of a resource's records; None if nobody has described them."""
        if fields is None and (known := self._registry.resources.get(name)):
            fields = known.definition.schema.fields
        return [*fields, "id", CREATED, UPDATED] if fields else None

    async def define_resource(
        self,
        name: str,
        fields: Fields | None = None,
        *,
        strict: bool | None = None,
        rules: Sequence[Rule] = (),
    ) -> Resource:
        """Define a resource by what was parsed already; for plugins. See `create_resource`."""
        resource = await self._registry.define(name, fields, strict=strict, rules=rules)
        self._report_disputes(resource.definition, rules)
        if not resource.definition.is_settled and name not in self._backfills:
            self._backfills.add(name)
            self.run_in_background(lambda: self._backfill_once(name), f"backfill of {name}")
        return resource

    def _report_disputes(self, definition: Definition, rules: Sequence[Rule]) -> None:
        """Emit which rules other processes want to be different."""
        for rule in [*rules, *self._derive_rules(definition)]:
            other, now = definition.find_dispute(rule), definition.find_index(rule.kind, rule.name)
            if other is not None and now is not None:
                self.components.events.emit(
                    ProcessesDisagree(
                        resource=definition.name,
                        index=rule.name,
                        rule=str(rule),
                        other=str(other),
                        is_used=now.rule.digest == rule.digest,
                    )
                )

    async def _backfill_once(self, name: str) -> None:
        await self._backfill.run_in_background(name)
        self._backfills.discard(name)

    async def backfill(self, name: str, *, again: bool = False) -> None:
        """Wait until the partitions of a resource have all its records; work on it meanwhile.

        It begins two minutes after a partition was added, 17 on object stores, so that all
        processes know of it, and no write of an earlier moment arrives any more. Progress
        is told by the event `resource:index-progress`. Without it the same is done in the
        background, by every process that has defined the partitions.

        Args:
            name: of the resource.
            again: whether to add all records again, also to partitions that are ready. That
                repairs what a process has left that stood still for minutes.

        Raises:
            NotFound: there is no such resource.
            Unavailable: the store does not answer; what was done stays done.
        """
        await self._backfill.run(name)
        if again:
            await self._backfill.repair(name)

    async def drop_partition(self, resource: str, partition: str) -> None:
        """Remove a partition; its entries are removed in the background.

        Raises:
            NotFound: there is no such resource or partition.
        """
        await self._drop_index(resource, "partition", partition)

    async def drop_expiry(self, resource: str) -> None:
        """Stop the expiry of the records of a resource; they stay as they are.

        Those whose move to an archive has begun are moved first. Remove the resource from the
        TTL plugin's options before: a process that starts with it adds the rule again.

        Raises:
            NotFound: there is no such resource, or its records do not expire.
            Unavailable: the store does not answer; the rule stays.
        """
        await self._backfill.complete_moves(resource)
        await self._drop_index(resource, "expiry", "expiry")

    async def _drop_index(self, resource: str, kind: str, name: str) -> None:
        found = (await self._registry.change(resource, lambda now: now)).definition
        index = found.find_index(kind, name)
        if index is None:
            known = [each.rule.name for each in found.indexes if each.rule.kind == kind]
            raise NotFound(f"{kind} of {resource}", name, known)
        await self._registry.change(resource, lambda now: now.remove_index(index.key))
        await self.define_resource(resource)

    def resource(self, name: str) -> Resource:
        """Return a resource known since `connect`, `create_resource` or `list_resources`.

        Raises:
            NotFound: there is no such resource; lists the known ones.
        """
        self._get_connection()
        return self.resources[name]

    async def list_resources(self) -> list[str]:
        """Read which resources there are, including those that others have defined since."""
        return await self._registry.refresh()

    async def drop_resource(self, name: str) -> None:
        """Remove a resource and all its records.

        The records go first: if it fails half-way, repeat it. Processes that still write to
        the resource bring records back; stop them before.

        Raises:
            NotFound: there is no such resource.
            Conflict: its definition was changed meanwhile.
            Incomplete: some records could not be removed; lists which.
        """
        await self._registry.drop(name)

    async def use_plugin(self, plugin: P, alias: str | None = None) -> P:
        """Add a plugin. It starts with `connect`, or at once if already connected.

        Args:
            plugin: to add.
            alias: its name, and its namespace if it has none of its own.

        Raises:
            Invalid: it is not a plugin, belongs to another database, or its name is taken.
        """
        self._add(plugin, alias)
        if self.is_connected:
            await plugin.start()
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
        return self._ask_plugins("unready")

    def stuck(self) -> list[str]:
        """Return which plugins only a new process can help, and why; empty if all is well.

        Makes no request, and may be called from any thread.
        """
        return self._ask_plugins("stuck")

    def _ask_plugins(self, question: Literal["unready", "stuck"]) -> list[str]:
        """Return the reasons of all plugins. A plugin that raises has a reason, too."""
        reasons = []
        for plugin in list(self._plugins.values()):
            try:
                if reason := getattr(plugin, question)():
                    reasons.append(f"{plugin.name}: {safe_str(reason)}")
            except BaseException as error:
                if is_exit(error):
                    raise
                reasons.append(f"{plugin.name}: {question}() raised {format_error(error)}")
        return reasons

    def add_view(self, name: str, records: Store) -> None:
        """Make records that a plugin stores elsewhere readable as a resource, while connected.

        Args:
            name: of the resource.
            records: a store that reads them, and refuses writes.
        """
        self._registry.add_view(name, records)

    def open_storage(self, slug: str, namespace: str = "default") -> PluginStorage:
        """Return the storage of a kind of plugin in a namespace."""
        check_plugin_name("slug", slug)
        check_plugin_name("namespace", namespace)
        if (slug, namespace) not in self._storages:
            self._storages[slug, namespace] = PluginStorage(
                lambda: self.store,
                slug,
                namespace,
                self.components,
                lambda: self.shared_session,
                self._run_while_connected,
            )
        return self._storages[slug, namespace]

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

    def _derive_rules(self, definition: Definition) -> list[Rule]:
        """Return the rules that plugins want for a resource.

        Raises:
            Invalid: two plugins want different ones of the same name.
        """
        rules: dict[tuple[str, str], Rule] = {}
        for plugin in self._plugins.values():
            for rule in plugin.choose_rules(definition):
                if rules.setdefault((rule.kind, rule.name), rule) != rule:
                    problem = f"has a different {rule.name} in another plugin"
                    raise Invalid(plugin.name, definition.name, problem, "name it in one of them")
        return list(rules.values())

    def _add(self, plugin: Plugin, alias: str | None = None) -> None:
        if not isinstance(plugin, Plugin):
            raise Invalid("plugin", plugin, "must be a Plugin", "inherit jobsync.Plugin")
        if plugin in self._plugins.values():
            return
        name = plugin.choose_name(alias)
        namesake = self._plugins.get(name)
        if alias is None and namesake is not None and namesake.kind != plugin.kind:
            name = "-".join(filter(None, (plugin.kind, plugin.namespace)))
        if name in self._plugins:
            raise Invalid("alias", name, "is taken", "pass another alias")
        plugin.attach(self, name, alias)
        self._plugins[name] = plugin

    def _get_connection(self) -> "_Connection":
        """Return the connection, or raise why it cannot be used."""
        if self._connection is None:
            fix = "await database.connect() first"
            raise Invalid("database", self.store_name, "is not connected", fix)
        self._connection.supervisor.check()
        return self._connection

    async def _find_cleanup_scope(self) -> CleanupScope:
        for plugin in self._plugins.values():
            self.open_storage(plugin.slug, plugin.namespace)
        storages = list(self._storages.values())
        notes = await self._registry.read_dropped()
        dropped = {f"{DATA}{name}/": note for name, note in notes.items()}
        data = {f"{DATA}{name}/" for name in await self.list_resources()}
        own = [storage.prefix for storage in storages]
        prefixes = [DEFINITIONS, DROPPED, NOTES, *sorted(data | dropped.keys()), *own]
        return CleanupScope(prefixes, storages, dropped)

    def _run_while_connected(self, work: Work, name: str) -> None:
        """Run work in the background, unless a disconnect makes it needless."""
        if self.is_connected:
            self.run_in_background(work, name)

    def _is_reentrant(self, action: str) -> bool:
        is_stopping = self._lifecycle.action == "disconnect"
        is_hook = is_stopping and any(plugin.is_calling for plugin in self._plugins.values())
        return self._lifecycle.is_reentrant(action, self.store_name, is_hook=is_hook)

    async def _open(self) -> None:
        target = self._target
        owns_store = not isinstance(target, Store)
        # Read once: the environment and the working directory may change later.
        url = None if isinstance(target, Store) else read_url(target)
        store = target if isinstance(target, Store) else await open_store(target, self.components)
        supervisor = Supervisor(self.components)
        session = self._make_session(store, url, supervisor)
        watched = WatchedStore(store, self.read_guard)
        connection = _Connection(watched, supervisor, session, owns_store, copy_context())
        try:
            await supervisor.start()
            self._connection = connection
            await self.list_resources()
            for plugin in list(self._plugins.values()):
                await plugin.start()
        except BaseException:
            await self._close(connection)
            raise
        self.events.emit(DatabaseConnected(store=self.store_name))

    def _make_session(
        self, store: Store, url: StoreUrl | None, supervisor: Supervisor
    ) -> SharedSession:
        return SharedSession(store, url, self.components, supervisor.run, self._cleanup.run)

    async def _close(self, connection: "_Connection", event: Event | None = None) -> None:
        """Stop and close everything, even if a part of it raises or does not end."""
        plugins = list(self._plugins.values())
        self._shutdown = shutdown = _Shutdown(self.components.clock, self._find_stop_time())
        async with AsyncExitStack() as stack:
            # Called from the last to the first.
            stack.callback(self._clear)
            stack.callback(self._report_running, connection.supervisor, shutdown)
            if connection.owns_store:
                stack.push_async_callback(shutdown.run, "the store", connection.store.close, 1.6)
            stack.push_async_callback(
                shutdown.run, "background work", connection.supervisor.stop, 1.5
            )
            stack.push_async_callback(shutdown.run, "the session", connection.session.end, 1.4)
            if event is not None:
                stack.callback(self.events.emit, event)
            for plugin in plugins:
                stack.push_async_callback(shutdown.run, plugin.name, plugin.stop, 1.3)
            for plugin in plugins:
                stack.callback(plugin.prepare_stop)

    def _find_stop_time(self) -> float:
        """Return the seconds that plugins have to stop."""
        if self.time_left is not None:
            return self.time_left
        return max((plugin.stop_time for plugin in self._plugins.values()), default=_STOP_TIME)

    def _report_running(self, supervisor: Supervisor, shutdown: "_Shutdown") -> None:
        """Report what a disconnect has left behind, if anything."""
        user_code = [
            f"{plugin.name}: {text}"
            for plugin in self._plugins.values()
            for text in plugin.list_running()
        ]
        running = (*shutdown.left_behind, *user_code, *supervisor.list_running())
        cancelled = tuple(shutdown.cancelled)
        if running or cancelled:
            name = self.store_name
            self.events.emit(DisconnectIncomplete(store=name, cancelled=cancelled, running=running))

    def _clear(self) -> None:
        self._connection = self._shutdown = self._disconnect_by = None
        self._registry.clear()
        self._backfills.clear()
        self.read_guard.clear()


class _Shutdown:
    """Runs the steps of a disconnect, and leaves those behind that do not end.

    Args:
        clock: this machine's clock.
        seconds: that the plugins have to stop.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end = clock.mono() + seconds
        self._was_hurried = asyncio.get_running_loop().create_future()
        self.cancelled: list[str] = []
        self.left_behind: list[str] = []

    def hurry(self, seconds: float) -> None:
        """Leave the plugins no more than this many seconds from now."""
        end = self._clock.mono() + seconds
        if end < self._end:
            self._end = end
            self._was_hurried.set_result(None)
            self._was_hurried = asyncio.get_running_loop().create_future()

    async def run(
        self, name: str, step: Callable[[], Coroutine[Any, Any, None]], extra: float
    ) -> None:
        """Run a step, until so many extra seconds after the end of the plugins' time."""

        async def wait(task: asyncio.Task[None]) -> None:
            while True:
                left = self._end - self._clock.mono() + extra - _CANCEL_TIME
                waited: list[asyncio.Future[None]] = [task, self._was_hurried]
                done, _ = await asyncio.wait(
                    waited, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if task in done or not done:
                    return

        match await run_for(wait, step, cancelled_for=_CANCEL_TIME):
            case "cancelled":
                self.cancelled.append(name)
            case "running":
                self.left_behind.append(name)


class _Connection(msgspec.Struct, frozen=True):
    """What exists between `connect` and `disconnect`."""

    store: Store
    supervisor: Supervisor
    session: SharedSession
    owns_store: bool
    """Whether the store was opened here, and so is closed here."""
    context: Context
    """The context of the caller of `connect`."""
