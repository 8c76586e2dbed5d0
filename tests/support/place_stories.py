"""Stories of a queue on a database whose messages have priorities, groups and keys.

`jobsync.testing` checks every commit: a group is never overtaken and never without a head (Q9), a
key has one holder (Q27), claims take messages in the order of the queue (Q26), and never more than
its limits allow (Q28). Each story uses its groups and keys again when they are free.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from queue_fleet import BEAT, Batch, Chore, QueueFleet
from queue_stories import (
    HOUR,
    MINUTE,
    run_stormy_hours,
    send,
    start_fleet,
)

from jobsync import OutcomeUnknown, Unavailable
from jobsync.core.messages import MessageState
from jobsync.testing import RecordingQueue, Weather, World, mend, require, strikes
from jobsync.testing.stories import Story
from jobsync.testing.strikes import STRIKES

__all__ = [
    "STORIES",
    "STORMS",
    "groups",
    "groups_at_once",
    "groups_in_bad_weather",
    "groups_of_poison",
    "keys",
    "keys_for_a_time",
    "limited",
    "newest_first",
    "priorities",
    "purged",
    "rated",
    "replaced",
    "stormy_places",
    "stormy_places_with_suspends",
]

_BAD = Weather(lost=0.2, refused=0.2, unanswered=0.2, undecided=0.1)
_GROUPS = 4
_BACKLOG = 10
_LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"max_concurrency": 3},
    {"group_concurrency": 2},
    {},
    {"rate_limit": "30/minute", "rate_burst": 5},
    {"max_concurrency": 5, "group_concurrency": 3, "rate_limit": "1/second"},
)
"""The limits of stormy queues, by seed."""


def get_queue(fleet: QueueFleet, name: str) -> RecordingQueue:
    """Return the queue of a process."""
    queue = fleet.find_process(name).queue
    assert queue is not None
    return queue


async def purge(queue: RecordingQueue, states: Sequence[MessageState]) -> int:
    """Remove the messages in these states, as a command can."""
    return await queue._get_backend().purge(states)


def draw_groups(fleet: QueueFleet, count: int, kinds: Sequence[str]) -> Iterator[Batch]:
    """Yield messages of a few groups, alone and together, at once and delayed."""
    dice = fleet.world.dice
    for number in range(count):
        messages = [
            fleet.build_message(dice.choice(kinds), dice.uniform(0, 2), 1)
            for _ in range(dice.choice((1, 1, 3)))
        ]
        yield Batch(
            messages,
            dice.uniform(0, 1),
            group=f"customer {number % _GROUPS}",
            delay=dice.choice((0.0, 0.0, 0.0, 4.0)),
            max_attempts=dice.choice((1, 4)),
        )


async def groups(world: World) -> None:
    """Heads fail, wait and lose their workers while others are pushed behind them."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    kinds = ("quick", "fail", "snooze", "nack", "cancel")
    for number in range(2):
        for name in ("producer", "other producer"):
            fleet.add_producer(name, lambda: draw_groups(fleet, 10, kinds))
        await asyncio.sleep(world.dice.uniform(4, 8))
        await strikes.kill([world.nodes["abc"[number]]], world.dice.uniform(0, 5))
        await asyncio.sleep(MINUTE)
        await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


async def groups_of_poison(world: World) -> None:
    """Heads become dead letters: the others go on, and the dead come back behind them."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    poison = [("fail", 2), ("hang", 0), ("kill", 0), ("cancel", 0)]
    fleet.add_producer("operator", lambda: iter(()))
    for number in range(2):
        batches = []
        for at, (kind, times) in enumerate(poison):
            group: dict[str, Any] = {"group": f"customer {at}"}
            head = fleet.build_message(kind, 0.1, times)
            batches.append(Batch([head], timeout=4.0, max_attempts=1 + (kind == "fail"), **group))
            rest = [fleet.build_message("quick", 0.2) for _ in range(3)]
            batches.append(Batch(rest, **group))
        await send(fleet, *batches)
        await fleet.wait_until_drained(10 * MINUTE)
        # What failed twice is completed now; what kills and hangs dies again, with company.
        more = [fleet.build_message("quick", 3.0) for _ in range(2 * len(poison))]
        behind = [
            Batch([message], group=f"customer {at % len(poison)}")
            for at, message in enumerate(more)
        ]
        await send(fleet, *behind)
        queue = get_queue(fleet, "operator")
        if number:
            for link in world.nodes["operator"].links:
                link.weather = Weather(lost=0.4, doubled=0.4)
        with contextlib.suppress(OutcomeUnknown, Unavailable):
            await queue.redrive()
        await fleet.wait_until_drained(10 * MINUTE)
        mend(world)
    fleet.expect_drained()


async def purged(world: World) -> None:
    """An operator purges heads, or what is behind them: what is left of each group is handled."""
    fleet = start_fleet(world, 2, visibility_timeout=10.0)
    fleet.add_producer("operator", lambda: iter(()))
    await asyncio.sleep(BEAT)
    choices: tuple[tuple[MessageState, ...], ...] = (
        ("ready",),
        ("waiting",),
        ("ready", "waiting"),
        ("blocked",),
        ("ready", "waiting", "blocked"),
    )
    for states in choices:
        queue = get_queue(fleet, "operator")
        kinds = ("quick", "long")
        await send(fleet, *draw_groups(fleet, 8, kinds))
        await queue.pause_everywhere()
        await send(fleet, *draw_groups(fleet, 8, kinds))
        await purge(queue, states)
        await send(fleet, *draw_groups(fleet, 4, kinds))
        await purge(queue, states)
        await queue.resume_everywhere()
        await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()


async def groups_in_bad_weather(world: World) -> None:
    """Replies get lost, and some requests arrive twice or late: each group advances once."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    kinds = ("quick", "fail", "ack", "snooze", "nack")
    fleet.add_producer("producer", lambda: draw_groups(fleet, 24, kinds))
    await asyncio.sleep(1)
    for node in world.nodes.values():
        for link in node.links:
            link.weather = Weather(lost=0.15, unanswered=0.15, doubled=0.2, late=0.1, late_by=30.0)
    await asyncio.sleep(5 * MINUTE)
    mend(world)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


async def keys(world: World) -> None:
    """Producers push the same keys at once, and again when in doubt: each has one message."""
    fleet = start_fleet(world, 2)
    names = ("one", "two", "three")
    for name in names:
        fleet.add_producer(f"producer {name}", lambda: iter(()))
    await asyncio.sleep(BEAT)
    queues = [get_queue(fleet, f"producer {name}") for name in names]
    wanted = [f"order {number}" for number in range(5)]

    async def push(queue: RecordingQueue) -> list[str]:
        """Push each key, twice, until that is acknowledged."""
        ids = []
        for key in [*wanted, *wanted]:
            message = fleet.build_message("quick", 0.1)
            while True:
                try:
                    ids.append(await queue.enqueue(message, key=key))
                    break
                except (OutcomeUnknown, Unavailable):
                    await asyncio.sleep(world.dice.uniform(0, 2))
        return ids

    for _ in range(2):
        await queues[0].pause_everywhere()
        for name in names:
            for link in world.nodes[f"producer {name}"].links:
                link.weather = _BAD
        async with asyncio.timeout(HOUR), asyncio.TaskGroup() as tasks:
            pushing = [tasks.create_task(push(queue)) for queue in queues]
        mend(world)
        found = {name for task in pushing for name in task.result()}
        detail = f"{len(wanted)} keys, {found} told, {fleet.backlog} pending"
        require(len(found) == fleet.backlog == len(wanted), "Q27", detail)
        await queues[0].resume_everywhere()
        # Now some are claimed, and soon all keys are free.
        await asyncio.gather(*map(push, queues))
        await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def keys_for_a_time(world: World) -> None:
    """A key is held for its time, whatever becomes of its message, and free after it."""
    fleet = start_fleet(world, 2)
    fleet.add_producer("producer", lambda: iter(()))
    await asyncio.sleep(BEAT)
    queue = get_queue(fleet, "producer")
    for seconds in (0.1, 25.0):
        # Its message is completed long before, or long after.
        first = await queue.enqueue(fleet.build_message("long", seconds), key="a", key_ttl=12.0)
        await asyncio.sleep(10)
        again = await queue.enqueue(fleet.build_message("long", seconds), key="a")
        require(again == first, "Q27", f"{again} was added while {first} held its key")
        await asyncio.sleep(4)
        later = await queue.enqueue(fleet.build_message("quick", seconds), key="a", key_ttl=1.0)
        require(later != first, "Q27", f"{first} holds its key for too long")
        await fleet.wait_until_drained(MINUTE)
        # Now it is held as long as its message is pending, which is for longer than keys are kept
        # that nobody holds.
        for delay in (0.0, 400.0):
            holder = await queue.enqueue(fleet.build_message("long", 20.0), key="b", delay=delay)
            for _ in range(4):
                await asyncio.sleep(4 + delay / 4)
                again = await queue.enqueue(fleet.build_message("quick", 0.1), key="b")
                require(again == holder, "Q27", f"{again} was added while {holder} held its key")
            await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def replaced(world: World) -> None:
    """Messages are replaced until they are claimed, ready, waiting or blocked; then others come."""
    fleet = start_fleet(world, 2, concurrency=1, prefetch=0)
    fleet.add_producer("producer", lambda: iter(()))
    await asyncio.sleep(BEAT)
    queue = get_queue(fleet, "producer")

    async def push(kind: str, key: str, **options: Any) -> None:
        message = fleet.build_message(kind, world.dice.uniform(0, 3), 1)
        for _ in range(20):
            with contextlib.suppress(OutcomeUnknown, Unavailable):
                await queue.enqueue(message, key=key, replace=True, **options)
                return
            await asyncio.sleep(1)

    for number in range(2):
        if number:
            for link in world.nodes["producer"].links:
                link.weather = Weather(lost=0.2, unanswered=0.2)
        for at in range(24):
            kind, key = "fail" if at % 4 else "long", f"key {at % 3}"
            is_grouped = at % 3 and not fleet.store.is_billed
            options: dict[str, Any] = {"group": "customer"} if is_grouped else {}
            await push(kind, key, delay=world.dice.choice((0.0, 2.0)), **options)
            await asyncio.sleep(world.dice.uniform(0, 2))
        mend(world)
        await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()


async def run_ordered(world: World, fleet: QueueFleet, **options: Any) -> None:
    """Push messages that fail and wait, faster than they are handled, twice."""
    dice = world.dice
    kinds = ("quick", "quick", "fail", "snooze", "nack")

    def draw() -> Iterator[Batch]:
        for _ in range(25):
            messages = [
                fleet.build_message(dice.choice(kinds), dice.uniform(0, 3), dice.choice((1, 2)))
                for _ in range(dice.choice((1, 4)))
            ]
            drawn = {name: dice.choice(values) for name, values in options.items()}
            yield Batch(messages, dice.uniform(0, 3), delay=dice.choice((0.0, 0.0, 5.0)), **drawn)

    for _ in range(2):
        fleet.add_producer("producer", draw)
        await asyncio.sleep(MINUTE)
        await strikes.kill([world.nodes["a"]], 5.0)
        await asyncio.sleep(MINUTE)
        await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


async def priorities(world: World) -> None:
    """The most urgent come first, the oldest of these first, also after they failed or waited."""
    fleet = start_fleet(world, 2, order="priority", prefetch=0, concurrency=1)
    await run_ordered(world, fleet, priority=(-5, 0, 0, 5, 100), group=(None, None, "customer"))


async def newest_first(world: World) -> None:
    """The newest come first, and those that failed or waited stand where they stood."""
    fleet = start_fleet(world, 2, order="lifo", prefetch=0, concurrency=1)
    await run_ordered(world, fleet, group=(None, None, "customer"))


async def limited(world: World) -> None:
    """A few at a time in all processes together, also while those that hold claims die."""
    fleet = start_fleet(world, max_concurrency=3, concurrency=5, visibility_timeout=10.0)
    await run_limited(world, fleet)


async def rated(world: World) -> None:
    """So many in a time in all processes together, whoever dies and starts again."""
    fleet = start_fleet(world, rate_limit="2/second", rate_burst=4, visibility_timeout=10.0)
    await run_limited(world, fleet)


async def groups_at_once(world: World) -> None:
    """Two messages of a group at a time: both heads fail, wait and lose their workers."""
    fleet = start_fleet(world, group_concurrency=2, concurrency=5, visibility_timeout=10.0)
    await run_limited(world, fleet)


async def run_limited(world: World, fleet: QueueFleet) -> None:
    """Push messages of a few groups while workers are killed, replies are lost and clocks stop."""
    kinds = ("quick", "quick", "fail", "snooze", "nack")
    for number in range(2):
        for name in ("producer", "other producer"):
            fleet.add_producer(name, lambda: draw_groups(fleet, 10, kinds))
        await asyncio.sleep(world.dice.uniform(2, 6))
        if number:
            for name in "abc":
                for link in world.nodes[name].links:
                    link.weather = Weather(lost=0.1, unanswered=0.1, doubled=0.1)
        await strikes.kill([world.nodes[name] for name in "abc"], world.dice.uniform(0, 5))
        await asyncio.sleep(MINUTE)
        mend(world)
        await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


def draw_places(fleet: QueueFleet, end: float) -> Iterator[Batch]:
    """Yield batches with groups, keys and priorities until this time, and purges and redrives."""
    world = fleet.world
    dice = world.dice
    pause = dice.choice((5.0, 20.0))
    kinds = ("quick", "quick", "long", "fail", "fail", "snooze", "cancel", "ack", "nack", "extend")
    poison = dice.choice(((), ("hang", "kill"), ("stubborn", "sulk"), ("disconnect", "listen")))
    while world.loop.time() < end:
        rest = 60.0 if fleet.backlog > _BACKLOG else 0.0
        kind = dice.choice(kinds)
        options: dict[str, Any] = {"max_attempts": dice.choice((1, 2, 4))}
        if dice.random() < 0.2:
            options["delay"] = dice.uniform(0, 60)
        if poison and dice.random() < 0.05:
            kind, options["timeout"] = dice.choice(poison), 10.0
        count = dice.choice((1, 1, 3, 6)) if kind in {"quick", "fail"} else 1
        longest = 20.0 if kind in {"long", "stubborn", "listen"} else 2.0
        messages = [
            fleet.build_message(kind, dice.uniform(0, longest), dice.choice((1, 2)))
            for _ in range(count)
        ]
        pause_before, place = rest + dice.uniform(0, pause), draw_place(fleet)
        if fleet.store.is_billed and "key" in place:
            # There a message with a key is pushed alone.
            messages = messages[:1]
        yield Batch(messages, pause_before, **options, **place)
        if dice.random() < 0.05:
            yield Chore(RecordingQueue.redrive, dice.uniform(0, pause))
        if dice.random() < 0.03:
            states: tuple[MessageState, ...] = dice.choice(
                (("waiting",), ("ready",), ("blocked",), ("ready", "waiting", "blocked", "dead"))
            )
            yield Chore(partial(purge, states=states), dice.uniform(0, pause))


def draw_place(fleet: QueueFleet) -> Mapping[str, Any]:
    """Return options that say where messages stand."""
    dice = fleet.world.dice
    place: dict[str, Any] = {}
    if dice.random() < 0.5:
        numbers = dice.choice(((0, 1), (0, 1, 2, 3, 4, 5)))
        place["group"] = lambda message: f"customer {numbers[message['number'] % len(numbers)]}"
    if fleet.store.is_billed:
        # An object store has no groups, and ten priorities.
        place.clear()
    if dice.random() < 0.3:
        # The messages of a batch have numbers in a row, and so different keys.
        place["key"] = lambda message: f"order {message['number'] % 7}"
        place["tries"] = dice.choice((1, 5))
        if dice.random() < 0.4:
            place["key_ttl"] = dice.choice((5.0, 60.0))
        if dice.random() < 0.4:
            place["replace"] = True
    if fleet.order == "priority":
        place["priority"] = dice.choice((-10, 0, 0, 1, 50))
        if fleet.store.is_billed:
            place["priority"] = max(-4, min(place["priority"], 5))
    return place


async def run_stormy_places(
    world: World, kinds: Sequence[strikes.Strike], *, trusts_clocks: bool
) -> None:
    """Run a stormy hour with groups and keys, in one order or another."""
    order = ("fifo", "priority", "lifo", "fifo", "priority")[abs(world.seed) % 5]
    limits = _LIMITS[abs(world.seed) % len(_LIMITS)]
    await run_stormy_hours(
        world, (*kinds,), trusts_clocks=trusts_clocks, draw=draw_places, order=order, **limits
    )


async def stormy_places(world: World) -> None:
    """An hour of all strikes that leave clocks running."""
    await run_stormy_places(world, STRIKES, trusts_clocks=True)


async def stormy_places_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    await run_stormy_places(world, (*STRIKES, strikes.suspend), trusts_clocks=False)


STORIES: tuple[Story, ...] = (
    groups,
    groups_of_poison,
    purged,
    groups_in_bad_weather,
    keys,
    keys_for_a_time,
    replaced,
    priorities,
    newest_first,
    limited,
    rated,
    groups_at_once,
)
STORMS = (stormy_places, stormy_places_with_suspends)
