"""`jobsync.sync`: the same names for callers that block, derived from the asynchronous classes."""

import asyncio
import copy
import inspect
import itertools
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import servers
from sync_stub import STUB, build_stub, list_faces
from waiting import until

import jobsync
from jobsync import Context, Document, Invalid, NotFound, Unavailable, sync
from jobsync.coordination.session import SESSIONS
from jobsync.stores.sqlite.store import SqliteStore

LONG = 60.0
INNER: Any = sync
"""With the names that its stub does not have."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of an empty store."""
    return f"sqlite:///{tmp_path / 'app.db'}"


@pytest.fixture(autouse=True)
def leaves_no_thread() -> Iterator[None]:
    """No thread is left behind by any of these tests."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        # That of the watched files is one for the whole process.
        if thread.name != "jobsync-watcher":
            thread.join(LONG)
            assert not thread.is_alive()


@pytest.mark.parametrize("name", list_faces())
def test_a_class_has_the_methods_of_the_one_that_it_is_derived_from(name: str) -> None:
    """With the same parameters, and none of them is awaited."""
    face, kind = getattr(sync, name), getattr(jobsync, name)
    for member in dir(kind):
        if not member.startswith("_"):
            own = inspect.getattr_static(face, member)
            assert isinstance(own, property) or not inspect.iscoroutinefunction(own)
            other = inspect.getattr_static(kind, member)
            if inspect.isfunction(other) and member != "connect":
                assert inspect.signature(own) == inspect.signature(other)
    assert inspect.signature(face) == inspect.signature(kind)


def test_the_types_are_those_of_the_source() -> None:
    """The stub is what `make api` writes."""
    assert STUB.read_text(encoding="utf-8") == build_stub(), "run `make api`"


def test_records_are_read_and_written(url: str) -> None:
    """Verbs, iteration, hooks and storage, as with `await`."""
    with sync.Database(url) as database:
        notes = database.create_resource("notes", {"text": "string|required"})
        seen: list[str] = []
        notes.before("insert", lambda note: seen.append(note["text"]))
        first = notes.insert({"id": "a", "text": "one"})
        notes.insert_many([{"id": "b", "text": "two"}, {"id": "c", "text": "three"}])
        assert notes.update("a", {"text": "1"}, if_version=first["_version"]).text == "1"
        assert [note.id for note in notes] == ["a", "b", "c"]
        for note in notes:
            # An iteration that is not finished leaves nothing behind.
            assert note.id == "a"
            break
        assert database.resources.notes.query({"text": "two"})[0].id == "b"
        assert (notes.get("x"), seen) == (None, ["one", "two", "three"])
        storage = database.open_storage("counters")
        assert storage.increment("n") == 1
        with storage.lock("a", timeout=LONG) as lock:
            assert lock.lasts
        assert list(database.resources) == ["notes"]


def test_messages_are_enqueued_handled_and_claimed(url: str) -> None:
    """A plain handler may use the same objects, from its thread."""
    queue = sync.QueuePlugin(resource="tasks")
    pulled = sync.QueuePlugin(resource="pulled")
    with sync.Database(url, plugins=[queue, pulled]) as database:

        @queue.handler
        def handle(task: Document, context: Context) -> str:
            return str(database.resources.pulled.enqueue({"n": task.n, "id": context.id}))

        name = database.resources.tasks.enqueue({"n": 1})
        following = queue.result(name, timeout=LONG)
        (message,) = database.plugins["queue-pulled"].claim(5, wait=LONG)
        assert (message.id, message.data.n, message.lost) == (following, 1, False)
        assert message.ack({"done": True})
        assert pulled.result(following) == {"done": True}
        found = pulled.get(following)
        assert found is not None
        assert found.state == "completed"
        assert not pulled.cancel(following)
        assert pulled.stats()["enqueued"] == 1


def test_an_object_has_the_public_names_only_of_what_it_is_around() -> None:
    """So tools that look for optional methods of Python find none, and a copy stands for the same.

    A half-made object, as `copy` makes one, says that it has no attributes yet.
    """
    queue = sync.QueuePlugin("mails")
    assert vars(queue.wrapped).keys() & {"_name", "settings"}
    for name in ("_backend", "_name", "__setstate__", "__deepcopy__", "_repr_html_"):
        assert not hasattr(queue, name)
    again = copy.copy(queue)
    assert again == queue
    assert again is not queue
    assert again.wrapped is queue.wrapped
    empty = sync.QueuePlugin.__new__(sync.QueuePlugin)
    for name in ("wrapped", "resource_of_nobody"):
        with pytest.raises(AttributeError, match="wrapped"):
            getattr(empty, name)


@pytest.mark.parametrize("name", ["resources", "plugins"])
def test_a_copy_of_a_view_shows_the_same(name: str) -> None:
    """Found: to copy a view, or to ask a half-made one for anything, recursed without an end."""
    with sync.Database("memory://", plugins=[sync.QueuePlugin("mails")]) as database:
        database.create_resource("notes")
        view: Any = getattr(database, name)
        again = copy.copy(view)
        assert [*again] == [*view]
        assert len(again) > 0
        assert all(again[each] == view[each] for each in view)
        kind: Any = type(view)
        assert not hasattr(kind.__new__(kind), "notes")


def test_methods_of_subclasses_are_called(url: str) -> None:
    """Those that it adds, and those that it overrides; `enqueue_sync` blocks here as everywhere."""

    class Mail(jobsync.QueuePlugin):
        def stats(self) -> dict[str, int]:
            assert asyncio.get_running_loop() is not None
            return {"own": 1}

        async def count_all(self) -> int:
            return await self.count("all")

    with sync.producer(url, plugins=[Mail(resource="mail")]) as database:
        mail = database.plugins.mail
        mail.enqueue_sync({})
        database.resources.mail.enqueue_sync({})
        assert (mail.stats(), mail.count_all()) == ({"own": 1}, 2)


def test_errors_and_timeouts_are_those_of_the_call(url: str) -> None:
    """They are raised in the caller's thread, unchanged."""
    with sync.producer(url, plugins=[sync.QueuePlugin(resource="tasks")]) as database:
        queue = database.plugins.queue
        name = queue.enqueue({})
        with pytest.raises(TimeoutError):
            queue.result(name, timeout=0.01)
        with pytest.raises(NotFound):
            database.drop_resource("nothing")
        with pytest.raises(Invalid, match="delai"):
            queue.enqueue({}, delai=1)
    with pytest.raises(Invalid, match="is not connected"):
        database.list_resources()
    with pytest.raises(Invalid):
        sync.Database("nonsense://").connect()


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres", "s3"])
def test_eight_threads_at_once(locate: servers.Locate, kind: str) -> None:
    """Each gets its own results; nothing is lost or mixed up."""
    with sync.producer(locate(kind), plugins=[sync.QueuePlugin(resource="tasks")]) as database:
        queue = database.plugins.queue

        def use(number: int) -> list[str]:
            names = [database.resources.tasks.enqueue({"n": number}) for _ in range(5)]
            names += queue.enqueue_many([{"n": number}, {"n": number}])
            assert [queue.get(name).value["n"] for name in names] == [number] * 7
            return names

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(use, range(8)))
        assert len({name for names in found for name in names}) == queue.count() == 56


async def test_a_call_on_an_event_loop_is_refused(url: str) -> None:
    """It would block that loop. The fix is in the error."""
    database = sync.producer(url)
    with pytest.raises(Invalid, match=r"would block the event loop.*Await"):
        database.connect()
    await asyncio.to_thread(database.connect)
    for call in (database.list_resources, database.disconnect):
        with pytest.raises(Invalid, match=r"would block the event loop.*Await"):
            call()
    await asyncio.to_thread(database.disconnect)


async def test_threads_of_an_asynchronous_program_block(url: str) -> None:
    """A face may be around a database that lives on the program's own loop."""
    queue = jobsync.QueuePlugin(resource="tasks")
    face = sync.Database(url, plugins=[queue], work=False)
    async with face.wrapped as database:
        assert await asyncio.to_thread(face.connect) == face
        name = await asyncio.to_thread(face.resources.tasks.enqueue, {})
        assert await asyncio.to_thread(database.resources.tasks.enqueue_sync, {}) != name
        assert await queue.count() == 2
        with pytest.raises(Invalid, match="would block"):
            database.resources.tasks.enqueue_sync({})
        await asyncio.to_thread(face.disconnect)
        assert not database.is_connected


@pytest.mark.parametrize("is_over", [False, True])
def test_a_handler_that_disconnects_the_database_is_completed_before(
    url: str, monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    """Its call returns at once, and takes effect after it; the database can be used again.

    Whether it is connected again before that has taken effect, or later. No thread is left.
    """
    queue, has_returned = sync.QueuePlugin("tasks"), threading.Event()
    db = sync.Database(url, plugins=[queue])

    @queue.task(name="stop")
    def stop() -> None:
        db.disconnect()
        has_returned.set()

    disconnect = db.wrapped.disconnect

    async def disconnect_slowly(*, within: float | None) -> None:
        await disconnect(within=within)
        # What it does later has begun.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    close = SqliteStore.close

    async def close_slowly(store: SqliteStore) -> None:
        # Found: it was cut off by the next connect, so that a thread of the store was left.
        await asyncio.sleep(0.1)
        await close(store)

    monkeypatch.setattr(SqliteStore, "close", close_slowly)
    monkeypatch.setattr(db.wrapped, "disconnect", disconnect_slowly)
    db.connect()
    message = stop.enqueue()
    assert has_returned.wait(LONG)
    if is_over:
        asyncio.run(until(lambda: not db.wrapped.home_loop.is_elsewhere, "it is disconnected"))
    db.connect()
    info = message.get()
    assert info is not None
    assert info.state == "completed"
    db.disconnect()


@pytest.mark.parametrize("failing", [0, 1])
def test_at_the_exit_all_databases_are_disconnected_although_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever fails: the other leaves no session behind."""
    databases = [sync.Database(f"sqlite:///{tmp_path / name}").connect() for name in "ab"]

    async def fail(**_: object) -> None:
        raise OSError("its disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(databases[failing].wrapped, "disconnect", fail)
        sync._disconnect_all()  # type: ignore[attr-defined]
    assert [each.wrapped.is_connected for each in databases] == [failing == 0, failing == 1]
    databases[failing].connect().disconnect()


def test_a_call_fails_if_the_database_is_disconnected_meanwhile(url: str) -> None:
    """It does not wait forever."""
    with ThreadPoolExecutor(1) as threads:
        with sync.producer(url, plugins=[sync.QueuePlugin(resource="tasks")]) as database:
            queue = database.plugins.queue
            name = queue.enqueue({})
            waiting = threads.submit(queue.result, name)
        with pytest.raises((Unavailable, Invalid)):
            waiting.result(LONG)


def test_a_transaction_of_the_caller_is_joined(tmp_path: Path, url: str) -> None:
    """On the caller's own thread, which sqlite3 demands."""
    with sync.producer(url, plugins=[sync.QueuePlugin(resource="tasks")]) as database:
        tasks = database.resources.tasks
        connection = sqlite3.connect(tmp_path / "app.db")
        tasks.enqueue({}, connection=connection)
        tasks.wrapped.enqueue_sync({}, connection=connection)
        assert database.plugins.queue.count() == 0
        connection.commit()
        connection.close()
        assert database.plugins.queue.count() == 2


SCRIPT = """
import os, signal, sys, threading
from jobsync import sync

works = sys.argv[2] == "exit"
db = sync.Database(sys.argv[1], plugins=[sync.QueuePlugin(resource="tasks")], work=works).connect()
name = db.resources.tasks.enqueue({})
def interrupt():
    while not db.wrapped.home_loop._calls._running:
        pass
    os.kill(os.getpid(), signal.SIGINT)
if sys.argv[2] == "interrupt":
    try:
        threading.Thread(target=interrupt).start()
        db.plugins.queue.result(name)
    except KeyboardInterrupt:
        print(db.plugins.queue.count())
        # The call ends soon: it was cancelled.
        while db.wrapped.home_loop._calls._running:
            pass
        db.disconnect()
elif sys.argv[2] == "fork":
    # Another thread connects or disconnects at that moment.
    for lock in (sync._threads[db.wrapped]._lock, db.wrapped.home_loop._lock):
        holder = threading.Thread(target=lock.acquire)
        holder.start()
        holder.join()
    child = os.fork()
    if child:
        lock.release()
    if child == 0:
        try:
            db.resources.tasks.enqueue({})
        except Exception as error:
            print(error, flush=True)
        db.connect().resources.tasks.enqueue({})
        os._exit(0)
    os.waitpid(child, 0)
    print(db.plugins.queue.count(), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [("interrupt", "1"), ("exit", ""), ("fork", "Connect again in the child.\n2")],
)
def test_a_script(tmp_path: Path, url: str, what: str, expected: str) -> None:
    """It ends, whatever happens to it.

    Ctrl-C ends a wait, and cancels its call. One that forgets to disconnect ends, and its session
    with it. The child of a fork is told to connect again, and can.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), url, what],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith(expected)
    with sync.producer(url) as database:
        assert database.wrapped.home_loop.call(list_live_sessions(database.wrapped)) == []


async def list_live_sessions(database: jobsync.Database) -> list[str]:
    """Return the keys of the sessions that have not ended."""
    sessions = await database.store.scan(SESSIONS)
    return [session.key for session in sessions if session.value["state"] == "live"]


class Home:
    """The loop of a database."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.call = self.runner.run


@pytest.fixture
def home() -> Iterator[Any]:
    """A loop on this thread."""
    opened = Home()
    yield opened
    opened.runner.close()


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("of the body")])
def test_a_block_ends_as_the_asynchronous_one_does(
    home: Any, error: Exception | None, swallows: bool
) -> None:
    """It sees the error of its body, and decides whether that goes on."""
    seen: list[Exception | None] = []

    @asynccontextmanager
    async def block() -> AsyncIterator[str]:
        try:
            yield "entered"
        except ValueError as raised:
            seen.append(raised)
            if not swallows:
                raise
        else:
            seen.append(None)

    goes_on = error is not None and not swallows
    expected = pytest.raises(ValueError, match="of the body") if goes_on else nullcontext()
    with expected, INNER._Block(block(), home) as entered:
        assert entered == "entered"
        if error is not None:
            raise error
    assert seen == [error]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_an_iteration_that_is_left_is_closed_at_once(home: Any, count: int) -> None:
    """Before the first item, in the middle, or at the end."""
    steps: list[str] = []

    class Records:
        home_loop = home

        async def __aiter__(self) -> AsyncIterator[str]:
            steps.append("opened")
            try:
                for item in ("a", "b"):
                    yield item
            finally:
                steps.append("closed")

    items = INNER._iterate(cast("Any", SimpleNamespace(wrapped=Records())))
    found = list(itertools.islice(items, count))
    items.close()
    assert found == ["a", "b"][:count]
    assert steps == (["opened", "closed"] if count else [])


class StubDatabase:
    """A database that may fail to connect and to disconnect."""

    store_name = "stub"

    def __init__(self, *, fails: bool, is_elsewhere: bool = False) -> None:
        self.home_loop = SimpleNamespace(is_elsewhere=is_elsewhere)
        self.fails = fails
        self.withins: list[float | None] = []

    error: BaseException = ValueError("connecting failed")

    async def connect(self) -> None:
        if self.fails:
            raise self.error

    async def disconnect(self, *, within: float | None = None) -> None:
        self.withins.append(within)
        if self.fails:
            raise ValueError("disconnecting failed")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_disconnect_ends_the_thread_unless_the_database_lives_on(
    fails: bool, is_elsewhere: bool
) -> None:
    """Also if it fails; a handler of a queue disconnects after itself."""
    thread, database = INNER._DatabaseThread(), StubDatabase(fails=False)
    thread.connect(cast("Any", database))
    background = thread._background
    assert background is not None
    database.fails, database.home_loop.is_elsewhere = fails, is_elsewhere
    with pytest.raises(ValueError, match="disconnecting failed") if fails else nullcontext():
        thread.disconnect(cast("Any", database), database.disconnect)
    assert background.is_alive is is_elsewhere
    assert (thread._background is None) is not is_elsewhere
    background.stop()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_connect_that_fails_leaves_no_thread(kind: type[BaseException]) -> None:
    """Nor one that is interrupted. It can be repeated."""
    thread, database = INNER._DatabaseThread(), StubDatabase(fails=True)
    database.error = kind("connecting failed")
    before = set(threading.enumerate())
    for _ in range(2):
        with pytest.raises(kind, match="connecting failed"):
            thread.connect(cast("Any", database))
        assert thread._background is None
        assert set(threading.enumerate()) <= before


def test_a_disconnect_takes_the_time_that_it_is_given() -> None:
    """Each one; without a time, that of the plugins."""
    database = StubDatabase(fails=False)
    face = INNER._Lifecycle.__new__(INNER._Lifecycle)
    INNER._set_wrapped(face, database)
    for within in (3.5, None, 0):
        assert face.connect() is face
        face.disconnect(within=within)
    face.connect()
    face.disconnect()
    face.disconnect(within=1)
    assert database.withins == [3.5, None, 0, None]


@pytest.mark.parametrize("kind", [list, tuple])
def test_an_object_has_one_identity_whoever_asks_for_it(kind: Any) -> None:
    """Two ways to it are equal, and one key; what is passed on is the object itself."""
    queue, other = sync.QueuePlugin(resource="tasks"), sync.QueuePlugin(resource="others")
    database: Any = sync.Database("memory://", plugins=kind([queue, other]), work=False)
    inner: jobsync.Database = database.wrapped
    wrapped = [cast("Any", each).wrapped for each in (queue, other)]
    assert [inner.plugins[name] for name in inner.plugins] == wrapped
    found = [database.plugins[name] for name in database.plugins]
    assert found == [queue, other] == [database.plugins.queue, database.plugins["queue-others"]]
    assert {queue, other, *found} == {queue, other}
    assert len({*map(hash, [queue, other, *found])}) == 2
    assert queue not in (other, *wrapped)
    database.idle_plugins = kind([other])
    assert [*inner.idle_plugins] == wrapped[1:]


def test_at_the_exit_each_database_has_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the others."""
    databases = [StubDatabase(fails=fails) for fails in (True, False, True)]
    threads = [INNER._DatabaseThread() for _ in databases]
    for database, thread in zip(databases, threads, strict=True):
        fails, database.fails = database.fails, False
        thread.connect(cast("Any", database))
        database.fails = fails
    monkeypatch.setattr(sync, "_threads", dict(zip(databases, threads, strict=True)))
    INNER._disconnect_all()
    assert [database.withins for database in databases] == [[INNER._EXIT_TIME]] * 3
    assert [thread._background for thread in threads] == [None] * 3


@pytest.mark.parametrize("kind", ["Plugin", "CoordinatorPlugin"])
def test_a_plugin_that_inherits_one_for_blocking_callers_is_refused(kind: str) -> None:
    """Nobody would call its hooks; the error names the class to inherit instead."""
    with pytest.raises(Invalid, match=rf"(?s)jobsync\.sync\.{kind} .*[Ii]nherit jobsync\.{kind},"):
        type("Report", (getattr(sync, kind),), {})
