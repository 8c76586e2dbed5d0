"""Report of stored data that cannot be decoded: it is skipped, left as it is, reported once."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import msgspec

from jobsync.errors import Corrupt, Invalid
from jobsync.events import Event, Events
from jobsync.stores.contract import Record, Store

__all__ = ["CorruptionLog", "RecordSetAside", "convert_record", "read_each", "read_existing"]


T = TypeVar("T")
R = TypeVar("R")


class RecordSetAside(Event, frozen=True, kw_only=True):
    """A record or a history entry cannot be decoded. It was skipped and left as it is."""

    name: ClassVar[str] = "store:record-set-aside"
    level: ClassVar[int] = logging.WARNING

    store: str
    key: str
    reason: str


class CorruptionLog:
    """Reports each record and entry that cannot be decoded, once for each reason."""

    def __init__(self, store: str, events: Events) -> None:
        self._store = store
        self._events = events
        self._reported: set[tuple[str, str]] = set()

    def read(self, decode: Callable[[R], T | None], stored: R) -> T | None:
        """Decode stored data; if it is corrupt, report it and return None."""
        try:
            return decode(stored)
        except Corrupt as corrupt:
            self.report(corrupt)
            return None

    def read_all(self, decode: Callable[[R], T | None], stored: Iterable[R]) -> list[T]:
        """Decode each item; leave out those that are None, or corrupt, which are reported."""
        return [value for item in stored if (value := self.read(decode, item)) is not None]

    def report(self, corrupt: Corrupt) -> None:
        """Report corrupt data that was skipped, unless it was reported before."""
        problem = (corrupt.key, corrupt.detail)
        if problem not in self._reported:
            self._reported.add(problem)
            self._events.emit(
                RecordSetAside(store=self._store, key=corrupt.key, reason=corrupt.detail)
            )


def convert_record(record: Record, kind: type[T]) -> T:
    """Return the value of a record, decoded.

    Raises:
        Corrupt: no version of this library wrote it.
    """
    try:
        return msgspec.convert(record.value, kind)
    except (msgspec.ValidationError, Invalid) as error:
        raise Corrupt(record.key, str(error)) from error


async def read_each(
    store: Store, keys: Sequence[str], report: Callable[[Corrupt], object]
) -> dict[str, Record | None]:
    """Read records, tombstones too, in one request unless one of them is corrupt.

    Corrupt records are reported and left out of the result.

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
    middle = len(keys) // 2
    return {
        **await read_each(store, keys[:middle], report),
        **await read_each(store, keys[middle:], report),
    }


async def read_existing(
    store: Store, keys: Sequence[str], report: Callable[[Corrupt], object]
) -> dict[str, Record]:
    """Read the records that exist and are not deleted; see `read_each`."""
    found = await read_each(store, keys, report)
    return {key: record for key, record in found.items() if record and not record.deleted}
