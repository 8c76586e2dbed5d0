"""Priorities, groups and keys on PostgreSQL, and settlements that end heads of groups."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.limits import Allowance, QueueLimits
from jobsync.queue.sql.claims import OUTCOMES
from jobsync.queue.sql.message_rows import encode_any_error
from jobsync.queue.sql.places import Places
from jobsync.stores.sql import Steps, as_array

__all__ = [
    "PostgresPlaces",
    "build_columns",
    "find_claims",
    "find_ids",
    "is_completed",
    "run_steps",
    "run_steps_blocking",
]

T = TypeVar("T")


class PostgresPlaces(Places):
    """The transactions of one queue.

    Args:
        queue: its name.
        sql: the statements by name, for the schema of its tables.
        most_heads: how many messages of a group may be in work at a time.
    """

    def __init__(self, queue: str, sql: Mapping[str, str], most_heads: int) -> None:
        super().__init__(queue, sql, as_array, most_heads)

    def claim(
        self,
        statement: str,
        limits: QueueLimits,
        tasks: Sequence[str],
        parameters: Mapping[str, Any],
    ) -> Steps[tuple[list[Any], Allowance, float | None]]:
        """Claim as many messages as the limits of the queue and its tasks allow.

        Returns:
            The rows, what was allowed, and the seconds until a rate allows more.
        """
        allowance = yield from self.begin_claim(limits, parameters["limit"], tasks)
        allowed = {"limit": allowance.most, "tasks": as_array(allowance.tasks)}
        rows = yield self._sql[statement], {**parameters, **allowed}
        claimed = [row[-1] for row in rows if row[6] is not None]
        wait = yield from self.end_claim(limits, allowance, claimed)
        return rows, allowance, wait

    def settle(
        self, columns: Mapping[str, Any], results: Mapping[str, Any] | None = None
    ) -> Steps[set[str]]:
        """Settle messages of claims with groups; return the ids of those settled so.

        Args:
            columns: the settlements.
            results: what the handlers of completed messages returned.
        """
        rows = yield self._fill("settle", **columns, with_groups=True)
        yield from self.release(name for _, name in rows if name is not None)
        settled = {name for name, _ in rows}
        if results is not None:
            kept = {"ids": columns["ids"], "settled": as_array(sorted(settled)), **results}
            yield self._fill("insert_results", **kept)
        return settled

    def end_message(self, statement: str, parameters: Mapping[str, Any]) -> Steps[list[Any]]:
        """End a message by a statement that returns its group last, if it was its head."""
        rows = yield self._fill(statement, **parameters)
        yield from self.release(row[-1] for row in rows if row[-1] is not None)
        return rows

    def end_claims(self, parameters: Mapping[str, Any]) -> Steps[list[Any]]:
        """End claims; return a row for each of their messages."""
        rows = yield self._fill("end_claims", **parameters)
        yield from self.release(row[4] for row in rows if row[4] is not None)
        return rows

    def purge(self, states: Sequence[str]) -> Steps[int]:
        """Delete messages in these stored states; return how many."""
        ((count, names),) = yield self._fill("purge", states=as_array(states))
        yield from self.release(names)
        return int(count)

    def _name_holders(
        self, keyed: Mapping[str, NewMessage], holder: str | None = None
    ) -> dict[str, Any]:
        return {
            "keys": as_array(list(keyed)),
            "ids": as_array([holder or message.id for message in keyed.values()]),
            "ttls": as_array([message.key_ttl for message in keyed.values()]),
        }

    def _build_due(self, message: NewMessage) -> dict[str, Any]:
        return {"delay": float(message.delay), "at": message.at}

    def _build_rows(
        self,
        new_messages: Sequence[NewMessage],
        texts: Mapping[str, str],
        blocked: Sequence[bool],
    ) -> dict[str, Any]:
        return {
            "ids": as_array([message.id for message in new_messages]),
            "payloads": as_array([texts[message.id] for message in new_messages]),
            "delays": as_array([float(message.delay) for message in new_messages]),
            "times": as_array([message.at for message in new_messages]),
            "max_attempts": as_array([message.max_attempts for message in new_messages]),
            "timeouts": as_array([message.timeout for message in new_messages]),
            "tasks": as_array([message.task for message in new_messages]),
            "formats": as_array([message.format for message in new_messages]),
            "priorities": as_array([message.priority for message in new_messages]),
            "groups": as_array([message.group for message in new_messages]),
            "blocked": as_array(list(blocked)),
        }


def find_ids(ids: Sequence[str]) -> dict[str, str]:
    """Return the parameters that find claims by the ids of their messages."""
    return {"ids": as_array(ids), "low": min(ids), "high": max(ids)}


def find_claims(ids: Sequence[str], claims: Sequence[str]) -> dict[str, str]:
    """Return the parameters that find messages in claims. Each claim is looked up once."""
    distinct = list(dict.fromkeys(claims))
    return {"ids": as_array(ids), "claims": as_array(claims), "distinct": as_array(distinct)}


def is_completed(batch: Sequence[Settlement]) -> bool:
    """Whether all were completed, and nothing else is to be written."""
    return all(each.move == "complete" and not each.error for each in batch)


def build_columns(batch: Sequence[Settlement]) -> dict[str, str]:
    """Return the parameters of a settlement, but for `with_groups`."""
    return {
        **find_claims([each.receipt.id for each in batch], [each.receipt.claim for each in batch]),
        "outcomes": as_array([OUTCOMES[each.move] for each in batch]),
        "states": as_array([each.target for each in batch]),
        "delays": as_array([float(each.delay) for each in batch]),
        "returns": as_array([int(each.is_returned) for each in batch]),
        "errors": as_array([encode_any_error(each.error) for each in batch]),
    }


async def run_steps(connection: AsyncConnection[Any], steps: Steps[T]) -> T:
    """Run statements on a user's connection, within its transaction."""
    try:
        statement, parameters = next(steps)
        while True:
            cursor = connection.cursor(row_factory=tuple_row)
            await cursor.execute(statement.encode(), parameters)
            statement, parameters = steps.send(await cursor.fetchall())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def run_steps_blocking(connection: Connection[Any], steps: Steps[T]) -> T:
    """Likewise, on a connection of psycopg's blocking kind."""
    try:
        statement, parameters = next(steps)
        while True:
            cursor = connection.cursor(row_factory=tuple_row)
            cursor.execute(statement.encode(), parameters)
            statement, parameters = steps.send(cursor.fetchall())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
