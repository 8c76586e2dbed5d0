"""Schedulers in the simulated world: each instant is fired once, or in the history with a reason.

The stories are in `schedule_stories`. `jobsync.testing` checks every commit (K1 to K8), and what
must hold when all has calmed down (K2, KL1, KL2).
"""

import logging

import pytest
from histories import compared_with_recorded
from schedule_stories import (
    STORIES,
    begins,
    cut,
    kill,
    lost_replies,
    skewed_buckets,
    skewed_databases,
    stormy,
    stormy_with_suspends,
    suspend,
    wakes_late,
)

from jobsync.testing import check_repeats, check_story, run_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_warnings")

SEEDS = range(1)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well, and has its recorded history."""
    with compared_with_recorded(f"schedule.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


VARIED = (kill, cut, lost_replies, suspend, skewed_databases, skewed_buckets, wakes_late)


@pytest.mark.parametrize("story", VARIED, ids=lambda story: story.__name__)
def test_stories_on_machines_that_differ(story: Story) -> None:
    """Each ends well where every machine has its own wall time, boot and processes."""
    check_story(story, [-1])


STORMS = (
    # A successor left a gap unwritten, that an operator had made.
    0,
    # A note that arrived damaged ended processes.
    3,
    10,
)


@pytest.mark.parametrize("seed", STORMS)
def test_storms(seed: int) -> None:
    """Nothing is fired twice; afterwards everything is decided and executed."""
    check_story(stormy, [seed])


def test_a_storm_in_which_clocks_stop() -> None:
    """Two processes may believe that they lead; the store lets one of them fire."""
    check_story(stormy_with_suspends, [0])


def test_a_story_repeats() -> None:
    """The same seed gives the same history, in processes that hash differently."""
    check_repeats(kill, seed=1)


def test_a_world_ends_without_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Closing schedulers at any await makes no action fail."""
    with caplog.at_level(logging.ERROR):
        run_story(begins, 0)
    assert caplog.messages == []
