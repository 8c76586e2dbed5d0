"""Keys and priorities in pages, in the simulated world: one holder, and the most urgent first.

The stories are in `page_place_stories`. Mutants of the source must be caught, each by the invariant
that it breaks. `make prove-queue` runs storms.
"""

from collections.abc import Callable
from typing import Any

import page_place_stories as stories
import pytest
from mutants import is_caught

from jobsync.queue.pages import changes, key_changes, keys
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.keys import FoundKey, PageKeys
from jobsync.queue.pages.page import QueuePage
from jobsync.testing import check_story, find_story
from jobsync.testing.stories import Story, name_of

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("story", stories.STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story, full_scale: bool) -> None:
    """Each story ends well."""
    check_story(story, (0, -1, 1, 2, -3) if full_scale else (0, -1))


def test_storms(full_scale: bool) -> None:
    """No invariant is broken, and after the storm every message is handled."""
    check_story(stories.short_storm, range(-3, 4) if full_scale else [1])


@pytest.mark.parametrize("story", [*stories.STORIES, *stories.STORMS], ids=lambda s: s.__name__)
def test_a_replay_finds_a_story(story: Story) -> None:
    """The name in the line that replays a story is that of the story on pages."""
    assert find_story(name_of(story)) is story


def takes_keys_without_barring(patch: pytest.MonkeyPatch) -> None:
    """A key is taken from a push that may still go on."""

    async def bar(self: PageKeys, found: FoundKey) -> bool:
        del self, found
        return True

    patch.setattr(PageKeys, "bar", bar)


def creates_pages_whenever_it_wakes(patch: pytest.MonkeyPatch) -> None:
    """A process that slept for hours creates the page of a key that it has taken or read."""
    patch.setattr(keys, "TIME_TO_CREATE", 1e9)


def does_not_look_again(patch: pytest.MonkeyPatch) -> None:
    """The page of a record is created although the record may have changed since."""

    async def is_current(self: PageKeys, found: FoundKey) -> bool:
        del self, found
        return True

    patch.setattr(PageKeys, "is_current", is_current)
    patch.setattr(keys, "TIME_TO_CREATE", 1e9)


def drops_pages_that_keys_name(patch: pytest.MonkeyPatch) -> None:
    """A page is dropped although the record of a key names it."""

    async def prepare_drop(self: PageKeys, place: str, page: QueuePage) -> bool:
        del self, place, page
        return True

    patch.setattr(PageKeys, "prepare_drop", prepare_drop)


def deletes_keys_with_their_pages(patch: pytest.MonkeyPatch) -> None:
    """A key is free when its page is dropped, although its time is not over."""

    async def write(self: PageKeys, record: Any, entry: Any) -> bool:
        return await was(self, record, None if entry is not None and entry.until else entry)

    was = PageKeys._write
    patch.setattr(PageKeys, "_write", write)


def loses_the_key_on_the_way(patch: pytest.MonkeyPatch) -> None:
    """A message that moves to another time gives up its key."""
    patch.setattr(QueuePage, "pass_key", lambda *_: None)


def forgets_where_it_went(patch: pytest.MonkeyPatch) -> None:
    """A page does not say where the message with its key is now."""
    patch.setattr(QueuePage, "leave_key", lambda self, _: self.key_hold)


def holds_keys_of_the_finished(patch: pytest.MonkeyPatch) -> None:
    """A key is held although its message is finished."""

    def is_held(page: QueuePage, now: float) -> bool:
        return was(page, now) or (page.key_hold is not None and page.key_hold.until is None)

    was = key_changes.is_held
    patch.setattr(key_changes, "is_held", is_held)


def holds_keys_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A key is held although its time is over."""
    was = key_changes.is_held
    patch.setattr(key_changes, "is_held", lambda page, _: was(page, 0.0))


def takes_keys_of_the_claimed(patch: pytest.MonkeyPatch) -> None:
    """A key is free as soon as its message is claimed."""
    patch.setattr(key_changes, "_PENDING", frozenset({"ready", "waiting"}))


def adds_instead_of_replacing(patch: pytest.MonkeyPatch) -> None:
    """A message that was to replace another one is added beside it."""

    def release(page: QueuePage, token: str, now: float, *, replaces: bool) -> Any:
        del token, now, replaces
        return page, True

    async def replace(self: Any, found: FoundKey, entry: Any, message: Any) -> str:
        del self, found, entry, message
        return ""

    patch.setattr(key_changes, "release", release)
    patch.setattr("jobsync.queue.pages.keyed_push.KeyedPush._replace", replace)


def charges_for_attempts_with_other_content(patch: pytest.MonkeyPatch) -> None:
    """A message that is replaced has only the attempts that are left."""

    def replace_content(page: QueuePage, *arguments: Any) -> Any:
        after, answer = was(page, *arguments)
        if not answer:
            return after, answer
        (message,) = after.messages
        returned = page.messages[0].returned
        charged = changes.replace(message, returned=returned)
        return changes.with_messages(after, {0: charged}), answer

    was = key_changes.replace_content
    patch.setattr(key_changes, "replace_content", replace_content)


def lists_from_one_frontier(patch: pytest.MonkeyPatch) -> None:
    """An urgent page is not seen, because it sorts before the frontier of the others."""
    patch.setattr(PageFinder, "_list_by_class", PageFinder._list_plain)


KILLED: dict[Patch, tuple[Story, str]] = {
    takes_keys_without_barring: (stories.stalls_with_a_key, "Q27"),
    creates_pages_whenever_it_wakes: (stories.sleeps_with_a_key, "P1"),
    does_not_look_again: (stories.rescued_late, "P1"),
    drops_pages_that_keys_name: (stories.outlives_pages, "P1"),
    deletes_keys_with_their_pages: (stories.outlives_pages, "Q27"),
    loses_the_key_on_the_way: (stories.follows_moves, "Q27"),
    forgets_where_it_went: (stories.follows_moves, "Q27"),
    holds_keys_of_the_finished: (stories.keys, "Q27"),
    holds_keys_for_ever: (stories.keys_for_a_time, "Q27"),
    takes_keys_of_the_claimed: (stories.keys_for_a_time, "Q27"),
    adds_instead_of_replacing: (stories.replaced, "Q27"),
    charges_for_attempts_with_other_content: (stories.replaced, "Q6"),
    lists_from_one_frontier: (stories.urgent_first, "Q26"),
}
"""For each mutant a story that catches it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant)
