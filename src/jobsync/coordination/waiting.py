"""Waiting for whichever comes first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

__all__ = ["Heard", "first_of", "listening"]

Heard: TypeAlias = Callable[[float], Awaitable[bool]]
"""Waits, for so many seconds at most; says whether anything came."""


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of several; the others are cancelled. What one raises is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # In this order: a group's own would differ from run to run.
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def listening(*waits: Coroutine[Any, Any, object]) -> AsyncIterator[Heard]:
    """Begin to wait for the first of several before the block reads what may change.

    Whatever comes while the block runs counts, so that nothing falls between reading and
    waiting. The block waits by calling what it is given; what one raises is raised there.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    is_closed = False

    async def heard(patience: float) -> bool:
        done, _ = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return bool(done)

    try:
        # Each runs up to where it waits.
        await asyncio.sleep(0)
        yield heard
    except GeneratorExit:
        # Closed where it stood, and run by nobody any more: who waits now waits in vain.
        is_closed = True
        raise
    finally:
        for task in tasks:
            task.cancel()
        if not is_closed:
            await asyncio.gather(*tasks, return_exceptions=True)
