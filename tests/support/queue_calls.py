"""Calls of queue backends, as most tests make them."""

from collections.abc import Iterable
from typing import Any

from jobsync.core.messages import Transition
from jobsync.queue.backend import Message, NewMessage, QueueBackend, Settlement

__all__ = ["ME", "OTHER", "claim", "new_messages", "settle"]

ME, OTHER = "worker-1.a", "worker-2.b"
"""Two sessions."""


def new_messages(*names: str, **options: Any) -> list[NewMessage]:
    """Return messages with these ids."""
    options = {"max_attempts": 4, "value": {"n": 1}, **options}
    return [NewMessage(id=name, **options) for name in names]


async def claim(backend: QueueBackend, limit: int = 10, **options: Any) -> list[Message]:
    """Claim as `ME` for a minute by default."""
    claimed = await backend.claim(limit, **{"session": ME, "visibility": 60, **options})
    return claimed.messages


async def settle(
    backend: QueueBackend, messages: Iterable[Message], move: Transition
) -> list[bool]:
    """Settle claims in one way."""
    return await backend.settle([Settlement(receipt=each.receipt, move=move) for each in messages])
