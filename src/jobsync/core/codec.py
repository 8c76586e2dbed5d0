"""Values as strict JSON text.

A value either reads back equal from every store, or is refused before it is sent: no NaN, no
integer beyond ±2⁵³, no NUL, no lone surrogate, no bytes or dates that would change type. Two
conversions are allowed: tuples become lists, and a Decimal that equals a float becomes a number.
So do numbers and text of derived types. Whoever computes anything from a value that is about to be
stored converts it with `to_plain` first, so that it agrees with what is read back.
"""

import math
import sys
from collections.abc import Iterator
from itertools import chain
from types import GenericAlias
from typing import Annotated, Any, TypeAlias

import msgspec

from jobsync.errors import Corrupt, Invalid

__all__ = [
    "MAX_DEPTH",
    "MAX_INTEGER",
    "MAX_VALUE",
    "Json",
    "check_json",
    "check_text",
    "decode",
    "encode",
    "encode_all",
    "to_plain",
    "to_plain_all",
]

# A JSON value. `Any`, because a recursive union would make every reader narrow types that
# only a schema can promise.
Json: TypeAlias = Any

MAX_VALUE = 4 * 1024 * 1024
"""The largest encoded value, in bytes."""

MAX_INTEGER = 2**53
"""The largest integer that every JSON reader holds exactly."""

MAX_DEPTH = 64
"""How deep arrays and objects are nested in a value at most."""

_PLAIN_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN_KEYS = frozenset({str})
_PLAIN_OBJECTS = frozenset({dict})
_PLAIN_ARRAYS = frozenset({list})
_ARRAYS = frozenset({list, tuple})


def _plain(value: Any) -> str | int | float:
    """Return text or a number of a derived type, such as numpy's float64, as the base type."""
    if isinstance(value, str):
        return str.__str__(value)
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain, decimal_format="number")
_encode = _encoder.encode
_encode_lines = _encoder.encode_lines
_decode = msgspec.json.Decoder().decode


def _build_shallow_type() -> Any:
    """Return the type of shallow JSON: msgspec checks it much faster than `check_json`."""
    integer = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
    number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    scalar: Any = None | bool | integer | number | str
    nested = scalar
    for _ in range(6):
        nested = scalar | GenericAlias(list, (nested,)) | GenericAlias(dict, (str, nested))
    return nested


# Classes, because msgspec analyses a class once and a bare type at every call.
_Plain: Any = msgspec.defstruct("_Plain", [("value", _build_shallow_type())], array_like=True)
_Plains: Any = msgspec.defstruct(
    "_Plains", [("values", GenericAlias(list, (_build_shallow_type(),)))], array_like=True
)
_convert = msgspec.convert
# What msgspec raises for values that are not JSON, or that it cannot decide.
_CHECK_FAILURES = (msgspec.ValidationError, UnicodeEncodeError, AttributeError, TypeError)


def encode(
    value: Json, field: str = "value", *, limit: int = MAX_VALUE, max_depth: int = MAX_DEPTH
) -> bytes:
    """Return a value's JSON text.

    Args:
        value: the value.
        field: its name in errors.
        limit: the most bytes of the text.
        max_depth: how deep it may be nested; less if it is stored within another value.

    Raises:
        Invalid: it is not JSON, or larger than the limit; names the place within it.
    """
    depth = MAX_DEPTH - max_depth
    # A fast check passes almost every value; only the others are searched for the fault.
    try:
        # Unequal are tuples, which are allowed, and sets, which are not.
        if _convert((value,), _Plain).value != value and not _is_plain(value, _ARRAYS, depth):
            check_json(value, field, max_depth=max_depth)
        data = _encode(value)
    except _CHECK_FAILURES:
        check_json(value, field, max_depth=max_depth)
        data = _encode(value)
    if b"\\u0000" in data:
        check_json(value, field)
    if len(data) > limit:
        raise Invalid(
            field,
            f"{len(data):,} bytes",
            f"must be at most {limit:,} bytes",
            "store large content elsewhere and keep a reference here",
        )
    return data


def encode_all(values: list[Json], field: str = "value", *, limit: int = MAX_VALUE) -> list[bytes]:
    """Return the JSON texts of values, for a batch at half the cost of one by one.

    Raises:
        Invalid: a value is not JSON, or is too large; describes the first.
    """
    # One check of all of them; if it fails, each is checked by itself.
    if len(values) > 1:
        try:
            if _convert((values,), _Plains).values == values:
                lines = _encode_lines(values)
                # Each text ends in a line feed, and contains none.
                texts = lines[:-1].split(b"\n")
                if max(map(len, texts)) <= limit and b"\\u0000" not in lines:
                    return texts
        except _CHECK_FAILURES:
            pass
    return [encode(value, field, limit=limit) for value in values]


def decode(data: bytes | str, key: str) -> Json:
    """Read JSON text.

    Raises:
        Corrupt: it is not JSON; names its key.
    """
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Corrupt(key, f"not JSON ({error})") from error


def to_plain(value: Json, field: str = "value") -> Json:
    """Return a value as it is read back from a store; the same object if it is already so.

    Raises:
        Invalid: it contains something else than plain JSON, and no store can keep all of it.
    """
    return value if _is_plain(value) else _decode(encode(value, field))


def to_plain_all(values: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return objects as they are read back from a store, for a batch at a third of the cost.

    Raises:
        Invalid: one contains something else than plain JSON, and no store can keep all of it.
    """
    fields = chain.from_iterable(map(dict.values, values))
    names: Iterator[str] = chain.from_iterable(values)
    is_plain = (
        _PLAIN_OBJECTS.issuperset(map(type, values))
        and _PLAIN_SCALARS.issuperset(map(type, fields))
        and _PLAIN_KEYS.issuperset(map(type, names))
    )
    return values if is_plain else [to_plain(value) for value in values]


def _is_plain(value: Json, arrays: frozenset[type[Any]] = _PLAIN_ARRAYS, depth: int = 0) -> bool:
    """Whether a value has only the types that are read back, and is not nested too deeply.

    Args:
        value: the value.
        arrays: the types that may be in the place of a list.
        depth: how deep the value is within another.
    """
    kind = type(value)
    if kind is dict:
        items, has_text_keys = value.values(), _PLAIN_KEYS.issuperset(map(type, value))
    elif kind in arrays:
        items, has_text_keys = value, True
    else:
        return kind in _PLAIN_SCALARS
    if not has_text_keys or depth >= MAX_DEPTH:
        return False
    # Nearly all records are flat: one pass over the types, without a call for each.
    if _PLAIN_SCALARS.issuperset(map(type, items)):
        return True
    for item in items:
        # A call for each would double the cost.
        if type(item) not in _PLAIN_SCALARS and not _is_plain(item, arrays, depth + 1):
            return False
    return True


def check_json(
    value: Json, field: str = "value", depth: int = 0, *, max_depth: int = MAX_DEPTH
) -> None:
    """Check that JSON can carry a value unchanged.

    Raises:
        Invalid: names the place within the value.
    """
    if isinstance(value, str):
        check_text(value, field)
    elif isinstance(value, dict):
        _check_nesting(depth, field, max_depth)
        for name, item in value.items():
            if not isinstance(name, str):
                raise Invalid(field, name, "must have text as keys", "use str(key)")
            check_text(name, field)
            check_json(item, f"{field}.{name}", depth + 1, max_depth=max_depth)
    elif isinstance(value, list | tuple):
        _check_nesting(depth, field, max_depth)
        for i, item in enumerate(value):
            check_json(item, f"{field}[{i}]", depth + 1, max_depth=max_depth)
    elif value is not None:
        _check_scalar(value, field)


def _check_scalar(value: Json, field: str) -> None:
    if isinstance(value, int):
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise Invalid(field, value, "must be within ±2⁵³", "store it as text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Invalid(field, value, "must be finite", "store None or text instead")
    else:
        raise Invalid(
            field,
            value,
            f"must be JSON, and is {type(value).__name__}",
            "convert it to text, a number, a list or a dict first",
        )


def _check_nesting(depth: int, field: str, max_depth: int) -> None:
    if depth >= max_depth:
        raise Invalid(
            field[:60],
            "…",
            f"must not be nested deeper than {max_depth}",
            "flatten it, or store it as text",
        )


def check_text(text: str, field: str) -> None:
    """Check that every store can keep a text.

    Raises:
        Invalid: it contains NUL or a lone surrogate.
    """
    if "\0" in text:
        raise Invalid(
            field, text, "must not contain NUL: SQL text cannot hold it", "remove or encode it"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Invalid(
                field, text, "must not contain a lone surrogate", "decode it properly"
            ) from None
