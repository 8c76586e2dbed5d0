"""One SQLite file, with a thread that writes and a thread that reads.

A transaction runs in a thread, so the event loop never waits for a disk. SQLite's errors are
raised as jobsync's own, with the fix.
"""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from jobsync.core.clock import Clock, Mono
from jobsync.errors import Corrupt, JobsyncError, Misconfigured, Unavailable
from jobsync.stores.memory import LocalNotifier
from jobsync.stores.sql import Parameters, load_schema_steps, load_sql
from jobsync.stores.sqlite.location import check_location
from jobsync.stores.sqlite.watcher import FileWatcher
from jobsync.stores.threads import ThreadPool

__all__ = [
    "SQLITE_STEPS",
    "CommitFailed",
    "FileChanges",
    "MalformedSqliteJson",
    "SqliteFile",
    "read_tables_version",
]

T = TypeVar("T")

SQLITE_STEPS = load_schema_steps(__file__, "schema.sql")
"""Step n brings a file from schema version n to n + 1."""

_SQL = load_sql(__file__, "schema.sql")

_BUSY_SLICE = 1.0
_MAX_WAL_SIZE = 64 * 1024 * 1024
_POLL_INTERVAL = 0.05
"""Seconds between two looks at a file whose changes the system does not report."""
_WATCHED_INTERVAL = 1.0
"""Seconds between two looks at a file whose changes it reports."""

_FIRST_RECOUNT = 0.1
"""Seconds after a change before it counts again: longer than a tick and than most syncs."""
_LAST_RECOUNT = 2.0
"""The longest pause between two counts of one change; for a slower disk, callers poll."""
_NEVER = Mono(float("inf"))


class CommitFailed(Exception):
    """The disk failed during a commit, which may be stored or not. Only used within the store."""


class MalformedSqliteJson(Exception):
    """A condition read a value that is not JSON. Only used within the store."""


class FileChanges:
    """Counts the changes of one file by its directory entry, without a query or an open.

    Opening one of SQLite's files would be dangerous: closing it releases all locks that the
    process holds on it.

    A change counts when it can be seen, not when the file was written. SQLite writes its log,
    syncs it, and only then do others see the commit; and file times are as coarse as the
    kernel's tick, so a second change may leave the same time. So a change counts when it is found,
    and again a few times while a disk may still be writing, after pauses that double.

    The system reports changes where it can, see `FileWatcher`. Otherwise the file is looked at.

    Args:
        path: the file; it need not exist or be accessible.
        clock: this machine's clock.

    Attributes:
        path: the file.
        notifier: wakes those who wait for a change.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self.notifier = LocalNotifier.at(path)
        self.path = path
        self._clock = clock
        self._count = 0
        self._last_stat = self._stat()
        self._pause = _FIRST_RECOUNT
        self._recount_at = _NEVER

    def count(self) -> int:
        """Return a number that has grown if there may be something new to read."""
        found, now = self._stat(), self._clock.mono()
        if found != self._last_stat:
            self._last_stat, self._pause = found, _FIRST_RECOUNT
        elif now >= self._recount_at:
            self._pause *= 2
        else:
            return self._count
        self._recount_at = now + self._pause if self._pause <= _LAST_RECOUNT else _NEVER
        self._count += 1
        return self._count

    def find_wait(self) -> float:
        """Return the seconds until the next look, unless the system reports a change before."""
        if not FileWatcher.current().watch(self.path, self.notifier):
            return _POLL_INTERVAL
        until_recount = self._recount_at - self._clock.mono()
        return min(_WATCHED_INTERVAL, max(_POLL_INTERVAL, until_recount))

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self.path)  # noqa: PTH116 - half the cost of Path.stat
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_size, found.st_mtime_ns)


class SqliteFile:
    """One file. Create it with `open`.

    Attributes:
        path: the absolute path.
        commits: the commits of all processes.
        wakeups: the calls of `notify`, and a few others: when commits move from the log to the
            file.
    """

    def __init__(self, path: Path, clock: Clock, busy_timeout: float) -> None:
        # Absolute: the program may change its working directory.
        self.path = path.absolute()
        self._name = str(self.path)
        self.commits = FileChanges(f"{self.path}-wal", clock)
        self.wakeups = FileChanges(self._name, clock)
        self._clock = clock
        self._busy_timeout = busy_timeout
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._threads = {
            role: ThreadPool(f"jobsync-sqlite-{role}", 1, self._closing.set)
            for role in ("write", "read")
        }
        self._connections: dict[str, sqlite3.Connection] = {}
        self._identity = (0, 0)

    @classmethod
    async def open(cls, path: Path, clock: Clock, busy_timeout: float) -> Self:
        """Open a file; create it and its tables if needed.

        Raises:
            Misconfigured: it cannot be used as a store, with the reason and the fix.
        """
        file = cls(path, clock, busy_timeout)
        try:
            await file._submit("write", file._prepare)
            await file._submit("read", file._connect, "read")
        except BaseException:
            await file.close()
            raise
        return file

    def read(self, query: str, parameters: Parameters = ()) -> "asyncio.Future[list[Any]]":
        """Run a query and return its rows."""
        return self._submit("read", self._query, query, parameters)

    def write(self, work: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        """Run work on the connection, in one transaction.

        Raises:
            CommitFailed: it may have happened or not.
        """
        return self._submit("write", self._transact, work, *arguments)

    def run(self, statement: str, parameters: Parameters = ()) -> "asyncio.Future[int]":
        """Run one writing statement in its own transaction; return the number of its rows.

        Raises:
            CommitFailed: it may have happened or not.
        """
        return self._submit("write", self._run_statement, statement, parameters)

    def notify(self) -> None:
        """Wake those who wait for `wakeups`, in all processes, soon."""
        if not self._closing.is_set():
            self._threads["write"].run(_touch, self._name)

    def announce_commit(self) -> None:
        """Wake those who wait for `commits`, now that the last one is visible."""
        _touch(self.commits.path)

    async def wait(self, changes: FileChanges, topic: str, timeout: float) -> None:
        """Return early if there may be something new to read; only a hint.

        Args:
            changes: what to wait for, `commits` or `wakeups`.
            topic: what this process may be notified of besides.
            timeout: seconds to wait at most.
        """
        self._check_usable()
        seen, deadline = changes.count(), self._clock.mono() + timeout
        while (left := deadline - self._clock.mono()) > 0:
            pause = min(changes.find_wait(), left)
            is_woken = await changes.notifier.wait(topic, pause, lambda: changes.count() != seen)
            self._check_usable()
            if is_woken or changes.count() != seen:
                return

    async def close(self) -> None:
        """Close both connections, after the calls already queued. Safe to repeat.

        A forked child leaves them to its parent: its copies of the threads do not run.
        """
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        for changes in (self.commits, self.wakeups):
            changes.notifier.wake_all()
        # All are queued before the first wait: a close that is cancelled closes both too.
        closing = [thread.run(self._disconnect, role) for role, thread in self._threads.items()]
        for thread in self._threads.values():
            thread.shutdown()
        # `gather` would cancel them.
        await asyncio.wait(closing)
        for each in closing:
            each.result()

    def _submit(self, role: str, call: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        self._check_usable()
        return self._threads[role].run(call, *arguments)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise Misconfigured(
                "store", str(self.path), "was opened before a fork", "connect again in the child"
            )
        if self._closing.is_set():
            raise Unavailable(self._name, "the store is closed", "connect again")

    def _prepare(self) -> None:
        check_location(self.path)
        self._connect("write")
        self._transact(_upgrade, self._name)

    def _connect(self, role: str) -> None:
        try:
            connection = sqlite3.connect(self.path, timeout=_BUSY_SLICE, isolation_level=None)
            self._connections[role] = connection
            mode = self._retry_while_locked(
                lambda: connection.execute("PRAGMA journal_mode=WAL").fetchone()
            )
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"PRAGMA journal_size_limit={_MAX_WAL_SIZE}")
            found = self.path.stat()
        except sqlite3.Error as error:
            raise self._to_error(error) from error
        if mode != ("wal",):
            raise Misconfigured(
                "url", str(self.path), f"stays in journal mode {mode[0]!r}", "use a local disk"
            )
        self._identity = (found.st_dev, found.st_ino)

    def _disconnect(self, role: str) -> None:
        if (connection := self._connections.pop(role, None)) is not None:
            connection.close()

    def _query(self, query: str, parameters: Parameters) -> list[Any]:
        self._check_identity()
        connection = self._connections["read"]
        try:
            return self._retry_while_locked(
                lambda: connection.execute(query, parameters).fetchall()
            )
        except sqlite3.Error as error:
            if str(error) == "malformed JSON":
                raise MalformedSqliteJson from error
            raise self._to_error(error) from error

    def _transact(self, work: Callable[..., T], *arguments: Any) -> T:
        self._check_identity()
        connection = self._connections["write"]
        try:
            self._retry_while_locked(connection.execute, "BEGIN IMMEDIATE")
            try:
                result = work(connection, *arguments)
                self._commit(connection, "COMMIT")
            finally:
                if connection.in_transaction:
                    # The caller must get the first error, not this one.
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise self._to_error(error) from error
        return result

    def _run_statement(self, statement: str, parameters: Parameters) -> int:
        self._check_identity()
        connection = self._connections["write"]
        try:
            return self._retry_while_locked(
                self._commit, connection, statement, parameters
            ).rowcount
        except sqlite3.Error as error:
            raise self._to_error(error) from error

    def _commit(
        self, connection: sqlite3.Connection, statement: str, parameters: Parameters = ()
    ) -> sqlite3.Cursor:
        """Run a statement that commits.

        Raises:
            CommitFailed: the commit may be stored or not.
        """
        try:
            return connection.execute(statement, parameters)
        except sqlite3.OperationalError as error:
            # A full disk is noticed before the commit mark is written. Any other failure may
            # leave the mark behind, to be found when the file is opened again.
            if _code(error) == sqlite3.SQLITE_IOERR:
                raise CommitFailed(str(error)) from error
            raise

    def _retry_while_locked(self, attempt: Callable[..., T], *arguments: Any) -> T:
        """Retry until the lock is free. SQLite's own waiting is unfair and sometimes skipped."""
        started = self._clock.mono()
        while True:
            try:
                return attempt(*arguments)
            except sqlite3.OperationalError as error:
                if _code(error) not in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                    raise
                waited = self._clock.mono() - started
                if waited >= self._busy_timeout or self._closing.wait(0.005):
                    raise

    def _check_identity(self) -> None:
        """Raise if the file is no longer the one that was opened."""
        try:
            found = os.stat(self._name)  # noqa: PTH116 - half the cost of Path.stat
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise Unavailable(
                self._name,
                "the file was removed or replaced while open",
                "put it back, then connect again",
            )

    def _to_error(self, error: sqlite3.Error) -> JobsyncError:
        name = self._name
        match _code(error):
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return Unavailable(
                    name,
                    f"another process held the write lock for {self._busy_timeout:g} s",
                    "find the transaction that stays open, and end it",
                )
            case sqlite3.SQLITE_FULL:
                return Unavailable(name, "the disk is full; nothing was written", "free some space")
            case sqlite3.SQLITE_IOERR:
                return Unavailable(name, f"the disk failed: {error}", "check the disk")
            case sqlite3.SQLITE_CORRUPT:
                return Corrupt(name, str(error))
            case sqlite3.SQLITE_READONLY:
                return Misconfigured(
                    "url", name, "is read-only", "make the file and its folder writable"
                )
            case sqlite3.SQLITE_NOTADB:
                return Misconfigured(
                    "url",
                    name,
                    "is not an SQLite database",
                    "use another file; this one is intact",
                )
            case sqlite3.SQLITE_CANTOPEN:
                return Misconfigured(
                    "url", name, "cannot be opened", "make the file and its folder writable"
                )
            case _:
                return Misconfigured(
                    "url",
                    name,
                    f"was refused by SQLite: {error}",
                    "check that nobody else changed jobsync's tables",
                )


def _touch(path: str) -> None:
    # Only a hint: without the right to touch the file it is left out.
    with suppress(OSError):
        os.utime(path)


def _code(error: sqlite3.Error) -> int:
    """Return the primary result code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def read_tables_version(path: str) -> int:
    """Return the version of the tables in a file, without changing it; 0 if it has none.

    Raises:
        Misconfigured: there is no such file, or it is not SQLite's.
    """
    try:
        with closing(
            sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)
        ) as file:
            row = file.execute(_SQL["read_version"]).fetchone()
    except sqlite3.Error as error:
        if "no such table" in str(error):
            return 0
        problem = f"cannot be read: {error}"
        raise Misconfigured("url", path, problem, "check the path and its permissions") from None
    return 0 if row is None else int(row[0])


def _upgrade(connection: sqlite3.Connection, path: str) -> None:
    """Bring the tables up to date, in a transaction, so that only one process does it.

    Raises:
        Misconfigured: they are of newer code, and this code cannot use them.
    """
    connection.execute(_SQL["create_version_table"])
    if connection.execute(_SQL["has_oldest_code"]).fetchone() is None:
        connection.execute(_SQL["add_oldest_code"])
    if (row := connection.execute(_SQL["read_version"]).fetchone()) is None:
        connection.execute(_SQL["insert_version"])
    version, oldest_code = row or (0, 0)
    if oldest_code > len(SQLITE_STEPS):
        problem = f"has tables of version {version}, and this code knows {len(SQLITE_STEPS)}"
        raise Misconfigured("url", path, problem, "upgrade jobsync in this process")
    connection.execute(_SQL["try_to_write"])
    if steps := SQLITE_STEPS[version:]:
        for statement in (statement for step in steps for statement in step):
            connection.execute(statement)
        connection.execute(_SQL["raise_version"], {"version": len(SQLITE_STEPS)})
        connection.execute(_SQL["refuse_older_code"])
