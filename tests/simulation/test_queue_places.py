"""Groups, keys and orders in the simulated world: no group is overtaken, no key is held twice.

The stories are in `place_stories`. `jobsync.testing` checks every commit (Q9, Q26, Q27). A storm
is in `seeds.json`.
"""

import pytest
from histories import compared_with_recorded
from place_stories import STORIES, stormy_places_with_suspends

from jobsync.testing import check_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_warnings")

SEEDS = (0, -1)
"""The second one is a world in which all machines differ."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well with every seed, and has its recorded histories."""
    with compared_with_recorded(f"places.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


def test_a_storm_in_which_clocks_stop() -> None:
    """No invariant is broken, and after the storm every message is handled."""
    check_story(stormy_places_with_suspends, [2])
