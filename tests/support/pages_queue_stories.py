"""The stories of a queue on an object store, in the simulated world.

They are those of `queue_stories` and that of results, under the same names, with a store that bills
requests, has no clock to ask and tells nobody. A few are left out, whose promises only databases
make. Others are added for what only pages have: messages that move, pages that are dropped, claims
that are watched.

The wall clocks of machines differ by up to 10 seconds, and jump as far: delays depend on them. A
machine with a larger error vetoes itself. However fast a machine counts, a time server keeps them
there. In `clocks_jump` they differ by days, and nothing has a delay.
"""

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import outcome_stories
import queue_stories
from queue_fleet import BEAT, OPEN_STORE, Batch, QueueFleet
from queue_stories import (
    AFTER_LAPSE,
    CHECK_INTERVAL,
    HOUR,
    MINUTE,
    run_settled_late,
    run_stormy_hours,
    run_strike,
    send,
    start_fleet,
)
from waiting import until

from jobsync import OutcomeUnknown
from jobsync.testing import (
    Node,
    NodeClock,
    Occurrence,
    PagedStore,
    Violation,
    Weather,
    World,
    mend,
    require,
    strikes,
)
from jobsync.testing.invariants import fail
from jobsync.testing.stories import Story
from jobsync.testing.strikes import STRIKES, Strike

__all__ = ["OWN_STORIES", "PAGE_STRIKES", "STORIES", "STORMS", "on_pages"]

_SKEW = 10.0
_MOVED = 30.0
"""Seconds within which a move is finished that its process has given up."""
_ON_TIME = 7.0
"""Seconds after its delay within which a message is handled: the bell is read every five."""
_AFTER_SHARED_LAPSE = AFTER_LAPSE + 20.0
"""Seconds after which a claim is over in a page that others change: its watchers read it late."""
_TOLERATED = 20.0
"""Seconds by which clocks may differ without a veto."""
_RETENTION = 800.0
"""Seconds between two removals of what was finished, and a beat."""


def on_pages(story: Story) -> Story:
    """Return a story whose fleets have their messages in pages."""

    async def run(world: World) -> None:
        OPEN_STORE.set(PagedStore)
        world.largest_skew = _SKEW
        world.keeps_clocks = True
        await story(world)

    functools.update_wrapper(run, story)
    # So that a replay finds it here.
    run.__module__ = __name__
    return run


def get_pages(fleet: QueueFleet) -> PagedStore:
    """Return the store of a fleet."""
    assert isinstance(fleet.store, PagedStore)
    return fleet.store


async def _expect_moved(fleet: QueueFleet, seconds: float) -> None:
    """Check that all moves are finished within this many seconds."""
    pages = get_pages(fleet).pages
    await until(
        lambda: not pages.list_moving(),
        "moves are finished",
        seconds,
        interval=CHECK_INTERVAL,
        invariant="PL1",
    )


def _strike_first_move(world: World, strike: Any) -> list[Node]:
    """Strike the first process that begins a move, at that moment; return it once it was struck."""
    struck: list[Node] = []

    def watch(done: Occurrence) -> Iterator[Violation]:
        if not struck and done.what == "commit" and done.details["key"].startswith("page/"):
            messages = done.details["value"]["messages"]
            if done.node and any(each.get("move") for each in messages):
                struck.append(world.nodes[done.node])
                strike(struck[0])
        return iter(())

    world.watch(watch)
    return struck


@on_pages
async def watched_apart(world: World) -> None:
    """Two workers share a page, and one stops to renew: its claims lapse beside the renewals."""
    await run_strike(world, strikes.block, AFTER_LAPSE + 10.0, duration=60.0)


@on_pages
async def blocks(world: World) -> None:
    """Code blocks the main thread of a process that shares a page: its claims lapse."""
    await run_strike(world, strikes.block, _AFTER_SHARED_LAPSE)


@on_pages
async def leave(world: World) -> None:
    """A deployment, in which one process may have taken the whole page."""
    await queue_stories.leave(world, busy=3)


@on_pages
async def killed_while_moving(world: World) -> None:
    """A process dies as it moves a dead letter: others finish it before anything is dropped."""
    fleet = start_fleet(world, 2)
    struck = _strike_first_move(world, fleet.kill)
    messages = [fleet.build_message("fail", 0.1, 99), fleet.build_message("quick", 0.1)]
    await send(fleet, *[Batch([message], 1.0, max_attempts=1) for message in messages])
    await until(lambda: bool(struck), "a move begins", 2 * MINUTE, interval=CHECK_INTERVAL)
    world.nodes["producer"].kill()
    await _expect_moved(fleet, _MOVED + AFTER_LAPSE)
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    await asyncio.sleep(HOUR + _RETENTION)
    states = fleet.count_states()
    require(states == {"dead": 1, "gone": 1}, "Q1", f"there are {states}")


@on_pages
async def dropped_while_moving(world: World) -> None:
    """All processes are dead for hours while a message moves: what moves is not dropped."""
    fleet = start_fleet(world, 1)
    struck = _strike_first_move(world, Node.kill)
    messages = [fleet.build_message("snooze", 90.0, 1), fleet.build_message("fail", 0.1, 99)]
    batches = iter([Batch(messages, max_attempts=1)])
    fleet.add_producer("producer", lambda: batches)
    await until(lambda: bool(struck), "a move begins", 2 * MINUTE, interval=CHECK_INTERVAL)
    world.nodes["producer"].kill()
    await asyncio.sleep(2 * HOUR)
    if world.dice.random() < 0.5:
        # The producer alone is elected and removes what is old; nobody claims.
        world.nodes["producer"].restart()
        await asyncio.sleep(2 * _RETENTION)
    mend(world)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    require(fleet.count_states().get("dead") == 1, "Q1", f"there are {fleet.count_states()}")


@on_pages
async def sleeps_while_moving(world: World) -> None:
    """A process sleeps for hours in the middle of a move: it does not bring a dropped page back."""
    fleet = start_fleet(world, 2)
    struck = _strike_first_move(world, Node.pause)
    await send(fleet, Batch([fleet.build_message("snooze", 90.0, 1)]))
    world.nodes["producer"].kill()
    await until(lambda: bool(struck), "a move begins", 2 * MINUTE, interval=CHECK_INTERVAL)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    await asyncio.sleep(2 * HOUR)
    require(fleet.count_states() == {"gone": 1}, "Q24", f"there are {fleet.count_states()}")
    struck[0].resume()
    await asyncio.sleep(5 * MINUTE)
    require(fleet.count_states() == {"gone": 1}, "P1", f"there are {fleet.count_states()}")


@on_pages
async def denied_while_moving(world: World) -> None:
    """Access is denied in the middle of a move: what was settled is not reported as refused."""
    fleet = start_fleet(world, 2)

    def deny(node: Node) -> None:
        world.start(strikes.forbid([node], 2.0))

    struck = _strike_first_move(world, deny)
    await send(fleet, Batch([fleet.build_message("fail", 0.1, 99)], max_attempts=1))
    await until(lambda: bool(struck), "a move begins", 2 * MINUTE, interval=CHECK_INTERVAL)
    # Its process fails, and nobody else knows of the move before the next listing.
    await _expect_moved(fleet, _MOVED + AFTER_LAPSE + fleet.unannounced)
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def arrives_damaged(world: World) -> None:
    """Every third page arrives damaged, and is intact in the store: no receipt is called stale."""
    fleet = start_fleet(world, prefetch=0)
    # Three workers share one page, so each reads what the others have written.
    await send(fleet, Batch([fleet.build_message("nudge", 0.7, 4) for _ in range(30)]))
    for node in world.nodes.values():
        for link in node.links:
            link.weather = Weather(corrupt=0.4)
    await asyncio.sleep(MINUTE)
    mend(world)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()


@on_pages
async def outage(world: World) -> None:
    """The store is away while handlers end: they are settled after it, and none runs again."""
    fleet = start_fleet(world, prefetch=0, worker_timeout=2 * MINUTE)
    await send(fleet, Batch([fleet.build_message("long", 8.0) for _ in range(6)]))
    await until(
        lambda: len(fleet.handled_now) == 6, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    await strikes.cut(list(world.nodes.values()), world.dice.uniform(40, 60))
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def in_doubt(world: World) -> None:
    """The reply to a push gets lost, and its page is written often: its producer learns it."""
    fleet = start_fleet(world, 1, prefetch=0, concurrency=1)
    producer = fleet.add_producer("producer", lambda: iter(()))
    await asyncio.sleep(BEAT)
    queue = fleet.find_process("producer").queue
    assert queue is not None
    link, _ = producer.links
    # The first push writes the record of the queue, too.
    await queue.enqueue(fleet.build_message("quick", 0.1))
    link.ordain("write", "unanswered")
    pushing = producer.run(
        queue.enqueue_many([fleet.build_message("nudge", 0.4, 45) for _ in range(2)])
    )
    pages = get_pages(fleet).pages
    await until(lambda: len(pages.keys) > 1, "it arrives", MINUTE, interval=0.001)
    link.replies_pass = False
    await asyncio.sleep(22.0)
    link.replies_pass = True
    try:
        await pushing
    except OutcomeUnknown:
        fail("Q15", "a push arrived, and was not acknowledged")
    known = len(pages.keys)
    link.ordain("write", "unanswered")
    pushing = producer.run(queue.enqueue_many([fleet.build_message("quick", 0.1)]))
    await until(lambda: len(pages.keys) > known, "it arrives", MINUTE, interval=0.001)
    link.replies_pass = False
    await asyncio.wait([pushing])
    require(isinstance(pushing.exception(), OutcomeUnknown), "Q15", "it was refused, but was there")
    link.replies_pass = True
    await fleet.wait_until_drained(2 * MINUTE + fleet.unannounced)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def settled_late(world: World) -> None:
    """A process is cut off as its handlers end: its settlements arrive while others handle them.

    Processes hear of messages within five seconds of each other, so handlers take longer here.
    """
    await run_settled_late(world, 12.0, 8)


@on_pages
async def damaged(world: World) -> None:
    """Messages that are not documents are buried; a page that cannot be read is left alone."""
    fleet = start_fleet(world)
    store = get_pages(fleet)
    batches = [
        Batch([fleet.build_message("quick", 0.1) for _ in range(3)], delay=15.0, max_attempts=99)
        for _ in range(3)
    ]
    await send(fleet, *batches)
    await store.damage(fleet.acknowledged[0], [1, 2])
    await store.damage(fleet.acknowledged[4], 7)
    key = store.pages.find(fleet.acknowledged[6])
    assert key is not None
    record = await store.get(key)
    assert record is not None
    await store.overwrite(record, {"messages": "nonsense"})
    await asyncio.sleep(2 * MINUTE)
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    states = fleet.count_states()
    expected = {"dead": 2, "completed": 4, "gone": 3}
    require(states == expected, "Q17", f"there are {states}")
    failed = [item for item in world.history if item.what == "gave up"]
    require(not failed, "Q17", f"workers failed: {failed}")
    left = await store.get(key)
    require(left is not None and left.seq == record.seq + 1, "Q17", "it was changed or removed")


async def start_delayed(world: World) -> QueueFleet:
    """Start a fleet whose clocks agree, and push 40 messages with delays."""
    fleet = start_fleet(world)
    batches = [
        Batch(
            [fleet.build_message("quick", 0.1) for _ in range(2)],
            1.0,
            delay=world.dice.uniform(0, 100),
        )
        for _ in range(20)
    ]
    for batch in batches:
        batch.options["max_attempts"] = 99
    world.largest_skew = 0.0
    sending = asyncio.create_task(send(fleet, *batches))
    await asyncio.sleep(0)
    for node in world.nodes.values():
        node.clock.rate, node.clock.skew = 1.0, 0.0
    await sending
    await asyncio.sleep(world.dice.uniform(0, 20))
    return fleet


@on_pages
async def delays(world: World) -> None:
    """Delays are as long as requested where clocks agree, though the server's is a little wrong."""
    fleet = await start_delayed(world)
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    clock.step_wall(world.dice.choice((-_TOLERATED, _TOLERATED)))
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()
    fleet.expect_on_time(_ON_TIME)


@on_pages
async def server_clock_is_wrong(world: World) -> None:
    """Then no machine can know when a delay is over: all is handled when it has been corrected."""
    fleet = await start_delayed(world)
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    step = world.dice.choice((-HOUR, HOUR / 2))
    clock.step_wall(step)
    await asyncio.sleep(world.dice.uniform(0, 3 * MINUTE))
    clock.step_wall(-step)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


@on_pages
async def clocks_jump(world: World) -> None:
    """Wall clocks differ by days and jump: messages without delays are handled all the same."""
    fleet = start_fleet(world, grace=1.0, prefetch=0)
    nodes = [world.nodes[name] for name in "abc"]
    for node in nodes:
        node.clock.skew = world.dice.choice((-24 * HOUR, -HOUR, 0.0, HOUR, 24 * HOUR))

    def draw() -> Iterator[Batch]:
        for _ in range(30):
            yield Batch([fleet.build_message("long", 8.0)], 4.0, max_attempts=99)

    producer = fleet.add_producer("producer", draw)
    for _ in range(6):
        await asyncio.sleep(20)
        node = world.nodes[world.dice.choice("abc")]
        strike = world.dice.choice((strikes.leave, strikes.kill, strikes.block))
        await strike([node], 10.0)
        for each in (producer, world.nodes[world.dice.choice("abc")]):
            each.clock.step_wall(world.dice.choice((-24 * HOUR, -HOUR, HOUR, 24 * HOUR)))
    mend(world)
    await fleet.wait_until_drained(5 * MINUTE + fleet.unannounced)
    # A process whose clock is ahead returns what it has; then its clock is set right.
    node = world.nodes["a"]
    node.clock.skew = 24 * HOUR
    for name in "bc":
        world.nodes[name].pause()
    await send(fleet, Batch([fleet.build_message("long", 8.0) for _ in range(3)], 1.0))
    await until(
        lambda: len(fleet.handled_now) == 3, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    await node.stop()
    node.clock.skew = 0.0
    mend(world)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()


@on_pages
async def newest_first(world: World) -> None:
    """The latest messages are taken first, also those that come while older ones wait."""
    fleet = QueueFleet(world, order="lifo", prefetch=0, concurrency=1)
    batches = [
        Batch([fleet.build_message("long", 8.0)], pause, max_attempts=99)
        for pause in (*[1.0] * 6, 60.0, *[1.0] * 5)
    ]
    sending = asyncio.create_task(send(fleet, *batches))
    # Machines may disagree on which pages are still to come.
    await asyncio.sleep(4 * _SKEW)
    worker = fleet.add_worker("a")
    await sending
    seconds = world.dice.uniform(1, 10)
    await strikes.cut([worker], seconds)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    # A worker that is cut off sees nothing.
    fleet.expect_newest_first(seconds + 2 * _ON_TIME)


@on_pages
async def retained(world: World) -> None:
    """Finished messages are kept for at least an hour, and for as long as their end demands."""
    completed_ttl, dead_ttl = world.dice.choice(((60.0, 2 * HOUR), (2 * HOUR, 60.0)))
    fleet = start_fleet(world, completed_ttl=completed_ttl, dead_ttl=dead_ttl)
    kinds = ("quick", "fail", "cancel")
    messages = [fleet.build_message(kinds[at % 3], 0.1, 99) for at in range(12)]
    await send(fleet, *[Batch([message], 1.0, max_attempts=2) for message in messages])
    await fleet.wait_until_drained(2 * MINUTE)
    fleet.expect_drained()
    await asyncio.sleep(0.9 * HOUR)
    left = fleet.count_states()
    require(left.get("completed") == 4, "Q24", f"{left} are left before an hour is over")
    # Machines have clocks of their own, which count for dead letters.
    await asyncio.sleep(0.8 * HOUR)
    left = fleet.count_states()
    wanted = {"completed": 4, "gone": 8} if completed_ttl > HOUR else {"dead": 4, "cancelled": 4}
    kept = {state: left.get(state, 0) for state in wanted}
    require(kept == wanted, "Q24", f"{left} are left before their time is over")
    await asyncio.sleep(1.2 * HOUR)
    left = fleet.count_states()
    require(set(left) == {"gone"}, "Q24", f"{left} are left after their time")
    pages = get_pages(fleet).pages.keys
    require(len(pages) <= len(messages), "Q24", f"{len(pages)} pages are left")


async def _step_wall(nodes: Any, seconds: float) -> None:
    """Move the wall clocks by some seconds, and later back again."""
    step = nodes[0].world.dice.choice((-_SKEW, _SKEW))
    for node in nodes:
        node.clock.step_wall(step)
    await asyncio.sleep(seconds)
    for node in nodes:
        node.world.nodes[node.name].clock.step_wall(-step)


PAGE_STRIKES = (*(each for each in STRIKES if each is not strikes.step_wall), _step_wall)
_STORM_HOURS = 2.5
"""Pages are dropped an hour after their last change: half of them while the storm lasts."""


@on_pages
async def stormy(world: World) -> None:
    """Processes push and handle for hours of all strikes that leave clocks running."""
    await _run_storm(world, PAGE_STRIKES, trusts_clocks=True)


@on_pages
async def stormy_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    await _run_storm(world, (*PAGE_STRIKES, strikes.suspend), trusts_clocks=False)


async def _run_storm(world: World, kinds: tuple[Strike, ...], *, trusts_clocks: bool) -> None:
    # By the seed and not by dice, so that the storms of former seeds stay what they were.
    order = "lifo" if abs(world.seed) % 5 == 2 else "fifo"
    await run_stormy_hours(
        world, kinds, trusts_clocks=trusts_clocks, hours=_STORM_HOURS, order=order
    )


@on_pages
async def short_storm(world: World) -> None:
    """A storm of a few minutes, in which no page becomes old."""
    await run_stormy_hours(world, PAGE_STRIKES, trusts_clocks=True, hours=0.5)


def __getattr__(name: str) -> Story:
    """Return a story by its name, so that it can be replayed."""
    for story in STORIES:
        if story.__name__ == name:
            return story
    raise AttributeError(name)


OWN_STORIES = (
    watched_apart,
    blocks,
    leave,
    killed_while_moving,
    dropped_while_moving,
    sleeps_while_moving,
    denied_while_moving,
    arrives_damaged,
    outage,
    in_doubt,
    settled_late,
    damaged,
    delays,
    server_clock_is_wrong,
    clocks_jump,
    newest_first,
    retained,
)
_ONLY_DATABASES = (
    # Where the database counts delays and claims, its clock matters.
    queue_stories.rebooted,
    queue_stories.power_fails,
    queue_stories.retained_by_a_clock_that_is_set,
)
_own_names = {story.__name__ for story in OWN_STORIES}
_SHARED = [
    story
    for story in (*queue_stories.STORIES, outcome_stories.results)
    if story not in _ONLY_DATABASES and story.__name__ not in _own_names
]

STORIES = (*map(on_pages, _SHARED), *OWN_STORIES)
STORMS = (stormy, stormy_with_suspends)
