"""The records of keys: each names the message that holds the key, and the page of that message.

A message with a key has a page of its own. Its push writes the record first, then the page. The
page says whether the key is held, so that one write replaces a message and sets its time anew. The
record only says where to look.

A record whose page does not exist is that of a push that goes on, or that was given up. Whoever
pushes the same key creates that very page, with its own message. The first one to create it has
added its message, and the others find it there. If a message does not fit under the name of the
page, by its priority or its time, the page is *barred* first: created without a message, so that
the other push is refused and begins again. A page is created only within `TIME_TO_CREATE` after
its record was written or read: later it may have been there, and have been dropped.

A record names no page that was dropped: it is changed before. If the message has moved, the record
names its next page. If the time of the key is not over, the record has that time. Otherwise it is
deleted. So a page that is not there, and that its record still names, was never there: creating it
brings nothing back.
"""

import hashlib
from typing import Annotated, NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.keys import escape
from jobsync.errors import Conflict, Corrupt, OutcomeUnknown
from jobsync.queue.backend import SeenKeys
from jobsync.queue.pages import key_changes
from jobsync.queue.pages.page import KeyHold, QueuePage
from jobsync.queue.pages.page_store import PageStore
from jobsync.stores.contract import Conflicted, Put, Record, Store, Unknown
from jobsync.stores.corruption_log import CorruptionLog, convert_record

__all__ = ["TIME_TO_CREATE", "FoundKey", "KeyRecord", "PageKeys"]

TIME_TO_CREATE: Seconds = 30.0
_SWEEP_INTERVAL: Seconds = 86_400.0
"""Seconds between two looks at all keys where they are billed."""
_MAX_LINKS = 1_000
"""The most moves of a message that are followed. Pages that it has left are dropped an hour later,
and a move that is not by hand takes a minute."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which message holds a key, or has held it, and where it is."""

    key: str
    """For people: the name of the record is a hash of it."""
    id: str
    """The message of the push that wrote this. While there is a page, that of the page counts."""
    token: str
    """Names the hold; that of its page is the same."""
    place: str = ""
    """The page; empty once it was dropped."""
    step: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """How often the message had moved before it came to that page."""
    until: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    """The time of day until which the key is held, if the page was dropped."""


class FoundKey(NamedTuple):
    """A key's record and the page of its message, as they were read."""

    record: Record | None
    """What the next write of the record replaces."""
    read: Mono
    """When it was requested."""
    entry: KeyRecord | None = None
    """None if nobody has the key."""
    place: str = ""
    """The page of the message, after all its moves."""
    page: QueuePage | None = None
    """None if it does not exist."""

    @property
    def is_unborn(self) -> bool:
        """Whether the push that wrote the record has not created the page."""
        is_first = self.entry is not None and self.place == self.entry.place
        return self.page is None and is_first and bool(self.place) and not self.step

    @property
    def step(self) -> int:
        """How often the message had moved before it came to the page of the record."""
        return 0 if self.entry is None else self.entry.step

    def is_held(self, now: float) -> bool:
        """Whether the message holds the key at that time of day."""
        entry, page = self.entry, self.page
        if entry is None:
            return False
        if not entry.place:
            return entry.until is not None and now < entry.until
        return page is not None and self.is_own(page) and key_changes.is_held(page, now)

    def is_own(self, page: QueuePage) -> bool:
        """Whether a page is that of the record, and was not barred."""
        hold = page.key_hold
        return hold is not None and self.entry is not None and hold.token == self.entry.token

    @property
    def holder(self) -> str:
        """The id of the message that holds the key, or has held it."""
        if self.page is not None and self.page.key_hold is not None and self.is_own(self.page):
            return self.page.key_hold.id
        return "" if self.entry is None else self.entry.id


class PageKeys:
    """The keys of a queue in pages.

    Args:
        store: where their records are stored.
        pages: the pages of the queue.
        queue: its name.
        components: time and ids.
    """

    def __init__(self, store: Store, pages: PageStore, queue: str, components: Components) -> None:
        self._store = store
        self._pages = pages
        self._prefix = f"key/{escape(queue, 'queue')}/"
        self._clock = components.clock
        self._ids = components.ids
        self._interval = _SWEEP_INTERVAL if store.is_billed else 0.0
        self._next_sweep = Mono(float("-inf"))
        self._log = CorruptionLog(pages.topic, components.events)
        self._unborn: dict[str, str] = {}
        """Records without a page that the last sweep has seen, with their versions."""

    def name(self, key: str) -> str:
        """Return the name of a key's record. Keys are longer than names can be."""
        return f"{self._prefix}{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    async def find(self, name: str) -> FoundKey:
        """Read a record by its name, and the page of its message.

        Raises:
            Corrupt: something cannot be understood; perhaps it was damaged on its way only.
            Unavailable: the store does not answer.
        """
        sent = self._clock.mono()
        record = await self._store.get(name, tombstones=True)
        if record is None or record.deleted:
            return FoundKey(record, sent)
        entry = convert_record(record, KeyRecord)
        place = entry.place
        page = await self._read_page(place) if place else None
        for _ in range(_MAX_LINKS):
            hold = None if page is None else page.key_hold
            if hold is None or hold.token != entry.token or not hold.next:
                break
            place = hold.next
            page = await self._read_page(place)
        else:
            raise Corrupt(name, f"its message has moved more than {_MAX_LINKS:,} times")
        return FoundKey(record, sent, entry, place, page)

    async def _read_page(self, place: str) -> QueuePage | None:
        opened = await self._pages.read_current(place)
        return None if opened is None else opened.page

    async def take(self, name: str, base: Record | None, entry: KeyRecord) -> bool:
        """Write who holds a key; False means that somebody else did.

        Raises:
            OutcomeUnknown: it may have been written.
            Unavailable: it was not written.
        """
        put = Put(name, msgspec.to_builtins(entry), base)
        (outcome,) = await self._store.write([put])
        if isinstance(outcome, Unknown):
            raise OutcomeUnknown(self._pages.topic, outcome.reason)
        return not isinstance(outcome, Conflicted)

    def is_in_time(self, since: Mono) -> bool:
        """Whether the page of a record that was read or written then may still be created."""
        return self._clock.mono() - since <= TIME_TO_CREATE

    async def is_current(self, found: FoundKey) -> bool:
        """Whether the record of a key is as it was: then its page was never there before.

        Raises:
            Unavailable: the store does not answer.
        """
        if found.record is None:
            return False
        record = await self._store.get(found.record.key)
        return record is not None and record.version == found.record.version

    async def bar(self, found: FoundKey) -> bool:
        """Create the page of a push that was given up, without a message, so that the push cannot.

        Returns:
            False if the page is there, or the record was read too long ago.

        Raises:
            OutcomeUnknown: it may come to exist.
            Unavailable: it was not created.
        """
        entry = found.entry
        if entry is None or not self.is_in_time(found.read):
            return False
        (token,) = self._ids.nonces(1)
        page = QueuePage(birth=token, key_hold=KeyHold(key=entry.key, token=token))
        return await self._pages.create(found.place, page)

    async def prepare_drop(self, place: str, page: QueuePage) -> bool:
        """Change the record of a page that is to be dropped; False means that it must wait.

        Raises:
            Unavailable: the store does not answer.
        """
        hold = page.key_hold
        if hold is None:
            return True
        try:
            record = await self._store.get(self.name(hold.key))
            entry = None if record is None else convert_record(record, KeyRecord)
        except Corrupt as corrupt:
            self._log.report(corrupt)
            return False
        if record is None or entry is None:
            return True
        if hold.token != entry.token and place != entry.place:
            return True
        if hold.next:
            if entry.step > hold.step or not entry.place:
                return True
            moved = msgspec.structs.replace(entry, place=hold.next, step=hold.step + 1)
            return await self._write(record, moved)
        until = hold.until
        if until is not None and not hold.is_released and self._clock.wall().seconds < until:
            closed = msgspec.structs.replace(entry, id=hold.id, place="", step=0, until=until)
            return await self._write(record, closed)
        return await self._write(record, None)

    async def _write(self, record: Record, entry: KeyRecord | None) -> bool:
        """Replace or delete a record; False means that this must be tried again."""
        try:
            if entry is None:
                await self._store.delete(record)
            else:
                await self._store.put(record, msgspec.to_builtins(entry))
        except (Conflict, OutcomeUnknown):
            return False
        return True

    async def forget(self, after: str, limit: int) -> SeenKeys:
        """Delete those of the next records whose keys nobody holds.

        Most are deleted with their pages. What is left are keys whose time was longer, and those of
        pushes that were given up.

        Raises:
            OutcomeUnknown, Unavailable: the store does not answer; calling again is safe.
        """
        now = self._clock.mono()
        if not after:
            if now < self._next_sweep:
                return SeenKeys()
            self._next_sweep = now + self._interval
        start = f"{self._prefix}{after}" if after else ""
        heads = await self._store.heads(self._prefix, after=start, limit=limit)
        removed = 0
        for head in heads:
            try:
                removed += await self._forget(head.key)
            except Corrupt as corrupt:
                self._log.report(corrupt)
        if len(heads) == limit:
            return SeenKeys(heads[-1].key.removeprefix(self._prefix), removed)
        await self._store.bury(self._prefix)
        return SeenKeys("", removed)

    async def _forget(self, name: str) -> bool:
        found = await self.find(name)
        record, entry, page = found.record, found.entry, found.page
        if record is None or entry is None or found.is_held(self._clock.wall().seconds):
            return False
        if found.is_unborn and self._unborn.pop(name, "") != record.version:
            # Its page may come.
            self._unborn[name] = record.version
            return False
        if found.is_unborn:
            if not await self.bar(found):
                return False
        elif page is not None and found.is_own(page) and key_changes.find_pending(page) is not None:
            # Whoever takes the key releases it first.
            return False
        return await self._write(record, None)
