"""How queues on SQL databases are read.

A message is a row, and the messages of a claim are one row. The modules `sqlite` and `postgres`
implement both; their statements are in the `.sql` files beside them.
"""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jobsync.components import Components
from jobsync.core.codec import check_text
from jobsync.core.messages import MessageState
from jobsync.queue.backend import MessageInfo, QueuePart
from jobsync.queue.directory import TOPIC, Pause, QueueContent, QueueDirectory
from jobsync.queue.sql.message_rows import read_infos
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.scan import check_limit

__all__ = ["MessageGroup", "SqlDirectory"]

MessageGroup: TypeAlias = tuple[str, MessageState, str, int, float]
"""Queue, state, session, number of messages, and when the first of them was pushed."""


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

    async def find_head(self, queue: str, group: str) -> MessageInfo | None:
        """Return the message of a group that blocks the others."""
        found = read_infos(await self._find_head(queue, group), self._corruption_log)
        return found[0] if found else None

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
    async def _find_head(self, queue: str, group: str) -> Sequence[Sequence[Any]]: ...

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
        elif state in {"ready", "waiting", "blocked"}:
            content.oldest = first if content.oldest is None else min(content.oldest, first)
    for queue, since, reason in pauses:
        contents[queue].pause = Pause(since, reason)
    return {name: contents[name] for name in sorted(contents)}
