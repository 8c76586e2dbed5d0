"""The queue backend on SQLite. A claim is one row, see `sqlite_claims`.

Claims and delays are counted by the time since boot, which all processes on the file share, and
which no change of the wall clock affects. Claims of an earlier boot have lapsed. What is left of a
delay of an earlier boot is computed once from the wall clock, the only one that survives a reboot,
and is never more than the whole delay. A system without an id of the boot counts delays by the wall
clock.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from jobsync.components import Components
from jobsync.core.messages import MessageState
from jobsync.errors import Corrupt, OutcomeUnknown, Unavailable
from jobsync.queue.backend import EndedClaim, NewMessage, Receipt, Settlement
from jobsync.queue.sql.claims import ANSWERS_TTL, MAX_CLAIM_BYTES, UnsettledClaims
from jobsync.queue.sql.common import (
    MAX_BATCH,
    ClaimedRows,
    ClaimRequest,
    SqlBackend,
    build_connection_error,
)
from jobsync.queue.sql.message_rows import ClaimedRow
from jobsync.queue.sql.sqlite_claims import (
    SQL,
    complete_claim,
    end_lapsed,
    extend_claim,
    insert_claim,
    settle_claim,
    to_json,
)
from jobsync.queue.sql.sqlite_forgetting import forget_completed
from jobsync.queue.sql.sqlite_messages import SqliteMessageOperations, forget_results
from jobsync.queue.sql.sqlite_reading import find_rows, read_clock, read_delay_clock
from jobsync.stores.sql import SqliteAccess

__all__ = ["SQL", "SqliteBackend"]

T = TypeVar("T")

_ID, _FINISHED = 1, 13
"""Indices in the row of a message for display."""

_FIX = "pass a sqlite3 connection to the file that the queue is in"


class SqliteBackend(SqliteMessageOperations, SqlBackend):
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
        self._unsettled = UnsettledClaims()

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
        now, (boot, mono) = self._now(), read_delay_clock(self._access.clock)
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
        ((exists,),) = await self._access.read(SQL["exists"], {"ids": to_json(list(ids))})
        return bool(exists)

    async def _claim(self, request: ClaimRequest) -> ClaimedRows:
        tasks = request.tasks
        parameters: dict[str, Any] = {
            "queue": self.queue,
            "suspects": request.suspects,
            "limit": request.limit,
            "tasks": None if tasks is None else to_json(sorted(tasks)),
        }

        def work(connection: sqlite3.Connection) -> ClaimedRows:
            parameters.update(self._read_delay_time())
            ((has_waiting,),) = connection.execute(SQL["has_waiting"], parameters)
            if has_waiting and self._has_foreign:
                connection.execute(SQL["adopt"], {**parameters, "limit": MAX_BATCH})
            rows, is_full = _select(connection, parameters, has_waiting=has_waiting)
            if rows:
                boot, mono = self._since_boot()
                values = {**parameters, "due": mono + request.visibility, "boot": boot}
                insert_claim(connection, request, rows, values)
            if has_waiting:
                outlook = connection.execute(SQL["outlook"], parameters).fetchone()
            else:
                lapse = connection.execute(SQL["find_next_lapse"], parameters).fetchone()
                outlook = (False, False, None, None, *(lapse or (None, None)), False)
            return self._build_result([row[1:9] for row in rows], outlook, is_more=is_full)

        if self._is_idle:
            # A read blocks no writer.
            parameters.update(self._read_delay_time())
            (outlook,) = await self._access.read(SQL["outlook"], parameters)
            claimed = self._build_result([], outlook, is_more=False)
            if not (outlook[0] or self._has_foreign):
                return claimed
        claimed = await self._write_repeatable(work)
        self._is_idle = not claimed.more
        if claimed.rows:
            self._unsettled.add(request.claim, claimed.rows)
        return claimed

    def _build_result(
        self, rows: list[ClaimedRow], outlook: Sequence[Any], *, is_more: bool
    ) -> ClaimedRows:
        (boot, mono), (_, delay_now) = self._since_boot(), read_delay_clock(self._access.clock)
        _, suspects, due, suspect_due, lapse, lapse_boot, self._has_foreign = outlook
        delays = [time - delay_now for time in (due, suspect_due) if time is not None]
        if self._has_foreign:
            delays.append(0.0)
        lapses_in = None if lapse is None else (lapse - mono if lapse_boot == boot else 0.0)
        return ClaimedRows(rows, bool(suspects), min(delays, default=None), lapses_in, is_more)

    async def _settle(self, batch: Sequence[Settlement]) -> set[str]:
        parts: defaultdict[str, list[Settlement]] = defaultdict(list)
        for settlement in batch:
            parts[settlement.receipt.claim].append(settlement)
        whole = {
            claim
            for claim, part in parts.items()
            if self._unsettled.remove(claim) == {each.receipt.id for each in part}
            and all(
                each.move == "complete" and not each.error and each.result is None for each in part
            )
        }
        corrupt: list[Corrupt] = []

        def work(connection: sqlite3.Connection) -> set[str]:
            time = self._read_delay_time()
            settled: set[str] = set()
            for claim, part in parts.items():
                if claim in whole and complete_claim(connection, claim, len(part), time["now"]):
                    settled.update(each.receipt.id for each in part)
                    continue
                try:
                    settled |= settle_claim(connection, claim, part, time)
                except Corrupt as error:
                    corrupt.append(error)
            return settled

        settled = await self._access.write(work, self.topic)
        self._report(corrupt)
        return settled

    async def _extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        ids: defaultdict[str, set[str]] = defaultdict(set)
        for receipt in receipts:
            ids[receipt.claim].add(receipt.id)
        corrupt: list[Corrupt] = []

        def work(connection: sqlite3.Connection) -> set[tuple[str, str]]:
            boot, mono = self._since_boot()
            extended: set[tuple[str, str]] = set()
            for claim, names in ids.items():
                try:
                    found = extend_claim(connection, claim, names, (boot, mono + visibility))
                except Corrupt as error:
                    corrupt.append(error)
                else:
                    extended.update((claim, name) for name in found)
            return extended

        extended = await self._write_repeatable(work)
        self._report(corrupt)
        return [(receipt.claim, receipt.id) in extended for receipt in receipts]

    async def _end_claims(self, dead: Collection[str], keep: Collection[str]) -> list[EndedClaim]:
        corrupt: list[Corrupt] = []

        def work(connection: sqlite3.Connection) -> list[EndedClaim]:
            boot, mono = self._since_boot()
            parameters = {
                "queue": self.queue,
                "boot": boot,
                "mono": mono,
                "dead": to_json(list(dead)),
                "limit": MAX_BATCH,
            }
            time = {**self._read_delay_time(), "since_boot": boot, "since": mono}
            ended: list[EndedClaim] = []
            for row in connection.execute(SQL["find_lapsed"], parameters).fetchall():
                try:
                    ended += end_lapsed(connection, row, keep, dead, time)
                except Corrupt as error:
                    corrupt.append(error)
                    connection.execute(SQL["abandon"], {"number": row[0]})
                if len(ended) >= MAX_BATCH:
                    break
            return ended

        ended = await self._write_repeatable(work)
        self._report(corrupt)
        return ended

    async def _write_repeatable(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work that may be run again, whatever its outcome was."""
        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    def _report(self, corrupt: Sequence[Corrupt]) -> None:
        for error in corrupt:
            self._corruption_log.report(error)

    async def list_holders(self) -> list[str]:
        """Return the sessions that hold claims."""
        rows = await self._access.read(SQL["list_holders"], {"queue": self.queue})
        return [session for (session,) in rows]

    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]:
        parameters = {"queue": self.queue, "state": state, "after": after or "0", "limit": limit}
        query = SQL["browse_claimed" if state == "claimed" else "browse_live"]
        return await self._access.read(query, {**parameters, **read_clock(self._access)})

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
        query = SQL["browse_completed" if state == "completed" else "browse_finished"]
        rows = await self._access.read(query, parameters)
        return [(*row[:-1], f"{row[_FINISHED]!r} {row[_ID]}") for row in rows]

    async def _count(self) -> list[tuple[MessageState, int]]:
        return await self._access.read(SQL["count"], {"queue": self.queue})

    async def _find(self, ids: Sequence[str]) -> Sequence[Sequence[Any]]:
        return await find_rows(self._access, ids)

    async def _find_newer(self) -> list[tuple[int, int]]:
        return await self._access.read(SQL["find_newer"], {"queue": self.queue})

    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int:

        def work(connection: sqlite3.Connection) -> int:
            parameters = {
                "queue": self.queue,
                "ids": to_json(list(ids or ())),
                "all": ids is None,
                "limit": limit,
                **self._read_delay_time(),
            }
            redriven = [name for (name,) in connection.execute(SQL["redrive"], parameters)]
            connection.execute(SQL["delete_finished"], {"ids": to_json(redriven)})
            return len(redriven)

        return await self._access.write(work, self.topic)

    async def _purge(self, states: Collection[MessageState]) -> int:

        def work(connection: sqlite3.Connection) -> int:
            parameters = {
                "queue": self.queue,
                "states": to_json(list(states)),
                "now": self._now(),
            }
            statements = (SQL["purge_live"], SQL["purge_finished"])
            purged = sum(connection.execute(text, parameters).rowcount for text in statements)
            claimed, completed = connection.execute(SQL["count_in_claims"], parameters).fetchone()
            if "claimed" in states:
                purged += claimed
                numbers = connection.execute(SQL["purge_claimed"], parameters).fetchall()
                for (number,) in numbers:
                    connection.execute(SQL["delete_payloads"], {"number": number})
            if "completed" in states:
                purged += completed
                connection.execute(SQL["purge_completed"], parameters)
                connection.execute(SQL["delete_results"], parameters)
            return purged

        return await self._access.write(work, self.topic)

    async def _pause(self, reason: str) -> bool:
        return await self._set_pause(SQL["pause"], {"now": self._now(), "reason": reason})

    async def _resume(self) -> bool:
        return await self._set_pause(SQL["resume"], {})

    async def _set_pause(self, statement: str, parameters: Mapping[str, Any]) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            return connection.execute(statement, {**parameters, "queue": self.queue}).rowcount > 0

        return await self._write_repeatable(work)

    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int:
        now = self._now()
        parameters = {
            "queue": self.queue,
            "state": state,
            "before": now - older_than,
            "answered": now - max(older_than, ANSWERS_TTL),
            "limit": limit,
            "now": now,
        }

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            count = connection.execute(SQL["forget"], parameters).rowcount
            if state != "completed" or count >= limit:
                return count, 0
            count += forget_completed(connection, parameters)
            return count, forget_results(connection, parameters) if count < limit else 0

        def forget_more(connection: sqlite3.Connection) -> int:
            return forget_results(connection, parameters)

        count, results = await self._access.write(work, self.topic)
        while results >= limit:
            results = await self._access.write(forget_more, self.topic)
        while state == "completed" and await self._forget_answers(parameters) >= limit:
            pass
        return count

    async def _forget_answers(self, parameters: Mapping[str, Any]) -> int:
        """Delete claims that nobody asks about; return how many."""

        def work(connection: sqlite3.Connection) -> int:
            return connection.execute(SQL["forget_answers"], parameters).rowcount

        return await self._access.write(work, self.topic)

    def _now(self) -> float:
        return self._access.clock.wall().seconds

    def _read_delay_time(self) -> dict[str, float]:
        """Return the parameters of statements on delays: wall time, boot, and time since boot."""
        boot, mono = read_delay_clock(self._access.clock)
        return {"now": self._now(), "boot": boot, "mono": mono}

    def _since_boot(self) -> tuple[int, float]:
        return self._access.clock.boot(), self._access.clock.mono().seconds


def _select(
    connection: sqlite3.Connection, parameters: Mapping[str, Any], *, has_waiting: bool
) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the messages to claim, in their order, and whether there may be more."""
    rows: list[tuple[Any, ...]] = []
    limit, size = parameters["limit"], 0
    names = ["select_waiting"] if has_waiting else []
    if not parameters["suspects"]:
        names.append("select_ready")
    for name in names:
        left = {**parameters, "limit": limit - len(rows)}
        for row in connection.execute(SQL[name], left):
            rows.append(row)
            size += len(row[2]) + len(row[10])
            if size >= MAX_CLAIM_BYTES or len(rows) == limit:
                return sorted(rows), True
    return sorted(rows), False
