"""The statements of the queue on PostgreSQL, for a schema and an order of claims."""

from collections.abc import Mapping

from jobsync.queue.settings import QueueOrder
from jobsync.stores.sql import fill_in, load_sql

__all__ = ["build_copy", "fill_in_schema"]

_SQL = load_sql(__file__, "postgres.sql")

_ORDERS: Mapping[QueueOrder, Mapping[str, str]] = {
    "fifo": {
        "late_filter": "",
        "sorting": "position",
        "is_later": "due > (SELECT clock_timestamp())",
        "direction": "",
        "floor_filter": "AND position >= %(floor)s",
        "candidates": "priority <> 0, priority DESC, position",
    },
    "lifo": {
        "late_filter": "AND suspect",
        "sorting": "position DESC",
        "is_later": "true",
        "direction": "DESC",
        "floor_filter": "",
        "candidates": "priority <> 0, priority DESC, (CASE priority WHEN 0 THEN -1 ELSE 1 END)"
        " * position",
    },
    "priority": {
        "late_filter": "AND suspect",
        "sorting": "priority DESC, position",
        "is_later": "true",
        "direction": "",
        "floor_filter": "",
        "candidates": "priority DESC, position",
    },
}
"""The other parts of `claim` that depend on the order. Where it is not by time, messages that have
waited are promoted first."""


def fill_in_schema(schema: str, order: QueueOrder = "fifo") -> dict[str, str]:
    """Return the statements for a schema, which is a quoted name, and an order of claims."""
    # The name may contain the character that marks parameters.
    values = {"schema": schema.replace("%", "%%")}
    claims = {
        "claim": _build_claim(order, "claim", f"claim_{order}"),
        "claim_tasks": _build_claim(order, "claim_tasks", "claim_tasks_fresh"),
    }
    return {name: fill_in(text, values) for name, text in {**_SQL, **claims}.items()}


def _build_claim(order: QueueOrder, name: str, fresh: str) -> str:
    """Return the statement that claims messages without a task, or messages of tasks."""
    parts = {part: _SQL[f"{name}_{part}"] for part in ("late", "summary", "next_due")}
    return fill_in(_SQL["claim"], {**parts, "fresh": _SQL[fresh], **_ORDERS[order]})


def build_copy(schema: str) -> str:
    """Return the statement that adds many messages. It has no parameters."""
    return fill_in(_SQL["copy"], {"schema": schema})
