"""What a queue backend does with one message from outside: show, cancel, delete, run now, progress.

Guarantees of every backend:

- A cancelled message is handled by nobody. If it was claimed, that claim has ended: its receipt is
  stale, so its holder can neither extend nor settle it.
- No message is deleted while it is claimed.
- What is shown of a message is one moment of it: a completed message is shown with its result.
- Progress is shown while the claim lasts that reported it, and at no other time.

On its own because `backend` is large.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from jobsync.core.codec import MAX_DEPTH

if TYPE_CHECKING:
    from jobsync.queue.backend import EndedClaim, MessageInfo, Receipt

__all__ = ["MAX_RESULT", "Deletion", "MessageOperations", "ProgressReport", "StoredResult"]

MAX_RESULT = 64 * 1024
"""The largest encoded result of a handler, in bytes."""

Deletion: TypeAlias = Literal["deleted", "claimed", "absent"]
"""What became of a request to delete a message."""


class StoredResult(msgspec.Struct, frozen=True, gc=False):
    """What a handler returned, as it is stored."""

    text: str | None
    """JSON; None if it is not kept."""
    problem: str = ""
    """Why it is not kept."""


class ProgressReport(msgspec.Struct, frozen=True, gc=False):
    """How far the handler of a claimed message is."""

    receipt: "Receipt"
    progress: float
    note: str
    """Printable, for people; may be empty."""


class MessageOperations(ABC):
    """What can be done with one message.

    Attributes:
        max_result: the largest encoded result that is stored, in bytes.
        max_depth: how deep a result may be nested.
    """

    max_result: int = MAX_RESULT
    max_depth: int = MAX_DEPTH

    @abstractmethod
    async def get(self, id: str) -> "MessageInfo | None":
        """Return a message of this queue, with its progress or its result; None if it is unknown.

        Raises:
            Unavailable: the store does not answer.
        """

    @abstractmethod
    async def cancel(self, id: str) -> "EndedClaim | None":
        """Cancel a message that is not finished; end its claim if it is claimed.

        Returns:
            Its attempt, and the session that had claimed it, empty if none had; None if there is no
            such message, or if it is finished.

        Raises:
            OutcomeUnknown: it may or may not have been cancelled; calling again is safe.
            Unavailable: nothing was done.
        """

    @abstractmethod
    async def delete(self, id: str) -> Deletion:
        """Remove a message for good, unless it is claimed.

        Raises:
            OutcomeUnknown: it may or may not have been deleted; calling again is safe.
            Unavailable: nothing was done.
        """

    @abstractmethod
    async def run_now(self, id: str) -> bool:
        """End the delay of a message, or its pause after a failure; False means that it has none.

        Raises:
            OutcomeUnknown: it may or may not have ended; calling again is safe.
            Unavailable: nothing was done.
        """

    @abstractmethod
    async def report_progress(self, reports: Sequence[ProgressReport]) -> None:
        """Store how far handlers are; where requests are billed, with the next renewal.

        Raises:
            Unavailable: no answer; sending the same again is safe.
        """

    @abstractmethod
    async def clear_progress(self, ids: Collection[str]) -> None:
        """Remove what was reported about messages that are settled.

        Raises:
            Unavailable: no answer; sending the same again is safe.
        """

    @abstractmethod
    async def wait_for_end(self, timeout: float) -> None:
        """Return early if a message may have ended. A hint: not every end is announced."""
