"""Where a resource hands its messages in. A queue is one; the resource knows no more of it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jobsync.core.codec import Json

__all__ = ["MessageSink"]


class MessageSink(Protocol):
    """Takes messages."""

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> str:
        """Take one message; give its id."""
        ...

    async def enqueue_many(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> list[str]:
        """Take messages, all or none; give their ids."""
        ...
