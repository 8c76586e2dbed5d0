"""The connection of a handler's transaction in an SQLite file, which only its owner can end."""

import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from jobsync.queue.transaction_backend import build_ended_error, build_refusal

__all__ = ["GuardedConnection"]

_DRIVER = "sqlite3"
_INTERRUPT_INTERVAL = 0.05
_CURSORS = 100
"""How many cursors are noted before those that are gone are forgotten."""


class GuardedCursor(sqlite3.Cursor):
    """A cursor of a `GuardedConnection`. One thread at a time uses it."""

    connection: "GuardedConnection"

    def execute(self, *arguments: Any) -> "GuardedCursor":
        """Run a statement."""
        with self.connection.use():
            super().execute(*arguments)
        return self

    def executemany(self, *arguments: Any) -> "GuardedCursor":
        """Run a statement for each of many parameters."""
        with self.connection.use():
            super().executemany(*arguments)
        return self

    def executescript(self, *arguments: Any) -> "GuardedCursor":
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


class GuardedConnection(sqlite3.Connection):
    """The connection of a transaction.

    Nothing but its owner commits or rolls back: `commit()`, `rollback()`, `with connection:`,
    `executescript()`, which commits first, and statements that do the same raise `Invalid`. So does
    what follows a statement that has rolled back by itself, such as INSERT OR ROLLBACK, because it
    would be committed at once.

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
        self._cursors: list[weakref.ref[GuardedCursor]] = []
        """Those that may have a statement."""
        self._most = _CURSORS
        self._is_guarded = False
        self._refused = ""
        """The statement by which the handler has tried to end the transaction."""
        self._authorizer: Callable[..., int] | None = None
        """The handler's own."""

    def guard(self) -> None:
        """Refuse to end the transaction that has begun, until `end_guard`."""
        self._is_guarded = True
        super().set_authorizer(self._authorize)

    def end_guard(self) -> None:
        """Allow its owner to end the transaction.

        Raises:
            Invalid: the handler has tried to end it, even if it has ignored the error.
        """
        with self._in_use:
            self._is_guarded = False
            super().set_authorizer(None)
        if self._refused:
            raise build_refusal(_DRIVER, self._refused)

    def set_authorizer(self, authorizer_callback: Callable[..., int] | None) -> None:
        """Set a function of the handler's that decides about all else."""
        self._authorizer = authorizer_callback
        # Set anew, so that statements that were prepared before are decided about, too.
        super().set_authorizer(self._authorize if self._is_guarded else authorizer_callback)

    def _authorize(self, action: int, *details: str | None) -> int:
        # Called when a statement is prepared, whichever method has it: also those within Python.
        if action == sqlite3.SQLITE_TRANSACTION and details[0] != "BEGIN":
            self._refused = str(details[0])
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if self._authorizer is None else self._authorizer(action, *details)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep other threads from using it; raise if nothing may be done with it any more.

        Raises:
            Invalid: the transaction was to be ended, or has ended.
        """
        with self._in_use:
            if self.is_cut:
                raise sqlite3.OperationalError("attempt to write after the time of the transaction")
            if self._is_guarded and not self.in_transaction:
                raise build_ended_error(_DRIVER, "a statement has rolled it back")
            try:
                yield
            except sqlite3.DatabaseError as error:
                if self._refused and error.sqlite_errorcode == sqlite3.SQLITE_AUTH:
                    raise build_refusal(_DRIVER, self._refused) from error
                raise

    def cursor(self, factory: Any = GuardedCursor) -> Any:
        """Return a cursor."""
        cursor = super().cursor(factory)
        if isinstance(cursor, GuardedCursor):
            with self._in_use:
                self._note(cursor)
        return cursor

    def _note(self, cursor: GuardedCursor) -> None:
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

    def commit(self) -> None:
        """Raise: the owner of the transaction commits."""
        with self.use():
            super().commit()

    def rollback(self) -> None:
        """Raise: the owner of the transaction rolls back."""
        with self.use():
            super().rollback()

    def __enter__(self) -> Self:
        """Raise: leaving the block would commit."""
        with self._in_use:
            if self._is_guarded:
                self._refused = "with connection:"
                raise build_refusal(_DRIVER, self._refused)
        return super().__enter__()

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
        super().set_authorizer(None)
