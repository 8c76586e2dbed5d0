"""A quick look at records, which passes almost all that are right at a fraction of the cost.

What it passes, `conform` would pass too, and leave as it is. What it doubts may be right or
wrong: `conform` says which, and why.
"""

from types import GenericAlias
from typing import Annotated, Any, Literal, NotRequired, Optional, TypeAlias, TypedDict

import msgspec

from jobsync.core.codec import MAX_INTEGER, Json
from jobsync.core.schema import PATTERNS, Field, Fields

__all__ = ["FastValidator"]

JsonObjects: TypeAlias = list[dict[str, Json]]

# Given a name and keys: a function, because type checkers want to see the keys written out.
_make_dict: Any = TypedDict


class FastValidator:
    """Looks at records of one schema.

    Args:
        fields: what they look like.
    """

    def __init__(self, fields: Fields) -> None:
        self._defaults = {
            name: field.default
            for name, field in fields.items()
            if field.default is not msgspec.UNSET
        }
        wanted = _describe_object(fields)
        if any(isinstance(default, dict | list) for default in self._defaults.values()):
            # Records must not share what can be changed.
            wanted = None
        # A class, because msgspec analyses a class once and a bare type at every call.
        self._wanted: Any = wanted and msgspec.defstruct(
            "_Wanted", [("all", _list_of(wanted))], array_like=True
        )

    def passes(self, documents: JsonObjects) -> bool:
        """Fill in what is missing, and say whether all are surely right."""
        if self._wanted is None:
            return False
        for name, default in self._defaults.items():
            for document in documents:
                document.setdefault(name, default)
        try:
            msgspec.convert((documents,), self._wanted)
        except (msgspec.ValidationError, TypeError, UnicodeEncodeError):
            return False
        return True


def _describe_object(fields: Fields) -> Any:
    """Give the type of documents with such fields, or None if msgspec cannot look at them."""
    described = {name: _describe(field) for name, field in fields.items()}
    if None in described.values():
        return None
    return _make_dict(
        "_Document",
        {
            name: kind if fields[name].required else NotRequired[Optional[kind]]  # noqa: UP045 - a value
            for name, kind in described.items()
        },
    )


def _describe(field: Field) -> Any:
    if field.choices:
        return _describe_choices(field)
    if field.fields is not None:
        has_defaults = any(one.default is not msgspec.UNSET for one in field.fields.values())
        return None if has_defaults else _describe_object(field.fields)
    match field.kind:
        case "string" | "email" | "url" | "uuid":
            return _bound(str, field, "min_length", "max_length")
        case "number":
            return _bound(float, field, "ge", "le")
        case "integer":
            return _bound(int, field, "ge", "le")
        case "boolean":
            return bool
        case "array":
            items = Any if field.items is None else _describe(Field(kind=field.items))
            return items and _bound(_list_of(items), field, "min_length", "max_length")
        case "object":
            return dict[str, Any]
        case "json" if not field.required:
            return Any
        case _:
            # Dates need a calendar; and of "anything", null is no part where it is required.
            return None


def _list_of(items: Any) -> Any:
    return GenericAlias(list, (items,))


def _describe_choices(field: Field) -> Any:
    bounded = field.least is not None or field.most is not None
    return Literal[field.choices] if field.kind == "string" and not bounded else None


def _bound(kind: Any, field: Field, least: str, most: str) -> Any:
    """Add a field's bounds and its pattern to a type."""
    rules: dict[str, Any] = {}
    for name, bound in ((least, field.least), (most, field.most)):
        if bound is None:
            continue
        # Lengths and whole numbers have whole bounds; lengths none below 0.
        whole = type(bound) is int and abs(bound) <= MAX_INTEGER
        if not whole or (bound < 0 and name.endswith("length")):
            return None
        rules[name] = bound
    if field.kind in PATTERNS:
        rules["pattern"] = rf"\A(?:{PATTERNS[field.kind]})\Z"
    return Annotated[kind, msgspec.Meta(**rules)] if rules else kind
