"""Plugins of a database: installed once, started and stopped with it.

`start` and `stop` may be called by anybody, also by the plugin's own hooks and work, in any
order and repeatedly; each takes effect once. After `stop`, or a `stop` that was cancelled,
nothing of the plugin runs in the background. Its events reach its own listeners and the
database's.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from jobsync.coordination.runner import find_caller
from jobsync.database.definition import Definition, Rule
from jobsync.database.home_loop import HomeLoop
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.supervisor import LifecycleLock, Work
from jobsync.errors import Invalid, plain_text
from jobsync.events import Event, EventEmitter, Events

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["STOP_TIME", "Plugin", "PluginStarted", "PluginStopped", "check_plugin_name"]

STOP_TIME = 5.0
"""Seconds that a plugin may take to stop by default."""

_is_name = re.compile(r"[A-Za-z0-9_-]{1,50}").fullmatch
_word_starts = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class _PluginEvent(Event, frozen=True, kw_only=True):
    plugin: str


class PluginStarted(_PluginEvent, frozen=True, kw_only=True):
    """A plugin has started."""

    name = "db:plugin-started"


class PluginStopped(_PluginEvent, frozen=True, kw_only=True):
    """A plugin has stopped."""

    name = "db:plugin-stopped"


class Plugin(EventEmitter):
    """Base class of plugins: override `on_install`, `on_start` and `on_stop` as needed.

    Args:
        namespace: separates the data of several plugins of one kind. By default the alias
            that it is added under, then "default".

    Attributes:
        slug: the kind of plugin, in names of data and events; by default made from the
            class's name: `SessionCleanerPlugin` has the slug `session-cleaner`.
        namespace: see above; set once it is added.
        name: in the database; set once it is added.
    """

    slug: ClassVar[str]
    runs_jobs: ClassVar[bool] = False
    """Whether it is a scheduler, which runs the jobs of other plugins."""

    is_passive: ClassVar[bool] = False
    """Whether it does nothing by itself: it starts also where no plugin works."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "slug" not in vars(cls):
            words = _word_starts.split(cls.__name__.removesuffix("Plugin"))
            cls.slug = "-".join(words).lower().strip("_-") or "plugin"
        check_plugin_name("slug", cls.slug)

    def __init__(self, *, namespace: str | None = None) -> None:
        self.namespace = "" if namespace is None else check_plugin_name("namespace", namespace)
        self.name = ""
        self.events = Events()
        self._database: Database | None = None
        self._lifecycle = LifecycleLock("plugin")
        self._exit_stack = AsyncExitStack()
        self._installed = False
        self._running = False
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name or self.slug!r})"

    async def on_install(self) -> None:
        """Prepare what is needed before the first start, such as resources."""

    async def on_declare(self) -> None:
        """Prepare what callers need, where the plugin does not work and is never started."""

    async def on_start(self) -> None:
        """Start to work."""

    async def on_stop(self) -> None:
        """End the work in order. What still runs in the background afterwards is cancelled."""

    @property
    def database(self) -> "Database":
        """The database that it is attached to.

        Raises:
            Invalid: it is not attached yet.
        """
        if self._database is None:
            fix = "write Database(url, plugins=[…]), or await database.use_plugin(…) first"
            raise Invalid("plugin", self, "is not attached to a database", fix)
        return self._database

    @property
    def home_loop(self) -> HomeLoop | None:
        """The event loop of its database; None before it is attached."""
        return None if self._database is None else self._database.home_loop

    @property
    def storage(self) -> PluginStorage:
        """Its values between runs, separate from other plugins and other namespaces."""
        return self.database.open_storage(self.slug, self.namespace)

    def run_in_background(self, work: Work, name: str = "") -> asyncio.Task[None]:
        """Run work until it returns or the plugin stops.

        `Unavailable` restarts it after a pause. Any other error makes the database fail.
        """
        task = self.database.run_in_background(work, f"{self.name} {name}".rstrip())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def emit(self, event: Event) -> None:
        """Emit an event to the listeners of this plugin and of the database."""
        self.events.emit(event)

    @property
    def is_running(self) -> bool:
        """Whether it has started and not stopped since."""
        return self._running

    def unready(self) -> str:
        """Return why it cannot work now; empty if all is well. Makes no request."""
        return "" if self._running else "is not running"

    def stuck(self) -> str:
        """Return why it cannot recover in this process; empty if it can. Makes no request."""
        return ""

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is user code that must end before this plugin can stop."""
        return False

    @property
    def stop_time(self) -> float:
        """Seconds that `stop` may take; what takes longer is left behind by a disconnect."""
        return STOP_TIME

    def choose_rules(self, definition: Definition) -> Sequence[Rule]:
        """Return the rules of indexes that it needs for a resource. Makes no request.

        Called whenever this process defines a resource, also before the plugin has started. What
        it returns is stored with the definition.

        Raises:
            Invalid: the resource cannot be what the plugin needs; it is not defined then.
        """
        del definition
        return ()

    @property
    def prefixes(self) -> Sequence[str]:
        """Where it creates and deletes records beside its storage: old tombstones are removed."""
        return ()

    @property
    def completed_message_ttl(self) -> float | None:
        """Seconds for which queues remember completed messages; None if it is not its business.

        It counts for queues of the same database without a `completed_ttl` of their own.
        """
        return None

    @property
    def scheduled_jobs(self) -> Mapping[str, Mapping[str, Any]]:
        """The jobs that a scheduler of the same database runs for it, by name, with options."""
        return {}

    def list_started(self) -> "list[Plugin]":
        """Return the plugins of the same database that run."""
        plugins = self.database.plugins
        return [plugins[name] for name in plugins if plugins[name].is_running]

    async def adopt_jobs(self, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """Run jobs of another plugin at times, if this is a scheduler."""

    def prepare_stop(self) -> None:
        """Start no new work: `stop` follows, after that of plugins that were added later."""

    def list_running(self) -> list[str]:
        """Return descriptions of user code of this plugin that runs, for reports."""
        return []

    def choose_name(self, alias: str | None) -> str:
        """Return its name in a database.

        Raises:
            Invalid: the alias is not a valid name.
        """
        if alias is not None:
            return check_plugin_name("alias", alias)
        return "-".join(filter(None, (self.slug, self.namespace)))

    @property
    def kind(self) -> str:
        """What distinguishes it within a namespace, which has one plugin of each kind."""
        return self.slug

    def attach(self, database: "Database", name: str, alias: str | None) -> None:
        """Attach it to a database, once. Called by `Database.use_plugin`.

        Raises:
            Invalid: it is attached to another one.
        """
        if self._database is not None:
            raise Invalid("plugin", self.name, "is already attached", "create another one")
        self.name = name
        self.namespace = self.namespace or alias or "default"
        self._database = database
        self.events.join(database.events)

    @property
    def is_calling(self) -> bool:
        """Whether the caller is one of its own hooks, or other user code that `stop` waits for."""
        return self.runs_caller

    async def start(self) -> None:
        """Start, unless it is running. Called by user code of this plugin, it starts after that.

        Raises:
            Invalid: its database is not connected.
        """
        if self.runs_caller and self.database.is_connected:
            # Behind a stop that the same user code has called before.
            self.database.run_in_background(self._start, f"{self.name} starts")
        else:
            await self._start()

    async def _start(self) -> None:
        if self._is_reentrant("start"):
            return
        async with self._lifecycle.hold("start"):
            if self._running:
                return
            if not self.database.is_connected:
                fix = "await database.connect() first"
                raise Invalid(
                    "plugin", self.name, "belongs to a database that is not connected", fix
                )
            if not self.is_passive:
                self.database.check_works("start plugins")
            async with AsyncExitStack() as exit_stack:
                await self._set_up(exit_stack)
                self._exit_stack = exit_stack.pop_all()
            self._running = True
        self.emit(PluginStarted(plugin=self.name))

    async def stop(self) -> None:
        """Stop, if it is running. Called by user code of this plugin, it stops after that ends."""
        is_stopping = self._lifecycle.action == "stop"
        if self.runs_caller and not is_stopping and self.database.is_connected:
            self.prepare_stop()
            self.database.run_in_background(self._stop, f"{self.name} stops")
        else:
            await self._stop()

    async def _stop(self) -> None:
        if self._is_reentrant("stop"):
            return
        async with self._lifecycle.hold("stop"):
            if not self._running:
                return
            self._running = False
            await self._exit_stack.aclose()
        self.emit(PluginStopped(plugin=self.name))

    async def _set_up(self, exit_stack: AsyncExitStack) -> None:
        """Start step by step; its callbacks undo the steps in reverse order."""
        if not self._installed:
            await self.on_install()
            self._installed = True
        exit_stack.push_async_callback(self._cancel_work)
        await self.on_start()
        exit_stack.push_async_callback(self.on_stop)

    def _is_reentrant(self, action: str) -> bool:
        is_hook = self._lifecycle.action == "stop" and self.is_calling
        return self._lifecycle.is_reentrant(action, self.name, is_hook=is_hook)

    async def _cancel_work(self) -> None:
        # Work that stops its own plugin is not cancelled.
        others = self._tasks - {find_caller()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)


def check_plugin_name(field: str, name: object) -> str:
    """Return a name as a plain text, if it can be part of a key.

    Raises:
        Invalid: it cannot.
    """
    text = plain_text(name)
    if text is None or not _is_name(text):
        raise Invalid(field, name, "must be a valid name", "use up to 50 letters, digits, - and _")
    return text
