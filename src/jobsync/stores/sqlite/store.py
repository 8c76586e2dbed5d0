"""Records in an SQLite file: the embedded default, for many processes on one machine.

Every commit is synced to disk. Writers of all processes take turns; a reader never stops
them. Sessions and elections live in a second file beside the first, so that a long
transaction of the user's cannot starve a heartbeat. A caller never sees "database is
locked": it waits, for `patience` seconds at most, then gets `Unavailable`.

Assumes a local filesystem (network filesystems are refused) and that the file is neither
removed nor replaced while open (each access looks, and refuses from then on). An error
of the disk at the moment of COMMIT leaves the outcome unknown; every other error means
that nothing was written.
"""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.clock import Clock, Wall
from jobsync.core.codec import Json
from jobsync.core.ids import NONCE_LENGTH
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
from jobsync.stores.filter_sql import (
    Dialect,
    JsonKind,
    SqlCondition,
    filter_to_sql,
)
from jobsync.stores.history import (
    check_after,
    check_stream,
    entry_of,
    first_id,
    lines_of,
)
from jobsync.stores.local_notify import LocalNotifier
from jobsync.stores.paging import Row, check_age, check_page, check_span, collect
from jobsync.stores.record_codec import draft, revive
from jobsync.stores.sql_access import Parameters, SqliteAccess
from jobsync.stores.sqlite.file import (
    CommitFailed,
    MalformedSqliteJson,
    SqliteFile,
)

__all__ = ["FileAccess", "SqliteStore"]


# The narrow way into an SQLite store.


T = TypeVar("T")


class FileAccess(SqliteAccess):
    """Reads and writes one file.

    Args:
        file: which one.
        clock: this machine's.
    """

    def __init__(self, file: SqliteFile, clock: Clock) -> None:
        self.clock = clock
        self.path = file.path
        self._file = file
        self._topics = LocalNotifier.at(str(file.path))

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return await self._file.read(query, parameters)

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction."""
        try:
            return await self._file.write(work)
        except CommitFailed as failed:
            raise OutcomeUnknown(place, str(failed)) from failed

    def wake(self, topic: str) -> None:
        """Let those who wait in this process look; others see that the file has changed."""
        self._topics.wake([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken here, or if anybody has changed the file."""
        await self._file.wait(self._file.commits, timeout, partial(self._topics.wait, topic))


PATIENCE = 30.0
"""Seconds to wait for other writers: far longer than any transaction of this library."""

_IN_SESSION_FILE = ("session/", "role/", "request/")
_RUNG_FOR = ("role/", "request/")
"""What is waited for in the file of the sessions, which beats change all the time."""

# As bytes: text that is not UTF-8 would fail the whole query, not its own row.
_VALUE = "CAST(value AS BLOB)"
_COLUMNS = f"key, {_VALUE}, seq, epoch, format, trail"
_GET = f"SELECT {_COLUMNS} FROM jobsync_record WHERE key IN (SELECT value FROM json_each(?))"
# One level only: nothing but the last segment may follow the prefix.
_LEVEL = "key > ? AND key < ? AND instr(substr(key, ?), '/') = 0"
_HEADS = (
    f"SELECT key, trail FROM jobsync_record WHERE {_LEVEL} AND value IS NOT NULL "
    "ORDER BY key LIMIT ?"
)
_SCAN = (
    f"SELECT {_COLUMNS} FROM jobsync_record WHERE {_LEVEL} AND value IS NOT NULL AND {{where}} "
    "ORDER BY key LIMIT ?"
)
_CREATE = (
    "INSERT INTO jobsync_record (value, seq, epoch, format, trail, boot, written, key) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_REPLACE = (
    "UPDATE jobsync_record SET value = ?, seq = ?, epoch = ?, format = ?, trail = ?, boot = ?, "
    "written = ? WHERE key = ? AND seq = ? AND trail = ?"
)
_WRITTEN = "SELECT boot, written FROM jobsync_record WHERE key = ? AND seq = ? AND trail = ?"
# A tombstone of an earlier boot is older than any request that is still under way.
_BURY = (
    f"DELETE FROM jobsync_record WHERE key IN (SELECT key FROM jobsync_record WHERE {_LEVEL} "
    "AND value IS NULL AND (boot <> ? OR written > ? OR written < ?) LIMIT ?)"
)
_DROP = "DELETE FROM jobsync_record WHERE key IN (SELECT value FROM json_each(?))"
_APPEND = "INSERT INTO jobsync_entry (stream, id, value) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_READ = (
    f"SELECT id, stream, {_VALUE} FROM jobsync_entry WHERE stream = ? AND id > ? AND {{where}} "
    "ORDER BY id LIMIT ?"
)
_DISCARD = "DELETE FROM jobsync_entry WHERE stream = ? AND id < ?"

_KEY = 7
"""Where among the parameters of a row its key stands."""


class SqliteStore(Store):
    """Records in a file and, for sessions, in a second one beside it. Make it with `connect`."""

    def __init__(self, main: SqliteFile, sessions: SqliteFile, components: Components) -> None:
        self.name = f"sqlite:///{main.path}"
        self._main = main
        self._sessions = sessions
        self._access = FileAccess(main, components.clock)
        self._clock = components.clock
        self._ids = components.ids
        self._witness = CorruptionLog(self.name, components.events)

    @classmethod
    async def connect(
        cls, path: Path, components: Components | None = None, *, patience: float = PATIENCE
    ) -> Self:
        """Open both files, making them and their tables if need be.

        Raises:
            Misconfigured: they cannot serve as a store, with the reason and the fix.
        """
        components = components or Components.system()
        main = await SqliteFile.open(path, components.clock, patience)
        try:
            beside = main.path.with_name(f"{path.name}-sessions")
            sessions = await SqliteFile.open(beside, components.clock, patience)
        except BaseException:
            await main.close()
            raise
        return cls(main, sessions, components)

    def _file(self, key: str) -> SqliteFile:
        return self._sessions if key.startswith(_IN_SESSION_FILE) else self._main

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name."""
        for key in keys:
            check_key(key)
        rows: dict[str, tuple[Any, ...]] = {}
        for file in {self._file(key): None for key in keys}:
            wanted = [key for key in keys if self._file(key) is file]
            rows |= {row[0]: row for row in await file.read(_GET, [_json(wanted)])}
        return [
            None if row is None or (row[1] is None and not tombstones) else revive(*row)
            for row in map(rows.get, keys)
        ]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, those to one file in one transaction."""
        records, texts = draft(changes, self._ids)
        failed: dict[str, Outcome] = {}
        begun = False
        for file, rows in self._sort(changes, records, texts):
            try:
                failed |= dict.fromkeys(await _apply(file, rows), Conflicted())
            except CommitFailed as error:
                failed |= dict.fromkeys(rows.keys(), Unknown(str(error)))
            except JobsyncError as error:
                # To raise would be to say that nothing was written.
                if not begun:
                    raise
                failed |= dict.fromkeys(rows.keys(), Unknown(str(error)))
            begun = True
            if file is self._sessions and rows.are_rung_for():
                file.ring()
        if not failed:
            return [*map(Applied, records)]
        return [failed.get(record.key) or Applied(record) for record in records]

    def _sort(
        self, changes: Sequence[Change], records: list[Record], texts: list[str | None]
    ) -> "list[tuple[SqliteFile, _RecordRows]]":
        """Give the rows to write in each file, sessions first."""
        boot, now = self._clock.boot(), self._clock.mono().seconds
        sessions, main = _RecordRows([], []), _RecordRows([], [])
        for change, record, text in zip(changes, records, texts, strict=True):
            key, seq, trail = record.key, record.seq, record.trail
            epoch, form, base = record.epoch, record.format, change.base
            rows = sessions if key.startswith(_IN_SESSION_FILE) else main
            # Written out twice: a tuple is dear to take apart and make again.
            if base is None:
                rows.created.append((text, seq, epoch, form, trail, boot, now, key))
            else:
                rows.replaced.append(
                    (text, seq, epoch, form, trail, boot, now, key, base.seq, base.trail)
                )
        both = ((self._sessions, sessions), (self._main, main))
        return [(file, rows) for file, rows in both if rows.created or rows.replaced]

    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List names and versions."""
        check_span(prefix, after, limit)
        rows = await self._file(prefix).read(_HEADS, [*_level(prefix, after), limit])
        return [Head(key, trail[:NONCE_LENGTH]) for key, trail in rows]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        check_span(prefix, after, limit)
        wanted = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await _narrowed(self._file(prefix), _SCAN, _level(prefix, after), limit, wanted)

        return await collect(
            fetch, revive, self._witness.report, after=after, limit=limit, where=wanted
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history, in one transaction."""
        check_stream(stream)
        rows = [
            (stream, line.id, line.data.decode())
            for line in lines_of(entries, batch or self._ids.batch())
        ]
        try:
            await self._file(stream).write(sqlite3.Connection.executemany, _APPEND, rows)
        except CommitFailed as failed:
            raise OutcomeUnknown(stream, str(failed)) from failed

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history."""
        check_stream(stream)
        check_after(after)
        check_page(limit)
        wanted = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await _narrowed(self._file(stream), _READ, (stream, after), limit, wanted)

        return await collect(
            fetch, entry_of, self._witness.report, after=after, limit=limit, where=wanted
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Forget old lines of a history."""
        check_age(older_than)
        check_stream(stream)
        end = first_id(self._clock.wall() + -older_than)
        return await self._remove(stream, _DISCARD, (stream, end))

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""
        check_prefix(prefix)
        check_page(limit)
        check_age(older_than)
        now = self._clock.mono().seconds
        age = (self._clock.boot(), now, now - older_than)
        return await self._remove(prefix, _BURY, (*_level(prefix, ""), *age, limit))

    async def _remove(self, place: str, statement: str, parameters: Sequence[object]) -> int:
        try:
            return await self._file(place).run(statement, parameters)
        except CommitFailed as failed:
            raise OutcomeUnknown(place, str(failed)) from failed

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good."""
        for key in keys:
            check_key(key)
        for file in {self._file(key): None for key in keys}:
            part = [key for key in keys if self._file(key) is file]
            await self._remove(part[0], _DROP, [_json(part)])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if anything in the file changed, in this process or another."""
        if not topic.startswith(_IN_SESSION_FILE):
            await self._access.wait(topic, timeout)
            return
        file = self._sessions
        changes = file.rings if topic.startswith(_RUNG_FOR) else file.commits
        await file.wait(changes, timeout, self._clock.sleep)

    @property
    def sql(self) -> FileAccess:
        """The way into the main file."""
        return self._access

    async def now(self) -> Wall | None:
        """Tell the time: all processes on a file share this machine's clock."""
        return self._clock.wall()

    async def age(self, record: Record) -> float | None:
        """Tell for how long a version has stood; what an earlier boot wrote is infinitely old."""
        wanted = [record.key, record.seq, record.trail]
        rows = await self._file(record.key).read(_WRITTEN, wanted)
        if not rows:
            return None
        ((boot, written),) = rows
        return self._clock.mono().seconds - written if boot == self._clock.boot() else math.inf

    async def close(self) -> None:
        """Close both files."""
        await asyncio.gather(self._main.close(), self._sessions.close())


class _RecordRows(msgspec.Struct, frozen=True):
    """What is to be written in one file: the parameters of its statements."""

    created: list[tuple[Any, ...]]
    replaced: list[tuple[Any, ...]]

    def keys(self) -> list[str]:
        """Name the records."""
        return [row[_KEY] for row in (*self.created, *self.replaced)]

    def are_rung_for(self) -> bool:
        """Say whether somebody may wait for one of the records."""
        return any(row[_KEY].startswith(_RUNG_FOR) for row in (*self.created, *self.replaced))


async def _apply(file: SqliteFile, rows: _RecordRows) -> list[str]:
    """Write rows; give the keys of those that were refused."""
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
    # Together is fastest; which ones were refused is found one by one.
    connection.execute("ROLLBACK TO batch")
    return [
        row[_KEY]
        for statement, part in ((_CREATE, rows.created), (_REPLACE, rows.replaced))
        for row in part
        if not connection.execute(statement, row).rowcount
    ]


async def _narrowed(
    file: SqliteFile, query: str, span: Sequence[Any], limit: int, where: filters.Filter
) -> list[Row]:
    """Let SQL drop what cannot match; where a value is not JSON, read them all."""
    condition = filter_to_sql(where, _DIALECT)
    try:
        return await file.read(
            query.format(where=condition.sql), [*span, *condition.parameters, limit]
        )
    except MalformedSqliteJson:
        return await file.read(query.format(where="1=1"), [*span, limit])


def _level(prefix: str, after: str) -> tuple[str, str, int]:
    # "0" follows "/", so this is the end of everything under the prefix.
    return (after or prefix, f"{prefix[:-1]}0", len(prefix) + 1)


def _json(keys: list[str]) -> str:
    return msgspec.json.encode(keys).decode()


def _step_into(path: filters.Path) -> str:
    return "$" + "".join(f'."{step}"' for step in path)


def _kind_is(path: filters.Path, kind: JsonKind) -> SqlCondition:
    match kind:
        case "missing":
            sql = "json_type(value, ?) IS NULL"
        case "number":
            sql = "coalesce(json_type(value, ?) IN ('integer', 'real'), 0)"
        case _:
            sql = f"json_type(value, ?) IS '{kind}'"
    return SqlCondition(sql, (_step_into(path),))


def _extract(path: filters.Path) -> SqlCondition:
    return SqlCondition("json_extract(value, ?)", (_step_into(path),))


_DIALECT = Dialect(_kind_is, _extract, _extract, "?")
