"""All queues of a store at a glance: how much is in which, who has it, and where a message is.

For whoever looks from outside and does not know a queue by name. Reads, and changes nothing.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.core.messages import MessageState
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import MessageInfo, Pause
from jobsync.queue.sql import sqlite_queries as sqlite_messages
from jobsync.queue.sql.common import look_at
from jobsync.queue.sql.postgres_queries import MessageStatements
from jobsync.queue.sql.sqlite import read_clock
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.sql import PostgresAccess, SqliteAccess, as_array

__all__ = [
    "Part",
    "PostgresQueueDirectory",
    "QueueContent",
    "QueueDirectory",
    "SqliteQueueDirectory",
]

_TOPIC = "queues"

Part: TypeAlias = Literal["queue", "dead"]
"""Of a queue: what is to be handled, or the dead letters."""

_Group: TypeAlias = tuple[str, MessageState, str, int, float]
"""A queue, a state, a session, how many, and when the first of them was pushed."""


class QueueContent(msgspec.Struct, kw_only=True):
    """What is in one queue."""

    counts: dict[MessageState, int] = {}
    """How many messages are in each state, of those states that there are."""
    oldest: float | None = None
    """When the oldest of those was pushed that nobody has claimed; Unix seconds."""
    claims: dict[str, int] = {}
    """How many messages each session has in hand."""
    pause: Pause | None = None


class QueueDirectory(ABC):
    """The queues of one store.

    Args:
        components: where to tell what cannot be read.
    """

    def __init__(self, components: Components) -> None:
        self._witness = CorruptionLog(_TOPIC, components.events)

    async def look(self) -> Mapping[str, QueueContent]:
        """Give what is in each queue that has messages or is paused, by name.

        Raises:
            Unavailable: the store does not answer.
        """
        return _sum_up(await self._look(), await self._find_pauses())

    async def find(self, ids: Collection[str]) -> Sequence[MessageInfo]:
        """Give messages by their ids, whichever queue they are in; nothing for what is not there.

        Raises:
            Unavailable: the store does not answer.
        """
        return look_at(await self._find(ids), self._witness)

    async def list(
        self, queue: str, part: Part, *, after: str, limit: int
    ) -> Sequence[MessageInfo]:
        """Give messages of a queue in the order of their ids, from after one on.

        Raises:
            Unavailable: the store does not answer.
        """
        return look_at(await self._list(queue, part, after, limit), self._witness)

    @abstractmethod
    async def _look(self) -> Sequence[_Group]: ...

    @abstractmethod
    async def _find_pauses(self) -> Sequence[tuple[str, float, str]]: ...

    @abstractmethod
    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]: ...

    @abstractmethod
    async def _list(
        self, queue: str, part: Part, after: str, limit: int
    ) -> Sequence[Sequence[Any]]: ...


class SqliteQueueDirectory(QueueDirectory):
    """The queues in a file.

    Args:
        access: the way to the file.
        components: as above.
    """

    def __init__(self, access: SqliteAccess, components: Components) -> None:
        super().__init__(components)
        self._access = access

    async def _look(self) -> Sequence[_Group]:
        return await self._access.read(sqlite_messages.LOOK)

    async def _find_pauses(self) -> Sequence[tuple[str, float, str]]:
        return await self._access.read(sqlite_messages.PAUSES)

    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]:
        named = {"ids": msgspec.json.encode([*ids]).decode(), **read_clock(self._access)}
        return await self._access.read(sqlite_messages.FIND, named)

    async def _list(
        self, queue: str, part: Part, after: str, limit: int
    ) -> Sequence[Sequence[Any]]:
        query = sqlite_messages.LIST_DEAD if part == "dead" else sqlite_messages.LIST_LIVE
        named = {"queue": queue, "after": after, "limit": limit, **read_clock(self._access)}
        return await self._access.read(query, named)


class PostgresQueueDirectory(QueueDirectory):
    """The queues in a schema.

    Args:
        access: the way to the tables.
        components: as above.
    """

    def __init__(self, access: PostgresAccess, components: Components) -> None:
        super().__init__(components)
        self._access = access
        self._sql = MessageStatements.within(access.schema)

    async def _look(self) -> Sequence[_Group]:
        return await self._run(self._sql.look)

    async def _find_pauses(self) -> Sequence[tuple[str, float, str]]:
        return await self._run(self._sql.pauses)

    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]:
        return await self._run(self._sql.find, {"ids": as_array([*ids])})

    async def _list(
        self, queue: str, part: Part, after: str, limit: int
    ) -> Sequence[Sequence[Any]]:
        query = self._sql.list_dead if part == "dead" else self._sql.list_live
        return await self._run(query, {"queue": queue, "after": after, "limit": limit})

    async def _run(self, statement: str, named: Mapping[str, Any] | None = None) -> Sequence[Any]:
        try:
            return await self._access.run(statement, named or {}, _TOPIC)
        except OutcomeUnknown as unknown:
            raise Unavailable(_TOPIC, unknown.detail) from unknown


def _sum_up(
    groups: Iterable[_Group], pauses: Iterable[tuple[str, float, str]]
) -> dict[str, QueueContent]:
    found: dict[str, QueueContent] = defaultdict(QueueContent)
    for queue, state, session, count, first in groups:
        content = found[queue]
        content.counts[state] = content.counts.get(state, 0) + count
        if state == "claimed":
            content.claims[session] = count
        elif state in {"ready", "waiting"}:
            content.oldest = first if content.oldest is None else min(content.oldest, first)
    for queue, since, reason in pauses:
        found[queue].pause = Pause(since, reason)
    return {name: found[name] for name in sorted(found)}
