"""All queues of a store, for callers that do not know their names; read-only.

`jobsync.queue.sql` reads them from databases, `jobsync.queue.pages` from other stores.

On its own because both implement it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from jobsync.queue.backend import MessageInfo, QueueContent, QueuePart

__all__ = ["TOPIC", "QueueDirectory"]

TOPIC = "queues"
"""How errors and reports name the directory."""


class QueueDirectory(ABC):
    """All queues of one store, read-only, for callers that do not know the queues' names."""

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

    @abstractmethod
    async def list(
        self, queue: str, part: QueuePart, *, after: str, limit: int
    ) -> Sequence[MessageInfo]:
        """Return messages of a queue by id, starting after an id.

        Raises:
            Invalid: an argument is wrong.
            Unavailable: the store does not answer.
        """
