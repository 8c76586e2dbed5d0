"""Transactions of handlers: what a handler writes and the completion of its message, or neither.

    async with context.transaction() as connection:
        await connection.execute("INSERT INTO …")

Leaving the block completes the message on the same connection, fenced by the receipt, and commits.
If the claim has ended, or anything is raised, all of it is rolled back. If the reply to COMMIT is
lost, the claim is read under its lock until an answer arrives; meanwhile nothing else settles it.

A transaction has a time limit; see `transaction_backend`.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from jobsync.components import Components
from jobsync.coordination.session import count_forks
from jobsync.core.arguments import check_seconds
from jobsync.core.messages import Completed
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Invalid, MessageClaimLost, OutcomeUnknown, Unavailable
from jobsync.queue.backend import Message, QueueBackend, Receipt
from jobsync.queue.in_flight import Delivery, InFlight, WorkerListener
from jobsync.queue.transaction_backend import ClaimOutcome, OpenTransaction, TransactionBackend
from jobsync.user_code import end_forked_child

__all__ = [
    "TransactionBlock",
    "TransactionOpener",
    "check_no_transaction",
]

T = TypeVar("T")

_BACKOFF = ExponentialBackoff(first=0.1, longest=2.0)


class TransactionOpener:
    """Opens the transactions of a worker's handlers.

    Args:
        backend: where the messages are stored.
        in_flight: the claims of the worker.
        components: time and randomness.
        listener: the worker.
    """

    def __init__(
        self,
        backend: QueueBackend,
        in_flight: InFlight,
        components: Components,
        listener: WorkerListener,
    ) -> None:
        self.backend = backend
        self.in_flight = in_flight
        self.components = components
        self.listener = listener

    def open(
        self, message: Message, limit: float | None, *, is_blocking: bool
    ) -> "TransactionBlock":
        """Return a block that completes a message.

        Raises:
            Invalid: the store has no transactions, or the limit is out of range.
        """
        return TransactionBlock(self, message, limit, is_blocking=is_blocking)


def check_no_transaction(delivery: Delivery) -> None:
    """Raise if a message is to be settled beside the transaction that completes it."""
    if delivery.transaction is not None:
        fix = "leave the block: that completes the message; raise to fail it"
        raise Invalid("message", delivery.id, "cannot be settled within its transaction", fix)


class TransactionBlock:
    """One block of a handler: `async with`. A plain function enters and leaves it on the loop.

    Args:
        opener: the worker's.
        message: what the handler handles.
        limit: seconds that the transaction may take; None for the default.
        is_blocking: whether the handler is a plain function.
    """

    def __init__(
        self,
        opener: TransactionOpener,
        message: Message,
        limit: float | None,
        *,
        is_blocking: bool,
    ) -> None:
        self._transactions = _find_transactions(opener.backend)
        self._limit = _check_limit(limit, self._transactions)
        self._in_flight = opener.in_flight
        self._clock = opener.components.clock
        self._randomness = opener.components.randomness
        self._listener = opener.listener
        self._message = message
        self._is_blocking = is_blocking
        self._forks = count_forks()
        self._delivery: Delivery | None = None
        self._open: OpenTransaction | None = None
        self._timeout: asyncio.Timeout | None = None
        self._is_abandoned = False

    async def __aenter__(self) -> Any:
        """Begin the transaction; return the connection."""
        delivery = self._find_delivery()
        if delivery.transaction is not None:
            fix = "leave the first one before"
            raise Invalid("transaction", self._message.id, "is open already", fix)
        self._delivery, delivery.transaction = delivery, self
        try:
            opened = await self._transactions.begin(self._limit, is_blocking=self._is_blocking)
        except BaseException:
            delivery.transaction = None
            raise
        self._open = opened
        opened.start_timer()
        if not self._is_blocking:
            self._timeout = asyncio.timeout(self._limit)
            await self._timeout.__aenter__()
        return opened.connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the message and commit, or roll back."""
        end_forked_child(self._forks, "a handler")
        if self._timeout is not None:
            try:
                await self._timeout.__aexit__(kind, error, trace)
            except TimeoutError as late:
                error = late
        await self.leave(error)

    async def leave(self, error: BaseException | None) -> None:
        """End the block that raised this error, or none. The caller raises it again.

        Raises:
            MessageClaimLost: the claim had ended; all was rolled back.
            TimeoutError: it took too long; all was rolled back.
            Invalid: the handler has ended the transaction itself.
            Unavailable: the database does not answer; all was rolled back.
        """
        opened, delivery = self._open, self._delivery
        if opened is None or delivery is None:
            if self._is_abandoned and error is None:
                raise MessageClaimLost(self._message.id, "its handler had returned before")
            return
        self._open = None
        if isinstance(error, GeneratorExit):
            # This coroutine is closed: nothing can be awaited.
            opened.cut()
            delivery.transaction = None
            return
        opened.stop_timer()
        try:
            await _run_to_end(self._end(opened, delivery, error))
        finally:
            delivery.transaction = None

    def cut(self) -> None:
        """Roll back at once, on any thread: nobody will leave the block."""
        if self._open is not None:
            self._open.cut()

    async def abandon(self) -> None:
        """Roll back: the handler has returned, and its block is open."""
        opened, self._open, self._is_abandoned = self._open, None, True
        if opened is not None:
            opened.stop_timer()
            opened.cut()
            await _run_to_end(opened.close())

    async def _end(
        self, opened: OpenTransaction, delivery: Delivery, error: BaseException | None
    ) -> None:
        if opened.is_expired or (self._timeout is not None and self._timeout.expired()):
            await opened.close()
            if error is None or isinstance(error, Exception):
                raise TimeoutError(
                    f"context.transaction() took longer than {opened.limit:g} s and was rolled back"
                ) from error
        elif error is not None:
            await opened.close()
        else:
            await self._complete(opened, delivery)

    async def _complete(self, opened: OpenTransaction, delivery: Delivery) -> None:
        """Complete the message and commit."""
        now = self._clock.mono()
        self._in_flight.check(delivery, now)
        if self._in_flight.find(self._message) is not delivery:
            await opened.close()
            raise MessageClaimLost(delivery.id, "it was settled or lost before the COMMIT")
        # From here on nothing else settles it, renews it or gives it up.
        delivery.is_settling, delivery.verdict = True, Completed()
        if delivery.started is not None:
            delivery.duration = now - delivery.started
        try:
            is_ours = await self._commit(opened)
        except BaseException:
            # All of it was rolled back: the handler has failed.
            delivery.is_settling, delivery.verdict = False, None
            self._listener.on_rolled_back(delivery)
            raise
        if is_ours and delivery.context is not None:
            delivery.context.is_settled = True
        self._listener.on_answer(delivery, is_accepted=is_ours)
        if not is_ours:
            raise MessageClaimLost(delivery.id, "another worker has it, or it was settled")

    async def _commit(self, opened: OpenTransaction) -> bool:
        """Commit; False means that the claim has ended, and all was rolled back."""
        receipt = self._message.receipt
        try:
            await opened.check()
            if not await self._transactions.complete_within(opened.connection, receipt):
                return False
            await opened.commit()
        except OutcomeUnknown as error:
            unknown = error
        else:
            return True
        finally:
            await opened.close()
        outcome = await self._read_outcome(receipt)
        if outcome == "open":
            reason = "the reply to COMMIT was lost, and the transaction was rolled back"
            raise Unavailable(unknown.key, reason) from unknown
        return outcome == "completed"

    async def _read_outcome(self, receipt: Receipt) -> ClaimOutcome:
        attempt = 0
        while True:
            try:
                return await self._transactions.read_outcome(receipt)
            except (OutcomeUnknown, Unavailable) as error:
                self._listener.on_failure(error)
                attempt += 1
                await _BACKOFF.sleep(attempt, self._clock, self._randomness)

    def _find_delivery(self) -> Delivery:
        delivery = self._in_flight.find(self._message)
        if delivery is None or not self._in_flight.check(delivery, self._clock.mono()):
            raise MessageClaimLost(self._message.id, "it is settled, or its claim is lost")
        return delivery


def _find_transactions(backend: QueueBackend) -> TransactionBackend:
    if backend.transactions is None:
        problem = "has no transactions: its store is not a database file or server"
        fix = "use SQLite or PostgreSQL, or make the handler safe to repeat"
        raise Invalid("queue", backend.queue, problem, fix)
    return backend.transactions


def _check_limit(limit: float | None, transactions: TransactionBackend) -> float:
    if limit is None:
        return transactions.default_limit
    check_seconds("timeout", limit, is_zero_allowed=False, most=transactions.longest)
    return float(limit)


async def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end, even if the caller is cancelled; the cancellation passes after it."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # retrieved, so that it is not logged
    raise cancelled
