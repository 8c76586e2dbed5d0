"""The narrow way into an SQLite store."""

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from jobsync.core.clock import Clock
from jobsync.errors import OutcomeUnknown
from jobsync.stores.sql.access import Parameters, SqliteAccess
from jobsync.stores.sqlitefile import CommitFailed, SqliteFile
from jobsync.stores.topics import Topics

__all__ = ["FileAccess"]

T = TypeVar("T")


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
        await self._file.wait(self._file.commits, timeout, partial(self._topics.wait, topic))
