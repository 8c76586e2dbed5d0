"""What attaches to a database: installed once, started and stopped with it.

`start` and `stop` may be called by anybody, also by the plugin's own hooks and work, in any
order and as often as one likes; each takes effect once. A plugin that is stopped runs
nothing in the background any more. Whoever loses patience with a `stop`, and cancels it,
leaves nothing running either. Its events are heard by who listens to it, and by who listens
to the database.
"""

import asyncio
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, ClassVar

from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.supervisor import LifecycleLock, Work
from jobsync.errors import Invalid
from jobsync.events import Event, EventEmitter, Events

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["Plugin", "PluginStarted", "PluginStopped", "check_plugin_name"]

_is_name = re.compile(r"[A-Za-z0-9_-]{1,50}").fullmatch
_humps = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class _About(Event, frozen=True, kw_only=True):
    plugin: str


class PluginStarted(_About, frozen=True, kw_only=True):
    """A plugin runs."""

    name = "db:plugin-started"


class PluginStopped(_About, frozen=True, kw_only=True):
    """A plugin runs no more."""

    name = "db:plugin-stopped"


class Plugin(EventEmitter):
    """Inherit it, and override `on_install`, `on_start` and `on_stop` as needed.

    Args:
        namespace: keeps the data of several plugins of one kind apart. By default the
            alias that it is added under, then "default".

    Attributes:
        slug: the kind of plugin, in names of data and events; by default made from the
            class's name, so that `DailyReportPlugin` is `daily-report`.
        namespace: see above; known once it is added.
        name: how the database calls it; known once it is added.
    """

    slug: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "slug" not in vars(cls):
            words = _humps.split(cls.__name__.removesuffix("Plugin"))
            cls.slug = "-".join(words).lower().strip("_-") or "plugin"
        check_plugin_name("slug", cls.slug)

    def __init__(self, *, namespace: str | None = None) -> None:
        self.namespace = "" if namespace is None else check_plugin_name("namespace", namespace)
        self.name = ""
        self.events = Events()
        self._database: Database | None = None
        self._turn = LifecycleLock("plugin")
        self._undo = AsyncExitStack()
        self._installed = False
        self._running = False
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name or self.slug!r})"

    async def on_install(self) -> None:
        """Prepare what is needed before the first start: resources, for one."""

    async def on_start(self) -> None:
        """Begin to work."""

    async def on_stop(self) -> None:
        """End the work in good order. What still runs in the background then is cancelled."""

    @property
    def database(self) -> "Database":
        """What it is attached to.

        Raises:
            Invalid: nothing yet.
        """
        if self._database is None:
            fix = "await database.use_plugin(plugin) first"
            raise Invalid("plugin", self.slug, "is not attached to a database", fix)
        return self._database

    @property
    def storage(self) -> PluginStorage:
        """What it keeps between runs, apart from other plugins and other namespaces."""
        return self.database.open_storage(self.slug, self.namespace)

    def run_in_background(self, work: Work, name: str = "") -> asyncio.Task[None]:
        """Run work until it returns or the plugin stops.

        `Unavailable` begins it again after a pause. Anything else that it raises makes the
        database fail.
        """
        task = self.database.run_in_background(work, f"{self.name} {name}".rstrip())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def emit(self, event: Event) -> None:
        """Tell a fact to who listens to this plugin, and to who listens to the database."""
        self.events.emit(event)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._running

    def unready(self) -> str:
        """Tell what keeps it from working now; nothing, if all is well. Asks no store."""
        return "" if self._running else "does not run"

    def stuck(self) -> str:
        """Tell why it will not work again in this process; nothing, if it may. Asks no store."""
        return ""

    def name_under(self, alias: str | None) -> str:
        """Give the name that it has in a database.

        Raises:
            Invalid: the alias is no name.
        """
        if alias is not None:
            return check_plugin_name("alias", alias)
        return "-".join(filter(None, (self.slug, self.namespace)))

    @property
    def kind(self) -> str:
        """What sets it apart within a namespace, which has one of each kind."""
        return self.slug

    def attach(self, database: "Database", name: str, alias: str | None) -> None:
        """Become part of a database, once. `Database.use_plugin` calls it.

        Raises:
            Invalid: it is part of another one.
        """
        if self._database is not None:
            raise Invalid("plugin", self.name, "is attached already", "make another one")
        self.name = name
        self.namespace = self.namespace or alias or "default"
        self._database = database
        self.events.join(database.events)

    @property
    def is_calling(self) -> bool:
        """Whether it is a hook of its own that asks, for which `stop` waits."""
        return False

    async def start(self) -> None:
        """Start, unless it runs already.

        Raises:
            Invalid: its database is not connected.
        """
        if self._is_part_of("start"):
            return
        async with self._turn.take("start"):
            if self._running:
                return
            if not self.database.is_connected:
                fix = "await database.connect() first"
                raise Invalid("plugin", self.name, "its database is not connected", fix)
            async with AsyncExitStack() as undo:
                await self._set_up(undo)
                self._undo = undo.pop_all()
            self._running = True
        self.emit(PluginStarted(plugin=self.name))

    async def stop(self) -> None:
        """Stop, if it runs."""
        if self._is_part_of("stop"):
            return
        async with self._turn.take("stop"):
            if not self._running:
                return
            self._running = False
            await self._undo.aclose()
        self.emit(PluginStopped(plugin=self.name))

    async def _set_up(self, undo: AsyncExitStack) -> None:
        """Start step by step; what undoes the steps is called from the last to the first."""
        if not self._installed:
            await self.on_install()
            self._installed = True
        undo.push_async_callback(self._cancel_work)
        await self.on_start()
        undo.push_async_callback(self.on_stop)

    def _is_part_of(self, what: str) -> bool:
        is_hook = self._turn.doing == "stop" and self.is_calling
        return self._turn.is_part_of(what, self.name, is_hook=is_hook)

    async def _cancel_work(self) -> None:
        # Whoever stops the plugin from its own work goes on to its end.
        doomed = self._tasks - {asyncio.current_task()}
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)


def check_plugin_name(field: str, name: object) -> str:
    """Refuse what cannot stand in the names of data.

    Raises:
        Invalid: names the field.
    """
    if not (isinstance(name, str) and _is_name(name)):
        raise Invalid(field, name, "is no name", "use up to 50 letters, digits, - and _")
    return name
