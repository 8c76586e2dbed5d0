"""What the SQL shell makes of what is typed, and of what a database answers."""

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from jobsync.cli import sql as module
from jobsync.cli.sql import _DISCARD, _open_shell, _Shell, _split
from jobsync.components import Components
from jobsync.core.urls import parse_url
from jobsync.errors import Invalid, Misconfigured
from jobsync.jobs.events import ViewsMissing
from jobsync.jobs.job_keys import JobKeys


@pytest.fixture
def views() -> Iterator[Any]:
    """A database in memory with a view."""
    with closing(sqlite3.connect(":memory:")) as connection:
        yield SimpleNamespace(connection=connection, views={"sync_b": "", "sync_a": ""})


@pytest.mark.parametrize(
    ("lines", "statements"),
    [
        ([], []),
        (["\n", "  \n"], []),
        (["SELECT 1;\n"], ["SELECT 1;"]),
        (["SELECT\n", "1;\n"], ["SELECT\n1;"]),
        (["SELECT 1; SELECT 2;\n"], ["SELECT 1;", " SELECT 2;"]),
        (["SELECT ';' -- ;\n", ";\n"], ["SELECT ';' -- ;\n;"]),
        (["SELECT 1"], ["SELECT 1"]),
        # What was typed before is discarded, and what comes after it is not.
        (["SELECT 1\n", _DISCARD, "SELECT 2;\n"], ["SELECT 2;"]),
        (["SELECT 1;\n", _DISCARD, "SELECT 2;\n"], ["SELECT 1;", "SELECT 2;"]),
        (["\\d\n", "quit\n"], ["\\d\n", "quit\n"]),
        # Within a statement it is a part of it.
        (["SELECT 1 AS\n", "help\n", ";\n"], ["SELECT 1 AS\nhelp\n;"]),
    ],
)
def test_statements_end_with_a_semicolon(lines: list[str], statements: list[str]) -> None:
    """Outside of quotes and comments; commands end with their line."""
    found = [each.strip() if ";" in each else each for each in _split(lines)]
    assert found == [each.strip() if ";" in each else each for each in statements]


@pytest.mark.parametrize(("count", "note"), [(0, "(0 rows)"), (1, "(1 row)"), (2, "(2 rows)")])
def test_people_see_how_many_rows_there_are(
    views: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
    note: str,
) -> None:
    """After the rows; programs count them."""
    statement = f"SELECT 1 AS n FROM (SELECT 1 UNION SELECT 2) LIMIT {count}"
    _Shell(views, as_json=False).run(statement)
    assert capsys.readouterr().out.splitlines() == ["n", *["1"] * count]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _Shell(views, as_json=False).run(statement)
    assert capsys.readouterr().out.splitlines()[-1] == note


def test_null_is_null_in_json_and_empty_elsewhere(
    views: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that is empty is told apart in JSON."""
    statement = "SELECT NULL AS a, '' AS b, 0 AS c"
    _Shell(views, as_json=True).run(statement)
    assert capsys.readouterr().out == '[{"a":null,"b":"","c":0}]\n'
    _Shell(views, as_json=False).run(statement)
    assert capsys.readouterr().out == "a\tb\tc\n\t\t0\n"


def test_a_shell_goes_on_until_the_user_quits(
    views: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a statement that is rejected, too; a pipe ends with it."""
    lines = ["SELECT no;\n", "\\d\n", "help\n", "SELECT 2 AS z;\n", "exit\n", "SELECT 3 AS y;\n"]
    monkeypatch.setattr(module, "_read_lines", lambda: iter(lines))
    _Shell(views, as_json=False).run_interactively()
    printed = capsys.readouterr()
    help_text = module._HELP.strip()
    assert printed.out.splitlines() == [help_text, "sync_a", "sync_b", help_text, "z", "2"]
    assert printed.err == "statement was rejected: no such column: no\n"
    with pytest.raises(Invalid, match="was rejected: no such column"):
        _Shell(views, as_json=False).run_all(["SELECT no", "SELECT 2 AS z"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("problem", ["none", "install", "use"])
def test_the_connection_is_closed_in_any_case(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Also if the views cannot be created, or a statement is rejected."""
    calls: list[str] = []

    class Views:
        def __init__(self, *_: object) -> None:
            calls.append("open")

        def install(self, _: str) -> None:
            if problem == "install":
                raise KeyError

        def close(self) -> None:
            calls.append("close")

    monkeypatch.setattr("jobsync.jobs.sql_views.SqlViews", Views)

    def use() -> None:
        with _open_shell(parse_url("sqlite:///a.db"), "sync_", as_json=False) as shell:
            assert cast("Any", shell)._as_json is False
            if problem == "use":
                raise KeyError

    if problem == "none":
        use()
    else:
        with pytest.raises(KeyError):
            use()
    assert calls == ["open", "close"]


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("SELECT 1 AS a, 2 AS b", ["a", "b"]),
        ("SELECT 1 AS a, 2 AS a, 3 AS a", ["a", "a_2", "a_3"]),
        ("SELECT 1 AS a, 2 AS a_2, 3 AS a", ["a", "a_2", "a_3"]),
        ("SELECT 1 AS a, 2 AS a, 3 AS a_2", ["a", "a_2", "a_2_2"]),
    ],
)
def test_each_column_has_a_name_of_its_own(
    views: Any, capsys: pytest.CaptureFixture[str], statement: str, names: list[str]
) -> None:
    """So that none is lost where a row is an object."""
    _Shell(views, as_json=True).run(statement)
    values = {name: number for number, name in enumerate(names, 1)}
    assert json.loads(capsys.readouterr().out) == [values]
    _Shell(views, as_json=False).run(statement)
    shown = ["\t".join(names), "\t".join(map(str, values.values()))]
    assert capsys.readouterr().out.splitlines() == shown


class _PostgresError(Exception):
    """An error as the driver of PostgreSQL raises it."""


_PostgresError.__module__ = "psycopg.errors"


@pytest.mark.parametrize(
    ("error", "is_rejected"),
    [
        (sqlite3.OperationalError("locked"), True),
        (sqlite3.Warning("odd"), False),
        (_PostgresError("LINE 1: no\n"), True),
        (KeyError("ours"), False),
    ],
)
def test_only_the_error_of_a_driver_is_the_users(error: Exception, is_rejected: bool) -> None:
    """Any other one is a bug, which a message without its trace would hide."""

    def execute(_: str) -> None:
        raise error

    views: Any = SimpleNamespace(connection=SimpleNamespace(execute=execute), views={})
    with pytest.raises(Invalid if is_rejected else type(error)) as raised:
        _Shell(views, as_json=False).run("SELECT 1")
    if isinstance(raised.value, Invalid):
        assert raised.value.problem == f"was rejected: {str(error).strip()}"
        assert raised.value.value == "SELECT 1"


@pytest.mark.parametrize(
    ("cursor", "shown"),
    [
        ({"rowcount": -1}, "done"),
        ({"rowcount": 0}, "0 rows"),
        ({"rowcount": 3}, "3 rows"),
        ({"rowcount": -1, "statusmessage": None}, "done"),
        ({"rowcount": 3, "statusmessage": "DELETE 3"}, "DELETE 3"),
    ],
)
def test_a_statement_without_rows_says_what_it_has_done(
    capsys: pytest.CaptureFixture[str], cursor: dict[str, object], shown: str
) -> None:
    """In the words of the database, if it has any; apart from rows, which programs read."""
    found = SimpleNamespace(description=None, **cursor)
    connection = SimpleNamespace(execute=lambda _: found)
    views: Any = SimpleNamespace(connection=connection, views={})
    _Shell(views, as_json=True).run("DELETE FROM a")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"{shown}\n")


def test_the_views_are_those_of_a_fleet_and_missing_ones_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Apart from rows: the shell works, but perhaps on views that older code has made."""

    class Views:
        def __init__(self, url: object, keys: JobKeys, components: Components) -> None:
            opened.append((str(url), keys.name))
            self._events = components.events

        def install(self, _: str) -> None:
            self._events.emit(
                ViewsMissing(node="", appname="shop_", reason="no right", fix="ask the owner")
            )

        def close(self) -> None:
            """Close nothing."""

    opened: list[tuple[str, str]] = []
    monkeypatch.setattr("jobsync.jobs.sql_views.SqlViews", Views)
    with _open_shell(parse_url("sqlite:///a.db"), "shop_", as_json=False):
        printed = capsys.readouterr()
    assert opened == [("sqlite:///a.db", "shop_")]
    told = "jobsync: the views are missing or outdated: no right; ask the owner\n"
    assert (printed.out, printed.err) == ("", told)


@pytest.mark.parametrize("words", [[], ["-c", "SELECT 1"]])
def test_a_missing_file_is_refused_and_not_created(tmp_path: Path, words: list[str]) -> None:
    """The path is probably wrong."""
    url = f"sqlite:///{tmp_path}/none.db"
    error = CliRunner().invoke(module.sql, [url, *words]).exception
    assert isinstance(error, Misconfigured)
    assert "refers to a missing file" in str(error)
    assert list(tmp_path.iterdir()) == []
