"""Stores and queue backends that record their requests and replies, to be checked against commits.

A caller that dies while it waits receives no reply, and none is recorded. A request of a queue
backend is in the history before it is sent, and every row that a transaction changes refers to it;
see `rows`. So does every write of a record that it makes; see `pages`.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

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
    SeenKeys,
    Settlement,
)
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.limits import NO_LIMITS
from jobsync.queue.single_message import Deletion, ProgressReport
from jobsync.stores.contract import Change, Outcome, Record, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.record_codec import assign_nonces
from jobsync.testing.nodes import Node
from jobsync.testing.rows import CURRENT_CALL, BackendCall, RowLink, digest
from jobsync.testing.transactions import SimulatedTransactions
from jobsync.testing.world import Occurrence

__all__ = ["RecordingBackend", "RecordingStore"]

T = TypeVar("T")

_NOTHING_WRITTEN = (Fenced, Invalid, Misconfigured, NewerFormat, Unavailable)


class RecordingStore(StoreDecorator):
    """Records the reply to each read and each write, with the position of its request.

    Args:
        node: the node that calls.
        inner: the store that answers.
    """

    def __init__(self, node: Node, inner: Store) -> None:
        super().__init__(inner)
        self._node = node
        self._world = node.world
        self._ids = node.components.ids

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records, and record which versions were returned."""
        since = len(self._world.history)
        records = await self.inner.get_many(keys, tombstones=tombstones)
        nonces = [None if record is None else record.nonce for record in records]
        self._note("read", since, keys=list(keys), nonces=nonces, tombstones=tombstones)
        return records

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, and record the outcome of each."""
        changes = assign_nonces(changes, self._ids)
        call = CURRENT_CALL.get()
        if call is not None:
            wall = self._node.clock.wall().seconds
            nonces = [change.nonce for change in changes]
            self._world.note(
                self._node.name, "write", request=call.position, nonces=nonces, wall=wall
            )
        since = len(self._world.history)
        try:
            outcomes = await self.inner.write(changes)
        except _NOTHING_WRITTEN:
            self._record(since, changes, ["Refused"] * len(changes))
            raise
        self._record(since, changes, [type(outcome).__name__ for outcome in outcomes])
        return outcomes

    def _record(self, since: int, changes: Sequence[Change], outcomes: list[str]) -> None:
        for change, outcome in zip(changes, outcomes, strict=True):
            base = None if change.base is None else change.base.nonce
            self._note(
                "reply", since, key=change.key, nonce=change.nonce, base=base, outcome=outcome
            )

    def _note(self, what: str, since: int, **details: object) -> None:
        self._world.note(self._node.name, what, since=since, **details)


class RecordingBackend(QueueBackend):
    """Records every request and every response.

    Args:
        node: the node that calls.
        inner: the backend that answers.
    """

    def __init__(self, node: Node, inner: QueueBackend) -> None:
        self.queue = inner.queue
        self.max_push = inner.max_push
        self.is_billed = inner.is_billed
        self.max_result = inner.max_result
        self.max_depth = inner.max_depth
        self._inner = inner
        self._node = node
        self._world = node.world
        self._rules = _describe_rules(inner)
        transactions = inner.transactions
        if transactions is not None and isinstance(transactions.access, RowLink):
            self.transactions = SimulatedTransactions(
                transactions, transactions.access, self._complete
            )

    async def _complete(self, receipt: Receipt, work: Callable[[], Awaitable[bool]]) -> bool:
        """Complete a message in the transaction of its handler."""
        return await self._call(
            "settle",
            work,
            lambda is_completed: [is_completed],
            receipts=[[*_describe(receipt), "complete", 0.0]],
        )

    def split(self, new_messages: Sequence[NewMessage]) -> list[Sequence[NewMessage]]:
        """Return messages in parts that can be pushed one after the other."""
        return self._inner.split(new_messages)

    async def push(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str]:
        """Add messages, all or none, in order."""
        details: dict[str, Any] = {}
        if self.is_billed and any(each.key is not None for each in new_messages):
            # By which it judges whether the time of a key is over.
            details["wall"] = self._node.clock.wall().seconds
        return await self._call(
            "push",
            lambda: self._inner.push(new_messages),
            lambda holders: dict(holders) or None,
            messages=[_describe_message(each) for each in new_messages],
            **details,
        )

    async def push_within(
        self, connection: object, new_messages: Sequence[NewMessage]
    ) -> Mapping[str, str]:
        """Add messages in a transaction of the caller."""
        return await self._inner.push_within(connection, new_messages)

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
        """Claim due messages."""
        return await self._call(
            "claim",
            lambda: self._inner.claim(
                limit,
                session=session,
                visibility=visibility,
                suspects=suspects,
                tasks=tasks,
                at_most=at_most,
            ),
            lambda claimed: [_describe(each.receipt) for each in claimed.messages],
            limit=max(limit, at_most or 0),
            session=session,
            visibility=visibility,
            suspects=suspects,
            **({} if tasks is None else {"tasks": sorted(tasks)}),
            **self._rules,
        )

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Settle claims."""
        return await self._call(
            "settle",
            lambda: self._inner.settle(settlements),
            list,
            receipts=[[*_describe(each.receipt), each.move, each.delay] for each in settlements],
        )

    async def extend(self, receipts: Sequence[Receipt], visibility: float) -> list[bool]:
        """Extend claims to so many seconds from now."""
        return await self._call(
            "extend",
            lambda: self._inner.extend(receipts, visibility),
            list,
            receipts=[_describe(each) for each in receipts],
            visibility=visibility,
        )

    async def end_claims(
        self, dead: Collection[str] = (), *, keep: Collection[str] = ()
    ) -> list[EndedClaim]:
        """End the claims that have lapsed and the claims of dead sessions."""
        return await self._call(
            "end_claims",
            lambda: self._inner.end_claims(dead, keep=keep),
            lambda ended: [[each.id, each.state, each.attempt] for each in ended],
            dead=sorted(dead),
            keep=sorted(keep),
        )

    async def list_holders(self) -> list[str]:
        """Return the sessions that have claims."""
        return await self._inner.list_holders()

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages in a state."""
        return await self._inner.browse(state, after=after, limit=limit)

    async def count(self) -> Mapping[MessageState, int]:
        """Count the messages in each state."""
        return await self._inner.count()

    async def has_claimable(self, tasks: Collection[str] | None = None) -> bool:
        """Whether there are messages that could be claimed now if there were no limits."""
        return await self._inner.has_claimable(tasks)

    async def find_newer(self) -> Mapping[int, int]:
        """Count the messages of newer code."""
        return await self._inner.find_newer()

    async def redrive(self, ids: Collection[str] | None = None, *, limit: int | None = None) -> int:
        """Retry dead letters."""
        return await self._call("redrive", lambda: self._inner.redrive(ids, limit=limit))

    async def purge(self, states: Collection[MessageState]) -> int:
        """Remove the messages in these states permanently."""
        return await self._call("purge", lambda: self._inner.purge(states), states=sorted(states))

    async def forget(self, state: MessageState, *, older_than: float, limit: int = 10_000) -> int:
        """Remove messages that finished at least so many seconds ago."""
        return await self._call(
            "forget",
            lambda: self._inner.forget(state, older_than=older_than, limit=limit),
            state=state,
            older_than=older_than,
        )

    async def forget_keys(self, *, after: str, limit: int) -> SeenKeys:
        """Remove keys that nobody holds, if a message with a key was ever pushed."""
        if not any(map(_has_keys, self._world.history)):
            # Such a call finds nothing, and would change histories that know no keys.
            return SeenKeys()
        return await self._call(
            "forget_keys",
            lambda: self._inner.forget_keys(after=after, limit=limit),
            lambda seen: seen.removed,
        )

    async def pause(self, reason: str = "") -> bool:
        """Stop all workers from claiming."""
        return await self._call("pause", lambda: self._inner.pause(reason), reason=reason)

    async def resume(self) -> bool:
        """Allow workers to claim again."""
        return await self._call("resume", self._inner.resume)

    async def wait(self, timeout: float) -> None:
        """Wait; return early if there is a new message to claim."""
        await self._inner.wait(timeout)

    def join(self, fleet: QueueFleet | None) -> None:
        """Use what is known about the other processes of the queue."""
        self._inner.join(fleet)

    async def coordinate(self) -> None:
        """Do the coordinator's part."""
        await self._inner.coordinate()

    async def get(self, id: str) -> MessageInfo | None:
        """Return a message."""
        return await self._inner.get(id)

    async def cancel(self, id: str) -> EndedClaim | None:
        """Cancel a message."""
        return await self._call("cancel", lambda: self._inner.cancel(id), id=id)

    async def delete(self, id: str) -> Deletion:
        """Remove a message permanently."""
        return await self._call("delete", lambda: self._inner.delete(id), id=id)

    async def run_now(self, id: str) -> bool:
        """End the delay of a message."""
        return await self._call("run_now", lambda: self._inner.run_now(id), id=id)

    async def report_progress(self, reports: Sequence[ProgressReport]) -> None:
        """Store how far handlers are."""
        await self._inner.report_progress(reports)

    async def clear_progress(self, ids: Collection[str]) -> None:
        """Remove what was reported about messages."""
        await self._inner.clear_progress(ids)

    async def wait_for_end(self, timeout: float) -> None:
        """Wait; return early if a message may have ended."""
        await self._inner.wait_for_end(timeout)

    async def _call(
        self,
        name: str,
        work: Callable[[], Awaitable[T]],
        describe: Callable[[T], Any] = lambda _: None,
        **details: Any,
    ) -> T:
        world, node = self._world, self._node.name
        call = BackendCall(len(world.history), name)
        world.note(node, "request", call=name, queue=self.queue, **details)
        before = CURRENT_CALL.get()
        CURRENT_CALL.set(call)
        try:
            result = await work()
        except JobsyncError as error:
            world.note(node, "response", request=call.position, error=type(error).__name__)
            raise
        finally:
            # Not `reset`: the call of a killed node ends in another context.
            CURRENT_CALL.set(before)
        world.note(node, "response", request=call.position, result=describe(result))
        return result


def _describe_rules(backend: QueueBackend) -> dict[str, Any]:
    """Return what claims record of the order and the limits of a queue on a database."""
    order, limits = getattr(backend, "order", "fifo"), getattr(backend, "limits", NO_LIMITS)
    rules: dict[str, Any] = {} if order == "fifo" else {"order": order}
    if limits != NO_LIMITS:
        rules["limits"] = msgspec.structs.asdict(limits)
        # The invariants know those of the queue.
        del rules["limits"]["tasks"]
    return rules


def _describe_message(message: NewMessage) -> list[Any]:
    """Return the message as a request records it; its place only if it has one."""
    payload = digest(encode(message.value, "message").decode())
    place = {
        name: value
        for name in ("priority", "group", "key", "key_ttl", "replace", "task")
        if (value := getattr(message, name))
    }
    described = [message.id, payload, message.delay, message.max_attempts]
    return [*described, place] if place else described


def _has_keys(done: Occurrence) -> bool:
    """Whether a request pushes a message with a key."""
    messages = done.details.get("messages", ()) if done.what == "request" else ()
    return any("key" in place for message in messages for place in message[4:])


def _describe(receipt: Receipt) -> list[Any]:
    # Without the page of the claim, which no row has.
    return [receipt.id, receipt.claim.partition("@")[0], receipt.deliveries]
