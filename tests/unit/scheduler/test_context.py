"""What an action learns from its context, and what it can do with it on a thread."""

import asyncio
import inspect
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from jobsync import Invalid
from jobsync.scheduler.context import JobContext


def build(**more: Any) -> JobContext:
    """Return a context."""
    instant = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    return JobContext(job_name="report", execution_id="e1", scheduled_at=instant, **more)


def test_attributes_are_items() -> None:
    """Those of its own first: data cannot replace them."""
    context = build(data={"job_name": "other", "size": 3}, database="db", is_manual=True)
    context.mark_lost("it was late")
    names = [name for name in dir(context) if not name.startswith("_")]
    names = [name for name in names if not inspect.ismethod(getattr(context, name))]
    assert {"job_name", "lost_reason", "scheduler"} <= {*names}
    for name in names:
        assert context[name] == context.get(name, "other") == getattr(context, name)
        assert name in context
    assert context["job_name"] == context["job_id"] == "report"
    assert (context["size"], context.get("size"), context.get("color", "red")) == (3, 3, "red")
    assert context["is_manual"] is True
    assert "color" not in context
    with pytest.raises(KeyError, match="color"):
        context["color"]


def test_the_instant_is_unambiguous() -> None:
    """Also in the hour that occurs twice."""
    context = build()
    assert context.scheduled_time == 1_792_891_800.0
    assert context.scheduled_at.utcoffset() == ZoneInfo("Europe/Berlin").utcoffset(
        datetime(2026, 12, 1)  # noqa: DTZ001 - winter time
    )


def test_data_is_not_shown() -> None:
    """It may hold secrets."""
    assert "hunter2" not in repr(build(data={"password": "hunter2"}))


async def test_attempts_do_not_share_data_or_loss() -> None:
    """What an earlier attempt still does is visible to no later one."""
    data = {"size": 3}
    context = build(data=data)
    first = context.for_attempt(1)
    first.data["size"] = 4
    first.mark_lost("it was late")
    first.mark_lost("it was stopped")
    second = context.for_attempt(2)
    assert (first.lost, first.lost_reason) == (True, "it was late")
    assert (second.lost, second.lost_reason, second["size"], second.attempt) == (False, "", 3, 2)
    assert data == {"size": 3}
    context.data["size"] = 5
    assert (data, first["size"], second["size"]) == ({"size": 3}, 4, 3)
    third = first.for_attempt(3)
    assert (third.lost, third.lost_reason, third["size"], third.attempt) == (False, "", 4, 3)


async def test_a_thread_runs_coroutines_on_the_loop() -> None:
    """And gets their results and errors. Any awaitable works."""
    context = build().for_attempt(1)
    loop = asyncio.get_running_loop()

    async def work() -> object:
        return asyncio.get_running_loop()

    async def fail() -> None:
        raise LookupError("gone")

    assert await asyncio.to_thread(lambda: context.run(work())) is loop
    future = loop.create_future()
    future.set_result(5)
    assert await asyncio.to_thread(context.run, future) == 5
    with pytest.raises(LookupError, match="gone"):
        await asyncio.to_thread(lambda: context.run(fail()))

    async def call_from_another_loop() -> object:
        return context.run(work())

    assert await asyncio.to_thread(lambda: asyncio.run(call_from_another_loop())) is loop


async def test_the_loop_does_not_wait_for_itself() -> None:
    """An `async def` action awaits instead."""

    async def work() -> None:
        raise AssertionError

    with pytest.raises(Invalid, match=r"run is for plain functions .* Await the coroutine instead"):
        build().for_attempt(1).run(work())


def test_a_thread_that_outlives_the_loop_gets_an_error() -> None:
    """And nothing warns that its coroutine was not awaited."""

    async def get_context() -> JobContext:
        return build().for_attempt(1)

    async def work() -> None:
        raise AssertionError

    context = asyncio.run(get_context())
    with pytest.raises(RuntimeError, match="closed"):
        context.run(work())
