"""The loop of the world: what is cancelled, when timers run, and what threads return."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from jobsync.testing import Stuck, World, loop

T = TypeVar("T")


def run(story: Callable[[World], Awaitable[T]], seed: int = 1) -> T:
    """Run a story in a new world without violations; return its result."""
    world = World(seed)
    result = world.run(lambda: story(world))
    assert world.judge() == []
    return result


def test_timers_run_at_their_times_and_what_is_cancelled_does_not() -> None:
    """However they were scheduled: after a delay, at a time, outside of the node, or for now."""

    async def story(world: World) -> list[tuple[str, float]]:
        ran: list[tuple[str, float]] = []

        def note(name: str) -> None:
            ran.append((name, world.loop.time()))

        await asyncio.sleep(1)
        calls: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
            "soon": (world.loop.call_soon, ()),
            "threadsafe": (world.loop.call_soon_threadsafe, ()),
            "later": (world.loop.call_later, (2,)),
            "at": (world.loop.call_at, (4,)),
            "outside": (world.loop.call_outside, (4,)),
        }
        for name, (schedule, when) in calls.items():
            handle = schedule(*when, note, name)
            assert not handle.cancelled()
            cancelled = schedule(*when, note, f"{name} cancelled")
            cancelled.cancel()
            assert cancelled.cancelled()
        await asyncio.sleep(100)
        return ran

    assert sorted(run(story)) == [
        ("at", 4.0),
        ("later", 3.0),
        ("outside", 5.0),
        ("soon", 1.0),
        ("threadsafe", 1.0),
    ]


def test_what_is_outside_belongs_to_no_node() -> None:
    """It runs although the node that scheduled it is dead; what belongs to it does not."""

    async def story(world: World) -> list[str]:
        ran: list[str] = []

        async def program() -> None:
            world.loop.call_outside(5, ran.append, "outside")
            world.loop.call_later(5, ran.append, "inside")
            world.loop.call_at(5, ran.append, "at")

        node = world.node("a")
        await node.run(program())
        node.kill()
        await asyncio.sleep(10)
        return ran

    assert run(story) == ["outside"]


def test_threads_return_and_raise_each_for_its_own_caller() -> None:
    """Also without an argument, with several, and with None; a cancelled one bothers nobody."""

    def fail(text: str) -> None:
        loop.block(1)
        raise ValueError(text)

    def wait(seconds: float, result: object) -> object:
        loop.block(seconds)
        return result

    async def story(world: World) -> list[object]:
        found = await asyncio.gather(
            asyncio.to_thread(wait, 3, "slow"),
            asyncio.to_thread(wait, 1, None),
            asyncio.to_thread(fail, "mine"),
            asyncio.get_running_loop().run_in_executor(None, wait, 2, "executor"),
            return_exceptions=True,
        )
        assert world.loop.time() == 3.0
        return [str(each) for each in found]

    assert run(story) == ["slow", "None", "mine", "executor"]


def test_a_thread_belongs_to_the_node_that_started_it() -> None:
    """While that is paused it goes no further, and then it goes on where it was."""

    async def story(world: World) -> list[float]:
        seen: list[float] = []

        def work() -> None:
            for _ in range(3):
                loop.block(1)
                seen.append(world.loop.time())

        async def program() -> None:
            await asyncio.to_thread(work)

        node = world.node("a")
        node.run(program())
        await asyncio.sleep(1.5)
        node.pause()
        await asyncio.sleep(10)
        node.resume()
        await asyncio.sleep(10)
        return seen

    assert run(story) == [1.0, 11.5, 12.5]


def test_a_world_that_is_stuck_says_when() -> None:
    """Cancelled timers are nothing to wait for."""

    async def story(world: World) -> None:
        await asyncio.sleep(7)
        world.loop.call_later(90, print).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="after 7 s"):
        run(story)


def test_a_loop_that_has_ended_takes_no_more_calls() -> None:
    """As other loops."""
    world = World(1)

    async def story() -> None:
        await asyncio.sleep(1)

    world.run(story)
    assert world.loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        world.loop.call_soon_threadsafe(print)
