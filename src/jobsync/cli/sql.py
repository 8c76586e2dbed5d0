"""`jobsync sql`: a shell on the SQL views of a fleet."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from jobsync.cli.options import (
    appname_option,
    check_file,
    describe_target,
    json_option,
    option,
    url_argument,
)
from jobsync.cli.render import show_rows
from jobsync.errors import Invalid

if TYPE_CHECKING:
    from jobsync.core.urls import StoreUrl
    from jobsync.events import Event
    from jobsync.jobs.sql_views import SqlViews

__all__ = ["sql"]

_DISCARD = "\0"
"""Yielded in place of a line when the user discards what was typed."""
_WORDS = ("quit", "exit", "help")
_HELP = r"""
End a statement with a semicolon.  \d lists the views, \q quits, \? shows this help.
"""


class _Statement(click.types.StringParamType):
    """A statement. In an environment variable, semicolons separate several."""

    envvar_list_splitter = ";"


@click.command()
@url_argument
@option(
    "-c",
    "--command",
    "statements",
    type=_Statement(),
    multiple=True,
    envvar="JOBSYNC_COMMAND",
    help="Run this statement instead of a shell.",
)
@appname_option
@json_option
def sql(url: str | None, *, statements: Sequence[str], appname: str, as_json: bool) -> None:
    """Open a SQL shell on the database at URL, PostgreSQL or SQLite.

    Each statement is a transaction. Times are local on PostgreSQL and UTC on SQLite. Rows are
    shown as a table on a terminal and tab-separated in a pipe.
    """
    parsed, origin = describe_target(url)
    check_file(parsed, origin)
    with _open_shell(parsed, appname, as_json=as_json) as shell:
        if statements:
            shell.run_all(statements)
        elif sys.stdin.isatty():
            shell.run_interactively()
        else:
            shell.run_all(_split(sys.stdin))


@contextmanager
def _open_shell(url: StoreUrl, appname: str, *, as_json: bool) -> Iterator[_Shell]:
    """Open a shell on the views of a fleet; create the views if they are missing."""
    from jobsync.components import Components
    from jobsync.jobs.coordination_config import CoordinationConfig
    from jobsync.jobs.job_keys import JobKeys
    from jobsync.jobs.sql_views import SqlViews

    components = Components.system()
    components.events.on("jobs:views-missing", _warn)
    views = SqlViews(url, JobKeys(CoordinationConfig(appname=appname).appname), components)
    try:
        views.install("")
        yield _Shell(views, as_json=as_json)
    finally:
        views.close()


def _warn(event: Event) -> None:
    reason, fix = event["reason"], event["fix"]
    click.echo(f"jobsync: the views are missing or outdated: {reason}; {fix}", err=True)


class _Shell:
    """Runs statements and shows their rows.

    Args:
        views: the views, with a connection to their database.
        as_json: whether to show rows as JSON.
    """

    def __init__(self, views: SqlViews, *, as_json: bool) -> None:
        self._views = views
        self._as_json = as_json

    def run(self, statement: str) -> None:
        """Run a statement; show its rows, or the number of rows that it changed.

        Raises:
            Invalid: the database rejects it.
        """
        try:
            cursor = self._views.connection.execute(statement)
            if cursor.description is None:
                click.echo(_summarise(cursor), err=True)
                return
            columns = _make_unique([column[0] for column in cursor.description])
            rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        except Exception as error:
            # The drivers share no exception class, and one of them may not be installed.
            if not _is_driver_error(error):
                raise
            problem = f"was rejected: {str(error).strip()}"
            raise Invalid("statement", statement, problem, "correct it") from None
        shown = rows if self._as_json else [_without_null(row) for row in rows]
        show_rows(columns, shown, as_json=self._as_json)
        if sys.stdout.isatty():
            click.echo(f"({len(rows)} row{'' if len(rows) == 1 else 's'})")

    def run_all(self, statements: Iterable[str]) -> None:
        """Run statements in order."""
        for statement in statements:
            self.run(statement)

    def run_interactively(self) -> None:
        """Read statements from a terminal and run them until the user quits."""
        click.echo(_HELP.strip())
        for statement in _split(_read_lines()):
            match statement.strip().rstrip(";"):
                case r"\q" | "quit" | "exit":
                    return
                case r"\?" | "help":
                    click.echo(_HELP.strip())
                case r"\d":
                    click.echo("\n".join(sorted(self._views.views)))
                case _:
                    try:
                        self.run(statement)
                    except Invalid as error:
                        click.echo(f"{error.field} {error.problem}", err=True)


def _read_lines() -> Iterator[str]:
    # Adds line editing where Python was built with it.
    with suppress(ImportError):
        import_module("readline")
    while True:
        try:
            yield f"{input('jobsync=> ')}\n"
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            yield _DISCARD


def _split(lines: Iterable[str]) -> Iterator[str]:
    """Yield the statements of a text. A semicolon ends a statement, a newline ends a command."""
    pending = ""
    for line in lines:
        if line == _DISCARD:
            pending = ""
        elif not pending.strip() and (line.startswith("\\") or line.strip() in _WORDS):
            yield line
        else:
            *complete, pending = _split_complete(pending + line)
            yield from complete
    if pending.strip():
        yield pending


def _split_complete(text: str) -> list[str]:
    """Return the complete statements at the start of a text, and the rest."""
    import sqlite3

    found, start = [], 0
    for end, character in enumerate(text, 1):
        # Semicolons within quotes or comments end nothing.
        if character == ";" and sqlite3.complete_statement(text[start:end]):
            found.append(text[start:end])
            start = end
    return [*found, text[start:]]


def _summarise(cursor: Any) -> str:
    """Return what a statement without rows has done."""
    message = getattr(cursor, "statusmessage", None)
    return str(message or ("done" if cursor.rowcount < 0 else f"{cursor.rowcount} rows"))


def _make_unique(names: Sequence[str]) -> list[str]:
    """Return the names with numbers appended to duplicates."""
    found: dict[str, None] = {}
    for name in names:
        number = 1
        while (unique := name if number == 1 else f"{name}_{number}") in found:
            number += 1
        found[unique] = None
    return list(found)


def _without_null(row: Mapping[str, object]) -> dict[str, object]:
    return {name: "" if value is None else value for name, value in row.items()}


def _is_driver_error(error: Exception) -> bool:
    import sqlite3

    return isinstance(error, sqlite3.Error) or type(error).__module__.startswith("psycopg")
