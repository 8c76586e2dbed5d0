"""What cannot be understood is set aside and reported, once for each fact."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

from jobsync.errors import Corrupt
from jobsync.events import Event, Events
from jobsync.stores.contract import Record, Store

__all__ = ["CorruptionLog", "RecordSetAside", "read_each"]


T = TypeVar("T")
R = TypeVar("R")


class RecordSetAside(Event, frozen=True, kw_only=True):
    """A record or a line of history cannot be read. It was skipped and left as it is."""

    name: ClassVar[str] = "store:record-set-aside"
    level: ClassVar[int] = logging.WARNING

    store: str
    key: str
    reason: str


class CorruptionLog:
    """Reports each unreadable thing once in the life of a store."""

    def __init__(self, store: str, events: Events) -> None:
        self._store = store
        self._events = events
        self._reported: set[tuple[str, str]] = set()

    def read(self, understand: Callable[[R], T], found: R) -> T | None:
        """Understand what was found; what cannot be is reported, and None."""
        try:
            return understand(found)
        except Corrupt as corrupt:
            self.report(corrupt)
            return None

    def read_all(self, understand: Callable[[R], T], found: Iterable[R]) -> list[T]:
        """Understand all that was found, without what cannot be."""
        return [thing for each in found if (thing := self.read(understand, each)) is not None]

    def report(self, corrupt: Corrupt) -> None:
        """Tell of something that was skipped."""
        fact = (corrupt.key, corrupt.detail)
        if fact not in self._reported:
            self._reported.add(fact)
            self._events.emit(
                RecordSetAside(store=self._store, key=corrupt.key, reason=corrupt.detail)
            )


# Several records in one request, of which one that cannot be read spoils no other.


async def read_each(
    store: Store, keys: Sequence[str], report: Callable[[Corrupt], object]
) -> dict[str, Record | None]:
    """Read records, tombstones too; what cannot be read is reported and left out.

    Raises:
        Unavailable: the store does not answer.
    """
    if not keys:
        return {}
    try:
        return dict(zip(keys, await store.get_many(keys, tombstones=True), strict=True))
    except Corrupt as corrupt:
        if len(keys) == 1:
            report(corrupt)
            return {}
    found: dict[str, Record | None] = {}
    for key in keys:
        found |= await read_each(store, [key], report)
    return found
