"""A shell on the views of a fleet: runs statements, shows what they give, talks to a person."""

import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from jobsync.cli.render import show_rows
from jobsync.components import Components
from jobsync.core.urls import SqliteUrl, StoreUrl
from jobsync.errors import Invalid, Misconfigured
from jobsync.events import Event
from jobsync.jobs.config import CoordinationConfig
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.sql_views import SqlViews

__all__ = ["Shell", "open_shell"]

_NEVER_MIND = "\0"
_WORDS = ("quit", "exit", "help")
_HELP = r"""
End a statement with a semicolon.  \d lists the views, \q leaves, \? shows this.
"""


@contextmanager
def open_shell(url: StoreUrl, appname: str, *, as_json: bool) -> Iterator["Shell"]:
    """Give a shell on a fleet's views, which are made if they are not there."""
    if isinstance(url, SqliteUrl) and not Path(url.path).exists():
        raise Misconfigured("url", str(url), "there is no such file", "name that of your jobs")
    components = Components.system()
    components.events.on("jobs:views-missing", _warn)
    face = SqlViews(url, JobKeys(CoordinationConfig(appname=appname).appname), components)
    try:
        face.install("")
        yield Shell(face, as_json=as_json)
    finally:
        face.close()


def _warn(event: Event) -> None:
    reason, fix = event["reason"], event["fix"]
    click.echo(f"jobsync: the views are missing or old: {reason}; {fix}", err=True)


class Shell:
    """Runs statements and shows what they give.

    Args:
        face: the views, and a connection to them.
        as_json: whether rows are shown as JSON.
    """

    def __init__(self, face: SqlViews, *, as_json: bool) -> None:
        self._face = face
        self._as_json = as_json

    def run(self, statement: str) -> None:
        """Run a statement and show its rows, or how many it changed.

        Raises:
            Invalid: the database refuses it.
        """
        try:
            cursor = self._face.connection.execute(statement)
            if cursor.description is None:
                click.echo(_summarise(cursor), err=True)
                return
            columns = _tell_apart([column[0] for column in cursor.description])
            rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        except Exception as error:
            # The drivers have no error in common, and one of them may not be installed.
            if not _is_driver_error(error):
                raise
            raise Invalid("statement", statement, str(error).strip(), "correct it") from None
        shown = rows if self._as_json else [_without_null(row) for row in rows]
        show_rows(columns, shown, as_json=self._as_json)
        if sys.stdout.isatty():
            click.echo(f"({len(rows)} row{'' if len(rows) == 1 else 's'})")

    def run_all(self, statements: Iterable[str]) -> None:
        """Run one statement after another."""
        for statement in statements:
            self.run(statement)

    def run_text(self, lines: Iterable[str]) -> None:
        """Run the statements of a text; each ends with a semicolon."""
        self.run_all(_split(lines))

    def converse(self) -> None:
        """Talk to a person until they leave."""
        click.echo(_HELP.strip())
        for statement in _split(_ask_lines()):
            match statement.strip().rstrip(";"):
                case r"\q" | "quit" | "exit":
                    return
                case r"\?" | "help":
                    click.echo(_HELP.strip())
                case r"\d":
                    click.echo("\n".join(sorted(self._face.views)))
                case _:
                    try:
                        self.run(statement)
                    except Invalid as error:
                        click.echo(error.problem, err=True)


def _ask_lines() -> Iterator[str]:
    # Lets a person edit what they write, where there is one.
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
            yield _NEVER_MIND


def _split(lines: Iterable[str]) -> Iterator[str]:
    """Give the statements of a text; each ends with a semicolon, and commands with their line."""
    pending = ""
    for line in lines:
        if line == _NEVER_MIND:
            pending = ""
        elif not pending.strip() and (line.startswith("\\") or line.strip() in _WORDS):
            yield line
        else:
            *whole, pending = _cut(pending + line)
            yield from whole
    if pending.strip():
        yield pending


def _cut(text: str) -> list[str]:
    """Give the whole statements that a text begins with, and what is left."""
    found, begun = [], 0
    for place, letter in enumerate(text, 1):
        # Not within quotes or comments.
        if letter == ";" and sqlite3.complete_statement(text[begun:place]):
            found.append(text[begun:place])
            begun = place
    return [*found, text[begun:]]


def _summarise(cursor: Any) -> str:
    """Say what a statement did that gives no rows."""
    told = getattr(cursor, "statusmessage", None)
    return str(told or ("done" if cursor.rowcount < 0 else f"{cursor.rowcount} rows"))


def _tell_apart(names: Sequence[str]) -> list[str]:
    """Give each column a name of its own."""
    found: dict[str, None] = {}
    for name in names:
        number = 1
        while (each := name if number == 1 else f"{name}_{number}") in found:
            number += 1
        found[each] = None
    return list(found)


def _without_null(row: Mapping[str, object]) -> dict[str, object]:
    return {name: "" if value is None else value for name, value in row.items()}


def _is_driver_error(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) or type(error).__module__.startswith("psycopg")
