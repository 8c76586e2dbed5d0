"""Documents: the records of a resource as users read them, and their order.

A sort field is written as in a filter, with dots; a leading minus reverses the order. Values of
different types sort by type: missing, null, false and true, numbers, text by code point, then
everything else, which has no order of its own. Documents that tie keep the order of their ids.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from jobsync.core.codec import Json
from jobsync.core.filters import Path
from jobsync.database.archive import ARCHIVING
from jobsync.database.index_entries import ENTRIES
from jobsync.errors import Corrupt, Invalid, closest_name
from jobsync.safe_text import safe_repr
from jobsync.stores.contract import Record

__all__ = [
    "CREATED",
    "LIBRARY_FIELDS",
    "UPDATED",
    "VERSION",
    "Document",
    "RecordT",
    "SortKey",
    "as_list",
    "check_id",
    "parse_sort",
    "read_value",
    "sort_documents",
]

CREATED = "_created_at"
UPDATED = "_updated_at"
VERSION = "_version"

LIBRARY_FIELDS = frozenset({CREATED, UPDATED, VERSION})
"""The fields that the library adds to a record. They are ignored in what users write."""

_INTERNAL_FIELDS = frozenset({ARCHIVING, ENTRIES})
"""Fields of a stored record that its readers do not see."""

T = TypeVar("T")
M = TypeVar("M", bound=Mapping[str, Any])


def read_value(record: Record) -> dict[str, Json]:
    """Return the stored fields of a record, without its version.

    Raises:
        Corrupt: it is not a document.
    """
    value = record.value
    if not (isinstance(value, dict) and isinstance(value.get("id"), str)):
        raise Corrupt(record.key, "a record is an object with an id")
    return value


class Document(Mapping[str, Json]):
    """One version of a record, readable as `d.user_id` and as `d["user_id"]`; read-only.

    Besides the record's own fields it has `id`; `_version`, which identifies this version;
    `_created_at` and `_updated_at`, in seconds since 1970 by the writer's clock. A field with
    the name of a mapping's method (`items`, `keys`, `get`) is read as an item.

    Args:
        record: the stored record.

    Raises:
        Corrupt: it is not a document.
    """

    __slots__ = ("_record",)

    _record: Record

    def __init__(self, record: Record) -> None:
        # As in `read_value`: there is a document for each message.
        value = record.value
        if type(value) is not dict or type(value.get("id")) is not str:
            read_value(record)
        _set_record(self, record)

    def __getitem__(self, name: str) -> Json:
        if name == VERSION:
            return self._record.version
        if name not in self:
            raise KeyError(self._explain_missing(name))
        return self._record.value[name]

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes. While unpickling there is no record yet.
        if name == "_record" or name not in self:
            raise AttributeError(name if name == "_record" else self._explain_missing(name))
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}={safe_repr(value)}: documents are read-only; use update")

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._record.value if name not in _INTERNAL_FIELDS)
        yield VERSION

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        if name in _INTERNAL_FIELDS:
            return False
        return name == VERSION or name in self._record.value

    def __reduce__(self) -> tuple[Any, ...]:
        return (Document, (self._record,))

    def __repr__(self) -> str:
        return f"Document({dict(self)})"

    def _explain_missing(self, name: object) -> str:
        hint = closest_name(str(name), self)
        return f"the record has no {name!r}" + (f"; did you mean {hint}?" if hint else "")


if TYPE_CHECKING:
    # Type checkers know this module; nothing has to be installed.
    from typing_extensions import TypeVar as _TypeVar

    RecordT = _TypeVar("RecordT", default=Document)
    """What records or messages are read as: documents, unless they have a type."""
else:
    RecordT = TypeVar("RecordT")


_set_record = Document.__dict__["_record"].__set__
"""Sets the record of a new document, which is read-only afterwards."""


class SortKey(msgspec.Struct, frozen=True):
    """One field to sort by."""

    path: Path
    descending: bool = False


def parse_sort(sort: str | Sequence[str] | None) -> tuple[SortKey, ...]:
    """Parse `"name"`, `"-name"` or a list of such fields.

    Raises:
        Invalid: one of them is not a field name.
    """
    if sort is None:
        return ()
    return tuple(map(_parse_sort_key, sort if isinstance(sort, list | tuple) else [sort]))


def _parse_sort_key(name: Any) -> SortKey:
    path = tuple(name.removeprefix("-").split(".")) if isinstance(name, str) else ()
    if not path or "" in path:
        fix = "write 'name', '-name' or 'address.city'"
        raise Invalid("sort", name, "must be a field name", fix)
    return SortKey(path, name.startswith("-"))


def sort_documents(documents: Iterable[M], keys: Sequence[SortKey]) -> list[M]:
    """Return documents sorted by some of their fields."""
    result = list(documents)
    # From the last key to the first: a stable sort keeps the order of the later keys.
    for key in reversed(keys):
        result.sort(key=partial(_rank, key.path), reverse=key.descending)
    return result


def _rank(path: Path, document: Json) -> tuple[int, Any]:
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


def check_id(id: Any) -> str:
    """Return an id if it is text.

    Raises:
        Invalid: it is not.
    """
    if not isinstance(id, str):
        raise Invalid("id", id, "must be text", "use str(id)")
    return id


def as_list(name: str, items: Iterable[T]) -> Sequence[T]:
    """Return several items as a list.

    Raises:
        Invalid: it is a single text or record, or not iterable.
    """
    if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
        raise Invalid(name, items, "must be a list", "write [...]")
    return items if isinstance(items, list) else list(items)
