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

__all__ = [
    "Column",
    "Table",
    "ages",
    "ago",
    "moment",
    "paint",
    "show_facts",
    "show_rows",
    "show_tables",
]

_NARROWEST = 8
_COSY = 20
"""What is left of a long column before others are left out."""
_FACT = 11
"""How far from the left what is said of a thing begins."""
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def paint(text: str, **look: Any) -> str:
    """Give text a look, as `click.style` has it, unless the reader asked for plain text."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, **look)


def ago(seconds: object) -> str:
    """Say how long ago something was, or in how long it will be."""
    if not isinstance(seconds, int | float):
        return "-"
    if seconds < 0:
        return f"in {_span(-seconds)}"
    return f"{_span(seconds)} ago"


def _span(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} s"


def ages(now: float) -> Callable[[object], str]:
    """Give what says how far moments lie from now."""
    return lambda seconds: ago(now - seconds) if isinstance(seconds, int | float) else "-"


def moment(seconds: object) -> str:
    """Say when something is, in the reader's own zone."""
    if not isinstance(seconds, int | float):
        return "-"
    return dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain(value: object) -> str:
    if value in (None, "", (), []):
        return "-"
    return _text(value)


class Column(msgspec.Struct, frozen=True):
    """One column: a field of the rows, and how people read it."""

    name: str
    show: Callable[[object], str] = _plain
    spare: bool = False
    """Whether people do without it where their terminal is narrow."""
    long: bool = False
    """Whether its beginning is enough, rather than that others are cut or left out."""


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
    elif rows or not sys.stdout.isatty():
        Table(columns, rows).print()
    else:
        click.echo("none")


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


def show_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print what there is to say of one thing, for people: a sentence, and facts below it."""
    room = shutil.get_terminal_size().columns
    click.echo(paint(click.wrap_text(title, room, subsequent_indent="  "), bold=True))
    for name, value in facts:
        first, *rest = value.splitlines() or [""]
        lines = click.wrap_text(first, room, " " * _FACT, " " * _FACT)[_FACT:]
        indented = "".join(f"\n{'':{_FACT}}{line}" for line in rest)
        click.echo(f"  {paint(f'{name:8}', dim=True)} {lines}{indented}")


def _print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())


class _Strip(msgspec.Struct, frozen=True):
    """A column as it stands on a terminal."""

    cells: list[str]
    """The first is its head."""
    is_number: bool
    column: Column

    @property
    def width(self) -> int:
        return max(map(len, self.cells))

    @property
    def least(self) -> int:
        """The width below which others go first."""
        return min(self.width, _COSY) if self.column.long else self.width


def _print_aligned(columns: Sequence[Column], rows: Sequence[Mapping[str, object]]) -> None:
    strips = [_cut(column, rows) for column in columns]
    room = shutil.get_terminal_size().columns
    while _width([strip.least for strip in strips]) > room:
        spare = [place for place, strip in enumerate(strips) if strip.column.spare]
        if not spare:
            break
        # From the right: what matters most comes first.
        del strips[spare[-1]]
    widths = _fit(strips, room)
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
        column=column,
    )


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fit(strips: Sequence[_Strip], room: int) -> list[int]:
    """Take from the widest columns what is too much for a line, from long ones first."""
    widths = [strip.width for strip in strips]
    beginnings = [_NARROWEST if strip.column.long else strip.width for strip in strips]
    for least in ([strip.least for strip in strips], beginnings, [_NARROWEST] * len(strips)):
        while _width(widths) > room:
            wide = [place for place, width in enumerate(widths) if width > least[place]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


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
