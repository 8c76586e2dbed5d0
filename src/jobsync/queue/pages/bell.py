"""The bell: one small record of a store that tells other processes of new messages.

It has a number for each queue. A process that pushed rings: it writes the next number, unless it
rang for this queue within the last `RING_INTERVAL` seconds. Workers read the record every few
seconds, one reading for all queues of a process, and list pages only if a number has changed: a
reading costs a twelfth of a listing. Because a push may be silent after a ring, they list once more
`RING_INTERVAL` later.

Only a hint: a ring may be lost, and the pages are listed now and then anyway.
"""

from typing import Annotated, Protocol
from weakref import WeakKeyDictionary

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Clock, Mono, Seconds
from jobsync.errors import Conflict, Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Record, Store
from jobsync.stores.memory import LocalNotifier

__all__ = ["FOLLOW_UP", "READ_INTERVAL", "RING_INTERVAL", "Bell", "QueueBell", "RingListener"]

RING_INTERVAL: Seconds = 2.0
FOLLOW_UP: Seconds = RING_INTERVAL + 0.5
"""Seconds after a ring was noticed until the pages are listed again."""
READ_INTERVAL: Seconds = 4.75
"""Seconds between two readings: a message of another process starts within 5."""

_KEY = "bell/queues"
_NEVER = Mono(float("-inf"))
_MAX_TRIES = 3

_Numbers = dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**53)]]


class Bell:
    """The bell of a store. Use `at`.

    Args:
        store: the store.
        clock: this machine's clock.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._record: Record | None = None
        self._numbers: _Numbers = {}
        self._read = _NEVER
        self._rung: dict[str, Mono] = {}

    @classmethod
    def at(cls, store: Store, components: Components) -> "Bell":
        """Return the bell of a store, one for all queues of this process."""
        return _bells.setdefault(store, cls(store, components.clock))

    async def ring(self, queue: str) -> int | None:
        """Announce something new in a queue to other processes. Never fails.

        Returns:
            The number that was written; None if none was, or nobody knows.
        """
        now = self._clock.mono()
        if now - self._rung.get(queue, _NEVER) < RING_INTERVAL:
            return None
        self._rung[queue] = now
        try:
            for _ in range(_MAX_TRIES):
                if await self._write_next(queue):
                    return self._numbers[queue]
        except (Corrupt, Misconfigured, OutcomeUnknown, Unavailable):
            self._record = None
        # Also if others have rung for their queues each time: the next push rings.
        self._rung.pop(queue, None)
        return None

    async def _write_next(self, queue: str) -> bool:
        if self._record is None:
            await self._read_record()
        numbers = {**self._numbers, queue: self._numbers.get(queue, 0) + 1}
        try:
            self._record = await (
                self._store.create(_KEY, numbers)
                if self._record is None
                else self._store.put(self._record, numbers)
            )
        except Conflict:
            self._record = None
            return False
        self._numbers = numbers
        return True

    async def listen(self, queue: str) -> int:
        """Return the number of a queue, as it was within the last few seconds.

        Raises:
            Unavailable: the store does not answer.
        """
        if self._clock.mono() - self._read >= READ_INTERVAL * 0.9:
            await self._read_record()
        return self._numbers.get(queue, 0)

    async def _read_record(self) -> None:
        self._read = self._clock.mono()
        try:
            self._record = await self._store.get(_KEY)
            value = {} if self._record is None else self._record.value
            self._numbers = msgspec.convert(value, _Numbers)
        except (Corrupt, msgspec.ValidationError):
            # Nobody can ring until somebody removes it; the pages are listed all the same.
            self._numbers = {}


class RingListener(Protocol):
    """Who is told of rings in a queue."""

    number: int
    """Of the last ring that is known."""

    def notice(self, number: int) -> None:
        """Somebody has rung."""
        ...


class QueueBell:
    """The bell for one queue, and what wakes the workers of this process.

    Where requests cost nothing there is no bell: workers look often enough.

    Args:
        store: the store.
        queue: the queue's name.
        listener: is told of rings.
        components: the clock.
    """

    def __init__(
        self, store: Store, queue: str, listener: RingListener, components: Components
    ) -> None:
        self._queue = queue
        self._topic = f"queue/{queue}"
        self._listener = listener
        self._clock = components.clock
        self._bell = Bell.at(store, components) if store.is_billed else None
        self._notifier = LocalNotifier.at(f"{store.name} pages")
        self._heard = _NEVER
        """When the bell was last listened to."""

    async def ring(self) -> None:
        """Wake workers, here and elsewhere: there is something to claim. Never fails."""
        self._notifier.wake([self._topic])
        if self._bell is None:
            return
        number = await self._bell.ring(self._queue)
        if number == self._listener.number + 1:
            # Nobody else has rung since the last time: this process knows what it announces.
            self._listener.number = number

    async def wait(self, timeout: Seconds) -> None:
        """Return early if there may be something new.

        Raises:
            Unavailable: the store does not answer.
        """
        if self._bell is None:
            await self._notifier.wait(self._topic, timeout)
            return
        end = self._clock.mono() + timeout
        while (left := end - self._clock.mono()) > 0:
            # Counted from the last reading: pushes of this process must not put off the next one.
            next_reading = self._heard + READ_INTERVAL - self._clock.mono()
            if next_reading > 0:
                was_woken = await self._notifier.wait(self._topic, min(left, next_reading))
                if was_woken or left <= next_reading:
                    return
            self._heard = self._clock.mono()
            number = await self._bell.listen(self._queue)
            if number != self._listener.number:
                self._listener.notice(number)
                # Everybody who waits in this process.
                self._notifier.wake([self._topic])
                return


_bells: WeakKeyDictionary[Store, Bell] = WeakKeyDictionary()
