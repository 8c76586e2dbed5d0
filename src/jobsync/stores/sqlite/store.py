"""The SQLite store: the embedded default, for many processes on one machine.

Every commit is synced to disk. Writers of all processes take turns; readers never block
them. Sessions and elections are in a second file beside the first, so that a long user
transaction cannot starve a heartbeat. A caller never sees "database is locked": it waits
for up to `busy_timeout` seconds, then gets `Unavailable`.

Assumes a local filesystem (network filesystems are refused) and that the file is not removed or
replaced while open (each access checks this, and fails from then on). A disk error during COMMIT
leaves the outcome unknown; after every other error nothing was written.
"""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from jobsync.components import NONCE_LENGTH, Components
from jobsync.core import filters
from jobsync.core.clock import Clock, Wall
from jobsync.core.codec import Json
from jobsync.core.keys import check_key, check_prefix
from jobsync.errors import JobsyncError, OutcomeUnknown
from jobsync.stores.contract import (
    BURIAL_AGE,
    Applied,
    Change,
    Conflicted,
    Entry,
    Head,
    Outcome,
    Record,
    Store,
    Unknown,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.record_codec import (
    build_records,
    check_after,
    check_stream,
    decode_entry,
    decode_record,
    encode_entries,
    first_id_at,
)
from jobsync.stores.scan import (
    Dialect,
    JsonKind,
    Row,
    SqlCondition,
    check_age,
    check_limit,
    check_listing,
    collect,
    filter_to_sql,
)
from jobsync.stores.sql import Parameters, SqliteAccess, load_sql
from jobsync.stores.sqlite.file import CommitFailed, MalformedSqliteJson, SqliteFile

__all__ = ["FileAccess", "SqliteStore"]

T = TypeVar("T")

BUSY_TIMEOUT = 30.0
"""Seconds to wait for other writers: far longer than any transaction of this library."""

_LONGEST_DELAY = 60.0
"""Seconds that a statement may wait for its thread, besides waiting for the file."""

_SQL = load_sql(__file__, "queries.sql")
_GET, _CREATE, _REPLACE = _SQL["get"], _SQL["create"], _SQL["replace"]

_IN_SESSION_FILE = ("session/", "role/", "request/")
_WATCHED = ("role/", "request/")
"""Keys in the session file that others wait for; heartbeats change the other ones all the time."""

_KEY = 7
"""The index of the key in the parameters of a row."""


class FileAccess(SqliteAccess):
    """Access to one file for tables beside the records.

    Args:
        file: the file.
        clock: this machine's clock.
    """

    def __init__(self, file: SqliteFile, clock: Clock) -> None:
        self.clock = clock
        self.path = file.path
        self._file = file
        self._notifier = file.commits.notifier

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query and return its rows."""
        return await self._file.read(query, parameters)

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction."""
        try:
            return await self._file.write(work)
        except CommitFailed as failed:
            raise OutcomeUnknown(place, str(failed)) from failed

    def wake(self, topic: str) -> None:
        """Wake waiters in this process, and those of other processes for any topic."""
        self._notifier.wake([topic])
        self._file.announce_commit()

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken here, or if any process has changed the file."""
        await self._file.wait(self._file.commits, topic, timeout)


class SqliteStore(Store):
    """Records in a file, sessions in a second file beside it. Create it with `connect`."""

    is_atomic = True

    def __init__(self, main: SqliteFile, sessions: SqliteFile, components: Components) -> None:
        self.name = f"sqlite:///{main.path}"
        self._main = main
        self._sessions = sessions
        self._access = FileAccess(main, components.clock)
        self._clock = components.clock
        self._ids = components.ids
        self._corruption_log = CorruptionLog(self.name, components.events)

    @classmethod
    async def connect(
        cls,
        path: Path,
        components: Components | None = None,
        *,
        busy_timeout: float = BUSY_TIMEOUT,
    ) -> Self:
        """Open both files; create them and their tables if needed.

        Raises:
            Misconfigured: they cannot be used as a store, with the reason and the fix.
        """
        components = components or Components.system()
        main = await SqliteFile.open(path, components.clock, busy_timeout)
        try:
            session_path = main.path.with_name(f"{path.name}-sessions")
            sessions = await SqliteFile.open(session_path, components.clock, busy_timeout)
        except BaseException:
            await main.close()
            raise
        return cls(main, sessions, components)

    def _file_of(self, key: str) -> SqliteFile:
        return self._sessions if key.startswith(_IN_SESSION_FILE) else self._main

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key."""
        for key in keys:
            check_key(key)
        rows: dict[str, tuple[Any, ...]] = {}
        for file in {self._file_of(key): None for key in keys}:
            wanted = [key for key in keys if self._file_of(key) is file]
            rows |= {row[0]: row for row in await file.read(_GET, [_json(wanted)])}
        return [
            None if row is None or (row[1] is None and not tombstones) else decode_record(*row)
            for row in map(rows.get, keys)
        ]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, those to one file in one transaction."""
        records, texts = build_records(changes, self._ids)
        failed: dict[str, Outcome] = {}
        may_have_written = False
        for file, rows in self._split_by_file(changes, records, texts):
            try:
                failed |= dict.fromkeys(await _apply(file, rows), Conflicted())
            except CommitFailed as error:
                failed |= dict.fromkeys(rows.keys(), Unknown(str(error)))
            except JobsyncError as error:
                # An error would mean that nothing was written.
                if not may_have_written:
                    raise
                failed |= dict.fromkeys(rows.keys(), Unknown(str(error)))
            may_have_written = True
            if file is self._sessions and rows.has_watched_key():
                file.notify()
        if not failed:
            return [*map(Applied, records)]
        return [failed.get(record.key) or Applied(record) for record in records]

    def _split_by_file(
        self, changes: Sequence[Change], records: list[Record], texts: list[str | None]
    ) -> "list[tuple[SqliteFile, _RecordRows]]":
        """Return the rows to write in each file, sessions first."""
        boot, now = self._clock.boot(), self._clock.mono().seconds
        sessions, main = _RecordRows([], []), _RecordRows([], [])
        for change, record, text in zip(changes, records, texts, strict=True):
            key, seq, trail = record.key, record.seq, record.trail
            epoch, form, base = record.epoch, record.format, change.base
            rows = sessions if key.startswith(_IN_SESSION_FILE) else main
            # Written out twice: unpacking and rebuilding a tuple is slow.
            if base is None:
                rows.created.append((text, seq, epoch, form, trail, boot, now, key))
            else:
                rows.replaced.append(
                    (text, seq, epoch, form, trail, boot, now, key, base.seq, base.trail)
                )
        files = ((self._sessions, sessions), (self._main, main))
        return [(file, rows) for file, rows in files if rows.created or rows.replaced]

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys and versions."""
        check_listing(prefix, after, limit, until)
        parameters = [*_level(prefix, after, until), limit]
        rows = await self._file_of(prefix).read(_SQL["heads"], parameters)
        return [Head(key, trail[:NONCE_LENGTH]) for key, trail in rows]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        check_listing(prefix, after, limit)
        filter_ = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await _read_filtered(
                self._file_of(prefix), _SQL["scan"], _level(prefix, after), limit, filter_
            )

        return await collect(
            fetch,
            decode_record,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=filter_,
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Append entries to a history, in one transaction."""
        check_stream(stream)
        rows = [
            (stream, entry.id, entry.data.decode())
            for entry in encode_entries(entries, batch or self._ids.batch())
        ]
        try:
            await self._file_of(stream).write(sqlite3.Connection.executemany, _SQL["append"], rows)
        except CommitFailed as failed:
            raise OutcomeUnknown(stream, str(failed)) from failed

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read entries of a history."""
        check_stream(stream)
        check_after(after)
        check_limit(limit)
        filter_ = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await _read_filtered(
                self._file_of(stream), _SQL["read"], (stream, after), limit, filter_
            )

        return await collect(
            fetch,
            decode_entry,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=filter_,
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Delete old entries of a history."""
        check_age(older_than)
        check_stream(stream)
        end = first_id_at(self._clock.wall() + -older_than)
        return await self._remove(stream, _SQL["discard"], (stream, end))

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""
        check_prefix(prefix)
        check_limit(limit)
        check_age(older_than)
        now = self._clock.mono().seconds
        # What is far ahead is of an earlier boot, where boots have no id. What is a little ahead
        # was written while the statement waited for the file.
        ahead = now + BUSY_TIMEOUT + _LONGEST_DELAY
        age = (self._clock.boot(), ahead, now - older_than)
        return await self._remove(prefix, _SQL["bury"], (*_level(prefix, ""), *age, limit))

    async def _remove(self, place: str, statement: str, parameters: Sequence[object]) -> int:
        try:
            return await self._file_of(place).run(statement, parameters)
        except CommitFailed as failed:
            raise OutcomeUnknown(place, str(failed)) from failed

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally."""
        for key in keys:
            check_key(key)
        for file in {self._file_of(key): None for key in keys}:
            part = [key for key in keys if self._file_of(key) is file]
            await self._remove(part[0], _SQL["drop"], [_json(part)])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if anything in the file changed, in this process or another."""
        if not topic.startswith(_IN_SESSION_FILE):
            await self._access.wait(topic, timeout)
            return
        file = self._sessions
        changes = file.wakeups if topic.startswith(_WATCHED) else file.commits
        await file.wait(changes, topic, timeout)

    @property
    def sql(self) -> FileAccess:
        """Access to the main file."""
        return self._access

    async def now(self) -> Wall | None:
        """Return the time of this machine's clock, which all processes on a file share."""
        return self._clock.wall()

    async def age(self, record: Record) -> float | None:
        """Return for how long a version has been current; infinite if from an earlier boot."""
        version = [record.key, record.seq, record.trail]
        rows = await self._file_of(record.key).read(_SQL["written"], version)
        if not rows:
            return None
        ((boot, written),) = rows
        age = self._clock.mono().seconds - written
        # Without an id of the boot, a time that is still to come is of an earlier one.
        return age if boot == self._clock.boot() and age >= 0 else math.inf

    async def close(self) -> None:
        """Close both files."""
        await asyncio.gather(self._main.close(), self._sessions.close())


class _RecordRows(msgspec.Struct, frozen=True):
    """The parameters of the statements that write records in one file."""

    created: list[tuple[Any, ...]]
    replaced: list[tuple[Any, ...]]

    def keys(self) -> list[str]:
        """Return the keys of the records."""
        return [row[_KEY] for row in (*self.created, *self.replaced)]

    def has_watched_key(self) -> bool:
        """Whether others may wait for one of the records."""
        return any(row[_KEY].startswith(_WATCHED) for row in (*self.created, *self.replaced))


async def _apply(file: SqliteFile, rows: _RecordRows) -> list[str]:
    """Write rows; return the keys of those that conflicted."""
    match rows.created, rows.replaced:
        case [row], []:
            return [] if await file.run(_CREATE, row) else [row[_KEY]]
        case [], [row]:
            return [] if await file.run(_REPLACE, row) else [row[_KEY]]
        case _:
            return await file.write(_apply_many, rows)


def _apply_many(connection: sqlite3.Connection, rows: _RecordRows) -> list[str]:
    connection.execute("SAVEPOINT batch")
    written = 0
    if rows.created:
        written += connection.executemany(_CREATE, rows.created).rowcount
    if rows.replaced:
        written += connection.executemany(_REPLACE, rows.replaced).rowcount
    if written == len(rows.created) + len(rows.replaced):
        return []
    # One batch is fastest; after a conflict, write them one by one to find which ones conflict.
    connection.execute("ROLLBACK TO batch")
    return [
        row[_KEY]
        for statement, part in ((_CREATE, rows.created), (_REPLACE, rows.replaced))
        for row in part
        if not connection.execute(statement, row).rowcount
    ]


async def _read_filtered(
    file: SqliteFile, query: str, span: Sequence[Any], limit: int, where: filters.Filter
) -> list[Row]:
    """Read rows without those that cannot match; if a value is not JSON, read all rows."""
    condition = filter_to_sql(where, _DIALECT)
    try:
        return await file.read(
            query.format(where=condition.sql), [*span, *condition.parameters, limit]
        )
    except MalformedSqliteJson:
        return await file.read(query.format(where="1=1"), [*span, limit])


def _level(prefix: str, after: str, until: str = "") -> tuple[str, str, int]:
    # "0" follows "/", so the prefix with "0" is the end of the keys under it.
    return (after or prefix, until or f"{prefix[:-1]}0", len(prefix) + 1)


def _json(keys: list[str]) -> str:
    return msgspec.json.encode(keys).decode()


def _json_path(path: filters.Path) -> str:
    return "$" + "".join(f'."{step}"' for step in path)


def _kind_is(path: filters.Path, kind: JsonKind) -> SqlCondition:
    match kind:
        case "missing":
            sql = "json_type(value, ?) IS NULL"
        case "number":
            sql = "coalesce(json_type(value, ?) IN ('integer', 'real'), 0)"
        case _:
            sql = f"json_type(value, ?) IS '{kind}'"
    return SqlCondition(sql, (_json_path(path),))


def _extract(path: filters.Path) -> SqlCondition:
    return SqlCondition("json_extract(value, ?)", (_json_path(path),))


_DIALECT = Dialect(_kind_is, _extract, _extract, "?")
