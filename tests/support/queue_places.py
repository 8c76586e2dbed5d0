"""Places on which the suite of queue ports runs: where messages are, apart from any open port."""

import itertools
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

from store_locations import PostgresLocation

from jobsync import Components, OutcomeUnknown, Store
from jobsync.queue.backend import QueueBackend
from jobsync.queue.sql import QueueDirectory, open_backend, open_directory
from jobsync.stores.contract import StoreDecorator
from jobsync.stores.sql import (
    Parameters,
    PostgresAccess,
    SqlAccess,
    SqliteAccess,
)
from jobsync.stores.sqlite.store import SqliteStore

__all__ = ["PostgresQueues", "QueuePlace", "SqliteQueues", "Trouble"]

T = TypeVar("T")
_numbers = itertools.count()


class Trouble:
    """Loses the replies to requests, or the requests themselves, as often as it is told."""

    def __init__(self) -> None:
        self.lost_replies = 0
        self.lost_requests = 0

    async def around(self, work: Callable[[], Awaitable[T]], place: str) -> T:
        """Make a request that may go wrong."""
        if self.lost_requests:
            self.lost_requests -= 1
            raise OutcomeUnknown(place, "the request was lost")
        result = await work()
        if self.lost_replies:
            self.lost_replies -= 1
            raise OutcomeUnknown(place, "the reply was lost")
        return result


class QueuePlace(Protocol):
    """Where messages are."""

    trouble: Trouble

    async def open(self, queue: str, components: Components | None = None) -> QueueBackend:
        """Open one more port to a queue."""
        ...

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues that ports were opened to."""
        ...

    async def close(self) -> None:
        """Close every port."""
        ...

    def let_pass(self, seconds: float) -> None:
        """Let time pass for all messages."""
        ...

    def damage(self, id: str, text: str) -> None:
        """Overwrite a payload behind the library's back."""
        ...


class _Troubled(StoreDecorator):
    """A store whose rows are reached through trouble."""

    def __init__(self, inner: Store, access: SqlAccess) -> None:
        super().__init__(inner)
        self._access = access

    @property
    def sql(self) -> SqlAccess:
        return self._access


class _TroubledFile(SqliteAccess):
    def __init__(self, inner: SqliteAccess, trouble: Trouble) -> None:
        self.clock = inner.clock
        self.path = inner.path
        self._inner = inner
        self._trouble = trouble

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        return await self._inner.read(query, parameters)

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        return await self._trouble.around(lambda: self._inner.write(work, place), place)

    def wake(self, topic: str) -> None:
        self._inner.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        await self._inner.wait(topic, timeout)


class _TroubledPool(PostgresAccess):
    def __init__(self, inner: PostgresAccess, trouble: Trouble) -> None:
        self.schema = inner.schema
        self.channel = inner.channel
        self._inner = inner
        self._trouble = trouble

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        return await self._trouble.around(
            lambda: self._inner.run(statement, parameters, place), place
        )

    async def run_and_notify(
        self, quietly: str, loudly: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        return await self._trouble.around(
            lambda: self._inner.run_and_notify(quietly, loudly, parameters, topic), topic
        )

    def wake(self, topic: str) -> None:
        self._inner.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        await self._inner.wait(topic, timeout)


class SqliteQueues:
    """A file."""

    def __init__(self, path: Path) -> None:
        self.trouble = Trouble()
        self._path = path
        self._stores: list[Store] = []

    async def open(self, queue: str, components: Components | None = None) -> QueueBackend:
        """Open one more port to a queue."""
        components = components or Components.system()
        store = await SqliteStore.connect(self._path, components)
        self._stores.append(store)
        troubled = _Troubled(store, _TroubledFile(store.sql, self.trouble))
        return open_backend(troubled, queue, components)

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues."""
        return open_directory(self._stores[0], Components.system())

    async def close(self) -> None:
        """Close every port."""
        for store in self._stores:
            await store.close()

    def let_pass(self, seconds: float) -> None:
        """Let time pass for all messages."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE jobsync_message SET due = due - ?", [seconds])
            connection.execute("UPDATE jobsync_finished SET finished = finished - ?", [seconds])

    def damage(self, id: str, text: str) -> None:
        """Overwrite a payload behind the library's back."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute("UPDATE jobsync_message SET payload = ? WHERE id = ?", (text, id))


class PostgresQueues:
    """A schema of its own in a real server."""

    def __init__(self, url: str) -> None:
        self.trouble = Trouble()
        self._place = PostgresLocation(url)
        self._stores: list[Store] = []

    async def open(self, queue: str, components: Components | None = None) -> QueueBackend:
        """Open one more port to a queue."""
        components = components or Components.system()
        store = await self._place.open(components)
        self._stores.append(store)
        assert isinstance(store.sql, PostgresAccess)
        return open_backend(
            _Troubled(store, _TroubledPool(store.sql, self.trouble)), queue, components
        )

    def open_directory(self) -> QueueDirectory:
        """Open the directory of all queues."""
        return open_directory(self._stores[0], Components.system())

    async def close(self) -> None:
        """Close every port, and drop the schema."""
        for store in self._stores:
            await store.close()
        self._place.remove()

    def let_pass(self, seconds: float) -> None:
        """Let time pass for all messages."""
        by = f"interval '{seconds} seconds'"
        self._place.execute(f"UPDATE {{}}.jobsync_message SET due = due - {by}")
        self._place.execute(f"UPDATE {{}}.jobsync_finished SET finished = finished - {by}")

    def damage(self, id: str, text: str) -> None:
        """Overwrite a payload behind the library's back."""
        self._place.execute("UPDATE {}.jobsync_message SET payload = %s WHERE id = %s", text, id)
