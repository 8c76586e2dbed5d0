"""The queue backend on PostgreSQL, with claims by `FOR UPDATE SKIP LOCKED`.

`jobsync_message` has the messages that wait. A claim moves them into one row of `jobsync_claim`,
which records how each of them is settled; that answers a settlement whose reply was lost. When all
are settled, the row is the record of the completed ones. Cancelled messages and dead letters are
moved to `jobsync_finished`.

A claim usually scans only from the lowest position that an earlier claim found ready. Below it
may be messages that others pushed in a longer transaction, or claimed in one that was rolled
back. A full scan from time to time finds them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection, Connection
from psycopg.errors import UndefinedTable

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.messages import LAPSED, SPARED, MessageState
from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.backend import EndedClaim, NewMessage, Receipt, Settlement
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.message import are_plain
from jobsync.queue.settings import QueueOrder
from jobsync.queue.shared_push import LARGEST_SHARED_PUSH
from jobsync.queue.sql.claims import MAX_CLAIM_BYTES, UnsettledClaims
from jobsync.queue.sql.common import (
    MAX_BATCH,
    ClaimedRows,
    ClaimRequest,
    SqlBackend,
    WantedTasks,
    check_batch,
)
from jobsync.queue.sql.joined_connections import build_connection_error
from jobsync.queue.sql.message_rows import encode_error, find_stored_states
from jobsync.queue.sql.postgres_forgetting import PostgresForgetting
from jobsync.queue.sql.postgres_messages import build_results
from jobsync.queue.sql.postgres_places import (
    PostgresPlaces,
    build_columns,
    find_claims,
    find_ids,
    is_completed,
    run_steps,
    run_steps_blocking,
)
from jobsync.queue.sql.postgres_push import CopyRows, build_parameters
from jobsync.queue.sql.postgres_statements import build_copy, fill_in_schema
from jobsync.queue.sql.postgres_transactions import PostgresTransactions
from jobsync.stores.sql import PostgresAccess, Steps, as_array

__all__ = ["PostgresBackend"]

_FIX = "pass a psycopg connection to the database that the queue is in"

_SINCE = 120.0
"""Seconds to look back for due messages: more than any statement of this library takes."""

_IDLE_SCAN_INTERVAL = 0.5
"""Seconds between full scans while there is nothing to do."""

_BUSY_SCAN_INTERVAL = 5.0
"""Seconds between full scans while there is much to do, if they are cheap."""

_SCAN_SHARE = 50
"""After a slow full scan the next one waits this many times its duration."""

_MIN_COPY = 50
"""From so many messages on, a COPY costs less than an INSERT."""

_MAX_PROMOTED = 1_000
"""How many messages whose delays are over one claim promotes."""

_MAX_GROUPED = 1_000
"""How many claims with groups are remembered."""


class _ScanState(msgspec.Struct):
    """Where the next claim starts, and when the next full scan is due."""

    floor: int = 0
    next_full: Mono = Mono(float("-inf"))
    last_full: Mono = Mono(float("-inf"))


class PostgresBackend(PostgresForgetting, SqlBackend):
    """The messages of a queue in a schema. Its arguments are those of `SqlBackend`."""

    def __init__(
        self,
        access: PostgresAccess,
        queue: str,
        components: Components,
        order: QueueOrder = "fifo",
        limits: QueueLimits = NO_LIMITS,
    ) -> None:
        super().__init__(access, queue, components, order, limits)
        self._access = access
        self._sql = fill_in_schema(access.schema, order)
        self._places = PostgresPlaces(queue, self._sql, limits.group_concurrency)
        self._grouped: dict[str, None] = {}
        """The latest claims of this process with groups."""
        self._copy_statement = build_copy(access.schema)
        self._scans: defaultdict[tuple[Any, bool], _ScanState] = defaultdict(_ScanState)
        """By the tasks of the claims."""
        self._unsettled = UnsettledClaims()
        self.transactions = PostgresTransactions(
            access, self._sql, self.topic, self._unsettled, self._places, self._grouped, limits
        )

    async def push(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str]:
        """Add messages, all or none, except those whose keys others hold."""
        if len(new_messages) <= LARGEST_SHARED_PUSH or not _can_copy(new_messages):
            return await super().push(new_messages)
        check_batch(new_messages)
        await self._send(new_messages, self._copy(CopyRows(self.queue, new_messages)))
        return {}

    async def _push(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        if len(new_messages) >= _MIN_COPY and _can_copy(new_messages):
            await self._copy(CopyRows(self.queue, new_messages, payloads))
            return
        parameters = build_parameters(self.queue, new_messages, payloads)
        name = "push_one" if len(new_messages) == 1 else "push"
        await self._access.run_and_notify(
            self._sql[name], self._sql[f"{name}_and_notify"], parameters, self.topic
        )

    async def _copy(self, rows: CopyRows) -> None:
        await self._access.copy_and_notify(self._copy_statement, rows, self.topic)

    async def _place(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        return await self._access.run_steps(
            lambda: self._places.push(new_messages, payloads), self.topic
        )

    async def _find_holders(self, keys: Sequence[str]) -> Mapping[str, str]:
        parameters = {"queue": self.queue, "keys": as_array(keys)}
        return dict(await self._run("find_holders", parameters))

    async def _push_within(
        self, connection: object, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        steps = self._push_and_notify(new_messages, payloads)
        try:
            match connection:
                case AsyncConnection():
                    return await run_steps(connection, steps)
                case Connection():
                    return await asyncio.to_thread(run_steps_blocking, connection, steps)
                case _:
                    raise build_connection_error(connection, "is not a psycopg connection", _FIX)
        except UndefinedTable as error:
            raise build_connection_error(connection, "is to another database", _FIX) from error

    def _push_and_notify(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Steps[Mapping[str, str]]:
        """Add messages, and notify listeners in the same transaction."""
        notification = {"channel": self._access.channel, "topic": self.topic}
        if not are_plain(new_messages):
            holders = yield from self._places.push(new_messages, payloads)
            yield self._sql["notify_topic"], notification
            return holders
        name = "push_one_and_notify" if len(new_messages) == 1 else "push_and_notify"
        yield (
            self._sql[name],
            {**build_parameters(self.queue, new_messages, payloads), **notification},
        )
        return {}

    async def _exists(self, ids: Sequence[str]) -> bool:
        ((exists,),) = await self._run("exists", find_ids(ids))
        return bool(exists)

    async def _claim(self, request: ClaimRequest) -> ClaimedRows:
        if self.order != "fifo" and not request.suspects:
            await self._promote(request)
        scan, start = self._scans[request.tasks, request.is_plain], self._clock.mono()
        # A limit may leave out messages of a task: what was seen of others says nothing of them.
        has_limits = bool(self.limits.find_limited(request.tasks))
        is_full = request.suspects or has_limits or start >= scan.next_full
        claimed = await self._claim_once(request, scan, is_full=is_full)
        if claimed.rows and request.claim not in self._grouped:
            self._unsettled.add(request.claim, claimed.rows)
        if request.suspects:
            # The next claim must see whether there are more, however old they are.
            scan.next_full = start if claimed.rows else scan.next_full
            return claimed
        if is_full:
            self._schedule_full_scan(scan, start)
        elif not claimed.rows and start - scan.last_full >= _IDLE_SCAN_INTERVAL:
            scan.next_full = start
            return await self._claim(request)
        return claimed

    async def _has_claimable(self, wanted: WantedTasks) -> bool:
        tasks = as_array(wanted.names)
        parameters = {"queue": self.queue, "tasks": tasks, "plain": wanted.is_plain}
        ((found,),) = await self._run_repeatable("has_claimable", parameters)
        return bool(found)

    async def _promote(self, request: ClaimRequest) -> None:
        """Move messages whose delays are over to the places that their order gives them."""
        parameters = {"queue": self.queue, "limit": _MAX_PROMOTED}
        if request.is_plain:
            await self._run_repeatable("promote", parameters)
        if request.tasks:
            tasks = as_array(request.tasks)
            await self._run_repeatable("promote_tasks", {**parameters, "tasks": tasks})

    def _schedule_full_scan(self, scan: _ScanState, start: Mono) -> None:
        now = self._clock.mono()
        scan.last_full = now
        scan.next_full = now + max(_BUSY_SCAN_INTERVAL, _SCAN_SHARE * (now - start))

    async def _claim_once(
        self, request: ClaimRequest, scan: _ScanState, *, is_full: bool
    ) -> ClaimedRows:
        parameters = {
            "queue": self.queue,
            "claim": request.claim,
            "session": request.session,
            "visibility": float(request.visibility),
            "limit": request.limit,
            "suspects": request.suspects,
            "max_bytes": MAX_CLAIM_BYTES,
            "floor": 0 if is_full else scan.floor,
            "since": None if is_full else _SINCE,
        }
        name = "claim"
        if request.tasks or not request.is_plain:
            name = "claim_tasks"
            parameters |= {"tasks": as_array(request.tasks), "plain": request.is_plain}
        most, allowed, wait = request.limit, request.limit, None
        try:
            if self._is_limited(request):
                rows, allowance, wait = await self._access.run_steps(
                    lambda: self._places.claim(name, self.limits, request.tasks, parameters),
                    self.topic,
                )
                most, allowed = allowance.most, allowance.queue.most
            else:
                rows = await self._run(name, parameters)
        except OutcomeUnknown as unknown:
            return await self._find_claimed(request, unknown)
        lowest, found, has_suspects, due, lapse, has_groups = rows[0][:6]
        if lowest is not None:
            scan.floor = lowest
        claimed = [row[6:] for row in rows if row[6] is not None]
        if has_groups:
            self._remember_groups(request.claim)
        more = (allowed == request.limit and most <= found) or found > len(claimed)
        found_rows = ClaimedRows(claimed, has_suspects and allowed > 0, due, lapse, more)
        return found_rows if wait is None else found_rows.limit_due(wait)

    def _remember_groups(self, claim: str) -> None:
        self._grouped[claim] = None
        if len(self._grouped) > _MAX_GROUPED:
            del self._grouped[next(iter(self._grouped))]

    async def _find_claimed(self, request: ClaimRequest, unknown: OutcomeUnknown) -> ClaimedRows:
        """Return the messages of a claim whose reply was lost."""
        try:
            rows = await self._run("find_claimed", {"claim": request.claim})
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from unknown
        if not rows:
            raise Unavailable(self.topic, unknown.detail) from unknown
        return ClaimedRows(
            rows, suspects=False, due=0.0, lapse=request.visibility, more=len(rows) >= request.limit
        )

    async def _settle(self, batch: Sequence[Settlement]) -> set[str]:
        if all(each.result is None for each in batch):
            return await self._settle_plain(batch)
        completed = [each for each in batch if each.move == "complete" and not each.error]
        others = [each for each in batch if each.move != "complete" or each.error]
        settled = await self._complete_with_results(completed)
        try:
            return settled | (await self._settle_plain(others) if others else set())
        except (Misconfigured, Unavailable) as error:
            raise OutcomeUnknown(self.topic, str(error)) from error

    async def _complete_with_results(self, batch: Sequence[Settlement]) -> set[str]:
        """Complete messages, and keep what their handlers returned."""
        for each in batch:
            self._unsettled.remove(each.receipt.claim)
        parameters = {"queue": self.queue, **build_columns(batch), **build_results(batch)}
        return await self._settle_rest(batch, await self._run("complete_with_results", parameters))

    async def _settle_plain(self, batch: Sequence[Settlement]) -> set[str]:
        ids = [settlement.receipt.id for settlement in batch]
        claims = [settlement.receipt.claim for settlement in batch]
        unsettled = [self._unsettled.remove(claim) for claim in dict.fromkeys(claims)]
        if not self._grouped.keys().isdisjoint(claims):
            return await self._settle_groups(batch)
        if not is_completed(batch):
            columns = {**build_columns(batch), "with_groups": False}
            return await self._settle_rest(batch, await self._run("settle", columns))
        if unsettled == [{*ids}]:
            whole = {"claim": claims[0], "count": len(ids)}
            if await self._run("complete_claim", whole):
                return {*ids}
        rows = await self._run("complete", find_claims(ids, claims))
        return await self._settle_rest(batch, rows)

    async def _settle_rest(self, batch: Sequence[Settlement], rows: Sequence[Any]) -> set[str]:
        """Settle what a statement has left alone: claims with groups. Return all that is settled.

        Raises:
            OutcomeUnknown: only the others are certainly settled.
        """
        settled = {name for name, claim in rows if claim is None}
        grouped = {claim for _, claim in rows if claim is not None}
        left = [each for each in batch if each.receipt.claim in grouped]
        try:
            return settled | (await self._settle_groups(left) if left else set())
        except (Misconfigured, Unavailable) as error:
            raise OutcomeUnknown(self.topic, str(error)) from error

    async def _settle_groups(self, batch: Sequence[Settlement]) -> set[str]:
        """Settle messages of claims of which some have groups; let the next ones be heads."""
        columns, results = build_columns(batch), build_results(batch)
        settled = await self._access.run_steps(
            lambda: self._places.settle(columns, results), self.topic
        )
        self._notifications.wake(self.topic)
        return settled

    async def _extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        columns = find_claims(
            [receipt.id for receipt in receipts], [receipt.claim for receipt in receipts]
        )
        parameters = {**columns, "visibility": float(visibility)}
        extended = {name for (name,) in await self._run_repeatable("extend", parameters)}
        return [receipt.id in extended for receipt in receipts]

    async def _end_claims(self, dead: Collection[str], keep: Collection[str]) -> list[EndedClaim]:
        parameters = {
            "queue": self.queue,
            "dead": as_array(list(dead)),
            "keep": as_array(list(keep)),
            "lapsed": encode_error(LAPSED),
            "spared": encode_error(SPARED),
            "limit": MAX_BATCH,
        }
        try:
            rows = await self._access.run_steps(
                lambda: self._places.end_claims(parameters), self.topic
            )
        except OutcomeUnknown as unknown:
            raise Unavailable(self.topic, unknown.detail) from unknown
        return [
            EndedClaim(id=name, state=state, attempt=attempt, session=session)
            for name, state, attempt, session, _ in rows
        ]

    async def list_holders(self) -> list[str]:
        """Return the sessions that hold claims."""
        rows = await self._run_repeatable("list_holders", {"queue": self.queue})
        return [session for (session,) in rows]

    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]:
        states = as_array([*find_stored_states([state])])
        parameters = {"queue": self.queue, "states": states, "after": after, "limit": limit}
        name = "browse_claimed" if state == "claimed" else "browse_live"
        return await self._run_repeatable(name, parameters)

    async def _browse_finished(self, state: MessageState, after: str, limit: int) -> list[Any]:
        parameters = {"queue": self.queue, "state": state, "after": after, "limit": limit}
        name = "browse_completed" if state == "completed" else "browse_finished"
        return await self._run_repeatable(name, parameters)

    async def _count(self) -> list[tuple[MessageState, int]]:
        return await self._run_repeatable("count", {"queue": self.queue})

    async def _find_newer(self) -> list[tuple[int, int]]:
        return await self._run_repeatable("find_newer", {"queue": self.queue})

    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int:
        return await self._access.run_steps(lambda: self._places.redrive(ids, limit), self.topic)

    async def _purge(self, states: Collection[MessageState]) -> int:
        stored = find_stored_states(states)
        return await self._access.run_steps(lambda: self._places.purge(stored), self.topic)

    async def _pause(self, reason: str) -> bool:
        return bool(await self._run("pause", {"queue": self.queue, "reason": reason}))

    async def _resume(self) -> bool:
        return bool(await self._run("resume", {"queue": self.queue}))

    async def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Any]:
        return await self._access.run(self._sql[name], parameters, self.topic)

    async def _run_repeatable(self, name: str, parameters: Mapping[str, Any]) -> list[Any]:
        """Run a statement that may be run again, whatever its outcome was."""
        try:
            return await self._run(name, parameters)
        except OutcomeUnknown as unknown:
            raise Unavailable(self.topic, unknown.detail) from unknown


def _can_copy(new_messages: Sequence[NewMessage]) -> bool:
    """Whether messages can be added by a COPY: all can be claimed at once."""
    return are_plain(new_messages) and not any(
        each.delay or each.at is not None for each in new_messages
    )
