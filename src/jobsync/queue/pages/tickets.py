"""The ticket of a queue: what its coordinator has found, for workers that would list the same.

One record for each queue, written by the coordinator alone, fenced by its epoch, and only if there
are enough workers to be worth it. It names the pages to look at, the frontiers, the number of the
bell that was read before the pages were listed, and the deputy.

A ticket is only a hint. A worker uses it if its epoch is that of the coordinator that leads and it
has seen the latest ring; otherwise the worker lists. So a ticket that is old, late, or written by a
coordinator that was replaced, costs a request and hides nothing.

While there is such a ticket, only the coordinator and the deputy watch claims, and look for pages
that no ring has announced.
"""

import enum
from typing import Annotated

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.keys import escape
from jobsync.errors import Corrupt
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.pages.page import PageMark, read_class, read_due
from jobsync.queue.pages.page_reader import ListedPage
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, convert_record

__all__ = ["MAX_PAGES", "Ticket", "TicketReader", "WatchDuty", "read_ticket"]

MAX_PAGES = 200
"""The most pages that a ticket names: about 20 KB."""

_FORMAT = 1
_RETRY: Seconds = 300.0
"""Seconds without another look for a ticket after none was found."""
_AT_ONCE = Mono(float("-inf"))
_MAX_NUMBER = 2**53


class WatchDuty(enum.Enum):
    """What a process does for the others of a queue."""

    ALONE = "alone"
    """It knows of no ticket: it watches claims and lists pages for itself."""
    COORDINATOR = "coordinator"
    """It watches claims and lists pages for all."""
    DEPUTY = "deputy"
    """It watches claims, too: the coordinator may die."""
    FOLLOWER = "follower"
    """It relies on the coordinator and the deputy."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a coordinator has found in a queue."""

    bell: Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)]
    """The number of the bell that was known before the pages were listed."""
    is_settled: bool = False
    """Whether they were listed again since: pushes that rang no more are in it, too."""
    pages: tuple[tuple[str, str, int], ...] = ()
    """Place, version and mark of the first pages that are not done, in the queue's order."""
    has_more: bool = False
    """Whether there are more."""
    frontier: str = ""
    """The place before which everything without a priority is done."""
    frontiers: tuple[str, ...] = ()
    """Likewise of each other priority that was seen."""
    due: float | None = None
    """When the next of the delayed pages is due, also of those that are not named."""
    deputy: str = ""
    """The session of the worker that watches claims besides the coordinator."""

    @property
    def all_frontiers(self) -> dict[str, str]:
        """The frontiers by the class of their pages."""
        return {read_class(place): place for place in (self.frontier, *self.frontiers) if place}

    def list_pages(self) -> list[ListedPage]:
        """Return the pages as a listing would show them; those with odd names are left out."""
        found = []
        for place, version, mark in self.pages:
            due = read_due(place.rpartition("/")[2])
            if due is not None:
                found.append(ListedPage(place, version, _read_mark(mark), due, None))
        return found


def _read_mark(mark: int) -> PageMark:
    try:
        return PageMark(mark)
    except ValueError:
        return PageMark.UNKNOWN


def read_ticket(record: Record) -> Ticket | None:
    """Return the ticket of a record; None if it was withdrawn, or is of newer code.

    Raises:
        Corrupt: no version of this library wrote this.
    """
    if record.value is None or record.format > _FORMAT:
        return None
    return convert_record(record, Ticket)


class TicketReader:
    """Reads the ticket of a queue, and knows what this process does for the others.

    Args:
        store: where the ticket is stored.
        queue: the queue's name.
        components: time and events.
    """

    def __init__(self, store: Store, queue: str, components: Components) -> None:
        self.key = f"ticket/{escape(queue, 'queue')}"
        self.fleet: QueueFleet | None = None
        """The processes of the queue; None while this one has no session."""
        self._store = store
        self._clock = components.clock
        self._log = CorruptionLog(f"queue/{queue}", components.events)
        self._ticket: Ticket | None = None
        self._epoch = 0
        self._next_try = _AT_ONCE

    @property
    def duty(self) -> WatchDuty:
        """What this process does for the others. Reads no store."""
        fleet = self.fleet
        if fleet is None:
            return WatchDuty.ALONE
        if fleet.term is not None:
            return WatchDuty.COORDINATOR
        if self._ticket is None or self._epoch != fleet.epoch:
            return WatchDuty.ALONE
        is_deputy = self._ticket.deputy == fleet.incarnation
        return WatchDuty.DEPUTY if is_deputy else WatchDuty.FOLLOWER

    async def read(self, number: int, *, is_settled: bool) -> Ticket | None:
        """Return the ticket if it can be used in place of a listing.

        Args:
            number: the latest ring that this process has noticed.
            is_settled: whether pushes that rang no more must be in it.

        Raises:
            Unavailable: the store does not answer.
        """
        fleet = self.fleet
        epoch = None if fleet is None else fleet.epoch
        if fleet is None or not epoch or fleet.term is not None:
            return None
        if self._epoch == epoch and self._clock.mono() < self._next_try:
            return None
        ticket = await self._read(epoch)
        if ticket is None or ticket.bell < number:
            return None
        return ticket if ticket.is_settled or not is_settled else None

    async def _read(self, epoch: int) -> Ticket | None:
        """Read the ticket of the coordinator with this epoch, and remember it."""
        found: tuple[Ticket | None, int] = (None, epoch)
        try:
            record = await self._store.get(self.key)
            if record is not None and record.epoch == epoch:
                found = (self._log.read(read_ticket, record), epoch)
        except Corrupt as corrupt:
            self._log.report(corrupt)
        self._ticket, self._epoch = found
        self._next_try = _AT_ONCE if self._ticket is not None else self._clock.mono() + _RETRY
        return self._ticket
