"""One connection to PostgreSQL: what psycopg is asked to leave to us, and what we do with it."""

import asyncio
import os
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from servers import PostgresServer

from jobsync.stores.postgres.connection import PostgresConnection

LONG = 60.0


@pytest.fixture
async def connection(postgres: PostgresServer) -> AsyncIterator[PostgresConnection]:
    """A connection of its own."""
    connection = await PostgresConnection.connect(postgres.url, autocommit=True)
    yield connection
    await connection.close()


def end_session(postgres: PostgresServer, connection: PostgresConnection) -> None:
    """Let the administrator end a session, and wait until it is over."""
    pid = connection.info.backend_pid
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


async def pass_rounds() -> None:
    """Let the loop do whatever there is to do, several times over."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_loop_goes_on_listening_between_statements(
    connection: PostgresConnection,
) -> None:
    """Psycopg leaves the waiting to `wait`, without limits of its own; that is what is fast."""
    for number in range(3):
        assert await connection.run("SELECT %s::int", [number]) == [(number,)]
        assert connection._is_watching


async def test_notifications_may_be_waited_for_in_between(
    postgres: PostgresServer, connection: PostgresConnection
) -> None:
    """Psycopg waits for them, with its own limit; then statements go on as before."""
    assert [note async for note in connection.notifies(timeout=0.0)] == []
    assert await connection.run("SELECT 1", ()) == [(1,)]
    await connection.execute("LISTEN wire")
    with psycopg.connect(postgres.url, autocommit=True) as stranger:
        stranger.execute("NOTIFY wire, 'a'")
    heard = [note async for note in connection.notifies(timeout=LONG, stop_after=1)]
    assert [note.payload for note in heard] == ["a"]
    assert await connection.run("SELECT 1", ()) == [(1,)]


async def test_what_fills_the_socket_is_sent_in_parts(connection: PostgresConnection) -> None:
    """And what fills it on the way back is read in parts."""
    text = "x" * 20_000_000
    assert await connection.run("SELECT %s::text", [text]) == [(text,)]
    assert await connection.run("SELECT 1", ()) == [(1,)]


async def test_an_error_leaves_the_connection_usable(connection: PostgresConnection) -> None:
    """The server's, and psycopg's own before anything is sent."""
    with pytest.raises(psycopg.errors.DivisionByZero):
        await connection.run("SELECT 1 / 0", ())
    with pytest.raises(psycopg.ProgrammingError):
        await connection.run("SELECT %s", [object()])
    assert await connection.run("SELECT 1", ()) == [(1,)]


async def test_each_statement_has_all_the_time(connection: PostgresConnection) -> None:
    """One timer serves them all, and is moved on when it rings before the last has had its time."""
    connection.statement_timeout = 0.5
    for _ in range(4):
        await connection.run("SELECT pg_sleep(0.3)", ())
    assert not connection.closed


async def test_a_statement_that_takes_too_long_is_given_up(connection: PostgresConnection) -> None:
    """Its answer would be taken for the next one's, so the connection is closed."""
    connection.statement_timeout = 0.2
    await connection.run("SELECT pg_sleep(0.1)", ())
    with pytest.raises(TimeoutError):
        await connection.run("SELECT pg_sleep(60)", ())
    assert connection.closed


async def test_a_timer_that_rings_for_nobody_is_set_again(connection: PostgresConnection) -> None:
    """After a pause too a statement is given up in time."""
    connection.statement_timeout = 0.1
    await connection.run("SELECT 1", ())
    connection._check_deadline()
    assert connection._timer is None
    with pytest.raises(TimeoutError):
        await connection.run("SELECT pg_sleep(60)", ())


@pytest.mark.parametrize("rounds", range(5))
async def test_who_is_cancelled_gets_away_at_once(
    connection: PostgresConnection, rounds: int
) -> None:
    """At whatever point; nothing is left behind, and no error that nobody asked for."""
    asking = asyncio.create_task(connection.run("SELECT pg_sleep(60)", ()))
    for _ in range(rounds):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert connection.closed or not rounds
    assert not connection._is_watching


async def test_a_session_that_ended_unasked_is_noticed_once(
    postgres: PostgresServer, connection: PostgresConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not come back to it again and again; whoever wants to use it is told."""
    heard = 0
    go_on = PostgresConnection._advance

    def count(self: PostgresConnection, ready: object) -> None:
        nonlocal heard
        heard += 1
        go_on(self, ready)  # type: ignore[arg-type]

    monkeypatch.setattr(PostgresConnection, "_advance", count)
    await connection.run("SELECT 1", ())
    assert not connection.is_stale
    heard = 0
    end_session(postgres, connection)
    async with asyncio.timeout(LONG):
        while not heard:  # noqa: ASYNC110 - no event of ours
            await asyncio.sleep(0)
    await pass_rounds()
    assert heard == 1
    assert connection.is_stale


async def test_a_session_that_ends_leaves_nothing_in_the_loop(
    postgres: PostgresServer, connection: PostgresConnection
) -> None:
    """Not even where somebody has a copy of the socket that libpq closes, as a forked child has."""
    asking = asyncio.create_task(connection.run("SELECT pg_sleep(60)", ()))
    await pass_rounds()
    assert connection._is_watching
    ear, copy = connection._watched_fd, os.dup(connection.pgconn.socket)
    end_session(postgres, connection)
    with pytest.raises(psycopg.OperationalError):
        await asking
    await connection.close()
    # The kernel's own list: the loop would be woken without end, and know of no reason.
    woken = connection._loop._selector._selector.poll(0)  # type: ignore[attr-defined]
    os.close(copy)
    assert woken == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ear)


async def test_a_connection_without_room_for_files_is_refused(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As psycopg refuses it, so that it counts as trouble that passes."""

    def refuse(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("jobsync.stores.postgres.connection.os.dup", refuse)
    with pytest.raises(psycopg.OperationalError, match="Too many open files"):
        await PostgresConnection.connect(postgres.url, autocommit=True)


async def test_a_loop_that_cannot_listen_leaves_the_answer_open(
    connection: PostgresConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement was sent: it fails as it does when the server hangs up."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(connection._loop, "add_reader", refuse)
    with pytest.raises(psycopg.OperationalError, match="No space left"):
        await connection.run("SELECT 1", ())
    assert connection.pgconn.transaction_status == TransactionStatus.ACTIVE


async def test_rows_are_not_kept(connection: PostgresConnection) -> None:
    """What is kept to send a statement again holds on to its result."""
    await connection.run("SELECT 1", ())
    assert connection._cursor is not None
    rows = await connection.run("SELECT generate_series(1, 1000)", ())
    assert len(rows) == 1000
    assert connection._cursor is None
