"""Waiting for whichever comes first."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from jobsync.core.clock import Clock, Mono

__all__ = ["Heard", "Wakeup", "first_of", "listening"]


# A rest that ends when it is over, or when somebody rings, be it before it began.


class Wakeup:
    """Wakes one who rests.

    Args:
        clock: what a rest goes by.
        grain: seconds by which a rest may last too long, so that a clock which is slower than
            the loop's does not spin it.
    """

    def __init__(self, clock: Clock, grain: float) -> None:
        self._clock = clock
        self._grain = grain
        self._rung = False
        self._resting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the rest that is under way, or else the next one."""
        self._rung = True
        self._wake()

    async def rest(self, until: Mono) -> None:
        """Wait until a moment, or until it rings."""
        loop = asyncio.get_running_loop()
        while not self._rung and (left := until - self._clock.mono()) > 0:
            self._resting = loop.create_future()
            timer = loop.call_later(max(left, self._grain), self._wake)
            try:
                await self._resting
            finally:
                timer.cancel()
        self._rung = False

    def _wake(self) -> None:
        if self._resting is not None and not self._resting.done():
            self._resting.set_result(None)


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
