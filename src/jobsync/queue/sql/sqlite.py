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
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.message import are_plain
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.claims import ANSWERS_TTL, UnsettledClaims
from jobsync.queue.sql.common import (
    MAX_BATCH,
    ClaimedRows,
    ClaimRequest,
    SqlBackend,
    WantedTasks,
)
from jobsync.queue.sql.joined_connections import (
    SQLITE_FIX,
    build_connection_error,
    check_file,
    run_joined,
)
from jobsync.queue.sql.message_rows import ClaimedRow, find_stored_states
from jobsync.queue.sql.sqlite_claims import (
    complete_claim,
    end_lapsed,
    extend_claim,
    insert_claim,
    settle_claim,
)
from jobsync.queue.sql.sqlite_directory import find_rows, read_clock
from jobsync.queue.sql.sqlite_forgetting import forget_completed
from jobsync.queue.sql.sqlite_messages import SqliteMessageOperations, forget_results
from jobsync.queue.sql.sqlite_places import (
    SQL,
    SqlitePlaces,
    read_delay_clock,
    run_steps,
    to_json,
)
from jobsync.queue.sql.sqlite_selection import read_outlook, select_messages
from jobsync.queue.sql.sqlite_transactions import open_transactions
from jobsync.stores.sql import SqliteAccess

__all__ = ["SqliteBackend"]

T = TypeVar("T")

_ID, _FINISHED = 1, 13
"""Indices in the row of a message for display."""


_LOOKS = ("task_outlook", "has_waiting_tasks"), ("outlook", "has_waiting")
"""The statements that look for messages of tasks, and only for those without one."""


class SqliteBackend(SqliteMessageOperations, SqlBackend):
    """The messages of a queue in a file. Its arguments are those of `SqlBackend`."""

    def __init__(
        self,
        access: SqliteAccess,
        queue: str,
        components: Components,
        order: QueueOrder = "fifo",
        limits: QueueLimits = NO_LIMITS,
    ) -> None:
        super().__init__(access, queue, components, order, limits)
        self._access = access
        self._is_idle = False
        self._has_foreign: defaultdict[WantedTasks, bool] = defaultdict(lambda: True)
        """Whether there may be delays of another boot, by what the claims want."""
        self._has_foreign_claims = True
        """Whether there may be claims of another boot, which have lapsed."""
        self._unsettled = UnsettledClaims()
        self.transactions = open_transactions(
            access, self.topic, self._unsettled, self._read_delay_time, limits.group_concurrency
        )

    async def _push(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(SQL["push"], self._build_parameters(new_messages, payloads))

        await self._access.write(work, self.topic)
        self._access.wake(self.topic)

    async def _push_within(
        self, connection: object, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        if not isinstance(connection, sqlite3.Connection):
            raise build_connection_error(connection, "is not a sqlite3 connection", SQLITE_FIX)
        check_file(connection, self._access.path)

        def push() -> Mapping[str, str]:
            if not are_plain(new_messages):
                return self._place_within(connection, new_messages, payloads)
            connection.executemany(SQL["push"], self._build_parameters(new_messages, payloads))
            return {}

        return run_joined(connection, push)

    async def _place(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        return await self._access.write(
            lambda connection: self._place_within(connection, new_messages, payloads), self.topic
        )

    def _place_within(
        self,
        connection: sqlite3.Connection,
        new_messages: Sequence[NewMessage],
        payloads: Sequence[bytes],
    ) -> Mapping[str, str]:
        return run_steps(connection, self._places().push(new_messages, payloads))

    def _places(self) -> SqlitePlaces:
        """Return the statements of this time."""
        time = self._read_delay_time()
        return SqlitePlaces(self.queue, time, self.limits.group_concurrency)

    async def _find_holders(self, keys: Sequence[str]) -> Mapping[str, str]:
        parameters = {"queue": self.queue, "keys": to_json(keys)}
        return dict(await self._access.read(SQL["find_holders"], parameters))

    def _build_parameters(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> list[dict[str, Any]]:
        now, (boot, mono) = self._now(), read_delay_clock(self._access.clock)
        return [
            {
                "queue": self.queue,
                "id": message.id,
                "state": message.lane
                + ("waiting" if (delay := message.find_delay(now)) > 0 else "ready"),
                "due": now + delay,
                "boot": boot if delay > 0 else 0,
                "wakes": mono + delay if delay > 0 else None,
                "delay": delay,
                "payload": payload.decode(),
                "max_attempts": message.max_attempts,
                "timeout": message.timeout,
                "task": message.task,
                "format": message.format,
                "now": now,
            }
            for message, payload in zip(new_messages, payloads, strict=True)
        ]

    async def _exists(self, ids: Sequence[str]) -> bool:
        ((exists,),) = await self._access.read(SQL["exists"], {"ids": to_json(list(ids))})
        return bool(exists)

    async def _claim(self, request: ClaimRequest) -> ClaimedRows:
        counted, tasks = self.limits if self._is_limited(request) else None, request.tasks
        wanted = WantedTasks(tasks, request.is_plain)
        parameters = {
            **self._name_wanted(wanted),
            "suspects": request.suspects,
            "limit": request.limit,
        }
        look, find_waiting = _LOOKS[wanted == WantedTasks()]
        await self._look_for_foreign_claims()

        def work(connection: sqlite3.Connection) -> ClaimedRows:
            parameters.update(self._read_delay_time())
            ((has_waiting,),) = connection.execute(SQL[find_waiting], parameters)
            if has_waiting and self._has_foreign[wanted]:
                connection.execute(SQL["adopt"], {**parameters, "limit": MAX_BATCH})
            selection = select_messages(
                connection, self._places(), parameters, self.order, counted, tasks, has_waiting
            )
            rows = selection.rows
            if rows:
                boot, mono = self._since_boot()
                values = {**parameters, "due": mono + request.visibility, "boot": boot}
                insert_claim(connection, request, rows, values)
            allowed = {**parameters, "tasks": selection.tasks}
            outlook = read_outlook(connection, look if has_waiting else None, allowed)
            found = [row[1:10] for row in rows]
            self._has_foreign[wanted] = outlook[-1]
            claimed = self._build_result(found, outlook, is_more=selection.is_full)
            if selection.most == 0:
                # A limit is reached: whoever asks for suspects meanwhile gets none.
                claimed = claimed._replace(suspects=False)
            return claimed if selection.wait is None else claimed.limit_due(selection.wait)

        if self._is_idle:
            # A read blocks no writer.
            parameters.update(self._read_delay_time())
            (outlook,) = await self._access.read(SQL[look], parameters)
            self._has_foreign[wanted] = outlook[-1]
            claimed = self._build_result([], outlook, is_more=False)
            # Whether a limit keeps suspects from being claimed is seen by a claim only.
            if not (outlook[0] or outlook[-1] or (counted is not None and claimed.suspects)):
                return claimed
        claimed = await self._write_repeatable(work)
        self._is_idle = not claimed.more
        if claimed.rows:
            self._unsettled.add(request.claim, claimed.rows)
        return claimed

    async def _has_claimable(self, wanted: WantedTasks) -> bool:
        look, _ = _LOOKS[wanted == WantedTasks()]
        parameters = {**self._name_wanted(wanted), **self._read_delay_time(), "suspects": False}
        ((has_others, has_suspects, *_),) = await self._access.read(SQL[look], parameters)
        return bool(has_others or has_suspects)

    def _name_wanted(self, wanted: WantedTasks) -> dict[str, Any]:
        return {"queue": self.queue, "tasks": to_json(wanted.names), "plain": wanted.is_plain}

    async def _look_for_foreign_claims(self) -> None:
        """Look until there are none: no others follow. Newer ones may seem to lapse before them."""
        if self._has_foreign_claims:
            parameters = {"queue": self.queue, "boot": self._since_boot()[0]}
            ((found,),) = await self._access.read(SQL["has_foreign_claims"], parameters)
            self._has_foreign_claims = bool(found)

    def _build_result(
        self, rows: list[ClaimedRow], outlook: Sequence[Any], *, is_more: bool
    ) -> ClaimedRows:
        (boot, mono), (_, delay_now) = self._since_boot(), read_delay_clock(self._access.clock)
        _, suspects, due, suspect_due, lapse, lapse_boot, has_foreign = outlook
        delays = [time - delay_now for time in (due, suspect_due) if time is not None]
        if has_foreign:
            delays.append(0.0)
        is_over = lapse_boot != boot or self._has_foreign_claims
        lapses_in = None if lapse is None else (0.0 if is_over else lapse - mono)
        return ClaimedRows(rows, bool(suspects), min(delays, default=None), lapses_in, is_more)

    async def _settle(self, batch: Sequence[Settlement]) -> set[str]:
        parts: defaultdict[str, list[Settlement]] = defaultdict(list)
        for settlement in batch:
            parts[settlement.receipt.claim].append(settlement)
        whole = {
            claim
            for claim, part in parts.items()
            if self._unsettled.remove(claim) == {each.receipt.id for each in part}
            and all(each.move == "complete" and not each.error for each in part)
            and all(each.result is None for each in part)
        }
        corrupt: list[Corrupt] = []
        most_heads = self.limits.group_concurrency

        def work(connection: sqlite3.Connection) -> set[str]:
            time = self._read_delay_time()
            settled: set[str] = set()
            for claim, part in parts.items():
                if claim in whole and complete_claim(connection, claim, len(part), time["now"]):
                    settled.update(each.receipt.id for each in part)
                    continue
                try:
                    settled |= settle_claim(connection, claim, part, time, most_heads)
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
        most_heads = self.limits.group_concurrency

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
                    ended += end_lapsed(connection, row, keep, dead, time, most_heads)
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
        states = to_json(find_stored_states([state]))
        parameters = {"queue": self.queue, "states": states, "after": after or "0", "limit": limit}
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
        return await self._access.write(
            lambda connection: run_steps(connection, self._places().redrive(ids, limit)),
            self.topic,
        )

    async def _purge(self, states: Collection[MessageState]) -> int:

        def work(connection: sqlite3.Connection) -> int:
            parameters = {
                "queue": self.queue,
                "states": to_json(find_stored_states(states)),
                "now": self._now(),
            }
            live = connection.execute(SQL["purge_live"], parameters).fetchall()
            ended = [group for (group,) in live if group is not None]
            purged = len(live) + connection.execute(SQL["purge_finished"], parameters).rowcount
            claimed, completed = connection.execute(SQL["count_in_claims"], parameters).fetchone()
            if "claimed" in states:
                purged += claimed
                groups = connection.execute(SQL["list_claimed_groups"], parameters)
                ended += [group for (group,) in groups]
                numbers = connection.execute(SQL["purge_claimed"], parameters).fetchall()
                for (number,) in numbers:
                    connection.execute(SQL["delete_payloads"], {"number": number})
            if "completed" in states:
                purged += completed
                connection.execute(SQL["purge_completed"], parameters)
                connection.execute(SQL["delete_results"], parameters)
            run_steps(connection, self._places().release(ended))
            return purged

        return await self._access.write(work, self.topic)

    async def _pause(self, reason: str) -> bool:
        return await self._set_pause(SQL["pause"], {"now": self._now(), "reason": reason})

    async def _resume(self) -> bool:
        return await self._set_pause(SQL["resume"], {})

    async def _set_pause(self, statement: str, parameters: Mapping[str, Any]) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            return connection.execute(statement, {**parameters, "queue": self.queue}).rowcount > 0

        return await self._access.write(work, self.topic)

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
