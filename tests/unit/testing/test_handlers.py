"""Tests of handlers without a queue, and of what a program has enqueued."""

import datetime as dt
from typing import Any

import pytest

from jobsync import BlockingContext, Context, Database, Invalid, QueuePlugin
from jobsync.core.messages import Completed, Failed
from jobsync.testing import assert_enqueued, blocking_context, context, handlers


async def test_a_context_records_what_a_handler_does_with_it() -> None:
    """Whether it is a coroutine function or a plain one; a transaction needs a queue."""
    own: Context = (recorded := context(id="m", attempt=3, timeout=9))
    assert (own.id, own.attempt, own.max_attempts, own.lost) == ("m", 3, 4, False)
    assert own.deadline is not None
    own.progress(0.5, "half")
    assert await own.extend(5)
    assert await own.ack({"a": 1})
    assert await own.nack("no")
    blocking: BlockingContext = (plain := blocking_context(attempt=2))
    blocking.progress(0.5, "half")
    assert blocking.extend(5)
    assert blocking.ack({"a": 1})
    assert blocking.nack("no")
    assert blocking.attempt == 2
    for each in (recorded, plain):
        assert each.reports == [(0.5, "half")]
        assert each.extensions == [5]
        assert each.verdicts == [Completed({"a": 1}), Failed("no")]
    with pytest.raises(Invalid, match="transaction is not possible without a queue"):
        own.transaction()


async def test_what_was_enqueued_is_found_by_some_of_its_arguments() -> None:
    """As they were passed; an error lists what there is instead."""
    queue = QueuePlugin("tasks")
    noon = dt.datetime(2027, 1, 31, 12, tzinfo=dt.UTC)

    @queue.task
    async def run(at: dt.datetime, n: int = 0) -> None:
        del at, n

    @queue.task
    async def other(n: int) -> None:
        del n

    async with Database("memory://enqueued", plugins=[queue]):
        queue.pause()
        await run.enqueue(noon, n=1)
        later = await run.with_options(delay=60).enqueue(noon, n=2)
        await other.enqueue(3)
        assert (await assert_enqueued(run, at=noon, n=2)).id == later.id
        assert (await assert_enqueued(run)).value["n"] == 1
        with pytest.raises(AssertionError, match=r"run with \{'n': 3\} is enqueued; there are 2: "):
            await assert_enqueued(run, n=3)
        with pytest.raises(Invalid, match="nn is not a parameter"):
            await assert_enqueued(run, nn=3)


def test_a_context_has_the_facts_that_it_was_given() -> None:
    """Each of them, and a default for each; two contexts record apart."""
    facts: dict[str, Any] = {"id": "m", "attempt": 2, "max_attempts": 3, "worker_id": "w"}
    for build in (context, blocking_context):
        given, plain = build(**facts, timeout=9.0), build()
        assert {name: getattr(given, name) for name in facts} == facts
        assert (plain.id, plain.attempt, plain.max_attempts) == ("message-1", 1, 4)
        assert plain.worker_id == "test"
        assert plain.deadline is None
        assert given.deadline is not None
        assert (plain.reports, plain.extensions, plain.verdicts) == ([], [], [])


async def test_only_some_of_many_calls_are_listed() -> None:
    """With their number; a task that was never called has none."""
    queue = QueuePlugin("tasks")

    @queue.task
    async def run(n: int) -> None:
        del n

    async with Database("memory://listed", plugins=[queue]):
        queue.pause()
        with pytest.raises(AssertionError, match=r"there are 0: none$"):
            await assert_enqueued(run)
        for number in range(7):
            await run.enqueue(number)
        with pytest.raises(AssertionError, match=r"there are 7: (\{'n': \d\}(, )?){5}$"):
            await assert_enqueued(run, n=9)


@pytest.mark.parametrize("wanted", range(5))
async def test_a_call_is_found_among_more_than_one_page(
    monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    """Of this task and of others."""
    monkeypatch.setattr(handlers, "_PAGE", 2)
    queue = QueuePlugin("tasks")

    @queue.task
    async def run(n: int) -> None:
        del n

    @queue.task
    async def other(n: int) -> None:
        del n

    async with Database(f"memory://paged-{wanted}", plugins=[queue]):
        queue.pause()
        for number in range(5):
            await other.enqueue(number)
            await run.enqueue(number)
        assert (await assert_enqueued(run, n=wanted)).value == {"n": wanted}
        with pytest.raises(AssertionError, match="there are 5: "):
            await assert_enqueued(run, n=9)
