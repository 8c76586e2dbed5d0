"""Keys whose pushes had an unknown outcome, so that pushing them again doubles nothing.

While its message is pending a key protects itself. But the message may have arrived unnoticed, and
be finished when it is pushed again.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from jobsync.queue.backend import NewMessage

__all__ = ["DoubtfulKeys"]

_MAX_KEYS = 1_000


class DoubtfulKeys:
    """The latest such keys of this process.

    Args:
        exists: returns whether a message exists, finished or not.
    """

    def __init__(self, exists: Callable[[Sequence[str]], Awaitable[bool]]) -> None:
        self._exists = exists
        self._ids: dict[str, str] = {}

    def add(self, new_messages: Sequence[NewMessage]) -> None:
        """Remember the keys of messages that may or may not have arrived."""
        self._ids |= {each.key: each.id for each in new_messages if each.key is not None}
        while len(self._ids) > _MAX_KEYS:
            del self._ids[next(iter(self._ids))]

    async def find_arrived(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str]:
        """Return the messages of these keys that have arrived, by the ids of the new ones."""
        if not self._ids:
            return {}
        arrived: dict[str, str] = {}
        for message in new_messages:
            former = self._ids.pop(message.key, None) if message.key is not None else None
            if former is not None and await self._exists([former]):
                arrived[message.id] = former
        return arrived
