"""The records of a shelf in the order of their names, page by page, filtered and sorted.

Filters go down to the store: SQL drops what cannot match, and what is returned has passed
the reference matcher. What cannot be understood is reported and left out.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from jobsync.core import filters
from jobsync.core.codec import Json
from jobsync.core.filters import All, AnyOf, Compare, Equals, Exists, Filter, Not, Path
from jobsync.database.document import VERSION, Document
from jobsync.database.keyspace import Keyspace
from jobsync.errors import Invalid
from jobsync.events import Events
from jobsync.stores.contract import Record, Where
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["Listing", "Page", "SortKey", "arrange", "parse_sort"]


# The order of documents by some of their fields.
#
# A field is named as in a filter, with dots; a minus in front turns the order around. Values
# of different types sort by type: missing, null, false and true, numbers, text by code point,
# then everything else, which has no order of its own. Documents that tie stay as they were.


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


_RECORDS = 1000
_HEADS = 10_000
_MOST = 100_000


class Page(msgspec.Struct, frozen=True):
    """Some records, and where to go on."""

    items: list[Document]
    next: str | None
    """Pass it as `after`; None at the end."""


class Listing:
    """Reads a shelf in order.

    Args:
        shelf: what to read.
        events: where it is told what was left out.
    """

    def __init__(self, shelf: Keyspace, events: Events) -> None:
        self._shelf = shelf
        self._witness = CorruptionLog(shelf.prefix.rstrip("/"), events)

    async def walk(
        self, where: Where = None, *, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Give records one after the other, reading a page at a time."""
        _check_filter(where)
        after = ""
        left = limit
        while left is None or left > 0:
            size = _RECORDS if left is None else min(left, _RECORDS)
            records = await self._scan(where, after, size)
            for document in self._witness.read_all(Document, records):
                yield document
            if len(records) < size:
                return
            after = records[-1].key
            left = None if left is None else left - len(records)

    async def find(
        self,
        where: Where,
        *,
        sort: str | Sequence[str] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Document]:
        """Give the records that match, sorted and cut."""
        keys = parse_sort(sort)
        end = _check_cut(limit, offset)
        # What comes first is known only when all are known.
        found = [document async for document in self.walk(where, limit=None if keys else end)]
        return arrange(found, keys)[offset:end]

    async def find_ids(self, *, limit: int | None = None, offset: int = 0) -> list[str]:
        """Give names without reading records."""
        keys = await self._find_keys(_check_cut(limit, offset))
        return [self._shelf.name(key) for key in keys[offset:]]

    async def count(self, where: Where = None) -> int:
        """Count the records that match; without a filter, by their names alone."""
        if not where:
            return len(await self._find_keys(None))
        return sum([1 async for _ in self.walk(where)])

    async def page(self, where: Where, *, size: int, after: str | None) -> Page:
        """Give one page, and the name after which the next one begins."""
        _check_filter(where)
        if type(size) is not int or not 0 < size <= _MOST:
            raise Invalid("size", size, f"is not between 1 and {_MOST:,}", "ask page by page")
        if not (after is None or isinstance(after, str)):
            raise Invalid("after", after, "is no id", "pass the `next` of the page before")
        records = await self._scan(where, "" if after is None else self._shelf.key(after), size)
        more = len(records) == size
        return Page(
            self._witness.read_all(Document, records),
            self._shelf.name(records[-1].key) if more else None,
        )

    async def _find_keys(self, end: int | None) -> list[str]:
        keys: list[str] = []
        while end is None or len(keys) < end:
            size = _HEADS if end is None else min(end - len(keys), _HEADS)
            heads = await self._shelf.store.heads(
                self._shelf.prefix, after=keys[-1] if keys else "", limit=size
            )
            keys += [head.key for head in heads]
            if len(heads) < size:
                break
        return keys

    async def _scan(self, where: Where, after: str, size: int) -> list[Record]:
        return await self._shelf.store.scan(
            self._shelf.prefix, after=after, limit=size, where=where
        )


def _check_cut(limit: int | None, offset: int) -> int | None:
    """Give the place after the last that is wanted."""
    for name, number in (("limit", limit), ("offset", offset)):
        if number is not None and (type(number) is not int or number < 0):
            raise Invalid(name, number, "is not a count", "use 0 or more")
    return None if limit is None else offset + limit


def _check_filter(where: Where) -> None:
    """Refuse to look for a version, which is the store's and not in the document."""
    if where and _mentions(filters.parse(where), VERSION):
        raise Invalid("filter", VERSION, "cannot be looked for", "get the record and compare")


def _mentions(where: Filter, name: str) -> bool:
    match where:
        case All(parts) | AnyOf(parts):
            return any(_mentions(part, name) for part in parts)
        case Not(part):
            return _mentions(part, name)
        case Equals(path) | Compare(path) | Exists(path):
            return path[0] == name
