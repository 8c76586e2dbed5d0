"""The plugins of a database with their storages: added under distinct names, asked as one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from jobsync.database.definition import Definition, Rule
from jobsync.database.plugin import STOP_TIME, Plugin, check_plugin_name
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.supervisor import Work
from jobsync.errors import Invalid
from jobsync.safe_text import format_error, safe_name, safe_str
from jobsync.user_functions import is_exit

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["PluginSet"]


class PluginSet:
    """The plugins of a database, in the order in which they were added.

    Args:
        database: that they are attached to.

    Attributes:
        by_name: the plugins by their names in the database.
    """

    def __init__(self, database: "Database") -> None:
        self._database = database
        self.by_name: dict[str, Plugin] = {}
        self._storages: dict[tuple[str, str], PluginStorage] = {}

    def __iter__(self) -> Iterator[Plugin]:
        # A copy: plugins may be added by hooks, and read by other threads.
        return iter(list(self.by_name.values()))

    def add(self, plugin: Plugin, alias: str | None = None) -> None:
        """Attach a plugin to the database, unless it is.

        Raises:
            Invalid: it is not a plugin, belongs to another database, or its name is taken.
        """
        given: object = plugin
        if not isinstance(given, Plugin):
            is_class = isinstance(given, type) and issubclass(given, Plugin)
            fix = f"call it: {safe_name(given)}()" if is_class else "inherit jobsync.Plugin"
            if type(given).__module__ == "jobsync.sync":
                fix = "import both from jobsync, or both from jobsync.sync"
            raise Invalid("plugin", given, "must be a Plugin", fix)
        if plugin in self.by_name.values():
            return
        name = plugin.choose_name(alias)
        namesake = self.by_name.get(name)
        if alias is None and namesake is not None and namesake.kind != plugin.kind:
            name = "-".join(filter(None, (plugin.kind, plugin.namespace)))
        if name in self.by_name:
            if alias is not None:
                raise Invalid("alias", name, "is taken", "pass another alias")
            fix = "use the one that is there, or separate the two by namespace="
            problem = "has the name of another plugin of this database"
            raise Invalid("plugin", plugin, problem, fix)
        plugin.attach(self._database, name, alias)
        self.by_name[name] = plugin

    async def start(self) -> None:
        """Start all plugins, or declare those that do not work in this process."""
        for plugin in self:
            await self.start_one(plugin)

    async def start_one(self, plugin: Plugin) -> None:
        """Start a plugin, or declare it if it does not work in this process."""
        if self._is_working(plugin):
            await plugin.start()
        else:
            await plugin.on_declare()

    def _is_working(self, plugin: Plugin) -> bool:
        database = self._database
        return plugin.is_passive or (database.works and plugin not in database.idle_plugins)

    @property
    def stop_time(self) -> float:
        """Seconds that plugins have to stop: the longest time that one of them takes."""
        return max((plugin.stop_time for plugin in self), default=STOP_TIME)

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is user code that must end before a plugin can stop."""
        return any(plugin.runs_caller for plugin in self)

    @property
    def is_calling(self) -> bool:
        """Whether the caller is a hook, or other user code that a plugin's `stop` waits for."""
        return any(plugin.is_calling for plugin in self)

    def list_running(self) -> list[str]:
        """Return descriptions of user code that runs, for reports."""
        return [f"{plugin.name}: {text}" for plugin in self for text in plugin.list_running()]

    def list_problems(self, question: Literal["unready", "stuck"]) -> list[str]:
        """Return the reasons of all plugins. A plugin that raises has a reason, too."""
        reasons = []
        for plugin in filter(self._is_working, self):
            try:
                if reason := getattr(plugin, question)():
                    reasons.append(f"{plugin.name}: {safe_str(reason)}")
            except BaseException as error:
                if is_exit(error):
                    raise
                reasons.append(f"{plugin.name}: {question}() raised {format_error(error)}")
        return reasons

    def choose_rules(self, definition: Definition) -> list[Rule]:
        """Return the rules of indexes that plugins want for a resource.

        Raises:
            Invalid: two plugins want different ones of the same name.
        """
        rules: dict[tuple[str, str], Rule] = {}
        for plugin in self:
            for rule in plugin.choose_rules(definition):
                if rules.setdefault((rule.kind, rule.name), rule) != rule:
                    problem = f"has a different {rule.name} in another plugin"
                    raise Invalid(plugin.name, definition.name, problem, "name it in one of them")
        return list(rules.values())

    def open_storage(self, slug: str, namespace: str) -> PluginStorage:
        """Return the storage of a kind of plugin in a namespace."""
        slug = check_plugin_name("slug", slug)
        namespace = check_plugin_name("namespace", namespace)
        database = self._database
        if (slug, namespace) not in self._storages:
            self._storages[slug, namespace] = PluginStorage(
                lambda: database.store,
                slug,
                namespace,
                database.components,
                lambda: database.shared_session,
                self._run_while_connected,
                database.home_loop,
            )
        return self._storages[slug, namespace]

    def list_storages(self) -> list[PluginStorage]:
        """Return the storages of all plugins, and those that were opened besides."""
        for plugin in self:
            self.open_storage(plugin.slug, plugin.namespace)
        return list(self._storages.values())

    def list_prefixes(self) -> list[str]:
        """Return where plugins create and delete records beside their storages."""
        return [prefix for plugin in self for prefix in plugin.prefixes]

    def _run_while_connected(self, work: Work, name: str) -> None:
        """Run work in the background, unless a disconnect makes it needless."""
        if self._database.is_connected:
            self._database.run_in_background(work, name)
