"""The connection of a handler's transaction in an SQLite file: what it refuses, and until when."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from jobsync import Invalid
from jobsync.queue.sql.guarded_connection import GuardedConnection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a table of two rows."""
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as owner, owner:
        owner.execute("CREATE TABLE effects (id UNIQUE)")
        owner.execute("INSERT INTO effects VALUES (1), (2)")
    return path


@pytest.fixture
def own(path: Path) -> Iterator[GuardedConnection]:
    """A connection whose transaction has begun and is guarded."""
    connection = sqlite3.connect(path, isolation_level=None, factory=GuardedConnection)
    connection.execute("BEGIN IMMEDIATE")
    connection.guard()
    yield connection
    connection.close()


def read(path: Path) -> list[int]:
    """Return what others see."""
    with closing(sqlite3.connect(path)) as other:
        return [row[0] for row in other.execute("SELECT id FROM effects ORDER BY id")]


AUTHORIZERS: dict[str, Any] = {
    "none": None,
    "one that allows": lambda *_: sqlite3.SQLITE_OK,
    "one that denies": lambda *_: sqlite3.SQLITE_DENY,
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", AUTHORIZERS)
def test_its_owner_commits_whatever_the_handler_allows(
    own: GuardedConnection, path: Path, name: str, *, after: bool
) -> None:
    """Also if the handler sets its function after the guard has ended; then it decides itself."""
    own.execute("INSERT INTO effects VALUES (3)")
    if not after:
        own.set_authorizer(AUTHORIZERS[name])
    own.end_guard()
    if after and name != "one that denies":
        own.set_authorizer(AUTHORIZERS[name])
    own.commit()
    assert read(path) == [1, 2, 3]
    # The guard is over: what follows is a transaction of its own.
    assert own.execute("SELECT count(*) FROM effects").fetchone() == (3,)


@pytest.mark.parametrize("statement", ["BEGIN", "BEGIN IMMEDIATE", "begin transaction"])
def test_a_second_beginning_fails_as_always(
    own: GuardedConnection, path: Path, statement: str
) -> None:
    """It ends no transaction, so it is no attempt to do so."""
    own.execute("INSERT INTO effects VALUES (3)")
    with pytest.raises(sqlite3.OperationalError, match="within a transaction"):
        own.execute(statement)
    own.end_guard()
    own.execute("COMMIT")
    assert read(path) == [1, 2, 3]


ENDINGS: dict[str, Callable[[GuardedConnection], object]] = {
    "COMMIT": lambda own: own.execute("COMMIT"),
    "by a cursor": lambda own: own.cursor().execute("END"),
    "of many": lambda own: own.executemany("ROLLBACK", [()]),
    "many by a cursor": lambda own: own.cursor().executemany("COMMIT", [()]),
    "by a script": lambda own: own.executescript("ROLLBACK"),
    "by the method": lambda own: own.commit(),
    "by the other method": lambda own: own.rollback(),
    "with connection:": lambda own: own.__enter__(),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_attempt_to_end_it_fails_it_even_if_the_error_is_ignored(
    own: GuardedConnection, path: Path, name: str
) -> None:
    """The owner learns of it, and nothing is committed; other statements still work."""
    own.execute("INSERT INTO effects VALUES (3)")
    with suppress(Invalid, sqlite3.ProgrammingError):
        ENDINGS[name](own)
    assert own.in_transaction
    assert own.execute("SELECT max(id) FROM effects").fetchone() == (3,)
    if "many" not in name:
        with pytest.raises(Invalid, match="must not end"):
            own.end_guard()
    own.close()
    assert read(path) == [1, 2]


USES: dict[str, Callable[[GuardedConnection, sqlite3.Cursor], object]] = {
    "execute": lambda own, _: own.execute("SELECT 1"),
    "executemany": lambda own, _: own.executemany("INSERT INTO effects VALUES (?)", [[8]]),
    "executescript": lambda own, _: own.executescript("INSERT INTO effects VALUES (8)"),
    "commit": lambda own, _: own.commit(),
    "rollback": lambda own, _: own.rollback(),
    "cursor.execute": lambda _, kept: kept.execute("SELECT 1"),
    "cursor.executemany": lambda _, kept: kept.executemany("INSERT INTO effects VALUES (?)", [[8]]),
    "cursor.executescript": lambda _, kept: kept.executescript("INSERT INTO effects VALUES (8)"),
    "cursor.fetchone": lambda _, kept: kept.fetchone(),
    "cursor.fetchmany": lambda _, kept: kept.fetchmany(size=1),
    "cursor.fetchall": lambda _, kept: kept.fetchall(),
    "next(cursor)": lambda _, kept: next(kept),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("end", ["rolled back", "cut"])
def test_nothing_can_be_done_after_its_end(
    own: GuardedConnection, path: Path, name: str, end: str
) -> None:
    """By no method, old cursors included: it would be committed at once."""
    kept = own.execute("SELECT id FROM effects")
    if end == "cut":
        own.cut()
        with pytest.raises(sqlite3.OperationalError, match="after the time of the transaction"):
            USES[name](own, kept)
    else:
        with pytest.raises(sqlite3.IntegrityError):
            own.execute("INSERT OR ROLLBACK INTO effects VALUES (1)")
        with pytest.raises(Invalid, match="a statement has rolled it back"):
            USES[name](own, kept)
    assert read(path) == [1, 2]


def test_rows_are_read_as_with_any_connection(own: GuardedConnection) -> None:
    """One, some, the rest, and by iteration; the methods of the connection return cursors."""
    own.executemany("INSERT INTO effects VALUES (?)", [[number] for number in range(3, 9)])
    cursor = own.execute("SELECT id FROM effects ORDER BY id")
    assert cursor.fetchone() == (1,)
    assert cursor.fetchmany(2) == [(2,), (3,)]
    assert cursor.fetchmany(size=1) == [(4,)]
    assert next(cursor) == (5,)
    assert cursor.fetchall() == [(6,), (7,), (8,)]
    assert cursor.fetchone() is None
    assert [*own.execute("SELECT count(*) FROM effects WHERE id > ?", [4])] == [(4,)]


def test_the_handlers_own_function_decides_about_all_else(own: GuardedConnection) -> None:
    """About statements that were prepared before, too; an error of it is shown as it is."""
    own.execute("DELETE FROM effects WHERE id = 2")
    seen: list[int] = []

    def decide(action: int, *_: object) -> int:
        seen.append(action)
        return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_DELETE else sqlite3.SQLITE_OK

    own.set_authorizer(decide)
    with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
        own.execute("DELETE FROM effects WHERE id = 2")
    own.execute("INSERT INTO effects VALUES (3)")
    with pytest.raises(Invalid, match="must not end"):
        own.execute("COMMIT")
    assert sqlite3.SQLITE_TRANSACTION not in seen
    own.set_authorizer(None)
    own.execute("DELETE FROM effects WHERE id = 2")
    with pytest.raises(Invalid, match="must not end"):
        own.execute("COMMIT")


def test_after_a_cut_nothing_writes_by_any_way_around(own: GuardedConnection, path: Path) -> None:
    """A cursor of another kind does not ask the connection, so the connection is read-only."""
    foreign = own.cursor(sqlite3.Cursor)
    own.cut()
    for cursor in (foreign, sqlite3.Connection.cursor(own)):
        with pytest.raises(sqlite3.Error):
            cursor.execute("INSERT INTO effects VALUES (8)")
    assert read(path) == [1, 2]
