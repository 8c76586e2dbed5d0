"""New messages as PostgreSQL takes them: parameters of an INSERT, or rows of a COPY."""

from collections.abc import Iterator, Sequence
from typing import Any

from jobsync.queue.backend import NewMessage
from jobsync.queue.sql.message_rows import encode_payloads
from jobsync.stores.sql import as_array, escape_copy

__all__ = ["CopyRows", "build_parameters"]

_PART = 200
"""How many messages are sent at a time: the server stores them while the next are encoded."""

_NULL = r"\N"
_BACKSLASH, _ESCAPED = "\\", r"\\"


def build_parameters(
    queue: str, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
) -> dict[str, Any]:
    """Return the parameters of a push of one message, or of many."""
    if len(new_messages) == 1:
        (message,), (payload,) = new_messages, payloads
        return {
            "queue": queue,
            "id": message.id,
            "payload": payload.decode(),
            "delay": float(message.delay),
            "at": message.at,
            "max_attempts": message.max_attempts,
            "timeout": message.timeout,
            "task": message.task,
            "lane": message.lane,
            "format": message.format,
        }
    return {
        "queue": queue,
        "ids": as_array([message.id for message in new_messages]),
        "payloads": as_array([payload.decode() for payload in payloads]),
        "delays": as_array([float(message.delay) for message in new_messages]),
        "times": as_array([message.at for message in new_messages]),
        "max_attempts": as_array([message.max_attempts for message in new_messages]),
        "timeouts": as_array([message.timeout for message in new_messages]),
        "tasks": as_array([message.task for message in new_messages]),
    }


class CopyRows:
    """New messages as rows, built anew in each iteration.

    Args:
        queue: the name of their queue.
        new_messages: messages without a delay.
        payloads: theirs; None to encode them with their rows, which may raise Invalid.
    """

    def __init__(
        self,
        queue: str,
        new_messages: Sequence[NewMessage],
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        self._queue = escape_copy(queue)
        self._new_messages = new_messages
        self._payloads = payloads
        self._tasks = {
            each.task: f"{escape_copy(each.task)}\t{each.format}"
            for each in {message.task: message for message in new_messages}.values()
        }

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._new_messages), _PART):
            part = slice(start, start + _PART)
            new_messages = self._new_messages[part]
            if self._payloads is None:
                payloads = encode_payloads(new_messages)
            else:
                payloads = list(self._payloads[part])
            yield self._build_part(new_messages, payloads)

    def _build_part(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> bytes:
        queue, tasks = self._queue, self._tasks
        # A ready message has no due time, and is enqueued now by the server's clock. Of the
        # characters to escape, JSON has only backslashes.
        rows = [
            f"{queue}\t{escape_copy(message.id)}\t{message.lane}ready\tepoch\tnow\t"
            f"{payload.decode().replace(_BACKSLASH, _ESCAPED)}\t{message.max_attempts}\t"
            f"{_NULL if message.timeout is None else message.timeout}\t{tasks[message.task]}\n"
            for message, payload in zip(new_messages, payloads, strict=True)
        ]
        return "".join(rows).encode()
