"""Finds pages with something to claim, with few requests.

A listing shows up to a thousand pages with their marks; the pages that it shows are used up before
the next one. Pages that this process pushed need none. A listing starts at the frontier, before
which everything is done, and once a minute at the beginning: a page may come late, from a machine
with a slow clock. While claims are open somewhere, the pages are listed at least every third of
the visibility timeout, so that a claim that nobody renews is seen to lapse. Where listings are
billed, a queue in which nothing is left is listed when the bell rings, and every five minutes.

Workers share pages by rendezvous: each page belongs to one of the workers that are known, by a hash
of both. A worker takes its own first, and those of others when a new listing shows none of its own.
So two workers seldom conflict, and one worker alone takes the oldest first.
"""

import bisect
import itertools
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.queue.pages.bell import FOLLOW_UP
from jobsync.queue.pages.changes import Claimant, Outlook, find_outlook
from jobsync.queue.pages.page import LIVE_LANE, PageMark
from jobsync.queue.pages.page_reader import ListedPage, OpenPage
from jobsync.queue.pages.page_store import PageStore
from jobsync.stores.contract import BURIAL_AGE

__all__ = ["PageChoice", "PageFinder"]

_SHARED = 32
"""The first pages of others, among which a worker without its own chooses."""
_SCANNED = 256
"""How many known pages are considered."""
_EXHAUSTED = "exhausted"
"""In place of a version: there is nothing left to claim."""
_READ_AT_ONCE = 32
_WHOLE_LISTING: Seconds = 60.0
_IDLE_LISTING: Seconds = 300.0
"""Between two listings of a queue in which nothing happens, where they are billed."""
_LATE: Seconds = 10.0
"""Pages may come so late, by their names, without waiting for the listing of the whole lane."""
_MOVE_TIME: Seconds = 5.0
"""A move that stands still for so long was given up by the process that began it."""
_PEER_TIME: Seconds = 60.0
_SOON: Seconds = 0.05
_READABLE = frozenset({PageMark.UNKNOWN, PageMark.SUSPECT, PageMark.MOVING})
"""Marks that do not say what there is to claim."""
_HELD = frozenset({PageMark.CLAIMED, PageMark.PARTLY})
"""Marks of pages with claims."""
_WATCHED = _HELD | _READABLE | {PageMark.WAITING}
"""Marks of pages that may have claims, or moves."""


class _Known(NamedTuple):
    listed: ListedPage
    at: Mono
    """When it was listed, or created."""


class PageChoice(NamedTuple):
    """Pages to claim in, with their versions if known."""

    pages: dict[str, str | None]
    is_stolen: bool
    """Whether they belong to other workers."""


class _Memo(NamedTuple):
    version: str
    tasks: frozenset[str] | None
    outlook: Outlook
    at: float
    """The time of day for which it holds: it does not if the clock was set back since."""


class PageFinder:
    """The pages of a queue in which there may be something to claim.

    Args:
        pages: the pages.
        components: the clock.
        is_billed: whether listings cost money: then they wait for the bell.
    """

    def __init__(self, pages: PageStore, components: Components, *, is_billed: bool) -> None:
        self._pages = pages
        self._is_billed = is_billed
        self._longest = _IDLE_LISTING if is_billed else 0.0
        self._is_rung = True
        self._again: Mono | None = None
        """When to list once more after a ring."""
        self._has_found = True
        self._old: dict[str, Seconds] = {}
        self._clock = components.clock
        self._known: dict[str, _Known] = {}
        self._order: list[str] = []
        """The places where there may be something to claim, in order."""
        self._memos: dict[str, _Memo] = {}
        self._frontier = ""
        self._listed = Mono(float("-inf"))
        self._listed_whole = Mono(float("-inf"))

    def add(self, place: str) -> None:
        """Add a page that this process created or changed: there may be something to claim."""
        opened = self._pages.find_open(place)
        if opened is None or not place.startswith(f"{LIVE_LANE}/"):
            return
        known = self._known.get(place)
        due = known.listed.due if known is not None else 0.0
        # A move that could not be finished is looked at again soon.
        mark = PageMark.MOVING if opened.page.targets else PageMark.READY
        listed = ListedPage(place, opened.record.version, mark, due, None)
        self._known[place] = _Known(listed, self._clock.mono())
        self._insert(place)

    def remove(self, place: str) -> None:
        """Remove a page that is done."""
        self._known.pop(place, None)
        self._memos.pop(place, None)
        self._pages.forget(place)
        position = bisect.bisect_left(self._order, place)
        if self._order[position : position + 1] == [place]:
            del self._order[position]

    def _insert(self, place: str) -> None:
        position = bisect.bisect_left(self._order, place)
        if self._order[position : position + 1] != [place]:
            self._order.insert(position, place)

    def notice(self) -> None:
        """Record that there is something new: list now, and again when silent pushes are over."""
        self._is_rung = True
        self._again = self._clock.mono() + FOLLOW_UP

    @property
    def may_find_more(self) -> bool:
        """Whether a listing is worth its price: the last one has found something."""
        return self._has_found or not self._is_billed

    def is_stale(self) -> bool:
        """Whether it is time for a listing, whatever is known."""
        now = self._clock.mono()
        age = now - self._listed
        if self._is_rung or (self._again is not None and now >= self._again):
            return True
        is_watching = any(listed.mark in _WATCHED for listed, _ in self._known.values())
        return age >= (self._pages.visibility / 3 if is_watching else self._longest)

    def find_next_listing(self) -> Seconds | None:
        """Return the seconds until pages are listed because of a ring; None if they are not."""
        return None if self._again is None else max(_SOON, self._again - self._clock.mono())

    async def refresh(self) -> None:
        """List pages until there is something to claim, and look into those that do not say.

        Raises:
            Unavailable: the store does not answer.
        """
        sent = self._clock.mono()
        self._is_rung = False
        if self._again is not None and sent >= self._again:
            self._again = None
        is_whole = sent - self._listed_whole >= _WHOLE_LISTING
        after = "" if is_whole else self._frontier
        listed: list[ListedPage] = []
        while True:
            found, after = await self._pages.list_some(LIVE_LANE, after=after)
            listed += found
            if not after or any(page.mark is not PageMark.DONE for page in found):
                break
        if is_whole and not after:
            self._listed_whole = sent
        self._listed = self._clock.mono()
        self._advance_frontier(listed)
        # What this process wrote meanwhile may be missing in the listing, or older there.
        recent = {place: known for place, known in self._known.items() if known.at >= sent}
        beyond = {place: known for place, known in self._known.items() if after and place > after}
        fresh = {
            page.place: _Known(page, self._listed)
            for page in listed
            if page.mark is not PageMark.DONE
        }
        for place in self._known.keys() - fresh.keys() - recent.keys() - beyond.keys():
            self._memos.pop(place, None)
            self._pages.forget(place)
        self._known = {**fresh, **beyond, **recent}
        self._order = sorted(self._known)
        self._old = await self._find_old(listed)
        self._has_found = any(
            _may_have(page.mark, suspects=suspects) for page in listed for suspects in (False, True)
        )
        await self._read_unclear()

    def _advance_frontier(self, listed: Iterable[ListedPage]) -> None:
        latest = self._clock.wall().seconds - _LATE
        for page in listed:
            if page.mark is not PageMark.DONE or page.due > latest:
                return
            self._frontier = page.place

    async def _find_old(self, listed: Iterable[ListedPage]) -> dict[str, Seconds]:
        """Return the pages with claims that nobody renewed for an hour, with their age."""
        before = self._clock.wall().seconds - BURIAL_AGE
        # This machine's clock is only a hint to ask for the server's.
        suspicious = [
            page
            for page in listed
            if page.mark in _WATCHED and page.written_at is not None and page.written_at < before
        ]
        if not suspicious:
            return {}
        ages = await self._pages.find_ages(suspicious)
        return {place: age for place, age in ages.items() if age > BURIAL_AGE}

    def find_age(self, place: str) -> Seconds:
        """Return for how long a page has not changed, if that is known to be over an hour."""
        return self._old.get(place, 0.0)

    async def _read_unclear(self) -> None:
        now, still_time = self._clock.wall().seconds, self._pages.visibility / 3
        unclear: dict[str, str | None] = {}
        for place, (listed, _) in self._known.items():
            if self._find_open(place) or self._pages.is_unusable(place, listed.version):
                continue
            is_still = place in self._old or self._pages.find_still(place) >= still_time
            is_waiting = listed.mark is PageMark.WAITING and listed.due <= now
            if is_waiting or listed.mark in _READABLE or (listed.mark in _HELD and is_still):
                unclear[place] = listed.version
                if len(unclear) >= _READ_AT_ONCE:
                    break
        await self._pages.read(unclear)

    def list_moving(self) -> list[str]:
        """Return the pages with moves that nobody seems to finish."""
        return [
            place
            for place, (listed, _) in self._known.items()
            if listed.mark is PageMark.MOVING and self._pages.find_still(place) >= _MOVE_TIME
        ]

    def _find_open(self, place: str) -> OpenPage | None:
        """Return a page in hand, unless a listing has shown a newer version since."""
        opened = self._pages.find_open(place)
        if opened is None:
            return None
        known = self._known.get(place)
        is_current = known is None or known.listed.version == opened.record.version
        return opened if is_current or opened.read >= known.at else None  # type: ignore[union-attr]

    def choose(self, wanted: Claimant, count: int, *, is_contended: bool) -> "PageChoice":
        """Return pages in which there is something to claim, with their versions if known.

        Args:
            wanted: who claims what.
            count: the most pages.
            is_contended: whether others have just taken what was chosen before.
        """
        since = self._clock.mono() + -_PEER_TIME
        peers = {peer: seen for peer, seen in self._pages.peers.items() if seen >= since}
        self._pages.peers = peers
        workers = sorted({wanted.session, *peers})
        mine: dict[str, str | None] = {}
        others: dict[str, str | None] = {}
        exhausted: list[str] = []
        for place in itertools.islice(self._order, _SCANNED):
            found = self._look_up(place, wanted)
            if found is _EXHAUSTED:
                exhausted.append(place)
            elif found and len(workers) > 1 and _find_owner(place, workers) != wanted.session:
                others[place] = found
            elif found:
                mine[place] = found
            if len(mine) >= count:
                break
        for place in exhausted:
            self._order.remove(place)
        if mine:
            return PageChoice(mine, is_stolen=False)
        places = list(others)[:_SHARED]
        if is_contended:
            # In an order of its own: whoever else looks for a page now looks elsewhere.
            places.sort(key=lambda place: _hash(wanted.session, place))
        return PageChoice({place: others[place] for place in sorted(places[:count])}, bool(places))

    def _look_up(self, place: str, wanted: Claimant) -> str:
        """Return the version of a page with something to claim; empty without."""
        now = self._clock.wall().seconds
        listed = self._known[place].listed
        opened = self._find_open(place)
        if opened is not None:
            outlook = self._find_outlook(place, opened, now, wanted.tasks)
            if outlook.suspects if wanted.suspects else outlook.ready:
                return opened.record.version
            is_used_up = not (outlook.ready or outlook.suspects or outlook.due)
            return _EXHAUSTED if is_used_up and wanted.tasks is None else ""
        if self._pages.is_unusable(place, listed.version):
            return _EXHAUSTED
        is_due = listed.mark is PageMark.WAITING and listed.due <= now and not wanted.suspects
        has_any = is_due or _may_have(listed.mark, suspects=wanted.suspects)
        return listed.version if has_any else ""

    def find_outlook(self, tasks: frozenset[str] | None) -> Outlook:
        """Return what there is to claim in all known pages, now and later."""
        now = self._clock.wall().seconds
        ready = suspects = 0
        dues: list[float] = []
        for place in self._order:
            listed = self._known[place].listed
            opened = self._find_open(place)
            if opened is not None:
                outlook = self._find_outlook(place, opened, now, tasks)
                ready += outlook.ready
                suspects += outlook.suspects
                dues += [] if outlook.due is None else [outlook.due]
            elif not self._pages.is_unusable(place, listed.version):
                ready += _may_have(listed.mark, suspects=False)
                suspects += _may_have(listed.mark, suspects=True)
                dues += [listed.due] if listed.mark is PageMark.WAITING else []
        return Outlook(ready, suspects, min(dues, default=None))

    def _find_outlook(
        self, place: str, opened: OpenPage, now: float, tasks: frozenset[str] | None
    ) -> Outlook:
        memo = self._memos.get(place)
        version = opened.record.version
        if memo is not None and (memo.version, memo.tasks) == (version, tasks):
            due = memo.outlook.due
            if memo.at <= now and (due is None or due > now):
                return memo.outlook
        outlook = find_outlook(opened.page, now, tasks)
        self._memos[place] = _Memo(version, tasks, outlook, now)
        return outlook

    def find_lapse(self) -> Seconds | None:
        """Return the seconds until a claim lapses, or its page must be looked at; None without."""
        period = self._pages.visibility / 3
        # Counted from the last look: after a longer gap claims are counted again from the start.
        look = max(_SOON, period - (self._clock.mono() - self._listed))
        lapses: list[Seconds] = [0.0] if self._pages.ended else []
        for place, (listed, _) in self._known.items():
            opened = self._find_open(place)
            if opened is not None:
                lapse = self._find_lapse(place, opened)
                if lapse is not None:
                    is_local = all(
                        each.session in self._pages.sessions for each in opened.page.claims
                    )
                    lapses.append(lapse if is_local else min(lapse, look))
            elif listed.mark in _HELD:
                lapses.append(max(look, period - self._pages.find_still(place)))
        return min(lapses, default=None)

    def list_lapsed(self) -> list[str]:
        """Return the pages in hand with claims that have lapsed."""
        found = []
        for place in self._known:
            opened = self._find_open(place)
            if opened is not None:
                lapse = self._find_lapse(place, opened)
                if lapse is not None and lapse <= 0:
                    found.append(place)
        return found

    def _find_lapse(self, place: str, opened: OpenPage) -> Seconds | None:
        lapse = self._pages.find_lapse(place, opened.page)
        if lapse is None or place not in self._old:
            return lapse
        longest = max(each.hold for each in opened.page.messages)
        return min(lapse, max(0.0, max(BURIAL_AGE, longest) - self._old[place]))


def _may_have(mark: PageMark, *, suspects: bool) -> bool:
    if suspects:
        return mark is PageMark.SUSPECT
    return mark in {PageMark.READY, PageMark.PARTLY}


def _find_owner(place: str, workers: Iterable[str]) -> str:
    return max(workers, key=lambda worker: _hash(worker, place))


def _hash(worker: str, place: str) -> int:
    return zlib.crc32(f"{worker} {place}".encode())
