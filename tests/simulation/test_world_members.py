"""Members in a simulated world: each session has a thread of its own, as in production."""

import asyncio
from contextlib import suppress

from jobsync import Corrupt, Fenced, Hooks, Misconfigured, OutcomeUnknown, Store, Unavailable
from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.term import Term
from jobsync.stores.memory import MemoryStore
from jobsync.testing import (
    Node,
    World,
    check_repeats,
    check_roles,
    check_story,
    join,
    storm,
    strikes,
)

TIMEOUT = 15


async def coordinate(node: Node, shared: Store, hooks: Hooks | None = None) -> Coordinator:
    """Join the fleet as a node, and become a candidate."""

    async def start() -> Coordinator:
        membership = await join(node, shared)
        return await membership.coordinate("work", hooks)

    return await node.run(start())


async def blocked(world: World) -> None:
    """The main thread of a leader is blocked for three timeouts; it stays the leader."""
    shared = MemoryStore(components=world.components)
    one = world.node("one")
    leading = await coordinate(one, shared)
    await asyncio.sleep(TIMEOUT)
    waiting = await coordinate(world.node("two"), shared)
    one.block()
    for _ in range(3 * TIMEOUT):
        await asyncio.sleep(1)
        assert leading.is_coordinator
        assert not waiting.is_coordinator
    one.unblock()
    await asyncio.sleep(TIMEOUT)
    assert leading.is_coordinator


async def starved(world: World) -> None:
    """The session of a leader is blocked for three timeouts; it loses the role to another."""
    shared = MemoryStore(components=world.components)
    stopped: list[int] = []

    async def stop(term: Term) -> None:
        stopped.append(term.epoch)

    one = world.node("one")
    leading = await coordinate(one, shared, Hooks(on_stop=stop))
    await asyncio.sleep(TIMEOUT)
    waiting = await coordinate(world.node("two"), shared)
    assert (leading.is_coordinator, waiting.is_coordinator) == (True, False)
    one.host("session").block()
    await asyncio.sleep(3 * TIMEOUT)
    assert (leading.is_coordinator, waiting.is_coordinator) == (False, True)
    assert stopped == [1]


async def cut_off(world: World) -> None:
    """All nodes lose the store for ten minutes; their sessions continue afterwards."""
    shared = MemoryStore(components=world.components)
    coordinators = [await coordinate(world.node(name), shared) for name in ("one", "two")]
    await asyncio.sleep(TIMEOUT)
    names = {each.details["key"] for each in world.history if each.what == "commit"}
    await strikes.cut(list(world.nodes.values()), 600)
    assert not any(each.is_coordinator for each in coordinators)
    await asyncio.sleep(2 * TIMEOUT)
    assert sum(each.is_coordinator for each in coordinators) == 1
    assert names == {each.details["key"] for each in world.history if each.what == "commit"}


async def count(term: Term) -> None:
    """Do the work of a coordinator."""
    with suppress(Corrupt, Fenced, Misconfigured, OutcomeUnknown, Unavailable):
        done = await term.get("count") or 0
        await term.put("count", done + 1)


async def rough_hour(world: World) -> None:
    """Three nodes elect coordinators during a storm, and have one afterwards."""
    shared = MemoryStore(components=world.components)
    coordinators: dict[str, Coordinator] = {}

    async def program(node: Node) -> None:
        while True:
            try:
                async with await join(node, shared) as membership:
                    coordinators[node.name] = await membership.coordinate(
                        "work", Hooks(work=count), governs=["count"]
                    )
                    await asyncio.Event().wait()
            except (Misconfigured, Unavailable):
                await node.clock.sleep(5)

    world.expect(check_roles)
    for name in ("one", "two", "three"):
        world.node(name, rate=world.dice.uniform(0.951, 1.049)).start(program)
    await storm(world, 1800)
    await asyncio.sleep(10 * TIMEOUT)
    assert sum(each.is_coordinator for each in coordinators.values()) == 1


def test_a_fleet_recovers_from_any_storm() -> None:
    """There is one leader afterwards, and each epoch had one owner."""
    check_story(rough_hour, seeds=range(4))


def test_a_fleet_is_reproducible() -> None:
    """The same seed gives the same elections, even in processes that hash differently."""
    check_repeats(rough_hour, seed=2)


def test_blocked_user_code_does_not_cost_the_leadership() -> None:
    """The session sends heartbeats on its own thread."""
    check_story(blocked, seeds=range(3))


def test_a_starved_session_costs_the_leadership() -> None:
    """The session lapses by the clock, and another node takes over."""
    check_story(starved, seeds=range(3))


def test_an_outage_ends_no_session() -> None:
    """After ten minutes without a store, for all nodes, no session is replaced."""
    check_story(cut_off, seeds=range(3))
