"""The queue backend on SQLite.

Claims and delays are counted by the time since boot, which all processes on the file share, and
which no change of the wall clock affects. Claims of an earlier boot have lapsed. What is left of a
delay of an earlier boot is computed once from the wall clock, the only one that survives a reboot,
and is never more than the whole delay. A system without an id of the boot counts delays by the wall
clock.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Clock
from jobsync.core.messages import LAPSED, SPARED, TRANSITIONS, MessageState, decide_lapse
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import EndedClaim, NewMessage, QueuePart, Receipt, Settlement
from jobsync.queue.sql import MessageGroup, SqlDirectory
from jobsync.queue.sql.common import (
    MAX_BATCH,
    ClaimedRows,
    ClaimRequest,
    SqlBackend,
    build_connection_error,
)
from jobsync.queue.sql.message_rows import ClaimedRow, encode_any_error, encode_error
from jobsync.stores.sql import SqliteAccess, load_sql

__all__ = ["SQL", "SqliteBackend", "SqliteQueueDirectory"]

SQL = load_sql(__file__, "sqlite.sql")

_ID, _FINISHED = 1, 13
"""Indices in the row of a message for display."""

_FIX = "pass a sqlite3 connection to the file that the queue is in"


class SqliteBackend(SqlBackend):
    """The messages of a queue in a file.

    Args:
        access: the connection to the file.
        queue: its name.
        components: time, randomness and events.
    """

    def __init__(self, access: SqliteAccess, queue: str, components: Components) -> None:
        super().__init__(access, queue, components)
        self._access = access
        self._is_idle = False
        self._has_foreign = True
        """Whether there may be delays that count from another boot."""

    async def _push(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(SQL["push"], self._build_parameters(new_messages, payloads))

        await self._access.write(work, self.topic)
        self._access.wake(self.topic)

    async def _push_within(
        self, connection: object, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise build_connection_error(connection, "is not a sqlite3 connection", _FIX)
        self._check_file(connection)
        # In the other cases sqlite3 begins a transaction itself, or there is one. Without it
        # every row would be a transaction.
        needs_transaction = connection.isolation_level is None and not connection.in_transaction
        if needs_transaction:
            connection.execute("BEGIN IMMEDIATE")
        connection.executemany(SQL["push"], self._build_parameters(new_messages, payloads))
        if needs_transaction:
            connection.execute("COMMIT")

    def _check_file(self, connection: sqlite3.Connection) -> None:
        cursor = connection.cursor()
        cursor.row_factory = None
        (_, _, name) = cursor.execute("PRAGMA database_list").fetchone()
        if self._access.path is None or not (name and self._access.path.samefile(name)):
            raise build_connection_error(connection, f"is to {name or 'memory'}", _FIX)

    def _build_parameters(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> list[dict[str, Any]]:
        now, (boot, mono) = self._now(), _read_delay_clock(self._access.clock)
        return [
            {
                "queue": self.queue,
                "id": message.id,
                "state": "waiting" if (delay := message.find_delay(now)) > 0 else "ready",
                "due": now + delay,
                "boot": boot if delay > 0 else 0,
                "wakes": mono + delay if delay > 0 else None,
                "payload": payload.decode(),
                "max_attempts": message.max_attempts,
                "timeout": message.timeout,
                "task": message.task,
                "now": now,
            }
            for message, payload in zip(new_messages, payloads, strict=True)
        ]

    async def _exists(self, ids: Sequence[str]) -> bool:
        ((exists,),) = await self._access.read(SQL["exists"], {"ids": _json(list(ids))})
        return bool(exists)

    async def _claim(self, request: ClaimRequest) -> ClaimedRows:
        limit, suspects, tasks = request.limit, request.suspects, request.tasks
        parameters = {
            "queue": self.queue,
            "suspects": suspects,
            "limit": limit,
            "tasks": None if tasks is None else _json(sorted(tasks)),
        }

        def work(connection: sqlite3.Connection) -> ClaimedRows:
            parameters.update(self._read_delay_time())
            boot, mono = self._since_boot()
            if self._has_foreign:
                connection.execute(SQL["adopt"], {**parameters, "limit": MAX_BATCH})
            rows = connection.execute(SQL["select_waiting"], parameters).fetchall()
            if not suspects and len(rows) < limit:
                rest = {**parameters, "limit": limit - len(rows)}
                rows += connection.execute(SQL["select_ready"], rest).fetchall()
            if rows:
                values = {
                    "claim": request.claim,
                    "session": request.session,
                    "due": mono + request.visibility,
                    "boot": boot,
                    "now": parameters["now"],
                    "positions": _json([row[0] for row in rows]),
                }
                connection.execute(SQL["claim"], values)
            outlook = connection.execute(SQL["outlook"], parameters).fetchone()
            return self._build_result([row[1:] for row in sorted(rows)], outlook, limit)

        if self._is_idle:
            # A read blocks no writer.
            parameters.update(self._read_delay_time())
            (outlook,) = await self._access.read(SQL["outlook"], parameters)
            claimed = self._build_result([], outlook, limit)
            if not (outlook[0] or self._has_foreign):
                return claimed
        try:
            claimed = await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error
        self._is_idle = not claimed.more
        return claimed

    def _build_result(
        self, rows: list[ClaimedRow], outlook: Sequence[Any], limit: int
    ) -> ClaimedRows:
        (boot, mono), (_, delay_now) = self._since_boot(), _read_delay_clock(self._access.clock)
        _, suspects, due, suspect_due, lapse, lapse_boot, self._has_foreign = outlook
        delays = [time - delay_now for time in (due, suspect_due) if time is not None]
        if self._has_foreign:
            delays.append(0.0)
        lapses_in = None if lapse is None else (lapse - mono if lapse_boot == boot else 0.0)
        due, more = min(delays, default=None), len(rows) >= limit
        return ClaimedRows(rows, bool(suspects), due, lapses_in, more)

    async def _settle(self, batch: Sequence[Settlement]) -> set[str]:
        def work(connection: sqlite3.Connection) -> set[str]:
            time = self._read_delay_time()
            settled = _complete(connection, batch, time["now"])
            rest = [each for each in batch if each.receipt.id not in settled]
            return settled.union(
                each.receipt.id for each in rest if _settle_one(connection, each, time)
            )

        return await self._access.write(work, self.topic)

    async def _extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:

        def work(connection: sqlite3.Connection) -> list[bool]:
            boot, mono = self._since_boot()
            return [
                connection.execute(
                    SQL["extend"],
                    {
                        "id": receipt.id,
                        "claim": receipt.claim,
                        "boot": boot,
                        "due": mono + visibility,
                    },
                ).rowcount
                > 0
                for receipt in receipts
            ]

        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    async def _end_claims(self, dead: Collection[str], keep: Collection[str]) -> list[EndedClaim]:

        def work(connection: sqlite3.Connection) -> list[EndedClaim]:
            time, (boot, mono) = self._read_delay_time(), self._since_boot()
            parameters = {
                "queue": self.queue,
                "boot": boot,
                "mono": mono,
                "dead": _json(list(dead)),
                "keep": _json(list(keep)),
                "limit": MAX_BATCH,
            }
            rows = connection.execute(SQL["find_lapsed"], parameters).fetchall()
            return [_end_lapsed(connection, row, time) for row in rows]

        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    async def list_holders(self) -> list[str]:
        """Return the sessions that hold claims."""
        rows = await self._access.read(SQL["list_holders"], {"queue": self.queue})
        return [session for (session,) in rows]

    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]:
        parameters = {"queue": self.queue, "state": state, "after": after or "0", "limit": limit}
        times = _read_clock(self._access)
        return await self._access.read(SQL["browse_live"], {**parameters, **times})

    async def _browse_finished(self, state: MessageState, after: str, limit: int) -> list[Any]:
        since, _, name = after.partition(" ")
        parameters = {
            "queue": self.queue,
            "state": state,
            "since": float(since or 0),
            "after": name,
            "limit": limit,
            "now": self._now(),
        }
        rows = await self._access.read(SQL["browse_finished"], parameters)
        return [(*row[:-1], f"{row[_FINISHED]!r} {row[_ID]}") for row in rows]

    async def _count(self) -> list[tuple[MessageState, int]]:
        return await self._access.read(SQL["count"], {"queue": self.queue})

    async def _find_newer(self) -> list[tuple[int, int]]:
        return await self._access.read(SQL["find_newer"], {"queue": self.queue})

    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int:

        def work(connection: sqlite3.Connection) -> int:
            parameters = {
                "queue": self.queue,
                "ids": _json(list(ids or ())),
                "all": ids is None,
                "limit": limit,
                **self._read_delay_time(),
            }
            redriven = [name for (name,) in connection.execute(SQL["redrive"], parameters)]
            connection.execute(SQL["delete_finished"], {"ids": _json(redriven)})
            return len(redriven)

        return await self._access.write(work, self.topic)

    async def _purge(self, states: Collection[MessageState]) -> int:

        def work(connection: sqlite3.Connection) -> int:
            parameters = {"queue": self.queue, "states": _json(list(states))}
            statements = (SQL["purge_live"], SQL["purge_finished"])
            return sum(connection.execute(text, parameters).rowcount for text in statements)

        return await self._access.write(work, self.topic)

    async def _pause(self, reason: str) -> bool:
        return await self._set_pause(SQL["pause"], {"now": self._now(), "reason": reason})

    async def _resume(self) -> bool:
        return await self._set_pause(SQL["resume"], {})

    async def _set_pause(self, statement: str, parameters: Mapping[str, Any]) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            return connection.execute(statement, {**parameters, "queue": self.queue}).rowcount > 0

        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int:
        def work(connection: sqlite3.Connection) -> int:
            before = self._now() - older_than
            parameters = {"queue": self.queue, "state": state, "before": before, "limit": limit}
            return connection.execute(SQL["forget"], parameters).rowcount

        return await self._access.write(work, self.topic)

    def _now(self) -> float:
        return self._access.clock.wall().seconds

    def _read_delay_time(self) -> dict[str, float]:
        """Return the parameters of statements on delays: wall time, boot, and time since boot."""
        boot, mono = _read_delay_clock(self._access.clock)
        return {"now": self._now(), "boot": boot, "mono": mono}

    def _since_boot(self) -> tuple[int, float]:
        return self._access.clock.boot(), self._access.clock.mono().seconds


class SqliteQueueDirectory(SqlDirectory):
    """All queues in a file.

    Args:
        access: the connection to the file.
        components: where unreadable messages are reported.
    """

    def __init__(self, access: SqliteAccess, components: Components) -> None:
        super().__init__(components)
        self._access = access

    async def _summarize(self) -> Sequence[MessageGroup]:
        return await self._access.read(SQL["summarize"])

    async def _list_pauses(self) -> Sequence[tuple[str, float, str]]:
        return await self._access.read(SQL["list_pauses"])

    async def _find(self, ids: Collection[str]) -> Sequence[Sequence[Any]]:
        parameters = {"ids": _json([*ids]), **_read_clock(self._access)}
        return await self._access.read(SQL["find"], parameters)

    async def _list(
        self, queue: str, part: QueuePart, after: str, limit: int
    ) -> Sequence[Sequence[Any]]:
        query = SQL["list_dead" if part == "dead" else "list_live"]
        parameters = {"queue": queue, "after": after, "limit": limit, **_read_clock(self._access)}
        return await self._access.read(query, parameters)


def _read_delay_clock(clock: Clock) -> tuple[int, float]:
    """Return the boot that delays count from, and the time since it; without an id, wall time."""
    boot = clock.boot()
    return (boot, clock.mono().seconds) if boot else (0, clock.wall().seconds)


def _read_clock(access: SqliteAccess) -> dict[str, float]:
    """Return the times from which a query computes when claims lapse and delays end."""
    clock = access.clock
    delay_boot, delay_now = _read_delay_clock(clock)
    return {
        "now": clock.wall().seconds,
        "boot": clock.boot(),
        "mono": clock.mono().seconds,
        "delay_boot": delay_boot,
        "delay_now": delay_now,
    }


def _complete(connection: sqlite3.Connection, batch: Sequence[Settlement], now: float) -> set[str]:
    """Complete the messages of each claim by two statements; return those of complete claims."""
    ids_by_claim: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for settlement in batch:
        if settlement.move == "complete" and not settlement.error:
            receipt = settlement.receipt
            ids_by_claim[receipt.claim, _mark(settlement)].append(receipt.id)
    settled: set[str] = set()
    for (claim, mark), ids in ids_by_claim.items():
        parameters = {"ids": _json(ids), "claim": claim, "mark": mark, "now": now}
        count = connection.execute(SQL["complete"], parameters).rowcount
        connection.execute(SQL["delete_completed"], parameters)
        if count == len(ids):
            settled.update(ids)
    return settled


def _mark(settlement: Settlement) -> str:
    """Return how a claim was settled, as the message's row records it."""
    return f"{settlement.receipt.claim}:{settlement.move}"


def _settle_one(
    connection: sqlite3.Connection, settlement: Settlement, time: Mapping[str, float]
) -> bool:
    """End a claim; return whether it is settled in this way, now or before."""
    parameters = {
        "id": settlement.receipt.id,
        "claim": settlement.receipt.claim,
        "target": settlement.target,
        "mark": _mark(settlement),
        "error": encode_any_error(settlement.error),
        "due": time["now"] + settlement.delay,
        "wakes": time["mono"] + settlement.delay,
        "back": settlement.is_returned,
        "suspect": 0,
        **time,
    }
    if settlement.target == "waiting":
        settled = connection.execute(SQL["requeue"], parameters).rowcount > 0
    elif settled := connection.execute(SQL["finish"], parameters).rowcount > 0:
        connection.execute(SQL["delete_live"], parameters)
    return settled or bool(connection.execute(SQL["was_settled"], parameters).fetchone()[0])


def _end_lapsed(
    connection: sqlite3.Connection, row: Sequence[Any], time: Mapping[str, float]
) -> EndedClaim:
    name, claim, attempt, max_attempts, suspect, session = row
    move = decide_lapse(is_suspect=bool(suspect), attempts=attempt, max_attempts=max_attempts)
    step = TRANSITIONS[move]
    parameters = {
        "id": name,
        "claim": claim,
        "target": step.target,
        "mark": "",
        "error": encode_error(SPARED if step.returns else LAPSED),
        "due": time["now"],
        "wakes": time["mono"],
        "back": step.returns,
        "suspect": 1,
        **time,
    }
    if step.target == "waiting":
        connection.execute(SQL["requeue"], parameters)
    else:
        connection.execute(SQL["finish"], parameters)
        connection.execute(SQL["delete_live"], parameters)
    return EndedClaim(id=name, state=step.target, attempt=attempt, session=session)


def _json(items: list[Any]) -> str:
    return msgspec.json.encode(items).decode()
