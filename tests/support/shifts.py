"""What happens to nodes that share tasks, as stories of the simulated world.

What must hold at every commit is judged by the crew's judge (see `crews`): T1 to T3, one
claim of a task at a time, one completion of a run. The stories say what happens, and what must
have come of it: nothing done twice but what was in hand when its process was struck, nothing
never done, and all tokens owned, evenly, within a bound that is stated.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from crews import BEAT, RECLAIM_AFTER, TIMEOUT, TOKENS, Crews, Style
from fleets import DearStore

from jobsync.jobs.registration import NameTaken
from jobsync.stores.memory import MemoryStore
from jobsync.testing import (
    Weather,
    World,
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
    "again_and_again",
    "all_die",
    "all_leave",
    "asked_anew",
    "begins",
    "churn",
    "clocks_differ",
    "cut",
    "cut_while_claiming",
    "dear",
    "dear_clocks_differ",
    "doze",
    "join",
    "join_by_the_loop",
    "kill",
    "kill_in_the_loop",
    "leaders_die",
    "leaders_die_waiting",
    "leave",
    "leave_by_the_loop",
    "lost_claims",
    "minimum_nodes",
    "mute",
    "name_inherited",
    "name_taken",
    "observers",
    "once_per_date",
    "outage",
    "pause",
    "pause_in_the_loop",
    "slow_join",
    "stormy",
    "stormy_with_suspends",
    "suspend",
    "suspend_in_the_loop",
]

SOON = 1.0
AFTER_DEATH = TIMEOUT + BEAT + 1
"""Within so many seconds what a killed node had is owned by others."""
AFTER_A_STORM = 4 * TIMEOUT
DONE = AFTER_DEATH + 2 * RECLAIM_AFTER

Story = Callable[[World], Coroutine[Any, Any, None]]


def hire(world: World, count: int = 3, style: Style = "walk", **options: Any) -> Crews:
    """Let some processes work through a list together."""
    crews = Crews(world, **options)
    for name in "abcdef"[:count]:
        crews.add(name, style)
    return crews


def expect_moved(before: dict[int, str], after: dict[int, str], most: float) -> None:
    """Check that some tokens have another owner, and no more than one node's share."""
    moved = sum(before[token] != after[token] for token in range(TOKENS))
    require(0 < moved <= most, "T5", f"{moved} tokens moved, and at most {most:g} may")


def expect_shares(crews: Crews, counts: list[int]) -> None:
    """Check how many tokens the nodes own."""
    found = sorted(len(hand.believes) for hand in crews.hands)
    require(found == counts, "TL2", f"the nodes own {found} tokens")


async def begins(world: World) -> None:
    """Three nodes start at once on an empty store: all are ready at once, with equal shares."""
    crews = hire(world)
    await crews.until_settled(SOON)
    expect_shares(crews, [20, 20, 20])
    await crews.until_done(60)
    crews.expect_done_once()


async def join(world: World, style: Style = "walk") -> None:
    """A node joins in the middle: only its share moves, at once."""
    crews = hire(world, style=style)
    await asyncio.sleep(2)
    before = crews.owners
    crews.add("d", style)
    await asyncio.sleep(0.2)
    await crews.until_settled(SOON)
    expect_moved(before, crews.owners, TOKENS / 4)
    await crews.until_done(60)
    crews.expect_done_once()


async def join_by_the_loop(world: World) -> None:
    """Likewise with the loop that the guide prints."""
    await join(world, "loop")


async def leave(world: World, style: Style = "walk") -> None:
    """A node leaves in good order: it hands over first, and only its share moves."""
    crews = hire(world, style=style)
    await asyncio.sleep(2.5)
    before = crews.owners
    crews.hand(world.dice.choice("abc")).stop()
    await asyncio.sleep(0.3)
    await crews.until_settled(SOON)
    expect_moved(before, crews.owners, TOKENS / 3)
    await crews.until_done(60)
    crews.expect_done_once()


async def leave_by_the_loop(world: World) -> None:
    """Likewise with the loop that the guide prints."""
    await leave(world, "loop")


async def struck(world: World, strike: Strike, style: Style = "walk", **options: Any) -> None:
    """A node is struck for longer than the timeout: others take over, and it comes back."""
    crews = hire(world, style=style, **options)
    await asyncio.sleep(world.dice.uniform(1, 3))
    victim = crews.hand(world.dice.choice("abc"))
    at_risk = victim.at_risk
    striking = asyncio.create_task(strike([victim.node], 3 * TIMEOUT))
    await asyncio.sleep(AFTER_DEATH)
    require(len(set(crews.owners.values())) == 2, "TL1", f"owned by {set(crews.owners.values())}")
    require(len(crews.owners) == TOKENS, "TL1", f"{len(crews.owners)} tokens are owned")
    await striking
    await crews.until_settled(2 * TIMEOUT)
    require(len(crews.owners) == TOKENS, "TL1", f"{len(crews.owners)} tokens are owned")
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def kill(world: World) -> None:
    """A process is killed, and another started under its name."""
    await struck(world, strikes.kill)


async def kill_in_the_loop(world: World) -> None:
    """Likewise with the loop that the guide prints."""
    await struck(world, strikes.kill, "loop")


async def pause(world: World) -> None:
    """A process is paused for too long: it says no by itself, and comes back as another."""
    await struck(world, strikes.pause)


async def pause_in_the_loop(world: World) -> None:
    """Likewise with the loop that the guide prints."""
    await struck(world, strikes.pause, "loop")


async def cut(world: World) -> None:
    """A node is cut off."""
    await struck(world, strikes.cut)


async def mute(world: World) -> None:
    """What a node sends arrives, and it hears nothing."""
    crews = hire(world)
    await asyncio.sleep(2)
    victim = crews.hand("b")
    at_risk = victim.at_risk
    await strikes.mute([victim.node], 3 * TIMEOUT)
    # A claim that it never heard of may have landed, and is closed.
    await crews.until_settled(2 * TIMEOUT)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def suspend(world: World) -> None:
    """A machine sleeps with its clock, and wakes believing: only the store knows better."""
    crews = hire(world, trusts_clocks=False)
    await asyncio.sleep(2)
    victim = crews.hand("b")
    at_risk = victim.at_risk
    await strikes.suspend([victim.node], 10 * TIMEOUT)
    await crews.until_settled(2 * TIMEOUT)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def suspend_in_the_loop(world: World) -> None:
    """Likewise with the loop that the guide prints, where nobody tells it what has changed."""
    crews = hire(world, style="loop", trusts_clocks=False, store=DearStore)
    await crews.until_settled(4 * BEAT)
    await asyncio.sleep(1)
    victim = crews.hand(world.dice.choice("abc"))
    at_risk = victim.at_risk
    await strikes.suspend([victim.node], 2.5 * TIMEOUT)
    await crews.until_settled(2 * TIMEOUT)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def slow_join(world: World) -> None:
    """Nodes join while some answers take long: claims are under way when tokens are revoked."""
    crews = hire(world, tasks=300)
    await crews.until_settled(SOON)
    leader = crews.leader
    for hand in crews.living:
        if hand is not leader:
            hand.node.links[0].weather = Weather(slow=0.5, slow_by=4.0)
    for name in "def":
        await asyncio.sleep(2)
        crews.add(name)
    await crews.until_settled(6 * BEAT)
    await crews.until_done(300)
    crews.expect_done_once()


async def cut_while_claiming(world: World) -> None:
    """Claims are answered when the session that made them is dead, and another has followed it."""
    crews = hire(world, 5, tasks=300)
    await crews.until_settled(SOON)
    victims = [crews.hand(name) for name in world.dice.sample("abcde", 3)]
    for victim in victims:
        victim.node.links[0].weather = Weather(latency=1.0)
    await asyncio.sleep(1.5)
    at_risk = {task for victim in victims for task in victim.at_risk}
    for victim in victims:
        claims, beats = victim.node.links
        claims.replies_pass = beats.requests_pass = False
    await asyncio.sleep(1.5 * TIMEOUT)
    for victim in victims:
        victim.node.links[1].mend()
    # A write is settled for half a minute.
    await asyncio.sleep(BEAT)
    mend(world)
    await crews.until_settled(2 * TIMEOUT)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def lost_claims(world: World) -> None:
    """Claims get no answer and land late, while tokens change hands all the time."""
    crews = hire(world, tasks=60)
    await crews.until_settled(SOON)
    bad = Weather(late=0.3, late_by=60.0, unanswered=0.3)
    for name in "abc":
        crews.hand(name).node.links[0].weather = bad
    for name in ("d", "e"):
        await asyncio.sleep(BEAT)
        crews.add(name)
    await asyncio.sleep(60)
    mend(world)
    await crews.until_settled(4 * TIMEOUT)
    await crews.until_done(300)


async def doze(world: World) -> None:
    """Pauses that are shorter than the timeout change nothing."""
    crews = hire(world, tasks=300)
    await asyncio.sleep(2)
    before = crews.owners
    for name in "abc":
        await strikes.pause([crews.hand(name).node], TIMEOUT - BEAT - 1.5)
        await asyncio.sleep(BEAT)
        require(crews.owners == before, "T5", "tokens moved during a short pause")
    await crews.until_done(120)
    crews.expect_done_once()


async def outage(world: World) -> None:
    """The store is away for everybody: nobody dies of it, and nothing changes hands."""
    crews = hire(world)
    await asyncio.sleep(2)
    before = crews.owners
    await strikes.cut(list(world.nodes.values()), 10 * TIMEOUT)
    require(crews.owners == {}, "T1", "tokens are owned without a session that is trusted")
    await crews.until_settled(2 * BEAT)
    require(crews.owners == before, "T5", "tokens moved because the store was away")
    await crews.until_done(60)
    crews.expect_done_once()


async def leaders_die(world: World) -> None:
    """Whoever leads is killed in the middle of a hand-over; the next goes on with it."""
    crews = hire(world)
    await asyncio.sleep(2)
    crews.add("d")
    await asyncio.sleep(world.dice.uniform(0, 0.3))
    leader = crews.leader
    at_risk = leader.at_risk
    leader.node.kill()
    await crews.until_settled(2 * AFTER_DEATH)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def leaders_die_waiting(world: World) -> None:
    """Whoever leads is killed while a node that lives has yet to give up its tokens."""
    crews = hire(world)
    await crews.until_settled(SOON)
    crews.add("d")
    await asyncio.sleep(0.2)
    await crews.until_settled(SOON)
    leader = crews.leader
    silent = world.dice.choice([hand for hand in crews.living if hand is not leader])
    # It has acknowledged before. Its session beats on another link.
    silent.node.links[0].requests_pass = False
    crews.add("e")
    await asyncio.sleep(1)
    at_risk = leader.at_risk
    leader.node.kill()
    await asyncio.sleep(2 * TIMEOUT)
    mend(world)
    await crews.until_settled(2 * TIMEOUT)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def all_die(world: World) -> None:
    """All processes are killed at once; those that start later do the rest."""
    crews = hire(world)
    await asyncio.sleep(2)
    at_risk = {task for hand in crews.hands for task in hand.at_risk}
    await strikes.kill(list(world.nodes.values()), 5)
    await crews.until_settled(2 * AFTER_DEATH)
    await crews.until_done(DONE)
    crews.expect_done_once(but=at_risk)


async def all_leave(world: World) -> None:
    """All leave in good order, one after the other; who comes later has everything at once."""
    crews = hire(world, tasks=200)
    await asyncio.sleep(1)
    for hand in crews.living:
        hand.stop()
        await asyncio.sleep(world.dice.uniform(0, 0.5))
    await asyncio.sleep(BEAT)
    require(crews.owners == {}, "T1", "tokens are owned after all nodes left")
    crews.add("late")
    await asyncio.sleep(0.2)
    await crews.until_settled(SOON)
    await crews.until_done(120)
    crews.expect_done_once()


async def churn(world: World) -> None:
    """Nodes come and go each second."""
    crews = hire(world, tasks=300)
    for number in range(12):
        await asyncio.sleep(1)
        if number % 2:
            hands = [hand for hand in crews.hands if hand.is_working]
            world.dice.choice(hands).stop()
        else:
            crews.add(f"n{number}")
    await crews.until_settled(BEAT)
    await crews.until_done(120)
    crews.expect_done_once()


async def asked_anew(world: World) -> None:
    """Walks that ask for what is pending do each task once too, while nodes come and go."""
    crews = hire(world, asks_anew=True)
    await asyncio.sleep(2)
    crews.add("d")
    crews.hand("a").stop()
    await crews.until_done(60)
    crews.expect_done_once()


async def clocks_differ(world: World) -> None:
    """A node whose wall clock is five minutes off works as the others do."""
    crews = Crews(world)
    for name, skew in (("a", 0.0), ("b", -300.0), ("c", 300.0)):
        crews.add(name, world.dice.choice(("walk", "loop")), skew=skew)
    await crews.until_settled(SOON)
    expect_shares(crews, [20, 20, 20])
    await asyncio.sleep(1.5)
    crews.hand(world.dice.choice("abc")).stop()
    await crews.until_done(60)
    crews.expect_done_once()


async def dear_clocks_differ(world: World) -> None:
    """Likewise on a store without a clock, whose nodes share nothing that tells the time."""
    crews = Crews(world, tasks=200, store=DearStore)
    for name, skew in (("a", 0.0), ("b", -300.0), ("c", 300.0)):
        crews.add(name, "loop", skew=skew)
    await crews.until_settled(6 * BEAT)
    await asyncio.sleep(1.5)
    crews.hand(world.dice.choice("abc")).stop()
    await crews.until_done(120)
    crews.expect_done_once()


async def dear(world: World) -> None:
    """On a store without hints and without a clock, beats carry the news."""
    crews = hire(world, store=DearStore)
    await crews.until_settled(4 * BEAT)
    crews.add("d")
    await asyncio.sleep(0.2)
    crews.hand("a").stop()
    await crews.until_settled(30 + 4 * BEAT)
    await crews.until_done(120)
    crews.expect_done_once()


async def name_taken(world: World) -> None:
    """A second process of a name waits, and is refused, with the host and process of the first."""
    crews = hire(world, 1)
    crews.wait_on_enter = 20
    await asyncio.sleep(1)
    crews.add("twin", node="a")
    await asyncio.sleep(30)
    refused = next(hand for hand in crews.hands if hand.node.name == "twin")
    require(isinstance(refused.error, NameTaken), "T8", f"not refused: {refused.error!r}")
    assert "process 4242 on host-of-a" in str(refused.error)
    require(set(crews.owners.values()) == {"a"}, "T8", "the second process owns tokens")
    crews.expect_done_once()


async def name_inherited(world: World) -> None:
    """It takes over when the first dies; one that comes back then finds its name taken."""
    crews = hire(world, 1)
    crews.wait_on_enter = 120
    await asyncio.sleep(2)
    at_risk = crews.hand("a").at_risk
    crews.add("twin", node="a")
    await strikes.pause([crews.hand("a").node], 4 * TIMEOUT)
    require(set(crews.owners.values()) == {"twin"}, "T8", "the name was not taken over")
    first = crews.hand("a")
    await crews.until_done(DONE)
    await asyncio.sleep(2 * TIMEOUT)
    assert first.crew is not None
    failure = first.crew.failure
    require(isinstance(failure, NameTaken), "T8", f"not refused: {failure!r}")
    require(set(crews.owners.values()) == {"twin"}, "T8", "the first process owns tokens again")
    crews.expect_done_once(but=at_risk)


async def observers(world: World) -> None:
    """An observer is there, may lead, and owns nothing."""
    crews = Crews(world, tasks=30)
    crews.add("watcher", "idle", is_observer=True)
    await asyncio.sleep(1)
    crews.add("worker")
    await asyncio.sleep(0.2)
    await crews.until_settled(SOON)
    watcher = crews.hand("watcher")
    assert watcher.crew is not None
    assert watcher.crew.is_leader
    require(not watcher.believes, "T9", "an observer owns tokens")
    require(set(crews.owners.values()) == {"worker"}, "TL1", "the worker does not own all tokens")
    await crews.until_done(60)


async def minimum_nodes(world: World) -> None:
    """Whoever waits for others is ready when they are there, and not before."""
    crews = Crews(world, tasks=30)
    crews.minimum_nodes = 2
    crews.add("a")
    await asyncio.sleep(20)
    require(len(crews.pending()) == 30, "T9", "tasks were done before enough nodes were there")
    crews.add("b")
    await crews.until_done(20)
    crews.expect_done_once()


async def once_per_date(world: World) -> None:
    """What was done is not done again on that date, though the list names it again and again."""
    crews = hire(world, 2, "loop", tasks=30, once_per_date=True)
    crews.forgets = True
    await asyncio.sleep(60)
    crews.hand("a").stop()
    await asyncio.sleep(30)
    require(set(crews.ended) == set(crews.tasks), "TL3", "not everything was done")
    crews.expect_done_once()


async def again_and_again(world: World) -> None:
    """Otherwise it is, as the guide has it."""
    crews = hire(world, 2, "loop", tasks=30)
    crews.forgets = True
    await asyncio.sleep(60)
    assert crews.twice == set(crews.tasks)


async def weather(world: World, *strikes: Strike, trusts_clocks: bool = True) -> None:
    """Everything at once, for five minutes; then all is owned and done within bounds."""
    crews = hire(
        world,
        4,
        tasks=300,
        longest_task=6.0,
        asks_anew=bool(world.seed % 2),
        store=DearStore if world.seed % 3 == 0 else MemoryStore,
        trusts_clocks=trusts_clocks,
    )
    await storm(world, 300, draw_forecast(world, strikes))
    await crews.until_settled(AFTER_A_STORM)
    await crews.until_done(600)


async def stormy(world: World) -> None:
    """Clocks keep their promise."""
    await weather(world, *STRIKES)


async def stormy_with_suspends(world: World) -> None:
    """They do not: what the store accepts must still be right."""
    await weather(world, *STRIKES, strikes.suspend, trusts_clocks=False)


STORIES = [
    begins,
    join,
    join_by_the_loop,
    leave,
    leave_by_the_loop,
    kill,
    kill_in_the_loop,
    pause,
    pause_in_the_loop,
    cut,
    mute,
    suspend,
    suspend_in_the_loop,
    slow_join,
    cut_while_claiming,
    lost_claims,
    doze,
    outage,
    leaders_die,
    leaders_die_waiting,
    all_die,
    all_leave,
    churn,
    asked_anew,
    clocks_differ,
    dear_clocks_differ,
    dear,
    name_taken,
    name_inherited,
    observers,
    minimum_nodes,
    once_per_date,
    again_and_again,
]
