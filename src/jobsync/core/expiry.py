"""When a record expires, and what happens to it then. Pure.

A rule is stored in the definition of its resource, so every process computes the same expiry. There
are two kinds:

- With a `ttl` a record expires that many seconds after the time in a field, `_created_at` unless
  another is named.
- Without one, a field holds the time at which it expires.

A time is a number, in seconds since 1970, or text: a date (its beginning in UTC) or a date and time
in ISO 8601, in UTC if it names no zone. A record without a readable time does not expire. Neither
does one that was soft-deleted.

A record that is being moved to an archive has expired when its move began, whatever the rule says
now. So it stays due until the move is complete, also if its rule is changed meanwhile.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal, TypeAlias, get_args

import msgspec

from jobsync.core.clock import Seconds
from jobsync.core.codec import Json
from jobsync.core.schema import Field, Fields, Schema, conform, is_date, is_datetime
from jobsync.errors import Invalid, closest_name

__all__ = [
    "ARCHIVING",
    "LONGEST_TTL",
    "ON_EXPIRE",
    "RANK_LENGTH",
    "ExpiryOptions",
    "ExpiryRule",
    "OnExpire",
    "rank_of_time",
    "read_time",
    "render_time",
]

OnExpire: TypeAlias = Literal["hard-delete", "soft-delete", "archive", "callback"]

ON_EXPIRE: tuple[OnExpire, ...] = get_args(OnExpire)

ARCHIVING = "_archiving"
"""The field of a record that is being moved to an archive; its `at` is when the move began."""

LONGEST_TTL: Seconds = 1_000_000 * 86_400.0
"""The longest `ttl`. Two years, given in milliseconds by mistake, still pass."""

RANK_LENGTH = 15
"""Digits of a rank: milliseconds up to the year 33658."""

_EXPIRES_AT = "expires_at"
_CREATED_AT = "_created_at"
_LIBRARY_TIMES = (_CREATED_AT, "_updated_at")
_DELETED_AT = "deleted_at"
_IS_DELETED = "is_deleted"
_IS_DELETED_AS: dict[str, Json] = {"boolean": True, "json": True, "string": "true"}
"""What a soft-delete writes to a field of this name, by its type."""

_SOME_TIMES = (1_000_000_000.0, 4_000_000_000.0)
"""The years 2001 and 2096: a field that holds both holds all that a soft-delete writes."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Seconds = 10.0**RANK_LENGTH / 1000
_KINDS_OF_TIME = frozenset({"number", "integer", "string", "date", "datetime", "json"})
_KINDS_OF_MARK = frozenset({"number", "integer", "string", "datetime", "json"})


class ExpiryRule(msgspec.Struct, frozen=True, kw_only=True, tag="expiry", tag_field="kind"):
    """When the records of a resource expire, and what happens then.

    Attributes:
        ttl: seconds after the time in `field`; None if `field` is the expiry itself.
        field: where the time is; dots step into objects. By default `_created_at` with a `ttl`,
            and `expires_at` without.
        on_expire: what happens to an expired record.
        delete_field: what a soft-delete sets.
        archive_resource: where an archived record goes.
        keep_original_id: whether it keeps its id there.
    """

    ttl: Seconds | None = None
    field: str = ""
    on_expire: OnExpire = "hard-delete"
    delete_field: str | None = None
    archive_resource: str | None = None
    keep_original_id: bool = False

    def __post_init__(self) -> None:
        if not self.field:
            default = _EXPIRES_AT if self.ttl is None else _CREATED_AT
            msgspec.structs.force_setattr(self, "field", default)

    @property
    def kind(self) -> str:
        """What this is a rule of."""
        return "expiry"

    @property
    def name(self) -> str:
        """The name of its index; a resource has one at most."""
        return "expiry"

    def expires_at(self, document: Mapping[str, Json]) -> Seconds | None:
        """Return when a record expires, in seconds since 1970; None if it does not."""
        expires_at = self._compute(document)
        if (move := document.get(ARCHIVING)) is None:
            return expires_at
        began_at = read_time(_find(move, "at"))
        if expires_at is None or began_at is None:
            return began_at if expires_at is None else expires_at
        return min(expires_at, began_at)

    def _compute(self, document: Mapping[str, Json]) -> Seconds | None:
        """Return when a record expires by this rule alone."""
        if self.delete_field is not None and document.get(self.delete_field) is not None:
            return None
        start = read_time(_find(document, self.field))
        if start is None or self.ttl is None:
            return start
        return start + self.ttl

    def rank(self, document: Mapping[str, Json]) -> str | None:
        """Return the place of a record in the order of expiry; None if it does not expire."""
        expires_at = self.expires_at(document)
        return None if expires_at is None else rank_of_time(expires_at, is_rounded_up=True)

    @property
    def digest(self) -> str:
        """Eight digits that identify everything that decides the rank."""
        decisive = [None if self.ttl is None else float(self.ttl), self.field, self.delete_field]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:8]


class ExpiryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user has said about the expiry of one resource; None where nothing was said.

    `resolve` makes a rule of it, once the schema is known.
    """

    resource: str
    ttl: Seconds | None = None
    default_ttl: Seconds | None = None
    """The `ttl` if neither `ttl` nor a field with the expiry is given."""
    field: str | None = None
    on_expire: OnExpire = "hard-delete"
    delete_field: str | None = None
    archive_resource: str | None = None
    keep_original_id: bool = False

    def check_names(self) -> None:
        """Check the names of fields, as far as that is possible without a schema.

        Raises:
            Invalid: no schema has such a field, or it is not for users.
        """
        place = f"resources.{self.resource}"
        path = self.field or _CREATED_AT
        if path.startswith("_") and path not in _LIBRARY_TIMES:
            fix = f"use {' or '.join(_LIBRARY_TIMES)}"
            raise Invalid(f"{place}.field", path, "is a reserved name", fix)
        if "" in path.split("."):
            fix = "write 'name' or 'address.city'"
            raise Invalid(f"{place}.field", path, "must be a field name", fix)
        name = self.delete_field or _DELETED_AT
        if self.on_expire == "soft-delete" and (
            name.startswith("_") or "." in name or name in {"id", path, _IS_DELETED}
        ):
            problem = "cannot mark a deleted record"
            raise Invalid(f"{place}.delete_field", name, problem, f"use {_DELETED_AT}")

    def resolve(self, schema: Schema) -> ExpiryRule:
        """Return the rule for a resource with this schema.

        Raises:
            Invalid: the schema lacks a field, or a field cannot hold a time.
        """
        self.check_names()
        ttl, field = self._choose_time(schema.fields)
        place = f"resources.{self.resource}"
        self._check_field(schema, field)
        delete_field = None
        if self.on_expire == "soft-delete":
            delete_field = self.delete_field or _DELETED_AT
            _check_delete_field(f"{place}.delete_field", delete_field, field, schema)
            _check_is_deleted(place, schema.fields.get(_IS_DELETED))
        return ExpiryRule(
            ttl=ttl,
            field=field,
            on_expire=self.on_expire,
            delete_field=delete_field,
            archive_resource=self.archive_resource,
            keep_original_id=self.keep_original_id,
        )

    def _choose_time(self, fields: Fields) -> tuple[Seconds | None, str]:
        """Return the ttl and the field that decide."""
        if self.ttl is not None:
            return self.ttl, self.field or _CREATED_AT
        if self.field is not None:
            return None, self.field
        if _EXPIRES_AT in fields:
            return None, _EXPIRES_AT
        if self.default_ttl is not None:
            return self.default_ttl, _CREATED_AT
        raise Invalid(
            f"resources.{self.resource}",
            self.resource,
            f"has neither a ttl nor a field {_EXPIRES_AT} in its schema",
            f"pass default_ttl, or {{{self.resource!r}: {{'ttl': 3600}}}}",
        )

    def _check_field(self, schema: Schema, path: str) -> None:
        """Check that records can have a time in a field."""
        place = f"resources.{self.resource}.field"
        if path in _LIBRARY_TIMES or not schema.fields:
            return
        found = _find_field(schema.fields, path)
        if found is None:
            hint = closest_name(path, [*_list_paths(schema.fields), *_LIBRARY_TIMES])
            fix = f"did you mean {hint}?" if hint else f"add {path} to its attributes"
            raise Invalid(place, path, "is not in the schema", fix)
        if found.kind not in _KINDS_OF_TIME:
            fix = "use a field of the type datetime, date or number"
            raise Invalid(place, path, f"cannot hold a time: its type is {found.kind}", fix)


def read_time(value: Json) -> Seconds | None:
    """Return a time in seconds since 1970; None if the value is not a time."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Compared before it is converted: no float is as large as some whole numbers.
        return float(value) if abs(value) <= sys.float_info.max else None
    if not isinstance(value, str):
        return None
    # Hour 24 is valid in some versions of Python only, and all processes must agree.
    if not is_date(value) and not (is_datetime(value) and value[11:13] != "24"):
        return None
    time = datetime.fromisoformat(value)
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return (time - _EPOCH).total_seconds()


def render_time(now: Seconds, field: Field | None) -> Json:
    """Return a time as a field holds it: ISO 8601 in text, else seconds since 1970."""
    match None if field is None else field.kind:
        case "string" | "datetime":
            return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        case "integer":
            return int(now)
        case _:
            return round(now, 3)


def rank_of_time(time: Seconds, *, is_rounded_up: bool = False) -> str:
    """Return a time in milliseconds, with as many digits as every rank.

    Expiries are rounded up and the current time is rounded down, so that nothing seems due before
    it has expired.
    """
    clamped = min(max(time, 0.0), _LATEST) * 1000
    milliseconds = math.ceil(clamped) if is_rounded_up else math.floor(clamped)
    return f"{min(milliseconds, 10**RANK_LENGTH - 1):0{RANK_LENGTH}}"


def _find(document: Mapping[str, Json], path: str) -> Json:
    """Return the value of a field; None if it is missing."""
    value: Json = document
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _find_field(fields: Fields, path: str) -> Field | None:
    """Return what a schema says of a field; None if it has none."""
    name, _, rest = path.partition(".")
    field = fields.get(name)
    if field is None or not rest:
        return field
    if field.fields is not None:
        return _find_field(field.fields, rest)
    return Field(kind="json") if field.kind in {"object", "json"} else None


def _list_paths(fields: Fields, place: str = "") -> Iterator[str]:
    for name, field in fields.items():
        yield f"{place}{name}"
        yield from _list_paths(field.fields or {}, f"{place}{name}.")


def _check_delete_field(place: str, name: str, field: str, schema: Schema) -> None:
    """Check that a soft-delete can set a field, and that it is empty before."""
    if name == field:
        raise Invalid(place, name, "cannot mark a deleted record", f"use {_DELETED_AT}")
    described = schema.fields.get(name)
    if described is None:
        if schema.strict:
            hint = closest_name(name, schema.fields)
            fix = f"did you mean {hint}?" if hint else f"add {name}='datetime' to its attributes"
            raise Invalid(place, name, "is not in the schema, which is strict", fix)
        return
    if described.kind not in _KINDS_OF_MARK:
        fix = "use a field of the type datetime or number"
        raise Invalid(place, name, f"cannot hold a time: its type is {described.kind}", fix)
    if described.required or described.default not in (msgspec.UNSET, None):
        rule = "required" if described.required else "default"
        problem = f"marks every record as deleted: its schema says {rule}"
        raise Invalid(place, name, problem, f"use an optional field without {rule}")
    for time in _SOME_TIMES:
        _check_holds(place, name, described, render_time(time, described))


def _check_is_deleted(place: str, described: Field | None) -> None:
    """Check that a soft-delete can set `is_deleted`, if the schema has it."""
    if described is None:
        return
    if described.kind not in _IS_DELETED_AS:
        problem = f"has a field {_IS_DELETED} of the type {described.kind}, which cannot be set"
        raise Invalid(place, _IS_DELETED, problem, "use the type boolean, or another name")
    _check_holds(place, _IS_DELETED, described, _IS_DELETED_AS[described.kind])


def _check_holds(place: str, name: str, described: Field, value: Json) -> None:
    """Check that a schema accepts what a soft-delete writes."""
    _, problems = conform({name: described}, {name: value})
    if problems:
        problem = f"cannot hold what a soft-delete writes, {value!r}: {problems[0].problem}"
        raise Invalid(place, name, problem, "loosen its schema, or use another field")
