"""The coordinator's part in a queue in pages: it looks for all, and publishes tickets.

It lists the pages when the bell rings, every minute for pages that no ring has announced, at the
end of each delay, and while there may be claims every third of the visibility timeout, and again
when one lapses. It ends the claims that have lapsed, and rings the bell for what it has found.

What it has found is published as a ticket if that saves requests: with at least two other
workers. A ticket is a write, and saves half of the workers a listing of the same price.

Every process of a queue runs one, and it does nothing until the process is elected. If it dies, the
others go on: they list when the bell rings, and the deputy watches claims.
"""

from collections.abc import Awaitable, Callable

import msgspec

from jobsync.components import Components
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono, Seconds
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import (
    Corrupt,
    Fenced,
    Misconfigured,
    NewerFormat,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.queue.backend import EndedClaim
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.tickets import Ticket, TicketReader

__all__ = ["MIN_READERS", "Dispatcher", "DispatcherHost"]

MIN_READERS = 2
"""The other workers for whom a ticket is published."""
_GATHER: Seconds = 0.1
"""Seconds in which a worker of this process can list what the bell has announced."""
_SECOND_LOOK: Seconds = 60.0
"""Seconds after the sessions have changed until the workers are read again: a process joins before
it says what it handles."""
_BACKOFF = ExponentialBackoff(first=1.0, longest=30.0)
_NEVER = Mono(float("-inf"))


class DispatcherHost(msgspec.Struct, frozen=True, kw_only=True):
    """What the backend does for its dispatcher."""

    refresh: Callable[[], Awaitable[None]]
    """Looks at the pages if it is time."""
    end_lapsed: Callable[[], Awaitable[list[EndedClaim]]]
    """Ends the claims of other processes that have lapsed, and rings the bell."""
    ring: Callable[[], Awaitable[None]]
    """Rings the bell."""
    wait: Callable[[Seconds], Awaitable[None]]
    """Waits for the bell, or for a push of this process."""


class Dispatcher:
    """Coordinates a queue in pages while this process is elected.

    Args:
        finder: knows the pages.
        tickets: knows where the ticket is.
        host: the backend.
        components: time and randomness.
        visibility: returns how long claims hold.
    """

    def __init__(
        self,
        finder: PageFinder,
        tickets: TicketReader,
        host: DispatcherHost,
        components: Components,
        visibility: Callable[[], Seconds],
    ) -> None:
        self._finder = finder
        self._key = tickets.key
        self._host = host
        self._clock = components.clock
        self._randomness = components.randomness
        self._visibility = visibility
        self._published: tuple[Term, Ticket | None] | None = None
        """What was published last, and in which term."""
        self._published_at = _NEVER
        self._workers: list[str] = []
        self._living: frozenset[str] | None = None
        self._next_reading: Mono | None = None

    async def run(self, fleet: QueueFleet) -> None:
        """Coordinate whenever this process is elected, until cancelled."""
        failures = 0
        while True:
            term = fleet.term
            if term is None:
                self._finder.has_peers = False
                self._living = None
                await fleet.change()
                continue
            try:
                await self._work(fleet, term)
                failures = 0
                await self._wait(fleet)
            except Fenced:
                # Another process coordinates by now; the election will say so.
                await fleet.change()
            except (Corrupt, Misconfigured, NewerFormat, OutcomeUnknown, Unavailable) as error:
                failures += 1
                fleet.on_failure(error)
                await _BACKOFF.sleep(failures, self._clock, self._randomness)

    async def _work(self, fleet: QueueFleet, term: Term) -> None:
        await self._read_workers(fleet)
        await self._host.refresh()
        ended = await self._host.end_lapsed()
        if ended:
            fleet.on_ended(ended)
        if self._finder.unannounced:
            self._finder.unannounced = 0
            await self._host.ring()
        await self._publish(fleet, term)

    async def _read_workers(self, fleet: QueueFleet) -> None:
        """Read who handles messages, if sessions have come or gone."""
        now, living = self._clock.mono(), fleet.living
        is_due = self._next_reading is not None and now >= self._next_reading
        if living == self._living and not is_due:
            return
        self._next_reading = None if living == self._living else now + _SECOND_LOOK
        self._living = living
        self._workers = await fleet.list_workers()
        self._finder.has_peers = bool(self._workers)

    async def _publish(self, fleet: QueueFleet, term: Term) -> None:
        """Write a ticket if it says something new and enough workers read it."""
        now = self._clock.mono()
        ticket = before = None
        if self._published is not None and self._published[0] is term:
            before = self._published[1]
        if len(self._workers) >= MIN_READERS:
            ticket = self._finder.build_ticket(self._workers[0])
        if not _is_news(before, ticket) or now - self._published_at < fleet.dispatch_interval:
            return
        await term.put(self._key, None if ticket is None else msgspec.to_builtins(ticket))
        self._published, self._published_at = (term, ticket), now
        if ticket is not None:
            fleet.on_published(len(ticket.pages))

    async def _wait(self, fleet: QueueFleet) -> None:
        """Wait until there may be something to do."""
        waits = [self._finder.plan.find_wait(self._visibility())]
        lapse = self._finder.watch_claims()
        if lapse is not None:
            waits.append(lapse)
        if self._next_reading is not None:
            waits.append(self._next_reading - self._clock.mono())
        interval = self._published_at + fleet.dispatch_interval - self._clock.mono()
        if interval > 0:
            waits.append(interval)
        await self._host.wait(max(0.0, min(waits)))
        await self._clock.sleep(_GATHER)


def _is_news(before: Ticket | None, ticket: Ticket | None) -> bool:
    """Whether a ticket says something that workers look for.

    That a page is claimed or done is not: whoever reads the page sees it.
    """
    if before is None or ticket is None:
        return before is not ticket
    if (before.bell, before.is_settled, before.deputy) != (
        ticket.bell,
        ticket.is_settled,
        ticket.deputy,
    ):
        return True
    return not {place for place, _, _ in ticket.pages} <= {place for place, _, _ in before.pages}
