"""All queues of a store, for callers that do not know their names; read-only.

On its own because `jobsync.queue.sql` implements it for databases, `jobsync.queue.pages` for other
stores, and neither knows the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import msgspec

from jobsync.core.messages import MessageState
from jobsync.queue.backend import MessageInfo, QueuePart

__all__ = ["TOPIC", "Pause", "QueueContent", "QueueDirectory"]

TOPIC = "queues"
"""How errors and reports name the directory."""


class Pause(msgspec.Struct, frozen=True):
    """The pause of a queue: nobody claims from it."""

    since: float
    """Unix seconds, by the store's clock."""
    reason: str
    """For people; may be empty."""


class QueueContent(msgspec.Struct, kw_only=True):
    """What is in one queue."""

    counts: dict[MessageState, int] = {}
    """The number of messages in each state that occurs."""
    oldest: float | None = None
    """When the oldest unclaimed message was pushed; Unix seconds."""
    claims: dict[str, int] = {}
    """The number of messages that each session has claimed."""
    pause: Pause | None = None


class QueueDirectory(ABC):
    """All queues of one store, read-only, for callers that do not know the queues' names.

    Attributes:
        set_aside: the keys of records with several messages that could not be read so far.
    """

    set_aside: Collection[str] = ()

    @abstractmethod
    async def read_contents(self) -> Mapping[str, QueueContent]:
        """Return the content of each queue that has messages or is paused, by name.

        Raises:
            Unavailable: the store does not answer.
        """

    @abstractmethod
    async def find(self, ids: Collection[str]) -> Sequence[MessageInfo]:
        """Return the messages with these ids, in any queue; missing ones are left out.

        Raises:
            Unavailable: the store does not answer.
        """

    async def find_head(self, queue: str, group: str) -> MessageInfo | None:
        """Return the message of a group that blocks the others; None if there is none.

        Raises:
            Unavailable: the store does not answer.
        """
        del queue, group
        return None

    @abstractmethod
    async def list(
        self, queue: str, part: QueuePart, *, after: str, limit: int
    ) -> Sequence[MessageInfo]:
        """Return messages of a queue by id, starting after an id.

        Raises:
            Invalid: an argument is wrong.
            Unavailable: the store does not answer.
        """
