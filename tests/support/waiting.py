"""Wait in a test until something holds, never for a fixed time."""

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from jobsync.testing import InvariantBroken, Violation

__all__ = ["TIMEOUT", "check_all", "now", "until"]

T = TypeVar("T")

TIMEOUT = 120.0
"""Seconds after which a test gives up. Nothing promises to be this fast or slow."""

_INTERVAL = 0.02

now = time.monotonic
"""The clock that all processes of a machine share."""


async def until(
    holds: Callable[[], object],
    what: str = "it holds",
    timeout: float = TIMEOUT,
    *,
    interval: float = _INTERVAL,
    invariant: str = "",
) -> None:
    """Wait until something holds, by the time of the running loop, which may be virtual.

    Args:
        holds: returns whether it does, at once or as a coroutine.
        what: completes the sentence "waited in vain until".
        timeout: seconds to wait at most.
        interval: seconds between two checks.
        invariant: the promise that is broken if it does not come to hold; none by default.

    Raises:
        AssertionError: it did not hold in time; `InvariantBroken` if that is a promise.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        result = holds()
        if await result if inspect.isawaitable(result) else result:
            return
        if loop.time() >= deadline:
            problem = f"waited {timeout:g} s in vain until {what}"
            raise (
                InvariantBroken(Violation(invariant, problem))
                if invariant
                else AssertionError(problem)
            )
        await asyncio.sleep(interval)


async def check_all(check: Callable[[T], Coroutine[Any, Any, None]], cases: Iterable[T]) -> None:
    """Check cases that mostly wait, side by side; an error tells its case."""

    async def check_one(case: T) -> None:
        try:
            await check(case)
        except Exception as error:
            error.add_note(f"in the case {case!r}")
            raise

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(check_one(case))
