"""Stories of a queue in the simulated world: what happens to its processes, and the result.

`jobsync.testing` and the fleet check what must hold at every commit (Q1, Q2 and Q4 to Q8). Each
story checks its result: every message is handled or a dead letter, no message spends an attempt for
what others did, and all of it within a stated time (QL1 to QL3).
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from queue_fleet import BEAT, LETTERS, PARCELS, TIMEOUT, Batch, QueueFleet, QueueProcess
from waiting import until

from jobsync import Invalid, OutcomeUnknown, Unavailable
from jobsync.core.clock import Clock
from jobsync.testing import (
    NodeClock,
    Weather,
    World,
    check_orphans,
    check_redelivered,
    draw_forecast,
    mend,
    require,
    storm,
    strikes,
)
from jobsync.testing.stories import Story
from jobsync.testing.strikes import STRIKES, Strike

__all__ = [
    "STORIES",
    "batches",
    "begins",
    "blocks",
    "cancels_itself",
    "cut",
    "damaged",
    "delays",
    "disconnects_itself",
    "drains",
    "drifts",
    "epidemic",
    "forbid",
    "forbid_functions",
    "heard_late",
    "kill",
    "kill_beside_old_claims",
    "late",
    "leave",
    "long",
    "lost_replies",
    "mute",
    "nudges",
    "pause",
    "paused",
    "poison",
    "power_fails",
    "power_off",
    "pulled",
    "rebooted",
    "redriven",
    "renewed_late",
    "retained",
    "retained_by_a_clock_that_is_set",
    "revoked",
    "settled_again",
    "settled_late",
    "slow",
    "stops",
    "stops_although_stubborn",
    "stops_in_silence",
    "stops_with_functions",
    "stops_with_hooks",
    "stops_with_two_queues",
    "stormy",
    "stormy_with_suspends",
    "suspend",
    "timeouts",
    "timeouts_of_functions",
]


HOUR = 3600.0
VISIBILITY = 30.0
AFTER_DEATH = TIMEOUT + BEAT + 1
"""Seconds within which a killed worker's messages start elsewhere."""
AFTER_LAPSE = VISIBILITY + BEAT + 1
"""Likewise for a worker that lives and does not renew."""
AFTER_CANCEL = 10.0
"""Seconds within which a handler hears that its message was cancelled, if claims last so long."""
PATIENCE = VISIBILITY / 3
"""Seconds for which a worker leaves a suspect alone."""
ON_TIME = 2.0
"""Seconds after its delay within which a message is handled: idle workers sleep for up to 30 s, on
clocks that may be 5 % slow."""
MINUTE = 60.0
CHECK_INTERVAL = 0.05
"""Seconds between two checks of a story's condition."""
DRAINED = 1000.0
"""Seconds after a storm within which all messages are handled or dead."""
REDELIVERED = 300.0
"""Seconds after a storm within which lost messages are claimed again: suspects run one by one, and
one of those before it may take a minute."""
_BACKLOG = 10


def start_fleet(world: World, count: int = 3, **options: Any) -> QueueFleet:
    """Start processes that handle messages."""
    fleet = QueueFleet(world, **options)
    for name in "abcdef"[:count]:
        fleet.add_worker(name)
    return fleet


async def send(fleet: QueueFleet, *batches: Batch) -> None:
    """Push messages from a separate process; wait until all pushes are answered."""
    fleet.add_producer("producer", lambda: iter(batches))
    total = len(fleet.acknowledged) + sum(len(batch.data) for batch in batches)
    await until(
        lambda: len(fleet.acknowledged) == total, "all is pushed", HOUR, interval=CHECK_INTERVAL
    )


def find_busy_process(fleet: QueueFleet) -> QueueProcess:
    """Return a process with running handlers."""
    return next(item for item in reversed(fleet.processes) if item.node.is_alive and item.handling)


async def begins(world: World) -> None:
    """Three processes start at once on an empty store: every message is handled once."""
    fleet = start_fleet(world)
    await send(fleet, *[Batch([fleet.build_message("quick", 0.2)] * 1, 0.3) for _ in range(40)])
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def batches(world: World) -> None:
    """Batches are pushed while replies and requests get lost: each is stored completely or not."""
    fleet = start_fleet(world)

    def draw() -> Iterator[Batch]:
        for _ in range(40):
            yield Batch([fleet.build_message("quick", 0.1) for _ in range(5)], 1.0)

    producer = fleet.add_producer("producer", draw)
    await asyncio.sleep(1)
    for link in producer.links:
        link.weather = Weather(lost=0.2, refused=0.2, unanswered=0.2, undecided=0.1)
    for _ in range(40):
        await asyncio.sleep(world.dice.uniform(0, 10))
        await strikes.forbid([producer], world.dice.uniform(0, 2))
    mend(world)
    await fleet.wait_until_drained(MINUTE + fleet.unannounced)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def long(world: World) -> None:
    """Handlers take four times the visibility timeout: claims are renewed, each runs once."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    await send(fleet, Batch([fleet.build_message("long", 40.0) for _ in range(4)]))
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def nudges(world: World) -> None:
    """Handlers extend their claims by less than the visibility timeout: they are renewed too."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    await send(fleet, Batch([fleet.build_message("nudge", 1.0, 25) for _ in range(4)]))
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def run_strike(
    world: World,
    strike: Strike,
    within: float = AFTER_DEATH,
    *,
    duration: float = 20.0,
    **options: Any,
) -> None:
    """A process is struck for a long time with messages in flight: others claim them soon."""
    fleet = start_fleet(world, **{"prefetch": 0, **options})
    await send(fleet, Batch([fleet.build_message("long", duration) for _ in range(6)]))
    await until(
        lambda: len(fleet.handled_now) >= 3, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    await asyncio.sleep(world.dice.uniform(0, 5))
    victim = find_busy_process(fleet)
    in_flight = {name for name, _ in victim.handling}
    struck_at = world.loop.time()
    striking = asyncio.create_task(strike([victim.node], 4 * TIMEOUT))
    await until(
        lambda: in_flight <= fleet.lapsed.keys(),
        "its claims end",
        within,
        interval=CHECK_INTERVAL,
        invariant="QL2",
    )
    await striking
    # One suspect at a time and worker, each left alone for a while.
    within = AFTER_LAPSE + len(in_flight) * (PATIENCE + duration)
    await fleet.wait_until_drained(5 * MINUTE)
    world.violations += check_redelivered(world.history, since=struck_at, within=within)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()


async def kill(world: World) -> None:
    """A process is killed: its messages start elsewhere when its session is dead."""
    await run_strike(world, strikes.kill)


async def kill_beside_old_claims(world: World) -> None:
    """A process dies while others have held their claims for a while: only its claims end."""
    await run_strike(world, strikes.kill, duration=50.0, visibility_timeout=20.0, concurrency=2)


async def pause(world: World) -> None:
    """A process is paused for too long: it loses its messages, and settles none of them."""
    await run_strike(world, strikes.pause)


async def cut(world: World) -> None:
    """A process is cut off: it stops by itself before others may start."""
    await run_strike(world, strikes.cut)


async def mute(world: World) -> None:
    """A process receives no replies: its session's heartbeats arrive, its claims end."""
    await run_strike(world, strikes.mute, HOUR)


async def suspend(world: World) -> None:
    """A machine and its clock are suspended, so it trusts its claims: its receipts are refused."""
    await run_strike(world, strikes.suspend, duration=60.0, trusts_clocks=False)


async def drains(world: World) -> None:
    """Processes that end when the queue is empty do end, whatever gets lost."""
    fleet = QueueFleet(world, visibility_timeout=10.0)
    kinds = ("quick", "fail", "snooze", "ack", "nack", "cancel")
    messages = [fleet.build_message(kinds[at % 6], world.dice.uniform(0, 2), 1) for at in range(60)]
    await send(fleet, Batch(messages))
    node = fleet.add_worker("a", is_idle=True)
    await asyncio.sleep(BEAT)
    queue = fleet.find_process("a").queue
    assert queue is not None
    rows, _ = node.links
    rows.weather = Weather(lost=0.1, refused=0.1, unanswered=0.1)
    for _ in range(20):
        async with asyncio.timeout(10 * MINUTE):
            await node.run(queue.drain(max_messages=20))
        await asyncio.sleep(BEAT)
    require(fleet.backlog == 0, "QL3", f"{fleet.backlog} messages left")
    fleet.expect_drained()


async def run_settled_late(world: World, seconds: float, times: int) -> None:
    """A process is cut off as its handlers end: its settlements arrive while others handle them.

    Args:
        world: the simulated world.
        seconds: how long the first handlers take.
        times: how many times as long later ones take.
    """
    fleet = start_fleet(world, prefetch=0)
    await send(fleet, Batch([fleet.build_message("creep", seconds, times) for _ in range(6)]))
    await until(
        lambda: len(fleet.handled_now) == 6, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    victims = [process for process in fleet.processes if process.handling]
    victim = world.dice.choice(victims)
    in_flight = {name for name, _ in victim.handling}
    await asyncio.sleep(world.dice.uniform(3.0, 4.5))
    await strikes.cut([victim.node], 3 * TIMEOUT)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()
    require(
        in_flight == fleet.lapsed.keys(), "Q13", f"{fleet.lapsed} lapsed, {in_flight} were cut off"
    )


async def settled_late(world: World) -> None:
    """A process is cut off as its handlers end: its settlements arrive while others handle them."""
    await run_settled_late(world, 5.0, 16)


async def settled_again(world: World) -> None:
    """A process settles nothing for a while, and handles again what it has not settled."""
    fleet = start_fleet(world, 1, visibility_timeout=6.0)
    messages = [fleet.build_message("creep", 0.2, 10) for _ in range(8)]
    victim = world.nodes["a"]
    await asyncio.sleep(1)
    rows, _ = victim.links
    rows.withheld = frozenset(["settle"])
    await send(fleet, *[Batch([message], 0.5, max_attempts=99) for message in messages])
    fleet.add_worker("b")
    await asyncio.sleep(world.dice.uniform(10, MINUTE))
    mend(world)
    # Its settlements arrive, also those of messages that others have handled since.
    await asyncio.sleep(MINUTE)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()


async def blocks(world: World) -> None:
    """Code blocks the main thread: heartbeats continue, and claims that nobody renews lapse."""
    await run_strike(world, strikes.block, AFTER_LAPSE + 10.0)


async def forbid(world: World) -> None:
    """The database denies a process access: it fails, and starts nothing more."""
    await run_strike(world, strikes.forbid, AFTER_LAPSE, prefetch=3, visibility_timeout=10.0)


async def forbid_functions(world: World) -> None:
    """The same with plain functions, which cannot be cancelled: they read `context.lost`."""
    options = {"prefetch": 3, "visibility_timeout": 10.0, "uses_threads": True}
    await run_strike(world, strikes.forbid, AFTER_LAPSE, **options)


async def power_off(world: World) -> None:
    """The machine of the database is switched off and on: earlier claims have lapsed."""
    fleet = start_fleet(world, prefetch=0)
    await send(fleet, Batch([fleet.build_message("long", 30.0) for _ in range(6)]))
    await until(
        lambda: len(fleet.handled_now) == 6, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    for node in list(world.nodes.values()):
        node.kill()
    await asyncio.sleep(world.dice.uniform(0, MINUTE))
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    fleet.store.clock = clock.reboot()
    mend(world)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()


async def leave(world: World, busy: int = 9) -> None:
    """A deployment: processes stop cleanly, one by one, and no attempt is spent.

    Args:
        world: the world.
        busy: how many handlers run when it begins.
    """
    fleet = start_fleet(world, grace=5.0)
    seconds = world.dice.choice((2.0, 60.0))
    await send(fleet, Batch([fleet.build_message("long", seconds) for _ in range(15)]))
    await until(
        lambda: len(fleet.handled_now) >= busy, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    await strikes.leave([world.nodes[name] for name in "abc"], 30.0)
    await fleet.wait_until_drained(20 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()
    require(not fleet.lapsed, "Q18", f"claims of workers that stopped lapsed: {fleet.lapsed}")


async def run_timeouts(world: World, kinds: tuple[str, ...], **options: Any) -> None:
    """Handlers exceed their timeouts: each is told, and their messages become dead letters."""
    fleet = start_fleet(world, visibility_timeout=10.0, **options)
    messages = [
        fleet.build_message(kind, world.dice.uniform(8, 25)) for kind in kinds for _ in range(2)
    ]
    batches = [Batch([message], 1.0, timeout=3.0, max_attempts=2) for message in messages]
    innocent = [fleet.build_message("quick", 0.3) for _ in range(10)]
    await send(fleet, *batches, *[Batch([message], 2.0) for message in innocent])
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    dead = sorted(fleet.list_kinds("dead"))
    require(dead == sorted(kinds * 2), "Q6", f"{dead} are dead")
    fleet.expect_no_attempt_lost(but=kinds)


async def timeouts(world: World) -> None:
    """Coroutines exceed their timeouts: some end when they are cancelled, some do not."""
    await run_timeouts(world, ("long", "stubborn", "sulk"))


async def timeouts_of_functions(world: World) -> None:
    """Plain functions exceed their timeouts: some look at `context.lost`, some do not."""
    await run_timeouts(world, ("listen", "long"), uses_threads=True)


async def run_stops(
    world: World, ending: str, other: str, *, is_left: bool = False, **options: Any
) -> None:
    """Processes stop cleanly, one by one: messages are returned if their handlers end.

    Args:
        world: the simulated world.
        ending: the kind of messages whose handlers end when they are told to.
        other: the kind of other messages.
        is_left: whether the handlers of the others do not end.
        options: for the fleet.
    """
    fleet = start_fleet(world, grace=world.dice.choice((1.0, 5.0)), prefetch=0, **options)
    messages = [fleet.build_message((ending, other)[at % 2], 40.0) for at in range(9)]
    await send(fleet, Batch(messages, max_attempts=2))
    await until(
        lambda: len(fleet.handled_now) == 9, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    await asyncio.sleep(world.dice.uniform(0, 5))
    stopped_at = world.loop.time()
    await strikes.leave([world.nodes[name] for name in "abc"], 30.0)
    await fleet.wait_until_drained(20 * MINUTE)
    fleet.expect_drained()
    left = (other,) if is_left else ()
    lapsed = [name for name in fleet.lapsed if fleet.get_kind(name) not in left]
    require(not lapsed, "Q18", f"claims of workers that stopped lapsed: {lapsed}")
    fleet.expect_no_attempt_lost(but=left)
    within = fleet.find_orphan_bound(AFTER_DEATH)
    world.violations += check_orphans(world.history, since=stopped_at, within=within)


async def stops(world: World) -> None:
    """Handlers are cancelled when their process stops; some raise another error then."""
    await run_stops(world, "long", "sulk")


async def stops_although_stubborn(world: World) -> None:
    """Some handlers swallow their cancellation: their process stops all the same."""
    await run_stops(world, "long", "stubborn", is_left=True)


async def stops_with_functions(world: World) -> None:
    """Plain functions cannot be cancelled; those that look at `context.lost` end in time."""
    await run_stops(world, "listen", "long", is_left=True, uses_threads=True)


async def stops_with_hooks(world: World) -> None:
    """A listener and a plugin's hook never end: their process stops all the same."""
    fleet = start_fleet(world, grace=5.0, has_stubborn_hooks=True)
    await send(fleet, *[Batch([fleet.build_message("quick", 0.2)], 0.3) for _ in range(20)])
    await strikes.leave([world.nodes[name] for name in "abc"], 10.0)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()


async def stops_with_two_queues(world: World) -> None:
    """A process stops while a queue has long handlers: its other queue claims nothing more."""
    fleet = start_fleet(world, grace=10.0, prefetch=0, resources=(LETTERS, PARCELS))
    await send(fleet, Batch([fleet.build_message("long", 60.0) for _ in range(9)], 0.0, PARCELS))
    await until(
        lambda: len(fleet.handled_now) == 9, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    leaving = asyncio.create_task(strikes.leave([world.nodes[name] for name in "abc"], 30.0))
    await send(fleet, *[Batch([fleet.build_message("quick", 0.2)], 1.0) for _ in range(40)])
    await leaving
    await fleet.wait_until_drained(20 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()
    require(not fleet.lapsed, "Q18", f"claims of workers that stopped lapsed: {fleet.lapsed}")


async def stops_in_silence(world: World) -> None:
    """The database answers nothing while a process stops: it ends in time all the same."""
    fleet = start_fleet(world, grace=5.0, prefetch=0)
    await send(fleet, Batch([fleet.build_message("long", 20.0) for _ in range(6)]))
    await until(
        lambda: len(fleet.handled_now) == 6, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    victim = find_busy_process(fleet).node
    silence = world.dice.choice((strikes.cut, strikes.mute))
    striking = asyncio.create_task(silence([victim], MINUTE))
    await asyncio.sleep(world.dice.uniform(0, 2))
    await strikes.leave([victim], MINUTE)
    await striking
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    fleet.expect_no_attempt_lost()


async def cancels_itself(world: World) -> None:
    """Handlers cancel their own tasks: each time spends an attempt, and takes no slot along."""
    fleet = start_fleet(world, 1)
    messages = [fleet.build_message("cancel itself", 0.1) for _ in range(6)]
    innocent = [fleet.build_message("quick", 0.1) for _ in range(20)]
    batches = [Batch([message], 0.1, max_attempts=3) for message in messages]
    await send(fleet, *batches, *[Batch([message], 0.5) for message in innocent])
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    states = fleet.count_states()
    require(states.get("dead") == len(messages), "Q6", f"there are {states}")
    fleet.expect_no_attempt_lost(but=("cancel itself",))
    fleet.expect_soon(innocent, 5.0)


async def disconnects_itself(world: World) -> None:
    """Handlers disconnect their database while others run on: its process ends in time."""
    fleet = start_fleet(world, grace=3.0, prefetch=0)
    kinds = (("stubborn", 30.0), ("long", 8.0), ("disconnect", 2.0))
    messages = [fleet.build_message(*kinds[at % 3], 1) for at in range(12)]
    await send(fleet, *[Batch([message], 1.0, max_attempts=4) for message in messages])
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    within = fleet.find_orphan_bound(AFTER_DEATH)
    world.violations += check_orphans(world.history, since=0.0, within=within)


async def poison(world: World) -> None:
    """Messages that raise, hang or kill become dead letters; the others lose no attempt."""
    fleet = start_fleet(world)
    poisonous = [
        fleet.build_message("fail", 0.1, 99),
        fleet.build_message("hang"),
        fleet.build_message("kill", 0.1),
    ]
    world.dice.shuffle(poisonous)
    innocent = [fleet.build_message("quick", 0.3) for _ in range(30)]
    batches = [Batch([message], timeout=5.0, max_attempts=3) for message in poisonous]
    batches += [Batch([message], 2.0, max_attempts=3) for message in innocent]
    await send(fleet, *batches)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    dead, completed = sorted(fleet.list_kinds("dead")), fleet.list_kinds("completed")
    require(dead == ["fail", "hang", "kill"], "Q6", f"{dead} are dead")
    require(len(completed) == len(innocent), "Q6", f"{completed} are completed")
    fleet.expect_no_attempt_lost(but=("fail", "hang", "kill"))
    # A message in flight with a poison message waits for the session's end and to run alone.
    fleet.expect_soon(innocent, AFTER_DEATH + PATIENCE + 5.0)


async def epidemic(world: World) -> None:
    """Messages kill their workers one after the other: no other message spends an attempt."""
    fleet = start_fleet(world)
    batches = []
    for number in range(120):
        kind = ("kill", 0.5) if number % 20 == 5 else ("quick", 2.0)
        batches.append(Batch([fleet.build_message(*kind)], 0.7, max_attempts=2))
    await send(fleet, *batches)
    await fleet.wait_until_drained(20 * MINUTE)
    fleet.expect_drained()
    dead = fleet.list_kinds("dead")
    require(dead == ["kill"] * 6, "Q6", f"{dead} are dead")
    fleet.expect_no_attempt_lost(but=("kill",))


async def damaged(world: World) -> None:
    """Unreadable rows are buried and fail no worker, although few replies arrive."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    messages = [fleet.build_message("quick", 0.1) for _ in range(9)]
    await send(fleet, Batch(messages, delay=5.0, max_attempts=99))
    for name, payload in zip(fleet.acknowledged, ("{", "", "[1, 2]"), strict=False):
        fleet.damage(name, payload)
    await asyncio.sleep(1)
    for node in world.nodes.values():
        rows, _ = node.links
        rows.weather = Weather(unanswered=0.7)
    await asyncio.sleep(3 * MINUTE)
    mend(world)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    states = fleet.count_states()
    require(states.get("dead") == 3, "Q17", f"three are unreadable, and there are {states}")
    failed = [item for item in world.history if item.what == "gave up"]
    require(not failed, "Q17", f"workers failed: {failed}")


async def redriven(world: World) -> None:
    """Dead letters are queued again while replies are lost, with all their attempts."""
    fleet = start_fleet(world)
    messages = [fleet.build_message("fail", 0.1, 2) for _ in range(6)]
    await send(fleet, Batch(messages, max_attempts=2))
    await until(
        lambda: fleet.count_states() == {"dead": len(messages)},
        "all are dead",
        MINUTE,
        interval=CHECK_INTERVAL,
    )
    for link in world.nodes["producer"].links:
        link.weather = Weather(lost=0.5, doubled=0.5)
    queue = fleet.find_process("producer").queue
    assert queue is not None
    give_up = world.loop.time() + HOUR
    while fleet.count_states().get("dead"):
        require(world.loop.time() < give_up, "QL3", "dead letters are left after an hour")
        with contextlib.suppress(OutcomeUnknown, Unavailable):
            await queue.redrive()
        await asyncio.sleep(BEAT)
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    states = fleet.count_states()
    require(states == {"completed": len(messages)}, "Q6", f"there are {states}")


async def paused(world: World) -> None:
    """An operator pauses the queue for minutes: nothing is claimed meanwhile, and all of it after.

    For longer than a claim looks back for due messages on PostgreSQL.
    """
    fleet = start_fleet(world)

    def draw() -> Iterator[Batch]:
        for number in range(60):
            kind = ("quick", "fail", "snooze", "long", "nack")[number % 5]
            message = fleet.build_message(kind, world.dice.uniform(0, 3), 1)
            yield Batch([message], 2.0, delay=world.dice.choice((0.0, 5.0, 40.0)))

    fleet.add_producer("producer", draw)
    await asyncio.sleep(world.dice.uniform(20, 40))
    queue = fleet.find_process("producer").queue
    assert queue is not None
    await queue.pause_everywhere("as the story demands")
    since = world.loop.time()
    await asyncio.sleep(world.dice.uniform(150, 200))
    fleet.expect_unclaimed(since)
    require(fleet.backlog > _BACKLOG, "QL3", f"only {fleet.backlog} messages wait")
    await queue.resume_everywhere()
    await fleet.wait_until_drained(2 * MINUTE)
    fleet.expect_drained()


async def revoked(world: World) -> None:
    """Somebody cancels, deletes and hurries messages, whose handlers hear of it in time."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    kinds = ("quick", "long", "fail", "snooze", "long", "nack")
    messages = [fleet.build_message(kinds[at % 6], 2.0 + 20.0 * (at % 2), 1) for at in range(36)]
    delays = (0.0, 0.0, 30.0, 200.0)
    await send(
        fleet, *[Batch([each], 0.2, delay=delays[at % 4]) for at, each in enumerate(messages)]
    )
    producer = fleet.find_process("producer")
    queue = producer.queue
    assert queue is not None
    for link in producer.node.links:
        link.weather = Weather(lost=0.1, refused=0.1, unanswered=0.1)
    ended: set[str] = set()
    for name in world.dice.sample(fleet.acknowledged, 24):
        await asyncio.sleep(world.dice.uniform(0, 2))
        operate = world.dice.choice((queue.cancel, queue.cancel, queue.delete, queue.run_now))
        with contextlib.suppress(Invalid, OutcomeUnknown, Unavailable):
            if await operate(name) and operate == queue.cancel:
                ended.add(name)
    mend(world)
    # A claim is renewed after a third of its time; whether that is due is checked each sixth.
    await asyncio.sleep(AFTER_CANCEL)
    running = {name for name, _ in fleet.handled_now} & ended
    require(not running, "Q14", f"handlers of cancelled messages still run: {running}")
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()
    states = fleet.count_states()
    require(states.get("cancelled", 0) >= len(ended), "Q10", f"there are {states}")


async def pulled(world: World) -> None:
    """A program holds its claims for four visibility timeouts, settles some, and dies with others.

    Nobody else gets any of them before.
    """
    fleet = QueueFleet(world)
    await send(fleet, Batch([fleet.build_message("quick", 0.5) for _ in range(10)]))
    program = fleet.find_process("producer")
    assert program.queue is not None
    held = [await program.node.run(program.queue.claim(5)) for _ in range(2)]
    for name in "ab":
        fleet.add_worker(name)
    await asyncio.sleep(4 * VISIBILITY)
    lost = [message.id for batch in held for message in batch if message.lost]
    require([*map(len, held)] == [5, 5] and not lost, "Q16", f"{held} were claimed, {lost} lost")
    require(not fleet.started, "Q16", f"handled by others: {fleet.started}")
    for message in held[0]:
        fleet.finished[message.id] += 1
        require(await program.node.run(message.ack()), "Q15", f"{message} was not accepted")
    program.node.kill()
    # One suspect at a time and worker.
    await fleet.wait_until_drained(AFTER_DEATH + 5 * PATIENCE)
    fleet.expect_drained()
    require(len(fleet.started) == 5, "Q16", f"handled by others: {fleet.started}")


async def delays(world: World) -> None:
    """Delays are as long as requested, even if the database's wall clock is set forward or back.

    It is not set where it counts the delays itself.
    """
    fleet = start_fleet(world)
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    batches = [
        Batch(
            [fleet.build_message("quick", 0.1) for _ in range(2)],
            1.0,
            delay=world.dice.uniform(0, 60),
        )
        for _ in range(20)
    ]
    await send(fleet, *batches)
    for step in world.dice.choice(((-HOUR, 30.0), (24 * HOUR, -HOUR))):
        await asyncio.sleep(world.dice.uniform(0, 20))
        if not fleet.store.counts_by_wall:
            clock.step_wall(step)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()
    fleet.expect_on_time(ON_TIME)


async def rebooted(world: World) -> None:
    """The wall clock of the database is wrong after a reboot: no delay becomes longer."""
    fleet = start_fleet(world)
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    batches = [
        Batch([fleet.build_message("quick", 0.1) for _ in range(6)], delay=delay)
        for delay in (5.0, 4 * MINUTE)
    ]
    await send(fleet, *batches)
    for node in list(world.nodes.values()):
        node.kill()
    await asyncio.sleep(world.dice.uniform(0, 2 * MINUTE))
    fleet.store.clock = clock = clock.reboot()
    clock.step_wall(world.dice.choice((-HOUR, -24 * HOUR)))
    mend(world)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()
    fleet.expect_handled_once()


async def run_weather(world: World, weather: Weather, **options: Any) -> None:
    """Everything is pushed and handled in the same bad weather, and finally in calm."""
    fleet = start_fleet(world, **options)

    def draw() -> Iterator[Batch]:
        for number in range(60):
            kind = ("quick", "fail", "ack", "snooze", "nack", "extend")[number % 6]
            yield Batch([fleet.build_message(kind, world.dice.uniform(0, 12), 1)], 4.0)

    fleet.add_producer("producer", draw)
    await asyncio.sleep(1)
    for node in world.nodes.values():
        for link in node.links:
            link.weather = weather
    await asyncio.sleep(10 * MINUTE)
    mend(world)
    await fleet.wait_until_drained(DRAINED)
    fleet.expect_drained()


async def lost_replies(world: World) -> None:
    """Half of all replies get lost, in one way or another."""
    await run_weather(world, Weather(lost=0.25, unanswered=0.25), visibility_timeout=10.0)


async def late(world: World) -> None:
    """Requests arrive long after their callers gave up, and some arrive twice."""
    await run_weather(world, Weather(late=0.3, late_by=90.0, doubled=0.3))


async def slow(world: World) -> None:
    """Replies take so long that half of a claim's time is over when its worker gets it."""
    await run_weather(world, Weather(latency=2.4, slow=0.2, slow_by=4.0), visibility_timeout=8.0)


async def heard_late(world: World) -> None:
    """A worker gets the reply to a claim after the claim has lapsed, of suspects too."""
    fleet = QueueFleet(world, visibility_timeout=4.0)
    node = fleet.add_worker("a")
    await send(
        fleet, Batch([fleet.build_message("quick", 0.1) for _ in range(5)], 1.0, max_attempts=99)
    )
    rows, _ = node.links
    rows.weather = Weather(latency=6.0, patience=60.0)
    await send(
        fleet, Batch([fleet.build_message("quick", 0.1) for _ in range(5)], 1.0, max_attempts=99)
    )
    await asyncio.sleep(5 * MINUTE)
    mend(world)
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()


async def renewed_late(world: World) -> None:
    """Replies to renewals take almost as long as a claim lasts; then no renewal arrives."""
    fleet = start_fleet(world, visibility_timeout=8.0)
    await send(fleet, Batch([fleet.build_message("long", 40.0) for _ in range(6)], max_attempts=99))
    for name in "abc":
        rows, _ = world.nodes[name].links
        rows.weather = Weather(slow_reply=1.0, calls=frozenset(["extend"]))
    await asyncio.sleep(world.dice.uniform(10, 20))
    for _ in range(3):
        rows, _ = world.nodes[world.dice.choice("abc")].links
        rows.withheld = frozenset(["extend"])
        await asyncio.sleep(20)
        rows.withheld = frozenset()
        await asyncio.sleep(world.dice.uniform(5, 20))
    mend(world)
    await fleet.wait_until_drained(10 * MINUTE)
    fleet.expect_drained()


async def retained(world: World) -> None:
    """Each finished message is kept as long as its kind of end demands, and not much longer."""
    completed_ttl, dead_ttl = world.dice.choice(((60.0, 400.0), (400.0, 60.0)))
    fleet = start_fleet(world, completed_ttl=completed_ttl, dead_ttl=dead_ttl)
    kinds = ("quick", "fail", "cancel")
    messages = [fleet.build_message(kinds[at % 3], 0.1, 99) for at in range(12)]
    await send(fleet, *[Batch([message], 1.0, max_attempts=2) for message in messages])
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    longest = max(completed_ttl, dead_ttl)
    await asyncio.sleep(longest - 2 * MINUTE)
    left = fleet.count_states()
    wanted = {"completed": 4} if completed_ttl == longest else {"dead": 4, "cancelled": 4}
    kept = {state: left.get(state, 0) for state in wanted}
    require(kept == wanted, "Q24", f"{left} are left before their time is over")
    await asyncio.sleep(4 * MINUTE)
    left = fleet.count_states()
    require(set(left) == {"gone"}, "Q24", f"{left} are left after their time")


async def retained_by_a_clock_that_is_set(world: World) -> None:
    """The wall clock is set back between two messages of a claim: neither is removed too early."""
    fleet = start_fleet(world, 1, completed_ttl=60.0, prefetch=0, visibility_timeout=600.0)
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    batches = [
        Batch([fleet.build_message("long", seconds) for seconds in (1, 10, 20)], pause)
        for pause in (0.0, MINUTE)
    ]
    # The worker leads, so that its settings count.
    await asyncio.sleep(BEAT)
    sending = asyncio.create_task(send(fleet, *batches))
    for _ in batches:
        await until(lambda: len(fleet.handled_now) == 3, "handlers start", 2 * MINUTE, interval=0.5)
        await asyncio.sleep(world.dice.uniform(3, 8))
        clock.step_wall(-40.0)
        if fleet.store.counts_by_wall:
            fleet.distrust_clocks()
    await sending
    await fleet.wait_until_drained(MINUTE)
    fleet.expect_drained()
    await asyncio.sleep(4 * MINUTE)
    left = fleet.count_states()
    require(set(left) == {"gone"}, "Q24", f"{left} are left after their time")


async def power_fails(world: World) -> None:
    """The machine of all processes is switched off and on at once: their claims have lapsed.

    Nobody waits for the sessions of the processes that held them, nor for old times of lapsing.
    Only who leads next waits for the session of a process that led before.
    """
    fleet = start_fleet(world, prefetch=0, visibility_timeout=600.0)
    await send(fleet, Batch([fleet.build_message("long", 30.0) for _ in range(3)]))
    await until(
        lambda: len(fleet.handled_now) == 3, "handlers start", MINUTE, interval=CHECK_INTERVAL
    )
    for node in list(world.nodes.values()):
        node.kill()
    clock = fleet.store.clock
    assert isinstance(clock, NodeClock)
    fleet.store.clock = clock.reboot()
    since = world.loop.time()
    has_led = any(item.details.get("key", "").startswith("role/") for item in world.history)
    mend(world)
    await until(
        lambda: len(fleet.lapsed) == 3,
        "their claims end",
        AFTER_DEATH if has_led else TIMEOUT - BEAT,
        interval=CHECK_INTERVAL,
        invariant="QL2",
    )
    await fleet.wait_until_drained(10 * MINUTE)
    world.violations += check_redelivered(world.history, since=since, within=3 * MINUTE)
    fleet.expect_drained()


async def drifts(world: World) -> None:
    """Clock rates differ as much as allowed, with claims that are rarely renewed."""
    fleet = start_fleet(world, visibility_timeout=10.0)
    await send(fleet, Batch([fleet.build_message("long", 25.0) for _ in range(6)]))
    for node, rate in zip(list(world.nodes.values()), (0.951, 1.049, 0.951, 1.0), strict=True):
        node.clock.rate = rate
    await strikes.flap([world.nodes[name] for name in "abc"], 2 * MINUTE)
    await fleet.wait_until_drained(5 * MINUTE)
    fleet.expect_drained()


def draw_batches(fleet: QueueFleet, end: float) -> Iterator[Batch]:
    """Yield batches of all kinds until this time of the world."""
    world = fleet.world
    dice = world.dice
    pause = dice.choice((5.0, 20.0, 60.0))
    kinds = ("quick", "quick", "quick", "long", "fail", "snooze", "cancel", "ack", "nack", "extend")
    poison = dice.choice(
        (
            (),
            ("hang",),
            ("kill",),
            ("hang", "kill", "fail"),
            ("stubborn", "sulk", "cancel itself"),
            ("disconnect", "stubborn", "listen"),
        )
    )
    while world.loop.time() < end:
        # A producer that sees a backlog waits: the hour shall end with everything handled.
        rest = 60.0 if fleet.backlog > _BACKLOG else 0.0
        kind = dice.choice(kinds)
        options: dict[str, Any] = {"max_attempts": dice.choice((1, 2, 4))}
        if dice.random() < 0.2:
            options["delay"] = dice.uniform(0, 120)
        if poison and dice.random() < 0.05:
            kind, options["timeout"] = dice.choice(poison), 10.0
        longest = 60.0 if kind in ("long", "stubborn", "listen") else 3.0
        count = dice.choice((1, 1, 1, 3, 10)) if kind == "quick" else 1
        messages = [
            fleet.build_message(kind, dice.uniform(0, longest), dice.choice((1, 2)))
            for _ in range(count)
        ]
        yield Batch(messages, rest + dice.uniform(0, pause), **options)


async def step_clock(clock: Clock, world: World, end: float) -> None:
    """Set the database's wall clock forward or back from time to time."""
    assert isinstance(clock, NodeClock)
    while world.loop.time() < end:
        await asyncio.sleep(world.dice.uniform(0, 600))
        step = world.dice.choice((-30.0, 30.0))
        clock.step_wall(step)
        await asyncio.sleep(world.dice.uniform(0, 300))
        clock.step_wall(-step)


async def run_stormy_hours(
    world: World,
    kinds: tuple[Strike, ...],
    *,
    trusts_clocks: bool,
    hours: float = 1.0,
    draw: Callable[[QueueFleet, float], Iterator[Batch]] = draw_batches,
    **options: Any,
) -> None:
    """Run a stormy hour, or several, and check what comes after it.

    Args:
        world: the simulated world.
        kinds: the strikes.
        trusts_clocks: whether clocks keep running.
        hours: how long it takes, with the calm at the end.
        draw: yields what producers push until a time of the world.
        options: for the fleet.
    """
    dice = world.dice
    fleet = QueueFleet(
        world,
        trusts_clocks=trusts_clocks,
        uses_threads=dice.random() < 0.2,
        visibility_timeout=dice.choice((6.0, VISIBILITY, VISIBILITY, 120.0)),
        concurrency=dice.choice((1, 3)),
        prefetch=dice.choice((None, 0, 5)),
        poll_interval=dice.choice((2.0, 10.0)),
        grace=dice.choice((2.0, 25.0)),
        completed_ttl=dice.choice((60.0, 300.0)),
        **options,
    )
    for name in "abcd"[: dice.choice((1, 2, 3, 3, 4))]:
        fleet.add_worker(name)
    end = (hours - 0.3) * HOUR
    for name in ("producer", "other producer")[: dice.choice((1, 1, 2))]:
        fleet.add_producer(name, lambda: draw(fleet, end))
    if dice.random() < 0.3:
        world.start(step_clock(fleet.store.clock, world, end))
        if fleet.store.counts_by_wall:
            fleet.distrust_clocks()
    await storm(world, end, draw_forecast(world, kinds))
    await fleet.wait_until_drained(DRAINED)
    fleet.expect_drained()
    world.violations += check_redelivered(world.history, since=end, within=REDELIVERED)
    within = fleet.find_orphan_bound(AFTER_DEATH) + fleet.unannounced
    world.violations += check_orphans(world.history, since=end, within=within)
    await asyncio.sleep(hours * HOUR - world.loop.time())


async def stormy(world: World) -> None:
    """Processes push and handle during an hour of all strikes that leave clocks running."""
    await run_stormy_hours(world, STRIKES, trusts_clocks=True)


async def stormy_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    await run_stormy_hours(world, (*STRIKES, strikes.suspend), trusts_clocks=False)


STORIES: tuple[Story, ...] = (
    begins,
    batches,
    long,
    nudges,
    kill,
    kill_beside_old_claims,
    pause,
    cut,
    mute,
    suspend,
    drains,
    settled_late,
    settled_again,
    blocks,
    forbid,
    forbid_functions,
    power_off,
    leave,
    timeouts,
    timeouts_of_functions,
    stops,
    stops_although_stubborn,
    stops_with_functions,
    stops_with_hooks,
    stops_with_two_queues,
    stops_in_silence,
    cancels_itself,
    disconnects_itself,
    poison,
    epidemic,
    damaged,
    redriven,
    delays,
    rebooted,
    lost_replies,
    late,
    slow,
    heard_late,
    drifts,
    renewed_late,
    retained,
    retained_by_a_clock_that_is_set,
    power_fails,
    paused,
    revoked,
    pulled,
)
