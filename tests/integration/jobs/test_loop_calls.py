"""Calls on a loop from elsewhere: callers get their results, or an error if the loop has ended."""

import asyncio
import os
import select
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
from waiting import until

from jobsync.errors import Unavailable
from jobsync.loop_calls import Background, LoopCalls, _PendingCall, _WakeupPipe

LONG = 30.0


def _build_error() -> Unavailable:
    return Unavailable("the job", "was left meanwhile", "enter again")


@pytest.fixture
def background() -> Iterator[Background]:
    """A running loop."""
    loop = Background("test", _build_error)
    yield loop
    loop.stop()


def test_a_caller_gets_the_result(background: Background) -> None:
    """The coroutine runs on the loop's own thread."""

    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert background.call(work()) == "test"


@pytest.mark.parametrize("error", [KeyError("a"), TimeoutError("late"), SystemExit(3)])
def test_a_caller_gets_the_error(background: Background, error: BaseException) -> None:
    """Unchanged, even if it would end a loop."""

    async def work() -> None:
        raise error

    async def go_on() -> bool:
        return True

    with pytest.raises(type(error)) as raised:
        background.call(work())
    assert raised.value is error
    assert background.call(go_on())


def test_a_waiting_caller_gets_an_error_when_the_loop_stops(background: Background) -> None:
    """It does not wait forever."""
    threading.Timer(0.05, background.stop).start()
    with pytest.raises(Unavailable, match="was left meanwhile"):
        background.call(asyncio.Event().wait())


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_that_never_started_gets_an_error(background: Background, goes_on: bool) -> None:
    """Cancelled before its first step: by the end of the loop, or by its caller.

    There is no warning about a coroutine that was never awaited, and nothing is kept of it.
    """

    async def work() -> None:
        """Do nothing."""

    pipe = _WakeupPipe()
    call = _PendingCall(work(), pipe.wake)
    calls = background._calls

    def start_too_late() -> None:
        calls._start(call)
        calls._running[call].cancel()

    background.post(start_too_late)
    if not goes_on:
        background.stop()
    ready, _, _ = select.select([pipe.reader], [], [], LONG)
    assert ready
    with pytest.raises(Unavailable, match="was left meanwhile"):
        calls._get_result(call)
    assert calls._running == {}


def test_a_call_that_came_too_late_gets_an_error(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has ended after the caller checked it."""

    async def work() -> None:
        """Do nothing."""

    background.stop()
    monkeypatch.setattr(background._thread, "is_alive", lambda: True)
    with ThreadPoolExecutor(1) as caller, pytest.raises(Unavailable, match="was left meanwhile"):
        caller.submit(background.call, work()).result(LONG)


class Broken(SystemExit):
    """Ends a loop, and not only the callback that raises it."""


def _break() -> None:
    raise Broken


async def _fail_at_close() -> None:
    try:
        await asyncio.Event().wait()
    except GeneratorExit as error:
        raise ValueError("it cannot clean up") from error


def _call_in_thread(
    background: Background, work: Coroutine[Any, Any, object], errors: list[Exception]
) -> None:
    def call() -> None:
        try:
            background.call(work)
        except Exception as error:  # noqa: BLE001 - the test compares it
            errors.append(error)

    threading.Thread(target=call, daemon=True).start()


@pytest.mark.parametrize("failing", ["run_until_complete", "_cancel_running", "close"])
async def test_every_caller_gets_an_error_however_the_loop_ends(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Those whose calls run or fail at their end, and those that wait for a loop that is busy."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    background = Background("test", _build_error)
    loop, calls, errors = background._loop, background._calls, list[Exception]()
    close_loop, is_busy, may_end = loop.close, threading.Event(), threading.Event()

    def end() -> None:
        is_busy.set()
        may_end.wait(LONG)
        (_break if failing == "run_until_complete" else background._is_stopping.set)()

    if failing != "run_until_complete":
        monkeypatch.setattr(loop if failing == "close" else background, failing, _break)
    works = [_fail_at_close(), asyncio.Event().wait(), asyncio.Event().wait()]
    for work in works[:-1]:
        _call_in_thread(background, work, errors)
    await until(lambda: len(calls._running) == 2, "both calls run", LONG)
    background.post(end)
    assert is_busy.wait(LONG)
    _call_in_thread(background, works[-1], errors)
    await until(lambda: bool(calls._queued), "the third call waits", LONG)
    may_end.set()
    await until(lambda: len(errors) == len(works), "all callers have an error", LONG)
    assert {type(error) for error in errors} == {Unavailable}
    background._thread.join(LONG)
    await asyncio.to_thread(Background._cancel_running, background)
    close_loop()


async def test_a_loop_that_is_woken_twice_for_one_call_goes_on() -> None:
    """As one that was interrupted between the two. Found: it waited for another call for ever."""
    background = Background("test", _build_error)
    calls = background._calls

    def start_twice() -> None:
        calls._start_calls()
        calls._start_calls()

    background.post(background._loop.remove_reader, calls._pipe.reader)
    call = asyncio.create_task(calls.run(asyncio.sleep(0, "done")))
    await until(lambda: calls._queued, "the call waits", LONG)
    background.post(start_twice)
    done, _ = await asyncio.wait([call], timeout=LONG)
    calls._pipe.wake()
    await asyncio.to_thread(background.stop)
    assert [task.result() for task in done] == ["done"]


def test_every_caller_gets_its_own_result(background: Background) -> None:
    """With many calls at once, whichever ends first."""

    async def work(number: int) -> int:
        for _ in range(number % 5):
            await asyncio.sleep(0)
        return number

    with ThreadPoolExecutor(8) as callers:
        found = callers.map(lambda number: background.call(work(number)), range(400))
        assert list(found) == list(range(400))
    assert len(background._calls._idle_pipes) <= 8


def test_an_interrupted_caller_leaves_no_wakeup_to_others(background: Background) -> None:
    """Its call ends later and wakes no other caller."""
    may_end = threading.Event()

    async def end_late() -> str:
        await asyncio.to_thread(may_end.wait)
        return "late"

    async def work() -> str:
        return "mine"

    class Signalled(Exception):
        """What a signal handler raises."""

    class Interrupted(_WakeupPipe):
        def wait(self, _seconds: float) -> bool:
            raise Signalled

    background._calls._idle_pipes.append(Interrupted())
    with pytest.raises(Signalled):
        background.call(end_late())
    may_end.set()
    assert [background.call(work()) for _ in range(20)] == ["mine"] * 20


def test_an_interrupted_call_is_cancelled(background: Background) -> None:
    """Its caller goes on at once, and the work ends soon after."""
    started, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    class Interrupted(_WakeupPipe):
        def wait(self, _seconds: float) -> bool:
            assert started.wait(LONG)
            raise KeyboardInterrupt

    background._calls._idle_pipes.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        background.call(wait())
    assert cancelled.wait(LONG)


def test_a_call_that_was_interrupted_before_its_start_never_runs(background: Background) -> None:
    """The loop is busy meanwhile."""
    may_go_on, started = threading.Event(), threading.Event()

    async def start() -> None:
        started.set()

    async def go_on() -> bool:
        return True

    class Interrupted(_WakeupPipe):
        def wait(self, _seconds: float) -> bool:
            raise KeyboardInterrupt

    background.post(may_go_on.wait)
    background._calls._idle_pipes.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        background.call(start())
    may_go_on.set()
    assert background.call(go_on())
    assert not started.is_set()


async def test_a_task_of_another_loop_gets_the_result(background: Background) -> None:
    """Its own loop runs meanwhile; it sees the context of its caller."""
    calls, seen = background._calls, ContextVar("seen", default=0)
    seen.set(7)

    async def work() -> tuple[str, int]:
        await asyncio.sleep(0)
        return threading.current_thread().name, seen.get()

    async def fail() -> None:
        raise KeyError("a")

    assert {*await asyncio.gather(calls.run(work()), calls.run(work()))} == {("test", 7)}
    with pytest.raises(KeyError):
        await calls.run(fail())


async def test_a_cancelled_task_ends_after_its_call(background: Background) -> None:
    """As on one loop: what it awaits has been cancelled, and has cleaned up."""
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    task = asyncio.create_task(background._calls.run(work()))
    await asyncio.to_thread(started.wait, LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_the_end_of_calls_fails_those_that_wait() -> None:
    """Whoever comes later gets the error at once."""
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop, _build_error)
    waiting = asyncio.create_task(calls.run(asyncio.sleep(0)))
    await asyncio.sleep(0)
    calls.end()
    loop.close()
    for call in (waiting, calls.run(asyncio.sleep(0))):
        with pytest.raises(Unavailable, match="was left meanwhile"):
            await call


def test_a_stopped_loop_refuses_calls(background: Background) -> None:
    """It raises at once."""

    async def work() -> None:
        """Do nothing."""

    background.stop()
    with pytest.raises(Unavailable, match="Enter again"):
        background.call(work())


def test_several_threads_may_stop_it_at_once(background: Background) -> None:
    """As a signal handler and the end of the block do; running calls end first."""
    ended = threading.Event()

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    call = _PendingCall(end_slowly(), lambda: None)
    background.post(background._calls._start, call)
    threads = [threading.Thread(target=background.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended.is_set()
    assert background._loop.is_closed()


def test_a_forked_child_gets_an_error_at_once(background: Background) -> None:
    """It does not have the thread, and the parent's loop continues undisturbed."""

    async def work() -> int:
        return 1

    child = os.fork()
    if child == 0:
        try:
            background.call(work())
        except Unavailable:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert background.call(work()) == 1
