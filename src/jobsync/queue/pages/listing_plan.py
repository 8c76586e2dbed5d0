"""When the pages of a queue are listed, or the ticket is read instead.

A listing has one of four reasons: a ring of the bell, and once more when pushes that ring no more
are over; claims that are to be watched; a delay that has ended; and that the last one was long ago.

Who has which reason depends on what a process does for the others. The coordinator has all of them:
it lists every minute while something happens in the queue, and every three minutes otherwise. The
deputy watches. A follower relies on both, and lists by itself once an hour. Without a ticket each
process watches, and lists every five minutes.
"""

from typing import NamedTuple

from jobsync.core.clock import Clock, Mono, Seconds
from jobsync.queue.pages.bell import FOLLOW_UP
from jobsync.queue.pages.tickets import TicketReader, WatchDuty

__all__ = [
    "IDLE_LISTING",
    "QUIET_LISTING",
    "TRUSTING_LISTING",
    "WHOLE_LISTING",
    "ListingPlan",
    "Refresh",
]

WHOLE_LISTING: Seconds = 60.0
"""Between two listings from the beginning of the lane: pages may come late."""
QUIET_LISTING: Seconds = 180.0
"""Between two listings of the coordinator in a queue in which nothing happens."""
IDLE_LISTING: Seconds = 300.0
"""Between two listings of such a queue by a process that knows of no ticket."""
TRUSTING_LISTING: Seconds = 3600.0
"""Between two listings by a process that relies on the coordinator."""
_QUIET_AFTER: Seconds = 600.0
"""Without a ring for so long, and without open pages, nothing happens in a queue."""
_SOON: Seconds = 0.05
_NEVER = Mono(float("-inf"))


class Refresh(NamedTuple):
    """One look at the pages."""

    sent: Mono
    number: int
    """The number of the bell that is known before it."""
    is_follow_up: bool
    """Whether it follows a ring, for pushes that rang no more."""
    is_rung: bool
    """Whether it is because of a ring."""
    may_use_ticket: bool
    """Whether the ticket may say as much as a listing."""


class ListingPlan:
    """Decides when pages are listed.

    Args:
        tickets: knows what this process does for the others.
        clock: this machine's clock.
        is_billed: whether listings cost money.

    Attributes:
        number: of the last ring that was noticed.
        has_claims: whether there may be claims of others, as of the last look.
        has_open: whether there are pages that are not done.
        next_due: when to look because a delayed page is due, by the wall clock; None for never.
    """

    def __init__(self, tickets: TicketReader, clock: Clock, *, is_billed: bool) -> None:
        self.number = 0
        self.has_claims = False
        self.has_open = False
        self.next_due: float | None = None
        self._tickets = tickets
        self._clock = clock
        self._is_billed = is_billed
        self._is_rung = True
        self._noticed = clock.mono()
        self._again: Mono | None = None
        """When to look once more after a ring."""
        self._is_follow_up = False
        """Whether the last look was that one."""
        self._looked = _NEVER
        """When there was a listing or a ticket."""
        self._listed = _NEVER
        self._listed_whole = _NEVER

    def notice(self, number: int) -> None:
        """Record a ring: look now, and again when pushes that ring no more are over."""
        self.number = number
        self._is_rung = True
        self._noticed = self._clock.mono()
        self._again = self._noticed + FOLLOW_UP

    @property
    def is_settled(self) -> bool:
        """Whether nothing can have been pushed before the last look that it did not show."""
        return self._again is None and not self._is_rung

    @property
    def since_listing(self) -> Seconds:
        """Seconds since the last listing."""
        return self._clock.mono() - self._listed

    @property
    def is_whole_due(self) -> bool:
        """Whether the next listing starts at the beginning of the lane."""
        return self._clock.mono() - self._listed_whole >= WHOLE_LISTING

    def is_due(self, visibility: Seconds) -> bool:
        """Whether it is time to look, whatever is known."""
        return self.find_wait(visibility) <= 0

    def find_wait(self, visibility: Seconds) -> Seconds:
        """Return the seconds until the next look."""
        now, duty = self._clock.mono(), self._tickets.duty
        if self._is_rung:
            return 0.0
        # Computed as in `is_whole_due`: rounded in another way, a listing that is due is not whole.
        waits = [self._find_longest(duty) - (now - self._looked)]
        if self._again is not None:
            waits.append(self._again - now)
        if self.has_claims and duty is not WatchDuty.FOLLOWER:
            waits.append(self._listed + visibility / 3 - now)
        if self.next_due is not None:
            waits.append(self.next_due - self._clock.wall().seconds)
        return max(0.0, min(waits))

    def _find_longest(self, duty: WatchDuty) -> Seconds:
        if not self._is_billed:
            return 0.0
        match duty:
            case WatchDuty.ALONE:
                return IDLE_LISTING
            case WatchDuty.COORDINATOR:
                is_quiet = self._clock.mono() - self._noticed >= _QUIET_AFTER
                return QUIET_LISTING if is_quiet and not self.has_open else WHOLE_LISTING
            case _:
                return TRUSTING_LISTING

    def find_next_listing(self) -> Seconds | None:
        """Return the seconds until the look that follows a ring; None if there is none."""
        return None if self._again is None else max(_SOON, self._again - self._clock.mono())

    def begin(self) -> Refresh:
        """Return the look that begins now."""
        now, duty = self._clock.mono(), self._tickets.duty
        is_news = self._is_rung or self._again is not None or duty is WatchDuty.ALONE
        refresh = Refresh(
            now,
            self.number,
            is_follow_up=self._again is not None and now >= self._again,
            is_rung=self._is_rung,
            may_use_ticket=is_news,
        )
        self._is_rung, self._is_follow_up = False, refresh.is_follow_up
        if refresh.is_follow_up:
            self._again = None
        return refresh

    def repeat(self) -> None:
        """Look again: the last look has failed, or what it has shown is in doubt."""
        self._is_rung = True
        if self._is_follow_up and self._again is None:
            self._again = self._clock.mono()

    def end(self, *, is_settled: bool = False, is_listed: bool, is_whole: bool) -> None:
        """Record that the look that began has ended.

        Args:
            is_settled: whether it was a ticket in which nothing is missing, so that no second
                look is needed.
            is_listed: whether pages were listed.
            is_whole: whether from the beginning of the lane to its end.
        """
        now = self._clock.mono()
        self._looked = now
        if is_listed:
            self._listed = now
        if is_whole:
            self._listed_whole = now
        if is_settled and not self._is_rung:
            self._again = None
