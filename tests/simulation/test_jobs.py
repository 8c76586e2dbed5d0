"""Nodes that share tasks in the simulated world: each task has one owner and is done once.

The stories are in `job_stories`; the judge of `job_fleet` checks what must hold meanwhile.
"""

import asyncio
import logging

import pytest
from histories import compared_with_recorded
from job_fleet import TIMEOUT, TOKENS, JobFleet, SimulatedProcess
from job_stories import STORIES, begins, stormy, stormy_with_suspends
from waiting import until

from jobsync.testing import World, check_repeats, check_story, require, run_story
from jobsync.testing.stories import Story

SEEDS = (0, 1, -2)
"""The last one is a world in which all machines differ."""


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each ends well, whatever the seed, and has its recorded histories."""
    with compared_with_recorded(f"jobs.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


STORMS = (
    # Both ended nodes for good: a burst of refusals, and a damaged reply.
    18,
    31,
    # A claim of an earlier session was acted on in the next one.
    304,
    *range(305, 313),
)


@pytest.mark.parametrize("seed", STORMS)
def test_storms(seed: int) -> None:
    """The store accepts nothing wrong; afterwards all tokens are owned and all tasks done."""
    check_story(stormy, [seed])


@pytest.mark.parametrize("seed", range(6))
def test_storms_in_which_clocks_stop(seed: int) -> None:
    """Two nodes may believe that they own a task; the store accepts one."""
    check_story(stormy_with_suspends, [seed])


def test_a_storm_repeats() -> None:
    """The same seed gives the same history, in processes with different hash seeds."""
    check_repeats(stormy, seed=307)


def test_a_world_ends_without_errors(caplog: pytest.LogCaptureFixture) -> None:
    """A leader that is closed at any await logs no error."""
    with caplog.at_level(logging.ERROR):
        run_story(begins, 0)
    assert caplog.messages == []


async def a_node_fails(world: World) -> None:
    """An error ends a node's loop, while its process lives and does not look at it."""
    fleet = JobFleet(world)
    for name in ("a", "b"):
        fleet.add(name)
    await asyncio.sleep(60)
    failing = SimulatedProcess(fleet, world.node("failing"), "task_loop", {})
    await failing.machine.run(failing._join())
    node = failing.node
    assert node is not None
    assert node.tokens

    async def fail() -> None:
        raise RuntimeError("a bad record")

    node._apply_assignment = fail  # type: ignore[method-assign]
    await until(lambda: node.failure is not None, interval=0.1)
    await asyncio.sleep(2 * TIMEOUT)
    require(len(fleet.owners) == TOKENS, "TL1", f"only {len(fleet.owners)} tokens are owned")


def test_a_node_that_has_failed_leaves_its_tokens_to_others() -> None:
    """As if its process had died. Found: its session lived on, and nobody got its tokens."""
    check_story(a_node_fails, SEEDS)
