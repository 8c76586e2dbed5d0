"""What cannot be understood is set aside and reported, once for each fact."""

import logging
from typing import ClassVar

from jobsync.errors import Corrupt
from jobsync.events import Event, Events

__all__ = ["RecordSetAside", "Witness"]


class RecordSetAside(Event, frozen=True, kw_only=True):
    """A record or a line of history cannot be read. It was skipped and left as it is."""

    name: ClassVar[str] = "store:record-set-aside"
    level: ClassVar[int] = logging.WARNING

    store: str
    key: str
    reason: str


class Witness:
    """Reports each unreadable thing once in the life of a store."""

    def __init__(self, store: str, events: Events) -> None:
        self._store = store
        self._events = events
        self._reported: set[tuple[str, str]] = set()

    def report(self, corrupt: Corrupt) -> None:
        """Tell of something that was skipped."""
        fact = (corrupt.key, corrupt.detail)
        if fact not in self._reported:
            self._reported.add(fact)
            self._events.emit(
                RecordSetAside(store=self._store, key=corrupt.key, reason=corrupt.detail)
            )
