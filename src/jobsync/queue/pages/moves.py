"""Moves of messages out of their pages: to other times, to the dead letters, and back.

A change of a page begins them, see `changes`. Here they are finished, and dead letters redriven.
"""

from collections.abc import Collection

from jobsync.components import Components
from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.pages import changes
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.page import (
    DEAD_LANE,
    LIVE_LANE,
    MAX_MESSAGES,
    PageMark,
    QueuePage,
    read_priority,
)
from jobsync.queue.pages.page_store import PageStore

__all__ = ["PageMoves"]


class PageMoves:
    """The moves between the pages of a queue.

    Args:
        pages: the pages.
        finder: learns where there is something to claim.
        components: the clock.
    """

    def __init__(self, pages: PageStore, finder: PageFinder, components: Components) -> None:
        self._pages = pages
        self._finder = finder
        self._clock = components.clock

    async def follow_up(self, place: str) -> None:
        """Finish the moves that a change began; remember what can be claimed again."""
        opened = self._pages.find_open(place)
        if opened is None:
            return
        if opened.page.targets:
            await self.finish(place)
        mark = opened.page.find_mark(self._clock.wall().seconds)
        if mark is PageMark.DONE:
            self._finder.remove(place)
        elif mark is not PageMark.CLAIMED:
            self._finder.add(place)

    async def finish(self, place: str) -> None:
        """Finish moves, if the store answers: otherwise whoever reads the page next does."""
        try:
            for target in await self._pages.finish_moves(place):
                self._finder.add(target)
        except (Misconfigured, OutcomeUnknown, Unavailable):
            # The page is not in hand any more, and may have more to claim.
            self._finder.plan.repeat()

    async def redrive(self, ids: Collection[str] | None, limit: int | None) -> int:
        """Move dead letters back, page by page; return how many.

        Raises:
            OutcomeUnknown: some were moved before the store stopped to answer.
            Unavailable: none was moved.
        """
        chosen = None if ids is None else frozenset(ids)
        done = 0
        try:
            dead = await self._pages.list_all(DEAD_LANE)
            # Names sort by their priority first.
            for listed in sorted(dead, key=lambda page: page.due):
                if listed.mark is PageMark.DONE or done == limit:
                    continue
                left = MAX_MESSAGES if limit is None else limit - done
                done += await self._redrive(listed.place, chosen, left)
        except (Misconfigured, Unavailable) as error:
            if not done:
                raise
            detail = f"{done:,} messages were queued again before: {error}"
            raise OutcomeUnknown(self._pages.topic, detail) from error
        return done

    async def _redrive(self, place: str, ids: frozenset[str] | None, limit: int) -> int:
        now = self._clock.wall().seconds
        target = self._pages.name_new(LIVE_LANE, now, read_priority(place))

        def change(page: QueuePage) -> tuple[QueuePage, int]:
            return changes.begin_redrive(page, ids, limit, target)

        count = await self._pages.apply(place, change) or 0
        await self.follow_up(place)
        return count
