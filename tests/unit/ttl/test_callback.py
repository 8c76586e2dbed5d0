"""Callbacks for expired records: whatever they do, every record gets a verdict."""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any, cast

import pytest
from waiting import until

from jobsync import Document, Record, Resource
from jobsync.ttl.callback import MAX_ENDLESS, ExpiryCallback, find_calling_callback

RESOURCE = cast("Resource", object())


def make_records(count: int) -> list[Document]:
    """Return expired records."""
    return [
        Document(Record(f"data/a/{n}", {"id": str(n), "n": n}, "v", 1, 0, 1, ""))
        for n in range(count)
    ]


def keep_odd(record: Any, resource: Any) -> bool:
    """Delete even ones."""
    assert resource is RESOURCE
    return bool(record.n % 2 == 0)


async def keep_odd_later(record: Any, resource: Any) -> bool:
    """Delete even ones, on the loop."""
    await asyncio.sleep(0)
    return keep_odd(record, resource)


async def keep_nested(record: Any, resource: Any) -> Any:
    """Return something to await."""
    return keep_odd_later(record, resource)


def keep_nested_plainly(record: Any, resource: Any) -> Any:
    """Return something to await, from a thread."""
    return keep_odd_later(record, resource)


@pytest.mark.parametrize("function", [keep_odd, keep_odd_later, keep_nested, keep_nested_plainly])
async def test_true_deletes_and_false_keeps(function: Any) -> None:
    """A plain function runs on a thread, and there may be more records than slots."""
    verdicts = await ExpiryCallback(function).ask(make_records(35), RESOURCE)
    assert verdicts == [n % 2 == 0 for n in range(35)]


@pytest.mark.parametrize("result", [None, 1, 0, "True", [], object])
async def test_anything_but_a_boolean_keeps_the_record(result: Any) -> None:
    """And is reported."""
    (verdict,) = await ExpiryCallback(lambda *_: result).ask(make_records(1), RESOURCE)
    assert str(verdict).startswith("the callback must return True to delete or False to keep (got ")


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), asyncio.CancelledError(), StopIteration(1)]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_concerns_one_record(error: BaseException, *, is_async: bool) -> None:
    """The others are asked about all the same."""

    def fail(record: Any, _: Any) -> bool:
        if record.n == 1:
            raise error
        return True

    async def fail_later(record: Any, resource: Any) -> bool:
        return fail(record, resource)

    callback = ExpiryCallback(fail_later if is_async else fail)
    verdicts = await callback.ask(make_records(3), RESOURCE)
    assert [verdicts[0], verdicts[2]] == [True, True]
    assert str(verdicts[1]).startswith("the callback raised ")
    assert not callback.is_running


async def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    """Its slot is free again, so the others are asked."""

    async def hang(record: Any, _: Any) -> bool:
        if record.n < 20:
            await asyncio.Event().wait()
        return True

    callback = ExpiryCallback(hang, timeout=0.05)
    verdicts = await callback.ask(make_records(25), RESOURCE)
    assert verdicts[:20] == ["the callback has not returned after 0.05 s"] * 20
    assert verdicts[20:] == [True] * 5
    assert not callback.is_running


async def test_a_late_answer_does_not_count() -> None:
    """A coroutine that ignores its cancellation and says True keeps the record."""

    async def ignore(*_: Any) -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return True
        return False

    (verdict,) = await ExpiryCallback(ignore, timeout=0.05).ask(make_records(1), RESOURCE)
    assert verdict == "the callback has not returned after 0.05 s"


async def test_an_answer_after_the_loop_was_blocked_for_too_long_does_not_count() -> None:
    """Nobody could interrupt the callback, but its time was over."""

    async def block(*_: Any) -> bool:
        time.sleep(0.2)  # noqa: ASYNC251 - what the user did
        return True

    (verdict,) = await ExpiryCallback(block, timeout=0.15).ask(make_records(1), RESOURCE)
    assert verdict == "the callback has not returned after 0.15 s"


class Blocking:
    """A callback that blocks for some records until it is released."""

    def __init__(self, blocked: int) -> None:
        self.blocked = blocked
        self.asked: list[int] = []
        self.release = threading.Event()

    def __call__(self, record: Any, _: Any) -> bool:
        self.asked.append(record.n)
        if record.n < self.blocked:
            self.release.wait(60)
        return True


async def test_functions_that_never_return_stop_none_of_the_others() -> None:
    """Found: ten of them occupied all slots for ever. A record has one call at a time."""
    # Long enough for the threads of the others to be scheduled.
    block = Blocking(25)
    callback = ExpiryCallback(block, timeout=0.5)
    verdicts = await callback.ask(make_records(40), RESOURCE)
    assert verdicts[:25] == ["the callback has not returned after 0.5 s"] * 25
    assert verdicts[25:] == [True] * 15
    verdicts = await callback.ask(make_records(40), RESOURCE)
    assert verdicts[:25] == ["a call that exceeded 0.5 s has not returned yet"] * 25
    assert verdicts[25:] == [True] * 15
    assert len(block.asked) == 40 + 15
    block.release.set()
    await until(lambda: not callback.is_running, "the functions return")
    callback.timeout = 60.0
    assert await callback.ask(make_records(2), RESOURCE) == [True, True]


async def test_functions_that_never_return_are_not_called_without_limit() -> None:
    """Each has a thread. When they return, all are asked again."""
    block = Blocking(MAX_ENDLESS + 50)
    callback = ExpiryCallback(block, timeout=0.01)
    verdicts = await callback.ask(make_records(MAX_ENDLESS + 60), RESOURCE)
    assert callback.has_room is False
    assert MAX_ENDLESS <= len(block.asked) <= MAX_ENDLESS + 10
    assert verdicts[-1] == f"more than {MAX_ENDLESS} calls that exceeded 0.01 s go on"
    block.release.set()
    await until(lambda: not callback.is_running, "the functions return")
    callback.timeout = 60.0
    assert await callback.ask(make_records(2), RESOURCE) == [True, True]


async def test_calls_under_way_take_no_room_from_each_other() -> None:
    """Each counts once, although it has a task and a thread."""
    ten_asked, last_asked = threading.Barrier(10), threading.Event()

    def meet(record: Any, _: Any) -> bool:
        if record.n == 10:
            last_asked.set()
            return True
        ten_asked.wait(60)
        # One ends, and makes room for the last one, while the others go on.
        return record.n == 0 or last_asked.wait(10)

    callback = ExpiryCallback(meet)
    endless: dict[object, str] = {object(): f"endless {n}" for n in range(MAX_ENDLESS - 1)}
    callback._calls.update(endless)
    assert await callback.ask(make_records(11), RESOURCE) == [True] * 11
    assert callback._calls == endless
    assert not callback._tasks


def hold(callback: ExpiryCallback) -> None:
    """Ask about a record in an event loop that is closed before the callback has returned."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(callback.ask(make_records(1), RESOURCE))
    while not callback.is_running:
        loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    assert callback.is_running
    loop.close()


def test_a_function_that_outlives_its_event_loop_is_asked_again_once_it_has_returned() -> None:
    """Also in the next event loop; until then the record has one call at a time."""
    block = Blocking(1)
    callback = ExpiryCallback(block)
    hold(callback)
    assert asyncio.run(callback.ask(make_records(2), RESOURCE)) == [
        "a call that exceeded 60 s has not returned yet",
        True,
    ]
    block.release.set()
    asyncio.run(until(lambda: not callback.is_running, "the function has returned"))
    assert asyncio.run(callback.ask(make_records(1), RESOURCE)) == [True]
    assert block.asked == [0, 1, 0]


def test_a_coroutine_ends_with_its_event_loop() -> None:
    """Even if it refuses to: the record is asked about in the next one."""
    asked: list[int] = []

    async def refuse(record: Any, _: Any) -> bool:
        asked.append(record.n)
        while len(asked) == 1:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return True

    callback = ExpiryCallback(refuse)
    hold(callback)
    for task in callback._tasks:
        # Otherwise it is logged that nobody will end it.
        cast("Any", task)._log_destroy_pending = False
    assert not callback.is_running
    assert asyncio.run(callback.ask(make_records(1), RESOURCE)) == [True]
    assert asked == [0, 0]


async def test_a_record_whose_thread_cannot_be_started_is_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine may have too many threads for a moment."""
    callback = ExpiryCallback(lambda *_: True)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        (verdict,) = await callback.ask(make_records(1), RESOURCE)
        assert "can't start new thread" in str(verdict)
    assert not callback.is_running
    assert await callback.ask(make_records(1), RESOURCE) == [True]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_callback_can_be_recognised_as_the_caller(*, is_async: bool) -> None:
    """So that it can stop its own plugin without waiting for itself."""
    found: list[Any] = []

    def look(*_: Any) -> bool:
        found.append(find_calling_callback())
        return True

    async def look_later(*_: Any) -> bool:
        return look()

    callback = ExpiryCallback(look_later if is_async else look)
    await callback.ask(make_records(1), RESOURCE)
    assert found == [callback]
    assert find_calling_callback() is None


async def test_a_cancelled_sweep_cancels_its_calls() -> None:
    """Nothing goes on behind its back."""
    started: list[bool] = []
    ended: list[bool] = []

    async def hang(*_: Any) -> bool:
        started.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return True

    callback = ExpiryCallback(hang)
    asking = asyncio.create_task(callback.ask(make_records(3), RESOURCE))
    await until(lambda: len(started) == 3, "all are asked")
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await until(lambda: not callback.is_running, "the calls end")
    assert ended == [True] * 3
