"""A queue in the simulated world, with its messages in pages on a store that bills requests.

The stories and the checks are those of `test_queue`, and stories of what only pages have. Mutants
of the source must be caught, each by the invariant that it breaks. `make prove-queue` runs storms.
"""

from collections.abc import Callable, Collection
from typing import Any

import pages_queue_stories
import pytest
from histories import compared_with_recorded
from mutants import is_caught
from pages_queue_stories import OWN_STORIES, STORIES, STORMS

from jobsync.core.clock import Mono
from jobsync.core.messages import decide_lapse
from jobsync.errors import OutcomeUnknown
from jobsync.queue.pages import changes, control, page_store, retention, watch
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.bell import Bell
from jobsync.queue.pages.changes import Claimant
from jobsync.queue.pages.claimer import PageClaimer
from jobsync.queue.pages.control import QueueControl
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.known_pages import KnownPages
from jobsync.queue.pages.listing_plan import ListingPlan
from jobsync.queue.pages.moves import PageMoves
from jobsync.queue.pages.page import PageMark, PageMessage, QueuePage
from jobsync.queue.pages.page_reader import PageReader
from jobsync.queue.pages.page_store import PageStore
from jobsync.stores.contract import Applied, Unknown
from jobsync.testing import check_repeats, check_story, find_story
from jobsync.testing.stories import Story, name_of

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]

OWN = {story.__name__ for story in OWN_STORIES} - {"retained"}
"""The stories that run at any scale. The others also run on databases, or take long."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story, full_scale: bool) -> None:
    """Each story ends well, and has its recorded histories."""
    if story.__name__ not in OWN and not full_scale:
        pytest.skip("at full scale; runs on databases, too")
    seeds = (0, -1, 1, 2, -3) if full_scale else (0,)
    with compared_with_recorded(f"pages.{story.__name__}", seeds):
        check_story(story, seeds)


def test_storms(full_scale: bool) -> None:
    """No invalid request is accepted, and after the storm every message is handled."""
    check_story(get_story("short_storm"), range(-3, 4) if full_scale else [-1])


FOUND = {
    # A renewal and a settlement were reported as stale, because their pages arrived damaged.
    ("stormy", 1006),
    ("stormy", 1014),
    # A settlement that had begun a move was reported as refused, because the rest was denied.
    ("stormy_with_suspends", -2003),
    # A worker whose clock was set back claimed the same page in vain, again and again.
    ("stormy", 1794909006),
    # Pages that arrived damaged once were never read again.
    ("stormy", 5004),
    ("stormy", 1794911086),
    # A wait for the bell never ended on a machine whose clock stood still.
    ("stormy_with_suspends", -1794910343),
}


@pytest.mark.parametrize(("name", "seed"), sorted(FOUND))
def test_storms_that_found_something(name: str, seed: int, full_scale: bool) -> None:
    """What they found is repaired."""
    if not full_scale:
        pytest.skip("at full scale; stories tell the same at any")
    check_story(get_story(name), [seed])


def test_a_story_repeats(full_scale: bool) -> None:
    """The same seed gives the same history, in processes that hash differently."""
    if not full_scale:
        pytest.skip("at full scale; recorded histories tell the same at any")
    check_repeats(get_story("drains"), seed=1)


@pytest.mark.parametrize("story", [*STORIES, *STORMS], ids=lambda story: story.__name__)
def test_a_replay_finds_a_story(story: Story) -> None:
    """The name in the line that replays a story is that of the story on pages."""
    assert find_story(name_of(story)) is story


def get_story(name: str) -> Story:
    """Return a story by its name."""
    story: Story = getattr(pages_queue_stories, name)
    return story


def watches_pages_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    """The renewals of one worker keep the claims of another in its page alive."""

    def look_inside(seen: watch.Sighting, page: QueuePage) -> watch.Sighting:
        return was(changes.replace(seen, renewals=None), page)

    was = watch.look_inside
    patch.setattr("jobsync.queue.pages.page_reader.look_inside", look_inside)


def drops_what_moves(patch: pytest.MonkeyPatch) -> None:
    """A page whose messages are all finished or on the move counts as done."""

    def find_mark(self: QueuePage, now: float) -> PageMark:
        mark = was(self, now)
        return PageMark.DONE if mark is PageMark.MOVING else mark

    was = QueuePage.find_mark
    patch.setattr(QueuePage, "find_mark", find_mark)


def finishes_moves_whenever_it_wakes(patch: pytest.MonkeyPatch) -> None:
    """A process that slept for hours continues the move that it had begun."""
    patch.setattr(page_store, "_TIME_TO_FINISH", 1e9)


def counts_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    """The time to finish a move counts from the reply, which may be read hours later."""

    def keep(self: PageReader, place: str, record: Any, page: QueuePage, sent: Mono) -> Any:
        del sent
        return was(self, place, record, page, self._clock.mono())

    was = PageReader._keep
    patch.setattr(PageReader, "_keep", keep)


def leaves_moves_to_others(patch: pytest.MonkeyPatch) -> None:
    """Only the process that has begun a move finishes it."""
    began: set[tuple[PageStore, str]] = set()

    async def apply(self: PageStore, place: str, change: Any) -> Any:
        opened = self.find_open(place)
        was_moving = opened is not None and bool(opened.page.targets)
        result = await was_applied(self, place, change)
        opened = self.find_open(place)
        if opened is not None and opened.page.targets and not was_moving:
            began.add((self, place))
        return result

    async def finish_moves(self: PageStore, place: str) -> list[str]:
        return await was_finished(self, place) if (self, place) in began else []

    was_applied, was_finished = PageStore.apply, PageStore.finish_moves
    patch.setattr(PageStore, "apply", apply)
    patch.setattr(PageStore, "finish_moves", finish_moves)


def counts_on_after_an_outage(patch: pytest.MonkeyPatch) -> None:
    """Claims lapse while nobody could renew them."""

    def look(seen: Any, version: str, now: Mono, gap: float, own: Collection[str] = ()) -> Any:
        del gap
        return was(seen, version, now, 1e9, own)

    was = watch.look
    for module in ("page_reader", "page_store"):
        patch.setattr(f"jobsync.queue.pages.{module}.look", look)


def forgets_its_own_claims(patch: pytest.MonkeyPatch) -> None:
    """A worker that looks seldom counts its own claims again from the start each time."""

    def look(seen: Any, version: str, now: Mono, gap: float, own: Collection[str] = ()) -> Any:
        del own
        return was(seen, version, now, gap)

    was = watch.look
    for module in ("page_reader", "page_store"):
        patch.setattr(f"jobsync.queue.pages.{module}.look", look)


def forgets_the_birth(patch: pytest.MonkeyPatch) -> None:
    """A push whose reply was lost is in doubt, although its page is there."""

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        sent = self._clock.mono()
        put, page = self._build_put(place, page, None)
        (outcome,) = await self._store.write([put])
        if isinstance(outcome, Unknown):
            raise OutcomeUnknown(self.topic, outcome.reason)
        if isinstance(outcome, Applied):
            self._keep(place, outcome.record, page, sent)
        return isinstance(outcome, Applied)

    patch.setattr(PageStore, "create", create)


def refuses_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """A push whose check fails is reported as refused."""

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        try:
            return await was(self, place, page)
        except OutcomeUnknown as error:
            raise (error.__cause__ or error) from None

    was = PageStore.create
    patch.setattr(PageStore, "create", create)


def refuses_what_was_settled(patch: pytest.MonkeyPatch) -> None:
    """A settlement is refused because the rest of a move is."""

    async def finish(self: PageMoves, place: str) -> None:
        for target in await self._pages.finish_moves(place):
            self._finder.add(target)

    patch.setattr(PageMoves, "finish", finish)


def takes_damage_for_an_end(patch: pytest.MonkeyPatch) -> None:
    """A receipt is called stale because its page arrived damaged."""

    async def read_current(self: PageStore, place: str) -> Any:
        return (await self.read({place: None})).get(place)

    patch.setattr(PageStore, "_read_current", read_current)


def fails_without_a_bell(patch: pytest.MonkeyPatch) -> None:
    """A push is refused because its ring is, although it has arrived."""

    async def ring(self: Bell, queue: str) -> None:
        await self._store.get("bell/queues")
        await was(self, queue)

    was = Bell.ring
    patch.setattr(Bell, "ring", ring)


def pauses_at_once(patch: pytest.MonkeyPatch) -> None:
    """A pause returns while others rely on what they have read before."""
    patch.setattr(control, "_MARGIN", -control._RELY)


def never_reads_the_pause(patch: pytest.MonkeyPatch) -> None:
    """Claims rely on what they have read for a minute."""

    async def is_paused(self: QueueControl) -> bool:
        self._rely = 60.0
        return await was(self)

    was = QueueControl.is_paused
    patch.setattr(QueueControl, "is_paused", is_paused)


def settles_whoever_has_it(patch: pytest.MonkeyPatch) -> None:
    """A receipt settles a message although another worker has claimed it since."""
    patch.setattr(changes, "_has_claim", lambda each, _: each.state == "claimed" and not each.move)


def forgets_how_it_was_settled(patch: pytest.MonkeyPatch) -> None:
    """A settlement that is repeated after a lost reply is reported as stale."""
    patch.setattr(changes, "_MAX_MARKS", 0)


def claims_what_moves(patch: pytest.MonkeyPatch) -> None:
    """A message is claimed in the page that it is leaving."""

    def is_claimable(self: PageMessage, now: float) -> bool:
        return self.state in {"ready", "waiting"} and self.due <= now

    patch.setattr(PageMessage, "is_claimable", is_claimable)


def claims_before_the_time(patch: pytest.MonkeyPatch) -> None:
    """A delay is ignored."""

    def is_claimable(self: PageMessage, now: float) -> bool:
        del now
        return not self.move and self.state in {"ready", "waiting"}

    patch.setattr(PageMessage, "is_claimable", is_claimable)


def does_not_know_what_is_due(patch: pytest.MonkeyPatch) -> None:
    """A delayed page is found by the next listing, whenever that is."""

    def look_up(self: PageFinder, place: str, wanted: Claimant) -> str:
        is_waiting = self._known[place].listed.mark is PageMark.WAITING
        return "" if is_waiting and self._find_open(place) is None else was(self, place, wanted)

    was = PageFinder._look_up
    patch.setattr(PageFinder, "_look_up", look_up)
    patch.setattr(
        ListingPlan, "next_due", property(lambda _: None, lambda _, __: None), raising=False
    )


def returns_by_its_own_clock(patch: pytest.MonkeyPatch) -> None:
    """A message without a delay waits until the clocks of others show the time of its return."""

    def move_to(message: PageMessage, state: Any, now: float, delay: float) -> PageMessage:
        return was(message, state, now, delay or 1e-6)

    was = changes.move_to
    patch.setattr(changes, "move_to", move_to)


def charges_everybody_for_a_death(patch: pytest.MonkeyPatch) -> None:
    """When a worker dies, all its messages in flight spend an attempt."""
    patch.setattr(
        changes, "decide_lapse", lambda **facts: decide_lapse(**{**facts, "is_suspect": True})
    )


def ends_claims_that_stand(patch: pytest.MonkeyPatch) -> None:
    """A claim is ended half-way through the time for which it holds."""

    def has_lapsed(seen: Any, message: PageMessage, now: Mono) -> bool:
        return watch.find_left(seen, message, now) <= message.hold / 2

    patch.setattr(page_store, "has_lapsed", has_lapsed)


def ends_what_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    """A worker ends claims that it still uses."""

    async def end_claims(
        self: PagesBackend,
        place: str,
        dead: Collection[str],
        keep: Collection[str],
        **options: bool,
    ) -> Any:
        del keep
        return await was(self, place, dead, (), **options)

    was = PagesBackend._end_claims
    patch.setattr(PagesBackend, "_end_claims", end_claims)


def drops_too_early(patch: pytest.MonkeyPatch) -> None:
    """A page is dropped when its messages are old enough, while its creation may still arrive."""
    patch.setattr(retention, "BURIAL_AGE", 0.0)


def forgets_before_it_copies(patch: pytest.MonkeyPatch) -> None:
    """A message leaves its page before the target exists."""

    async def finish_moves(self: PageStore, place: str) -> list[str]:
        opened = self.find_open(place)
        for target in () if opened is None else opened.page.targets:
            await self.apply(place, page_store._finishing(target))
        return []

    patch.setattr(PageStore, "finish_moves", finish_moves)


def copies_twice(patch: pytest.MonkeyPatch) -> None:
    """Each process that finishes a move creates a target of its own."""

    async def create(self: PageStore, place: str, page: QueuePage) -> bool:
        if any(each.deliveries for each in page.messages):
            place = self.name_new(place.partition("/")[0], self._clock.wall().seconds)
        return await was(self, place, page)

    was = PageStore.create
    patch.setattr(PageStore, "create", create)


def settles_what_is_finished(patch: pytest.MonkeyPatch) -> None:
    """A stale receipt returns a message that others have completed since."""
    patch.setattr(changes, "_has_claim", lambda each, _: not each.move and each.state != "moved")


def claims_more_than_it_may(patch: pytest.MonkeyPatch) -> None:
    """A claim takes whole pages, although its caller has a limit."""

    async def claim(self: PageClaimer, wanted: Claimant, at_most: int | None) -> Any:
        del at_most
        return await was(self, wanted, 1000)

    was = PageClaimer.claim
    patch.setattr(PageClaimer, "claim", claim)


def takes_the_oldest_first(patch: pytest.MonkeyPatch) -> None:
    """Pages are taken in the order of their names, whatever the order of the queue."""
    patch.setattr(KnownPages, "_iterate", lambda self: self._order)


KILLED: dict[Patch, tuple[str, str]] = {
    watches_pages_as_a_whole: ("watched_apart", "QL2"),
    drops_what_moves: ("dropped_while_moving", "P4"),
    finishes_moves_whenever_it_wakes: ("sleeps_while_moving", "P1"),
    counts_from_the_reply: ("sleeps_while_moving", "P1"),
    leaves_moves_to_others: ("killed_while_moving", "PL1"),
    counts_on_after_an_outage: ("outage", "Q16"),
    forgets_its_own_claims: ("heard_late", "QL3"),
    forgets_the_birth: ("in_doubt", "Q15"),
    refuses_in_doubt: ("in_doubt", "Q15"),
    refuses_what_was_settled: ("denied_while_moving", "Q15"),
    takes_damage_for_an_end: ("arrives_damaged", "Q15"),
    fails_without_a_bell: ("batches", "Q15"),
    pauses_at_once: ("paused", "Q25"),
    never_reads_the_pause: ("paused", "Q25"),
    settles_whoever_has_it: ("settled_late", "Q5"),
    forgets_how_it_was_settled: ("lost_replies", "Q15"),
    claims_what_moves: ("dropped_while_moving", "Q15"),
    claims_before_the_time: ("drains", "Q8"),
    does_not_know_what_is_due: ("delays", "QL5"),
    returns_by_its_own_clock: ("clocks_jump", "QL3"),
    charges_everybody_for_a_death: ("kill", "Q6"),
    ends_claims_that_stand: ("blocks", "Q13"),
    ends_what_is_to_be_kept: ("settled_again", "Q13"),
    drops_too_early: ("killed_while_moving", "P5"),
    forgets_before_it_copies: ("poison", "Q10"),
    copies_twice: ("killed_while_moving", "P2"),
    settles_what_is_finished: ("settled_again", "Q10"),
    claims_more_than_it_may: ("drains", "Q10"),
    takes_the_oldest_first: ("newest_first", "Q26"),
}
"""For each mutant of the backend a story that catches it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(
    mutant: Patch, monkeypatch: pytest.MonkeyPatch, full_scale: bool
) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    name, invariant = KILLED[mutant]
    if name not in OWN and not full_scale:
        pytest.skip("at full scale; its story runs on databases, too")
    mutant(monkeypatch)
    story = get_story(name)
    assert is_caught(story, invariant)
