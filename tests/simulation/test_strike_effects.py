"""While a strike lasts, the nodes that it is for have this fault and no other; others have none."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from jobsync.stores.memory import MemoryStore
from jobsync.testing import CALM, Forecast, Link, Node, Weather, World, storm, strikes
from jobsync.testing.strikes import STRIKES, Strike, mend

NONE: dict[str, Any] = {
    "alive": True,
    "paused": False,
    "blocked": False,
    "heartbeat_blocked": False,
    "requests": True,
    "replies": True,
    "throttled": False,
    "forbidden": False,
    "calm": True,
    "stopped": False,
    "skew": 7.0,
    "rate": 1.0,
    "boot": 1,
}
"""A node without faults; its wall clock is wrong from the beginning."""


def fleet(world: World) -> list[Node]:
    """Start three nodes with two links each, and a second thread."""
    shared = MemoryStore(components=world.components)

    async def program(node: Node) -> None:
        for _ in range(2):
            Link(world, node, shared)
        node.host("heartbeat").run(asyncio.Event().wait())
        await asyncio.Event().wait()

    for name in "abc":
        world.node(name, skew=7.0).start(program)
    return list(world.nodes.values())


async def look(world: World, name: str) -> dict[str, Any]:
    """Return what is wrong with a node, of which both links must have the same faults."""
    node = world.nodes[name]
    before = node.clock.mono()
    await asyncio.sleep(0.01)
    first, second = (
        {
            "requests": link.requests_pass,
            "replies": link.replies_pass,
            "throttled": link.throttled,
            "forbidden": link.forbidden,
            "calm": link.weather == CALM and not link.withheld,
        }
        for link in node.links
    )
    assert first == second
    return {
        **first,
        "alive": node.is_alive,
        "paused": node.is_paused,
        "blocked": node.host().is_blocked,
        "heartbeat_blocked": node.host("heartbeat").is_blocked,
        "stopped": node.clock.mono() == before,
        "skew": node.clock.skew,
        "rate": node.clock.rate,
        "boot": node.clock.boot(),
    }


def run(strike: Strike, seconds: float, *moments: float) -> list[list[dict[str, Any]]]:
    """Strike b and c; return the states of a, b and c at some moments."""
    world = World(3)

    async def story() -> list[list[dict[str, Any]]]:
        nodes = fleet(world)
        await asyncio.sleep(1)
        striking = asyncio.create_task(strike(nodes[1:], seconds))
        seen = []
        start = world.loop.time()
        for moment in moments:
            await asyncio.sleep(start + moment - world.loop.time())
            seen.append([await look(world, name) for name in "abc"])
        await striking
        return seen

    seen = world.run(story)
    assert world.judge() == []
    return seen


@pytest.mark.parametrize(
    ("strike", "during", "after"),
    [
        (strikes.pause, {"paused": True}, {}),
        (strikes.suspend, {"paused": True, "stopped": True}, {}),
        (strikes.block, {"blocked": True}, {}),
        (strikes.kill, {"alive": False}, {}),
        (strikes.power_off, {"alive": False}, {"boot": 2}),
        (strikes.cut, {"requests": False, "replies": False}, {}),
        (strikes.mute, {"replies": False}, {}),
        (strikes.throttle, {"throttled": True}, {}),
        (strikes.forbid, {"forbidden": True}, {}),
    ],
)
def test_a_strike_has_its_effect_and_no_other(
    strike: Strike, during: dict[str, Any], after: dict[str, Any]
) -> None:
    """From its beginning to its end, on all links and nodes that are struck."""
    begin, end, later = run(strike, 30, 0.5, 29.5, 30.5)
    assert begin == end == [NONE, {**NONE, **during}, {**NONE, **during}]
    assert later == [NONE, {**NONE, **after}, {**NONE, **after}]


def test_clocks_jump_and_come_back() -> None:
    """All by the same step, in wall time alone."""
    during, later = run(strikes.step_wall, 30, 15, 30.5)
    step = during[1]["skew"] - 7.0
    assert abs(step) >= 30
    assert during == [NONE, {**NONE, "skew": 7.0 + step}, {**NONE, "skew": 7.0 + step}]
    assert later == [NONE] * 3


def test_clocks_jump_back_after_a_reboot() -> None:
    """The new clock of the machine shows the wrong time until then."""
    world = World(3)

    async def story() -> None:
        nodes = fleet(world)
        await asyncio.sleep(1)
        striking = asyncio.create_task(strikes.step_wall(nodes[1:], 30))
        await asyncio.sleep(10)
        rebooted = nodes[1].reboot()
        right = world.nodes["a"].clock.wall()
        assert abs(rebooted.clock.wall() - right) >= 30
        await striking
        assert rebooted.clock.wall() - world.nodes["a"].clock.wall() == pytest.approx(0)

    world.run(story)


def test_clocks_drift_for_good() -> None:
    """Each at a rate of its own, which differs by up to 10 % from another."""
    during, later = run(strikes.drift, 30, 15, 90)
    assert during == later
    rates = [each["rate"] for each in during]
    assert rates[0] == 1.0 != rates[1] != rates[2]
    assert all(0.95 <= rate <= 1.05 for rate in rates)
    assert during == [{**NONE, "rate": rate} for rate in rates]


def test_nodes_leave_one_after_the_other() -> None:
    """Each is started again before the next one leaves; both on the same boot."""
    first, second, later = run(strikes.leave, 30, 7.5, 22.5, 30.5)
    gone = {**NONE, "alive": False}
    assert (first, second, later) == ([NONE, gone, NONE], [NONE, NONE, gone], [NONE] * 3)


@pytest.mark.parametrize(("strike", "boot"), [(strikes.kill, 1), (strikes.power_off, 2)])
def test_a_node_that_was_started_meanwhile_is_left_alone(strike: Strike, boot: int) -> None:
    """Somebody else has started its successor; the other one is started by the strike."""
    world = World(3)

    async def story() -> None:
        nodes = fleet(world)
        striking = asyncio.create_task(strike(nodes[1:], 30))
        await asyncio.sleep(10)
        successor = nodes[1].restart()
        await striking
        assert world.nodes["b"] is successor
        assert world.nodes["c"] is not nodes[2]
        assert world.nodes["c"].clock.boot() == boot

    world.run(story)


LINK_FAULTS: dict[str, Any] = {
    "requests_pass": False,
    "replies_pass": False,
    "throttled": True,
    "forbidden": True,
    "withheld": frozenset({"settle"}),
    "weather": Weather(lost=1.0),
}


def break_links(node: Node, name: str) -> None:
    """Add a fault to all links of a node."""
    for link in node.links:
        setattr(link, name, LINK_FAULTS[name])


BREAK: dict[str, Callable[[Node], object]] = {
    "pause": Node.pause,
    "suspend": Node.suspend,
    "block": Node.block,
    "kill": Node.kill,
    **{name: partial(break_links, name=name) for name in LINK_FAULTS},
}


@pytest.mark.parametrize("fault", BREAK)
def test_everything_is_mended(fault: str) -> None:
    """Each fault of each node ends; clocks keep their rates and their errors."""
    world = World(3)

    async def story() -> None:
        nodes = fleet(world)
        await asyncio.sleep(1)
        for node in nodes[1:]:
            BREAK[fault](node)
        nodes[2].clock.rate = 1.04
        broken = [await look(world, name) for name in "abc"]
        assert broken[0] == NONE
        assert NONE not in broken[1:]
        mend(world)
        await asyncio.sleep(1)
        assert [await look(world, name) for name in "ab"] == [NONE, NONE]
        assert await look(world, "c") == {**NONE, "rate": 1.04}

    world.run(story)


def test_ordained_faults_are_mended() -> None:
    """They strike no later request."""
    world = World(3)

    async def story() -> None:
        (link, _), *_ = (node.links for node in await started(world))
        link.ordain("get", "refused")
        mend(world)
        assert await link.get("n") is None
        assert world.faults == 0

    world.run(story)


async def started(world: World) -> list[Node]:
    """Start a fleet; return its nodes when their links are there."""
    nodes = fleet(world)
    await asyncio.sleep(1)
    return nodes


def test_nodes_without_a_program_stay_dead() -> None:
    """Nothing could start them."""
    world = World(3)

    async def story() -> None:
        node = world.node("a")
        node.kill()
        mend(world)
        assert world.nodes["a"] is node
        assert not node.is_alive

    world.run(story)


def test_a_storm_strikes_for_its_time() -> None:
    """It strikes only living nodes with links, draws from its forecast alone, and ends in time."""
    world = World(3)
    struck: list[tuple[float, set[str], float]] = []

    async def note(nodes: Any, seconds: float) -> None:
        struck.append((world.loop.time(), {node.name for node in nodes}, seconds))

    async def story() -> None:
        nodes = await started(world)
        world.node("idle")
        nodes[0].kill()
        world.loop.call_later(50, nodes[1].kill)
        start = world.loop.time()
        weather = msgspec.structs.replace(CALM, lost=0.5)
        await storm(world, 100, Forecast(weather=weather, strikes=(note,), every=5.0, lasting=40.0))
        assert world.loop.time() == pytest.approx(start + 100)
        assert len(struck) > 20
        for at, names, seconds in struck:
            assert names <= ({"b", "c"} if at < start + 50 else {"c"})
            assert names
            assert 0 <= seconds <= min(40.0, start + 100 - at)
        assert {"b", "c"} in [names for _, names, _ in struck]
        assert max(seconds for _, _, seconds in struck) > 20
        assert [await look(world, name) for name in "abc"] == [NONE] * 3

    world.run(story)


def test_no_strike_is_left_out() -> None:
    """Storms draw from all strikes but `suspend`, which stops clocks."""
    public = {getattr(strikes, name) for name in strikes.__all__ if name.islower()}
    others = {strikes.draw_forecast, strikes.mend, strikes.storm, strikes.widen, strikes.suspend}
    assert {*STRIKES} == public - others
