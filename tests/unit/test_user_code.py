"""A coroutine function in its own context behaves in all else as if it were awaited."""

import asyncio
from contextvars import ContextVar

import pytest

from jobsync.user_code import run_in_own_context

_mark: ContextVar[str] = ContextVar("mark", default="")


async def test_its_variables_are_visible_below_and_not_after() -> None:
    """Also after it has waited, and in the tasks that it creates."""

    async def look() -> str:
        return _mark.get()

    async def work() -> list[str]:
        seen = [_mark.get()]
        _mark.set("inner")
        await asyncio.sleep(0)
        return [*seen, _mark.get(), await asyncio.create_task(look())]

    _mark.set("outer")
    assert await run_in_own_context(work) == ["outer", "inner", "inner"]
    assert _mark.get() == "outer"


async def test_it_runs_in_the_callers_task() -> None:
    """Scopes that cancel their task cancel the right one."""

    async def work() -> asyncio.Task[None] | None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(3600)
        return asyncio.current_task()

    assert await run_in_own_context(work) is asyncio.current_task()


async def test_its_errors_are_raised() -> None:
    """At once, or after it has waited."""

    async def work(waits: object) -> None:
        if waits:
            await asyncio.sleep(0)
        raise LookupError("gone")

    for waits in (False, True):
        with pytest.raises(LookupError, match="gone"):
            await run_in_own_context(work, waits)


async def test_it_can_handle_a_cancellation() -> None:
    """It is raised where it waits, within its own context, and it may continue."""
    cancelled_in: list[str] = []

    async def work() -> str:
        _mark.set("inner")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled_in.append(_mark.get())
        await asyncio.sleep(0)
        return "done"

    async def run() -> str:
        return await run_in_own_context(work)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
    assert cancelled_in == ["inner"]
    assert task.result() == "done"


async def test_it_cleans_up_when_it_is_closed() -> None:
    """As any coroutine that is closed while it waits."""
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            closed.append("yes")

    async def run() -> None:
        await run_in_own_context(work)

    running = run()
    running.send(None)
    running.close()
    assert closed == ["yes"]


async def test_any_awaitable_works() -> None:
    """A function may return an awaitable that is not a coroutine."""

    def work() -> asyncio.Future[str]:
        _mark.set("inner")
        return asyncio.ensure_future(asyncio.sleep(0, _mark.get()))

    assert await run_in_own_context(work) == "inner"
    assert _mark.get() == ""
