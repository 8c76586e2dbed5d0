"""A queue in the simulated world: nothing is lost, claimed twice, or settled by a stale receipt.

The stories are in `queue_stories`. `jobsync.testing` and `queue_fleet` check what must hold at
every commit (Q1, Q2, Q4 to Q8); each story states its bounds (QL1 to QL3).
"""

import logging

import pytest
from histories import compared_with_recorded
from queue_stories import STORIES, begins, slow, stormy, stormy_with_suspends

from jobsync.testing import check_repeats, check_story, run_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_warnings")

SEEDS = (0, -1)
"""The second one is a world in which all machines differ."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well with every seed, and has its recorded histories."""
    with compared_with_recorded(f"queue.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


STORMS = (
    # A handler continued after its claim had lapsed, while a renewal was unanswered.
    2,
    # A push with an unknown outcome was reported as refused, because its check failed.
    100,
    400,
    401,
)


@pytest.mark.parametrize("seed", STORMS)
def test_storms(seed: int) -> None:
    """No invalid request is accepted, and after the storm every message is handled."""
    check_story(stormy, [seed])


@pytest.mark.parametrize("seed", range(2))
def test_storms_in_which_clocks_stop(seed: int) -> None:
    """Two workers may trust their claims of a message; the database accepts one."""
    check_story(stormy_with_suspends, [seed])


def test_a_story_repeats() -> None:
    """The same seed gives the same history, in processes that hash differently."""
    check_repeats(slow, seed=1)


def test_a_world_ends_without_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Closing workers at any await makes no handler fail."""
    with caplog.at_level(logging.ERROR):
        run_story(begins, 0)
    assert caplog.messages == []
