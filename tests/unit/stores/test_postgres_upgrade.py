"""What an upgrade of PostgreSQL's tables sends, by what is there, and the script for an admin."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import pytest
from psycopg import errors, sql

from jobsync import Misconfigured, Unavailable
from jobsync.core.urls import PostgresUrl
from jobsync.stores.postgres import schema as module
from jobsync.stores.postgres.connection import SCHEMA_FIX
from jobsync.stores.postgres.schema import (
    POSTGRES_STEPS,
    find_fix,
    read_tables_version,
    schema_sql,
    upgrade,
)

URL = PostgresUrl(host="h", database="d")
APART = PostgresUrl(host="h", database="d", schema='ap"art')
NEWEST = len(POSTGRES_STEPS)
QUOTED = '"ap""art"'


class FakeTables:
    """A database that has some version of the tables.

    Args:
        version: of the tables; the error of reading it if they have none.
        has_schema: whether the schema exists.
        later: the version once the lock is held; others have upgraded meanwhile.
    """

    def __init__(
        self, version: int | type[Exception] | None, *, has_schema: bool = True, later: Any = None
    ) -> None:
        self.version = version
        self._has_schema = has_schema
        self._later = later
        self.sent: list[str] = []
        self.parameters: list[Any] = []
        self.refused: str | None = None
        self._rows: list[tuple[Any, ...]] = []

    async def execute(self, statement: Any, parameters: Any = ()) -> "FakeTables":
        """Run a statement."""
        text = statement.decode() if isinstance(statement, bytes) else statement
        text = text.as_string(None) if isinstance(text, sql.SQL) else text
        self.sent.append(text)
        self.parameters += parameters
        if self.refused is not None and self.refused in text:
            raise errors.InsufficientPrivilege
        self._rows = []
        if text.startswith("SELECT tables_version"):
            if isinstance(self.version, type):
                raise self.version
            self._rows = [] if self.version is None else [(self.version, 5)]
        elif "pg_advisory" in text and self._later is not None:
            self.version = self._later
        elif "pg_attribute" in text:
            self._rows = [] if isinstance(self.version, type) else [(1,)]
        elif "pg_namespace" in text:
            self._rows = [(1,)] if self._has_schema else []
        return self

    async def fetchone(self) -> Any:
        """Return the first row."""
        return self._rows[0] if self._rows else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Begin a transaction."""
        self.sent.append("BEGIN")
        yield
        self.sent.append("COMMIT")


class FakeRows:
    """A connection for users, and what it has found.

    Args:
        sent: collects the statements.
        default: the connection's own schema.
        found: the row of the version, or the error of reading it.
    """

    def __init__(self, sent: list[str], default: str | None, found: Any) -> None:
        self._sent = sent
        self._default = default
        self._found = found

    def execute(self, statement: Any) -> "FakeRows":
        """Run a statement."""
        if statement != "SELECT current_schema()":
            self._sent.append(statement.as_string(None))
            if isinstance(self._found, type):
                raise self._found
        return self

    def fetchall(self) -> list[Any]:
        """Return the row of the schema."""
        return [(self._default,)]

    def fetchone(self) -> Any:
        """Return the row of the version."""
        return self._found


def list_steps(version: int, schema: str) -> list[str]:
    """Return the statements from a version to the newest, as they are sent."""
    steps = [statement for step in POSTGRES_STEPS[version:] for statement in step]
    return [statement.replace("{schema}", schema) for statement in steps]


@pytest.mark.parametrize("url", [URL, APART])
@pytest.mark.parametrize(
    ("version", "has_schema", "start"),
    [
        (errors.InvalidSchemaName, False, 0),
        (errors.UndefinedTable, True, 0),
        (errors.UndefinedColumn, True, 0),
        (None, True, 0),
        (0, True, 0),
        (1, True, 1),
        (4, True, 4),
        (NEWEST - 1, True, NEWEST - 1),
    ],
)
async def test_an_upgrade_runs_the_steps_that_are_missing(
    url: PostgresUrl, version: Any, has_schema: bool, start: int
) -> None:
    """In order, all in one transaction, behind the lock; the schema only if it does not exist."""
    tables = FakeTables(version, has_schema=has_schema)
    schema = url.schema or "mine"
    quoted = QUOTED if url.schema else '"mine"'
    await upgrade(cast("Any", tables), url, schema)
    begin, commit = tables.sent.index("BEGIN"), tables.sent.index("COMMIT")
    assert begin == 1
    assert commit == len(tables.sent) - 1
    isolation, lock, find, *others, script = tables.sent[begin + 1 : commit]
    assert isolation == "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
    assert "pg_advisory_xact_lock" in lock
    assert "pg_namespace" in find
    created = [text for text in others if "CREATE SCHEMA" in text]
    assert created == ([] if has_schema else [f"CREATE SCHEMA IF NOT EXISTS {quoted}"])
    assert tables.parameters[1:] == [schema, f"{quoted}.jobsync_schema"]
    steps = list_steps(start, quoted)
    joined = ";\n".join(steps)
    before, found, after = script.partition(f";\n{joined};\n")
    assert found
    assert [line.split(" {")[0][:11] for line in before.split(";\n")] == [
        "CREATE TABL",
        "ALTER TABLE",
        "INSERT INTO",
    ]
    assert after.startswith(f"UPDATE {quoted}.jobsync_schema")
    assert f"greatest(tables_version, {NEWEST})" in after
    assert "{schema}" not in script


@pytest.mark.parametrize("version", [NEWEST, NEWEST + 1])
async def test_tables_that_are_new_enough_are_only_read(version: int) -> None:
    """No lock, no transaction."""
    tables = FakeTables(version)
    await upgrade(cast("Any", tables), URL, "mine")
    assert len(tables.sent) == 1


@pytest.mark.parametrize("later", [NEWEST, NEWEST + 1])
async def test_what_others_have_upgraded_meanwhile_is_left_alone(later: int) -> None:
    """The version counts that is there once the lock is held."""
    tables = FakeTables(3, later=later)
    await upgrade(cast("Any", tables), URL, "mine")
    assert tables.sent[-1] == "COMMIT"
    assert not [text for text in tables.sent if text.startswith(("CREATE", "ALTER", "UPDATE"))]


@pytest.mark.parametrize(
    "refused", ["tables_version", "CREATE SCHEMA", "CREATE TABLE", "pg_advisory_xact_lock"]
)
async def test_a_right_that_is_missing_is_named_with_the_fix(refused: str) -> None:
    """Whichever statement it is that fails; it is not tried again."""
    tables = FakeTables(errors.InvalidSchemaName, has_schema=False)
    tables.refused = refused
    with pytest.raises(Misconfigured, match="may not create them") as caught:
        await upgrade(cast("Any", tables), URL, "mine")
    fix = "run `jobsync schema URL` with ?schema=mine in the URL and have an administrator apply it"
    assert (caught.value.field, caught.value.fix) == ("url", fix)
    assert tables.sent.count("BEGIN") <= 1


def test_the_fix_for_missing_tables_names_the_schema_unless_the_script_is_for_it() -> None:
    """Without one in the URL the script creates them in `public`, where workers may not look."""
    assert find_fix(URL, "public") == find_fix(APART, APART.schema) == SCHEMA_FIX
    for url in (URL, APART):
        assert "with ?schema=mine in the URL" in find_fix(url, "mine")


@pytest.mark.parametrize("default", ["mine", None])
@pytest.mark.parametrize("url", [URL, APART])
@pytest.mark.parametrize(
    ("found", "version"),
    [
        ((7, 5), 7),
        ((NEWEST + 9, 5), NEWEST + 9),
        (None, 0),
        (errors.UndefinedTable, 0),
        (errors.UndefinedColumn, 0),
        (errors.InvalidSchemaName, 0),
        (errors.InsufficientPrivilege, None),
        (Unavailable("d", "it is away"), None),
    ],
)
def test_the_version_of_the_tables_is_that_of_their_schema(
    found: Any, version: int | None, url: PostgresUrl, default: str | None, monkeypatch: Any
) -> None:
    """That of the URL, or else the connection's own; what cannot be read has its own error."""
    sent: list[str] = []

    @contextmanager
    def connect(asked: PostgresUrl, zone: str) -> Iterator[FakeRows]:
        assert (asked, zone) == (url, "UTC")
        if isinstance(found, Unavailable):
            raise found
        yield FakeRows(sent, default, found)

    monkeypatch.setattr(module, "connect_user", connect)
    if version is not None and (url.schema or default):
        assert read_tables_version(url) == (url.schema or "mine", version)
        (text,) = sent
        quoted = QUOTED if url.schema else '"mine"'
        assert f"FROM {quoted}.jobsync" in text
        return
    words = "has no default schema" if not (url.schema or default) else "may not create them"
    words = "it is away" if isinstance(found, Unavailable) else words
    with pytest.raises((Misconfigured, Unavailable), match=words):
        read_tables_version(url)


@pytest.mark.parametrize(
    ("schema", "quoted"), [("", '"public"'), ("apart", '"apart"'), ('ap"art', QUOTED)]
)
@pytest.mark.parametrize(
    ("user", "granted"),
    [("", None), ("ann", '"ann"'), ("Ann-1", '"Ann-1"'), ('a"b', '"a""b"')],
)
def test_the_script_for_an_administrator(
    schema: str, quoted: str, user: str, granted: str | None
) -> None:
    """One transaction that creates all, in the schema of the URL, and a role for its user."""
    script = schema_sql(PostgresUrl(host="h", database="d", schema=schema, user=user))
    assert script.startswith(f"BEGIN;\nCREATE SCHEMA IF NOT EXISTS {quoted};\n")
    assert script.endswith("COMMIT;\n")
    for statement in list_steps(0, quoted):
        assert f"{statement};\n" in script
    assert f"{quoted}.jobsync_progress TO jobsync_writer;" in script
    grants = [line for line in script.splitlines() if line.startswith("GRANT jobsync_writer")]
    assert grants == ([] if granted is None else [f"GRANT jobsync_writer TO {granted};"])
    assert "{schema}" not in script
    assert "{role}" not in script
