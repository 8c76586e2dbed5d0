"""Who in this process waits for a change, and where.

A hint within one process, and no more: what others write wakes nobody here.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from weakref import WeakValueDictionary

__all__ = ["LocalNotifier"]


class LocalNotifier:
    """What stores on one place share. Guarded, because a session has a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Each topic's calls in the order in which they came, the same in every run.
        self._waiting: dict[str, dict[Callable[[], object], None]] = {}

    @classmethod
    def at(cls, place: str) -> "LocalNotifier":
        """Give the topics of a place, the same to all who ask while one of them is there."""
        return _shared.setdefault(place, cls())

    def wake(self, topics: Iterable[str]) -> None:
        """Call whoever waits for one of these."""
        with self._lock:
            for topic in sorted(topics):
                for call in tuple(self._waiting.get(topic, ())):
                    call()

    async def wait(self, topic: str, timeout: float) -> bool:
        """Return when the topic is woken, or when the time is over; say which."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def call() -> None:
            # A loop that was closed has nobody left who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._waiting.setdefault(topic, {})[call] = None
        try:
            async with asyncio.timeout(timeout):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._forget(topic, call)
        return changed.is_set()

    def _forget(self, topic: str, call: Callable[[], object]) -> None:
        calls = self._waiting[topic]
        calls.pop(call, None)
        if not calls:
            del self._waiting[topic]


_shared: WeakValueDictionary[str, LocalNotifier] = WeakValueDictionary()
