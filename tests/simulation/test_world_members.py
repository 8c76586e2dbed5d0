"""Members in the world: each session on a thread of its own, as in production."""

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


async def stand(node: Node, shared: Store, hooks: Hooks | None = None) -> Coordinator:
    """Let a node join the fleet, and stand for its work."""

    async def begin() -> Coordinator:
        membership = await join(node, shared)
        return await membership.coordinate("work", hooks)

    return await node.run(begin())


async def blocked(world: World) -> None:
    """A leader's main thread is blocked for three timeouts; it leads on."""
    shared = MemoryStore(components=world.components)
    one = world.node("one")
    leading = await stand(one, shared)
    await asyncio.sleep(TIMEOUT)
    waiting = await stand(world.node("two"), shared)
    one.block()
    for _ in range(3 * TIMEOUT):
        await asyncio.sleep(1)
        assert leading.is_coordinator
        assert not waiting.is_coordinator
    one.unblock()
    await asyncio.sleep(TIMEOUT)
    assert leading.is_coordinator


async def starved(world: World) -> None:
    """A leader's session is starved for three timeouts; another leads, and the first is told."""
    shared = MemoryStore(components=world.components)
    stopped: list[int] = []

    async def stop(term: Term) -> None:
        stopped.append(term.epoch)

    one = world.node("one")
    leading = await stand(one, shared, Hooks(on_stop=stop))
    await asyncio.sleep(TIMEOUT)
    waiting = await stand(world.node("two"), shared)
    assert (leading.is_coordinator, waiting.is_coordinator) == (True, False)
    one.host("session").block()
    await asyncio.sleep(3 * TIMEOUT)
    assert (leading.is_coordinator, waiting.is_coordinator) == (False, True)
    assert stopped == [1]


async def cut_off(world: World) -> None:
    """All nodes lose the store for ten minutes; the same sessions go on."""
    shared = MemoryStore(components=world.components)
    coordinators = [await stand(world.node(name), shared) for name in ("one", "two")]
    await asyncio.sleep(TIMEOUT)
    names = {each.details["key"] for each in world.history if each.what == "commit"}
    await strikes.cut(list(world.nodes.values()), 600)
    assert not any(each.is_coordinator for each in coordinators)
    await asyncio.sleep(2 * TIMEOUT)
    assert sum(each.is_coordinator for each in coordinators) == 1
    assert names == {each.details["key"] for each in world.history if each.what == "commit"}


async def count(term: Term) -> None:
    """Do a coordinator's work."""
    with suppress(Corrupt, Fenced, Misconfigured, OutcomeUnknown, Unavailable):
        done = await term.get("count") or 0
        await term.put("count", done + 1)


async def rough_hour(world: World) -> None:
    """Three nodes elect a coordinator through a storm, and rest with one."""
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


def test_a_fleet_gets_over_any_storm() -> None:
    """Whatever struck it, one leads afterwards, and each epoch had one owner."""
    check_story(rough_hour, seeds=range(4))


def test_a_fleet_repeats() -> None:
    """The same seed gives the same elections, in processes that hash differently too."""
    check_repeats(rough_hour, seed=2)


def test_blocked_user_code_does_not_cost_the_leadership() -> None:
    """The session beats on its own thread."""
    check_story(blocked, seeds=range(3))


def test_a_starved_session_costs_the_leadership() -> None:
    """Trust lapses by the clock, and another takes over."""
    check_story(starved, seeds=range(3))


def test_an_outage_kills_nobody() -> None:
    """Ten minutes without a store, for all at once: no session is replaced."""
    check_story(cut_off, seeds=range(3))
