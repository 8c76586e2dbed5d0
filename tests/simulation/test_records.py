"""Records in the simulated world: each is found where it belongs, and expires once and in time.

The stories are in `record_stories`. `jobsync.testing` checks every commit, verb and lookup (X1 to
X6), and what must hold when all has calmed down (XL1 to XL3).
"""

import logging

import pytest
from histories import compared_with_recorded
from record_stories import (
    STORIES,
    builds_during_an_outage,
    builds_in_short_lives,
    kills,
    lost_replies,
    races,
    renews,
    skewed,
    stormy,
    stormy_with_suspends,
)

from jobsync.testing import check_repeats, check_story, run_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_warnings")

SEEDS = range(1)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well, and has its recorded history."""
    with compared_with_recorded(f"records.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


BUCKET_SEED = 1
"""Stories take a bucket if their seed is odd."""


@pytest.mark.parametrize(
    "story",
    [
        builds_during_an_outage,
        builds_in_short_lives,
        kills,
        lost_replies,
        races,
        renews,
        skewed,
    ],
    ids=lambda story: story.__name__,
)
def test_stories_on_buckets(story: Story) -> None:
    """Each story ends well, too, where every record is written on its own."""
    check_story(story, [BUCKET_SEED])


@pytest.mark.parametrize("seed", [0, 4])
def test_storms(seed: int) -> None:
    """Nothing is lost, doubled or unfindable; afterwards nothing is left that has expired."""
    check_story(stormy, [seed])


def test_a_storm_in_which_clocks_stop() -> None:
    """A leader that stood still does not remove what was renewed meanwhile."""
    check_story(stormy_with_suspends, [0])


def test_a_story_repeats() -> None:
    """The same seed gives the same history, in processes that hash differently."""
    check_repeats(kills, seed=1)


def test_a_world_ends_without_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Closing databases at any await makes nothing fail."""
    with caplog.at_level(logging.ERROR):
        run_story(kills, 0)
    assert caplog.messages == []
