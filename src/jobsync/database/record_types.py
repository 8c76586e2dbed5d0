"""The type of records or messages: a `Struct`, a dataclass, a `TypedDict` or a model of pydantic.

A value is written by its type's names and read by its type. What the library adds to a record (its
id, times and version) is left out where the type has no field for it. The schema of a type accepts
all that the type accepts: whoever writes without the type is checked by it.
"""

import enum
import typing
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar, cast

from msgspec import inspect as described

from jobsync.core.attributes import parse, render
from jobsync.core.codec import Json
from jobsync.core.schema import Field, FieldKind, Fields
from jobsync.core.typed_values import (
    build_converter,
    can_lose,
    check_type,
    count_typed,
    encode_value,
    find_loss,
    find_mismatch,
    is_model,
    keep_types,
)
from jobsync.database.document import LIBRARY_FIELDS
from jobsync.errors import Corrupt, Invalid, closest_name
from jobsync.safe_text import safe_name

__all__ = ["RecordType"]

T = TypeVar("T")

_ADDED = LIBRARY_FIELDS | {"id"}
"""What records have whether their type has it or not."""
_FIX = "pass a msgspec.Struct, a dataclass, a TypedDict or a pydantic model"
_TEXT = "would be read back as text"
_TEXT_FIX = "convert it to text first, or change the type"

_OBJECTS = (described.StructType, described.DataclassType, described.TypedDictType)
_LISTS = (
    described.ListType,
    described.SetType,
    described.FrozenSetType,
    described.VarTupleType,
    described.TupleType,
)
_KINDS: dict[type[described.Type], FieldKind] = {
    described.BoolType: "boolean",
    described.IntType: "integer",
    described.FloatType: "number",
    described.StrType: "string",
    described.BytesType: "string",
    described.DecimalType: "string",
    described.TimeType: "string",
    described.TimeDeltaType: "string",
    described.DateTimeType: "datetime",
    described.DateType: "date",
    described.UUIDType: "uuid",
    described.DictType: "object",
    **dict.fromkeys(_LISTS, "array"),
    **dict.fromkeys(_OBJECTS, "object"),
}


class _TypeField(NamedTuple):
    """A field of a type, under the name by which it is stored."""

    name: str
    kind: described.Type
    required: bool


class RecordType(Generic[T]):
    """How records or messages of one type are written, checked and read.

    Args:
        option: the option that it was passed as, for errors.
        kind: the type.

    Raises:
        Invalid: it is not such a type, or has a field that cannot be stored; names the field.
    """

    def __init__(self, option: str, kind: type[T]) -> None:
        self.name = safe_name(kind).rpartition(".")[2]
        self._class = dict if typing.is_typeddict(kind) else kind
        check_type(option, kind)
        shape = _describe(kind)
        if not (is_model(kind) or isinstance(shape, _OBJECTS)) or getattr(
            shape, "array_like", False
        ):
            raise Invalid(option, kind, "is not a type whose objects have named fields", _FIX)
        fields = _list_fields(kind)
        stored = [each for each in fields if each.name not in LIBRARY_FIELDS]
        # Parsed, because a schema has rules for names and ids.
        self.fields: Fields = parse(render(_build_schema(stored, (kind,))), f"{option} {self.name}")
        self._names = {each.name for each in fields}
        # A model has converters of its own.
        texts = [] if is_model(kind) else filter(_takes_text, fields)
        self._texts = {each.name for each in texts}
        self._can_lose = is_model(kind) or can_lose([each.kind for each in fields])
        config = getattr(kind, "model_config", {})
        self._is_open = isinstance(config, Mapping) and config.get("extra") == "allow"
        self._convert = build_converter(kind)

    def encode(self, value: T | Mapping[str, Json]) -> dict[str, Json]:
        """Return an object, or some of its fields, as they are stored; `decode` checks them.

        Raises:
            Invalid: it is neither, or has an unknown field, or cannot be stored.
        """
        is_mapping = isinstance(value, Mapping)
        if not (is_mapping or isinstance(value, self._class)):
            problem = f"must be {self.name} or a dict"
            raise Invalid("data", value, problem, f"write {self.name}(...)")
        fields: Any = dict(cast("Mapping[str, Any]", value)) if is_mapping else value
        try:
            values: dict[str, Json] = encode_value(fields)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's values may raise anything
            raise self._explain(error, fields if isinstance(fields, dict) else {}) from None
        if is_mapping:
            self._refuse_unknown(values)
            self._refuse_typed(fields)
        self._check_kept(keep_types(fields), values)
        if self._can_lose or not (is_mapping or type(value) is self._class):
            self._check_whole(fields, values)
        if values.get("id", "") is None:
            # It gets an id when it is stored.
            del values["id"]
        return values

    def encode_checked(self, value: T | Mapping[str, Json]) -> dict[str, Json]:
        """Return an object as it is stored.

        Raises:
            Invalid: it is not of this type; names the field.
        """
        values = self.encode(value)
        self.decode(values)
        return values

    def decode(self, values: Mapping[str, Json]) -> T:
        """Return an object from what is stored.

        Raises:
            Invalid: it is not of this type; names the field.
        """
        known = {
            name: value
            for name, value in values.items()
            if name in self._names or name not in _ADDED
        }
        try:
            return cast("T", self._convert((known,)).value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's type may raise anything
            raise self._explain(error, known) from None

    def read(self, key: str, values: Mapping[str, Json]) -> T:
        """Return an object from what is stored under a key.

        Raises:
            Corrupt: it is not of this type.
        """
        try:
            return self.decode(values)
        except Invalid as error:
            detail = f"it is not of type {self.name}: {error.field} {error.problem}"
            raise Corrupt(key, detail) from error

    def _refuse_unknown(self, values: Mapping[str, Json]) -> None:
        for name, value in values.items():
            if not (name in self._names or name in _ADDED or self._is_open):
                hint = closest_name(name, self._names)
                fix = f"did you mean {hint}?" if hint else f"use {', '.join(sorted(self._names))}"
                raise Invalid(name, value, f"is not a field of {self.name}", fix)

    def _refuse_typed(self, fields: Mapping[str, Any]) -> None:
        """Refuse a date, bytes or the like in fields that are read back as text."""
        for name in self._texts & fields.keys():
            if count_typed(keep_types(fields[name])):
                raise Invalid(name, fields[name], _TEXT, _TEXT_FIX)

    def _check_kept(self, kept: dict[str, Any], values: Mapping[str, Json]) -> None:
        """Check that what is stored is read back as what was passed, of `keep_types`.

        Raises:
            Invalid: a date, bytes or the like is where the type takes text, or anything.
        """
        if kept == values:
            return
        try:
            stored = self.decode(values)
        except Invalid:
            # These are some fields only, or whoever writes them finds out.
            return
        read = self.decode(kept)
        if count_typed(keep_types(read)) != count_typed(keep_types(stored)):
            raise Invalid(self.name, kept, f"has a field that {_TEXT}", _TEXT_FIX)

    def _check_whole(self, fields: Any, values: Mapping[str, Json]) -> None:
        """Check that all of an object, or of some of its fields, is read back.

        Raises:
            Invalid: some of it would be lost.
        """
        try:
            read: Any = self.decode(values)
        except Invalid:
            # These are some fields only, or whoever writes them finds out.
            read = fields
        if (loss := find_loss(fields, read)) is not None:
            raise Invalid(self.name, fields, *loss)

    def _explain(self, error: BaseException, values: Mapping[str, Any]) -> Invalid:
        path, value, problem = find_mismatch(error, values)
        return Invalid(path or self.name, value, problem, f"pass what {self.name} has")


def _describe(kind: Any) -> described.Type:
    """Return a type as msgspec describes it; what it does not know is of any type."""
    try:
        return described.type_info(kind)
    except Exception:  # noqa: BLE001 - a user's type may raise anything
        return described.AnyType()


def _list_fields(kind: Any) -> list[_TypeField]:
    """Return the fields of a type whose objects have named fields."""
    if is_model(kind):
        return [
            _TypeField(field.alias or name, _describe(field.annotation), field.is_required())
            for name, field in getattr(kind, "model_fields", {}).items()
        ]
    return _read_fields(_describe(kind))


def _read_fields(kind: described.Type) -> list[_TypeField]:
    if isinstance(kind, described.CustomType) and is_model(kind.cls):
        return _list_fields(kind.cls)
    fields = [
        _TypeField(field.encode_name, field.type, field.required)
        for field in getattr(kind, "fields", ())
    ]
    tag = getattr(kind, "tag_field", None)
    return [_TypeField(tag, described.AnyType(), required=False), *fields] if tag else fields


def _takes_text(field: _TypeField) -> bool:
    """Whether a field takes any text, or anything."""
    kind = field.kind
    while isinstance(kind, described.Metadata):
        kind = kind.type
    kinds = kind.types if isinstance(kind, described.UnionType) else [kind]
    texts = described.StrType | described.AnyType | described.NoneType
    return all(isinstance(each, texts) for each in kinds)


def _build_schema(fields: list[_TypeField], within: tuple[object, ...]) -> dict[str, Field]:
    """Return what a schema says of fields, of an object within objects of these types."""
    return {each.name: _build_field(each.kind, within, required=each.required) for each in fields}


def _build_field(kind: described.Type, within: tuple[object, ...], *, required: bool) -> Field:
    """Return what a schema says of a field: all values of its type pass, and perhaps others."""
    while isinstance(kind, described.Metadata):
        kind = kind.type
    if isinstance(kind, described.UnionType):
        others = [each for each in kind.types if not isinstance(each, described.NoneType)]
        is_nullable = len(others) < len(kind.types)
        inner = others[0] if len(others) == 1 else described.AnyType()
        return _build_field(inner, within, required=required and not is_nullable)
    if isinstance(kind, described.EnumType | described.LiteralType):
        return _build_choice(kind, required=required)
    own = getattr(kind, "cls", None)
    if getattr(kind, "array_like", False) or not (type(kind) in _KINDS or is_model(own)):
        # Null is JSON, and a required field must not be null.
        return Field(kind="json")
    if nested := _read_fields(kind):
        # A type may contain itself: then the inner object is not described.
        fields = None if own in within else _build_schema(nested, (*within, own))
        return Field(kind="object", required=required, fields=fields)
    least, most = _read_bounds(kind)
    items = _build_field(kind.item_type, within, required=True) if _has_items(kind) else None
    return Field(
        kind=_KINDS.get(type(kind), "object"),
        required=required,
        least=least,
        most=most,
        items=items.kind if items is not None and items.required else None,
    )


def _has_items(kind: described.Type) -> TypeGuard[described.ListType]:
    return hasattr(kind, "item_type")


def _read_bounds(kind: described.Type) -> tuple[float | None, float | None]:
    if isinstance(kind, (described.StrType, *_LISTS)):
        return getattr(kind, "min_length", None), getattr(kind, "max_length", None)
    if isinstance(kind, described.IntType | described.FloatType):
        return (
            kind.gt if kind.ge is None else kind.ge,
            kind.lt if kind.le is None else kind.le,
        )
    return None, None


def _build_choice(kind: described.EnumType | described.LiteralType, *, required: bool) -> Field:
    choices: list[Any] = (
        [each.value for each in kind.cls]
        if isinstance(kind, described.EnumType)
        else list(kind.values)
    )
    required = required and None not in choices
    choices = [each.value if isinstance(each, enum.Enum) else each for each in choices]
    choices = [each for each in choices if each is not None]
    if choices and all(type(each) is int for each in choices):
        return Field(kind="integer", required=required, choices=tuple(choices))
    if not all(isinstance(each, str) for each in choices):
        return Field(kind="json")
    # In the text of a schema these have a meaning.
    is_plain = all(each and each == each.strip() and not set(each) & set(",|") for each in choices)
    return Field(kind="string", required=required, choices=tuple(choices) if is_plain else ())
