"""`jobsync enqueue --app`: messages that the user's program checks, as its own calls do.

The program's database is connected as a producer, so that no plugin works here.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jobsync.cli.target import create_database, load_target
from jobsync.database.database import Database
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.errors import Invalid, closest_name
from jobsync.queue.backend import DEFAULT_NAMESPACE, name_queue
from jobsync.queue.plugin import QueuePlugin

__all__ = ["enqueue_by_program"]

_UNCHECKED = "or pass --url instead of --app, which checks nothing"
_ProgramQueue: TypeAlias = "QueuePlugin[Any]"


def enqueue_by_program(
    app: str, queue: str, data: Sequence[Mapping[str, Any]], options: EnqueueOptions
) -> list[str]:
    """Push messages to a queue of the program module:name; return their ids.

    Args:
        app: module:name.
        queue: as [NAMESPACE/]RESOURCE; nothing for the one that has the task.
        data: the messages.
        options: of `enqueue_many`; the task may be named without its module.

    Raises:
        Invalid: the program has no such queue or task, or an argument or an option is wrong;
            nothing was pushed.
        Misconfigured: the user's code raises.
    """

    async def push() -> list[str]:
        database = await create_database(app, loaded, "--app")
        plugin, task = _choose(app, _list_queues(database), queue, options.get("task", ""))
        database.works = False
        async with database:
            if task:
                options["task"] = task
            return await plugin.enqueue_many(data, **options)

    loaded = load_target(app, "--app")
    return asyncio.run(push())


def _list_queues(database: Database) -> list[_ProgramQueue]:
    plugins = [database.plugins[each] for each in database.plugins]
    return [each for each in plugins if isinstance(each, QueuePlugin)]


def _choose(
    app: str, queues: Sequence[_ProgramQueue], queue: str, task: str
) -> tuple[_ProgramQueue, str]:
    """Return the queue that messages are pushed to, and the stored name of their task.

    Raises:
        Invalid: there is none, or there are several.
    """
    chosen = _find_queues(app, queues, queue) if queue else queues
    known = {name for each in chosen for name in each.handlers}
    if not task:
        if known and "" not in known:
            problem = f"is missing: {queue} has no handler in {app} for messages without a task"
            raise Invalid("--task", "…", problem, f"pass {_list_names(known)}, {_UNCHECKED}")
        return chosen[0], task
    found = [(each, name) for each in chosen for name in _match(task, each.handlers)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.queue} --task {name}" for each, name in found)
        raise Invalid("--task", task, "names several tasks", f"pass one of {names}")
    ends = {name.rpartition(".")[2]: name for name in known if name}
    hint = closest_name(task, known) or ends.get(closest_name(task, ends) or "")
    fix = f"did you mean {hint}?" if hint else f"pass {_list_names(known)}, {_UNCHECKED}"
    problem = f"is not a task of {queue} in {app}" if queue else f"is not a task in {app}"
    raise Invalid("--task", task, problem, fix)


def _find_queues(app: str, queues: Sequence[_ProgramQueue], name: str) -> list[_ProgramQueue]:
    """Return the program's queue of this name: its full one, or its resource if that is unique.

    Raises:
        Invalid: there is none, or there are several.
    """
    full = name if "/" in name else name_queue(DEFAULT_NAMESPACE, name)
    found = [each for each in queues if each.queue == full]
    found = found or [each for each in queues if each.resource == name]
    if len(found) == 1:
        return found
    known = [each.queue for each in queues]
    hint = None if found else closest_name(full, known)
    fix = f"did you mean {hint}?" if hint else f"pass {_list_names(known)}, {_UNCHECKED}"
    problem = "names several queues" if found else "is not a queue"
    raise Invalid("RESOURCE", name, f"{problem} of {app}", fix)


def _match(task: str, known: Mapping[str, str]) -> list[str]:
    """Return the tasks that a name means: the whole one, or those that end in it."""
    return [task] if task in known else [name for name in known if name.endswith(f".{task}")]


def _list_names(known: Sequence[str] | set[str]) -> str:
    names = sorted(filter(None, known))
    return " or ".join(names) if names else "another one"
