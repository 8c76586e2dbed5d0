"""`jobsync enqueue` and `jobsync messages`: push messages; cancel, delete or hurry one.

Has also what the commands of queues share.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from jobsync.cli.options import (
    FAILED,
    DurationType,
    SuggestingGroup,
    WholeNumberType,
    chosen_app,
    json_option,
    option,
    run_on_database,
    run_on_store,
    url_option,
    yes_option,
)
from jobsync.cli.render import show_rows
from jobsync.errors import Invalid, NotFound

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.database.enqueue_calls import EnqueueOptions
    from jobsync.queue.backend import QueueBackend
    from jobsync.stores.contract import Store

__all__ = ["confirm", "enqueue", "messages", "run_on_queue"]

T = TypeVar("T")

_SHOWN = 20
"""How many ids are shown on a terminal."""

id_argument = click.argument("message_id", metavar="ID")
queue_option = option(
    "--queue",
    envvar="JOBSYNC_QUEUE",
    help="Name of its queue; by default it is looked for in all of them.",
)


@click.group(cls=SuggestingGroup)
def messages() -> None:
    """Cancel or delete one message, or let it run now.

    ID is what `jobsync enqueue` has printed, and `jobsync queues browse` shows. `jobsync why ID`
    shows the message, and what it waits for.
    """


@messages.command()
@id_argument
@queue_option
@url_option
@json_option
def cancel(url: str | None, queue: str | None, message_id: str, *, as_json: bool) -> None:
    """Cancel the message ID, so that nobody handles it.

    If it is claimed, its claim ends: its handler hears of it at the next renewal at the latest.
    Cancelled messages are kept; redrive them by their ID.
    """
    name = queue or _find_queue(url, message_id)
    name, ended = run_on_queue(url, name, lambda backend: backend.cancel(message_id))
    what = "not cancelled: unknown or finished" if ended is None else "cancelled"
    _show_change(name, message_id, what, as_json=as_json, is_done=ended is not None)


@messages.command()
@id_argument
@queue_option
@yes_option
@url_option
@json_option
def delete(
    url: str | None, queue: str | None, message_id: str, *, yes: bool, as_json: bool
) -> None:
    """Remove the message ID permanently, unless it is claimed.

    Asks for confirmation first.
    """
    name = queue or _find_queue(url, message_id)
    if not yes:
        confirm(f"Remove message {message_id} of {name} permanently?")
    name, answer = run_on_queue(url, name, lambda backend: backend.delete(message_id))
    if answer == "claimed":
        problem = "cannot be deleted while it is claimed"
        fix = f"run: jobsync messages cancel {message_id}"
        raise Invalid("ID", message_id, problem, fix)
    what = "deleted" if answer == "deleted" else "not deleted: unknown"
    _show_change(name, message_id, what, as_json=as_json, is_done=answer == "deleted")


@messages.command("run-now")
@id_argument
@queue_option
@url_option
@json_option
def run_now(url: str | None, queue: str | None, message_id: str, *, as_json: bool) -> None:
    """End the delay of the message ID, or its pause after a failure."""
    name = queue or _find_queue(url, message_id)
    name, has_changed = run_on_queue(url, name, lambda backend: backend.run_now(message_id))
    what = "due now" if has_changed else "unchanged: it does not wait"
    _show_change(name, message_id, what, as_json=as_json, is_done=has_changed)


@click.command()
@click.argument("queue", metavar="[NAMESPACE/]RESOURCE", envvar="JOBSYNC_QUEUE")
@click.argument("data", required=False)
@option(
    "--delay",
    type=DurationType(),
    default=0.0,
    envvar="JOBSYNC_DELAY",
    help="How long to wait before the messages may be handled, such as 90 or 5m.",
)
@option(
    "--timeout",
    type=DurationType(is_least_allowed=False),
    envvar="JOBSYNC_TIMEOUT",
    help="How long a handler may take, such as 90 or 5m; by default, the setting of the queue.",
)
@option(
    "--max-attempts",
    type=WholeNumberType(1),
    envvar="JOBSYNC_QUEUE_MAX_ATTEMPTS",
    help="Maximum number of attempts for each message; 4 by default.",
)
@option(
    "--priority",
    type=WholeNumberType(-100, 100),
    envvar="JOBSYNC_PRIORITY",
    help="Higher ones go first, in a queue whose order is by priority; 0 by default.",
)
@option(
    "--group",
    envvar="JOBSYNC_GROUP",
    help="Group of the messages, which are handled one at a time and in order.",
)
@option(
    "--key",
    envvar="JOBSYNC_KEY",
    help="Key of the message: nothing is pushed while another message holds it, and the id of that "
    "message is printed.",
)
@option(
    "--task",
    envvar="JOBSYNC_TASK",
    help="Name of the task that handles the messages, which are its arguments by name.",
)
@url_option
@json_option
def enqueue(
    queue: str,
    data: str | None,
    delay: float,
    timeout: float | None,
    max_attempts: int | None,
    priority: int | None,
    group: str | None,
    key: str | None,
    task: str | None,
    url: str | None,
    *,
    as_json: bool,
) -> None:
    """Push messages to a queue and print their ids; in a pipe, one per line and nothing else.

    DATA is a JSON object or a list of them. Without DATA, standard input is read, one JSON object
    per line. If one of them is invalid, nothing is pushed.

    With --app, the program checks the messages and the arguments of tasks as its own code does, and
    the options of the task apply. A task may be named without its module, and needs no RESOURCE.

    \b
        jobsync enqueue emails '{"to": "user@example.com"}' --delay 5m
        jobsync enqueue --app app:db --task send '{"to": "user@example.com"}'
        jobsync enqueue emails < emails.jsonl
    """  # noqa: D301 - \b keeps click from wrapping the lines below it
    if data is None and queue.startswith(("{", "[")):
        if task is None or chosen_app() is None:
            fix = "write its name before DATA, or pass --app and --task"
            raise Invalid("RESOURCE", "…", "is missing: the queue of the messages", fix)
        queue, data = "", queue
    new = list(_read_lines() if data is None else _parse(data, "DATA"))
    choices = {
        "delay": delay or None,
        "timeout": timeout,
        "max_attempts": max_attempts,
        "priority": priority,
        "group": group,
        "key": key,
        "task": task,
    }
    given = {name: value for name, value in choices.items() if value is not None}
    options = cast("EnqueueOptions", given)
    if not new:
        source = "standard input" if data is None else "DATA"
        fix = "pipe JSON objects to the command, one per line, or pass them as DATA"
        raise Invalid(source, data or "", "has no message", fix)
    ids = _push(url, queue, new, options)
    if as_json:
        show_rows((), [{"id": name} for name in ids], as_json=True)
        return
    # In a pipe, so that a script can use them as they are.
    shown = ids[:_SHOWN] if sys.stdout.isatty() else ids
    click.echo("\n".join(shown))
    if hidden := len(ids) - len(shown):
        click.echo(f"… and {hidden} more")


def _push(
    url: str | None, queue: str, new: list[dict[str, Any]], options: EnqueueOptions
) -> list[str]:
    """Push messages, checked by the program if there is one; return their ids."""
    app = chosen_app()
    if app is not None:
        from jobsync.cli.program_enqueue import enqueue_by_program

        return enqueue_by_program(app, queue, new, options)
    from jobsync.queue.enqueue import enqueue_messages

    return run_on_database(url, lambda database: enqueue_messages(database, queue, new, **options))


def _read_lines() -> Iterator[dict[str, Any]]:
    if sys.stdin.isatty():
        click.echo("Reading messages, one JSON object per line; end with Ctrl-D.", err=True)
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield from _parse(line, f"line {number}")


def _parse(text: str, source: str) -> list[dict[str, Any]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, Any] | list[dict[str, Any]])
    except msgspec.DecodeError as error:
        fix = 'pass a JSON object such as {"to": "user@example.com"}'
        raise Invalid(source, text.strip(), f"is not a message: {error}", fix) from None
    return found if isinstance(found, list) else [found]


def _find_queue(url: str | None, message_id: str) -> str:
    """Return the name of the queue that has a message.

    Raises:
        NotFound: none has.
    """
    from jobsync.status.queues import read_queues_status

    async def read(store: Store, components: Components) -> str:
        found = await (await read_queues_status(store, components)).message(message_id)
        if found is None:
            raise NotFound("message", message_id)
        return found.queue.name

    return run_on_store(url, read)


def run_on_queue(
    url: str | None, queue: str, work: Callable[[QueueBackend], Awaitable[T]]
) -> tuple[str, T]:
    """Run a coroutine function on an existing queue; return its full name, and the result."""
    from jobsync.queue.opening import open_backend
    from jobsync.status.queues import read_queues_status

    async def run(store: Store, components: Components) -> tuple[str, T]:
        status = (await read_queues_status(store, components)).queue(queue)
        return status.name, await work(open_backend(store, status.name, components))

    return run_on_store(url, run)


def confirm(question: str) -> None:
    """Ask for confirmation; abort unless it is given.

    Raises:
        Invalid: standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        problem = "is required if standard input is not a terminal"
        raise Invalid("--yes", False, problem, "pass --yes to remove the messages")
    click.confirm(question, abort=True, err=True)


def _show_change(queue: str, message_id: str, what: str, *, as_json: bool, is_done: bool) -> None:
    """Print what became of a message; exit with an error if nothing was done."""
    row = {"queue": queue, "id": message_id, "what": what}
    show_rows(list(row), [row], as_json=as_json)
    raise SystemExit(0 if is_done else FAILED)
