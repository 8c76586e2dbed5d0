"""The filter language, and the reference matcher of all stores.

`{"age": {"$gte": 18}, "address.city": "Oslo", "$or": [{"vip": True}, {"score": {"$gt": 9}}]}`

- Values compare within one JSON type only: `1` is not `True`, `"1"` is not `1`.
- Missing is not null: `{"x": None}` matches `{"x": null}` and not `{}`.
- `$ne` and `$not` are exact negations, so they match missing fields.
- Text compares by code point. Order (`$lt` …) is defined for numbers and for text.
- A dotted path steps through objects, never into arrays.

`parse` checks a filter and returns its parts; `matches` is the reference. Stores may narrow
what they read by other means, but everything they return has passed `matches`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from jobsync.core.codec import Json, check_json
from jobsync.errors import Invalid, closest_name

__all__ = [
    "All",
    "AnyOf",
    "Compare",
    "Equals",
    "Exists",
    "Filter",
    "Not",
    "Path",
    "find",
    "matches",
    "parse",
]

Path: TypeAlias = tuple[str, ...]
Order: TypeAlias = Literal["<", "<=", ">", ">="]

_MAX_DEPTH = 16
_MAX_CHOICES = 1000
_MAX_CONDITIONS = 10_000
_ORDERS: dict[str, Order] = {"$lt": "<", "$lte": "<=", "$gt": ">", "$gte": ">="}
_ON_FIELDS = ("$eq", "$ne", "$lt", "$lte", "$gt", "$gte", "$in", "$not", "$exists")
_ON_DOCUMENTS = ("$and", "$or", "$not")


class All(msgspec.Struct, frozen=True):
    """Every part matches. Without parts, every document matches."""

    parts: tuple["Filter", ...]


class AnyOf(msgspec.Struct, frozen=True):
    """At least one part matches."""

    parts: tuple["Filter", ...]


class Not(msgspec.Struct, frozen=True):
    """The part does not match."""

    part: "Filter"


class Equals(msgspec.Struct, frozen=True):
    """The field exists and equals the value, including the types of nested values."""

    path: Path
    value: Json


class Compare(msgspec.Struct, frozen=True):
    """The field exists, has the value's type, and compares to it by `order`."""

    path: Path
    order: Order
    value: int | float | str


class Exists(msgspec.Struct, frozen=True):
    """The field exists; it may be null."""

    path: Path


Filter: TypeAlias = All | AnyOf | Not | Equals | Compare | Exists


def parse(where: Mapping[str, Json] | None) -> Filter:
    """Check a filter and return its parts.

    Raises:
        Invalid: names the operator or field, the value and the fix.
    """
    if where is None:
        return All(())
    parsed = _parse_document(where, "where", 0)
    if (conditions := _count(parsed)) > _MAX_CONDITIONS:
        raise Invalid(
            "where",
            f"{conditions:,} conditions",
            f"must have at most {_MAX_CONDITIONS:,} conditions",
            "query in parts",
        )
    return parsed


def _count(where: Filter) -> int:
    match where:
        case All(parts) | AnyOf(parts):
            return sum(map(_count, parts))
        case Not(part):
            return _count(part)
        case _:
            return 1


def _parse_document(where: Json, field: str, depth: int) -> Filter:
    if not isinstance(where, Mapping):
        raise Invalid(field, where, "must be a filter", 'write {"field": value}')
    if depth >= _MAX_DEPTH:
        raise Invalid(
            field, "…", f"must not be nested deeper than {_MAX_DEPTH}", "simplify the filter"
        )
    parts: list[Filter] = []
    for name, operand in where.items():
        match name:
            case "$and":
                parts.append(All(_parse_list(operand, f"{field}.$and", depth)))
            case "$or":
                parts.append(AnyOf(_parse_list(operand, f"{field}.$or", depth)))
            case "$not":
                parts.append(Not(_parse_document(operand, f"{field}.$not", depth + 1)))
            case _:
                parts.append(_parse_field(name, operand, field, depth))
    return _all(parts)


def _parse_list(operand: Json, field: str, depth: int) -> tuple[Filter, ...]:
    if not isinstance(operand, list | tuple) or not operand:
        raise Invalid(field, operand, "must be a list of filters", "write [{…}, {…}]")
    return tuple(
        _parse_document(item, f"{field}[{i}]", depth + 1) for i, item in enumerate(operand)
    )


def _parse_field(name: Any, operand: Json, field: str, depth: int) -> Filter:
    if not isinstance(name, str):
        raise Invalid(field, name, "must have text as field names", "use str(name)")
    if name.startswith("$"):
        raise _unknown_operator(name, operand, field, _ON_DOCUMENTS)
    path = tuple(name.split("."))
    if "" in path:
        raise Invalid(
            field, name, "must not have an empty step in a path", "write a.b, not .a, a. or a..b"
        )
    check_json(name, field)
    return _parse_operand(path, operand, f"{field}.{name}", depth)


def _parse_operand(path: Path, operand: Json, field: str, depth: int) -> Filter:
    if not (isinstance(operand, Mapping) and any(_is_operator(key) for key in operand)):
        return _equals(path, operand, field)
    if depth >= _MAX_DEPTH:
        raise Invalid(
            field, "…", f"must not be nested deeper than {_MAX_DEPTH}", "simplify the filter"
        )
    return _all([_parse_operator(path, op, arg, field, depth) for op, arg in operand.items()])


def _parse_operator(path: Path, operator: Any, operand: Json, field: str, depth: int) -> Filter:
    inner = f"{field}.{operator}"
    match operator:
        case "$eq":
            return _equals(path, operand, inner)
        case "$ne":
            return Not(_equals(path, operand, inner))
        case "$lt" | "$lte" | "$gt" | "$gte":
            return _compare(path, _ORDERS[operator], operand, inner)
        case "$in":
            return _one_of(path, operand, inner)
        case "$exists":
            if not isinstance(operand, bool):
                raise Invalid(inner, operand, "must be True or False", "write True or False")
            return Exists(path) if operand else Not(Exists(path))
        case "$not":
            if not (isinstance(operand, Mapping) and any(_is_operator(key) for key in operand)):
                raise Invalid(inner, operand, "must hold an operator", 'write {"$not": {"$gt": 5}}')
            return Not(_parse_operand(path, operand, inner, depth + 1))
        case _:
            raise _unknown_operator(operator, operand, field, _ON_FIELDS)


def _is_operator(key: object) -> bool:
    return isinstance(key, str) and key.startswith("$")


def _equals(path: Path, value: Json, field: str) -> Equals:
    check_json(value, field)
    return Equals(path, value)


def _compare(path: Path, order: Order, value: Json, field: str) -> Compare:
    check_json(value, field)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Invalid(field, value, "must be a number or text", "use $eq to compare other values")
    return Compare(path, order, value)


def _one_of(path: Path, values: Json, field: str) -> AnyOf:
    if not isinstance(values, list | tuple):
        raise Invalid(field, values, "must be a list", "write [a, b]")
    if len(values) > _MAX_CHOICES:
        problem = f"must have at most {_MAX_CHOICES} values"
        raise Invalid(field, f"{len(values)} values", problem, "split it")
    return AnyOf(tuple(_equals(path, value, f"{field}[{i}]") for i, value in enumerate(values)))


def _all(parts: list[Filter]) -> Filter:
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _unknown_operator(name: Any, value: Json, field: str, known: tuple[str, ...]) -> Invalid:
    if not _is_operator(name):
        problem = "must not mix operators and field names"
        return Invalid(field, name, problem, "use either operators or a value")
    # Without the "$", which would make every short operator look similar.
    hint = closest_name(name[1:], [operator[1:] for operator in known])
    return Invalid(
        f"{field}.{name}",
        value,
        "is not an operator here",
        f"did you mean ${hint}?" if hint else f"use one of {', '.join(known)}",
    )


_MISSING = object()


def matches(where: Filter, document: Json) -> bool:
    """Whether a document passes a filter. Every store gives the same answer."""
    match where:
        case All(parts):
            return all(matches(part, document) for part in parts)
        case AnyOf(parts):
            return any(matches(part, document) for part in parts)
        case Not(part):
            return not matches(part, document)
        case Equals(path, value):
            return _is_equal(find(document, path), value)
        case Compare(path, order, value):
            return _is_ordered(find(document, path), order, value)
        case Exists(path):
            return find(document, path) is not _MISSING


def find(document: Json, path: Path) -> object:
    """Return the value of a field; an object of no JSON type if it is missing."""
    for step in path:
        if not isinstance(document, dict):
            return _MISSING
        document = document.get(step, _MISSING)
    return document


def _is_equal(found: object, value: Json) -> bool:
    if isinstance(found, bool) or isinstance(value, bool):
        return found is value
    if isinstance(found, dict) and isinstance(value, dict):
        return found.keys() == value.keys() and all(_is_equal(found[k], value[k]) for k in value)
    if isinstance(found, list) and isinstance(value, list | tuple):
        return len(found) == len(value) and all(map(_is_equal, found, value))
    return bool(found == value)


_TESTS: dict[Order, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _is_ordered(found: object, order: Order, value: float | str) -> bool:
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return False
    if isinstance(found, str) is not isinstance(value, str):
        return False
    return _TESTS[order](found, value)
