"""The calls of a queue that push, read and change messages, and those of programs with a loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Unpack

from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.codec import Json
from jobsync.core.messages import FINISHED, LIVE, MessageState
from jobsync.database.database import Database
from jobsync.database.document import RecordT, as_list
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.database.home_loop import check_blocking, on_home_loop
from jobsync.database.record_types import RecordType
from jobsync.database.supervisor import Work
from jobsync.errors import Invalid
from jobsync.queue.arguments import check_state
from jobsync.queue.backend import MessageInfo, NewMessage, QueueBackend
from jobsync.queue.enqueue import build_messages
from jobsync.queue.local_workers import LocalWorkers
from jobsync.queue.placing import check_order
from jobsync.queue.pull import ClaimedMessage, PulledClaims
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.results import wait_for_result
from jobsync.queue.settings import QueueSettings

__all__ = ["MessageCalls"]

_LARGEST_CLAIM = 1_000
"""The most messages that a program claims at once: so many become suspects if it dies."""


PENDING: tuple[MessageState, ...] = ("ready", "waiting", "blocked")
"""States of messages that nobody has claimed yet."""


_COUNTED: Mapping[str, tuple[MessageState, ...]] = {
    "pending": PENDING,
    "processing": ("claimed",),
    "all": (*LIVE, *FINISHED),
    **{state: (state,) for state in (*LIVE, *FINISHED)},
}


@on_home_loop
class MessageCalls(ABC, Generic[RecordT]):
    """What `QueuePlugin` does with stored messages, and for programs that own their loop."""

    resource: str
    settings: QueueSettings
    _payload: RecordType[RecordT] | None
    """What messages without a task are; documents by default."""
    _workers: LocalWorkers
    _reporter: QueueReporter
    _pulled: PulledClaims | None = None
    _pulled_task: "asyncio.Task[None] | None" = None

    async def enqueue(
        self, data: RecordT | Mapping[str, Json], **options: Unpack[EnqueueOptions]
    ) -> str:
        """Push a message; return its id. See `Resource.enqueue`.

        Raises:
            Invalid: it is not of the queue's `payload`, or an option is wrong; nothing was pushed.
        """
        (name,) = await self.enqueue_many([data], **options)
        return name

    async def enqueue_many(
        self, data: Sequence[RecordT | Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Push messages in order, all or none; return their ids. See `Resource.enqueue`."""
        new_messages = self._build_messages(data, options)
        ids = [message.id for message in new_messages]
        connection = options.get("connection")
        if connection is not None:
            # Only the caller knows whether and when it commits: no event, no wake-up.
            holders = await self._get_backend().push_within(connection, new_messages)
        else:
            holders = await self._get_backend().push(new_messages)
            self._workers.wake()
            added = [name for name in ids if name not in holders] if holders else ids
            self._reporter.on_enqueued(added)
        return [holders.get(name, name) for name in ids] if holders else ids

    def enqueue_sync(
        self, data: RecordT | Mapping[str, Json], **options: Unpack[EnqueueOptions]
    ) -> str:
        """Push a message from a plain function; return its id. See `Resource.enqueue_sync`."""
        check_blocking("queue.enqueue_sync", "await queue.enqueue(…) instead")
        (name,) = self.enqueue_many_sync([data], **options)
        return name

    def enqueue_many_sync(
        self, data: Sequence[RecordT | Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Push messages, all or none; return their ids. See `Resource.enqueue_sync`."""
        check_blocking("queue.enqueue_many_sync", "await queue.enqueue_many(…) instead")
        home, work = self.database.home_loop, self.enqueue_many(data, **options)
        return home.call(work) if options.get("connection") is None else home.call_here(work)

    def check_messages(
        self, data: Sequence[RecordT | Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> None:
        """Check messages and options as `enqueue_many` does; push nothing."""
        self._build_messages(data, options)

    def _build_messages(self, data: Sequence[Any], options: EnqueueOptions) -> list[NewMessage]:
        data = as_list("data", data)
        options = self._complete_options(data, options)
        if self._payload is not None and not options.get("task"):
            data = [self._payload.encode_checked(each) for each in data]
        ids = self.database.components.ids.records(len(data))
        resource = self.database.resource(self.resource)
        new_messages = build_messages(resource, data, ids, options, self.settings.max_attempts)
        if "priority" in options:
            check_order(new_messages, self.settings.order)
        return new_messages

    async def count(self, state: str = "pending") -> int:
        """Count messages that are pending, processing, completed, dead, cancelled, or all."""
        check_state(state, _COUNTED)
        counts = await self._get_backend().count()
        return sum(counts.get(counted, 0) for counted in _COUNTED[state])

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages in a state, the oldest first; continue after the last one's `cursor`."""
        return await self._get_backend().browse(state, after=after, limit=limit)

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> list[MessageInfo]:
        """Return the messages without attempts left, with every error."""
        return await self._get_backend().browse("dead", after=after, limit=limit)

    async def redrive(self, ids: Sequence[str] | None = None, *, limit: int | None = None) -> int:
        """Queue dead letters again, all or by id, with all their attempts; return how many.

        Args:
            ids: the messages; without ids, all dead letters.
            limit: the most messages to queue again, the oldest first; None for no limit.
        """
        return await self._get_backend().redrive(ids, limit=limit)

    async def purge(self, *, include_dead: bool = False) -> int:
        """Remove unclaimed messages, optionally the dead letters too; return how many."""
        return await self._get_backend().purge([*PENDING, *(("dead",) if include_dead else ())])

    def pause(self) -> None:
        """Stop claiming in this process until `resume`; running handlers continue.

        Messages are handled all the same by `drain`, which is called for that.
        """
        self._workers.pause(is_paused=True)

    def resume(self) -> None:
        """Claim again."""
        self._workers.pause(is_paused=False)

    async def pause_everywhere(self, reason: str = "") -> bool:
        """Stop all processes from claiming until `resume_everywhere`; running handlers continue.

        The pause is stored, so processes that start later do not claim either. False means
        that the queue was already paused, and nothing changed.

        Raises:
            OutcomeUnknown: it may or may not be paused; calling again is safe.
        """
        return await self._get_backend().pause(reason)

    async def resume_everywhere(self) -> bool:
        """Allow all processes to claim again; False means that the queue was not paused.

        Raises:
            OutcomeUnknown: it may or may not be paused; calling again is safe.
        """
        return await self._get_backend().resume()

    async def get(self, id: str) -> MessageInfo | None:
        """Return a message in any state, with its progress or its result; None if it is unknown.

        A completed message is known for `completed_ttl`.
        """
        return await self._get_backend().get(id)

    async def cancel(self, id: str) -> bool:
        """Cancel a message that is not finished; return whether this call did.

        It is kept as `cancelled`, and `redrive([id])` queues it again. If it is claimed, its claim
        ends: a coroutine that handles it is cancelled, a plain function sees `context.lost`, at
        once in this process and at the next renewal in others. What the handler returns or raises
        after that is refused. What it did before stays done.

        Raises:
            OutcomeUnknown: it may or may not have been cancelled; calling again is safe.
        """
        ended = await self._get_backend().cancel(id)
        if ended is None:
            return False
        self._reporter.on_cancelled(ended)
        if ended.session:
            await self._workers.confirm(id)
            if self._pulled is not None:
                await self._pulled.confirm(id)
        return True

    async def delete(self, id: str) -> bool:
        """Remove a message for good, in whatever state; return whether this call did.

        Raises:
            Invalid: it is claimed: cancel it first.
            OutcomeUnknown: it may or may not have been deleted; calling again is safe.
        """
        answer = await self._get_backend().delete(id)
        if answer == "claimed":
            problem = "cannot be deleted while it is claimed"
            raise Invalid("id", id, problem, "cancel it first: await queue.cancel(id)")
        return answer == "deleted"

    async def run_now(self, id: str) -> bool:
        """End the delay of a message, or its pause after a failure; return whether it had one.

        A message that is ready, claimed or finished has none: nothing happens to it. `redrive`
        queues a dead letter again.

        Raises:
            OutcomeUnknown: it may or may not have ended; calling again is safe.
        """
        has_changed = await self._get_backend().run_now(id)
        if has_changed:
            self._workers.wake()
        return has_changed

    async def result(self, id: str, *, timeout: float | None = None) -> Json:
        """Wait until a message is completed; return what its handler returned.

        Args:
            id: the message.
            timeout: seconds to wait at most; None for no limit.

        Raises:
            NoResult: the message is dead, cancelled, unknown or forgotten, or its result could
                not be kept; the error says which.
            TimeoutError: it was not completed in time.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        clock, store = self.database.components.clock, self.database.store_name
        return await wait_for_result(self._get_backend(), clock, id, timeout, store)

    async def claim(self, limit: int = 1, *, wait: float = 0.0) -> list[ClaimedMessage[RecordT]]:
        """Claim messages, for a program that owns its loop instead of a handler.

        The claims are renewed in the background. Settle each with `ack` or `nack`. What is not
        settled when the queue stops is returned, and what is dropped has failed an attempt.

        A message whose worker died is claimed alone: then this returns one message, and none
        while it is held, for a third of the visibility timeout.

        Args:
            limit: the most messages to claim.
            wait: seconds to wait if there are none.

        Returns:
            The messages; fewer than `limit`, or none, if there are no more.

        Raises:
            Invalid: the queue is not running, or an argument is wrong.
            Unavailable: the store does not answer; nothing was claimed.
        """
        check_count("limit", limit, least=1, most=_LARGEST_CLAIM)
        check_seconds("wait", wait)
        self._check_running()
        if self._pulled is None or self._pulled.ended.is_set():
            self._pulled = self._build_pulled()
            self._pulled_task = self.run_in_background(self._pulled.run, "claims")
        return await self._pulled.claim(limit, wait)

    async def drain(self, *, max_messages: int | None = None, deadline: float | None = None) -> int:
        """Handle messages until none is left, for one-shot runs; return how many.

        It waits for what a rate limit holds back, and not for delays.

        The background worker of this process stops meanwhile: its messages in flight are
        finished and counted, or returned.

        Args:
            max_messages: stop after this many.
            deadline: claim no more after this many seconds.

        Raises:
            Invalid: the queue has no handler, or is not running, or an argument is wrong.
        """
        return await self._workers.drain(
            self._get_backend(),
            max_messages=max_messages,
            deadline=deadline,
            check=self._check_running,
        )

    def _stop_pulled(self) -> None:
        """Start to return the messages that the program has not settled."""
        if self._pulled is not None:
            self._pulled.stop(self.database.time_left)

    async def _wait_for_pulled(self) -> None:
        """Wait until they are returned."""
        task, self._pulled, self._pulled_task = self._pulled_task, None, None
        if task is not None:
            await asyncio.wait([task])

    @property
    @abstractmethod
    def database(self) -> Database:
        """The database of the queue."""

    @abstractmethod
    def run_in_background(self, work: Work, name: str) -> "asyncio.Task[None]":
        """Run work until the plugin stops."""

    @abstractmethod
    def _complete_options(self, data: Sequence[Any], options: EnqueueOptions) -> EnqueueOptions: ...

    @abstractmethod
    def _check_running(self) -> None: ...

    @abstractmethod
    def _get_backend(self) -> QueueBackend: ...

    @abstractmethod
    def _build_pulled(self) -> PulledClaims: ...
