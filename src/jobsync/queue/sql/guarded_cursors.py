"""Cursors of a handler's transaction on PostgreSQL, which refuse what ends it.

psycopg refuses `commit()` and `rollback()` of the connection itself. Here statements that begin
with COMMIT or the like are refused, and so is what follows the end of the transaction, because it
would be committed at once.
"""

import re
from typing import Any, Self

from psycopg import AsyncCursor, Cursor
from psycopg.pq import TransactionStatus
from psycopg.sql import Composable

from jobsync.queue.transaction_backend import build_ended_error, build_refusal

__all__ = ["GuardedAsyncCursor", "GuardedBlockingCursor", "check_statement"]

_DRIVER = "psycopg"
_find_end = re.compile(
    # White space and comments. Possessive: a statement may have many.
    r"(?>\s+|;|--[^\n]*|/\*.*?\*/)*+"
    r"(COMMIT|END|ABORT|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b",
    re.IGNORECASE | re.DOTALL,
).match


class GuardedAsyncCursor(AsyncCursor[Any]):
    """A cursor of an asynchronous connection."""

    async def execute(self, query: Any, *arguments: Any, **options: Any) -> Self:
        """Run a statement.

        Raises:
            Invalid: it would end the transaction, or would not be in it.
        """
        check_statement(query, self)
        return await super().execute(query, *arguments, **options)


class GuardedBlockingCursor(Cursor[Any]):
    """A cursor of a connection that blocks."""

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Self:
        """Run a statement.

        Raises:
            Invalid: it would end the transaction, or would not be in it.
        """
        check_statement(query, self)
        return super().execute(query, *arguments, **options)


def check_statement(query: object, cursor: AsyncCursor[Any] | Cursor[Any]) -> None:
    """Check that a statement is in the transaction, and does not end it.

    Raises:
        Invalid: it is not, or does.
    """
    if cursor.connection.info.transaction_status == TransactionStatus.IDLE:
        raise build_ended_error(_DRIVER, "a statement has ended it")
    if isinstance(query, Composable):
        query = query.as_string(cursor)
    elif isinstance(query, bytes):
        query = query.decode(errors="replace")
    if isinstance(query, str) and (end := _find_end(query)):
        raise build_refusal(_DRIVER, end[1].upper())
