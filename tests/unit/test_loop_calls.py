"""Calls of coroutines on the event loop of another thread."""

import asyncio
import threading

import pytest

from jobsync.errors import Unavailable
from jobsync.loop_calls import Background

LONG = 60.0


async def test_a_cancelled_task_ends_after_the_call_that_it_awaits() -> None:
    """As on one loop: what the call does at its end is done when the task has ended."""
    has_started, may_end = threading.Event(), threading.Event()

    async def work() -> None:
        has_started.set()
        try:
            await asyncio.sleep(LONG)
        finally:
            await asyncio.to_thread(may_end.wait, LONG)

    background = Background("test", lambda: Unavailable("store", "it has ended", "connect again"))
    task = asyncio.create_task(background._calls.run(work()))
    assert await asyncio.to_thread(has_started.wait, LONG)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(background.stop)
