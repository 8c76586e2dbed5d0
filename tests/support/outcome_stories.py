"""Stories of handlers that write in transactions, and of callers that wait for results.

`jobsync.testing` checks every commit: what a handler writes in its transaction is committed once,
with the completion of its message (Q29), and a result is that of the handler which has completed
the message (Q30). Transactions are those of databases; results are everywhere.
"""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Iterator

from queue_fleet import Batch, Chore, QueueFleet
from queue_stories import (
    MINUTE,
    find_busy_process,
    run_stormy_hours,
    send,
    start_fleet,
)
from waiting import until

from jobsync import NoResult
from jobsync.testing import RecordingQueue, Weather, World, mend, require, strikes
from jobsync.testing.stories import Story
from jobsync.testing.strikes import STRIKES

__all__ = [
    "STORIES",
    "STORMS",
    "effects",
    "effects_in_bad_weather",
    "effects_of_the_killed",
    "effects_of_the_suspended",
    "effects_that_take_too_long",
    "results",
    "stormy_outcomes",
    "stormy_outcomes_with_suspends",
]

_BACKLOG = 10
_LATE = Weather(late=0.3, late_by=20.0, lost=0.2, unanswered=0.2, doubled=0.2)
_MESSAGES = 30
_PATIENCE = 600.0


def push_effects(fleet: QueueFleet) -> Iterator[Batch]:
    """Yield messages whose handlers write, some of them at their second attempt."""
    dice = fleet.world.dice
    for number in range(_MESSAGES // 3):
        messages = [
            fleet.build_message("transact", dice.uniform(0, 4), int(number % 5 == 0))
            for _ in range(3)
        ]
        yield Batch(messages, dice.uniform(0, 12), max_attempts=99)


async def effects(world: World) -> None:
    """Each handler writes once, and a failed attempt writes nothing."""
    fleet = start_fleet(world)
    fleet.add_producer("producer", lambda: push_effects(fleet))
    await expect_effects(fleet)


async def effects_in_bad_weather(world: World) -> None:
    """Replies to COMMIT get lost, and some COMMITs arrive long after their callers gave up."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    fleet.add_producer("producer", lambda: push_effects(fleet))
    await asyncio.sleep(1)
    worsen(world, _LATE)
    await asyncio.sleep(5 * MINUTE)
    mend(world)
    await expect_effects(fleet)


async def effects_of_the_killed(world: World) -> None:
    """Workers are killed, or frozen until others have their messages, in transactions."""
    await strike_in_transactions(start_fleet(world, visibility_timeout=6.0), strikes.pause)


async def effects_of_the_suspended(world: World) -> None:
    """Likewise, and their clocks stop: they trust claims that have ended, which are refused."""
    fleet = start_fleet(world, visibility_timeout=6.0, trusts_clocks=False)
    await strike_in_transactions(fleet, strikes.suspend)


async def strike_in_transactions(fleet: QueueFleet, freeze: strikes.Strike) -> None:
    """Kill or freeze a worker in the midst of handlers, again and again."""
    world = fleet.world
    fleet.add_producer("producer", lambda: push_effects(fleet))
    for number in itertools.count():
        await until(
            lambda: fleet.handled_now or has_written(fleet, _MESSAGES),
            "a handler runs",
            10 * MINUTE,
        )
        if has_written(fleet, _MESSAGES):
            break
        node = find_busy_process(fleet).node
        if number % 2:
            fleet.kill(node)
        else:
            await freeze([node], world.dice.uniform(0, 20))
        await asyncio.sleep(world.dice.uniform(0, 5))
    mend(world)
    await expect_effects(fleet)


async def effects_that_take_too_long(world: World) -> None:
    """A transaction that lasts longer than it may is rolled back, and its attempt has failed."""
    fleet = start_fleet(world)
    messages = [fleet.build_message("transact", seconds) for seconds in (0.1, 100.0, 0.1, 100.0)]
    await send(fleet, Batch(messages, max_attempts=2))
    await fleet.wait_until_drained(30 * MINUTE)
    fleet.expect_drained()
    require(fleet.count_states() == {"completed": 2, "dead": 2}, "Q29", str(fleet.count_states()))


def worsen(world: World, weather: Weather) -> None:
    """Set the weather of all workers."""
    for name in "abc":
        for link in world.nodes[name].links:
            link.weather = weather


def has_written(fleet: QueueFleet, count: int) -> bool:
    """Whether so many handlers have written."""
    return sum(done.what == "effect" for done in fleet.world.history) >= count


async def expect_effects(fleet: QueueFleet) -> None:
    """Wait until all is handled, and check that each message has had its effect."""
    await until(
        lambda: has_written(fleet, _MESSAGES),
        "all have written",
        30 * MINUTE,
        interval=1.0,
        invariant="Q29",
    )
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


async def results(world: World) -> None:
    """Callers receive what was returned, while workers are killed and replies get lost."""
    fleet = start_fleet(world, visibility_timeout=6.0)
    received: list[str] = []

    async def receive(queue: RecordingQueue) -> None:
        while len(received) < _MESSAGES:
            for name in [each for each in fleet.acknowledged if each not in received]:
                value = await queue.result(name, timeout=_PATIENCE)
                world.note("caller", "result", id=name, value=value)
                received.append(name)
            await asyncio.sleep(1)

    def push() -> Iterator[Batch]:
        for number in range(_MESSAGES):
            kind = ("answer", "answer by ack")[number % 2]
            message = fleet.build_message(kind, world.dice.uniform(0, 3))
            yield Batch([message], world.dice.uniform(0, 4), max_attempts=99)

    fleet.add_producer("producer", push)
    fleet.add_producer("caller", lambda: iter([Chore(receive)]))
    await asyncio.sleep(1)
    worsen(world, Weather(lost=0.2, unanswered=0.2))
    for _ in range(6):
        await until(lambda: bool(fleet.handled_now), "a handler runs", 10 * MINUTE)
        fleet.kill(find_busy_process(fleet).node)
        await asyncio.sleep(world.dice.uniform(2, 10))
    mend(world)
    await until(lambda: len(received) == _MESSAGES, "all results are received", 30 * MINUTE)
    fleet.expect_drained()


def draw_outcomes(fleet: QueueFleet, end: float) -> Iterator[Batch]:
    """Yield messages whose handlers write or return something, and wait for some results."""
    world = fleet.world
    dice = world.dice
    pause = dice.choice((5.0, 20.0))
    kinds = ["answer", "answer by ack"] + ["transact"] * (3 * (not fleet.store.is_billed))
    while world.loop.time() < end:
        rest = 60.0 if fleet.backlog > _BACKLOG else 0.0
        count = dice.choice((1, 1, 3))
        kind = dice.choice(kinds)
        messages = [
            fleet.build_message(kind, dice.uniform(0, 6), dice.choice((0, 0, 1)))
            for _ in range(count)
        ]
        yield Batch(messages, rest + dice.uniform(0, pause), max_attempts=dice.choice((2, 4)))
        if fleet.acknowledged and dice.random() < 0.3:
            yield Chore(functools.partial(receive_result, fleet, fleet.acknowledged[-1]))


async def receive_result(fleet: QueueFleet, name: str, queue: RecordingQueue) -> None:
    """Wait for a result, which may never come."""
    with contextlib.suppress(NoResult, TimeoutError):
        value = await queue.result(name, timeout=30.0)
        if "answer" in fleet.get_kind(name):
            fleet.world.note("caller", "result", id=name, value=value)


async def stormy_outcomes(world: World) -> None:
    """An hour of all strikes that leave clocks running."""
    await run_stormy_hours(world, STRIKES, trusts_clocks=True, draw=draw_outcomes)


async def stormy_outcomes_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    kinds = (*STRIKES, strikes.suspend)
    await run_stormy_hours(world, kinds, trusts_clocks=False, draw=draw_outcomes)


STORIES: tuple[Story, ...] = (
    effects,
    effects_in_bad_weather,
    effects_of_the_killed,
    effects_of_the_suspended,
    effects_that_take_too_long,
    results,
)
STORMS = (stormy_outcomes, stormy_outcomes_with_suspends)
