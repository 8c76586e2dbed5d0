"""Records in a PostgreSQL database: for fleets on many machines, with or without PgBouncer.

Every call is one statement, and a statement is one transaction, judged by the server alone:
of several writes based on one record at most one finds it. Whatever isolation level the
role has, the outcome is the same.

A reply that does not come leaves a write unknown, be it for a crash, a cut network or a
statement given up after `patience` seconds. An error that the server reports itself means
that nothing was written. After an outage the store goes on by itself.

Assumes that a commit which the server reported stays: a server that loses it at a failover
(an asynchronous standby, `synchronous_commit = off`) takes the promise with it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import psycopg

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.core.ids import NONCE_LENGTH
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
from jobsync.stores.filter_sql import (
    Dialect,
    JsonKind,
    SqlCondition,
    filter_to_sql,
)
from jobsync.stores.history import check_after, check_stream, entry_of, lines_of
from jobsync.stores.paging import Row, check_age, check_page, check_span, collect
from jobsync.stores.postgres.errors import explain
from jobsync.stores.postgres.notifier import Notifier, channel_of, hears
from jobsync.stores.postgres.pool import Lost, MalformedJson, PostgresPool
from jobsync.stores.postgres.queries import Statements, as_array, quote_name
from jobsync.stores.postgres.schema import find_schema, schema_sql, upgrade
from jobsync.stores.record_codec import draft, revive
from jobsync.stores.sql_access import Parameters, PostgresAccess

__all__ = ["PoolAccess", "PostgresStore", "schema_sql"]


# The narrow way into a PostgreSQL store.


class PoolAccess(PostgresAccess):
    """Runs statements on a store's connections.

    Args:
        pool: the connections.
        bell: wakes who waits.
        schema: where jobsync's tables are, quoted.
    """

    def __init__(self, pool: PostgresPool, bell: Notifier, schema: str) -> None:
        self.schema = schema
        self.channel = bell.channel
        self._pool = pool
        self._bell = bell

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run one statement, and give its rows."""
        try:
            return await self._pool.run(statement, parameters)
        except Lost as lost:
            raise OutcomeUnknown(place, str(lost)) from lost

    async def run_loudly(
        self, quietly: str, loudly: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement, and let those who wait for the topic look, at once or soon."""
        try:
            if self._bell.due([topic]):
                notice = {"channel": self._bell.channel, "topic": topic}
                return await self.run(loudly, {**parameters, **notice}, topic)
            rows = await self.run(quietly, parameters, topic)
        except OutcomeUnknown:
            self._bell.ring_later([topic])
            raise
        self._bell.ring_later([topic])
        return rows

    def wake(self, topic: str) -> None:
        """Ring, soon."""
        self._bell.ring_later([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was rung for."""
        await self._bell.wait(topic, timeout)


PATIENCE = 30.0
"""Seconds to wait for an answer: far longer than any statement of this library takes."""

CONNECTIONS = 8
"""The most connections of one process, besides one that listens. It begins with one."""


class PostgresStore(Store):
    """Records in one schema of a database. Make it with `connect`."""

    def __init__(
        self, pool: PostgresPool, bell: Notifier, schema: str, components: Components
    ) -> None:
        self.name = pool.name
        self._pool = pool
        self._bell = bell
        self._access = PoolAccess(pool, bell, quote_name(schema))
        self._sql = Statements.within(quote_name(schema))
        self._ids = components.ids
        self._witness = CorruptionLog(self.name, components.events)

    @classmethod
    async def connect(
        cls,
        url: PostgresUrl,
        components: Components | None = None,
        *,
        patience: float = PATIENCE,
        connections: int = CONNECTIONS,
    ) -> Self:
        """Connect, make the tables if they are not there, and see what stands in between.

        Raises:
            Misconfigured: it cannot serve as a store, with the reason and the fix.
            Unavailable: the server cannot be reached, or takes no writes.
        """
        components = components or Components.system()
        pool = PostgresPool(url, components, patience=patience, connections=connections)
        try:
            async with asyncio.timeout(patience):
                schema, listens = await _prepare(pool, url, components)
        except BaseException as error:
            await pool.close()
            if isinstance(error, TimeoutError):
                raise Unavailable(pool.name, f"no answer within {patience:g} s") from error
            raise
        bell = Notifier(pool, channel_of(schema), components, listens=listens)
        return cls(pool, bell, schema, components)

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name."""
        for key in keys:
            check_key(key)
        if len(keys) == 1:
            found = await self._read(self._sql.get, keys)
        else:
            found = await self._read(self._sql.get_many, [as_array(keys)]) if keys else []
        rows = {row[0]: row for row in found}
        return [
            None if row is None or (row[1] is None and not tombstones) else revive(*row)
            for row in map(rows.get, keys)
        ]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, all in one statement."""
        records, texts = draft(changes, self._ids)
        if not records:
            return []
        topics = {parent(record.key) for record in records}
        due = self._bell.due(topics)
        bases = [change.base for change in changes]
        try:
            rows = await self._pool.run(*self._request(bases, records, texts, due))
        except Lost as lost:
            self._bell.ring_later(topics)
            return [Unknown(str(lost)) for _ in records]
        if rows and len(due) < len(topics):
            self._bell.ring_later(topics.difference(due))
        applied = {row[0] for row in rows}
        return [Applied(record) if record.key in applied else Conflicted() for record in records]

    def _request(
        self,
        bases: list[Record | None],
        records: list[Record],
        texts: list[str | None],
        due: list[str],
    ) -> tuple[str, Sequence[Any]]:
        """Give the statement that makes changes, and its parameters."""
        if len(records) > 1:
            columns = _columns(bases, records, texts)
            if due:
                return self._sql.write_loudly, (*columns, self._bell.channel, as_array(due))
            return self._sql.write, columns
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
            quietly, loudly = self._sql.create, self._sql.create_loudly
        else:
            row = (*row, base.seq, base.trail)
            quietly, loudly = self._sql.replace, self._sql.replace_loudly
        return (loudly, (*row, self._bell.channel, due[0])) if due else (quietly, row)

    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List names and versions."""
        check_span(prefix, after, limit)
        rows = await self._read(self._sql.heads, [*_level(prefix, after), limit])
        return [Head(key, trail[:NONCE_LENGTH]) for key, trail in rows]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        check_span(prefix, after, limit)
        wanted = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await self._narrowed(self._sql.scan, _level(prefix, after), limit, wanted)

        return await collect(
            fetch, revive, self._witness.report, after=after, limit=limit, where=wanted
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history, in one statement."""
        check_stream(stream)
        lines = lines_of(entries, batch or self._ids.batch())
        if not lines:
            return
        ids, texts = [line.id for line in lines], [line.data.decode() for line in lines]
        columns = (stream, as_array(ids), as_array(texts))
        due = self._bell.due([stream])
        try:
            if due:
                notice = (self._bell.channel, stream)
                await self._pool.run(self._sql.append_loudly, (*columns, *notice))
            else:
                await self._pool.run(self._sql.append, columns)
                self._bell.ring_later([stream])
        except Lost as lost:
            self._bell.ring_later([stream])
            raise OutcomeUnknown(stream, str(lost)) from lost

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history."""
        check_stream(stream)
        check_after(after)
        check_page(limit)
        wanted = filters.parse(where)

        async def fetch(after: str, limit: int) -> list[Row]:
            return await self._narrowed(self._sql.read, (stream, after), limit, wanted)

        return await collect(
            fetch, entry_of, self._witness.report, after=after, limit=limit, where=wanted
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Forget old lines of a history, by the server's clock."""
        check_age(older_than)
        check_stream(stream)
        return await self._remove(stream, self._sql.discard, (stream, older_than))

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones, by the server's clock."""
        check_prefix(prefix)
        check_page(limit)
        check_age(older_than)
        return await self._remove(
            prefix, self._sql.bury, (*_level(prefix, ""), float(older_than), limit)
        )

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good."""
        for key in keys:
            check_key(key)
        if keys:
            await self._remove(keys[0], self._sql.drop, (list(keys),))

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed; behind a pooler, if anything did."""
        await self._bell.wait(topic, timeout)

    @property
    def sql(self) -> PoolAccess:
        """The way into its tables."""
        return self._access

    async def now(self) -> Wall | None:
        """Tell the server's time."""
        ((seconds,),) = await self._read("SELECT extract(epoch FROM clock_timestamp())::float8")
        return Wall(seconds)

    async def age(self, record: Record) -> float | None:
        """Tell for how long a version has stood, unless the server's clock went back."""
        rows = await self._read(self._sql.age, [record.key, record.seq, record.trail])
        return rows[0][0] if rows and rows[0][0] >= 0 else None

    async def close(self) -> None:
        """Stop listening and close all connections. A forked child leaves them to its parent."""
        if not self._pool.is_forked:
            await self._bell.close()
            await self._pool.close()

    async def _read(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return await self._pool.run(query, parameters)
        except Lost as lost:
            raise Unavailable(self.name, str(lost)) from lost

    async def _narrowed(
        self, query: str, span: Sequence[Any], limit: int, where: filters.Filter
    ) -> list[Row]:
        """Let SQL drop what cannot match; where a value is not JSON, read them all."""
        condition = filter_to_sql(where, _DIALECT)
        # From the right: a schema may have any name.
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
        except Lost as lost:
            raise OutcomeUnknown(place, str(lost)) from lost
        return int(count)


async def _prepare(
    pool: PostgresPool, url: PostgresUrl, components: Components
) -> tuple[str, bool]:
    """Make the tables; give their schema, and whether notifications reach us."""
    async with AsyncExitStack() as stack:
        first = await pool.connect_apart()
        stack.push_async_callback(pool.give, first)
        second = await pool.connect_apart()
        stack.push_async_callback(second.close)
        try:
            schema = await find_schema(first, url)
            await upgrade(first, url, schema)
            probe = f"jobsync_probe_{components.randomness.bytes(6).hex()}"
            listens = await hears(first, second, probe)
        except psycopg.Error as error:
            raise explain(url, error) from error
        if listens:
            pool.prepare_statements()
        return schema, listens


def _columns(
    bases: list[Record | None], records: list[Record], texts: list[str | None]
) -> tuple[str, ...]:
    """Give changes as arrays, one for each column, in the order of their keys."""
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
        # No trail is empty, so that none is like this one.
        as_array(["" if base is None else base.trail for base in bases]),
    )


def _level(prefix: str, after: str) -> tuple[str, str, int]:
    # "0" follows "/", so this is the end of everything under the prefix.
    return (after or prefix, f"{prefix[:-1]}0", len(prefix) + 1)


def _step_into(path: filters.Path, last: str = "->") -> str:
    """Give the field's JSON, or its text with `->>`. By names only, so never into arrays."""
    steps = [" -> %s::text"] * (len(path) - 1)
    return f"(value::json{''.join(steps)} {last} %s::text)"


def _kind_is(path: filters.Path, kind: JsonKind) -> SqlCondition:
    found = _step_into(path)
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
    # By bytes, which is the order of code points; not by the database's language.
    return SqlCondition(f'{_step_into(path, "->>")} COLLATE "C"', path)


def _number(path: filters.Path) -> SqlCondition:
    return SqlCondition(f"{_step_into(path, '->>')}::float8", path)


_DIALECT = Dialect(_kind_is, _text, _number, "%s")
