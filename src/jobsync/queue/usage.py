"""What a queue on S3 costs: requests and dollars, by a formula. Pure.

Some requests come by the clock, whatever the messages: heartbeats, readings of the bell, and
listings of the coordinator. Others come with each page of messages: it is pushed, read, claimed,
settled and dropped. And each ring of the bell makes every worker look for pages: in the ticket of
the coordinator if there is one, else in a listing.

`docs/how-to/queues-on-s3.md` prints the formula. Tests compare it with counted requests.
"""

import math

import msgspec

from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.clock import Seconds
from jobsync.errors import Invalid
from jobsync.queue.pages.bell import READ_INTERVAL, RING_INTERVAL
from jobsync.queue.pages.dispatcher import MIN_READERS
from jobsync.queue.pages.listing_plan import (
    IDLE_LISTING,
    QUIET_LISTING,
    TRUSTING_LISTING,
    WHOLE_LISTING,
)
from jobsync.stores.metered import S3_TARIFF

__all__ = ["RequestCounts", "UsageEstimate", "estimate_usage"]

_DAY: Seconds = 86_400.0
_LEADER_READS = 0.37
"""Of the role and of requests to hand it over, each a minute."""
_MANDATES = 0.2
"""How often a coordinator extends its mandate in a minute."""
_LOOKS = 2
"""Looks of a worker after each ring that it hears: at once, and when silent pushes are over."""
_SPOILED = 0.5
"""The part of the workers that hear a ring before the ticket is there, and list."""
_DROP_INTERVAL: Seconds = 600.0
_MAX_NUMBER = 1e12


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests by kind. A DELETE is free."""

    puts: float = 0.0
    gets: float = 0.0
    lists: float = 0.0

    def __add__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            self.puts + other.puts, self.gets + other.gets, self.lists + other.lists
        )

    def times(self, number: float) -> "RequestCounts":
        """Return so many times these requests."""
        return RequestCounts(self.puts * number, self.gets * number, self.lists * number)

    @property
    def total(self) -> float:
        """How many they are."""
        return self.puts + self.gets + self.lists

    @property
    def dollars(self) -> float:
        """What they cost, by Amazon's list prices."""
        return (
            S3_TARIFF.price("write", 1) * self.puts
            + S3_TARIFF.price("get", 1) * self.gets
            + S3_TARIFF.price("heads", 0) * self.lists
        )


class UsageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue costs in a number of days."""

    days: float
    sessions: RequestCounts
    """Heartbeats and the election of the workers; other plugins use the same ones."""
    bell: RequestCounts
    """Readings and rings."""
    looking: RequestCounts
    """Listings and tickets, of all workers and of the coordinator."""
    pages: RequestCounts
    """What is pushed, claimed, renewed, settled and dropped."""

    @property
    def total(self) -> RequestCounts:
        """All requests."""
        return self.sessions + self.bell + self.looking + self.pages

    @property
    def dollars(self) -> float:
        """What all requests cost."""
        return self.total.dollars


def estimate_usage(
    *,
    workers: int,
    messages_per_day: float,
    messages_per_page: float,
    seconds_per_page: Seconds,
    heartbeat: Seconds,
    visibility: Seconds,
    days: float,
) -> UsageEstimate:
    """Return what a queue on S3 costs. See `QueuePlugin.estimate_usage`.

    Raises:
        Invalid: a number is out of range.
    """
    check_count("workers", workers, least=1)
    check_seconds("seconds_per_page", seconds_per_page)
    _check_number("messages_per_day", messages_per_day, is_zero_allowed=True)
    _check_number("messages_per_page", messages_per_page)
    _check_number("days", days)
    pages = messages_per_day / messages_per_page
    interval = visibility / 3
    renewals = math.floor(seconds_per_page / interval)
    watching = min(pages * seconds_per_page, _DAY) / interval
    rings = min(pages, _DAY / RING_INTERVAL)
    page = RequestCounts(puts=3 + renewals, gets=3)
    return UsageEstimate(
        days=days,
        sessions=_count_sessions(workers, heartbeat).times(days),
        bell=RequestCounts(puts=rings, gets=workers * _DAY / READ_INTERVAL).times(days),
        looking=_count_looks(workers, pages, renewals, watching).times(days),
        pages=page.times(pages * days),
    )


def _check_number(field: str, value: object, *, is_zero_allowed: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= _MAX_NUMBER and (value or is_zero_allowed):  # type: ignore[operator]
        return
    least = "0 or more" if is_zero_allowed else "more than 0"
    raise Invalid(field, value, f"must be {least}, up to {_MAX_NUMBER:,.0f}", "pass a number")


def _count_sessions(workers: int, heartbeat: Seconds) -> RequestCounts:
    """Return the requests of heartbeats and of the election in a day."""
    beats, minutes = _DAY / heartbeat, _DAY / 60
    followers = RequestCounts(puts=beats, gets=1.05 * beats).times(workers - 1)
    leader = RequestCounts(
        puts=beats + _MANDATES * minutes,
        gets=2 * _LEADER_READS * minutes,
        lists=1.05 * beats,
    )
    return followers + leader


def _count_looks(workers: int, pages: float, renewals: int, watching: float) -> RequestCounts:
    """Return the requests of a day that look for pages and watch claims.

    Args:
        workers: how many there are.
        pages: how many there are.
        renewals: how often the claims of a page are renewed.
        watching: how often each of those who watch claims looks.
    """
    heard = min(pages, _DAY / RING_INTERVAL, _DAY / READ_INTERVAL)
    has_ticket = workers - 1 >= MIN_READERS
    looks = _LOOKS * heard
    if has_ticket:
        # Its own look and a ticket for each; others read the ticket, and list if it is late.
        coordinator = RequestCounts(puts=looks, lists=looks)
        followers = RequestCounts(gets=looks, lists=_SPOILED * looks).times(workers - 1)
    else:
        coordinator = RequestCounts(lists=looks)
        followers = RequestCounts(lists=looks).times(workers - 1)
    # Nobody watches the claims of its own process.
    watchers = 0 if workers == 1 else 2
    is_busy = pages > 0
    regular = _DAY / (WHOLE_LISTING if is_busy else QUIET_LISTING)
    regular = max(0.0, regular - looks - watching)
    drops = 3 * _DAY / _DROP_INTERVAL if is_busy else 2 * _DAY / TRUSTING_LISTING
    alone = (workers - 1) * _DAY / (TRUSTING_LISTING if has_ticket else IDLE_LISTING)
    own = RequestCounts(
        gets=watchers * pages * renewals, lists=watchers * watching + regular + drops + alone
    )
    return coordinator + followers + own
