"""What the errors of SQLite and PostgreSQL mean: every code has its own error, with the fix."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from chance import FakeClock

from jobsync import Corrupt, JobsyncError, Misconfigured, Unavailable
from jobsync.core.secrets import Secret
from jobsync.core.urls import PostgresUrl
from jobsync.stores.postgres.connection import (
    connection_error,
    first_line,
    hide_secrets,
    statement_error,
)
from jobsync.stores.postgres.pool import MalformedJson, PostgresPool, ReplyLost, _RolledBack
from jobsync.stores.sqlite.file import CommitFailed, SqliteFile

URL = PostgresUrl(
    user="me",
    password=Secret("hush-hush"),
    host="h",
    database="d",
    params=(("sslpassword", Secret("tls-secret")), ("oauth_client_secret", Secret("id-secret"))),
)


def sqlite_error(code: int | None) -> sqlite3.Error:
    """Return an error of SQLite with this code; None if it has none."""
    error = sqlite3.OperationalError("some words")
    if code is not None:
        error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("extended", [0, 1, 7])
@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (sqlite3.SQLITE_BUSY, Unavailable, "held the write lock for 5 s"),
        (sqlite3.SQLITE_LOCKED, Unavailable, "held the write lock for 5 s"),
        (sqlite3.SQLITE_FULL, Unavailable, "disk is full; nothing was written"),
        (sqlite3.SQLITE_IOERR, Unavailable, "the disk failed: some words"),
        (sqlite3.SQLITE_CORRUPT, Corrupt, "some words"),
        (sqlite3.SQLITE_READONLY, Misconfigured, "is read-only"),
        (sqlite3.SQLITE_NOTADB, Misconfigured, "is not an SQLite database"),
        (sqlite3.SQLITE_CANTOPEN, Misconfigured, "cannot be opened"),
        (sqlite3.SQLITE_ERROR, Misconfigured, "was refused by SQLite: some words"),
        (sqlite3.SQLITE_CONSTRAINT, Misconfigured, "was refused by SQLite: some words"),
    ],
)
def test_a_code_of_sqlite_is_an_error_with_the_fix(
    code: int, extended: int, kind: type[JobsyncError], words: str
) -> None:
    """Its extended codes, too: a disk fails in many ways."""
    file = SqliteFile(Path("/nowhere/jobs.db"), FakeClock(), 5.0)
    error = file._to_error(sqlite_error(code | extended << 8))
    assert type(error) is kind
    assert words in str(error)
    assert "/nowhere/jobs.db" in str(error)


def test_an_error_of_sqlite_without_a_code_is_a_refusal() -> None:
    """The driver has errors of its own."""
    file = SqliteFile(Path("/nowhere/jobs.db"), FakeClock(), 5.0)
    assert isinstance(file._to_error(sqlite_error(None)), Misconfigured)


@pytest.mark.parametrize(
    ("code", "is_unknown"),
    [
        (sqlite3.SQLITE_IOERR, True),
        (sqlite3.SQLITE_IOERR | 4 << 8, True),
        (sqlite3.SQLITE_FULL, False),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_READONLY, False),
    ],
)
def test_only_a_disk_that_fails_leaves_a_commit_unknown(code: int, is_unknown: bool) -> None:
    """After every other error nothing was written."""
    file = SqliteFile(Path("/nowhere/jobs.db"), FakeClock(), 5.0)
    failure = sqlite_error(code)

    def execute(*_: object) -> None:
        raise failure

    connection = cast("Any", SimpleNamespace(execute=execute))
    with pytest.raises(CommitFailed if is_unknown else sqlite3.OperationalError):
        file._commit(connection, "COMMIT")


def postgres_error(state: str | None, severity: str | None = "ERROR") -> psycopg.Error:
    """Return an error of the server."""
    base = psycopg.OperationalError if state is None else psycopg.errors.lookup(state)

    class ServerError(base):  # type: ignore[misc, valid-type]
        diag = SimpleNamespace(severity_nonlocalized=severity)

    text = "words with hush-hush, tls-secret and id-secret\nsecond line"
    error: psycopg.Error = ServerError(text)
    return error


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (None, Unavailable, "words with"),
        ("25006", Unavailable, "read-only; it may be a standby"),
        ("42501", Misconfigured, "lacks a table or a privilege"),
        ("42P01", Misconfigured, "lacks a table or a privilege"),
        ("42703", Misconfigured, "lacks a table or a privilege"),
        ("3F000", Misconfigured, "lacks a table or a privilege"),
        ("57014", Unavailable, "own time limit ended the statement; nothing was written"),
        ("55P03", Unavailable, "own time limit ended the statement; nothing was written"),
        ("53100", Unavailable, "disk is full; nothing was written"),
        ("53300", Unavailable, "words with"),
        ("57P01", Unavailable, "words with"),
        ("58030", Unavailable, "words with"),
        ("08006", Unavailable, "words with"),
        ("XX000", Unavailable, "words with"),
        ("55000", Unavailable, "words with"),
        ("23505", Misconfigured, "was refused by the server"),
        ("42601", Misconfigured, "was refused by the server"),
    ],
)
def test_a_state_of_postgresql_is_an_error_with_the_fix(
    state: str | None, kind: type[JobsyncError], words: str
) -> None:
    """It has the first line of the server's text, without any secret of the URL."""
    error = statement_error(URL, postgres_error(state))
    assert type(error) is kind
    assert words in str(error)
    for hidden in ("hush-hush", "tls-secret", "id-secret", "second line"):
        assert hidden not in str(error)
    assert first_line(URL, postgres_error(state)) == "words with ***, *** and ***"


@pytest.mark.parametrize(
    ("state", "severity", "kind"),
    [
        ("40001", "ERROR", _RolledBack),
        ("40P01", "ERROR", _RolledBack),
        ("57P01", "FATAL", ReplyLost),
        ("57P01", "PANIC", ReplyLost),
        (None, None, ReplyLost),
        ("22P02", "ERROR", MalformedJson),
        ("22003", "ERROR", MalformedJson),
        ("54001", "ERROR", MalformedJson),
        ("42P01", "ERROR", Misconfigured),
        ("57014", "ERROR", Unavailable),
        ("53200", "ERROR", Unavailable),
        ("53200", "FATAL", ReplyLost),
    ],
)
def test_only_an_error_that_ends_a_statement_is_a_refusal(
    state: str | None, severity: str | None, kind: type[Exception]
) -> None:
    """One that ends the connection may come after the commit, so the outcome is unknown."""
    pool = cast("Any", SimpleNamespace(_url=URL))
    assert type(PostgresPool._to_error(pool, postgres_error(state, severity))) is kind


def test_a_mistake_in_a_statement_is_raised_as_it_is() -> None:
    """Nothing was sent: it is a bug, and no outcome."""
    pool = cast("Any", SimpleNamespace(_url=URL))
    error = psycopg.ProgrammingError("the query has 1 placeholder but 2 parameters were passed")
    assert PostgresPool._to_error(pool, error) is error


CONNECT_TEXTS: dict[str, tuple[type[JobsyncError], str]] = {
    'password authentication failed for user "me"': (Misconfigured, "wrong user or password"),
    'no pg_hba.conf entry for host "1.2.3.4"': (Misconfigured, "refused by pg_hba.conf"),
    'FATAL:  database "d" does not exist': (Misconfigured, "names a database that does not exist"),
    'FATAL:  role "me" does not exist': (Misconfigured, "has a user that does not exist"),
    'FATAL:  role "me" is not permitted to log in': (Misconfigured, "may not log in"),
    'permission denied for database "d"': (Misconfigured, "may not connect to"),
    "server does not support SSL, but SSL was required": (Misconfigured, "does not support"),
    "certificate verify failed": (Misconfigured, "certificate does not match"),
    "sorry, too many clients already": (Unavailable, "no connection left"),
    "remaining connection slots are reserved": (Unavailable, "no connection left"),
    'too many connections for role "me"': (Unavailable, "no connection left"),
    "Connection refused": (Unavailable, "Connection refused"),
    "could not translate host name hush-hush": (Unavailable, "host name ***"),
}


@pytest.mark.parametrize("text", CONNECT_TEXTS)
def test_a_refused_connect_says_what_to_change(text: str) -> None:
    """What cannot change by itself is misconfigured; what can is unavailable."""
    kind, words = CONNECT_TEXTS[text]
    error = connection_error(URL, psycopg.OperationalError(f"connection failed: {text}\nmore"))
    assert type(error) is kind
    assert words in str(error)
    assert "hush-hush" not in str(error)


@pytest.mark.parametrize(
    ("password", "params", "shown"),
    [
        (None, (), "words with hush and two"),
        (Secret(""), (), "words with hush and two"),
        (Secret("hush"), (), "words with *** and two"),
        (None, (("a", Secret("hush")), ("b", Secret("two"))), "words with *** and ***"),
        (Secret("two"), (("a", Secret("")), ("b", Secret("hush"))), "words with *** and ***"),
        (Secret("hush and two"), (("a", Secret("")),), "words with ***"),
    ],
)
def test_every_secret_of_a_url_is_hidden_and_nothing_else(
    password: Secret | None, params: tuple[tuple[str, Secret], ...], shown: str
) -> None:
    """An empty one hides nothing."""
    url = PostgresUrl(host="h", database="d", password=password, params=params)
    assert hide_secrets(url, "words with hush and two") == shown
    assert first_line(url, psycopg.Error("words with hush and two\nmore")) == shown


@pytest.mark.parametrize("text", ["", " ", "\n", "\n \n"])
def test_an_error_without_words_is_named_by_its_type(text: str) -> None:
    """A message that says nothing helps nobody."""
    assert first_line(URL, psycopg.OperationalError(text)) == "OperationalError"
    assert first_line(URL, psycopg.OperationalError(f"{text}words\nmore")) == "words"
    assert "OperationalError" in str(statement_error(URL, psycopg.OperationalError(text)))
    assert "OperationalError" in str(connection_error(URL, psycopg.OperationalError(text)))


@pytest.mark.parametrize(
    ("needs", "used", "kind", "words"),
    [
        (True, False, Misconfigured, "needs a password"),
        (True, True, Misconfigured, "needs a password"),
        (False, True, Misconfigured, "wrong user or password"),
        (False, False, Misconfigured, "wrong user or password"),
    ],
)
def test_a_password_that_is_missing_is_not_a_wrong_one(
    needs: bool, used: bool, kind: type[JobsyncError], words: str
) -> None:
    """The connection knows which it was; what is not asked for says nothing."""

    class Refused(psycopg.OperationalError):
        pgconn = cast("Any", SimpleNamespace(needs_password=needs, used_password=used))

    error = Refused("password authentication failed")
    found = connection_error(URL, error)
    assert type(found) is kind
    assert words in str(found)


FIXES: dict[str | None, str] = {
    None: "check that the server runs and can be reached",
    "25006": "point the url to the primary, or SET default_transaction_read_only = off",
    "42P01": "run `jobsync schema URL` and have an administrator apply it",
    "57014": "raise statement_timeout and lock_timeout of this role",
    "53100": "free some space",
    "53300": "check the server's log",
    "XX001": "check the server's log",
    "08003": "check the server's log",
    "42883": "check that nobody else changed jobsync's tables",
}


@pytest.mark.parametrize("state", FIXES)
def test_each_kind_of_refusal_has_a_fix_of_its_own(state: str | None) -> None:
    """What an administrator can do about this one."""
    error = statement_error(URL, postgres_error(state))
    assert isinstance(error, Unavailable | Misconfigured)
    assert error.fix == FIXES[state]
