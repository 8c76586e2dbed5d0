"""Members on threads of their own, and waiting for the first of several coroutines."""

import asyncio
import gc
import threading
from typing import Any

import pytest
from chance import FakeClock
from waiting import until

from jobsync.coordination.events import WorkerHeartbeat
from jobsync.coordination.runner import HomeEvents, OwnThread, SameLoop, Wakeup, listening
from jobsync.errors import Misconfigured, Unavailable
from jobsync.events import Event, Events


async def test_a_change_while_the_block_runs_counts() -> None:
    """No change is missed between a read and the wait after it."""
    hint = asyncio.Event()

    async def wait() -> None:
        # Like a store that notifies only those already waiting.
        hint.clear()
        await hint.wait()

    async with asyncio.timeout(10), listening(wait()) as wait_for_change:
        hint.set()
        assert await wait_for_change(60)


async def test_a_timeout_ends_the_wait() -> None:
    """Without a change the wait ends after its timeout, and no task is left."""
    waits = asyncio.Event()
    before = asyncio.all_tasks()
    async with listening(waits.wait(), waits.wait()) as wait_for_change:
        assert not await wait_for_change(0.001)
    assert asyncio.all_tasks() == before


async def test_an_error_is_raised_where_the_block_waits() -> None:
    """It is raised as it is, not in an exception group."""

    async def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        async with listening(fail(), asyncio.Event().wait()) as wait_for_change:
            await wait_for_change(60)


async def test_an_error_in_the_block_ends_all_waits() -> None:
    """No task is left."""
    before = asyncio.all_tasks()
    with pytest.raises(KeyError):
        async with listening(asyncio.Event().wait()):
            raise KeyError
    assert asyncio.all_tasks() == before


async def test_a_block_that_is_cancelled_again_ends_all_waits() -> None:
    """No task is left, though the first cancellation was still being carried out."""
    started, ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    before = asyncio.all_tasks()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    async def listen() -> None:
        async with listening(wait()) as wait_for_change:
            await wait_for_change(60)

    task = asyncio.create_task(listen())
    await started.wait()
    task.cancel()
    await ending.wait()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.01)
    assert not done
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


async def test_an_error_that_nobody_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The block has ended: what it waited for does not matter any more."""

    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    async with listening(fail()):
        pass
    gc.collect()
    assert not caplog.records


async def test_a_closed_block_waits_for_nothing_more() -> None:
    """When a program or a simulated world ends, nothing resumes the block."""
    hint = asyncio.Event()
    before = asyncio.all_tasks()

    async def listen() -> None:
        async with listening(hint.wait()) as wait_for_change:
            await wait_for_change(60)

    listener = listen()
    # By hand: a task would close it only when it is garbage-collected.
    listener.send(None)
    await asyncio.sleep(0)
    waits = asyncio.all_tasks() - before
    listener.send(None)
    listener.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.gather(*waits)


async def test_a_call_just_after_the_thread_s_loop_has_ended_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: it raised "Event loop is closed", because the thread had not reported its end yet."""
    ends, reports = asyncio.Event(), threading.Event()
    thread, report = OwnThread(), OwnThread.post_home

    async def live() -> None:
        await ends.wait()

    def report_later(host: OwnThread, *call: Any) -> None:
        reports.wait()
        report(host, *call)

    async def work() -> None:
        raise AssertionError("the loop is closed")

    monkeypatch.setattr(OwnThread, "post_home", report_later)
    thread.start(live)
    thread.post(ends.set)
    await until(thread._loop.is_closed, "the loop is closed")
    call = asyncio.create_task(thread.call(work))
    await asyncio.sleep(0)
    reports.set()
    with pytest.raises(Unavailable, match=r"the session.*it has ended"):
        await call
    gc.collect()


async def test_a_call_that_is_cancelled_and_then_fails_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found: "exception was never retrieved" was logged, although its caller had given it up."""
    host, may_fail = SameLoop(), asyncio.Event()

    async def live() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        await may_fail.wait()
        raise Unavailable("store", "no reply arrived")

    host.start(live)
    call = asyncio.create_task(host.call(fail))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    may_fail.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    host.cancel()
    del call
    gc.collect()
    assert caplog.messages == []


async def is_over(wait: "asyncio.Task[None]") -> bool:
    """Whether a wait has ended, or is about to."""
    for _ in range(5):
        await asyncio.sleep(0)
    return wait.done()


async def test_a_wakeup_ends_one_wait() -> None:
    """The current one, or else the next: the one after that lasts, however often it was set."""
    clock = FakeClock()
    wakeup = Wakeup(clock, 1.0)
    for is_early in (True, False, False, True, True):
        if is_early:
            wakeup.set()
            wakeup.set()
        wait = asyncio.create_task(wakeup.wait(clock.mono() + 3600))
        assert await is_over(wait) is is_early
        if not is_early:
            wakeup.set()
            assert await is_over(wait)
    wait = asyncio.create_task(wakeup.wait(clock.mono() + 3600))
    assert not await is_over(wait)
    wait.cancel()


@pytest.mark.parametrize("late", [0.0, 1.0])
async def test_a_wait_until_now_is_over(late: float) -> None:
    """And what was set before does not end the next one."""
    clock = FakeClock()
    wakeup = Wakeup(clock, 1.0)
    wakeup.set()
    await wakeup.wait(clock.mono() + -late)
    await wakeup.wait(clock.mono() + -late)
    wait = asyncio.create_task(wakeup.wait(clock.mono() + 3600))
    assert not await is_over(wait)
    wait.cancel()


async def test_a_wait_lasts_as_long_as_its_own_clock_says() -> None:
    """The loop's timers may be quicker."""
    clock = FakeClock()
    wakeup = Wakeup(clock, 0.001)
    wait = asyncio.create_task(wakeup.wait(clock.mono() + 0.002))
    await asyncio.sleep(0.01)
    assert not wait.done()
    clock.mono_seconds += 0.002
    async with asyncio.timeout(60):
        await wait


@pytest.mark.parametrize("kind", [SameLoop, OwnThread])
async def test_events_of_a_member_come_home_in_order(kind: type[SameLoop | OwnThread]) -> None:
    """However many are emitted at once; on the home loop's thread."""
    host, home, may_end = kind(), Events(), threading.Event()
    member = HomeEvents(host, home)
    told: list[tuple[Event, int]] = []
    home.on("coord:*", lambda event: told.append((event, threading.get_ident())))
    events = [WorkerHeartbeat(worker_id="w", timestamp=number) for number in range(5)]

    async def main() -> None:
        for event in events:
            member.emit(event)
        await asyncio.to_thread(may_end.wait)

    host.start(main)
    await until(lambda: len(told) == 5, "all have come")
    may_end.set()
    await host.finish()
    assert told == [(event, threading.get_ident()) for event in events]


async def test_a_forked_child_has_no_member() -> None:
    """Whatever it asks of the thread, which it does not have, is refused."""
    host, may_end = OwnThread(), threading.Event()

    async def main() -> None:
        await asyncio.to_thread(may_end.wait)

    host.start(main)
    parent, host._process = host._process, -1
    refused = pytest.raises(Misconfigured, match="was joined before a fork")
    with refused:
        host.post(print)
    with refused:
        host.cancel()
    with refused:
        await host.call(main)
    try:
        with refused:
            await asyncio.wait_for(host.finish(), 1)
    finally:
        host._process = parent
        may_end.set()
    await host.finish()
