"""The SQLite store: where its file may be, and its failures."""

import asyncio
import datetime as dt
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from waiting import until

from jobsync import (
    Applied,
    Components,
    Corrupt,
    JobsyncError,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Unavailable,
    Unknown,
    open_store,
)
from jobsync.stores.sqlite import file as sqlitefile
from jobsync.stores.sqlite import location
from jobsync.stores.sqlite.file import SQLITE_STEPS, CommitFailed, SqliteFile
from jobsync.stores.sqlite.location import filesystem_of
from jobsync.stores.sqlite.store import SqliteStore
from jobsync.stores.sqlite.user_connection import SqliteConnection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / "jobs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    """A store with a short busy timeout."""
    store = await SqliteStore.connect(path, busy_timeout=0.05)
    yield store
    await store.close()


@contextmanager
def without_root() -> Iterator[None]:
    """Drop root's right to write anywhere, temporarily."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_a_read_only_file_is_refused(shared_folder: Path) -> None:
    """The error states what to make writable, and the file is unchanged."""
    path = shared_folder / "jobs.db"
    await (await SqliteStore.connect(path)).close()
    before = path.read_bytes()
    for name in shared_folder.iterdir():
        name.chmod(0o444)
    shared_folder.chmod(0o555)
    with without_root(), pytest.raises(Misconfigured, match=r"jobs\.db.* folder writable"):
        await SqliteStore.connect(path)
    assert path.read_bytes() == before


async def test_a_read_only_folder_is_refused(shared_folder: Path) -> None:
    """A file that cannot be created is refused with the fix."""
    shared_folder.chmod(0o555)
    with (
        without_root(),
        pytest.raises(Misconfigured, match="Make the file and its folder writable"),
    ):
        await SqliteStore.connect(shared_folder / "jobs.db")
    assert list(shared_folder.iterdir()) == []


async def test_an_inaccessible_folder_is_refused(shared_folder: Path) -> None:
    """A folder that this user may not enter is named as the cause."""
    shared_folder.chmod(0o600)
    with without_root(), pytest.raises(Misconfigured, match="cannot be accessed by this user"):
        await SqliteStore.connect(shared_folder / "in" / "jobs.db")


async def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """Folders are not created."""
    with pytest.raises(
        Misconfigured, match=r"folder that does not exist: .*/nowhere.*\. Create it"
    ):
        await SqliteStore.connect(tmp_path / "nowhere" / "jobs.db")
    with pytest.raises(Misconfigured, match=r"is a folder .*\. Use a file in it"):
        await SqliteStore.connect(tmp_path)


async def test_a_file_that_is_not_a_database_is_refused(path: Path) -> None:
    """A text file is left as it is."""
    path.write_text("Dear diary, " * 500)
    with pytest.raises(Misconfigured, match="is not an SQLite database"):
        await SqliteStore.connect(path)
    assert path.read_text().startswith("Dear diary, Dear diary")


async def test_a_damaged_database_is_reported(path: Path) -> None:
    """A corrupt page is its own error, and nothing is repaired."""
    store = await SqliteStore.connect(path)
    await store.write([Put(f"n/{i}", "x" * 2000) for i in range(50)])
    await store.close()
    data = bytearray(path.read_bytes())
    data[4096 * 3 :] = b"\xee" * (len(data) - 4096 * 3)
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="malformed"):
        await _scan(path)
    assert path.read_bytes() == bytes(data)


async def _scan(path: Path) -> None:
    store = await SqliteStore.connect(path)
    try:
        await store.scan("n/")
    finally:
        await store.close()


@pytest.mark.parametrize(
    "way", ["share/jobs.db", "link/jobs.db", "link.db", "away/../share/jobs.db"]
)
async def test_a_network_filesystem_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """NFS is recognised by its filesystem type, before a file is created there, also by links."""
    share = tmp_path / "share"
    share.mkdir()
    (tmp_path / "away").mkdir()
    (tmp_path / "link").symlink_to(share)
    (tmp_path / "link.db").symlink_to(share / "a.db")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        f"36 22 0:30 / {share} rw shared:1 - nfs4 server:/export rw\n"
    )
    monkeypatch.setattr(location, "_MOUNTS", mounts)
    with pytest.raises(Misconfigured, match=r"network filesystem \(nfs4\).*local disk"):
        await SqliteStore.connect(tmp_path / way)
    assert not any(share.iterdir())


def test_the_innermost_mount_counts() -> None:
    """The filesystem of a path is that of the closest mount above it; later mounts hide."""
    mounts = (
        "1 0 8:1 / / rw - ext4 a rw\n"
        "2 1 0:1 / /data rw - nfs4 b rw\n"
        "3 2 8:2 / /data/my\\040disk rw - xfs c rw\n"
        "4 1 8:2 / /srv rw - cifs c rw\n"
        "5 1 8:2 / /srv rw - ext4 c rw\n"
        "nonsense\n"
    )
    answers = {
        "/home/x": "ext4",
        "/data/x": "nfs4",
        "/database/x": "ext4",
        "/data/my disk/x": "xfs",
        "/srv/x": "ext4",
    }
    assert {path: filesystem_of(Path(path), mounts) for path in answers} == answers
    assert filesystem_of(Path("/x"), "") == ""


async def test_a_full_disk_writes_nothing(store: SqliteStore) -> None:
    """The whole batch is rolled back; the store works again once there is space."""
    await store.create("n/1", "x")
    await _limit_pages(store._main, 1)
    with pytest.raises(Unavailable, match=r"the disk is full; nothing was written\. Free some"):
        await store.write([Put("n/2", "x"), Put("n/3", "x" * 1_000_000)])
    with pytest.raises(Unavailable, match="the disk is full"):
        await store.append("history", ["x" * 1_000_000])
    assert [head.key for head in await store.heads("n/")] == ["n/1"]
    await _limit_pages(store._main, 1_000_000)
    await store.create("n/2", "x")


async def _limit_pages(file: SqliteFile, pages: int) -> None:
    def limit() -> None:
        file._connections["write"].execute(f"PRAGMA max_page_count={pages}")

    await file._submit("write", limit)


async def test_a_lock_held_too_long_is_unavailable(store: SqliteStore, path: Path) -> None:
    """The error states what to look for, never "database is locked"."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable) as caught:
            await store.create("n", 1)
        assert "locked" not in str(caught.value)
        assert "Find the transaction that stays open" in str(caught.value)
        other.execute("COMMIT")
    await store.create("n", 1)


async def test_a_users_transaction_does_not_starve_sessions(store: SqliteStore, path: Path) -> None:
    """While the main file is locked, sessions and roles can be written."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        beat = await store.create("session/w1", 0)
        await store.put(beat, 1)
        await store.create("role/ns/work", 0)
        other.execute("COMMIT")
    assert [head.key for head in await store.heads("session/")] == ["session/w1"]
    kinds = await store.get_many(["session/w1", "role/ns/work"])
    assert [record and record.value for record in kinds] == [1, 0]


async def test_a_failing_commit_is_unknown(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk fails at COMMIT, the outcome is unknown."""

    def fail(*_: object) -> None:
        raise CommitFailed("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteFile, "_commit", fail)
        assert await store.write([Put("a", 1), Put("b", 1)]) == [Unknown("disk I/O error")] * 2
        with pytest.raises(OutcomeUnknown, match="disk I/O error"):
            await store.create("a", 1)
        with pytest.raises(OutcomeUnknown):
            await store.append("history", [1])
        with pytest.raises(OutcomeUnknown):
            await store.bury("n/")
    await store.create("a", 1)


ACCESSES: dict[str, Callable[[SqliteStore], Awaitable[object]]] = {
    "a write": lambda store: store.create("n/1", 1),
    "a batch": lambda store: store.write([Put("n/1", 1), Put("n/2", 1)]),
    "an entry": lambda store: store.append("h", [1]),
    "a removal": lambda store: store.drop(["n/1"]),
    "a query": lambda store: store.get("n/1"),
    "a table beside": lambda store: store.sql.write(lambda _: None, "n"),
}


@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
async def test_a_file_removed_underneath_is_noticed(
    store: SqliteStore, path: Path, access: Callable[[SqliteStore], Awaitable[object]]
) -> None:
    """Nothing is written into a file that no longer has a name."""
    path.rename(path.with_suffix(".moved"))
    with pytest.raises(Unavailable, match="removed or replaced"):
        await access(store)
    path.touch()
    with pytest.raises(Unavailable, match="removed or replaced"):
        await access(store)
    path.with_suffix(".moved").replace(path)
    assert (await store.heads("n/"), await store.read("h")) == ([], [])
    await access(store)


async def test_a_closed_store_says_so(path: Path) -> None:
    """Calls after `close` are refused with the fix."""
    store = await SqliteStore.connect(path)
    await store.close()
    with pytest.raises(Unavailable, match=r"the store is closed.*\. Connect again"):
        await store.get("n")


ENDS: dict[str, Callable[[Path], object]] = {
    "closed": lambda _: None,
    "refused": lambda path: path.write_text("Dear diary, " * 500),
    "refused beside": lambda path: path.with_name(f"{path.name}-sessions").mkdir(),
}


@pytest.mark.parametrize("prepare", ENDS.values(), ids=ENDS)
async def test_a_store_leaves_neither_threads_nor_open_files(
    path: Path, prepare: Callable[[Path], object]
) -> None:
    """After `close`, and if it could not be opened, or only one of its files."""
    prepare(path)
    before = set(threading.enumerate())
    with suppress(Misconfigured):
        store = await SqliteStore.connect(path)
        await store.create("n", 1)
        await store.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive() or thread.name == "jobsync-watcher"
    links = [os.readlink(each) for each in Path("/dev/fd").iterdir() if each.exists()]  # noqa: PTH115
    assert [link for link in links if str(path) in link] == []


async def test_a_forked_child_is_refused(store: SqliteStore, monkeypatch: Any) -> None:
    """A connection is never used after a fork."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(Misconfigured, match=r"opened before a fork.*\. Connect again"):
            await store.get("n")


@pytest.mark.parametrize("oldest", [7, len(SQLITE_STEPS), len(SQLITE_STEPS) + 1])
async def test_a_newer_schema_is_used_as_it_is(path: Path, oldest: int) -> None:
    """Newer code has only added to the tables, so older code keeps working, if it says so."""
    await (await SqliteStore.connect(path)).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE jobsync_record ADD COLUMN of_the_future TEXT")
        connection.execute("UPDATE jobsync_schema SET version = 99, oldest_code = ?", [oldest])
    if oldest > len(SQLITE_STEPS):
        with pytest.raises(Misconfigured, match="has tables of version 99"):
            await SqliteStore.connect(path)
        return
    store = await SqliteStore.connect(path)
    await store.create("n", 1)
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM jobsync_schema").fetchone() == (99,)


async def test_an_older_schema_is_brought_up_to_date(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the missing steps run, and stored records stay."""
    store = await SqliteStore.connect(path)
    await store.create("n", 1)
    await store.close()
    step = ("ALTER TABLE jobsync_record ADD COLUMN extra TEXT",)
    monkeypatch.setattr(sqlitefile, "SQLITE_STEPS", (*SQLITE_STEPS, step))
    for _ in range(2):
        store = await SqliteStore.connect(path)
        assert await store.get("n") is not None
        await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM jobsync_schema").fetchone() == (
            len(SQLITE_STEPS) + 1,
        )
        assert connection.execute("SELECT extra FROM jobsync_record").fetchone() == (None,)


async def test_users_tables_share_the_file(store: SqliteStore, path: Path) -> None:
    """The file may have the user's own tables."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.execute("INSERT INTO mine VALUES (1)")
    await store.create("n", 1)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT x FROM mine").fetchone() == (1,)


async def test_changed_tables_are_reported(store: SqliteStore, path: Path) -> None:
    """A dropped table is a clear error."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE jobsync_record")
    with pytest.raises(Misconfigured, match=r"no such table: jobsync_record.*\. Check that nobody"):
        await store.get("n")


async def test_commits_are_synced_to_disk(store: SqliteStore) -> None:
    """Both files are in WAL mode with full synchronisation."""

    def ask(file: SqliteFile) -> list[Any]:
        connection = file._connections["write"]
        return [
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        ]

    for file in (store._main, store._sessions):
        assert await file._submit("write", ask, file) == ["wal", 2]


async def test_tombstones_age_by_time_since_boot(path: Path, clock: Any) -> None:
    """A step of the wall clock removes nothing; an hour, or another boot, does."""
    system = Components.system()
    store = await SqliteStore.connect(
        path, Components(clock=clock, randomness=system.randomness, events=system.events)
    )
    await store.delete(await store.create("n/1", 1))
    clock.wall_seconds += 1_000_000
    clock.mono_seconds += 3600
    assert await store.bury("n/") == 0
    clock.mono_seconds += 1
    assert await store.bury("n/") == 1
    await store.delete(await store.create("n/2", 1))
    clock.boot_id += 1
    assert await store.bury("n/") == 1
    await store.delete(await store.create("n/3", 1))
    clock.mono_seconds = 5
    assert await store.bury("n/") == 1
    await store.close()


@pytest.mark.parametrize("boot", [0, 1], ids=["no id of the boot", "an id"])
@pytest.mark.parametrize("later", [0.01, 1.0, 30.0])
async def test_a_tombstone_that_is_written_while_a_burial_waits_stays(
    path: Path, clock: Any, boot: int, later: float
) -> None:
    """It is younger than the time of the call, which is no sign of an earlier boot."""
    system = Components.system()
    clock.boot_id = boot
    store = await SqliteStore.connect(
        path, Components(clock=clock, randomness=system.randomness, events=system.events)
    )
    record = await store.create("n/1", 1)
    clock.mono_seconds += later
    await store.delete(record)
    clock.mono_seconds -= later
    assert await store.bury("n/") == 0
    assert await store.get("n/1", tombstones=True) is not None
    await store.close()


@pytest.mark.parametrize("busy", ["write", "read"])
async def test_a_close_that_is_cancelled_closes_all_the_same(path: Path, busy: str) -> None:
    """Whichever connection it had waited for: no open file is left."""
    store = await SqliteStore.connect(path)
    files = [store._main, store._sessions]
    may_go_on = threading.Event()
    for file in files:
        file._threads[busy].run(may_go_on.wait)
    closing = [asyncio.ensure_future(file.close()) for file in files]
    await asyncio.wait(closing, timeout=0.01)
    for each in closing:
        each.cancel()
    await asyncio.wait(closing)
    may_go_on.set()

    def has_closed() -> bool:
        for link in Path("/proc/self/fd").iterdir():
            # Another thread may have closed it since it was listed.
            with suppress(FileNotFoundError):
                if str(link.readlink()).startswith(str(path)):
                    return False
        return True

    await until(has_closed)


async def test_a_cancelled_write_leaves_the_store_usable(store: SqliteStore) -> None:
    """Whether it happened is unknown to the caller; the next call works either way."""
    writing = asyncio.create_task(store.create("n", 1))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    record = await store.get("n")
    assert record is None or record.value == 1
    await store.create("m", 1)


async def test_the_default_is_a_file_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any URL, the file is in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    store = await open_store()
    await store.create("n", 1)
    await store.close()
    assert {name.name for name in tmp_path.iterdir()} == {"jobsync.db", "jobsync.db-sessions"}


async def test_errors_are_jobsyncs_own(path: Path) -> None:
    """All errors of sqlite3 become errors of jobsync."""
    path.write_bytes(b"\0" * 100)
    with pytest.raises(JobsyncError):
        await SqliteStore.connect(path)


async def test_a_batch_over_both_files_never_claims_that_nothing_was_written(
    store: SqliteStore, path: Path
) -> None:
    """If sessions are written and the main file is locked, the rest is unknown."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        outcomes = await store.write([Put("n", 1), Put("session/a", 1)])
        other.execute("COMMIT")
    assert [type(outcome) for outcome in outcomes] == [Unknown, Applied]
    assert await store.get("session/a") is not None


async def test_a_forked_child_closes_nothing(store: SqliteStore, monkeypatch: Any) -> None:
    """Closing in the child returns at once; the parent's store stays open."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        async with asyncio.timeout(10):
            await store.close()
    await store.create("n", 1)


async def test_queued_calls_finish_before_closing(path: Path) -> None:
    """The connections close only after the earlier calls."""
    store = await SqliteStore.connect(path)
    asked = [asyncio.ensure_future(store.create(f"n/{i}", i)) for i in range(10)]
    await asyncio.sleep(0)
    await store.close()
    assert [record.value for record in await asyncio.gather(*asked)] == list(range(10))


async def test_text_that_is_not_utf8_is_one_corrupt_record(store: SqliteStore, path: Path) -> None:
    """A row with invalid bytes is reported; the other rows are read."""
    await store.create("n/bad", 1)
    await store.create("n/good", {"x": 1})
    await store.append("history", [1, 2])
    with closing(sqlite3.connect(path)) as connection, connection:
        broken = "CAST(x'22ff22' AS TEXT)"
        connection.execute(f"UPDATE jobsync_record SET value = {broken} WHERE key = 'n/bad'")
        connection.execute(f"UPDATE jobsync_entry SET value = {broken} WHERE id LIKE '%-00000'")
    assert [record.key for record in await store.scan("n/")] == ["n/good"]
    assert [record.key for record in await store.scan("n/", where={"x": 1})] == ["n/good"]
    assert [entry.value for entry in await store.read("history")] == [2]
    with pytest.raises(Corrupt):
        await store.get("n/bad")


@pytest.mark.parametrize(
    "change", ["seq = -5", "epoch = -1", "format = 0", "trail = ''", "trail = '            '"]
)
async def test_invalid_columns_are_corrupt(store: SqliteStore, path: Path, change: str) -> None:
    """A record with invalid numbers or nonces is reported and skipped."""
    await store.create("n/bad", 1)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE jobsync_record SET {change}")
    with pytest.raises(Corrupt):
        await store.get("n/bad")
    assert await store.scan("n/") == []


async def test_a_failing_rollback_does_not_hide_an_unknown_commit(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If COMMIT and ROLLBACK both fail, the outcome is still unknown."""

    class Failing:
        in_transaction = True

        def __init__(self, inner: sqlite3.Connection) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def execute(self, statement: str, *rest: Any) -> Any:
            if statement in {"COMMIT", "ROLLBACK"}:
                self._inner.execute("COMMIT" if statement == "COMMIT" else "SELECT 1")
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
            return self._inner.execute(statement, *rest)

    real = store._main._connections["write"]
    monkeypatch.setitem(store._main._connections, "write", Failing(real))
    assert await store.write([Put("n", 1), Put("m", 1)]) == [Unknown("disk I/O error")] * 2
    monkeypatch.undo()
    assert await store.get("n") is not None


async def test_a_disk_failure_in_a_single_statement_leaves_it_unknown(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single statement commits too, so its outcome is unknown."""

    class Failing:
        def __init__(self, inner: sqlite3.Connection) -> None:
            self._inner = inner

        def execute(self, *arguments: Any) -> Any:
            self._inner.execute(*arguments)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    real = store._main._connections["write"]
    monkeypatch.setitem(store._main._connections, "write", Failing(real))
    assert await store.write([Put("n", 1)]) == [Unknown("disk I/O error")]
    monkeypatch.undo()
    assert await store.get("n") is not None


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that SQLite runs on connections opened from now on."""
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    return statements


@pytest.mark.parametrize("uptime", [0.0, 5.0, 100_000.0])
async def test_versions_of_an_earlier_boot_are_older_than_any_timeout(
    path: Path, clock: Any, uptime: float
) -> None:
    """The times since two boots do not compare."""
    system = Components.system()
    components = Components(clock=clock, randomness=system.randomness, events=system.events)
    store = await SqliteStore.connect(path, components)
    clock.mono_seconds = 50_000.0
    records = [await store.create(key, 1) for key in ("session/w1", "n/1")]
    clock.mono_seconds += 7
    assert [await store.age(record) for record in records] == [7.0, 7.0]
    clock.boot_id += 1
    clock.mono_seconds = uptime
    assert [await store.age(record) for record in records] == [math.inf, math.inf]
    await store.close()


async def test_without_an_id_of_the_boot_a_time_to_come_is_of_an_earlier_one(
    path: Path, clock: Any
) -> None:
    """Found: its age was negative, so that no session of before the reboot was ever dead."""
    system = Components.system()
    components = Components(clock=clock, randomness=system.randomness, events=system.events)
    clock.boot_id = 0
    store = await SqliteStore.connect(path, components)
    clock.mono_seconds = 50_000.0
    record = await store.create("session/w1", 1)
    ages = {50_000.0: 0.0, 50_007.0: 7.0, 49_999.0: math.inf, 5.0: math.inf}
    for clock.mono_seconds, age in ages.items():
        assert await store.age(record) == age
    await store.close()


async def test_a_heartbeat_is_one_statement(statements: list[str], store: SqliteStore) -> None:
    """A write of one record is one statement in its own transaction."""
    record = await store.create("session/w1", 0)
    statements.clear()
    record = await store.put(record, 1)
    await store.delete(record)
    assert [line.split()[0] for line in statements] == ["UPDATE", "UPDATE"]


@pytest.mark.parametrize("topic", ["n/", "role/ns/", "session/"])
async def test_waiting_runs_no_query(statements: list[str], store: SqliteStore, topic: str) -> None:
    """Waiting looks only at the file's directory entry."""
    statements.clear()
    await store.wait(topic, 0.2)
    assert statements == []


async def test_a_heartbeat_does_not_wake_a_wait_for_a_role(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a role, by any process, wakes it; a heartbeat does not."""
    monkeypatch.setattr(sqlitefile, "_LAST_RECOUNT", 0.2)
    one, other = [await SqliteStore.connect(path) for _ in range(2)]
    # Long ago, because file times are coarse.
    os.utime(f"{path}-sessions", (1, 1))
    clock = Components.system().clock

    async def wakes(topic: str) -> int:
        """Count how often a wait ends early, until no more changes are seen."""
        for count in range(100):
            begun = clock.mono()
            await one.wait(topic, 0.5)
            if clock.mono() - begun >= 0.5:
                return count
        raise AssertionError("it never ends")

    await wakes("role/ns/")
    beat = await other.create("session/w1", 0)
    assert await wakes("role/ns/") == 0
    assert await wakes("session/") > 0
    await other.create("role/ns/work", 0)
    # Written after the notification.
    await other.put(beat, 1)
    assert await wakes("role/ns/") > 0
    await one.close()
    await other.close()


async def test_a_wait_ends_with_its_store(store: SqliteStore) -> None:
    """A wait raises when its store is closed."""
    waiting = asyncio.create_task(store.wait("n/", 60))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(Unavailable, match="the store is closed"):
        await waiting


async def test_a_commit_that_is_visible_late_wakes_again(store: SqliteStore, path: Path) -> None:
    """SQLite writes its log before a commit is visible: a waiter that was early is woken again."""
    access = store.sql
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE mine (n)")
        waiting = asyncio.create_task(access.wait("n/", 60))
        await asyncio.sleep(0)
        other.execute("INSERT INTO mine VALUES (1)")
        await waiting
    # Nothing was written since; the same change ends another wait.
    async with asyncio.timeout(30):
        await access.wait("n/", 60)


async def test_a_relative_path_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is found where it was when it was opened."""
    monkeypatch.chdir(tmp_path)
    store = await SqliteStore.connect(Path("jobs.db"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await store.create("n", 1)
    await store.close()


async def test_a_name_too_long_for_the_filesystem_is_refused(tmp_path: Path) -> None:
    """The error has the system's reason."""
    with pytest.raises(Misconfigured, match="File name too long"):
        await SqliteStore.connect(tmp_path / ("x" * 300))


_WAITS_FOR_A_LOCK = """
import asyncio, sqlite3, sys
from pathlib import Path
from jobsync.stores.sqlite.store import SqliteStore
from jobsync.stores.sqlite.user_connection import SqliteConnection

async def main():
    store = await SqliteStore.connect(Path(sys.argv[1]))
    other = sqlite3.connect(sys.argv[1], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asyncio.ensure_future(store.create("n", 1))
    await asyncio.sleep(0)
    return other

other = asyncio.run(main())
"""


def test_a_program_that_waits_for_a_lock_exits(path: Path) -> None:
    """A running call stops waiting when the program exits: well before 30 s."""
    run = subprocess.run(
        [sys.executable, "-c", _WAITS_FOR_A_LOCK, str(path)],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")


async def test_a_file_that_cannot_be_written_is_found_at_connect(shared_folder: Path) -> None:
    """Even with a log beside it, with which it could be read."""
    path = shared_folder / "jobs.db"
    store = await SqliteStore.connect(path)
    reader = sqlite3.connect(path)
    reader.execute("SELECT * FROM jobsync_schema").fetchall()
    await store.create("n", 1)
    await store.close()
    for name in shared_folder.iterdir():
        name.chmod(0o444)
    shared_folder.chmod(0o555)
    with without_root(), pytest.raises(Misconfigured, match="writable"):
        await SqliteStore.connect(path)
    reader.close()


async def test_a_listing_of_a_range_reads_only_the_range(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range is searched by the primary key; records after it cost nothing."""
    read = SqliteFile.read
    sent: list[tuple[str, Any]] = []

    def watch(self: SqliteFile, query: str, parameters: Any = ()) -> Any:
        sent.append((query, parameters))
        return read(self, query, parameters)

    async def count_steps() -> int:
        """List the range; return the steps of SQLite's machine."""
        with monkeypatch.context() as patch:
            patch.setattr(SqliteFile, "read", watch)
            found = await store.heads("n/", after="n/0009", until="n/0030")
        assert [head.key for head in found] == [f"n/{i:04d}" for i in range(10, 30)]
        statement, parameters = sent.pop()
        assert not sent
        steps = 0

        def count() -> None:
            nonlocal steps
            steps += 1

        with closing(sqlite3.connect(path)) as file:
            (plan,) = file.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
            assert plan[-1].startswith("SEARCH jobsync_record USING INDEX sqlite_autoindex")
            assert plan[-1].endswith("(key>? AND key<?)")
            file.set_progress_handler(count, 1)
            file.execute(statement, parameters).fetchall()
        return steps

    await store.write([Put(f"n/{i:04d}", 0) for i in range(31)])
    few = await count_steps()
    await store.write([Put(f"n/{i:04d}", 0) for i in range(31, 1000)])
    assert await count_steps() == few > 20


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata", "America/St_Johns"])
def test_a_time_with_a_zone_means_that_moment_in_any_configured_zone(
    tmp_path: Path, zone: str | None
) -> None:
    """Only a time without one is in the zone of the connection, or of the process."""
    path = tmp_path / "times.db"
    configured = None if zone is None else ZoneInfo(zone)
    connection = SqliteConnection(path, Components.system().clock, configured)
    noon = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)
    shown = "2026-07-01 12:00:00.000"
    moments = [noon.astimezone(ZoneInfo(name)) for name in ("UTC", "Asia/Tokyo", "America/Adak")]
    local = noon.astimezone(configured).replace(tzinfo=None)
    for moment in (*moments, local):
        assert connection.execute("SELECT %s", [moment]).fetchone() == (shown,), moment
    connection.close()
