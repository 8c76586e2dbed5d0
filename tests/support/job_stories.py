"""Stories of nodes that share tasks in the simulated world.

The judge of `job_fleet` checks what must hold at every commit: T1 to T3, one claim of a task at a
time, one completion of a run. A story says what happens and what must come of it: no task done
twice except those that were running when their process was struck, every task done, and all
tokens owned, evenly, within a stated bound.
"""

import asyncio
from datetime import timedelta
from typing import Any

from fleets import BilledStore
from job_fleet import BEAT, DAY, RECLAIM_AFTER, TIMEOUT, TOKENS, JobFleet, Style
from waiting import until

from jobsync.core.pins import Pin
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
    "a_date_again",
    "all_die",
    "all_leave",
    "begins",
    "billed",
    "billed_clocks_differ",
    "churn",
    "clocks_differ",
    "cut",
    "cut_while_claiming",
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
    "minimum_nodes_beside_a_worker",
    "mute",
    "name_inherited",
    "name_taken",
    "observers",
    "once_per_date",
    "outage",
    "pause",
    "pause_in_the_loop",
    "pinned_elsewhere",
    "repeated_tasks",
    "settings_change",
    "settings_duel",
    "settings_race",
    "short_pauses",
    "slow_join",
    "source_read_again",
    "stormy",
    "stormy_with_suspends",
    "suspend",
    "suspend_in_the_loop",
    "unanswered_claims",
]

SOON = 1.0
AFTER_DEATH = TIMEOUT + BEAT + 1
"""Within this many seconds other nodes own the tokens of a killed node."""
AFTER_A_STORM = 4 * TIMEOUT
DONE = AFTER_DEATH + 2 * RECLAIM_AFTER


def start_fleet(
    world: World, count: int = 3, style: Style = "task_loop", **options: Any
) -> JobFleet:
    """Start processes that work through a list together."""
    fleet = JobFleet(world, **options)
    for name in "abcdef"[:count]:
        fleet.add(name, style)
    return fleet


def expect_moved(before: dict[int, str], after: dict[int, str], most: float) -> None:
    """Check that some tokens have another owner, and not more than one node's share."""
    moved = sum(before[token] != after[token] for token in range(TOKENS))
    require(0 < moved <= most, "T5", f"{moved} tokens moved, and at most {most:g} may")


def expect_counts(fleet: JobFleet, counts: list[int]) -> None:
    """Check how many tokens the nodes own."""
    found = sorted(len(process.owned) for process in fleet.processes)
    require(found == counts, "TL2", f"the nodes own {found} tokens")


async def begins(world: World) -> None:
    """Three nodes start together on an empty store: all are ready at once, with equal shares."""
    fleet = start_fleet(world)
    await fleet.wait_until_balanced(SOON)
    expect_counts(fleet, [20, 20, 20])
    await fleet.wait_until_done(60)
    fleet.expect_done_once()


async def join(world: World, style: Style = "task_loop") -> None:
    """A node joins while others work: only its share moves, at once."""
    fleet = start_fleet(world, style=style)
    await asyncio.sleep(2)
    before = fleet.owners
    fleet.add("d", style)
    await asyncio.sleep(0.2)
    await fleet.wait_until_balanced(SOON)
    expect_moved(before, fleet.owners, TOKENS / 4)
    await fleet.wait_until_done(60)
    fleet.expect_done_once()


async def join_by_the_loop(world: World) -> None:
    """The same with the loop that the guide prints."""
    await join(world, "guide_loop")


async def leave(world: World, style: Style = "task_loop") -> None:
    """A node leaves cleanly: it hands over first, and only its share moves."""
    fleet = start_fleet(world, style=style)
    await asyncio.sleep(2.5)
    before = fleet.owners
    fleet.process(world.dice.choice("abc")).stop()
    await asyncio.sleep(0.3)
    await fleet.wait_until_balanced(SOON)
    expect_moved(before, fleet.owners, TOKENS / 3)
    await fleet.wait_until_done(60)
    fleet.expect_done_once()


async def leave_by_the_loop(world: World) -> None:
    """The same with the loop that the guide prints."""
    await leave(world, "guide_loop")


async def struck(world: World, strike: Strike, style: Style = "task_loop", **options: Any) -> None:
    """A strike lasts longer than the timeout: other nodes take over, and the node comes back."""
    fleet = start_fleet(world, style=style, **options)
    await asyncio.sleep(world.dice.uniform(1, 3))
    victim = fleet.process(world.dice.choice("abc"))
    at_risk = victim.at_risk
    striking = asyncio.create_task(strike([victim.machine], 3 * TIMEOUT))
    await asyncio.sleep(AFTER_DEATH)
    require(len(set(fleet.owners.values())) == 2, "TL1", f"owned by {set(fleet.owners.values())}")
    require(len(fleet.owners) == TOKENS, "TL1", f"{len(fleet.owners)} tokens are owned")
    await striking
    await fleet.wait_until_balanced(2 * TIMEOUT)
    require(len(fleet.owners) == TOKENS, "TL1", f"{len(fleet.owners)} tokens are owned")
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def kill(world: World) -> None:
    """A process is killed, and another one is started with its name."""
    await struck(world, strikes.kill)


async def kill_in_the_loop(world: World) -> None:
    """The same with the loop that the guide prints."""
    await struck(world, strikes.kill, "guide_loop")


async def pause(world: World) -> None:
    """A process is paused for too long: it refuses by itself, and comes back in a new session."""
    await struck(world, strikes.pause)


async def pause_in_the_loop(world: World) -> None:
    """The same with the loop that the guide prints."""
    await struck(world, strikes.pause, "guide_loop")


async def cut(world: World) -> None:
    """A node is cut off."""
    await struck(world, strikes.cut)


async def mute(world: World) -> None:
    """A node's requests arrive, but it gets no replies."""
    fleet = start_fleet(world)
    await asyncio.sleep(2)
    victim = fleet.process("b")
    at_risk = victim.at_risk
    await strikes.mute([victim.machine], 3 * TIMEOUT)
    # A claim without a reply may have landed, and is closed.
    await fleet.wait_until_balanced(2 * TIMEOUT)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def suspend(world: World) -> None:
    """A machine sleeps with its clock and wakes up trusted: only the store knows better."""
    fleet = start_fleet(world, trusts_clocks=False)
    await asyncio.sleep(2)
    victim = fleet.process("b")
    at_risk = victim.at_risk
    await strikes.suspend([victim.machine], 10 * TIMEOUT)
    await fleet.wait_until_balanced(2 * TIMEOUT)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def suspend_in_the_loop(world: World) -> None:
    """The same with the loop that the guide prints, on a store that reports no changes."""
    fleet = start_fleet(world, style="guide_loop", trusts_clocks=False, store=BilledStore)
    await fleet.wait_until_balanced(4 * BEAT)
    await asyncio.sleep(1)
    victim = fleet.process(world.dice.choice("abc"))
    at_risk = victim.at_risk
    await strikes.suspend([victim.machine], 2.5 * TIMEOUT)
    await fleet.wait_until_balanced(2 * TIMEOUT)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def slow_join(world: World) -> None:
    """Nodes join while some replies are slow: claims are in flight when tokens are revoked."""
    fleet = start_fleet(world, tasks=300)
    await fleet.wait_until_balanced(SOON)
    leader = fleet.leader
    for process in fleet.live:
        if process is not leader:
            process.machine.links[0].weather = Weather(slow=0.5, slow_by=4.0)
    for name in "def":
        await asyncio.sleep(2)
        fleet.add(name)
    await fleet.wait_until_balanced(6 * BEAT)
    await fleet.wait_until_done(300)
    fleet.expect_done_once()


async def cut_while_claiming(world: World) -> None:
    """Replies to claims arrive when their session is dead and was replaced by another."""
    fleet = start_fleet(world, 5, tasks=300)
    await fleet.wait_until_balanced(SOON)
    victims = [fleet.process(name) for name in world.dice.sample("abcde", 3)]
    for victim in victims:
        victim.machine.links[0].weather = Weather(latency=1.0)
    await asyncio.sleep(1.5)
    at_risk = {task for victim in victims for task in victim.at_risk}
    for victim in victims:
        claims, heartbeats = victim.machine.links
        claims.replies_pass = heartbeats.requests_pass = False
    await asyncio.sleep(1.5 * TIMEOUT)
    for victim in victims:
        victim.machine.links[1].mend()
    # A write settles for half a minute.
    await asyncio.sleep(BEAT)
    mend(world)
    await fleet.wait_until_balanced(2 * TIMEOUT)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def lost_claims(world: World) -> None:
    """Claims get no reply and land late, while tokens move all the time."""
    fleet = start_fleet(world, tasks=60)
    await fleet.wait_until_balanced(SOON)
    bad = Weather(late=0.3, late_by=60.0, unanswered=0.3)
    for name in "abc":
        fleet.process(name).machine.links[0].weather = bad
    for name in ("d", "e"):
        await asyncio.sleep(BEAT)
        fleet.add(name)
    await asyncio.sleep(60)
    mend(world)
    await fleet.wait_until_balanced(4 * TIMEOUT)
    await fleet.wait_until_done(300)


async def unanswered_claims(world: World) -> None:
    """A node gets no reply to its claims while its session stands and its tokens move away."""
    fleet = start_fleet(world, tasks=120)
    await fleet.wait_until_balanced(SOON)
    victim = fleet.process(world.dice.choice("abc"))
    claims, _ = victim.machine.links
    claims.weather = Weather(latency=1.0)
    await asyncio.sleep(world.dice.uniform(1.5, 2.5))
    claims.replies_pass = False
    for name in "def":
        fleet.add(name)
    # A write settles for half a minute.
    await asyncio.sleep(world.dice.uniform(45, 70))
    mend(world)
    await fleet.wait_until_balanced(2 * TIMEOUT)
    await fleet.wait_until_done(DONE)


async def short_pauses(world: World) -> None:
    """Pauses that are shorter than the timeout change nothing."""
    fleet = start_fleet(world, tasks=300)
    await asyncio.sleep(2)
    before = fleet.owners
    for name in "abc":
        await strikes.pause([fleet.process(name).machine], TIMEOUT - BEAT - 1.5)
        await asyncio.sleep(BEAT)
        require(fleet.owners == before, "T5", "tokens moved during a short pause")
    await fleet.wait_until_done(120)
    fleet.expect_done_once()


async def outage(world: World) -> None:
    """No node reaches the store: none dies of it, and no token moves."""
    fleet = start_fleet(world)
    await asyncio.sleep(2)
    before = fleet.owners
    await strikes.cut(list(world.nodes.values()), 10 * TIMEOUT)
    require(fleet.owners == {}, "T1", "tokens are owned without a session that is trusted")
    await fleet.wait_until_balanced(2 * BEAT)
    require(fleet.owners == before, "T5", "tokens moved because the store was unreachable")
    await fleet.wait_until_done(60)
    fleet.expect_done_once()


async def leaders_die(world: World) -> None:
    """The leader is killed in the middle of a handover; the next leader continues it."""
    fleet = start_fleet(world)
    await asyncio.sleep(2)
    fleet.add("d")
    await asyncio.sleep(world.dice.uniform(0, 0.3))
    leader = fleet.leader
    at_risk = leader.at_risk
    leader.machine.kill()
    await fleet.wait_until_balanced(2 * AFTER_DEATH)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def leaders_die_waiting(world: World) -> None:
    """The leader is killed while a live node has not given up its tokens yet."""
    fleet = start_fleet(world)
    await fleet.wait_until_balanced(SOON)
    fleet.add("d")
    await asyncio.sleep(0.2)
    await fleet.wait_until_balanced(SOON)
    leader = fleet.leader
    silent = world.dice.choice([process for process in fleet.live if process is not leader])
    # It has acknowledged before. Its session sends heartbeats on another link.
    silent.machine.links[0].requests_pass = False
    fleet.add("e")
    await asyncio.sleep(1)
    at_risk = leader.at_risk
    leader.machine.kill()
    await asyncio.sleep(2 * TIMEOUT)
    mend(world)
    await fleet.wait_until_balanced(2 * TIMEOUT)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def all_die(world: World) -> None:
    """All processes are killed at once; processes that start later do the rest."""
    fleet = start_fleet(world)
    await asyncio.sleep(2)
    at_risk = {task for process in fleet.processes for task in process.at_risk}
    await strikes.kill(list(world.nodes.values()), 5)
    await fleet.wait_until_balanced(2 * AFTER_DEATH)
    await fleet.wait_until_done(DONE)
    fleet.expect_done_once(but=at_risk)


async def all_leave(world: World) -> None:
    """All nodes leave cleanly, one by one; a later node owns everything at once."""
    fleet = start_fleet(world, tasks=200)
    await asyncio.sleep(1)
    for process in fleet.live:
        process.stop()
        await asyncio.sleep(world.dice.uniform(0, 0.5))
    await asyncio.sleep(BEAT)
    require(fleet.owners == {}, "T1", "tokens are owned after all nodes left")
    fleet.add("late")
    await asyncio.sleep(0.2)
    await fleet.wait_until_balanced(SOON)
    await fleet.wait_until_done(120)
    fleet.expect_done_once()


async def churn(world: World) -> None:
    """Nodes come and go each second."""
    fleet = start_fleet(world, tasks=300)
    for number in range(12):
        await asyncio.sleep(1)
        if number % 2:
            processes = [process for process in fleet.processes if process.is_working]
            world.dice.choice(processes).stop()
        else:
            fleet.add(f"n{number}")
    await fleet.wait_until_balanced(BEAT)
    await fleet.wait_until_done(120)
    fleet.expect_done_once()


async def source_read_again(world: World) -> None:
    """Task loops that read the pending tasks again do each task once, while nodes come and go."""
    fleet = start_fleet(world, reads_source_again=True)
    await asyncio.sleep(2)
    fleet.add("d")
    fleet.process("a").stop()
    await fleet.wait_until_done(60)
    fleet.expect_done_once()


async def clocks_differ(world: World) -> None:
    """A node whose wall clock is five minutes off works like the others."""
    fleet = JobFleet(world)
    for name, skew in (("a", 0.0), ("b", -300.0), ("c", 300.0)):
        fleet.add(name, world.dice.choice(("task_loop", "guide_loop")), skew=skew)
    await fleet.wait_until_balanced(SOON)
    expect_counts(fleet, [20, 20, 20])
    await asyncio.sleep(1.5)
    fleet.process(world.dice.choice("abc")).stop()
    await fleet.wait_until_done(60)
    fleet.expect_done_once()


async def billed_clocks_differ(world: World) -> None:
    """The same on a store without a clock."""
    fleet = JobFleet(world, tasks=200, store=BilledStore)
    for name, skew in (("a", 0.0), ("b", -300.0), ("c", 300.0)):
        fleet.add(name, "guide_loop", skew=skew)
    await fleet.wait_until_balanced(6 * BEAT)
    await asyncio.sleep(1.5)
    fleet.process(world.dice.choice("abc")).stop()
    await fleet.wait_until_done(120)
    fleet.expect_done_once()


async def billed(world: World) -> None:
    """On a store without notifications and without a clock, heartbeats announce changes."""
    fleet = start_fleet(world, store=BilledStore)
    await fleet.wait_until_balanced(4 * BEAT)
    fleet.add("d")
    await asyncio.sleep(0.2)
    fleet.process("a").stop()
    await fleet.wait_until_balanced(30 + 4 * BEAT)
    await fleet.wait_until_done(120)
    fleet.expect_done_once()


async def name_taken(world: World) -> None:
    """A second process with a name waits and is refused; the error names the first process."""
    fleet = start_fleet(world, 1)
    fleet.wait_on_enter = 20
    await asyncio.sleep(1)
    fleet.add("twin", node="a")
    await asyncio.sleep(30)
    refused = next(process for process in fleet.processes if process.machine.name == "twin")
    require(isinstance(refused.error, NameTaken), "T8", f"not refused: {refused.error!r}")
    assert "process 4242 on host-of-a" in str(refused.error)
    require(set(fleet.owners.values()) == {"a"}, "T8", "the second process owns tokens")
    fleet.expect_done_once()


async def name_inherited(world: World) -> None:
    """A second process takes the name when the first dies; the first finds it taken later."""
    fleet = start_fleet(world, 1)
    fleet.wait_on_enter = 120
    await asyncio.sleep(2)
    at_risk = fleet.process("a").at_risk
    fleet.add("twin", node="a")
    await strikes.pause([fleet.process("a").machine], 4 * TIMEOUT)
    require(set(fleet.owners.values()) == {"twin"}, "T8", "the name was not taken over")
    first = fleet.process("a")
    await fleet.wait_until_done(DONE)
    await asyncio.sleep(2 * TIMEOUT)
    assert first.node is not None
    failure = first.node.failure
    require(isinstance(failure, NameTaken), "T8", f"not refused: {failure!r}")
    require(set(fleet.owners.values()) == {"twin"}, "T8", "the first process owns tokens again")
    fleet.expect_done_once(but=at_risk)


async def observers(world: World) -> None:
    """An observer joins, may be the leader, and owns nothing."""
    fleet = JobFleet(world, tasks=30)
    fleet.add("watcher", "idle", is_observer=True)
    await asyncio.sleep(1)
    fleet.add("worker")
    await asyncio.sleep(0.2)
    await fleet.wait_until_balanced(SOON)
    watcher = fleet.process("watcher")
    assert watcher.node is not None
    assert watcher.node.is_leader
    require(not watcher.owned, "T9", "an observer owns tokens")
    require(set(fleet.owners.values()) == {"worker"}, "TL1", "the worker does not own all tokens")
    await fleet.wait_until_done(60)


async def minimum_nodes(world: World) -> None:
    """A node that waits for `minimum_nodes` is ready when they have joined, and not before."""
    fleet = JobFleet(world, tasks=30, minimum_nodes=2)
    fleet.add("a")
    await asyncio.sleep(20)
    require(len(fleet.pending()) == 30, "T9", "tasks were done before enough nodes had joined")
    require(not fleet.owners, "T9", "a node that waits for others owns tokens")
    fleet.add("b")
    await fleet.wait_until_done(20)
    fleet.expect_done_once()


async def minimum_nodes_beside_a_worker(world: World) -> None:
    """A node that waits for others takes nothing from those that work, and joins them later."""
    fleet = JobFleet(world, tasks=90, longest_task=1.0)
    fleet.wait_on_enter = 600
    fleet.add("worker")
    await fleet.wait_until_balanced(SOON)
    fleet.add("a", minimum_nodes=3)
    for _ in range(60):
        await asyncio.sleep(1)
        owners = set(fleet.owners.values())
        require(owners == {"worker"}, "T9", f"{owners} own tokens, not the worker alone")
    fleet.add("b", minimum_nodes=3)
    await asyncio.sleep(2 * BEAT)
    await fleet.wait_until_balanced(SOON)
    owners = set(fleet.owners.values())
    require(owners == {"worker", "a", "b"}, "TL1", f"only {owners} own tokens")
    await fleet.wait_until_done(120)
    fleet.expect_done_once()


async def pinned_elsewhere(world: World) -> None:
    """A node claims nothing that it has pinned to another one, whatever the leader is doing."""
    fleet = start_fleet(world, 3, "idle", tasks=60)
    await asyncio.sleep(0.2)
    await fleet.wait_until_balanced(SOON)
    (leader,) = (each for each in fleet.live if each.node is not None and each.node.is_leader)
    node = fleet.process("a").node
    assert node is not None
    pinned: dict[str, int] = {}
    for joining in "defgh":
        # The leader has something to decide, slowly, and has often read the pins before these.
        for link in leader.machine.links:
            link.weather = Weather(latency=0.2)
        fleet.add(joining, "idle")
        await asyncio.sleep(world.dice.uniform(0, 1))
        some = {task: node.token(task) for task in list(filter(node.can_claim, fleet.tasks))[:3]}
        await node.pins.add("a", [Pin(task=t, token=some[t], patterns=("b",)) for t in some])
        await node.withhold_pinned(some)
        pinned |= some
        for _ in range(200):
            claimable = list(filter(node.can_claim, pinned))
            require(not claimable, "T11", f"{claimable} are pinned elsewhere and may be claimed")
            await asyncio.sleep(0.01)
        for link in leader.machine.links:
            link.mend()
        await asyncio.sleep(BEAT)
    other = fleet.process("b").node
    assert other is not None
    left = [task for task in pinned if not other.can_claim(task)]
    require(not left, "TL1", f"{left} are pinned to a node that may not claim them")


async def once_per_date(world: World) -> None:
    """A task that is done is not done again on that date, although the list still names it."""
    fleet = start_fleet(world, 2, "guide_loop", tasks=30, once_per_date=True)
    fleet.lists_done_tasks = True
    await asyncio.sleep(60)
    fleet.process("a").stop()
    await asyncio.sleep(30)
    require(set(fleet.ended) == set(fleet.tasks), "TL3", "not everything was done")
    fleet.expect_done_once()


async def a_date_again(world: World) -> None:
    """A date is used again by other processes, by the same one, and after tokens have moved.

    What is done on it stays done; on the next date everything is done once more.
    """
    fleet = start_fleet(
        world, 2, "guide_loop", tasks=30, longest_task=4.0, once_per_date=True, handover_memory=20.0
    )
    fleet.lists_done_tasks = True
    await asyncio.sleep(world.dice.uniform(2, 8))
    # Tokens move while their tasks run; these are done soon after, by the old owner.
    fleet.add("b2", "guide_loop")
    await asyncio.sleep(90)
    for process in fleet.live:
        process.stop()
    await asyncio.sleep(2 * BEAT)
    # Other processes, after all have left; their tokens change hands.
    for name in world.dice.sample(("a", "c", "d"), 2):
        fleet.add(name, "guide_loop")
        await asyncio.sleep(world.dice.uniform(0, 2 * BEAT))
    await asyncio.sleep(30)
    fleet.add("e", "guide_loop")
    await asyncio.sleep(30)
    require(set(fleet.ended) == set(fleet.tasks), "TL3", "not everything was done")
    fleet.expect_done_once()
    for process in fleet.live:
        process.stop()
    await asyncio.sleep(BEAT)
    fleet.add("f", "guide_loop", day=DAY + timedelta(days=1))
    await asyncio.sleep(180)
    counts = set(fleet.ended.values())
    require(counts == {2}, "T7", f"tasks were done {counts} times on two dates")


async def repeated_tasks(world: World) -> None:
    """Without `once_per_date` tasks are done again, as in the guide."""
    fleet = start_fleet(world, 2, "guide_loop", tasks=30)
    fleet.lists_done_tasks = True
    await asyncio.sleep(60)
    assert fleet.done_twice == set(fleet.tasks)


OTHER: dict[str, Any] = {"total_tokens": 40, "hash_function": "sha256", "site": "other"}


async def settings_change(world: World) -> None:
    """A fleet is started again with other settings: no task that is done is done again."""
    fleet = start_fleet(world, 3, "guide_loop", tasks=60, longest_task=1.0, once_per_date=True)
    fleet.lists_done_tasks = True
    await asyncio.sleep(world.dice.uniform(3, 8))
    at_risk = set[str]()
    for process in fleet.live:
        if world.dice.random() < 0.5:
            # What was done and not marked is done again, as after every kill.
            assert process.node is not None
            at_risk |= process.at_risk | set(process.node.running)
            process.machine.kill()
        else:
            process.stop()
    for name in "def":
        fleet.add(name, "guide_loop", **OTHER)
    await asyncio.sleep(AFTER_DEATH + BEAT)
    await fleet.wait_until_balanced(AFTER_DEATH)
    expect_counts(fleet, [0, 0, 0, 13, 13, 14])
    await asyncio.sleep(DONE)
    require(set(fleet.ended) == set(fleet.tasks), "TL3", "not everything was done")
    fleet.expect_done_once(but=at_risk)


async def settings_race(world: World) -> None:
    """Nodes with three kinds of settings start and die at once; only one kind gets in."""
    fleet = start_fleet(world, 1, "idle")
    await fleet.wait_until_balanced(SOON)
    fleet.process("a").stop()
    await asyncio.sleep(SOON)
    kinds: list[dict[str, Any]] = [{}, OTHER, {"total_tokens": 30}]
    for number in range(8):
        machine = fleet.add(f"n{number}", "idle", **world.dice.choice(kinds))
        await asyncio.sleep(world.dice.uniform(0.001, 0.1))
        # So that one node takes its steps between those of another.
        for link in machine.links:
            link.weather = Weather(latency=world.dice.choice((0.01, 0.1, 0.3)))
        if world.dice.random() < 0.4:
            machine.kill()
    await asyncio.sleep(2 * AFTER_DEATH)
    await fleet.wait_until_balanced(AFTER_DEATH)
    # The others get in when the first have left.
    first = [process for process in fleet.live if process.owned]
    for process in first:
        process.stop()
    fleet.add("late", "idle", **world.dice.choice(kinds))
    await asyncio.sleep(2 * AFTER_DEATH)
    await fleet.wait_until_balanced(AFTER_DEATH)
    require(bool(fleet.owners), "TL1", "no node got in")


async def settings_duel(world: World) -> None:
    """Two nodes with different settings start at once, one with the fleet's, again and again."""
    fleet = start_fleet(world, 1, "idle")
    await fleet.wait_until_balanced(SOON)
    fleet.process("a").stop()
    for number in range(12):
        await asyncio.sleep(SOON)
        machines = []
        # The second takes its steps between two steps of the first.
        for kind, options in enumerate(world.dice.sample(({}, OTHER), 2)):
            machines.append(fleet.add(f"n{number}-{kind}", "idle", **options))
            if kind == 0:
                await asyncio.sleep(0.001)
                for link in machines[0].links:
                    link.weather = Weather(latency=0.5)
                await asyncio.sleep(world.dice.uniform(1, 5))
        await asyncio.sleep(2 * BEAT)
        await until(lambda: bool(fleet.owners), "one gets in", 2 * BEAT, invariant="TL1")
        owners = set(fleet.owners.values())
        require(len(owners) == 1, "TL1", f"{owners or 'nobody'} got in")
        for machine in machines:
            if machine.name in owners:
                fleet.process(machine.name).stop()
            else:
                machine.kill()


async def weather(world: World, *strikes: Strike, trusts_clocks: bool = True) -> None:
    """All faults for five minutes; then all tokens are owned and all tasks done within bounds."""
    fleet = start_fleet(
        world,
        4,
        tasks=300,
        longest_task=6.0,
        reads_source_again=bool(world.seed % 2),
        store=BilledStore if world.seed % 3 == 0 else MemoryStore,
        trusts_clocks=trusts_clocks,
    )
    await storm(world, 300, draw_forecast(world, strikes))
    await fleet.wait_until_balanced(AFTER_A_STORM)
    await fleet.wait_until_done(600)


async def stormy(world: World) -> None:
    """A storm in which clocks keep their promise."""
    await weather(world, *STRIKES)


async def stormy_with_suspends(world: World) -> None:
    """A storm in which clocks stop: what the store accepts must still be right."""
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
    unanswered_claims,
    short_pauses,
    outage,
    leaders_die,
    leaders_die_waiting,
    all_die,
    all_leave,
    churn,
    source_read_again,
    clocks_differ,
    billed_clocks_differ,
    billed,
    name_taken,
    name_inherited,
    observers,
    minimum_nodes,
    minimum_nodes_beside_a_worker,
    pinned_elsewhere,
    once_per_date,
    a_date_again,
    repeated_tasks,
    settings_change,
    settings_race,
    settings_duel,
]
