"""huey on SQLite. The variant is "<workers> <seconds between polls> <backoff of polls>"."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from huey import SqliteHuey
from protocol import Message, OnStart, PeerProgram


class HueyQueue(PeerProgram):
    """A consumer with threads; results are not stored."""

    async def prepare(self) -> None:
        """Create the tables."""
        async with self.opened():
            pass

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the file."""
        logging.getLogger("huey").setLevel(logging.WARNING)
        path = urlsplit(self.url).path[1:]
        # Left as it is, SQLite's synchronous is FULL.
        self._huey = SqliteHuey(filename=path, results=False)
        self._on_start: OnStart = lambda: None

        def task(_: Message) -> None:
            self._on_start()

        self._task = self._huey.task()(task)
        yield
        self._huey.storage.close()

    async def enqueue_many(self, messages: list[Message]) -> None:
        """Enqueue one by one: there is no other way."""
        for message in messages:
            self._task(message)

    async def enqueue(self, message: Message) -> None:
        """Enqueue one message."""
        self._task(message)

    async def work(self, on_start: OnStart) -> None:
        """Handle messages until cancelled."""
        workers, delay, backoff = self.variant.split()
        self._on_start = on_start
        consumer = self._huey.create_consumer(
            workers=int(workers),
            periodic=False,
            initial_delay=float(delay),
            backoff=float(backoff),
        )
        consumer.start()
        try:
            await asyncio.Event().wait()
        finally:
            consumer.stop()

    async def is_drained(self, count: int) -> bool:  # noqa: ARG002 - it knows
        """Whether nothing is left. A huey deletes a message before its handler starts."""
        return len(self._huey) == 0


if __name__ == "__main__":
    HueyQueue.main()
