"""The simulated world: time, order and nodes."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from jobsync import testing
from jobsync.testing import Node, NodeClock, Occurrence, Stuck, Violation, World, loop

T = TypeVar("T")


def run(story: Callable[[World], Awaitable[T]], seed: int = 1) -> T:
    """Run a story in a new world without violations; return its result."""
    world = World(seed)
    result = world.run(lambda: story(world))
    assert world.judge() == []
    return result


async def tick(node: Node, ticks: list[float]) -> None:
    """Record the time every second while the node runs."""
    while True:
        await node.clock.sleep(1)
        ticks.append(node.world.loop.time())


def test_a_year_takes_no_real_time() -> None:
    """Sleeping costs nothing, and the clock shows that a year has passed."""

    async def story(world: World) -> float:
        node = world.node("a")
        start = node.clock.mono()
        await node.run(node.clock.sleep(365 * 86_400))
        return node.clock.mono() - start

    assert run(story) == pytest.approx(365 * 86_400)


def test_every_order_occurs() -> None:
    """Any of the callbacks that are ready may run first; the seed decides."""

    async def story(world: World) -> str:
        order: list[str] = []

        async def arrive(name: str) -> None:
            order.append(name)

        await asyncio.gather(*(arrive(name) for name in "abc"))
        return "".join(order)

    assert {run(story, seed) for seed in range(60)} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert run(story, 7) == run(story, 7)


def test_sets_of_tasks_have_one_order() -> None:
    """Independent of their addresses, so that cancelling a group is reproducible."""

    async def story(world: World) -> list[int]:
        tasks = [asyncio.create_task(asyncio.sleep(n)) for n in range(50)]
        futures = [world.loop.create_future() for _ in range(50)]
        done, _ = await asyncio.wait(tasks)
        return [tasks.index(task) for task in done] + [futures.index(f) for f in set(futures)]

    first = run(story)
    elsewhere = [object() for _ in range(1000)]
    assert run(story) == first
    del elsewhere


def test_functions_run_on_threads() -> None:
    """Functions that code sends to a thread run in the world, and return or raise as usual."""

    async def story(world: World) -> tuple[int, int]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(divmod, 7, 4)

    assert run(story) == (1, 3)


def test_a_function_on_a_thread_blocks() -> None:
    """Virtual time passes meanwhile, and the world goes on, in the same order each time."""

    async def story(world: World) -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        def work(name: str) -> None:
            for _ in range(3):
                loop.block(2)
                seen.append((name, world.loop.time()))

        await asyncio.gather(*(asyncio.to_thread(work, name) for name in "abc"))
        return seen

    seen = run(story)
    assert sorted(seen) == [(name, at) for name in "abc" for at in (2.0, 4.0, 6.0)]
    assert run(story) == seen


def test_a_killed_process_stops_at_once_on_its_threads() -> None:
    """A function on a thread runs no further when its node is dead, or the world has ended."""
    seen: list[float] = []

    async def story(world: World) -> None:
        def work() -> None:
            while True:
                loop.block(1)
                seen.append(world.loop.time())

        async def run_work() -> None:
            await asyncio.to_thread(work)

        killed, other = world.node("a"), world.node("b")
        for node in (killed, other):
            node.run(run_work())
        await asyncio.sleep(2.5)
        killed.kill()
        await asyncio.sleep(1)

    threads = threading.active_count()
    run(story)
    assert seen == [1, 1, 2, 2, 3]
    assert threading.active_count() == threads


def test_a_deadlock_is_found() -> None:
    """A world in which nothing will ever happen again raises an error."""

    async def story(world: World) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="deadlock"):
        run(story)


@pytest.mark.parametrize("seconds", [0.0, 1e-300])
def test_a_busy_loop_is_found(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that never lets time pass raises an error instead of running forever."""
    monkeypatch.setattr(loop, "_MAX_STEPS", 1000)

    async def story(world: World) -> None:
        await asyncio.sleep(1)
        while True:  # noqa: ASYNC110 - the defect to find
            await asyncio.sleep(seconds)

    with pytest.raises(Stuck, match="endless loop"):
        run(story)


def test_a_killed_node_stops_at_its_await() -> None:
    """Nothing of it runs until the world ends: no line, no child task, no finally clause."""
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

    assert run(story) == ["tick"] * 3


def test_unfinished_tasks_end_silently() -> None:
    """Code that awaits in a finally clause, or does not end, causes no warning."""

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

    run(story)


def test_a_task_that_dies_unnoticed_is_a_violation() -> None:
    """An exception in a background task is reported."""
    world = World(1)

    async def fail() -> None:
        raise ValueError("in the background")

    async def story() -> None:
        world.node("a").run(fail())
        world.start(fail())
        world.loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    world.run(story)
    found = world.judge()
    assert sum("ValueError('in the background')" in each.detail for each in found) == 2
    assert sum("ZeroDivisionError" in each.detail for each in found) == 1
    assert [each.invariant for each in found] == ["A1", "A1", "A1"]


def test_an_exception_that_is_retrieved_is_no_violation() -> None:
    """The caller that awaits a task handles its exception; a killed node has no caller."""

    async def fail() -> None:
        raise ValueError("in the background")

    async def story(world: World) -> None:
        with pytest.raises(ValueError, match="in the background"):
            await world.node("a").run(fail())
        killed = world.node("b")
        killed.run(fail())
        killed.kill()

    run(story)


def test_a_paused_node_continues_where_it_stopped() -> None:
    """Its clock has continued; timers that were due meanwhile fire at once."""

    async def work(node: Node) -> float:
        start = node.clock.mono()
        await node.clock.sleep(1)
        return node.clock.mono() - start

    async def story(world: World) -> float:
        node = world.node("a")
        working = node.run(work(node))
        await asyncio.sleep(0.5)
        node.pause()
        await asyncio.sleep(60)
        assert not working.done()
        node.resume()
        return await working

    assert run(story) == pytest.approx(60.5)


def test_a_suspended_node_does_not_notice_the_time() -> None:
    """Its clock was stopped too: by that clock, one second took one second."""

    async def work(node: Node) -> float:
        start = node.clock.mono()
        await node.clock.sleep(1)
        return node.clock.mono() - start

    async def story(world: World) -> tuple[float, float]:
        node = world.node("a")
        working = node.run(work(node))
        await asyncio.sleep(0.5)
        node.suspend()
        await asyncio.sleep(60)
        node.resume()
        return await working, world.loop.time()

    measured, passed = run(story)
    assert measured == pytest.approx(1)
    assert passed == pytest.approx(61)


def test_a_blocked_thread_does_not_affect_others() -> None:
    """User code that never awaits blocks its own thread; that of the heartbeat continues."""

    async def story(world: World) -> tuple[list[float], list[float]]:
        node = world.node("a")
        user: list[float] = []
        heartbeat: list[float] = []
        node.run(tick(node, user))
        node.host("heartbeat").run(tick(node, heartbeat))
        await asyncio.sleep(1.5)
        node.block()
        await asyncio.sleep(10)
        # A pause stops all threads; its end does not unblock one.
        node.pause()
        await asyncio.sleep(10)
        node.resume()
        await asyncio.sleep(10)
        node.unblock()
        await asyncio.sleep(0.1)
        return user, heartbeat

    user, heartbeat = run(story)
    assert user == pytest.approx([1, 31.5])
    beats_while_blocked = [at for at in heartbeat if 1.5 < at < 11.5]
    assert len(beats_while_blocked) == 10
    assert not [at for at in heartbeat if 11.5 < at < 21.5]
    assert len([at for at in heartbeat if 21.5 < at < 31.5]) >= 9


def test_a_clean_stop_lets_the_program_end() -> None:
    """It is cancelled and cleans up, and then nothing of the node runs."""

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

    done, stopped = run(story)
    assert done == ["left"]
    assert stopped == pytest.approx(3)


def test_a_program_that_does_not_end_is_killed() -> None:
    """The grace period is limited."""

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

    assert run(story) == pytest.approx(31)


def test_a_restart_is_another_process_on_the_same_machine() -> None:
    """The program runs again, the old one has ended, and the clock continues."""

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
        # Resuming the old node has no effect.
        first.resume()
        await asyncio.sleep(10)
        assert len(ticks) == 30

    run(story)


def test_a_reboot_starts_a_new_boot() -> None:
    """Monotonic time starts again under another boot; wall time continues."""

    async def story(world: World) -> None:
        node = world.node("a", rate=1.05, skew=30)
        await asyncio.sleep(100)
        wall = node.clock.wall()
        again = node.reboot()
        assert again.clock.boot() == 2
        assert again.clock.mono().seconds == 0
        assert again.clock.wall() - wall == pytest.approx(0)
        assert again.clock.rate == 1.05

    run(story)


def test_clocks_differ() -> None:
    """A fast clock gains, a skewed one is off, and nodes sleep by their own clock."""

    async def story(world: World) -> None:
        fast, slow = world.node("fast", rate=1.1), world.node("slow", rate=0.9, skew=30)
        await asyncio.gather(fast.run(fast.clock.sleep(110)), slow.run(slow.clock.sleep(90)))
        assert world.loop.time() == pytest.approx(100)
        assert fast.clock.wall() - slow.clock.wall() == pytest.approx(20 - 30)

    run(story)


def test_a_change_of_rate_never_moves_time_back() -> None:
    """Time continues from where it was, and sleeping callers wake by the new rate."""

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

    run(story)


def test_wall_time_may_jump() -> None:
    """A step moves the wall time only."""

    async def story(world: World) -> None:
        clock = world.node("a").clock
        wall, mono = clock.wall(), clock.mono()
        clock.step_wall(-3600)
        assert clock.wall() - wall == pytest.approx(-3600)
        assert clock.mono() == mono
        clock.skew = 0
        assert clock.wall() == wall

    run(story)


def test_a_stopped_clock_does_not_forget_its_rate() -> None:
    """It continues at its rate, and stopping it twice is the same as once."""

    async def story(world: World) -> None:
        clock = NodeClock(world.loop, rate=2.0)
        start = clock.mono()
        await asyncio.sleep(10)
        clock.stop()
        await asyncio.sleep(10)
        clock.stop()
        await asyncio.sleep(10)
        clock.resume()
        await asyncio.sleep(10)
        assert clock.mono() - start == pytest.approx(40)

    run(story)


def test_watchers_see_each_occurrence_when_it_happens() -> None:
    """What watchers return is a violation, and so is what checks find in the history."""
    world = World(1)

    def forbid_jumps(done: Occurrence) -> list[str]:
        return ["a jump"] if done.what == "jump" else []

    world.watch(forbid_jumps)
    world.expect(lambda history: [f"{len(history)} things happened"])

    async def story() -> None:
        world.note("a", "walk")
        world.note("a", "jump", high=2)

    world.run(story)
    assert world.judge() == [Violation("user", "a jump"), Violation("user", "2 things happened")]
    world.note("a", "jump")
    assert len(world.history) == 2


def test_a_world_ends_around_a_group_whose_tasks_have_ended() -> None:
    """A task group that is closed raises an exception, which is no violation."""

    async def wait_in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            await asyncio.get_running_loop().create_future()

    async def story(world: World) -> None:
        world.node("a").run(wait_in_a_group())
        await asyncio.sleep(1)

    run(story)


def test_every_public_name_is_there_sorted_and_once() -> None:
    """`__all__` lists the public names, constants first."""
    names = sorted(set(testing.__all__), key=lambda name: (not name.isupper(), name))
    assert testing.__all__ == names
    assert all(hasattr(testing, name) for name in testing.__all__)


def test_real_time_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code reads the clock of the machine."""

    def fail() -> float:
        raise AssertionError("read the clock of the machine")

    async def story(world: World) -> None:
        await world.node("a").clock.sleep(1)

    monkeypatch.setattr(time, "monotonic", fail)
    monkeypatch.setattr(time, "time", fail)
    run(story)
