"""Stores in a simulated world that behave like a bucket, and the one in which queues have pages.

A bucket bills requests, has no clock to ask, and tells nobody of changes. Only its listings tell
when each record was written, in whole seconds of the server's clock.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from jobsync.components import Components
from jobsync.core.clock import Clock
from jobsync.core.codec import Json
from jobsync.errors import NotFound
from jobsync.stores.contract import Applied, Change, Head, Outcome, Record, Store
from jobsync.stores.memory import MemoryStore
from jobsync.testing.pages import PageLog
from jobsync.testing.world import World

__all__ = ["BilledStore", "PagedStore"]


class BilledStore(MemoryStore):
    """A store that behaves like a bucket.

    Args:
        name: as of a `MemoryStore`.
        components: time, randomness and events of the server.
    """

    is_billed = True

    def __init__(self, name: str = "", components: Components | None = None) -> None:
        super().__init__(name, components)
        self._written_at: dict[str, float] = {}

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, and remember when."""
        outcomes = await super().write(changes)
        now = float(int(self._clock.wall().seconds))
        for outcome in outcomes:
            if isinstance(outcome, Applied):
                self._written_at[outcome.record.key] = now
        return outcomes

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys, versions, times and marks."""
        return [
            Head(head.key, head.version, self._written_at[head.key], head.mark)
            for head in await super().heads(prefix, after=after, until=until, limit=limit)
        ]

    async def age(self, record: Record) -> float | None:
        """Return None, as a store without a clock does."""
        return await Store.age(self, record)

    async def now(self) -> None:
        """Return None, as a store without a clock does."""


class PagedStore(BilledStore):
    """The bucket that all nodes share, with queues in pages.

    The history has a row for each message that the commit of a page has changed; see `pages`.

    Args:
        world: provides the time and the history.

    Attributes:
        pages: what the commits have left.
    """

    is_atomic = False
    counts_by_wall = False
    """Whether setting its clock moves the ends of delays and claims."""

    def __init__(self, world: World) -> None:
        super().__init__(components=world.components)
        self._world = world
        self.pages = PageLog(world, lambda: self._clock.wall().seconds)

    @property
    def clock(self) -> Clock:
        """The clock of the server; may be replaced by one after a reboot."""
        return self._clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self._clock = clock

    async def wait(self, topic: str, timeout: float) -> None:
        """Wait for as long as requested: it tells nobody of changes."""
        del topic
        await asyncio.sleep(timeout)

    async def damage(self, name: str, value: Json) -> None:
        """Overwrite the value of a message behind the library's back.

        Raises:
            NotFound: no page has it.
        """
        key = self.pages.find(name)
        record = None if key is None else await self.get(key)
        if record is None or not isinstance(record.value, dict):
            raise NotFound("message", name)
        messages: Any = record.value["messages"]
        changed = [{**each, "value": value} if each["id"] == name else each for each in messages]
        await self.overwrite(record, {**record.value, "messages": changed})

    async def overwrite(self, record: Record, value: Json) -> None:
        """Replace a record behind the library's back."""
        after = await self.put(record, value, format=record.format)
        self._world.note(
            "",
            "commit",
            key=after.key,
            seq=after.seq,
            epoch=after.epoch,
            nonce=after.nonce,
            base=record.nonce,
            deleted=False,
            value=after.value,
        )
