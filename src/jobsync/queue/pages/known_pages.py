"""The pages of a queue that this process knows, and what is to be expected of them.

That is what there is to claim, now and later, which claims lapse when, and what a ticket tells
others. Nothing here makes a request: `finder` looks for pages, and reads them.
"""

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.queue.pages.changes import Outlook, find_outlook
from jobsync.queue.pages.listing_plan import ListingPlan
from jobsync.queue.pages.page import LIVE_LANE, PLAIN_CLASS, PageMark, name_page
from jobsync.queue.pages.page_reader import ListedPage, OpenPage
from jobsync.queue.pages.page_store import PageStore
from jobsync.queue.pages.tickets import MAX_PAGES, Ticket, TicketReader, WatchDuty
from jobsync.queue.settings import QueueOrder
from jobsync.stores.contract import BURIAL_AGE

__all__ = ["FIRST_PLAIN", "LATE", "HeldPage", "KnownPage", "KnownPages", "may_have"]

FIRST_PLAIN, _LAST_PLAIN = f"{LIVE_LANE}/{PLAIN_CLASS}", f"{LIVE_LANE}/{PLAIN_CLASS}~"
"""Before the first place without a priority, and after the last."""

LATE: Seconds = 10.0
"""Pages may come so late, by their names, without waiting for the listing of the whole lane."""
_MOVE_TIME: Seconds = 5.0
"""A move that stands still for so long was given up by the process that began it."""
_MEMORY: Seconds = 60.0
"""Seconds for which a page is remembered as done: no ticket that is older is used."""
_SOON: Seconds = 0.05
READABLE = frozenset({PageMark.UNKNOWN, PageMark.SUSPECT, PageMark.MOVING})
"""Marks that do not say what there is to claim."""
HELD = frozenset({PageMark.CLAIMED, PageMark.PARTLY})
"""Marks of pages with claims."""
WATCHED = HELD | READABLE | {PageMark.WAITING}
"""Marks of pages that may have claims, or moves."""
_UNCLAIMABLE = frozenset({PageMark.DONE, PageMark.KEPT, PageMark.CLAIMED, PageMark.MOVING})
"""Marks of pages in which others find nothing to claim."""


class KnownPage(NamedTuple):
    """A page that is not done, as far as this process knows."""

    listed: ListedPage
    at: Mono
    """When it was listed, created, or named by a ticket."""


class _Memo(NamedTuple):
    version: str
    tasks: frozenset[str]
    at: float
    """The time of day for which it was found."""
    outlook: Outlook


class HeldPage(msgspec.Struct, gc=False):
    """A page that was listed with claims, in whatever version."""

    since: Mono
    """When it was first listed so."""
    read: Mono
    """When it was last read while it changed; likewise if it never was."""


class KnownPages:
    """The pages of a queue in which there may be something to claim.

    Args:
        pages: the pages.
        tickets: of the queue's coordinator.
        components: the clock.
        is_billed: whether listings cost money: then they wait for the bell.
        order: which pages come first.

    Attributes:
        plan: when to look for more.
        has_peers: whether other processes are known that claim, while this one watches for them.
    """

    def __init__(
        self,
        pages: PageStore,
        tickets: TicketReader,
        components: Components,
        *,
        is_billed: bool,
        order: QueueOrder = "fifo",
    ) -> None:
        self.plan = ListingPlan(tickets, components.clock, is_billed=is_billed)
        self.has_peers = False
        self._pages = pages
        self._tickets = tickets
        self._is_billed = is_billed
        self._is_lifo = order == "lifo"
        self._is_ranked = order == "priority"
        self._is_complete = False
        """Whether everything that is not done is known."""
        self._old: dict[str, Seconds] = {}
        """Pages with claims that nobody renewed for an hour, with their age."""
        self._held: dict[str, HeldPage] = {}
        """Those that were listed with claims."""
        self._clock = components.clock
        self._known: dict[str, KnownPage] = {}
        self._finished: OrderedDict[str, Mono] = OrderedDict()
        """Pages that this process has seen done: a ticket may be older."""
        self._order: list[str] = []
        """The places where there may be something to claim, in order."""
        self._memos: dict[str, _Memo] = {}
        self._frontiers: dict[str, str] = {}
        """By class: everything in it up to this place is done. An urgent page that comes later is
        before those of other classes."""

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
        self._known[place] = KnownPage(listed, self._clock.mono())
        self._insert(place)

    def remove(self, place: str) -> None:
        """Remove a page that is done."""
        self._known.pop(place, None)
        self._memos.pop(place, None)
        self._pages.forget(place)
        now = self._clock.mono()
        self._finished[place] = now
        self._finished.move_to_end(place)
        while now - next(iter(self._finished.values())) >= _MEMORY:
            self._finished.popitem(last=False)
        position = bisect.bisect_left(self._order, place)
        if self._order[position : position + 1] == [place]:
            del self._order[position]

    def _insert(self, place: str) -> None:
        position = bisect.bisect_left(self._order, place)
        if self._order[position : position + 1] != [place]:
            self._order.insert(position, place)

    def _replace(self, known: dict[str, KnownPage], *, is_complete: bool) -> None:
        """Remember other pages than before."""
        for place in self._known.keys() - known.keys():
            self._memos.pop(place, None)
            self._pages.forget(place)
        self._known = known
        self._order = sorted(known)
        self._is_complete = is_complete
        self.plan.has_open = bool(known)
        self.plan.has_claims = any(
            self._may_have_claims(place, listed) for place, (listed, _) in known.items()
        )
        now = self._clock.wall().seconds
        # A follower reads the pages that it knows when they are due, without a listing.
        is_follower = self._tickets.duty is WatchDuty.FOLLOWER and is_complete
        self.plan.next_due = min(
            (
                listed.due
                for listed, _ in known.values()
                if listed.mark is PageMark.WAITING and listed.due > now and not is_follower
            ),
            default=None,
        )

    def _may_have_claims(self, place: str, listed: ListedPage) -> bool:
        """Whether there may be claims in a page that are to be watched, or moves."""
        opened = self._find_open(place)
        if opened is not None and not self.has_peers:
            return bool(opened.page.targets) or any(
                each.state == "claimed"
                and opened.page.find_session(each.claim) not in self._pages.sessions
                for each in opened.page.messages
            )
        if listed.mark is PageMark.WAITING:
            # Before the time in its name nobody has claimed anything.
            return listed.due <= self._clock.wall().seconds
        # Others claim what is ready, at any time and without a ring.
        return listed.mark in WATCHED or (self.has_peers and listed.mark is PageMark.READY)

    def build_ticket(self, deputy: str) -> Ticket:
        """Return what this process knows of the pages, for others."""
        now = self._clock.wall().seconds
        pages: list[tuple[str, str, int]] = []
        has_more = not self._is_complete
        for place in self._iterate():
            listed, opened = self._known[place].listed, self._find_open(place)
            mark = listed.mark if opened is None else opened.page.find_mark(now)
            version = listed.version if opened is None else opened.record.version
            if mark in _UNCLAIMABLE:
                continue
            if len(pages) == MAX_PAGES:
                has_more = True
                break
            pages.append((place, version, int(mark)))
        return Ticket(
            bell=self.plan.number,
            is_settled=self.plan.is_settled,
            pages=tuple(pages),
            has_more=has_more,
            frontier=self._frontiers.get(PLAIN_CLASS, ""),
            frontiers=tuple(
                place for name, place in sorted(self._frontiers.items()) if name != PLAIN_CLASS
            ),
            due=min(
                (
                    listed.due
                    for listed, _ in self._known.values()
                    if listed.mark is PageMark.WAITING and listed.due > now
                ),
                default=None,
            ),
            deputy=deputy,
        )

    def _iterate(self) -> Iterable[str]:
        """Return the places in the order of the queue: those that are not due yet are last.

        In a queue that is not ordered by priority, so are those with one: another process, which
        does not know that, has pushed them.
        """
        order = self._order
        if self._is_ranked:
            return order
        start = bisect.bisect_left(order, FIRST_PLAIN)
        if self._is_lifo:
            latest = f"{LIVE_LANE}/{name_page(self._clock.wall().seconds + LATE, '~')}"
            position = bisect.bisect_right(order, latest)
            first: Iterable[str] = reversed(order[start:position])
        else:
            position = bisect.bisect_right(order, _LAST_PLAIN)
            if not start and position == len(order):
                return order
            first = order[start:position]
        return itertools.chain(first, order[:start], order[position:])

    def _find_open(self, place: str) -> OpenPage | None:
        """Return a page in hand, unless a listing has shown a newer version since."""
        opened = self._pages.find_open(place)
        if opened is None:
            return None
        known = self._known.get(place)
        is_current = known is None or known.listed.version == opened.record.version
        return opened if is_current or opened.read >= known.at else None  # type: ignore[union-attr]

    def find_outlook(self, tasks: frozenset[str]) -> Outlook:
        """Return what there is to claim in all known pages, now and later."""
        now = self._pages.judge_delays()
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
                ready += may_have(listed.mark, suspects=False)
                suspects += may_have(listed.mark, suspects=True)
                dues += [listed.due] if listed.mark is PageMark.WAITING else []
        return Outlook(ready, suspects, min(dues, default=None))

    def _find_outlook(
        self, place: str, opened: OpenPage, now: float, tasks: frozenset[str]
    ) -> Outlook:
        memo = self._memos.get(place)
        version = opened.record.version
        if memo is not None and (memo.version, memo.tasks) == (version, tasks):
            due = memo.outlook.due
            # Under a veto of the clock it is long ago, and nothing delayed is due.
            if memo.at <= now and (due is None or due > now):
                return memo.outlook
        outlook = find_outlook(opened.page, now, tasks)
        self._memos[place] = _Memo(version, tasks, now, outlook)
        return outlook

    def watch_claims(self) -> Seconds | None:
        """Return the seconds until a claim lapses, or its page must be looked at; None without.

        Claims of others that were met since the last look are watched from now on.
        """
        period = self._pages.visibility / 3
        # Counted from the last look: after a longer gap claims are counted again from the start.
        look = max(_SOON, period - self.plan.since_listing)
        is_follower = self._tickets.duty is WatchDuty.FOLLOWER
        lapses: list[Seconds] = [0.0] if self._pages.ended else []
        for place, (listed, _) in self._known.items():
            opened = self._find_open(place)
            if opened is not None:
                lapse = self._find_lapse(place, opened)
                if lapse is not None:
                    is_local = all(
                        each.session in self._pages.sessions for each in opened.page.claims
                    )
                    self.plan.has_claims |= not is_local
                    if is_local or not is_follower:
                        lapses.append(lapse if is_local else min(lapse, look))
            elif listed.mark in HELD and not is_follower:
                lapses.append(max(look, period - self._pages.find_still(place)))
        return min(lapses, default=None)

    def list_lapsed(self) -> list[str]:
        """Return the pages in hand with claims that have lapsed, also those of this process."""
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

    def list_moving(self) -> list[str]:
        """Return the pages with moves that nobody seems to finish."""
        return [
            place
            for place, (listed, _) in self._known.items()
            if listed.mark is PageMark.MOVING and self._pages.find_still(place) >= _MOVE_TIME
        ]


def may_have(mark: PageMark, *, suspects: bool) -> bool:
    """Whether there is something to claim in a page, by its mark."""
    if suspects:
        return mark is PageMark.SUSPECT
    return mark in {PageMark.READY, PageMark.PARTLY}
