"""Faults of nodes and links: single strikes, and storms that draw many of them from the dice.

A strike takes nodes and seconds, and undoes what it did: `await strikes.cut(nodes, 60)`. Several
may overlap; if two do the same to one node, the first to end ends both.

A storm draws a random part of all faults, each at a random strength. If it always had all of them,
rare combinations and quiet phases, in which other bugs hide, would never occur. When a storm is
over everything is mended, so that a story can check whether its fleet recovers.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from jobsync.testing.network import Link
from jobsync.testing.nodes import Node
from jobsync.testing.weather import CALM, FAULTS, Weather
from jobsync.testing.world import World

__all__ = [
    "STRIKES",
    "Forecast",
    "Strike",
    "block",
    "cut",
    "draw_forecast",
    "drift",
    "flap",
    "forbid",
    "kill",
    "leave",
    "mend",
    "mute",
    "pause",
    "power_off",
    "step_wall",
    "storm",
    "suspend",
    "swizzle",
    "throttle",
    "widen",
]

Strike: TypeAlias = Callable[[Sequence[Node], float], Coroutine[Any, Any, None]]
"""Does something to nodes or their links for so many seconds, and undoes it."""

_RATES = (0.951, 1.049)
"""The range of the rates of clocks that drift."""

_STEPS = (-86_400.0, -3600.0, -30.0, 30.0, 3600.0, 86_400.0)
"""The seconds by which a wall clock may jump."""

_FLAP = 5.0
"""Seconds that a flapping network is down, and up again."""


_CALLS = (
    *("get", "write", "heads", "scan", "append", "read", "discard", "bury", "drop", "age", "now"),
    *("wait", "push", "claim", "settle", "extend", "end_claims", "redrive", "forget", "rows"),
)
"""The calls of stores and queue backends that bad weather may strike alone."""


async def pause(nodes: Sequence[Node], seconds: float) -> None:
    """Pause processes, and resume them."""
    for node in nodes:
        node.pause()
    await asyncio.sleep(seconds)
    for node in nodes:
        node.resume()


async def suspend(nodes: Sequence[Node], seconds: float) -> None:
    """Suspend machines with their clocks, so that processes do not notice the time that passes."""
    for node in nodes:
        node.suspend()
    await asyncio.sleep(seconds)
    for node in nodes:
        node.resume()


async def block(nodes: Sequence[Node], seconds: float) -> None:
    """Block the main threads, as code does that never awaits."""
    for node in nodes:
        node.block()
    await asyncio.sleep(seconds)
    for node in nodes:
        node.unblock()


async def kill(nodes: Sequence[Node], seconds: float) -> None:
    """Kill processes; start others with their names after a while."""
    for node in _list_startable(nodes):
        node.kill()
    await asyncio.sleep(seconds)
    for node in _list_missing(nodes):
        node.restart()


async def power_off(nodes: Sequence[Node], seconds: float) -> None:
    """Switch machines off; switch them on after a while."""
    for node in _list_startable(nodes):
        node.kill()
    await asyncio.sleep(seconds)
    for node in _list_missing(nodes):
        node.reboot()


async def leave(nodes: Sequence[Node], seconds: float) -> None:
    """Stop processes cleanly, one after the other; start each again after a while."""
    for node in _list_startable(nodes):
        await node.stop()
        await asyncio.sleep(seconds / len(nodes))
        for stopped in _list_missing([node]):
            stopped.restart()


async def cut(nodes: Sequence[Node], seconds: float) -> None:
    """Cut nodes off. For all nodes at once, it is an outage of the store."""
    _set_passage(nodes, requests=False, replies=False)
    await asyncio.sleep(seconds)
    _set_passage(nodes, requests=True, replies=True)


async def mute(nodes: Sequence[Node], seconds: float) -> None:
    """Cut one direction only: requests arrive and are executed, replies do not come back."""
    _set_passage(nodes, requests=True, replies=False)
    await asyncio.sleep(seconds)
    _set_passage(nodes, requests=True, replies=True)


async def flap(nodes: Sequence[Node], seconds: float) -> None:
    """Cut nodes off and reconnect them, at a fixed interval."""
    for _ in range(1 + int(seconds / (2 * _FLAP))):
        await cut(nodes, _FLAP)
        await asyncio.sleep(_FLAP)


async def swizzle(nodes: Sequence[Node], seconds: float) -> None:
    """Cut nodes off one by one, and reconnect them in another order."""
    dice = nodes[0].world.dice
    for passes in (False, True):
        for node in dice.sample(nodes, len(nodes)):
            _set_passage([node], requests=passes, replies=passes)
            await asyncio.sleep(seconds / (2 * len(nodes)))


async def throttle(nodes: Sequence[Node], seconds: float) -> None:
    """Refuse every request as one too many."""
    for link in _list_links(nodes):
        link.throttled = True
    await asyncio.sleep(seconds)
    for link in _list_links(nodes):
        link.throttled = False


async def forbid(nodes: Sequence[Node], seconds: float) -> None:
    """Refuse every request for lack of permission."""
    for link in _list_links(nodes):
        link.forbidden = True
    await asyncio.sleep(seconds)
    for link in _list_links(nodes):
        link.forbidden = False


async def step_wall(nodes: Sequence[Node], seconds: float) -> None:
    """Move the wall clocks, forward or back, and later back again."""
    step = nodes[0].world.dice.choice(_STEPS)
    for node in nodes:
        node.clock.step_wall(step)
    await asyncio.sleep(seconds)
    for node in nodes:
        # The current clock of the machine, which may have been rebooted.
        node.world.nodes[node.name].clock.step_wall(-step)


async def drift(nodes: Sequence[Node], seconds: float) -> None:
    """Change the rates of clocks, which then differ by up to 10 %, for good."""
    for node in nodes:
        node.clock.rate = node.world.dice.uniform(*_RATES)
    await asyncio.sleep(seconds)


STRIKES: tuple[Strike, ...] = (
    block,
    cut,
    drift,
    flap,
    forbid,
    kill,
    leave,
    mute,
    pause,
    power_off,
    step_wall,
    swizzle,
    throttle,
)
"""All strikes under which clocks keep running. To stop clocks too, add `suspend`."""


def _list_startable(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that have a program to restart."""
    return [node for node in nodes if node.has_program]


def _list_missing(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are dead and have no successor yet."""
    return [node for node in nodes if not node.is_alive and node.world.nodes[node.name] is node]


def _list_links(nodes: Sequence[Node]) -> list[Link]:
    return [link for node in nodes for link in node.links]


def _set_passage(nodes: Sequence[Node], *, requests: bool, replies: bool) -> None:
    for link in _list_links(nodes):
        link.requests_pass, link.replies_pass = requests, replies


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a storm."""

    weather: Weather
    """The faults of requests where the weather is bad."""
    strikes: tuple[Strike, ...]
    """The faults of nodes and links."""
    every: float
    """Maximum seconds from one strike to the next."""
    lasting: float
    """Maximum duration of a strike in seconds."""


def draw_forecast(world: World, strikes: Iterable[Strike] = STRIKES) -> Forecast:
    """Draw the faults of a storm: none, few or many, each at a strength of its own."""
    dice = world.dice
    share = dice.choice((0.0, 0.2, 0.5, 0.8))

    def chance() -> float:
        return dice.choice((0.02, 0.1, 0.4)) if dice.random() < share else 0.0

    weather = Weather(
        latency=dice.choice((0.001, 0.01, 0.2)),
        slow=chance(),
        refused=chance(),
        undecided=chance(),
        lost=chance(),
        unanswered=chance(),
        late=chance(),
        late_by=dice.choice((10.0, 60.0, 600.0)),
        doubled=chance(),
        corrupt=chance(),
    )
    return Forecast(
        weather=widen(world, weather),
        strikes=tuple(strike for strike in strikes if dice.random() < share),
        every=dice.choice((10.0, 60.0, 300.0)),
        lasting=dice.choice((5.0, 20.0, 60.0, 300.0)),
    )


def widen(world: World, weather: Weather) -> Weather:
    """Add faults that follow others, slow replies, or a choice of calls, if the world is varied."""
    if not world.is_varied:
        return weather
    dice = world.surprises
    calls = dice.choice((None, frozenset(dice.sample(_CALLS, dice.choice((1, 3, 6))))))
    chances: dict[str, float] = {
        "again": dice.choice((0.0, 0.3, 0.8)),
        "slow_reply": dice.choice((0.0, 0.0, 0.1)),
    }
    if calls is not None:
        chances[dice.choice(FAULTS)] = dice.choice((0.1, 0.4))
    return msgspec.structs.replace(weather, **chances, calls=calls)


async def storm(world: World, seconds: float, forecast: Forecast | None = None) -> None:
    """Inject faults into every node that has a link, for so many seconds; then mend everything.

    Args:
        world: provides the nodes and the dice.
        seconds: the duration.
        forecast: the faults; drawn by default.
    """
    forecast = forecast or draw_forecast(world)
    end = world.loop.time() + seconds
    async with asyncio.TaskGroup() as group:
        while (left := end - world.loop.time()) > 0:
            nodes = [node for node in world.nodes.values() if node.is_alive and node.links]
            if nodes:
                _change_weather(world, world.dice.choice(nodes), forecast)
            if nodes and forecast.strikes:
                strike = world.dice.choice(forecast.strikes)
                lasting = min(left, world.dice.uniform(0, forecast.lasting))
                group.create_task(strike(_choose_nodes(world, nodes), lasting))
            await asyncio.sleep(min(left, world.dice.uniform(0, forecast.every)))
    mend(world)


def mend(world: World) -> None:
    """End all faults: all nodes run, all links work, the weather is calm."""
    for node in list(world.nodes.values()):
        if not node.is_alive and node.has_program:
            node.restart()
            continue
        if node.is_paused:
            node.resume()
        if node.host().is_blocked:
            node.unblock()
        for link in node.links:
            link.mend()


def _choose_nodes(world: World, nodes: list[Node]) -> list[Node]:
    """Choose usually one node, sometimes several or all."""
    count = world.dice.choice((1, 1, 1, 1, 1 + world.dice.randrange(len(nodes)), len(nodes)))
    return world.dice.sample(nodes, count)


def _change_weather(world: World, node: Node, forecast: Forecast) -> None:
    """Make the weather bad or calm on the links of a node."""
    weather = world.dice.choice((CALM, forecast.weather))
    for link in node.links:
        link.weather = weather
