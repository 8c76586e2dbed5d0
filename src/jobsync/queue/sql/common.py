"""What the queue backends on SQLite and PostgreSQL have in common.

A batch is one statement or one transaction. Claims are judged by the database's clock. A
settlement whose reply was lost is sent again until an answer arrives: the database records how
claims were settled.
"""

import itertools
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from jobsync.components import Components
from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.messages import LIVE, MessageState
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import (
    Corrupt,
    Invalid,
    JobsyncError,
    Misconfigured,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.queue.arguments import (
    check_cursor,
    check_finished,
    check_ids,
    check_reason,
    check_settled_once,
    check_state,
    check_states,
)
from jobsync.queue.backend import (
    ClaimResult,
    EndedClaim,
    Message,
    MessageInfo,
    NewMessage,
    QueueBackend,
    Receipt,
    Settlement,
)
from jobsync.queue.limits import QueueLimits
from jobsync.queue.message import are_plain
from jobsync.queue.settings import QueueOrder
from jobsync.queue.shared_push import SharedPush
from jobsync.queue.sql.joined_connections import unwrap_connection
from jobsync.queue.sql.message_rows import ClaimedRow, encode_payloads, read_infos, read_message
from jobsync.queue.sql.placed_push import PlacedPush
from jobsync.queue.sql.single_message import SqlMessageOperations
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.paging import split_pages
from jobsync.stores.scan import check_age, check_limit
from jobsync.stores.sql import SqlAccess

__all__ = [
    "MAX_BATCH",
    "ClaimRequest",
    "ClaimedRows",
    "SqlBackend",
    "check_batch",
]

MAX_BATCH = 10_000
"""The largest number of messages in a batch."""

_REDRIVE_BATCH = 1_000
"""How many dead letters one transaction puts back: each is written twice, with its payload."""

_GIVE_UP_AFTER = 30.0
"""Seconds after which a settlement with an unknown outcome is not sent again."""

_BACKOFF = ExponentialBackoff(first=0.05, longest=4.0, jitter=0.5)
_ID: Final = 0
_DELIVERIES: Final = 2
"""Indices in such a row."""


class WantedTasks(NamedTuple):
    """The tasks whose messages a caller wants."""

    names: tuple[str, ...] = ()
    """In order."""
    is_plain: bool = True
    """Whether messages without a task are wanted."""

    @classmethod
    def read(cls, tasks: Collection[str] | None) -> Self:
        """Return the tasks of a call of `claim`."""
        if tasks is None:
            return cls()
        return cls(tuple(sorted({*tasks} - {""})), "" in tasks)


class ClaimRequest(NamedTuple):
    """What a caller wants to claim."""

    limit: int
    claim: str
    """The nonce of the claim."""
    session: str
    visibility: float
    suspects: bool
    tasks: tuple[str, ...] = ()
    """The tasks whose messages are wanted, in order."""
    is_plain: bool = True
    """Whether messages without a task are wanted."""


class ClaimedRows(NamedTuple):
    """The rows of a claim; the other fields are as in `ClaimResult`."""

    rows: list[ClaimedRow]
    suspects: bool
    due: float | None
    lapse: float | None
    more: bool
    rate: float | None = None

    def limit_due(self, seconds: float) -> "ClaimedRows":
        """Return the same, with something to claim when a rate allows it, in so many seconds."""
        due = seconds if self.due is None else min(self.due, seconds)
        return self._replace(due=due, rate=seconds)


class SqlBackend(SqlMessageOperations, QueueBackend):
    """Base class for the backends on SQL databases.

    Args:
        access: the connection to the tables.
        queue: its name.
        components: time, randomness and events.
        order: which messages are claimed first.
        limits: how many are in work at a time, and in which time.
    """

    def __init__(
        self,
        access: SqlAccess,
        queue: str,
        components: Components,
        order: QueueOrder,
        limits: QueueLimits,
    ) -> None:
        self.queue = queue
        self.order = order
        self.limits = limits
        self.topic = f"queue/{queue}"
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._corruption_log = CorruptionLog(self.topic, components.events)
        self._notifications = access
        self._shared_push = SharedPush(self.topic, self._push_and_check)
        self._placed_push = PlacedPush(self._place, self._exists, self._find_holders)

    def split(self, new_messages: Sequence[NewMessage]) -> list[Sequence[NewMessage]]:
        """Return messages in parts of `max_push`."""
        size = self.max_push
        starts = range(0, len(new_messages), size)
        parts = [new_messages[start : start + size] for start in starts]
        for part in parts:
            check_batch(part)
            # Part by part: all together they may be large.
            encode_payloads(part)
        return parts

    async def push(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str]:
        """Add messages, all or none, except those whose keys others hold."""
        check_batch(new_messages)
        payloads = encode_payloads(new_messages)
        if not are_plain(new_messages):
            try:
                return await self._placed_push.push(new_messages, payloads)
            finally:
                self._notifications.wake(self.topic)
        if new_messages:
            await self._shared_push.push(new_messages, payloads)
        return {}

    async def _push_and_check(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None:
        await self._send(new_messages, self._push(new_messages, payloads))

    async def _send(self, new_messages: Sequence[NewMessage], sending: Awaitable[None]) -> None:
        """Add messages; if the reply is lost, look whether they have arrived."""
        try:
            await sending
        except OutcomeUnknown as unknown:
            # Missing messages may still arrive, or may be gone already: never send them again.
            if not await self._has_arrived([message.id for message in new_messages]):
                raise unknown from None

    async def push_within(
        self, connection: object, new_messages: Sequence[NewMessage]
    ) -> Mapping[str, str]:
        """Add messages in the caller's transaction."""
        driver_connection = unwrap_connection(connection)
        if not new_messages:
            return {}
        check_batch(new_messages)
        payloads = encode_payloads(new_messages)
        return await self._push_within(driver_connection, new_messages, payloads)

    async def claim(
        self,
        limit: int,
        *,
        session: str,
        visibility: float,
        suspects: bool = False,
        tasks: Collection[str] | None = None,
        at_most: int | None = None,
    ) -> ClaimResult:
        """Claim messages; bury those that cannot be read."""
        del at_most
        (claim,) = self._ids.nonces(1)
        wanted = WantedTasks.read(tasks)
        request = ClaimRequest(limit, claim, session, visibility, suspects, *wanted)
        claimed = await self._claim(request)
        messages: list[Message] = []
        unreadable: list[tuple[Receipt, Corrupt]] = []
        for row in claimed.rows:
            receipt = Receipt(row[_ID], row[_DELIVERIES], claim)
            try:
                messages.append(read_message(receipt, row))
            except Corrupt as corrupt:
                unreadable.append((receipt, corrupt))
        if unreadable:
            await self._bury_unreadable(unreadable)
        return ClaimResult(
            messages, claimed.suspects, claimed.due, claimed.lapse, claimed.more, claimed.rate
        )

    async def has_claimable(self, tasks: Collection[str] | None = None) -> bool:
        """Whether there are messages that could be claimed now if there were no limits."""
        return await self._has_claimable(WantedTasks.read(tasks))

    def _is_limited(self, request: ClaimRequest) -> bool:
        """Whether the messages of a claim are counted."""
        return self.limits.is_limited or bool(self.limits.find_limited(request.tasks))

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """End claims; send them again if a reply was lost."""
        if not settlements:
            return []
        ids = [settlement.receipt.id for settlement in settlements]
        check_settled_once(ids)
        settled = await self._settle_until_answered(settlements)
        is_free = self.limits.frees_others
        if is_free or any(each.target == "waiting" and not each.delay for each in settlements):
            self._notifications.wake(self.topic)
        self._announce_ends(settlements)
        return [name in settled for name in ids]

    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that nobody will settle, so that others can claim the messages."""
        ended = await self._end_claims(dead, keep)
        if ended:
            self._notifications.wake(self.topic)
        return ended

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Extend claims."""
        check_seconds("seconds", visibility, is_zero_allowed=False)
        return await self._extend(receipts, visibility) if receipts else []

    async def redrive(self, ids: Collection[str] | None = None, *, limit: int | None = None) -> int:
        """Queue dead letters again, in batches."""
        chosen = None if ids is None else check_ids(ids)
        if limit is not None:
            check_count("limit", limit, least=1)
        done = 0
        try:
            async for count in self._redrive_batches(chosen, limit):
                done += count
        except (Misconfigured, Unavailable) as error:
            if not done:
                raise
            detail = f"{done:,} messages were queued again before: {error}"
            raise OutcomeUnknown(self.topic, detail) from error
        finally:
            self._notifications.wake(self.topic)
        return done

    async def wait(self, timeout: float) -> None:
        """Return early if there may be something new to claim."""
        await self._notifications.wait(self.topic, timeout)

    async def forget(
        self, state: MessageState, *, older_than: float, limit: int = MAX_BATCH
    ) -> int:
        """Remove messages that were finished long ago."""
        check_finished(state)
        check_age(older_than)
        check_limit(limit)
        return await self._forget(state, older_than, limit)

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages; what cannot be decoded is shown as text."""
        check_state(state)
        check_cursor(state, after)
        check_limit(limit)
        rows = await (
            self._browse_live(state, after, limit)
            if state in LIVE
            else self._browse_finished(state, after, limit)
        )
        return read_infos(rows, self._corruption_log)

    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state."""
        return {state: count for state, count in await self._count() if count}

    async def find_newer(self) -> Mapping[int, int]:
        """Count the messages of newer code by format."""
        return dict(await self._find_newer())

    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove messages for good, and wake the workers: others of their groups may be next."""
        count = await self._purge(check_states(states))
        if count:
            self._notifications.wake(self.topic)
        return count

    async def pause(self, reason: str = "") -> bool:
        """Stop all claims."""
        check_reason(reason)
        return await self._pause(reason)

    async def resume(self) -> bool:
        """Allow claims again, and wake the workers."""
        try:
            return await self._resume()
        finally:
            self._notifications.wake(self.topic)

    @abstractmethod
    async def _push(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> None: ...

    @abstractmethod
    async def _place(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        """Add messages with priorities, groups and keys; return who holds the keys of others."""

    @abstractmethod
    async def _find_holders(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Return the ids of the messages that hold keys."""

    @abstractmethod
    async def _push_within(
        self, connection: object, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]: ...

    @abstractmethod
    async def _exists(self, ids: Sequence[str]) -> bool:
        """Whether any of these messages exists, finished or not."""

    @abstractmethod
    async def _claim(self, request: ClaimRequest) -> ClaimedRows: ...

    @abstractmethod
    async def _has_claimable(self, wanted: WantedTasks) -> bool:
        """Whether anything could be claimed if there were no limits."""

    @abstractmethod
    async def _settle(self, batch: Sequence[Settlement]) -> set[str]:
        """End claims; return the ids of those settled so, by this call or an earlier one."""

    @abstractmethod
    async def _extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]: ...

    @abstractmethod
    async def _end_claims(
        self, dead: Collection[str], keep: Collection[str]
    ) -> list[EndedClaim]: ...

    @abstractmethod
    async def _redrive(self, ids: Collection[str] | None, limit: int) -> int:
        """Queue dead letters again, in one transaction; return how many."""

    @abstractmethod
    async def _purge(self, states: Collection[MessageState]) -> int: ...

    @abstractmethod
    async def _pause(self, reason: str) -> bool: ...

    @abstractmethod
    async def _browse_live(self, state: MessageState, after: str, limit: int) -> list[Any]: ...

    @abstractmethod
    async def _browse_finished(self, state: MessageState, after: str, limit: int) -> list[Any]: ...

    @abstractmethod
    async def _count(self) -> list[tuple[MessageState, int]]: ...

    @abstractmethod
    async def _find_newer(self) -> list[tuple[int, int]]: ...

    @abstractmethod
    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int: ...

    @abstractmethod
    async def _resume(self) -> bool: ...

    async def _has_arrived(self, ids: Sequence[str]) -> bool:
        """Whether a push with an unknown outcome is known to have arrived."""
        try:
            return await self._exists(ids)
        except JobsyncError:
            # A failed check says nothing about the push.
            return False

    async def _redrive_batches(
        self, ids: Sequence[str] | None, limit: int | None
    ) -> AsyncIterator[int]:
        """Queue dead letters again; yield how many each transaction has queued."""
        left = sys.maxsize if limit is None else limit
        for chosen in _split(ids):
            size = min(left, _REDRIVE_BATCH)
            count = await self._redrive(chosen, size)
            yield count
            left -= count
            if left <= 0 or (ids is None and count < size):
                return
            if limit is None and ids is None:
                # As many as there are now: those that die again meanwhile are newer.
                limit = left = (await self.count()).get("dead", 0)

    async def _settle_until_answered(self, batch: Sequence[Settlement]) -> set[str]:
        """Settle; once a request may have arrived, repeat it until an answer or the time limit."""
        give_up = self._clock.mono() + _GIVE_UP_AFTER
        attempt = 0
        unknown: OutcomeUnknown | None = None
        while True:
            try:
                return await self._settle(batch)
            except OutcomeUnknown as error:
                unknown = error
            except (Misconfigured, Unavailable):
                # This request did nothing; an earlier one may have arrived.
                if unknown is None:
                    raise
            if self._clock.mono() >= give_up:
                raise unknown
            attempt += 1
            await _BACKOFF.sleep(attempt, self._clock, self._randomness)

    async def _bury_unreadable(self, unreadable: Sequence[tuple[Receipt, Corrupt]]) -> None:
        for _, corrupt in unreadable:
            self._corruption_log.report(corrupt)
        batch = [
            Settlement(receipt=receipt, move="bury", error=str(corrupt))
            for receipt, corrupt in unreadable
        ]
        try:
            await self._settle(batch)
        except (Misconfigured, OutcomeUnknown, Unavailable):
            # Readable messages do not wait for this. The claim lapses, and the next claim buries
            # the message.
            return


def _split(ids: Sequence[str] | None) -> Iterator[Sequence[str] | None]:
    """Yield parts of a list; without a list, None again and again."""
    if ids is None:
        yield from itertools.repeat(None)
    else:
        yield from split_pages(ids, _REDRIVE_BATCH)


def check_batch(new_messages: Sequence[NewMessage]) -> None:
    """Check that messages can be pushed at once.

    Raises:
        Invalid: there are too many.
    """
    if len(new_messages) > MAX_BATCH:
        size = f"{len(new_messages):,} messages"
        raise Invalid("messages", size, f"must be {MAX_BATCH:,} or fewer", "push in parts")
