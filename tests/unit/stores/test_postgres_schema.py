"""Which servers can be a store, and an upgrade beside others who change the schema."""

from typing import Any, cast

import pytest
from psycopg import errors

from jobsync import Misconfigured, Unavailable
from jobsync.core.urls import PostgresUrl
from jobsync.stores.postgres import schema
from jobsync.stores.postgres.schema import POSTGRES_STEPS, find_schema, upgrade

URL = PostgresUrl(host="h", database="d")
APART = PostgresUrl(host="h", database="d", schema="apart")


class Server:
    """A server that answers one question with a row."""

    def __init__(self, *row: Any) -> None:
        self._row = row

    async def execute(self, *_: object) -> Any:
        """Return a cursor."""
        return self

    async def fetchall(self) -> list[Any]:
        """Return all rows."""
        return [self._row]

    async def fetchone(self) -> Any:
        """Return the only row."""
        return self._row


@pytest.mark.parametrize(
    ("facts", "url", "found"),
    [
        (("public", "UTF8", 130_000, False), URL, "public"),
        (("mine", "UTF8", 180_001, False), URL, "mine"),
        (("mine", "UTF8", 180_001, False), APART, "apart"),
        ((None, "UTF8", 180_001, False), APART, "apart"),
    ],
)
async def test_a_server_is_used_with_its_schema(
    facts: tuple[Any, ...], url: PostgresUrl, found: str
) -> None:
    """That of the URL, or else the server's default."""
    assert await find_schema(cast("Any", Server(*facts)), url) == found


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        (("public", "UTF8", 129_999, False), Misconfigured, "is PostgreSQL 12 .*Use 13 or later"),
        (("public", "LATIN1", 180_001, False), Misconfigured, "is a database in LATIN1"),
        (("public", "UTF8", 180_001, True), Unavailable, "is a standby.*to the primary"),
        ((None, "UTF8", 180_001, False), Misconfigured, "has no default schema"),
    ],
)
async def test_a_server_that_cannot_be_a_store_is_refused(
    facts: tuple[Any, ...], kind: type[Exception], words: str
) -> None:
    """With the reason and the fix."""
    with pytest.raises(kind, match=words):
        await find_schema(cast("Any", Server(*facts)), URL)


@pytest.mark.parametrize(
    ("newer", "oldest_code", "is_used"),
    [(0, 0, True), (0, 5, True), (1, 0, True), (1, 1, False), (90, 0, True), (90, 89, False)],
)
async def test_newer_tables_are_used_unless_they_ask_for_newer_code(
    newer: int, oldest_code: int, is_used: bool
) -> None:
    """A newer version has only added tables and columns; they are left alone."""
    known = len(POSTGRES_STEPS)
    oldest = known + oldest_code if newer else oldest_code
    connection = cast("Any", Server(known + newer, oldest))
    if is_used:
        await upgrade(connection, URL, "public")
        return
    with pytest.raises(
        Misconfigured, match=f"version {known + newer}, and this code knows {known}"
    ):
        await upgrade(connection, URL, "public")


@pytest.mark.parametrize(
    "error",
    [
        errors.UniqueViolation,
        errors.DuplicateSchema,
        errors.DuplicateTable,
        errors.SerializationFailure,
        errors.DeadlockDetected,
    ],
)
async def test_an_upgrade_beside_others_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A few times: others who create the same names do not fail a connect."""
    old = cast("Any", Server(0, 0))
    failures: list[Exception] = []

    async def upgrade_once(*_: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(schema, "_upgrade", upgrade_once)
    failures[:] = [error() for _ in range(4)]
    await upgrade(old, URL, "public")
    assert not failures
    failures[:] = [error() for _ in range(100)]
    with pytest.raises(Unavailable, match="others change the schema at the same time"):
        await upgrade(old, URL, "public")


async def test_another_error_ends_an_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come again."""
    calls = []

    async def upgrade_once(*_: object) -> None:
        calls.append(1)
        raise errors.DiskFull

    monkeypatch.setattr(schema, "_upgrade", upgrade_once)
    with pytest.raises(errors.DiskFull):
        await upgrade(cast("Any", Server(0, 0)), URL, "public")
    assert len(calls) == 1
