"""Which messages a claim on SQLite takes: by the order and the limits of the queue."""

import heapq
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jobsync.queue.limits import QueueLimits
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.claims import MAX_CLAIM_BYTES
from jobsync.queue.sql.common import MAX_BATCH
from jobsync.queue.sql.sqlite_places import SQL, SqlitePlaces, run_steps, to_json

__all__ = ["SelectedMessages", "read_outlook", "select_messages"]

NO_TASKS = "[]"
"""The parameter `tasks` of a claim of messages without a task."""

_SELECTS: Mapping[QueueOrder, Sequence[str]] = {
    "fifo": ("ready", "high", "low"),
    "lifo": ("newest", "high", "low"),
    "priority": ("high", "ready", "low"),
}
"""The statements that select ready messages. A queue without priorities has such messages if
another process has pushed them, whose order is by priority."""

_PLACES: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "waiting": lambda row: (row[14], row[0]),
    "ready": lambda row: row[0],
    "newest": lambda row: -row[0],
    "high": lambda row: (-row[11], row[0]),
    "low": lambda row: (-row[11], row[0]),
}
"""The order in which each of these statements returns its rows."""


class SelectedMessages(NamedTuple):
    """The messages of a claim."""

    rows: list[tuple[Any, ...]]
    """In their order."""
    is_full: bool
    """Whether there may be more."""
    wait: float | None = None
    """Seconds until the rate allows to claim more; None if it does now."""
    most: int | None = None
    """How many the limits of the queue allowed; None if it has none."""
    tasks: str = NO_TASKS
    """The parameter `tasks`: those that have not reached their limits."""


def select_messages(
    connection: sqlite3.Connection,
    places: SqlitePlaces,
    parameters: Mapping[str, Any],
    order: QueueOrder,
    limits: QueueLimits | None,
    tasks: Sequence[str],
    has_waiting: bool,  # noqa: FBT001 - the last of many that are not options
) -> SelectedMessages:
    """Select messages to claim, and count them.

    Args:
        connection: the connection, in a transaction that writes.
        places: the statements of this time.
        parameters: of the statements that select messages; `limit` is how many are wanted.
        order: of the queue.
        limits: of the queue and its tasks; None if nothing is to be counted.
        tasks: those whose messages are wanted.
        has_waiting: whether any message waits.
    """
    if limits is None:
        selected = _select(connection, parameters, order, has_waiting=has_waiting)
        return selected._replace(tasks=parameters["tasks"])
    wanted = parameters["limit"]
    allowance = run_steps(connection, places.begin_claim(limits, wanted, tasks))
    allowed = {**parameters, "limit": allowance.most, "tasks": to_json(allowance.tasks)}
    selected = _select(connection, allowed, order, has_waiting=has_waiting)
    claimed = [row[9] for row in selected.rows]
    wait = run_steps(connection, places.end_claim(limits, allowance, claimed))
    is_full = selected.is_full and allowance.queue.most == wanted
    return SelectedMessages(selected.rows, is_full, wait, allowance.queue.most, allowed["tasks"])


def read_outlook(
    connection: sqlite3.Connection, statement: str | None, parameters: Mapping[str, Any]
) -> Sequence[Any]:
    """Return what else there is to claim, and when.

    Args:
        connection: the connection, in a transaction.
        statement: that looks; None if nothing waits.
        parameters: of the statement.
    """
    if statement is not None:
        return cast("Sequence[Any]", connection.execute(SQL[statement], parameters).fetchone())
    lapse = connection.execute(SQL["find_next_lapse"], parameters).fetchone()
    return (False, False, None, None, *(lapse or (None, None)), False)


def _select(
    connection: sqlite3.Connection,
    parameters: Mapping[str, Any],
    order: QueueOrder,
    *,
    has_waiting: bool,
) -> SelectedMessages:
    rows: list[tuple[Any, ...]] = []
    limit, size = parameters["limit"], 0
    names = [] if parameters["suspects"] else [*_SELECTS[order]]
    if has_waiting and (parameters["suspects"] or order == "fifo"):
        names.insert(0, "waiting")
    elif has_waiting:
        connection.execute(SQL["promote"], {**parameters, "limit": MAX_BATCH})
        connection.execute(SQL["promote_tasks"], {**parameters, "limit": MAX_BATCH})
    for name in names:
        for row in _read(connection, name, {**parameters, "limit": limit - len(rows)}):
            rows.append(row)
            size += len(row[2]) + len(row[10])
            if size >= MAX_CLAIM_BYTES or len(rows) == limit:
                return SelectedMessages(_sort(rows, order), is_full=True)
    return SelectedMessages(_sort(rows, order), is_full=False)


def _read(
    connection: sqlite3.Connection, name: str, parameters: Mapping[str, Any]
) -> Iterable[tuple[Any, ...]]:
    """Return what a statement selects: of messages without a task, of tasks, or of both."""
    sources = [f"select_{name}"] if parameters["plain"] else []
    if parameters["tasks"] != NO_TASKS:
        sources.append(f"select_task_{name}")
    found = [connection.execute(SQL[source], parameters) for source in sources]
    return found[0] if len(found) == 1 else heapq.merge(*found, key=_PLACES[name])


def _sort(rows: list[tuple[Any, ...]], order: QueueOrder) -> list[tuple[Any, ...]]:
    # Those of a queue with priorities were selected in order.
    return rows if order == "priority" else sorted(rows, reverse=order == "lifo")
