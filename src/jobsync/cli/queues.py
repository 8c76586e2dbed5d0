"""`jobsync queues` and `jobsync enqueue`: inspect and operate queues, and push messages."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from jobsync.cli.options import (
    FAILED,
    after_option,
    json_option,
    limit_option,
    now,
    option,
    reason_option,
    run_on_database,
    run_on_store,
    url_option,
)
from jobsync.cli.render import Column, Table, ago, format_ages, show_rows, show_tables
from jobsync.core.messages import FINISHED, LIVE, MessageState
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.database.database import Database
    from jobsync.database.enqueue_calls import EnqueueOptions
    from jobsync.queue.backend import MessageInfo, QueueBackend
    from jobsync.status.queues import QueueStatus
    from jobsync.stores.contract import Store

__all__ = ["enqueue", "queues"]

T = TypeVar("T")

_STATES: tuple[MessageState, ...] = (*LIVE, *FINISHED)
_SHOWN = 20
"""How many ids are shown on a terminal."""
_WORKERS = (
    "worker_id",
    "state",
    "concurrency",
    "claims",
    Column("heard", ago),
    Column("is_paused", spare=True),
    Column("host", spare=True),
    Column("pid", spare=True),
)


queue_argument = click.argument("queue", envvar="JOBSYNC_QUEUE")


@click.group()
def queues() -> None:
    """Show queues and their messages; pause and purge queues; cancel, delete or hurry a message.

    The name of a QUEUE is its resource, or NAMESPACE/RESOURCE.
    """


@queues.command("list")
@url_option
@json_option
def list_(url: str | None, *, as_json: bool) -> None:
    """Show the queues, with the number of their messages and workers."""
    show_rows(_queue_columns(), [_summarise(queue) for queue in _read_queues(url)], as_json=as_json)


@queues.command()
@queue_argument
@url_option
@json_option
def stats(url: str | None, queue: str, *, as_json: bool) -> None:
    """Show one QUEUE, with the number of its messages and its workers."""
    from jobsync.status.queues import read_queues_status

    async def read(store: Store, components: Components) -> QueueStatus:
        return (await read_queues_status(store, components)).queue(queue)

    status = run_on_store(url, read)
    tables = {
        "queue": Table(_queue_columns(), [_summarise(status)]),
        "workers": Table(_WORKERS, [msgspec.structs.asdict(each) for each in status.workers]),
    }
    show_tables(tables, as_json=as_json)


@queues.command()
@queue_argument
@option(
    "--state",
    type=click.Choice(_STATES),
    default="ready",
    envvar="JOBSYNC_STATE",
    show_default=True,
    help="State of the messages; dead ones are shown with their errors.",
)
@limit_option
@after_option("Continue after the message with this cursor, as shown by --json.")
@url_option
@json_option
def browse(
    url: str | None, queue: str, state: MessageState, limit: int, after: str, *, as_json: bool
) -> None:
    """Show messages of QUEUE, oldest first."""
    _, messages = _run_on_queue(
        url, queue, lambda backend: backend.browse(state, after=after, limit=limit)
    )
    if as_json:
        show_rows((), [msgspec.to_builtins(message) for message in messages], as_json=True)
    else:
        rows = [_describe(message) for message in messages]
        show_rows(_message_columns(state), rows, as_json=False)


@queues.command()
@queue_argument
@reason_option
@url_option
@json_option
def pause(url: str | None, queue: str, reason: str, *, as_json: bool) -> None:
    """Stop all workers from claiming from QUEUE until it is resumed.

    Applies to every process, including those that start later. Running handlers continue.
    """
    name, is_new = _run_on_queue(url, queue, lambda backend: backend.pause(reason))
    _show_change(name, "paused" if is_new else "already paused", as_json=as_json)


@queues.command()
@queue_argument
@url_option
@json_option
def resume(url: str | None, queue: str, *, as_json: bool) -> None:
    """Allow workers to claim from QUEUE again."""
    name, was_paused = _run_on_queue(url, queue, lambda backend: backend.resume())
    _show_change(name, "resumed" if was_paused else "not paused", as_json=as_json)


@queues.command()
@queue_argument
@option(
    "--state",
    "states",
    type=click.Choice([state for state in _STATES if state != "claimed"]),
    multiple=True,
    default=("ready", "waiting", "blocked"),
    envvar="JOBSYNC_STATE",
    show_default=True,
    help="State of the messages; repeat it for several states.",
)
@option("--yes", is_flag=True, envvar="JOBSYNC_YES", help="Remove without asking.")
@url_option
@json_option
def purge(
    url: str | None, queue: str, states: tuple[MessageState, ...], *, yes: bool, as_json: bool
) -> None:
    """Remove messages from QUEUE permanently.

    Shows their number and asks for confirmation first. Claimed messages are not removed.
    """
    name, counts = _run_on_queue(url, queue, lambda backend: backend.count())
    found = sum(counts.get(state, 0) for state in states)
    if found and not yes:
        _confirm(f"Remove {found} messages of {name} ({', '.join(states)}) permanently?")
    _, removed = _run_on_queue(url, name, lambda backend: backend.purge(states))
    _show_change(name, "purged", removed=removed, as_json=as_json)


@queues.command()
@queue_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@url_option
@json_option
def redrive(url: str | None, queue: str, ids: tuple[str, ...], *, as_json: bool) -> None:
    """Retry dead letters of QUEUE, with all their attempts restored.

    Without an ID, all of them.
    """
    name, count = _run_on_queue(url, queue, lambda backend: backend.redrive(ids or None))
    _show_change(name, "redriven", messages=count, as_json=as_json)


id_argument = click.argument("message_id", metavar="ID")


@queues.command()
@queue_argument
@id_argument
@url_option
@json_option
def cancel(url: str | None, queue: str, message_id: str, *, as_json: bool) -> None:
    """Cancel the message ID of QUEUE, so that nobody handles it.

    If it is claimed, its claim ends: its handler hears of it at the next renewal at the latest.
    Cancelled messages are kept; redrive them by their ID.
    """
    name, ended = _run_on_queue(url, queue, lambda backend: backend.cancel(message_id))
    what = "not cancelled: unknown or finished" if ended is None else "cancelled"
    _show_message_change(name, message_id, what, as_json=as_json, is_done=ended is not None)


@queues.command()
@queue_argument
@id_argument
@option("--yes", is_flag=True, envvar="JOBSYNC_YES", help="Remove without asking.")
@url_option
@json_option
def delete(url: str | None, queue: str, message_id: str, *, yes: bool, as_json: bool) -> None:
    """Remove the message ID of QUEUE permanently, unless it is claimed.

    Asks for confirmation first.
    """
    if not yes:
        _confirm(f"Remove message {message_id} of {queue} permanently?")
    name, answer = _run_on_queue(url, queue, lambda backend: backend.delete(message_id))
    if answer == "claimed":
        problem = "cannot be deleted while it is claimed"
        fix = f"run first: jobsync queues cancel {name} {message_id}"
        raise Invalid("ID", message_id, problem, fix)
    what = "deleted" if answer == "deleted" else "not deleted: unknown"
    _show_message_change(name, message_id, what, as_json=as_json, is_done=answer == "deleted")


@queues.command("run-now")
@queue_argument
@id_argument
@url_option
@json_option
def run_now(url: str | None, queue: str, message_id: str, *, as_json: bool) -> None:
    """End the delay of the message ID of QUEUE, or its pause after a failure."""
    name, has_changed = _run_on_queue(url, queue, lambda backend: backend.run_now(message_id))
    what = "due now" if has_changed else "unchanged: it does not wait"
    _show_message_change(name, message_id, what, as_json=as_json, is_done=has_changed)


@click.command()
@click.argument("queue", metavar="[NAMESPACE/]RESOURCE", envvar="JOBSYNC_QUEUE")
@click.argument("data", required=False)
@option(
    "--delay",
    type=click.FloatRange(min=0),
    default=0.0,
    envvar="JOBSYNC_DELAY",
    help="Seconds to wait before the messages may be handled.",
)
@option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    envvar="JOBSYNC_TIMEOUT",
    help="Seconds that a handler may take; by default, the setting of the queue.",
)
@option(
    "--max-attempts",
    type=click.IntRange(1),
    envvar="JOBSYNC_QUEUE_MAX_ATTEMPTS",
    help="Maximum number of attempts for each message; 4 by default.",
)
@option(
    "--priority",
    type=click.IntRange(-100, 100),
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
    """Push messages to a queue and print their ids.

    DATA is a JSON object or a list of them. Without DATA, standard input is read, one JSON object
    per line. If one of them is invalid, nothing is pushed.

    \b
        jobsync enqueue emails '{"to": "user@example.com"}' --delay 60
        jobsync enqueue emails < emails.jsonl
    """  # noqa: D301 - \b keeps click from wrapping the lines below it
    from jobsync.queue.enqueue import enqueue_messages

    messages = list(_read_lines() if data is None else _parse(data, "DATA"))

    async def push(database: Database) -> list[str]:
        options = {"delay": delay, "timeout": timeout, "max_attempts": max_attempts}
        others = {"priority": priority, "group": group, "key": key, "task": task}
        given = options | {name: value for name, value in others.items() if value is not None}
        return await enqueue_messages(database, queue, messages, **cast("EnqueueOptions", given))

    ids = run_on_database(url, push)
    shown = ids[:_SHOWN] if sys.stdout.isatty() and not as_json else ids
    show_rows(["id"], [{"id": name} for name in shown], as_json=as_json)
    if hidden := len(ids) - len(shown):
        click.echo(f"… and {hidden} more")


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


def _read_queues(url: str | None) -> list[QueueStatus]:
    from jobsync.status.queues import read_queues_status

    async def read(store: Store, components: Components) -> list[QueueStatus]:
        return (await read_queues_status(store, components)).queues()

    return run_on_store(url, read)


def _run_on_queue(
    url: str | None, queue: str, work: Callable[[QueueBackend], Awaitable[T]]
) -> tuple[str, T]:
    """Run a coroutine function on an existing queue; return its full name, and the result."""
    from jobsync.queue.opening import open_backend
    from jobsync.status.queues import read_queues_status

    async def run(store: Store, components: Components) -> tuple[str, T]:
        status = (await read_queues_status(store, components)).queue(queue)
        return status.name, await work(open_backend(store, status.name, components))

    return run_on_store(url, run)


def _queue_columns() -> tuple[Column | str, ...]:
    age = format_ages(now())
    return (
        "queue",
        *(Column(state) for state in ("ready", "waiting", "claimed", "dead")),
        "workers",
        Column("oldest", age),
        Column("paused", age),
        Column("reason", spare=True, long=True),
        *(Column(state, spare=True) for state in ("blocked", "completed", "cancelled")),
    )


def _summarise(queue: QueueStatus) -> dict[str, object]:
    active = [each for each in queue.workers if each.state == "live" and each.concurrency]
    return {
        "queue": queue.name,
        **{state: queue.counts.get(state, 0) for state in _STATES},
        "workers": len(active),
        "paused": None if queue.pause is None else queue.pause.since,
        "reason": None if queue.pause is None else queue.pause.reason,
        "oldest": queue.oldest,
    }


def _message_columns(state: MessageState) -> list[Column | str]:
    """Return the columns that have values for messages in a state."""
    age = format_ages(now())
    times = {"ready": "enqueued", "waiting": "due", "blocked": "enqueued", "claimed": "claimed"}
    columns: list[Column | str] = [
        "id",
        Column("attempts", spare=True),
        Column(times.get(state, "finished"), age),
    ]
    if state == "blocked":
        columns.append("group")
    if state in {"claimed", *FINISHED}:
        columns.append(Column("session", spare=True))
    if state != "completed":
        columns.append(Column("value", _show_value, long=True))
    if state not in {"ready", "blocked", "completed"}:
        columns.append(Column("error", long=True))
    return columns


def _show_value(value: object) -> str:
    """Return a message as JSON without its id, which has a column of its own."""
    if isinstance(value, dict):
        value = {name: field for name, field in value.items() if name != "id"}
    return msgspec.json.encode(value).decode()


def _describe(message: MessageInfo) -> dict[str, object]:
    error = message.errors[-1].error.partition("\n")[0] if message.errors else None
    return msgspec.structs.asdict(message) | {"error": error}


def _confirm(question: str) -> None:
    """Ask for confirmation; abort unless it is given.

    Raises:
        Invalid: standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        problem = "is required if standard input is not a terminal"
        raise Invalid("--yes", False, problem, "pass --yes to remove the messages")
    click.confirm(question, abort=True, err=True)


def _show_change(queue: str, what: str, *, as_json: bool, **numbers: int) -> None:
    row = {"queue": queue, "what": what, **numbers}
    show_rows(list(row), [row], as_json=as_json)


def _show_message_change(
    queue: str, message_id: str, what: str, *, as_json: bool, is_done: bool
) -> None:
    """Print what became of a message; exit with an error if nothing was done."""
    row = {"queue": queue, "id": message_id, "what": what}
    show_rows(list(row), [row], as_json=as_json)
    raise SystemExit(0 if is_done else FAILED)
