"""`jobsync sql`: a shell on the database of a fleet, with its views."""

import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from jobsync.cli.asking import app_option, json_option
from jobsync.cli.render import show_rows
from jobsync.components import Components
from jobsync.core.urls import SqliteUrl, StoreUrl
from jobsync.errors import Invalid, Misconfigured
from jobsync.events import Event
from jobsync.jobs.config import CoordinationConfig
from jobsync.jobs.face import Face
from jobsync.jobs.places import Places
from jobsync.stores.opening import read_url

__all__ = ["sql"]

_NEVER_MIND = "\0"
_WORDS = ("quit", "exit", "help")
_HELP = r"""
End a statement with a semicolon.  \d lists the views, \q leaves, \? shows this.
"""


class _Statement(click.types.StringParamType):
    """Several stand in a variable as they would in a file."""

    envvar_list_splitter = ";"


@click.command()
@click.argument("url", required=False, envvar="JOBSYNC_URL")
@click.option(
    "-c",
    "--command",
    "statements",
    type=_Statement(),
    multiple=True,
    envvar="JOBSYNC_COMMAND",
    show_envvar=True,
    help="Run this, and no shell.",
)
@app_option
@json_option
def sql(url: str | None, *, statements: Sequence[str], app: str, as_json: bool) -> None:
    """Open a shell on the database at URL, PostgreSQL or SQLite.

    Each statement is a transaction. Times are this machine's on PostgreSQL and UTC on SQLite.
    Rows are a table on a terminal, tab-separated in a pipe.
    """
    face = _open_face(read_url(url), app)
    try:
        shell = _Shell(face.connection, face, as_json=as_json)
        if statements:
            for statement in statements:
                shell.run(statement)
        elif sys.stdin.isatty():
            shell.converse()
        else:
            for statement in _split(sys.stdin):
                shell.run(statement)
    finally:
        face.close()


def _open_face(url: StoreUrl, appname: str) -> Face:
    """Give a fleet's views, which are made if they are not there."""
    if isinstance(url, SqliteUrl) and not Path(url.path).exists():
        raise Misconfigured("url", str(url), "there is no such file", "name that of your jobs")
    components = Components.system()
    components.events.on("jobs:views-missing", _warn)
    face = Face(url, Places(CoordinationConfig(appname=appname).appname), components)
    face.install("")
    return face


def _warn(event: Event) -> None:
    reason, fix = event["reason"], event["fix"]
    click.echo(f"jobsync: the views are missing or old: {reason}; {fix}", err=True)


class _Shell:
    """Runs statements and shows what they give.

    Args:
        connection: to the database.
        face: names the views.
        as_json: whether rows are shown as JSON.
    """

    def __init__(self, connection: Any, face: Face, *, as_json: bool) -> None:
        self._connection = connection
        self._face = face
        self._as_json = as_json

    def run(self, statement: str) -> None:
        """Run a statement and show its rows, or how many it changed.

        Raises:
            Invalid: the database refuses it.
        """
        try:
            cursor = self._connection.execute(statement)
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
