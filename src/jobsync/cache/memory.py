"""Answers in this process's memory: bounded in age and in number, the least recently used go first.

An answer is kept as bytes. Whoever gets it has a copy of their own, as from a store.
"""

import pickle
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import msgspec

from jobsync.core.clock import Mono, Seconds
from jobsync.database.readable_resource import Page
from jobsync.database.resource_records import DATA

__all__ = ["CacheStats", "MemoryCache"]


class CacheStats(msgspec.Struct, frozen=True):
    """What a cache has done since it was created, and how full it is."""

    hits: int
    """Records and listings that were answered without a request."""
    misses: int
    """Those that were read from the store."""
    size: int
    """Records that are kept, alone or in listings."""
    evictions: int
    """Records and listings that were removed to make room for others."""


class _Answer(msgspec.Struct, frozen=True, gc=False):
    """One answer."""

    copy: bytes
    size: int
    """How many records it has; at least 1."""
    asked_at: Mono


class MemoryCache:
    """Answers about the records of a database.

    Args:
        ttl: seconds after which an answer is not given any more.
        max_size: the largest number of records.
        resources: which resources it covers; all by default.
    """

    def __init__(
        self, *, ttl: Seconds, max_size: int, resources: Collection[str] | None = None
    ) -> None:
        self._ttl = ttl
        self._max_size = max_size
        self._covered = None if resources is None else {f"{DATA}{name}/" for name in resources}
        self._answers: OrderedDict[tuple[str, object], _Answer] = OrderedDict()
        self._records: dict[str, set[object]] = {}
        self._listings: dict[str, set[object]] = {}
        """The requests of each prefix: the keys of records, and listings apart from them."""
        self._size = self._hits = self._misses = self._evictions = 0

    @property
    def stats(self) -> CacheStats:
        """What it has done so far."""
        return CacheStats(self._hits, self._misses, self._size, self._evictions)

    def covers(self, prefix: str) -> bool:
        """Whether it keeps answers about the records under a prefix."""
        return self._covered is None or prefix in self._covered

    def find(self, prefix: str, request: object, now: Mono) -> Any:
        """Return a copy of an answer that is young enough; None if there is none."""
        answer = self._answers.get((prefix, request))
        if answer is not None and now - answer.asked_at < self._ttl:
            self._hits += 1
            self._answers.move_to_end((prefix, request))
            return pickle.loads(answer.copy)  # noqa: S301 - our own bytes, which never left
        self._misses += 1
        if answer is not None:
            self._remove(prefix, request)
        return None

    def keep(self, prefix: str, request: object, answer: object, asked_at: Mono) -> None:
        """Keep a copy of an answer, which is as old as its question."""
        self._remove(prefix, request)
        size = _measure(answer)
        if size > self._max_size:
            return
        while self._size + size > self._max_size:
            self._remove(*next(iter(self._answers)))
            self._evictions += 1
        copy = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        self._answers[prefix, request] = _Answer(copy, size, asked_at)
        self._requests_like(request).setdefault(prefix, set()).add(request)
        self._size += size

    def forget(self, prefix: str, keys: Collection[object]) -> None:
        """Forget the listings of a prefix, and these records."""
        for request in (*keys, *self._listings.get(prefix, ())):
            self._remove(prefix, request)

    def clear(self, prefix: str | None = None) -> None:
        """Forget all about a prefix, or everything."""
        for each in [prefix] if prefix is not None else {*self._records, *self._listings}:
            self.forget(each, list(self._records.get(each, ())))

    def _remove(self, prefix: str, request: object) -> None:
        answer = self._answers.pop((prefix, request), None)
        if answer is not None:
            self._size -= answer.size
            requests = self._requests_like(request)
            requests[prefix].discard(request)
            if not requests[prefix]:
                del requests[prefix]

    def _requests_like(self, request: object) -> dict[str, set[object]]:
        return self._records if isinstance(request, str) else self._listings


def _measure(answer: object) -> int:
    """Return how many records an answer has; at least 1."""
    items = answer.items if isinstance(answer, Page) else answer
    return max(1, len(items)) if isinstance(items, list) else 1
