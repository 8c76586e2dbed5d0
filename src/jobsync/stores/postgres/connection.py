"""Connections to PostgreSQL, and the meaning of the server's errors.

`PostgresConnection` is the store's: a statement is answered in time, or the connection is
closed. It is closed at once when the caller times out or is cancelled, because the answer
still to come would be taken for that of the next statement.

The event loop watches the connection while it is open, and continues an exchange as soon as
the server has sent something. It watches a duplicate of the socket: libpq closes its own at any
time, and the loop must not keep a descriptor number that may belong to another file by then.

`connect_user` opens psycopg's own connection, for the user's SQL. The texts of errors hide every
secret of the URL.
"""

import asyncio
import os
import select
from collections.abc import Iterable
from itertools import chain
from typing import Any, LiteralString, TypeVar
from weakref import finalize

import psycopg
from psycopg import AsyncConnection, AsyncCursor, generators
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait, wait_async

from jobsync.core.secrets import MASK
from jobsync.core.urls import PostgresUrl
from jobsync.errors import JobsyncError, Misconfigured, Unavailable
from jobsync.stores.sql import Parameters, Steps

__all__ = [
    "SCHEMA_FIX",
    "PostgresConnection",
    "connect_user",
    "connection_error",
    "first_line",
    "hide_secrets",
    "statement_error",
]

T = TypeVar("T")

SCHEMA_FIX = "run `jobsync schema URL` and have an administrator apply it"

_REACH_FIX = "check that the server runs and can be reached"

_WAIT_INTERVAL = 10.0
"""Seconds after which psycopg wakes up while it waits."""

_MAX_PARTS = 32
"""How many parts of an answer are read at once, of some kilobytes each; others wait meanwhile."""

_COPY_PART = 64 * 1024
"""Bytes of rows that are sent as one message."""

_USER_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 5,
    "fallback_application_name": "jobsync",
}
# JIT is off: the views look expensive to the planner, and compiling them takes longer than
# running them.
_SET_ZONE = "SELECT set_config('TimeZone', %s, false), set_config('jit', 'off', false)"
_SET_PATH = """
SELECT set_config(
  'search_path', concat_ws(', ', quote_ident(%s), nullif(current_setting('search_path'), '')), false
)
"""

_CONNECT_ERRORS = (
    (
        "authentication failed",
        "is refused: wrong user or password",
        "correct user:password@ in it",
    ),
    ("no pg_hba.conf entry", "is refused by pg_hba.conf", "allow this user from this host"),
    ("is not permitted to log in", "names a role that may not log in", "ALTER ROLE … LOGIN"),
    (
        'FATAL:  role "',
        "has a user that does not exist on the server",
        "correct user:password@ in it, or run: CREATE ROLE … LOGIN",
    ),
    (
        '" does not exist',
        "names a database that does not exist on the server",
        "correct the name after the last slash, or run: createdb NAME",
    ),
    (
        "permission denied for database",
        "names a database that this user may not connect to",
        "GRANT CONNECT",
    ),
    ("does not support SSL", "asks for TLS, which the server does not support", "set sslmode"),
    (
        "certificate",
        "has a server whose certificate does not match",
        "correct sslmode and sslrootcert",
    ),
)


class PostgresConnection(AsyncConnection[TupleRow]):
    """A connection that closes at once when its caller times out or is cancelled.

    psycopg would ask the server to cancel, and wait for the answer: too long for a caller
    whose lease is running out, and useless when the network is down. It would also register and
    unregister the socket, and set a timer, for each statement: half of a statement's cost.
    """

    statement_timeout = 30.0
    """Seconds to wait for the answer to a statement; must not change after the first one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = asyncio.get_running_loop()
        try:
            self._watched_fd = os.dup(self.pgconn.socket)
        except OSError as error:  # too many files are open
            self.pgconn.finish()
            raise psycopg.OperationalError(str(error)) from error
        self._close_watched = finalize(self, os.close, self._watched_fd)
        self._close_watched.atexit = False
        self._is_watching = False
        self._poll = select.poll()
        self._poll.register(self._watched_fd, select.POLLIN)
        self._exchange: PQGen[Any] | None = None
        self._result: asyncio.Future[Any] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._cursor: AsyncCursor[TupleRow] | None = None

    async def run(self, statement: str, parameters: Parameters) -> list[TupleRow]:
        """Run a statement and return its rows.

        Raises:
            TimeoutError: no answer came within `statement_timeout` seconds.
        """
        self._start_timer()
        # A cursor that repeats a statement remembers how to send its parameters.
        cursor = self._cursor or self.cursor()
        await cursor.execute(statement, parameters)
        rows = await cursor.fetchall()
        # It keeps its rows too, so one with many rows is dropped.
        self._cursor = cursor if len(rows) <= 1 else None
        return rows

    async def run_steps(self, steps: Steps[T]) -> T:
        """Run statements in one transaction. If one fails, this must be closed, which undoes them.

        Raises:
            TimeoutError: no answer to one of them came within `statement_timeout` seconds.
        """
        await self._run_command("BEGIN")
        try:
            statement, parameters = next(steps)
            while True:
                statement, parameters = steps.send(await self.run(statement, parameters))
        except StopIteration as end:
            await self._run_command("COMMIT")
            return end.value  # type: ignore[no-any-return]

    async def _run_command(self, command: LiteralString) -> None:
        self._start_timer()
        await self.execute(command)

    async def copy(self, statement: str, rows: Iterable[bytes]) -> None:
        """Run a COPY of these rows, and what follows it in the statement, as one transaction.

        What the rows raise is raised, and then this must be closed, which undoes the statement.

        Raises:
            TimeoutError: no answer came within `statement_timeout` seconds.
        """
        self._start_timer()
        await self._run_exchange(_copy_rows(self.pgconn, statement.encode(), rows))

    async def wait(
        self, gen: PQGen[T], interval: float | None = None, *args: Any, **kwargs: Any
    ) -> T:
        """Run an exchange with the server."""
        if interval is None and not args and not kwargs:
            return await self._run_exchange(gen)
        # psycopg runs one with a time limit best, such as waiting for notifications.
        self._stop_watching()
        try:
            interval = _WAIT_INTERVAL if interval is None else interval
            return await wait_async(gen, self.pgconn.socket, interval, *args, **kwargs)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close it. Safe to repeat."""
        self._stop_watching()
        self._close_watched()
        if self._timer is not None:
            self._timer.cancel()
        await super().close()

    @property
    def is_stale(self) -> bool:
        """Whether it cannot be used: the server has closed it, or its event loop was closed."""
        if self._loop.is_closed():
            return True
        try:
            while not self.closed and self._poll.poll(0):
                self.pgconn.consume_input()
        except psycopg.OperationalError:
            return True
        return self.closed

    async def _run_exchange(self, exchange: PQGen[T]) -> T:
        self._exchange = exchange
        self._result = result = self._loop.create_future()
        try:
            self._advance(None)
            return await result  # type: ignore[no-any-return]
        except (asyncio.CancelledError, TimeoutError):
            await self.close()
            raise
        except OSError as error:  # the loop cannot watch the socket
            raise psycopg.OperationalError(str(error)) from error
        finally:
            self._exchange = self._result = None

    def _start_timer(self) -> None:
        """Set the deadline of the exchange that begins now."""
        # One timer for all statements, moved when it fires: most are over long before.
        self._deadline = self._loop.time() + self.statement_timeout
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _advance(self, ready: Ready | None) -> None:
        """Continue the exchange as far as possible without waiting."""
        exchange, result = self._exchange, self._result
        if exchange is None or result is None or result.done():
            # Unexpected input is left to `is_stale`: the loop would call this again and again.
            self._stop_watching()
            return
        try:
            wanted = next(exchange) if ready is None else exchange.send(ready)
            # What else has come is read now: the loop may be busy for long before it returns here.
            for _ in range(_MAX_PARTS):
                if ready != Ready.R or wanted != Wait.R or not self._poll.poll(0):
                    break
                wanted = exchange.send(Ready.R)
            self._watch(wanted)
        except StopIteration as end:
            result.set_result(end.value)
        except BaseException as error:
            # The waiting caller gets it, also what a user's data raises while they are encoded.
            result.set_exception(error)
            # Retrieved here, because the caller may just have been cancelled.
            result.exception()
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise

    def _watch(self, wanted: Wait) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._loop.add_reader(self._watched_fd, self._advance, Ready.R)
        if wanted & Wait.W:
            self._loop.add_writer(self._watched_fd, self._advance_writing)

    def _advance_writing(self) -> None:
        self._loop.remove_writer(self._watched_fd)
        self._advance(Ready.W)

    def _stop_watching(self) -> None:
        # A closed loop watches nothing.
        if self._is_watching and not self._loop.is_closed():
            self._is_watching = False
            self._loop.remove_reader(self._watched_fd)
            self._loop.remove_writer(self._watched_fd)

    def _check_deadline(self) -> None:
        """Fail a statement that has taken too long; else check again at its deadline."""
        self._timer = None
        if self._result is None or self._result.done():
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        else:
            self._result.set_exception(TimeoutError())
            self._result.exception()


def _copy_rows(connection: PGconn, statement: bytes, rows: Iterable[bytes]) -> PQGen[None]:
    """The exchange of a COPY. Nothing is written if it ends early."""
    connection.send_query(statement)
    yield from generators.send(connection)
    # A part is built while the server prepares, or stores those before.
    parts = iter(rows)
    first = next(parts, b"")
    _check_results((yield from generators.execute(connection)))
    for part in chain([first], parts):
        view = memoryview(part)
        for start in range(0, len(part), _COPY_PART):
            # It refuses what it has no memory for until more is sent.
            while not connection.put_copy_data(view[start : start + _COPY_PART]):
                yield from generators.send(connection)
    while not connection.put_copy_end():
        yield from generators.send(connection)
    _check_results((yield from generators.execute(connection)))


def _check_results(results: list[PGresult]) -> None:
    """Raise the error of a statement that the server refused."""
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result)


def connect_user(url: PostgresUrl, zone: str) -> psycopg.Connection[Any]:
    """Open a connection for the user's own SQL.

    Every statement is its own transaction, or part of a `transaction()` block. Times are in
    `zone`, and jobsync's views are found without the name of their schema. Behind a pooler
    that may run each transaction in another session, only the zone is certain.

    Raises:
        Misconfigured: the server refuses the connection, or does not know the zone.
        Unavailable: it cannot be reached.
    """
    set_names = {name for name, _ in url.params}
    defaults = {name: value for name, value in _USER_DEFAULTS.items() if name not in set_names}
    try:
        connection = psycopg.connect(
            make_conninfo(url.reveal(), client_encoding="utf8", **defaults), autocommit=True
        )
    except psycopg.Error as error:
        # Without its cause, which may quote a secret.
        raise connection_error(url, error) from None
    try:
        connection.execute(_SET_ZONE, [zone])
        if url.schema:
            connection.execute(_SET_PATH, [url.schema])
    except psycopg.errors.InvalidParameterValue as error:
        connection.close()
        raise Misconfigured(
            "timezone", zone, "is unknown to the server", "use one such as Europe/Berlin"
        ) from error
    except psycopg.Error as error:
        connection.close()
        raise statement_error(url, error) from error
    return connection


def first_line(url: PostgresUrl, error: psycopg.Error) -> str:
    """Return the first line of an error's message, without secrets."""
    return hide_secrets(url, (str(error).strip() or type(error).__name__).splitlines()[0])


def hide_secrets(url: PostgresUrl, text: str) -> str:
    """Return a text with the secrets of the URL masked."""
    secrets = [value.reveal() for _, value in url.params]
    if url.password is not None:
        secrets.append(url.password.reveal())
    for secret in filter(None, secrets):
        text = text.replace(secret, MASK)
    return text


def statement_error(url: PostgresUrl, error: psycopg.Error) -> JobsyncError:
    """Return jobsync's error for a statement that the server refused."""
    name = str(url)
    match error.sqlstate or "":
        case "":
            return Unavailable(name, first_line(url, error), _REACH_FIX)
        case "25006":
            return Unavailable(
                name,
                "the server or the database is read-only; it may be a standby since a failover",
                "point the url to the primary, or SET default_transaction_read_only = off",
            )
        case "42501" | "42P01" | "42703" | "3F000":
            problem = f"lacks a table or a privilege: {first_line(url, error)}"
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
            return Unavailable(name, first_line(url, error), "check the server's log")
        case _:
            return Misconfigured(
                "url",
                name,
                f"was refused by the server: {first_line(url, error)}",
                "check that nobody else changed jobsync's tables",
            )


def connection_error(url: PostgresUrl, error: psycopg.Error) -> JobsyncError:
    """Return jobsync's error for a failed connect. The server sends no code then, only text."""
    name, text = str(url), str(error)
    if error.pgconn is not None and error.pgconn.needs_password:
        return Misconfigured("url", name, "needs a password", "write user:password@ in it")
    for words, problem, fix in _CONNECT_ERRORS:
        if words in text:
            return Misconfigured("url", name, problem, fix)
    if "too many c" in text or "connection slots" in text:
        return Unavailable(
            name,
            "the server has no connection left",
            "raise its max_connections, or put PgBouncer in front",
        )
    return Unavailable(name, first_line(url, error), _REACH_FIX)
