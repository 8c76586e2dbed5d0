"""What the records of a resource look like, and whether one does.

A check names every field that is wrong at once, and fills in defaults. It says nothing
about fields that the schema does not know: they are kept as they are. `find_strays` finds
them, for whoever does not want them.

Missing and null are two things, except that an optional field may be either. A required
field that is missing or null takes its default, if it has one.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from jobsync.core.codec import Json
from jobsync.errors import Problem, closest_name

__all__ = [
    "KINDS",
    "PATTERNS",
    "SIZED",
    "TEXTS",
    "Break",
    "Field",
    "FieldKind",
    "Fields",
    "Schema",
    "conform",
    "evolve",
    "find_breaks",
    "find_strays",
]


FieldKind: TypeAlias = Literal[
    "string",
    "number",
    "integer",
    "boolean",
    "json",
    "array",
    "object",
    "email",
    "url",
    "date",
    "datetime",
    "uuid",
]

KINDS: tuple[FieldKind, ...] = get_args(FieldKind)

TEXTS = frozenset({"string", "email", "url", "date", "datetime", "uuid"})
"""Kinds that hold text."""

SIZED = frozenset({*TEXTS, "array", "number", "integer"})
"""Kinds that `min` and `max` bound: a text's length, an array's, a number itself."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """What one field takes."""

    kind: FieldKind
    required: bool = False
    default: Json | msgspec.UnsetType = msgspec.UNSET
    least: int | float | None = None
    most: int | float | None = None
    choices: tuple[Json, ...] = ()
    items: FieldKind | None = None
    """What the elements of an array are; None takes any."""
    fields: "Fields | None" = None
    """What stands in an object; None takes any."""


Fields: TypeAlias = Mapping[str, Field]


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """What a resource's records look like; without fields, they may look any way."""

    fields: Fields = {}
    strict: bool = False
    """Whether fields that are not described are refused."""


def conform(fields: Fields, given: Mapping[str, Json]) -> tuple[dict[str, Json], list[Problem]]:
    """Fill in defaults, and list what is wrong."""
    problems: list[Problem] = []
    return _conform(fields, given, "", problems), problems


def find_strays(fields: Fields, given: Mapping[str, Json], place: str = "") -> Iterator[Problem]:
    """Find what the schema does not describe."""
    for name, value in given.items():
        field = fields.get(name)
        if field is None:
            hint = closest_name(str(name), fields)
            problem = "is not described" + (f", did you mean {hint}?" if hint else "")
            yield Problem(f"{place}{name}", value, problem, "strict")
        elif field.fields is not None and isinstance(value, Mapping):
            yield from find_strays(field.fields, value, f"{place}{name}.")


def _conform(
    fields: Fields, given: Mapping[str, Json], place: str, problems: list[Problem]
) -> dict[str, Json]:
    result = dict(given)
    for name, field in fields.items():
        value = result.get(name)
        if value is None:
            _supply(result, name, field, f"{place}{name}", problems)
        elif field.fields is not None and isinstance(value, Mapping):
            result[name] = _conform(field.fields, value, f"{place}{name}.", problems)
        else:
            _check(field, value, f"{place}{name}", problems)
    return result


def _supply(
    result: dict[str, Json], name: str, field: Field, path: str, problems: list[Problem]
) -> None:
    """Put something in the place of what is missing or null, or say that it must be given."""
    if name in result and not field.required:
        return
    if field.default is not msgspec.UNSET:
        result[name] = copy.deepcopy(field.default)
        if field.fields is not None and field.default is not None:
            result[name], _ = conform(field.fields, result[name])
    elif field.required:
        there = "is null" if name in result else "is missing"
        problems.append(Problem(path, None, there, "required"))
    elif field.fields is not None:
        filled, lacking = conform(field.fields, {})
        # Defaults that suffice make an object of their own.
        if filled and not lacking:
            result[name] = filled


def _check(field: Field, value: Json, path: str, problems: list[Problem]) -> None:
    """Check a value that is not null."""
    if not _TESTS[field.kind](value):
        problems.append(_unlike(path, value, field.kind))
        return
    if field.choices and value not in field.choices:
        rule = f"enum:{','.join(map(str, field.choices))}"
        problems.append(Problem(path, value, "is none of the choices", rule))
    if field.least is not None or field.most is not None:
        _check_size(field, value, path, problems)
    if field.items is not None:
        is_item = _TESTS[field.items]
        problems.extend(
            _unlike(f"{path}[{i}]", item, field.items)
            for i, item in enumerate(value)
            if not is_item(item)
        )


def _check_size(field: Field, value: Json, path: str, problems: list[Problem]) -> None:
    if isinstance(value, _NUMBERS):
        size: int | float | Decimal = value
        told = "is"
    else:
        size = len(value)
        told = f"has {size} {'characters' if isinstance(value, str) else 'elements'},"
    if field.least is not None and size < field.least:
        problem = f"{told} less than {field.least}"
        problems.append(Problem(path, value, problem, f"min:{field.least}"))
    if field.most is not None and size > field.most:
        problem = f"{told} more than {field.most}"
        problems.append(Problem(path, value, problem, f"max:{field.most}"))


def _unlike(path: str, value: Json, kind: FieldKind) -> Problem:
    return Problem(path, value, f"is not {_WORDS[kind]}", kind)


_WORDS: dict[FieldKind, str] = {
    "string": "text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "True or False",
    "json": "JSON",
    "array": "a list",
    "object": "a dictionary",
    "email": "an e-mail address",
    "url": "a URL such as https://example.org/",
    "date": "a date such as 2026-01-31",
    "datetime": "a point in time such as 2026-01-31T12:00:00Z",
    "uuid": "a UUID",
}

PATTERNS: dict[FieldKind, str] = {
    "email": r"[^@\s]+@[^@\s.]+(?:\.[^@\s.]+)+",
    "url": r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#]+\S*",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
"""Kinds of text that are known by their form alone."""

_is_email, _is_url, _is_uuid = (re.compile(pattern).fullmatch for pattern in PATTERNS.values())
_looks_like_date = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII).fullmatch
_looks_like_datetime = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:?\d\d)?", re.ASCII
).fullmatch


def _is_date(text: str) -> bool:
    return bool(_looks_like_date(text)) and _parses(date.fromisoformat, text)


def _is_datetime(text: str) -> bool:
    return bool(_looks_like_datetime(text)) and _parses(datetime.fromisoformat, text)


def _parses(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


_NUMBERS = (int, float, Decimal)

_TESTS: dict[FieldKind, Callable[[Any], object]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, _NUMBERS) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "json": lambda _: True,
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, Mapping),
    "email": lambda value: isinstance(value, str) and _is_email(value),
    "url": lambda value: isinstance(value, str) and _is_url(value),
    "date": lambda value: isinstance(value, str) and _is_date(value),
    "datetime": lambda value: isinstance(value, str) and _is_datetime(value),
    "uuid": lambda value: isinstance(value, str) and _is_uuid(value),
}


# Whether a schema may take another's place, and what stands then.
#
# One rule: what the old one described and took, the new one takes. So records need no
# migration, and a process that still knows the old one alone writes nothing that the new one
# refuses. What breaks the rule is refused with the reason. A field that was not described
# until now may hold anything in records that are there; they are judged when they are changed.
#
# A field that the new schema does not mention stays, as an optional one: code of an earlier
# release that starts again beside a newer one takes nothing away.


class Break(msgspec.Struct, frozen=True):
    """A change of one field under which records that are there would no longer pass."""

    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} ({self.fix})"


def evolve(old: Schema, new: Schema) -> Schema:
    """Give what stands when a new schema has taken an old one's place."""
    return Schema(fields=_merge(old.fields, new.fields), strict=new.strict)


def _merge(old: Fields, new: Fields) -> Fields:
    kept = {
        name: msgspec.structs.replace(field, required=False)
        for name, field in old.items()
        if name not in new
    }
    return {name: _merge_field(old.get(name), field) for name, field in new.items()} | kept


def _merge_field(old: Field | None, new: Field) -> Field:
    if old is None or old.fields is None or new.fields is None:
        return new
    return msgspec.structs.replace(new, fields=_merge(old.fields, new.fields))


def find_breaks(old: Fields, new: Fields, place: str = "") -> Iterator[Break]:
    """Find the changes under which records that are there would no longer pass."""
    for name, field in new.items():
        path = f"{place}{name}"
        before = old.get(name)
        if before is None:
            if _must_be_given(field):
                yield Break(path, "records that are there lack it", "add a default")
        else:
            yield from _find_field_breaks(before, field, path)


def _find_field_breaks(old: Field, new: Field, path: str) -> Iterator[Break]:
    if not _takes(new.kind, old.kind):
        problem = f"records that are there hold {old.kind}, not {new.kind}"
        yield Break(path, problem, "choose another name")
        return
    if _must_be_given(new) and not old.required:
        yield Break(path, "records that are there may lack it", "add a default")
    if not _is_as_wide(old.least, new.least, upward=False):
        yield Break(path, "records that are there may be below its min", "lower it")
    if not _is_as_wide(old.most, new.most, upward=True):
        yield Break(path, "records that are there may be above its max", "raise it")
    if new.choices and not (old.choices and set(old.choices) <= set(new.choices)):
        yield Break(path, "records that are there may hold another choice", "keep all")
    if new.items is not None and (old.items is None or not _takes(new.items, old.items)):
        yield Break(path, "records that are there may hold other items", "widen it")
    if new.fields is not None:
        if old.fields is None:
            yield Break(path, "records that are there hold any object", "leave it open")
        else:
            yield from find_breaks(old.fields, new.fields, f"{path}.")


def _must_be_given(field: Field) -> bool:
    return field.required and field.default is msgspec.UNSET


def _takes(new: FieldKind, old: FieldKind) -> bool:
    """Say whether every value of one kind is one of the other, too."""
    wider = {old, "json"}
    if old in TEXTS:
        wider.add("string")
    if old == "integer":
        wider.add("number")
    return new in wider


def _is_as_wide(old: float | None, new: float | None, *, upward: bool) -> bool:
    if new is None:
        return True
    if old is None:
        return False
    return new >= old if upward else new <= old
