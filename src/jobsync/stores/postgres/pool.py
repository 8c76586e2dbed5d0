"""Connections to one PostgreSQL database, made as needed and used one statement at a time.

A statement is one transaction and one round trip. Who runs one gets its rows or learns
which is true: `Unavailable` or `Misconfigured`, nothing was done; `Lost`, it was sent and
nobody can say. Statements that the server undid to resolve a deadlock, or for want of a
serial order, are sent again here, a bounded number of times.

Time limits are kept on this side, since a pooler forgets what a session was told. A
connection whose statement was given up is closed and never used again: its answer would
be taken for that of the next one. After an outage connections come back by themselves.
"""

import asyncio
import os
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.urls import PostgresUrl
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.postgres.connection import PostgresConnection
from jobsync.stores.postgres.errors import (
    explain,
    explain_refusal,
    first_line,
    hide,
)
from jobsync.stores.sql_access import Parameters

__all__ = ["Lost", "MalformedJson", "PostgresPool"]

_ATTEMPTS = 12
_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.25
_UNUSED = 600.0
"""Seconds after which a connection that nobody needed is closed, unless it is the last."""
_PREPARE_AFTER = 5

# What a dead network would otherwise hide for hours.
_DEFAULTS: dict[str, int | str] = {
    "connect_timeout": 5,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "fallback_application_name": "jobsync",
}


class Lost(Exception):
    """A statement was sent and no answer came: done or not done. Never leaves the store."""


class MalformedJson(Exception):
    """A condition looked into a value that is not JSON. Never leaves the store."""


class _Undone(Exception):
    """The server undid a statement that may be sent again as it is."""


class PostgresPool:
    """Connections to one database, for one event loop of one process. They are made as needed.

    Args:
        url: where.
        components: clock and randomness, for the pauses between attempts.
        patience: seconds to wait for an answer.
        connections: how many there are at most.
    """

    def __init__(
        self, url: PostgresUrl, components: Components, *, patience: float, connections: int
    ) -> None:
        self.name = str(url)
        self._url = url
        self._place = _compose(url)
        self._clock = components.clock
        self._randomness = components.randomness
        self._patience = patience
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._prepare_after: int | None = None
        self._most = connections
        self._room = asyncio.Semaphore(connections)
        self._idle: list[tuple[Mono, PostgresConnection]] = []
        """Those that nobody uses, and since when; the one that was used last is last."""

    def prepare_statements(self) -> None:
        """Let the server keep what is asked often. Behind a pooler that must not be."""
        self._prepare_after = _PREPARE_AFTER

    async def connect_apart(self) -> PostgresConnection:
        """Open a connection that is not the pool's; the caller closes it.

        Raises:
            Misconfigured: the server refuses us.
            Unavailable: it cannot be reached.
        """
        self.check_usable()
        try:
            connection = await PostgresConnection.connect(
                self._place, autocommit=True, prepare_threshold=None
            )
        except psycopg.Error as error:
            # A cause is shown with its error, so one that quotes a secret stays behind.
            cause = error if hide(self._url, str(error)) == str(error) else None
            raise explain_refusal(self._url, error) from cause
        connection.patience = self._patience
        return connection

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened the connections."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Refuse to work where the connections cannot.

        Raises:
            Misconfigured: this is another process or event loop than the one they belong to.
            Unavailable: they are closed.
        """
        if self.is_forked:
            raise Misconfigured(
                "store", self.name, "was opened before a fork", "connect again in the child"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise Misconfigured(
                "store",
                self.name,
                "was opened on another event loop",
                "connect once on each loop that uses it",
            )
        if self._is_closed:
            raise Unavailable(self.name, "the store is closed", "connect again")

    async def run(self, statement: str, parameters: Parameters = ()) -> list[Any]:
        """Run one statement and give its rows.

        Raises:
            Lost: nobody can say whether it happened.
            MalformedJson: it looked into a value that is not JSON; nothing happened.
            Misconfigured, Unavailable: nothing happened.
        """
        pause = _FIRST_PAUSE
        for _ in range(_ATTEMPTS):
            try:
                return await self._attempt(statement, parameters)
            except _Undone:
                await self._clock.sleep(self._randomness.uniform(0, pause))
                pause = min(pause * 2, _LONGEST_PAUSE)
        raise Unavailable(
            self.name, f"the server undid the statement {_ATTEMPTS} times; nothing was written"
        )

    async def give(self, connection: PostgresConnection) -> None:
        """Keep a connection for whoever needs one next, if it can still be used."""
        now = self._clock.mono()
        is_free = connection.pgconn.transaction_status == TransactionStatus.IDLE
        if self._is_closed or not is_free:
            await connection.close()
            return
        connection.prepare_threshold = self._prepare_after
        self._idle.append((now, connection))
        since, oldest = self._idle[0]
        if oldest is not connection and now - since > _UNUSED:
            del self._idle[0]
            await oldest.close()

    async def close(self) -> None:
        """Close all connections; those in use as soon as they are given back. Safe to repeat."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop()[1].close()

    async def _attempt(self, statement: str, parameters: Parameters) -> list[Any]:
        self.check_usable()
        await self._enter()
        try:
            connection = await self._take()
            try:
                return await connection.run(statement, parameters)
            except TimeoutError as error:
                raise Lost(f"no answer within {self._patience:g} s") from error
            except psycopg.Error as error:
                raise self._judge(error) from error
            finally:
                await self.give(connection)
        finally:
            self._room.release()

    async def _enter(self) -> None:
        """Wait until there is room for one more statement at a time."""
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._room.acquire()
        except TimeoutError as error:
            raise Unavailable(
                self.name,
                f"all {self._most} connections were busy for {self._patience:g} s",
                "allow more connections, or send less at once",
            ) from error

    async def _take(self) -> PostgresConnection:
        """Get a connection that the server has not closed meanwhile, or make one."""
        while self._idle:
            _, connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            await connection.close()
        try:
            return await self.connect_apart()
        except Misconfigured as wrong:
            # It was right once, so it may be again: not a reason to stop for good.
            raise Unavailable(self.name, wrong.problem, wrong.fix) from wrong

    def _judge(self, error: psycopg.Error) -> Exception:
        if error.sqlstate in {"40001", "40P01"}:
            return _Undone()
        severity = error.diag.severity_nonlocalized
        if severity is None and not isinstance(error, psycopg.OperationalError):
            return error  # psycopg's own: nothing was sent, and the mistake is ours
        # An ERROR ends a statement before its commit. What ends the connection may come
        # after it.
        if severity != "ERROR":
            return Lost(first_line(self._url, error))
        if isinstance(error, psycopg.DataError) or error.sqlstate == "54001":
            return MalformedJson()
        return explain(self._url, error)


def _compose(url: PostgresUrl) -> str:
    """Give libpq's form of the URL, with our defaults where it says nothing.

    Raises:
        Misconfigured: libpq does not know one of its parameters.
    """
    given = {name for name, _ in url.params}
    rest = {name: value for name, value in _DEFAULTS.items() if name not in given}
    try:
        return make_conninfo(url.reveal(), client_encoding="utf8", **rest)
    except psycopg.ProgrammingError as error:
        problem = first_line(url, error)
        # Without its cause, which could show a value.
        raise Misconfigured("url", str(url), problem, "correct that parameter") from None
