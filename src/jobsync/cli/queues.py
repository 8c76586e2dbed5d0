"""`jobsync queues`: inspect and operate queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.messages import confirm, run_on_queue
from jobsync.cli.options import (
    SuggestingGroup,
    after_option,
    json_option,
    limit_option,
    now,
    option,
    reason_option,
    run_on_store,
    url_option,
    yes_option,
)
from jobsync.cli.render import Column, Table, ago, format_ages, show_rows, show_tables
from jobsync.core.messages import FINISHED, LIVE, MessageState
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.queue.backend import MessageInfo, QueueBackend
    from jobsync.status.queues import QueueStatus
    from jobsync.stores.contract import Store

__all__ = ["queues"]

_STATES: tuple[MessageState, ...] = (*LIVE, *FINISHED)
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


@click.group(cls=SuggestingGroup)
def queues() -> None:
    """Show queues and their messages; pause, resume, purge and redrive queues.

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
    "states",
    type=click.Choice(_STATES),
    multiple=True,
    default=LIVE,
    envvar="JOBSYNC_STATE",
    show_default=True,
    help="State of the messages; repeat it for several states. Those that failed have an error.",
)
@limit_option
@after_option("Continue after the message with this cursor, as shown by --json; needs one --state.")
@url_option
@json_option
def browse(
    url: str | None,
    queue: str,
    states: tuple[MessageState, ...],
    limit: int,
    after: str,
    *,
    as_json: bool,
) -> None:
    """Show messages of QUEUE, oldest first; by default all that are not finished."""
    if after and len(states) > 1:
        raise Invalid("--after", after, "is the cursor of one state", "pass one --state")

    async def read(backend: QueueBackend) -> list[MessageInfo]:
        found = [await backend.browse(state, after=after, limit=limit) for state in states]
        messages = [message for page in found for message in page]
        # The store's own order is that of the cursors.
        return messages if len(states) == 1 else sorted(messages, key=lambda each: each.enqueued)

    _, messages = run_on_queue(url, queue, read)
    messages = messages[:limit]
    if as_json:
        show_rows((), [msgspec.to_builtins(message) for message in messages], as_json=True)
    else:
        show_rows(_message_columns(states), [_describe(each) for each in messages], as_json=False)


@queues.command()
@queue_argument
@reason_option
@url_option
@json_option
def pause(url: str | None, queue: str, reason: str, *, as_json: bool) -> None:
    """Stop all workers from claiming from QUEUE until it is resumed.

    Applies to every process, including those that start later. Running handlers continue.
    """
    name, is_new = run_on_queue(url, queue, lambda backend: backend.pause(reason))
    _show_change(name, "paused" if is_new else "already paused", as_json=as_json)


@queues.command()
@queue_argument
@url_option
@json_option
def resume(url: str | None, queue: str, *, as_json: bool) -> None:
    """Allow workers to claim from QUEUE again."""
    name, was_paused = run_on_queue(url, queue, lambda backend: backend.resume())
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
@yes_option
@url_option
@json_option
def purge(
    url: str | None, queue: str, states: tuple[MessageState, ...], *, yes: bool, as_json: bool
) -> None:
    """Remove messages from QUEUE permanently.

    Shows their number and asks for confirmation first. Claimed messages are not removed.
    """
    name, counts = run_on_queue(url, queue, lambda backend: backend.count())
    found = sum(counts.get(state, 0) for state in states)
    if found and not yes:
        confirm(f"Remove {found} messages of {name} ({', '.join(states)}) permanently?")
    _, removed = run_on_queue(url, name, lambda backend: backend.purge(states))
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
    name, count = run_on_queue(url, queue, lambda backend: backend.redrive(ids or None))
    _show_change(name, "redriven", messages=count, as_json=as_json)


def _read_queues(url: str | None) -> list[QueueStatus]:
    from jobsync.status.queues import read_queues_status

    async def read(store: Store, components: Components) -> list[QueueStatus]:
        return (await read_queues_status(store, components)).queues()

    return run_on_store(url, read)


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


def _message_columns(states: Sequence[MessageState]) -> list[Column | str]:
    """Return the columns that have values for messages in these states."""
    shown = {*states}
    times = {"ready": "enqueued", "waiting": "due", "blocked": "enqueued", "claimed": "claimed"}
    time = times.get(states[0], "finished") if len(shown) == 1 else "enqueued"
    columns: list[Column | str] = ["id"]
    if len(shown) > 1:
        columns.append("state")
    columns += [Column("attempts", spare=True), Column(time, format_ages(now()))]
    if shown == {"blocked"}:
        columns.append("group")
    if shown <= {"claimed", *FINISHED}:
        columns.append(Column("session", spare=True))
    if shown != {"completed"}:
        columns.append(Column("value", _show_value, long=True))
    if not shown <= {"ready", "blocked", "completed"}:
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


def _show_change(queue: str, what: str, *, as_json: bool, **numbers: int) -> None:
    row = {"queue": queue, "what": what, **numbers}
    show_rows(list(row), [row], as_json=as_json)
