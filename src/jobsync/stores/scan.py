"""Filtered reads: rows are read in order, page by page, until enough of them match.

SQL narrows, the reference matcher decides. `filter_to_sql` builds a condition that is true
for every row whose document matches, and perhaps for a few more: where SQL would be inexact
(the last digit of a float, the inside of arrays, odd field names) it lets rows through. Negation
would turn "too many" into "too few", so it is pushed down to the leaves first. `collect` then
applies the matcher, so that every store returns the same records.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from jobsync.core.codec import Json
from jobsync.core.filters import All, AnyOf, Compare, Equals, Exists, Filter, Not, Path, matches
from jobsync.core.keys import check_key, check_prefix
from jobsync.errors import Corrupt, Invalid

__all__ = [
    "Dialect",
    "JsonKind",
    "Row",
    "SqlCondition",
    "check_age",
    "check_limit",
    "check_listing",
    "collect",
    "filter_to_sql",
]

_MAX_LIMIT = 100_000
_MAX_AGE = 1e9
_READ_AHEAD = 256
"""The fewest rows to read at once when a filter may drop most of them."""

Row = tuple[str, *tuple[Any, ...]]
"""A row of a store: the key or id to continue after, then the columns to decode."""

_MAX_PARAMETERS = 5_000
"""Beyond this, reading the rows is cheaper than the condition."""

# Quotes and backslashes in a field name are escaped in JSON text, which SQLite before
# 3.43 compares without decoding.
_is_plain_step = re.compile(r'[^"\\\x00-\x1f]+').fullmatch

JsonKind: TypeAlias = Literal[
    "missing", "null", "true", "false", "number", "text", "array", "object"
]


class _Item(Protocol):
    @property
    def value(self) -> Json: ...


Item = TypeVar("Item", bound=_Item)


def check_limit(limit: int) -> None:
    """Check the size of a page.

    Raises:
        Invalid: it is not a number from 1 to 100,000.
    """
    if type(limit) is not int or not 1 <= limit <= _MAX_LIMIT:
        raise Invalid("limit", limit, f"must be between 1 and {_MAX_LIMIT:,}", "read page by page")


def check_age(older_than: float) -> None:
    """Check an age in seconds.

    Raises:
        Invalid: it is not a finite number of seconds.
    """
    if not -_MAX_AGE <= older_than <= _MAX_AGE:
        raise Invalid(
            "older_than", older_than, "must be a number of seconds", "use a number such as 3600.0"
        )


def check_listing(prefix: str, after: str, limit: int, until: str = "") -> None:
    """Check the arguments of a listing.

    Raises:
        Invalid: one of them is wrong.
    """
    check_prefix(prefix)
    check_limit(limit)
    for name, key, fix in (
        ("after", after, "pass the last key of the previous page"),
        ("until", until, "leave it out to list to the end of the level"),
    ):
        if key:
            check_key(key, name)
            if not key.startswith(prefix):
                raise Invalid(name, key, f"must be under {prefix!r}", fix)


async def collect(
    fetch: Callable[[str, int], Awaitable[Sequence[Row]]],
    decode: Callable[..., Item],
    report: Callable[[Corrupt], None],
    *,
    after: str,
    limit: int,
    where: Filter,
    read_ahead: int = _READ_AHEAD,
) -> list[Item]:
    """Fetch and decode rows until `limit` of them match or none are left.

    Rows that cannot be decoded are reported and skipped.
    """
    found: list[Item] = []
    matches_all = where == All(())
    page = limit if matches_all else max(limit, read_ahead)
    while True:
        rows = await fetch(after, page)
        for row in rows:
            try:
                item = decode(*row)
            except Corrupt as corrupt:
                report(corrupt)
                continue
            if matches_all or matches(where, item.value):
                found.append(item)
                if len(found) == limit:
                    return found
        if len(rows) < page:
            return found
        after = rows[-1][0]


class SqlCondition(msgspec.Struct, frozen=True):
    """An SQL condition with its parameters. Never NULL, so that it can be negated."""

    sql: str
    parameters: tuple[object, ...] = ()

    def negated(self) -> "SqlCondition":
        """Return the negation. The condition must be exact."""
        return SqlCondition(f"NOT ({self.sql})", self.parameters)


_TRUE = SqlCondition("1=1")
_FALSE = SqlCondition("1=0")


class Dialect(msgspec.Struct, frozen=True):
    """How one database reads the JSON document in its column `value`."""

    kind_is: Callable[[Path, JsonKind], SqlCondition]
    """The condition that the field has this JSON type; never NULL."""
    text: Callable[[Path], SqlCondition]
    """The field as text, once it is known to be text."""
    number: Callable[[Path], SqlCondition]
    """The field as a number, once it is known to be a number."""
    placeholder: str
    """The placeholder of a parameter."""


def filter_to_sql(where: Filter, dialect: Dialect) -> SqlCondition:
    """Return a condition that is true for every row whose document matches."""
    condition = _narrow(where, dialect, negated=False)
    return condition if len(condition.parameters) <= _MAX_PARAMETERS else _TRUE


def _narrow(where: Filter, dialect: Dialect, *, negated: bool) -> SqlCondition:
    match where:
        case All(parts):
            return _join(
                [_narrow(part, dialect, negated=negated) for part in parts], all_of=not negated
            )
        case AnyOf(parts):
            return _join(
                [_narrow(part, dialect, negated=negated) for part in parts], all_of=negated
            )
        case Not(part):
            return _narrow(part, dialect, negated=not negated)
        case Equals(path) | Compare(path) | Exists(path) if not all(map(_is_plain_step, path)):
            return _TRUE
        case Exists(path):
            return _exact(dialect.kind_is(path, "missing").negated(), negated=negated)
        case Equals():
            return _equals(where, dialect, negated=negated)
        case Compare():
            return _compare(where, dialect, negated=negated)


def _equals(where: Equals, dialect: Dialect, *, negated: bool) -> SqlCondition:
    value = where.value
    if value is None or isinstance(value, bool):
        kind: JsonKind = "null" if value is None else "true" if value else "false"
        return _exact(dialect.kind_is(where.path, kind), negated=negated)
    if isinstance(value, str):
        return _exact(_text(where.path, "=", value, dialect), negated=negated)
    if negated:
        return _TRUE
    if isinstance(value, int | float):
        low, high = value - _slack(value), value + _slack(value)
        return _join(
            [_number(where.path, ">=", low, dialect), _number(where.path, "<=", high, dialect)],
            all_of=True,
        )
    return dialect.kind_is(where.path, "object" if isinstance(value, dict) else "array")


def _compare(where: Compare, dialect: Dialect, *, negated: bool) -> SqlCondition:
    value, order = where.value, where.order
    if isinstance(value, str):
        return _exact(_text(where.path, order, value, dialect), negated=negated)
    # Widen the range so that rows are let through; under a negation, narrow it.
    outward = _slack(value) if (order[0] == "<") is not negated else -_slack(value)
    return _exact(_number(where.path, order, value + outward, dialect), negated=negated)


def _slack(value: float) -> float:
    return abs(value) * 1e-12 + 1e-300


def _exact(condition: SqlCondition, *, negated: bool) -> SqlCondition:
    return condition.negated() if negated else condition


def _text(path: Path, operator: str, value: str, dialect: Dialect) -> SqlCondition:
    return _typed(path, "text", dialect.text(path), operator, value, dialect)


def _number(path: Path, operator: str, value: float, dialect: Dialect) -> SqlCondition:
    return _typed(path, "number", dialect.number(path), operator, value, dialect)


def _typed(
    path: Path, kind: JsonKind, found: SqlCondition, operator: str, value: object, dialect: Dialect
) -> SqlCondition:
    """Compare within one type. CASE, because AND has no fixed order of evaluation."""
    typed = dialect.kind_is(path, kind)
    return SqlCondition(
        f"CASE WHEN {typed.sql} THEN {found.sql} {operator} {dialect.placeholder} ELSE 1=0 END",
        (*typed.parameters, *found.parameters, value),
    )


def _join(parts: list[SqlCondition], *, all_of: bool) -> SqlCondition:
    """Join by halves, because databases limit how deep an expression may nest."""
    if not parts:
        return _TRUE if all_of else _FALSE
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    left, right = _join(parts[:middle], all_of=all_of), _join(parts[middle:], all_of=all_of)
    word = "AND" if all_of else "OR"
    return SqlCondition(f"({left.sql} {word} {right.sql})", (*left.parameters, *right.parameters))
