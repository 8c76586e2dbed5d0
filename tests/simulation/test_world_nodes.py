"""Nodes, their clocks and machines: what each fault notes, keeps and ends, also the second time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from jobsync.processes import NO_PROCESS
from jobsync.testing import Node, Occurrence, World
from jobsync.testing.nodes import WORLD_START, Machine

T = TypeVar("T")


def run(story: Callable[[World], Awaitable[T]], seed: int = 1) -> T:
    """Run a story in a new world without violations; return its result."""
    world = World(seed)
    result = world.run(lambda: story(world))
    assert world.judge() == []
    return result


async def idle(node: Node) -> None:
    """Do nothing, for ever."""
    del node
    await asyncio.Event().wait()


def started(world: World, name: str = "a") -> Node:
    """Start a node that does nothing."""
    node = world.node(name)
    node.start(idle)
    return node


def pause_twice(node: Node) -> None:
    """Pause a node that is paused."""
    node.pause()
    node.pause()
    node.resume()


def kill_twice(node: Node) -> None:
    """Kill a node that is dead, and resume it."""
    node.kill()
    node.kill()
    node.resume()


def restart_twice(node: Node) -> None:
    """Restart a node, and a node that is dead."""
    node.restart().kill()
    node.world.nodes["a"].restart()


def block_two(node: Node) -> None:
    """Block two threads of a node."""
    node.block()
    node.host("other").block()
    node.unblock()


@pytest.mark.parametrize(
    ("deed", "notes", "faults"),
    [
        (Node.pause, ["pause"], 1),
        (Node.suspend, ["suspend"], 1),
        (Node.resume, ["resume"], 0),
        (Node.block, ["block main"], 1),
        (Node.unblock, ["unblock main"], 0),
        (Node.kill, ["kill"], 1),
        (Node.restart, ["kill"], 1),
        (Node.reboot, ["kill"], 1),
        (pause_twice, ["pause", "pause", "resume"], 2),
        (kill_twice, ["kill"], 1),
        (restart_twice, ["kill", "kill"], 2),
        (block_two, ["block main", "block other", "unblock main"], 2),
    ],
)
def test_what_is_done_to_a_node_is_noted(
    deed: Callable[[Node], object], notes: list[str], faults: int
) -> None:
    """In the history, with the node and the thread, and as a fault if it is one."""
    world = World(1)

    def describe(done: Occurrence) -> str:
        assert done.node == "a"
        return " ".join([done.what, *done.details.values()])

    async def story() -> None:
        node = started(world)
        await asyncio.sleep(1)
        deed(node)

    world.run(story)
    assert [describe(each) for each in world.history] == notes
    assert world.faults == faults


def test_a_stop_is_noted_as_a_fault() -> None:
    """Once; the node is dead then, and nothing more happens to it."""

    async def story(world: World) -> None:
        node = started(world)
        await asyncio.sleep(1)
        await node.stop()
        node.kill()
        node.resume()
        assert [each.what for each in world.history] == ["stop"]
        assert world.faults == 1
        assert not node.is_alive

    run(story)


@pytest.mark.parametrize("end", [Node.restart, Node.reboot])
def test_a_suspended_machine_is_started_again(end: Callable[[Node], Node]) -> None:
    """The clock of its successor runs."""

    async def story(world: World) -> float:
        node = started(world)
        node.suspend()
        await asyncio.sleep(10)
        successor = end(node)
        before = successor.clock.mono()
        assert not successor.is_paused
        await asyncio.sleep(5)
        return successor.clock.mono() - before

    assert run(story) == pytest.approx(5)


def test_a_clock_that_was_stopped_lags_for_good() -> None:
    """In wall time and since boot; a time server would set the former."""

    async def story(world: World) -> None:
        node = world.node("a", rate=2.0, skew=3.0)
        mono = node.clock.mono()
        await asyncio.sleep(10)
        node.suspend()
        await asyncio.sleep(100)
        assert node.clock.mono() - mono == pytest.approx(20)
        node.resume()
        await asyncio.sleep(10)
        assert node.clock.mono() - mono == pytest.approx(40)
        assert node.clock.wall().seconds - WORLD_START == pytest.approx(43)
        node.pause()
        await asyncio.sleep(10)
        assert node.clock.mono() - mono == pytest.approx(60)

    run(story)


def test_a_kept_clock_shows_the_right_time_at_any_rate() -> None:
    """But for its skew; also after a reboot, and without any effect on the time since boot."""

    async def story(world: World) -> None:
        world.keeps_clocks = True
        node = world.node("a", rate=2.0, skew=3.0)
        mono = node.clock.mono()
        await asyncio.sleep(10)
        assert node.clock.mono() - mono == pytest.approx(20)
        assert node.clock.wall().seconds - WORLD_START == pytest.approx(13)
        again = node.reboot()
        await asyncio.sleep(10)
        assert again.clock.mono().seconds == pytest.approx(20)
        assert again.clock.wall().seconds - WORLD_START == pytest.approx(23)
        again.clock.step_wall(-5)
        assert again.reboot().clock.wall().seconds - WORLD_START == pytest.approx(18)

    run(story)


def test_sleepers_wake_by_the_rate_that_holds() -> None:
    """Several sleep at once; a change of the rate wakes none too early, and cancels none."""

    async def story(world: World) -> list[float]:
        clock = world.node("a").clock
        woken: list[float] = []

        async def sleep(seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append(round(world.loop.time(), 3))

        async with asyncio.TaskGroup() as group:
            for seconds in (-5.0, 0.0, 10.0, 40.0):
                group.create_task(sleep(seconds))
            cancelled = group.create_task(sleep(20.0))
            await asyncio.sleep(5)
            cancelled.cancel()
            clock.rate = 0.5
            await asyncio.sleep(15)
            clock.rate = 2.0
        return woken

    assert run(story) == [0.0, 0.0, 15.0, 33.75]


def test_the_successor_of_a_node_runs_its_program_with_itself() -> None:
    """On the clock of the machine after a restart; a node without a program has none either."""

    async def story(world: World) -> None:
        seen: list[Node] = []

        async def program(node: Node) -> None:
            seen.append(node)

        node = world.node("a", skew=5)
        assert not node.has_program
        assert not node.restart().has_program
        node = world.nodes["a"]
        node.start(program)
        assert node.has_program
        again = node.restart()
        assert again.has_program
        assert again.clock is node.clock
        assert again.components.clock is node.clock
        third = again.reboot()
        assert third.clock is not node.clock
        await asyncio.sleep(1)
        assert seen[-1] is third
        assert again.links == []

    run(story)


def test_what_was_held_back_runs_after_a_resume() -> None:
    """Of each thread that is not blocked, once; of a node that was killed, never."""

    async def story(world: World) -> dict[str, list[str]]:
        done: dict[str, list[str]] = {"a": [], "b": []}
        for name, ran in done.items():
            node = world.node(name)
            node.host("user").block()
            node.pause()
            for thread in ("main", "user"):
                node.host(thread).call_soon(ran.append, thread)
        await asyncio.sleep(1)
        assert done == {"a": [], "b": []}
        world.nodes["b"].kill()
        for node in world.nodes.values():
            node.resume()
        await asyncio.sleep(1)
        first = {name: [*each] for name, each in done.items()}
        assert first == {"a": ["main"], "b": []}
        for node in world.nodes.values():
            node.host("user").unblock()
        await asyncio.sleep(1)
        return done

    assert run(story) == {"a": ["main", "user"], "b": []}


def test_processes_of_a_machine_see_each_other() -> None:
    """By the numbers of those that live; the lowest free one is given again, at another time."""

    async def story(world: World) -> None:
        machine = Machine("host", "boot-7", "pid:[9]")
        first, second = (world.node(name, machine=machine) for name in "ab")
        alone = world.node("c")
        ids = [node.components.processes.identify() for node in (first, second)]
        assert all(each is not None for each in ids)
        one, two = (each for each in ids if each is not None)
        assert (one.host, one.boot, one.namespaces) == ("host", "boot-7", "pid:[9]")
        assert (one.pid, two.pid) == (1, 2)
        assert one.started != two.started
        look = second.components.processes.find_start
        assert (look(1), look(2), look(3)) == (one.started, two.started, NO_PROCESS)
        assert alone.components.processes.identify() is None
        assert alone.components.processes.find_start(1) is None
        again = first.restart().components.processes.identify()
        assert again is not None
        assert (again.pid, again.boot) == (1, "boot-7")
        assert again.started not in {one.started, two.started}
        assert look(1) == again.started
        world.nodes["a"].kill()
        assert look(1) == NO_PROCESS
        assert look(2) == two.started

    run(story)


def test_a_machine_reboots_once_for_all_its_processes() -> None:
    """Afterwards they see each other on the new boot, and none of before."""

    async def story(world: World) -> None:
        machine = Machine("host", namespaces="pid:[9]")
        nodes = [world.node(name, machine=machine) for name in "ab"]
        again = [node.reboot() for node in nodes]
        assert again[0].machine is again[1].machine is not machine
        ids = [node.components.processes.identify() for node in again]
        assert [(each.host, each.boot, each.namespaces, each.pid) for each in ids if each] == [
            ("host", "boot-1+", "pid:[9]", 1),
            ("host", "boot-1+", "pid:[9]", 2),
        ]
        third = again[0].reboot().components.processes.identify()
        assert third is not None
        assert third.boot == "boot-1++"
        assert machine.find_start(1) == NO_PROCESS

    run(story)


def test_the_world_of_a_negative_seed_is_a_variation() -> None:
    """The dice are the same; wall times, boots and machines differ, but for what is given."""
    world, plain = World(-7), World(7)
    nodes = [world.node(f"n{number}") for number in range(12)]
    skews = {node.clock.skew for node in nodes}
    assert len(skews) > 3
    assert max(map(abs, skews)) <= world.largest_skew
    assert len({node.clock.boot() for node in nodes}) == 12
    assert len({node.clock.mono().seconds for node in nodes}) > 1
    assert all(node.machine is not None for node in nodes)
    assert len({node.machine for node in nodes}) < 12
    given = world.node("given", skew=5.0)
    assert given.clock.skew == 5.0
    machine = Machine("mine")
    assert world.node("on", machine=machine).machine is machine
    again = world.node("again", clock=given.clock)
    assert (again.clock, again.machine) == (given.clock, None)
    world.largest_skew = 0.0
    assert {world.node(f"m{number}").clock.skew for number in range(9)} == {0.0}
    assert World(-7).dice.random() == plain.dice.random()
    assert World(-7).surprises.random() != World(7).surprises.random()
    node = plain.node("a", rate=1.1)
    assert (node.clock.boot(), node.clock.skew, node.machine) == (1, 0.0, None)
    assert plain.surprises.random() == World(7).surprises.random()


def test_a_world_that_is_over_starts_nothing() -> None:
    """Neither work nor notes of finally clauses change it."""
    world = World(1)
    ran: list[str] = []

    async def late() -> None:
        ran.append("late")

    async def leave_behind() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            world.note("a", "finally")
            world.start(late())
            ran.append("finally")

    async def story() -> str:
        world.start(leave_behind())
        await asyncio.sleep(1)
        return "result"

    assert world.run(story) == "result"
    assert ran == ["finally"]
    assert (world.history, world.judge()) == ([], [])


def test_checks_and_watchers_add_up() -> None:
    """Each is asked, in the order in which it was added, and judging twice finds the same."""
    world = World(1)
    world.watch(lambda done: [f"1 {done.what}"])
    world.watch(lambda done: [f"2 {done.what}"])
    world.expect(lambda _: ["3"], lambda _: ["4"])
    world.expect(lambda _: ["5"])

    async def story() -> None:
        world.note("a", "x")
        world.note("a", "y")

    world.run(story)
    found = ["1 x", "2 x", "1 y", "2 y", "3", "4", "5"]
    assert [each.detail for each in world.judge()] == found
    assert [each.detail for each in world.judge()] == found
