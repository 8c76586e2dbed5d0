"""Schemas of a resource's records: checks, defaults and compatible changes. Pure.

A check lists every wrong field at once, and fills in defaults. Fields that the schema does not
describe are left as they are; `find_strays` finds them, for strict schemas.

Missing and null differ, except that an optional field may be either. A required field that is
missing or null gets its default, if it has one.

A schema may replace another under one rule: what the old one described and accepted, the new one
accepts. So records need no migration, and a process that knows only the old schema writes
nothing that the new one refuses. A change that breaks the rule is refused with the reason. A
field that was not described until now may hold anything in existing records; they are checked
when they are changed. A field that the new schema does not mention stays, as an optional one:
code of an earlier release that starts again beside a newer one removes nothing.
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
    "is_date",
    "is_datetime",
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
"""Kinds of text."""

SIZED = frozenset({*TEXTS, "array", "number", "integer"})
"""Kinds that `min` and `max` bound: the length of a text or an array, or a number itself."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """The type and the rules of one field."""

    kind: FieldKind
    required: bool = False
    default: Json | msgspec.UnsetType = msgspec.UNSET
    least: int | float | None = None
    most: int | float | None = None
    choices: tuple[Json, ...] = ()
    items: FieldKind | None = None
    """The kind of an array's elements; None is any."""
    fields: "Fields | None" = None
    """The fields of an object; None is any."""


Fields: TypeAlias = Mapping[str, Field]


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a resource's records. Without fields, any record is valid."""

    fields: Fields = {}
    strict: bool = False
    """Whether undescribed fields are refused."""


def conform(fields: Fields, record: Mapping[str, Json]) -> tuple[dict[str, Json], list[Problem]]:
    """Return the record with defaults filled in, and its problems."""
    problems: list[Problem] = []
    return _conform(fields, record, "", problems), problems


def find_strays(fields: Fields, record: Mapping[str, Json], place: str = "") -> Iterator[Problem]:
    """Find the fields that the schema does not describe."""
    for name, value in record.items():
        field = fields.get(name)
        if field is None:
            hint = closest_name(str(name), fields)
            problem = "is not in the schema" + (f": did you mean {hint}?" if hint else "")
            yield Problem(f"{place}{name}", value, problem, "strict")
        elif field.fields is not None and isinstance(value, Mapping):
            yield from find_strays(field.fields, value, f"{place}{name}.")


def _conform(
    fields: Fields, record: Mapping[str, Json], place: str, problems: list[Problem]
) -> dict[str, Json]:
    result = dict(record)
    for name, field in fields.items():
        value = result.get(name)
        if value is None:
            _fill_in(result, name, field, f"{place}{name}", problems)
        elif field.fields is not None and isinstance(value, Mapping):
            result[name] = _conform(field.fields, value, f"{place}{name}.", problems)
        else:
            _check(field, value, f"{place}{name}", problems)
    return result


def _fill_in(
    result: dict[str, Json], name: str, field: Field, path: str, problems: list[Problem]
) -> None:
    """Replace a missing or null value by its default, or report it if it is required."""
    if name in result and not field.required:
        return
    if field.default is not msgspec.UNSET:
        result[name] = copy.deepcopy(field.default)
        if field.fields is not None and field.default is not None:
            result[name], _ = conform(field.fields, result[name])
    elif field.required:
        problem = "must not be null" if name in result else "is missing"
        problems.append(Problem(path, None, problem, "required"))
    elif field.fields is not None:
        default, missing = conform(field.fields, {})
        # Defaults of all required fields make a default object.
        if default and not missing:
            result[name] = default


def _check(field: Field, value: Json, path: str, problems: list[Problem]) -> None:
    """Check a value that is not null."""
    if not _TESTS[field.kind](value):
        problems.append(_describe_wrong_kind(path, value, field.kind))
        return
    if field.choices and value not in field.choices:
        rule = f"enum:{','.join(map(str, field.choices))}"
        problems.append(Problem(path, value, "must be one of the choices", rule))
    if field.least is not None or field.most is not None:
        _check_size(field, value, path, problems)
    if field.items is not None:
        is_item = _TESTS[field.items]
        problems.extend(
            _describe_wrong_kind(f"{path}[{i}]", item, field.items)
            for i, item in enumerate(value)
            if not is_item(item)
        )


def _check_size(field: Field, value: Json, path: str, problems: list[Problem]) -> None:
    if isinstance(value, _NUMBERS):
        size: int | float | Decimal = value
        verb, unit = "be", ""
    else:
        size = len(value)
        verb, unit = "have", " characters" if isinstance(value, str) else " elements"
    if field.least is not None and size < field.least:
        problem = f"must {verb} at least {field.least}{unit}"
        problems.append(Problem(path, value, problem, f"min:{field.least}"))
    if field.most is not None and size > field.most:
        problem = f"must {verb} at most {field.most}{unit}"
        problems.append(Problem(path, value, problem, f"max:{field.most}"))


def _describe_wrong_kind(path: str, value: Json, kind: FieldKind) -> Problem:
    return Problem(path, value, f"must be {_WORDS[kind]}", kind)


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
"""Kinds of text that a regular expression defines."""

_is_email, _is_url, _is_uuid = (re.compile(pattern).fullmatch for pattern in PATTERNS.values())
_looks_like_date = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII).fullmatch
_looks_like_datetime = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:?\d\d)?", re.ASCII
).fullmatch


def is_date(text: str) -> bool:
    """Whether a text is a date such as 2026-01-31."""
    return bool(_looks_like_date(text)) and _parses(date.fromisoformat, text)


def is_datetime(text: str) -> bool:
    """Whether a text is a date and a time in ISO 8601."""
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
    "date": lambda value: isinstance(value, str) and is_date(value),
    "datetime": lambda value: isinstance(value, str) and is_datetime(value),
    "uuid": lambda value: isinstance(value, str) and _is_uuid(value),
}


class Break(msgspec.Struct, frozen=True):
    """A change of one field that existing records may not satisfy."""

    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} ({self.fix})"


def evolve(old: Schema, new: Schema) -> Schema:
    """Return the schema that results when a new one replaces an old one."""
    return Schema(fields=_merge(old.fields, new.fields), strict=new.strict)


def _merge(old: Fields, new: Fields) -> Fields:
    unmentioned = {
        name: msgspec.structs.replace(field, required=False)
        for name, field in old.items()
        if name not in new
    }
    return {name: _merge_field(old.get(name), field) for name, field in new.items()} | unmentioned


def _merge_field(old: Field | None, new: Field) -> Field:
    if old is None or old.fields is None or new.fields is None:
        return new
    return msgspec.structs.replace(new, fields=_merge(old.fields, new.fields))


def find_breaks(old: Fields, new: Fields, place: str = "") -> Iterator[Break]:
    """Find the changes that existing records may not satisfy."""
    for name, field in new.items():
        path = f"{place}{name}"
        before = old.get(name)
        if before is None:
            if _needs_value(field):
                yield Break(path, "existing records do not have it", "add a default")
        else:
            yield from _find_field_breaks(before, field, path)


def _find_field_breaks(old: Field, new: Field, path: str) -> Iterator[Break]:
    if not _accepts(new.kind, old.kind):
        problem = f"existing records hold {old.kind}, not {new.kind}"
        yield Break(path, problem, "choose another name")
        return
    if _needs_value(new) and not old.required:
        yield Break(path, "existing records may not have it", "add a default")
    if not _includes_bound(old.least, new.least, upward=False):
        yield Break(path, "existing records may be below its min", "lower it")
    if not _includes_bound(old.most, new.most, upward=True):
        yield Break(path, "existing records may be above its max", "raise it")
    if new.choices and not (old.choices and set(old.choices) <= set(new.choices)):
        yield Break(path, "existing records may hold another choice", "keep all")
    if new.items is not None and (old.items is None or not _accepts(new.items, old.items)):
        yield Break(path, "existing records may hold other items", "widen it")
    if new.fields is not None:
        if old.fields is None:
            yield Break(path, "existing records hold any object", "leave it open")
        else:
            yield from find_breaks(old.fields, new.fields, f"{path}.")


def _needs_value(field: Field) -> bool:
    return field.required and field.default is msgspec.UNSET


def _accepts(new: FieldKind, old: FieldKind) -> bool:
    """Whether every value of the old kind is one of the new kind, too."""
    wider = {old, "json"}
    if old in TEXTS:
        wider.add("string")
    if old == "integer":
        wider.add("number")
    return new in wider


def _includes_bound(old: float | None, new: float | None, *, upward: bool) -> bool:
    if new is None:
        return True
    if old is None:
        return False
    return new >= old if upward else new <= old
