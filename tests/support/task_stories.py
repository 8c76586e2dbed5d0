"""Stories of workers that do not all know the same tasks.

`jobsync.testing` checks every claim: a worker takes only messages of tasks that it knows (Q31).
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from queue_fleet import Batch, QueueFleet
from queue_stories import MINUTE
from waiting import until

from jobsync.testing import Weather, World, mend
from jobsync.testing.stories import Story

__all__ = ["STORIES", "deploys", "shares_tasks"]

OLD, NEW = "old", "new"
_MESSAGES = 30


def push(fleet: QueueFleet, tasks: Sequence[str]) -> Iterator[Batch]:
    """Yield messages of these tasks, and without one if it is empty, in turn."""
    dice = fleet.world.dice
    for number in range(_MESSAGES):
        task = tasks[number % len(tasks)]
        message = fleet.build_message("quick", dice.uniform(0, 3))
        options: dict[str, Any] = {"task": task} if task else {}
        yield Batch([message], dice.uniform(0, 3), max_attempts=9, **options)


async def shares_tasks(world: World) -> None:
    """Each worker knows some tasks, one knows none; replies get lost, and all is handled."""
    fleet = QueueFleet(world, visibility_timeout=10.0)
    fleet.tasks = {"a": [OLD], "b": [OLD, NEW], "c": [NEW]}
    for name in "abcd":
        fleet.add_worker(name)
    fleet.add_producer("producer", lambda: push(fleet, [OLD, NEW, "", NEW]))
    await asyncio.sleep(5)
    for name in "abcd":
        for link in world.nodes[name].links:
            link.weather = Weather(lost=0.1, unanswered=0.1)
    await asyncio.sleep(2 * MINUTE)
    mend(world)
    await until(lambda: len(fleet.acknowledged) == _MESSAGES, "all is pushed", 10 * MINUTE)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


async def deploys(world: World) -> None:
    """New workers replace old ones: what the old ones do not know waits, and costs no attempt."""
    fleet = QueueFleet(world)
    fleet.tasks = {"a": [OLD], "b": [OLD], "c": [OLD, NEW], "d": [OLD, NEW]}
    for name in "ab":
        fleet.add_worker(name)
    fleet.add_producer("producer", lambda: push(fleet, [OLD, NEW]))
    await asyncio.sleep(30)
    for old, new in ("ac", "bd"):
        await world.nodes[old].stop()
        fleet.add_worker(new)
        await asyncio.sleep(world.dice.uniform(5, 20))
    await until(lambda: len(fleet.acknowledged) == _MESSAGES, "all is pushed", 10 * MINUTE)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()


STORIES: tuple[Story, ...] = (shares_tasks, deploys)
