"""Open one queue, or read all queues of a store; and how queues on SQL databases are read.

On SQL databases a message is a row; on PostgreSQL the messages of a claim are one row. The modules
`sqlite` and `postgres` implement both; their statements are in the `.sql` files beside them. Stores
without SQL keep messages in pages, see `jobsync.queue.pages`.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.codec import Json, check_text
from jobsync.core.keys import escape, unescape
from jobsync.core.messages import MessageState
from jobsync.errors import Invalid
from jobsync.queue.backend import MessageInfo, Pause, QueueBackend, QueueContent, QueuePart
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.message_rows import read_infos
from jobsync.stores.contract import Change, Head, Outcome, Record, Store, Where
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.scan import check_limit
from jobsync.stores.sql import PostgresAccess, SqliteAccess

__all__ = [
    "TOPIC",
    "MessageGroup",
    "MessageRecords",
    "QueueDirectory",
    "SqlDirectory",
    "open_backend",
    "open_directory",
]

TOPIC = "queues"
"""How errors and reports name the directory."""

MessageGroup: TypeAlias = tuple[str, MessageState, str, int, float]
"""Queue, state, session, number of messages, and when the first of them was pushed."""


def open_backend(
    store: Store, queue: str, components: Components, *, order: QueueOrder = "fifo"
) -> QueueBackend:
    """Return the backend of a queue in a store.

    Raises:
        Invalid: the store does not have this order.
    """
    if store.sql is not None and order != "fifo":
        problem = "is not possible on a database: its claims take the oldest rows"
        raise Invalid("order", order, problem, 'use "fifo", or a queue on S3')
    match store.sql:
        case SqliteAccess() as access:
            from jobsync.queue.sql.sqlite import SqliteBackend  # noqa: PLC0415 - imports this module

            return SqliteBackend(access, queue, components)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres import PostgresBackend  # noqa: PLC0415 - an extra

            return PostgresBackend(access, queue, components)
        case _:
            from jobsync.queue.pages.backend import PagesBackend  # noqa: PLC0415 - imports this

            return PagesBackend(store, queue, components, order=order)


def open_directory(store: Store, components: Components) -> "QueueDirectory":
    """Return the directory of a store's queues."""
    match store.sql:
        case SqliteAccess() as access:
            from jobsync.queue.sql.sqlite import (  # noqa: PLC0415 - imports this module
                SqliteQueueDirectory,
            )

            return SqliteQueueDirectory(access, components)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres import (  # noqa: PLC0415 - an extra
                PostgresQueueDirectory,
            )

            return PostgresQueueDirectory(access, components)
        case _:
            from jobsync.queue.pages.directory import (  # noqa: PLC0415 - imports this module
                PagesDirectory,
            )

            return PagesDirectory(store, components)


class QueueDirectory(ABC):
    """All queues of one store, read-only, for callers that do not know the queues' names."""

    @abstractmethod
    async def read_contents(self) -> Mapping[str, QueueContent]:
        """Return the content of each queue that has messages or is paused, by name.

        Raises:
            Unavailable: the store does not answer.
        """

    @abstractmethod
    async def find(self, ids: Collection[str]) -> Sequence[MessageInfo]:
        """Return the messages with these ids, in any queue; missing ones are left out.

        Raises:
            Unavailable: the store does not answer.
        """

    @abstractmethod
    async def list(
        self, queue: str, part: QueuePart, *, after: str, limit: int
    ) -> Sequence[MessageInfo]:
        """Return messages of a queue by id, starting after an id.

        Raises:
            Invalid: an argument is wrong.
            Unavailable: the store does not answer.
        """


class SqlDirectory(QueueDirectory):
    """All queues of a SQL database.

    Args:
        components: where unreadable messages are reported.
    """

    def __init__(self, components: Components) -> None:
        self._corruption_log = CorruptionLog(TOPIC, components.events)

    async def read_contents(self) -> Mapping[str, QueueContent]:
        """Return the content of each queue."""
        return _build_contents(await self._summarize(), await self._list_pauses())

    async def find(self, ids: Collection[str]) -> Sequence[MessageInfo]:
        """Return the messages with these ids."""
        # No other message has an id; some of these cannot even be sent.
        printable = [name for name in ids if name.isprintable()]
        return read_infos(await self._find(printable), self._corruption_log)

    async def list(
        self, queue: str, part: QueuePart, *, after: str, limit: int
    ) -> Sequence[MessageInfo]:
        """Return messages of a queue by id."""
        check_text(after, "after")
        check_limit(limit)
        return read_infos(await self._list(queue, part, after, limit), self._corruption_log)

    @abstractmethod
    async def _summarize(self) -> Sequence[MessageGroup]: ...

    @abstractmethod
    async def _list_pauses(self) -> Sequence[tuple[str, float, str]]: ...

    @abstractmethod
    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]: ...

    @abstractmethod
    async def _list(
        self, queue: str, part: QueuePart, after: str, limit: int
    ) -> Sequence[Sequence[Any]]: ...


def _build_contents(
    groups: Iterable[MessageGroup], pauses: Iterable[tuple[str, float, str]]
) -> dict[str, QueueContent]:
    contents: dict[str, QueueContent] = defaultdict(QueueContent)
    for queue, state, session, count, first in groups:
        content = contents[queue]
        content.counts[state] = content.counts.get(state, 0) + count
        if state == "claimed":
            content.claims[session] = count
        elif state in {"ready", "waiting"}:
            content.oldest = first if content.oldest is None else min(content.oldest, first)
    for queue, since, reason in pauses:
        contents[queue].pause = Pause(since, reason)
    return {name: contents[name] for name in sorted(contents)}


class MessageRecords(StoreDecorator):
    """The messages of one queue as records of a resource, read-only.

    A message is not a record: only workers change its state.

    Args:
        inner: the store of the queue.
        components: where unreadable messages are reported.
        queue: the queue's name.
        part: its unfinished messages, or its dead letters.
    """

    def __init__(self, inner: Store, components: Components, queue: str, part: QueuePart) -> None:
        super().__init__(inner)
        self._directory = open_directory(inner, components)
        self._queue = queue
        self._part = part

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read messages by their ids."""
        del tombstones
        found = await self._directory.find([unescape(key.rpartition("/")[2]) for key in keys])
        infos = {escape(info.id): info for info in found if self._contains(info)}
        return [
            None
            if (info := infos.get(key.rpartition("/")[2])) is None
            else _build_record(key, info)
            for key in keys
        ]

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List ids."""
        return [
            Head(record.key, record.version)
            for record in await self.scan(prefix, after=after, limit=limit)
            if not until or record.key < until
        ]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List messages by id."""
        wanted = filters.parse(where)
        records: list[Record] = []
        last = unescape(after.removeprefix(prefix)) if after else ""
        while len(records) < limit:
            page = await self._directory.list(self._queue, self._part, after=last, limit=limit)
            read = [_build_record(f"{prefix}{escape(info.id)}", info) for info in page]
            records += [record for record in read if filters.matches(wanted, record.value)]
            if len(page) < limit:
                break
            last = page[-1].id
        return records[:limit]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Refuse the write.

        Raises:
            Invalid: messages are not written as records.
        """
        self._refuse(changes)

    async def drop(self, keys: Sequence[str]) -> None:
        """Refuse the deletion.

        Raises:
            Invalid: messages are not deleted as records.
        """
        self._refuse(keys)

    def _contains(self, info: MessageInfo) -> bool:
        return info.queue == self._queue and (info.state == "dead") == (self._part == "dead")

    def _refuse(self, value: object) -> NoReturn:
        raise Invalid(
            self._queue,
            value,
            "are messages, which cannot be written as records",
            "use enqueue, redrive or purge",
        )


def _build_record(key: str, info: MessageInfo) -> Record:
    """Return a message under the documents' field names."""
    version = f"{info.state}-{info.deliveries}"
    value: dict[str, Json] = {
        "id": info.id,
        "status": info.state,
        "data": info.value,
        "attempts": info.attempts,
        "max_attempts": info.max_attempts,
        "queued_at": info.enqueued,
        "visible_at": info.due,
        "claimed_by": info.session or None,
        "claimed_at": info.claimed,
        "finished_at": info.finished,
        "error": info.errors[-1].error if info.errors else None,
        "errors": msgspec.to_builtins(info.errors),
    }
    return Record(key, value, version, info.deliveries + 1, 0, 1, version)
