"""Transactions of handlers in an SQLite file.

A transaction blocks every other writer of the file, so it is short, and handlers of this process
have theirs one after the other. When its time is over another thread rolls it back, and the
connection refuses to write from then on: nothing that follows commits by itself.
"""

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from jobsync.core.codec import Json
from jobsync.errors import Invalid, OutcomeUnknown, Unavailable
from jobsync.queue.backend import Receipt, Settlement
from jobsync.queue.sql.claims import UnsettledClaims
from jobsync.queue.sql.joined_connections import SQLITE_FIX, build_connection_error
from jobsync.queue.sql.sqlite_claims import complete_claim, settle_claim
from jobsync.queue.sql.sqlite_places import SQL
from jobsync.queue.transaction_backend import ClaimOutcome, OpenTransaction, TransactionBackend
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
_INTERRUPT_INTERVAL = 0.05
_CURSORS = 100
"""How many cursors are noted before those that are gone are forgotten."""


class _Cursor(sqlite3.Cursor):
    """A cursor that refuses statements once its connection is cut. One thread at a time uses it."""

    connection: "_Connection"

    def execute(self, *arguments: Any) -> "_Cursor":
        """Run a statement."""
        with self.connection.use():
            super().execute(*arguments)
        return self

    def executemany(self, *arguments: Any) -> "_Cursor":
        """Run a statement for each of many parameters."""
        with self.connection.use():
            super().executemany(*arguments)
        return self

    def executescript(self, *arguments: Any) -> "_Cursor":
        """Run statements."""
        with self.connection.use():
            super().executescript(*arguments)
        return self

    def fetchone(self) -> Any:
        """Return the next row; None at the end."""
        with self.connection.use():
            return super().fetchone()

    def fetchmany(self, *arguments: Any, **options: Any) -> list[Any]:
        """Return the next rows."""
        with self.connection.use():
            return super().fetchmany(*arguments, **options)

    def fetchall(self) -> list[Any]:
        """Return all rows that are left."""
        with self.connection.use():
            return super().fetchall()

    def __next__(self) -> Any:
        """Return the next row."""
        with self.connection.use():
            return super().__next__()


class _Connection(sqlite3.Connection):
    """The connection of a transaction.

    A statement that is interrupted has rolled back, and the next one would commit by itself. So it
    is refused here: the database can be told only when the interrupted one has ended.

    Closing alone does not end the transaction while there is a cursor with a statement. The handler
    may have kept it, and so does the traceback of an error that somebody keeps.
    """

    is_cut = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Python does not survive it if one thread closes a cursor that another one reads from.
        self._in_use = threading.RLock()
        self._cursors: list[weakref.ref[_Cursor]] = []
        """Those that may have a statement."""
        self._most = _CURSORS

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep other threads from using it; raise if nothing may be done with it any more."""
        with self._in_use:
            if self.is_cut:
                raise sqlite3.OperationalError("attempt to write after the time of the transaction")
            yield

    def cursor(self, factory: Any = _Cursor) -> Any:
        """Return a cursor."""
        cursor = super().cursor(factory)
        if isinstance(cursor, _Cursor):
            with self._in_use:
                self._note(cursor)
        return cursor

    def _note(self, cursor: _Cursor) -> None:
        if len(self._cursors) >= self._most:
            self._cursors = [each for each in self._cursors if each() is not None]
            self._most = max(_CURSORS, 2 * len(self._cursors))
        self._cursors.append(weakref.ref(cursor))

    def execute(self, *arguments: Any) -> Any:
        """Run a statement."""
        return self.cursor().execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        """Run a statement for each of many parameters."""
        return self.cursor().executemany(*arguments)

    def executescript(self, *arguments: Any) -> Any:
        """Run statements."""
        return self.cursor().executescript(*arguments)

    def cut(self) -> None:
        """Roll back, whatever another thread does with this connection."""
        self.is_cut = True
        self.interrupt()
        while not self._in_use.acquire(timeout=_INTERRUPT_INTERVAL):
            # It had not begun when it was interrupted.
            self.interrupt()
        try:
            self._end_statements()
            own = super().cursor()
            own.execute("PRAGMA query_only=ON")
            if self.in_transaction:
                own.execute("ROLLBACK")
        finally:
            self._in_use.release()

    def close(self) -> None:
        """Roll back what was not committed, and close."""
        with self._in_use:
            with suppress(sqlite3.Error):
                self._end_statements()
                if self.in_transaction:
                    super().rollback()
            super().close()

    def _end_statements(self) -> None:
        """End what the handler has begun to read, and what it has set to stop statements.

        While one statement is open, all that follow an interrupt are interrupted, too.
        """
        for each in self._cursors:
            cursor = each()
            if cursor is not None:
                cursor.close()
        self.set_progress_handler(None, 0)
        self.set_authorizer(None)


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
        connection: _Connection,
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
            await self._threads.run(self.connection.execute, f"RELEASE {_SAVEPOINT}")
        except sqlite3.Error as error:
            raise _build_ended(error) from error

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

    def _open(self) -> _Connection:
        # Not created if somebody has removed it.
        uri = f"file:{quote(str(self.access.path))}?mode=rw"
        try:
            connection = sqlite3.connect(
                uri,
                _BUSY_SLICE,
                isolation_level=None,
                check_same_thread=False,
                factory=_Connection,
                uri=True,
            )
            try:
                connection.execute("PRAGMA synchronous=FULL")
                self._begin(connection)
                connection.execute(f"SAVEPOINT {_SAVEPOINT}")
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


def _close_unwanted(release: Callable[[], None], opening: "asyncio.Future[_Connection]") -> None:
    """Close a connection whose caller was cancelled."""
    if opening.exception() is None:
        _close(opening.result())
    release()


def _close(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        connection.close()


def _build_ended(error: sqlite3.Error) -> Invalid:
    problem = f"has no transaction of the block any more ({error})"
    fix = "leave COMMIT, ROLLBACK and close() to context.transaction()"
    return Invalid("connection", "sqlite3", problem, fix)
