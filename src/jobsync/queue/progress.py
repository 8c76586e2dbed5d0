"""Stores how far handlers are, about once a second, in one request for all.

Nothing runs and nothing is sent until a handler reports progress. What was stored is removed soon
after its message is settled. If the process dies first, nobody shows it any more: it belongs to one
claim. The coordinator removes it a day later.
"""

import asyncio
import math
from collections.abc import Callable
from typing import cast

from jobsync.core.clock import Clock, Seconds
from jobsync.errors import Unavailable
from jobsync.queue.backend import QueueBackend, Receipt
from jobsync.queue.single_message import ProgressReport
from jobsync.safe_text import safe_str

__all__ = ["ProgressWriter"]

_INTERVAL: Seconds = 1.0
_LONGEST_NOTE = 200


class ProgressWriter:
    """Stores the progress of this process's handlers.

    Args:
        start: starts `run` in the background; called at the first report.
        get_backend: returns where it is stored.
        get_clock: returns this machine's clock.
    """

    def __init__(
        self,
        start: Callable[[], object],
        get_backend: Callable[[], QueueBackend],
        get_clock: Callable[[], Clock],
    ) -> None:
        self._start = start
        self._get_backend = get_backend
        self._get_clock = get_clock
        self._is_running = False
        self._new: dict[str, ProgressReport] = {}
        self._stored: dict[str, None] = {}
        """Messages with a stored report."""
        self._ended: dict[str, None] = {}
        """Those of them that are settled."""
        self._changed = asyncio.Event()

    @property
    def is_used(self) -> bool:
        """Whether anything was reported."""
        return self._is_running

    def report(self, receipt: Receipt, progress: object, note: object) -> None:
        """Store how far a handler is, soon; a value that is not a number is left out."""
        number = _read_number(progress)
        if number is None:
            return
        text = safe_str(note)[:_LONGEST_NOTE]
        plain = "".join(each if each.isprintable() else " " for each in text)
        self._new[receipt.id] = ProgressReport(receipt, number, plain)
        self._ended.pop(receipt.id, None)
        self._changed.set()
        if not self._is_running:
            self._is_running = True
            self._start()

    def end(self, name: str) -> None:
        """Remove what was reported about a message: its claim has ended."""
        self._new.pop(name, None)
        if name in self._stored:
            self._ended[name] = None
            self._changed.set()

    async def run(self) -> None:
        """Store reports until cancelled."""
        self._is_running = True
        # It belongs to one event loop, and the last run may have been in another.
        self._changed = asyncio.Event()
        if self._new or self._ended:
            self._changed.set()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._flush(self._get_backend())
                except Unavailable:
                    # The handler may report nothing more: it is sent again after the pause.
                    self._changed.set()
                await self._get_clock().sleep(_INTERVAL)
        finally:
            self._is_running = False

    async def _flush(self, backend: QueueBackend) -> None:
        if ended := list(self._ended):
            await backend.clear_progress(ended)
            for name in ended:
                self._stored.pop(name, None)
                self._ended.pop(name, None)
        new, self._new = self._new, {}
        if new:
            self._stored |= dict.fromkeys(new)
            try:
                await backend.report_progress([*new.values()])
            except Unavailable:
                # What was reported meanwhile is newer, and what has ended needs no report.
                unsent = {name: new[name] for name in new.keys() - self._ended}
                self._new = unsent | self._new
                raise


def _read_number(progress: object) -> float | None:
    """Return a number that every store can hold; None if it is none."""
    # Not `isinstance`, which asks the object: its class may raise anything.
    if not issubclass(type(progress), int | float):
        return None
    try:
        number = float(cast("float", progress))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a number of the user's may raise anything
        return None
    return number if math.isfinite(number) else None
