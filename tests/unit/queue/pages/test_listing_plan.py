"""When a process lists the pages of a queue, by what it does for the others and what it knows."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync.queue.pages.bell import FOLLOW_UP
from jobsync.queue.pages.listing_plan import ListingPlan
from jobsync.queue.pages.tickets import TicketReader, WatchDuty

VISIBILITY = 30.0
ALONE, COORDINATOR = WatchDuty.ALONE, WatchDuty.COORDINATOR
DEPUTY, FOLLOWER = WatchDuty.DEPUTY, WatchDuty.FOLLOWER


def build(duty: WatchDuty, *, is_billed: bool = True) -> tuple[ListingPlan, FakeClock]:
    """Return the plan of a process with this duty, and its clock."""
    clock = FakeClock()
    tickets = cast("TicketReader", SimpleNamespace(duty=duty))
    return ListingPlan(tickets, clock, is_billed=is_billed), clock


def look(plan: ListingPlan, **how: Any) -> None:
    """Look at the pages, which takes no time."""
    plan.begin()
    plan.end(**{"is_listed": True, "is_whole": True, **how})


def is_settled_now(plan: ListingPlan) -> bool:
    """Whether nothing is missing in the last look."""
    return plan.is_settled


def is_whole_due_now(plan: ListingPlan) -> bool:
    """Whether the next look is at the whole lane."""
    return plan.is_whole_due


def find_wait(plan: ListingPlan) -> float:
    """Return the seconds until the next look."""
    wait = plan.find_wait(VISIBILITY)
    assert plan.is_due(VISIBILITY) is (wait <= 0)
    return wait


@pytest.mark.parametrize("since_ring", [0.0, 599.0, 600.0])
@pytest.mark.parametrize("has_open", [False, True])
@pytest.mark.parametrize("duty", [*WatchDuty])
def test_how_long_a_process_relies_on_what_it_has_seen(
    duty: WatchDuty, has_open: bool, since_ring: float
) -> None:
    """The coordinator lists each minute while anything happens: open pages, or rings of late."""
    plan, clock = build(duty)
    plan.notice(7)
    look(plan)
    clock.mono_seconds += FOLLOW_UP
    look(plan)
    clock.mono_seconds += since_ring - FOLLOW_UP
    look(plan)
    plan.has_open = has_open
    is_quiet = since_ring >= 600.0 and not has_open
    longest = {ALONE: 300.0, COORDINATOR: 180.0 if is_quiet else 60.0}
    assert find_wait(plan) == longest.get(duty, 3600.0)
    free, _ = build(duty, is_billed=False)
    look(free)
    assert find_wait(free) == 0.0


@pytest.mark.parametrize("duty", [*WatchDuty])
def test_claims_are_watched_by_listings_alone(duty: WatchDuty) -> None:
    """A ticket shows no claims, so it puts no listing off; a follower relies on the others."""
    plan, clock = build(duty)
    look(plan)
    longest = find_wait(plan)
    plan.has_claims = True
    assert find_wait(plan) == (longest if duty is FOLLOWER else VISIBILITY / 3)
    clock.mono_seconds += 6
    look(plan, is_listed=False, is_whole=False)
    assert plan.since_listing == 6
    assert find_wait(plan) == (longest if duty is FOLLOWER else VISIBILITY / 3 - 6)
    plan.has_claims = False
    assert find_wait(plan) == longest


@pytest.mark.parametrize("delay", [0.5, 20.0, 5000.0])
@pytest.mark.parametrize("duty", [*WatchDuty])
def test_the_end_of_a_delay_is_looked_at_by_the_wall_clock(duty: WatchDuty, delay: float) -> None:
    """Whatever the clock of this machine has counted since; and never later than otherwise."""
    plan, clock = build(duty)
    look(plan)
    longest = find_wait(plan)
    plan.next_due = clock.wall_seconds + delay
    assert find_wait(plan) == min(delay, longest)
    clock.wall_seconds += delay
    assert find_wait(plan) == 0.0


@pytest.mark.parametrize("duty", [*WatchDuty])
@pytest.mark.parametrize("first", ["listed", "settled ticket", "ticket"])
def test_a_ring_is_followed_by_two_looks(duty: WatchDuty, first: str) -> None:
    """At once, and when pushes that ring no more are over, unless a ticket has those too."""
    plan, clock = build(duty)
    look(plan)
    plan.notice(5)
    assert find_wait(plan) == 0.0
    assert not is_settled_now(plan)
    refresh = plan.begin()
    assert (refresh.number, refresh.is_rung, refresh.is_follow_up) == (5, True, False)
    assert refresh.may_use_ticket
    is_settled = first == "settled ticket"
    plan.end(is_settled=is_settled, is_listed=first == "listed", is_whole=False)
    assert is_settled_now(plan) is is_settled
    if is_settled:
        assert plan.find_next_listing() is None
        assert find_wait(plan) > FOLLOW_UP
        return
    assert find_wait(plan) == plan.find_next_listing() == FOLLOW_UP
    clock.mono_seconds += FOLLOW_UP
    refresh = plan.begin()
    assert (refresh.number, refresh.is_rung, refresh.is_follow_up) == (5, False, True)
    plan.end(is_listed=True, is_whole=False)
    assert is_settled_now(plan)
    assert find_wait(plan) > FOLLOW_UP


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_ring_during_a_look_is_followed_by_two_of_its_own(is_settled: bool) -> None:
    """What the look has shown is older than the ring, even if nothing was missing in it."""
    plan, clock = build(FOLLOWER)
    plan.notice(5)
    plan.begin()
    clock.mono_seconds += 1
    plan.notice(6)
    plan.end(is_settled=is_settled, is_listed=False, is_whole=False)
    assert not is_settled_now(plan)
    refresh = plan.begin()
    assert (refresh.number, refresh.is_rung) == (6, True)
    plan.end(is_listed=True, is_whole=False)
    assert find_wait(plan) == FOLLOW_UP


def test_a_look_that_failed_is_repeated() -> None:
    """Whatever it was for; the one that follows a ring is still to come."""
    plan, clock = build(COORDINATOR)
    look(plan)
    plan.begin()
    plan.repeat()
    assert find_wait(plan) == 0.0
    look(plan)
    plan.notice(5)
    plan.begin()
    plan.repeat()
    assert find_wait(plan) == 0.0
    look(plan)
    assert find_wait(plan) == FOLLOW_UP
    clock.mono_seconds += FOLLOW_UP
    assert plan.begin().is_follow_up


@pytest.mark.parametrize(
    ("how", "is_due"),
    [
        ({}, False),
        ({"is_whole": False}, True),
        ({"is_listed": False, "is_whole": False}, True),
    ],
)
def test_only_a_listing_of_the_whole_lane_counts_as_one(how: Any, is_due: bool) -> None:
    """Once a minute, pages that came late are looked for."""
    plan, clock = build(COORDINATOR)
    assert is_whole_due_now(plan)
    look(plan)
    clock.mono_seconds += 30
    look(plan, **how)
    clock.mono_seconds += 29.5
    assert not is_whole_due_now(plan)
    clock.mono_seconds += 0.5
    assert is_whole_due_now(plan) is is_due
    clock.mono_seconds += 30
    assert is_whole_due_now(plan)


def test_a_listing_that_is_due_after_a_minute_is_one_of_the_whole_lane() -> None:
    """However the times are rounded. Found: a late page was looked for a minute later."""
    for number in range(1000):
        plan, clock = build(COORDINATOR)
        plan.has_open = True
        start = 1_000 + number * math.pi
        clock.mono_seconds = start
        look(plan)
        clock.mono_seconds = start + 60
        assert is_whole_due_now(plan) is plan.is_due(VISIBILITY)


@pytest.mark.parametrize("duty", [*WatchDuty])
def test_the_ticket_is_read_for_news_or_by_who_knows_of_none(duty: WatchDuty) -> None:
    """Looks for claims, delays and old pages are listings: the ticket would show nothing new."""
    plan, _ = build(duty)
    assert plan.begin().may_use_ticket
    plan.end(is_listed=True, is_whole=True)
    assert plan.begin().may_use_ticket is (duty is ALONE)


@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize("is_follow_up", [False, True])
def test_a_look_that_fails_is_made_again_as_what_it_was(is_follow_up: bool, failures: int) -> None:
    """Found: the one after a ring was forgotten, and a push that rang no more with it."""
    plan, clock = build(FOLLOWER)
    plan.notice(7)
    look(plan, is_listed=False, is_whole=False)
    if is_follow_up:
        clock.mono_seconds += FOLLOW_UP
    else:
        plan.repeat()
    for _ in range(failures):
        assert plan.begin().is_follow_up is is_follow_up
        plan.repeat()
        clock.mono_seconds += 0.1
        assert find_wait(plan) == 0.0
    assert plan.begin().is_follow_up is is_follow_up
    plan.end(is_listed=False, is_whole=False)
    assert is_settled_now(plan) is is_follow_up
