"""Partitions: the records of a resource that have the same values in some fields.

    partitions={"by_region": ["region"], "by_day": {"fields": {"created": "date"}}}

A partition answers questions about equal values: of text, numbers, and true and false. A record
that lacks one of the fields, or has anything else in it, belongs to no partition of that name. As
in filters, `1` equals `1.0`, and neither `True` nor `"1"`.

A field may be cut: `date` keeps the first 10 characters of a text, `string|maxlength:2` the first
two. Records whose texts begin alike are then in one partition.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jobsync.core.codec import Json, check_text, to_plain
from jobsync.core.filters import All, Equals, Filter, find
from jobsync.core.keys import MAX_SEGMENT, escape
from jobsync.errors import Invalid, closest_name

__all__ = ["MAX_PARTITIONS", "Partition", "PartitionField", "choose_partition", "parse_partitions"]

_DATE_LENGTH = 10
_MAX_FIELDS = 8
MAX_PARTITIONS = 20
"""How many a resource has at most."""

_MAX_RANK = 80
"""Longer values are hashed, so that a key has room for the id of a record."""

_MAX_BYTES = MAX_SEGMENT // 3
"""As many bytes always fit into a key, however they are escaped."""

_STAMPS = ("_created_at", "_updated_at")
"""Fields that the library adds to a record, and whose values it stores in it."""

_PLAIN_TYPES = ("string", "number", "integer", "boolean", "email", "url", "uuid", "datetime")

_is_name = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}").fullmatch
_find_max_length = re.compile(r"string\|maxlength:([1-9][0-9]{0,3})").fullmatch


class PartitionField(msgspec.Struct, frozen=True):
    """A field whose values make partitions."""

    name: str
    """As in a filter, with dots for nested fields."""
    max_length: int | None = None
    """The number of characters that count; None for all."""

    @property
    def path(self) -> tuple[str, ...]:
        """The steps to the field."""
        return tuple(self.name.split("."))

    @property
    def type(self) -> str:
        """The type as users write it."""
        match self.max_length:
            case None:
                return "string"
            case length if length == _DATE_LENGTH:
                return "date"
            case length:
                return f"string|maxlength:{length}"

    def reduce(self, value: object) -> Json:
        """Return the part of a value that counts; None if it makes no partition."""
        match value:
            case bool():
                return value
            case float() if not math.isfinite(value):
                return None
            case float() if value.is_integer():
                return int(value)
            case int() | float():
                return value
            case str():
                return value[: self.max_length]
            case _:
                return None


class Partition(msgspec.Struct, frozen=True, tag="partition", tag_field="kind"):
    """A rule that divides records by the values of some fields."""

    name: str
    fields: tuple[PartitionField, ...]

    @property
    def kind(self) -> str:
        """What this is a rule of."""
        return "partition"

    @property
    def digest(self) -> str:
        """Differs between rules that divide records in different ways."""
        rule = [[field.name, field.max_length] for field in self.fields]
        return _hash(msgspec.json.encode(rule), 8)

    def rank(self, document: Json) -> str | None:
        """Return the partition of a document, as a part of a key; None if it is in none."""
        return self._rank([find(document, field.path) for field in self.fields])

    def rank_of(self, values: Any) -> str:
        """Return the partition with some values, by the names of the fields.

        Raises:
            Invalid: a field is missing or unknown, or its value makes no partition.
        """
        names = [field.name for field in self.fields]
        if not isinstance(values, Mapping) or set(values) != set(names):
            example = ", ".join(f"{name!r}: …" for name in names)
            raise Invalid(
                "partition_values", values, f"must have {', '.join(names)}", f"pass {{{example}}}"
            )
        rank = self._rank([to_plain(values[name], f"partition_values.{name}") for name in names])
        if rank is None:
            problem = "must be text, numbers, True or False"
            raise Invalid("partition_values", dict(values), problem, "pass such values")
        return rank

    def _rank(self, values: Sequence[object]) -> str | None:
        reduced = [field.reduce(value) for field, value in zip(self.fields, values, strict=True)]
        if None in reduced:
            return None
        try:
            # JSON: unambiguous, and free of control characters, which end a rank in a key.
            text = msgspec.json.encode(reduced)
        except UnicodeEncodeError:
            # A lone surrogate: such a record cannot be stored.
            return None
        if len(text) <= _MAX_BYTES and len(rank := escape(text.decode())) <= _MAX_RANK:
            return rank
        # Texts start with a bracket, so none looks like this.
        return f"h{_hash(text, 40)}"


def _hash(data: bytes, digits: int) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]


def choose_partition(
    where: Filter, partitions: Sequence[Partition]
) -> tuple[Partition, str] | None:
    """Return the narrowest partition with all records that match a filter, and its rank."""
    wanted = dict(_list_equalities(where))
    for partition in sorted(partitions, key=lambda each: -len(each.fields)):
        if all(field.path in wanted for field in partition.fields):
            values = {field.name: wanted[field.path] for field in partition.fields}
            try:
                return partition, partition.rank_of(values)
            except Invalid:
                # Null, a list or an object: in no partition, though some record may have it.
                continue
    return None


def _list_equalities(where: Filter) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield the fields that have one value in every document that matches."""
    match where:
        case Equals(path, value):
            yield path, value
        case All(parts):
            for part in parts:
                yield from _list_equalities(part)


def parse_partitions(partitions: Any, known: Sequence[str] | None) -> tuple[Partition, ...]:
    """Return the partitions that a user describes.

    Args:
        partitions: by name: a field, a list of fields, or `{"fields": {field: type}}`.
        known: the fields of records; None if there may be others.

    Raises:
        Invalid: gives the name, the value and the fix.
    """
    if not isinstance(partitions, Mapping):
        fix = 'write {"by_region": ["region"]}'
        raise Invalid("partitions", partitions, "must be a dictionary", fix)
    if len(partitions) > MAX_PARTITIONS:
        problem = f"must be at most {MAX_PARTITIONS}: each costs a write"
        raise Invalid("partitions", len(partitions), problem, "keep those that are queried")
    return tuple(_parse_partition(name, rule, known) for name, rule in partitions.items())


def _parse_partition(name: Any, rule: Any, known: Sequence[str] | None) -> Partition:
    if not (isinstance(name, str) and _is_name(name)):
        fix = "use a letter, then up to 49 letters, digits, _ and -"
        raise Invalid("partitions", name, "must have valid names", fix)
    title = f"partitions.{name}"
    fields = rule
    if isinstance(rule, Mapping):
        fields = rule["fields"] if rule.keys() == {"fields"} else None
    if isinstance(fields, str):
        fields = [fields]
    if isinstance(fields, list | tuple):
        fields = dict.fromkeys(fields, "string") if all(map(_is_text, fields)) else None
    if not isinstance(fields, Mapping) or not fields or len(fields) > _MAX_FIELDS:
        problem = f"must have 1 to {_MAX_FIELDS} fields"
        raise Invalid(title, rule, problem, 'write ["region"] or {"fields": {"region": "string"}}')
    parsed = [_parse_field(title, field, kind, known) for field, kind in fields.items()]
    return Partition(name, tuple(parsed))


def _parse_field(title: str, name: Any, kind: Any, known: Sequence[str] | None) -> PartitionField:
    if not _is_text(name) or "" in name.split("."):
        raise Invalid(title, name, "must be a field name", "write 'name' or 'address.city'")
    check_text(name, title)
    first = name.split(".")[0]
    if first.startswith("_") and first not in _STAMPS:
        fix = f"use a field of your own, or {' or '.join(_STAMPS)}"
        raise Invalid(title, name, "is not stored in the records", fix)
    if known is not None and first not in known:
        hint = closest_name(first, known)
        fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(sorted(known))}"
        raise Invalid(title, name, "is not a field of the records", fix)
    if kind == "date":
        return PartitionField(name, _DATE_LENGTH)
    if isinstance(kind, str) and (cut := _find_max_length(kind)):
        return PartitionField(name, int(cut.group(1)))
    if not (isinstance(kind, str) and kind in _PLAIN_TYPES):
        fix = f"use date, string|maxlength:10 or one of {', '.join(_PLAIN_TYPES)}"
        raise Invalid(f"{title}.{name}", kind, "is not a type of a partition", fix)
    return PartitionField(name)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
