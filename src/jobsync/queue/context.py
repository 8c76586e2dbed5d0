"""What a handler knows about its message, and what it can do with its claim.

In an `async def` handler, `extend`, `ack` and `nack` are awaited. In a plain function they block:
see `BlockingContext`.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jobsync.coordination.session import count_forks
from jobsync.core.clock import Clock, Wall
from jobsync.core.codec import Json
from jobsync.core.messages import Completed, Failed, HandlerVerdict
from jobsync.errors import MessageClaimLost
from jobsync.queue.backend import Message
from jobsync.safe_text import safe_str
from jobsync.user_code import end_forked_child

if TYPE_CHECKING:
    from jobsync.queue.transaction import TransactionBlock

__all__ = ["BlockingContext", "ClaimOwner", "Context"]


T = TypeVar("T")


class ClaimOwner(Protocol):
    """The worker that holds the claim."""

    async def settle(self, message: Message, verdict: HandlerVerdict) -> bool:
        """End the claim; return whether the store accepted it."""
        ...

    async def extend(self, message: Message, seconds: float) -> bool:
        """Extend the claim; return whether it stands."""
        ...

    def open_transaction(
        self, message: Message, limit: float | None, *, is_blocking: bool
    ) -> "TransactionBlock":
        """Return a transaction that completes the message."""
        ...

    def report_progress(self, message: Message, progress: float, note: str) -> None:
        """Report how far a handler is."""
        ...


class Context:
    """The context of a message while its handler runs.

    Args:
        message: the message.
        worker_id: this worker's name.
        clock: this machine's clock.
        timeout: seconds that the handler may take from now; None for no limit.
        owner: the worker that holds the claim.

    Attributes:
        id: the message's id.
        attempt: the number of this attempt, counted from 1.
        max_attempts: how many attempts there are.
        worker_id: this worker's name.
        epoch: grows with every delivery of this message. Store it with what the handler writes:
            it distinguishes a handler that was replaced from its successor.
        lost: whether the claim has ended, or may have. Stop: nothing counts any more.
        is_settled: whether `ack` or `nack` was called, or a transaction has completed it.
    """

    def __init__(
        self,
        message: Message,
        worker_id: str,
        clock: Clock,
        timeout: float | None,
        owner: ClaimOwner,
    ) -> None:
        self.id = message.id
        self.attempt = message.attempt
        self.max_attempts = message.max_attempts
        self.worker_id = worker_id
        self.epoch = message.receipt.deliveries
        self.lost = False
        self.is_settled = False
        self._message = message
        self._started = clock.wall()
        self._timeout = timeout
        self._owner = owner

    @property
    def deadline(self) -> Wall | None:
        """When the handler's time ends, by the wall clock; None for no limit."""
        return None if self._timeout is None else self._started + self._timeout

    async def extend(self, seconds: float) -> bool:
        """Extend the claim to this many seconds from now; False means that it is lost."""
        return await self._owner.extend(self._message, seconds)

    async def ack(self, result: Json = None) -> bool:
        """Complete the message, and keep the result; False means that the claim was lost before."""
        return await self.settle(Completed(result))

    async def nack(self, error: object = "not acknowledged") -> bool:
        """Fail this attempt; False means that the claim was lost before."""
        return await self.settle(Failed(safe_str(error)))

    async def settle(self, outcome: HandlerVerdict) -> bool:
        """End the claim; return whether the store accepted it."""
        self.is_settled = True
        return await self._owner.settle(self._message, outcome)

    def transaction(self, timeout: float | None = None) -> AbstractAsyncContextManager[Any]:
        """Write to the queue's own database, together with the completion of the message.

        Leaving the block completes the message and commits; raising rolls back, and the attempt
        fails. What the handler returns after that adds nothing.

        Args:
            timeout: seconds after which it is rolled back: 60 by default on PostgreSQL; 5 on
                SQLite, which is the most there, because it blocks every other writer.

        Yields:
            On PostgreSQL, psycopg's `AsyncConnection`; on SQLite, a `sqlite3.Connection`.

        Raises:
            Invalid: the store has no transactions, or one is open, or the block has ended it.
            MessageClaimLost: the claim has ended; nothing was written.
            TimeoutError: it took too long; nothing was written.
            Unavailable: the database does not answer; nothing was written.
        """
        return self._owner.open_transaction(self._message, timeout, is_blocking=False)

    def open_blocking_transaction(self, timeout: float | None) -> "TransactionBlock":
        """Return a transaction for a plain function."""
        return self._owner.open_transaction(self._message, timeout, is_blocking=True)

    def progress(self, progress: float, note: str = "") -> None:
        """Report how far the handler is, from 0 to 1, with a note for people.

        It becomes an event, and is stored about once a second while the claim lasts: `jobsync why`
        and `queue.get(id)` show it. Where requests are billed, it is stored with the renewals of
        the claim. What cannot be stored, such as a value that is not a number, is only an event.
        """
        self._owner.report_progress(self._message, progress, note)


class BlockingContext:
    """The context for a plain function, which runs on a thread.

    Args:
        context: the message's context.
        loop: the event loop of the worker.
    """

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self.id = context.id
        self.attempt = context.attempt
        self.max_attempts = context.max_attempts
        self.worker_id = context.worker_id
        self.epoch = context.epoch
        self.deadline = context.deadline
        self.has_shown_loss = False
        """Whether the function has read `lost` as true."""

    @property
    def lost(self) -> bool:
        """Whether the claim has ended, or may have. Stop: nothing counts any more."""
        if self._context.lost:
            self.has_shown_loss = True
        return self.has_shown_loss

    def extend(self, seconds: float) -> bool:
        """Extend the claim to this many seconds from now; False means that it is lost."""
        return self._run(self._context.extend(seconds))

    def ack(self, result: Json = None) -> bool:
        """Complete the message; False means that the claim was lost before."""
        return self._run(self._context.ack(result))

    def nack(self, error: object = "not acknowledged") -> bool:
        """Fail this attempt; False means that the claim was lost before."""
        return self._run(self._context.nack(error))

    def transaction(self, timeout: float | None = None) -> AbstractContextManager[Any]:
        """Write to the queue's own database, together with the completion of the message.

        As `Context.transaction`, but with psycopg's `Connection`.
        """
        return self._transact(self._context.open_blocking_transaction(timeout))

    @contextmanager
    def _transact(self, block: "TransactionBlock") -> Iterator[Any]:
        forks = count_forks()
        connection = self._run(block.__aenter__())
        try:
            yield connection
        except GeneratorExit:
            # It was never left, and is collected, perhaps on the worker's own thread.
            block.cut()
            raise
        except BaseException as error:
            end_forked_child(forks, "a handler")
            self._leave(block, error)
            raise
        end_forked_child(forks, "a handler")
        self._leave(block, None)

    def _leave(self, block: "TransactionBlock", error: BaseException | None) -> None:
        try:
            self._run(block.leave(error))
        except (RuntimeError, CancelledError) as gone:
            # The worker's loop is closed, or has cancelled this.
            block.cut()
            raise MessageClaimLost(self.id, "its worker has ended") from gone

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop, and block until it has ended."""
        try:
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        return running.result()

    def progress(self, progress: float, note: str = "") -> None:
        """Report how far the handler is, from 0 to 1, with a note for people: see `Context`."""
        self._loop.call_soon_threadsafe(self._context.progress, progress, note)
