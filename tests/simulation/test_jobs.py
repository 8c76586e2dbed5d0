"""Nodes that share tasks, in the simulated world: each task has one owner, and is done once.

The stories are those of `shifts`; what must hold meanwhile is judged by `crews`.
"""

import logging

import pytest
from shifts import STORIES, Story, begins, stormy, stormy_with_suspends

from jobsync.testing import check_repeats, check_story, run_story

SEEDS = range(3)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each ends well, whatever the dice say."""
    check_story(story, SEEDS)


STORMS = (
    # Both ended nodes for good, by a burst of refusals and by one damaged answer.
    18,
    31,
    # A claim of an earlier session was acted on in the next one.
    304,
    *range(305, 313),
)


@pytest.mark.parametrize("seed", STORMS)
def test_storms(seed: int) -> None:
    """Nothing is accepted that must not be, and afterwards everything is owned and done."""
    check_story(stormy, [seed])


@pytest.mark.parametrize("seed", range(6))
def test_storms_in_which_clocks_stop(seed: int) -> None:
    """Two may believe; the store accepts one."""
    check_story(stormy_with_suspends, [seed])


def test_a_storm_repeats() -> None:
    """The same seed gives the same history, in processes that hash differently."""
    check_repeats(stormy, seed=307)


def test_a_world_ends_without_a_complaint(caplog: pytest.LogCaptureFixture) -> None:
    """Leaders that are closed at whatever await they stand fail no handler."""
    with caplog.at_level(logging.ERROR):
        run_story(begins, 0)
    assert caplog.messages == []
