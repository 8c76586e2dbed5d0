"""Transactions of handlers on PostgreSQL.

Each has a connection of its own. When its time is over the socket is shut down, on any thread,
and the server rolls back; the server's own timeouts do the same if this process is frozen. Once the
completion was sent the row of the claim is locked, so the server waits only shortly for COMMIT.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, IsolationLevel
from psycopg.errors import InFailedSqlTransaction
from psycopg.rows import tuple_row

from jobsync.core.codec import Json
from jobsync.errors import Invalid, OutcomeUnknown, Unavailable
from jobsync.queue.backend import Receipt, Settlement
from jobsync.queue.limits import QueueLimits
from jobsync.queue.sql.claims import UnsettledClaims
from jobsync.queue.sql.guarded_cursors import GuardedAsyncCursor, GuardedBlockingCursor
from jobsync.queue.sql.joined_connections import build_connection_error
from jobsync.queue.sql.postgres_places import PostgresPlaces, build_columns
from jobsync.queue.transaction_backend import (
    END_FIX,
    ClaimOutcome,
    OpenTransaction,
    TransactionBackend,
    build_ended_error,
)
from jobsync.stores.sql import Parameters, PostgresAccess, Steps, UserConnections
from jobsync.user_code import UserThreads

__all__ = ["PostgresTransactions"]

T = TypeVar("T")

_DEFAULT_LIMIT = 60.0
_LONGEST = 3600.0
_OPENING_TIME = 30.0
"""Seconds in which a transaction must begin."""
_END_TIME = 30.0
"""Seconds for the end of a transaction, after which the reply to COMMIT counts as lost."""
_LOCKED_IDLE = 5.0
"""Seconds that the server waits for COMMIT once the row of the claim is locked."""
_SERVER_MARGIN = 5.0
"""Seconds by which the server's limits are longer than those of the transaction."""
_FIX = "pass a psycopg connection to the database that the queue is in"
_FAILED = "has a statement that failed", "run it within connection.transaction()"

_BEGUN = """
SELECT txid_current()::text, set_config('idle_in_transaction_session_timeout', %(idle)s, true),
  set_config('statement_timeout', %(statement)s, true)
"""
_ENDING = """
SELECT txid_current()::text, set_config('idle_in_transaction_session_timeout', %(idle)s, true)
"""
_ENDED = "SELECT txid_status(%(number)s::bigint)"


class _PostgresTransaction(OpenTransaction):
    """A transaction on a connection; see `OpenTransaction`.

    Args:
        connection: psycopg's.
        block: its transaction.
        number: identifies the transaction on the server.
        limit: seconds after which it is rolled back.
        topic: the queue, for errors.
    """

    def __init__(self, connection: Any, block: Any, number: str, limit: float, topic: str) -> None:
        self._block = block
        self._number = number
        self._topic = topic
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._timer: asyncio.TimerHandle | None = None
        """Ends it if the server does not answer."""
        super().__init__(connection, limit)

    def cut(self) -> None:
        """Shut the socket down. Closing the connection here would race with the handler's use."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def check(self) -> None:
        """Check that it is the transaction that was begun: its number is the same."""
        connection, parameters = self.connection, {"idle": _to_milliseconds(_LOCKED_IDLE)}
        self._timer = asyncio.get_running_loop().call_later(_END_TIME, self.cut)
        try:
            ((number, _),) = await _execute(connection, _ENDING, parameters)
        except InFailedSqlTransaction as error:
            raise Invalid("connection", "psycopg", *_FAILED) from error
        except psycopg.Error as error:
            if connection.closed and not connection.broken:
                raise Invalid("connection", "psycopg", "was closed", END_FIX) from error
            raise Unavailable(self._topic, f"the transaction was rolled back: {error}") from error
        if number != self._number:
            raise build_ended_error("psycopg", "another one has begun")

    async def commit(self) -> None:
        """Commit it."""
        try:
            if isinstance(self.connection, AsyncConnection):
                await self._block.__aexit__(None, None, None)
            else:
                await _run(self._block.__exit__, None, None, None)
        except psycopg.Error as error:
            severity = error.diag.severity_nonlocalized
            if severity is None and not isinstance(error, psycopg.OperationalError):
                # psycopg's own: a block of the handler's is open, and nothing was sent.
                raise Invalid(
                    "connection", "psycopg", f"cannot commit: {error}", END_FIX
                ) from error
            # An ERROR comes before the commit. An error that ends the connection may come after it.
            if severity != "ERROR":
                raise OutcomeUnknown(self._topic, str(error).strip()) from error
            raise
        await self._check_committed()

    async def _check_committed(self) -> None:
        """Check what COMMIT has done: after a statement that failed it rolls back, in silence.

        A task of the handler's may have run that statement meanwhile. In a pipeline that the
        handler has left open, COMMIT is sent by this only.
        """
        try:
            ((status,),) = await _execute(self.connection, _ENDED, {"number": self._number})
        except psycopg.Error as error:
            raise OutcomeUnknown(self._topic, str(error).strip()) from error
        if status != "committed":
            raise Invalid("connection", "psycopg", *_FAILED)

    async def close(self) -> None:
        """Close the connection."""
        if self._timer is not None:
            self._timer.cancel()
        with suppress(psycopg.Error):
            if isinstance(self.connection, AsyncConnection):
                await self.connection.close()
            else:
                self.connection.close()
        self._socket.close()


class PostgresTransactions(TransactionBackend):
    """Transactions in the database of a queue.

    Args:
        access: the connection to the tables.
        sql: the statements on claims.
        topic: the queue, for errors.
        unsettled: the claims of which nothing was settled.
        places: the transactions that settle messages.
        grouped: the latest claims with groups.
        limits: of the queue.
    """

    access: PostgresAccess
    default_limit = _DEFAULT_LIMIT
    longest = _LONGEST

    def __init__(
        self,
        access: PostgresAccess,
        sql: Mapping[str, str],
        topic: str,
        unsettled: UnsettledClaims,
        places: PostgresPlaces,
        grouped: Collection[str],
        limits: QueueLimits,
    ) -> None:
        self.access = access
        self._places = places
        self._sql = sql
        self._topic = topic
        self._unsettled = unsettled
        self._grouped = grouped
        self._limits = limits

    async def begin(self, limit: float, *, is_blocking: bool) -> OpenTransaction:
        """Open a connection and begin.

        Raises:
            Invalid: the store opens no connections for users.
        """
        connections = self.access.user_connections
        if connections is None:
            problem = "has no transactions: its store opens no connections for users"
            raise Invalid("queue", self._topic, problem, "open the database by its URL")
        begin = self._begin_blocking if is_blocking else self._begin
        try:
            async with asyncio.timeout(_OPENING_TIME):
                return await begin(connections, limit)
        except TimeoutError as error:
            reason = f"no transaction began within {_OPENING_TIME:g} s"
            raise Unavailable(self._topic, reason) from error
        except psycopg.Error as error:
            raise Unavailable(self._topic, f"no transaction could begin: {error}") from error

    async def _begin(self, connections: UserConnections, limit: float) -> OpenTransaction:
        connection = await connections.open_user_connection()
        try:
            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
            block = connection.transaction()
            await block.__aenter__()
            rows = await _execute(connection, _BEGUN, _build_limits(limit))
            connection.cursor_factory = GuardedAsyncCursor
            return _PostgresTransaction(connection, block, rows[0][0], limit, self._topic)
        except BaseException:
            await connection.close()
            raise

    async def _begin_blocking(self, connections: UserConnections, limit: float) -> OpenTransaction:
        def begin() -> tuple[Any, Any, str]:
            connection = connections.open_blocking_connection()
            try:
                connection.isolation_level = IsolationLevel.READ_COMMITTED
                block = connection.transaction()
                block.__enter__()
                rows = _execute_blocking(connection, _BEGUN, _build_limits(limit))
                connection.cursor_factory = GuardedBlockingCursor
            except BaseException:
                connection.close()
                raise
            return connection, block, rows[0][0]

        opening = asyncio.get_running_loop().run_in_executor(_THREADS, begin)
        try:
            connection, block, number = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        return _PostgresTransaction(connection, block, number, limit, self._topic)

    async def complete_within(
        self, connection: object, receipt: Receipt, result: Json = None
    ) -> bool:
        """Complete a message in the caller's transaction."""
        del result
        if not isinstance(connection, AsyncConnection | Connection):
            raise build_connection_error(connection, "is not a psycopg connection", _FIX)
        is_completed = await _run_steps(connection, self.complete(receipt))
        is_awaited = self._limits.frees_others or receipt.claim in self._grouped
        if is_completed and is_awaited:
            # Others may wait for its end: they hear of it when it is committed.
            notification = {"channel": self.access.channel, "topic": self._topic}
            await _execute(connection, self._sql["notify_topic"], notification)
        return is_completed

    def complete(self, receipt: Receipt) -> Steps[bool]:
        """Complete a message; False if its claim has ended."""
        claim = receipt.claim
        if self._unsettled.remove(claim) == {receipt.id}:
            is_whole = yield self._sql["complete_claim"], {"claim": claim, "count": 1}
            if is_whole:
                return True
        outcome = yield self._sql["find_outcome"], {"claim": claim, "id": receipt.id}
        # One that was completed before is not this transaction's.
        if outcome != [("o",)]:
            return False
        columns = build_columns([Settlement(receipt=receipt, move="complete")])
        return receipt.id in (yield from self._places.settle(columns))

    async def read_outcome(self, receipt: Receipt) -> ClaimOutcome:
        """Read what became of a message, under the lock of its claim's row."""
        parameters = {"claim": receipt.claim, "id": receipt.id}
        rows = await self.access.run(self._sql["find_outcome"], parameters, self._topic)
        outcome = rows[0][0] if rows else None
        return "open" if outcome == "o" else "completed" if outcome in {"c", "f"} else "ended"


_THREADS = UserThreads("jobsync-transaction")


async def _run(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *arguments))


async def _execute(connection: Any, statement: str, parameters: Parameters) -> list[Any]:
    """Run a statement, whatever the handler has set on the connection; return its rows."""
    if not isinstance(connection, AsyncConnection):
        rows: list[Any] = await _run(_execute_blocking, connection, statement, parameters)
        return rows
    async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.encode(), parameters)
        return await cursor.fetchall()


async def _run_steps(connection: Any, steps: Steps[T]) -> T:
    """Run statements within the transaction of a connection."""
    try:
        statement, parameters = next(steps)
        while True:
            rows = await _execute(connection, statement, parameters)
            statement, parameters = steps.send(rows)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _execute_blocking(connection: Any, statement: str, parameters: Parameters) -> list[Any]:
    with Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.encode(), parameters)
        return cursor.fetchall()


def _build_limits(limit: float) -> dict[str, str]:
    """Return the server's limits: later than this process's own, whose error says more."""
    text = _to_milliseconds(limit + _SERVER_MARGIN)
    return {"idle": text, "statement": text}


def _to_milliseconds(seconds: float) -> str:
    return str(max(1, round(1000 * seconds)))


def _close_unwanted(opening: "asyncio.Future[tuple[Any, Any, str]]") -> None:
    """Close a connection whose caller was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
