"""Options that several commands share, exit codes, and access to the store.

A command exits with 0 if all is well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jobsync.errors import Misconfigured

if TYPE_CHECKING:
    import datetime as dt

    from jobsync.components import Components
    from jobsync.database.database import Database
    from jobsync.stores.contract import Store

__all__ = [
    "FAILED",
    "UNHEALTHY",
    "USAGE",
    "after_option",
    "app_option",
    "date_option",
    "json_option",
    "limit_option",
    "now",
    "option",
    "reason_option",
    "run_on_database",
    "run_on_store",
    "url_option",
]

FAILED = 1
USAGE = 2
"""Wrong usage: nothing was done."""
UNHEALTHY = 3
"""The command succeeded and found something unhealthy."""

option = partial(click.option, show_envvar=True)
"""Adds an option that an environment variable sets too."""

T = TypeVar("T")
_Command = TypeVar("_Command", bound=Callable[..., Any])


url_option = option("--url", envvar="JOBSYNC_URL", help="URL of the store.")
json_option = option("--json", "as_json", is_flag=True, envvar="JOBSYNC_JSON", help="Print JSON.")
limit_option = option(
    "--limit",
    default=20,
    envvar="JOBSYNC_LIMIT",
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Maximum number of rows.",
)
reason_option = option("--reason", default="", envvar="JOBSYNC_REASON", help="Reason, for people.")
app_option = option(
    "--app",
    "--appname",
    "app",
    envvar=["JOBSYNC_APP", "SYNC_SQL_APPNAME"],
    default="sync_",
    show_default=True,
    help="Name of the fleet: the appname in its configuration.",
)


def after_option(help_text: str) -> Callable[[_Command], _Command]:
    """Add --after, the cursor to continue after."""
    return option("--after", default="", envvar="JOBSYNC_AFTER", help=help_text)


def _read_day(_: click.Context, __: click.Parameter, day: dt.datetime | None) -> dt.date:
    from jobsync.components import Components
    from jobsync.jobs.task import read_date

    return read_date(day, Components.system())


date_option = option(
    "--date",
    "day",
    type=click.DateTime(["%Y-%m-%d"]),
    callback=_read_day,
    envvar="JOBSYNC_DATE",
    help="Date of the tasks; today by default.",
)


def now() -> float:
    """Return the current time in Unix seconds."""
    from jobsync.components import Components

    return Components.system().clock.wall().seconds


def run_on_store(url: str | None, work: Callable[[Store, Components], Awaitable[T]]) -> T:
    """Open an existing store, run a coroutine function on it and close it.

    Raises:
        Misconfigured: the SQLite file does not exist.
    """
    import asyncio

    from jobsync.components import Components
    from jobsync.core.urls import SqliteUrl
    from jobsync.stores.opening import open_store, read_url

    parsed = read_url(url)
    if isinstance(parsed, SqliteUrl) and not Path(parsed.path).exists():
        # A command that only reads must not create the file.
        fix = "pass the URL of the file that the fleet uses"
        raise Misconfigured("url", str(parsed), "refers to a missing file", fix)

    async def run() -> T:
        components = Components.system()
        store = await open_store(url, components)
        try:
            return await work(store, components)
        finally:
            await store.close()

    return asyncio.run(run())


def run_on_database(url: str | None, work: Callable[[Database], Awaitable[T]]) -> T:
    """Open an existing store as a database and run a coroutine function on it."""
    from jobsync.database.database import Database

    async def run(store: Store, components: Components) -> T:
        async with Database(connection=store, components=components) as database:
            return await work(database)

    return run_on_store(url, run)
