"""The fields of settings: how values are converted to their types, and shown without secrets."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cache, wraps
from pathlib import PurePath
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from jobsync.core.secrets import MASK, Secret, redact
from jobsync.errors import Invalid, Misconfigured, closest_name

__all__ = [
    "Origin",
    "convert_value",
    "decapitalise",
    "describe_wrong_value",
    "fields",
    "mask_unknown",
    "mask_value",
    "refuse_unknown",
    "show_field",
    "show_settings",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_DESCRIPTIONS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Secret: "text",
    type(None): "nothing",
}
_NUMBERS = {bool, int, float, timedelta, type(None)}

_is_secret_name = re.compile("password|passwd|secret|token", re.IGNORECASE).search
_is_url_name = re.compile(r"(?:.*_)?url", re.IGNORECASE).fullmatch


class Origin(msgspec.Struct, frozen=True):
    """The source of a value."""

    kind: Literal["code", "config", "environment", "file", "default"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


def fields(kind: Any) -> tuple[FieldInfo, ...]:
    """Return the fields of a settings type, or of its instance."""
    return _find_fields(kind if isinstance(kind, type) else type(kind))


@cache
def _find_fields(kind: Any) -> tuple[FieldInfo, ...]:
    if not dataclasses.is_dataclass(kind):
        return msgspec.structs.fields(kind)
    return tuple(FieldInfo(f.name, f.name, f.type, f.default) for f in dataclasses.fields(kind))


def show_settings(settings: object) -> str:
    """Return the repr of settings, without secrets."""
    pairs = (f"{f.name}={show_field(f, getattr(settings, f.name))}" for f in fields(settings))
    return f"{type(settings).__name__}({', '.join(pairs)})"


def convert_value(field: FieldInfo, value: Any, origin: Origin) -> Any:
    """Convert a value to the field's type. Text that may come from a variable may be a number."""
    kinds = _kinds(field)
    # A config module often passes on a value from the environment.
    from_text = isinstance(value, str) and origin.kind in ("config", "environment")
    if from_text and bool in kinds and str not in kinds:
        value = _WORDS.get(value.lower(), value)
    if isinstance(value, timedelta) and float in kinds:
        value = value.total_seconds()
    problem = "must be finite"
    try:
        result = msgspec.convert(value, field.type, strict=not from_text, dec_hook=_make_secret)
        if not (isinstance(result, float) and not math.isfinite(result)):
            return result
    except msgspec.ValidationError as error:
        # msgspec quotes some values.
        detail = "" if _is_secret(field) else f": {decapitalise(str(error))}"
        problem = f"has a wrong value{detail}"
    except UnicodeEncodeError:
        # A lone surrogate, where a number is expected.
        problem = "has a wrong value"
    # Not raised within `except`: the error would carry the value as its context.
    raise describe_wrong_value(field, value, origin, problem, f"use {_describe(field)}")


def _make_secret(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    if isinstance(value, kind):
        return value
    raise msgspec.ValidationError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def decapitalise(text: str) -> str:
    """Return a text with a small first letter, to continue a sentence."""
    return text[:1].lower() + text[1:]


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    """Return the alternatives of a field's type, without their constraints."""
    kind = _bare(field.type)
    if get_origin(kind) in (Union, UnionType, Literal):
        return tuple(_bare(part) for part in get_args(kind))
    return (kind,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _describe(field: FieldInfo) -> str:
    """Return in words which values a field accepts."""
    words = (_DESCRIPTIONS.get(k, getattr(k, "__name__", repr(k))) for k in _kinds(field))
    return " or ".join(words)


def _is_secret(field: FieldInfo) -> bool:
    kinds = set(_kinds(field))
    # `total_tokens` is a number, not a secret.
    return Secret in kinds or bool(_is_secret_name(field.name) and not kinds <= _NUMBERS)


def show_field(field: FieldInfo, value: object) -> str:
    """Return the repr of a value, without secrets."""
    shown = _mask(field.name, value, secret=_is_secret(field))
    return MASK if shown == MASK else repr(shown)


_SHOWN = (int, float, Decimal, PurePath, date, time, timedelta)
"""Kinds of which the repr is shown. That of any other object may contain a URL with a password."""
# A path drops one of two slashes.
_is_url = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/").match


class _Hidden:
    """An object of which only the type is shown."""

    def __init__(self, kind: type) -> None:
        self._name = kind.__name__

    def __repr__(self) -> str:
        return self._name


def _mask(name: str, value: object, *, secret: bool) -> object:
    """Return a value in a form that may be shown."""
    if value is None or isinstance(value, bool):
        return value
    if secret or isinstance(value, Secret):
        return MASK
    if isinstance(value, str):
        return redact(value) if _is_url_name(name) or "://" in value else value
    # By the type: a named tuple, such as a parsed URL, has secrets in any of its parts.
    if type(value) in (list, tuple):
        return [_mask(name, item, secret=False) for item in cast("Iterable[object]", value)]
    if isinstance(value, dict):
        return {
            _mask_key(name, key): _mask(n, each, secret=bool(_is_secret_name(n)))
            for key, each in value.items()
            for n in [str(key)]
        }
    is_shown = isinstance(value, _SHOWN) and not _is_url(str(value))
    return value if is_shown else _Hidden(type(value))


def _mask_key(name: str, key: object) -> object:
    is_plain = isinstance(key, str | int)
    return _mask(name, key, secret=False) if is_plain else _Hidden(type(key))


def mask_value(name: str, value: object) -> object:
    """Return a value of a wrong type in a form that may be shown: it may contain a password."""
    return _mask(name, value, secret=bool(_is_secret_name(name)))


def mask_unknown(name: str, value: object, known: Iterable[str]) -> object:
    """Mask the value of an unknown name as carefully as that of the name it resembles."""
    hint = closest_name(name, known) or name
    return _mask(hint, value, secret=bool(_is_secret_name(name) or _is_secret_name(hint)))


def refuse_unknown(what: str) -> Callable[[_Function], _Function]:
    """Make a function refuse arguments that it does not have, and name the one that was meant.

    Args:
        what: the arguments belong to, for the error.
    """

    def decorate(function: _Function) -> _Function:
        names = list(inspect.signature(function).parameters)
        known = [name for name in names if name != "self"]

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name, value in kwargs.items():
                if name not in known:
                    hint = closest_name(name, known)
                    fix = f"did you mean {hint}?" if hint else f"use {', '.join(known)}"
                    shown = mask_unknown(name, value, known)
                    raise Invalid(name, shown, f"is not an argument of {what}", fix)
            return function(*args, **kwargs)

        return cast("_Function", call)

    return decorate


def describe_wrong_value(
    field: FieldInfo, value: object, origin: Origin, problem: str, fix: str
) -> Invalid | Misconfigured:
    """Return the error for the origin: `Invalid` for code, `Misconfigured` for all others."""
    shown = _mask(field.name, value, secret=_is_secret(field))
    if origin.kind in ("config", "environment", "file"):
        return Misconfigured(origin.where, shown, problem, fix)
    return Invalid(field.name, shown, problem, fix)
