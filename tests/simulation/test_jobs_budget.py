"""The requests of an idle node to the store, counted in the simulated world."""

import asyncio

from job_fleet import BEAT, JobFleet

from jobsync.testing import World

WARM_UP = 120.0
HEARTBEATS = 120


def count_idle(members: int) -> tuple[dict[str, float], set[str]]:
    """Run idle nodes; return the requests of each per heartbeat, and who led meanwhile."""
    world = World(1)
    counts: dict[str, float] = {}

    async def story() -> set[str]:
        fleet = JobFleet(world, tasks=0)
        for number in range(members):
            fleet.add(f"node-{number}", "idle")
        await asyncio.sleep(WARM_UP)
        leaders = {fleet.leader.machine.name}
        before = {process.machine.name: process.meter.requests for process in fleet.processes}
        await asyncio.sleep(HEARTBEATS * BEAT)
        for process in fleet.processes:
            name = process.machine.name
            # By its own clock: a fast one sends heartbeats more often.
            heartbeats = HEARTBEATS * process.machine.clock.rate
            counts[name] = (process.meter.requests - before[name]) / heartbeats
        # A mandate ends once in a while, and another node leads.
        return leaders | {fleet.leader.machine.name}

    leaders = world.run(story)
    assert world.judge() == []
    return counts, leaders


def test_an_idle_node_asks_for_little() -> None:
    """A heartbeat, a poll, and sometimes the assignment: under 30 statements a minute.

    A leader also reads the sessions that it waits for, all in one statement.
    """
    counts, leaders = count_idle(5)
    followers = {name: count for name, count in counts.items() if name not in leaders}
    assert max(followers.values()) <= 2.2
    assert max(counts.values()) <= 3.5


def test_what_an_idle_node_asks_for_does_not_grow_with_the_fleet() -> None:
    """With twenty nodes each sends as many requests as with five."""
    few, few_leaders = count_idle(5)
    many, many_leaders = count_idle(20)
    most = [
        max(count for name, count in counts.items() if name not in leaders)
        for counts, leaders in ((few, few_leaders), (many, many_leaders))
    ]
    assert most[1] <= most[0] + 0.05
    assert max(many.values()) <= 3.5
