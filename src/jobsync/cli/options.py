"""How commands that only look get at a store, and what they all take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
    "app_option",
    "ask",
    "ask_database",
    "date_option",
    "json_option",
    "limit_option",
    "now",
    "url_option",
]


T = TypeVar("T")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def url_option(command: _Command) -> _Command:
    """Take the store's URL."""
    return click.option(
        "--url", envvar="JOBSYNC_URL", show_envvar=True, help="Which store; see the docs."
    )(command)


def json_option(command: _Command) -> _Command:
    """Take --json."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        envvar="JOBSYNC_JSON",
        show_envvar=True,
        help="Print JSON.",
    )(command)


def limit_option(command: _Command) -> _Command:
    """Take how many rows are shown."""
    return click.option(
        "--limit",
        default=20,
        envvar="JOBSYNC_LIMIT",
        show_envvar=True,
        show_default=True,
        type=click.IntRange(1, 10_000),
        help="The most rows.",
    )(command)


def app_option(command: _Command) -> _Command:
    """Take the name under which nodes share tasks."""
    return click.option(
        "--app",
        "--appname",
        "app",
        envvar=["JOBSYNC_APP", "SYNC_SQL_APPNAME"],
        default="sync_",
        show_default=True,
        show_envvar=True,
        help="The fleet: the appname of its configuration.",
    )(command)


def date_option(command: _Command) -> _Command:
    """Take a date; today in this process's zone by default."""
    return click.option(
        "--date",
        "day",
        type=click.DateTime(["%Y-%m-%d"]),
        callback=_read_day,
        envvar="JOBSYNC_DATE",
        show_envvar=True,
        help="Which date's tasks; today by default.",
    )(command)


def _read_day(_: click.Context, __: click.Parameter, day: dt.datetime | None) -> dt.date:
    from jobsync.components import Components
    from jobsync.jobs.task import read_date

    return read_date(day, Components.system())


def now() -> float:
    """Give the present moment, in Unix seconds."""
    from jobsync.components import Components

    return Components.system().clock.wall().seconds


def ask(url: str | None, question: Callable[[Store, Components], Awaitable[T]]) -> T:
    """Put a question to a store that is there.

    Raises:
        Misconfigured: there is none.
    """
    import asyncio

    from jobsync.components import Components
    from jobsync.core.urls import SqliteUrl
    from jobsync.stores.opening import open_store, read_url

    found = read_url(url)
    if isinstance(found, SqliteUrl) and not Path(found.path).exists():
        # To look must not make a file.
        raise Misconfigured(
            "url", str(found), "there is no such file", "name the file that the fleet uses"
        )

    async def put() -> T:
        components = Components.system()
        store = await open_store(url, components)
        try:
            return await question(store, components)
        finally:
            await store.close()

    return asyncio.run(put())


def ask_database(url: str | None, question: Callable[[Database], Awaitable[T]]) -> T:
    """Put a question about resources."""
    from jobsync.database.database import Database

    async def put(store: Store, components: Components) -> T:
        async with Database(connection=store, components=components) as database:
            return await question(database)

    return ask(url, put)


# What a command's exit tells whoever called it; 0 means that all is well.


FAILED = 1
USAGE = 2
"""Wrong usage: nothing was done."""
UNHEALTHY = 3
"""The command did its work, and what it looked at is not well."""
