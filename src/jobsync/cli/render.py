"""What people and programs read: a table on a terminal, TSV in a pipe, JSON on demand."""

import sys
from collections.abc import Mapping, Sequence

import click
import msgspec

__all__ = ["show_rows"]


def show_rows(
    columns: Sequence[str], rows: Sequence[Mapping[str, object]], *, as_json: bool
) -> None:
    """Print rows. In a pipe the columns are separated by tabs, with a line of names first."""
    if as_json:
        click.echo(msgspec.json.encode(list(rows)).decode())
        return
    texts = [[_text(row[column]) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in ([*columns], *texts):
            click.echo("\t".join(line))
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *texts, strict=True)]
    for line in ([*columns], *texts):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("\t", " ").replace("\n", " ")
