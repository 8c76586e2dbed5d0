"""psycopg alone: one plain table, a claim of a hundred rows by UPDATE, then their DELETE.

The limit for a queue on PostgreSQL that claims before it handles. It renews no claims, counts no
attempts, keeps no errors, and loses what it has claimed when it dies.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg
from protocol import Message, OnStart, PeerProgram

_CONNECTIONS = 10
_TABLE = """
CREATE TABLE bare (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, claimed boolean NOT NULL DEFAULT false,
  payload text NOT NULL
);
CREATE INDEX ON bare (id) WHERE NOT claimed
"""
_CLAIM = """
UPDATE bare SET claimed = true WHERE id = ANY (ARRAY (
  SELECT id FROM bare WHERE NOT claimed ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED
)) RETURNING id, payload
"""
_DELETE = "DELETE FROM bare WHERE id = ANY (%s)"
_PUSH = """
WITH pushed AS (INSERT INTO bare (payload) VALUES (%s) RETURNING id)
SELECT pg_notify('bare', '') FROM pushed
"""


class BarePostgres(PeerProgram):
    """One connection to claim, one to listen, ten to push."""

    async def prepare(self) -> None:
        """Create the table."""
        async with await psycopg.AsyncConnection.connect(self.url) as connection:
            await connection.execute(_TABLE)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connect."""
        self._is_closing = threading.Event()
        self._is_empty = threading.Event()
        self._idle: asyncio.Queue[psycopg.AsyncConnection] = asyncio.Queue()
        async with AsyncExitStack() as stack:
            for _ in range(_CONNECTIONS):
                connecting = psycopg.AsyncConnection.connect(self.url, autocommit=True)
                self._idle.put_nowait(await stack.enter_async_context(await connecting))
            yield

    async def enqueue_many(self, messages: list[Message]) -> None:
        """COPY a batch."""
        connection = await self._idle.get()
        async with connection.cursor().copy("COPY bare (payload) FROM STDIN") as copy:
            for message in messages:
                await copy.write_row([json.dumps(message)])
        self._idle.put_nowait(connection)

    async def enqueue(self, message: Message) -> None:
        """Insert a row and notify."""
        connection = await self._idle.get()
        await connection.execute(_PUSH, [json.dumps(message)])
        self._idle.put_nowait(connection)

    async def work(self, on_start: OnStart) -> None:
        """Claim and delete on a thread."""
        try:
            await asyncio.to_thread(self._work, on_start)
        finally:
            self._is_closing.set()

    def _work(self, on_start: OnStart) -> None:
        connect = psycopg.connect
        with (
            connect(self.url, autocommit=True) as claimer,
            connect(self.url, autocommit=True) as listener,
        ):
            listener.execute("LISTEN bare")
            while not self._is_closing.is_set():
                while rows := claimer.execute(_CLAIM).fetchall():
                    for _, payload in rows:
                        json.loads(payload)
                        on_start()
                    claimer.execute(_DELETE, [[row[0] for row in rows]])
                self._is_empty.set()
                for _ in listener.notifies(timeout=0.5, stop_after=1):
                    pass

    async def is_drained(self, count: int) -> bool:  # noqa: ARG002 - it knows
        """Whether nothing is left."""
        return self._is_empty.is_set()


if __name__ == "__main__":
    BarePostgres.main()
