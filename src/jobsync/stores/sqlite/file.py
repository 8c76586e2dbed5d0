"""One SQLite file, a thread that writes and a thread that reads.

A transaction is one hop to a thread and back, so the event loop never waits for a disk.
Errors leave here as jobsync's own, with the fix.
"""

import asyncio
import os
import re
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from jobsync.core.clock import Clock, Mono
from jobsync.errors import Corrupt, JobsyncError, Misconfigured, Unavailable
from jobsync.stores.sql_access import Parameters
from jobsync.stores.tables import SQLITE_STEPS
from jobsync.stores.threads import WorkThreads

__all__ = [
    "NETWORK_FILESYSTEMS",
    "CommitFailed",
    "FileChanges",
    "MalformedSqliteJson",
    "SqliteFile",
    "filesystem_of",
]


# Whether a file has changed, by what its folder tells of it: no query, nothing opened.
#
# To open one of SQLite's files would be dangerous: whoever closes a file gives up all locks that
# its process holds on it.
#
# What counts is not when a file was written but when that can be seen. SQLite writes its log,
# syncs it, and only then do others see the commit; and file times are as coarse as the kernel's
# tick, so that a second change may leave the first one's. So a change counts when it is found,
# and again a few times while a disk may still be at it, each time twice as long after.


_FIRST = 0.1
"""Seconds after a change before it counts again: longer than a tick, and than most syncs."""
_LAST = 2.0
"""Seconds between two counts of one change at the most; a disk that is slower is waited for by
who polls."""

_NEVER = Mono(float("inf"))


class FileChanges:
    """Changes of one file, counted.

    Args:
        path: which one; it need not be there, nor in reach.
        clock: this machine's.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._count = 0
        self._stamp = self._look()
        self._pause = _FIRST
        self._again = _NEVER

    def count(self) -> int:
        """Give a number that has grown if there may be something new to see."""
        stamp, now = self._look(), self._clock.mono()
        if stamp != self._stamp:
            self._stamp, self._pause = stamp, _FIRST
        elif now >= self._again:
            self._pause *= 2
        else:
            return self._count
        self._again = now + self._pause if self._pause <= _LAST else _NEVER
        self._count += 1
        return self._count

    def _look(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - half the cost of Path.stat
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_size, found.st_mtime_ns)


# Which kind of filesystem a path is on, from the kernel's own list of mounts.


NETWORK_FILESYSTEMS = frozenset(
    {
        "9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "fuse.rclone",
        "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs", "virtiofs",
    }
)  # fmt: skip
"""Filesystems on which SQLite's locks or shared memory do not hold between machines."""

_octal = re.compile(r"\\([0-7]{3})")


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Give the type of the filesystem that holds an absolute path, '' if unknown."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split(" ")
        if not separator or len(fields) < 5:  # noqa: PLR2004 - the mount point is the fifth
            continue
        point = Path(_octal.sub(lambda match: chr(int(match.group(1), 8)), fields[4]))
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), source.split(" ")[0]
    return kind


T = TypeVar("T")

_OLDEST_SQLITE = (3, 38, 0)
_BUSY_SLICE = 1.0
_MOUNTS = Path("/proc/self/mountinfo")
_KEEP_WAL = 64 * 1024 * 1024
_POLL = 0.05


class CommitFailed(Exception):
    """The disk failed during a commit: it may be there or not. Never leaves the store."""


class MalformedSqliteJson(Exception):
    """A condition looked into a value that is not JSON. Never leaves the store."""


class SqliteFile:
    """One file. Make it with `open`.

    Attributes:
        path: where it is.
        commits: everybody's changes.
        rings: what `ring` told of, and few others: when commits move from the log to the file.
    """

    def __init__(self, path: Path, clock: Clock, patience: float) -> None:
        # Absolute: the program may change its working directory.
        self.path = path.absolute()
        self._name = str(self.path)
        self.commits = FileChanges(f"{self.path}-wal", clock)
        self.rings = FileChanges(self._name, clock)
        self._clock = clock
        self._patience = patience
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._threads = {
            role: WorkThreads(f"jobsync-sqlite-{role}", 1, self._closing.set)
            for role in ("write", "read")
        }
        self._connections: dict[str, sqlite3.Connection] = {}
        self._identity = (0, 0)

    @classmethod
    async def open(cls, path: Path, clock: Clock, patience: float) -> Self:
        """Open a file, making it and its tables if need be.

        Raises:
            Misconfigured: it cannot serve as a store, with the reason and the fix.
        """
        file = cls(path, clock, patience)
        try:
            await file._hop("write", file._prepare)
            await file._hop("read", file._connect, "read")
        except BaseException:
            await file.close()
            raise
        return file

    def read(self, query: str, parameters: Parameters = ()) -> "asyncio.Future[list[Any]]":
        """Run a query."""
        return self._hop("read", self._query, query, parameters)

    def write(self, work: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        """Run work on the connection, in one transaction.

        Raises:
            CommitFailed: nobody can say whether it happened.
        """
        return self._hop("write", self._transact, work, *arguments)

    def run(self, statement: str, parameters: Parameters = ()) -> "asyncio.Future[int]":
        """Run one statement that writes, which is a transaction of its own; count its rows.

        Raises:
            CommitFailed: nobody can say whether it happened.
        """
        return self._hop("write", self._run, statement, parameters)

    def ring(self) -> None:
        """Let those look who wait for `rings`, in whichever process, soon."""
        if not self._closing.is_set():
            self._threads["write"].run(self._touch)

    async def wait(
        self,
        changes: FileChanges,
        timeout: float,
        rest: Callable[[float], Awaitable[bool | None]],
    ) -> None:
        """Return early if there may be something new to see: a hint.

        Args:
            changes: of what, `commits` or `rings`.
            timeout: seconds to wait at the most.
            rest: lets some seconds pass; True says that somebody wants to look before.
        """
        self._check_usable()
        seen, give_up = changes.count(), self._clock.mono() + timeout
        while (left := give_up - self._clock.mono()) > 0:
            is_called = await rest(min(_POLL, left))
            self._check_usable()
            if is_called or changes.count() != seen:
                return

    async def close(self) -> None:
        """Close both connections, after the calls that they have. Safe to repeat.

        A forked child leaves them to its parent: its copies of the threads do not run.
        """
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        for role, thread in self._threads.items():
            await thread.run(self._disconnect, role)
            thread.end()

    def _hop(self, role: str, call: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
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
        check_place(self.path)
        self._connect("write")
        self._transact(_upgrade)

    def _connect(self, role: str) -> None:
        try:
            connection = sqlite3.connect(self.path, timeout=_BUSY_SLICE, isolation_level=None)
            self._connections[role] = connection
            mode = self._patiently(lambda: connection.execute("PRAGMA journal_mode=WAL").fetchone())
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"PRAGMA journal_size_limit={_KEEP_WAL}")
            found = self.path.stat()
        except sqlite3.Error as error:
            raise self._explain(error) from error
        if mode != ("wal",):
            raise Misconfigured(
                "url", str(self.path), f"stays in journal mode {mode[0]!r}", "use a local disk"
            )
        self._identity = (found.st_dev, found.st_ino)

    def _disconnect(self, role: str) -> None:
        if (connection := self._connections.pop(role, None)) is not None:
            connection.close()

    def _query(self, query: str, parameters: Parameters) -> list[Any]:
        self._look()
        connection = self._connections["read"]
        try:
            return self._patiently(lambda: connection.execute(query, parameters).fetchall())
        except sqlite3.Error as error:
            if str(error) == "malformed JSON":
                raise MalformedSqliteJson from error
            raise self._explain(error) from error

    def _transact(self, work: Callable[..., T], *arguments: Any) -> T:
        self._look()
        connection = self._connections["write"]
        try:
            self._patiently(connection.execute, "BEGIN IMMEDIATE")
            try:
                result = work(connection, *arguments)
                self._commit(connection, "COMMIT")
            finally:
                if connection.in_transaction:
                    # What went wrong before is what the caller must hear of.
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise self._explain(error) from error
        return result

    def _run(self, statement: str, parameters: Parameters) -> int:
        self._look()
        connection = self._connections["write"]
        try:
            return self._patiently(self._commit, connection, statement, parameters).rowcount
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _commit(
        self, connection: sqlite3.Connection, statement: str, parameters: Parameters = ()
    ) -> sqlite3.Cursor:
        """Run a statement that commits."""
        try:
            return connection.execute(statement, parameters)
        except sqlite3.OperationalError as error:
            # A full disk is noticed before the commit mark is written. Any other failure
            # may leave the mark behind, to be found when the file is next opened.
            if _code(error) == sqlite3.SQLITE_IOERR:
                raise CommitFailed(str(error)) from error
            raise

    def _patiently(self, attempt: Callable[..., T], *arguments: Any) -> T:
        """Try until the lock is free. SQLite's own waiting is unfair, and skipped in places."""
        begun = self._clock.mono()
        while True:
            try:
                return attempt(*arguments)
            except sqlite3.OperationalError as error:
                if _code(error) not in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                    raise
                waited = self._clock.mono() - begun
                if waited >= self._patience or self._closing.wait(0.005):
                    raise

    def _touch(self) -> None:
        # A hint, on which nothing rests; who may not give it leaves it.
        with suppress(OSError):
            os.utime(self._name)

    def _look(self) -> None:
        """Refuse to go on when the file is no longer the one that was opened."""
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

    def _explain(self, error: sqlite3.Error) -> JobsyncError:
        name = self._name
        match _code(error):
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return Unavailable(
                    name,
                    f"another process held the write lock for {self._patience:g} s",
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
                    "name another file; this one is intact",
                )
            case sqlite3.SQLITE_CANTOPEN:
                return Misconfigured(
                    "url", name, "cannot be opened", "make the file and its folder writable"
                )
            case _:
                return Misconfigured(
                    "url", name, str(error), "check that nobody else changed jobsync's tables"
                )


def _code(error: sqlite3.Error) -> int:
    """Give the primary result code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def check_place(path: Path) -> None:
    """Refuse a place where SQLite cannot keep its promises.

    Raises:
        Misconfigured: with the reason and the fix.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        oldest = ".".join(map(str, _OLDEST_SQLITE))
        raise Misconfigured(
            "sqlite3", sqlite3.sqlite_version, f"is older than {oldest}", "use a newer Python"
        )
    folder = path.parent
    try:
        found, is_folder = folder.is_dir(), path.is_dir()
    except PermissionError:
        raise Misconfigured(
            "url", str(path), "is out of reach for this user", "give it access to the folder"
        ) from None
    except OSError as error:
        raise Misconfigured("url", str(path), str(error.strerror), "choose another") from None
    if not found:
        raise Misconfigured("url", str(path), f"there is no folder {folder}", "create it")
    if is_folder:
        raise Misconfigured("url", str(path), "is a folder", "name a file in it")
    kind = filesystem_of(path.resolve(), _MOUNTS.read_text()) if _MOUNTS.exists() else ""
    if kind in NETWORK_FILESYSTEMS:
        raise Misconfigured(
            "url",
            str(path),
            f"is on a network filesystem ({kind}), where SQLite loses data",
            "use a local disk, or postgresql:// or s3:// for several machines",
        )


def _upgrade(connection: sqlite3.Connection) -> None:
    """Bring the tables up to date. Runs in a transaction, so that one process does it."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS jobsync_schema (version INTEGER NOT NULL) STRICT"
    )
    row = connection.execute("SELECT version FROM jobsync_schema").fetchone()
    if row is None:
        connection.execute("INSERT INTO jobsync_schema VALUES (0)")
    # Changes nothing: a file that cannot be written is found now, not at the first write.
    connection.execute("UPDATE jobsync_schema SET version = version")
    # A newer version than ours has only added to what we know.
    for step in SQLITE_STEPS[0 if row is None else row[0] :]:
        for statement in step:
            connection.execute(statement)
        connection.execute("UPDATE jobsync_schema SET version = version + 1")
