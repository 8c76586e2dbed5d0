"""Rendering: a table on a terminal, TSV in a pipe, JSON on request.

In TSV and JSON values are raw: times are Unix seconds, and an unknown value is empty or null. On a
terminal they are formatted for people and cut to its width.
"""

import datetime as dt
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

__all__ = [
    "Column",
    "Table",
    "ago",
    "format_ages",
    "format_time",
    "name_store",
    "named_store",
    "paint",
    "report_empty",
    "show_facts",
    "show_rows",
    "show_tables",
]

_MIN_WIDTH = 8
_MIN_LONG_WIDTH = 20
"""The width to which a long column shrinks before spare columns are left out."""
_STORE = "jobsync.store"
_FACT_INDENT = 11
"""The column in which the value of a fact begins."""
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def name_store(text: str) -> None:
    """Set the store that the answer of this command comes from, which an empty one shows."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_STORE] = text


def named_store() -> str:
    """Return the store that the answer of this command comes from; nothing if none was named."""
    context = click.get_current_context(silent=True)
    return "" if context is None else context.meta.get(_STORE, "")


def paint(text: str, **style: Any) -> str:
    """Return text with a style as `click.style` takes it, or plain text if the user wants that."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else click.style(text, **style)


def ago(seconds: object) -> str:
    """Return a duration as "5 min ago"; a negative one as "in 5 min"."""
    if not isinstance(seconds, int | float):
        return "-"
    if seconds < 0:
        return f"in {_format_span(-seconds)}"
    return f"{_format_span(seconds)} ago"


def _format_span(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} s"


def format_ages(now: float) -> Callable[[object], str]:
    """Return a function that formats a Unix time relative to now."""
    return lambda seconds: ago(now - seconds) if isinstance(seconds, int | float) else "-"


def format_time(seconds: object) -> str:
    """Return a Unix time in the local time zone."""
    if not isinstance(seconds, int | float):
        return "-"
    try:
        at = dt.datetime.fromtimestamp(seconds, dt.UTC).astimezone()
    except (OverflowError, ValueError):
        # Such as milliseconds that were taken for seconds.
        return "after the year 9999" if seconds > 0 else "before the year 1"
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _format_or_dash(value: object) -> str:
    if value in (None, "", (), []):
        return "-"
    return _to_text(value)


class Column(msgspec.Struct, frozen=True):
    """A column: a field of the rows, and how to format it for people."""

    name: str
    format: Callable[[object], str] = _format_or_dash
    spare: bool = False
    """Whether a narrow terminal leaves it out."""
    long: bool = False
    """Whether it is cut before others are cut or left out."""


class Table(msgspec.Struct, frozen=True):
    """Rows with the same columns."""

    columns: Sequence[Column | str]
    rows: Sequence[Mapping[str, object]]

    def print(self) -> None:
        """Print an aligned table on a terminal, TSV in a pipe."""
        columns = [item if isinstance(item, Column) else Column(item) for item in self.columns]
        if sys.stdout.isatty():
            _print_aligned(columns, self.rows)
            return
        names = [column.name for column in columns]
        for line in (names, *([_to_text(row[name]) for name in names] for row in self.rows)):
            click.echo("\t".join(line))


def show_rows(
    columns: Sequence[Column | str], rows: Sequence[Mapping[str, object]], *, as_json: bool
) -> None:
    """Print rows. In a pipe, columns are separated by tabs, and a header line comes first."""
    if as_json:
        _print_json(list(rows))
    elif rows or not sys.stdout.isatty():
        Table(columns, rows).print()
        if not rows:
            report_empty()
    else:
        click.echo(_wrap(_describe_empty(), shutil.get_terminal_size().columns, "", "  "))


def show_tables(tables: Mapping[str, Table], *, as_json: bool) -> None:
    """Print several tables, each under its title; in a pipe, titles begin with #."""
    if as_json:
        _print_json({title: list(table.rows) for title, table in tables.items()})
        return
    for index, (title, table) in enumerate(tables.items()):
        if index:
            click.echo()
        is_terminal = sys.stdout.isatty()
        click.echo(paint(title, bold=True) if is_terminal else f"# {title}")
        if is_terminal and not table.rows:
            click.echo("  none")
        else:
            table.print()
    if not any(table.rows for table in tables.values()):
        report_empty()


def report_empty() -> None:
    """Print where nothing was found, apart from the answer, which programs may read."""
    if named_store():
        click.echo(_describe_empty(), err=True)


def _describe_empty() -> str:
    store = named_store()
    return f"none in {store}" if store else "none"


def show_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print a sentence for people, and facts by name below it."""
    width = shutil.get_terminal_size().columns
    click.echo(paint(_wrap(title, width, "", "  "), bold=True))
    for name, value in facts:
        first, *rest = value.splitlines() or [""]
        indent = " " * _FACT_INDENT
        lines = _wrap(first, width, indent, indent)[_FACT_INDENT:]
        indented = "".join(f"\n{'':{_FACT_INDENT}}{line}" for line in rest)
        click.echo(f"  {paint(f'{name:8}', dim=True)} {lines}{indented}")


def _wrap(text: str, width: int, first_indent: str, indent: str) -> str:
    """Break text into lines, between words only: ids and names can be copied as they are shown."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())


class _TextColumn(msgspec.Struct, frozen=True):
    """A column as text."""

    cells: list[str]
    """The first is the header."""
    is_number: bool
    column: Column

    @property
    def width(self) -> int:
        return max(map(len, self.cells))

    @property
    def min_width(self) -> int:
        """The width that it keeps until spare columns are left out."""
        return min(self.width, _MIN_LONG_WIDTH) if self.column.long else self.width


def _print_aligned(columns: Sequence[Column], rows: Sequence[Mapping[str, object]]) -> None:
    shown = [_format_column(column, rows) for column in columns]
    available = shutil.get_terminal_size().columns
    dropped: list[str] = []
    while _sum_widths([each.min_width for each in shown]) > available:
        spare = [index for index, each in enumerate(shown) if each.column.spare]
        if not spare:
            break
        # From the right: the most important columns come first.
        dropped.insert(0, shown.pop(spare[-1]).cells[0])
    widths = _fit_widths(shown, available)
    for number, line in enumerate(zip(*(each.cells for each in shown), strict=True)):
        cells = [
            _fit_cell(cell, width, each.is_number)
            for cell, width, each in zip(line, widths, shown, strict=True)
        ]
        text = "  ".join(cells).rstrip()
        click.echo(text if number else paint(text, dim=True))
    if dropped:
        hint = f"not shown, for want of width: {', '.join(dropped)}"
        click.echo(paint(_wrap(hint, available, "", "  "), dim=True))


def _format_column(column: Column, rows: Sequence[Mapping[str, object]]) -> _TextColumn:
    values = [row[column.name] for row in rows]
    return _TextColumn(
        [column.name.strip("_").replace("_", " "), *map(column.format, values)],
        is_number=bool(values) and all(type(value) is int for value in values),
        column=column,
    )


def _sum_widths(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _fit_widths(columns: Sequence[_TextColumn], available: int) -> list[int]:
    """Return widths that fit a line: the widest columns are cut, long ones first."""
    widths = [column.width for column in columns]
    only_long = [_MIN_WIDTH if each.column.long else each.width for each in columns]
    for least in ([each.min_width for each in columns], only_long, [_MIN_WIDTH] * len(columns)):
        while _sum_widths(widths) > available:
            wide = [index for index, width in enumerate(widths) if width > least[index]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _fit_cell(cell: str, width: int, is_number: bool) -> str:  # noqa: FBT001 - a fact of the column
    if len(cell) > width:
        return f"{cell[: width - 1]}…"
    return cell.rjust(width) if is_number else cell.ljust(width)


def _to_text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(map(_to_text, value))
        case dict():
            return msgspec.json.encode(value).decode()
    return str(value).replace("\t", " ").replace("\n", " ")
