"""`jobsync sql`: a shell on the database of a fleet, with its views."""

import sys
from collections.abc import Sequence

import click

from jobsync.cli.options import app_option, json_option

__all__ = ["sql"]


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
    from jobsync.cli.shell import open_shell
    from jobsync.stores.opening import read_url

    with open_shell(read_url(url), app, as_json=as_json) as shell:
        if statements:
            shell.run_all(statements)
        elif sys.stdin.isatty():
            shell.converse()
        else:
            shell.run_text(sys.stdin)
