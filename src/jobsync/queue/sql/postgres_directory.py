"""All queues in a PostgreSQL schema, read-only.

On its own because `postgres` is large.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jobsync.components import Components
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import QueuePart
from jobsync.queue.directory import TOPIC
from jobsync.queue.sql import MessageGroup, SqlDirectory
from jobsync.queue.sql.postgres_statements import fill_in_schema
from jobsync.stores.sql import PostgresAccess, as_array

__all__ = ["PostgresQueueDirectory"]


class PostgresQueueDirectory(SqlDirectory):
    """All queues in a schema.

    Args:
        access: the connection to the tables.
        components: where unreadable messages are reported.
    """

    def __init__(self, access: PostgresAccess, components: Components) -> None:
        super().__init__(components)
        self._access = access
        self._sql = fill_in_schema(access.schema)

    async def _summarize(self) -> Sequence[MessageGroup]:
        return await self._run("summarize", {})

    async def _list_pauses(self) -> Sequence[tuple[str, float, str]]:
        return await self._run("list_pauses", {})

    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]:
        return await self._run("find", {"ids": as_array([*ids])})

    async def _find_head(self, queue: str, group: str) -> Sequence[Sequence[Any]]:
        return await self._run("find_head", {"queue": queue, "group": group})

    async def _list(
        self, queue: str, part: QueuePart, after: str, limit: int
    ) -> Sequence[Sequence[Any]]:
        parameters = {"queue": queue, "after": after, "limit": limit}
        return await self._run("list_dead" if part == "dead" else "list_live", parameters)

    async def _run(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Any]:
        try:
            return await self._access.run(self._sql[name], parameters, TOPIC)
        except OutcomeUnknown as unknown:
            raise Unavailable(TOPIC, unknown.detail) from unknown
