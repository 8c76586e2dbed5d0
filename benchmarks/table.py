"""The rows that benchmarks print, for people and as JSON for `benchmarks/compare.py`."""

import sys
from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = ["Better", "Row", "print_rows", "show_progress"]

Better = Literal["higher", "lower"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, and whether it is within its budget."""

    label: str
    text: str
    budget: str = ""
    is_within: bool = True
    value: float
    bare: float = 0.0
    """The same work without the library, in the same unit; 0 if it was not measured."""
    better: Better


def print_rows(rows: Iterable[Row], *, as_json: bool) -> bool:
    """Print rows as they come; return whether all are within their budgets."""
    is_within = True
    for row in rows:
        is_within &= row.is_within
        show_progress("")
        if as_json:
            print(msgspec.json.encode(row).decode(), flush=True)
        else:
            mark = "" if row.is_within else "  OVER"
            print(f"{row.label:44}{row.text:62}{row.budget}{mark}", flush=True)
    if not as_json:
        print("within budget" if is_within else "OVER BUDGET")
    return is_within


def show_progress(text: str) -> None:
    """Show what is going on, if standard error is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
