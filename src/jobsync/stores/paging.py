"""Reads of all that a store has below a prefix, a page at a time, in the order of the keys."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from jobsync.stores.contract import Head, Record, Store, Where

__all__ = [
    "PAGE_SIZE",
    "drop_all",
    "head_all",
    "head_pages",
    "scan_all",
    "scan_pages",
    "split_pages",
]

PAGE_SIZE = 1000

_ALL_PAGE_SIZE = 10_000
"""Records in a page where all are needed at once: seldom more than one request."""

T = TypeVar("T")


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=_Keyed)


def scan_pages(
    store: Store,
    prefix: str,
    *,
    after: str = "",
    where: Where = None,
    size: int = PAGE_SIZE,
    limit: int | None = None,
) -> AsyncIterator[list[Record]]:
    """Yield records in pages that are not empty.

    Args:
        store: holds the records.
        prefix: of their keys.
        after: a key; only records with later ones.
        where: a filter.
        size: of a page.
        limit: the largest number of records; all by default.
    """

    def read(after: str, size: int) -> Awaitable[list[Record]]:
        return store.scan(prefix, after=after, limit=size, where=where)

    return _read_pages(read, after, size, limit)


def head_pages(
    store: Store, prefix: str, *, after: str = "", size: int = PAGE_SIZE, limit: int | None = None
) -> AsyncIterator[list[Head]]:
    """Yield heads in pages that are not empty; see `scan_pages`."""

    def read(after: str, size: int) -> Awaitable[list[Head]]:
        return store.heads(prefix, after=after, limit=size)

    return _read_pages(read, after, size, limit)


async def scan_all(store: Store, prefix: str) -> list[Record]:
    """Return all records, however many there are."""
    pages = scan_pages(store, prefix, size=_ALL_PAGE_SIZE)
    return [record async for page in pages for record in page]


async def head_all(store: Store, prefix: str) -> list[Head]:
    """Return the heads of all records, however many there are."""
    pages = head_pages(store, prefix, size=_ALL_PAGE_SIZE)
    return [head async for page in pages for head in page]


async def _read_pages(
    read: Callable[[str, int], Awaitable[list[K]]], after: str, size: int, limit: int | None
) -> AsyncIterator[list[K]]:
    left = sys.maxsize if limit is None else limit
    while left > 0:
        wanted = min(left, size)
        page = await read(after, wanted)
        if page:
            yield page
        if len(page) < wanted:
            return
        left, after = left - wanted, page[-1].key


async def drop_all(store: Store, prefix: str) -> int:
    """Remove all records below a prefix, also those that are written meanwhile; return how many."""
    count = 0
    while heads := await store.heads(prefix, limit=PAGE_SIZE):
        await store.drop([head.key for head in heads])
        count += len(heads)
    return count


def split_pages(items: Sequence[T], size: int = PAGE_SIZE) -> Iterator[Sequence[T]]:
    """Yield a sequence in parts."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
