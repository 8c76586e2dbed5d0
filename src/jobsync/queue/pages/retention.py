"""Removes what was finished long ago.

A page is dropped when it is done, and was written at least an hour ago: by then no copy of an
earlier request can arrive and create it again. Nothing is dropped while a move is open anywhere in
the queue: its target must refuse to be created again, even if all its messages are finished. The
age of a page is by the clock of the server alone, as the difference of two of its times.

The record of a key names no page that was dropped, so it is changed first; see `keys`.

Dead letters are removed from their pages by a conditional write first, because somebody may be
moving them back.

A page that this process finished itself is dropped without a read; see `PageStore.count_done`.
"""

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.messages import MessageState
from jobsync.queue.pages import changes
from jobsync.queue.pages.keys import PageKeys
from jobsync.queue.pages.page import (
    DEAD_LANE,
    LIVE_LANE,
    PageMark,
    PageMessage,
    QueuePage,
    read_due,
)
from jobsync.queue.pages.page_reader import ListedPage
from jobsync.queue.pages.page_store import PageStore
from jobsync.stores.contract import BURIAL_AGE, Store

__all__ = ["Retention"]

_INTERVAL: Seconds = 600.0
"""Seconds between two listings for this where they are billed."""


class Retention:
    """Removes finished messages of a queue.

    Args:
        store: where the pages are stored.
        pages: the pages.
        keys: the keys that their messages hold.
        components: the clock.
    """

    def __init__(
        self, store: Store, pages: PageStore, keys: PageKeys, components: Components
    ) -> None:
        self._store = store
        self._pages = pages
        self._keys = keys
        self._clock = components.clock
        self._interval = _INTERVAL if store.is_billed else 0.0
        self._next: dict[MessageState, Mono] = {}
        self._has_done = True
        """Whether the last listing has shown pages that are done, or that move."""

    async def forget(self, state: MessageState, age: Seconds, limit: int) -> int:
        """Remove messages in a state that were finished so long ago; return how many.

        Completed messages go with their pages.

        Raises:
            OutcomeUnknown, Unavailable: the store does not answer; calling again is safe.
        """
        now = self._clock.mono()
        if now < self._next.get(state, now):
            return 0
        count = await (
            self._drop_done(LIVE_LANE, age, limit)
            if state == "completed"
            else self._purge_dead(state, age, limit)
        )
        if count < limit:
            # What is not done yet is not old enough for an hour.
            is_empty = state == "completed" and not self._has_done
            wait = BURIAL_AGE if is_empty and self._interval else self._interval
            self._next[state] = now + wait
        return count

    async def _purge_dead(self, state: MessageState, age: Seconds, limit: int) -> int:
        before = self._clock.wall().seconds - age

        def is_old(each: PageMessage) -> bool:
            return each.state == state and each.finished < before

        def change(page: QueuePage) -> tuple[QueuePage, int]:
            return changes.purge(page, is_old)

        count = 0
        for listed in await self._pages.list_all(DEAD_LANE):
            if listed.mark is not PageMark.DONE and listed.due < before and count < limit:
                count += await self._pages.apply(listed.place, change) or 0
        await self._drop_done(DEAD_LANE, age, limit)
        return count

    async def _drop_done(self, lane: str, age: Seconds, limit: int) -> int:
        """Drop pages that are done; return how many completed messages they had."""
        listed = await self._pages.list_all(lane)
        other = await self._pages.list_all(DEAD_LANE if lane == LIVE_LANE else LIVE_LANE)
        moving = [page.place for page in (*listed, *other) if page.mark is PageMark.MOVING]
        if moving:
            self._has_done = True
            for place in moving:
                await self._pages.finish_moves(place)
            return 0
        done = [page for page in listed if page.mark is PageMark.DONE]
        self._has_done = bool(done)
        return await self._drop_old(done, max(age, BURIAL_AGE), limit)

    async def _drop_old(self, done: list[ListedPage], age: Seconds, limit: int) -> int:
        """Drop pages that are old enough; return how many completed messages they had."""
        if self._store.is_billed:
            ages = await self._pages.find_ages(done)
            done = [page for page in done if ages.get(page.place, 0.0) > age]
        chosen = done[:limit]
        old: dict[str, int] = {}
        if self._store.is_billed:
            counts = {
                each.place: self._pages.count_done(each.place, each.version) for each in chosen
            }
            old = {place: count for place, count in counts.items() if count is not None}
        # Others are read first: nothing is deleted that is not understood, whatever its mark says.
        unread = {page.place: page.version for page in chosen if page.place not in old}
        before = self._clock.wall().seconds - age
        for place, (_, page, _) in (await self._pages.read(unread)).items():
            last = max((each.finished for each in page.messages), default=0.0)
            if page.key_hold is not None and not page.messages:
                # It refuses a message that may come late.
                last = read_due(place.rpartition("/")[2]) or 0.0
            is_old = self._store.is_billed or last < before
            is_old = is_old and page.find_mark(before) is PageMark.DONE
            if is_old and await self._keys.prepare_drop(place, page):
                old[place] = sum(each.state == "completed" for each in page.messages)
            self._pages.forget(place)
        if old:
            await self._pages.drop(old)
        return sum(old.values())
