"""Claims messages out of pages: whole ones where it can be, several at once if they are small."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.errors import JobsyncError, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.backend import ClaimResult, Message, Receipt
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.pages import changes
from jobsync.queue.pages.changes import Claimant, find_outlook
from jobsync.queue.pages.control import QueueControl
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.page import MAX_MESSAGES, PageMessage, QueuePage
from jobsync.queue.pages.page_store import PageChange, PageStore

__all__ = ["PageClaimer", "gather_all"]

T = TypeVar("T")

_MAX_PAGES = 16
"""The most pages that one claim takes at once."""
_MAX_MISSES = 3
"""How often a claim that lost its pages to others tries more of them."""
_SOON = 0.05
_VETO_CHECK = 5.0
"""Seconds until a machine whose clock is wrong looks again at what it might claim."""
_LATEST_WEIGHT = 0.3
"""Weight of the latest page in the average number of messages."""


class PageClaimer:
    """Claims messages of a queue.

    Args:
        pages: the pages.
        finder: knows in which of them there is something to claim.
        control: knows whether the queue is paused.
        components: time and ids.
        finish_moves: finishes the moves out of a page.
    """

    def __init__(
        self,
        pages: PageStore,
        finder: PageFinder,
        control: QueueControl,
        components: Components,
        finish_moves: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pages = pages
        self._finder = finder
        self._control = control
        self._clock = components.clock
        self._ids = components.ids
        self._finish_moves = finish_moves
        self._per_page = float(MAX_MESSAGES)
        """How many messages a claim found in a page, on average."""
        self._next_lapse_check = Mono(float("-inf"))
        self._lock = asyncio.Lock()
        self.fleet: QueueFleet | None = None
        """Says whether this machine's clock may end delays; None where nobody says."""

    async def refresh(self) -> None:
        """Look at the pages, and finish the moves that nobody seems to finish.

        Raises:
            Unavailable: the store does not answer.
        """
        async with self._lock:
            await self._refresh()

    async def refresh_if_stale(self) -> bool:
        """Look at the pages if it is time; return whether it was.

        Raises:
            Unavailable: the store does not answer.
        """
        if not self._finder.is_stale():
            return False
        async with self._lock:
            # Somebody else may have looked meanwhile.
            if self._finder.is_stale():
                await self._refresh()
        return True

    async def _refresh(self) -> None:
        await self._finder.refresh()
        for place in self._finder.list_moving():
            await self._finish_moves(place)

    async def claim(self, wanted: Claimant, at_most: int | None) -> ClaimResult:
        """Claim messages.

        Args:
            wanted: who claims what; each page gets a claim of its own.
            at_most: the most that are claimed, if pages come whole; None if they are split.

        Raises:
            Unavailable: nothing is in flight.
        """
        messages: list[Message] = []
        try:
            return await self._claim(messages, wanted, at_most)
        except (Misconfigured, Unavailable):
            if not messages:
                raise
            # Lost here, they would wait until they lapse. The next claim learns what is wrong.
            return self._build_result(messages, wanted, has_lost=True, is_paused=True)

    async def _claim(
        self, messages: list[Message], wanted: Claimant, at_most: int | None
    ) -> ClaimResult:
        """Claim messages, and add them to a list: there they are if a later request fails."""
        limit = wanted.limit
        most, is_whole = max(limit, at_most or 0), at_most is not None
        if self._pages.is_vetoed:
            await self._check_clock()
        is_fresh = await self.refresh_if_stale()
        is_paused = False
        misses = 0
        chosen: dict[str, str | None] = {}
        while len(messages) < limit and misses < _MAX_MISSES and not is_paused:
            count = self._count_pages(limit - len(messages))
            chosen, is_stolen = self._finder.choose(wanted, count, is_contended=misses > 0)
            if (not chosen or is_stolen) and not is_fresh and self._finder.may_find_more:
                is_fresh = True
                await self.refresh()
                continue
            if not chosen:
                break
            is_paused = await self._control.is_paused()
            if is_paused:
                break
            await self._pages.read(chosen)
            if self._has_delayed(chosen) and await self._check_clock():
                continue
            left = limit - len(messages)
            claimants = self._build_claimants(
                wanted,
                chosen,
                left,
                most - len(messages),
                is_whole=is_whole,
                may_split=not (is_whole and messages),
            )
            if messages and not claimants:
                break
            before = len(messages)
            await self._claim_pages(claimants, messages)
            misses += len(messages) == before
        # Others took the pages, or the next page does not fit as a whole.
        has_lost = misses >= _MAX_MISSES or (bool(chosen) and not is_paused)
        result = self._build_result(messages, wanted, has_lost=has_lost, is_paused=is_paused)
        if result.suspects and await self._control.is_paused():
            return msgspec.structs.replace(result, suspects=False)
        return result

    def _has_delayed(self, places: Iterable[str]) -> bool:
        """Whether there are messages in pages in hand whose delay is over."""
        now = self._pages.judge_delays()
        return any(
            each.due and each.is_claimable(now)
            for place in places
            if (opened := self._pages.find_open(place)) is not None
            for each in opened.page.messages
        )

    async def _check_clock(self) -> bool:
        """Whether this machine's clock must not say that a delay is over."""
        veto = "" if self.fleet is None else await self.fleet.find_clock_veto()
        self._pages.is_vetoed = bool(veto)
        return self._pages.is_vetoed

    def _count_pages(self, wanted: int) -> int:
        return max(1, min(_MAX_PAGES, math.ceil(wanted / max(1.0, self._per_page))))

    def _build_claimants(
        self,
        claimant: Claimant,
        places: Iterable[str],
        wanted: int,
        most: int,
        *,
        is_whole: bool,
        may_split: bool,
    ) -> dict[str, Claimant]:
        """Return a claim for each page, until there is enough.

        Where pages come whole, only the first of a claim may be split; another that does not fit is
        left for the next claim.
        """
        now = self._pages.judge_delays()
        claimants: dict[str, Claimant] = {}
        for place in places:
            opened = self._pages.find_open(place)
            outlook = None if opened is None else find_outlook(opened.page, now, claimant.tasks)
            if outlook is None or wanted <= 0:
                continue
            size = outlook.suspects if claimant.suspects else outlook.ready
            if not size or (size > most and not may_split):
                continue
            may_split = may_split and not is_whole
            (nonce,) = self._ids.nonces(1)
            size = min(size, most)
            claimants[place] = changes.replace(claimant, id=nonce, limit=size)
            wanted -= size
            most -= size
        return claimants

    async def _claim_pages(
        self, claimants: Mapping[str, Claimant], messages: list[Message]
    ) -> None:
        found: dict[str, list[Message]] = {}

        async def claim(place: str, claimant: Claimant) -> None:
            found[place] = await self._claim_page(place, claimant)

        try:
            await gather_all([claim(place, each) for place, each in claimants.items()])
        finally:
            for place in claimants:
                messages += found.get(place, ())
        for place in claimants:
            opened = self._pages.find_open(place)
            if opened is not None and opened.page.targets:
                await self._finish_moves(place)

    async def _claim_page(self, place: str, claimant: Claimant) -> list[Message]:
        try:
            answer = await self._pages.apply(place, self._claiming(claimant))
        except OutcomeUnknown as error:
            raise Unavailable(self._pages.topic, error.detail) from error
        found, size = answer or ([], 0)
        if size:
            weight = _LATEST_WEIGHT if self._per_page < MAX_MESSAGES else 1.0
            self._per_page += weight * (size - self._per_page)
        return [_build_message(each, claimant.id, place) for each in found]

    def _claiming(self, claimant: Claimant) -> PageChange[tuple[list[PageMessage], int]]:
        def change(page: QueuePage) -> tuple[QueuePage, tuple[list[PageMessage], int]]:
            after, found = changes.claim(page, claimant, self._pages.judge_delays())
            # A page of which somebody else has the most says nothing about the next ones.
            return after, (found, len(page.messages) if found else 0)

        return change

    def _build_result(
        self, messages: list[Message], wanted: Claimant, *, has_lost: bool, is_paused: bool
    ) -> ClaimResult:
        is_enough = len(messages) >= wanted.limit > 0
        now = self._clock.mono()
        if is_enough and now < self._next_lapse_check:
            return ClaimResult(messages, False, None, None, True)
        self._next_lapse_check = now + self._pages.visibility / 6
        outlook = self._finder.find_outlook(wanted.tasks)
        dues = [self._finder.plan.find_next_listing()]
        if outlook.due is not None:
            least = _VETO_CHECK if self._pages.is_vetoed else _SOON
            dues.append(max(least, outlook.due - self._clock.wall().seconds))
        return ClaimResult(
            messages,
            suspects=not is_paused and outlook.suspects > 0,
            due=min((due for due in dues if due is not None), default=None),
            lapse=self._finder.watch_claims(),
            more=is_enough or has_lost,
        )


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results; raise an error after all have ended.

    Errors that are not the library's come first, then those that leave open what was done.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise min(errors, key=_rank)
    return [result for result in results if not isinstance(result, BaseException)]


def _rank(error: BaseException) -> int:
    return 2 - isinstance(error, OutcomeUnknown) if isinstance(error, JobsyncError) else 0


def _build_message(message: PageMessage, claim: str, place: str) -> Message:
    return Message(
        receipt=Receipt(message.id, message.deliveries, f"{claim}@{place}"),
        value=message.value,
        attempt=message.attempts,
        max_attempts=message.max_attempts,
        timeout=message.timeout,
        is_suspect=message.is_suspect,
        enqueued=message.enqueued,
        task=message.task,
    )
