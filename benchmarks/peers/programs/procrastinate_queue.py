"""procrastinate. The variant is the concurrency."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from procrastinate import App, PsycopgConnector
from procrastinate.exceptions import ConnectorException
from protocol import Message, OnStart, PeerProgram

_CONNECTIONS = 10


class Procrastinate(PeerProgram):
    """An app with one task."""

    async def prepare(self) -> None:
        """Create the tables."""
        async with self.opened():
            await self._app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connect."""
        # It warns that its task is defined in the program that runs, which does no harm here.
        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        connector = PsycopgConnector(conninfo=self.url, min_size=1, max_size=_CONNECTIONS)
        self._on_start: OnStart = lambda: None
        self._app = App(connector=connector)

        async def task(**_: object) -> None:
            self._on_start()

        self._task = self._app.task(name="task")(task)
        async with self._app.open_async():
            yield

    async def enqueue_many(self, messages: list[Message]) -> None:
        """Enqueue a batch by one statement."""
        await self._task.batch_defer_async(*messages)

    async def enqueue(self, message: Message) -> None:
        """Enqueue one message."""
        await self._task.defer_async(**message)

    async def work(self, on_start: OnStart) -> None:
        """Handle messages until cancelled."""
        self._on_start = on_start
        await self._app.run_worker_async(
            concurrency=int(self.variant), delete_jobs="successful", install_signal_handlers=False
        )

    async def is_drained(self, count: int) -> bool:  # noqa: ARG002 - it knows
        """Whether nothing is left."""
        left = "SELECT NOT EXISTS (SELECT 1 FROM procrastinate_jobs) AS drained"
        try:
            row = await self._app.connector.execute_query_one_async(left)
        except ConnectorException:
            # All connections are in use.
            return False
        return bool(row["drained"])


if __name__ == "__main__":
    Procrastinate.main()
