"""One connection to PostgreSQL: a statement is answered in time, or the connection is closed.

Whoever gives up, or is cancelled, gets away at once, and the connection with him: the answer
that is still to come would be taken for that of the next statement.

The loop listens to the connection for as long as it is open, and goes on with an exchange as
soon as the server has said something. It listens to a duplicate of the socket: libpq closes
its own whenever it likes, and a loop must not be left with a number that is somebody else's.
"""

import asyncio
import os
import select
from typing import Any, TypeVar
from weakref import finalize

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.abc import PQGen
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait, wait_async

from jobsync.stores.sql_access import Parameters

__all__ = ["PostgresConnection"]

T = TypeVar("T")

_WAKE = 10.0
"""Seconds after which psycopg looks up while it waits."""


class PostgresConnection(AsyncConnection[TupleRow]):
    """A connection that closes at once when its caller gives up.

    psycopg would ask the server to cancel, and wait for the answer: too long for a caller
    whose lease is running out, and no use when the network is gone. It would also begin and
    end to listen, and set a timer, for each statement: half of what a statement costs us.
    """

    patience = 30.0
    """Seconds to wait for the answer to a statement; not to be changed after the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = asyncio.get_running_loop()
        try:
            self._ear = os.dup(self.pgconn.socket)
        except OSError as error:  # too many files are open
            self.pgconn.finish()
            raise psycopg.OperationalError(str(error)) from error
        self._close_ear = finalize(self, os.close, self._ear)
        self._close_ear.atexit = False
        self._is_listening = False
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        self._exchange: PQGen[Any] | None = None
        self._outcome: asyncio.Future[Any] | None = None
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._cursor: AsyncCursor[TupleRow] | None = None

    async def run(self, statement: str, parameters: Parameters) -> list[TupleRow]:
        """Run a statement, and give its rows.

        Raises:
            TimeoutError: no answer came within `patience` seconds.
        """
        # One timer for all, moved when it rings: most statements are over long before.
        self._deadline = self._loop.time() + self.patience
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._deadline, self._ring)
        # What repeats a statement remembers how its parameters are sent.
        cursor = self._cursor or self.cursor()
        await cursor.execute(statement, parameters)
        rows = await cursor.fetchall()
        # It remembers its rows too.
        self._cursor = cursor if len(rows) <= 1 else None
        return rows

    async def wait(
        self, gen: PQGen[T], interval: float | None = None, *args: Any, **kwargs: Any
    ) -> T:
        """Run an exchange with the server."""
        if interval is None and not args and not kwargs:
            return await self._carry_out(gen)
        # One that is limited in time, as waiting for notifications is, psycopg does best.
        self._stop_listening()
        try:
            wake = _WAKE if interval is None else interval
            return await wait_async(gen, self.pgconn.socket, wake, *args, **kwargs)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close it. Safe to repeat."""
        self._stop_listening()
        self._close_ear()
        if self._alarm is not None:
            self._alarm.cancel()
        await super().close()

    @property
    def is_stale(self) -> bool:
        """Whether the server has hung up since the last statement."""
        try:
            while not self.closed and self._poll.poll(0):
                self.pgconn.consume_input()
        except psycopg.OperationalError:
            return True
        return self.closed

    async def _carry_out(self, exchange: PQGen[T]) -> T:
        self._exchange = exchange
        self._outcome = outcome = self._loop.create_future()
        try:
            self._go_on(None)
            return await outcome  # type: ignore[no-any-return]
        except (asyncio.CancelledError, TimeoutError):
            await self.close()
            raise
        except OSError as error:  # the loop cannot listen
            raise psycopg.OperationalError(str(error)) from error
        finally:
            self._exchange = self._outcome = None

    def _go_on(self, ready: Ready | None) -> None:
        """Go on with the exchange, as far as that is possible without waiting."""
        exchange, outcome = self._exchange, self._outcome
        if exchange is None or outcome is None or outcome.done():
            # What nobody asked for is left to `is_stale`: the loop would come here again and again.
            self._stop_listening()
            return
        try:
            self._listen(next(exchange) if ready is None else exchange.send(ready))
        except StopIteration as end:
            outcome.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            outcome.set_exception(error)
            # Asked for here: perhaps he was cancelled just now.
            outcome.exception()

    def _listen(self, wanted: Wait) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._loop.add_reader(self._ear, self._go_on, Ready.R)
        if wanted & Wait.W:
            self._loop.add_writer(self._ear, self._write_on)

    def _write_on(self) -> None:
        self._loop.remove_writer(self._ear)
        self._go_on(Ready.W)

    def _stop_listening(self) -> None:
        # A loop that was closed listens to nothing.
        if self._is_listening and not self._loop.is_closed():
            self._is_listening = False
            self._loop.remove_reader(self._ear)
            self._loop.remove_writer(self._ear)

    def _ring(self) -> None:
        """Give up what has taken too long; else look again when that could be."""
        self._alarm = None
        if self._outcome is None or self._outcome.done():
            return
        if self._loop.time() < self._deadline:
            self._alarm = self._loop.call_at(self._deadline, self._ring)
        else:
            self._outcome.set_exception(TimeoutError())
            self._outcome.exception()
