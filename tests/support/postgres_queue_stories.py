"""The stories of a queue on a real PostgreSQL server, in the simulated world.

They are those of `queue_stories`, `place_stories` and `outcome_stories`, under the same names, with
the rows of `postgres_rows`. A few are left out, whose promises only SQLite makes; two are added,
for what only PostgreSQL does.
"""

import asyncio
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import fault_stories
import outcome_stories
import place_stories
import queue_stories
from postgres_rows import PostgresRows, opened_rows
from queue_fleet import BEAT, OPEN_STORE, Batch
from queue_stories import MINUTE, start_fleet

from jobsync import OutcomeUnknown
from jobsync.testing import RowStore, World
from jobsync.testing.invariants import fail
from jobsync.testing.stories import Story

__all__ = ["OUTCOME_STORMS", "PLACE_STORMS", "STORIES", "STORMS"]

_FOUND = 10.0
"""Seconds within which messages are handled that appear where busy workers do not look: they look
everywhere every five seconds."""
_FOUND_IDLE = 1.0
"""Likewise for idle workers, which look everywhere when they are woken."""


def on_postgres(story: Story) -> Story:
    """Return a story whose fleets have their rows on PostgreSQL."""

    async def run(world: World) -> None:
        with opened_rows() as open_store:
            OPEN_STORE.set(open_store)
            await story(world)

    functools.update_wrapper(run, story)
    # So that a replay finds it here.
    run.__module__ = __name__
    return run


@on_postgres
async def commits_late(world: World) -> None:
    """Messages appear below and before others when their transaction ends: claims find them."""
    fleet = start_fleet(world)
    assert isinstance(fleet.store, RowStore)
    rows = fleet.store.rows
    assert isinstance(rows, PostgresRows)

    def keep_busy() -> Iterator[Batch]:
        for _ in range(150):
            yield Batch([fleet.build_message("quick", 0.1)], world.dice.uniform(0, 4))

    fleet.add_producer("producer", keep_busy)
    await asyncio.sleep(10)
    queue = fleet.find_process("producer").queue
    assert queue is not None

    async def push_late(delay: float) -> list[Mapping[str, Any]]:
        """Push messages in a transaction that lasts for longer than claims look back."""
        messages = [fleet.build_message("quick", 0.1) for _ in range(3)]
        with rows.begin("producer") as transaction:
            await queue.enqueue_many(messages, delay=delay, connection=transaction.connection)
            await asyncio.sleep(world.dice.uniform(130, 160))
            if not fleet.backlog:
                # All idle workers look everywhere now, and again soon after.
                await queue.enqueue(fleet.build_message("quick", 0.1))
                await asyncio.sleep(world.dice.uniform(1, 3))
            transaction.commit()
        return messages

    found_busy = [*await push_late(0.0), *await push_late(1.0)]
    await asyncio.sleep(2 * MINUTE)
    await fleet.wait_until_drained(MINUTE)
    found_idle = await push_late(1.0)
    await asyncio.sleep(BEAT)
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()
    fleet.expect_soon(found_busy, _FOUND)
    fleet.expect_soon(found_idle, _FOUND_IDLE)


@on_postgres
async def in_doubt(world: World) -> None:
    """Replies to pushes and claims get lost: their callers look for the messages, and find them."""
    fleet = start_fleet(world, 1)
    fleet.add_producer("producer", lambda: iter(()))
    await asyncio.sleep(BEAT)
    queue = fleet.find_process("producer").queue
    assert queue is not None
    link, _ = world.nodes["a"].links
    producer, _ = world.nodes["producer"].links
    messages = [fleet.build_message("quick", 0.1) for _ in range(10)]
    for message in messages:
        link.ordain("claim", world.dice.choice(("lost", "unanswered", "undecided")))
        producer.ordain("push", world.dice.choice(("lost", "unanswered")))
        try:
            await queue.enqueue(message)
        except OutcomeUnknown:
            fail("Q15", "a push arrived, and was not acknowledged")
        await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()
    fleet.expect_soon(messages, _FOUND)


def __getattr__(name: str) -> Story:
    """Return a story by its name, so that it can be replayed."""
    for story in (*STORIES, *STORMS, *PLACE_STORMS, *OUTCOME_STORMS):
        if story.__name__ == name:
            return story
    raise AttributeError(name)


_ONLY_SQLITE = (
    # On PostgreSQL the server's wall clock counts delays, which a wrong one makes longer.
    queue_stories.rebooted,
    # No claim lapses there because of a reboot.
    queue_stories.power_fails,
)
_SHARED = [story for story in queue_stories.STORIES if story not in _ONLY_SQLITE]

_OTHERS = (*place_stories.STORIES, *outcome_stories.STORIES, fault_stories.messages)

STORIES = (*map(on_postgres, (*_SHARED, *_OTHERS)), commits_late, in_doubt)
STORMS = tuple(map(on_postgres, (queue_stories.stormy, queue_stories.stormy_with_suspends)))
PLACE_STORMS = tuple(map(on_postgres, place_stories.STORMS))
OUTCOME_STORMS = tuple(map(on_postgres, outcome_stories.STORMS))
