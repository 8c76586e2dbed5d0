"""Checks of what is pushed to a queue in pages, made before anything is sent.

The messages of a push are added all or none, so they must fit in one page: it has one priority, and
one message if that has a key.
"""

from collections.abc import Sequence

from jobsync.core.codec import encode
from jobsync.errors import Invalid
from jobsync.queue.backend import MAX_MESSAGE, NewMessage
from jobsync.queue.pages.page import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    MAX_MESSAGES,
    MAX_PAGE_DEPTH,
    MAX_PUSH_BYTES,
)

__all__ = ["check_push", "split_push"]


def check_push(new_messages: Sequence[NewMessage]) -> list[bytes]:
    """Return the encoded values of messages that fit in one page.

    Raises:
        Invalid: they do not, or one of them cannot be stored.
    """
    _check_places(new_messages)
    payloads = _encode(new_messages)
    ids = [each.id for each in new_messages]
    if len(set(ids)) < len(ids):
        raise Invalid("messages", len(ids), "must have unique ids", "give each message its own")
    return payloads


def split_push(new_messages: Sequence[NewMessage]) -> list[Sequence[NewMessage]]:
    """Return messages in parts, each of which fits in one page.

    Raises:
        Invalid: a message fits in none, or two of a part cannot be in one page.
    """
    parts: list[Sequence[NewMessage]] = []
    start = total = 0
    for number, message in enumerate(new_messages):
        size = len(_encode_one(message))
        if number - start == MAX_MESSAGES or total + size > MAX_PUSH_BYTES:
            parts.append(new_messages[start:number])
            start, total = number, 0
        total += size
    if new_messages:
        parts.append(new_messages[start:])
    for part in parts:
        _check_places(part)
    return parts


def _encode_one(message: NewMessage) -> bytes:
    return encode(message.value, "message", limit=MAX_MESSAGE, max_depth=MAX_PAGE_DEPTH)


def _encode(new_messages: Sequence[NewMessage]) -> list[bytes]:
    if len(new_messages) > MAX_MESSAGES:
        size = f"{len(new_messages):,} messages"
        raise Invalid("messages", size, f"must be {MAX_MESSAGES:,} or fewer", "push in parts")
    payloads = [_encode_one(message) for message in new_messages]
    total = sum(map(len, payloads))
    if total > MAX_PUSH_BYTES:
        problem = f"must have at most {MAX_PUSH_BYTES:,} bytes together"
        raise Invalid("messages", f"{total:,} bytes", problem, "push in parts")
    return payloads


def _check_places(new_messages: Sequence[NewMessage]) -> None:
    for message in new_messages:
        if message.group is not None:
            problem = "is only possible in a queue on a database"
            raise Invalid("group", message.group, problem, "use sqlite:/// or postgresql://")
        if message.key is not None and len(new_messages) > 1:
            problem = "is only possible for one message at a time: each has a page of its own here"
            fix = "enqueue each message by itself, or use a queue on a database"
            raise Invalid("key", message.key, problem, fix)
        if not LOWEST_PRIORITY <= message.priority <= HIGHEST_PRIORITY:
            problem = f"must be between {LOWEST_PRIORITY} and {HIGHEST_PRIORITY} without a database"
            raise Invalid("priority", message.priority, problem, "pass one of these ten")
        if message.priority != new_messages[0].priority:
            problem = "differs from that of other messages, which are in the same page"
            raise Invalid("priority", message.priority, problem, "push each priority apart")
