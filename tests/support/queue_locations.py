"""Databases on which the conformance suite of queue backends runs."""

import asyncio
import itertools
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import pytest
from store_locations import MemoryLocation, ObjectsLocation, PostgresLocation, StoreLocation

from jobsync import Components, OutcomeUnknown, Store
from jobsync.core.clock import Mono, SystemClock, Wall
from jobsync.core.urls import ObjectsUrl, PostgresUrl, SqliteUrl, parse_url
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.sql_views import SqlViews
from jobsync.queue.backend import QueueBackend
from jobsync.queue.directory import QueueDirectory
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.opening import open_backend, open_directory
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.directory import PagesDirectory
from jobsync.queue.settings import QueueOrder
from jobsync.stores.contract import Change, Outcome, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sql import (
    Parameters,
    PostgresAccess,
    SqlAccess,
    SqliteAccess,
    Steps,
)
from jobsync.stores.sqlite.store import SqliteStore

__all__ = [
    "Faults",
    "PagesQueues",
    "PostgresQueues",
    "QueueLocation",
    "SqliteQueues",
    "find_empty_location",
    "list_in_view",
]

T = TypeVar("T")
_numbers = itertools.count()

_CLAIM_ARRAYS = {
    "payload": "payloads",
    "timeout": "timeouts",
    "deliveries": "deliveries",
    "returned": "returned",
    "errors": "errors",
}
"""The arrays in the row of a claim for columns of a message; other columns are the claim's own."""

_CLAIM_ITEMS = {"deliveries": 2, "returned": 3, "timeout": 5}
"""Likewise on SQLite: the places in the array of a message."""


class Faults:
    """Loses the next replies or requests, as many as are set."""

    def __init__(self) -> None:
        self.lost_replies = 0
        self.lost_requests = 0
        self.spared = 0
        """How many requests have replies before the first of these is lost."""
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        """What happens once, before the caller of the next of them learns that it was lost."""

    async def apply(self, work: Callable[[], Awaitable[T]], place: str) -> T:
        """Make a request that may be lost, or its reply."""
        if self.spared:
            self.spared -= 1
            return await work()
        if self.lost_requests:
            self.lost_requests -= 1
            await self._let_others_act()
            raise OutcomeUnknown(place, "the request was lost")
        result = await work()
        if self.lost_replies:
            self.lost_replies -= 1
            await self._let_others_act()
            raise OutcomeUnknown(place, "the reply was lost")
        return result

    async def _let_others_act(self) -> None:
        if self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            await act()


class QueueLocation(Protocol):
    """A database with messages."""

    faults: Faults

    async def open(
        self,
        queue: str,
        components: Components | None = None,
        order: QueueOrder = "fifo",
        limits: QueueLimits = NO_LIMITS,
    ) -> QueueBackend:
        """Open another backend of a queue."""
        ...

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues."""
        ...

    async def close(self) -> None:
        """Close all backends."""
        ...

    def advance(self, seconds: float) -> None:
        """Advance the time of all messages."""
        ...

    def damage(self, id: str, text: str) -> None:
        """Overwrite a payload behind the library's back."""
        ...

    def overwrite(self, table: str, id: str, **columns: Any) -> None:
        """Overwrite columns of a message, in one of its tables, behind the library's back."""
        ...


class _FaultyStore(StoreDecorator):
    """A store whose SQL access has faults."""

    def __init__(self, inner: Store, access: SqlAccess) -> None:
        super().__init__(inner)
        self._access = access

    @property
    def sql(self) -> SqlAccess:
        return self._access


class _FaultySqlite(SqliteAccess):
    def __init__(self, inner: SqliteAccess, faults: Faults) -> None:
        self.clock = inner.clock
        self.path = inner.path
        self._inner = inner
        self._faults = faults

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        return await self._inner.read(query, parameters)

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        return await self._faults.apply(lambda: self._inner.write(work, place), place)

    def wake(self, topic: str) -> None:
        self._inner.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        await self._inner.wait(topic, timeout)


class _FaultyPostgres(PostgresAccess):
    def __init__(self, inner: PostgresAccess, faults: Faults) -> None:
        self.schema = inner.schema
        self.channel = inner.channel
        self.user_connections = inner.user_connections
        self._inner = inner
        self._faults = faults

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        return await self._faults.apply(
            lambda: self._inner.run(statement, parameters, place), place
        )

    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        return await self._faults.apply(lambda: self._inner.run_steps(build, place), place)

    async def run_and_notify(
        self, quietly: str, loudly: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        return await self._faults.apply(
            lambda: self._inner.run_and_notify(quietly, loudly, parameters, topic), topic
        )

    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        await self._faults.apply(lambda: self._inner.copy_and_notify(statement, rows, topic), topic)

    def wake(self, topic: str) -> None:
        self._inner.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        await self._inner.wait(topic, timeout)


class SqliteQueues:
    """Queues in an SQLite file."""

    def __init__(self, path: Path) -> None:
        self.faults = Faults()
        self._path = path
        self._stores: list[Store] = []

    async def open(
        self,
        queue: str,
        components: Components | None = None,
        order: QueueOrder = "fifo",
        limits: QueueLimits = NO_LIMITS,
    ) -> QueueBackend:
        """Open another backend of a queue."""
        components = components or Components.system()
        store = await SqliteStore.connect(self._path, components)
        self._stores.append(store)
        faulty = _FaultyStore(store, _FaultySqlite(store.sql, self.faults))
        return open_backend(faulty, queue, components, order=order, limits=limits)

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues."""
        return open_directory(self._stores[0], Components.system())

    @property
    def url(self) -> SqliteUrl:
        """The URL of the file."""
        return SqliteUrl(str(self._path))

    async def close(self) -> None:
        """Close all backends."""
        for store in self._stores:
            await store.close()

    def advance(self, seconds: float) -> None:
        """Advance the time of all messages."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute(
                "UPDATE jobsync_message SET due = due - ?, wakes = wakes - ?", [seconds, seconds]
            )
            for table in ("jobsync_finished", "jobsync_result"):
                connection.execute(f"UPDATE {table} SET finished = finished - ?", [seconds])
            connection.execute("UPDATE jobsync_key SET held_until = held_until - ?", [seconds])
            connection.execute("UPDATE jobsync_limit SET refilled = refilled - ?", [seconds])
            times = ", ".join(
                f"{name} = {name} - :seconds" for name in ("claimed", "due", "closed", "finished")
            )
            connection.execute(f"UPDATE jobsync_claim SET {times}", {"seconds": seconds})
            # Not by SQLite's functions of JSON, which keep only 15 digits.
            connection.create_function("subtract", 2, _subtract)
            for name in ("dues", "times"):
                connection.execute(
                    f"UPDATE jobsync_claim SET {name} = subtract({name}, ?)"
                    f" WHERE {name} IS NOT NULL",
                    [seconds],
                )

    def damage(self, id: str, text: str) -> None:
        """Overwrite a payload behind the library's back."""
        self.overwrite("jobsync_message", id, payload=text)

    def overwrite(self, table: str, id: str, **columns: Any) -> None:
        """Overwrite columns of a message, also if it is claimed, behind the library's back."""
        names = ", ".join(f"{name} = ?" for name in columns)
        with closing(sqlite3.connect(self._path)) as connection, connection:
            statement = f"UPDATE {table} SET {names} WHERE id = ?"
            if connection.execute(statement, (*columns.values(), id)).rowcount:
                return
            for name, value in columns.items():
                _overwrite_claimed(connection, id, name, value)

    def execute(self, statement: str, **parameters: Any) -> list[Any]:
        """Run a statement behind the library's back; `{}` is the schema."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            return connection.execute(statement.replace("{}.", "main."), parameters).fetchall()


def _subtract(times: str, seconds: float) -> str:
    """Return a JSON array of times, each so many seconds earlier."""
    found = msgspec.json.decode(times, type=list[float | None])
    return msgspec.json.encode([t and t - seconds for t in found]).decode()


def _overwrite_claimed(connection: sqlite3.Connection, id: str, name: str, value: Any) -> None:
    """Overwrite a column of a message in the row of its claim."""
    own = (
        "SELECT m.fullkey FROM json_each(c.messages) AS m WHERE json_extract(m.value, '$[0]') = :id"
    )
    place = _CLAIM_ITEMS.get(name)
    change = (
        f"{name} = :value"
        if place is None
        else f"messages = json_set(messages, ({own}) || '[{place}]', :value)"
    )
    is_open = "substr(c.outcomes, m.key + 1, 1) = 'o'"
    connection.execute(
        f"UPDATE jobsync_claim AS c SET {change} WHERE EXISTS ({own} AND {is_open})",
        {"id": id, "value": value},
    )


class PostgresQueues:
    """Queues in their own schema of a PostgreSQL server."""

    def __init__(self, url: str) -> None:
        self.faults = Faults()
        self._location = PostgresLocation(url)
        self._stores: list[Store] = []

    async def open(
        self,
        queue: str,
        components: Components | None = None,
        order: QueueOrder = "fifo",
        limits: QueueLimits = NO_LIMITS,
    ) -> QueueBackend:
        """Open another backend of a queue."""
        components = components or Components.system()
        store = await self._location.open(components)
        self._stores.append(store)
        assert isinstance(store.sql, PostgresAccess)
        faulty = _FaultyStore(store, _FaultyPostgres(store.sql, self.faults))
        return open_backend(faulty, queue, components, order=order, limits=limits)

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues."""
        return open_directory(self._stores[0], Components.system())

    @property
    def url(self) -> PostgresUrl:
        """The URL of the schema."""
        return self._location.url

    async def close(self) -> None:
        """Close all backends and drop the schema."""
        for store in self._stores:
            await store.close()
        self._location.remove()

    def advance(self, seconds: float) -> None:
        """Advance the time of all messages."""
        by = f"interval '{seconds} seconds'"
        self._location.execute(f"UPDATE {{}}.jobsync_message SET due = due - {by}")
        for table in ("jobsync_finished", "jobsync_result"):
            self._location.execute(f"UPDATE {{}}.{table} SET finished = finished - {by}")
        self._location.execute(f"UPDATE {{}}.jobsync_key SET held_until = held_until - {by}")
        self._location.execute(f"UPDATE {{}}.jobsync_limit SET refilled = refilled - {by}")
        arrays = ", ".join(
            f"{name} = (SELECT array_agg(t - {by} ORDER BY n)"
            f" FROM unnest({name}) WITH ORDINALITY AS u (t, n))"
            for name in ("dues", "finished")
        )
        times = ", ".join(f"{name} = {name} - {by}" for name in ("claimed", "due", "closed"))
        self._location.execute(f"UPDATE {{}}.jobsync_claim SET {times}, {arrays}")

    def damage(self, id: str, text: str) -> None:
        """Overwrite a payload behind the library's back."""
        self.overwrite("jobsync_message", id, payload=text)

    def overwrite(self, table: str, id: str, **columns: Any) -> None:
        """Overwrite columns of a message, also if it is claimed, behind the library's back."""
        names = ", ".join(f"{name} = %s" for name in columns)
        statement = f"UPDATE {{}}.{table} SET {names} WHERE id = %s RETURNING 1"
        is_found = self._location.execute(statement, *columns.values(), id)
        if not is_found:
            for name, value in columns.items():
                self._overwrite_claimed(id, name, value)

    def _overwrite_claimed(self, id: str, name: str, value: Any) -> None:
        place = "array_position(ids, %(id)s)"
        array = _CLAIM_ARRAYS.get(name)
        change = f"{name} = %(value)s" if array is None else f"{array}[{place}] = %(value)s"
        self.execute(
            f"UPDATE {{}}.jobsync_claim SET {change} WHERE substr(outcomes, {place}, 1) = 'o'",
            id=id,
            value=value,
        )

    def execute(self, statement: str, **parameters: Any) -> list[Any]:
        """Run a statement behind the library's back; `{}` is the schema."""
        return self._location.execute(statement, **parameters)


def list_in_view(location: SqliteQueues | PostgresQueues) -> dict[str, tuple[Any, ...]]:
    """Return the rows of all messages that users of SQL see, by id.

    Their first columns are queue, id, state, attempts, most attempts and session, their last ones
    errors, payload and task.
    """
    SqlViews(location.url, JobKeys("sync_"), Components.system()).install("a")
    rows = location.execute("SELECT * FROM {}.sync_message")
    return {row[1]: tuple(row) for row in rows}


class _MovableClock(SystemClock):
    """The machine's clock, which a test can advance. Long sleeps advance it, too.

    Args:
        is_still: whether nothing else does, so that no pause of the machine counts. It starts at a
            whole second: the sum of that and of a test's steps is exact, whenever it runs.
    """

    def __init__(self, *, is_still: bool) -> None:
        self.ahead = 0.0
        self._is_still = is_still
        self._start = Wall(int(super().wall().seconds)), Mono(int(super().mono().seconds))

    def wall(self) -> Wall:
        return (self._start[0] if self._is_still else super().wall()) + self.ahead

    def mono(self) -> Mono:
        return (self._start[1] if self._is_still else super().mono()) + self.ahead

    async def sleep(self, seconds: float) -> None:
        if self._is_still or seconds > 1:
            self.ahead += max(0.0, seconds)
            seconds = 0
        await asyncio.sleep(seconds)


class _FaultyWrites(StoreDecorator):
    """A store that loses requests to write, or the replies."""

    def __init__(self, inner: Store, faults: Faults) -> None:
        super().__init__(inner)
        self._faults = faults

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        async def work() -> list[Outcome]:
            return await self.inner.write(changes)

        try:
            return await self._faults.apply(work, "a page")
        except OutcomeUnknown as error:
            return [Unknown(error.detail) for _ in changes]


class PagesQueues:
    """Queues in pages, in memory or in a bucket."""

    def __init__(self, location: StoreLocation) -> None:
        self.faults = Faults()
        self.location = location
        # A server has a clock of its own.
        self.clock = _MovableClock(is_still=isinstance(location, MemoryLocation))
        self._stores: list[Store] = []
        self._backends: list[PagesBackend] = []

    def components(self, components: Components | None = None) -> Components:
        """Return components with the clock of this location."""
        return msgspec.structs.replace(components or Components.system(), clock=self.clock)

    async def open(
        self,
        queue: str,
        components: Components | None = None,
        order: QueueOrder = "fifo",
        limits: QueueLimits = NO_LIMITS,
    ) -> PagesBackend:
        """Open another backend of a queue; it has no limits."""
        assert limits == NO_LIMITS
        components = self.components(components)
        store = await self.location.open(components)
        self._stores.append(store)
        bare = store.inner if isinstance(store, SettlingStore) else store
        settling = SettlingStore(_FaultyWrites(bare, self.faults), components)
        backend = PagesBackend(settling, queue, components, order=order)
        self._backends.append(backend)
        return backend

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues."""
        return PagesDirectory(self._stores[0], self.components())

    async def close(self) -> None:
        """Close all backends."""
        for store in self._stores:
            await store.close()

    def advance(self, seconds: float) -> None:
        """Advance the time, as if all backends had looked at all pages meanwhile."""
        self.clock.ahead += seconds
        for backend in self._backends:
            sightings = backend._pages._sightings
            for place, seen in sightings.items():
                sightings[place] = msgspec.structs.replace(seen, looked=self.clock.mono())

    def damage(self, id: str, text: str) -> None:
        """Fail: a page cannot be damaged in one message alone."""
        raise NotImplementedError(id, text)

    def overwrite(self, table: str, id: str, **columns: Any) -> None:
        """Fail: there are no columns."""
        raise NotImplementedError(table, id, columns)


def find_empty_location(request: pytest.FixtureRequest, tmp_path: Path) -> QueueLocation:
    """Return an empty place of the kind that a fixture's parameter names."""
    match request.param:
        case "sqlite":
            return SqliteQueues(tmp_path / "jobs.db")
        case "postgres":
            return PostgresQueues(request.getfixturevalue("postgres").url)
        case "memory":
            return PagesQueues(MemoryLocation())
    url = parse_url(request.getfixturevalue("bucket_url"))
    assert isinstance(url, ObjectsUrl)
    quirks = request.getfixturevalue("quirks")
    return PagesQueues(
        ObjectsLocation(
            url, bare_etags=quirks.bare_etags, conditional_delete=quirks.conditional_delete
        )
    )
