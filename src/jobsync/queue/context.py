"""What a handler is told about its message, and what it can do about it.

In an `async def` handler `extend`, `ack` and `nack` are awaited; in a plain function they
block, see `BlockingContext`.
"""

import asyncio
from typing import Protocol

from jobsync.core.clock import Clock, Wall
from jobsync.core.codec import Json
from jobsync.core.messages import Completed, Failed, HandlerVerdict
from jobsync.queue.backend import Message

__all__ = ["BlockingContext", "ClaimOwner", "Context"]


class ClaimOwner(Protocol):
    """Whoever holds the claim."""

    async def settle(self, message: Message, outcome: HandlerVerdict) -> bool:
        """End the claim; say whether the store took it."""
        ...

    async def extend(self, message: Message, seconds: float) -> bool:
        """Let the claim hold on; say whether it does."""
        ...

    def report_progress(self, message: Message, progress: float) -> None:
        """Tell how far a handler is."""
        ...


class Context:
    """A message's, for as long as its handler runs.

    Args:
        message: which one.
        worker_id: this worker's name.
        clock: this machine's.
        timeout: seconds that the handler has from now; None if it has no end.
        desk: who holds the claim.

    Attributes:
        id: the message's.
        attempt: which one this is, counted from 1.
        max_attempts: how many there are.
        worker_id: this worker's name.
        epoch: grows with every delivery of this message: carry it into what the handler
            writes, and a handler that was replaced can be told from its successor.
        lost: whether the claim has ended, or may have: stop, nothing counts any more.
        is_settled: whether `ack` or `nack` was called.
    """

    def __init__(
        self,
        message: Message,
        worker_id: str,
        clock: Clock,
        timeout: float | None,
        desk: ClaimOwner,
    ) -> None:
        self.id = message.id
        self.attempt = message.attempt
        self.max_attempts = message.max_attempts
        self.worker_id = worker_id
        self.epoch = message.receipt.deliveries
        self.lost = False
        self.is_settled = False
        self._message = message
        self._begun = clock.wall()
        self._timeout = timeout
        self._desk = desk

    @property
    def deadline(self) -> Wall | None:
        """When its time is over, by the wall clock; None if it has no end."""
        return None if self._timeout is None else self._begun + self._timeout

    async def extend(self, seconds: float) -> bool:
        """Let the claim hold for so long from now, renewed or not; False says it is lost."""
        return await self._desk.extend(self._message, seconds)

    async def ack(self, result: Json = None) -> bool:
        """Say that the message is handled; False says that the claim was lost before."""
        return await self.settle(Completed(result))

    async def nack(self, error: object = "not acknowledged") -> bool:
        """Say that this attempt failed; False says that the claim was lost before."""
        return await self.settle(Failed(str(error)))

    async def settle(self, outcome: HandlerVerdict) -> bool:
        """End the claim; say whether the store took it."""
        self.is_settled = True
        return await self._desk.settle(self._message, outcome)

    def progress(self, progress: float) -> None:
        """Tell how far it is, as an event."""
        self._desk.report_progress(self._message, progress)


class BlockingContext:
    """The same for a plain function, which runs on a thread.

    Args:
        context: the message's.
        loop: where everything else runs.
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

    @property
    def lost(self) -> bool:
        """Whether the claim has ended, or may have: stop, nothing counts any more."""
        return self._context.lost

    def extend(self, seconds: float) -> bool:
        """Let the claim hold for so long from now."""
        return asyncio.run_coroutine_threadsafe(self._context.extend(seconds), self._loop).result()

    def ack(self, result: Json = None) -> bool:
        """Say that the message is handled."""
        return asyncio.run_coroutine_threadsafe(self._context.ack(result), self._loop).result()

    def nack(self, error: object = "not acknowledged") -> bool:
        """Say that this attempt failed."""
        return asyncio.run_coroutine_threadsafe(self._context.nack(error), self._loop).result()

    def progress(self, progress: float) -> None:
        """Tell how far it is, as an event."""
        self._loop.call_soon_threadsafe(self._context.progress, progress)
