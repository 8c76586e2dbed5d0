"""The PostgreSQL store: for fleets on many machines, with or without PgBouncer.

Every call is one statement, which is one transaction, and the server alone decides: of several
writes based on one record at most one is applied. The outcome does not depend on the role's
isolation level.

A missing reply leaves the outcome of a write unknown, whether because of a crash, a network
failure or the statement timeout. After an error that the server itself reports, nothing was
written. After an outage the store recovers by itself.

Assumes that a reported commit is durable: a server that loses it at a failover (an asynchronous
standby, `synchronous_commit = off`) breaks the guarantees.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import psycopg

from jobsync.components import NONCE_LENGTH, Components
from jobsync.core import filters
from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.core.keys import check_key, check_prefix, parent
from jobsync.core.urls import PostgresUrl
from jobsync.errors import OutcomeUnknown, Unavailable
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
from jobsync.stores.postgres.connection import statement_error
from jobsync.stores.postgres.listener import channel_of, receives_notifications
from jobsync.stores.postgres.notifier import Notifier, PoolAccess
from jobsync.stores.postgres.pool import MalformedJson, PostgresPool, ReplyLost
from jobsync.stores.postgres.schema import find_schema, schema_sql, upgrade
from jobsync.stores.record_codec import (
    build_records,
    check_after,
    check_stream,
    decode_entry,
    decode_record,
    encode_entries,
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
from jobsync.stores.sql import as_array, fill_in, load_sql, quote_name

__all__ = ["PostgresStore", "schema_sql", "statements_for"]

STATEMENT_TIMEOUT = 30.0
"""Seconds to wait for an answer: far longer than any statement of this library takes."""

MAX_CONNECTIONS = 2
"""The most connections of a store, besides one that listens for all stores of the process, and
those of long statements. Two, so that a queue settles messages while it claims the next."""

_SQL = load_sql(__file__, "queries.sql")


def statements_for(schema: str) -> dict[str, str]:
    """Return the statements of `queries.sql` for a schema, whose name is already quoted."""
    # A name may contain the sign of placeholders.
    values = {"schema": schema.replace("%", "%%")}
    return {name: fill_in(text, values) for name, text in _SQL.items()}


class PostgresStore(Store):
    """Records in one schema of a database. Create it with `connect`."""

    is_atomic = True

    def __init__(self, pool: PostgresPool, access: PoolAccess, components: Components) -> None:
        self.name = pool.name
        self._pool = pool
        self._notifier = access.notifier
        self._access = access
        self._sql = statements_for(access.schema)
        self._ids = components.ids
        self._corruption_log = CorruptionLog(self.name, components.events)

    @classmethod
    async def connect(
        cls,
        url: PostgresUrl,
        components: Components | None = None,
        *,
        statement_timeout: float = STATEMENT_TIMEOUT,
        max_connections: int = MAX_CONNECTIONS,
    ) -> Self:
        """Connect, create the tables if needed, and detect a pooler.

        Raises:
            Misconfigured: it cannot be used as a store, with the reason and the fix.
            Unavailable: the server cannot be reached, or is read-only.
        """
        components = components or Components.system()
        pool = PostgresPool(
            url,
            components,
            statement_timeout=statement_timeout,
            max_connections=max_connections,
        )
        try:
            async with asyncio.timeout(statement_timeout):
                schema, listens = await _prepare(pool, url, components)
        except BaseException as error:
            await pool.close()
            if isinstance(error, TimeoutError):
                reason = f"no answer within {statement_timeout:g} s"
                raise Unavailable(pool.name, reason) from error
            raise
        notifier = Notifier(pool, channel_of(schema), components, listens=listens)
        return cls(pool, PoolAccess(pool, notifier, quote_name(schema)), components)

    @classmethod
    def open_like(cls, store: Store, url: PostgresUrl, components: Components) -> Self:
        """Open a store that is open already, for another event loop, with one connection.

        That is opened by the first statement.
        """
        known = store.sql
        if not isinstance(known, PoolAccess):
            raise TypeError(f"{store.name} is not on PostgreSQL.")
        pool = PostgresPool(url, components, statement_timeout=STATEMENT_TIMEOUT, max_connections=1)
        listens = known.notifier.listens
        if listens:
            pool.prepare_statements()
        notifier = Notifier(pool, known.channel, components, listens=listens)
        return cls(pool, PoolAccess(pool, notifier, known.schema), components)

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key."""
        for key in keys:
            check_key(key)
        if len(keys) == 1:
            found = await self._read(self._sql["get"], keys)
        else:
            found = await self._read(self._sql["get_many"], [as_array(keys)]) if keys else []
        rows = {row[0]: row for row in found}
        return [
            None if row is None or (row[1] is None and not tombstones) else decode_record(*row)
            for row in map(rows.get, keys)
        ]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, all in one statement."""
        records, texts = build_records(changes, self._ids)
        if not records:
            return []
        topics = {parent(record.key) for record in records}
        due = self._notifier.take_due(topics)
        bases = [change.base for change in changes]
        try:
            rows = await self._pool.run(*self._build_write(bases, records, texts, due))
        except ReplyLost as lost:
            self._notifier.notify_later(topics)
            return [Unknown(str(lost)) for _ in records]
        if rows and len(due) < len(topics):
            self._notifier.notify_later(topics.difference(due))
        applied = {row[0] for row in rows}
        return [Applied(record) if record.key in applied else Conflicted() for record in records]

    def _build_write(
        self,
        bases: list[Record | None],
        records: list[Record],
        texts: list[str | None],
        due: list[str],
    ) -> tuple[str, Sequence[Any]]:
        """Return the statement that applies changes, and its parameters."""
        if len(records) > 1:
            columns = _columns(bases, records, texts)
            if due:
                channel = self._notifier.channel
                return self._sql["write_and_notify"], (*columns, channel, as_array(due))
            return self._sql["write"], columns
        (base,), (record,), (text,) = bases, records, texts
        row: tuple[Any, ...] = (
            text,
            record.seq,
            record.epoch,
            record.format,
            record.trail,
            record.key,
        )
        if base is None:
            statement, notifying = self._sql["create"], self._sql["create_and_notify"]
        else:
            row = (*row, base.seq, base.trail)
            statement, notifying = self._sql["replace"], self._sql["replace_and_notify"]
        return (notifying, (*row, self._notifier.channel, due[0])) if due else (statement, row)

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys and versions."""
        check_listing(prefix, after, limit, until)
        rows = await self._read(self._sql["heads"], [*_level(prefix, after, until), limit])
        return [Head(key, trail[:NONCE_LENGTH]) for key, trail in rows]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        check_listing(prefix, after, limit)
        filter_ = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await self._read_filtered(
                self._sql["scan"], _level(prefix, after), limit, filter_
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
        """Append entries to a history, in one statement."""
        check_stream(stream)
        encoded = encode_entries(entries, batch or self._ids.batch())
        if not encoded:
            return
        ids, texts = [entry.id for entry in encoded], [entry.data.decode() for entry in encoded]
        columns = (stream, as_array(ids), as_array(texts))
        due = self._notifier.take_due([stream])
        try:
            if due:
                notification = (self._notifier.channel, stream)
                await self._pool.run(self._sql["append_and_notify"], (*columns, *notification))
            else:
                await self._pool.run(self._sql["append"], columns)
                self._notifier.notify_later([stream])
        except ReplyLost as lost:
            self._notifier.notify_later([stream])
            raise OutcomeUnknown(stream, str(lost)) from lost

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read entries of a history."""
        check_stream(stream)
        check_after(after)
        check_limit(limit)
        filter_ = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await self._read_filtered(self._sql["read"], (stream, after), limit, filter_)

        return await collect(
            fetch,
            decode_entry,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=filter_,
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Delete old entries of a history, by the server's clock."""
        check_age(older_than)
        check_stream(stream)
        return await self._remove(stream, self._sql["discard"], (stream, older_than))

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones, by the server's clock."""
        check_prefix(prefix)
        check_limit(limit)
        check_age(older_than)
        return await self._remove(
            prefix, self._sql["bury"], (*_level(prefix, ""), float(older_than), limit)
        )

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally."""
        for key in keys:
            check_key(key)
        if keys:
            await self._remove(keys[0], self._sql["drop"], (list(keys),))

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed; behind a pooler, if anything did."""
        await self._notifier.wait(topic, timeout)

    @property
    def sql(self) -> PoolAccess:
        """Access to the tables."""
        return self._access

    async def now(self) -> Wall | None:
        """Return the server's time."""
        ((seconds,),) = await self._read("SELECT extract(epoch FROM clock_timestamp())::float8")
        return Wall(seconds)

    async def age(self, record: Record) -> float | None:
        """Return for how long a version has been current, unless the server's clock went back."""
        rows = await self._read(self._sql["age"], [record.key, record.seq, record.trail])
        return rows[0][0] if rows and rows[0][0] >= 0 else None

    async def close(self) -> None:
        """Stop listening and close all connections. A forked child leaves them to its parent."""
        if not self._pool.is_forked:
            await self._notifier.close()
            await self._pool.close()

    async def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return await self._pool.run(query, parameters)
        except ReplyLost as lost:
            raise Unavailable(self.name, str(lost)) from lost

    async def _read_filtered(
        self, query: str, span: Sequence[Any], limit: int, where: filters.Filter
    ) -> list[Row]:
        """Read rows without those that cannot match; if a value is not JSON, read all rows."""
        condition = filter_to_sql(where, _DIALECT)
        # The last one: the schema's name may contain it too.
        before, _, after = query.rpartition("{where}")
        try:
            return await self._read(
                f"{before}{condition.sql}{after}", [*span, *condition.parameters, limit]
            )
        except MalformedJson:
            return await self._read(f"{before}1=1{after}", [*span, limit])

    async def _remove(self, place: str, statement: str, parameters: Sequence[object]) -> int:
        try:
            ((count,),) = await self._pool.run(statement, parameters)
        except ReplyLost as lost:
            raise OutcomeUnknown(place, str(lost)) from lost
        return int(count)


async def _prepare(
    pool: PostgresPool, url: PostgresUrl, components: Components
) -> tuple[str, bool]:
    """Create the tables; return their schema, and whether notifications are received."""
    async with AsyncExitStack() as stack:
        first = await pool.connect()
        stack.push_async_callback(pool.release, first)
        second = await pool.connect()
        stack.push_async_callback(second.close)
        try:
            schema = await find_schema(first, url)
            await upgrade(first, url, schema)
            probe = f"jobsync_probe_{components.randomness.bytes(6).hex()}"
            listens = await receives_notifications(first, second, probe)
        except psycopg.Error as error:
            raise statement_error(url, error) from error
        if listens:
            pool.prepare_statements()
        return schema, listens


def _columns(
    bases: list[Record | None], records: list[Record], texts: list[str | None]
) -> tuple[str, ...]:
    """Return changes as arrays, one for each column, in the order of their keys."""
    order = sorted(range(len(records)), key=lambda i: records[i].key)
    bases = [bases[i] for i in order]
    records = [records[i] for i in order]
    return (
        as_array([record.key for record in records]),
        as_array([texts[i] for i in order]),
        as_array([record.seq for record in records]),
        as_array([record.epoch for record in records]),
        as_array([record.format for record in records]),
        as_array([record.trail for record in records]),
        as_array([None if base is None else base.seq for base in bases]),
        # No trail is empty, so this one matches none.
        as_array(["" if base is None else base.trail for base in bases]),
    )


def _level(prefix: str, after: str, until: str = "") -> tuple[str, str, int]:
    # "0" follows "/", so the prefix with "0" is the end of the keys under it.
    return (after or prefix, until or f"{prefix[:-1]}0", len(prefix) + 1)


def _json_field(path: filters.Path, last: str = "->") -> str:
    """Return SQL for the field's JSON, or its text with `->>`. By name only, never into arrays."""
    steps = [" -> %s::text"] * (len(path) - 1)
    return f"(value::json{''.join(steps)} {last} %s::text)"


def _kind_is(path: filters.Path, kind: JsonKind) -> SqlCondition:
    found = _json_field(path)
    match kind:
        case "missing":
            sql = f"{found} IS NULL"
        case "null" | "true" | "false":
            sql = f"coalesce({found}::text = '{kind}', false)"
        case _:
            name = "string" if kind == "text" else kind
            sql = f"coalesce(json_typeof({found}) = '{name}', false)"
    return SqlCondition(sql, path)


def _text(path: filters.Path) -> SqlCondition:
    # By bytes, which is the order of code points; not by the database's locale.
    return SqlCondition(f'{_json_field(path, "->>")} COLLATE "C"', path)


def _number(path: filters.Path) -> SqlCondition:
    return SqlCondition(f"{_json_field(path, '->>')}::float8", path)


_DIALECT = Dialect(_kind_is, _text, _number, "%s")
