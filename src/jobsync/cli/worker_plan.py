"""What a process of `jobsync work` is going to do: on which store, and with which handlers.

A process that could do nothing is refused, because it would look like one at work.
"""

import logging
from collections.abc import Iterator, Mapping

from jobsync.cli.options import describe_origin
from jobsync.core.secrets import redact
from jobsync.database.database import Database
from jobsync.database.plugin import Plugin
from jobsync.errors import Invalid, JobsyncError, closest_name
from jobsync.queue.plugin import QueuePlugin
from jobsync.stores.opening import read_url

__all__ = ["check_work", "choose_work", "describe_store", "describe_work", "warn_of_other_store"]

_log = logging.getLogger("jobsync.work")
_MAX_HANDLERS = 20
_VARIABLE = "JOBSYNC_URL"


def choose_work(database: Database, queues: str | None, concurrency: int | None) -> None:
    """Choose which plugins of a database work here: all, or only some queues.

    Args:
        database: not connected yet. It works, even if it is meant for producers elsewhere.
        queues: the names of the queues, separated by commas; None for all.
        concurrency: handlers of each queue that run at once; None for what each says.

    Raises:
        Invalid: there is no such queue; the message suggests a similar name.
    """
    database.works = True
    plugins = [database.plugins[name] for name in database.plugins]
    own = [plugin for plugin in plugins if isinstance(plugin, QueuePlugin)]
    if queues is not None:
        wanted = {name.strip() for name in queues.split(",")}
        known = {name for plugin in own for name in (plugin.resource, plugin.queue)}
        for name in sorted(wanted - known):
            hint = closest_name(name, known) or ", ".join(sorted(q.resource for q in own))
            fix = f"did you mean {hint}?" if hint else "add a QueuePlugin to the database"
            raise Invalid("--queues", name, "is not a queue of the database", fix)
        others = [plugin for plugin in own if not wanted & {plugin.resource, plugin.queue}]
        database.idle_plugins = frozenset(others)
    for plugin in own:
        if concurrency is not None:
            plugin.set_concurrency(concurrency)


def check_work(target: str, database: Database) -> None:
    """Check that a process has something to do.

    Raises:
        Invalid: it has no plugin that works here, or queues without handlers alone.
    """
    working = _list_working(database)
    if not working:
        problem = "has no plugin that works: the process would do nothing"
        fix = "add one, as in Database(plugins=[QueuePlugin(…)])"
        raise Invalid("TARGET", target, problem, fix)
    idle = [each for each in working if isinstance(each, QueuePlugin) and not each.handlers]
    if len(idle) == len(working):
        names = ", ".join(queue.queue for queue in idle)
        problem = f"has no handler for {names}: the process would do nothing"
        fix = "decorate a function with @queue.task or @queue.handler, and import its module"
        raise Invalid("TARGET", target, problem, fix)


def _list_working(database: Database) -> list[Plugin]:
    """Return the plugins that do something in this process."""
    plugins = [database.plugins[name] for name in database.plugins]
    return [each for each in plugins if not (each.is_passive or each in database.idle_plugins)]


def describe_store(database: Database) -> tuple[str, str]:
    """Return the URL of a database's store without secrets, and for people where it comes from.

    Raises:
        Invalid, Misconfigured: the URL is wrong.
    """
    resolved = database.store_target.resolve()
    if resolved is None:
        return database.store_name, "an open store, from the code"
    url, origin = resolved
    return str(url), describe_origin(origin)


def describe_work(database: Database) -> Iterator[str]:
    """Yield lines for people: which handler runs for which task of which queue."""
    for plugin in _list_working(database):
        if not isinstance(plugin, QueuePlugin):
            yield f"{plugin.name} ({type(plugin).__name__})"
            continue
        handlers = sorted(plugin.handlers.items())
        for task, function in handlers[:_MAX_HANDLERS]:
            yield f"{plugin.queue} → {task or 'messages without a task'} → {function}"
        if (left := len(handlers) - _MAX_HANDLERS) > 0:
            yield f"{plugin.queue} → {left} more tasks"
        if not handlers:
            yield f"{plugin.queue} → no handler here: messages can only be enqueued"


def warn_of_other_store(database: Database, environ: Mapping[str, str]) -> None:
    """Log a warning if the environment names another store than the code, which wins."""
    other = environ.get(_VARIABLE)
    resolved = database.store_target.resolve()
    if not other or (resolved is not None and resolved[1].kind != "code"):
        return
    try:
        if resolved is not None and resolved[0] == read_url(other):
            return
    except JobsyncError:
        # It is not used, so it may be wrong.
        pass
    used = database.store_name if resolved is None else resolved[0]
    _log.warning(
        "%s is %s and not used: the code says %s. Leave the URL out of Database(…) to use it",
        _VARIABLE,
        redact(other),
        used,
    )
