"""jobsync. The variant is "<concurrency> <prefetch>"; what is left out is the default."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from protocol import Message, OnStart, PeerProgram

from jobsync import Database, Document, QueuePlugin


class Jobsync(PeerProgram):
    """A queue on PostgreSQL or SQLite."""

    async def prepare(self) -> None:
        """Create the tables."""
        async with self.opened():
            pass

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connect."""
        chosen = map(int, self.variant.split())
        options: dict[str, Any] = dict(zip(("concurrency", "prefetch"), chosen, strict=False))
        async with Database(self.url) as database:
            self._queue = await database.use_plugin(QueuePlugin(resource="tasks", **options))
            yield

    async def enqueue_many(self, messages: list[Message]) -> None:
        """Enqueue a batch."""
        await self._queue.enqueue_many(messages)

    async def enqueue(self, message: Message) -> None:
        """Enqueue one message."""
        await self._queue.enqueue(message)

    async def work(self, on_start: OnStart) -> None:
        """Handle messages until cancelled."""

        async def handle(_: Document) -> None:
            on_start()

        self._queue.handler(handle)
        await asyncio.Event().wait()

    async def is_drained(self, count: int) -> bool:
        """Whether all messages are settled, which were `count`."""
        return self._queue.stats()["completed"] >= count


if __name__ == "__main__":
    Jobsync.main()
