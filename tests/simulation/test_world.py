"""The simulated world: what time, order and nodes do in it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from jobsync import testing
from jobsync.testing import Node, NodeClock, Occurrence, Stuck, Violation, World, loop

T = TypeVar("T")


def happen(story: Callable[[World], Awaitable[T]], seed: int = 1) -> T:
    """Let a story happen in a world of its own, in which nothing may go wrong."""
    world = World(seed)
    told = world.run(lambda: story(world))
    assert world.judge() == []
    return told


async def tick(node: Node, ticks: list[float]) -> None:
    """Note each second that the node lives through."""
    while True:
        await node.clock.sleep(1)
        ticks.append(node.world.loop.time())


def test_a_year_passes_in_no_time() -> None:
    """Sleeping costs nothing; the clock says that it took a year."""

    async def story(world: World) -> float:
        node = world.node("a")
        begun = node.clock.mono()
        await node.run(node.clock.sleep(365 * 86_400))
        return node.clock.mono() - begun

    assert happen(story) == pytest.approx(365 * 86_400)


def test_every_order_has_its_turn() -> None:
    """Of what is ready together any may come first; which one, the seed says."""

    async def story(world: World) -> str:
        order: list[str] = []

        async def arrive(name: str) -> None:
            order.append(name)

        await asyncio.gather(*(arrive(name) for name in "abc"))
        return "".join(order)

    assert {happen(story, seed) for seed in range(60)} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert happen(story, 7) == happen(story, 7)


def test_sets_of_tasks_have_one_order() -> None:
    """Wherever in memory they are: else whoever cancels a group would upset the dice."""

    async def story(world: World) -> list[int]:
        tasks = [asyncio.create_task(asyncio.sleep(n)) for n in range(50)]
        futures = [world.loop.create_future() for _ in range(50)]
        done, _ = await asyncio.wait(tasks)
        return [tasks.index(task) for task in done] + [futures.index(f) for f in set(futures)]

    first = happen(story)
    elsewhere = [object() for _ in range(1000)]
    assert happen(story) == first
    del elsewhere


def test_a_thread_is_a_turn_of_the_loop() -> None:
    """What code sends to a thread runs in the world, in an order that the seed repeats."""

    async def story(world: World) -> tuple[int, int]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(divmod, 7, 4)

    assert happen(story) == (1, 3)


def test_a_wait_for_what_cannot_come_is_found() -> None:
    """A world in which nothing will ever happen again says so."""

    async def story(world: World) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing can happen"):
        happen(story)


def test_a_busy_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that never lets time pass says so, instead of running for ever."""
    monkeypatch.setattr(loop, "_MOST_STEPS", 1000)

    async def story(world: World) -> None:
        while True:  # noqa: ASYNC110 - what is to be found
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="spins"):
        happen(story)


def test_a_killed_node_stops_at_its_await() -> None:
    """Nothing of it runs while the world lasts: no line, no child, no finally clause."""
    done: list[str] = []

    async def child(node: Node) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append("finally")

    async def work(node: Node) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child(node))
                while True:
                    await node.clock.sleep(1)
                    done.append("tick")
        finally:
            done.append("finally")

    async def story(world: World) -> list[str]:
        node = world.node("a")
        node.run(work(node))
        await asyncio.sleep(3.5)
        node.kill()
        await asyncio.sleep(100)
        return done.copy()

    assert happen(story) == ["tick"] * 3


def test_what_is_left_at_the_end_ends_quietly() -> None:
    """Code that awaits in a finally clause, or will not end, leaves no warning behind."""

    async def clean_up(node: Node) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await node.clock.sleep(1)

    async def story(world: World) -> None:
        node = world.node("a")

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(clean_up(node))

        node.run(work())
        await asyncio.sleep(1)
        node.run(clean_up(node))

    happen(story)


def test_a_task_that_dies_unheard_is_a_violation() -> None:
    """An error that ends something in the background does not stay there."""
    world = World(1)

    async def fail() -> None:
        raise ValueError("on the way")

    async def story() -> None:
        world.node("a").run(fail())
        world.start(fail())
        world.loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    world.run(story)
    found = world.judge()
    assert sum("ValueError('on the way')" in each.detail for each in found) == 2
    assert sum("ZeroDivisionError" in each.detail for each in found) == 1
    assert [each.invariant for each in found] == ["A1", "A1", "A1"]


def test_an_error_that_somebody_heard_is_none() -> None:
    """Whoever awaits a task deals with what it raises."""

    async def fail() -> None:
        raise ValueError("on the way")

    async def story(world: World) -> None:
        with pytest.raises(ValueError, match="on the way"):
            await world.node("a").run(fail())
        killed = world.node("b")
        killed.run(fail())
        killed.kill()

    happen(story)


def test_a_paused_node_goes_on_where_it_stopped() -> None:
    """Its clock has gone on; what was due meanwhile happens at once."""

    async def work(node: Node) -> float:
        begun = node.clock.mono()
        await node.clock.sleep(1)
        return node.clock.mono() - begun

    async def story(world: World) -> float:
        node = world.node("a")
        working = node.run(work(node))
        await asyncio.sleep(0.5)
        node.pause()
        await asyncio.sleep(60)
        assert not working.done()
        node.resume()
        return await working

    assert happen(story) == pytest.approx(60.5)


def test_a_suspended_node_does_not_know_that_time_passed() -> None:
    """Its clock stood still too: by it, one second was one second."""

    async def work(node: Node) -> float:
        begun = node.clock.mono()
        await node.clock.sleep(1)
        return node.clock.mono() - begun

    async def story(world: World) -> tuple[float, float]:
        node = world.node("a")
        working = node.run(work(node))
        await asyncio.sleep(0.5)
        node.suspend()
        await asyncio.sleep(60)
        node.resume()
        return await working, world.loop.time()

    felt, passed = happen(story)
    assert felt == pytest.approx(1)
    assert passed == pytest.approx(61)


def test_a_blocked_thread_leaves_the_others_alone() -> None:
    """User code that never awaits holds its own thread; the heartbeat's goes on."""

    async def story(world: World) -> tuple[list[float], list[float]]:
        node = world.node("a")
        user: list[float] = []
        heartbeat: list[float] = []
        node.run(tick(node, user))
        node.host("heartbeat").run(tick(node, heartbeat))
        await asyncio.sleep(1.5)
        node.block()
        await asyncio.sleep(10)
        # A pause holds all; its end does not end the block.
        node.pause()
        await asyncio.sleep(10)
        node.resume()
        await asyncio.sleep(10)
        node.unblock()
        await asyncio.sleep(0.1)
        return user, heartbeat

    user, heartbeat = happen(story)
    assert user == pytest.approx([1, 31.5])
    beats_while_blocked = [at for at in heartbeat if 1.5 < at < 11.5]
    assert len(beats_while_blocked) == 10
    assert not [at for at in heartbeat if 11.5 < at < 21.5]
    assert len([at for at in heartbeat if 21.5 < at < 31.5]) >= 9


def test_a_clean_stop_lets_the_program_end() -> None:
    """It is cancelled, does what it has to, and then nothing of the node runs."""

    async def story(world: World) -> tuple[list[str], float]:
        done: list[str] = []

        async def program(node: Node) -> None:
            node.run(tick(node, []))
            try:
                await asyncio.Event().wait()
            finally:
                await node.clock.sleep(2)
                done.append("left")

        node = world.node("a")
        node.start(program)
        await asyncio.sleep(1)
        await node.stop()
        assert not node.is_alive
        return done, world.loop.time()

    done, stopped = happen(story)
    assert done == ["left"]
    assert stopped == pytest.approx(3)


def test_a_program_that_does_not_end_is_killed() -> None:
    """Grace is bounded."""

    async def story(world: World) -> float:
        async def program(node: Node) -> None:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue

        node = world.node("a")
        node.start(program)
        await asyncio.sleep(1)
        await node.stop()
        assert not node.is_alive
        return world.loop.time()

    assert happen(story) == pytest.approx(31)


def test_a_restart_is_another_process_on_the_same_machine() -> None:
    """The program runs anew, the old one runs no more, and the machine's clock goes on."""

    async def story(world: World) -> None:
        ticks: list[float] = []
        started: list[Node] = []

        async def program(node: Node) -> None:
            started.append(node)
            await tick(node, ticks)

        first = world.node("a", rate=1.05, skew=30)
        first.start(program)
        await asyncio.sleep(9.9)
        before = first.clock.mono()
        second = first.restart()
        assert not first.is_alive
        assert second.clock.mono() == before
        assert second.clock.boot() == 1
        await asyncio.sleep(10)
        assert started == [first, second]
        assert world.nodes["a"] is second
        assert len(ticks) == 20
        # What is done to the old one is done to nobody.
        first.resume()
        await asyncio.sleep(10)
        assert len(ticks) == 30

    happen(story)


def test_a_reboot_begins_a_new_boot() -> None:
    """Monotonic time begins again under another boot; the time of day goes on."""

    async def story(world: World) -> None:
        node = world.node("a", rate=1.05, skew=30)
        await asyncio.sleep(100)
        wall = node.clock.wall()
        again = node.reboot()
        assert again.clock.boot() == 2
        assert again.clock.mono().seconds == 0
        assert again.clock.wall() - wall == pytest.approx(0)
        assert again.clock.rate == 1.05

    happen(story)


def test_clocks_differ() -> None:
    """A fast clock gains, a skewed one is off, and sleeping goes by one's own."""

    async def story(world: World) -> None:
        fast, slow = world.node("fast", rate=1.1), world.node("slow", rate=0.9, skew=30)
        await asyncio.gather(fast.run(fast.clock.sleep(110)), slow.run(slow.clock.sleep(90)))
        assert world.loop.time() == pytest.approx(100)
        assert fast.clock.wall() - slow.clock.wall() == pytest.approx(20 - 30)

    happen(story)


def test_a_change_of_rate_moves_nothing_back() -> None:
    """Time goes on from where it was, and whoever sleeps wakes by the new rate."""

    async def story(world: World) -> None:
        clock = world.node("a").clock
        waking = asyncio.create_task(clock.sleep(100))
        await asyncio.sleep(50)
        before = clock.mono()
        for rate in (2.0, 0.5, 2.0):
            clock.rate = rate
            assert clock.mono() == before
        await waking
        assert world.loop.time() == pytest.approx(75)

    happen(story)


def test_the_time_of_day_may_jump() -> None:
    """A step moves the wall clock alone."""

    async def story(world: World) -> None:
        clock = world.node("a").clock
        wall, mono = clock.wall(), clock.mono()
        clock.step_wall(-3600)
        assert clock.wall() - wall == pytest.approx(-3600)
        assert clock.mono() == mono
        clock.skew = 0
        assert clock.wall() == wall

    happen(story)


def test_a_stopped_clock_does_not_forget_its_rate() -> None:
    """It stands, goes on at its rate, and stopping twice is stopping once."""

    async def story(world: World) -> None:
        clock = NodeClock(world.loop, rate=2.0)
        begun = clock.mono()
        await asyncio.sleep(10)
        clock.stop()
        await asyncio.sleep(10)
        clock.stop()
        await asyncio.sleep(10)
        clock.go_on()
        await asyncio.sleep(10)
        assert clock.mono() - begun == pytest.approx(40)

    happen(story)


def test_watchers_see_each_occurrence_at_its_moment() -> None:
    """What they find is a violation, and so is what a check finds in the whole history."""
    world = World(1)

    def dislike(done: Occurrence) -> list[str]:
        return ["a jump"] if done.what == "jump" else []

    world.watch(dislike)
    world.expect(lambda history: [f"{len(history)} things happened"])

    async def story() -> None:
        world.note("a", "walk")
        world.note("a", "jump", high=2)

    world.run(story)
    assert world.judge() == [Violation("user", "a jump"), Violation("user", "2 things happened")]
    world.note("a", "jump")
    assert len(world.history) == 2


def test_a_world_ends_around_a_group_whose_tasks_have_ended() -> None:
    """Closed there, a task group raises what closed it; that is nobody's failure."""

    async def wait_in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            await asyncio.get_running_loop().create_future()

    async def story(world: World) -> None:
        world.node("a").run(wait_in_a_group())
        await asyncio.sleep(1)

    happen(story)


def test_every_public_name_is_there_sorted_and_once() -> None:
    """`__all__` is the list of what users may import, constants first."""
    names = sorted(set(testing.__all__), key=lambda name: (not name.isupper(), name))
    assert testing.__all__ == names
    assert all(hasattr(testing, name) for name in testing.__all__)


def test_real_time_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks the machine what time it is."""

    def ask() -> float:
        raise AssertionError("asked the machine")

    async def story(world: World) -> None:
        await world.node("a").clock.sleep(1)

    monkeypatch.setattr(time, "monotonic", ask)
    monkeypatch.setattr(time, "time", ask)
    happen(story)
