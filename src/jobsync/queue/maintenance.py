"""The central work of a queue, which its coordinator does.

Guarantee: the store has the completed messages of the last `completed_ttl` seconds and of at most
one minute more, however many there are. Dead letters and cancelled messages are kept for `dead_ttl`
in the same way, or for ever. This holds while some process is elected, is called every few seconds,
and the store answers.

Each removal is a small transaction, and others have as much time in between. So a large backlog
delays no worker, and is removed as a whole. Messages of newer code are not removed. They are
reported once for each format, because nobody with this code handles them. Keys that nobody holds
are removed some time later.
"""

from collections.abc import Callable

from jobsync.core.clock import Clock, Mono, Seconds
from jobsync.core.messages import MessageState
from jobsync.queue.backend import QueueBackend
from jobsync.queue.settings import QueueSettings

__all__ = ["Maintenance"]

_INTERVAL: Seconds = 50.0
"""Between two removals, unless much is finished: with the time of a removal, less than a minute."""

_BATCH = 1_000
"""How many messages one transaction removes."""

_MAX_KEY_LOOKS = 20
"""How many batches of keys are looked at that are mostly held."""

_RARE_INTERVAL: Seconds = 300.0
"""Between two counts of the messages of newer code, and between two removals of keys."""


class Maintenance:
    """Removes messages that were finished long ago, and reports those of newer code.

    Args:
        settings: how long dead letters are kept.
        get_completed_ttl: returns how long completed messages are kept. It may change. None
            means that it is not known yet: they stay until the next call.
        on_newer: called with the number of messages of newer code, and their format.
    """

    def __init__(
        self,
        settings: QueueSettings,
        get_completed_ttl: Callable[[], Seconds | None],
        on_newer: Callable[[int, int], None],
    ) -> None:
        self._dead_ttl = settings.dead_ttl
        self._get_completed_ttl = get_completed_ttl
        self._on_newer = on_newer
        self._next_removal = Mono(float("-inf"))
        self._next_count = Mono(float("-inf"))
        self._reported: set[int] = set()
        self._last_key = ""
        """The last key that was looked at."""

    async def run(self, backend: QueueBackend, clock: Clock) -> None:
        """Do the work that is due.

        Raises:
            OutcomeUnknown, Unavailable: the store does not answer; call it again.
        """
        start = clock.mono()
        if start >= self._next_removal:
            most = 0
            retention = self._list_retention()
            for state, age in retention.items():
                most = max(most, await self._remove(backend, clock, state, age))
            # If more than a batch was finished since the last time, the next call continues.
            is_done = most < _BATCH and "completed" in retention
            self._next_removal = start + (_INTERVAL if is_done else 0.0)
        if start >= self._next_count:
            self._next_count = start + _RARE_INTERVAL
            await self._report_newer(backend)
            await self._remove_keys(backend, clock)

    def _list_retention(self) -> dict[MessageState, Seconds]:
        retention: dict[MessageState, Seconds] = {}
        if (completed_ttl := self._get_completed_ttl()) is not None:
            retention["completed"] = completed_ttl
        if self._dead_ttl is not None:
            retention |= {"dead": self._dead_ttl, "cancelled": self._dead_ttl}
        return retention

    async def _remove(
        self, backend: QueueBackend, clock: Clock, state: MessageState, age: Seconds
    ) -> int:
        """Remove all messages that were finished so long ago; return how many."""
        removed = 0
        while True:
            sent = clock.mono()
            count = await backend.forget(state, older_than=age, limit=_BATCH)
            removed += count
            if count < _BATCH:
                return removed
            # The writers of an SQLite file take turns, and the lock knows no queue.
            await clock.sleep(clock.mono() - sent)

    async def _remove_keys(self, backend: QueueBackend, clock: Clock) -> None:
        """Remove keys that nobody holds; a part of them each time, if most of them are held."""
        looks = _MAX_KEY_LOOKS
        while looks > 0:
            sent = clock.mono()
            seen = await backend.forget_keys(after=self._last_key, limit=_BATCH)
            self._last_key = seen.last
            if seen.is_end:
                return
            looks -= seen.removed < _BATCH // 2
            await clock.sleep(clock.mono() - sent)

    async def _report_newer(self, backend: QueueBackend) -> None:
        for found, count in (await backend.find_newer()).items():
            if found not in self._reported:
                self._reported.add(found)
                self._on_newer(count, found)
