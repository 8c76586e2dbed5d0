"""Messages as records of a resource, for whoever looks at queues as at everything else.

Reads, and changes nothing: a message is no record, and its state is its worker's to change.
"""

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.codec import Json
from jobsync.core.keys import escape, unescape
from jobsync.errors import Invalid
from jobsync.queue.backend import MessageInfo
from jobsync.queue.opening import open_directory
from jobsync.queue.sql.directory import Part
from jobsync.stores.contract import Change, Head, Outcome, Record, Store, StoreDecorator, Where

__all__ = ["MessageRecords"]


class MessageRecords(StoreDecorator):
    """The messages of one queue, by their ids, in whatever place is asked for.

    Args:
        inner: where they are.
        components: where to tell what cannot be read.
        queue: which queue.
        part: what is to be handled, or the dead letters.
    """

    def __init__(self, inner: Store, components: Components, queue: str, part: Part) -> None:
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
        there = {escape(kept.id): kept for kept in found if self._holds(kept)}
        return [
            None if (kept := there.get(key.rpartition("/")[2])) is None else _record(key, kept)
            for key in keys
        ]

    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List ids."""
        return [
            Head(record.key, record.version)
            for record in await self.scan(prefix, after=after, limit=limit)
        ]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List messages in the order of their ids."""
        wanted = filters.parse(where)
        records: list[Record] = []
        last = unescape(after.removeprefix(prefix)) if after else ""
        while len(records) < limit:
            page = await self._directory.list(self._queue, self._part, after=last, limit=limit)
            read = [_record(f"{prefix}{escape(kept.id)}", kept) for kept in page]
            records += [record for record in read if filters.matches(wanted, record.value)]
            if len(page) < limit:
                break
            last = page[-1].id
        return records[:limit]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Refuse."""
        self._refuse(changes)

    async def drop(self, keys: Sequence[str]) -> None:
        """Refuse."""
        self._refuse(keys)

    def _holds(self, kept: MessageInfo) -> bool:
        is_dead = self._part == "dead"
        return kept.queue == self._queue and is_dead == (kept.state == "dead")

    def _refuse(self, what: object) -> NoReturn:
        raise Invalid(
            self._queue,
            what,
            "are messages, which cannot be written as records",
            "use enqueue, redrive or purge",
        )


def _record(key: str, kept: MessageInfo) -> Record:
    """Give a message in the words of the documents."""
    version = f"{kept.state}-{kept.deliveries}"
    value: dict[str, Json] = {
        "id": kept.id,
        "status": kept.state,
        "data": kept.value,
        "attempts": kept.attempts,
        "max_attempts": kept.max_attempts,
        "queued_at": kept.enqueued,
        "visible_at": kept.due,
        "claimed_by": kept.session or None,
        "claimed_at": kept.claimed,
        "finished_at": kept.finished,
        "error": kept.errors[-1].error if kept.errors else None,
        "errors": msgspec.to_builtins(kept.errors),
    }
    return Record(key, value, version, kept.deliveries + 1, 0, 1, version)
