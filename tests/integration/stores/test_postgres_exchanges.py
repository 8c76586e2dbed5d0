"""Exchanges with PostgreSQL: what a copy sends, what ends one early, and what is left behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors
from servers import PostgresServer
from waiting import until

from jobsync import JobsyncError, Misconfigured, Unavailable
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.stores.postgres import connection as module
from jobsync.stores.postgres.connection import PostgresConnection, connect_user
from jobsync.stores.sql import Steps

BIG = b"".join(b"%d\n" % number for number in range(40_000))
"""More than one message."""


@pytest.fixture
async def connection(postgres: PostgresServer) -> AsyncIterator[PostgresConnection]:
    """A connection with a table of its own."""
    connection = await PostgresConnection.connect(postgres.url, autocommit=True)
    await connection.execute("CREATE TEMP TABLE t (n integer)")
    yield connection
    await connection.close()


def read_url(text: str) -> PostgresUrl:
    """Return the URL of a database."""
    url = parse_url(text)
    assert isinstance(url, PostgresUrl)
    return url


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"1\n"],
        [b"", b"1\n"],
        [b"1\n2\n", b"", b"3\n"],
        [b"1", b"2\n3", b"4\n"],
        [BIG],
        [b"1\n", BIG, b"2\n"],
    ],
    ids=lambda parts: str([len(part) for part in parts]),
)
async def test_a_copy_writes_every_byte_of_every_part(
    connection: PostgresConnection, parts: list[bytes]
) -> None:
    """Once, in order, however they are cut; the connection can be used again, also to copy."""
    numbers = [int(line) for line in b"".join(parts).split()]
    for times in (1, 2):
        await connection.copy("COPY t FROM STDIN", iter(parts))
        found = await connection.run("SELECT count(*), coalesce(sum(n), 0) FROM t", ())
        assert found == [(times * len(numbers), times * sum(numbers))]
    if len(numbers) < 100:
        assert await connection.run("SELECT n FROM t", ()) == [(n,) for n in numbers * 2]


def _fail() -> Iterator[bytes]:
    yield b"1\n"
    raise LookupError("of the rows")


@pytest.mark.parametrize(
    ("statement", "rows", "error"),
    [
        ("COPY nowhere FROM STDIN", lambda: [b"1\n"], errors.UndefinedTable),
        ("COPY t FROM STDIN", lambda: [b"1\n", b"x\n"], errors.InvalidTextRepresentation),
        ("COPY t FROM STDIN; SELECT 1/0", lambda: [b"1\n"], errors.DivisionByZero),
        ("COPY t FROM STDIN", _fail, LookupError),
    ],
)
async def test_a_copy_that_fails_raises_the_error_and_writes_nothing(
    connection: PostgresConnection,
    statement: str,
    rows: Callable[[], Any],
    error: type[Exception],
) -> None:
    """Of the statement, of its rows, of what follows it; the caller closes the connection then."""
    with pytest.raises(error):
        await connection.copy(statement, rows())
    if error is not LookupError:
        assert await connection.run("SELECT count(*) FROM t", ()) == [(0,)]


async def test_a_wait_with_a_limit_that_is_cancelled_closes_the_connection(
    connection: PostgresConnection,
) -> None:
    """As a statement does: what may still come belongs to nobody."""
    listening = asyncio.create_task(anext(connection.notifies(timeout=60)))
    await until(connection.lock.locked, "the wait has begun")
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert connection.closed
    assert connection.is_stale


async def test_a_closed_connection_leaves_nothing_in_its_loop(
    connection: PostgresConnection,
) -> None:
    """Neither its timer nor its socket; it may be closed again, and is stale."""
    await connection.run("SELECT 1", ())
    timer = connection._timer
    assert timer is not None
    assert not connection.is_stale
    for _ in range(2):
        await connection.close()
        assert timer.cancelled()
        assert not connection._is_watching
        assert connection.is_stale


def test_a_connection_of_a_loop_that_was_closed_is_stale(postgres: PostgresServer) -> None:
    """Its server still has it; nobody can use it."""

    async def connect() -> PostgresConnection:
        connection = await PostgresConnection.connect(postgres.url, autocommit=True)
        await connection.run("SELECT 1", ())
        assert not connection.is_stale
        return connection

    connection = asyncio.run(connect())
    assert not connection.closed
    assert connection.is_stale
    asyncio.run(connection.close())


async def test_steps_that_fail_leave_their_transaction_to_be_undone(
    postgres: PostgresServer, connection: PostgresConnection
) -> None:
    """Whether a statement or the steps themselves fail; each error is raised as it is."""
    await connection.execute("DROP TABLE IF EXISTS steps")
    await connection.execute("CREATE TABLE steps (n integer)")

    def build(last: str) -> Steps[int]:
        yield "INSERT INTO steps VALUES (%s) RETURNING n", [1]
        if not last:
            raise LookupError
        rows = yield last, ()
        return int(rows[0][0])

    for last, error in (("SELECT 1/0", errors.DivisionByZero), ("", LookupError)):
        own = await PostgresConnection.connect(postgres.url, autocommit=True)
        with pytest.raises(error):
            await own.run_steps(build(last))
        await own.close()
        assert await connection.run("SELECT count(*) FROM steps", ()) == [(0,)]
    assert await connection.run_steps(build("SELECT count(*) FROM steps")) == 1
    assert await connection.run("SELECT count(*) FROM steps", ()) == [(1,)]
    await connection.execute("DROP TABLE steps")


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("SELECT 1/0, %s", Misconfigured),
        ("SELECT nothing, %s", Misconfigured),
        ("SELECT pg_terminate_backend(pg_backend_pid()), %s", Unavailable),
    ],
)
@pytest.mark.parametrize("step", ["_SET_ZONE", "_SET_PATH"])
def test_a_users_connection_that_is_refused_a_step_is_closed(
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    statement: str,
    kind: type[JobsyncError],
) -> None:
    """With an error of jobsync; nothing of it stays open."""
    opened: list[psycopg.Connection[Any]] = []
    connect = psycopg.connect

    def remember(*args: Any, **options: Any) -> psycopg.Connection[Any]:
        opened.append(connect(*args, **options))
        return opened[-1]

    monkeypatch.setattr(psycopg, "connect", remember)
    monkeypatch.setattr(module, step, statement)
    with pytest.raises(kind) as caught:
        connect_user(read_url(f"{postgres.url}?schema=apart"), "UTC")
    assert type(caught.value) is kind
    assert [each.closed for each in opened] == [True]


def test_a_users_connection_without_a_schema_has_the_path_of_its_role(
    postgres: PostgresServer,
) -> None:
    """And the defaults of jobsync beside what the URL says."""
    with psycopg.connect(postgres.url) as plain:
        path = plain.execute("SHOW search_path").fetchone()
    with connect_user(read_url(postgres.url), "UTC") as connection:
        assert connection.execute("SHOW search_path").fetchone() == path


def test_the_error_of_a_refused_connect_has_no_cause_that_may_quote_a_secret() -> None:
    """Neither as its cause nor in its text."""
    url = read_url("postgresql://me:hush-hush@127.0.0.1:9/d?connect_timeout=2")
    with pytest.raises(Unavailable) as caught:
        connect_user(url, "UTC")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "hush" not in str(caught.value)
