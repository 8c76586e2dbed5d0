"""An event loop on a thread of its own, for callers that block.

Calls may come from any thread, also from a signal handler that interrupted another call:
nothing here holds a lock while it waits.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from jobsync.errors import Unavailable

__all__ = ["Background"]

T = TypeVar("T")

_LOOK_UP = 1.0
"""Seconds after which a caller that waits looks whether there is anybody to wait for."""


class Background:
    """A loop that runs until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that forgets to leave must still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something there, and wait for it.

        Raises:
            Unavailable: the loop was stopped, by another thread or a signal handler.
        """
        if self._loop.is_closed():
            work.close()
            raise _left()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(_LOOK_UP)
            except CancelledError as error:
                raise _left() from error
            except TimeoutError:
                if future.done():
                    # What was run has raised it, or has ended at this very moment.
                    return future.result()
                if not self._thread.is_alive():
                    raise _left() from None

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something there soon, if the loop still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def stop(self) -> None:
        """End the loop, with whatever still runs there. Safe to repeat."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._cancel_all()
            self._loop.close()

    def _cancel_all(self) -> None:
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))


def _left() -> Unavailable:
    return Unavailable("the job", "was left meanwhile", "enter again")
