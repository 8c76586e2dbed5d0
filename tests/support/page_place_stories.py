"""Stories of a queue on an object store whose messages have priorities and keys.

Those of `place_stories` that need no groups, under the same names, and others for what only pages
have: a key has a record of its own, pages are dropped, and an urgent page sorts before the others.
`jobsync.testing` checks the pages (P1 to P5) and that a key has one holder (Q27).
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pages_queue_stories
import place_stories
from place_stories import get_queue
from queue_fleet import BEAT, OPEN_STORE, Batch, QueueFleet
from queue_stories import CHECK_INTERVAL, HOUR, MINUTE, run_stormy_hours, start_fleet
from waiting import until

from jobsync.stores.contract import Record
from jobsync.testing import Node, Occurrence, PagedStore, Violation, World, require, strikes
from jobsync.testing.stories import Story
from jobsync.testing.strikes import Strike

__all__ = [
    "STORIES",
    "STORMS",
    "follows_moves",
    "keys",
    "keys_for_a_time",
    "outlives_pages",
    "replaced",
    "rescued_late",
    "sleeps_with_a_key",
    "stalls_with_a_key",
    "stormy_places",
    "stormy_places_with_suspends",
    "urgent_first",
]

_SLOW = {"heartbeat_interval": 60.0, "worker_timeout": 180.0}
"""For stories of hours: most of what happens in them are heartbeats."""
_KEYS = "key/default.Fletters/"


def on_pages(story: Story) -> Story:
    """Return a story whose fleets have their messages in pages."""
    prepared = pages_queue_stories.on_pages(story)

    async def run(world: World) -> None:
        await prepared(world)

    functools.update_wrapper(run, story)
    # So that a replay finds it here.
    run.__module__ = __name__
    return run


keys = on_pages(place_stories.keys)
replaced = on_pages(place_stories.replaced)


@on_pages
async def keys_for_a_time(world: World) -> None:
    """A key is held for its time, whatever becomes of its message, and free after it."""
    # The times in this story are counted by different machines.
    world.largest_skew = 0.0
    await place_stories.keys_for_a_time(world)


def _strike_first_key(world: World, strike: Callable[[Node], object]) -> list[Node]:
    """Strike the first process that takes a key, before it hears of it; return it once struck."""
    struck: list[Node] = []

    def watch(done: Occurrence) -> Iterator[Violation]:
        if not struck and done.what == "commit" and done.details["key"].startswith("key/"):
            struck.append(world.nodes[done.node])
            strike(struck[0])
        return iter(())

    world.watch(watch)
    return struck


async def _add_producers(fleet: QueueFleet, *names: str) -> list[Any]:
    for name in names:
        fleet.add_producer(name, lambda: iter(()))
    await asyncio.sleep(BEAT)
    return [get_queue(fleet, name) for name in names]


@on_pages
async def stalls_with_a_key(world: World) -> None:
    """A process stalls when it has taken a key: another one adds a message, which is the only one.

    So it is with keys that were held before, and with new ones.
    """
    fleet = start_fleet(world, 2)
    one, two = await _add_producers(fleet, "one", "two")
    if world.dice.random() < 0.5:
        await two.enqueue(fleet.build_message("quick", 0.1), key="a")
        await fleet.wait_until_drained(MINUTE)
    struck = _strike_first_key(world, Node.pause)
    pushing = world.nodes["one"].run(one.enqueue(fleet.build_message("quick", 0.1), key="a"))
    await until(lambda: bool(struck), "it takes the key", MINUTE, interval=CHECK_INTERVAL)
    await asyncio.sleep(world.dice.uniform(0, 3))
    # With a delay, its message does not fit in the page that the first one has chosen.
    delay = world.dice.choice((0.0, 90.0))
    await two.pause_everywhere()
    second = await two.enqueue(fleet.build_message("quick", 0.1), key="a", delay=delay)
    await asyncio.sleep(world.dice.uniform(0, 30))
    struck[0].resume()
    first = await pushing
    require(first == second, "Q27", f"{first} was added while {second} held its key")
    await two.resume_everywhere()
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def sleeps_with_a_key(world: World) -> None:
    """A process sleeps for hours when it has taken a key: it does not bring a dropped page back."""
    fleet = start_fleet(world, 1, **_SLOW)
    one, two = await _add_producers(fleet, "one", "two")
    struck = _strike_first_key(world, Node.pause)
    pushing = world.nodes["one"].run(one.enqueue(fleet.build_message("quick", 0.1), key="a"))
    await until(lambda: bool(struck), "it takes the key", MINUTE, interval=CHECK_INTERVAL)
    await two.enqueue(fleet.build_message("quick", 0.1), key="a")
    await asyncio.sleep(2.5 * HOUR)
    second = await two.enqueue(fleet.build_message("quick", 0.1), key="a", delay=60.0)
    struck[0].resume()
    first = await pushing
    require(first == second, "Q27", f"{first} was added while {second} held its key")
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


class _MissedPages(PagedStore):
    """A store in which a process can be struck when it reads a page that is not there."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.on_missed: Callable[[], None] | None = None

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records."""
        records = await super().get_many(keys, tombstones=tombstones)
        if self.on_missed is not None and records == [None] and keys[0].startswith("page/"):
            self.on_missed()
        return records


@on_pages
async def rescued_late(world: World) -> None:
    """A process sleeps for hours when it misses the page of a key: it does not bring it back."""
    OPEN_STORE.set(_MissedPages)
    fleet = start_fleet(world, 1, **_SLOW)
    store = fleet.store
    assert isinstance(store, _MissedPages)
    one, two = await _add_producers(fleet, "one", "two")
    struck = _strike_first_key(world, Node.pause)
    pushing = world.nodes["one"].run(one.enqueue(fleet.build_message("quick", 0.1), key="a"))
    await until(lambda: bool(struck), "it takes the key", MINUTE, interval=CHECK_INTERVAL)

    def strike() -> None:
        """Pause the process that looks for the page before it knows."""
        store.on_missed = None
        world.nodes["two"].pause()
        struck[0].resume()

    store.on_missed = strike
    rescuing = world.nodes["two"].run(two.enqueue(fleet.build_message("quick", 0.1), key="a"))
    await pushing
    await fleet.wait_until_drained(5 * MINUTE)
    await asyncio.sleep(2.5 * HOUR)
    world.nodes["two"].resume()
    await rescuing
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def outlives_pages(world: World) -> None:
    """A key is held for hours after its page was dropped; a key that nobody holds is removed."""
    fleet = start_fleet(world, 1, **_SLOW)
    one, two = await _add_producers(fleet, "one", "two")
    first = await one.enqueue(fleet.build_message("quick", 0.1), key="a", key_ttl=4 * HOUR)
    await one.enqueue(fleet.build_message("quick", 0.1), key="b")
    await fleet.wait_until_drained(2 * MINUTE)
    await asyncio.sleep(2.5 * HOUR)
    require(fleet.count_states() == {"gone": 2}, "Q24", f"there are {fleet.count_states()}")
    left = await fleet.store.heads(_KEYS)
    require(len(left) <= 1, "Q24", f"{len(left)} keys are left")
    again = await two.enqueue(fleet.build_message("quick", 0.1), key="a")
    require(again == first, "Q27", f"{again} was added while {first} held its key")
    await asyncio.sleep(2 * HOUR)
    later = await two.enqueue(fleet.build_message("quick", 0.1), key="a")
    require(later != first, "Q27", f"{first} holds its key for too long")
    await fleet.wait_until_drained(2 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def follows_moves(world: World) -> None:
    """A message that moves holds its key, also after its first page was dropped."""
    fleet = start_fleet(world, 1, **_SLOW)
    one, two = await _add_producers(fleet, "one", "two")
    first = await one.enqueue(fleet.build_message("quick", 0.1), key="a", delay=3 * HOUR)
    # Earlier than the name of its page says: it moves.
    await one.enqueue(fleet.build_message("quick", 0.1), key="a", delay=2 * HOUR, replace=True)
    for _ in range(4):
        await asyncio.sleep(0.45 * HOUR)
        again = await two.enqueue(fleet.build_message("quick", 0.1), key="a")
        require(again == first, "Q27", f"{again} was added while {first} held its key")
    await asyncio.sleep(0.5 * HOUR)
    require(not fleet.backlog, "QL3", f"{fleet.backlog} messages are left")
    later = await two.enqueue(fleet.build_message("quick", 0.1), key="a")
    require(later != first, "Q27", f"{first} holds its key for too long")
    await fleet.wait_until_drained(2 * MINUTE)
    fleet.expect_drained()


@on_pages
async def urgent_first(world: World) -> None:
    """Urgent messages are taken first, also those of other processes while others wait."""
    fleet = QueueFleet(world, order="priority", prefetch=0, concurrency=1)
    count = world.dice.choice((1, 4))
    for name in "abcd"[:count]:
        fleet.add_worker(name)

    def draw(priorities: Sequence[int], number: int, pause: float) -> Iterator[Batch]:
        for _ in range(number):
            message = fleet.build_message("long", world.dice.uniform(3, 6))
            yield Batch([message], pause, max_attempts=99, priority=world.dice.choice(priorities))

    fleet.add_producer("producer", lambda: draw((0,), 20 * count, 0.2))
    await asyncio.sleep(BEAT)
    fleet.add_producer("other producer", lambda: draw((-4, 0, 1, 5), 5 * count, 12.0 / count))
    await asyncio.sleep(2 * MINUTE)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    fleet.expect_urgent_first(20.0)


async def _run_storm(
    world: World, kinds: tuple[Strike, ...], *, trusts_clocks: bool, hours: float = 2.5
) -> None:
    order = ("fifo", "priority", "lifo", "fifo", "priority")[abs(world.seed) % 5]
    await run_stormy_hours(
        world,
        kinds,
        trusts_clocks=trusts_clocks,
        hours=hours,
        draw=place_stories.draw_places,
        order=order,
    )


@on_pages
async def stormy_places(world: World) -> None:
    """Hours of all strikes that leave clocks running: half of the pages are dropped meanwhile."""
    await _run_storm(world, pages_queue_stories.PAGE_STRIKES, trusts_clocks=True)


@on_pages
async def stormy_places_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    kinds = (*pages_queue_stories.PAGE_STRIKES, strikes.suspend)
    await _run_storm(world, kinds, trusts_clocks=False)


@on_pages
async def short_storm(world: World) -> None:
    """A storm of a few minutes, in which no page becomes old."""
    await _run_storm(world, pages_queue_stories.PAGE_STRIKES, trusts_clocks=True, hours=0.5)


STORIES: tuple[Story, ...] = (
    keys,
    keys_for_a_time,
    replaced,
    stalls_with_a_key,
    sleeps_with_a_key,
    rescued_late,
    outlives_pages,
    follows_moves,
    urgent_first,
)
STORMS = (stormy_places, stormy_places_with_suspends)
