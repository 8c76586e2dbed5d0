"""Connections to one PostgreSQL database, and what its errors mean.

A statement is one transaction and one round trip. Who runs one gets its rows or learns
which is true: `Unavailable` or `Misconfigured`, nothing was done; `Lost`, it was sent and
nobody can say. Statements that the server undid to resolve a deadlock, or for want of a
serial order, are sent again here, a bounded number of times.

Time limits are kept on this side, since a pooler forgets what a session was told. A
connection whose statement was given up is closed and never used again: its answer would
be taken for that of the next one. After an outage connections come back by themselves.
"""

import asyncio
import logging
import os
import select
from collections.abc import Callable
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow
from psycopg.waiting import wait_async
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from jobsync.components import Components
from jobsync.core.secret import MASK
from jobsync.core.urls import PostgresUrl
from jobsync.errors import JobsyncError, Misconfigured, Unavailable
from jobsync.stores.sql.access import Parameters

__all__ = ["SCHEMA_FIX", "Connection", "Lost", "MalformedJson", "PostgresPool", "explain"]

T = TypeVar("T")

SCHEMA_FIX = "run `jobsync schema URL` and have an administrator apply it"

_REACH = "check that the server runs and can be reached"

_ATTEMPTS = 12
_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.25
_RECONNECTING = 3.0
"""Seconds for which the pool tries again by itself; then the next caller makes it try."""
_LOOK_UP = 1.0
"""Seconds after which a caller that waits for a connection asks why."""
_WAKE = 10.0
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


class _LeftOpen(BaseException):
    """Ends a worker of psycopg's pool together with its loop.

    It would take cancellation for one more failure to connect and go on, and the loop would
    wait for it for ever. What is neither that nor an `Exception` gets through.
    """


class Connection(AsyncConnection[TupleRow]):
    """A connection that closes at once when its caller gives up.

    psycopg would ask the server to cancel, and wait for the answer: too long for a caller
    whose lease is running out, and no use when the network is gone.
    """

    async def wait(self, gen: PQGen[T], interval: float = _WAKE, *args: Any, **kwargs: Any) -> T:
        """Run an exchange with the server."""
        try:
            return await wait_async(gen, self.pgconn.socket, interval, *args, **kwargs)
        except asyncio.CancelledError:
            await self.close()
            raise

    @property
    def is_stale(self) -> bool:
        """Whether the server has hung up since the last statement."""
        try:
            while _has_news(self.pgconn.socket):
                self.pgconn.consume_input()
        except psycopg.OperationalError:
            return True
        return self.closed


def _is_news(record: logging.LogRecord) -> bool:
    """Say whether psycopg's pool logs anything but that it got back a connection of ours, closed.

    That is closed on purpose, and whoever gave up its statement knows.
    """
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not any(isinstance(argument, Connection) for argument in arguments)


logging.getLogger("psycopg.pool").addFilter(_is_news)


def _has_news(socket: int) -> bool:
    look = select.poll()
    look.register(socket, select.POLLIN)
    return bool(look.poll(0))


class PostgresPool:
    """Connections to one database, for one event loop of one process.

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
        self._clock = components.clock
        self._randomness = components.randomness
        self._patience = patience
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._trouble: JobsyncError | None = None
        self._options: dict[str, Any] = {"autocommit": True, "prepare_threshold": None}
        self._pool = AsyncConnectionPool(
            connection_class=_reporting(self._note),
            conninfo=_compose(url),
            kwargs=self._options,
            min_size=1,
            max_size=connections,
            reconnect_timeout=_RECONNECTING,
            open=False,
        )

    async def open(self, *, prepare: bool) -> None:
        """Begin to serve statements. Behind a pooler none may be prepared.

        Raises:
            Unavailable: no connection could be made.
        """
        if prepare:
            self._options["prepare_threshold"] = _PREPARE_AFTER
        try:
            await self._pool.open(wait=True, timeout=self._patience)
        except PoolTimeout as error:
            raise self._explain_wait() from error
        except BaseException:
            await self.close()
            raise

    async def connect_apart(self) -> Connection:
        """Open a connection that is not the pool's; the caller closes it.

        Raises:
            Misconfigured: the server refuses us.
            Unavailable: it cannot be reached.
        """
        self.check_usable()
        try:
            return await Connection.connect(
                _compose(self._url), autocommit=True, prepare_threshold=None
            )
        except psycopg.Error as error:
            # A cause is shown with its error, so one that quotes a secret stays behind.
            cause = error if _hide(self._url, str(error)) == str(error) else None
            raise explain_refusal(self._url, error) from cause

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
        if self._closed:
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
                cursor = await self._attempt(statement, parameters)
            except _Undone:
                await self._clock.sleep(self._randomness.uniform(0, pause))
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                return await cursor.fetchall()
        raise Unavailable(
            self.name, f"the server undid the statement {_ATTEMPTS} times; nothing was written"
        )

    async def close(self) -> None:
        """Close all connections. Safe to repeat."""
        self._closed = True
        await self._pool.close()

    async def _attempt(self, statement: str, parameters: Parameters) -> AsyncCursor[TupleRow]:
        connection = await self._take()
        try:
            async with asyncio.timeout(self._patience):
                return await connection.execute(statement, parameters)
        except TimeoutError as error:
            raise Lost(f"no answer within {self._patience:g} s") from error
        except psycopg.Error as error:
            raise self._judge(error) from error
        finally:
            await self._pool.putconn(connection)

    async def _take(self) -> Connection:
        """Get a connection that the server has not closed meanwhile."""
        self.check_usable()
        while True:
            connection = await self._wait_for_one()
            if not connection.is_stale:
                return connection
            await connection.close()
            await self._pool.putconn(connection)

    async def _wait_for_one(self) -> Connection:
        waited = 0.0
        while True:
            try:
                return await self._get()
            except PoolClosed as error:
                raise Unavailable(self.name, "the store is closed", "connect again") from error
            except PoolTimeout as error:
                waited += _LOOK_UP
                # Nobody waits long for a connection that the server refuses to make.
                if self._trouble is not None or waited >= self._patience:
                    raise self._explain_wait() from error

    async def _get(self) -> Connection:
        """Wait for a connection; whoever is cancelled meanwhile gets none."""
        task = asyncio.current_task()
        wishes = task.cancelling() if task else 0
        connection = await self._pool.getconn(_LOOK_UP)
        # The pool forgets a cancellation that comes while it hands a connection over, and
        # whoever cancelled would wait for ever for a loop that goes on.
        if task is not None and task.cancelling() > wishes:
            await self._pool.putconn(connection)
            raise asyncio.CancelledError
        return connection

    def _note(self, error: psycopg.Error | None) -> None:
        """Remember why the latest attempt to connect failed, or that it did not."""
        self._trouble = None if error is None else explain_refusal(self._url, error)

    def _explain_wait(self) -> Unavailable:
        match self._trouble:
            # It was right once, so it may be again: not a reason to stop for good.
            case Misconfigured(problem=problem, fix=fix):
                return Unavailable(self.name, problem, fix)
            case Unavailable(reason=reason, fix=fix):
                return Unavailable(self.name, reason, fix)
            case _:
                return Unavailable(
                    self.name,
                    f"all {self._pool.max_size} connections were busy for {self._patience:g} s",
                    "allow more connections, or send less at once",
                )

    def _judge(self, error: psycopg.Error) -> Exception:
        if error.sqlstate in {"40001", "40P01"}:
            return _Undone()
        severity = error.diag.severity_nonlocalized
        if severity is None and not isinstance(error, psycopg.OperationalError):
            return error  # psycopg's own: nothing was sent, and the mistake is ours
        # An ERROR ends a statement before its commit. What ends the connection may come
        # after it.
        if severity != "ERROR":
            return Lost(_first_line(self._url, error))
        if isinstance(error, psycopg.DataError) or error.sqlstate == "54001":
            return MalformedJson()
        return explain(self._url, error)


def _reporting(report: Callable[[psycopg.Error | None], None]) -> type[Connection]:
    """Give a kind of connection that tells how each attempt to connect ended."""

    class Reporting(Connection):
        @classmethod
        async def connect(cls, *args: Any, **kwargs: Any) -> Self:
            try:
                connection = await super().connect(*args, **kwargs)
            except psycopg.Error as error:
                report(error)
                raise
            except asyncio.CancelledError as error:
                raise _LeftOpen("an event loop ended before its store was closed") from error
            report(None)
            return connection

    return Reporting


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
        problem = _first_line(url, error)
        # Without its cause, which could show a value.
        raise Misconfigured("url", str(url), problem, "correct that parameter") from None


def _first_line(url: PostgresUrl, error: psycopg.Error) -> str:
    return _hide(url, (str(error).strip() or type(error).__name__).splitlines()[0])


def _hide(url: PostgresUrl, text: str) -> str:
    """Mask whatever in a text is a secret of the URL."""
    secrets = [value.reveal() for _, value in url.params]
    if url.password is not None:
        secrets.append(url.password.reveal())
    for secret in filter(None, secrets):
        text = text.replace(secret, MASK)
    return text


def explain(url: PostgresUrl, error: psycopg.Error) -> JobsyncError:
    """Say what an error means that kept a statement from happening."""
    name = str(url)
    match error.sqlstate or "":
        case "":
            return Unavailable(name, _first_line(url, error), _REACH)
        case "25006":
            return Unavailable(
                name,
                "the server takes no writes; it may be a standby since a failover",
                "point the url to the primary",
            )
        case "42501" | "42P01" | "42703" | "3F000":
            problem = f"lacks a table or a right: {_first_line(url, error)}"
            return Misconfigured("url", name, problem, SCHEMA_FIX)
        case "57014" | "55P03":
            return Unavailable(
                name,
                "the server's own time limit ended the statement; nothing was written",
                "raise statement_timeout and lock_timeout of this role",
            )
        case "53100":
            return Unavailable(
                name, "the server's disk is full; nothing was written", "free some space"
            )
        case state if state[:2] in {"08", "53", "55", "57", "58", "XX"}:
            return Unavailable(name, _first_line(url, error), "look into the server's log")
        case _:
            return Misconfigured(
                "url",
                name,
                _first_line(url, error),
                "check that nobody else changed jobsync's tables",
            )


def explain_refusal(url: PostgresUrl, error: psycopg.Error) -> JobsyncError:
    """Say why no connection was made. The server gives no code then, only words."""
    name, text = str(url), str(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return Misconfigured("url", name, "needs a password", "write user:password@ in it")
    for words, problem, fix in _REFUSALS:
        if words in text:
            return Misconfigured("url", name, problem, fix)
    if "too many c" in text or "connection slots" in text:
        return Unavailable(
            name,
            "the server has no connection left",
            "raise its max_connections, or put PgBouncer in front",
        )
    return Unavailable(name, _first_line(url, error), _REACH)


_REFUSALS = (
    (
        "authentication failed",
        "is refused: wrong user or password",
        "correct user:password@ in it",
    ),
    ("no pg_hba.conf entry", "is refused by pg_hba.conf", "let this user in from this host"),
    ('" does not exist', "names a database or user that does not exist", "create it first"),
    ("is not permitted to log in", "names a role that may not log in", "ALTER ROLE … LOGIN"),
    ("permission denied for database", "names a database closed to this user", "GRANT CONNECT"),
    ("does not support SSL", "asks for TLS, which the server has not", "set sslmode"),
    ("certificate", "meets a certificate that does not fit", "correct sslmode and sslrootcert"),
)
