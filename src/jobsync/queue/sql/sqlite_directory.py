"""All queues in an SQLite file, read-only."""

from collections.abc import Collection, Sequence
from typing import Any

from jobsync.components import Components
from jobsync.queue.backend import QueuePart
from jobsync.queue.sql import MessageGroup, SqlDirectory
from jobsync.queue.sql.sqlite_places import SQL, read_delay_clock, to_json
from jobsync.stores.sql import SqliteAccess

__all__ = ["SqliteQueueDirectory", "find_rows", "read_clock"]


class SqliteQueueDirectory(SqlDirectory):
    """All queues in a file.

    Args:
        access: the connection to the file.
        components: where unreadable messages are reported.
    """

    def __init__(self, access: SqliteAccess, components: Components) -> None:
        super().__init__(components)
        self._access = access

    async def _summarize(self) -> Sequence[MessageGroup]:
        return await self._access.read(SQL["summarize"])

    async def _list_pauses(self) -> Sequence[tuple[str, float, str]]:
        return await self._access.read(SQL["list_pauses"])

    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]:
        return await find_rows(self._access, ids)

    async def _find_head(self, queue: str, group: str) -> Sequence[Sequence[Any]]:
        parameters = {"queue": queue, "group": group, **read_clock(self._access)}
        return await self._access.read(SQL["find_head"], parameters)

    async def _list(
        self, queue: str, part: QueuePart, after: str, limit: int
    ) -> Sequence[Sequence[Any]]:
        query = SQL["list_dead" if part == "dead" else "list_live"]
        parameters = {"queue": queue, "after": after, "limit": limit, **read_clock(self._access)}
        return await self._access.read(query, parameters)


def read_clock(access: SqliteAccess) -> dict[str, float]:
    """Return the times from which a query computes when claims lapse and delays end."""
    clock = access.clock
    delay_boot, delay_now = read_delay_clock(clock)
    return {
        "now": clock.wall().seconds,
        "boot": clock.boot(),
        "mono": clock.mono().seconds,
        "delay_boot": delay_boot,
        "delay_now": delay_now,
    }


async def find_rows(access: SqliteAccess, ids: Collection[str]) -> Sequence[Sequence[Any]]:
    """Read messages of any queue by id, each with its progress or its result."""
    return await access.read(SQL["find"], {"ids": to_json([*ids]), **read_clock(access)})
