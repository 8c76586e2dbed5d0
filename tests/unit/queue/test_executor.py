"""How handlers are called, and what their ends mean."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import until

from jobsync import Invalid
from jobsync.core.messages import Cancel, Completed, Failed, Returned, Snooze
from jobsync.queue.backend import Message, Receipt
from jobsync.queue.executor import Executor, MessageHandler
from jobsync.queue.in_flight import Delivery


def with_default(task: Any, context: Any = None) -> None:
    """Take a context that has a default."""


def with_keyword(task: Any, *, verbose: bool = False) -> None:
    """Take a message alone."""


def with_three(task: Any, context: Any, depth: int = 3) -> None:
    """Take a context, and something with a default."""


@pytest.mark.parametrize(
    ("function", "takes_context"),
    [
        (lambda task: task, False),
        (lambda task, context: (task, context), True),
        (with_default, True),
        (with_keyword, False),
        (with_three, True),
        (lambda *everything: everything, True),
        (lambda task, *rest: (task, rest), True),
        (lambda task=None: task, False),
    ],
)
def test_a_handler_gets_its_context_if_there_is_a_place_for_it(
    function: Any, *, takes_context: bool
) -> None:
    """Also if that parameter has a default."""
    assert MessageHandler(function).takes_context is takes_context


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: (a, b, c), 5])
def test_a_handler_that_cannot_be_called_with_a_message_is_refused(function: Any) -> None:
    """When it is passed."""
    with pytest.raises(Invalid):
        MessageHandler(function)


def build_delivery() -> Delivery:
    """Return a message whose handler may take seven seconds."""
    message = Message(
        receipt=Receipt("id-1", 1, "claim-1"),
        value={"id": "id-1"},
        attempt=1,
        max_attempts=4,
        timeout=7.0,
        is_suspect=False,
        enqueued=0.0,
    )
    delivery = Delivery("id-1", message, {"id": "id-1"}, "me", cast("Any", 0.0))
    delivery.timeout = 7.0
    return delivery


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("result", [None, {"n": 1}, Snooze(5), Cancel("stale"), ValueError("mine")])
async def test_a_coroutine_that_ends_after_its_time_has_failed(
    result: Any, *, is_late: bool, is_plain: bool
) -> None:
    """Whatever it returns or raises then: it may have swallowed its cancellation.

    Also if a plain function has returned it.
    """
    executor = Executor(auto_acknowledge=True)
    delivery = build_delivery()

    async def handle(_: Any) -> Any:
        delivery.is_late = is_late
        if isinstance(result, Exception):
            raise result
        return result

    def handle_on_thread(message: Any) -> Any:
        return handle(message)

    executor.add("", MessageHandler(handle_on_thread if is_plain else handle))
    verdict, overrun = await executor.run(delivery)
    executor.close()
    assert overrun is None
    assert executor.functions == {}
    if is_late:
        assert isinstance(verdict, Failed)
        assert "longer than 7 s" in verdict.error
    elif isinstance(result, Exception):
        assert isinstance(verdict, Failed)
        assert verdict.cause is result
    else:
        assert verdict == (result if isinstance(result, Snooze | Cancel) else Completed(result))


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("result", [None, {"n": 1}, Snooze(5)])
async def test_a_handler_that_leaves_its_transaction_open_has_failed(
    result: Any, *, is_late: bool, is_plain: bool
) -> None:
    """What it did there is rolled back, before anything else happens to its message."""
    steps: list[str] = []

    async def abandon() -> None:
        steps.append("abandoned")

    async def handle(_: Any) -> Any:
        delivery.transaction = cast("Any", SimpleNamespace(abandon=abandon))
        delivery.is_late = is_late
        return result

    def handle_on_thread(message: Any) -> Any:
        return handle(message)

    executor = Executor(auto_acknowledge=True)
    delivery = build_delivery()
    executor.add("", MessageHandler(handle_on_thread if is_plain else handle))
    verdict, _ = await executor.run(delivery)
    executor.close()
    assert isinstance(verdict, Failed)
    if is_late:
        # Whoever has stopped it gives its transaction up.
        assert "longer than 7 s" in verdict.error
    else:
        assert "before its context.transaction() has ended" in verdict.error
        assert steps == ["abandoned"]


async def test_as_many_plain_functions_run_at_once_as_allowed() -> None:
    """However many processors there are; what one returns runs on the loop."""
    count = (os.cpu_count() or 1) + 8
    together, seen = threading.Barrier(count, timeout=60), []

    def handle(delivery: Delivery) -> Any:
        together.wait()
        on_thread = delivery.is_on_loop

        async def finish() -> None:
            seen.append((on_thread, delivery.is_on_loop))

        return finish()

    executor = Executor(auto_acknowledge=True)
    executor.add("", MessageHandler(handle))
    deliveries = [build_delivery() for _ in range(count)]
    for delivery in deliveries:
        delivery.read_data = delivery
    outcomes = await asyncio.gather(*map(executor.run, deliveries))
    executor.close()
    assert [verdict for verdict, _ in outcomes] == [Completed(None)] * count
    assert seen == [(False, True)] * count


@pytest.mark.parametrize("why", ["late", "told to stop", "lost"])
async def test_a_function_begins_in_time_or_never(why: str) -> None:
    """Its message is returned: it has not been handled, so no attempt is spent."""
    may_end, begun, called = threading.Event(), threading.Event(), list[str]()

    def occupy() -> None:
        begun.set()
        assert may_end.wait(60)

    executor, delivery = Executor(auto_acknowledge=True), build_delivery()
    executor._threads = threads = ThreadPoolExecutor(1)
    occupied = threads.submit(occupy)
    assert begun.wait(60)
    executor.add("", MessageHandler(called.append))
    running = asyncio.ensure_future(executor.run(delivery))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert list(executor.functions) == [delivery]
    if why == "lost":
        delivery.is_lost = True
    else:
        delivery.is_late = why == "late"
        running.cancel()
        assert await running == (Returned(), None)
    may_end.set()
    await asyncio.wrap_future(occupied)
    threads.shutdown()
    await asyncio.sleep(0)
    if why == "lost":
        assert await running == (Returned(), None)
    assert called == []
    assert executor.functions == {}
    executor.close()


def test_a_function_that_outlives_its_event_loop_is_forgotten_when_it_returns() -> None:
    """Nothing is left of it in the next one."""
    executor, delivery, release = (
        Executor(auto_acknowledge=True),
        build_delivery(),
        threading.Event(),
    )
    executor.add("", MessageHandler(lambda _: release.wait(60)))

    async def leave() -> None:
        task = asyncio.create_task(executor.run(delivery))
        await until(lambda: executor.functions, "it has begun")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    executor.close()
    assert list(executor.functions) == [delivery]
    release.set()
    asyncio.run(until(lambda: not executor.functions, "it has returned"))


async def test_a_function_whose_thread_cannot_be_started_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine may have too many threads for a moment."""
    executor = Executor(auto_acknowledge=True)
    executor.add("", MessageHandler(lambda _: None))

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            await executor.run(build_delivery())
    assert executor.functions == {}
