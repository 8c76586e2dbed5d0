"""Transactions of handlers in an SQLite file.

A transaction blocks every other writer of the file, so it is short, and handlers of this process
have theirs one after the other. When its time is over another thread rolls it back, and the
connection refuses to write from then on: nothing that follows commits by itself.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from urllib.parse import quote

from jobsync.core.codec import Json
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import Receipt, Settlement
from jobsync.queue.sql.claims import UnsettledClaims
from jobsync.queue.sql.guarded_connection import GuardedConnection
from jobsync.queue.sql.joined_connections import SQLITE_FIX, build_connection_error
from jobsync.queue.sql.sqlite_claims import complete_claim, settle_claim
from jobsync.queue.sql.sqlite_places import SQL
from jobsync.queue.transaction_backend import (
    ClaimOutcome,
    OpenTransaction,
    TransactionBackend,
    build_ended_error,
)
from jobsync.stores.sql import SqliteAccess
from jobsync.stores.threads import ThreadPool

__all__ = ["SqliteTransactions", "open_transactions"]

_LONGEST = 5.0
"""Seconds for which a handler may block all other writers."""
_BUSY_SLICE = 1.0
_BUSY_TIMEOUT = 30.0
"""Seconds to wait for other writers: those of other processes take turns, and each is short."""
_THREADS = 4
"""One for the handler whose turn it is; others end transactions whose time was over."""
_SAVEPOINT = "jobsync_transaction"


class _SqliteTransaction(OpenTransaction):
    """A transaction in the file; see `OpenTransaction`.

    Args:
        connection: the connection.
        limit: seconds after which it is rolled back.
        topic: the queue, for errors.
        threads: where the file is used.
        release: called once others may write again.
    """

    def __init__(
        self,
        connection: GuardedConnection,
        limit: float,
        topic: str,
        threads: ThreadPool,
        release: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._threads = threads
        self._release = release
        super().__init__(connection, limit)

    def cut(self) -> None:
        """Roll it back at once."""
        # Errors mean that the handler has closed the connection.
        with suppress(sqlite3.Error):
            self.connection.cut()
        self._release()

    async def check(self) -> None:
        """Check that it is the transaction that was begun: its savepoint exists."""
        try:
            await self._threads.run(_check, self.connection)
        except sqlite3.Error as error:
            raise build_ended_error("sqlite3", str(error)) from error

    async def commit(self) -> None:
        """Commit it."""
        try:
            await self._threads.run(self.connection.execute, "COMMIT")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
                raise OutcomeUnknown(self._topic, str(error)) from error
            raise Unavailable(self._topic, f"the transaction was rolled back: {error}") from error

    async def close(self) -> None:
        """Close the connection."""
        await self._threads.run(_close, self.connection)
        self._release()


class SqliteTransactions(TransactionBackend):
    """Transactions in the file of a queue.

    Args:
        access: the connection to the file.
        topic: the queue, for errors.
        unsettled: the claims of which nothing was settled.
        read_time: returns the parameters of statements on claims.
        most_heads: how many messages of a group may be in work at a time.
    """

    access: SqliteAccess
    default_limit = longest = _LONGEST

    def __init__(
        self,
        access: SqliteAccess,
        topic: str,
        unsettled: UnsettledClaims,
        read_time: Callable[[], dict[str, float]],
        most_heads: int,
    ) -> None:
        self.access = access
        self._most_heads = most_heads
        self._topic = topic
        self._unsettled = unsettled
        self._read_time = read_time
        self._exiting = threading.Event()
        self._threads = ThreadPool("jobsync-transaction", _THREADS, self._exiting.set)
        self._turn = asyncio.Lock()

    async def begin(self, limit: float, *, is_blocking: bool) -> OpenTransaction:
        """Open a connection, and begin when no other transaction writes."""
        del is_blocking
        loop = asyncio.get_running_loop()
        await self._turn.acquire()
        release = _build_release(loop, self._turn)
        opening = self._threads.run(self._open)
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(partial(_close_unwanted, release))
            raise
        except BaseException:
            release()
            raise
        return _SqliteTransaction(connection, limit, self._topic, self._threads, release)

    async def complete_within(
        self, connection: object, receipt: Receipt, result: Json = None
    ) -> bool:
        """Complete a message in the caller's transaction."""
        del result
        if not isinstance(connection, sqlite3.Connection):
            raise build_connection_error(connection, "is not a sqlite3 connection", SQLITE_FIX)
        return await self._threads.run(self.complete, connection, receipt)

    async def read_outcome(self, receipt: Receipt) -> ClaimOutcome:
        """Read what became of a message while nobody else writes."""
        outcome = await self.access.write(lambda each: _find_outcome(each, receipt), self._topic)
        return "open" if outcome == "o" else "completed" if outcome in {"c", "f"} else "ended"

    def _open(self) -> GuardedConnection:
        # Not created if somebody has removed it.
        uri = f"file:{quote(str(self.access.path))}?mode=rw"
        try:
            connection = sqlite3.connect(
                uri,
                _BUSY_SLICE,
                isolation_level=None,
                check_same_thread=False,
                factory=GuardedConnection,
                uri=True,
            )
            try:
                connection.execute("PRAGMA synchronous=FULL")
                self._begin(connection)
                connection.execute(f"SAVEPOINT {_SAVEPOINT}")
                connection.guard()
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise Unavailable(self._topic, f"no transaction could begin: {error}") from error
        return connection

    def _begin(self, connection: sqlite3.Connection) -> None:
        give_up = self.access.clock.mono() + _BUSY_TIMEOUT
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                is_over = self.access.clock.mono() >= give_up or self._exiting.is_set()
                if is_over or not is_busy:
                    raise
            else:
                return

    def complete(self, connection: sqlite3.Connection, receipt: Receipt) -> bool:
        """Complete a message; False if its claim has ended."""
        # The handler may have set its own.
        connection.row_factory, connection.text_factory = None, str
        time, claim = self._read_time(), receipt.claim
        is_whole = self._unsettled.remove(claim) == {receipt.id}
        if is_whole and complete_claim(connection, claim, 1, time["now"]):
            return True
        if _find_outcome(connection, receipt) != "o":
            return False
        settlement = Settlement(receipt=receipt, move="complete")
        return bool(settle_claim(connection, claim, [settlement], time, self._most_heads))


def open_transactions(
    access: SqliteAccess,
    topic: str,
    unsettled: UnsettledClaims,
    read_time: Callable[[], dict[str, float]],
    most_heads: int,
) -> TransactionBackend | None:
    """Return what opens transactions in a file; None if there is none. See the class."""
    if not access.has_user_transactions:
        return None
    return SqliteTransactions(access, topic, unsettled, read_time, most_heads)


def _find_outcome(connection: sqlite3.Connection, receipt: Receipt) -> str | None:
    parameters = {"claim": receipt.claim, "id": receipt.id}
    row = connection.execute(SQL["find_outcome"], parameters).fetchone()
    return None if row is None else str(row[0])


def _build_release(loop: asyncio.AbstractEventLoop, turn: asyncio.Lock) -> Callable[[], None]:
    """Return a function that ends a turn once, on any thread."""
    turns = [turn]

    def release() -> None:
        with suppress(IndexError, RuntimeError):
            # RuntimeError: the loop is closed, and nobody waits.
            loop.call_soon_threadsafe(turns.pop().release)

    return release


def _close_unwanted(
    release: Callable[[], None], opening: "asyncio.Future[GuardedConnection]"
) -> None:
    """Close a connection whose caller was cancelled."""
    if opening.exception() is None:
        _close(opening.result())
    release()


def _check(connection: GuardedConnection) -> None:
    connection.end_guard()
    connection.execute(f"RELEASE {_SAVEPOINT}")


def _close(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        connection.close()
