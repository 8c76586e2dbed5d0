"""The reference store: records in the memory of this process.

It behaves like every other store and in the same order in each run, which simulation needs.
Values are stored as JSON text, so that a caller cannot change them by changing an object that it
passed or received.
"""

import asyncio
import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Wall
from jobsync.core.codec import Json, decode
from jobsync.core.filters import parse
from jobsync.core.keys import check_key, check_prefix, parent
from jobsync.stores.contract import (
    BURIAL_AGE,
    Applied,
    Change,
    Conflicted,
    Entry,
    Head,
    Outcome,
    Put,
    Record,
    Store,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.record_codec import (
    build_records,
    check_after,
    check_stream,
    decode_entry,
    encode_entries,
    first_id_at,
)
from jobsync.stores.scan import Row, check_age, check_limit, check_listing, collect

__all__ = ["LocalNotifier", "MemoryStore"]


class LocalNotifier:
    """Wakes waiters within this process; writes of other processes wake nobody here.

    Stores of one location share it. It is thread-safe, because a session has its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Callbacks in order of registration, so that every run is the same.
        self._callbacks: dict[str, dict[Callable[[], object], None]] = {}

    @classmethod
    def at(cls, location: str) -> "LocalNotifier":
        """Return the notifier of a location, shared by all its users while one of them lives."""
        return _notifiers.setdefault(location, cls())

    def wake(self, topics: Iterable[str]) -> None:
        """Wake those who wait for one of these topics."""
        with self._lock:
            for topic in sorted(topics):
                for callback in tuple(self._callbacks.get(topic, ())):
                    callback()

    def wake_all(self) -> None:
        """Wake everybody who waits, for whatever topic."""
        with self._lock:
            for callbacks in self._callbacks.values():
                for callback in callbacks:
                    callback()

    async def wait(
        self, topic: str, timeout: float, has_changed: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until the topic is woken or time is up; return whether it was woken.

        Args:
            topic: what to wait for.
            timeout: seconds to wait at most.
            has_changed: whether there is something new already. Asked when no later notification
                can be missed.
        """
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def callback() -> None:
            # A closed loop has no waiters.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._callbacks.setdefault(topic, {})[callback] = None
        try:
            if has_changed():
                return True
            async with asyncio.timeout(timeout):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._remove(topic, callback)
        return changed.is_set()

    def _remove(self, topic: str, callback: Callable[[], object]) -> None:
        callbacks = self._callbacks[topic]
        callbacks.pop(callback, None)
        if not callbacks:
            del self._callbacks[topic]


_notifiers: WeakValueDictionary[str, LocalNotifier] = WeakValueDictionary()


class _StoredRecord(msgspec.Struct, frozen=True):
    text: str | None
    seq: int
    epoch: int
    format: int
    trail: str
    written: Mono
    head: Head


class _Data:
    """The data of all stores of one name. Locked, because a session has its own thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: dict[str, _StoredRecord] = {}
        self.levels: dict[str, list[str]] = {}
        """The keys under each prefix, in order."""
        self.streams: dict[str, dict[str, bytes]] = {}
        self.notifier = LocalNotifier()

    def list_keys(self, prefix: str, after: str = "", until: str = "") -> list[str]:
        """Return the keys of one level that are between two keys, in order."""
        level = self.levels.get(prefix, [])
        end = bisect.bisect_left(level, until) if until else None
        return level[bisect.bisect_right(level, after) : end]

    def add_key(self, key: str) -> None:
        """Add a key to its level."""
        bisect.insort(self.levels.setdefault(parent(key), []), key)

    def remove(self, key: str) -> None:
        """Remove a record and its key."""
        del self.records[key]
        level = self.levels[parent(key)]
        level.remove(key)
        if not level:
            del self.levels[parent(key)]


_named_data: WeakValueDictionary[str, _Data] = WeakValueDictionary()


class MemoryStore(Store):
    """Records in this process.

    Args:
        name: stores of one name share their records; without a name they are private.
        components: time, randomness and events.
    """

    is_atomic = True

    def __init__(self, name: str = "", components: Components | None = None) -> None:
        components = components or Components.system()
        self.name = f"memory://{name}"
        self._clock = components.clock
        self._ids = components.ids
        self._corruption_log = CorruptionLog(self.name, components.events)
        self._data = _named_data.setdefault(name, _Data()) if name else _Data()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key."""
        for key in keys:
            check_key(key)
        with self._data.lock:
            records = [self._data.records.get(key) for key in keys]
        return [
            None
            if stored is None or (stored.text is None and not tombstones)
            else _decode(key, stored)
            for key, stored in zip(keys, records, strict=True)
        ]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes."""
        records, texts = build_records(changes, self._ids)
        with self._data.lock:
            outcomes = [*map(self._apply, changes, records, texts)]
        self._data.notifier.wake(
            {parent(outcome.record.key) for outcome in outcomes if isinstance(outcome, Applied)}
        )
        return outcomes

    def _apply(self, change: Change, record: Record, text: str | None) -> Outcome:
        base = change.base
        current = self._data.records.get(record.key)
        if current is None:
            if base is not None:
                return Conflicted()
            self._data.add_key(record.key)
        elif base is None or (current.seq, current.trail) != (base.seq, base.trail):
            return Conflicted()
        self._data.records[record.key] = _StoredRecord(
            text,
            record.seq,
            record.epoch,
            record.format,
            record.trail,
            self._clock.mono(),
            Head(record.key, record.version, mark=change.mark if isinstance(change, Put) else 0),
        )
        return Applied(record)

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys and versions."""
        check_listing(prefix, after, limit, until)
        with self._data.lock:
            records = self._data.records
            found = [
                stored.head
                for key in self._data.list_keys(prefix, after, until)
                if (stored := records[key]).text is not None
            ]
        return found[:limit]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        check_listing(prefix, after, limit)

        async def fetch(after: str, limit: int) -> list[Row]:
            return self._list_live(prefix, after, limit)

        return await collect(
            fetch,
            _decode,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=parse(where),
        )

    def _list_live(self, prefix: str, after: str, limit: int) -> list[tuple[str, _StoredRecord]]:
        with self._data.lock:
            records = self._data.records
            found = [
                (key, stored)
                for key in self._data.list_keys(prefix, after)
                if (stored := records[key]).text is not None
            ]
        return found[:limit]

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Append entries to a history."""
        check_stream(stream)
        encoded = encode_entries(entries, batch or self._ids.batch())
        with self._data.lock:
            history = self._data.streams.setdefault(stream, {})
            for entry in encoded:
                history.setdefault(entry.id, entry.data)
        self._data.notifier.wake([stream])

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read entries of a history."""
        check_stream(stream)
        check_after(after)
        check_limit(limit)

        async def fetch(after: str, limit: int) -> list[Row]:
            with self._data.lock:
                history = self._data.streams.get(stream, {})
                ids = sorted(entry_id for entry_id in history if entry_id > after)[:limit]
                return [(entry_id, stream, history[entry_id]) for entry_id in ids]

        return await collect(
            fetch,
            decode_entry,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=parse(where),
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Delete old entries of a history."""
        check_age(older_than)
        check_stream(stream)
        end = first_id_at(self._clock.wall() + -older_than)
        with self._data.lock:
            history = self._data.streams.get(stream, {})
            old = [entry_id for entry_id in history if entry_id < end]
            for entry_id in old:
                del history[entry_id]
        return len(old)

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""
        check_prefix(prefix)
        check_limit(limit)
        check_age(older_than)
        now = self._clock.mono()
        with self._data.lock:
            old = [
                key
                for key in self._data.list_keys(prefix)
                if (stored := self._data.records[key]).text is None
                and now - stored.written > older_than
            ][:limit]
            for key in old:
                self._data.remove(key)
        return len(old)

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally."""
        for key in keys:
            check_key(key)
        with self._data.lock:
            for key in keys:
                if key in self._data.records:
                    self._data.remove(key)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed."""
        await self._data.notifier.wait(topic, timeout)

    async def now(self) -> Wall | None:
        """Return the time of this process's clock."""
        return self._clock.wall()

    async def age(self, record: Record) -> float | None:
        """Return for how long a version has been current."""
        with self._data.lock:
            stored = self._data.records.get(record.key)
        if stored is None or (stored.seq, stored.trail) != (record.seq, record.trail):
            return None
        return self._clock.mono() - stored.written

    async def close(self) -> None:
        """Do nothing. The records stay while another store of this name is open."""


def _decode(key: str, stored: _StoredRecord) -> Record:
    # Only the text can be corrupt.
    text = stored.text
    value = None if text is None else decode(text, key)
    return Record(
        key,
        value,
        stored.head.version,
        stored.seq,
        stored.epoch,
        stored.format,
        stored.trail,
        deleted=text is None,
    )
