"""What people and programs read: a table on a terminal, TSV in a pipe, JSON on demand.

Programs get values as they are: times are Unix seconds, what is unknown is empty. People
get them as they are spoken of, cut to the width of their terminal.
"""

import datetime as dt
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

__all__ = ["Column", "Table", "ago", "moment", "paint", "show_rows", "show_tables"]

_NARROWEST = 8
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def paint(text: str, **look: Any) -> str:
    """Give text a look, as `click.style` has it, unless the reader asked for plain text."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, **look)


def ago(seconds: object) -> str:
    """Say how long ago something was."""
    if not isinstance(seconds, int | float):
        return "-"
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.1f} s ago"


def moment(seconds: object) -> str:
    """Say when something is, in the reader's own zone."""
    if not isinstance(seconds, int | float):
        return "-"
    return dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain(value: object) -> str:
    if value is None or value == "":
        return "-"
    return _text(value)


class Column(msgspec.Struct, frozen=True):
    """One column: a field of the rows, and how people read it."""

    name: str
    show: Callable[[object], str] = _plain
    spare: bool = False
    """Whether people do without it where their terminal is narrow."""


class Table(msgspec.Struct, frozen=True):
    """Rows of one kind."""

    columns: Sequence[Column | str]
    rows: Sequence[Mapping[str, object]]

    def print(self) -> None:
        """Print it, for whoever reads."""
        columns = [each if isinstance(each, Column) else Column(each) for each in self.columns]
        if sys.stdout.isatty():
            _print_aligned(columns, self.rows)
            return
        names = [column.name for column in columns]
        for line in (names, *([_text(row[name]) for name in names] for row in self.rows)):
            click.echo("\t".join(line))


def show_rows(
    columns: Sequence[Column | str], rows: Sequence[Mapping[str, object]], *, as_json: bool
) -> None:
    """Print rows. In a pipe the columns are separated by tabs, with a line of names first."""
    if as_json:
        _print_json(list(rows))
    else:
        Table(columns, rows).print()


def show_tables(tables: Mapping[str, Table], *, as_json: bool) -> None:
    """Print several tables, each under its title; in a pipe the title begins with #."""
    if as_json:
        _print_json({title: list(table.rows) for title, table in tables.items()})
        return
    for place, (title, table) in enumerate(tables.items()):
        if place:
            click.echo()
        is_person = sys.stdout.isatty()
        click.echo(paint(title, bold=True) if is_person else f"# {title}")
        if is_person and not table.rows:
            click.echo("  none")
        else:
            table.print()


def _print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())


class _Strip(msgspec.Struct, frozen=True):
    """A column as it stands on a terminal."""

    cells: list[str]
    """The first is its head."""
    is_number: bool
    spare: bool

    @property
    def width(self) -> int:
        return max(map(len, self.cells))


def _print_aligned(columns: Sequence[Column], rows: Sequence[Mapping[str, object]]) -> None:
    strips = [_cut(column, rows) for column in columns]
    room = shutil.get_terminal_size().columns
    while _width([strip.width for strip in strips]) > room and any(s.spare for s in strips):
        # From the right: what matters most comes first.
        del strips[max(place for place, strip in enumerate(strips) if strip.spare)]
    widths = [strip.width for strip in strips]
    _fit(widths, room)
    for number, line in enumerate(zip(*(strip.cells for strip in strips), strict=True)):
        cells = [
            _fill(cell, width, strip.is_number)
            for cell, width, strip in zip(line, widths, strips, strict=True)
        ]
        text = "  ".join(cells).rstrip()
        click.echo(text if number else paint(text, dim=True))


def _cut(column: Column, rows: Sequence[Mapping[str, object]]) -> _Strip:
    values = [row[column.name] for row in rows]
    return _Strip(
        [column.name.strip("_").replace("_", " "), *map(column.show, values)],
        is_number=bool(values) and all(type(value) is int for value in values),
        spare=column.spare,
    )


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fit(widths: list[int], room: int) -> None:
    """Take from the widest columns what is too much for a line."""
    while _width(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1


def _fill(cell: str, width: int, is_number: bool) -> str:  # noqa: FBT001 - a fact of the column
    if len(cell) > width:
        return f"{cell[: width - 1]}…"
    return cell.rjust(width) if is_number else cell.ljust(width)


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(map(_text, value))
        case dict():
            return msgspec.json.encode(value).decode()
    return str(value).replace("\t", " ").replace("\n", " ")
