"""One message from outside on SQLite, see `MessageOperations`. Each call is one transaction."""

import sqlite3
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jobsync.core.messages import REVOKED
from jobsync.errors import Corrupt
from jobsync.queue.backend import SeenKeys
from jobsync.queue.single_message import ProgressReport
from jobsync.queue.sql.single_message import PROGRESS_TTL, SqlMessageOperations
from jobsync.queue.sql.sqlite_claims import (
    COMPLETED,
    FORGOTTEN,
    OPEN,
    ClaimRow,
    Ending,
    add_failure,
)
from jobsync.queue.sql.sqlite_places import SQL, SqlitePlaces, run_steps, to_json
from jobsync.stores.sql import SqliteAccess

__all__ = ["SqliteMessageOperations", "forget_results"]

T = TypeVar("T")

_REVOKED = "v"
"""The letter of a claimed message that was cancelled from outside."""


class SqliteMessageOperations(SqlMessageOperations):
    """One message of a queue in a file."""

    _access: SqliteAccess

    async def _cancel(self, name: str) -> tuple[int, str] | None:
        def work(connection: sqlite3.Connection) -> tuple[int, str] | None:
            time = self._read_delay_time()
            parameters = {"id": name, "queue": self.queue, **time}
            row = connection.execute(SQL["read_waiting"], parameters).fetchone()
            if row is None:
                return _cancel_claimed(connection, parameters, time, self._places())
            deliveries, returned, errors = row
            attempt = max(deliveries - returned, 0)
            known = errors.decode(errors="replace")
            text = add_failure(known, attempt, REVOKED, time["now"], "")
            connection.execute(SQL["cancel_waiting"], {**parameters, "errors": text})
            _end_waiting(connection, parameters, self._places())
            return attempt, ""

        return await self._write_and_wake(work)

    async def _delete(self, name: str) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            parameters = {"id": name, "queue": self.queue}
            return (
                _end_waiting(connection, parameters, self._places())
                or connection.execute(SQL["delete_finished_message"], parameters).rowcount > 0
                or _delete_completed(connection, parameters)
            )

        return await self._write_and_wake(work)

    async def forget_keys(self, *, after: str, limit: int) -> SeenKeys:
        """Remove keys that nobody holds."""
        parameters = {"queue": self.queue, "after": after, "limit": limit, "now": self._now()}

        def work(connection: sqlite3.Connection) -> SeenKeys:
            seen = connection.execute(SQL["see_keys"], parameters).fetchall()
            gone = [key for key, is_held in seen if not is_held]
            if gone:
                connection.execute(SQL["delete_keys"], {**parameters, "keys": to_json(gone)})
            return SeenKeys(seen[-1][0] if len(seen) == limit else "", len(gone))

        return await self._write_repeatable(work)

    async def _write_and_wake(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a transaction after which the next message of a group may be its head."""
        result = await self._access.write(work, self.topic)
        self._notifications.wake(self.topic)
        return result

    async def _run_now(self, name: str) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            parameters = {"id": name, "queue": self.queue, **self._read_delay_time()}
            return connection.execute(SQL["run_now"], parameters).rowcount > 0

        return await self._access.write(work, self.topic)

    async def _report_progress(self, reports: Sequence[ProgressReport]) -> None:
        rows = [
            {
                "id": each.receipt.id,
                "queue": self.queue,
                "deliveries": each.receipt.deliveries,
                "progress": each.progress,
                "note": each.note,
                "now": self._now(),
            }
            for each in reports
        ]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(SQL["report_progress"], rows)

        await self._write_repeatable(work)

    async def _clear_progress(self, ids: Sequence[str]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.execute(SQL["clear_progress"], {"ids": to_json(ids)})

        await self._write_repeatable(work)

    @abstractmethod
    def _places(self) -> SqlitePlaces: ...

    @abstractmethod
    def _now(self) -> float: ...

    @abstractmethod
    def _read_delay_time(self) -> dict[str, float]: ...

    @abstractmethod
    async def _write_repeatable(self, work: Callable[[sqlite3.Connection], T]) -> T: ...


def forget_results(connection: sqlite3.Connection, parameters: Mapping[str, Any]) -> int:
    """Remove the results of messages that are forgotten, and reports of dead processes.

    Not earlier than the messages, which would look as if they had returned nothing.

    Args:
        connection: the connection, in a transaction.
        parameters: `queue`, `limit`, and the times `now` and `before` which messages were finished.

    Returns:
        How many results were removed.
    """
    kept = min(parameters["before"], parameters["now"] - PROGRESS_TTL)
    connection.execute(SQL["forget_progress"], {**parameters, "before": kept})
    return connection.execute(SQL["forget_results"], parameters).rowcount


def _end_waiting(
    connection: sqlite3.Connection, parameters: Mapping[str, Any], places: SqlitePlaces
) -> bool:
    """Take a message out of the table of those that are not claimed: the only place."""
    rows = connection.execute(SQL["delete_waiting"], parameters).fetchall()
    run_steps(connection, places.release(group for (group,) in rows if group is not None))
    return bool(rows)


def _cancel_claimed(
    connection: sqlite3.Connection,
    parameters: Mapping[str, Any],
    time: Mapping[str, float],
    places: SqlitePlaces,
) -> tuple[int, str] | None:
    """End the claim of a message; return its attempt and the session; None if it is not claimed."""
    found = _find_place(connection, parameters, OPEN)
    if found is None:
        return None
    row, place = found
    row.end(connection, place, Ending(_REVOKED, "revoke", REVOKED), time)
    row.write(connection)
    run_steps(connection, places.release(row.freed))
    return row.messages[place].attempt, row.session


def _delete_completed(connection: sqlite3.Connection, parameters: Mapping[str, Any]) -> bool:
    """Forget a completed message, and its result. Its claim still answers settlements."""
    found = _find_place(connection, parameters, COMPLETED)
    if found is None:
        return False
    row, place = found
    row.outcomes[place], row.times[place] = FORGOTTEN, None
    row.write(connection)
    connection.execute(SQL["delete_result"], parameters)
    return True


def _find_place(
    connection: sqlite3.Connection, parameters: Mapping[str, Any], outcome: str
) -> tuple[ClaimRow, int] | None:
    """Return the claim in which a message has an outcome, and its place there."""
    name = parameters["id"]
    chosen = {"ids": to_json([name]), "queue": parameters["queue"]}
    for found in connection.execute(SQL["find_claims"], chosen).fetchall():
        try:
            row = ClaimRow.read(found)
        except Corrupt:
            # The next end of claims reports it, and sets it aside.
            continue
        for place, message in enumerate(row.messages):
            if message.id == name and row.outcomes[place] == outcome:
                return row, place
    return None
