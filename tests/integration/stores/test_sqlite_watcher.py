"""Changes of files that the operating system reports."""

import asyncio
import gc
import multiprocessing
import os
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from chance import FakeClock
from waiting import until

from jobsync.stores.memory import LocalNotifier
from jobsync.stores.sqlite import file as sqlitefile
from jobsync.stores.sqlite import watcher as watcher_module
from jobsync.stores.sqlite.store import SqliteStore
from jobsync.stores.sqlite.watcher import FileWatcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")

WRITES = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("CREATE TABLE mine (n)")
print("ready", flush=True)
sys.stdin.readline()
connection.execute("INSERT INTO mine VALUES (1)")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file."""
    path = tmp_path / "file"
    path.write_bytes(b"1")
    return path


def is_watched(path: Path) -> bool:
    """Whether this process watches a file."""
    inode = f"ino:{path.stat().st_ino:x} "
    for info in Path("/proc/self/fdinfo").iterdir():
        # That of the listing itself is gone.
        with suppress(FileNotFoundError):
            if inode in info.read_text():
                return True
    return False


@pytest.mark.parametrize("kind", ["written", "touched"])
async def test_a_change_wakes_all_waiters(path: Path, kind: str) -> None:
    """For whatever topic."""
    notifier = LocalNotifier()
    assert FileWatcher.current().watch(str(path), notifier)
    waiting = [asyncio.create_task(notifier.wait(topic, 60)) for topic in ("a", "b")]
    await asyncio.sleep(0)
    if kind == "written":
        path.write_bytes(b"12")
    else:
        os.utime(path)
    assert await asyncio.gather(*waiting) == [True, True]


async def test_a_commit_of_another_process_ends_a_wait_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks at the file meanwhile."""
    monkeypatch.setattr(sqlitefile, "_WATCHED_INTERVAL", 3600.0)
    monkeypatch.setattr(sqlitefile, "_LAST_RECOUNT", 0.0)
    store = await SqliteStore.connect(tmp_path / "jobs.db")
    other = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WRITES,
        str(tmp_path / "jobs.db"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert other.stdout is not None
    assert await other.stdout.readline() == b"ready\n"
    waiting = asyncio.create_task(store.sql.wait("n/", 3600))
    await asyncio.sleep(0)
    await other.communicate(b"go\n")
    async with asyncio.timeout(60):
        await waiting
    await store.close()


async def test_a_change_between_a_look_and_a_wait_is_not_missed() -> None:
    """A waiter asks once more when it can be woken."""
    assert await LocalNotifier().wait("n/", 3600, lambda: True)


@pytest.mark.parametrize("topic", ["n/", "session/", "role/", "request/"])
async def test_a_wait_ends_with_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """It does not wait for the next look, whatever it waits for."""
    monkeypatch.setattr(sqlitefile, "_WATCHED_INTERVAL", 3600.0)
    store = await SqliteStore.connect(tmp_path / "jobs.db")
    waiting = asyncio.create_task(store.wait(topic, 3600))
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(60):
        await asyncio.wait([waiting])
    assert waiting.exception() is not None


class BusyFile:
    """A system that always has a change to report, for a while."""

    def __init__(self) -> None:
        self.changes = 20

    def add(self, _path: str) -> int:
        """Return the number of the only watch."""
        return 1

    def remove(self, _number: int) -> None:
        """Do nothing."""

    def has_changes(self, *, within: float) -> bool:  # noqa: ARG002 - as the real one
        """Return that there is one."""
        return True

    def read(self) -> set[int]:
        """Return a change; end the watching thread after the last."""
        if not self.changes:
            raise SystemExit
        self.changes -= 1
        return {1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_busy_file_is_reported_now_and_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first change at once, later ones together: at most 20 times a second."""

    class CountingNotifier(LocalNotifier):
        calls = 0

        def wake_all(self) -> None:
            self.calls += 1

    notifier = CountingNotifier()
    monkeypatch.setattr(watcher_module, "_Inotify", BusyFile)
    before = set(threading.enumerate())
    start = time.monotonic()
    assert FileWatcher().watch(str(path), notifier)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    seconds = time.monotonic() - start
    assert notifier.calls == 10
    assert notifier.calls <= 6 + 20 * seconds


class TwoFiles(BusyFile):
    """A system that reports one change, and another one a moment later."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 2
        self.watched: list[str] = []

    def add(self, path: str) -> int:
        """Return the number of the watch."""
        self.watched.append(path)
        return len(self.watched)

    def read(self) -> set[int]:
        """Return a change of each file."""
        (number,) = super().read()
        return {number + self.changes}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_changes_that_are_reported_together_wake_the_waiters_of_each(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a file before the short rest, and that of another one after it."""
    woken = list[str]()

    class NamedNotifier(LocalNotifier):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def wake_all(self) -> None:
            woken.append(self._name)

    system, notifiers = TwoFiles(), [NamedNotifier(name) for name in "ab"]
    are_watched = threading.Event()
    has_changes = system.has_changes

    def wait_for_both(*, within: float) -> bool:
        return are_watched.wait() and has_changes(within=within)

    monkeypatch.setattr(system, "has_changes", wait_for_both)
    monkeypatch.setattr(watcher_module, "_Inotify", lambda: system)
    before, watcher = set(threading.enumerate()), FileWatcher()
    for notifier in notifiers:
        assert watcher.watch(str(path), notifier)
    are_watched.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert sorted(woken) == ["a", "b"]


async def test_what_cannot_be_watched_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system has no more watches, or the file does not exist."""
    assert not FileWatcher.current().watch(str(tmp_path / "absent"), LocalNotifier())
    monkeypatch.setattr(FileWatcher, "watch", lambda *_: False)
    store = await SqliteStore.connect(tmp_path / "jobs.db")
    waiting = asyncio.create_task(store.sql.wait("n/", 3600))
    await asyncio.sleep(0)
    await store.create("n/1", 1)
    async with asyncio.timeout(60):
        await waiting
    await store.close()


def test_a_system_without_the_service_watches_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not an error."""

    def raise_error() -> None:
        raise AttributeError("inotify_init1")

    monkeypatch.setattr(watcher_module, "_Inotify", raise_error)
    assert not FileWatcher().watch(str(path), LocalNotifier())


def test_a_watch_ends_with_its_notifier(path: Path) -> None:
    """Programs that open file after file do not run out of watches."""
    notifier = LocalNotifier()
    for _ in range(3):
        assert FileWatcher.current().watch(str(path), notifier)
    assert is_watched(path)
    del notifier
    gc.collect()
    assert not is_watched(path)


async def test_a_watch_ends_with_its_notifier_after_a_change(path: Path) -> None:
    """Whoever has reported the change does not keep the one that was told."""
    notifier = LocalNotifier()
    # One of its own: it must not hear of files of other tests.
    assert FileWatcher().watch(str(path), notifier)
    waiting = asyncio.create_task(notifier.wait("a", 60))
    await asyncio.sleep(0)
    path.write_bytes(b"12")
    assert await waiting
    del notifier, waiting
    gc.collect()
    await until(lambda: not is_watched(path), "it is not watched any more", 30)


def test_a_forked_child_has_a_watcher_of_its_own(path: Path) -> None:
    """That of its parent has no thread there."""
    assert FileWatcher.current().watch(str(path), LocalNotifier())
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def check() -> None:
        notifier = LocalNotifier()

        async def wait() -> bool:
            assert FileWatcher.current().watch(str(path), notifier)
            waiting = asyncio.create_task(notifier.wait("n/", 60))
            await asyncio.sleep(0)
            os.utime(path)
            return await waiting

        sender.send(asyncio.run(wait()))

    child = context.Process(target=check)
    child.start()
    with closing(receiver):
        assert receiver.poll(60)
        assert receiver.recv() is True
    child.join(60)
    assert child.exitcode == 0


async def test_waking_a_topic_is_seen_by_other_processes(tmp_path: Path) -> None:
    """Who waits there looks at the file, which nobody has written; again and again."""
    store = await SqliteStore.connect(tmp_path / "jobs.db")
    await store.create("n/a", 1)
    elsewhere = sqlitefile.FileChanges(f"{tmp_path / 'jobs.db'}-wal", FakeClock())

    def is_seen() -> bool:
        store.sql.wake("n/")
        return elsewhere._stat() != elsewhere._last_stat

    for number in range(1, 4):
        # Until the kernel's clock ticks: file times are as coarse.
        await until(is_seen, "a change")
        assert elsewhere.count() == number
    await store.close()
