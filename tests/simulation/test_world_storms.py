"""Strikes and storms: each has its effect and undoes it."""

import asyncio

import pytest

from jobsync import Conflict, Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.memory import MemoryStore
from jobsync.testing import (
    CALM,
    Forecast,
    Link,
    Node,
    Report,
    Weather,
    World,
    check_repeats,
    connect,
    draw_forecast,
    run_story,
    storm,
    strikes,
)
from jobsync.testing.strikes import STRIKES, Strike

ERRORS = (Conflict, Corrupt, Misconfigured, OutcomeUnknown, Unavailable)


def fleet(world: World, size: int = 3) -> list[Node]:
    """Start nodes with links that keep counting despite all errors."""
    shared = MemoryStore(components=world.components)

    async def count(node: Node) -> None:
        store = connect(node, shared)
        while True:
            try:
                key = f"n/{world.dice.randrange(2)}"
                record = await store.get(key, tombstones=True)
                value = 1 if record is None or record.deleted else record.value + 1
                await (store.put(record, value) if record else store.create(key, value))
            except ERRORS:
                world.note(node.name, "trouble")
            await node.clock.sleep(2)

    for name in "abc"[:size]:
        world.node(name).start(count)
    return list(world.nodes.values())


async def rough_day(world: World) -> None:
    """Count during a storm of any kind, and in the calm after it."""
    fleet(world)
    await asyncio.sleep(10)
    await storm(world, 600, draw_forecast(world, (*STRIKES, strikes.suspend)))
    await asyncio.sleep(60)
    start = len(world.history)
    await asyncio.sleep(60)
    for name in world.nodes:
        counted = [each for each in world.history[start:] if each.node == name]
        assert sum(each.what == "commit" for each in counted) > 10


@pytest.fixture(scope="module")
def days() -> list[Report]:
    """The reports of some days."""
    return [run_story(rough_day, seed) for seed in range(12)]


def test_a_fleet_recovers_from_a_storm(days: list[Report]) -> None:
    """The contract holds during the storm, and every node counts afterwards."""
    assert [each for report in days for each in report.violations] == []


def test_quiet_and_wild_runs_both_occur(days: list[Report]) -> None:
    """Depending on the seed there are no, some or very many faults."""
    faults = sorted(report.faults for report in days)
    assert faults[0] == 0
    assert faults[-1] > 200
    assert len(set(faults)) > 6


def test_a_storm_is_reproducible() -> None:
    """The same seed gives the same storm, even in processes that hash differently."""
    check_repeats(rough_day, seed=3)


def test_every_fault_is_in_some_forecasts_and_not_in_others() -> None:
    """Each is left out often, so that others occur without it."""
    forecasts = [draw_forecast(World(seed)) for seed in range(40)]
    for strike in STRIKES:
        assert 5 < sum(strike in forecast.strikes for forecast in forecasts) < 35
    for fault in ("slow", "refused", "undecided", "lost", "late", "doubled", "corrupt"):
        assert 5 < sum(getattr(each.weather, fault) > 0 for each in forecasts) < 38


def test_an_empty_forecast_injects_no_fault() -> None:
    """A storm without faults leaves every node alone."""
    world = World(1)

    async def story() -> None:
        fleet(world)
        calm = Forecast(weather=CALM, strikes=(), every=10, lasting=10)
        await storm(world, 600, calm)

    world.run(story)
    assert world.faults == 0
    assert not [each for each in world.history if each.what in ("pause", "kill", "stop")]


@pytest.mark.parametrize("strike", [*STRIKES, strikes.suspend], ids=lambda each: each.__name__)
def test_a_strike_is_undone(strike: Strike) -> None:
    """Afterwards every node is alive, runs and reaches the store."""
    world = World(1)

    async def story() -> None:
        nodes = fleet(world)
        await asyncio.sleep(10)
        await strike(nodes, 30)
        await asyncio.sleep(40)
        start = len(world.history)
        await asyncio.sleep(20)
        for node in world.nodes.values():
            assert node.is_alive
            assert not node.is_paused
            assert abs(node.clock.skew) < 10
            assert any(
                each.node == node.name and each.what == "commit" for each in world.history[start:]
            )

    world.run(story)
    assert world.judge() == []


def count_cuts(strike: Strike, seconds: float) -> list[int]:
    """Return how many of three links are cut, in the middle of each second."""
    world = World(1)

    async def story() -> list[int]:
        nodes = fleet(world)
        await asyncio.sleep(1)
        links = [link for node in nodes for link in node.links]
        striking = asyncio.create_task(strike(nodes, seconds))
        await asyncio.sleep(0.5)
        counts = []
        for _ in range(24):
            counts.append(sum(not link.requests_pass for link in links))
            await asyncio.sleep(1)
        await striking
        return counts

    return world.run(story)


def test_an_outage_cuts_all_nodes() -> None:
    """All links are cut and restored at once."""
    assert count_cuts(strikes.cut, 10) == [3] * 10 + [0] * 14


def test_a_swizzle_cuts_one_by_one() -> None:
    """Links are cut one after the other, and restored one after the other."""
    counts = count_cuts(strikes.swizzle, 12)
    assert counts == [1, 1, 2, 2, 3, 3, 2, 2, 1, 1, *[0] * 14]


def test_a_flapping_network_has_a_fixed_interval() -> None:
    """It is down and up in turn."""
    assert count_cuts(strikes.flap, 12) == [*[3] * 5, *[0] * 5, *[3] * 5, *[0] * 9]


def test_nodes_without_a_program_are_not_killed() -> None:
    """Nothing could start them again."""
    world = World(1)

    async def story() -> None:
        node = world.node("a")
        Link(world, node, MemoryStore(components=world.components), Weather())
        for strike in (strikes.kill, strikes.power_off, strikes.leave):
            await strike([node], 5)
        assert node.is_alive

    world.run(story)


def test_overlapping_strikes_leave_one_node_of_each_name() -> None:
    """A node that is killed while it stops is started again once."""
    world = World(1)

    async def story() -> None:
        nodes = fleet(world, 1)
        await asyncio.sleep(1)
        nodes[0].pause()
        async with asyncio.TaskGroup() as group:
            group.create_task(strikes.leave(nodes, 5))
            group.create_task(strikes.kill(nodes, 5))
        await asyncio.sleep(100)
        start = len(world.history)
        await asyncio.sleep(10)
        commits = [each for each in world.history[start:] if each.what == "commit"]
        assert 4 <= len(commits) <= 6

    world.run(story)
