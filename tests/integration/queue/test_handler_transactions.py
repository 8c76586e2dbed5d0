"""What handlers write in `context.transaction()` is stored with the completion, or not at all."""

import asyncio
import os
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import psycopg
import pytest
from proxy import Proxy
from psycopg import sql
from psycopg.pq import TransactionStatus
from servers import Locate, PostgresServer
from waiting import until

from jobsync import (
    Context,
    Database,
    Document,
    Invalid,
    MessageClaimLost,
    OutcomeUnknown,
    QueuePlugin,
    Snooze,
    Unavailable,
)
from jobsync.queue import transaction_backend
from jobsync.queue.context import BlockingContext
from jobsync.queue.handler_slots import HandlerSlots
from jobsync.queue.sql import postgres_transactions, sqlite_transactions
from jobsync.queue.sql.guarded_connection import GuardedConnection
from jobsync.queue.sql.guarded_cursors import check_statement
from jobsync.queue.transaction_backend import OpenTransaction, TransactionBackend

Handler = Callable[..., Any]
SQL = ("sqlite", "postgres")
_ADD = {
    "sqlite": "INSERT INTO effects VALUES (?)",
    "postgres": "INSERT INTO effects.effects VALUES (%s)",
}


class Effects:
    """A table of the user's in the database of the queue."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.add = _ADD[kind]

    def run(self, statement: str) -> list[Any]:
        """Run a statement on a connection of its own."""
        if self.kind == "sqlite":
            connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), 30)
            try:
                with connection:
                    return connection.execute(statement).fetchall()
            finally:
                connection.close()
        with psycopg.connect(self.url.partition("?")[0], autocommit=True) as server:
            cursor = server.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create(self) -> None:
        """Create the table, empty."""
        if self.kind == "sqlite":
            self.run("CREATE TABLE effects (id text)")
        else:
            self.run("CREATE SCHEMA IF NOT EXISTS effects")
            self.run("DROP TABLE IF EXISTS effects.effects")
            self.run("CREATE TABLE effects.effects (id text)")

    def read(self) -> list[str]:
        """Return the effects that are committed."""
        name = "effects" if self.kind == "sqlite" else "effects.effects"
        return [row[0] for row in self.run(f"SELECT id FROM {name}")]

    def write_blocking(self, connection: Any, name: str) -> None:
        """Add an effect in a plain function."""
        connection.execute(self.add, [name])

    async def write(self, connection: Any, name: str) -> None:
        """Add an effect in a coroutine function."""
        if self.kind == "sqlite":
            connection.execute(self.add, [name])
        else:
            await connection.execute(self.add, [name])


@pytest.fixture(params=SQL)
def effects(request: pytest.FixtureRequest, locate: Locate) -> Effects:
    """The user's table, on each database."""
    return Effects(request.param, locate(request.param))


@asynccontextmanager
async def run_queue(
    effects: Effects, handler: Handler, **options: Any
) -> AsyncIterator[QueuePlugin]:
    """Run a worker with a table of the user's beside its queue."""
    chosen = {"backoff": lambda _: 0.0, "grace": 1.0, **options}
    queue = QueuePlugin(resource="tasks", on_message=handler, **chosen)
    async with Database(effects.url, plugins=[queue]):
        effects.create()
        yield queue


async def ended(queue: QueuePlugin, count: int = 1) -> dict[str, int]:
    """Wait until so many messages are finished; return what this process has counted."""

    def is_done() -> bool:
        stats = queue.stats()
        is_finished = stats["completed"] + stats["dead"] + stats["cancelled"] >= count
        return is_finished and not stats["running"]

    await until(is_done, "the messages are finished, and so are the handlers")
    return queue.stats()


async def read_errors(queue: QueuePlugin) -> str:
    """Return the errors of the only dead letter."""
    (info,) = await queue.dead_letters()
    return "\n".join(failure.error for failure in info.errors)


async def test_an_effect_and_its_message_are_committed_together(effects: Effects) -> None:
    """Also in batches of one claim; what the handlers return or raise afterwards adds nothing."""
    callbacks: list[Any] = []

    async def handle(task: Document, context: Context) -> Any:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)
            assert effects.read().count(context.id) == 0
        assert context.is_settled
        assert effects.read().count(context.id) == 1
        if task["n"] % 3 == 0:
            raise ValueError("after the commit")
        return Snooze(60) if task["n"] % 3 == 1 else 7

    options = {"on_complete": lambda task, result: callbacks.append((task["id"], result))}
    async with run_queue(effects, handle, concurrency=4, **options) as queue:
        ids = await queue.enqueue_many([{"n": n} for n in range(12)])
        stats = await ended(queue, 12)
        await until(lambda: len(callbacks) == 12, "the callbacks have run")
        assert (stats["completed"], stats["retried"], stats["returned"]) == (12, 0, 0)
        assert sorted(effects.read()) == sorted(ids)
        assert sorted(callbacks) == sorted((name, None) for name in ids)
        assert await queue.count("completed") == 12


async def test_a_plain_function_has_a_transaction_too(effects: Effects) -> None:
    """With the connection that blocks, on the thread of the function."""
    kinds: set[type[Any]] = set()

    def handle(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            kinds.add(type(connection))
            effects.write_blocking(connection, context.id)

    async with run_queue(effects, handle, concurrency=3) as queue:
        ids = await queue.enqueue_many([{}] * 6)
        await ended(queue, 6)
        assert sorted(effects.read()) == sorted(ids)
        found = sqlite3.Connection if effects.kind == "sqlite" else psycopg.Connection
        assert all(issubclass(kind, found) for kind in kinds)


@pytest.mark.parametrize("is_async", [True, False])
async def test_raising_rolls_back_and_the_attempt_fails(effects: Effects, is_async: bool) -> None:
    """The next attempt writes it once."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)
            if context.attempt == 1:
                raise ValueError("too early")

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            effects.write_blocking(connection, context.id)
            if context.attempt == 1:
                raise SystemExit("too early")

    async with run_queue(effects, handle if is_async else block) as queue:
        name = await queue.enqueue({})
        stats = await ended(queue)
        assert (stats["retried"], stats["completed"]) == (1, 1)
        assert effects.read() == [name]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_claim_that_has_ended_rolls_all_back(effects: Effects, is_async: bool) -> None:
    """Whoever has the message now writes it; the handler hears of it."""
    heard: list[BaseException] = []
    queue: QueuePlugin

    async def end_claim() -> None:
        """End the claim as another process does which takes this one for dead."""
        backend = queue._get_backend()
        session = queue._get_membership().incarnation
        assert await backend.end_claims({session})

    async def handle(_: Document, context: Context) -> None:
        try:
            async with context.transaction() as connection:
                if context.epoch == 1 and effects.kind == "postgres":
                    await end_claim()
                await effects.write(connection, context.id)
        except MessageClaimLost as error:
            heard.append(error)
            raise

    def block(_: Document, context: BlockingContext) -> None:
        try:
            with context.transaction() as connection:
                if context.epoch == 1 and effects.kind == "postgres":
                    context._run(end_claim())
                effects.write_blocking(connection, context.id)
        except MessageClaimLost as error:
            heard.append(error)
            raise

    async with run_queue(effects, handle if is_async else block) as queue:
        if effects.kind == "sqlite":
            # There nobody else can write meanwhile: it ends just before.
            _end_before_begin(queue, end_claim)
        name = await queue.enqueue({})
        stats = await ended(queue)
        assert effects.read() == [name]
        assert (stats["lost"], stats["completed"]) == (1, 1)
        assert [str(error) for error in heard if name in str(error)]
        assert len(heard) == 1


def _end_before_begin(queue: QueuePlugin, end_claim: Callable[[], Awaitable[None]]) -> None:
    """End the first claim after the handler has looked at it, and before its transaction."""
    backend = queue._get_backend().transactions
    assert backend is not None
    begin = backend.begin

    async def end_and_begin(limit: float, *, is_blocking: bool) -> Any:
        backend.begin = begin  # type: ignore[method-assign]
        await end_claim()
        return await begin(limit, is_blocking=is_blocking)

    backend.begin = end_and_begin  # type: ignore[method-assign]


async def execute(connection: Any, *arguments: Any) -> None:
    """Run a statement on a connection of either kind."""
    result = connection.execute(*arguments)
    if not isinstance(connection, sqlite3.Connection):
        await result


async def commit(connection: Any) -> None:
    """End the transaction by a statement."""
    await execute(connection, "COMMIT")


async def roll_back_and_begin(connection: Any) -> None:
    """Replace the transaction by another one."""
    for statement in ("ROLLBACK", "BEGIN"):
        await execute(connection, statement)


async def commit_by_method(connection: Any) -> None:
    """End the transaction by the driver's method."""
    result = connection.commit()
    if not isinstance(connection, sqlite3.Connection):
        await result


async def enter_connection(connection: Any) -> None:
    """Use the driver's block, which commits at its end."""
    if isinstance(connection, sqlite3.Connection):
        with connection:
            pass
    else:
        async with connection:
            pass


async def commit_in_a_script(connection: Any) -> None:
    """Commit among other statements; what follows is refused on PostgreSQL, too."""
    if isinstance(connection, sqlite3.Connection):
        connection.executescript("SELECT 1")
    await connection.execute("SELECT 1; COMMIT")
    await connection.execute(_ADD["postgres"], ["later"])


async def ignore_the_refusal(connection: Any) -> None:
    """Roll back by the driver's method, and go on after the error."""
    if not isinstance(connection, sqlite3.Connection):
        await connection.rollback()
    with suppress(Invalid):
        connection.rollback()


async def close(connection: Any) -> None:
    """Close the connection."""
    result = connection.close()
    if not isinstance(connection, sqlite3.Connection):
        await result


async def fail_quietly(connection: Any) -> None:
    """Run a statement that fails, and go on."""
    with pytest.raises((sqlite3.Error, psycopg.Error)):
        await execute(connection, "SELECT * FROM nowhere")


@pytest.mark.parametrize(
    "act",
    [
        commit,
        roll_back_and_begin,
        commit_by_method,
        enter_connection,
        commit_in_a_script,
        ignore_the_refusal,
        close,
    ],
    ids=lambda act: act.__name__,
)
async def test_a_handler_that_ends_the_transaction_fails(
    effects: Effects, act: Callable[[Any], Awaitable[None]]
) -> None:
    """With an error that says so; the message was not completed, and nothing was written.

    On PostgreSQL, a COMMIT among other statements is noticed afterwards only.
    """

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)
            await act(connection)

    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        assert (await ended(queue))["dead"] == 1
        errors = await read_errors(queue)
        assert "context.transaction()" in errors or "forbidden within a Transaction" in errors
        assert await queue.count("completed") == 0
        is_late = effects.kind == "postgres" and act is commit_in_a_script
        assert len(effects.read()) == is_late


async def test_savepoints_can_be_nested(effects: Effects) -> None:
    """What is rolled back within them is not there, nor an error; the rest is there."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, "kept")
            await execute(connection, "SAVEPOINT a")
            await effects.write(connection, "undone")
            await fail_quietly(connection)
            await execute(connection, "ROLLBACK TO a")
            await effects.write(connection, "kept too")
            if isinstance(connection, sqlite3.Connection):
                connection.row_factory = lambda *_: {}
                # There errors end nothing.
                await fail_quietly(connection)
                return
            connection.row_factory = psycopg.rows.dict_row
            async with connection.transaction(force_rollback=True):
                await effects.write(connection, "undone")
            async with connection.transaction():
                await effects.write(connection, "kept as well")

    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        await ended(queue)
        assert {*effects.read()} - {"kept as well"} == {"kept", "kept too"}


def _set_factories(connection: Any) -> None:
    """Make a connection return rows and texts of other kinds."""
    if isinstance(connection, sqlite3.Connection):
        connection.row_factory = lambda *_: {}
        connection.text_factory = bytes
    else:
        connection.row_factory = psycopg.rows.dict_row


@pytest.mark.parametrize("group", [None, "a"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_message_is_completed_whatever_its_handler_has_set_on_the_connection(
    effects: Effects, group: str | None, *, is_async: bool
) -> None:
    """Alone, beside others of its claim, and as the head of a group."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            _set_factories(connection)
            await effects.write(connection, context.id)

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            _set_factories(connection)
            effects.write_blocking(connection, context.id)

    options = {"concurrency": 3, "max_attempts": 1}
    async with run_queue(effects, handle if is_async else block, **options) as queue:
        names = await queue.enqueue_many([{}] * 3, group=group)
        stats = await ended(queue, 3)
        assert (stats["completed"], stats["lost"]) == (3, 0)
        assert sorted(effects.read()) == sorted(names)


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_transaction_sees_what_was_committed_before_each_statement(
    locate: Locate, level: str, *, is_async: bool
) -> None:
    """On PostgreSQL, whatever the server's default is: others settle messages of the same claim."""
    effects = Effects("postgres", locate("postgres"))
    base, _, options = effects.url.partition("?")
    escaped = level.replace(" ", r"\ ")
    extra = f"options={quote(f'-c default_transaction_isolation={escaped}')}"
    effects.url = f"{base}?{'&'.join(filter(None, [options, extra]))}"
    found: list[Any] = []
    query = "SELECT current_setting('default_transaction_isolation')", "SHOW transaction_isolation"

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            for statement in query:
                cursor = await connection.execute(statement)
                found.append(await cursor.fetchone())

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            found.extend(connection.execute(statement).fetchone() for statement in query)

    async with run_queue(effects, handle if is_async else block, max_attempts=1) as queue:
        await queue.enqueue({})
        assert (await ended(queue))["completed"] == 1
    assert found == [(level,), ("read committed",)]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_failed_statement_that_is_ignored_fails_the_attempt(
    locate: Locate, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """On PostgreSQL it has ended the transaction; COMMIT does not say so.

    A task of the handler's may run it after the completion, right before COMMIT.
    """
    effects = Effects("postgres", locate("postgres"))

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)
            if not is_late:
                await fail_quietly(connection)

    async with run_queue(effects, handle, max_attempts=1) as queue:
        if is_late:
            _fail_after_completion(monkeypatch, queue)
        await queue.enqueue({})
        await ended(queue)
        assert "has a statement that failed" in await read_errors(queue)
        assert effects.read() == []


def _fail_after_completion(monkeypatch: pytest.MonkeyPatch, queue: QueuePlugin) -> None:
    """Run a statement that fails between the completion of a message and COMMIT."""
    backend = queue._get_backend().transactions
    assert backend is not None
    complete = backend.complete_within

    async def complete_within(connection: Any, *arguments: Any) -> bool:
        is_completed = await complete(connection, *arguments)
        await fail_quietly(connection)
        return is_completed

    monkeypatch.setattr(backend, "complete_within", complete_within)


async def wait_for_ever(connection: Any) -> None:
    """Wait as a coroutine function does that hangs."""
    del connection
    await asyncio.sleep(3600)


async def swallow_cancellation(connection: Any) -> None:
    """Go on after the time is over, and try to write."""
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(3600)
    with pytest.raises((sqlite3.Error, psycopg.Error)):
        await write_for_ever(connection)


async def write_for_ever(connection: Any) -> None:
    """Write until that is refused."""
    add = _ADD["sqlite" if isinstance(connection, sqlite3.Connection) else "postgres"]
    while True:
        await execute(connection, add, ["late"])
        await asyncio.sleep(0)


async def block_the_loop(connection: Any) -> None:
    """Keep the event loop from running until the transaction is cut off."""
    if not isinstance(connection, sqlite3.Connection):
        await asyncio.sleep(3600)
    deadline = time.monotonic() + 30
    while connection.in_transaction:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # noqa: ASYNC251 - that is the point


@pytest.mark.parametrize(
    "act",
    [wait_for_ever, swallow_cancellation, block_the_loop],
    ids=lambda act: act.__name__,
)
async def test_a_transaction_that_takes_too_long_is_rolled_back(
    effects: Effects, act: Callable[[Any], Awaitable[None]]
) -> None:
    """At its limit, whatever the handler does; then others can write."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction(timeout=0.3) as connection:
            await effects.write(connection, context.id)
            await act(connection)

    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        await ended(queue)
        assert "took longer than 0.3 s and was rolled back" in await read_errors(queue)
        assert effects.read() == []


@pytest.mark.parametrize("watcher", ["loop", "thread"])
async def test_either_watcher_of_the_time_is_enough(
    locate: Locate, monkeypatch: pytest.MonkeyPatch, watcher: str
) -> None:
    """A handler that ignores its cancellation and leaves the block commits nothing."""
    effects = Effects("sqlite", locate("sqlite"))

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction(timeout=0.2) as connection:
            await effects.write(connection, context.id)
            with suppress(asyncio.CancelledError):
                await (asyncio.sleep(60) if watcher == "loop" else block_the_loop(connection))

    if watcher == "loop":
        monkeypatch.setattr(OpenTransaction, "expire", lambda _: None)
    else:
        monkeypatch.setattr(asyncio.Timeout, "expired", lambda _: False)
    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        await ended(queue)
        assert "took longer than 0.2 s and was rolled back" in await read_errors(queue)
        assert effects.read() == []


async def test_a_thread_that_takes_too_long_is_rolled_back(effects: Effects) -> None:
    """While it sits there: others can write before it returns; what it writes later is refused."""
    has_written, is_free = threading.Event(), threading.Event()

    def handle(_: Document, context: BlockingContext) -> None:
        with context.transaction(timeout=0.3) as connection:
            # Refused, if it comes that late on a busy machine.
            with suppress(sqlite3.Error, psycopg.Error):
                effects.write_blocking(connection, context.id)
            has_written.set()
            assert is_free.wait(60)
            with pytest.raises((sqlite3.Error, psycopg.Error)):
                effects.write_blocking(connection, "late")

    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        await until(has_written.is_set, "the handler has written")
        if effects.kind == "sqlite":
            # It waits for the lock.
            await asyncio.to_thread(effects.run, "INSERT INTO effects VALUES ('free')")
        else:
            await until(lambda: not count_transactions(effects), "the server has rolled back")
        is_free.set()
        await ended(queue)
        assert "took longer than 0.3 s" in await read_errors(queue)
        assert {*effects.read()} <= {"free"}


def count_transactions(effects: Effects) -> int:
    """Return how many sessions are in a transaction and wait for their client."""
    rows = effects.run("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'")
    return int(rows[0][0])


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_has_one_transaction_at_a_time(effects: Effects, is_async: bool) -> None:
    """A second one, `ack` and `nack` are refused within it, and after it."""
    refused: list[str] = []

    async def refuse(*works: Callable[[], Awaitable[Any]]) -> None:
        for work in works:
            with pytest.raises((Invalid, MessageClaimLost)) as caught:
                await work()
            refused.append(type(caught.value).__name__)

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await refuse(context.transaction().__aenter__, context.ack, context.nack)
            await effects.write(connection, context.id)
        await refuse(context.transaction().__aenter__)
        assert not await context.ack()

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            for work in (context.transaction().__enter__, context.ack, context.nack):
                with pytest.raises(Invalid):
                    work()
                refused.append("Invalid")
            effects.write_blocking(connection, context.id)
        with pytest.raises(MessageClaimLost):
            context.transaction().__enter__()
        refused.append("MessageClaimLost")

    async with run_queue(effects, handle if is_async else block, max_attempts=1) as queue:
        name = await queue.enqueue({})
        assert (await ended(queue))["completed"] == 1
        assert refused == ["Invalid", "Invalid", "Invalid", "MessageClaimLost"]
        assert effects.read() == [name]


async def test_a_handler_that_leaves_its_transaction_open_fails(effects: Effects) -> None:
    """Its message is not completed without what it wrote."""
    blocks: list[Any] = []

    async def handle(_: Document, context: Context) -> None:
        block = context.transaction()
        blocks.append(block)
        connection = await block.__aenter__()
        await effects.write(connection, context.id)

    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        assert (await ended(queue))["dead"] == 1
        assert "before its context.transaction() has ended" in await read_errors(queue)
        assert effects.read() == []


async def test_a_forked_child_commits_nothing(effects: Effects) -> None:
    """It ends where the block ends; the parent's transaction goes on."""
    children: list[int] = []

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            if (child := os.fork()) != 0:
                children.append(child)
                await effects.write(connection, context.id)
                waited = await asyncio.to_thread(os.waitpid, child, 0)
                assert os.waitstatus_to_exitcode(waited[1]) == 1

    async with run_queue(effects, handle, max_attempts=1) as queue:
        name = await queue.enqueue({})
        assert (await ended(queue))["completed"] == 1
        assert len(children) == 1
        assert effects.read() == [name]


async def test_a_stop_rolls_back_and_the_next_worker_writes_it(effects: Effects) -> None:
    """No attempt is spent, and nothing is written twice."""
    has_written = asyncio.Event()

    async def hang(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)
            has_written.set()
            await asyncio.sleep(3600)

    async def handle(_: Document, context: Context) -> None:
        assert context.attempt == 1
        async with context.transaction() as connection:
            await effects.write(connection, context.id)

    async with run_queue(effects, hang, grace=0.0) as queue:
        name = await queue.enqueue({})
        await has_written.wait()
    queue = QueuePlugin(resource="tasks", on_message=handle)
    async with Database(effects.url, plugins=[queue]):
        await ended(queue)
        assert effects.read() == [name]


@pytest.mark.parametrize("kind", ["memory", "s3"])
async def test_other_stores_refuse_transactions(kind: str, locate: Locate) -> None:
    """With the reason, before anything happens."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction():
            raise AssertionError

    queue = QueuePlugin(resource="tasks", on_message=handle, max_attempts=1)
    async with Database(locate(kind), plugins=[queue]):
        await queue.enqueue({})
        await ended(queue)
        assert "has no transactions" in await read_errors(queue)


@pytest.mark.parametrize("seconds", [0, -1, "5", 4000])
async def test_a_wrong_limit_is_refused(effects: Effects, seconds: Any) -> None:
    """With the field and the range."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction(timeout=seconds):
            raise AssertionError

    async with run_queue(effects, handle, max_attempts=1) as queue:
        await queue.enqueue({})
        await ended(queue)
        most = 5 if effects.kind == "sqlite" else 3600
        assert f"timeout must be more than 0 to {most} seconds" in await read_errors(queue)


@pytest.fixture
def proxied(postgres: PostgresServer, locate: Locate) -> Iterator[tuple[Proxy, str]]:
    """A server behind a proxy that loses replies, and the URL through it."""
    direct = locate("postgres")
    with Proxy("127.0.0.1", postgres.port) as proxy:
        yield proxy, direct.replace(f":{postgres.port}/", f":{proxy.port}/")


def is_commit(request: bytes) -> bool:
    """Whether a request is the COMMIT of a handler's transaction."""
    return b"COMMIT\0" in request


def is_end(request: bytes) -> bool:
    """Whether a request is the first one after the block of a handler's transaction."""
    return b"txid_current" in request and b"statement_timeout" not in request


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_server_that_does_not_answer_at_the_end_fails_the_attempt(
    proxied: tuple[Proxy, str], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """In a limited time: nobody could cancel it, and it would keep its slot."""
    proxy, url = proxied
    effects = Effects("postgres", url)
    monkeypatch.setattr(postgres_transactions, "_END_TIME", 0.3)

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            effects.write_blocking(connection, context.id)

    async with run_queue(effects, handle if is_async else block, max_attempts=1) as queue:
        proxy.hold_request(1, is_end)
        await queue.enqueue({})
        await ended(queue)
        proxy.release()
        assert "the transaction was rolled back" in await read_errors(queue)
        assert effects.read() == []


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("fault", ["drop_reply", "drop_request", "hold_request"])
async def test_an_unknown_commit_is_settled_by_reading_the_claim(
    proxied: tuple[Proxy, str], fault: str, is_async: bool
) -> None:
    """One that arrived has completed the message; one that did not is written by the retry."""
    proxy, url = proxied
    effects = Effects("postgres", url)

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            effects.write_blocking(connection, context.id)

    async with run_queue(effects, handle if is_async else block) as queue:
        getattr(proxy, fault)(1, is_commit)
        name = await queue.enqueue({})
        if fault == "hold_request":
            await until(lambda: proxy.faults, "the COMMIT is held")
            proxy.release()
        stats = await ended(queue)
        assert effects.read() == [name]
        assert stats["completed"] == 1
        assert stats["retried"] == (1 if fault == "drop_request" else 0)


class ServerError(psycopg.OperationalError):
    """An error that the server has sent."""

    def __init__(self, severity: str) -> None:
        super().__init__("the commit failed")
        self.severity = severity

    @property
    def diag(self) -> Any:
        """What the server says about it."""
        return SimpleNamespace(severity_nonlocalized=self.severity)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (psycopg.OperationalError("the connection is lost"), OutcomeUnknown),
        (ServerError("FATAL"), OutcomeUnknown),
        (ServerError("PANIC"), OutcomeUnknown),
        (ServerError("ERROR"), ServerError),
        (psycopg.ProgrammingError("a block is open"), Invalid),
    ],
    ids=["lost", "fatal", "panic", "error", "psycopg"],
)
async def test_what_a_failed_commit_means(error: Exception, raised: type[Exception]) -> None:
    """On PostgreSQL: what ends the connection may come after the commit, an ERROR never does."""

    def fail(*_: object) -> None:
        raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection: Any = SimpleNamespace(pgconn=SimpleNamespace(socket=ours.fileno()))
        connection.close = lambda: None
        block = SimpleNamespace(__exit__=fail)
        opened = postgres_transactions._PostgresTransaction(connection, block, "1", 60.0, "queue/a")
        with pytest.raises(raised):
            await opened.commit()
        opened.stop_timer()
        await opened.close()


async def test_a_disk_that_fails_at_the_commit_is_settled_by_reading(
    locate: Locate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite: whether it was committed before it failed, or not."""
    effects = Effects("sqlite", locate("sqlite"))
    is_committed = [True, False]

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)

    async with run_queue(effects, handle) as queue:
        backend = queue._get_backend().transactions
        assert isinstance(backend, TransactionBackend)
        _fail_commits(monkeypatch, backend, is_committed)
        names = [await queue.enqueue({}), await queue.enqueue({})]
        stats = await ended(queue, 2)
        assert sorted(effects.read()) == sorted(names)
        assert (stats["completed"], stats["retried"]) == (2, 1)
        assert is_committed == []


def _fail_commits(
    monkeypatch: pytest.MonkeyPatch, backend: TransactionBackend, is_committed: list[bool]
) -> None:
    """Make commits fail as a disk does, after or before they are stored."""
    begin = backend.begin

    async def begin_failing(limit: float, *, is_blocking: bool) -> Any:
        opened = await begin(limit, is_blocking=is_blocking)
        if is_committed:
            connection = opened.connection
            opened.connection = FailingCommits(connection, is_stored=is_committed.pop(0))
        return opened

    monkeypatch.setattr(backend, "begin", begin_failing)
    complete = backend.complete_within

    async def complete_within(connection: Any, *arguments: Any) -> bool:
        return await complete(getattr(connection, "inner", connection), *arguments)

    monkeypatch.setattr(backend, "complete_within", complete_within)


class FailingCommits:
    """A connection whose COMMIT reports a failure of the disk."""

    def __init__(self, inner: sqlite3.Connection, *, is_stored: bool) -> None:
        self.inner = inner
        self._is_stored = is_stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, statement: str, *arguments: Any) -> Any:
        """Run a statement."""
        if statement != "COMMIT":
            return self.inner.execute(statement, *arguments)
        if self._is_stored:
            self.inner.execute(statement)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error


async def test_a_transaction_lets_the_next_message_of_a_group_come(effects: Effects) -> None:
    """Each is completed with its effect, in order, however many could run at once."""

    async def handle(_: Document, context: Context) -> None:
        async with context.transaction() as connection:
            await effects.write(connection, context.id)

    async with run_queue(effects, handle) as queue:
        names = await queue.enqueue_many([{}] * 3, group="a")
        stats = await ended(queue, 3)
        assert sorted(effects.read()) == sorted(names)
        assert stats["completed"] == 3
        assert await queue.count("blocked") == 0


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("what", ["group", "max_concurrency", "group_concurrency"])
async def test_a_transaction_wakes_those_who_wait_for_its_end(
    locate: Locate, what: str, *, is_async: bool
) -> None:
    """On PostgreSQL: another process can claim the next of the group, or has the free slot.

    They are notified by the transaction itself, so none of its commits is without.
    """
    effects = Effects("postgres", locate("postgres"))
    is_started, is_over = threading.Event(), threading.Event()
    servers: list[int] = []

    async def handle(_: Document, context: Context) -> None:
        is_started.set()
        await until(is_over.is_set, "somebody listens")
        async with context.transaction() as connection:
            servers.append(connection.info.backend_pid)
            await effects.write(connection, context.id)

    def block(_: Document, context: BlockingContext) -> None:
        is_started.set()
        is_over.wait(10)
        with context.transaction() as connection:
            servers.append(connection.info.backend_pid)
            effects.write_blocking(connection, context.id)

    limits = {} if what == "group" else {what: 1 if what == "max_concurrency" else 2}
    async with run_queue(effects, handle if is_async else block, **limits) as queue:
        await queue.enqueue({}, group=None if what == "max_concurrency" else "a")
        await until(is_started.is_set, "the handler runs")
        access: Any = queue.database.store.sql
        url = effects.url.partition("?")[0]
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as listener:
            await listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(access.channel)))
            is_over.set()
            async for note in listener.notifies(timeout=10):
                # Stores that open notify as well, and so does the push, a little later.
                if note.payload == "queue/default/tasks" and note.pid in servers:
                    break
            else:
                pytest.fail("nobody was woken")


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_that_ends_before_a_commit_that_fails_is_settled(
    locate: Locate, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """By how it has ended: its time was over, or it has left the block to a task of its own."""
    effects = Effects("sqlite", locate("sqlite"))
    is_committing, is_over = asyncio.Event(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def write(context: Context) -> None:
        with pytest.raises(Unavailable):
            async with context.transaction() as connection:
                await effects.write(connection, context.id)

    async def handle(_: Document, context: Context) -> None:
        tasks.append(asyncio.create_task(write(context)))
        await is_committing.wait()

    def block(_: Document, context: BlockingContext) -> None:
        with context.transaction() as connection:
            effects.write_blocking(connection, context.id)

    async def commit(_: object) -> None:
        is_committing.set()
        if not is_async:
            (delivery,) = slots[0].running
            slots[0]._on_deadline(delivery)
        await is_over.wait()
        raise Unavailable("the file", "it is away")

    slots: list[HandlerSlots] = []
    build = HandlerSlots.__init__

    def build_noted(self: HandlerSlots, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        slots.append(self)

    monkeypatch.setattr(HandlerSlots, "__init__", build_noted)
    monkeypatch.setattr(sqlite_transactions._SqliteTransaction, "commit", commit)
    options = {"max_attempts": 1, "timeout": None if is_async else 600}
    async with run_queue(effects, handle if is_async else block, **options) as queue:
        queue.on("plg:queue:handler-overran", lambda _: is_over.set())
        await queue.enqueue({})
        await is_committing.wait()
        if is_async:
            await until(lambda: not queue.stats()["running"], "the handler has ended")
            is_over.set()
        stats = await ended(queue)
        assert (stats["dead"], stats["completed"]) == (1, 0)
        reason = "before its context.transaction() has ended" if is_async else "longer than 600 s"
        assert reason in await read_errors(queue)
        assert effects.read() == []


def test_a_statement_after_an_interrupted_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite: the interrupted one has rolled back, so the next would commit by itself."""
    kind = GuardedConnection
    connection = sqlite3.connect(tmp_path / "app.db", isolation_level=None, factory=kind)
    refused: list[str] = []

    def interrupt(own: sqlite3.Connection) -> None:
        # What another thread of the handler's does at this moment.
        sqlite3.Connection.rollback(own)
        cursor = own.cursor()
        for run in (own.execute, own.executescript, cursor.execute, cursor.executescript):
            with pytest.raises(sqlite3.OperationalError) as error:
                run("INSERT INTO effects VALUES (1)")
            refused.append(str(error.value))
        for run_many in (own.executemany, cursor.executemany):
            with pytest.raises(sqlite3.OperationalError) as error:
                run_many("INSERT INTO effects VALUES (?)", [[2], [3]])
            refused.append(str(error.value))

    monkeypatch.setattr(kind, "interrupt", interrupt)
    connection.execute("CREATE TABLE effects (id)")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO effects VALUES (0)")
    connection.cut()
    connection.close()
    assert refused == ["attempt to write after the time of the transaction"] * 6
    with closing(sqlite3.connect(tmp_path / "app.db")) as other:
        assert other.execute("SELECT * FROM effects").fetchall() == []


@pytest.mark.parametrize(
    ("statement", "is_refused"),
    [
        ("COMMIT", True),
        (b"commit and chain", True),
        (sql.SQL("END"), True),
        ("/* a */ -- b\n ; Rollback", True),
        ("/* a\n b */\n\tcommit", True),
        ("rollback work", True),
        ("ROLLBACK AND CHAIN", True),
        ("end transaction", True),
        ("ABORT", True),
        ("PREPARE  TRANSACTION 'a'", True),
        ("/* */ " * 2000 + "COMMIT", True),
        ("/* */ " * 2000 + "SELECT 1", False),
        ("ROLLBACK TO a", False),
        ("rollback work to a", False),
        ("/* COMMIT\n */ SELECT 1", False),
        ("rollback transaction to savepoint a", False),
        ("COMMITTED", False),
        ("SELECT 'COMMIT'", False),
        ("PREPARE a AS SELECT 1", False),
        ("-- COMMIT\nSELECT 1", False),
        (b"SELECT '\xff'", False),
    ],
)
def test_sql_that_ends_a_transaction_is_refused_on_postgresql(
    statement: Any, *, is_refused: bool
) -> None:
    """Before it is sent."""
    cursor = Mock(connection=SimpleNamespace(info=SimpleNamespace(transaction_status=2)))
    cursor.pgconn = cursor.connection.pgconn = None
    if is_refused:
        with pytest.raises(Invalid, match=r"^connection must not end .* was refused.*Leave the"):
            check_statement(statement, cursor)
    else:
        check_statement(statement, cursor)


@pytest.mark.parametrize("status", TransactionStatus)
def test_postgresql_refuses_statements_only_once_the_transaction_has_ended(
    status: TransactionStatus,
) -> None:
    """Not after one that failed, or while others are under way: a savepoint may undo it."""
    cursor = Mock(connection=SimpleNamespace(info=SimpleNamespace(transaction_status=status)))
    if status == TransactionStatus.IDLE:
        with pytest.raises(Invalid, match="a statement has ended it"):
            check_statement("ROLLBACK TO a", cursor)
        return
    for statement in ("ROLLBACK TO a", "SELECT 1"):
        check_statement(statement, cursor)
    with pytest.raises(Invalid, match="must not end"):
        check_statement("ROLLBACK", cursor)


def test_nothing_but_its_owner_ends_a_transaction(tmp_path: Path) -> None:
    """On SQLite, by whichever way; and nothing is committed after one that has ended by itself."""
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as owner:
        owner.execute("CREATE TABLE effects (id UNIQUE)")

    @contextmanager
    def begin() -> Iterator[GuardedConnection]:
        connection = sqlite3.connect(path, isolation_level=None, factory=GuardedConnection)
        connection.execute("BEGIN IMMEDIATE")
        connection.guard()
        connection.execute("INSERT INTO effects VALUES (1)")
        yield connection
        connection.close()
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT * FROM effects").fetchall() == []

    endings: list[Callable[[GuardedConnection], object]] = [
        lambda own: own.commit(),
        lambda own: own.rollback(),
        lambda own: own.__enter__(),
        lambda own: own.executescript("SELECT 1"),
        lambda own: own.cursor().executescript("SELECT 1"),
        lambda own: own.execute("/* now */ COMMIT"),
        lambda own: own.execute("end transaction"),
        lambda own: own.execute("ROLLBACK"),
    ]
    for end in endings:
        with begin() as own:
            own.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
            with pytest.raises(Invalid, match="Leave the block"):
                end(own)
            own.execute("SELECT * FROM effects").fetchall()
            with pytest.raises(Invalid, match="was refused"):
                own.end_guard()
    with begin() as own:
        with pytest.raises(sqlite3.IntegrityError):
            own.execute("INSERT OR ROLLBACK INTO effects VALUES (1)")
        with pytest.raises(Invalid, match="a statement has rolled it back"):
            own.execute("INSERT INTO effects VALUES (2)")
    with begin() as own:
        own.execute("SAVEPOINT inner")
        own.execute("INSERT INTO effects VALUES (2)")
        own.execute("ROLLBACK TO inner")
        own.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            own.execute("SELECT id FROM effects WHERE id = 3")
        own.end_guard()


@pytest.mark.parametrize("ending", ["cut", "close"])
@pytest.mark.parametrize("left", ["cursor", "iteration", "error", "progress handler", "authorizer"])
def test_the_end_of_a_transaction_lets_others_write(tmp_path: Path, ending: str, left: str) -> None:
    """On SQLite, whatever the handler keeps: one blocked file stops every process that uses it."""
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as owner, owner:
        owner.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY)")
        owner.execute("INSERT INTO effects VALUES (1), (2)")
    kind = GuardedConnection
    connection = sqlite3.connect(path, isolation_level=None, factory=kind)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO effects VALUES (3)")
    kept: list[Any] = []
    match left:
        case "cursor":
            kept.append(connection.execute("SELECT id FROM effects"))
            kept[0].fetchone()
        case "iteration":
            kept.append(iter(connection.cursor().execute("SELECT id FROM effects")))
            next(kept[0])
        case "error":
            with pytest.raises(sqlite3.IntegrityError) as kept_error:
                connection.execute("INSERT INTO effects VALUES (1)")
            kept.append(kept_error.value)
        case "progress handler":
            connection.set_progress_handler(lambda: 1, 1)
        case _:
            connection.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)
    getattr(connection, ending)()
    with closing(sqlite3.connect(path, 0)) as other, other:
        other.execute("DELETE FROM effects WHERE id = 2")
        assert other.execute("SELECT id FROM effects").fetchall() == [(1,)]
    connection.close()
    assert len(kept) <= 1


@pytest.mark.parametrize("kept_from", [0, 99, 100, 350])
def test_the_end_of_a_transaction_ends_each_of_many_statements(
    tmp_path: Path, kept_from: int
) -> None:
    """On SQLite, whenever they began; of those that are gone nothing is kept."""
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as owner, owner:
        owner.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY)")
        owner.execute("INSERT INTO effects VALUES (1), (2)")
    connection = sqlite3.connect(path, isolation_level=None, factory=GuardedConnection)
    connection.execute("BEGIN IMMEDIATE")
    kept: list[sqlite3.Cursor] = []
    for number in range(2_000):
        cursor = connection.execute("SELECT id FROM effects")
        if kept_from <= number < kept_from + 150:
            cursor.fetchone()
            kept.append(cursor)
    assert len(connection._cursors) <= 2 * len(kept) + 100
    connection.cut()
    with closing(sqlite3.connect(path, 0)) as other, other:
        other.execute("DELETE FROM effects WHERE id = 2")
    for cursor in kept:
        with pytest.raises(sqlite3.Error):
            cursor.fetchone()
    connection.close()


def test_after_a_refused_end_other_errors_are_shown_as_they_are(tmp_path: Path) -> None:
    """On SQLite: a handler that has ignored the refusal learns what else is wrong."""
    connection = sqlite3.connect(
        tmp_path / "app.db", isolation_level=None, factory=GuardedConnection
    )
    connection.execute("CREATE TABLE effects (id UNIQUE)")
    connection.execute("BEGIN IMMEDIATE")
    connection.guard()
    with pytest.raises(Invalid, match="was refused"):
        connection.execute("COMMIT")
    connection.execute("INSERT INTO effects VALUES (1)")
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        connection.execute("INSERT INTO effects VALUES (1)")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        connection.execute("SELECT * FROM others")
    connection.close()


def test_a_transaction_is_cut_while_a_thread_reads_from_it(tmp_path: Path) -> None:
    """On SQLite: the reader gets an error, and nothing of Python breaks; others write at once."""
    path = tmp_path / "app.db"
    kind = GuardedConnection
    for _ in range(20):
        connection = sqlite3.connect(
            path, isolation_level=None, factory=kind, check_same_thread=False
        )
        connection.execute("CREATE TABLE IF NOT EXISTS effects (id)")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO effects VALUES (1)")
        is_reading = threading.Event()
        errors: list[sqlite3.Error] = []

        def read(own: Any = connection, begun: Any = is_reading, raised: Any = errors) -> None:
            numbers = (
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
            )
            try:
                for _ in own.execute(numbers):
                    begun.set()
            except sqlite3.Error as error:
                raised.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        is_reading.wait()
        connection.cut()
        reader.join()
        assert len(errors) == 1
        with closing(sqlite3.connect(path, 0)) as other, other:
            other.execute("DELETE FROM effects")
            assert not other.total_changes
        connection.close()


def test_time_limits_hold_after_an_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches them ends if there is no transaction; the next one starts another."""
    monkeypatch.setattr(transaction_backend, "_IDLE", 0.0)
    limits = transaction_backend._TimeLimits()
    for _ in range(2):
        before, expired = set(threading.enumerate()), threading.Event()
        limits.add(Mock(expire=expired.set), 0.0)
        assert expired.wait(5)
        for thread in set(threading.enumerate()) - before:
            thread.join(5)


def test_a_transaction_that_is_being_ended_is_not_cut(tmp_path: Path) -> None:
    """Its time ends while it commits: the outcome of COMMIT counts."""
    kind = GuardedConnection
    connection = sqlite3.connect(tmp_path / "app.db", isolation_level=None, factory=kind)
    connection.execute("BEGIN IMMEDIATE")
    opened = sqlite_transactions._SqliteTransaction(connection, 5.0, "tasks", Mock(), Mock())
    opened.stop_timer()
    opened.expire()
    assert connection.in_transaction
    assert not opened.is_expired
    connection.close()
