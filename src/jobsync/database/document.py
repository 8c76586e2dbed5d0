"""One version of one record of a resource, as it was read or written."""

from collections.abc import Iterator, Mapping
from typing import Any

from jobsync.core.codec import Json
from jobsync.errors import Corrupt, closest_name
from jobsync.stores.contract import Record

__all__ = ["CREATED", "LIBRARYS", "UPDATED", "VERSION", "Document", "value_of"]

CREATED = "_created_at"
UPDATED = "_updated_at"
VERSION = "_version"

LIBRARYS = frozenset({CREATED, UPDATED, VERSION})
"""What the library adds to a record. Whoever writes may give it back; it is not looked at."""


def value_of(record: Record) -> dict[str, Json]:
    """Give what is stored of a record, without its version.

    Raises:
        Corrupt: it is no document.
    """
    value = record.value
    if not (isinstance(value, dict) and isinstance(value.get("id"), str)):
        raise Corrupt(record.key, "a record is an object with an id")
    return value


class Document(Mapping[str, Json]):
    """A record, readable as `d.user_id` and as `d["user_id"]`; it cannot be changed.

    Besides the record's own fields it has `id`; `_version`, which names this version and
    none other; `_created_at` and `_updated_at`, in seconds since 1970 by the writer's clock.
    A field that is called as a method of a mapping is (`items`, `keys`, `get`) is read as
    an item.

    Args:
        record: what the store holds.

    Raises:
        Corrupt: it is no document.
    """

    __slots__ = ("_record",)

    _record: Record

    def __init__(self, record: Record) -> None:
        value_of(record)
        object.__setattr__(self, "_record", record)

    def __getitem__(self, name: str) -> Json:
        if name == VERSION:
            return self._record.version
        try:
            return self._record.value[name]
        except KeyError:
            raise KeyError(self._lack(name)) from None

    def __getattr__(self, name: str) -> Any:
        # Asked only for what is no attribute. What is being unpickled has no record yet.
        if name == "_record" or name not in self:
            raise AttributeError(name if name == "_record" else self._lack(name))
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}={value!r}: a record that was read is not changed; use update")

    def __iter__(self) -> Iterator[str]:
        yield from self._record.value
        yield VERSION

    def __len__(self) -> int:
        return len(self._record.value) + 1

    def __contains__(self, name: object) -> bool:
        return name == VERSION or name in self._record.value

    def __reduce__(self) -> tuple[Any, ...]:
        return (Document, (self._record,))

    def __repr__(self) -> str:
        return f"Document({dict(self)})"

    def _lack(self, name: object) -> str:
        hint = closest_name(str(name), self)
        return f"the record has no {name!r}" + (f"; did you mean {hint}?" if hint else "")
