"""Connection pool for one PostgreSQL database.

A statement is one transaction and one round trip. It returns its rows or raises: after
`Unavailable` or `Misconfigured` nothing was done; after `ReplyLost` it was sent and may have
happened or not. Statements that the server rolled back because of a deadlock or a serialization
failure are sent again, a limited number of times.

Timeouts are on the client's side, because a pooler forgets the settings of a session. A
connection whose statement timed out is closed and never used again: its late answer would be
taken for that of the next statement. After an outage the pool reconnects by itself.

Statements share few connections, in the order in which they come: a statement takes milliseconds.
One that takes over two seconds while others wait (it waits for a lock, or reads very much) does not
hold them up: they get another connection in place of its own, which is closed at its end.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.retry import ExponentialBackoff
from jobsync.core.urls import PostgresUrl
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.postgres.connection import (
    PostgresConnection,
    connection_error,
    first_line,
    hide_secrets,
    statement_error,
)
from jobsync.stores.sql import Parameters, Steps

__all__ = ["MalformedJson", "PostgresPool", "ReplyLost"]

T = TypeVar("T")

_ATTEMPTS = 12
_BACKOFF = ExponentialBackoff(first=0.002, longest=0.25)
_MAX_IDLE = 600.0
"""Seconds after which an idle connection is closed, unless it is the last."""
_PREPARE_AFTER = 5

_CHECK_INTERVAL = 1.0
"""Seconds between two looks at the running statements, while others wait."""
_LONG_CHECKS = 3
"""A statement that runs at so many looks is long. Looks, not seconds: after user code has blocked
the loop, the answer may be there already."""
_MAX_LONG = 6
"""How many long statements may run beside the others."""

# A dead network would otherwise be noticed only after hours.
_DEFAULTS: dict[str, int | str] = {
    "connect_timeout": 5,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "fallback_application_name": "jobsync",
}


class ReplyLost(Exception):
    """A statement was sent and no answer came. Only used within the store."""


class MalformedJson(Exception):
    """A condition read a value that is not JSON. Only used within the store."""


class _RolledBack(Exception):
    """The server rolled back a statement that may be sent again unchanged."""


class _Running:
    """A statement under way."""

    def __init__(self) -> None:
        self.checks = 0
        """How often it was looked at while others waited."""
        self.is_long = False
        """Whether another statement runs in its place."""


class PostgresPool:
    """Connections to one database, for one event loop of one process, opened as needed.

    When that loop is closed, the next one that uses the pool takes its place.

    Args:
        url: the database.
        components: clock and randomness, for the pauses between attempts.
        statement_timeout: seconds to wait for an answer.
        max_connections: how many are open at most, besides those of long statements.

    Attributes:
        name: the URL without secrets.
        conninfo: the URL as libpq reads it, with its secrets.
    """

    def __init__(
        self,
        url: PostgresUrl,
        components: Components,
        *,
        statement_timeout: float,
        max_connections: int,
    ) -> None:
        self.name = str(url)
        self._url = url
        self.conninfo = _build_conninfo(url)
        self._clock = components.clock
        self._randomness = components.randomness
        self._statement_timeout = statement_timeout
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._prepare_after: int | None = None
        self._max_connections = max_connections
        self._slots = asyncio.Semaphore(max_connections)
        self._running: set[_Running] = set()
        self._long_check: asyncio.TimerHandle | None = None
        self._idle: list[tuple[Mono, PostgresConnection]] = []
        """Idle connections, each with the time of its last use; the latest is last."""

    def prepare_statements(self) -> None:
        """Prepare frequent statements on the server. Must not be used behind a pooler."""
        self._prepare_after = _PREPARE_AFTER

    async def connect(self) -> PostgresConnection:
        """Open a connection outside the pool; the caller closes or releases it.

        Raises:
            Misconfigured: the server refuses the connection.
            Unavailable: it cannot be reached.
        """
        self.check_usable()
        return await self.open_connection()

    async def open_connection(self) -> PostgresConnection:
        """Open a connection on the running event loop, which may be another than the pool's.

        Raises:
            Misconfigured: the server refuses the connection.
            Unavailable: it cannot be reached.
        """
        with self._connection_errors():
            connection = await PostgresConnection.connect(
                self.conninfo, autocommit=True, prepare_threshold=None
            )
        connection.statement_timeout = self._statement_timeout
        return connection

    async def open_user_connection(self) -> AsyncConnection[TupleRow]:
        """Open psycopg's own connection for the user's SQL; the caller closes it.

        Raises:
            Misconfigured: the server refuses the connection.
            Unavailable: it cannot be reached.
        """
        self.check_usable()
        with self._connection_errors():
            return await AsyncConnection.connect(
                self.conninfo, autocommit=True, prepare_threshold=None
            )

    def open_blocking_connection(self) -> Connection[TupleRow]:
        """Likewise, a connection that blocks, on any thread."""
        with self._connection_errors():
            return Connection.connect(self.conninfo, autocommit=True, prepare_threshold=None)

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Raise psycopg's errors of a connect as those of a store."""
        try:
            yield
        except psycopg.Error as error:
            # A cause is shown with its error, so one that quotes a secret is left out.
            cause = error if hide_secrets(self._url, str(error)) == str(error) else None
            raise connection_error(self._url, error) from cause

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened the connections."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Check that the pool can be used here.

        Raises:
            Misconfigured: it belongs to another process or event loop.
            Unavailable: it is closed.
        """
        if self.is_forked:
            raise Misconfigured(
                "store", self.name, "was opened before a fork", "connect again in the child"
            )
        loop = asyncio.get_running_loop()
        if loop is not self._loop and self._loop.is_closed():
            self._move_to(loop)
        if loop is not self._loop:
            raise Misconfigured(
                "store",
                self.name,
                "was opened on another event loop",
                "connect once on each loop that uses it",
            )
        if self._is_closed:
            raise Unavailable(self.name, "the store is closed", "connect again")

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to another loop: the former one is closed, and ran no statement to its end."""
        self._loop = loop
        self._slots = asyncio.Semaphore(self._max_connections)
        self._running.clear()
        self._long_check = None

    async def run(self, statement: str, parameters: Parameters = ()) -> list[Any]:
        """Run one statement and return its rows.

        Raises:
            ReplyLost: it may have happened or not.
            MalformedJson: it read a value that is not JSON; nothing happened.
            Misconfigured, Unavailable: nothing happened.
        """
        return await self._repeat(lambda connection: connection.run(statement, parameters))

    async def run_steps(self, build: Callable[[], Steps[T]]) -> T:
        """Run statements in one transaction; raises as `run`."""
        return await self._repeat(lambda connection: connection.run_steps(build()))

    async def copy(self, statement: str, rows: Iterable[bytes]) -> None:
        """Run a COPY of these rows, and what follows it in the statement; raises as `run`.

        The rows are read again if the statement is sent again.
        """
        await self._repeat(lambda connection: connection.copy(statement, rows))

    async def release(self, connection: PostgresConnection) -> None:
        """Return a connection to the pool, or close it if it cannot be used again."""
        now = self._clock.mono()
        is_free = connection.pgconn.transaction_status == TransactionStatus.IDLE
        if self._is_closed or not is_free:
            await connection.close()
            return
        connection.prepare_threshold = self._prepare_after
        self._idle.append((now, connection))
        idle_since, oldest = self._idle[0]
        if oldest is not connection and now - idle_since > _MAX_IDLE:
            del self._idle[0]
            await oldest.close()

    async def close(self) -> None:
        """Close all connections; those in use when they are released. Safe to repeat."""
        self._is_closed = True
        if self._long_check is not None:
            self._long_check.cancel()
        while self._idle:
            await self._idle.pop()[1].close()

    async def _repeat(self, send: Callable[[PostgresConnection], Awaitable[T]]) -> T:
        """Send a statement until the server does not roll it back."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._attempt(send)
            except _RolledBack:
                await _BACKOFF.sleep(attempt, self._clock, self._randomness)
        raise Unavailable(
            self.name,
            f"the server rolled the statement back {_ATTEMPTS} times; nothing was written",
        )

    async def _attempt(self, send: Callable[[PostgresConnection], Awaitable[T]]) -> T:
        self.check_usable()
        await self._acquire_slot()
        running = _Running()
        self._running.add(running)
        try:
            connection = await self._acquire()
            try:
                return await send(connection)
            except TimeoutError as error:
                raise ReplyLost(f"no answer within {self._statement_timeout:g} s") from error
            except psycopg.Error as error:
                raise self._to_error(error) from error
            finally:
                await (connection.close() if running.is_long else self.release(connection))
        finally:
            self._running.remove(running)
            if not running.is_long:
                self._slots.release()

    async def _acquire_slot(self) -> None:
        """Wait until fewer than `max_connections` statements run, without the long ones."""
        if not self._slots.locked():
            await self._slots.acquire()
            return
        if self._long_check is None:
            self._long_check = self._loop.call_later(_CHECK_INTERVAL, self._check_long)
        try:
            async with asyncio.timeout(self._statement_timeout):
                await self._slots.acquire()
        except TimeoutError as error:
            raise Unavailable(
                self.name,
                f"all connections were busy for {self._statement_timeout:g} s",
                "send less at once",
            ) from error

    def _check_long(self) -> None:
        """Start others in place of the statements that take long."""
        self._long_check = None
        if not self._slots.locked():
            return
        for running in self._running:
            running.checks += 1
            long = sum(each.is_long for each in self._running)
            if running.checks >= _LONG_CHECKS and not running.is_long and long < _MAX_LONG:
                running.is_long = True
                self._slots.release()
        self._long_check = self._loop.call_later(_CHECK_INTERVAL, self._check_long)

    async def _acquire(self) -> PostgresConnection:
        """Return an idle connection that the server has not closed, or open one."""
        while self._idle:
            _, connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            await connection.close()
        try:
            return await self.connect()
        except Misconfigured as wrong:
            # It worked once, so it may work again: not a permanent failure.
            raise Unavailable(self.name, f"the url {wrong.problem}", wrong.fix) from wrong

    def _to_error(self, error: psycopg.Error) -> Exception:
        if error.sqlstate in {"40001", "40P01"}:
            return _RolledBack()
        severity = error.diag.severity_nonlocalized
        if severity is None and not isinstance(error, psycopg.OperationalError):
            return error  # psycopg's own: nothing was sent, and it is a bug in jobsync
        # An ERROR ends a statement before its commit. An error that ends the connection may
        # come after it.
        if severity != "ERROR":
            return ReplyLost(first_line(self._url, error))
        if isinstance(error, psycopg.DataError) or error.sqlstate == "54001":
            return MalformedJson(first_line(self._url, error))
        return statement_error(self._url, error)


def _build_conninfo(url: PostgresUrl) -> str:
    """Return libpq's form of the URL, with jobsync's defaults for parameters that it lacks.

    Raises:
        Misconfigured: libpq does not know one of its parameters.
    """
    set_names = {name for name, _ in url.params}
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in set_names}
    try:
        return make_conninfo(url.reveal(), client_encoding="utf8", **defaults)
    except psycopg.ProgrammingError as error:
        problem = f"has a wrong parameter: {first_line(url, error)}"
        # Without its cause, which could show a value.
        raise Misconfigured("url", str(url), problem, "correct that parameter") from None
