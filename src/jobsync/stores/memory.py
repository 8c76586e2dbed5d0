"""The reference store: everything in this process, nothing kept after it.

It answers as every other store does and in the same order each time, which is what
simulation needs. Values are held as JSON text, so that no caller can change what is
stored by changing what it was given.
"""

import bisect
import threading
from collections.abc import Sequence
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
    Record,
    Store,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.history import (
    check_after,
    check_stream,
    entry_of,
    first_id,
    lines_of,
)
from jobsync.stores.local_notify import LocalNotifier
from jobsync.stores.paging import Row, check_age, check_page, check_span, collect
from jobsync.stores.record_codec import draft

__all__ = ["MemoryStore"]


class _Slot(msgspec.Struct, frozen=True):
    """What is kept under one key."""

    text: str | None
    seq: int
    epoch: int
    format: int
    trail: str
    written: Mono
    head: Head


class _Data:
    """What stores of one name share. Guarded, because a session has a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slots: dict[str, _Slot] = {}
        self.levels: dict[str, list[str]] = {}
        """The keys under each prefix, in order."""
        self.streams: dict[str, dict[str, bytes]] = {}
        self.topics = LocalNotifier()

    def under(self, prefix: str, after: str = "") -> list[str]:
        """List the keys of one level, in order."""
        level = self.levels.get(prefix, [])
        return level[bisect.bisect_right(level, after) :]

    def add(self, key: str) -> None:
        """List a key from now on."""
        bisect.insort(self.levels.setdefault(parent(key), []), key)

    def remove(self, key: str) -> None:
        """Forget a key, and what is kept under it."""
        del self.slots[key]
        level = self.levels[parent(key)]
        level.remove(key)
        if not level:
            del self.levels[parent(key)]


_shared: WeakValueDictionary[str, _Data] = WeakValueDictionary()


class MemoryStore(Store):
    """Records in this process.

    Args:
        name: stores of one name share their records; without one they are private.
        components: time, randomness and events.
    """

    def __init__(self, name: str = "", components: Components | None = None) -> None:
        components = components or Components.system()
        self.name = f"memory://{name}"
        self._clock = components.clock
        self._ids = components.ids
        self._witness = CorruptionLog(self.name, components.events)
        self._data = _shared.setdefault(name, _Data()) if name else _Data()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name."""
        for key in keys:
            check_key(key)
        with self._data.lock:
            slots = [self._data.slots.get(key) for key in keys]
        return [
            None if slot is None or (slot.text is None and not tombstones) else _read(key, slot)
            for key, slot in zip(keys, slots, strict=True)
        ]

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes."""
        records, texts = draft(changes, self._ids)
        with self._data.lock:
            outcomes = [*map(self._apply, changes, records, texts)]
        self._data.topics.wake(
            {parent(done.record.key) for done in outcomes if isinstance(done, Applied)}
        )
        return outcomes

    def _apply(self, change: Change, record: Record, text: str | None) -> Outcome:
        base = change.base
        there = self._data.slots.get(record.key)
        if there is None:
            if base is not None:
                return Conflicted()
            self._data.add(record.key)
        elif base is None or (there.seq, there.trail) != (base.seq, base.trail):
            return Conflicted()
        self._data.slots[record.key] = _Slot(
            text,
            record.seq,
            record.epoch,
            record.format,
            record.trail,
            self._clock.mono(),
            Head(record.key, record.version),
        )
        return Applied(record)

    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List names and versions."""
        check_span(prefix, after, limit)
        with self._data.lock:
            slots = self._data.slots
            found = [
                slot.head
                for key in self._data.under(prefix, after)
                if (slot := slots[key]).text is not None
            ]
        return found[:limit]

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records."""
        check_span(prefix, after, limit)

        async def fetch(after: str, limit: int) -> list[Row]:
            return self._live(prefix, after, limit)

        return await collect(
            fetch, _read, self._witness.report, after=after, limit=limit, where=parse(where)
        )

    def _live(self, prefix: str, after: str, limit: int) -> list[tuple[str, _Slot]]:
        with self._data.lock:
            slots = self._data.slots
            found = [
                (key, slot)
                for key in self._data.under(prefix, after)
                if (slot := slots[key]).text is not None
            ]
        return found[:limit]

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history."""
        check_stream(stream)
        lines = lines_of(entries, batch or self._ids.batch())
        with self._data.lock:
            kept = self._data.streams.setdefault(stream, {})
            for line in lines:
                kept.setdefault(line.id, line.data)
        self._data.topics.wake([stream])

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history."""
        check_stream(stream)
        check_after(after)
        check_page(limit)

        async def fetch(after: str, limit: int) -> list[Row]:
            with self._data.lock:
                kept = self._data.streams.get(stream, {})
                ids = sorted(line_id for line_id in kept if line_id > after)[:limit]
                return [(line_id, stream, kept[line_id]) for line_id in ids]

        return await collect(
            fetch, entry_of, self._witness.report, after=after, limit=limit, where=parse(where)
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Forget old lines of a history."""
        check_age(older_than)
        check_stream(stream)
        end = first_id(self._clock.wall() + -older_than)
        with self._data.lock:
            kept = self._data.streams.get(stream, {})
            old = [line_id for line_id in kept if line_id < end]
            for line_id in old:
                del kept[line_id]
        return len(old)

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""
        check_prefix(prefix)
        check_page(limit)
        check_age(older_than)
        now = self._clock.mono()
        with self._data.lock:
            old = [
                key
                for key in self._data.under(prefix)
                if (slot := self._data.slots[key]).text is None and now - slot.written > older_than
            ][:limit]
            for key in old:
                self._data.remove(key)
        return len(old)

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good."""
        for key in keys:
            check_key(key)
        with self._data.lock:
            for key in keys:
                if key in self._data.slots:
                    self._data.remove(key)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed."""
        await self._data.topics.wait(topic, timeout)

    async def now(self) -> Wall | None:
        """Tell the time: this process's own clock is the store's."""
        return self._clock.wall()

    async def age(self, record: Record) -> float | None:
        """Tell for how long a version has stood."""
        with self._data.lock:
            slot = self._data.slots.get(record.key)
        if slot is None or (slot.seq, slot.trail) != (record.seq, record.trail):
            return None
        return self._clock.mono() - slot.written

    async def close(self) -> None:
        """Let go. The records stay while another store of this name is open."""


def _read(key: str, slot: _Slot) -> Record:
    """Make a record of what is kept, of which only the text can have come to harm."""
    text = slot.text
    value = None if text is None else decode(text, key)
    return Record(
        key,
        value,
        slot.head.version,
        slot.seq,
        slot.epoch,
        slot.format,
        slot.trail,
        deleted=text is None,
    )
