"""A store with resources and plugins.

Between `connect` and `disconnect` it can be used. Resources are defined in the store, so
every process that connects sees them. Plugins that were added before start at `connect`,
those that are added later at once; `disconnect` stops what still runs, and leaves nothing
behind in this process.

If background work raises what nobody foresaw, the database has failed: every later call
raises the same, until it is disconnected.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core.attributes import parse
from jobsync.core.clock import Mono
from jobsync.core.secrets import redact
from jobsync.core.urls import StoreUrl
from jobsync.database.cleanup import Cleanup, CleanupScope, DatabaseTidied
from jobsync.database.definition import DEFINITIONS
from jobsync.database.plugin import Plugin, check_plugin_name
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.registry import DROPPED, Registry, ResourceRegistry
from jobsync.database.resource import DATA, Resource
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import LifecycleLock, Supervisor, Work
from jobsync.errors import Invalid
from jobsync.events import Event, EventEmitter
from jobsync.stores.contract import Store
from jobsync.stores.opening import open_store, read_url

__all__ = ["Database", "DatabaseConnected", "DatabaseDisconnected"]

P = TypeVar("P", bound=Plugin)


class _AboutStore(Event, frozen=True, kw_only=True):
    store: str


class DatabaseConnected(_AboutStore, frozen=True, kw_only=True):
    """The store answers, and plugins that were added before have started."""

    name = "db:connected"


class DatabaseDisconnected(_AboutStore, frozen=True, kw_only=True):
    """Plugins have stopped; nothing is asked of the store any more."""

    name = "db:disconnected"


class Database(EventEmitter):
    """A store with resources and plugins.

    Args:
        url: which store; by default `JOBSYNC_URL`, then what `jobsync.toml` or
            `[tool.jobsync]` says, then a SQLite file in the working directory.
        connection_string: another name for `url`.
        connection: another name for `url`; or an open store, which `disconnect` leaves
            open.
        plugins: what to add, as `use_plugin` does.
        components: time, randomness and events; this machine's by default.

    Attributes:
        resources: what is defined, as `db.resources.sessions` and `db.resources["sessions"]`.
        plugins: what was added, by its name.
        events: where all that happens is told.
        components: time, randomness and those events.
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
        given = [place for place in (url, connection_string, connection) if place is not None]
        if len(given) > 1:
            fix = "pass one of url, connection_string and connection"
            raise Invalid("url", len(given), "stores are named", fix)
        self._place: str | Store | None = given[0] if given else None
        self.components = components or Components.system()
        self._turn = LifecycleLock("database")
        self._link: _Connection | None = None
        self._catalogue = ResourceRegistry(lambda: self.store, self.components)
        self._plugins: dict[str, Plugin] = {}
        self._storages: dict[tuple[str, str], PluginStorage] = {}
        self._until: Mono | None = None
        self._tidying = Cleanup(lambda: self.store, self.components, self._find_places)
        self.events = self.components.events
        self.resources = Registry("resource", self._catalogue.known)
        self.plugins = Registry("plugin", self._plugins)
        for plugin in plugins:
            self._add(plugin)

    def __repr__(self) -> str:
        return f"Database({self.place!r})"

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        link = self._link
        await self.disconnect()
        if error is None and link is not None:
            link.supervisor.check()

    async def connect(self) -> Self:
        """Open the store, read the definitions, start the plugins; once, however often called.

        Raises:
            Invalid, Misconfigured: the store is named wrongly, or cannot serve as one.
            Unavailable: it does not answer.
        """
        if not self._is_part_of("connect"):
            async with self._turn.take("connect"):
                if self._link is None:
                    await self._open()
                self._use()
        return self

    async def disconnect(self, *, within: float | None = None) -> None:
        """Stop the plugins and what else runs, then let go of the store. Safe to repeat.

        Args:
            within: seconds after which the caller loses patience: plugins cut short what would
                take longer, so that there is time to give it back. It is no timeout.
        """
        if self._is_part_of("disconnect"):
            return
        async with self._turn.take("disconnect"):
            if self._link is not None:
                if within is not None:
                    self._until = self.components.clock.mono() + within
                told = DatabaseDisconnected(store=self.place)
                await self._close(self._link, told)

    @property
    def time_left(self) -> float | None:
        """Seconds that are left to a disconnect whose caller will lose patience."""
        return None if self._until is None else self._until - self.components.clock.mono()

    @property
    def is_connected(self) -> bool:
        """Whether it was connected, and is not, or not being, disconnected since."""
        return self._link is not None and self._turn.doing != "disconnect"

    @property
    def store(self) -> Store:
        """The store below.

        Raises:
            Invalid: the database is not connected.
            whatever made background work fail.
        """
        return self._use().store

    @property
    def attendance(self) -> SharedSession:
        """The session that plugins share.

        Raises:
            Invalid: the database is not connected.
            whatever made background work fail.
        """
        return self._use().attendance

    async def create_resource(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        strict: bool | None = None,
        hooks: Mapping[str, Any] | None = None,
    ) -> Resource:
        """Define a resource, or go on with the one that is there.

        Args:
            name: a letter, then letters, digits, `_` and `-`.
            attributes: what its records look like, as in `{"name": "string|required"}`;
                without them, what was said before, or anything.
            strict: whether fields that are not described are refused; they are kept by
                default.
            hooks: functions around its verbs, by names such as `before_insert`.

        Raises:
            Invalid: a name, type or rule is unknown, or records that are there would no
                longer pass; names the reason. Nothing was written.
        """
        fields = None if attributes is None else parse(attributes)
        resource = await self._catalogue.define(name, fields, strict=strict)
        resource.add_hooks(hooks or {})
        return resource

    def resource(self, name: str) -> Resource:
        """Give a resource that is known since `connect`, `create_resource` or `list_resources`.

        Raises:
            NotFound: there is none; names those that there are.
        """
        self._use()
        return self.resources[name]

    async def list_resources(self) -> list[str]:
        """Look which resources there are, also those that others have defined since."""
        return await self._catalogue.look()

    async def drop_resource(self, name: str) -> None:
        """Remove a resource and all its records.

        The records go first: if it ends half-way, do it again. Processes that still write
        to it bring records back; stop them before.

        Raises:
            NotFound: there is none.
            Conflict: its definition was changed meanwhile.
            Incomplete: some records could not be removed; tells which.
        """
        await self._catalogue.drop(name)

    async def use_plugin(self, plugin: P, alias: str | None = None) -> P:
        """Add a plugin. It starts at `connect`, or at once if that has been.

        Args:
            plugin: what to add.
            alias: its name, and its namespace if it has none of its own.

        Raises:
            Invalid: it is none, belongs to another database, or its name is taken.
        """
        self._add(plugin, alias)
        if self.is_connected:
            await plugin.start()
        return plugin

    def unready(self) -> list[str]:
        """Tell what keeps this database and its plugins from working; nothing, if all is well.

        Asks no store, and may be called from any thread.
        """
        link = self._link
        if link is None or not self.is_connected:
            return ["the database is not connected"]
        try:
            link.supervisor.check()
        except BaseException as cause:  # noqa: BLE001 - told, whatever it is
            return [f"the database has failed: {cause!r}"]
        plugins = list(self._plugins.values())
        return [f"{each.name}: {why}" for each in plugins if (why := each.unready())]

    def stuck(self) -> list[str]:
        """Tell which plugins only a new process can help, and why; nothing, if all is well.

        Asks no store, and may be called from any thread.
        """
        plugins = list(self._plugins.values())
        return [f"{each.name}: {why}" for each in plugins if (why := each.stuck())]

    def show(self, name: str, records: Store) -> None:
        """Let what a plugin keeps elsewhere be read as a resource, while this is connected.

        Args:
            name: the resource's.
            records: what it reads; what it writes is refused there.
        """
        self._catalogue.show(name, records)

    def open_storage(self, slug: str, namespace: str = "default") -> PluginStorage:
        """Give what plugins of a kind keep in a namespace."""
        check_plugin_name("slug", slug)
        check_plugin_name("namespace", namespace)
        if (slug, namespace) not in self._storages:
            self._storages[slug, namespace] = PluginStorage(
                lambda: self.store,
                slug,
                namespace,
                self.components,
                lambda: self.attendance,
                self._run_while_connected,
            )
        return self._storages[slug, namespace]

    async def tidy(self) -> DatabaseTidied:
        """Remove for good what was deleted an hour ago or earlier, and what has expired.

        Looks at the resources that there are, and at what this process's plugins keep. A
        process with a coordinator plugin does it by itself: one of all, hourly on SQL, daily
        on objects.

        Raises:
            Unavailable: the store does not answer; what was done is done.
        """
        return await self._tidying.tidy()

    def run_in_background(self, work: Work, name: str) -> asyncio.Task[None]:
        """Run work until it returns or the database is disconnected.

        `Unavailable` begins it again after a pause; anything else that it raises makes the
        database fail.
        """
        return self._use().supervisor.run(work, name)

    def _add(self, plugin: Plugin, alias: str | None = None) -> None:
        if not isinstance(plugin, Plugin):
            raise Invalid("plugin", plugin, "is not a Plugin", "inherit jobsync.Plugin")
        if plugin in self._plugins.values():
            return
        name = plugin.name_under(alias)
        namesake = self._plugins.get(name)
        if alias is None and namesake is not None and namesake.kind != plugin.kind:
            name = "-".join(filter(None, (plugin.kind, plugin.namespace)))
        if name in self._plugins:
            raise Invalid("alias", name, "is taken", "pass another alias")
        plugin.attach(self, name, alias)
        self._plugins[name] = plugin

    @property
    def place(self) -> str:
        """Which store, without secrets."""
        match self._place if self._link is None else self._link.store:
            case None:
                return "default store"
            case str() as url:
                return redact(url)
            case store:
                return store.name

    def _use(self) -> "_Connection":
        """Give what connects to the store, or raise what keeps it from being used."""
        if self._link is None:
            fix = "await database.connect() first"
            raise Invalid("database", self.place, "is not connected", fix)
        self._link.supervisor.check()
        return self._link

    async def _find_places(self) -> CleanupScope:
        """Look what there is to tidy up."""
        for plugin in self._plugins.values():
            self.open_storage(plugin.slug, plugin.namespace)
        storages = list(self._storages.values())
        dropped = {
            f"{DATA}{name}/": note for name, note in (await self._catalogue.find_dropped()).items()
        }
        data = {f"{DATA}{name}/" for name in await self.list_resources()}
        own = [each.level for each in storages]
        levels = [DEFINITIONS, DROPPED, *sorted(data | dropped.keys()), *own]
        return CleanupScope(levels, storages, dropped)

    def _run_while_connected(self, work: Work, name: str) -> None:
        """Run work in the background, unless the end of all makes it needless."""
        if self.is_connected:
            self.run_in_background(work, name)

    def _is_part_of(self, what: str) -> bool:
        is_stopping = self._turn.doing == "disconnect"
        is_hook = is_stopping and any(plugin.is_calling for plugin in self._plugins.values())
        return self._turn.is_part_of(what, self.place, is_hook=is_hook)

    async def _open(self) -> None:
        place = self._place
        own = not isinstance(place, Store)
        # Read once: neither the environment nor the working directory need stay as they are.
        url = None if isinstance(place, Store) else read_url(place)
        store = place if isinstance(place, Store) else await open_store(place, self.components)
        supervisor = Supervisor(self.components)
        link = _Connection(store, supervisor, self._attend(store, url, supervisor), own)
        try:
            await supervisor.start()
            self._link = link
            await self.list_resources()
            for plugin in list(self._plugins.values()):
                await plugin.start()
        except BaseException:
            await self._close(link)
            raise
        self.events.emit(DatabaseConnected(store=self.place))

    def _attend(self, store: Store, url: StoreUrl | None, supervisor: Supervisor) -> SharedSession:
        """Make what counts who needs the session."""
        return SharedSession(store, url, self.components, supervisor.run, self._tidying.go_on)

    async def _close(self, link: "_Connection", told: Event | None = None) -> None:
        """Stop and close everything, whatever of it raises."""
        async with AsyncExitStack() as stack:
            # Called from the last to the first.
            stack.callback(self._forget)
            if link.own:
                stack.push_async_callback(link.store.close)
            stack.push_async_callback(link.supervisor.stop)
            stack.push_async_callback(link.attendance.end)
            if told is not None:
                stack.callback(self.events.emit, told)
            for plugin in self._plugins.values():
                stack.push_async_callback(plugin.stop)

    def _forget(self) -> None:
        self._link = None
        self._until = None
        self._catalogue.forget()


class _Connection(msgspec.Struct, frozen=True):
    """What there is between `connect` and `disconnect`."""

    store: Store
    supervisor: Supervisor
    attendance: SharedSession
    own: bool
    """Whether the store was opened here, and so is closed here."""
