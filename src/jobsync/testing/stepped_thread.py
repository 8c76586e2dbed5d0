"""A thread that takes turns with a simulated loop, so that a seed repeats its order."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

__all__ = ["SteppedThread"]

_current = threading.local()


class SteppedThread:
    """A thread that runs only while the loop waits for it, so that a seed repeats its order.

    Args:
        loop: the loop.
        function: to run on the thread.
        on_end: called by the loop with the function's result, or its error.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], Any],
        on_end: Callable[[Any, BaseException | None], None],
    ) -> None:
        self._loop = loop
        self._function = function
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._may_run = threading.Semaphore(0)
        self._has_run = threading.Semaphore(0)
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._is_abandoned = False

    @classmethod
    def current(cls) -> Self:
        """Return the thread that calls this."""
        thread: Self = _current.thread
        return thread

    def step(self) -> None:
        """Run the thread until it blocks or ends. Called by the loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._may_run.release()
        self._has_run.acquire()
        if self._outcome is not None and not self._is_abandoned:
            self._on_end(*self._outcome)

    def abandon(self) -> None:
        """End the thread, if it was started, where it blocks."""
        self._is_abandoned = True
        if self._thread is not None:
            while self._outcome is None:
                self.step()
            self._thread.join()

    def block(self, seconds: float) -> None:
        """Block the thread while time passes. Called on the thread."""
        if self._is_abandoned:
            raise _Abandoned
        self._loop.call_later(seconds, self.step)
        self._has_run.release()
        self._may_run.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def _run(self) -> None:
        _current.thread = self
        try:
            self._outcome = (self._function(), None)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._outcome = (None, error)
        self._has_run.release()


class _Abandoned(BaseException):
    """The world has ended."""
