"""Steps that run for a limited time, on behalf of their caller."""

import asyncio

import pytest

from jobsync.coordination.runner import find_caller, run_for


async def _wait() -> None:
    await asyncio.Event().wait()


async def _wait_long(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])


async def _wait_not(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task], timeout=0)


async def test_a_step_that_ends_in_time_ends() -> None:
    """It runs in a task of its own, for the task that called."""
    seen: list[object] = []

    async def work() -> None:
        seen.extend([asyncio.current_task(), find_caller()])

    assert await run_for(_wait_long, work, cancelled_for=60) == "ended"
    assert seen[0] is not asyncio.current_task()
    assert seen[1] is asyncio.current_task()


async def test_a_slow_step_is_cancelled() -> None:
    """As often as it waits for something new while it cleans up."""
    waits = 0

    async def work() -> None:
        nonlocal waits
        for _ in range(3):
            try:
                waits += 1
                await _wait()
            except asyncio.CancelledError:
                continue

    assert await run_for(_wait_not, work, cancelled_for=60) == "cancelled"
    assert waits == 3


async def test_a_step_that_ignores_its_cancellation_is_left_behind() -> None:
    """It runs on, until it ends by itself."""
    may_end = asyncio.Event()
    ended = asyncio.Event()

    async def work() -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    assert await run_for(_wait_not, work, cancelled_for=0.1) == "running"
    may_end.set()
    await ended.wait()


async def test_errors_of_a_step_are_raised() -> None:
    """As if the caller had run it."""

    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_for(_wait_long, work, cancelled_for=60)


async def test_a_cancelled_caller_cancels_its_step() -> None:
    """And waits for its end, but no longer than a step may take after a cancellation."""
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await _wait()
        finally:
            ended.set()

    task = asyncio.create_task(run_for(_wait_long, work, cancelled_for=60))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_a_step_has_started_acts_for_itself_later() -> None:
    """A task keeps the context in which it was started, but not the caller."""
    callers: list[object] = []
    may_look = asyncio.Event()

    async def look() -> None:
        await may_look.wait()
        callers.append(find_caller())

    tasks: list[asyncio.Task[None]] = []

    async def work() -> None:
        tasks.append(asyncio.create_task(look()))

    await run_for(_wait_long, work, cancelled_for=60)
    may_look.set()
    await tasks[0]
    assert callers == [tasks[0]]
