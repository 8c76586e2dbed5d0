"""Messages that are pushed in the caller's transaction."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from jobsync import Database, Invalid, QueuePlugin
from jobsync.queue.sql.joined_connections import run_joined


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of an SQLite queue."""
    return tmp_path / "jobs.db"


@pytest.fixture
async def lite(path: Path) -> AsyncIterator[QueuePlugin]:
    """A queue on SQLite."""
    async with Database(f"sqlite:///{path}") as db:
        yield await db.use_plugin(QueuePlugin(resource="tasks"))


@pytest.fixture
def server_url(request: pytest.FixtureRequest) -> str:
    """The URL of a PostgreSQL server."""
    return str(request.getfixturevalue("postgres").url)


@pytest.fixture
async def pg(server_url: str, request: pytest.FixtureRequest) -> AsyncIterator[QueuePlugin]:
    """A queue on PostgreSQL."""
    schema = f"join_{abs(hash(request.node.name)) % 10**9}"
    async with Database(f"{server_url}?schema={schema}") as db:
        yield await db.use_plugin(QueuePlugin(resource="tasks"))


async def test_an_async_transaction_is_joined(pg: QueuePlugin, server_url: str) -> None:
    """The message exists once it commits, and never if it does not."""
    tasks = pg.database.resources.tasks
    async with await psycopg.AsyncConnection.connect(server_url, row_factory=dict_row) as own:
        await own.execute("CREATE TEMPORARY TABLE orders (id text)")
        async with own.transaction():
            await own.execute("INSERT INTO orders VALUES ('o-1')")
            await tasks.enqueue({"order": "o-1"}, connection=own)
            await tasks.enqueue_many([{"order": "o-2"}] * 3, connection=own, delay=60)
            assert await pg.count("all") == 0
        await own.commit()
        assert await pg.count("all") == 4
        await tasks.enqueue({"order": "never"}, connection=own)
        await own.rollback()
    assert await pg.count("all") == 4
    assert pg.stats()["enqueued"] == 0


async def test_a_blocking_transaction_is_joined(pg: QueuePlugin, server_url: str) -> None:
    """With psycopg's synchronous connection."""
    tasks = pg.database.resources.tasks
    with psycopg.connect(server_url) as own:
        await tasks.enqueue({"n": 1}, connection=own)
        assert await pg.count() == 0
        own.commit()
        assert await pg.count() == 1
        await tasks.enqueue_many([{"n": 2}, {"n": 3}], connection=own)
        own.rollback()
    assert await pg.count() == 1


@pytest.mark.parametrize("place", ["", "group", "key"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_transaction_wakes_the_workers_when_it_commits(
    pg: QueuePlugin, server_url: str, count: int, place: str, *, is_async: bool
) -> None:
    """The notification is part of it, and idle workers receive it, whatever was pushed."""
    data = [{"n": n} for n in range(count)]
    # Each message has a key of its own.
    options: dict[str, Any] = {place: "a" if place == "group" else str} if place else {}
    async with await psycopg.AsyncConnection.connect(server_url, autocommit=True) as listener:
        await listener.execute(f"LISTEN {channel_of(pg)}".encode())
        if is_async:
            async with await psycopg.AsyncConnection.connect(server_url) as own:
                pid = own.info.backend_pid
                await pg.enqueue_many(data, connection=own, **options)
        else:
            with psycopg.connect(server_url) as blocking:
                pid = blocking.info.backend_pid
                await pg.enqueue_many(data, connection=blocking, **options)
        # The channel carries other notifications too.
        async for note in listener.notifies(timeout=10):
            if (note.payload, note.pid) == (f"queue/{pg.queue}", pid):
                break
        else:
            pytest.fail("nobody was woken")


def channel_of(queue: QueuePlugin) -> str:
    """Return the channel of a queue's schema."""
    access: Any = queue.database.store.sql
    return str(access.channel)


@pytest.mark.parametrize("isolation", ["", "IMMEDIATE", None])
async def test_an_sqlite_transaction_is_joined(
    lite: QueuePlugin, path: Path, isolation: Any
) -> None:
    """Whether sqlite3 or the caller begins transactions."""
    tasks = lite.database.resources.tasks
    with closing(sqlite3.connect(path, isolation_level=isolation)) as own:
        own.row_factory = lambda *_: {}
        if isolation is None:
            own.execute("BEGIN")
        await tasks.enqueue({"n": 1}, connection=own)
        await tasks.enqueue_many([{"n": 2}, {"n": 3}], connection=own)
        assert await lite.count() == 0
        own.execute("COMMIT")
        assert await lite.count() == 3
        if isolation is None:
            own.execute("BEGIN")
        await tasks.enqueue({"n": 4}, connection=own)
        await tasks.enqueue({"n": 5}, key="five", connection=own)
        own.execute("ROLLBACK")
        assert await lite.count() == 3
        if isolation is None:
            own.execute("BEGIN")
        await tasks.enqueue({"n": 5}, key="five", connection=own)
        own.execute("COMMIT")
    assert await lite.count() == 4


async def test_outside_of_a_transaction_a_push_is_one(lite: QueuePlugin, path: Path) -> None:
    """All or nothing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as own:
        await lite.enqueue_many([{"n": 1}, {"n": 2}], connection=own)
    assert await lite.count() == 2


async def test_a_push_that_fails_leaves_no_transaction_behind(
    lite: QueuePlugin, path: Path
) -> None:
    """The caller has not begun it, and it would block every other writer."""

    def refuse(action: int, *_: object) -> int:
        return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_INSERT else sqlite3.SQLITE_OK

    with closing(sqlite3.connect(path, isolation_level=None)) as own:
        own.set_authorizer(refuse)
        placed: dict[str, Any] = {"group": "a", "key": "k"}
        for options in ({}, placed):
            with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
                await lite.enqueue({"n": 1}, connection=own, **options)
            assert not own.in_transaction
        await lite.enqueue({"n": 2})
    assert await lite.count() == 1


@pytest.mark.parametrize(
    ("autocommit", "isolation", "is_begun", "needs"),
    [
        (-1, "", False, False),
        (-1, None, False, True),
        (-1, None, True, False),
        (True, "", False, True),
        (True, "", True, False),
        (False, "", False, False),
    ],
)
def test_a_push_begins_a_transaction_where_python_begins_none(
    autocommit: Any, isolation: str | None, *, is_begun: bool, needs: bool
) -> None:
    """By either of the attributes that say so: the newer one came with Python 3.12."""
    statements: list[str] = []
    connection: Any = SimpleNamespace(
        autocommit=autocommit,
        isolation_level=isolation,
        in_transaction=is_begun,
        execute=statements.append,
    )
    assert run_joined(connection, lambda: 7) == 7
    assert statements == (["BEGIN IMMEDIATE", "COMMIT"] if needs else [])


async def test_sqlalchemy_connections_are_unwrapped(lite: QueuePlugin, path: Path) -> None:
    """By `driver_connection`, at any depth."""
    with closing(sqlite3.connect(path)) as own:
        proxied = SimpleNamespace(driver_connection=own)
        plain = SimpleNamespace(connection=proxied)
        asynchronous = SimpleNamespace(sync_connection=plain)
        for connection in (proxied, plain, asynchronous):
            await lite.enqueue({"n": 1}, connection=connection)
        assert await lite.count() == 0
        own.commit()
    assert await lite.count() == 3


async def test_a_connection_to_another_database_is_refused(
    lite: QueuePlugin, pg: QueuePlugin, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The error says what to pass."""
    fix = "Pass a sqlite3 connection to the file that the queue is in"
    for place in (":memory:", str(tmp_path / "other.db")):
        with closing(sqlite3.connect(place)) as other, pytest.raises(Invalid, match=fix):
            await lite.enqueue({"n": 1}, connection=other)
    with pytest.raises(Invalid, match=r"is not a sqlite3 connection .*builtins.str"):
        await lite.enqueue({"n": 1}, connection="jobs.db")
    with pytest.raises(Invalid, match=r"is not a psycopg connection .*Pass a psycopg connection"):
        await pg.enqueue({"n": 1}, connection=sqlite3)
    other_place = request.getfixturevalue("postgres").create_database("elsewhere")
    with psycopg.connect(other_place) as elsewhere, pytest.raises(Invalid, match="another data"):
        await pg.enqueue({"n": 1}, connection=elsewhere)
