"""The record of a queue: that it exists, whether it is paused, and whether messages have keys.

A pause holds for every claim that begins after `pause` has returned. Where reading costs a request,
claims rely on what they have read for a few seconds, and `pause` returns only after that. While the
record cannot be read, nobody knows whether there is a pause, so nobody claims.
"""

from contextlib import suppress
from typing import Annotated

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.codec import Json
from jobsync.core.keys import escape, unescape
from jobsync.errors import Conflict, Corrupt, Unavailable
from jobsync.queue.directory import Pause
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["QueueControl", "read_controls"]

_PREFIX = "queue/"
_LISTED = 1000
_RELY: Seconds = 5.0
"""Seconds for which claims rely on a reading, counted from its request, where it is billed."""
_MARGIN: Seconds = 1.0


class _ControlRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    since: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    """When it was paused; None if it is not."""
    reason: str = ""
    has_keys: bool = False
    """Whether a message with a key was ever pushed."""


class QueueControl:
    """The record of one queue.

    Attributes:
        has_keys: whether messages have keys, as far as this process knows.

    Args:
        store: where it is stored.
        queue: the queue's name.
        components: time and events.
    """

    def __init__(self, store: Store, queue: str, components: Components) -> None:
        self._store = store
        self._key = f"{_PREFIX}{escape(queue, 'queue')}"
        self._clock = components.clock
        self._rely = _RELY if store.is_billed else 0.0
        self._topic = f"queue/{queue}"
        self.has_keys = False
        self._is_registered = False
        self._is_paused = False
        self._read = Mono(float("-inf"))

    async def register(self) -> None:
        """Write that the queue exists, unless that is known.

        Raises:
            OutcomeUnknown, Unavailable: the store does not answer.
        """
        if self._is_registered:
            return
        # One that cannot be read exists.
        with suppress(Conflict, Corrupt):
            if await self._store.get(self._key) is None:
                await self._store.create(self._key, {})
        self._is_registered = True

    async def register_keys(self) -> None:
        """Write that messages of the queue have keys, unless that is known.

        Raises:
            OutcomeUnknown, Unavailable: the store does not answer.
        """
        await self.register()
        # If others write it at the same time, the next push tries again.
        with suppress(Conflict, Corrupt):
            if not self.has_keys:
                record = await self._store.get(self._key)
                if record is not None and not _read(record).has_keys:
                    value = msgspec.structs.replace(_read(record), has_keys=True)
                    await self._store.put(record, msgspec.to_builtins(value))
                self.has_keys = True

    async def is_paused(self) -> bool:
        """Return whether nobody may claim.

        Raises:
            Unavailable: the store does not answer, or the record cannot be read.
        """
        sent = self._clock.mono()
        if sent - self._read >= self._rely:
            try:
                record = await self._store.get(self._key)
                control = _ControlRecord() if record is None else _read(record)
                self._is_paused = control.since is not None
                self.has_keys |= control.has_keys
            except Corrupt as error:
                # It may have been damaged on its way only.
                fix = "if this goes on, `jobsync queues resume` writes it anew"
                raise Unavailable(self._topic, str(error), fix) from error
            self._read = sent
        return self._is_paused

    async def pause(self, reason: str) -> bool:
        """Pause the queue; False means that it was paused. Returns when no claim can begin.

        Raises:
            OutcomeUnknown: it may or may not be paused; calling again is safe.
            Unavailable: the store does not answer; nothing has changed.
        """
        change = _ControlRecord(since=self._clock.wall().seconds, reason=reason)
        is_new = await self._write(change)
        # Also if it was paused before: whoever did it may not have waited.
        await self._clock.sleep(self._rely + _MARGIN if self._rely else 0.0)
        return is_new

    async def resume(self) -> bool:
        """Allow claims again; False means that it was not paused.

        Raises:
            OutcomeUnknown: it may or may not be paused; calling again is safe.
            Unavailable: the store does not answer; nothing has changed.
        """
        return await self._write(_ControlRecord())

    async def _write(self, wanted: _ControlRecord) -> bool:
        self._read = Mono(float("-inf"))
        while True:
            record = await self._store.get(self._key)
            try:
                found = _ControlRecord() if record is None else _read(record)
            except Corrupt:
                # It may have said so, and whoever has said so does not say it again.
                self.has_keys = True
            else:
                if (found.since is not None) is (wanted.since is not None):
                    return False
                self.has_keys |= found.has_keys
            value: Json = msgspec.to_builtins(
                msgspec.structs.replace(wanted, has_keys=self.has_keys)
            )
            try:
                if record is None:
                    await self._store.create(self._key, value)
                else:
                    await self._store.put(record, value)
            except Conflict:
                continue
            finally:
                # What was read while the answer was awaited may be older.
                self._read = Mono(float("-inf"))
            return True


async def read_controls(store: Store, log: CorruptionLog) -> dict[str, Pause | None]:
    """Return the pause of each queue, by name; None for queues that are not paused.

    Raises:
        Unavailable: the store does not answer.
    """
    found: dict[str, Pause | None] = {}
    after = ""
    while True:
        records = await store.scan(_PREFIX, after=after, limit=_LISTED)
        for record in records:
            control = log.read(_read, record)
            if control is not None:
                name = unescape(record.key.removeprefix(_PREFIX))
                since = control.since
                found[name] = None if since is None else Pause(since, control.reason)
        if len(records) < _LISTED:
            return found
        after = records[-1].key


def _read(record: Record) -> _ControlRecord:
    try:
        return msgspec.convert(record.value, _ControlRecord)
    except msgspec.ValidationError as error:
        raise Corrupt(record.key, f"not the record of a queue ({error})") from error
