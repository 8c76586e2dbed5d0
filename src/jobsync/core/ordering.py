"""The order of documents by some of their fields.

A field is named as in a filter, with dots; a minus in front turns the order around. Values
of different types sort by type: missing, null, false and true, numbers, text by code point,
then everything else, which has no order of its own. Documents that tie stay as they were.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from jobsync.core.codec import Json
from jobsync.core.filters import Path
from jobsync.errors import Invalid

__all__ = ["SortKey", "arrange", "parse_sort"]

T = TypeVar("T", bound=Mapping[str, Any])

Rank: TypeAlias = tuple[int, Any]


class SortKey(msgspec.Struct, frozen=True):
    """One field to sort by."""

    path: Path
    descending: bool = False


def parse_sort(given: str | Sequence[str] | None) -> tuple[SortKey, ...]:
    """Read `"name"`, `"-name"` or a list of such.

    Raises:
        Invalid: names what is no field.
    """
    if given is None:
        return ()
    return tuple(map(_parse_key, given if isinstance(given, list | tuple) else [given]))


def _parse_key(name: Any) -> SortKey:
    path = tuple(name.removeprefix("-").split(".")) if isinstance(name, str) else ()
    if not path or "" in path:
        raise Invalid("sort", name, "is no field", "write 'name', '-name' or 'address.city'")
    return SortKey(path, name.startswith("-"))


def arrange(documents: Iterable[T], keys: Sequence[SortKey]) -> list[T]:
    """Sort documents by some of their fields."""
    arranged = list(documents)
    # From the last key to the first: a stable sort keeps what the later keys arranged.
    for key in reversed(keys):
        arranged.sort(key=partial(_rank, key.path), reverse=key.descending)
    return arranged


def _rank(path: Path, document: Json) -> Rank:
    for step in path:
        if not isinstance(document, Mapping) or step not in document:
            return (0, 0)
        document = document[step]
    match document:
        case None:
            return (1, 0)
        case bool():
            return (2, document)
        case int() | float():
            return (3, document)
        case str():
            return (4, document)
        case _:
            return (5, 0)
