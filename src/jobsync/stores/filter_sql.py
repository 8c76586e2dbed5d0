"""A filter as an SQL condition that never loses a match.

SQL narrows, the reference matcher decides. The condition is true for every row whose
document matches, and maybe for a few more: where SQL would be inexact (the last digit of
a float, the inside of arrays, odd field names) it lets rows through. Negation turns
"too many" into "too few", so it is pushed down to the leaves first.
"""

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from jobsync.core.filters import All, AnyOf, Compare, Equals, Exists, Filter, Not, Path

__all__ = ["Dialect", "JsonKind", "SqlCondition", "filter_to_sql"]

_MAX_PARAMETERS = 5_000
"""Beyond this the rows are cheaper to read than the condition."""

# Quotes and backslashes in a field name are escaped in JSON text, which SQLite before
# 3.43 compares as it stands.
_is_plain_step = re.compile(r'[^"\\\x00-\x1f]+').fullmatch


JsonKind: TypeAlias = Literal[
    "missing", "null", "true", "false", "number", "text", "array", "object"
]


class SqlCondition(msgspec.Struct, frozen=True):
    """SQL text with its parameters. Never null, so that it can be negated."""

    sql: str
    parameters: tuple[object, ...] = ()

    def negated(self) -> "SqlCondition":
        """Turn an exact condition around."""
        return SqlCondition(f"NOT ({self.sql})", self.parameters)


_TRUE = SqlCondition("1=1")
_FALSE = SqlCondition("1=0")


class Dialect(msgspec.Struct, frozen=True):
    """How one database looks into the JSON document of its column `value`."""

    kind_is: Callable[[Path, JsonKind], SqlCondition]
    """Whether the field has that JSON type; never null."""
    text: Callable[[Path], SqlCondition]
    """The field as text, once it is known to be."""
    number: Callable[[Path], SqlCondition]
    """The field as a number, once it is known to be."""
    mark: str
    """The placeholder of a parameter."""


def filter_to_sql(where: Filter, dialect: Dialect) -> SqlCondition:
    """Give a condition that holds for every row whose document matches."""
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
    # Widen what must let rows through; under a negation, what must hold them back.
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
    """Compare within one type. CASE, because AND promises no order of evaluation."""
    typed = dialect.kind_is(path, kind)
    return SqlCondition(
        f"CASE WHEN {typed.sql} THEN {found.sql} {operator} {dialect.mark} ELSE 1=0 END",
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
