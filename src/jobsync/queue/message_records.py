"""The messages of a queue as records of a resource, to read them as other records are read."""

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.codec import Json
from jobsync.core.keys import escape, unescape
from jobsync.core.messages import FINISHED
from jobsync.errors import Invalid
from jobsync.queue.backend import MessageInfo, QueuePart
from jobsync.queue.opening import open_directory
from jobsync.stores.contract import Change, Head, Outcome, Record, Store, Where
from jobsync.stores.decorator import StoreDecorator

__all__ = ["MessageRecords"]


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
        is_in_part = info.state == "dead" if self._part == "dead" else info.state not in FINISHED
        return info.queue == self._queue and is_in_part

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
