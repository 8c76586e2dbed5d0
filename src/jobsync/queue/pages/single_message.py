"""One message from outside on stores without SQL, see `MessageOperations`.

The page of a message is looked for by the time in its id, then everywhere. Progress is written with
the renewals of its claim where requests are billed, so it costs no request.
"""

from collections.abc import Collection, Iterable, Sequence

from jobsync.core.clock import Clock
from jobsync.core.messages import LIVE
from jobsync.queue.arguments import check_ids
from jobsync.queue.backend import EndedClaim, MessageInfo
from jobsync.queue.pages import message_changes
from jobsync.queue.pages.bell import QueueBell
from jobsync.queue.pages.contents import build_open_info, find_infos, find_place
from jobsync.queue.pages.message_changes import CancelAnswer
from jobsync.queue.pages.moves import PageMoves
from jobsync.queue.pages.page import LIVE_LANE, MAX_PAGE_DEPTH, QueuePage, keep_class
from jobsync.queue.pages.page_store import PageStore
from jobsync.queue.single_message import Deletion, MessageOperations, ProgressReport

__all__ = ["MAX_PAGE_RESULT", "PagesMessageOperations"]

MAX_PAGE_RESULT = 2 * 1024
"""The largest encoded result on objects, in bytes: a page may have a thousand of them."""

_MAX_TRIES = 5
"""How often to look for a message that moves from page to page."""

_MAX_PLACES = 1_000


class PagesMessageOperations(MessageOperations):
    """One message of a queue in pages."""

    max_depth = MAX_PAGE_DEPTH
    queue: str
    is_billed: bool
    _clock: Clock
    _pages: PageStore
    _moves: PageMoves
    _bell: QueueBell

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], ProgressReport] = {}
        """Progress that the next renewal stores, by message and claim."""
        self._places: dict[str, str] = {}
        """Where messages were when they were last looked at."""

    async def get(self, id: str) -> MessageInfo | None:
        """Return a message; looks first where it was the last time."""
        (name,) = check_ids([id])
        now = self._clock.wall().seconds
        place = self._places.pop(name, None)
        if place is not None:
            opened = (await self._pages.read({place: None})).get(place)
            found = None if opened is None else message_changes.find_message(opened.page, name)
            if opened is not None and found is not None:
                self._remember(name, place)
                return build_open_info(self._pages, self.queue, now, place, opened, found)
        infos = await find_infos(self._pages, self.queue, now, [name])
        if not infos:
            return None
        if infos[0].state in LIVE:
            self._remember(name, f"{LIVE_LANE}/{infos[0].cursor.partition(' ')[0]}")
        return infos[0]

    def _remember(self, name: str, place: str) -> None:
        self._places[name] = place
        if len(self._places) > _MAX_PLACES:
            del self._places[next(iter(self._places))]

    async def cancel(self, id: str) -> EndedClaim | None:
        """Cancel a message, and end its claim if it is claimed: one write of its page."""
        (name,) = check_ids([id])

        def change(page: QueuePage) -> tuple[QueuePage, CancelAnswer]:
            return message_changes.cancel(page, name, self._clock.wall().seconds, targets)

        for _ in range(_MAX_TRIES):
            place = await find_place(self._pages, name)
            if place is None:
                return None
            targets = self._pages.build_targets(place)
            answer = await self._pages.apply(place, change)
            await self._moves.follow_up(place)
            if answer is not None and answer.is_here:
                return answer.ended
        return None

    async def delete(self, id: str) -> Deletion:
        """Remove a message for good, unless it is claimed: one write of its page."""
        (name,) = check_ids([id])

        def change(page: QueuePage) -> tuple[QueuePage, Deletion]:
            return message_changes.delete(page, name)

        for _ in range(_MAX_TRIES):
            place = await find_place(self._pages, name)
            if place is None:
                return "absent"
            answer = await self._pages.apply(place, change)
            await self._moves.follow_up(place)
            if answer is not None and answer != "absent":
                return answer
        return "absent"

    async def run_now(self, id: str) -> bool:
        """End the delay of a message: it is moved to a page that is due now."""
        (name,) = check_ids([id])
        new_place = self._pages.name_new(LIVE_LANE, self._clock.wall().seconds)

        def change(page: QueuePage) -> tuple[QueuePage, bool | None]:
            return message_changes.run_now(page, name, self._clock.wall().seconds, target)

        for _ in range(_MAX_TRIES):
            place = await find_place(self._pages, name)
            if place is None:
                return False
            target = keep_class(place, new_place)
            answer = await self._pages.apply(place, change)
            await self._moves.follow_up(place)
            if answer:
                await self._bell.ring()
            if answer is not None:
                return answer
        return False

    async def report_progress(self, reports: Sequence[ProgressReport]) -> None:
        """Store progress with the next renewal; at once where requests cost nothing."""
        self._reports |= {message_changes.find_claim(each.receipt): each for each in reports}
        if not self.is_billed:
            for place in {each.receipt.claim.partition("@")[2] for each in reports}:
                await self._pages.apply(
                    place, lambda page: (self._note_progress(page, reports), True)
                )
            self._drop_reports(reports)

    async def clear_progress(self, ids: Collection[str]) -> None:
        """Forget what was reported; the settlement has removed it from the page."""
        self._reports = {
            claim: each for claim, each in self._reports.items() if claim[0] not in ids
        }

    def _list_reports(self, claims: Iterable[tuple[str, str]]) -> list[ProgressReport]:
        """Return the progress of claims that is not stored yet."""
        return [self._reports[claim] for claim in claims if claim in self._reports]

    def _drop_reports(self, stored: Iterable[ProgressReport]) -> None:
        """Forget progress that is stored, unless there is news."""
        for each in stored:
            claim = message_changes.find_claim(each.receipt)
            if self._reports.get(claim) is each:
                del self._reports[claim]

    def _note_progress(self, page: QueuePage, reports: Collection[ProgressReport]) -> QueuePage:
        """Return a page with the progress of its messages."""
        if not reports:
            return page
        return message_changes.note_progress(page, reports, self._clock.wall().seconds)

    async def wait_for_end(self, timeout: float) -> None:
        """Wait: no store without SQL announces the end of messages."""
        await self._clock.sleep(timeout)
