"""PostgreSQL failures: restarts, killed sessions, missing rights, poolers, deadlocks."""

import asyncio
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from proxy import Proxy
from servers import PgBouncer, PostgresServer
from waiting import TIMEOUT, until

from jobsync import (
    Applied,
    Components,
    Conflict,
    Conflicted,
    Corrupt,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Unavailable,
    Unknown,
)
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.stores.postgres.connection import PostgresConnection
from jobsync.stores.postgres.pool import MalformedJson, PostgresPool, ReplyLost
from jobsync.stores.postgres.schema import POSTGRES_STEPS, read_tables_version
from jobsync.stores.postgres.store import PostgresStore, schema_sql

Connect = Callable[..., Awaitable[PostgresStore]]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    """A thread that restarts the server while the tests run; it outlives the server."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(scope="module")
def server(executor: ThreadPoolExecutor) -> Iterator[PostgresServer]:
    """A server that no other module uses."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def bouncer(server: PostgresServer) -> Iterator[PgBouncer]:
    """PgBouncer in transaction mode in front of it."""
    with PgBouncer(server) as bouncer:
        yield bouncer


@pytest.fixture
def name() -> str:
    """A name for a database or a role that no other test uses."""
    return f"test_{next(_numbers)}"


@pytest.fixture
def url(server: PostgresServer, name: str) -> str:
    """An empty database."""
    return server.create_database(name)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens stores, and closes them after the test."""
    stores: list[PostgresStore] = []

    async def connect(url: str, **options: Any) -> PostgresStore:
        stores.append(await PostgresStore.connect(read(url), **options))
        return stores[-1]

    yield connect
    for store in stores:
        await store.close()


@pytest.fixture
def admin(url: str) -> Iterator[psycopg.Connection[Any]]:
    """An administrator's connection to the database."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def read(url: str) -> PostgresUrl:
    """Parse a PostgreSQL URL."""
    found = parse_url(url)
    assert isinstance(found, PostgresUrl)
    return found


async def wait_until_true(admin: psycopg.Connection[Any], question: str) -> None:
    """Run a query until it returns true."""
    await until(lambda: admin.execute(question).fetchone() is not None, question)


BLOCKED = (
    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


async def increment(store: PostgresStore, key: str) -> None:
    """Add one to a number, despite failures of the server and the connection."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                record = await store.get(key)
                assert record is not None
                (nonce,) = store._ids.nonces(1)
                (outcome,) = await store.write([Put(key, record.value + 1, record, nonce=nonce)])
            except Unavailable:
                continue
            match outcome:
                case Applied():
                    return
                case Unknown():
                    if await settle(store, key, nonce):
                        return


async def settle(store: PostgresStore, key: str, nonce: str) -> bool:
    """Return whether an unknown write happened. If not, the server is known to have dropped it."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                record = await store.get(key)
            except Unavailable:
                continue
            assert record is not None
            return record.remembers(nonce)


async def test_a_restart_under_load_loses_nothing(
    server: PostgresServer, executor: ThreadPoolExecutor, url: str, connect: Connect
) -> None:
    """A crash during writes: callers get errors, the store recovers, every increment counts."""
    store = await connect(url)
    keys = [f"n/{i}" for i in range(6)]
    await store.write([Put(key, 0) for key in keys])
    done = dict.fromkeys(keys, 0)
    restarts = 0

    async def work(key: str) -> None:
        begun = -1
        while begun < 2:
            begun = restarts
            await increment(store, key)
            done[key] += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(work(key))
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(executor, server.restart, "immediate")
        restarts = 1
        await loop.run_in_executor(executor, server.restart, "fast")
        restarts = 2
    values = {record.key: record.value for record in await store.scan("n/")}
    assert values == done


async def test_killed_sessions_are_replaced(
    server: PostgresServer, url: str, connect: Connect
) -> None:
    """Sessions that the administrator ended are replaced, and nothing is written twice or lost."""
    store = await connect(url)
    await store.create("n", 0)
    for _ in range(5):
        assert server.kill_backends() > 0
        await increment(store, "n")
    record = await store.get("n")
    assert record is not None
    assert (record.value, record.seq) == (5, 6)


REFUSALS = {
    "the role may not log in": (
        "ALTER ROLE {role} NOLOGIN",
        "ALTER ROLE {role} LOGIN",
    ),
    "the role has another password": (
        "ALTER ROLE {role} PASSWORD 'another'",
        "ALTER ROLE {role} PASSWORD 'secret'",
    ),
    "the role is missing": (
        "ALTER ROLE {role} RENAME TO {role}_away",
        "ALTER ROLE {role}_away RENAME TO {role}; ALTER ROLE {role} PASSWORD 'secret'",
    ),
    "the role may not connect": (
        "REVOKE CONNECT ON DATABASE {database} FROM PUBLIC",
        "GRANT CONNECT ON DATABASE {database} TO PUBLIC",
    ),
    "the database is missing": (
        "ALTER DATABASE {database} RENAME TO {database}_away",
        "ALTER DATABASE {database}_away RENAME TO {database}",
    ),
    "the database takes no connections": (
        "ALTER DATABASE {database} ALLOW_CONNECTIONS false",
        "ALTER DATABASE {database} ALLOW_CONNECTIONS true",
    ),
}
"""Why a server may refuse to be connected to again, by what, and what ends it."""


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_server_that_refuses_to_be_connected_to_again_is_unavailable(
    server: PostgresServer, name: str, url: str, connect: Connect, refusal: str
) -> None:
    """As while a backup is restored: it worked once, and it works again afterwards."""
    role = server.create_role(name, "secret", name)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"GRANT CREATE ON SCHEMA public TO {name}".encode())
    store = await connect(role)
    await store.create("n", 0)

    def execute(statements: str) -> None:
        with psycopg.connect(server.url, autocommit=True) as admin:
            for statement in statements.format(role=name, database=name).split("; "):
                admin.execute(statement.encode())

    refuse, allow = REFUSALS[refusal]
    server.kill_backends()
    execute(refuse)
    # The first call may only find out that its connection was lost.
    for _ in range(3):
        with pytest.raises(Unavailable):
            await store.get("n")
    execute(allow)
    record = await store.get("n")
    assert record is not None


async def test_a_write_whose_session_is_killed_is_unknown(
    server: PostgresServer, url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """It was sent, and the server closed the connection: neither applied nor conflicted."""
    store = await connect(url)
    record = await store.create("n", 0)
    with psycopg.connect(url) as stranger:
        stranger.execute("SELECT 1 FROM jobsync_record FOR UPDATE")
        writing = asyncio.create_task(store.write([record.replace(1), Put("m", 1)]))
        await wait_until_true(admin, BLOCKED)
        admin.execute(
            f"SELECT pg_terminate_backend(pid) FROM ({BLOCKED.replace('1', 'pid', 1)}) AS t"
        )
        assert [type(outcome) for outcome in await writing] == [Unknown, Unknown]
    assert await store.get("n") == record
    assert await store.get("m") is None


async def test_a_lost_reply_leaves_the_outcome_unknown(
    server: PostgresServer, url: str, name: str, connect: Connect
) -> None:
    """Writes without a reply are unknown; a read without a reply is unavailable."""

    def is_ours(request: bytes) -> bool:
        # Not the notification that the store sends in the background.
        return b"SELECT pg_notify($1, topic)" not in request

    with Proxy("127.0.0.1", server.port) as proxy:
        store = await connect(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}")
        record = await store.create("n", 0)
        proxy.drop_reply(when=is_ours)
        (outcome,) = await store.write([record.replace(1)])
        assert isinstance(outcome, Unknown)
        proxy.drop_reply(when=is_ours)
        with pytest.raises(OutcomeUnknown, match="history/a"):
            await store.append("history/a", [1])
        proxy.drop_reply(when=is_ours)
        with pytest.raises(Unavailable):
            await store.get("n")
        found = await store.get("n")
        assert found is not None
        assert found.value == 1
        assert [entry.value for entry in await store.read("history/a")] == [1]
        await store.close()


async def test_a_stopped_server_is_unavailable(
    server: PostgresServer, name: str, url: str, connect: Connect
) -> None:
    """Connects and calls fail with the reason; the store recovers by itself."""
    with Proxy("127.0.0.1", server.port) as proxy:
        address = f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}"
        store = await connect(address)
        record = await store.create("n", 0)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(Unavailable, match="refused"):
            await connect(address)
        # It finds the old connection closed, and cannot open a new one.
        with pytest.raises(Unavailable, match="refused"):
            await store.write([record.replace(1)])
        proxy.accept()
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await store.get("n") == record
                    break
                except Unavailable:
                    continue
        await store.close()


async def test_a_burial_leaves_a_record_that_is_created_again_at_that_moment(
    url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """It has seen the tombstone, and the commit comes before it can remove it."""
    store = await connect(url)
    for key in ("n/1", "n/2"):
        await store.delete(await store.create(key, 0))
    with psycopg.connect(url) as stranger:
        stranger.execute("UPDATE jobsync_record SET value = '1' WHERE key = 'n/1'")
        burying = asyncio.create_task(store.bury("n/", older_than=-1))
        await until(lambda: burying.done() or admin.execute(BLOCKED).fetchone(), "it meets it")
        stranger.commit()
    assert await burying == 1
    assert [record.key for record in await store.scan("n/")] == ["n/1"]


async def test_a_timed_out_statement_is_unknown_and_its_connection_closed(
    url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """After the statement timeout the outcome is unknown, and the store usable."""
    record = await (await connect(url)).create("n", 0)
    store = await connect(url, max_connections=1)
    for _, connection in store._pool._idle:
        connection._check_deadline()
        connection.statement_timeout = 1
    with psycopg.connect(url) as stranger:
        stranger.execute("SELECT 1 FROM jobsync_record FOR UPDATE")
        (outcome,) = await store.write([record.replace(1)])
        assert outcome == Unknown(f"no answer within {store._pool._statement_timeout:g} s")
        assert await store.get("n") == record
    # The server notices only when it answers that the client is gone: the write was late.
    await wait_until_true(admin, "SELECT 1 FROM jobsync_record WHERE seq = 2")


async def test_a_cancelled_write_returns_at_once(
    url: str, admin: psycopg.Connection[Any], connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancellation does not wait for the server; the connection is closed without a warning."""
    store = await connect(url, max_connections=1)
    record = await store.create("n", 0)
    with psycopg.connect(url) as stranger:
        stranger.execute("SELECT 1 FROM jobsync_record FOR UPDATE")
        writing = asyncio.create_task(store.write([record.replace(1)]))
        await wait_until_true(admin, BLOCKED)
        writing.cancel()
        async with asyncio.timeout(3):
            with pytest.raises(asyncio.CancelledError):
                await writing
        assert await store.get("n") == record
    assert caplog.records == []


async def start_wait(store: PostgresStore, topic: str) -> asyncio.Task[None]:
    """Wait for a topic; return when the wait has begun: it may miss what was sent before."""
    waiting = asyncio.create_task(store.wait(topic, 60))
    await asyncio.sleep(0)
    return waiting


async def start_listening(store: PostgresStore) -> None:
    """Wait until a store receives notifications: then all waiters are woken once."""
    async with asyncio.timeout(10):
        await store.wait("hello/", 60)


async def test_a_cancelled_wait_for_a_connection_takes_none(url: str, connect: Connect) -> None:
    """Cancelled while all are busy, or when one becomes free, it uses up no connection."""
    store = await connect(url, max_connections=1)
    for steps in range(12):
        busy = asyncio.ensure_future(store.now())
        asking = asyncio.ensure_future(store.get("n/a"))
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(busy, asking, return_exceptions=True)
    async with asyncio.timeout(10):
        assert await store.get("n/a") is None


@pytest.mark.parametrize("connections", [1, 2])
async def test_statements_that_wait_for_a_lock_do_not_hold_up_the_others(
    url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    """Others run on another connection meanwhile, which is not kept."""
    monkeypatch.setattr("jobsync.stores.postgres.pool._CHECK_INTERVAL", 0.05)
    store = await connect(url, max_connections=connections)
    records = [await store.create(f"n/{number}", 0) for number in range(connections)]
    with psycopg.connect(url) as stranger:
        stranger.execute("SELECT 1 FROM jobsync_record FOR UPDATE")
        writes = [asyncio.create_task(store.put(record, 1)) for record in records]
        async with asyncio.timeout(10):
            assert len(await asyncio.gather(*(store.get("n/0") for _ in range(20)))) == 20
        assert not any(write.done() for write in writes)
    await asyncio.gather(*writes)
    await asyncio.gather(*(store.get("n/0") for _ in range(20)))
    # Fewer, if one of the reads took long, too.
    assert len(store._pool._idle) <= connections


async def test_the_statements_of_a_blocked_loop_are_not_long(
    url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers are there already: the connection stays, and no other is opened."""
    monkeypatch.setattr("jobsync.stores.postgres.pool._CHECK_INTERVAL", 0.3)
    store = await connect(url, max_connections=1)
    served = set()
    for _ in range(3):
        reads = [asyncio.create_task(store._pool.run("SELECT pg_backend_pid()")) for _ in range(2)]
        await asyncio.sleep(0)
        threading.Event().wait(0.7)
        served |= {pid for ((pid,),) in await asyncio.gather(*reads)}
    assert len(served) == 1


async def test_idle_connections_are_closed(
    url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last used one stays."""
    store = await connect(url, max_connections=3)
    await asyncio.gather(*(store._pool.run("SELECT pg_sleep(0.2)") for _ in range(3)))
    assert len(store._pool._idle) == 3
    monkeypatch.setattr("jobsync.stores.postgres.pool._MAX_IDLE", 0.0)
    for _ in range(3):
        await store.now()
    assert len(store._pool._idle) == 1


async def test_a_waiter_is_woken_once_when_listening_starts(url: str, connect: Connect) -> None:
    """Writes before the first notification could be received may have been missed."""
    store = await connect(url)
    waits = [asyncio.create_task(store.wait(topic, 60)) for topic in ("n/", "m/")]
    async with asyncio.timeout(10):
        await asyncio.gather(*waits)
    again = asyncio.create_task(store.wait("n/", 60))
    await asyncio.wait([again], timeout=0.2)
    assert not again.done()
    again.cancel()


async def test_an_error_that_ends_the_connection_is_no_refusal(url: str, connect: Connect) -> None:
    """It may come after the commit, so the outcome is unknown."""
    store = await connect(url)
    end = "SELECT pg_terminate_backend(pg_backend_pid())"
    with pytest.raises(ReplyLost):
        await store._pool.run(end)
    with psycopg.connect(url) as admin:
        admin.execute("CREATE TABLE copied (n integer)")
    with pytest.raises(ReplyLost):
        await store._pool.copy(f"COPY copied FROM STDIN; {end}", [b"1\n"])
    assert await store._pool.run("SELECT n FROM copied") == []


class _Halt(BaseException):
    """Not an error, but what a user's object may raise."""


def _fail_after(error: type[BaseException], *parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise error("no more")


async def test_a_copy_adds_all_rows_or_none(url: str, connect: Connect) -> None:
    """Also rows of several megabytes; one that is refused leaves the connection in order."""
    store = await connect(url)
    with psycopg.connect(url) as admin:
        admin.execute("CREATE TABLE copied (n integer PRIMARY KEY, text text)")
    long = "x" * 3_000_000
    parts = [f"1\t{long}\n".encode(), b"2\t\\\\N\n"]
    await store._pool.copy("COPY copied FROM STDIN", parts)
    for rows, after in ((b"3\ta\n2\tb\n", ""), (b"x\ty\n", ""), (b"4\tc\n", "; SELECT 1/0")):
        with pytest.raises((Misconfigured, MalformedJson)):
            await store._pool.copy(f"COPY copied FROM STDIN{after}", [rows])
    with pytest.raises(Misconfigured, match="lacks a table"):
        await store._pool.copy("COPY nowhere FROM STDIN", [])
    for parts in ([], [b"5\td\n" * 100_000]):
        for error in (LookupError, _Halt):
            with pytest.raises(error, match="no more"):
                await store._pool.copy("COPY copied FROM STDIN", _fail_after(error, *parts))
    stored = await store._pool.run("SELECT n, text FROM copied ORDER BY n")
    assert stored == [(1, long), (2, r"\N")]


async def test_waiting_ends_when_another_process_could_have_written(
    url: str, connect: Connect
) -> None:
    """A notification of another store ends a wait, also one of many in a row, and of history."""
    waiter, writer = await connect(url), await connect(url)
    assert waiter._notifier.listens
    await start_listening(waiter)
    waiting = await start_wait(waiter, "n/")
    async with asyncio.timeout(10):
        await writer.create("n/1", 0)
        await waiting
        for i in range(2, 5):
            # Within the topic's cooldown: it is notified at the end of it.
            waiting = await start_wait(waiter, "n/")
            await writer.write([Put(f"n/{i}", 0), Put(f"m/{i}", 0)])
            await waiting
            waiting = await start_wait(waiter, "history/a")
            await writer.append("history/a", [i])
            await waiting


@pytest.mark.parametrize("kind", ["create", "replace", "delete", "batch", "append"])
async def test_every_kind_of_change_notifies_with_its_commit(
    url: str, connect: Connect, kind: str
) -> None:
    """The first change of a process is notified at once, without a cooldown."""
    waiter, writer = await connect(url), await connect(url)
    made = await waiter.create("n/1", 0)
    await start_listening(waiter)
    waiting = await start_wait(waiter, "history/a" if kind == "append" else "n/")
    match kind:
        case "create":
            await writer.create("n/2", 0)
        case "replace":
            await writer.put(made, 1)
        case "delete":
            await writer.delete(made)
        case "batch":
            await writer.write([made.replace(1), Put("n/2", 0)])
        case _:
            await writer.append("history/a", [1])
    async with asyncio.timeout(10):
        await waiting
    assert "ring" not in writer._notifier._tasks


async def test_only_its_own_topic_ends_a_wait(url: str, connect: Connect) -> None:
    """Changes elsewhere, and writes that conflict, wake nobody."""
    waiter, writer = await connect(url), await connect(url)
    made = await writer.create("n/1", 0)
    await writer.create("n/2", 0)
    changed = await writer.put(made, 1)
    await until(lambda: not writer._notifier._deferred, "all notifications are sent")
    if (notifying := writer._notifier._tasks.get("notify")) is not None:
        await notifying
    await start_listening(waiter)
    waiting = await start_wait(waiter, "n/")
    other = await start_wait(waiter, "m/")
    await asyncio.sleep(0)
    for stale in ([made.replace(2)], [Put("n/1", 2)], [made.replace(2), Put("n/2", 2)]):
        loser = await connect(url)
        assert await loser.write(stale) == [Conflicted()] * len(stale)
    async with asyncio.timeout(10):
        await writer.create("m/1", 0)
        await other
    assert not waiting.done()
    async with asyncio.timeout(10):
        await writer.put(changed, 2)
        await waiting


async def listen(store: PostgresStore, url: str) -> psycopg.AsyncConnection[Any]:
    """Open a connection that receives a store's notifications."""
    listener = await psycopg.AsyncConnection.connect(url, autocommit=True)
    await listener.execute(f'LISTEN "{store._notifier.channel}"'.encode())
    return listener


async def test_notifications_are_few_and_the_last_one_comes(url: str, connect: Connect) -> None:
    """A process notifies a topic at most once in 50 ms, and once after the last change."""
    store = await connect(url)
    listener = await listen(store, url)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    record = await store.create("n/1", 0)
    for i in range(200):
        record = await store.put(record, i)
    await store._notifier._tasks["notify"]
    took = loop.time() - begun
    await store.create("end", 0)
    topics = []
    async with asyncio.timeout(10):
        async for note in listener.notifies():
            topics.append(note.payload)
            if note.payload == "":
                break
    assert 2 <= topics.count("n/") <= took / 0.05 + 2
    await listener.close()


async def test_deferred_notifications_are_sent_before_closing(url: str, connect: Connect) -> None:
    """A process that writes and closes at once has notified the others."""
    store = await connect(url)
    listener = await listen(store, url)
    await store.put(await store.create("n/1", 0), 1)
    await store.close()
    notes = [note.payload async for note in listener.notifies(timeout=10, stop_after=2)]
    assert notes == ["n/", "n/"]
    await listener.close()


async def test_a_waiter_survives_the_loss_of_its_connection(
    server: PostgresServer, url: str, connect: Connect
) -> None:
    """When the session listens again, waiters wake once; then notifications arrive again."""
    waiter, writer = await connect(url), await connect(url)
    await start_listening(waiter)
    waiting = await start_wait(waiter, "n/")
    await asyncio.sleep(0)
    assert server.kill_backends() > 0
    async with asyncio.timeout(10):
        await waiting
        again = await start_wait(waiter, "n/")
        await asyncio.sleep(0)
        await write_despite_outage(writer, "n/1")
        await again


async def write_despite_outage(store: PostgresStore, key: str) -> None:
    """Create a record, despite an outage that may still last."""

    async def is_there() -> bool:
        try:
            await store.create(key, 0)
        except (OutcomeUnknown, Unavailable):
            return False
        except Conflict:
            pass
        return True

    await until(is_there, f"{key} is there")


async def test_pgbouncer_in_transaction_mode_is_enough(
    bouncer: PgBouncer, url: str, name: str, connect: Connect
) -> None:
    """Without its own sessions the store polls, prepares nothing, and keeps its guarantees."""
    first, second = await connect(bouncer.locate(name)), await connect(bouncer.locate(name))
    assert not first._notifier.listens
    assert first._pool._prepare_after is None
    await first.create("n", 0)
    await asyncio.gather(*(increment(store, "n") for store in (first, second) for _ in range(20)))
    record = await second.get("n")
    assert record is not None
    assert record.value == 40

    waiting = await start_wait(first, "n/")
    async with asyncio.timeout(10):
        for i in itertools.count():
            await second.create(f"n/{i}", 0)
            await asyncio.sleep(0)
            if waiting.done():
                break


async def test_a_wrong_password_is_named_and_not_shown(
    server: PostgresServer, name: str, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error states what to correct; no message, repr or log has the password."""
    caplog.set_level("DEBUG")
    good = server.create_role(name, "right-secret", name)
    bad = good.replace("right-secret", "wrong-secret")
    with pytest.raises(Misconfigured, match="wrong user or password") as caught:
        await PostgresStore.connect(read(bad))
    shown = f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r} {caplog.text}"
    assert "wrong-secret" not in shown
    assert "right-secret" not in shown


async def test_a_missing_password_is_named(server: PostgresServer, name: str, url: str) -> None:
    """The error asks for the password that the server wants."""
    role = server.create_role(name, "right-secret", name)
    with pytest.raises(Misconfigured, match="needs a password"):
        await PostgresStore.connect(read(role.replace(":right-secret", "")))


async def test_a_missing_database_is_named(server: PostgresServer) -> None:
    """Jobsync creates tables, not databases."""
    with pytest.raises(Misconfigured, match=r"names a database that does not exist.*createdb"):
        await PostgresStore.connect(read(f"{server.url}-not-there"))


@pytest.mark.parametrize("parameter", ["sslmood", "channel_binding"])
async def test_a_bad_parameter_is_named(server: PostgresServer, parameter: str) -> None:
    """The error names a mistyped libpq parameter, or one with a bad value, without the value."""
    with pytest.raises((Misconfigured, Unavailable), match=parameter) as caught:
        await PostgresStore.connect(read(f"{server.url}?{parameter}=hunter2"))
    assert "hunter2" not in f"{caught.value!s} {caught.value!r} {caught.value.__cause__!r}"


async def test_a_database_of_another_encoding_is_refused(
    server: PostgresServer, name: str, admin: psycopg.Connection[Any]
) -> None:
    """An encoding that cannot store all keys is found before anything is written."""
    admin.execute(
        f"CREATE DATABASE {name}_latin ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C' "
        "TEMPLATE template0".encode()
    )
    with pytest.raises(Misconfigured, match="is a database in LATIN1"):
        await PostgresStore.connect(read(server.url.rpartition("/")[0] + f"/{name}_latin"))


async def test_without_the_right_to_create_tables_the_error_has_the_fix(
    server: PostgresServer, name: str, url: str
) -> None:
    """Neither tables in the default schema nor a schema can be created."""
    role = server.create_role(name, "secret", name)
    for place in (role, f"{role}?schema=apart"):
        with pytest.raises(Misconfigured, match="jobsync schema URL") as caught:
            await PostgresStore.connect(read(place))
        assert caught.value.field == "url"


_PRIVILEGES = """
SELECT relname, ARRAY(
  SELECT name FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES'])
    AS name WHERE has_table_privilege('jobsync_writer', oid, name)
)
FROM pg_class
WHERE relnamespace = to_regnamespace(%s) AND relkind = 'r' AND relname LIKE 'jobsync%%'
"""
"""What the administrator's role may do with each table of a schema."""


async def test_the_version_is_read_where_the_store_has_its_tables(
    server: PostgresServer, name: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """In the first schema of the role's search path, if the URL names none; it must have one."""
    url = server.create_role(name, "secret", name)
    admin.execute(f'CREATE SCHEMA "{name}" AUTHORIZATION "{name}"')
    assert read_tables_version(read(url)) == (name, 0)
    await connect(url)
    assert read_tables_version(read(url)) == (name, len(POSTGRES_STEPS))
    admin.execute(f"ALTER ROLE \"{name}\" SET search_path = ''")
    with pytest.raises(Misconfigured, match="has no default schema"):
        read_tables_version(read(url))


@pytest.mark.parametrize("schema", ["", "apart"])
async def test_tables_created_by_an_administrator_are_enough(
    server: PostgresServer,
    name: str,
    url: str,
    admin: psycopg.Connection[Any],
    connect: Connect,
    schema: str,
) -> None:
    """A role with only what `schema_sql` grants can do everything; it may be run again."""
    role = server.create_role(name, "secret", name)
    role += f"?schema={schema}" if schema else ""
    assert read_tables_version(read(role)) == (schema or "public", 0)
    for _ in range(2):
        admin.execute(schema_sql(read(role)).encode())
        assert read_tables_version(read(role)) == (schema or "public", len(POSTGRES_STEPS))
    store = await connect(role)
    record = await store.create("n/1", 0)
    await store.write([record.delete(), Put("n/2", 0)])
    await store.append("history/a", [1])
    assert await store.bury("n/", older_than=-1) == 1
    assert await store.discard("history/a", older_than=-60) == 1
    tables = admin.execute(_PRIVILEGES, [schema or "public"]).fetchall()
    assert len(tables) > 10
    for table, privileges in tables:
        changes = [] if table == "jobsync_schema" else ["INSERT", "UPDATE", "DELETE"]
        assert privileges == ["SELECT", *changes], table
    with (
        psycopg.connect(role.partition("?")[0]) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CREATE TABLE public.mine (n integer)")
    admin.execute("DROP OWNED BY jobsync_writer; DROP ROLE jobsync_writer")


async def test_revoked_rights_are_named(
    server: PostgresServer,
    name: str,
    url: str,
    admin: psycopg.Connection[Any],
    connect: Connect,
) -> None:
    """A right or a table that is lost later is a setup error, not a temporary one."""
    role = server.create_role(name, "secret", name)
    admin.execute(f"GRANT CREATE ON SCHEMA public TO {name}".encode())
    store = await connect(role)
    admin.execute(f"REVOKE INSERT ON jobsync_record FROM {name}".encode())
    with pytest.raises(Misconfigured, match="permission denied"):
        await store.create("n", 0)
    admin.execute("DROP TABLE jobsync_record")
    with pytest.raises(Misconfigured, match="does not exist"):
        await store.get("n")


@pytest.mark.parametrize("schema", ["apart", 'Ünï "quoted" %s {schema} {where} %'])
async def test_a_separate_schema_is_created_and_used(
    url: str, admin: psycopg.Connection[Any], connect: Connect, schema: str
) -> None:
    """Two schemas of one database are two stores; any name is allowed."""
    quoted = "".join(f"%{byte:02X}" for byte in schema.encode())
    apart, plain = await connect(f"{url}?schema={quoted}"), await connect(url)
    made = await apart.create("n/1", {"a": 1})
    assert await plain.get("n/1") is None
    assert await apart.scan("n/", where={"a": 1}) == [made]
    await apart.write([made.replace(2), Put("n/2", 2)])
    assert [head.key for head in await apart.heads("n/")] == ["n/1", "n/2"]
    found = admin.execute(
        "SELECT schemaname FROM pg_tables WHERE tablename = 'jobsync_record' ORDER BY 1"
    ).fetchall()
    assert {row[0] for row in found} == {schema, "public"}


async def test_values_are_stored_byte_for_byte(
    url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """The stored text is the JSON text as written, alone and in a batch."""
    store = await connect(url)
    value = {"z": 1.0, "a": 1e22, "s": 'q"\\ \n {},NULL', "t": "漢字 🎈"}
    record = await store.create("n/1", value)
    await store.write([record.replace(value), Put("n/2", value), Put("n/3", None)])
    texts = [row[0] for row in admin.execute("SELECT value FROM jobsync_record ORDER BY key")]
    assert texts == ['{"z":1.0,"a":1e22,"s":"q\\"\\\\ \\n {},NULL","t":"漢字 🎈"}'] * 2 + ["null"]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
async def test_any_default_isolation_gives_the_same_outcomes(
    server: PostgresServer,
    name: str,
    url: str,
    admin: psycopg.Connection[Any],
    connect: Connect,
    level: str,
) -> None:
    """Losers conflict and no caller sees a serialization failure, whatever the role's default."""
    role = server.create_role(name, "secret", name)
    admin.execute(f"GRANT CREATE ON SCHEMA public TO {name}".encode())
    admin.execute(f"ALTER ROLE {name} SET default_transaction_isolation = '{level}'".encode())
    first, second = await connect(role), await connect(role)
    outcomes = await asyncio.gather(
        *(store.write([Put("lock", 0)]) for store in (first, second) for _ in range(8))
    )
    assert (
        sorted(type(outcome).__name__ for (outcome,) in outcomes)
        == ["Applied"] + ["Conflicted"] * 15
    )
    await first.create("n", 0)
    await asyncio.gather(*(increment(store, "n") for store in (first, second) for _ in range(10)))
    record = await first.get("n")
    assert record is not None
    assert (record.value, record.seq) == (20, 21)


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_many_may_connect_first(
    name: str, url: str, admin: psycopg.Connection[Any], connect: Connect, level: str
) -> None:
    """Sixteen first connects to an empty database, in two schemas, all work."""
    admin.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'".encode())
    urls = [url, f"{url}?schema=apart"] * 8
    stores = await asyncio.gather(*(connect(each) for each in urls))
    created = await asyncio.gather(*(store.write([Put("n", 0)]) for store in stores))
    assert sum(isinstance(outcome, Applied) for (outcome,) in created) == 2
    newest = [(len(POSTGRES_STEPS),)]
    assert admin.execute("SELECT tables_version FROM public.jobsync_schema").fetchall() == newest
    assert admin.execute("SELECT tables_version FROM apart.jobsync_schema").fetchall() == newest


async def test_the_tables_of_a_newer_version_are_left_alone(
    url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """Newer code has only added to them: older code works beside it and keeps the version."""
    await connect(url)
    admin.execute("UPDATE jobsync_schema SET tables_version = 99")
    store = await connect(url)
    await store.create("n", 0)
    assert admin.execute("SELECT tables_version FROM jobsync_schema").fetchall() == [(99,)]


async def test_overlapping_batches_do_not_deadlock(url: str, connect: Connect) -> None:
    """Batches on the same records in any order: each change has one outcome."""
    stores = [await connect(url, max_connections=4) for _ in range(2)]
    keys = [f"n/{i:02d}" for i in range(12)]
    chance = random.Random(1)
    applied = dict.fromkeys(keys, 0)

    async def work(store: PostgresStore) -> None:
        for _ in range(15):
            chosen = chance.sample(keys, 8)
            found = await store.get_many(chosen)
            changes = [
                Put(key, 0, record if chance.random() < 0.8 else None)
                for key, record in zip(chosen, found, strict=True)
            ]
            for change, outcome in zip(changes, await store.write(changes), strict=True):
                applied[change.key] += isinstance(outcome, Applied)
                assert isinstance(outcome, Applied | Conflicted)

    await asyncio.gather(*(work(store) for store in stores for _ in range(4)))
    assert {record.key: record.seq for record in await stores[0].scan("n/")} == applied


async def test_a_batch_locks_rows_by_key_whatever_the_plan(
    name: str, url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """Who waits for a row holds none that comes after it, even if the table is read in order."""
    store = await connect(url)
    b, a = await store.create("n/b", 0), await store.create("n/a", 0)
    admin.execute("ANALYZE jobsync_record")
    for setting in ("enable_nestloop", "enable_mergejoin"):
        admin.execute(f"ALTER DATABASE {name} SET {setting} = off".encode())
    store = await connect(url)
    with psycopg.connect(url) as stranger:
        stranger.execute("SELECT 1 FROM jobsync_record WHERE key = 'n/a' FOR UPDATE")
        writing = asyncio.create_task(store.write([b.replace(1), a.replace(1)]))
        await wait_until_true(admin, BLOCKED)
        stranger.execute("SELECT 1 FROM jobsync_record WHERE key = 'n/b' FOR UPDATE NOWAIT")
    assert [type(outcome) for outcome in await writing] == [Applied, Applied]


async def test_the_victim_of_a_deadlock_is_retried(
    url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """After a deadlock with a foreign transaction the statement is sent again."""
    store = await connect(url)
    a, b = await store.create("n/a", 0), await store.create("n/b", 0)
    stranger = await psycopg.AsyncConnection.connect(url)
    async with stranger:
        # So that the server detects the deadlock in our session, and rolls ours back.
        await stranger.execute("SET deadlock_timeout = '1h'")
        await stranger.execute("SELECT 1 FROM jobsync_record WHERE key = 'n/b' FOR UPDATE")
        writing = asyncio.create_task(store.write([b.replace(1), a.replace(1)]))
        await wait_until_true(admin, BLOCKED)
        await stranger.execute("SELECT 1 FROM jobsync_record WHERE key = 'n/a' FOR UPDATE")
        assert not writing.done()
    assert [type(outcome) for outcome in await writing] == [Applied, Applied]


async def test_a_read_only_server_is_unavailable(
    server: PostgresServer,
    name: str,
    url: str,
    admin: psycopg.Connection[Any],
    connect: Connect,
) -> None:
    """The error of a standby after a failover is temporary, and has the fix."""
    record = await (await connect(url)).create("n", 0)
    admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    store = await connect(url)
    assert await store.get("n") == record
    with pytest.raises(Unavailable, match="Point the url to the primary"):
        await store.put(record, 1)


async def test_the_servers_own_timeout_is_not_unknown(
    name: str, url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """A statement that the server itself cancelled was certainly rolled back."""
    record = await (await connect(url)).create("n", 0)
    admin.execute(f"ALTER DATABASE {name} SET lock_timeout = '20ms'".encode())
    store = await connect(url)
    with psycopg.connect(url) as stranger:
        stranger.execute("SELECT 1 FROM jobsync_record FOR UPDATE")
        with pytest.raises(Unavailable, match="nothing was written"):
            await store.put(record, 1)
    assert await store.get("n") == record


async def test_a_stored_value_that_a_statement_cannot_process_is_corrupt(
    url: str, connect: Connect
) -> None:
    """The error names the place and the server's reason; it is not one of the driver's."""
    store = await connect(url)
    with pytest.raises(Corrupt, match=r"queue/a cannot be read \(integer out of range\)"):
        await store.sql.run("SELECT 2147483647 + %s::integer", [1], "queue/a")


async def test_a_fork_is_refused(url: str, connect: Connect) -> None:
    """A child must connect again, and does not disturb its parent's connections."""
    store = await connect(url)
    record = await store.create("n", 0)
    if not (child := os.fork()):
        try:
            with pytest.raises(Misconfigured, match="before a fork"):
                await store.get("n")
            with pytest.raises(Misconfigured, match="before a fork"):
                await store.wait("n/", 1)
            await store.close()
        except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as pytest
            os._exit(1)
        os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert await store.get("n") == record


async def test_another_event_loop_is_refused(url: str, connect: Connect) -> None:
    """Connections belong to the loop that opened them."""
    store = await connect(url)
    with pytest.raises(Misconfigured, match="another event loop"):
        await asyncio.to_thread(asyncio.run, store.get("n"))


def run_apart(work: Coroutine[Any, Any, None]) -> bool:
    """Run a coroutine on its own loop; return whether the loop ended."""
    running = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
    running.start()
    running.join(30)
    return not running.is_alive()


# psycopg warns of each connection that was not closed, as Python does of files.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_loop_can_end_with_an_open_store(url: str, steps: int) -> None:
    """A program that forgets to close, or fails before it can, still exits."""

    async def leave() -> None:
        await PostgresStore.connect(read(url))
        for _ in range(steps):
            await asyncio.sleep(0)

    assert run_apart(leave())


def test_a_loop_can_end_while_a_pool_connects(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ends during a connect does not wait for it."""

    async def leave() -> None:
        pool = PostgresPool(read(url), Components.system(), statement_timeout=60, max_connections=2)
        begun = asyncio.Event()

        async def never(*_: object, **__: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(PostgresConnection, "connect", never)
        busy = [asyncio.create_task(pool.run("SELECT pg_sleep(60)")) for _ in range(2)]
        await begun.wait()
        assert not any(task.done() for task in busy)

    assert run_apart(leave())


async def test_a_closed_store_is_unavailable(url: str, connect: Connect) -> None:
    """Calls after `close` raise."""
    store = await connect(url)
    waiting = await start_wait(store, "n/")
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(10):
        await waiting
    with pytest.raises(Unavailable, match="closed"):
        await store.get("n")
    with pytest.raises(Unavailable, match="closed"):
        await store.wait("n/", 1)


async def test_time_is_the_servers(
    url: str, admin: psycopg.Connection[Any], connect: Connect
) -> None:
    """The store's clock is that of the server, in seconds since 1970."""
    store = await connect(url)
    now = await store.now()
    assert now is not None
    row = admin.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    assert 0 <= row[0] - now.seconds < 60
