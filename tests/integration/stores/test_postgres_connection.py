"""One connection to PostgreSQL: how it replaces psycopg's waiting; and connections of users."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from servers import PostgresServer

from jobsync import Misconfigured
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.stores.postgres.connection import PostgresConnection, connect_user
from jobsync.stores.sql import Steps

LONG = 60.0


@pytest.fixture
async def connection(postgres: PostgresServer) -> AsyncIterator[PostgresConnection]:
    """A connection."""
    connection = await PostgresConnection.connect(postgres.url, autocommit=True)
    yield connection
    await connection.close()


def read_url(text: str) -> PostgresUrl:
    """Return the URL of a database."""
    url = parse_url(text)
    assert isinstance(url, PostgresUrl)
    return url


def end_session(postgres: PostgresServer, connection: PostgresConnection) -> None:
    """End a session as administrator, and wait until it has ended."""
    pid = connection.info.backend_pid
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


async def pass_rounds() -> None:
    """Run the loop several times, so that all ready callbacks run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_loop_keeps_watching_between_statements(
    connection: PostgresConnection,
) -> None:
    """Psycopg calls `wait` without a time limit; that is the fast path."""
    for number in range(3):
        assert await connection.run("SELECT %s::int", [number]) == [(number,)]
        assert connection._is_watching


async def test_notifications_can_be_awaited_in_between(
    postgres: PostgresServer, connection: PostgresConnection
) -> None:
    """Psycopg waits for them, with its own limit; then statements work as before."""
    assert [note async for note in connection.notifies(timeout=0.0)] == []
    assert await connection.run("SELECT 1", ()) == [(1,)]
    await connection.execute("LISTEN wire")
    with psycopg.connect(postgres.url, autocommit=True) as stranger:
        stranger.execute("NOTIFY wire, 'a'")
    received = [note async for note in connection.notifies(timeout=LONG, stop_after=1)]
    assert [note.payload for note in received] == ["a"]
    assert await connection.run("SELECT 1", ()) == [(1,)]


async def test_a_statement_larger_than_the_socket_buffer_is_sent(
    connection: PostgresConnection,
) -> None:
    """And so is its answer read."""
    text = "x" * 20_000_000
    assert await connection.run("SELECT %s::text", [text]) == [(text,)]
    assert await connection.run("SELECT 1", ()) == [(1,)]


async def test_an_error_leaves_the_connection_usable(connection: PostgresConnection) -> None:
    """Both after the server's errors and after psycopg's own."""
    with pytest.raises(psycopg.errors.DivisionByZero):
        await connection.run("SELECT 1 / 0", ())
    with pytest.raises(psycopg.ProgrammingError):
        await connection.run("SELECT %s", [object()])
    assert await connection.run("SELECT 1", ()) == [(1,)]


async def test_each_statement_has_the_full_timeout(connection: PostgresConnection) -> None:
    """One timer serves all statements, and is moved when it fires before the last deadline."""
    await connection.run("SELECT 1", ())
    first = connection._timer
    assert first is not None
    running = asyncio.create_task(connection.run("SELECT pg_sleep(0.3)", ()))
    await asyncio.sleep(0)
    assert connection._timer is first
    connection._check_deadline()
    assert connection._timer is not None
    assert connection._timer.when() > first.when()
    await running
    assert not connection.closed


async def test_a_statement_that_takes_too_long_times_out(connection: PostgresConnection) -> None:
    """Its answer would be taken for the next one's, so the connection is closed."""
    await connection.run("SELECT pg_sleep(0.1)", ())
    connection._check_deadline()
    connection.statement_timeout = 0.2
    with pytest.raises(TimeoutError):
        await connection.run("SELECT pg_sleep(60)", ())
    assert connection.closed


async def test_a_timer_that_fires_without_a_statement_is_set_again(
    connection: PostgresConnection,
) -> None:
    """A statement after a pause times out too."""
    await connection.run("SELECT 1", ())
    connection._check_deadline()
    assert connection._timer is None
    connection.statement_timeout = 0.1
    with pytest.raises(TimeoutError):
        await connection.run("SELECT pg_sleep(60)", ())


async def test_every_part_of_a_transaction_has_a_timer(connection: PostgresConnection) -> None:
    """Its begin and its commit as well as its statements; and a copy."""
    await connection.execute("CREATE TEMP TABLE t (n integer)")

    def stop_timer() -> None:
        connection._check_deadline()
        assert connection._timer is None

    def build() -> Steps[int]:
        assert connection._timer is not None
        for number in (1, 2):
            stop_timer()
            yield "INSERT INTO t VALUES (%s) RETURNING n", [number]
            assert connection._timer is not None
        stop_timer()
        return 3

    stop_timer()
    assert await connection.run_steps(build()) == 3
    assert connection._timer is not None
    stop_timer()
    await connection.copy("COPY t FROM STDIN", [b"3\n"])
    assert connection._timer is not None
    assert await connection.run("SELECT sum(n) FROM t", ()) == [(6,)]


@pytest.mark.parametrize("rounds", range(5))
async def test_a_cancelled_statement_returns_at_once(
    connection: PostgresConnection, rounds: int
) -> None:
    """At any point; nothing is left behind, not even an unretrieved error."""
    asking = asyncio.create_task(connection.run("SELECT pg_sleep(60)", ()))
    for _ in range(rounds):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert connection.closed or not rounds
    assert not connection._is_watching


async def test_a_session_ended_by_the_server_is_noticed_once(
    postgres: PostgresServer, connection: PostgresConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is not woken again and again; the next user gets an error."""
    calls = 0
    advance = PostgresConnection._advance

    def count(self: PostgresConnection, ready: object) -> None:
        nonlocal calls
        calls += 1
        advance(self, ready)  # type: ignore[arg-type]

    monkeypatch.setattr(PostgresConnection, "_advance", count)
    await connection.run("SELECT 1", ())
    assert not connection.is_stale
    calls = 0
    end_session(postgres, connection)
    async with asyncio.timeout(LONG):
        while not calls:  # noqa: ASYNC110 - no event of ours
            await asyncio.sleep(0)
    await pass_rounds()
    assert calls == 1
    assert connection.is_stale


async def test_an_ended_session_leaves_nothing_in_the_loop(
    postgres: PostgresServer, connection: PostgresConnection
) -> None:
    """Not even if another process, such as a forked child, has a copy of libpq's socket."""
    asking = asyncio.create_task(connection.run("SELECT pg_sleep(60)", ()))
    await pass_rounds()
    assert connection._is_watching
    ear, copy = connection._watched_fd, os.dup(connection.pgconn.socket)
    end_session(postgres, connection)
    with pytest.raises(psycopg.OperationalError):
        await asking
    await connection.close()
    # The kernel's own list: the loop would be woken endlessly without a reason.
    woken = connection._loop._selector._selector.poll(0)  # type: ignore[attr-defined]
    os.close(copy)
    assert woken == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ear)


async def test_a_connection_without_file_descriptors_is_refused(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With psycopg's own error, so that it counts as temporary."""

    def refuse(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("jobsync.stores.postgres.connection.os.dup", refuse)
    with pytest.raises(psycopg.OperationalError, match="Too many open files"):
        await PostgresConnection.connect(postgres.url, autocommit=True)


async def test_a_loop_that_cannot_watch_leaves_the_outcome_unknown(
    connection: PostgresConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement was sent: it fails as if the server had closed the connection."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(connection._loop, "add_reader", refuse)
    with pytest.raises(psycopg.OperationalError, match="No space left"):
        await connection.run("SELECT 1", ())
    assert connection.pgconn.transaction_status == TransactionStatus.ACTIVE


async def test_rows_are_released(connection: PostgresConnection) -> None:
    """The cursor kept for the next statement does not keep many rows alive."""
    await connection.run("SELECT 1", ())
    assert connection._cursor is not None
    rows = await connection.run("SELECT generate_series(1, 1000)", ())
    assert len(rows) == 1000
    assert connection._cursor is None


def test_a_users_connection_finds_the_views_and_its_own_tables(postgres: PostgresServer) -> None:
    """The schema of the URL comes first, the path that the role has stays; times are in a zone."""
    url = read_url(f"{postgres.url}?schema=apart&options=-csearch_path%3Dmine%2Cpublic")
    with connect_user(url, "Asia/Tokyo") as connection:
        shown = [connection.execute(f"SHOW {name}").fetchone() for name in ("search_path", "jit")]
        assert shown == [("apart, mine,public",), ("off",)]
        assert connection.execute("SELECT '2026-01-31 12:00Z'::timestamptz::text").fetchone() == (
            "2026-01-31 21:00:00+09",
        )
        assert connection.autocommit


@pytest.mark.parametrize(
    ("query", "timeout", "name"),
    [
        ("", "5", "jobsync"),
        ("?connect_timeout=7", "7", "jobsync"),
        ("?fallback_application_name=mine", "5", "mine"),
        ("?connect_timeout=7&fallback_application_name=mine", "7", "mine"),
        ("?schema=apart&application_name=own", "5", "own"),
    ],
)
def test_a_users_connection_has_the_parameters_of_its_url(
    postgres: PostgresServer, query: str, timeout: str, name: str
) -> None:
    """Those that it does not have get jobsync's own defaults."""
    with connect_user(read_url(f"{postgres.url}{query}"), "UTC") as connection:
        assert connection.info.get_parameters()["connect_timeout"] == timeout
        assert connection.execute("SHOW application_name").fetchone() == (name,)


def test_a_users_connection_that_cannot_be_prepared_is_closed(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong zone leaves none behind."""
    opened: list[psycopg.Connection[Any]] = []
    connect = psycopg.connect

    def remember(*args: Any, **options: Any) -> psycopg.Connection[Any]:
        opened.append(connect(*args, **options))
        return opened[-1]

    monkeypatch.setattr(psycopg, "connect", remember)
    with pytest.raises(Misconfigured, match="timezone is unknown to the server"):
        connect_user(read_url(postgres.url), "Mars/Base")
    assert [each.closed for each in opened] == [True]
