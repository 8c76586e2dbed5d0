"""The connection that receives the notifications of PostgreSQL for all stores of a process."""

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import psycopg
import pytest
import servers
from waiting import until

from jobsync.components import Components
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.stores.postgres import listener as listeners
from jobsync.stores.postgres.store import PostgresStore

_numbers = itertools.count()


@pytest.fixture
def url(postgres: servers.PostgresServer) -> Iterator[str]:
    """An empty database."""
    name = f"listener_{os.getpid()}_{next(_numbers)}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture
def admin(url: str) -> Iterator[psycopg.Connection[Any]]:
    """An administrator's connection."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    """A store on the loop of the test, whose waiters are woken."""
    store = await PostgresStore.connect(read(url))
    await wait_until_listening(store)
    yield store
    await store.close()


class OtherLoop:
    """Another store of the same database, on a thread of its own."""

    def __init__(self, store: PostgresStore, url: str) -> None:
        self.woken = threading.Event()
        """Set whenever its waiter was woken."""
        self.is_waiting = threading.Event()
        self._end = asyncio.Event()
        self._store, self._url = store, url
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.is_waiting.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        another = PostgresStore.open_like(self._store, read(self._url), Components.system())
        await wait_until_listening(another)
        waiting = asyncio.create_task(self._wait(another))
        await self._end.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        await another.close()

    async def _wait(self, store: PostgresStore) -> None:
        while True:
            self._loop.call_soon(self.is_waiting.set)
            await store.wait("n/", 60)
            self.woken.set()


def read(url: str) -> PostgresUrl:
    """Parse a PostgreSQL URL."""
    found = parse_url(url)
    assert isinstance(found, PostgresUrl)
    return found


async def wait_until_listening(store: PostgresStore) -> None:
    """Wait until a store receives notifications: then all its waiters are woken once."""
    async with asyncio.timeout(10):
        await store.wait("hello/", 60)


def list_listening(admin: psycopg.Connection[Any]) -> list[int]:
    """Return the connections to this database that listen."""
    rows = admin.execute(
        "SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    ).fetchall()
    return [pid for (pid,) in rows]


def notify(store: PostgresStore, admin: psycopg.Connection[Any]) -> None:
    """Notify as another process does."""
    admin.execute("SELECT pg_notify(%s, 'n/')", [store.sql.channel])


def list_threads() -> list[str]:
    """Return the listeners' threads."""
    return [each.name for each in threading.enumerate() if each.name == "jobsync-listener"]


async def test_a_blocked_loop_does_not_keep_another_from_being_woken(
    store: PostgresStore, url: str, admin: psycopg.Connection[Any]
) -> None:
    """Both share a connection. The blocked loop is woken once it runs again."""
    with OtherLoop(store, url) as other:
        assert len(list_listening(admin)) == 1
        waiting = asyncio.create_task(store.wait("n/", 60))
        await asyncio.sleep(0)
        # Nothing is awaited from here on: this loop is blocked.
        notify(store, admin)
        assert other.woken.wait(10)
        assert not waiting.done()
        async with asyncio.timeout(10):
            await waiting


async def test_all_loops_look_again_when_the_connection_was_lost(
    store: PostgresStore, url: str, admin: psycopg.Connection[Any]
) -> None:
    """It is opened again, and notifications arrive again, on both loops."""
    with OtherLoop(store, url) as other:
        waiting = asyncio.create_task(store.wait("n/", 60))
        await asyncio.sleep(0)
        lost = list_listening(admin)
        admin.execute("SELECT pg_terminate_backend(%s)", lost)
        async with asyncio.timeout(10):
            await waiting
        assert other.woken.wait(10)
        # The server may list the lost one for a moment.
        assert len(set(list_listening(admin)) - set(lost)) == 1
        other.woken.clear()
        waiting = asyncio.create_task(store.wait("n/", 60))
        await asyncio.sleep(0)
        notify(store, admin)
        async with asyncio.timeout(10):
            await waiting
        assert other.woken.wait(10)


async def test_the_last_store_ends_it(
    store: PostgresStore, url: str, admin: psycopg.Connection[Any]
) -> None:
    """Neither a connection nor a thread is left."""
    with OtherLoop(store, url):
        await store.close()
        # That of another test may be about to end.
        await until(lambda: list_threads() == ["jobsync-listener"], "there is one thread")
        assert len(list_listening(admin)) == 1
    await until(lambda: not list_threads(), "no thread is left")
    await until(lambda: not list_listening(admin), "nothing listens")


async def test_a_loop_that_ends_without_closing_its_store_ends_it(
    url: str, admin: psycopg.Connection[Any]
) -> None:
    """A program that forgets to close leaves no thread behind."""
    stores = []

    async def forget() -> None:
        stores.append(await PostgresStore.connect(read(url)))
        await wait_until_listening(stores[0])
        # That of another test may be about to end.
        await until(lambda: list_threads() == ["jobsync-listener"], "there is one thread")

    await asyncio.to_thread(asyncio.run, forget())
    await until(lambda: not list_threads(), "no thread is left")
    await until(lambda: not list_listening(admin), "nothing listens")
    for _, connection in stores[0]._pool._idle:
        await connection.close()


async def test_an_error_of_the_thread_is_raised(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait get it, and those who write."""

    def fail(_: str) -> bytes:
        raise LookupError("a bug")

    store = await PostgresStore.connect(read(url))
    monkeypatch.setattr(listeners, "_listen_to", fail)
    async with asyncio.timeout(10):
        with pytest.raises(LookupError):
            await store.wait("n/", 60)
    with pytest.raises(LookupError):
        await store.create("n/1", 0)
    await store.close()
    await until(lambda: not list_threads(), "the thread has ended")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_its_own(url: str, admin: psycopg.Connection[Any]) -> None:
    """The child listens by itself, and its parent's listener goes on."""

    async def listen() -> PostgresStore:
        store = await PostgresStore.connect(read(url))
        await wait_until_listening(store)
        return store

    async def listen_and_close() -> None:
        store = await listen()
        assert len(list_threads()) == 1
        await store.close()

    with asyncio.Runner() as runner:
        store = runner.run(listen())
        if not (child := os.fork()):
            try:
                asyncio.run(listen_and_close())
            except BaseException:  # noqa: BLE001 - the child must not go on as pytest
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0

        async def is_woken() -> None:
            waiting = asyncio.create_task(store.wait("n/", 60))
            await asyncio.sleep(0)
            notify(store, admin)
            async with asyncio.timeout(10):
                await waiting
            await store.close()

        runner.run(is_woken())
