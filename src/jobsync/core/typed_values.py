"""How values of a type are written as JSON and read back.

Whatever msgspec knows can be stored (dataclasses, `TypedDict`, `Struct`, dates, `UUID`, `Decimal`,
enums), and models of pydantic, which is not imported here: they are known by their methods.

A date, a UUID or bytes are text in JSON. Where a type takes text, or anything, they are refused:
they would be read back as text. So is what would be lost: see `find_loss`.
"""

import dataclasses
import datetime as dt
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID  # noqa: TID251 - the type only

import msgspec

from jobsync.core.codec import Json
from jobsync.errors import Invalid
from jobsync.safe_text import format_error, safe_name

__all__ = [
    "Loss",
    "Mismatch",
    "build_converter",
    "can_lose",
    "check_type",
    "convert_value",
    "count_typed",
    "encode_value",
    "find_loss",
    "find_mismatch",
    "has_any",
    "is_model",
    "keep_types",
]

_KNOWN = "use types such as str, int, datetime, UUID, a dataclass or a pydantic model"
_AT = r"(?: - at `(?P<path>.+)`)?"
_EXPECTED = re.compile(rf"Expected (?P<wanted>.+?)(?:, got .+?)?{_AT}", re.DOTALL)
_MISSING = re.compile(rf"Object missing required field `(?P<name>.+?)`{_AT}", re.DOTALL)
_UNKNOWN = re.compile(rf"Object contains unknown field `(?P<name>.+?)`{_AT}", re.DOTALL)
_OTHER = re.compile(rf"(?P<text>.+?){_AT}", re.DOTALL)
_ROOT = "$[0]"
_KEY = "key` in `"
_TYPED = (
    *(bytes, bytearray, dt.datetime, dt.date, dt.time, dt.timedelta),
    *(UUID, Decimal),
)
"""What is text in JSON."""
_MINUTE = dt.timedelta(minutes=1)
_LOSING = (
    *(msgspec.inspect.DateTimeType, msgspec.inspect.TimeType),
    *(msgspec.inspect.StructType, msgspec.inspect.DataclassType, msgspec.inspect.CustomType),
)
"""The types of which some values lose something."""


class Mismatch(NamedTuple):
    """Why values are not of their type."""

    path: str
    """Of the wrong value; empty if it is not known."""
    value: object
    problem: str


class Loss(NamedTuple):
    """What would be lost of a value that is stored, and what to do."""

    problem: str
    fix: str


def encode_value(value: Any) -> Any:
    """Return a value as JSON; whatever its own methods raise passes."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encode_model)


def keep_types(value: Any) -> Any:
    """Return a value as `encode_value` does, but with keys, dates, bytes and the like as they are.

    Converted to a type, they are refused where it takes text.
    """
    return msgspec.to_builtins(value, builtin_types=_TYPED, enc_hook=_encode_model)


def count_typed(value: Any) -> int:
    """Return how many keys and values are not JSON, in what `keep_types` has returned.

    There are fewer once it was stored, if some were where a type takes anything.
    """
    if isinstance(value, dict):
        keys = sum(not isinstance(key, str) for key in value)
        return keys + sum(map(count_typed, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(count_typed, value))
    return int(isinstance(value, _TYPED))


def has_any(kind: Any) -> bool:
    """Whether a type, or one within it, takes anything."""
    described = msgspec.inspect.type_info(kind)
    return any(isinstance(each, msgspec.inspect.AnyType) for each in _walk(described, set()))


def can_lose(described: object) -> bool:
    """Whether `find_loss` may find anything in values of types, as msgspec describes them."""
    return any(isinstance(each, _LOSING) for each in _walk(described, set()))


def find_loss(value: object, read: object) -> Loss | None:
    """Return what would be lost of a value, which is read back as another.

    The seconds of a UTC offset, as zones had before they were counted in minutes; and the fields
    that a subclass adds to the type that is read.
    """
    if isinstance(value, (dt.datetime, dt.time)):
        offset = value.utcoffset()
        if offset is None or not offset % _MINUTE:
            return None
        fix = "convert it by astimezone(datetime.UTC), or remove the zone"
        return Loss(f"has the UTC offset {offset}, which would be stored without seconds", fix)
    if isinstance(value, (list, tuple)):
        others = read if isinstance(read, (list, tuple)) else value
        return next(filter(None, map(find_loss, value, others)), None)
    if isinstance(value, (set, frozenset)):
        return next(filter(None, map(find_loss, value, value)), None)
    fields = _read_fields(value)
    known = _read_fields(read)
    lost = set() if isinstance(value, dict) or isinstance(read, dict) else fields.keys() - known
    if known and lost:
        names, kinds = ", ".join(sorted(lost)), [safe_name(type(each)) for each in (value, read)]
        fix = f"annotate {kinds[0]}, or pass {kinds[1]}"
        return Loss(f"is {kinds[0]}, and would be read back as {kinds[1]} without {names}", fix)
    found = (find_loss(each, known.get(name, each)) for name, each in fields.items())
    return next(filter(None, found), None)


def _read_fields(value: Any) -> Mapping[Any, Any]:
    """Return the fields of an object, or the keys of a dict, with their values."""
    if isinstance(value, dict):
        return value
    kind = type(value)
    if issubclass(kind, msgspec.Struct):
        names = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        names = tuple(each.name for each in dataclasses.fields(kind))
    elif is_model(kind):
        names = tuple(getattr(kind, "model_fields", ()))
    else:
        return {}
    return {name: getattr(value, name, None) for name in names}


def convert_value(value: Json, kind: Any) -> Any:
    """Return a value of a type from JSON.

    Raises:
        msgspec.ValidationError: it is not of that type.
    """
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_decode_model)


def build_converter(kind: Any) -> Callable[[tuple[Json]], Any]:
    """Return what converts a tuple with JSON to an object whose `value` is of a type."""
    # A class, because msgspec analyses a class once and another type at every call.
    box = msgspec.defstruct("Box", [("value", kind)], array_like=True)
    return partial(convert_value, kind=box)


def check_type(name: str, kind: Any) -> None:
    """Check that values of a type can be stored and read back.

    Raises:
        Invalid: they cannot.
    """
    try:
        msgspec.json.Decoder(kind, dec_hook=_decode_model)
        described = msgspec.inspect.type_info(kind)
    except Exception as error:  # noqa: BLE001 - a user's type may raise anything
        problem = f"has an annotation that cannot be stored: {format_error(error)}"
        raise Invalid(name, kind, problem, _KNOWN) from None
    for each in _walk(described, set()):
        if isinstance(each, msgspec.inspect.CustomType) and not is_model(each.cls):
            problem = f"has an annotation that cannot be stored: {safe_name(each.cls)}"
            raise Invalid(name, kind, problem, _KNOWN)


def find_mismatch(error: BaseException, values: Mapping[str, Any]) -> Mismatch:
    """Return why values could not be encoded, or converted by `build_converter`."""
    if not isinstance(error, msgspec.ValidationError):
        problem = f"cannot be stored: {format_error(error)}"
        for name, value in values.items():
            if _is_unencodable(value):
                return Mismatch(name, value, problem)
        return Mismatch("", "…", problem)
    text = str(error)
    for pattern, problem in ((_MISSING, "is missing"), (_UNKNOWN, "is not a known field")):
        if found := pattern.fullmatch(text):
            return Mismatch(f"{_cut(found['path'])}.{found['name']}".strip("."), "…", problem)
    if expected := _EXPECTED.fullmatch(text):
        path, problem = _cut(expected["path"]), f"must be {expected['wanted']}"
        if _KEY in (expected["path"] or ""):
            problem = f"has a key that {problem}"
    else:
        other = _OTHER.fullmatch(text)
        path = _cut(other and other["path"])
        problem = f"is wrong: {other['text'] if other else text}"
        if refused := _find_model_error(error):
            steps, reason = refused
            path, problem = ".".join([path, *steps]).strip("."), f"is wrong: {reason}"
    return Mismatch(path, values.get(re.split(r"[.\[]", path, maxsplit=1)[0], "…"), problem)


def _cut(path: str | None) -> str:
    """Return a path of msgspec without the tuple around the values."""
    return (path or "").removeprefix(_KEY).removeprefix(_ROOT).removeprefix(".")


def _find_model_error(error: BaseException) -> tuple[list[str], str] | None:
    """Return the first place that a model of pydantic refuses, and the reason."""
    try:
        first = error.__cause__.errors()[0]  # type: ignore[union-attr]
        return [str(step) for step in first["loc"]], str(first["msg"])
    except Exception:  # noqa: BLE001 - another error, which has no such places
        return None


def _walk(node: object, seen: set[int]) -> Iterator[object]:
    """Yield a described type, and all types within it."""
    if isinstance(node, Sequence) and not isinstance(node, str):
        for each in node:
            yield from _walk(each, seen)
    elif isinstance(node, (msgspec.inspect.Type, msgspec.inspect.Field)) and id(node) not in seen:
        seen.add(id(node))
        yield node
        for name in node.__struct_fields__:
            yield from _walk(getattr(node, name), seen)


def is_model(kind: object) -> bool:
    """Whether a class is a model of pydantic, by its methods."""
    return callable(getattr(kind, "model_validate", None)) and callable(
        getattr(kind, "model_dump", None)
    )


def _encode_model(value: Any) -> Any:
    """Return a model of pydantic as JSON."""
    if is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True)
    raise NotImplementedError(f"it is of type {safe_name(type(value))}")


def _decode_model(kind: Any, value: Any) -> Any:
    """Return a model of pydantic from JSON."""
    if not is_model(kind):
        raise NotImplementedError
    # Its error is a ValueError, which msgspec reports with the place of the value.
    return value if isinstance(value, kind) else kind.model_validate(value)


def _is_unencodable(value: object) -> bool:
    try:
        encode_value(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's values may raise anything
        return True
    return False
