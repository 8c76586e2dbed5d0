"""A claim lapses when an observer saw the same renewal of it for as long as it holds."""

from jobsync.core.clock import Mono
from jobsync.queue.backend import NewMessage
from jobsync.queue.pages import changes
from jobsync.queue.pages.page import QueuePage
from jobsync.queue.pages.watch import find_lapse, find_left, has_lapsed, look, look_inside

GAP = 15.0


def claimed(*claims: str) -> QueuePage:
    """Return a page with a message for each claim."""
    page = changes.new_page(
        "birth", [NewMessage(id=name, value=1, max_attempts=4) for name in claims], 0.0
    )
    for name in claims:
        claimant = changes.Claimant(id=name, session="w", visibility=30.0, limit=1)
        page, _ = changes.claim(page, claimant, 0.0)
    return page


def renew(page: QueuePage, claim: str) -> QueuePage:
    """Renew the claim of the message of the same name."""
    return changes.extend(page, [(claim, claim)], 30.0, lambda _: 0.0)[0]


def test_a_claim_lapses_after_its_hold_counted_from_the_first_look() -> None:
    """Also if the page is read later: the same version has the same claims."""
    page = claimed("a")
    seen = look(None, "v1", Mono(100), GAP)
    seen = look(seen, "v1", Mono(110), GAP)
    seen = look_inside(seen, page)
    assert find_left(seen, page.messages[0], Mono(110)) == 20
    for time in (120, 125):
        seen = look(seen, "v1", Mono(time), GAP)
    assert find_lapse(seen, page, Mono(125)) == 5
    assert not has_lapsed(seen, page.messages[0], Mono(129.9))
    assert has_lapsed(seen, page.messages[0], Mono(130))


def test_each_claim_of_a_page_is_watched_by_itself() -> None:
    """One is renewed and changes the version; the other is seen to stand still all the same."""
    page = claimed("a", "b")
    seen = None
    for count in range(4):
        page = renew(page, "b")
        seen = look_inside(look(seen, f"v{count}", Mono(count * 10.0), GAP), page)
    a, b = page.messages
    assert has_lapsed(seen, a, Mono(30))
    assert find_left(seen, b, Mono(30)) == 30
    assert find_lapse(seen, page, Mono(30)) == 0


def test_an_observer_that_could_not_look_counts_again() -> None:
    """Its holder had no chance to renew either."""
    page = claimed("a")
    seen = look_inside(look(None, "v1", Mono(0), GAP), page)
    seen = look(seen, "v1", Mono(40), GAP)
    assert find_left(seen, page.messages[0], Mono(40)) == 30
    changed = renew(page, "a")
    seen = look_inside(look(seen, "v2", Mono(80), GAP), changed)
    assert find_left(seen, changed.messages[0], Mono(80)) == 30


def test_a_page_that_was_never_read_has_no_lapse() -> None:
    """Nothing is known of its claims."""
    page = claimed("a")
    assert find_left(None, page.messages[0], Mono(99)) == 30
    assert find_lapse(None, changes.new_page("x", [], 0.0), Mono(0)) is None


def test_an_observer_counts_on_for_the_claims_of_its_own_process() -> None:
    """Nobody else may be there to end those that it has lost, and it keeps those that it uses."""
    page = claimed("a")
    seen = look_inside(look(None, "v1", Mono(0), GAP), page)
    for version in ("v1", "v2"):
        later = look_inside(look(seen, version, Mono(40), GAP, {"w"}), page)
        assert has_lapsed(later, page.messages[0], Mono(40))


def test_messages_of_one_claim_are_watched_apart() -> None:
    """A message is renewed as often as another was long before: it is not taken for as old."""
    page = changes.new_page(
        "birth", [NewMessage(id=name, value=1, max_attempts=4) for name in "ab"], 0.0
    )
    claimant = changes.Claimant(id="c", session="w", visibility=30.0, limit=2)
    page, _ = changes.claim(page, claimant, 0.0)
    page, _ = changes.extend(page, [("a", "c")], 30.0, lambda _: 0.0)
    seen = look_inside(look(None, "v1", Mono(0), GAP), page)
    page, _ = changes.extend(page, [("b", "c")], 30.0, lambda _: 0.0)
    seen = look_inside(look(seen, "v2", Mono(10), GAP), page)
    a, b = page.messages
    assert (find_left(seen, a, Mono(10)), find_left(seen, b, Mono(10))) == (20, 30)
