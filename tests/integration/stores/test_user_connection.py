"""Transactions of a user's connection to SQLite: nested blocks, and failures of all kinds."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from chance import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobsync.core.clock import SystemClock
from jobsync.stores.sqlite.user_connection import SqliteConnection


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[SqliteConnection]:
    """A connection to a file with two tables."""
    connection = SqliteConnection(tmp_path / "mine.db", SystemClock())
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("CREATE TABLE mine (n INTEGER PRIMARY KEY)")
    connection.execute(
        "CREATE TABLE child (n INTEGER REFERENCES mine (n) DEFERRABLE INITIALLY DEFERRED)"
    )
    yield connection
    connection.close()


def list_rows(connection: SqliteConnection) -> list[int]:
    """Return the numbers in the table."""
    return [n for (n,) in connection.execute("SELECT n FROM mine ORDER BY n").fetchall()]


Block: TypeAlias = "tuple[bool, list[Block]]"
"""Whether it fails at its end, and the blocks within it."""

blocks: st.SearchStrategy[Any] = st.recursive(
    st.tuples(st.booleans(), st.just([])),
    lambda inner: st.tuples(st.booleans(), st.lists(inner, max_size=3)),
    max_leaves=8,
)


class _Failed(Exception):
    """Ends a block."""


def _raise(_: SqliteConnection) -> None:
    raise _Failed


def run_block(connection: SqliteConnection, block: Block, numbers: Iterator[int]) -> list[int]:
    """Run a block that inserts a number before and after each block within it.

    Returns the numbers that stay.
    """
    fails, inner = block
    kept: list[int] = []

    def insert() -> None:
        kept.append(next(numbers))
        connection.execute("INSERT INTO mine VALUES (%s)", [kept[-1]])

    try:
        with connection.transaction():
            insert()
            for each in inner:
                kept += run_block(connection, each, numbers)
                insert()
            if fails:
                _raise(connection)
    except _Failed:
        return []
    return kept


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(story=st.lists(blocks, max_size=3))
def test_a_block_that_fails_leaves_nothing_and_the_others_stay(
    connection: SqliteConnection, story: list[Block]
) -> None:
    """However blocks are nested, and whichever of them fail, one after the other."""
    connection.execute("DELETE FROM mine")
    numbers = iter(range(1000))
    kept = [n for block in story for n in run_block(connection, block, numbers)]
    assert list_rows(connection) == kept
    assert not connection._inner.in_transaction


FAILURES: dict[str, tuple[Callable[[SqliteConnection], object], type[BaseException]]] = {
    "by the user": (_raise, _Failed),
    "in a statement": (lambda c: c.execute("INSERT INTO mine VALUES (0)"), sqlite3.IntegrityError),
    "in a batch": (
        lambda c: c.executemany("INSERT INTO mine VALUES (%s)", [[7], [0]]),
        sqlite3.IntegrityError,
    ),
    "with the transaction": (
        lambda c: c.execute("INSERT OR ROLLBACK INTO mine VALUES (0)"),
        sqlite3.IntegrityError,
    ),
    "at the commit": (lambda c: c.execute("INSERT INTO child VALUES (9)"), sqlite3.IntegrityError),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_transaction_raises_its_own_error_and_leaves_the_connection_usable(
    connection: SqliteConnection, kind: str, depth: int
) -> None:
    """Again and again; nothing of it is stored, and the next one is."""
    connection.execute("INSERT INTO mine VALUES (0)")
    fail, error = FAILURES[kind]

    def run(depth: int) -> None:
        with connection.transaction():
            connection.execute("INSERT INTO mine VALUES (%s)", [-depth])
            (run if depth > 1 else lambda _: fail(connection))(depth - 1)

    for number in range(1, 4):
        with pytest.raises(error):
            run(depth)
        assert not connection._inner.in_transaction
        with connection.transaction():
            connection.execute("INSERT INTO mine VALUES (%s)", [number])
        assert list_rows(connection) == [*range(number + 1)]


def test_many_rows_are_written_together_or_not_at_all(connection: SqliteConnection) -> None:
    """Outside of a block, too; the next ones are written."""
    for rows in ([[1], [2], [1]], [[3], [4]]):
        with suppress(sqlite3.IntegrityError):
            connection.executemany("INSERT INTO mine VALUES (%s)", rows)
        assert not connection._inner.in_transaction
    assert list_rows(connection) == [3, 4]


def test_nobody_else_writes_while_a_block_runs(connection: SqliteConnection) -> None:
    """From its start: what it reads first is still so when it writes."""
    (_, _, path), *_ = connection.execute("PRAGMA database_list").fetchall()
    with closing(sqlite3.connect(path, timeout=0)) as other:
        with (
            connection.transaction(),
            pytest.raises(sqlite3.OperationalError, match="database is locked"),
        ):
            other.execute("INSERT INTO mine VALUES (1)")
        other.execute("INSERT INTO mine VALUES (2)")
        other.commit()
    assert list_rows(connection) == [2]


def test_a_time_since_boot_is_a_time_of_day_only_in_this_boot(tmp_path: Path) -> None:
    """Whatever the wall clock is set to; of another boot nobody knows."""
    clock = FakeClock()
    connection = SqliteConnection(tmp_path / "mine.db", clock)

    def ask(boot: int | None, seconds: float | None) -> float | None:
        query = "SELECT jobsync_instant(%s, %s)"
        answer: float | None = connection.execute(query, [boot, seconds]).fetchone()[0]
        return answer

    for wall in (1_700_000_000.0, 5.0):
        clock.wall_seconds = wall
        assert ask(clock.boot_id, clock.mono_seconds) == wall
        assert ask(clock.boot_id, clock.mono_seconds - 10.5) == wall - 10.5
        assert ask(clock.boot_id, clock.mono_seconds + 10.5) == wall + 10.5
        for boot, seconds in ((clock.boot_id + 1, 5.0), (None, 5.0), (clock.boot_id, None)):
            assert ask(boot, seconds) is None
    connection.close()
