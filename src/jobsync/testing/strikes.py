"""What can be done to some nodes, or to their links, for a while.

Each strike takes nodes and seconds, and undoes what it did: `await strikes.cut(nodes, 60)`.
Several may be under way at once; where two do the same to one node, the first to end ends
both.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from jobsync.testing.network import Link
from jobsync.testing.nodes import Node

__all__ = [
    "STRIKES",
    "Strike",
    "block",
    "cut",
    "drift",
    "flap",
    "forbid",
    "kill",
    "leave",
    "mute",
    "pause",
    "power_off",
    "step_wall",
    "suspend",
    "swizzle",
    "throttle",
]

Strike: TypeAlias = Callable[[Sequence[Node], float], Coroutine[Any, Any, None]]
"""Does something to some nodes, or to their links, for so many seconds, and undoes it."""

_RATES = (0.951, 1.049)
"""Between these a clock may drift."""

_STEPS = (-86_400.0, -3600.0, -30.0, 30.0, 3600.0, 86_400.0)
"""By these a wall clock may jump."""

_FLAP = 5.0
"""Seconds that a flapping network is gone, and there again."""


async def pause(nodes: Sequence[Node], seconds: float) -> None:
    """Stop processes, and let them go on."""
    for node in nodes:
        node.pause()
    await asyncio.sleep(seconds)
    for node in nodes:
        node.resume()


async def suspend(nodes: Sequence[Node], seconds: float) -> None:
    """Stop machines with their clocks: nobody on them knows that time passed."""
    for node in nodes:
        node.suspend()
    await asyncio.sleep(seconds)
    for node in nodes:
        node.resume()


async def block(nodes: Sequence[Node], seconds: float) -> None:
    """Hold the main threads, as code does that never awaits."""
    for node in nodes:
        node.block()
    await asyncio.sleep(seconds)
    for node in nodes:
        node.unblock()


async def kill(nodes: Sequence[Node], seconds: float) -> None:
    """Kill processes; after a while start others under their names."""
    for node in _startable(nodes):
        node.kill()
    await asyncio.sleep(seconds)
    for node in _missing(nodes):
        node.restart()


async def power_off(nodes: Sequence[Node], seconds: float) -> None:
    """Switch machines off; after a while switch them on."""
    for node in _startable(nodes):
        node.kill()
    await asyncio.sleep(seconds)
    for node in _missing(nodes):
        node.reboot()


async def leave(nodes: Sequence[Node], seconds: float) -> None:
    """Stop processes in good order, one after the other; start each again after a while."""
    for node in _startable(nodes):
        await node.stop()
        await asyncio.sleep(seconds / len(nodes))
        for left in _missing([node]):
            left.restart()


async def cut(nodes: Sequence[Node], seconds: float) -> None:
    """Cut nodes off. All nodes at once: the store has an outage."""
    _set_passage(nodes, requests=False, replies=False)
    await asyncio.sleep(seconds)
    _set_passage(nodes, requests=True, replies=True)


async def mute(nodes: Sequence[Node], seconds: float) -> None:
    """Cut one way only: requests arrive and are carried out, replies do not come back."""
    _set_passage(nodes, requests=True, replies=False)
    await asyncio.sleep(seconds)
    _set_passage(nodes, requests=True, replies=True)


async def flap(nodes: Sequence[Node], seconds: float) -> None:
    """Cut nodes off and let them back, at a fixed period."""
    for _ in range(1 + int(seconds / (2 * _FLAP))):
        await cut(nodes, _FLAP)
        await asyncio.sleep(_FLAP)


async def swizzle(nodes: Sequence[Node], seconds: float) -> None:
    """Cut nodes off one by one, and let them back in another order."""
    dice = nodes[0].world.dice
    for passes in (False, True):
        for node in dice.sample(nodes, len(nodes)):
            _set_passage([node], requests=passes, replies=passes)
            await asyncio.sleep(seconds / (2 * len(nodes)))


async def throttle(nodes: Sequence[Node], seconds: float) -> None:
    """Refuse every request as one too many."""
    for link in _links(nodes):
        link.throttled = True
    await asyncio.sleep(seconds)
    for link in _links(nodes):
        link.throttled = False


async def forbid(nodes: Sequence[Node], seconds: float) -> None:
    """Refuse every request for want of rights."""
    for link in _links(nodes):
        link.forbidden = True
    await asyncio.sleep(seconds)
    for link in _links(nodes):
        link.forbidden = False


async def step_wall(nodes: Sequence[Node], seconds: float) -> None:
    """Let the time of day jump, forward or back, and later as far the other way."""
    step = nodes[0].world.dice.choice(_STEPS)
    for node in nodes:
        node.clock.step_wall(step)
    await asyncio.sleep(seconds)
    for node in nodes:
        # The machine's clock of now: it may have been switched off and on.
        node.world.nodes[node.name].clock.step_wall(-step)


async def drift(nodes: Sequence[Node], seconds: float) -> None:
    """Let clocks run at rates that differ by up to 10 %, from now on."""
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
"""All under which clocks go on counting. For what must hold even where they stop, add `suspend`."""


def _startable(nodes: Sequence[Node]) -> list[Node]:
    """Give those that a restart brings back."""
    return [node for node in nodes if node.has_program]


def _missing(nodes: Sequence[Node]) -> list[Node]:
    """Give those that are dead and have no successor yet."""
    return [node for node in nodes if not node.is_alive and node.world.nodes[node.name] is node]


def _links(nodes: Sequence[Node]) -> list[Link]:
    return [link for node in nodes for link in node.links]


def _set_passage(nodes: Sequence[Node], *, requests: bool, replies: bool) -> None:
    for link in _links(nodes):
        link.requests_pass, link.replies_pass = requests, replies
