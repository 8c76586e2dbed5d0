"""The connection on which a process receives the notifications of one schema.

All stores of the process on that schema share it, whatever event loops they are on. It has a
thread of its own, so that code that blocks one loop does not keep the others from being woken.
A lost connection is opened again. All subscribers are told when listening starts: they may have
missed something before.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import TypeAlias

import psycopg

from jobsync.components import Components
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.postgres.connection import PostgresConnection

__all__ = ["Listener", "channel_of", "receives_notifications"]

_PROBE_TIMEOUT = 0.25
_DIRECT_PROBE_TIMEOUT = 5.0
_BACKOFF = ExponentialBackoff(first=0.1, longest=5.0, jitter=0.5)
_END_TIMEOUT = 1.0
"""Seconds to wait for the end of the thread: it has nothing to do but to close its connection."""

Connect: TypeAlias = Callable[[], Awaitable[PostgresConnection]]
Subscriber: TypeAlias = Callable[[str | None], object]
"""Called on the listener's thread with a topic, or with None: anything may have changed."""


def channel_of(schema: str) -> str:
    """Return the channel of a schema; all schemas of a database share one set of channels."""
    return f"jobsync_{sha256(schema.encode()).hexdigest()[:16]}"


async def receives_notifications(
    listener: PostgresConnection, sender: PostgresConnection, channel: str
) -> bool:
    """Whether notifications pass from one connection to another. A pooler stops them."""
    await listener.execute(_listen_to(channel))
    cursor = await sender.execute("SELECT pg_backend_pid(), pg_notify(%s, '')", [channel])
    ((server_process, _),) = await cursor.fetchall()
    # A direct connection knows the server's process, and will receive it in the end.
    is_direct = server_process == sender.info.backend_pid
    timeout = _DIRECT_PROBE_TIMEOUT if is_direct else _PROBE_TIMEOUT
    received = [note async for note in listener.notifies(timeout=timeout, stop_after=1)]
    # A pooler's session would keep listening for its next client.
    await listener.execute("UNLISTEN *")
    return bool(received)


class Listener:
    """Receives notifications on a thread of its own, as long as it has subscribers.

    Args:
        key: the server and the channel.
        connect: opens a connection on the running event loop.
        components: clock and randomness, for the pauses between attempts to connect.

    Attributes:
        failure: the error that ended the thread, if one did.
    """

    def __init__(self, key: tuple[str, str], connect: Connect, components: Components) -> None:
        self.failure: BaseException | None = None
        self._key = key
        self._connect = connect
        self._clock = components.clock
        self._randomness = components.randomness
        self._subscribers: list[Subscriber] = []
        self._is_listening = False
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._listen())
        # A daemon: a program that forgets to close its store must still be able to exit.
        self._thread = threading.Thread(target=self._run, name="jobsync-listener", daemon=True)

    @classmethod
    def subscribe(
        cls, key: tuple[str, str], connect: Connect, components: Components, call: Subscriber
    ) -> "Listener":
        """Return the process's listener for a server and a channel, which calls from now on."""
        with _lock:
            listener = _listeners.get(key)
            if listener is None:
                listener = cls(key, connect, components)
                listener._thread.start()
                _listeners[key] = listener
            listener._subscribers.append(call)
            if listener._is_listening:
                call(None)
        return listener

    def unsubscribe(self, call: Subscriber) -> None:
        """Call no more. Without subscribers, close the connection and end the thread."""
        with _lock:
            self._subscribers.remove(call)
            if self._subscribers:
                return
            self._forget()
        # The thread may have failed, and closed its loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_TIMEOUT)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised to those who wait
            self.failure = error
            self._forget()
            self._call(None)
        finally:
            self._loop.close()

    async def _listen(self) -> None:
        """Pass on notifications until cancelled."""
        attempt = 0
        while True:
            with suppress(psycopg.OperationalError, Misconfigured, Unavailable):
                connection = await self._connect()
                try:
                    await connection.execute(_listen_to(self._key[1]))
                    attempt = 0
                    with _lock:
                        self._is_listening = True
                        self._call(None)
                    async for note in connection.notifies():
                        self._call(note.payload)
                finally:
                    self._is_listening = False
                    await connection.close()
            attempt += 1
            await _BACKOFF.sleep(attempt, self._clock, self._randomness)

    def _call(self, topic: str | None) -> None:
        with _lock:
            for call in tuple(self._subscribers):
                call(topic)

    def _forget(self) -> None:
        with _lock:
            if _listeners.get(self._key) is self:
                del _listeners[self._key]


def _listen_to(channel: str) -> bytes:
    return f'LISTEN "{channel}"'.encode()


# Reentrant: the garbage collector may end a forgotten task that unsubscribes.
_lock = threading.RLock()
_listeners: dict[tuple[str, str], Listener] = {}


def _forget_parent() -> None:
    """Start without listeners in a forked child: their threads run in the parent only."""
    global _lock  # noqa: PLW0603 - the parent's may be held for ever
    _lock = threading.RLock()
    _listeners.clear()


os.register_at_fork(after_in_child=_forget_parent)
