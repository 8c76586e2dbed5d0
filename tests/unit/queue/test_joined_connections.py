"""Which connections of users a push joins: by the file that they are to, however it is named."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobsync import Invalid
from jobsync.queue.sql.joined_connections import (
    SQLITE_FIX,
    check_file,
    run_joined,
    unwrap_connection,
)

NAMES: dict[str, Callable[[Path], Any]] = {
    "absolute": lambda path: path,
    "text": str,
    "relative": lambda path: path.name,
    "by another folder": lambda path: path.parent / "sub" / ".." / path.name,
    "by a link": lambda path: path.parent / "link.db",
}


@pytest.mark.parametrize("own", NAMES)
@pytest.mark.parametrize("queue", NAMES)
def test_a_connection_is_to_the_file_of_a_queue_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, queue: str
) -> None:
    """Whatever its rows look like; nothing is begun on it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jobs.db"
    path.touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.db").symlink_to(path)
    with closing(sqlite3.connect(NAMES[own](path))) as connection:
        connection.execute("ATTACH ? AS other", [str(tmp_path / "other.db")])
        connection.row_factory = lambda *_: {}
        check_file(connection, Path(NAMES[queue](path)))
        assert not connection.in_transaction


@pytest.mark.parametrize(
    ("own", "queue", "shown"),
    [
        ("other.db", "jobs.db", "other.db"),
        (":memory:", "jobs.db", "memory"),
        ("other.db", None, "other.db"),
        (":memory:", None, "memory"),
    ],
)
def test_a_connection_to_another_file_is_refused(
    tmp_path: Path, own: str, queue: str | None, shown: str
) -> None:
    """Also if the queue is in memory, or if its file is attached: the main one counts."""
    place = own if own == ":memory:" else tmp_path / own
    (tmp_path / "jobs.db").touch()
    with closing(sqlite3.connect(place)) as connection:
        connection.execute("ATTACH ? AS attached", [str(tmp_path / "jobs.db")])
        with pytest.raises(Invalid) as refused:
            check_file(connection, None if queue is None else tmp_path / queue)
    assert refused.value.field == "connection"
    assert refused.value.value == "sqlite3.Connection"
    assert str(refused.value.problem).endswith(shown)
    assert refused.value.fix == SQLITE_FIX


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_failed_push_ends_the_transaction_that_it_has_begun(
    tmp_path: Path, error: BaseException, *, is_begun: bool, ends: bool
) -> None:
    """And no other one: what the caller has begun, the caller ends."""
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE effects (id)")
        if is_begun:
            connection.execute("BEGIN")
            connection.execute("INSERT INTO effects VALUES (0)")

        def fail() -> None:
            connection.execute("INSERT INTO effects VALUES (1)")
            if ends:
                connection.execute("ROLLBACK")
            raise error

        with pytest.raises(type(error)) as raised:
            run_joined(connection, fail)
        assert raised.value is error
        assert connection.in_transaction is (is_begun and not ends)
        left = [row[0] for row in connection.execute("SELECT id FROM effects")]
        assert left == ([0, 1] if is_begun and not ends else [])


def test_a_push_outside_of_a_transaction_is_committed_at_once(tmp_path: Path) -> None:
    """With what it returns; others see it then."""
    path = tmp_path / "jobs.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        closing(sqlite3.connect(path)) as other,
    ):
        connection.execute("CREATE TABLE effects (id)")
        found = run_joined(connection, lambda: connection.execute("INSERT INTO effects VALUES (1)"))
        assert isinstance(found, sqlite3.Cursor)
        assert other.execute("SELECT id FROM effects").fetchall() == [(1,)]


DRIVER = SimpleNamespace(name="driver")
PROXY = SimpleNamespace(driver_connection=DRIVER)
CONNECTIONS: dict[str, tuple[Any, Any]] = {
    "the driver's own": (DRIVER, DRIVER),
    "a proxy": (PROXY, DRIVER),
    "of SQLAlchemy": (SimpleNamespace(connection=PROXY), DRIVER),
    "asynchronous": (SimpleNamespace(sync_connection=SimpleNamespace(connection=PROXY)), DRIVER),
    "an asynchronous proxy": (SimpleNamespace(sync_connection=PROXY), DRIVER),
    "a proxy with another connection": (
        SimpleNamespace(driver_connection=DRIVER, connection=SimpleNamespace(driver_connection=1)),
        DRIVER,
    ),
    "asynchronous, not connected": (
        SimpleNamespace(sync_connection=None, connection=PROXY),
        DRIVER,
    ),
}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_a_connection_is_that_of_the_driver_at_any_depth(name: str) -> None:
    """As SQLAlchemy wraps it; another object is left as it is."""
    given, expected = CONNECTIONS[name]
    assert unwrap_connection(given) is expected
    for other in ("text", None, SimpleNamespace(connection=7), SimpleNamespace(connection=DRIVER)):
        assert unwrap_connection(other) is other
