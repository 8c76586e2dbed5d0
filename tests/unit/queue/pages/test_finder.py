"""How pages with something to claim are found: by listings, by tickets, and by what was written."""

from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.events import Events
from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.changes import Claimant
from jobsync.queue.pages.known_pages import LATE, KnownPage
from jobsync.queue.pages.page import PageMark, PageMessage, QueuePage, name_page
from jobsync.queue.pages.page_reader import ListedPage
from jobsync.queue.pages.tickets import Ticket, WatchDuty
from jobsync.queue.settings import QueueOrder
from jobsync.stores.contract import Head
from jobsync.stores.decorator import StoreDecorator
from jobsync.testing import BilledStore

NOW = FakeClock().wall_seconds


def place(number: int = 0, due: float = NOW - 60) -> str:
    """Return the place of a page."""
    return f"0/{name_page(due + number, f'nonce{number:07}')}"


class SlowListings(StoreDecorator):
    """A store while whose listings others happen."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        found = await self.inner.heads(prefix, after=after, until=until, limit=limit)
        if self.meanwhile is not None and prefix.startswith("page/"):
            work, self.meanwhile = self.meanwhile, None
            await work()
        return found


class Fleet:
    """Processes of one queue, with one clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.bare = BilledStore(components=self.components)

    def start(self, order: QueueOrder = "fifo") -> tuple[SlowListings, PagesBackend]:
        """Start another process."""
        store = SlowListings(self.bare)
        return store, PagesBackend(store, "mails", self.components, order=order)


@pytest.fixture
def fleet() -> Fleet:
    """A queue that nobody has used."""
    return Fleet()


async def push(backend: PagesBackend, number: int, **options: Any) -> None:
    """Push a message."""
    await backend.push([NewMessage(id=f"id-{number}", value=number, max_attempts=4, **options)])


async def claim(backend: PagesBackend, limit: int = 10, **options: Any) -> list[str]:
    """Claim messages, and return their ids."""
    claimed = await backend.claim(limit, session="me.a", visibility=30, **options)
    return [each.id for each in claimed.messages]


@pytest.mark.parametrize("event", ["a push", "a retry"])
async def test_what_is_written_during_a_listing_is_known_after_it(fleet: Fleet, event: str) -> None:
    """The listing does not show it, or shows it as it was before."""
    store, worker = fleet.start()
    await push(worker, 1)
    claimed = await worker.claim(10, session="me.a", visibility=30)
    (message,) = claimed.messages

    async def write() -> None:
        if event == "a push":
            await push(worker, 2)
        else:
            retry = Settlement(receipt=message.receipt, move="retry", error="no")
            assert await worker.settle([retry]) == [True]
        fleet.clock.mono_seconds += 1

    store.meanwhile = write
    worker._finder.plan.notice(7)
    assert await claim(worker) == (["id-2"] if event == "a push" else ["id-1"])
    assert store.meanwhile is None


async def test_a_listing_counts_as_whole_if_it_has_reached_the_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has found enough before it does not: a page that came late may be beyond."""
    _, producer = fleet.start()
    for number in range(5):
        await push(producer, number)
    _, worker = fleet.start()
    pages = worker._pages
    monkeypatch.setattr(pages, "list_some", partial(pages.list_some, limit=2))
    assert await claim(worker, 1) == ["id-0"]
    assert worker._finder.plan.is_whole_due
    while await claim(worker, 1):
        pass
    worker._finder.plan.notice(7)
    assert await claim(worker, 1) == []
    assert not worker._finder.plan.is_whole_due


@pytest.mark.parametrize(
    ("order", "expected"), [("fifo", [0, 1]), ("lifo", [6, 5]), ("priority", [0, 1])]
)
async def test_the_order_of_a_queue_holds_beyond_one_part_of_a_listing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, order: QueueOrder, expected: list[int]
) -> None:
    """The newest pages are at the end of the lane."""
    _, producer = fleet.start()
    for number in range(7):
        await push(producer, number)
    _, worker = fleet.start(order)
    pages = worker._pages
    monkeypatch.setattr(pages, "list_some", partial(pages.list_some, limit=2))
    found = [*await claim(worker, 1), *await claim(worker, 1)]
    assert found == [f"id-{number}" for number in expected]


@pytest.mark.parametrize("duty", WatchDuty)
@pytest.mark.parametrize("has_found", [False, True])
@pytest.mark.parametrize("is_complete", [False, True])
def test_a_listing_is_worth_its_price_if_more_may_be_found(
    fleet: Fleet, *, duty: WatchDuty, has_found: bool, is_complete: bool
) -> None:
    """Who relies on the coordinator lists only if the ticket does not name everything."""
    _, worker = fleet.start()
    finder: Any = worker._finder
    finder._tickets = SimpleNamespace(duty=duty)
    finder._has_found, finder._is_complete = has_found, is_complete
    expected = has_found and (duty is WatchDuty.ALONE or not is_complete)
    assert finder.may_find_more is expected
    finder._is_billed = False
    assert finder.may_find_more is True


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(
    ("what", "age", "is_kept"),
    [
        ("in hand", 0.0, True),
        ("in hand", LATE + 1, True),
        ("listed", LATE - 1, True),
        ("listed", LATE, False),
        ("done", 0.0, False),
        ("done", LATE + 1, False),
    ],
)
async def test_a_ticket_is_used_with_what_the_process_knows_better(
    fleet: Fleet, *, what: str, age: float, is_kept: bool, is_named: bool
) -> None:
    """What it has in hand or has listed lately stays; what it has finished does not come back."""
    _, worker = fleet.start()
    await push(worker, 1)
    finder = worker._finder
    (where,) = finder._known
    if what == "listed":
        worker._pages.forget(where)
    elif what == "done":
        finder.remove(where)
    fleet.clock.mono_seconds += age
    other = place(1)
    named = ((where, "v", int(PageMark.READY)),) if is_named else ()
    finder._apply(Ticket(bell=1, pages=((other, "v", int(PageMark.READY)), *named)))
    is_known = is_kept or (is_named and what != "done")
    assert set(finder._known) == ({where, other} if is_known else {other})


def wanted(*, suspects: bool = False, tasks: str = "") -> Claimant:
    """Return who claims what."""
    return Claimant(
        id="",
        session="me.a",
        visibility=30,
        limit=9,
        suspects=suspects,
        tasks=frozenset({tasks}),
    )


@pytest.mark.parametrize("suspects", [False, True])
@pytest.mark.parametrize("due", [NOW - 60, NOW, NOW + 60])
@pytest.mark.parametrize("mark", [mark for mark in PageMark if mark is not PageMark.DONE])
def test_a_page_that_was_only_listed_is_chosen_by_its_mark(
    fleet: Fleet, *, mark: PageMark, due: float, suspects: bool
) -> None:
    """If it shows what is asked for; one that waits when its time has come."""
    _, worker = fleet.start()
    finder, where = worker._finder, place(due=due)
    finder._known[where] = KnownPage(ListedPage(where, "v", mark, due, None), fleet.clock.mono())
    finder._insert(where)
    if suspects:
        is_chosen = mark is PageMark.SUSPECT
    else:
        is_due = mark is PageMark.WAITING and due <= NOW
        is_chosen = is_due or mark in {PageMark.READY, PageMark.PARTLY}
    for _ in range(2):
        choice = finder.choose(wanted(suspects=suspects), 1, is_contended=False)
        assert choice.pages == ({where: "v"} if is_chosen else {})


@pytest.mark.parametrize(
    ("others", "is_chosen"),
    [
        ([PageMessage(id="b", task="b")], True),
        ([PageMessage(id="b", task="b"), PageMessage(id="a", task="a", is_suspect=True)], True),
        ([PageMessage(id="b", task="b", state="waiting", due=NOW + 9)], False),
        ([PageMessage(id="b", task="b", state="completed")], False),
    ],
)
async def test_a_page_in_hand_is_left_for_other_tasks_of_this_process(
    fleet: Fleet, others: list[PageMessage], *, is_chosen: bool
) -> None:
    """Who looks first, and finds nothing for its own, does not hide it."""
    _, worker = fleet.start()
    where = place()
    page = QueuePage(
        birth="b" * 12, messages=(PageMessage(id="done", task="a", state="completed"), *others)
    )
    assert await worker._pages.create(where, page)
    worker._finder.add(where)
    for _ in range(2):
        assert worker._finder.choose(wanted(tasks="a"), 1, is_contended=False).pages == {}
    assert bool(worker._finder.choose(wanted(tasks="b"), 1, is_contended=False).pages) is is_chosen
