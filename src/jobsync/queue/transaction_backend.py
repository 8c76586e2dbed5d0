"""The interface to the transactions of handlers on a database, and their time limits.

Past its limit a transaction is cut off, whatever the handler does: a thread watches the time,
because the handler may block the event loop.
"""

import os
import threading
from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

from jobsync.core.clock import Mono, SystemClock
from jobsync.core.codec import Json
from jobsync.errors import Invalid
from jobsync.queue.backend import Receipt
from jobsync.stores.sql import SqlAccess

__all__ = [
    "END_FIX",
    "ClaimOutcome",
    "OpenTransaction",
    "TransactionBackend",
    "build_ended_error",
    "build_refusal",
]

ClaimOutcome: TypeAlias = Literal["open", "completed", "ended"]
"""Whether a message is claimed, was completed, or its claim has ended in another way."""

END_FIX = "leave COMMIT, ROLLBACK and close() to context.transaction()"
"""What to do instead of ending a transaction."""

_IDLE = 10.0
"""Seconds after which the thread of the time limits ends, if there is no transaction."""


class _TimeLimits:
    """Ends the transactions of this process whose time is over.

    On a thread of its own, which no handler can block; it runs while there are transactions.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._clock = SystemClock()
        self._ends: dict[OpenTransaction, Mono] = {}
        self._next_look: Mono | None = None
        """When the thread looks; None if there is no thread."""

    def add(self, transaction: "OpenTransaction", seconds: float) -> None:
        """End a transaction after so many seconds, unless it is removed before."""
        with self._changed:
            self._ends[transaction] = end = self._clock.mono() + seconds
            if self._next_look is None:
                self._next_look = end
                threading.Thread(target=self._run, name="jobsync-limits", daemon=True).start()
            elif end < self._next_look:
                self._next_look = end
                self._changed.notify()

    def remove(self, transaction: "OpenTransaction") -> None:
        """Stop limiting a transaction."""
        with self._changed:
            self._ends.pop(transaction, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = self._clock.mono()
                late = [each for each, end in self._ends.items() if end <= now]
                for transaction in late:
                    del self._ends[transaction]
                if not late:
                    is_used = bool(self._ends)
                    self._next_look = min(self._ends.values(), default=now + _IDLE)
                    self._changed.wait(max(0.0, self._next_look - now))
                    if not (is_used or self._ends):
                        self._next_look = None
                        return
            for transaction in late:
                # It may have to wait for a statement of the handler's.
                threading.Thread(target=transaction.expire, daemon=True).start()


_limits: dict[int, _TimeLimits] = {}
"""By process: a forked child has no such thread."""


class OpenTransaction(ABC):
    """A transaction that has begun, on a connection of its own.

    Args:
        connection: for the handler.
        limit: seconds after which it is rolled back.
    """

    def __init__(self, connection: Any, limit: float) -> None:
        self.connection = connection
        self.limit = limit
        self.is_expired = False
        self._is_ending = False
        self._lock = threading.Lock()
        self._limits = _limits.setdefault(os.getpid(), _TimeLimits())

    def start_timer(self) -> None:
        """Start its time limit."""
        self._limits.add(self, self.limit)

    def stop_timer(self) -> None:
        """End its time limit: from now on only its owner ends it."""
        self._limits.remove(self)
        with self._lock:
            self._is_ending = True

    def expire(self) -> None:
        """Roll it back because its time is over, unless it is being ended."""
        with self._lock:
            if not self._is_ending:
                self.is_expired = True
                self.cut()

    @abstractmethod
    def cut(self) -> None:
        """Roll it back at once, on any thread, even if the handler uses the connection."""

    @abstractmethod
    async def check(self) -> None:
        """Check that it can be committed.

        Raises:
            Invalid: the handler has ended the transaction, or closed the connection.
            Unavailable: the connection is lost.
        """

    @abstractmethod
    async def commit(self) -> None:
        """Commit it.

        Raises:
            OutcomeUnknown: it was committed or rolled back.
            Exception: it was rolled back.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; what was not committed is rolled back. Raises nothing."""


class TransactionBackend(ABC):
    """Opens transactions on the database of a queue.

    Attributes:
        access: the connection to the database.
        default_limit: seconds that a transaction may take by default.
        longest: the most seconds.
    """

    access: SqlAccess
    default_limit: float
    longest: float

    @abstractmethod
    async def begin(self, limit: float, *, is_blocking: bool) -> OpenTransaction:
        """Open a connection and begin a transaction.

        Args:
            limit: seconds that it may take.
            is_blocking: whether the connection is for a plain function.

        Raises:
            Unavailable: the database does not answer, or others write all the time.
        """

    @abstractmethod
    async def complete_within(
        self, connection: object, receipt: Receipt, result: Json = None
    ) -> bool:
        """Complete a message in the caller's transaction; False if its claim has ended."""

    @abstractmethod
    async def read_outcome(self, receipt: Receipt) -> ClaimOutcome:
        """Read what became of a message, under the lock that its completion needs.

        So a transaction that may still commit has ended before this returns.

        Raises:
            OutcomeUnknown, Unavailable: no answer; calling again is safe.
        """


def build_refusal(driver: str, statement: str) -> Invalid:
    """Return the error of a statement that would end the transaction of a block."""
    problem = f"must not end the transaction of the block ({statement} was refused)"
    fix = (
        "leave the block of context.transaction() to commit, raise to roll back, and run the "
        "statements of a script one by one"
    )
    return Invalid("connection", driver, problem, fix)


def build_ended_error(driver: str, reason: str) -> Invalid:
    """Return the error of a transaction that no longer exists."""
    problem = f"has no transaction of the block any more ({reason})"
    return Invalid("connection", driver, problem, END_FIX)
