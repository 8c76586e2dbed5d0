"""pgqueuer in batch mode, on asyncpg and uvloop. The variant is "<batch size> <managers>"."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from protocol import Message, OnStart, PeerProgram

_CONNECTIONS = 10


class Pgqueuer(PeerProgram):
    """Queue managers of one process, each with its own connection."""

    async def prepare(self) -> None:
        """Create the tables."""
        connection = await asyncpg.connect(self.url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connect."""
        async with asyncpg.create_pool(self.url, min_size=0, max_size=_CONNECTIONS) as self._pool:
            self._queries = Queries(AsyncpgPoolDriver(self._pool))
            yield

    async def enqueue_many(self, messages: list[Message]) -> None:
        """Enqueue a batch by one statement."""
        count = len(messages)
        payloads = [json.dumps(message).encode() for message in messages]
        await self._queries.enqueue(["task"] * count, payloads, [0] * count)

    async def enqueue(self, message: Message) -> None:
        """Enqueue one message."""
        await self._queries.enqueue("task", json.dumps(message).encode())

    async def work(self, on_start: OnStart) -> None:
        """Handle messages until cancelled."""
        size, managers = map(int, self.variant.split())

        async def handle(_: Job) -> None:
            on_start()

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for _ in range(managers):
                connection = await asyncpg.connect(self.url)
                stack.push_async_callback(connection.close)
                manager = PgQueuer(AsyncpgDriver(connection))
                manager.entrypoint("task")(handle)
                group.create_task(manager.run(batch_size=size))

    async def is_drained(self, count: int) -> bool:  # noqa: ARG002 - it knows
        """Whether nothing is left."""
        drained = "SELECT NOT EXISTS (SELECT 1 FROM pgqueuer)"
        return bool(await self._pool.fetchval(drained))


if __name__ == "__main__":
    uvloop.install()
    Pgqueuer.main()
