"""What happens to processes that push and handle messages, as stories of the simulated world.

What must hold at every commit is judged by `jobsync.testing` and by the postroom's judge: Q1, Q2
and Q4 to Q8. The stories say what happens, and what must have come of it: everything handled or
among the dead letters, nobody charged for what others did, and all of it within a bound that is
stated (QL1 to QL3).
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from postroom import BEAT, TIMEOUT, Clerk, Letters, Postroom
from waiting import until

from jobsync import OutcomeUnknown
from jobsync.core.clock import Clock
from jobsync.testing import (
    NodeClock,
    Weather,
    World,
    check_redelivered,
    draw_forecast,
    mend,
    require,
    storm,
    strikes,
)
from jobsync.testing.strikes import STRIKES, Strike

__all__ = [
    "STORIES",
    "Story",
    "batches",
    "begins",
    "blocks",
    "cut",
    "damaged",
    "delays",
    "drains",
    "drifts",
    "epidemic",
    "forbid",
    "heard_late",
    "kill",
    "late",
    "leave",
    "long",
    "lost_replies",
    "mute",
    "nudges",
    "pause",
    "poison",
    "power_off",
    "redriven",
    "settled_late",
    "slow",
    "stormy",
    "stormy_with_suspends",
    "suspend",
]

Story = Callable[[World], Coroutine[Any, Any, None]]

HOUR = 3600.0
VISIBILITY = 30.0
AFTER_DEATH = TIMEOUT + BEAT + 1
"""Within so many seconds a killed worker's messages begin again elsewhere."""
AFTER_A_LAPSE = VISIBILITY + BEAT + 1
"""Likewise of a worker that lives and does not renew."""
PATIENCE = VISIBILITY / 3
"""For so long a worker leaves a suspect alone."""
MINUTE = 60.0
GLANCE = 0.05
"""Seconds between two looks of a story at what it waits for."""
LAST_FAILURES = 1000.0
"""Within so many seconds after a storm everything that it left is handled, dead letters too."""
REDELIVERED = 300.0
"""Within so many seconds after a storm whatever was taken from a worker is claimed again: suspects
have their turn one by one, and one of those in front of it may take a minute."""
_BACKLOG = 10


def open_room(world: World, count: int = 3, **options: Any) -> Postroom:
    """Let some processes handle messages."""
    room = Postroom(world, **options)
    for name in "abcdef"[:count]:
        room.hire(name)
    return room


async def send(room: Postroom, *letters: Letters) -> None:
    """Push messages from a process of their own; wait until all have been answered."""
    room.send("producer", lambda: iter(letters))
    total = len(room.acknowledged) + sum(len(each.data) for each in letters)
    await until(lambda: len(room.acknowledged) == total, "all is pushed", HOUR, interval=GLANCE)


def find_busy(room: Postroom) -> Clerk:
    """Give a process whose handlers run."""
    return next(each for each in reversed(room.clerks) if each.node.is_alive and each.handling)


async def begins(world: World) -> None:
    """Three processes start at once on an empty store: everything is handled, once."""
    room = open_room(world)
    await send(room, *[Letters([room.write("quick", 0.2)] * 1, 0.3) for _ in range(40)])
    await room.until_drained(MINUTE)
    room.expect_drained()
    room.expect_handled_once()


async def batches(world: World) -> None:
    """Batches are pushed while replies and requests get lost: each arrives whole, or not at all."""
    room = open_room(world)

    def letters() -> Iterator[Letters]:
        for _ in range(40):
            yield Letters([room.write("quick", 0.1) for _ in range(5)], 1.0)

    producer = room.send("producer", letters)
    await asyncio.sleep(1)
    for link in producer.links:
        link.weather = Weather(lost=0.2, refused=0.2, unanswered=0.2, undecided=0.1)
    for _ in range(40):
        await asyncio.sleep(world.dice.uniform(0, 10))
        await strikes.forbid([producer], world.dice.uniform(0, 2))
    mend(world)
    await room.until_drained(MINUTE)
    room.expect_drained()
    room.expect_handled_once()


async def long(world: World) -> None:
    """A handler takes four times as long as its claim holds: it is renewed, and handled once."""
    room = open_room(world, visibility_timeout=10.0)
    await send(room, Letters([room.write("long", 40.0) for _ in range(4)]))
    await room.until_drained(5 * MINUTE)
    room.expect_drained()
    room.expect_handled_once()


async def nudges(world: World) -> None:
    """A handler extends its claim by less than it holds, again and again: it is renewed as well."""
    room = open_room(world, visibility_timeout=10.0)
    await send(room, Letters([room.write("nudge", 1.0, 25) for _ in range(4)]))
    await room.until_drained(5 * MINUTE)
    room.expect_drained()
    room.expect_handled_once()


async def struck(
    world: World,
    strike: Strike,
    within: float = AFTER_DEATH,
    *,
    lasting: float = 20.0,
    **options: Any,
) -> None:
    """A process is struck for a long time with messages in hand: others have them soon."""
    room = open_room(world, **{"prefetch": 0, **options})
    await send(room, Letters([room.write("long", lasting) for _ in range(6)]))
    await until(lambda: len(room.handled_now) >= 3, "it begins", MINUTE, interval=GLANCE)
    await asyncio.sleep(world.dice.uniform(0, 5))
    victim = find_busy(room)
    in_hand = {name for name, _ in victim.handling}
    struck_at = world.loop.time()
    striking = asyncio.create_task(strike([victim.node], 4 * TIMEOUT))
    await until(
        lambda: in_hand <= room.lapsed.keys(),
        "its claims end",
        within,
        interval=GLANCE,
        invariant="QL2",
    )
    await striking
    # One suspect at a time and worker, each left alone for a while.
    within = AFTER_A_LAPSE + len(in_hand) * (PATIENCE + lasting)
    await room.until_drained(5 * MINUTE)
    world.violations += check_redelivered(world.history, since=struck_at, within=within)
    room.expect_drained()
    room.expect_no_attempt_lost()


async def kill(world: World) -> None:
    """A process is killed: its messages begin elsewhere when its session is dead."""
    await struck(world, strikes.kill)


async def pause(world: World) -> None:
    """A process is paused for too long: it loses its messages, and settles none of them."""
    await struck(world, strikes.pause)


async def cut(world: World) -> None:
    """A process is cut off: it stops by itself before others may begin."""
    await struck(world, strikes.cut)


async def mute(world: World) -> None:
    """What a process sends arrives, and it hears nothing: its session beats on, its claims end."""
    await struck(world, strikes.mute, HOUR)


async def suspend(world: World) -> None:
    """A machine sleeps with its clock and wakes believing: its receipts are refused."""
    await struck(world, strikes.suspend, lasting=60.0, trusts_clocks=False)


async def drains(world: World) -> None:
    """Processes that end when nothing is left do end, whatever gets lost on the way."""
    room = Postroom(world, visibility_timeout=10.0)
    kinds = ("quick", "fail", "snooze", "ack", "nack", "cancel")
    letters = [room.write(kinds[at % 6], world.dice.uniform(0, 2), 1) for at in range(60)]
    await send(room, Letters(letters))
    node = room.hire("a", is_idle=True)
    await asyncio.sleep(BEAT)
    queue = room.clerk("a").queue
    assert queue is not None
    rows, _ = node.links
    rows.weather = Weather(lost=0.1, refused=0.1, unanswered=0.1)
    for _ in range(20):
        async with asyncio.timeout(10 * MINUTE):
            await node.run(queue.drain(max_messages=20))
        await asyncio.sleep(BEAT)
    require(room.backlog == 0, "QL3", f"{room.backlog} messages left")
    room.expect_drained()


async def settled_late(world: World) -> None:
    """A process is cut off as its handlers end: what it settles arrives when others are at it."""
    room = open_room(world, prefetch=0)
    await send(room, Letters([room.write("creep", 5.0, 16) for _ in range(6)]))
    await until(lambda: len(room.handled_now) == 6, "it begins", MINUTE, interval=GLANCE)
    victims = [clerk for clerk in room.clerks if clerk.handling]
    victim = world.dice.choice(victims)
    in_hand = {name for name, _ in victim.handling}
    await asyncio.sleep(world.dice.uniform(3.0, 4.5))
    await strikes.cut([victim.node], 3 * TIMEOUT)
    await room.until_drained(10 * MINUTE)
    room.expect_drained()
    room.expect_no_attempt_lost()
    require(in_hand == room.lapsed.keys(), "Q13", f"{room.lapsed} lapsed, {in_hand} were cut off")


async def blocks(world: World) -> None:
    """Code holds the main thread: the session beats on, and claims that nobody renews lapse."""
    await struck(world, strikes.block, AFTER_A_LAPSE + 10.0)


async def forbid(world: World) -> None:
    """The database refuses a process for want of rights: it fails, and begins nothing more."""
    await struck(world, strikes.forbid, AFTER_A_LAPSE, prefetch=3, visibility_timeout=10.0)


async def power_off(world: World) -> None:
    """The machine of the database is switched off and on: claims of before have lapsed."""
    room = open_room(world, prefetch=0)
    await send(room, Letters([room.write("long", 30.0) for _ in range(6)]))
    await until(lambda: len(room.handled_now) == 6, "it begins", MINUTE, interval=GLANCE)
    for node in list(world.nodes.values()):
        node.kill()
    await asyncio.sleep(world.dice.uniform(0, MINUTE))
    clock = room.store.rows.clock
    assert isinstance(clock, NodeClock)
    room.store.rows.clock = clock.reboot()
    mend(world)
    await room.until_drained(10 * MINUTE)
    room.expect_drained()
    room.expect_no_attempt_lost()


async def leave(world: World) -> None:
    """A deployment: processes stop in good order, one by one, and no attempt is spent."""
    room = open_room(world, grace=5.0)
    seconds = world.dice.choice((2.0, 60.0))
    await send(room, Letters([room.write("long", seconds) for _ in range(15)]))
    await until(lambda: len(room.handled_now) == 9, "it begins", MINUTE, interval=GLANCE)
    await strikes.leave([world.nodes[name] for name in "abc"], 30.0)
    await room.until_drained(20 * MINUTE)
    room.expect_drained()
    room.expect_no_attempt_lost()
    require(not room.lapsed, "Q18", f"claims of workers that stopped lapsed: {room.lapsed}")


async def poison(world: World) -> None:
    """Messages that raise, hang and kill become dead letters; the others flow, and lose nothing."""
    room = open_room(world)
    poisonous = [room.write("fail", 0.1, 99), room.write("hang"), room.write("kill", 0.1)]
    world.dice.shuffle(poisonous)
    innocent = [room.write("quick", 0.3) for _ in range(30)]
    letters = [Letters([each], timeout=5.0, max_attempts=3) for each in poisonous]
    letters += [Letters([each], 2.0, max_attempts=3) for each in innocent]
    await send(room, *letters)
    await room.until_drained(10 * MINUTE)
    room.expect_drained()
    dead, completed = sorted(room.kinds_in("dead")), room.kinds_in("completed")
    require(dead == ["fail", "hang", "kill"], "Q6", f"{dead} are dead")
    require(len(completed) == len(innocent), "Q6", f"{completed} are completed")
    room.expect_no_attempt_lost(but=("fail", "hang", "kill"))
    # Whoever dies with a poisoned one waits for the end of its session, and its turn as a suspect.
    room.expect_soon(innocent, AFTER_DEATH + PATIENCE + 5.0)


async def epidemic(world: World) -> None:
    """One after the other messages kill their workers: nobody else is charged, alone or not."""
    room = open_room(world)
    letters = []
    for number in range(120):
        kind = ("kill", 0.5) if number % 20 == 5 else ("quick", 2.0)
        letters.append(Letters([room.write(*kind)], 0.7, max_attempts=2))
    await send(room, *letters)
    await room.until_drained(20 * MINUTE)
    room.expect_drained()
    dead = room.kinds_in("dead")
    require(dead == ["kill"] * 6, "Q6", f"{dead} are dead")
    room.expect_no_attempt_lost(but=("kill",))


async def damaged(world: World) -> None:
    """Rows that cannot be read are set aside, and fail nobody, though few answers come."""
    room = open_room(world, visibility_timeout=10.0)
    letters = [room.write("quick", 0.1) for _ in range(9)]
    await send(room, Letters(letters, delay=5.0, max_attempts=99))
    for name, payload in zip(room.acknowledged, ("{", "", "[1, 2]"), strict=False):
        room.damage(name, payload)
    await asyncio.sleep(1)
    for node in world.nodes.values():
        rows, _ = node.links
        rows.weather = Weather(unanswered=0.7)
    await asyncio.sleep(3 * MINUTE)
    mend(world)
    await room.until_drained(5 * MINUTE)
    room.expect_drained()
    states = room.count_states()
    require(states.get("dead") == 3, "Q17", f"three are unreadable, and there are {states}")
    failed = [each for each in world.history if each.what == "gave up"]
    require(not failed, "Q17", f"workers failed: {failed}")


async def redriven(world: World) -> None:
    """Dead letters get a new life while replies are lost, and all their attempts with it."""
    room = open_room(world)
    letters = [room.write("fail", 0.1, 2) for _ in range(6)]
    await send(room, Letters(letters, max_attempts=2))
    await until(
        lambda: room.count_states() == {"dead": len(letters)},
        "all are dead",
        MINUTE,
        interval=GLANCE,
    )
    for link in world.nodes["producer"].links:
        link.weather = Weather(lost=0.5, doubled=0.5)
    queue = room.clerk("producer").queue
    assert queue is not None
    give_up = world.loop.time() + HOUR
    while room.count_states().get("dead"):
        require(world.loop.time() < give_up, "QL3", "dead letters are left after an hour")
        with contextlib.suppress(OutcomeUnknown):
            await queue.redrive()
        await asyncio.sleep(BEAT)
    await room.until_drained(MINUTE)
    room.expect_drained()
    states = room.count_states()
    require(states == {"completed": len(letters)}, "Q6", f"there are {states}")


async def delays(world: World) -> None:
    """Messages wait for their time by the database's clock, wherever that steps."""
    room = open_room(world)
    clock = room.store.rows.clock
    assert isinstance(clock, NodeClock)
    letters = [
        Letters([room.write("quick", 0.1) for _ in range(2)], 1.0, delay=world.dice.uniform(0, 60))
        for _ in range(20)
    ]
    await send(room, *letters)
    for step in (-45.0, 30.0, 15.0):
        await asyncio.sleep(world.dice.uniform(0, 20))
        clock.step_wall(step)
    await room.until_drained(5 * MINUTE)
    room.expect_drained()
    room.expect_handled_once()


async def weathered(world: World, weather: Weather, **options: Any) -> None:
    """Everything is pushed and handled in the same bad weather, and at last in calm."""
    room = open_room(world, **options)

    def letters() -> Iterator[Letters]:
        for number in range(60):
            kind = ("quick", "fail", "ack", "snooze", "nack", "extend")[number % 6]
            yield Letters([room.write(kind, world.dice.uniform(0, 12), 1)], 4.0)

    room.send("producer", letters)
    await asyncio.sleep(1)
    for node in world.nodes.values():
        for link in node.links:
            link.weather = weather
    await asyncio.sleep(10 * MINUTE)
    mend(world)
    await room.until_drained(LAST_FAILURES)
    room.expect_drained()


async def lost_replies(world: World) -> None:
    """Half of all replies get lost, in one way or another."""
    await weathered(world, Weather(lost=0.25, unanswered=0.25), visibility_timeout=10.0)


async def late(world: World) -> None:
    """Requests land when nobody reckons with them any more, and some land twice."""
    await weathered(world, Weather(late=0.3, late_by=90.0, doubled=0.3))


async def slow(world: World) -> None:
    """Answers take so long that a claim is half over when its holder hears of it."""
    await weathered(world, Weather(latency=2.4, slow=0.2, slow_by=4.0), visibility_timeout=8.0)


async def heard_late(world: World) -> None:
    """A worker hears of what it has claimed when that is over, of suspects too."""
    room = Postroom(world, visibility_timeout=4.0)
    node = room.hire("a")
    await send(room, Letters([room.write("quick", 0.1) for _ in range(5)], 1.0, max_attempts=99))
    rows, _ = node.links
    rows.weather = Weather(latency=6.0, patience=60.0)
    await send(room, Letters([room.write("quick", 0.1) for _ in range(5)], 1.0, max_attempts=99))
    await asyncio.sleep(5 * MINUTE)
    mend(world)
    await room.until_drained(MINUTE)
    room.expect_drained()


async def drifts(world: World) -> None:
    """Clocks run at rates as far apart as is allowed, with claims that are seldom renewed."""
    room = open_room(world, visibility_timeout=10.0)
    await send(room, Letters([room.write("long", 25.0) for _ in range(6)]))
    for node, rate in zip(list(world.nodes.values()), (0.951, 1.049, 0.951, 1.0), strict=True):
        node.clock.rate = rate
    await strikes.flap([world.nodes[name] for name in "abc"], 2 * MINUTE)
    await room.until_drained(5 * MINUTE)
    room.expect_drained()


def draw_letters(room: Postroom, end: float) -> Iterator[Letters]:
    """Give messages of all kinds, until so much of the world's time has passed."""
    world = room.world
    dice = world.dice
    pause = dice.choice((5.0, 20.0, 60.0))
    kinds = ("quick", "quick", "quick", "long", "fail", "snooze", "cancel", "ack", "nack", "extend")
    poison = dice.choice(((), (), ("hang",), ("kill",), ("hang", "kill", "fail")))
    while world.loop.time() < end:
        # Whoever sees a backlog waits: the hour is to end with everything handled.
        rest = 60.0 if room.backlog > _BACKLOG else 0.0
        kind = dice.choice(kinds)
        longest = 60.0 if kind == "long" else 3.0
        options: dict[str, Any] = {"max_attempts": dice.choice((1, 2, 4))}
        if dice.random() < 0.2:
            options["delay"] = dice.uniform(0, 120)
        if poison and dice.random() < 0.05:
            kind, options["timeout"] = dice.choice(poison), 10.0
        count = dice.choice((1, 1, 1, 3, 10)) if kind == "quick" else 1
        letters = [
            room.write(kind, dice.uniform(0, longest), dice.choice((1, 2))) for _ in range(count)
        ]
        yield Letters(letters, rest + dice.uniform(0, pause), **options)


async def shake(clock: Clock, world: World, end: float) -> None:
    """Let the time of day of the database jump, and back, now and then."""
    assert isinstance(clock, NodeClock)
    while world.loop.time() < end:
        await asyncio.sleep(world.dice.uniform(0, 600))
        step = world.dice.choice((-30.0, 30.0))
        clock.step_wall(step)
        await asyncio.sleep(world.dice.uniform(0, 300))
        clock.step_wall(-step)


async def live_through(world: World, kinds: tuple[Strike, ...], *, trusts_clocks: bool) -> None:
    """A stormy hour, and what comes after it."""
    dice = world.dice
    room = Postroom(
        world,
        trusts_clocks=trusts_clocks,
        visibility_timeout=dice.choice((6.0, VISIBILITY, VISIBILITY, 120.0)),
        concurrency=dice.choice((1, 3)),
        prefetch=dice.choice((None, 0, 5)),
        poll_interval=dice.choice((2.0, 10.0)),
        grace=dice.choice((2.0, 25.0)),
        completed_ttl=dice.choice((60.0, 300.0)),
    )
    for name in "abcd"[: dice.choice((1, 2, 3, 3, 4))]:
        room.hire(name)
    end = 0.7 * HOUR
    for name in ("producer", "other producer")[: dice.choice((1, 1, 2))]:
        room.send(name, lambda: draw_letters(room, end))
    if dice.random() < 0.3:
        world.start(shake(room.store.rows.clock, world, end))
    await storm(world, end, draw_forecast(world, kinds))
    await room.until_drained(LAST_FAILURES)
    room.expect_drained()
    world.violations += check_redelivered(world.history, since=end, within=REDELIVERED)
    await asyncio.sleep(HOUR - world.loop.time())


async def stormy(world: World) -> None:
    """Processes push and handle through an hour of all troubles under which clocks count."""
    await live_through(world, STRIKES, trusts_clocks=True)


async def stormy_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    await live_through(world, (*STRIKES, strikes.suspend), trusts_clocks=False)


STORIES: tuple[Story, ...] = (
    begins,
    batches,
    long,
    nudges,
    kill,
    pause,
    cut,
    mute,
    suspend,
    drains,
    settled_late,
    blocks,
    forbid,
    power_off,
    leave,
    poison,
    epidemic,
    damaged,
    redriven,
    delays,
    lost_replies,
    late,
    slow,
    heard_late,
    drifts,
)
