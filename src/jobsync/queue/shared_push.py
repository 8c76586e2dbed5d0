"""Small pushes of concurrent callers, sent together: one commit for all of them.

A push that comes while none is under way is sent at once. Those that come meanwhile are sent
together when it has ended, so that waiting costs nobody more than one commit. Each caller gets the
outcome of the commit with its messages. A caller that is cancelled changes nothing for the others:
its messages are left out if they were not sent yet.

Large pushes, and those from another event loop, are sent on their own.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import NewMessage

__all__ = ["LARGEST_SHARED_PUSH", "SharedPush"]

LARGEST_SHARED_PUSH = 100
"""Larger pushes are sent on their own: others would wait long for them."""
_MAX_MESSAGES = 1_000
_MAX_BYTES = 4 * 1024 * 1024
"""Of the messages that are sent together."""

Push: TypeAlias = Callable[[Sequence[NewMessage], Sequence[bytes]], Awaitable[None]]


class _WaitingPush(NamedTuple):
    new_messages: Sequence[NewMessage]
    payloads: Sequence[bytes]
    done: "asyncio.Future[None]"


class SharedPush:
    """The pushes of one process to one queue.

    Args:
        topic: what errors name.
        push: sends messages with their payloads, all or none.
        max_bytes: the most bytes of payloads that are sent together.
    """

    def __init__(self, topic: str, push: Push, *, max_bytes: int = _MAX_BYTES) -> None:
        self._topic = topic
        self._push = push
        self._max_bytes = max_bytes
        self._waiting: deque[_WaitingPush] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop in which a push is under way; None if none is."""
        self._sender: asyncio.Task[None] | None = None

    async def push(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        """Send messages, perhaps with those of others; raise what the sending raises."""
        loop = asyncio.get_running_loop()
        busy = None if self._loop is None or self._loop.is_closed() else self._loop
        if len(new_messages) > LARGEST_SHARED_PUSH or busy not in {None, loop}:
            await self._push(new_messages, payloads)
        elif busy is None:
            self._loop = loop
            try:
                await self._push(new_messages, payloads)
            finally:
                self._send_waiting(loop)
        else:
            waiting = _WaitingPush(new_messages, payloads, loop.create_future())
            self._waiting.append(waiting)
            await waiting.done

    def _send_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what waits, in a task that no caller's cancellation ends."""
        if any(not waiting.done.done() for waiting in self._waiting):
            self._sender = loop.create_task(self._send_groups())
        else:
            self._waiting.clear()
            self._loop = None

    async def _send_groups(self) -> None:
        try:
            while group := self._take_group():
                await self._send_group(group)
                # Callers that push again at once join the next group.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            # The program ends; these were not sent.
            for waiting in self._waiting:
                _fail(waiting, Unavailable(self._topic, "the program ends"))
            self._waiting.clear()
            raise
        finally:
            self._loop = self._sender = None

    def _take_group(self) -> list[_WaitingPush]:
        """Return the pushes to send together, without those whose callers have given up."""
        group: list[_WaitingPush] = []
        messages = size = 0
        while self._waiting:
            waiting = self._waiting[0]
            if not waiting.done.done():
                messages += len(waiting.new_messages)
                size += sum(map(len, waiting.payloads))
                if group and (messages > _MAX_MESSAGES or size > self._max_bytes):
                    break
                group.append(waiting)
            self._waiting.popleft()
        return group

    async def _send_group(self, group: Sequence[_WaitingPush]) -> None:
        try:
            await self._push(
                [message for waiting in group for message in waiting.new_messages],
                [payload for waiting in group for payload in waiting.payloads],
            )
        except asyncio.CancelledError:
            for waiting in group:
                _fail(waiting, OutcomeUnknown(self._topic, "the program ends"))
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for waiting in group:
                _fail(waiting, error)
        else:
            for waiting in group:
                if not waiting.done.done():
                    waiting.done.set_result(None)


def _fail(waiting: _WaitingPush, error: Exception) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)
