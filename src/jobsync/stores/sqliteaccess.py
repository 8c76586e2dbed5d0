"""The narrow way into an SQLite store."""

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from jobsync.core.clock import Clock
from jobsync.errors import OutcomeUnknown
from jobsync.stores.sql.access import Parameters, SqliteAccess
from jobsync.stores.sqlitefile import CommitFailed, SqliteFile
from jobsync.stores.topics import Topics

__all__ = ["FileAccess"]

T = TypeVar("T")

_POLL = 0.05
_SYNC = 5.0
"""Seconds that a disk may take between a write and the end of its sync."""


class FileAccess(SqliteAccess):
    """Reads and writes one file.

    Args:
        file: which one.
        clock: this machine's.
    """

    def __init__(self, file: SqliteFile, clock: Clock) -> None:
        self.clock = clock
        self.path = file.path
        self._file = file
        self._log: tuple[int, int] | None = None
        self._asks_until = clock.mono()
        self._version = 0
        self._topics = Topics.at(str(file.path))

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return await self._file.read(query, parameters)

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction."""
        try:
            return await self._file.write(work)
        except CommitFailed as failed:
            raise OutcomeUnknown(place, str(failed)) from failed

    def wake(self, topic: str) -> None:
        """Let those who wait in this process look; others see that the file has changed."""
        self._topics.wake([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken here, or if anybody has changed the file."""
        give_up = self.clock.mono() + timeout
        seen = await self._look()
        while (left := give_up - self.clock.mono()) > 0:
            if await self._topics.wait(topic, min(_POLL, left)) or await self._look() != seen:
                return

    async def _look(self) -> int:
        """Give a number that changes with every commit; ask for it only if it may have.

        The log is written before a commit can be seen, and synced in between: whoever sees
        the log change asks for a while.
        """
        log, now = self._file.glance(), self.clock.mono()
        if log != self._log:
            self._log, self._asks_until = log, now + _SYNC
        if now < self._asks_until:
            ((self._version,),) = await self._file.read("PRAGMA data_version")
        return self._version
