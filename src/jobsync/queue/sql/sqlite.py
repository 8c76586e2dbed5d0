"""A queue's messages in an SQLite file.

Delays count by the wall clock, so that they outlast a restart of the machine. Claims count by
the time since boot, which no step of the wall clock touches; those of an earlier boot have
lapsed.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.core.messages import MOVES, MessageState, decide_lapse
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import EndedClaim, NewMessage, Receipt
from jobsync.queue.sql import sqlite_queries as sql
from jobsync.queue.sql.common import (
    LAPSED,
    MOST,
    SPARED,
    ClaimedRows,
    Found,
    SettlementRow,
    SqlBackend,
    as_json,
    refuse,
)
from jobsync.stores.sql import SqliteAccess

__all__ = ["SqliteBackend", "read_clock"]

_ID, _FINISHED = 1, 13
"""Places in a row that somebody looks at."""

_WHICH = "pass a sqlite3 connection to the file that the queue is in"


class SqliteBackend(SqlBackend):
    """Messages in a file.

    Args:
        access: the way to the file.
        queue: its name.
        components: time, randomness and events.
    """

    def __init__(self, access: SqliteAccess, queue: str, components: Components) -> None:
        super().__init__(access, queue, components)
        self._access = access
        self._is_idle = False

    async def _push(self, letters: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(sql.PUSH, self._name(letters, payloads))

        await self._access.write(work, self.topic)
        self._access.wake(self.topic)

    async def _push_within(
        self, connection: object, letters: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise refuse(connection, "is not sqlite3's", _WHICH)
        self._check_file(connection)
        # Otherwise sqlite3 begins one by itself, or every row would be a transaction.
        is_alone = connection.isolation_level is None and not connection.in_transaction
        if is_alone:
            connection.execute("BEGIN IMMEDIATE")
        connection.executemany(sql.PUSH, self._name(letters, payloads))
        if is_alone:
            connection.execute("COMMIT")

    def _check_file(self, connection: sqlite3.Connection) -> None:
        cursor = connection.cursor()
        cursor.row_factory = None
        (_, _, name) = cursor.execute("PRAGMA database_list").fetchone()
        if self._access.path is None or not (name and self._access.path.samefile(name)):
            raise refuse(connection, f"leads to {name or 'memory'}", _WHICH)

    def _name(
        self, letters: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> list[dict[str, Any]]:
        """Give the parameters of a push."""
        now = self._now()
        return [
            {
                "queue": self.queue,
                "id": letter.id,
                "state": "waiting" if letter.delay > 0 else "ready",
                "due": now + letter.delay,
                "payload": payload.decode(),
                "max_attempts": letter.max_attempts,
                "timeout": letter.timeout,
                "now": now,
            }
            for letter, payload in zip(letters, payloads, strict=True)
        ]

    async def _is_there(self, ids: Sequence[str]) -> bool:
        ((there,),) = await self._access.read(sql.PUSHED, {"ids": _json(list(ids))})
        return bool(there)

    async def _claim(
        self, limit: int, claim: str, session: str, visibility: float, *, suspects: bool
    ) -> ClaimedRows:
        named = {"queue": self.queue, "suspects": suspects, "limit": limit}

        def work(connection: sqlite3.Connection) -> ClaimedRows:
            named["now"] = self._now()
            boot, mono = self._since_boot()
            rows = connection.execute(sql.LATE, named).fetchall()
            if not suspects and len(rows) < limit:
                rest = {**named, "limit": limit - len(rows)}
                rows += connection.execute(sql.READY, rest).fetchall()
            if rows:
                taken = {
                    "claim": claim,
                    "session": session,
                    "due": mono + visibility,
                    "boot": boot,
                    "now": named["now"],
                    "positions": _json([row[0] for row in rows]),
                }
                connection.execute(sql.CLAIM, taken)
            outlook = connection.execute(sql.OUTLOOK, named).fetchone()
            return self._look_out([row[1:] for row in sorted(rows)], outlook)

        if self._is_idle:
            # Whoever only looks keeps nobody from writing.
            named["now"] = self._now()
            (outlook,) = await self._access.read(sql.OUTLOOK, named)
            if not outlook[0]:
                return self._look_out([], outlook)
        try:
            taken = await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error
        self._is_idle = len(taken.rows) < limit
        return taken

    def _look_out(self, rows: list[Found], outlook: Sequence[Any]) -> ClaimedRows:
        """Give what was found, and the seconds until something happens by itself."""
        now, (boot, mono) = self._now(), self._since_boot()
        _, suspects, due, suspect_due, lapse, since = outlook
        dues = [each - now for each in (due, suspect_due) if each is not None]
        lapses = None if lapse is None else (lapse - mono if since == boot else 0.0)
        return ClaimedRows(rows, bool(suspects), min(dues, default=None), lapses)

    async def _settle(self, batch: Sequence[SettlementRow]) -> set[str]:
        def work(connection: sqlite3.Connection) -> set[str]:
            now = self._now()
            settled = _complete(connection, batch, now)
            rest = [told for told in batch if told.id not in settled]
            return settled.union(told.id for told in rest if _end(connection, told, now))

        return await self._access.write(work, self.topic)

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Let claims hold on."""

        def work(connection: sqlite3.Connection) -> list[bool]:
            boot, mono = self._since_boot()
            return [
                connection.execute(
                    sql.EXTEND,
                    {"id": each.id, "claim": each.claim, "boot": boot, "due": mono + visibility},
                ).rowcount
                > 0
                for each in receipts
            ]

        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    async def _end_claims(self, dead: Collection[str], keep: Collection[str]) -> list[EndedClaim]:

        def work(connection: sqlite3.Connection) -> list[EndedClaim]:
            now, (boot, mono) = self._now(), self._since_boot()
            named = {
                "queue": self.queue,
                "boot": boot,
                "mono": mono,
                "dead": _json(list(dead)),
                "keep": _json(list(keep)),
                "limit": MOST,
            }
            found = connection.execute(sql.FIND_LAPSED, named).fetchall()
            return [_lapse(connection, row, now) for row in found]

        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    async def holders(self) -> list[str]:
        """Give the sessions that have claimed anything."""
        rows = await self._access.read(sql.HOLDERS, {"queue": self.queue})
        return [session for (session,) in rows]

    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]:
        named = {"queue": self.queue, "state": state, "after": after or "0", "limit": limit}
        return await self._access.read(sql.BROWSE_LIVE, {**named, **read_clock(self._access)})

    async def _browse_finished(self, state: MessageState, after: str, limit: int) -> list[Any]:
        since, _, name = after.partition(" ")
        named = {
            "queue": self.queue,
            "state": state,
            "since": float(since or 0),
            "after": name,
            "limit": limit,
        }
        rows = await self._access.read(sql.BROWSE_FINISHED, {**named, "now": self._now()})
        return [(*row[:-1], f"{row[_FINISHED]!r} {row[_ID]}") for row in rows]

    async def _count(self) -> list[tuple[MessageState, int]]:
        return await self._access.read(sql.COUNT, {"queue": self.queue})

    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int:

        def work(connection: sqlite3.Connection) -> int:
            named = {
                "queue": self.queue,
                "now": self._now(),
                "ids": _json(list(ids or ())),
                "all": ids is None,
                "limit": limit,
            }
            back = [name for (name,) in connection.execute(sql.REDRIVE, named)]
            connection.execute(sql.REMOVE_FINISHED, {"ids": _json(back)})
            return len(back)

        return await self._access.write(work, self.topic)

    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove messages for good."""

        def work(connection: sqlite3.Connection) -> int:
            named = {"queue": self.queue, "states": _json(list(states))}
            statements = (sql.PURGE_LIVE, sql.PURGE_FINISHED)
            return sum(connection.execute(each, named).rowcount for each in statements)

        return await self._access.write(work, self.topic)

    async def pause(self, reason: str = "") -> bool:
        """Let nobody claim."""
        return await self._steer(sql.PAUSE, {"now": self._now(), "reason": reason})

    async def _resume(self) -> bool:
        return await self._steer(sql.RESUME, {})

    async def _steer(self, statement: str, named: Mapping[str, Any]) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            return connection.execute(statement, {**named, "queue": self.queue}).rowcount > 0

        try:
            return await self._access.write(work, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from error

    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int:
        def work(connection: sqlite3.Connection) -> int:
            before = self._now() - older_than
            named = {"queue": self.queue, "state": state, "before": before, "limit": limit}
            return connection.execute(sql.FORGET, named).rowcount

        return await self._access.write(work, self.topic)

    def _now(self) -> float:
        return self._access.clock.wall().seconds

    def _since_boot(self) -> tuple[int, float]:
        return self._access.clock.boot(), self._access.clock.mono().seconds


def read_clock(access: SqliteAccess) -> dict[str, float]:
    """Give the time by which a look tells when claims lapse."""
    clock = access.clock
    return {"now": clock.wall().seconds, "boot": clock.boot(), "mono": clock.mono().seconds}


def _complete(
    connection: sqlite3.Connection, batch: Sequence[SettlementRow], now: float
) -> set[str]:
    """End claims that went well, by two statements each; give the messages where all did."""
    good: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for told in batch:
        if told.target == "completed" and told.error is None:
            good[told.claim, told.mark].append(told.id)
    settled: set[str] = set()
    for (claim, mark), ids in good.items():
        named = {"ids": _json(ids), "claim": claim, "mark": mark, "now": now}
        count = connection.execute(sql.COMPLETE, named).rowcount
        connection.execute(sql.REMOVE_COMPLETED, named)
        if count == len(ids):
            settled.update(ids)
    return settled


def _end(connection: sqlite3.Connection, told: SettlementRow, now: float) -> bool:
    """End a claim; say whether it is settled so, by now or before."""
    named = {**told._asdict(), "now": now, "due": now + told.delay, "suspect": 0}
    if told.target == "waiting":
        done = connection.execute(sql.PUT_BACK, named).rowcount > 0
    elif done := connection.execute(sql.FINISH, named).rowcount > 0:
        connection.execute(sql.REMOVE, named)
    return done or bool(connection.execute(sql.SETTLED, named).fetchone()[0])


def _lapse(connection: sqlite3.Connection, row: Sequence[Any], now: float) -> EndedClaim:
    name, claim, attempt, max_attempts, suspect, session = row
    move = decide_lapse(is_suspect=bool(suspect), attempts=attempt, max_attempts=max_attempts)
    step = MOVES[move]
    named = {
        "id": name,
        "claim": claim,
        "target": step.target,
        "mark": "",
        "error": as_json(SPARED if step.returns else LAPSED),
        "now": now,
        "due": now,
        "back": step.returns,
        "suspect": 1,
    }
    if step.target == "waiting":
        connection.execute(sql.PUT_BACK, named)
    else:
        connection.execute(sql.FINISH, named)
        connection.execute(sql.REMOVE, named)
    return EndedClaim(id=name, state=step.target, attempt=attempt, session=session)


def _json(items: list[Any]) -> str:
    return msgspec.json.encode(items).decode()
