"""`jobsync queues`: what is in queues, who works on them, and how to steer them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from jobsync.cli.options import ask, json_option, limit_option, now, url_option
from jobsync.cli.render import Column, Table, ages, ago, show_rows, show_tables
from jobsync.core.messages import FINISHED, LIVE, MessageState
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.queue.backend import MessageInfo, QueueBackend
    from jobsync.status.queues import QueueStatus
    from jobsync.stores.contract import Store

__all__ = ["queues"]

T = TypeVar("T")

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


@click.group()
def queues() -> None:
    """Show queues and their messages; pause, resume and purge them.

    A QUEUE is named by its resource, or as NAMESPACE/RESOURCE.
    """


@queues.command("list")
@url_option
@json_option
def list_(url: str | None, *, as_json: bool) -> None:
    """Show the queues: what is in them, and how many work on them."""
    show_rows(_name_columns(), [_sum_up(queue) for queue in _look(url)], as_json=as_json)


@queues.command()
@click.argument("queue", envvar="JOBSYNC_QUEUE")
@url_option
@json_option
def stats(url: str | None, queue: str, *, as_json: bool) -> None:
    """Show one QUEUE: how much is in it, and who works on it."""
    from jobsync.status.queues import read_queues_status

    async def look(store: Store, components: Components) -> QueueStatus:
        return (await read_queues_status(store, components)).queue(queue)

    seen = ask(url, look)
    tables = {
        "queue": Table(_name_columns(), [_sum_up(seen)]),
        "workers": Table(_WORKERS, [msgspec.structs.asdict(each) for each in seen.workers]),
    }
    show_tables(tables, as_json=as_json)


@queues.command()
@click.argument("queue", envvar="JOBSYNC_QUEUE")
@click.option(
    "--state",
    type=click.Choice(_STATES),
    default="ready",
    envvar="JOBSYNC_STATE",
    show_envvar=True,
    show_default=True,
    help="Which messages; dead ones come with their errors.",
)
@limit_option
@click.option(
    "--after",
    default="",
    envvar="JOBSYNC_AFTER",
    show_envvar=True,
    help="Go on after the message whose cursor this is, as --json shows it.",
)
@url_option
@json_option
def browse(
    url: str | None, queue: str, state: MessageState, limit: int, after: str, *, as_json: bool
) -> None:
    """Show messages of QUEUE, the oldest first."""

    async def look(port: QueueBackend) -> list[MessageInfo]:
        return await port.browse(state, after=after, limit=limit)

    found = _ask_queue(url, queue, look)
    if as_json:
        show_rows((), [msgspec.to_builtins(kept) for kept in found], as_json=True)
    else:
        show_rows(_name_facts(state), [_describe(kept) for kept in found], as_json=False)


@queues.command()
@click.argument("queue", envvar="JOBSYNC_QUEUE")
@click.option(
    "--reason", default="", envvar="JOBSYNC_REASON", show_envvar=True, help="Why, for people."
)
@url_option
@json_option
def pause(url: str | None, queue: str, reason: str, *, as_json: bool) -> None:
    """Let nobody claim from QUEUE until it is resumed.

    Holds for all processes, those that start later too. What runs goes on.
    """

    async def change(port: QueueBackend) -> tuple[str, bool]:
        return port.queue, await port.pause(reason)

    name, is_new = _ask_queue(url, queue, change)
    _tell(name, "paused" if is_new else "paused before", as_json=as_json)


@queues.command()
@click.argument("queue", envvar="JOBSYNC_QUEUE")
@url_option
@json_option
def resume(url: str | None, queue: str, *, as_json: bool) -> None:
    """Let workers claim from QUEUE again."""

    async def change(port: QueueBackend) -> tuple[str, bool]:
        return port.queue, await port.resume()

    name, was_paused = _ask_queue(url, queue, change)
    _tell(name, "resumed" if was_paused else "not paused", as_json=as_json)


@queues.command()
@click.argument("queue", envvar="JOBSYNC_QUEUE")
@click.option(
    "--state",
    "states",
    type=click.Choice([state for state in _STATES if state != "claimed"]),
    multiple=True,
    default=("ready", "waiting"),
    envvar="JOBSYNC_STATE",
    show_envvar=True,
    show_default=True,
    help="Which messages; give it several times for several states.",
)
@click.option(
    "--yes", is_flag=True, envvar="JOBSYNC_YES", show_envvar=True, help="Remove without asking."
)
@url_option
@json_option
def purge(
    url: str | None, queue: str, states: tuple[MessageState, ...], *, yes: bool, as_json: bool
) -> None:
    """Remove messages from QUEUE for good.

    Counts them and asks first. What is in hand goes on.
    """

    async def count(port: QueueBackend) -> tuple[str, int]:
        counts = await port.count()
        return port.queue, sum(counts.get(state, 0) for state in states)

    async def remove(port: QueueBackend) -> int:
        return await port.purge(states)

    name, there = _ask_queue(url, queue, count)
    if there and not yes:
        _confirm(f"Remove {there} messages of {name} ({', '.join(states)}) for good?")
    gone = _ask_queue(url, name, remove)
    _tell(name, "purged", removed=gone, as_json=as_json)


@queues.command()
@click.argument("queue", envvar="JOBSYNC_QUEUE")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@url_option
@json_option
def redrive(url: str | None, queue: str, ids: tuple[str, ...], *, as_json: bool) -> None:
    """Give dead letters of QUEUE a new life, with all attempts.

    Those that are named by ID, or all.
    """

    async def change(port: QueueBackend) -> tuple[str, int]:
        # Once each, though some may die again meanwhile.
        most = len(ids) or (await port.count()).get("dead", 0)
        return port.queue, await port.redrive(ids or None, limit=most)

    name, count = _ask_queue(url, queue, change)
    _tell(name, "redriven", messages=count, as_json=as_json)


def _look(url: str | None) -> list[QueueStatus]:
    from jobsync.status.queues import read_queues_status

    async def look(store: Store, components: Components) -> list[QueueStatus]:
        return (await read_queues_status(store, components)).queues()

    return ask(url, look)


def _ask_queue(url: str | None, queue: str, question: Callable[[QueueBackend], Awaitable[T]]) -> T:
    """Put a question to a queue that is there."""
    from jobsync.queue.sql import open_backend
    from jobsync.status.queues import read_queues_status

    async def put(store: Store, components: Components) -> T:
        seen = (await read_queues_status(store, components)).queue(queue)
        return await question(open_backend(store, seen.name, components))

    return ask(url, put)


def _name_columns() -> tuple[Column | str, ...]:
    at = ages(now())
    return (
        "queue",
        *(Column(state) for state in ("ready", "waiting", "claimed", "dead")),
        "workers",
        Column("oldest", at),
        Column("paused", at),
        Column("reason", spare=True, long=True),
        *(Column(state, spare=True) for state in ("completed", "cancelled")),
    )


def _sum_up(queue: QueueStatus) -> dict[str, object]:
    at_work = [each for each in queue.workers if each.state == "live" and each.concurrency]
    return {
        "queue": queue.name,
        **{state: queue.counts.get(state, 0) for state in _STATES},
        "workers": len(at_work),
        "paused": None if queue.pause is None else queue.pause.since,
        "reason": None if queue.pause is None else queue.pause.reason,
        "oldest": queue.oldest,
    }


def _name_facts(state: MessageState) -> list[Column | str]:
    """Give the columns in which messages of a state have something to tell."""
    at = ages(now())
    times = {"ready": "enqueued", "waiting": "due", "claimed": "claimed"}
    facts: list[Column | str] = [
        "id",
        Column("attempts", spare=True),
        Column(times.get(state, "finished"), at),
    ]
    if state in {"claimed", *FINISHED}:
        facts.append(Column("session", spare=True))
    if state != "completed":
        facts.append(Column("value", _show_value, long=True))
    if state not in {"ready", "completed"}:
        facts.append(Column("error", long=True))
    return facts


def _show_value(value: object) -> str:
    """Show a message without its id, which stands beside it."""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if name != "id"}
    return msgspec.json.encode(value).decode()


def _describe(kept: MessageInfo) -> dict[str, object]:
    error = kept.errors[-1].error.partition("\n")[0] if kept.errors else None
    return msgspec.structs.asdict(kept) | {"error": error}


def _confirm(question: str) -> None:
    """Go on only if a person says so.

    Raises:
        Invalid: nobody is there who could.
    """
    if not sys.stdin.isatty():
        raise Invalid("--yes", False, "nobody is there to be asked", "pass --yes to remove them")
    click.confirm(question, abort=True, err=True)


def _tell(queue: str, what: str, *, as_json: bool, **numbers: int) -> None:
    row = {"queue": queue, "what": what, **numbers}
    show_rows(list(row), [row], as_json=as_json)
