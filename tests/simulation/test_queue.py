"""A queue in the simulated world: nothing lost, nothing claimed twice, nothing settled stale.

The stories are those of `postings`; what must hold meanwhile is judged by `jobsync.testing` (Q1,
Q2, Q4 to Q8) and by the postroom; each story states its bounds (QL1 to QL3).
"""

import logging
from collections.abc import Iterator

import pytest
from postings import STORIES, Story, begins, slow, stormy, stormy_with_suspends

from jobsync.testing import check_repeats, check_story, run_story

SEEDS = range(2)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing of what is expected in a storm: that takes longer than the storm."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each ends well, whatever the dice say."""
    check_story(story, SEEDS)


STORMS = (
    # A handler ran on after its claim had lapsed, while the answer to a renewal was awaited.
    2,
    # A push in doubt was called refused, because the sender was kept from looking after it.
    100,
    400,
    401,
)


@pytest.mark.parametrize("seed", STORMS)
def test_storms(seed: int) -> None:
    """Nothing is accepted that must not be, and afterwards everything is handled."""
    check_story(stormy, [seed])


@pytest.mark.parametrize("seed", range(2))
def test_storms_in_which_clocks_stop(seed: int) -> None:
    """Two may believe to have a message; the database accepts one."""
    check_story(stormy_with_suspends, [seed])


def test_a_story_repeats() -> None:
    """The same seed gives the same history, in processes that hash differently."""
    check_repeats(slow, seed=1)


def test_a_world_ends_without_a_complaint(caplog: pytest.LogCaptureFixture) -> None:
    """Workers that are closed at whatever await they stand fail no handler."""
    with caplog.at_level(logging.ERROR):
        run_story(begins, 0)
    assert caplog.messages == []
