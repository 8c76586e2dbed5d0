"""A queue's messages as rows of an SQL database: what both databases have in common.

A batch is one statement, or one transaction. Claims are judged by the database's clock. A
settlement whose reply was lost is sent again until an answer comes: the row, or what is left
of it in the table of what is finished, remembers how its latest claims were settled.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.core.codec import decode, encode
from jobsync.core.messages import LIVE, MOVES, MessageState
from jobsync.errors import Corrupt, Invalid, JobsyncError, OutcomeUnknown, Unavailable
from jobsync.queue.backend import (
    MAX_MESSAGE,
    ClaimResult,
    EndedClaim,
    Failure,
    Message,
    MessageInfo,
    NewMessage,
    QueueBackend,
    Receipt,
    Settlement,
    check_finished,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.sql import SqlAccess

__all__ = [
    "LAPSED",
    "MOST",
    "SPARED",
    "ClaimedRows",
    "Found",
    "SettlementRow",
    "SqlBackend",
    "as_json",
    "driver_of",
    "look_at",
    "refuse",
]


# The driver's connection behind whatever a caller holds, so that a push joins its transaction.
#
# SQLAlchemy's connections lead to it by `driver_connection`; it need not be installed here.


def driver_of(connection: object) -> object:
    """Give the connection that the database's driver made."""
    held: Any = connection
    # An asynchronous connection of SQLAlchemy's has a plain one inside.
    held = getattr(held, "sync_connection", None) or held
    if not hasattr(held, "driver_connection"):
        inside = getattr(held, "connection", None)
        held = inside if hasattr(inside, "driver_connection") else held
    return getattr(held, "driver_connection", held)


def refuse(connection: object, problem: str, fix: str) -> Invalid:
    """Say why a transaction cannot be joined."""
    kind = type(connection)
    return Invalid("connection", f"{kind.__module__}.{kind.__qualname__}", problem, fix)


MOST = 10_000
"""The largest batch."""

LAPSED = "nobody settled it: its worker died, or fell silent for too long"
"""The error that a message keeps of a claim that was ended."""

SPARED = f"{LAPSED}; with others in hand, so that no attempt is spent"
"""Likewise, of a claim in company."""

_PATIENCE = 30.0
"""Seconds after which an unknown settlement is no longer sent again."""

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 4.0
_LONGEST_ERROR = 2000

_Lines = list[Failure]


Found: TypeAlias = tuple[str, bytes | str, int, int, int, float | None, bool, float]
"""A message that was claimed, as its row tells: its id, payload, deliveries, those returned, most
attempts, timeout, whether it is a suspect, and when it was enqueued."""

_ID: Final = 0
_DELIVERIES: Final = 2
"""Places in such a row."""


class ClaimedRows(NamedTuple):
    """What a claim found."""

    rows: list[Found]
    suspects: bool
    due: float | None
    lapse: float | None


class SettlementRow(NamedTuple):
    """A settlement, as the database takes it."""

    id: str
    claim: str
    target: MessageState
    mark: str
    """How this claim was settled; the row remembers it."""
    delay: float
    back: int
    error: str | None
    """As JSON."""


class SqlBackend(QueueBackend):
    """What is the same on both databases.

    Args:
        access: the way to the tables.
        queue: its name.
        components: time, randomness and events.
    """

    def __init__(self, access: SqlAccess, queue: str, components: Components) -> None:
        self.queue = queue
        self.topic = f"queue/{queue}"
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._witness = CorruptionLog(self.topic, components.events)
        self._hints = access

    async def push(self, letters: Sequence[NewMessage]) -> None:
        """Add messages, all or none."""
        if not letters:
            return
        payloads = _encode(letters)
        try:
            await self._push(letters, payloads)
        except OutcomeUnknown as unknown:
            # What is not there may yet arrive, or have come and gone: it is not sent again.
            if not await self._is_surely_there([each.id for each in letters]):
                raise unknown from None

    async def push_within(self, connection: object, letters: Sequence[NewMessage]) -> None:
        """Add messages in a transaction of the caller's."""
        driver = driver_of(connection)
        if letters:
            await self._push_within(driver, letters, _encode(letters))

    async def claim(
        self, limit: int, *, session: str, visibility: float, suspects: bool = False
    ) -> ClaimResult:
        """Claim messages; set aside those that cannot be read."""
        (claim,) = self._ids.nonces(1)
        taken = await self._claim(limit, claim, session, visibility, suspects=suspects)
        messages: list[Message] = []
        unreadable: list[tuple[Receipt, Corrupt]] = []
        for row in taken.rows:
            receipt = Receipt(row[_ID], row[_DELIVERIES], claim)
            try:
                messages.append(_revive(receipt, row))
            except Corrupt as corrupt:
                unreadable.append((receipt, corrupt))
        if unreadable:
            await self._set_aside(unreadable)
        more = len(taken.rows) >= limit
        return ClaimResult(messages, taken.suspects, taken.due, taken.lapse, more)

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """End claims, and follow up a lost reply."""
        if not settlements:
            return []
        batch = [_tell(settlement) for settlement in settlements]
        if len({each.id for each in batch}) < len(batch):
            raise Invalid("settlements", len(batch), "name a message twice", "settle each once")
        settled = await self._persist(batch)
        if any(each.target == "waiting" and not each.delay for each in batch):
            self._hints.wake(self.topic)
        return [each.id in settled for each in batch]

    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that nobody will settle, and let others have the messages."""
        ended = await self._end_claims(dead, keep)
        if ended:
            self._hints.wake(self.topic)
        return ended

    async def redrive(self, ids: Collection[str] | None = None, *, limit: int = 1000) -> int:
        """Give dead letters a new life."""
        count = await self._redrive(ids, limit)
        self._hints.wake(self.topic)
        return count

    async def wait(self, timeout: float) -> None:
        """Return early if there is something new to claim."""
        await self._hints.wait(self.topic, timeout)

    async def forget(self, state: MessageState, *, older_than: float, limit: int = MOST) -> int:
        """Remove what was finished long ago."""
        check_finished(state)
        return await self._forget(state, older_than, limit)

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Look at messages; leave out what cannot be read, and report it."""
        rows = await (
            self._browse_live(state, after, limit)
            if state in LIVE
            else self._browse_finished(state, after, limit)
        )
        return look_at(rows, self._witness)

    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state."""
        return {state: count for state, count in await self._count() if count}

    async def resume(self) -> bool:
        """Let everybody claim again, and look at once."""
        was_paused = await self._resume()
        self._hints.wake(self.topic)
        return was_paused

    @abstractmethod
    async def _push(self, letters: Sequence[NewMessage], payloads: Sequence[bytes]) -> None: ...

    @abstractmethod
    async def _push_within(
        self, connection: object, letters: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None: ...

    @abstractmethod
    async def _is_there(self, ids: Sequence[str]) -> bool:
        """Say whether one of these messages is there, finished or not."""

    @abstractmethod
    async def _claim(
        self, limit: int, claim: str, session: str, visibility: float, *, suspects: bool
    ) -> ClaimedRows: ...

    @abstractmethod
    async def _settle(self, batch: Sequence[SettlementRow]) -> set[str]:
        """End claims; give those that are settled so, by this call or an earlier one."""

    @abstractmethod
    async def _end_claims(
        self, dead: Collection[str], keep: Collection[str]
    ) -> list[EndedClaim]: ...

    @abstractmethod
    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int: ...

    @abstractmethod
    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]: ...

    @abstractmethod
    async def _browse_finished(self, state: MessageState, after: str, limit: int) -> list[Any]: ...

    @abstractmethod
    async def _count(self) -> list[tuple[MessageState, int]]: ...

    @abstractmethod
    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int: ...

    @abstractmethod
    async def _resume(self) -> bool: ...

    async def _is_surely_there(self, ids: Sequence[str]) -> bool:
        try:
            return await self._is_there(ids)
        except JobsyncError:
            # Whatever keeps us from looking: of the push it says nothing.
            return False

    async def _persist(self, batch: Sequence[SettlementRow]) -> set[str]:
        """Settle; once something was sent, until an answer comes or time is up."""
        give_up = self._clock.mono() + _PATIENCE
        pause = _FIRST_PAUSE
        unknown: OutcomeUnknown | None = None
        while True:
            try:
                return await self._settle(batch)
            except OutcomeUnknown as error:
                unknown = error
            except Unavailable:
                # Of this copy nothing was done; an earlier one may have been.
                if unknown is None:
                    raise
            if self._clock.mono() >= give_up:
                raise unknown
            await self._clock.sleep(self._randomness.uniform(pause / 2, pause))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _set_aside(self, unreadable: Sequence[tuple[Receipt, Corrupt]]) -> None:
        for _, corrupt in unreadable:
            self._witness.report(corrupt)
        batch = [
            _tell(Settlement(receipt=receipt, move="bury", error=str(corrupt)))
            for receipt, corrupt in unreadable
        ]
        try:
            await self._settle(batch)
        except (OutcomeUnknown, Unavailable):
            # Those that can be read do not wait: it lapses, and is set aside by who claims it next.
            return


def _encode(letters: Sequence[NewMessage]) -> list[bytes]:
    if len(letters) > MOST:
        many = f"{len(letters):,} messages"
        raise Invalid("messages", many, f"are over {MOST:,}", "push in parts")
    return [encode(each.value, "message", limit=MAX_MESSAGE) for each in letters]


def _tell(settlement: Settlement) -> SettlementRow:
    receipt, error = settlement.receipt, settlement.error
    step = MOVES[settlement.move]
    return SettlementRow(
        receipt.id,
        receipt.claim,
        step.target,
        f"{receipt.claim}:{settlement.move}",
        settlement.delay,
        int(step.returns),
        as_json(error) if error else None,
    )


def as_json(text: str) -> str:
    """Give an error's text as JSON, cut, without what a database cannot hold."""
    plain = text[:_LONGEST_ERROR].replace("\0", "\\0").encode(errors="replace").decode()
    return msgspec.json.encode(plain).decode()


def _revive(receipt: Receipt, row: Found) -> Message:
    name, payload, deliveries, returned, max_attempts, timeout, suspect, enqueued = row
    return Message(
        receipt=receipt,
        value=decode(payload, f"message {name}"),
        attempt=deliveries - returned,
        max_attempts=max_attempts,
        timeout=timeout,
        is_suspect=bool(suspect),
        enqueued=enqueued,
    )


class _MessageRow(NamedTuple):
    """A message that somebody looks at."""

    queue: str
    id: str
    state: MessageState
    payload: bytes | str | None
    deliveries: int
    returned: int
    max_attempts: int
    errors: str
    session: str
    suspect: bool
    enqueued: float
    due: float | None
    claimed: float | None
    finished: float | None
    seen: float
    cursor: str


def look_at(rows: Sequence[Sequence[Any]], witness: CorruptionLog) -> list[MessageInfo]:
    """Give messages; leave out what cannot be understood, and report it."""
    kept = []
    for row in rows:
        try:
            kept.append(_look_at(_MessageRow(*row)))
        except Corrupt as corrupt:
            witness.report(corrupt)
    return kept


def _look_at(row: _MessageRow) -> MessageInfo:
    value, is_readable = _decode_or_show(row.payload, row.id)
    return MessageInfo(
        queue=row.queue,
        id=row.id,
        state=row.state,
        value=value,
        attempts=row.deliveries - row.returned,
        deliveries=row.deliveries,
        max_attempts=row.max_attempts,
        errors=tuple(_read_errors(row.errors, row.id)),
        session=row.session,
        is_suspect=bool(row.suspect),
        enqueued=row.enqueued,
        due=row.due,
        claimed=row.claimed,
        finished=row.finished,
        seen=row.seen,
        is_readable=is_readable,
        cursor=row.cursor,
    )


def _decode_or_show(payload: bytes | str | None, name: str) -> tuple[Any, bool]:
    """Give a payload; of what is not JSON, its text, so that somebody can look at it."""
    if payload is None:
        return None, True
    try:
        return decode(payload, name), True
    except Corrupt:
        text = payload if isinstance(payload, str) else payload.decode(errors="replace")
        return text, False


def _read_errors(lines: str, name: str) -> _Lines:
    try:
        return msgspec.json.decode(f"[{','.join(lines.splitlines())}]", type=_Lines)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Corrupt(f"message {name}", f"its errors are not JSON ({error})") from error
