"""Priorities, groups and keys on SQLite, where a transaction that writes is alone."""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from jobsync.core.clock import Clock
from jobsync.queue.backend import NewMessage
from jobsync.queue.sql.places import Places
from jobsync.stores.sql import Steps, load_sql

__all__ = ["SQL", "SqlitePlaces", "read_delay_clock", "run_steps", "to_json"]

T = TypeVar("T")

SQL = load_sql(__file__, "sqlite.sql")

_encode = msgspec.json.Encoder().encode


def to_json(items: Iterable[Any]) -> str:
    """Return a JSON array, as `json_each` reads it."""
    return _encode(items).decode()


def read_delay_clock(clock: Clock) -> tuple[int, float]:
    """Return the boot that delays count from, and the time since it; without an id, wall time."""
    boot = clock.boot()
    return (boot, clock.mono().seconds) if boot else (0, clock.wall().seconds)


def run_steps(connection: sqlite3.Connection, steps: Steps[T]) -> T:
    """Run statements within the transaction of a connection."""
    cursor = connection.cursor()
    # A user's connection may have one of its own.
    cursor.row_factory = None
    try:
        statement, parameters = next(steps)
        while True:
            rows = cursor.execute(statement, parameters).fetchall()
            statement, parameters = steps.send(rows)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class SqlitePlaces(Places):
    """The statements of one queue, at one time.

    Args:
        queue: its name.
        time: `now`, and `boot` and `mono`, by which delays are counted.
        most_heads: how many messages of a group may be in work at a time.
    """

    def __init__(self, queue: str, time: Mapping[str, float], most_heads: int = 1) -> None:
        times = {name: time[name] for name in ("now", "boot", "mono")}
        super().__init__(queue, SQL, to_json, most_heads, **times)
        self._time = time

    def _name_holders(
        self, keyed: Mapping[str, NewMessage], holder: str | None = None
    ) -> dict[str, Any]:
        rows = [(key, holder or each.id, each.key_ttl) for key, each in keyed.items()]
        return {"holders": to_json(rows)}

    def _build_due(self, message: NewMessage) -> dict[str, Any]:
        now, mono = self._time["now"], self._time["mono"]
        delay = message.find_delay(now)
        return {"due": now + delay, "wakes": mono + delay, "delay": delay}

    def _build_rows(
        self,
        new_messages: Sequence[NewMessage],
        texts: Mapping[str, str],
        blocked: Sequence[bool],
    ) -> dict[str, Any]:
        rows = [
            (
                message.id,
                "blocked" if is_blocked else self._find_state(message),
                message.find_delay(self._time["now"]),
                texts[message.id],
                message.max_attempts,
                message.timeout,
                message.task,
                message.format,
                message.priority,
                message.group,
            )
            for message, is_blocked in zip(new_messages, blocked, strict=True)
        ]
        return {"rows": to_json(rows)}

    def _find_state(self, message: NewMessage) -> str:
        if message.find_delay(self._time["now"]) > 0:
            return f"{message.lane}waiting"
        return f"{message.lane}{'ready' if message.priority == 0 else 'ranked'}"
