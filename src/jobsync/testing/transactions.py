"""Transactions of simulated handlers.

A handler writes nothing real. What it would have written is recorded as its effect, in the commit
that completes its message: one request carries the completion and the COMMIT.
"""

from collections.abc import Awaitable, Callable

from jobsync.core.codec import Json
from jobsync.errors import Unavailable
from jobsync.queue.backend import Receipt
from jobsync.queue.transaction_backend import ClaimOutcome, OpenTransaction, TransactionBackend
from jobsync.testing.rows import RowLink

__all__ = ["SimulatedTransactions"]

Record = Callable[[Receipt, Callable[[], Awaitable[bool]]], Awaitable[bool]]
"""Records a request that completes a message, and its reply."""


class _SimulatedTransaction(OpenTransaction):
    """A transaction whose time is limited on the loop alone: a simulated node has no threads."""

    def __init__(self, limit: float) -> None:
        super().__init__(None, limit)
        self._is_cut = False

    def start_timer(self) -> None:
        """Do nothing."""

    def cut(self) -> None:
        """Roll it back."""
        self._is_cut = True

    async def check(self) -> None:
        """Check that it can be committed."""
        if self._is_cut:
            raise Unavailable("transaction", "was rolled back")

    async def commit(self) -> None:
        """Do nothing: it was committed with the completion."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class SimulatedTransactions(TransactionBackend):
    """Transactions on the database of a queue in a simulated world.

    Args:
        inner: the library's own, which completes messages.
        access: the database.
        record: records the requests.
    """

    def __init__(self, inner: TransactionBackend, access: RowLink, record: Record) -> None:
        self.access = access
        self.default_limit = inner.default_limit
        self.longest = inner.longest
        self._link = access
        self._inner = inner
        self._record = record

    async def begin(self, limit: float, *, is_blocking: bool) -> OpenTransaction:
        """Reach the database and begin a transaction."""
        del is_blocking
        await self._link.begin()
        return _SimulatedTransaction(limit)

    async def complete_within(
        self, connection: object, receipt: Receipt, result: Json = None
    ) -> bool:
        """Complete a message and commit; False if its claim has ended."""
        del connection, result
        return await self._record(
            receipt, lambda: self._link.complete_and_commit(self._inner, receipt)
        )

    async def read_outcome(self, receipt: Receipt) -> ClaimOutcome:
        """Read what became of a message."""
        return await self._inner.read_outcome(receipt)
