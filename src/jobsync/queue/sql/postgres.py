"""A queue's messages in a PostgreSQL database, claimed by `FOR UPDATE SKIP LOCKED`.

A claim looks only where something can be: not below the lowest position that it found
ready before. What others pushed in a transaction that lasted longer, or had claimed in one
that was undone, stands below; a look at everything, now and then, finds that.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection, Connection
from psycopg.errors import UndefinedTable

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.messages import MessageState
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import EndedClaim, NewMessage, Receipt
from jobsync.queue.sql.common import (
    LAPSED,
    MOST,
    SPARED,
    ClaimedRows,
    SettlementRow,
    SqlBackend,
    as_json,
    refuse,
)
from jobsync.queue.sql.postgres_queries import MessageStatements
from jobsync.stores.sql import PostgresAccess, as_array

__all__ = ["PostgresBackend"]

_WHICH = "pass a psycopg connection to the database that the queue is in"

_SINCE_EVER = 3e9
"""Seconds: longer ago than any message was due."""

_SINCE = 120.0
"""Seconds to look back for what is due: more than any statement of this library takes."""

_LOOK_AGAIN = 0.5
"""Seconds between looks at everything while there is nothing to do."""

_LOOK_AT_ALL = 5.0
"""Seconds between looks at everything while there is much to do, if they are cheap."""

_SHARE = 50
"""A look at everything that took long is followed by this many times as long without."""


class _Floor(msgspec.Struct):
    """Below what nothing is expected, and when everything is to be looked at again."""

    position: int = 0
    look_at_all: Mono = Mono(float("-inf"))
    looked: Mono = Mono(float("-inf"))


class PostgresBackend(SqlBackend):
    """Messages in a schema.

    Args:
        access: the way to the tables.
        queue: its name.
        components: time, randomness and events.
    """

    def __init__(self, access: PostgresAccess, queue: str, components: Components) -> None:
        super().__init__(access, queue, components)
        self._access = access
        self._sql = MessageStatements.within(access.schema)
        self._floor = _Floor()

    async def _push(self, letters: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        named = self._name(letters, payloads)
        if len(letters) == 1:
            quietly, loudly = self._sql.push_one, self._sql.push_one_loudly
        else:
            quietly, loudly = self._sql.push, self._sql.push_loudly
        await self._access.run_and_notify(quietly, loudly, named, self.topic)

    async def _push_within(
        self, connection: object, letters: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None:
        loudly = self._sql.push_one_loudly if len(letters) == 1 else self._sql.push_loudly
        statement = loudly.encode()
        notice = {"channel": self._access.channel, "topic": self.topic}
        named = {**self._name(letters, payloads), **notice}
        try:
            match connection:
                case AsyncConnection():
                    await connection.execute(statement, named)
                case Connection():
                    await asyncio.to_thread(connection.execute, statement, named)
                case _:
                    raise refuse(connection, "is not psycopg's", _WHICH)
        except UndefinedTable as error:
            raise refuse(connection, "leads to another database", _WHICH) from error

    def _name(self, letters: Sequence[NewMessage], payloads: Sequence[bytes]) -> dict[str, Any]:
        """Give the parameters of a push: of one message, or of many."""
        if len(letters) == 1:
            (letter,), (payload,) = letters, payloads
            return {
                "queue": self.queue,
                "id": letter.id,
                "payload": payload.decode(),
                "delay": float(letter.delay),
                "max_attempts": letter.max_attempts,
                "timeout": letter.timeout,
            }
        return {
            "queue": self.queue,
            "ids": as_array([each.id for each in letters]),
            "payloads": as_array([payload.decode() for payload in payloads]),
            "delays": as_array([float(each.delay) for each in letters]),
            "max_attempts": as_array([each.max_attempts for each in letters]),
            "timeouts": as_array([each.timeout for each in letters]),
        }

    async def _is_there(self, ids: Sequence[str]) -> bool:
        named = {"ids": as_array(ids)}
        ((there,),) = await self._access.run(self._sql.pushed, named, self.topic)
        return bool(there)

    async def _claim(
        self, limit: int, claim: str, session: str, visibility: float, *, suspects: bool
    ) -> ClaimedRows:
        begun = self._clock.mono()
        whole = suspects or begun >= self._floor.look_at_all
        taken = await self._look(limit, claim, session, visibility, suspects=suspects, whole=whole)
        if suspects:
            return taken
        if whole:
            self._note_look(begun)
        elif not taken.rows and begun - self._floor.looked >= _LOOK_AGAIN:
            self._floor.look_at_all = begun
            return await self._claim(limit, claim, session, visibility, suspects=False)
        return taken

    def _note_look(self, begun: Mono) -> None:
        now = self._clock.mono()
        self._floor.looked = now
        self._floor.look_at_all = now + max(_LOOK_AT_ALL, _SHARE * (now - begun))

    async def _look(
        self,
        limit: int,
        claim: str,
        session: str,
        visibility: float,
        *,
        suspects: bool,
        whole: bool,
    ) -> ClaimedRows:
        named = {
            "queue": self.queue,
            "claim": claim,
            "session": session,
            "visibility": float(visibility),
            "limit": limit,
            "suspects": suspects,
            "floor": 0 if whole else self._floor.position,
            "since": _SINCE_EVER if whole else _SINCE,
        }
        try:
            rows = await self._access.run(self._sql.claim, named, self.topic)
        except OutcomeUnknown as unknown:
            return await self._find_claimed(claim, visibility, unknown)
        lowest, more, due, lapse = rows[0][:4]
        if lowest is not None:
            self._floor.position = lowest
        found = [row[5:] for row in rows if row[4] is not None]
        return ClaimedRows(found, more, due, lapse)

    async def _find_claimed(
        self, claim: str, visibility: float, unknown: OutcomeUnknown
    ) -> ClaimedRows:
        """Give what a claim has brought whose reply was lost."""
        named = {"queue": self.queue, "claim": claim}
        try:
            rows = await self._access.run(self._sql.claimed, named, self.topic)
        except OutcomeUnknown as error:
            raise Unavailable(self.topic, error.detail) from unknown
        if not rows:
            raise Unavailable(self.topic, unknown.detail) from unknown
        return ClaimedRows([row[1:] for row in rows], suspects=False, due=0.0, lapse=visibility)

    async def _settle(self, batch: Sequence[SettlementRow]) -> set[str]:
        columns = {
            "ids": as_array([each.id for each in batch]),
            "claims": as_array([each.claim for each in batch]),
            "targets": as_array([each.target for each in batch]),
            "marks": as_array([each.mark for each in batch]),
            "delays": as_array([float(each.delay) for each in batch]),
            "returns": as_array([each.back for each in batch]),
            "errors": as_array([each.error for each in batch]),
        }
        settled = {
            name for (name,) in await self._access.run(self._sql.settle, columns, self.topic)
        }
        if left := [each for each in batch if each.id not in settled]:
            named = {
                "ids": as_array([each.id for each in left]),
                "marks": as_array([each.mark for each in left]),
            }
            before = await self._access.run(self._sql.settled, named, self.topic)
            settled.update(name for (name,) in before)
        return settled

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Let claims hold on."""
        named = {
            "ids": as_array([each.id for each in receipts]),
            "claims": as_array([each.claim for each in receipts]),
            "visibility": float(visibility),
        }
        extended = {name for (name,) in await self._try(self._sql.extend, named)}
        return [each.id in extended for each in receipts]

    async def _end_claims(self, dead: Collection[str], keep: Collection[str]) -> list[EndedClaim]:
        named = {
            "queue": self.queue,
            "dead": as_array(list(dead)),
            "keep": as_array(list(keep)),
            "lapsed": as_json(LAPSED),
            "spared": as_json(SPARED),
            "limit": MOST,
        }
        return [
            EndedClaim(id=name, state=state, attempt=attempt, session=session)
            for name, state, attempt, session in await self._try(self._sql.end_claims, named)
        ]

    async def holders(self) -> list[str]:
        """Give the sessions that have claimed anything."""
        rows = await self._try(self._sql.holders, {"queue": self.queue})
        return [session for (session,) in rows]

    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]:
        named = {"queue": self.queue, "state": state, "after": after, "limit": limit}
        return await self._try(self._sql.browse_live, named)

    async def _browse_finished(self, state: MessageState, after: str, limit: int) -> list[Any]:
        named = {"queue": self.queue, "state": state, "after": after, "limit": limit}
        return await self._try(self._sql.browse_finished, named)

    async def _count(self) -> list[tuple[MessageState, int]]:
        return await self._try(self._sql.count, {"queue": self.queue})

    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int:
        named = {
            "queue": self.queue,
            "ids": as_array(list(ids or ())),
            "all": ids is None,
            "limit": limit,
        }
        ((count,),) = await self._access.run(self._sql.redrive, named, self.topic)
        return int(count)

    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove messages for good."""
        named = {"queue": self.queue, "states": as_array(list(states))}
        ((count,),) = await self._access.run(self._sql.purge, named, self.topic)
        return int(count)

    async def pause(self, reason: str = "") -> bool:
        """Let nobody claim."""
        named = {"queue": self.queue, "reason": reason}
        return bool(await self._try(self._sql.pause, named))

    async def _resume(self) -> bool:
        return bool(await self._try(self._sql.resume, {"queue": self.queue}))

    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int:
        named = {
            "queue": self.queue,
            "state": state,
            "older_than": float(older_than),
            "limit": limit,
        }
        ((count,),) = await self._access.run(self._sql.forget, named, self.topic)
        return int(count)

    async def _try(self, statement: str, parameters: Mapping[str, Any]) -> list[Any]:
        """Run what may be run again, whatever became of it."""
        try:
            return await self._access.run(statement, parameters, self.topic)
        except OutcomeUnknown as unknown:
            raise Unavailable(self.topic, unknown.detail) from unknown
