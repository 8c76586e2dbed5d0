"""What a queue's port was asked and what it answered, so that both can be held against the rows.

Each question stands in the history before it is sent, and every row that a transaction changes
names the question; see `rows`. A caller that dies waiting was told nothing, and nothing is noted.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from jobsync.core.codec import encode
from jobsync.core.messages import MessageState
from jobsync.errors import Fenced, Invalid, JobsyncError, Misconfigured, NewerFormat, Unavailable
from jobsync.queue.backend import (
    ClaimResult,
    EndedClaim,
    MessageInfo,
    NewMessage,
    QueueBackend,
    Receipt,
    Settlement,
)
from jobsync.stores.contract import Change, Outcome, Record, Store, StoreDecorator
from jobsync.stores.record_codec import assign_nonces
from jobsync.testing.nodes import Node
from jobsync.testing.rows import ASKED, Asked, digest

__all__ = ["RecordingBackend", "RecordingStore"]


# What the callers of a store were told, so that it can be held against what happened.


_NOTHING_WRITTEN = (Fenced, Invalid, Misconfigured, NewerFormat, Unavailable)


class RecordingStore(StoreDecorator):
    """Notes the answer to each read and each write, and since when the caller had waited.

    A caller that dies waiting was told nothing, and nothing is noted.

    Args:
        node: whose calls they are.
        inner: who answers.
    """

    def __init__(self, node: Node, inner: Store) -> None:
        super().__init__(inner)
        self._node = node
        self._world = node.world
        self._ids = node.components.ids

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records, and note which versions came back."""
        since = len(self._world.history)
        records = await self.inner.get_many(keys, tombstones=tombstones)
        found = [None if record is None else record.nonce for record in records]
        self._note("read", since, keys=list(keys), nonces=found, tombstones=tombstones)
        return records

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, and note what each came to."""
        since = len(self._world.history)
        changes = assign_nonces(changes, self._ids)
        try:
            outcomes = await self.inner.write(changes)
        except _NOTHING_WRITTEN:
            self._tell(since, changes, ["Refused"] * len(changes))
            raise
        self._tell(since, changes, [type(outcome).__name__ for outcome in outcomes])
        return outcomes

    def _tell(self, since: int, changes: Sequence[Change], outcomes: list[str]) -> None:
        for change, outcome in zip(changes, outcomes, strict=True):
            base = None if change.base is None else change.base.nonce
            self._note(
                "reply", since, key=change.key, nonce=change.nonce, base=base, outcome=outcome
            )

    def _note(self, what: str, since: int, **facts: object) -> None:
        self._world.note(self._node.name, what, since=since, **facts)


T = TypeVar("T")


class RecordingBackend(QueueBackend):
    """Notes every question and every answer.

    Args:
        node: who asks.
        inner: who answers.
    """

    def __init__(self, node: Node, inner: QueueBackend) -> None:
        self.queue = inner.queue
        self._inner = inner
        self._node = node
        self._world = node.world

    async def push(self, new_messages: Sequence[NewMessage]) -> None:
        """Add messages, all or none, in order."""
        told = [
            [each.id, digest(encode(each.value, "message").decode()), each.delay, each.max_attempts]
            for each in new_messages
        ]
        await self._ask("push", lambda: self._inner.push(new_messages), messages=told)

    async def push_within(self, connection: object, new_messages: Sequence[NewMessage]) -> None:
        """Add messages in a transaction of the caller's."""
        await self._inner.push_within(connection, new_messages)

    async def claim(
        self, limit: int, *, session: str, visibility: float, suspects: bool = False
    ) -> ClaimResult:
        """Claim messages whose time has come."""
        return await self._ask(
            "claim",
            lambda: self._inner.claim(
                limit, session=session, visibility=visibility, suspects=suspects
            ),
            lambda claimed: [_name(each.receipt) for each in claimed.messages],
            limit=limit,
            session=session,
            visibility=visibility,
            suspects=suspects,
        )

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """End claims, each as told."""
        return await self._ask(
            "settle",
            lambda: self._inner.settle(settlements),
            list,
            receipts=[[*_name(each.receipt), each.move, each.delay] for each in settlements],
        )

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Let claims hold for so many seconds from now."""
        return await self._ask(
            "extend",
            lambda: self._inner.extend(receipts, visibility),
            list,
            receipts=[_name(each) for each in receipts],
            visibility=visibility,
        )

    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that have lapsed, and those of sessions that are dead."""
        return await self._ask(
            "end_claims",
            lambda: self._inner.end_claims(dead, keep=keep),
            lambda ended: [[each.id, each.state, each.attempt] for each in ended],
            dead=sorted(dead),
            keep=sorted(keep),
        )

    async def list_holders(self) -> list[str]:
        """Give the sessions that have claimed anything."""
        return await self._inner.list_holders()

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Look at messages in a state."""
        return await self._inner.browse(state, after=after, limit=limit)

    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state."""
        return await self._inner.count()

    async def redrive(self, ids: Collection[str] | None = None, *, limit: int = 1000) -> int:
        """Give dead new_messages a new life."""
        return await self._ask("redrive", lambda: self._inner.redrive(ids, limit=limit))

    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove the messages in these states for good."""
        return await self._ask("purge", lambda: self._inner.purge(states), states=sorted(states))

    async def forget(self, state: MessageState, *, older_than: float, limit: int = 10_000) -> int:
        """Remove messages that were finished so many seconds ago."""
        return await self._ask(
            "forget",
            lambda: self._inner.forget(state, older_than=older_than, limit=limit),
            state=state,
            older_than=older_than,
        )

    async def pause(self, reason: str = "") -> bool:
        """Let nobody claim."""
        return await self._ask("pause", lambda: self._inner.pause(reason), reason=reason)

    async def resume(self) -> bool:
        """Let everybody claim again."""
        return await self._ask("resume", self._inner.resume)

    async def wait(self, timeout: float) -> None:
        """Return early if there is something new to claim."""
        await self._inner.wait(timeout)

    async def _ask(
        self,
        call: str,
        ask: Callable[[], Awaitable[T]],
        tell: Callable[[T], Any] = lambda _: None,
        **facts: Any,
    ) -> T:
        world, name = self._world, self._node.name
        asked = Asked(len(world.history), call)
        world.note(name, "request", call=call, queue=self.queue, **facts)
        before = ASKED.set(asked)
        try:
            answer = await ask()
        except JobsyncError as error:
            world.note(name, "response", request=asked.place, error=type(error).__name__)
            raise
        finally:
            ASKED.reset(before)
        world.note(name, "response", request=asked.place, result=tell(answer))
        return answer


def _name(receipt: Receipt) -> list[Any]:
    return [receipt.id, receipt.claim, receipt.deliveries]
