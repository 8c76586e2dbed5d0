"""What a process knows of pages: of two things that it has seen, the later one counts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Record
from jobsync.core.clock import Mono
from jobsync.events import Events
from jobsync.queue.pages.changes import find_outlook
from jobsync.queue.pages.known_pages import KnownPage, KnownPages
from jobsync.queue.pages.page import PageMark, PageMessage, QueuePage, name_page
from jobsync.queue.pages.page_reader import ListedPage, OpenPage
from jobsync.queue.pages.page_store import PageStore
from jobsync.queue.pages.tickets import MAX_PAGES, TicketReader, WatchDuty

NOW = 1_700_000_000.0
PLAIN, MAILS = frozenset({""}), frozenset({"mails"})


def message(name: str, state: Any = "ready", **fields: Any) -> PageMessage:
    """Return a message of a page."""
    return PageMessage(id=name, state=state, max_attempts=4, enqueued=NOW, **fields)


def place(number: int = 0, due: float = NOW - 60) -> str:
    """Return the place of a page."""
    return f"0/{name_page(due + number, f'nonce{number:07}')}"


class Known:
    """What a process knows, and the pages that it has in hand."""

    def __init__(self) -> None:
        self.in_hand: dict[str, OpenPage] = {}
        clock = FakeClock()
        clock.wall_seconds = NOW
        components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
        self.pages = KnownPages(
            cast("PageStore", SimpleNamespace(find_open=self.in_hand.get, sessions=set())),
            cast("TicketReader", SimpleNamespace(duty=WatchDuty.COORDINATOR)),
            components,
            is_billed=True,
        )

    def show(self, where: str, mark: PageMark, *, version: str = "v1", at: float = 10.0) -> None:
        """Add a page to what a listing shows."""
        due = NOW + 100 if mark is PageMark.WAITING else NOW - 60
        listed = ListedPage(where, version, mark, due, None)
        self.pages._known[where] = KnownPage(listed, Mono(at))
        self.pages._insert(where)

    def hold(self, where: str, page: QueuePage, *, version: str = "v1", at: float = 10.0) -> None:
        """Read or write a page."""
        record = Record(where, None, version, seq=1, epoch=0, format=1, trail="")
        self.in_hand[where] = OpenPage(record, page, Mono(at))


@pytest.mark.parametrize(
    ("version", "at", "is_used"),
    [
        ("v1", 5.0, True),
        ("v1", 15.0, True),
        # Another version was listed, before or after the one in hand was current.
        ("v2", 9.0, False),
        ("v2", 10.0, True),
        ("v2", 11.0, True),
    ],
)
def test_a_page_in_hand_counts_unless_a_newer_version_was_listed(
    version: str, at: float, is_used: bool
) -> None:
    """The same version does, whenever it was read; so does one that is known from nowhere else."""
    known = Known()
    where = place()
    assert known.pages._find_open(where) is None
    known.hold(where, QueuePage(birth="b"), version=version, at=at)
    assert known.pages._find_open(where) is not None
    known.show(where, PageMark.READY, version="v1", at=10.0)
    assert (known.pages._find_open(where) is not None) is is_used


OUTLOOK_PAGES = {
    "v1": QueuePage(
        birth="b",
        messages=(
            message("1"),
            message("2", "waiting", due=NOW + 10),
            message("3", task="mails"),
            message("4", "waiting", task="mails", due=NOW + 20, is_suspect=True),
        ),
    ),
    "v2": QueuePage(birth="b", messages=(message("1", "completed"), message("3", task="mails"))),
}


@pytest.mark.parametrize(
    "looks",
    [
        # Each time one thing alone is another one: the version, the tasks, or the time.
        [("v1", PLAIN, NOW), ("v2", PLAIN, NOW), ("v1", PLAIN, NOW)],
        [("v1", PLAIN, NOW), ("v1", MAILS, NOW), ("v1", PLAIN | MAILS, NOW), ("v1", PLAIN, NOW)],
        [("v1", PLAIN, NOW), ("v1", PLAIN, NOW + 9.9), ("v1", PLAIN, NOW + 10)],
        [("v1", MAILS, NOW), ("v1", MAILS, NOW + 20), ("v1", MAILS, NOW + 21)],
        # Under a veto of the clock nothing that was delayed is due; afterwards it is again.
        [("v1", PLAIN, NOW + 10), ("v1", PLAIN, 0.0), ("v1", PLAIN, NOW + 10)],
        [("v1", MAILS, NOW + 20), ("v1", MAILS, 0.0), ("v1", MAILS, NOW + 20)],
    ],
)
def test_what_was_found_in_a_page_is_found_anew_when_anything_has_changed(
    looks: list[tuple[str, frozenset[str], float]],
) -> None:
    """It is remembered for one version, some tasks, and until the next delay is over."""
    known, where = Known(), place()
    for version, tasks, now in looks:
        known.hold(where, OUTLOOK_PAGES[version], version=version)
        opened = known.in_hand[where]
        for _ in range(2):
            found = known.pages._find_outlook(where, opened, now, tasks)
            assert found == find_outlook(opened.page, now, tasks)


CLAIMED = message("1", "claimed", claim="c")
IN_HAND = {
    PageMark.READY: (message("1"),),
    PageMark.PARTLY: (message("0"), CLAIMED),
    PageMark.SUSPECT: (message("1", is_suspect=True),),
    PageMark.WAITING: (message("1", "waiting", due=NOW + 5),),
    PageMark.CLAIMED: (CLAIMED,),
    PageMark.KEPT: (message("1", "dead"),),
    PageMark.DONE: (message("1", "completed"),),
    PageMark.MOVING: (message("1", "dead", move="dead/x"),),
}
NAMED = {PageMark.READY, PageMark.PARTLY, PageMark.SUSPECT, PageMark.WAITING, PageMark.UNKNOWN}


@pytest.mark.parametrize("listed", [*PageMark])
@pytest.mark.parametrize("in_hand", [None, *IN_HAND])
def test_a_ticket_names_pages_as_they_were_seen_last(
    listed: PageMark, in_hand: PageMark | None
) -> None:
    """With the version that belongs to the mark, and only those in which others find something."""
    known, where = Known(), place()
    known.show(where, listed, version="listed")
    if in_hand is not None:
        known.hold(where, QueuePage(birth="b", messages=IN_HAND[in_hand]), version="in hand", at=20)
    ticket = known.pages.build_ticket("deputy")
    mark, version = (listed, "listed") if in_hand is None else (in_hand, "in hand")
    assert ticket.pages == (((where, version, int(mark)),) if mark in NAMED else ())
    assert ticket.deputy == "deputy"
    assert ticket.due == (NOW + 100 if listed is PageMark.WAITING else None)


@pytest.mark.parametrize("count", [MAX_PAGES - 1, MAX_PAGES, MAX_PAGES + 1])
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_ticket_says_whether_there_is_more(count: int, is_complete: bool) -> None:
    """Pages that it does not name, or that its writer has not listed; others do not count."""
    known = Known()
    known.pages._is_complete = is_complete
    for number in range(count):
        known.show(place(number), PageMark.READY)
        known.show(place(number, due=NOW - 2_000), PageMark.CLAIMED)
    ticket = known.pages.build_ticket("deputy")
    assert len(ticket.pages) == min(count, MAX_PAGES)
    assert ticket.has_more is (count > MAX_PAGES or not is_complete)


@pytest.mark.parametrize(
    ("mark", "still", "is_given_up"),
    [
        (PageMark.MOVING, 0.0, False),
        (PageMark.MOVING, 4.9, False),
        (PageMark.MOVING, 5.0, True),
        (PageMark.MOVING, 60.0, True),
        (PageMark.PARTLY, 60.0, False),
    ],
)
def test_a_move_is_left_to_its_process_while_that_goes_on(
    mark: PageMark, still: float, is_given_up: bool
) -> None:
    """One that stands still for five seconds is finished by others."""
    known = Known()
    known.show(place(), mark)
    cast("Any", known.pages._pages).find_still = {place(): still}.__getitem__
    assert known.pages.list_moving() == [place()] * is_given_up
