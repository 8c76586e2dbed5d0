"""Options and types of options that several commands share, exit codes, and access to the store.

A command exits with 0 if all is well.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jobsync.errors import Invalid, Misconfigured, NotFound, closest_name

if TYPE_CHECKING:
    import datetime as dt

    from jobsync.components import Components
    from jobsync.core.urls import StoreUrl
    from jobsync.database.database import Database
    from jobsync.setting_fields import Origin
    from jobsync.stores.contract import Store

    _FloatType = click.ParamType[float]
else:
    # Not generic in older releases of click.
    _FloatType = click.ParamType

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "UNHEALTHY",
    "USAGE",
    "DurationType",
    "SuggestingGroup",
    "WholeNumberType",
    "after_option",
    "appname_option",
    "check_file",
    "chosen_app",
    "date_option",
    "describe_origin",
    "describe_target",
    "find_missing_file",
    "json_option",
    "limit_option",
    "now",
    "option",
    "parse_seconds",
    "reason_option",
    "run_on_database",
    "run_on_store",
    "url_argument",
    "url_option",
    "yes_option",
]

FAILED = 1
USAGE = 2
"""Wrong usage: nothing was done."""
UNHEALTHY = 3
"""The command succeeded and found something unhealthy."""
INTERRUPTED = 130
"""Ended by Ctrl-C, as shells report it."""

option = partial(click.option, show_envvar=True)
"""Adds an option that an environment variable sets too."""

T = TypeVar("T")

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TYPED = click.core.ParameterSource.COMMANDLINE
_ENVIRONMENT = click.core.ParameterSource.ENVIRONMENT
_split_duration = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(ms|s|m|h|d|)").fullmatch
_Command = TypeVar("_Command", bound=Callable[..., Any])


class WholeNumberType(click.IntRange):
    """A whole number within bounds, which an error names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail with the bounds."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            bounds = (
                f"of {self.min} or more" if self.max is None else f"from {self.min} to {self.max}"
            )
            self.fail(f"{value!r} is not accepted: pass a whole number {bounds}.", param, ctx)


json_option = option("--json", "as_json", is_flag=True, envvar="JOBSYNC_JSON", help="Print JSON.")
limit_option = option(
    "--limit",
    default=20,
    envvar="JOBSYNC_LIMIT",
    show_default=True,
    type=WholeNumberType(1, 10_000),
    help="Maximum number of rows.",
)
reason_option = option("--reason", default="", envvar="JOBSYNC_REASON", help="Reason, for people.")
yes_option = click.option(
    # Not by a variable, which could be set once and disarm every later purge.
    "--yes",
    is_flag=True,
    allow_from_autoenv=False,
    help="Remove without asking.",
)
appname_option = option(
    "--appname",
    envvar=["JOBSYNC_APPNAME", "SYNC_SQL_APPNAME"],
    default="sync_",
    show_default=True,
    help="Name of the fleet that shares tasks: the appname in its configuration.",
)


def url_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url and --app, which both name the store; the command gets its `url`."""
    return _app_option(option("--url", envvar="JOBSYNC_URL", help="URL of the store.")(command))


def url_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument URL, --url and --app, which name the store; the command gets its `url`."""
    return click.argument("argument", metavar="[URL]", required=False)(url_option(command))


def _app_option(command: Callable[..., Any]) -> Callable[..., Any]:
    @option(
        "--app",
        metavar="MODULE:NAME",
        envvar="JOBSYNC_APP",
        help="The Database of a program, whose store is used instead of a URL.",
    )
    @wraps(command)
    def run(
        *args: Any, url: str | None, app: str | None, argument: str | None = None, **kwargs: Any
    ) -> Any:
        if argument is not None:
            context = click.get_current_context()
            if _is_typed(context, "url"):
                problem = "must not be passed with --url"
                raise Invalid("URL", argument, problem, "pass one of the two")
            context.set_parameter_source("url", _TYPED)
            url = argument
        return command(*args, url=_choose_url(url, app), **kwargs)

    return run


def _choose_url(url: str | None, app: str | None) -> str | None:
    """Return the URL that was passed, or that of a program's database.

    What was typed wins over what the environment says, and the program over `JOBSYNC_URL`, as it
    does when it works.

    Raises:
        Invalid: both were typed.
    """
    if app is None:
        return url
    context = click.get_current_context()
    typed = {name for name in ("url", "app") if _is_typed(context, name)}
    if typed == {"url", "app"}:
        raise Invalid("--app", app, "must not be passed with a URL", "pass one of the two")
    if typed == {"url"}:
        return url
    if ":" not in app:
        fix = "write it as in app:db; for the name of a fleet, pass --appname"
        raise Invalid("--app", app, "is not module:name", fix)
    from jobsync.cli.target import find_url

    return find_url(app, "--app")


def chosen_app() -> str | None:
    """Return the program whose database this command uses; None if a URL was passed."""
    context = click.get_current_context(silent=True)
    if context is None or (_is_typed(context, "url") and not _is_typed(context, "app")):
        return None
    return context.params.get("app")


def describe_target(url: str | None) -> tuple[StoreUrl, str]:
    """Return the store of a command, and for people where its URL comes from.

    Raises:
        Invalid, Misconfigured: the URL is wrong.
    """
    from jobsync.stores.opening import resolve_url

    parsed, origin = resolve_url(url)
    if origin.kind != "code":
        return parsed, describe_origin(origin)
    app, context = chosen_app(), click.get_current_context(silent=True)
    if app is not None:
        return parsed, f"from the code of {app}"
    if context is not None and context.get_parameter_source("url") is _ENVIRONMENT:
        return parsed, "from JOBSYNC_URL"
    return parsed, "from the command line"


def describe_origin(origin: Origin) -> str:
    """Return for people where the URL of a store comes from."""
    match origin.kind:
        case "code":
            return "from the code"
        case "default":
            return "by default; JOBSYNC_URL names another"
    return f"from {origin.where}"


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is _TYPED


class DurationType(_FloatType):
    """DurationType, or a number and its unit: 90, 1.5h, 5m, 500ms.

    Args:
        least: the smallest number that is accepted.
        is_least_allowed: whether that number itself is.
    """

    name = "duration"

    def __init__(self, least: float = 0.0, *, is_least_allowed: bool = True) -> None:
        self._least = least
        self._is_least_allowed = is_least_allowed

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds; fail with an example."""
        seconds = value if isinstance(value, int | float) else parse_seconds(value)
        if seconds is None:
            self.fail(f"{value!r} is not a duration: write 90, 5m, 1.5h or 2d.", param, ctx)
        if seconds < self._least or (seconds == self._least and not self._is_least_allowed):
            bound = f"{self._least:g} s or more" if self._is_least_allowed else "more than 0 s"
            self.fail(f"{value} is too short: it must be {bound}.", param, ctx)
        return float(seconds)


def parse_seconds(text: str) -> float | None:
    """Return a duration such as 90, 5m or 1.5h in seconds; None if it is not one."""
    found = _split_duration(text.strip())
    return None if found is None else float(found[1]) * _UNITS[found[2]]


class SuggestingGroup(click.Group):
    """A group that suggests the command that a mistyped name most likely means."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names.

        Raises:
            click.UsageError: there is none.
        """
        name, known = args[0], self.list_commands(ctx)
        if not ctx.resilient_parsing and name not in known and not name.startswith("-"):
            hint = closest_name(name, known)
            rest = f"Did you mean {hint!r}?" if hint else f"Known: {', '.join(known)}."
            ctx.fail(f"No such command {name!r}. {rest}")
        return super().resolve_command(ctx, args)


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


def find_missing_file(url: StoreUrl) -> str:
    """Return the path of a SQLite file that does not exist; else nothing.

    A command must not create it: the URL is probably wrong.
    """
    from jobsync.core.urls import SqliteUrl

    if isinstance(url, SqliteUrl) and not Path(url.path).exists():
        return url.path
    return ""


def check_file(url: StoreUrl, origin: str) -> None:
    """Check that a SQLite file exists.

    Raises:
        Misconfigured: it does not.
    """
    if find_missing_file(url):
        fix = "pass the URL of the file that the fleet uses"
        error = Misconfigured("url", str(url), "refers to a missing file", fix)
        error.add_note(f"Looked for {url} ({origin}).")
        raise error


def run_on_store(url: str | None, work: Callable[[Store, Components], Awaitable[T]]) -> T:
    """Open an existing store, run a coroutine function on it and close it.

    What is not found, and an answer that is empty, are reported with the store: it may be another
    one than the user means.

    Raises:
        Misconfigured: the SQLite file does not exist.
    """
    import asyncio

    from jobsync.cli.render import name_store
    from jobsync.components import Components
    from jobsync.stores.opening import open_store

    parsed, origin = describe_target(url)
    check_file(parsed, origin)
    name_store(f"{parsed} ({origin})")

    async def run() -> T:
        components = Components.system()
        store = await open_store(url, components)
        try:
            return await work(store, components)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except NotFound as error:
        error.add_note(f"Looked in {parsed} ({origin}).")
        raise


def run_on_database(url: str | None, work: Callable[[Database], Awaitable[T]]) -> T:
    """Open an existing store as a database and run a coroutine function on it."""
    from jobsync.database.database import Database

    async def run(store: Store, components: Components) -> T:
        async with Database(connection=store, components=components) as database:
            return await work(database)

    return run_on_store(url, run)
