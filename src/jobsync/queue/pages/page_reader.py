"""The pages of one queue, listed and read, and what was seen of them.

What was read is kept while its version is current, so a page in hand need not be read again. Every
look counts: listings, reads and writes are what the lapse of claims is judged by.

A page that cannot be understood is reported once, and left alone; so is one of newer code.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.keys import escape
from jobsync.errors import Corrupt
from jobsync.queue.pages.page import (
    LIVE_LANE,
    PAGE_FORMAT,
    PageMark,
    PageMessage,
    QueuePage,
    name_page,
    read_due,
    read_page,
)
from jobsync.queue.pages.watch import Sighting, find_lapse, find_left, look, look_inside
from jobsync.stores.contract import Head, Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = ["ListedPage", "OpenPage", "PageReader"]

_LISTED = 1000
_MAX_OPEN = 256
"""Pages that are kept after they were read or written."""
_READ_AT_ONCE = 32
_DEFAULT_VISIBILITY: Seconds = 30.0
_READ_AGAIN: Seconds = 60.0
"""Seconds after which a page that could not be decoded is read again, if it is listed."""
_FOR_EVER = Mono(float("inf"))


class OpenPage(NamedTuple):
    """A version of a page that was read or written."""

    record: Record
    page: QueuePage
    read: Mono
    """When the request was sent that showed it: then, or later, it was current."""


class ListedPage(NamedTuple):
    """A page as a listing shows it."""

    place: str
    """Its lane and its name."""
    version: str
    mark: PageMark
    due: float
    written_at: float | None


class _Unusable(NamedTuple):
    version: str
    until: Mono
    """When it is worth another try."""


class PageReader:
    """The pages of a queue.

    Args:
        store: where they are stored.
        queue: the queue's name.
        components: time, randomness and events.
    """

    def __init__(self, store: Store, queue: str, components: Components) -> None:
        self.topic = f"queue/{queue}"
        self.visibility = _DEFAULT_VISIBILITY
        """How long claims hold, as far as is known: it says how often to look."""
        self.peers: dict[str, Mono] = {}
        """The sessions that hold claims, with the time when one was last seen."""
        self.sessions: set[str] = set()
        """The sessions that claim in this process. It does not end their claims by itself."""
        self.newer: dict[str, Record] = {}
        """Pages of newer code."""
        self.is_vetoed = False
        """Whether this machine's clock must not say that a delay is over."""
        self._store = store
        self._prefix = f"page/{escape(queue, 'queue')}/"
        self._clock = components.clock
        self._log = CorruptionLog(self.topic, components.events)
        self._open: OrderedDict[str, OpenPage] = OrderedDict()
        self._sightings: dict[str, Sighting] = {}
        self._damaged: set[str] = set()
        """Pages that could not be decoded when they were last read."""
        self._unusable: dict[str, _Unusable] = {}
        """Pages that cannot be used, by place."""

    def judge_delays(self) -> float:
        """Return the time of day by which delays are over; under a veto none is."""
        return 0.0 if self.is_vetoed else self._clock.wall().seconds

    async def find_ages(self, pages: Collection[ListedPage]) -> dict[str, Seconds]:
        """Return for how long pages have not changed at least, by the clock of the server.

        The latest time that the server has given is its own, as of a few seconds ago: sessions are
        written often.

        Raises:
            Unavailable: the store does not answer.
        """
        sessions = await self._store.heads("session/")
        times = [head.written_at for head in sessions] + [page.written_at for page in pages]
        latest = max((time for time in times if time is not None), default=0.0)
        return {
            page.place: latest - page.written_at for page in pages if page.written_at is not None
        }

    def count_newer(self) -> dict[int, int]:
        """Count the messages in pages of newer code that were met, by format."""
        counts: dict[int, int] = {}
        for record in self.newer.values():
            messages = record.value.get("messages") if isinstance(record.value, dict) else None
            number = len(messages) if isinstance(messages, list) else 1
            counts[record.format] = counts.get(record.format, 0) + number
        return dict(sorted(counts.items()))

    async def list_some(
        self, lane: str, *, after: str = "", limit: int = _LISTED
    ) -> tuple[list[ListedPage], str]:
        """List pages of a lane after a place.

        Returns:
            The pages, and the place to continue after; empty at the end of the lane.

        Raises:
            Unavailable: the store does not answer.
        """
        prefix = f"{self._prefix}{lane}/"
        start = f"{self._prefix}{after}" if after else ""
        heads = await self._store.heads(prefix, after=start, limit=limit)
        now = self._clock.mono()
        listed = [page for head in heads if (page := self._read_head(head)) is not None]
        for page in listed:
            if page.mark is not PageMark.DONE:
                self._look(page.place, page.version, now)
        is_end = len(heads) < limit
        return listed, "" if is_end else heads[-1].key.removeprefix(self._prefix)

    async def list_all(self, lane: str) -> list[ListedPage]:
        """List all pages of a lane."""
        pages: list[ListedPage] = []
        after = ""
        while True:
            found, after = await self.list_some(lane, after=after)
            pages += found
            if not after:
                return pages

    async def list_between(self, first: float, last: float) -> list[ListedPage]:
        """List the pages whose names have a time of day between two."""
        pages: list[ListedPage] = []
        after = f"{LIVE_LANE}/{name_page(first, '')}"
        while True:
            found, after = await self.list_some(LIVE_LANE, after=after)
            near = [page for page in found if page.due <= last]
            pages += near
            if not after or len(near) < len(found):
                return pages

    def _read_head(self, head: Head) -> ListedPage | None:
        place = head.key.removeprefix(self._prefix)
        due = read_due(place.rpartition("/")[2])
        if due is None:
            self._log.report(Corrupt(head.key, "its name is not that of a page"))
            return None
        try:
            mark = PageMark(head.mark or 0)
        except ValueError:
            mark = PageMark.UNKNOWN
        return ListedPage(place, head.version, mark, due, head.written_at)

    def is_unusable(self, place: str, version: str) -> bool:
        """Whether a version of a page was read, and cannot be used."""
        unusable = self._unusable.get(place)
        return (
            unusable is not None
            and unusable.version == version
            and self._clock.mono() < unusable.until
        )

    def _is_set_aside(self, place: str) -> bool:
        """Whether a page could not be understood when it was last read."""
        return place in self._damaged or place in self._unusable

    def list_set_aside(self) -> list[str]:
        """Return the keys of the pages that could not be understood when they were last read."""
        return [f"{self._prefix}{place}" for place in sorted({*self._damaged, *self._unusable})]

    def find_open(self, place: str, version: str | None = None) -> OpenPage | None:
        """Return a page that is in hand, if it has that version."""
        found = self._open.get(place)
        if found is None or (version is not None and found.record.version != version):
            return None
        return found

    def find_still(self, place: str) -> Seconds:
        """Return for how long a page has been seen without a change."""
        seen = self._sightings.get(place)
        return 0.0 if seen is None else self._clock.mono() - seen.first

    def find_lapse(self, place: str, page: QueuePage) -> Seconds | None:
        """Return the seconds until a claim of a page lapses; None if it has none."""
        return find_lapse(self._sightings.get(place), page, self._clock.mono())

    def find_left(self, place: str, message: PageMessage) -> Seconds:
        """Return the seconds for which a claim holds without a renewal."""
        return find_left(self._sightings.get(place), message, self._clock.mono())

    async def read(self, pages: Mapping[str, str | None]) -> dict[str, OpenPage]:
        """Read pages, by place with the version that was listed, if it is known.

        Those that are in hand in that version cost nothing. Those that are gone or cannot be used
        are left out.

        Raises:
            Unavailable: the store does not answer.
        """
        found: dict[str, OpenPage] = {}
        missing: list[str] = []
        for place, version in pages.items():
            opened = None if version is None else self.find_open(place, version)
            if opened is not None:
                found[place] = opened
            elif version is None or not self.is_unusable(place, version):
                missing.append(place)
        for start in range(0, len(missing), _READ_AT_ONCE):
            part = missing[start : start + _READ_AT_ONCE]
            sent = self._clock.mono()
            records = await self._read_records(part)
            for place in part:
                key = f"{self._prefix}{place}"
                # One that cannot be decoded is not among them, and has been reported.
                opened = self._admit(place, records[key], sent) if key in records else None
                if opened is not None:
                    found[place] = opened
        return found

    async def _read_records(self, places: Collection[str]) -> dict[str, Record | None]:
        keys = [f"{self._prefix}{place}" for place in places]
        again: list[str] = []
        records = await read_each(self._store, keys, lambda corrupt: again.append(corrupt.key))
        if again:
            # Most were damaged on their way only.
            records |= await read_each(self._store, again, self._set_aside)
        return records

    def _set_aside(self, corrupt: Corrupt) -> None:
        """Leave a page alone that cannot be decoded, for a while or until it changes."""
        self._log.report(corrupt)
        place = corrupt.key.removeprefix(self._prefix)
        self._damaged.add(place)
        if place in self._sightings:
            until = self._clock.mono() + _READ_AGAIN
            self._unusable[place] = _Unusable(self._sightings[place].version, until)

    def _admit(self, place: str, record: Record | None, sent: Mono) -> OpenPage | None:
        """Keep a record that was read; None if it is not a page that this code understands."""
        self.newer.pop(place, None)
        self._damaged.discard(place)
        if record is None or record.deleted:
            self.forget(place)
            return None
        if record.format > PAGE_FORMAT:
            self.newer[place] = record
            self._unusable[place] = _Unusable(record.version, _FOR_EVER)
            return None
        try:
            page = read_page(record.key, record.value)
        except Corrupt as corrupt:
            self._log.report(corrupt)
            self._unusable[place] = _Unusable(record.version, _FOR_EVER)
            return None
        return self._keep(place, record, page, sent)

    def _keep(self, place: str, record: Record, page: QueuePage, sent: Mono) -> OpenPage:
        now = self._clock.mono()
        opened = self._open[place] = OpenPage(record, page, sent)
        self._open.move_to_end(place)
        self._look(place, record.version, now)
        self._sightings[place] = look_inside(self._sightings[place], page)
        self.peers.update((each.session, now) for each in page.claims)
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return opened

    def _look(self, place: str, version: str, now: Mono) -> None:
        seen = self._sightings.get(place)
        self._sightings[place] = look(seen, version, now, self.visibility / 2, self.sessions)

    def forget(self, place: str) -> None:
        """Forget a page that is done or gone."""
        self._open.pop(place, None)
        self._damaged.discard(place)
        self._sightings.pop(place, None)
        self._unusable.pop(place, None)
