"""The SQLite store alone: where its file may be, and what happens when that goes wrong."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

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
from jobsync.stores.sqlite.file import SQLITE_STEPS, CommitFailed, SqliteFile, filesystem_of
from jobsync.stores.sqlite.store import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file will be."""
    return tmp_path / "jobs.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    """A store that loses patience soon."""
    store = await SqliteStore.connect(path, busy_timeout=0.05)
    yield store
    await store.close()


@contextmanager
def nobody() -> Iterator[None]:
    """Give up root's power to write anywhere, for a while."""
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
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_a_read_only_file_is_refused(shared_folder: Path) -> None:
    """The error says what to make writable, and the file is as it was."""
    path = shared_folder / "jobs.db"
    await (await SqliteStore.connect(path)).close()
    before = path.read_bytes()
    for name in shared_folder.iterdir():
        name.chmod(0o444)
    shared_folder.chmod(0o555)
    with nobody(), pytest.raises(Misconfigured, match=r"jobs\.db.* folder writable"):
        await SqliteStore.connect(path)
    assert path.read_bytes() == before


async def test_a_read_only_folder_is_refused(shared_folder: Path) -> None:
    """A file that cannot be made is refused with the fix."""
    shared_folder.chmod(0o555)
    with nobody(), pytest.raises(Misconfigured, match="Make the file and its folder writable"):
        await SqliteStore.connect(shared_folder / "jobs.db")
    assert list(shared_folder.iterdir()) == []


async def test_a_folder_out_of_reach_is_refused(shared_folder: Path) -> None:
    """A folder that this user may not enter is named as the cause."""
    shared_folder.chmod(0o600)
    with nobody(), pytest.raises(Misconfigured, match="out of reach for this user"):
        await SqliteStore.connect(shared_folder / "in" / "jobs.db")


async def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """Folders are not made behind the user's back."""
    with pytest.raises(Misconfigured, match=r"there is no folder .*/nowhere.*\. Create it"):
        await SqliteStore.connect(tmp_path / "nowhere" / "jobs.db")
    with pytest.raises(Misconfigured, match="is a folder; name a file in it"):
        await SqliteStore.connect(tmp_path)


async def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    """Somebody's text file is left as it is."""
    path.write_text("Dear diary, " * 500)
    with pytest.raises(Misconfigured, match="is not an SQLite database"):
        await SqliteStore.connect(path)
    assert path.read_text().startswith("Dear diary, Dear diary")


async def test_a_damaged_database_is_reported(path: Path) -> None:
    """A page that makes no sense is an error of its own, and nothing is repaired."""
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


async def test_a_network_filesystem_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS is found by its filesystem type, before a file is made there."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        f"36 22 0:30 / {tmp_path} rw shared:1 - nfs4 server:/export rw\n"
    )
    monkeypatch.setattr(sqlitefile, "_MOUNTS", mounts)
    with pytest.raises(Misconfigured, match=r"network filesystem \(nfs4\).*local disk"):
        await SqliteStore.connect(path)
    assert not path.exists()


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
    """The batch is rolled back whole; the store works again once there is room."""
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
    """The caller is told what to look for, never that a database is locked."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable) as caught:
            await store.create("n", 1)
        assert "locked" not in str(caught.value)
        assert "Find the transaction that stays open" in str(caught.value)
        other.execute("COMMIT")
    await store.create("n", 1)


async def test_a_users_transaction_does_not_starve_sessions(store: SqliteStore, path: Path) -> None:
    """With the main file's lock held, sessions and roles are written all the same."""
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
    """When the disk fails at COMMIT nobody claims to know the outcome."""

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


async def test_a_file_removed_underneath_is_noticed(store: SqliteStore, path: Path) -> None:
    """Nothing is written into a file that no longer has a name."""
    path.rename(path.with_suffix(".moved"))
    with pytest.raises(Unavailable, match="removed or replaced"):
        await store.create("n", 1)
    path.touch()
    with pytest.raises(Unavailable, match="removed or replaced"):
        await store.get("n")
    path.with_suffix(".moved").replace(path)
    await store.create("n", 1)


async def test_a_closed_store_says_so(path: Path) -> None:
    """Calls after close are refused with the fix."""
    store = await SqliteStore.connect(path)
    await store.close()
    with pytest.raises(Unavailable, match=r"the store is closed.*\. Connect again"):
        await store.get("n")


async def test_a_forked_child_is_refused(store: SqliteStore, monkeypatch: Any) -> None:
    """A connection is never carried over a fork."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(Misconfigured, match=r"opened before a fork.*\. Connect again"):
            await store.get("n")


async def test_a_newer_schema_is_used_as_it_is(path: Path) -> None:
    """Newer code has only added to the tables, so older code goes on working."""
    await (await SqliteStore.connect(path)).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE jobsync_record ADD COLUMN of_the_future TEXT")
        connection.execute("UPDATE jobsync_schema SET version = 99")
    store = await SqliteStore.connect(path)
    await store.create("n", 1)
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM jobsync_schema").fetchone() == (99,)


async def test_an_older_schema_is_brought_up_to_date(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the missing steps run, and what was stored stays."""
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
    """The file may hold the user's own tables."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.execute("INSERT INTO mine VALUES (1)")
    await store.create("n", 1)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT x FROM mine").fetchone() == (1,)


async def test_tables_that_were_changed_are_reported(store: SqliteStore, path: Path) -> None:
    """A table dropped by somebody else is a clear error."""
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
    """A step of the wall clock buries nothing; an hour, or another boot, does."""
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
    """Without a URL anywhere, a store is opened beside the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    store = await open_store()
    await store.create("n", 1)
    await store.close()
    assert {name.name for name in tmp_path.iterdir()} == {"jobsync.db", "jobsync.db-sessions"}


async def test_errors_are_jobsyncs_own(path: Path) -> None:
    """Whatever sqlite3 raises, the caller catches one family."""
    path.write_bytes(b"\0" * 100)
    with pytest.raises(JobsyncError):
        await SqliteStore.connect(path)


async def test_a_batch_over_both_files_never_claims_that_nothing_was_written(
    store: SqliteStore, path: Path
) -> None:
    """With the sessions written and the main file locked, the rest is unknown."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        outcomes = await store.write([Put("n", 1), Put("session/a", 1)])
        other.execute("COMMIT")
    assert [type(outcome) for outcome in outcomes] == [Unknown, Applied]
    assert await store.get("session/a") is not None


async def test_a_forked_child_closes_nothing(store: SqliteStore, monkeypatch: Any) -> None:
    """Closing in the child returns at once; the parent goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        async with asyncio.timeout(10):
            await store.close()
    await store.create("n", 1)


async def test_calls_that_wait_are_answered_before_closing(path: Path) -> None:
    """Closing lets go only after what was asked before."""
    store = await SqliteStore.connect(path)
    asked = [asyncio.ensure_future(store.create(f"n/{i}", i)) for i in range(10)]
    await asyncio.sleep(0)
    await store.close()
    assert [record.value for record in await asyncio.gather(*asked)] == list(range(10))


async def test_text_that_is_not_utf8_is_one_corrupt_record(store: SqliteStore, path: Path) -> None:
    """A row with broken bytes is reported; its neighbours are read."""
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
async def test_columns_that_make_no_sense_are_corrupt(
    store: SqliteStore, path: Path, change: str
) -> None:
    """A record whose own numbers or nonces are broken is set aside."""
    await store.create("n/bad", 1)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE jobsync_record SET {change}")
    with pytest.raises(Corrupt):
        await store.get("n/bad")
    assert await store.scan("n/") == []


async def test_a_failing_rollback_does_not_hide_an_unknown_commit(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When COMMIT and ROLLBACK both fail, the outcome is still unknown."""

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


async def test_a_disk_that_fails_a_lone_statement_leaves_it_unknown(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that is a transaction by itself commits too: nobody can say whether it did."""

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
    """All that SQLite is told on connections that are made from now on."""
    told: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(told.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    return told


async def test_a_beat_is_one_statement(statements: list[str], store: SqliteStore) -> None:
    """A write of one record is a transaction by itself, without more ado."""
    record = await store.create("session/w1", 0)
    statements.clear()
    record = await store.put(record, 1)
    await store.delete(record)
    assert [line.split()[0] for line in statements] == ["UPDATE", "UPDATE"]


@pytest.mark.parametrize("topic", ["n/", "role/ns/", "session/"])
async def test_waiting_asks_for_nothing(
    statements: list[str], store: SqliteStore, topic: str
) -> None:
    """Whoever waits for a change looks at the file from outside."""
    statements.clear()
    await store.wait(topic, 0.2)
    assert statements == []


async def test_a_beat_wakes_nobody_who_waits_for_a_role(path: Path, clock: Any) -> None:
    """Who leads is news, whichever process wrote it; that a worker lives is not."""
    system = Components.system()
    one, other = [
        await SqliteStore.connect(
            path, Components(clock=clock, randomness=system.randomness, events=system.events)
        )
        for _ in range(2)
    ]
    # Long ago: times of files are coarse.
    os.utime(f"{path}-sessions", (1, 1))

    async def wakes(topic: str) -> int:
        """Count how often a wait ends early until nothing happens any more."""
        for count in range(100):
            begun = clock.mono()
            await one.wait(topic, 60)
            if clock.mono() - begun >= 60:
                return count
        raise AssertionError("it never ends")

    await wakes("role/ns/")
    beat = await other.create("session/w1", 0)
    assert await wakes("role/ns/") == 0
    assert await wakes("session/") > 0
    await other.create("role/ns/work", 0)
    # Written after the bell was rung.
    await other.put(beat, 1)
    assert await wakes("role/ns/") > 0
    await one.close()
    await other.close()


async def test_a_wait_ends_with_its_store(store: SqliteStore) -> None:
    """Who waits when a store is closed is told so."""
    waiting = asyncio.create_task(store.wait("n/", 60))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(Unavailable, match="the store is closed"):
        await waiting


async def test_a_commit_that_is_seen_late_is_looked_for_again(
    store: SqliteStore, path: Path
) -> None:
    """SQLite writes its log before a commit can be seen: whoever looked too early looks again."""
    access = store.sql
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE mine (n)")
        waiting = asyncio.create_task(access.wait("n/", 60))
        await asyncio.sleep(0)
        other.execute("INSERT INTO mine VALUES (1)")
        await waiting
    # Nobody has written since; the same change ends another wait.
    async with asyncio.timeout(30):
        await access.wait("n/", 60)


async def test_a_relative_path_outlives_a_change_of_folder(
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
    """The system's reason is told."""
    with pytest.raises(Misconfigured, match="File name too long"):
        await SqliteStore.connect(tmp_path / ("x" * 300))


_WAITS_FOR_A_LOCK = """
import asyncio, sqlite3, sys
from pathlib import Path
from jobsync.stores.sqlite.store import SqliteStore

async def main():
    store = await SqliteStore.connect(Path(sys.argv[1]))
    other = sqlite3.connect(sys.argv[1], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asyncio.ensure_future(store.create("n", 1))
    await asyncio.sleep(0)
    return other

other = asyncio.run(main())
"""


def test_a_program_that_waits_for_a_lock_ends(path: Path) -> None:
    """A call that has begun gives up its turn when the program ends: well before 30 s."""
    run = subprocess.run(
        [sys.executable, "-c", _WAITS_FOR_A_LOCK, str(path)],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")


async def test_a_file_that_cannot_be_written_is_found_at_connect(shared_folder: Path) -> None:
    """Even with a log left beside it, which would let it be read."""
    path = shared_folder / "jobs.db"
    store = await SqliteStore.connect(path)
    reader = sqlite3.connect(path)
    reader.execute("SELECT * FROM jobsync_schema").fetchall()
    await store.create("n", 1)
    await store.close()
    for name in shared_folder.iterdir():
        name.chmod(0o444)
    shared_folder.chmod(0o555)
    with nobody(), pytest.raises(Misconfigured, match="writable"):
        await SqliteStore.connect(path)
    reader.close()
