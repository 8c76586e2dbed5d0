"""Forgets messages in the rows of claims that were completed long ago, on SQLite.

On its own because `sqlite_claims` is large.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from jobsync.errors import Corrupt
from jobsync.queue.sql.sqlite_claims import FORGOTTEN, ClaimRow
from jobsync.queue.sql.sqlite_places import SQL, to_json

__all__ = ["forget_completed"]


def forget_completed(connection: sqlite3.Connection, parameters: Mapping[str, Any]) -> int:
    """Forget messages that were completed long ago; return how many.

    Args:
        connection: the connection, in a transaction.
        parameters: `queue`, `limit`, and the times `before` which messages are forgotten and
            `answered` before which claims are deleted.
    """
    count, limit, before = 0, parameters["limit"], parameters["before"]
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, completed, is_answered in connection.execute(SQL["find_old"], parameters):
        numbers[bool(is_answered)].append(number)
        count += completed
        if count >= limit:
            break
    connection.execute(SQL["delete_claims"], {"numbers": to_json(numbers[True])})
    connection.execute(SQL["forget_in_claims"], {"numbers": to_json(numbers[False])})
    if count < limit:
        rows = connection.execute(SQL["find_partly_old"], parameters).fetchall()
        count += sum(_forget_in(connection, row, before) for row in rows)
    return count


def _forget_in(connection: sqlite3.Connection, found: Sequence[Any], before: float) -> int:
    """Forget the messages of a claim that were completed long ago; return how many."""
    try:
        row = ClaimRow.read(found)
    except Corrupt:
        # As a whole, once the latest one is old, it is forgotten without being decoded.
        return 0
    old = [place for place, time in enumerate(row.times) if time is not None and time < before]
    for place in old:
        row.outcomes[place], row.times[place] = FORGOTTEN, None
    row.write(connection)
    return len(old)
