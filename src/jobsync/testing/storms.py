"""Troubles that come in swarms, drawn from a world's dice.

Each storm takes a random part of all troubles, each at a random strength: with everything
at once always, rare combinations drown, and quiet runs, in which other faults hide, never
come. When a storm is over everything is mended, so that a story can go on to ask whether
its fleet has recovered.
"""

import asyncio
from collections.abc import Iterable

import msgspec

from jobsync.testing.network import CALM, Weather
from jobsync.testing.nodes import Node
from jobsync.testing.strikes import STRIKES, Strike
from jobsync.testing.world import World

__all__ = ["Forecast", "draw_forecast", "mend", "storm"]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a storm is made of."""

    weather: Weather
    """What happens to requests where the weather is bad."""
    strikes: tuple[Strike, ...]
    """What happens to nodes and links."""
    every: float
    """Seconds from one strike to the next, at the most."""
    lasting: float
    """Seconds that a strike lasts, at the most."""


def draw_forecast(world: World, strikes: Iterable[Strike] = STRIKES) -> Forecast:
    """Draw a storm: none, few or many of all troubles, each at a strength of its own."""
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
        weather=weather,
        strikes=tuple(strike for strike in strikes if dice.random() < share),
        every=dice.choice((10.0, 60.0, 300.0)),
        lasting=dice.choice((5.0, 20.0, 60.0, 300.0)),
    )


async def storm(world: World, seconds: float, forecast: Forecast | None = None) -> None:
    """Trouble every node that has a link, for so many seconds; then mend everything.

    Args:
        world: whose nodes, and whose dice.
        seconds: how long it lasts.
        forecast: what it is made of; drawn if not given.
    """
    forecast = forecast or draw_forecast(world)
    end = world.loop.time() + seconds
    async with asyncio.TaskGroup() as strikes:
        while (left := end - world.loop.time()) > 0:
            nodes = [node for node in world.nodes.values() if node.is_alive and node.links]
            if nodes:
                _change_weather(world, world.dice.choice(nodes), forecast)
            if nodes and forecast.strikes:
                strike = world.dice.choice(forecast.strikes)
                lasting = min(left, world.dice.uniform(0, forecast.lasting))
                strikes.create_task(strike(_pick(world, nodes), lasting))
            await asyncio.sleep(min(left, world.dice.uniform(0, forecast.every)))
    mend(world)


def mend(world: World) -> None:
    """End every trouble: all nodes run, all links carry, the weather is calm."""
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


def _pick(world: World, nodes: list[Node]) -> list[Node]:
    """Pick one node as a rule, now and then several, or all."""
    count = world.dice.choice((1, 1, 1, 1, 1 + world.dice.randrange(len(nodes)), len(nodes)))
    return world.dice.sample(nodes, count)


def _change_weather(world: World, node: Node, forecast: Forecast) -> None:
    """Let it be bad or calm on a node's links."""
    weather = world.dice.choice((CALM, forecast.weather))
    for link in node.links:
        link.weather = weather
