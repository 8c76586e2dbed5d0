"""Finds pages with something to claim, with few requests.

A listing shows up to a thousand pages with their marks; the pages that it shows are used up before
the next one. Pages that this process pushed need none. A listing starts at the frontier, before
which everything is done, and once a minute at the beginning: a page may come late, from a machine
with a slow clock. A ticket of the coordinator shows the same for less; see `tickets`. When there is
another look is decided by `listing_plan`.

Urgent pages sort before others, so each class of priority has a frontier of its own. In a queue
that is ordered by priority a listing goes from the most urgent class to the least, and in each from
its frontier: it costs one request more for each class in which a thousand pages or more are done.

Workers share pages by rendezvous: each page belongs to one of the workers that are known, by a hash
of both. A worker takes its own first, and those of others when a new listing shows none of its own.
So two workers seldom conflict, and one worker alone takes the oldest first, or the newest if the
queue is so ordered.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jobsync.coordination.role import worker_of
from jobsync.core.clock import Seconds
from jobsync.queue.pages.changes import Claimant
from jobsync.queue.pages.known_pages import (
    FIRST_PLAIN,
    HELD,
    LATE,
    READABLE,
    WATCHED,
    HeldPage,
    KnownPage,
    KnownPages,
    may_have,
)
from jobsync.queue.pages.listing_plan import Refresh
from jobsync.queue.pages.page import LIVE_LANE, PLAIN_CLASS, PageMark, read_class
from jobsync.queue.pages.page_reader import ListedPage
from jobsync.queue.pages.tickets import Ticket, WatchDuty
from jobsync.stores.contract import BURIAL_AGE

__all__ = ["PageChoice", "PageFinder"]

_SHARED = 32
"""The first pages of others, among which a worker without its own chooses."""
_CONSIDERED = 256
"""How many pages with something to claim are compared."""
_EXHAUSTED = "exhausted"
"""In place of a version: there is nothing left to claim."""
_END = f"{LIVE_LANE}/~"
"""After all places."""
_READ_AT_ONCE = 32
_PEER_TIME: Seconds = 60.0


class _Listing(NamedTuple):
    """Pages that were listed."""

    pages: list[ListedPage]
    gaps: list[tuple[str, str]]
    """The places after and up to which there may be more that was not listed."""
    is_end: bool
    """Whether the end of the lane was reached, and nothing on the way was left out."""


class PageChoice(NamedTuple):
    """Pages to claim in, with their versions if known."""

    pages: dict[str, str | None]
    is_stolen: bool
    """Whether they belong to other workers."""


class PageFinder(KnownPages):
    """Finds the pages of a queue in which there may be something to claim; see `KnownPages`.

    Attributes:
        unannounced: how many pages listings have shown that no ring had announced. The coordinator
            rings for them, and sets it to 0.
    """

    unannounced = 0
    _has_found = True
    """Whether the last listing has found something."""

    @property
    def may_find_more(self) -> bool:
        """Whether a listing is worth its price: the last one has found something."""
        if not self._is_billed:
            return True
        # Where the coordinator looks for the others, news come by the bell.
        is_alone = self._tickets.duty is WatchDuty.ALONE
        return self._has_found and (is_alone or not self._is_complete)

    def is_stale(self) -> bool:
        """Whether it is time for a look, whatever is known."""
        return self.plan.is_due(self._pages.visibility)

    async def refresh(self) -> None:
        """Read the ticket or list pages, and look into those that do not say what they have.

        Raises:
            Unavailable: the store does not answer.
        """
        refresh = self.plan.begin()
        try:
            ticket = None
            if refresh.may_use_ticket:
                ticket = await self._tickets.read(refresh.number, is_settled=refresh.is_follow_up)
            # A ticket does not show claims, so whoever watches some goes on listing.
            if ticket is None or (self.plan.has_claims and self._tickets.duty is WatchDuty.DEPUTY):
                await self._list(refresh)
            else:
                self._apply(ticket)
            await self._read_unclear()
        except BaseException:
            self.plan.repeat()
            raise

    async def _list(self, refresh: Refresh) -> None:
        """List pages until there is something to claim."""
        is_whole, sent = self.plan.is_whole_due, refresh.sent
        look = self._list_by_class if self._is_ranked else self._list_plain
        listed, gaps, is_end = await look(is_whole=is_whole)
        if is_whole:
            # A page that came late may be before them.
            self._frontiers = {}
        self._advance_frontiers(listed)
        now = self._clock.mono()
        # What this process wrote meanwhile may be missing in the listing, or older there.
        recent = {place: known for place, known in self._known.items() if known.at >= sent}
        beyond = {
            place: known
            for place, known in self._known.items()
            if any(low < place <= high for low, high in gaps)
        }
        fresh = {
            page.place: KnownPage(page, now) for page in listed if page.mark is not PageMark.DONE
        }
        is_news = refresh.is_rung or refresh.is_follow_up
        if self._is_complete and not is_news:
            self.unannounced += len(fresh.keys() - self._known.keys())
        self._replace({**fresh, **beyond, **recent}, is_complete=is_end)
        self._held = {
            page.place: self._held.get(page.place) or HeldPage(now, now)
            for page in listed
            if page.mark in HELD
        }
        self._old = await self._find_old(listed)
        self._has_found = any(map(_may_have_any, listed))
        self.plan.end(is_listed=True, is_whole=is_whole and is_end)

    async def _list_plain(self, *, is_whole: bool) -> _Listing:
        """List pages from the frontier of those without a priority."""
        # Urgent pages were pushed by processes that do not know that the queue ignores it.
        gaps = [] if is_whole else [("", FIRST_PLAIN)]
        after = "" if is_whole else self._frontiers.get(PLAIN_CLASS, "")
        listed: list[ListedPage] = []
        while True:
            found, after = await self._pages.list_some(LIVE_LANE, after=after)
            listed += found
            # The newest pages are at the end of the lane.
            if not after or (self._is_enough(found) and not self._is_lifo):
                break
        return _Listing(listed, [*gaps, (after, _END)] if after else gaps, is_end=not after)

    async def _list_by_class(self, *, is_whole: bool) -> _Listing:
        """List pages from the frontier of each class, the most urgent first."""
        latest = self._clock.wall().seconds + LATE
        after = "" if is_whole else self._frontiers.get("0", "")
        listed: list[ListedPage] = []
        gaps: list[tuple[str, str]] = []
        while True:
            found, after = await self._pages.list_some(LIVE_LANE, after=after)
            listed += found
            if not after:
                return _Listing(listed, gaps, is_end=not gaps)
            if any(map(self._is_claimable, found)):
                gaps.append((after, _END))
                return _Listing(listed, gaps, is_end=False)
            if found and found[-1].due > latest:
                # What follows in this class is due later.
                end = f"{LIVE_LANE}/{read_class(after)}~"
                gaps.append((after, end))
                after = end
            elif not is_whole:
                after = max(after, self._frontiers.get(read_class(after), ""))

    def _is_claimable(self, page: ListedPage) -> bool:
        return _may_have_any(page) and not self._pages.is_unusable(page.place, page.version)

    def _is_enough(self, listed: Iterable[ListedPage]) -> bool:
        """Whether there may be something to claim in these pages, or none can follow them.

        Others that are not done may stay for long, and must not hide what follows: claimed pages,
        those that wait for another attempt, and what cannot be used.
        """
        latest = self._clock.wall().seconds + LATE
        return any(
            (page.mark is not PageMark.DONE and page.due > latest) or self._is_claimable(page)
            for page in listed
        )

    def _apply(self, ticket: Ticket) -> None:
        """Take a ticket for a listing, though it may be older than what this process has in hand.

        That costs a read at most. The other way round something to claim would stay unseen.
        """
        now = self._clock.mono()
        listed = ticket.list_pages()
        named = {
            page.place: KnownPage(page, now)
            for page in listed
            if page.mark is not PageMark.DONE and page.place not in self._finished
        }
        kept = {
            place: known
            for place, known in self._known.items()
            if now - known.at < LATE or self._pages.find_open(place) is not None
        }
        self._replace({**kept, **named}, is_complete=not ticket.has_more)
        if ticket.has_more and self.plan.next_due is None:
            self.plan.next_due = ticket.due
        self._frontiers, self._old = ticket.all_frontiers, {}
        self._has_found = any(map(_may_have_any, listed))
        self.plan.end(is_settled=ticket.is_settled, is_listed=False, is_whole=False)

    def _advance_frontiers(self, listed: Sequence[ListedPage]) -> None:
        # By the server's clock, too: if this machine's is ahead, pages still to come seem done.
        written = [page.written_at for page in listed if page.written_at is not None]
        latest = min(self._clock.wall().seconds, max(written, default=math.inf)) - LATE
        reached: dict[str, str] = {}
        stopped: set[str] = set()
        for page in listed:
            name = read_class(page.place)
            if name in stopped:
                continue
            frontier = self._frontiers.get(name, "")
            if page.mark is PageMark.DONE and page.due <= latest:
                reached[name] = page.place
                self._frontiers[name] = max(frontier, page.place)
            else:
                stopped.add(name)
                if page.place < frontier:
                    # It came late.
                    self._frontiers[name] = reached.get(name, "")

    async def _find_old(self, listed: Iterable[ListedPage]) -> dict[str, Seconds]:
        """Return the pages with claims that nobody renewed for an hour, with their age."""
        before = self._clock.wall().seconds - BURIAL_AGE
        # This machine's clock is only a hint to ask for the server's.
        suspicious = [
            page
            for page in listed
            if page.mark in WATCHED and page.written_at is not None and page.written_at < before
        ]
        if not suspicious:
            return {}
        ages = await self._pages.find_ages(suspicious)
        return {place: age for place, age in ages.items() if age > BURIAL_AGE}

    def find_age(self, place: str) -> Seconds:
        """Return for how long a page has not changed, if that is known to be over an hour."""
        return self._old.get(place, 0.0)

    async def _read_unclear(self) -> None:
        """Read pages that do not say what they have, and those whose claims are to be watched.

        Those are pages with claims for a while. First come those that stand still. Others change,
        perhaps because one of several workers renews its claims, which says nothing of the rest.
        """
        now, mono = self._pages.judge_delays(), self._clock.mono()
        still_time = self._pages.visibility / 3
        is_follower = self._tickets.duty is WatchDuty.FOLLOWER
        unclear: dict[str, str | None] = {}
        changing: dict[str, HeldPage] = {}
        for place, (listed, _) in self._known.items():
            if self._find_open(place) or self._pages.is_unusable(place, listed.version):
                continue
            if is_follower and listed.mark in HELD | {PageMark.MOVING}:
                continue
            is_still = place in self._old or self._pages.find_still(place) >= still_time
            is_waiting = listed.mark is PageMark.WAITING and listed.due <= now
            if is_waiting or listed.mark in READABLE or (listed.mark in HELD and is_still):
                unclear[place] = listed.version
                if len(unclear) >= _READ_AT_ONCE:
                    break
            elif (held := self._held.get(place)) and mono - held.since >= still_time:
                changing[place] = held
        # However many there are, each has its turn.
        longest_ago = sorted(changing, key=lambda place: changing[place].read)
        for place in longest_ago[: _READ_AT_ONCE - len(unclear)]:
            unclear[place] = self._known[place].listed.version
            changing[place].read = mono
        await self._pages.read(unclear)

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
        # Earlier sessions of this worker claim nothing any more.
        own = worker_of(wanted.session)
        workers = sorted({wanted.session, *(peer for peer in peers if worker_of(peer) != own)})
        mine: dict[str, str | None] = {}
        others: dict[str, str | None] = {}
        exhausted: list[str] = []
        for place in self._iterate():
            if self._is_less_urgent(place, mine or others):
                break
            found = self._look_up(place, wanted)
            if found is _EXHAUSTED:
                exhausted.append(place)
            elif found and len(workers) > 1 and _find_owner(place, workers) != wanted.session:
                others[place] = found
            elif found:
                mine[place] = found
            if len(mine) >= count or len(others) >= _CONSIDERED:
                break
        for place in exhausted:
            self._order.remove(place)
        if mine:
            return PageChoice(mine, is_stolen=False)
        places = list(others)[:_SHARED]
        if is_contended:
            # In an order of its own: whoever else looks for a page now looks elsewhere.
            places.sort(key=lambda place: _hash(wanted.session, place))
        chosen = set(places[:count])
        return PageChoice(
            {place: version for place, version in others.items() if place in chosen}, bool(places)
        )

    def _is_less_urgent(self, place: str, chosen: Iterable[str]) -> bool:
        """Whether pages that were chosen are more urgent, be they those of other workers."""
        first = next(iter(chosen), None) if self._is_ranked else None
        return first is not None and read_class(first) != read_class(place)

    def _look_up(self, place: str, wanted: Claimant) -> str:
        """Return the version of a page with something to claim; empty without."""
        now = self._pages.judge_delays()
        listed = self._known[place].listed
        opened = self._find_open(place)
        if opened is not None:
            outlook = self._find_outlook(place, opened, now, wanted.tasks)
            if outlook.suspects if wanted.suspects else outlook.ready:
                return opened.record.version
            has_any = outlook.ready or outlook.suspects or outlook.due or outlook.others
            return "" if has_any else _EXHAUSTED
        if self._pages.is_unusable(place, listed.version):
            return _EXHAUSTED
        is_waiting = listed.mark is PageMark.WAITING and listed.due <= now and not wanted.suspects
        is_hopeful = is_waiting or may_have(listed.mark, suspects=wanted.suspects)
        return listed.version if is_hopeful else ""


def _may_have_any(page: ListedPage) -> bool:
    return any(may_have(page.mark, suspects=suspects) for suspects in (False, True))


def _find_owner(place: str, workers: Iterable[str]) -> str:
    return max(workers, key=lambda worker: _hash(worker, place))


def _hash(worker: str, place: str) -> int:
    return zlib.crc32(f"{worker} {place}".encode())
