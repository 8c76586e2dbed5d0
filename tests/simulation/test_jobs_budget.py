"""What a node that has nothing to do asks of the store: counted in the simulated world."""

import asyncio

from crews import BEAT, Crews

from jobsync.testing import World

WARM_UP = 120.0
BEATS = 120


def count_idle(members: int) -> tuple[dict[str, float], str]:
    """Let nodes idle; give each one's requests a beat, and who leads."""
    world = World(1)
    counts: dict[str, float] = {}

    async def story() -> str:
        crews = Crews(world, tasks=0)
        for number in range(members):
            crews.add(f"node-{number}", "idle")
        await asyncio.sleep(WARM_UP)
        before = {hand.node.name: hand.meter.requests for hand in crews.hands}
        await asyncio.sleep(BEATS * BEAT)
        for hand in crews.hands:
            name = hand.node.name
            # By its own clock: a fast one beats more often.
            beats = BEATS * hand.node.clock.rate
            counts[name] = (hand.meter.requests - before[name]) / beats
        return crews.leader.node.name

    leader = world.run(story)
    assert world.judge() == []
    return counts, leader


def test_an_idle_node_asks_for_little() -> None:
    """A beat, a look, and now and then the assignment: under 30 statements a minute."""
    counts, leader = count_idle(5)
    followers = {name: count for name, count in counts.items() if name != leader}
    assert max(followers.values()) <= 2.2
    assert counts[leader] <= 2.5


def test_what_an_idle_node_asks_for_does_not_grow_with_the_fleet() -> None:
    """Twenty nodes cost each of them what five do."""
    few, _ = count_idle(5)
    many, _ = count_idle(20)
    assert max(many.values()) <= max(few.values()) + 0.05
