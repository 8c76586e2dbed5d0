"""`jobsync enqueue`: pushes messages to a queue, from an argument or from standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobsync.cli.options import ask_database, json_option, url_option
from jobsync.cli.render import show_rows
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["enqueue"]

_SHOWN = 20
"""How many ids people are shown."""


@click.command()
@click.argument("queue", metavar="[NAMESPACE/]RESOURCE", envvar="JOBSYNC_QUEUE")
@click.argument("data", required=False)
@click.option(
    "--delay",
    type=click.FloatRange(min=0),
    default=0.0,
    envvar="JOBSYNC_DELAY",
    show_envvar=True,
    help="Seconds before which nobody handles them.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    envvar="JOBSYNC_TIMEOUT",
    show_envvar=True,
    help="Seconds that a handler may take; the queue's own by default.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    envvar="JOBSYNC_QUEUE_MAX_ATTEMPTS",
    show_envvar=True,
    help="How often each is tried; 4 by default.",
)
@url_option
@json_option
def enqueue(
    queue: str,
    data: str | None,
    delay: float,
    timeout: float | None,
    max_attempts: int | None,
    url: str | None,
    *,
    as_json: bool,
) -> None:
    """Push messages to a queue, and print their ids.

    DATA is an object as JSON, or a list of them. Without it, standard input is read: an object
    a line. All must be right, or nothing is pushed.

    \b
        jobsync enqueue emails '{"to": "user@example.com"}' --delay 60
        jobsync enqueue emails < emails.jsonl
    """  # noqa: D301 - the sign keeps the lines below it as they are
    from jobsync.queue.enqueue import enqueue_messages

    messages = list(_read_lines() if data is None else _read(data, "DATA"))

    async def push(database: Database) -> list[str]:
        return await enqueue_messages(
            database, queue, messages, delay=delay, timeout=timeout, max_attempts=max_attempts
        )

    ids = ask_database(url, push)
    shown = ids[:_SHOWN] if sys.stdout.isatty() and not as_json else ids
    show_rows(["id"], [{"id": name} for name in shown], as_json=as_json)
    if left := len(ids) - len(shown):
        click.echo(f"… and {left} more")


def _read_lines() -> Iterator[dict[str, Any]]:
    if sys.stdin.isatty():
        click.echo("Reading messages, an object a line; end with Ctrl-D.", err=True)
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield from _read(line, f"line {number}")


def _read(text: str, where: str) -> list[dict[str, Any]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, Any] | list[dict[str, Any]])
    except msgspec.DecodeError as error:
        shown = text.strip()
        fix = 'give an object: {"to": "user@example.com"}'
        raise Invalid(where, shown, f"is no message ({error})", fix) from None
    return found if isinstance(found, list) else [found]
